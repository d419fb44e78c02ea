"""The tokens of one side are at other positions where positions enter, e.g. in a rotation."""

from __future__ import annotations

from dataclasses import dataclass

from ...naming.pattern import dims_of
from ...record.ops import TensorRef
from ..forms.positions import overlap, shifts_of
from ..pair import Difference, Pair, Side, Why, are_near
from ..replay import LostError, again, content_of
from .made_of import MADE_OF


@dataclass(frozen=True)
class _Tokens:
    """A tensor that a stage is computed from, one token a position."""

    tensor: TensorRef
    dim: int
    """Its dimension of positions."""


def position(pair: Pair, difference: Difference) -> Why | None:
    """Return by how many positions the tokens of one side are elsewhere: the right is replayed.

    Its tokens are moved along the sequence before the stage; where they are at the positions of the left side, they
    get the numbers of the left.
    """
    side, stage = pair.right, difference.stage
    of_positions = [axis for axis, name in enumerate(difference.names) if name in ("query", "key")]
    tokens = _tokens_before(side, stage)
    if not of_positions or tokens is None:
        return None
    tensor = tokens.tensor
    try:
        numbers = content_of(side.kept, tensor)
        for shift in shifts_of(tensor.shape[tokens.dim]):
            moved = again(side.kept, tensor, numbers.roll(shift, tokens.dim), side.attention.stages[stage])
            content = side.in_canonical_axes(stage, moved)
            if content is None or content.shape != difference.left.shape:
                return None
            ours, theirs = overlap(difference.left, content, of_positions[0], shift)
            if are_near(ours, theirs, difference.near):
                return _moved_by(shift, difference)
    except LostError:
        pass
    return None


def _moved_by(shift: int, difference: Difference) -> Why:
    """Return the sentence `Position p on the left is q_heads of position p + 1 on the right.`, with its proof."""
    where, stage = difference.where, difference.stage
    sign = "+" if shift > 0 else "-"
    sentence = f"Position p {where.left} is {stage} of position p {sign} {abs(shift)} {where.right}."
    return Why("position", f"{sentence} Moved there, the tokens give the same {stage}.", fact=str(shift))


def _tokens_before(side: Side, stage: str) -> _Tokens | None:
    """Return what a stage is computed from, if it has a dimension of positions."""
    if stage.endswith("_heads"):
        return _tokens_of_heads(side, stage)
    if stage in ("query", "key", "value"):
        return _tokens_of_input(side, stage)
    return None


def _tokens_of_heads(side: Side, stage: str) -> _Tokens | None:
    """Return the projection that heads are made of, or else the input of the projection."""
    for name in MADE_OF[stage]:
        tensor = side.attention.stages.get(name)
        if tensor is None:
            continue
        dims = dims_of(side.names.of_stage(name))
        sequence = "query" if name in ("q_proj", "query") else "key"
        if [sequence] in dims:
            return _Tokens(tensor, dims.index([sequence]))
    return None


def _tokens_of_input(side: Side, stage: str) -> _Tokens | None:
    """Return the first input of the run, `batch position …`, that has as many positions as the stage."""
    dims = dims_of(side.names.of_stage(stage))
    sequence = "query" if stage == "query" else "key"
    if [sequence] not in dims:
        return None
    length = side.attention.stages[stage].shape[dims.index([sequence])]
    for named in side.run.recording.inputs:
        if len(named.tensor.shape) > 1 and named.tensor.shape[1] == length:
            return _Tokens(named.tensor, 1)
    return None
