"""Find the attentions of a recording, and name their axes.

A dimension of size one leaves no trace in a view. A wider run of the same forward shows which axis it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing import Self

from ..graph.attention import Attention
from ..graph.dataflow import Graph
from ..graph.equal_layers import Layer, Shortened, UnlikeError, shortened_of
from ..graph.find import attentions_of
from ..graph.summed_outputs import with_summed_output
from ..graph.written_out import unread_contexts, written_out
from ..record.ops import Recording
from ..record.tensors import uncollected
from .axes import AxisNames
from .pattern import at_size

Named = tuple[Attention, AxisNames]
T = TypeVar("T")


@dataclass(frozen=True)
class Instance:
    """One attention of a run, as one of several equal ones."""

    place: int
    """The number of the attention among the distinct ones."""
    attention: Attention
    layer: Layer | None = None
    """What is in the run with only distinct layers, in the whole run; None if they are the same run."""

    def of(self, value: T) -> T:
        """Return what was found of the distinct attention, with the operations, tensors and modules of this one."""
        return value if self.layer is None else self.layer.of(value)


@dataclass(frozen=True)
class Distinct:
    """The attentions of a run, each read once: equal layers are left out."""

    run: NamedRun
    """The run with only the distinct layers."""
    instances: tuple[Instance, ...]
    """For each attention of the whole run, which of the distinct ones it is."""


class _Reading:
    """The dataflow and the attentions of one recording, with the names that they have alone."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    @cached_property
    def graph(self) -> Graph:
        """The dataflow."""
        with uncollected():
            return Graph(self.recording)

    @cached_property
    def alone(self) -> tuple[Named, ...]:
        """The attentions with the names that this recording alone provides."""
        if self.shorter is None:
            return self.read()
        distinct = self.shorter.run.attentions
        named: list[Named] = []
        for instance in self.shorter.instances:
            _, names = distinct[instance.place]
            named.append((instance.attention, names))
        return tuple(named)

    @cached_property
    def shorter(self) -> Distinct | None:
        """The distinct attentions, with the names that they have alone; None if no layers are equal."""
        with uncollected():
            shortened = shortened_of(self.recording)
            if shortened is None:
                return None
            run = NamedRun(shortened.recording, as_recorded=True)
            vars(run).update(attentions=run.reading.read())
            try:
                instances = _instances(run, shortened)
            except UnlikeError:  # e.g. tensors that are put together from pieces are no layer's
                return None
        in_order = sorted(instances, key=lambda instance: instance.attention.softmax.index)
        return Distinct(run, tuple(in_order))

    def read(self) -> tuple[Named, ...]:
        """Find the attentions of this recording, and name their axes."""
        named: list[Named] = []
        with uncollected():
            for attention in attentions_of(self.graph):
                whole = with_summed_output(self.graph, attention)
                named.append((whole, AxisNames(whole, self.graph.dimensions)))
        return tuple(named)

    def with_steps(self) -> _Reading:
        """Return the reading in which attentions that no product shows are written out; this one if there are none."""
        if self.shorter is None:
            graph, named = self.graph, self.alone
        else:
            graph, named = self.shorter.run.graph, self.shorter.run.attentions
        if not unread_contexts(graph, [attention for attention, _ in named]):
            return self
        with uncollected():
            steps = written_out(self.graph, [attention for attention, _ in self.alone])
        return self if steps is None else _Reading(steps)


def _instances(run: NamedRun, shortened: Shortened) -> list[Instance]:
    """Return the attentions of the whole run that are equal to each of a run with only the distinct layers."""
    instances: list[Instance] = []
    for place, (attention, _) in enumerate(run.attentions):
        anchors = {turn.score_product.op.index for turn in attention.turns}
        for layer in shortened.layers_with(anchors):
            instances.append(Instance(place, layer.of(attention), layer))
    return instances


