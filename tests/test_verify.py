"""verify.py: a checkpoint that computes the same passes; a mistake is named by the first place that leaves."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys

import pytest
import torch
from conftest import FIXTURES, ROOT

import nanodecoder as nd
from nanodecoder import verify
from nanodecoder.cli import UsageError
from nanodecoder.verify import CHUNKS, EXACT, STREAMED, compare_logits, findings

NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/expected.safetensors"))


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="the parity extra is not installed")


@pytest.mark.parametrize("name", NAMES)
def test_every_family_passes_at_every_place(name, transformers, capsys):
    verify.main(["--ckpt", str(FIXTURES / name), "--against", "transformers", "--max_tokens", "24", "--device", "cpu"])
    out = capsys.readouterr().out
    assert out.startswith("as transformers computes it: ")
    assert "over 24 tokens, logits within " in out


def test_a_mistake_is_named_by_the_first_place_that_leaves(transformers, capsys, monkeypatch):
    """Ours reads another theta than theirs: embedding and layer 0's values agree, its queries do not."""
    real = nd.checkpoint.read_json

    def read(path):
        raw = real(path)
        return raw | {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}} if path.name == "config.json" else raw

    monkeypatch.setattr(nd.checkpoint, "read_json", read)
    with pytest.raises(
        nd.CheckpointError, match=r"differs from transformers: \d+ of 13 places, first layer 0: query after RoPE"
    ):
        verify.main(["--ckpt", str(FIXTURES / "mistral-window-4"), "--against", "transformers", "--all"])
    lines = capsys.readouterr().out.splitlines()
    assert "embedding" in lines[0]
    assert lines[1].endswith("<- first to leave")


NAMED = ["in one ragged batch", "exact", EXACT, "without the cache", f"in chunks of {', '.join(map(str, CHUNKS))}"]


def found(model, prompts=None, tokenizer=None, new=6) -> dict[str, verify.Finding]:
    prompts = prompts or [[5, 9, 11, 3, 7], [4], list(range(3, 40))]
    texts, reference = verify._alone(model, prompts, new)
    return {finding.way: finding for finding in findings(model, tokenizer, prompts, texts, reference)}


@pytest.mark.parametrize("name", NAMES)
def test_every_family_gives_the_same_however_it_is_asked(name):
    model = nd.load_model(FIXTURES / name)
    for way, finding in found(model, [[5, 9, 11, 3, 7], [4], list(range(3, 17))]).items():
        assert finding.changed == 0, (way, finding.first)
        assert finding.size < 5e-5, way
        assert not finding.apart
        assert finding.number == {EXACT: 8}.get(way, 18)


@pytest.mark.slow
def test_a_whole_run_prints_a_line_for_every_way_and_ends_well(capsys, stories):
    verify.main(["--ckpt", str(stories), "--device", "cpu", "-n", "5", "--max_tokens", "20"])
    out = capsys.readouterr().out
    assert "float32 on cpu: prompts of 2, 6, 20 tokens and 5 new ones each" in out
    for way in [*NAMED, "explicit attention", "compiled", "compiled, in one ragged batch", STREAMED]:
        assert f"\n{way} " in out
    assert out.strip().rsplit("\n", 1)[-1].startswith("all as it should be, in ")
    assert out.count("0 of 15 ") == 9


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_smaller_types_state_their_distance_and_do_not_fail(capsys, stories, dtype):
    verify.main(["--no_compile", "--ckpt", str(stories), "--device", "cpu", "-n", "4", "--max_tokens", "20", "--dtype", dtype])
    out = capsys.readouterr().out
    assert f"{dtype} on cpu" in out
    assert "\nitself in float32 " in out
    if importlib.util.find_spec("transformers"):
        assert f"\ntransformers in {dtype} and float32 " in out


def test_a_cache_that_forgets_is_found_with_the_first_token_that_changed(monkeypatch, capsys, stories):
    """Planted: with more than one row, the cache drops what the first slot held."""
    from nanodecoder.cache import LayerCache

    real = LayerCache.read

    def forgets(self, part):
        keys, values = real(self, part)
        return (keys.clone().index_fill_(2, torch.tensor([0]), 0), values) if len(self.keys) > 1 else (keys, values)

    monkeypatch.setattr(LayerCache, "read", forgets)
    with pytest.raises(nd.CheckpointError, match=r"in one ragged batch: \d+ of 18 tokens changed, first in text \d at"):
        verify.main(["--no_compile", "--ckpt", str(stories), "--device", "cpu", "-n", "6", "--max_tokens", "20"])


def test_exact_bits_that_differ_fail_in_any_type(monkeypatch, capsys, stories):
    """Planted: exact passes look at all slots that the longest row needs."""
    from nanodecoder import batch

    monkeypatch.setattr(batch.Blocks, "_decode", lambda self, cache, seats: real(self, cache, seats) + noise(seats))
    with pytest.raises(nd.CheckpointError, match=r"exact: bits alone and in a batch: [1-8] of 8 texts changed"):
        verify.main(
            ["--no_compile", "--ckpt", str(stories), "--device", "cpu", "-n", "4", "--max_tokens", "20", "--dtype", "bfloat16"]
        )


real = nd.batch.Blocks._decode


def noise(seats) -> float:
    return 0.25 * sum(seat is not None for seat in seats)


def test_a_text_that_is_streamed_otherwise_fails(monkeypatch, capsys, stories):
    from nanodecoder.tokenizer import Stream

    monkeypatch.setattr(Stream, "finish", lambda self: "!")
    monkeypatch.setattr(
        verify,
        "complete",
        lambda *args, **options: [
            dataclasses.replace(done, text=done.text.removesuffix("!")) for done in nd.complete(*args, **options)
        ],
    )
    with pytest.raises(nd.CheckpointError, match="streamed and whole: 3 of 3 texts changed, first in text 1"):
        verify.main(["--no_compile", "--ckpt", str(stories), "--device", "cpu", "-n", "6", "--max_tokens", "20"])


