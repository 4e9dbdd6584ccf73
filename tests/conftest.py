"""Where the tests find real models, and what they share."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
import torch

ROOT = Path(__file__).parent.parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers looks for files on the hub that a folder lacks
FIXTURES = Path(__file__).parent / "fixtures"
SHARED = Path(os.environ.get("NANODECODER_SHARED", ROOT.parent / "shared"))
MODELS = Path(os.environ.get("NANODECODER_MODELS", Path.home() / ".cache" / "nanodecoder"))

hypothesis.settings.register_profile("default", deadline=None, max_examples=40, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=400)
# for planted mistakes: whether an example fails is all that matters, not how small it can be made
seeking = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
hypothesis.settings.register_profile("seek", deadline=None, max_examples=40, derandomize=True, phases=seeking)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def stories() -> Path:
    """A real pretrained model: TinyStories, 260K parameters."""
    folder = SHARED / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"no stories260K in {SHARED}; set NANODECODER_SHARED")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A real pretrained model of 135M parameters."""
    folder = MODELS / "smollm2"
    if not (folder / "config.json").is_file():
        pytest.skip(f"no smollm2 in {MODELS}; set NANODECODER_MODELS")
    return folder


THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def _seeded(request) -> None:
    """The same chance for every test, and one thread for tiny models: more of them only wait for each other."""
    torch.manual_seed(0)
    torch.set_num_threads(THREADS if request.node.get_closest_marker("slow") else 1)
