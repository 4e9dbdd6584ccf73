"""training/data.py: what is read, how it is split, and in which order it is dealt out."""

from __future__ import annotations

import json
import types
import unicodedata

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanodecoder.cli import UsageError
from nanodecoder.training.data import IGNORED, Examples, Windows, _read_ids, open_source, prepare
from nanodecoder.training.vocabulary import MARK, make_tokenizer

TEXT = "Call me Ishmael.\nSome years ago, never mind how long,\nhaving little or no money\n\n" * 20
NAMES = ["emma", "olivia", "ava", "isabella", "sophia", "mia", "amelia", "harper", "evelyn", "abigail", "ada", "zoe"]


def source(path, format=None, encoding="utf-8", normalization="nfc"):
    return open_source(str(path), format, encoding, normalization)


def char(trained_on, everything=None):
    return make_tokenizer("char", everything or trained_on, 0)


def prepared(path, block_size=16, val_fraction=0.1, **how):
    return prepare(source(path, **how), char, block_size=block_size, val_fraction=val_fraction)


def write(folder, name: str, content: str | bytes):
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def text_of(path, **how) -> str:
    return "".join(text for text, _ in source(path, **how).pieces())


def test_bom_and_crlf_are_no_part_of_the_text_and_characters_are_composed(tmp_path):
    decomposed = unicodedata.normalize("NFD", "나는 학교에 갔다")
    path = write(tmp_path, "a.txt", b"\xef\xbb\xbf" + f"one\r\ntwo\r{decomposed}\r\n".encode())
    assert text_of(path) == "one\ntwo\r나는 학교에 갔다\n"
    assert text_of(path, normalization="none") == f"one\ntwo\r{decomposed}\n"


def test_a_large_text_comes_in_pieces_and_no_character_is_torn(tmp_path, monkeypatch):
    monkeypatch.setattr("nanodecoder.training.data.PIECE", 7)
    text = "가나다\r\n라마바사\r\n\r\n아" * 9
    path = write(tmp_path, "a.txt", text)
    pieces = list(source(path, "text").pieces())
    assert len(pieces) > 5
    assert "".join(piece for piece, _ in pieces) == text.replace("\r\n", "\n")
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("나는 갔다".encode("cp949"), r"is not UTF-8: byte 0 \(0xb3\) does not fit; it reads as CP949: give --encoding cp949"),
        (b"fine \xff\xff\x00", r"byte 5 \(0xff\) does not fit; give --encoding with the name"),
        (b"", "is empty; give a file with text in it"),
    ],
)
def test_what_is_no_text_is_refused_with_the_byte_at_fault(tmp_path, content, words):
    path = write(tmp_path, "a.txt", content)
    with pytest.raises(UsageError, match=words):
        text_of(path)


def test_another_encoding_is_read_if_named(tmp_path):
    path = write(tmp_path, "a.txt", "나는 갔다".encode("cp949"))
    assert text_of(path, encoding="cp949") == "나는 갔다"
    with pytest.raises(UsageError, match="--encoding utf-9 is not known"):
        text_of(path, encoding="utf-9")
    with pytest.raises(UsageError, match="is not UTF-16: byte"):
        text_of(path, encoding="utf-16")


def test_a_text_without_lines_comes_in_pieces_too(tmp_path, monkeypatch):
    monkeypatch.setattr("nanodecoder.training.data.PIECE", 10)
    path = write(tmp_path, "a.txt", "한" * 500)
    pieces = [piece for piece, _ in source(path, "text").pieces()]
    assert "".join(pieces) == "한" * 500
    assert max(map(len, pieces)) < 100


def test_the_kind_of_file_is_found_out_and_can_be_said(tmp_path):
    assert source(write(tmp_path, "names.txt", "\n".join(NAMES))).format == "lines"
    assert source(write(tmp_path, "prose.txt", TEXT)).format == "text"
    assert source(write(tmp_path, "few.txt", "two\nlines")).format == "text"
    assert source(write(tmp_path, "korean.txt", "나는 오늘 학교에 갔다.\n" * 20)).format == "text"
    assert source(write(tmp_path, "a.jsonl", '{"text": "x"}')).format == "jsonl"
    assert source(tmp_path / "names.txt", "text").format == "text"


def test_a_folder_is_its_text_files_in_order_each_a_document(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path, "b.txt", "second" * 9)
    write(tmp_path, "a.md", "first" * 9)
    write(tmp_path / "sub", "c.txt", "third" * 9)
    write(tmp_path, "picture.png", b"\x89PNG")
    assert [text for text, _ in source(tmp_path).pieces()] == ["first" * 9, "second" * 9, "third" * 9]
    data = prepared(tmp_path, val_fraction=0.0)
    mark = data.tokenizer.bos_id
    assert np.flatnonzero(data.train.ids == mark).tolist() == [0, 46, 101, 147]
    with pytest.raises(UsageError, match="is a folder, and ids come in one file: name it, or leave out --format bin"):
        source(tmp_path, "bin")


