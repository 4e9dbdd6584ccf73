"""pipeline.py: called as transformers' is, and answering in its shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny import byte_level, tiny_model

import nanodecoder as nd
from nanodecoder.cli import UsageError

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the lazy dog"}]
BEGUN = [*HELLO, {"role": "assistant", "content": "Once upon a"}]
GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory) -> Path:
    """A checkpoint of ours that chats and ends no text by itself soon, with a context longer than 256 tokens."""
    folder = tmp_path_factory.mktemp("pipeline")
    tokenizer = nd.Tokenizer.load(byte_level(folder / "tokenizer", chat_template=CHAT))
    nd.save_model(folder / "model", tiny_model(vocab_size=400, max_seq_len=512), tokenizer)
    return folder / "model"


@pytest.fixture(scope="module")
def ours(ckpt):
    return nd.pipeline("text-generation", model=ckpt, device="cpu")


def told(folder: Path, ckpt: Path, generation: dict) -> Path:
    """The checkpoint with a generation_config.json that says this."""
    for file in ckpt.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def completed(pipe, text: str, **how) -> str:
    """The text and what `complete` makes of it."""
    return text + nd.complete(pipe.model, pipe.tokenizer, [text], **how)[0].text


# ---- as transformers


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The same checkpoint, of transformers' making, in their pipeline and in ours."""
    transformers = pytest.importorskip("transformers", reason="the parity extra is not installed")
    from parity import SIZES
    from tiny import redraw

    folder = tmp_path_factory.mktemp("both")
    ids = {"vocab_size": 400, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **(SIZES | ids)))
    redraw(model, 1)
    model.save_pretrained(folder)
    byte_level(folder, tokenizer_class="PreTrainedTokenizerFast", chat_template=CHAT)
    return transformers.pipeline("text-generation", model=str(folder)), nd.pipeline("text-generation", model=folder)


@pytest.mark.parametrize("full", [{}, {"return_full_text": True}, {"return_full_text": False}])
@pytest.mark.parametrize(
    "inputs",
    ["The quick", "", ["The quick", "나는 오늘", "a"], ["The quick"], HELLO, BEGUN, [HELLO, BEGUN], [HELLO]],
    ids=["text", "empty text", "texts", "one text in a list", "chat", "chat begun", "chats", "one chat in a list"],
)
def test_the_same_answers_in_the_same_shapes_as_transformers(both, inputs, full):
    theirs, ours = both
    assert ours(inputs, **GREEDY, **full) == theirs(inputs, **GREEDY, **full)


@pytest.mark.parametrize("inputs", ["The quick", ["The quick", "a"], HELLO])
def test_several_answers_each_in_the_same_shapes_as_transformers(both, inputs):
    """Sampling from the likeliest one alone is greedy, which transformers makes once only."""
    theirs, ours = both
    how = {"do_sample": True, "top_k": 1, "num_return_sequences": 3, "max_new_tokens": 8}
    assert ours(inputs, **how) == theirs(inputs, **how)


def test_transformers_default_settings_are_ours(both):
    theirs, _ = both
    defaults = theirs._default_generation_config
    assert (defaults.do_sample, defaults.temperature, defaults.max_new_tokens) == (True, 0.7, 256)


# ---- shapes


def test_a_text_gives_a_list_of_answers_and_texts_a_list_of_such_lists(ours):
    whole = completed(ours, "the fox", max_new_tokens=12)
    assert ours("the fox", **GREEDY) == [{"generated_text": whole}]
    assert ours(["the fox"], **GREEDY) == ours(("the fox",), **GREEDY) == [[{"generated_text": whole}]]
    new = ours("the fox", return_full_text=False, **GREEDY)
    assert new == [{"generated_text": whole.removeprefix("the fox")}]


