"""A recording with its attentions, and the names of their axes.

A dimension of size one leaves no trace in a view: what it is shows in a wider run of the same forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

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
    """A recorded run, and the attentions in it."""

    recording: Recording
    wider: NamedRun | None = None
    """A run of the same forward in which no size is one: names of axes are taken from it."""

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
        """The attentions with the names that this run alone tells."""
        with uncollected():
            return tuple((each, AxisNames(each, self.graph.dimensions)) for each in attentions_of(self.graph))

    def beside(self, wider: NamedRun | None) -> Self:
        """Return this run with a wider one beside it, and with what is known of it already."""
        run = replace(self, wider=wider)
        vars(run).update({name: vars(self)[name] for name in ("graph", "_alone") if name in vars(self)})
        return run


def _named_after(own: Sequence[Named], others: Sequence[Named]) -> tuple[Named, ...]:
    """The attentions of a run with the names of those of another, where these are the same ones."""
    if len(own) != len(others) or not all(map(_is_same, own, others)):
        return tuple(own)
    return tuple(
        (found, names.taking(_stages_at_size(found, *other))) for (found, names), other in zip(own, others, strict=True)
    )


def _stages_at_size(attention: Attention, like: Attention, names: AxisNames) -> dict[str, str]:
    """The axes of those stages of an attention that another one has as well, with as many dimensions."""
    return {
        stage: at_size(names.of_stage(stage), tensor.shape, like.stages[stage].shape)
        for stage, tensor in attention.stages.items()
        if stage in like.stages and len(like.stages[stage].shape) == len(tensor.shape)
    }


def _is_same(own: Named, other: Named) -> bool:
    """Whether an attention of one run is that of the other: a size of one may be another there."""
    (found, names), (like, theirs) = own, other
    sizes = ((names.num_heads, theirs.num_heads), (names.num_kv_heads, theirs.num_kv_heads))
    if found.module != like.module or any(size not in (1, instead) for size, instead in sizes):
        return False
    return names.num_heads == 1 or len(found.branches) == len(like.branches)
