"""Does a checkpoint give the same however it is asked? `python -m nanodecoder verify --ckpt DIR`

Greedy texts of three prompts, each alone and with the cache, are the reference. Every other way of computing is led along
their tokens, so that its logits can be compared at each one and a difference does not grow into another text: without the
cache, in chunks, in a ragged batch, …; then beside transformers, place by place, where that is installed.

A token counts as changed where the other way would have chosen another one, and as a tie where the reference's two best logits
are closer than 1e-3, which rounding may turn. In float32 a change is a failure; in smaller types it is a figure.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import cli
from .against import against_transformers, load_theirs
from .cache import KVCache
from .checkpoint import DTYPES, load_model
from .cli import UsageError, option
from .completion import complete
from .generate import Stepper, generate, inference, prompt_to_ids
from .model import Decoder
from .parts import CheckpointError
from .sampler import Rows
from .storage import find_folder
from .tokenizer import Tokenizer

PROMPT = "The quick brown fox jumps over the lazy dog. 나는 오늘 학교에 갔다. def add(a, b): return a + b"
TIE = 1e-3  # logits closer than this may change places by rounding
CHUNKS = (1, 7, 3, 16)  # tokens at a time, over and over
Texts = list[list[int]]
Logits = list[Tensor]  # (N, V) of each text: what each of its new tokens was chosen from


@dataclass
class Options:
    """What the command line says."""

    ckpt: str | None = option(None, "checkpoint folder or hub name", names=("checkpoint_dir", "model"))
    against: str | None = option(
        None,
        "compare with this alone (unset: every way of computing, and transformers if installed)",
        choices=("transformers",),
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:1 or mps")
    dtype: str | None = option(None, "unset: float32, on CUDA the checkpoint's own", choices=("auto", *DTYPES))
    prompt: str = option(PROMPT, "the text whose beginnings are the prompts")
    max_tokens: int = option(64, "of the longest prompt")
    max_new_tokens: int = option(12, "of each text", names=("n",))
    tolerance: float = option(
        2e-5, "beside transformers: largest difference of a place that passes, relative to its values; rounding is about 7e-6"
    )
    all: bool = option(False, "print every place, not only those that leave")


@dataclass(frozen=True)
class Finding:
    """How one way of computing compares with the reference.

    size: the largest difference of logits; changed, ties: of `tokens`; first: where the first change was, in words.
    """

    way: str
    size: float
    changed: int
    ties: int
    tokens: int
    first: str = ""


def main(argv: Sequence[str]) -> None:
    """Print the comparisons; a change in float32, or of bits that must be equal, is a failed run."""
    options = cli.parse(Options, argv, "python -m nanodecoder verify", "Compare every way of computing a checkpoint's texts.")
    if options.ckpt is None:
        raise UsageError("give a checkpoint, --ckpt DIR")
    for name in ("max_tokens", "max_new_tokens"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} must be 1 or above, not {getattr(options, name)}")
    if not 0 < options.tolerance < 1:
        raise UsageError(f"--tolerance must be between 0 and 1, not {options.tolerance}")
    started = time.perf_counter()
    device = cli.choose_device(options.device)
    folder, file = find_folder(options.ckpt)
    dtype, fallback = cli.choose_dtype(options.dtype, device, folder)
    if fallback:
        print(fallback, file=sys.stderr)
    model = load_model(file or folder, device, dtype)
    tokenizer = _tokenizer(folder)
    ids = _prompt_ids(options, model, tokenizer)
    if options.against is not None:
        failed = _places(options, _float32(model, file or folder), file or folder, ids)[0]
    else:
        failed = _ways(options, model, tokenizer, ids, file or folder)
    if failed:
        raise CheckpointError("; ".join(failed))
    if options.against is None:
        print(f"all as it should be, in {time.perf_counter() - started:.0f} s")


# ------------------------------------------------------------------------------------------------------- ways of computing


def _ways(
    options: Options, model: Decoder, tokenizer: Tokenizer | None, ids: list[int], path: str | os.PathLike[str]
) -> list[str]:
    """Print how every way compares; -> a sentence for each that fails."""
    n = min(options.max_new_tokens, model.config.max_seq_len - len(ids) + 1)
    prompts = [ids[: max(1, len(ids) // part)] for part in (8, 3, 1)]
    lengths = ", ".join(str(len(prompt)) for prompt in prompts)
    kind = str(model.dtype).removeprefix("torch.")
    print(f"{kind} on {model.device}: prompts of {lengths} tokens and {n} new ones each, alone and with the cache, beside")
    print(f"{'':34}{'largest difference':>20}{'changed tokens':>16}{'ties':>6}")
    exactly = model.dtype == torch.float32
    failed: list[str] = []

    def show(finding: Finding) -> None:
        share = f"{finding.changed} of {finding.tokens}"
        first = f"   first {finding.first}" if finding.first and finding.changed else ""
        print(f"{finding.way:34}{finding.size:20.2g}{share:>16}{finding.ties:6}{first}", flush=True)
        if finding.changed and (exactly or finding.way in BITWISE):
            failed.append(f"{finding.way}: {share} tokens changed, first {finding.first}")

    texts, reference = _alone(model, prompts, n)
    for finding in findings(model, tokenizer, prompts, texts, reference):
        show(finding)
    fine = _float32(model, path)
    whole = [*ids, *texts[-1][:-1]]  # the longest text, which is led through the others' models
    if not exactly:
        with inference(fine):
            exact = fine(torch.tensor([whole]))[0, len(ids) - 1 :]
        show(compare_logits("itself in float32", [exact], reference[-1:], [exact.argmax(-1).tolist()], tokenizer))
    if not importlib.util.find_spec("transformers"):
        print('transformers is not installed, and was not compared: pip install -e ".[parity]"', file=sys.stderr)
        return failed
    left, theirs = _places(options, fine, path, whole)
    theirs = theirs[0, len(ids) - 1 :]
    if exactly:
        show(compare_logits("transformers", reference[-1:], [theirs], texts[-1:], tokenizer))
    else:
        own = load_theirs(find_folder(path)[0], model.dtype)
        with torch.no_grad():
            rough = own(torch.tensor([whole]), use_cache=False).logits[0, len(ids) - 1 :].float()
        show(compare_logits(f"transformers in {kind} and float32", [theirs], [rough], [theirs.argmax(-1).tolist()], tokenizer))
    return failed + left


def _float32(model: Decoder, path: str | os.PathLike[str]) -> Decoder:
    """The model in float32 on the CPU."""
    there = (model.dtype, model.device.type) == (torch.float32, "cpu")
    return model if there else load_model(path)


EXACT = "exact: bits alone and in a batch"
STREAMED = "streamed and whole"
BITWISE = (EXACT, STREAMED)  # which must be equal in any dtype


def _alone(model: Decoder, prompts: Texts, n: int) -> tuple[Texts, Logits]:
    """n new tokens after each prompt, each alone and with the cache; -> them, and what they were chosen from."""
    found = [_text(model, [prompt], n) for prompt in prompts]
    return [new[0] for new, _ in found], [logits[0] for _, logits in found]


def findings(model: Decoder, tokenizer: Tokenizer | None, prompts: Texts, texts: Texts, reference: Logits) -> Iterator[Finding]:
    """Every way of computing the texts after their prompts, beside the reference: each alone, with the cache."""
    n = len(texts[0])

    def beside(way: str, logits: Logits) -> Finding:
        return compare_logits(way, reference, logits, texts, tokenizer)

    yield beside("without the cache", _text(model, prompts, n, texts, use_cache=False)[1])
    yield beside(
        f"in chunks of {', '.join(map(str, CHUNKS))}", [_chunked(model, *one) for one in zip(prompts, texts, strict=True)]
    )
    yield beside("in one ragged batch", _text(model, prompts, n, texts)[1])
    path, model.attention = model.attention, "explicit" if model.attention == "fused" else "fused"
    try:
        yield beside(f"{model.attention} attention", _text(model, prompts, n, texts)[1])
    finally:
        model.attention = path
    exact = _text(model, prompts, n, texts, exact=True)[1]
    yield beside("exact", exact)
    others = [_text(model, [prompts[0]], n, texts[:1], exact=True)[1][0]]
    others += _text(model, prompts[::-1], n, texts[::-1], exact=True)[1]
    pairs = list(zip([exact[0], *exact[::-1]], others, [texts[0], *texts[::-1]], strict=True))
    unequal = sum(not torch.equal(a, b) for a, b, _ in pairs)
    size = max(float((a - b).abs().max()) for a, b, _ in pairs)
    tokens = sum(len(text) for _, _, text in pairs)
    yield Finding(EXACT, size, unequal, 0, tokens, "in a batch of another order")
    if tokenizer is not None:
        yield _streamed(model, tokenizer, prompts, n)


class Led:
    """A sampler that takes the tokens it is told to, and notes the logits it is shown."""

    def __init__(self, texts: Texts | None) -> None:
        self.texts = texts
        self.seen: dict[int, list[Tensor]] = {}

    def __call__(self, logits: Tensor, rows: Rows) -> Tensor:
        for row, one in zip(rows.seeds, logits, strict=True):
            self.seen.setdefault(row, []).append(one.float().cpu().clone())
        if self.texts is None:
            return logits.argmax(-1)
        return torch.tensor([self.texts[row][step - 1] for row, step in zip(rows.seeds, rows.steps, strict=True)])


def _text(
    model: Decoder, prompts: Texts, n: int, texts: Texts | None = None, use_cache: bool = True, exact: bool = False
) -> tuple[Texts, Logits]:
    """n new tokens after each prompt in one batch, greedy or led along `texts`; -> them, and what they were chosen from."""
    led = Led(texts)
    stepper = Stepper(model, sampler=led, use_cache=use_cache, exact=exact)
    for row, prompt in enumerate(prompts):
        stepper.add(prompt, max_new_tokens=n, seed=row, eos_ids=())
    new: Texts = [[] for _ in prompts]
    while len(stepper):
        step = stepper.step()
        for row, index in zip(step.rows, step.ids.tolist(), strict=True):
            new[row].append(index)
    return new, [torch.stack(led.seen[row]) for row in range(len(prompts))]


def _chunked(model: Decoder, prompt: list[int], text: list[int]) -> Tensor:
    """The logits (N, V) that a text's tokens are chosen from, with prompt and text fed to the cache in chunks."""
    ids = [*prompt, *text[:-1]]
    cache = KVCache(model.config, 1, len(ids), device=model.device, dtype=model.dtype)
    found = []
    with inference(model):
        start = 0
        while start < len(ids):
            length = CHUNKS[len(found) % len(CHUNKS)]
            if model.must_begin_anew(start, start, min(start + length, len(ids))):
                start, found = 0, []
                cache.truncate(0)
                length = len(ids)  # where angles change with the length, a row is fed whole
            found.append(model(torch.tensor([ids[start : start + length]], device=model.device), cache)[0].float().cpu())
            start += length
    return torch.cat(found)[len(prompt) - 1 :]


