"""rope.py against values computed by hand and published ones."""

from __future__ import annotations

import math

import pytest
import torch

from nanodecoder import RopeConfig
from nanodecoder.rope import angles, frequencies, rotate


def turned(vector: list[float], position: int, rope: RopeConfig | None = None) -> torch.Tensor:
    rope = rope or RopeConfig()
    x = torch.tensor(vector)[None, None, None]  # (1, 1, 1, D)
    return rotate(x, angles(torch.tensor([[position]]), rope, len(vector), [position + 1], torch.float32))[0, 0, 0]


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


def test_dynamic_stretch_has_the_published_frequencies():
    """d 16, theta 1e4, factor 2, original 16: unscaled up to there; at 24 the base is 22081.79."""
    rope = RopeConfig(kind="dynamic", factor=2.0, original_max_seq_len=16)
    assert frequencies(rope, 16, 16) == frequencies(RopeConfig(), 16)
    assert frequencies(rope, 16, 24)[:3] == pytest.approx([1, 0.28641497, 0.08203355], abs=1e-7)


def test_yarn_keeps_the_fast_pairs_and_divides_the_slow_ones():
    rope = RopeConfig(kind="yarn", factor=4.0, original_max_seq_len=64)
    plain, stretched = frequencies(RopeConfig(), 32), frequencies(rope, 32)
    assert stretched[0] == plain[0]
    assert stretched[-1] == pytest.approx(plain[-1] / 4, rel=1e-6)
    assert all(a / 4 - 1e-9 <= b <= a + 1e-9 for a, b in zip(plain, stretched, strict=True))


def test_yarns_ramp_begins_and_ends_at_whole_pairs_unless_told_otherwise():
    """d 64, original 4096: pair 10.47 turns 32 times, pair 22.51 once; rounded outwards the ramp goes from 10 to 23."""
    plain = frequencies(RopeConfig(), 64)
    for truncate, low, high in ((True, 10, 23), (False, 10.4715, 22.5133)):
        got = frequencies(RopeConfig(kind="yarn", factor=4.0, original_max_seq_len=4096, truncate=truncate), 64)
        for pair in (5, 11, 16, 22, 25):
            divided = min(max((pair - low) / (high - low), 0), 1)
            assert got[pair] == pytest.approx(plain[pair] * (1 - divided + divided / 4), rel=1e-4)


def test_longrope_divides_each_pair_by_its_own_number_for_short_and_long_rows():
    rope = RopeConfig(kind="longrope", original_max_seq_len=8, short_factors=(1.0, 2.0), long_factors=(4.0, 5.0))
    plain = frequencies(RopeConfig(), 4)
    assert frequencies(rope, 4, 8) == pytest.approx([plain[0], plain[1] / 2])
    assert frequencies(rope, 4, 9) == pytest.approx([plain[0] / 4, plain[1] / 5])


def test_a_fraction_of_a_head_turns_and_the_rest_passes():
    """Of 8 features the first 4 turn, 0 with 2 and 1 with 3, as a head of 4 would; the others pass as they are."""
    vector = [0.3, -1.2, 0.7, 2.0, 5.0, 6.0, 7.0, 8.0]
    got = turned(vector, 3, RopeConfig(fraction=0.5))
    torch.testing.assert_close(got[:4], turned(vector[:4], 3))
    assert got[4:].tolist() == vector[4:]


def test_the_attention_factor_multiplies_what_turns():
    vector = [0.3, -1.2, 0.7, 2.0]
    torch.testing.assert_close(turned(vector, 3, RopeConfig(attention_factor=1.5)), 1.5 * turned(vector, 3))


def test_linear_stretch_at_four_times_the_position_is_the_unstretched_angle():
    vector = [0.3, -1.2, 0.7, 2.0]
    torch.testing.assert_close(turned(vector, 40, RopeConfig(kind="linear", factor=4.0)), turned(vector, 10))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_neighbouring_positions_apart(dtype):
    """bfloat16 cannot tell position 256 from 257; the angles can, since they are cast once, at the end."""
    positions = torch.arange(4096)[None]
    cos, sin = angles(positions, RopeConfig(), 16, [4096], dtype)
    exact_cos, exact_sin = angles(positions, RopeConfig(), 16, [4096], torch.float32)
    assert cos.dtype == dtype
    assert torch.equal(cos, exact_cos.to(dtype))
    assert torch.equal(sin, exact_sin.to(dtype))
    assert not torch.equal(cos[0, 256], cos[0, 257])
