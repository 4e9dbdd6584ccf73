"""Does a checkpoint compute here what it computes elsewhere? `python -m nanodecoder verify --ckpt DIR --against transformers`

A comparison runs one prompt through both models, notes what passes certain places on the way (embedding, queries, keys, …,
logits) under names that both share, and reports how far apart they are: the first place that leaves is where to look.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import cli
from .checkpoint import load_model
from .cli import UsageError, option
from .families import Family, find_family
from .generate import prompt_to_ids
from .model import Decoder
from .parts import CheckpointError
from .storage import CONFIG, find_folder, read_json
from .tokenizer import Tokenizer

Trace = dict[str, Tensor]  # in the order in which the model computes
PROMPT = "The quick brown fox jumps over the lazy dog. 나는 오늘 학교에 갔다. def add(a, b): return a + b"


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


@dataclass
class Options:
    """What the command line says."""

    ckpt: str | None = option(None, "checkpoint folder", names=("checkpoint_dir", "model"))
    against: str | None = option(None, "what to compare with", choices=("transformers",))
    prompt: str = option(PROMPT, "the text that runs through both")
    max_tokens: int = option(64, "of the prompt")
    tolerance: float = option(
        2e-5, "largest difference of a position that passes, relative to its values; rounding is about 7e-6"
    )
    all: bool = option(False, "print every place, not only those that leave")


def main(argv: Sequence[str]) -> None:
    """Print the comparison; a difference is a failed run."""
    options = cli.parse(Options, argv, "python -m nanodecoder verify", "Compare a checkpoint's computation with another's.")
    if options.ckpt is None or options.against is None:
        raise UsageError("give a checkpoint and what to compare with: --ckpt DIR --against transformers")
    if options.max_tokens < 1:
        raise UsageError(f"--max_tokens must be 1 or above, not {options.max_tokens}")
    if not 0 < options.tolerance < 1:
        raise UsageError(f"--tolerance must be between 0 and 1, not {options.tolerance}")
    model = load_model(options.ckpt)
    ids = torch.tensor([_prompt_ids(options, model)])
    differences = COMPARISONS[options.against](options.ckpt, model, ids)
    left = [difference for difference in differences if difference.leaves(options.tolerance)]
    for difference in differences if options.all else left[:10]:
        mark = "  <- first to leave" if left and difference is left[0] else ""
        print(f"{difference.place:40} by {difference.size:.2g}, {difference.ratio:.2g} of its values{mark}")
    last = differences[-1]
    if left:
        raise CheckpointError(
            f"differs from {options.against}: {len(left)} of {len(differences)} places, first {left[0].place} by "
            f"{left[0].size:.2g}, {left[0].ratio:.2g} of its values; logits by {last.size:.2g} "
            f"(tolerance {options.tolerance:g})"
        )
    print(
        f"as {options.against} computes it: {len(differences)} places over {ids.shape[1]} tokens, logits within {last.size:.2g}"
    )


def _prompt_ids(options: Options, model: Decoder) -> list[int]:
    """The prompt's ids, or arbitrary ones for a checkpoint without a tokenizer."""
    limit = min(options.max_tokens, model.config.max_seq_len)
    try:
        ids = prompt_to_ids(Tokenizer.load(options.ckpt), options.prompt)
    except CheckpointError as error:
        print(f"{error}: comparing on arbitrary ids", file=sys.stderr)
        ids = torch.randint(model.config.vocab_size, (limit,), generator=torch.Generator().manual_seed(0)).tolist()
    return [index for index in ids if index < model.config.vocab_size][:limit] or [0]


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


# ------------------------------------------------------------------------------------------------------- against transformers


def against_transformers(path: str | os.PathLike[str], model: Decoder, ids: Tensor) -> list[Difference]:
    """Every place of a float32 pass of `model` beside transformers' own model of the folder. Needs the `parity` extra.

    Raises CheckpointError when transformers is not installed, or cannot load the folder.
    """
    folder, _ = find_folder(path)
    family = find_family(read_json(folder / CONFIG), str(folder / CONFIG))
    theirs = _load_theirs(folder)
    ours, reference = trace_ours(model, ids), _trace_theirs(theirs, family, ids)
    unseen = [place for place in ours if place not in reference]
    if unseen:
        print(f"transformers' model does not show {len(unseen)} places, such as {unseen[0]}: compared without", file=sys.stderr)
    return differences_between(ours, reference)


COMPARISONS: dict[str, Callable[[str, Decoder, Tensor], list[Difference]]] = {"transformers": against_transformers}


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


def _load_theirs(folder: Path) -> nn.Module:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise CheckpointError('transformers is not installed: pip install -e ".[parity]"') from None
    _register_tracing()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=TRACED).eval()
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
