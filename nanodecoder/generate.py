"""The loop: ids in, ids out, one column at a time.

    prompt ids ─> forward ─> logits at each row's last token ─> sampler ─> one new id per row ─> forward ─> …

`Stepper` turns the loop once per `step()`; `generate` turns it until every row has ended; `complete` takes and gives text.
Rows of different lengths share a batch without padding that anyone could see, and a row that has ended leaves it.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .cache import KVCache
from .config import Sampling
from .model import Decoder
from .sampler import Rows, Sampler, require_finite
from .tokenizer import Tokenizer

NO_TOKEN = -1  # in a column, where a row had already ended
Prompts = Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True)
class Step:
    """One column of new ids.

    rows: whose ids these are; ids (B,) int64 on the CPU, NO_TOKEN where a row had ended before; reasons (B,): why a row ended
    with this id ("eos", "stop", "length" or "context"), else None; logprobs (B,) float32 if asked for: of the ids, by the raw
    model.
    """

    rows: tuple[int, ...]
    ids: Tensor
    reasons: tuple[str | None, ...]
    logprobs: Tensor | None = None


@dataclass
class _Row:
    """One request on its way."""

    number: int
    ids: list[int]  # prompt and what was generated
    fed: int  # how many of them the cache holds
    prompt_length: int
    limit: int  # how many new ids at most
    reason_at_limit: str
    seed: int
    settings: Sampler
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]


class Stepper:
    """The caller's own loop: `add` prompts, then `step` as often as there are rows. Each step is one forward pass for all.

    `sampler` is any callable (logits, rows) -> ids; without it the checkpoint's defaults hold, greedy if it says nothing.
    With `use_cache=False` every step computes all positions anew: slower, and the same tokens.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        sampler: Callable[[Tensor, Rows], Tensor] | None = None,
        use_cache: bool = True,
        logprobs: bool = False,
    ) -> None:
        self.model = model
        self.sampler = sampler if sampler is not None else default_sampler(model)
        self.use_cache = use_cache
        self.logprobs = logprobs
        self.forwards = 0  # passes so far
        self.positions = 0  # columns computed so far, over all rows: what a cache saves
        self._rows: list[_Row] = []
        self._joined: list[_Row] = []  # added since the last step: not in the cache yet
        self._cache: KVCache | None = None
        self._added = 0

    def __len__(self) -> int:
        """How many rows are on their way."""
        return len(self._rows) + len(self._joined)

    def add(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int = 50,
        seed: int | None = None,
        sampler: Sampler | None = None,
        stop_ids: Sequence[int] = (),
        eos_ids: Sequence[int] | None = None,
    ) -> int:
        """Add a prompt; -> its row number, counted from 0 and never used again.

        A row ends with one of `eos_ids` (the checkpoint's own, if not given) or of `stop_ids`, after `max_new_tokens`, or where
        the context ends: a context of L and a prompt of P allow L - P + 1 new tokens, since the last one need not be fed.
        Without a seed one is drawn.
        Raises ValueError for an empty prompt, an id outside the vocabulary, or a prompt longer than the context.
        """
        config, prompt = self.model.config, as_ids(ids)
        max_new_tokens = operator.index(max_new_tokens)
        if not prompt:
            raise ValueError("a prompt needs at least one id; an empty text starts from BOS, which is up to the caller here")
        for place, index in enumerate(prompt):
            if not 0 <= index < config.vocab_size:
                raise ValueError(f"id {index} at place {place} of the prompt is outside the vocabulary of {config.vocab_size}")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be 0 or above, not {max_new_tokens}")
        room = config.max_seq_len - len(prompt) + 1
        if room < 1:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, {max_new_tokens} new ones are asked for, and the context holds "
                f"{config.max_seq_len}: shorten the prompt"
            )
        own = sampler if sampler is not None else self.sampler if isinstance(self.sampler, Sampler) else Sampler()
        row = _Row(
            number=self._added,
            ids=prompt,
            fed=0,
            prompt_length=len(prompt),
            limit=min(max_new_tokens, room),
            reason_at_limit="length" if max_new_tokens <= room else "context",
            seed=draw_seeds(1)[0] if seed is None else operator.index(seed),
            settings=own,
            eos_ids=frozenset(self.model.generation.eos_ids if eos_ids is None else as_ids(eos_ids)),
            stop_ids=frozenset(as_ids(stop_ids)),
        )
        self._added += 1
        if row.limit > 0:
            self._joined.append(row)
        return row.number

    def step(self) -> Step:
        """One forward pass for every row: -> the column of new ids. Rows that end with it have left afterwards.

        Raises ValueError when there are no rows, or when the model's logits are not numbers (it says at which step).
        """
        if not len(self):
            raise ValueError("there are no rows to step: add a prompt first")
        with _inference(self.model):
            self._admit()
            logits = self._last_logits()
            rows = self._rows
            about = Rows(
                seeds=[row.seed for row in rows],
                positions=[len(row.ids) for row in rows],
                ids=[row.ids for row in rows],
                steps=[len(row.ids) - row.prompt_length + 1 for row in rows],
                settings=[row.settings for row in rows],
            )
            if not isinstance(self.sampler, Sampler):  # which looks for itself
                require_finite(logits, about)
            chosen = self.sampler(logits, about)
            logprobs = None
            if self.logprobs:
                logprobs = logits.float().log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist()
            ids = chosen.tolist()
        reasons = tuple(self._accept(row, index) for row, index in zip(rows, ids, strict=True))
        numbers = tuple(row.number for row in rows)
        self._release([place for place, reason in enumerate(reasons) if reason is None])
        return Step(numbers, torch.tensor(ids), reasons, None if logprobs is None else torch.tensor(logprobs))

    def _accept(self, row: _Row, index: int) -> str | None:
        """Append an id to its row; -> why the row ends with it, if it does."""
        if self.use_cache:
            row.fed = len(row.ids)  # only now: a step whose sampler failed can be made again
        row.ids.append(index)
        if index in row.eos_ids:
            return "eos"
        if index in row.stop_ids:
            return "stop"
        return row.reason_at_limit if len(row.ids) - row.prompt_length == row.limit else None

    def _last_logits(self) -> Tensor:
        """Feed what the cache lacks of every row; -> the logits (B, V) after each row's last token."""
        for row in self._rows:
            if self.use_cache and self.model.must_begin_anew(row.fed, row.fed, len(row.ids)):
                row.fed = 0
        if self._cache is not None:  # where a row begins anew, or a step that failed is made again
            self._cache.truncate([row.fed for row in self._rows])
        news = [row.ids[row.fed :] for row in self._rows]
        counts = [len(new) for new in news]
        columns = max(counts)
        tokens = torch.tensor([new + [0] * (columns - len(new)) for new in news], device=self.model.device)
        alike = min(counts) == columns
        x = self.model.trunk(tokens, self._cache, counts=None if alike else counts)  # (B, T, dim)
        last = x[:, -1] if alike else x[torch.arange(len(x), device=x.device), torch.tensor(counts, device=x.device) - 1]
        self.forwards += 1
        self.positions += sum(counts)
        return self.model.head(last)

    def _admit(self) -> None:
        """Give rows that were added since the last step their place in the batch and in the cache."""
        if not self._joined:
            return
        old, joined = self._rows, self._joined
        if self.use_cache:
            # The last new id need not be fed, so it needs no slot.
            slots = max(row.prompt_length + row.limit - 1 for row in old + joined)
            if self._cache is None:
                model = self.model
                self._cache = KVCache(model.config, len(joined), slots, device=model.device, dtype=model.dtype)
            else:
                if slots > self._cache.max_seq_len:
                    self._cache.resize(slots)
                self._cache.select([*range(len(old)), *[None] * len(joined)])
        self._rows, self._joined = old + joined, []

    def _release(self, kept: list[int]) -> None:
        """Let rows that have ended leave, so that they cost nothing."""
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[place] for place in kept]
        if not kept:
            self._cache = None
        elif self._cache is not None:
            self._cache.select(kept)


