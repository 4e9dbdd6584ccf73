"""Generate text: python sample.py --ckpt DIR --prompt "Once upon a time"

The text goes to stdout as it comes, and nothing else does; notices and figures go to stderr.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO

import nanodecoder as nd
from nanodecoder import cli, compare
from nanodecoder.attention import PATHS
from nanodecoder.checkpoint import DTYPES
from nanodecoder.cli import UsageError, option
from nanodecoder.completion import SIDES, cut_prompt, opening
from nanodecoder.config import Sampling
from nanodecoder.conversation import Conversation
from nanodecoder.generate import PromptTooLong, Step, default_sampler, draw_seeds, end_ids, prompt_to_ids
from nanodecoder.hub import download, is_hub_name
from nanodecoder.quantize import KINDS, price
from nanodecoder.storage import find_folder

BUNDLED = Path(__file__).parent / "weights" / "shakespeare"
NEW_TOKENS, NEW_TOKENS_OF_AN_ANSWER = 100, 1000
PICTURE = Path("compare_cache.png")
PATTERN = 32  # so many last tokens that repeat themselves are worth a word


@dataclass
class Options:
    """What the command line says."""

    ckpt: str | None = option(
        None,
        "checkpoint folder, a .safetensors file beside its config.json, or a hub name org/name",
        names=("checkpoint_dir", "checkpoint_path", "model", "out_dir"),
    )
    prompt: list[str] | None = option(None, "text to continue; may be repeated; - reads it from stdin", names=("p", "start"))
    prompt_file: str | None = option(None, "a file with a prompt a line")
    max_new_tokens: int | None = option(
        None, f"how many tokens to generate at most (default: {NEW_TOKENS}, in a chat {NEW_TOKENS_OF_AN_ANSWER})", names=("n",)
    )
    max_prompt_tokens: int | None = option(None, "cut longer prompts to so many tokens, BOS included")
    truncation_side: str | None = option(None, "which end is cut; unset: what the checkpoint says, else right", choices=SIDES)
    temperature: float | None = option(
        None, "0 takes the likeliest token, above 0 draws; unset: what the checkpoint says, else 0"
    )
    top_k: int | None = option(None, "draw from the k likeliest tokens; 0 is off")
    top_p: float | None = option(None, "draw from the fewest tokens that reach this probability; 1 is off")
    min_p: float | None = option(None, "draw from tokens at least this fraction as likely as the likeliest; 0 is off")
    repetition_penalty: float | None = option(None, "above 1 makes tokens that were there already less likely; 1 is off")
    presence_penalty: float | None = option(None, "taken off the logits of tokens that were generated already; 0 is off")
    frequency_penalty: float | None = option(None, "the same, once for each time; 0 is off")
    num_samples: int = option(1, "texts per prompt, with seeds seed, seed + 1, …")
    seed: int | None = option(None, "makes the same text again; unset, one is drawn and printed")
    stop: list[str] | None = option(None, "end before this text; may be repeated")
    ignore_eos: bool = option(False, "go on past the checkpoint's end token")
    chat: bool = option(False, "talk: each --prompt, or each line of stdin, is a turn", names=("interactive",))
    system: str | None = option(None, "the chat's system message")
    echo: bool = option(False, "print the prompt before its text")
    json: bool = option(False, "print one JSON object per text, with its ids, reason and timings")
    cache: bool = option(True, "keep keys and values of earlier tokens; --no_cache computes all anew at each step")
    compare_cache: bool = option(False, "generate with the cache and without, and count and time both")
    repeats: int = option(3, "timed runs of each way in --compare_cache")
    exact: bool = option(False, "the same bits alone or among others, in passes of fixed shapes; slower")
    compile: bool = option(False, "compile the step of one token: some seconds at first, then faster")
    attention: str = option("fused", "the kernel, or the formula written out", choices=PATHS)
    device: str = option("auto", "auto, cpu, cuda, cuda:1 or mps")
    dtype: str | None = option(None, "unset: float32, on CUDA the checkpoint's own", choices=("auto", *DTYPES))
    quantize: str | None = option(None, "round the weights to so many bits: less memory, faster", choices=KINDS)
    quantize_report: str | None = option(None, "a text file: what --quantize costs along it, before anything is generated")
    show: str | None = option(
        None, "look inside: a list of tokens, probs, attention, lens, shapes, memory, or all; goes to stderr"
    )
    look: str | None = option(None, "a word of the prompt whose attention is shown (default: the last one)")
    at: str | None = option(None, "a word of the prompt; the heads that look most at it from --look are named")
    watch: str | None = option(None, "a text that may come next, followed through the blocks")
    report: str | None = option(None, "write what --show names (unset: all) as one HTML file")
    offline: bool = option(False, "take a hub name from what was downloaded before, and ask no network")
    quiet: bool = option(False, "print no notices and figures")


@dataclass
class Setup:
    """What every way of running shares."""

    options: Options
    model: nd.Decoder
    tokenizer: nd.Tokenizer
    sampler: nd.Sampler
    seed: int
    notice: Callable[[str], None]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return () if self.options.ignore_eos else end_ids(self.model, self.tokenizer)

    def max_new_tokens(self, default: int) -> int:
        return default if self.options.max_new_tokens is None else self.options.max_new_tokens


def main(argv: Sequence[str]) -> None:
    options = cli.parse(Options, argv, "sample.py", "Generate text from a checkpoint in Hugging Face's layout.")
    if sys.stdout is None:
        raise UsageError("stdout is closed, and the text would go there")

    def notice(sentence: str) -> None:
        if not options.quiet:
            print(sentence, file=sys.stderr)

    refuse_idle(options)
    asked = asked_to_see(options)
    with warnings.catch_warnings(record=True) as caught, usage():
        warnings.simplefilter("always")
        setup = load(options, notice)
        texts = read_prompts(options)
        prompts = [] if options.chat else [to_ids(setup, text) for text in texts]
        if options.max_prompt_tokens is not None:
            texts = [shown(setup, text, ids) for text, ids in zip(texts, prompts, strict=True)]
    for warning in caught:
        notice(str(warning.message))
    out = Output(sys.stdout)
    if options.chat:
        chat(setup, texts, out)
    elif options.compare_cache:
        compare_ways(setup, prompts, out)
    else:
        continue_prompts(setup, texts, prompts, out, asked)
    if out.lost:
        notice(f"{out.lost} characters are none of {out.encoding} and were printed as ?; PYTHONUTF8=1 prints them")


def refuse_idle(options: Options) -> None:
    """Refuse options that would be ignored beside others, by name."""
    seen = ("show", "look", "at", "watch", "report")
    modes = {
        "chat": (*seen, "num_samples", "echo", "json", "compare_cache", "prompt_file", "max_prompt_tokens", "truncation_side"),
        "compare_cache": (*seen, "num_samples", "echo", "json", "cache", "stop", "exact", "ignore_eos", "compile"),
    }
    defaults = Options()
    for mode, others in modes.items():
        idle = [f"--{name}" for name in others if getattr(options, name) != getattr(defaults, name)]
        if getattr(options, mode) and idle:
            raise UsageError(f"{', '.join(idle)} cannot go with --{mode}")
    needs = (
        ("system", "chat"),
        ("repeats", "compare_cache"),
        ("truncation_side", "max_prompt_tokens"),
        ("quantize_report", "quantize"),
    )
    for name, other in needs:
        if getattr(options, name) != getattr(defaults, name) and not getattr(options, other):
            raise UsageError(f"--{name} is for --{other}: add it")
    if options.num_samples < 1:
        raise UsageError(f"--num_samples must be 1 or above, not {options.num_samples}")


def asked_to_see(options: Options) -> nd.inside.Asked | None:
    """What is to be looked at, if anything. Raises UsageError for a file that cannot be written."""
    if options.report is not None:
        path = Path(options.report)
        try:
            there = path.exists()
            path.open("a").close()
            if not there:
                path.unlink()
        except OSError as error:
            raise UsageError(f"--report {options.report} cannot be written ({error.strerror}): give another path") from None
    elif options.show is None:
        idle = [f"--{name}" for name in ("look", "at", "watch") if getattr(options, name) is not None]
        if idle:
            raise UsageError(f"{', '.join(idle)} is for --show or --report: add one")
        return None
    return nd.inside.Asked.parse("all" if options.show is None else options.show, options.look, options.at, options.watch)


@contextmanager
def usage() -> Iterator[None]:
    """What the library refuses is wrong usage here."""
    try:
        yield
    except PromptTooLong as error:
        raise UsageError(f"{error}, or cut it with --max_prompt_tokens") from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def load(options: Options, notice: Callable[[str], None]) -> Setup:
    if options.ckpt is None and not BUNDLED.is_dir():
        raise UsageError(f"the bundled model is not at {BUNDLED}: give a checkpoint folder, --ckpt DIR")
    device = cli.choose_device(options.device)
    ckpt = BUNDLED if options.ckpt is None else options.ckpt
    if options.offline and is_hub_name(ckpt):
        ckpt = download(ckpt, offline=True)
    folder, file = find_folder(ckpt)
    dtype, fallback = cli.choose_dtype(options.dtype, device, folder)
    if fallback:
        notice(fallback)
    model = nd.load_model(file or folder, device, dtype, options.quantize)
    model.attention = options.attention
    tokenizer = nd.Tokenizer.load(folder)
    if options.quantize_report is not None:
        report_price(options, nd.load_model(file or folder, device, dtype), model, tokenizer)
    names = [field.name for field in fields(Sampling) if hasattr(options, field.name)]
    settings = {name: value for name in names if (value := getattr(options, name)) is not None}
    sampler = default_sampler(model, **settings)
    given = settings | {"seed": options.seed, "num_samples": options.num_samples}
    chance = {"top_k": 0, "top_p": 1, "min_p": 0, "seed": None, "num_samples": 1}  # at these they are off
    idle = [f"--{name}" for name, off in chance.items() if given.get(name, off) != off]
    if idle and sampler.temperature == 0:
        notice(f"{', '.join(idle)} changes nothing at temperature 0 (greedy): add --temperature 0.8")
    said = {name: value for name in names if (value := getattr(model.generation, name)) != getattr(nd.Sampler(), name)}
    used = [f"{name} {value}" for name, value in said.items() if name not in settings]
    if used and sampler.temperature > 0:
        notice(f"the checkpoint's own settings are used: {', '.join(used)}")
    seed = draw_seeds(1)[0] if options.seed is None else options.seed
    return Setup(options, model, tokenizer, sampler, seed, notice)


def report_price(options: Options, plain: nd.Decoder, model: nd.Decoder, tokenizer: nd.Tokenizer) -> None:
    """Print what rounding costs along a text of the user's."""
    try:
        text = Path(options.quantize_report).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"--quantize_report {options.quantize_report} cannot be read ({error.strerror})") from None
    except UnicodeError as error:
        raise UsageError(f"--quantize_report {options.quantize_report} is not UTF-8 ({error.reason})") from None
    print(f"{options.quantize} beside the plain weights: {price(plain, model, tokenizer.encode(text))}", file=sys.stderr)


