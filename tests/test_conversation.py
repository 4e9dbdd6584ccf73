"""conversation.py: turns share one cache, what was said is remembered, and an answer may be left early."""

from __future__ import annotations

import pytest
import torch
from tiny import byte_level, tiny_model

import nanodecoder as nd
from nanodecoder.conversation import Conversation

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = byte_level(tmp_path_factory.mktemp("chat"), chat_template=TEMPLATE)
    return tiny_model(vocab_size=380, max_seq_len=256), nd.Tokenizer.load(folder)


def talk(parts, **options) -> Conversation:
    return Conversation(*parts, **{"max_new_tokens": 6, "eos_ids": (), **options})


def test_every_answer_is_what_the_whole_conversation_alone_would_give(parts):
    model, tokenizer = parts
    for options in ({}, {"exact": True}, {"use_cache": False}):
        chat = talk(parts, system="Be brief.", sampler=nd.Sampler(1.0), seed=7, **options)
        for text in ("the fox", "a dog?", "나는"):
            before = list(chat.messages)
            answer = "".join(chat.ask(text))
            asked = [*before, {"role": "user", "content": text}]
            alone = nd.complete(model, None, [tokenizer.chat(asked)], 6, temperature=1.0, seeds=[7], eos_ids=())[0]
            stream = tokenizer.stream(after=alone.prompt_ids)
            assert answer == "".join([*map(stream.push, alone.ids), stream.finish()])
            assert chat.messages == [*asked, {"role": "assistant", "content": answer}]
            assert chat.reason == "length"
        assert chat.messages[0] == {"role": "system", "content": "Be brief."}


def test_a_turn_feeds_only_what_the_turns_before_have_not_left_in_the_cache(parts):
    """Letters that no merge joins, so that what was said is encoded as it was chosen."""
    _, tokenizer = parts
    letters = tokenizer.encode("XZJXZJ")
    assert len(letters) == 6

    def sampler(logits, rows):
        return torch.tensor([letters[step - 1] for step in rows.steps])

    chat = talk(parts, sampler=sampler)
    "".join(chat.ask("the fox"))
    first = chat.stepper.positions
    prompt = tokenizer.chat(chat.messages[:1])
    assert first == len(prompt) + 5
    "".join(chat.ask("again"))
    again = tokenizer.chat(chat.messages[:3])
    shared = len(prompt) + 5  # the last letter was chosen and not fed
    assert again[:shared] == prompt + letters[:5]
    assert chat.stepper.positions - first == len(again) - shared + 5


def test_an_answer_that_is_left_early_is_remembered_as_far_as_it_was_said(parts):
    chat = talk(parts, max_new_tokens=50)
    said = ""
    for piece in (answer := chat.ask("the fox")):
        said += piece
        if len(said) > 3:
            break
    answer.close()
    assert chat.messages[-1] == {"role": "assistant", "content": said}
    assert chat.reason is None
    assert len(chat.stepper) == 0
    assert "".join(chat.ask("go on")) == chat.messages[-1]["content"]


def test_stops_and_ends_end_an_answer(parts):
    model, tokenizer = parts
    free = "".join(talk(parts, max_new_tokens=30).ask("the"))
    stop = free[5:7]
    chat = talk(parts, max_new_tokens=30, stop=[stop])
    assert "".join(chat.ask("the")) == free[: free.index(stop)]
    assert chat.reason == "stop"
    ids = nd.complete(model, None, [tokenizer.chat([{"role": "user", "content": "the"}])], 30, eos_ids=())[0].ids
    chat = talk(parts, max_new_tokens=30, eos_ids=(ids[3],))
    "".join(chat.ask("the"))
    assert chat.reason == "eos"


def test_what_cannot_be_said_changes_nothing(parts):
    chat = talk(parts)
    "".join(chat.ask("the fox"))
    before = list(chat.messages)
    with pytest.raises(ValueError, match=r"the prompt has .* tokens, 6 new ones are asked for, and the context holds 256"):
        chat.ask("the fox " * 100)
    assert chat.messages == before
    chat.restart()
    assert chat.messages == []
    assert "".join(chat.ask("the fox")) == before[-1]["content"]


def test_nothing_asked_for_is_an_empty_answer(parts):
    chat = talk(parts, max_new_tokens=0)
    assert list(chat.ask("the")) == []
    assert chat.messages[-1]["content"] == ""


def test_an_answer_that_nobody_listened_to_leaves_no_trace(parts):
    """Left before its first piece, never begun, or left behind half-heard: the next answer is its own."""
    wanted = "".join(talk(parts).ask("a dog?"))
    chat = talk(parts)
    chat.ask("the fox").close()
    assert "".join(chat.ask("a dog?")) == wanted
    chat.restart()
    chat.ask("the fox")
    assert "".join(chat.ask("a dog?")) == wanted
    chat.restart()
    half = chat.ask("the fox")
    next(half)
    assert "".join(chat.ask("a dog?")) == wanted
    half.close()
    assert [message["content"] for message in chat.messages] == ["a dog?", wanted]


def test_wrong_options_are_refused_before_the_first_turn(parts):
    for options, words in (
        ({"max_new_tokens": -1}, "max_new_tokens must be 0 or above"),
        ({"stop": [""]}, "stop must be a text"),
    ):
        with pytest.raises(ValueError, match=words):
            talk(parts, **options)
