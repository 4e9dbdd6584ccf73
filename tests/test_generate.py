"""generate.py: every row gets what it would get alone, and ends where and why it should."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_level, sentence_piece, tiny_model, tokens

import nanodecoder as nd
from nanodecoder.config import GenerationConfig, RopeConfig
from nanodecoder.generate import NO_TOKEN, default_sampler

PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in (5, 1, 12)]


def ends_at(model: nd.Decoder, *ids: int) -> nd.Decoder:
    model.generation = GenerationConfig(eos_ids=ids)
    return model


def ids_of(completions: list[nd.Completion]) -> list[list[int]]:
    return [completion.ids for completion in completions]


# ---- rows


@pytest.mark.parametrize("options", [{}, {"windows": 4}, {"qk_norm": "head", "windows": (None, 3), "qkv_bias": True}])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9, "seeds": [7, 8, 9]}])
def test_every_row_of_a_batch_is_that_prompt_alone(options, sampling):
    model = tiny_model(**options)
    together = nd.complete(model, None, PROMPTS, max_new_tokens=20, **sampling)
    for row, prompt in enumerate(PROMPTS):
        own = sampling | ({"seeds": sampling["seeds"][row : row + 1]} if sampling else {})
        assert nd.complete(model, None, [prompt], max_new_tokens=20, **own)[0].ids == together[row].ids
    backwards = {**sampling, "seeds": sampling["seeds"][::-1]} if sampling else {}
    assert ids_of(nd.complete(model, None, PROMPTS[::-1], max_new_tokens=20, **backwards)) == ids_of(together)[::-1]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seeds": [1, 2, 3]}])
def test_without_a_cache_the_tokens_are_the_same_and_the_work_is_not(sampling):
    model = tiny_model(windows=(None, 5))
    cached = nd.complete(model, None, PROMPTS, max_new_tokens=12, **sampling)
    assert ids_of(nd.complete(model, None, PROMPTS, max_new_tokens=12, use_cache=False, **sampling)) == ids_of(cached)


def test_fifty_new_tokens_are_fifty_passes_and_the_cache_saves_positions_not_passes():
    """A prompt of 7 and 50 new tokens: 56 positions with the cache, 1,575 without."""
    for use_cache, positions in ((True, 56), (False, 1575)):
        stepper = nd.Stepper(tiny_model(), use_cache=use_cache)
        stepper.add(range(7), max_new_tokens=50)
        while len(stepper):
            stepper.step()
        assert (stepper.forwards, stepper.positions) == (50, positions)


def test_no_state_is_left_between_calls():
    model = tiny_model()

    def ids(*prompts):
        return ids_of(nd.complete(model, None, list(prompts)))

    a, b, c = PROMPTS
    first = ids(a)
    assert ids(b) != first
    assert ids(a) == first
    ids(a, b, c)
    assert ids(a) == first


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9), st.integers(1, 8)), min_size=1, max_size=5))
def test_rows_that_join_and_leave_at_any_time_get_what_they_would_get_alone(requests):
    """(joins before which step, prompt length, new tokens)"""
    model = tiny_model(windows=(None, 4))
    stepper = nd.Stepper(model, sampler=nd.Sampler(1.0))
    got: dict[int, list[int]] = {}
    about: dict[int, tuple[list[int], int]] = {}
    waiting = sorted(requests)
    step_number = 0
    while waiting or len(stepper):
        while waiting and (waiting[0][0] <= step_number or not len(stepper)):
            _, length, new = waiting.pop(0)
            prompt = tokens(1, length, seed=length)[0].tolist()
            row = stepper.add(prompt, max_new_tokens=new, seed=length + new)
            about[row], got[row] = (prompt, new), []
        step = stepper.step()
        for row, index in zip(step.rows, step.ids.tolist(), strict=True):
            got[row].append(index)
        step_number += 1
    for row, (prompt, new) in about.items():
        alone = nd.complete(model, None, [prompt], max_new_tokens=new, temperature=1.0, seeds=[len(prompt) + new])
        assert got[row] == alone[0].ids


# ---- ends


def forced(eos: int, step_of_row: list[int | None]):
    """A sampler that says when each row ends."""

    def sample(logits, rows):
        ids = [eos if step == step_of_row[seed] else 50 for step, seed in zip(rows.steps, rows.seeds, strict=True)]
        return torch.tensor(ids)

    return sample


def test_rows_end_at_their_own_step_and_the_loop_with_the_last():
    model = ends_at(tiny_model(), 2)
    steps = list(nd.generate(model, PROMPTS, sampler=forced(2, [1, 4, None]), seeds=[0, 1, 2], max_new_tokens=6, logprobs=True))
    columns = torch.stack([step.ids for step in steps], 1).tolist()
    assert columns == [[2, *[NO_TOKEN] * 5], [50, 50, 50, 2, NO_TOKEN, NO_TOKEN], [50] * 6]
    assert [step.reasons for step in steps] == [
        ("eos", None, None),
        (None, None, None),
        (None, None, None),
        (None, "eos", None),
        (None, None, None),
        (None, None, "length"),
    ]
    assert [step.logprobs.isnan().tolist() for step in steps][4] == [True, True, False]
    done = nd.complete(model, None, PROMPTS, sampler=forced(2, [1, 4, None]), seeds=[0, 1, 2], max_new_tokens=6, logprobs=True)
    assert ids_of(done) == [[], [50] * 3, [50] * 6]  # without the end id
    assert [completion.finish_reason for completion in done] == ["eos", "eos", "length"]
    assert [completion.forwards for completion in done] == [1, 4, 6]
    assert [len(completion.logprobs) for completion in done] == [0, 3, 6]


def test_any_end_id_ends_and_ignore_eos_ends_nothing():
    model = tiny_model()
    free = nd.complete(model, None, PROMPTS[:1], max_new_tokens=10)[0].ids
    ends_at(model, 96, free[4])
    cut = nd.complete(model, None, PROMPTS[:1], max_new_tokens=10)[0]
    assert cut.ids == free[: free.index(free[4])]
    assert cut.finish_reason == "eos"
    assert nd.complete(model, None, PROMPTS[:1], max_new_tokens=10, ignore_eos=True)[0].ids == free
    asked = nd.complete(model, None, PROMPTS[:1], max_new_tokens=10, stop_ids=[free[0]], ignore_eos=True)[0]
    assert (asked.ids, asked.finish_reason) == ([], "stop")
    for kind in (torch.tensor, np.array):  # ids of any kind are ids
        asked = nd.complete(model, None, kind([PROMPTS[0]]), max_new_tokens=10, stop_ids=kind([free[0]]), eos_ids=())[0]
        assert (asked.ids, asked.finish_reason) == ([], "stop")


def test_only_a_generated_end_id_ends_a_row_not_one_in_the_prompt():
    free = nd.complete(tiny_model(), None, [[PROMPTS[0][0]] * 3], max_new_tokens=3)[0]
    model = ends_at(tiny_model(), PROMPTS[0][0])
    done = nd.complete(model, None, [[PROMPTS[0][0]] * 3], max_new_tokens=3)[0]
    assert PROMPTS[0][0] not in free.ids
    assert (done.ids, done.finish_reason) == (free.ids, "length")


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_context_allows_one_more_than_it_holds(use_cache):
    """L - P + 1 new tokens: the last one need not be fed."""
    model = tiny_model(max_seq_len=16)
    done = nd.complete(model, None, [[5] * 10, [5], [5] * 16], max_new_tokens=100, use_cache=use_cache)
    assert [len(completion.ids) for completion in done] == [7, 16, 1]
    assert [completion.finish_reason for completion in done] == ["context"] * 3
    exact = nd.complete(model, None, [[5] * 10], max_new_tokens=7)[0]
    assert exact.finish_reason == "length"
    with pytest.raises(ValueError, match="the prompt has 17 tokens, 5 new ones are asked for, and the context holds 16"):
        nd.complete(model, None, [[5] * 17], max_new_tokens=5)


def test_the_cache_is_sized_for_the_run_not_for_the_advertised_context():
    stepper = nd.Stepper(tiny_model(max_seq_len=1_000_000))
    stepper.add([3] * 5, max_new_tokens=4)
    stepper.step()
    assert stepper._passes.cache.max_seq_len == 8


def test_nothing_asked_for_is_nothing_done():
    done = nd.complete(tiny_model(), None, PROMPTS, max_new_tokens=0)
    assert [(c.ids, c.text, c.finish_reason, c.forwards) for c in done] == [([], "", "length", 0)] * 3
    assert list(nd.generate(tiny_model(), PROMPTS, max_new_tokens=0)) == []


# ---- chance


def test_a_prompt_and_its_first_tokens_continue_identically():
    model = tiny_model()
    whole = nd.complete(model, None, PROMPTS[:1], max_new_tokens=12, temperature=1.0, seeds=[3])[0].ids
    rest = nd.complete(model, None, [PROMPTS[0] + whole[:5]], max_new_tokens=7, temperature=1.0, seeds=[3])[0].ids
    assert rest == whole[5:]


def test_seeds_decide_and_nobody_elses_do():
    model = tiny_model()

    def text(seed):
        return nd.complete(model, None, PROMPTS[:1], max_new_tokens=15, temperature=1.0, seeds=[seed])[0].ids

    first = text(1)
    torch.manual_seed(12345)
    assert text(1) == first
    assert text(2) != first


def test_without_a_seed_one_is_drawn_and_told():
    model = tiny_model()
    done = nd.complete(model, None, [PROMPTS[0]] * 2, temperature=1.0)
    assert done[1].seed == done[0].seed + 1
    again = nd.complete(model, None, PROMPTS[:1], temperature=1.0, seeds=[done[0].seed])
    assert again[0].ids == done[0].ids
    assert nd.complete(model, None, PROMPTS[:1], temperature=1.0)[0].seed != done[0].seed


def test_the_checkpoint_says_how_to_sample_and_the_caller_overrules_it():
    model = tiny_model()
    assert default_sampler(model) == nd.Sampler()
    model.generation = GenerationConfig(temperature=0.6, top_p=0.9)
    assert default_sampler(model) == nd.Sampler(0.6, top_p=0.9)
    assert default_sampler(model, temperature=0.0) == nd.Sampler(0.0, top_p=0.9)
    greedy = nd.complete(model, None, PROMPTS, temperature=0.0, seeds=[1, 2, 3])
    assert ids_of(greedy) == ids_of(nd.complete(model, None, PROMPTS, temperature=0.0, seeds=[4, 5, 6]))


def test_logprobs_are_the_raw_models():
    model = tiny_model()
    done = nd.complete(model, None, PROMPTS[:1], max_new_tokens=4, temperature=0.5, top_k=3, seeds=[1], logprobs=True)[0]
    with torch.no_grad():
        raw = model(torch.tensor([PROMPTS[0] + done.ids])).log_softmax(-1)[0]
    at = range(len(PROMPTS[0]) - 1, len(PROMPTS[0]) + 3)
    wanted = [raw[place, index].item() for place, index in zip(at, done.ids, strict=True)]
    assert done.logprobs == pytest.approx(wanted, abs=1e-5)


# ---- text


def test_texts_in_and_texts_out(tmp_path):
    tokenizer = nd.Tokenizer.load(sentence_piece(tmp_path))
    model = tiny_model(vocab_size=300)
    done = nd.complete(model, tokenizer, ["the fox", "a"], max_new_tokens=8)
    for completion, prompt in zip(done, ["the fox", "a"], strict=True):
        assert completion.prompt_ids == tokenizer.encode(prompt)
        assert tokenizer.decode(completion.prompt_ids + completion.ids) == prompt + completion.text
    assert nd.complete(model, tokenizer, "the fox", max_new_tokens=8)[0].text == done[0].text


def test_the_tokenizers_end_token_ends_too(tmp_path):
    tokenizer = nd.Tokenizer.load(sentence_piece(tmp_path))
    model = tiny_model(vocab_size=300)
    done = nd.complete(model, tokenizer, ["the"], sampler=forced(2, [3]), seeds=[0])[0]
    assert (done.finish_reason, len(done.ids)) == ("eos", 2)
    free = nd.complete(model, tokenizer, ["the"], sampler=forced(2, [3]), seeds=[0], ignore_eos=True, max_new_tokens=5)[0]
    assert len(free.ids) == 5


def test_an_empty_prompt_starts_from_bos_or_a_newline(tmp_path):
    model = tiny_model(vocab_size=400)
    with_bos = nd.Tokenizer.load(byte_level(tmp_path / "bos"))
    assert nd.complete(model, with_bos, [""], max_new_tokens=1)[0].prompt_ids == [0]
    without = nd.Tokenizer.load(byte_level(tmp_path / "none", bos_token=None))
    with pytest.warns(UserWarning, match="no BOS: the empty prompt starts from a newline"):
        done = nd.complete(model, without, [""], max_new_tokens=1)[0]
    assert without.decode(done.prompt_ids) == "\n"


# ---- mode, and what is refused


def test_a_model_in_training_mode_generates_in_eval_mode_and_comes_back():
    model = tiny_model().train()
    stepper = nd.Stepper(model)
    stepper.add(PROMPTS[0])
    seen = []
    model.norm.register_forward_hook(lambda *_: seen.append((model.training, torch.is_inference_mode_enabled())))
    step = stepper.step()
    assert seen == [(False, True)]
    assert model.training
    assert not step.ids.is_inference()


@pytest.mark.parametrize("sampler", [None, lambda logits, rows: logits.argmax(-1)])
def test_logits_that_are_no_numbers_name_the_step(sampler):
    model = tiny_model()
    stepper = nd.Stepper(model, sampler=sampler)
    stepper.add(PROMPTS[0])
    stepper.step()
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    with pytest.raises(ValueError, match="non-finite logits at step 2 in row 0"):
        stepper.step()


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[]], {}, "a prompt needs at least one id"),
        ([[3, 97]], {}, "id 97 at place 1 of the prompt is outside the vocabulary of 97"),
        ([[-1]], {}, "id -1 at place 0"),
        ([3, 4], {}, r"ids must be a sequence of whole numbers, prompts a list of such \(\[\[1, 2, 3\]\]"),
        ([[3, 4.5]], {}, "ids must be a sequence of whole numbers"),
        (["34"], {}, "ids must be a sequence of whole numbers"),
        ([[3]], {"seeds": [1.5]}, "seeds must be whole numbers, one per prompt"),
        ([[3]], {"seeds": 7}, "seeds must be whole numbers, one per prompt"),
        ([[3]], {"max_new_tokens": -1}, "max_new_tokens must be 0 or above, not -1"),
        ([[3]], {"seeds": [1, 2]}, "2 seeds for 1 prompts"),
        ([[3]], {"top_p": 3.0}, "top_p must be from 0 to 1"),
        ([[3]], {"top_p": 0.5, "sampler": nd.Sampler()}, "give either sampler= or top_p, not both"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_first_step(prompts, options, words):
    with pytest.raises(ValueError, match=words):
        nd.generate(tiny_model(), prompts, **options)


def test_a_step_whose_sampler_failed_can_be_made_again():
    fails = [True]

    def sampler(logits, rows):
        if rows.steps[0] == 3 and fails.pop() if fails else False:
            raise RuntimeError("not now")
        return logits.argmax(-1)

    stepper, ids = nd.Stepper(tiny_model(), sampler=sampler), []
    stepper.add(PROMPTS[0], max_new_tokens=5)
    while len(stepper):
        try:
            ids.append(int(stepper.step().ids))
        except RuntimeError:
            assert len(ids) == 2
    assert ids == nd.complete(tiny_model(), None, PROMPTS[:1], max_new_tokens=5)[0].ids


def test_a_longrope_row_that_outgrows_its_original_length_is_computed_anew_alone():
    """Its neighbours are not, and every token is as if the row had been fed whole; the loop without a cache agrees."""
    rope = RopeConfig(
        kind="longrope", original_max_seq_len=10, short_factors=(1.0,) * 8, long_factors=tuple(1.0 + i for i in range(8))
    )
    model = tiny_model(rope=rope)
    options = {"max_new_tokens": 14, "temperature": 1.0, "seeds": [4, 5, 6]}
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (8, 3, 12)]  # crosses, crosses later, begins beyond
    together = nd.complete(model, None, prompts, **options)
    assert ids_of(together) == ids_of(nd.complete(model, None, prompts, use_cache=False, **options))
    plain = nd.complete(tiny_model(), None, prompts, **options)
    assert ids_of(plain) != ids_of(together)
    stepper = nd.Stepper(model)
    stepper.add(prompts[0], max_new_tokens=5)
    while len(stepper):
        stepper.step()
    assert (stepper.forwards, stepper.positions) == (5, 8 + 1 + 1 + 11 + 1)


def test_an_unknown_setting_is_refused_by_name():
    with pytest.raises(TypeError, match="temprature"):
        nd.generate(tiny_model(), [[3]], temprature=1.0)


def test_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="a text prompt needs a tokenizer"):
        nd.complete(tiny_model(), None, ["hi"])
    with pytest.raises(ValueError, match="there are no rows to step"):
        nd.Stepper(tiny_model()).step()


# ---- the caller's own loop


def test_a_stepper_run_to_its_end_gives_what_complete_gives_row_for_row(tmp_path):
    """Each row with its own sampler, seed, stops and limit; text too."""
    tokenizer, model = nd.Tokenizer.load(sentence_piece(tmp_path)), tiny_model(vocab_size=300)
    about = [
        {"max_new_tokens": 9},
        {"max_new_tokens": 14, "seed": 4, "sampler": nd.Sampler(1.0, top_k=5)},
        {"max_new_tokens": 20, "seed": 5, "sampler": nd.Sampler(1.2), "stop": ["e", "th"]},
        {"max_new_tokens": 3, "seed": 6, "sampler": nd.Sampler(0.7), "stop_ids": [7]},
    ]
    texts = ["the", "a fox", "", "the quick"]
    stepper = nd.Stepper(model, tokenizer=tokenizer)
    numbers = [stepper.add(text, **one) for text, one in zip(texts, about, strict=True)]
    ids, shown, why = (dict.fromkeys(numbers, value) for value in ((), "", None))
    while len(stepper):
        step = stepper.step()
        for number, index, text, reason, mark in zip(
            step.rows, step.ids.tolist(), step.texts, step.reasons, step.marks, strict=True
        ):
            ids[number] += () if mark else (index,)
            shown[number] += text
            why[number] = reason
    for number, text, one in zip(numbers, texts, about, strict=True):
        own = {name: value for name, value in one.items() if name not in ("seed", "sampler")}
        seeds = [one["seed"]] if "seed" in one else None
        done = nd.complete(model, tokenizer, [text], seeds=seeds, sampler=one.get("sampler"), **own)[0]
        assert (list(ids[number]), shown[number], why[number]) == (done.ids, done.text, done.finish_reason)


def test_a_row_may_be_let_go_before_its_end():
    model = tiny_model()
    stepper = nd.Stepper(model)
    first, second = (stepper.add(prompt, max_new_tokens=6) for prompt in PROMPTS[:2])
    stepper.step()
    stepper.remove(first)
    with pytest.raises(ValueError, match="row 0 is not on its way"):
        stepper.remove(first)
    ids = []
    while len(stepper):
        step = stepper.step()
        assert step.rows == (second,)
        ids += step.ids.tolist()
    assert ids == nd.complete(model, None, PROMPTS[1:2], max_new_tokens=6)[0].ids[1:]


def test_functions_of_logits_come_before_the_sampler_and_leave_log_probabilities_alone():
    model = tiny_model()
    free = nd.complete(model, None, PROMPTS[:1], max_new_tokens=1, logprobs=True)[0]

    def ban(logits):
        return logits.index_fill(-1, torch.tensor(free.ids), float("-inf"))

    other = nd.complete(model, None, PROMPTS[:1], max_new_tokens=1, filters=[ban], top_logprobs=2)[0]
    assert other.ids != free.ids
    assert other.top_logprobs[0][0] == (free.ids[0], pytest.approx(free.logprobs[0]))
    assert other.top_logprobs[0][1] == (other.ids[0], pytest.approx(other.logprobs[0]))


def test_a_sampler_for_each_prompt():
    model = tiny_model()
    own = [nd.Sampler(), nd.Sampler(1.0), nd.Sampler(1.0, top_k=2)]
    together = nd.complete(model, None, PROMPTS, max_new_tokens=8, sampler=own, seeds=[1, 2, 3])
    for row in range(3):
        alone = nd.complete(model, None, PROMPTS[row : row + 1], max_new_tokens=8, sampler=own[row], seeds=[row + 1])
        assert alone[0].ids == together[row].ids
    with pytest.raises(ValueError, match="2 samplers for 3 prompts"):
        nd.generate(model, PROMPTS, sampler=own[:2])


def test_a_rows_own_sampler_is_not_ignored_beside_a_function_that_chooses_for_all():
    stepper = nd.Stepper(tiny_model(), sampler=lambda logits, rows: logits.argmax(-1))
    with pytest.raises(ValueError, match="a row's own sampler would be ignored"):
        stepper.add([5], sampler=nd.Sampler(1.0))


def test_columns_have_a_place_for_every_row_in_every_field(tmp_path):
    tokenizer, model = nd.Tokenizer.load(sentence_piece(tmp_path)), tiny_model(vocab_size=300)
    options = {"sampler": forced(2, [1, 3, None]), "seeds": [0, 1, 2], "max_new_tokens": 4, "eos_ids": [2], "top_logprobs": 3}
    steps = list(nd.generate(model, PROMPTS, tokenizer=tokenizer, **options))
    assert [step.marks for step in steps] == [(True, False, False), (False,) * 3, (False, True, False), (False,) * 3]
    assert [step.texts[0] for step in steps] == [""] * 4
    assert all(step.rows == (0, 1, 2) for step in steps)
    ids, values = steps[3].alternatives
    assert ids.shape == values.shape == (3, 3)
    assert ids[:2].eq(NO_TOKEN).all()
    assert values[:2].isnan().all()
    assert values[2].isfinite().all()
    assert steps[0].logprobs.isfinite().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_logprobs": 98}, "top_logprobs must be from 0 to the 97 ids there are, not 98"),
        ({"stop": ["x"]}, "stop texts need a tokenizer to read the new ids"),
        ({"stop": ""}, "stop must be a text or a list of texts, none of them empty"),
        ({"stop": [5]}, "stop must be a text or a list of texts"),
        ({"exact": True, "use_cache": False}, "exact fixes the shapes"),
        ({"ignore_eos": True, "eos_ids": [3]}, "give either eos_ids= or ignore_eos=True"),
    ],
)
def test_what_a_stepper_cannot_do_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        nd.generate(tiny_model(), PROMPTS, **options)
