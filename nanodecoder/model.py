"""The decoder: token ids in, a logit for every id of the vocabulary out.

    tokens (B, T) ─ embed ─> x (B, T, dim) ─ block 1 ─ … ─ block N ─ norm ─> (B, T, dim) ─ lm_head ─> logits (B, T, V)
                                                  └────────── trunk ──────────┘           └─ head ─┘

Parameters: `embed`, `blocks.N.{attn_norm, attn.{q,k,v,o}_proj, ffn_norm, ffn.{gate,up,down}_proj}`, `norm`, `lm_head`.

Legend: B rows, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .attention import PATHS, Attention, Sight, sight
from .cache import KVCache, LayerCache, fresh
from .config import GenerationConfig, ModelConfig
from .layers import FeedForward, RMSNorm
from .rope import angles, frequencies


class Block(nn.Module):
    """One transformer block: look at earlier tokens, then think about what was seen, each added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], see: Sight, cache: LayerCache | None = None, path: str = "fused"
    ) -> Tensor:
        x = x + self.attn(self.attn_norm(x), turn, see, cache, path)
        x = x + self.ffn(self.ffn_norm(x))
        return x


class Decoder(nn.Module):
    """A decoder-only transformer. `config` says what it is made of, `generation` what its checkpoint says of generating.

    `attention` is "fused" or "explicit" and may be set at any time: two ways to the same numbers.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.generation = GenerationConfig()
        self.attention = "fused"
        # From an empty table, because nn.Embedding would draw one: on the meta device that imports all of torch's compiler.
        self.embed = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.dim), freeze=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.embed.weight
        self._frequencies = {rope: frequencies(rope, config.head_dim) for rope in set(config.rope)}
        if not self.embed.weight.is_meta:  # there is nothing to draw where a checkpoint will be put
            init_weights(self)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    def forward(self, tokens: Tensor, cache: KVCache | None = None, *, counts: Sequence[int] | Tensor | None = None) -> Tensor:
        """tokens (B, T) int64 -> logits (B, T, V), in the model's dtype.

        With a `cache` the tokens continue what its rows hold, and are added to it. `counts` (B,) says how many of the T
        tokens are real, row by row, from the left; logits at the others mean nothing.
        Raises ValueError when tokens, counts and cache do not fit each other.
        """
        return self.head(self.trunk(tokens, cache, counts=counts))

    def trunk(self, tokens: Tensor, cache: KVCache | None = None, *, counts: Sequence[int] | Tensor | None = None) -> Tensor:
        """Everything up to the final norm. tokens (B, T) int64 -> (B, T, dim)"""
        config = self.config
        self._check(tokens, cache)
        at = cache.place(tokens.shape[1], counts) if cache is not None else fresh(*tokens.shape, counts, tokens.device)
        layers = cache.layers(at) if cache is not None else [None] * config.n_layers

        # Computed once per pass, shared by the layers that agree on them.
        turns = {rope: angles(at.positions, self._frequencies[rope], self.dtype) for rope in self._frequencies}
        sights = {window: sight(at, window, self.attention) for window in set(config.windows)}

        x = self.embed(tokens)
        for block, rope, window, layer in zip(self.blocks, config.rope, config.windows, layers, strict=True):
            x = block(x, turns[rope], sights[window], layer, self.attention)
        if cache is not None:
            cache.advance(at)
        return self.norm(x)

    def head(self, x: Tensor) -> Tensor:
        """(…, dim) out of the trunk -> logits (…, V)"""
        return self.lm_head(x)

    def _check(self, tokens: Tensor, cache: KVCache | None) -> None:
        if self.attention not in PATHS:
            raise ValueError(f"model.attention must be one of {', '.join(PATHS)}, not {self.attention!r}")
        if tokens.dim() != 2 or 0 in tokens.shape or tokens.dtype not in (torch.int64, torch.int32):
            shape, kind = tuple(tokens.shape), str(tokens.dtype).removeprefix("torch.")
            raise ValueError(f"tokens must be whole numbers of shape (B, T), at least (1, 1), not {kind} of shape {shape}")
        if cache is None:
            return
        if cache.batch_size != tokens.shape[0]:
            raise ValueError(f"the cache has {cache.batch_size} rows and tokens has {tokens.shape[0]}")
        if (cache.dtype, cache.device) != (self.dtype, self.device):
            raise ValueError(
                f"the cache is {cache.dtype} on {cache.device} and the model {self.dtype} on {self.device}: "
                "make it with KVCache(…, device=model.device, dtype=model.dtype)"
            )


def init_weights(model: Decoder) -> None:
    """Draw every weight anew: normal with standard deviation 0.02, biases 0, norms 1 (GPT-2's choice).

    The two projections that write into the residual stream are drawn smaller by √(2 · n_layers), so that the sum of all
    their contributions starts with the variance of one (GPT-2 paper, section 2.3).
    """
    residual_std = 0.02 / (2 * model.config.n_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.normal_(parameter, std=residual_std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" in name:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=0.02)
