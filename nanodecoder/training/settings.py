"""What a run is: its settings, the model that they ask for, and the same as a TOML file."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..cli import UsageError, choose_device, option
from ..config import ModelConfig, RopeConfig
from .data import FORMATS, Data
from .optim import OPTIMIZERS, SCHEDULES
from .parallel import KINDS
from .vocabulary import NORMALIZATIONS

CONFIG = "train.toml"
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class TrainConfig:
    """A run: what `train.py` takes as --options, and what lies in train.toml."""

    # The data
    data: str | None = option(None, "text file, folder of them, lines, JSON lines, ids (.npy), or - for standard input")
    val_data: str | None = option(None, "validate on this file instead of a part of --data")
    format: str | None = option(None, "what --data holds (default: found out)", choices=FORMATS)
    encoding: str = option("utf-8", "encoding of the text")
    normalization: str = option("nfc", "compose characters, here and in prompts", choices=NORMALIZATIONS)
    tokenizer: str = option("char", "char, byte, bpe, or a checkpoint folder whose tokenizer is to be used")
    vocab_size: int = option(1024, "ids of a bpe tokenizer")
    val_fraction: float = option(0.1, "part of the data that validates: a text's end, or examples drawn for good")

    # The model
    init_from: str | None = option(None, "checkpoint folder to start from, with its tokenizer")
    n_layers: int | None = option(None, "blocks (default: by the data and the time)", names=("n_layer",))
    n_heads: int | None = option(None, "query heads", names=("n_head",))
    n_kv_heads: int | None = option(None, "key/value heads (default: as many as query heads)")
    dim: int | None = option(None, "width of the stream", names=("n_embd",))
    ffn_dim: int | None = option(None, "width inside the feed-forward (default: 8/3 of --dim, 4 times without a gate)")
    block_size: int | None = option(None, "context in tokens (default: 256, or what the longest example takes)")
    dropout: float = option(0.0, "part of what blocks write that is dropped in training")
    norm: str = option("rms", "kind of norm", choices=("rms", "layer"))
    norm_place: str = option("pre", "norm what goes into a half of a block, or what comes out", choices=("pre", "post"))
    ffn: str = option("swiglu", "kind of feed-forward", choices=("swiglu", "gelu", "relu"))
    positions: str = option("rope", "how tokens know where they are", choices=("rope", "learned", "none"))
    qk_norm: bool = option(True, "norm queries and keys, head by head")
    bias: bool = option(False, "biases beside all of a block's matrices")
    window: int | None = option(None, "see this many tokens back only, oneself included")
    sparse_stride: int | None = option(None, "beyond the window, see every k-th token too")
    tied_head: bool = option(True, "the head shares the embedding's weight")

    # The loop
    max_iters: int | None = option(None, "steps (default: 2000, or as many as --max_time allows)")
    max_time: float | None = option(None, "seconds; the schedule follows them")
    batch_size: int = option(16, "windows or examples per process and pass")
    gradient_accumulation_steps: int = option(1, "passes per step")
    optimizer: str | None = option(
        None,
        "muon for the blocks' matrices and adamw for the rest, or adamw alone (default: muon, adamw with --init_from)",
        choices=OPTIMIZERS,
    )
    learning_rate: float | None = option(
        None, "adamw's rate (default: 4e-3 beside muon, 1e-3 alone, 5e-5 with --init_from)", names=("lr",)
    )
    muon_learning_rate: float = option(1e-2, "muon's rate")
    min_lr: float = option(0.0, "where adamw's rate ends; muon's falls by as much")
    schedule: str = option("cosine", "how the rates fall", choices=SCHEDULES)
    warmup_iters: int | None = option(None, "steps over which the rates rise (default: 100, at most a tenth of the run)")
    weight_decay: float = option(0.1, "pull on matrices")
    beta1: float = option(0.9, "adamw's first decay")
    beta2: float = option(0.99, "adamw's second decay")
    grad_clip: float = option(1.0, "longest gradient; 0 is off")
    seed: int = option(1337, "of everything")
    device: str = option("auto", "cpu, cuda, mps or auto")
    dtype: str = option("float32", "what passes compute in; weights stay float32", choices=tuple(DTYPES))
    compile: bool = option(False, "compile the model (needs a C++ compiler)")
    gradient_checkpointing: bool = option(False, "compute blocks anew on the way back: less memory, a third slower")
    parallel: str = option("ddp", "how processes share the work", choices=KINDS)

    # What is shown and kept
    out_dir: str | None = option(None, "folder of the run (default: out/NAME of the data)")
    eval_interval: int = option(250, "steps between validations")
    eval_iters: int | None = option(None, "validate on this many batches (default: on all)")
    log_interval: int = option(10, "steps between lines of metrics.jsonl")
    sample_interval: int = option(0, "steps between samples; 0 is off")
    save_interval: int | None = option(None, "steps between saves (default: --eval_interval)")
    max_steps_now: int | None = option(None, "stop, saved and resumable, after this many steps of this call")


MAY_CHANGE = frozenset(
    "max_iters max_time eval_interval log_interval sample_interval save_interval max_steps_now device compile "
    "parallel gradient_checkpointing batch_size gradient_accumulation_steps data val_data".split()
)


SIZES = ((2, 64, 2), (3, 96, 3), (4, 128, 4), (5, 192, 6), (6, 256, 8), (6, 384, 6), (8, 512, 8), (12, 768, 12))


def most_parameters(config: TrainConfig, data: Data, block_size: int, processes: int, rate: float) -> float:
    """How many parameters a run can use: one for each token of the text, and one for each token that it goes through.

    With N parameters, a device of `rate` floating-point operations a second goes through rate / (6 · N) tokens in one of them
    (arXiv 2001.08361, section 2.1).
    """
    most = float(len(data.train.ids))
    if steps_of(config) is not None:
        per_item = min(block_size, len(data.train.ids) / len(data.train))
        most = min(most, steps_of(config) * config.batch_size * config.gradient_accumulation_steps * processes * per_item)
    if config.max_time is not None:
        most = min(most, (rate * processes * config.max_time / 6) ** 0.5)
    return most


def model_config(config: TrainConfig, vocab: int, block_size: int, most: float) -> ModelConfig:
    """The decoder to train. Sizes that are not given are those of the largest of SIZES with at most `most` parameters."""
    given = (config.n_layers, config.dim, config.n_heads)
    n_layers, dim, n_heads = next(
        (size for size in reversed(SIZES) if 12 * size[0] * size[1] ** 2 + vocab * size[1] <= most), SIZES[0]
    )
    if any(given):
        n_layers = config.n_layers or n_layers
        dim = config.dim or (dim if config.n_heads is None or dim % config.n_heads == 0 else 32 * config.n_heads)
        n_heads = config.n_heads or max(1, dim // 32)
        n_heads = n_heads if dim % n_heads == 0 else 1
    gated = config.ffn == "swiglu"
    try:
        return ModelConfig(
            vocab_size=vocab,
            dim=dim,
            n_layers=n_layers,
            n_heads=config.n_heads or n_heads,
            n_kv_heads=config.n_kv_heads,
            ffn_dim=config.ffn_dim or (None if gated else 4 * dim),
            max_seq_len=block_size,
            rope=RopeConfig() if config.positions == "rope" else None,
            learned_positions=config.positions == "learned",
            windows=config.window,
            sparse_stride=config.sparse_stride,
            norm=config.norm,
            pre_norm=config.norm_place == "pre",
            post_norm=config.norm_place == "post",
            qk_norm="head" if config.qk_norm else None,
            qkv_bias=config.bias,
            o_bias=config.bias,
            ffn_bias=config.bias,
            activation={"swiglu": "silu", "gelu": "gelu_tanh", "relu": "relu"}[config.ffn],
            gated=gated,
            tied_head=config.tied_head,
        )
    except ValueError as error:
        raise UsageError(f"no model can be made of these sizes: {error}") from None


def warmup_of(config: TrainConfig) -> int:
    """Over how many steps the rates rise."""
    if config.warmup_iters is not None:
        return config.warmup_iters
    steps = steps_of(config)
    return 100 if steps is None else min(100, steps // 10)


def optimizer_of(config: TrainConfig) -> str:
    """Muon turns matrices far; what was trained before is better moved a little."""
    return config.optimizer or ("adamw" if config.init_from else "muon")


def learning_rate_of(config: TrainConfig) -> float:
    """AdamW's full rate."""
    if config.learning_rate is not None:
        return config.learning_rate
    return 5e-5 if config.init_from else 4e-3 if optimizer_of(config) == "muon" else 1e-3


