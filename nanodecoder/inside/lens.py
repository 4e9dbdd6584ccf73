"""The logit lens: what the head would say of the stream after each half of each block (nostalgebraist 2020).

The model itself computes logits once, behind its last block. Reading the stream earlier is our doing; it shows where a word
comes up, as far as the later blocks leave the stream's directions as they are.

Legend: L layers, P positions looked at, V vocabulary. Halves: 0 after attention, 1 after the feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model import Decoder
from .columns import table, visible

HALVES = ("attention", "feed-forward")


@dataclass(frozen=True)
class Watched:
    """An id and its text, followed through the blocks at one position: probability (L, 2), and whether it is on top (L, 2)."""

    id: int
    text: str
    position: int
    probability: Tensor
    top: Tensor


@dataclass(frozen=True)
class Lens:
    """What the head says at `positions` after each half of each of `layers`: ids and probabilities (L, 2, P)."""

    layers: tuple[int, ...]
    positions: tuple[int, ...]
    ids: Tensor
    probability: Tensor
    watched: tuple[Watched, ...]


def read(
    model: Decoder, streams: Sequence[Tensor], positions: Sequence[int], follow: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top ids and probabilities (2, P), and for each (id, place among positions) of `follow` its probability and whether it is
    on top (2, F). streams: after attention and after the feed-forward, (T, dim) each"""
    at = torch.tensor(list(positions), device=streams[0].device)
    chances = [model.head(model.norm(stream[at])).float().softmax(-1) for stream in streams]  # (P, V) each
    best = torch.stack([one.max(-1).values for one in chances])
    ids = torch.stack([one.argmax(-1) for one in chances])
    own = torch.tensor([[float(one[place, index]) for index, place in follow] for one in chances])
    top = torch.tensor([[int(one[place].argmax()) == index for index, place in follow] for one in chances])
    return ids.cpu(), best.cpu(), own, top


def gather(
    layers: Sequence[int], positions: Sequence[int], found: Sequence[tuple[Tensor, ...]], follow: Sequence[tuple[int, int, str]]
) -> Lens:
    """What `read` gave of each layer, as one. follow: (id, place, text)"""
    ids, best, own, top = (torch.stack(part) for part in zip(*found, strict=True))
    watched = tuple(
        Watched(index, text, positions[place], own[:, :, n], top[:, :, n]) for n, (index, place, text) in enumerate(follow)
    )
    return Lens(tuple(layers), tuple(positions), ids, best, watched)


# ---------------------------------------------------------------------------------------------------------------- in words


ONCE = "The model itself computes logits once, at the end; this reads the stream on its way with the same final norm and head."


def story(one: Watched, layers: Sequence[int], label: str) -> str:
    """Where a watched id came to the top, and which half raised it."""
    flat, on_top = one.probability.flatten(), one.top.flatten()  # attention, feed-forward, attention, …
    told = f"{visible(one.text)!r} after {label!r} (position {one.position}): {float(flat[-1]):.1%} at the end"
    if not on_top.any():
        return f"{told}; it is never on top"
    first = int(on_top.nonzero()[0])
    by = f"by the {HALVES[first % 2]} of block {layers[first // 2]}"
    told += f"; first on top after {first // 2 + 1} of {len(layers)} blocks ({by})"
    most = int(flat.diff(prepend=torch.zeros(1)).argmax())
    before = float(flat[most - 1]) if most else 0.0
    gains = flat.clamp_min(1e-30).log().diff()
    by_half = [float(gains[half::2].sum()) for half in (1, 0)]  # the first difference is the first block's feed-forward
    return (
        f"{told}; raised most by the {HALVES[most % 2]} of block {layers[most // 2]}, from {before:.1%} to "
        f"{float(flat[most]):.1%} (changes of ln p in all: attention {by_half[0]:+.1f}, feed-forward {by_half[1]:+.1f})"
    )


def show(found: Lens, labels: Sequence[str], spell: Callable[[int], str], shown: int = 6) -> str:
    """The top token after each block, at the last few positions, and the stories of the watched."""
    places = range(len(found.positions))[-shown:]
    lines = [("block", *(f"after {labels[found.positions[p]]}" for p in places))]
    for n, layer in enumerate(found.layers):
        cells = [f"{spell(int(found.ids[n, 1, p]))} {float(found.probability[n, 1, p]):.0%}" for p in places]
        lines.append((str(layer), *cells))
    texts = [story(one, found.layers, labels[one.position]) for one in found.watched]
    return "\n".join([table(lines, right=(0,), longest=20), ONCE, *texts])
