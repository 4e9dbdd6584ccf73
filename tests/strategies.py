"""What Hypothesis draws from."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch


@st.composite
def splits(draw: st.DrawFn, total: int) -> list[int]:
    """Sizes of at least 1 that add up to `total`: any way to cut a prompt into chunks."""
    sizes = []
    while sum(sizes) < total:
        sizes.append(draw(st.integers(1, total - sum(sizes))))
    return sizes


@st.composite
def attention_options(draw: st.DrawFn) -> dict[str, Any]:
    """Head counts, windows and norms that a decoder may have."""
    n_kv_heads = draw(st.sampled_from([1, 2, 3]))
    groups = draw(st.sampled_from([1, 2, 3]))
    window = st.one_of(st.none(), st.integers(1, 16))
    windows = tuple(draw(st.lists(window, min_size=2, max_size=2)))
    return {
        "n_heads": n_kv_heads * groups,
        "n_kv_heads": n_kv_heads,
        "head_dim": draw(st.sampled_from([4, 8])),
        "windows": windows,
        "sparse_stride": draw(st.one_of(st.none(), st.integers(1, 4))) if any(windows) else None,
        "qk_norm": draw(st.sampled_from([None, "head", "all"])),
        "qkv_bias": draw(st.booleans()),
    }


@st.composite
def logits(draw: st.DrawFn, max_vocab: int = 30) -> torch.Tensor:
    """(B, V) logits with ties, impossible ids (never all of a row) and large values among them."""
    rows, vocab = draw(st.integers(1, 3)), draw(st.integers(1, max_vocab))
    value = st.one_of(st.floats(-30, 30, width=32), st.integers(-3, 3).map(float), st.just(float("-inf")))
    table = [draw(st.lists(value, min_size=vocab, max_size=vocab)) for _ in range(rows)]
    for row in table:
        row[draw(st.integers(0, vocab - 1))] = draw(st.floats(-5, 5, width=32))
    return torch.tensor(table)


texts = st.text(
    st.one_of(st.sampled_from("the quick 나는 오늘 학교에 🙂é\n\t  "), st.characters(exclude_categories=["Cs"])), max_size=40
)
