"""What exact bits cost: the same prompts with exact=True and without, alone and in a batch, A B A B, medians.

python -m bench.exact --ckpt DIR
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import nanodecoder as nd
from bench.batch import Options as Prompts
from bench.batch import prompts_of
from nanodecoder import cli
from nanodecoder.cli import UsageError, option


@dataclass
class Options:
    """What the command line says."""

    ckpt: str | None = option(None, "checkpoint folder")
    dtype: str = option("float32", "the model's", choices=("float32", "bfloat16"))
    max_new_tokens: int = option(16, "new tokens per prompt", names=("n",))
    repeats: int = option(3, "how often each is timed, after one warm-up")


def main(argv: Sequence[str]) -> None:
    """Print seconds per run for 1, 8 and 16 prompts, both ways, and the ratios."""
    options = cli.parse(Options, argv, "python -m bench.exact", "What exact bits cost.")
    if options.ckpt is None:
        raise UsageError("give a checkpoint folder, --ckpt DIR")
    model, tokenizer = nd.load_model(options.ckpt, dtype=options.dtype), nd.Tokenizer.load(options.ckpt)
    texts = prompts_of(Prompts(rows=16, shortest=20, longest=300))
    for rows in (1, 8, 16):
        ids = [tokenizer.encode(text) for text in texts[:rows]]
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(options.repeats + 1):
            for exact, taken in times.items():
                start = time.perf_counter()
                nd.complete(model, None, ids, options.max_new_tokens, ignore_eos=True, temperature=0.0, exact=exact)
                if turn > 0:
                    taken.append(time.perf_counter() - start)
        plain, exact = (statistics.median(taken) for taken in times.values())
        ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
        print(f"{rows:3} prompts: {plain:.2f} s, exact {exact:.2f} s, {ratio:.2f} times", flush=True)
    print(f"{options.dtype}, torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    cli.run(main, "bench.exact")
