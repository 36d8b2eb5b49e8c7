"""Which prompts are worth storing: not the short ones, and not what is never asked for again.

Counted are uses of prefixes, chunk by chunk, so that the system prompt that all share is stored at its second use
though each request goes on differently. Only digests are kept, and the oldest are dropped: at worst a chunk is
stored a use later.
"""

import collections
import hashlib

MAX_CHUNKS = 1 << 16  # remembered


class Admission:
    def __init__(self, chunk_tokens, save_on_use):
        """save_on_use: 1 stores at the first use, 2 at the second ..."""
        self._chunk_tokens, self._save_on_use = chunk_tokens, save_on_use
        self._uses = collections.OrderedDict()  # digest of a prefix -> uses

    def use(self, tokens, salt, extra):
        """Counts a use of a prompt (an array.array); how many of its first tokens are to be stored."""
        if self._save_on_use <= 1:
            return len(tokens)
        bytes_of, step = memoryview(tokens).cast("B"), self._chunk_tokens * tokens.itemsize
        digest = hashlib.blake2b(len(salt).to_bytes(8, "little") + salt + extra, digest_size=16).digest()
        n_admitted = 0
        for at in range(0, len(bytes_of), step):
            digest = hashlib.blake2b(digest + bytes_of[at : at + step], digest_size=16).digest()
            # Taken out and put back: the latest used stands last, so that the oldest are dropped.
            uses = self._uses[digest] = self._uses.pop(digest, 0) + 1
            # Without a gap from the start: nothing behind one could be found.
            if uses >= self._save_on_use and n_admitted == at:
                n_admitted = min(at + step, len(bytes_of))
        while len(self._uses) > MAX_CHUNKS:
            self._uses.popitem(last=False)
        return n_admitted // tokens.itemsize
