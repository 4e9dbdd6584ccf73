"""Know before you run: `python -m nanodecoder plan --ckpt DIR_OR_NAME`

What a checkpoint is made of, what it takes and how fast it can be at best on this machine, from its config.json and the headers
of its safetensors files alone. Of a hub name, no weights are downloaded.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from .. import cli
from ..checkpoint import DTYPES
from ..cli import UsageError, option
from ..config import ModelConfig
from ..families import FAMILIES, find_family
from ..hub import describe, is_hub_name
from ..parts import CheckpointError
from ..quantize import KINDS
from ..storage import CONFIG, INDEX, SPELLED, WEIGHTS, Weights, find_folder, read_json
from ..tokenizer import Tokenizer
from .columns import amount, size, table, wrapped
from .memory import OPTIMIZERS, activations, cache_per_token, optimizer_state, quantized, weights
from .shapes import empty, show, walk

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
MEASURED = 2**28  # bytes that are read to see how fast memory is


@dataclass
class Options:
    """What the command line says."""

    ckpt: str | None = option(None, "checkpoint folder, config.json, or hub name", names=("checkpoint_dir", "model"))
    batch: int = option(1, "rows at a time", names=("batch_size",))
    context: int | None = option(None, "tokens of each row (default: the model's context)", names=("max_seq_len",))
    dtype: str | None = option(None, "unset: the checkpoint's own", choices=("auto", *DTYPES))
    quantize: str | None = option(None, "matrices of the blocks and the head as whole numbers", choices=KINDS)
    train: bool = option(False, "what training takes too")
    shapes: str | None = option(None, "print the shapes of a pass of ROWSxTOKENS (4x7) and nothing else")
    device: str = option("auto", "auto, cpu, cuda, cuda:1 or mps")
    offline: bool = option(False, "take a hub name from what was downloaded before, and ask no network")


@dataclass(frozen=True)
class Source:
    """A checkpoint as far as it can be known without its weights. tensors: name -> dtype and shape, of the headers, if any."""

    name: str
    folder: Path
    raw: dict[str, Any]
    config: ModelConfig
    tensors: dict[str, tuple[str, tuple[int, ...]]] | None


def main(argv: Sequence[str]) -> None:
    """Print the plan, or the shapes of a pass."""
    options = cli.parse(Options, argv, "python -m nanodecoder plan", "What a checkpoint is made of and what it takes.")
    if options.ckpt is None:
        raise UsageError("give a checkpoint folder, a config.json or a hub name: --ckpt DIR")
    if options.batch < 1 or (options.context is not None and options.context < 1):
        raise UsageError(f"--batch and --context must be 1 or above, not {options.batch} and {options.context}")
    source = read(options.ckpt, options.offline)
    device = cli.choose_device(options.device)
    dtype = choose_dtype(options.dtype, source)
    if options.shapes is not None:
        rows, columns = _sizes(options.shapes)
        _check_context(source.config, columns)
        print(show(walk(source.config, rows, columns, dtype)))
        return
    context = options.context or source.config.max_seq_len
    _check_context(source.config, context)
    sections = [made_of(source), takes(options, source, context, dtype), *(_training(options, source, context))]
    print("\n\n".join([*sections, machine(options, source, context, dtype, device)]))


def _sizes(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)[x×](\d+)", text)
    if not found or int(found[1]) < 1 or int(found[2]) < 1:
        raise UsageError(f"--shapes takes ROWSxTOKENS, as 4x7, not {text!r}")
    return int(found[1]), int(found[2])


def _check_context(config: ModelConfig, context: int) -> None:
    if config.learned_positions and context > config.max_seq_len:
        raise UsageError(f"{context} tokens are asked for, and there are {config.max_seq_len} learned positions")


# --------------------------------------------------------------------------------------------------------------- reading


def read(ckpt: str | os.PathLike[str], offline: bool = False) -> Source:
    """Config, tokenizer files and safetensors headers of a checkpoint. Raises CheckpointError as `load_model` does."""
    tensors = file = None
    if is_hub_name(ckpt):
        folder, tensors = describe(os.fspath(ckpt), offline=offline)
    else:
        given = Path(ckpt)
        folder, file = find_folder(given.parent if given.name == CONFIG and given.is_file() else given)
    if tensors is None and (file is not None or any((folder / name).is_file() for name in (WEIGHTS, INDEX))):
        tensors = {name: (stored.dtype, stored.shape) for name, stored in Weights(folder, file).tensors.items()}
    where = str(folder / CONFIG)
    raw = read_json(folder / CONFIG)
    family = find_family(raw, where)
    if family is None:
        raise CheckpointError(
            f"{where} has model_type {raw['model_type']!r}, which is not supported; these are: {', '.join(FAMILIES)}"
        )
    return Source(os.fspath(ckpt), folder, raw, family.read(raw, where), tensors)


def choose_dtype(asked: str | None, source: Source) -> torch.dtype:
    """The dtype that was asked for, else the checkpoint's own: what config.json says, else what most of its tensors have."""
    if asked not in (None, "auto"):
        return DTYPES[asked]
    named = str(source.raw.get("dtype") or source.raw.get("torch_dtype") or "").removeprefix("torch.")
    spelled = Counter(kind for kind, _ in (source.tensors or {}).values()).most_common(1)
    by_header = next((dtype for dtype, kind in SPELLED.items() if spelled and kind == spelled[0][0]), torch.float32)
    return DTYPES.get(named, by_header)


