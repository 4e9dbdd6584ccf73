"""One sequence, token by token: ours eager, compiled, in bfloat16 and in few bits, beside transformers.

python -m bench.decode --ckpt DIR

The same prompt, as many new tokens, the same threads; after a warm-up every way is run in turn, again and again, and medians
are printed with the share of the limit: the bytes of the weights over the speed at which this machine reads memory. In float32
our tokens are compared with transformers'.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers import AutoModelForCausalLM

import nanodecoder as nd
from nanodecoder import cli
from nanodecoder.cli import UsageError, option
from nanodecoder.quantize import size

PROMPT = "Once upon a time, in a small village at the edge of the forest, there lived a girl who wanted to know how the stars "
Ids = list[int]


@dataclass
class Options:
    """What the command line says."""

    ckpt: str | None = option(None, "checkpoint folder")
    prompt_tokens: int = option(49, "tokens of the prompt")
    max_new_tokens: int = option(64, "new tokens", names=("n",))
    repeats: int = option(3, "how often each is timed, after one warm-up")
    ways: str = option("eager,compiled,bfloat16,int8,int4,transformers", "which, with commas between")


def bandwidth() -> float:
    """Bytes a second that all threads together read from memory, the best of five."""
    block = torch.ones(2**27)  # 512 MiB, beyond any cache
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        block.sum()
        best = max(best, block.nbytes / (time.perf_counter() - start))
    return best


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    options = cli.parse(Options, argv, "python -m bench.decode", "Tokens a second of one sequence, beside transformers.")
    if options.ckpt is None:
        raise UsageError("give a checkpoint folder, --ckpt DIR")
    tokenizer = nd.Tokenizer.load(options.ckpt)
    ids = (tokenizer.encode(PROMPT) * options.prompt_tokens)[: options.prompt_tokens]
    n = options.max_new_tokens

    def ours(compile: bool = False, **how: str) -> tuple[Callable[[], tuple[Ids, list[float]]], int]:
        model = nd.load_model(options.ckpt, **how)

        def run() -> tuple[Ids, list[float]]:
            stepper = nd.Stepper(model, sampler=nd.Sampler(), compile=compile)
            stepper.add(ids, max_new_tokens=n, eos_ids=())
            new, taken = [], []
            while len(stepper):
                start = time.perf_counter()
                new += stepper.step().ids.tolist()
                taken.append(time.perf_counter() - start)
            return new, taken[1:]

        return run, size(model)

    def theirs(dtype: torch.dtype) -> tuple[Callable[[], tuple[Ids, list[float]]], int]:
        model = AutoModelForCausalLM.from_pretrained(options.ckpt, dtype=dtype).eval()
        taken: list[float] = []

        class Clock:  # a stopping criterion that never stops, and looks at the time
            def __call__(self, *_: object) -> torch.Tensor:
                taken.append(time.perf_counter())
                return torch.zeros(1, dtype=torch.bool)

        def run() -> tuple[Ids, list[float]]:
            taken.clear()
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                max_new_tokens=n,
                min_new_tokens=n,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[Clock()],
            )
            return out[0, len(ids) :].tolist(), [b - a for a, b in pairwise(taken)]

        return run, size(model)

    makers: dict[str, Callable[[], tuple[Callable[[], tuple[Ids, list[float]]], int]]] = {
        "eager": ours,
        "compiled": lambda: ours(compile=True),
        "bfloat16": lambda: ours(dtype="bfloat16"),
        "bfloat16 compiled": lambda: ours(compile=True, dtype="bfloat16"),
        "int8": lambda: ours(quantize="int8"),
        "int8 compiled": lambda: ours(compile=True, quantize="int8"),
        "int4": lambda: ours(quantize="int4"),
        "int4 compiled": lambda: ours(compile=True, quantize="int4"),
        "transformers": lambda: theirs(torch.float32),
        "transformers bfloat16": lambda: theirs(torch.bfloat16),
    }
    names = options.ways.split(",")
    for name in names:
        if name not in makers:
            raise UsageError(f"--ways knows no {name!r}: {', '.join(makers)}")
    speed = bandwidth()
    runs = {name: makers[name]() for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    tokens: dict[str, Ids] = {}
    for turn in range(options.repeats + 1):
        for name, (run, _) in runs.items():
            tokens[name], taken = run()
            if turn:
                times[name].append(statistics.median(taken))
            print(f"{name}: {statistics.median(taken) * 1e3:.1f} ms a token", file=sys.stderr, flush=True)
    print(
        f"{len(ids)} prompt tokens, {n} new ones, {torch.get_num_threads()} threads; memory is read at {speed / 1e9:.1f} GB/s"
    )
    print(f"{'':22}{'ms a token':>11}{'tokens/s':>10}{'MiB':>8}{'of the limit':>14}{'× transformers':>16}   spread, ms")
    base = times.get("transformers")
    for name, taken in times.items():
        middle, held = statistics.median(taken), runs[name][1]
        ratio = statistics.median(b / a for a, b in zip(taken, base, strict=True)) if base else float("nan")
        print(
            f"{name:22}{middle * 1e3:11.1f}{1 / middle:10.1f}{held / 2**20:8.0f}{held / speed / middle:14.0%}{ratio:16.2f}"
            f"   {min(taken) * 1e3:.1f} to {max(taken) * 1e3:.1f}"
        )
    if "transformers" in tokens:
        for name in set(names) & {"eager", "compiled"}:
            same = tokens[name] == tokens["transformers"]
            print(f"{name}: the tokens are {'the same as' if same else 'not'} transformers'")
    print(f"torch {torch.__version__}")


if __name__ == "__main__":
    cli.run(main, "bench.decode")
