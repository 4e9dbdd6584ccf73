"""What lies in a checkpoint's folder: JSON that is checked, and tensors by name that are read when they are wanted.

No file is believed before it is checked against its size, and no code that a file may hold is run.
"""

from __future__ import annotations

import json
import mmap
import operator
import os
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .hub import download, is_hub_name
from .parts import CheckpointError, Fields

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SOURCES = (WEIGHTS, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
MAX_HEADER = 100_000_000  # bytes; the safetensors format's own limit
SPELLED = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # by safetensors


def read_bytes(path: Path) -> bytes:
    """A file's content. Raises CheckpointError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError when it is missing, unreadable, not an object, or names a key twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path} has the key {twice!r} twice; remove one")
        return found

    try:
        raw = json.loads(read_bytes(path).decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested beyond reason
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies on disk."""

    file: Path
    dtype: str  # as safetensors spells it: F32, BF16, …
    shape: tuple[int, ...]


def find_folder(path: str | Path) -> tuple[Path, Path | None]:
    """A checkpoint's folder, and the one weights file to read if `path` names one; a hub name is downloaded.

    Raises CheckpointError, which says what is there.
    """
    try:
        return _find_folder(download(Path(path).as_posix()) if is_hub_name(path) else Path(path))
    except OSError as error:  # no permission to look, or a name that no file can have
        raise CheckpointError(f"cannot look at {path!s:.200}: {error.strerror}") from None


def _find_folder(path: Path) -> tuple[Path, Path | None]:
    if path.is_file():
        if path.suffix not in (".safetensors", ".bin"):
            raise CheckpointError(
                f"{path} is not a .safetensors file; give a checkpoint folder or such a file beside its {CONFIG}"
            )
        folder, file = path.parent, path
    elif path.is_dir():
        folder, file = path, None
    else:
        raise CheckpointError(
            f"there is no folder or file {str(path)!r}; give the path of a checkpoint folder with a {CONFIG} in it, "
            "or a hub name org/name"
        )
    if not (folder / CONFIG).is_file():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise CheckpointError(f"there is no {CONFIG} in {folder} (found: {found}); give the folder that has one")
    return folder, file


def _read_index(where: Path) -> dict[str, str]:
    """Tensor name -> shard, with every shard a plain file name that is there."""
    folder = where.parent
    shard_of = Fields(read_json(where), str(where)).take("weight_map", dict)
    if not shard_of:
        raise CheckpointError(f"{where} names no tensors; download it again")
    for name in shard_of.values():
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name or "\\" in name or len(name) > 255:
            raise CheckpointError(f"{where} names {name!r:.60}, which is not a file of its own folder; refused")
        if not (folder / name).is_file():
            raise CheckpointError(f"{where} names {name}, which is not in {folder}; download it")
    return shard_of


class Weights:
    """A checkpoint's tensors by name: `tensors` from the headers alone, `weights[name]` mapped from disk and not yet read.

    The first of these that is there is read: model.safetensors; the shards that model.safetensors.index.json names, which
    decides what is where, so that a shard it does not name is not looked at; the same two as pytorch_model.bin.
    """

    def __init__(self, folder: Path, file: Path | None = None) -> None:
        index: dict[str, str] = {}
        where = file or next((folder / name for name in SOURCES if (folder / name).is_file()), None)
        if where is None:
            found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8])
            raise CheckpointError(f"there are no weights in {folder} (found: {found}); download {' or '.join(SOURCES[:2])}")
        if where.suffix == ".json":
            index = _read_index(where)
        self._open: dict[Path, Any] = {}
        self._lock = Lock()
        self.tensors = {
            name: stored
            for path in (sorted({folder / shard for shard in index.values()}) if index else [where])
            for name, stored in self._header(path).items()
            if index.get(name, path.name) == path.name
        }
        for name, shard in index.items():
            if name not in self.tensors:
                raise CheckpointError(f"{where} says that {name} is in {shard}, and it is not; download both again")

    def __getitem__(self, name: str) -> Tensor:
        path = self.tensors[name].file
        if path.suffix == ".bin":
            return self._open[path][name]
        try:
            with self._lock:
                if path not in self._open:
                    self._open[path] = safe_open(path, framework="pt")
            return self._open[path].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path} cannot be read as safetensors ({error}); download it again") from None

    def _header(self, path: Path) -> dict[str, StoredTensor]:
        if path.suffix != ".bin":
            return read_header(path)
        self._open[path] = tensors = read_pickle(path)
        return {name: StoredTensor(path, SPELLED.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in tensors.items()}


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a pytorch_model.bin, mapped from disk, without running any code that the pickle may hold.

    Raises CheckpointError for one that holds more than tensors, or is damaged.
    """
    better = "if there is a safetensors file of it, take that"
    try:
        _check_pickle(path, better)
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            found = torch.load(path, map_location="cpu", weights_only=True)  # as torch wrote them before 1.6
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is a pickle that holds more than tensors, and is refused ({_first(error)}); {better}"
        ) from None
    except (Exception, MemoryError) as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path} cannot be read as weights ({_first(error)}); download it again, or {better}") from None
    if not isinstance(found, dict) or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in found.items()):
        raise CheckpointError(f"{path} does not hold tensors by name; {better}")
    if any(t.layout != torch.strided or t.device.type != "cpu" for t in found.values()):
        raise CheckpointError(f"{path} holds tensors without plain numbers in memory (sparse or meta); {better}")
    claimed = max((t.numel() * t.element_size() for t in found.values()), default=0)
    if claimed > path.stat().st_size:  # one number seen many times over, which would fill memory once it is copied
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes and one of its tensors claims {claimed}; {better}")
    return found


def _check_pickle(path: Path, better: str) -> None:
    """Refuse, before anything is unpickled, what is no weights file or would make memory out of a number in it."""
    size = path.stat().st_size
    if size < 8:
        raise CheckpointError(f"{path} has {size} bytes, which are no weights; download it again, or {better}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:8] == b"version ":
            raise CheckpointError(f"{path} is {size} bytes of git-lfs pointer instead of weights: run git lfs pull")
        if content.find(b"bytearray") >= 0:  # torch allows it, and a length is all that it takes
            raise CheckpointError(f"{path} is a pickle that holds more than tensors, and is refused (bytearray); {better}")
    if zipfile.is_zipfile(path) and any(
        entry.compress_type != zipfile.ZIP_STORED for entry in zipfile.ZipFile(path).infolist()
    ):
        raise CheckpointError(f"{path} is compressed, which torch's own files never are, and is refused; {better}")


def _first(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """A safetensors file's header, checked against the file's size before anything is believed.

    The format: 8 bytes with the header's length, the header as JSON, then the tensors' bytes.
    Raises CheckpointError for a truncated file, a git-lfs pointer, or a header that claims what is not there.
    """
    again = "download it again (if it came by git: git lfs pull)"
    try:
        file = path.open("rb")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":  # a pointer file begins "version https://git-lfs…"
            raise CheckpointError(f"{path} is {size} bytes of git-lfs pointer instead of weights: run git lfs pull")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{path} has {size} bytes, and its header alone would need {8 + length if size >= 8 else 8}; {again}"
            )
        if length > MAX_HEADER:
            raise CheckpointError(f"{path} claims a header of {length} bytes, and none is longer than {MAX_HEADER}; {again}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise CheckpointError(f"{path} has a header of {length} bytes that is not JSON; {again}") from None
    tensors, end = {}, 0
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            shape = tuple(operator.index(n) for n in entry["shape"])
            tensors[name] = StoredTensor(path, str(entry["dtype"]), shape)
            end = max(end, operator.index(entry["data_offsets"][1]))
    except (AttributeError, KeyError, IndexError, TypeError):
        raise CheckpointError(f"{path} has a header that does not describe tensors; {again}") from None
    if size != 8 + length + end:
        raise CheckpointError(f"{path} has {size} bytes and its header describes {8 + length + end}; {again}")
    return tensors
