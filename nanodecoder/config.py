"""What a decoder is made of: two frozen dataclasses that name every choice, and one with what a checkpoint says of generating.

Nothing here knows a model's name or a file format; `families.py` translates Hugging Face's config.json into these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
LARGEST = 2**40  # any size above is a mistake, and would only fail later and less clearly
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: how fast each pair of features turns with the position.

    `kind` is how the frequencies are stretched to contexts longer than the pretrained one, `original_max_seq_len` tokens:
    "default" leaves them; "linear" divides all by `factor` (arXiv 2306.15595); "dynamic" raises theta with the row's length,
    once that is above `original_max_seq_len`; "llama3" divides the slow ones, keeps the fast ones and blends between (Llama
    3.1's release); "yarn" does so by how often a pair turns (arXiv 2309.00071); "longrope" divides each pair by a number of
    its own, from one list for rows up to `original_max_seq_len` and another for longer ones (arXiv 2402.13753).
    """

    theta: float = 10_000.0
    kind: str = "default"
    fraction: float = 1.0  # of each head's features that turn; the others pass as they are
    factor: float = 1.0
    original_max_seq_len: int | None = None
    attention_factor: float = 1.0  # multiplies cosines and sines, and so the scores by its square (yarn, longrope)
    low_freq_factor: float = 1.0  # llama3: slower than original_max_seq_len / low_freq_factor per turn is divided
    high_freq_factor: float = 4.0  # llama3: faster than original_max_seq_len / high_freq_factor per turn is kept
    beta_fast: float = 32.0  # yarn: pairs that turn more often than this in the original context are kept
    beta_slow: float = 1.0  # yarn: pairs that turn less often are divided
    truncate: bool = True  # yarn: round the ends of the blend outwards to whole pairs
    short_factors: tuple[float, ...] = ()  # longrope: one per turning pair
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"RoPE kind {self.kind!r} is unknown; these are known: {', '.join(ROPE_KINDS)}")
        for name in ("theta", "factor"):
            if not 0 < getattr(self, name) <= LARGEST:
                raise ValueError(f"RoPE {name} must be above 0 and at most {LARGEST}, not {getattr(self, name):.3g}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"the turning fraction of a head must be above 0 and at most 1, not {self.fraction}")
        needs_context = self.kind in ("dynamic", "llama3", "yarn", "longrope")
        if needs_context and (not self.original_max_seq_len or self.original_max_seq_len < 1):
            raise ValueError(f"RoPE kind {self.kind!r} needs original_max_seq_len, the context before stretching, in tokens")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                "RoPE kind 'llama3' needs high_freq_factor > low_freq_factor > 0, "
                f"not {self.high_freq_factor} and {self.low_freq_factor}"
            )
        if self.kind == "yarn" and not (self.theta > 1 and self.beta_fast > 0 and self.beta_slow > 0):
            raise ValueError("RoPE kind 'yarn' needs theta above 1, and beta_fast and beta_slow above 0")

    def turning(self, head_dim: int) -> int:
        """How many features of a head turn: an even number."""
        return int(head_dim * self.fraction)

    def depends_on_length(self) -> bool:
        """Whether a row's frequencies change when it outgrows `original_max_seq_len`."""
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of one decoder. Widths are in features, lengths in tokens.

    Left at None, `n_kv_heads` is `n_heads` (multi-head attention), `head_dim` is `dim // n_heads`, and `ffn_dim` is
    Llama's 8/3 of `dim`, rounded up to a multiple of 32. `rope` and `windows` hold one entry per layer; a single value
    given for all layers is repeated. Raises ValueError with the offending values when sizes do not fit together.
    """

    vocab_size: int
    dim: int  # width of the residual stream
    n_layers: int
    n_heads: int  # query heads
    n_kv_heads: int | None = None  # key/value heads; each serves n_heads // n_kv_heads query heads
    head_dim: int | None = None
    ffn_dim: int | None = None  # width inside the feed-forward
    max_seq_len: int = 2048  # the context the model was made for

    # Positions
    rope: RopeConfig | tuple[RopeConfig | None, ...] | None = RopeConfig()  # None: this layer knows no positions
    learned_positions: bool = False  # a table of max_seq_len vectors, added to the embeddings
    position_offset: int = 0  # rows of that table before the one of position 0
    windows: int | tuple[int | None, ...] | None = None  # sliding window, counting the query itself; None sees everything
    sparse_stride: int | None = None  # beyond the window, every k-th token back from the query is seen too

    # Norms
    norm: str = "rms"  # or "layer": with mean and bias
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # added to the norms' weights: where it is 1 a checkpoint stores them around 0
    pre_norm: bool = True  # norm what goes into attention and feed-forward
    post_norm: bool = False  # norm what comes out of them, before it is added
    qk_norm: str | None = None  # norm queries and keys before RoPE: "head" each head alone, "all" the heads of a token together

    # Attention
    qkv_bias: bool = False
    o_bias: bool = False
    attn_scale: float | None = None  # multiplies the scores; None is head_dim ** -0.5
    attn_softcap: float | None = None  # scores s become cap · tanh(s / cap)

    # Feed-forward and block
    activation: str = "silu"
    gated: bool = True  # gate_proj decides what passes of up_proj; else the activation is between up_proj and down_proj
    ffn_bias: bool = False
    parallel: bool = False  # attention and feed-forward read the same stream, rather than one after the other

    # Ends
    embed_scale: float = 1.0  # multiplies the embeddings, not the table
    tied_head: bool = False  # the head shares the embedding's weight
    final_softcap: float | None = None  # logits l become cap · tanh(l / cap)

    # The dialect of the config.json that this came from. Only `families.py` reads it, when it writes one back.
    model_type: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "max_seq_len"):
            if not 1 <= getattr(self, name) <= LARGEST:
                raise ValueError(f"{name} must be at least 1 and at most {LARGEST}, not {getattr(self, name)}")

        def settle(name: str, value: object) -> None:
            object.__setattr__(self, name, value)  # frozen: __post_init__ alone may finish the fields

        if self.n_kv_heads is None:
            settle("n_kv_heads", self.n_heads)
        if self.head_dim is None:
            if self.dim % self.n_heads:
                raise ValueError(f"dim {self.dim} is not a multiple of n_heads {self.n_heads}; give head_dim")
            settle("head_dim", self.dim // self.n_heads)
        if self.ffn_dim is None:
            settle("ffn_dim", -(-8 * self.dim // 3 // 32) * 32)
        if self.n_kv_heads < 1 or self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        for name in ("head_dim", "ffn_dim"):
            if not 1 <= getattr(self, name) <= LARGEST:
                raise ValueError(f"{name} must be at least 1 and at most {LARGEST}, not {getattr(self, name)}")
        if not 0 <= self.norm_eps < 1:
            raise ValueError(f"norm_eps must be from 0 to 1, not {self.norm_eps}")

        for name in ("rope", "windows"):
            value = getattr(self, name)
            if isinstance(value, list):
                value = tuple(value)
                settle(name, value)
            if not isinstance(value, tuple):
                settle(name, (value,) * self.n_layers)
            elif len(value) != self.n_layers:
                raise ValueError(f"{name} has {len(value)} entries for {self.n_layers} layers")
        for window in self.windows:
            if window is not None and not 1 <= window <= LARGEST:
                raise ValueError(f"a window must be at least 1 token (it counts the query itself), not {window}")
        if self.sparse_stride is not None:
            if self.sparse_stride < 1:
                raise ValueError(f"sparse_stride must be at least 1, or None, not {self.sparse_stride}")
            if not any(self.windows):
                raise ValueError("sparse_stride adds distant tokens to a window, and no layer has one: give windows")
        for rope in set(self.rope) - {None}:
            turning = rope.turning(self.head_dim)
            if turning < (4 if rope.kind == "dynamic" else 2) or turning % 2:
                raise ValueError(f"RoPE turns pairs, and {turning} of a head's {self.head_dim} features would turn")
            for factors in (rope.short_factors, rope.long_factors):
                if rope.kind == "longrope" and len(factors) != turning // 2:
                    raise ValueError(f"RoPE kind 'longrope' needs {turning // 2} short and long factors, not {len(factors)}")

        for name, known in (("norm", ("rms", "layer")), ("qk_norm", (None, "head", "all")), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, not {getattr(self, name)!r}")
        for name in ("attn_scale", "attn_softcap", "final_softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, or None, not {value}")


@dataclass(frozen=True)
class Sampling:
    """How the next id is chosen from the logits. The defaults are greedy. Raises ValueError for a value out of its range.

    temperature: 0 takes the likeliest id; above, logits are divided by it. top_k: keep the k largest, and what equals the k-th;
    0 is off. top_p: keep the fewest ids whose probabilities reach p; 1 is off. min_p: keep ids at least this fraction as
    likely as the likeliest; 0 is off. repetition_penalty: divides positive and multiplies negative logits of ids that the row
    has already, prompt included (arXiv 1909.05858); 1 is off. presence_penalty: subtracted from the logits of ids that were
    generated already; frequency_penalty: subtracted once for each time (both as in OpenAI's interface); 0 is off.
    logit_bias: id -> what is added to its logit, -inf banning it; banned_ids: the same for ids alone.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    banned_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        def require(holds: bool, name: str, range_: str) -> None:
            if not holds:
                raise ValueError(f"{name} must be {range_}, not {getattr(self, name)}")

        # Beyond these ends float32 would make 0, infinity or NaN of them.
        require(self.temperature == 0 or 1e-37 <= self.temperature <= 1e37, "temperature", "0 (greedy) or from 1e-37 to 1e37")
        require(isinstance(self.top_k, int) and self.top_k >= 0, "top_k", "a whole number, 0 (off) or above")
        require(0 <= self.top_p <= 1, "top_p", "from 0 to 1 (off)")
        require(0 <= self.min_p <= 1, "min_p", "from 0 (off) to 1")
        require(1e-6 <= self.repetition_penalty <= 1e6, "repetition_penalty", "from 1e-6 to 1e6 (1 is off)")
        require(-1e6 <= self.presence_penalty <= 1e6, "presence_penalty", "from -1e6 to 1e6 (0 is off)")
        require(-1e6 <= self.frequency_penalty <= 1e6, "frequency_penalty", "from -1e6 to 1e6 (0 is off)")
        bias = dict(self.logit_bias)
        numbers = all(_is_id(index) and -math.inf <= value <= 1e6 for index, value in bias.items())
        require(numbers, "logit_bias", "ids with numbers up to 1e6 (-inf bans)")
        require(all(map(_is_id, self.banned_ids)), "banned_ids", "ids")
        # Tuples, so that settings stay hashable and cannot be changed under whoever holds them
        object.__setattr__(self, "logit_bias", tuple(sorted(bias.items())))
        object.__setattr__(self, "banned_ids", tuple(sorted(set(self.banned_ids))))


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class GenerationConfig(Sampling):
    """What a checkpoint says of generating: how to sample if nobody says, where a text starts, and which ids end it.

    `pad_id` is kept for whoever reads a saved checkpoint; here nothing is padded.
    """

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
