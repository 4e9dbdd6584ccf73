"""Grouped-query attention, and the one rule of who sees whom.

    x (B, T, dim) ── q_proj ──> q (B, T, H,   D) ── norm, rotate ──┐
                  ── k_proj ──> k (B, T, Hkv, D) ── norm, rotate ──┤ keys and values of earlier tokens come from the cache
                  ── v_proj ──> v (B, T, Hkv, D) ──────────────────┤
                                softmax(q kᵀ / √D) v (B, T, H, D) <┘ ── o_proj ──> (B, T, dim)

H query heads share Hkv key/value heads: query head h looks at key/value head h // (H / Hkv) (arXiv 2305.13245). With Hkv = H
this is multi-head attention, with Hkv = 1 multi-query attention.

There are two ways to the same numbers: `explicit` writes the formula out and is the reference; `fused` calls
`scaled_dot_product_attention`, which never holds the (T, S) table of scores where a kernel allows it.

Legend: B rows, T new tokens, S keys looked at, H query heads, Hkv key/value heads, G = H / Hkv, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import LayerCache, Placement
from .config import ModelConfig
from .layers import Linear, make_norm, soft_cap
from .rope import Turn, rotate

PATHS = ("fused", "explicit")
LIKE = 64  # on a CPU, rows that take one new token are looked at together if their lengths lie in one step of this


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None = None, stride: int | None = None) -> Tensor:
    """A query at position p sees keys at positions ≤ p, and > p − window where there is a window (it counts the query itself);
    beyond the window, with a `stride`, those whose distance is a multiple of it (arXiv 1904.10509's strided attention).

    query_positions (B, T), key_positions (S,) -> (B, T, S) bool. Since slot s holds position s, this one rule serves prefill,
    chunks, single steps and rows of different lengths; there is no padding mask.
    """
    queries = query_positions[:, :, None]
    seen = key_positions <= queries
    if window is None:
        return seen
    near = key_positions > queries - window
    return seen & (near if stride is None else near | ((queries - key_positions) % stride == 0))


@dataclass(frozen=True)
class Sight:
    """What the queries of a part of a pass see, said as cheaply as it can be said.

    `causal`: query t sees keys 0 … t, and there are as many keys as queries (the whole prompt at once).
    Otherwise `mask`, (B or 1, 1, T, S) bool, or None where every query sees every key (a single new token per row).
    """

    at: Placement
    mask: Tensor | None = None
    causal: bool = False


def sights(at: Placement, window: int | None, path: str, stride: int | None = None) -> list[Sight]:
    """What a pass sees, part by part. A part is looked at in one call, so its rows must have as many new tokens each.

    Rows that start at one position need one short cut or mask. Single new tokens of rows of about one length share a call too:
    the shorter rows' queries look past their ends, which the mask hides, so it costs little where lengths are near, and on a
    GPU less than a call of its own. `exact`: every row alone.
    """

    def alike(row: int) -> tuple[int, int]:
        start, count = at.starts[row], at.counts[row]
        if at.exact:
            return row, 0
        if count > 1:
            return count, start
        return count, start // LIKE if at.device.type == "cpu" else 0

    return [sight(part, window, path, stride) for part in at.parts(alike)]


def sight(at: Placement, window: int | None, path: str, stride: int | None = None) -> Sight:
    """Say what `visible` says of a pass, by a short cut where that is the same. The explicit path takes no short cut."""
    if path == "fused" and not at.exact:
        unwindowed = window is None or window >= at.extent
        if unwindowed and at.columns > 1 and at.uniform and at.starts[0] == 0:
            return Sight(at, causal=True)
        if unwindowed and at.columns == 1 and at.uniform:
            return Sight(at)
    queries = at.positions[:1] if at.uniform else at.positions  # rows alike need one mask
    keys = torch.arange(at.extent, device=at.device)
    return Sight(at, visible(queries, keys, window, stride)[:, None])


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, see: Sight, scale: float, softcap: float | None = None) -> Tensor:
    """softmax(q kᵀ · scale) v, written out. q (B, H, T, D); k, v (B, Hkv, S, D) -> (B, H, T, D)"""
    n_kv_heads = k.shape[1]
    q = q.unflatten(1, (n_kv_heads, -1))  # (B, Hkv, G, T, D): query heads beside the key/value head they share
    scores = soft_cap(q @ k[:, :, None].mT * scale, softcap)  # (B, Hkv, G, T, S)
    scores = scores.masked_fill(~see.mask[:, None], float("-inf"))
    weights = scores.float().softmax(dim=-1).to(v.dtype)
    return (weights @ v[:, :, None]).flatten(1, 2)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, see: Sight, scale: float) -> Tensor:
    """The same through torch's kernels. q (B, H, T, D); k, v (B, Hkv, S, D) -> (B, H, T, D)"""
    n_heads, n_kv_heads, columns = q.shape[1], k.shape[1], q.shape[2]
    if see.causal:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=n_heads != n_kv_heads)
    # The G query heads of a group become G · T queries of their key/value head, so that no key is copied G times.
    groups = n_heads // n_kv_heads
    mask = see.mask if see.mask is None or columns == 1 else see.mask.repeat(1, 1, groups, 1)  # (B or 1, 1, G · T or 1, S)
    folded = q.reshape(q.shape[0], n_kv_heads, groups * columns, -1)
    return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale).reshape(q.shape)


