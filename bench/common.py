"""What the commands share: options, arms in processes of their own, turns, and how figures are told.

An arm is one way of computing: "float32 compiled", "int8", "transformers bfloat16", "llama.cpp Q8_0". Each has a process of its
own (see `arms.py`), so that neither memory nor threads are shared. They are asked in turn, A B A B, again and again after a
warm-up, and medians are told with the smallest and the largest.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nanodecoder.cli import UsageError, option
from nanodecoder.inside import plan
from nanodecoder.inside.columns import table
from nanodecoder.parts import CheckpointError
from nanodecoder.storage import find_folder

ROOT = Path(__file__).parent.parent
OURS = "nanodecoder"
PRECISIONS = {  # what each can be asked for, in the order of ours that means about the same
    OURS: ("float32", "bfloat16", "float16", "int8", "int4"),
    "transformers": ("float32", "bfloat16", "float16"),
    "gpt-fast": ("float32", "bfloat16", "float16", "int8"),
    "llama.cpp": ("F32", "BF16", "F16", "Q8_0", "Q4_0", "file"),
}
ALIKE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "Q8_0": "int8", "Q4_0": "int4"}
INSTALL = {"transformers": "pip install transformers", "llama_cpp": "pip install llama-cpp-python", "gguf": "pip install gguf"}
GPT_FAST = ("model.py", "generate.py", "quantize.py")  # what its checkout must have


@dataclass
class Options:
    """What every command takes."""

    ckpt: str | None = option(None, "checkpoint folder")
    peers: str = option("transformers", "whom to measure beside, with commas between: transformers,llama.cpp,gpt-fast, or none")
    ways: str | None = option(None, "the arms themselves, with commas between: 'int8 compiled,transformers float32'")
    threads: int | None = option(None, "of every arm (default: torch's own choice)")
    repeats: int = option(3, "how often each is timed, after one warm-up")
    gpt_fast: str | None = option(None, "folder of a gpt-fast checkout (github.com/meta-pytorch/gpt-fast)")
    gguf: str | None = option(None, "file for llama.cpp (default: some are written from the checkpoint, and removed)")
    json: str | None = option(None, "write all figures to this file")
    plot: str | None = option(None, "draw a chart into this file (.png)")


@dataclass(frozen=True)
class Way:
    """An arm's name, taken apart."""

    name: str
    peer: str
    precision: str
    compiled: bool = False
    exact: bool = False
    alone: bool = False

    @classmethod
    def of(cls, name: str, flags: Sequence[str]) -> Way:
        """Read "[peer] precision [flags]". Raises UsageError."""
        words = name.split()
        peer = words.pop(0) if words and words[0] in PRECISIONS else OURS
        known = PRECISIONS[peer]
        if not words or words[0] not in known:
            raise UsageError(f"the way {name!r} names no precision of {peer}: {', '.join(known)}")
        for word in words[1:]:
            if (
                word not in flags
                or (peer != OURS and word == "exact")
                or (peer in ("transformers", "llama.cpp") and word == "compiled")
            ):
                raise UsageError(f"the way {name!r}: {word!r} is nothing that can be asked of {peer} here")
        return cls(" ".join(name.split()), peer, words[0], **dict.fromkeys(words[1:], True))


def ways(options: Options, ours: str, peers: Mapping[str, str], flags: Sequence[str] = ("compiled",)) -> list[Way]:
    """The arms of a run: `ours` and what `peers` has for those asked for, or exactly what --ways says.

    Raises UsageError where one is unknown, or cannot be had here.
    """
    if options.ckpt is None:
        raise UsageError("give a checkpoint folder, --ckpt DIR")
    if options.repeats < 1:
        raise UsageError(f"--repeats must be 1 or above, not {options.repeats}")
    if options.plot is not None and not find_spec("matplotlib"):
        raise UsageError('--plot draws with matplotlib, which is not installed: pip install -e ".[plot]"')
    find_folder(options.ckpt)
    names = [ours]
    for peer in listed(options.peers) if options.peers != "none" else ():
        if peer not in peers:
            raise UsageError(f"--peers has {peer!r}; here it can be none or {', '.join(peers)}")
        names.append(peers[peer])
    found = [Way.of(name, flags) for name in listed(options.ways or ",".join(names))]
    for peer in dict.fromkeys(way.peer for way in found):
        if peer != OURS and peer not in peers:
            raise UsageError(f"--ways names {peer!r}, which is not measured here; it can be {', '.join([OURS, *peers])}")
        there(peer, options)
    return list(dict.fromkeys(found))


