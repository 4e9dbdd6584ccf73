"""Who is updated how: two kinds of groups, two optimizers, one schedule.

Muon makes each update of a matrix orthogonal; it is for the matrices inside the blocks. Everything
else, the embedding and the head among them though they have two dimensions, goes to AdamW (arXiv 1711.05101). Weight decay
pulls on matrices only: a norm's gain or a bias pulled to 0 would only be worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..model import Decoder

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "wsd", "constant")


def groups(model: nn.Module, optimizer: str) -> dict[str, list[Tensor]]:
    """Every trained parameter in one group: "muon" (matrices of the blocks), "decay" (other matrices), "plain" (the rest)."""
    found: dict[str, list[Tensor]] = {"muon": [], "decay": [], "plain": []}
    for name, parameter in model.named_parameters():  # a shared one comes once
        if not parameter.requires_grad:
            continue
        in_block = "blocks." in name
        kind = "plain" if parameter.dim() < 2 else "muon" if in_block and optimizer == "muon" else "decay"
        found[kind].append(parameter)
    return found


class Muon(torch.optim.Optimizer):
    """Momentum whose update is the nearest matrix with orthogonal rows or columns (Jordan et al. 2024).

    As torch.optim.Muon, with the same defaults. That one goes through the matrices one by one and in bfloat16, which on a CPU
    without bfloat16 instructions takes ten times as long as the whole rest of a step; here those of one shape go together,
    and in float32 on a CPU.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.1, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for alike in by_shape.values():
                self._update(alike, group["lr"], group["weight_decay"], group["momentum"])

    def _update(self, alike: list[Tensor], rate: float, decay: float, momentum: float) -> None:
        directions = []
        for parameter in alike:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
            directions.append(parameter.grad.lerp(state["momentum_buffer"], momentum))  # Nesterov's look ahead
        rows, columns = alike[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        for parameter, update in zip(alike, orthogonal(torch.stack(directions)), strict=True):
            parameter.mul_(1 - rate * decay).sub_(update, alpha=rate * scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly the nearest matrices whose singular values are all alike, (N, A, B) -> (N, A, B).

    Five Newton-Schulz steps of an odd polynomial that brings singular values from (0, 1] to between 0.7 and 1.2, with Jordan's
    coefficients.
    """
    x = matrices.float() if matrices.device.type == "cpu" else matrices.bfloat16()
    turned = x.shape[1] > x.shape[2]
    x = x.mT if turned else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315) @ x
    return (x.mT if turned else x).to(matrices.dtype)


def make_optimizers(
    model: Decoder,
    optimizer: str,
    *,
    learning_rate: float,
    muon_learning_rate: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
) -> list[torch.optim.Optimizer]:
    """AdamW, and with optimizer="muon" Muon beside it. Every group remembers its own full rate as "peak"."""
    by_kind = groups(model, optimizer)
    adam = [
        {"params": by_kind["decay"], "weight_decay": weight_decay},
        {"params": by_kind["plain"], "weight_decay": 0.0},
    ]
    adam = [group for group in adam if group["params"]]
    made: list[torch.optim.Optimizer] = []
    if adam:
        fused = next(model.parameters()).device.type in ("cuda", "cpu")
        made.append(torch.optim.AdamW(adam, lr=learning_rate, betas=(beta1, beta2), fused=fused))
    if by_kind["muon"]:
        made.append(Muon(by_kind["muon"], lr=muon_learning_rate, weight_decay=weight_decay))
    for one in made:
        for group in one.param_groups:
            group["peak"] = group["lr"]
    return made


def share_of_rate(done: float, step: int, *, schedule: str, warmup_iters: int, lowest: float) -> float:
    """Which share of its full rate the next step has. `done`: the part of the run that lies behind, 0 to 1.

    It rises in a line over the first `warmup_iters` steps. Then "cosine" falls to `lowest` along half a cosine (arXiv
    1608.03983), "wsd" stays and falls in a line over the last fifth (arXiv 2404.06395), "constant" stays.
    """
    if step < warmup_iters:
        return (step + 1) / (warmup_iters + 1)
    done = min(max(done, 0.0), 1.0)
    if schedule == "cosine":
        return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * done))
    if schedule == "wsd":
        return lowest + (1 - lowest) * min(1.0, (1 - done) / 0.2)
    return 1.0


def set_rates(optimizers: Iterable[torch.optim.Optimizer], share: float) -> None:
    """Give every group this share of its full rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share
