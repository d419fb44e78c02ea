"""Put the same attention of two runs side by side, stage by stage, in canonical axes.

left     query  q_proj  scores  weights  output     one run
right    query  q_proj  scores  weights  output     a run of other code, or a call that continues from a cache

A reason is asked about one stage that differs. It counts only if it explains all of the difference there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..measure.content import BLOCKED_BELOW
from ..measure.weights import Weights
from ..naming.axes import AxisNames
from ..naming.canonical import canonical, content_of, sizes_in
from ..naming.inner_steps import InnerSteps, InnerStepsReader
from ..naming.pattern import CANONICAL_AXES, dims_of
from ..naming.visibility import Rows, visibility
from ..reports.diff import ReasonKind
from ..running.subject import Run
from .replay import KeptRun, laid_out_as

_CERTAIN = 10
"""Numbers within this many measured rounding errors are the same."""
_LEAST = 64
"""The same, in epsilons of the largest number: the rounding error may have been measured as 0."""
_CLEAR = 8
"""What fits a difference of fewer tolerances may fit by chance."""
_UNMEASURED = 1600
"""The same where no rounding error was measured, e.g. of calls of other sizes."""
_COARSEST = 1 / 8
"""The largest of these, relative to the largest number: also in a dtype of few bits."""
_SMALLEST = 1e-6
"""The largest number is taken as at least this."""
_OF_KEYS = ("key", "value", "k_proj", "v_proj", "k_heads", "v_heads")

Kind = ReasonKind | Literal["call"]
"""The kind of a difference; `call` for one of a call that continues from a cache."""


@dataclass(frozen=True)
class Where:
    """How the two sides are called in a sentence."""

    left: str = "on the left"
    right: str = "on the right"


@dataclass(frozen=True)
class Why:
    """What two runs differ in."""

    kind: Kind
    sentence: str
    line: str = ""
    """The line that converts a weight of the left, named `w`, for the right; else empty."""
    fix: str = ""
    source: str = ""
    """The line of the code."""
    module: str = ""
    is_all: bool = True
    """Whether it is all of the difference of its stage."""
    fact: str = ""
    """What is true of other stages too, where they differ alike; empty for a reason of one stage."""


# -- tolerances -------------------------------------------------------------------------------------------------------


def tolerance(numbers: Tensor, floor: float | None = None) -> float:
    """Return how far apart numbers of this size may be and are still equal.

    `floor` is the rounding error that was measured; None without a measurement.
    """
    if not (numbers.is_floating_point() or numbers.is_complex()):
        return 0.0  # positions and ids: whole numbers are equal, or they are not
    finite = numbers[numbers.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 1.0
    largest = max(largest, _SMALLEST)
    unit = torch.finfo(numbers.dtype).eps
    if floor is None:
        return min(_UNMEASURED * unit, _COARSEST) * largest
    return max(_CERTAIN * floor, _LEAST * unit * largest)


def are_near(left: Tensor, right: Tensor, near: float | None = None) -> bool:
    """Return whether two tensors have one shape and are equal but for rounding; NaNs and equal infinities are equal."""
    if left.shape != right.shape:
        return False
    if not left.numel():
        return True
    if near is None:
        near = tolerance(left)
    return float(distances_of(left, right).max()) <= near


def distances_of(left: Tensor, right: Tensor) -> Tensor:
    """Return how far apart the numbers of two tensors are; two NaNs and two equal infinities are not apart."""
    left, right = left.detach(), right.detach()
    are_nan = left.isnan() & right.isnan()
    are_equal = (left == right) | are_nan
    if not left.is_complex():
        left = left.double()
        right = right.double()
    apart = (left - right).abs()
    apart = apart.masked_fill(are_equal, 0.0)
    return apart.nan_to_num(torch.inf)


_ROUNDED = 1e-6
"""Products of scales are the same number if their ratio is 1 up to this."""


# -- two sides --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Side:
    """One attention of a run whose tensors were kept."""

    run: Run
    attention: Attention
    names: AxisNames
    leaves: Mapping[int, Tensor]
    """Values of inputs, parameters and buffers, by tensor id."""
    changed: Mapping[int, Tensor] = field(default_factory=dict)
    """Tensors that were computed again, by id: something was put into the run."""

    @cached_property
    def kept(self) -> KeptRun:
        """The run with the values of its tensors."""
        return KeptRun(self.run, self.leaves)

    @cached_property
    def steps(self) -> InnerSteps:
        """The positions, norms and other steps inside of it."""
        return InnerStepsReader(self.run, self.leaves).of(self.attention, self.names)

    @cached_property
    def seen(self) -> Tensor | None:
        """`query key`: True for the keys that a query sees; None if it is unknown."""
        visible = visibility(self.run.graph, self.attention, self.names)
        return None if visible is None else visible.seen

    def stage(self, name: str) -> Tensor | None:
        """Return a stage in canonical axes, without the scale that it has early; None if absent or without names."""
        tensor = self.attention.stages.get(name)
        if tensor is None:
            return None
        if tensor.id in self.changed:
            return self.in_canonical_axes(name, self.changed[tensor.id])
        content = content_of(self.run, self.attention, self.names, name)
        return without_scale(content, self.attention, name)

    def as_made(self, name: str) -> Tensor | None:
        """Return a stage in its own axes, without its early scale; None if it is absent or made in turns."""
        tensor = self.attention.stages.get(name)
        if tensor is None or self.attention.branches:
            return None
        value = self.changed.get(tensor.id, self.run.recording.values.get(tensor.id))
        return without_scale(value, self.attention, name)

    def in_canonical_axes(self, name: str, value: Tensor) -> Tensor | None:
        """Return another value of a recorded stage in canonical axes, without its early scale."""
        content = self._laid_out(name, value)
        return without_scale(content, self.attention, name)

    def _laid_out(self, name: str, value: Tensor) -> Tensor | None:
        sizes = sizes_in(self.attention, self.names, name)
        return canonical(value, name, self.names.of_stage(name), sizes, self.names.head_order)

    def in_own_axes(self, name: str, content: Tensor) -> Tensor | None:
        """Return a stage in canonical axes as the run has it; None if an axis has no name, or it is made in turns."""
        tensor = self.attention.stages[name]
        value = self.kept.content(tensor)
        if value is None or self.attention.branches:
            return None
        count = value.numel()
        places = self._laid_out(name, torch.arange(count).view(value.shape))
        if places is None or places.shape != content.shape:
            return None
        scaled = content * _scale_of(self.attention, name)
        numbers = value.new_empty(count)
        order = places.flatten().to(value.device)
        numbers[order] = scaled.to(value).flatten()
        return laid_out_as(tensor, numbers.view(value.shape))


def without_scale(content: Tensor | None, attention: Attention, stage: str) -> Tensor | None:
    """Return a stage without the scale that it has early, or with the one that it lacks: scores scaled after a bias."""
    factor = _scale_of(attention, stage)
    if content is None or factor == 1:
        return content
    return content / factor


def _scale_of(attention: Attention, stage: str) -> float:
    """Return the factor by which a stage differs from one whose scores alone are scaled: 1 if it is unknown."""
    if stage != "scores":
        return attention.early_scales.get(stage) or 1.0
    factors = [attention.scores_scale, *attention.early_scales.values()]
    if not attention.scale or None in factors:
        return 1.0
    so_far = prod(factor for factor in factors if factor is not None)
    ratio = so_far / attention.scale
    return 1.0 if not ratio or abs(ratio - 1) < _ROUNDED else ratio


@dataclass(frozen=True, eq=False)
class Parameters:
    """The parameters that a difference may be made of."""

    named: Mapping[str, Tensor]
    unread: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    """Those that no operation reads, on the left and on the right."""

    def of_dimensions(self, count: int) -> dict[str, Tensor]:
        """Return the parameters of as many dimensions, by name."""
        return {name: parameter.detach() for name, parameter in self.named.items() if parameter.dim() == count}


NO_PARAMETERS = Parameters({})


def _unmeasured(stage: str, left: Tensor, right: Tensor) -> float | None:
    return None


@dataclass(frozen=True, eq=False)
class Pair:
    """The same attention of two runs."""

    left: Side
    right: Side
    where: Where = Where()
    noise: Callable[[str, Tensor, Tensor], float | None] = _unmeasured
    """The rounding error of a stage in the form in which both sides are compared; None if it was not measured."""
    blind: Rows = ()
    """The queries with every key masked out: their results are not defined."""
    parameters: Parameters = NO_PARAMETERS
    weights: tuple[Weights, Weights] | None = None
    """The places of the weights of both sides; None if they are not known."""

    def difference(self, stage: str) -> Difference | None:
        """Return the difference of a stage; None if it is the same, or cannot be compared."""
        left = self.left.stage(stage)
        right = self.right.stage(stage)
        axes = CANONICAL_AXES[stage]
        if left is None or right is None:
            left, right = self._as_made(stage)
            axes = ""
        if left is None or right is None or left.shape != right.shape:
            return None
        if torch.equal(left, right):
            return None
        if stage == "masked_scores":
            left = left.masked_fill(left < BLOCKED_BELOW, -torch.inf)
            right = right.masked_fill(right < BLOCKED_BELOW, -torch.inf)
        if axes:
            left = without_rows(stage, left, self.blind)
            right = without_rows(stage, right, self.blind)
        floor = self.noise(stage, left, right)
        return self.beside(stage, axes, left.detach(), right.detach(), floor)

    def _as_made(self, stage: str) -> tuple[Tensor | None, Tensor | None]:
        """Return a stage that has no canonical axes, e.g. of windows, of both sides, if both have the same axes."""
        axes = [
            side.names.of_stage(stage) if stage in side.attention.stages else "" for side in (self.left, self.right)
        ]
        if axes[0] != axes[1]:
            return None, None
        return self.left.as_made(stage), self.right.as_made(stage)

    def put_into_left(self, stage: str) -> Tensor | None:
        """Return the right's stage as the left run has it; None if it has no place there."""
        content = self.right.stage(stage)
        if content is not None and self.left.stage(stage) is not None:
            return self.left.in_own_axes(stage, content)
        left, right = self._as_made(stage)
        if left is None or right is None or left.shape != right.shape:
            return None
        scale = _scale_of(self.left.attention, stage)
        return laid_out_as(self.left.attention.stages[stage], right * scale)

    def beside(self, stage: str, axes: str, left: Tensor, right: Tensor, floor: float | None) -> Difference | None:
        """Return the difference of two tensors of this pair; None if they are the same, up to a rounding error."""
        difference = Difference(
            stage=stage,
            axes=axes,
            left=left,
            right=right,
            near=max(tolerance(left, floor), tolerance(right, floor)),
            where=self.where,
            parameters=self.parameters,
        )
        return None if difference.is_explained_by(right) else difference


