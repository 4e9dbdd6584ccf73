"""What an entry of `families.py` is made of: parts that read config.json, and layouts of tensors.

A part reads some keys into `ModelConfig` options and can write them back; a key that no part reads is refused by name,
unless it is listed here as harmless. A layout says how one or several of our parameters lie in one of their tensors.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .config import LARGEST, ModelConfig, RopeConfig


class CheckpointError(Exception):
    """A checkpoint that cannot be used, in one sentence: what was found, what would do, what to do next."""


MOST_LAYERS = 4096
REQUIRED = object()  # a default that says: config.json must have this key

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class Fields:
    """The keys of one config.json (or an object inside it), each asked for by name; `unread` is what nobody asked for."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw, self.where = raw, where
        self._asked: set[str] = set()

    def take(self, key: str, kind: type, default: Any = REQUIRED) -> Any:
        """The value of `key`, checked to be of `kind`; `default` where it is absent or null.

        Raises CheckpointError when the key is missing and has no default, or holds something else.
        """
        self._asked.add(key)
        value = self.raw.get(key, default)
        if value is REQUIRED:
            raise CheckpointError(f"{self.where} has no {key!r}, which this model needs")
        if value is None:
            if default is REQUIRED:
                raise CheckpointError(f"{self.where}: {key!r} is null and must be {_WORDS[kind]}")
            return default
        if value is default:
            return value
        fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{self.where}: {key!r} must be {_WORDS[kind]}, not {short(value)}")
        if kind in (int, float) and not -LARGEST <= value <= LARGEST:  # infinite, not a number, or beyond any size
            raise CheckpointError(f"{self.where}: {key!r} is beyond what it can be: {short(value)}")
        return float(value) if kind is float else value

    def inner(self, key: str) -> Fields | None:
        """The object under `key`, or None where it is absent or null."""
        value = self.take(key, dict, None)
        return None if value is None else Fields(value, f"{self.where}, {key}")

    def unread(self) -> list[str]:
        return [key for key, value in self.raw.items() if key not in self._asked and value is not None]


def short(value: Any) -> str:
    """A value for a sentence, cut to a length that a sentence bears."""
    text = repr(value)  # which shows a newline or an escape as what it is
    return text if len(text) <= 60 else text[:57] + "…"


# Keys that change nothing of what a text-generating pass computes: bookkeeping, training, and ids that `checkpoint.py` reads.
HARMLESS = frozenset(
    # what it is called, and by whom
    "model_type architectures auto_map transformers_version torch_dtype dtype _name_or_path transformers.js_config "
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id "
    "use_cache attention_dropout attn_pdrop resid_pdrop embd_pdrop hidden_dropout dropout activation_dropout layerdrop "
    "classifier_dropout attention_probs_dropout_prob initializer_range init_std pretraining_tp cache_implementation "
    "is_llama_config return_dict output_attentions output_hidden_states return_dict_in_generate output_scores torchscript "
    "use_bfloat16 chunk_size_feed_forward pruned_heads prefix tokenizer_class task_specific_params problem_type "
    "finetuning_task id2label label2id num_labels tf_legacy_loss cross_attention_hidden_size add_cross_attention "
    "tie_encoder_decoder is_decoder gradient_checkpointing remove_invalid_values exponential_decay_length_penalty "
    "suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id bad_words_ids max_length min_length "
    "do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences "
    "_attn_implementation attn_implementation _attn_implementation_autoset is_local local_files_only "
    # of old files, and of code that is not Hugging Face's
    "_num_labels n_special predict_special_tokens output_past hidden_dropout_prob sliding_window_size max_sequence_length "
    "n_ctx summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout "
    # sizes that some families' code does not read: there the shapes of the tensors say whether they hold
    "num_key_value_heads intermediate_size head_dim "
    "reorder_and_upcast_attn max_window_layers no_rope_layer_interval sliding_window_pattern _sliding_window_pattern".split()
)


# Options that nobody here has, at the values at which they ask for nothing.
NEUTRAL = {
    "mlp_bias": False,
    "lm_head_bias": False,
    "attention_bias": False,
    "qk_layernorm": False,
    "rope_interleaved": False,
    "use_sliding_window": False,
    "use_parallel_residual": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "partial_rotary_factor": 1.0,
    "scale_attn_by_inverse_layer_idx": False,
}


