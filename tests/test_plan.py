"""plan.py: what is said before loading is what loading gives, without reading a weight."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import FIXTURES, ROOT
from tiny import byte_level, tiny_config, tiny_model

import nanodecoder as nd
from nanodecoder import __main__ as command
from nanodecoder import hub
from nanodecoder.cli import UsageError
from nanodecoder.inside import plan
from nanodecoder.inside.columns import size
from nanodecoder.storage import read_header

NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir() and path.name != "__pycache__")
PHI3 = {
    "model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 8192, "max_position_embeddings": 4096, "sliding_window": 2047,
    "original_max_position_embeddings": 4096, "dtype": "bfloat16", "rms_norm_eps": 1e-5,
}  # fmt: skip
OPT = {
    "model_type": "opt", "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "ffn_dim": 3072, "word_embed_proj_dim": 768, "max_position_embeddings": 2048,
}  # fmt: skip


def said(capsys, *argv: str) -> str:
    command.main(["plan", *argv])
    return capsys.readouterr().out


def folder_of(tmp_path, raw) -> str:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return str(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_cache_are_a_real_loads(name):
    source = plan.read(FIXTURES / name)
    model = nd.load_model(FIXTURES / name)
    assert source.config == model.config
    found = plan.need(source.config, 3, 50, torch.float32)
    assert found.weights == sum(p.untyped_storage().nbytes() for p in model.parameters())
    cache = nd.KVCache(model.config, 3, 50)
    assert found.cache == cache.keys.nbytes + cache.values.nbytes
    assert {key: shape for key, (_, shape) in source.tensors.items()} == {
        key: stored.shape for key, stored in read_header(FIXTURES / name / "model.safetensors").items()
    }


def test_phi3_takes_384_kib_a_token(tmp_path):
    """And 1.5 GiB at 4,096: the study notes' exercise, from its config.json alone."""
    source = plan.read(folder_of(tmp_path, PHI3))
    text = plan.made_of(source) + plan.takes(plan.Options(), source, 4096, plan.choose_dtype(None, source))
    assert "384 KiB a token: 2 × 32 layers × 32 heads × 96 × 2 bytes" in text
    assert re.search(r"cache, 1 row of 4,096 tokens +1\.5 GiB", text)
    assert "of the layers 32 see a window of 2,047" in text
    assert "3,821,079,552 parameters, bfloat16" in text
    assert plan.need(plan.read(tmp_path / "config.json").config, 8, 4096, torch.bfloat16).cache == 12 * 2**30


def test_a_config_alone_has_shapes(capsys, tmp_path):
    text = said(capsys, "--ckpt", folder_of(tmp_path, OPT), "--shapes", "4x7")
    assert "[4, 7, 50272]" in text
    assert "= 144 tables" in text
    assert "weights" not in text


def test_it_opens_with_what_the_model_is_made_of(capsys, tmp_path):
    nd.save_model(tmp_path, tiny_model(vocab_size=400, tied_head=True), nd.Tokenizer.load(byte_level(tmp_path)))
    lines = said(capsys, "--ckpt", str(tmp_path), "--batch", "2", "--context", "100").split("\n")
    pieces = nd.Tokenizer.load(tmp_path).vocab_size
    assert lines[1:7] == [
        "  2 blocks of width 64: attention, then feed-forward; RMSNorm before each",
        "  feed-forward of width 128, gated silu",
        "  4 query and 2 key/value heads of width 16 (grouped-query)",
        "  positions: RoPE with theta 10,000; every layer sees all before it; context 128",
        "  the head shares the embedding's weight; 400 rows of logits, and the tokenizer has "
        f"{pieces} pieces, so {400 - pieces} rows stand for nothing",
        f"  its files hold 20 tensors: {count(tmp_path):,} numbers of F32, {size(4 * count(tmp_path))}",
    ]


def count(folder) -> int:
    return sum(p.numel() for p in nd.load_model(folder).parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm": "layer", "parallel": True}, "attention and feed-forward side by side; LayerNorm before each"),
        ({"post_norm": True, "qk_norm": "head", "n_kv_heads": 1}, "(multi-query), queries and keys normed head by head"),
        ({"n_kv_heads": 4, "attn_softcap": 50.0}, "(multi-head); scores capped at 50"),
        ({"windows": (8, None), "sparse_stride": 3}, "of the layers 1 see a window of 8, 1 see all and one token in 3 beyond"),
        ({"rope": None, "learned_positions": True}, "positions: a learned vector for each position; every layer"),
        ({"rope": None}, "positions: none;"),
    ],
)
def test_every_choice_has_its_words(options, words):
    assert words in "; ".join(plan.description(tiny_config(**options)))


