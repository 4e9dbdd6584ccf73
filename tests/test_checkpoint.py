"""checkpoint.py: every tensor used once, every parameter set once, or one sentence; and nothing half-written."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from conftest import FIXTURES, ROOT
from safetensors.torch import load_file, save_file
from tiny import byte_level, tiny_model, tokens

import nanodecoder as nd
from nanodecoder import CheckpointError, Tokenizer, load_model, save_model
from nanodecoder.storage import Weights, read_header


@pytest.fixture
def folder(tmp_path) -> Path:
    """A good checkpoint to spoil."""
    save_model(tmp_path / "model", tiny_model())
    return tmp_path / "model"


def edit(folder: Path, name: str = "config.json", **keys) -> None:
    raw = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
    (folder / name).write_text(json.dumps({key: value for key, value in (raw | keys).items() if value != "absent"}))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(dict(tensors)), folder / "model.safetensors")


def refused(folder: Path, words: str, **options) -> str:
    with pytest.raises(CheckpointError, match=words) as caught:
        load_model(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- out and in again


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied_head": True},
        {"qkv_bias": True, "windows": (None, 5)},
        {"qk_norm": "head"},
        {"qkv_bias": True, "o_bias": True},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_comes_back_with_the_same_bits(tmp_path, options, dtype):
    model = tiny_model(**options).to(dtype)
    save_model(tmp_path, model)
    again = load_model(tmp_path, dtype="auto")
    assert again.config == model.config
    assert again.dtype == dtype
    assert not again.training
    assert torch.equal(again(tokens()), model(tokens()))
    names = set(load_file(tmp_path / "model.safetensors"))
    assert ("lm_head.weight" in names) != bool(options.get("tied_head"))


def test_what_is_loaded_does_not_depend_on_the_file_any_more(folder):
    model = load_model(folder)
    before = model(tokens())
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-5000:] = b"\xff" * 5000
    (folder / "model.safetensors").write_bytes(data)
    assert torch.equal(model(tokens()), before)


def test_one_file_beside_its_config_is_a_checkpoint_too(folder):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert torch.equal(load_model(folder / "other.safetensors")(tokens()), tiny_model()(tokens()))


def test_saving_keeps_the_tokenizer(tmp_path):
    tokenizer = Tokenizer.load(byte_level(tmp_path / "tokenizer"))
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer")
    save_model(tmp_path / "model", tiny_model(), tokenizer)
    again = Tokenizer.load(tmp_path / "model")
    assert again.encode("나는 오늘") == tokenizer.encode("나는 오늘")
    assert again.eos_ids == tokenizer.eos_ids
    assert (tmp_path / "model" / "chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.parametrize("added", ["5", "null", '{"</s>": 1}', "[3, {}]", "[[]]"])
def test_a_tokenizer_whose_added_tokens_are_none_names_no_end(folder, added):
    (folder / "tokenizer.json").write_text(f'{{"added_tokens": {added}, "model": {{}}}}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert load_model(folder).generation.eos_ids == ()


@pytest.mark.skipif(os.geteuid() == 0 and not hasattr(os, "seteuid"), reason="root reads everything")
def test_what_cannot_be_read_is_one_sentence(folder):
    (folder / "model.safetensors").chmod(0)
    (folder / "config.json").chmod(0o644)
    for parent in [folder, *folder.parents][:5]:
        parent.chmod(0o755)
    os.seteuid(65534) if os.geteuid() == 0 else None
    try:
        refused(folder, "cannot read .*model.safetensors: Permission denied")
    finally:
        os.seteuid(0) if os.getuid() == 0 else None
    refused(Path("x" * 5000), "cannot look at xxx.*: File name too long")


def test_where_a_text_ends_and_how_to_sample_come_back(tmp_path):
    from nanodecoder.config import GenerationConfig

    model = tiny_model()
    model.generation = GenerationConfig(bos_id=1, eos_ids=(2, 5), temperature=0.7, top_p=0.9, repetition_penalty=1.1)
    save_model(tmp_path, model)
    assert load_model(tmp_path).generation == model.generation


# ---- shards


def shard(folder: Path) -> dict[str, str]:
    """Split model.safetensors in two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    index = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(index.values()):
        save_file({name: tensors[name] for name in names if index[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return index


def test_shards_are_one_checkpoint_and_a_stray_one_is_not_looked_at(folder):
    shard(folder)
    (folder / "model-00003-of-00003.safetensors").write_text("not weights at all")
    assert torch.equal(load_model(folder)(tokens()), tiny_model()(tokens()))


def test_where_shards_overlap_the_index_decides(folder):
    index = shard(folder)
    name = next(name for name, file in index.items() if file.startswith("model-00001"))
    other = load_file(folder / "model-00002-of-00002.safetensors")
    save_file(other | {name: torch.zeros(3)}, folder / "model-00002-of-00002.safetensors")
    assert torch.equal(load_model(folder)(tokens()), tiny_model()(tokens()))


def test_a_tensor_in_a_shard_that_the_index_does_not_know_is_not_dropped_in_silence(folder):
    shard(folder)
    other = load_file(folder / "model-00002-of-00002.safetensors")
    save_file(other | {"model.extra.weight": torch.zeros(3)}, folder / "model-00002-of-00002.safetensors")
    refused(folder, "unexpected model.extra.weight")


def test_a_missing_shard_is_named(folder):
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "names model-00002-of-00002.safetensors, which is not in .*; download it")


def test_a_tensor_that_is_not_where_the_index_says_is_named(folder):
    index = shard(folder)
    other = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} - {index["model.norm.weight"]}
    index["model.norm.weight"] = other.pop()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    refused(folder, "says that model.norm.weight is in model-0000.*, and it is not; download both again")


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", 3, ["x"], "x" * 300, "a\\b.safetensors"]
)
def test_an_index_that_leaves_its_folder_is_refused(folder, name):
    index = shard(folder)
    save_file({"x": torch.zeros(1)}, folder.parent / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index | {"model.norm.weight": name}}))
    refused(folder, "which is not a file of its own folder; refused")


