"""A checkpoint folder in Hugging Face's layout, in and out: `load_model` and `save_model`.

    DIR/config.json                     what the model is made of (read by `families.py`)
    DIR/model.safetensors               the weights; or shards, and model.safetensors.index.json that says which tensor is where
    DIR/generation_config.json          where a text ends and how to sample, optional
    DIR/tokenizer.json, …               (read by `tokenizer.py`)

Every tensor is used once and every parameter is set once, or loading fails and prints both lists.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .config import GenerationConfig, ModelConfig
from .families import FAMILIES, OWN, Family, find_family, write_config
from .model import Decoder
from .parts import CheckpointError, Fields, Stored, short
from .quantize import kind_of, restore
from .quantize import quantize as quantized
from .quantize import tensors as tensors_of
from .storage import CONFIG, INDEX, SPELLED, WEIGHTS, StoredTensor, Weights, find_folder, read_bytes, read_json

GENERATION = "generation_config.json"
QUANTIZED = "quantization_config"  # config.json's key
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
READERS = 4  # threads that copy tensors from disk
# Keys of generation_config.json that change no token here or are read as ids, and the values at which others change none.
HARMLESS_GENERATION = frozenset(
    "temperature top_k top_p min_p bos_token_id eos_token_id pad_token_id decoder_start_token_id transformers_version "
    "_from_model_config use_cache cache_implementation max_length max_new_tokens num_return_sequences early_stopping "
    "length_penalty output_attentions output_hidden_states output_scores output_logits return_dict_in_generate "
    "return_legacy_cache trust_remote_code disable_compile suppress_tokens".split()
)
NEUTRAL_GENERATION = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "diversity_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "use_mrope": False,
}


class Saves(Protocol):
    """What `save_model` asks of a tokenizer: its files, by name."""

    def files(self) -> dict[str, bytes]: ...


# --------------------------------------------------------------------------------------------------------------- loading


def load_model(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    quantize: str | None = None,
) -> Decoder:
    """Load a checkpoint folder (or one .safetensors file beside its config.json) as a Decoder in eval mode.

    `dtype` is a torch dtype or its name; None gives float32, "auto" the checkpoint's own. `quantize`: "int8" or "int4" rounds
    the weights once they are there (see `quantize.py`). Anything worth knowing that does not prevent loading is a warning.
    Raises CheckpointError in one sentence when the folder is not a checkpoint, asks for what we do not have, or does not
    hold exactly the tensors that its config.json calls for.
    """
    folder, file = find_folder(path)
    where = str(folder / CONFIG)
    raw = read_json(folder / CONFIG)
    held = raw.get(QUANTIZED)
    held = raw.pop(QUANTIZED) if isinstance(held, dict) and held.get("quant_method") == OWN else None
    family = find_family(raw, where)
    weights = Weights(folder, file)
    if family is None:
        raise CheckpointError(_nearest_family(raw, where, weights.tensors))
    for pickled in sorted({stored.file.name for stored in weights.tensors.values() if stored.file.suffix == ".bin"})[:1]:
        _warn(f"{pickled} is a pickle: its tensors were read and none of its code was run; safetensors is faster and safer")
    config = _settle_head(family.read(raw, where), family, weights)
    target = _choose_dtype(dtype, raw, where, weights.tensors)
    model = _empty_model(config, where, len(weights.tensors))
    if held is not None:
        if quantize is not None:
            raise CheckpointError(f"{folder} is quantized already ({held.get('kind')}): load it as it is")
        try:
            restore(model, {name: weights[name].clone() for name in weights.tensors}, target)
        except ValueError as error:
            raise CheckpointError(f"the weights do not fit {where}: {error}") from None
        model.generation = read_generation(folder, raw, family)
        return model.to(device)
    wanted = _match(model, family, weights.tensors, where)

    def fetch(item: tuple[str, Stored]) -> dict[str, Tensor]:
        """One tensor of the file -> our own copies of the parameters in it, so that nothing depends on the file afterwards."""
        name, stored = item
        rows = [model.get_parameter(parameter).shape[0] for parameter in stored.parameters]
        parts = stored.layout.split(weights[name], rows, config.n_heads)
        return {
            parameter: torch.empty(part.shape, device=device, dtype=target).copy_(part)
            for parameter, part in zip(stored.parameters, parts, strict=True)
        }

    # Several at a time, since most of it is waiting: for the disk, and for fresh pages of memory.
    with ThreadPoolExecutor(READERS) as pool:
        state = {name: tensor for part in pool.map(fetch, wanted.items()) for name, tensor in part.items()}
    if config.tied_head:
        state["lm_head.weight"] = state["embed.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    if config.tied_head:
        model.lm_head.weight = model.embed.weight
    model.generation = read_generation(folder, raw, family)
    return model.eval() if quantize is None else quantized(model, quantize)


def _empty_model(config: ModelConfig, where: str, n_tensors: int) -> Decoder:
    """A Decoder without weights, unless config.json calls for one that the weights cannot fill or nobody could build."""
    if config.n_layers > n_tensors:
        raise CheckpointError(f"{where} calls for {config.n_layers} layers, and the weights have only {n_tensors} tensors")
    try:
        with torch.device("meta"):
            return Decoder(config)
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes beyond what a tensor can have
        raise CheckpointError(f"{where} calls for sizes that no tensor can have ({str(error).splitlines()[0]})") from None


def _named(family: Family, parameter: str, tensors: dict[str, StoredTensor]) -> str:
    """The name that a parameter's tensor has in this file: one saved from the bare trunk lacks the family's prefix."""
    name = family.tensor_name(parameter)
    bare = not any(tensor.startswith(family.prefix) for tensor in tensors)
    return name.removeprefix(family.prefix) if bare else name


def _settle_head(config: ModelConfig, family: Family, weights: Weights) -> ModelConfig:
    """Whether the head is tied, from config.json and from what the file holds, as transformers 5.24 decides it.

    A file with a head of its own, different from the embedding, is believed over the flag. One with a single one of the
    two is used for both when they are tied.
    """
    embed, head = (_named(family, parameter, weights.tensors) for parameter in ("embed.weight", "lm_head.weight"))
    if not config.tied_head or embed not in weights.tensors or head not in weights.tensors:
        return config
    alike = weights.tensors[embed].shape == weights.tensors[head].shape and torch.equal(weights[embed], weights[head])
    if alike:
        return config
    _warn(f"config.json ties the head to the embedding, but the file holds {head} with other values: the head is kept apart")
    return dataclasses.replace(config, tied_head=False)


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=4)


def own_dtype(path: str | os.PathLike[str]) -> torch.dtype:
    """The dtype that a checkpoint is in by its own word: what `load_model(path, dtype="auto")` loads it in."""
    folder, file = find_folder(path)
    return _choose_dtype("auto", read_json(folder / CONFIG), str(folder / CONFIG), Weights(folder, file).tensors)


def _choose_dtype(
    asked: torch.dtype | str | None, raw: dict[str, Any], where: str, tensors: dict[str, StoredTensor]
) -> torch.dtype:
    """The dtype to load in. "auto": what config.json says (`dtype`, before that `torch_dtype`), else what most tensors have."""
    if asked is None:
        return torch.float32
    if isinstance(asked, torch.dtype):
        asked = str(asked).removeprefix("torch.")
    if asked != "auto":
        if asked not in DTYPES:
            raise ValueError(f"dtype {asked!r} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[asked]
    fields = Fields(raw, where)
    named = fields.take("dtype", str, None) or fields.take("torch_dtype", str, None)
    if named is None:
        stored = [tensor.dtype for tensor in tensors.values()]
        spelled = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
        named = spelled.get(max(set(stored), key=stored.count), "float32")
    named = named.removeprefix("torch.")
    if named not in DTYPES:
        raise CheckpointError(f"{where} asks for dtype {named!r}; here it can be {', '.join(DTYPES)}: choose one with dtype=")
    return DTYPES[named]


def _match(model: Decoder, family: Family, tensors: dict[str, StoredTensor], where: str) -> dict[str, Stored]:
    """Tensor name -> the parameters in it, every one accounted for and every shape checked; else CheckpointError."""
    parameters = dict(model.named_parameters())
    bare = not any(tensor.startswith(family.prefix) for tensor in tensors)
    wanted = {name.removeprefix(family.prefix) if bare else name: held for name, held in family.stored(parameters).items()}
    allowed = set(wanted)
    if model.config.tied_head:
        embed, head = (_named(family, parameter, tensors) for parameter in ("embed.weight", "lm_head.weight"))
        allowed |= {head}
        if embed not in tensors and head in tensors:
            wanted[head] = wanted.pop(embed)
    missing = sorted(name for name in wanted if name not in tensors)
    unexpected = sorted(name for name in tensors if name not in allowed and not family.is_harmless(name))
    if missing or unexpected:
        raise CheckpointError(
            f"the weights do not fit {where}: {_listed('missing', missing)}; {_listed('unexpected', unexpected)}"
        )
    for name, held in wanted.items():
        found = tensors[name]
        shape = tuple(held.layout.join([parameters[parameter] for parameter in held.parameters], model.config.n_heads).shape)
        if found.shape != shape:
            raise CheckpointError(
                f"{name} in {found.file.name} has shape {list(found.shape)}, and {where} calls for {list(shape)}"
            )
        if found.dtype not in SPELLED.values():
            raise CheckpointError(
                f"{name} in {found.file.name} is of dtype {found.dtype}, not one of {', '.join(sorted(SPELLED.values()))}: "
                "quantized checkpoints are not supported"
            )
    return wanted


def _nearest_family(raw: dict[str, Any], where: str, tensors: dict[str, StoredTensor]) -> str:
    """One sentence on an unknown model_type: which family its tensors are most like, and what differs."""

    def general(name: str) -> str:
        return re.sub(r"\.\d+\.", ".N.", name)

    few = {key: min(value, 2) for key in ("num_hidden_layers", "n_layer") if isinstance(value := raw.get(key), int)}
    theirs = {general(name): stored.shape for name, stored in tensors.items()}
    told = f"{where} has model_type {short(raw['model_type'])}, which is not supported; by its tensors it is like"
    how = f"docs/families.md says how to add a family (these can be loaded: {', '.join(FAMILIES)})"
    best: tuple[float, Family, dict[str, tuple[int, ...]]] | None = None
    for family in FAMILIES.values():
        expected = _expected_shapes(family, family.guess(raw | few))
        for prefix in ("", family.prefix):
            ours = {general(name.removeprefix(prefix)): shape for name, shape in expected.items()}
            alike = len(ours.keys() & theirs.keys()) / len(ours.keys() | theirs.keys())
            if best is None or alike > best[0]:
                best = alike, family, ours
    alike, family, ours = best
    if alike < 0.5:
        return f"{told} none of the families here. {how}"
    shared = [name for name in ours if theirs.get(name, ours[name]) != ours[name]]
    differences = {
        "with": [short(name) for name in theirs if name not in ours and not family.is_harmless(name)],
        "without": [name for name in ours if name not in theirs and name != family.tensor_name("lm_head.weight")],
        "with shapes": [f"{name} {list(theirs[name])} for {list(ours[name])}" for name in shared],
        "with config keys": family.unknown_keys(raw),
    }
    unlike = [f"{word} {', '.join(names[:4])}{' …' if len(names) > 4 else ''}" for word, names in differences.items() if names]
    return f"{told} {family.model_type}{', but ' + '; '.join(unlike) if unlike else ''}. {how}"


def _expected_shapes(family: Family, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of this family and config has: name -> shape."""
    with torch.device("meta"):
        parameters = dict(Decoder(config).named_parameters())
    return {
        name: tuple(held.layout.join([parameters[parameter] for parameter in held.parameters], config.n_heads).shape)
        for name, held in family.stored(parameters).items()
    }


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    shown = [name if name.isprintable() and len(name) < 100 else short(name) for name in names[:6]]
    return f"{what} " + (", ".join(shown) + more if names else "none")


