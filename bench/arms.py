"""One way of computing in a process of its own: `python -m bench.arms` holds it, and does what its standard input asks.

Every arm takes ids and gives ids, greedily and by its own library's usual way: ours by `Stepper` and `complete`,
transformers by `generate`, gpt-fast by its own prefill and decode_n_tokens, llama.cpp by llama-cpp-python's generate.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import types
import warnings
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanodecoder as nd
from nanodecoder.inside.memory import cache_per_token
from nanodecoder.verify import Led

Ids = list[int]
Decoded = dict[str, list[Any]]  # "ids": the new ones; "seconds" to each: to the first with the prompt's pass, then one by one


def decoded(ids: Ids, marks: list[float]) -> Decoded:
    """marks: when it began, and when each token was there."""
    return {"ids": ids, "seconds": [b - a for a, b in pairwise(marks)]}


def bytes_read(model: nn.Module, table: nn.Module) -> int:
    """Bytes of the weights that a token reads: each storage once, without a table that the head does not share."""
    held = {t.untyped_storage()._cdata: t.nbytes for t in (*model.parameters(), *model.buffers())}
    elsewhere = [m for m in model.modules() if m is not table and m is not model]
    shared = {t.untyped_storage()._cdata for m in elsewhere for t in (*m.parameters(False), *m.buffers(False))}
    for t in (*table.parameters(), *table.buffers()):
        if t.untyped_storage()._cdata not in shared:
            held.pop(t.untyped_storage()._cdata, None)
    return sum(held.values())


class Trainable:
    """Steps of AdamW in float32, the same for all: next-token loss, clipped at 1."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None

    def logits_of(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, V)"""
        raise NotImplementedError

    def train(self, rows: list[Ids]) -> float:
        """One step on rows of equal length; -> the loss."""
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.train().parameters(), lr=1e-5, weight_decay=0.0)
        tokens = torch.tensor(rows, device=next(self.model.parameters()).device)
        logits = self.logits_of(tokens[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


class Ours(Trainable):
    """This project's model."""

    def __init__(self, model: nd.Decoder, compiled: bool = False, exact: bool = False, alone: bool = False) -> None:
        self.model, self.alone = model, alone
        self.way = {"compile": compiled, "exact": exact}
        self.read, self.cache = bytes_read(model, model.embed), cache_per_token(model.config, model.dtype)
        self.stepper: nd.Stepper | None = None

    def decode(self, ids: Ids, n: int, keep: bool = False) -> Decoded:
        """n new ids. `keep`: what the last call computed of the same prompt need not be computed again."""
        if not keep or self.stepper is None:
            self.stepper = nd.Stepper(self.model, sampler=nd.Sampler(), **self.way)
        marks, new = [time.perf_counter()], []
        self.stepper.add(ids, max_new_tokens=n, eos_ids=())
        while len(self.stepper):
            new += self.stepper.step().ids.tolist()
            marks.append(time.perf_counter())
        return decoded(new, marks)

    def batch(self, rows: list[Ids], n: int) -> list[Ids]:
        """n new ids for each row, in one batch, or one row after the other."""
        way = {"max_new_tokens": n, "temperature": 0.0, "ignore_eos": True, **self.way}
        parts = [[row] for row in rows] if self.alone else [rows]
        return [done.ids for part in parts for done in nd.complete(self.model, None, part, **way)]

    def logits(self, ids: Ids, text: Ids) -> Tensor:
        """What each token of a text was chosen from, or would have been, (N, V): led along it token by token."""
        led = Led([text], False, [0])
        stepper = nd.Stepper(self.model, sampler=led, **self.way)
        stepper.add(ids, max_new_tokens=len(text), seed=0, eos_ids=())
        while len(stepper):
            stepper.step()
        return torch.stack(led.seen[0])

    def logits_of(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


class Transformers(Trainable):
    """transformers' model of the folder."""

    def __init__(self, model: Any, alone: bool = False) -> None:
        self.model, self.alone = model, alone
        config = model.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.read = bytes_read(model, model.get_input_embeddings())
        self.cache = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
        self.held: tuple[Ids, Any] | None = None

    @torch.no_grad()
    def _generate(self, tokens: Tensor, mask: Tensor, n: int, **more: Any) -> Tensor:
        how = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return self.model.generate(tokens, attention_mask=mask, **how, **more)[:, tokens.shape[1] :]

    def decode(self, ids: Ids, n: int, keep: bool = False) -> Decoded:
        """As `Ours.decode`."""
        marks = [time.perf_counter()]

        class Clock:  # a stopping criterion that never stops, and looks at the time
            def __call__(self, tokens: Tensor, *_: object) -> Tensor:
                int(tokens[0, -1])  # waits for the device
                marks.append(time.perf_counter())
                return torch.zeros(1, dtype=torch.bool, device=tokens.device)

        more: dict[str, Any] = {"stopping_criteria": [Clock()]}
        if keep:
            from transformers import DynamicCache

            if self.held is None or self.held[0] != ids:
                self.held = ids, DynamicCache(config=self.model.config)
            more["past_key_values"] = self.held[1]
        tokens = torch.tensor([ids], device=self.model.device)
        new = self._generate(tokens, torch.ones_like(tokens), n, **more)[0].tolist()
        if keep:
            self.held[1].crop(len(ids) - 1 - self.held[1].get_seq_length())  # a negative number: so many are dropped
        return decoded(new, marks)

    def batch(self, rows: list[Ids], n: int) -> list[Ids]:
        """As `Ours.batch`, padded on the left."""
        found: list[Ids] = []
        for part in [[row] for row in rows] if self.alone else [rows]:
            longest = max(map(len, part))
            tokens = torch.tensor([[0] * (longest - len(row)) + row for row in part], device=self.model.device)
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in part], device=self.model.device)
            found += self._generate(tokens, mask, n).tolist()
        return found

    @torch.no_grad()
    def logits(self, ids: Ids, text: Ids) -> Tensor:
        """As `Ours.logits`, from one pass."""
        tokens = torch.tensor([[*ids, *text[:-1]]], device=self.model.device)
        return self.model(tokens, use_cache=False).logits[0, len(ids) - 1 :].float().cpu()

    def logits_of(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


class GptFast:
    """gpt-fast, from a checkout: `code` is its generate.py."""

    def __init__(self, code: types.ModuleType, model: Any, compiled: bool = False) -> None:
        self.code, self.model = code, model
        if compiled:
            plain = getattr(code.decode_one_token, "_torchdynamo_orig_callable", code.decode_one_token)
            code.decode_one_token = torch.compile(plain, mode="reduce-overhead", fullgraph=True)
        config = model.config
        self.read = bytes_read(model, model.tok_embeddings)
        self.cache = 2 * config.n_layer * config.n_local_heads * config.head_dim * model.norm.weight.dtype.itemsize
        self.held: tuple[Ids, Tensor] | None = None

    @torch.no_grad()
    def decode(self, ids: Ids, n: int, keep: bool = False) -> Decoded:
        """As `Ours.decode`. Its slots are as many as the text needs, and at most the model's context."""
        code, model = self.code, self.model
        device = model.norm.weight.device
        new, marks = [], [time.perf_counter()]

        def note(token: Tensor) -> None:
            new.append(int(token))
            marks.append(time.perf_counter())

        with torch.device(device):
            model.setup_caches(1, min(len(ids) + n, model.config.block_size))
        if not keep or self.held is None or self.held[0] != ids:
            tokens = torch.tensor([ids], device=device)
            first = code.prefill(model, tokens, torch.arange(len(ids), device=device), top_k=1).clone()
            self.held = ids, first.view(1, 1)
        note(self.held[1])
        at = torch.tensor([len(ids)], device=device, dtype=torch.int32)
        with torch._inductor.config.patch(TUNED):
            code.decode_n_tokens(model, self.held[1], at, n - 1, callback=note, top_k=1)
        return decoded(new, marks)


class LlamaCpp:
    """llama.cpp by llama-cpp-python."""

    def __init__(self, llama: Any, size: int, cache: int) -> None:
        self.llama, self.read, self.cache = llama, size, cache

    def decode(self, ids: Ids, n: int, keep: bool = False) -> Decoded:
        """As `Ours.decode`."""
        if not keep:
            self.llama.reset()
        marks, new = [time.perf_counter()], []
        for token in self.llama.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0):
            marks.append(time.perf_counter())
            new.append(int(token))
            if len(new) == n:
                break
        return decoded(new, marks)


