"""The formula written out beside the fused kernel: time and memory against length, the difference, and which kernel ran.

python -m bench attention --ckpt DIR --lengths 128,512,2048

One layer of the checkpoint's shape on random queries, keys and values: a whole prompt, and one new token after as many others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanodecoder import cli
from nanodecoder.attention import explicit_attention, fused_attention, sight
from nanodecoder.cache import Placement
from nanodecoder.checkpoint import DTYPES
from nanodecoder.cli import UsageError, option
from nanodecoder.config import ModelConfig
from nanodecoder.inside.plan import kernel, read

from . import common
from .arms import memory
from .common import ratio, spread


@dataclass
class Options(common.Options):
    """What the command line says."""

    peers: str = option("none", "the two paths are each other's")
    lengths: str = option("128,512,2048", "tokens, with commas between")
    dtype: str = option("float32", "of queries, keys and values", choices=tuple(DTYPES))
    device: str = option("cpu", "cpu, cuda, cuda:1 or auto")


def case(
    config: ModelConfig, length: int, prompt: bool, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], Tensor]]:
    """Both paths on the same numbers: a prompt of `length` tokens, or one new token that sees as many."""
    generator = torch.Generator().manual_seed(length)
    columns = length if prompt else 1

    def draw(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, config.head_dim, generator=generator).to(device, dtype)

    q, k, v = draw(config.n_heads, columns), draw(config.n_kv_heads, length), draw(config.n_kv_heads, length)
    scale = config.head_dim**-0.5 if config.attn_scale is None else config.attn_scale
    at = Placement((length - columns,), (columns,), (length - columns,), columns, length, device)
    whole, seen = sight(at, None, "explicit"), sight(at, None, "fused")
    return {
        "explicit": lambda: explicit_attention(q, k, v, whole, scale),
        "fused": lambda: fused_attention(q, k, v, seen, scale),
    }


def extra_memory(run: Callable[[], Tensor], device: torch.device) -> int | None:
    """Bytes that a run held at most beyond what was there before; None where neither CUDA nor Linux's /proc says it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    except OSError:
        return None
    before = memory(peak=False)
    run()
    return max(0, memory(peak=True) - before)


@torch.no_grad()
def main(argv: Sequence[str]) -> None:
    """Print the table."""
    options = cli.parse(Options, argv, "python -m bench attention", "The explicit path of attention beside the fused one.")
    common.ways(options, "float32", {}, flags=())
    lengths = common.numbers(options.lengths, "--lengths")
    if not lengths or options.ways is not None:
        raise UsageError("--lengths takes one or more lengths here, and there are no --ways: both paths are run")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    config, device, dtype = read(options.ckpt).config, cli.choose_device(options.device), DTYPES[options.dtype]
    rows = [["", "tokens", "explicit, ms", "fused, ms", "spread, ms", "times", "explicit, MiB", "fused, MiB", "apart by"]]
    told: dict[str, dict[int, dict]] = {"prompt": {}, "step": {}}
    for what, found in told.items():
        for length in lengths:
            paths = case(config, length, what == "prompt", dtype, device)
            times: dict[str, list[float]] = {name: [] for name in paths}
            for turn in range(options.repeats + 1):
                for name, run in paths.items():
                    cli.synchronize(device)
                    start = time.perf_counter()
                    run()
                    cli.synchronize(device)
                    if turn:
                        times[name].append(time.perf_counter() - start)
            apart = float((paths["explicit"]().float() - paths["fused"]().float()).abs().max())
            held = {name: extra_memory(run, device) for name, run in paths.items()}
            faster = ratio(times["fused"], times["explicit"])
            found[length] = {"seconds": times, "bytes": held, "apart": apart, "times_as_fast": faster}
            middles = [f"{statistics.median(taken) * 1e3:.3f}" for taken in times.values()]
            sizes = ["?" if size is None else f"{size / 2**20:.1f}" for size in held.values()]
            rows.append(
                [what, f"{length:,}", *middles, spread(times["fused"], 1e3, 3), f"{faster:.2f}", *sizes, f"{apart:.1g}"]
            )
    kernels = {what: kernel(config, dtype, device, causal=what == "prompt") for what in told}
    heads = f"{config.n_heads} query and {config.n_kv_heads} key/value heads of {config.head_dim}"
    notes = [
        f"one layer, {heads}, {options.dtype} on {device}; spread: the fused one's; MiB: held at most beyond what goes in",
        f"the fused kernel: {kernels['prompt']} for a prompt, {kernels['step']} for a step",
    ]
    common.tell(options, "attention", rows, {"paths": told, "kernels": kernels}, notes)
    milliseconds = {
        f"{what} {name}": {length: statistics.median(one["seconds"][name]) * 1e3 for length, one in found.items()}
        for what, found in told.items()
        for name in ("explicit", "fused")
    }
    last = told["prompt"][lengths[-1]]["seconds"]
    bars = {f"prompt of {lengths[-1]}, {name}": [1e3 * one for one in taken] for name, taken in last.items()}
    common.draw(options, bars, "ms", None, milliseconds, "tokens")
