"""Generate text: python sample.py --ckpt DIR --prompt "Once upon a time"

The text goes to stdout as it comes, and nothing else does; notices and figures go to stderr.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

import nanodecoder as nd
from nanodecoder import cli
from nanodecoder.attention import PATHS
from nanodecoder.checkpoint import DTYPES
from nanodecoder.cli import UsageError, option
from nanodecoder.generate import Step, default_sampler, draw_seeds, end_ids, prompt_to_ids
from nanodecoder.tokenizer import Stream

BUNDLED = Path(__file__).parent / "weights" / "shakespeare"


@dataclass
class Options:
    """What the command line says."""

    ckpt: str | None = option(
        None,
        "checkpoint folder, or a .safetensors file beside its config.json",
        names=("checkpoint_dir", "checkpoint_path", "model"),
    )
    prompt: list[str] | None = option(None, "text to continue; may be repeated; - reads it from stdin", names=("p", "start"))
    max_new_tokens: int = option(100, "how many tokens to generate at most", names=("n",))
    temperature: float | None = option(
        None, "0 takes the likeliest token, above 0 draws; unset: what the checkpoint says, else 0"
    )
    top_k: int | None = option(None, "draw from the k likeliest tokens; 0 is off")
    top_p: float | None = option(None, "draw from the fewest tokens that reach this probability; 1 is off")
    min_p: float | None = option(None, "draw from tokens at least this fraction as likely as the likeliest; 0 is off")
    repetition_penalty: float | None = option(None, "above 1 makes tokens that were there already less likely")
    num_samples: int = option(1, "texts per prompt, with seeds seed, seed + 1, …")
    seed: int | None = option(None, "makes the same text again; unset, one is drawn and printed")
    ignore_eos: bool = option(False, "go on past the checkpoint's end token")
    echo: bool = option(False, "print the prompt before its text")
    cache: bool = option(True, "keep keys and values of earlier tokens; --no_cache computes all anew at each step")
    attention: str = option("fused", "the kernel, or the formula written out", choices=PATHS)
    device: str = option("auto", "auto, cpu, cuda, cuda:1 or mps")
    dtype: str | None = option(None, "unset: float32, on CUDA the checkpoint's own", choices=("auto", *DTYPES))
    quiet: bool = option(False, "print no notices and figures")


def main(argv: Sequence[str]) -> None:
    options = cli.parse(Options, argv, "sample.py", "Generate text from a checkpoint in Hugging Face's layout.")

    def notice(sentence: str) -> None:
        if not options.quiet:
            print(sentence, file=sys.stderr)

    ckpt = BUNDLED if options.ckpt is None else options.ckpt
    if options.ckpt is None and not BUNDLED.is_dir():
        raise UsageError("no model is bundled yet: give a checkpoint folder, --ckpt DIR")
    if options.num_samples < 1:
        raise UsageError(f"--num_samples must be 1 or above, not {options.num_samples}")
    device = cli.choose_device(options.device)
    texts = read_prompts(options.prompt or [""])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dtype, fallback = cli.choose_dtype(options.dtype, device, ckpt)
        model = nd.load_model(ckpt, device, dtype)
        model.attention = options.attention
        tokenizer = nd.Tokenizer.load(ckpt)
        prompts = [ids for text in texts for ids in [to_ids(tokenizer, text)] * options.num_samples]
    for sentence in [fallback, *(str(warning.message) for warning in caught)]:
        if sentence:
            notice(sentence)

    settings = {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if (value := getattr(options, name)) is not None
    }
    seeds = draw_seeds(1) if options.seed is None else [options.seed]
    seeds = [seeds[0] + i for i in range(options.num_samples)] * len(texts)
    try:
        sampler = default_sampler(model, **settings)
        stepper = nd.Stepper(model, sampler=sampler, use_cache=options.cache)
        for ids, seed in zip(prompts, seeds, strict=True):
            stepper.add(
                ids,
                max_new_tokens=options.max_new_tokens,
                seed=seed,
                eos_ids=() if options.ignore_eos else end_ids(model, tokenizer),
            )
    except ValueError as error:
        raise UsageError(str(error)) from None
    filters = {"top_k": 0, "top_p": 1, "min_p": 0}  # at these they are off
    idle = [f"--{name}" for name, off in filters.items() if settings.get(name, off) != off]
    if idle and sampler.temperature == 0:
        notice(f"{', '.join(idle)} changes nothing at temperature 0 (greedy): add --temperature 0.8")

    echoes = [text if options.echo else "" for text in texts for _ in range(options.num_samples)]
    if sys.stdout is None:
        raise UsageError("stdout is closed, and the text would go there")
    printer = Printer([tokenizer.stream(after=ids) for ids in prompts], echoes, sys.stdout)
    run = Run(device, prompts, options.max_new_tokens)
    while len(stepper):
        try:
            step = stepper.step()
        except ValueError as error:  # logits that are not numbers
            raise nd.CheckpointError(str(error)) from None
        run.count(step, stepper)
        printer.show(step)
    printer.close()
    drawn = "" if sampler.temperature == 0 else f", seed {seeds[0]}"
    notice(run.summary(model.config.max_seq_len) + drawn)


def read_prompts(given: Sequence[str]) -> list[str]:
    """The prompts as text, with - read from stdin. Raises UsageError for what is not UTF-8, or for stdin asked for twice."""
    if given.count("-") > 1:
        raise UsageError("--prompt - is given twice, and stdin can be read once")
    if "-" in given and sys.stdin is None:
        raise UsageError("--prompt - reads stdin, which is closed")
    try:
        texts = [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in given]
        for text in texts:
            text.encode()  # an argument that is not UTF-8 arrives with halves of characters in it
    except UnicodeError as error:
        raise UsageError(f"the prompt is not UTF-8 ({error.reason}, at {error.start})") from None
    return texts


def to_ids(tokenizer: nd.Tokenizer, text: str) -> list[int]:
    """A prompt's ids, with BOS for an empty one."""
    try:
        return prompt_to_ids(tokenizer, text)
    except ValueError as error:
        raise UsageError(str(error)) from None