def test_saving_over_a_sharded_checkpoint_leaves_no_index_that_lies(folder):
    shard(folder)
    model = tiny_model(seed=1)
    save_model(folder, model)
    assert not (folder / "model.safetensors.index.json").exists()
    assert torch.equal(load_model(folder)(tokens()), model(tokens()))


# ---- every tensor accounted for


def test_a_renamed_tensor_is_both_missing_and_unexpected(folder):
    def rename(tensors):
        tensors["model.layers.0.self_attn.q_project.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
        return tensors

    edit_tensors(folder, rename)
    text = refused(folder, r"missing model\.layers\.0\.self_attn\.q_proj\.weight; unexpected .*q_project")
    assert "config.json" in text


def test_a_bias_that_the_config_does_not_ask_for_is_not_dropped(folder):
    edit_tensors(folder, lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    refused(folder, "missing none; unexpected model.layers.0.self_attn.q_proj.bias")


def test_buffers_of_old_files_are_no_parameters(folder):
    edit_tensors(folder, lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert torch.equal(load_model(folder)(tokens()), tiny_model()(tokens()))


def test_many_missing_tensors_are_counted_not_listed(folder):
    edit(folder, num_hidden_layers=4)
    refused(folder, "missing .* and 12 more; unexpected none")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 4000),
        ("vocab_size", 10**30),
        ("hidden_size", 2**62),
        ("intermediate_size", 2**40),
        ("rope_theta", 1e308),
        ("max_position_embeddings", 10**30),
    ],
)
def test_sizes_that_no_model_has_are_refused_at_once(folder, key, value):
    edit(folder, rope_parameters="absent", **{key: value})
    refused(folder, "at most|from 1 to|have only|no tensor can have|calls for|beyond what it can be")


def test_a_shape_that_does_not_fit_is_named_with_both(folder):
    edit(folder, head_dim=32)
    refused(folder, r"q_proj.weight in model.safetensors has shape \[64, 64\], and .*config.json calls for \[128, 64\]")


