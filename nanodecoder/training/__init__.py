"""Training: any small text to a model that can be sampled.

    from nanodecoder.training import TrainConfig, train
    result = train(TrainConfig(data="my.txt", max_iters=500))

In reading order: vocabulary (tokenizers made from a text), data (text to batches), optim (who is updated how, and how fast),
parallel (several processes), settings (what a run is), record (its figures), state (what resuming needs), loop (`train`);
and, to compare one part of a decoder with another, variants, recall (a probe), findings (table and chart), study (the command).
"""

from .loop import Result, train
from .settings import TrainConfig

__all__ = ["Result", "TrainConfig", "train"]