@dataclass(frozen=True, eq=False)
class Difference:
    """One stage in two runs, in the same axes."""

    stage: str
    axes: str
    """The name of each dimension: `batch heads query head_dim`."""
    left: Tensor
    right: Tensor
    near: float
    """Numbers up to this far apart are the same."""
    where: Where = Where()
    parameters: Parameters = NO_PARAMETERS

    @cached_property
    def names(self) -> list[str]:
        """The name of each dimension, one each; empty if they are not known."""
        dims = dims_of(self.axes)
        if len(dims) != self.left.dim():
            return []
        return [dim[0] if len(dim) == 1 else "features" for dim in dims]

    @cached_property
    def ours(self) -> Tensor:
        """The left in float64."""
        return self.left.detach().double()

    @cached_property
    def theirs(self) -> Tensor:
        """The right in float64."""
        return self.right.detach().double()

    @property
    def is_none(self) -> bool:
        """Whether both have the same shape and are equal but for rounding."""
        return are_near(self.left, self.right, self.near)

    def of_both(self, part: Callable[[Tensor], Tensor]) -> Difference:
        """Return the difference of a part of both."""
        return replace(self, left=part(self.left), right=part(self.right))

    def among(self, marks: Tensor) -> Difference:
        """Return the difference where a tensor is True; elsewhere both are 0."""
        unmarked = ~marks.to(self.left.device)
        marked = self.of_both(lambda tensor: tensor.masked_fill(unmarked, 0.0))
        # The numbers that a mask writes are larger than all others.
        return replace(marked, near=min(self.near, tolerance(marked.left)))

    def first_unlike(self, axis: int) -> int:
        """Return the first position along an axis at which both differ."""
        for position in range(self.left.shape[axis]):
            if not are_near(self.left.select(axis, position), self.right.select(axis, position), self.near):
                return position
        return 0

    @cached_property
    def is_finite(self) -> bool:
        """Whether both have finite numbers alone."""
        return bool(self.left.isfinite().all()) and bool(self.right.isfinite().all())

    def is_factor_of_rows(self, among: Tensor | None = None) -> bool:
        """Return whether each row of the left, along its last axis, is a multiple of that of the right.

        With `among`, only where that is True.
        """
        left, right = self.ours, self.theirs
        if among is not None:
            left = left.masked_fill(~among, 0.0)
            right = right.masked_fill(~among, 0.0)
        smallest = torch.finfo(torch.float64).tiny
        squares = (right * right).sum(-1, keepdim=True).clamp_min(smallest)
        products = (left * right).sum(-1, keepdim=True)
        factors = products / squares
        largest = float(factors.abs().max())
        return are_near(left, factors * right, max(1.0, largest) * self.near)

    @cached_property
    def is_clear(self) -> bool:
        """Whether both are so far apart that what fits the difference does not fit by chance."""
        return not are_near(self.left, self.right, _CLEAR * self.near)

    @property
    def start(self) -> str:
        """The stage as the first words of a sentence: `q_heads`, `The output`."""
        return f"The {self.stage[4:]}" if self.stage.startswith("the ") else self.stage

    def is_explained_by(self, changed: Tensor, times: float = 1.0) -> bool:
        """Return whether a change of the right is the left; `times` as much rounding is allowed."""
        return are_near(self.left, changed, times * self.near)


def without_rows(stage: str, content: Tensor, rows: Rows) -> Tensor:
    """Return the stage, in canonical axes, with zeros for these queries."""
    if stage in _OF_KEYS or not rows:
        return content
    cleared = content.clone()
    by_query = cleared.transpose(1, 2) if "heads" in CANONICAL_AXES[stage].split() else cleared
    for batch, query in rows:
        if batch < by_query.shape[0] and query < by_query.shape[1]:
            by_query[batch, query] = 0
    return cleared


Reason = Callable[[Pair, Difference], Why | None]
"""Why a stage of a pair differs, the first that does; None if this is not it. What it names explains all of it."""
