"""A conversation as the text and the ids that a chat-tuned model was trained on, by the checkpoint's own template.

The template is a program by whoever made the checkpoint: it runs in `template.py`, in a process of its own, with a cap on
its time, its memory and what it writes. What people wrote is not to be obeyed either: control tokens are those that the
template writes, and "</s>" in somebody's message is four characters of text.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers

from .parts import CheckpointError, short

TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
SECONDS, BYTES, CHARACTERS = 10.0, 1 << 29, 10_000_000  # what a template may use, and the longest text that it may write
TOGETHER = 64  # conversations that share a process, and so its time and its memory
REASONING = ("reasoning_content", "thinking", "reasoning")  # names under which callers hand in what a model thought
EXAMPLE = "{'role': 'user', 'content': 'Hi'}"
INSTEAD = "give another one with template=, or the text as a plain prompt"

Messages = Sequence[dict[str, Any]]


class Chat:
    """What a checkpoint says of chats: its templates and special tokens by name, and how a conversation becomes ids."""

    def __init__(self, core: tokenizers.Tokenizer, settings: dict[str, Any], files: dict[str, bytes]) -> None:
        self._core, self._settings, self._files = core, settings, files
        added = core.get_added_tokens_decoder()
        self._special = {index: token for index, token in added.items() if token.special and token.content}

    # ---- what the checkpoint says

    @cached_property
    def templates(self) -> dict[str, str]:
        """Name -> template. Files of their own count; only where there are none, what tokenizer_config.json says."""
        files = {"default": self._files[TEMPLATE]} if TEMPLATE in self._files else {}
        more = (name for name in self._files if name.startswith(f"{MORE_TEMPLATES}/"))
        files |= {Path(name).stem: self._files[name] for name in more}
        if files:
            try:
                return {name: content.decode() for name, content in files.items()}
            except UnicodeDecodeError as error:
                raise CheckpointError(f"a chat template is not UTF-8 ({error}); download it again") from None
        stated = self._settings.get("chat_template")
        if stated is None or isinstance(stated, str):
            return {} if stated is None else {"default": stated}
        named = stated if isinstance(stated, list) else [stated]
        if not all(isinstance(one, dict) and {type(one.get("name")), type(one.get("template"))} == {str} for one in named):
            raise CheckpointError(
                "tokenizer_config.json: 'chat_template' must be a string or a list of objects with a name and a template, "
                f"not {short(stated)}"
            )
        return {one["name"]: one["template"] for one in named}

    @cached_property
    def marks(self) -> dict[str, str]:
        """What templates call the special tokens -> their text: bos_token, eos_token and whichever the checkpoint has."""
        more = self._settings.get("extra_special_tokens")
        named = {name: token for name, token in self._settings.items() if name.endswith("_token")}
        named |= more if isinstance(more, dict) else {}
        texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}  # null is none, and add_bos_token a flag

    def choose(self, template: str | None, tools: Any) -> str:
        """The template of that name, or `template` itself if it is one; unless it is given, that for tools or the default."""
        known = self.templates
        if template is not None and template not in known and "{" in template:
            return template
        if not known:
            raise CheckpointError(
                "this checkpoint has no chat template; give the text as a plain prompt, or load a chat-tuned checkpoint"
            )
        for_tools = "tool_use" if tools is not None and "tool_use" in known else "default"
        name = for_tools if template is None else template
        if name not in known:
            asked = "several chat templates and no default" if template is None else f"no chat template {short(template)}"
            raise ValueError(f"this checkpoint has {asked}; choose with template= one of {', '.join(sorted(known))}")
        return known[name]

    # ---- a conversation as text

    def texts(
        self,
        conversations: Sequence[Messages],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> list[str]:
        """The text of each conversation. `Tokenizer.chat_text` says what the keywords mean."""
        if add_generation_prompt and continue_final_message:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other; ask for one of them")
        if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(tool, dict) for tool in tools)):
            raise ValueError(f"tools must be a list of JSON schemas, each a dictionary, not {short(tools)}")
        source = self.choose(template, tools)
        chats, tools, variables = _plain([[*map(_checked, conversations)], tools, variables])
        prompt = not continue_final_message if add_generation_prompt is None else bool(add_generation_prompt)
        variables = {"documents": None, **self.marks, **variables, "tools": tools, "add_generation_prompt": prompt}
        if not continue_final_message:
            return render(source, chats, variables)
        end = next(_unused([chats, variables, source]))
        lasts = [_mark_end(messages[-1], end) for messages in chats]
        return [_cut(text, last, end) for text, last in zip(render(source, chats, variables), lasts, strict=True)]

    # ---- and as ids

    def ids(self, conversations: Sequence[Messages], /, *, template: str | None = None, **how: Any) -> list[list[int]]:
        """The ids of each conversation's text, where only what the template itself writes becomes a special token."""
        conversations, how = _plain([conversations, how])
        disguise = Disguise([token.content for token in self._special.values()], [conversations, how, template, self.templates])
        try:
            hidden, how = disguise.on(conversations), disguise.on(how)
        except RecursionError:
            raise ValueError("messages, tools and variables must not be nested hundreds deep; unfold them") from None
        return [self._encode(text, disguise) for text in self.texts(hidden, template=template, **how)]

    def _encode(self, text: str, disguise: Disguise) -> list[int]:
        """The ids of a rendered text, in which the disguise still hides the special tokens that are not the template's."""
        self._core.encode_special_tokens = False
        seen = self._core.encode(text, add_special_tokens=False)  # so that there is no BOS but the template's
        special = [(index, *span) for index, span in zip(seen.ids, seen.offsets, strict=True) if index in self._special]
        # Those that stand there letter by letter: <unk> for an unknown character does not, nor what a normalizer makes alike.
        places = [(text.find(self._special[index].content, start, end), index) for index, start, end in special]
        own = [(at, index) for at, index in places if at >= 0]
        if len(own) == len(special) and disguise.off(text) == text:
            return seen.ids
        return self._encode_guarded(text, own, disguise)

    def _encode_guarded(self, text: str, own: list[tuple[int, int]], disguise: Disguise) -> list[int]:
        """The same the other way round: the special tokens in `own` (place, id) are in disguise, and all others are shown."""
        core, placeholders, id_of = self._guarded
        pieces, after = [], 0
        for at, index in own:
            pieces += [disguise.off(text[after:at]), placeholders[index]]
            after = at + len(self._special[index].content)
        shown = "".join([*pieces, disguise.off(text[after:])])
        seen = core.encode(shown, add_special_tokens=False)
        ids = [id_of.get(index, index) for index in seen.ids]
        special = [
            index
            for index, given, (start, end) in zip(ids, seen.ids, seen.offsets, strict=True)
            if given in id_of or (index in self._special and self._special[index].content in shown[start:end])
        ]
        if special != [index for _, index in own]:  # a tokenizer may know no other way to write one than as itself
            raise ValueError("this tokenizer cannot write the special tokens in these messages as text; leave them out")
        return ids

    @cached_property
    def _guarded(self) -> tuple[tokenizers.Tokenizer, dict[int, str], dict[int, int]]:
        """A tokenizer to which special tokens are text and placeholders are special: itself, id -> placeholder, its id -> id.

        Encoding the pieces between special tokens one by one would not do: what a tokenizer does at the beginning of a
        text, such as putting a space there, it must do only once.
        """
        nobodys = "".join(chr(0x100000 + secrets.randbelow(0xFFFE)) for _ in range(5))  # private-use, and not to be guessed
        placeholders = {index: nobodys + chr(0x100000 + n) for n, index in enumerate(self._special)}
        described = self._core.to_str()
        if isinstance(self._core.model, tokenizers.models.Unigram):  # it would find the special tokens among its pieces
            raw = json.loads(described)
            vocab = raw["model"]["vocab"]
            for token in raw["added_tokens"]:
                if token["id"] in placeholders and token["id"] < len(vocab):
                    token["content"] = vocab[token["id"]][0] = placeholders[token["id"]]
                    token["special"] = False
            described = json.dumps(raw)
        core = tokenizers.Tokenizer.from_str(described)
        core.encode_special_tokens = True
        for index, token in self._special.items():
            flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            core.add_tokens([tokenizers.AddedToken(placeholders[index], special=False, **flags)])
        return core, placeholders, {core.token_to_id(text): index for index, text in placeholders.items()}


