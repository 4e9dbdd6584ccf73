"""hub.py: a name in, a whole checkpoint out, or one sentence; against a little hub of our own on this machine."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
import pytest
import torch
from conftest import ROOT
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load, load_file, save
from tiny import sentence_piece, tiny_model

import nanodecoder as nd
from nanodecoder import CheckpointError, hub, storage
from nanodecoder.checkpoint import GENERATION
from nanodecoder.tokenizer import KEPT

JUNK = dict.fromkeys(("README.md", "model.gguf", "consolidated.safetensors", "onnx/model.onnx"), b"nobody asks for it")
INDEX, SHARD = "model.safetensors.index.json", "model-0000{}-of-00002.safetensors"
NOWHERE = "http://127.0.0.1:9"
LISTS = hasattr(huggingface_hub.errors, "IncompleteSnapshotError")  # whether huggingface_hub keeps a list of what there was


@dataclass
class Repository:
    """What the little hub has under one name, and how it misbehaves."""

    files: dict[str, bytes]
    gated: bool = False
    breaks: str | None = None  # half of this file is sent, and the connection is closed
    listed: bool = True  # or its tree answers with an error

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


class LittleHub:
    """As much of the hub as huggingface_hub asks for: `repositories` by name; `asked` holds each request, method and path."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[tuple[str, str]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def files_asked(self, name: str) -> set[str]:
        paths = {path for _, path in self.asked if path.startswith(f"/{name}/resolve/")}
        return {path.split("/", 5)[5] for path in paths}


class Handler(BaseHTTPRequestHandler):
    hub: LittleHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.asked.append((self.command, path))
        asked = re.fullmatch(r"/(?:api/models/)?([\w-]+/[\w.-]+)(?:/(resolve|tree|revision)/(\w+)(?:/(.+))?)?", path)
        if asked is None:
            return self.answer(404)
        name, what, revision, file = asked.groups()
        there = self.hub.repositories.get(name)
        if there is None:  # 401, as the real hub says to who has not logged in
            return self.answer(401, {"X-Error-Code": "RepoNotFound"})
        if revision not in (None, "main", there.commit):
            return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        if what == "tree" and not there.listed:
            return self.answer(500)
        if what == "tree":
            return self.say([{"type": "file", "path": p, "size": len(b), "oid": p} for p, b in there.files.items()])
        if what != "resolve":
            return self.say({"id": name, "sha": there.commit, "siblings": [{"rfilename": p} for p in there.files]})
        if there.gated:
            return self.answer(403, {"X-Error-Code": "GatedRepo"})
        if file not in there.files:
            return self.answer(404, {"X-Error-Code": "EntryNotFound"})
        content = there.files[file]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": there.commit}
        return self.answer(200, headers, content, half=file == there.breaks)

    do_HEAD = do_GET

    def say(self, content: object) -> None:
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def answer(self, status: int, headers: dict[str, str] | None = None, content: bytes = b"", half: bool = False) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if half else content)
            self.close_connection = self.close_connection or half

    def log_message(self, *_: object) -> None:
        pass


# Imports torch once, which takes the longest, and forks for each line on stdin: a visitor, who loads each name and notes its
# logits, or the sentence that refused it; the folder that they came from; and what was warned of.
VISITORS = """
import json, os, sys, time, traceback, warnings
import torch
import nanodecoder as nd
from nanodecoder import hub

def visit(name):
    folder = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model, tokenizer = nd.load_model(name), nd.Tokenizer.load(name)
            with torch.inference_mode():
                found = model(torch.tensor([tokenizer.encode("the fox")]))
            folder = hub._given.pop((name, None))
            assert hub.download(name, offline=True) == folder
        except nd.CheckpointError as error:
            found = str(error)
    return found, folder, [str(warning.message) for warning in caught if "is a pickle" not in str(warning.message)]

assert "huggingface_hub" not in sys.modules, "importing nanodecoder imports it"
time.sleep = lambda seconds: None  # huggingface_hub waits between its tries
for line in sys.stdin:
    home, environment, names = json.loads(line)
    if os.fork() == 0:
        try:
            os.chdir(home)
            os.environ.update(environment)
            torch.save({name: visit(name) for name in names}, "answers")
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.wait()
    print(flush=True)
"""


