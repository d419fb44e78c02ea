"""Run a subject for comparison: its stages in canonical axes, and the rounding error of each; compare two such runs.

The attentions of two runs are paired in the order of computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import torch
from einops import repeat
from torch import Tensor

from ..errors import DeviceError, InputError, MhaInspectError, is_out_of_memory
from ..graph.attention import Attention
from ..measure.content import StageDifference, compare_stage, stage_noise
from ..measure.ranks import require_alone
from ..measure.run_report import drops_at_random, environment_of
from ..measure.weights import Weights, weights_of
from ..naming.axes import AxisNames
from ..naming.canonical import returned_content
from ..naming.pattern import CANONICAL_AXES, STAGES
from ..naming.visibility import Rows, filled_slots, visibility
from ..record.arguments import dense, first_tensor, tensors_in
from ..record.rounding import beside, distances, judge, rounding_error
from ..reports.common import Difference, MeasuredAgainst, Verdict
from ..reports.diff import OutputDifference
from ..running.subject import Run, Subject
from ..text import first_line
from .pair import Pair, Parameters, Side, Where, without_rows

T = TypeVar("T")
_BY_KEY_HEAD = ("k_proj", "v_proj", "k_heads", "v_heads")
"""Stages with features of each key/value head, which several query heads may share."""
_AFTER_A_MASK = frozenset({"weights", "context", "concat", "output"})
"""Stages in which a query with every key masked out has no defined result."""


class ComparableRun:
    """A run of a subject in canonical axes, with its rounding error measured by a second run in float64.

    Every run starts from the module's initial state (buffers, random generators) and restores it.
    """

    def __init__(self, subject: Subject, like: ComparableRun | None = None, finer: Subject | None = None) -> None:
        """Prepare a run; `like` is one in another dtype, whose names of axes are used.

        `finer` is the subject with inputs and random weights in a finer dtype, for the run in float64.
        """
        self.subject = subject
        self.finer = finer
        self._like = like
        self._contents: dict[tuple[int, str], Tensor | None] = {}
        self.measured_against: MeasuredAgainst = "float64"
        """The reference of the rounding error; final once the error was measured."""

    @property
    def label(self) -> str:
        """The subject's name in sentences."""
        return self.subject.name

    @property
    def dtype(self) -> str:
        """The dtype of inputs and parameters; float32 if they have no floating-point numbers."""
        return environment_of(self.subject).dtype or "float32"

    @cached_property
    def run(self) -> Run:
        """The run, with every tensor kept. Raises `DeviceError` or `InputError` if it has no numbers to compare."""
        require_alone(self.subject, "a comparison")
        with torch.no_grad():
            with self.subject.apart() as subject:
                run = subject.recorded(keep=True)
            require_alone(self.subject, "a comparison", run)
            self._require_numbers(run)
            if self._like is not None:
                return run.beside(self._like.run.wider)
            return run.beside(self.subject.wider_run(run))

    def _require_numbers(self, run: Run) -> None:
        """Raise `DeviceError` or `InputError` if a run returns tensors without numbers."""
        returned = [dense(tensor) for _, tensor in tensors_in(run.returned)]
        if any(tensor.is_meta for tensor in returned):
            raise DeviceError("device meta has shapes but no numbers to compare. Use a module and inputs on the CPU.")
        if returned and not any(tensor.numel() for tensor in returned):
            raise InputError(
                f"{self.label} returns {list(returned[0].shape)}, which has no numbers to compare. "
                "Give inputs without a dimension of 0."
            )

    def forget(self) -> None:
        """Drop the run and its tensors, because the weights changed or the run is no longer needed."""
        self._contents.clear()
        for name in ("run", "output", "_rounding", "_named", "_leaves"):
            vars(self).pop(name, None)

    @cached_property
    def _named(self) -> Run:
        """The run that names attentions and axes: the run in another dtype if both have the same operations."""
        if self._like is not None and _steps(self._like.run) == _steps(self.run):
            return self._like._named
        return self.run

    @property
    def attentions(self) -> tuple[tuple[Attention, AxisNames], ...]:
        """Each attention with the names of its axes."""
        return self._named.attentions

    @cached_property
    def weights(self) -> tuple[Weights, ...]:
        """The places of each attention's weights."""
        return weights_of(self.run, self.subject.module)

    def content(self, place: int, stage: str) -> Tensor | None:
        """Return a stage of an attention in canonical axes; None if it is absent, or an axis has no name.

        Heads are without their scale: an implementation may scale queries, keys or scores.
        """
        if not self.has_stage(place, stage):
            return None
        if (place, stage) not in self._contents:
            self._contents[place, stage] = self.side(place).stage(stage)
        return self._contents[place, stage]

    def side(self, place: int) -> Side:
        """Return an attention of the run as one side of a pair."""
        attention, names = self.attentions[place]
        return Side(self.run, attention, names, self._leaves)

    @cached_property
    def _leaves(self) -> dict[int, Tensor]:
        """Values of inputs, parameters and buffers, by tensor id."""
        return self.subject.leaves(self.run.recording)

    def has_stage(self, place: int, stage: str) -> bool:
        """Return whether there is an attention at this place, with this stage."""
        if place >= len(self.attentions):
            return False
        attention, _ = self.attentions[place]
        return stage in attention.stages

    def as_made(self, place: int, stage: str) -> Tensor | None:
        """Return a stage of an attention in its own axes, without its scale; None if it is absent or made in turns."""
        return self.side(place).as_made(stage) if self.has_stage(place, stage) else None

    def axes(self, place: int, stage: str) -> str:
        """Return the axes of a stage as they are: `(batch windows) heads query key`; empty if it is absent."""
        if not self.has_stage(place, stage):
            return ""
        _, names = self.attentions[place]
        return names.of_stage(stage)

    def filled(self, place: int) -> int:
        """Return the number of keys of an attention without empty slots at the end of a cache."""
        attention, names = self.attentions[place]
        visible = visibility(self.run.graph, attention, names)
        if visible is None or visible.seen is None:
            _, keys = names.lengths
            return keys
        return filled_slots(self.run.graph, attention, visible.seen).shape[1]

    def masked_queries(self, place: int) -> Rows:
        """Return the queries of an attention with every key masked out in at least one head."""
        if place >= len(self.attentions):
            return ()
        visible = visibility(self.run.graph, *self.attentions[place])
        return () if visible is None else visible.blind

    def masked_heads(self, place: int) -> tuple[int, ...] | None:
        """Return in which heads these queries have every key masked out: `Visibility.blind_heads`."""
        if place >= len(self.attentions):
            return None
        visible = visibility(self.run.graph, *self.attentions[place])
        return None if visible is None else visible.blind_heads

    @property
    def returned(self) -> Tensor:
        """The forward's first tensor, in its own layout."""
        return first_tensor(self.run.returned).detach()

    @property
    def further(self) -> dict[str, Tensor]:
        """The forward's other floating tensors by name: `[1]`, `pooled`."""
        _, *further = tensors_in(self.run.returned)
        return {name: dense(tensor).detach() for name, tensor in further if tensor.is_floating_point()}

    @cached_property
    def output(self) -> Tensor:
        """The forward's first tensor, in canonical axes if its axes could be named."""
        content = returned_content(self._named, self.returned)
        return self.returned if content is None else content

    @property
    def drops(self) -> bool:
        """Whether the forward drops elements at random, e.g. by dropout in training."""
        return drops_at_random(self.run)

    # -- rounding -----------------------------------------------------------------------------------------------------

    @cached_property
    def _rounding(self) -> _Rounding:
        """The runs that show the rounding error.

        float64 itself is measured by a copy in float32. With random elements, both runs are copies.
        """
        dtype = getattr(torch, self.dtype)
        is_exact = dtype == torch.float64 and not self.drops
        exact = self if is_exact else self._in(torch.float64)
        measured = self
        if dtype == torch.float64:
            measured = self._in(torch.float32)
        elif self.drops:
            measured = self._in(dtype)
        if self.measured_against == "half a digit":
            return _Rounding(measured, exact, unit=1.0)  # this error is already that of the run's dtype
        _, unit = beside(dtype)
        return _Rounding(measured, exact, unit)

    def _in(self, dtype: torch.dtype) -> ComparableRun:
        """Return the run of a copy in another dtype, in eval mode if the module drops elements.

        If the copy fails, return a run of the subject with every number changed by half its last digit.
        """
        subject = self.subject
        if self.finer is not None and dtype == torch.float64:
            subject = self.finer

        def of_copy(copied: Subject) -> ComparableRun:
            copy = ComparableRun(copied, self)
            if self.drops:
                copied.module.eval()
            _ = copy.run
            return copy

        try:
            copy = measured_in(self.label, subject.copied, dtype, of_copy)
        except InputError:
            if self.drops:
                raise
            self.measured_against = "half a digit"
            copy = ComparableRun(self.subject.shaken(), self)
        if copy.drops:
            raise InputError(
                f"{self.label} draws random numbers in its forward, different ones in another dtype, so rounding "
                "cannot be measured. Remove them, or draw them outside the forward and pass them as an argument."
            )
        return copy

    def floor(self, place: int, stage: str, like: Tensor, rows: Rows, *, as_made: bool = False) -> float:
        """Return the rounding error of a stage without these queries, in the form in which it is compared with `like`.

        A query with every key masked out has no defined result, so it has no rounding error. `as_made` is for stages
        that are compared in their own axes.
        """
        measured = self._rounding.measured
        exact = self._rounding.exact
        if as_made:
            coarse = measured.as_made(place, stage)
            fine = exact.as_made(place, stage)
            if coarse is None or fine is None:
                return 0.0
            return rounding_error(coarse, fine) * self._rounding.unit
        coarse = measured.content(place, stage)
        fine = exact.content(place, stage)
        if coarse is None or fine is None:
            return 0.0
        coarse = without_rows(stage, coarse, rows)
        fine = without_rows(stage, fine, rows)
        return stage_noise(stage, coarse, fine, like) * self._rounding.unit

    def further_floor(self, name: str) -> float:
        """Return the rounding error of another tensor that the forward returns; 0 if a copy does not return it."""
        coarse = self._rounding.measured.further.get(name)
        fine = self._rounding.exact.further.get(name)
        if coarse is None or fine is None:
            return 0.0
        return rounding_error(coarse, fine) * self._rounding.unit

    def output_floor(self, rows: Rows) -> float:
        """Return the rounding error of the output; these queries are excluded if the output begins `batch query`."""
        coarse = self._rounding.measured.output
        fine = self._rounding.exact.output
        if rows and self._begins_by_query(coarse):
            coarse, fine = without_rows("output", coarse, rows), without_rows("output", fine, rows)
        return rounding_error(coarse, fine) * self._rounding.unit

    def _begins_by_query(self, output: Tensor) -> bool:
        """Return whether the first axes of an output are the batch and the queries of the last attention."""
        weights = self.content(len(self.attentions) - 1, "weights")
        if weights is None:
            return False
        batch, _, queries, _ = weights.shape
        return output.shape[:2] == (batch, queries)


