"""One forward pass with a name at every place: keep what flows there, or put something else in.

    found = trace(model, tokens, layers=[9])
    found["blocks.9.attention"]  # (B, H, T, T): where each head looks
    trace(model, tokens, replace={"blocks.9.heads": without_head_4}).logits

The names, in the order in which a pass comes by them:

    embed                        (B, T, dim)     the stream before the first block
    blocks.N.q                   (B, H, T, D)    queries and keys as they meet: normed and rotated
    blocks.N.k, blocks.N.v       (B, Hkv, T, D)
    blocks.N.scores              (B, H, T, T)    scaled and capped, -inf where nobody may look
    blocks.N.attention           (B, H, T, T)    their softmax: each row sums to 1
    blocks.N.heads               (B, H, T, D)    what each head has gathered
    blocks.N.attn                (B, T, dim)     what attention adds to the stream (behind a norm, where there is one)
    blocks.N.mid                 (B, T, dim)     the stream after attention
    blocks.N.ffn                 (B, T, dim)     what the feed-forward adds
    blocks.N.out                 (B, T, dim)     the stream after the block
    norm                         (B, T, dim)     behind the final norm
    logits                       (B, T, V)

Layers count from 0. Nothing here is part of the model: while a pass is watched, the blocks' methods are replaced on this one
object, and afterwards they are as they were, whatever happened.

Legend: B rows, T tokens, H query heads, Hkv key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attention, Sight, sight
from ..config import ModelConfig
from ..generate import inference
from ..layers import soft_cap
from ..model import Block, Decoder

IN_BLOCK = ("q", "k", "v", "scores", "attention", "heads", "attn", "mid", "ffn", "out")
ENDS = ("embed", "norm", "logits")
See = Callable[[str, Tensor], Tensor]  # a place's name and what flows there -> what goes on from there
Change = Tensor | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Trace:
    """What one pass held: `found["blocks.0.q"]` by the names above, those that were asked for.

    tokens (B, T) int64; layers: the traced ones; results: what `then` made of each.
    """

    tokens: Tensor
    layers: tuple[int, ...]
    values: dict[str, Tensor]
    results: dict[int, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.values:
            raise KeyError(f"{name!r} was not traced; there is {', '.join(list(self.values)[:8])} …")
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    @property
    def logits(self) -> Tensor:
        """(B, T, V), bit for bit those of model(tokens) where nothing was replaced."""
        return self["logits"]


def trace(
    model: Decoder,
    tokens: Tensor | Sequence[int],
    layers: Sequence[int] | None = None,
    *,
    keep: Collection[str] = (*IN_BLOCK, *ENDS),
    replace: Mapping[str, Change] | None = None,
    then: Callable[[int, dict[str, Tensor]], Any] | None = None,
    max_mib: float = 1024,
) -> Trace:
    """Run model(tokens) and keep what flows at the named places of these layers (all of them, if not given).

    tokens: (B, T) int64, or the ids of one row. keep: which kinds of values ("attention", "mid", …). replace: name -> a tensor
    to put there, or a function from what is there to it; "blocks.*.ffn" stands for every block. With `then`, each layer's
    values are handed over as soon as the layer is done, by their short names, and what `then(layer, values)` returns is kept in
    `results` instead, so that a long prompt's trace never lies in memory whole.

    Model and outputs stay as they are: logits are bit-equal to a plain forward where nothing is replaced. The pass runs in eval
    mode without gradients. Raises ValueError for a layer, a kind or a place that is not there, for a replacement of another
    shape, and, with the size it would have, for a trace larger than `max_mib` MiB.
    """
    if not isinstance(tokens, Tensor):
        tokens = torch.tensor([list(tokens)], dtype=torch.int64, device=model.device)
    traced = _layers(model.config, layers)
    _known(keep)
    changes = _changes(model.config, replace or {})
    if tokens.dim() == 2:
        _fits(model, tokens, traced, keep, then is not None, max_mib)
    found = Trace(tokens, traced, {})
    wanted = {name for kind in keep for name in _places(kind, traced)}
    layer_of = {f"blocks.{n}.out": n for n in traced} if then is not None else {}
    held: dict[str, Tensor] = {}

    def see(name: str, value: Tensor) -> Tensor:
        if name in changes:
            value = _changed(name, value, changes[name])
        if name in wanted:
            (held if then is not None and name.startswith("blocks.") else found.values)[name] = value
        if name in layer_of:
            found.results[layer_of[name]] = then(layer_of[name], {key.split(".")[2]: kept for key, kept in held.items()})
            held.clear()
        return value

    # Ordinary tensors rather than inference mode's, which nobody could compute with in a graph
    with inference(model), torch.inference_mode(False), torch.no_grad(), watching(model, see, {*wanted, *changes, *layer_of}):
        x = model.trunk(tokens)
        if "logits" in wanted or "logits" in changes:  # the largest of all, and not always looked at
            see("logits", model.head(x))
    return found


def names(config: ModelConfig, layers: Sequence[int] | None = None) -> list[str]:
    """Every place that a trace of these layers can keep or replace, in the order of a pass."""
    inner = [f"blocks.{n}.{kind}" for n in _layers(config, layers) for kind in IN_BLOCK]
    return ["embed", *inner, "norm", "logits"]


def trace_bytes(
    config: ModelConfig,
    rows: int,
    columns: int,
    layers: Sequence[int] | None = None,
    keep: Collection[str] = (*IN_BLOCK, *ENDS),
    itemsize: int = 4,
) -> int:
    """How many bytes a trace of `rows` prompts of `columns` tokens holds, with `itemsize` bytes a number."""
    heads, kv_heads = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    per_token = dict.fromkeys(("attn", "mid", "ffn", "out", "embed", "norm"), config.dim)
    per_token |= {"q": heads, "heads": heads, "k": kv_heads, "v": kv_heads, "logits": config.vocab_size}
    per_token |= dict.fromkeys(("scores", "attention"), config.n_heads * columns)
    times = {kind: len(_layers(config, layers)) if kind in IN_BLOCK else 1 for kind in keep}
    return rows * columns * itemsize * sum(per_token[kind] * n for kind, n in times.items())


def writes(model: Decoder, found: Trace, layer: int) -> Tensor:
    """What each head of a layer writes into the stream, before any norm behind attention: (B, H, T, dim).

    The heads' sum, and the output projection's bias where there is one, is what attention gives.
    """
    attn, heads = model.blocks[layer].attn, found[f"blocks.{layer}.heads"]  # (B, H, T, D)
    with inference(model), torch.inference_mode(False), torch.no_grad():
        alone = torch.zeros_like(heads).transpose(1, 2).unsqueeze(1).repeat(1, heads.shape[1], 1, 1, 1)  # (B, H, T, H, D)
        for head in range(heads.shape[1]):
            alone[:, head, :, head] = heads[:, head]
        nothing = attn.o_proj(torch.zeros_like(alone[:1, 0, :1].flatten(-2)))  # the bias
        return attn.o_proj(alone.flatten(-2)) - nothing


def look(q: Tensor, k: Tensor, see: Sight, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Scores and their softmax by the explicit path. q (B, H, T, D), k (B, Hkv, S, D) -> (B, H, T, S) both"""
    q = q.unflatten(1, (k.shape[1], -1))
    scores = soft_cap(q @ k[:, :, None].mT * scale, softcap)
    scores = scores.masked_fill(~see.mask[:, None], float("-inf")).flatten(1, 2)
    return scores, scores.float().softmax(dim=-1).to(q.dtype)


