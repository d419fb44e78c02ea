"""The parameters under several head counts side by side, and what changes between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..naming.parameter_words import ParameterRole
from ..reports.params import HeadCountColumn
from ..text import first_few, listed


@dataclass(frozen=True)
class Counted:
    """A module under one head count."""

    num_heads: int
    head_dim: int
    parameters: Mapping[str, Tensor]
    roles: Mapping[str, ParameterRole]


@dataclass(frozen=True)
class _Change:
    """What became of the baseline's parameters under another head count."""

    num_heads: int
    shapes: tuple[str, ...]
    """`wq.weight [512, 512] becomes [256, 256]`."""
    values: tuple[str, ...]
    """Names whose shape is the same and whose content is not."""
    gone: tuple[str, ...]
    new: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.shapes or self.values or self.gone or self.new)


def side_by_side(counted: Sequence[Counted]) -> tuple[tuple[HeadCountColumn, ...], str]:
    """Return a column a head count, and a sentence on what changes from the first: found by comparing, bit for bit."""
    baseline, *others = counted
    changes = [_compare(baseline.parameters, other.parameters, other.num_heads) for other in others]
    return tuple(map(_column, counted)), _sentence(counted, changes)


def _column(one: Counted) -> HeadCountColumn:
    first = {
        name: tuple(piece for piece in role.heads if piece.head == 0)
        for name, role in one.roles.items()
        if name in one.parameters
    }
    return HeadCountColumn(
        num_heads=one.num_heads,
        head_dim=one.head_dim,
        numel=sum(parameter.numel() for parameter in one.parameters.values()),
        shapes={name: tuple(parameter.shape) for name, parameter in one.parameters.items()},
        first_head={name: first[name] for name in one.parameters if first.get(name)},
    )


def _compare(baseline: Mapping[str, Tensor], other: Mapping[str, Tensor], num_heads: int) -> _Change:
    shapes, values = [], []
    for name, left in baseline.items():
        right = other.get(name)
        if right is None:
            continue
        if left.shape != right.shape:
            shapes.append(f"{name} {list(left.shape)} becomes {list(right.shape)}")
        elif not left.is_meta and not torch.equal(left, right):
            values.append(name)
    return _Change(
        num_heads=num_heads,
        shapes=tuple(shapes),
        values=tuple(values),
        gone=tuple(name for name in baseline if name not in other),
        new=tuple(name for name in other if name not in baseline),
    )


def _sentence(counted: Sequence[Counted], changes: Sequence[_Change]) -> str:
    if any(changes):
        return " ".join(_describe(counted[0].num_heads, change) for change in changes if change)
    heads, widths = (
        [str(n) for n in sizes] for sizes in zip(*((o.num_heads, o.head_dim) for o in counted), strict=True)
    )
    known = not any(parameter.is_meta for parameter in counted[0].parameters.values())
    same = (
        "the same shapes and the same values, bit for bit,"
        if known
        else "the same shapes (on meta they hold no values)"
    )
    return (
        f"Nothing but the slices: all {len(counted[0].parameters)} parameters have {same} with {listed(heads)} heads. "
        f"Only which rows and columns belong to a head changes: head_dim {listed(widths)}."
    )


def _describe(baseline: int, change: _Change) -> str:
    shapes, new, gone, values = (
        first_few(names, 3) for names in (change.shapes, change.new, change.gone, change.values)
    )
    parts = [shapes, new and f"{len(change.new)} new: {new}", gone and f"{len(change.gone)} gone: {gone}"]
    parts.append(values and f"other values in {values}")
    return f"From {baseline} to {change.num_heads} heads the parameters change: {'; '.join(filter(None, parts))}."
