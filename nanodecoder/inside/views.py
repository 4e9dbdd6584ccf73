"""The views of a run, for the terminal and for a report: what was fed, what came, where it looked and what it took.

views = Views(asked, model, tokenizer, sampler, prompts, max_new_tokens)
stepper = Stepper(model, tokenizer=tokenizer, sampler=sampler, filters=views.filters)
…                          # views.note(step) after each step
found = views.look(new)    # one more pass over the first text, traced
print(words(found))
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..cli import UsageError, peak_memory
from ..generate import Step
from ..model import Decoder
from ..sampler import Filter, Sampler
from ..tokenizer import Tokenizer
from . import lens, looks, memory, odds, pieces, shapes
from .pieces import Piece, Word
from .trace import trace, trace_bytes

VIEWS = ("tokens", "probs", "attention", "lens", "shapes", "memory")
LENS_POSITIONS = 64  # through all blocks, the head's product is what takes time
PIECE = 256  # positions whose logits are held at a time
MOST = 2048  # MiB that one layer's attention may take while it is looked at


@dataclass(frozen=True)
class Asked:
    """What the command line asks to see."""

    views: tuple[str, ...]
    look: str | None = None
    at: str | None = None
    watch: str | None = None

    @classmethod
    def parse(cls, listed: str, look: str | None, at: str | None, watch: str | None) -> Asked:
        """A list as "probs,lens" or "all". Raises UsageError for a view that is not there, or a word that no view would use."""
        names = [name.strip() for name in listed.split(",") if name.strip()]
        for name in names:
            if name not in (*VIEWS, "all"):
                near = difflib.get_close_matches(name, VIEWS, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise UsageError(f"--show knows no {name!r}{hint} (there is {', '.join(VIEWS)}, and all)")
        if not names:
            raise UsageError(f"--show takes a list of {', '.join(VIEWS)}, or all")
        found = VIEWS if "all" in names else tuple(view for view in VIEWS if view in names)
        for flag, value, view in (("look", look, "attention"), ("at", at, "attention"), ("watch", watch, "lens")):
            if value is not None and view not in found:
                raise UsageError(f"--{flag} is for --show {view}: add it")
        return cls(found, look, at, watch)


@dataclass
class Found:
    """What there is to see; None where it was not asked for. The traced views are of the first text.

    rows: the first text of each prompt; new: how many of its tokens were generated; used: how many cache slots it filled, of
    `reserved`; batch: how many texts there were in all, and their slots used; fed: how many tokens of the first text were fed;
    peak: bytes that the run held at most.
    """

    asked: Asked
    model: Decoder
    sampler: Sampler
    tokenizer: Tokenizer
    rows: list[list[Piece]]
    new: list[int]
    used: list[int]
    reserved: int
    batch: tuple[int, int]
    peak: int
    fed: int
    rectangle: pieces.Rectangle | None = None
    expected: list[odds.Expected] | None = None
    choices: list[odds.Choice] = field(default_factory=list)
    looks: looks.Looks | None = None
    at: Word | None = None
    lens: lens.Lens | None = None
    walk: shapes.Walk | None = None

    @property
    def labels(self) -> list[str]:
        """Of the first text's positions."""
        return [piece.label for piece in self.rows[0]]


