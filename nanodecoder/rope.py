"""Rotary position embedding (RoFormer, arXiv 2104.09864): positions in, angles out, one rotation of queries and keys.

There is no table of positions: each pass turns its own positions into cosines and sines in float32, so there is nothing to
size, cast or restore. The pairing is Hugging Face's half-split one: feature i turns with feature i + D/2.

Legend: B rows, T new tokens, H heads, D head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[float, ...]:
    """Radians per position of each of the D/2 pairs, fast to slow.

    Computed in float32 with the operations that transformers uses, because one unit in the last place here is visible
    in the logits at large positions. Returned as Python numbers, which no `.to(dtype)` can round and no meta device can lose.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        inverse = _stretch_llama3(inverse, rope)
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


def angles(positions: Tensor, frequencies: tuple[float, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's turn, for all layers of one pass.

    positions (B, T) int64 -> two tensors (B, 1, T, D/2), computed in float32 and cast to `dtype` once at the end: in
    bfloat16 the positions 256 and 257 would be the same number.
    """
    per_position = torch.tensor(frequencies, dtype=torch.float32, device=positions.device)
    turn = positions[:, None, :, None].float() * per_position  # (B, 1, T, D/2)
    return turn.cos().to(dtype), turn.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of x by its angle.

    x (B, H, T, D); cos, sin (B, 1, T, D/2). Afterwards a query and a key meet at an angle that depends only on the
    distance of their positions.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
