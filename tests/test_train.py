"""train.py: one command from a text to a checkpoint; signals, resuming, and what it says to wrong input."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT

import nanodecoder as nd
import train as script
from nanodecoder.cli import UsageError
from nanodecoder.training.state import read_state

TEXT = "It was the best of times, it was the worst of times,\nit was the age of wisdom.\n" * 40
SMALL = (
    "--n_layers 1 --dim 32 --n_heads 2 --block_size 16 --batch_size 4 --warmup_iters 2 --device cpu --log_interval 1".split()
)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "times.txt"
    path.write_text(TEXT)
    return path


def start(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "train.py", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def wait_for(path, lines: int = 1, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not (path.is_file() and len(path.read_text().splitlines()) >= lines):
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.05)


def losses(folder) -> list[float]:
    return [
        entry["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines() if "loss" in (entry := json.loads(line))
    ]


def test_a_text_becomes_a_folder_that_samples(tmp_path, text, capsys):
    out = tmp_path / "out"
    script.main(["--data", str(text), "--out_dir", str(out), "--max_iters", "4", "--sample_interval", "2", *SMALL])
    said = capsys.readouterr()
    assert said.out.count("--- after step") == 2
    assert f"python sample.py --ckpt {out}" in said.err
    names = {path.name for path in out.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "metrics.jsonl"}
    assert names >= {"train.toml", "state", "last"}
    assert ("loss.png" in names) == bool(importlib.util.find_spec("matplotlib"))
    model, tokenizer = nd.load_model(out), nd.Tokenizer.load(out)
    assert nd.complete(model, tokenizer, [""], max_new_tokens=5, seeds=[1])[0].text
    assert model.generation.temperature == 0.8
    with pytest.raises(UsageError, match="holds a run already"):
        script.main(["--data", str(text), "--out_dir", str(out), *SMALL])


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="transformers is not installed")
@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ([], "qwen3"),
        (["--no_qk_norm"], "llama"),
        (["--norm", "layer", "--ffn", "gelu", "--positions", "learned", "--no_qk_norm", "--bias"], "gpt2"),
        (["--norm", "layer", "--norm_place", "post"], "nanodecoder"),
        (["--no_tied_head", "--n_kv_heads", "1"], "qwen3"),
    ],
)
def test_transformers_opens_the_folder_with_equal_logits_and_ids(tmp_path, text, capsys, flags, kind):
    out = tmp_path / "out"
    script.main(["--data", str(text), "--out_dir", str(out), "--max_iters", "2", *flags, *SMALL])
    assert json.loads((out / "config.json").read_text())["model_type"] == kind
    said = capsys.readouterr().err
    assert ("model_type nanodecoder" in said) == (kind == "nanodecoder")
    if kind == "nanodecoder":
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, their_tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    tokenizer, model = nd.Tokenizer.load(out), nd.load_model(out)
    ids = tokenizer.encode("it was the age")
    assert their_tokenizer("it was the age").input_ids == ids
    assert their_tokenizer.decode(ids, skip_special_tokens=True) == "it was the age" == tokenizer.decode(ids)
    with torch.no_grad():
        assert (theirs(torch.tensor([ids])).logits - model(torch.tensor([ids]))).abs().max() < 1e-5


def test_a_configuration_file_says_what_flags_do_not(tmp_path, text):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'data = "{text}"\nmax_iters = 3\ndim = 32\nn_heads = 2\nn_layers = 1\nblock_size = 16\n')
    out = tmp_path / "out"
    script.main(["--config", str(recipe), "--out_dir", str(out), "--max_iters", "2", "--device", "cpu", "--log_interval", "1"])
    assert len(losses(out)) == 2
    recipe.write_text("learning = 3\n")
    with pytest.raises(UsageError, match=r"sets learning, which train\.py does not have"):
        script.main(["--config", str(recipe)])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "give a text to learn from, --data FILE"),
        (["--resume", "nowhere"], "nowhere holds no run to resume"),
        (["--learning_rat", "1"], "did you mean --learning_rate"),
        (["--optimizer", "sgd"], "invalid choice: 'sgd'"),
    ],
)
def test_wrong_input_gets_a_sentence(flags, words):
    with pytest.raises(UsageError, match=words):
        script.main(flags)


def test_what_a_run_is_cannot_be_changed_when_it_goes_on(tmp_path, text):
    out = tmp_path / "out"
    script.main(["--data", str(text), "--out_dir", str(out), "--max_iters", "6", "--max_steps_now", "2", *SMALL])
    with pytest.raises(UsageError, match="--learning_rate, --seed would make another run of it"):
        script.main(["--resume", str(out), "--learning_rate", "1", "--seed", "3"])
    script.main(["--resume", str(out)])  # to the end: how far to go in one call is no part of the run
    assert len(losses(out)) == 6


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, text, number, status):
    out = tmp_path / "out"
    process = start("--data", str(text), "--out_dir", str(out), "--max_iters", "100000", "--eval_interval", "100000", *SMALL)
    wait_for(out / "metrics.jsonl", 3)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert f"go on with: python train.py --resume {out}" in said
    assert "Traceback" not in said
    step = read_state(out)["progress"]["step"]
    assert step == len(losses(out))
    script.main(["--resume", str(out), "--max_iters", str(step + 2)])
    assert len(losses(out)) == step + 2


@pytest.mark.slow
def test_a_run_killed_at_a_hundred_moments_goes_on_as_the_same_run(tmp_path, text):
    """SIGKILL while it saves after every step; in the end every loss and weight is that of the run which nobody killed."""
    torch.set_num_threads(1)  # forked processes cannot use the threads of this one
    flags = ["--data", str(text), "--max_iters", "300", "--eval_interval", "50", "--save_interval", "1", "--dropout", "0.1"]
    script.main([*flags, "--out_dir", str(tmp_path / "whole"), *SMALL])
    out, chance = tmp_path / "out", random.Random(0)
    script.main([*flags, "--out_dir", str(out), "--max_steps_now", "1", *SMALL])
    steps = set()
    for _ in range(100):
        process = multiprocessing.get_context("fork").Process(target=script.main, args=(["--resume", str(out)],))
        process.start()
        time.sleep(chance.random() * 0.3)
        process.kill()
        process.join()
        steps.add(read_state(out)["progress"]["step"])  # whole at any moment
        nd.load_model(out)
        nd.load_model(out / "last")
    assert len(steps) > 10
    script.main(["--resume", str(out)])
    assert losses(out) == losses(tmp_path / "whole")
    assert (out / "last" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "last" / "model.safetensors").read_bytes()
