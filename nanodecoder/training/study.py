"""Which part makes the difference? `python -m nanodecoder compare --data FILE`

Small variants of one decoder, of equal size, on equal tokens, over several seeds: what each loses on held-out text, at which
positions, what it can recall, what it takes and how fast it is. A finished run is written down at once; the same command again
makes only the runs that are missing, and further variants or seeds can be asked for.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from .. import cli
from ..checkpoint import load_model
from ..cli import UsageError, option
from ..completion import complete
from ..inside.memory import cache_per_token
from ..model import Decoder
from ..parts import CheckpointError
from ..tokenizer import Tokenizer
from . import recall
from .data import Data, Windows, open_source, prepare
from .findings import RUNS, Finding, Speed, draw, record, recorded, summary, tables
from .loop import LAST, Run, train
from .parallel import World
from .record import write
from .settings import TrainConfig
from .variants import BASE, at_equal_size, choose, count, decoder_of, reach
from .vocabulary import make_tokenizer

STUDY, CHART, LOG = "study.json", "compare.png", "train.log"
ROUNDS, STEPS = 5, 3  # turns in which speed is measured, and training steps in each
LINES, ASKED = 4000, 400  # lines of the recall probe: to learn from, and to be asked


@dataclass
class Options:
    """What the command line says."""

    data: str | None = option(None, "text to learn from (a file, or a folder of them)")
    variants: str = option("mqa,local,none", "names or parts to choose from, by commas; several changes at once: gqa+local")
    seeds: int = option(3, "runs of each variant")
    max_iters: int = option(300, "steps of each run")
    recall_iters: int = option(100, "steps of each run of the recall probe")
    n_layers: int = option(2, "blocks")
    dim: int = option(64, "width of the stream")
    n_heads: int = option(4, "query heads")
    block_size: int = option(64, "context in tokens, which losses are measured up to twice of")
    batch_size: int = option(16, "windows a step")
    window: int | None = option(None, "of the variants that have one (default: a quarter of --block_size)")
    sparse_stride: int | None = option(None, "of the variants that have one (default: half of the window)")
    out_dir: str | None = option(None, "folder of the comparison (default: out/compare-NAME of the data)")
    json: str | None = option(None, "write all figures to this file")
    device: str = option("auto", "cpu, cuda, mps or auto")


@dataclass(frozen=True)
class Study:
    """A comparison that can be made: checked, with everything that its runs share."""

    folder: Path
    configs: dict[str, TrainConfig]  # of each variant's run on the text, but for its seed and folder
    seeds: range
    recall_iters: int
    distances: tuple[int, int]  # of the recall probe, in tokens: one that a window holds, and one that no stack of them reaches
    data: Data
    beyond: Windows  # the held-out text in rows of twice the trained length
    shared: dict[str, int | str]  # settings that make runs comparable


def main(argv: Sequence[str]) -> None:
    """Make the runs that are missing, then print the table."""
    options = cli.parse(Options, argv, "python -m nanodecoder compare", "Train small variants of a decoder, and compare them.")
    study = plan(options)
    _open(study)
    print(describe(study), file=sys.stderr, flush=True)
    speeds = measure(study)
    made = [finding for finding in recorded(study.folder) if finding.variant in study.configs and finding.seed in study.seeds]
    there = {(finding.variant, finding.seed) for finding in made}
    # Seed by seed: whoever stops early has every variant as often
    missing = [(name, seed) for seed in study.seeds for name in study.configs if (name, seed) not in there]
    told = f"{len(made)} runs are there, {len(missing)} to make"
    print(f"{told}: about {_minutes(seconds_for(study, speeds, missing))} on this machine", file=sys.stderr, flush=True)
    bar = tqdm(missing, unit="run", dynamic_ncols=True, file=sys.stderr, disable=not sys.stderr.isatty())
    start = time.monotonic()
    for number, (name, seed) in enumerate(bar, 1):
        finding = run(study, name, seed)
        record(study.folder, finding)
        made.append(finding)
        # By now it shows how the machine keeps to the estimate
        pace = (time.monotonic() - start) / seconds_for(study, speeds, missing[:number])
        left = _minutes(pace * seconds_for(study, speeds, missing[number:]))
        figures = f"loss {finding.loss:.4f}, recall {finding.near:.0%} and {finding.far:.0%}, {finding.seconds:.0f} s"
        bar.write(f"{name}, seed {seed}: {figures}; about {left} left", file=sys.stderr)
    order = list(study.configs)
    made.sort(key=lambda finding: (order.index(finding.variant), finding.seed))
    found = summary(made, speeds)
    _write(options, study, found, made)
    print(tables(found, study.configs[BASE].block_size, study.distances))


# --------------------------------------------------------------------------------------------------------- before the runs


def plan(options: Options) -> Study:
    """Check what was asked for. Raises UsageError, with what would do, before anything is written."""
    if options.data is None or options.data == "-":
        raise UsageError(
            "give a text to learn from, --data FILE: some 100 KB of plain text will do, such as a book or tinyshakespeare.txt"
        )
    for name in ("seeds", "max_iters", "recall_iters", "n_layers", "dim", "n_heads", "batch_size"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} must be 1 or above, not {getattr(options, name)}")
    if options.block_size < 16:
        raise UsageError(f"--block_size must be 16 or above, not {options.block_size}: a line to recall from must fit in")
    window = options.window if options.window is not None else options.block_size // 4
    stride = options.sparse_stride if options.sparse_stride is not None else max(1, window // 2)
    if not 2 <= window < options.block_size or stride < 1:
        raise UsageError(
            f"--window must be from 2 to below --block_size, and --sparse_stride 1 or above, not {window} and {stride}"
        )
    if options.json is not None and not Path(options.json).resolve().parent.is_dir():
        raise UsageError(f"--json {options.json}: there is no folder {Path(options.json).parent}")
    variants = choose(options.variants, window, stride)
    base = TrainConfig(
        data=options.data,
        format="text",  # whatever its lines look like: rows longer than the trained length are needed
        n_layers=options.n_layers,
        dim=options.dim,
        n_heads=options.n_heads,
        block_size=options.block_size,
        batch_size=options.batch_size,
        max_iters=options.max_iters,
        eval_interval=options.max_iters,
        device=str(cli.choose_device(options.device)),
    )
    source = open_source(base.data, base.format, base.encoding, base.normalization)

    def characters(trained_on: Iterable[str], everything: Iterable[str]) -> Tokenizer:
        return make_tokenizer("char", everything, 0, base.normalization)

    data = prepare(source, characters, block_size=2 * base.block_size, val_fraction=base.val_fraction)
    vocab = data.tokenizer.vocab_size
    configs = {variant.name: at_equal_size(base, variant, vocab) for variant in variants}
    far = recall.farthest(base.block_size)
    for name, config in configs.items():
        furthest = reach(decoder_of(config, vocab))
        if furthest is not None and furthest >= far:
            raise UsageError(
                f"{name}: {config.n_layers} layers with a window of {config.window} reach {furthest} tokens back, and "
                f"a context of {base.block_size} has nothing beyond to recall: give a smaller --window or larger --block_size"
            )
    shared = {"data": data.fingerprint, "window": window, "sparse_stride": stride, "device": torch.device(base.device).type}
    names = ("max_iters", "recall_iters", "n_layers", "dim", "n_heads", "block_size", "batch_size")
    shared |= {name: getattr(options, name) for name in names}
    assert isinstance(data.val, Windows)
    return Study(
        folder=Path(options.out_dir or f"out/compare-{Path(options.data).resolve().stem}"),
        configs=configs,
        seeds=range(1, options.seeds + 1),
        recall_iters=options.recall_iters,
        distances=(max(1, window // 2), far),
        data=data,
        beyond=data.val,
        shared=shared,
    )


def _open(study: Study) -> None:
    """Make the study's folder, or go on in it. Raises UsageError for one that holds something else."""
    folder, kept = study.folder, study.folder / STUDY
    if folder.exists() and not kept.is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--out_dir {folder} holds something that is no comparison: name another")
    folder.mkdir(parents=True, exist_ok=True)
    if not kept.is_file():
        write(kept, json.dumps(study.shared, indent=2) + "\n")
        write(folder / "recall.jsonl", recall.text(LINES, study.distances, seed=0))
        return
    try:
        before = json.loads(kept.read_text(encoding="utf-8"))
    except ValueError:
        raise CheckpointError(f"{kept} cannot be read: name another --out_dir") from None
    for name, value in study.shared.items():
        if before.get(name) != value:
            told = "of another text" if name == "data" else f"made with --{name} {before.get(name)}, not {value}"
            raise UsageError(f"{folder} holds runs {told}: they cannot be compared; name another --out_dir")


