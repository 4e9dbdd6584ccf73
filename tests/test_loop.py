"""training/loop.py: what a run learns, what it writes, and that a run which stopped goes on as the same run."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import math
import os
import signal
import sys
import tempfile
import types

import pytest
import torch
from safetensors.torch import load_file

import nanodecoder as nd
from nanodecoder.cli import UsageError
from nanodecoder.training import TrainConfig, loop, train
from nanodecoder.training.data import IGNORED, Batch, open_source, prepare
from nanodecoder.training.loop import Run, summed_loss
from nanodecoder.training.parallel import World
from nanodecoder.training.state import read_state

KOREAN = "나는 오늘 학교에 갔다.\n그는 배가 고파서 밥을 먹었다.\n고양이는 창가에 앉아 있다.\n" * 40
NAMES = ["emma", "olivia", "ava", "isabella", "sophia", "mia", "amelia", "harper", "evelyn", "abigail", "ada", "zoe"] * 5
TINY = {"n_layers": 2, "dim": 32, "n_heads": 2, "block_size": 16, "batch_size": 4, "eval_interval": 5, "log_interval": 1}


@pytest.fixture
def korean(tmp_path):
    path = tmp_path / "korean.txt"
    path.write_text(KOREAN, encoding="utf-8")
    return path


def configured(data, out, **options) -> TrainConfig:
    return TrainConfig(
        data=str(data), out_dir=str(out), device="cpu", **(TINY | {"warmup_iters": 2, "max_iters": 10} | options)
    )


def tuned(data, out, **options) -> TrainConfig:
    """As `configured`, without what says how large the model is."""
    return configured(data, out, **({"n_layers": None, "dim": None, "n_heads": None} | options))


def metrics(folder, key: str = "loss") -> list[float]:
    return [entry[key] for line in (folder / "metrics.jsonl").read_text().splitlines() if key in (entry := json.loads(line))]


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "last" / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- one step


def test_the_study_notes_city_in_numbers():
    """부산 60 %, 서울 30 %, 대전 10 %, and 서울 was right: loss −ln 0.3, gradient p − 1 at the right one, p at the others."""
    logits = torch.tensor([0.6, 0.3, 0.1]).log().requires_grad_()
    loss = torch.nn.functional.cross_entropy(logits[None], torch.tensor([1]))
    loss.backward()
    assert loss.item() == pytest.approx(1.204, abs=5e-4)
    assert logits.grad.tolist() == pytest.approx([0.6, -0.7, 0.1], abs=1e-6)
    after = (logits - logits.grad).softmax(-1)
    assert after.tolist() == pytest.approx([0.322, 0.590, 0.088], abs=5e-4)


def test_a_batch_counts_every_target_once_and_padding_never():
    from tiny import tiny_model

    model = tiny_model()
    tokens, targets = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[6, 7, 8], [9, 10, IGNORED]])
    logits = [model(tokens[:1])[0], model(tokens[1:, :2])[0]]
    wanted = -sum(
        row.log_softmax(-1)[place, target]
        for row, wanted in zip(logits, ([6, 7, 8], [9, 10]), strict=True)
        for place, target in enumerate(wanted)
    )
    torch.testing.assert_close(summed_loss(model, Batch(tokens, targets, (3, 2))), wanted, atol=1e-4, rtol=1e-5)


def test_a_large_batch_and_its_parts_have_one_gradient(tmp_path):
    """Examples of unequal lengths, so that a mean of means would show (counts 11 and 101: right 1.098, wrong 1.5)."""
    path = tmp_path / "names.txt"
    path.write_text("\n".join([*NAMES, "bartholomew-maximilian"]))
    after = []
    for number, (batch_size, parts) in enumerate([(12, 1), (3, 4), (1, 12)]):
        out = tmp_path / str(number)
        train(configured(path, out, max_iters=2, batch_size=batch_size, gradient_accumulation_steps=parts, optimizer="adamw"))
        after.append((metrics(out), weights(out)))
    for losses, tensors in after[1:]:
        assert losses == pytest.approx(after[0][0], abs=1e-5)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, after[0][1][name], atol=2e-5, rtol=1e-4)


# ---- a whole run


def test_a_small_korean_text_is_learned_by_heart(tmp_path, korean):
    out = tmp_path / "out"
    result = train(configured(korean, out, max_iters=120, eval_interval=60, warmup_iters=10, block_size=32))
    losses = metrics(out)
    assert losses[0] == pytest.approx(math.log(nd.load_model(out).config.vocab_size), abs=0.3)  # all equally likely at first
    assert result.best_val_loss < 0.5
    done = nd.complete(nd.load_model(out), nd.Tokenizer.load(out), ["나는 오늘"], max_new_tokens=9, temperature=0.0)
    assert done[0].text == " 학교에 갔다.\n"
    assert result.bits_per_byte == pytest.approx(metrics(out, "bits_per_byte")[-1])


def test_bits_per_byte_are_the_loss_over_the_texts_bytes(tmp_path, korean):
    out = tmp_path / "out"
    result = train(configured(korean, out, max_iters=1))
    text = KOREAN[round(len(KOREAN) * 0.9) :]
    targets = len(text) + 1  # and the mark at its end, which is no byte
    assert result.bits_per_byte == pytest.approx(result.val_loss * targets / math.log(2) / len(text.encode()))


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_the_other_tokenizers_train_and_load(tmp_path, korean, tokenizer):
    out = tmp_path / "out"
    train(configured(korean, out, max_iters=3, tokenizer=tokenizer, vocab_size=300 if tokenizer == "bpe" else 1024))
    loaded = nd.Tokenizer.load(out)
    assert loaded.decode(loaded.encode("새 글자 ABC\n")) == "새 글자 ABC\n"
    assert loaded.vocab_size == {"byte": 257, "bpe": 300}[tokenizer]


def test_names_begin_at_bos_end_at_eos_and_fit_the_context(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("\n".join(NAMES))
    out = tmp_path / "out"
    train(configured(path, out, max_iters=150, block_size=None, eval_interval=50))
    model, tokenizer = nd.load_model(out), nd.Tokenizer.load(out)
    assert model.config.max_seq_len == max(map(len, NAMES)) + 1
    done = nd.complete(model, tokenizer, [""] * 8, max_new_tokens=30, temperature=0.4, seeds=range(8))
    assert all(len(one.text) <= model.config.max_seq_len for one in done)
    assert sum(one.finish_reason == "eos" and one.text in NAMES for one in done) >= 5


def test_the_parts_can_be_swapped_and_each_run_loads(tmp_path, korean):
    variants = [
        {"norm": "layer", "ffn": "gelu", "positions": "learned", "qk_norm": False},
        {"norm_place": "post", "ffn": "relu", "positions": "none"},
        {"n_kv_heads": 1, "window": 8, "sparse_stride": 3},
        {"tied_head": False, "qk_norm": False},
    ]
    for number, options in enumerate(variants):
        out = tmp_path / str(number)
        result = train(configured(korean, out, max_iters=2, **options))
        assert result.val_loss == pytest.approx(metrics(out, "val_loss")[-1])
        model = nd.load_model(out)
        assert same(weights(out), load_file(out / "last" / "model.safetensors"))
        assert model.config.norm == options.get("norm", "rms")
        assert model.config.sparse_stride == options.get("sparse_stride")


def test_dropout_is_off_where_nobody_trains(tmp_path, korean):
    out = tmp_path / "out"
    dropped = train(configured(korean, out, max_iters=3, dropout=0.5))
    model, tokenizer = nd.load_model(out / "last"), nd.Tokenizer.load(out / "last")
    data = prepare(open_source(str(korean), None, "utf-8", "nfc"), tokenizer, block_size=16, val_fraction=0.1)
    batches = list(data.val.in_order(8))
    loss = sum(float(summed_loss(model, batch).detach()) for batch in batches) / sum(batch.n_targets for batch in batches)
    assert dropped.val_loss == pytest.approx(loss, abs=1e-5)
    train(configured(korean, tmp_path / "without", max_iters=3))
    assert metrics(out)[0] != metrics(tmp_path / "without")[0]


def test_checkpointed_gradients_are_the_same(tmp_path, korean):
    for name, on in (("a", True), ("b", False)):
        train(configured(korean, tmp_path / name, max_iters=3, gradient_checkpointing=on))
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


@pytest.mark.slow
def test_compiled_blocks_learn_the_same_and_no_name_shows_it(tmp_path, korean, monkeypatch):
    """By the compiler's front end, which captures one graph for all blocks; turning that into C++ would take minutes here."""
    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: real(self, backend="eager", fullgraph=True))
    for name, on in (("a", True), ("b", False)):
        train(configured(korean, tmp_path / name, max_iters=3, compile=on))
    ours, theirs = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-3, rtol=1e-3)
    assert metrics(tmp_path / "a") == pytest.approx(metrics(tmp_path / "b"), abs=1e-4)


