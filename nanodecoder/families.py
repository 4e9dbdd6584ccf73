"""One entry per Hugging Face `model_type`: what it reads from config.json, and how its tensors are named and laid out there.

The entries are at the end of this file. A new family is one more; docs/families.md adds one step by step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .config import ModelConfig
from .parts import (
    BY_HEAD,
    HARMLESS,
    NEUTRAL,
    STACKED,
    TRANSPOSED,
    Activation,
    Always,
    CheckpointError,
    Fields,
    FourTimes,
    Key,
    Layers,
    Layout,
    Maybe,
    Name,
    Only,
    Own,
    Part,
    RootOfDim,
    Rope,
    RopeByLayer,
    RopeInSomeLayers,
    SameAs,
    ScaleOf,
    Stored,
    WindowsByLayer,
    all_but_every_nth,
    every_other,
    from_a_layer_on,
    refuse,
    short,
    where_no_rope_is,
)


@dataclass(frozen=True)
class Family:
    """One `model_type`: `parts` read its config.json, `names` say how its tensors are named and laid out, first match first.

    `prefix` starts the names of all but the head and may be missing in a file. `skip` are patterns of tensors that say nothing
    which config.json does not say. `tokenizer` is what tokenizer_config.json says where there is none.
    """

    model_type: str
    architecture: str
    parts: tuple[Part, ...]
    names: tuple[Name, ...]
    prefix: str = "model."
    skip: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    bos_id: int | None = None  # where config.json has no such key
    eos_id: int | None = None

    def read(self, raw: dict[str, Any], where: str) -> ModelConfig:
        """config.json's content -> ModelConfig. Raises CheckpointError, naming the key, for what we do not have."""
        fields = Fields(raw, where)
        fields.take("is_encoder_decoder", bool, False)
        options: dict[str, Any] = {}
        for part in self.parts:
            options |= part.read(fields)
        refuse(fields.unread(), raw, where)
        try:
            return ModelConfig(**options, model_type=self.model_type)
        except ValueError as error:
            raise CheckpointError(f"{where}: {error}") from None

    def unknown_keys(self, raw: dict[str, Any]) -> list[str]:
        """The keys of a config.json of another model_type that no part here reads and that are not known to be harmless."""
        fields = Fields(raw, "")
        for part in self.parts:
            with suppress(CheckpointError):
                part.read(fields)
        return [short(key) for key in fields.unread() if key not in HARMLESS and NEUTRAL.get(key) != raw[key]]

    def guess(self, raw: dict[str, Any]) -> ModelConfig:
        """What a config.json of another model_type would mean here, as far as it can be read; small sizes for the rest."""
        config = ModelConfig(vocab_size=2, dim=2, n_layers=1, n_heads=1)
        options: dict[str, Any] = {"vocab_size": 2, "dim": 2, "n_layers": 1, "n_heads": 1}
        # What is always so first: it decides which tensors there are
        for part in sorted(self.parts, key=lambda part: not isinstance(part, Always)):
            try:
                more = options | part.read(Fields(raw, ""))
                config, options = ModelConfig(**more), more
            except (CheckpointError, ValueError, TypeError):
                continue  # this key says something else there
        return config

    def write(self, config: ModelConfig) -> dict[str, Any] | None:
        """ModelConfig -> config.json's content, or None where this dialect cannot say all of it."""
        raw: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.architecture]}
        for part in self.parts:
            raw |= part.write(config)
        try:
            return raw if self.read(raw, "config.json") == config else None
        except CheckpointError:
            return None

    def stored(self, parameters: Iterable[str]) -> dict[str, Stored]:
        """Our parameters' names -> their tensors, by name, each with the parameters that it holds."""
        found: dict[str, list[str | None]] = {}
        layouts: dict[str, Layout] = {}
        for parameter in parameters:
            name, part, theirs = self._find(parameter)
            count = 1 if isinstance(name.ours, str) else len(name.ours)
            found.setdefault(theirs, [None] * count)[part] = parameter
            layouts[theirs] = name.layout
        return {theirs: Stored(tuple(ours), layouts[theirs]) for theirs, ours in found.items()}

    def tensor_name(self, parameter: str) -> str:
        """The name of the tensor that holds our parameter."""
        return self._find(parameter)[2]

    def is_harmless(self, tensor: str) -> bool:
        """Whether a tensor of this name may be left unread."""
        return any(re.search(pattern, tensor) for pattern in self.skip)

    def _find(self, parameter: str) -> tuple[Name, int, str]:
        words = parameter.split(".")
        layer = words[1] if words[0] == "blocks" else ""
        general = parameter.replace(f"blocks.{layer}.", "blocks.N.", 1)
        for name in self.names:
            for part, ours in enumerate((name.ours,) if isinstance(name.ours, str) else name.ours):
                if general.startswith(ours + "."):
                    return name, part, (name.theirs + general[len(ours) :]).replace(".N.", f".{layer}.", 1)
        raise AssertionError(f"{self.model_type} has no name for the parameter {parameter}")


