"""How likely a given text is: the log-probability of each of its tokens, their sum, and perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .generate import inference, prompt_to_ids
from .model import Decoder
from .tokenizer import Tokenizer

COLUMNS = 256  # positions whose logits over the whole vocabulary are held at a time


@dataclass(frozen=True)
class Score:
    """ids: the text's, BOS included; logprobs: of ids[1:], each given all before it in its window (natural logarithms)."""

    ids: list[int]
    logprobs: list[float]

    @property
    def total(self) -> float:
        """The log-probability of the whole, given its first token."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability: how many equally likely tokens would be as hard to guess. NaN for none."""
        if not self.logprobs:
            return math.nan
        mean = -self.total / len(self.logprobs)
        return math.exp(mean) if mean < 709 else math.inf  # beyond which a float has no number for it


def score(
    model: Decoder,
    tokenizer: Tokenizer | None,
    text: str | Sequence[int] | Tensor,
    *,
    window: int | None = None,
    stride: int | None = None,
) -> Score:
    """The log-probability of every token of a text (or of ids) but the first, which nothing precedes.

    A text longer than `window` (the model's context, if not given) is read in windows that begin `stride` tokens apart (half a
    window, if not given): every token is scored once, with at least window - stride tokens before it.
    Raises ValueError for an empty text, or a window or stride that cannot be.
    """
    ids = prompt_to_ids(tokenizer, text)
    limit = model.config.max_seq_len
    window = limit if window is None else window
    stride = max(1, window // 2) if stride is None else stride
    if not 2 <= window <= limit:
        raise ValueError(f"window must be from 2 to the context of {limit} tokens, not {window}")
    if not 1 <= stride < window:
        raise ValueError(f"stride must be from 1 to {window - 1}, one less than the window, not {stride}")
    if not ids or not all(0 <= index < model.config.vocab_size for index in ids):
        raise ValueError(f"a text to score needs ids from 0 to {model.config.vocab_size - 1}, at least one")
    found: list[float] = []  # of ids[1:]
    start = 0
    with inference(model):
        while len(found) < len(ids) - 1:
            piece = torch.tensor(ids[start : start + window], device=model.device)
            x = model.trunk(piece[None, :-1])[0]  # (T, dim): what stands before each of piece[1:]
            done = len(found) - start  # of this piece's, scored by the window before
            for first in range(done, len(x), COLUMNS):
                logprobs = model.head(x[first : first + COLUMNS]).float().log_softmax(-1)  # (T, V)
                wanted = piece[1 + first : 1 + first + COLUMNS, None]
                found += logprobs.gather(-1, wanted)[:, 0].tolist()
            start += stride
    return Score(ids, found)
