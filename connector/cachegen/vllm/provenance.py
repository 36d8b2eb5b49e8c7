"""Where the KV in the engine's blocks comes from: loaded at a lossy level, computed after such KV, or exact.

vLLM's own prefix cache hands blocks on from request to request and knows nothing of levels. So the scheduler's side
remembers them here by block number: a save then records KV as what it is, and a request that demands better than what a
block holds recomputes. Another tier (under a MultiConnector, say) may fill blocks with what it once took from blocks
that were lossy. So a block's content is unknown from its allocation on, and taken for the worst that this engine loads,
until it is seen that this engine computes it or this connector has loaded it.
"""


class Provenance:
    """Of every block that is not exact. Used by the scheduler's thread only."""

    def __init__(self, unknown_level):
        self._unknown_level = unknown_level  # 0: no lossy KV comes into this engine
        self._level = {}  # block -> the worst level in it, and in what it was computed after
        self._loaded = set()  # of these, the ones that hold loaded tokens
        self._unknown = set()  # of these, the ones that nothing is known of yet

    def worst_of(self, block_ids):
        """The worst level in blocks; 0: all is exact."""
        if not self._level:
            return 0
        return max((self._level.get(block, 0) for block in block_ids), default=0)

    def any_lossily_loaded(self, block_ids):
        """Whether a block holds tokens of a lossy level: encoding them again would lose twice."""
        return any(block in self._loaded for block in block_ids)

    def any_unknown(self, block_ids):
        return not self._unknown.isdisjoint(block_ids)

    def worse_than(self, level, block_ids):
        """Those of the blocks that are known to be worse."""
        return {block for block in block_ids if self._level.get(block, 0) > level and block not in self._unknown}

    def is_all_exact(self):
        return not self._level

    def allocate(self, block_ids):
        """Blocks get a content that is not known yet."""
        self.mark(block_ids, self._unknown_level, loaded=True)
        if self._unknown_level:
            self._unknown.update(block_ids)

    def mark(self, block_ids, level, loaded):
        """Blocks get new content: of a level (0: exact), and loaded at a lossy one or not."""
        if level:
            self._level.update(dict.fromkeys(block_ids, level))
        elif self._level:
            for block in block_ids:
                self._level.pop(block, None)
        if level and loaded:
            self._loaded.update(block_ids)
        elif self._loaded:
            self._loaded.difference_update(block_ids)
        if self._unknown:
            self._unknown.difference_update(block_ids)
