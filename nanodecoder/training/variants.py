"""Variants of one decoder: one part changed, as many parameters as before.

The base has what TrainConfig has by default: multi-head attention that sees everything, RMSNorm before each half, SwiGLU,
rotary positions. An axis is a part that can be chosen; a variant is the base with one choice changed, or several ("gqa+local").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..cli import UsageError
from ..config import ModelConfig
from ..inside.shapes import empty
from .settings import TrainConfig, model_config

BASE = "base"
# axis -> choice -> what it sets in TrainConfig: nothing where it is the base's; None where a number of tokens is still to come
AXES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "attention": {"mha": {}, "gqa": {"n_kv_heads": 2}, "mqa": {"n_kv_heads": 1}},
    "window": {"full": {}, "local": {"window": None}, "stride": {"window": None, "sparse_stride": None}},
    "norm": {"rms": {}, "layer": {"norm": "layer"}},
    "norm_place": {"pre": {}, "post": {"norm_place": "post"}},
    "ffn": {"swiglu": {}, "gelu": {"ffn": "gelu"}},
    "positions": {"rope": {}, "learned": {"positions": "learned"}, "none": {"positions": "none"}},
}
AXIS_OF = {choice: axis for axis, choices in AXES.items() for choice in choices}


@dataclass(frozen=True)
class Variant:
    """A name, and what it sets in TrainConfig beside what all variants share."""

    name: str
    settings: Mapping[str, Any]


def choose(names: str, window: int, sparse_stride: int) -> list[Variant]:
    """ "attention,gelu,gqa+local" -> variants in that order, the base first: all they are compared with.

    An axis stands for all its choices. window, sparse_stride: tokens, for the variants that take them. Raises UsageError, with
    what there is, for a name that is unknown and for two choices of one part.
    """
    numbers = {"window": window, "sparse_stride": sparse_stride}
    found = {BASE: Variant(BASE, {})}
    for word in filter(None, (word.strip() for word in names.split(","))):
        for name in AXES.get(word, [word]):
            choices = [choice for choice in name.split("+") if choice != BASE]
            unknown = [choice for choice in choices if choice not in AXIS_OF]
            if unknown:
                there = "; ".join(f"{axis}: {', '.join(axis_choices)}" for axis, axis_choices in AXES.items())
                raise UsageError(f"unknown variant {unknown[0]!r}; there are {BASE} and, of each part, {there}")
            axes = [AXIS_OF[choice] for choice in choices]
            if len(set(axes)) < len(axes):
                raise UsageError(f"{name!r} chooses one part twice: {', '.join(choices)} are of {', '.join(axes)}")
            settings = {key: value for choice in choices for key, value in AXES[AXIS_OF[choice]][choice].items()}
            settings = {key: numbers.get(key, value) for key, value in settings.items()}
            changed = "+".join(choice for choice in choices if AXES[AXIS_OF[choice]][choice]) or BASE
            found.setdefault(changed, Variant(changed, settings))
    return list(found.values())


def decoder_of(config: TrainConfig, vocab_size: int) -> ModelConfig:
    """The decoder that a run of these sizes trains. n_layers, n_heads, dim and block_size must be given."""
    return model_config(config, vocab_size, config.block_size, most=0)


def count(config: ModelConfig) -> int:
    """How many parameters a decoder has."""
    return sum(parameter.numel() for parameter in empty(config).parameters())


def at_equal_size(base: TrainConfig, variant: Variant, vocab_size: int) -> TrainConfig:
    """The base's settings with the variant's, and the ffn_dim with which it comes nearest to the base's parameters.

    Parameters grow by the same number with each unit of ffn_dim, so at most half of that number is left over. Raises UsageError
    where the rest of the variant alone is larger than the base.
    """
    wanted = count(decoder_of(base, vocab_size))
    made = dataclasses.replace(base, **variant.settings)
    one, two = (count(decoder_of(dataclasses.replace(made, ffn_dim=width), vocab_size)) for width in (1, 2))
    ffn_dim = 1 + round((wanted - one) / (two - one))
    if ffn_dim < 1:
        raise UsageError(
            f"{variant.name} takes more parameters than the base, {wanted:,}, without any feed-forward: raise --dim"
        )
    return dataclasses.replace(made, ffn_dim=ffn_dim)


def reach(config: ModelConfig) -> int | None:
    """How many tokens back the last position can hear of at most, through all layers; None where there is no such limit.

    Each layer carries a token by its window less one.
    """
    if config.sparse_stride is not None or None in config.windows:
        return None
    return sum(window - 1 for window in config.windows)
