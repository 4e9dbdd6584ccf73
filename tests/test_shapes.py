"""shapes.py: what is printed is what flows, and FLOPs are what torch counts."""

from __future__ import annotations

import pytest
import torch
from test_trace import KINDS
from tiny import tiny_config, tiny_model, tokens
from torch.utils.flop_counter import FlopCounterMode

from nanodecoder import Decoder, KVCache, ModelConfig, RopeConfig
from nanodecoder.inside import trace
from nanodecoder.inside.shapes import empty, show, walk

EVERY = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
OPT = ModelConfig(
    50272, 768, 12, 12, ffn_dim=3072, norm="layer", gated=False, activation="relu", learned_positions=True, position_offset=2,
    rope=None, tied_head=True, qkv_bias=True, o_bias=True, ffn_bias=True,
)  # fmt: skip


def test_the_study_notes_numbers():
    """opt-125m with four rows of seven tokens: [4, 7, 50272], 768 and 144, without its weights."""
    found = walk(OPT, 4, 7)
    assert found["embed"].prefill == (4, 7, 768)
    assert found["lm_head"].prefill == (4, 7, 50272)
    assert found["lm_head"].step is None
    assert found["lm_head, last"].prefill == found["lm_head, last"].step == (4, 1, 50272)
    assert found["choice"].prefill == (4,)
    assert found.softmaxes == 144
    assert found.total("parameters") == 125_239_296
    text = show(found)
    for words in (
        "[4, 7, 50272]",
        "[4, 7, 768]",
        "12 blocks × 12 heads = 144 tables",
        "12 calls on [4, 12, 7, 7]",
        "none when greedy",
    ):
        assert words in text


def test_the_model_ends_before_the_filters():
    lines = show(walk(tiny_config(), 2, 5)).split("\n")
    border = next(i for i, line in enumerate(lines) if "here the model ends" in line)
    assert lines[border - 1].startswith("lm_head, last")
    assert [line.split()[0] for line in lines[border + 1 : border + 5]] == ["logits", "filters", "softmax", "choice"]
    assert "float32" not in lines[border + 2]
    half = show(walk(tiny_config(), 2, 5, torch.bfloat16))
    assert "min-p (float32)" in half


@EVERY
def test_shapes_are_those_of_a_real_pass(options):
    """As a trace with numbers has them; a step's, as a real cache makes them."""
    model, found = tiny_model(**options), walk(tiny_config(**options), 2, 9)
    real = trace(model, tokens(2, 9))
    names = {stop.name for stop in found.stops}
    for name in ("q", "k", "v", "scores", "attention", "heads", "mid", "out"):
        assert found[name].prefill == real[f"blocks.0.{name}"].shape
    assert ("positions" in names) == model.config.learned_positions
    assert ("attn_post_norm" in names) == model.config.post_norm
    assert ("ffn.gate_proj" in names) == model.config.gated
    cache = KVCache(model.config, 2, 10)
    model(tokens(2, 9), cache)
    step = model(tokens(2, 1), cache)
    assert found["lm_head, last"].step == step.shape
    assert found["k"].step == (2, model.config.n_kv_heads, 10, model.config.head_dim)
    assert found["scores"].step == (2, model.config.n_heads, 1, 10)


@EVERY
@torch.no_grad()
def test_flops_are_those_that_torch_counts_and_parameters_those_that_there_are(options):
    model, found = tiny_model(**options), walk(tiny_config(**options), 2, 9)
    model.attention = "explicit"
    assert found.total("parameters") == sum(p.numel() for p in model.parameters())
    cache = KVCache(model.config, 2, 10)
    for columns, kind in ((9, "flops"), (1, "step_flops")):
        with FlopCounterMode(display=False) as counter:
            model.head(model.trunk(tokens(2, columns), cache)[:, -1:])
        assert counter.get_total_flops() == found.total(kind)
    with FlopCounterMode(display=False) as counter:
        model(tokens(2, 9))
    assert counter.get_total_flops() == found.total("flops") - found["lm_head, last"].flops + found["lm_head"].flops


def test_the_whole_context_can_be_walked_and_stretched_angles_are_no_hindrance():
    assert walk(tiny_config(learned_positions=True, max_seq_len=16), 1, 16)["scores"].step == (1, 4, 1, 16)
    for kind in ("dynamic", "longrope"):
        factors = (1.0,) * 8
        rope = RopeConfig(kind=kind, original_max_seq_len=8, short_factors=factors, long_factors=factors)
        for columns in (7, 8, 12):
            assert walk(tiny_config(rope=rope), 1, columns)["scores"].step == (1, 4, 1, columns + 1)


def test_what_cannot_be_walked_is_refused():
    with pytest.raises(ValueError, match="at least 1 row and 1 token, not 0 and 7"):
        walk(tiny_config(), 0, 7)
    with pytest.raises(ValueError, match="there are 16 learned positions"):
        walk(tiny_config(learned_positions=True, max_seq_len=16), 1, 17)


def test_nothing_is_loaded_or_drawn():
    model = empty(OPT)
    assert isinstance(model, Decoder)
    assert all(p.is_meta for p in model.parameters())
