"""Against transformers in float32, on redrawn tiny checkpoints of every family and option."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from parity import CASES, compare_greedy, old_dialect, oracle
from tiny import tokens

import nanodecoder as nd

transformers = pytest.importorskip("transformers", reason="the parity extra is not installed")
NAMES = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Each case's folder and oracle, made once."""
    cases = {}

    def make(name):
        if name not in cases:
            folder = tmp_path_factory.mktemp(name)
            cases[name] = (folder, oracle(name, folder))
        return cases[name]

    return make


@torch.no_grad()
def logits_of(model, ids) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0, -1]


def greedy(model, ids, n) -> list[int]:
    return nd.complete(model, None, [ids], max_new_tokens=n, ignore_eos=True)[0].ids


@NAMES
@pytest.mark.parametrize("path", ["fused", "explicit"])
@pytest.mark.parametrize("dialect", ["new", "old"])
@torch.no_grad()
def test_logits(name, path, dialect, made, tmp_path):
    """At every position, of a prompt of 12 and of one of 100. Rounding alone is about 2e-6."""
    folder, theirs = made(name)
    if dialect == "old":
        for file in ("config.json", "model.safetensors"):
            (tmp_path / file).write_bytes((folder / file).read_bytes())
        old_dialect(tmp_path)
        folder = tmp_path
    model = nd.load_model(folder)
    model.attention = path
    for columns in (12, 100):
        x = tokens(2, columns)
        assert (model(x) - theirs(x).logits).abs().max() <= (5e-6 if columns == 12 else 2e-5)


@NAMES
@torch.no_grad()
def test_through_the_cache_in_chunks_and_ragged(name, made):
    folder, theirs = made(name)
    model, x = nd.load_model(folder), tokens(1, 24)
    wanted = theirs(x).logits
    for sizes in ([24], [5, 4, 3, 12], [1] * 24):
        cache = nd.KVCache(model.config, 1, 24)
        got = torch.cat([model(piece, cache) for piece in x.split(sizes, dim=1)], 1)
        assert (got - wanted).abs().max() <= 2e-5
    cache, rows = nd.KVCache(model.config, 3, 30), tokens(3, 12)
    got = model(rows, cache, counts=[12, 1, 5])
    for row, count in enumerate([12, 1, 5]):
        assert (got[row, :count] - theirs(rows[row : row + 1, :count]).logits[0]).abs().max() <= 2e-5


@pytest.mark.parametrize("name", [name for name in CASES if "longrope" in name or "yarn" in name or "llama3" in name])
@pytest.mark.parametrize("columns", [31, 32, 33, 64])
@torch.no_grad()
def test_around_the_original_length(name, columns, made):
    """One below, at and one above the 32 tokens from which on the frequencies are stretched, alone and beside shorter rows."""
    folder, theirs = made(name)
    model, x = nd.load_model(folder), tokens(2, columns)
    assert (model(x) - theirs(x).logits).abs().max() <= 2e-5
    ragged = model(x, counts=[columns, 9])
    assert (ragged[0] - theirs(x[:1]).logits[0]).abs().max() <= 2e-5
    assert (ragged[1, :9] - theirs(x[1:, :9]).logits[0]).abs().max() <= 2e-5


@NAMES
@torch.no_grad()
def test_thirty_greedy_tokens_alone_and_in_a_batch(name, made):
    folder, theirs = made(name)
    model = nd.load_model(folder)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (1, 5, 12)]
    done = nd.complete(model, None, prompts, max_new_tokens=30, ignore_eos=True)
    for prompt, completion in zip(prompts, done, strict=True):
        x = torch.tensor([prompt])
        # With a cache transformers' Llama keeps longrope keys that were turned for a shorter row: a row alone is what counts
        options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "use_cache": "longrope" not in name}
        out = theirs.generate(x, attention_mask=torch.ones_like(x), **options)
        wanted = out[0, len(prompt) :].tolist()
        compare_greedy(lambda ids: logits_of(theirs, ids), lambda ids, n: greedy(model, ids, n), prompt, completion.ids, wanted)


