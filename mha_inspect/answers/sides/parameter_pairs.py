"""The parameters of two layers side by side, and how the one maps onto the other, from the roles that they declare."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from ...layers.roles import Part, Role
from ...reports.diff import ParameterPair, ParameterPlace
from .settings import Side

_PARTS = ("W_q", "b_q", "W_k", "b_k", "W_v", "b_v", "W_o", "b_o", "bias_k", "bias_v")


@dataclass(frozen=True)
class _Held:
    """A matrix or bias of all heads, as one layer keeps it."""

    names: tuple[str, ...]
    parts: tuple[Part, ...]
    whole: bool
    """Whether each parameter holds nothing else."""

    @property
    def shape(self) -> tuple[int, ...]:
        bounds = (self.parts[0].rows, self.parts[0].columns)
        return tuple(stop - start for start, stop in (bound for bound in bounds if bound is not None))

    @property
    def numel(self) -> int:
        return prod(self.shape) * len(self.names)

    @property
    def heads(self) -> int:
        return len(self.names) if len(self.names) > 1 else self.parts[0].heads

    @property
    def rows_of_head(self) -> int:
        return self.shape[0] * len(self.names) // self.heads

    @property
    def place(self) -> ParameterPlace:
        where = self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"
        if not self.whole:
            start, stop = self.parts[0].rows
            where += f" {'rows' if self.parts[0].columns else 'elements'} {start}–{stop - 1}"
        return ParameterPlace(self.names, self.shape, where, self.numel)


def parameter_pairs(left: Side, right: Side, modules: tuple[nn.Module, nn.Module]) -> tuple[ParameterPair, ...]:
    """Each matrix and each bias that either has, in the order of the formula."""
    ours, theirs = _held(left, modules[0]), _held(right, modules[1])
    return tuple(
        ParameterPair(
            part,
            None if part not in ours else ours[part].place,
            None if part not in theirs else theirs[part].place,
            _mapping(part, ours.get(part), theirs.get(part)),
        )
        for part in _PARTS
        if part in ours or part in theirs
    )


def _held(side: Side, module: nn.Module) -> dict[str, _Held]:
    code: Any = side.kind.load()
    roles: dict[str, Role] = code.roles(side.spec)
    found: dict[str, list[tuple[str, Part, bool]]] = {}
    for name, _ in module.named_parameters():
        for part in roles[name].parts:
            found.setdefault(part.name, []).append((name, part, len(roles[name].parts) == 1))
    return {
        name: _Held(tuple(n for n, _, _ in held), tuple(p for _, p, _ in held), all(whole for _, _, whole in held))
        for name, held in found.items()
    }


def _mapping(name: str, left: _Held | None, right: _Held | None) -> str:
    if left is None or right is None:
        missing = "left" if left is None else "right"
        if name == "W_o":
            return f"the {missing} has none: as if it were the identity"
        return f"the {missing} has none"
    if left.numel == right.numel and left.shape == right.shape:
        if left.heads != right.heads:
            return f"the same numbers, cut into {left.heads} heads and into {right.heads}"
        return "the same numbers"
    if len(left.names) == len(right.names) > 1 and left.shape[0] == right.shape[0]:
        few = min(left.shape[1], right.shape[1])
        return f"of head h, columns {_run(few)} are in both; the other columns are in one only"
    many, one = (left, right) if len(left.names) > len(right.names) else (right, left)
    if len(many.names) > 1 and len(one.names) == 1:
        return _one_for_each_head(many, one)
    if left.heads != right.heads and left.shape[1:] == right.shape[1:]:
        fewer, more = sorted((left, right), key=lambda held: held.heads)
        each = more.heads // fewer.heads
        return f"{fewer.heads} key/value heads, each of them standing {each} times in the other"
    return f"{left.numel:,} numbers against {right.numel:,}"


def _one_for_each_head(many: _Held, one: _Held) -> str:
    """How one tensor for all heads is made of one for each."""
    step = one.rows_of_head
    rows = _run(step)
    each = re.sub(r"(?<![A-Za-z0-9])0(?![A-Za-z0-9])", "h", many.names[0])
    unit = "rows" if one.parts[0].columns else "elements"
    if one.numel == many.numel:
        return f"{unit} {rows} are all of {each}"
    return f"{unit} {rows}, columns {_run(many.shape[1])} are all of {each}; the other columns are not there"


def _run(step: int) -> str:
    """`64h to 64h+63`."""
    return f"{step}h to {step}h+{step - 1}" if step > 1 else "h"
