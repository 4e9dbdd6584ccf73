"""The house: imports follow the rooms' order, importing has no effects, and the public surface is what it says."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from conftest import ROOT

import nanodecoder

ORDER = [
    *("config", "rope", "layers", "cache", "attention", "model", "compiled", "quantize"),
    *(
        "parts",
        "families",
        "hub",
        "storage",
        "checkpoint",
        "template",
        "chat",
        "tokenizer",
        "sampler",
        "batch",
        "generate",
        "completion",
        "score",
    ),
    *("cli", "compare", "conversation", "pipeline", "against", "verify", "__main__"),
]
OPTIONAL = {"transformers", "gguf", "accelerate", "matplotlib", "pytest", "hypothesis", "torchao"}


def imported(name: str) -> set[str]:
    """The rooms that a file imports."""
    tree = ast.parse((ROOT / "nanodecoder" / f"{name}.py").read_text())
    relative = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1]
    return {node.module for node in relative if node.module} | {
        alias.name for node in relative if not node.module for alias in node.names
    }


def test_every_file_is_in_the_reading_order():
    files = {path.stem for path in (ROOT / "nanodecoder").glob("*.py")} - {"__init__"}
    assert files == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_file_imports_only_from_files_above_it(name):
    assert imported(name) <= set(ORDER[: ORDER.index(name)])


INSIDE = ["columns", "trace", "shapes", "memory", "plan", "pieces", "odds", "looks", "lens", "views", "report"]


def test_inside_has_a_reading_order_of_its_own():
    """Its files import from the house and from files inside above them; nothing in the house imports them."""
    folder = ROOT / "nanodecoder" / "inside"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == set(INSIDE)
    for name in INSIDE:
        nodes = [n for n in ast.walk(ast.parse((folder / f"{name}.py").read_text())) if isinstance(n, ast.ImportFrom)]
        above = {n.module or alias.name for n in nodes if n.level == 1 for alias in n.names}
        assert above <= set(INSIDE[: INSIDE.index(name)])
    for path in (ROOT / "nanodecoder").glob("*.py"):
        words = {(n.module or "").split(".")[0] for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
        assert "inside" not in words


def test_inside_is_there_when_it_is_asked_for():
    code = "import sys, nanodecoder as nd; a = 'nanodecoder.inside' in sys.modules; print(a, nd.inside.trace.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False trace\n", done.stderr
    with pytest.raises(AttributeError, match="has no attribute 'outside'"):
        _ = nanodecoder.outside


TRAINING = [
    *("vocabulary", "data", "optim", "parallel", "settings", "record", "state", "loop"),
    *("variants", "recall", "findings", "study"),
]


def test_training_has_a_reading_order_of_its_own():
    """Its files import from the house, inside included, and from training files above them; nothing there imports training."""
    folder = ROOT / "nanodecoder" / "training"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == set(TRAINING)
    for name in TRAINING:
        nodes = [n for n in ast.walk(ast.parse((folder / f"{name}.py").read_text())) if isinstance(n, ast.ImportFrom)]
        above = {n.module or alias.name for n in nodes if n.level == 1 for alias in n.names}
        assert above <= set(TRAINING[: TRAINING.index(name)])
    for path in (ROOT / "nanodecoder").glob("*.py"):
        assert "training" not in {
            (n.module or "").split(".")[0] for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)
        }


def test_families_know_the_config_only():
    assert imported("families") | imported("parts") == {"config", "parts"}


@pytest.mark.parametrize(
    "name", ["config", "rope", "layers", "cache", "attention", "model", "compiled", "quantize", "sampler", "generate"]
)
def test_the_core_knows_no_models_name(name):
    from nanodecoder.families import FAMILIES

    tree = ast.parse((ROOT / "nanodecoder" / f"{name}.py").read_text())
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not strings & set(FAMILIES)
    reads_it = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert "model_type" not in reads_it


def test_the_public_surface_is_what_is_there():
    assert nanodecoder.__all__ == sorted(nanodecoder.__all__, key=lambda name: (name.islower(), name))
    tools = {"import_module", "ModuleType"}  # what the late import of `inside` takes
    found = {name: value for name, value in vars(nanodecoder).items() if not name.startswith("_")}
    public = {name for name, value in found.items() if not hasattr(value, "__path__")} - tools
    modules = {name for name in public if hasattr(getattr(nanodecoder, name), "__file__")}
    assert public - modules == set(nanodecoder.__all__)
    for name in nanodecoder.__all__:
        assert getattr(nanodecoder, name).__doc__, name


def test_loading_a_checkpoint_does_not_import_torchs_compiler():
    """It takes seconds, and only --compile needs it."""
    from conftest import FIXTURES

    code = f"import sys, nanodecoder as nd; nd.load_model({str(FIXTURES / 'qwen3')!r}); print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_importing_has_no_effects():
    code = f"""
import sys, torch, threading
def state():
    torch_state = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed()
    return torch_state, threading.active_count()
before = state()
asked = []
torch.cuda.is_available = lambda: asked.append(1) or False
import nanodecoder
assert before == state(), (before, state())
assert not asked, "asked for CUDA"
optional = {OPTIONAL!r} & set(sys.modules)
assert not optional, optional
assert not [name for name in sys.modules if name.startswith("nanodecoder.training")]
print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.stdout == "fine\n", done.stderr