class Printer:
    """Prints several texts one after the other although they grow together: the first unfinished one as it comes."""

    def __init__(self, streams: Sequence[Stream], echoes: Sequence[str], out: TextIO) -> None:
        self.streams, self.out = streams, out
        self.waiting = list(echoes)  # what each row has to say and has not said
        self.ended = [False] * len(streams)
        self.current = 0

    def show(self, step: Step) -> None:
        for row, index, reason in zip(step.rows, step.ids.tolist(), step.reasons, strict=True):
            if reason != "eos":
                self.waiting[row] += self.streams[row].push(index)
            if reason is not None:
                self._end(row)
        self._flush()

    def close(self) -> None:
        """End the rows that no step ended: those that were asked for nothing."""
        for row, ended in enumerate(self.ended):
            if not ended:
                self._end(row)
        self._flush()

    def _end(self, row: int) -> None:
        self.waiting[row] += self.streams[row].finish() + "\n"
        self.ended[row] = True

    def _flush(self) -> None:
        while self.current < len(self.streams):
            self.out.write(self.waiting[self.current])
            self.waiting[self.current] = ""
            if not self.ended[self.current]:
                break
            self.current += 1
        self.out.flush()


class Run:
    """Counts and clocks of one run, for the last line."""

    def __init__(self, device: torch.device, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        self.device, self.max_new_tokens = device, max_new_tokens
        self.prompt_tokens = sum(map(len, prompts))
        self.lengths = list(map(len, prompts))
        self.new_tokens = 0
        self.forwards = 0
        self.reasons: list[str] = []
        self.started = self.first = self.last = time.perf_counter()

    def count(self, step: Step, stepper: nd.Stepper) -> None:
        cli.synchronize(self.device)
        self.last = time.perf_counter()
        if self.forwards == 0:
            self.first = self.last
            self.first_tokens = len(step.rows)
        self.forwards = stepper.forwards
        self.new_tokens += len(step.rows)
        for row, reason in zip(step.rows, step.reasons, strict=True):
            self.lengths[row] += reason is None  # the last token is not fed
            if reason is not None:
                self.reasons.append(reason)

    def summary(self, context: int) -> str:
        words = {
            "eos": "the model ended its text",
            "length": f"cut at --max_new_tokens {self.max_new_tokens}; the text may be unfinished",
            "context": f"the context of {context} tokens is full",
        }
        why = [
            f"{self.reasons.count(reason)}x " * (len(self.lengths) > 1) + words[reason]
            for reason in dict.fromkeys(self.reasons)
        ]
        parts = [
            f"{self.prompt_tokens} prompt + {self.new_tokens} new tokens",
            f"{self.forwards} forward passes",
            f"context {max(self.lengths)} of {context}",
            f"stopped: {'; '.join(why) or 'nothing was asked for'}",
        ]
        if self.forwards:
            parts.append(f"prefill {self.prompt_tokens / (self.first - self.started):,.0f} tokens/s")
        if self.forwards > 1:
            parts.append(f"decode {(self.new_tokens - self.first_tokens) / (self.last - self.first):,.1f} tokens/s")
        if self.forwards:
            parts.append(f"first token after {self.first - self.started:.3f} s")
        parts.append(f"peak memory {cli.peak_memory(self.device) / 2**20:,.0f} MiB")
        return ", ".join(parts)


if __name__ == "__main__":
    cli.run(main, "sample.py")
