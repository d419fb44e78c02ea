"""The parameters of two sides side by side, and how the one maps onto the other."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from einops import repeat
from torch import Tensor, nn

from ..measure.weights import Weights, as_matrix, matrix_shape
from ..naming.parameters import Projection, indices_of, runs_of
from ..reports.diff import ParameterPair, ParameterPlace
from .side import Side

_IN_ORDER = ("W_q", "b_q", "W_k", "b_k", "W_v", "b_v", "W_o", "b_o", "bias_k", "bias_v")


@dataclass(frozen=True)
class _Held:
    """A matrix or bias of all heads, as one side keeps it."""

    place: ParameterPlace
    heads: int
    inner: int
    """Numbers of a row of a head; one for a bias."""
    rows_of_head: int
    matrix: Tensor
    in_one_piece: bool
    """Whether the parameters hold it in rows and columns that follow each other."""


def parameter_pairs(left: Side, right: Side) -> tuple[ParameterPair, ...]:
    """Return where each side keeps each matrix and bias, and how the one maps onto the other, in the formula's order.

    Empty for sides of several attentions, and where it cannot be told.
    """
    both = [run.weights for run in (left, right)]
    if any(len(weights) != 1 or weights[0].missing for weights in both):
        return ()
    ours, theirs = (_held(weights[0]) for weights in both)
    return tuple(_pair(part, ours.get(part), theirs.get(part)) for part in _IN_ORDER if part in {**ours, **theirs})


def _pair(part: str, left: _Held | None, right: _Held | None) -> ParameterPair:
    ours, theirs = (None if held is None else held.place for held in (left, right))
    return ParameterPair(part, ours, theirs, _mapping(part, left, right))


def _held(weights: Weights) -> dict[str, _Held]:
    numbers = weights.read()
    found = {}
    for part, own in weights.projections.items():
        shape, which, in_one_piece = _extent(own, weights.module)
        names = own.parameters
        where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        numel = sum(one.numel for one in own.parts)
        where = f"{where} {which}".rstrip() if in_one_piece else f"a part of {where}"
        heads, rows = (1, own.shape[0]) if part == "b_o" else own.shape[:2]
        inner = own.parts[0].inner
        found[part] = _Held(
            place=ParameterPlace(names, shape, where, numel),
            heads=heads,
            inner=1 if inner is None else inner[0],
            rows_of_head=rows,
            matrix=as_matrix(part, numbers[part]),
            in_one_piece=in_one_piece,
        )
    return found


def _extent(own: Projection, module: nn.Module) -> tuple[tuple[int, ...], str, bool]:
    """The shape of what the first parameter holds of it, which rows these are, and whether they are in one piece."""
    part = own.parts[0]
    tensor = module.get_parameter(own.parameters[0])
    places = [
        torch.cat([of[head] for head in sorted(of)]) for of in (indices_of(part, dim) for dim in range(tensor.dim()))
    ]
    runs = [runs_of(own_places) for own_places in places]
    numel = sum(one.numel for one in own.parts if one.parameter.name == own.parameters[0])
    lengths = [stop - start for (start, stop), *_ in runs]
    if any(len(run) != 1 for run in runs) or math.prod(lengths) != numel:
        return matrix_shape(own.part, own.shape), "", numel == tensor.numel()
    partly = [dim for dim, length in enumerate(lengths) if length < tensor.shape[dim]]
    shape = tuple(length for length in lengths if length > 1 or tensor.dim() < 3) or (1,)
    if not partly:
        return shape, "", True
    if tensor.dim() > 2 or len(partly) > 1:
        return shape, "", False
    unit = "elements" if tensor.dim() == 1 else ("rows", "columns")[partly[0]]
    start, stop = runs[partly[0]][0]
    return shape, f"{unit} {start}–{stop - 1}", True


def _mapping(part: str, left: _Held | None, right: _Held | None) -> str:
    if left is None or right is None:
        missing = "left" if left is None else "right"
        return f"the {missing} has none: as if it were the identity" if part == "W_o" else f"the {missing} has none"
    ours, theirs = left.place, right.place
    if ours.numel == theirs.numel and left.matrix.shape == right.matrix.shape:
        if not _are_equal(left.matrix, right.matrix):
            return "other numbers"
        one_each = sorted((left, right), key=lambda held: len(held.place.names))
        if len(one_each[0].place.names) == 1 < len(one_each[1].place.names) and one_each[0].in_one_piece:
            return _one_for_each_head(one_each[1], one_each[0])
        if left.heads != right.heads:
            return f"the same numbers, cut into {left.heads} heads and into {right.heads}"
        return "the same numbers"
    if len(ours.names) == len(theirs.names) > 1 and left.rows_of_head == right.rows_of_head and _agree(left, right):
        few = min(left.inner, right.inner)
        return f"of head h, columns {_run(few)} are in both; the other columns are in one only"
    many, one = (left, right) if len(ours.names) > len(theirs.names) else (right, left)
    has_one_each = len(many.place.names) == many.heads == one.heads > len(one.place.names) == 1
    if has_one_each and one.in_one_piece and _agree(many, one):
        return _one_for_each_head(many, one)
    fewer, more = sorted((left, right), key=lambda held: held.heads)
    if part[-1] in "kv" and more.heads > fewer.heads and more.heads % fewer.heads == 0:
        each = more.heads // fewer.heads
        repeated = repeat(fewer.matrix, "(heads d) ... -> (heads each d) ...", heads=fewer.heads, each=each)
        if _are_equal(repeated, more.matrix):
            return f"{fewer.heads} key/value heads, each of them standing {each} times in the other"
    return f"{ours.numel:,} numbers against {theirs.numel:,}"


def _are_equal(left: Tensor, right: Tensor) -> bool:
    """Whether both hold the same numbers, as far as the coarser dtype holds them."""
    coarser = max((left.dtype, right.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    return torch.equal(left.to(coarser).cpu(), right.to(coarser).cpu())


def _agree(left: _Held, right: _Held) -> bool:
    """Whether the one with fewer numbers has them in the same places as the other one."""
    fewer, more = sorted((left, right), key=lambda held: held.place.numel)
    if fewer.matrix.shape != more.matrix.shape:
        return False
    places = fewer.matrix != 0
    return _are_equal(fewer.matrix[places], more.matrix[places])


def _one_for_each_head(many: _Held, one: _Held) -> str:
    """How one tensor for all heads is made of one for each."""
    rows = _run(one.rows_of_head)
    each = re.sub(r"(?<![A-Za-z0-9])0(?![A-Za-z0-9])", "h", many.place.names[0])
    unit = "rows" if one.matrix.dim() == 2 else "elements"
    if one.place.numel == many.place.numel:
        return f"{unit} {rows} are all of {each}"
    return f"{unit} {rows}, columns {_run(many.inner)} are all of {each}; the other columns are not there"


def _run(step: int) -> str:
    """`64h to 64h+63`."""
    return f"{step}h to {step}h+{step - 1}" if step > 1 else "h"