# ----------------------------------------------------------------------------------------- what it says of generating


def read_generation(folder: Path, raw: dict[str, Any], family: Family) -> GenerationConfig:
    """End ids from config.json, generation_config.json and the tokenizer together; how to sample, if the checkpoint samples."""
    stated = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    said = Fields(stated, str(folder / GENERATION))
    config = Fields({"bos_token_id": family.bos_id, "eos_token_id": family.eos_id, **raw}, str(folder / CONFIG))
    ends = [*_ids(config, "eos_token_id"), *_ids(said, "eos_token_id"), *_tokenizer_ends(folder)]
    bos = [*_ids(said, "bos_token_id"), *_ids(config, "bos_token_id")]
    pad = [*_ids(said, "pad_token_id"), *_ids(config, "pad_token_id")]
    sampling: dict[str, Any] = {"pad_id": pad[0] if pad else None}
    if said.take("do_sample", bool, False):
        sampling |= {
            "temperature": said.take("temperature", float, 1.0),
            "top_k": said.take("top_k", int, 50),  # what transformers takes where the file does not say
            "top_p": said.take("top_p", float, 1.0),
            "min_p": said.take("min_p", float, 0.0),
        }
    sampling["repetition_penalty"] = said.take("repetition_penalty", float, 1.0)
    sampling["banned_ids"] = _ids(said, "suppress_tokens")
    for key in said.unread():
        if key not in HARMLESS_GENERATION and stated[key] != NEUTRAL_GENERATION.get(key):
            _warn(f"{said.where} asks for {short(key)}: {short(stated[key])}, which is not supported and ignored")
    try:
        return GenerationConfig(bos_id=bos[0] if bos else None, eos_ids=tuple(dict.fromkeys(ends)), **sampling)
    except ValueError as error:
        raise CheckpointError(f"{said.where}: {error}") from None


