"""Tiny models whose every parameter is redrawn, so that no default initialisation can hide a fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from nanodecoder import Decoder, ModelConfig


def redraw(model: torch.nn.Module, seed: int = 0, std: float = 0.15, offset: bool = False) -> None:
    """Every parameter from N(0, std); norm weights around 1, or around 0 where the model adds 1 itself (`offset`).

    Default biases are all zero and norms all one: with those no test bites.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            if ("norm" in name or ".ln_" in name) and name.endswith("weight") and not offset:
                parameter.add_(1.0)


def tiny_config(**options: Any) -> ModelConfig:
    sizes = {"vocab_size": 97, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128, "max_seq_len": 128}
    return ModelConfig(**(sizes | options))


def tiny_model(seed: int = 0, **options: Any) -> Decoder:
    model = Decoder(tiny_config(**options)).eval()
    redraw(model, seed, offset=bool(model.config.norm_offset))
    return model


def tokens(rows: int = 1, columns: int = 12, vocab_size: int = 97, seed: int = 5) -> torch.Tensor:
    return torch.randint(3, vocab_size, (rows, columns), generator=torch.Generator().manual_seed(seed))


CORPUS = [
    "The quick brown fox jumps over the lazy dog. Once upon a time there was a little girl.",
    "나는 오늘 학교에 갔다. 어텐션은 앞의 토큰을 본다. 그는 배가 고팠다.",
    "def add(a, b):\n    return a + b\n",
    "naïve café 🙂🐙 ©",
] * 3


def byte_level(folder: Path, bos: bool = False, **settings: Any) -> Path:
    """A byte-level BPE tokenizer in GPT-2's style: <|end|> is 0 and both BOS and EOS, as GPT-2 has it."""
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=["<|end|>", "<|im_start|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(CORPUS, trainer)
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    return _write(folder, core, {"bos_token": "<|end|>", "eos_token": "<|end|>", **settings})


def sentence_piece(folder: Path, template: str | None = "<s> $A", **settings: Any) -> Path:
    """A tokenizer in Llama 2's style: ▁ for spaces, one put in front, and bytes for what has no piece. <s> 1, </s> 2."""
    letters = sorted(set("".join(CORPUS[:1]).replace(" ", "")) | {"▁"})
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "w"), ("▁", "a"), ("i", "t"), ("l", "e")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces + [a + b for a, b in merges]))}
    core = Core(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1, right=0)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    if template:
        core.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    return _write(folder, core, {"bos_token": "<s>", "eos_token": "</s>", **settings})


def _write(folder: Path, core: Core, settings: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if not (folder / "config.json").is_file():
        (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder
