"""For ttft_bench.py, in vLLM's process: an answer whose tokens the client says, so that what two
runs think of each of its tokens can be compared. The logprobs that vLLM returns are those from
before (raw_logprobs, its default)."""

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForcedAnswer(AdapterLogitsProcessor):
    """Of requests with "forced_answer" in vllm_xargs, token ids; longer answers go on freely."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        forced = (params.extra_args or {}).get("forced_answer")
        if not forced:
            return None

        def force(output_ids, logits):
            if len(output_ids) < len(forced):
                token = int(forced[len(output_ids)])
                logits[:] = float("-inf")
                logits[token] = 0
            return logits

        return force
