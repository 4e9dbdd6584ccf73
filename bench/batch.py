"""Prompts of different lengths in one batch: ours, exact and one by one, beside transformers' left-padded batch.

python -m bench batch --ckpt DIR --rows 32
python -m bench batch --ckpt DIR --rows 1,8,16 --ways "float32,float32 exact"

Greedy, the same prompts (pieces of the README) and as many new tokens everywhere. Every arm's texts are compared with those of
the arm that takes the prompts one by one, if there is one of the same make.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import nanodecoder as nd
from nanodecoder import cli
from nanodecoder.cli import UsageError, option
from nanodecoder.inside.plan import read

from . import common
from .common import OURS, ROOT, Way, all_ratios, beside, spread

TEXT = ROOT / "README.md"
PEERS = {"transformers": "transformers float32,transformers bfloat16"}


@dataclass
class Options(common.Options):
    """What the command line says."""

    rows: str = option("32", "how many prompts, with commas between")
    shortest: int = option(20, "characters of the shortest prompt")
    longest: int = option(600, "characters of the longest prompt")
    max_new_tokens: int = option(64, "new tokens per prompt", names=("n",))
    alone: bool = option(False, "run every prompt alone too, in float32")


def prompts_of(rows: int, shortest: int, longest: int) -> list[str]:
    """Pieces of the README of evenly spread lengths, in an order in which long and short ones alternate."""
    text = TEXT.read_text(encoding="utf-8")
    step = (longest - shortest) / max(1, rows - 1)
    lengths = [round(shortest + step * (row * 7 % rows)) for row in range(rows)]
    starts = [row * 131 % (len(text) - longest) for row in range(rows)]
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    options = cli.parse(Options, argv, "python -m bench batch", "Throughput of a ragged batch, beside transformers.")
    ours, peers = "float32,float32 compiled,bfloat16", PEERS
    if options.alone:
        ours += ",float32 alone"
        peers = {"transformers": f"{PEERS['transformers']},transformers float32 alone"}
    found = common.ways(options, ours, peers, flags=("compiled", "exact", "alone"))
    sizes, n = common.numbers(options.rows, "--rows"), options.max_new_tokens
    if not sizes or n < 1 or not 1 <= options.shortest <= options.longest <= len(TEXT.read_text(encoding="utf-8")) // 2:
        raise UsageError(
            "--rows and --max_new_tokens must be 1 or above, and 1 ≤ --shortest ≤ --longest, at most half the README"
        )
    tokenizer = nd.Tokenizer.load(options.ckpt)
    texts = [tokenizer.encode(text) for text in prompts_of(sizes[-1], options.shortest, options.longest)]
    longest, limit = max(map(len, texts)), read(options.ckpt).config.max_seq_len
    if longest + n > limit:
        raise UsageError(
            f"{longest} tokens and {n} new ones do not fit the context of {limit}: give a smaller --longest, or -n"
        )
    peer_names = list(dict.fromkeys(way.peer for way in found if way.peer != OURS))
    rows = [["prompts", "", "tokens/s", "s", "spread, s", *(f"× {peer}" for peer in peer_names), "texts"]]
    told, bars = {}, {}
    with common.workers(found, options, longest + n) as running:
        for size in sizes:
            own = texts[:size]

            def timed(worker: common.Worker, own: list[list[int]] = own) -> dict[str, list]:
                return worker.ask("batch", timed=True, rows=own, n=n)

            runs = common.turns(running, options.repeats, timed)
            times = {name: [run["seconds"] for run in answers] for name, answers in runs.items()}
            new = {name: answers[-1]["result"] for name, answers in runs.items()}
            found = [way for way in found if way.name in running]
            told[size] = {"seconds": times, "ratios": all_ratios(found, times), "texts": {}}
            for way in found:
                middle, ratios = statistics.median(times[way.name]), beside(way, times, found)
                bars[f"{way.name}, {size}" if len(sizes) > 1 else way.name] = [size * n / taken for taken in times[way.name]]
                told[size]["texts"][way.name] = changed = differ(way, found, new)
                rows.append(
                    [
                        f"{size}",
                        way.name,
                        f"{size * n / middle:.1f}",
                        f"{middle:.2f}",
                        spread(times[way.name], digits=2),
                        *(ratios[peer] for peer in peer_names),
                        "" if changed is None else f"{changed} of {size} differ from alone",
                    ]
                )
        peaks = {name: worker.ask("peak") for name, worker in running.items()}
    lengths = list(map(len, texts))
    notes = [
        f"prompts of {min(lengths)} to {max(lengths)} tokens, {n} new tokens each",
        "peak MiB, loading included: " + ", ".join(f"{name} {peak / 2**20:.0f}" for name, peak in peaks.items()),
    ]
    common.tell(options, "batch", rows, {"rows": told, "peaks": peaks}, notes)
    common.draw(options, bars, "tokens/s")


def differ(way: Way, found: Sequence[Way], new: dict[str, list[list[int]]]) -> int | None:
    """How many texts are not those of the same make's prompts one by one; None where there is nothing to compare with."""
    alone = [one for one in found if one.alone and (one.peer, one.precision) == (way.peer, way.precision)]
    if way.alone or not alone:
        return None
    return sum(a != b for a, b in zip(new[way.name], new[alone[0].name], strict=True))
