"""Tokenizers made from a text: its characters, the 256 bytes, or byte pairs merged as often as it takes (BPE).

One mark, <|endoftext|>, is both BOS and EOS: it stands before a text and between texts, as in GPT-2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from ..tokenizer import SETTINGS, Tokenizer

MARK = "<|endoftext|>"
KINDS = ("char", "byte", "bpe")
NORMALIZATIONS = ("nfc", "none")


def make_tokenizer(kind: str, texts: Iterable[str], vocab_size: int, normalization: str = "nfc") -> Tokenizer:
    """A tokenizer of one of KINDS for `texts`, which may be pieces of one text.

    "char": one id for each character that occurs. "byte": 256 ids, and any text can be said. "bpe": bytes, and the commonest
    sequences up to `vocab_size` ids in all, cut as GPT-2 cuts (arXiv 1508.07909). Raises ValueError for an impossible size.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    normalizer = normalizers.NFC() if normalization == "nfc" else None
    if kind == "char":
        if normalizer is not None:
            texts = map(normalizer.normalize_str, texts)
        found: set[str] = set()
        for text in texts:
            found.update(text)
        characters = sorted(found)
        core = tokenizers.Tokenizer(models.WordLevel({c: i for i, c in enumerate([MARK, *characters])}))
        core.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        core.decoder = decoders.Fuse()
    else:
        core = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([MARK, *sorted(alphabet)])}, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "bpe")
        core.decoder = decoders.ByteLevel()
    core.normalizer = normalizer
    if kind == "bpe":
        if vocab_size < len(alphabet) + 1:
            raise ValueError(
                f"a BPE vocabulary holds the 256 bytes and {MARK}, so --vocab_size must be at least 257, not {vocab_size}"
            )
        core.train_from_iterator(
            texts,
            trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[MARK], initial_alphabet=alphabet, show_progress=False),
        )
    core.add_special_tokens([tokenizers.AddedToken(MARK, special=True, normalized=False)])
    mark = core.token_to_id(MARK)
    core.post_processor = processors.TemplateProcessing(
        single=f"{MARK} $A", pair=f"{MARK} $A {MARK} $B", special_tokens=[(MARK, mark)]
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": MARK,
        "eos_token": MARK,
        "clean_up_tokenization_spaces": False,
    }
    return Tokenizer(core, settings, {SETTINGS: (json.dumps(settings, indent=2) + "\n").encode()})
