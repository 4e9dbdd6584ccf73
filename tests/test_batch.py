"""batch.py: three ways to the same logits; what is held is not computed again, and exact bits know no neighbours."""

from __future__ import annotations

import pytest
import torch
from conftest import FIXTURES
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model, tokens

import nanodecoder as nd
from nanodecoder import batch
from nanodecoder.attention import sights
from nanodecoder.batch import Anew, Blocks, Row, Together
from nanodecoder.cache import EXACT_SLOTS, Placement
from nanodecoder.config import RopeConfig

LONGROPE = RopeConfig(
    kind="longrope", original_max_seq_len=10, short_factors=(1.0,) * 8, long_factors=tuple(1.0 + i for i in range(8))
)


def row(length: int, seed: int = 0, slots: int = 40) -> Row:
    return Row(ids=tokens(1, length, seed=length + 100 * seed)[0].tolist(), slots=slots)


def whole(model: nd.Decoder, one: Row) -> torch.Tensor:
    """The logits after a row's last token, by one pass over all of it."""
    with torch.no_grad():
        return model(torch.tensor([one.ids]))[0, -1]


def lead(passes, rows: list[Row]) -> torch.Tensor:
    with torch.inference_mode():
        return passes.logits(rows)


@settings(max_examples=25)
@given(st.data())
def test_whoever_comes_and_goes_every_row_has_its_own_logits(data):
    """Rows join, leave and change their order at any step, some alike or continuing one that has left."""
    model = tiny_model(windows=(None, 5), qk_norm="head")
    ways = [Together(model), Anew(model), Blocks(model)]
    rows: list[Row] = []
    gone: list[Row] = []
    for _ in range(data.draw(st.integers(2, 5))):
        for _ in range(data.draw(st.integers(0 if rows else 1, 2))):
            known = data.draw(st.sampled_from([*rows, *gone])) if rows + gone and data.draw(st.booleans()) else None
            start = [] if known is None else known.ids[: data.draw(st.integers(0, len(known.ids)))]
            rows.append(Row(ids=start + tokens(1, data.draw(st.integers(1, 6)))[0].tolist(), slots=60))
        rows = data.draw(st.permutations(rows))
        for passes in ways:
            logits = lead(passes, rows)
            for one, got in zip(rows, logits, strict=True):
                assert (got - whole(model, one)).abs().max() < 2e-5
        for one in rows:
            one.ids.append(data.draw(st.integers(0, 96)))
        leave = [one for one in rows if len(rows) > 1 and data.draw(st.integers(0, 3)) == 0][: len(rows) - 1]
        gone += leave
        rows = [one for one in rows if one not in leave]


def test_samples_of_one_prompt_take_one_prefill():
    model = tiny_model()
    for passes in (Together(model), Blocks(model), Anew(model)):
        alike = [row(9) for _ in range(5)]
        logits = lead(passes, alike)
        assert passes.positions == 9
        assert all((logits[0] - one).abs().max() < 1e-5 for one in logits)
        for number, one in enumerate(alike):
            one.ids.append(number)
        after = lead(passes, alike)
        for one, got in zip(alike, after, strict=True):
            assert (got - whole(model, one)).abs().max() < 2e-5


def test_what_rows_that_left_hold_is_not_computed_again():
    model = tiny_model()
    passes = Together(model)
    first = row(12)
    lead(passes, [first])
    again = Row(ids=[*first.ids, 5, 6], slots=40)
    assert (lead(passes, [again])[0] - whole(model, again)).abs().max() < 1e-5
    assert passes.positions == 12 + 2
    exactly = Row(ids=list(again.ids), slots=40)  # all of it is held: its last token is fed anyway
    assert (lead(passes, [exactly])[0] - whole(model, exactly)).abs().max() < 1e-5
    assert passes.positions == 12 + 2 + 1
    other = Row(ids=[*first.ids[:4], 7], slots=90)  # parts after four tokens, and needs more room than there is
    assert (lead(passes, [other])[0] - whole(model, other)).abs().max() < 1e-5
    assert passes.positions == 12 + 2 + 1 + 1
    assert passes.cache.max_seq_len == 90