def generate(
    model: Decoder,
    prompts: Prompts,
    *,
    sampler: Callable[[Tensor, Rows], Tensor] | None = None,
    max_new_tokens: int = 50,
    seeds: Sequence[int] | None = None,
    stop_ids: Sequence[int] = (),
    eos_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    use_cache: bool = True,
    logprobs: bool = False,
    **settings: Any,
) -> Iterator[Step]:
    """Continue prompts (lists of ids, of any lengths) together, yielding one column of new ids per forward pass.

    `break` stops early. Each row gets the ids that it would get alone. How to sample: `sampler`, or what `Sampler` takes as
    keywords, else the checkpoint's defaults (greedy if it has none). `seeds`: one per row; unset, drawn. A row ends as in
    `Stepper.add`; `ignore_eos` is `eos_ids=()`.
    Raises ValueError, before the first step, for what `Stepper.add` refuses.
    """
    if settings:
        if sampler is not None:
            raise ValueError(f"give either sampler= or {', '.join(settings)}, not both")
        sampler = default_sampler(model, **settings)
    rows = [as_ids(prompt) for prompt in prompts]
    seeds = _as_seeds(seeds, len(rows))
    stepper = Stepper(model, sampler=sampler, use_cache=use_cache, logprobs=logprobs)
    for prompt, seed in zip(rows, seeds, strict=True):
        stepper.add(prompt, max_new_tokens=max_new_tokens, seed=seed, stop_ids=stop_ids, eos_ids=() if ignore_eos else eos_ids)
    return _columns(stepper, len(rows))


