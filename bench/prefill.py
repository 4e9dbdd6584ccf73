"""A prompt's pass, to the logits of its last token: tokens a second by its length, beside the peers.

python -m bench prefill --ckpt DIR --lengths 128,512,2048
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nanodecoder import cli
from nanodecoder.cli import UsageError, option
from nanodecoder.inside.plan import read

from . import common
from .common import OURS, all_ratios, beside, spread
from .decode import PEERS as DECODERS
from .decode import prompt_ids

PEERS = DECODERS | {"gpt-fast": "gpt-fast float32,gpt-fast bfloat16"}  # of it the step alone is compiled


@dataclass
class Options(common.Options):
    """What the command line says."""

    lengths: str = option("512", "tokens of the prompts, with commas between")


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    options = cli.parse(Options, argv, "python -m bench prefill", "Tokens a second of a prompt, beside the peers.")
    found = common.ways(options, "float32,bfloat16", PEERS, flags=())
    lengths = common.numbers(options.lengths, "--lengths")
    limit = read(options.ckpt).config.max_seq_len
    if not lengths or lengths[-1] >= limit:
        raise UsageError(f"--lengths takes prompts of 1 to {limit - 1} tokens here, not {options.lengths!r}")
    peers = list(dict.fromkeys(way.peer for way in found if way.peer != OURS))
    rows = [["tokens of the prompt", "", "tokens/s", "ms", "spread, ms", *(f"× {peer}" for peer in peers)]]
    told, lines = {}, {way.name: {} for way in found}
    with common.workers(found, options, lengths[-1] + 1) as running:
        for length in lengths:
            ids = prompt_ids(options.ckpt, length)
            runs = common.turns(running, options.repeats, lambda worker, ids=ids: worker.ask("decode", ids=ids, n=1))
            times = {name: [run["seconds"][0] for run in answers] for name, answers in runs.items()}
            told[length] = {"seconds": times, "ratios": all_ratios(found, times)}
            found = [way for way in found if way.name in running]
            for way in found:
                middle = statistics.median(times[way.name])
                lines[way.name][length] = length / middle
                ratios = beside(way, times, found)
                figures = [f"{length / middle:.0f}", f"{middle * 1e3:.1f}", spread(times[way.name], 1e3)]
                rows.append([f"{length:,}", way.name, *figures, *(ratios[peer] for peer in peers)])
        peaks = {name: worker.ask("peak") for name, worker in running.items()}
    notes = ["peak MiB, loading included: " + ", ".join(f"{name} {peak / 2**20:.0f}" for name, peak in peaks.items())]
    common.tell(options, "prefill", rows, {"lengths": told, "peaks": peaks}, notes)
    longest = told[lengths[-1]]["seconds"]
    bars = {name: [lengths[-1] / taken for taken in each] for name, each in longest.items()}
    common.draw(options, bars, "tokens/s", None, lines if len(lengths) > 1 else None, "tokens of the prompt")
