"""training/optim.py: every parameter in one group, decay where it belongs, and the three schedules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model

from nanodecoder.training.optim import SCHEDULES, Muon, groups, make_optimizers, orthogonal, set_rates, share_of_rate

RATES = {"learning_rate": 1e-2, "muon_learning_rate": 2e-2, "weight_decay": 0.5, "beta1": 0.9, "beta2": 0.99}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("options", [{}, {"tied_head": True}, {"norm": "layer", "qkv_bias": True, "learned_positions": True}])
def test_every_parameter_is_in_one_group_and_matrices_of_blocks_alone_in_muons(optimizer, options):
    model = tiny_model(**options)
    found = groups(model, optimizer)
    together = [id(parameter) for kind in found.values() for parameter in kind]
    assert sorted(together) == sorted(id(parameter) for parameter in model.parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(parameter.dim() == 1 for parameter in found["plain"])
    muon = {names[id(parameter)] for parameter in found["muon"]}
    matrices = {name for name, parameter in model.named_parameters() if name.startswith("blocks.") and parameter.dim() == 2}
    assert muon == (matrices if optimizer == "muon" else set())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_without_gradients_leaves_norms_alone_and_pulls_on_matrices(optimizer):
    model = tiny_model(norm="layer", qkv_bias=True, tied_head=True)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for one in make_optimizers(model, optimizer, **RATES):
        one.step()
    for name, parameter in model.named_parameters():
        same = torch.equal(parameter, before[name])
        assert same == (parameter.dim() == 1), name
        if not same:
            rate = 2e-2 if optimizer == "muon" and name.startswith("blocks.") else 1e-2
            torch.testing.assert_close(parameter, before[name] * (1 - rate * 0.5))


def test_all_rates_rise_and_fall_together():
    optimizers = make_optimizers(tiny_model(), "muon", **RATES)
    set_rates(optimizers, 0.5)
    set_rates(optimizers, 0.25)  # of the full rate, not of the last
    assert [group["lr"] for one in optimizers for group in one.param_groups] == pytest.approx([2.5e-3, 2.5e-3, 5e-3])


def share(schedule: str, step: int, steps: int = 100, warmup: int = 10, lowest: float = 0.1) -> float:
    return share_of_rate(step / steps, step, schedule=schedule, warmup_iters=warmup, lowest=lowest)


def test_the_schedules_by_hand():
    assert [share(kind, 0) for kind in SCHEDULES] == pytest.approx([1 / 11] * 3)
    assert [share(kind, 9) for kind in SCHEDULES] == pytest.approx([10 / 11] * 3)
    assert [share(kind, 50) for kind in SCHEDULES] == pytest.approx([0.55, 1.0, 1.0])
    assert [share(kind, 90) for kind in SCHEDULES] == pytest.approx([0.1 + 0.9 * 0.0244717, 0.55, 1.0], rel=1e-5)
    assert [share(kind, 100) for kind in SCHEDULES] == pytest.approx([0.1, 0.1, 1.0])


@given(kind=st.sampled_from(SCHEDULES), step=st.integers(10, 99))
def test_after_warm_up_a_rate_never_rises_and_never_falls_below_its_end(kind, step):
    assert 1 >= share(kind, step) >= share(kind, step + 1) >= 0.1 - 1e-12


def test_muon_is_torchs_muon_up_to_the_bits_that_it_keeps():
    """torch.optim.Muon computes in bfloat16, so updates agree to its 8 bits."""
    mine, theirs = ([torch.nn.Parameter(p.detach().clone()) for p in matrices()] for _ in range(2))
    own, reference = Muon(mine, lr=0.1, weight_decay=0.2), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.2)
    for step in range(3):
        for a, b, gradient in zip(mine, theirs, matrices(seed=step + 1), strict=True):
            a.grad, b.grad = gradient.clone(), gradient.clone()
        own.step()
        reference.step()
        for a, b in zip(mine, theirs, strict=True):
            assert (a - b).abs().max() < 0.02 * 0.1 * (step + 1)


def matrices(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((16, 16), (40, 16), (16, 40), (16, 16))]


def test_an_update_has_singular_values_near_one_whatever_the_gradients():
    gradients = torch.stack([matrices()[0] * 1e-6, matrices()[3] * 1e6, torch.zeros(16, 16)])
    values = torch.linalg.svdvals(orthogonal(gradients))
    assert values[:2].min() > 0.5
    assert values[:2].max() < 1.3
    assert values[2].max() == 0