class Disguise:
    """Hides the special tokens in what people wrote, so that those in the rendered text are the template's own.

    Of each one the first character becomes a stand-in, which occurs nowhere else. So does that of a beginning of one at the
    end of a text, for a template may put two texts side by side. What a template joins from shorter pieces, such as
    '<|' + role + '|>', it means.
    """

    def __init__(self, specials: Sequence[str], seen: Any) -> None:
        """To be used where `seen` and nothing else is seen."""
        self._specials, unused = specials, _unused(seen)
        self._stand_ins = {first: next(unused) for first in dict.fromkeys(special[0] for special in specials)}
        self._beginnings = {special[:n] for special in specials for n in range(1, len(special))}
        self._longest = max(map(len, specials), default=0)

    def on(self, value: Any, name: str = "") -> Any:
        """A copy of `value` (JSON: texts, and lists and dictionaries of them), in disguise; `name` is its key."""
        if isinstance(value, list):
            return [self.on(inner, name) for inner in value]
        if isinstance(value, dict):
            return {self._hide(key, ends=False): self.on(inner, key) for key, inner in value.items()}
        # Roles and types are compared with words, and no word may be taken for the beginning of a special token.
        return self._hide(value, ends=name not in ("role", "type")) if isinstance(value, str) else value

    def off(self, text: str) -> str:
        """The text as it was, also where the template wrote it as JSON or as Python does, which may escape a stand-in."""
        for first, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, first).replace(_escaped(stand_in), first)
        return text

    def _hide(self, text: str, ends: bool) -> str:
        whole = (special for special in self._specials if special in text)
        places = {match.start() for special in whole for match in re.finditer(f"(?={re.escape(special)})", text)}
        if ends:
            end = len(text.rstrip())  # a template may strip it
            places |= {at for at in range(max(0, end - self._longest), end) if text[at:end] in self._beginnings}
        return "".join(self._stand_ins[letter] if at in places else letter for at, letter in enumerate(text))


