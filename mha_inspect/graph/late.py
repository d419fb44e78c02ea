"""Measure attention that divides after the product with the values: does the sum belong to what it divides?

    numbers = (q @ k.mT).exp()                                     # batch heads query key
    context = numbers @ v / numbers.sum(-1, keepdim=True)

The average of values that are all one is one. So this part is run again on drawn scores and such values, however many
pieces of the keys it has: a numerator that is masked alone, or rescaled otherwise than its sum, gives other numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..record.ops import TensorRef
from .attention import Attention
from .dataflow import Graph
from .ids import by_id
from .replay import NotReplayedError, Replay, drawn, in_layout, measuring, region
from .rerun import Constants

_NEAR = 0.02
"""How far an average of ones is from one at most: a guard against a zero sum may make it a little smaller."""
_DRAWS = 2


def average_of_ones(
    graph: Graph,
    turns: Sequence[Attention],
    constants: Constants,
) -> tuple[float, float] | None:
    """Return the lowest and highest result of these pieces of one attention if all values are one.

    None if it is one everywhere, as in an average, or if this part cannot be run again.
    """
    divided = turns[0].divided
    if divided is None:
        return None
    scores = by_id(turn.score_product.op.output for turn in turns)
    values = by_id(map(_values_of, turns))
    if scores.keys() & values.keys():
        return None
    part = region(graph, (*scores.values(), *values.values()), divided.output)
    try:
        with measuring():
            measured = _Division(Replay(graph, part, constants), scores, values, divided.output)
            results = torch.stack([measured.of_values(1.0, draw) for draw in range(_DRAWS)])
            if _is_one(results) or measured.adds_unknown():
                return None
    except NotReplayedError:
        return None
    finite = results[results.isfinite()]
    if not finite.numel():
        return torch.nan, torch.nan
    return float(finite.min()), float(finite.max())


def _is_one(results: Tensor) -> bool:
    """Return whether these are one, or nothing for queries that see no key."""
    near = (results - 1).abs() <= _NEAR
    sees_nothing = results.isnan() | (results == 0)
    return bool((near | sees_nothing).all()) and bool(near.any())


def _values_of(turn: Attention) -> TensorRef:
    """Return the factor of the product with the values that has them."""
    return turn.value_product.left if turn.value_first else turn.value_product.right


@dataclass(frozen=True)
class _Division:
    """The part from scores and values to what is divided, by id."""

    replay: Replay
    scores: dict[int, TensorRef]
    values: dict[int, TensorRef]
    result: TensorRef

    def adds_unknown(self) -> bool:
        """Return whether the result has a part that is not of the values, and was drawn: what it is cannot be said."""
        if not self.replay.unknown:
            return False
        return bool(self.of_values(0.0, 0).nan_to_num(0.0).any())

    def of_values(self, number: float, draw: int) -> Tensor:
        """Return the result for drawn scores, and values that are all one number."""
        generator = torch.Generator().manual_seed(draw)
        given: dict[int, Tensor] = {}
        for tensor in self.scores.values():
            given[tensor.id] = drawn(tensor, generator)
        for tensor in self.values.values():
            given[tensor.id] = _filled(tensor, number)
        return self.replay.run(given, draw)[self.result.id]


def _filled(tensor: TensorRef, number: float) -> Tensor:
    """Return one number everywhere, in the memory layout of a tensor."""
    return in_layout(torch.full(tensor.shape, number, dtype=torch.float64), tensor)
