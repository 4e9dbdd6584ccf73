"""The loop: a batch in, a loss out, weights a little better.

A step is a function of its number: which items it takes, what dropout drops and which rate it has follow from (seed, step).
So a run that was interrupted goes on as the same run, to the bit, and any number of processes deals the same items.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from ..checkpoint import load_model, save_model
from ..cli import UsageError, choose_device, synchronize
from ..completion import complete
from ..config import GenerationConfig
from ..families import OWN, write_config
from ..model import Decoder
from ..parts import CheckpointError
from ..tokenizer import Tokenizer
from .data import IGNORED, Batch, Data, Examples, open_source, prepare
from .optim import groups, make_optimizers, set_rates, share_of_rate
from .parallel import World, gradients_wait, joined, wrap
from .record import METRICS, draw, forget_after, log, write
from .settings import (
    CONFIG,
    DTYPES,
    TrainConfig,
    check,
    learning_rate_of,
    model_config,
    most_parameters,
    optimizer_of,
    steps_of,
    to_toml,
    warmup_of,
)
from .state import FILE, load_state, read_state, save_state, weights
from .vocabulary import KINDS as TOKENIZERS
from .vocabulary import make_tokenizer

LAST, STDIN = "last", "stdin.txt"


@dataclass(frozen=True)
class Result:
    """What came of a run: where it is, how far it went, and the last losses in nats per token."""

    folder: Path
    step: int
    loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    bits_per_byte: float | None
    signal: int | None = None  # that ended it early


def train(config: TrainConfig, *, resume: str | os.PathLike[str] | None = None, dry_run: bool = False) -> Result:
    """Train as `config` says, or go on with the run in the folder `resume`. Progress goes to stderr, samples to stdout.

    Raises UsageError for a run that cannot be, before its first step; CheckpointError for folders that cannot be read.
    """
    with joined(choose_device(config.device)) as world, _signals() as signals:
        result = Run(config, world, signals, None if resume is None else Path(resume), dry_run).go()
    # One that came when no step was left to be stopped, while saving for instance, still asked the caller to end
    return dataclasses.replace(result, signal=signals[0]) if signals else result


class Run:
    """One call of `train`: everything that lasts from step to step."""

    def __init__(self, config: TrainConfig, world: World, signals: list[int], resume: Path | None, dry_run: bool) -> None:
        check(config)
        files = {name: getattr(config, name) for name in ("data", "val_data") if getattr(config, name) not in (None, "-")}
        # A run may be resumed from anywhere
        config = dataclasses.replace(config, **{name: os.path.abspath(path) for name, path in files.items()})
        self.config, self.world, self.signals, self.dry_run = config, world, signals, dry_run
        self.scratch: tempfile.TemporaryDirectory[str] | None = None  # where a dry run keeps what came by standard input
        held = read_state(resume) if resume is not None else None
        self.folder = resume or Path(config.out_dir or f"out/{_name(config.data)}")
        if resume is None and not dry_run:
            self._check_folder()
        self.data, model = self._data_and_model(held)
        config = self.config  # with the sizes that were chosen
        if not dry_run and world.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            if resume is None:
                (self.folder / METRICS).unlink(missing_ok=True)  # of a run that never came to its first save
        world.wait()
        self.model = model.to(world.device)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = config.dropout
        if config.gradient_checkpointing:
            for block in model.blocks:  # in place of the method, so that no name changes
                block.forward = _forgetful(block.forward)
        self.wrapped = wrap(self.model, config.parallel, world)
        self.optimizers = make_optimizers(
            self.model,
            optimizer_of(config),
            learning_rate=learning_rate_of(config),
            muon_learning_rate=config.muon_learning_rate,
            weight_decay=config.weight_decay,
            beta1=config.beta1,
            beta2=config.beta2,
        )
        half = DTYPES[config.dtype]
        self.autocast = torch.autocast(world.device.type, half) if half else nullcontext()
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=half == torch.float16)
        self.progress = {
            "step": 0,
            "item": 0,
            "elapsed": 0.0,  # seconds, validation and saving included
            "stepping": 0.0,  # seconds of steps alone
            "tokens": 0,
            "best_val_loss": None,
            "fingerprint": self.data.fingerprint,
            "scaler": self.scaler.state_dict(),
        }
        if held is not None:
            self._go_on(held)
        if config.compile:
            for block in model.blocks:  # in place, so that no name changes; one graph serves all blocks
                block.compile()

    # ---- before the first step

    def _check_folder(self) -> None:
        """Refuse to write over a run or a checkpoint."""
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"--out_dir {self.folder} is a file; name a folder")
        if (self.folder / FILE).exists():
            go_on = f"go on with --resume {shlex.quote(str(self.folder))}"
            raise UsageError(f"{self.folder} holds a run already: {go_on}, or name another --out_dir")
        if (self.folder / "config.json").exists():
            raise UsageError(f"{self.folder} holds a checkpoint, which would be written over: name another --out_dir")

    def _data_and_model(self, held: dict[str, Any] | None) -> tuple[Data, Decoder]:
        """The data and the model that is to learn it: new, a checkpoint's, or the run's own."""
        config = self.config
        text = config.data if config.data != "-" else self._standard_input(held is None)
        source = open_source(text, config.format, config.encoding, config.normalization)
        how = (source.format, config.encoding, config.normalization)
        val_source = open_source(config.val_data, *how, flag="--val_data") if config.val_data else None
        model, tokenizer = None, None
        start = self.folder / LAST if held is not None else config.init_from
        if start is not None:
            model, tokenizer = load_model(start, dtype="float32"), Tokenizer.load(start)
            if held is None and config.tokenizer not in ("char", str(start)):
                raise UsageError(f"--init_from brings its own tokenizer, and --tokenizer {config.tokenizer} would be ignored")
        elif config.tokenizer not in TOKENIZERS:
            tokenizer = Tokenizer.load(config.tokenizer)
        block_size = config.block_size or (min(256, model.config.max_seq_len) if model else 256)
        if model is not None and block_size > model.config.max_seq_len:
            raise UsageError(f"--block_size {block_size} is more than the model's context of {model.config.max_seq_len}")
        data = prepare(
            source,
            tokenizer or _maker(config),
            block_size=block_size,
            val_fraction=config.val_fraction,
            val_source=val_source,
        )
        if model is None:
            if isinstance(data.train, Examples) and config.block_size is None:
                longest = max(int((split.ends - split.starts).max()) for split in (data.train, data.val) if split is not None)
                block_size = min(block_size, longest)
            torch.manual_seed(config.seed)
            rate = matrix_rate(self.world.device) if config.max_time else 0.0
            most = self.world.from_first(most_parameters(config, data, block_size, self.world.size, rate))
            made = model_config(config, data.tokenizer.vocab_size, block_size, most)
            # What was chosen is part of the run, as if it had been given
            sizes = {"n_layers": made.n_layers, "n_heads": made.n_heads, "dim": made.dim}
            self.config = dataclasses.replace(config, **sizes, block_size=block_size)
            model = Decoder(made)
            mark = data.tokenizer.bos_id
            ends = data.tokenizer.eos_ids
            model.generation = GenerationConfig(temperature=0.8, bos_id=mark, eos_ids=ends)
        elif data.tokenizer.vocab_size > model.config.vocab_size:
            raise UsageError(
                f"the tokenizer has {data.tokenizer.vocab_size} pieces and the model {model.config.vocab_size} rows: "
                "give the checkpoint that the tokenizer belongs to"
            )
        self.block_size, self.guessed = block_size, source.format if config.format is None else None
        return data, model

    def _standard_input(self, new: bool) -> str:
        """Where the text from standard input is kept: in the run's folder, since resuming needs it again."""
        if self.dry_run and new:
            self.scratch = tempfile.TemporaryDirectory()  # goes with the run
        folder = Path(self.scratch.name) if self.scratch is not None else self.folder
        if new and self.world.first:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / STDIN).open("wb") as kept:
                shutil.copyfileobj(sys.stdin.buffer, kept)
        self.world.wait()
        return str(folder / STDIN)

    def _go_on(self, held: dict[str, Any]) -> None:
        """Put back what a run had when it was saved."""
        progress = held["progress"]
        if progress["fingerprint"] != self.data.fingerprint:
            raise UsageError(f"--data {self.config.data} is not what this run was trained on: give the same text")
        load_state(held, self.model, self.optimizers)
        self.progress = progress
        if progress["scaler"]:
            self.scaler.load_state_dict(progress["scaler"])
        if self.world.first and not self.dry_run:
            forget_after(self.folder, progress["step"])

    # ---- the loop

    def go(self) -> Result:
        """Run to the end, or to where somebody stops it."""
        config, progress = self.config, self.progress
        self._tell(self.describe())
        if self.dry_run:
            self._tell(self._estimate())
            return self._result(None, None)
        if self._is_over():
            self._tell(f"this run ended after step {progress['step']}: raise --max_iters or --max_time to go on")
        elif self.world.first:
            write(self.folder / CONFIG, to_toml(config))
        first, began, loss, val = progress["step"], time.monotonic() - progress["elapsed"], None, (None, None)
        bar = self._bar()
        self.model.train()
        while not self._is_over():
            before = time.monotonic()
            loss = self.step()
            step = progress["step"]
            looks = (config.log_interval, config.eval_interval, config.save_interval, config.sample_interval)
            if any(every and step % every == 0 for every in looks):  # what a GPU still has to do belongs to the steps
                synchronize(self.world.device)
            progress["elapsed"] = time.monotonic() - began
            progress["stepping"] += time.monotonic() - before
            number = self.world.agreed(self.signals[0] if self.signals else 0)
            over = self._is_over()
            stops = bool(number) or (config.max_steps_now is not None and step - first >= config.max_steps_now)
            if step % config.log_interval == 0 or over:
                self._log({"step": step, "loss": self._finite(loss), "share": self._share(step - 1)} | self._rate())
            evaluates = step % config.eval_interval == 0 or over
            if evaluates and self.data.val is not None:
                val = self.evaluate()
                self._log({"step": step, "val_loss": val[0], "bits_per_byte": val[1]})
            if config.sample_interval and (step % config.sample_interval == 0) and self.world.first:
                self.sample()
            if evaluates or stops or step % (config.save_interval or config.eval_interval) == 0:
                self._finite(loss)
                self.save(val[0] if evaluates else None, over)
            if bar is not None:
                if step % config.log_interval == 0 or evaluates:  # on a GPU, looking at the loss waits for it
                    bar.set_postfix_str(_figures(float(loss), val, self._rate()["tokens_per_s"]), refresh=False)
                bar.update(self._bar_place() - bar.n)
            elif evaluates:
                self._tell(f"step {step}: {_figures(float(loss), val, self._rate()['tokens_per_s'])}, {self._left()}")
            if stops and not over:
                if bar is not None:
                    bar.close()
                self._tell(
                    f"stopped after step {step}, saved; go on with: python train.py --resume {shlex.quote(str(self.folder))}"
                )
                return self._result(loss, val, number or None)
        if bar is not None:
            bar.close()
        if self.world.first:
            draw(self.folder)
        self._tell(f"{self.folder} is ready: python sample.py --ckpt {shlex.quote(str(self.folder))}")
        if write_config(self.model.config)[0].model_type == OWN:
            self._tell(
                "transformers has no name for this model's parts: it is saved as model_type nanodecoder and opens here alone"
            )
        return self._result(loss, val)

    def step(self) -> Tensor:
        """One update of the weights. -> the mean loss of its targets, in nats"""
        config, world, progress = self.config, self.world, self.progress
        micro = config.gradient_accumulation_steps
        at = progress["step"]
        batches = []
        for turn in range(micro):  # each process its own items, all of them the same whatever the number of processes
            begin = progress["item"] + (turn * world.size + world.rank) * config.batch_size
            batches.append(self.data.train.batch(range(begin, begin + config.batch_size), config.seed).to(world.device))
        # Every target weighs the same, however they fall into batches
        (total,) = world.sum(sum(batch.n_targets for batch in batches))
        set_rates(self.optimizers, self._share(at))
        summed = torch.zeros((), device=world.device)
        for turn, batch in enumerate(batches):
            torch.manual_seed(_mix(config.seed, at, turn, world.rank))  # what dropout drops
            with gradients_wait(self.wrapped, turn < micro - 1):
                with self.autocast:
                    loss = summed_loss(self.wrapped, batch)
                # The wrappers take the mean over processes, and the sum is wanted
                self.scaler.scale(loss * (world.size / total)).backward()
            summed += loss.detach()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        overflow = False
        if config.grad_clip or self.scaler.is_enabled():
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip or math.inf)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP's is spread over processes
            # The scaler has each optimizer decide alone, but clipping by a norm that is no number has spoilt all gradients
            overflow = self.scaler.is_enabled() and not norm.isfinite()
        for optimizer in self.optimizers:
            if not overflow:
                self.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self.scaler.update()
        progress["step"] += 1
        progress["item"] += config.batch_size * micro * world.size
        progress["tokens"] += int(total)
        if world.size > 1:
            (everyone,) = world.sum(float(summed))
            return torch.tensor(everyone / total)
        return summed / total

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float | None]:
        """The validation split's loss in nats per token, and in bits per byte of its text; always over the same positions."""
        loss, targets, in_bytes = 0.0, 0, 0
        self.wrapped.eval()
        batch_size = max(1, min(64, 16_384 // self.block_size))
        upto = None if self.config.eval_iters is None else self.config.eval_iters * batch_size
        for number, batch in enumerate(self.data.val.in_order(batch_size, upto)):
            in_bytes += self.data.bytes_in(batch.targets)
            if self.config.parallel == "ddp" and number % self.world.size != self.world.rank:
                continue  # with FSDP every process must take part in every pass
            with self.autocast:
                loss += float(summed_loss(self.model, batch.to(self.world.device)))
            targets += batch.n_targets
        self.wrapped.train()
        if self.config.parallel == "ddp":
            loss, targets = self.world.sum(loss, targets)
        return loss / targets, loss / math.log(2) / in_bytes if in_bytes else None

    def sample(self, n: int = 200) -> None:
        """Print what the model writes by now."""
        if self.world.size > 1 and self.config.parallel == "fsdp":
            return
        start = [self.data.tokenizer.bos_id] if self.data.tokenizer.bos_id is not None else self.data.train.ids[:1].tolist()
        done = complete(self.model, self.data.tokenizer, [start], max_new_tokens=n, temperature=0.8, seeds=[0])
        try:
            print(f"--- after step {self.progress['step']}\n{done[0].text}\n---", flush=True)
        except BrokenPipeError:  # whoever read along has gone: the run goes on
            self.config.sample_interval = 0
            self._tell("nobody reads the samples any more: no further ones are written")
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    # ---- what is kept

    def save(self, val_loss: float | None, over: bool) -> None:
        """The best checkpoint where this one is, the last one, and what resuming needs: each whole at any moment."""
        best = self.progress["best_val_loss"]
        better = val_loss is None if self.data.val is None else val_loss is not None and (best is None or val_loss < best)
        if val_loss is not None and better:
            self.progress["best_val_loss"] = val_loss
        self.progress["scaler"] = self.scaler.state_dict()
        if not all(bool(torch.isfinite(parameter).all()) for parameter in self.model.parameters()):
            self._finite(torch.tensor(math.nan))
        try:
            plain = self._plain()
            if self.world.first:
                if better or not (self.folder / "model.safetensors").exists():
                    save_model(self.folder, plain, self.data.tokenizer)
                save_model(self.folder / LAST, plain, self.data.tokenizer)
            save_state(self.folder, self.model, self.optimizers, self.progress, self.world.first)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"{error}; what was saved before is whole: make room, then go on with --resume {shlex.quote(str(self.folder))}"
            ) from None

    def _plain(self) -> Decoder:
        """The model as it would be without wrapping: shared-out weights gathered."""
        if self.world.size == 1 or self.config.parallel == "ddp":
            return self.model
        gathered = weights(self.model)
        plain = Decoder(self.model.config)
        plain.generation = self.model.generation
        if self.world.first:
            plain.load_state_dict(gathered)
        return plain

    def _log(self, entry: dict[str, Any]) -> None:
        if self.world.first:
            log(self.folder, entry)

    # ---- small questions

    def _done(self) -> float:
        """The part of the run that lies behind, 0 to 1: of its steps or of its time, whichever is more."""
        config, progress = self.config, self.progress
        steps = progress["step"] / steps_of(config) if steps_of(config) else 0.0
        spent = progress["elapsed"] / config.max_time if config.max_time else 0.0
        return max(steps, spent)

    def _is_over(self) -> bool:
        return bool(self.world.agreed(int(self._done() >= 1)))

    def _share(self, step: int) -> float:
        config = self.config
        return share_of_rate(
            self.world.from_first(self._done()) if config.max_time else step / steps_of(config),
            step,
            schedule=config.schedule,
            warmup_iters=warmup_of(config),
            lowest=config.min_lr / learning_rate_of(config),
        )

    def _finite(self, loss: Tensor) -> float:
        value = float(loss)
        if not math.isfinite(value):
            raise CheckpointError(
                f"the loss is {value} at step {self.progress['step']}: lower --learning_rate or --muon_learning_rate, or raise "
                f"--warmup_iters; what was saved before is whole in {self.folder}"
            )
        return value

    def _rate(self) -> dict[str, float]:
        tokens, stepping = self.progress["tokens"], self.progress["stepping"]
        rate = round(tokens / stepping, 1) if stepping else 0.0
        return {"tokens": tokens, "elapsed": round(self.progress["elapsed"], 3), "tokens_per_s": rate}

    def _left(self) -> str:
        done = min(1.0, self._done())
        seconds = self.progress["elapsed"] * (1 - done) / done if done else 0.0
        return f"{int(seconds // 60)}:{int(seconds % 60):02d} left"

    def _bar(self) -> tqdm | None:
        if not (self.world.first and sys.stderr.isatty()):
            return None
        total = steps_of(self.config) or 1000
        return tqdm(total=total, initial=self._bar_place(), unit="step", dynamic_ncols=True, file=sys.stderr)

    def _bar_place(self) -> int:
        return self.progress["step"] if steps_of(self.config) else round(1000 * min(1.0, self._done()))

    def _tell(self, words: str) -> None:
        if self.world.first:
            print(words, file=sys.stderr, flush=True)

    def _result(self, loss: Tensor | None, val: tuple[float | None, float | None] | None, number: int | None = None) -> Result:
        val_loss, bits = val or (None, None)
        return Result(
            self.folder,
            self.progress["step"],
            None if loss is None else float(loss),
            val_loss,
            self.progress["best_val_loss"],
            bits,
            number,
        )

    def _estimate(self) -> str:
        """How long the run would take, by three steps that are made and forgotten; validations come on top."""
        self.model.train()
        self.step()
        synchronize(self.world.device)
        start = time.monotonic()
        tokens = self.progress["tokens"]
        for _ in range(2):
            self.step()
        synchronize(self.world.device)
        seconds = (time.monotonic() - start) / 2
        tokens = (self.progress["tokens"] - tokens) / 2
        steps = steps_of(self.config)
        whole = "" if steps is None else f", so {steps:,} steps take about {seconds * steps / 60:.1f} minutes"
        return f"a step of {tokens:,.0f} tokens takes {seconds:.2f} s ({tokens / seconds:,.0f} tokens/s){whole}"

    def describe(self) -> str:
        """What is trained on what, in two or three lines."""
        model, data, config = self.model.config, self.data, self.config
        count = sum(p.numel() for p in self.model.parameters())
        what = "examples" if isinstance(data.train, Examples) else "windows"
        per_step = config.batch_size * config.gradient_accumulation_steps * self.world.size
        kept = {"muon": 3, "decay": 4, "plain": 4}  # weight, gradient and what the optimizer keeps
        held = 4 * sum(
            kept[kind] * p.numel() for kind, group in groups(self.model, optimizer_of(config)).items() for p in group
        )
        steps = steps_of(config)
        return (
            f"{count:,} parameters: {model.n_layers} layers, dim {model.dim}, {model.n_heads} heads "
            f"({model.n_kv_heads} for keys), ffn {model.ffn_dim}, context {model.max_seq_len}, {model.vocab_size} ids; "
            f"weights, gradients and optimizer take {held / 2**20:.1f} MiB\n"
            f"{len(data.train.ids):,} tokens to train on ({len(data.train):,} {what})"
            + (f", {len(data.val.ids):,} to validate" if data.val is not None else ", none to validate")
            + f"; {per_step} {what} a step"
            + (", up to " if what == "examples" else ", ")
            + f"{per_step * self.block_size:,} tokens"
            + (f", {steps:,} steps" if steps else "")
            + (f", {config.max_time:g} seconds" if config.max_time else "")
            + ("\nits lines are taken for examples; --format text if it is prose" if self.guessed == "lines" else "")
        )


# ----------------------------------------------------------------------------------------------------------- the parts


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The cross entropy of a batch's targets, summed: how surprised the model is by what really came next, in nats."""
    logits = model(batch.tokens, counts=batch.counts)  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")


def matrix_rate(device: torch.device) -> float:
    """Floating-point operations a second of float32 matrix products on a device, by a tenth of a second of them."""
    a = torch.randn(512, 512, device=device)
    a @ a
    synchronize(device)
    start, n = time.perf_counter(), 0
    while time.perf_counter() - start < 0.1:
        a @ a
        synchronize(device)
        n += 1
    return n * 2 * 512**3 / (time.perf_counter() - start)


def _maker(config: TrainConfig) -> Any:
    def make(trained_on: Iterator[str], everything: Iterator[str]) -> Tokenizer:
        # A character that only the validation split has needs an id, though nothing is learned of it
        texts = everything if config.tokenizer == "char" else trained_on
        try:
            return make_tokenizer(config.tokenizer, texts, config.vocab_size, config.normalization)
        except ValueError as error:
            raise UsageError(str(error)) from None

    return make


def _forgetful(forward: Any) -> Any:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def _mix(*numbers: int) -> int:
    """One seed of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def _name(data: str | None) -> str:
    return "stdin" if data == "-" else Path(data).resolve().stem or "run"


def _figures(loss: float, val: tuple[float | None, float | None], rate: float) -> str:
    words = [f"loss {loss:.4f}"]
    if val[0] is not None:
        words.append(f"validation {val[0]:.4f}" + (f" ({val[1]:.3f} bits/byte)" if val[1] is not None else ""))
    return ", ".join([*words, f"{rate:,.0f} tokens/s"])


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Signals that asked for an end so far: the first lets the step finish, a second ends the process as it would have."""
    got: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield got
        return

    def note(number: int, frame: Any) -> None:
        if got:
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)
        got.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
