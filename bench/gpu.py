"""All of it on one large GPU, in under 8 minutes, without downloads: python -m bench gpu [--gpt_fast DIR]

Weights are random, of the shapes of real models; the bundled weights/shakespeare says whether results are right. Nothing newer
than torch 2.11 and transformers 5.17 is needed, and transformers and gpt-fast may be missing. Sections come in the order of
what matters most, each with a budget of seconds; what did not fit is named. `--device cpu --tiny` runs the same code anywhere.
"""

from __future__ import annotations

import gc
import inspect
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import nanodecoder as nd
from nanodecoder import cli
from nanodecoder.cli import UsageError, option
from nanodecoder.config import ModelConfig, RopeConfig
from nanodecoder.inside.columns import table
from nanodecoder.inside.shapes import walk
from nanodecoder.parts import CheckpointError
from nanodecoder.quantize import KINDS, quantize
from nanodecoder.verify import compare_logits

from . import common
from .arms import GptFast, Ours, Trainable, Transformers, gpt_fast_code, in_eight_bits
from .common import ROOT, ratio, share
from .convert import gpt_fast_args, gpt_fast_state

BUNDLED = ROOT / "weights" / "shakespeare"
LLAMA3 = RopeConfig(theta=500000.0)
GROUPED = {"n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "max_seq_len": 8192, "rope": LLAMA3}
SHAPES = {
    "8B": ModelConfig(dim=4096, n_layers=32, ffn_dim=14336, **GROUPED),
    "135M": ModelConfig(
        vocab_size=49152,
        dim=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        ffn_dim=1536,
        max_seq_len=8192,
        rope=RopeConfig(theta=100000.0),
        tied_head=True,
    ),
    "1B": ModelConfig(dim=2048, n_layers=16, ffn_dim=8192, tied_head=True, **GROUPED),
}
TINY = ModelConfig(vocab_size=97, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, max_seq_len=128)
CUDA_TESTS = ("tests/test_model.py", "tests/test_compiled.py", "tests/test_quantize.py", "-k", "cuda or gpu")
NEVER = 1e6  # seconds
AGAIN = 5.0  # seconds after which a section that goes on beyond its time is told again


@dataclass
class Options:
    """What the command line says."""

    device: str = option("cuda", "cuda, cuda:1, or cpu with --tiny")
    tiny: bool = option(False, "tiny shapes, to try the script out")
    limit: float = option(450.0, "seconds that all of it may take")
    only: str = option("", "sections whose names hold one of these words, with commas between")
    gpt_fast: str | None = option(None, "folder of a gpt-fast checkout (github.com/meta-pytorch/gpt-fast)")
    transformers: bool = option(True, "measure beside transformers, where it is installed")
    compile: bool = option(True, "compile our step, and gpt-fast's")
    json: str | None = option(None, "write all figures to this file")


class OutOfTime(BaseException):
    """A section's seconds are over. Not an Exception, so that no library takes it for one of its own."""


@dataclass
class Session:
    """What sections share: where they run, how fast that is (bytes and operations a second), and what was found."""

    options: Options
    device: torch.device
    copies: float = float("nan")
    products: dict[str, float] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def shapes(self) -> dict[str, ModelConfig]:
        return dict.fromkeys(SHAPES, TINY) if self.options.tiny else SHAPES

    def amount(self, large: int, tiny: int) -> int:
        """A size of this run."""
        return tiny if self.options.tiny else large


# ------------------------------------------------------------------------------------------------------------------ models


def random_model(config: ModelConfig, device: torch.device, precision: str) -> nd.Decoder:
    """A model of random weights, made where it will be."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if precision == "float32" else torch.bfloat16)  # never whole in float32 first
    try:
        with torch.device(device):
            model = nd.Decoder(config).eval()
    finally:
        torch.set_default_dtype(usual)
    return quantize(model, precision) if precision in KINDS else model


def random_transformers(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformers:
    """transformers' Llama of the same shape."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    raw = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        max_position_embeddings=config.max_seq_len,
        tie_word_embeddings=config.tied_head,
        rope_theta=config.rope[0].theta,
    )
    with torch.device(device):
        return Transformers(AutoModelForCausalLM.from_config(raw, dtype=dtype).eval())