def test_a_chat_gives_its_messages_and_the_answer(ours):
    prompt = ours.tokenizer.chat(HELLO)
    answer = nd.complete(ours.model, ours.tokenizer, [prompt], max_new_tokens=12)[0].text
    assert ours(HELLO, **GREEDY) == [{"generated_text": [*HELLO, {"role": "assistant", "content": answer}]}]
    assert ours([HELLO], return_full_text=False, **GREEDY) == [[{"generated_text": answer}]]


def test_an_answer_that_was_begun_is_continued(ours):
    prompt = ours.tokenizer.chat(BEGUN, add_generation_prompt=False, continue_final_message=True)
    assert ours.tokenizer.decode(prompt).endswith("Once upon a")
    rest = nd.complete(ours.model, ours.tokenizer, [prompt], max_new_tokens=12)[0].text
    assert ours(BEGUN, **GREEDY) == [{"generated_text": [*HELLO, {"role": "assistant", "content": "Once upon a" + rest}]}]
    assert BEGUN[-1]["content"] == "Once upon a"


def test_nothing_in_is_nothing_out(ours):
    assert ours([]) == []


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (5, "give a text, a chat"),
        (HELLO[0], "give a text, a chat"),
        (["a", HELLO[0]], "give a text, a chat"),
        (["a", 5], "give a text, a chat"),
        ([[]], "give a text, a chat"),
        ([{"content": "Hi"}], "message 1 must have a role"),
    ],
)
def test_what_is_neither_text_nor_chat_is_refused(ours, inputs, words):
    with pytest.raises(ValueError, match=words):
        ours(inputs, **GREEDY)


# ---- how it samples


def test_unset_it_draws_256_tokens_at_temperature_07_from_the_50_likeliest(ours):
    as_said = {"max_new_tokens": 256, "temperature": 0.7, "top_k": 50, "seeds": [2]}
    done = nd.complete(ours.model, ours.tokenizer, ["the fox"], **as_said)[0]
    assert (len(done.ids), done.finish_reason) == (256, "length")
    assert ours("the fox", seed=2) == [{"generated_text": "the fox" + done.text}]


