"""XXH3 of xxHash with seed 0, from the xxhash module or from libxxhash, which the codec links anyway."""

import ctypes
import ctypes.util


class _Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def _load():
    try:
        import xxhash

        return xxhash.xxh3_64_intdigest, xxhash.xxh3_128_digest
    except ImportError:
        pass
    name = ctypes.util.find_library("xxhash") or "libxxhash.so.0"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise ImportError("needs libxxhash (Debian: libxxhash0) or the xxhash module") from error
    library.XXH3_64bits.restype = ctypes.c_uint64
    library.XXH3_64bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    library.XXH3_128bits.restype = _Hash128
    library.XXH3_128bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]

    def digest128(data):
        value = library.XXH3_128bits(data, len(data))
        return value.high.to_bytes(8, "big") + value.low.to_bytes(8, "big")

    return lambda data: library.XXH3_64bits(data, len(data)), digest128


xxh3_64, xxh3_128 = _load()  # bytes -> int; bytes -> 16 bytes, canonical (big-endian)
