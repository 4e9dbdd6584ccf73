"""Logits to ids: filters that leave some ids possible, then one id by chance that belongs to the request.

The chosen id is argmax(filtered logits + Gumbel noise), which draws from softmax(filtered logits) exactly (Gumbel-max). The
noise is a hash of (seed, position, token id): there is no generator and no state, so a row's text depends on its own seed
and positions, never on its neighbours, the batch, or how often anyone drew before.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import Sampling

Filter = Callable[[Tensor], Tensor]  # logits (B, V) -> logits (B, V)


@dataclass(frozen=True)
class Rows:
    """What a sampler may know of each row. All lists have one entry per row.

    seeds: the request's own; positions: of the token to be chosen; ids: all before it, prompt included; steps: how many tokens
    were chosen for the row, this one included; settings: one Sampler per row, or None where the sampler's own serve all.
    """

    seeds: Sequence[int]
    positions: Sequence[int]
    ids: Sequence[Sequence[int]] | None = None
    steps: Sequence[int] | None = None
    settings: Sequence[Sampler] | None = None


class Sampler(Sampling):
    """A callable (logits, rows) -> ids, with `Sampling`'s settings.

    They apply in transformers' order: logit bias, penalties, temperature, top-k, top-p, min-p.
    """

    def __call__(self, logits: Tensor, rows: Rows | None = None) -> Tensor:
        """logits (B, V) of any float dtype -> ids (B,) int64.

        Without `rows`, seeds are drawn from torch's default generator, as torch.multinomial would.
        Raises ValueError for logits from which nothing can be chosen: NaN, +inf, or all -inf.
        """
        require_finite(logits, rows)
        settings = self._settings(logits, rows)
        if all(row.temperature == 0 for row in settings):
            return _adjust(logits.float(), rows, settings).argmax(dim=-1)  # the first of equals
        if rows is None:
            seeds = torch.randint(2**62, (len(logits),)).tolist()
            rows = Rows(seeds, [0] * len(logits))
        return self.perturb(logits, rows).argmax(dim=-1)

    def perturb(self, logits: Tensor, rows: Rows) -> Tensor:
        """What is drawn from: filtered logits and each row's own noise. logits (B, V) -> (B, V), whose argmax is the id"""
        noise = gumbel(rows.seeds, rows.positions, torch.arange(logits.shape[-1], device=logits.device))
        return self.filter(logits, rows) + noise

    def filter(self, logits: Tensor, rows: Rows | None = None, *extra: Filter) -> Tensor:
        """The pure part: logits (B, V) -> float32 logits (B, V) after penalties, temperature and filters; -inf is impossible.

        `extra` are logits -> logits functions, applied first. A greedy row keeps its likeliest id alone.
        """
        for function in extra:
            logits = function(logits)
        settings = self._settings(logits, rows)
        logits = _adjust(logits.float(), rows, settings)

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=logits.device)[:, None]  # (B, 1)

        greedy = [row.temperature == 0 for row in settings]
        if all(greedy):
            return _keep_first_best(logits)
        temperature = column([row.temperature or 1.0 for row in settings])
        # A tiny temperature would overflow: then count from the row's best down, which changes no probability.
        best = logits.amax(-1, keepdim=True)
        scaled = torch.where((best / temperature).isfinite(), logits, logits - best) / temperature
        if any(row.top_k for row in settings):
            scaled = _top_k(scaled, [row.top_k for row in settings])
        if any(row.top_p < 1 for row in settings):
            scaled = _top_p(scaled, column([1 - row.top_p for row in settings]))
        if any(row.min_p > 0 for row in settings):
            scaled = _min_p(scaled, column([row.min_p for row in settings]))
        return torch.where(column(greedy), _keep_first_best(logits), scaled) if any(greedy) else scaled

    def probabilities(self, logits: Tensor, rows: Rows | None = None) -> Tensor:
        """The distribution that ids are drawn from: logits (B, V) -> (B, V) float32, each row summing to 1."""
        return self.filter(logits, rows).softmax(dim=-1)

    def _settings(self, logits: Tensor, rows: Rows | None) -> Sequence[Sampler]:
        if logits.dim() != 2:
            raise ValueError(f"logits must be of shape (B, V), not {tuple(logits.shape)}")
        return rows.settings if rows is not None and rows.settings is not None else [self] * len(logits)


def require_finite(logits: Tensor, rows: Rows | None = None) -> None:
    """Raise ValueError, naming row and step, unless the largest logit of every row is a number. logits (B, V)"""
    best = logits.amax(dim=-1)
    if not best.isfinite().all():
        row = int((~best.isfinite()).nonzero()[0])
        step = f" at step {rows.steps[row]}" if rows is not None and rows.steps is not None else ""
        raise ValueError(
            f"non-finite logits{step} in row {row} (the largest is {best[row].item()}): the weights are damaged or the dtype "
            "overflows; try float32, or check the checkpoint"
        )


def _keep_first_best(logits: Tensor) -> Tensor:
    best = logits.argmax(-1, keepdim=True)
    return torch.full_like(logits, -math.inf).scatter(-1, best, logits.gather(-1, best))