def compare_logits(way: str, reference: Logits, logits: Logits, texts: Texts, tokenizer: Tokenizer | None = None) -> Finding:
    """Largest difference, changed tokens and ties. reference and logits: (N, V) for each text of N tokens"""
    size, changed, ties, first = 0.0, 0, 0, ""
    for row, (wanted, got, text) in enumerate(zip(reference, logits, texts, strict=True)):
        size = max(size, float((wanted - got).abs().max().nan_to_num(float("inf"))))
        for place, token in enumerate(text):
            other = int(got[place].argmax())
            if other == token:
                continue
            best, second = wanted[place].topk(2).values.tolist() if wanted.shape[-1] > 1 else (0.0, 0.0)
            if best - second < TIE:
                ties += 1
                continue
            changed += 1
            names = [repr(tokenizer.decode([index])) if tokenizer else str(index) for index in (token, other)]
            first = first or f"in text {row + 1} at new token {place + 1}: {names[1]} for {names[0]}"
    return Finding(way, size, changed, ties, sum(map(len, texts)), first)


def _streamed(model: Decoder, tokenizer: Tokenizer, prompts: Texts, n: int) -> Finding:
    """Texts as they come in steps, beside those that `complete` gives and those that their ids decode to."""
    pieces = [""] * len(prompts)
    for step in generate(model, prompts, tokenizer=tokenizer, max_new_tokens=n, temperature=0.0):
        pieces = [said + text for said, text in zip(pieces, step.texts, strict=True)]
    whole = complete(model, tokenizer, prompts, n, temperature=0.0)
    wanted = []
    for done in whole:
        stream = tokenizer.stream(after=done.prompt_ids)
        wanted.append("".join([*map(stream.push, done.ids), stream.finish()]))
    wrong = [row for row, (a, b, done) in enumerate(zip(pieces, wanted, whole, strict=True)) if not a == b == done.text]
    first = f"in text {wrong[0] + 1}" if wrong else ""
    return Finding(STREAMED, 0.0, len(wrong), 0, sum(len(done.ids) for done in whole), first)


