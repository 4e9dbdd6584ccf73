"""Ten things that a reader tries in the first hour: each command as it is written, and what it shows.

The figures of SmolLM2 were measured with transformers, and not with this program.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from test_hub import LittleHub, Repository
from test_plan import PHI3

import nanodecoder as nd
import sample
import train
from nanodecoder import __main__ as nanodecoder_command

pytestmark = pytest.mark.slow
TOUR = ROOT / "docs" / "tour.ko.md"
LOADED: dict[str, nd.Decoder] = {}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path, request):
    """Run a command as it is written, with $M for SmolLM2, in a folder with what the project's own has; -> stdout, stderr.

    In this process, where the large model is read once.
    """

    def load_once(folder: Path, *how: object) -> nd.Decoder:
        key = repr((str(folder), how))
        if key not in LOADED:
            LOADED[key] = load(folder, *how)
        return LOADED[key]

    def command(line: str) -> tuple[str, str]:
        if "$M" in line:
            line = line.replace("$M", shlex.quote(str(request.getfixturevalue("smollm2"))))
        words = shlex.split(line)
        assert words[0] == "python"
        if words[1:3] == ["-m", "nanodecoder"]:
            nanodecoder_command.main(words[3:])
        else:
            {"sample.py": sample, "train.py": train}[words[1]].main(words[2:])
        return capsys.readouterr()

    load = nd.load_model
    monkeypatch.setattr(nd, "load_model", load_once)
    for name in ("weights", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return command


def test_1_five_names(run):
    """At temperature 0 all five are the same; at 2 letters come up that no name has in this order."""
    line = "python sample.py --ckpt weights/names --num_samples 5 --seed 1"
    drawn = run(line)[0].splitlines()
    assert len(set(drawn)) == 5
    greedy, told = run(f"{line} --temperature 0")
    assert len(greedy.splitlines()) == 5
    assert len(set(greedy.splitlines())) == 1
    assert "changes nothing at temperature 0" in told
    hot = run(f"{line} --temperature 2")[0].splitlines()
    model, tokenizer = nd.load_model("weights/names"), nd.Tokenizer.load("weights/names")

    def nats_a_letter(names: list[str]) -> float:
        return sum(-nd.score(model, tokenizer, name).total for name in names) / sum(map(len, names))

    assert len(hot) == 5
    assert nats_a_letter(greedy.splitlines()) < nats_a_letter(drawn) < nats_a_letter(hot)


def test_2_turn_the_loop_yourself():
    """What is typed, with its second half; a second name in the old cache still sees the first one."""
    start = (
        "import torch, nanodecoder as nd; m = nd.load_model('weights/names'); t = nd.Tokenizer.load('weights/names'); "
        "c = nd.KVCache(m.config, batch_size=1, max_seq_len=16)"
    )
    loop = """\
ids = [t.bos_id]
for pos in range(16):
    logits = m(torch.tensor([ids[-1:]]), c)[:, -1]              # (1, V)
    ids.append(int(nd.Sampler(temperature=1.0)(logits)))
    if ids[-1] in t.eos_ids: break