def test_json_lines_carry_a_text(tmp_path):
    path = write(tmp_path, "a.jsonl", "\n".join(json.dumps({"text": name, "n": 1}) for name in NAMES) + "\n\n")
    data = prepared(path)
    assert len(data.train) + len(data.val) == len(NAMES)
    for wrong in ('{"txt": 1}', "[1]", '{"text": 5}', "{"):
        with pytest.raises(UsageError, match=r'b.jsonl, line 2: not a JSON object with a "text"'):
            prepared(write(tmp_path, "b.jsonl", '{"text": "fine"}\n' + wrong))


def test_a_text_is_split_at_its_tail_and_every_character_is_somewhere(tmp_path):
    data = prepared(write(tmp_path, "a.txt", TEXT))
    train, val = (data.tokenizer.decode(split.ids.tolist()) for split in (data.train, data.val))
    assert train + val == TEXT
    assert len(val) == round(0.1 * len(TEXT))


def test_examples_are_held_out_for_good(tmp_path):
    path = write(tmp_path, "names.txt", "\n".join(NAMES))
    first, second = prepared(path, val_fraction=0.25), prepared(path, val_fraction=0.25)
    halves = [
        {first.tokenizer.decode(split.item(i, 0)[0].tolist()) for i in range(len(split))} for split in (first.train, first.val)
    ]
    assert halves[0] | halves[1] == set(NAMES)
    assert not halves[0] & halves[1]
    assert len(halves[1]) == 3
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint != prepared(path, val_fraction=0.5).fingerprint


@given(n=st.integers(2, 60), block_size=st.integers(1, 20), seed=st.integers(0, 9))
def test_every_position_is_a_target_and_is_followed_by_what_really_came(n, block_size, seed):
    windows = Windows(np.arange(100, 100 + n), block_size)
    seen = set()
    for batch in windows.in_order(3):
        for row in range(len(batch.tokens)):
            real = batch.targets[row] != IGNORED
            assert torch.equal(batch.targets[row][real], batch.tokens[row][real] + 1)
            assert not seen & set(batch.targets[row][real].tolist())  # each scored once
            seen |= set(batch.targets[row][real].tolist())
    assert seen == set(range(101, 100 + n))
    per_epoch = len(windows)
    first = windows.batch(range(per_epoch), seed)
    assert set(first.targets[first.targets != IGNORED].tolist()) == seen
    if n > 2 * block_size:
        later = windows.batch(range(per_epoch, 30 * per_epoch), seed).tokens[:, 0]
        assert len(set(((later - 100) % block_size).tolist())) > min(1, block_size - 1)  # cut elsewhere


def test_what_is_dealt_depends_on_the_number_alone():
    once, again = (Windows(np.arange(500), 8) for _ in range(2))
    again.batch(range(200, 230), seed=3)  # whatever was asked before
    for first in (0, 61, 62, 63, 400):
        a, b = once.batch(range(first, first + 4), seed=3), again.batch(range(first, first + 4), seed=3)
        assert torch.equal(a.tokens, b.tokens)
    assert not torch.equal(once.batch(range(4), seed=3).tokens, once.batch(range(4), seed=4).tokens)


def test_every_epoch_has_its_own_order():
    examples = Examples(np.array([0, *(n for i in range(1, 60) for n in (i, 0))]), mark=0, block_size=4)
    epochs = [examples.batch(range(59 * e, 59 * e + 59), seed=1).tokens[:, 1].tolist() for e in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(1, 60))


def test_a_window_after_an_end_of_line_begins_with_the_mark():
    ids = np.array([0, 5, 6, 9, 5, 7, 9, 8, 5])
    windows = Windows(ids, 3, ends=frozenset({9}), bos=0)
    rows = [windows.item(i, 0) for i in range(3)]
    assert [row[0].tolist() for row in rows] == [[0, 5, 6], [0, 5, 7], [0, 8]]
    assert [row[1].tolist() for row in rows] == [[5, 6, 9], [5, 7, 9], [8, 5]]
    assert ids[3] == 9


def test_a_document_begins_with_bos_where_that_is_not_eos():
    windows = Windows(np.array([2, 5, 6, 2, 7, 8, 2]), 3, bos=1, mark=2)
    rows = [tuple(part.tolist() for part in windows.item(i, 0)) for i in range(2)]
    assert rows == [([1, 5, 6], [5, 6, 2]), ([1, 7, 8], [7, 8, 2])]


