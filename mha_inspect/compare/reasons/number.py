"""The same operations compute with another number on each side, e.g. with another epsilon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...graph.rerun import between, run_again
from ...record.ops import Op, TensorRef
from ..pair import Difference, Pair, Side, Why
from ..replay import content_of
from .made_of import equal_stages


def number(pair: Pair, difference: Difference) -> Why | None:
    """Return a number with which the same operations compute on one side and not on the other.

    The operations of the right run again with the number of the left.
    """
    stage = difference.stage
    if pair.left.attention.branches or pair.right.attention.branches:
        return None
    equal = equal_stages(pair, stage)
    our_steps = _steps_from(equal, pair.left, stage)
    their_steps = _steps_from(equal, pair.right, stage)
    if not our_steps or [op.name for op in our_steps] != [op.name for op in their_steps]:
        return None
    for ours, theirs in zip(our_steps, their_steps, strict=True):
        for setting in _unlike_settings(ours, theirs):
            changed = {theirs.index: setting.put_into(theirs)}
            content = _content_with(pair.right, stage, their_steps, changed)
            if content is not None and difference.is_explained_by(content):
                return _computed_with(setting, theirs, difference)
    return None


def _steps_from(equal: Sequence[str], side: Side, stage: str) -> list[Op]:
    """Return the operations that compute a stage from equal stages before it; without any, from the inputs."""
    recording = side.run.recording
    stages = side.attention.stages
    sources = [stages[name] for name in equal]
    if not sources:
        sources = [named.tensor for named in recording.inputs]
    return between(recording, {tensor.id for tensor in sources}, stages[stage])


def _computed_with(setting: _Setting, op: Op, difference: Difference) -> Why:
    """Return that an operation computes a stage with another number on each side; `op` is that of the right."""
    where, stage = difference.where, difference.stage
    ours = _written(setting.left)
    theirs = _written(setting.right)
    return Why(
        "number",
        f"{op.base_name} computes {stage} with {setting.name} {ours} {where.left} and "
        f"{theirs} {where.right} ({op.source}). With {ours} {stage} is the same.",
    )


@dataclass(frozen=True)
class _Setting:
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


def _unlike_settings(left: Op, right: Op) -> Iterator[_Setting]:
    """Yield the numbers and dtypes in which the arguments of two operations differ."""
    for place, (ours, theirs) in enumerate(zip(left.args, right.args, strict=False)):
        if _are_unlike(ours, theirs):
            yield _Setting(place, _argument(right, place), ours, theirs)
    for name, ours in left.kwargs.items():
        theirs = right.kwargs.get(name)
        if _are_unlike(ours, theirs):
            yield _Setting(name, name, ours, theirs)


def _are_unlike(left: object, right: object) -> bool:
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


def _content_with(side: Side, stage: str, ops: Sequence[Op], changed: Mapping[int, Op]) -> Tensor | None:
    """Return a stage in canonical axes with some operations changed, by index; None if one cannot run again."""
    computed: dict[int, Tensor] = {}

    def content(tensor: TensorRef) -> Tensor:
        if tensor.id in computed:
            return computed[tensor.id]
        return content_of(side.kept, tensor)

    graph = side.run.graph
    try:
        with torch.no_grad():
            for op in ops:
                results = run_again(graph, changed.get(op.index, op), content)
                computed.update(results)
    except Exception:  # an operation may raise anything when called directly
        return None
    made = computed.get(side.attention.stages[stage].id)
    return None if made is None else side.in_canonical_axes(stage, made)


def _written(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value).removeprefix("torch.")