def there(peer: str, options: Any) -> None:
    """Raise UsageError where a peer cannot be had."""
    packages = {
        "transformers": ["transformers"],
        "llama.cpp": ["llama_cpp", *(["gguf"] if getattr(options, "gguf", None) is None else [])],
    }
    for package in packages.get(peer, ()):
        if not find_spec(package):
            raise UsageError(f"{peer} needs {package}, which is not installed: {INSTALL[package]}, or leave it out of --peers")
    if peer == "llama.cpp" and options.gguf is not None and not Path(options.gguf).is_file():
        raise UsageError(f"--gguf {options.gguf} is no file")
    if peer == "gpt-fast":
        if options.gpt_fast is None:
            raise UsageError(
                "gpt-fast is measured from a checkout: git clone github.com/meta-pytorch/gpt-fast, and --gpt_fast DIR"
            )
        missing = [name for name in GPT_FAST if not (Path(options.gpt_fast) / name).is_file()]
        if missing:
            raise UsageError(f"--gpt_fast {options.gpt_fast} is no checkout of gpt-fast: it has no {missing[0]}")


def listed(text: str) -> list[str]:
    """What stands between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str, flag: str) -> list[int]:
    """Whole numbers between commas, smallest first. Raises UsageError."""
    if not all(part.isdecimal() and int(part) > 0 for part in listed(text)):
        raise UsageError(f"{flag} takes whole numbers above 0 with commas between, not {text!r}")
    return sorted({int(part) for part in listed(text)})


# ------------------------------------------------------------------------------------------------------------------- arms


class Worker:
    """A process that holds one arm and does what it is asked. `about`: what it says of itself once it is loaded."""

    def __init__(self, way: Way, **given: Any) -> None:
        self.way = way
        env = os.environ | {
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "bench.arms", json.dumps(asdict(way) | given)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        try:
            self.about: dict[str, Any] = self._answer()
        except CheckpointError:
            self.close()
            raise

    def ask(self, do: str, **given: Any) -> Any:
        """Let it do something; -> what came of it. Raises CheckpointError where it failed."""
        print(json.dumps({"do": do, **given}), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise CheckpointError(f"{self.way.name}: its process ended with status {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise CheckpointError(f"{self.way.name}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@contextmanager
def workers(found: Sequence[Way], options: Options, slots: int) -> Iterator[dict[str, Worker]]:
    """A loaded process for each way, for texts of up to `slots` tokens."""
    with ExitStack() as stack:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running: dict[str, Worker] = {}
        for way in found:
            print(f"{way.name}: loading", file=sys.stderr, flush=True)
            given: dict[str, Any] = {"ckpt": str(options.ckpt), "gpt_fast": options.gpt_fast, "slots": slots}
            if way.peer == "llama.cpp":
                given["gguf"] = options.gguf or str(scratch / f"{way.precision}.gguf")
                if options.gguf is None:
                    from .convert import write_gguf

                    write_gguf(options.ckpt, Path(given["gguf"]), way.precision)
            try:
                worker = Worker(way, **given)
            except CheckpointError as error:
                if way.peer == OURS:
                    raise
                print(f"left out: {error}", file=sys.stderr, flush=True)
                continue
            stack.callback(worker.close)
            running[way.name] = worker
        yield running


def turns(running: dict[str, Worker], repeats: int, ask: Callable[[Worker], Any]) -> dict[str, list[Any]]:
    """Ask each in turn, again and again; -> their answers without the first, which warms up.

    A peer that fails is told on stderr and leaves `running`; where one of ours does, CheckpointError is raised.
    """
    found: dict[str, list[Any]] = {name: [] for name in running}
    for turn in range(repeats + 1):
        for name, worker in list(running.items()):
            start = time.perf_counter()
            try:
                answer = ask(worker)
            except CheckpointError as error:
                if worker.way.peer == OURS:
                    raise
                print(f"left out: {error}", file=sys.stderr, flush=True)
                del running[name], found[name]
                continue
            print(f"{name}: {time.perf_counter() - start:.2f} s{'' if turn else ', to warm up'}", file=sys.stderr, flush=True)
            if turn:
                found[name].append(answer)
    return found


# ---------------------------------------------------------------------------------------------------------------- figures


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times as fast as theirs: the median over the turns of their seconds by ours."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def share(read: float, speed: float, seconds: float) -> float:
    """Of the limit: the seconds that reading takes (bytes by bytes a second) by those that were taken."""
    return read / speed / seconds


def bandwidth(tries: int = 5) -> float:
    """Bytes a second that all threads together read from memory: the best of a sum and of a product with a vector."""
    block = torch.ones(2**27)  # 512 MiB, beyond any cache
    best = plan.bandwidth(torch.device("cpu"), tries)
    for _ in range(tries):
        start = time.perf_counter()
        block.sum()
        best = max(best, block.nbytes / (time.perf_counter() - start))
    return best


def beside(way: Way, times: Mapping[str, Sequence[float]], found: Sequence[Way]) -> dict[str, str]:
    """peer -> how many times as fast as it at the same precision; in brackets beside its first way where it has none."""
    told = {}
    for peer in dict.fromkeys(other.peer for other in found if other.peer != OURS):
        theirs = [other for other in found if other.peer == peer]
        same = [other for other in theirs if ALIKE.get(other.precision, other.precision) == way.precision]
        times_as_fast = ratio(times[way.name], times[(same or theirs)[0].name])
        told[peer] = "" if way.peer != OURS else f"{times_as_fast:.2f}" if same else f"({times_as_fast:.2f})"
    return told


def all_ratios(found: Sequence[Way], times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Ours -> every arm of a peer -> how many times as fast."""
    ours, theirs = ([way.name for way in found if (way.peer == OURS) is mine] for mine in (True, False))
    return {one: {other: ratio(times[one], times[other]) for other in theirs} for one in ours}