"""
    typed = f"{loop}\nprint(t.decode(ids))\nprint(c.lengths.tolist(), len(ids) - 1)\n"
    words = [sys.executable, "-i", "-c", start]
    done = subprocess.run(words, cwd=ROOT, input=typed, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."})
    name, held = done.stdout.splitlines()
    assert "Error" not in done.stderr
    assert name.isalpha()
    length, fed = re.fullmatch(r"\[(\d+)\] (\d+)", held).groups()
    assert length == fed  # and the next name would begin behind it


def test_2_a_kept_cache_shows_the_first_name_to_the_second():
    model = nd.load_model(ROOT / "weights" / "names")
    cache = nd.KVCache(model.config, batch_size=1, max_seq_len=16)
    mark = torch.tensor([[nd.Tokenizer.load(ROOT / "weights" / "names").bos_id]])
    with torch.inference_mode():
        fresh = model(mark, cache)
        model(torch.tensor([[5, 13, 13, 1]]), cache)
        assert (model(mark, cache) - fresh).abs().max() > 0.1


def test_3_when_text_becomes_numbers(run):
    _, told = run(
        'python sample.py --ckpt $M --prompt "나는 오늘 학교에 갔다." --prompt "I went to school today." -n 0 --show tokens'
    )
    assert "text 1: 27 tokens" in told
    assert "text 2: 6 tokens" in told


@pytest.mark.parametrize(("temperature", "share"), [("0.5", "99.3%"), ("1", "79.0%"), ("2", "6.9%")])
def test_4_logits_probabilities_temperature(run, temperature, share):
    """The share changes with the temperature, the logit never."""
    line = 'python sample.py --ckpt $M --prompt "The capital of South Korea is" -n 1 --show probs --temperature'
    _, told = run(f"{line} {temperature}")
    (row,) = re.findall(r"^.*␣Seoul .*$", told.partition("step 1")[2], re.M)
    assert "13.41" in row
    assert "79.0%" in row
    assert row.split()[-1] == share


@pytest.mark.parametrize(
    ("text", "at", "least", "most"),
    [
        ("Sarah fed the cat because it", " cat", 0.55, 0.56),
        ("Sarah fed the dog because it", " dog", 0.73, 0.75),
        ("Tom put the cup on the table because it", " cup", 0.0, 0.2),
    ],
)
def test_5_where_it_looks(run, text, at, least, most):
    """Head 9.4 finds the cat and the dog, not the cup."""
    line = f'python sample.py --ckpt $M --prompt "{text}" -n 1 --show attention --look " it" --at "{at}" --report it.html'
    _, told = run(line)
    assert Path("it.html").stat().st_size > 10_000
    (heads,) = re.findall(r"heads that look most at .*?: (.*?)\n {2,}\S", told, re.S)[:1] or [told]
    weights = {head: float(weight) for head, weight in re.findall(r"\b(\d+\.\d+) (0\.\d+|1\.000)", heads)}
    assert least <= weights.get("9.4", 0.0) <= most
    if at == " cat":
        assert "0.567" in told
        assert max(weights, key=weights.get) == "9.4"


def test_6_shawshank(run):
    """ " Red" is first on top after block 28 of 30, and ends at 77.7 %."""
    text, told = run(
        'python sample.py --ckpt $M --prompt "The Shawshank" -n 2 --temperature 0 --show lens,probs --watch " Redemption"'
    )
    assert text.startswith(" Redemption") or "Redemption" in text
    assert "77.7%" in told
    assert re.search(r"28 of (the )?30", told)


def test_7_cache_on_and_off(run, monkeypatch, smollm2):
    """Same text, 112 against 6,250 positions. How many depends on the prompt alone, so one block of the 30 will do."""
    whole = nd.load_model(smollm2)
    first = nd.Decoder(dataclasses.replace(whole.config, n_layers=1, rope=whole.config.rope[0], windows=None)).eval()
    first.load_state_dict({name: whole.state_dict()[name] for name in first.state_dict()})
    first.generation = whole.generation
    monkeypatch.setattr(nd, "load_model", lambda *how: first)
    _, told = run(
        'python sample.py --ckpt $M --prompt "Write an email apologizing to Sarah for the gardening mishap." '
        "-n 100 --temperature 0 --compare_cache --repeats 1"
    )
    assert re.search(r"positions computed +112 +6,250\n", told)
    assert re.search(r"forward passes +100 +100\n", told)
    assert "the same tokens both ways" in told


def test_8_doubt_it(run):
    """Other ways of computing change not one character."""
    out, _ = run("python -m nanodecoder verify --ckpt weights/shakespeare --no_compile --max_tokens 24 -n 4")
    assert set(re.findall(r"(\d+) of (?:12|8 texts)  ", out)) == {"0"}
    assert out.splitlines()[-1].startswith("all as it should be")


@pytest.fixture
def hub(tmp_path):
    little = LittleHub()
    little.repositories["microsoft/Phi-3-mini-4k-instruct"] = Repository({"config.json": json.dumps(PHI3).encode()})
    yield little
    little.close()


@pytest.mark.parametrize(
    ("more", "cache"), [("--batch 1", "1.5 GiB"), ("--batch 8", "12.0 GiB"), ("--batch 1 --quantize int8", "1.5 GiB")]
)
def test_9_know_before_you_run(hub, tmp_path, more, cache):
    """By its name, from a hub on this machine that has the real sizes and no weights."""
    line = f"python -m nanodecoder plan --ckpt microsoft/Phi-3-mini-4k-instruct --context 4096 {more} --device cpu"
    env = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, *shlex.split(line)[1:]], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "384 KiB a token" in done.stdout
    assert re.search(rf"^cache, .* 4,096 tokens +{cache}", done.stdout, re.M)


def test_10_train_on_your_own_text(run):
    """The tour itself is the text: the first loss is near ln(vocabulary), since nothing is known yet."""
    if not TOUR.is_file():
        pytest.skip("docs/tour.ko.md is not written yet")
    run("python train.py --data docs/tour.ko.md --tokenizer char --max_time 3 --out_dir out/ko --log_interval 1")
    text, told = run('python sample.py --ckpt out/ko --prompt "어텐션은" --show tokens,probs -n 20')
    assert text.strip()
    assert "어" in told
    first = json.loads(Path("out/ko/metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert first == pytest.approx(math.log(nd.Tokenizer.load("out/ko").vocab_size), abs=0.5)
