"""One sequence, token by token: ours in every precision, plain and compiled, beside the peers.

python -m bench decode --ckpt DIR --peers transformers,llama.cpp,gpt-fast --contexts 100,1000,8000

The same prompt and as many new tokens for all. A token's time is the median of a run's steps after the first, and the prompt's
pass is the time to the first token. The limit is the bytes that a token reads (the weights, and what the cache holds half-way)
over the speed at which this machine reads memory. Tokens are checked along the text of transformers in float32 (else of ours):
what every arm would have chosen at each place. Where the reference's two best logits are closer than 1e-3 another choice is a
tie; any other in float32 is a failure, and a figure in smaller types.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import nanodecoder as nd
from nanodecoder import cli
from nanodecoder.cli import UsageError, option
from nanodecoder.inside.plan import read
from nanodecoder.parts import CheckpointError
from nanodecoder.verify import Finding, compare_logits

from . import common
from .common import OURS, Way, Worker, all_ratios, beside, ratio, share, spread

PROMPT = "Once upon a time, in a small village at the edge of the forest, there lived a girl who wanted to know how the stars "
ALL = ",".join(f"{precision}{way}" for precision in ("float32", "bfloat16", "int8", "int4") for way in ("", " compiled"))
PEERS = {
    "transformers": "transformers float32,transformers bfloat16",
    "llama.cpp": "llama.cpp BF16,llama.cpp F16,llama.cpp Q8_0,llama.cpp Q4_0",
    "gpt-fast": "gpt-fast float32 compiled,gpt-fast bfloat16 compiled,gpt-fast int8 compiled",
}


@dataclass
class Options(common.Options):
    """What the command line says."""

    prompt_tokens: int = option(49, "tokens of the prompt")
    max_new_tokens: int = option(128, "new tokens, at least 2", names=("n",))
    contexts: str = option("", "then: time per token after so many tokens each, with commas between")
    steps: int = option(16, "tokens that are timed at each context")


def prompt_ids(ckpt: str, length: int) -> list[int]:
    """So many ids of the prompt, over and over."""
    return (nd.Tokenizer.load(ckpt).encode(PROMPT) * length)[:length]


def main(argv: Sequence[str]) -> None:
    """Print the table, and the one of contexts. A token that changed in float32 is a failed run."""
    options = cli.parse(Options, argv, "python -m bench decode", "Tokens a second of one sequence, beside the peers.")
    found = common.ways(options, ALL, PEERS)
    n, contexts = options.max_new_tokens, common.numbers(options.contexts, "--contexts")
    limit = read(options.ckpt).config.max_seq_len
    slots = max(options.prompt_tokens + n, *(c + options.steps for c in contexts), 0)
    if n < 2 or options.steps < 2 or options.prompt_tokens < 1:
        raise UsageError("decoding is timed from the second new token on: --max_new_tokens and --steps must be 2 or above")
    if slots > limit:
        raise UsageError(
            f"{slots} tokens are asked for, and the model's context holds {limit}: that many less --steps is the most"
        )
    ids = prompt_ids(options.ckpt, options.prompt_tokens)
    with common.workers(found, options, slots) as running:
        speed = common.bandwidth()
        runs = common.turns(running, options.repeats, lambda worker: worker.ask("decode", ids=ids, n=n))
        peaks = {name: worker.ask("peak") for name, worker in running.items()}
        checks = check(running, ids, {name: runs[name][-1]["ids"] for name in runs})
        longer = at_contexts(dict(running), options, contexts)
        found = [way for way in found if way.name in running]
        speed = max(speed, common.bandwidth())  # of a machine that others use too, the best that was seen
    figures = {
        name: figures_of(running[name], runs[name], speed, options.prompt_tokens + n // 2)
        | {"peak": peaks[name], "check": checks[name]}
        for name in running
    }
    show(options, found, figures, speed, longer, running)
    failed = [one.name for one in found if (one.peer, one.precision) == (OURS, "float32") and checks[one.name].get("changed")]
    if failed:
        raise CheckpointError(f"tokens changed in float32: {', '.join(failed)}")


def figures_of(worker: Worker, runs: Sequence[dict[str, Any]], speed: float, context: int) -> dict[str, Any]:
    """What is known of an arm, seconds and bytes. context: how many tokens the cache holds half-way."""
    seconds = [statistics.median(run["seconds"][1:]) for run in runs]
    middle = statistics.median(seconds)
    token = worker.about["read"] + context * worker.about["cache"]
    return {
        "seconds_per_token": seconds,
        "tokens_per_second": 1 / middle,
        "seconds_to_first": [run["seconds"][0] for run in runs],
        "bytes_per_token": token,
        "of_the_limit": share(token, speed, middle),
        **worker.about,
    }


def check(running: Mapping[str, Worker], ids: list[int], texts: Mapping[str, list[int]]) -> dict[str, dict[str, Any]]:
    """How every arm's choices compare along the reference's text; of those that can't be led, how many tokens were its own."""
    names = sorted(
        running, key=lambda name: (running[name].way.precision != "float32", running[name].way.peer != "transformers")
    )
    text = texts[names[0]]
    with tempfile.TemporaryDirectory() as scratch:

        def logits(name: str) -> torch.Tensor:
            path = Path(scratch) / "logits.pt"
            running[name].ask("logits", ids=ids, text=text, path=str(path))
            return torch.load(path)

        led = [name for name, worker in running.items() if worker.way.peer in (OURS, "transformers")]
        reference = logits(names[0]) if names[0] in led else None
        found: dict[str, dict[str, Any]] = {}
        for name in running:
            same = next((i for i, (a, b) in enumerate(zip(texts[name], text, strict=True)) if a != b), len(text))
            found[name] = {"reference": names[0], "same_from_the_start": same, "of": len(text)}
            if name in led and reference is not None and name != names[0]:
                one: Finding = compare_logits(name, [reference], [logits(name)], [text])
                found[name] |= {"changed": one.changed, "ties": one.ties, "logits_apart": one.size}
    return found


