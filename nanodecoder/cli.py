"""A dataclass becomes --options; and the few things that the scripts share: devices, clocks, and how a failure is told.

    @dataclass
    class Options:
        prompt: list[str] = option((), "text to continue; may be repeated", names=("p",))
        top_k: int = option(0, "keep the k likeliest")

    options = parse(Options, sys.argv[1:], "sample.py", "Generate text.")

`--top_k 5`, `--top_k=5` and `--top-k 5` are the same; a bool takes `--quiet`, `--quiet=False` and `--no_quiet`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from .cache import out_of_memory
from .checkpoint import own_dtype
from .parts import CheckpointError

T = TypeVar("T")


class UsageError(ValueError):
    """A command line that cannot be carried out, in one sentence. Exit status 2."""


def option(default: Any, help: str, *, names: Sequence[str] = (), choices: Sequence[str] = ()) -> Any:
    """A field of an options dataclass. `names` are other names of the flag, one letter making a short one."""
    metadata = {"help": help, "names": tuple(names), "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=metadata)


def parse(options: type[T], argv: Sequence[str], prog: str, description: str, defaults: Mapping[str, Any] | None = None) -> T:
    """The command line as an instance of `options`, whose own defaults give way to `defaults`.

    Raises UsageError, naming the nearest flag for one that is unknown.
    """
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    hints = typing.get_type_hints(options)
    flags: list[str] = []
    for field in dataclasses.fields(options):
        flags += _add(parser, field, hints[field.name])
    parser.set_defaults(**(defaults or {}))
    known, unknown = parser.parse_known_args([_underscored(word, flags) for word in argv])
    if unknown:
        word = unknown[0].split("=")[0]
        near = difflib.get_close_matches(word.replace("-", "_").replace("__", "--", 1), flags, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else f"; {prog} --help lists what there is"
        kind = "unknown option" if word.startswith("-") else "unexpected word"
        raise UsageError(f"{kind} {word!r}{hint}")
    return options(**vars(known))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += " (a value that begins with - is given as --flag=-value)"
        raise UsageError(message.removeprefix("argument "))


def _underscored(word: str, flags: Sequence[str]) -> str:
    """--top-k=5 -> --top_k=5, if --top_k is a flag; any other word is left as it is, since it may be a value."""
    flag, equals, value = word.partition("=")
    underscored = "--" + flag.removeprefix("--").replace("-", "_")
    return underscored + equals + value if word.startswith("--") and underscored in flags else word


def _add(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any) -> list[str]:
    """Declare one field's flags; -> them."""
    optional = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kind = next(one for one in typing.get_args(hint) if one is not type(None)) if optional else hint
    repeated = typing.get_origin(kind) is list
    kind = typing.get_args(kind)[0] if repeated else kind
    about = field.metadata["help"]
    shown = field.default not in (None, (), False, "")
    if shown:
        about += f" (default: {field.default})"
    names = [f"--{field.name}", *(f"-{name}" if len(name) == 1 else f"--{name}" for name in field.metadata["names"])]
    settings: dict[str, Any] = {"dest": field.name, "default": field.default, "help": about.replace("%", "%%")}
    if kind is bool:
        parser.add_argument(*names, type=_bool, nargs="?", const=True, metavar="BOOL", **settings)
        negated = [f"--no_{name.removeprefix('--')}" for name in names if name.startswith("--")]
        parser.add_argument(*negated, dest=field.name, action="store_false", default=field.default, help=argparse.SUPPRESS)
        return names + negated
    settings["choices"] = field.metadata["choices"] or None
    if repeated:
        settings |= {"action": "append", "default": None}
    parser.add_argument(*names, type=_TYPES[kind], metavar=kind.__name__.upper() if kind is not str else "TEXT", **settings)
    return names


def _bool(text: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"takes true or false, not {text!r}")
    return values[text.lower()]


def _number(kind: type, word: str) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"takes {word}, not {text!r}") from None

    return convert


_TYPES = {str: str, int: _number(int, "a whole number"), float: _number(float, "a number")}


def run(main: Callable[[Sequence[str]], None], prog: str) -> NoReturn:
    """Carry out a script and leave with its exit status: 2 for wrong usage, 1 for a failed run, each told in one sentence."""
    if sys.stderr is None:  # closed: print would take stdout instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    try:
        main(sys.argv[1:])
    except UsageError as error:
        _leave(prog, error, 2)
    except (CheckpointError, MemoryError) as error:
        _leave(prog, str(error) or "out of memory: ask for less at a time", 1)
    except BrokenPipeError:  # whoever read the output has gone, as head does: nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        _leave(prog, error, 1)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        _leave(prog, f"out of memory: ask for less at a time, or a smaller dtype ({str(error).splitlines()[0]})", 1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def _leave(prog: str, error: object, status: int) -> NoReturn:
    print(f"{prog}: {error}", file=sys.stderr)
    sys.exit(status)


def choose_device(name: str) -> torch.device:
    """ "auto" takes cuda, then mps, then cpu. Raises UsageError for a device that torch does not know or that is not there."""
    cuda, mps = torch.cuda.is_available, torch.backends.mps.is_available
    if name == "auto":
        return torch.device("cuda" if cuda() else "mps" if mps() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name} is not a device that torch knows; use auto, cpu, cuda, cuda:1 or mps") from None
    there = {"cpu": lambda: True, "cuda": cuda, "mps": mps}
    if device.type not in there:
        raise UsageError(f"--device {name} is not supported; use auto, cpu, cuda, cuda:1 or mps")
    count = torch.cuda.device_count() if device.type == "cuda" and cuda() else 1
    if not there[device.type]() or (device.index or 0) >= count:
        seen = f"{count} of its kind" if there[device.type]() else "none"
        raise UsageError(f"--device {name} is not there (torch {torch.__version__} sees {seen}); use --device cpu or auto")
    return device


def choose_dtype(name: str | None, device: torch.device, ckpt: str | os.PathLike[str]) -> tuple[str, str | None]:
    """The dtype to load a checkpoint in, and a notice if it is not what was asked.

    Unset: float32, on CUDA the checkpoint's own. A GPU without bfloat16 gets float32 instead.
    """
    wanted = name or ("auto" if device.type == "cuda" else "float32")
    if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return wanted, None
    if wanted == "bfloat16" or (wanted == "auto" and own_dtype(ckpt) == torch.bfloat16):
        return "float32", f"{device} has no bfloat16: using float32"
    return wanted, None


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked, so that a clock read now tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory(device: torch.device) -> int:
    """The most bytes that this run has held: of the device's memory on CUDA, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