def test_a_small_mistake_that_changes_no_token_fails_by_its_size(monkeypatch, capsys, stories):
    """Planted: in a batch, values are a thousandth too large."""
    from nanodecoder.cache import LayerCache

    real = LayerCache.write
    monkeypatch.setattr(LayerCache, "write", lambda self, k, v: real(self, k, v * (1.001 if len(self.keys) == 3 else 1.0)))
    with pytest.raises(nd.CheckpointError, match=r"in one ragged batch: logits apart by .*, which is more than rounding"):
        verify.main(["--no_compile", "--ckpt", str(stories), "--device", "cpu", "-n", "3", "--max_tokens", "20"])


def test_noise_that_depends_on_the_batch_is_found(monkeypatch, capsys, stories):
    from nanodecoder import sampler

    real = sampler.gumbel
    monkeypatch.setattr(sampler, "gumbel", lambda seeds, *rest: real(seeds, *rest) + len(seeds))
    with pytest.raises(nd.CheckpointError, match="drawn with seeds, in one batch: logits apart by 2"):
        verify.main(["--no_compile", "--ckpt", str(stories), "--device", "cpu", "-n", "3", "--max_tokens", "20"])


def test_a_stream_that_spells_otherwise_than_the_library_is_found(monkeypatch, capsys, stories):
    from nanodecoder.tokenizer import Stream

    real = Stream.push
    monkeypatch.setattr(Stream, "push", lambda self, index: real(self, index).replace("e", "3"))
    with pytest.raises(nd.CheckpointError, match=r"streamed and whole: \d of 3 texts changed"):
        verify.main(
            ["--no_compile", "--ckpt", str(stories), "--device", "cpu", "-n", "12", "--prompt", "Once upon a time there was"]
        )


def test_weights_that_are_no_numbers_are_one_sentence(tmp_path):
    model = nd.load_model(FIXTURES / "qwen3")
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    nd.save_model(tmp_path, model)
    with pytest.raises(nd.CheckpointError, match="non-finite logits at step 1"):
        verify.main(["--no_compile", "--ckpt", str(tmp_path), "--device", "cpu"])


def test_a_tie_is_counted_and_is_no_change():
    reference = torch.tensor([[1.0, 0.9995, 0.0], [2.0, 1.0, 0.0]])
    other = torch.tensor([[1.0, 1.0001, 0.0], [2.0, 1.0, 0.0]])
    finding = compare_logits("other", [reference], [other], [[0, 0]])
    assert (finding.changed, finding.ties, finding.number, finding.first) == (0, 1, 2, "")
    assert finding.size == pytest.approx(6e-4, rel=1e-3)
    changed = compare_logits("other", [reference], [other + torch.tensor([0.0, 0.0, 3.0])], [[0, 0]])
    assert (changed.changed, changed.ties) == (1, 1)  # the first is a tie whatever is chosen instead
    assert changed.first == "in text 1 at new token 2: 2 for 0"
    assert compare_logits("nan", [reference], [other * float("nan")], [[0, 0]]).size == float("inf")


def test_without_transformers_the_rest_is_compared_and_that_is_said(monkeypatch, capsys, stories):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    verify.main(["--no_compile", "--ckpt", str(stories), "--device", "cpu", "-n", "3", "--max_tokens", "8"])
    told = capsys.readouterr()
    assert "transformers is not installed, and was not compared" in told.err
    assert "all as it should be" in told.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "give a checkpoint, --ckpt DIR"),
        (["--ckpt", "x", "--against", "vllm"], "invalid choice: 'vllm'"),
        (["--ckpt", "x", "--against", "transformers", "--max_tokens", "0"], "--max_tokens must be 1 or above, not 0"),
        (["--ckpt", "x", "--against", "transformers", "--tolerance", "nan"], "--tolerance must be between 0 and 1"),
    ],
)
def test_wrong_usage_is_one_sentence(argv, words):
    with pytest.raises(UsageError, match=words):
        verify.main(argv)


def test_a_tokenizer_that_lacks_characters_takes_the_rest_and_says_so(capsys):
    verify.main(["--ckpt", str(ROOT / "weights/names"), "--no_compile"])
    out = capsys.readouterr()
    assert "the tokenizer knows 50 of the prompt's 86 characters: 'hequickbrown" in out.err
    assert "all as it should be" in out.out
    with pytest.raises(UsageError, match="--prompt: the tokenizer has no id for '나'"):
        verify.main(["--ckpt", str(ROOT / "weights/names"), "--prompt", "나"])


def test_as_a_command():
    for argv, status, words in [
        ([], 2, "no command given; there is: verify"),
        (["plant"], 2, "unknown command 'plant'; there is: verify"),
        (["verify", "--ckpt", "no/such", "--against", "transformers"], 1, "there is no folder or file 'no/such'"),
    ]:
        command = [sys.executable, "-m", "nanodecoder", *argv]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == status
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_tokenizer_of_few_characters_gets_those_that_it_knows(capsys):
    """The default prompt has Korean in it and signs, and names are of 26 letters."""
    names = str(ROOT / "weights" / "names")
    model, tokenizer = nd.load_model(names), nd.Tokenizer.load(names)
    ids = verify._prompt_ids(verify.Options(), model, tokenizer)
    assert tokenizer.decode(ids[1:]) == "hequickbrownfox"[: len(ids) - 1]
    with pytest.raises(UsageError, match="--prompt: the tokenizer has no id for '나'"):
        verify._prompt_ids(verify.Options(prompt="나"), model, tokenizer)