class Attention(nn.Module):
    """Grouped-query attention of one block. (B, T, dim) -> (B, T, dim), or packed (1, N, dim) -> (1, N, dim)"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5 if config.attn_scale is None else config.attn_scale
        self.softcap = config.attn_softcap
        self.q_proj = Linear(config.dim, config.n_heads * config.head_dim, bias=config.qkv_bias)
        self.k_proj = Linear(config.dim, config.n_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.v_proj = Linear(config.dim, config.n_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = Linear(config.n_heads * config.head_dim, config.dim, bias=config.o_bias)
        per_head = config.qk_norm == "head"
        self.q_norm = make_norm(config, config.head_dim * (1 if per_head else config.n_heads)) if config.qk_norm else None
        self.k_norm = make_norm(config, config.head_dim * (1 if per_head else config.n_kv_heads)) if config.qk_norm else None
        self.norm_per_head = per_head

    def forward(
        self,
        x: Tensor,
        turn: Turn | None,
        sights: Sequence[Sight],
        cache: LayerCache | None = None,
        path: str = "fused",
    ) -> Tensor:
        """x (B, T, dim); `turn` the positions' angles; `sights` who sees whom; `cache` this layer's slots."""
        q = self._heads(self.q_proj(x), self.q_norm)  # (B, T, H, D)
        k = self._heads(self.k_proj(x), self.k_norm)  # (B, T, Hkv, D)
        v = self._heads(self.v_proj(x))  # (B, T, Hkv, D)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # (B · T, heads, D): one row's tokens after the other's
        if cache is not None:
            cache.write(k, v)
        parts = [self._part(q, k, v, see, cache, path) for see in sights]
        out = parts[0] if len(parts) == 1 else torch.cat([q[:0], *parts])  # (B · T, H, D); there may be no token at all
        return self.o_proj(out.flatten(1).unflatten(0, x.shape[:-1]))

    def _heads(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """(B, T, heads · D) -> (B, T, heads, D), normed before or after the heads part, as `norm` wants it."""
        if norm is not None and not self.norm_per_head:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.norm_per_head:
            x = norm(x)
        return x

    def _part(self, q: Tensor, k: Tensor, v: Tensor, see: Sight, cache: LayerCache | None, path: str) -> Tensor:
        """A part's share of the whole pass: q (B · T, H, D), k, v (B · T, Hkv, D) -> (tokens of the part, H, D)"""
        rows, columns, first = see.at.rows, see.at.columns, see.at.first_token

        def own(x: Tensor) -> Tensor:
            return x[first : first + rows * columns].unflatten(0, (rows, columns)).transpose(1, 2)

        k, v = (own(k), own(v)) if cache is None else cache.read(see.at)
        return self.attend(own(q), k, v, see, path).transpose(1, 2).flatten(0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, see: Sight, path: str) -> Tensor:
        """Mix values by how well their keys meet the queries. q (B, H, T, D); k, v (B, Hkv, S, D) -> (B, H, T, D)"""
        if path == "explicit":
            return explicit_attention(q, k, v, see, self.scale, self.softcap)
        return fused_attention(q, k, v, see, self.scale)
