"""What a decoder is made of: two frozen dataclasses that name every choice, and one with what a checkpoint says of generating.

Nothing here knows a model's name or a file format; `families.py` translates Hugging Face's config.json into these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: how fast each pair of features turns with the position.

    `kind` is how the frequencies are stretched to contexts longer than the pretrained one:
    "default" leaves them, "linear" divides all by `factor` (arXiv 2306.15595), "llama3" divides the slow ones by `factor`,
    keeps the fast ones and blends between (Llama 3.1's release).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3: slower than original_max_seq_len / low_freq_factor per turn is divided
    high_freq_factor: float = 4.0  # llama3: faster than original_max_seq_len / high_freq_factor per turn is kept
    original_max_seq_len: int | None = None  # llama3: the context before stretching, in tokens

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"RoPE kind {self.kind!r} is unknown; these are known: {', '.join(ROPE_KINDS)}")
        if not self.theta > 0 or not self.factor > 0:
            raise ValueError(f"RoPE theta and factor must be above 0, not {self.theta} and {self.factor}")
        if self.kind == "llama3":
            if not self.original_max_seq_len or self.original_max_seq_len < 1:
                raise ValueError("RoPE kind 'llama3' needs original_max_seq_len, the context before stretching, in tokens")
            if not self.high_freq_factor > self.low_freq_factor > 0:
                raise ValueError(
                    "RoPE kind 'llama3' needs high_freq_factor > low_freq_factor > 0, "
                    f"not {self.high_freq_factor} and {self.low_freq_factor}"
                )


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
    norm_eps: float = 1e-5
    rope: RopeConfig | tuple[RopeConfig, ...] = RopeConfig()
    windows: int | tuple[int | None, ...] | None = None  # sliding window, counting the query itself; None sees everything
    qk_norm: bool = False  # RMSNorm on each head's query and key before RoPE
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False
    tied_head: bool = False  # the head shares the embedding's weight
    # The dialect of the config.json that this came from. Only `families.py` reads it, when it writes one back.
    model_type: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

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
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even, since RoPE turns pairs, not {self.head_dim}")
        if self.ffn_dim < 1:
            raise ValueError(f"ffn_dim must be at least 1, not {self.ffn_dim}")

        for name in ("rope", "windows"):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                settle(name, (value,) * self.n_layers)
            elif len(value) != self.n_layers:
                raise ValueError(f"{name} has {len(value)} entries for {self.n_layers} layers")
        for window in self.windows:
            if window is not None and window < 1:
                raise ValueError(f"a window must be at least 1 token (it counts the query itself), not {window}")


@dataclass(frozen=True)
class GenerationConfig:
    """What a checkpoint says of generating: where a text starts, which ids end it, how to sample if nobody says.

    Temperature 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 are off.
    """

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