# ---------------------------------------------------------------------------------------------------------- what it is


def made_of(source: Source) -> str:
    """What the model is made of, and what lies in its files."""
    c = source.config
    lines = [f"{source.name} ({c.model_type})", *(f"  {line}" for line in description(c))]
    pieces = _pieces(source.folder)
    told = "no tokenizer lies here" if pieces is None else f"the tokenizer has {pieces:,} pieces"
    if pieces is not None and pieces < c.vocab_size:
        told += f", so {c.vocab_size - pieces} rows stand for nothing"
    tied = "the head shares the embedding's weight" if c.tied_head else "the head has a weight of its own"
    lines.append(f"  {tied}; {c.vocab_size:,} rows of logits, and {told}")
    if source.tensors is None:
        lines.append("  no safetensors headers here: all that follows is from config.json alone")
    else:
        numbers = Counter()
        for kind, shape in source.tensors.values():
            numbers[kind] += prod(shape)
        stored = sum(n * BYTES.get(kind, 1) for kind, n in numbers.items())
        kinds = ", ".join(f"{n:,} numbers of {kind}" for kind, n in numbers.most_common())
        lines.append(f"  its files hold {len(source.tensors)} tensors: {kinds}, {size(stored)}")
    return "\n".join(lines)


def description(c: ModelConfig) -> list[str]:
    """What a decoder is made of, in words."""
    norms = {"rms": "RMSNorm", "layer": "LayerNorm"}[c.norm]
    place = {(True, False): "before", (False, True): "after", (True, True): "before and after", (False, False): "nowhere by"}
    halves = "attention and feed-forward side by side" if c.parallel else "attention, then feed-forward"
    gate = "gated " if c.gated else ""
    share = c.n_heads // c.n_kv_heads
    kind = "multi-head" if share == 1 else "multi-query" if c.n_kv_heads == 1 else "grouped-query"
    heads = f"{c.n_heads} query and {c.n_kv_heads} key/value heads of width {c.head_dim} ({kind})"
    if c.qk_norm:
        heads += f", queries and keys normed {'head by head' if c.qk_norm == 'head' else 'all heads together'}"
    ropes = list(dict.fromkeys(rope for rope in c.rope if rope is not None))
    positions = ["a learned vector for each position"] if c.learned_positions else []
    positions += [f"RoPE with theta {r.theta:,.0f}{'' if r.kind == 'default' else f', {r.kind}'}" for r in ropes]
    without = sum(rope is None for rope in c.rope)
    if ropes and without:
        positions.append(f"{without} layers without")
    windows = Counter(c.windows)
    seen = [f"{n} see {'all' if w is None else f'a window of {w:,}'}" for w, n in windows.items()]
    stride = f" and one token in {c.sparse_stride} beyond" if c.sparse_stride else ""
    sight = "every layer sees all before it" if set(windows) == {None} else f"of the layers {', '.join(seen)}{stride}"
    caps = [f"scores capped at {c.attn_softcap:g}"] if c.attn_softcap else []
    caps += [f"logits capped at {c.final_softcap:g}"] if c.final_softcap else []
    return [
        f"{c.n_layers} blocks of width {c.dim}: {halves}; {norms} {place[c.pre_norm, c.post_norm]} each",
        f"feed-forward of width {c.ffn_dim}, {gate}{c.activation}",
        "; ".join([heads, *caps]),
        f"positions: {' and '.join(positions) or 'none'}; {sight}; context {c.max_seq_len:,}",
    ]


def _pieces(folder: Path) -> int | None:
    try:
        return Tokenizer.load(folder).vocab_size
    except CheckpointError:
        return None


# ---------------------------------------------------------------------------------------------------------- what it takes


@dataclass(frozen=True)
class Need:
    """Bytes that generating takes; activations are about right."""

    weights: int
    cache: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations


def need(config: ModelConfig, rows: int, context: int, dtype: torch.dtype, quantize: str | None = None) -> Need:
    """What `rows` rows of `context` tokens take, the prompt fed at once."""
    model = empty(config, dtype)
    held = quantized(model, quantize) if quantize else sum(weights(model).values())
    return Need(held, cache_per_token(config, dtype) * rows * context, activations(config, rows, context, dtype))


