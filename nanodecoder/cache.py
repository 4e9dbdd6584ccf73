"""What persists between forward passes: the keys and values of every layer, and how many tokens each row holds.

Slot s of a row holds position s. That is all the bookkeeping there is: rows of different lengths need no padding, because a
query at position p looks at slots up to p of its own row, and what lies beyond was never written or will be written again
before anyone looks. The model never owns a cache; whoever generates makes one and hands it in.

Legend: B rows, T new tokens, S cache slots, Hkv key/value heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import index

import torch
from torch import Tensor

from .config import ModelConfig

BLOCK = 64  # slots zeroed at a time
EXACT_SLOTS = 256  # an exact pass looks at a multiple of this many slots of each row


@dataclass(frozen=True)
class Placement:
    """Where the T new tokens of each row go in one pass. Everything here is known on the host, so no device is waited for.

    starts and counts (B,): row b's real tokens are the first counts[b] of the T columns; the first lies at position starts[b].
    longest (B,): how many tokens each row has held at most since it was empty. extent: how many slots the pass reads, enough
    for the longest row.
    exact: shapes must depend on each row's own length only. first_row, first_token: where a part of a pass begins in it.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    longest: tuple[int, ...]
    columns: int
    extent: int
    device: torch.device
    exact: bool = False
    first_row: int = 0
    first_token: int = 0

    @property
    def rows(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> tuple[int, ...]:
        """(B,) how many tokens each row holds after the pass."""
        return tuple(start + count for start, count in zip(self.starts, self.counts, strict=True))

    @property
    def ragged(self) -> bool:
        """Whether some columns are not real."""
        return min(self.counts) < self.columns

    @property
    def uniform(self) -> bool:
        """Whether all rows start at one position and all their columns are real."""
        return not self.ragged and min(self.starts) == max(self.starts)

    @property
    def packed(self) -> bool:
        """Whether the stream holds the real tokens only, (1, N, dim) instead of (B, T, dim)."""
        return self.ragged and not self.exact

    def parts(self, alike: Callable[[int], Hashable]) -> list[Placement]:
        """The pass as passes of neighbouring rows for which `alike` says the same; of a packed pass, rows with tokens only."""
        parts, token = [], 0
        for _, group in groupby(range(len(self.starts)), alike):
            first, *others = group
            rows = slice(first, first + 1 + len(others))
            columns = max(self.counts[rows]) if self.packed else self.columns
            extent = max(1, *self.lengths[rows])
            if self.exact:
                extent = min(self.extent, round_up(extent, EXACT_SLOTS))
            if columns:
                own = (self.starts[rows], self.counts[rows], self.longest[rows])
                parts.append(Placement(*own, columns, extent, self.device, self.exact, first, token))
            token += columns * (1 + len(others))
        return parts

    @cached_property
    def positions(self) -> Tensor:
        """(B, T) int64. A column that is not real repeats its row's last real position, so that it stays inside every table."""
        if self.uniform:
            start = self.starts[0]
            return torch.arange(start, start + self.columns, device=self.device).expand(len(self.starts), -1)
        rows = [
            [max(0, start + min(column, count - 1)) for column in range(self.columns)]
            for start, count in zip(self.starts, self.counts, strict=True)
        ]
        return torch.tensor(rows, device=self.device)

    @cached_property
    def real(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, column and slot of each real token, three tensors of one length."""
        triples = [
            (row, column, start + column)
            for row, (start, count) in enumerate(zip(self.starts, self.counts, strict=True))
            for column in range(count)
        ]
        row, column, slot = torch.tensor(triples, dtype=torch.int64, device=self.device).reshape(-1, 3).unbind(1)
        return row, column, slot

    def pack(self, x: Tensor) -> Tensor:
        """Leave out the columns that are not real: (B, T, …) -> (1, N, …), N real tokens in all."""
        row, column, _ = self.real
        return x[row, column][None]

    def unpack(self, x: Tensor) -> Tensor:
        """Put real tokens back in their places, zeros between: (1, N, …) -> (B, T, …)"""
        row, column, _ = self.real
        out = x.new_zeros(len(self.counts), self.columns, *x.shape[2:])
        return out.index_put((row, column), x[0])


class LayerCache:
    """One layer's slots during one pass: writes the new keys and values, hands back what a part of the pass may look at."""

    def __init__(self, keys: Tensor, values: Tensor, placement: Placement) -> None:
        self.keys, self.values, self.placement = keys, values, placement  # (B, Hkv, S, D) both

    def write(self, k: Tensor, v: Tensor) -> None:
        """Keep the pass's k and v, (B · T, Hkv, D) or packed (N, Hkv, D). What is kept carries no gradient."""
        at = self.placement
        for slots, new in ((self.keys, k.detach()), (self.values, v.detach())):
            if at.uniform:
                end = at.starts[0] + at.columns
                slots[:, :, at.starts[0] : end] = new.unflatten(0, (-1, at.columns)).transpose(1, 2)
            else:
                row, column, slot = at.real
                slots[row, :, slot] = new if at.packed else new[row * at.columns + column]

    def read(self, part: Placement) -> tuple[Tensor, Tensor]:
        """Keys and values of a part's rows, (B, Hkv, extent, D) both."""
        rows = slice(part.first_row, part.first_row + len(part.starts))
        return self.keys[rows, :, : part.extent], self.values[rows, :, : part.extent]


class KVCache:
    """Preallocated keys and values for `batch_size` rows of up to `max_seq_len` tokens.

    `keys` and `values` are (n_layers, B, Hkv, S, D). `dtype` must be the model's activations' dtype.
    Raises ValueError when a size is below 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_seq_len: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if batch_size < 1 or max_seq_len < 1:
            raise ValueError(f"a cache needs at least 1 row and 1 slot, not {batch_size} and {max_seq_len}")
        self._allocate(config.n_layers, batch_size, config.n_kv_heads, max_seq_len, config.head_dim, device, dtype)

    def _allocate(self, *shape_and_place: object) -> None:
        *shape, device, dtype = shape_and_place
        # Not zeroed here: `_uncover` zeroes slots before they first come into view, and an untouched page costs no memory.
        device = torch.device(device)
        try:
            with torch.inference_mode(False):  # ordinary tensors, usable in and out of inference mode
                keys, values = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            wanted = 2 * math.prod(shape) * dtype.itemsize
            raise MemoryError(
                f"a cache of {shape[1]} rows of {shape[3]} tokens needs {wanted / 2**20:,.0f} MiB, which could not be had on "
                f"{device}: ask for fewer new tokens, a shorter prompt or fewer rows ({str(error).splitlines()[0]})"
            ) from None
        self.keys, self.values, self._clean = keys, values, 0  # both or neither
        self._lengths, self._longest = [0] * shape[1], [0] * shape[1]

    def __repr__(self) -> str:
        return f"KVCache(lengths={self._lengths}, max_seq_len={self.max_seq_len}, {self.dtype}, {self.device})"

    @property
    def lengths(self) -> Tensor:
        """(B,) int64 on the CPU, a copy: how many tokens each row holds."""
        return torch.tensor(self._lengths)

    @property
    def longest(self) -> tuple[int, ...]:
        """(B,) how many tokens each row has held at most since it was empty: longrope's angles are of that length."""
        return tuple(self._longest)

    @property
    def batch_size(self) -> int:
        return self.keys.shape[1]

    @property
    def max_seq_len(self) -> int:
        return self.keys.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def place(self, columns: int, counts: Sequence[int] | Tensor | None = None, exact: bool = False) -> Placement:
        """Plan a pass of `columns` new tokens per row, of which the first counts[b] are real (all, if not given).

        Raises ValueError when counts do not fit the batch, or when a row would outgrow its slots.
        """
        real = _counts(counts, self.batch_size, columns)
        for row, (length, count) in enumerate(zip(self._lengths, real, strict=True)):
            if length + count > self.max_seq_len:
                raise ValueError(
                    f"row {row} holds {length} tokens and {count} more do not fit the cache's {self.max_seq_len} slots: "
                    f"make it larger, or resize({length + count})"
                )
        extent = max(1, max(length + count for length, count in zip(self._lengths, real, strict=True)))
        if exact:
            extent = min(self.max_seq_len, round_up(extent, EXACT_SLOTS))
        self._uncover(extent)
        return Placement(tuple(self._lengths), real, tuple(self._longest), columns, extent, self.device, exact)

    def _uncover(self, extent: int) -> None:
        """Zero slots, a block at a time, before a pass first reads that far.

        A short row's unused slots are read along with a long row's used ones. Their attention weight is 0, but 0 × NaN is
        NaN, and a huge key overflows before the mask reaches it: so what memory held before never comes into view.
        """
        if extent > self._clean:
            end = min(self.max_seq_len, round_up(extent, BLOCK))
            self.keys[:, :, :, self._clean : end] = 0
            self.values[:, :, :, self._clean : end] = 0
            self._clean = end

    def layers(self, placement: Placement) -> list[LayerCache]:
        """Each layer's view of the cache for one pass."""
        pairs = zip(self.keys.unbind(0), self.values.unbind(0), strict=True)
        return [LayerCache(keys, values, placement) for keys, values in pairs]

    def advance(self, placement: Placement) -> None:
        """Count the pass's tokens as held, once all layers have written them."""
        self._lengths = list(placement.lengths)
        self._longest = [max(pair) for pair in zip(self._longest, self._lengths, strict=True)]

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Forget all but the first `lengths` tokens of every row (one number, or one per row).

        Raises ValueError when a row holds fewer than that.
        """
        each = list(lengths) if isinstance(lengths, (Sequence, Tensor)) and not _scalar(lengths) else None
        wanted = [index(lengths)] * self.batch_size if each is None else [index(n) for n in each]
        if len(wanted) != self.batch_size:
            raise ValueError(f"{len(wanted)} lengths for {self.batch_size} rows")
        for row, (length, keep) in enumerate(zip(self._lengths, wanted, strict=True)):
            if not 0 <= keep <= length:
                raise ValueError(f"row {row} holds {length} tokens and cannot be truncated to {keep}")
        for row, (length, keep) in enumerate(zip(self._lengths, wanted, strict=True)):
            if keep < length:
                # A row may be dropped because it produced NaN, which even a weight of 0 would let through.
                self.keys[:, row, :, keep:length] = 0
                self.values[:, row, :, keep:length] = 0
        self._lengths = wanted
        self._longest = [longest if keep else 0 for longest, keep in zip(self._longest, wanted, strict=True)]

    def select(self, rows: Sequence[int | None] | Tensor) -> None:
        """Keep these rows, in this order. A row may be named more than once (several continuations of one prompt), and None
        stands for a new, empty one.

        Rows that stay in their places are not copied, as long as the others come from places beyond the new batch."""
        kept = [None if row is None else index(row) for row in rows]
        if not kept or not all(row is None or 0 <= row < self.batch_size for row in kept):
            raise ValueError(f"rows must be one or more of 0 to {self.batch_size - 1}, or None, not {kept}")
        in_place = all(row is not None and (row == place or row >= len(kept)) for place, row in enumerate(kept))
        wasted = self.keys.untyped_storage().nbytes() > 2 * len(kept) * self.keys[:, 0].nbytes
        if not in_place or wasted:
            self._copy(kept, self.max_seq_len)
            return
        for place, row in enumerate(kept):
            if row != place:
                self.adopt(place, self, row)
        self.keys, self.values = self.keys[:, : len(kept)], self.values[:, : len(kept)]
        del self._lengths[len(kept) :], self._longest[len(kept) :]

    def adopt(self, row: int, other: KVCache, source: int) -> None:
        """Let a row hold what row `source` of another cache of this config holds. Raises ValueError for too few slots."""
        held = other._lengths[source]
        if held > self.max_seq_len:
            raise ValueError(f"{self.max_seq_len} slots cannot keep the {held} tokens that a row holds")
        self._uncover(held)
        self.keys[:, row, :, :held] = other.keys[:, source, :, :held]
        self.values[:, row, :, :held] = other.values[:, source, :, :held]
        for left in (self.keys, self.values):  # the row may have been given up because it produced NaN
            left[:, row, :, held : self._lengths[row]] = 0
        self._lengths[row], self._longest[row] = held, other._longest[source]

    def resize(self, max_seq_len: int) -> None:
        """Change how many slots each row has, keeping what it holds. Raises ValueError when that would lose tokens."""
        if max_seq_len < max(1, *self._lengths):
            raise ValueError(f"{max_seq_len} slots cannot keep the {max(self._lengths)} tokens that a row holds")
        if max_seq_len == self.max_seq_len:
            return
        self._copy(list(range(self.batch_size)), max_seq_len)

    def _copy(self, rows: Sequence[int | None], max_seq_len: int) -> None:
        """Move the held tokens of these rows into new buffers."""
        old = copy(self)
        n_layers, _, n_kv_heads, _, head_dim = old.keys.shape
        self._allocate(n_layers, len(rows), n_kv_heads, max_seq_len, head_dim, self.device, self.dtype)
        for new, row in enumerate(rows):
            if row is not None:
                self.adopt(new, old, row)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, as torch says it on a GPU and on the CPU."""
    words = ("out of memory", "can't allocate memory", "not enough memory", "Storage size calculation overflowed")
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(w in str(error) for w in words)
    )


def fresh(batch_size: int, columns: int, counts: Sequence[int] | Tensor | None, device: torch.device) -> Placement:
    """The placement of a pass without a cache: every row starts at position 0 and sees only what it is given."""
    real = _counts(counts, batch_size, columns)
    nothing = (0,) * batch_size
    return Placement(nothing, real, nothing, columns, columns, device)


def round_up(n: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-n // step) * step


def of_documents(documents: Tensor) -> Placement:
    """The placement that makes a row of each run of equal numbers in documents (B, T), row after row."""
    counts = [len(list(run)) for row in documents.tolist() for _, run in groupby(row)]
    return fresh(len(counts), max(counts), counts, documents.device)


def _scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _counts(counts: Sequence[int] | Tensor | None, batch_size: int, columns: int) -> tuple[int, ...]:
    if counts is None:
        return (columns,) * batch_size
    real = tuple(index(count) for count in counts)
    if len(real) != batch_size or not all(0 <= count <= columns for count in real):
        raise ValueError(f"counts must be {batch_size} numbers from 0 to {columns}, one per row, not {list(real)}")
    return real
