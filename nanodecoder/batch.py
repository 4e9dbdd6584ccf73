"""How rows share forward passes: three ways to the logits after each row's last token.

`Together`: all rows in one pass, each fed what the cache lacks of it. `Anew`: no cache, every position computed at each step.
`Blocks`: passes of fixed shapes, so that a row's logits are the same to the last bit whoever its neighbours are.

All three take the rows of a step, in any order, and find out themselves who is new and who has left.

Legend: B rows, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import EXACT_SLOTS, KVCache, round_up
from .compiled import Compiled
from .model import Decoder

CHUNK = 2048  # tokens that a pass through a cache takes at most


@dataclass(eq=False)  # a row is itself, whatever it holds
class Row:
    """A text on its way: its ids so far, and for how many tokens it may need slots."""

    ids: list[int]
    slots: int


class Passes:
    """What the three ways have in common: they count what they do."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.forwards = 0  # passes so far
        self.positions = 0  # tokens computed so far: what a cache saves

    def _last(self, news: Sequence[Sequence[int]], cache: KVCache | None) -> Tensor:
        """Feed each row its new ids; -> what the trunk gives for the last one of each, (B, dim)"""
        counts = [len(new) for new in news]
        columns = max(counts)
        tokens = torch.tensor([[*new, *[0] * (columns - len(new))] for new in news], device=self.model.device)
        x = self.model.trunk(tokens, cache, counts=counts)  # (B, T, dim)
        self._count(sum(counts))
        return x[torch.arange(len(x), device=x.device), torch.tensor(counts, device=x.device) - 1]

    def _in_chunks(self, news: Sequence[Sequence[int]], cache: KVCache) -> Tensor:
        """The same in passes of at most `CHUNK` tokens each, so that a long prompt's activations stay small."""
        if any(rope is not None and rope.depends_on_length() for rope in self.model.ropes):
            return self._last(news, cache)  # angles go by the whole prompt's length, so it is fed whole
        last: dict[int, Tensor] = {}
        fed = [0] * len(news)
        while len(last) < len(news):
            room, chunk = CHUNK, []
            for new, start in zip(news, fed, strict=True):
                chunk.append(new[start : start + room])
                room -= len(chunk[-1])
            x = self._last(chunk, cache)  # of a row without tokens it means nothing
            fed = [start + len(new) for start, new in zip(fed, chunk, strict=True)]
            last |= {row: x[row] for row, new in enumerate(chunk) if new and fed[row] == len(news[row])}
        return torch.stack([last[row] for row in range(len(news))])

    def _count(self, positions: int) -> None:
        self.forwards += 1
        self.positions += positions


class Anew(Passes):
    """Without a cache. Rows that are alike are computed once."""

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """The logits (B, V) after the last token of each row."""
        distinct = {tuple(row.ids): None for row in rows}
        place = {ids: number for number, ids in enumerate(distinct)}
        return self.model.head(self._last(list(distinct), None)[[place[tuple(row.ids)] for row in rows]])


