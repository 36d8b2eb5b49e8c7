"""What the connector reads of vLLM's SchedulerOutput, a step's plan."""


def scheduled(output):
    """(request's id, its tokens that are computed by now, its new blocks as vLLM has them, or None) of each request. A
    new one has its blocks from its allocation. In the order in which vLLM has scheduled them: what an earlier one
    computes in this step a later one may have in its prefix."""
    requests = {request.req_id: (request.num_computed_tokens, None) for request in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    requests.update(zip(cached.req_ids, zip(cached.num_computed_tokens, cached.new_block_ids)))
    for req_id in {**output.num_scheduled_tokens, **requests}:
        if req_id in requests:
            yield req_id, *requests[req_id]


def preempted(output):
    """Ids of requests."""
    return getattr(output, "preempted_req_ids", None) or ()


def new_blocks(output, block_tokens):
    """Blocks that vLLM has given to requests for this step, and to nobody before it. What a request has computed
    already, or another one for it, keeps its content."""
    new = set()
    for request in output.scheduled_new_reqs:
        new.update(request.block_ids[0][request.num_computed_tokens // block_tokens :])
    cached = output.scheduled_cached_reqs
    for req_id, n_computed, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids):
        # Resumed ones tell all blocks that they have.
        n_kept = n_computed // block_tokens if req_id in cached.resumed_req_ids else 0
        new.update(blocks[0][n_kept:] if blocks else ())
    return new
