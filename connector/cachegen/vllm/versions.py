"""Which releases of vLLM the connector works with, and what differs between them."""

import vllm

TESTED = ((0, 30), (0, 31), (0, 32), (0, 33))  # of the last one a brief phase only; see connector/README.md

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HIT_SOURCE = CacheHitSource.DISK
except ImportError:  # before 0.32 hits have no source
    HIT_SOURCE = None


def refusal(version=None):
    """Why a version of vLLM (None: the one at hand) is not supported; None: it is."""
    version = version or vllm.__version__
    if any(version.startswith(f"{major}.{minor}.") for major, minor in TESTED):
        return None
    tested = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
    return f"vLLM {version}: works with {tested}; untested_vllm: true tries another"
