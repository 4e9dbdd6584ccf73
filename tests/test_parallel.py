"""training/parallel.py: real processes under torchrun train as one does, and what they write is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

NAMES = ["emma", "olivia", "ava", "isabella", "sophia", "mia", "amelia", "harper", "evelyn", "abigail", "ada", "zoe"] * 8
SIZES = "--n_layers 2 --dim 32 --n_heads 2 --warmup_iters 2 --eval_interval 4 --log_interval 1 --device cpu".split()


def run(processes: int, *flags: str, timeout: int = 240) -> subprocess.CompletedProcess[str]:
    alone = [sys.executable, "train.py"]
    together = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone", "train.py"]
    return subprocess.run(
        [*(alone if processes == 1 else together), *flags, *SIZES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )


def metrics(folder, key: str) -> list[float]:
    return [entry[key] for line in (folder / "metrics.jsonl").read_text().splitlines() if key in (entry := json.loads(line))]


@pytest.fixture
def names(tmp_path):
    """Examples of different lengths, so that processes have different numbers of targets."""
    path = tmp_path / "names.txt"
    path.write_text("\n".join([*NAMES, *(name * 3 for name in NAMES[:12])]))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("ddp", ["--optimizer", "muon"]),
        ("ddp", ["--optimizer", "adamw", "--gradient_accumulation_steps", "2"]),
        ("fsdp", ["--optimizer", "adamw", "--gradient_accumulation_steps", "2"]),
        ("fsdp", ["--optimizer", "muon"]),
    ],
)
def test_two_processes_learn_what_one_does_with_both_batches(tmp_path, names, kind, more):
    """And the run of two, stopped in its middle, can be gone on with by one."""
    one, two = tmp_path / "one", tmp_path / "two"
    alone = run(1, "--data", str(names), "--out_dir", str(one), "--batch_size", "8", "--max_iters", "8", *more)
    assert alone.returncode == 0, alone.stderr
    common = ["--out_dir", str(two), "--parallel", kind]
    first = run(2, "--data", str(names), "--batch_size", "4", "--max_iters", "8", "--max_steps_now", "5", *common, *more)
    assert first.returncode == 0, first.stderr
    assert first.stderr.count("parameters:") == 1  # one process speaks
    second = run(1, "--resume", str(two), "--batch_size", "8", "--max_steps_now", "8")
    assert second.returncode == 0, second.stderr
    assert metrics(two, "loss") == pytest.approx(metrics(one, "loss"), abs=2e-4)
    assert metrics(two, "val_loss") == pytest.approx(metrics(one, "val_loss"), abs=2e-4)
    ours, theirs = load_file(two / "last" / "model.safetensors"), load_file(one / "last" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=2e-3, rtol=2e-3)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run_with_a_message(tmp_path, names):
    """The second of two raises at its third step; nobody waits for ever."""
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from nanodecoder.training import loop\n"
        "step = loop.Run.step\n"
        "def dies(self):\n"
        "    if self.world.rank == 1 and self.progress['step'] == 2:\n"
        "        os._exit(9)\n"
        "    return step(self)\n"
        "loop.Run.step = dies\n"
        "import train\n"
        "from nanodecoder import cli\n"
        "cli.run(train.main, 'train.py')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", str(script)]
    flags = ["--data", str(names), "--out_dir", str(tmp_path / "out"), "--max_iters", "50", *SIZES]
    done = subprocess.run(command + flags, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "exitcode  : 9" in done.stderr
