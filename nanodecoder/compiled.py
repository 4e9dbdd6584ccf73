"""The decode step, one new token for every row of a cache, compiled: the same blocks, wrapped from outside.

    tokens (B,) ─ front: embed, angles, masks ─ block ─ block ─ … ─ back: norm, head ─> logits (B, V)

Of a model with many layers one block is compiled, and serves all of them, so that compiling takes seconds; a small one is
compiled whole, since there the calls between the parts are what takes the time. How many tokens a row holds is a dynamic size:
there is one graph for a single row, and one for several.

Passes of more than one token per row are products that compiling does not make faster: they stay with the plain model.

Legend: B rows, S slots looked at, V vocabulary.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .attention import Sight, visible
from .cache import KVCache
from .model import Block, Decoder
from .rope import Turn, per_position, turned_by

BACKEND = "inductor"
WHOLE = 8  # layers up to which a model is compiled as one graph


@dataclass(frozen=True)
class Column:
    """The placement of one new token per row, where positions are tensors: what attention asks of a `Placement`."""

    rows: int
    columns: int = 1
    first_token: int = 0


@dataclass(frozen=True)
class ColumnCache:
    """One layer's slots, of which row b gets its new token at slots[b]. keys, values (B, Hkv, S, D), slots (B,)"""

    keys: Tensor
    values: Tensor
    slots: Tensor

    def write(self, k: Tensor, v: Tensor) -> None:
        """Keep k and v, (B, Hkv, D)."""
        # Every index written out: with a slice among them, torch's compiler makes two copies of all slots at every step
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        heads = torch.arange(k.shape[1], device=k.device)
        at = (rows, heads, self.slots[:, None])  # (B, Hkv)
        self.keys[at], self.values[at] = k, v

    def read(self, part: Column) -> tuple[Tensor, Tensor]:
        """All that a step looks at."""
        return self.keys, self.values


def front(model: Decoder, tokens: Tensor, slots: Tensor, seen: Tensor, radians: Sequence[Tensor | None]) -> Any:
    """tokens (B, 1), slots (B,), seen (S,) key positions -> x (B, dim), the turns, and the masks of the distinct windows."""
    positions = slots[:, None]
    turns = [
        None if rope is None else turned_by(positions, each, rope.attention_factor, model.dtype)
        for rope, each in zip(model.ropes, radians, strict=True)
    ]
    stride = model.config.sparse_stride
    masks = [visible(positions, seen, window, stride)[:, None] for window in dict.fromkeys(model.config.windows)]
    return model.enter(tokens, positions)[:, 0], turns, masks


def one_block(
    block: Block, x: Tensor, turn: Turn | None, mask: Tensor, keys: Tensor, values: Tensor, slots: Tensor, path: str
) -> Tensor:
    """x (B, dim) -> (B, dim). (Without the column of 1, whose stride may be anything and is not worth a graph.)"""
    return block(x[:, None], turn, [Sight(Column(x.shape[0]), mask)], ColumnCache(keys, values, slots), path)[:, 0]


def back(model: Decoder, x: Tensor) -> Tensor:
    """x (B, dim) -> logits (B, V)"""
    return model.head(model.norm(x))


def whole(
    front: Callable[..., Any],
    one_block: Callable[..., Tensor],
    back: Callable[..., Tensor],
    model: Decoder,
    tokens: Tensor,
    slots: Tensor,
    seen: Tensor,
    radians: Sequence[Tensor | None],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    path: str,
) -> Tensor:
    """A step from parts, compiled or not. -> logits (B, V)"""
    config = model.config
    x, turns, masks = front(model, tokens, slots, seen, radians)
    kinds = list(dict.fromkeys(config.windows))
    for number, block in enumerate(model.blocks):
        turn, mask = turns[model.rope_of_layer[number]], masks[kinds.index(config.windows[number])]
        x = one_block(block, x, turn, mask, keys[number], values[number], slots, path)
    return back(model, x)


class Recorded:
    """A step whose tensors stay where they are, so that a GPU can replay what it launches as one (a CUDA graph).

    It holds the cache's memory, whose addresses are part of the record. On a CPU nothing is recorded and the step runs.
    """

    def __init__(self, step: Callable[..., Tensor], model: Decoder, tokens: Tensor, slots: Tensor, *rest: Any) -> None:
        # Copies of what is wanted now: trying a step out writes into the cache what this step writes anyway
        self.tokens, self.slots = tokens.clone(), slots.clone()

        def run() -> Tensor:
            return step(model, self.tokens, self.slots, *rest)

        self._replay = recorded(run, model.device) if model.device.type == "cuda" else run

    def __call__(self, tokens: Tensor, slots: Tensor) -> Tensor:
        self.tokens.copy_(tokens)
        self.slots.copy_(slots)
        return self._replay().clone()


