"""Our weights in the layouts of peers that read no Hugging Face folder. Both know Llama's shape, and turn neighbours together.

gpt-fast: a state dict for its own Transformer. llama.cpp: a GGUF file without a tokenizer, since ids go in and ids come out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import nanodecoder as nd
from nanodecoder.config import ModelConfig, RopeConfig
from nanodecoder.parts import CheckpointError

GPT_FAST_NAMES = {
    "attn_norm": "attention_norm",
    "attn.o_proj": "attention.wo",
    "ffn_norm": "ffn_norm",
    "ffn.gate_proj": "feed_forward.w1",
    "ffn.down_proj": "feed_forward.w2",
    "ffn.up_proj": "feed_forward.w3",
}
GGUF_NAMES = {
    "attn_norm": "attn_norm",
    "attn.q_proj": "attn_q",
    "attn.k_proj": "attn_k",
    "attn.v_proj": "attn_v",
    "attn.o_proj": "attn_output",
    "ffn_norm": "ffn_norm",
    "ffn.gate_proj": "ffn_gate",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
}


def theta_of(config: ModelConfig, peer: str) -> float:
    """The base of RoPE's frequencies. Raises CheckpointError for a model that is not of Llama's plain shape."""
    rope = config.rope[0]
    plain = ModelConfig(
        **{name: getattr(config, name) for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")},
        **{name: getattr(config, name) for name in ("max_seq_len", "norm_eps", "tied_head")},
        rope=RopeConfig(theta=rope.theta) if rope else None,
    )
    if rope is None or plain != config:
        raise CheckpointError(f"{peer} is handed models of Llama's plain shape alone, and this one has options beyond it")
    return rope.theta


def neighbours(weight: Tensor, heads: int) -> Tensor:
    """Rows of a projection whose two halves of a head turn together -> rows of which neighbours do. (heads · D, dim)"""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def turned(model: nd.Decoder, layer: int) -> tuple[Tensor, Tensor]:
    """A layer's query and key weights for a peer that turns neighbours."""
    attn, config = model.blocks[layer].attn, model.config
    return neighbours(attn.q_proj.weight, config.n_heads), neighbours(attn.k_proj.weight, config.n_kv_heads)


def gpt_fast_args(code: ModuleType, config: ModelConfig) -> Any:
    """Its ModelArgs of our config."""
    sizes = {"block_size": config.max_seq_len, "n_layer": config.n_layers, "n_head": config.n_heads, "dim": config.dim}
    sizes |= {"vocab_size": config.vocab_size, "n_local_heads": config.n_kv_heads, "intermediate_size": config.ffn_dim}
    return code.ModelArgs(**sizes, rope_base=theta_of(config, "gpt-fast"), norm_eps=config.norm_eps)


@torch.no_grad()
def gpt_fast_state(model: nd.Decoder) -> dict[str, Tensor]:
    """Its state dict of our weights; a tied head is two names for one tensor."""
    state = {"tok_embeddings.weight": model.embed.weight, "norm.weight": model.norm.weight}
    state["output.weight"] = model.lm_head.weight
    for layer, block in enumerate(model.blocks):
        at = f"layers.{layer}."
        state[f"{at}attention.wqkv.weight"] = torch.cat([*turned(model, layer), block.attn.v_proj.weight])
        for ours, theirs in GPT_FAST_NAMES.items():
            state[f"{at}{theirs}.weight"] = block.get_submodule(ours).weight
    return state


def _named(model: nd.Decoder) -> Iterator[tuple[str, Tensor]]:
    """GGUF's names and our weights."""
    yield "token_embd.weight", model.embed.weight
    yield "output_norm.weight", model.norm.weight
    if not model.config.tied_head:
        yield "output.weight", model.lm_head.weight
    for layer, block in enumerate(model.blocks):
        own = dict(zip(("attn.q_proj", "attn.k_proj"), turned(model, layer), strict=True))
        for ours, theirs in GGUF_NAMES.items():
            yield f"blk.{layer}.{theirs}.weight", own.get(ours, block.get_submodule(ours).weight)


def _kind_of(name: str, weight: Tensor, kind: str) -> str:
    if weight.dim() == 1:
        return "F32"
    if kind.startswith("Q") and weight.shape[1] % 32:
        return "F16"
    return "Q8_0" if kind == "Q4_0" and name in ("token_embd.weight", "output.weight") else kind


@torch.no_grad()
def write_gguf(ckpt: str | os.PathLike[str], path: Path, kind: str) -> None:
    """A checkpoint as a GGUF file, its matrices as `kind` has them ("F32", "BF16", "F16", "Q8_0", "Q4_0"), norms in float32.

    Table and head of a Q4_0 file are Q8_0, and rows that are no multiple of 32 F16, about as llama.cpp's own tool has them.
    """
    import gguf

    if kind == "file":
        raise CheckpointError("llama.cpp's way 'file' is the one that --gguf names")
    model = nd.load_model(ckpt)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(theta_of(config, "llama.cpp"))
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, weight in _named(model):
        own = gguf.GGMLQuantizationType[_kind_of(name, weight, kind)]
        writer.add_tensor(name, gguf.quants.quantize(weight.contiguous().numpy(), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
