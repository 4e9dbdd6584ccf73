"""The study notes' experiment: the same text with the cache and without, counted first and timed afterwards.

What needs no clock comes first, because it is true on every machine: both ways make one forward pass per new token, and they
differ in how many positions those passes compute, P + N - 1 with the cache and P + (P + 1) + … without. Times follow, with a
warm-up, the order alternated, and the device waited for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from . import cli
from .generate import Choice, Stepper
from .model import Decoder

SHOWN = 8  # ranges of lengths in the table


@dataclass
class Way:
    """One of the two ways: what it did, and how long each step of each run took, in seconds."""

    name: str
    use_cache: bool
    forwards: int = 0
    positions: int = 0
    ids: list[int] = field(default_factory=list)
    runs: list[list[float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of a run, the median."""
        return statistics.median(map(sum, self.runs))

    def at(self, step: int) -> float:
        """Of one step, the median over the runs."""
        return statistics.median(run[step] for run in self.runs)


def compare_cache(
    model: Decoder, ids: Sequence[int], max_new_tokens: int, repeats: int, *, sampler: Choice | None = None, seed: int = 0
) -> tuple[Way, Way]:
    """Generate max_new_tokens after a prompt `repeats` times with the cache and without; -> both ways.

    Raises ValueError when there is nothing to measure, or the context is too short.
    """
    if repeats < 1 or max_new_tokens < 1:
        raise ValueError(f"there must be at least 1 repeat and 1 new token, not {repeats} and {max_new_tokens}")
    room = model.config.max_seq_len - len(ids) + 1
    if max_new_tokens > room:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, {max_new_tokens} new ones are asked for, and the context holds "
            f"{model.config.max_seq_len}: ask for at most {room}"
        )
    ways = (Way("with the cache", True), Way("without", False))
    for way in ways:
        _run(model, ids, min(2, max_new_tokens), way, sampler, seed)  # warm up
        way.runs.clear()
    for turn in range(repeats):
        for way in ways if turn % 2 == 0 else ways[::-1]:
            _run(model, ids, max_new_tokens, way, sampler, seed)
    return ways


def _run(model: Decoder, ids: Sequence[int], n: int, way: Way, sampler: Choice | None, seed: int) -> None:
    stepper = Stepper(model, sampler=sampler, use_cache=way.use_cache)
    stepper.add(ids, max_new_tokens=n, seed=seed, eos_ids=())
    way.ids, taken = [], []
    while len(stepper):
        cli.synchronize(model.device)
        start = time.perf_counter()
        way.ids += stepper.step().ids.tolist()
        cli.synchronize(model.device)
        taken.append(time.perf_counter() - start)
    way.runs.append(taken)
    way.forwards, way.positions = stepper.forwards, stepper.positions


def table(cached: Way, anew: Way, prompt_tokens: int) -> str:
    """Both ways beside each other."""
    n = len(cached.ids)
    ratio = f"{anew.seconds / cached.seconds:.2f} times as long without the cache"
    lines = [
        f"prompt {prompt_tokens} tokens, {n} new ones, {len(cached.runs)} runs each",
        f"{'':24}{cached.name:>16}{anew.name:>16}",
        f"{'forward passes':24}{cached.forwards:16,}{anew.forwards:16,}",
        f"{'positions computed':24}{cached.positions:16,}{anew.positions:16,}",
        f"{'seconds, median run':24}{cached.seconds:16.3f}{anew.seconds:16.3f}   {ratio}",
        f"{'ms a token, median run':24}{cached.seconds / n * 1e3:16.2f}{anew.seconds / n * 1e3:16.2f}",
        "ms a token, median, after …",
    ]
    edges = [round(i * n / min(n, SHOWN)) for i in range(min(n, SHOWN) + 1)]
    for start, end in pairwise(edges):
        lengths = f"{prompt_tokens + start} to {prompt_tokens + end - 1}" if end - start > 1 else f"{prompt_tokens + start}"
        medians = [statistics.median(way.at(step) for step in range(start, end)) * 1e3 for way in (cached, anew)]
        lines.append(f"{f'  {lengths} tokens':24}{medians[0]:16.2f}{medians[1]:16.2f}")
    changed = next((i for i, (a, b) in enumerate(zip(cached.ids, anew.ids, strict=True)) if a != b), None)
    lines.append("the same tokens both ways" if changed is None else f"the tokens differ from new token {changed + 1} on")
    return "\n".join(lines)


def draw(cached: Way, anew: Way, prompt_tokens: int, path: Path) -> bool:
    """Time per token against length as a picture; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    lengths = [prompt_tokens + step for step in range(len(cached.ids))]
    for way in (anew, cached):
        axes.plot(lengths, [way.at(step) * 1e3 for step in range(len(lengths))], label=way.name)
    axes.set(xlabel="tokens before the new one", ylabel="milliseconds for a new token", ylim=(0, None))
    axes.set_title(f"median of {len(cached.runs)} runs")
    axes.legend()
    figure.savefig(path, dpi=150)
    return True
