"""Whole process to the first token: `python sample.py` beside the shortest script with transformers, A B A B, medians.

python -m bench.startup --ckpt DIR

The clock starts before the process does and stops at the first byte on its stdout. Then: which imports cost what.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanodecoder import cli
from nanodecoder.cli import UsageError, option

ROOT = Path(__file__).parent.parent
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
class Options:
    """What the command line says."""

    ckpt: str | None = option(None, "checkpoint folder")
    prompt: str = option("Once upon a time", "the text to continue")
    repeats: int = option(7, "how often each is timed, after one warm-up")


def seconds_to_first_byte(command: Sequence[str]) -> float:
    """From before the process starts to the first byte that it writes."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) as running:
        first = running.stdout.read(1)
        elapsed = time.perf_counter() - start
        running.communicate()
    if not first or running.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} … wrote nothing, or failed with {running.returncode}")
    return elapsed


def imports(statement: str) -> dict[str, float]:
    """Seconds that an import statement spends in each of SHOWN, what they import included."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", statement], capture_output=True, text=True, cwd=ROOT)
    found = re.findall(r"\|\s*(\d+) \|\s*(\S+)$", done.stderr, re.M)
    return {name: int(taken) / 1e6 for taken, name in found if name in SHOWN}


def main(argv: Sequence[str]) -> None:
    """Print both medians, their spread, the ratio, and what the imports cost."""
    options = cli.parse(Options, argv, "python -m bench.startup", "Whole process to the first token, beside transformers.")
    if options.ckpt is None:
        raise UsageError("give a checkpoint folder, --ckpt DIR")
    ckpt = str(Path(options.ckpt).absolute())
    ours = [sys.executable, "sample.py", "--ckpt", ckpt, "--prompt", options.prompt, "-n", "1", "--temperature", "0"]
    commands = {"python sample.py": ours, "transformers": [sys.executable, "-c", THEIRS, ckpt, options.prompt]}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(options.repeats + 1):
        for name, command in commands.items():
            elapsed = seconds_to_first_byte(command)
            if turn > 0:
                times[name].append(elapsed)
    for name, taken in times.items():
        print(f"{name:18} median {statistics.median(taken):.2f} s   {min(taken):.2f} to {max(taken):.2f}")
    ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
    print(f"ratio {ratio:.2f} (below 1: sample.py is faster)")
    for statement in ("import nanodecoder", "from transformers import LlamaForCausalLM, AutoTokenizer"):
        parts = ", ".join(f"{name} {taken:.2f} s" for name, taken in imports(statement).items())
        print(f"{statement}: {parts}")


if __name__ == "__main__":
    cli.run(main, "bench.startup")