def _ids(fields: Fields, key: str) -> list[int]:
    """An id, a list of ids, or nothing."""
    value = fields.raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for index in ids:
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise CheckpointError(f"{fields.where}: {key!r} must be an id or a list of ids, not {value!r}")
    return ids


def _tokenizer_ends(folder: Path) -> list[int]:
    """The id of the tokenizer's own end token, read from its JSON files, so that a model alone knows where to stop."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return []
    raw = read_json(path)
    content = token_text(raw.get("eos_token"))
    if content is None:
        return []
    added = raw.get("added_tokens_decoder")
    if isinstance(added, dict):
        return [int(index) for index, token in added.items() if token_text(token) == content and index.isdecimal()]
    return [token["id"] for token in _added_tokens(folder / "tokenizer.json") if token_text(token) == content]


def _added_tokens(path: Path) -> list[dict[str, Any]]:
    """tokenizer.json's added tokens, which stand before its vocabulary: parsing megabytes of that would slow every start."""
    if not path.is_file():
        return []
    try:
        text = read_bytes(path).decode("utf-8")
        key = re.search(r'"added_tokens"\s*:\s*(?=\[)', text)
        tokens = json.JSONDecoder().raw_decode(text, key.end())[0] if key else []
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download it again") from None
    return [token for token in tokens if isinstance(token, dict) and isinstance(token.get("id"), int)]


