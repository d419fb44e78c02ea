"""What stands where attention has its two products, and has no softmax between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = Literal["scores", "state", ""]
"""`scores` where queries meet keys first and values then; `state` where keys meet values first and queries then, as in
linear attention; empty where the recording has no evidence."""

Role = Literal["q", "k", "v", ""]


@dataclass(frozen=True)
class Factor:
    """A tensor that goes into a product, as the code wrote it."""

    role: Role
    """What it would be in attention; empty where the recording has no evidence."""
    shape: tuple[int, ...]
    axes: str
    """What each dimension is, as an einops pattern; a dimension that no evidence names stays a number."""


@dataclass(frozen=True)
class Product:
    """A product of activations: neither factor is a parameter."""

    factors: tuple[Factor, ...]
    """Those that no other product of the pair gives, in order."""
    shape: tuple[int, ...]
    axes: str
    name: str
    """The operation's name in torch: `aten.bmm.default`; of one written out, the multiplication's."""
    source: str
    """The line that asked for it: `attention.py:41`."""


@dataclass(frozen=True)
class ProductPair:
    """Two products one of which goes into the other, without a softmax between them."""

    module: str
    """Path of the module whose forward computes the first."""
    form: Form
    first: Product
    between: tuple[str, ...]
    """What is done to the first on its way to the second, in order: `scale 0.5`, `sigmoid`, `mul [7, 7]`."""
    second: Product
    count: int
    """How many pairs are like this one, from the same lines of the same module."""