@NAMES
@torch.no_grad()
def test_what_we_save_transformers_loads_with_equal_logits(name, made, tmp_path):
    folder, theirs = made(name)
    nd.save_model(tmp_path, nd.load_model(folder))
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert again.config.model_type == theirs.config.model_type
    assert (again(tokens()).logits - theirs(tokens()).logits).abs().max() <= 5e-6


@NAMES
@torch.no_grad()
def test_bfloat16_is_no_further_from_float32_than_transformers_is(name, made):
    folder, theirs = made(name)
    x = tokens(2, 24)
    exact = theirs(x).logits
    half = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    distance = (half(x).logits.float() - exact).abs()
    own = (nd.load_model(folder, dtype="bfloat16")(x).float() - exact).abs()
    assert own.mean() <= 1.25 * distance.mean()
    assert own.max() <= 1.6 * distance.max()


@torch.no_grad()
def test_a_head_of_its_own_despite_the_flag_is_believed_as_there(made, tmp_path):
    folder, _ = made("llama")
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with pytest.warns(UserWarning, match="ties the head"):
        model = nd.load_model(tmp_path)
    assert (model(tokens()) - theirs(tokens()).logits).abs().max() <= 5e-6


def test_filters_keep_what_transformers_keeps():
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    generator = torch.Generator().manual_seed(4)
    for trial in range(200):
        logits = torch.randn(2, 50, generator=generator) * 3
        if trial % 3 == 0:
            logits = logits.round()  # ties
        temperature, penalty = [0.5, 1.0, 1.7][trial % 3], [1.0, 1.3, 0.8][trial // 3 % 3]
        k, p, m = [0, 1, 5, 50, 80][trial % 5], [0.1, 0.5, 0.9, 0.999, 1.0][trial // 5 % 5], [0.0, 0.05, 0.3][trial // 7 % 3]
        ids = torch.randint(50, (2, 9), generator=generator)
        steps = [RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)]
        steps += [TopKLogitsWarper(k)] if k else []
        steps += [TopPLogitsWarper(p)] if p < 1 else []
        steps += [MinPLogitsWarper(m)] if m else []
        wanted = logits
        for step in steps:
            wanted = step(ids, wanted)
        rows = nd.sampler.Rows([0, 0], [9, 9], ids=ids.tolist())
        assert torch.equal(nd.Sampler(temperature, k, p, m, penalty).filter(logits, rows), wanted)


@pytest.mark.parametrize(
    ("style", "options"),
    [
        ("byte_level", {}),
        ("byte_level", {"bos": True}),
        ("byte_level", {"bos": True, "add_bos_token": False}),
        ("sentence_piece", {}),
        ("sentence_piece", {"template": "$A", "add_bos_token": True}),
        ("sentence_piece", {"template": "<s> $A </s>"}),
    ],
)
def test_tokenizers_agree(tmp_path, style, options):
    folder = getattr(tiny, style)(tmp_path, tokenizer_class="PreTrainedTokenizerFast", **options)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), nd.Tokenizer.load(folder)
    for text in [*tiny.CORPUS, "", " ", "  two  spaces ."]:
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)


@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
def test_tokenizers_of_two_files_agree(tmp_path, model_type):
    """vocab.json and merges.txt as older checkpoints have them, with the settings that facebook/opt-125m ships."""
    folder = tiny.byte_level(tmp_path / "made")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    mark = {
        "content": "<|end|>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": True,
        "__type": "AddedToken",
    }
    flags = {"add_bos_token": True} if model_type == "opt" else {}
    settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": mark, "eos_token": mark, "unk_token": mark, **flags}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), nd.Tokenizer.load(tmp_path)
    for text in [*tiny.CORPUS, "", "  two  spaces ."]:
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)
