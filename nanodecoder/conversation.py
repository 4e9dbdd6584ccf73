"""A chat of several turns over one cache: each turn feeds only what the turn before has not already left there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .generate import Choice, Stepper
from .model import Decoder
from .tokenizer import Tokenizer


class Conversation:
    """Messages so far, and the loop that answers them.

    `ask` yields the answer as it is made; leaving that loop early ends the answer, and what was said of it is remembered.
    `reason`: why the last answer ended, as a Step has it, or None where it was left early. `stepper` counts the work.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        sampler: Choice | None = None,
        max_new_tokens: int = 1000,
        seed: int | None = None,
        stop: Sequence[str] = (),
        eos_ids: Sequence[int] | None = None,
        exact: bool = False,
        use_cache: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.stepper = Stepper(model, tokenizer=tokenizer, sampler=sampler, exact=exact, use_cache=use_cache)
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.reason: str | None = None
        self._options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": seed, "stop": stop, "eos_ids": eos_ids}
        self._start = list(self.messages)

    def ask(self, text: str) -> Iterator[str]:
        """Say something; -> the answer, piece by piece.

        Raises ValueError, before the first piece and with the messages as they were, when the checkpoint's template refuses
        them or when they are longer than the context.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        row = self.stepper.add(self.tokenizer.chat(asked), **self._options)
        return self._answer(asked, row)

    def _answer(self, asked: list[dict[str, str]], row: int) -> Iterator[str]:
        said = ""
        self.reason = None if len(self.stepper) else "length"
        try:
            while len(self.stepper):
                step = self.stepper.step()
                said += step.texts[0]
                self.reason = step.reasons[0]
                yield step.texts[0]
        finally:
            if len(self.stepper):  # left early
                self.stepper.remove(row)
            self.messages = [*asked, {"role": "assistant", "content": said}]

    def restart(self) -> None:
        """Forget all but the system's message."""
        self.messages = list(self._start)
