"""looks.py: words as one row and one column, what nobody can see, and who looks most."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import attention_options, splits
from tiny import tiny_config, tiny_model, tokens

import nanodecoder as nd
from nanodecoder.attention import visible
from nanodecoder.inside import trace
from nanodecoder.inside.looks import Looks, draw, first_token, impossible, lookers, merge, shares, summary, thin, towards
from nanodecoder.inside.pieces import Word, find, pieces, words


def units_of(sizes) -> list[Word]:
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return [Word(start, start + size, f" w{start}") for start, size in zip(starts, sizes, strict=True)]


@given(splits(12), attention_options())
def test_words_rows_sum_to_one_and_nothing_is_above_the_diagonal(sizes, options):
    units = units_of(sizes)
    weights = trace(tiny_model(**options), tokens(1, 12))["blocks.0.attention"][0]
    merged = merge(weights, units)
    torch.testing.assert_close(merged.sum(-1), torch.ones(merged.shape[:-1]))
    assert (merged.triu(1) == 0).all()
    for q, row in enumerate(units):
        for k, column in enumerate(units):
            wanted = weights[:, row.slice, column.slice].sum(-1).mean(-1)
            torch.testing.assert_close(merged[:, q, k], wanted)


@given(splits(12), attention_options())
def test_what_is_impossible_is_what_no_pair_of_tokens_can_see(sizes, options):
    config, units = tiny_config(**options), units_of(sizes)
    for layer, window in enumerate(config.windows):
        at = torch.arange(12)
        seen = visible(at[None], at, window, config.sparse_stride)[0]
        wanted = torch.tensor([[not seen[row.slice, column.slice].any() for column in units] for row in units])
        assert torch.equal(impossible(config, layer, units), wanted)


@given(st.integers(1, 40).flatmap(splits), st.integers(1, 20), st.data())
def test_thinning_keeps_order_and_loses_no_token(sizes, most, data):
    units = units_of(sizes)
    apart = [data.draw(st.sampled_from(units))]
    found = thin(units, most, apart)
    assert [found[0].start, *(unit.stop for unit in found)] == [0, *(unit.start for unit in found[1:]), sum(sizes)]
    assert len(found) <= max(most, 3) + 2
    assert apart[0] in found
    assert units[0] == found[0]
    if len(units) <= most:
        assert found == units


def looks_of(model, columns=12, sizes=None) -> tuple[Looks, list[Word]]:
    found = trace(model, tokens(1, columns))
    maps = torch.stack([found[f"blocks.{n}.attention"][0] for n in range(model.config.n_layers)])
    units, own = units_of([1] * columns), units_of(sizes or [1] * columns)
    look = own[-2]
    return Looks(tuple(range(len(maps))), tuple(units), maps, look, maps[:, :, look.slice].mean(2)), own


def test_the_heads_that_look_most_are_named_in_their_order():
    model = tiny_model()
    looks, own = looks_of(model, sizes=[3, 2, 4, 2, 1])
    order = towards(looks, own[1])
    assert len({(layer, head) for layer, head, _ in order}) == 8
    for layer, head, share in order:
        table = trace(model, tokens(1, 12))[f"blocks.{layer}.attention"][0, head]
        assert share == pytest.approx(float(table[9:11, 3:5].sum(-1).mean()))
    assert [share for *_, share in order] == sorted((share for *_, share in order), reverse=True)
    assert lookers(looks, own[1]).startswith(
        "heads that look most at '␣w3' from '␣w9' (block.head): {}.{} {:.3f}".format(*order[0])
    )


def test_a_row_sums_to_one_with_the_first_token_and_without():
    looks, own = looks_of(tiny_model(), sizes=[3, 2, 4, 2, 1])
    found = shares(looks, own)
    assert [share.word for share in found] != own
    assert {share.word for share in found} == set(own[:-1])
    assert sum(share.weight for share in found) == pytest.approx(1)
    assert sum(share.without_first for share in found) == pytest.approx(1)
    alone = shares(*looks_of(tiny_model()))
    assert next(share for share in alone if share.word.start == 0).without_first is None
    text = summary(looks, own, own[0])
    assert "mean of the 8 heads" in text
    assert first_token(replace(looks, look=own[0])) == []
    row = torch.zeros_like(looks.row)
    row[..., 1] = 1.0
    assert first_token(replace(looks, row=row)) == []
    row[:1, :3, 0] = 8.0
    (told,) = first_token(replace(looks, row=row))
    assert "3.000 of this row on average, and more than half of it in 3 of 8 heads" in told
    assert "heads that look most at '␣w0'" in text


def test_a_long_rows_rest_is_summed():
    looks, own = looks_of(tiny_model(), columns=30)
    text = summary(looks, own, None)
    assert "(17 more words take 0." in text
    assert "heads that look" not in text


def test_the_map_in_the_terminal_has_a_triangle_and_what_is_impossible():
    model = tiny_model(windows=3)
    looks, own = looks_of(model, columns=6)
    lines = draw(looks, model.config, own).splitlines()
    assert [len(line.split(" ", 4)[-1].strip()) for line in lines[:6]] == [2, 4, 6, 8, 10, 12]
    assert lines[5].strip().split()[-1].startswith("╌╌╌╌╌╌")
    assert "╌" not in lines[2]
    assert lines[-1].endswith("╌ impossible")
    assert "no map of 6 words" in draw(looks, model.config, own, most=5)


# ------------------------------------------------------------------------------------------------------------- what is known


@pytest.mark.slow
def test_it_looks_at_the_cat_in_three_heads_of_smollm2(smollm2):
    """In the mean over heads Sarah, the first token, has most; heads 9.4, 3.8 and 4.1 find the cat."""
    model, tokenizer = nd.load_model(smollm2), nd.Tokenizer.load(smollm2)
    ids = tokenizer.encode("Sarah fed the cat because it")
    row = pieces(tokenizer, ids)
    it, cat = find(row, " it"), find(row, " cat")
    found = trace(model, ids, keep=["attention"])
    maps = torch.stack([found[f"blocks.{n}.attention"][0] for n in range(30)])
    looks = Looks(tuple(range(30)), tuple(words(row)), maps, it, maps[:, :, it.slice].mean(2))
    assert [(layer, head) for layer, head, _ in towards(looks, cat)[:3]] == [(9, 4), (3, 8), (4, 1)]
    assert [round(share, 2) for *_, share in towards(looks, cat)[:3]] == [0.55, 0.54, 0.49]
    by_word = {share.word.text: round(share.weight, 3) for share in shares(looks, words(row))}
    assert "0.567 of this row on average, and more than half of it in 158 of 270 heads" in first_token(looks)[0]
    assert by_word == {"Sarah": 0.567, " because": 0.157, " it": 0.094, " the": 0.084, " cat": 0.063, " fed": 0.035}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "at", "share"),
    [
        ("Sarah fed the dog because it", " dog", 0.74),
        ("Tom put the cup on the table because it", " cup", 0.16),
    ],
)
def test_the_same_head_finds_the_dog_and_not_the_cup(smollm2, text, at, share):
    model, tokenizer = nd.load_model(smollm2), nd.Tokenizer.load(smollm2)
    ids = tokenizer.encode(text)
    row = pieces(tokenizer, ids)
    weights = trace(model, ids, [9], keep=["attention"])["blocks.9.attention"][0, 4]
    assert float(weights[find(row, " it").slice, find(row, at).slice].sum()) == pytest.approx(share, abs=6e-3)