# ------------------------------------------------------------------------------------------------------------- loading them


def load_ours(given: dict[str, Any]) -> Ours:
    """`given`: a `common.Way` as a dict, and where the checkpoint is."""
    few = given["precision"] in ("int8", "int4")
    how = {"quantize": given["precision"]} if few else {"dtype": given["precision"]}
    return Ours(nd.load_model(given["ckpt"], **how), given["compiled"], given["exact"], given["alone"])


def load_transformers(given: dict[str, Any]) -> Transformers:
    """Its model of the folder."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, given["precision"])
    return Transformers(AutoModelForCausalLM.from_pretrained(given["ckpt"], dtype=dtype).eval(), given["alone"])


TUNED = {"coordinate_descent_tuning": True}  # what gpt-fast asks of torch's compiler


def gpt_fast_code(folder: str) -> tuple[types.ModuleType, types.ModuleType]:
    """gpt-fast's generate.py and model.py. Its tokenizers, which want packages of their own, are left out: ids go in."""
    import torch._inductor.config as inductor

    sys.path.insert(0, str(Path(folder).absolute()))
    sys.modules["tokenizer"] = types.ModuleType("tokenizer")
    sys.modules["tokenizer"].get_tokenizer = None
    with inductor.patch({name: getattr(inductor, name) for name in TUNED}):  # its import changes torch for everyone
        import generate  # these are the checkout's own names
        import model

    return generate, model


