"""The walk of one forward pass: the shape of everything that flows, from ids to the next id, before anything is loaded.

The model itself is run, on tensors that have shapes and no numbers (torch's meta device), so a config.json is enough and what
is printed is what the code does. Prefill and one cached step stand side by side, with a line where the model ends and the
generation code begins.

FLOPs are those of matrix products, two for each multiply-and-add: a weight takes two for each position, and attention's two
products take the whole rectangle of queries and keys, also where half of it cannot be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..cache import KVCache
from ..config import ModelConfig, RopeConfig
from ..model import Decoder
from ..sampler import Rows, Sampler
from .columns import amount, size, table
from .trace import watching

# A block's modules, and the places between them, with what they are in words
MODULES = {
    "attn_norm": "norm of what goes into attention",
    "attn.q_proj": "a query for each head, side by side",
    "attn.k_proj": "a key for each key/value head",
    "attn.v_proj": "a value for each key/value head",
    "attn.q_norm": "norm of the queries",
    "attn.k_norm": "norm of the keys",
    "attn.o_proj": "the heads together, back to the stream's width",
    "attn_post_norm": "norm of what attention gives",
    "ffn_norm": "norm of what goes into the feed-forward",
    "ffn.gate_proj": "how much of each feature passes",
    "ffn.up_proj": "up to the feed-forward's width",
    "ffn.down_proj": "and back to the stream's",
    "ffn_post_norm": "norm of what the feed-forward gives",
}
PLACES = {
    "q": "queries by head",
    "k": "the keys they meet: the cache's and the new ones",
    "v": "their values",
    "scores": "every query with every key",
    "attention": "softmax over the keys",
    "heads": "values mixed by it",
    "mid": "added to the stream",
    "out": "added to the stream",
}


@dataclass(frozen=True)
class Stop:
    """A stop of the walk: its shapes in the prefill and in one step with a cache, its parameters, and its FLOPs for all rows.

    place: "model" once, "block" in each block, "training" and "generation" where only those come by. A shape is None where a
    pass does not.
    """

    name: str
    about: str
    place: str
    prefill: tuple[int, ...] | None
    step: tuple[int, ...] | None
    dtype: str
    parameters: int = 0
    flops: int = 0
    step_flops: int = 0


@dataclass(frozen=True)
class Walk:
    """The stops of a pass of `rows` prompts of `columns` tokens each. What a stop in a block has, each of the blocks has."""

    config: ModelConfig
    rows: int
    columns: int
    stops: tuple[Stop, ...]

    def __getitem__(self, name: str) -> Stop:
        return next(stop for stop in self.stops if stop.name == name)

    def total(self, what: str) -> int:
        """The sum of "parameters", "flops" or "step_flops" as generation has them: the head looks at the last position."""
        times = {"block": self.config.n_layers, "training": 0}
        return sum(getattr(stop, what) * times.get(stop.place, 1) for stop in self.stops)

    @property
    def softmaxes(self) -> int:
        """How many softmaxed tables one row of the batch has in a pass: blocks × heads."""
        return self.config.n_layers * self.config.n_heads


def walk(config: ModelConfig, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Walk:
    """`rows` prompts of `columns` tokens each through a model of this config, and one more token for each through the cache.

    Raises ValueError for sizes below 1, or for more tokens than there are learned positions.
    """
    if rows < 1 or columns < 1:
        raise ValueError(f"a pass needs at least 1 row and 1 token, not {rows} and {columns}")
    # Shapes are the same for every kind of stretching, and some kinds refuse to go on across a length
    ropes = tuple(rope and RopeConfig(fraction=rope.fraction) for rope in config.rope)
    model = empty(replace(config, rope=ropes), dtype)
    full = config.learned_positions and columns == config.max_seq_len  # no room for a step
    cache = KVCache(config, rows, columns + 1, device="meta", dtype=dtype)
    prefill = _pass(model, rows, columns, cache)
    if full:
        cache.truncate(columns - 1)
    step = _pass(model, rows, 1, cache)
    stops = [_stop(model, name, prefill, step) for name in prefill]
    return Walk(config, rows, columns, (*stops, *_head(model, prefill["norm"], step["norm"])))


def empty(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    """A model that has shapes and no numbers."""
    with torch.device("meta"):
        return Decoder(config).to(dtype).eval()


@torch.no_grad()
def _pass(model: Decoder, rows: int, columns: int, cache: KVCache) -> dict[str, Tensor]:
    """Name -> what flows there in one pass of the trunk, in its order; the first block stands for all."""
    found = {"tokens": torch.zeros(rows, columns, dtype=torch.int64, device="meta")}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, given, out: found.update({name: out})

    def see(name: str, value: Tensor) -> Tensor:
        found[name.removeprefix("blocks.0.")] = value
        return value

    with ExitStack() as stack:
        for name, module in _modules(model).items():
            stack.callback(module.register_forward_hook(note(name)).remove)
        stack.enter_context(watching(model, see, {f"blocks.0.{kind}" for kind in PLACES}))
        model.trunk(found["tokens"], cache)
    return found


def _modules(model: Decoder) -> dict[str, nn.Module]:
    """The modules that the walk comes by, by name; those that pass everything on are none."""
    inner = dict(model.blocks[0].named_modules())
    found = {name: getattr(model, name) for name in ("embed", "positions", "norm")}
    found |= {name: inner.get(name) for name in MODULES}
    return {name: module for name, module in found.items() if module is not None and not isinstance(module, nn.Identity)}


def _stop(model: Decoder, name: str, prefill: dict[str, Tensor], step: dict[str, Tensor]) -> Stop:
    module = _modules(model).get(name)
    parameters = sum(p.numel() for p in module.parameters()) if module is not None else 0
    flops = [0, 0]
    if name.endswith("_proj"):
        flops = [2 * module.weight.numel() * found[name].shape[:2].numel() for found in (prefill, step)]
    elif name in ("scores", "heads"):  # q kᵀ, and the weights times v
        flops = [2 * model.config.head_dim * found["scores"].numel() for found in (prefill, step)]
    ends = {
        "tokens": "ids",
        "embed": "a vector for each id",
        "positions": "a learned vector for each position",
        "norm": "the last norm",
    }
    about = MODULES.get(name) or PLACES.get(name) or ends[name]
    shapes = [tuple(found[name].shape) for found in (prefill, step)]
    return Stop(name, about, "model" if name in ends else "block", *shapes, _named(prefill[name]), parameters, *flops)


@torch.no_grad()
def _head(model: Decoder, prefill: Tensor, step: Tensor) -> list[Stop]:
    """From the trunk's stream (B, T, dim) to the next ids (B,)."""
    own = 0 if model.config.tied_head else model.lm_head.weight.numel()
    about = "the head shares the embedding's weight" if model.config.tied_head else "a score for each id of the vocabulary"
    each, last, of_step = (model.head(x) for x in (prefill, prefill[:, -1:], step))

    def flops(logits: Tensor) -> int:
        return 2 * model.config.dim * logits.numel()

    logits = last[:, -1]  # (B, V)
    sampler, rows = Sampler(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01), Rows([0] * len(logits), [0] * len(logits))
    after = {
        "logits": (logits, "of each row's last position"),
        "filters": (sampler.filter(logits, rows), "penalties, temperature, top-k, top-p, min-p"),
        "softmax": (sampler.probabilities(logits, rows), "what is drawn from; a greedy choice needs none"),
        "choice": (sampler.perturb(logits, rows).argmax(-1), "the next ids, which go back in"),
    }
    found = [
        Stop(
            "lm_head",
            "logits of every position, as training calls it",
            "training",
            tuple(each.shape),
            None,
            _named(each),
            0,
            flops(each),
        ),
        Stop(
            "lm_head, last",
            about,
            "model",
            tuple(last.shape),
            tuple(of_step.shape),
            _named(last),
            own,
            flops(last),
            flops(of_step),
        ),
    ]
    return found + [Stop(n, words, "generation", tuple(x.shape), tuple(x.shape), _named(x)) for n, (x, words) in after.items()]


