"""Text in columns that line up in a terminal, where a Korean or Chinese character takes two places and an accent none."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

SHADES = " ░▒▓█"


def width(text: str) -> int:
    """How many places a text takes in a terminal (Unicode's East Asian Width; what has width of its own in emoji counts 2)."""
    return sum(_width(character) for character in text)


def _width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf", "Cc") or "\u1160" <= character <= "\u11ff":
        return 0  # combining, invisible, or the later parts of a Korean syllable spelled in parts
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fit(text: str, places: int, right: bool = False) -> str:
    """A text in so many places, at their left or right end; cut with … where it is longer."""
    if width(text) > places:
        kept = ""
        for character in text:
            if width(kept + character) > places - 1:
                break
            kept += character
        text = kept + "…" * (places > 0)
    space = " " * (places - width(text))
    return space + text if right else text + space


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), gap: int = 2, longest: int = 40) -> str:
    """Rows of cells as lines; columns as wide as their widest cell (at most `longest`), those in `right` at their right end."""
    if not rows:
        return ""
    widths = [min(longest, max(width(row[i]) for row in rows if i < len(row))) for i in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [fit(cell, widths[i], i in right) for i, cell in enumerate(row)]
        lines.append((" " * gap).join(cells).rstrip())
    return "\n".join(lines)


def wrapped(text: str, places: int = 80) -> str:
    """A sentence in lines of at most so many places, broken at spaces; a longer word stays whole."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and width(lines[-1]) + 1 + width(word) > places:
            lines.append(word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def visible(text: str) -> str:
    """A piece of text so that nothing in it is invisible or moves the cursor: a space is ␣, a newline ↵, a tab ⇥."""
    marks = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}

    def shown(character: str) -> str:
        if character in marks:
            return marks[character]
        unseen = unicodedata.category(character) in ("Cc", "Cf", "Co", "Cn", "Zl", "Zp")
        return f"\\u{ord(character):04x}" if unseen else character

    return "".join(map(shown, text))


def size(n: float) -> str:
    """Bytes in the unit in which they are read most easily."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= step:
            return f"{n / step:,.1f} {unit}" if n < 100 * step else f"{n / step:,.0f} {unit}"
    return f"{n:,.0f} B"


def amount(n: float) -> str:
    """A large number by its thousands: 1.2 k, 3.4 M, 5.6 G, 7.8 T."""
    for unit, step in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= step:
            return f"{n / step:.3g} {unit}" if n < 999.5 * step else f"{n / step:,.0f} {unit}"
    return f"{n:,.0f}"


def bar(share: float) -> str:
    """A share from 0 to 1 as one shaded place."""
    return SHADES[min(len(SHADES) - 1, int(share * len(SHADES)))]