def describe(study: Study) -> str:
    """What is compared on what."""
    base = study.configs[BASE]
    tokens = base.batch_size * base.block_size
    size = count(decoder_of(base, study.data.tokenizer.vocab_size))
    return (
        f"{', '.join(study.configs)}: {size:,} parameters, {base.n_layers} layers, dim {base.dim}, {len(study.seeds)} seeds, "
        f"{base.max_iters:,} steps of {tokens:,} tokens each; into {study.folder}"
    )


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"


# ----------------------------------------------------------------------------------------------------------------- speed


def measure(study: Study) -> dict[str, Speed]:
    """How fast each variant trains and generates: a few training steps and one text of a context, in turn and turn about.

    Whatever else the machine does then falls on all of them. The first turn warms up and is not counted.
    """
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in study.configs}
    world = World(0, 1, torch.device(study.configs[BASE].device))
    with (study.folder / LOG).open("a", encoding="utf-8") as log, redirect_stderr(log):
        runs = {name: Run(config, world, [], None, dry_run=True) for name, config in study.configs.items()}
    for turn in range(ROUNDS + 1):
        for name in list(runs) if turn % 2 else reversed(runs):
            training, decoding = _timed(runs[name])
            if turn:
                taken[name][0].append(training)
                taken[name][1].append(decoding)
    return {name: Speed(tuple(training), tuple(decoding)) for name, (training, decoding) in taken.items()}


