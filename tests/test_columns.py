"""columns.py: what lines up in a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from strategies import texts

from nanodecoder.inside.columns import amount, bar, fit, size, table, visible, width, wrapped


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("cat", 3),
        ("나는", 4),
        ("猫", 2),
        ("é", 1),
        ("e\u0301", 1),
        ("\u1112\u1161\u11ab", 2),
        ("🙂", 2),
        ("\u200b", 0),
        ("½", 1),
        ("Ａ", 2),
    ],
)
def test_a_text_takes_so_many_places(text, places):
    """The third but last: 한 spelled in three parts."""
    assert width(text) == places


@given(texts)
def test_a_text_is_fitted_to_any_number_of_places(text):
    text = visible(text)
    for places in (0, 1, 2, 5, 80):
        assert width(fit(text, places)) == width(fit(text, places, right=True)) == places
    assert fit(text, 200).rstrip(" ") == text.rstrip(" ")


@given(texts, texts)
def test_columns_begin_at_one_place_whatever_stands_before_them(first, second):
    lines = table([[visible(first), "|x"], [visible(second), "|y"]], longest=30).split("\n")
    assert len({width(line[: line.rindex("|")]) for line in lines}) == 1


def test_numbers_stand_at_the_right():
    assert table([["a", "5"], ["나", "1,234"]], right=(1,)) == "a       5\n나  1,234"
    assert table([]) == ""


def test_a_long_cell_is_cut_where_it_says():
    assert table([["나는 오늘 학교에", "x"]], longest=7) == "나는 …   x"


def test_nothing_invisible_is_left():
    assert visible(" a\n\tb\r\u200b\x1b[2J") == "␣a↵⇥b␍\\u200b\\u001b[2J"


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (300 * 2**20, "300 MiB"), (3 * 2**31, "6.0 GiB")]
)
def test_bytes_in_the_unit_that_is_read_most_easily(n, text):
    assert size(n) == text


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0"), (999, "999"), (1234, "1.23 k"), (1e6, "1 M"), (999_900, "1,000 k"), (2.5e12, "2.5 T")]
)
def test_large_numbers_by_their_thousands(n, text):
    assert amount(n) == text


def test_shades_go_from_nothing_to_all():
    assert [bar(share) for share in (0.0, 0.19, 0.2, 0.5, 0.99, 1.0)] == [" ", " ", "░", "▒", "█", "█"]


@given(texts)
def test_a_sentence_is_broken_at_spaces_and_loses_nothing(text):
    text = visible(text).replace("␣", " ")
    lines = wrapped(text, 20).split("\n")
    assert " ".join(lines).split() == text.split()
    assert all(width(line) <= 20 or " " not in line for line in lines)


def test_a_wide_character_takes_two_places_of_a_line():
    assert wrapped("나는 오늘 학교에 갔다", 10) == "나는 오늘\n학교에\n갔다"