def test_training_adds_gradients_optimizer_and_activations(capsys):
    text = said(capsys, "--ckpt", "weights/names", "--train", "--batch", "16")
    whole = 4 * count(ROOT / "weights" / "names")
    assert re.search(rf"gradients +{size(whole)}", text)
    assert re.search(rf"adamw +{size(2 * whole)} +2.0 times the weights", text)
    assert re.search(r"muon +[\d.]+ [KM]iB +1\.\d times the weights; .* together", text)


def test_this_machine_is_measured(capsys):
    text = said(capsys, "--ckpt", "weights/names", "--device", "cpu")
    assert "GB/s (measured)\nattention in bfloat16: " in text
    assert "float32" in text
    assert text.count("fits") == 4
    assert 1e8 < plan.bandwidth(torch.device("cpu"), tries=1) < 1e13
    assert plan.total_memory(torch.device("cpu")) > 2**28


def test_the_kernel_is_the_one_that_runs(monkeypatch):
    """Where torch is told to do without kernels, the formula is named."""
    config, cpu = tiny_config(n_kv_heads=4), torch.device("cpu")
    assert plan.kernel(config, torch.float32, cpu, causal=True) == "flash attention"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert plan.kernel(config, torch.float32, cpu, causal=True) == "math"
    assert "formula written out" in plan.kernel(tiny_config(attn_softcap=5.0), torch.float32, cpu, causal=True)


def test_quantized_weights_are_smaller_and_said_to_be_so(capsys):
    text = said(capsys, "--ckpt", "weights/shakespeare", "--quantize", "int8")
    assert "1,282,016 parameters, int8 matrices beside bfloat16" in text
    assert (
        plan.need(tiny_config(), 1, 8, torch.float32, "int4").weights < plan.need(tiny_config(), 1, 8, torch.bfloat16).weights
    )


def test_the_dtype_is_the_checkpoints_own_unless_asked(tmp_path):
    raw = PHI3 | {"dtype": "float16"}
    assert plan.choose_dtype(None, plan.read(folder_of(tmp_path, raw))) == torch.float16
    assert plan.choose_dtype("float32", plan.read(tmp_path)) == torch.float32
    bare = plan.Source("x", tmp_path, {}, tiny_config(), {"a": ("BF16", (2,)), "b": ("F32", (2,)), "c": ("BF16", (2,))})
    assert plan.choose_dtype("auto", bare) == torch.bfloat16
    assert plan.choose_dtype(None, plan.Source("x", tmp_path, {}, tiny_config(), None)) == torch.float32


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "give a checkpoint folder, a config.json or a hub name"),
        (["--ckpt", "weights/names", "--batch", "0"], "--batch and --context must be 1 or above, not 0"),
        (["--ckpt", "weights/names", "--shapes", "4"], "--shapes takes ROWSxTOKENS, as 4x7, not '4'"),
        (["--ckpt", "weights/names", "--shapes", "0x7"], "--shapes takes ROWSxTOKENS"),
        (["--ckpt", "weights/names", "--quantise", "int8"], "did you mean --quantize"),
    ],
)
def test_wrong_usage_gets_a_sentence(argv, words):
    with pytest.raises(UsageError, match=words):
        plan.main(argv)


def test_what_is_no_decoder_is_refused(tmp_path):
    with pytest.raises(nd.CheckpointError, match="model_type 'rwkv', which is not supported; these are: "):
        plan.read(folder_of(tmp_path, {"model_type": "rwkv"}))
    with pytest.raises(UsageError, match="3000 tokens are asked for, and there are 2048 learned positions"):
        plan.main(["--ckpt", folder_of(tmp_path, OPT), "--context", "3000"])
    with pytest.raises(UsageError, match="there are 2048 learned positions"):
        plan.main(["--ckpt", folder_of(tmp_path, OPT), "--shapes", "1x3000"])


