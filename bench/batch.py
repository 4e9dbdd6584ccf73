"""32 prompts of different lengths in one batch: beside one by one, and beside transformers' left-padded batch.

python -m bench.batch --ckpt DIR

Greedy, float32 on the CPU, the same prompts and as many new tokens everywhere; A B A B in one run, medians. The tokens are
compared too: ours in the batch with ours alone, and transformers' in its batch with transformers' alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import nanodecoder as nd
from nanodecoder import cli
from nanodecoder.cli import UsageError, option

TEXT = Path(__file__).parent.parent / "README.md"
Ids = list[list[int]]


@dataclass
class Options:
    """What the command line says."""

    ckpt: str | None = option(None, "checkpoint folder")
    rows: int = option(32, "prompts")
    shortest: int = option(20, "characters of the shortest prompt")
    longest: int = option(600, "characters of the longest prompt")
    max_new_tokens: int = option(64, "new tokens per prompt", names=("n",))
    repeats: int = option(3, "how often each is timed, after one warm-up")
    compile: bool = option(False, "compile our step")
    alone: bool = option(True, "run every prompt alone too")


def prompts_of(options: Options) -> list[str]:
    """Pieces of the README of evenly spread lengths, in an order in which long and short ones alternate."""
    text = TEXT.read_text()
    step = (options.longest - options.shortest) / max(1, options.rows - 1)
    lengths = [round(options.shortest + step * (row * 7 % options.rows)) for row in range(options.rows)]
    starts = [row * 131 % (len(text) - options.longest) for row in range(options.rows)]
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    options = cli.parse(Options, argv, "python -m bench.batch", "Throughput of a ragged batch, beside transformers.")
    if options.ckpt is None:
        raise UsageError("give a checkpoint folder, --ckpt DIR")
    n = options.max_new_tokens
    model, tokenizer = nd.load_model(options.ckpt), nd.Tokenizer.load(options.ckpt)
    theirs = AutoModelForCausalLM.from_pretrained(options.ckpt, dtype=torch.float32).eval()
    their_tokenizer = AutoTokenizer.from_pretrained(options.ckpt, padding_side="left")
    their_tokenizer.pad_token = their_tokenizer.pad_token or their_tokenizer.eos_token
    prompts = prompts_of(options)
    ids = [tokenizer.encode(prompt) for prompt in prompts]

    def ours(rows: Ids) -> Ids:
        way = {"max_new_tokens": n, "temperature": 0.0, "ignore_eos": True, "compile": options.compile}
        return [done.ids for done in nd.complete(model, None, rows, **way)]

    def transformers(rows: Ids) -> Ids:
        batch = their_tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        out = theirs.generate(**batch, max_new_tokens=n, min_new_tokens=n, do_sample=False, eos_token_id=None)
        return out[:, batch.input_ids.shape[1] :].tolist()

    def one_by_one(run: Callable[[Ids], Ids]) -> Callable[[Ids], Ids]:
        return lambda rows: [run([row])[0] for row in rows]

    runs = {"nanodecoder, one batch": ours, "transformers, left-padded": transformers}
    if options.alone:
        runs |= {"nanodecoder, one by one": one_by_one(ours), "transformers, one by one": one_by_one(transformers)}
    tokens: dict[str, Ids] = {}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():  # warm up
        run(ids[:2])
    for _ in range(options.repeats):
        for name, run in runs.items():
            if "one by one" in name and name in tokens:
                continue  # slow, and once is enough for its tokens and a first figure
            start = time.perf_counter()
            tokens[name] = run(ids)
            times[name].append(time.perf_counter() - start)
            print(f"{name}: {times[name][-1]:.1f} s", file=sys.stderr, flush=True)
    lengths = [len(row) for row in ids]
    print(f"{len(ids)} prompts of {min(lengths)} to {max(lengths)} tokens, {n} new tokens each")
    for name, taken in times.items():
        spread = f"{min(taken):.2f} to {max(taken):.2f} s" if len(taken) > 1 else f"{taken[0]:.2f} s, once"
        print(f"{name:26} {len(ids) * n / statistics.median(taken):7.1f} tokens/s   ({spread})")
    ours_name, theirs_name = list(runs)[:2]
    ratio = statistics.median(b / a for a, b in zip(times[ours_name], times[theirs_name], strict=True))
    print(f"nanodecoder's batch is {ratio:.2f} times as fast as transformers' batch")
    if options.alone:
        for peer, batch in (("nanodecoder", ours_name), ("transformers", theirs_name)):
            changed = sum(a != b for a, b in zip(tokens[batch], tokens[f"{peer}, one by one"], strict=True))
            print(f"{peer}: {changed} of {len(ids)} texts differ from the same prompt alone")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    cli.run(main, "bench.batch")
