"""layers.py: what looks at one position at a time."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import tiny_config
from torch import nn

from nanodecoder.layers import ACTIVATION_FUNCTIONS, FEW, FeedForward, LayerNorm, Linear, RMSNorm, soft_cap


def test_rms_norm_by_hand():
    norm = RMSNorm(2, eps=0.0)
    norm.weight.data = torch.tensor([1.0, 10.0])
    rms = math.sqrt((9 + 16) / 2)
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), torch.tensor([3 / rms, 40 / rms]))


def test_eps_counts_where_the_vector_is_small():
    small = torch.tensor([1e-3, -1e-3])
    assert RMSNorm(2, eps=1e-6)(small)[0].item() == pytest.approx(1e-3 / math.sqrt(2e-6))
    assert RMSNorm(2, eps=1e-5)(small)[0].item() == pytest.approx(1e-3 / math.sqrt(1.1e-5))


def test_the_mean_square_is_taken_in_float32():
    """In float16 the square of 300 is infinite."""
    x = torch.full((4,), 300.0, dtype=torch.float16)
    torch.testing.assert_close(RMSNorm(4, eps=1e-5).half()(x), torch.ones(4, dtype=torch.float16))


def test_swiglu_by_hand():
    ffn = FeedForward(tiny_config(dim=4, n_heads=2, n_kv_heads=1, ffn_dim=1))
    for projection, row in [(ffn.gate_proj, [1.0, 0, 0, 0]), (ffn.up_proj, [0, 1.0, 0, 0])]:
        projection.weight.data = torch.tensor([row])
    ffn.down_proj.weight.data = torch.tensor([[1.0], [0], [0], [2.0]])
    gate, up = 0.5, -3.0
    wanted = gate / (1 + math.exp(-gate)) * up
    torch.testing.assert_close(ffn(torch.tensor([gate, up, 9.0, 9.0])), torch.tensor([wanted, 0, 0, 2 * wanted]))


def test_a_norm_whose_weights_count_from_one():
    norm, plain = RMSNorm(3, eps=1e-6, offset=1.0), RMSNorm(3, eps=1e-6)
    plain.weight.data = torch.tensor([1.5, 0.5, 2.0])
    norm.weight.data = plain.weight.data - 1
    torch.testing.assert_close(norm(torch.tensor([1.0, 2.0, 3.0])), plain(torch.tensor([1.0, 2.0, 3.0])))
    assert torch.equal(RMSNorm(3, 1e-6, offset=1.0).weight, torch.zeros(3))


def test_layer_norm_is_torchs():
    ours, theirs, x = LayerNorm(16, 1e-5), torch.nn.LayerNorm(16), torch.randn(3, 16)
    for norm in (ours, theirs):
        norm.weight.data, norm.bias.data = torch.arange(16.0), -torch.arange(16.0)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(("name", "at_one"), [("silu", 0.731059), ("gelu", 0.841345), ("gelu_tanh", 0.841192), ("relu", 1.0)])
def test_activations_are_told_apart(name, at_one):
    assert ACTIVATION_FUNCTIONS[name](torch.tensor(1.0)).item() == pytest.approx(at_one, abs=1e-6)
    assert ACTIVATION_FUNCTIONS[name](torch.tensor(-30.0)).item() == pytest.approx(0.0, abs=1e-6)


def test_the_plain_feed_forward_by_hand():
    ffn = FeedForward(tiny_config(dim=2, n_heads=1, n_kv_heads=1, ffn_dim=2, gated=False, activation="relu", ffn_bias=True))
    assert ffn.gate_proj is None
    ffn.up_proj.weight.data, ffn.up_proj.bias.data = torch.eye(2), torch.tensor([0.0, -1.0])
    ffn.down_proj.weight.data, ffn.down_proj.bias.data = 3 * torch.eye(2), torch.tensor([1.0, 1.0])
    assert ffn(torch.tensor([2.0, 0.5])).tolist() == [7.0, 1.0]


def test_the_soft_cap_bends_and_none_leaves():
    x = torch.tensor([-1000.0, 0.1, 1000.0])
    torch.testing.assert_close(soft_cap(x, 5.0), torch.tensor([-5.0, 5 * math.tanh(0.02), 5.0]))
    assert torch.equal(soft_cap(x, None), x)


def test_the_feed_forward_commutes_with_any_order_of_positions():
    ffn, x = FeedForward(tiny_config()), torch.randn(1, 7, 64)
    order = torch.randperm(7)
    torch.testing.assert_close(ffn(x)[:, order], ffn(x[:, order]))


def test_biases_are_there_only_where_asked_for():
    assert {name for name, _ in FeedForward(tiny_config(ffn_bias=True)).named_parameters() if name.endswith("bias")} == {
        "gate_proj.bias",
        "up_proj.bias",
        "down_proj.bias",
    }
    assert not [name for name, _ in FeedForward(tiny_config()).named_parameters() if name.endswith("bias")]


@pytest.mark.parametrize("rows", [1, 2, 7, FEW, FEW + 1])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_turned_round_is_the_same_product_and_the_same_gradient(rows, bias):
    ours = Linear(24, 40, bias=bias)
    theirs = nn.Linear(24, 40, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    for shape in ((rows, 24), (1, rows, 24)):
        x = torch.randn(shape)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        assert ours(a).shape == theirs(b).shape
        torch.testing.assert_close(ours(a), theirs(b), atol=1e-5, rtol=1e-5)
        ours(a).square().sum().backward()
        theirs(b).square().sum().backward()
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, atol=1e-3, rtol=1e-3)
        ours.zero_grad(), theirs.zero_grad()