@dataclass(frozen=True)
class NamedRun:
    """A recorded run with its attentions."""

    recorded: Recording
    """What was recorded."""
    wider: NamedRun | None = None
    """A run of the same forward in which no size is one; it provides the names of axes. None without one."""
    as_recorded: bool = field(default=False, kw_only=True)
    """Whether nothing is written out in steps: a run that raised, or one whose steps are written out already."""

    @cached_property
    def reading(self) -> _Reading:
        """The dataflow and the attentions, with the names that they have alone."""
        reading = _Reading(self.recorded)
        return reading if self.as_recorded else reading.with_steps()

    @property
    def recording(self) -> Recording:
        """What was recorded, with attentions that no product shows written out in their steps."""
        return self.recorded if self.as_recorded else self.reading.recording

    @property
    def graph(self) -> Graph:
        """The dataflow."""
        return self.reading.graph

    @cached_property
    def attentions(self) -> tuple[Named, ...]:
        """Every attention with the names of its axes."""
        alone = self.reading.alone
        return alone if self.wider is None else _named_after(alone, self.wider.attentions)

    @property
    def distinct(self) -> Distinct:
        """The attentions without those that are equal to another one, to read what is the same for equal layers."""
        # A cached reference to this run would be a circle, which keeps its tensors until the collector runs.
        if self._distinct is not None:
            return self._distinct
        instances: list[Instance] = []
        for place, (attention, _) in enumerate(self.attentions):
            instances.append(Instance(place, attention))
        return Distinct(self, tuple(instances))

    @cached_property
    def _distinct(self) -> Distinct | None:
        """The distinct attentions with their names; None if no layers are equal."""
        shorter = self.reading.shorter
        if shorter is None or self.wider is None:
            return shorter
        # The wider run may give names to the axes of one attention, and not to those of an equal one.
        named: dict[int, Named] = {}
        for instance, (attention, names) in zip(shorter.instances, self.attentions, strict=True):
            axes = {stage: names.of_stage(stage) for stage in attention.stages}
            if instance.place not in named:
                like, like_names = shorter.run.attentions[instance.place]
                named[instance.place] = (like, like_names.taking(axes))
            _, taken = named[instance.place]
            if any(taken.of_stage(stage) != pattern for stage, pattern in axes.items()):
                return None
        run = NamedRun(shorter.run.recording, as_recorded=True)
        attentions = list(shorter.run.attentions)
        for place, pair in named.items():
            attentions[place] = pair
        vars(run).update(reading=shorter.run.reading, attentions=tuple(attentions))
        return Distinct(run, shorter.instances)

    def read_once(self, read: Callable[[NamedRun, Attention, AxisNames], T]) -> list[T]:
        """Return what `read` finds in each attention; in equal ones once, and then translated."""
        distinct = self.distinct
        facts = [read(distinct.run, *named) for named in distinct.run.attentions]
        return [instance.of(facts[instance.place]) for instance in distinct.instances]

    def read_parameters(
        self,
        read: Callable[[NamedRun, int], T],
        of_layer: Callable[[T, Layer], T],
    ) -> list[T]:
        """Return what `read` finds in the parameters of each attention, by its number; in equal ones once.

        `of_layer` returns the same with the parameters of another layer. Attentions that pick by other tables, or that
        view parameters outside of the run, are read themselves.
        """
        distinct = self.distinct
        once = [read(distinct.run, place) for place in range(len(distinct.run.attentions))]
        found: list[T] = []
        for place, instance in enumerate(distinct.instances):
            layer = instance.layer
            if layer is None:
                found.append(once[instance.place])
                continue
            try:
                found.append(of_layer(once[instance.place], layer) if layer.has_same_tables() else read(self, place))
            except UnlikeError:
                found.append(read(self, place))
        return found

    def beside(self, wider: NamedRun | None) -> Self:
        """Return this run with a wider run for the names of axes; cached results stay."""
        run = replace(self, wider=wider)
        if "reading" in vars(self):
            vars(run).update(reading=self.reading)
        return run


def _named_after(attentions: Sequence[Named], wider: Sequence[Named]) -> tuple[Named, ...]:
    """Return the attentions of a run with the names of a wider run's, if these are the same attentions."""
    if len(attentions) != len(wider) or not all(map(_is_same, attentions, wider)):
        return tuple(attentions)
    named: list[Named] = []
    for (attention, names), (like, like_names) in zip(attentions, wider, strict=True):
        axes = _stages_at_size(attention, like, like_names)
        named.append((attention, names.taking(axes)))
    return tuple(named)


def _stages_at_size(attention: Attention, like: Attention, names: AxisNames) -> dict[str, str]:
    """Return the axes of the stages that two attentions have in common, with equal numbers of dimensions."""
    axes: dict[str, str] = {}
    for stage, tensor in attention.stages.items():
        wide = like.stages.get(stage)
        if wide is not None and len(wide.shape) == len(tensor.shape):
            axes[stage] = at_size(names.of_stage(stage), tensor.shape, wide.shape)
    return axes


def _is_same(named: Named, wider: Named) -> bool:
    """Return whether attentions of two runs are the same one: sizes of one may be larger in the wider run."""
    (attention, names), (like, like_names) = named, wider
    if attention.module != like.module:
        return False
    if names.num_heads not in (1, like_names.num_heads):
        return False
    if names.num_kv_heads not in (1, like_names.num_kv_heads):
        return False
    return names.num_heads == 1 or len(attention.branches) == len(like.branches)
