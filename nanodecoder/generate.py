"""The loop: ids in, ids out, one column at a time.

    prompt ids ─> forward ─> logits at each row's last token ─> sampler ─> one new id per row ─> forward ─> …

`Stepper` turns the loop once per `step()`; `generate` turns it until every row has ended. Rows of different lengths share a
batch without padding that anyone could see, and a row that has ended leaves it.
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

from .batch import Anew, Blocks, Row, Together
from .compiled import compiled
from .config import Sampling
from .model import Decoder
from .sampler import Filter, Rows, Sampler, require_finite
from .tokenizer import Stream, Tokenizer

NO_TOKEN = -1  # in a column, where a row had already ended
Prompts = Sequence[Sequence[int]] | Tensor
Choice = Callable[[Tensor, Rows], Tensor]  # what a sampler is: (logits, rows) -> ids


class PromptTooLong(ValueError):
    """A prompt that is longer than the context."""


@dataclass(frozen=True)
class Step:
    """One column of new ids.

    rows: whose ids these are; ids (B,) int64 on the CPU, NO_TOKEN where a row had ended before; reasons (B,): why a row ended
    with this id ("eos", "stop", "length" or "context"), else None; marks (B,): whether the id itself ended it, an end id or one
    of the caller's, and is no part of the text.
    Where the stepper has a tokenizer, texts (B,): what can be shown of each row now (half a character waits for its other
    half, and what may become a stop text is held back).
    Where asked for, by the raw model: logprobs (B,) float32 of the ids; alternatives: the likeliest ids and their
    log-probabilities, (B, n) both.
    """

    rows: tuple[int, ...]
    ids: Tensor
    reasons: tuple[str | None, ...]
    marks: tuple[bool, ...]
    texts: tuple[str, ...] | None = None
    logprobs: Tensor | None = None
    alternatives: tuple[Tensor, Tensor] | None = None


@dataclass(eq=False)
class _Row(Row):
    """One request on its way."""

    number: int
    prompt_length: int
    limit: int  # how many new ids at most
    reason_at_limit: str
    seed: int
    settings: Sampler
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    stream: Stream | None


class Stepper:
    """The caller's own loop: `add` prompts, then `step` as often as there are rows. Each step is one forward pass for all.

    `sampler` is any callable (logits, rows) -> ids; without it the checkpoint's defaults hold, greedy if it says nothing.
    `filters` are logits -> logits functions that come before it. With a `tokenizer` the steps carry text, prompts may be
    texts, and rows may stop at texts.
    With `use_cache=False` every step computes all positions anew: slower, and the same tokens. With `exact=True` passes have
    fixed shapes: slower, and the logits' bits depend on the row alone (see `batch.Blocks`). With `compile=True` the step of one
    new token per row is compiled at its first call, which takes seconds, and is faster from then on (see `compiled`).
    """

    def __init__(
        self,
        model: Decoder,
        *,
        tokenizer: Tokenizer | None = None,
        sampler: Choice | None = None,
        filters: Sequence[Filter] = (),
        use_cache: bool = True,
        exact: bool = False,
        compile: bool = False,
        logprobs: bool = False,
        top_logprobs: int = 0,
    ) -> None:
        if compile and (exact or not use_cache):
            other = "exact=True" if exact else "use_cache=False"
            raise ValueError(f"compile=True compiles the step through the cache, which {other} does not take: leave one out")
        if exact and not use_cache:
            raise ValueError("exact fixes the shapes of passes that fill a cache: it cannot go with use_cache=False")
        if not 0 <= top_logprobs <= model.config.vocab_size:
            raise ValueError(f"top_logprobs must be from 0 to the {model.config.vocab_size} ids there are, not {top_logprobs}")
        self.model = model
        self.tokenizer = tokenizer
        self.sampler = sampler if sampler is not None else default_sampler(model)
        self.filters = tuple(filters)
        self.logprobs = logprobs
        self.top_logprobs = top_logprobs
        step = compiled(model) if compile else None
        self._passes = Blocks(model) if exact else Together(model, step) if use_cache else Anew(model)
        self._rows: list[_Row] = []
        self._added = 0

    def __len__(self) -> int:
        """How many rows are on their way."""
        return len(self._rows)

    @property
    def forwards(self) -> int:
        """Passes so far."""
        return self._passes.forwards

    @property
    def positions(self) -> int:
        """Tokens computed so far, over all rows: what a cache saves."""
        return self._passes.positions

    def add(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 50,
        seed: int | None = None,
        sampler: Sampler | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        eos_ids: Sequence[int] | None = None,
    ) -> int:
        """Add a prompt; -> its row number, counted from 0 and never used again.

        A row ends with one of `eos_ids` (the checkpoint's own, if not given) or of `stop_ids`, where one of the `stop` texts
        appears, after `max_new_tokens`, or where the context ends: a context of L and a prompt of P allow L - P + 1 new
        tokens, since the last one need not be fed. Without a seed one is drawn. What rows that ended last hold is kept for
        prompts that begin with it.
        Raises ValueError for an empty prompt, an id outside the vocabulary, or a prompt longer than the context.
        """
        config, ids = self.model.config, prompt_to_ids(self.tokenizer, prompt)
        max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
        if not ids:
            raise ValueError("a prompt needs at least one id; an empty text starts from BOS, which is up to the caller here")
        for place, index in enumerate(ids):
            if not 0 <= index < config.vocab_size:
                raise ValueError(f"id {index} at place {place} of the prompt is outside the vocabulary of {config.vocab_size}")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be 0 or above, not {max_new_tokens}")
        room = config.max_seq_len - len(ids) + 1
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, {max_new_tokens} new ones are asked for, and the context holds "
                f"{config.max_seq_len}: shorten the prompt"
            )
        if sampler is not None and not isinstance(self.sampler, Sampler):
            raise ValueError("a row's own sampler would be ignored: this stepper's sampler is a function that chooses for all")
        stop = [stop] if isinstance(stop, str) else list(stop or ())
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be a text or a list of texts, none of them empty, not {stop!r:.60}")
        if stop and self.tokenizer is None:
            raise ValueError("stop texts need a tokenizer to read the new ids; give one, or stop_ids")
        marks = {text: self.tokenizer.special_id(text) for text in stop}  # such as "<|im_end|>", which no text shows
        for text, index in marks.items():
            held = self.tokenizer.special_in(text)
            if held and index is None:
                raise ValueError(f"the stop text {text!r} holds {held!r}, a mark that no text shows; give that alone")
        own = sampler if sampler is not None else self.sampler if isinstance(self.sampler, Sampler) else Sampler()
        limit = min(max_new_tokens, room)
        row = _Row(
            ids=ids,
            slots=max(1, len(ids) + limit - 1),
            number=self._added,
            prompt_length=len(ids),
            limit=limit,
            reason_at_limit="length" if max_new_tokens <= room else "context",
            seed=draw_seeds(1)[0] if seed is None else operator.index(seed),
            settings=own,
            eos_ids=frozenset(end_ids(self.model, self.tokenizer) if eos_ids is None else as_ids(eos_ids)),
            stop_ids=frozenset([*as_ids(stop_ids), *(index for index in marks.values() if index is not None)]),
            stream=self.tokenizer
            and self.tokenizer.stream(after=ids, stop=[text for text, index in marks.items() if index is None]),
        )
        self._added += 1
        if limit > 0:
            self._rows.append(row)
        return row.number

    def remove(self, number: int) -> None:
        """Let a row go before its end. Raises ValueError for one that is not on its way."""
        left = [row for row in self._rows if row.number != number]
        if len(left) == len(self._rows):
            raise ValueError(f"row {number} is not on its way")
        self._rows = left

    def step(self) -> Step:
        """One forward pass for every row: -> the column of new ids. Rows that end with it have left afterwards.

        Raises ValueError when there are no rows, or when the model's logits are not numbers (it says at which step).
        """
        rows = self._rows
        if not rows:
            raise ValueError("there are no rows to step: add a prompt first")
        about = Rows(
            seeds=[row.seed for row in rows],
            positions=[len(row.ids) for row in rows],
            ids=[row.ids for row in rows],
            steps=[len(row.ids) - row.prompt_length + 1 for row in rows],
            settings=[row.settings for row in rows],
        )
        with inference(self.model):
            raw = self._passes.logits(rows)
            logits = raw
            for function in self.filters:
                logits = function(logits)
            if not isinstance(self.sampler, Sampler):  # which looks for itself
                require_finite(logits, about)
            ids = self.sampler(logits, about).tolist()
            logprobs, alternatives = self._look(raw, ids)
        for row, index in zip(rows, ids, strict=True):  # only now: a step whose sampler failed can be made again
            row.ids.append(index)
        marks = tuple(index in row.eos_ids or index in row.stop_ids for row, index in zip(rows, ids, strict=True))
        texts = [
            row.stream.push(index) if row.stream is not None and not mark else ""
            for row, index, mark in zip(rows, ids, marks, strict=True)
        ]
        reasons = list(map(_ended, rows))
        for place, (row, reason) in enumerate(zip(rows, reasons, strict=True)):
            if reason is not None and row.stream is not None:
                texts[place] += row.stream.finish()
                # What was held back to the last may hold a stop text
                reasons[place] = "stop" if row.stream.stopped else reason
        self._rows = [row for row, reason in zip(rows, reasons, strict=True) if reason is None]
        return Step(
            rows=tuple(row.number for row in rows),
            ids=torch.tensor(ids),
            reasons=tuple(reasons),
            marks=marks,
            texts=None if self.tokenizer is None else tuple(texts),
            logprobs=logprobs,
            alternatives=alternatives,
        )

    def _look(self, logits: Tensor, ids: Sequence[int]) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """Log-probabilities of the chosen ids and of the likeliest ones, where asked for."""
        if not self.logprobs and not self.top_logprobs:
            return None, None
        all_of_them = logits.float().log_softmax(-1)  # (B, V)
        chosen = all_of_them.gather(-1, torch.tensor(ids, device=logits.device)[:, None])[:, 0]
        best = all_of_them.topk(self.top_logprobs) if self.top_logprobs else None
        # Tensors made in inference mode could not be used in a graph: hand out ordinary ones
        with torch.inference_mode(False):
            ordinary = torch.tensor(chosen.tolist())
            top = None if best is None else (torch.tensor(best.indices.tolist()), torch.tensor(best.values.tolist()))
        return ordinary, top


def _ended(row: _Row) -> str | None:
    """Why a row ends with its newest id, if it does."""
    if row.ids[-1] in row.eos_ids:
        return "eos"
    if row.ids[-1] in row.stop_ids or (row.stream is not None and row.stream.stopped):
        return "stop"
    return row.reason_at_limit if len(row.ids) - row.prompt_length == row.limit else None


def generate(
    model: Decoder,
    prompts: Prompts,
    *,
    tokenizer: Tokenizer | None = None,
    sampler: Choice | Sequence[Sampler] | None = None,
    filters: Sequence[Filter] = (),
    max_new_tokens: int = 50,
    seeds: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    eos_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    use_cache: bool = True,
    exact: bool = False,
    compile: bool = False,
    logprobs: bool = False,
    top_logprobs: int = 0,
    **settings: Any,
) -> Iterator[Step]:
    """Continue prompts (lists of ids, of any lengths) together, yielding one column of new ids per forward pass.

    `break` stops early. Each row gets the ids that it would get alone. How to sample: `sampler` (a list gives each row its
    own), or what `Sampler` takes as keywords, else the checkpoint's defaults (greedy if it has none). `seeds`: one per row;
    unset, drawn. A row ends as in `Stepper.add`; `ignore_eos` is `eos_ids=()`. The rest is as in `Stepper`.
    Raises ValueError, before the first step, for what `Stepper` and `Stepper.add` refuse.
    """
    if settings:
        if sampler is not None:
            raise ValueError(f"give either sampler= or {', '.join(settings)}, not both")
        sampler = default_sampler(model, **settings)
    if ignore_eos and eos_ids is not None:
        raise ValueError("give either eos_ids= or ignore_eos=True: with both, one would be ignored")
    rows = [as_ids(prompt) for prompt in prompts]
    seeds = as_seeds(seeds, len(rows))
    each = list(sampler) if isinstance(sampler, Sequence) else [None] * len(rows)
    if isinstance(sampler, Sequence) and not all(isinstance(own, Sampler) for own in each):
        raise ValueError("a list of samplers must hold a Sampler for each prompt; a function of the caller's serves all rows")
    if len(each) != len(rows):
        raise ValueError(f"{len(each)} samplers for {len(rows)} prompts; give one for all, or one per prompt")
    stepper = Stepper(
        model,
        tokenizer=tokenizer,
        sampler=None if isinstance(sampler, Sequence) else sampler,
        filters=filters,
        use_cache=use_cache,
        exact=exact,
        compile=compile,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )
    ends = {"stop": stop, "stop_ids": stop_ids, "eos_ids": () if ignore_eos else eos_ids}
    for prompt, seed, own in zip(rows, seeds, each, strict=True):
        stepper.add(prompt, max_new_tokens=max_new_tokens, seed=seed, sampler=own, **ends)
    return _columns(stepper, len(rows))


def _columns(stepper: Stepper, batch_size: int) -> Iterator[Step]:
    """Step until all rows have ended, with a place for every row in every column."""
    while len(stepper):
        step = stepper.step()
        rows = list(step.rows)

        def spread(values: Tensor | None, missing: float, rows: list[int] = rows) -> Tensor | None:
            if values is None:
                return None
            column = torch.full((batch_size, *values.shape[1:]), missing, dtype=values.dtype)
            column[rows] = values
            return column

        place = {row: place for place, row in enumerate(rows)}

        def each(values: Sequence[Any], missing: Any, place: dict[int, int] = place) -> tuple[Any, ...]:
            return tuple(values[place[row]] if row in place else missing for row in range(batch_size))

        yield Step(
            rows=tuple(range(batch_size)),
            ids=spread(step.ids, NO_TOKEN),
            reasons=each(step.reasons, None),
            marks=each(step.marks, False),
            texts=None if step.texts is None else each(step.texts, ""),
            logprobs=spread(step.logprobs, float("nan")),
            alternatives=step.alternatives
            and (spread(step.alternatives[0], NO_TOKEN), spread(step.alternatives[1], float("nan"))),
        )


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


def whole_number(name: str, value: Any) -> int:
    """An int, or ValueError that says what came."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, not {value!r:.60}") from None


def as_ids(ids: Any) -> list[int]:
    """Ids given as a list, a range, a tensor or an array -> a list of int. Raises ValueError for anything else."""
    try:
        return [operator.index(index) for index in ids]
    except TypeError:
        raise ValueError(
            f"ids must be a sequence of whole numbers, prompts a list of such ([[1, 2, 3]] for a single one), not {ids!r:.60}"
        ) from None


def as_seeds(seeds: Any, rows: int) -> list[int]:
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


def end_ids(model: Decoder, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every id that ends a text, whichever of the checkpoint's files names it."""
    return tuple(dict.fromkeys((*model.generation.eos_ids, *(tokenizer.eos_ids if tokenizer is not None else ()))))


def default_sampler(model: Decoder, **settings: Any) -> Sampler:
    """The checkpoint's way of sampling (greedy if it says nothing), with these settings instead where given."""
    said = {field.name: getattr(model.generation, field.name) for field in fields(Sampling)}
    return Sampler(**{**said, **settings})


def draw_seeds(n: int) -> list[int]:
    """n consecutive seeds from a start that the operating system draws."""
    start = int.from_bytes(os.urandom(4), "little")
    return [start + i for i in range(n)]


@contextmanager
def inference(model: Decoder) -> Iterator[None]:
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
