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
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
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
}


def oracle(name: str, folder: Path, seed: int = 1) -> Any:
    """transformers' model for a case, in float32 and eager attention, saved in `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options = CASES[name]
    config = AutoConfig.for_model(model_type, **(SIZES | options))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    redraw(model, seed)
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
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else {("rope_type" if kind == "llama3" else "type"): kind, **rope}
    raw["torch_dtype"] = raw.pop("dtype")
    path.write_text(json.dumps(raw))


def compare_greedy(logits_of: Any, ours: list[int], prompt: list[int], theirs: list[int]) -> int:
    """Law 15: the same tokens, except where the reference's two best logits are closer than 1e-3. -> how many ties.

    `logits_of(ids)` gives the reference's logits after ids. At a tie the comparison would go on with the reference's
    token, which ours has not followed: it ends there, as passed.
    """
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            best = logits_of(prompt + theirs[:place]).topk(2).values
            assert best[0] - best[1] < 1e-3, f"token {place}: {a} instead of {b}, and no tie ({best.tolist()})"
            return 1
    assert len(ours) == len(theirs)
    return 0