def recorded(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Record on a GPU, which need not be the current one; -> a function that replays, and returns the same tensor each time."""
    with torch.cuda.device(device):
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # compiles, and lets libraries allocate what they need
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # torch's own default may be another GPU's
            out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


class Compiled:
    """A model's decode step: `step(tokens, cache)`. Made by `compiled`."""

    def __init__(self, model: Decoder, steps: dict[str, Callable[..., Tensor]]) -> None:
        self.model, self._steps = model, steps  # by attention's path
        # On a GPU a small model's time is the time of its launches: they are recorded once and replayed as one
        self.records = model.device.type == "cuda" and not any(rope and rope.depends_on_length() for rope in model.ropes)
        self._recorded: dict[Hashable, Recorded] = {}

    def __call__(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """One more token for every row: tokens (B, 1) int64 -> logits (B, V). They are added to the cache.

        Raises ValueError as the model's own pass does.
        """
        model, config = self.model, self.model.config
        at = cache.place(1, exact=self.records)  # which rounds up how many slots are looked at
        if at.extent == 1:  # sizes of 1 would take graphs of their own
            return model.head(model.trunk(tokens, cache)[:, 0])
        model.check_positions(at, cache)
        slots = torch.tensor(at.starts, device=model.device)
        keys, values = cache.keys[:, :, :, : at.extent], cache.values[:, :, :, : at.extent]
        path = "explicit" if config.attn_softcap else model.attention
        if path not in self._steps:
            self._steps[path] = _step(model)
        step = self._steps[path]

        def rest() -> tuple[Any, ...]:
            """What a record holds already, and a GPU would be waited for to have anew."""
            seen = torch.arange(at.extent, device=model.device)
            radians = [rope and per_position(rope, config.head_dim, at.lengths, model.device) for rope in model.ropes]
            return seen, radians, keys, values, path

        if self.records:
            kind = (path, cache.keys.data_ptr(), keys.shape)
            if kind not in self._recorded:  # records of a cache that was left would keep its memory
                self._recorded = {other: kept for other, kept in self._recorded.items() if other[1] == kind[1]}
                self._recorded[kind] = Recorded(step, model, tokens, slots, *rest())
            logits = self._recorded[kind](tokens, slots)
        else:
            logits = step(model, tokens, slots, *rest())
        cache.advance(at)
        return logits


_steps: WeakKeyDictionary[Decoder, dict[str, Callable[..., Tensor]]] = WeakKeyDictionary()


def compiled(model: Decoder) -> Compiled | None:
    """A model's compiled step, the same one at every call, or None, with a warning, where nothing can be compiled."""
    missing = why_not(model.device)
    if missing:
        warnings.warn(f"{missing}: the step runs as it is", stacklevel=2)
        return None
    return Compiled(model, _steps.setdefault(model, {}))


def why_not(device: torch.device) -> str | None:
    """What a machine lacks for compiling, in words; None if nothing."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:  # torch raises several kinds, private ones among them
        return f"torch.compile needs a C++ compiler, and there is none ({type(error).__name__})"
    return None


def _step(model: Decoder) -> Callable[..., Tensor]:
    """`whole`, compiled at its first call."""
    compile = partial(_compile, on_gpu=model.device.type == "cuda")
    if model.config.n_layers <= WHOLE:
        return partial(compile(whole), front, one_block, back)
    return partial(whole, *map(compile, (front, one_block, back)))


def _compile(function: Callable[..., Any], on_gpu: bool = False) -> Callable[..., Any]:
    """Compile a function whose calls differ in nothing but tensors and their sizes.

    Only these are checked at each call: looking at every attribute of every module, as torch does otherwise, takes longer than
    a small model's arithmetic. torch remembers what it has compiled by code object, so each function gets one of its own.
    With fullgraph=True more graphs than torch's limit of 8 are an error instead of a silent way back.

    On a GPU its "coordinate descent" makes a single row's product a kernel of its own, which reads eight bits as they are and
    comes nearer to the memory's speed than the library; without it a weight in eight bits would be written out in 16 first.
    """
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    options: dict[str, Any] = {"guard_filter_fn": _tensors_and_sizes}
    if on_gpu and BACKEND == "inductor":
        options["coordinate_descent_tuning"] = True
    return torch.compile(own, backend=BACKEND, dynamic=True, fullgraph=True, options=options)


def _tensors_and_sizes(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type in ("TENSOR_MATCH", "SHAPE_ENV") for guard in guards]