@dataclass(frozen=True, eq=False)
class _Rounding:
    """Two runs of one subject in two dtypes, which differ by rounding."""

    measured: ComparableRun
    exact: ComparableRun
    """The run in float64."""
    unit: float
    """The factor of the measured error."""


def _steps(run: Run) -> list[tuple[str, list[int]]]:
    """Return the operations with the ids of their inputs and outputs, independent of sizes."""
    steps = []
    for op in run.recording.ops:
        ids = [tensor.id for tensor in op.inputs]
        ids += [tensor.id for tensor in op.outputs]
        steps.append((op.name, ids))
    return steps


def measured_in(
    label: str, copied: Callable[[torch.dtype], Subject], dtype: torch.dtype, measure: Callable[[Subject], T]
) -> T:
    """Return the measurement of a copy in another dtype. Raises `InputError` if it cannot be copied or run."""
    done = "copied, and measuring rounding needs a copy in another dtype"
    is_copied = False
    try:
        copy = copied(dtype)
        is_copied = True
        done = f"run in {str(dtype).removeprefix('torch.')}, and measuring rounding needs that"
        return measure(copy)
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, MhaInspectError):
            raise
        reason = first_line(error)
        if is_copied and isinstance(error, RuntimeError):
            reason = reason if reason.endswith(".") else f"{reason}."
            reason += " Tensors made in its forward have a fixed dtype."
        raise InputError(f"{label} cannot be {done}: {reason}") from None


