"""report.py: one file that needs nothing else, holds the numbers that there were, and in which no prompt is markup."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import zipfile
import zlib
from html.parser import HTMLParser

import pytest
import torch
from conftest import ROOT
from test_views import run, tokenizer  # noqa: F401 - a fixture
from tiny import tiny_model

import nanodecoder as nd
from nanodecoder.inside import render
from nanodecoder.inside.looks import shares, towards
from nanodecoder.inside.pieces import words
from nanodecoder.inside.report import maps

EVIL = "the </script><script>alert(1)</script> <b onmouseover='x()'>&amp; \"fox\""


class Page(HTMLParser):
    """What a browser would make of a page: its elements, their text, and tags that do not match."""

    VOID = frozenset(("meta", "br", "input", "line", "circle", "polyline"))

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.text += data

    def with_tag(self, tag):
        return [attrs for name, attrs in self.found if name == tag]


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=380, max_seq_len=400, windows=(None, 3))


@pytest.fixture
def page(model, tokenizer):  # noqa: F811
    def make(texts=("the quick brown fox",), **options) -> Page:
        found, _ = run(model, tokenizer, list(texts), **options)
        return Page(render(found))

    return make


def test_every_view_has_a_section_and_a_link(page):
    made = page(watch=" dog", at=" quick")
    sections = [attrs["id"] for attrs in made.with_tag("section")]
    assert sections == ["tokens", "probs", "attention", "lens", "shapes", "memory"]
    assert [attrs["href"] for attrs in made.with_tag("a")] == [f"#{name}" for name in sections]
    assert [attrs["id"] for attrs in page(show="lens").with_tag("section")] == ["lens"]
    assert "Maps" not in page(show="lens,tokens,shapes").text


def test_nothing_is_fetched(model, tokenizer):  # noqa: F811
    found, _ = run(model, tokenizer, ["the quick brown fox"], watch=" dog")
    html = render(found)
    assert not re.search(r"""(?:src|href|url|action)\s*[=(]\s*["']?(?!#)[\w/.]""", html)
    assert "http" not in html.replace("http-equiv", "")
    assert "@import" not in html
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(", html)


def test_a_prompt_is_no_markup(page):
    """Neither as text, nor as an attribute, nor inside the script's data."""
    made = page([EVIL], n=1, look="fox", at="the", watch="<i>")
    assert len(made.scripts) == 2
    assert "alert(1)" not in made.scripts[1]
    assert not [attrs for _, attrs in made.found if "onmouseover" in attrs]
    assert "".join(json.loads(made.scripts[0])["units"]).startswith("the␣</script><script>alert(1)")
    assert "</script><script>alert(1)</script>" in made.text


def test_the_maps_are_the_traces_to_a_byte(model, tokenizer):  # noqa: F811
    found, _ = run(model, tokenizer, ["the quick brown fox"])
    held = json.loads(Page(render(found)).scripts[0])
    n = len(held["units"])
    numbers = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(held["data"]))), dtype=torch.uint8).float() / 255
    rows, columns = torch.tril_indices(n, n)
    wanted = found.looks.maps[:, :, rows, columns]
    assert (numbers.view(wanted.shape) - wanted).abs().max() <= 0.5 / 255 + 1e-6
    assert (held["heads"], held["groups"], held["layers"]) == (4, 2, [0, 1])
    assert held["look"] == found.looks.look.stop - 1
    assert held["begin"] == [-1, -1]
    found, _ = run(model, tokenizer, ["the quick brown fox"], at=" quick")
    assert tuple(maps(found)["begin"]) == towards(found.looks, found.at)[0][:2]


def test_what_a_window_hides_is_marked_impossible(model, tokenizer):  # noqa: F811
    """The first layer sees all, the second three tokens."""
    found, _ = run(model, tokenizer, ["the quick brown fox jumps"])
    held = maps(found)
    n = len(held["units"])
    assert held["kind"] == [0, 1]
    assert set(held["never"][0]) == {"0"}
    cells = iter(held["never"][1])
    for q in range(n):
        for k in range(q + 1):
            assert (next(cells) == "1") == (q - k >= 3)


def test_words_are_merged_where_tokens_are_parts_of_them(page):
    held = json.loads(page(["the zygote quick"], look="zygote").scripts[0])
    assert held["whole"]
    spans = [(start, stop) for start, stop, _ in held["words"]]
    assert [start for start, _ in spans[1:]] == [stop for _, stop in spans[:-1]]
    assert spans[-1][1] == len(held["units"]) == held["tokens"]
    assert json.loads(page([[278, 258]], n=1).scripts[0])["words"] == []


def test_a_thinned_map_says_so(page, tokenizer):  # noqa: F811
    made = page(["the quick brown fox jumps over the lazy dog and " * 12], n=1)
    held = json.loads(made.scripts[0])
    assert "Thinned:" in made.text
    assert f"{held['tokens']} tokens are drawn as {len(held['units'])} columns" in made.text
    assert "Shown at 64 of" in made.text
    assert len(held["units"]) == len(held["starts"])


def test_figures_are_those_of_the_run(model, tokenizer):  # noqa: F811
    found, _ = run(model, tokenizer, ["the quick brown fox"], watch=" dog", sampler=nd.Sampler(temperature=1.0, top_k=4))
    text = Page(render(found)).text
    assert f"{found.choices[0].candidates[0].logit:.2f}" in text
    assert "4 after top_k 4" in text
    assert f"{shares(found.looks, words(found.rows[0][: found.fed]))[0].weight:.3f}" in text
    assert "[1, 1, 380]" in text
    assert "here the model ends" in text


def test_several_texts_share_a_page(page):
    text = page(["the quick brown fox", "a"], n=2).text
    assert "Text 2: " in text
    assert "rectangle of 2 × " in text
    assert "What is traced is of the first of 2 texts." in text


def test_it_can_be_used_by_keyboard_and_is_named(page):
    made = page()
    assert {"lang": "en"} in made.with_tag("html")
    assert any(attrs.get("name") == "viewport" for attrs in made.with_tag("meta"))
    (canvas,) = made.with_tag("canvas")
    assert canvas["tabindex"] == "0"
    assert canvas["aria-label"]
    assert all("tabindex" in attrs for attrs in made.with_tag("div") if "scroll" in (attrs.get("class") or ""))


def test_a_character_in_pieces_is_whole(page):
    made = page(["독립"], n=0, show="tokens,probs")
    assert "독[1/" in made.text
    assert "�" not in made.text
    assert "no token was generated" not in made.text


@pytest.mark.slow
def test_the_template_is_in_the_wheel(tmp_path):
    pytest.importorskip("setuptools", reason="building needs setuptools")
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    for name in ("pyproject.toml", "nanodecoder/inside/report.html"):  # as they are now
        (source / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "nanodecoder/inside/report.html" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "most"), [(100, 3.0), (1000, 3.0)])
def test_a_report_on_smollm2_stays_below_three_megabytes(smollm2, tokens, most):
    model, own = nd.load_model(smollm2), nd.Tokenizer.load(smollm2)
    ids = own.encode((ROOT / "docs" / "generation.md").read_text())[:tokens]
    found, _ = run(model, own, [ids], n=1)
    html = render(found)
    assert len(html.encode()) < most * 1e6
    assert ("Thinned:" in Page(html).text) == (tokens > 128)
