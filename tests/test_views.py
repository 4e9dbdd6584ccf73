"""views.py: what a run shows is what it computed, the run stays the same, and what cannot be shown is told before it starts."""

from __future__ import annotations

import pytest
import torch
from conftest import FIXTURES
from tiny import byte_level, sentence_piece, tiny_model

import nanodecoder as nd
from nanodecoder.cli import UsageError
from nanodecoder.inside import VIEWS, Asked, Views, trace, views, words
from nanodecoder.inside.looks import DRAWN

ALL = ",".join(VIEWS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return nd.Tokenizer.load(byte_level(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=380, max_seq_len=400)


def run(model, tokenizer, texts, n=3, *, show=ALL, samples=1, sampler=None, **asked):
    """A run with views as sample.py has it; -> what was found, and the new ids of every text."""
    sampler = sampler or nd.Sampler()
    prompts = [tokenizer.encode(text) if isinstance(text, str) else text for text in texts]
    made = Views(
        Asked.parse(show, *(asked.get(name) for name in ("look", "at", "watch"))), model, tokenizer, sampler, prompts, n
    )
    stepper = nd.Stepper(model, tokenizer=tokenizer, sampler=sampler, filters=made.filters)
    new = [[] for _ in range(len(prompts) * samples)]
    for number in range(len(new)):
        stepper.add(prompts[number // samples], max_new_tokens=n, seed=5 + number % samples, eos_ids=())
    while len(stepper):
        step = stepper.step()
        made.note(step)
        for row, index in zip(step.rows, step.ids.tolist(), strict=True):
            new[row].append(index)
    return made.look(new), new


def test_the_run_stays_as_it_is_without_views(model, tokenizer):
    sampler = nd.Sampler(temperature=1.0, top_k=20)
    _, new = run(model, tokenizer, ["the quick", "a lazy dog"], samples=2, sampler=sampler)
    for number, text in enumerate(["the quick", "a lazy dog"]):
        for sample in range(2):
            alone = nd.complete(
                model, tokenizer, [text], max_new_tokens=3, seeds=[5 + sample], temperature=1.0, top_k=20, ignore_eos=True
            )
            assert new[2 * number + sample] == alone[0].ids


def test_what_is_traced_is_the_pass_over_all_that_was_fed(model, tokenizer):
    found, new = run(model, tokenizer, ["the quick brown fox"], look=" quick", at="the")
    ids = [*tokenizer.encode("the quick brown fox"), *new[0][:-1]]
    plain = trace(model, ids)
    assert found.fed == len(ids)
    for layer in (0, 1):
        torch.testing.assert_close(found.looks.maps[layer], plain[f"blocks.{layer}.attention"][0])
    where = found.looks.look
    torch.testing.assert_close(found.looks.row[1], plain["blocks.1.attention"][0, :, where.slice].mean(1))
    assert torch.equal(found.lens.ids[-1, 1], plain.logits[0].argmax(-1))
    chances = plain.logits[0].softmax(-1)
    assert [one.id for one in found.expected] == ids[1:]
    assert found.expected[-1].probability == pytest.approx(float(chances[-2, ids[-1]]))
    prompt = len(ids) - 2
    for n, one in enumerate(found.choices):
        assert (one.chosen, one.position) == (new[0][n], prompt + n)
        best = one.candidates[0]
        assert best.logit == pytest.approx(float(plain.logits[0, prompt + n - 1, best.id]), abs=1e-4)


def test_a_long_texts_odds_are_computed_piece_by_piece(monkeypatch, model, tokenizer):
    whole, _ = run(model, tokenizer, ["the quick brown fox"], show="probs")
    monkeypatch.setattr(views, "PIECE", 3)
    again, _ = run(model, tokenizer, ["the quick brown fox"], show="probs")
    assert [(one.position, one.id, one.rank) for one in again.expected] == [(e.position, e.id, e.rank) for e in whole.expected]
    assert len(whole.expected) == whole.fed - 1


def test_only_what_was_asked_for_is_there(model, tokenizer):
    asked_for = {"probs": "expected", "attention": "looks", "lens": "lens", "shapes": "walk"}
    for view in VIEWS:
        found, _ = run(model, tokenizer, ["the fox"], show=view)
        there = {name for name, place in asked_for.items() if getattr(found, place) is not None}
        assert there == {view} & asked_for.keys()
        text = words(found)
        assert text.startswith(f"== {view}\n")
        assert text.count("== ") == 1


def test_slots_are_counted_for_every_text(model, tokenizer):
    found, _ = run(model, tokenizer, ["the quick brown fox", "a"], n=4, samples=3)
    lengths = [len(tokenizer.encode(text)) for text in ("the quick brown fox", "a")]
    assert found.reserved == max(lengths) + 3
    assert found.used == [length + 3 for length in lengths]
    assert found.batch == (6, 3 * sum(found.used))
    assert found.new == [4, 4]
    assert found.rectangle.mask[1] == (1,) * lengths[1] + (0,) * (lengths[0] - lengths[1])
    text = words(found)
    assert f"{found.used[1]} of {found.reserved} used" in text
    assert f"{found.batch[1]} of {6 * found.reserved} slots used, 6 rows" in text
    assert "the first text alone: of texts of several lengths" in text
    nothing, _ = run(model, tokenizer, ["the fox"], n=0)
    assert nothing.choices == []
    assert nothing.new == [0]
    assert (nothing.used, nothing.reserved) == ([0], 0)
    assert "slots used\n" not in words(nothing)
    assert words(run(model, tokenizer, ["the fox", "a"], n=0, show="tokens")[0]).count("nothing was fed") == 2


def test_rows_of_one_length_are_walked_together(model, tokenizer):
    found, _ = run(model, tokenizer, ["the fox", "the dog"], show="shapes")
    assert len(tokenizer.encode("the fox")) == len(tokenizer.encode("the dog")) == found.walk.columns
    assert found.walk.rows == 2


def test_a_watched_text_is_followed_as_far_as_the_text_goes_with_it(model, tokenizer):
    _, new = run(model, tokenizer, ["the fox"])
    prompt = len(tokenizer.encode("the fox"))
    wanted = tokenizer.decode(new[0][:2])
    if tokenizer.encode(wanted) != new[0][:2]:  # the tokenizer would cut it otherwise
        wanted = None
    found, _ = run(model, tokenizer, ["the fox"], watch=wanted or " dog")
    watched = found.lens.watched
    assert watched[0].position == prompt - 1
    assert watched[0].id == (new[0][0] if wanted else tokenizer.encode(" dog")[0])
    assert len(watched) == (2 if wanted else 1)
    if wanted:
        assert bool(watched[0].top[-1, 1])


def test_a_tokenizer_that_puts_a_space_in_front_watches_the_same_word(tmp_path):
    spaced = nd.Tokenizer.load(sentence_piece(tmp_path))
    model = tiny_model(vocab_size=400)
    first = [run(model, spaced, ["the quick"], show="lens", watch=text)[0].lens.watched[0].id for text in (" the", "the")]
    assert first[0] == first[1]
    assert spaced.token_bytes(first[0]) == b" the"


def test_a_long_text_is_thinned_and_says_so(model, tokenizer):
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog and " * 12)
    assert len(ids) > DRAWN
    found, _ = run(model, tokenizer, [ids], n=1, show="attention,lens", look=" lazy")
    assert found.looks.maps.shape[-1] == len(found.looks.units) <= 66
    assert found.looks.look in found.looks.units
    torch.testing.assert_close(found.looks.maps.sum(-1), torch.ones(2, 4, len(found.looks.units)))
    assert len(found.lens.positions) == views.LENS_POSITIONS
    assert found.lens.positions[-1] == len(ids) - 1
    assert "here: --report FILE.html draws it" in words(found)


def test_lens_positions_hold_the_end_of_the_prompt(model, tokenizer):
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog and " * 6)
    found, _ = run(model, tokenizer, [ids], n=100, show="lens")
    assert len(ids) - 1 in found.lens.positions
    assert len(found.lens.positions) == views.LENS_POSITIONS


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "opt", "phi3-partial", "smollm3", "gpt_neox", "mistral-window-4", "olmo2"])
def test_every_family_can_be_looked_into(name, tokenizer):
    model = nd.load_model(FIXTURES / name)
    ids = [3, 4, 5, 6, 7, 8]
    found, _ = run(model, tokenizer, [ids], show="probs,attention,lens,shapes,memory,tokens", n=2)
    assert found.looks.maps.shape[:2] == (model.config.n_layers, model.config.n_heads)
    assert "== memory" in words(found)


@pytest.mark.parametrize(
    ("show", "flags", "told"),
    [
        ("atention", {}, "--show knows no 'atention'; did you mean attention? (there is tokens, probs"),
        ("xyz", {}, "--show knows no 'xyz' (there is"),
        ("", {}, "--show takes a list of"),
        (",", {}, "--show takes a list of"),
        ("probs", {"look": "a"}, "--look is for --show attention: add it"),
        ("tokens,lens", {"at": "a"}, "--at is for --show attention"),
        ("attention", {"watch": "a"}, "--watch is for --show lens"),
    ],
)
def test_what_cannot_be_asked_is_told(show, flags, told):
    with pytest.raises(UsageError) as error:
        Asked.parse(show, *(flags.get(name) for name in ("look", "at", "watch")))
    assert str(error.value).startswith(told)


def test_a_word_that_is_not_there_is_told_before_anything_runs(model, tokenizer):
    for flags, told in (
        ({"look": " cat"}, "--look: ' cat' is not in the text ('the quick fox')"),
        ({"look": " quick", "at": " fox"}, "--at: ' fox' is not in the text up to there"),
        ({"watch": ""}, "--watch '' has no token to follow"),
    ):
        with pytest.raises(UsageError) as error:
            run(model, tokenizer, ["the quick fox"], **flags)
        assert str(error.value).startswith(told)


def test_a_text_too_long_to_look_at_is_told_with_its_size(monkeypatch, model, tokenizer):
    monkeypatch.setattr(views, "MOST", 1)
    ids = [5] * 300
    with pytest.raises(UsageError, match="301 tokens have 3 MiB of attention in each block, and here it may be 1"):
        run(model, tokenizer, [ids], n=2, show="attention")
    run(model, tokenizer, [ids], n=2, show="probs")


def test_all_is_all():
    assert Asked.parse("all", None, None, None).views == VIEWS
    assert Asked.parse("lens, tokens", None, None, None).views == ("tokens", "lens")
