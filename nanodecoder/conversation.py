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
    `reason`: why the last answer ended, as a Step has it, or None where it was left early; `ids`: its new ids. `stepper` counts
    the work.
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
        compile: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        ways = {"exact": exact, "use_cache": use_cache, "compile": compile}
        self.stepper = Stepper(model, tokenizer=tokenizer, sampler=sampler, **ways)
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.reason: str | None = None
        self.ids: list[int] = []
        self._options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": seed, "stop": stop, "eos_ids": eos_ids}
        self._start = list(self.messages)
        self._row: int | None = None  # of the answer on its way
        row = self.stepper.add([0], **self._options)  # so that wrong options are refused now, and not at the first turn
        self._let_go(row)

    def ask(self, text: str) -> Iterator[str]:
        """Say something; -> the answer, piece by piece.

        Raises ValueError, before the first piece and with the messages as they were, when the checkpoint's template refuses
        them or when they are longer than the context, and CheckpointError when the template fails.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self.tokenizer.chat(asked)
        if self._row is not None:  # an answer that nobody has listened to, or not to its end
            self._let_go(self._row)
        self._row = self.stepper.add(ids, **self._options)
        return self._answer(asked, self._row)

    def _answer(self, asked: list[dict[str, str]], row: int) -> Iterator[str]:
        said = ""
        self.reason, self.ids = None if len(self.stepper) else "length", []
        try:
            while self._row == row and len(self.stepper):
                step = self.stepper.step()
                said += step.texts[0]
                self.reason = step.reasons[0]
                self.ids += step.ids.tolist()
                yield step.texts[0]
        finally:
            if self._row == row:
                self._let_go(row)
                self.messages = [*asked, {"role": "assistant", "content": said}]

    def _let_go(self, row: int) -> None:
        if len(self.stepper):  # it has not come to its end
            self.stepper.remove(row)
        self._row = None

    def restart(self) -> None:
        """Forget all but the system's message."""
        self.messages = list(self._start)
