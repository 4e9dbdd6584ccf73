"""python -m nanodecoder COMMAND …"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from . import cli

# What is not asked for is not imported: training alone takes as long as all the rest
COMMANDS = {"verify": ".verify", "plan": ".inside.plan", "compare": ".training.study"}


def main(argv: Sequence[str]) -> None:
    """Carry out the command that the first word names."""
    if not argv or argv[0] not in COMMANDS:
        said = f"unknown command {argv[0]!r}" if argv else "no command given"
        raise cli.UsageError(f"{said}; there is: {', '.join(COMMANDS)} (python -m nanodecoder verify --help)")
    import_module(COMMANDS[argv[0]], __package__).main(argv[1:])


if __name__ == "__main__":
    cli.run(main, " ".join(["python -m nanodecoder", *sys.argv[1:2]]))