def refuse(keys: Iterable[str], raw: dict[str, Any], where: str) -> None:
    """Raise CheckpointError, naming them, for keys that are not known to be harmless."""
    asked = [f"{short(key)}: {short(raw[key])}" for key in keys if key not in HARMLESS and NEUTRAL.get(key) != raw[key]]
    if asked:
        raise CheckpointError(f"{where} asks for {', '.join(asked)}, which is not known here and could change what is computed")


class Part:
    """Some keys of config.json and the options they stand for."""

    def read(self, fields: Fields) -> dict[str, Any]:
        """Options for ModelConfig."""
        raise AssertionError("a part says how it is read")

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Keys for config.json. What cannot be said in this dialect may come out wrong: `Family.write` reads it again."""
        return {}


@dataclass(frozen=True)
class Key(Part):
    """One key that sets one option, or several alike."""

    ours: str | tuple[str, ...]
    theirs: str
    kind: type
    default: Any = REQUIRED

    def read(self, fields: Fields) -> dict[str, Any]:
        value = fields.take(self.theirs, self.kind, self.default)
        options = (self.ours,) if isinstance(self.ours, str) else self.ours
        return dict.fromkeys(options, value)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {self.theirs: getattr(config, self.ours if isinstance(self.ours, str) else self.ours[0])}


@dataclass(frozen=True)
class Layers(Part):
    """How many blocks there are; a number that no model has is refused before lists of that length are made."""

    theirs: str = "num_hidden_layers"

    def read(self, fields: Fields) -> dict[str, Any]:
        value = fields.take(self.theirs, int)
        if not 1 <= value <= MOST_LAYERS:
            raise CheckpointError(f"{fields.where}: {self.theirs!r} must be from 1 to {MOST_LAYERS}, not {short(value)}")
        return {"n_layers": value}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {self.theirs: config.n_layers}


class Always(Part):
    """Options that this family sets without a key."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def read(self, fields: Fields) -> dict[str, Any]:
        return self.options


@dataclass(frozen=True)
class Only(Part):
    """A key of which we have some values, and which is refused at any other."""

    theirs: str
    kind: type
    values: tuple[Any, ...]  # the first is what absence means and what is written

    def read(self, fields: Fields) -> dict[str, Any]:
        value = fields.take(self.theirs, self.kind, self.values[0])
        if value not in self.values:
            known = " or ".join(_json(known) for known in self.values)
            raise CheckpointError(f"{fields.where} asks for {self.theirs!r} {_json(value)}; here it can be {known}")
        return {}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {self.theirs: self.values[0]}


def _json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else short(value)


@dataclass(frozen=True)
class Activation(Part):
    """The activation function, by its name there. The first name is what absence means."""

    theirs: str
    names: dict[str, str]

    def read(self, fields: Fields) -> dict[str, Any]:
        name = fields.take(self.theirs, str, next(iter(self.names)))
        if name not in self.names:
            raise CheckpointError(f"{fields.where} asks for {self.theirs!r} {name!r}; here it can be {' or '.join(self.names)}")
        return {"activation": self.names[name]}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {self.theirs: next((name for name, ours in self.names.items() if ours == config.activation), None)}


@dataclass(frozen=True)
class Maybe(Part):
    """A key that may be null, which is not the same as absent: then the number of the family's own code holds."""

    ours: str
    theirs: str
    kind: type
    absent: Any = None

    def read(self, fields: Fields) -> dict[str, Any]:
        if self.theirs not in fields.raw:
            return {self.ours: self.absent}
        return {self.ours: fields.take(self.theirs, self.kind, None)}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        value = getattr(config, self.ours)
        return {self.theirs: value[0] if isinstance(value, tuple) else value}


class RootOfDim(Part):
    """Embeddings multiplied by the square root of their width (Gemma)."""

    def read(self, fields: Fields) -> dict[str, Any]:
        return {"embed_scale": fields.take("hidden_size", int) ** 0.5}


