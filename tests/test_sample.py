"""sample.py: text on stdout and nothing else, notices and figures on stderr, one sentence for what is wrong."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from tiny import sentence_piece, tiny_model

import nanodecoder as nd
import sample
from nanodecoder.cli import UsageError


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ckpt")
    tokenizer = nd.Tokenizer.load(sentence_piece(folder / "tokenizer"))
    model = tiny_model(vocab_size=300, max_seq_len=64)
    nd.save_model(folder / "model", model, tokenizer)
    return folder / "model"


def run(capsys, ckpt, *argv: str) -> tuple[str, str]:
    sample.main(["--ckpt", str(ckpt), *argv])
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_the_text_is_what_complete_gives(capsys, ckpt):
    model, tokenizer = nd.load_model(ckpt), nd.Tokenizer.load(ckpt)
    wanted = nd.complete(model, tokenizer, ["the fox"], max_new_tokens=20)[0].text
    out, err = run(capsys, ckpt, "--prompt", "the fox", "-n", "20")
    assert out == wanted + "\n"
    assert re.search(
        r"^\d+ prompt \+ 20 new tokens, 20 forward passes, context \d+ of 64, stopped: cut at --max_new_tokens 20", err
    )
    assert re.search(
        r"prefill [\d,]+ tokens/s, decode [\d,.]+ tokens/s, first token after [\d.]+ s, peak memory [\d,]+ MiB$", err.strip()
    )
    assert err.count("\n") == 1


def test_echo_puts_the_prompt_in_front(capsys, ckpt):
    plain, _ = run(capsys, ckpt, "-p", "the fox", "-n", "5")
    assert run(capsys, ckpt, "-p", "the fox", "-n", "5", "--echo")[0] == "the fox" + plain


def test_several_texts_come_in_order_each_as_alone(capsys, ckpt):
    drawn = ["--temperature", "1", "--seed", "7", "-n", "12"]
    singles = [
        run(capsys, ckpt, "-p", text, *drawn[:3], str(7 + i), *drawn[4:])[0] for text in ("the", "a fox") for i in (0, 1)
    ]
    out, err = run(capsys, ckpt, "-p", "the", "-p", "a fox", "--num_samples", "2", *drawn)
    assert out == "".join(singles)
    assert err.strip().endswith("seed 7")


def test_a_drawn_seed_is_printed_and_makes_the_same_text(capsys, ckpt):
    out, err = run(capsys, ckpt, "--temperature", "1", "-n", "10")
    seed = err.strip().rsplit("seed ", 1)[1]
    assert run(capsys, ckpt, "--temperature", "1", "-n", "10", "--seed", seed)[0] == out


def test_quiet_says_nothing_beside_the_text(capsys, ckpt):
    assert run(capsys, ckpt, "-n", "3", "--quiet", "--top_k", "5")[1] == ""


def test_a_filter_that_greedy_ignores_is_told(capsys, ckpt):
    told = run(capsys, ckpt, "-n", "1", "--top_k", "5", "--top_p", "0.9")[1]
    assert "--top_k, --top_p changes nothing at temperature 0" in told
    off = run(capsys, ckpt, "-n", "1", "--top_k", "0", "--top_p", "1", "--min_p", "0")[1]
    assert "changes nothing" not in off


def test_nothing_asked_for(capsys, ckpt):
    out, err = run(capsys, ckpt, "-n", "0")
    assert out == "\n"
    assert "0 forward passes" in err
    assert "nothing was asked for" in err


def test_the_context_ends_the_text_with_its_reason(capsys, ckpt):
    assert "stopped: the context of 64 tokens is full" in run(capsys, ckpt, "-n", "500")[1]


def test_the_models_own_end_is_told_and_can_be_ignored(capsys, ckpt, tmp_path):
    model, tokenizer = nd.load_model(ckpt), nd.Tokenizer.load(ckpt)
    ids = nd.complete(model, tokenizer, ["the"], max_new_tokens=9)[0].ids
    from nanodecoder.config import GenerationConfig

    model.generation = GenerationConfig(eos_ids=(ids[5],))
    nd.save_model(tmp_path, model, tokenizer)
    out, err = run(capsys, tmp_path, "-p", "the", "-n", "9")
    assert "the model ended its text" in err
    longer, _ = run(capsys, tmp_path, "-p", "the", "-n", "9", "--ignore_eos")
    assert longer.startswith(out.removesuffix("\n"))
    assert len(longer) > len(out)


def test_cache_and_attention_paths_write_the_same(capsys, ckpt):
    texts = {run(capsys, ckpt, "-n", "15", *extra)[0] for extra in ([], ["--no_cache"], ["--attention", "explicit"])}
    assert len(texts) == 1


def test_a_prompt_comes_from_stdin(capsys, ckpt, monkeypatch):
    plain, _ = run(capsys, ckpt, "-p", "the fox", "-n", "5")
    monkeypatch.setattr("sys.stdin", io.StringIO("the fox\n"))
    assert run(capsys, ckpt, "-p", "-", "-n", "5")[0] == plain


def test_bfloat16_runs(capsys, ckpt):
    assert run(capsys, ckpt, "-n", "5", "--dtype", "bfloat16")[0].endswith("\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--temperature", "-1"], r"temperature must be 0 \(greedy\) or from 1e-37 to 1e37"),
        (["--num_samples", "0"], "--num_samples must be 1 or above, not 0"),
        (["-n", "-3"], "max_new_tokens must be 0 or above, not -3"),
        (["-p", "the fox " * 40], "the prompt has .* tokens, 100 new ones are asked for, and the context holds 64"),
        (["-p", "-", "-p", "-"], "--prompt - is given twice"),
        (["-p", "half \udcec"], r"the prompt is not UTF-8 \(surrogates not allowed, at 5\)"),
        (["--temprature", "1"], "unknown option '--temprature'; did you mean --temperature?"),
    ],
)
def test_wrong_usage_is_one_sentence(capsys, ckpt, argv, words):
    with pytest.raises(UsageError, match=words):
        run(capsys, ckpt, *argv)


def test_weights_that_are_no_numbers_are_a_failed_run_that_names_the_step(capsys, ckpt, tmp_path):
    model, tokenizer = nd.load_model(ckpt), nd.Tokenizer.load(ckpt)
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    nd.save_model(tmp_path, model, tokenizer)
    with pytest.raises(nd.CheckpointError, match="non-finite logits at step 1"):
        run(capsys, tmp_path, "-n", "5")


# ---- as a process


def process(*argv: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "sample.py", *argv], cwd=ROOT, capture_output=True, text=True, **options)


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["--ckpt", "no/such"], 1, "sample.py: there is no folder or file 'no/such'"),
        (["--ckpt", "no/such", "--device", "cuda:7"], 2, "sample.py: --device cuda:7 is not there"),
        (["--ckpt", "tests"], 1, "sample.py: there is no config.json in tests (found: "),
    ],
)
def test_a_failure_has_its_exit_status_and_no_traceback(argv, status, words):
    done = process(*argv, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""})
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(words)
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("redirect", ["| head -c 3", "> /dev/full", ">&-", "< /dev/null"])
def test_an_output_that_goes_away_or_is_full_is_no_traceback(ckpt, redirect):
    command = f"{sys.executable} sample.py --ckpt {ckpt} -p the -n 60 --quiet {redirect}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") <= 1


@pytest.mark.slow
def test_text_is_streamed_while_it_is_made(ckpt):
    """The first piece is readable before the last one exists."""
    command = [sys.executable, "-c", SLOW, "--ckpt", str(ckpt), "-p", "the", "-n", "30", "--quiet"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as running:
        first = running.stdout.read1(1)
        assert first
        assert running.poll() is None
        running.communicate()
    assert running.returncode == 0


SLOW = """
import sys, time
import nanodecoder as nd, sample
real = nd.Stepper.step
def step(self):
    time.sleep(0.05)
    return real(self)
nd.Stepper.step = step
sample.main(sys.argv[1:])
"""
