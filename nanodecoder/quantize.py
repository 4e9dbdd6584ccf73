"""Weights in eight or four bits, made at load: fewer bytes to read for each token, which is what decoding waits for.

    int8   one scale for each output:             w ≈ scale · q,            q in -127 … 127
    int4   a scale and a zero for 32 inputs each:  w ≈ scale · (q - 8) + zero,  q in 0 … 15

Only weights are rounded; the products are torch's, with activations in bfloat16 and sums in float32. `quantize` puts these
linears in the place of a plain model's; norms and biases stay as they are. With a tied head the embedding becomes an int8
table, so that no full-size copy stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Linear
from .model import Decoder

KINDS = ("int8", "int4")
GROUP = 32  # inputs that share a scale and a zero in int4
ALIGNED = 32  # inputs that torch 2.13's int8 kernel takes at a time: of other numbers it reads beyond the end
OUTPUTS = 16  # torch's int4 kernels take outputs in multiples of this


@torch.library.custom_op("nanodecoder::int8_product", mutates_args=())
def int8_product(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """torch's own product, under a name that torch 2.13's compiler leaves alone: its rewriting of that one fails on inputs
    that it would compute on the way. x (N, in), values (out, in) int8, scale (out,) -> (N, out)"""
    return torch._weight_int8pack_mm(x, values, scale)


@int8_product.register_fake
def _(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], values.shape[0])


class Int8Linear(nn.Module):
    """x Wᵀ + b with W in eight bits. (…, in) -> (…, out)"""

    kind = "int8"

    def __init__(self, values: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        """values (out, in) int8, scale (out,) float32"""
        super().__init__()
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.out_features, self.in_features = values.shape

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
        """Round a weight (out, in)."""
        scale = weight.float().abs().amax(1).clamp(min=1e-12) / 127
        return cls((weight.float() / scale[:, None]).round().to(torch.int8), scale, bias)

    @property
    def weight(self) -> Tensor:
        """What it computes with, (out, in) float32."""
        return self.values.float() * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        if x.device.type == "cpu" and self.in_features % ALIGNED == 0:
            out = int8_product(flat.bfloat16(), self.values, self.scale.bfloat16()).to(x.dtype)
        else:  # a compiler reads the eight bits and turns them on the way
            out = F.linear(flat, self.values.to(x.dtype)) * self.scale.to(x.dtype)
        return (out if self.bias is None else out + self.bias).view(*x.shape[:-1], -1)


class Int4Linear(nn.Module):
    """x Wᵀ + b with W in four bits. (…, in) -> (…, out)

    Two values share a byte of `values`, as files have it: the even inputs the upper half. torch's kernels want them in an
    order of their own that depends on the machine: `packed`, which takes their place at the first pass.
    """

    kind = "int4"

    def __init__(self, values: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        """values (out, in / 2) uint8; scale (in / 32, out, 2) bfloat16: scale and zero"""
        super().__init__()
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)
        self.register_buffer("packed", None)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.out_features, self.in_features = values.shape[0], 2 * values.shape[1]

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether a weight's sizes are such that four bits can have it."""
        return weight.shape[1] % GROUP == 0 and weight.shape[0] % OUTPUTS == 0

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Int4Linear:
        """Round a weight (out, in)."""
        groups = weight.float().unflatten(1, (-1, GROUP))  # (out, in / 32, 32)
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / 15).clamp(min=1e-12).bfloat16()
        zero = (low + 8 * scale.float()).bfloat16()
        q = ((groups - zero.float()[..., None]) / scale.float()[..., None] + 8).round().clamp(0, 15)
        q = q.flatten(1).to(torch.uint8)
        return cls(q[:, ::2] << 4 | q[:, 1::2], torch.stack([scale, zero], -1).transpose(0, 1).contiguous(), bias)

    @property
    def weight(self) -> Tensor:
        """What it computes with, (out, in) float32."""
        q = self._numbers().float().unflatten(1, (-1, GROUP))
        scale, zero = self.scale.float().transpose(0, 1).unsqueeze(-2).unbind(-1)  # (out, in / 32, 1) both
        return ((q - 8) * scale + zero).flatten(1)

    def _numbers(self) -> Tensor:
        """(out, in) int32, 0 to 15"""
        if self.packed is None:
            return torch.stack([self.values >> 4, self.values & 15], -1).flatten(1).to(torch.int32)
        one = torch.stack([torch.ones_like(self.scale[..., 0]), torch.zeros_like(self.scale[..., 0])], -1)
        eye = torch.eye(self.in_features, dtype=torch.bfloat16, device=self.scale.device)
        return (self._multiply(eye, one).T.round() + 8).to(torch.int32)  # only the kernel knows its order

    def pack(self) -> None:
        """Lay the values out for this machine's kernel."""
        if self.packed is None:
            on_cpu = self.values.device.type == "cpu"
            self.packed = (
                torch._convert_weight_to_int4pack_for_cpu(self._numbers(), 1)
                if on_cpu
                else torch._convert_weight_to_int4pack(self.values, tiles_of(self.in_features))
            )
            self.values = None

    def unpack(self) -> None:
        """Lay the values out as files have them."""
        if self.packed is not None:
            q = self._numbers().to(torch.uint8)
            self.values, self.packed = (q[:, ::2] << 4 | q[:, 1::2]).contiguous(), None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int4Linear:
        self.unpack()  # on another device the order is another
        return super()._apply(fn, recurse)

    def _multiply(self, x: Tensor, scale: Tensor) -> Tensor:
        multiply = torch._weight_int4pack_mm_for_cpu if x.device.type == "cpu" else torch._weight_int4pack_mm
        return multiply(x, self.packed, GROUP, scale)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():  # a step is compiled after a prompt went through
            self.pack()
        out = self._multiply(x.reshape(-1, self.in_features).bfloat16(), self.scale).to(x.dtype)
        return (out if self.bias is None else out + self.bias).view(*x.shape[:-1], -1)


