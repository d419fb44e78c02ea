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


def side_by_side(counted: Sequence[Counted]) -> tuple[tuple[HeadCountColumn, ...], str]:
    """Return a column a head count, and a sentence on what changes from the first: found by comparing, bit for bit."""
    baseline, *others = counted
    changes = [sentence for other in others if (sentence := _change(baseline, other))]
    return tuple(map(_column, counted)), " ".join(changes) or _unchanged(counted)


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


def _change(baseline: Counted, own: Counted) -> str:
    """Say what became of the baseline's parameters; empty where all have the same shape and content."""
    pairs = {name: (left, own.parameters[name]) for name, left in baseline.parameters.items() if name in own.parameters}
    shapes = [
        f"{name} {list(left.shape)} becomes {list(right.shape)}"
        for name, (left, right) in pairs.items()
        if left.shape != right.shape
    ]
    values = [
        name
        for name, (left, right) in pairs.items()
        if left.shape == right.shape and not left.is_meta and not torch.equal(left, right)
    ]
    gone, new = ([name for name in one.parameters if name not in pairs] for one in (baseline, own))
    said = {"": shapes, f"{len(new)} new: ": new, f"{len(gone)} gone: ": gone, "other values in ": values}
    parts = [what + first_few(names, 3) for what, names in said.items() if names]
    return (
        f"From {baseline.num_heads} to {own.num_heads} heads the parameters change: {'; '.join(parts)}."
        if parts
        else ""
    )


def _unchanged(counted: Sequence[Counted]) -> str:
    heads, widths = (
        [str(n) for n in sizes] for sizes in zip(*((o.num_heads, o.head_dim) for o in counted), strict=True)
    )
    on_meta = any(parameter.is_meta for parameter in counted[0].parameters.values())
    values = "(on meta they hold no values)" if on_meta else "and the same values, bit for bit,"
    return (
        f"Nothing but the slices: all {len(counted[0].parameters)} parameters have the same shapes {values} with "
        f"{listed(heads)} heads. Only which rows and columns belong to a head changes: head_dim {listed(widths)}."
    )
