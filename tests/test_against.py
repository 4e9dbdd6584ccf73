"""against.py: what passes each place is noted under the right name, and the first place that leaves is where the fault is."""

from __future__ import annotations

import pytest
import torch
from conftest import FIXTURES

import nanodecoder as nd
from nanodecoder.against import Difference, differences_between, trace_ours


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda model: model.embed.weight.mul_(1.1), "embedding"),
        (lambda model: model.blocks[1].attn.k_proj.weight.mul_(1.1), "layer 1: key after RoPE"),
        (lambda model: model.blocks[0].ffn.down_proj.weight.mul_(1.1), "layer 0: output"),
        (lambda model: model.blocks[1].attn.o_proj.weight.mul_(1.1), "layer 1: output"),
        (lambda model: model.norm.weight.mul_(1.1), "final norm"),
        (lambda model: model.lm_head.weight.mul_(1.1), "logits"),
    ],
)
def test_each_place_is_where_it_says(change, place):
    """Two of ours, one of them changed: no transformers needed."""
    ids = torch.tensor([[5, 9, 11, 3]])
    ours, changed = (nd.load_model(FIXTURES / "llama-llama3") for _ in range(2))
    with torch.no_grad():
        change(changed)
    differences = differences_between(trace_ours(changed, ids), trace_ours(ours, ids))
    assert next(d for d in differences if d.leaves(2e-5)).place == place


def test_tracing_leaves_nothing_behind_and_changes_no_bit():
    model, ids = nd.load_model(FIXTURES / "qwen3"), torch.tensor([[5, 9, 11, 3]])
    with torch.no_grad():
        before = model(ids)
        assert torch.equal(trace_ours(model, ids)["logits"], before)
        assert torch.equal(model(ids), before)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "attend" not in vars(module)


def test_nan_leaves():
    assert Difference("logits", float("nan"), float("nan")).leaves(2e-5)
    assert not Difference("logits", 9e-5, 1e-5).leaves(2e-5)
    assert Difference("logits", 9e-5, 3e-5).leaves(2e-5)


def test_a_small_mistake_is_found_where_it_is_although_the_first_token_is_large():
    """The first position's values may be hundreds of times the others': each position is judged by its own."""
    ids = torch.tensor([[5, 9, 11, 3]])
    ours, changed = (nd.load_model(FIXTURES / "gemma") for _ in range(2))
    with torch.no_grad():
        for model in (ours, changed):
            model.embed.weight[5] *= 300
        changed.blocks[0].ffn.down_proj.weight.mul_(1.0005)
    differences = differences_between(trace_ours(changed, ids), trace_ours(ours, ids))
    assert next(d for d in differences if d.leaves(2e-5)).place == "layer 0: output"


def test_places_that_the_reference_does_not_show_are_left_out_but_not_the_logits():
    ids = torch.tensor([[5, 9, 11, 3]])
    trace = trace_ours(nd.load_model(FIXTURES / "gemma"), ids)
    fewer = {place: value for place, value in trace.items() if "layer" not in place}
    assert [difference.place for difference in differences_between(trace, fewer)] == list(fewer)
    with pytest.raises(nd.CheckpointError, match="the reference's logits were not noted"):
        differences_between(trace, {"embedding": trace["embedding"]})