class Together(Passes):
    """One pass for all rows, through one cache.

    A new row that begins as another does is not computed again: several samples of one prompt take one prefill, and a prompt
    that continues what the last rows held (the next turn of a chat) is fed only what is new.
    """

    def __init__(self, model: Decoder, step: Compiled | None = None) -> None:
        super().__init__(model)
        self.step = step  # takes the passes of one new token per row, if given
        self.rows: list[Row] = []  # whose tokens the cache holds, row by row: those of the last step
        self.cache: KVCache | None = None

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """The logits (B, V) after the last token of each row."""
        leaders: dict[tuple[int, ...], Row] = {}
        follows = {row: leaders.setdefault(tuple(row.ids), row) for row in rows if row not in self.rows}
        computed = self._places([row for row in rows if follows.get(row, row) is row])
        # Keys and values that fill the whole cache are laid out as a case of their own, which would take another graph
        spare = self.step is not None
        held = self._arrange(computed, max(row.slots for row in rows) + spare)
        place = {row: number for number, row in enumerate(computed)}
        order = [place[follows.get(row, row)] for row in rows]
        logits = self._feed([row.ids[n:] for row, n in zip(computed, held, strict=True)], order)
        if len(computed) < len(rows):
            self.rows = [*computed, *(row for row, leader in follows.items() if leader is not row)]
            self.cache.select([computed.index(follows.get(row, row)) for row in self.rows])
        return logits

    def _feed(self, news: Sequence[Sequence[int]], order: list[int]) -> Tensor:
        """Feed each row of the cache its new ids; -> the logits after the last one of each, the rows in this order, (N, V)"""
        if self.step is None or any(len(new) > 1 for new in news):
            whole = sum(map(len, news)) <= CHUNK
            x = self._last(news, self.cache) if whole else self._in_chunks(news, self.cache)
            return self.model.head(x[order])  # put in order here, where a row is dim numbers long and not V
        self._count(len(news))
        logits = self.step(torch.tensor(news, device=self.model.device), self.cache)
        return logits if order == list(range(len(logits))) else logits[order]

    def _places(self, rows: list[Row]) -> list[Row]:
        """An order of rows in which as many as can keep their places: the gaps that others left are filled from the end.

        New rows come by length, since attention looks at neighbours of like lengths together.
        """
        old = [row for row in self.rows if row in rows]
        placed = [row if row in old else None for row in self.rows[: len(old)]]
        movers = [row for row in old if row not in placed]
        new = [row for row in rows if row not in old]
        return [movers.pop() if row is None else row for row in placed] + sorted(new, key=lambda row: len(row.ids))

    def _arrange(self, rows: list[Row], slots: int) -> list[int]:
        """Give these rows their places in the cache; -> how many tokens each need not be fed, since they are held."""
        found = [self._held(row) for row in rows]
        sources = [place for place, _ in found]
        if all(place is None for place in sources):
            model = self.model
            self.cache = KVCache(model.config, len(rows), slots, device=model.device, dtype=model.dtype)
        else:
            if slots > self.cache.max_seq_len:
                self.cache.resize(slots)
            if sources != list(range(len(self.rows))):
                self.cache.select(sources)
        held = [n for _, n in found]
        self.cache.truncate(held)
        self.rows = rows
        return held

    def _held(self, row: Row) -> tuple[int | None, int]:
        """Which row of the cache holds the most of a row's tokens, and how many; None if it holds none that are of use."""
        lengths = () if self.cache is None else self.cache.lengths.tolist()
        if row in self.rows:
            place = self.rows.index(row)
            n = lengths[place]
        else:
            shared = [min(_shared(row.ids, old.ids), length) for old, length in zip(self.rows, lengths, strict=True)]
            n = max(shared, default=0)
            place = shared.index(n) if n else None
        n = min(n, len(row.ids) - 1)  # at least the last token is fed, since its logits are wanted
        if n == 0 or self.model.must_begin_anew(n, self.cache.longest[place], len(row.ids)):
            return None, 0
        return place, n


def _shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many ids two rows have in common, from the first on."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(ids), len(others)))


