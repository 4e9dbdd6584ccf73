"""`pipeline("text-generation", model=…)`, called as transformers' is and answering in its shapes.

    generator = pipeline("text-generation", model="HuggingFaceTB/SmolLM2-135M-Instruct")
    generator("Once upon a time")                          # [{"generated_text": "Once upon a time …"}]
    generator(["Once", "Twice"])                           # [[{…}], [{…}]]
    generator([{"role": "user", "content": "Hi"}])         # [{"generated_text": [{"role": "user", …}, {"role": …, …}]}]

Texts go in as they are; only messages pass the checkpoint's chat template.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from .checkpoint import load_model
from .cli import choose_device, choose_dtype
from .completion import Completion, complete
from .config import Sampling
from .model import Decoder
from .tokenizer import Tokenizer

TASK = "text-generation"
MAX_NEW_TOKENS, TEMPERATURE, TOP_K = 256, 0.7, 50  # what transformers 5.24 takes where neither caller nor checkpoint says
OPTIONS = frozenset(
    (
        "max_new_tokens do_sample num_return_sequences batch_size return_full_text seed stop stop_ids use_cache exact compile"
    ).split()
) | {field.name for field in fields(Sampling)}
NEEDLESS = {
    "attention_mask": "a row sees what it has filled, and nothing is padded, so there is nothing to mask",
    "pad_token_id": "rows of different lengths share a batch without padding, and a row that has ended leaves it",
    "max_length": "give max_new_tokens",
    "stop_sequence": "give stop=, whose text is not part of the answer",
}
Messages = list[dict[str, Any]]


class Pipeline:
    """A model and its tokenizer, ready to be called. Made by `pipeline`."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, options: Mapping[str, Any]) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._options = _known(options)

    def __call__(self, inputs: str | Sequence[Any], **options: Any) -> list[Any]:
        """Continue a text, a chat, or a list of either; -> a list of {"generated_text": …}, or a list of such lists.

        For a chat the value is its messages and the answer, for a text the text and its continuation; with
        `return_full_text=False` what is new alone. A chat that ends with the assistant's words has them continued.
        Raises ValueError for an option that is not known, by name.
        """
        wanted = {**self._options, **_known(options)}
        if isinstance(inputs, str) or _is_chat(inputs):
            return self._answer([inputs], wanted)[0]
        several = list(inputs) if isinstance(inputs, Iterable) and not isinstance(inputs, Mapping) else [inputs]
        if not all(isinstance(one, str) or _is_chat(one) for one in several):
            raise ValueError("give a text, a chat (a list of {'role': …, 'content': …}), or a list of texts or of chats")
        return self._answer(several, wanted)

    def _answer(self, inputs: Sequence[str | Messages], wanted: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """One list of answers per input."""
        full = wanted.pop("return_full_text", True)
        samples = wanted.pop("num_return_sequences", 1)
        size = wanted.pop("batch_size", max(1, len(inputs)))
        seed = wanted.pop("seed", None)
        if size < 1:
            raise ValueError(f"batch_size must be 1 or above, not {size}")
        wanted.setdefault("max_new_tokens", MAX_NEW_TOKENS)
        wanted |= self._sampling(wanted.pop("do_sample", None), wanted)
        prompts = self._prompts(inputs)
        done: list[Completion] = []
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            seeds = None if seed is None else [seed] * len(batch)
            done += complete(self.model, self.tokenizer, batch, num_samples=samples, seeds=seeds, **wanted)
        answers = [_put(inputs[number // samples], one.text, full) for number, one in enumerate(done)]
        return [answers[start : start + samples] for start in range(0, len(answers), samples)]

    def _sampling(self, do_sample: bool | None, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Sampling settings where the caller gives none."""
        own = self.model.generation.temperature
        if do_sample is False:
            if wanted.get("temperature"):
                raise ValueError("do_sample=False takes the likeliest token, and temperature would draw: give one of the two")
            return {"temperature": 0.0}
        if do_sample and wanted.get("temperature") == 0:
            raise ValueError("do_sample=True draws, and temperature=0 takes the likeliest token: give one of the two")
        if own > 0:
            return {}
        return {name: value for name, value in (("temperature", TEMPERATURE), ("top_k", TOP_K)) if name not in wanted}

    def _prompts(self, inputs: Sequence[str | Messages]) -> list[str | list[int]]:
        """Texts as they are, chats as ids: those that await an answer, and those whose last words are to be continued."""
        prompts: list[Any] = list(inputs)
        for one in inputs:
            if not isinstance(one, str) and _is_prefilled(one) and not isinstance(one[-1].get("content"), str):
                raise ValueError("the assistant's message at a chat's end is continued, and must have a text as its content")
        for prefilled in (False, True):
            places = [n for n, one in enumerate(inputs) if not isinstance(one, str) and _is_prefilled(one) == prefilled]
            chats = [inputs[place] for place in places]
            for place, ids in zip(
                places, self.tokenizer.chats(chats, continue_final_message=prefilled) if chats else [], strict=True
            ):
                prompts[place] = ids
        return prompts


def pipeline(
    task: str = TASK,
    model: str | os.PathLike[str] | Decoder | None = None,
    *,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    device: str | int | torch.device | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    **options: Any,
) -> Pipeline:
    """A callable for texts and chats. `model`: a folder, a hub name, or a loaded Decoder with its `tokenizer`.

    `device` (or `device_map`, of a single device) is auto if not given; `dtype` float32, on CUDA the checkpoint's own. Other
    options are defaults for its calls: max_new_tokens (256), do_sample, num_return_sequences, batch_size (all at once),
    return_full_text (True), seed, stop, what `complete` and `Sampler` take. Where neither they nor the checkpoint say how to
    sample, it is as transformers 5.24 has it: temperature 0.7, top_k 50.
    Raises ValueError for another task, or an option that is not known, by name.
    """
    if task != TASK:
        raise ValueError(f"the task must be {TASK!r}, not {task!r}: a decoder does nothing else")
    if model is None:
        raise ValueError("give model=, a checkpoint folder, a hub name or a loaded Decoder")
    where = _one_device(device, device_map)
    options = _known(options)  # before the model is loaded
    if isinstance(model, Decoder):
        if tokenizer is None:
            raise ValueError("a loaded Decoder needs its tokenizer: give tokenizer=Tokenizer.load(path)")
        if where is not None or dtype is not None:
            raise ValueError("device and dtype are chosen where a model is loaded: load_model(path, device=…, dtype=…)")
    else:
        place = choose_device("auto" if where is None else where)
        if dtype is None:
            dtype, _ = choose_dtype(None, place, model)
        tokenizer = model if tokenizer is None else tokenizer
        model = load_model(model, place, dtype)
    return Pipeline(model, tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer), options)


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    for name in options:
        if name in NEEDLESS:
            raise ValueError(f"{name} is not taken: {NEEDLESS[name]}")
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=1)
            raise ValueError(
                f"{name} is not an option here; " + (f"did you mean {near[0]}?" if near else ", ".join(sorted(OPTIONS)))
            )
    return {name: value for name, value in options.items() if value is not None}


def _one_device(device: str | int | torch.device | None, device_map: str | Mapping[str, Any] | None) -> str | None:
    """The one device that is asked for, as a name; None where nobody asks."""
    if device is not None and device_map is not None:
        raise ValueError("give either device or device_map, not both")
    if isinstance(device_map, Mapping):
        places = set(device_map.values())
        if len(places) != 1:
            raise ValueError(f"device_map spreads the model over {len(places)} devices, and it lives on one: give device=")
        device_map = places.pop()
    asked = device if device is not None else device_map
    if asked is None or asked == "auto":
        return asked
    if isinstance(asked, int):
        return "cpu" if asked < 0 else f"cuda:{asked}"
    return str(asked)


def _is_chat(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, Mapping) for one in value)


def _is_prefilled(chat: Messages) -> bool:
    return chat[-1].get("role") == "assistant"


def _put(given: str | Messages, text: str, full: bool) -> dict[str, Any]:
    """An answer in transformers' shape."""
    if not full:
        return {"generated_text": text}
    if isinstance(given, str):
        return {"generated_text": given + text}
    if _is_prefilled(given):
        last = given[-1]
        return {"generated_text": [*given[:-1], {**last, "content": last["content"] + text}]}
    return {"generated_text": [*given, {"role": "assistant", "content": text}]}
