"""Real pretrained models say what they are known to say."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from parity import compare_greedy

import nanodecoder as nd

STORY = """\
Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball. \
She wanted to play with it, but it was too high.
Lily's mom said, "Lily, let's go to the park." Lily was sad and didn't know what to do. She said, "I want to play with your \
ball, but I can't find it."
Lily was sad and didn't know what to do. She said, "I'm sorry, Lily. I didn't know what to do."
Lily didn't want to help her mom, so she"""

PROMPTS = [
    "The capital of South Korea is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n    ",
    "for (int i = 0; i < n; i++) {",
    "나는 오늘 학교에",
    "서울은 대한민국의",
    "Sarah fed the cat because it",
    "Write an email apologizing to Sarah for the gardening mishap.",
    "1, 1, 2, 3, 5, 8,",
    "The Shawshank",
]


def test_stories260k_writes_its_published_text(stories):
    model, tokenizer = nd.load_model(stories), nd.Tokenizer.load(stories)
    for options in ({}, {"use_cache": False}):
        done = nd.complete(model, tokenizer, [""], max_new_tokens=200, **options)[0]
        assert done.text == STORY
        assert done.prompt_ids == [1]


def test_stories260k_through_the_script(stories):
    command = [sys.executable, "sample.py", "--ckpt", str(stories), "--max_new_tokens", "200"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == STORY + "\n"
    assert "200 forward passes" in done.stderr


def test_stories260k_tokenizer_has_its_published_ids(stories):
    tokenizer = nd.Tokenizer.load(stories)
    text = "Once upon a time, there was 🐙"
    assert tokenizer.encode(text) == [1, 403, 407, 261, 378, 432, 383, 286, 410, 243, 162, 147, 156]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_stories260k_in_bfloat16_goes_its_own_way_but_not_far(stories):
    tokens = torch.tensor([nd.Tokenizer.load(stories).encode(STORY)])
    with torch.no_grad():
        exact, half = nd.load_model(stories)(tokens), nd.load_model(stories, dtype="bfloat16")(tokens).float()
    assert 1e-3 < (exact - half).abs().mean() < 0.1
    assert (exact.argmax(-1) == half.argmax(-1)).float().mean() > 0.95


@pytest.mark.slow
def test_smollm2_says_paris_in_its_chat_format(smollm2):
    model, tokenizer = nd.load_model(smollm2), nd.Tokenizer.load(smollm2)
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    done = nd.complete(model, tokenizer, [tokenizer.encode(text, special=True)], max_new_tokens=40)[0]
    assert (done.text, done.finish_reason) == ("The capital of France is Paris.", "eos")


@pytest.mark.slow
def test_smollm2_cuts_korean_into_many_tokens(smollm2):
    tokenizer = nd.Tokenizer.load(smollm2)
    korean, english = "나는 오늘 학교에 갔다.", "I went to school today."
    assert (len(tokenizer.encode(korean)), len(tokenizer.encode(english))) == (27, 6)
    assert tokenizer.decode(tokenizer.encode(korean)) == korean


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_is_as_transformers_has_it(smollm2):
    """Logits within 5e-4, and 100 greedy tokens of ten prompts the same (law 15), one by one and in one batch."""
    transformers = pytest.importorskip("transformers", reason="the parity extra is not installed")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    model, tokenizer = nd.load_model(smollm2), nd.Tokenizer.load(smollm2)
    assert tokenizer.encode(PROMPTS[4]) == transformers.AutoTokenizer.from_pretrained(smollm2)(PROMPTS[4]).input_ids
    batch = nd.complete(model, tokenizer, PROMPTS, max_new_tokens=100, ignore_eos=True)
    ties = 0

    def logits_of(ids):
        return theirs(torch.tensor([ids])).logits[0, -1]

    def go_on(ids, n):
        return nd.complete(model, None, [ids], max_new_tokens=n, ignore_eos=True)[0].ids

    for completion in batch:
        # Greedy is the likeliest token after each beginning: one pass along our text asks transformers at all of them
        prompt, whole = completion.prompt_ids, torch.tensor([[*completion.prompt_ids, *completion.ids]])
        logits = theirs(whole).logits
        assert (model(whole) - logits).abs().max() <= 5e-4
        before = logits[0, len(prompt) - 1 : -1]
        best, second = before.topk(2).values.unbind(-1)
        other = before.argmax(-1) != torch.tensor(completion.ids)
        assert (best - second)[other].lt(1e-3).all()
        ties += int(other.sum())
    print(f"ties: {ties}")
    prompt = batch[0].prompt_ids
    x = torch.tensor([prompt])
    out = theirs.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=100, do_sample=False, eos_token_id=None)[0]
    compare_greedy(logits_of, go_on, prompt, batch[0].ids, out[len(prompt) :].tolist())
    alone = nd.complete(model, tokenizer, PROMPTS[:1], max_new_tokens=100, ignore_eos=True)[0]
    compare_greedy(logits_of, go_on, alone.prompt_ids, alone.ids, batch[0].ids)
