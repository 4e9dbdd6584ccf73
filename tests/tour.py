"""What the tour prints: its commands and its Python, the lines it shows of their output, and how these are made anew.

    python -m tests.tour            say which lines are not as they are printed
    python -m tests.tour --update   print them anew, in both languages (then read what the text says about them)

A block of `sh` or `python` with a block of `text` right behind it shows what it prints. Behind the word `text` stand, as Python
has them, the slices of the lines that are shown (nothing: all); a line of … stands for those left out. What a clock
or this machine's memory said becomes … too. The Python blocks of a page are one session. Commands that name checkpoints/smollm2
need that model.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import nanodecoder as nd
import nanodecoder.__main__ as command
import sample
from nanodecoder.inside import plan

ROOT = Path(__file__).parent.parent
PAGES = ("docs/tour.md", "docs/tour.ko.md")
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.M | re.S)
REAL = "checkpoints/smollm2"
REAL_MODEL = Path(os.environ.get("NANODECODER_MODELS", Path.home() / ".cache" / "nanodecoder")) / "smollm2"
CLOCK = re.compile(r", (?:prefill [\d,]+ tokens/s|decode [\d,.]+ tokens/s|first token after|peak memory).*")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, what stands behind it, what is in it, and where that lies in the page."""

    kind: str
    about: str
    body: str
    start: int
    end: int


@dataclass(frozen=True)
class Shown:
    """A command and what the page shows of its output."""

    code: Block
    text: Block

    @property
    def is_real(self) -> bool:
        return REAL in self.code.body


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(m[1], m[2].strip(), m[3], m.start(3), m.end(3)) for m in FENCE.finditer(page)]


def shown(page: str) -> list[Shown]:
    """What stands with its output in a page."""
    found = blocks(page)
    return [
        Shown(code, text)
        for code, text in pairwise(found)
        if code.kind in ("sh", "python") and re.fullmatch(r"```\s+```text[^\n]*\n", page[code.end : text.start])
    ]


def choose(output: str, about: str) -> str:
    """The lines of an output that `about` names, with … for what is left out between, before and behind them."""
    lines = [CLOCK.sub(", …", line.rstrip()) for line in output.strip("\n").split("\n")]
    wanted = set(range(len(lines))) if not about else set()
    for piece in about.split():
        ends = [int(end) if end else None for end in piece.split(":")]
        wanted |= set(range(len(lines))[slice(*ends) if ":" in piece else slice(ends[0], ends[0] + 1 or None)])
    out: list[str] = []
    for number, line in enumerate(lines):
        if number in wanted:
            out.append(line)
        elif out[-1:] != ["…"]:
            out.append("…")
    return "\n".join(out) + "\n"


def same(ours: str, printed: str) -> bool:
    """Whether two outputs are the same, decimal numbers up to one in their last place (kernels round differently)."""
    if NUMBER.sub("#", ours) != NUMBER.sub("#", printed):
        return False
    for one, other in zip(NUMBER.findall(ours), NUMBER.findall(printed), strict=True):
        one, other = one.replace(",", ""), other.replace(",", "")
        places = [len(x.partition(".")[2]) for x in (one, other)]
        if places[0] != places[1] or abs(float(one) - float(other)) > (1.001 * 10 ** -places[0] if places[0] else 0):
            return False
    return True


def printed(found: list[Shown], desk: Path, with_real: bool) -> Iterator[tuple[Shown, str]]:
    """Run what stands there, in order, and give what each prints (both streams, as a terminal shows them)."""
    session: dict[str, Any] = {}
    with contextlib.chdir(desk), torch.random.fork_rng([]), _quick():
        for one in found:
            if with_real or not one.is_real:
                yield one, choose(_run(one.code, session), one.text.about)


@contextlib.contextmanager
def _quick() -> Iterator[None]:
    """Load each model once, and do not measure this machine, of which the tour shows nothing."""
    with patch.object(nd, "load_model", cache(nd.load_model)), patch.object(plan, "bandwidth", lambda device: 1e10):
        yield


def _run(code: Block, session: dict[str, Any]) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream), torch.enable_grad():
        if code.kind == "python":
            exec(compile(code.body, "<tour>", "exec"), session)
        for line in code.body.splitlines() if code.kind == "sh" else ():
            words = shlex.split(line)
            if words[:2] == ["python", "sample.py"]:
                sample.main([*words[2:], "--device", "cpu"])
            elif words[:3] == ["python", "-m", "nanodecoder"]:
                command.main(words[3:])
            else:
                raise ValueError(f"the tour shows what this prints, and it is not known how to run it: {line}")
    return stream.buffer.getvalue().decode()


def make_desk(folder: Path, real: Path | None) -> Path:
    """A folder as the tour's readers have it."""
    for name in ("weights", "docs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "checkpoints").mkdir()
    if real is not None:
        (folder / REAL).symlink_to(real)
    return folder


def main(update: bool) -> int:
    """Compare what the pages show with what is printed, or put that there."""
    torch.set_num_threads(1)
    real = REAL_MODEL if (REAL_MODEL / "config.json").is_file() else None
    if real is None:
        print(f"no {REAL_MODEL}: its commands are left as they are", file=sys.stderr)
    made: dict[tuple[str, str], str] = {}
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        desk = make_desk(Path(folder), real)
        for page in PAGES:
            path = ROOT / page
            if not path.is_file():
                continue
            text = path.read_text()
            found = shown(text)
            if any((one.code.body, one.text.about) not in made for one in found):
                made |= {(one.code.body, one.text.about): new for one, new in printed(found, desk, real is not None)}
            for one in reversed(found):
                new = made.get((one.code.body, one.text.about))
                if new is None or same(one.text.body, new):
                    continue
                wrong += 1
                print(f"{page}: {one.code.body.splitlines()[0]}\n{new}", file=sys.stderr)
                text = text[: one.text.start] + new + text[one.text.end :]
            if update:
                path.write_text(text)
    return 0 if update else min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main("--update" in sys.argv[1:]))
