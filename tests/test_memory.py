"""memory.py: weights, cache and optimizer to the byte; activations as near as said."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_trace import KINDS
from tiny import tiny_config, tiny_model, tokens

import nanodecoder as nd
from nanodecoder.inside.memory import _Fused, activations, cache_per_token, optimizer_state, quantized, show, weights
from nanodecoder.inside.shapes import empty
from nanodecoder.quantize import quantize
from nanodecoder.quantize import size as bytes_of
from nanodecoder.training.optim import make_optimizers

EVERY = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
RATES = {"learning_rate": 1e-3, "muon_learning_rate": 1e-2, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95}


@EVERY
def test_weights_are_what_the_tensors_take(options):
    model = tiny_model(**options)
    found = weights(model)
    assert found == weights(empty(tiny_config(**options)))
    assert sum(found.values()) == sum(p.untyped_storage().nbytes() for p in model.parameters())
    norms = {id(p) for m in model.modules() if "Norm" in type(m).__name__ for p in m.parameters()}
    assert found["norms"] == sum(4 * p.numel() for p in model.parameters() if id(p) in norms)
    assert (found["head"] == 0) == model.config.tied_head
    assert sum(weights(model.to(torch.bfloat16)).values()) * 2 == sum(found.values())


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_is_what_a_cache_takes(options, dtype):
    config = tiny_config(**options)
    cache = nd.KVCache(config, 3, 20, dtype=dtype)
    assert cache_per_token(config, dtype) * 3 * 20 == cache.keys.nbytes + cache.values.nbytes


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("options", [{}, {"tied_head": True, "qkv_bias": True, "norm": "layer"}])
def test_optimizers_keep_so_much(optimizer, options):
    model = tiny_model(**options)
    made = make_optimizers(model, optimizer, **RATES)
    F.cross_entropy(model(tokens())[0], tokens()[0]).backward()
    for one in made:
        one.step()
    held = [x for one in made for state in one.state.values() for x in state.values() if torch.is_tensor(x) and x.dim()]
    assert optimizer_state(model, optimizer) == sum(x.nbytes for x in held)


@EVERY
def test_training_keeps_about_what_autograd_saves(options):
    """Within an eighth of what is saved on a real pass, with attention as a fused kernel keeps it."""
    if "attn_softcap" in options:
        pytest.skip("there is no kernel for capped scores")
    model = tiny_model(**options, n_layers=4) if "windows" not in options else tiny_model(**options)
    x, saved, kept = tokens(2, 100), {}, []
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(value):
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        for block in model.blocks:
            block.attn.attend = lambda q, k, v, see, path: _Fused.apply(q, k, v)
        logits = model(x).flatten(0, 1)
        F.cross_entropy(logits, x.flatten())
    real = sum(saved.values()) + logits.nbytes
    assert 7 / 8 < activations(model.config, 2, 100, torch.float32, train=True) / real < 8 / 7


@EVERY
def test_generating_keeps_little_and_in_proportion_to_the_tokens(options):
    config = tiny_config(**options, max_seq_len=4096)
    small, large, wide = (activations(config, rows, n, torch.float32) for rows, n in ((1, 512), (1, 1024), (4, 512)))
    tables = config.attn_softcap or any(config.windows)  # scores, or masks, grow with the square
    assert 1.9 < large / small < (4.1 if tables else 2.1)
    assert (1 if any(config.windows) else 3.9) < wide / small < 4.1  # rows alike share a mask
    assert small < activations(config, 1, 512, torch.float32, train=True)
    assert activations(config, 1, 512, torch.bfloat16) < (small if tables else 0.8 * small)
    assert activations(tiny_config(**options, n_layers=2), 1, 100, torch.float32) >= 100 * 4 * config.dim * 2


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("options", [{}, {"tied_head": True, "vocab_size": 96}, {"ffn_dim": 120}])
def test_few_bits_take_what_a_quantized_model_takes(options, kind):
    model = empty(tiny_config(**options))
    assert quantized(model, kind) == bytes_of(quantize(tiny_model(**options), kind))
    assert all(parameter.is_meta and parameter.is_floating_point() for parameter in model.parameters())  # it stays plain


def test_a_runs_memory_in_words():
    model = tiny_model(tied_head=True)
    text = show(model, model.config, 2, 30, 64, torch.float32, 5 * 2**20)
    assert "it shares the embedding's weight" in text
    assert "2 × 2 layers × 2 key/value heads × 16 × 4 bytes" in text
    assert "30 of 64 slots used, 2 rows" in text
    assert "5.0 MiB" in text
    assert "head" in show(tiny_model(), model.config, 1, 1, 1, torch.float32, 0)