def read_prompts(options: Options) -> list[str]:
    """The prompts as text, with - read from stdin. Raises UsageError for what is not UTF-8, or for stdin asked for twice."""
    given = list(options.prompt or [])
    if given.count("-") > 1:
        raise UsageError("--prompt - is given twice, and stdin can be read once")
    if "-" in given and sys.stdin is None:
        raise UsageError("--prompt - reads stdin, which is closed")
    try:
        texts = [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in given]
        if options.prompt_file is not None:
            lines = Path(options.prompt_file).read_text(encoding="utf-8-sig").split("\n")
            texts += [line.removesuffix("\r") for line in lines if line.strip()]
            if not texts:
                raise UsageError(f"{options.prompt_file} has no line to take as a prompt")
        for text in texts:
            text.encode()  # an argument that is not UTF-8 arrives with halves of characters in it
    except UnicodeError as error:
        raise UsageError(f"the prompt is not UTF-8 ({error.reason}, at {error.start})") from None
    except OSError as error:
        raise UsageError(f"--prompt_file {options.prompt_file} cannot be read ({error.strerror})") from None
    return texts or ([] if options.chat else [""])


def to_ids(setup: Setup, text: str) -> list[int]:
    """A prompt's ids, with BOS for an empty one, cut where that was asked for."""
    options, tokenizer = setup.options, setup.tokenizer
    ids = prompt_to_ids(tokenizer, text)
    return cut_prompt(ids, options.max_prompt_tokens, options.truncation_side, tokenizer, tokenizer.bos_id)


