"""Text to batches: read, split, tokenize, and deal out in an order that a number alone decides.

    source = open_source("my.txt")                     # what there is, piece by piece, so that a large file needs no memory
    data = prepare(source, tokenizer, folder, …)       # ids of the training and of the validation split
    batch = data.train.batch(range(0, 12), seed=1)     # items 0 to 11: any process at any time deals the same

A text is cut into windows of T tokens, each to predict the T that follow by one; the cuts lie elsewhere in every epoch, so
that every position is a target and is seen with more or less before it. Of lines and JSON lines each example is a row of
its own, which sees nobody else.
"""

from __future__ import annotations

import codecs
import json
import mmap
import tempfile
import unicodedata
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..cli import UsageError
from ..tokenizer import Tokenizer

FORMATS = ("text", "lines", "jsonl", "bin")
PIECE = 1 << 20  # bytes read at a time
LONGEST_LINE, MOST_WORDS = 40, 3  # of a file of lines that is taken for examples
IGNORED = -100  # a target that is none


# ---------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Source:
    """Where text comes from. `pieces()` gives it in order: a piece, and whether a document or example ends with it."""

    files: tuple[Path, ...]
    format: str
    encoding: str
    normalization: str
    name: str  # as the user gave it

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """The text, normalized; read anew each time."""
        for file in self.files:
            decoded = _decode(file, self.encoding)
            if self.format == "text":
                yield from ((self._normal(text), last) for text, last in _with_last(_lines(decoded, PIECE)))
            elif self.format == "lines":
                yield from ((self._normal(line), True) for line in _each_line(decoded) if line)
            else:
                for number, line in enumerate(_each_line(decoded), 1):
                    if line.strip():
                        yield self._normal(_text_of(line, f"{file}, line {number}")), True

    def _normal(self, text: str) -> str:
        return unicodedata.normalize("NFC", text) if self.normalization == "nfc" else text


def open_source(data: str, format: str | None, encoding: str, normalization: str, flag: str = "--data") -> Source:
    """Find the files of a flag and what they hold. Raises UsageError, saying what there is, for what cannot be read."""
    files: tuple[Path, ...]
    try:
        codecs.lookup(encoding)
    except LookupError:
        raise UsageError(f"--encoding {encoding} is not known; there are utf-8, cp949, utf-16, latin-1 and others") from None
    if Path(data).is_dir() and format == "bin":
        raise UsageError(f"{flag} {data} is a folder, and ids come in one file: name it, or leave out --format bin")
    if Path(data).is_dir():
        wanted = (".jsonl",) if format == "jsonl" else (".txt", ".md", ".text")
        files = tuple(sorted(file for file in Path(data).rglob("*") if file.is_file() and file.suffix.lower() in wanted))
        if not files:
            raise UsageError(f"{flag} {data} is a folder without {' or '.join(wanted)} files; name a file")
    elif Path(data).is_file():
        files = (Path(data),)
    else:
        raise UsageError(f"{flag} {data} does not exist; give a text file, a folder of them, or - for standard input")
    if sum(file.stat().st_size for file in files) == 0:
        raise UsageError(f"{flag} {data} is empty; give a file with text in it")
    suffix = files[0].suffix.lower()
    if format is None:
        format = {".jsonl": "jsonl", ".npy": "bin", ".bin": "bin"}.get(suffix)
    if format is None:
        format = "lines" if len(files) == 1 and _looks_like_lines(files[0], encoding) else "text"
    return Source(files, format, encoding, normalization, data)


