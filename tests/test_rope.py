"""rope.py against values computed by hand and published ones."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import tiny_config, tiny_model

from nanodecoder import Decoder, RopeConfig
from nanodecoder.rope import angles, frequencies, rotate


def turned(vector: list[float], position: int, rope: RopeConfig | None = None) -> torch.Tensor:
    rope = rope or RopeConfig()
    x = torch.tensor(vector)[None, None, None]  # (1, 1, 1, D)
    return rotate(x, *angles(torch.tensor([[position]]), frequencies(rope, len(vector)), torch.float32))[0, 0, 0]


def test_half_split_pairing_by_hand():
    """Feature i turns with i + D/2, as Hugging Face's files want it; not with i + 1."""
    torch.testing.assert_close(turned([1.0, 0.0, 0.0, 0.0], 1), torch.tensor([math.cos(1), 0.0, math.sin(1), 0.0]))
    slow = 1e4**-0.5
    torch.testing.assert_close(turned([0.0, 1.0, 0.0, 0.0], 3), torch.tensor([0, math.cos(3 * slow), 0, math.sin(3 * slow)]))


def test_position_0_turns_nothing_and_no_turn_changes_a_length():
    vector = [0.3, -1.2, 0.7, 2.0, 0.1, -0.4]
    torch.testing.assert_close(turned(vector, 0), torch.tensor(vector))
    torch.testing.assert_close(turned(vector, 1234).norm(), torch.tensor(vector).norm())


def test_query_and_key_meet_at_their_distance():
    """The study notes' three places of the same distance, and one of another."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(64, generator=generator).tolist() for _ in range(2))
    at = {places: turned(q, places[0]) @ turned(k, places[1]) for places in [(5, 2), (105, 102), (1003, 1000), (5, 3)]}
    assert at[5, 2].item() == pytest.approx(at[105, 102].item(), abs=2e-4)
    assert at[5, 2].item() == pytest.approx(at[1003, 1000].item(), abs=2e-3)
    assert abs(at[5, 2] - at[5, 3]) > 0.1


def test_llama3_stretch_has_the_published_frequencies():
    rope = RopeConfig(5e5, "llama3", factor=8, low_freq_factor=1, high_freq_factor=4, original_max_seq_len=64)
    wanted = [1, 0.07940301, 0.00470075, 0.00091158, 0.00017678, 0.00003428, 0.00000665, 0.00000129]
    assert frequencies(rope, 16) == pytest.approx(wanted, abs=6e-9)
    assert frequencies(RopeConfig(5e5), 16)[1:3] == pytest.approx([0.19392276, 0.03760603], abs=6e-9)


def test_linear_stretch_at_four_times_the_position_is_the_unstretched_angle():
    vector = [0.3, -1.2, 0.7, 2.0]
    torch.testing.assert_close(turned(vector, 40, RopeConfig(kind="linear", factor=4.0)), turned(vector, 10))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_neighbouring_positions_apart(dtype):
    """bfloat16 cannot tell position 256 from 257; the angles can, since they are cast once, at the end."""
    positions = torch.arange(4096)[None]
    model = tiny_model().to(dtype)
    (per_position,) = model._frequencies.values()
    cos, sin = angles(positions, per_position, dtype)
    exact_cos, exact_sin = angles(positions, frequencies(RopeConfig(), 16), torch.float32)
    assert cos.dtype == dtype
    assert torch.equal(cos, exact_cos.to(dtype))
    assert torch.equal(sin, exact_sin.to(dtype))
    assert not torch.equal(cos[0, 0, 256], cos[0, 0, 257])


def test_a_model_made_on_the_meta_device_turns_as_any_other():
    with torch.device("meta"):
        on_meta = Decoder(tiny_config())
    assert on_meta._frequencies == tiny_model()._frequencies