def test_bfloat16_passes_learn_and_weights_stay_float32(tmp_path, korean):
    out = tmp_path / "out"
    train(configured(korean, out, max_iters=20, dtype="bfloat16"))
    assert metrics(out)[-1] < metrics(out)[0] - 0.3
    assert {tensor.dtype for tensor in weights(out).values()} == {torch.float32}


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path, korean):
    """What is learned by heart does not help with a text that runs backwards: validation gets worse, and the best stays."""
    out, other = tmp_path / "out", tmp_path / "backwards.txt"
    other.write_text(KOREAN[::-1], encoding="utf-8")
    result = train(configured(korean, out, max_iters=60, val_data=str(other)))
    val = metrics(out, "val_loss")
    assert result.best_val_loss == min(val) < val[-1]
    assert not same(weights(out), load_file(out / "model.safetensors"))


# ---- stopping and going on


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adamw", "dropout": 0.1, "gradient_accumulation_steps": 2},
        {"optimizer": "muon", "dropout": 0.1, "gradient_accumulation_steps": 2, "schedule": "wsd"},
        {"optimizer": "muon", "eval_interval": 3, "save_interval": 4},
    ],
)
def test_a_run_that_goes_on_is_the_same_run(tmp_path, korean, options):
    """20 steps in one go, and 10 + 10: every loss and every weight to the bit, with validations in between."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = configured(korean, whole, max_iters=20, **options)
    train(config)
    stopped = train(dataclasses.replace(config, out_dir=str(parts), max_steps_now=10))
    assert stopped.step == 10
    assert len(metrics(parts)) == 10
    torch.manual_seed(99)  # whatever happened in between
    train(dataclasses.replace(config, out_dir=str(parts)), resume=parts)
    assert metrics(parts) == metrics(whole)
    assert metrics(parts, "val_loss") == metrics(whole, "val_loss")
    assert same(weights(parts), weights(whole))
    assert same(read_state(parts)["model"], read_state(whole)["model"])


def test_what_was_logged_after_the_last_save_is_made_again(tmp_path, korean):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = configured(korean, whole, max_iters=12)
    train(config)
    train(dataclasses.replace(config, out_dir=str(parts), max_steps_now=5))
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 77.0}\n{"step": 7, "lo')  # as a killed run leaves it
    train(dataclasses.replace(config, out_dir=str(parts)), resume=parts)
    assert metrics(parts) == metrics(whole)


def test_more_steps_follow_the_longer_schedule_from_there_on(tmp_path, korean):
    out = tmp_path / "out"
    config = configured(korean, out, max_iters=10)
    train(config)
    result = train(dataclasses.replace(config, max_iters=20), resume=out)
    assert result.step == 20
    shares = metrics(out, "share")
    assert shares[9] < 0.05
    assert shares[10] == pytest.approx(0.5 * (1 + math.cos(math.pi * 10 / 20)))
    assert train(dataclasses.replace(config, max_iters=20), resume=out).step == 20  # nothing is left to do


def test_another_text_is_another_run(tmp_path, korean):
    out = tmp_path / "out"
    config = configured(korean, out, max_steps_now=2)
    train(config)
    korean.write_text(KOREAN.replace("밥", "떡"), encoding="utf-8")
    with pytest.raises(UsageError, match=r"is not what this run was trained on|has no id"):
        train(config, resume=out)


def test_a_run_or_a_checkpoint_is_never_written_over(tmp_path, korean):
    config = configured(korean, tmp_path / "out", max_iters=1)
    train(config)
    with pytest.raises(UsageError, match=r"holds a run already: go on with --resume .*, or name another --out_dir"):
        train(config)
    last = dataclasses.replace(config, out_dir=str(tmp_path / "out" / "last"))
    with pytest.raises(UsageError, match="holds a checkpoint, which would be written over"):
        train(last)
    file = dataclasses.replace(config, out_dir=str(korean))
    with pytest.raises(UsageError, match="is a file; name a folder"):
        train(file)


def test_a_run_that_never_came_to_a_save_can_be_begun_again(tmp_path, korean):
    out = tmp_path / "out"
    out.mkdir()
    (out / "train.toml").write_text("")
    (out / "metrics.jsonl").write_text('{"step": 1, "loss": 77.0}\n')
    train(configured(korean, out, max_iters=2))
    assert len(metrics(out)) == 2


def test_broken_weights_are_never_saved(tmp_path, korean, monkeypatch):
    """The loss of a step is from before its update: the weights are looked at themselves."""
    out = tmp_path / "out"
    config = configured(korean, out, max_steps_now=5)
    train(config)
    real = loop.Run.step

    def breaks(self):
        loss = real(self)
        if self.progress["step"] == 10:
            next(self.model.parameters()).data[0, 0] = math.nan
        return loss

    monkeypatch.setattr(loop.Run, "step", breaks)
    with pytest.raises(nd.CheckpointError, match=r"at step 10: lower --learning_rate"):
        train(config, resume=out)
    assert read_state(out)["progress"]["step"] == 5
    assert all(torch.isfinite(tensor).all() for tensor in weights(out).values())


def test_fine_tuning_goes_on_with_the_windows_that_it_had(tmp_path, korean, stories):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    text = tmp_path / "tale.txt"
    text.write_text("Once upon a time there was a cat. It sat in the sun all day.\n" * 400)
    config = TrainConfig(
        data=str(text), init_from=str(stories), max_iters=4, batch_size=2, out_dir=str(whole), device="cpu", log_interval=1
    )
    train(config)
    train(dataclasses.replace(config, out_dir=str(parts), max_steps_now=2))
    train(dataclasses.replace(config, out_dir=str(parts)), resume=parts)
    assert metrics(parts) == metrics(whole)


def test_a_full_disk_keeps_what_was_saved(tmp_path, korean, monkeypatch):
    out = tmp_path / "out"
    config = configured(korean, out, max_steps_now=5)
    train(config)

    def full(held, file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(nd.CheckpointError, match=r"No space left on device; what was saved before is whole: make room"):
        train(config, resume=out)
    assert read_state(out)["progress"]["step"] == 5
    monkeypatch.undo()
    assert not list(out.rglob("*.part"))
    assert train(config, resume=out).step == 10


def test_a_signal_after_the_last_step_is_not_lost(tmp_path, korean, monkeypatch):
    """The run is whole, and whoever called `train`, for the next one perhaps, hears that an end was asked for."""
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(loop, "draw", lambda folder: os.kill(os.getpid(), signal.SIGINT))
    result = train(configured(korean, tmp_path / "out"))
    assert (result.step, result.signal) == (10, signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler


def test_standard_input_is_kept_for_resuming(tmp_path, korean, monkeypatch):
    out = tmp_path / "out"
    config = configured(korean, out, max_iters=4)
    train(dataclasses.replace(config, out_dir=str(tmp_path / "whole")))
    piped = dataclasses.replace(config, data="-", max_steps_now=2)
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(KOREAN.encode())))
    train(piped)
    train(piped, resume=out)
    assert metrics(out) == metrics(tmp_path / "whole")


@pytest.mark.parametrize("grad_clip", [0.0, 1.0])
def test_one_overflow_skips_the_step_of_every_optimizer(tmp_path, korean, grad_clip):
    """float16's scaler, which on CUDA belongs to --dtype float16."""
    config = configured(korean, tmp_path / "out", optimizer="muon", grad_clip=grad_clip)
    run = Run(config, World(0, 1, torch.device("cpu")), [], None, False)
    run.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = {name: parameter.clone() for name, parameter in run.model.named_parameters()}
    weight = run.model.blocks[0].attn.q_proj.weight  # Muon's; the embedding is AdamW's
    hook = weight.register_hook(lambda gradient: gradient * math.inf)
    run.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in run.model.named_parameters())
    assert run.scaler.get_scale() == 4.0
    hook.remove()
    run.step()
    assert not any(torch.equal(parameter, before[name]) for name, parameter in run.model.named_parameters())
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())


