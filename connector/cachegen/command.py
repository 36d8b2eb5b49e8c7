"""What the tools that make profiles have in common as commands: options, progress on stderr, how they end."""

import argparse
import contextlib
import os
import sys
import time

from . import Unsupported


MAX_MODEL_LEN = dict(
    type=int, metavar="TOKENS", help="of the engine, if it is given one: LongRoPE and windows depend on it"
)


class Progress:
    """Lines on stderr: stage, how far, how long to go."""

    def __init__(self, quiet=False):
        self.quiet, self.stage, self.began = quiet, "", time.monotonic()
        self.stage_began = self.began

    def start(self, stage):
        self.stage, self.stage_began = stage, time.monotonic()
        self._print("")

    def __call__(self, done, total):
        spent = time.monotonic() - self.stage_began
        left = spent / done * (total - done)
        self._print(f" {done}/{total}" + (f", {left:.0f} s left" if done < total else f", took {spent:.0f} s"))

    def _print(self, text):
        if not self.quiet:
            print(f"[{time.monotonic() - self.began:5.0f} s] {self.stage}{text}", file=sys.stderr, flush=True)


def make_parser(tool, document):
    """An argparse parser of python -m cachegen.<tool>, with what all tools take."""
    parser = argparse.ArgumentParser(prog=f"python -m cachegen.{tool}", description=document.splitlines()[0])
    parser.add_argument("--classes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


PLAIN = (OSError, ValueError)
# What transformers ends with where a model's files are not as it wants them, or a package is missing that they need.
OF_MODELS = (*PLAIN, ImportError, KeyError, AttributeError, TypeError, RuntimeError)


@contextlib.contextmanager
def reading(tool, what, expected=PLAIN):
    """What cannot be read ends the tool with a line that says why, and status 2: it is no mistake of the tool's. With
    CACHEGEN_TRACEBACK in the environment it ends with the traceback."""
    try:
        yield
    except expected as error:
        if os.environ.get("CACHEGEN_TRACEBACK"):
            raise
        lines = str(getattr(error, "strerror", None) or error).strip().splitlines()
        kind = "" if lines and isinstance(error, PLAIN) else type(error).__name__
        print(f"{tool}: {what}: {': '.join([*filter(None, [kind]), *lines[:1]])}", file=sys.stderr)
        raise SystemExit(2) from error


def make_main(tool, parse_arguments, run, subject):
    """main() of a tool: run(parse_arguments(arguments)). subject: the option that names what Unsupported is about."""

    def main(arguments=None):
        options = parse_arguments(arguments)
        try:
            run(options)
        except Unsupported as error:
            raise SystemExit(f"{tool}: {getattr(options, subject)} is not supported: {error}") from error

    return main
