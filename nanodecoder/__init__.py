"""nanodecoder: a decoder-only transformer in plain PyTorch, to read, run and change.

    import nanodecoder as nd
    model, tokenizer = nd.load_model(path), nd.Tokenizer.load(path)
    print(nd.complete(model, tokenizer, ["Once upon a time"], max_new_tokens=50)[0].text)

The files in reading order: config, rope, layers, cache, attention, model (the decoder itself); then parts, families, hub,
storage, checkpoint, template, chat, tokenizer, sampler, batch, generate, completion, score; then cli and what is called.
`nd.inside` looks into a pass, and is imported when it is first asked for; `nanodecoder.training` trains.
"""

from importlib import import_module
from types import ModuleType

from .cache import KVCache
from .checkpoint import load_model, save_model
from .completion import Completion, complete
from .config import ModelConfig, RopeConfig
from .generate import Stepper, generate
from .model import Decoder
from .parts import CheckpointError
from .pipeline import pipeline
from .sampler import Sampler
from .score import score
from .tokenizer import Tokenizer

__all__ = [
    "CheckpointError",
    "Completion",
    "Decoder",
    "KVCache",
    "ModelConfig",
    "RopeConfig",
    "Sampler",
    "Stepper",
    "Tokenizer",
    "complete",
    "generate",
    "load_model",
    "pipeline",
    "save_model",
    "score",
]


def __getattr__(name: str) -> ModuleType:
    if name != "inside":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(".inside", __name__)
