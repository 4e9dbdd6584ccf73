"""training/settings.py and record.py: sizes that follow the data, a TOML file that says a run, figures that can be drawn."""

from __future__ import annotations

import types

import pytest

from nanodecoder.cli import UsageError
from nanodecoder.training import TrainConfig
from nanodecoder.training.record import draw, forget_after, log
from nanodecoder.training.settings import check, from_toml, model_config, most_parameters, steps_of, to_toml


class Windows(list):
    """A split of so many windows of 256 tokens."""

    @property
    def ids(self):
        return range(len(self) * 256)


def most(config: TrainConfig, tokens: int, rate: float = 0.0) -> float:
    data = types.SimpleNamespace(train=Windows(range(tokens // 256)))
    return most_parameters(config, data, 256, 1, rate)


def test_a_run_uses_no_more_parameters_than_it_goes_through_tokens():
    assert most(TrainConfig(max_iters=10**6), 1_003_776) == 1_003_776  # the text's
    assert most(TrainConfig(max_iters=10), 1_003_776) == 10 * 16 * 256  # the run's
    assert most(TrainConfig(max_time=60), 10**8, rate=6e10) == pytest.approx((6e10 * 60 / 6) ** 0.5)


@pytest.mark.parametrize(
    ("tokens", "sizes"), [(500, (2, 64)), (1_003_854, (4, 128)), (30_000_000, (8, 512)), (10**9, (12, 768))]
)
def test_without_flags_the_size_follows_the_text(tokens, sizes):
    made = model_config(TrainConfig(), 65, 256, tokens)
    assert (made.n_layers, made.dim) == sizes
    assert made.max_seq_len == 256


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"dim": 96}, (4, 96, 3)),
        ({"n_heads": 5}, (4, 160, 5)),
        ({"n_layers": 1, "dim": 20, "n_heads": 2}, (1, 20, 2)),
        ({"dim": 50}, (4, 50, 1)),
    ],
)
def test_a_flag_that_is_given_holds_and_the_others_follow(flags, wanted):
    made = model_config(TrainConfig(**flags), 65, 64, 1_003_854)
    assert (made.n_layers, made.dim, made.n_heads) == wanted


def test_the_parts_are_what_the_flags_say():
    made = model_config(
        TrainConfig(norm="layer", norm_place="post", ffn="gelu", positions="learned", qk_norm=False), 65, 64, 10**6
    )
    assert (made.norm, made.pre_norm, made.post_norm, made.gated, made.activation) == ("layer", False, True, False, "gelu_tanh")
    assert made.learned_positions
    assert set(made.rope) == {None}
    assert made.ffn_dim == 4 * made.dim
    made = model_config(TrainConfig(positions="none"), 65, 64, 10**6)
    assert not made.learned_positions
    assert set(made.rope) == {None}


def test_a_configuration_survives_as_toml(tmp_path):
    config = TrainConfig(data='an "odd" \\ 이름.txt', learning_rate=3e-4, compile=True, max_steps_now=3)
    path = tmp_path / "a.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    config.max_steps_now = None  # of one call, and no part of the run
    assert TrainConfig(**from_toml(path)) == config
    path.write_text("dim = ")
    with pytest.raises(UsageError, match="cannot be read as TOML"):
        from_toml(path)


def test_how_long_a_run_is():
    assert steps_of(TrainConfig()) == 2000
    assert steps_of(TrainConfig(max_time=60)) is None
    assert steps_of(TrainConfig(max_time=60, max_iters=5)) == 5
    with pytest.raises(UsageError, match="--max_time must be above 0, not 0"):
        check(TrainConfig(data="a", max_time=0))


def test_figures_are_kept_up_to_a_step_and_drawn(tmp_path):
    for step in range(1, 6):
        log(tmp_path, {"step": step, "loss": 3.0 / step})
    log(tmp_path, {"step": 5, "val_loss": 1.0})
    forget_after(tmp_path, 3)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    assert draw(tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