def _timed(run: Run) -> tuple[float, float]:
    """Tokens a second of training steps, and of generating one row with the cache."""
    device, tokens, new = run.world.device, run.progress["tokens"], run.block_size - 1
    run.model.train()
    cli.synchronize(device)
    start = time.perf_counter()
    for _ in range(STEPS):
        run.step()
    cli.synchronize(device)
    between = time.perf_counter()
    complete(run.model, None, [[0]], max_new_tokens=new, ignore_eos=True, temperature=0.0)
    cli.synchronize(device)
    return (run.progress["tokens"] - tokens) / (between - start), new / (time.perf_counter() - between)


def seconds_for(study: Study, speeds: dict[str, Speed], runs: Sequence[tuple[str, int]]) -> float:
    """About how long these runs take: their steps, and passes over the held-out text, which take a third of a step's time."""
    total = 0.0
    for name, _ in runs:
        config, rates = study.configs[name], sorted(speeds[name].training)
        steps = (config.max_iters + study.recall_iters) * config.batch_size * config.block_size
        total += (steps + 2 * len(study.beyond.ids) / 3) / rates[len(rates) // 2]
    return total


# ------------------------------------------------------------------------------------------------------------------- runs


def run(study: Study, name: str, seed: int) -> Finding:
    """Train a variant on the text, and another of the same sizes to recall; -> what came of both.

    Leaves with the status of train.py when a signal ended the training.
    """
    start = time.monotonic()
    config = dataclasses.replace(study.configs[name], seed=seed)
    folder = study.folder / "runs" / f"{name}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)  # one that did not come to its end
    probe = dataclasses.replace(
        config,
        data=str(study.folder / "recall.jsonl"),
        format="jsonl",
        max_iters=study.recall_iters,
        eval_interval=study.recall_iters,
    )
    losses = []
    for part, settings in (("text", config), ("recall", probe)):
        with (study.folder / LOG).open("a", encoding="utf-8") as log, redirect_stderr(log):
            result = train(dataclasses.replace(settings, out_dir=str(folder / part)))
        if result.signal is not None:
            print(
                f"stopped in {name}, seed {seed}; finished runs are kept in {study.folder / RUNS}, the same command goes on",
                file=sys.stderr,
            )
            sys.exit(128 + result.signal)
        losses.append(result.val_loss)
    device = config.device
    model = load_model(folder / "text" / LAST, device=device)
    asked = load_model(folder / "recall" / LAST, device=device), Tokenizer.load(folder / "recall" / LAST)
    near, far = (recall.recalled(*asked, distance, ASKED, seed=1) for distance in study.distances)
    return Finding(
        variant=name,
        seed=seed,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        ffn_dim=model.config.ffn_dim,
        cache_bytes=cache_per_token(model.config, torch.float32),
        loss=losses[0],
        by_position=tuple(loss_by_position(model, study.beyond)),
        near=near,
        far=far,
        seconds=round(time.monotonic() - start, 1),
    )


@torch.no_grad()
def loss_by_position(model: Decoder, rows: Windows) -> list[float | None]:
    """The mean loss at each position of rows, in nats; None at positions for which the model learned no vector."""
    length = min(rows.block_size, model.config.max_seq_len) if model.config.learned_positions else rows.block_size
    summed, number = torch.zeros(length), 0
    for batch in rows.in_order(max(1, 16_384 // rows.block_size)):
        tokens, targets = batch.tokens[:, :length].to(model.device), batch.targets[:, :length].to(model.device)
        logits = model(tokens)  # (B, length, V)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view(targets.shape)
        summed += losses.sum(0).cpu()
        number += len(losses)
    return [*(summed / number).tolist(), *[None] * (rows.block_size - length)]


# ---------------------------------------------------------------------------------------------------------------- results


def _write(options: Options, study: Study, found: list[dict[str, object]], made: list[Finding]) -> None:
    """The chart, and the figures where they were asked for."""
    chart = study.folder / CHART
    if draw(made, study.configs[BASE].block_size, study.distances, chart):
        print(f"{chart} draws it", file=sys.stderr)
    else:
        print('no chart: pip install "nanodecoder[plot]" brings matplotlib, which draws it', file=sys.stderr)
    if options.json is not None:
        near, far = study.distances
        told = {"settings": study.shared, "recall": {"near": near, "far": far, "chance": recall.CHANCE}}
        told |= {"variants": found, "runs": [dataclasses.asdict(finding) for finding in made]}
        text = json.dumps(told, indent=2) + "\n"
        write(Path(options.json), text)
