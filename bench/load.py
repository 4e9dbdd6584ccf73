"""Time to load a checkpoint in float32, beside transformers' from_pretrained: A B A B, medians.

python -m bench.load --ckpt DIR
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

import nanodecoder as nd
from nanodecoder import cli
from nanodecoder.cli import UsageError, option


@dataclass
class Options:
    """What the command line says."""

    ckpt: str | None = option(None, "checkpoint folder")
    repeats: int = option(9, "how often each is timed, after one warm-up")


def seconds(load: Callable[[], object]) -> float:
    """One timed load; what was loaded is dropped afterwards, outside the clock."""
    gc.collect()
    start = time.perf_counter()
    model = load()
    elapsed = time.perf_counter() - start
    del model
    return elapsed


def main(argv: Sequence[str]) -> None:
    """Print both medians, their spread and the ratio."""
    options = cli.parse(Options, argv, "python -m bench.load", "Time to load a checkpoint, beside transformers.")
    if options.ckpt is None:
        raise UsageError("give a checkpoint folder, --ckpt DIR")
    loaders = {
        "nanodecoder": lambda: nd.load_model(options.ckpt),
        "transformers": lambda: AutoModelForCausalLM.from_pretrained(options.ckpt, dtype=torch.float32),
    }
    times: dict[str, list[float]] = {name: [] for name in loaders}
    for turn in range(options.repeats + 1):
        for name, load in loaders.items():
            elapsed = seconds(load)
            if turn > 0:
                times[name].append(elapsed)
    for name, taken in times.items():
        print(f"{name:14} median {statistics.median(taken):.3f} s   {min(taken):.3f} to {max(taken):.3f}")
    ratio = statistics.median(a / b for a, b in zip(times["nanodecoder"], times["transformers"], strict=True))
    print(f"ratio {ratio:.2f} (below 1: nanodecoder is faster), torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    cli.run(main, "bench.load")
