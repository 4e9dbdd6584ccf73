"""One entry per Hugging Face `model_type`: what it reads from config.json, and how its tensors are named there.

An entry is made of parts. A part reads some keys into `ModelConfig` options and can write them back; a key that no part reads
is refused by name, unless it is listed here as harmless. A new family is one entry at the end of this file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .config import ModelConfig, RopeConfig


class CheckpointError(Exception):
    """A checkpoint that cannot be used, in one sentence: what was found, what would do, what to do next."""


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
            raise CheckpointError(f"{self.where}: {key!r} must be {_WORDS[kind]}, not {_short(value)}")
        return value

    def inner(self, key: str) -> Fields | None:
        """The object under `key`, or None where it is absent or null."""
        value = self.take(key, dict, None)
        return None if value is None else Fields(value, f"{self.where}, {key}")

    def unread(self) -> list[str]:
        return [key for key, value in self.raw.items() if key not in self._asked and value is not None]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


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
class HeadDim(Part):
    """`head_dim`: null means hidden size over heads; absent means the same, or the number of the family's own code."""

    absent: int | None = None

    def read(self, fields: Fields) -> dict[str, Any]:
        if "head_dim" not in fields.raw:
            return {"head_dim": self.absent}
        return {"head_dim": fields.take("head_dim", int, None)}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {"head_dim": config.head_dim}


@dataclass(frozen=True)
class Always(Part):
    """An option that this family sets without a key."""

    option: str
    value: Any

    def read(self, fields: Fields) -> dict[str, Any]:
        return {self.option: self.value}


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
    return str(value).lower() if isinstance(value, bool) else _short(value)


class Rope(Part):
    """RoPE in both dialects: `rope_theta` beside `rope_scaling` (transformers 4), or all in `rope_parameters` (5).

    What wins over what is as in transformers' `convert_rope_params_to_dict`: `rope_scaling` over `rope_parameters`, and a theta
    inside over one outside.
    """

    def read(self, fields: Fields) -> dict[str, Any]:
        theta = fields.take("rope_theta", float, 10_000.0)
        context = fields.take("max_position_embeddings", int, None)
        original = fields.take("original_max_position_embeddings", int, None)
        inside = [fields.inner("rope_scaling"), fields.inner("rope_parameters")]
        scaling = next((block for block in inside if block is not None and block.raw), Fields({}, fields.where))

        kind = scaling.take("rope_type", str, None) or scaling.take("type", str, "default")
        scaling.take("type", str, None)  # some files have both spellings
        options: dict[str, Any] = {"kind": kind, "theta": scaling.take("rope_theta", float, theta)}
        if kind in ("linear", "llama3"):
            options["factor"] = scaling.take("factor", float)
        if kind == "llama3":
            options["low_freq_factor"] = scaling.take("low_freq_factor", float)
            options["high_freq_factor"] = scaling.take("high_freq_factor", float)
            within = scaling.take("original_max_position_embeddings", int, None)
            options["original_max_seq_len"] = original or within or context
        if scaling.take("partial_rotary_factor", float, 1.0) != 1.0:
            raise CheckpointError(f"{scaling.where} asks for 'partial_rotary_factor', which is not supported")
        try:
            rope = RopeConfig(**options)
        except ValueError as error:
            raise CheckpointError(f"{scaling.where}: {error}") from None
        _refuse(scaling.unread(), scaling.raw, f"{scaling.where} (rope_type {kind!r})")
        return {"rope": rope}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        rope = config.rope[0]
        written: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
        if rope.kind != "default":
            written["factor"] = rope.factor
        if rope.kind == "llama3":
            written["low_freq_factor"] = rope.low_freq_factor
            written["high_freq_factor"] = rope.high_freq_factor
            written["original_max_position_embeddings"] = rope.original_max_seq_len
        return {"rope_parameters": written}


@dataclass(frozen=True)
class OneWindow(Part):
    """`sliding_window` for every layer, null for none (Mistral). `absent` is the number of the family's own code."""

    absent: int

    def read(self, fields: Fields) -> dict[str, Any]:
        if "sliding_window" not in fields.raw:
            return {"windows": self.absent}
        return {"windows": fields.take("sliding_window", int, None)}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": config.windows[0]}


