"""microGPT's recipe rebuilt, beside ours at the same size: 4,192 parameters, 1,000 steps of one name each.

python -m bench microgpt --data names.txt

microGPT (Karpathy 2026): 1 layer, dim 16, 4 heads, context 16, norms without a gain, ReLU, learned positions, one
mark for begin and end; every weight drawn with 0.08; Adam (0.85, 0.99) at 0.01 falling in a line to 0. It quotes a training
loss near 2.37. Both are scored here on the same 1,000 names that neither trained on; means over seeds.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanodecoder import cli
from nanodecoder.cli import UsageError, option
from nanodecoder.training import TrainConfig, train

DIM, HEADS, CONTEXT = 16, 4, 16


@dataclass
class Options:
    """What the command line says."""

    data: str | None = option(None, "file of names")
    seeds: int = option(3, "runs of each")


class MicroGPT(nn.Module):
    """Its forward pass, for all places of a name at once."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        shapes = {"wte": (vocab_size, DIM), "wpe": (CONTEXT, DIM), "head": (vocab_size, DIM)}
        shapes |= dict.fromkeys(("q", "k", "v", "o"), (DIM, DIM)) | {"up": (4 * DIM, DIM), "down": (DIM, 4 * DIM)}
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.randn(shape) * 0.08) for name, shape in shapes.items()})

    def forward(self, ids: Tensor) -> Tensor:
        """ids (T,) -> logits (T, V)"""
        w, places = self.weights, len(ids)
        x = norm(w["wte"][ids] + w["wpe"][:places])
        y = norm(x)
        q, k, v = ((y @ w[name].T).view(places, HEADS, -1).transpose(0, 1) for name in ("q", "k", "v"))
        scores = (q @ k.mT) / (DIM / HEADS) ** 0.5
        scores = scores.masked_fill(torch.ones(places, places).triu(1).bool(), float("-inf"))
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).reshape(places, DIM) @ w["o"].T
        return (x + (norm(x) @ w["up"].T).relu() @ w["down"].T) @ w["head"].T


def norm(x: Tensor) -> Tensor:
    """Root mean square, without a gain."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def microgpt(train_names: Sequence[str], held_out: Sequence[str], seed: int) -> tuple[float, int]:
    """-> held-out nats per token after 1,000 names, and how many parameters it has."""
    letters = sorted(set("".join([*train_names, *held_out])))
    index = {letter: i for i, letter in enumerate(letters)}
    mark = len(letters)
    torch.manual_seed(seed)
    model = MicroGPT(mark + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.85, 0.99), eps=1e-8)

    def surprise(name: str) -> Tensor:
        ids = torch.tensor([mark, *(index[letter] for letter in name), mark])[: CONTEXT + 1]
        return F.cross_entropy(model(ids[:-1]), ids[1:], reduction="none")

    for step, name in enumerate(train_names[:1000]):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / 1000)
        optimizer.zero_grad()
        surprise(name).mean().backward()
        optimizer.step()
    with torch.no_grad():
        return torch.cat([surprise(name) for name in held_out]).mean().item(), sum(p.numel() for p in model.parameters())


def ours(train_names: Sequence[str], held_out: Sequence[str], seed: int, folder: Path) -> tuple[float, int]:
    """As many names, and hardly fewer parameters, with our norms and Muon: the best of some hundred settings."""
    for name, names in (("train.txt", train_names[:1000]), ("val.txt", held_out)):
        (folder / name).write_text("\n".join(names) + "\n")
    config = TrainConfig(
        data=str(folder / "train.txt"),
        val_data=str(folder / "val.txt"),
        out_dir=str(folder / "out"),
        format="lines",
        n_layers=1,
        dim=16,
        n_heads=4,
        ffn_dim=62,
        ffn="relu",
        positions="learned",
        tied_head=False,
        qk_norm=False,
        block_size=CONTEXT,
        batch_size=1,
        max_iters=1000,
        muon_learning_rate=5.5e-3,
        learning_rate=1e-2,
        beta1=0.82,
        weight_decay=0.01,
        grad_clip=0.0,
        warmup_iters=2,
        eval_interval=1000,
        seed=seed,
        device="cpu",
    )
    result = train(config)
    from nanodecoder import load_model

    return result.val_loss, sum(p.numel() for p in load_model(folder / "out").parameters())


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    options = cli.parse(Options, argv, "python -m bench microgpt", "microGPT's recipe beside ours.")
    if options.data is None:
        raise UsageError("give a file of names, --data FILE")
    names = Path(options.data).read_text(encoding="utf-8").split()
    random.Random(42).shuffle(names)
    held_out, rest = names[:1000], names[1000:]
    found: dict[str, list[tuple[float, int]]] = {"microGPT's recipe": [], "ours": []}
    for seed in range(options.seeds):
        found["microGPT's recipe"].append(microgpt(rest, held_out, seed))
        with tempfile.TemporaryDirectory() as scratch:
            found["ours"].append(ours(rest, held_out, seed, Path(scratch)))
    for name, results in found.items():
        losses = [loss for loss, _ in results]
        print(
            f"{name:18} {results[0][1]:5,} parameters  held-out {statistics.mean(losses):.4f} nats per token "
            f"(from {min(losses):.4f} to {max(losses):.4f}, {len(losses)} seeds)"
        )