def shown(setup: Setup, text: str, ids: list[int]) -> str:
    """A prompt as the model sees it: the text that was given, unless it was cut."""
    return text if len(ids) == len(prompt_to_ids(setup.tokenizer, text)) else opening(setup.tokenizer, ids)


# -------------------------------------------------------------------------------------------------------- continuing prompts


def continue_prompts(
    setup: Setup, texts: Sequence[str], prompts: Sequence[list[int]], out: Output, asked: nd.inside.Asked | None = None
) -> None:
    """Every prompt's samples in one batch, printed one after the other as they come."""
    options, samples = setup.options, setup.options.num_samples
    n = setup.max_new_tokens(NEW_TOKENS)
    rows = [ids for ids in prompts for _ in range(samples)]
    views = None
    with usage():
        stepper = nd.Stepper(
            setup.model,
            tokenizer=setup.tokenizer,
            sampler=setup.sampler,
            use_cache=options.cache,
            exact=options.exact,
            compile=options.compile,
        )
        for row, ids in enumerate(rows):
            stepper.add(ids, max_new_tokens=n, seed=setup.seed + row % samples, stop=options.stop or (), eos_ids=setup.eos_ids)
        if asked is not None:
            views = nd.inside.Views(asked, setup.model, setup.tokenizer, setup.sampler, prompts, n, options.cache)
            stepper.filters = views.filters
    run = Run(setup, texts, rows, n, unicode=out.encoding.lower().startswith("utf"))
    openings = [texts[row // samples] if options.echo else "" for row in range(len(rows))]
    closings = run.as_json if options.json else lambda row, text: "\n"
    printer = Printer(openings, closings, out, streams=not options.json)
    while len(stepper):
        step = step_of(stepper)
        run.count(step, stepper)
        printer.show(step)
        if views is not None:
            views.note(step)
    printer.close()
    if setup.sampler.temperature == 0:
        for row in range(len(rows)):
            tell_pattern(setup, run.new[row], "" if len(rows) == 1 else f"text {row + 1}: ")
    drawn = "" if setup.sampler.temperature == 0 else f", seed {setup.seed}"
    setup.notice(run.summary() + drawn)
    if views is not None:
        look(setup, views, run.new)


def look(setup: Setup, views: nd.inside.Views, new: Sequence[Sequence[int]]) -> None:
    """Print what was asked for, or write the report, or both."""
    found = views.look(new)
    if setup.options.show is not None:
        print(nd.inside.words(found), file=sys.stderr)
    if setup.options.report is not None:
        path = Path(setup.options.report)
        path.write_text(nd.inside.render(found), encoding="utf-8")
        setup.notice(f"report in {path} ({path.stat().st_size / 1e6:.2f} MB)")


def step_of(stepper: nd.Stepper) -> Step:
    try:
        return stepper.step()
    except ValueError as error:  # logits that are not numbers
        raise nd.CheckpointError(str(error)) from None


class Output:
    """stdout, in whatever encoding it has: what it has no letter for becomes ?, and is counted."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.lost = 0

    def write(self, text: str) -> None:
        shown = text.encode(self.encoding, "replace").decode(self.encoding)
        if shown != text:
            self.lost += sum(a != b for a, b in zip(text, shown, strict=False))
        self.stream.write(shown)

    def flush(self) -> None:
        self.stream.flush()


class Printer:
    """Prints several texts one after the other although they grow together: the first unfinished one as it comes.

    `closings(row, text)` is what follows a row's text, or stands for it where nothing `streams`.
    """

    def __init__(self, openings: Sequence[str], closings: Callable[[int, str], str], out: Output, streams: bool = True) -> None:
        self.closings, self.out, self.streams = closings, out, streams
        self.texts = list(openings)
        self.waiting = list(openings) if streams else [""] * len(openings)  # what each row has to say and has not said
        self.ended = [False] * len(openings)
        self.current = 0

    def show(self, step: Step) -> None:
        for row, text, reason in zip(step.rows, step.texts, step.reasons, strict=True):
            self.texts[row] += text
            if self.streams:
                self.waiting[row] += text
            if reason is not None:
                self._end(row)
        self._flush()

    def close(self) -> None:
        """End the rows that no step ended: those that were asked for nothing."""
        for row, ended in enumerate(self.ended):
            if not ended:
                self._end(row)
        self._flush()

    def _end(self, row: int) -> None:
        self.waiting[row] += self.closings(row, self.texts[row])
        self.ended[row] = True

    def _flush(self) -> None:
        while self.current < len(self.waiting):
            self.out.write(self.waiting[self.current])
            self.waiting[self.current] = ""
            if not self.ended[self.current]:
                break
            self.current += 1
        self.out.flush()


class Run:
    """Counts and clocks of one run, for the last line and for --json."""

    def __init__(
        self, setup: Setup, texts: Sequence[str], prompts: Sequence[list[int]], max_new_tokens: int, unicode: bool
    ) -> None:
        self.setup, self.texts, self.prompts, self.max_new_tokens = setup, texts, prompts, max_new_tokens
        self.unicode = unicode  # whether JSON may hold letters as they are
        self.prompt_tokens = 0  # as computed: samples of one prompt share its prefill
        rows = range(len(prompts))
        self.new: list[list[int]] = [[] for _ in rows]
        self.reasons: list[str | None] = [None for _ in rows]
        self.forwards = [0 for _ in rows]
        self.passes = 0
        self.started = self.first = self.last = time.perf_counter()
        self.tokens_of_first = 0

    def count(self, step: Step, stepper: nd.Stepper) -> None:
        cli.synchronize(self.setup.model.device)
        self.last = time.perf_counter()
        if self.passes == 0:
            self.first, self.tokens_of_first, self.prompt_tokens = self.last, len(step.rows), stepper.positions
        self.passes = stepper.forwards
        for row, index, reason, mark in zip(step.rows, step.ids.tolist(), step.reasons, step.marks, strict=True):
            self.forwards[row] += 1
            self.reasons[row] = reason
            if not mark:
                self.new[row].append(index)

    def as_json(self, row: int, text: str) -> str:
        """One line: what became of a row, when it has ended."""
        made = {
            "prompt": self.texts[row // self.setup.options.num_samples],
            "text": text,
            "ids": self.new[row],
            "prompt_ids": self.prompts[row],
            "finish_reason": self.reasons[row] or "length",
            "seed": self.setup.seed + row % self.setup.options.num_samples,
            "forwards": self.forwards[row],
            "first_token_seconds": round(self.first - self.started, 4),
            "seconds": round(self.last - self.started, 4),
        }
        return json.dumps(made, ensure_ascii=not self.unicode) + "\n"

    def summary(self) -> str:
        words = {
            "eos": "the model ended its text",
            "stop": "a --stop text appeared",
            "length": f"cut at --max_new_tokens {self.max_new_tokens}; the text may be unfinished",
            "context": f"the context of {self.setup.model.config.max_seq_len} tokens is full",
        }
        ended = [reason for reason in self.reasons if reason is not None]
        why = [f"{ended.count(reason)}x " * (len(self.prompts) > 1) + words[reason] for reason in dict.fromkeys(ended)]
        new_tokens = sum(self.forwards)
        # The last token is not fed
        longest = max(len(ids) + max(0, n - 1) for ids, n in zip(self.prompts, self.forwards, strict=True))
        parts = [
            f"{self.prompt_tokens} prompt + {new_tokens} new tokens",
            f"{self.passes} forward passes",
            f"context {longest} of {self.setup.model.config.max_seq_len}",
            f"stopped: {'; '.join(why) or 'nothing was asked for'}",
        ]
        if self.passes:
            parts.append(f"prefill {self.prompt_tokens / (self.first - self.started):,.0f} tokens/s")
        if new_tokens > self.tokens_of_first:
            parts.append(f"decode {(new_tokens - self.tokens_of_first) / (self.last - self.first):,.1f} tokens/s")
        if self.passes:
            parts.append(f"first token after {self.first - self.started:.3f} s")
        parts.append(f"peak memory {cli.peak_memory(self.setup.model.device) / 2**20:,.0f} MiB")
        return ", ".join(parts)


def tell_pattern(setup: Setup, ids: Sequence[int], which: str = "") -> None:
    """Say where the last tokens repeat themselves, as greedy texts often come to do."""
    last = list(ids[-PATTERN:])
    periods = (n for n in range(1, PATTERN // 2 + 1) if len(last) == PATTERN and last[n:] == last[:-n])
    period = next(periods, None)
    if period is not None:
        setup.notice(
            f"{which}the last {PATTERN} tokens repeat {setup.tokenizer.decode(last[-period:])!r}: greedy text can run in "
            "circles; try --temperature 0.8 or --repetition_penalty 1.1"
        )


# --------------------------------------------------------------------------------------------------------------- talking


def chat(setup: Setup, turns: Sequence[str], out: Output) -> None:
    """The turns that were given, or those that are typed until stdin ends or Ctrl-C at the prompt."""
    options = setup.options
    with usage():
        talk = Conversation(
            setup.model,
            setup.tokenizer,
            system=options.system,
            sampler=setup.sampler,
            max_new_tokens=setup.max_new_tokens(NEW_TOKENS_OF_AN_ANSWER),
            seed=setup.seed,
            stop=options.stop or (),
            eos_ids=setup.eos_ids,
            exact=options.exact,
            use_cache=options.cache,
            compile=options.compile,
        )
        talk.tokenizer.chat_text([*talk.messages, {"role": "user", "content": "?"}])  # does the template take this at all?
    typed = not turns
    if typed:
        setup.notice("Say something. Ctrl-C ends an answer, /new begins anew, Ctrl-D leaves.")
    for text in _typed() if typed else turns:
        if text.strip() == "/new":
            talk.restart()
            continue
        with _until_interrupted() as interrupted:
            try:
                answer = talk.ask(text)
            except (ValueError, nd.CheckpointError) as error:
                if interrupted():  # while the template was rendered
                    continue
                if not typed:
                    raise error if isinstance(error, nd.CheckpointError) else UsageError(str(error)) from None
                print(f"{error} (/new begins anew)", file=sys.stderr)
                continue
            with closing(answer):
                try:
                    for piece in answer:
                        out.write(piece)
                        out.flush()
                        if interrupted():
                            break
                except ValueError as error:
                    raise nd.CheckpointError(str(error)) from None
        out.write("\n")
        out.flush()
        if talk.reason in ("length", "context"):
            limit = "--max_new_tokens" if talk.reason == "length" else "the end of the context (/new begins anew)"
            setup.notice(f"(the answer was cut at {limit})")
        if setup.sampler.temperature == 0:
            tell_pattern(setup, talk.ids)
    drawn = "" if setup.sampler.temperature == 0 else f", seed {setup.seed}"
    setup.notice(f"{talk.stepper.forwards} forward passes, {talk.stepper.positions} positions computed{drawn}")


def _typed() -> Iterator[str]:
    """Lines as they are typed, until stdin ends or Ctrl-C."""
    if sys.stdin is None:
        return
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        import readline  # noqa: F401 - lines can be edited
    while True:
        try:
            line = input("> ") if terminal else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        except UnicodeError as error:
            raise UsageError(f"what was typed is not {sys.stdin.encoding} ({error.reason})") from None
        if not terminal and not line:
            return
        if line.strip():
            yield line.removesuffix("\n")


@contextmanager
def _until_interrupted() -> Iterator[Callable[[], bool]]:
    """While it lasts, the first Ctrl-C is only noted, so that no step is torn; a second one leaves."""
    seen: list[int] = []

    def note(signum: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(signum)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------------------------------------- the cache, compared


def compare_ways(setup: Setup, prompts: Sequence[list[int]], out: Output) -> None:
    """The text on stdout, the figures on stderr, and a picture where matplotlib is installed."""
    if len(prompts) != 1:
        raise UsageError(f"--compare_cache takes one prompt, not {len(prompts)}")
    (ids,) = prompts
    n = setup.max_new_tokens(NEW_TOKENS)
    with usage():
        cached, anew = compare.compare_cache(setup.model, ids, n, setup.options.repeats, sampler=setup.sampler, seed=setup.seed)
    stream = setup.tokenizer.stream(after=ids)
    out.write("".join([*map(stream.push, cached.ids), stream.finish()]) + "\n")
    out.flush()
    print(compare.table(cached, anew, len(ids)), file=sys.stderr)
    if setup.sampler.temperature == 0:
        tell_pattern(setup, cached.ids)
    if compare.draw(cached, anew, len(ids), PICTURE):
        setup.notice(f"drawn in {PICTURE}")
    else:
        setup.notice('for a picture of it: pip install -e ".[plot]"')


if __name__ == "__main__":
    cli.run(main, "sample.py")