def steps_of(config: TrainConfig) -> int | None:
    """How many steps a run has, where time alone does not say."""
    return config.max_iters if config.max_iters is not None else None if config.max_time else 2000


def check(config: TrainConfig) -> None:
    """Raises UsageError for settings that cannot be, or that would be ignored."""

    def require(holds: bool, name: str, range_: str) -> None:
        if not holds:
            raise UsageError(f"--{name} must be {range_}, not {getattr(config, name)}")

    hints = typing.get_type_hints(TrainConfig)
    unset = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    for field in dataclasses.fields(TrainConfig):  # a TOML file or a program may set anything
        value = getattr(config, field.name)
        kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
        fits = type(value) in kinds or (float in kinds and type(value) is int)
        require(fits, field.name, " or ".join(WORDS[kind] for kind in kinds if kind in WORDS))
        require(not isinstance(value, float) or math.isfinite(value), field.name, "a finite number")
        choices = field.metadata["choices"]
        require(not choices or value is None or value in choices, field.name, f"one of {', '.join(choices)}")
    if config.data is None:
        raise UsageError("give a text to learn from, --data FILE")

    def refuse(names: str, because: str) -> None:
        ignored = [name for name in names.split() if getattr(config, name) != unset[name]]
        if ignored:
            raise UsageError(f"--{ignored[0]} would be ignored: {because}; leave it out")

    if config.init_from is not None:
        refuse(
            "n_layers n_heads n_kv_heads dim ffn_dim norm norm_place ffn positions qk_norm bias window sparse_stride tied_head",
            "the model is --init_from's",
        )
    if config.tokenizer != "bpe":
        refuse("vocab_size", "it is for --tokenizer bpe")
    if optimizer_of(config) != "muon":
        refuse("muon_learning_rate", "nothing goes to Muon")
    if config.val_data is not None:
        refuse("val_fraction", "--val_data validates")
    for name in ("batch_size", "gradient_accumulation_steps", "eval_interval", "log_interval"):
        require(getattr(config, name) >= 1, name, "1 or above")
    counted = "max_iters block_size eval_iters save_interval max_steps_now n_layers n_heads n_kv_heads dim ffn_dim window"
    for name in counted.split():
        require(getattr(config, name) is None or getattr(config, name) >= 1, name, "1 or above")
    require(config.warmup_iters is None or config.warmup_iters >= 0, "warmup_iters", "0 or above")
    require(0 <= config.seed < 2**63, "seed", "from 0 to below 2^63")
    require(config.min_lr <= learning_rate_of(config), "min_lr", f"at most the learning rate, {learning_rate_of(config):g}")
    for name in ("weight_decay", "grad_clip", "min_lr", "sample_interval"):
        require(getattr(config, name) >= 0, name, "0 or above")
    for name in ("learning_rate", "muon_learning_rate", "max_time"):
        require(getattr(config, name) is None or getattr(config, name) > 0, name, "above 0")
    for name in ("beta1", "beta2", "dropout", "val_fraction"):
        require(0 <= getattr(config, name) < 1, name, "from 0 to below 1")
    if config.dtype == "float16" and choose_device(config.device).type != "cuda":
        raise UsageError("--dtype float16 needs a GPU; bfloat16 and float32 train anywhere")


def to_toml(config: TrainConfig) -> str:
    """A configuration as TOML, without what is said of one call. JSON's strings, finite numbers and truth values are TOML's."""
    given = {name: value for name, value in dataclasses.asdict(config).items() if value is not None and name != "max_steps_now"}
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in given.items())


def from_toml(path: Path) -> dict[str, Any]:
    """What a TOML file sets. Raises UsageError for a file that is none, or names no option."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as TOML ({error})") from None
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    unknown = [name for name in found if name not in known]
    if unknown:
        raise UsageError(f"{path} sets {', '.join(unknown)}, which train.py does not have; train.py --help lists what there is")
    return found
