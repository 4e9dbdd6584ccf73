"""odds.py: probabilities are the model's, and what filters leave is what the sampler draws from."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import logits as some_logits
from tiny import byte_level, tiny_model

import nanodecoder as nd
from nanodecoder.inside.odds import Recorder, choice, expected, percent, show_choices, show_expected, speller
from nanodecoder.sampler import Rows, Sampler


def test_each_token_is_expected_by_the_logits_before_it():
    """Beside log-probabilities as `score` has them."""
    model = tiny_model()
    ids = [5, 9, 11, 3]
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[0]
    found = expected(logits, ids)
    scored = nd.score(model, None, ids)
    torch.testing.assert_close(torch.tensor([one.probability for one in found]).log(), torch.tensor(scored.logprobs).float())
    for one, row in zip(found, logits, strict=False):
        order = row.argsort(descending=True).tolist()
        assert order.index(one.id) + 1 == one.rank
        assert order[0] == one.best
        assert one.bits == pytest.approx(-math.log2(one.probability))
    assert [(one.position, one.id) for one in found] == [(0, 9), (1, 11), (2, 3)]
    assert expected(logits[:1], ids[:1]) == []
    assert expected(logits[:2], ids) + expected(logits[2:], ids, 2) == found


@given(
    some_logits(), st.sampled_from([0.0, 0.5, 2.0]), st.integers(0, 4), st.sampled_from([1.0, 0.5]), st.sampled_from([0.0, 0.2])
)
def test_what_is_left_is_what_the_sampler_draws_from(logits, temperature, top_k, top_p, min_p):
    sampler, row = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), logits[0]
    rows = Rows([3], [2], [[1, 0]], [1])
    chosen = int(sampler(row[None], rows))
    found = choice(row, chosen, sampler, [1, 0], 1)
    after = sampler.probabilities(row[None], rows)[0]
    assert found.left[-1][1] == int((sampler.filter(row[None], rows) > -math.inf).sum())
    assert found.left[0] == ("ids", len(row))
    counts = [n for _, n in found.left]
    assert counts == sorted(counts, reverse=True)
    assert chosen in {c.id for c in found.candidates}
    for c in found.candidates:
        assert c.filtered == pytest.approx(float(after[c.id]))
        assert c.probability == pytest.approx(float(row.softmax(-1)[c.id]))
        assert c.logit == float(row[c.id])


def test_each_filter_counts_what_it_leaves():
    """Ids of probability 1/2, 1/4, 1/8 and two of 1/16: four are the likeliest, three reach 0.85, two are half as likely."""
    row = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log()
    sampler = Sampler(temperature=1.0, top_k=3, top_p=0.8, min_p=0.5, banned_ids=[4])
    assert choice(row, 0, sampler, [0], 1).left == (("ids", 5), ("bans", 4), ("top_k 3", 3), ("top_p 0.8", 2), ("min_p 0.5", 2))
    assert choice(row, 0, Sampler(), [0], 1).left == (("ids", 5), ("temperature 0", 1))


def test_an_unlikely_choice_is_shown_all_the_same():
    found = choice(torch.arange(100.0).flip(0), 90, Sampler(temperature=9.0), [0], 1, top=4)
    assert [c.id for c in found.candidates] == [0, 1, 2, 90]


def test_the_recorder_changes_nothing_and_keeps_the_raw_logits():
    model, recorder = tiny_model(), Recorder()
    made = []
    for filters in ((), (recorder,)):
        stepper = nd.Stepper(model, sampler=Sampler(temperature=0.7, top_k=5), filters=filters)
        stepper.add([5, 6, 7], seed=3, max_new_tokens=4)
        stepper.add([5, 6], seed=4, max_new_tokens=4)
        made.append([stepper.step().ids.tolist() for _ in range(4)])
    assert made[0] == made[1]
    fed = [5, 6, 7, *(column[0] for column in made[0][:3])]
    with torch.no_grad():
        torch.testing.assert_close(recorder.logits[0], model(torch.tensor([fed]))[0, -1])


def test_words_say_what_was_chosen(tmp_path):
    tokenizer = nd.Tokenizer.load(byte_level(tmp_path))
    spell = speller(tokenizer)
    (space, letter), torn = tokenizer.encode(" a\n")[:1] + tokenizer.encode("\n"), tokenizer.encode("립")[0]
    assert (spell(space), spell(letter), spell(0)) == ("␣a", "↵", "<|end|>")
    assert spell(torn).startswith("⟨")
    row = torch.zeros(tokenizer.vocab_size)
    row[space], row[letter] = 5.0, 4.0
    text = show_choices([choice(row, letter, Sampler(temperature=1.0, top_k=2), [0], 1)], spell, Sampler(temperature=1.0))
    lines = text.splitlines()
    assert lines[0] == f"step 1, position 1: {tokenizer.vocab_size} ids → 2 after top_k 2"
    assert lines[3].startswith("▶  ↵")
    assert "out" in lines[4]
    assert "no token was generated" in show_choices([], spell, Sampler())
    told = show_expected(expected(torch.zeros(2, tokenizer.vocab_size), [space, letter]), ["␣a", "↵"], spell)
    assert f"{math.log2(tokenizer.vocab_size):.1f} bits in all" in told
    assert "one token" in show_expected([], ["a"], spell)


def test_small_probabilities_are_no_zeros():
    assert [percent(p) for p in (0.0, 1e-9, 0.0006, 0.777, 1.0)] == ["0.0%", "<0.1%", "0.1%", "77.7%", "100.0%"]


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "share"), [(0.5, 0.993), (1.0, 0.790), (2.0, 0.069)])
def test_smollm2_and_seoul_at_three_temperatures(smollm2, temperature, share):
    model, tokenizer = nd.load_model(smollm2), nd.Tokenizer.load(smollm2)
    ids = tokenizer.encode("The capital of South Korea is")
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[0, -1]
    (seoul,) = tokenizer.encode(" Seoul")
    found = choice(logits, seoul, Sampler(temperature=temperature), ids, 1)
    assert found.candidates[0].id == seoul
    assert found.candidates[0].filtered == pytest.approx(share, abs=6e-4)
    assert found.candidates[0].probability == pytest.approx(0.790, abs=6e-4)
