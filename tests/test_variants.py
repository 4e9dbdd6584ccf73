"""training/variants.py: what a name changes, that sizes stay equal, and how far a stack of windows reaches."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model, tokens

from nanodecoder.cli import UsageError
from nanodecoder.training import TrainConfig
from nanodecoder.training.variants import AXES, at_equal_size, choose, count, decoder_of, reach

BASE = TrainConfig(data="a.txt", n_layers=2, dim=64, n_heads=4, block_size=64)


def names(text: str) -> list[str]:
    return [variant.name for variant in choose(text, 16, 8)]


def test_the_base_comes_first_whatever_is_asked_for():
    assert names("") == names("base") == names("mha,rope+rms") == ["base"]
    assert names("mqa, gelu") == ["base", "mqa", "gelu"]


def test_a_part_stands_for_all_its_choices_and_nothing_comes_twice():
    assert names("gqa,attention,attention") == ["base", "gqa", "mqa"]
    assert names(",".join(AXES)) == ["base", "gqa", "mqa", "local", "stride", "layer", "post", "gelu", "learned", "none"]


def test_a_variant_sets_what_its_name_says():
    (_, both) = choose("gqa+stride", 16, 8)
    assert both.name == "gqa+stride"
    assert both.settings == {"n_kv_heads": 2, "window": 16, "sparse_stride": 8}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "mqa,alibi",
            "unknown variant 'alibi'; there are base and, of each part, attention: mha, gqa, mqa; window: full, local",
        ),
        ("local+stride", "'local\\+stride' chooses one part twice: local, stride are of window, window"),
    ],
)
def test_what_cannot_be_chosen(text, told):
    with pytest.raises(UsageError, match=told):
        names(text)


@pytest.mark.parametrize("vocab_size", [20, 257])
@pytest.mark.parametrize("dim", [32, 96])
def test_all_variants_have_as_many_parameters_as_a_feed_forwards_step_allows(vocab_size, dim):
    base = TrainConfig(data="a.txt", n_layers=3, dim=dim, n_heads=4, block_size=32)
    wanted = count(decoder_of(base, vocab_size))
    for variant in choose(",".join([*AXES, "mqa+local+gelu+none"]), 8, 4):
        made = at_equal_size(base, variant, vocab_size)
        got = count(decoder_of(made, vocab_size))
        matrices = 3 if made.ffn == "swiglu" else 2
        assert abs(got - wanted) <= matrices * 3 * dim / 2, variant.name
        for name, value in variant.settings.items():
            assert getattr(made, name) == value
    (first, *_) = choose("", 8, 4)
    assert decoder_of(at_equal_size(base, first, vocab_size), vocab_size) == decoder_of(base, vocab_size)


def test_a_variant_that_cannot_be_so_small_is_refused():
    (_, learned) = choose("learned", 8, 4)
    small = TrainConfig(data="a.txt", n_layers=1, dim=8, n_heads=2, ffn_dim=4, block_size=64)
    with pytest.raises(
        UsageError, match=r"learned takes more parameters than the base, .* without any feed-forward: raise --dim"
    ):
        at_equal_size(small, learned, 20)


@pytest.mark.parametrize(("n_layers", "window"), [(1, 4), (2, 4), (3, 3), (2, 1)])
def test_a_stack_of_windows_reaches_so_far_and_no_further(n_layers, window):
    """Exactly: another first token changes the logits up to there, and not one bit after."""
    model = tiny_model(n_layers=n_layers, windows=window)
    one = tokens(columns=20)
    other = one.clone()
    other[0, 0] = (other[0, 0] + 1) % 97
    with torch.no_grad():
        changed = (model(one) != model(other)).any(-1)[0]  # (T,)
    assert reach(model.config) == n_layers * (window - 1)
    assert changed.nonzero().max() == reach(model.config)
    assert not changed[reach(model.config) + 1 :].any()


def test_what_sees_everything_or_strides_has_no_such_limit():
    assert reach(tiny_model().config) is None
    assert reach(tiny_model(windows=(4, None)).config) is None
    assert reach(tiny_model(windows=4, sparse_stride=3).config) is None
