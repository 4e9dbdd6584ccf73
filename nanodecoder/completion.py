"""Prompts in, texts out: `complete` runs the loop to its end and gathers what became of every prompt."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .generate import NO_TOKEN, as_seeds, draw_seeds, generate, prompt_to_ids, whole_number
from .model import Decoder
from .tokenizer import Tokenizer

SIDES = ("left", "right")


@dataclass(frozen=True)
class Completion:
    """What became of one prompt.

    text: the new text only (after the prompt's, if `return_full_text` was asked for), without an end mark or a stop text; ids:
    the new ids, without the id that ended the row, if one did; prompt_ids: what went in; finish_reason: "eos" (an end id),
    "stop" (one of the caller's stop_ids or stop texts), "length" (max_new_tokens: the text may be unfinished) or "context"
    (the model's context is full); forwards: passes that the row took part in; seed: the row's own. If asked for, by the raw
    model: logprobs of the ids; top_logprobs: for each of them the likeliest (id, log-probability) pairs, best first.
    An id that completed a stop text is kept although its text is cut: prompt_ids + ids is what the model has seen.
    """

    text: str
    ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    forwards: int
    seed: int
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None


def complete(
    model: Decoder,
    tokenizer: Tokenizer | None,
    prompts: Sequence[str | Sequence[int]] | str | Tensor,
    max_new_tokens: int = 50,
    max_prompt_tokens: int | None = None,
    *,
    truncation_side: str | None = None,
    num_samples: int = 1,
    seeds: Sequence[int] | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
    return_full_text: bool = False,
    **options: Any,
) -> list[Completion]:
    """Continue prompts, texts or lists of ids, of any lengths in one batch; -> one Completion per prompt, in their order.

    Takes what `generate` takes. Without a tokenizer, ids go in and `text` is "". An empty text starts from BOS.
    `num_samples` > 1 gives that many Completions per prompt, one after the other, with seeds seed, seed + 1, …, from one
    prefill. A prompt longer than `max_prompt_tokens` (BOS counts) is cut, with a warning that quotes what was lost: on the
    checkpoint's own `truncation_side`, "right" (the end is lost) if it says none; "left" keeps BOS and the newest tokens.
    """
    num_samples = whole_number("num_samples", num_samples)
    if num_samples < 1:
        raise ValueError(f"num_samples must be 1 or above, not {num_samples}")
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    whole = [prompt_to_ids(tokenizer, prompt) for prompt in given]
    bos_id = tokenizer.bos_id if tokenizer is not None else model.generation.bos_id
    cut = []
    for ids in whole:  # not in a comprehension, which in Python 3.11 would stand between the warning and whom it is for
        cut.append(cut_prompt(ids, max_prompt_tokens, truncation_side, tokenizer, bos_id))
    firsts = draw_seeds(len(given) * num_samples)[::num_samples] if seeds is None else as_seeds(seeds, len(given))
    seeds = [seed + i for seed in firsts for i in range(num_samples)]
    prompt_ids = [list(ids) for ids in cut for _ in range(num_samples)]
    rows = range(len(prompt_ids))

    texts = [""] * len(rows)
    if return_full_text and tokenizer is not None:
        shown = [
            prompt if isinstance(prompt, str) and ids == all_ids else opening(tokenizer, ids)
            for prompt, ids, all_ids in zip(given, cut, whole, strict=True)
        ]
        texts = [text for text in shown for _ in range(num_samples)]
    new: list[list[int]] = [[] for _ in rows]
    scores: list[list[float]] = [[] for _ in rows]
    tops: list[list[list[tuple[int, float]]]] = [[] for _ in rows]
    reasons = ["length" for _ in rows]  # of a row that was asked for nothing
    forwards = [0 for _ in rows]
    looks = {"logprobs": logprobs, "top_logprobs": top_logprobs}
    for step in generate(
        model, prompt_ids, tokenizer=tokenizer, max_new_tokens=max_new_tokens, seeds=seeds, **looks, **options
    ):
        for row, (index, reason) in enumerate(zip(step.ids.tolist(), step.reasons, strict=True)):
            if index == NO_TOKEN:
                continue
            forwards[row] += 1
            reasons[row] = reason or reasons[row]
            texts[row] += step.texts[row] if step.texts is not None else ""
            if step.marks[row]:
                continue
            new[row].append(index)
            if step.logprobs is not None:
                scores[row].append(float(step.logprobs[row]))
            if step.alternatives is not None:
                tops[row].append(list(zip(*(values[row].tolist() for values in step.alternatives), strict=True)))
    return [
        Completion(
            text=texts[row],
            ids=new[row],
            prompt_ids=prompt_ids[row],
            finish_reason=reasons[row],
            forwards=forwards[row],
            seed=seeds[row],
            logprobs=scores[row] if logprobs or top_logprobs else None,
            top_logprobs=tops[row] if top_logprobs else None,
        )
        for row in rows
    ]


def opening(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """A prompt's text as far as it has whole characters: the new text completes one that a cut has halved."""
    return "".join(map(tokenizer.stream().push, ids))


def cut_prompt(
    ids: list[int], limit: int | None, side: str | None, tokenizer: Tokenizer | None, bos_id: int | None
) -> list[int]:
    """At most `limit` ids of a prompt, with a warning that quotes what was lost. BOS, where it is there, stays and counts.

    Raises ValueError for a side that is none, or a limit that leaves nothing.
    """
    side = side or (tokenizer.truncation_side if tokenizer is not None else "right")
    if side not in SIDES:
        raise ValueError(f"truncation_side must be left or right, not {side!r}")
    if limit is None or len(ids) <= whole_number("max_prompt_tokens", limit):
        return ids
    marks = ids[:1] if ids[:1] == [bos_id] else []
    if limit < len(marks) + 1:
        raise ValueError(
            f"max_prompt_tokens must be at least {len(marks) + 1}, which leaves one token of the prompt, not {limit}"
        )
    room = limit - len(marks)
    if side == "right":
        kept, lost = ids[:limit], ids[limit:]
    else:
        kept, lost = marks + ids[-room:], ids[len(marks) : -room]
    quoted = repr(lost[:8]) if tokenizer is None else repr(tokenizer.decode(lost[:16]).strip())
    end = {"right": "end", "left": "beginning"}[side]
    warnings.warn(
        f"the prompt has {len(ids)} tokens and max_prompt_tokens is {limit}: {len(lost)} tokens at its {end} were cut, from "
        f"{quoted} on; truncation_side={'left' if side == 'right' else 'right'} would cut the other end",
        stacklevel=3,
    )
    return kept