def token_text(token: Any) -> str | None:
    """A special token as tokenizer_config.json spells it: a string, an object with `content`, or null."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


# ---------------------------------------------------------------------------------------------------------------- saving


def save_model(path: str | os.PathLike[str], model: Decoder, tokenizer: Saves | None = None) -> None:
    """Write a checkpoint folder that transformers reads: config.json, model.safetensors, generation_config.json, tokenizer.

    Every file is written under a temporary name, flushed to disk and renamed, so that what was there stays whole until
    the new one is. Raises CheckpointError when the folder cannot be written or no dialect can say the model.
    """
    folder = Path(path)
    kind = kind_of(model)
    own = model.config if kind is None else dataclasses.replace(model.config, model_type=OWN)  # that alone can say it
    family, raw = write_config(own)
    raw |= {"dtype": str(model.dtype).removeprefix("torch."), **_end_keys(model.generation)}
    if kind is not None:
        raw[QUANTIZED] = {"quant_method": OWN, "kind": kind}
        tensors = tensors_of(model)
    else:
        parameters = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
        tensors = {
            name: held.layout.join([parameters[parameter] for parameter in held.parameters], model.config.n_heads).contiguous()
            for name, held in family.stored(parameters).items()
        }
    files: dict[str, Callable[[Path], Any]] = {
        WEIGHTS: lambda part: save_file(tensors, part, metadata={"format": "pt"}),
        CONFIG: lambda part: part.write_text(_pretty(raw), encoding="utf-8"),
        GENERATION: lambda part: part.write_text(_pretty(_write_generation(model.generation)), encoding="utf-8"),
    }
    for name, content in (tokenizer.files() if tokenizer is not None else {}).items():
        files[name] = lambda part, content=content: part.write_bytes(content)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _renamed_together(folder, files) as parts:
            for name, write in files.items():
                write(parts[name])
        (folder / INDEX).unlink(missing_ok=True)  # of a sharded checkpoint that lay here: it no longer says what is where
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the checkpoint to {folder}: {error}") from None


def _pretty(raw: dict[str, Any]) -> str:
    return json.dumps(raw, indent=2, ensure_ascii=False) + "\n"


def _end_keys(generation: GenerationConfig) -> dict[str, Any]:
    ends = list(generation.eos_ids)
    end = ends[0] if len(ends) == 1 else ends or None
    return {"bos_token_id": generation.bos_id, "eos_token_id": end, "pad_token_id": generation.pad_id}


def _write_generation(generation: GenerationConfig) -> dict[str, Any]:
    """generation_config.json, with only what differs from transformers' own defaults."""
    raw = _end_keys(generation)
    if generation.temperature > 0:
        raw |= {"do_sample": True, "temperature": generation.temperature, "top_k": generation.top_k}
        raw |= {"top_p": generation.top_p}
        raw |= {"min_p": generation.min_p} if generation.min_p else {}
    if generation.repetition_penalty != 1.0:
        raw["repetition_penalty"] = generation.repetition_penalty
    if generation.banned_ids:
        raw["suppress_tokens"] = list(generation.banned_ids)
    return raw


@contextmanager
def _renamed_together(folder: Path, names: Iterable[str]) -> Iterator[dict[str, Path]]:
    """Temporary paths, one per name: all flushed and renamed to their names if the body succeeds, all removed if not."""
    parts = {name: (folder / name).with_name(f".{Path(name).name}.{os.getpid()}.part") for name in names}
    try:
        for part in parts.values():
            part.parent.mkdir(exist_ok=True)
        yield parts
        for part in parts.values():
            with part.open("rb+") as file:
                os.fsync(file.fileno())
        for name, part in parts.items():
            part.replace(folder / name)
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)  # the renames themselves
        finally:
            os.close(directory)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