@dataclass(frozen=True)
class ScaleOf(Part):
    """Scores multiplied by the inverse square root of a number that stands in the key."""

    theirs: str
    default: int

    def read(self, fields: Fields) -> dict[str, Any]:
        value = fields.take(self.theirs, float, self.default)
        if value <= 0:
            raise CheckpointError(f"{fields.where}: {self.theirs!r} must be above 0, not {value}")
        return {"attn_scale": value**-0.5}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        scale = config.head_dim**-0.5 if config.attn_scale is None else config.attn_scale
        number = round(scale**-2, 6)
        return {self.theirs: int(number) if number == int(number) else number}


@dataclass(frozen=True)
class FourTimes(Part):
    """The feed-forward's width; null or absent is four times the stream's (GPT-2)."""

    theirs: str
    width: str

    def read(self, fields: Fields) -> dict[str, Any]:
        return {"ffn_dim": fields.take(self.theirs, int, None) or 4 * fields.take(self.width, int)}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {self.theirs: config.ffn_dim}


@dataclass(frozen=True)
class SameAs(Part):
    """A key that must say the same as another, or be absent."""

    theirs: str
    other: str
    why: str

    def read(self, fields: Fields) -> dict[str, Any]:
        other = fields.take(self.other, int)
        value = fields.take(self.theirs, int, other)
        if value != other:
            raise CheckpointError(f"{fields.where} has {self.theirs} {value} and {self.other} {other}: {self.why}")
        return {}


# ---- positions


@dataclass(frozen=True)
class Rope(Part):
    """RoPE in both dialects: `rope_theta` beside `rope_scaling` (transformers 4), or all in `rope_parameters` (5).

    What wins over what is as in transformers' `convert_rope_params_to_dict`: `rope_scaling` over `rope_parameters`, and what
    stands inside over the same outside. `fraction` is of a head's features that turn, None where the family has no such option.
    """

    theta: float = 10_000.0
    theta_key: str = "rope_theta"
    fraction: float | None = None
    fraction_key: str = "partial_rotary_factor"
    original: int | None = None  # the family's own original_max_position_embeddings
    spelled: dict[str, str] = field(default_factory=dict)  # other names of kinds

    def read(self, fields: Fields) -> dict[str, Any]:
        blocks = [fields.inner("rope_scaling"), fields.inner("rope_parameters")]
        block = next((block for block in blocks if block is not None and block.raw), Fields({}, fields.where))
        theta = fields.take(self.theta_key, float, self.theta)
        fraction = fields.take(self.fraction_key, float, 1.0 if self.fraction is None else self.fraction)
        return {"rope": self.one(fields, block, theta, fraction)}

    def one(self, fields: Fields, block: Fields, theta: float, fraction: float = 1.0) -> RopeConfig:
        """The object `block` as a RopeConfig; theta and fraction are what holds where it says nothing."""
        kind = block.take("rope_type", str, None) or block.take("type", str, "default")
        kind = self.spelled.get(kind, kind)
        block.take("type", str, None)  # some files have both spellings
        options: dict[str, Any] = {"kind": kind, "theta": block.take("rope_theta", float, theta)}
        options["fraction"] = block.take("partial_rotary_factor", float, fraction)
        if self.fraction is None and options["fraction"] != 1.0:
            raise CheckpointError(f"{block.where} asks for 'partial_rotary_factor', which this family does not have")
        context = fields.take("max_position_embeddings", int, None)
        outside = fields.take("original_max_position_embeddings", int, self.original)
        try:
            if kind in _STRETCHES:
                options |= _STRETCHES[kind](block, context, outside)
            rope = RopeConfig(**options)
        except (ValueError, ArithmeticError) as error:
            raise CheckpointError(f"{block.where}: {error}") from None
        unread = [key for key in block.unread() if key not in _OF_STRETCHES]  # what other kinds use, this one does not
        refuse(unread, block.raw, f"{block.where} (rope_type {kind!r})")
        return rope

    def write(self, config: ModelConfig) -> dict[str, Any]:
        rope = next((rope for rope in config.rope if rope is not None), None)
        written = {} if rope is None else {"rope_parameters": self.say(rope)}
        if self.original is not None and rope is not None and rope.original_max_seq_len is not None:
            written["original_max_position_embeddings"] = rope.original_max_seq_len
        return written

    def say(self, rope: RopeConfig) -> dict[str, Any]:
        """A RopeConfig as the object that `one` reads."""
        written: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
        if self.fraction is not None:
            written["partial_rotary_factor"] = rope.fraction
        if rope.kind in ("linear", "dynamic", "llama3", "yarn"):
            written["factor"] = rope.factor
        if rope.kind in ("llama3", "yarn", "longrope"):
            written["original_max_position_embeddings"] = rope.original_max_seq_len
        if rope.kind == "llama3":
            written |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        if rope.kind in ("yarn", "longrope"):
            written["attention_factor"] = rope.attention_factor
        if rope.kind == "yarn":
            written |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        if rope.kind == "longrope":
            written |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
        return written


