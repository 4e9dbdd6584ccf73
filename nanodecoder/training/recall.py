"""A probe for what a decoder can carry along a line: the first letter, asked for at the end.

    b x z y w w z x y ? b

The letters between are drawn at random and say nothing; the answer is one of KEYS, so guessing is right once in len(KEYS).
Some lines are short and some as long as the context: so it shows when a model knows the task and cannot see so far.
"""

from __future__ import annotations

import json
import random

import torch

from ..model import Decoder
from ..tokenizer import Tokenizer

KEYS, BETWEEN, ASK = "abcdefgh", "wxyz", "?"
CHANCE = 1 / len(KEYS)


def line(chance: random.Random, distance: int) -> str:
    """A line whose question stands `distance` tokens behind the letter that it asks for."""
    key = chance.choice(KEYS)
    return key + "".join(chance.choices(BETWEEN, k=distance - 1)) + ASK + key


def farthest(block_size: int) -> int:
    """The distance at which a line and the mark before it fill a row of `block_size` tokens."""
    return block_size - 3


def text(count: int, distances: tuple[int, ...], seed: int) -> str:
    """A training text as JSON lines: `count` lines, of the distances in turn."""
    chance = random.Random(seed)
    lines = (line(chance, distances[number % len(distances)]) for number in range(count))
    return "".join(json.dumps({"text": one}) + "\n" for one in lines)


@torch.no_grad()
def recalled(model: Decoder, tokenizer: Tokenizer, distance: int, count: int, seed: int) -> float:
    """The part of `count` new lines whose question the model answers with the right letter, 0 to 1."""
    chance = random.Random(seed)
    rows = [tokenizer.encode(line(chance, distance)) for _ in range(count)]
    ids = torch.tensor(rows, device=model.device)  # (count, distance + 3): mark, letter, …, question, answer
    answers = model(ids[:, :-1])[:, -1].argmax(-1)
    return float((answers == ids[:, -1]).float().mean())
