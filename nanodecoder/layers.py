"""The parts of a block that look at one position at a time: norms and the feed-forward; and the soft cap."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig

ACTIVATION_FUNCTIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu}


FEW = 256  # rows up to which `Linear` puts the weight first


class Linear(nn.Linear):
    """x Wᵀ + b, as nn.Linear. (…, in) -> (…, out)

    For few rows in float32 on a CPU it is written (W xᵀ)ᵀ: with x first, MKL lays the whole weight out anew at every call,
    which for the rows of a decode step takes about as long as the product itself. One row is a sum for each output, which a
    compiler turns into a single pass over the weight at the speed of memory; torch's own product is as fast in bfloat16 alone.
    """

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows == 1 and x.device.type == "cpu" and torch.compiler.is_compiling():
            flat = x.reshape(-1)
            out = (self.weight * flat).sum(-1) if x.dtype == torch.float32 else torch.mv(self.weight, flat)
            return (out if self.bias is None else out + self.bias).view(*x.shape[:-1], -1)
        if not (1 < rows <= FEW and x.dtype == torch.float32 and x.device.type == "cpu"):
            return super().forward(x)
        out = (self.weight @ x.reshape(rows, -1).mT).mT
        return (out if self.bias is None else out + self.bias).view(*x.shape[:-1], -1)


class RMSNorm(nn.Module):
    """Divide each vector by its root mean square, then scale each feature (arXiv 1910.07467). (…, dim) -> (…, dim)

    The mean is taken in float32 whatever the dtype of the stream, and the result is cast back before the weight, as Llama
    does; with an `offset`, the weight counts from there and is applied in float32, as Gemma does.
    """

    def __init__(self, dim: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (wide * (self.offset + self.weight.float())).to(x.dtype)
        return wide.to(x.dtype) * self.weight


class LayerNorm(nn.Module):
    """Subtract each vector's mean, divide by its standard deviation, then scale and shift each feature (arXiv 1607.06450).

    (…, dim) -> (…, dim)
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float() + self.bias.float()).to(x.dtype)


def make_norm(config: ModelConfig, dim: int, wanted: bool = True) -> nn.Module:
    """A norm of the config's kind over `dim` features, or, if none is wanted, what passes everything on."""
    if not wanted:
        return nn.Identity()
    if config.norm == "layer":
        return LayerNorm(dim, config.norm_eps)
    return RMSNorm(dim, config.norm_eps, config.norm_offset)


class FeedForward(nn.Module):
    """What a position makes of what it has gathered. (B, T, dim) -> (B, T, dim)

    Gated (SwiGLU, arXiv 2002.05202): a gate decides, feature by feature, how much of `up` passes. Otherwise the plain kind:
    up, activation, down.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.gate_proj = Linear(config.dim, config.ffn_dim, bias=config.ffn_bias) if config.gated else None
        self.up_proj = Linear(config.dim, config.ffn_dim, bias=config.ffn_bias)
        self.down_proj = Linear(config.ffn_dim, config.dim, bias=config.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """Bend values smoothly into (-cap, cap) (Gemma 2, arXiv 2408.00118); None leaves them."""
    return x if cap is None else cap * torch.tanh(x / cap)