# -------------------------------------------------------------------------------------------------------------- watching


@contextmanager
def watching(model: Decoder, see: See, wanted: Collection[str]) -> Iterator[None]:
    """While it lasts, `see(name, value)` is called at each wanted place of every pass, and what it returns goes on.

    "logits" is no such place: whoever calls the model has them.
    """
    config = model.config
    with ExitStack() as stack:
        for module in model.modules():
            if module._compiled_call_impl is not None:  # compiled code would go past what is put in here
                stack.enter_context(instead(module, "_compiled_call_impl", None))
        for name, module in (("embed", model.dropout), ("norm", model.norm)):
            if name in wanted:
                hook = module.register_forward_hook(lambda module, given, out, name=name: see(name, out))
                stack.callback(hook.remove)
        for n, block in enumerate(model.blocks):
            kinds = {kind for kind in IN_BLOCK if f"blocks.{n}.{kind}" in wanted}

            def here(kind: str, value: Tensor, n: int = n, kinds: set[str] = kinds) -> Tensor:
                return see(f"blocks.{n}.{kind}", value) if kind in kinds else value

            if kinds & {"attn", "mid", "ffn", "out"}:
                stack.enter_context(instead(block, "forward", _block(block, here)))
            if kinds & {"q", "k", "v", "scores", "attention", "heads"}:
                own = _attend(block.attn, here, kinds, config.windows[n], config.sparse_stride)
                stack.enter_context(instead(block.attn, "attend", own))
        yield


@contextmanager
def instead(module: nn.Module, name: str, method: Callable[..., Any] | None) -> Iterator[None]:
    """Another method on this one object, for a while."""
    before = vars(module).get(name)  # None: the class's
    setattr(module, name, method)
    try:
        yield
    finally:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)


