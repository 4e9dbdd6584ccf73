"""What a comparison of variants found: one entry for each run, and from them a table and a chart."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..inside.columns import size, table
from ..parts import CheckpointError
from .recall import CHANCE
from .record import write
from .variants import BASE

RUNS = "runs.jsonl"


@dataclass(frozen=True)
class Finding:
    """One finished run. Losses are in nats per token of held-out text.

    by_position: for each position up to twice the trained length, None where the variant has none; near, far: the part of lines
    whose first letter was recalled, 0 to 1; cache_bytes: of one token, in float32.
    """

    variant: str
    seed: int
    parameters: int
    ffn_dim: int
    cache_bytes: int
    loss: float
    by_position: tuple[float | None, ...]
    near: float
    far: float
    seconds: float


@dataclass(frozen=True)
class Speed:
    """Tokens a second of one variant, one figure for each turn: training steps, and generating with the cache, one row."""

    training: tuple[float, ...]
    decoding: tuple[float, ...]


def record(folder: Path, finding: Finding) -> None:
    """Add a finished run to RUNS."""
    with (folder / RUNS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(finding)) + "\n")


def recorded(folder: Path) -> list[Finding]:
    """The finished runs of RUNS. A line that was torn when the program was killed is forgotten, in the file too.

    Raises CheckpointError for a line that is no run of ours, which is not thrown away.
    """
    path = folder / RUNS
    if not path.is_file():
        return []
    names = {field.name for field in fields(Finding)}
    found, kept = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if not isinstance(entry, dict) or entry.keys() != names:
            raise CheckpointError(f"{path} holds a line that is no run of this version: name another --out_dir")
        found.append(Finding(**entry | {"by_position": tuple(entry["by_position"])}))
        kept.append(line + "\n")
    write(path, "".join(kept))
    return found


# ------------------------------------------------------------------------------------------------------------- in numbers


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation (of the sample: n - 1); None for the spread of a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def less_base(findings: Sequence[Finding], variant: str) -> list[float]:
    """A variant's loss less the base's, seed by seed, where both are there: chance that they share is no difference."""
    base = {finding.seed: finding.loss for finding in findings if finding.variant == BASE}
    return [f.loss - base[f.seed] for f in findings if f.variant == variant and f.seed in base]


def positions(findings: Sequence[Finding]) -> list[float | None]:
    """The loss at each position, mean over runs of one variant; None where there is no such position."""
    columns = zip(*(finding.by_position for finding in findings), strict=True)
    return [None if None in column else statistics.fmean(column) for column in columns]


def ranges(block_size: int) -> list[tuple[int, int]]:
    """Ranges of positions for the table, from and up to but without: three up to the trained length, two beyond."""
    edges = [0, max(1, block_size // 8), max(2, block_size // 2), block_size, block_size * 3 // 2, 2 * block_size]
    return list(pairwise(edges))


def summary(findings: Sequence[Finding], speeds: Mapping[str, Speed]) -> list[dict[str, Any]]:
    """One object for each variant, in the order in which they came: means and spreads of all that was measured."""
    made = []
    for variant in dict.fromkeys(finding.variant for finding in findings):
        own = [finding for finding in findings if finding.variant == variant]
        entry: dict[str, Any] = {"variant": variant, "seeds": [finding.seed for finding in own]}
        entry |= {name: getattr(own[0], name) for name in ("parameters", "ffn_dim", "cache_bytes")}
        entry["loss"], entry["loss_spread"] = mean_and_spread([finding.loss for finding in own])
        differences = less_base(findings, variant)
        entry["less_base"], entry["less_base_spread"] = mean_and_spread(differences) if differences else (None, None)
        entry["by_position"] = positions(own)
        for name in ("near", "far"):
            values = [getattr(finding, name) for finding in own]
            entry[f"recall_{name}"], entry[f"recall_{name}_spread"] = mean_and_spread(values)
        if variant in speeds:
            for name in ("training", "decoding"):
                values = getattr(speeds[variant], name)
                entry[f"{name}_tokens_per_s"] = statistics.median(values)
                entry[f"{name}_tokens_per_s_range"] = [min(values), max(values)]
        made.append(entry)
    return made


# --------------------------------------------------------------------------------------------------------------- in words


def _with_spread(value: float | None, spread: float | None, form: str) -> str:
    if value is None:
        return "–"
    return f"{value:{form}}" if spread is None else f"{value:{form}} ± {spread:{form.lstrip('+')}}"


def tables(rows: Sequence[Mapping[str, Any]], block_size: int, distances: tuple[int, int]) -> str:
    """A summary as text of 80 columns: size, loss and speed of each variant; its loss by position and what it recalls."""
    head = ("variant", "ffn", "params", "loss", "less base", "cache", "train/s", "gen/s")
    lines = [head]
    for row in rows:
        speeds = [f"{row[key]:,.0f}" if key in row else "–" for key in ("training_tokens_per_s", "decoding_tokens_per_s")]
        difference = "" if row["variant"] == BASE else _with_spread(row["less_base"], row["less_base_spread"], "+.3f")
        loss = _with_spread(row["loss"], row["loss_spread"], ".3f")
        sizes = (f"{row['ffn_dim']:,}", f"{row['parameters']:,}")
        lines.append((row["variant"], *sizes, loss, difference, size(row["cache_bytes"]), *speeds))
    first = table(lines, right=(1, 2, 5, 6, 7))

    spans = ranges(block_size)
    names = [f"{start + 1}–{end}" for start, end in spans]
    lines = [("variant", *names, *(f"{distance} back" for distance in distances))]
    for row in rows:
        losses = [_mean_of(row["by_position"][start:end]) for start, end in spans]
        recalls = [f"{row[f'recall_{name}']:.0%}" for name in ("near", "far")]
        lines.append((row["variant"], *losses, *recalls))
    second = table(lines, right=range(1, len(lines[0])))
    notes = [f"loss by position (trained on {block_size}), and letters recalled (chance: {CHANCE:.1%})"]
    beyond = [row["variant"] for row in rows if None in row["by_position"]]
    if beyond:
        notes.append(f"–: {', '.join(beyond)} has a vector for each of {block_size} positions and none for later ones")
    return "\n".join([first, "", *notes, second])


def _mean_of(losses: Sequence[float | None]) -> str:
    return "–" if None in losses else f"{statistics.fmean(losses):.3f}"


# -------------------------------------------------------------------------------------------------------------- in colour


def draw(findings: Sequence[Finding], block_size: int, distances: tuple[int, int], path: Path) -> bool:
    """Loss of every run, loss by position, and recall, as one picture; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = summary(findings, {})
    names = [row["variant"] for row in rows]
    figure = Figure(figsize=(10, 3 + 0.35 * len(names)), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "position"], ["recall", "position"]], width_ratios=(1, 1.3))
    colours = [f"C{number % 10}" for number in range(len(names))]
    for place, (name, row) in enumerate(zip(names, rows, strict=True)):
        runs = [finding.loss for finding in findings if finding.variant == name]
        axes["loss"].plot(runs, [place] * len(runs), "o", color=colours[place], alpha=0.5, markersize=5)
        axes["loss"].plot([row["loss"]], [place], "|", color="black", markersize=14)
        xs, ys = _smooth(row["by_position"], max(1, block_size // 16))
        dashes = ("-", "--")[place // 10 % 2]
        axes["position"].plot(xs, ys, dashes, color=colours[place], label=name, linewidth=1.5)
        for shift, key, shade in ((-0.2, "near", 0.4), (0.2, "far", 1.0)):
            axes["recall"].barh(place + shift, 100 * row[f"recall_{key}"], 0.36, color=colours[place], alpha=shade)
    for key in ("loss", "recall"):
        axes[key].set_yticks(range(len(names)), names)
        axes[key].set_ylim(len(names) - 0.5, -0.5)
    axes["loss"].set_xlabel("held-out loss of each run, nats (|: mean)")
    axes["recall"].axvline(100 * CHANCE, color="black", linestyle=":", linewidth=1)
    axes["recall"].set_xlabel(f"% recalled, {distances[0]} (pale) and {distances[1]} back (dotted: chance)")
    axes["position"].axvline(block_size, color="black", linestyle=":", linewidth=1)
    axes["position"].set_xlabel("position in the row (dotted: the trained length)")
    axes["position"].set_ylabel("loss, nats per token")
    axes["position"].legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=100)
    return True


def _smooth(losses: Sequence[float | None], places: int) -> tuple[list[float], list[float]]:
    """Means over so many neighbouring positions, and the middle of each, counted from 1."""
    middle: Callable[[int], float] = lambda start: start + (places + 1) / 2  # noqa: E731
    starts = [start for start in range(0, len(losses), places) if None not in losses[start : start + places]]
    return [middle(start) for start in starts], [statistics.fmean(losses[start : start + places]) for start in starts]
