"""compiled.py: the compiled step gives the plain model's logits at any length, for any rows, from a few graphs."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model, tokens

import nanodecoder as nd
from nanodecoder import cache
from nanodecoder import compiled as subject
from nanodecoder.compiled import compiled
from nanodecoder.config import RopeConfig

LLAMA_LIKE = {"qk_norm": "head", "windows": (None, 5)}
GEMMA_LIKE = {"attn_softcap": 20.0, "post_norm": True, "norm_offset": 1.0, "embed_scale": 8.0, "activation": "gelu_tanh"}
GPT_LIKE = {"norm": "layer", "learned_positions": True, "rope": None, "gated": False, "qkv_bias": True, "o_bias": True}
LONGROPE = RopeConfig(
    kind="longrope", original_max_seq_len=10, short_factors=(1.0,) * 8, long_factors=tuple(1.0 + i for i in range(8))
)
KINDS = {"llama": LLAMA_LIKE, "gemma": GEMMA_LIKE, "gpt": GPT_LIKE, "longrope": {"rope": LONGROPE}}


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def beside(model: nd.Decoder, lengths: list[int], steps: int, records: bool = False) -> float:
    """The largest difference of the compiled step's logits to the model's own, led along random tokens from these lengths."""
    step = compiled(model)
    step.records = records
    plain, fast = (nd.KVCache(model.config, len(lengths), max(lengths) + steps + 1) for _ in range(2))
    prompts = tokens(len(lengths), max(lengths), seed=1)
    worst = 0.0
    with torch.inference_mode():
        for held in (plain, fast):
            model.trunk(prompts, held, counts=lengths)
        for turn in range(steps):
            new = tokens(len(lengths), 1, seed=turn)
            wanted = model.head(model.trunk(new, plain)[:, 0])
            worst = max(worst, float((step(new, fast) - wanted).abs().max()))
            assert torch.equal(fast.lengths, plain.lengths)
    return worst


@pytest.fixture
def by_blocks(monkeypatch) -> None:
    """One block that serves all, however few there are, and its graph run without being turned into C++: quicker."""
    monkeypatch.setattr(subject, "WHOLE", 0)
    monkeypatch.setattr(subject, "BACKEND", "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_its_logits_are_the_models_for_one_row_and_for_several(kind, by_blocks):
    model = tiny_model(**KINDS[kind])
    assert beside(model, [4], 6) < 2e-5
    assert beside(model, [1, 5, 3], 5) < 2e-5


def test_a_step_whose_tensors_stay_in_place_gives_the_same(by_blocks, monkeypatch):
    """As a GPU replays it, here without one: over a rounded number of slots, of which the mask hides the rest."""
    monkeypatch.setattr(cache, "EXACT_SLOTS", 8)
    model = tiny_model(windows=(None, 5))
    assert beside(model, [4], 20, records=True) < 2e-5
    assert beside(model, [1, 5, 3], 9, records=True) < 2e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_recorded_steps_give_the_models_logits():
    model = tiny_model(windows=(None, 5)).cuda()
    step = compiled(model)
    assert step.records
    plain, fast = (nd.KVCache(model.config, 2, 90, device="cuda") for _ in range(2))
    prompts = tokens(2, 5).cuda()
    with torch.inference_mode():
        model.trunk(prompts, plain, counts=[5, 3])
        model.trunk(prompts, fast, counts=[5, 3])
        for turn in range(60):
            new = tokens(2, 1, seed=turn).cuda()
            wanted = model.head(model.trunk(new, plain)[:, 0])
            assert (step(new, fast) - wanted).abs().max() < 1e-4
    assert len(step._recorded) == 1


def test_lengths_and_rows_are_sizes_and_not_graphs(by_blocks):
    model = tiny_model()
    beside(model, [4], 3)
    beside(model, [3, 8, 7], 3)
    before = graphs()
    for lengths in ([9], [1], [2, 30, 17], [1, 2, 3, 4, 5], [40, 40]):
        assert beside(model, lengths, 5) < 2e-5
    assert graphs() == before


def test_a_small_model_is_one_graph_and_of_many_layers_one_block_serves_all(monkeypatch):
    monkeypatch.setattr(subject, "BACKEND", "aot_eager")
    model = tiny_model(n_layers=3)
    before = graphs()
    assert beside(model, [4], 3) < 2e-5
    assert graphs() - before == 1
    monkeypatch.setattr(subject, "WHOLE", 2)
    large = tiny_model(n_layers=3)
    before = graphs()
    assert beside(large, [4], 3) < 2e-5
    assert graphs() - before == 3  # front, block, back


def test_the_step_is_the_models_own_as_its_weights_change(by_blocks):
    model = tiny_model()
    assert compiled(model)._steps is compiled(model)._steps is not compiled(tiny_model())._steps
    beside(model, [4], 2)
    with torch.no_grad():
        model.blocks[1].ffn.up_proj.weight.mul_(-1)
        model.blocks[0].attn.q_proj.weight = torch.nn.Parameter(-model.blocks[0].attn.q_proj.weight)
    assert beside(model, [4], 2) < 2e-5


def test_it_refuses_what_the_models_own_pass_refuses(by_blocks):
    model = tiny_model(rope=LONGROPE)
    near = nd.KVCache(model.config, 1, 20)
    with torch.inference_mode():
        model.trunk(tokens(1, 10), near)
        with pytest.raises(ValueError, match="across the original context"):
            compiled(model)(tokens(1, 1), near)
    full = nd.KVCache(model.config, 1, 4)
    with torch.inference_mode():
        model.trunk(tokens(1, 4), full)
        with pytest.raises(ValueError, match="1 more do not fit the cache's 4 slots"):
            compiled(model)(tokens(1, 1), full)
    assert near.lengths.tolist() == [10]
    assert full.lengths.tolist() == [4]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_rows_come_and_go_and_have_the_tokens_that_the_plain_loop_gives(backend, by_blocks, monkeypatch):
    monkeypatch.setattr(subject, "BACKEND", backend)
    model = tiny_model(qk_norm="head")
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (1, 7, 3)]

    def texts(**way: bool) -> list[list[int]]:
        stepper = nd.Stepper(model, sampler=nd.Sampler(temperature=1.0), **way)
        found: dict[int, list[int]] = {}
        for number, prompt in enumerate(prompts):
            stepper.add(prompt, max_new_tokens=6 + 2 * number, seed=number)
            for _ in range(2):
                step = stepper.step()
                for row, index in zip(step.rows, step.ids.tolist(), strict=True):
                    found.setdefault(row, []).append(index)
        while len(stepper):
            step = stepper.step()
            for row, index in zip(step.rows, step.ids.tolist(), strict=True):
                found[row].append(index)
        assert stepper.forwards < 20
        return [found[row] for row in range(3)]

    assert texts(compile=True) == texts()


def test_without_a_compiler_one_sentence_says_so_and_the_tokens_are_the_same(monkeypatch):
    from torch._inductor import cpp_builder, exc

    def none() -> str:
        raise exc.InvalidCxxCompiler

    model = tiny_model()
    wanted = nd.complete(model, None, [[3, 4, 5]], max_new_tokens=4)[0].ids
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.warns(UserWarning, match="needs a C\\+\\+ compiler, and there is none .*: the step runs as it is"):
        assert nd.complete(model, None, [[3, 4, 5]], max_new_tokens=4, compile=True)[0].ids == wanted


@pytest.mark.parametrize("other", [{"exact": True}, {"use_cache": False}])
def test_it_cannot_go_with_what_would_leave_it_idle(other):
    name = next(iter(other))
    with pytest.raises(ValueError, match=f"compile=True compiles the step through the cache, which {name}="):
        nd.complete(tiny_model(), None, [[3]], compile=True, **other)
