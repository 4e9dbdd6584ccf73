"""training/findings.py: what is kept of a run, and that means, spreads and differences are what they say."""

from __future__ import annotations

import pytest

from nanodecoder.inside.columns import width
from nanodecoder.parts import CheckpointError
from nanodecoder.training.findings import RUNS, Finding, Speed, draw, ranges, record, recorded, summary, tables


def finding(variant: str, seed: int, loss: float, **values) -> Finding:
    sizes = {"parameters": 111_104, "ffn_dim": 192, "cache_bytes": 1024, "near": 1.0, "far": 0.125, "seconds": 2.5}
    return Finding(variant, seed, loss=loss, by_position=(loss,) * 32, **(sizes | values))


FOUND = [
    *(finding("base", seed, loss) for seed, loss in ((1, 2.0), (2, 2.2), (3, 2.4))),
    *(finding("mqa", seed, loss, far=1.0) for seed, loss in ((1, 2.1), (2, 2.3), (3, 2.5))),
    Finding("learned", 2, 111_000, 181, 1024, 3.0, (3.0,) * 16 + (None,) * 16, 1.0, 1.0, 2.5),
]
SPEEDS = {"base": Speed((90.0, 100.0, 300.0), (5.0, 6.0, 7.0))}


def test_what_was_recorded_is_read_again_and_a_torn_line_is_forgotten(tmp_path):
    assert recorded(tmp_path) == []
    for one in FOUND:
        record(tmp_path, one)
    whole = (tmp_path / RUNS).read_text()
    (tmp_path / RUNS).write_text(whole + whole.splitlines()[0][:50])
    assert recorded(tmp_path) == FOUND
    record(tmp_path, FOUND[0])  # on a line of its own again
    assert recorded(tmp_path) == [*FOUND, FOUND[0]]
    with (tmp_path / RUNS).open("a", encoding="utf-8") as file:
        file.write('{"variant": "of another version"}\n')
    before = (tmp_path / RUNS).read_text(encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"runs\.jsonl holds a line that is no run of this version"):
        recorded(tmp_path)
    assert (tmp_path / RUNS).read_text(encoding="utf-8") == before


def test_means_spreads_and_differences():
    """By hand: three losses 0.2 apart have a standard deviation of 0.2; seed by seed mqa is 0.1 above, without any spread."""
    base, mqa, learned = summary(FOUND, SPEEDS)
    assert (base["loss"], base["loss_spread"]) == (pytest.approx(2.2), pytest.approx(0.2))
    assert (base["less_base"], base["less_base_spread"]) == (0, 0)
    assert (mqa["less_base"], mqa["less_base_spread"]) == (pytest.approx(0.1), pytest.approx(0, abs=1e-9))
    assert (learned["less_base"], learned["less_base_spread"], learned["loss_spread"]) == (pytest.approx(0.8), None, None)
    assert (base["training_tokens_per_s"], base["training_tokens_per_s_range"]) == (100, [90, 300])
    assert mqa["by_position"] == pytest.approx([2.3] * 32)
    assert learned["by_position"] == [3.0] * 16 + [None] * 16


def test_the_table_says_all_of_it_in_80_columns():
    text = tables(summary(FOUND, SPEEDS), 16, (2, 13))
    lines = text.split("\n")
    assert max(map(width, lines)) <= 80
    assert lines[1].split() == "base 192 111,104 2.200 ± 0.200 1.0 KiB 100 6".split()
    assert lines[2].split() == "mqa 192 111,104 2.300 ± 0.200 +0.100 ± 0.000 1.0 KiB – –".split()
    assert "(trained on 16), and letters recalled (chance: 12.5%)" in text
    assert lines[-3].split() == "base 2.200 2.200 2.200 2.200 2.200 100% 12%".split()
    assert lines[-1].split() == "learned 3.000 3.000 3.000 – – 100% 100%".split()
    assert "–: learned has a vector for each of 16 positions" in text


@pytest.mark.parametrize("block_size", [16, 17, 64, 100])
def test_ranges_cover_twice_the_length_and_one_begins_behind_it(block_size):
    spans = ranges(block_size)
    assert [place for start, end in spans for place in range(start, end)] == list(range(2 * block_size))
    assert block_size in [start for start, _ in spans]


def test_the_chart_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    assert draw(FOUND, 16, (2, 13), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
