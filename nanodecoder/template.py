"""Renders chat templates in a process of its own: `chat.py` starts this file by its path, and nothing imports it.

A template comes from whoever made the checkpoint and is a program in jinja2's language. jinja2's sandbox keeps it from
reaching anything but its variables; that it cannot fill the memory or run for ever is what the process is for. What a
template may use is what transformers gives it. On stdin comes a job in JSON, on stdout goes the answer:

    {"template": "…", "conversations": [[{"role": …}, …], …], "variables": {…}, "seconds": …, "bytes": …, "characters": …}
    {"texts": ["…", …]}, or {"refused": "what the template said"}, {"over": "which cap"}, {"failed": "what went wrong"}
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

LONGEST_MESSAGE = 1000  # characters of an error, which a template can make as long as any text


class Refused(jinja2.TemplateError):
    """The template called `raise_exception`."""


class TooLong(Exception):
    """The text is longer than the cap."""


class Namespace(jinja2.utils.Namespace):
    """jinja2's namespace without names such as __call__, which jinja2 and Python themselves would look up."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}: names that start with _ are not for templates")
        super().__setitem__(name, value)


class MakeDict:
    """`dict` as templates call it, without the other methods of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class Generation(Extension):
    """{% generation %}…{% endgeneration %} says, to those who train on it, what a model wrote. Here it prints what is in it."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def raise_exception(message: Any) -> None:
    """How a template refuses messages."""
    raise Refused(str(message))


def strftime_now(layout: str) -> str:
    """Today, for templates that tell the model."""
    return datetime.now().strftime(layout)


def to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """As Python writes it: jinja2's own filter of this name escapes what HTML would mistake."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> ImmutableSandboxedEnvironment:
    """What templates are run in: whitespace as they are written for, and what they may call."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        optimized=False,  # constants such as 10**10**9 are not computed before there is anything to render
    )
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    made.globals |= {"namespace": Namespace, "dict": MakeDict()}
    return made


def render(template: jinja2.Template, variables: dict[str, Any], characters: int) -> str:
    """The text, unless it is longer than `characters`."""
    chunks, length = [], 0
    for chunk in template.generate(variables):
        length += len(chunk)
        if length > characters:
            raise TooLong
        chunks.append(chunk)
    return "".join(chunks)


def limit(n_bytes: int, seconds: float) -> None:
    """Cap this process's memory, and its time in case nobody is left to stop it, where the system can."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for kind, most in ((resource.RLIMIT_AS, n_bytes), (resource.RLIMIT_CPU, math.ceil(seconds) + 1)):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))


def answer(job: dict[str, Any]) -> bytes:
    """The texts, or why there are none, as JSON."""
    try:
        template = environment().from_string(job["template"])
        chats = [{**job["variables"], "messages": messages} for messages in job["conversations"]]
        texts = [render(template, chat, job["characters"]) for chat in chats]
        return json.dumps({"texts": texts}, ensure_ascii=False).encode()
    except Refused as error:
        told = {"refused": str(error.message)[:LONGEST_MESSAGE]}
    except TooLong:
        told = {"over": "characters"}
    except MemoryError:
        told = {"over": "bytes"}
    except Exception as error:  # whatever a stranger's program can do wrong
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        told = {"failed": f"{type(error).__name__}{line}: {str(error)[:LONGEST_MESSAGE]}"}
    return json.dumps(told).encode()


if __name__ == "__main__":
    job = json.load(sys.stdin.buffer)
    limit(job["bytes"], job["seconds"])
    sys.stdout.buffer.write(answer(job))