def test_an_example_is_a_row_between_marks_and_a_long_one_goes_on_in_the_next():
    examples = Examples(np.array([0, 4, 5, 0, 6, 0, 1, 2, 3, 4, 5, 6, 7, 0]), mark=0, block_size=4)
    rows = [examples.item(i, 0) for i in range(len(examples))]
    assert [(a.tolist(), b.tolist()) for a, b in rows] == [
        ([0, 4, 5], [4, 5, 0]),
        ([0, 6], [6, 0]),
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([4, 5, 6, 7], [5, 6, 7, 0]),
    ]
    batch = next(examples.in_order(4))
    assert batch.n_targets == 13
    assert batch.counts is None
    assert batch.targets.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0], [4, 5, 0, IGNORED], [6, 0, IGNORED, IGNORED]]


def test_a_tokenizer_whose_bos_is_not_its_eos_has_each_where_it_belongs():
    examples = Examples(np.array([0, 4, 5, 6, 0, 6, 0]), mark=0, block_size=3, bos=1)
    rows = [tuple(part.tolist() for part in examples.item(i, 0)) for i in range(len(examples))]
    assert rows == [([1, 4, 5], [4, 5, 6]), ([6], [0]), ([1, 6], [6, 0])]


def test_where_most_would_be_padding_only_what_is_real_is_computed():
    examples = Examples(np.array([0, *range(1, 16), 0, 1, 0, 2, 0, 3, 0]), mark=0, block_size=16)
    batch = next(examples.in_order(4))
    assert batch.counts == (16, 2, 2, 2)
    assert batch.n_targets == 22


def test_ids_wider_than_two_bytes_are_read_as_they_are(tmp_path):
    """A tokenizer of 70,000 ids: 69,999 does not become 4,463."""
    ids = np.arange(70_000, dtype=np.uint32)
    np.save(tmp_path / "ids.npy", ids)
    tokenizer = types.SimpleNamespace(vocab_size=70_000)
    train, val = _read_ids(source(tmp_path / "ids.npy"), tokenizer, 0.1)
    assert int(val[-1]) == 69_999
    assert len(train) == 63_000
    tokenizer.vocab_size = 500
    with pytest.raises(UsageError, match="holds id 69999, and the tokenizer has 500"):
        _read_ids(source(tmp_path / "ids.npy"), tokenizer, 0.1)


def test_a_file_of_ids_without_a_header_is_refused_with_what_to_do(tmp_path):
    path = write(tmp_path, "train.bin", np.arange(50, dtype=np.uint16).tobytes())
    with pytest.raises(UsageError, match=r"no file of ids that says how wide they are; write one with numpy.save"):
        prepare(source(path), char([TEXT]), block_size=8, val_fraction=0.1)
    with pytest.raises(UsageError, match="give --tokenizer DIR"):
        prepare(source(path), char, block_size=8, val_fraction=0.1)


@pytest.mark.parametrize(
    ("text", "how", "words"),
    [
        (
            "too short",
            {},
            r"a.txt leaves 9 tokens for training, and a window takes 17: give more text, or a shorter --block_size",
        ),
        (TEXT, {"val_fraction": 0.005}, r"leaves 10 tokens for validation, and a window takes 17: .* another --val_fraction"),
    ],
)
def test_too_little_text_is_told_in_numbers(tmp_path, text, how, words):
    with pytest.raises(UsageError, match=words):
        prepared(write(tmp_path, "a.txt", text), **how)


def test_a_character_that_the_tokenizer_lacks_is_named(tmp_path):
    tokenizer = char(["abc\n"])
    with pytest.raises(UsageError, match=r"a.txt: the tokenizer has no id for 'x' \(U\+0078\), character 4 of the text"):
        prepare(source(write(tmp_path, "a.txt", "abcax\n" * 9), "text"), tokenizer, block_size=4, val_fraction=0.1)


def test_a_character_of_the_tail_alone_is_known_to_a_char_tokenizer(tmp_path):
    data = prepared(write(tmp_path, "a.txt", TEXT + "한글"))
    assert data.tokenizer.decode(data.val.ids.tolist()).endswith("한글")


def test_bytes_are_those_of_the_text(tmp_path):
    data = prepared(write(tmp_path, "a.txt", "가나다 abc\n" * 30))
    batches = list(data.val.in_order(4))
    val = data.tokenizer.decode(data.val.ids.tolist())
    assert sum(data.bytes_in(batch.targets) for batch in batches) == len(val.encode())
    assert MARK not in val
