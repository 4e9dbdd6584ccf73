"""Every command and every piece of Python in README and docs runs as written."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MODELS, ROOT

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")), "weights/README.md"]


def blocks(kind: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        found += [(page, block) for block in re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)]
    return found


COMMANDS = [(page, line.split("  #")[0].strip()) for page, block in blocks("sh") for line in block.splitlines() if line.strip()]


@pytest.fixture
def desk(tmp_path, stories) -> Path:
    """A folder as the README leaves it after the download; the smallest real model stands in if the large one is not there."""
    model = MODELS / "smollm2"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "smollm2").symlink_to(model if (model / "config.json").is_file() else stories)
    for name in ("sample.py", "nanodecoder", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(desk: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=desk, capture_output=True, text=True, env=env)


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for _, line in COMMANDS if line.startswith("python sample.py")])
def test_a_command_writes_text(desk, command):
    done = run(desk, sys.executable, *shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "forward passes" in done.stderr


def test_every_command_is_known_and_its_files_are_there():
    """Those that no test can run (a download, an installation, this very suite) at least name what exists."""
    for page, line in COMMANDS:
        words = shlex.split(line)
        if words[0] == "python":
            assert (ROOT / words[1]).is_file(), (page, line)
        else:
            assert words[:2] in (["pip", "install"], ["hf", "download"]) or words == ["pytest"], (page, line)
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), (page, target)


def test_the_download_command_has_the_options_that_are_used():
    hf = Path(sys.executable).parent / "hf"
    if not hf.is_file():
        pytest.skip("the hf command is not installed here")
    shown = subprocess.run([hf, "download", "--help"], capture_output=True, text=True).stdout
    assert "--local-dir" in shown


@pytest.mark.slow
@pytest.mark.parametrize(("page", "code"), blocks("python"), ids=lambda value: value[:12])
def test_python_runs_as_written(desk, page, code):
    done = run(desk, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
