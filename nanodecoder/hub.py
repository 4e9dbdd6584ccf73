"""A hub name `org/name` in, a local folder out: a checkpoint's files, fetched once into huggingface_hub's own cache.

Only what is read here is fetched, whatever else lies in the repository, and only a copy that is whole is handed out.
"""

from __future__ import annotations

import errno
import json
import os
import re
import warnings
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from .parts import CheckpointError

# huggingface_hub is imported where it is used: it takes its time, and reads HF_ENDPOINT, HF_HUB_OFFLINE and HF_HOME just then.

CONFIG = "config.json"
SMALL = (
    *(CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)
# The first line whose first file is there is fetched, as storage.py reads it: a pickle only where there is nothing better.
WEIGHTS = (
    ("model.safetensors",),
    ("model.safetensors.index.json", "model-*-of-*.safetensors"),
    ("pytorch_model.bin",),
    ("pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"),
)
_WORD = r"\w(?:[\w.-]{0,94}\w)?"
_NAME = re.compile(rf"(?!.*(?:--|\.\.|\.git$)){_WORD}/{_WORD}", re.ASCII)  # as huggingface_hub checks it
# What this process was given: model and tokenizer come from one commit, though the branch may move between two calls.
_given: dict[tuple[str, str | None], Path] = {}


def is_hub_name(path: str | os.PathLike[str]) -> bool:
    """Whether a path can only mean a repository on the hub: `org/name`, where there is no folder `org` here."""
    text = path.as_posix() if isinstance(path, PurePath) else os.fspath(path)
    return _NAME.fullmatch(text) is not None and not Path(text).parent.is_dir()


def download(name: str, *, revision: str | None = None, offline: bool | None = None) -> Path:
    """The folder of a checkpoint on the hub, fetched where the cache does not have it; `offline` (or HF_HUB_OFFLINE): never.

    `revision` is a branch, tag or commit. Where the hub fails and the cache has a whole copy, that is used, with a warning.
    Raises CheckpointError when it cannot be had.
    """
    if not is_hub_name(name):
        raise CheckpointError(f"{name!r} is not a hub name: give org/name, where there is no folder of the name org here")
    folder = _given.get((name, revision))
    if folder is not None and _missing(folder) is None:
        return folder
    from huggingface_hub import constants

    failure = None
    if not (offline or constants.HF_HUB_OFFLINE):
        try:
            folder = _given[name, revision] = _fetch(name, revision)
            return folder
        except CheckpointError:
            raise
        except Exception as error:  # of the HTTP library's own classes, and which library differs by huggingface_hub's version
            failure = _reason(error, name, revision)
    folder, lack = _cached(name, revision)
    if folder is None:
        elsewhere = f"go online once, or run hf download {name} --local-dir DIR where there is a network and give DIR"
        raise _refusal(name, failure or f"this is offline, and {lack}; {elsewhere}")
    if failure is not None:
        warnings.warn(f"{name} is taken from the cache, as it was when last fetched: {failure}", stacklevel=2)
    _given[name, revision] = folder
    return folder


def describe(
    name: str, *, revision: str | None = None, offline: bool | None = None
) -> tuple[Path, dict[str, tuple[str, tuple[int, ...]]] | None]:
    """What can be known of a checkpoint on the hub without its weights: a folder of its small files, and its tensors' dtypes
    and shapes by name, from the safetensors headers (None where there are no safetensors, or no network).

    Raises CheckpointError when it cannot be had.
    """
    from huggingface_hub import HfApi, constants, get_safetensors_metadata, snapshot_download
    from huggingface_hub.errors import NotASafetensorsRepoError

    if offline or constants.HF_HUB_OFFLINE:
        try:
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=list(SMALL)))
        except (OSError, ValueError):
            raise _refusal(name, f"this is offline, and the cache in {constants.HF_HUB_CACHE} has nothing of it") from None
        return folder, None
    try:
        info = HfApi().model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        there = [file.rfilename for file in info.siblings or []]
        if CONFIG not in there:
            raise _refusal(name, f"the repository has no {CONFIG}; give one that transformers loads")
        folder = Path(snapshot_download(name, revision=info.sha, allow_patterns=list(SMALL)))
        try:
            files = get_safetensors_metadata(name, revision=info.sha).files_metadata.values()
        except NotASafetensorsRepoError:
            return folder, None
    except CheckpointError:
        raise
    except Exception as error:  # as in `download`
        raise _refusal(name, _reason(error, name, revision)) from None
    return folder, {key: (held.dtype, tuple(held.shape)) for file in files for key, held in file.tensors.items()}


