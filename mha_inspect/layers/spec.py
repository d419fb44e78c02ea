"""Define a request as plain data: the layer's sizes and settings, its inputs, and how it is run.

This module imports no torch, so contradictory flags are refused at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import SpecError
from ..explained import explain_fields

if TYPE_CHECKING:
    from torch.nn import MultiheadAttention

DtypeName = Literal["float32", "float64", "bfloat16", "float16"]
DTYPES: tuple[DtypeName, ...] = ("float32", "float64", "bfloat16", "float16")
_MOST_STEPS = 1_000_000


def divisors(number: int) -> list[int]:
    """Return the divisors of `number` in ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _require_positive(spec: object, *names: str) -> None:
    for name in names:
        if (size := getattr(spec, name)) is not None and size < 1:
            raise SpecError(f"{name} {size} is too small: it must be 1 or more. Try {name} 1.")


class DerivedInt(int):
    """A size that follows from other sizes; `dataclasses.replace` computes it again from the new sizes."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The sizes and settings of a layer. Raise `SpecError` if they contradict each other."""

    embed_dim: int = 512
    """Features of the query and of the output."""
    num_heads: int = 8
    """Number of query heads."""
    num_kv_heads: int | None = None
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads; None means num_heads."""
    head_dim: int = DerivedInt(0)
    """Features of one head: embed_dim / num_heads by default (None or a `DerivedInt` is the default)."""
    kdim: int | None = None
    """Features of the key input; None means embed_dim."""
    vdim: int | None = None
    """Features of the value input; None means embed_dim."""
    bias: bool = True
    """Whether the projections have biases."""
    add_bias_kv: bool = False
    """Whether one learned key and value is appended to the sequence."""
    add_zero_attn: bool = False
    """Whether one key and value of zeros is appended to the sequence."""
    dropout: float = 0.0
    """Probability of dropping a weight in training mode."""
    rope: bool = False
    """Whether queries and keys are rotated by their positions before the scores."""
    batch_first: bool = True
    """Whether inputs are `batch seq embed` (True) or `seq batch embed` (False)."""
    training: bool = False
    """Whether the layer is in training mode, with dropout."""
    dtype: DtypeName = "float32"
    """Data type of parameters and inputs."""
    seed: int = 0
    """Seed of parameters and inputs."""

    def __post_init__(self) -> None:
        _require_positive(self, "embed_dim", "num_heads", "kdim", "vdim")
        if self.head_dim is None or isinstance(self.head_dim, DerivedInt):
            if self.embed_dim % self.num_heads:
                raise SpecError(
                    f"embed_dim {self.embed_dim} is not divisible by num_heads {self.num_heads}: each head has "
                    f"embed_dim / num_heads features. Head counts that divide {self.embed_dim}: "
                    f"{', '.join(map(str, divisors(self.embed_dim)))}."
                )
            object.__setattr__(self, "head_dim", DerivedInt(self.embed_dim // self.num_heads))
        _require_positive(self, "head_dim", "num_kv_heads")
        if self.num_heads % self.kv_heads:
            raise SpecError(
                f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}: each key/value head "
                f"serves the same number of query heads. Divisors of {self.num_heads}: "
                f"{', '.join(map(str, divisors(self.num_heads)))}."
            )
        if self.rope and self.head_dim % 2:
            raise SpecError(
                f"rope cannot rotate head_dim {self.head_dim}: it rotates pairs of features, so head_dim must be even. "
                f"Try head_dim {self.head_dim + 1}."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise SpecError(f"dropout {self.dropout} is out of range: expected 0 or more and below 1. Try dropout 0.1.")
        if self.dtype not in DTYPES:
            raise SpecError(f"dtype {self.dtype!r} is not supported. Use one of: {', '.join(DTYPES)}.")

    @property
    def head_dim_given(self) -> bool:
        """Whether head_dim was given, instead of following from embed_dim and num_heads."""
        return not isinstance(self.head_dim, DerivedInt)

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def key_width(self) -> int:
        """Width of the key input."""
        return self.embed_dim if self.kdim is None else self.kdim

    @property
    def value_width(self) -> int:
        """Width of the value input."""
        return self.embed_dim if self.vdim is None else self.vdim


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """The inputs of the layer. Raise `SpecError` if the sizes contradict each other."""

    batch: int = 1
    """Number of batch items."""
    seq_len: int = 12
    """Number of queries."""
    key_len: int | None = None
    """Length of key and value; None means self-attention (key and value are the query)."""
    unbatched: bool = False
    """Whether the inputs have no batch dimension."""
    causal: bool = False
    """Whether a query can attend only to keys up to its own position."""
    padding: tuple[int, ...] = ()
    """Number of padding keys at the end: one number for all batch items, or one for each."""
    attn_mask: Path | None = None
    """A file (.pt, .safetensors) with a boolean (True: masked out) or additive mask; 2-D, or one for each head."""
    input: Path | None = None
    """A file (.pt, .safetensors) with the query, or query, key and value by name."""

    def __post_init__(self) -> None:
        _require_positive(self, "batch", "seq_len", "key_len")
        if self.unbatched and self.batch != 1:
            raise SpecError(
                f"batch {self.batch} contradicts unbatched: without a batch dimension there is one sequence. "
                "Remove one of the two."
            )
        misfit = self.misfit_of_padding(self.batch, self.keys)
        if misfit and self.input is None:
            raise SpecError(misfit)

    def misfit_of_padding(self, batch: int, keys: int) -> str:
        """Return why the padding does not fit this batch and these keys; empty if it fits."""
        if any(not 0 <= count <= keys for count in self.padding):
            listed = ",".join(map(str, self.padding))
            return f"padding {listed} does not fit {keys} keys: each number must be 0 to {keys}."
        if len(self.padding) > 1 and len(self.padding) != batch:
            counted = f"padding has {len(self.padding)} numbers for batch {batch}"
            return f"{counted}: give one number, or one for each batch item."
        return ""

    @property
    def keys(self) -> int:
        """Length of key and value."""
        return self.seq_len if self.key_len is None else self.key_len


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """How to run the layer."""

    device: str = "cpu"
    """Device of parameters and inputs: cpu, cuda, cuda:N, mps or meta."""
    grad: bool = False
    """Whether gradients are recorded; torch's fast path needs False."""
    need_weights: bool = True
    """Whether the layer is asked for its attention weights."""
    average_weights: bool = True
    """Whether the returned weights are averaged over heads."""