def _block(block: Block, here: See) -> Callable[..., Tensor]:
    """`Block.forward` with a name at each place. That it is still the same, bit for bit, the tests say."""

    def forward(x: Tensor, *how: Any, **more: Any) -> Tensor:
        added = here("attn", block.attn_post_norm(block.attn(block.attn_norm(x), *how, **more)))
        mid = here("mid", x + block.dropout(added))
        added = here("ffn", block.ffn_post_norm(block.ffn(block.ffn_norm(x if block.parallel else mid))))
        return here("out", mid + block.dropout(added))

    return forward


def _attend(
    attn: Attention, here: See, kinds: Collection[str], window: int | None, stride: int | None
) -> Callable[..., Tensor]:
    """`Attention.attend` with a name at each place: its own result goes on, unless the weights are wanted otherwise."""
    plain = attn.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, see: Sight, path: str) -> Tensor:
        q, k, v = here("q", q), here("k", k), here("v", v)
        if not kinds & {"scores", "attention"}:
            return here("heads", plain(q, k, v, see, path))
        explicit = sight(see.at, window, "explicit", stride)  # with a mask, which a short cut lacks
        scores, weights = look(q, k, explicit, attn.scale, attn.softcap)
        given = here("scores", scores)
        changed = given is not scores
        if changed:
            weights = given.float().softmax(dim=-1).to(v.dtype)
        given = here("attention", weights)
        changed = changed or given is not weights
        return here("heads", _mix(given, v) if changed else plain(q, k, v, see, path))

    return attend


def _mix(weights: Tensor, v: Tensor) -> Tensor:
    """weights (B, H, T, S), v (B, Hkv, S, D) -> (B, H, T, D)"""
    return (weights.unflatten(1, (v.shape[1], -1)) @ v[:, :, None]).flatten(1, 2)


# ------------------------------------------------------------------------------------------------------- what is refused


def _layers(config: ModelConfig, layers: Sequence[int] | None) -> tuple[int, ...]:
    if layers is None:
        return tuple(range(config.n_layers))
    for n in layers:
        if not 0 <= n < config.n_layers:
            raise ValueError(f"there is no layer {n}: this model has layers 0 to {config.n_layers - 1}")
    return tuple(sorted(set(map(operator.index, layers))))


def _known(keep: Collection[str]) -> None:
    for kind in keep:
        if kind not in (*IN_BLOCK, *ENDS):
            raise ValueError(f"there is nothing named {kind!r} to keep; there is {', '.join((*IN_BLOCK, *ENDS))}")


def _places(kind: str, layers: Sequence[int]) -> list[str]:
    return [kind] if kind in ENDS else [f"blocks.{n}.{kind}" for n in layers]


def _changes(config: ModelConfig, replace: Mapping[str, Change]) -> dict[str, Change]:
    """Each place's own replacement, with "blocks.*.x" spelled out."""
    changes: dict[str, Change] = {}
    for name, change in replace.items():
        inner = re.fullmatch(r"blocks\.(\*|\d+)\.(\w+)", name)
        if name in ENDS:
            changes[name] = change
        elif inner and inner[2] in IN_BLOCK:
            layers = None if inner[1] == "*" else [int(inner[1])]
            changes |= dict.fromkeys(_places(inner[2], _layers(config, layers)), change)
        else:
            raise ValueError(
                f"there is no place {name!r} to replace; there is {', '.join(ENDS)}, and blocks.N.x or blocks.*.x with x one "
                f"of {', '.join(IN_BLOCK)}"
            )
    return changes


def _changed(name: str, value: Tensor, change: Change) -> Tensor:
    new = change if isinstance(change, Tensor) else change(value.clone())
    if not isinstance(new, Tensor) or new.shape != value.shape:
        what = f"a tensor of shape {tuple(new.shape)}" if isinstance(new, Tensor) else f"{new!r:.40}"
        raise ValueError(f"{name} is of shape {tuple(value.shape)}, and its replacement is {what}")
    return new.to(value)


def _fits(
    model: Decoder, tokens: Tensor, layers: Sequence[int], keep: Collection[str], one_by_one: bool, max_mib: float
) -> None:
    """Refuse a trace that would be larger than was agreed to, with its size."""
    own = layers[:1] if one_by_one else layers
    size = trace_bytes(model.config, *tokens.shape, own, keep, model.dtype.itemsize) / 2**20
    if size > max_mib:
        rows = f"{tokens.shape[0]} prompts" if tokens.shape[0] > 1 else "a prompt"
        raise ValueError(
            f"the trace of {len(own)} layers for {rows} of {tokens.shape[1]:,} tokens would take {size:,.0f} MiB, and max_mib "
            f"is {max_mib:,.0f}: ask for fewer layers, less of each (keep=), hand each on (then=), or allow more (max_mib=)"
        )
