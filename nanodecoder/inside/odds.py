"""What the model expected: of each token of a text, and at each step that generated one, with what the filters left."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..sampler import Rows, Sampler
from ..tokenizer import Tokenizer
from .columns import table, visible

SHOWN = 8  # candidates of a step


@dataclass(frozen=True)
class Expected:
    """How a text's next token was expected after `position`: its probability and rank, and the model's own first choice."""

    position: int
    id: int
    probability: float
    rank: int
    best: int
    best_probability: float

    @property
    def bits(self) -> float:
        """Surprise: 0 where it was certain, 1 where it was as likely as not."""
        return -math.log2(max(self.probability, 2.0**-126))


@dataclass(frozen=True)
class Candidate:
    """An id that might come next: its raw logit, its probability, and what is left of that after temperature and filters."""

    id: int
    logit: float
    probability: float
    filtered: float


@dataclass(frozen=True)
class Choice:
    """One step: the likeliest candidates, the chosen one among them in any case, and how many each filter left."""

    position: int
    chosen: int
    candidates: tuple[Candidate, ...]
    left: tuple[tuple[str, int], ...]


@torch.no_grad()
def expected(logits: Tensor, ids: Sequence[int], first: int = 0) -> list[Expected]:
    """How each next token of a text was expected. logits (N, V) after positions first … first + N - 1 of it; ids: all of it"""
    found = []
    for position, row in enumerate(logits.float(), first):
        if position + 1 == len(ids):
            break
        index = ids[position + 1]
        chances = row.softmax(-1)
        best = int(row.argmax())
        rank = int((row > row[index]).sum()) + 1
        found.append(Expected(position, index, float(chances[index]), rank, best, float(chances[best])))
    return found


@torch.no_grad()
def choice(logits: Tensor, chosen: int, sampler: Sampler, ids: Sequence[int], step: int, top: int = SHOWN) -> Choice:
    """A step's candidates. logits (V,) as the model gave them; ids: all before; step: which one of the text it is, from 1"""
    rows = Rows(seeds=[0], positions=[len(ids)], ids=[ids], steps=[step])
    raw = logits.float()[None]
    chances, after = raw.softmax(-1)[0], sampler.probabilities(raw, rows)[0]
    best = raw[0].topk(min(top, raw.shape[-1])).indices.tolist()
    if chosen not in best:
        best[-1:] = [chosen]
    found = tuple(Candidate(n, float(raw[0, n]), float(chances[n]), float(after[n])) for n in best)
    return Choice(len(ids), chosen, found, left(raw, sampler, rows))


def left(logits: Tensor, sampler: Sampler, rows: Rows) -> tuple[tuple[str, int], ...]:
    """How many ids are possible at first, and after each filter that is on, in their order. logits (1, V)"""

    def possible(settings: Sampler) -> int:
        return int(settings.filter(logits, rows).isfinite().sum())

    found = [("ids", logits.shape[-1])]
    if sampler.temperature == 0:
        return (*found, ("temperature 0", 1))
    open_ = replace(sampler, top_k=0, top_p=1.0, min_p=0.0)
    if (allowed := possible(open_)) < logits.shape[-1]:
        found.append(("bans", allowed))
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        value = getattr(sampler, name)
        if value != off:
            open_ = replace(open_, **{name: value})
            found.append((f"{name} {value:g}", possible(open_)))
    return tuple(found)


class Recorder:
    """A filter that changes nothing and keeps the last logits that the model gave: (B, V), in the order of a step's rows."""

    def __init__(self) -> None:
        self.logits: Tensor | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        self.logits = logits
        return logits


# ---------------------------------------------------------------------------------------------------------------- in words


def percent(share: float) -> str:
    """A probability; one that would be rounded to 0.0 % is below 0.1."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def show_expected(found: Sequence[Expected], labels: Sequence[str], spell: Callable[[int], str]) -> str:
    """A line for each token of a text. labels: of all its positions; spell: an id's text"""
    lines = [("after", "came", "p", "rank", "bits", "", "expected", "p")]
    for one in found:
        surprise = "▁▂▃▄▅▆▇█"[min(7, int(one.bits / 2))]
        own = "(that)" if one.best == one.id else spell(one.best)
        cells = (percent(one.probability), f"{one.rank:,}", f"{one.bits:.1f}", surprise, own, percent(one.best_probability))
        lines.append((labels[one.position], labels[one.position + 1], *cells))
    total = sum(one.bits for one in found)
    told = (
        f"{total:.1f} bits in all, {total / len(found):.2f} a token" if found else "one token: nothing was expected before it"
    )
    return table(lines, right=(2, 3, 4, 7), longest=24) + "\n" + told


def show_choices(found: Sequence[Choice], spell: Callable[[int], str], sampler: Sampler) -> str:
    """Each step's candidates; ▶ is the chosen one."""
    texts = []
    for step, one in enumerate(found, 1):
        lines = [("", "candidate", "id", "logit", "p", "p drawn from")]
        for c in one.candidates:
            mark = "▶" if c.id == one.chosen else ""
            drawn = percent(c.filtered) if c.filtered else "out"
            lines.append((mark, spell(c.id), str(c.id), f"{c.logit:.2f}", percent(c.probability), drawn))
        kept = " → ".join(f"{n:,} {name}" if name == "ids" else f"{n:,} after {name}" for name, n in one.left)
        texts.append(f"step {step}, position {one.position}: {kept}\n" + table(lines, right=(2, 3, 4, 5), longest=24))
    told = f"p: softmax of the logits; drawn from: after temperature {sampler.temperature:g} and the filters"
    return "\n\n".join([*texts, told]) if texts else "no token was generated, so there is no step"


def speller(tokenizer: Tokenizer) -> Callable[[int], str]:
    """An id's own text with nothing invisible, where no neighbours complete it: bytes that are no character as ⟨e6 98⟩."""

    def spell(index: int) -> str:
        if tokenizer.is_special(index):
            return visible(tokenizer.decode([index], special=True))
        held = tokenizer.token_bytes(index)
        try:
            return visible(held.decode())
        except UnicodeDecodeError:
            return f"⟨{held.hex(' ')}⟩"

    return spell
