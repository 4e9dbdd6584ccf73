"""Seconds to load a checkpoint in float32, and from the start of the process to the first token, beside transformers.

python -m bench load --ckpt DIR

The whole process is `python sample.py` beside the shortest script with transformers: its clock starts before the process does
and stops at the first byte on its stdout. Then: which imports cost what.
"""

from __future__ import annotations

import gc
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import nanodecoder as nd
from nanodecoder import cli
from nanodecoder.cli import option
from nanodecoder.parts import CheckpointError

from . import common
from .common import OURS, ROOT, ratio, spread

THEIRS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
name, prompt = sys.argv[1:]
tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name, dtype="float32")
ids = tokenizer(prompt, return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=1, do_sample=False)[0]), flush=True)
"""
SHOWN = ("torch", "numpy", "tokenizers", "safetensors", "transformers", "nanodecoder")


@dataclass
class Options(common.Options):
    """What the command line says."""

    prompt: str = option("Once upon a time", "the text to continue")
    repeats: int = option(7, "how often each is timed, after one warm-up")


def seconds_to_load(load: Callable[[], object]) -> float:
    """One timed load; what was loaded is dropped afterwards, outside the clock."""
    gc.collect()
    start = time.perf_counter()
    model = load()
    elapsed = time.perf_counter() - start
    del model
    return elapsed


def seconds_to_first_byte(command: Sequence[str]) -> float:
    """From before the process starts to the first byte that it writes."""
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) as running:
        first = running.stdout.read(1)
        elapsed = time.perf_counter() - start
        running.communicate()
    if not first or running.returncode:
        raise CheckpointError(f"{' '.join(command[:3])} … wrote nothing, or failed with {running.returncode}")
    return elapsed


def imports(statement: str) -> dict[str, float]:
    """Seconds that an import statement spends in each of SHOWN, what they import included."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", statement], capture_output=True, text=True, cwd=ROOT)
    found = re.findall(r"\|\s*(\d+) \|\s*(\S+)$", done.stderr, re.M)
    return {name: int(taken) / 1e6 for taken, name in found if name in SHOWN}


def alternate(runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Each in turn, again and again; -> their seconds without the first, which warms up."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            elapsed = run()
            if turn:
                found[name].append(elapsed)
    return found


def main(argv: Sequence[str]) -> None:
    """Print both tables in one, and what the imports cost."""
    options = cli.parse(Options, argv, "python -m bench load", "Loading and the first token, beside transformers.")
    peers = {way.peer for way in common.ways(options, "float32", {"transformers": "transformers float32"}, flags=())} - {OURS}
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    ckpt = str(Path(options.ckpt).absolute())
    loads: dict[str, Callable[[], object]] = {OURS: lambda: nd.load_model(ckpt)}
    ours = [sys.executable, "sample.py", "--ckpt", ckpt, "--prompt", options.prompt, "-n", "1", "--temperature", "0"]
    commands = {OURS: ours}
    statements = ["import nanodecoder"]
    if peers:
        from transformers import AutoModelForCausalLM

        loads["transformers"] = lambda: AutoModelForCausalLM.from_pretrained(ckpt, dtype=torch.float32)
        commands["transformers"] = [sys.executable, "-c", THEIRS, ckpt, options.prompt]
        statements.append("from transformers import LlamaForCausalLM, AutoTokenizer")
    told = {
        "load": alternate({name: lambda load=load: seconds_to_load(load) for name, load in loads.items()}, options.repeats),
        "process to first token": alternate(
            {name: lambda command=command: seconds_to_first_byte(command) for name, command in commands.items()},
            options.repeats,
        ),
    }
    rows = [["", "", "s", "spread, s", "of transformers' time"]]
    for what, times in told.items():
        for name, taken in times.items():
            of = f"{1 / ratio(taken, times['transformers']):.2f}" if name == OURS and "transformers" in times else ""
            rows.append([what, name, f"{statistics.median(taken):.3f}", spread(taken, digits=3), of])
    costs = {statement: imports(statement) for statement in statements}
    notes = [f"{said}: {', '.join(f'{name} {taken:.2f} s' for name, taken in parts.items())}" for said, parts in costs.items()]
    common.tell(options, "load", rows, {"seconds": told, "imports": costs}, notes)
    common.draw(options, {f"{what}, {name}": taken for what, times in told.items() for name, taken in times.items()}, "seconds")
