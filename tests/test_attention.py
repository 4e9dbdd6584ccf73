"""attention.py: the rule of who sees whom, and two paths to the same numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import attention_options
from tiny import redraw, tiny_config

from nanodecoder.attention import LIKE, Attention, Sight, explicit_attention, fused_attention, sight, sights, visible
from nanodecoder.cache import Placement, fresh
from nanodecoder.config import RopeConfig
from nanodecoder.rope import Turn, angles

BOTH = pytest.mark.parametrize("attend", [explicit_attention, fused_attention])
CPU = torch.device("cpu")


def test_a_query_sees_itself_and_what_came_before():
    """Two new tokens after three in the cache: q = 2, kv = 5."""
    seen = visible(torch.tensor([[3, 4]]), torch.arange(5))
    assert seen.int().tolist() == [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]


def test_a_window_counts_the_query_itself():
    seen = visible(torch.tensor([[3, 4]]), torch.arange(5), window=2)
    assert seen.int().tolist() == [[[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]]
    assert visible(torch.tensor([[3]]), torch.arange(5), window=1).int().tolist() == [[[0, 0, 0, 1, 0]]]


def test_a_stride_adds_every_kth_token_beyond_the_window():
    """A window of 2 and every third: position 7 sees 7 and 6, and at distances 3 and 6 the tokens 4 and 1."""
    seen = visible(torch.tensor([[7, 8]]), torch.arange(9), window=2, stride=3)
    assert [row.nonzero().flatten().tolist() for row in seen[0]] == [[1, 4, 6, 7], [2, 5, 7, 8]]


def test_rows_of_different_lengths_each_see_their_own():
    seen = visible(torch.tensor([[0], [3]]), torch.arange(4))
    assert seen.int().tolist() == [[[1, 0, 0, 0]], [[1, 1, 1, 1]]]


@BOTH
def test_the_study_notes_weights_mix_the_values(attend):
    """Weights 0.1, 0.7, 0.2 over values 1, 10, 100 give 27.1."""
    q = torch.tensor([1.0, 0.0])[None, None, None]  # (1, 1, 1, 2)
    k = torch.tensor([[math.log(w), 5.0] for w in (0.1, 0.7, 0.2)])[None, None]
    v = torch.tensor([[1.0, -1.0], [10.0, -10.0], [100.0, -100.0]])[None, None]
    out = attend(q, k, v, Sight(fresh(1, 1, None, CPU), torch.ones(1, 1, 1, 3, dtype=torch.bool)), scale=1.0)
    torch.testing.assert_close(out[0, 0, 0], torch.tensor([27.1, -27.1]))


@BOTH
def test_query_heads_share_key_value_heads_in_order(attend):
    """Query head h reads key/value head h // G: values 0 and 1 come out as 0, 0, 1, 1; a tiled expansion gives 0, 1, 0, 1."""
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 3, 8)
    v = torch.tensor([0.0, 1.0])[None, :, None, None].expand(1, 2, 3, 8)
    out = attend(q, k, v, Sight(fresh(1, 2, None, CPU), torch.ones(1, 1, 2, 3, dtype=torch.bool)), scale=1.0)
    assert out[0, :, 0, 0].tolist() == pytest.approx([0, 0, 1, 1])
    square = attend(q, k[:, :, :2], v[:, :, :2], sight(fresh(1, 2, None, CPU), None, _path(attend)), scale=1.0)
    assert square[0, :, 1, 0].tolist() == pytest.approx([0, 0, 1, 1])


def _path(attend) -> str:
    return "fused" if attend is fused_attention else "explicit"


