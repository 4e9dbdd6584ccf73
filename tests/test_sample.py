"""sample.py: text on stdout and nothing else, notices and figures on stderr, one sentence for what is wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import re
import signal
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


# ---- more flags


def test_a_stop_text_ends_before_itself(capsys, ckpt):
    free, _ = run(capsys, ckpt, "-p", "the", "-n", "30")
    stop = free[8:10]
    out, err = run(capsys, ckpt, "-p", "the", "-n", "30", "--stop", stop, "--stop", "never there")
    assert out == free[: free.index(stop)] + "\n"
    assert "stopped: a --stop text appeared" in err


def test_a_file_has_a_prompt_a_line(capsys, ckpt, tmp_path):
    (tmp_path / "prompts.txt").write_text("\ufeffthe fox\n\na 나는\n", encoding="utf-8")
    both, _ = run(capsys, ckpt, "--prompt_file", str(tmp_path / "prompts.txt"), "-n", "5")
    assert both == run(capsys, ckpt, "-p", "the fox", "-p", "a 나는", "-n", "5")[0]


def test_json_is_one_object_a_text_with_ids_reason_and_timings(capsys, ckpt):
    argv = ["-p", "the", "-p", "나는", "--num_samples", "2", "--temperature", "1", "--seed", "5", "-n", "6"]
    out, err = run(capsys, ckpt, *argv, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    model, tokenizer = nd.load_model(ckpt), nd.Tokenizer.load(ckpt)
    done = nd.complete(model, tokenizer, ["the", "나는"], 6, num_samples=2, seeds=[5, 5], temperature=1.0)
    assert [line["prompt"] for line in lines] == ["the", "the", "나는", "나는"]
    for line, wanted in zip(lines, done, strict=True):
        for name in ("text", "ids", "prompt_ids", "finish_reason", "seed", "forwards"):
            assert line[name] == getattr(wanted, name)
        assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert "나는" in out  # readable, not escaped
    assert "4x cut at --max_new_tokens 6" in err
    plain, _ = run(capsys, ckpt, *argv)
    assert plain == "".join(line["text"] + "\n" for line in lines)


def test_a_long_prompt_is_cut_where_asked_and_that_is_told(capsys, ckpt):
    text = "the fox " * 40
    out, err = run(capsys, ckpt, "-p", text, "-n", "3", "--max_prompt_tokens", "20")
    assert "tokens and max_prompt_tokens is 20" in err
    assert "at its end were cut" in err
    _, err = run(capsys, ckpt, "-p", text, "-n", "3", "--max_prompt_tokens", "20", "--truncation_side", "left")
    assert "at its beginning were cut" in err
    assert out.count("\n") == 1


def test_greedy_text_that_runs_in_circles_is_told(capsys, ckpt, tmp_path):
    model, tokenizer = nd.load_model(ckpt), nd.Tokenizer.load(ckpt)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every logit alike: the first id for ever
    nd.save_model(tmp_path, model, tokenizer)
    assert "the last 32 tokens repeat" in run(capsys, tmp_path, "-p", "the", "-n", "40", "--ignore_eos")[1]
    assert "repeat" not in run(capsys, tmp_path, "-p", "the", "-n", "31", "--ignore_eos")[1]
    assert "repeat" not in run(capsys, tmp_path, "-p", "the", "-n", "40", "--ignore_eos", "--temperature", "1")[1]


def test_exact_writes_the_same_text(capsys, ckpt):
    assert run(capsys, ckpt, "-p", "the", "-n", "20", "--exact")[0] == run(capsys, ckpt, "-p", "the", "-n", "20")[0]


def test_samples_share_one_prefill(capsys, ckpt):
    _, err = run(capsys, ckpt, "-p", "the fox", "--num_samples", "5", "--temperature", "1", "-n", "4")
    assert "4 forward passes" in err


def test_the_cache_is_compared_with_the_text_on_stdout_and_the_figures_on_stderr(capsys, ckpt, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    out, err = run(capsys, ckpt, "-p", "the fox", "-n", "12", "--compare_cache", "--repeats", "2")
    assert out == run(capsys, ckpt, "-p", "the fox", "-n", "12", "--ignore_eos")[0]
    assert "12 new ones, 2 runs each" in err
    assert "the same tokens both ways" in err
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert ("drawn in compare_cache.png" in err) == drawn == (tmp_path / "compare_cache.png").is_file()


def test_echo_shows_the_prompt_that_the_model_saw(capsys, ckpt):
    text = "the fox the fox the fox"
    out, _ = run(capsys, ckpt, "-p", text, "-n", "2", "--echo", "--max_prompt_tokens", "5", "--quiet")
    tokenizer = nd.Tokenizer.load(ckpt)
    seen = tokenizer.decode(tokenizer.encode(text)[:5])
    assert out.startswith(seen)
    assert not out.startswith(text)


def test_what_changes_nothing_is_told_and_the_checkpoints_own_settings_too(capsys, ckpt, tmp_path):
    assert "--seed, --num_samples changes nothing" in run(capsys, ckpt, "-n", "1", "--seed", "3", "--num_samples", "2")[1]
    from nanodecoder.config import GenerationConfig

    model, tokenizer = nd.load_model(ckpt), nd.Tokenizer.load(ckpt)
    model.generation = GenerationConfig(temperature=0.6, top_p=0.9)
    nd.save_model(tmp_path, model, tokenizer)
    told = run(capsys, tmp_path, "-n", "1", "--top_p", "0.8")[1]
    assert "the checkpoint's own settings are used: temperature 0.6\n" in told
    assert "settings are used" not in run(capsys, tmp_path, "-n", "1", "--temperature", "0")[1]


def test_samples_of_a_prompt_count_its_tokens_once(capsys, ckpt):
    alone = run(capsys, ckpt, "-p", "the fox", "-n", "2")[1].split()[0]
    assert run(capsys, ckpt, "-p", "the fox", "-n", "2", "--num_samples", "3", "--temperature", "1")[1].split()[0] == alone


# ---- talking


@pytest.fixture(scope="module")
def chatty(tmp_path_factory, ckpt):
    """The same model, with a chat template that refuses to be shouted at."""
    folder = tmp_path_factory.mktemp("chatty") / "model"
    nd.save_model(folder, tiny_model(vocab_size=300, max_seq_len=200), nd.Tokenizer.load(ckpt))
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{% if m.content == 'HEY' %}{{ raise_exception('no shouting') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return folder


def answers(folder, *turns: str, system: str | None = None, n: int = 7) -> list[str]:
    """What the model answers, each turn asked alone with all that was said before."""
    model, tokenizer = nd.load_model(folder), nd.Tokenizer.load(folder)
    messages = [] if system is None else [{"role": "system", "content": system}]
    said = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        said.append(nd.complete(model, tokenizer, [tokenizer.chat(messages)], n)[0].text)
        messages.append({"role": "assistant", "content": said[-1]})
    return said


def test_a_chat_answers_each_turn_in_the_light_of_those_before(capsys, chatty, monkeypatch):
    wanted = "".join(text + "\n" for text in answers(chatty, "a", "fox", system="the"))
    argv = ["--chat", "--system", "the", "-n", "7"]
    assert run(capsys, chatty, *argv, "-p", "a", "-p", "fox")[0] == wanted
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nfox\n"))
    out, err = run(capsys, chatty, *argv)
    assert out == wanted
    assert "Ctrl-C ends an answer" in err
    assert "(the answer was cut at --max_new_tokens)" in err


def test_a_chat_goes_on_after_a_turn_that_was_refused_and_begins_anew_on_request(capsys, chatty, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nHEY\n" + "the fox " * 40 + "\nfox\n/new\na\n"))
    out, err = run(capsys, chatty, "--chat", "-n", "7")
    first, second = answers(chatty, "a", "fox")
    assert out == f"{first}\n{second}\n{first}\n"
    assert "no shouting" in err
    assert "and the context holds 200" in err


def test_a_refused_turn_on_the_command_line_is_wrong_usage(capsys, chatty):
    with pytest.raises(UsageError, match="no shouting"):
        run(capsys, chatty, "--chat", "-p", "HEY")


def test_no_template_is_one_sentence(capsys, ckpt):
    with pytest.raises(
        (UsageError, nd.CheckpointError), match="this checkpoint has no chat template; give the text as a plain"
    ):
        run(capsys, ckpt, "--chat", "-p", "hi")


@pytest.mark.slow
def test_ctrl_c_ends_the_answer_and_not_the_chat(chatty):
    """As in a terminal: the first answer is interrupted, the second is whole, then stdin ends."""
    command = [sys.executable, "-c", SLOW, "--ckpt", str(chatty), "--chat", "-n", "25"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=0
    ) as running:
        running.stdin.write("a\n")
        running.stdin.flush()
        first = running.stdout.read(3)
        running.send_signal(signal.SIGINT)
        first += running.stdout.readline()
        running.stdin.write("fox\n")
        running.stdin.close()
        second = running.stdout.read()
        told = running.stderr.read()
    assert running.returncode == 0, told
    assert "Traceback" not in told
    whole = answers(chatty, "a", n=25)[0]
    assert whole.startswith(first.removesuffix("\n"))
    assert len(first) <= len(whole)
    assert second.count("\n") >= 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--temperature", "-1"], r"temperature must be 0 \(greedy\) or from 1e-37 to 1e37"),
        (["--num_samples", "0"], "--num_samples must be 1 or above, not 0"),
        (["-n", "-3"], "max_new_tokens must be 0 or above, not -3"),
        (
            ["-p", "the fox " * 40],
            "the prompt has .* new ones are asked for, and the context holds 64: shorten the prompt, or cut it with --max_p",
        ),
        (["-p", "-", "-p", "-"], "--prompt - is given twice"),
        (["-p", "half \udcec"], r"the prompt is not UTF-8 \(surrogates not allowed, at 5\)"),
        (["--chat", "--json"], "--json cannot go with --chat"),
        (["--chat", "--echo", "--num_samples", "2"], "--num_samples, --echo cannot go with --chat"),
        (["--compare_cache", "--no_cache"], "--cache cannot go with --compare_cache"),
        (["--compare_cache", "-p", "a", "-p", "b"], "--compare_cache takes one prompt, not 2"),
        (["--compare_cache", "--repeats", "0"], "at least 1 repeat"),
        (["--system", "x"], "--system is for --chat: add it"),
        (["--truncation_side", "left"], "--truncation_side is for --max_prompt_tokens: add it"),
        (["--stop", "</s> the"], "the stop text '</s> the' holds '</s>', a mark that no text shows; give that alone"),
        (["--exact", "--no_cache"], "exact fixes the shapes of passes that fill a cache"),
        (["--stop", ""], "stop must be a text or a list of texts, none of them empty"),
        (["--prompt_file", "no/such.txt"], r"--prompt_file no/such.txt cannot be read \(No such file or directory\)"),
        (["--max_prompt_tokens", "1", "-p", "the"], "max_prompt_tokens must be at least 2"),
        (["--truncation_side", "middle"], "invalid choice: 'middle'"),
        (["--presence_penalty", "nan"], "presence_penalty must be from -1e6 to 1e6"),
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
    done = process(*argv, env={"CUDA_VISIBLE_DEVICES": "", "PATH": "", "HF_HUB_OFFLINE": "1"})
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
@pytest.mark.parametrize("encoding", ["cp949", "cp1252", "ascii"])
def test_text_that_the_terminal_cannot_show_is_a_question_mark_and_told(ckpt, encoding):
    env = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    command = [sys.executable, "sample.py", "--ckpt", str(ckpt), "-p", "나는 🙂", "-n", "0", "--echo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode(encoding)
    lost = 1 if encoding == "cp949" else 3
    assert shown == ("나는 ?\n" if encoding == "cp949" else "?? ?\n")
    assert f"{lost} characters are none of {encoding} and were printed as ?; PYTHONUTF8=1 prints them" in done.stderr.decode()


@pytest.mark.slow
def test_json_escapes_what_the_encoding_lacks_and_notices_never_go_to_stdout(ckpt):
    env = os.environ | {"PYTHONIOENCODING": "cp949", "PYTHONUTF8": "0"}
    command = f"{sys.executable} sample.py --ckpt {ckpt} -p 'é 🙂' -n 2 --json 2>&-"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, env=env)
    assert done.returncode == 0
    (line,) = done.stdout.decode("cp949").splitlines()  # stderr is closed, and nothing but the text is here
    assert json.loads(line)["prompt"] == "é 🙂"


@pytest.mark.slow
def test_a_c_locale_prints_utf_8(ckpt):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))} | {
        "LC_ALL": "C"
    }
    command = [sys.executable, "sample.py", "--ckpt", str(ckpt), "-p", "나는 🙂", "-n", "0", "--echo", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"] == "나는 🙂"


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


def test_few_bits_state_their_price_and_the_text_still_comes(capsys, stories, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl named Lily. She loved to play outside in the park.")
    out, err = run(capsys, stories, "--quantize", "int8", "--quantize_report", str(text), "-n", "5", "--prompt", "Once")
    assert out.strip()
    assert re.search(
        r"int8 beside the plain weights: weights 1\.0 -> 0\.\d MiB; perplexity \d+\.\d+ -> \d+\.\d+; KL 0\.\d+ nats", err
    )
    assert "moved most, by the norm of the difference: " in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--quantize", "int2"], "choose from 'int8', 'int4'"),
        (["--quantize_report", "README.md"], "--quantize_report is for --quantize: add it"),
        (["--quantize", "int8", "--quantize_report", "no/such"], "--quantize_report no/such cannot be read"),
    ],
)
def test_wrong_ways_to_ask_for_few_bits(capsys, stories, argv, words):
    with pytest.raises((UsageError, SystemExit)) as caught:
        sample.main(["--ckpt", str(stories), *argv])
    assert words in str(caught.value) + capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- looking inside


def test_views_go_to_stderr_and_the_text_stays_the_same(capsys, ckpt):
    plain, _ = run(capsys, ckpt, "-p", "the fox", "-n", "4")
    out, err = run(capsys, ckpt, "-p", "the fox", "-n", "4", "--show", "all", "--look", "fox", "--at", "the", "--watch", " a")
    assert out == plain
    assert [line for line in err.splitlines() if line.startswith("== ")] == [
        "== tokens", "== probs", "== attention", "== lens", "== shapes", "== memory"
    ]  # fmt: skip
    assert "heads that look most at" in err
    assert (
        ", ".join(nd.inside.VIEWS) in next(f for f in dataclasses.fields(sample.Options) if f.name == "show").metadata["help"]
    )
    quiet = run(capsys, ckpt, "-p", "the fox", "-n", "0", "--show", "tokens", "--quiet")[1]
    assert quiet.startswith("== tokens\n")


def test_a_report_is_written_beside_the_text_or_refused_before_it(capsys, ckpt, tmp_path):
    path = tmp_path / "it.html"
    _, err = run(capsys, ckpt, "-p", "the fox", "-n", "2", "--report", str(path))
    assert path.read_text().startswith("<!doctype html>")
    assert f"report in {path}" in err
    assert "== tokens" not in err
    for wrong in (tmp_path, tmp_path / "no" / "it.html"):
        with pytest.raises(UsageError, match=r"--report .* cannot be written \((Is a directory|No such file or directory)\)"):
            run(capsys, ckpt, "-p", "the fox", "--report", str(wrong))
    with pytest.raises(UsageError, match="--look: 'cat' is not in the text"):
        run(capsys, ckpt, "-p", "the fox", "--report", str(tmp_path / "new.html"), "--look", "cat")
    assert not (tmp_path / "new.html").exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--look", "the"], "--look is for --show or --report: add one"),
        (["--show", "prob"], "--show knows no 'prob'; did you mean probs?"),
        (["--show", "all", "--chat"], "--show cannot go with --chat"),
        (["--report", "x.html", "--compare_cache"], "--report cannot go with --compare_cache"),
        (["--show", "lens", "-p", "the fox " * 60], "the prompt has .* and the context holds 64"),
    ],
)
def test_looking_where_nothing_can_be_seen_is_refused(capsys, ckpt, argv, words):
    with pytest.raises(UsageError, match=words):
        run(capsys, ckpt, *argv)


@pytest.mark.slow
def test_smollm2_shows_what_is_known_of_it(capsys, smollm2):
    _, err = run(
        capsys, smollm2, "-p", "Sarah fed the cat because it", "-n", "1", "--show", "attention", "--look", " it", "--at", " cat"
    )
    assert re.search(r"0  Sarah +0\.567 ", err)
    assert re.search(r"3  ␣cat +0\.063 ", err)
    assert "(block.head): 9.4 0.555, 3.8 0.536, 4.1 0.494, " in " ".join(err.split())  # wherever the line is broken
    _, err = run(capsys, smollm2, "-p", "The Shawshank", "-n", "2", "--show", "lens,probs", "--watch", " Redemption")
    assert "'␣Red' after 'ank' (position 3): 77.7% at the end; first on top after 28 of 30 blocks" in err
    assert "'emption' after '␣Red' (position 4)" in err
    korean, english = "나는 오늘 학교에 갔다.", "I went to school today."
    _, err = run(capsys, smollm2, "-p", korean, "-p", english, "-n", "0", "--show", "tokens")
    assert "text 1: 27 tokens\n" in err
    assert "text 2: 6 tokens\n" in err
    assert "�" not in err
