"""python -m nanodecoder COMMAND …"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from . import cli, verify
from .inside import plan

COMMANDS = {"verify": verify.main, "plan": plan.main}


def main(argv: Sequence[str]) -> None:
    """Carry out the command that the first word names."""
    if not argv or argv[0] not in COMMANDS:
        said = f"unknown command {argv[0]!r}" if argv else "no command given"
        raise cli.UsageError(f"{said}; there is: {', '.join(COMMANDS)} (python -m nanodecoder verify --help)")
    COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    cli.run(main, " ".join(["python -m nanodecoder", *sys.argv[1:2]]))