def tiles_of(inputs: int) -> int:
    """How many tiles of 16 inputs CUDA's kernel loads at once: 8, 4 or 2, the most that the inputs are a multiple of."""
    return next(tiles for tiles in (8, 4, 2) if inputs % (16 * tiles) == 0)


class Int8Embedding(nn.Module):
    """A look-up table in eight bits. (…) int64 -> (…, dim)"""

    def __init__(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)
        self.dtype = dtype

    @property
    def weight(self) -> Tensor:
        """What it looks up in, (V, dim) float32."""
        return self.values.float() * self.scale[:, None]

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.values[tokens] * self.scale[tokens][..., None]).to(self.dtype)


def linears(model: Decoder) -> Iterator[tuple[str, nn.Module, str]]:
    """Every linear of a model, the head last: its name, the module that holds it, and its name there."""
    for name, module in model.named_modules():
        for own, child in module.named_children():
            if isinstance(child, (Linear, Int8Linear, Int4Linear)):
                yield f"{name}.{own}".lstrip("."), module, own


@torch.no_grad()
def quantize(model: Decoder, kind: str) -> Decoder:
    """Round every linear's weight of a plain model, in place; -> the model.

    In int4, a weight whose inputs are no multiple of 32 or whose outputs are none of 16 is kept in int8.
    Raises ValueError for a kind that there is not, or a model that is quantized already.
    """
    if kind not in KINDS:
        raise ValueError(f"quantize must be one of {', '.join(KINDS)}, not {kind!r}")
    if kind_of(model) is not None:
        raise ValueError(f"the model is in {kind_of(model)} already: load it anew to have it in {kind}")
    table = None
    if model.config.tied_head:
        table = Int8Linear.of(model.embed.weight)
        dtype = model.dtype
    for _, holder, own in list(linears(model)):
        plain = getattr(holder, own)
        bias = None if plain.bias is None else plain.bias.detach()
        if kind == "int4" and Int4Linear.takes(plain.weight):
            made: nn.Module = Int4Linear.of(plain.weight, bias)
        else:
            made = table if plain is model.lm_head and table is not None else Int8Linear.of(plain.weight, bias)
        setattr(holder, own, made)
    if table is not None:
        model.embed = Int8Embedding(table.values, table.scale, dtype)
    return model.eval()


def kind_of(model: Decoder) -> str | None:
    """ "int8" or "int4" for a quantized model, None for a plain one."""
    kinds = {child.kind for _, holder, own in linears(model) if (child := getattr(holder, own)) and hasattr(child, "kind")}
    return "int4" if "int4" in kinds else "int8" if kinds else None


