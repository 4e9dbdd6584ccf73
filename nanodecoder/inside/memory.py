"""What a run takes, in bytes: weights by part, cache, activations, training.

Weights, cache and optimizer state are exact. Activations are about right.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..config import ModelConfig, RopeConfig
from ..model import Decoder
from ..quantize import quantize
from ..quantize import size as bytes_of
from .columns import size, table
from .shapes import empty
from .trace import instead

PARTS = ("embedding", "positions", "attention", "feed-forward", "norms", "head", "other")
OPTIMIZERS = ("adamw", "muon")


def part_of(name: str) -> str:
    """Which part of a model a parameter belongs to."""
    words = {"embed": "embedding", "positions": "positions", "lm_head": "head", "attn": "attention", "ffn": "feed-forward"}
    if "norm" in name:
        return "norms"
    return next((part for word, part in words.items() if word in name.split(".")), "other")


def weights(model: nn.Module) -> dict[str, int]:
    """Part -> bytes of its parameters and buffers as they lie in memory; what two parts share counts for the first."""
    found = dict.fromkeys(PARTS, 0)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):  # a shared one comes once
        found[part_of(name)] += tensor.numel() * tensor.element_size()
    return found


def quantized(model: Decoder, kind: str) -> int:
    """How many bytes the weights take in int8 or int4, by rounding a copy without numbers. The model is of the meta device."""
    return bytes_of(quantize(deepcopy(model), kind))


def cache_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token of one row takes in the cache: a key and a value for each key/value head of each layer."""
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * dtype.itemsize


def optimizer_state(model: nn.Module, optimizer: str) -> int:
    """Bytes that an optimizer keeps, in float32: AdamW two numbers for each weight, Muon one for each matrix of the blocks and
    AdamW's two for the rest."""
    numbers = 0
    for name, tensor in model.named_parameters():
        by_muon = optimizer == "muon" and tensor.dim() == 2 and name.startswith("blocks.")
        numbers += tensor.numel() * (1 if by_muon else 2)
    return 4 * numbers


# ------------------------------------------------------------------------------------------------------------ activations


class Alive(TorchDispatchMode):
    """Counts the bytes of all tensors made while it lasts and still held by anyone; `peak` is the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._held: dict[int, list[int]] = {}  # storage -> how many tensors hold it, and its size

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it made."""
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._add(x, given)
        return out

    def _add(self, x: Tensor, given: set[int]) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._held:
            if key in given:  # a view of what was there before
                return
            self._held[key] = [0, storage.nbytes()]
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self._held[key][0] += 1
        weakref.finalize(x, self._drop, key)

    def _drop(self, key: int) -> None:
        self._held[key][0] -= 1
        if not self._held[key][0]:
            self.now -= self._held.pop(key)[1]


def activations(config: ModelConfig, rows: int, columns: int, dtype: torch.dtype, train: bool = False) -> int:
    """About how many bytes a pass takes besides weights and cache, at its peak; with `train`, with all that the way back needs.

    The model is run without numbers and its tensors are counted while they live. Attention counts as a fused kernel, which
    holds no table of scores, and the head looks at each row's last position, in training at all.
    """
    ropes = tuple(rope and RopeConfig(fraction=rope.fraction) for rope in config.rope)  # as in `shapes.walk`
    model = empty(replace(config, rope=ropes), dtype)
    tokens = torch.zeros(rows, columns, dtype=torch.int64, device="meta")
    with ExitStack() as stack:
        if not config.attn_softcap:  # which no kernel has
            for block in model.blocks:
                stack.enter_context(instead(block.attn, "attend", lambda q, k, v, see, path: _Fused.apply(q, k, v)))
        stack.enter_context(torch.set_grad_enabled(train))
        alive = stack.enter_context(Alive())
        x = model.trunk(tokens)
        if not train:
            model.head(x[:, -1])
            return alive.peak
        logits = model.head(x).flatten(0, 1).float()
        loss = F.cross_entropy(logits, tokens.flatten())
        graph, gradient = loss.grad_fn, logits.numel() * logits.element_size()
        del x, logits, loss
        assert graph is not None  # it holds what the way back needs
        return max(alive.peak, alive.now + gradient)


class _Fused(torch.autograd.Function):
    """What a fused kernel keeps for its way back: its inputs and its result."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out)
        return out


# ---------------------------------------------------------------------------------------------------------------- in words


def show(model: nn.Module, config: ModelConfig, rows: int, used: int, reserved: int, dtype: torch.dtype, peak: int) -> str:
    """Weights, cache and peak of a run, as lines. used, reserved: cache slots of all rows together."""
    parts = weights(model)
    total = sum(parts.values())
    lines = [("weights", size(total), "")]
    lines += [(f"  {part}", size(n), f"{n / total:5.1%}") for part, n in parts.items() if n]
    if not parts["head"]:
        lines.append(("  head", "0 B", "it shares the embedding's weight"))
    token = cache_per_token(config, dtype)
    each = f"2 × {config.n_layers} layers × {config.n_kv_heads} key/value heads × {config.head_dim} × {dtype.itemsize} bytes"
    lines.append(("cache, per token and row", size(token), each))
    rows_of = f"{rows} row{'s' * (rows != 1)}"
    lines.append(("cache of this run", size(token * reserved), f"{used:,} of {reserved:,} slots used, {rows_of}"))
    lines.append(("peak of this run", size(peak), "all of the process, or of the GPU's memory"))
    return table(lines, right=(1,), longest=70)