def spread(values: Sequence[float], unit: float = 1.0, digits: int = 1) -> str:
    """From the smallest to the largest."""
    return f"{min(values) * unit:.{digits}f} to {max(values) * unit:.{digits}f}"


def machine() -> dict[str, Any]:
    """What this run was measured on, and with."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "llama-cpp-python"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    kernels = torch.backends.cpu.get_cpu_capability()
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "kernels": kernels, "versions": versions}


def tell(
    options: Options, command: str, rows: Sequence[Sequence[str]], found: Mapping[str, Any], notes: Sequence[str] = ()
) -> None:
    """Print a table whose first row is its head, notes, and what it was measured on; write --json."""
    print(table(rows, right=range(1, max(map(len, rows))), longest=60))
    for note in notes:
        print(note)
    here = machine()
    versions = ", ".join(f"{name} {number}" for name, number in here["versions"].items())
    print(f"{here['cpu']}, {here['kernels']}, {here['threads']} threads; {versions}")
    if options.json is not None:
        told = {"command": shlex.join(["python", "-m", "bench", command, *_given(options)]), "machine": here, **found}
        Path(options.json).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _given(options: Options) -> list[str]:
    """The options that are not as they would be anyway."""
    plain = asdict(type(options)())
    return [word for name, value in asdict(options).items() if value != plain[name] for word in (f"--{name}", str(value))]


def draw(
    options: Options,
    bars: Mapping[str, Sequence[float]],
    unit: str,
    limits: Mapping[str, float] | None = None,
    lines: Mapping[str, Mapping[int, float]] | None = None,
    along: str = "",
) -> None:
    """A chart, if --plot asks for one: the middle of each bar's values with their spread, a mark at its limit, and lines."""
    if options.plot is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, (1 + 0.35 * len(bars)) + (3.5 if lines else 0)), layout="constrained")
    axes = figure.subplots(2 if lines else 1, squeeze=False)[:, 0]
    names = list(bars)[::-1]
    middles = [statistics.median(bars[name]) for name in names]
    errors = [
        [m - min(bars[n]) for n, m in zip(names, middles, strict=True)],
        [max(bars[n]) - m for n, m in zip(names, middles, strict=True)],
    ]
    colors = ["tab:gray" if name.split()[0] in PRECISIONS else "tab:blue" for name in names]
    axes[0].barh(names, middles, xerr=errors, color=colors)
    marks = [(limits[name], place) for place, name in enumerate(names) if limits and name in limits]
    if marks:
        axes[0].plot(*zip(*marks, strict=True), "k|", markersize=14, label="limit of the memory")
        axes[0].legend()
    axes[0].set_xlabel(unit)
    for name, points in (lines or {}).items():
        axes[1].plot(list(points), list(points.values()), marker=".", label=name)
    if lines:
        axes[1].set(xlabel=along, ylabel=unit, ylim=(0, None))
        axes[1].legend(fontsize="small")
    figure.savefig(options.plot, dpi=120)