@pytest.mark.parametrize(
    ("asked", "does"),
    [
        ({"do_sample": True}, {"temperature": 0.7, "top_k": 50}),
        ({"temperature": 1.5}, {"temperature": 1.5, "top_k": 50}),
        ({"top_k": 0}, {"temperature": 0.7}),
        ({"top_p": 0.5}, {"temperature": 0.7, "top_k": 50, "top_p": 0.5}),
        ({"temperature": 0.0}, {}),
        ({"do_sample": False, "repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"max_new_tokens": 7, "do_sample": False}, {"max_new_tokens": 7}),
        ({"stop": ["e"]}, {"temperature": 0.7, "top_k": 50, "stop": ["e"]}),
        ({"temperature": None, "do_sample": None}, {"temperature": 0.7, "top_k": 50}),  # None is unset, as in transformers
    ],
)
def test_what_the_caller_says_of_sampling_overrules_one_by_one(ours, asked, does):
    wanted = completed(ours, "the fox", **{"max_new_tokens": 30, "seeds": [3], **does})
    assert ours("the fox", **{"max_new_tokens": 30, "seed": 3, **asked}) == [{"generated_text": wanted}]


def test_what_the_checkpoint_says_of_sampling_comes_before_the_pipelines_own(ckpt, tmp_path):
    pipe = nd.pipeline(model=told(tmp_path, ckpt, {"do_sample": True, "temperature": 1.2, "top_k": 20, "top_p": 0.8}))
    said = {"temperature": 1.2, "top_k": 20, "top_p": 0.8}
    for asked in ({}, {"temperature": 0.5}, {"top_k": 2}):
        wanted = completed(pipe, "the fox", max_new_tokens=30, seeds=[3], **(said | asked))
        assert pipe("the fox", seed=3, max_new_tokens=30, **asked) == [{"generated_text": wanted}]
    assert pipe("the fox", **GREEDY) == [{"generated_text": completed(pipe, "the fox", max_new_tokens=12, temperature=0.0)}]


def test_what_penalizes_is_the_checkpoints_even_where_the_pipeline_says_how_to_draw(ckpt, tmp_path):
    pipe = nd.pipeline(model=told(tmp_path, ckpt, {"repetition_penalty": 1.8}))
    how = {"temperature": 0.7, "top_k": 50, "repetition_penalty": 1.8}
    wanted = completed(pipe, "the fox", max_new_tokens=30, seeds=[3], **how)
    assert pipe("the fox", seed=3, max_new_tokens=30) == [{"generated_text": wanted}]


# ---- chance


def test_a_seed_makes_the_same_texts_again_in_any_batch_whatever_torchs_seed(ours):
    how = {"seed": 11, "num_return_sequences": 2, "max_new_tokens": 15}
    texts = ["the fox", "a", "Once upon"]
    together = ours(texts, **how)
    torch.manual_seed(12345)
    assert ours(texts, **how) == together
    assert [ours(text, **how) for text in texts] == together
    assert ours(texts[::-1], **how) == together[::-1]
    for row in together:
        assert row[0] != row[1]
    assert ours(texts, **{**how, "seed": 12}) != together
    second = ours("the fox", seed=12, max_new_tokens=15)
    assert second == together[0][1:]  # sample i has seed + i


def test_unset_the_seed_is_another_each_time_although_torchs_is_not(ours):
    def drawn():
        torch.manual_seed(0)
        return ours("the fox", max_new_tokens=15)

    assert drawn() != drawn()


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_the_batch_size_changes_no_text(ours, size):
    how = {"seed": 5, "num_return_sequences": 2, "max_new_tokens": 10}
    texts = ["the fox", "a", "Once upon a time", "나는", "dog"]
    widths = []
    hook = ours.model.lm_head.register_forward_hook(lambda _, inputs, logits: widths.append(len(logits)))
    found = ours(texts, batch_size=size, **how)
    hook.remove()
    assert max(widths) == min(size, 5) * 2
    assert found == ours(texts, **how)


# ---- the model, and where it lives


def test_a_folder_or_a_decoder_with_its_tokenizer(ckpt, ours):
    wanted = ours("the fox", **GREEDY)
    model, tokenizer = nd.load_model(ckpt), nd.Tokenizer.load(ckpt)
    for pipe in (
        nd.pipeline(model=str(ckpt)),
        nd.pipeline("text-generation", ckpt),
        nd.pipeline(model=model, tokenizer=tokenizer),
        nd.pipeline(model=model, tokenizer=ckpt),
        nd.pipeline(model=ckpt, tokenizer=tokenizer),
    ):
        assert pipe("the fox", **GREEDY) == wanted
    assert nd.pipeline(model=model, tokenizer=tokenizer).model is model
    assert nd.pipeline(model=ckpt, tokenizer=tokenizer).tokenizer is tokenizer


@pytest.mark.parametrize(
    "where",
    [
        {"device": "cpu"},
        {"device": -1},
        {"device": torch.device("cpu")},
        {"device": "auto"},
        {"device_map": "auto"},
        {"device_map": "cpu"},
        {"device_map": {"": "cpu"}},
        {"device_map": {"model.embed_tokens": "cpu", "lm_head": "cpu"}},
    ],
)
def test_one_device_however_it_is_said(ckpt, where):
    pipe = nd.pipeline(model=ckpt, **where)
    if "auto" not in where.values():
        assert pipe.model.device.type == "cpu"
    assert pipe("the fox", **GREEDY)[0]["generated_text"].startswith("the fox")


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({"device_map": {"a": 0, "b": 1}}, "device_map spreads the model over 2 devices, and it lives on one: give device="),
        ({"device": "cpu", "device_map": "auto"}, "give either device or device_map, not both"),
        ({"device": "tpu"}, "tpu is not a device that torch knows"),
        ({"device": 99}, "cuda:99 is not there"),
    ],
)
def test_a_place_that_cannot_be_is_refused(ckpt, where, words):
    with pytest.raises((ValueError, UsageError), match=words):
        nd.pipeline(model=ckpt, **where)


