"""A checkpoint's computation beside transformers' own, place by place: the first place that leaves is where to look.

A prompt runs through both models, and what passes certain places on the way (embedding, queries, keys, …, logits) is noted
under names that both share. Needs the `parity` extra.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .families import Family, find_family
from .model import Decoder
from .parts import CheckpointError
from .storage import CONFIG, find_folder, read_json

Trace = dict[str, Tensor]  # in the order in which the model computes


@dataclass(frozen=True)
class Difference:
    """How far one place is from the reference.

    size: the largest absolute difference; ratio: the largest over positions of the difference's length over the reference's
    (positions are judged one by one, because the first token's values are often a hundred times the others').
    """

    place: str
    size: float
    ratio: float

    def leaves(self, tolerance: float) -> bool:
        """Whether it is more than rounding. NaN is."""
        return not self.ratio <= tolerance


def differences_between(ours: Trace, theirs: Trace) -> list[Difference]:
    """Place by place, in our order, where both were noted. Raises CheckpointError when the logits are not among them."""
    found = []
    for place in ours:
        if place not in theirs:
            continue
        a, b = (trace[place].float().flatten(2) for trace in (ours, theirs))  # (1, T, …)
        if a.shape != b.shape:
            found.append(Difference(place, float("inf"), float("inf")))
            continue
        ratios = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        found.append(Difference(place, float((a - b).abs().max()), float(ratios.max())))
    if not found or found[-1].place != "logits":
        raise CheckpointError("the reference's logits were not noted: its model is built in a way that is not known here")
    return found


def against_transformers(path: str | os.PathLike[str], model: Decoder, ids: Tensor) -> tuple[list[Difference], Tensor]:
    """Every place of a float32 pass of `model` beside transformers' own model of the folder; and its logits (1, T, V).

    Raises CheckpointError when transformers is not installed, or cannot load the folder.
    """
    folder, _ = find_folder(path)
    family = find_family(read_json(folder / CONFIG), str(folder / CONFIG))
    ours, reference = trace_ours(model, ids), _trace_theirs(load_theirs(folder), family, ids)
    unseen = [place for place in ours if place not in reference]
    if unseen:
        print(f"transformers' model does not show {len(unseen)} places, such as {unseen[0]}: compared without", file=sys.stderr)
    return differences_between(ours, reference), reference["logits"]


@torch.no_grad()
def trace_ours(model: Decoder, ids: Tensor) -> Trace:
    """What passes each place of our model. ids (1, T); queries, keys, values and mixes (1, T, heads, D), streams (1, T, dim)"""
    trace: Trace = {}
    with ExitStack() as hooks:
        _note_streams(hooks, trace, model.blocks, model.norm)
        for number, block in enumerate(model.blocks):
            attention = block.attn
            real = attention.attend

            def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any, number: int = number, real: Any = real) -> Tensor:
                out = real(q, k, v, *rest)
                _note_heads(trace, number, q * model.blocks[number].attn.scale, k, v, out.transpose(1, 2))
                return out

            attention.attend = attend  # shadows the method, for this pass
            hooks.callback(delattr, attention, "attend")
        trace["logits"] = model(ids)
    return trace


def _note_heads(trace: Trace, number: int, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor) -> None:
    """q (1, H, T, D) scaled, k, v (1, Hkv, T, D), mixed (1, T, H, D); noted with positions first: (1, T, heads, D)"""
    trace[f"layer {number}: query after RoPE, scaled"] = q.transpose(1, 2)
    trace[f"layer {number}: key after RoPE"] = k.transpose(1, 2)
    trace[f"layer {number}: value"] = v.transpose(1, 2)
    trace[f"layer {number}: values mixed by attention"] = mixed


def _note_streams(hooks: ExitStack, trace: Trace, layers: nn.ModuleList, norm: nn.Module) -> None:
    """Note the embedding, each layer's output and the final norm's."""

    def embedding(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace["embedding"] = args[0] if args else kwargs["hidden_states"]

    def output(place: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, result: Any) -> None:
            trace[place] = result[0] if isinstance(result, tuple) else result

        return note

    hooks.callback(layers[0].register_forward_pre_hook(embedding, with_kwargs=True).remove)
    for number, layer in enumerate(layers):
        hooks.callback(layer.register_forward_hook(output(f"layer {number}: output")).remove)
    hooks.callback(norm.register_forward_hook(output("final norm")).remove)


def load_theirs(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' model of a folder, whose attention can be traced. Raises CheckpointError where it cannot be had."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise CheckpointError('transformers is not installed: pip install -e ".[parity]"') from None
    _register_tracing()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=TRACED).eval()
    except Exception as error:  # whatever it raises, it is the answer
        first = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"transformers cannot load {folder} ({type(error).__name__}: {first:.200})") from None


TRACED = "nanodecoder_traced"
_current: list[Callable[..., None]] = []  # who notes the attention calls of the pass that is running


def _register_tracing() -> None:
    """Add to transformers an attention that is its eager one and tells `_current` what it was given."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    def traced(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> tuple[Tensor, Any]:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        mixed, weights = eager(module, query, key, value, mask, **options)
        scale = options.get("scaling")
        if _current:
            _current[-1](query * (module.head_dim**-0.5 if scale is None else scale), key, value, mixed)
        return mixed, weights

    AttentionInterface.register(TRACED, traced)
    AttentionMaskInterface.register(TRACED, eager_mask)


@torch.no_grad()
def _trace_theirs(theirs: nn.Module, family: Family, ids: Tensor) -> Trace:
    """The same places of transformers' model, found by the names of the family's tensors."""
    trace: Trace = {}
    try:
        layers = theirs.get_submodule(family.tensor_name("blocks.0.attn.q_proj.weight").split(".0.")[0])
        norm = theirs.get_submodule(family.tensor_name("norm.weight").removesuffix(".weight"))
    except AttributeError as error:
        raise CheckpointError(
            f"transformers' model has no module of the name that the family's table gives ({error})"
        ) from None
    number = count()
    with ExitStack() as hooks:
        _note_streams(hooks, trace, layers, norm)
        _current.append(lambda *heads: _note_heads(trace, next(number), *heads))
        hooks.callback(_current.pop)
        trace["logits"] = theirs(ids, use_cache=False).logits
    return trace