def takes(options: Options, source: Source, context: int, dtype: torch.dtype) -> str:
    """Weights by part, cache, activations, FLOPs."""
    c = source.config
    model = empty(c, dtype)
    parts = weights(model)
    name = str(dtype).removeprefix("torch.")
    found = need(c, options.batch, context, dtype, options.quantize)
    asked = f"{options.batch} row{'s' * (options.batch > 1)} of {context:,} tokens"
    count = sum(p.numel() for p in model.parameters())
    kind = f"{options.quantize} matrices beside {name}" if options.quantize else name
    lines = [("weights", size(found.weights), f"{count:,} parameters, {kind}")]
    if not options.quantize:
        lines += [(f"  {part}", size(n), "") for part, n in parts.items() if n]
    token = cache_per_token(c, dtype)
    each = f"{size(token)} a token: 2 × {c.n_layers} layers × {c.n_kv_heads} heads × {c.head_dim} × {dtype.itemsize} bytes"
    lines += [
        (f"cache, {asked}", size(found.cache), each),
        ("activations, at most", size(found.activations), "about; a whole prompt, fused attention"),
        ("together", size(found.total), ""),
    ]
    if context > c.max_seq_len:
        lines.append(("", "", f"the model was made for {c.max_seq_len:,} tokens: longer texts are up to it"))
    pass_ = walk(c, options.batch, context, dtype)
    flops = [("FLOPs a token, prefill", amount(pass_.total("flops") / options.batch / context), "matrix products")]
    flops += [("FLOPs a token, one step", amount(pass_.total("step_flops") / options.batch), f"after {context:,} tokens")]
    return table([*lines, *flops], right=(1,), longest=80)


def _training(options: Options, source: Source, context: int) -> list[str]:
    if not options.train:
        return []
    model = empty(source.config, torch.float32)
    held = sum(weights(model).values())
    kept = activations(source.config, options.batch, context, torch.float32, train=True)
    lines = [
        ("training: weights", size(held), "float32"),
        ("  gradients", size(held), "as large"),
        ("  activations", size(kept), f"about; {options.batch} × {context:,} tokens, fused attention"),
    ]
    for optimizer in OPTIMIZERS:
        state = optimizer_state(model, optimizer)
        lines.append(
            (f"  {optimizer}", size(state), f"{state / held:.1f} times the weights; {size(2 * held + state + kept)} together")
        )
    return [table(lines, right=(1,), longest=80)]


# ----------------------------------------------------------------------------------------------------------- this machine


def machine(options: Options, source: Source, context: int, dtype: torch.dtype, device: torch.device) -> str:
    """How fast memory is here, the ceiling that follows, the kernel that torch would choose, and what fits."""
    c = source.config
    speed, memory = bandwidth(device), total_memory(device)
    name = str(dtype).removeprefix("torch.")
    prefill, step = (kernel(c, dtype, device, causal) for causal in (True, False))
    lines = [
        f"{device}: {size(memory)} of memory, read at {speed / 1e9:,.1f} GB/s (measured)",
        wrapped(f"attention in {name}: {prefill} for a prompt, {step} for a step"),
    ]
    ways: list[tuple[str, torch.dtype, str | None]] = [(kind, DTYPES[kind], None) for kind in ("float32", "bfloat16")]
    ways += [(kind, torch.bfloat16 if dtype == torch.float32 else dtype, kind) for kind in KINDS]
    rows: list[tuple[str, ...]] = [("", "weights", "with cache", "and activations", "", "tokens/s at most")]
    for kind, held, quantize in ways:
        found = need(c, options.batch, context, held, quantize)
        fits = "fits" if found.total < memory else "too large"
        most = speed / (found.weights + found.cache) * options.batch
        sizes = (size(found.weights), size(found.weights + found.cache), size(found.total))
        rows.append((f"  {kind}", *sizes, fits, f"{most:,.1f}"))
    lines.append(table(rows, right=(1, 2, 3, 5)))
    lines.append(
        wrapped(
            f"(each step reads all weights and what the cache holds, here {options.batch} × {context:,} tokens, and gives each "
            "row a token)"
        )
    )
    return "\n".join(lines)


def total_memory(device: torch.device) -> int:
    """Bytes of the device's memory, or of this machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bandwidth(device: torch.device, tries: int = 5) -> float:
    """Bytes a second at which a matrix is read for a product with one vector, which is what a step does with each weight."""
    side = 4096
    matrix = torch.ones(MEASURED // 4 // side, side, device=device)
    vector = torch.ones(side, device=device)
    best = float("inf")
    for _ in range(tries + 1):  # the first one warms up
        cli.synchronize(device)
        start = time.perf_counter()
        matrix @ vector
        cli.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return MEASURED / best


def kernel(config: ModelConfig, dtype: torch.dtype, device: torch.device, causal: bool) -> str:
    """Which of scaled_dot_product_attention's kernels torch takes for a prompt (`causal`), or for a step."""
    if config.attn_softcap:
        return "the formula written out (no kernel caps scores)"
    shape = (1, config.n_heads, 64, config.head_dim) if causal else (1, config.n_kv_heads, 1, config.head_dim)
    q = torch.zeros(shape, dtype=dtype, device=device)
    k = torch.zeros(1, config.n_kv_heads, 64, config.head_dim, dtype=dtype, device=device)
    chosen = torch._fused_sdp_choice(q, k, k, None, 0.0, causal, enable_gqa=causal and config.n_heads != config.n_kv_heads)
    names = {int(backend.value): name.lower().replace("_", " ") for name, backend in SDPBackend.__members__.items()}
    return names.get(int(chosen), "another kernel")