def test_a_quantized_tensor_is_refused(folder):
    edit_tensors(folder, lambda tensors: tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    refused(folder, "model.norm.weight in model.safetensors is of dtype I8, not one of BF16, F16, F32, F64: quantized")


def test_an_unknown_family_is_answered_with_the_nearest_and_what_differs(folder):
    edit(folder, model_type="rwkv8")
    refused(
        folder, r"has model_type 'rwkv8', which is not supported; by its tensors it is like (llama|mistral)\. docs/families.md"
    )

    def norms(tensors):
        extra = {f"model.layers.{i}.self_attn.{name}_norm.weight": torch.ones(16) for i in range(2) for name in "qk"}
        return tensors | extra | {"model.layers.1.gate.weight": torch.ones(3)}

    edit_tensors(folder, norms)
    text = refused(folder, "by its tensors it is like qwen3, but with 'model.layers.N.gate.weight'")
    assert "these can be loaded: llama, mistral" in text
    edit(folder, hidden_size="absent", n_embd=64)
    refused(folder, "by its tensors it is like qwen3, but with 'model.layers.N.gate.weight'; .*with config keys 'n_embd'")
    edit(folder, hidden_size=64, n_embd="absent", residual_multiplier=0.2)
    refused(folder, "with config keys 'residual_multiplier'")


def test_a_family_like_none_of_ours_is_told_so_and_fast(folder):
    edit(folder, model_type="x\ny" + "a" * 300_000, num_hidden_layers=4000)
    edit_tensors(folder, lambda tensors: {f"tower.{i}.\nmix": torch.ones(3) for i in range(5)})
    start = time.perf_counter()
    text = refused(
        folder, r"has model_type 'x\\nyaaa.*…, which is not supported; by its tensors it is like none of the families"
    )
    assert len(text) < 1000
    assert time.perf_counter() - start < 5


def test_names_in_a_file_cannot_break_the_sentence(folder):
    edit_tensors(folder, lambda tensors: tensors | {"evil\nTraceback\x1b[31m red": torch.ones(1)})
    assert "\x1b" not in refused(folder, r"unexpected 'evil\\nTraceback")


# ---- the prefix that a file of the bare trunk lacks, and buffers of old files


def test_a_file_of_the_bare_trunk_has_no_prefix(tmp_path):
    model = nd.load_model(FIXTURES / "gpt2")
    nd.save_model(tmp_path, model)

    def as_on_the_hub(tensors):
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        return bare | {"h.0.attn.bias": torch.ones(1, 1, 8, 8).tril(), "h.1.attn.masked_bias": torch.tensor(-1e4)}

    edit_tensors(tmp_path, as_on_the_hub)
    assert torch.equal(nd.load_model(tmp_path)(tokens(vocab_size=61)), model(tokens(vocab_size=61)))


# ---- pytorch_model.bin


class Mischief:
    """A pickle that writes a file when it is loaded by someone careless."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def pickled(folder: Path, **extra) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors | extra, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return tensors


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_of_tensors_is_read_and_safetensors_recommended(folder, zipped):
    tensors = pickled(folder)
    if not zipped:  # as torch wrote them before 1.6
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.warns(UserWarning, match="pytorch_model.bin is a pickle: .* none of its code was run; safetensors is faster"):
        model = load_model(folder)
    assert torch.equal(model(tokens()), tiny_model()(tokens()))


def test_safetensors_is_taken_where_both_are(folder):
    torch.save({"nonsense": torch.zeros(1)}, folder / "pytorch_model.bin")
    assert torch.equal(load_model(folder)(tokens()), tiny_model()(tokens()))


def test_pickles_in_shards(folder):
    tensors = pickled(folder)
    index = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(sorted(tensors))}
    for file in set(index.values()):
        torch.save({name: t for name, t in tensors.items() if index[name] == file}, folder / file)
    (folder / "pytorch_model.bin").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.warns(UserWarning, match="is a pickle"):
        assert torch.equal(load_model(folder)(tokens()), tiny_model()(tokens()))


def test_code_in_a_pickle_is_not_run(folder):
    pickled(folder, mischief=Mischief(folder / "done"))
    refused(folder, "pytorch_model.bin is a pickle that holds more than tensors, and is refused")
    assert not (folder / "done").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has 0 bytes, which are no weights"),
        (b"PK\x03\x04 not really", "cannot be read as weights"),
        (b"version https://git-lfs", "is 23 bytes of git-lfs pointer instead of weights: run git lfs pull"),
    ],
)
def test_a_damaged_pickle_is_one_sentence(folder, content, words):
    pickled(folder)
    (folder / "pytorch_model.bin").write_bytes(content)
    refused(folder, words)


class Swollen:
    """A pickle that asks for a terabyte of zeros, with a class that torch allows."""

    def __reduce__(self):
        return (bytearray, (10**12,))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_fill_memory_is_refused_before_it_does(folder, zipped):
    pickled(folder)
    torch.save({"a": Swollen()}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    refused(folder, r"holds more than tensors, and is refused \(bytearray\)")
    wide = torch.zeros(1).expand(20_000_000, 16)
    torch.save({"a": wide}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    refused(folder, "bytes and one of its tensors claims 1280000000")


def test_a_pickle_of_tensors_without_numbers_is_refused(folder):
    pickled(folder)
    for tensor in (torch.zeros(2, 2).to("meta"), torch.eye(2).to_sparse()):
        torch.save({"a": tensor}, folder / "pytorch_model.bin")
        refused(folder, "holds tensors without plain numbers in memory|cannot be read as weights|more than tensors")


def test_a_compressed_archive_is_refused(folder):
    pickled(folder)
    with zipfile.ZipFile(folder / "pytorch_model.bin") as plain:
        entries = {name: plain.read(name) for name in plain.namelist()}
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in entries.items():
            packed.writestr(name, content)
    refused(folder, "is compressed, which torch's own files never are")


def test_a_pickle_of_other_things_is_refused(folder):
    pickled(folder)
    for thing in ([torch.zeros(1)], {"a": 3}, {"state_dict": {"a": torch.zeros(1)}}):
        torch.save(thing, folder / "pytorch_model.bin")
        refused(folder, "does not hold tensors by name")


# ---- published sizes

OPT_125M = {
    "model_type": "opt",
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "_remove_final_layer_norm": False,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "dropout": 0.1,
    "layerdrop": 0.0,
    "init_std": 0.02,
    "prefix": "</s>",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
    "use_cache": True,
}
GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "layer_norm_epsilon": 1e-05,
    "initializer_range": 0.02,
    "attn_pdrop": 0.1,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True}},
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "summary_first_dropout": 0.1,
}
PHI3_MINI_4K = {
    "model_type": "phi3",
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rope_scaling": None,
    "sliding_window": 2047,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
}


@pytest.mark.parametrize(("raw", "count"), [(OPT_125M, 125_239_296), (GPT2, 124_439_808), (PHI3_MINI_4K, 3_821_079_552)])
def test_published_configs_have_their_published_numbers_of_parameters(raw, count):
    with torch.device("meta"):
        model = nd.Decoder(nd.families.FAMILIES[raw["model_type"]].read(raw, "config.json"))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


# ---- files damaged at random


@pytest.mark.slow
def test_ten_thousand_damaged_files_load_or_are_refused_in_one_sentence(tmp_path):
    """Seeded; no other exception, no hang, nothing allocated that the file does not hold."""
    originals = []
    for fixture in sorted(path.parent for path in FIXTURES.glob("*/expected.safetensors")):
        weights = (fixture / "model.safetensors").read_bytes()
        originals.append({"config.json": (fixture / "config.json").read_bytes(), "model.safetensors": weights})
    tiny = tiny_model(n_layers=1, dim=16, head_dim=4, ffn_dim=16)
    nd.save_model(tmp_path / "tiny", tiny)
    config = (tmp_path / "tiny" / "config.json").read_bytes()
    originals += 4 * [{"config.json": config, "model.safetensors": (tmp_path / "tiny" / "model.safetensors").read_bytes()}]
    for zipped in (True, False):
        tensors = load_file(tmp_path / "tiny" / "model.safetensors")
        torch.save(tensors, tmp_path / "x.bin", _use_new_zipfile_serialization=zipped)
        originals += 4 * [{"config.json": config, "pytorch_model.bin": (tmp_path / "x.bin").read_bytes()}]
    random = Random(7)
    outcomes: Counter[str] = Counter()
    slowest, before = 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for trial in range(10_000):
        files = originals[trial // 2 % len(originals)]
        spoilt = list(files)[trial % 2]
        folder = tmp_path / f"{trial // 2 % len(originals)}"
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(damaged(content, random) if name == spoilt else content)
        start = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                nd.load_model(folder)
            outcomes["loaded"] += 1
        except CheckpointError as error:
            assert "\n" not in str(error), error  # noqa: PT017
            outcomes["refused"] += 1
        slowest = max(slowest, time.perf_counter() - start)
    assert outcomes["refused"] > 1000
    assert outcomes["loaded"] > 100
    assert slowest < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


def damaged(data: bytes, random: Random) -> bytes:
    """One to four changes: bytes flipped, cut, doubled or inserted; numbers made absurd; values of another type."""
    for _ in range(random.randint(1, 4)):
        place = random.randrange(min(len(data), 3000) or 1)
        kind = random.randrange(8)
        if kind == 0:
            data = data[:place] + bytes([random.randrange(256)]) + data[place + 1 :]
        elif kind == 1:
            data = data[:place]
        elif kind == 2:
            data = data[:place] + data[place + random.randint(1, 20) :]
        elif kind == 3:
            data = data[:place] + data[place : place + random.randint(1, 50)] + data[place:]
        else:
            numbers = list(re.finditer(rb"\d+(\.\d+)?|true|false|null|\"[a-z_]+\"", data[:3000]))
            if numbers:
                match = random.choice(numbers)
                absurd = [
                    b"0",
                    b"-1",
                    b"1e999",
                    b"9" * 30,
                    b"9" * 400,
                    b"NaN",
                    b"[]",
                    b"{}",
                    b'"x"',
                    b"null",
                    b"true",
                    b"2.5",
                    b"[[1]]",
                    b"4095",
                ]
                data = data[: match.start()] + random.choice(absurd) + data[match.end() :]
    return data


# ---- tied and untied heads, in all their cases


def test_tied_by_the_config_and_stored_once(tmp_path):
    save_model(tmp_path, tiny_model(tied_head=True))
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.embed.weight


def test_tied_and_stored_twice_alike(tmp_path):
    save_model(tmp_path, tiny_model(tied_head=True))
    edit_tensors(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.embed.weight
    assert model.config.tied_head


def test_tied_by_the_flag_but_stored_with_another_head_the_file_is_believed(folder):
    edit(folder, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="ties the head to the embedding, but the file holds lm_head.weight with other values"):
        model = load_model(folder)
    assert not model.config.tied_head
    assert torch.equal(model(tokens()), tiny_model()(tokens()))


def test_tied_and_only_the_head_stored(tmp_path):
    model = tiny_model(tied_head=True)
    save_model(tmp_path, model)

    def only_head(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        return tensors

    edit_tensors(tmp_path, only_head)
    again = load_model(tmp_path)
    assert again.lm_head.weight is again.embed.weight
    assert torch.equal(again(tokens()), model(tokens()))


def test_untied_and_one_of_the_two_missing(folder):
    edit_tensors(folder, lambda tensors: {name: t for name, t in tensors.items() if name != "lm_head.weight"})
    refused(folder, "missing lm_head.weight; unexpected none")


# ---- files that are not what they claim


def spoil(folder: Path, kind: str) -> None:
    path = folder / "model.safetensors"
    good = path.read_bytes()
    path.write_bytes(
        {
            "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n",
            "truncated": good[:-1],
            "longer": good + b"x",
            "absurd": (2**63).to_bytes(8, "little") + good[8:],
            "empty": b"",
            "seven bytes": good[:7],
            "not json": (10).to_bytes(8, "little") + b"[[[[[[[[[[",
            "deep": (100_000).to_bytes(8, "little") + b"[" * 100_000,
            "not tensors": (14).to_bytes(8, "little") + b'{"a": {"b":1}}',
            "list": (2).to_bytes(8, "little") + b"[]",
            "infinite": (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}  ',
            "text": (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":"64","data_offsets":[0,256]}}   ',
            "sparse": b"",
        }[kind]
    )
    if kind == "sparse":  # a gigabyte of nothing that claims to be a header, and takes no room on disk
        with path.open("wb") as file:
            file.write((2**30).to_bytes(8, "little"))
            file.truncate(2**30 + 8)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("pointer", r"is \d+ bytes of git-lfs pointer instead of weights: run git lfs pull"),
        ("truncated", r"has (\d+) bytes and its header describes (\d+); download it again \(if it came by git: git lfs pull\)"),
        ("longer", r"has (\d+) bytes and its header describes (\d+); download it again"),
        ("absurd", r"has \d+ bytes, and its header alone would need 9223372036854775816"),
        ("empty", "has 0 bytes, and its header alone would need 8"),
        ("seven bytes", "has 7 bytes, and its header alone would need 8"),
        ("not json", "has a header of 10 bytes that is not JSON"),
        ("deep", "has a header of 100000 bytes that is not JSON"),
        ("not tensors", "has a header that does not describe tensors"),
        ("list", "has a header that does not describe tensors"),
        ("infinite", "has a header that does not describe tensors"),
        ("text", "has a header that does not describe tensors"),
        ("sparse", "claims a header of .* bytes, and none is longer than 100000000"),
    ],
)
def test_a_damaged_weights_file_is_one_sentence_with_path_sizes_and_remedy(folder, kind, words):
    spoil(folder, kind)
    assert str(folder / "model.safetensors") in refused(folder, words)


def test_a_header_whose_offsets_lie_is_refused_by_the_format_itself(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [63]
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    refused(folder, "model.norm.weight|cannot be read as safetensors")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "config.json is not valid JSON"),
        (b"[1]", "must hold a JSON object, not list"),
        (b"\xff\xfe{", "is not valid JSON"),
        (b'{"model_type": "llama", "model_type": "mistral"}', "has the key 'model_type' twice; remove one"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_damaged_config_is_one_sentence(folder, content, words):
    (folder / "config.json").write_bytes(content)
    refused(folder, words)


def test_a_path_that_is_no_checkpoint_says_what_is_there(folder, tmp_path):
    refused(tmp_path / "modle", "there is no folder or file '.*modle'")
    (tmp_path / "notes.txt").write_text("")
    refused(tmp_path, r"there is no config.json in .* \(found: model, notes.txt\)")
    refused(tmp_path / "notes.txt", "is not a .safetensors file")
    (folder / "model.safetensors").unlink()
    refused(folder, r"there are no weights in .* \(found: config.json")


# ---- dtype


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", "both", "neither"])
def test_auto_dtype_is_what_the_checkpoint_says_else_what_its_tensors_are(tmp_path, key):
    save_model(tmp_path, tiny_model().bfloat16())
    keys = {"dtype": {"dtype": "bfloat16"}, "torch_dtype": {"torch_dtype": "bfloat16"}, "neither": {}}
    keys["both"] = keys["dtype"] | {"torch_dtype": "float32"}
    edit(tmp_path, **({"dtype": "absent"} | keys[key]))
    assert load_model(tmp_path, dtype="auto").dtype == torch.bfloat16
    assert load_model(tmp_path).dtype == torch.float32
    assert load_model(tmp_path, dtype="float16").dtype == torch.float16
    assert load_model(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_an_unknown_dtype_is_refused(folder):
    with pytest.raises(ValueError, match="dtype 'float12' is not one of auto, float32, bfloat16, float16"):
        load_model(folder, dtype="float12")
    edit(folder, dtype="float8_e4m3fn")
    refused(folder, "asks for dtype 'float8_e4m3fn'; here it can be float32", dtype="auto")
    load_model(folder)


# ---- where a text ends


def test_every_end_id_that_the_checkpoint_names_ends_a_text(folder):
    """generation_config says [1, 106], the tokenizer's end token is 2, config.json says 1: all three end it."""
    edit(folder, eos_token_id=1, bos_token_id=7)
    edit(folder, "generation_config.json", eos_token_id=[1, 106], bos_token_id="absent")
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 2, "content": "</s>"}]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert set(load_model(folder).generation.eos_ids) == {1, 2, 106}
    assert load_model(folder).generation.bos_id == 7
    legacy = {"eos_token": "</s>", "added_tokens_decoder": {"3": {"content": "</s>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(legacy))
    assert set(load_model(folder).generation.eos_ids) == {1, 3, 106}


def test_where_the_config_is_silent_the_familys_own_end_holds(folder):
    """transformers' LlamaConfig has bos 1 and eos 2 where a file has no such key; null is none."""
    edit(folder, eos_token_id="absent", bos_token_id="absent")
    edit(folder, "generation_config.json", eos_token_id="absent", bos_token_id="absent")
    assert load_model(folder).generation.eos_ids == (2,)
    assert load_model(folder).generation.bos_id == 1
    edit(folder, eos_token_id=None)
    assert load_model(folder).generation.eos_ids == ()


def test_generation_config_says_bos_before_config_does(folder):
    edit(folder, bos_token_id=7)
    edit(folder, "generation_config.json", bos_token_id=9)
    assert load_model(folder).generation.bos_id == 9


@pytest.mark.parametrize(("key", "value"), [("temperature", -1), ("top_k", -1), ("top_p", 2), ("temperature", 1e-60)])
def test_sampling_out_of_range_in_a_file_is_blamed_on_the_file(folder, key, value):
    edit(folder, "generation_config.json", do_sample=True, **{key: value})
    refused(folder, f"generation_config.json: {key} must be")


def test_an_end_id_of_another_kind_is_refused(folder):
    edit(folder, eos_token_id="</s>")
    refused(folder, "'eos_token_id' must be an id or a list of ids, not '</s>'")


def test_the_checkpoint_samples_only_if_it_says_so(folder):
    edit(folder, "generation_config.json", temperature=0.6, top_p=0.9)
    assert load_model(folder).generation.temperature == 0
    edit(folder, "generation_config.json", do_sample=True)
    said = load_model(folder).generation
    assert (said.temperature, said.top_p, said.top_k) == (0.6, 0.9, 50)


def test_a_way_of_generating_that_we_do_not_have_is_told(folder):
    edit(folder, "generation_config.json", num_beams=4, typical_p=1.0)
    with pytest.warns(UserWarning, match="asks for 'num_beams': 4, which is not supported and ignored"):
        load_model(folder)


# ---- nothing half-written


def test_a_save_that_fails_keeps_what_was_there(folder, monkeypatch):
    import nanodecoder.checkpoint as checkpoint

    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full_disk(tensors, path, metadata):
        Path(path).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint to .*No space left on device"):
        save_model(folder, tiny_model(seed=1))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_files_are_flushed_before_they_are_renamed(tmp_path, monkeypatch):
    import nanodecoder.checkpoint as checkpoint

    order = []
    real_fsync, real_replace = checkpoint.os.fsync, Path.replace
    monkeypatch.setattr(checkpoint.os, "fsync", lambda fd: (order.append("fsync"), real_fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda self, to: (order.append("rename"), real_replace(self, to))[1])
    save_model(tmp_path, tiny_model())
    assert order == ["fsync"] * 3 + ["rename"] * 3 + ["fsync"]  # three files, and then the folder


def test_saving_where_nothing_can_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint to"):
        save_model(tmp_path / "file", tiny_model())


# ---- the cost of loading


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="no /proc to read the resident memory from")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_needs_no_more_memory_than_the_model_and_one_tensor(tmp_path, dtype):
    """RssAnon at its peak, in a process of its own; a file of 48 MiB in float32, its largest tensor 8 MiB."""
    big = {"dim": 256, "n_layers": 8, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 1024, "vocab_size": 8192, "tied_head": True}
    save_model(tmp_path, tiny_model(**big))
    size = sum(t.shape[0] * (*t.shape, 1)[1] for t in Weights(tmp_path).tensors.values()) * (4 if dtype == "float32" else 2)
    code = f"""
import threading, time
import nanodecoder as nd
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024
nd.load_model({str(tmp_path / "warm")!r})
before, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
thread = threading.Thread(target=watch)
thread.start()
model = nd.load_model({str(tmp_path)!r}, dtype={dtype!r})
done = True
thread.join()
print(peak - before)
"""
    save_model(tmp_path / "warm", tiny_model())
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(out.stdout) < size + 8 * 2**20 + 6 * 2**20  # 6 MiB for the allocator's and the interpreter's own


def test_headers_are_read_without_the_weights(folder):
    header = read_header(folder / "model.safetensors")
    assert header["model.norm.weight"].shape == (64,)
    assert header["model.norm.weight"].dtype == "F32"