def test_no_weight_is_read(tmp_path, monkeypatch):
    """The weights' bytes are gone, and only their length is left; the plan stays the same."""
    shutil.copytree(FIXTURES / "qwen3", tmp_path / "qwen3")
    path = tmp_path / "qwen3" / "model.safetensors"
    length = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    path.write_bytes(path.read_bytes()[:length] + bytes(path.stat().st_size - length))
    assert plan.read(tmp_path / "qwen3").tensors == plan.read(FIXTURES / "qwen3").tensors


# ------------------------------------------------------------------------------------------------------------------ the hub


@pytest.fixture
def little_hub():
    from test_hub import LittleHub

    made = LittleHub()
    yield made
    made.close()


def python(tmp_path, address: str, *argv: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    env |= {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.run([sys.executable, *argv], cwd=tmp_path, capture_output=True, text=True, env=env)


def ask(tmp_path, address: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return python(tmp_path, address, "-m", "nanodecoder", "plan", *argv)


@pytest.mark.slow
def test_a_hub_name_is_planned_without_its_weights(tmp_path, little_hub):
    """Of the weights only the header is asked for, and no weights lie in the cache afterwards."""
    from test_hub import Repository

    files = {path.name: path.read_bytes() for path in (FIXTURES / "qwen3").iterdir() if path.name != "expected.safetensors"}
    little_hub.repositories["org/qwen3"] = Repository(files)
    done = ask(tmp_path, little_hub.address, "--ckpt", "org/qwen3", "--device", "cpu", "--context", "32")
    assert done.returncode == 0, done.stderr
    local = ask(tmp_path, little_hub.address, "--ckpt", str(FIXTURES / "qwen3"), "--device", "cpu", "--context", "32")
    one, other = (text.split("\n\ncpu:")[0].split("\n")[1:] for text in (done.stdout, local.stdout))
    assert one == other
    assert "its files hold" in done.stdout
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    load = "import nanodecoder as nd; nd.load_model('org/qwen3')"
    assert "the cache in" in ask(tmp_path, little_hub.address, "--ckpt", "org/qwen3", "--offline").stderr
    assert python(tmp_path, little_hub.address, "-c", load).returncode == 0
    offline = ask(tmp_path, "http://127.0.0.1:9", "--ckpt", "org/qwen3", "--offline", "--context", "32", "--device", "cpu")
    assert offline.stdout.split("\n\ncpu:")[0] == done.stdout.split("\n\ncpu:")[0]


@pytest.mark.slow
def test_what_the_hub_lacks_is_told(tmp_path, little_hub):
    from test_hub import Repository

    little_hub.repositories["org/bare"] = Repository({"README.md": b""})
    little_hub.repositories["org/pickled"] = Repository(
        {"config.json": (FIXTURES / "qwen3" / "config.json").read_bytes(), "pytorch_model.bin": b""}
    )
    bare = ask(tmp_path, little_hub.address, "--ckpt", "org/bare")
    assert bare.returncode == 1
    assert "the repository has no config.json" in bare.stderr
    missing = ask(tmp_path, little_hub.address, "--ckpt", "org/missing", "--offline")
    assert missing.returncode == 1
    assert "this is offline, and the cache" in missing.stderr
    assert "has no model of that name" in ask(tmp_path, little_hub.address, "--ckpt", "org/missing").stderr
    pickled = ask(tmp_path, little_hub.address, "--ckpt", "org/pickled", "--context", "32", "--device", "cpu")
    assert pickled.returncode == 0, pickled.stderr
    assert "no safetensors headers here" in pickled.stdout


def test_what_huggingface_hub_reads_is_what_the_header_says(monkeypatch, tmp_path):
    """Two files' tensors become one list."""
    import huggingface_hub
    from huggingface_hub import constants

    class Held:
        dtype, shape = "BF16", [2, 3]

    class File:
        def __init__(self, *names):
            self.tensors = dict.fromkeys(names, Held)

    whole = type("Metadata", (), {"files_metadata": {"a": File("x", "y"), "b": File("z")}})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    info = type("Info", (), {"sha": "abc", "siblings": [type("S", (), {"rfilename": "config.json"})]})
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, **how: info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **how: str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda name, revision: whole)
    assert hub.describe("org/name") == (tmp_path, dict.fromkeys(("x", "y", "z"), ("BF16", (2, 3))))
