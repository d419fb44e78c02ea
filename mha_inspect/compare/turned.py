"""Put one token at every position, and compute the steps behind it again: which position does it have elsewhere?"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..naming.pattern import dims_of
from ..record.ops import TensorRef
from .pair import Side, are_near
from .reasons.made_of import MADE_OF
from .replay import LostError, again

_INPUTS = ("query", "key", "value")


@dataclass(frozen=True, eq=False)
class Tokens:
    """A tensor that a stage is computed from, one token a position."""

    side: Side
    stage: str
    tensor: TensorRef
    dim: int
    """Its dimension of positions."""

    @property
    def length(self) -> int:
        """The number of positions."""
        return self.tensor.shape[self.dim]

    def everywhere(self, token: int) -> Tensor | None:
        """Return the stage in canonical axes, where one token is at every position; None if it is not known."""
        numbers = self.side.kept.content(self.tensor)
        if numbers is None or token >= self.length:
            return None
        moved = numbers.narrow(self.dim, token, 1).expand_as(numbers)
        try:
            made = again(self.side.kept, self.tensor, moved, self.side.attention.stages[self.stage])
        except LostError:
            return None
        return self.side.in_canonical_axes(self.stage, made)

    def positions_of(self, token: int, numbers: Tensor, axis: int, near: float | None = None) -> list[int]:
        """Return the positions at which a token gets these numbers, the stage without its axis of positions."""
        everywhere = self.everywhere(token)
        recorded = self.side.stage(self.stage)
        if everywhere is None or recorded is None or recorded.shape != everywhere.shape:
            return []
        # Where its neighbours have a part, e.g. in a convolution, a token among its copies is another one.
        at_its_place = everywhere.select(axis, token)
        if not are_near(at_its_place, recorded.select(axis, token), near):
            return []
        positions = []
        for position in range(everywhere.shape[axis]):
            if are_near(everywhere.select(axis, position), numbers, near):
                positions.append(position)
        return positions


def tokens_before(side: Side, stage: str) -> Tokens | None:
    """Return what a stage is computed from, if that has a dimension of positions."""
    if stage in _INPUTS:
        return _of_input(side, stage)
    if not stage.endswith("_heads"):
        return None
    for name in MADE_OF[stage]:
        tensor = side.attention.stages.get(name)
        dims = [] if tensor is None else dims_of(side.names.of_stage(name))
        sequence = "query" if name in ("q_proj", "query") else "key"
        if tensor is not None and [sequence] in dims:
            return Tokens(side, stage, tensor, dims.index([sequence]))
    return None


def _of_input(side: Side, stage: str) -> Tokens | None:
    """Return the first input of the run, `batch position …`, that has as many positions as the stage."""
    dims = dims_of(side.names.of_stage(stage)) if stage in side.attention.stages else []
    sequence = "query" if stage == "query" else "key"
    if [sequence] not in dims:
        return None
    length = side.attention.stages[stage].shape[dims.index([sequence])]
    for named in side.run.recording.inputs:
        if len(named.tensor.shape) > 1 and named.tensor.shape[1] == length:
            return Tokens(side, stage, named.tensor, 1)
    return None