def _columns(stepper: Stepper, batch_size: int) -> Iterator[Step]:
    """Step until all rows have ended, with a place for every row in every column."""
    while len(stepper):
        step = stepper.step()
        rows = list(step.rows)
        ids = torch.full((batch_size,), NO_TOKEN)
        ids[rows] = step.ids
        reasons: list[str | None] = [None] * batch_size
        for row, reason in zip(rows, step.reasons, strict=True):
            reasons[row] = reason
        logprobs = None
        if step.logprobs is not None:
            logprobs = torch.full((batch_size,), float("nan"))
            logprobs[rows] = step.logprobs
        yield Step(tuple(range(batch_size)), ids, tuple(reasons), logprobs)


@dataclass(frozen=True)
class Completion:
    """What became of one prompt.

    text: the new text only; ids: the new ids, without the end id; prompt_ids: what went in; finish_reason: "eos" (an end id),
    "stop" (one of the caller's stop_ids), "length" (max_new_tokens: the text may be unfinished) or "context" (the model's
    context is full); forwards: passes that the row took part in; seed: the row's own; logprobs: of the ids, by the raw model,
    if asked for.
    """

    text: str
    ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    forwards: int
    seed: int
    logprobs: list[float] | None = None


def complete(
    model: Decoder,
    tokenizer: Tokenizer | None,
    prompts: Sequence[str | Sequence[int]] | str | Tensor,
    max_new_tokens: int = 50,
    *,
    seeds: Sequence[int] | None = None,
    logprobs: bool = False,
    **options: Any,
) -> list[Completion]:
    """Continue prompts, texts or lists of ids, of any lengths in one batch; -> one Completion per prompt, in their order.

    Takes what `generate` takes. Without a tokenizer, ids go in and `text` is "". An empty text starts from BOS.
    """
    batch = [prompts] if isinstance(prompts, str) else list(prompts)
    prompt_ids = [prompt_to_ids(tokenizer, prompt) for prompt in batch]
    seeds = _as_seeds(seeds, len(batch))
    if tokenizer is not None and options.get("eos_ids") is None:
        options["eos_ids"] = end_ids(model, tokenizer)

    new: list[list[int]] = [[] for _ in batch]
    scores: list[list[float]] = [[] for _ in batch]
    reasons = ["length"] * len(batch)  # of a row that was asked for nothing
    forwards = [0] * len(batch)
    for step in generate(model, prompt_ids, max_new_tokens=max_new_tokens, seeds=seeds, logprobs=logprobs, **options):
        for row, (index, reason) in enumerate(zip(step.ids.tolist(), step.reasons, strict=True)):
            if index == NO_TOKEN:
                continue
            forwards[row] += 1
            reasons[row] = reason or reasons[row]
            if reason not in ("eos", "stop"):
                new[row].append(index)
                if step.logprobs is not None:
                    scores[row].append(float(step.logprobs[row]))

    def text(row: int) -> str:
        if tokenizer is None:
            return ""
        stream = tokenizer.stream(after=prompt_ids[row])
        return "".join([*map(stream.push, new[row]), stream.finish()])

    return [
        Completion(
            text=text(row),
            ids=new[row],
            prompt_ids=prompt_ids[row],
            finish_reason=reasons[row],
            forwards=forwards[row],
            seed=seeds[row],
            logprobs=scores[row] if logprobs else None,
        )
        for row in range(len(batch))
    ]