@given(
    options=attention_options(),
    starts=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    columns=st.integers(1, 7),
    data=st.data(),
)
def test_the_two_paths_agree_wherever_the_rows_stand(options, starts, columns, data):
    """Every short cut of the fused path (triangle, single column, folded groups) against the formula with the full rule."""
    counts = [data.draw(st.integers(1, columns)) for _ in starts] if data.draw(st.booleans()) else [columns] * len(starts)
    at = Placement(tuple(starts), tuple(counts), tuple(starts), columns, max(map(sum, zip(starts, counts, strict=True))), CPU)
    n_heads, n_kv_heads, width = options["n_heads"], options["n_kv_heads"], options["head_dim"]
    q = torch.randn(len(starts), n_heads, columns, width)
    k, v = (torch.randn(len(starts), n_kv_heads, at.extent, width) for _ in range(2))
    for window in options["windows"]:
        fused = fused_attention(q, k, v, sight(at, window, "fused"), scale=width**-0.5)
        explicit = explicit_attention(q, k, v, sight(at, window, "explicit"), scale=width**-0.5)
        for row, count in enumerate(counts):
            torch.testing.assert_close(fused[row, :, :count], explicit[row, :, :count], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_whatever_strides_a_kernel_returns_the_heads_come_back_in_order(monkeypatch, layout):
    """CUDA's memory-efficient kernel returns (B, T, H, D) seen as (B, H, T, D), which cannot be viewed otherwise."""
    real = torch.nn.functional.scaled_dot_product_attention

    def kernel(*args, **options):
        out = real(*args, **options)
        return out.transpose(1, 2).contiguous().transpose(1, 2) if layout == "transposed" else out.contiguous()

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    at = Placement((4, 2), (3, 3), (4, 2), 3, 7, CPU)
    q, k, v = torch.randn(2, 6, 3, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    fused = fused_attention(q, k, v, sight(at, None, "fused"), 0.3)
    torch.testing.assert_close(fused, explicit_attention(q, k, v, sight(at, None, "explicit"), 0.3), atol=2e-6, rtol=1e-5)


def test_the_explicit_paths_softmax_is_taken_in_float32():
    q, k, v = (torch.randn(1, 1, 1, 8), torch.randn(1, 1, 600, 8), torch.randn(1, 1, 600, 8))
    see = Sight(fresh(1, 1, None, CPU), torch.ones(1, 1, 1, 600, dtype=torch.bool))
    half = [t.bfloat16() for t in (q, k, v)]
    scores = (half[0] @ half[1].mT).float()
    wanted = (scores.softmax(-1).bfloat16() @ half[2]).float()
    assert torch.equal(explicit_attention(*half, see, 1.0).float(), wanted)


def test_the_short_cuts_are_taken_where_they_hold_and_nowhere_else():
    prompt = fresh(2, 5, None, CPU)
    assert sight(prompt, None, "fused").causal
    assert sight(prompt, 5, "fused").causal
    assert sight(prompt, 4, "fused").mask is not None
    step = Placement((7, 7), (1, 1), (7, 7), 1, 8, CPU)
    assert sight(step, None, "fused") == Sight(step)
    assert sight(step, 7, "fused").mask is not None
    assert sight(Placement((7, 6), (1, 1), (7, 6), 1, 8, CPU), None, "fused").mask is not None
    assert sight(Placement((3, 3), (2, 2), (3, 3), 2, 5, CPU), None, "fused").mask is not None
    for at in (prompt, step):
        assert sight(at, None, "explicit").mask is not None


def test_rows_alike_share_a_call_and_only_real_tokens_are_looked_at():
    """Three prompts of 5, 5 and 2 tokens, and a row that is fed nothing: two triangles, and the stream holds 12 tokens."""
    at = fresh(4, 5, [5, 5, 0, 2], CPU)
    see = sights(at, None, "fused")
    assert [(s.at.first_row, len(s.at.starts), s.at.first_token, s.at.columns, s.causal) for s in see] == [
        (0, 2, 0, 5, True),
        (3, 1, 10, 2, True),
    ]


def test_single_tokens_of_rows_of_about_one_length_share_a_call():
    starts = (3, LIKE - 1, LIKE, 2 * LIKE + 1, 2 * LIKE + 1, 4)
    ones = (1,) * len(starts)
    see = sights(Placement(starts, ones, starts, 1, 2 * LIKE + 2, CPU), None, "fused")
    assert [(s.at.first_row, len(s.at.starts), s.at.extent, s.mask is None) for s in see] == [
        (0, 2, LIKE, False),
        (2, 1, LIKE + 1, True),
        (3, 2, 2 * LIKE + 2, True),
        (5, 1, 5, True),
    ]
    gpu = sights(Placement(starts, ones, starts, 1, 2 * LIKE + 2, torch.device("meta")), None, "fused")
    assert [(s.at.first_row, len(s.at.starts)) for s in gpu] == [(0, 6)]  # one call costs more there than looking further


def one_layer(turning: bool) -> tuple[Attention, Turn | None]:
    layer = Attention(tiny_config())
    redraw(layer)
    return layer, angles(torch.arange(6)[None], RopeConfig(), 16, [6], torch.float32) if turning else None


@pytest.mark.parametrize("turning", [False, True])
def test_without_positions_one_layer_cannot_tell_the_order(turning):
    """The last output is the same when earlier tokens are shuffled; with RoPE it is not."""
    layer, turn = one_layer(turning)
    x = torch.randn(1, 6, 64)
    shuffled = x[:, [3, 0, 4, 2, 1, 5]]
    see = sights(fresh(1, 6, None, CPU), None, "fused")
    difference = (layer(x, turn, see)[0, -1] - layer(shuffled, turn, see)[0, -1]).abs().max()
    assert (difference > 1e-3) == turning
    assert turning or difference < 1e-5