def test_a_longrope_row_never_takes_keys_that_were_turned_for_another_length():
    model = tiny_model(rope=LONGROPE)
    for passes in (Together(model), Blocks(model)):
        long = row(14)
        lead(passes, [long])
        short = Row(ids=long.ids[:6], slots=40)
        assert (lead(passes, [short])[0] - whole(model, short)).abs().max() < 1e-5
        for _ in range(8):  # across the original length of 10
            short.ids.append(3)
            assert (lead(passes, [short])[0] - whole(model, short)).abs().max() < 1e-5


def test_a_row_that_leaves_costs_nothing_and_those_that_stay_are_not_copied():
    passes = Together(tiny_model())
    rows = [row(n) for n in (3, 4, 5, 6, 7)]
    lead(passes, rows)
    for one in rows:
        one.ids.append(1)
    before = passes.cache.keys.data_ptr()
    lead(passes, [rows[0], *rows[2:]])
    assert passes.cache.batch_size == 4
    assert passes.cache.keys.data_ptr() == before
    assert passes.rows == [rows[0], rows[4], rows[2], rows[3]]  # the last one filled the gap
    rows[0].ids.append(1)
    lead(passes, rows[:1])
    assert passes.cache.keys.data_ptr() != before  # a batch that shrank by half gives memory back


# ---- exact


def bits(model: nd.Decoder, prompts: list[list[int]], new: int = 6) -> list[list[torch.Tensor]]:
    """The logits that each prompt's new tokens were chosen from."""
    seen: dict[int, list[torch.Tensor]] = {}

    def sampler(logits, rows):
        for seed, one in zip(rows.seeds, logits, strict=True):
            seen.setdefault(seed, []).append(one.clone())
        return logits.argmax(-1)

    stepper = nd.Stepper(model, sampler=sampler, exact=True)
    for number, prompt in enumerate(prompts):
        stepper.add(prompt, max_new_tokens=new, seed=number)
    while len(stepper):
        stepper.step()
    return [seen[number] for number in range(len(prompts))]


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"attn_softcap": 20.0, "windows": (None, 7)}, {"rope": LONGROPE, "qkv_bias": True}])
def test_exact_bits_are_the_same_in_any_company(options, dtype, threads):
    """Alone, among ten others of other lengths, in another order: equal, not close."""
    torch.set_num_threads(threads)
    model = tiny_model(max_seq_len=400, dim=96, n_heads=6, **{"head_dim": 16, **options}).to(dtype)
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (3, 70, 1, 64, 9, 130, 300, 12, 65, 8, 7)]
    together = bits(model, prompts)
    turned = bits(model, prompts[::-1])[::-1]
    for number in (0, 1, 6, 10):
        (alone,) = bits(model, [prompts[number]])
        for a, b, c in zip(alone, together[number], turned[number], strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)


def test_exact_passes_have_two_shapes():
    model = tiny_model(max_seq_len=300)
    shapes = set()
    model.embed.register_forward_hook(lambda module, args, out: shapes.add(tuple(args[0].shape)))
    bits(model, [tokens(1, n, seed=n)[0].tolist() for n in (1, 5, 200)])
    assert shapes == {(1, 64), (8, 1)}