def _decode(file: Path, encoding: str) -> Iterator[str]:
    """A file's text in pieces, without BOM and with \\n for \\r\\n; by memory map."""
    decoder = codecs.getincrementaldecoder("utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding)("strict")
    if file.stat().st_size == 0:
        return
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as view:
        held = ""  # a \r whose \n may be still to come
        for start in range(0, len(view), PIECE):
            piece = view[start : start + PIECE]
            try:
                text = held + decoder.decode(piece, final=start + PIECE >= len(view))
            except UnicodeError as error:
                raise UsageError(_undecodable(view, encoding, file)) from error
            held = "\r" if text.endswith("\r") and start + PIECE < len(view) else ""
            yield text[: len(text) - len(held)].replace("\r\n", "\n")


def _undecodable(view: mmap.mmap, encoding: str, file: Path) -> str:
    """Where a file stops being what it should be, and what it may be instead."""
    whole = view[:]
    try:
        whole.decode(encoding)
        offset = 0
    except UnicodeError as error:
        offset = getattr(error, "start", 0)
    try:
        whole.decode("cp949")
        better = "it reads as CP949: give --encoding cp949"
    except UnicodeDecodeError:
        better = "give --encoding with the name of the one it has"
    return f"{file} is not {encoding.upper()}: byte {offset} (0x{whole[offset]:02x}) does not fit; {better}"


def _lines(texts: Iterable[str], least: int) -> Iterator[str]:
    """Cut a stream of text after ends of lines, in pieces of about `least` characters, so that no character is torn."""
    held = ""
    for text in texts:
        held += text
        cut = held.rfind("\n") + 1
        if cut < least and len(held) >= 4 * PIECE:
            cut = len(held)  # a line so long is cut where it may
        if cut >= least:
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _with_last(items: Iterable[str]) -> Iterator[tuple[str, bool]]:
    before = None
    for item in items:
        if before is not None:
            yield before, False
        before = item
    if before is not None:
        yield before, True


def _each_line(texts: Iterable[str]) -> Iterator[str]:
    for piece in _lines(texts, 1):
        yield from piece.removesuffix("\n").split("\n")


def _looks_like_lines(file: Path, encoding: str) -> bool:
    """Whether a file is a list of short examples, such as names: many lines, of few words each, none empty."""
    lines = next(_decode(file, encoding)).split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    short = all(0 < len(line) <= LONGEST_LINE and len(line.split()) <= MOST_WORDS for line in lines)
    return short and len(lines) >= 10


def _text_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
        text = value["text"] if isinstance(value, dict) else None
    except (ValueError, KeyError) as error:
        raise UsageError(f'{where}: not a JSON object with a "text" ({error})') from None
    if not isinstance(text, str) or any("\ud800" <= c <= "\udfff" for c in text):
        raise UsageError(f'{where}: not a JSON object with a "text" that is a string of whole characters')
    return text


# --------------------------------------------------------------------------------------------------------- splitting


@dataclass(frozen=True)
class Halves:
    """Which part of a source trains: a text's first characters, or all examples but those held out."""

    characters: int | None  # of a text: where validation begins
    held_out: frozenset[int]  # of examples: which validate

    def of(self, source: Source) -> Iterator[tuple[str, bool, bool]]:
        """The source's pieces, each with whether its document ends and whether it validates."""
        if self.characters is None:
            for number, (text, _) in enumerate(source.pieces()):
                yield text, True, number in self.held_out
            return
        seen = 0
        for text, last in source.pieces():
            cut = min(max(self.characters - seen, 0), len(text))
            seen += len(text)
            if cut:
                yield text[:cut], last and cut == len(text), False
            if cut < len(text):
                yield text[cut:], last, True


def split(source: Source, val_fraction: float) -> Halves:
    """The last `val_fraction` of a text's characters, or as many examples, drawn by a number that never changes."""
    if source.format == "text":
        total = sum(len(text) for text, _ in source.pieces())
        return Halves(round(total * (1 - val_fraction)), frozenset())
    total = sum(1 for _ in source.pieces())
    order = np.random.default_rng(0).permutation(total)
    return Halves(None, frozenset(order[: round(total * val_fraction)].tolist()))


# ---------------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class Batch:
    """tokens and targets (B, T) int64; a target of IGNORED is none, and tokens there come after all that see them not.

    counts: how many columns of each row are to be computed, or None for all.
    """

    tokens: Tensor
    targets: Tensor
    counts: tuple[int, ...] | None

    @property
    def n_targets(self) -> int:
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        return Batch(self.tokens.to(device, non_blocking=True), self.targets.to(device, non_blocking=True), self.counts)


class Split(ABC):
    """One half of the data, as numbered items: item i of epoch e is a row of inputs and targets."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids
        self._order: tuple[tuple[int, int], np.ndarray] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Items of one epoch."""

    @abstractmethod
    def item(self, i: int, shift: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of item i, two rows of one length."""

    def batch(self, numbers: Iterable[int], seed: int) -> Batch:
        """The items of these numbers, counted over all epochs; each epoch has its own order. (B, T)"""
        rows = []
        for number in numbers:
            epoch, place = divmod(number, len(self))
            if self._order is None or self._order[0] != (seed, epoch):
                self._order = (seed, epoch), np.random.default_rng([seed, epoch]).permutation(len(self))
            shift = int(np.random.default_rng([seed, epoch, 1]).integers(1 << 30)) if epoch else 0
            rows.append(self.item(int(self._order[1][place]), shift))
        return _collate(rows)

    def in_order(self, batch_size: int, upto: int | None = None) -> Iterator[Batch]:
        """Every item once, as they lie: each position is scored once. (B, T)"""
        total = len(self) if upto is None else min(upto, len(self))
        for start in range(0, total, batch_size):
            yield _collate([self.item(i, 0) for i in range(start, min(start + batch_size, total))])


class Windows(Split):
    """A text in windows of `block_size` tokens. Where a window begins after an end of line, it begins with BOS instead: so the
    model learns what stands after it, which is where sampling starts. `mark` is what stands between documents; it goes in as
    BOS too, if that is another id.

    Epoch 0 is each position once. In later ones, moved by a shift, the last window meets the one before it, and the tokens
    before the first are left for other epochs.
    """

    def __init__(
        self,
        ids: np.ndarray,
        block_size: int,
        ends: frozenset[int] = frozenset(),
        bos: int | None = None,
        mark: int | None = None,
    ) -> None:
        super().__init__(ids)
        self.block_size, self.ends, self.bos, self.mark = block_size, ends, bos, mark

    def __len__(self) -> int:
        return -(-(len(self.ids) - 1) // self.block_size)

    def item(self, i: int, shift: int) -> tuple[np.ndarray, np.ndarray]:
        """Window i, moved by `shift` (modulo a window). The last is moved back if it would be short, or is short."""
        start = i * self.block_size
        if shift:
            start = min(start + shift % self.block_size, max(0, len(self.ids) - 1 - self.block_size))
        row = np.asarray(self.ids[start : start + self.block_size + 1]).astype(np.int64)
        inputs, targets = row[:-1].copy(), row[1:]
        if self.bos is not None:
            if int(inputs[0]) in self.ends:
                inputs[0] = self.bos
            if self.mark is not None:
                inputs[inputs == self.mark] = self.bos
        return inputs, targets


class Examples(Split):
    """Examples, each a row of its own: BOS, its tokens, EOS. Longer ones go on in further rows.

    Between examples the ids hold one mark; where BOS is another id than that, it takes its place before an example.
    """

    def __init__(self, ids: np.ndarray, mark: int, block_size: int, bos: int | None = None) -> None:
        super().__init__(ids)
        self.mark, self.bos = mark, mark if bos is None else bos
        marks = np.flatnonzero(np.asarray(ids) == mark)  # the stream is mark, example, mark, example, …, mark
        starts, ends = marks[:-1], marks[1:]
        pieces = -(-(ends - starts) // block_size)
        first = np.repeat(np.cumsum(pieces) - pieces, pieces)
        self.starts = np.repeat(starts, pieces) + (np.arange(pieces.sum()) - first) * block_size
        self.ends = np.minimum(np.repeat(ends, pieces), self.starts + block_size)

    def __len__(self) -> int:
        return len(self.starts)

    def item(self, i: int, shift: int) -> tuple[np.ndarray, np.ndarray]:
        row = np.asarray(self.ids[self.starts[i] : self.ends[i] + 1]).astype(np.int64)
        inputs, targets = row[:-1].copy(), row[1:]
        if inputs[0] == self.mark:
            inputs[0] = self.bos
        return inputs, targets


def _collate(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """Rows side by side, the longer first, since attention looks at neighbours of one length together.

    What is padding stands at the end of a row, where no real token sees it.
    """
    rows = sorted(rows, key=lambda row: -len(row[0]))
    counts = tuple(len(inputs) for inputs, _ in rows)
    tokens = np.zeros((len(rows), counts[0]), dtype=np.int64)
    targets = np.full_like(tokens, IGNORED)
    for row, (inputs, wanted) in enumerate(rows):
        tokens[row, : len(inputs)], targets[row, : len(inputs)] = inputs, wanted
    # A little padding costs less than looking at rows of every length by themselves
    padded = 2 * sum(counts) >= tokens.size
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), None if padded else counts)


@dataclass(frozen=True)
class Data:
    """Both splits, the tokenizer that made their ids, and a number that tells these ids from others."""

    train: Split
    val: Split | None
    tokenizer: Tokenizer
    fingerprint: int
    bytes_of: np.ndarray  # (V,) how many bytes each id stands for: 0 for marks

    def bytes_in(self, targets: Tensor) -> int:
        """How many bytes of text these targets stand for."""
        real = targets[targets != IGNORED].numpy()
        return int(self.bytes_of[real].sum())


def prepare(
    source: Source,
    tokenizer: Tokenizer | Callable[[Iterable[str], Iterable[str]], Tokenizer],
    *,
    block_size: int,
    val_fraction: float,
    val_source: Source | None = None,
) -> Data:
    """Split, make the tokenizer where it is to be made (from the training split's texts, or all of them), and tokenize.

    Raises UsageError, with the numbers, when a split is too short or a character has no id.
    """
    halves = None if source.format == "bin" else split(source, 0.0 if val_source else val_fraction)
    if not isinstance(tokenizer, Tokenizer):
        if halves is None:
            raise UsageError("ids carry no text to make a tokenizer from: give --tokenizer DIR, the one that made them")
        everything = chain(source.pieces(), val_source.pieces() if val_source else ())
        trained_on = (text for text, _, validates in halves.of(source) if not validates)
        tokenizer = tokenizer(trained_on, (text for text, _ in everything))
    mark = tokenizer.eos_ids[0] if tokenizer.eos_ids else tokenizer.bos_id
    apart = source.format in ("lines", "jsonl")
    if mark is None and apart:
        raise UsageError("examples need a mark between them, and this tokenizer has neither BOS nor EOS: give --format text")

    if halves is None:
        train, val = _read_ids(source, tokenizer, 0.0 if val_source else val_fraction)
        if val_source is not None:
            val, _ = _read_ids(val_source, tokenizer, 0.0)
    else:
        parts = [_Ids(mark), _Ids(mark)]
        for text, ends, validates in halves.of(source):
            parts[validates].add(encode(tokenizer, text, source.name), ends)
        if val_source is not None:
            for text, ends in val_source.pieces():
                parts[1].add(encode(tokenizer, text, val_source.name), ends)
        train, val = (part.finish() for part in parts)

    fingerprint = zlib.crc32(np.ascontiguousarray(val), zlib.crc32(np.ascontiguousarray(train)))
    bytes_of = np.array([0 if tokenizer.is_special(i) else len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)])
    wanted = val_fraction > 0 or val_source is not None
    if apart:
        made = [Examples(ids, mark, block_size, tokenizer.bos_id) for ids in (train, val)]
        for what, ids in zip(("training", "validation") if wanted else ("training",), made, strict=False):
            if len(ids) < 1:
                raise UsageError(f"{source.name} leaves no example for {what}: give more lines, or another --val_fraction")
        return Data(made[0], made[1] if wanted else None, tokenizer, fingerprint, bytes_of)
    ends = frozenset(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).endswith(b"\n"))
    for what, ids, more in (("training", train, ""), ("validation", val, "another --val_fraction, ")):
        if (what == "training" or wanted) and len(ids) < block_size + 1:
            raise UsageError(
                f"{source.name} leaves {len(ids)} tokens for {what}, and a window takes {block_size + 1}: "
                f"give more text, {more}or a shorter --block_size"
            )
    made = Windows(train, block_size, ends, tokenizer.bos_id, mark)
    scored = Windows(val, block_size, bos=tokenizer.bos_id, mark=mark) if wanted else None
    return Data(made, scored, tokenizer, fingerprint, bytes_of)


def encode(tokenizer: Tokenizer, text: str, name: str) -> list[int]:
    """A piece's ids without BOS. Raises UsageError for a character that has no id."""
    try:
        ids = tokenizer.encode(text)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
    return ids[1:] if ids[:1] == [tokenizer.bos_id] else ids


class _Ids:
    """Ids on their way to a memory-mapped file without a name: mark, document, mark, document, …, mark."""

    def __init__(self, mark: int | None) -> None:
        self.mark = [] if mark is None else [mark]
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - the map keeps it
        self.count = 0
        self._write(self.mark)

    def add(self, ids: Sequence[int], ends: bool) -> None:
        self._write(list(ids) + (self.mark if ends else []))

    def _write(self, ids: Sequence[int]) -> None:
        np.asarray(ids, dtype=np.uint32).tofile(self.file)
        self.count += len(ids)

    def finish(self) -> np.ndarray:
        self.file.flush()
        return np.memmap(self.file, dtype=np.uint32, mode="r") if self.count else np.zeros(0, dtype=np.uint32)


def _read_ids(source: Source, tokenizer: Tokenizer, val_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """A file of ids, as `numpy.save` writes it: its header says how wide they are."""
    try:
        ids = np.load(source.files[0], mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError):
        raise UsageError(
            f"{source.files[0]} is no file of ids that says how wide they are; write one with "
            'numpy.save("ids.npy", ids), or read a headerless one first: numpy.fromfile("train.bin", dtype="uint16")'
        ) from None
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "ui" or not len(ids):
        raise UsageError(f"{source.files[0]} must hold one row of whole numbers, as numpy.save writes it")
    for start in range(0, len(ids), PIECE):
        highest, lowest = int(ids[start : start + PIECE].max()), int(ids[start : start + PIECE].min())
        if highest >= tokenizer.vocab_size or lowest < 0:
            wrong = highest if lowest >= 0 else lowest
            raise UsageError(f"{source.files[0]} holds id {wrong}, and the tokenizer has {tokenizer.vocab_size}: give its own")
    cut = round(len(ids) * (1 - val_fraction))
    return ids[:cut], ids[cut:]
