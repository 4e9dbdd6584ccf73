"""The decoder: token ids in, a logit for every id of the vocabulary out.

    tokens (B, T) ─ embed ─> x (B, T, dim) ─ block 1 ─ … ─ block N ─ norm ─> (B, T, dim) ─ lm_head ─> logits (B, T, V)
                                                  └────────── trunk ──────────┘           └─ head ─┘

Parameters: `embed`, `blocks.N.{attn_norm, attn.{q,k,v,o}_proj, ffn_norm, ffn.{gate,up,down}_proj}`, `norm`, `lm_head`; where
an option adds them, `positions`, `attn.{q,k}_norm`, `attn_post_norm`, `ffn_post_norm`.

Legend: B rows, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .attention import PATHS, Attention, Sight, sights
from .cache import KVCache, LayerCache, Placement, fresh, of_documents
from .config import GenerationConfig, ModelConfig
from .layers import FeedForward, Linear, make_norm, soft_cap
from .rope import Turn, angles


class Block(nn.Module):
    """One transformer block: look at earlier tokens, then think about what was seen, each added to the stream.

    Norms stand before the two halves, after them, or both (`pre_norm`, `post_norm`). Parallel halves read the same stream.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = make_norm(config, config.dim, config.pre_norm)
        self.attn = Attention(config)
        self.attn_post_norm = make_norm(config, config.dim, config.post_norm)
        self.ffn_norm = make_norm(config, config.dim, config.pre_norm)
        self.ffn = FeedForward(config)
        self.ffn_post_norm = make_norm(config, config.dim, config.post_norm)
        self.parallel = config.parallel
        self.dropout = nn.Dropout(0.0)  # training turns it up

    def forward(
        self,
        x: Tensor,
        turn: Turn | None,
        sights: Sequence[Sight],
        cache: LayerCache | None = None,
        path: str = "fused",
    ) -> Tensor:
        """x (B, T, dim) -> (B, T, dim); the other arguments are attention's."""
        looked = x + self.dropout(self.attn_post_norm(self.attn(self.attn_norm(x), turn, sights, cache, path)))
        source = x if self.parallel else looked
        return looked + self.dropout(self.ffn_post_norm(self.ffn(self.ffn_norm(source))))