def test_exact_gives_the_same_tokens_and_reads_whole_blocks_of_slots():
    model = tiny_model(max_seq_len=600)
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (5, 1, 280)]
    plain = nd.complete(model, None, prompts, max_new_tokens=12)
    exact = nd.complete(model, None, prompts, max_new_tokens=12, exact=True)
    assert [done.ids for done in exact] == [done.ids for done in plain]
    stepper = nd.Stepper(model, exact=True)
    for prompt in prompts:
        stepper.add(prompt, max_new_tokens=3)
    stepper.step()
    cache, seats = stepper._passes.blocks[0]
    assert cache.max_seq_len % EXACT_SLOTS == 0
    assert sum(seat is not None for seat in seats) == 3
    with pytest.raises(
        ValueError, match="exact fixes the shapes of passes that fill a cache: it cannot go with use_cache=False"
    ):
        nd.complete(model, None, prompts, exact=True, use_cache=False)


def test_an_exact_step_whose_sampler_failed_gives_the_same_bits_again():
    model = tiny_model()
    seen = []

    def sampler(logits, rows):
        seen.append(logits.clone())
        if len(seen) in (1, 4):
            raise RuntimeError("not now")
        return logits.argmax(-1)

    stepper = nd.Stepper(model, sampler=sampler, exact=True)
    stepper.add(tokens(1, 9)[0].tolist(), max_new_tokens=4)
    while len(stepper):
        try:
            stepper.step()
        except RuntimeError:
            continue
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[3], seen[4])


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_row_whose_context_is_full_may_sit_idle_beside_others(name):
    """Learned positions have no row beyond the last: an idle row must not ask for one."""
    model = nd.load_model(FIXTURES / name)
    limit, vocab = model.config.max_seq_len, model.config.vocab_size
    full = [index % vocab for index in range(limit)]
    stepper = nd.Stepper(model, exact=True)
    stepper.add([5, 6, 7], max_new_tokens=10, eos_ids=())
    first = stepper.step().ids.tolist()
    stepper.add(full, eos_ids=())
    step = stepper.step()
    assert step.reasons == (None, "context")
    wanted = nd.complete(model, None, [[5, 6, 7]], max_new_tokens=2, ignore_eos=True)[0].ids
    assert [*first, int(step.ids[0])] == wanted
    cache = nd.KVCache(model.config, 2, limit)
    with torch.no_grad():
        model(torch.tensor([full, full]), cache, counts=[limit, 3])
        alone = model(torch.tensor([full[:4]]))[0, -1]
        together = model(torch.tensor([[0], full[3:4]]), cache, counts=[0, 1])[1, 0]
    assert (alone - together).abs().max() < 1e-5


def test_exact_attention_looks_at_as_many_slots_as_the_row_itself_needs():
    """On today's CPU kernels masked slots change no bit, so only the shapes can tell."""
    at = Placement((5, 299), (1, 0), (5, 300), 1, 512, torch.device("cpu"), exact=True)
    see = sights(at, None, "fused")
    assert [s.mask.shape for s in see] == [(1, 1, 1, 256), (1, 1, 1, 512)]


@settings(max_examples=15)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 9))
def test_long_prompts_are_fed_in_passes_of_bounded_size(lengths, most):
    model = tiny_model(windows=(None, 5))
    rows = [row(length, seed=number) for number, length in enumerate(lengths)]
    sizes: list[int] = []
    trunk = model.trunk

    def watched(ids, cache=None, *, counts=None, **options):
        sizes.append(sum(counts))
        return trunk(ids, cache, counts=counts, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "CHUNK", most)
        patch.setattr(model, "trunk", watched)
        got = lead(Together(model), rows)
    for one, logits in zip(rows, got, strict=True):
        assert (logits - whole(model, one)).abs().max() < 2e-5
    assert max(sizes) <= most
    assert len(sizes) == -(-sum(lengths) // most)  # and every one is full but the last


def test_a_prompt_whose_angles_go_by_its_length_is_fed_whole(monkeypatch):
    monkeypatch.setattr(batch, "CHUNK", 4)
    model = tiny_model(rope=LONGROPE)
    long = row(14)
    passes = Together(model)
    assert (lead(passes, [long])[0] - whole(model, long)).abs().max() < 1e-5
    assert passes.forwards == 1
