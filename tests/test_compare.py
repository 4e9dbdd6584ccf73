"""compare.py: first what needs no clock, then both ways timed alike, as numbers and as a picture."""

from __future__ import annotations

import sys

import pytest
from tiny import tiny_model

import nanodecoder as nd
from nanodecoder.compare import Way, compare_cache, draw, table


def test_the_study_notes_counts():
    """A prompt of 7 and 50 new tokens: 50 passes both ways, 56 positions with the cache and 1,575 without."""
    cached, anew = compare_cache(tiny_model(), range(7), 50, repeats=2)
    assert (cached.forwards, cached.positions) == (50, 56)
    assert (anew.forwards, anew.positions) == (50, 1575)
    assert cached.ids == anew.ids
    assert [[len(run) for run in way.runs] for way in (cached, anew)] == [[50, 50], [50, 50]]
    shown = table(cached, anew, 7)
    for line in ("forward passes", "positions computed", "the same tokens both ways", "  7 to 12 tokens", "  51 to 56 tokens"):
        assert line in shown
    assert "56           1,575" in shown


def test_the_order_alternates_and_the_warm_up_does_not_count(monkeypatch):
    made = []

    class Watched(nd.Stepper):
        def __init__(self, *args, **options):
            made.append(options["use_cache"])
            super().__init__(*args, **options)

    monkeypatch.setattr("nanodecoder.compare.Stepper", Watched)
    cached, _ = compare_cache(tiny_model(), [5, 6], 4, repeats=3)
    assert made == [True, False, True, False, False, True, True, False]  # a warm-up each, then A B, B A, A B
    assert len(cached.runs) == 3


def test_medians_of_runs_and_of_steps():
    way = Way("a", True, runs=[[1.0, 2.0], [3.0, 3.0], [9.0, 1.0]])
    assert way.seconds == 6.0
    assert (way.at(0), way.at(1)) == (3.0, 2.0)


def test_it_samples_too_and_goes_past_an_end_token():
    cached, anew = compare_cache(tiny_model(), [5], 9, 1, sampler=nd.Sampler(1.0), seed=3)
    assert len(cached.ids) == 9
    assert cached.ids == anew.ids == nd.complete(tiny_model(), None, [[5]], 9, temperature=1.0, seeds=[3])[0].ids


def test_tokens_that_differ_are_told():
    a, b = Way("a", True, ids=[1, 2], runs=[[1.0, 1.0]]), Way("b", False, ids=[1, 3], runs=[[1.0, 1.0]])
    assert table(a, b, 4).endswith("the tokens differ from new token 2 on")


def test_a_picture_where_matplotlib_is_installed(tmp_path, monkeypatch):
    ways = compare_cache(tiny_model(), [5], 3, 1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw(*ways, 1, tmp_path / "a.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    assert draw(*ways, 1, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("n", "repeats", "words"),
    [
        (0, 3, "at least 1 repeat and 1 new token, not 3 and 0"),
        (5, 0, "at least 1 repeat and 1 new token, not 0 and 5"),
        (200, 1, "the prompt has 1 tokens, 200 new ones are asked for, and the context holds 128: ask for at most 128"),
    ],
)
def test_what_cannot_be_measured_is_refused(n, repeats, words):
    with pytest.raises(ValueError, match=words):
        compare_cache(tiny_model(), [5], n, repeats)
