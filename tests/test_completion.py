"""completion.py: prompts in, texts out; what is cut, what is shown, where it ends, and why nothing is padded."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import texts
from tiny import byte_level, redraw, sentence_piece, tiny_model, tokens

import nanodecoder as nd
from nanodecoder.config import GenerationConfig

FOX = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory) -> nd.Tokenizer:
    """BOS in front, which is <|end|> too, 0."""
    return nd.Tokenizer.load(byte_level(tmp_path_factory.mktemp("bytewise"), bos=True))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> nd.Tokenizer:
    return nd.Tokenizer.load(sentence_piece(tmp_path_factory.mktemp("pieces")))


@pytest.fixture(scope="module")
def model() -> nd.Decoder:
    return tiny_model(vocab_size=400)


def says(ids: list[int]):
    """A sampler that says these ids, one after the other."""
    return lambda logits, rows: torch.tensor([ids[step - 1] for step in rows.steps])


def spoken(model, tokenizer, ids, prompt=(66,), **options) -> nd.Completion:
    """What becomes of a prompt that is continued by these ids."""
    return nd.complete(model, tokenizer, [prompt], len(ids), sampler=says(ids), seeds=[0], ignore_eos=True, **options)[0]


def ids_of(completions: list[nd.Completion]) -> list[list[int]]:
    return [completion.ids for completion in completions]


# ---- a worker's four prompts, and the padding that it does not do


WORKER = ["z", "xyz", "wxyz", "zyxwxy"]


def test_four_prompts_make_fifty_new_tokens_each_and_the_longest_row_fifty_seven_ids(model, bytewise):
    done = nd.complete(model, bytewise, WORKER, max_new_tokens=50, max_prompt_tokens=512, ignore_eos=True)
    assert [len(one.prompt_ids) for one in done] == [2, 4, 5, 7]
    assert [len(one.prompt_ids + one.ids) for one in done] == [52, 54, 55, 57]
    for one, prompt in zip(done, WORKER, strict=True):
        assert bytewise.decode(one.prompt_ids + one.ids) == prompt + one.text


@pytest.fixture(scope="module", params=["opt", "llama"])
def worker(request, tmp_path_factory):
    """transformers' model and tokenizer, and the folder that holds both."""
    transformers = pytest.importorskip("transformers", reason="the parity extra is not installed")
    from parity import CASES, SIZES

    folder = tmp_path_factory.mktemp(request.param)
    ids = {"vocab_size": 400, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(request.param, **(SIZES | CASES[request.param][1] | ids))
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    redraw(theirs, 1)
    theirs.save_pretrained(folder)
    byte_level(folder, bos=True, tokenizer_class="PreTrainedTokenizerFast")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    return theirs, tokenizer, folder


@torch.no_grad()
def generated(theirs, tokenizer, prompts: list[str], side: str) -> list[list[int]]:
    """The worker's three steps: tokenize with padding, generate 50 tokens, and what is new of each row."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, truncation=True, max_length=512, padding_side=side)
    how = {"max_new_tokens": 50, "do_sample": False, "eos_token_id": None, "pad_token_id": tokenizer.eos_token_id}
    out = theirs.generate(inputs.input_ids, attention_mask=inputs.attention_mask, **how)
    return out[:, inputs.input_ids.shape[1] :].tolist()


def test_padding_on_the_right_changes_short_rows_on_the_left_none_and_no_padding_none(worker):
    """The last column of a short row is a pad on the right: its query is not the prompt's last token."""
    theirs, tokenizer, folder = worker
    alone = [generated(theirs, tokenizer, [prompt], "right")[0] for prompt in WORKER]
    right, left = (generated(theirs, tokenizer, WORKER, side) for side in ("right", "left"))
    assert right[-1] == alone[-1]
    assert right[:-1] != alone[:-1]
    assert left == alone

    ours, own = nd.load_model(folder), nd.Tokenizer.load(folder)
    assert ids_of(nd.complete(ours, own, WORKER, ignore_eos=True)) == alone
    assert [nd.complete(ours, own, prompt, ignore_eos=True)[0].ids for prompt in WORKER] == alone


# ---- a prompt that is too long


@pytest.mark.parametrize("kind", ["bytewise", "pieces"])
def test_the_right_cut_loses_the_end_and_the_left_keeps_bos_and_the_newest(kind, model, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(FOX)
    assert ids[0] == tokenizer.bos_id
    for side, wanted in (("right", ids[:6]), ("left", [ids[0], *ids[-5:]])):
        with pytest.warns(UserWarning, match="max_prompt_tokens is 6"):
            done = nd.complete(model, tokenizer, [FOX, "a"], 5, 6, truncation_side=side)
        assert done[0].prompt_ids == wanted
        assert done[1].prompt_ids == tokenizer.encode("a")
        assert done[0].ids == nd.complete(model, tokenizer, [wanted], 5)[0].ids


@pytest.mark.parametrize("stated", ["right", "left"])
@pytest.mark.parametrize("style", [byte_level, sentence_piece])
@pytest.mark.filterwarnings("ignore:the prompt has")
def test_what_is_left_is_what_transformers_leaves(style, stated, model, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the parity extra is not installed")
    bos = {"bos": True} if style is byte_level else {}
    style(tmp_path, tokenizer_class="PreTrainedTokenizerFast", truncation_side=stated, **bos)
    ours, theirs = nd.Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.truncation_side == ours.truncation_side == stated
    for asked in (None, "left", "right"):
        theirs.truncation_side = asked or stated
        for limit in range(2, len(ours.encode(FOX)) + 2):
            wanted = theirs(FOX, truncation=True, max_length=limit).input_ids
            assert nd.complete(model, ours, [FOX], 0, limit, truncation_side=asked)[0].prompt_ids == wanted


@pytest.mark.filterwarnings("ignore:the prompt has")
def test_the_checkpoint_says_which_side_is_cut_and_the_caller_overrules_it(model, tmp_path):
    tokenizer = nd.Tokenizer.load(sentence_piece(tmp_path, truncation_side="left"))
    ids = tokenizer.encode(FOX)
    assert nd.complete(model, tokenizer, [FOX], 0, 4)[0].prompt_ids == [1, *ids[-3:]]
    assert nd.complete(model, tokenizer, [FOX], 0, 4, truncation_side="right")[0].prompt_ids == ids[:4]


@pytest.mark.filterwarnings("ignore:the prompt has")
def test_ids_are_cut_as_texts_are_and_bos_kept_where_it_is_there():
    model = tiny_model()
    model.generation = GenerationConfig(bos_id=7)
    for prompt, wanted in (([7, 5, 6, 8, 9], [7, 8, 9]), ([5, 7, 6, 8, 9], [6, 8, 9])):
        assert nd.complete(model, None, [prompt], 0, 3, truncation_side="left")[0].prompt_ids == wanted
        assert nd.complete(model, None, [prompt], 0, 3)[0].prompt_ids == prompt[:3]


@pytest.mark.parametrize(
    ("side", "words"),
    [
        ("right", r"tokens at its end were cut, from 'fox jumps .*' on; truncation_side=left would cut the other end"),
        ("left", r"tokens at its beginning were cut, from 'the quick .*' on; truncation_side=right would cut the other end"),
    ],
)
def test_the_warning_quotes_the_first_words_that_were_lost_and_points_at_the_caller(side, words, model, pieces):
    limit = len(pieces.encode("the quick brown"))
    with pytest.warns(UserWarning, match=f"^the prompt has .* and max_prompt_tokens is {limit}: .*{words}") as caught:
        nd.complete(model, pieces, [FOX], 0, limit, truncation_side=side)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match=r"has 5 tokens .* is 3: 2 tokens at its end were cut, from \[8, 9\] on"):
        nd.complete(model, None, [[5, 6, 7, 8, 9]], 0, 3)


def test_nothing_is_cut_and_nothing_said_where_it_fits(model, pieces):
    ids = pieces.encode(FOX)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for limit in (len(ids), 512, None):
            assert nd.complete(model, pieces, [FOX], 0, limit)[0].prompt_ids == ids


@pytest.mark.parametrize(
    ("limit", "options", "words"),
    [
        (1, {}, "max_prompt_tokens must be at least 2, which leaves one token of the prompt, not 1"),
        (-1, {}, "max_prompt_tokens must be at least 2"),
        (5, {"truncation_side": "middle"}, "truncation_side must be left or right, not 'middle'"),
        (None, {"truncation_side": "both"}, "truncation_side must be left or right, not 'both'"),
        (None, {"num_samples": 0}, "num_samples must be 1 or above, not 0"),
        (None, {"top_logprobs": 401}, "top_logprobs must be from 0 to the 400 ids there are, not 401"),
    ],
)
def test_what_cannot_be_is_refused(limit, options, words, model, pieces):
    with pytest.raises(ValueError, match=words):
        nd.complete(model, pieces, [FOX], 5, limit, **options)


# ---- the prompt in front


def test_the_full_text_is_the_prompt_and_what_is_new(model, pieces):
    for prompt in (FOX, "  two  spaces ", "ß", "a▁b"):  # the last of which decodes to "a b"
        new, full = (nd.complete(model, pieces, prompt, 8, return_full_text=whole)[0] for whole in (False, True))
        assert full.text == prompt + new.text
        assert full.ids == new.ids
    ids = pieces.encode("the fox")
    full = nd.complete(model, pieces, [ids], 8, return_full_text=True, num_samples=2)
    assert [one.text for one in full] == [pieces.decode(ids + full[0].ids)] * 2
    assert full[0].text.startswith("the fox")
    assert nd.complete(model, None, [ids], 8, return_full_text=True)[0].text == ""


def test_the_full_text_of_a_prompt_that_was_cut_is_what_was_left_of_it_and_what_is_new(model, pieces):
    for side in ("left", "right"):
        with pytest.warns(UserWarning, match="were cut"):
            full = nd.complete(model, pieces, [FOX], 8, 12, truncation_side=side, return_full_text=True)[0]
        assert full.text == pieces.decode(full.prompt_ids + full.ids)
        assert full.text.startswith("the quick") == (side == "right")


def test_a_character_that_a_cut_has_halved_is_completed_by_what_is_new(model, bytewise):
    ids = bytewise.encode("a🙂힣힣b")
    for limit in range(2, len(ids)):
        with pytest.warns(UserWarning, match="were cut"):
            done = nd.complete(
                model, bytewise, ["a🙂힣힣b"], len(ids) - limit, limit, sampler=says(ids[limit:]), return_full_text=True
            )[0]
        assert done.text == "a🙂힣힣b"


def test_a_stop_text_in_the_prompt_or_across_its_end_stops_nothing(model, bytewise):
    done = spoken(model, bytewise, bytewise.encode("zy dog")[1:], bytewise.encode("the la"), stop=["the", "lazy"])
    assert (done.text, done.finish_reason) == ("zy dog", "length")


# ---- several samples of a prompt


def test_five_samples_are_five_single_calls_with_the_seeds_that_follow(model):
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (7, 3)]
    together = nd.complete(model, None, prompts, 10, num_samples=5, seeds=[40, 90], temperature=1.0)
    assert [one.seed for one in together] == [*range(40, 45), *range(90, 95)]
    assert [one.prompt_ids for one in together] == [prompts[0]] * 5 + [prompts[1]] * 5
    singles = [nd.complete(model, None, [one.prompt_ids], 10, seeds=[one.seed], temperature=1.0)[0] for one in together]
    assert together == singles
    assert len({tuple(one.ids) for one in together}) == 10


def test_five_samples_take_one_prefill(model):
    """A prompt of 7, then 9 more passes with a token per sample: the last one need not be fed."""
    fed = []
    hook = model.embed.register_forward_hook(lambda _, inputs, x: fed.append(tuple(inputs[0].shape)))
    nd.complete(model, None, [tokens(1, 7)[0].tolist()], 10, num_samples=5, temperature=1.0)
    hook.remove()
    assert fed == [(1, 7)] + [(5, 1)] * 9


def test_drawn_seeds_are_all_different(model):
    done = nd.complete(model, None, [[5], [5], [6]], 1, num_samples=3)
    assert len({one.seed for one in done}) == 9


# ---- how likely


def test_log_probabilities_and_the_likeliest_alternatives_best_first(model):
    prompt = tokens(1, 6)[0].tolist()
    done = nd.complete(model, None, [prompt, [5]], 6, logprobs=True, top_logprobs=3, temperature=1.0, seeds=[1, 2])[0]
    with torch.no_grad():
        raw = model(torch.tensor([prompt + done.ids]))[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert done.logprobs == pytest.approx([raw[step, index].item() for step, index in enumerate(done.ids)], abs=1e-5)
    best = raw.topk(3)
    assert [[index for index, _ in pairs] for pairs in done.top_logprobs] == best.indices.tolist()
    for pairs, wanted in zip(done.top_logprobs, best.values.tolist(), strict=True):
        assert [value for _, value in pairs] == pytest.approx(wanted, abs=1e-5)


def test_they_are_there_when_asked_for_and_one_per_id():
    model = tiny_model()
    model.generation = GenerationConfig(eos_ids=(2,))
    how = {"sampler": says([50, 51, 2, 52]), "max_new_tokens": 4}
    for asked, there in (({}, None), ({"logprobs": True}, 2), ({"top_logprobs": 1}, 2)):
        done = nd.complete(model, None, [[5, 6]], **how, **asked)[0]
        assert (done.ids, done.finish_reason, done.forwards) == ([50, 51], "eos", 3)
        assert done.logprobs is None if there is None else len(done.logprobs) == there
        assert done.top_logprobs is None if "top_logprobs" not in asked else len(done.top_logprobs) == there


# ---- texts that stop


def streamed(model, tokenizer, prompt, ids, stop) -> tuple[list[str], str]:
    """What each step shows, and why the last one was the last."""
    how = {"sampler": says(ids), "max_new_tokens": len(ids), "stop": stop, "ignore_eos": True}
    steps = list(nd.generate(model, [prompt], tokenizer=tokenizer, seeds=[0], **how))
    return [step.texts[0] for step in steps], steps[-1].reasons[0]


@pytest.mark.parametrize(
    ("stop", "text", "pieces_shown"),
    [
        (["zy d"], " the la", [" the", " la", "", ""]),
        (["dog", "lazy"], " the ", [" the", " ", ""]),
        (["lazy", "z"], " the la", [" the", " la"]),  # "z" is there first, although "lazy" begins before it
        (["y", "zy"], " the la", [" the", " la", ""]),  # both at once: the one that begins first
        (["lazy cat"], " the lazy dog", [" the", " ", "", "lazy do", "g"]),  # held back for nothing
        (["dogs"], " the lazy dog", [" the", " laz", "y", " ", "dog"]),  # and shown at the end
        ([" the"], "", [""]),
    ],
)
def test_what_may_become_a_stop_text_is_held_back(stop, text, pieces_shown, model, bytewise):
    ids = [bytewise.encode(piece)[1] for piece in (" the", " laz", "y", " do", "g")]
    assert bytewise.decode(ids) == " the lazy dog"
    shown, reason = streamed(model, bytewise, [66], ids, stop)
    assert "".join(shown) == text
    assert shown == pieces_shown
    done = spoken(model, bytewise, ids, stop=stop)
    assert (done.text, done.finish_reason) == (text, reason)
    assert done.ids == ids[: len(shown)]  # what the model has seen, the id that completed the stop text included


@settings(max_examples=25)
@given(data=st.data())
def test_what_is_streamed_is_the_text_up_to_the_first_stop_text_and_never_more(data, model, bytewise):
    ids = data.draw(texts.map(bytewise.encode) | st.lists(st.integers(0, bytewise.vocab_size - 1)), "ids")[:16] or [66]
    prompt = data.draw(st.sampled_from([[66], bytewise.encode("🙂")[:-1]]), "prompt")  # which ends within a character
    plain = bytewise.stream(after=prompt)
    each = [*map(plain.push, ids), plain.finish()]
    whole = "".join(each)
    parts = [whole[a:b] for a in range(len(whole)) for b in range(a + 1, min(a + 6, len(whole) + 1))] or ["a"]
    stop = data.draw(
        st.lists(st.sampled_from(parts) | st.text("abt� ", min_size=1, max_size=3), min_size=1, max_size=3), "stop"
    )

    texts_so_far = ["".join(each[:n]) for n in range(1, len(each) + 1)]
    found = next((n for n, text in enumerate(texts_so_far, 1) if any(one in text for one in stop)), None)
    wanted = whole if found is None else min((texts_so_far[found - 1].split(one)[0] for one in stop), key=len)
    steps = min(found or len(ids), len(ids))  # the last of `each` is half a character, shown with the last id

    shown, reason = streamed(model, bytewise, prompt, ids, stop)
    assert "".join(shown) == wanted
    assert len(shown) == steps
    assert (reason == "stop") == (found is not None)
    for n in range(len(shown) + 1):
        assert wanted.startswith("".join(shown[:n]))
        assert not any(one in "".join(shown[:n]) for one in stop)
    done = spoken(model, bytewise, ids, prompt, stop=stop)
    assert (done.text, done.ids) == (wanted, ids[:steps])


def test_rows_of_a_batch_stop_each_at_its_own(model, bytewise):
    lines = [bytewise.encode("one. two")[1:], bytewise.encode("no end of it")[1:]]

    def sampler(logits, rows):
        return torch.tensor([lines[seed][step - 1] for seed, step in zip(rows.seeds, rows.steps, strict=True)])

    done = nd.complete(model, bytewise, ["a", "b"], 5, sampler=sampler, seeds=[0, 1], stop=".", ignore_eos=True)
    assert [one.finish_reason for one in done] == ["stop", "length"]
    assert done[0].text == "one"
    assert "." not in done[1].text
    assert done[1].ids == lines[1][:5]


def test_a_stop_that_is_a_marks_text_ends_at_that_id_and_not_where_it_is_spelled(model, bytewise):
    mark = bytewise.special_id("<|im_start|>")
    spelled = bytewise.encode("<|im_start|>")[1:]
    assert mark not in spelled
    tail = bytewise.encode(" dog")[1:]
    done = spoken(model, bytewise, [*spelled, *tail, mark, *tail], stop=["<|im_start|>", "nowhere"])
    assert (done.text, done.finish_reason) == ("<|im_start|> dog", "stop")
    assert done.ids == [*spelled, *tail]


def test_an_id_that_ends_a_row_is_no_part_of_its_text_even_if_it_has_one(model, bytewise):
    ids = bytewise.encode("the dog.")[1:]
    for ends in ({"stop_ids": ids[-1:]}, {"eos_ids": ids[-1:]}):
        done = nd.complete(model, bytewise, [[66]], len(ids), sampler=says(ids), return_full_text=True, **ends)[0]
        assert (done.text, done.ids) == ("athe dog", ids[:-1])


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_an_empty_stop_text_is_refused(stop, model, bytewise):
    with pytest.raises(ValueError, match="stop must be a text or a list of texts, none of them empty"):
        nd.complete(model, bytewise, ["a"], stop=stop)


@pytest.mark.parametrize("stop", ["a", ["a"]])
def test_a_stop_text_needs_a_tokenizer(stop, model):
    with pytest.raises(ValueError, match="stop texts need a tokenizer to read the new ids; give one, or stop_ids"):
        nd.complete(model, None, [[5]], stop=stop)
