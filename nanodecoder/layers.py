"""The parts of a block that look at one position at a time: RMSNorm and the SwiGLU feed-forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig


class RMSNorm(nn.Module):
    """Divide each vector by its root mean square, then scale each feature (arXiv 1910.07467). (…, dim) -> (…, dim)

    The mean is taken in float32 whatever the dtype of the stream, and the result is cast back before the weight, as Llama does.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): a gate decides, feature by feature, how much of `up` passes. (B, T, dim) -> (B, T, dim)"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=config.ffn_bias)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=config.ffn_bias)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=config.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
