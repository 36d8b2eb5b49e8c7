"""vLLM's own prefix cache, which hands blocks on from request to request: what a request may not take from it, and what
a request may not leave there.

It knows nothing of levels, and tells adapters apart by name only. So what the blocks hold is noted here, as they are
allocated, loaded and computed.
"""

from cachegen.vllm.adapters import AdapterBlocks
from cachegen.vllm.guard import guarded, nothing
from cachegen.vllm.provenance import Provenance
from cachegen.vllm.saves import n_blocks


class LocalCache:
    """Requests are vLLM's, states are RequestStates. Used by the scheduler's thread only."""

    def __init__(self, library, failures, adapters):
        """adapters: the AskedAdapters."""
        self._library, self.failures, self._adapters = library, failures, adapters
        self.manager = None  # vLLM's KVCacheManager, once it is bound
        self.provenance = Provenance(library.unknown_level)
        self.adapter_blocks = AdapterBlocks()
        # Requests that are not to use the cache: always, or (with blocks, and a level) where these are worse.
        self._refused = []

    def _refuse(self, request, _state):
        # Asked again in the next step, without the local hit: set now, the flag would let this step's hit pass.
        self._refused.append((request, None, 0))
        return True

    @guarded(_refuse)
    def refuses(self, request, state):
        """Whether vLLM must ask again for a request, for which the cache has, or may have, worse KV than it demands, or
        KV of another content of its adapter. Where KV is worse all is recomputed; KV of another content leaves the
        cache."""
        worst = self._library.worst_level if state.options.worst_level is None else state.options.worst_level
        if not state.local_tokens or request.skip_reading_prefix_cache:
            return False
        is_mixed = request.lora_request is not None and self._adapters.has_mixed_blocks(request.lora_request)
        if not is_mixed and self.provenance.is_all_exact():
            return False
        if is_mixed and state.adapter_key is None:
            return self._refuse(request, state)  # nothing tells its own blocks from those that others may want
        blocks = self.manager.get_computed_blocks(request)[0].get_block_ids()[0]
        if is_mixed and (others := self.adapter_blocks.others(blocks, state.adapter_key)):
            # They may be in use, and are found no more. Asked again, the request has what comes before them.
            self.manager.evict_blocks(others)
            return True
        if self.provenance.worst_of(blocks) <= worst:
            return False
        self._refused.append((request, blocks, worst))
        return True

    @guarded(nothing)
    def skip_refused(self):
        """Once a step, when vLLM has asked for all requests and it is known what the step computes. vLLM's cache has
        such blocks already when vLLM asks: if they are good enough, vLLM is only to ask again."""
        refused, self._refused = self._refused, []
        for request, blocks, worst in refused:
            if blocks is None or self.provenance.worst_of(blocks) > worst:
                request.skip_reading_prefix_cache = True

    # ---- what blocks hold ----

    def allocate(self, block_ids, adapter_key):
        """Blocks get a content that is not known yet, of an adapter's content if any (None: it cannot be told, or there
        is none)."""
        self.adapter_blocks.mark(block_ids, adapter_key)
        self.provenance.allocate(block_ids)

    def inherit(self, state, block_ids):
        """A request has these blocks: what it loads and computes after them is no better."""
        state.level = max(state.level, self.provenance.worst_of(block_ids))
        state.has_unknown = state.has_unknown or self.provenance.any_unknown(block_ids)

    def load(self, state, plan, load):
        """A load (a LoadPlan) has ended, and has brought something, as its LoadReport says."""
        block_tokens = self._library.block_tokens
        first, end = plan.from_token // block_tokens, n_blocks(load.loaded_tokens, block_tokens)
        self.inherit(state, plan.block_ids[:first])  # computed by now, also where that was in the load's own step
        state.level = max(state.level, load.worst_level)
        # The level of the prefix counts for what was loaded after it, too.
        self.provenance.mark(plan.block_ids[first:end], state.level, loaded=load.worst_level > 0)
        self.provenance.mark(plan.block_ids[end:], state.level, loaded=False)

    def begin(self, state, block_ids, n_computed):
        """A request that has n_computed tokens in its blocks computes the others."""
        n_there = n_blocks(n_computed, self._library.block_tokens)
        self.inherit(state, block_ids[:n_there])
        self.provenance.mark(block_ids[n_there:], state.level, loaded=False)
        self._remember_worse(state, block_ids)

    def grow(self, state, block_ids):
        """A request computes on in new blocks."""
        self.adapter_blocks.mark(block_ids, state.adapter_key)
        self.provenance.mark(block_ids, state.level, loaded=False)
        self._remember_worse(state, block_ids)

    def _remember_worse(self, state, block_ids):
        if state.level > self._library.keep_level and not state.has_unknown:
            state.worse_blocks.update(block_ids)

    @guarded(nothing)
    def leave_no_worse(self, state, block_ids):
        """What was loaded worse than keep_level, and what was computed after it, is not left in the cache: the next
        request with this prefix loads it anew, and better if the link is free by then. A request that is preempted has
        no blocks, but what it left is there."""
        self._remember_worse(state, block_ids)
        if worse := self.provenance.worse_than(self._library.keep_level, state.worse_blocks):
            self.manager.evict_blocks(worse)  # from the table of hashes only: they may be in use