class WindowsByLayer(Part):
    """`sliding_window`, in force only with `use_sliding_window`, for the layers that `layer_types` names (Qwen).

    Without the list, layers from index `max_window_layers` on slide.
    """

    def read(self, fields: Fields) -> dict[str, Any]:
        in_force = fields.take("use_sliding_window", bool, False)
        window = fields.take("sliding_window", int, 4096 if "sliding_window" not in fields.raw else None)
        first = fields.take("max_window_layers", int, 28)
        n_layers = fields.take("num_hidden_layers", int)
        types = fields.take("layer_types", list, None)
        if types is None:
            types = ["sliding_attention" if in_force and i >= first else "full_attention" for i in range(n_layers)]
        strange = [kind for kind in types if kind not in ("sliding_attention", "full_attention")]
        if strange:
            raise CheckpointError(
                f"{fields.where}: layer_types asks for {_short(strange[0])}; here a layer can be "
                "'full_attention' or 'sliding_attention'"
            )
        if len(types) != n_layers:
            raise CheckpointError(f"{fields.where}: layer_types has {len(types)} entries for {n_layers} layers")
        # transformers drops the window when `use_sliding_window` is false, whatever layer_types says
        return {"windows": tuple(window if in_force and kind == "sliding_attention" else None for kind in types)}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        window = next((window for window in config.windows if window is not None), None)
        kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
        return {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds}


SIZES = (
    Key("vocab_size", "vocab_size", int),
    Key("dim", "hidden_size", int),
    Key("n_layers", "num_hidden_layers", int),
    Key("n_heads", "num_attention_heads", int),
    Key("n_kv_heads", "num_key_value_heads", int, default=None),
    Key("ffn_dim", "intermediate_size", int),
    Key("norm_eps", "rms_norm_eps", float, default=1e-6),
    Key("tied_head", "tie_word_embeddings", bool, default=False),
    Only("hidden_act", str, ("silu", "swish")),
    Rope(),
)

# Keys that change nothing of what a text-generating pass computes: bookkeeping, training, and ids that `checkpoint.py` reads.
HARMLESS = frozenset(
    "model_type architectures auto_map transformers_version torch_dtype dtype _name_or_path transformers.js_config "
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id "
    "use_cache attention_dropout attn_pdrop resid_pdrop embd_pdrop hidden_dropout initializer_range pretraining_tp "
    "is_llama_config return_dict output_attentions output_hidden_states return_dict_in_generate output_scores torchscript "
    "use_bfloat16 chunk_size_feed_forward pruned_heads prefix tokenizer_class task_specific_params problem_type "
    "finetuning_task id2label label2id num_labels tf_legacy_loss cross_attention_hidden_size add_cross_attention "
    "tie_encoder_decoder is_decoder gradient_checkpointing remove_invalid_values exponential_decay_length_penalty "
    "suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id bad_words_ids max_length min_length "
    "do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences "
    "_attn_implementation attn_implementation _attn_implementation_autoset is_local local_files_only".split()
)


def _refuse(keys: Iterable[str], raw: dict[str, Any], where: str) -> None:
    asked = [f"{key!r}: {_short(raw[key])}" for key in keys if key not in HARMLESS]
    if asked:
        raise CheckpointError(
            f"{where} asks for {', '.join(asked)}, which is not supported and would change what the model computes"
        )


@dataclass(frozen=True)
class Family:
    """One `model_type`. `parts` read its config.json; `names` turns our parameters' names into theirs, the first match winning.

    A name may hold one `N`, which stands for the layer's number on both sides.
    """

    model_type: str
    architecture: str
    parts: tuple[Part, ...]
    names: tuple[tuple[str, str], ...]

    def read(self, raw: dict[str, Any], where: str) -> ModelConfig:
        """config.json's content -> ModelConfig. Raises CheckpointError, naming the key, for what we do not have."""
        fields = Fields(raw, where)
        fields.take("is_encoder_decoder", bool, False)
        options: dict[str, Any] = {}
        for part in self.parts:
            options |= part.read(fields)
        _refuse(fields.unread(), raw, where)
        try:
            return ModelConfig(**options, model_type=self.model_type)
        except ValueError as error:
            raise CheckpointError(f"{where}: {error}") from None

    def write(self, config: ModelConfig) -> dict[str, Any] | None:
        """ModelConfig -> config.json's content, or None where this dialect cannot say all of it."""
        raw: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.architecture]}
        for part in self.parts:
            raw |= part.write(config)
        try:
            return raw if self.read(raw, "config.json") == config else None
        except CheckpointError:
            return None

    def tensor_name(self, parameter: str) -> str:
        """Our parameter's name -> the tensor's name in the file."""
        words = parameter.split(".")
        layer = words[1] if words[0] == "blocks" else ""
        general = parameter.replace(f"blocks.{layer}.", "blocks.N.", 1)
        for ours, theirs in self.names:
            if general.startswith(ours + "."):
                return (theirs + general[len(ours) :]).replace(".N.", f".{layer}.", 1)
        raise AssertionError(f"{self.model_type} has no name for the parameter {parameter}")


