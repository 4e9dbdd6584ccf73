"""model.py: any split through the cache gives the same logits, rows do not see each other, no token sees its future."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import attention_options, splits
from tiny import tiny_config, tiny_model, tokens

from nanodecoder import Decoder, KVCache, RopeConfig

PATHS = pytest.mark.parametrize("path", ["fused", "explicit"])
CLOSE = {"atol": 2e-5, "rtol": 0}


@given(options=attention_options(), sizes=splits(12), path=st.sampled_from(["fused", "explicit"]))
def test_any_split_through_the_cache_gives_the_same_logits(options, sizes, path):
    model, x = tiny_model(**options), tokens()
    model.attention = path
    cache = KVCache(model.config, 1, 12)
    pieces = [model(piece, cache) for piece in x.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(x), **CLOSE)
    assert cache.lengths.tolist() == [12]


@given(options=attention_options(), data=st.data())
def test_rows_of_any_lengths_go_on_together_as_each_does_alone(options, data):
    model, x = tiny_model(**options), tokens(3, 14)
    cache, held = KVCache(model.config, 3, 14), [0, 0, 0]
    alone = [model(x[row : row + 1])[0] for row in range(3)]
    for _ in range(3):
        counts = [data.draw(st.integers(0, min(5, 14 - n))) for n in held]
        columns = max(1, *counts)
        chunk = torch.zeros(3, columns, dtype=torch.int64)
        for row, count in enumerate(counts):
            chunk[row, :count] = x[row, held[row] : held[row] + count]
        logits = model(chunk, cache, counts=counts)
        for row, count in enumerate(counts):
            torch.testing.assert_close(logits[row, :count], alone[row][held[row] : held[row] + count], **CLOSE)
        held = [n + count for n, count in zip(held, counts, strict=True)]


@PATHS
def test_padding_on_the_right_changes_nothing_without_a_cache_either(path):
    model, x = tiny_model(windows=(None, 3)), tokens(2, 8)
    model.attention = path
    padded = model(x, counts=[8, 3])
    torch.testing.assert_close(padded[1, :3], model(x[1:, :3])[0], **CLOSE)


@given(options=attention_options(), sizes=st.tuples(splits(12), splits(12)), learned=st.booleans())
def test_documents_in_one_row_are_each_as_if_alone(options, sizes, learned):
    model, x = tiny_model(**options, learned_positions=learned), tokens(2)
    numbers = torch.tensor([[n for n, size in enumerate(row) for _ in range(size)] for row in sizes])
    together = model(x, documents=numbers)
    alone = [torch.cat([model(piece) for piece in x[b : b + 1].split(row, 1)], 1) for b, row in enumerate(sizes)]
    torch.testing.assert_close(together, torch.cat(alone), **CLOSE)


def test_documents_go_without_a_cache_and_in_the_shape_of_the_tokens():
    model, x = tiny_model(), tokens()
    for wrong in (
        {"documents": torch.zeros(1, 5)},
        {"documents": x, "counts": [3]},
        {"documents": x, "cache": KVCache(model.config, 1, 12)},
    ):
        with pytest.raises(ValueError, match="documents must be of the shape of tokens"):
            model(x, **wrong)


@PATHS
def test_changing_a_token_moves_no_earlier_logit(path):
    model, x = tiny_model(), tokens()
    model.attention = path
    changed = x.clone()
    changed[0, 8] = (x[0, 8] + 1) % 97
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert (before[:, 8:] - after[:, 8:]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("length", [3, 4, 5, 9])
@pytest.mark.parametrize("chunk", [1, 3, 4, 6])
def test_a_window_holds_through_chunks_and_steps(length, chunk):
    """Prompts shorter and longer than the window of 4, whole and in chunks, then 6 steps: all as without a cache."""
    model, x = tiny_model(windows=4), tokens(1, 15)
    cache = KVCache(model.config, 1, 15)
    got = [model(piece, cache) for piece in x[:, :length].split(chunk, dim=1)]
    got += [model(x[:, i : i + 1], cache) for i in range(length, length + 6)]
    torch.testing.assert_close(torch.cat(got, 1), model(x[:, : length + 6]), **CLOSE)


def test_embedding_is_a_row_of_the_table():
    """embed(ids) is one-hot times the table."""
    model, x = tiny_model(), tokens()
    one_hot = torch.nn.functional.one_hot(x, 97).float()
    torch.testing.assert_close(model.embed(x), one_hot @ model.embed.weight)


def test_forward_is_trunk_then_head():
    model, x = tiny_model(), tokens()
    assert torch.equal(model(x), model.head(model.trunk(x)))
    assert model(x).shape == (1, 12, 97)
    assert model.trunk(x).shape == (1, 12, 64)


def test_the_paths_agree_through_the_whole_model():
    model, x = tiny_model(windows=(None, 5), qk_norm="head"), tokens(2)
    fused = model(x)
    model.attention = "explicit"
    torch.testing.assert_close(model(x), fused, **CLOSE)
    model.attention = "magic"
    with pytest.raises(ValueError, match="must be one of fused, explicit, not 'magic'"):
        model(x)


def test_layers_may_turn_differently():
    ropes = (RopeConfig(), RopeConfig(theta=1e6))
    model, x = tiny_model(rope=ropes), tokens()
    same = tiny_model(rope=RopeConfig())
    assert (model(x) - same(x)).abs().max() > 0.1
    cache = KVCache(model.config, 1, 12)
    pieces = [model(piece, cache) for piece in x.split(5, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(x), **CLOSE)


LONGROPE = RopeConfig(
    kind="longrope",
    original_max_seq_len=10,
    attention_factor=1.2,
    short_factors=(1.0,) * 8,
    long_factors=tuple(1.0 + i for i in range(8)),
)


@pytest.mark.parametrize("length", [9, 10, 11])
def test_longrope_goes_by_each_rows_own_length(length):
    """Just below, at and above the original length, alone and beside rows on the other side of it."""
    model, x = tiny_model(rope=LONGROPE), tokens(3, 14)
    together = model(x, counts=[length, 3, 14])
    for row, count in enumerate([length, 3, 14]):
        torch.testing.assert_close(together[row, :count], model(x[row : row + 1, :count])[0], **CLOSE)
    short = tiny_model(rope=replace(LONGROPE, long_factors=LONGROPE.short_factors))
    assert torch.allclose(model(x[:, :length]), short(x[:, :length]), atol=1e-4) == (length <= 10)


def test_a_cached_row_may_not_cross_longropes_original_length_either_way():
    model, x = tiny_model(rope=LONGROPE), tokens(1, 20)
    cache = KVCache(model.config, 1, 20)
    model(x[:, :8], cache)
    with pytest.raises(
        ValueError, match=r"row 0 holds 8 tokens \(at most 8\) and would be 12 long, across the original context"
    ):
        model(x[:, 8:12], cache)
    cache.truncate(0)
    torch.testing.assert_close(model(x[:, :12], cache), model(x[:, :12]), **CLOSE)
    torch.testing.assert_close(model(x[:, 12:13], cache), model(x[:, :13])[:, 12:], **CLOSE)
    cache.truncate(5)  # its five keys were turned for a long row
    with pytest.raises(ValueError, match=r"holds 5 tokens \(at most 13\) and would be 6 long"):
        model(x[:, 5:6], cache)
    cache.truncate(0)
    model(x[:, :6], cache)


def test_dynamic_rope_turns_anew_with_the_length_and_so_has_no_cache_beyond_it():
    rope = RopeConfig(kind="dynamic", factor=2.0, original_max_seq_len=10)
    model, plain, x = tiny_model(rope=rope), tiny_model(), tokens(2, 16)
    torch.testing.assert_close(model(x[:, :10]), plain(x[:, :10]), **CLOSE)
    assert (model(x[:, :11]) - plain(x[:, :11])).abs().max() > 1e-3
    ragged = model(x, counts=[16, 5])
    torch.testing.assert_close(ragged[1, :5], model(x[1:, :5])[0], **CLOSE)
    cache = KVCache(model.config, 2, 16)
    model(x[:, :10], cache)
    with pytest.raises(ValueError, match="row 0 would be 11 tokens long, and beyond 10 dynamic RoPE turns every position anew"):
        model(x[:, 10:11], cache)


def test_learned_positions_end_where_their_table_ends():
    model, x = tiny_model(rope=None, learned_positions=True, position_offset=2, max_seq_len=8), tokens(1, 9)
    cache = KVCache(model.config, 1, 9)
    pieces = [model(piece, cache) for piece in x[:, :8].split(3, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(x[:, :8]), **CLOSE)
    with pytest.raises(ValueError, match="row 0 would be 9 tokens long, and there are 8 learned positions"):
        model(x[:, 8:], cache)
    with pytest.raises(ValueError, match="there are 8 learned positions"):
        model(x)


def test_the_embedding_scale_multiplies_the_stream_and_not_the_table():
    """Scaling the table would scale a tied head too. Exact in float32; in bfloat16 the factor is rounded, as in training."""
    model, x = tiny_model(embed_scale=55.4256, tied_head=True), tokens()
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    table = model.embed.weight.clone()
    model(x)
    model.bfloat16()(x)
    torch.testing.assert_close(seen[0], table[x] * 55.4256)
    assert torch.equal(seen[1], table.bfloat16()[x] * torch.tensor(55.5, dtype=torch.bfloat16))
    assert torch.equal(tiny_model(embed_scale=55.4256, tied_head=True).embed.weight, table)


def test_there_is_nothing_to_restore_beside_the_parameters():
    """Buffers made on the meta device would come back as whatever memory held: there are none."""
    for options in ({}, {"rope": LONGROPE}, {"rope": None, "learned_positions": True}, {"norm": "layer"}):
        assert not list(tiny_model(**options).buffers())


def test_a_cache_made_for_another_model_is_refused():
    with pytest.raises(ValueError, match="the cache was made for another config"):
        tiny_model()(tokens(), KVCache(tiny_config(n_layers=3), 1, 20))


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not():
    tied, untied = tiny_model(tied_head=True), tiny_model()
    assert tied.lm_head.weight is tied.embed.weight
    assert untied.lm_head.weight is not untied.embed.weight
    assert "lm_head.weight" not in dict(tied.named_parameters())


def test_initial_weights_are_drawn_as_the_docstring_says():
    torch.manual_seed(0)
    model = Decoder(tiny_config(dim=256, ffn_dim=512, n_layers=4, qkv_bias=True))
    stds = {name: p.std().item() for name, p in model.named_parameters() if p.dim() == 2}
    for name, std in stds.items():
        wanted = 0.03953 / 8**0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.03953  # √(2 / (5 · 256))
        assert std == pytest.approx(wanted, rel=0.05), name
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.ones_like(p) if "norm" in name else torch.zeros_like(p)), name


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.zeros(5, dtype=torch.int64), r"shape \(B, T\).*not int64 of shape \(5,\)"),
        (torch.zeros(1, 0, dtype=torch.int64), r"at least \(1, 1\), not int64 of shape \(1, 0\)"),
        (torch.zeros(1, 5), "not float32 of shape"),
    ],
)
def test_tokens_of_the_wrong_kind_are_refused(bad, words):
    with pytest.raises(ValueError, match=words):
        tiny_model()(bad)


def test_a_cache_of_another_batch_or_dtype_is_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="the cache has 2 rows and tokens has 1"):
        model(tokens(), KVCache(model.config, 2, 20))
    with pytest.raises(ValueError, match=r"bfloat16 on cpu and the model torch\.float32.*KVCache\(…, device="):
        model(tokens(), KVCache(model.config, 1, 20, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="counts must be 1 numbers from 0 to 12"):
        model(tokens(), counts=[13])


def test_what_the_cache_keeps_carries_no_gradient():
    """A loop without no_grad, as in a notebook, must not chain every step to the one before."""
    model, cache = tiny_model(), KVCache(tiny_config(), 1, 20)
    logits = model(tokens(), cache)
    assert logits.requires_grad
    assert not cache.keys.requires_grad
    assert not cache.values.requires_grad


def test_training_reaches_every_parameter():
    """The loss is the caller's: cross_entropy(model(x), y)."""
    model, x = tiny_model(qkv_bias=True, o_bias=True, ffn_bias=True, qk_norm="head").train(), tokens(2)
    loss = torch.nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if not name.endswith("k_proj.bias"):  # adds the same to every score of a query, up to rounding, before the turn
            assert parameter.grad.abs().max() > 0, name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_computes_what_the_cpu_does(dtype):
    model, x = tiny_model(windows=(None, 5)).to(dtype), tokens(2)
    wanted = model(x).float()
    model = model.cuda()
    cache = KVCache(model.config, 2, 12, device="cuda", dtype=dtype)
    got = torch.cat([model(piece.cuda(), cache) for piece in x.split(5, dim=1)], 1).float().cpu()
    torch.testing.assert_close(got, wanted, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=0)
