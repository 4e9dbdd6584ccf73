"""python -m bench COMMAND …: every command is a module here, and prints a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from nanodecoder import cli

COMMANDS = {
    "decode": "tokens a second of one sequence, and against context length",
    "prefill": "tokens a second of a prompt",
    "batch": "tokens a second of many prompts of different lengths",
    "load": "seconds to load, and from the start of the process to the first token",
    "attention": "the formula written out beside the fused kernel",
    "train": "a training step",
    "microgpt": "microGPT's recipe rebuilt, beside ours",
    "makemore": "makemore's transformer on names, beside ours",
    "gpu": "all of it on one large GPU, in under 8 minutes",
}


def main(argv: Sequence[str]) -> None:
    """Carry out the command that the first word names."""
    if not argv or argv[0] not in COMMANDS:
        said = f"unknown command {argv[0]!r}" if argv else "no command given"
        raise cli.UsageError(f"{said}; there is: {', '.join(COMMANDS)} (python -m bench decode --help)")
    import_module(f"bench.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    cli.run(main, " ".join(["python -m bench", *sys.argv[1:2]]))