def load_gpt_fast(given: dict[str, Any]) -> GptFast:
    """Our weights in its model; int8 by its own handler."""
    from .convert import gpt_fast_args, gpt_fast_state

    code, parts = gpt_fast_code(given["gpt_fast"])
    few = given["precision"] == "int8"
    ours = nd.load_model(given["ckpt"], dtype="bfloat16" if few else given["precision"])
    with torch.device("meta"):
        model = parts.Transformer(gpt_fast_args(parts, ours.config))
    model.load_state_dict(gpt_fast_state(ours), assign=True)
    if few:
        model = in_eight_bits(model)
    return GptFast(code, model.eval(), given["compiled"])


def in_eight_bits(model: Any) -> Any:
    """gpt-fast's model by its own int8 handler."""
    from quantize import WeightOnlyInt8QuantHandler  # the checkout's

    handler = WeightOnlyInt8QuantHandler(model)
    state = handler.create_quantized_state_dict()
    model = handler.convert_for_runtime()
    model.load_state_dict(state, assign=True)
    return model


def load_llama_cpp(given: dict[str, Any]) -> LlamaCpp:
    """A GGUF file, with room for as many tokens as will come."""
    import llama_cpp

    threads = torch.get_num_threads()
    llama = llama_cpp.Llama(given["gguf"], n_ctx=given["slots"], n_threads=threads, n_threads_batch=threads, verbose=False)
    held = llama._model.model
    heads = llama_cpp.llama_model_n_head_kv(held) * llama_cpp.llama_model_n_embd(held) // llama_cpp.llama_model_n_head(held)
    cache = 2 * llama_cpp.llama_model_n_layer(held) * heads * 2  # in float16, its default
    return LlamaCpp(llama, llama_cpp.llama_model_size(held), cache)


LOADERS = {"nanodecoder": load_ours, "transformers": load_transformers, "gpt-fast": load_gpt_fast, "llama.cpp": load_llama_cpp}


# ------------------------------------------------------------------------------------------------------------- the process


def memory(peak: bool) -> int:
    """Bytes of memory that this process holds, or has held at most, with pages of mapped files (0 where nothing says it).

    Linux's /proc says it of this program alone; getrusage's maximum begins with what the process that started it had.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:" if peak else "VmRSS:"))
    except (OSError, StopIteration):
        return 0


def load(given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arm that is wanted, and what is known of it: bytes that a token reads of the weights, and per token held of the
    cache; bytes of this process before; seconds that it took.
    """
    before, start = memory(peak=False), time.perf_counter()
    arm = LOADERS[given["peer"]](given)
    return arm, {"read": arm.read, "cache": arm.cache, "before": before, "load": time.perf_counter() - start}


def carry_out(arm: Any, do: str, path: str | None = None, timed: bool = False, **given: Any) -> Any:
    """What an arm is asked for: one of its methods, or "peak". A tensor goes into the file `path`; -> the rest, `timed` with
    its seconds.
    """
    if do == "peak":
        return memory(peak=True)
    gc.collect()
    start = time.perf_counter()
    found = getattr(arm, do)(**given)
    elapsed = time.perf_counter() - start
    if path is not None:
        torch.save(found, path)
        return None
    return {"seconds": elapsed, "result": found} if timed else found


def main() -> None:
    """Load an arm; then a line of JSON comes in, it is done, and a line goes out, until the input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print what they like: not into the answers
    warnings.simplefilter("ignore", FutureWarning)
    arm: Any = None
    for line in chain([None], sys.stdin):
        try:
            if line is None:
                arm, result = load(json.loads(sys.argv[1]))
            else:
                result = carry_out(arm, **json.loads(line))
            answer: dict[str, Any] = {"result": result}
        except Exception as error:  # whatever a library raises is told by the process that asked
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
