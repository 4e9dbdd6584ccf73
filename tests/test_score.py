"""score.py: how likely each token of a text is, and what they come to together."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import byte_level, sentence_piece, tiny_model, tokens

import nanodecoder as nd
from nanodecoder.score import COLUMNS, Score

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the parity extra is not installed"
)


def ids_of(length: int, seed: int = 5) -> list[int]:
    return tokens(1, length, seed=seed)[0].tolist()


@torch.no_grad()
def directly(model: nd.Decoder, ids: list[int]) -> list[float]:
    """One pass over all of it and one softmax, as anybody would write it."""
    logprobs = model(torch.tensor([ids])).log_softmax(-1)[0]
    return [logprobs[place, index].item() for place, index in enumerate(ids[1:])]


# ---- a whole text


@needs_transformers
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_the_log_probabilities_are_those_of_transformers(name, tmp_path):
    from parity import oracle

    theirs, ids = oracle(name, tmp_path), ids_of(100)
    found = nd.score(nd.load_model(tmp_path), None, ids)
    x = torch.tensor([ids])
    wanted = theirs(x).logits[0, :-1].log_softmax(-1).gather(-1, x[0, 1:, None])[:, 0].tolist()
    assert found.logprobs == pytest.approx(wanted, abs=1e-4)
    assert found.perplexity == pytest.approx(theirs(x, labels=x).loss.exp().item(), rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"windows": 3, "final_softcap": 5.0}, {"learned_positions": True, "rope": None}])
def test_each_token_but_the_first_given_all_before_it(options):
    model, ids = tiny_model(**options), ids_of(40)
    found = nd.score(model, None, ids)
    assert found.ids == ids
    assert found.logprobs == pytest.approx(directly(model, ids), abs=1e-5)
    assert nd.score(model, None, torch.tensor(ids)) == found


def test_total_and_perplexity():
    found = Score([5, 6, 7], [math.log(0.5), math.log(0.125)])
    assert found.total == pytest.approx(math.log(1 / 16))
    assert found.perplexity == pytest.approx(4.0)
    assert Score([5, 6], [-1000.0]).perplexity == math.inf


def test_bos_is_given_and_not_scored(tmp_path):
    model = tiny_model(vocab_size=400)
    pieces = nd.Tokenizer.load(sentence_piece(tmp_path / "pieces"))
    with_bos = nd.score(model, pieces, "the quick brown fox")
    assert with_bos.ids == pieces.encode("the quick brown fox")
    assert (with_bos.ids[0], len(with_bos.logprobs)) == (pieces.bos_id, len(with_bos.ids) - 1)
    assert with_bos == nd.score(model, None, with_bos.ids)
    without = nd.Tokenizer.load(byte_level(tmp_path / "bytes"))
    assert len(nd.score(model, without, "ab").logprobs) == len(without.encode("ab")) - 1


def test_a_single_token_has_nothing_to_score(tmp_path):
    model, tokenizer = tiny_model(vocab_size=400), nd.Tokenizer.load(sentence_piece(tmp_path))
    for found in (nd.score(model, None, [5]), nd.score(model, tokenizer, "")):
        assert found.logprobs == []
        assert found.total == 0
        assert math.isnan(found.perplexity)


# ---- windows


@settings(max_examples=25)
@given(st.integers(2, 32), st.integers(2, 16), st.integers(1, 15))
def test_in_windows_every_token_is_scored_once_given_what_its_window_holds(length, window, stride):
    """The first window that reaches a token scores it, so that at least window - stride tokens stand before it."""
    assume(stride < window)
    model, ids = tiny_model(n_layers=1), ids_of(length)
    alone = {start: directly(model, ids[start : start + window]) for start in range(0, length - 1, stride)}
    wanted = []
    for place in range(1, length):
        start = next(start for start in alone if place < start + window)
        assert start == 0 or place - start >= window - stride
        wanted.append(alone[start][place - start - 1])
    assert nd.score(model, None, ids, window=window, stride=stride).logprobs == pytest.approx(wanted, abs=1e-5)


def test_what_the_windows_begin_with_is_not_seen_beyond_them():
    model, ids = tiny_model(), ids_of(30)
    other = [ids[0] + 1, *ids[1:]]
    found, changed = (nd.score(model, None, one, window=10, stride=4).logprobs for one in (ids, other))
    assert all(a != b for a, b in zip(found[:9], changed[:9], strict=True))
    assert found[9:] == changed[9:]


def test_a_text_longer_than_the_context_is_read_in_windows_of_it_half_by_half():
    model, ids = tiny_model(max_seq_len=16), ids_of(50)
    assert nd.score(model, None, ids) == nd.score(model, None, ids, window=16, stride=8)
    assert nd.score(model, None, ids, window=5) == nd.score(model, None, ids, window=5, stride=2)
    assert nd.score(model, None, ids, window=2) == nd.score(model, None, ids, window=2, stride=1)


@pytest.mark.parametrize("window", [None, 400])
def test_the_head_never_holds_more_than_256_positions_and_none_twice(window):
    model, ids = tiny_model(max_seq_len=1000), ids_of(700)
    held = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: held.append(inputs[0].shape[:-1].numel()))
    found = nd.score(model, None, ids, window=window)
    assert max(held) == COLUMNS == 256
    assert sum(held) == len(found.logprobs) == 699
    if window is None:
        assert found.logprobs == pytest.approx(directly(model, ids), abs=1e-5)


def test_a_model_in_training_mode_scores_in_eval_mode_and_comes_back():
    model, seen = tiny_model().train(), []
    model.norm.register_forward_hook(lambda *_: seen.append((model.training, torch.is_inference_mode_enabled())))
    nd.score(model, None, [5, 6, 7])
    assert (seen, model.training) == ([(False, True)], True)


# ---- what is refused


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ([5, 6], {"window": 1}, "window must be from 2 to the context of 128 tokens, not 1"),
        ([5, 6], {"window": 129}, "window must be from 2 to the context of 128 tokens, not 129"),
        ([5, 6], {"window": 8, "stride": 8}, "stride must be from 1 to 7, one less than the window, not 8"),
        ([5, 6], {"stride": 0}, "stride must be from 1 to 127, one less than the window, not 0"),
        ([], {}, "a text to score needs ids from 0 to 96, at least one"),
        ([5, 97], {}, "a text to score needs ids from 0 to 96, at least one"),
        ([-1, 5], {}, "a text to score needs ids from 0 to 96, at least one"),
        ([5, 6.5], {}, "ids must be a sequence of whole numbers"),
        ("hi", {}, "a text prompt needs a tokenizer"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_words(text, options, words):
    with pytest.raises(ValueError, match=words):
        nd.score(tiny_model(), None, text, **options)