def require_steps(steps: int) -> None:
    """Raise `SpecError` if this is no whole number of training steps from 1 to the maximum."""
    if not isinstance(steps, int):
        raise SpecError(f"steps {steps!r} is not a whole number. Use e.g. 10.")
    if steps < 1:
        raise SpecError(f"steps {steps} trains nothing: it must be 1 or more. Try --steps 10.")
    if steps > _MOST_STEPS:
        raise SpecError(f"steps {steps:,} would take weeks: the most is {_MOST_STEPS:,}. Try --steps 10.")


def plain_fields(spec: AttentionSpec) -> dict[str, Any]:
    """Return the spec as JSON data: every field, with head_dim as its number."""
    return {**{name: getattr(spec, name) for name in spec.__dataclass_fields__}, "head_dim": int(spec.head_dim)}


@dataclass(frozen=True, kw_only=True)
class Show:
    """The content of a report beyond names, shapes and axes."""

    ops: bool = False
    """Every operation that PyTorch ran, with its inputs, outputs and source line, and on the page what stages take."""
    stats: bool = False
    """Mean, std, min, max, NaN and inf of each tensor."""
    values: bool = False
    """The content of each tensor as text, shortened as torch shortens it."""
    full_values: bool = False
    """Whether every element is added as data, beside the shortened text."""

    def without_numbers(self, device: str) -> tuple[str, ...]:
        """Return a note if numbers were requested on device meta, which has none; otherwise empty."""
        options = " and ".join(f"--{name}" for name in ("stats", "values") if getattr(self, name))
        return (f"{options}: device meta has shapes and no numbers to show.",) if options and device == "meta" else ()


def spec_of(module: MultiheadAttention) -> AttentionSpec:
    """Return the spec of torch's own layer; an unsupported dtype becomes float32, a dropout of 1 becomes 0."""
    dtype = str(module.out_proj.weight.dtype).removeprefix("torch.")
    same = ("embed_dim", "num_heads", "kdim", "vdim", "add_zero_attn", "batch_first", "training")
    return AttentionSpec(
        **{name: getattr(module, name) for name in same},
        bias=module.in_proj_bias is not None,
        add_bias_kv=module.bias_k is not None,
        dropout=module.dropout if module.dropout < 1 else 0.0,
        dtype=dtype if dtype in DTYPES else "float32",
    )


explain_fields(globals())
