"""Plant known mistakes in a copy of the code, one by one, and require that a test fails for each.

    python tests/mutants.py              all of them (some minutes)
    python tests/mutants.py rope eps     those whose name holds one of these words
    python tests/mutants.py --list
    python tests/mutants.py --passed     the tests are known to pass without a mistake: do not run them first

The mistakes are such as real programs had. Each names the tests that must notice; needs no transformers.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALONE = {"OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "seek"}


@dataclass(frozen=True)
class Mutant:
    """Replace `old`, which must stand exactly once in `file`, by `new`; the tests in `noticed_by` must then fail."""

    name: str
    file: str
    old: str
    new: str
    noticed_by: str


MUTANTS = [
    # ---- rope
    Mutant("interleaved rotation on half-split weights", "rope", "first, second = x[..., :turning].chunk(2, dim=-1)\n    turned = (first * cos - second * sin, second * cos + first * sin)", "first, second = x[..., :turning:2], x[..., 1:turning:2]\n    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).chunk(2, dim=-1)", "test_rope test_fixtures"),
    Mutant("turned the other way", "rope", "first * cos - second * sin, second * cos + first * sin", "first * cos + second * sin, second * cos - first * sin", "test_rope"),
    Mutant("theta ignored", "rope", "inverse = 1.0 / (theta**exponents)", "inverse = 1.0 / (10000.0**exponents)", "test_rope test_fixtures"),
    Mutant("llama3 stretch ignored", "rope", 'elif rope.kind == "llama3":', 'elif rope.kind == "never":', "test_rope test_fixtures"),
    Mutant("yarn stretch ignored", "rope", 'elif rope.kind == "yarn":', 'elif rope.kind == "never":', "test_rope test_fixtures"),
    Mutant("yarn's ramp not rounded", "rope", "if rope.truncate:", "if False:", "test_rope"),
    Mutant("dynamic stretch by the batch's longest row", "rope", "[frequencies(rope, head_dim, length) for length in (lengths", "[frequencies(rope, head_dim, max(lengths)) for length in (lengths", "test_model"),
    Mutant("longrope's long factors one token early", "rope", "rope.long_factors if length > context", "rope.long_factors if length >= context", "test_rope test_model"),
    Mutant("attention factor dropped", "rope", "(turn.cos() * factor).to(dtype), (turn.sin() * factor).to(dtype)", "turn.cos().to(dtype), turn.sin().to(dtype)", "test_rope test_fixtures"),
    Mutant("the whole head turns", "config", "return int(head_dim * self.fraction)", "return head_dim", "test_rope test_fixtures"),
    Mutant("what does not turn is dropped to zero", "rope", "(*turned, x[..., turning:])", "(*turned, 0 * x[..., turning:])", "test_rope test_fixtures"),
    Mutant("linear stretch ignored", "rope", "inverse = inverse / rope.factor", "pass", "test_rope"),
    Mutant("positions rounded to the model's dtype", "rope", "positions[:, :, None, None].float()", "positions[:, :, None, None].to(dtype).float()", "test_rope"),
    # ---- layers
    Mutant("eps ignored", "layers", "self.eps, self.offset = eps, offset", "self.eps, self.offset = 1e-6, offset", "test_layers"),
    Mutant("norm weight ignored", "layers", "return wide.to(x.dtype) * self.weight", "return wide.to(x.dtype)", "test_layers test_fixtures"),
    Mutant("mean square in half precision", "layers", "wide = x.float()\n        wide = wide * torch.rsqrt", "wide = x\n        wide = wide * torch.rsqrt", "test_layers"),
    Mutant("gate and up swapped", "layers", "self.activation(self.gate_proj(x)) * self.up_proj(x)", "self.activation(self.up_proj(x)) * self.gate_proj(x)", "test_layers test_fixtures"),
    Mutant("norm offset ignored", "layers", "if self.offset:", "if False:", "test_layers test_fixtures"),
    Mutant("layer norm keeps the mean", "layers", "wide = wide - wide.mean(-1, keepdim=True)", "pass", "test_layers test_fixtures"),
    Mutant("exact GELU for tanh GELU", "layers", 'partial(F.gelu, approximate="tanh")', "F.gelu", "test_layers"),
    Mutant("soft cap ignored", "layers", "return x if cap is None else", "return x if True else", "test_layers test_fixtures"),
    # ---- attention
    Mutant("a query does not see itself", "attention", "seen = key_positions <= queries", "seen = key_positions < queries", "test_attention"),
    Mutant("window off by one", "attention", "key_positions > queries - window", "key_positions >= queries - window", "test_attention test_fixtures"),
    Mutant("window ignored", "attention", "    if window is None:\n        return seen", "    if True:\n        return seen", "test_attention test_fixtures"),
    Mutant("triangle aligned to the first key", "attention", "at.uniform and at.starts[0] == 0", "at.uniform", "test_model test_attention"),
    Mutant("triangle inside a chunk forgotten", "attention", "if unwindowed and at.columns == 1 and at.uniform:", "if unwindowed and at.uniform:", "test_model test_attention"),
    Mutant("short rows see long rows' slots", "attention", "at.columns == 1 and at.uniform", "at.columns == 1", "test_model test_generate"),
    Mutant("key/value heads tiled, not repeated (explicit)", "attention", "q = q.unflatten(1, (n_kv_heads, -1))  #", "q = q.unflatten(1, (-1, n_kv_heads)).transpose(1, 2)  #", "test_attention"),
    Mutant("scale forgotten", "attention", "self.scale = config.head_dim**-0.5 if config.attn_scale is None else config.attn_scale", "self.scale = 1.0", "test_fixtures"),
    Mutant("scale of the stream's width", "attention", "self.scale = config.head_dim**-0.5 if", "self.scale = (config.dim // config.n_heads) ** -0.5 if", "test_fixtures"),
    Mutant("query norm skipped", "attention", "q = self._heads(self.q_proj(x), self.q_norm)", "q = self._heads(self.q_proj(x))", "test_fixtures"),
    Mutant("values turned too", "attention", "q, k = rotate(q, turn), rotate(k, turn)", "q, k, v = rotate(q, turn), rotate(k, turn), rotate(v, turn)", "test_fixtures"),
    Mutant("biases dropped", "attention", "self.k_proj = Linear(config.dim, config.n_kv_heads * config.head_dim, bias=config.qkv_bias)", "self.k_proj = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)", "test_fixtures"),
    Mutant("query scale of another number ignored", "attention", "if config.attn_scale is None else config.attn_scale", "if True else config.attn_scale", "test_fixtures"),
    Mutant("a kernel's strides trusted", "attention", ".reshape(q.shape)", ".view(q.shape)", "test_attention"),
    Mutant("queries and keys normed per head though together", "attention", "norm is not None and not self.norm_per_head", "False", "test_fixtures"),
    # ---- model
    Mutant("final norm forgotten", "model", "x = self.norm(x)", "pass", "test_fixtures"),
    Mutant("layers share one window", "model", "seen[window], layer", "seen[config.windows[0]], layer", "test_fixtures"),
    Mutant("residual around the feed-forward dropped", "model", "return looked + self.dropout(self.ffn_post_norm", "return self.dropout(self.ffn_post_norm", "test_fixtures"),
    Mutant("parallel halves one after the other", "model", "x if self.parallel else looked", "looked", "test_fixtures"),
    Mutant("norms after the halves forgotten", "model", "looked = x + self.dropout(self.attn_post_norm(self.attn(", "looked = x + self.dropout((self.attn(", "test_fixtures"),
    Mutant("embedding scale forgotten", "model", "if self.config.embed_scale != 1:", "if False:", "test_fixtures"),
    Mutant("learned positions without their offset", "model", "self.positions(positions + self.config.position_offset)", "self.positions(positions)", "test_fixtures"),
    Mutant("learned positions restart with a cache", "model", "self.positions(positions + self.config.position_offset)", "self.positions(torch.arange(x.shape[1]) + self.config.position_offset)", "test_fixtures test_model"),
    Mutant("layers without positions turn", "model", "x = block(x, turns[rope]", "x = block(x, next(t for t in turns if t or len(turns) == 1)", "test_fixtures"),
    Mutant("longrope rows go on across their length", "model", "return held > 0 and any(", "return False and any(", "test_model test_generate"),
    # ---- cache
    Mutant("positions restart with a cache", "cache", "return torch.arange(start, start + self.columns, device=self.device)", "return torch.arange(0, self.columns, device=self.device)", "test_cache test_model"),
    Mutant("all rows start where the first does", "cache", "row, column, start + column)", "row, column, self.starts[0] + column)", "test_model"),
    Mutant("padding counted as held", "cache", "self._lengths = list(placement.lengths)", "self._lengths = [start + placement.columns for start in placement.starts]", "test_cache test_model"),
    Mutant("memory not zeroed", "cache", "if extent > self._clean:", "if False:", "test_cache"),
    Mutant("truncated slots keep NaN", "cache", "self.keys[:, row, :, keep:length] = 0", "pass", "test_cache"),
    Mutant("selected rows lose their values", "cache", "self.values[:, row, :, :held] = other.values", "self.values[:, row, :, :held] = other.keys", "test_cache"),
    # ---- families and checkpoint
    Mutant("window in force without use_sliding_window", "parts", "window if in_force and slides", "window if slides", "test_families"),
    Mutant("max_window_layers inverted", "parts", 'return i >= fields.take("max_window_layers", int, 28)', 'return i < fields.take("max_window_layers", int, 28)', "test_families test_fixtures"),
    Mutant("null read as absent", "parts", "return {self.ours: fields.take(self.theirs, self.kind, None)}", "return {self.ours: fields.take(self.theirs, self.kind, self.absent)}", "test_families"),
    Mutant("rope_parameters over rope_scaling", "parts", 'blocks = [fields.inner("rope_scaling"), fields.inner("rope_parameters")]', 'blocks = [fields.inner("rope_parameters"), fields.inner("rope_scaling")]', "test_families"),
    Mutant("original context inside over outside", "parts", "original = outside or within or context", "original = within or outside or context", "test_families"),
    Mutant("fused query, key and value in another order", "families", 'QKV = ("blocks.N.attn.q_proj", "blocks.N.attn.k_proj"', 'QKV = ("blocks.N.attn.k_proj", "blocks.N.attn.q_proj"', "test_families test_fixtures"),
    Mutant("fused gate and up swapped", "families", '("blocks.N.ffn.gate_proj", "blocks.N.ffn.up_proj")', '("blocks.N.ffn.up_proj", "blocks.N.ffn.gate_proj")', "test_fixtures"),
    Mutant("square weights not transposed", "parts", "return tensor.T if tensor.dim() == 2 else tensor", "return tensor", "test_families test_fixtures"),
    Mutant("heads not interleaved", "parts", "BY_HEAD = Layout(_split_heads, _join_heads)", "BY_HEAD = STACKED", "test_families test_fixtures"),
    Mutant("every layer of Gemma 2 slides", "parts", "return i % 2 == 0", "return True", "test_families"),
    Mutant("one theta for both kinds of layer", "parts", "near if slides else far for slides", "far if slides else far for slides", "test_fixtures"),
    Mutant("silent defaults of another family", "families", '_eps("rms_norm_eps", 1e-6),\n            _tied(False),\n            SILU,\n            Rope(),\n            BIASES,\n            Key("ffn_bias", "mlp_bias", bool, default=False),\n            Only("rope_interleaved"', '_eps("rms_norm_eps", 1e-5),\n            _tied(False),\n            SILU,\n            Rope(),\n            BIASES,\n            Key("ffn_bias", "mlp_bias", bool, default=False),\n            Only("rope_interleaved"', "test_families"),
    Mutant("gemma's gelu taken at its word", "families", '"gelu": "gelu_tanh"})', '"gelu": "gelu"})', "test_families"),
    Mutant("unknown options ignored", "parts", "if asked:\n", "if False:\n", "test_families"),
    Mutant("theta inside rope_parameters ignored", "parts", '"theta": block.take("rope_theta", float, theta)', '"theta": (block.take("rope_theta", float, theta), theta)[1]', "test_families test_fixtures"),
    Mutant("unexpected tensors dropped", "checkpoint", "if missing or unexpected:", "if missing:", "test_checkpoint"),
    Mutant("shapes not checked", "checkpoint", "if found.shape != shape:", "if False:", "test_checkpoint"),
    Mutant("another head tied all the same", "checkpoint", "    if alike:\n        return config\n", "    return config\n", "test_checkpoint"),
    Mutant("code in a pickle is run", "storage", 'torch.load(path, map_location="cpu", weights_only=True, mmap=True)', 'torch.load(path, map_location="cpu", weights_only=False, mmap=True)', "test_checkpoint"),
    Mutant("a pickle may ask for any amount of memory", "storage", 'if content.find(b"bytearray") >= 0:', "if False:", "test_checkpoint"),
    Mutant("positions judged together", "against", "float(ratios.max())", "float((a - b).norm() / b.norm())", "test_against"),
    Mutant("a missing prefix is not seen", "checkpoint", "wanted = {name.removeprefix(family.prefix) if bare else name: held", "wanted = {name: held", "test_checkpoint"),
    Mutant("file size not checked", "storage", "if size != 8 + length + end:", "if False:", "test_checkpoint"),
    Mutant("index may leave its folder", "storage", 'Path(name).name != name', 'False', "test_checkpoint"),
    Mutant("generation_config replaces the tokenizer's end", "checkpoint", '*_ids(said, "eos_token_id"), *_tokenizer_ends(folder)]', '*_ids(said, "eos_token_id")]', "test_checkpoint"),
    Mutant("config.json's BOS over generation_config's", "checkpoint", 'bos = [*_ids(said, "bos_token_id"), *_ids(config, "bos_token_id")]', 'bos = [*_ids(config, "bos_token_id"), *_ids(said, "bos_token_id")]', "test_checkpoint"),
    Mutant("a header of any length believed", "storage", "if length > MAX_HEADER:", "if False:", "test_checkpoint"),
    Mutant("not flushed before the rename", "checkpoint", "os.fsync(file.fileno())", "pass", "test_checkpoint"),
    Mutant("written in place", "checkpoint", '(folder / name).with_name(f".{Path(name).name}.{os.getpid()}.part")', "folder / name", "test_checkpoint"),
    Mutant("memory shared with the file", "checkpoint", "torch.empty(part.shape, device=device, dtype=target).copy_(part)", "part.to(device=device, dtype=target)", "test_checkpoint"),
    # ---- tokenizer
    Mutant("BOS twice", "tokenizer", "if self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:", "if False:", "test_tokenizer"),
    Mutant("typed special tokens obeyed", "tokenizer", "self._core.encode_special_tokens = not special", "self._core.encode_special_tokens = False", "test_tokenizer"),
    Mutant("half characters shown", "tokenizer", 'codecs.getincrementaldecoder("utf-8")("replace")', 'type("Hasty", (), {"decode": lambda self, b, final=False: b.decode("utf-8", "replace")})()', "test_tokenizer"),
    Mutant("unfinished bytes swallowed", "tokenizer", 'self._show(self._characters.decode(b"", final=True)) + self._held', 'self._held', "test_tokenizer"),
    Mutant("truncation of training obeyed", "tokenizer", "core.no_truncation()", "pass", "test_tokenizer"),
    # ---- compiled
    Mutant("a compiled step does not write its values", "compiled", "self.keys[at], self.values[at] = k, v", "self.keys[at] = k", "test_compiled::test_its_logits_are_the_models_for_one_row_and_for_several"),
    Mutant("a compiled step sees one token too few", "compiled", "seen = torch.arange(at.extent, device=model.device)", "seen = torch.arange(at.extent, device=model.device) + 1", "test_compiled::test_its_logits_are_the_models_for_one_row_and_for_several"),
    Mutant("every layer looks through the first window", "compiled", "masks[kinds.index(config.windows[number])]", "masks[0]", "test_compiled::test_its_logits_are_the_models_for_one_row_and_for_several"),
    Mutant("a compiled step is not counted in the cache", "compiled", "        cache.advance(at)\n        return logits", "        return logits", "test_compiled::test_its_logits_are_the_models_for_one_row_and_for_several"),
    # ---- quantize
    Mutant("eight bits rounded down", "quantize", "(weight.float() / scale[:, None]).round()", "(weight.float() / scale[:, None]).floor()", "test_quantize"),
    Mutant("four bits without their zero", "quantize", "return ((q - 8) * scale + zero).flatten(1)", "return ((q - 8) * scale).flatten(1)", "test_quantize"),
    Mutant("halves of a byte swapped in the file", "quantize", "q[:, ::2] << 4 | q[:, 1::2])", "q[:, 1::2] << 4 | q[:, ::2])", "test_quantize"),
    Mutant("the bias forgotten with few bits", "quantize", "made: nn.Module = Int4Linear.of(plain.weight, bias)", "made: nn.Module = Int4Linear.of(plain.weight)", "test_quantize"),
    Mutant("the price the wrong way round", "quantize", "(known.exp() * (known - rounded)).sum()", "(rounded.exp() * (rounded - known)).sum()", "test_quantize"),
    Mutant("a chunk fed twice", "batch", "fed = [start + len(new) for start", "fed = [start + max(0, len(new) - 1) for start", "test_batch"),
    # ---- sampler
    Mutant("crossing token dropped", "sampler", "dropped[:, -1] = False", "dropped[:, 1:] = dropped[:, 1:] | dropped[:, :-1].clone()\n    dropped[:, -1] = False", "test_sampler"),
    Mutant("nothing left for a tiny p", "sampler", "dropped[:, -1] = False", "pass", "test_sampler"),
    Mutant("ids not mapped back after the sort", "sampler", "dropped.scatter(-1, ids, dropped)", "dropped", "test_sampler"),
    Mutant("temperature after truncation", "sampler", "logits - best) / temperature", "logits - best) / 1.0", "test_sampler"),
    Mutant("top-k drops ties", "sampler", "logits < kth", "logits <= kth", "test_sampler"),
    Mutant("penalty raises negative logits", "sampler", "torch.where(found > 0, found / penalty, found * penalty)", "found / penalty", "test_sampler"),
    Mutant("noise without the position", "sampler", "position * golden & wide", "0 & wide", "test_sampler"),
    Mutant("noise by row, not by seed", "sampler", "for seed, position in zip(seeds, positions, strict=True)]", "for seed, position in zip(range(len(seeds)), positions, strict=True)]", "test_sampler test_generate"),
    Mutant("noise in exponential scale", "sampler", "return -torch.log(-torch.log1p(-uniform))", "return -torch.log1p(-uniform)", "test_sampler"),
    Mutant("non-finite logits pass", "sampler", "if not best.isfinite().all():", "if False:", "test_sampler test_generate"),
    Mutant("noise infinite at the end of the hash", "sampler", ".clamp(max=1 - 2.0**-24)", "", "test_sampler"),
    # ---- generate
    Mutant("last column for every row", "batch", "torch.tensor(counts, device=x.device) - 1]", "torch.full((len(x),), x.shape[1] - 1)]", "test_batch"),
    Mutant("one token too few before the context's end", "generate", "room = config.max_seq_len - len(ids) + 1", "room = config.max_seq_len - len(ids)", "test_generate"),
    Mutant("end id kept in the text", "completion", "if step.marks[row]:", "if False:", "test_generate"),
    Mutant("ended rows stay", "generate", "if reason is None]\n        return Step", "if reason != 'length']\n        return Step", "test_generate"),
    Mutant("log-probabilities after temperature", "generate", "logits.float().log_softmax(-1)", "(logits.float() / 0.5).log_softmax(-1)", "test_generate"),
    Mutant("training mode stays", "generate", "model.eval()\n    try", "pass\n    try", "test_generate"),
    # ---- packed passes, batches and exact bits
    Mutant("padding computed and cached", "cache", "out.index_put((row, column), x[0])", "out.index_put((row, column.flip(0)), x[0])", "test_model"),
    Mutant("a part begins one row too early", "cache", "token += columns * (1 + len(others))", "token += columns * len(others)", "test_model"),
    Mutant("a moved row keeps its predecessor's slots", "cache", "left[:, row, :, held : self._lengths[row]] = 0", "pass", "test_cache"),
    Mutant("the gap is filled by the wrong row", "batch", "[movers.pop() if row is None else row for row in placed]", "[old[0] if row is None else row for row in placed]", "test_batch"),
    Mutant("logits in the cache's order", "batch", "order = [place[follows.get(row, row)] for row in rows]", "order = [place[follows.get(row, row)] for row in self.rows]", "test_batch"),
    Mutant("held tokens counted one too far", "batch", "if a != b), min(len(ids), len(others)))", "if a != b), min(len(ids), len(others))) + 1", "test_batch"),
    Mutant("a prompt wholly held is fed nothing", "batch", "n = min(n, len(row.ids) - 1)", "n = min(n, len(row.ids))", "test_batch"),
    Mutant("a prefix turned for another length is taken", "batch", "if n == 0 or self.model.must_begin_anew(n, self.cache.longest[place], len(row.ids)):", "if n == 0:", "test_batch"),
    Mutant("exact attention over the batch's longest row", "cache", "extent = min(self.extent, round_up(extent, EXACT_SLOTS))", "extent = self.extent", "test_batch"),
    Mutant("exact passes of as many columns as there are", "batch", "tokens = torch.tensor([[*chunk, *[0] * (columns - len(chunk))]]", "tokens = torch.tensor([chunk]", "test_batch"),
    Mutant("exact passes of as many rows as there are", "batch", "ROWS, COLUMNS = 8, 64", "ROWS, COLUMNS = 3, 64", "test_batch"),
    # ---- sampling
    Mutant("penalties count the prompt", "sampler", "Counter(ids[len(ids) - step + 1 :])", "Counter(ids)", "test_sampler"),
    Mutant("frequency counted once", "sampler", "own.frequency_penalty * n for n", "own.frequency_penalty * 1 for n", "test_sampler"),
    Mutant("a banned id only made less likely", "sampler", "dict.fromkeys(own.banned_ids, -math.inf)", "dict.fromkeys(own.banned_ids, -1.0)", "test_sampler"),
    Mutant("bias after temperature", "sampler", "logits = _adjust(logits.float(), rows, settings)\n\n", "logits = _adjust(logits.float(), rows, [Sampler()] * len(settings))\n\n", "test_sampler"),
    # ---- texts
    Mutant("a stop text leaks its beginning", "tokenizer", "starts = range(max(0, len(text) - longest + 1), len(text))", "starts = range(0)", "test_tokenizer test_completion"),
    Mutant("the later of two stops cuts", "tokenizer", "return text[: min(found)]", "return text[: max(found)]", "test_tokenizer test_completion"),
    Mutant("the left cut loses BOS", "completion", "kept, lost = marks + ids[-room:]", "kept, lost = ids[-room - len(marks) :]", "test_completion"),
    Mutant("BOS does not count", "completion", "room = limit - len(marks)", "room = limit", "test_completion"),
    Mutant("windows of a score overlap", "score", "done = len(found) - start", "done = 0", "test_score"),
    Mutant("a score of the wrong token", "score", "wanted = piece[1 + first", "wanted = piece[first", "test_score"),
    Mutant("a turn that was left early is forgotten", "conversation", 'self.messages = [*asked, {"role": "assistant", "content": said}]', "self.messages = self.messages if self.reason is None else [*asked, {'role': 'assistant', 'content': said}]", "test_conversation"),
    Mutant("an answer begun by the caller is answered", "pipeline", "continue_final_message=prefilled", "continue_final_message=False", "test_pipeline"),
    Mutant("a change is called a tie", "verify", "if best - second < TIE:", "if best - second < 1e9:", "test_verify"),
    # ---- training
    Mutant("padding is learned", "training/data", "targets = np.full_like(tokens, IGNORED)", "targets = np.zeros_like(tokens)", "test_data"),
    Mutant("targets are what went in", "training/data", "row[1:]\n        if self.bos is not None", "row[:-1]\n        if self.bos is not None", "test_data"),
    Mutant("windows always cut at the same places", "training/data", "        if shift:\n", "        if False:\n", "test_data"),
    Mutant("the last tokens are never a target", "training/data", "return -(-(len(self.ids) - 1) // self.block_size)", "return (len(self.ids) - 1) // self.block_size", "test_data"),
    Mutant("validation overlaps training", "training/data", "yield text[cut:], last, True", "yield text, last, True", "test_data"),
    Mutant("an order that ignores the epoch", "training/data", "np.random.default_rng([seed, epoch]).permutation", "np.random.default_rng([seed]).permutation", "test_data::test_every_epoch_has_its_own_order"),
    Mutant("text left decomposed", "training/data", 'unicodedata.normalize("NFC", text)', "text", "test_data"),
    Mutant("a character torn between pieces", "training/data", "decoder.decode(piece, final=start + PIECE >= len(view))", "decoder.decode(piece, final=True)", "test_data"),
    Mutant("a document begins with EOS", "training/data", "inputs[inputs == self.mark] = self.bos", "pass", "test_data"),
    Mutant("broken weights are saved", "training/loop", "            self._finite(torch.tensor(math.nan))", "            pass", "test_loop::test_broken_weights_are_never_saved"),
    Mutant("norms decay", "training/optim", '{"params": by_kind["plain"], "weight_decay": 0.0}', '{"params": by_kind["plain"], "weight_decay": weight_decay}', "test_optim"),
    Mutant("the embedding goes to Muon", "training/optim", "in_block = ", "in_block = True or ", "test_optim"),
    Mutant("a rate of the last rate", "training/optim", 'group["lr"] = group["peak"] * share', 'group["lr"] = group["lr"] * share', "test_optim"),
    Mutant("Muon without Nesterov", "training/optim", "parameter.grad.lerp(state[\"momentum_buffer\"], momentum)", "state[\"momentum_buffer\"].clone()", "test_optim"),
    Mutant("a mean of means", "training/loop", "(loss * (world.size / total)).backward()", "(loss / batch.n_targets / micro).backward()", "test_loop::test_a_large_batch_and_its_parts_have_one_gradient"),
    Mutant("dropout drawn from where the last run left off", "training/loop", "torch.manual_seed(_mix(config.seed, at, turn, world.rank))", "pass", "test_loop::test_a_run_that_goes_on_is_the_same_run"),
    Mutant("the order starts anew on resuming", "training/loop", "        self.progress = progress\n", "        self.progress = progress | {\"item\": 0}\n", "test_loop::test_a_run_that_goes_on_is_the_same_run"),
    Mutant("optimizers forgotten", "training/state", "for one, saved in zip(optimizers, held[\"optimizers\"], strict=True):", "for one, saved in []:", "test_loop::test_a_run_that_goes_on_is_the_same_run"),
    Mutant("dropout while validating", "training/loop", "        self.wrapped.eval()\n", "", "test_loop::test_dropout_is_off_where_nobody_trains"),
    Mutant("the last is called the best", "training/loop", "(best is None or val_loss < best)", "True", "test_loop::test_the_best_checkpoint_is_kept_beside_the_last"),
    Mutant("a state written in place", "training/state", 'part = path.with_suffix(f".{os.getpid()}.part")', "part = path", "test_loop::test_a_full_disk_keeps_what_was_saved"),
    Mutant("a checkpoint trained by nobody's tokenizer", "training/loop", "save_model(self.folder / LAST, plain, self.data.tokenizer)", "save_model(self.folder / LAST, plain)", "test_loop::test_fine_tuning_starts_from_the_checkpoint_and_its_tokenizer"),
    Mutant("a late signal is lost", "training/loop", "return dataclasses.replace(result, signal=signals[0]) if signals else result", "return result", "test_loop::test_a_signal_after_the_last_step_is_not_lost"),
    Mutant("one optimizer's overflow is not the other's", "training/loop", "overflow = self.scaler.is_enabled() and not norm.isfinite()", "overflow = False", "test_loop::test_one_overflow_skips_the_step_of_every_optimizer"),
    Mutant("a stride counted from the first token", "attention", "((queries - key_positions) % stride == 0)", "(key_positions % stride == 0)", "test_attention"),
    Mutant("documents see each other", "cache", "for _, run in groupby(row)]", "for _, run in groupby(row, lambda n: 0)]", "test_model"),
    Mutant("seeds shared by all rows", "generate", "seeds=[row.seed for row in rows]", "seeds=[rows[0].seed for row in rows]", "test_generate"),
    # ---- looking inside
    Mutant("what attention gave is called what it added", "inside/trace", 'here("attn", block.attn_post_norm(block.attn(block.attn_norm(x), *how, **more)))', 'block.attn_post_norm(here("attn", block.attn(block.attn_norm(x), *how, **more)))', "test_trace"),
    Mutant("a traced window is no window", "inside/trace", 'sight(see.at, window, "explicit", stride)', 'sight(see.at, None, "explicit", stride)', "test_trace"),
    Mutant("a trace goes its own explicit way", "inside/trace", "_mix(given, v) if changed else plain(q, k, v, see, path)", "_mix(given, v)", "test_trace"),
    Mutant("a trace stays on the model", "inside/trace", "            delattr(module, name)", "            pass", "test_trace"),
    Mutant("a hook stays on the model", "inside/trace", "stack.callback(hook.remove)", "pass", "test_trace"),
    Mutant("the caller's function writes into the pass", "inside/trace", "change(value.clone())", "change(value)", "test_trace"),
    Mutant("attention's products of one head", "inside/shapes", 'flops = [2 * model.config.head_dim * found["scores"].numel()', 'flops = [2 * model.config.head_dim * found["scores"][:, :1].numel()', "test_shapes"),
    Mutant("a cache of all query heads", "inside/memory", "return 2 * config.n_layers * config.n_kv_heads", "return 2 * config.n_layers * config.n_heads", "test_memory"),
    Mutant("a word's queries added", "inside/looks", "(first.T @ weights @ first) / sizes[:, None]", "first.T @ weights @ first", "test_looks"),
    Mutant("a window drawn as zero", "inside/looks", "config.windows[layer], config.sparse_stride)[0]", "None, None)[0]", "test_looks"),
    Mutant("the row without the first token does not sum to one", "inside/looks", "looks.mean[1:].sum())", "looks.mean.sum())", "test_looks"),
    Mutant("the lens without the final norm", "inside/lens", "model.head(model.norm(stream[at]))", "model.head(stream[at])", "test_lens"),
    Mutant("the halves in each other's place", "inside/views", 'streams = [values["mid"][0], values["out"][0]]', 'streams = [values["out"][0], values["mid"][0]]', "test_views"),
    Mutant("a token expected by its own logits", "inside/odds", "index = ids[position + 1]", "index = ids[position]", "test_odds"),
    Mutant("top-p counted before top-k", "inside/odds", "open_ = replace(open_, **{name: value})", "open_ = replace(replace(sampler, top_k=0, top_p=1.0, min_p=0.0), **{name: value})", "test_odds"),
    Mutant("characters torn into �", "inside/pieces", "        if not characters.getstate()[0]:\n            spell()", "        spell()", "test_pieces"),
    Mutant("the first place of a word, not the last", "inside/pieces", "whole_words[-1][1:]", "whole_words[0][1:]", "test_pieces"),
    Mutant("a prompt is markup", "inside/report", "autoescape=True", "autoescape=False", "test_report"),
    Mutant("Muon keeps two numbers", "inside/memory", "(1 if by_muon else 2)", "2", "test_memory"),
    # ---- comparing variants
    Mutant("a variant as large as it comes", "training/variants", "return dataclasses.replace(made, ffn_dim=ffn_dim)", "return made", "test_variants"),
    Mutant("a window that carries its whole width", "training/variants", "sum(window - 1 for window in config.windows)", "sum(config.windows)", "test_variants"),
    Mutant("two choices of one part", "training/variants", "if len(set(axes)) < len(axes):", "if False:", "test_variants"),
    Mutant("asked beside the question", "training/recall", "model(ids[:, :-1])[:, -1]", "model(ids[:, :-2])[:, -1]", "test_recall::test_full_attention_learns_it_and_a_window_only_within_its_reach"),
    Mutant("the letter stands nearer than it says", "training/recall", "k=distance - 1", "k=distance - 2", "test_recall::test_a_line_asks_for_its_first_letter_from_so_far"),
    Mutant("the difference of any two seeds", "training/findings", "f.loss - base[f.seed] for f", "f.loss - min(base.values()) for f", "test_findings"),
    Mutant("a position that is not there loses nothing", "training/study", "*[None] * (rows.block_size - length)", "*[0.0] * (rows.block_size - length)", "test_study::test_the_loss_at_a_position_is_the_mean_over_rows_there"),
    Mutant("finished runs made again", "training/study", "if (name, seed) not in there]", "]", "test_study::test_a_comparison_from_the_command_to_its_table_and_on"),
]  # fmt: skip


def notices(mutant: Mutant, project: Path) -> tuple[bool, str]:
    """Whether the tests of a copy of the project fail with the mistake in it, and which failed first."""
    path = project / "nanodecoder" / f"{mutant.file}.py"
    source = path.read_text()
    path.write_text(source.replace(mutant.old, mutant.new))
    # "test_loop::test_that" is one test of a file that takes long
    files = [
        "tests/" + name.replace("::", ".py::") if "::" in name else f"tests/{name}.py" for name in mutant.noticed_by.split()
    ]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *files]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, env=os.environ | ALONE)
    path.write_text(source)
    first = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), done.stdout[-100:])
    # 1 is pytest's word for failed tests; an error means that the mutant did not even import
    return done.returncode == 1 and first.startswith("FAILED"), first


def main(words: list[str], passed: bool = False) -> int:
    """Run the chosen mutants, as many at a time as there are processors; -> how many went unnoticed."""
    chosen = [mutant for mutant in MUTANTS if not words or any(word in f"{mutant.file} {mutant.name}" for word in words)]
    for mutant in chosen:
        found = (ROOT / "nanodecoder" / f"{mutant.file}.py").read_text().count(mutant.old)
        if found != 1:
            sys.exit(f"{mutant.name}: {mutant.old!r} stands {found} times in {mutant.file}.py, not once")
    names = sorted({name.split("::")[0] for mutant in chosen for name in mutant.noticed_by.split()})
    clean = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(f"tests/{name}.py" for name in names)]
    if not passed and subprocess.run(clean, cwd=ROOT, capture_output=True).returncode != 0:
        sys.exit(f"{', '.join(names)} fail without any mistake planted: mend that first")
    unnoticed = []
    workers = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(workers) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for worker in range(workers):
            copies.put(Path(scratch) / f"{worker}")
            ignored = shutil.ignore_patterns(".git", "__pycache__", ".ci", ".hypothesis", "*_cache")
            shutil.copytree(ROOT, Path(scratch) / f"{worker}", ignore=ignored)

        def run(mutant: Mutant) -> tuple[Mutant, bool, str]:
            copy = copies.get()
            try:
                return mutant, *notices(mutant, copy)
            finally:
                copies.put(copy)

        for number, (mutant, noticed, first) in enumerate(pool.map(run, chosen), 1):
            if not noticed:
                unnoticed.append(mutant.name)
            print(
                f"{number:3}/{len(chosen)} {'noticed  ' if noticed else 'UNNOTICED'} {mutant.name}: {first[:100]}", flush=True
            )
    print(
        f"{len(chosen) - len(unnoticed)} of {len(chosen)} mistakes noticed" + "".join(f"\n  not: {name}" for name in unnoticed)
    )
    return len(unnoticed)


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        print("\n".join(f"{mutant.file}: {mutant.name}" for mutant in MUTANTS))
    else:
        words = [word for word in sys.argv[1:] if word != "--passed"]
        sys.exit(min(1, main(words, passed="--passed" in sys.argv)))