class Views:
    """Watches a run from outside: what it asks of the stepper is a filter that changes nothing.

    Raises UsageError at once for a word that is not in the first prompt, and for a prompt too long to look at.
    """

    def __init__(
        self,
        asked: Asked,
        model: Decoder,
        tokenizer: Tokenizer,
        sampler: Sampler,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        use_cache: bool = True,
    ) -> None:
        self.asked, self.model, self.tokenizer, self.sampler = asked, model, tokenizer, sampler
        self.prompts = [list(prompt) for prompt in prompts]
        self.use_cache = use_cache
        room = [min(max_new_tokens, model.config.max_seq_len - len(prompt) + 1) for prompt in self.prompts]
        slots = [len(prompt) + n - 1 for prompt, n in zip(self.prompts, room, strict=True) if n]
        self.reserved = max(slots, default=0) if use_cache else 0
        self.recorder = odds.Recorder()
        self.filters: tuple[Filter, ...] = (self.recorder,) if "probs" in asked.views else ()
        self.ids = list(self.prompts[0])
        self.choices: list[odds.Choice] = []
        row = pieces.pieces(tokenizer, self.ids)
        self.look_word = self.at_word = None
        if "attention" in asked.views:
            self._fits(len(self.ids) + max(0, room[0] - 1))
            try:
                self.look_word = pieces.find(row, asked.look) if asked.look is not None else pieces.words(row)[-1]
                self.at_word = None if asked.at is None else pieces.find(row, asked.at, before=self.look_word.stop)
            except ValueError as error:
                flag = "--look" if self.look_word is None else "--at"
                raise UsageError(f"{flag}: {error}") from None
        self.watched = self._watched() if asked.watch is not None else []

    def note(self, step: Step) -> None:
        """Keep what the first text's step was chosen from."""
        if 0 not in step.rows:
            return
        place = step.rows.index(0)
        chosen = int(step.ids[place])
        if self.recorder.logits is not None:
            number = len(self.ids) - len(self.prompts[0]) + 1
            self.choices.append(odds.choice(self.recorder.logits[place], chosen, self.sampler, self.ids, number))
        self.ids.append(chosen)

    def look(self, new: Sequence[Sequence[int]]) -> Found:
        """Look at what was generated: new, the ids of every text, each prompt's together. One traced pass over the first."""
        peak = peak_memory(self.model.device)
        fed = self.ids if len(self.ids) == len(self.prompts[0]) else self.ids[:-1]
        samples = len(new) // len(self.prompts)
        every = [[*self.prompts[n // samples], *ids] for n, ids in enumerate(new)]
        rows = every[::samples]
        rows[0] = list(self.ids)  # an end id that is no part of the text too
        found = Found(
            self.asked,
            self.model,
            self.sampler,
            self.tokenizer,
            [pieces.pieces(self.tokenizer, row) for row in rows],
            [len(row) - len(prompt) for row, prompt in zip(rows, self.prompts, strict=True)],
            [self._slots(row, prompt) for row, prompt in zip(rows, self.prompts, strict=True)],
            self.reserved,
            (len(every), sum(self._slots(row, self.prompts[n // samples]) for n, row in enumerate(every))),
            peak,
            len(fed),
            choices=self.choices,
            at=self.at_word,
        )
        if len(rows) > 1:
            pad = self.model.generation.pad_id
            pad = pad if pad is not None else next(iter(self.tokenizer.eos_ids), 0)
            found.rectangle = pieces.rectangle(self.tokenizer, self.prompts, pad)
        if "shapes" in self.asked.views:
            alike = len({len(prompt) for prompt in self.prompts}) == 1
            found.walk = shapes.walk(self.model.config, len(rows) if alike else 1, len(self.prompts[0]), self.model.dtype)
        if {"probs", "attention", "lens"} & set(self.asked.views):
            self._trace(found, fed)
        return found

    def _slots(self, row: Sequence[int], prompt: Sequence[int]) -> int:
        """How many slots of the cache a text has filled: its last token was not fed, and nothing where none was generated."""
        return len(row) - 1 if self.use_cache and len(row) > len(prompt) else 0

    def _trace(self, found: Found, fed: list[int]) -> None:
        """One pass over the first text, each layer looked at as soon as it is done."""
        views, prompt = self.asked.views, len(self.prompts[0])
        row = found.rows[0][: len(fed)]
        keep = ["norm"] * ("probs" in views) + ["attention"] * ("attention" in views) + ["mid", "out"] * ("lens" in views)
        layers = list(range(self.model.config.n_layers)) if {"attention", "lens"} & set(views) else []
        whole = [Word(piece.position, piece.position + 1, piece.text) for piece in row]
        apart = [word for word in (self.look_word, self.at_word) if word is not None]
        units = whole if len(row) <= looks.DRAWN else looks.thin(pieces.words(row), looks.THINNED, apart)
        start = max(0, min(prompt - LENS_POSITIONS // 2, len(fed) - LENS_POSITIONS))
        positions = list(range(start, min(len(fed), start + LENS_POSITIONS)))
        follow = [
            (index, positions.index(at), text) for index, at, text in self.watched if at in positions and self._follows(at)
        ]

        def each(layer: int, values: dict[str, Tensor]) -> dict[str, Any]:
            made: dict[str, Any] = {}
            if "attention" in values:
                weights = values["attention"][0].float()  # (H, T, T)
                made["maps"] = (looks.merge(weights, units) if units is not whole else weights).cpu()
                made["row"] = weights[:, self.look_word.slice].mean(1).cpu()
            if "mid" in values:
                streams = [values["mid"][0], values["out"][0]]
                made["lens"] = lens.read(self.model, streams, positions, [(index, place) for index, place, _ in follow])
            return made

        traced = trace(self.model, fed, layers, keep=keep, then=each if layers else None, max_mib=4 * MOST)
        results = [traced.results[layer] for layer in layers]
        if "probs" in views:
            found.expected = [
                one
                for start in range(0, len(fed), PIECE)
                for one in odds.expected(self.model.head(traced["norm"][0, start : start + PIECE]), fed, start)
            ]
        if "attention" in views:
            maps, rows = (torch.stack([one[name] for one in results]) for name in ("maps", "row"))
            found.looks = looks.Looks(tuple(layers), tuple(units), maps, self.look_word, rows)
        if "lens" in views:
            found.lens = lens.gather(layers, positions, [one["lens"] for one in results], follow)

    def _watched(self) -> list[tuple[int, int, str]]:
        """(id, position, text) of each piece of the watched text, as if it came after the prompt."""
        text = self.asked.watch
        spelled = [
            [index for index in self.tokenizer.encode(way) if not self.tokenizer.is_special(index)]
            for way in dict.fromkeys((text, text.lstrip(" ")))
            if way
        ]
        fitting = [ids for ids in spelled if b"".join(map(self.tokenizer.token_bytes, ids)) == text.encode()]
        ids = next(iter([*fitting, *spelled]), [])
        if not ids:
            raise UsageError(f"--watch {text!r} has no token to follow")
        row = pieces.pieces(self.tokenizer, [*self.prompts[0], *ids])[len(self.prompts[0]) :]
        return [(index, len(self.prompts[0]) - 1 + n, row[n].text) for n, index in enumerate(ids)]

    def _follows(self, position: int) -> bool:
        """Whether the text has gone as the watched one goes, up to this position."""
        n = position + 1 - len(self.prompts[0])
        return self.ids[len(self.prompts[0]) : position + 1] == [index for index, _, _ in self.watched[:n]]

    def _fits(self, columns: int) -> None:
        """Refuse a text of which even one layer's attention would take too much."""
        size = trace_bytes(self.model.config, 1, columns, [0], ["attention"], 8) / 2**20  # and its scores
        if size > MOST:
            raise UsageError(
                f"{columns:,} tokens have {size:,.0f} MiB of attention in each block, and here it may be {MOST:,}: ask for "
                "--show tokens,probs, for fewer new tokens (-n), or cut the prompt (--max_prompt_tokens)"
            )


# ---------------------------------------------------------------------------------------------------------------- in words


def words(found: Found) -> str:
    """The views as text, one under the other."""
    spell = odds.speller(found.tokenizer)
    sections: list[str] = []
    for view in found.asked.views:
        sections.append(f"== {view}\n{_SHOWN[view](found, spell)}")
    return "\n\n".join(sections)


def _tokens(found: Found, spell: Any) -> str:
    text = pieces.show(found.rows, found.new)
    if found.rectangle is not None:
        return f"{text}\n\n{pieces.show_rectangle(found.rectangle, found.used, found.reserved)}"
    return f"{text}\ncache: {found.used[0]} of {found.reserved} slots used" if found.reserved else text


def _probs(found: Found, spell: Any) -> str:
    return "\n\n".join(
        [odds.show_expected(found.expected or [], found.labels, spell), odds.show_choices(found.choices, spell, found.sampler)]
    )


def _attention(found: Found, spell: Any) -> str:
    own = pieces.words(found.rows[0][: found.looks.row.shape[-1]])
    return looks.summary(found.looks, own, found.at) + "\n" + looks.draw(found.looks, found.model.config, own)


def _lens(found: Found, spell: Any) -> str:
    return lens.show(found.lens, found.labels, spell)


def _shapes(found: Found, spell: Any) -> str:
    note = ""
    if found.walk.rows < len(found.rows):
        note = "\n(the first text alone: of texts of several lengths only the real tokens flow, all in one row)"
    return shapes.show(found.walk) + note


def _memory(found: Found, spell: Any) -> str:
    rows, used = found.batch
    reserved = found.reserved * rows
    return memory.show(found.model, found.model.config, rows, used, reserved, found.model.dtype, found.peak)


_SHOWN = {
    "tokens": _tokens,
    "probs": _probs,
    "attention": _attention,
    "lens": _lens,
    "shapes": _shapes,
    "memory": _memory,
}
