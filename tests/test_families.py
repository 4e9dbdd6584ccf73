"""families.py: config.json in its dialects -> options; what we do not have is refused by name."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from tiny import tiny_config

from nanodecoder import CheckpointError, RopeConfig
from nanodecoder.families import FAMILIES, find_family, write_config
from nanodecoder.parts import BY_HEAD, PLAIN, STACKED, TRANSPOSED

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def read(**keys):
    raw = LLAMA | keys
    raw = {key: value for key, value in raw.items() if value != "absent"}
    return find_family(raw, "config.json").read(raw, "config.json")


def test_the_sizes():
    config = read()
    sizes = (config.vocab_size, config.dim, config.n_layers, config.n_heads, config.n_kv_heads, config.ffn_dim)
    assert sizes == (97, 64, 4, 4, 2, 128)
    assert (config.max_seq_len, config.norm_eps, config.head_dim, config.tied_head) == (128, 1e-5, 16, False)


@pytest.mark.parametrize(("given", "width"), [("absent", 16), (None, 16), (32, 32)])
def test_head_dim_is_read_and_only_derived_when_nobody_says(given, width):
    for model_type in ("llama", "mistral", "qwen2"):
        assert read(model_type=model_type, head_dim=given).head_dim == width
    assert read(model_type="qwen3", head_dim=given).head_dim == (128 if given == "absent" else width)


@pytest.mark.parametrize("given", ["absent", None])
def test_without_key_value_heads_every_query_head_has_its_own_or_the_familys_own_number_holds(given):
    """As in transformers: Mistral's own code says 8 and Qwen's 32 where the key is absent; null is one per query head."""
    assert read(num_key_value_heads=given).n_kv_heads == 4
    for model_type, absent in (("mistral", 8), ("qwen2", 32), ("qwen3", 32)):
        wanted = absent if given == "absent" else 32
        wide = {"model_type": model_type, "hidden_size": 512, "num_attention_heads": 32}
        assert read(num_key_value_heads=given, **wide).n_kv_heads == wanted


def test_biases_as_each_family_has_them():
    def biases(config):
        return config.qkv_bias, config.o_bias, config.ffn_bias

    assert biases(read()) == (False, False, False)
    assert biases(read(attention_bias=True)) == (True, True, False)
    assert biases(read(mlp_bias=True)) == (False, False, True)
    assert biases(read(model_type="mistral")) == (False, False, False)
    assert biases(read(model_type="qwen2")) == (True, False, False)
    assert biases(read(model_type="qwen3")) == (False, False, False)
    assert read(model_type="qwen3").qk_norm


# Five spellings of RoPE: the first two are one, and the next two.
def test_rope_in_both_dialects():
    a = read(rope_theta=1e6, rope_scaling=None)
    b = read(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert a == b
    assert a.rope[0] == RopeConfig(theta=1e6)
    c = read(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4})
    d = read(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5})
    assert c == d
    assert c.rope[0] == RopeConfig(5e5, "linear", factor=4.0)
    assert read().rope[0] == RopeConfig(theta=10_000.0)
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 3.0}}
    assert read(**both).rope[0].factor == 2.0  # as transformers has it
    assert read(rope_theta=7.0, rope_parameters={"rope_type": "default", "rope_theta": 9.0}).rope[0].theta == 9.0


def test_llama3_in_both_dialects():
    stretch = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **stretch})
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **stretch})
    assert old == new
    assert old.rope[0] == RopeConfig(
        5e5, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=64
    )
    del stretch["original_max_position_embeddings"]
    assert read(rope_scaling={"rope_type": "llama3", **stretch}).rope[0].original_max_seq_len == 128
    stretch["original_max_position_embeddings"] = 64
    outside = read(original_max_position_embeddings=32, rope_scaling={"rope_type": "llama3", **stretch})
    assert outside.rope[0].original_max_seq_len == 32  # beside the object wins over inside it


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2}}, "RoPE kind 'spiral' is unknown"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "swirl": 3}}, "asks for 'swirl': 3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "has no 'low_freq_factor'"),
        ({"rope_scaling": "linear"}, "'rope_scaling' must be an object, not 'linear'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "'partial_rotary_factor'"),
        ({"rope_interleaved": True}, "asks for 'rope_interleaved' true; here it can be false"),
    ],
)
def test_rope_that_we_do_not_have_is_refused(keys, words):
    with pytest.raises(CheckpointError, match=words):
        read(**keys)


def windows(**keys):
    return read(model_type="qwen2", **keys).windows


def test_qwens_window_is_off_unless_switched_on_and_slides_from_a_layer_on():
    assert windows(use_sliding_window=False, sliding_window=4, max_window_layers=2) == (None,) * 4
    assert windows(sliding_window=4) == (None,) * 4
    assert windows(use_sliding_window=True, sliding_window=4, max_window_layers=2) == (None, None, 4, 4)
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows(use_sliding_window=True, sliding_window=4, max_window_layers=2, layer_types=types) == (4, None, None, 4)
    with pytest.raises(
        CheckpointError, match="layer_types names layers that slide, but use_sliding_window switches windows off"
    ):
        windows(use_sliding_window=False, sliding_window=4, layer_types=types)
    with pytest.raises(CheckpointError, match="but sliding_window switches windows off"):
        windows(use_sliding_window=True, sliding_window=None, layer_types=types)
    assert windows(use_sliding_window=True, sliding_window=None, max_window_layers=2) == (None,) * 4
    assert windows(use_sliding_window=True, max_window_layers=3) == (None, None, None, 4096)


def test_mistrals_window_is_for_every_layer_or_none():
    assert read(model_type="mistral", sliding_window=4).windows == (4,) * 4
    assert read(model_type="mistral", sliding_window=None).windows == (None,) * 4
    assert read(model_type="mistral").windows == (4096,) * 4


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types asks for 'chunked_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"layer_types": [{}] * 4}, "layer_types asks for {}"),
    ],
)
def test_layers_of_a_kind_that_we_do_not_have_are_refused(keys, words):
    with pytest.raises(CheckpointError, match=words):
        windows(**keys)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"logit_scale": 0.5}, "asks for 'logit_scale': 0.5, which is not known here and could change what is computed"),
        ({"a": 1, "b": [2]}, r"asks for 'a': 1, 'b': \[2\]"),
        ({"quantization_config": {"bits": 4}}, "asks for 'quantization_config'"),
        ({"sliding_window": 512}, "asks for 'sliding_window': 512"),  # a llama has none
        ({"hidden_act": "gelu"}, "asks for 'hidden_act' 'gelu'; here it can be silu or swish"),
        ({"hidden_size": "absent"}, "has no 'hidden_size'"),
        ({"hidden_size": None}, "'hidden_size' is null and must be a whole number"),
        ({"hidden_size": "64"}, "'hidden_size' must be a whole number, not '64'"),
        ({"hidden_size": 64.5}, "'hidden_size' must be a whole number, not 64.5"),
        ({"num_attention_heads": True}, "'num_attention_heads' must be a whole number, not True"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' must be true or false, not 1"),
        ({"num_attention_heads": 5}, "dim 64 is not a multiple of n_heads 5"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be from 1 to 4096, not 0"),
        ({"rms_norm_eps": [1]}, r"'rms_norm_eps' must be a number, not \[1\]"),
    ],
)
def test_what_we_do_not_have_or_cannot_read_is_refused_by_name(keys, words):
    with pytest.raises(CheckpointError, match=words):
        read(**keys)


def test_what_is_absent_is_what_the_familys_own_code_says():
    assert read(rms_norm_eps="absent").norm_eps == 1e-6
    assert read(max_position_embeddings="absent").max_seq_len == 2048
    assert read(model_type="phi3", rms_norm_eps="absent").norm_eps == 1e-5


def gemma(**keys):
    return read(model_type="gemma", head_dim=16, **keys)


def test_gemmas_gelu_means_the_tanh_kind_and_gpt2_tells_them_apart():
    assert gemma(hidden_act="gelu").activation == gemma(hidden_act="gelu_pytorch_tanh").activation == "gelu_tanh"
    gpt2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4}
    kinds = {name: FAMILIES["gpt2"].read(gpt2 | {"activation_function": name}, "").activation for name in ("gelu", "gelu_new")}
    assert kinds == {"gelu": "gelu", "gelu_new": "gelu_tanh"}
    assert FAMILIES["gpt2"].read(gpt2, "").ffn_dim == 256


def test_every_other_layer_of_gemma_2_slides_from_the_first_on():
    assert read(model_type="gemma2", head_dim=16).windows == (4096, None, 4096, None)
    types = ["full_attention"] * 3 + ["sliding_attention"]
    assert read(model_type="gemma2", head_dim=16, layer_types=types, sliding_window=9).windows == (None, None, None, 9)


def test_layers_without_rope_and_layers_of_another_theta():
    keys = {"model_type": "smollm3", "rope_theta": 5e6}
    assert [rope is not None for rope in read(**keys).rope] == [True, True, True, False]
    assert [rope is not None for rope in read(no_rope_layers=[0, 1, 1, 0], **keys).rope] == [False, True, True, False]
    with pytest.raises(CheckpointError, match="no_rope_layers must hold 4 numbers, 0 or 1"):
        read(no_rope_layers=[0, 2, 1, 0], **keys)
    gemma3 = read(model_type="gemma3_text", head_dim=16, sliding_window_pattern=2, num_hidden_layers=4)
    assert [rope.theta for rope in gemma3.rope] == [1e4, 1e6, 1e4, 1e6]
    assert gemma3.windows == (4096, None, 4096, None)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"do_layer_norm_before": False}, "'do_layer_norm_before' false; here it can be true"),
        (
            {"word_embed_proj_dim": 32},
            "word_embed_proj_dim 32 and hidden_size 64: projections around the blocks are not supported",
        ),
    ],
)
def test_opt_350ms_kind_is_refused_by_name(keys, words):
    raw = {
        "model_type": "opt",
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 9,
    }
    assert FAMILIES["opt"].read(raw, "").position_offset == 2
    with pytest.raises(CheckpointError, match=words):
        FAMILIES["opt"].read(raw | keys, "config.json")


def test_an_option_that_says_nothing_new_is_not_refused():
    assert read(model_type="mistral", attention_bias=False, partial_rotary_factor=1.0) == read(model_type="mistral")
    unused = {"rope_type": "default", "factor": 4.0, "rope_theta": 10_000.0}
    assert read(rope_parameters=unused) == read()


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        # as the published files of these checkpoints have them
        ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}),  # Phi-4-mini
        ("gemma2", {"sliding_window_size": 4096, "head_dim": 16, "hidden_act": "gelu_pytorch_tanh"}),  # Gemma 2 9B
        ("llama", {"max_sequence_length": 2048, "rope_scaling": None}),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "finetuned": True}},
        ),
        ("mistral", {"mlp_bias": False, "attention_bias": False}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "original_max_position_embeddings": 64}}),
    ],
)
def test_published_configs_are_read(model_type, keys):
    assert read(model_type=model_type, **keys).dim == 64


def test_published_gpt_configs_are_read():
    gpt2 = {
        "model_type": "gpt2",
        "vocab_size": 97,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "_num_labels": 1,
        "output_past": True,
    }
    gpt2 |= {"n_special": 0, "predict_special_tokens": True, "id2label": {"0": "LABEL_0"}}  # DistilGPT2, GPT-2 medium
    assert FAMILIES["gpt2"].read(gpt2, "").activation == "gelu_tanh"
    neox = {"hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "rotary_pct": 0.25, "rotary_emb_base": 10000}  # GPT-NeoX-20B
    raw = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "rms_norm_eps")}
    assert FAMILIES["gpt_neox"].read(raw | neox | {"hidden_size": 128}, "").activation == "gelu_tanh"


def test_gemma_3s_attention_cap_is_refused_since_transformers_does_not_apply_it():
    assert (
        read(model_type="gemma3_text", head_dim=16, attn_logit_softcapping=None, final_logit_softcapping=2.0).final_softcap == 2
    )
    with pytest.raises(CheckpointError, match=r"'attn_logit_softcapping' 3.0; here it can be None"):
        read(model_type="gemma3_text", head_dim=16, attn_logit_softcapping=3.0)


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), -(2**70)])
def test_numbers_beyond_any_size_are_refused_wherever_they_stand(value):
    for model_type, key in (
        ("gemma", "hidden_size"),
        ("gemma2", "query_pre_attn_scalar"),
        ("gemma2", "attn_logit_softcapping"),
    ):
        with pytest.raises(CheckpointError, match=f"'{key}' (is beyond what it can be|must be)"):
            read(model_type=model_type, **{key: value})
    with pytest.raises(CheckpointError, match=r"is beyond what it can be|must be"):
        read(rope_scaling={"type": "linear", "factor": value})


def test_what_is_known_to_be_harmless_or_switched_off_is_not_refused():
    noise = {
        "transformers_version": "4.40",
        "use_cache": True,
        "pretraining_tp": 2,
        "attention_dropout": 0.1,
        "logit_scale": None,
    }
    assert read(**noise) == read()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"model_type": "bert"}, "is a bert, an encoder: it reads in both directions and cannot generate"),
        ({"model_type": "t5"}, "is a t5, an encoder-decoder, and this is a decoder only"),
        ({"model_type": "newseq", "is_encoder_decoder": True}, "is a newseq, an encoder-decoder"),
        ({}, "has no 'model_type'"),
        ({"model_type": 3}, "'model_type' must be a string, not 3"),
    ],
)
def test_what_is_no_decoder_or_not_ours_is_refused_as_what_it_is(raw, words):
    with pytest.raises(CheckpointError, match=words):
        find_family(raw, "config.json")


CONFIGS = {
    "llama": [
        tiny_config(),
        tiny_config(qkv_bias=True, o_bias=True, ffn_bias=True, head_dim=8, tied_head=True),
        tiny_config(
            rope=RopeConfig(5e5, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=64)
        ),
    ],
    "mistral": [tiny_config(windows=4), tiny_config(rope=RopeConfig(kind="linear", factor=2.0), windows=7)],
    "qwen2": [tiny_config(qkv_bias=True), tiny_config(qkv_bias=True, windows=(None, 5))],
    "qwen3": [tiny_config(qk_norm="head"), tiny_config(qk_norm="head", windows=(5, None), head_dim=32)],
}


@pytest.mark.parametrize(("model_type", "config"), [(name, config) for name, configs in CONFIGS.items() for config in configs])
def test_what_is_written_is_read_again_as_the_same_and_in_the_dialect_that_can_say_it(model_type, config):
    family, raw = write_config(config)
    assert family.model_type == raw["model_type"] == model_type
    assert family.read(raw, "config.json") == config


def test_a_dialect_is_kept_where_it_can_say_the_model():
    config = dataclasses.replace(tiny_config(), model_type="mistral")
    assert write_config(config)[1]["model_type"] == "mistral"
    with_bias = dataclasses.replace(config, qkv_bias=True)
    assert write_config(with_bias)[1]["model_type"] == "qwen2"


LONG = RopeConfig(kind="longrope", original_max_seq_len=64, short_factors=(1.0,) * 8, long_factors=(2.0,) * 8)


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": "head", "ffn_bias": True},
        {"rope": (RopeConfig(), RopeConfig(theta=5.0))},
        {"rope": (None, LONG), "pre_norm": False, "norm": "layer", "activation": "relu", "gated": False},
        {"windows": (None, 7), "sparse_stride": 3, "attn_scale": 0.3, "final_softcap": 20.0, "learned_positions": True},
    ],
)
def test_what_nobody_elses_dialect_can_say_is_said_in_ours(options):
    config = tiny_config(**options)
    family, raw = write_config(config)
    assert family.model_type == raw["model_type"] == "nanodecoder"
    raw = json.loads(json.dumps(raw))
    assert family.read(raw, "config.json") == config
    for wrong in ({"dim": "wide"}, {"rope": [{"theta": "x"}, None]}, {"rope": 5}, {"windows": ["a", None]}, {"heads": 4}):
        with pytest.raises(CheckpointError):
            family.read(raw | wrong, "config.json")
    with pytest.raises(CheckpointError):
        family.read({key: value for key, value in raw.items() if key != "n_heads"}, "config.json")


@pytest.mark.parametrize(
    ("model_type", "parameter", "tensor"),
    [
        ("llama", "blocks.11.attn.q_proj.bias", "model.layers.11.self_attn.q_proj.bias"),
        ("llama", "blocks.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("gemma2", "blocks.3.attn_post_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
        ("gemma2", "blocks.3.ffn_norm.weight", "model.layers.3.pre_feedforward_layernorm.weight"),
        ("phi3", "blocks.7.attn.v_proj.weight", "model.layers.7.self_attn.qkv_proj.weight"),
        ("phi3", "blocks.7.ffn.up_proj.weight", "model.layers.7.mlp.gate_up_proj.weight"),
        ("phi3", "blocks.7.ffn.down_proj.weight", "model.layers.7.mlp.down_proj.weight"),
        ("gpt2", "blocks.10.ffn.up_proj.bias", "transformer.h.10.mlp.c_fc.bias"),
        ("opt", "positions.weight", "model.decoder.embed_positions.weight"),
        ("opt", "norm.bias", "model.decoder.final_layer_norm.bias"),
        ("gpt_neox", "lm_head.weight", "embed_out.weight"),
        ("gpt_neox", "embed.weight", "gpt_neox.embed_in.weight"),
    ],
)
def test_tensor_names(model_type, parameter, tensor):
    assert FAMILIES[model_type].tensor_name(parameter) == tensor


def test_one_stored_tensor_may_hold_several_parameters_in_order():
    q, k, v = (f"blocks.0.attn.{name}_proj.weight" for name in "qkv")
    stored = FAMILIES["phi3"].stored([k, v, q])
    assert stored["model.layers.0.self_attn.qkv_proj.weight"].parameters == (q, k, v)


# ---- layouts, by hand


def parts(*rows: int) -> list[torch.Tensor]:
    """Numbered matrices of so many rows and three columns."""
    return list(torch.arange(3.0 * sum(rows)).view(-1, 3).split(list(rows)))


@pytest.mark.parametrize(
    ("layout", "rows"), [(STACKED, (4, 2, 2)), (TRANSPOSED, (4, 4, 4)), (BY_HEAD, (4, 4, 4)), (PLAIN, (5,))]
)
def test_what_is_joined_is_split_again(layout, rows):
    given = parts(*rows)
    for a, b in zip(layout.split(layout.join(given, 2), rows, 2), given, strict=True):
        assert torch.equal(a, b)
    biases = [part[:, 0] for part in given]
    for a, b in zip(layout.split(layout.join(biases, 2), rows, 2), biases, strict=True):
        assert torch.equal(a, b)


def test_layouts_by_hand():
    q, k, v = parts(2, 2, 2)  # two heads of width 1
    assert STACKED.join([q, k, v], 2)[:, 0].tolist() == [0, 3, 6, 9, 12, 15]
    assert TRANSPOSED.join([q, k, v], 2)[0].tolist() == [0, 3, 6, 9, 12, 15]
    assert BY_HEAD.join([q, k, v], 2)[:, 0].tolist() == [0, 6, 12, 3, 9, 15]  # head 0's q, k, v, then head 1's
