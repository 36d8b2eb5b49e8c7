"""Which of a prompt's tokens a step completes, to be saved: whole chunks, and at the prompt's end a short one.

Whether a request may be saved at all, the scheduler's side says (cachegen.vllm.scheduler).
"""

from cachegen.vllm.admission import Admission
from cachegen.vllm.messages import SavePlan


def n_blocks(n_tokens, block_tokens):
    return -(-n_tokens // block_tokens)


class SavePlanner:
    def __init__(self, library, provenance):
        self._library, self._provenance = library, provenance
        self.admission = Admission(library.chunk_tokens, library.save_on_use)
        self._n_planned = 0

    def plan(self, scheduler_output, req_id, state, n_computed, n_after):
        """A SavePlan, or None, of a step in which a request that may be saved (a RequestState) goes from n_computed
        tokens to n_after. Moves its saved_to and saved_last on."""
        chunk_tokens, block_tokens = self._library.chunk_tokens, self._library.block_tokens
        n_prompt = len(state.tokens)
        block_ids = None
        if state.saved_to is None:
            block_ids = scheduler_output.kv_connector_block_state.get_block_ids(req_id)[0]
            state.saved_to = n_computed // chunk_tokens * chunk_tokens
            begun = block_ids[state.saved_to // block_tokens : n_blocks(n_computed, block_tokens)]
            if self._provenance.any_lossily_loaded(begun):
                # The chunk at hand is partly loaded at a lossy level: not encoded again, nor what follows it.
                state.saved_to = n_prompt
        if state.admitted_tokens is None:
            n_admitted = self.admission.use(state.tokens, state.salt, state.extra)
            state.admitted_tokens = min(n_admitted, state.storable_tokens)
        n_after = min(n_after, state.admitted_tokens)
        is_last = n_after >= n_prompt
        unit = self._library.tail_tokens if is_last else chunk_tokens
        to_token = max(state.saved_to, min(n_after, n_prompt) // unit * unit)
        state.saved_last = is_last
        from_token, state.saved_to = state.saved_to, to_token
        if is_last and from_token >= to_token:  # only the name is left to publish
            from_token = to_token = n_prompt // unit * unit
            if state.options.context is None or to_token == 0:  # shorter than any chunk: there is nothing to name
                return None
        elif from_token >= to_token:
            return None
        if block_ids is None:
            block_ids = scheduler_output.kv_connector_block_state.get_block_ids(req_id)[0]
        self._n_planned += 1
        state.is_named = state.is_named or (is_last and state.options.context is not None)
        return SavePlan(
            req_id,
            state.tokens,
            state.salt,
            state.extra,
            from_token,
            to_token,
            state.level,
            is_last,
            block_ids[: n_blocks(to_token, block_tokens)],
            state.options.context,
            state.planned_adapter,
            self._n_planned,
        )
