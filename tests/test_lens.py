"""lens.py: the head on the stream, half by half, ends where the model does."""

from __future__ import annotations

import pytest
import torch
from test_trace import KINDS
from tiny import tiny_model, tokens

import nanodecoder as nd
from nanodecoder.inside import trace
from nanodecoder.inside.lens import HALVES, ONCE, Watched, gather, read, show, story

EVERY = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def lens_of(model, ids, follow=()):
    found = trace(model, ids)
    length, layers = found.tokens.shape[1], range(model.config.n_layers)
    places = [(index, place) for index, place, _ in follow]
    streams = [[found[f"blocks.{n}.{half}"][0] for half in ("mid", "out")] for n in layers]
    with torch.no_grad():
        parts = [read(model, two, range(length), places) for two in streams]
    return gather(layers, range(length), parts, follow), found


@EVERY
def test_after_the_last_block_it_says_what_the_model_says(options):
    model = tiny_model(**options)
    found, traced = lens_of(model, tokens(1, 9), [(5, 3, "five"), (7, 8, "seven")])
    chances = traced.logits[0].softmax(-1)
    assert torch.equal(found.ids[-1, 1], chances.argmax(-1))
    torch.testing.assert_close(found.probability[-1, 1], chances.amax(-1))
    torch.testing.assert_close(found.watched[0].probability[-1, 1], chances[3, 5])
    torch.testing.assert_close(found.watched[1].probability[-1, 1], chances[8, 7])
    assert [one.position for one in found.watched] == [3, 8]


@EVERY
def test_before_that_it_says_what_a_shorter_model_would(options):
    """After block 0 with everything behind it silenced: halves that add nothing."""
    if options.get("parallel"):
        pytest.skip("in a parallel block a stream after attention alone belongs to no shorter model")
    model, x = tiny_model(**options), tokens(1, 9)
    found, _ = lens_of(model, x)
    silent = {f"blocks.1.{half}": torch.zeros_like for half in ("attn", "ffn")}
    after_ffn = trace(model, x, replace=silent).logits[0].softmax(-1)
    after_attention = trace(model, x, replace=silent | {"blocks.0.ffn": torch.zeros_like}).logits[0].softmax(-1)
    for half, chances in enumerate((after_attention, after_ffn)):
        torch.testing.assert_close(found.probability[0, half], chances.amax(-1))
        assert torch.equal(found.ids[0, half], chances.argmax(-1))


def watched(probability, top) -> Watched:
    return Watched(7, " Red", 3, torch.tensor(probability), torch.tensor(top))


def test_the_story_names_the_block_and_the_half():
    one = watched([[0.01, 0.02], [0.5, 0.4], [0.3, 0.6]], [[False, False], [True, True], [False, True]])
    text = story(one, (0, 1, 2), "ank")
    assert text.startswith("'␣Red' after 'ank' (position 3): 60.0% at the end; first on top after 2 of 3 blocks")
    assert "(by the attention of block 1)" in text
    assert "raised most by the attention of block 1, from 2.0% to 50.0%" in text
    assert "attention +2.9, feed-forward +1.2" in text
    first = story(watched([[0.9, 0.8]], [[True, True]]), (0,), "a")
    assert "after 1 of 1 blocks" in first
    assert "from 0.0% to 90.0%" in first
    assert story(watched([[0.1, 0.2]], [[False, False]]), (0,), "a").endswith("20.0% at the end; it is never on top")


def test_the_terminal_shows_the_last_positions_block_by_block():
    model = tiny_model()
    found, _ = lens_of(model, tokens(1, 9), [(5, 8, "five")])
    lines = show(found, [f"t{n}" for n in range(9)], str, shown=2).splitlines()
    assert lines[0].split() == ["block", "after", "t7", "after", "t8"]
    assert lines[1].split()[:2] == ["0", str(int(found.ids[0, 1, 7]))]
    assert lines[2].split()[0] == "1"
    assert lines[3] == ONCE
    assert lines[4].startswith("'five' after 't8'")
    assert HALVES == ("attention", "feed-forward")


@pytest.mark.slow
def test_smollm2_thinks_of_red_in_its_28th_block(smollm2):
    model, tokenizer = nd.load_model(smollm2), nd.Tokenizer.load(smollm2)
    ids = tokenizer.encode("The Shawshank")
    red, _ = tokenizer.encode(" Redemption")
    found, _ = lens_of(model, ids, [(red, len(ids) - 1, " Red")])
    text = story(found.watched[0], found.layers, "ank")
    assert "77.7% at the end; first on top after 28 of 30 blocks" in text
    assert "by the feed-forward of block 27" in text
    assert "raised most by the feed-forward of block 29" in text