def tensors(model: Decoder) -> dict[str, Tensor]:
    """What a file of a quantized model holds, by name: each storage once."""
    for module in model.modules():
        if isinstance(module, Int4Linear):
            module.unpack()
    seen: set[int] = set()
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.data_ptr() not in seen:
            found[name] = tensor.detach().cpu().contiguous()
            seen.add(tensor.data_ptr())
    return found


def restore(model: Decoder, held: dict[str, Tensor], dtype: torch.dtype) -> Decoder:
    """Put the tensors of such a file into a model without weights; -> the model.

    Raises ValueError that names what is missing or unexpected.
    """
    left = dict(held)

    def take(name: str) -> Tensor:
        if name not in left:
            raise ValueError(f"{name} is missing")
        return left.pop(name)

    tied = model.config.tied_head
    for name, holder, own in list(linears(model)):
        if tied and holder is model and f"{name}.values" not in left:
            continue  # the table of the embedding, below
        made = Int8Linear if left.get(f"{name}.values", torch.empty(0)).dtype == torch.int8 else Int4Linear
        bias = getattr(holder, own).bias
        values, scale = take(f"{name}.values"), take(f"{name}.scale")
        setattr(holder, own, made(values, scale, None if bias is None else take(f"{name}.bias").to(dtype)))
    if tied:
        table = Int8Linear(take("embed.values"), take("embed.scale"))
        model.embed = Int8Embedding(table.values, table.scale, dtype)
        if not hasattr(model.lm_head, "kind"):
            model.lm_head = table
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            holder = model.get_submodule(name.rpartition(".")[0])
            setattr(holder, name.rpartition(".")[2], nn.Parameter(take(name).to(dtype), requires_grad=False))
    if left:
        raise ValueError(f"{', '.join(sorted(left)[:6])} unexpected")
    return model.eval()


def size(model: Decoder) -> int:
    """Bytes of all weights, each storage once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({tensor.untyped_storage()._cdata: tensor.nbytes for tensor in tensors}.values())  # meta tensors have no address


@dataclass(frozen=True)
class Price:
    """What rounding costs, on one text. divergence: the mean over its tokens of KL(before ‖ after), in nats; worst: the linears
    whose weights moved most, ‖before − after‖ / ‖before‖, the worst first.
    """

    bytes_before: int
    bytes_after: int
    perplexity_before: float
    perplexity_after: float
    divergence: float
    worst: list[tuple[str, float]]

    def __str__(self) -> str:
        worst = ", ".join(f"{name} {error:.1%}" for name, error in self.worst[:5])
        return (
            f"weights {self.bytes_before / 2**20:,.1f} -> {self.bytes_after / 2**20:,.1f} MiB; perplexity "
            f"{self.perplexity_before:.3f} -> {self.perplexity_after:.3f}; KL {self.divergence:.4f} nats a token\n"
            f"moved most, by the norm of the difference: {worst}"
        )


@torch.no_grad()
def price(before: Decoder, after: Decoder, ids: Sequence[int]) -> Price:
    """Compare a plain model with its quantized twin along a text's ids, in windows of at most 512 (or the context).

    Raises ValueError for a text of fewer than two tokens.
    """
    if len(ids) < 2:
        raise ValueError(f"the price is measured along a text of at least 2 tokens, not {len(ids)}")
    length = min(512, before.config.max_seq_len)
    losses, divergence = [0.0, 0.0], 0.0
    targets = 0
    for start in range(0, len(ids), length):
        window = torch.tensor([ids[start : start + length]], device=before.device)
        known, rounded = (model(window)[0].float().log_softmax(-1) for model in (before, after))  # (T, V)
        divergence += float((known.exp() * (known - rounded)).sum())
        nexts = window[0, 1:, None]
        losses = [a - float(b[:-1].gather(1, nexts).sum()) for a, b in zip(losses, (known, rounded), strict=True)]
        targets += len(nexts)
    moved = []
    for name, holder, own in linears(after):
        plain = before.get_submodule(name).weight.float()
        moved.append((name, float((plain - getattr(holder, own).weight.float()).norm() / plain.norm())))
    return Price(
        size(before),
        size(after),
        *(math.exp(loss / targets) for loss in losses),
        divergence / len(ids),
        sorted(moved, key=lambda pair: -pair[1]),
    )
