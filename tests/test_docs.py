"""Every command and every piece of Python in README and docs runs as written."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import MODELS, ROOT
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_model, tokens

import nanodecoder as nd
from bench.__main__ import COMMANDS as BENCHES
from nanodecoder.__main__ import COMMANDS as COMMANDS_OF
from nanodecoder.training import TrainConfig
from nanodecoder.training.settings import check, from_toml

PAGES = [
    "README.md",
    "README.ko.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
    "weights/README.md",
]
TOURS = ("docs/tour.md", "docs/tour.ko.md")  # what these show is compared line by line, see test_tour.py


def blocks(kind: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        found += [(page, block) for block in re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)]
    return found


COMMANDS = [(page, line.split("  #")[0].strip()) for page, block in blocks("sh") for line in block.splitlines() if line.strip()]
RUNNABLE = ("python sample.py", "python train.py", "python -m nano")
RUN = dict.fromkeys(line for page, line in COMMANDS if line.startswith(RUNNABLE) and page not in TOURS)
# The same code in another language's page, whose comments alone are other, runs once
PYTHON = {re.sub(r"  #.*", "", code): (page, code) for page, code in reversed(blocks("python")) if page not in TOURS}


@pytest.fixture
def desk(tmp_path, stories) -> Path:
    """A folder as the README leaves it after the download; the smallest real model stands in if the large one is not there."""
    model = MODELS / "smollm2"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "smollm2").symlink_to(model if (model / "config.json").is_file() else stories)
    for name in ("sample.py", "train.py", "nanodecoder", "tests", "weights", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my.txt").write_text("Once upon a time there was a text.\nIt was short, but it was mine.\n" * 60)
    return tmp_path


def run(desk: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=desk, capture_output=True, text=True, env=env)


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_a_command_writes_what_it_should(desk, command):
    if "--against transformers" in command:
        pytest.importorskip("transformers", reason="the parity extra is not installed")
    if "--ckpt out/my" in command:
        assert run(desk, sys.executable, "train.py", "--data", "my.txt", "--max_iters", "2").returncode == 0
    # Three seconds show as well as three minutes that it works, and what is compiled is compared in test_verify
    short = command.replace("--max_time 180", "--max_time 3").replace("verify", "verify --no_compile")
    done = run(desk, sys.executable, *shlex.split(short)[1:])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or "train.py" in command or "-n 0" in command
    assert "--show" not in command or "\n== " in f"\n{done.stderr}"
    assert "--report" not in command or list(desk.glob("*.html"))
    assert "sample.py" not in command or "forward passes" in done.stderr
    assert "compare_cache" not in command or "positions computed" in done.stderr


def test_every_command_is_known_and_its_files_are_there():
    """Those that no test can run (a download, an installation, this very suite) at least name what exists."""
    for page, line in COMMANDS:
        words = shlex.split(line)
        if words[:2] == ["python", "-m"]:
            assert words[3] in {"nanodecoder": COMMANDS_OF, "bench": BENCHES}[words[2]], (page, line)
        elif words[0] == "python" and words[1] != "-i":
            assert (ROOT / words[1]).is_file(), (page, line)
        else:
            assert (
                words[:3] == ["python", "-i", "-c"]
                or words[:2] in (["pip", "install"], ["hf", "download"])
                or words == ["pytest"]
            ), (page, line)
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), (page, target)


def test_the_recipes_are_configurations():
    for path in (ROOT / "docs" / "recipes").glob("*.toml"):
        check(TrainConfig(**from_toml(path), data="a.txt"))


def test_the_download_command_has_the_options_that_are_used():
    hf = Path(sys.executable).parent / "hf"
    if not hf.is_file():
        pytest.skip("the hf command is not installed here")
    shown = subprocess.run([hf, "download", "--help"], capture_output=True, text=True).stdout
    assert "--local-dir" in shown


def test_the_family_that_the_page_adds_loads_a_checkpoint_of_it(tmp_path):
    """docs/families.md adds a family from nothing; a checkpoint with its names computes what ours with its weights does."""
    ((_, code),) = blocks("python family")
    config = tiny_config(qkv_bias=True, windows=5)
    model = tiny_model(qkv_bias=True, windows=5)
    try:
        write_heron(tmp_path, model)
        with pytest.raises(nd.CheckpointError, match="'heron', which is not supported; by its tensors it is like"):
            nd.load_model(tmp_path)
        exec(code, {})
        loaded = nd.load_model(tmp_path)
        assert loaded.config == config
        assert torch.equal(loaded(tokens()), model(tokens()))
        nd.save_model(tmp_path / "again", loaded)
        names = [load_file(folder / "model.safetensors").keys() for folder in (tmp_path, tmp_path / "again")]
        assert names[0] == names[1]
        assert torch.equal(nd.load_model(tmp_path / "again")(tokens()), model(tokens()))
        write_heron(tmp_path, model, dropout_at_inference=True)
        with pytest.raises(nd.CheckpointError, match="'dropout_at_inference' true; here it can be false"):
            nd.load_model(tmp_path)
    finally:
        nd.families.FAMILIES.pop("heron", None)


def write_heron(folder: Path, model: nd.Decoder, **keys) -> None:
    """A checkpoint as the page describes it, written without the code that reads it."""
    c = model.config
    raw = {"model_type": "heron", "vocab_size": c.vocab_size, "width": c.dim, "depth": c.n_layers, "heads": c.n_heads}
    raw |= {"kv_heads": c.n_kv_heads, "ffn_width": c.ffn_dim, "context": c.max_seq_len, "window": 5, **keys}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {"backbone.embed.weight": model.embed.weight, "backbone.norm.weight": model.norm.weight}
    tensors["head.weight"] = model.lm_head.weight
    for n, block in enumerate(model.blocks):
        at = f"backbone.layers.{n}."
        for kind in ("weight", "bias"):
            projections = [getattr(getattr(block.attn, f"{name}_proj"), kind) for name in "qkv"]
            tensors[f"{at}mix.qkv.{kind}"] = torch.cat(projections)
        tensors[f"{at}mix.out.weight"] = block.attn.o_proj.weight
        tensors |= {f"{at}norm1.weight": block.attn_norm.weight, f"{at}norm2.weight": block.ffn_norm.weight}
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{at}ffn.{name}.weight"] = getattr(block.ffn, name).weight
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("page", "code"), PYTHON.values(), ids=lambda value: value[:12])
def test_python_runs_as_written(desk, page, code):
    done = run(desk, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