def same(found: object, logits: torch.Tensor) -> bool:
    """Whether a name led to these logits, up to the rounding of another number of threads."""
    return isinstance(found, torch.Tensor) and bool((found - logits).abs().max() < 1e-5)


@dataclass
class Answer:
    """What a visit found under one name."""

    found: torch.Tensor | str
    folder: Path | None
    warned: list[str]

    def refused(self, words: str) -> None:
        assert isinstance(self.found, str), "it was found"
        assert words in self.found
        assert "\n" not in self.found


Visit = Callable[..., dict[str, Answer]]


def environment(**more: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | {"PYTHONPATH": str(ROOT)} | more


@pytest.fixture(scope="module")
def visit() -> Iterator[Visit]:
    """visit(home, address, *names): each name loaded by one new process that stands in `home`, and again from the cache."""
    command = [sys.executable, "-c", VISITORS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(HF_HUB_DISABLE_PROGRESS_BARS="1"), **pipes) as visitors:

        def visit(home: Path, address: str, *names: str, offline: bool = False) -> dict[str, Answer]:
            (home / "answers").unlink(missing_ok=True)
            settings = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline))}
            print(json.dumps([str(home), settings, names]), file=visitors.stdin, flush=True)
            visitors.stdout.readline()
            answers = torch.load(home / "answers", weights_only=False)
            return {name: Answer(*answer) for name, answer in answers.items()}

        yield visit
        visitors.stdin.close()


@dataclass
class Checkpoints:
    """One tiny model's files in three forms, and the logits that each of them must give."""

    plain: dict[str, bytes]
    sharded: dict[str, bytes]
    pickled: dict[str, bytes]
    logits: torch.Tensor


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("checkpoints")
    model, tokenizer = tiny_model(vocab_size=300), nd.Tokenizer.load(sentence_piece(folder / "tokenizer"))
    nd.save_model(folder / "model", model, tokenizer)
    plain = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    small = {name: content for name, content in plain.items() if name != "model.safetensors"}
    tensors = load_file(folder / "model" / "model.safetensors")
    shard_of = {name: SHARD.format(1 + i % 2) for i, name in enumerate(sorted(tensors))}
    sharded = small | {INDEX: json.dumps({"metadata": {}, "weight_map": shard_of}).encode()}
    for shard in set(shard_of.values()):
        sharded[shard] = save({name: tensor for name, tensor in tensors.items() if shard_of[name] == shard})
    torch.save(tensors, folder / "pytorch_model.bin")
    pickled = small | {"pytorch_model.bin": (folder / "pytorch_model.bin").read_bytes()}
    with torch.inference_mode():
        logits = model(torch.tensor([tokenizer.encode("the fox")]))
    return Checkpoints(plain, sharded, pickled, logits)


@pytest.fixture
def little_hub(checkpoints) -> Iterator[LittleHub]:
    little = LittleHub()
    little.repositories["org/tiny"] = Repository(dict(checkpoints.plain))
    yield little
    little.close()


REFUSED = {
    "no/such": " has no model of that name, or a private one: check the name, or run hf auth login",
    "org/gated": "/org/gated and run hf auth login",
    "org/bare": "the repository has no config.json (found: README.md, consolidated.safetensors, model.gguf, onnx/model.onnx)",
    "org/weightless": "the repository has no model.safetensors or model.safetensors.index.json or pytorch_model.bin",
    "org/holed": f"its index names {SHARD.format(2)}, which the repository lacks",
    "local/tiny": "there is no folder or file 'local/tiny'; give the path of a checkpoint folder with a config.json in it",
    "./org/tiny": "there is no folder or file 'org/tiny'; give the path",
}


@pytest.fixture(scope="module")
def visited(tmp_path_factory, checkpoints, visit) -> Iterator[tuple[LittleHub, dict[str, Answer]]]:
    """One visit to a hub with all kinds of repositories."""
    little, home, here = LittleHub(), tmp_path_factory.mktemp("home"), checkpoints
    small = {name: content for name, content in here.plain.items() if name != "model.safetensors"}
    little.repositories = {
        "org/tiny": Repository(here.pickled | here.sharded | here.plain | JUNK),
        "org/pickled": Repository(here.pickled | JUNK),
        "org/sharded": Repository(here.pickled | here.sharded | JUNK),
        "org/gated": Repository(here.plain, gated=True),
        "org/bare": Repository(JUNK),
        "org/weightless": Repository(small | JUNK),
        "org/holed": Repository({name: content for name, content in here.sharded.items() if name != SHARD.format(2)}),
        "local/tiny": Repository(here.plain),
    }
    (home / "local").mkdir()
    yield little, visit(home, little.address, "org/tiny", "org/pickled", "org/sharded", *REFUSED)
    little.close()