def _linear(block: Fields, context: int | None, original: int | None) -> dict[str, Any]:
    return {"factor": block.take("factor", float)}


def _dynamic(block: Fields, context: int | None, original: int | None) -> dict[str, Any]:
    return {"factor": block.take("factor", float), "original_max_seq_len": context}


def _llama3(block: Fields, context: int | None, original: int | None) -> dict[str, Any]:
    return {
        "factor": block.take("factor", float),
        "low_freq_factor": block.take("low_freq_factor", float),
        "high_freq_factor": block.take("high_freq_factor", float),
        "original_max_seq_len": _original(block, context, original),
    }


def _yarn(block: Fields, context: int | None, original: int | None) -> dict[str, Any]:
    """Where no attention_factor is given it follows from the factor, as the paper has it: 0.1 ln(factor) + 1."""
    original = _original(block, context, original)
    factor = block.take("factor", float, None) or context / original
    mscale, mscale_all_dim = block.take("mscale", float, None), block.take("mscale_all_dim", float, None)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention = magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1)
    given = block.take("attention_factor", float, None)
    return {
        "factor": factor,
        "original_max_seq_len": original,
        "attention_factor": attention if given is None else given,
        "beta_fast": block.take("beta_fast", float, None) or 32.0,
        "beta_slow": block.take("beta_slow", float, None) or 1.0,
        "truncate": block.take("truncate", bool, True),
    }


def _longrope(block: Fields, context: int | None, original: int | None) -> dict[str, Any]:
    original = _original(block, context, original)
    factor = block.take("factor", float, None) or context / original
    given = block.take("attention_factor", float, None)
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "original_max_seq_len": original,
        "attention_factor": attention if given is None else given,
        "short_factors": _numbers(block, "short_factor"),
        "long_factors": _numbers(block, "long_factor"),
    }


def _original(block: Fields, context: int | None, outside: int | None) -> int | None:
    """The context before stretching: as stated beside the object, else inside it, else the whole context."""
    within = block.take("original_max_position_embeddings", int, None)
    original = outside or within or context
    if not original or original < 2 or not context:
        raise ValueError("max_position_embeddings and original_max_position_embeddings must be above 1")
    return original


def _numbers(block: Fields, key: str) -> tuple[float, ...]:
    values = block.take(key, list)
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 for value in values):
        raise CheckpointError(f"{block.where}: {key!r} must be a list of numbers above 0")
    return tuple(float(value) for value in values)