def test_a_dry_run_of_standard_input_leaves_nothing(tmp_path, korean, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(KOREAN.encode())))
    train(dataclasses.replace(configured(korean, tmp_path / "out"), data="-"), dry_run=True)
    gc.collect()
    assert not list((tmp_path / "scratch").iterdir())
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_no_number_ends_the_run_in_words(tmp_path, korean):
    config = configured(korean, tmp_path / "out", max_iters=30, optimizer="adamw", learning_rate=1e30, grad_clip=0.0)
    with pytest.raises(nd.CheckpointError, match=r"the loss is (nan|inf) at step \d+: lower --learning_rate"):
        train(config)


# ---- starting from a checkpoint


def test_fine_tuning_starts_from_the_checkpoint_and_its_tokenizer(tmp_path, korean):
    first = tmp_path / "first"
    train(configured(korean, first, max_iters=60, eval_interval=30))
    before = metrics(first, "val_loss")[-1]
    more = tmp_path / "more.txt"
    more.write_text("고양이는 학교에 갔다.\n" * 60, encoding="utf-8")
    out = tmp_path / "second"
    result = train(tuned(more, out, init_from=str(first), max_iters=20, learning_rate=1e-3))
    assert metrics(out)[0] < 3.0  # not from scratch, which begins at ln 40
    assert result.val_loss < metrics(out, "val_loss")[0]
    for folder in (out, out / "last"):
        assert nd.Tokenizer.load(folder).files() == nd.Tokenizer.load(first).files()
    assert before < 2
    more.write_text("없는 글자 셜록\n" * 60, encoding="utf-8")
    with pytest.raises(UsageError, match="has no id for"):
        train(tuned(more, tmp_path / "third", init_from=str(first)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": None}, "give a text to learn from, --data FILE"),
        ({"data": "nowhere.txt"}, "nowhere.txt does not exist"),
        ({"n_heads": 5}, "no model can be made of these sizes: dim 32 is not a multiple of n_heads 5"),
        ({"n_kv_heads": 3, "n_heads": 4}, "n_heads 4 is not a multiple of n_kv_heads 3"),
        ({"sparse_stride": 3}, "sparse_stride adds distant tokens to a window"),
        ({"dropout": 1.0}, "--dropout must be from 0 to below 1, not 1.0"),
        ({"max_iters": 0}, "--max_iters must be 1 or above, not 0"),
        ({"schedule": "foo"}, "--schedule must be one of cosine, wsd, constant, not foo"),
        ({"batch_size": 2.5}, "--batch_size must be a whole number, not 2.5"),
        ({"max_time": math.inf}, "--max_time must be a finite number, not inf"),
        ({"seed": -1}, "--seed must be from 0"),
        ({"min_lr": 1.0}, "--min_lr must be at most the learning rate, 0.004, not 1.0"),
        ({"init_from": "x", "n_layers": None}, "--n_heads would be ignored: the model is --init_from's; leave it out"),
        ({"vocab_size": 9}, "--vocab_size would be ignored: it is for --tokenizer bpe"),
        ({"optimizer": "adamw", "muon_learning_rate": 5.0}, "--muon_learning_rate would be ignored"),
        ({"val_data": "nofile"}, "--val_data .*nofile does not exist"),
        ({"tokenizer": "bpe", "vocab_size": 100}, "--vocab_size must be at least 257, not 100"),
        ({"block_size": 10_000}, "leaves .* tokens for training, and a window takes 10001"),
        ({"dtype": "float16"}, "--dtype float16 needs a GPU"),
    ],
)
def test_what_cannot_be_is_said_before_the_first_step(tmp_path, korean, options, words):
    out = tmp_path / "out"
    config = dataclasses.replace(configured(korean, out), **options)
    with pytest.raises(UsageError, match=words):
        train(config)
    assert not out.exists()


def test_a_dry_run_says_what_would_be_and_writes_nothing(tmp_path, korean, capsys):
    out = tmp_path / "out"
    train(configured(korean, out), dry_run=True)
    said = capsys.readouterr().err
    assert "parameters: 2 layers, dim 32, 2 heads" in said
    assert "tokens to train on" in said
    assert "a step of 64 tokens takes" in said
    assert not out.exists()
