"""Several processes: who am I, what do the others say, and how a plain model is wrapped from outside.

`torchrun --nproc_per_node=N train.py …` starts N processes that find each other through the environment. Alone, everything
here is a no-op.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..model import Decoder

KINDS = ("ddp", "fsdp")
PATIENCE = timedelta(minutes=10)  # how long a process waits for one that says nothing


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.rank == 0

    def sum(self, *numbers: float) -> list[float]:
        """The sums of these numbers over all processes."""
        if self.size == 1:
            return list(numbers)
        totals = torch.tensor(numbers, dtype=torch.float32 if self.device.type == "mps" else torch.float64, device=self.device)
        dist.all_reduce(totals)
        return totals.tolist()

    def agreed(self, number: int) -> int:
        """The largest of the numbers that the processes say: a signal may reach one alone."""
        if self.size == 1:
            return number
        said = torch.tensor(number, device=self.device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        return int(said)

    def from_first(self, value: Any) -> Any:
        """What the first process has, for all of them."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined(device: torch.device) -> Iterator[World]:
    """Join the processes that torchrun started, each with its own GPU where there are GPUs; leave them at the end."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(0, 1, device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def wrap(model: Decoder, kind: str, world: World) -> nn.Module:
    """What to call forward on: the model itself, or it wrapped so that gradients meet (DDP), or its weights are shared out too
    (FSDP2, arXiv 2304.11277), block by block."""
    if world.size == 1:
        return model
    if kind == "ddp":
        ids = [world.device.index] if world.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@contextmanager
def gradients_wait(wrapped: nn.Module, wait: bool) -> Iterator[None]:
    """Within, gradients stay where they are if `wait`: only the last micro-batch of a step lets them meet.

    It must be entered before forward: DDP decides there.
    """
    if wait and isinstance(wrapped, nn.parallel.DistributedDataParallel):
        with wrapped.no_sync():
            yield
        return
    if hasattr(wrapped, "set_requires_gradient_sync"):
        wrapped.set_requires_gradient_sync(not wait)
    yield
