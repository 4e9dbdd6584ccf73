"""training/recall.py: lines that say what they should, and that only what can see a letter recalls it."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import torch

import nanodecoder as nd
from nanodecoder.training import TrainConfig, recall, train
from nanodecoder.training.data import open_source, prepare
from nanodecoder.training.vocabulary import make_tokenizer


def test_a_line_asks_for_its_first_letter_from_so_far():
    for distance in (1, 5, 30):
        line = recall.line(random.Random(3), distance)
        assert line.index(recall.ASK) == distance
        assert line[0] == line[-1]
        assert line[0] in recall.KEYS
        assert set(line[1:distance]) <= set(recall.BETWEEN)
        assert len(line) == distance + 2


def test_letters_are_drawn_evenly_so_that_guessing_is_chance():
    lines = [json.loads(line)["text"] for line in recall.text(4000, (4, 9), seed=0).splitlines()]
    assert Counter(map(len, lines)) == {6: 2000, 11: 2000}
    firsts = Counter(line[0] for line in lines)
    assert all(abs(firsts[key] / 4000 - recall.CHANCE) < 0.02 for key in recall.KEYS)


def test_the_longest_line_is_one_row_of_the_context(tmp_path):
    path = tmp_path / "recall.jsonl"
    path.write_text(recall.text(20, (recall.farthest(16),), seed=0))
    source = open_source(str(path), None, "utf-8", "nfc")
    tokenizer = make_tokenizer("char", [recall.KEYS + recall.BETWEEN + recall.ASK], 0)
    data = prepare(source, tokenizer, block_size=16, val_fraction=0.1)
    assert data.train.batch(range(len(data.train)), 0).tokens.shape == (18, 16)


class Oracle:
    """Knows the first letter, or says another one."""

    device = torch.device("cpu")

    def __init__(self, right: bool) -> None:
        self.right = right

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """The letter at each place, from behind the mark, or its neighbour."""
        answers = ids[:, 1] + (not self.right)
        return torch.nn.functional.one_hot(answers, 50)[:, None].expand(-1, ids.shape[1], -1)


def test_answers_are_counted_at_the_question():
    tokenizer = make_tokenizer("char", [recall.KEYS + recall.BETWEEN + recall.ASK], 0)
    assert recall.recalled(Oracle(True), tokenizer, 7, 50, seed=1) == 1.0
    assert recall.recalled(Oracle(False), tokenizer, 7, 50, seed=1) == 0.0


@pytest.mark.slow
def test_full_attention_learns_it_and_a_window_only_within_its_reach(tmp_path):
    """A letter beyond all windows of a stack is guessed: of 400 lines, within four standard errors of chance."""
    far, found = recall.farthest(24), {}
    (tmp_path / "recall.jsonl").write_text(recall.text(2000, (3, far), seed=0))
    for window in (None, 6):
        out = tmp_path / str(window)
        train(
            TrainConfig(
                data=str(tmp_path / "recall.jsonl"),
                out_dir=str(out),
                n_layers=2,
                dim=32,
                n_heads=2,
                block_size=24,
                window=window,
                max_iters=80,
                eval_interval=80,
                device="cpu",
            )
        )
        asked = nd.load_model(out / "last"), nd.Tokenizer.load(out / "last")
        found[window] = [recall.recalled(*asked, distance, 400, seed=1) for distance in (3, far)]
    assert found[None] == [pytest.approx(1, abs=0.02)] * 2
    assert found[6][0] > 0.9
    assert abs(found[6][1] - recall.CHANCE) < 4 * (recall.CHANCE * (1 - recall.CHANCE) / 400) ** 0.5
