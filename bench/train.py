"""Training beside nanoGPT: steps of its CPU recipe in turn, and the time that each takes.

python -m bench.train --nanogpt PATH_OF_A_CHECKOUT --data tinyshakespeare.txt

4 layers, dim 128, 4 heads, context 64, batch 12, AdamW, float32, eager unless --compile; A B A B in one process, medians.
The shapes: "as nanoGPT" has its parts and as many parameters (LayerNorm, GELU, learned positions), "ours" RMSNorm, SwiGLU, RoPE
and query/key norms.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nanodecoder import cli
from nanodecoder.cli import UsageError, option
from nanodecoder.training import TrainConfig
from nanodecoder.training.loop import Run
from nanodecoder.training.parallel import World

SIZES = {"n_layers": 4, "dim": 128, "n_heads": 4, "block_size": 64, "batch_size": 12}
AS_NANOGPT = {"norm": "layer", "ffn": "gelu", "positions": "learned", "qk_norm": False}


@dataclass
class Options:
    """What the command line says."""

    nanogpt: str | None = option(None, "folder of a nanoGPT checkout")
    data: str | None = option(None, "text to train on")
    repeats: int = option(30, "steps of each")
    compile: bool = option(False, "compile our blocks; nanoGPT stays as it is")


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    options = cli.parse(Options, argv, "python -m bench.train", "Training steps beside nanoGPT's.")
    if options.nanogpt is None or not (Path(options.nanogpt) / "model.py").is_file():
        raise UsageError("give the folder of a nanoGPT checkout, --nanogpt DIR (github.com/karpathy/nanoGPT)")
    if options.data is None:
        raise UsageError("give a text, --data FILE")
    with tempfile.TemporaryDirectory() as scratch:
        runs: dict[str, Callable[[], object]] = {"nanoGPT, AdamW": theirs(Path(options.nanogpt))}
        variants = {
            "as nanoGPT, AdamW": {"optimizer": "adamw", **AS_NANOGPT},
            "ours, AdamW": {"optimizer": "adamw"},
            "ours, Muon": {},
        }
        for number, (name, settings) in enumerate(variants.items()):
            config = TrainConfig(
                data=options.data, out_dir=f"{scratch}/{number}", device="cpu", compile=options.compile, **SIZES, **settings
            )
            run = Run(config, World(0, 1, torch.device("cpu")), [], None, False)
            run.model.train()
            runs[name] = run.step
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(options.repeats + 3):
            for name, step in runs.items():
                start = time.perf_counter()
                step()
                if turn >= 3:  # warm by now
                    times[name].append(time.perf_counter() - start)
    tokens = SIZES["block_size"] * SIZES["batch_size"]
    base = times["nanoGPT, AdamW"]
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(base, taken, strict=True))
        middle = statistics.median(taken)
        print(f"{name:20} {tokens / middle:8,.0f} tokens/s  {middle * 1e3:6.1f} ms a step  {ratio:.2f} times nanoGPT's speed")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")


def theirs(folder: Path) -> Callable[[], object]:
    """A step of nanoGPT: forward, backward, clip, AdamW."""
    sys.path.insert(0, str(folder))
    from model import GPT, GPTConfig

    sizes = {"block_size": SIZES["block_size"], "n_layer": 4, "n_head": 4, "n_embd": 128}
    model = GPT(GPTConfig(vocab_size=65, dropout=0.0, bias=False, **sizes))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    x, y = torch.randint(65, (2, SIZES["batch_size"], SIZES["block_size"]))

    def step() -> float:
        _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


if __name__ == "__main__":
    cli.run(main, "bench.train")