_OF_STRETCHES = {
    "finetuned",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
}
_STRETCHES = {"linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}


class RopeInSomeLayers(Rope):
    """Layers without RoPE: `no_rope_layers` holds 1 for a layer that has it, or every `no_rope_layer_interval`-th has none."""

    def read(self, fields: Fields) -> dict[str, Any]:
        rope = super().read(fields)["rope"]
        return {"rope": tuple(rope if has else None for has in self.has_rope(fields))}

    @staticmethod
    def has_rope(fields: Fields) -> list[bool]:
        """Layer by layer."""
        n_layers = Layers().read(fields)["n_layers"]
        interval = fields.take("no_rope_layer_interval", int, 4)
        listed = fields.take("no_rope_layers", list, None)
        if listed is None:
            return [interval < 1 or (i + 1) % interval != 0 for i in range(n_layers)]
        if len(listed) != n_layers or not all(value in (0, 1) for value in listed):
            raise CheckpointError(f"{fields.where}: no_rope_layers must hold {n_layers} numbers, 0 or 1")
        return [bool(value) for value in listed]

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {**super().write(config), "no_rope_layers": [int(rope is not None) for rope in config.rope]}


# ---- our own dialect


class Own(Part):
    """Every option of ModelConfig under its own name: for models that no one else's config.json can say."""

    def read(self, fields: Fields) -> dict[str, Any]:
        options = Layers("n_layers").read(fields) | _plain(ModelConfig, fields)
        ropes = fields.take("rope", list)
        windows = fields.take("windows", list)
        try:
            inner = [rope and Fields(rope, f"{fields.where}, rope") for rope in ropes]
            options["rope"] = tuple(
                rope and RopeConfig(**_plain(RopeConfig, rope), **{key: _numbers(rope, key) for key in FACTORS})
                for rope in inner
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{fields.where}: 'rope' cannot be read ({error})") from None
        if not all(window is None or type(window) is int for window in windows):
            raise CheckpointError(f"{fields.where}: 'windows' must hold whole numbers and nulls, not {short(windows)}")
        return options | {"windows": tuple(windows)}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        options = dataclasses.asdict(config)
        del options["model_type"]
        ropes = [rope and {k: list(v) if isinstance(v, tuple) else v for k, v in rope.items()} for rope in options["rope"]]
        return options | {"rope": ropes, "windows": list(config.windows)}


FACTORS = ("short_factors", "long_factors")


def _plain(of: type, fields: Fields) -> dict[str, Any]:
    """The options of a dataclass that are numbers, words or flags, under their own names."""
    hints, found = typing.get_type_hints(of), {}
    for option in dataclasses.fields(of):
        hint, name = hints[option.name], option.name
        kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind in (int, float, bool, str)]
        if len(kinds) == 1 and name not in ("rope", "windows", "model_type", *FACTORS):
            value = fields.take(name, kinds[0], REQUIRED if option.default is dataclasses.MISSING else None)
            found |= {} if value is None else {name: value}
    return found


# ---- windows


@dataclass(frozen=True)
class WindowsByLayer(Part):
    """`sliding_window` for the layers that `layer_types` names, else for those that the family's own rule says.

    `switch` is a key without which no window is in force; `slides(i, fields)` is the rule; `absent` the family's own window.
    """

    absent: int | None
    slides: Callable[[int, Fields], bool]
    switch: str | None = None

    def read(self, fields: Fields) -> dict[str, Any]:
        in_force = self.switch is None or fields.take(self.switch, bool, False)
        absent = self.absent if "sliding_window" not in fields.raw else None
        window = fields.take("sliding_window", int, absent)
        sliding = self.sliding(fields)
        if fields.raw.get("layer_types") and any(sliding) and not (in_force and window):
            off = self.switch if not in_force else "sliding_window"
            raise CheckpointError(f"{fields.where}: layer_types names layers that slide, but {off} switches windows off")
        return {"windows": tuple(window if in_force and slides else None for slides in sliding)}

    def sliding(self, fields: Fields) -> list[bool]:
        """Layer by layer, whether it is one that slides."""
        n_layers = Layers().read(fields)["n_layers"]
        by_rule = [self.slides(i, fields) for i in range(n_layers)]
        types = fields.take("layer_types", list, None)
        if types is None:
            return by_rule
        strange = [kind for kind in types if kind not in ("sliding_attention", "full_attention")]
        if strange:
            raise CheckpointError(
                f"{fields.where}: layer_types asks for {short(strange[0])}; here a layer can be "
                "'full_attention' or 'sliding_attention'"
            )
        if len(types) != n_layers:
            raise CheckpointError(f"{fields.where}: layer_types has {len(types)} entries for {n_layers} layers")
        return [kind == "sliding_attention" for kind in types]

    def write(self, config: ModelConfig) -> dict[str, Any]:
        window = next((window for window in config.windows if window is not None), None)
        kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
        written = {"sliding_window": window, "layer_types": kinds}
        return written if self.switch is None else {self.switch: window is not None, **written}


def from_a_layer_on(i: int, fields: Fields) -> bool:
    """Layers from index `max_window_layers` on slide (Qwen)."""
    return i >= fields.take("max_window_layers", int, 28)


def every_other(i: int, fields: Fields) -> bool:
    """Layers 0, 2, 4, … slide (Gemma 2)."""
    return i % 2 == 0


def where_no_rope_is(i: int, fields: Fields) -> bool:
    """Layers without RoPE slide (SmolLM3)."""
    return not RopeInSomeLayers.has_rope(fields)[i]


def all_but_every_nth(i: int, fields: Fields) -> bool:
    """All slide but every `sliding_window_pattern`-th (Gemma 3)."""
    pattern = fields.take("sliding_window_pattern", int, 6)
    return pattern < 1 or (i + 1) % pattern != 0


@dataclass(frozen=True)
class RopeByLayer(Rope):
    """Two kinds of RoPE, for layers that slide and for those that do not (Gemma 3).

    transformers 4: `rope_theta` and `rope_scaling` for full layers, `rope_local_base_freq` for sliding ones; 5: both under
    `rope_parameters`.
    """

    local_theta: float = 10_000.0
    windows: WindowsByLayer | None = None

    def read(self, fields: Fields) -> dict[str, Any]:
        both = fields.inner("rope_parameters") or Fields({}, fields.where)
        old = fields.inner("rope_scaling") or Fields({}, fields.where)
        full = both.inner("full_attention")
        local = both.inner("sliding_attention") or Fields({}, fields.where)
        theta = fields.take("rope_theta", float, self.theta)
        local_theta = fields.take("rope_local_base_freq", float, self.local_theta)
        if full is None or old.raw:  # `rope_scaling` is laid over what the new dialect says
            full = Fields({**(full.raw if full is not None else {}), **old.raw}, old.where)
        refuse(both.unread(), both.raw, both.where)
        far, near = self.one(fields, full, theta), self.one(fields, local, local_theta)
        return {"rope": tuple(near if slides else far for slides in self.windows.sliding(fields))}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        kinds = {window is not None: rope for rope, window in zip(config.rope, config.windows, strict=True)}
        said = {"full_attention": kinds.get(False), "sliding_attention": kinds.get(True)}
        default = RopeConfig()
        return {"rope_parameters": {kind: self.say(rope or default) for kind, rope in said.items()}}


# ------------------------------------------------------------------------------------------------------------ tensors


@dataclass(frozen=True)
class Layout:
    """How one or several of our parameters lie in one of their tensors. Both ways take our query heads' number.

    split(tensor, rows, n_heads): theirs -> ours, of so many rows each; join(parts, n_heads): ours -> theirs.
    """

    split: Callable[[Tensor, Sequence[int], int], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor], int], Tensor]