@pytest.mark.parametrize(
    ("asked", "found"),
    [({}, torch.float32), ({"dtype": "bfloat16"}, torch.bfloat16), ({"dtype": torch.bfloat16}, torch.bfloat16)],
)
def test_the_dtype_is_float32_unless_asked(ckpt, asked, found):
    pipe = nd.pipeline(model=ckpt, device="cpu", **asked)
    assert pipe.model.dtype == found
    assert pipe("the fox", **GREEDY)[0]["generated_text"].startswith("the fox")


def test_dtype_auto_is_the_checkpoints_own(ckpt, tmp_path):
    nd.save_model(tmp_path, nd.load_model(ckpt, dtype="bfloat16"), nd.Tokenizer.load(ckpt))
    assert nd.pipeline(model=tmp_path, device="cpu", dtype="auto").model.dtype == torch.bfloat16
    assert nd.pipeline(model=tmp_path, device="cpu").model.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "translation", "model": "x"}, "the task must be 'text-generation', not 'translation'"),
        ({}, "give model=, a checkpoint folder, a hub name or a loaded Decoder"),
        ({"model": tiny_model()}, "a loaded Decoder needs its tokenizer"),
        ({"model": tiny_model(), "tokenizer": "x", "device": "cpu"}, "device and dtype are chosen where a model is loaded"),
        ({"model": tiny_model(), "tokenizer": "x", "dtype": "auto"}, "device and dtype are chosen where a model is loaded"),
    ],
)
def test_what_makes_no_pipeline_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        nd.pipeline(**options)


# ---- options


def test_options_given_at_first_are_what_calls_begin_with(ckpt):
    pipe = nd.pipeline(model=ckpt, max_new_tokens=6, do_sample=False, return_full_text=False)
    short = completed(pipe, "the fox", max_new_tokens=6).removeprefix("the fox")
    assert pipe("the fox") == [{"generated_text": short}]
    longer = completed(pipe, "the fox", max_new_tokens=9)
    assert pipe("the fox", max_new_tokens=9, return_full_text=True) == [{"generated_text": longer}]
    assert pipe("the fox") == [{"generated_text": short}]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention_mask": [[1]]}, "attention_mask is not taken: a row sees what it has filled, and nothing is padded"),
        ({"pad_token_id": 0}, "pad_token_id is not taken: rows of different lengths share a batch without padding"),
        ({"max_length": 50}, "max_length is not taken: give max_new_tokens"),
        ({"stop_sequence": "."}, "stop_sequence is not taken: give stop=, whose text is not part of the answer"),
        ({"temprature": 1.0}, r"temprature is not an option here; did you mean temperature\?"),
        ({"num_return_sequence": 1}, r"did you mean num_return_sequences\?"),
        ({"qqq": 1}, "qqq is not an option here; .*max_new_tokens, min_p, "),
    ],
)
def test_options_that_are_not_taken_are_refused_by_name_at_once(ours, options, words):
    with pytest.raises(ValueError, match=words):
        ours("the fox", **options)
    with pytest.raises(ValueError, match=words):
        nd.pipeline(model="/no/such/folder", **options)  # before anything is loaded


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"do_sample": False, "temperature": 0.7}, "do_sample=False takes the likeliest token, and temperature would draw"),
        ({"batch_size": 0}, "batch_size must be 1 or above, not 0"),
        ({"batch_size": -1}, "batch_size must be 1 or above, not -1"),
        ({"top_p": 3.0}, "top_p must be from 0 to 1"),
        ({"max_new_tokens": -1}, "max_new_tokens must be 0 or above, not -1"),
    ],
)
def test_values_that_cannot_be_are_refused_in_words(ours, options, words):
    with pytest.raises(ValueError, match=words):
        ours("the fox", **options)
