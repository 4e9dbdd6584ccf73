"""What a run writes for its reader: figures, a line each, and a drawing of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


def log(folder: Path, entry: dict[str, Any]) -> None:
    """Add a line of figures."""
    with (folder / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def write(path: Path, text: str) -> None:
    """A whole file or none."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def forget_after(folder: Path, step: int) -> None:
    """Forget what was logged after the state was saved: those steps will be made again."""
    path = folder / METRICS
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        kept = []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                break  # torn when the run was killed
            if entry["step"] > step:
                break
            kept.append(line + "\n")
        write(path, "".join(kept))


def draw(folder: Path) -> bool:
    """loss.png of metrics.jsonl, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False

    if not (folder / METRICS).is_file():
        return False
    entries = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for key, label in (("loss", "training"), ("val_loss", "validation")):
        points = [(entry["step"], entry[key]) for entry in entries if key in entry]
        if points:
            style = {"linewidth": 1} if key == "loss" else {"linewidth": 2, "marker": "."}
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=110)
    return True