# ------------------------------------------------------------------------------------------------------ beside transformers


def _places(options: Options, model: Decoder, path: str | os.PathLike[str], ids: list[int]) -> tuple[list[str], Tensor]:
    """Print how a float32 pass compares with transformers', place by place; -> a sentence if it fails, and their logits."""
    differences, theirs = against_transformers(path, model, torch.tensor([ids]))
    left = [difference for difference in differences if difference.leaves(options.tolerance)]
    for difference in differences if options.all else left[:10]:
        mark = "  <- first to leave" if left and difference is left[0] else ""
        print(f"{difference.place:40} by {difference.size:.2g}, {difference.ratio:.2g} of its values{mark}")
    last = differences[-1]
    if not left:
        print(f"as transformers computes it: {len(differences)} places over {len(ids)} tokens, logits within {last.size:.2g}")
        return [], theirs
    sentence = (
        f"differs from transformers: {len(left)} of {len(differences)} places, first {left[0].place} by {left[0].size:.2g}, "
        f"{left[0].ratio:.2g} of its values; logits by {last.size:.2g} (tolerance {options.tolerance:g})"
    )
    return [sentence], theirs


def _tokenizer(folder: str | os.PathLike[str]) -> Tokenizer | None:
    try:
        return Tokenizer.load(folder)
    except CheckpointError as error:
        print(f"{error}: comparing on arbitrary ids", file=sys.stderr)
        return None


def _prompt_ids(options: Options, model: Decoder, tokenizer: Tokenizer | None) -> list[int]:
    """The prompt's ids, or arbitrary ones for a checkpoint without a tokenizer."""
    limit = min(options.max_tokens, model.config.max_seq_len)
    if tokenizer is not None:
        ids = prompt_to_ids(tokenizer, options.prompt)
    else:
        ids = torch.randint(model.config.vocab_size, (limit,), generator=torch.Generator().manual_seed(0)).tolist()
    return [index for index in ids if index < model.config.vocab_size][:limit] or [0]
