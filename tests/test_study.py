"""training/study.py: a comparison from the command to its table, made to its end in several goes, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT
from tiny import tiny_model

from nanodecoder import __main__ as command
from nanodecoder.cli import UsageError
from nanodecoder.training import study
from nanodecoder.training.data import Windows
from nanodecoder.training.findings import RUNS

TEXT = "It was the best of times, it was the worst of times,\nit was the age of wisdom.\n" * 40
SMALL = "--dim 16 --n_heads 2 --block_size 16 --batch_size 4 --max_iters 3 --recall_iters 2 --device cpu".split()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "times.txt"
    path.write_text(TEXT)
    return path


def compare(text, *more: str) -> None:
    command.main(["compare", "--data", str(text), "--out_dir", str(text.parent / "out"), *SMALL, *more])


def runs(text) -> list[dict]:
    return [json.loads(line) for line in (text.parent / "out" / RUNS).read_text().splitlines()]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(study, "ROUNDS", 1)
    monkeypatch.setattr(study, "LINES", 100)
    monkeypatch.setattr(study, "ASKED", 20)


@pytest.mark.slow
def test_a_comparison_from_the_command_to_its_table_and_on(text, capsys, quick):
    """One seed first; a second seed and another variant then make those runs alone."""
    told = text.parent / "figures.json"
    compare(text, "--variants", "mqa", "--seeds", "1", f"--json={told}")
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["variant", "base", "mqa"]
    assert "0 runs are there, 2 to make: about" in err
    assert "mqa, seed 1: loss " in err
    first = runs(text)
    figures = json.loads(told.read_text())
    assert [row["variant"] for row in figures["variants"]] == ["base", "mqa"]
    assert figures["runs"] == first
    assert figures["settings"]["max_iters"] == 3

    compare(text, "--variants", "mqa,learned,local", "--seeds", "2")
    out, err = capsys.readouterr()
    assert "2 runs are there, 6 to make" in err
    found = runs(text)
    assert found[:2] == first
    made = [(run["variant"], run["seed"]) for run in found]
    assert sorted(made) == sorted((name, seed) for name in ("base", "mqa", "learned", "local") for seed in (1, 2))
    for run in found:
        beyond = run["by_position"][16:]
        assert len(beyond) == 16
        assert (beyond == [None] * 16) == (run["variant"] == "learned")
        assert None not in run["by_position"][:16]
    assert {run["cache_bytes"] for run in found if run["variant"] == "mqa"} == {2 * 2 * 1 * 8 * 4}
    assert len({run["loss"] for run in found}) == 8  # another seed is another run

    compare(text, "--variants", "mqa", "--seeds", "1")
    assert "2 runs are there, 0 to make" in capsys.readouterr().err
    assert runs(text) == found


def test_a_run_that_was_left_unfinished_is_made_again_as_it_would_have_been(text, quick):
    compare(text, "--variants", "base", "--seeds", "1")
    (first,) = runs(text)
    (text.parent / "out" / RUNS).write_text("")  # its folder is there, its line is not
    compare(text, "--variants", "base", "--seeds", "1")
    (again,) = runs(text)
    assert again | {"seconds": 0} == first | {"seconds": 0}


@pytest.mark.slow
def test_ctrl_c_loses_the_running_run_alone(text):
    words = [sys.executable, "-m", "nanodecoder", "compare", "--data", str(text), "--out_dir", str(text.parent / "out"), *SMALL]
    words += ["--variants", "base", "--seeds", "500"]
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # where it is ignored the shell chose so
    )
    path = text.parent / "out" / RUNS
    end = time.monotonic() + 120
    while not (path.is_file() and path.read_text().count("\n") >= 2):
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert len(runs(text)) >= 2


def test_the_loss_at_a_position_is_the_mean_over_rows_there():
    model = tiny_model(max_seq_len=8)
    ids = torch.randint(3, 97, (5 * 8 + 1,), generator=torch.Generator().manual_seed(1))
    rows, targets = ids[:-1].view(5, 8), ids[1:].view(5, 8)
    with torch.no_grad():
        wanted = -model(rows).log_softmax(-1).gather(-1, targets[..., None])[..., 0].mean(0)  # (8,)
    assert study.loss_by_position(model, Windows(ids.numpy(), 8)) == pytest.approx(wanted.tolist(), rel=1e-5)
    learned = tiny_model(max_seq_len=5, rope=None, learned_positions=True)
    assert [loss is None for loss in study.loss_by_position(learned, Windows(ids.numpy(), 8))] == [False] * 5 + [True] * 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data", "-"], "give a text to learn from, --data FILE"),
        (["--data", "there/is/none.txt"], "does not exist"),
        (["--variants", "mqa,alibi"], "unknown variant 'alibi'"),
        (["--seeds", "0"], "--seeds must be 1 or above, not 0"),
        (["--block_size", "8"], "--block_size must be 16 or above"),
        (["--block_size", "400"], "tokens for validation, and a window takes 801"),
        (["--window", "16"], "--window must be from 2 to below --block_size"),
        (
            ["--variants", "local", "--window", "8"],
            "local: 2 layers with a window of 8 reach 14 tokens back, and a context of 16",
        ),
        (["--variants", "gqa", "--n_heads", "1"], "no model can be made of these sizes"),
        (["--json", "there/is/none.json"], "there is no folder there"),
        (["--device", "abacus"], "is not a device that torch knows"),
        (["--varients", "mqa"], "did you mean --variants"),
    ],
)
def test_what_is_refused_in_a_sentence_before_anything_is_written(text, words, told):
    with pytest.raises(UsageError, match=told):
        compare(text, *words)
    assert not (text.parent / "out").exists()


def test_without_data_it_says_what_would_do():
    with pytest.raises(UsageError, match="100 KB of plain text will do"):
        command.main(["compare"])


def test_runs_that_cannot_be_compared_are_not_mixed(text, quick):
    compare(text, "--variants", "base", "--seeds", "1")
    with pytest.raises(UsageError, match="made with --max_iters 3, not 4: they cannot be compared; name another --out_dir"):
        compare(text, "--max_iters", "4")
    text.write_text(TEXT + "It was the age of foolishness.")
    with pytest.raises(UsageError, match="holds runs of another text"):
        compare(text)
    assert len(runs(text)) == 1


def test_a_folder_of_something_else_is_left_alone(text):
    (text.parent / "out").mkdir()
    (text.parent / "out" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds something that is no comparison: name another"):
        compare(text)
    assert [path.name for path in (text.parent / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("words", [[], ["campare"]])
def test_an_unknown_command_names_those_that_there_are(words):
    with pytest.raises(UsageError, match="there is: verify, plan, compare"):
        command.main(words)
