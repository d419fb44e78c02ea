"""Find the attentions of a recording, and name their axes.

A dimension of size one leaves no trace in a view. A wider run of the same forward shows which axis it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

from ..graph.attention import Attention
from ..graph.dataflow import Graph
from ..graph.find import attentions_of
from ..record.ops import Recording
from ..record.tensors import uncollected
from .axes import AxisNames
from .pattern import at_size

Named = tuple[Attention, AxisNames]


@dataclass(frozen=True)
class NamedRun:
    """A recorded run with its attentions."""

    recording: Recording
    wider: NamedRun | None = None
    """A run of the same forward in which no size is one; it provides the names of axes. None without one."""

    @cached_property
    def graph(self) -> Graph:
        """The dataflow."""
        with uncollected():
            return Graph(self.recording)

    @cached_property
    def attentions(self) -> tuple[Named, ...]:
        """Every attention with the names of its axes."""
        return self._alone if self.wider is None else _named_after(self._alone, self.wider.attentions)

    @cached_property
    def _alone(self) -> tuple[Named, ...]:
        """The attentions with the names that this run alone provides."""
        with uncollected():
            return tuple((each, AxisNames(each, self.graph.dimensions)) for each in attentions_of(self.graph))

    def beside(self, wider: NamedRun | None) -> Self:
        """Return this run with a wider run for the names of axes; cached results stay."""
        run = replace(self, wider=wider)
        vars(run).update({name: vars(self)[name] for name in ("graph", "_alone") if name in vars(self)})
        return run


def _named_after(attentions: Sequence[Named], others: Sequence[Named]) -> tuple[Named, ...]:
    """Return the attentions of a run with the names of another run's, if these are the same attentions."""
    if len(attentions) != len(others) or not all(map(_is_same, attentions, others)):
        return tuple(attentions)
    pairs = zip(attentions, others, strict=True)
    return tuple((each, names.taking(_stages_at_size(each, *other))) for (each, names), other in pairs)


def _stages_at_size(attention: Attention, like: Attention, names: AxisNames) -> dict[str, str]:
    """Return the axes of the stages that two attentions have in common, with equal numbers of dimensions."""
    return {
        stage: at_size(names.of_stage(stage), tensor.shape, like.stages[stage].shape)
        for stage, tensor in attention.stages.items()
        if stage in like.stages and len(like.stages[stage].shape) == len(tensor.shape)
    }


def _is_same(named: Named, other: Named) -> bool:
    """Return whether attentions of two runs are the same one: sizes of one may be larger in the other."""
    (attention, names), (like, other_names) = named, other
    sizes = ((names.num_heads, other_names.num_heads), (names.num_kv_heads, other_names.num_kv_heads))
    if attention.module != like.module or any(size not in (1, larger) for size, larger in sizes):
        return False
    return names.num_heads == 1 or len(attention.branches) == len(like.branches)
