"""Both sides are linear in the same stage before, with other matrices: a weight read the other way, or an adapter.

k_proj on the left = x · W        k_proj on the right = x · Wᵀ
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from ..forms.order import in_turn, places_in
from ..merged import product_of
from ..pair import Difference, Pair, Side, Why, are_near
from ..replay import LostError, again, content_of
from .made_of import MADE_OF

RETURNED = "the output"
"""In the place of a stage: the first tensor that a run returns."""
_MOST_RUNS = 64
"""The most runs of the operations between two stages, to learn a matrix."""
_NEAR = 1e-4
"""Matrices that are this near, relative to their largest number, are the same; in float32."""
_SINGULAR = 1e-3
"""A singular value below this share of the largest one is rounding."""


@dataclass(frozen=True, eq=False)
class _Map:
    """A stage as a linear function of a stage before it: tokens · matrix + offset."""

    matrix: Tensor
    """`inner outer`."""
    offset: Tensor
    """`outer`."""


def linear(pair: Pair, difference: Difference) -> Why | None:
    """Return how the matrices of both sides differ, if both are linear in a stage before that is equal."""
    is_after_a_weight = difference.stage.endswith(("_proj", "_heads")) or difference.stage == "output"
    if not is_after_a_weight or not difference.is_clear:
        return None
    for source in MADE_OF[difference.stage]:
        if pair.difference(source) is not None:
            continue
        ours = _map_of(pair.left, source, difference.stage, difference.left, difference.near)
        theirs = _map_of(pair.right, source, difference.stage, difference.right, difference.near)
        if ours is None or theirs is None or not are_near(ours.offset, theirs.offset, difference.near):
            continue
        for reason in (_transposed, _of_features, _of_low_rank):
            why = reason(ours, theirs, difference)
            if why is not None:
                return why
    return None


def linear_after(pair: Pair, difference: Difference) -> Why | None:
    """Return how the matrices of both sides differ, if what both return is linear in the same concat."""
    ours, theirs = pair.left.stage("concat"), pair.right.stage("concat")
    if ours is None or theirs is None or pair.difference("concat") is not None:
        return None
    left = _map_of(pair.left, "concat", RETURNED, difference.left, difference.near)
    right = _map_of(pair.right, "concat", RETURNED, difference.right, difference.near)
    if left is None or right is None:
        return None
    low_rank = _of_low_rank(left, right, difference)
    if are_near(left.offset, right.offset, difference.near):
        return _transposed(left, right, difference) or low_rank
    if low_rank is None:
        return None
    return replace(low_rank, sentence=f"{low_rank.sentence} Their biases differ too.")


def _map_of(side: Side, source: str, stage: str, content: Tensor, near: float) -> _Map | None:
    """Return a stage as a linear function of another one, from runs with one feature in each token; None if it is none.

    `content` is the stage in canonical axes.
    """
    tensor = side.attention.stages.get(source)
    plain = side.stage(source)
    if tensor is None or plain is None or side.attention.branches:
        return None
    inner = tensor.shape[-1]
    tokens = prod(tensor.shape[:-1])
    if not plain.is_floating_point() or not tokens or inner > _MOST_RUNS * tokens:
        return None
    try:
        found = _learned(side, source, stage)
    except LostError:
        return None
    given = plain.double().flatten(0, -2)
    made = _by_token(content)
    if len(given) != len(made):
        return None
    # Each token has the same matrix and offset, and nothing else is in it.
    expected = given @ found.matrix + found.offset
    return found if are_near(made, expected, near) else None


def _learned(side: Side, source: str, stage: str) -> _Map:
    """Return the matrix from one stage to another, from runs with one feature in each token.

    Raise `LostError` if they cannot be run.
    """
    recorded = content_of(side.kept, side.attention.stages[source])
    inner = recorded.shape[-1]
    tokens = recorded.numel() // inner
    without = _ran(side, source, stage, torch.zeros_like(recorded))
    rows: list[Tensor] = []
    for start in range(0, inner, tokens):
        features = torch.arange(start, start + tokens) % inner
        marked = torch.nn.functional.one_hot(features, inner)
        marked = marked.to(recorded).view(recorded.shape)
        rows.append(_ran(side, source, stage, marked) - without)
    matrix = torch.cat(rows)[:inner]
    return _Map(matrix, without[0])


def _ran(side: Side, source: str, stage: str, value: Tensor) -> Tensor:
    """Return `token features` of a stage where another one has these numbers. Raise `LostError` if it cannot."""
    if stage == RETURNED:
        return _by_token(again(side.kept, side.attention.stages[source], value, side.run.recording.outputs[0].tensor))
    made = again(side.kept, side.attention.stages[source], value, side.attention.stages[stage])
    content = side.in_canonical_axes(stage, made)
    if content is None:
        raise LostError
    return _by_token(content)


def _by_token(content: Tensor) -> Tensor:
    """Return `batch position features` or `batch heads position head_dim` as `token features`, in float64."""
    if content.dim() == 4:
        content = content.transpose(1, 2).flatten(2)
    return content.double().flatten(0, -2)


def _transposed(ours: _Map, theirs: _Map, difference: Difference) -> Why | None:
    """Return that one side reads the weight the other way: nn.Linear has `out in`, and `x @ weight` reads `in out`."""
    left = ours.matrix
    if not _are_equal(left, theirs.matrix.T):
        return None
    where, stage = difference.where, difference.stage
    sentence = f"The weight of {stage} {where.left} is the transposed one {where.right}."
    for name, weight in _named(difference.parameters.of_dimensions(2), left):
        plain, turned = where.right, where.left
        if _are_equal(weight, left):
            plain, turned = turned, plain
        read = f"{stage} is x · W {plain} and x · Wᵀ {turned}"
        sentence = f"{read}, where W is {name}: one side reads it transposed."
        break
    return Why("transposed", sentence, fact="transposed")


def _of_features(ours: _Map, theirs: _Map, difference: Difference) -> Why | None:
    """Return that the features of the input are read in another order."""
    near = _NEAR * float(ours.matrix.abs().max())
    places = places_in(theirs.matrix, ours.matrix, 0, near)
    if places is None or sorted(places) != [*range(len(places))]:
        return None
    shown = in_turn(places)
    where = difference.where
    sentence = f"{difference.stage} reads the features of its input in another order"
    return Why("order", f"{sentence}: {where.left} {shown} of those {where.right}.", fact=shown)


def _of_low_rank(ours: _Map, theirs: _Map, difference: Difference) -> Why | None:
    """Return the rank of the difference of two matrices, if it is low: an adapter is on one side alone."""
    left, right = ours.matrix, theirs.matrix
    if left.shape != right.shape:
        return None
    added = left - right
    values = torch.linalg.svdvals(added)
    rank = int((values > _SINGULAR * values[0]).sum())
    if not 0 < rank <= min(left.shape) // 4:
        return None
    here, there = difference.where.left, difference.where.right
    weights = f"weights of {difference.stage}"
    near = _NEAR * float(added.abs().max())
    product = product_of(added.T, difference.parameters.named, near)
    if product is not None:
        return Why("low rank", f"The {weights} {here} are those {there} with {product.words} added.")
    matrices = difference.parameters.of_dimensions(2)
    for called, other, matrix in ((here, there, right), (there, here, left)):
        name = next(_named(matrices, matrix), ("", matrix))[0]
        if name:
            alone = f"{difference.stage} is of {name} alone {other}"
            sentence = f"{alone}, and of {name} with a matrix of rank {rank} added {called}."
            return Why("low rank", sentence, fact=f"{rank} {called}")
    return Why("low rank", f"The {weights} differ by a matrix of rank {rank}, of {min(left.shape)}.")


def _named(matrices: Mapping[str, Tensor], matrix: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that are a matrix or its transposed one, whole or as a block of their rows, with a name."""
    for name, parameter in matrices.items():
        weight = parameter.detach().double().to(matrix.device)
        for rows in sorted({*matrix.shape}):
            if not rows or not len(weight) or len(weight) % rows:
                continue
            for start in range(0, len(weight), rows):
                block = weight[start : start + rows]
                if not _are_equal(block, matrix) and not _are_equal(block.T, matrix):
                    continue
                is_whole = rows == len(weight)
                called = name if is_whole else f"rows {start}–{start + rows - 1} of {name}"
                yield called, block


def _are_equal(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    return are_near(left, right, _NEAR * float(left.abs().max()))
