"""The parameters under several head counts side by side, and what changes between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..layers.catalog import LayerKind
from ..layers.roles import Role
from ..reports.params import HeadCountColumn
from ..targets.spec import AttentionSpec
from ..text import listed


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


def side_by_side(
    kind: LayerKind, spec: AttentionSpec, device: torch.device, counts: tuple[int, ...]
) -> tuple[tuple[HeadCountColumn, ...], str]:
    """A column a head count, and one sentence on what changes from the first: found by comparing, bit for bit.

    Raises `SpecError` when a head count does not fit the other sizes.
    """
    specs = [replace(spec, num_heads=count) for count in counts]
    columns, changes = [], []
    baseline: dict[str, Tensor] | None = None
    for one in specs:
        parameters = _built(kind, one, device)
        columns.append(_column(kind, one, parameters))
        if baseline is None:
            baseline = parameters
        else:
            changes.append(_compare(baseline, parameters, one.num_heads))
    return tuple(columns), _sentence(specs, changes, len(baseline or {}), known=device.type != "meta")


def _built(kind: LayerKind, spec: AttentionSpec, device: torch.device) -> dict[str, Tensor]:
    module = kind.load().build(spec, str(device))
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def _column(kind: LayerKind, spec: AttentionSpec, parameters: Mapping[str, Tensor]) -> HeadCountColumn:
    declared = getattr(kind.load(), "roles", None)
    roles: Mapping[str, Role] = {} if declared is None else declared(spec)
    first = {
        name: tuple(piece for piece in roles[name].slices() if piece.head == 0) for name in parameters if name in roles
    }
    return HeadCountColumn(
        num_heads=spec.num_heads,
        head_dim=int(spec.head_dim),
        numel=sum(parameter.numel() for parameter in parameters.values()),
        shapes={name: tuple(parameter.shape) for name, parameter in parameters.items()},
        first_head={name: pieces for name, pieces in first.items() if pieces},
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


def _sentence(specs: list[AttentionSpec], changes: list[_Change], number: int, known: bool) -> str:
    if any(changes):
        return " ".join(_describe(specs[0].num_heads, change) for change in changes if change)
    heads = listed([str(spec.num_heads) for spec in specs])
    widths = listed([str(int(spec.head_dim)) for spec in specs])
    same = (
        "the same shapes and the same values, bit for bit,"
        if known
        else "the same shapes (on meta they hold no values)"
    )
    return (
        f"Nothing but the slices: all {number} parameters have {same} with {heads} heads. "
        f"Only which rows and columns belong to a head changes: head_dim {widths}."
    )


def _describe(baseline: int, change: _Change) -> str:
    parts = []
    if change.shapes:
        parts.append(_shortened(change.shapes))
    if change.new:
        parts.append(f"{len(change.new)} new: {_shortened(change.new)}")
    if change.gone:
        parts.append(f"{len(change.gone)} gone: {_shortened(change.gone)}")
    if change.values:
        parts.append(f"other values in {_shortened(change.values)}")
    return f"From {baseline} to {change.num_heads} heads the parameters change: {'; '.join(parts)}."


def _shortened(names: tuple[str, ...]) -> str:
    """The first three, and how many more."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
