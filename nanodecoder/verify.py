"""Does a checkpoint give the same however it is asked? `python -m nanodecoder verify --ckpt DIR`

Greedy texts of three prompts, each alone and with the cache, are the reference. Every other way of computing is led along
their tokens, so that its logits can be compared at each one and a difference does not grow into another text: without the
cache, in chunks, in a ragged batch, …; then beside transformers, place by place, where that is installed.

A token counts as changed where the other way would have chosen another one, and as a tie where the reference's two best logits
are closer than 1e-3, which rounding may turn. In float32 a change is a failure, and so are logits that are further apart than
rounding makes them; in smaller types both are figures.
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
from .cache import EXACT_SLOTS, KVCache
from .checkpoint import DTYPES, load_model
from .cli import UsageError, option
from .compiled import why_not
from .completion import complete
from .generate import Stepper, generate, inference, prompt_to_ids
from .model import Decoder
from .parts import CheckpointError
from .sampler import Rows, Sampler
from .storage import find_folder
from .tokenizer import Tokenizer

PROMPT = "The quick brown fox jumps over the lazy dog. 나는 오늘 학교에 갔다. def add(a, b): return a + b"
TIE = 1e-3  # logits closer than this may change places by rounding
APART = 1e-4  # of the largest logit: more than rounding in float32, which makes about 5e-6 of it
CHUNKS = (1, 7, 3, 16)  # tokens at a time, over and over
LONG = EXACT_SLOTS + 40  # tokens of a prompt whose exact passes look at more than one block of slots
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
    compile: bool = option(True, "compare the compiled step too, which takes some seconds to compile")
    all: bool = option(False, "print every place, not only those that leave")


@dataclass(frozen=True)
class Finding:
    """How one way of computing compares with the reference.

    size: the largest difference of logits; apart: whether it is more than rounding makes; changed, ties: of `number` tokens, or
    of texts; first: where the first change was, in words.
    """

    way: str
    size: float
    changed: int
    ties: int
    number: int
    first: str = ""
    unit: str = "tokens"
    apart: bool = False


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
    try:
        failed = _compare(options, model, tokenizer, ids, file or folder)
    except ValueError as error:  # logits that are not numbers
        raise CheckpointError(str(error)) from None
    if failed:
        raise CheckpointError("; ".join(failed))
    if options.against is None:
        print(f"all as it should be, in {time.perf_counter() - started:.0f} s")


def _compare(
    options: Options, model: Decoder, tokenizer: Tokenizer | None, ids: list[int], path: str | os.PathLike[str]
) -> list[str]:
    """-> a sentence for each comparison that fails."""
    if options.against is not None:
        return _places(options, _float32(model, path), path, ids)[0]
    return _ways(options, model, tokenizer, ids, path)


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
        share = f"{finding.changed} of {finding.number}" + f" {finding.unit}" * (finding.unit != "tokens")
        first = f"   first {finding.first}" if finding.first and finding.changed else ""
        print(f"{finding.way:34}{finding.size:20.2g}{share:>16}{finding.ties:6}{first}", flush=True)
        if finding.changed and (exactly or finding.way in BITWISE):
            failed.append(f"{finding.way}: {finding.changed} of {finding.number} {finding.unit} changed, first {finding.first}")
        elif finding.apart and exactly:
            failed.append(f"{finding.way}: logits apart by {finding.size:.2g}, which is more than rounding")

    texts, reference = _alone(model, prompts, n)
    missing = why_not(model.device) if options.compile else None
    if missing:
        print(f"nothing compiled: {missing}", file=sys.stderr)
    for finding in findings(model, tokenizer, prompts, texts, reference, options.compile and not missing):
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


def findings(
    model: Decoder,
    tokenizer: Tokenizer | None,
    prompts: Texts,
    texts: Texts,
    reference: Logits,
    compiles: bool = False,
) -> Iterator[Finding]:
    """Every way of computing the texts after their prompts, beside the reference: each alone, with the cache."""
    n = len(texts[0])

    def beside(way: str, logits: Logits) -> Finding:
        return compare_logits(way, reference, logits, texts, tokenizer)

    yield beside("without the cache", _text(model, prompts, n, texts, use_cache=False)[1])
    yield beside(
        f"in chunks of {', '.join(map(str, CHUNKS))}", [_chunked(model, *one) for one in zip(prompts, texts, strict=True)]
    )
    yield beside("in one ragged batch", _text(model, prompts, n, texts)[1])
    yield beside("one after the other, as turns", _text(model, prompts, n, texts, turns=True)[1])
    if not model.config.attn_softcap:  # with which there is one path only
        path, model.attention = model.attention, "explicit" if model.attention == "fused" else "fused"
        try:
            yield beside(f"{model.attention} attention", _text(model, prompts, n, texts)[1])
        finally:
            model.attention = path
    yield _sampled(model, prompts, n, tokenizer)
    yield beside("exact", _text(model, prompts, n, texts, exact=True)[1])
    yield _exact_bits(model, prompts)
    if compiles:
        yield beside(
            "compiled", [_text(model, [one], n, [new], compile=True)[1][0] for one, new in zip(prompts, texts, strict=True)]
        )
        yield beside("compiled, in one ragged batch", _text(model, prompts, n, texts, compile=True)[1])
    if tokenizer is not None:
        yield _streamed(model, tokenizer, prompts, n)


def _sampled(model: Decoder, prompts: Texts, n: int, tokenizer: Tokenizer | None) -> Finding:
    """Texts drawn with seeds, each alone and all in one batch: what is compared is logits with the noise of the seed."""
    found = [_text(model, [prompt], n, draws=True, seeds=[row]) for row, prompt in enumerate(prompts)]
    texts, reference = [new[0] for new, _ in found], [logits[0] for _, logits in found]
    together = _text(model, prompts, n, texts, draws=True)[1]
    return compare_logits("drawn with seeds, in one batch", reference, together, texts, tokenizer)


def _exact_bits(model: Decoder, prompts: Texts) -> Finding:
    """Exact logits of each prompt alone, in a batch with a long one, and in that batch the other way round."""
    long = (prompts[-1] * LONG)[: min(LONG, model.config.max_seq_len - 2)]
    rows, n = [*prompts, long], 2
    texts, together = _text(model, rows, n, exact=True)
    turned = _text(model, rows[::-1], n, texts[::-1], exact=True)[1][::-1]
    alone = [_text(model, [prompt], n, [text], exact=True)[1][0] for prompt, text in zip(rows, texts, strict=True)]
    pairs = [*zip(together, turned, strict=True), *zip(together, alone, strict=True)]
    unequal = sum(not torch.equal(a, b) for a, b in pairs)
    size = max(float((a - b).abs().max()) for a, b in pairs)
    return Finding(EXACT, size, unequal, 0, len(pairs), "beside other neighbours", unit="texts")


class Led:
    """A sampler that takes the tokens it is told to (or chooses), and notes what it is shown, noise included if it `draws`."""

    def __init__(self, texts: Texts | None, draws: bool, numbers: Sequence[int]) -> None:
        self.texts, self.draws, self.numbers = texts, draws, numbers
        self.seen: dict[int, list[Tensor]] = {}

    def __call__(self, logits: Tensor, rows: Rows) -> Tensor:
        if self.draws:
            logits = Sampler(temperature=1.0).perturb(logits, Rows(rows.seeds, rows.positions))
        for row, one in zip(rows.seeds, logits, strict=True):
            self.seen.setdefault(row, []).append(one.float().cpu().clone())
        if self.texts is None:
            return logits.argmax(-1)
        places = [self.numbers.index(seed) for seed in rows.seeds]
        return torch.tensor([self.texts[place][step - 1] for place, step in zip(places, rows.steps, strict=True)])


def _text(
    model: Decoder,
    prompts: Texts,
    n: int,
    texts: Texts | None = None,
    *,
    seeds: Sequence[int] | None = None,
    draws: bool = False,
    turns: bool = False,
    **way: bool,
) -> tuple[Texts, Logits]:
    """n new tokens after each prompt, greedy, drawn, or led along `texts`; -> them, and what they were chosen from.

    All in one batch, or in `turns`, one after the other.
    """
    seeds = range(len(prompts)) if seeds is None else seeds
    led = Led(texts, draws, list(seeds))
    stepper = Stepper(model, sampler=led, **way)
    new: Texts = [[] for _ in prompts]

    def run() -> None:
        while len(stepper):
            step = stepper.step()
            for row, index in zip(step.rows, step.ids.tolist(), strict=True):
                new[row].append(index)

    for prompt, seed in zip(prompts, seeds, strict=True):
        stepper.add(prompt, max_new_tokens=n, seed=seed, eos_ids=())
        if turns:
            run()
    run()
    return new, [torch.stack(led.seen[seed]) for seed in seeds]


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
    largest = max(float(wanted[wanted.isfinite()].abs().max()) for wanted in reference)
    return Finding(way, size, changed, ties, sum(map(len, texts)), first, apart=not size <= APART * largest)


def _streamed(model: Decoder, tokenizer: Tokenizer, prompts: Texts, n: int) -> Finding:
    """Texts as they come in steps, beside those that `complete` gives and those that the library decodes at once."""
    pieces = [""] * len(prompts)
    for step in generate(model, prompts, tokenizer=tokenizer, max_new_tokens=n, temperature=0.0):
        pieces = [said + text for said, text in zip(pieces, step.texts, strict=True)]
    wrong = []
    for row, (said, done) in enumerate(zip(pieces, complete(model, tokenizer, prompts, n, temperature=0.0), strict=True)):
        at_once = tokenizer.decode_at_once([*done.prompt_ids, *done.ids])
        # Where bytes are no characters, the library and we may give them up differently
        agrees = at_once.endswith(said) or "\N{REPLACEMENT CHARACTER}" in at_once + said
        if said != done.text or not agrees:
            wrong.append(row)
    first = f"in text {wrong[0] + 1}" if wrong else ""
    return Finding(STREAMED, 0.0, len(wrong), 0, len(prompts), first, unit="texts")


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
    """The prompt's ids, or arbitrary ones for a checkpoint without a tokenizer.

    Of the default prompt, a tokenizer of few characters gets those that it knows.
    """
    limit = min(options.max_tokens, model.config.max_seq_len)
    if tokenizer is not None:
        try:
            ids = prompt_to_ids(tokenizer, options.prompt)
        except ValueError as error:
            if options.prompt != PROMPT:
                raise UsageError(f"--prompt: {error}") from None
            ids = prompt_to_ids(tokenizer, "".join(character for character in PROMPT if _is_known(tokenizer, character)))
    else:
        ids = torch.randint(model.config.vocab_size, (limit,), generator=torch.Generator().manual_seed(0)).tolist()
    return [index for index in ids if index < model.config.vocab_size][:limit] or [0]


def _is_known(tokenizer: Tokenizer, character: str) -> bool:
    try:
        tokenizer.encode(character)
    except ValueError:
        return False
    return True
