"""cli.py: a dataclass becomes --options, and what is wrong is one sentence."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tiny import tiny_model

from nanodecoder import cli, save_model
from nanodecoder.cli import UsageError, option


@dataclass
class Options:
    prompt: list[str] | None = option(None, "text", names=("p", "start"))
    top_k: int | None = option(None, "k")
    rate: float = option(0.5, "a rate of 100%")
    compile: bool = option(False, "faster")
    cache: bool = option(True, "kept")
    kind: str = option("a", "which", choices=("a", "b"))


def parse(*argv: str) -> Options:
    return cli.parse(Options, argv, "tool", "A tool.")


def test_defaults():
    assert parse() == Options(None, None, 0.5, False, True, "a")


@pytest.mark.parametrize("argv", [["--top_k", "5"], ["--top_k=5"], ["--top-k", "5"], ["--top-k=5"]])
def test_spellings_of_a_value(argv):
    assert parse(*argv).top_k == 5


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--compile"], True),
        (["--compile=False"], False),
        (["--compile", "true"], True),
        (["--no_compile"], False),
        (["--no-compile"], False),
        (["--compile", "--no_compile"], False),
    ],
)
def test_spellings_of_a_switch(argv, value):
    assert parse(*argv).compile is value


def test_a_switch_that_is_on_can_be_put_off():
    assert parse("--no-cache").cache is False
    assert parse("--cache=0").cache is False


def test_a_list_is_repeated_under_any_of_its_names():
    assert parse("--prompt", "a b", "-p", "c", "--start=--d-e").prompt == ["a b", "c", "--d-e"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--top-q", "5"], "unknown option '--top-q'; did you mean --top_k?"),
        (["--zzzzzzzz"], "unknown option '--zzzzzzzz'; tool --help lists what there is"),
        (["--to", "5"], "unknown option '--to'"),  # never a guess from a beginning
        (["word"], "unexpected word 'word'"),
        (["--top_k", "x"], "--top_k: takes a whole number, not 'x'"),
        (["--rate=y"], "--rate: takes a number, not 'y'"),
        (["--compile=maybe"], "--compile: takes true or false, not 'maybe'"),
        (["--kind", "c"], "--kind: invalid choice: 'c'"),
        (["--top_k"], "--top_k: expected one argument (a value that begins with - is given as --flag=-value)"),
    ],
)
def test_what_is_wrong_is_one_sentence(argv, words):
    with pytest.raises(UsageError) as caught:
        parse(*argv)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_tells_defaults(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    assert "a rate of 100% (default: 0.5)" in " ".join(shown.split())


@pytest.mark.parametrize("value", ["--well-known fact", "--- title-page", "--no-cache-at-all", "-5 degrees"])
def test_a_value_is_left_as_it_was_typed(value):
    assert parse(f"--prompt={value}").prompt == [value]
    if " " in value:
        assert parse("--prompt", value).prompt == [value]


@pytest.mark.parametrize("error", [UsageError("no such flag"), MemoryError("too large")])
def test_a_failure_leaves_with_its_status_and_one_line(error, capsys, monkeypatch):
    def fail(argv):
        raise error

    with pytest.raises(SystemExit) as left:
        cli.run(fail, "tool")
    assert left.value.code == (2 if isinstance(error, UsageError) else 1)
    assert capsys.readouterr().err == f"tool: {error}\n"


def test_python_running_out_of_memory_says_nothing_so_the_script_does(capsys):
    def fail(argv):
        raise MemoryError

    with pytest.raises(SystemExit):
        cli.run(fail, "tool")
    assert capsys.readouterr().err == "tool: out of memory: ask for less at a time\n"


def test_running_out_of_memory_is_one_line(capsys):
    def too_much(argv):
        torch.empty(2**50)

    with pytest.raises(SystemExit) as left:
        cli.run(too_much, "tool")
    assert left.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("tool: out of memory: ")
    assert said.count("\n") == 1


def test_ctrl_c_is_130():
    def interrupted(argv):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as left:
        cli.run(interrupted, "tool")
    assert left.value.code == 130


# ---- devices


def there(monkeypatch, cuda: int = 0, mps: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(("cuda", "mps", "wanted"), [(1, True, "cuda"), (0, True, "mps"), (0, False, "cpu")])
def test_auto_takes_cuda_then_mps_then_cpu(monkeypatch, cuda, mps, wanted):
    there(monkeypatch, cuda, mps)
    assert cli.choose_device("auto").type == wanted


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cuda", "--device cuda is not there"),
        ("mps", "--device mps is not there"),
        ("gpu", "--device gpu is not a device that torch knows; use auto, cpu, cuda, cuda:1 or mps"),
        ("meta", "--device meta is not supported"),
    ],
)
def test_a_device_that_is_not_there_is_one_sentence(monkeypatch, name, words):
    there(monkeypatch)
    with pytest.raises(UsageError, match=words):
        cli.choose_device(name)


def test_a_second_gpu_that_is_not_there(monkeypatch):
    there(monkeypatch, cuda=1)
    assert cli.choose_device("cuda:0").index == 0
    with pytest.raises(UsageError, match="--device cuda:1 is not there"):
        cli.choose_device("cuda:1")


def test_the_dtype_follows_the_device_unless_it_is_said(monkeypatch, tmp_path):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    save_model(tmp_path, tiny_model().bfloat16())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert cli.choose_dtype(None, cpu, tmp_path) == ("float32", None)
    assert cli.choose_dtype(None, cuda, tmp_path) == ("auto", None)
    assert cli.choose_dtype("bfloat16", cpu, tmp_path) == ("bfloat16", None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    for asked in ("bfloat16", "auto", None):
        assert cli.choose_dtype(asked, cuda, tmp_path) == ("float32", "cuda has no bfloat16: using float32")
    assert cli.choose_dtype("float16", cuda, tmp_path) == ("float16", None)


def test_peak_memory_is_in_bytes():
    assert 50 * 2**20 < cli.peak_memory(torch.device("cpu")) < 2**40
