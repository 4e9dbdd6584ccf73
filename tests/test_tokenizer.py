"""tokenizer.py: BOS as the checkpoint says, text that stays text, and streams that never show half a character."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import texts
from tiny import byte_level, sentence_piece

from nanodecoder import CheckpointError, Tokenizer


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(byte_level(tmp_path_factory.mktemp("bytewise")))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(sentence_piece(tmp_path_factory.mktemp("pieces")))


def streamed(tokenizer: Tokenizer, ids: list[int], **options) -> list[str]:
    stream = tokenizer.stream(**options)
    return [*map(stream.push, ids), stream.finish()]


# ---- encoding


def test_bos_where_the_template_puts_it_and_nowhere_else(bytewise, pieces):
    assert pieces.encode("the")[0] == pieces.bos_id == 1
    assert bytewise.bos_id == 0
    assert 0 not in bytewise.encode("the")
    assert bytewise.encode("") == []
    assert pieces.encode("") == [1]


@pytest.mark.parametrize(
    ("template", "settings", "marks"),
    [
        ("<s> $A", {}, [1]),
        ("<s> $A </s>", {}, [1, 2]),
        ("$A", {}, []),
        ("<s> $A", {"add_bos_token": True}, [1]),  # once
        ("<s> $A", {"add_bos_token": False}, [1]),  # the template overrules the flag, as in transformers 5
        ("$A", {"add_bos_token": True}, []),
        (None, {}, []),
        (None, {"add_bos_token": True}, [1]),
        (None, {"add_bos_token": True, "add_eos_token": True}, [1, 2]),
        (None, {"add_bos_token": False, "add_eos_token": True}, [2]),
        (None, {"add_bos_token": True, "bos_token": None}, []),
    ],
)
def test_the_template_decides_and_without_one_the_flags(tmp_path, template, settings, marks):
    tokenizer = Tokenizer.load(sentence_piece(tmp_path, template, **settings))
    ids = tokenizer.encode("the")
    assert [index for index in ids if index in (1, 2)] == marks
    assert (ids[0] == 1) == (1 in marks)
    assert (ids[-1] == 2) == (2 in marks)


def test_bos_is_never_there_twice(pieces):
    assert pieces.encode("<s>the", special=True).count(1) == 1
    assert pieces.encode("<s>", special=True) == [1]


def test_a_special_token_that_was_typed_is_text_unless_asked_otherwise(pieces, bytewise):
    assert 2 not in pieces.encode("the </s>")
    assert pieces.decode(pieces.encode("the </s>")) == "the </s>"
    assert 2 in pieces.encode("the </s>", special=True)
    assert 1 not in bytewise.encode("<|im_start|>the")
    assert bytewise.encode("<|im_start|>the", special=True)[0] == 1
    assert 1 not in bytewise.encode("<|im_start|>the")  # asking once changes nothing for the next caller


@pytest.mark.parametrize(
    ("stated", "bos_id"),
    [("<s>", 1), ({"content": "<s>", "lstrip": False}, 1), (None, None), ("<nowhere>", None)],
)
def test_bos_as_a_string_an_object_or_none(tmp_path, stated, bos_id):
    """Qwen 2.5's config.json names a bos_token_id, and its tokenizer's bos_token is null: there is none."""
    assert Tokenizer.load(sentence_piece(tmp_path, bos_token=stated)).bos_id == bos_id


def test_without_settings_the_template_says_what_bos_is(tmp_path):
    folder = sentence_piece(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, ())


def test_one_id_may_be_bos_and_eos(bytewise):
    assert bytewise.bos_id == 0
    assert bytewise.eos_ids == (0,)


# ---- decoding


@given(texts)
def test_what_was_encoded_is_decoded_the_same(text):
    for tokenizer in (BYTEWISE(), PIECES()):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, 420), max_size=30))
def test_the_pieces_of_a_stream_joined_are_the_decoded_ids(ids):
    """Any ids, also such as are no text: half characters, lone bytes, ids beyond the vocabulary."""
    for tokenizer in (BYTEWISE(), PIECES()):
        for special in (False, True):
            assert "".join(streamed(tokenizer, ids, special=special)) == tokenizer.decode(ids, special=special)


@given(st.lists(st.integers(0, 379), max_size=30))
def test_bytewise_ids_decode_as_the_library_does(ids):
    tokenizer = BYTEWISE()
    assert tokenizer.decode(ids) == tokenizer._core.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, 300), max_size=30))
def test_pieces_decode_as_the_library_does_wherever_it_loses_nothing(ids):
    tokenizer = PIECES()
    theirs = tokenizer._core.decode(ids, skip_special_tokens=True)
    assume("�" not in theirs)  # there the library gives up a whole run of bytes for one that is wrong
    own = tokenizer.decode(ids)
    # At the beginning the library takes a space that came as a byte, <0x20>, for the one that SentencePiece puts there
    assert own == theirs or (own == " " + theirs and tokenizer._core.token_to_id("<0x20>") in ids)


@given(texts, st.integers(0, 20))
def test_a_stream_that_continues_a_prompt_gives_what_the_prompt_lacked(text, cut):
    for tokenizer in (BYTEWISE(), PIECES()):
        ids = tokenizer.encode(text)
        before = tokenizer.stream()
        start = "".join(map(before.push, ids[:cut]))
        assert start + "".join(streamed(tokenizer, ids[cut:], after=ids[:cut])) == text


def test_korean_and_emoji_appear_whole_or_not_yet(bytewise, pieces):
    for tokenizer in (bytewise, pieces):
        shown = streamed(tokenizer, tokenizer.encode("나는 🙂"))
        assert "".join(shown) == "나는 🙂"
        assert "�" not in "".join(shown)
        assert shown.count("") >= 3  # the bytes of a character before its last one
    assert [text for text in streamed(pieces, pieces.encode("한글")) if text] == ["한", "글"]


def test_a_character_that_was_cut_off_shows_as_a_mark_at_the_end_and_spoils_nothing_before_it(pieces):
    ids = pieces.encode("한글")[:-1]
    assert pieces.decode(ids) == "한�"
    assert streamed(pieces, ids)[-1] == "�"


def test_the_space_that_a_tokenizer_puts_in_front_is_not_in_the_text_but_stands_within_it(pieces):
    ids = pieces.encode("the the")
    assert pieces.decode(ids) == "the the"
    assert "".join(streamed(pieces, ids[2:], after=ids[:2])) == " the"
    assert pieces.decode(pieces.encode("  two")) == "  two"
    assert pieces.decode(pieces.encode(" a .  b ,c ")) == " a .  b ,c "  # spaces are never tidied


def test_special_marks_are_left_out_or_shown_and_ids_beyond_the_vocabulary_are_nothing(pieces):
    ids = [1, *pieces.encode("the")[1:], 2, 50_000, -1]
    assert pieces.decode(ids) == "the"
    assert pieces.decode(ids, special=True).replace(" ", "") == "<s>the</s>"
    assert pieces.token_bytes(50_000) == b""
    assert pieces.token_bytes(2) == b"</s>"


def test_ids_of_any_kind_are_ids(pieces):
    ids = pieces.encode("the fox")
    for kind in (torch.tensor, np.array):
        assert pieces.decode(kind(ids)) == "the fox"


def test_what_training_cut_or_padded_is_nobodys_wish_here(tmp_path):
    folder = sentence_piece(tmp_path)
    plain = Tokenizer.load(folder).encode("the quick fox")
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    raw["padding"] = {"strategy": {"Fixed": 30}, "direction": "Right", "pad_to_multiple_of": None}
    raw["padding"] |= {"pad_id": 2, "pad_type_id": 0, "pad_token": "</s>"}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("the quick fox") == plain
    assert json.loads(tokenizer.files()["tokenizer.json"])["truncation"]["max_length"] == 4  # and yet it is kept


def test_an_end_mark_in_the_template_is_not_bos(tmp_path):
    folder = sentence_piece(tmp_path, "$A </s>")
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer.load(folder).bos_id is None


def test_bytes_of_a_token(bytewise, pieces):
    assert bytewise.token_bytes(bytewise.encode("é")[0]) in (b"\xc3", b"\xc3\xa9")
    assert b"".join(map(pieces.token_bytes, pieces.encode("한")[2:])) == "한".encode()


# ---- files


def test_a_folder_without_a_usable_tokenizer_is_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"there is no tokenizer.json in .*; download it, or give ids instead of text"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* cannot be read"):
        Tokenizer.load(tmp_path)


OPT = {
    "<s>": 0,
    "<pad>": 1,
    "</s>": 2,
    "Hello": 31414,
    "Ġworld": 232,
    "H": 5,
    "e": 6,
    "l": 7,
    "o": 8,
    "Ġ": 9,
    "w": 10,
    "r": 11,
    "d": 12,
}
PIECES_OF_OPT = ["He", "Hel", "Hell", "Ġw", "Ġwo", "Ġwor", "Ġworl"]
MERGES = ["H e", "He l", "Hel l", "Hell o", "Ġ w", "Ġw o", "Ġwo r", "Ġwor l", "Ġworl d"]


@pytest.mark.parametrize("header", ["#version: 0.2\n", ""])
@pytest.mark.parametrize(("model_type", "ids"), [("opt", [2, 31414, 232]), ("gpt2", [31414, 232])])
def test_vocab_and_merges_are_a_tokenizer_with_the_familys_bos(tmp_path, model_type, ids, header):
    """OPT's own numbers; GPT-2 puts no BOS in front."""
    vocab = OPT | {piece: 100 + i for i, piece in enumerate(PIECES_OF_OPT)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text(header + "\n".join(MERGES) + "\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("Hello world") == ids
    assert tokenizer.decode(ids) == "Hello world"
    assert tokenizer.decode([50_271, *ids]) == "Hello world"  # OPT's logits have more rows than there are pieces
    assert tokenizer.bos_id == (2 if model_type == "opt" else None)
    for name, content in tokenizer.files().items():
        (tmp_path / name).write_bytes(content)
    assert Tokenizer.load(tmp_path).encode("Hello world") == ids  # from the tokenizer.json that is written


def test_vocab_and_merges_that_do_not_fit_are_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    for merges, words in (("a b c\n", "must hold two pieces a line"), ("a b\n", "merges a and b, and vocab.json lacks")):
        (tmp_path / "merges.txt").write_text(merges)
        with pytest.raises(CheckpointError, match=words):
            Tokenizer.load(tmp_path)


def two_files(folder, model_type: str = "gpt2", **files) -> None:
    vocab = OPT | {piece: 100 + i for i, piece in enumerate(PIECES_OF_OPT)}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(MERGES))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_tokens_beside_the_vocabulary_are_added_at_their_ids(tmp_path):
    decoder = {"31415": {"content": "<|im_start|>", "special": True}, "31416": {"content": "<tool>", "special": False}}
    size = 13 + len(PIECES_OF_OPT)
    two_files(tmp_path, added_tokens={"<x>": size})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("<x>Hello", special=True) == [size, 31414]
    assert tokenizer.decode([size, 31414]) == "Hello"
    two_files(tmp_path, added_tokens={}, tokenizer_config={"added_tokens_decoder": decoder})
    with pytest.raises(CheckpointError, match=r"names '<\|im_start\|>' as id 31415, and there it cannot be"):
        Tokenizer.load(tmp_path)


def test_marks_are_read_from_special_tokens_map_too_and_tokenizer_config_overrules_it(tmp_path):
    two_files(tmp_path, special_tokens_map={"eos_token": "</s>", "bos_token": {"content": "<s>"}})
    assert (Tokenizer.load(tmp_path).bos_id, Tokenizer.load(tmp_path).eos_ids) == (0, (2,))
    two_files(tmp_path, tokenizer_config={"eos_token": "<pad>"})
    assert Tokenizer.load(tmp_path).eos_ids == (1,)


def test_two_files_of_a_family_that_cuts_text_otherwise_are_refused(tmp_path):
    two_files(tmp_path, model_type="qwen2")
    with pytest.raises(CheckpointError, match="how this family cuts text before merging is not in it; convert it with"):
        Tokenizer.load(tmp_path)


def test_merges_as_pairs_and_as_strings_are_the_same(tmp_path, bytewise):
    """tokenizer.json has them as pairs since tokenizers 0.20, as strings with a space before."""
    folder = byte_level(tmp_path)
    raw = json.loads((folder / "tokenizer.json").read_text())
    assert isinstance(raw["model"]["merges"][0], list)
    raw["model"]["merges"] = [" ".join(pair) for pair in raw["model"]["merges"]]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    assert Tokenizer.load(folder).encode("나는 the quick") == bytewise.encode("나는 the quick")


def test_a_bare_sentencepiece_model_says_how_to_convert_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(
        CheckpointError, match=r"SentencePiece tokenizer.model and no tokenizer.json; convert it with .*save_pretrained"
    ):
        Tokenizer.load(tmp_path)


def test_files_are_kept_as_they_came(tmp_path):
    folder = sentence_piece(tmp_path, extra="kept")
    files = Tokenizer.load(folder).files()
    assert json.loads(files["tokenizer_config.json"])["extra"] == "kept"
    assert json.loads(files["tokenizer.json"]) == json.loads((folder / "tokenizer.json").read_text())


_MADE: dict[str, Tokenizer] = {}


def BYTEWISE() -> Tokenizer:  # Hypothesis runs a test many times: make each tokenizer once
    return _MADE["bytewise"]


def PIECES() -> Tokenizer:
    return _MADE["pieces"]


@pytest.fixture(autouse=True, scope="module")
def _made(bytewise, pieces):
    _MADE.update(bytewise=bytewise, pieces=pieces)