def _named(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def show(found: Walk) -> str:
    """The walk as lines."""
    config, rows, columns = found.config, found.rows, found.columns
    usual = found["embed"].dtype
    prompts = f"{rows} prompts of {columns} tokens" if rows > 1 else f"a prompt of {columns} tokens"
    lines = [("", f"prefill: {prompts}", "one step, cached", "parameters", "FLOPs", "")]
    before = "model"
    for stop in found.stops:
        if stop.place == "block" != before:
            lines.append((f"block, {config.n_layers} times over:",))
        if stop.place == "generation" != before:
            lines.append(("---- here the model ends, and the code that generates begins ----",))
        before = stop.place
        name = f"  {stop.name}" if stop.place == "block" else stop.name
        shapes = ["-" if shape is None else str(list(shape)) for shape in (stop.prefill, stop.step)]
        about = stop.about + (f" ({stop.dtype})" if stop.dtype != usual else "")
        lines.append(
            (name, *shapes, f"{stop.parameters:,}" if stop.parameters else "", amount(stop.flops) if stop.flops else "", about)
        )
    wide = [line for line in lines if len(line) > 1]
    text = dict(zip(map(id, wide), table(wide, right=(3, 4), longest=60).split("\n"), strict=True))
    shown = [text.get(id(line), line[0]) for line in lines]
    shown += ["", *figures(found)]
    return "\n".join(shown)


def figures(found: Walk) -> list[str]:
    """Sums and softmaxes, in sentences."""
    config, rows = found.config, found.rows
    n, dtype, table_shape = found.total("parameters"), found["embed"].dtype, found["scores"].prefill
    softmaxed = f"{config.n_layers} blocks × {config.n_heads} heads = {found.softmaxes:,} tables for each row of the batch"
    calls = f"{config.n_layers} calls on {list(table_shape)}, inside the kernel where attention is fused"
    return [
        f"{n:,} parameters, {size(n * getattr(torch, dtype).itemsize)} in {dtype}",
        f"FLOPs of matrix products: {amount(found.total('flops'))} for the prefill, {amount(found.total('step_flops'))} for a "
        f"step of {rows} new token{'s' * (rows > 1)}",
        f"softmaxes in attention: {softmaxed}; in tensors that is {calls}",
        "softmaxes after it: one over the vocabulary for each new token, none when greedy, a second one for top-p",
    ]