def _turn(tensor: Tensor) -> Tensor:
    """[in, out] <-> [out, in]; a bias has no such thing."""
    return tensor.T if tensor.dim() == 2 else tensor


def _split_heads(tensor: Tensor, rows: Sequence[int], n_heads: int) -> list[Tensor]:
    by_head = tensor.unflatten(0, (n_heads, len(rows), -1))  # (H, 3, D, …): head by head its query, key and value rows
    return [by_head[:, part].flatten(0, 1) for part in range(len(rows))]


def _join_heads(parts: Sequence[Tensor], n_heads: int) -> Tensor:
    return torch.stack([part.unflatten(0, (n_heads, -1)) for part in parts], 1).flatten(0, 2)


PLAIN = Layout(lambda tensor, rows, n_heads: [tensor], lambda parts, n_heads: parts[0])
STACKED = Layout(lambda tensor, rows, n_heads: tensor.split(list(rows)), lambda parts, n_heads: torch.cat(list(parts)))
TRANSPOSED = Layout(  # GPT-2's Conv1D, stacked or not
    lambda tensor, rows, n_heads: [_turn(part) for part in tensor.split(list(rows), dim=-1)],
    lambda parts, n_heads: torch.cat([_turn(part) for part in parts], dim=-1),
)
BY_HEAD = Layout(_split_heads, _join_heads)


@dataclass(frozen=True)
class Name:
    """Our parameters below these names lie, in this layout, below that one. One `N` stands for the layer's number."""

    ours: str | tuple[str, ...]
    theirs: str
    layout: Layout = PLAIN


@dataclass(frozen=True)
class Stored:
    """One of their tensors: which of our parameters it holds, and how."""

    parameters: tuple[str, ...]
    layout: Layout
