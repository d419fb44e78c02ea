"""Where in a tensor the features of each head are, by the names of its axes."""

from __future__ import annotations

import copy
from math import prod

import torch
from torch import Tensor

from ..graph.elements import Elements, elements_at
from ..graph.moves import coordinates_of, index_of
from ..record.ops import TensorRef
from .pattern import dims_of
from .sizes import POSITIONS

_HEADS = ("heads", "kv_heads", "group")
_PLACES = ("batch", "query", "key", "windows", POSITIONS)
_KINDS = ("head", "feature", "position")
"""What an axis of heads may count."""
_LOOKED_AT = 33
"""Positions along each axis that are looked at, spread over it: what is appended stands at an end."""
_ELEMENTS = 1 << 15
"""Elements that are looked at at a time."""


class Layout:
    """Where in a tensor the features of each head are, by the pattern of its axes."""

    def __init__(self, tensor: TensorRef, pattern: str, sizes: dict[str, int]) -> None:
        """Raises ValueError where the sizes of the axes cannot be told."""
        self.tensor = tensor
        self._axes: list[tuple[str, int]] = []
        for names, size in zip(dims_of(pattern), tensor.shape, strict=True):
            own = [int(name) if name.isdigit() else 0 if len(names) > 1 else size for name in names]
            own = [known or sizes.get(name, 0) for known, name in zip(own, names, strict=True)]
            if own.count(0) == 1:
                own[own.index(0)] = size // max(prod(known for known in own if known), 1)
            if prod(own) != size:
                raise ValueError(f"{pattern} does not tell the axes of {list(tensor.shape)}")
            self._axes += zip(names, own, strict=True)
        names = [name for name, _ in self._axes]
        self._shape = [size for _, size in self._axes]
        plain = not any(name.endswith("head_dim") for name in names)
        kinds = [
            "head" if name in _HEADS
            else "position" if name.split("_")[0] in _PLACES or (name.isdigit() and not plain)
            else "feature"
            for name in names
        ]  # fmt: skip
        self._places = {kind: [place for place, own in enumerate(kinds) if own == kind] for kind in _KINDS}
        self.num_heads = prod(self._sizes("head"))
        self.head_dim = prod(self._sizes("feature"))

    def of(self, tensor: TensorRef) -> Layout:
        """The same of another tensor."""
        other = copy.copy(self)
        other.tensor = tensor
        return other

    def _sizes(self, kind: str) -> list[int]:
        return [self._shape[place] for place in self._places[kind]]

    def elements(self, first_head: int) -> Elements:
        """Those of all heads at some positions, with `head * head_dim + feature` for an id."""
        longest = max([1, *self._sizes("position")])
        spread = torch.arange(number_of_positions(longest, self.num_heads * self.head_dim))
        grid = torch.cartesian_prod(spread, torch.arange(self.num_heads), torch.arange(self.head_dim)).reshape(-1, 3)
        at, head, feature = grid.unbind(1)
        found = [at * (size - 1) // max(len(spread) - 1, 1) for size in self._shape]
        for kind, number in (("head", head), ("feature", feature)):
            for place, coordinate in zip(self._places[kind], coordinates_of(number, self._sizes(kind)), strict=True):
                found[place] = coordinate
        return elements_at(self.tensor, found, (first_head + head) * self.head_dim + feature, self._shape)

    def head_and_feature(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Which feature of which head each element is."""
        coordinates = coordinates_of(at, self._shape)
        head, feature = (
            index_of([coordinates[place] for place in self._places[kind]], self._sizes(kind)) + torch.zeros_like(at)
            for kind in ("head", "feature")
        )
        return head, feature

    def is_of(self, head: int) -> Tensor:
        """Whether each element is of this head, in the shape of the tensor."""
        alone = [size if place in self._places["head"] else 1 for place, size in enumerate(self._shape)]
        heads = torch.arange(self.num_heads).reshape(alone)
        return (heads == head).expand(self._shape).reshape(self.tensor.shape)

    def key_heads(self, groups: int) -> Tensor:
        """For each head, which key/value head it uses: by the axes, or else in blocks."""
        heads = torch.arange(self.num_heads)
        names = [self._axes[place][0] for place in self._places["head"]]
        coordinates = coordinates_of(heads, self._sizes("head"))
        counted = [place for place, name in enumerate(names) if name == "kv_heads"]
        if not counted:
            return heads * groups // max(self.num_heads, 1)
        return index_of([coordinates[place] for place in counted], [self._sizes("head")[place] for place in counted])


def number_of_positions(longest: int, features: int) -> int:
    """How many positions are looked at: fewer where each has many features, and both ends but of the very largest."""
    return min(longest, _LOOKED_AT, max(_ELEMENTS // max(features, 1), 2 if features < 1 << 18 else 1))