# ------------------------------------------------------------------------------------------------------- the families

SIZES = (
    Key("vocab_size", "vocab_size", int),
    Key("dim", "hidden_size", int),
    Layers("num_hidden_layers"),
    Key("n_heads", "num_attention_heads", int),
    Key("ffn_dim", "intermediate_size", int),
)

LLAMA_NAMES = (
    Name("embed", "model.embed_tokens"),
    Name("blocks.N.attn_norm", "model.layers.N.input_layernorm"),
    Name("blocks.N.attn", "model.layers.N.self_attn"),
    Name("blocks.N.ffn_norm", "model.layers.N.post_attention_layernorm"),
    Name("blocks.N.ffn", "model.layers.N.mlp"),
    Name("norm", "model.norm"),
    Name("lm_head", "lm_head"),
)
# Norms after each half: Gemma 2 and 3 have them besides those before, OLMo 2 instead
SANDWICH_NAMES = (
    Name("blocks.N.attn_post_norm", "model.layers.N.post_attention_layernorm"),
    Name("blocks.N.ffn_norm", "model.layers.N.pre_feedforward_layernorm"),
    Name("blocks.N.ffn_post_norm", "model.layers.N.post_feedforward_layernorm"),
    *LLAMA_NAMES,
)
QKV = ("blocks.N.attn.q_proj", "blocks.N.attn.k_proj", "blocks.N.attn.v_proj")

HEAD_DIM = Maybe("head_dim", "head_dim", int)
SILU = Activation("hidden_act", {"silu": "silu", "swish": "silu"})
GELUS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}
BIASES = Key(("qkv_bias", "o_bias"), "attention_bias", bool, default=False)
NO_BIASES = Only("attention_bias", bool, (False,))
ONE_WAY = Only("use_bidirectional_attention", bool, (False,))


def _context(absent: int, key: str = "max_position_embeddings") -> Key:
    return Key("max_seq_len", key, int, default=absent)


def _tied(absent: bool) -> Key:
    return Key("tied_head", "tie_word_embeddings", bool, default=absent)


def _eps(key: str, absent: float) -> Key:
    return Key("norm_eps", key, float, default=absent)


def _kv_heads(absent: int | None) -> Maybe:
    return Maybe("n_kv_heads", "num_key_value_heads", int, absent)


GEMMA = (
    *SIZES,
    Maybe("head_dim", "head_dim", int, absent=256),
    _eps("rms_norm_eps", 1e-6),
    _tied(True),
    BIASES,
    ONE_WAY,
    RootOfDim(),
    Always(norm_offset=1.0),
)
GEMMA_CAPS = (
    ScaleOf("query_pre_attn_scalar", 256),
    Activation("hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"}),
    Always(post_norm=True),
)
GEMMA3_WINDOWS = WindowsByLayer(4096, all_but_every_nth)
LAYER_NORM = Always(norm="layer", gated=False)

OWN = "nanodecoder"