def random_gpt_fast(session: Session, precision: str, config: ModelConfig, ours: nd.Decoder) -> GptFast:
    """gpt-fast's model of the same shape, with our weights in it where they are whole; int8 and int4 by its own handlers."""
    code, parts = gpt_fast_code(session.options.gpt_fast)
    if precision in KINDS:
        ours = random_model(config, session.device, "bfloat16")
    with torch.device("meta"):
        model = parts.Transformer(gpt_fast_args(parts, config))
    model.load_state_dict(gpt_fast_state(ours), assign=True)
    if precision == "int8":
        model = in_eight_bits(model)
    if precision == "int4":
        from quantize import WeightOnlyInt4QuantHandler  # the checkout's

        handler = WeightOnlyInt4QuantHandler(model, groupsize=32)
        on_gpu = {"use_cuda": session.device.type == "cuda"}
        state = handler.create_quantized_state_dict(**on_gpu)
        asked = inspect.signature(handler.convert_for_runtime).parameters  # not by every version of it
        model = handler.convert_for_runtime(**{name: value for name, value in on_gpu.items() if name in asked})
        model.load_state_dict(state, assign=True)
    return GptFast(code, model.to(session.device).eval(), session.options.compile)


def peers(session: Session, makers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Those that can be had, in half of the time that is left at most; why another can't is a note."""
    had: dict[str, Any] = {}
    for name, make in makers.items():
        try:
            if name.startswith("gpt-fast"):
                if session.options.gpt_fast is None:
                    continue
                common.there("gpt-fast", session.options)
            elif not session.options.transformers or not common.find_spec("transformers"):
                continue
            with within(left() / 2):
                had[name] = make()
        except (Exception, OutOfTime) as error:  # whatever a peer raises must not end the run
            session.notes.append(f"{name}: could not be had ({first_line(error)})")
    return had


def turns(session: Session, arms: dict[str, Any], run: Callable[[Any], float], repeats: int = 2) -> dict[str, list[float]]:
    """Seconds of each arm in turn, A B A B, after a warm-up. A peer that fails, or takes half of the time that is left for one
    turn (it compiles, so that nothing of ours would be measured), drops out with a note."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeats + 1):
        for name in list(times):
            mine = isinstance(arms[name], Ours)
            try:
                with within(left() / (1 if mine else 2)):
                    taken = run(arms[name])
            except (Exception, OutOfTime) as error:
                if mine:
                    raise
                session.notes.append(f"{name}: failed ({first_line(error)})")
                del times[name]
                continue
            if turn:
                times[name].append(taken)
    return times


def first_line(error: BaseException) -> str:
    """What an error says, which may be nothing."""
    if isinstance(error, OutOfTime):
        return "half of the time that was left was over"
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])[:160]


# ---------------------------------------------------------------------------------------------------------------- sections


def machine(session: Session) -> None:
    """How fast a copy and a matrix product are: the best of five."""
    device = session.device
    source = torch.zeros(session.amount(2**30, 2**16), device=device)
    target = torch.empty_like(source)

    def best(run: Callable[[], object]) -> float:
        taken = []
        for _ in range(6):
            cli.synchronize(device)
            start = time.perf_counter()
            run()
            cli.synchronize(device)
            taken.append(time.perf_counter() - start)
        return min(taken[1:])

    session.copies = 2 * source.nbytes / best(lambda: target.copy_(source))
    side = session.amount(8192, 64)
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        session.products[str(dtype).removeprefix("torch.")] = 2 * side**3 / best(lambda a=a, b=b: a @ b)
    session.found["copied and multiplied"] = {"bytes_per_second": session.copies, "operations_per_second": session.products}
    rates = ", ".join(f"{rate / 1e12:,.1f} TFLOP/s in {name}" for name, rate in session.products.items())
    print(f"memory is copied at {session.copies / 1e9:,.0f} GB/s (reads and writes together), matrices multiplied at {rates}")


def correctness(session: Session) -> None:
    """The bundled model's text on the CPU in float32, and every way's choices along it on the device."""
    tokenizer, reference = nd.Tokenizer.load(BUNDLED), Ours(nd.load_model(BUNDLED))
    ids, n = tokenizer.encode("ROMEO:\nWhat light"), session.amount(100, 8)
    text = reference.decode(ids, n)["ids"]
    wanted = reference.logits(ids, text)
    rows = [["along the CPU's text", "largest difference", "changed", "ties"]]
    try:
        for compiled in (False, True) if session.options.compile else (False,):
            for precision in ("float32", "bfloat16", *KINDS):
                how = {"quantize": precision, "dtype": "bfloat16"} if precision in KINDS else {"dtype": precision}
                name = f"{precision}{' compiled' if compiled else ''}"
                logits = Ours(nd.load_model(BUNDLED, session.device, **how), compiled).logits(ids, text)
                one = compare_logits(name, [wanted], [logits], [text], tokenizer)
                session.found.setdefault("correct", {})[name] = {"apart": one.size, "changed": one.changed, "ties": one.ties}
                rows.append([name, f"{one.size:.2g}", f"{one.changed} of {n}", f"{one.ties}"])
                if precision == "float32" and (one.changed or one.apart):
                    session.failed.append(f"{name} on {session.device} is not what the CPU computes: {one}")
    finally:
        print(table(rows, right=(1, 2, 3)))


def command(session: Session, name: str, words: list[str], seconds: float) -> None:
    """Another process, whose last line is told; a failed one fails the run."""
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, env=env, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise OutOfTime from None
    last = (done.stdout.strip() or done.stderr.strip() or "nothing was said").splitlines()[-1]
    session.found[name] = last
    print(f"{' '.join(words)}: {last}")
    if done.returncode not in (0, 5):  # 5: there was no test to run
        session.failed.append(f"{name} failed: {last}")


def verify(session: Session) -> None:
    """Every way of computing beside the others, on the device."""
    words = ["-m", "nanodecoder", "verify", "--ckpt", str(BUNDLED), "--device", str(session.device), "--dtype", "float32"]
    command(session, "verify", [*words, *([] if session.options.compile else ["--no_compile"])], 90)


def cuda_tests(session: Session) -> None:
    """The tests that only run where CUDA is."""
    if all(map(common.find_spec, ("pytest", "hypothesis"))):
        command(session, "tests", ["-m", "pytest", "-q", "-p", "no:cacheprovider", *CUDA_TESTS], 90)
    else:
        session.notes.append("the CUDA-only tests were not run: they need pytest and hypothesis")


def decode(session: Session, shape: str, precision: str) -> None:
    """One sequence, token by token."""
    config, device = session.shapes[shape], session.device
    model = random_model(config, device, precision)
    arms: dict[str, Any] = {f"{precision}": Ours(model)}
    if session.options.compile:
        arms[f"{precision} compiled"] = Ours(model, compiled=True)
    theirs = {f"gpt-fast {precision}": lambda: random_gpt_fast(session, precision, config, model)}
    if precision not in KINDS:
        theirs[f"transformers {precision}"] = lambda: random_transformers(config, device, getattr(torch, precision))
    arms |= peers(session, theirs)
    ids, n = ids_of(config, session.amount(100, 5)), session.amount(64, 4)
    times = turns(session, arms, lambda arm: statistics.median(arm.decode(ids, n)["seconds"][1:]))
    told = {}
    rows = [[f"{shape}, after {len(ids)} tokens", "tokens/s", "ms a token", "MB a token", "of the copy's speed", *arms]]
    for name, taken in times.items():
        middle, token = statistics.median(taken), arms[name].read + (len(ids) + n // 2) * arms[name].cache
        told[name] = {
            "seconds_per_token": taken,
            "bytes_per_token": token,
            "of_the_limit": share(token, session.copies, middle),
        }
        ratios = [f"×{ratio(taken, times[other]):.2f}" if other in times and other != name else "" for other in arms]
        limit = f"{told[name]['of_the_limit']:.0%}"
        rows.append([name, f"{1 / middle:,.1f}", f"{middle * 1e3:.3f}", f"{token / 1e6:,.1f}", limit, *ratios])
    session.found[f"decode {shape} {precision}"] = told
    print(table(rows, right=range(1, len(rows[0]))))


def prefill(session: Session, shape: str) -> None:
    """A prompt's pass in bfloat16, beside the matrix rate."""
    config, device = session.shapes[shape], session.device
    arms: dict[str, Any] = {"bfloat16": Ours(random_model(config, device, "bfloat16"))}
    arms |= peers(session, {"transformers bfloat16": lambda: random_transformers(config, device, torch.bfloat16)})
    rows = [[f"{shape}, a prompt of …", "", "tokens/s", "ms", "of the matrix rate"]]
    for length in (512, 4096) if not session.options.tiny else (16, 32):
        ids = ids_of(config, length)
        times = turns(session, arms, lambda arm, ids=ids: arm.decode(ids, 1)["seconds"][0])
        flops = walk(config, 1, length, torch.bfloat16).total("flops")
        for name, taken in times.items():
            middle = statistics.median(taken)
            part = share(flops, session.products["bfloat16"], middle)
            session.found.setdefault(f"prefill {shape}", {})[f"{name}, {length}"] = {"seconds": taken, "of_the_rate": part}
            rows.append([f"{length:,} tokens", name, f"{length / middle:,.0f}", f"{middle * 1e3:.1f}", f"{part:.0%}"])
    print(table(rows, right=(2, 3, 4)))


def batch(session: Session, shape: str) -> None:
    """Rows of different lengths, in bfloat16."""
    config = session.shapes[shape]
    arm, n = Ours(random_model(config, session.device, "bfloat16"), session.options.compile), session.amount(64, 3)
    rows = [[f"{shape}, rows", "tokens/s", "s", "of the copy's speed"]]
    for size in (1, 4, 16, 64, 256) if not session.options.tiny else (1, 3):
        texts = [ids_of(config, 5 + row * 37 % session.amount(96, 9), row) for row in range(size)]
        times = turns(session, {"ours": arm}, lambda arm, texts=texts: seconds(lambda: arm.batch(texts, n)), 1)["ours"]
        middle = statistics.median(times)
        held = sum(len(text) + n // 2 for text in texts) * arm.cache
        part = share(n * (arm.read + held), session.copies, middle)
        session.found.setdefault(f"batch {shape}", {})[size] = {"seconds": times, "of_the_limit": part}
        rows.append([f"{size}", f"{size * n / middle:,.0f}", f"{middle:.2f}", f"{part:.0%}"])
    print(table(rows, right=(0, 1, 2, 3)))


def train(session: Session, shape: str) -> None:
    """A step of AdamW, weights in float32 and products in bfloat16, beside the matrix rate."""
    config, device = session.shapes[shape], session.device
    rows, columns = session.amount(8, 2), session.amount(1024, 16)
    arms: dict[str, Trainable] = {"nanodecoder": Ours(random_model(config, device, "float32"))}
    arms |= peers(session, {"transformers": lambda: random_transformers(config, device, torch.float32)})
    texts = [ids_of(config, columns + 1, row) for row in range(rows)]

    def step(arm: Trainable) -> float:
        with torch.autocast(device.type, torch.bfloat16):
            return seconds(lambda: arm.train(texts))

    times = turns(session, arms, step, 3)
    head = 2 * config.dim * config.vocab_size  # which a training step computes at every position
    flops = 3 * (walk(config, rows, columns).total("flops") + rows * (columns - 1) * head)
    told = [[f"{shape}, {rows} × {columns} tokens", "tokens/s", "ms a step", "of the matrix rate"]]
    for name, taken in times.items():
        middle = statistics.median(taken)
        part = share(flops, session.products["bfloat16"], middle)
        session.found.setdefault(f"train {shape}", {})[name] = {"seconds": taken, "of_the_rate": part}
        told.append([name, f"{rows * columns / middle:,.0f}", f"{middle * 1e3:.1f}", f"{part:.0%}"])
    print(table(told, right=(1, 2, 3)))


def ids_of(config: ModelConfig, length: int, seed: int = 0) -> list[int]:
    """Random ids."""
    return torch.randint(config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def seconds(run: Callable[[], object]) -> float:
    """What ends with ids or a loss on the CPU has waited for the device."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


SECTIONS: dict[str, tuple[float, Callable[[Session], None]]] = {
    "machine": (20, machine),
    "correct": (80, correctness),
    "decode 8B bfloat16": (120, lambda s: decode(s, "8B", "bfloat16")),
    "decode 135M bfloat16": (60, lambda s: decode(s, "135M", "bfloat16")),
    "decode 8B int8": (60, lambda s: decode(s, "8B", "int8")),
    "decode 8B int4": (60, lambda s: decode(s, "8B", "int4")),
    "prefill 8B": (20, lambda s: prefill(s, "8B")),
    "batch 8B": (40, lambda s: batch(s, "8B")),
    "train 135M": (20, lambda s: train(s, "135M")),
    "tests": (60, cuda_tests),
    "verify": (60, verify),
    "decode 135M float32": (40, lambda s: decode(s, "135M", "float32")),
    "decode 135M int8": (40, lambda s: decode(s, "135M", "int8")),
    "decode 135M int4": (40, lambda s: decode(s, "135M", "int4")),
    "decode 1B bfloat16": (40, lambda s: decode(s, "1B", "bfloat16")),
    "decode 1B int8": (40, lambda s: decode(s, "1B", "int8")),
    "decode 1B int4": (40, lambda s: decode(s, "1B", "int4")),
    "train 1B": (20, lambda s: train(s, "1B")),
    "decode 1B float32": (40, lambda s: decode(s, "1B", "float32")),
    "decode 8B float32": (40, lambda s: decode(s, "8B", "float32")),
}


@contextmanager
def within(budget: float) -> Iterator[None]:
    """Raise OutOfTime in what is done here once so many seconds are over, and again where that got lost (in what is called
    while an object is cleaned up). It may stand in another one, whose time runs on.
    """

    def ring(*_: object) -> None:
        raise OutOfTime

    before, began, others = signal.signal(signal.SIGALRM, ring), time.monotonic(), left()
    signal.setitimer(signal.ITIMER_REAL, min(budget, others), AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if others < NEVER:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, others - (time.monotonic() - began)), AGAIN)


def left() -> float:
    """Seconds until the innermost `within` is over."""
    return signal.getitimer(signal.ITIMER_REAL)[0] or NEVER


def main(argv: list[str]) -> None:
    """Run the sections that fit. What our model computes wrong, or fails to, is a failed run."""
    options = cli.parse(Options, argv, "python -m bench gpu", "Correctness and speed on one large GPU.")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(
            f"there is no GPU here (torch {torch.__version__} sees none); --device cpu --tiny tries the script out"
        )
    device = cli.choose_device(options.device)
    if device.type == "cpu" and not options.tiny:
        raise UsageError("a CPU is tried out with tiny shapes: --device cpu --tiny")
    if options.gpt_fast is not None:
        common.there("gpt-fast", options)
    session, started = Session(options, device), time.perf_counter()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU, tiny shapes: no figure means anything"
    print(f"{name}, torch {torch.__version__}")
    wanted = common.listed(options.only)
    skipped: list[str] = []

    def told() -> None:
        """The last lines, and the JSON."""
        for note in session.notes:
            print(note)
        print(f"\n{time.perf_counter() - started:.0f} s; left out: {', '.join(skipped) or 'nothing'}")
        found = session.found | {"left out": skipped, "notes": session.notes, "failed": session.failed, "device": name}
        common.tell(options, "gpu", [["all sections" if not skipped else f"without {len(skipped)} sections"]], found)

    def give_up() -> None:
        """For a section that waits for what never comes, where no signal is heard: tell what there is, and go."""
        skipped.append("the rest, since one section hung")
        try:
            told()
            sys.stdout.flush()
        finally:
            os._exit(3)

    end = threading.Timer(options.limit + 15, give_up)
    end.daemon = True
    end.start()
    try:
        run_all(session, wanted, skipped, started)
    finally:
        end.cancel()
    told()
    if session.failed:
        raise CheckpointError("; ".join(session.failed))


def run_all(session: Session, wanted: list[str], skipped: list[str], started: float) -> None:
    """The sections that are wanted and fit; the names of those that do not go into `skipped`."""
    options = session.options
    for section, (budget, run) in SECTIONS.items():
        if wanted and section != "machine" and not any(word in section for word in wanted):
            continue
        rest = options.limit - (time.perf_counter() - started)
        if rest < min(budget, 10):
            skipped.append(section)
            continue
        print(f"\n== {section} ({time.perf_counter() - started:.0f} s)", flush=True)
        try:
            with within(min(budget, rest)), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run(session)
        except OutOfTime:
            skipped.append(f"{section} (its {min(budget, rest):.0f} s were over)")
        except Exception as error:  # the other sections are still worth having
            session.failed.append(f"{section}: {first_line(error)}")
            print(session.failed[-1])
        try:
            clean(session.device)
        except Exception as error:  # after an error in a kernel, a GPU refuses everything
            session.failed.append(f"after {section}: {first_line(error)}")
            return


def clean(device: torch.device) -> None:
    """Let the section's models and what was compiled for them go."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