# -- two runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ComparedStage:
    """A stage of two paired attentions."""

    place: int
    """The place of the attentions, from 0."""
    name: str
    left: Tensor | None
    """The left tensor in canonical axes; None if the side lacks the stage, or an axis has no name."""
    right: Tensor | None
    difference: StageDifference | None
    """The difference; None if a side is missing, or without a measurement."""
    left_places: range
    """The places of the attentions on the left that make it: several if each head is an attention of its own."""
    right_places: range

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the difference; None without a difference."""
        return None if self.difference is None else self.difference.verdict


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two runs, compared by their stages in canonical axes and by their outputs."""

    left: ComparableRun
    right: ComparableRun
    measured: tuple[ComparableRun, ...] = ()
    """The runs whose rounding error is the noise floor; empty for both, of which the larger error counts."""

    @cached_property
    def masked(self) -> list[Rows]:
        """For each pair of attentions the queries with every key masked out, on either side."""
        masked = []
        for place in range(max(len(self.left.attentions), len(self.right.attentions))):
            rows = {*self.left.masked_queries(place), *self.right.masked_queries(place)}
            masked.append(tuple(sorted(rows)))
        return masked

    @property
    def _measured(self) -> tuple[ComparableRun, ...]:
        return self.measured or (self.left, self.right)

    @property
    def are_paired(self) -> bool:
        """Whether the attentions of both sides are paired in order; not if one side has more, with other heads.

        Four attentions of a head each may be one attention of four heads.
        """
        left, right = self.left.attentions, self.right.attentions
        if len(left) == len(right):
            return True
        pairs = zip(left, right, strict=False)
        return all(ours.num_heads == theirs.num_heads for (_, ours), (_, theirs) in pairs)

    def pairs(self, where: Where) -> Iterator[Pair]:
        """Yield the same attentions of both runs, in the order of computation."""
        for place in range(min(len(self.left.attentions), len(self.right.attentions))):
            yield self.pair(place, where)

    def pair(self, place: int, where: Where) -> Pair:
        """Return the same attention of both runs, with the rounding errors that were measured."""
        left, right = self.left, self.right
        named = dict(left.subject.module.named_parameters())
        named.update(right.subject.module.named_parameters())
        weights = None
        if not unreadable(left, right):
            weights = left.weights[place], right.weights[place]
        return Pair(
            left=left.side(place),
            right=right.side(place),
            where=where,
            noise=partial(self._noise, place),
            blind=self.masked[place],
            parameters=Parameters(named, (_unread(left), _unread(right))),
            weights=weights,
        )

    def _noise(self, place: int, stage: str, left: Tensor, right: Tensor) -> float:
        """Return the larger rounding error of a stage, in the form in which both sides are compared."""
        contents = self.left.content(place, stage), self.right.content(place, stage)
        as_made = any(content is None for content in contents)
        rows: Rows = ()
        # Up to its scores, the first attention is defined for every query, whatever the mask.
        if not as_made and (place or stage in _AFTER_A_MASK):
            rows = self.masked[place]
        floors = []
        for run in self._measured:
            like = right if run is self.left else left
            floor = run.floor(place, stage, like, rows, as_made=as_made)
            floors.append(floor)
        return max(floors)

    def rows(self, *, measured: bool = True) -> Iterator[ComparedStage]:
        """Yield the stages of each pair of attentions, in order; without a difference unless `measured` and paired."""
        measured = measured and self.are_paired
        for place in range(len(self.masked)):
            for stage in STAGES:
                if not self.left.has_stage(place, stage) and not self.right.has_stage(place, stage):
                    continue
                if measured:
                    yield self._compared(place, stage)
                else:
                    yield self._beside(place, stage)

    def _beside(self, place: int, stage: str) -> ComparedStage:
        """Return a stage on both sides, without a difference."""
        left = self.left.content(place, stage)
        right = self.right.content(place, stage)
        alone = range(place, place + 1)
        return ComparedStage(place, stage, left, right, None, alone, alone)

    def _compared(self, place: int, stage: str) -> ComparedStage:
        """Return a stage on both sides, with the difference if it can be measured."""
        beside = self._beside(place, stage)
        if beside.left is None or beside.right is None:
            return self._compared_as_made(beside) or beside
        left, right, note = self._with_all_heads(place, stage, beside.left, beside.right)
        axes = CANONICAL_AXES[stage]
        names = axes.split()
        if beside.left.shape != beside.right.shape and "key" in names:
            keys = max(self.left.filled(place), self.right.filled(place))
            axis = names.index("key")
            left = _first(keys, left, axis)
            right = _first(keys, right, axis)
        difference = self._difference(place, stage, left, right)
        if difference.compared != axes:
            note = f"compared by {difference.compared}"
        if not difference.note:
            difference = replace(difference, note=note)
        return replace(beside, difference=difference)

    def _difference(self, place: int, stage: str, left: Tensor, right: Tensor) -> StageDifference:
        """Return the difference of a stage, judged by the larger rounding error."""
        return compare_stage(stage, left, right, partial(self._noise, place, stage, left, right))

    def _with_all_heads(self, place: int, stage: str, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, str]:
        """Return a stage of both sides with keys or values for every query head, and which of them were repeated."""
        if stage not in _BY_KEY_HEAD or left.numel() == right.numel():
            return left, right, ""
        _, names = self.left.attentions[place]
        _, right_names = self.right.attentions[place]
        left = _for_each_head(left, names)
        right = _for_each_head(right, right_names)
        return left, right, _repeated_heads(names, right_names)

    def _compared_as_made(self, beside: ComparedStage) -> ComparedStage | None:
        """Compare a stage without canonical axes, e.g. of windows; None unless both sides agree in shape and axes."""
        place, stage = beside.place, beside.name
        left = self.left.as_made(place, stage)
        right = self.right.as_made(place, stage)
        if left is None or right is None or left.shape != right.shape:
            return None
        axes = self.left.axes(place, stage)
        if self.right.axes(place, stage) != axes:
            return None
        difference = self._difference(place, stage, left, right)
        difference = replace(difference, compared=axes)
        return replace(beside, left=left, right=right, difference=difference)

    def output(self, rows: Rows) -> StageDifference:
        """Compare both outputs; the rounding error is measured without these queries."""

        def floor() -> float:
            return max(run.output_floor(rows) for run in self._measured)

        return compare_stage("output", self.left.output, self.right.output, floor)

    def further(self) -> tuple[OutputDifference, ...]:
        """Compare the other tensors that both sides return by the same name, in one shape."""
        differences = []
        for name, left in self.left.further.items():
            right = self.right.further.get(name)
            if right is None or right.shape != left.shape:
                continue
            floor = 0.0
            if not torch.equal(left, right):
                floor = max(run.further_floor(name) for run in self._measured)
            difference = difference_of(left, right, floor)
            differences.append(OutputDifference(**vars(difference), name=name))
        return tuple(differences)


