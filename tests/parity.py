"""transformers as the oracle: tiny checkpoints of its own making, every parameter redrawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny import redraw

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
}
HALF = LONGROPE | {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0], "partial_rotary_factor": 0.5}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 5}
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128}
NEOX_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
QWEN_WINDOWS = {"use_sliding_window": True, "max_window_layers": 1}

# name -> (model_type, what differs from SIZES)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-6-2": ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-eps": ("llama", {"rms_norm_eps": 1e-5}),
    "mistral-window-4": ("mistral", {"sliding_window": 4}),
    "mistral-window-64": ("mistral", {"sliding_window": 64}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 4}),
    "qwen2-window": ("qwen2", {"sliding_window": 4, **QWEN_WINDOWS}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "hidden_size": 96, "num_attention_heads": 6}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "llama-dynamic": (
        "llama",
        {"max_position_embeddings": 48, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.4, "truncate": False}}),
    "qwen2-yarn-betas": ("qwen2", {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3}}),
    "llama-longrope": ("llama", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 32}}),
    "phi3": ("phi3", {"sliding_window": 7}),
    "phi3-mha": ("phi3", {"num_key_value_heads": 4, "sliding_window": None}),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "phi3-longrope-half": ("phi3", {"rope_parameters": HALF, "original_max_position_embeddings": 32}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma-mqa": ("gemma", {"head_dim": 16, "num_key_value_heads": 1, "hidden_act": "gelu"}),
    "gemma2": ("gemma2", GEMMA),
    "gemma2-no-caps": ("gemma2", GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3_text": (
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "gpt2": ("gpt2", GPT2),
    "gpt2-gelu": ("gpt2", GPT2 | {"activation_function": "gelu", "n_inner": 96}),
    "opt": ("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "opt-no-bias": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "enable_bias": False, "activation_function": "gelu"}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "smollm3-interval": (
        "smollm3",
        {"no_rope_layer_interval": 2, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-serial": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False, "rope_parameters": NEOX_ROPE}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
}


def oracle(name: str, folder: Path, seed: int = 1) -> Any:
    """transformers' model for a case, in float32 and eager attention, saved in `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options = CASES[name]
    config = AutoConfig.for_model(model_type, **((SIZES if model_type != "gpt2" else IDS) | options))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    redraw(model, seed, offset=model_type.startswith("gemma"))
    if "eps" in name:
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.02)  # mean squares near eps, where it shows
    model.tie_weights()
    model.save_pretrained(folder)
    return model


def old_dialect(folder: Path) -> None:
    """Rewrite config.json as transformers 4 wrote it: rope_theta beside rope_scaling, torch_dtype."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw["torch_dtype"] = raw.pop("dtype")
    rope = raw.pop("rope_parameters", None)
    if rope and "full_attention" in rope:
        raw["rope_theta"] = rope["full_attention"]["rope_theta"]
        raw["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    elif rope:
        neox = raw["model_type"] == "gpt_neox"
        raw["rotary_emb_base" if neox else "rope_theta"] = rope.pop("rope_theta")
        fraction = rope.pop("partial_rotary_factor", None)
        if fraction is not None:
            raw["rotary_pct" if neox else "partial_rotary_factor"] = fraction
        kind = rope.pop("rope_type")
        raw["rope_scaling"] = None if kind == "default" else {("rope_type" if kind == "llama3" else "type"): kind, **rope}
    path.write_text(json.dumps(raw))


def compare_greedy(logits_of: Any, go_on: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> int:
    """Law 15: the same tokens, except where the reference's two best logits are closer than 1e-3. -> how many such ties.

    `logits_of(ids)` are the reference's logits after ids; `go_on(ids, n)` are ours: n greedy tokens after ids. At a tie the
    comparison goes on with the reference's token.
    """
    ties, done = 0, 0
    while ours != theirs[done:]:
        place = next(i for i, (a, b) in enumerate(zip(ours, theirs[done:], strict=True)) if a != b)
        done += place
        best = logits_of(prompt + theirs[:done]).topk(2).values
        assert best[0] - best[1] < 1e-3, f"token {done}: {ours[place]} instead of {theirs[done]}, no tie ({best.tolist()})"
        ties, done = ties + 1, done + 1
        ours = go_on(prompt + theirs[:done], len(theirs) - done)
    return ties