@pytest.mark.parametrize("name", ["org/tiny", "org/pickled", "org/sharded"])
def test_a_name_gives_what_the_checkpoint_gives(visited, checkpoints, name):
    answer = visited[1][name]
    assert same(answer.found, checkpoints.logits), answer.found
    assert answer.warned == []


def test_nothing_is_fetched_that_is_not_read(visited, checkpoints):
    little, answers = visited
    for name, files in [("tiny", checkpoints.plain), ("pickled", checkpoints.pickled), ("sharded", checkpoints.sharded)]:
        assert little.files_asked(f"org/{name}") == set(files)
        assert {path.name for path in answers[f"org/{name}"].folder.iterdir()} == set(files)


def test_model_and_tokenizer_come_by_one_look_and_the_cache_by_none(visited):
    assert [path for _, path in visited[0].asked].count("/api/models/org/tiny") == 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused_in_one_sentence(visited, name):
    visited[1][name].refused(REFUSED[name])
    assert visited[1][name].found.startswith(f"there is no folder or file '{name.removeprefix('./')}'")


def test_of_a_local_folder_the_hub_hears_nothing(visited):
    assert not [path for _, path in visited[0].asked if "local" in path]


def test_a_name_is_one_only_where_no_folder_can_be_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    names = ["org/name", "HuggingFaceTB/SmolLM2-135M", "a/b", "0x_/q.w-e_r", Path("org/name")]
    others = [
        "runs/mine",
        "org",
        "org/name/",
        "/org/name",
        "./org/name",
        "../org/name",
        "~/name",
        "org/.name",
        "a/b/c",
        "org//b",
    ]
    others += [
        "org/na me",
        "org/name\n",
        "org/näme",
        "org\\name",
        "a--b/c",
        "a/b..c",
        "-a/b",
        "a/b.",
        "a/b.git",
        "a/" + "b" * 97,
        "",
        "/",
    ]
    assert [name for name in names if not hub.is_hub_name(name)] == []
    assert [name for name in others if hub.is_hub_name(name)] == []
    for name in (name for name in others if name):
        with pytest.raises(CheckpointError, match="not a hub name"):
            hub.download(name)


def caused_by(cause: Exception) -> Exception:
    error = LocalEntryNotFoundError("not in the cache")
    error.__cause__ = cause
    return error


def test_what_is_fetched_is_what_is_read():
    assert [first for first, *_ in hub.WEIGHTS] == list(storage.SOURCES)
    assert {*KEPT, storage.CONFIG, GENERATION, "vocab.json", "merges.txt"} <= set(hub.SMALL)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "is full: free some of it, or set HF_HOME"),
        (RuntimeError("Data processing error: No space left on device (os error 28)"), "is full: free some of it"),
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), "/a/b cannot be read or written (Permission denied)"),
        (ConnectionResetError(errno.ECONNRESET, "reset\nby peer"), "failed ([Errno 104] reset): try again"),
        (ValueError(), "failed (ValueError): try again"),
        (caused_by(TimeoutError("too slow")), "failed (too slow): try again"),
    ],
)
def test_why_it_failed(monkeypatch, tmp_path, error, words):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "_fetch", fail)
    with pytest.raises(CheckpointError) as caught:
        hub.download("nobody/nothing")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_interrupt_is_one(monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_fetch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hub.download("nobody/nothing")


@pytest.mark.parametrize("lost", ["config.json", SHARD.format(1), SHARD.format(2), INDEX])
def test_a_half_copy_is_not_whole(tmp_path, checkpoints, lost):
    for name, content in checkpoints.sharded.items():
        (tmp_path / name).write_bytes(content)
    assert hub._missing(tmp_path) is None
    (tmp_path / lost).unlink()
    assert hub._missing(tmp_path) == ("model.safetensors" if lost == INDEX else lost)


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1, "b": "c"}}', "[" * 100_000])
def test_an_index_that_is_wrong_is_left_to_who_reads_it(tmp_path, index):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_text(index)
    assert hub._missing(tmp_path) is None