LLAMA_NAMES = (
    ("embed", "model.embed_tokens"),
    ("blocks.N.attn_norm", "model.layers.N.input_layernorm"),
    ("blocks.N.attn", "model.layers.N.self_attn"),
    ("blocks.N.ffn_norm", "model.layers.N.post_attention_layernorm"),
    ("blocks.N.ffn", "model.layers.N.mlp"),
    ("norm", "model.norm"),
    ("lm_head", "lm_head"),
)

FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",  # Llama 2, 3, 3.1, 3.2, SmolLM2, TinyLlama
            architecture="LlamaForCausalLM",
            parts=(
                *SIZES,
                HeadDim(),
                Key("max_seq_len", "max_position_embeddings", int, default=2048),
                Key(("qkv_bias", "o_bias"), "attention_bias", bool, default=False),
                Key("ffn_bias", "mlp_bias", bool, default=False),
                Only("rope_interleaved", bool, (False,)),
            ),
            names=LLAMA_NAMES,
        ),
        Family(
            model_type="mistral",
            architecture="MistralForCausalLM",
            parts=(
                *SIZES,
                HeadDim(),
                Key("max_seq_len", "max_position_embeddings", int, default=131_072),
                OneWindow(absent=4096),
            ),
            names=LLAMA_NAMES,
        ),
        Family(
            model_type="qwen2",  # and Qwen 2.5
            architecture="Qwen2ForCausalLM",
            parts=(
                *SIZES,
                HeadDim(),
                Key("max_seq_len", "max_position_embeddings", int, default=32_768),
                Always("qkv_bias", True),
                WindowsByLayer(),
                Only("use_mrope", bool, (False,)),
            ),
            names=LLAMA_NAMES,
        ),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            parts=(
                *SIZES,
                HeadDim(absent=128),
                Key("max_seq_len", "max_position_embeddings", int, default=32_768),
                Always("qk_norm", True),
                Key(("qkv_bias", "o_bias"), "attention_bias", bool, default=False),
                WindowsByLayer(),
            ),
            names=LLAMA_NAMES,
        ),
    )
}

# Refused as what they are, since no option would make a decoder of them.
ENCODERS = {"bert", "roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "xlm-roberta", "modernbert", "mpnet"}
ENCODER_DECODERS = {"t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "whisper", "blenderbot", "led"}


def find_family(raw: dict[str, Any], where: str) -> Family:
    """The entry for this config.json. Raises CheckpointError for what is not a decoder, or not one of ours."""
    fields = Fields(raw, where)
    known = ", ".join(FAMILIES)
    model_type = fields.take("model_type", str, None)
    if model_type is None:
        raise CheckpointError(f"{where} has no 'model_type'; these can be loaded: {known}")
    if model_type in ENCODERS:
        raise CheckpointError(
            f"{where} is a {model_type}, an encoder: it reads in both directions and cannot generate; "
            f"these decoders can be loaded: {known}"
        )
    if model_type in ENCODER_DECODERS or fields.take("is_encoder_decoder", bool, False):
        raise CheckpointError(
            f"{where} is a {model_type}, an encoder-decoder, and this is a decoder only; these can be loaded: {known}"
        )
    if model_type not in FAMILIES:
        raise CheckpointError(f"{where} has model_type {model_type!r}, which is not supported; these can be loaded: {known}")
    return FAMILIES[model_type]


def write_config(config: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """The config.json for a model: in the dialect it came from, else in the first that can say all of it.

    Raises CheckpointError when none can.
    """
    preferred = FAMILIES.get(config.model_type)
    order: list[Family] = ([preferred] if preferred else []) + list(FAMILIES.values())
    for family in order:
        raw = family.write(config)
        if raw is not None:
            return family, raw
    raise CheckpointError(f"no family of Hugging Face's can say all of this model: {config}")