def _refusal(name: str, why: str) -> CheckpointError:
    return CheckpointError(f"there is no folder or file {name!r}, and it cannot be had from the hub: {why}")


def _fetch(name: str, revision: str | None) -> Path:
    """Fetch what the cache lacks. Raises CheckpointError for a repository that holds no checkpoint, anything when it breaks."""
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

    info = HfApi().model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    wanted = _choose(name, [file.rfilename for file in info.siblings or []])
    folder = Path(snapshot_download(name, revision=info.sha, allow_patterns=wanted))
    absent = next((file for file in wanted if not (folder / file).is_file()), None)
    if absent is not None:  # where its own listing fails midway, huggingface_hub hands out what it has
        raise ConnectionError(f"{absent} did not arrive")
    lacking = _missing(folder)
    if lacking is not None:
        raise _refusal(name, f"its index names {lacking}, which the repository lacks; tell its authors, or give another")
    # By the branch's name only now: in the cache, a name goes on meaning the old commit until the new one is there whole.
    hf_hub_download(name, CONFIG, revision=revision)
    return folder


def _choose(name: str, there: list[str]) -> list[str]:
    """Which of a repository's files make the checkpoint. Raises CheckpointError when there is none."""
    small = [file for file in there if any(fnmatchcase(file, pattern) for pattern in SMALL)]
    found = f"(found: {', '.join(sorted(there)[:8]) or 'nothing'})"
    if CONFIG not in small:
        raise _refusal(name, f"the repository has no {CONFIG} {found}; give one that transformers loads")
    for first, *shards in WEIGHTS:
        if first in there:
            return [*small, first, *(file for file in there if any(fnmatchcase(file, pattern) for pattern in shards))]
    raise _refusal(name, f"the repository has no {' or '.join(first for first, *_ in WEIGHTS)} {found}; give one that has")


def _cached(name: str, revision: str | None) -> tuple[Path | None, str]:
    """The whole copy in the cache, found without a network; or None, and in words what it lacks."""
    from huggingface_hub import constants, snapshot_download

    try:
        # Without the weights: which of them are wanted is known only from what is there.
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=list(SMALL)))
        lacking = _missing(folder)
    except (OSError, ValueError):
        return None, f"the cache in {constants.HF_HUB_CACHE} has no whole copy of it"
    return (folder, "") if lacking is None else (None, f"the copy in {folder} lacks {lacking}")


def _missing(folder: Path) -> str | None:
    """The first file that a checkpoint needs and this folder lacks, or None where it is whole."""
    if not (folder / CONFIG).is_file():
        return CONFIG
    for first, *shards in WEIGHTS:
        if (folder / first).is_file():
            try:
                files = json.loads((folder / first).read_bytes())["weight_map"].values() if shards else ()
                return next((file for file in sorted(set(files)) if not (folder / file).is_file()), None)
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                return None  # an index that is whole and wrong: storage.py says what is wrong with it
    return WEIGHTS[0][0]


def _reason(error: BaseException, name: str, revision: str | None) -> str:
    """Why a download failed, and what to do about it."""
    from huggingface_hub import constants
    from huggingface_hub.utils import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    while isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # "not in the cache" is the consequence; what matters is why it could not be fetched
    said = next(iter(str(error).splitlines()), "")[:200].rstrip(".") or type(error).__name__
    if isinstance(error, GatedRepoError):
        return f"it is gated: accept its licence on {constants.ENDPOINT}/{name} and run hf auth login"
    if isinstance(error, RepositoryNotFoundError):
        return f"{constants.ENDPOINT} has no model of that name, or a private one: check the name, or run hf auth login"
    if isinstance(error, RevisionNotFoundError):
        return f"it has no revision {revision!r}: give a branch, tag or commit that it has"
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
        return f"the disk with {constants.HF_HUB_CACHE} is full: free some of it, or set HF_HOME to a folder on another"
    if isinstance(error, OSError) and error.filename:
        return (
            f"{error.filename} cannot be read or written ({error.strerror}): put that right, or set HF_HOME to another folder"
        )
    if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
        return f"{constants.ENDPOINT} refuses to give it ({said}): run hf auth login"
    return f"the connection to {constants.ENDPOINT} failed ({said}): try again, and what has arrived whole is kept"