ENTRIES = (
    Family(
        "llama",  # Llama 2, 3, 3.1, 3.2, SmolLM2, TinyLlama
        "LlamaForCausalLM",
        parts=(
            *SIZES,
            _kv_heads(None),
            HEAD_DIM,
            _context(2048),
            _eps("rms_norm_eps", 1e-6),
            _tied(False),
            SILU,
            Rope(),
            BIASES,
            Key("ffn_bias", "mlp_bias", bool, default=False),
            Only("rope_interleaved", bool, (False,)),
        ),
        names=LLAMA_NAMES,
        bos_id=1,
        eos_id=2,
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        parts=(
            *SIZES,
            _kv_heads(8),
            HEAD_DIM,
            _context(131_072),
            _eps("rms_norm_eps", 1e-6),
            _tied(False),
            SILU,
            Rope(),
            Maybe("windows", "sliding_window", int, absent=4096),
            NO_BIASES,
        ),
        names=LLAMA_NAMES,
        bos_id=1,
        eos_id=2,
    ),
    Family(
        "qwen2",  # and Qwen 2.5
        "Qwen2ForCausalLM",
        parts=(
            *SIZES,
            _kv_heads(32),
            HEAD_DIM,
            _context(32_768),
            _eps("rms_norm_eps", 1e-6),
            _tied(False),
            SILU,
            Rope(),
            Always(qkv_bias=True),
            WindowsByLayer(4096, from_a_layer_on, switch="use_sliding_window"),
            Only("use_mrope", bool, (False,)),
            Only("attention_bias", bool, (True, False)),  # the biases are there whatever it says
        ),
        names=LLAMA_NAMES,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        parts=(
            *SIZES,
            _kv_heads(32),
            Maybe("head_dim", "head_dim", int, absent=128),
            _context(32_768),
            _eps("rms_norm_eps", 1e-6),
            _tied(False),
            SILU,
            Rope(),
            Always(qk_norm="head"),
            BIASES,
            WindowsByLayer(4096, from_a_layer_on, switch="use_sliding_window"),
        ),
        names=LLAMA_NAMES,
    ),
    Family(
        "phi3",  # Phi-3, Phi-3.5, Phi-4 (mini too)
        "Phi3ForCausalLM",
        parts=(
            *SIZES,
            _kv_heads(None),
            HEAD_DIM,
            _context(4096),
            _eps("rms_norm_eps", 1e-5),
            _tied(False),
            SILU,
            Rope(fraction=1.0, original=4096, spelled={"su": "longrope", "yarn": "longrope"}),
            Maybe("windows", "sliding_window", int),
            NO_BIASES,
        ),
        names=(
            Name(QKV, "model.layers.N.self_attn.qkv_proj", STACKED),
            Name(("blocks.N.ffn.gate_proj", "blocks.N.ffn.up_proj"), "model.layers.N.mlp.gate_up_proj", STACKED),
            *LLAMA_NAMES,
        ),
        bos_id=1,
        eos_id=32000,
    ),
    Family(
        "gemma",
        "GemmaForCausalLM",
        parts=(
            *GEMMA,
            _kv_heads(16),
            _context(8192),
            Rope(),
            # "gelu" too means the tanh kind: the first releases were labelled wrongly
            Activation("hidden_act", {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"}),
            Only("hidden_activation", str, ("gelu_pytorch_tanh",)),
        ),
        names=LLAMA_NAMES,
        bos_id=2,
        eos_id=1,
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        parts=(
            *GEMMA,
            _kv_heads(4),
            *GEMMA_CAPS,
            _context(8192),
            Rope(),
            Maybe("attn_softcap", "attn_logit_softcapping", float, absent=50.0),
            Maybe("final_softcap", "final_logit_softcapping", float, absent=30.0),
            WindowsByLayer(4096, every_other),
            Only("hidden_act", str, ("gelu_pytorch_tanh",)),
        ),
        names=SANDWICH_NAMES,
        bos_id=2,
        eos_id=1,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        parts=(
            *GEMMA,
            _kv_heads(4),
            *GEMMA_CAPS,
            _context(131_072),
            RopeByLayer(theta=1e6, windows=GEMMA3_WINDOWS),
            GEMMA3_WINDOWS,
            Only("attn_logit_softcapping", float, (None,)),  # transformers has the key and does not apply it
            Maybe("final_softcap", "final_logit_softcapping", float),
            Always(qk_norm="head"),
        ),
        names=SANDWICH_NAMES,
        bos_id=2,
        eos_id=1,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        parts=(
            Key("vocab_size", "vocab_size", int),
            Key("dim", "n_embd", int),
            Layers("n_layer"),
            Key("n_heads", "n_head", int),
            FourTimes("n_inner", "n_embd"),
            _context(1024, "n_positions"),
            _eps("layer_norm_epsilon", 1e-5),
            _tied(True),
            Activation("activation_function", GELUS),
            LAYER_NORM,
            Always(rope=None, learned_positions=True, qkv_bias=True, o_bias=True, ffn_bias=True),
            Only("scale_attn_weights", bool, (True,)),
            Only("scale_attn_by_inverse_layer_idx", bool, (False,)),
        ),
        names=(
            Name("embed", "transformer.wte"),
            Name("positions", "transformer.wpe"),
            Name("blocks.N.attn_norm", "transformer.h.N.ln_1"),
            Name(QKV, "transformer.h.N.attn.c_attn", TRANSPOSED),
            Name("blocks.N.attn.o_proj", "transformer.h.N.attn.c_proj", TRANSPOSED),
            Name("blocks.N.ffn_norm", "transformer.h.N.ln_2"),
            Name("blocks.N.ffn.up_proj", "transformer.h.N.mlp.c_fc", TRANSPOSED),
            Name("blocks.N.ffn.down_proj", "transformer.h.N.mlp.c_proj", TRANSPOSED),
            Name("norm", "transformer.ln_f"),
            Name("lm_head", "lm_head"),
        ),
        prefix="transformer.",
        skip=(r"h\.\d+\.attn\.(bias|masked_bias)$",),  # the triangle, and what it was filled with
        tokenizer={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
        bos_id=50256,
        eos_id=50256,
    ),
    Family(
        "opt",  # 125m and its kin; 350m's norms and projections are refused
        "OPTForCausalLM",
        parts=(
            Key("vocab_size", "vocab_size", int),
            Key("dim", "hidden_size", int),
            Layers("num_hidden_layers"),
            Key("n_heads", "num_attention_heads", int),
            Key("ffn_dim", "ffn_dim", int),
            _context(2048),
            _tied(True),
            Activation("activation_function", {"relu": "relu", **GELUS}),
            LAYER_NORM,
            Always(norm_eps=1e-5, rope=None, learned_positions=True, position_offset=2),
            Key(("qkv_bias", "o_bias", "ffn_bias"), "enable_bias", bool, default=True),
            Only("do_layer_norm_before", bool, (True,)),
            Only("_remove_final_layer_norm", bool, (False,)),
            Only("layer_norm_elementwise_affine", bool, (True,)),
            SameAs("word_embed_proj_dim", "hidden_size", "projections around the blocks are not supported"),
        ),
        names=(
            Name("embed", "model.decoder.embed_tokens"),
            Name("positions", "model.decoder.embed_positions"),
            Name("blocks.N.attn_norm", "model.decoder.layers.N.self_attn_layer_norm"),
            Name("blocks.N.attn.o_proj", "model.decoder.layers.N.self_attn.out_proj"),
            Name("blocks.N.attn", "model.decoder.layers.N.self_attn"),
            Name("blocks.N.ffn_norm", "model.decoder.layers.N.final_layer_norm"),
            Name("blocks.N.ffn.up_proj", "model.decoder.layers.N.fc1"),
            Name("blocks.N.ffn.down_proj", "model.decoder.layers.N.fc2"),
            Name("norm", "model.decoder.final_layer_norm"),
            Name("lm_head", "lm_head"),
        ),
        tokenizer={"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "add_bos_token": True},
        bos_id=2,
        eos_id=2,
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        parts=(
            *SIZES,
            _kv_heads(None),
            HEAD_DIM,
            _context(2048),
            _eps("rms_norm_eps", 1e-5),
            _tied(False),
            SILU,
            Rope(),
            BIASES,
            Always(pre_norm=False, post_norm=True, qk_norm="all"),
        ),
        names=SANDWICH_NAMES,
        eos_id=50279,
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        parts=(
            *SIZES,
            _kv_heads(4),
            HEAD_DIM,
            _context(32_768),
            _eps("rms_norm_eps", 1e-6),
            _tied(True),
            SILU,
            RopeInSomeLayers(theta=2e6),
            BIASES,
            Key("ffn_bias", "mlp_bias", bool, default=False),
            WindowsByLayer(None, where_no_rope_is, switch="use_sliding_window"),
        ),
        names=LLAMA_NAMES,
        bos_id=128000,
        eos_id=128001,
    ),
    Family(
        "gpt_neox",  # Pythia
        "GPTNeoXForCausalLM",
        parts=(
            Key("vocab_size", "vocab_size", int),
            Key("dim", "hidden_size", int),
            Layers("num_hidden_layers"),
            Key("n_heads", "num_attention_heads", int),
            Key("ffn_dim", "intermediate_size", int),
            _context(2048),
            _eps("layer_norm_eps", 1e-5),
            _tied(False),
            Activation("hidden_act", {"gelu": "gelu", **GELUS}),
            LAYER_NORM,
            Rope(theta_key="rotary_emb_base", fraction=0.25, fraction_key="rotary_pct"),
            Key(("qkv_bias", "o_bias"), "attention_bias", bool, default=True),
            Always(ffn_bias=True),
            Key("parallel", "use_parallel_residual", bool, default=True),
        ),
        names=(
            Name("embed", "gpt_neox.embed_in"),
            Name("blocks.N.attn_norm", "gpt_neox.layers.N.input_layernorm"),
            Name(QKV, "gpt_neox.layers.N.attention.query_key_value", BY_HEAD),
            Name("blocks.N.attn.o_proj", "gpt_neox.layers.N.attention.dense"),
            Name("blocks.N.ffn_norm", "gpt_neox.layers.N.post_attention_layernorm"),
            Name("blocks.N.ffn.up_proj", "gpt_neox.layers.N.mlp.dense_h_to_4h"),
            Name("blocks.N.ffn.down_proj", "gpt_neox.layers.N.mlp.dense_4h_to_h"),
            Name("norm", "gpt_neox.final_layer_norm"),
            Name("lm_head", "embed_out"),
        ),
        prefix="gpt_neox.",
        skip=(r"rotary_emb\.inv_freq$", r"attention\.(bias|masked_bias)$"),
        bos_id=0,
        eos_id=2,
    ),
    Family(
        "stablelm",
        "StableLmForCausalLM",
        parts=(
            *SIZES,
            _kv_heads(32),
            _context(4096),
            _eps("layer_norm_eps", 1e-5),
            _tied(False),
            SILU,
            Rope(fraction=0.25),
            Always(norm="layer"),
            Key("qkv_bias", "use_qkv_bias", bool, default=False),
            Only("qk_layernorm", bool, (False,)),
            Only("use_parallel_residual", bool, (False,)),
        ),
        names=LLAMA_NAMES,
        bos_id=0,
        eos_id=0,
    ),
    Family(
        OWN,  # what we train and none of the others can say
        "NanodecoderForCausalLM",
        parts=(Own(),),
        names=tuple(Name(name, name) for name in ("embed", "positions", "blocks.N", "norm", "lm_head")),
    ),
)
FAMILIES = {family.model_type: family for family in ENTRIES}

# Refused as what they are, since no option would make a decoder of them.
ENCODERS = {"bert", "roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "xlm-roberta", "modernbert", "mpnet"}
ENCODER_DECODERS = {"t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "whisper", "blenderbot", "led"}


def find_family(raw: dict[str, Any], where: str) -> Family | None:
    """The entry for this config.json, or None for a decoder that has none.

    Raises CheckpointError for what is not a decoder, as what it is.
    """
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
    return FAMILIES.get(model_type)


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
