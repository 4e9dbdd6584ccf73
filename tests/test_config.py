"""config.py: sizes settle themselves or are refused with their values."""

from __future__ import annotations

import dataclasses

import pytest
from tiny import tiny_config

from nanodecoder import ModelConfig, RopeConfig


def test_what_is_left_out_is_derived():
    config = ModelConfig(vocab_size=10, dim=96, n_layers=3, n_heads=4)
    assert (config.n_kv_heads, config.head_dim, config.ffn_dim) == (4, 24, 256)
    assert config.windows == (None, None, None)
    assert config.rope == (RopeConfig(),) * 3


def test_a_single_window_is_for_every_layer_and_a_tuple_has_one_each():
    assert tiny_config(windows=4).windows == (4, 4)
    assert tiny_config(windows=(None, 4)).windows == (None, 4)
    with pytest.raises(ValueError, match="windows has 3 entries for 2 layers"):
        tiny_config(windows=(1, 2, 3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_heads": 5}, "dim 64 is not a multiple of n_heads 5"),
        ({"n_heads": 4, "n_kv_heads": 3}, "n_heads 4 is not a multiple of n_kv_heads 3"),
        ({"n_kv_heads": 0}, "n_heads 4 is not a multiple of n_kv_heads 0"),
        ({"head_dim": 7}, "RoPE turns pairs, and 7 of a head's 7 features would turn"),
        ({"norm_eps": -1.0}, "norm_eps must be from 0 to 1"),
        ({"n_layers": 0}, "n_layers must be at least 1 and at most 1099511627776, not 0"),
        ({"vocab_size": 2**60}, "vocab_size must be at least 1 and at most"),
        ({"norm": "batch"}, "norm must be one of rms, layer, not 'batch'"),
        ({"attn_softcap": 0.0}, "attn_softcap must be above 0, or None"),
        ({"rope": RopeConfig(kind="longrope", original_max_seq_len=8)}, "needs 8 short and long factors, not 0"),
        ({"windows": 0}, "a window must be at least 1 token"),
        ({"ffn_dim": -1}, "ffn_dim must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        tiny_config(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "spiral"}, "RoPE kind 'spiral' is unknown"),
        ({"theta": 0.0}, "must be above 0"),
        ({"theta": float("inf")}, "must be above 0 and at most"),
        ({"fraction": 1.5}, "must be above 0 and at most 1, not 1.5"),
        ({"kind": "yarn", "original_max_seq_len": 8, "theta": 1.0}, "needs theta above 1"),
        ({"kind": "llama3"}, "needs original_max_seq_len"),
        ({"kind": "llama3", "original_max_seq_len": 8, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "high_freq_factor >"),
    ],
)
def test_rope_settings_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        RopeConfig(**options)


def test_a_config_cannot_be_changed_and_the_dialect_it_came_from_does_not_count():
    config = tiny_config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dim = 3
    assert config == dataclasses.replace(config, model_type="llama")
