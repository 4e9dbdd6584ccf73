"""The bench end to end on a tiny checkpoint; its arithmetic by hand; what it refuses."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict

import pytest
import torch
from tiny import byte_level, tiny_config, tiny_model

import nanodecoder as nd
from bench import arms, attention, batch, common, convert, decode, gpu, load, prefill, train
from bench.__main__ import main as bench
from nanodecoder.cli import UsageError
from nanodecoder.parts import CheckpointError


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("bench")
    tokenizer = nd.Tokenizer.load(byte_level(folder / "tokenizer"))
    nd.save_model(folder / "model", tiny_model(vocab_size=380, max_seq_len=256), tokenizer)
    return str(folder / "model")


class Here:
    """A `Worker` without a process of its own."""

    def __init__(self, way, **given):
        self.way = way
        try:
            self.arm, self.about = arms.load(asdict(way) | given)
        except ImportError as error:
            raise CheckpointError(f"{way.name}: {error}") from None

    def ask(self, do, **given):
        return json.loads(json.dumps(arms.carry_out(self.arm, do, **given)))

    def close(self):
        pass


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(common, "Worker", Here)
    monkeypatch.setattr(common, "bandwidth", lambda: 1e9)


def run(tmp_path, command, *argv) -> dict:
    file = tmp_path / "figures.json"
    bench([command, *map(str, argv), "--json", str(file)])
    return json.loads(file.read_text())


SHORT = ("--repeats", 2, "--prompt_tokens", 9, "-n", 6)


@pytest.mark.slow
def test_decode_in_processes_of_their_own(ckpt, tmp_path, capsys):
    pytest.importorskip("transformers")
    found = run(tmp_path, "decode", "--ckpt", ckpt, "--ways", "float32,transformers float32", "--threads", 1, *SHORT)
    ours, theirs = found["arms"]["float32"], found["arms"]["transformers float32"]
    assert ours["check"]["changed"] == 0
    assert ours["check"]["reference"] == "transformers float32"
    assert ours["check"]["same_from_the_start"] == 6
    assert ours["check"]["logits_apart"] < 1e-4
    assert ours["bytes_per_token"] == pytest.approx(theirs["bytes_per_token"], rel=0.01)  # theirs has frequencies too
    assert len(ours["seconds_per_token"]) == len(ours["seconds_to_first"]) == 2
    assert found["machine"]["threads"] == 1
    assert found["command"].startswith("python -m bench decode --ckpt")
    if ours["peak"]:  # Linux says it
        assert ours["peak"] > ours["before"] > 2**20
    shown = capsys.readouterr().out
    assert "of the limit" in shown
    assert "reference" in shown
    assert "0 of 6 changed" in shown


@pytest.mark.slow
def test_the_share_of_the_limit_and_the_ratios_are_of_the_times(ckpt, tmp_path, here):
    found = run(tmp_path, "decode", "--ckpt", ckpt, "--peers", "none", "--ways", "float32,int8", "--contexts", "20,100", *SHORT)
    for figure in found["arms"].values():
        middle = statistics.median(figure["seconds_per_token"])
        assert figure["tokens_per_second"] == pytest.approx(1 / middle)
        assert figure["of_the_limit"] == pytest.approx(figure["bytes_per_token"] / found["bandwidth"] / middle)
    c = tiny_config(vocab_size=380)
    plain, few = found["arms"]["float32"], found["arms"]["int8"]
    # 12 tokens are held half-way, each a key and a value of 2 heads of 16 in 2 layers; the embedding is not read
    linears = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128) + 64 * 380
    assert plain["bytes_per_token"] == 4 * (linears + 5 * 64) + 12 * 2 * 2 * 2 * 16 * 4
    assert few["read"] == linears + 4 * (2 * (64 + 32 + 32 + 64 + 128 + 128 + 64) + 380) + 4 * 5 * 64
    assert few["cache"] == plain["cache"] == 2 * c.n_layers * c.n_kv_heads * c.head_dim * 4
    assert set(found["contexts"]["float32"]) == {"20", "100"}


@pytest.mark.slow
def test_prefill_batch_train_and_attention(ckpt, tmp_path, here, capsys):
    pytest.importorskip("transformers")
    where = ("--ckpt", ckpt, "--repeats", 1)
    found = run(tmp_path, "prefill", *where, "--lengths", "16,5", "--ways", "bfloat16,transformers float32")
    assert set(found["lengths"]) == {"5", "16"}
    seconds = found["lengths"]["16"]["seconds"]
    by_hand = seconds["transformers float32"][0] / seconds["bfloat16"][0]
    assert found["lengths"]["16"]["ratios"]["bfloat16"]["transformers float32"] == pytest.approx(by_hand)
    assert f"({by_hand:.2f})" in capsys.readouterr().out  # another precision's

    ways = "float32,float32 exact,float32 alone,transformers float32,transformers float32 alone"
    found = run(tmp_path, "batch", *where, "--rows", "2,3", "--longest", 60, "-n", 3, "--ways", ways)
    assert found["rows"]["3"]["texts"] == dict.fromkeys(ways.split(",")) | {
        "float32": 0,
        "float32 exact": 0,
        "transformers float32": 0,
    }

    found = run(tmp_path, "train", *where, "--repeats", 2, "--batch_size", 2, "--block_size", 8)
    ours, theirs = found["losses"].values()
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[1] < ours[0]

    found = run(tmp_path, "attention", *where, "--lengths", "8,40")
    for what in ("prompt", "step"):
        assert found["paths"][what]["40"]["apart"] < 1e-5
    assert "attention" in found["kernels"]["prompt"] or "math" in found["kernels"]["prompt"]


@pytest.mark.slow
def test_load_times_this_process_and_another(ckpt, tmp_path, capsys):
    found = run(tmp_path, "load", "--ckpt", ckpt, "--repeats", 1, "--peers", "none")
    assert 0 < found["seconds"]["load"]["nanodecoder"][0] < found["seconds"]["process to first token"]["nanodecoder"][0]
    assert "import nanodecoder: numpy" in capsys.readouterr().out


def test_a_chart_is_drawn(ckpt, tmp_path, here):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "chart.png"
    run(tmp_path, "decode", "--ckpt", ckpt, "--ways", "float32", *SHORT, "--contexts", "9,20", "--steps", 2, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_token_that_changed_in_float32_fails_the_run(ckpt, tmp_path, here, monkeypatch):
    class Wrong(arms.Ours):
        def __init__(self, model, compiled=False, exact=False, alone=False):
            super().__init__(model)
            self.sign = -1 if compiled else 1

        def logits(self, ids, text):
            return self.sign * super().logits(ids, text)

    monkeypatch.setattr(arms, "Ours", Wrong)
    with pytest.raises(CheckpointError, match=r"^tokens changed in float32: float32 compiled$"):
        run(tmp_path, "decode", "--ckpt", ckpt, "--peers", "none", "--ways", "bfloat16,float32,float32 compiled", *SHORT)


def test_a_peer_that_fails_is_left_out_and_ours_is_not(ckpt, tmp_path, here, monkeypatch, capsys):
    pytest.importorskip("transformers")

    def fail(self, *args, **given):
        raise CheckpointError("its own words")

    monkeypatch.setattr(arms.Transformers, "decode", fail)
    found = run(tmp_path, "decode", "--ckpt", ckpt, "--ways", "float32,transformers float32", *SHORT)
    assert list(found["arms"]) == ["float32"]
    assert "left out: its own words" in capsys.readouterr().err
    monkeypatch.setattr(arms.Ours, "decode", fail)
    with pytest.raises(CheckpointError, match="its own words"):
        run(tmp_path, "decode", "--ckpt", ckpt, "--ways", "float32", *SHORT)


def test_a_process_that_fails_says_why(tmp_path):
    with pytest.raises(CheckpointError, match="int8: CheckpointError: there is no folder or file"):
        common.Worker(common.Way.of("int8", ()), ckpt=str(tmp_path / "none"), slots=8)


# ------------------------------------------------------------------------------------------------------------- by hand


def test_ratios_are_medians_of_turns():
    assert common.ratio([1.0, 2.0, 4.0], [3.0, 2.0, 8.0]) == 2.0  # 3, 1, 2
    assert common.share(500e6, 20e9, 0.05) == 0.5
    assert common.spread([0.012, 0.010, 0.5], 1e3) == "10.0 to 500.0"
    found = [common.Way.of(name, ()) for name in ("int8", "bfloat16", "transformers float32", "llama.cpp BF16")]
    times = {"int8": [1.0], "bfloat16": [2.0], "transformers float32": [3.0], "llama.cpp BF16": [4.0]}
    assert common.beside(found[0], times, found) == {"transformers": "(3.00)", "llama.cpp": "(4.00)"}
    assert common.beside(found[1], times, found) == {"transformers": "(1.50)", "llama.cpp": "2.00"}
    assert common.all_ratios(found, times)["int8"] == {"transformers float32": 3.0, "llama.cpp BF16": 4.0}


def test_what_a_longer_context_costs_and_what_its_bytes_explain():
    grown, explained = decode.growth({100: [1.0, 1.0], 8000: [1.5, 1.7]}, read=1000, cache=1)
    assert grown == pytest.approx(1.6)
    assert explained == pytest.approx(9000 / 1100)


def test_a_tied_table_is_read_and_another_is_not():
    apart, tied = tiny_model(), tiny_model(tied_head=True)
    table = 97 * 64 * 4
    assert arms.bytes_read(apart, apart.embed) == sum(p.nbytes for p in apart.parameters()) - table
    assert arms.bytes_read(tied, tied.embed) == sum(p.nbytes for p in tied.parameters())


def test_the_median_of_a_run_is_without_the_first_token(ckpt):
    worker = Here(common.Way.of("float32", ()), ckpt=ckpt)
    worker.about = {"read": 90, "cache": 1}
    runs = [{"seconds": [9.0, 1.0, 2.0, 3.0]}, {"seconds": [9.0, 4.0, 4.0, 4.0]}, {"seconds": [9.0, 1.0, 1.0, 7.0]}]
    found = decode.figures_of(worker, runs, speed=100.0, context=10)
    assert found["seconds_per_token"] == [2.0, 4.0, 1.0]
    assert found["tokens_per_second"] == 0.5
    assert (found["bytes_per_token"], found["of_the_limit"]) == (100, 0.5)


def test_a_kept_prompt_is_not_computed_again(ckpt):
    pytest.importorskip("transformers")
    ids = list(range(20))
    for name in ("float32", "transformers float32"):
        arm = Here(common.Way.of(name, ()), ckpt=ckpt).arm
        fresh = arm.decode(ids, 5)["ids"]
        assert [arm.decode(ids, 5, keep=True)["ids"] for _ in range(3)] == [fresh] * 3
    ours = Here(common.Way.of("float32", ()), ckpt=ckpt).arm
    ours.decode(ids, 5, keep=True)
    before = ours.stepper.positions
    ours.decode(ids, 5, keep=True)
    assert ours.stepper.positions - before == 5


def test_neighbours_turn_as_halves_do():
    """A rotation of neighbouring features of the reordered rows is ours of the halves."""
    weight, x, angle = torch.randn(2 * 8, 6), torch.randn(6), torch.rand(4)
    first, second = (weight @ x).view(2, 2, 4).unbind(1)
    halves = torch.stack([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)
    a, b = (convert.neighbours(weight, 2) @ x).view(2, 4, 2).unbind(-1)
    torch.testing.assert_close(torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1), halves)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_a_gguf_file_holds_our_weights(ckpt, tmp_path, kind):
    gguf = pytest.importorskip("gguf")
    convert.write_gguf(ckpt, tmp_path / "a.gguf", kind)
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    model = nd.load_model(ckpt)
    assert len(held) == len(list(model.parameters()))
    for name, weight in convert._named(model):
        got = torch.from_numpy(gguf.quants.dequantize(held[name].data, held[name].tensor_type).copy())
        step = {"F32": 0.0, "Q8_0": 1 / 120, "Q4_0": 1 / 6}[kind]
        torch.testing.assert_close(
            got.view(weight.shape), weight.detach(), atol=step * float(weight.detach().abs().max()), rtol=0
        )


def test_llama_cpp_takes_it(ckpt, tmp_path, here):
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    found = run(tmp_path, "decode", "--ckpt", ckpt, "--ways", "float32,llama.cpp F32", *SHORT)
    assert found["arms"]["llama.cpp F32"]["check"]["same_from_the_start"] == 6
    assert found["arms"]["llama.cpp F32"]["read"] == found["arms"]["float32"]["read"] + 380 * 64 * 4  # its table too


def test_models_beyond_llamas_shape_are_not_converted():
    assert convert.theta_of(tiny_config(), "gpt-fast") == 10000.0
    for options in ({"qkv_bias": True}, {"windows": 4}, {"qk_norm": "head"}, {"norm": "layer"}, {"rope": None}):
        with pytest.raises(CheckpointError, match="Llama's plain shape alone"):
            convert.theta_of(tiny_config(**options), "gpt-fast")


# ------------------------------------------------------------------------------------------------------------------- gpu


def test_the_gpu_script_on_a_cpu(tmp_path, capsys):
    found = run(
        tmp_path, "gpu", "--device", "cpu", "--tiny", "--no_compile", "--only", "correct,135M,prefill,batch", "--limit", 300
    )
    assert found["correct"]["float32"] == {"apart": 0.0, "changed": 0, "ties": 0}
    assert {"decode 135M float32", "decode 135M bfloat16", "decode 135M int8", "decode 135M int4", "train 135M"} <= set(found)
    assert set(found["batch 8B"]) == {"1", "3"}
    assert found["left out"] == found["failed"] == []
    assert "left out: nothing" in capsys.readouterr().out


def test_a_section_that_takes_too_long_or_fails_is_named(tmp_path, monkeypatch, capsys):
    def fails(session):
        raise RuntimeError("out of something")

    sections = {"machine": (20, gpu.machine), "slow": (0.05, lambda s: time.sleep(5)), "bad": (9, fails)}
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    here = ("--device", "cpu", "--tiny", "--limit")
    with pytest.raises(CheckpointError, match="bad: RuntimeError: out of something"):
        run(tmp_path, "gpu", *here, 60)
    assert "left out: slow (its 0 s were over)\n" in capsys.readouterr().out
    assert run(tmp_path, "gpu", *here, 0)["left out"] == ["machine", "slow", "bad"]


def test_a_peers_time_lies_within_that_of_its_section():
    with gpu.within(9):
        with pytest.raises(gpu.OutOfTime), gpu.within(0.05):
            time.sleep(5)
        assert gpu.left() < 9
    with pytest.raises(gpu.OutOfTime), gpu.within(0.05), gpu.within(9):
        time.sleep(5)
    assert gpu.left() == gpu.NEVER


def test_a_peer_that_takes_too_long_drops_out_and_ours_is_measured(monkeypatch):
    session = gpu.Session(gpu.Options(), torch.device("cpu"))
    ours = arms.Ours(tiny_model())
    with gpu.within(1):
        times = gpu.turns(session, {"slow": None, "ours": ours}, lambda arm: 1.0 if arm is ours else time.sleep(5))
    assert times == {"ours": [1.0, 1.0]}
    assert session.notes == ["slow: failed (half of the time that was left was over)"]


def test_figures_are_told_where_a_gpu_refuses_everything(tmp_path, monkeypatch):
    def refuses(device):
        raise RuntimeError

    monkeypatch.setattr(gpu, "SECTIONS", {"machine": (20, gpu.machine), "never": (20, gpu.machine)})
    monkeypatch.setattr(gpu, "clean", refuses)
    with pytest.raises(CheckpointError, match="after machine: RuntimeError"):
        run(tmp_path, "gpu", "--device", "cpu", "--tiny")
    assert "copied and multiplied" in json.loads((tmp_path / "figures.json").read_text())


# -------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no command given; there is: decode, prefill"),
        (["startup"], "unknown command 'startup'"),
        (["decode"], "give a checkpoint folder"),
        (["decode", "--ckpt", "CKPT", "--peers", "vllm"], "--peers has 'vllm'; here it can be none or transformers"),
        (["batch", "--ckpt", "CKPT", "--peers", "gpt-fast"], "--peers has 'gpt-fast'"),
        (["decode", "--ckpt", "CKPT", "--peers", "gpt-fast"], "--gpt_fast DIR"),
        (["decode", "--ckpt", "CKPT", "--peers", "gpt-fast", "--gpt_fast", "docs"], "docs is no checkout of gpt-fast"),
        (["decode", "--ckpt", "CKPT", "--ways", "int2"], "names no precision of nanodecoder: float32, bfloat16"),
        (["decode", "--ckpt", "CKPT", "--ways", "float32 quick"], "'quick' is nothing that can be asked of nanodecoder here"),
        (["decode", "--ckpt", "CKPT", "--ways", "transformers float32 compiled"], "'compiled' is nothing that can be asked"),
        (["prefill", "--ckpt", "CKPT", "--ways", "float32 compiled"], "'compiled' is nothing"),
        (["batch", "--ckpt", "CKPT", "--ways", "llama.cpp F16"], "'llama.cpp', which is not measured here"),
        (["decode", "--ckpt", "CKPT", "--repeats", "0"], "--repeats must be 1 or above"),
        (["decode", "--ckpt", "CKPT", "--contexts", "100,250", "--peers", "none"], "266 tokens are asked for, and the model's"),
        (["decode", "--ckpt", "CKPT", "--contexts", "1k", "--peers", "none"], "--contexts takes whole numbers above 0"),
        (["decode", "--ckpt", "CKPT", "--peers", "none", "-n", "1"], "must be 2 or above"),
        (["prefill", "--ckpt", "CKPT", "--peers", "none", "--lengths", "256"], "prompts of 1 to 255 tokens here"),
        (["batch", "--ckpt", "CKPT", "--peers", "none"], "do not fit the context of 256"),
        (["train", "--nanogpt", "docs"], "docs is no checkout of nanoGPT"),
        (["train", "--ckpt", "CKPT", "--peers", "none", "--block_size", "1"], "--block_size from 2 to 255"),
        (["attention", "--ckpt", "CKPT", "--ways", "float32"], "there are no --ways"),
        (["microgpt"], "give a file of names"),
        (["makemore", "--data", "x"], "give the folder of a makemore checkout"),
        (["makemore", "--makemore", "docs"], "give the folder of a makemore checkout"),
        (["gpu", "--device", "cpu"], "--device cpu --tiny"),
        (["decode", "--ckpt", "CKPT", "--chart", "a"], "unknown option '--chart'"),
    ],
)  # fmt: skip
def test_wrong_usage_gets_a_sentence(ckpt, argv, words):
    with pytest.raises(UsageError) as told:
        bench([ckpt if word == "CKPT" else word for word in argv])
    assert words in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(("peer", "package"), [("transformers", "transformers"), ("llama.cpp", "llama_cpp")])
def test_a_peer_that_is_missing_is_told_with_what_to_install(ckpt, monkeypatch, peer, package):
    monkeypatch.setattr(common, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=f"{peer} needs {package}, which is not installed: pip install"):
        bench(["decode", "--ckpt", ckpt, "--peers", peer])
    with pytest.raises(UsageError, match=r'matplotlib, which is not installed: pip install -e "\.\[plot\]"'):
        bench(["decode", "--ckpt", ckpt, "--peers", "none", "--plot", "a.png"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_one_sentence():
    with pytest.raises(UsageError, match="there is no GPU here"):
        bench(["gpu"])


def test_every_command_is_a_module_with_a_main():
    for module in (attention, batch, decode, gpu, load, prefill, train):
        assert callable(module.main)
