"""Grouped-query attention, and the one rule of who sees whom.

    x (B, T, dim) ── q_proj ──> q (B, H,   T, D) ── norm, rotate ──┐
                  ── k_proj ──> k (B, Hkv, T, D) ── norm, rotate ──┤ keys and values of earlier tokens come from the cache
                  ── v_proj ──> v (B, Hkv, T, D) ──────────────────┤
                                softmax(q kᵀ / √D) v (B, H, T, D) <┘ ── o_proj ──> (B, T, dim)

H query heads share Hkv key/value heads: query head h looks at key/value head h // (H / Hkv) (arXiv 2305.13245). With Hkv = H
this is multi-head attention, with Hkv = 1 multi-query attention.

There are two ways to the same numbers: `explicit` writes the formula out and is the reference; `fused` calls
`scaled_dot_product_attention`, which never holds the (T, S) table of scores where a kernel allows it.

Legend: B rows, T new tokens, S keys looked at, H query heads, Hkv key/value heads, G = H / Hkv, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import LayerCache, Placement
from .config import ModelConfig
from .layers import Linear, make_norm, soft_cap
from .rope import Turn, rotate

PATHS = ("fused", "explicit")
EXACT_SLOTS = 256  # an exact pass looks at a multiple of this many slots


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None = None) -> Tensor:
    """A query at position p sees keys at positions ≤ p, and > p − window where there is a window (it counts the query itself).

    query_positions (B, T), key_positions (S,) -> (B, T, S) bool. Since slot s holds position s, this one rule serves prefill,
    chunks, single steps and rows of different lengths; there is no padding mask.
    """
    queries = query_positions[:, :, None]
    seen = key_positions <= queries
    return seen if window is None else seen & (key_positions > queries - window)


@dataclass(frozen=True)
class Sight:
    """What the queries of one pass see, said as cheaply as it can be said.

    `causal`: query t sees keys 0 … t, and there are as many keys as queries (the whole prompt at once).
    Otherwise `mask`, (B or 1, 1, T, S) bool, or None where every query sees every key (a single new token per row).
    `packed`: the stream holds real tokens only, (1, N, dim), and this says where they belong.
    `extents` (B,): look at each row alone, and at this many slots of it.
    """

    mask: Tensor | None = None
    causal: bool = False
    packed: Placement | None = None
    extents: tuple[int, ...] | None = None


def sight(at: Placement, window: int | None, path: str, exact: bool = False) -> Sight:
    """Say what `visible` says of this pass, by a short cut where that is the same. The explicit path takes no short cut.

    `exact`: the shapes that kernels get must depend on a row's own length only, so nothing is packed or cut short.
    """
    packed = at if at.ragged and not exact else None
    if path == "fused" and not exact:
        unwindowed = window is None or window >= at.extent
        # A column that is not real comes after all real ones, so the triangle hides it from them.
        if unwindowed and at.columns > 1 and at.extent == at.columns and max(at.starts) == 0:
            return Sight(causal=True, packed=packed)
        if unwindowed and at.columns == 1 and at.uniform:
            return Sight()
    queries = at.positions[:1] if at.uniform else at.positions  # rows alike need one mask
    keys = torch.arange(at.extent, device=at.device)
    mask = visible(queries, keys, window)[:, None]
    if not exact:
        return Sight(mask, packed=packed)
    extents = tuple(min(at.extent, -(-length // EXACT_SLOTS) * EXACT_SLOTS) for length in at.lengths)
    return Sight(mask.expand(len(extents), -1, -1, -1), extents=extents)


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
    mask = None if see.mask is None else see.mask.repeat(1, 1, groups, 1)  # (B or 1, 1, G · T, S)
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
        see: Sight,
        cache: LayerCache | None = None,
        path: str = "fused",
    ) -> Tensor:
        """x (B, T, dim); `turn` the positions' angles; `see` who sees whom; `cache` this layer's slots."""
        q = self._heads(self.q_proj(x), see, self.q_norm)  # (B, H, T, D)
        k = self._heads(self.k_proj(x), see, self.k_norm)  # (B, Hkv, T, D)
        v = self._heads(self.v_proj(x), see)  # (B, Hkv, T, D)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        if cache is not None:
            k, v = cache.extend(k, v)  # (B, Hkv, S, D)
        out = self.attend(q, k, v, see, path).transpose(1, 2)  # (B, T, H, D)
        if see.packed is not None:
            out = see.packed.pack(out)
        return self.o_proj(out.flatten(2))

    def _heads(self, x: Tensor, see: Sight, norm: nn.Module | None = None) -> Tensor:
        """(B, T, heads · D) -> (B, heads, T, D), normed before or after the heads part, as `norm` wants it."""
        if norm is not None and not self.norm_per_head:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.norm_per_head:
            x = norm(x)
        if see.packed is not None:
            x = see.packed.unpack(x)
        return x.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, see: Sight, path: str) -> Tensor:
        """Mix values by how well their keys meet the queries. q (B, H, T, D); k, v (B, Hkv, S, D) -> (B, H, T, D)"""
        if see.extents is not None:
            slots = [slice(extent) for extent in see.extents]
            rows = zip(q.split(1), k.split(1), v.split(1), see.mask.split(1), slots, strict=True)
            return torch.cat([self._mix(q, k[:, :, s], v[:, :, s], Sight(mask[..., s]), path) for q, k, v, mask, s in rows])
        return self._mix(q, k, v, see, path)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, see: Sight, path: str) -> Tensor:
        if path == "explicit":
            return explicit_attention(q, k, v, see, self.scale, self.softcap)
        return fused_attention(q, k, v, see, self.scale)