def _adjust(logits: Tensor, rows: Rows | None, settings: Sequence[Sampling]) -> Tensor:
    """What applies to greedy rows too: bias and penalties. (B, V) float32 -> (B, V)"""
    if any(row.logit_bias or row.banned_ids for row in settings):
        logits = _bias(logits, settings)
    if any(row.repetition_penalty != 1 for row in settings):
        logits = _penalize_repetition(logits, rows, [row.repetition_penalty for row in settings])
    if any(row.presence_penalty or row.frequency_penalty for row in settings):
        logits = _penalize_generated(logits, rows, settings)
    return logits


def _bias(logits: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Add each row's bias, -inf for what is banned."""
    logits = logits.clone()
    for row, own in enumerate(settings):
        bias = dict(own.logit_bias) | dict.fromkeys(own.banned_ids, -math.inf)
        if bias and max(bias) >= logits.shape[-1]:
            raise ValueError(f"the logit bias names id {max(bias)}, and there are {logits.shape[-1]} ids")
        ids = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
        logits[row, ids] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
        if bias and logits[row].max() == -math.inf:
            raise ValueError(f"the logit bias of row {row} bans every id that was possible: nothing is left to choose")
    return logits


def _penalize_generated(logits: Tensor, rows: Rows | None, settings: Sequence[Sampling]) -> Tensor:
    """Less for ids that were generated before: once for being there, and once for each time."""
    if rows is None or rows.ids is None or rows.steps is None:
        raise ValueError("presence_penalty and frequency_penalty need rows.ids and rows.steps, which tell what was generated")
    logits = logits.clone()
    for row, (ids, step, own) in enumerate(zip(rows.ids, rows.steps, settings, strict=True)):
        times = Counter(ids[len(ids) - step + 1 :])
        less = [own.presence_penalty + own.frequency_penalty * n for n in times.values()]
        seen = torch.tensor(list(times), dtype=torch.int64, device=logits.device)
        logits[row, seen] -= torch.tensor(less, dtype=logits.dtype, device=logits.device)
    return logits


def _penalize_repetition(logits: Tensor, rows: Rows | None, penalties: Sequence[float]) -> Tensor:
    """Once per id that the row has already."""
    if rows is None or rows.ids is None:
        raise ValueError("repetition_penalty needs rows.ids, the ids that each row has already")
    logits = logits.clone()
    for row, (ids, penalty) in enumerate(zip(rows.ids, penalties, strict=True)):
        seen = torch.tensor(sorted(set(ids)), dtype=torch.int64, device=logits.device)
        found = logits[row, seen]
        logits[row, seen] = torch.where(found > 0, found / penalty, found * penalty)
    return logits


def _top_k(logits: Tensor, ks: Sequence[int]) -> Tensor:
    """Drop what is below the k-th largest."""
    vocab_size = logits.shape[-1]
    ks = [min(k, vocab_size) or vocab_size for k in ks]  # 0 is off
    ordered = logits.topk(max(ks)).values  # (B, max k), descending
    kth = ordered.gather(-1, torch.tensor(ks, device=logits.device)[:, None] - 1)
    return logits.masked_fill(logits < kth, -math.inf)


def _top_p(logits: Tensor, rest: Tensor) -> Tensor:
    """Drop the least likely ids as long as those dropped sum to at most `rest` = 1 - p, (B, 1); the likeliest always stays.

    Summed from the small end, as transformers does, since the sums decide at the border.
    """
    ordered, ids = logits.sort(dim=-1)
    dropped = (ordered.softmax(-1).cumsum(-1) <= rest) & (rest > 0)  # p = 1 is off
    dropped[:, -1] = False
    return logits.masked_fill(dropped.scatter(-1, ids, dropped), -math.inf)


def _min_p(logits: Tensor, p: Tensor) -> Tensor:
    """Drop ids less than p times as likely as the likeliest."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), -math.inf)


# ------------------------------------------------------------------------------------------------------------------ chance

_WORD = 0xFFFF_FFFF


def gumbel(seeds: Sequence[int], positions: Sequence[int], ids: Tensor) -> Tensor:
    """Standard Gumbel noise, (B, N) float32 for N token ids, a pure function of each row's seed and position and of the id."""
    keys = [_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    low = torch.tensor([[key & _WORD] for key in keys], device=ids.device)
    high = torch.tensor([[key >> 32] for key in keys], device=ids.device)
    bits = _mix(_mix(ids ^ low) ^ high)  # (B, V), 0 … 2³² - 1
    # -log(1 - u) keeps full precision for small u, where the winners are; u itself stays below 1.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words that flips about half of the output's bits for any flipped input bit.

    Multiply and xor-shift, constants from the public search for low-bias 32-bit mixers (hash-prospector). The words lie in
    int64, and both constants are below 2³¹, so no product overflows on any device.
    """
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _WORD
    return x ^ (x >> 15)


def _key(seed: int, position: int) -> int:
    """64 well-mixed bits of (seed, position), by two rounds of SplitMix64's finalizer (Steele, Lea and Flood 2014)."""
    wide = (1 << 64) - 1

    def finalize(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & wide
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & wide
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    return finalize(finalize((seed * golden + golden) & wide) + position * golden & wide)
