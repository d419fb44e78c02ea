"""Find why the first stage that differs does so: each replacement is tried, and makes both sides the same there.

Two kinds are tried. The stage of one side is multiplied, reordered, moved by positions, or rounded; or its operations
run again from what both sides have in common, with a number of the other side's code, or with its tokens at other
positions. The first that gives the other side's numbers is the reason. Without one, there is no sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from .comparable_run import ComparableRun, without_scale
from .replay import KeptRun, LostError, again, content_of

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
        return without_scale(content, self.attention, self.stage)

    def steps_from(self, equal: Sequence[str]) -> list[Op]:
        """Return the operations that compute the stage from equal stages before it; without any, from the inputs."""
        recording = self.run.run.recording
        stages = self.attention.stages
        sources = [stages[name] for name in equal if name in stages]
        if not sources:
            sources = [named.tensor for named in recording.inputs]
        return between(recording, {tensor.id for tensor in sources}, self.tensor)


def stage_reason(
    left: ComparableRun, right: ComparableRun, place: int, stage: str, called: tuple[str, str]
) -> DiffReason | None:
    """Return why a stage differs, the first of an attention that does; None if no tried replacement was the reason.

    `called` has the words for the sides: `on the left`.
    """
    if place >= min(len(left.attentions), len(right.attentions)):
        return None
    ours, theirs = _Side(left, place, stage), _Side(right, place, stage)
    if ours.content is None or theirs.content is None:
        return None
    if ours.content.shape != theirs.content.shape:
        return None
    near = _nearness(ours, theirs)
    for reason_of in (_of_numbers, _of_values, _of_positions):
        reason = reason_of(ours, theirs, near, called)
        if reason is not None:
            return reason
    return None


def _nearness(left: _Side, right: _Side) -> float:
    """Return the distance of two numbers up to which they are the same."""
    assert left.content is not None
    assert right.content is not None
    our_floor = left.run.floor(left.place, left.stage, right.content, ())
    their_floor = right.run.floor(right.place, right.stage, left.content, ())
    our_unit = torch.finfo(left.content.dtype).eps
    their_unit = torch.finfo(right.content.dtype).eps
    largest = max(_largest(left.content), _largest(right.content))
    return max(
        _CERTAIN * max(our_floor, their_floor),
        _LEAST * max(our_unit, their_unit) * largest,
    )


def _largest(content: Tensor) -> float:
    finite = content[content.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _of_values(left: _Side, right: _Side, near: float, called: tuple[str, str]) -> DiffReason | None:
    """Return a change of the stage itself."""
    assert left.content is not None
    assert right.content is not None
    contents = left.content, right.content
    change = replacement(left.stage, CANONICAL_AXES[left.stage], contents, near, called)
    if change is None:
        return None
    return DiffReason(change.kind, change.sentence)


def _equal_stages(left: _Side, right: _Side) -> list[str]:
    """Return the stages that this one is computed from; the first stage that differs has equal ones before it."""
    both = left.attention.stages.keys() & right.attention.stages.keys()
    names = [name for name in _MADE_OF.get(left.stage, ()) if name in both]
    joins_two = left.stage in ("scores", "context")
    return names if joins_two else names[:1]


# -- a number in the code ---------------------------------------------------------------------------------------------


def _of_numbers(left: _Side, right: _Side, near: float, called: tuple[str, str]) -> DiffReason | None:
    """Return a number with which the same operations compute on one side and not on the other, e.g. an epsilon."""
    assert left.content is not None
    if left.attention.branches or right.attention.branches:
        return None
    equal = _equal_stages(left, right)
    our_steps = left.steps_from(equal)
    their_steps = right.steps_from(equal)
    if not our_steps or [op.name for op in our_steps] != [op.name for op in their_steps]:
        return None
    for ours, theirs in zip(our_steps, their_steps, strict=True):
        for number in _unlike_numbers(ours, theirs):
            changed = {theirs.index: number.put_into(theirs)}
            content = _content_with(right, their_steps, changed)
            if content is not None and _are_near(content, left.content, near):
                return _computed_with(number, left.stage, theirs, called)
    return None


def _computed_with(number: _Number, stage: str, op: Op, called: tuple[str, str]) -> DiffReason:
    """Return that an operation computes a stage with another number on each side; `op` is that of the right."""
    on_left, on_right = called
    ours = _written(number.left)
    theirs = _written(number.right)
    return DiffReason(
        "number",
        f"{op.base_name} computes {stage} with {number.name} {ours} {on_left} and "
        f"{theirs} {on_right} ({op.source}). With {ours} {stage} is the same.",
    )


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
        args = list(op.args)
        args[self.at] = self.left
        return replace(op, args=tuple(args))


def _unlike_numbers(left: Op, right: Op) -> Iterator[_Number]:
    """Yield the numbers and dtypes in which the arguments of two operations differ."""
    for place, (ours, theirs) in enumerate(zip(left.args, right.args, strict=False)):
        if _are_unlike_settings(ours, theirs):
            yield _Number(place, _argument(right, place), ours, theirs)
    for name, ours in left.kwargs.items():
        theirs = right.kwargs.get(name)
        if _are_unlike_settings(ours, theirs):
            yield _Number(name, name, ours, theirs)


def _are_unlike_settings(left: object, right: object) -> bool:
    """Return whether two arguments are no tensors, lists or None, and not equal."""
    setting = (bool, int, float, str)
    return isinstance(left, setting) and isinstance(right, setting) and left != right


def _argument(op: Op, place: int) -> str:
    """Return the name of an argument in the signature of an operation: `eps`."""
    operation: Any = torch.ops
    for attribute in (*op.name.split("."), "_schema"):
        operation = getattr(operation, attribute, None)
    arguments = getattr(operation, "arguments", ())
    if place >= len(arguments):
        return "a number"
    return str(arguments[place].name)


def _content_with(side: _Side, ops: Sequence[Op], changed: Mapping[int, Op]) -> Tensor | None:
    """Return the stage in canonical axes with some operations changed, by index; None if one cannot run again."""
    computed: dict[int, Tensor] = {}

    def content(tensor: TensorRef) -> Tensor:
        if tensor.id in computed:
            return computed[tensor.id]
        return content_of(side.kept, tensor)

    graph = side.run.run.graph
    try:
        with torch.no_grad():
            for op in ops:
                results = run_again(graph, changed.get(op.index, op), content)
                computed.update(results)
    except Exception:  # an operation may raise anything when called directly
        return None
    if side.tensor.id not in computed:
        return None
    return side.in_canonical_axes(computed[side.tensor.id])


def _are_near(left: Tensor, right: Tensor, near: float) -> bool:
    if left.shape != right.shape:
        return False
    apart = (left.double() - right.double()).abs()
    if not apart.numel():
        return True
    # The difference of two equal infinities, or of two NaNs, is NaN.
    are_equal = (left == right) | (left.isnan() & right.isnan())
    apart = apart.masked_fill(are_equal, 0.0).nan_to_num(torch.inf)
    return float(apart.max()) <= near


def _written(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value).removeprefix("torch.")


# -- positions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tokens:
    """A tensor that a stage is computed from, one token a position."""

    tensor: TensorRef
    dim: int
    """Its dimension of positions."""


def _of_positions(left: _Side, right: _Side, near: float, called: tuple[str, str]) -> DiffReason | None:
    """Return by how many positions the tokens of one side are elsewhere, where positions enter: the right is replayed.

    Its tokens are moved along the sequence before the stage; where they are at the positions of the left side, they
    get the numbers of the left.
    """
    assert left.content is not None
    axes = CANONICAL_AXES[left.stage].split()
    of_positions = [axis for axis, name in enumerate(axes) if name in ("query", "key")]
    tokens = _tokens_before(right)
    if not of_positions or tokens is None:
        return None
    tensor = tokens.tensor
    dim = tokens.dim
    try:
        numbers = content_of(right.kept, tensor)
        for shift in shifts_of(tensor.shape[dim]):
            moved = again(right.kept, tensor, numbers.roll(shift, dim), right.tensor)
            content = right.in_canonical_axes(moved)
            if content is None or content.shape != left.content.shape:
                return None
            ours, theirs = overlap(left.content, content, of_positions[0], shift)
            if _are_near(ours, theirs, near):
                return _moved_by(shift, left.stage, called)
    except LostError:
        pass
    return None


def _moved_by(shift: int, stage: str, called: tuple[str, str]) -> DiffReason:
    """Return the sentence `Position p on the left is q_heads of position p + 1 on the right.`, with its proof."""
    on_left, on_right = called
    sign = "+" if shift > 0 else "-"
    sentence = f"Position p {on_left} is {stage} of position p {sign} {abs(shift)} {on_right}."
    return DiffReason("position", f"{sentence} Moved there, the tokens give the same {stage}.")


def _tokens_before(side: _Side) -> _Tokens | None:
    """Return what a stage is computed from, if it has a dimension of positions."""
    if side.stage.endswith("_heads"):
        return _tokens_of_heads(side)
    if side.stage in ("query", "key", "value"):
        return _tokens_of_input(side)
    return None


def _tokens_of_heads(side: _Side) -> _Tokens | None:
    """Return the projection that heads are made of, or else the input of the projection."""
    for name in _MADE_OF.get(side.stage, ()):
        tensor = side.attention.stages.get(name)
        if tensor is None:
            continue
        dims = dims_of(side.names.of_stage(name))
        sequence = "query" if name in ("q_proj", "query") else "key"
        if [sequence] in dims:
            return _Tokens(tensor, dims.index([sequence]))
    return None


def _tokens_of_input(side: _Side) -> _Tokens | None:
    """Return the first input of the run, `batch position …`, that has as many positions as the stage."""
    dims = dims_of(side.names.of_stage(side.stage))
    sequence = "query" if side.stage == "query" else "key"
    if [sequence] not in dims:
        return None
    length = side.tensor.shape[dims.index([sequence])]
    for named in side.run.run.recording.inputs:
        if len(named.tensor.shape) > 1 and named.tensor.shape[1] == length:
            return _Tokens(named.tensor, 1)
    return None
