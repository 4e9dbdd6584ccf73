"""What a run needs to go on: weights, optimizers and counters in one file, written aside and renamed.

The same file whatever the number of processes: names, whole tensors, no class of ours; read with `weights_only=True`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..model import Decoder
from ..parts import CheckpointError

FILE = "state/last.pt"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def weights(model: Decoder) -> dict[str, Tensor]:
    """The model's tensors, whole and on the CPU. All processes must ask; only the first gets them."""
    return get_model_state_dict(model, options=WHOLE)


def save_state(
    folder: Path, model: Decoder, optimizers: Sequence[torch.optim.Optimizer], progress: dict[str, Any], first: bool
) -> None:
    """Write FILE in a run's folder. All processes must ask; the first writes. Raises OSError."""
    held = {
        "model": weights(model),
        "optimizers": [get_optimizer_state_dict(model, one, options=WHOLE) for one in optimizers],
        "progress": progress,
    }
    if not first:
        return
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            try:
                torch.save(held, file)
            except RuntimeError as error:  # as torch's writer tells of a full disk
                raise OSError(f"cannot write {path}: {str(error).splitlines()[0]}") from None
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        part.unlink(missing_ok=True)


def read_state(folder: Path) -> dict[str, Any]:
    """FILE's content. Raises CheckpointError where there is none or it is damaged."""
    path = folder / FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no run to resume: there is no {FILE} in it")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever it raises, the file is damaged
        raise CheckpointError(f"{path} cannot be read ({str(error).splitlines()[0]:.200})") from None


def load_state(held: dict[str, Any], model: Decoder, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Put weights and optimizers back. Raises CheckpointError when they are another model's."""
    try:
        set_model_state_dict(model, held["model"], options=StateDictOptions(full_state_dict=True))
        for one, saved in zip(optimizers, held["optimizers"], strict=True):
            set_optimizer_state_dict(model, one, saved, options=StateDictOptions(full_state_dict=True))
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"the state is another model's or another optimizer's ({str(error).splitlines()[0]:.200})"
        ) from None
