"""pieces.py: every id with what it stands for, characters whole, words together, and a word found where it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from strategies import texts
from tiny import byte_level, sentence_piece

import nanodecoder as nd
from nanodecoder.inside.pieces import LEFT, find, pieces, rectangle, show, show_rectangle, words


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    return nd.Tokenizer.load(byte_level(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def spaced(tmp_path_factory):
    return nd.Tokenizer.load(sentence_piece(tmp_path_factory.mktemp("pieces")))


@pytest.mark.parametrize("which", ["bytewise", "spaced"])
def test_pieces_spell_the_text_and_no_character_is_torn(which, request):
    tokenizer = request.getfixturevalue(which)

    @given(texts)
    def spells(text):
        ids = tokenizer.encode(text)
        row = pieces(tokenizer, ids)
        assert [piece.id for piece in row] == ids
        assert [piece.position for piece in row] == list(range(len(ids)))
        whole = "".join(piece.text for piece in row if piece.part[0] == 1 and not piece.special)
        assert whole == tokenizer.decode(ids)
        assert ("�" in whole) == ("�" in tokenizer.decode(ids))
        assert "".join(word.text for word in words(row)) == "".join(p.text for p in row if p.part[0] == 1)

    spells()


def test_pieces_of_one_character_are_bracketed_and_the_character_shown(bytewise):
    """Two characters whose bytes are three pieces each, and a letter."""
    row = pieces(bytewise, [*bytewise.encode("독립"), *bytewise.encode("a")])
    assert [piece.label for piece in row[-1:]] == ["a"]
    groups = row[:-1]
    assert {piece.text for piece in groups} == {"독", "립"}
    first = [piece for piece in groups if piece.text == "독"]
    assert [piece.part for piece in first] == [(n, len(first)) for n in range(1, len(first) + 1)]
    assert [piece.bracket for piece in first] == ["┌", *"│" * (len(first) - 2), "└"]
    assert first[0].label == f"독[1/{len(first)}]"
    text = show([row], [1])
    assert "�" not in text
    assert "독" in text
    assert text.splitlines()[0] == f"{len(row) - 1} tokens and 1 new"
    assert text.splitlines()[-1].split() == [str(len(row) - 1), str(row[-1].id), "a", "61", "new"]


def test_an_unfinished_character_says_so_and_marks_are_no_text(bytewise):
    ids = bytewise.encode("a립")[:-1]
    row = pieces(bytewise, [0, *ids])
    assert (row[0].special, row[0].label, row[0].bytes) == (True, "<|end|>", b"")
    assert row[1].label == "a"
    assert row[-1].text.endswith("�")
    assert pieces(bytewise, []) == []


def test_a_mark_between_bytes_ends_the_character(bytewise):
    ids = bytewise.encode("립")
    assert len(ids) > 1
    row = pieces(bytewise, [ids[0], 0, *ids[1:]])
    assert row[0].text == "�"
    assert row[1].special


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Once upon a time", ["Once", " upon", " a", " time"]),
        ("naïve café", ["naïve", " café"]),
        ("나는 오늘 학교에 갔다.", ["나는", " 오늘", " 학교에", " 갔다."]),
        ("a  b", ["a", " ", " b"]),
        ("a\nb", ["a", "\n", "b"]),
    ],
)
def test_words_begin_where_a_space_does(bytewise, text, wanted):
    assert [word.text for word in words(pieces(bytewise, bytewise.encode(text)))] == wanted


def test_a_space_of_its_own_belongs_to_the_word_after_it(bytewise):
    ids = [*bytewise.encode("a"), *bytewise.encode(" "), *bytewise.encode("b"), 0, *bytewise.encode("b")]
    assert [word.text for word in words(pieces(bytewise, ids))] == ["a", " b", "<|end|>", "b"]


def test_a_word_is_found_by_its_last_place_and_its_edges(bytewise):
    row = pieces(bytewise, bytewise.encode("the theme then the thesis"))
    spelled = [word.text for word in words(row)]
    assert spelled == ["the", " theme", " then", " the", " thesis"]
    place = words(row)
    assert find(row, " the") == place[3]
    assert find(row, "the").text.strip() == "the"
    assert find(row, "the").stop == place[3].stop
    assert find(row, " the", before=place[3].start).start < place[3].start
    assert find(row, "thesis").stop == len(row)
    two = find(row, " then the")
    assert (two.start, two.stop) == (place[2].start, place[3].stop)
    for text, options, told in (
        ("cat", {}, "'cat' is not in the text"),
        ("thesis", {"before": 2}, "up to there"),
        ("", {}, "''"),
    ):
        with pytest.raises(ValueError, match=told):
            find(row, text, **options)


def test_a_korean_word_of_several_tokens_is_found_whole(bytewise):
    text = "나는 오늘 학교에 갔다."
    row = pieces(bytewise, bytewise.encode(text))
    word = find(row, "학교에")
    assert bytewise.decode([piece.id for piece in row[word.slice]]).strip() == "학교에"
    assert word.stop - word.start > 1


def test_a_words_first_place_needs_no_space(spaced):
    row = pieces(spaced, spaced.encode("the fox"))
    assert row[0].special
    assert find(row, " the").text == "the"
    assert find(row, " fox").text == " fox"


def test_the_rectangle_is_transformers(tmp_path):
    """Beside its tokenizer, padding on either side, and where nothing is said."""
    transformers = pytest.importorskip("transformers", reason="the parity extra is not installed")
    texts = ["the quick brown fox", "a dog"]
    for side in ("left", "right", None):
        folder = byte_level(tmp_path / str(side), **({"padding_side": side} if side else {}), pad_token="<|end|>")
        ours = nd.Tokenizer.load(folder)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)(texts, padding=True)
        found = rectangle(ours, [ours.encode(text) for text in texts], 0)
        assert [list(row) for row in found.ids] == theirs["input_ids"]
        assert [list(row) for row in found.mask] == theirs["attention_mask"]
        assert found.side == side or side is None
        assert found.why == (
            "as tokenizer_config.json says" if side else "the default, since tokenizer_config.json names no side"
        )
        text = show_rectangle(found, [5, 3], 9)
        assert ("must be filled on the left" in text) == (side != "left")
        assert "5 of 9 used" in text


def test_where_no_side_is_named_it_is_the_classes(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the parity extra is not installed")
    for name in (*LEFT, "GemmaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "TokenizersBackend"):
        theirs = getattr(transformers, name, None)
        if theirs is not None:
            ours = nd.Tokenizer.load(sentence_piece(tmp_path / name, tokenizer_class=name))
            assert rectangle(ours, [[1, 2], [1]], 0).side == theirs.padding_side


def test_several_texts_are_told_apart(bytewise):
    rows = [pieces(bytewise, bytewise.encode(text)) for text in ("a", "the fox")]
    assert show(rows, [0, 0]).startswith("text 1: 1 token\n")
    assert "\n\ntext 2: " in show(rows, [0, 0])


@pytest.mark.slow
def test_smollm2_cuts_a_korean_sentence_into_27(smollm2):
    tokenizer = nd.Tokenizer.load(smollm2)
    row = pieces(tokenizer, tokenizer.encode("나는 오늘 학교에 갔다."))
    assert (len(row), len(tokenizer.encode("I went to school today."))) == (27, 6)
    assert [word.text for word in words(row)] == ["나는", " 오늘", " 학교에", " 갔다."]
    assert [piece.label for piece in row[:4]] == ["나[1/3]", "나[2/3]", "나[3/3]", "는[1/3]"]
    assert "�" not in show([row], [0])