# ---- several visits to one cache


@pytest.mark.slow
def test_what_breaks_off_is_no_checkpoint_and_a_second_try_completes_it(tmp_path, little_hub, checkpoints, visit):
    little_hub.repositories["org/tiny"].breaks = "model.safetensors"
    command = "import runpy, sys, time; time.sleep = lambda _: None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", command, str(ROOT / "sample.py"), "--ckpt", "org/tiny"],
        cwd=tmp_path,
        env=environment(HF_ENDPOINT=little_hub.address, HF_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    sentences = [line for line in done.stderr.splitlines() if line.startswith("sample.py: ")]
    assert len(sentences) == 1
    assert "'org/tiny', and it cannot be had from the hub: the connection to http://127" in sentences[0]
    if LISTS:  # then its list breaks, and huggingface_hub, which has lost the one that it kept, hands out what it has
        shutil.rmtree(tmp_path / "hub" / "models--org--tiny" / "trees")
        little_hub.repositories["org/tiny"] = Repository(checkpoints.plain, listed=False)
        visit(tmp_path, little_hub.address, "org/tiny")["org/tiny"].refused(
            "failed (model.safetensors did not arrive): try again"
        )
    little_hub.repositories["org/tiny"] = Repository(checkpoints.plain)
    assert same(visit(tmp_path, little_hub.address, "org/tiny")["org/tiny"].found, checkpoints.logits)


@pytest.mark.slow
def test_what_was_whole_serves_until_something_newer_is(tmp_path, little_hub, checkpoints, visit):
    here = little_hub.repositories["org/tiny"]
    old = visit(tmp_path, little_hub.address, "org/tiny")["org/tiny"]
    here.files["generation_config.json"] += b"\n"  # a new commit, and its files
    here.files["model.safetensors"] = save_new_head(checkpoints)
    here.breaks = "model.safetensors"
    for address in (little_hub.address, NOWHERE):
        again = visit(tmp_path, address, "org/tiny")["org/tiny"]
        assert same(again.found, checkpoints.logits), again.found
        assert again.folder == old.folder
        assert [text.split(":")[0] for text in again.warned] == [
            "org/tiny is taken from the cache, as it was when last fetched"
        ]
    here.breaks = None
    new = visit(tmp_path, little_hub.address, "org/tiny")["org/tiny"]
    assert not same(new.found, checkpoints.logits)
    assert (new.folder != old.folder, new.warned) == (True, [])


def save_new_head(checkpoints: Checkpoints) -> bytes:
    tensors = load(checkpoints.plain["model.safetensors"])
    return save(tensors | {"lm_head.weight": tensors["lm_head.weight"] * 2})


@pytest.mark.slow
def test_offline_a_copy_that_lacks_something_says_what(tmp_path, little_hub, checkpoints, visit):
    lost = {"tiny": "model.safetensors", "sharded": SHARD.format(2), "bare": "config.json", "mute": "tokenizer.json"}
    names = [f"org/{name}" for name in lost]
    for name in names:
        little_hub.repositories[name] = Repository(dict(checkpoints.sharded if "sharded" in name else checkpoints.plain))
    little_hub.repositories["org/broken"] = Repository(checkpoints.plain, breaks="model.safetensors")
    first = visit(tmp_path, little_hub.address, *names, "org/broken")
    first.pop("org/broken").refused("failed (")
    for name, answer in first.items():
        (answer.folder / lost[name.removeprefix("org/")]).unlink()
    little_hub.asked.clear()
    answers = visit(tmp_path, little_hub.address, *names, "org/broken", "no/such", offline=True)
    assert little_hub.asked == []
    answers["org/tiny"].refused("lacks model.safetensors; go online once, or run hf download org/tiny --local-dir DIR where")
    answers["org/sharded"].refused(f"lacks {SHARD.format(2)}; go online once")
    answers["org/bare"].refused("; go online once")
    answers["org/mute"].refused("has no whole copy of it" if LISTS else "there is no tokenizer.json in ")
    for name in ("org/broken", "no/such"):
        answers[name].refused(f"this is offline, and the cache in {tmp_path / 'hub'} has no whole copy of it; go online once")
