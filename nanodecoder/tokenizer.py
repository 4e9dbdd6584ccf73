"""Text to ids and back, by a checkpoint's own tokenizer.json (read by the `tokenizers` library).

Decoding goes through bytes: each id stands for some bytes, and what they spell together is the text. So a stream can hold
back the bytes of an unfinished character, and `decode` is nothing but a stream run to its end.
"""

from __future__ import annotations

import codecs
import json
import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from .chat import MORE_TEMPLATES, TEMPLATE, Chat, Messages
from .checkpoint import token_text
from .families import find_family
from .parts import CheckpointError
from .storage import CONFIG, find_folder, read_bytes, read_json

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
MARKS, ADDED = "special_tokens_map.json", "added_tokens.json"
KEPT = (TOKENIZER, SETTINGS, MARKS, ADDED, TEMPLATE)


class Tokenizer:
    """A checkpoint's tokenizer. `bos_id` is the id that starts a text, or None; `eos_ids` those of its end token."""

    def __init__(
        self, core: tokenizers.Tokenizer, settings: dict[str, Any] | None = None, kept: dict[str, bytes] | None = None
    ) -> None:
        self._core = core
        self._kept = {TOKENIZER: core.to_str(pretty=True).encode(), **(kept or {})}
        settings = settings or {}
        description = json.loads(core.to_str())
        core.no_truncation()  # what training cut and padded is nobody's wish here
        core.no_padding()
        special = [token for token in description.get("added_tokens") or [] if token["special"]]
        self._special_ids = {token["id"] for token in special}
        self._special_texts = [token["content"] for token in special if token["content"]]
        self._decoders = _decoder_kinds(description.get("decoder"))
        self._bytes: dict[int, bytes] = {}

        # Where nobody names it, BOS is what the template puts before a text.
        text, probe = _encodable(core)
        before = core.encode(text, add_special_tokens=True).ids[: -len(probe) or None]
        by_template = before[0] if probe and before and before[0] in self._special_ids else None
        # null there means none, whatever config.json says of ids
        self.bos_id: int | None = self._id_of(settings["bos_token"]) if "bos_token" in settings else by_template
        end = self._id_of(settings.get("eos_token"))
        self.eos_ids: tuple[int, ...] = () if end is None else (end,)
        # Which end of a text that is too long is lost, as the checkpoint has it for transformers' truncation
        self.truncation_side: str = settings.get("truncation_side") or "right"

        # The template inside tokenizer.json says where BOS and EOS go, and overrules the flags beside it, as in transformers
        # 5; where there is no template, the flags are all that the checkpoint says.
        by_flags = description.get("post_processor") is None
        self._before = [self.bos_id] if by_flags and settings.get("add_bos_token") and self.bos_id is not None else []
        self._after = list(self.eos_ids) if by_flags and settings.get("add_eos_token") else []
        self._chat = Chat(core, settings, self._kept)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """From a checkpoint folder: its tokenizer.json, or vocab.json with merges.txt (GPT-2's and OPT's older form).

        Raises CheckpointError when it has neither, or one that cannot be read.
        """
        folder, _ = find_folder(path)
        family = find_family(read_json(folder / CONFIG), str(folder / CONFIG))
        own = family.tokenizer if family is not None else {}
        stated = [read_json(folder / name) for name in (MARKS, SETTINGS) if (folder / name).is_file()]
        settings = {key: value for said in (own, *stated) for key, value in said.items()}
        templates = sorted(f"{MORE_TEMPLATES}/{file.name}" for file in (folder / MORE_TEMPLATES).glob("*.jinja"))
        kept = {name: read_bytes(folder / name) for name in (*KEPT, *templates) if (folder / name).is_file()}
        try:
            if TOKENIZER in kept:
                core = tokenizers.Tokenizer.from_buffer(kept[TOKENIZER])
            elif own and (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
                core = _byte_level_bpe(folder / "vocab.json", folder / "merges.txt", settings)
                _add_tokens(core, folder, settings)
            elif (folder / "vocab.json").is_file():
                raise CheckpointError(
                    f"{folder} has a vocab.json and no {TOKENIZER}, and how this family cuts text before merging is not in it; "
                    "convert it with transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
                )
            elif (folder / "tokenizer.model").is_file():
                raise CheckpointError(
                    f"{folder} has a SentencePiece tokenizer.model and no {TOKENIZER}; convert it with "
                    "transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR), or give ids instead of text"
                )
            else:
                raise CheckpointError(f"there is no {TOKENIZER} in {folder}; download it, or give ids instead of text")
        except CheckpointError:
            raise
        except BaseException as error:  # the library raises bare Exception, and panics beyond that
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise CheckpointError(f"the tokenizer in {folder} cannot be read ({error}); download it again") from None
        return cls(core, settings, kept)

    def files(self) -> dict[str, bytes]:
        """What a checkpoint folder keeps of this tokenizer: file name -> content."""
        return dict(self._kept)

    @property
    def vocab_size(self) -> int:
        """How many pieces there are; a model may have more rows of logits."""
        return self._core.get_vocab_size()

    # ---- encoding

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text, with BOS (and EOS) where the checkpoint's own rules put them, BOS never twice.

        Special tokens that stand in the text stay text, unless `special` is true: a user who types "</s>" has typed four
        characters.
        """
        self._core.encode_special_tokens = not special
        try:
            ids = [*self._before, *self._core.encode(text, add_special_tokens=True).ids, *self._after]
        except Exception as error:  # the library raises nothing more special
            raise ValueError(self._unknown(text, error)) from None
        if self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            del ids[0]  # the text, a rendered chat template for instance, had brought its own
        return ids

    def _unknown(self, text: str, error: Exception) -> str:
        """Why a text has no ids: the first character without one, as far as that can be told."""
        normal = self._core.normalizer.normalize_str(text) if self._core.normalizer else text
        unknown = next((c for c in normal if self._core.token_to_id(c) is None), None)
        if unknown is None:
            return f"the tokenizer cannot encode this text ({error})"
        return (
            f"the tokenizer has no id for {unknown!r} (U+{ord(unknown):04X}), character {normal.index(unknown)} of the text: "
            "leave it out, or use a tokenizer that knows it"
        )

    # ---- chats

    def chat_text(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """A conversation as the checkpoint's chat template writes it: [{"role": "user", "content": "Hi"}, …] -> text.

        At its end stands what opens the model's answer, unless `add_generation_prompt` is false or, with
        `continue_final_message`, the model is to go on with the last message. `tools` are JSON schemas, `template` is a
        template or the name of one of the checkpoint's, and other keywords (enable_thinking=False) go to the template.
        Raises ValueError for messages that are none or that the template refuses, CheckpointError where there is no template
        or it does not work.
        """
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return self._chat.texts([messages], **how, tools=tools, template=template, **variables)[0]

    def chat(self, messages: Messages, **how: Any) -> list[int]:
        """The ids of a conversation, with the keywords of `chat_text`. BOS is there if the template writes it.

        Only what the template writes becomes a special token: one that stands in a message stays text, as in `encode`.
        """
        return self.chats([messages], **how)[0]

    def chats(self, conversations: Sequence[Messages], **how: Any) -> list[list[int]]:
        """The ids of several conversations, rendered together: starting the process that renders is what takes time."""
        return self._chat.ids(conversations, **how)

    def _id_of(self, token: Any) -> int | None:
        content = token_text(token)
        return None if content is None else self._core.token_to_id(content)

    # ---- decoding

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of ids. Special tokens are left out unless `special`; bytes that are no character become "�".

        decode(encode(text)) == text wherever the tokenizer itself loses nothing. (Some do: they normalize characters, fold
        spaces, or have no piece for a character.) Spaces are never tidied.
        """
        stream = self.stream(special=special)
        return "".join([*map(stream.push, ids), stream.finish()])

    def decode_at_once(self, ids: Sequence[int]) -> str:
        """As the library decodes a whole list, without our bytes and streams: to compare with. Broken characters may go."""
        return self._core.decode(list(ids), skip_special_tokens=True)

    def stream(self, after: Sequence[int] = (), special: bool = False, stop: Sequence[str] = ()) -> Stream:
        """A decoder for ids that arrive one by one, continuing the ids of `after`, whose text it does not repeat.

        It ends before the first of the `stop` texts that appears. Raises ValueError for an empty one.
        """
        stream = Stream(self, special)
        for index in after:
            stream.push(index)
        stream.stop_at(stop)
        return stream

    def token_bytes(self, index: int, first: bool = False) -> bytes:
        """The bytes that one id stands for; `first` where it opens a text, which for some tokenizers drops a space.

        An id beyond the vocabulary stands for nothing.
        """
        if first:
            return self._find_bytes(index, first=True)
        if index not in self._bytes:
            self._bytes[index] = self._find_bytes(index, first=False)
        return self._bytes[index]

    def special_id(self, text: str) -> int | None:
        """The id of the mark that is written so ("<|im_end|>"), or None."""
        index = self._core.token_to_id(text)
        return index if index in self._special_ids else None

    def special_in(self, text: str) -> str | None:
        """A mark that a text holds as it is written, or None."""
        return next((mark for mark in self._special_texts if mark in text), None)

    def is_special(self, index: int) -> bool:
        """Whether an id is a mark such as BOS and not part of the text."""
        return index in self._special_ids

    def _find_bytes(self, index: int, first: bool) -> bytes:
        piece = self._core.id_to_token(index) if index >= 0 else None
        if piece is None:
            return b""
        if "ByteLevel" in self._decoders:
            if all(character in BYTE_OF for character in piece):
                return bytes(BYTE_OF[character] for character in piece)
            return piece.encode()
        if "ByteFallback" in self._decoders and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            byte = bytes.fromhex(piece[3:5])
            return b"" if first and self._decode([index]) == "" else byte
        if first:
            return self._decode([index]).encode()
        # What this piece adds after another one: some decoders treat the first piece differently.
        probe = self._probe()
        return self._decode([probe, index])[len(self._decode([probe])) :].encode()

    def _decode(self, ids: list[int]) -> str:
        return self._core.decode(ids, skip_special_tokens=False)

    def _probe(self) -> int:
        """Some id whose text is one plain letter."""
        for letter in "aeiotnsrx":
            for piece in (letter, "▁" + letter):
                index = self._core.token_to_id(piece)
                if index is not None:
                    return index
        return next(index for index in range(self.vocab_size) if self._decode([index]).strip().isalnum())


class Stream:
    """Turns ids into text as they come, and never shows half a character. Made by `Tokenizer.stream`.

    Where it is to stop at certain texts, it holds back what could be the beginning of one. `stopped`: one has appeared.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        self._stop: tuple[str, ...] = ()
        self._held = ""
        self.stopped = False

    def stop_at(self, stop: Sequence[str]) -> None:
        """From here on, end before the first of these texts that appears."""
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"stop must be a list of texts, none of them empty, not {stop!r:.60}")
        self._stop = tuple(stop)

    def push(self, index: int) -> str:
        """The text that can be shown with this id, possibly none."""
        index = operator.index(index)  # of a tensor or an array too
        if self._tokenizer.is_special(index) and not self._special:
            return ""
        text = self._characters.decode(self._tokenizer.token_bytes(index, self._first))
        self._first = False
        return self._show(text)

    def finish(self) -> str:
        """What is left: bytes that no character was made of, as "�", and what was held back for nothing."""
        text = self._show(self._characters.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _show(self, text: str) -> str:
        """What can be shown when `text` has come: all before a stop text, or before what may become one."""
        if not self._stop:
            return text
        if self.stopped:
            return ""
        text = self._held + text
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        self.stopped = bool(found)
        if found:
            self._held = ""
            return text[: min(found)]
        longest = max(map(len, self._stop))
        starts = range(max(0, len(text) - longest + 1), len(text))
        cut = next((i for i in starts if any(stop.startswith(text[i:]) for stop in self._stop)), len(text))
        self._held = text[cut:]
        return text[:cut]


def _encodable(core: tokenizers.Tokenizer) -> tuple[str, list[int]]:
    """Some text that has ids, and them. A tokenizer of one text's characters may know no letter "a"."""
    for text in ("a", *sorted(core.get_vocab(), key=len)):
        try:
            return text, core.encode(text, add_special_tokens=False).ids
        except Exception:  # the library raises nothing more special
            continue
    return "", []


def _add_tokens(core: tokenizers.Tokenizer, folder: Path, settings: dict[str, Any]) -> None:
    """Add what added_tokens.json and `added_tokens_decoder` name beside the vocabulary, at the ids that they name."""
    wanted: dict[int, tokenizers.AddedToken] = {}
    if (folder / ADDED).is_file():
        for content, index in read_json(folder / ADDED).items():
            wanted[int(index)] = tokenizers.AddedToken(content, special=True, normalized=False)
    for index, token in (settings.get("added_tokens_decoder") or {}).items():
        wanted[int(index)] = tokenizers.AddedToken(token["content"], special=token.get("special", True), normalized=False)
    for index, token in sorted(wanted.items()):
        core.add_tokens([token]) if not token.special else core.add_special_tokens([token])
        if core.token_to_id(token.content) != index:
            raise CheckpointError(f"{folder} names {token.content!r} as id {index}, and there it cannot be; download it again")


def _byte_level_bpe(vocab_file: Path, merges_file: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """GPT-2's byte-level BPE from its two files: piece -> id, and which pairs are merged first."""
    vocab = read_json(vocab_file)
    lines = read_bytes(merges_file).decode("utf-8").splitlines()
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if not all(len(pair) == 2 for pair in merges):
        raise CheckpointError(f"{merges_file} must hold two pieces a line; download it again")
    unknown = next((pair for pair in merges if not {*pair, "".join(pair)} <= vocab.keys()), None)
    if unknown:
        raise CheckpointError(
            f"{merges_file} merges {' and '.join(unknown)}, and {vocab_file.name} lacks one of them or both together"
        )
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")))
    core.decoder = tokenizers.decoders.ByteLevel()
    named = [token_text(settings.get(f"{name}_token")) for name in ("bos", "eos", "unk", "pad")]
    marks = [content for content in dict.fromkeys(named) if content in vocab]
    core.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False) for content in marks])
    bos = token_text(settings.get("bos_token"))
    if settings.get("add_bos_token") and bos in vocab:
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
        )
    return core


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    """The types of decoder that tokenizer.json chains."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoder_kinds(inner) for inner in decoder.get("decoders", ())))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins for bytes: printable ones stand for themselves, the others are counted from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
