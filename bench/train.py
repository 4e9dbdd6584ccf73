"""A training step: ours beside transformers on a checkpoint, or beside nanoGPT on its CPU recipe.

python -m bench train --ckpt DIR
python -m bench train --nanogpt PATH_OF_A_CHECKOUT --data tinyshakespeare.txt

The first is a step of AdamW in float32 on random tokens, every arm in a process of its own. The second has 4 layers, dim 128,
4 heads, context 64, batch 12, AdamW, float32, eager unless --compile, in one process. Its shapes: "as nanoGPT" has its parts
and as many parameters (LayerNorm, GELU, learned positions), "ours" RMSNorm, SwiGLU, RoPE and query/key norms.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nanodecoder import cli
from nanodecoder.cli import UsageError, option
from nanodecoder.inside.plan import read
from nanodecoder.training import TrainConfig
from nanodecoder.training.loop import Run
from nanodecoder.training.parallel import World

from . import common
from .common import all_ratios, beside, ratio, spread
from .load import alternate, seconds_to_load

SIZES = {"n_layers": 4, "dim": 128, "n_heads": 4, "block_size": 64, "batch_size": 12}
AS_NANOGPT = {"norm": "layer", "ffn": "gelu", "positions": "learned", "qk_norm": False}
PEERS = {"transformers": "transformers float32"}


@dataclass
class Options(common.Options):
    """What the command line says."""

    repeats: int = option(5, "steps of each, after one warm-up; beside nanoGPT 30 would do")
    batch_size: int = option(4, "rows of a step on a checkpoint")
    block_size: int = option(128, "tokens of each row")
    nanogpt: str | None = option(None, "folder of a nanoGPT checkout (github.com/karpathy/nanoGPT)")
    data: str | None = option(None, "text to train on beside nanoGPT")
    compile: bool = option(False, "compile our blocks beside nanoGPT, which stays as it is")


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    options = cli.parse(Options, argv, "python -m bench train", "Training steps beside transformers', or nanoGPT's.")
    if options.nanogpt is None:
        on_a_checkpoint(options)
    elif not (Path(options.nanogpt) / "model.py").is_file():
        raise UsageError(f"--nanogpt {options.nanogpt} is no checkout of nanoGPT (github.com/karpathy/nanoGPT): no model.py")
    elif options.data is None:
        raise UsageError("give a text to train on beside nanoGPT, --data FILE")
    else:
        beside_nanogpt(options)


def on_a_checkpoint(options: Options) -> None:
    """Fine-tuning steps of the same batch, beside transformers."""
    found = common.ways(options, "float32", PEERS, flags=())
    config, tokens = read(options.ckpt).config, options.batch_size * options.block_size
    if options.batch_size < 1 or not 2 <= options.block_size < config.max_seq_len:
        raise UsageError(f"--batch_size must be 1 or above, and --block_size from 2 to {config.max_seq_len - 1} here")
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(config.vocab_size, (options.batch_size, options.block_size + 1), generator=generator).tolist()
    with common.workers(found, options, options.block_size) as running:
        runs = common.turns(running, options.repeats, lambda worker: worker.ask("train", timed=True, rows=batch))
        peaks = {name: worker.ask("peak") for name, worker in running.items()}
    found = [way for way in found if way.name in running]
    times = {name: [run["seconds"] for run in answers] for name, answers in runs.items()}
    losses = {name: [run["result"] for run in answers] for name, answers in runs.items()}
    rows = [["", "tokens/s", "ms a step", "spread, ms", "× transformers", "peak MiB", "last loss"]]
    for way in found:
        middle = statistics.median(times[way.name])
        faster = beside(way, times, found).get("transformers", "")
        figures = [f"{tokens / middle:,.0f}", f"{middle * 1e3:.1f}", spread(times[way.name], 1e3), faster]
        rows.append([way.name, *figures, f"{peaks[way.name] / 2**20:.0f}", f"{losses[way.name][-1]:.5f}"])
    notes = [f"AdamW on {options.batch_size} × {options.block_size} random tokens"]
    told = {"seconds": times, "losses": losses, "peaks": peaks, "ratios": all_ratios(found, times)}
    common.tell(options, "train", rows, told, notes)
    common.draw(options, {name: [tokens / one for one in taken] for name, taken in times.items()}, "tokens/s")


def beside_nanogpt(options: Options) -> None:
    """Steps of nanoGPT's CPU recipe."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        steps: dict[str, Callable[[], object]] = {"nanoGPT, AdamW": nanogpt_step(Path(options.nanogpt))}
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
            steps[name] = run.step
        for step in list(steps.values()) * 2:
            step()  # warm up, which with --compile takes more than one
        times = alternate({name: lambda step=step: seconds_to_load(step) for name, step in steps.items()}, options.repeats)
    tokens, base = SIZES["block_size"] * SIZES["batch_size"], times["nanoGPT, AdamW"]
    rows = [["", "tokens/s", "ms a step", "spread, ms", "× nanoGPT"]]
    for name, taken in times.items():
        middle = statistics.median(taken)
        rows.append([name, f"{tokens / middle:,.0f}", f"{middle * 1e3:.1f}", spread(taken, 1e3), f"{ratio(taken, base):.2f}"])
    common.tell(options, "train", rows, {"seconds": times})
    common.draw(options, {name: [tokens / one for one in taken] for name, taken in times.items()}, "tokens/s")


def nanogpt_step(folder: Path) -> Callable[[], object]:
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