def render(template: str, conversations: Sequence[Messages], variables: dict[str, Any]) -> list[str]:
    """The text of each conversation, rendered in another process within the caps.

    Raises ValueError when the template refuses the messages, CheckpointError when it fails or goes beyond a cap.
    """
    texts = []
    for start in range(0, len(conversations), TOGETHER):
        job = {"template": template, "conversations": conversations[start : start + TOGETHER], "variables": variables}
        texts += _answer(job | {"seconds": SECONDS, "bytes": BYTES, "characters": CHARACTERS})
    return texts


def _answer(job: dict[str, Any]) -> list[str]:
    """What `template.py` makes of a job, or the error that says why it makes nothing."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("template.py"))]  # -P: our files are not modules to it
    beyond = {
        "seconds": f"takes longer than {SECONDS:g} seconds",
        "bytes": f"needs more than {BYTES / 2**20:g} MiB of memory",
        "characters": f"writes more than {CHARACTERS:,} characters",
    }
    job = json.dumps(job).encode()
    try:
        done = subprocess.run(command, input=job, capture_output=True, timeout=SECONDS)
        told = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        told = {"over": "seconds"}
    except OSError as error:
        raise CheckpointError(f"cannot start {sys.executable} to render the chat template: {error.strerror}") from None
    except ValueError:  # no answer: the process died
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        told = {"failed": last[0] if last else f"its process ended with {done.returncode}"}
    if "refused" in told:
        raise ValueError(f"the checkpoint's chat template refuses these messages: {_line(told['refused'])}")
    if "over" in told:
        raise CheckpointError(f"the checkpoint's chat template {beyond[told['over']]}; {INSTEAD}")
    if "failed" in told:
        raise CheckpointError(f"the checkpoint's chat template cannot be rendered ({_line(told['failed'])}); {INSTEAD}")
    return told["texts"]


def _line(text: str) -> str:
    """A stranger's words on one line, and nothing in them that a terminal would obey."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:400]


def _plain(value: Any) -> Any:
    """A copy of what JSON can hold. Raises ValueError for anything else, and for half characters, which have no bytes."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"messages, tools and variables must be what JSON can hold ({error})") from None


def _checked(messages: Any) -> list[dict[str, Any]]:
    """The messages as templates expect them: no key with null, and reasoning under both names that they know it by."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages must be a list such as [{EXAMPLE}], not {short(messages)}")
    chat = []
    for number, message in enumerate(messages, 1):
        said = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
        content = said.get("content", "")  # absent beside tool calls, for instance
        is_parts = isinstance(content, list | tuple) and all(isinstance(part, dict) for part in content)
        if not isinstance(said.get("role"), str) or len(said) == 1 or not (isinstance(content, str) or is_parts):
            raise ValueError(f"message {number} must have a role and a content, such as {EXAMPLE}, not {short(message)}")
        reasoning = next((said[name] for name in REASONING if name in said), None)
        if reasoning is not None:
            said |= {"reasoning_content": reasoning, "thinking": said.get("thinking", reasoning)}
        chat.append(said)
    return chat


def _unused(seen: Any) -> Iterator[str]:
    """Private-use characters that occur nowhere in `seen`, nor their escapes."""
    text = json.dumps(seen, ensure_ascii=False)
    every = map(chr, chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)))
    return (letter for letter in every if letter not in text and _escaped(letter) not in text)


def _escaped(letter: str) -> str:
    return json.dumps(letter).strip('"')


def _mark_end(message: dict[str, Any], end: str) -> str:
    """Put `end` and a space at the end of the message's text, and return that text without them."""
    content = message.get("content")
    holders = [message] if isinstance(content, str) else [part for part in content or [] if isinstance(part.get("text"), str)]
    if not holders:
        raise ValueError("the last message has no text to continue; give it a content")
    key = "content" if holders[-1] is message else "text"
    text = holders[-1][key]
    holders[-1][key] = f"{text}{end} "
    return text


def _cut(text: str, last: str, end: str) -> str:
    """The text up to `end`. Where a template stripped the space after it, it stripped the message, and so is the text."""
    at = text.rfind(end)
    if at < 0 or last.strip() not in text:
        raise ValueError("the checkpoint's chat template leaves out some of the last message, so that it cannot be continued")
    return text[:at] if text.startswith(end + " ", at) else text[:at].rstrip()
