"""The views of a run as one HTML file: nothing is fetched, nothing runs but its own script, and no text of a prompt is markup.

Everything but the maps of attention is plain HTML. Those are drawn from numbers of one byte each, 0 to 255 for 0 to 1, the
lower triangle of each head's map, deflated; the figures in the tables are exact.
"""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Any

import jinja2
import torch

from . import lens, looks, memory, odds, pieces, shapes
from .columns import amount, size, visible
from .views import Found

TEMPLATE = Path(__file__).with_name("report.html")


def render(found: Found) -> str:
    """What was asked for, as a page."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"percent": odds.percent, "size": size, "amount": amount}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    made: dict[str, Any] = dict.fromkeys(("expected", "attention", "lens", "walk", "memory", "maps"))
    spell = odds.speller(found.tokenizer)
    if found.expected is not None:
        made["expected"] = found.expected
    if found.looks is not None:
        made |= {"attention": _attention(found), "maps": maps(found)}
    if found.lens is not None:
        made["lens"] = _lens(found)
    if found.walk is not None:
        made |= {"walk": found.walk, "figures": shapes.figures(found.walk)}
    if "memory" in found.asked.views:
        made["memory"] = _memory(found)
    prompt = found.rows[0][: len(found.rows[0]) - found.new[0]]
    text = "".join(piece.text for piece in prompt if piece.part[0] == 1 and not piece.special)
    return template.render(found=found, views=found.asked.views, text=text, spell=spell, **made)


def _attention(found: Found) -> dict[str, Any]:
    own = pieces.words(found.rows[0][: found.looks.row.shape[-1]])
    shares = looks.shares(found.looks, own)
    notes = looks.first_token(found.looks)
    notes += [] if found.at is None else [looks.lookers(found.looks, found.at)]
    return {"shares": shares[:12], "more": max(0, len(shares) - 12), "notes": notes, "look": found.looks.look.label}


def maps(found: Found) -> dict[str, Any]:
    """The maps of all heads for the page's script.

    units: their labels, starts: at which tokens they begin, tokens: how many there are; words: from which to before which
    unit each goes, and its label; whole: whether to begin with words; layers, heads, groups: what there is, and how many
    key/value heads; never: for each kind of layer, which cells of the lower triangle nobody can see, as 0 and 1; kind: each
    layer's; look: the row to begin with; begin: the layer and head, -1 for all; data: the numbers.
    """
    seen, config = found.looks, found.model.config
    n = len(seen.units)
    rows, columns = torch.tril_indices(n, n)
    numbers = (seen.maps[:, :, rows, columns] * 255).round().clamp(0, 255).to(torch.uint8)
    kinds = list(dict.fromkeys(config.windows[layer] for layer in seen.layers))
    never = [looks.impossible(config, config.windows.index(kind), seen.units)[rows, columns] for kind in kinds]
    length = seen.row.shape[-1]
    words = pieces.words(found.rows[0][:length]) if n == length else []
    labels = [piece.label for piece in found.rows[0]][:length] if n == length else [_short(unit.label) for unit in seen.units]
    return {
        "units": labels,
        "starts": [unit.start for unit in seen.units],
        "words": [[word.start, word.stop, word.label] for word in words] if len(words) < n else [],
        "whole": seen.look.stop - seen.look.start > 1,
        "tokens": length,
        "layers": list(seen.layers),
        "heads": seen.maps.shape[1],
        "groups": config.n_kv_heads,
        "never": ["".join("1" if one else "0" for one in kind.tolist()) for kind in never],
        "kind": [kinds.index(config.windows[layer]) for layer in seen.layers],
        "look": next(i for i, unit in enumerate(seen.units) if unit.stop >= seen.look.stop),
        "begin": [-1, -1] if found.at is None else list(looks.towards(seen, found.at)[0][:2]),
        "data": base64.b64encode(zlib.compress(numbers.numpy().tobytes(), 9)).decode(),
    }


def _short(label: str) -> str:
    return label if len(label) <= 24 else f"{label[:16]} … {label[-6:]}"


def _lens(found: Found) -> dict[str, Any]:
    seen = found.lens
    rows = []
    for n, layer in enumerate(seen.layers):
        for half, name in enumerate(lens.HALVES):
            cells = list(zip(seen.ids[n, half].tolist(), seen.probability[n, half].tolist(), strict=True))
            rows.append((layer, name, cells))
    stories = [lens.story(one, seen.layers, found.labels[one.position]) for one in seen.watched]
    heads = [(position, found.labels[position]) for position in seen.positions]
    curves = [
        {"text": visible(one.text), "after": found.labels[one.position], "points": one.probability.tolist()}
        for one in seen.watched
    ]
    return {"heads": heads, "rows": rows[::-1], "stories": stories, "once": lens.ONCE, "curves": curves}


def _memory(found: Found) -> dict[str, Any]:
    config, (rows, used) = found.model.config, found.batch
    parts = {part: n for part, n in memory.weights(found.model).items() if n}
    token = memory.cache_per_token(config, found.model.dtype)
    return {
        "parts": parts,
        "total": sum(parts.values()),
        "token": token,
        "cache": token * found.reserved * rows,
        "used": used,
        "reserved": found.reserved * rows,
        "rows": rows,
        "peak": found.peak,
    }
