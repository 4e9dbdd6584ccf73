"""Names beside makemore: its transformer and ours, on its split, for as many steps and names a step; the held-out loss of each.

python -m bench makemore --makemore PATH_OF_A_CHECKOUT --data names.txt

makemore's split is drawn with its seed, and its last 1,000 names are held out. Its transformer (4 layers, dim 64, 4 heads) is
trained as makemore.py does: AdamW at 5e-4, decay 0.01, names drawn with replacement. Ours is docs/recipes/names.toml. Both
keep their best step by the held-out names, looked at every 500 steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
import tempfile
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanodecoder import cli, load_model
from nanodecoder.cli import UsageError, option
from nanodecoder.training import TrainConfig, train
from nanodecoder.training.settings import from_toml

RECIPE = Path(__file__).parent.parent / "docs" / "recipes" / "names.toml"
SEED = 3407  # makemore's


@dataclass
class Options:
    """What the command line says."""

    makemore: str | None = option(None, "folder of a makemore checkout (github.com/karpathy/makemore)")
    data: str | None = option(None, "file of names")
    max_iters: int | None = option(None, "steps of each (default: the recipe's)")


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    options = cli.parse(Options, argv, "python -m bench makemore", "makemore's transformer on names, beside ours.")
    if options.makemore is None or not (Path(options.makemore) / "makemore.py").is_file():
        raise UsageError("give the folder of a makemore checkout, --makemore DIR (github.com/karpathy/makemore)")
    if options.data is None or not Path(options.data).is_file():
        raise UsageError("give a file of names, --data FILE")
    recipe = from_toml(RECIPE)
    del recipe["val_fraction"]
    if options.max_iters is not None:
        recipe |= {"max_iters": options.max_iters, "eval_interval": min(recipe["eval_interval"], options.max_iters)}
    makemore = load(Path(options.makemore))
    torch.manual_seed(SEED)
    with contextlib.redirect_stdout(io.StringIO()):
        train_names, held_out = makemore.create_datasets(options.data)
    loop = partial(theirs, makemore)
    for name, run in (("makemore", loop), ("ours", ours)):
        loss, parameters = run(train_names, held_out, recipe)
        print(f"{name:10} {parameters:8,} parameters  held-out {loss:.4f} nats per token", flush=True)
    steps = f"{recipe['max_iters']:,} steps of {recipe['batch_size']} names"
    print(f"{steps}, torch {torch.__version__}, {torch.get_num_threads()} threads")


def load(folder: Path) -> Any:
    """makemore.py as a module. It writes to tensorboard when run as a program, which nobody does here."""
    sys.path.insert(0, str(folder))
    sys.modules.setdefault("torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=None))
    import makemore

    return makemore


def theirs(makemore: Any, train_names: Any, held_out: Any, recipe: dict[str, Any]) -> tuple[float, int]:
    """makemore's loop -> its best held-out loss, and how many parameters it has."""
    config = makemore.ModelConfig(vocab_size=train_names.get_vocab_size(), block_size=train_names.get_output_length())
    model = makemore.Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-8)
    loader = makemore.InfiniteDataLoader(train_names, batch_size=recipe["batch_size"])
    best = float("inf")
    for step in tqdm(range(1, recipe["max_iters"] + 1), "makemore", mininterval=5):
        _, loss = model(*loader.next())
        model.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % recipe["eval_interval"] == 0:
            best = min(best, held_out_loss(model, held_out))
    return best, sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def held_out_loss(model: Any, names: Any) -> float:
    """Mean over all letters and ends of the held-out names: makemore's own is a mean over batches."""
    x, y = map(torch.stack, zip(*(names[i] for i in range(len(names))), strict=True))
    model.eval()
    _, loss = model(x, y)
    model.train()
    return loss.item()


def ours(train_names: Any, held_out: Any, recipe: dict[str, Any]) -> tuple[float, int]:
    """The recipe on the same names."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for file, names in (("train.txt", train_names), ("val.txt", held_out)):
            (folder / file).write_text("\n".join(names.words) + "\n")
        files = {"data": str(folder / "train.txt"), "val_data": str(folder / "val.txt"), "out_dir": str(folder / "out")}
        result = train(dataclasses.replace(TrainConfig(**recipe), **files, device="cpu"))
        return result.best_val_loss, sum(parameter.numel() for parameter in load_model(folder / "out").parameters())
