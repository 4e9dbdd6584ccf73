"""Rotary position embedding (RoFormer, arXiv 2104.09864): positions in, angles out, one rotation of queries and keys.

There is no table of positions: each pass turns its own positions into cosines and sines in float32, so there is nothing to
size, cast or restore. The pairing is Hugging Face's half-split one: of R turning features, i turns with i + R/2.

Legend: B rows, T new tokens, H heads, D head width, R turning features of a head (all of them, unless a fraction passes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .config import RopeConfig

Turn = tuple[Tensor, Tensor]  # cosine and sine of every position's angles, (B, T, 1, R/2) both


@lru_cache(maxsize=256)
def frequencies(rope: RopeConfig, head_dim: int, length: int = 1) -> tuple[float, ...]:
    """Radians per position of each of the R/2 pairs, fast to slow, for a row of `length` tokens.

    Computed in float32 with the operations that transformers uses, because one unit in the last place here is visible
    in the logits at large positions. Returned as Python numbers, which no `.to(dtype)` can round and no meta device can lose.
    """
    turning = rope.turning(head_dim)
    exponents = torch.arange(0, turning, 2, dtype=torch.float32, device="cpu") / turning
    theta, context = rope.theta, rope.original_max_seq_len
    if rope.kind == "dynamic":
        stretched = max(length, context)
        theta = theta * (rope.factor * stretched / context - (rope.factor - 1)) ** (turning / (turning - 2))
    inverse = 1.0 / (theta**exponents)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        inverse = _stretch_llama3(inverse, rope)
    elif rope.kind == "yarn":
        inverse = _stretch_yarn(theta**exponents, rope, turning)
    elif rope.kind == "longrope":
        factors = rope.long_factors if length > context else rope.short_factors
        inverse = 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * theta**exponents)
    return tuple(inverse.tolist())


def _stretch_llama3(inverse: Tensor, rope: RopeConfig) -> Tensor:
    """Slow pairs are divided by `factor`, fast ones kept, those between blended by how often they turn in the old context."""
    context = rope.original_max_seq_len
    wavelength = 2 * math.pi / inverse  # positions per full turn
    slow = wavelength > context / rope.low_freq_factor
    fast = wavelength < context / rope.high_freq_factor
    blend = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * inverse / rope.factor + blend * inverse
    return torch.where(slow, inverse / rope.factor, torch.where(fast, inverse, between))


def _stretch_yarn(periods: Tensor, rope: RopeConfig, turning: int) -> Tensor:
    """Pairs that turn more than beta_fast times in the old context are kept, those below beta_slow divided, a ramp between."""

    def pair_that_turns(times: float) -> float:
        return turning * math.log(rope.original_max_seq_len / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, turning - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    divided = ((torch.arange(turning // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    kept = 1 - divided
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def angles(positions: Tensor, rope: RopeConfig, head_dim: int, lengths: Sequence[int], dtype: torch.dtype) -> Turn:
    """Cosine and sine of every position's turn, for all layers of one pass.

    positions (B, T) int64; lengths (B,): how long each row is with this pass, which some kinds of stretching go by.
    -> two tensors (B, T, 1, R/2), computed in float32 and cast to `dtype` once at the end: in bfloat16 the positions 256
    and 257 would be the same number.
    """
    return turned_by(positions, per_position(rope, head_dim, lengths, positions.device), rope.attention_factor, dtype)


def per_position(rope: RopeConfig, head_dim: int, lengths: Sequence[int], device: torch.device) -> Tensor:
    """Radians per position, (B or 1, R/2) float32: one row for all, unless they depend on the rows' lengths."""
    rows = [frequencies(rope, head_dim, length) for length in (lengths if rope.depends_on_length() else lengths[:1])]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def turned_by(positions: Tensor, radians: Tensor, factor: float, dtype: torch.dtype) -> Turn:
    """The arithmetic of `angles`: positions (B, T), radians per position (B or 1, R/2) -> two tensors (B, T, 1, R/2)"""
    turn = positions[:, :, None, None].float() * radians[:, None, None]
    return (turn.cos() * factor).to(dtype), (turn.sin() * factor).to(dtype)


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Turn each pair (i, i + R/2) of x by its angle; features from R on pass as they are.

    x (B, T, H, D). Afterwards a query and a key meet at an angle that depends only on the distance of their positions.
    """
    cos, sin = turn
    turning = 2 * cos.shape[-1]
    first, second = x[..., :turning].chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned if turning == x.shape[-1] else (*turned, x[..., turning:]), dim=-1)
