"""trace.py: the pass stays as it is, to the last bit; what is kept is what transformers has; what is put in has its effect."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from parity import oracle
from strategies import attention_options
from tiny import redraw, tiny_config, tiny_model, tokens

import nanodecoder as nd
from nanodecoder.attention import visible
from nanodecoder.inside import trace, trace_bytes, writes
from nanodecoder.inside.trace import IN_BLOCK, names

KINDS = {
    "plain": {},
    "post norms": {"post_norm": True, "pre_norm": False},
    "both norms": {"post_norm": True, "norm_offset": 1.0},
    "parallel": {"parallel": True, "norm": "layer"},
    "soft cap": {"attn_softcap": 20.0, "final_softcap": 10.0, "attn_scale": 0.2},
    "learned": {"learned_positions": True, "position_offset": 2, "rope": None, "gated": False, "activation": "relu"},
    "windows": {"windows": (4, None), "sparse_stride": 3},
    "query norm": {"qk_norm": "head", "qkv_bias": True, "o_bias": True},
    "scaled": {"embed_scale": 8.0, "tied_head": True, "n_kv_heads": 1, "qk_norm": "all"},
}
EVERY = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def untouched(model) -> bool:
    """Whether nothing is left of a trace on the model: no method of its own, no hook."""
    modules = list(model.modules())
    return not any({"forward", "attend"} & vars(m).keys() or m._forward_hooks or m._forward_pre_hooks for m in modules)


@EVERY
@pytest.mark.parametrize("path", ["fused", "explicit"])
@torch.no_grad()
def test_the_logits_are_a_plain_forwards_to_the_last_bit(options, path):
    model, x = tiny_model(**options), tokens(2, 12)
    model.attention = path
    plain = model(x)
    assert torch.equal(trace(model, x).logits, plain)
    assert torch.equal(trace(model, x, layers=[1], keep=["attention", "logits"]).logits, plain)
    assert untouched(model)
    assert torch.equal(model(x), plain)


@given(attention_options())
def test_whatever_the_options_rows_sum_to_one_over_what_is_visible(options):
    model, x = tiny_model(**options), tokens(2, 20)
    found = trace(model, x)
    assert torch.equal(found.logits, model(x).detach())
    for n, window in enumerate(model.config.windows):
        weights = found[f"blocks.{n}.attention"]
        seen = visible(torch.arange(20)[None], torch.arange(20), window, model.config.sparse_stride)[0]
        assert (weights[:, :, ~seen] == 0).all()
        assert (found[f"blocks.{n}.scores"][:, :, ~seen] == -math.inf).all()
        assert (found[f"blocks.{n}.scores"][:, :, seen].isfinite()).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, model.config.n_heads, 20))


@EVERY
def test_what_is_kept_fits_together(options):
    """Each value follows from those before it, by sums and products written anew here."""
    model, x = tiny_model(**options), tokens(2, 12)
    config, found = model.config, trace(model, x)
    before = found["embed"]
    for n, block in enumerate(model.blocks):
        at = {kind: found[f"blocks.{n}.{kind}"] for kind in IN_BLOCK}
        assert torch.equal(at["mid"], before + at["attn"])
        assert torch.equal(at["out"], at["mid"] + at["ffn"])
        k, v = (at[kind].repeat_interleave(config.n_heads // config.n_kv_heads, dim=1) for kind in "kv")
        scores = torch.einsum("bhtd,bhsd->bhts", at["q"], k) * block.attn.scale
        scores = scores if config.attn_softcap is None else config.attn_softcap * (scores / config.attn_softcap).tanh()
        kept = at["scores"].isfinite()
        torch.testing.assert_close(at["scores"][kept], scores[kept])
        torch.testing.assert_close(at["attention"], at["scores"].softmax(-1))
        torch.testing.assert_close(at["heads"], torch.einsum("bhts,bhsd->bhtd", at["attention"], v))
        bias = block.attn.o_proj.bias if config.o_bias else 0
        given = block.attn_post_norm(writes(model, found, n).sum(1) + bias)
        torch.testing.assert_close(given, at["attn"], rtol=1e-4, atol=1e-5)
        before = at["out"]
    assert torch.equal(model.norm(before), found["norm"])
    assert torch.equal(model.head(found["norm"]), found.logits)


@pytest.mark.parametrize("name", ["llama-6-2", "gemma2", "gemma3_text", "gpt2", "opt", "olmo2", "gpt_neox", "qwen3", "phi3"])
@torch.no_grad()
def test_the_stream_and_the_attention_are_transformers(name, tmp_path):
    """Their output_hidden_states and output_attentions, on redrawn parameters."""
    pytest.importorskip("transformers", reason="the parity extra is not installed")
    theirs = oracle(name, tmp_path)(tokens(2, 12), output_hidden_states=True, output_attentions=True)
    model = nd.load_model(tmp_path)
    found = trace(model, tokens(2, 12))
    streams = [found["embed"], *(found[f"blocks.{n}.out"] for n in range(model.config.n_layers - 1)), found["norm"]]
    for ours, other in zip(streams, theirs.hidden_states, strict=True):
        assert (ours - other).abs().max() <= 2e-5
    for n, other in enumerate(theirs.attentions):
        assert (found[f"blocks.{n}.attention"] - other).abs().max() <= 2e-6


# ------------------------------------------------------------------------------------------------------------- replacing


@EVERY
@pytest.mark.parametrize("half", ["attn", "ffn"])
@torch.no_grad()
def test_zeroing_one_half_of_every_block_is_a_model_whose_half_writes_nothing(options, half):
    model, x = tiny_model(**options), tokens(2, 12)
    found = trace(model, x, replace={f"blocks.*.{half}": torch.zeros_like})
    for block in model.blocks:  # the same by the weights
        for part in (f"{half}_post_norm", "attn.o_proj" if half == "attn" else "ffn.down_proj"):
            for parameter in block.get_submodule(part).parameters():
                parameter.zero_()
            if "norm" in part and model.config.post_norm and model.config.norm_offset:
                block.get_submodule(part).weight.fill_(-model.config.norm_offset)
    torch.testing.assert_close(found.logits, model(x), rtol=1e-5, atol=1e-5)
    assert not torch.equal(found.logits, trace(tiny_model(**options), x).logits)


@EVERY
@torch.no_grad()
def test_zeroing_a_head_is_a_model_without_its_columns(options):
    model, x = tiny_model(**options), tokens(2, 12)

    def without(heads):
        heads[:, 2] = 0
        return heads

    found = trace(model, x, replace={"blocks.1.heads": without})
    width = model.config.head_dim
    model.blocks[1].attn.o_proj.weight[:, 2 * width : 3 * width] = 0
    torch.testing.assert_close(found.logits, model(x), rtol=1e-5, atol=1e-5)
    assert (found["blocks.1.heads"][:, 2] == 0).all()


@pytest.mark.parametrize("place", ["blocks.0.mid", "blocks.1.out", "embed", "norm"])
def test_a_stream_from_another_prompt_brings_its_logits(place):
    """What comes after the place knows nothing else of the prompt."""
    model = tiny_model()
    ours, other = trace(model, tokens(1, 12)), trace(model, tokens(1, 12, seed=6))
    patched = trace(model, tokens(1, 12), replace={place: other[place]})
    torch.testing.assert_close(patched.logits, other.logits)
    assert not torch.equal(patched.logits, ours.logits)


def test_attention_can_be_replaced_by_another_pattern():
    """Each token looking at itself alone gathers its own value."""
    model = tiny_model()
    itself = torch.eye(12).expand(1, 4, 12, 12)
    found = trace(model, tokens(1, 12), replace={"blocks.0.attention": itself})
    torch.testing.assert_close(found["blocks.0.heads"], found["blocks.0.v"].repeat_interleave(2, dim=1))
    scores = torch.where(torch.eye(12) > 0, 0.0, -math.inf).expand(1, 4, 12, 12)
    again = trace(model, tokens(1, 12), replace={"blocks.0.scores": scores})
    torch.testing.assert_close(again.logits, found.logits)


def test_queries_keys_and_values_can_be_replaced():
    """With all keys alike, a token looks equally at all that it sees."""
    model = tiny_model()
    found = trace(model, tokens(1, 12), replace={"blocks.1.k": lambda k: torch.zeros_like(k)})
    for t in range(12):
        torch.testing.assert_close(found["blocks.1.attention"][0, :, t, : t + 1], torch.full((4, t + 1), 1 / (t + 1)))
    nothing = trace(model, tokens(1, 12), replace={"blocks.*.v": torch.zeros_like, "blocks.*.q": torch.ones_like})
    assert (nothing["blocks.1.attn"] == 0).all()
    assert (nothing["blocks.1.q"] == 1).all()


@pytest.mark.parametrize("kind", ["scores", "attention"])
def test_a_function_may_write_into_what_it_is_given(kind):
    model, x = tiny_model(), tokens(1, 12)
    in_place = trace(model, x, replace={f"blocks.0.{kind}": lambda table: table.fill_(0.5)})
    as_new = trace(model, x, replace={f"blocks.0.{kind}": lambda table: torch.full_like(table, 0.5)})
    assert torch.equal(in_place.logits, as_new.logits)
    assert not torch.equal(in_place.logits, trace(model, x).logits)


# --------------------------------------------------------------------------------------------- nothing is left, nothing is lost


def test_nothing_is_left_behind_when_an_error_flies():
    model, x = tiny_model(), tokens(1, 12)
    plain = model(x)

    def breaks(value):
        raise RuntimeError("by the caller")

    for place in ("embed", "blocks.0.q", "blocks.1.scores", "blocks.1.mid", "norm"):
        with pytest.raises(RuntimeError, match="by the caller"):
            trace(model, x, replace={place: breaks})
        assert untouched(model)
    assert torch.equal(model(x), plain)


def test_compiled_code_is_gone_past_for_as_long_as_a_trace_lasts():
    model, x = tiny_model(), tokens(1, 12)
    wanted = trace(model, x)

    def compiled(*given, **more):
        raise AssertionError("what is compiled knows nothing of a trace")

    model.blocks[0]._compiled_call_impl = model.blocks[1].attn._compiled_call_impl = compiled
    found = trace(model, x, replace={"blocks.0.mid": lambda mid: mid})
    torch.testing.assert_close(found.logits, wanted.logits)
    assert model.blocks[0]._compiled_call_impl is compiled
    assert model.blocks[1].attn._compiled_call_impl is compiled


def test_logits_that_nobody_looks_at_are_not_computed(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(model, "head", lambda x: pytest.fail("the head was asked"))
    assert list(trace(model, tokens(1, 12), keep=["norm"]).values) == ["norm"]


def test_a_trace_inside_a_trace_leaves_the_outer_one_in_place():
    model, x = tiny_model(), tokens(1, 12)

    def other(value):
        return trace(model, tokens(1, 12, seed=6))["blocks.0.mid"]

    found = trace(model, x, replace={"blocks.0.mid": other})
    torch.testing.assert_close(found.logits, trace(model, tokens(1, 12, seed=6)).logits)
    assert untouched(model)


def test_training_mode_comes_back_and_what_is_kept_can_be_computed_with():
    model = tiny_model()
    model.train()
    model.blocks[0].dropout.p = 0.5
    found = trace(model, tokens(1, 12))
    assert model.training
    assert torch.equal(found.logits, trace(model.eval(), tokens(1, 12)).logits)
    scale = torch.ones((), requires_grad=True)
    (found["blocks.0.mid"] * scale).sum().backward()
    assert scale.grad is not None


def test_then_is_handed_each_layer_and_nothing_else_of_it_is_kept():
    model, x = tiny_model(), tokens(1, 12)
    whole = trace(model, x)
    means = trace(model, x, keep=["attention", "logits"], then=lambda n, at: (n, sorted(at), at["attention"].mean(1)))
    assert [means.results[n][:2] for n in (0, 1)] == [(0, ["attention"]), (1, ["attention"])]
    assert torch.equal(means.results[1][2], whole["blocks.1.attention"].mean(1))
    assert list(means.values) == ["logits"]


def test_a_trace_says_how_large_it_is():
    """trace_bytes is what the tensors take."""
    for options in KINDS.values():
        model = tiny_model(**options)
        for layers in (None, [1], []):
            found = trace(model, tokens(3, 12), layers=layers)
            held = sum(value.numel() * value.itemsize for value in found.values.values())
            assert held == trace_bytes(model.config, 3, 12, layers)
            assert list(found.values) == [*names(model.config, layers)]


def test_a_large_trace_is_refused_with_its_size():
    model = tiny_model(max_seq_len=4096, n_heads=8, n_kv_heads=8)
    size = trace_bytes(model.config, 1, 2048) / 2**20
    with pytest.raises(
        ValueError, match=rf"2 layers for a prompt of 2,048 tokens would take {size:,.0f} MiB, and max_mib is 256"
    ):
        trace(model, tokens(1, 2048), max_mib=256)
    trace(model, tokens(1, 2048), keep=["mid"], max_mib=256)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": [99]}, "there is no layer 99: this model has layers 0 to 1"),
        ({"layers": [-1]}, "there is no layer -1"),
        ({"keep": ["weights"]}, "there is nothing named 'weights' to keep; there is q, k, v, scores"),
        ({"replace": {"blocks.7.mid": torch.zeros_like}}, "there is no layer 7"),
        (
            {"replace": {"blocks.0.gate": torch.zeros_like}},
            "there is no place 'blocks.0.gate' to replace; there is embed, norm",
        ),
        (
            {"replace": {"blocks.0.mid": torch.zeros(3)}},
            r"blocks.0.mid is of shape \(1, 12, 64\), and its replacement is a tensor",
        ),
        ({"replace": {"embed": lambda x: None}}, r"embed is of shape \(1, 12, 64\), and its replacement is None"),
    ],
)
def test_what_is_not_there_is_named(options, words):
    with pytest.raises(ValueError, match=words):
        trace(tiny_model(), tokens(1, 12), **options)


def test_what_was_not_kept_is_named():
    found = trace(tiny_model(), [5, 6, 7], layers=[0], keep=["mid", "logits"])
    assert found.logits.shape == (1, 3, 97)
    assert "blocks.0.mid" in found
    assert "blocks.1.mid" not in found
    with pytest.raises(KeyError, match=r"'blocks\.1\.mid' was not traced; there is blocks\.0\.mid, logits"):
        found["blocks.1.mid"]


def test_half_precision_is_traced_as_it_is():
    model = nd.Decoder(tiny_config()).eval()
    redraw(model)
    model = model.to(torch.bfloat16)
    found = trace(model, tokens(1, 12))
    assert torch.equal(found.logits, model(tokens(1, 12)).detach())
    assert {value.dtype for value in found.values.values()} == {torch.bfloat16}
