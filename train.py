"""Train a decoder on a text: python train.py --data my.txt

What it makes lies in out/NAME, a checkpoint folder that sample.py and transformers load. Progress goes to stderr, samples
and nothing else to stdout. `--resume out/NAME` goes on where a run stopped, as the same run.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanodecoder import cli
from nanodecoder.cli import UsageError, option
from nanodecoder.training import TrainConfig, train
from nanodecoder.training.settings import CONFIG, MAY_CHANGE, from_toml


@dataclass
class Options(TrainConfig):
    """The run, and what to do with it."""

    config: str | None = option(None, "TOML file with settings; flags win over it")
    resume: str | None = option(None, "folder of a run to go on with; its own settings hold")
    dry_run: bool = option(False, "say what would be trained, and stop")


def main(argv: Sequence[str]) -> None:
    """Train as the command line says."""
    about = "Train a decoder on a text."
    first = cli.parse(Options, argv, "train.py", about)
    if first.config and first.resume:
        raise UsageError("--resume goes on with the run's own settings, and --config would be ignored; leave one out")
    settings = {}
    if first.config:
        settings = from_toml(Path(first.config))
    elif first.resume:
        if not (Path(first.resume) / CONFIG).is_file():
            raise UsageError(f"{first.resume} holds no run to resume: there is no {CONFIG} in it")
        settings = from_toml(Path(first.resume) / CONFIG)
    options = cli.parse(Options, argv, "train.py", about, settings)
    config = TrainConfig(**{field.name: getattr(options, field.name) for field in dataclasses.fields(TrainConfig)})
    if first.resume:
        unset = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
        changed = [name for name, default in unset.items() if getattr(config, name) != settings.get(name, default)]
        fixed = [f"--{name}" for name in changed if name not in MAY_CHANGE]
        if fixed:
            raise UsageError(
                f"{', '.join(fixed)} would make another run of it: leave it out, or start a new one without --resume"
            )
    result = train(config, resume=options.resume, dry_run=options.dry_run)
    if result.signal is not None:
        sys.exit(128 + result.signal)


if __name__ == "__main__":
    cli.run(main, "train.py")