def said(check: Mapping[str, Any], name: str) -> str:
    """A check in a cell."""
    if check["reference"] == name:
        return "reference"
    if "changed" not in check:
        return f"first {check['same_from_the_start']} of {check['of']} same"
    ties = f", {check['ties']} ties" if check["ties"] else ""
    return f"{check['changed']} of {check['of']} changed{ties}, by {check['logits_apart']:.2g}"


def at_contexts(running: dict[str, Worker], options: Options, contexts: Sequence[int]) -> dict[str, dict[int, list[float]]]:
    """Arm -> tokens before -> seconds a token, a median for each turn. Each prompt is computed once, and its cache kept."""
    found: dict[str, dict[int, list[float]]] = {name: {} for name in running}
    for context in contexts:
        ids = prompt_ids(options.ckpt, context)
        runs = common.turns(
            running, options.repeats, lambda one, ids=ids: one.ask("decode", ids=ids, n=options.steps, keep=True)
        )
        for name, answers in runs.items():
            found[name][context] = [statistics.median(run["seconds"][1:]) for run in answers]
    return found


def growth(times: Mapping[int, Sequence[float]], read: int, cache: int) -> tuple[float, float]:
    """Time per token at the longest context by that at the shortest, and what the bytes that a token reads explain of it."""
    short, long = min(times), max(times)
    return ratio(times[short], times[long]), (read + long * cache) / (read + short * cache)


def show(
    options: Options,
    found: Sequence[Way],
    figures: Mapping[str, dict[str, Any]],
    speed: float,
    longer: Mapping[str, Mapping[int, Sequence[float]]],
    running: Mapping[str, Worker],
) -> None:
    """Table, chart and JSON."""
    times = {name: figure["seconds_per_token"] for name, figure in figures.items()}
    peers = list(dict.fromkeys(way.peer for way in found if way.peer != OURS))
    head = ["", "tokens/s", "ms a token", "spread, ms", "MB a token", "of the limit", *(f"× {peer}" for peer in peers)]
    rows = [[*head, "first token, ms", "peak MiB", "above start", "tokens"]]
    for way in found:
        figure = figures[way.name]
        told = beside(way, times, found)
        rows.append(
            [
                way.name,
                f"{figure['tokens_per_second']:.1f}",
                f"{1e3 / figure['tokens_per_second']:.2f}",
                spread(times[way.name], 1e3, 2),
                f"{figure['bytes_per_token'] / 1e6:.1f}",
                f"{figure['of_the_limit']:.0%}",
                *(told[peer] for peer in peers),
                f"{statistics.median(figure['seconds_to_first']) * 1e3:.0f}",
                f"{figure['peak'] / 2**20:.0f}",
                f"{(figure['peak'] - figure['before']) / 2**20:.0f}",
                said(figure["check"], way.name),
            ]
        )
    notes = [
        f"{options.prompt_tokens} prompt tokens, {options.max_new_tokens} new ones; memory is read at {speed / 1e9:.1f} GB/s",
        "peak: the most memory that the arm's own process held, loading included; start: Python with torch, before the model",
    ]
    if any(longer.values()):
        by_context = _by_context(longer, running)
        notes += ["", common.table(by_context, right=range(1, len(by_context[0])))]
    lines = {name: {c: 1 / statistics.median(taken) for c, taken in held.items()} for name, held in longer.items() if held}
    common.tell(
        options,
        "decode",
        rows,
        {"bandwidth": speed, "arms": figures, "ratios": all_ratios(found, times), "contexts": longer},
        notes,
    )
    bars = {name: [1 / taken for taken in each] for name, each in times.items()}
    limits = {name: speed / figure["bytes_per_token"] for name, figure in figures.items()}
    common.draw(options, bars, "tokens/s", limits, lines, "tokens before the new one")


def _by_context(longer: Mapping[str, Mapping[int, Sequence[float]]], running: Mapping[str, Worker]) -> list[list[str]]:
    contexts = sorted({context for held in longer.values() for context in held})
    rows = [["tokens/s after …", *(f"{context:,}" for context in contexts), "time grows", "bytes explain"]]
    for name, held in longer.items():
        if set(held) == set(contexts):  # a peer may have failed on the way
            grown, explained = growth(held, running[name].about["read"], running[name].about["cache"])
            middles = (f"{1 / statistics.median(held[context]):.1f}" for context in contexts)
            rows.append([name, *middles, f"{grown - 1:+.0%}", f"{explained - 1:+.0%}"])
    return rows