def prompt_to_ids(tokenizer: Tokenizer | None, prompt: str | Sequence[int]) -> list[int]:
    """A prompt's ids. An empty text starts from BOS; without a BOS from a newline, with a warning.

    Raises ValueError for a text without a tokenizer, or when there is nothing to start from.
    """
    if not isinstance(prompt, str):
        return as_ids(prompt)
    if tokenizer is None:
        raise ValueError("a text prompt needs a tokenizer; give Tokenizer.load(path), or lists of ids as prompts")
    ids = tokenizer.encode(prompt)
    if ids:
        return ids
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id]
    ids = tokenizer.encode("\n")
    if not ids:
        raise ValueError("the prompt is empty, and the tokenizer has neither BOS nor newline to start from; give a prompt")
    warnings.warn("the tokenizer has no BOS: the empty prompt starts from a newline", stacklevel=2)
    return ids


def as_ids(ids: Any) -> list[int]:
    """Ids given as a list, a range, a tensor or an array -> a list of int. Raises ValueError for anything else."""
    try:
        return [operator.index(index) for index in ids]
    except TypeError:
        raise ValueError(
            f"ids must be a sequence of whole numbers, prompts a list of such ([[1, 2, 3]] for a single one), not {ids!r:.60}"
        ) from None


def _as_seeds(seeds: Any, rows: int) -> list[int]:
    """One whole number per row, drawn if none are given."""
    if seeds is None:
        return draw_seeds(rows)
    try:
        wanted = [operator.index(seed) for seed in seeds]
    except TypeError:
        raise ValueError(f"seeds must be whole numbers, one per prompt, not {seeds!r:.60}") from None
    if len(wanted) != rows:
        raise ValueError(f"{len(wanted)} seeds for {rows} prompts; give one per prompt")
    return wanted


def end_ids(model: Decoder, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every id that ends a text, whichever of the checkpoint's files names it."""
    return tuple(dict.fromkeys((*model.generation.eos_ids, *tokenizer.eos_ids)))


def default_sampler(model: Decoder, **settings: Any) -> Sampler:
    """The checkpoint's way of sampling (greedy if it says nothing), with these settings instead where given."""
    said = {field.name: getattr(model.generation, field.name) for field in fields(Sampling)}
    return Sampler(**{**said, **settings})


def draw_seeds(n: int) -> list[int]:
    """n consecutive seeds from a start that the operating system draws."""
    start = int.from_bytes(os.urandom(4), "little")
    return [start + i for i in range(n)]


@contextmanager
def _inference(model: Decoder) -> Iterator[None]:
    """No recording for gradients, and eval mode while it lasts."""
    training = [module for module in model.modules() if module.training] if model.training else []
    if training:
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:  # each as it was: some may have been in eval mode on purpose
            module.training = True