def unreadable(source: ComparableRun, target: ComparableRun) -> str:
    """Return why the weights of two sides cannot be copied by head; empty if they can be read on both."""
    for side in (source, target):
        for weights in side.weights:
            if weights.missing:
                return f"{side.label}: {weights.missing[0]}"
        if not side.weights:
            return f"{side.label}: no attention was found."
        if not all(weights.projections for weights in side.weights):
            return f"{side.label}: its attention has no projections."
    if len(source.weights) != len(target.weights):
        return f"{source.label} has {len(source.weights)} attentions, but {target.label} has {len(target.weights)}."
    return ""


def _unread(side: ComparableRun) -> frozenset[str]:
    """Return the parameters that no operation reads."""
    recording = side.run.recording
    read = {tensor.storage for op in recording.ops for tensor in op.inputs}
    return frozenset(named.name for named in recording.parameters if named.tensor.storage not in read)


def _repeated_heads(left: AxisNames, right: AxisNames) -> str:
    """Return on which sides key/value heads are repeated: `each of the 2 key/value heads on the left is repeated …`."""
    sides = []
    for side, names in (("left", left), ("right", right)):
        heads = names.num_heads
        kv_heads = names.num_kv_heads
        if heads > kv_heads > 0:
            times = heads // kv_heads
            sides.append(f"each of the {kv_heads} key/value heads on the {side} is repeated {times} times")
    return " and ".join(sides)


