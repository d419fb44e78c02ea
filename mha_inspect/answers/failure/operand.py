"""One tensor that the failing call was given, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ... import text
from ...naming.pattern import dims_of
from ...record.ops import TensorRef

HEADS = ("heads", "kv_heads")
SEQUENCES = ("query", "key", "sequence")
ATTENTION, SDPA = "MultiheadAttention", "scaled_dot_product_attention"
LAYERS = (ATTENTION, "Transformer")
"""Layers of torch that hold attention."""


@dataclass(frozen=True, eq=False)
class Operand:
    """One tensor that the failing call was given. It must not outlive the error that it was read from."""

    role: str
    """The argument that it was given for; empty where the call has no names for them."""
    name: str
    """As the user's line writes it; empty where that is not known."""
    value: torch.Tensor
    tensor: TensorRef
    pattern: str = ""
    """What each dimension is, as an einops pattern."""
    part: str = ""
    """What it is to the attention: `query`, `key`, `value`, `weights`; empty where that is not known."""
    from_scores: bool = False
    """Whether it was made from the product of the scores."""
    from_parameters: bool = False
    """Whether a parameter has gone into it: else it came in as it is, like a mask."""

    @property
    def device(self) -> str:
        """`cpu`, `cuda:0`, ..."""
        return str(self.value.device)

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter itself."""
        return isinstance(self.value, nn.Parameter)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        return self.tensor.shape

    @property
    def dtype(self) -> str:
        """`float32`, `bool`, ..."""
        return self.tensor.dtype

    @property
    def axes(self) -> list[list[str]]:
        """The names in each dimension, and numbers where there is none."""
        return dims_of(self.pattern)

    @property
    def is_shape(self) -> str:
        """`q is [2, 8, 5, 64]`."""
        return f"{self.name} is {text.shape(self.shape)}"

    @property
    def text(self) -> str:
        """`q is [2, 8, 5, 64] batch heads query head_dim`; the axes where one at least has a name."""
        named = any(not name.isdigit() for names in self.axes for name in names)
        return f"{self.is_shape} {self.pattern}" if named else self.is_shape

    def place(self, *names: str) -> int | None:
        """Return the first dimension that is one of these axes, or has one in it; None where none is."""
        return next((place for place, dim in enumerate(self.axes) if not set(names).isdisjoint(dim)), None)

    def size(self, *names: str) -> int:
        """Return the size of the dimension that is one of these axes alone; 0 where there is none."""
        dims = zip(self.shape, self.axes, strict=True)
        return next((size for size, dim in dims if len(dim) == 1 and dim[0] in names), 0)

    def axis(self, place: int) -> str:
        """Return what a dimension is, with its size: `head_dim 64`; the size alone where it has no name."""
        dim = self.axes[place]
        name = dim[0] if len(dim) == 1 else f"({' '.join(dim)})"
        return str(self.shape[place]) if name.isdigit() else f"{name} {self.shape[place]}"

    @property
    def heads_are_behind(self) -> bool:
        """Whether the heads stand behind the sequence."""
        heads, sequence = self.place(*HEADS), self.place(*SEQUENCES)
        return heads is not None and sequence is not None and len(self.shape) >= 4 and sequence < heads
