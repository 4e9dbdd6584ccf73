"""quantize.py: eight and four bits as they are said to be, the price stated, files that open again."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model, tokens

import nanodecoder as nd
from nanodecoder.quantize import GROUP, KINDS, Int4Linear, Int8Linear, kind_of, price, quantize, size, tiles_of

GPT_LIKE = {"norm": "layer", "learned_positions": True, "rope": None, "gated": False}
BIASES = {"qkv_bias": True, "o_bias": True, "ffn_bias": True}
MODELS = {"untied": {}, "tied": {"tied_head": True, "vocab_size": 96}, "biases": GPT_LIKE | BIASES}


@given(st.integers(0, 10_000), st.sampled_from([(16, 32), (48, 96), (64, 64)]))
def test_each_weight_is_rounded_to_the_nearest_step(seed, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1
    eight = Int8Linear.of(weight)
    assert ((eight.weight - weight).abs() <= eight.scale[:, None] * 0.5001).all()
    four = Int4Linear.of(weight)
    step = four.scale[..., 0].float().T.repeat_interleave(GROUP, 1)  # (out, in)
    zero = four.scale[..., 1].float().T.repeat_interleave(GROUP, 1)
    inside = (weight >= zero - 8 * step) & (weight <= zero + 7 * step)  # the rest lost less than the scale's own rounding
    assert ((four.weight - weight).abs() <= torch.where(inside, step * 0.5001, step)).all()


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize(("made", "inputs"), [(Int8Linear, 64), (Int8Linear, 172), (Int4Linear, 64)])
def test_a_product_is_that_of_the_rounded_weight(made, inputs, rows):
    weight, bias = torch.randn(48, inputs) * 0.1, torch.randn(48)
    linear = made.of(weight, bias)
    x = torch.randn(2, rows, inputs).bfloat16().float()  # as the kernel takes it
    wanted = x @ linear.weight.T + bias
    assert (linear(x) - wanted).abs().max() < 0.02 * wanted.abs().max()
    assert (linear(x) - (x @ weight.T + bias)).abs().max() > 0  # and not of the other


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_quantized_model_is_near_the_plain_one_and_its_folder_opens_as_it_was(kind, name, tmp_path):
    plain, model = tiny_model(**MODELS[name]), tiny_model(**MODELS[name])
    assert kind_of(model) is None
    assert quantize(model, kind) is model
    assert kind_of(model) == kind
    assert size(model) < size(plain) / (2.4 if kind == "int8" else 3)
    with torch.no_grad():
        x = tokens(2, 9, vocab_size=90)
        got, wanted = model(x), plain(x)
        assert (got - wanted).std() < (0.05 if kind == "int8" else 0.4) * wanted.std()
        nd.save_model(tmp_path, model)
        again = nd.load_model(tmp_path)
        assert torch.equal(again(x), got)
    assert size(again) == size(model)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["kind"] == kind
    assert (tmp_path / "model.safetensors").stat().st_size < 1.1 * size(model) + 8000
    with pytest.raises(nd.CheckpointError, match=f"is quantized already \\({kind}\\): load it as it is"):
        nd.load_model(tmp_path, quantize="int8")


def test_what_four_bits_cannot_have_is_kept_in_eight():
    model = quantize(tiny_model(ffn_dim=120), "int4")
    assert isinstance(model.blocks[0].ffn.down_proj, Int8Linear)  # 120 inputs are no groups of 32
    assert isinstance(model.blocks[0].ffn.up_proj, Int8Linear)  # 120 outputs are no multiple of 16
    assert isinstance(model.blocks[0].attn.q_proj, Int4Linear)


def test_four_bits_are_held_once_and_come_back_from_the_kernels_order():
    linear = Int4Linear.of(torch.randn(48, 96))
    before, weight, held = linear.values.clone(), linear.weight, linear.values.nbytes
    linear(torch.randn(1, 96))
    assert linear.values is None
    assert linear.packed.nbytes == held
    assert torch.equal(linear.weight, weight)
    linear.to("cpu")
    assert linear.packed is None
    assert torch.equal(linear.values, before)
    assert linear.values.is_contiguous()  # as CUDA's packing wants it


def test_the_tiles_of_cudas_kernel_divide_the_inputs():
    assert [tiles_of(inputs) for inputs in (4096, 128, 576, 448, 160, 32)] == [8, 8, 4, 4, 2, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("inputs", [32, 160, 448, 576, 1024])
@pytest.mark.parametrize("made", [Int8Linear, Int4Linear])
def test_on_cuda_a_product_is_the_cpus_and_four_bits_are_packed_again(made, inputs):
    weight, bias = torch.randn(48, inputs) * 0.1, torch.randn(48)
    linear, x = made.of(weight, bias), torch.randn(3, inputs).bfloat16()
    wanted = x.float() @ linear.weight.T + bias
    linear, x = linear.cuda(), x.cuda()
    for _ in range(2):
        assert (linear(x).float().cpu() - wanted).abs().max() < 0.03 * wanted.abs().max()
        if made is Int4Linear:
            held = linear.packed.clone()
            linear.unpack()
            linear.pack()
            assert torch.equal(linear.packed, held)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_on_cuda_the_compiled_step_takes_few_bits(kind):
    model = quantize(tiny_model().bfloat16().cuda(), kind)
    plain = nd.complete(model, None, [[5, 6, 7]], max_new_tokens=1, logprobs=True)[0]
    assert plain.ids == nd.complete(model, None, [[5, 6, 7]], max_new_tokens=1, compile=True)[0].ids
    plain = nd.complete(model, None, [[5, 6, 7]], max_new_tokens=6, logprobs=True)[0]
    fast = nd.complete(model, None, [[5, 6, 7]], max_new_tokens=6, logprobs=True, compile=True)[0]
    same = next((i for i, (a, b) in enumerate(zip(plain.ids, fast.ids, strict=True)) if a != b), 6)
    assert fast.logprobs[:same] == pytest.approx(plain.logprobs[:same], abs=0.1)
    assert same > 1


def test_wrong_kinds_and_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="quantize must be one of int8, int4, not 'int2'"):
        quantize(tiny_model(), "int2")
    model = quantize(tiny_model(), "int8")
    with pytest.raises(ValueError, match="the model is in int8 already: load it anew"):
        quantize(model, "int4")
    nd.save_model(tmp_path, model)
    from safetensors.torch import load_file, save_file

    held = load_file(tmp_path / "model.safetensors")
    del held["blocks.1.attn.q_proj.scale"]
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(nd.CheckpointError, match=r"the weights do not fit .*blocks\.1\.attn\.q_proj\.scale is missing"):
        nd.load_model(tmp_path)
    held |= {"blocks.1.attn.q_proj.scale": torch.ones(64), "more": torch.ones(1)}
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(nd.CheckpointError, match="more unexpected"):
        nd.load_model(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_price_is_what_the_definitions_give(kind):
    plain, model = tiny_model(), quantize(tiny_model(), kind)
    ids = tokens(1, 60)[0].tolist()
    found = price(plain, model, ids)
    with torch.no_grad():
        before, after = (m(torch.tensor([ids]))[0].log_softmax(-1) for m in (plain, model))
    targets = torch.tensor(ids[1:])[:, None]
    assert found.perplexity_before == pytest.approx(float((-before[:-1].gather(1, targets).mean()).exp()), rel=1e-4)
    assert found.perplexity_after == pytest.approx(float((-after[:-1].gather(1, targets).mean()).exp()), rel=1e-4)
    assert found.divergence == pytest.approx(float((before.exp() * (before - after)).sum(-1).mean()), rel=1e-3, abs=1e-7)
    assert found.bytes_before == size(plain)
    assert found.bytes_after == size(model)
    assert [error for _, error in found.worst] == sorted((error for _, error in found.worst), reverse=True)
    name, error = found.worst[0]
    a, b = plain.get_submodule(name).weight.detach(), model.get_submodule(name).weight
    assert error == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-5)


def test_generation_with_few_bits_is_the_same_however_it_is_asked():
    model = quantize(tiny_model(), "int8")
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (3, 9)]
    alone = [nd.complete(model, None, [one], max_new_tokens=6)[0].ids for one in prompts]
    assert [done.ids for done in nd.complete(model, None, prompts, max_new_tokens=6)] == alone
    assert [done.ids for done in nd.complete(model, None, prompts, max_new_tokens=6, use_cache=False)] == alone


@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_step_takes_few_bits(kind, monkeypatch):
    from nanodecoder import compiled

    monkeypatch.setattr(compiled, "WHOLE", 0)
    model = quantize(tiny_model(), kind)
    plain = nd.complete(model, None, [[5, 6, 7]], max_new_tokens=6, logprobs=True)[0]
    fast = nd.complete(model, None, [[5, 6, 7]], max_new_tokens=6, logprobs=True, compile=True)[0]
    assert fast.ids == plain.ids
    assert fast.logprobs == pytest.approx(plain.logprobs, abs=0.05)


def test_a_real_model_loses_little(smollm2):
    text = (ROOT / "README.md").read_text()
    ids = nd.Tokenizer.load(smollm2).encode(text)[:200]
    plain = nd.load_model(smollm2)
    eight = price(plain, nd.load_model(smollm2, quantize="int8"), ids)
    four = price(plain, nd.load_model(smollm2, quantize="int4"), ids)
    assert eight.divergence < 0.02 < four.divergence < 0.15
    assert eight.perplexity_after < 1.02 * eight.perplexity_before
    assert four.perplexity_after < 1.2 * four.perplexity_before
    assert eight.bytes_after < eight.bytes_before / 3.9


@pytest.mark.parametrize("said", [None, [], "int8", {}])
def test_what_others_say_of_quantization_is_never_a_traceback(said, tmp_path):
    nd.save_model(tmp_path, tiny_model())
    raw = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": said}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if said is None:
        assert kind_of(nd.load_model(tmp_path)) is None
        return
    with pytest.raises(nd.CheckpointError, match="quantization_config"):
        nd.load_model(tmp_path)
