"""Name what a run shows as in a wider one of the same forward.

A dimension of size one leaves no trace in a view: what it is shows where it has another size.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.attention import Attention
from .axes import AxisNames
from .sizes import at_size

Named = tuple[Attention, AxisNames]


def named_after(own: Sequence[Named], others: Sequence[Named]) -> tuple[Named, ...]:
    """The attentions of a run with the names of those of another, where these are the same ones."""
    if len(own) != len(others) or not all(map(_is_same, own, others)):
        return tuple(own)
    return tuple(
        (found, names.taking(_stages_at_size(found, *other))) for (found, names), other in zip(own, others, strict=True)
    )


def _stages_at_size(found: Attention, like: Attention, names: AxisNames) -> dict[str, str]:
    """The axes of those stages of an attention that another one has as well, with as many dimensions."""
    return {
        stage: at_size(names.of_stage(stage), tensor.shape, like.stages[stage].shape)
        for stage, tensor in found.stages.items()
        if stage in like.stages and len(like.stages[stage].shape) == len(tensor.shape)
    }


def _is_same(own: Named, other: Named) -> bool:
    """Whether an attention of one run is that of the other: a size of one may be another there."""
    (found, names), (like, theirs) = own, other
    sizes = ((names.num_heads, theirs.num_heads), (names.num_kv_heads, theirs.num_kv_heads))
    if found.module != like.module or any(size not in (1, instead) for size, instead in sizes):
        return False
    return names.num_heads == 1 or len(found.branches) == len(like.branches)
