"""The tour shows what its commands print, in both languages, and every number in its words is one of those.

Where a shipped model was trained anew: `python -m tests.tour --update` prints the blocks anew, and the test of the words says
which sentences are out of date.
"""

from __future__ import annotations

import codeop
import re

import pytest
import tour
from conftest import ROOT

EXERCISES = {"docs/tour.md": "## Ten things to try", "docs/tour.ko.md": "## 직접 해 보는 열 가지"}
# Numbers that no command of the tour prints, and where they are from
QUOTED = {
    "31414": "facebook/opt-125m's id of Hello (test_tokenizer.py)",
    "15496": "GPT-2's id of Hello, as transformers' documentation has it",
    "50,265": "pieces of facebook/opt-125m's tokenizer (huggingface/transformers#18268)",
    "5.24": "a version of transformers",
    "0.7": "pipeline's temperature in transformers 5.24",
    "256": "pipeline's new tokens in transformers 5.24",
    "24": "basic letters of Hangul",
    "10": "the base of a power of ten",
    "269": "MB of SmolLM2-135M-Instruct",
}
NAMES = r"SmolLM2(-135M-Instruct)?|opt-125m|GPT-2|Phi-3(-mini|-medium)?|Llama 3|Gemma 2|OLMo 2|\b[45]\.x|b?float\d+"


def read(page: str) -> str:
    return (ROOT / page).read_text()


def before_exercises(page: str) -> str:
    text, found, _ = read(page).partition(EXERCISES[page])
    assert found
    return text


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    real = tour.REAL_MODEL if (tour.REAL_MODEL / "config.json").is_file() else None
    return tour.make_desk(tmp_path_factory.mktemp("desk"), real)


def compare(found: list[tour.Shown], desk, with_real: bool) -> None:
    wrong = [
        f"{one.code.body}\nprints\n{new}\nand the tour shows\n{one.text.body}"
        for one, new in tour.printed(found, desk, with_real)
        if not tour.same(one.text.body, new)
    ]
    assert not wrong, "\n".join([*wrong, "python -m tests.tour --update prints it anew"])


@pytest.mark.slow
def test_the_tour_shows_what_is_printed(desk):
    compare([one for one in tour.shown(read("docs/tour.md")) if not one.is_real], desk, False)


@pytest.mark.slow
def test_the_tour_shows_what_the_real_model_prints(desk, smollm2):
    compare([one for one in tour.shown(read("docs/tour.md")) if one.is_real], desk, True)


def test_both_languages_show_the_same():
    """The same commands with the same output in the same order; so what holds of one page's holds of the other's."""
    english, korean = (
        [(one.kind, one.about, one.body) for one in tour.blocks(read(page)) if one.kind != "text"] for page in tour.PAGES
    )
    assert english == korean
    english, korean = ([(one.text.about, one.text.body) for one in tour.shown(read(page))] for page in tour.PAGES)
    assert english == korean


@pytest.mark.parametrize("page", tour.PAGES)
def test_every_command_shows_its_output(page):
    """Those of the exercises have tests of their own."""
    text = before_exercises(page)
    assert len(tour.shown(text)) == len([one for one in tour.blocks(text) if one.kind != "text"]) > 25


@pytest.mark.parametrize(
    "one", [one for one in tour.blocks(read("docs/tour.md")) if one.kind == "python"], ids=lambda one: one.start
)
def test_python_can_be_pasted_into_a_session(one):
    """The plain prompt ends a loop at an empty line, and at nothing else."""
    lines: list[str] = []
    for line in [*one.body.splitlines(), ""]:
        lines.append(line)
        if codeop.compile_command("\n".join(lines), symbol="single"):
            lines = []
    assert not "".join(lines)


def is_printed(number: str, printed: set[float]) -> bool:
    """Whether a number of the words is one that was printed, rounded to its places, or its share in percent."""
    value, places = float(number.replace(",", "")), len(number.partition(".")[2])
    near = 0.501 * 10**-places if places else 1e-9
    return any(abs(value - one * times) <= near for one in printed for times in (1, 100))


@pytest.mark.parametrize("page", tour.PAGES)
def test_every_number_in_the_words_is_printed_in_the_same_section(page):
    missing = []
    for section in re.split(r"^## ", before_exercises(page), flags=re.M):
        printed = {float(n.replace(",", "")) for block in tour.blocks(section) for n in tour.NUMBER.findall(block.body)}
        words = tour.FENCE.sub("", section.partition("\n")[2])
        words = re.sub(r"\]\([^)]*\)|`[^`\s,]*`|" + NAMES, " ", words)
        numbers = {number.rstrip(",") for number in tour.NUMBER.findall(words)} - set(QUOTED)
        missing += [(section.splitlines()[0], number) for number in numbers if not is_printed(number, printed)]
    assert not missing, "no command of its section prints it"


def test_a_wrong_number_is_seen():
    assert tour.same("p 0.567 of 27\n", "p 0.567 of 27\n")
    assert tour.same("p 0.567\n", "p 0.568\n")  # another processor's rounding
    for other in ("p 0.569 of 27\n", "p 0.567 of 28\n", "p 0.57 of 27\n", "q 0.567 of 27\n", "p 0.567 of 27\nmore\n"):
        assert not tour.same("p 0.567 of 27\n", other)


def test_lines_are_chosen_as_python_slices_them():
    assert tour.choose("a\nb\nc\nd\n", "") == "a\nb\nc\nd\n"
    assert tour.choose("a\nb\nc\nd\n", "1:3") == "…\nb\nc\n…\n"
    assert tour.choose("a\nb\nc\nd\n", "0 -1") == "a\n…\nd\n"
    assert tour.choose("12 new, decode 71.2 tokens/s, seed 1\n", "") == "12 new, …\n"
