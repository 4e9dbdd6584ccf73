"""Ids as a reader wants to see them: what each stands for, which of them spell one character together, which make a word.

A byte-level tokenizer may cut a character into pieces that are no text by themselves. Those are bracketed here, and the
character that they spell is shown, so that Korean is never a row of "�".
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass

from ..tokenizer import SETTINGS, Tokenizer
from .columns import table, visible, wrapped

# Classes of transformers' whose default is to fill on the left; the others' is the right
LEFT = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")


@dataclass(frozen=True)
class Piece:
    """One id of a row. text: what it spells, alone or, where it is `part` (which, of how many), with its neighbours.

    special: it is a mark such as BOS, and no part of the text.
    """

    position: int
    id: int
    bytes: bytes
    text: str
    part: tuple[int, int] = (1, 1)
    special: bool = False

    @property
    def label(self) -> str:
        """Its text with nothing invisible in it, and which part of it this is."""
        which, of = self.part
        return visible(self.text) + (f"[{which}/{of}]" if of > 1 else "")

    @property
    def bracket(self) -> str:
        """┌, │ or └ where the piece is part of a character, else nothing."""
        which, of = self.part
        return "" if of == 1 else "┌" if which == 1 else "└" if which == of else "│"


@dataclass(frozen=True)
class Word:
    """Some pieces of a row that are looked at as one: those from `start` to before `stop`."""

    start: int
    stop: int
    text: str

    @property
    def label(self) -> str:
        return visible(self.text)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Piece]:
    """A row's ids, each with what it stands for."""
    found: list[Piece] = []
    waiting: list[tuple[int, int, bytes]] = []
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    first = True

    def spell() -> None:
        """Make pieces of what has come since the last whole character."""
        text = b"".join(held for _, _, held in waiting).decode("utf-8", "replace")
        found.extend(Piece(at, index, held, text, (n, len(waiting))) for n, (at, index, held) in enumerate(waiting, 1))
        waiting.clear()
        characters.reset()

    for position, index in enumerate(ids):
        if tokenizer.is_special(index):
            spell()
            found.append(Piece(position, index, b"", tokenizer.decode([index], special=True), special=True))
            continue
        held = tokenizer.token_bytes(index, first)
        first = False
        waiting.append((position, index, held))
        characters.decode(held)
        if not characters.getstate()[0]:
            spell()
    spell()
    return found


def words(row: Sequence[Piece]) -> list[Word]:
    """A row cut where a space or a mark begins: pieces that only together spell a word or a character are one."""
    if not row:
        return []
    starts: list[int] = []
    before = ""  # what the word so far ends with; empty where another must begin
    for piece in row:
        if piece.part[0] > 1:
            continue
        spaces = bool(before) and not before.strip(" ")  # a space by itself belongs to what follows
        joined = not piece.special and not piece.text[:1].isspace() and (spaces or not before[-1:].isspace())
        if not starts or not before or not joined:
            starts.append(piece.position)
            before = ""
        before = "" if piece.special else before + piece.text
    return [_word(row, start, stop) for start, stop in zip(starts, [*starts[1:], len(row)], strict=True)]


def _word(row: Sequence[Piece], start: int, stop: int) -> Word:
    return Word(start, stop, "".join(piece.text for piece in row[start:stop] if piece.part[0] == 1))


