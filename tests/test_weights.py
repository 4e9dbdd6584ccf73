"""weights/: the models that come along write from their mark on, and are as small as they should be."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from conftest import ROOT, SHARED

import nanodecoder as nd
from nanodecoder.training.data import open_source, prepare
from nanodecoder.training.loop import summed_loss

WEIGHTS = ROOT / "weights"
BOTH = pytest.mark.parametrize("name", ["shakespeare", "names"])


def loss_of(name: str, corpus: str, format: str, val_fraction: float) -> float:
    """The validation loss of a shipped model, over the whole split."""
    path = SHARED / "data" / corpus
    if not path.is_file():
        pytest.skip(f"no {corpus} in {SHARED}; set NANODECODER_SHARED")
    model, tokenizer = nd.load_model(WEIGHTS / name), nd.Tokenizer.load(WEIGHTS / name)
    source = open_source(str(path), format, "utf-8", "nfc")
    data = prepare(source, tokenizer, block_size=model.config.max_seq_len, val_fraction=val_fraction)
    with torch.inference_mode():
        batches = [(float(summed_loss(model, batch)), batch.n_targets) for batch in data.val.in_order(32)]
    return sum(loss for loss, _ in batches) / sum(n for _, n in batches)


def test_together_they_take_less_than_15_megabytes():
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*") if path.is_file()) < 15e6


@BOTH
def test_nothing_but_the_mark_is_needed_to_begin(name):
    model, tokenizer = nd.load_model(WEIGHTS / name), nd.Tokenizer.load(WEIGHTS / name)
    assert model.generation.temperature == 0.8
    done = nd.complete(model, tokenizer, [""] * 3, max_new_tokens=40, seeds=[1, 2, 3])
    assert all(one.prompt_ids == [tokenizer.bos_id] for one in done)
    assert len({one.text for one in done}) == 3


def test_names_stop_by_themselves_and_never_outgrow_the_context():
    model, tokenizer = nd.load_model(WEIGHTS / "names"), nd.Tokenizer.load(WEIGHTS / "names")
    done = nd.complete(model, tokenizer, [""] * 50, max_new_tokens=100, seeds=range(50))
    assert all(one.text.isalpha() and one.text.islower() for one in done)
    assert all(len(one.text) <= model.config.max_seq_len for one in done)
    assert sum(one.finish_reason == "eos" for one in done) >= 49


def test_plays_have_speakers_and_lines():
    model, tokenizer = nd.load_model(WEIGHTS / "shakespeare"), nd.Tokenizer.load(WEIGHTS / "shakespeare")
    done = nd.complete(model, tokenizer, ["ROMEO:\n"], max_new_tokens=50, temperature=0.0)[0]
    assert len(done.text.split()) > 5
    forwards, backwards = (nd.score(model, tokenizer, text).total for text in ("To be, or not to be", "eb ot ton ro ,eb oT"))
    assert forwards > backwards + 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "corpus", "val_fraction"), [("shakespeare", "tinyshakespeare.txt", 0.1), ("names", "names.txt", 0.0312)]
)
def test_the_published_loss_is_what_they_have(name, corpus, val_fraction):
    (line,) = [line for line in (WEIGHTS / "README.md").read_text().splitlines() if line.startswith(f"| `{name}`")]
    *_, parameters, loss = (cell.strip() for cell in line.strip("|").split("|"))
    assert loss_of(name, corpus, "text" if name == "shakespeare" else "lines", val_fraction) == pytest.approx(
        float(loss), abs=2e-3
    )
    model = nd.load_model(WEIGHTS / name)
    assert sum(p.numel() for p in model.parameters()) == int(parameters.replace(",", ""))


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="transformers is not installed")
@BOTH
def test_transformers_opens_them(name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, their_tokenizer = (
        AutoModelForCausalLM.from_pretrained(WEIGHTS / name, dtype=torch.float32),
        AutoTokenizer.from_pretrained(WEIGHTS / name),
    )
    model, tokenizer = nd.load_model(WEIGHTS / name), nd.Tokenizer.load(WEIGHTS / name)
    ids = tokenizer.encode("anna")
    assert their_tokenizer("anna").input_ids == ids
    with torch.no_grad():
        assert (theirs(torch.tensor([ids])).logits - model(torch.tensor([ids]))).abs().max() < 1e-4