def _first(count: int, tensor: Tensor, dim: int) -> Tensor:
    """Return at most this many elements of a dimension, from its beginning."""
    return tensor.narrow(dim, 0, min(count, tensor.shape[dim]))


def _for_each_head(content: Tensor, names: AxisNames) -> Tensor:
    """Return `batch key (heads head_dim)` or `batch heads key head_dim` with a key or value for every query head."""
    kv_heads = names.num_kv_heads
    axes = "batch key ({} head_dim)"
    features = content.shape[-1]
    if content.dim() == 4:
        axes = "batch ({}) key head_dim"
        features = content.shape[1] * names.head_dim
    if not kv_heads or names.num_heads % kv_heads or features != kv_heads * names.head_dim:
        return content
    order = " ".join(names.head_order[1:])
    before = axes.format("kv_heads")
    after = axes.format(order)
    return repeat(content, f"{before} -> {after}", kv_heads=kv_heads, group=names.num_heads // kv_heads)


def difference_of(left: Tensor, right: Tensor, noise_floor: float | None) -> Difference:
    """Return the difference of two tensors of one shape, judged by a measured rounding error; None if it was not."""
    largest, relative = distances(left, right)
    return Difference(largest, relative, noise_floor, *judge(largest, noise_floor or 0.0))


def overall(verdicts: Sequence[Verdict | None]) -> Verdict:
    """Return `differs` if any verdict is that, otherwise `inconclusive` if any is, otherwise `same`."""
    if "differs" in verdicts:
        return "differs"
    if "inconclusive" in verdicts:
        return "inconclusive"
    return "same"