def find(row: Sequence[Piece], text: str, before: int | None = None) -> Word:
    """The pieces that hold the last occurrence of a text (that begins before position `before`).

    One that begins where a piece does and ends where a word does is preferred. Raises ValueError for a text that is not there.
    """
    spelled = [b"" if piece.special else piece.bytes for piece in row]
    ends = [0]
    for held in spelled:
        ends.append(ends[-1] + len(held))
    whole = b"".join(spelled)
    for wanted in dict.fromkeys((text.encode(), text.strip().encode())):
        found = []
        at = whole.find(wanted) if wanted else -1
        while at >= 0:
            stop = at + len(wanted)
            held = [n for n in range(len(row)) if ends[n] < stop and ends[n + 1] > at]
            after = whole[stop : stop + 4].decode("utf-8", "ignore")[:1]
            found.append(((at in ends or whole[at - 1 : at].isspace()) and not after.isalnum(), held[0], held[-1] + 1))
            at = whole.find(wanted, at + 1)
        found = [one for one in found if before is None or one[1] < before]
        if found:
            whole_words = [one for one in found if one[0]] or found
            return _word(row, *whole_words[-1][1:])
    shown = whole.decode("utf-8", "replace")
    where = "" if before is None else " up to there"
    raise ValueError(f"{text!r} is not in the text{where} ({shown[:60]!r}{' …' if len(shown) > 60 else ''})")


# ---------------------------------------------------------------------------------------------------------------- in words


def show(rows: Sequence[Sequence[Piece]], new: Sequence[int]) -> str:
    """Each row's pieces, one a line; new: how many at each row's end were generated."""
    texts = []
    for number, (row, generated) in enumerate(zip(rows, new, strict=True), 1):
        lines = [("", "id", "", "piece", "bytes", "")]
        for piece in row:
            marks = ["special"] * piece.special + ["new"] * (piece.position >= len(row) - generated)
            shown = visible(piece.text) if piece.part[0] == 1 else ""
            lines.append((str(piece.position), str(piece.id), piece.bracket, shown, piece.bytes.hex(" "), ", ".join(marks)))
        which = f"text {number}: " if len(rows) > 1 else ""
        n = len(row) - generated
        told = f"{which}{n} token{'s' * (n != 1)}" + (f" and {generated} new" if generated else "")
        texts.append(told + "\n" + table(lines, right=(0, 1)))
    return "\n\n".join(texts)


@dataclass(frozen=True)
class Rectangle:
    """How transformers would put prompts of several lengths into one tensor: ids and mask, row by row, and the filled side.

    why: who says so. Left is the side that generation needs.
    """

    ids: tuple[tuple[int, ...], ...]
    mask: tuple[tuple[int, ...], ...]
    side: str
    why: str


def rectangle(tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], pad_id: int) -> Rectangle:
    """The rectangle of these prompts, filled with `pad_id` on the side that transformers (5.24) fills for this checkpoint."""
    stated = json.loads(tokenizer.files().get(SETTINGS, b"{}"))
    side, why = stated.get("padding_side"), f"as {SETTINGS} says"
    if side is None:
        name = str(stated.get("tokenizer_class")).removesuffix("Fast")
        side, why = ("left" if name in LEFT else "right"), f"the default, since {SETTINGS} names no side"
    longest = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        fill = longest - len(prompt)
        pads, ones = [pad_id] * fill, [1] * len(prompt)
        left = side == "left"
        ids.append((*pads, *prompt) if left else (*prompt, *pads))
        mask.append((*[0] * fill, *ones) if left else (*ones, *[0] * fill))
    return Rectangle(tuple(ids), tuple(mask), side, why)


def show_rectangle(found: Rectangle, used: Sequence[int], reserved: int) -> str:
    """The rectangle beside our rows. used: slots of the cache that each row has filled, of `reserved`."""
    lines = [("", "transformers' rectangle, attention_mask", "ours, cache slots")]
    for number, (mask, n) in enumerate(zip(found.mask, used, strict=True), 1):
        own = f"{n} of {reserved} used" if reserved else "nothing was fed"
        lines.append((f"text {number}", "".join("█" if one else "·" for one in mask), own))
    pads = sum(row.count(0) for row in found.mask)
    told = f"{len(found.mask)} × {len(found.mask[0])} with {pads} pads (·) on the {found.side}, {found.why}"
    if found.side == "right" and pads:
        told += "; to generate from such a tensor it must be filled on the left"
    return table(lines, longest=100) + "\n" + wrapped(f"{told}. Here no row is padded: slot s holds position s.")