class Decoder(nn.Module):
    """A decoder-only transformer. `config` says what it is made of, `generation` what its checkpoint says of generating.

    `attention` is "fused" or "explicit" and may be set at any time: two ways to the same numbers. (No kernel has a soft cap
    of scores: a model with `attn_softcap` always takes the explicit path.)
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.generation = GenerationConfig()
        self.attention = "fused"
        self.ropes = tuple(dict.fromkeys(config.rope))  # the kinds that there are, None among them
        self.rope_of_layer = tuple(self.ropes.index(rope) for rope in config.rope)
        self.embed = _table(config.vocab_size, config.dim)
        rows = config.max_seq_len + config.position_offset
        self.positions = _table(rows, config.dim) if config.learned_positions else None
        self.dropout = nn.Dropout(0.0)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = make_norm(config, config.dim)
        self.lm_head = Linear(config.dim, config.vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.embed.weight
        if not self.embed.weight.is_meta:  # there is nothing to draw where a checkpoint will be put
            init_weights(self)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights and the stream are made of."""
        return self.norm.weight.dtype

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        *,
        counts: Sequence[int] | Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, T) int64 -> logits (B, T, V), in the model's dtype.

        With a `cache` the tokens continue what its rows hold, and are added to it. `counts` (B,) says how many of the T
        tokens are real, row by row, from the left; logits at the others mean nothing. `documents` (B, T) numbers the tokens'
        documents: each run of one number is as if it were alone, its positions counted from 0.
        Raises ValueError when tokens, counts, documents and cache do not fit each other.
        """
        return self.head(self.trunk(tokens, cache, counts=counts, documents=documents))

    def trunk(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        *,
        counts: Sequence[int] | Tensor | None = None,
        documents: Tensor | None = None,
        exact: bool = False,
    ) -> Tensor:
        """Everything up to the final norm. tokens (B, T) int64 -> (B, T, dim)

        Where only some of the tokens are real, only those are computed. With `exact` all are, and attention looks at each row
        alone: then a row's result depends on T, B and the row itself, to the last bit (see `batch.Blocks`).
        """
        config = self.config
        self._check(tokens, cache)
        if documents is not None:
            if documents.shape != tokens.shape or cache is not None or counts is not None:
                raise ValueError("documents must be of the shape of tokens, and can go neither with a cache nor with counts")
            at = of_documents(documents)
            x = self.trunk(at.unpack(tokens.reshape(1, -1)), counts=at.counts)  # a row for each
            return at.pack(x).view(*tokens.shape, -1)
        at = cache.place(tokens.shape[1], counts, exact) if cache is not None else fresh(*tokens.shape, counts, tokens.device)
        self.check_positions(at, cache)
        layers = cache.layers(at) if cache is not None else [None] * config.n_layers
        path = "explicit" if config.attn_softcap else self.attention

        # Computed once per pass, shared by the layers that agree on them.
        turns = [rope and angles(at.positions, rope, config.head_dim, at.lengths, self.dtype) for rope in self.ropes]
        seen = {window: sights(at, window, path, config.sparse_stride) for window in set(config.windows)}

        x = self.enter(tokens, at.positions)
        if at.packed:
            x = at.pack(x)  # (1, N, dim)
            turns = [turn and tuple(map(at.pack, turn)) for turn in turns]
        for block, rope, window, layer in zip(self.blocks, self.rope_of_layer, config.windows, layers, strict=True):
            x = block(x, turns[rope], seen[window], layer, path)
        if cache is not None:
            cache.advance(at)
        x = self.norm(x)
        return at.unpack(x) if at.packed else x

    def enter(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The stream's beginning: what each token is, and with learned positions where it stands. (B, T) -> (B, T, dim)"""
        x = self.embed(tokens)
        if self.config.embed_scale != 1:
            # Rounded to the stream's dtype first, as the checkpoints that need it were trained
            x = x * torch.tensor(self.config.embed_scale, dtype=x.dtype, device=x.device)
        if self.positions is not None:
            x = x + self.positions(positions + self.config.position_offset)
        return self.dropout(x)

    def head(self, x: Tensor) -> Tensor:
        """(…, dim) out of the trunk -> logits (…, V), each row in one piece in memory: what comes next looks for its best."""
        return soft_cap(self.lm_head(x), self.config.final_softcap).contiguous()

    def must_begin_anew(self, held: int, longest: int, length: int) -> bool:
        """Whether a row that holds `held` tokens, and held up to `longest`, cannot go on to `length`.

        So it is where a longrope row crosses its original length: the held keys were turned otherwise, and all its positions
        must be computed again.
        """
        return held > 0 and any(
            rope.kind == "longrope" and (longest > rope.original_max_seq_len) != (length > rope.original_max_seq_len)
            for rope in self.ropes
            if rope is not None
        )

    def check_positions(self, at: Placement, cache: KVCache | None) -> None:
        """Raise ValueError for rows that reach positions which the model, or its keys in the cache, cannot have."""
        limit = self.config.max_seq_len
        stretched = [rope for rope in self.ropes if rope is not None and rope.depends_on_length()] if cache is not None else []
        for row, (start, longest, length) in enumerate(zip(at.starts, at.longest, at.lengths, strict=True)):
            if self.positions is not None and length > limit:
                raise ValueError(f"row {row} would be {length} tokens long, and there are {limit} learned positions")
            if stretched and self.must_begin_anew(start, longest, length):
                raise ValueError(
                    f"row {row} holds {start} tokens (at most {longest}) and would be {length} long, across the original "
                    "context at which longrope's angles change: truncate the row to 0 and feed all its tokens at once"
                )
            for rope in stretched:
                if rope.kind == "dynamic" and length > rope.original_max_seq_len:
                    raise ValueError(
                        f"row {row} would be {length} tokens long, and beyond {rope.original_max_seq_len} dynamic RoPE turns "
                        "every position anew at each step: go on without a cache"
                    )

    def _check(self, tokens: Tensor, cache: KVCache | None) -> None:
        if self.attention not in PATHS:
            raise ValueError(f"model.attention must be one of {', '.join(PATHS)}, not {self.attention!r}")
        if tokens.dim() != 2 or 0 in tokens.shape or tokens.dtype not in (torch.int64, torch.int32):
            shape, kind = tuple(tokens.shape), str(tokens.dtype).removeprefix("torch.")
            raise ValueError(f"tokens must be whole numbers of shape (B, T), at least (1, 1), not {kind} of shape {shape}")
        if cache is None:
            return
        shape = (cache.keys.shape[0], cache.keys.shape[2], cache.keys.shape[4])
        if shape != (self.config.n_layers, self.config.n_kv_heads, self.config.head_dim):
            raise ValueError("the cache was made for another config: make it with KVCache(model.config, …)")
        if cache.batch_size != tokens.shape[0]:
            raise ValueError(f"the cache has {cache.batch_size} rows and tokens has {tokens.shape[0]}")
        if (cache.dtype, cache.device) != (self.dtype, self.device):
            raise ValueError(
                f"the cache is {cache.dtype} on {cache.device} and the model {self.dtype} on {self.device}: "
                "make it with KVCache(…, device=model.device, dtype=model.dtype)"
            )


def _table(rows: int, dim: int) -> nn.Embedding:
    """A look-up table, not yet drawn: nn.Embedding would draw it, which on the meta device imports all of torch's compiler."""
    return nn.Embedding.from_pretrained(torch.empty(rows, dim), freeze=False)


def init_weights(model: Decoder) -> None:
    """Draw every weight anew: normal with standard deviation √(2 / 5·dim), biases 0, norms 1.

    The deviation follows the width ("small init" of Nguyen and Salazar, 2019, arXiv:1910.05895: what Glorot's rule gives a
    feed-forward layer that is four times as wide). At GPT-2's width of 768 it is 0.023, close to GPT-2's own 0.02, which
    would start our far narrower models with logits near zero. The two projections that write into the residual stream are
    drawn smaller by √(2 · n_layers), so that the sum of all their contributions starts with the variance of one (GPT-2
    paper, section 2.3).
    """
    std = (2 / (5 * model.config.dim)) ** 0.5
    residual_std = std / (2 * model.config.n_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.normal_(parameter, std=residual_std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" in name:
            nn.init.constant_(parameter, 1.0 - model.config.norm_offset)
        else:
            nn.init.normal_(parameter, std=std)
