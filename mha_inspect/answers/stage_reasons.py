"""Find why the first stage that differs does so: each replacement is tried, and makes both sides the same there.

Two kinds are tried. The stage of one side is multiplied, reordered, moved by positions, or rounded; or its operations
run again from what both sides have in common, with a number of the other side's code, or with its tokens at other
positions. The first that gives the other side's numbers is the reason. Without one, there is no sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..graph.rerun import between, run_again
from ..measure.replaced import overlap, replacement, shifts_of
from ..naming.axes import AxisNames
from ..naming.canonical import canonical, sizes_in
from ..naming.pattern import CANONICAL_AXES, dims_of
from ..record.ops import Op, TensorRef
from ..reports.diff import DiffReason
from .check.replay import KeptRun, LostError, again, content_of
from .comparable_run import ComparableRun

_MADE_OF = {
    "q_proj": ("query",),
    "k_proj": ("key",),
    "v_proj": ("value",),
    "q_heads": ("q_proj", "query"),
    "k_heads": ("k_proj", "key"),
    "v_heads": ("v_proj", "value"),
    "scores": ("q_heads", "k_heads"),
    "masked_scores": ("scores",),
    "weights": ("masked_scores", "scores"),
    "context": ("weights", "v_heads"),
    "concat": ("context",),
    "output": ("concat", "context"),
}
"""Stage to the stages that it is computed from; of alternatives, the nearest first."""
_CERTAIN = 10
"""Numbers within this many rounding errors are the same."""
_LEAST = 64
"""The same, in epsilons of the largest number: the rounding error may have been measured as 0."""


@dataclass(frozen=True, eq=False)
class _Side:
    """One stage of one side, with what its operations need to run again."""

    run: ComparableRun
    place: int
    stage: str

    @property
    def attention(self) -> Attention:
        """The attention of the stage."""
        return self.run.attentions[self.place][0]

    @property
    def names(self) -> AxisNames:
        """The names of its axes."""
        return self.run.attentions[self.place][1]

    @property
    def tensor(self) -> TensorRef:
        """The stage as it was recorded."""
        return self.attention.stages[self.stage]

    @cached_property
    def kept(self) -> KeptRun:
        """The run with the values of its tensors."""
        recording = self.run.run.recording
        return KeptRun(self.run.run, self.run.subject.leaves(recording))

    @cached_property
    def content(self) -> Tensor | None:
        """The stage in canonical axes."""
        return self.run.content(self.place, self.stage)

    def in_canonical_axes(self, value: Tensor) -> Tensor | None:
        """Return another value of the recorded stage in canonical axes, without its scale."""
        sizes = sizes_in(self.attention, self.names, self.stage)
        axes = self.names.of_stage(self.stage)
        content = canonical(value, self.stage, axes, sizes, self.names.head_order)
        scale = self.attention.early_scales.get(self.stage) or 1
        return content if content is None or scale == 1 else content / scale

    def sources(self, equal: Sequence[str]) -> dict[int, TensorRef]:
        """Return what the stage is computed from: equal stages before it, and the inputs of the run."""
        stages = self.attention.stages
        near = [stages[name] for name in equal if name in stages]
        given = [] if near else [named.tensor for named in self.run.run.recording.inputs]
        return {tensor.id: tensor for tensor in (*near, *given)}


def stage_reason(
    left: ComparableRun, right: ComparableRun, place: int, stage: str, called: tuple[str, str]
) -> DiffReason | None:
    """Return why a stage differs, the first of an attention that does; None if no tried replacement was the reason.

    `called` has the words for the sides: `on the left`.
    """
    if any(place >= len(side.attentions) for side in (left, right)):
        return None
    ours, theirs = (_Side(side, place, stage) for side in (left, right))
    if ours.content is None or theirs.content is None or ours.content.shape != theirs.content.shape:
        return None
    near = _nearness(ours, theirs)
    tried = (
        *_of_numbers(ours, theirs, near, called),
        *_of_values(ours, theirs, near, called),
        *_of_positions(ours, theirs, near, called),
    )
    return next(iter(tried), None)


def _nearness(left: _Side, right: _Side) -> float:
    """Return the distance of two numbers up to which they are the same."""
    assert left.content is not None
    assert right.content is not None
    sides = ((left, right.content), (right, left.content))
    floor = max(side.run.floor(side.place, side.stage, other, ()) for side, other in sides)
    largest = max(_largest(left.content), _largest(right.content))
    steps = max(torch.finfo(content.dtype).eps for content in (left.content, right.content))
    return max(_CERTAIN * floor, _LEAST * steps * largest)


def _largest(content: Tensor) -> float:
    finite = content[content.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _of_values(left: _Side, right: _Side, near: float, called: tuple[str, str]) -> Iterator[DiffReason]:
    """Yield a change of the stage itself."""
    assert left.content is not None
    assert right.content is not None
    found = replacement(left.stage, CANONICAL_AXES[left.stage], (left.content, right.content), near, called)
    if found is not None:
        yield DiffReason(found.kind, found.sentence)


def _equal_stages(left: _Side, right: _Side) -> list[str]:
    """Return the stages that this one is computed from; the first stage that differs has equal ones before it."""
    both = left.attention.stages.keys() & right.attention.stages.keys()
    names = [name for name in _MADE_OF.get(left.stage, ()) if name in both]
    joins_two = left.stage in ("scores", "context")
    return names if joins_two else names[:1]


# -- a number in the code ---------------------------------------------------------------------------------------------


def _of_numbers(left: _Side, right: _Side, near: float, called: tuple[str, str]) -> Iterator[DiffReason]:
    """Yield a number with which the same operations compute on one side and not on the other, e.g. an epsilon."""
    if left.attention.branches or right.attention.branches:
        return
    equal = _equal_stages(left, right)
    sides = [(side, side.sources(equal)) for side in (left, right)]
    ours, theirs = (between(side.run.run.recording, {*sources}, side.tensor) for side, sources in sides)
    if not ours or [op.name for op in ours] != [op.name for op in theirs]:
        return
    expected = left.content
    for one, other in zip(ours, theirs, strict=True):
        for number in _unlike_numbers(one, other):
            changed = {other.index: number.put_into(other)}
            value = _run_with(right, sides[1][1], theirs, changed)
            content = None if value is None else right.in_canonical_axes(value)
            if content is None or expected is None or not _are_near(content, expected, near):
                continue
            name, mine, yours = number.name, number.left, number.right
            sentence = (
                f"{one.base_name} computes {left.stage} with {name} {_written(mine)} {called[0]} and "
                f"{_written(yours)} {called[1]} ({other.source}). With {_written(mine)} {left.stage} is the same."
            )
            yield DiffReason("number", sentence)
            return


@dataclass(frozen=True)
class _Number:
    """An argument of an operation that is another number on the other side."""

    at: int | str
    """Its place, or its keyword."""
    name: str
    left: Any
    right: Any

    def put_into(self, op: Op) -> Op:
        """Return the operation of the right side with the number of the left."""
        if isinstance(self.at, str):
            return replace(op, kwargs={**op.kwargs, self.at: self.left})
        return replace(op, args=(*op.args[: self.at], self.left, *op.args[self.at + 1 :]))


def _unlike_numbers(left: Op, right: Op) -> Iterator[_Number]:
    """Yield the numbers and dtypes in which the arguments of two operations differ."""
    for place, (one, other) in enumerate(zip(left.args, right.args, strict=False)):
        if _is_setting(one) and _is_setting(other) and one != other:
            yield _Number(place, _argument(right, place), one, other)
    for name in left.kwargs.keys() & right.kwargs.keys():
        one, other = left.kwargs[name], right.kwargs[name]
        if _is_setting(one) and _is_setting(other) and one != other:
            yield _Number(name, name, one, other)


def _is_setting(value: object) -> bool:
    return isinstance(value, (bool, int, float, str))


def _argument(op: Op, place: int) -> str:
    """Return the name of an argument in the signature of an operation: `eps`."""
    namespace, name, overload = op.name.split(".")
    schema = getattr(getattr(getattr(torch.ops, namespace, None), name, None), overload, None)
    arguments = getattr(getattr(schema, "_schema", None), "arguments", ())
    return str(arguments[place].name) if place < len(arguments) else "a number"


def _run_with(side: _Side, sources: dict[int, TensorRef], ops: Sequence[Op], changed: dict[int, Op]) -> Tensor | None:
    """Return the stage, from its sources on, with some operations changed; None if one cannot run again."""
    known: dict[int, Tensor] = {}

    def content(tensor: TensorRef) -> Tensor:
        return known[tensor.id] if tensor.id in known else content_of(side.kept, tensor)

    try:
        with torch.no_grad():
            for op in ops:
                known.update(run_again(side.run.run.graph, changed.get(op.index, op), content))
    except Exception:  # an operation may raise anything when called directly
        return None
    return known.get(side.tensor.id)


def _are_near(left: Tensor, right: Tensor, near: float) -> bool:
    if left.shape != right.shape:
        return False
    apart = (left.double() - right.double()).abs()
    apart = apart.masked_fill((left == right) | (left.isnan() & right.isnan()), 0.0).nan_to_num(torch.inf)
    return not apart.numel() or float(apart.max()) <= near


def _written(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value).removeprefix("torch.")


# -- positions --------------------------------------------------------------------------------------------------------


def _of_positions(left: _Side, right: _Side, near: float, called: tuple[str, str]) -> Iterator[DiffReason]:
    """Yield by how many positions the tokens of one side are elsewhere, where positions enter: the right is replayed.

    Its tokens are moved along the sequence before the stage; where they are at the positions of the left side, they
    get the numbers of the left.
    """
    axes = CANONICAL_AXES[left.stage].split()
    axis = next((place for place, name in enumerate(axes) if name in ("query", "key")), None)
    source = _tokens_before(right)
    if axis is None or source is None or left.content is None:
        return
    tensor, dim = source
    try:
        tokens = content_of(right.kept, tensor)
        for shift in shifts_of(tensor.shape[dim]):
            moved = again(right.kept, tensor, tokens.roll(shift, dim), right.tensor)
            content = right.in_canonical_axes(moved)
            if content is None or content.shape != left.content.shape:
                return
            if _are_near(*overlap(left.content, content, axis, shift), near):
                sentence = f"Position p {called[0]} is {left.stage} of position p {shift:+d} {called[1]}."
                sentence = sentence.replace(" +", " + ").replace(" -", " - ")
                yield DiffReason("position", f"{sentence} Moved there, the tokens give the same {left.stage}.")
                return
    except LostError:
        return


def _tokens_before(side: _Side) -> tuple[TensorRef, int] | None:
    """Return what a stage is computed from, and its dimension of positions; None if it is not known."""
    for name in _MADE_OF.get(side.stage, ()) if side.stage.endswith("_heads") else ():
        tensor = side.attention.stages.get(name)
        dims = dims_of(side.names.of_stage(name)) if tensor is not None else []
        sequence = "query" if name in ("q_proj", "query") else "key"
        if tensor is not None and [sequence] in dims:
            return tensor, dims.index([sequence])
    if side.stage not in ("query", "key", "value"):
        return None
    dims = dims_of(side.names.of_stage(side.stage))
    sequence = "query" if side.stage == "query" else "key"
    length = side.tensor.shape[dims.index([sequence])] if [sequence] in dims else 0
    for named in side.run.run.recording.inputs:
        if len(named.tensor.shape) > 1 and named.tensor.shape[1] == length:
            return named.tensor, 1
    return None
