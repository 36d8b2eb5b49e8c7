"""What the engine computes of prompts, in the step at hand and later, as the library wants to know it: in tokens, and
in pairs, the sum of their positions."""

SAMPLE_MIN_TOKENS = 64  # a step with fewer prefill tokens says little about the speed of prefilling


def _n_pairs(first, end):
    return (end - first) * (first + end) // 2


def sample(requests, scheduler_output, states):
    """(n_tokens, n_pairs) of a step, for the speed of prefilling; zeros where it says little about that. requests: as
    scheduled() has them; states: requests' ids -> RequestStates."""
    n_tokens = n_pairs = 0
    for req_id, n_computed, _ in requests:
        state = states.get(req_id)
        if state is not None and n_computed < len(state.tokens):
            n = scheduler_output.num_scheduled_tokens[req_id]
            n_tokens += n
            n_pairs += _n_pairs(n_computed, n_computed + n)
    # Decoding takes a part of the step's time, too: only steps that hardly decode are samples.
    says_much = n_tokens >= SAMPLE_MIN_TOKENS and n_tokens >= 0.9 * scheduler_output.total_num_scheduled_tokens
    return (n_tokens, n_pairs) if says_much else (0, 0)


def queued(requests):
    """(n_tokens, n_pairs) that the engine is to compute of prompts, with what the step at hand computes. What look-ups
    leave it the library counts until they are polled. requests: RequestStates."""
    n_tokens = n_pairs = 0
    for state in requests:
        first, end = _first_to_compute(state), state.prompt_tokens
        if first < end:
            n_tokens += end - first
            n_pairs += _n_pairs(first, end)
    return n_tokens, n_pairs


def _first_to_compute(state):
    if state.has_begun:
        return state.computed_tokens
    if state.loaded is not None:
        return state.loaded.loaded_tokens
    if state.load is not None:
        return state.load.to_token
    if state.allocated:
        return state.prompt_tokens  # another connector loads it: else it had begun
    if not state.failed and (state.lookup is not None or state.adapter is not None):
        return state.prompt_tokens  # not known yet
    return state.local_tokens if state.failed else max(state.local_tokens, state.hit_tokens or 0)