class Blocks(Passes):
    """Every pass has one of two shapes: (1, 64) for a prompt, in chunks, and (8, 1) for new tokens, with idle rows if need be.

    Kernels add up in an order that depends on shapes. Here those depend on nothing but the row's own length, and attention
    looks at each row alone, at a multiple of 256 slots: so the bits of its logits do not depend on its neighbours.
    """

    ROWS, COLUMNS = 8, 64

    def __init__(self, model: Decoder) -> None:
        super().__init__(model)
        self.blocks: list[tuple[KVCache, list[Row | None]]] = []
        self.prompts: dict[Row, int] = {}  # how long each row was when it came

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """The logits (B, V) after the last token of each row."""
        self._let_go(rows)
        found: dict[Row, Tensor] = {}
        prefilled: dict[tuple[int, ...], tuple[KVCache, Tensor]] = {}  # of this step: samples of one prompt take one prefill
        for row in rows:
            if self._is_to_prefill(row):
                key = tuple(row.ids)
                cache, logits = prefilled[key] = prefilled.get(key) or self._prefill(row)
                self._seat(row, cache)
                found[row] = logits
        for cache, seats in self.blocks:
            if any(row is not None and row not in found for row in seats):
                logits = self._decode(cache, [None if row in found else row for row in seats])
                found |= {row: logits[place] for place, row in enumerate(seats) if row is not None and row not in found}
        return torch.stack([found[row] for row in rows])

    def _let_go(self, rows: Sequence[Row]) -> None:
        """Free the places of rows that have left, and blocks in which nobody is left."""
        for cache, seats in self.blocks:
            for place, row in enumerate(seats):
                if row is not None and row not in rows:
                    seats[place] = None
                    del self.prompts[row]
            cache.truncate([0 if row is None else n for row, n in zip(seats, cache.lengths.tolist(), strict=True)])
        self.blocks = [block for block in self.blocks if any(block[1])]

    def _place(self, row: Row) -> tuple[KVCache, int] | None:
        return next(((cache, seats.index(row)) for cache, seats in self.blocks if row in seats), None)

    def _is_to_prefill(self, row: Row) -> bool:
        """Whether it is new, or its first step is made again, or it crosses a length at which its angles change."""
        if row not in self.prompts or len(row.ids) == self.prompts[row]:
            return True
        return self.model.must_begin_anew(len(row.ids) - 1, len(row.ids) - 1, len(row.ids))

    def _prefill(self, row: Row) -> tuple[KVCache, Tensor]:
        """-> a cache of one row that holds all its tokens, and the logits (V,) after the last."""
        cache = self._cache(1, len(row.ids))
        columns = self.COLUMNS
        if any(rope is not None and rope.depends_on_length() for rope in self.model.ropes):
            columns = round_up(len(row.ids), columns)  # angles go by the whole prompt's length, so it is fed whole
        for start in range(0, len(row.ids), columns):
            chunk = row.ids[start : start + columns]
            tokens = torch.tensor([[*chunk, *[0] * (columns - len(chunk))]], device=self.model.device)
            x = self.model.trunk(tokens, cache, counts=[len(chunk)], exact=True)  # (1, 64, dim)
            self._count(len(chunk))
        return cache, self.model.head(x[:, len(chunk) - 1])[0]

    def _seat(self, row: Row, prefilled: KVCache) -> None:
        """Give a row its place in a block, with what was computed of it."""
        if row not in self.prompts:
            seats = next((seats for _, seats in self.blocks if None in seats), None)
            if seats is None:
                seats = [None] * self.ROWS
                self.blocks.append((self._cache(self.ROWS, row.slots), seats))
            seats[seats.index(None)] = row
            self.prompts[row] = len(row.ids)
        cache, place = self._place(row)
        if row.slots > cache.max_seq_len:
            cache.resize(round_up(row.slots, EXACT_SLOTS))
        cache.adopt(place, prefilled, 0)

    def _decode(self, cache: KVCache, seats: Sequence[Row | None]) -> Tensor:
        """One new token for every row; those that are None are carried along and not changed. -> logits (8, V)"""
        held = [n if row is None else len(row.ids) - 1 for row, n in zip(seats, cache.lengths.tolist(), strict=True)]
        cache.truncate(held)
        tokens = torch.tensor([[0 if row is None else row.ids[-1]] for row in seats], device=self.model.device)
        x = self.model.trunk(tokens, cache, counts=[int(row is not None) for row in seats], exact=True)  # (8, 1, dim)
        self._count(sum(row is not None for row in seats))
        return self.model.head(x[:, 0])

    def _cache(self, rows: int, slots: int) -> KVCache:
        model = self.model
        return KVCache(model.config, rows, round_up(slots, EXACT_SLOTS), device=model.device, dtype=model.dtype)
