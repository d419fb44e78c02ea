"""Measure attention that divides after the product with the values: does the sum belong to what it divides?

    numbers = (q @ k.mT).exp()                                     # batch heads query key
    context = numbers @ v / numbers.sum(-1, keepdim=True)

The average of values that are all one is one. So this part is run again on drawn scores and such values, however many
pieces of the keys it has: a numerator that is masked alone, or rescaled otherwise than its sum, gives other numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..record.ops import Op, TensorRef
from .attention import Attention
from .dataflow import Graph
from .ids import by_id
from .replay import NotReplayedError, Region, Replay, drawn, in_layout, measuring, region
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


def _weights_of(turn: Attention) -> TensorRef:
    """Return the factor of the product with the values that is the exponentials."""
    return turn.value_product.right if turn.value_first else turn.value_product.left


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


def with_exponentials_masked(
    graph: Graph,
    turn: Attention,
    constants: Constants,
) -> Attention:
    """Return an attention with what masks its exponentials, e.g. `scores.exp().tril()`, or multiplies them by numbers.

    It is read where these numbers are known, and where exponentials and weights have the same layout.
    """
    weights, exponentials = _weights_of(turn), turn.softmax.output
    if turn.divided is None or weights.id == exponentials.id:
        return turn
    part = region(graph, (exponentials,), weights)
    content = _content_for_ones(graph, part, constants)
    alike = [op for op in part.ops if op.output.shape == exponentials.shape]
    if content is None or not alike:
        return turn
    factors = content[alike[-1].output.id]
    if not _has_same_numbers(factors, content[weights.id]):
        return turn
    changing = []
    for op in alike:
        if bool((content[op.output.id] != 1).any()):
            changing.append(op)
    if not changing:
        return turn
    seen = factors != 0
    return replace(
        turn,
        seen=None if bool(seen.all()) else seen,
        masks=_with_mask(turn.masks, changing),
        has_factors=torch.unique(factors[seen]).numel() > 1,
    )


def _content_for_ones(
    graph: Graph,
    part: Region,
    constants: Constants,
) -> dict[int, Tensor] | None:
    """Return the content of each tensor of a region for a source of ones; None if that is unknown."""
    (source,) = part.sources
    try:
        with measuring():
            replay = Replay(graph, part, constants)
            content = replay.run({source.id: _filled(source, 1.0)})
    except NotReplayedError:
        return None
    return None if replay.unknown else content


def _has_same_numbers(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same numbers in any order: between them there may be reshapes."""
    return torch.equal(left.flatten().sort().values, right.flatten().sort().values)


def _with_mask(masks: tuple[Op, ...], changing: Sequence[Op]) -> tuple[Op, ...]:
    """Return masks with the first operation that changes exponentials, if none of these is among the masks."""
    indices = {op.index for op in masks}
    if any(op.index in indices for op in changing):
        return masks
    return (*masks, changing[0])


def _filled(tensor: TensorRef, number: float) -> Tensor:
    """Return one number everywhere, in the memory layout of a tensor."""
    return in_layout(torch.full(tensor.shape, number, dtype=torch.float64), tensor)
