"""Where the heads look: maps of attention, over tokens or words, and the row of one word.

A word of several tokens is one row and one column: what is looked at is added over its keys, and averaged over its queries. So
rows still sum to one, and nothing is above the diagonal.

The first token collects weight that means little: a head that finds nothing to look at has to look somewhere (arXiv
2309.17453). So rows are shown without it, too.

Legend: L layers, H query heads, T tokens, U units (tokens or words that are one row and one column).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import visible
from ..config import ModelConfig
from .columns import fit, table, width, wrapped
from .pieces import Word

DRAWN, THINNED = 128, 64  # tokens of a text up to which each is drawn, and units of a longer one
HEADS = 8  # named in the summary


@dataclass(frozen=True)
class Looks:
    """What heads of `layers` did in one text.

    maps (L, H, U, U): over `units`; row (L, H, T): of the word `look`, to each token.
    """

    layers: tuple[int, ...]
    units: tuple[Word, ...]
    maps: Tensor
    look: Word
    row: Tensor

    @property
    def mean(self) -> Tensor:
        """(T,) the row of `look`, averaged over all heads."""
        return self.row.mean((0, 1))


def merge(weights: Tensor, units: Sequence[Word]) -> Tensor:
    """Attention over tokens -> over units: keys added, queries averaged. (…, T, T) -> (…, U, U)"""
    first = torch.zeros(weights.shape[-1], len(units), dtype=weights.dtype, device=weights.device)
    for n, unit in enumerate(units):
        first[unit.slice, n] = 1
    sizes = first.sum(0)
    return (first.T @ weights @ first) / sizes[:, None]


def thin(words: Sequence[Word], most: int, apart: Sequence[Word] = ()) -> list[Word]:
    """At most `most` units (and those `apart`, which stay alone, and the first token): neighbouring words together."""
    alone = {0} | {n for word in apart for n in range(word.start, word.stop)}
    runs: list[list[Word]] = []
    for word in words:
        if word.start in alone or not runs or runs[-1][-1].start in alone:
            runs.append([word])
        else:
            runs[-1].append(word)
    size = 1
    while sum(1 if run[0].start in alone else -(-len(run) // size) for run in runs) > max(most, len(alone) + 1):
        size += 1
        if size > len(words):
            break
    units = []
    for run in runs:
        step = 1 if run[0].start in alone else size
        for start in range(0, len(run), step):
            part = run[start : start + step]
            units.append(Word(part[0].start, part[-1].stop, "".join(word.text for word in part)))
    return units


def impossible(config: ModelConfig, layer: int, units: Sequence[Word]) -> Tensor:
    """Which units no head of a layer can see from which: (U, U) bool. Later ones, and those outside window and stride."""
    length = units[-1].stop
    at = torch.arange(length)
    seen = visible(at[None], at, config.windows[layer], config.sparse_stride)[0]
    return merge(seen.float(), units) == 0


def towards(looks: Looks, at: Word) -> list[tuple[int, int, float]]:
    """(layer, head, share) of all heads, by how much of `look`'s weight lies on `at`."""
    shares = looks.row[:, :, at.slice].sum(-1)
    order = shares.flatten().argsort(descending=True, stable=True).tolist()
    heads = shares.shape[1]
    return [(looks.layers[n // heads], n % heads, float(shares[n // heads, n % heads])) for n in order]


@dataclass(frozen=True)
class Share:
    """How much of a row lies on one word: on average over heads, of what is left without the first token, and in which head
    (layer, head, share) most."""

    word: Word
    weight: float
    without_first: float | None
    most: tuple[int, int, float]


def shares(looks: Looks, words: Sequence[Word]) -> list[Share]:
    """The row of `look`, word by word, the largest first."""
    mean, rest = looks.mean, float(looks.mean[1:].sum())
    found = []
    for word in words:
        if word.start < looks.look.stop:
            without = float(mean[max(1, word.start) : word.stop].sum()) / rest if word.stop > 1 and rest > 0 else None
            found.append(Share(word, float(mean[word.slice].sum()), without, towards(looks, word)[0]))
    return sorted(found, key=lambda share: -share.weight)


def first_token(looks: Looks) -> list[str]:
    """What the first token's share of the row is worth, in a sentence, where it has the largest of a row of several."""
    if looks.look.start == 0 or int(looks.mean.argmax()) > 0:
        return []
    heads = looks.row.shape[0] * looks.row.shape[1]
    most = int((looks.row[:, :, 0] > 0.5).sum())
    return [
        f"The first token collects weight that means little: {float(looks.mean[0]):.3f} of this row on average, and more than "
        f"half of it in {most} of {heads} heads."
    ]


def lookers(looks: Looks, at: Word) -> str:
    """Which heads look most from `look` at a word, in a sentence."""
    named = [f"{layer}.{head} {share:.3f}" for layer, head, share in towards(looks, at)[:HEADS]]
    return f"heads that look most at {at.label!r} from {looks.look.label!r} (block.head): {', '.join(named)}"


# ---------------------------------------------------------------------------------------------------------------- in words


def summary(looks: Looks, words: Sequence[Word], at: Word | None, most: int = 12) -> str:
    """The row of `look`, with the first token and without, and who looks most at `at`."""
    lines = [("", f"from {looks.look.label!r} to", "weight", "without the first", "most in head")]
    found = shares(looks, words)
    for share in found[:most]:
        without = "" if share.without_first is None else f"{share.without_first:.3f}"
        layer, head, part = share.most
        lines.append((str(share.word.start), share.word.label, f"{share.weight:.3f}", without, f"{layer}.{head} {part:.3f}"))
    heads = looks.row.shape[0] * looks.row.shape[1]
    texts = [f"the row of {looks.look.label!r}, mean of the {heads} heads of all blocks", table(lines, right=(0, 2, 3))]
    if len(found) > most:
        texts.append(f"({len(found) - most} more words take {sum(share.weight for share in found[most:]):.3f})")
    told = [*first_token(looks), *([] if at is None else [lookers(looks, at)])]
    return "\n".join([*texts, *map(wrapped, told)])


def draw(looks: Looks, config: ModelConfig, words: Sequence[Word], most: int = 40) -> str:
    """The mean over all heads as a small map over words; a sentence where it would be too wide."""
    if len(words) > most or len(looks.units) < looks.row.shape[-1]:
        return f"(no map of {len(words)} words here: --report FILE.html draws it)"
    mean = merge(looks.maps.mean((0, 1)), words)
    never = torch.stack([impossible(config, layer, words) for layer in looks.layers]).all(0)
    longest = min(16, max(width(word.label) for word in words))
    lines = []
    for q, word in enumerate(words):
        cells = "".join("╌╌" if never[q, k] else 2 * _shade(float(mean[q, k])) for k in range(q + 1))
        lines.append(f"{fit(word.label, longest, right=True)} {cells}")
    return "\n".join(
        [*lines, f"{'':{longest}} · up to 2 %, ░ 8 %, ▒ 20 %, ▓ 45 %, █ more" + ", ╌ impossible" * bool(never.tril().any())]
    )


def _shade(share: float) -> str:
    return next(mark for bound, mark in ((0.02, "·"), (0.08, "░"), (0.2, "▒"), (0.45, "▓"), (9.0, "█")) if share <= bound)
