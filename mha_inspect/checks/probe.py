"""Laws that a part of one run shows: a stage is changed, and only the steps from there to another stage run again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..graph.attention import Attention
from ..naming.axes import AxisNames
from ..naming.canonical import canonical, sizes_in
from .evidence import Evidence
from .factors import Factor, NotHereError, Way

_MOST_SCORES = 1 << 20
"""The largest number of weights that are computed again."""
_LEAST = 1e-4
"""A weight that moves by less may be rounded."""


@dataclass(frozen=True)
class MovedRows:
    """The rows of weights that change with one query."""

    changed: int
    """The number of the query in its product."""
    moved: tuple[int, ...]
    """The queries whose weights change."""


def moved_rows(evidence: Evidence, attention: Attention, names: AxisNames) -> MovedRows:
    """Return the rows of weights that change when a query in the middle does.

    Raise `NotHereError` for queries that compete for keys, weights of a fused kernel or of a loop, too many or no
    weights, and a product that has no row for each query. Raise `LostError` if the steps cannot run again.
    """
    weights = attention.stages.get("weights")
    if weights is None or attention.branches or attention.over_queries or attention.softmax.kernel is not None:
        raise NotHereError
    if weights.numel > _MOST_SCORES:
        raise NotHereError
    factor = Factor(evidence, attention, names, "query")
    count = factor.target.shape[factor.rows]
    if not factor.target.numel:
        raise NotHereError
    in_middle = torch.zeros(factor.target.shape, dtype=torch.bool)
    in_middle.select(factor.rows, count // 2).fill_(True)
    # A largest score that is subtracted from all of them moves every weight by rounding.
    least = max(_LEAST, 16 * torch.finfo(getattr(torch, weights.dtype)).eps)
    changed = Way(evidence, factor.target, weights).changed_by(in_middle, least)
    sizes = sizes_in(attention, names, "weights")
    by_query = canonical(changed, "weights", names.of_stage("weights"), sizes, names.head_order)
    if by_query is None or count % by_query.shape[-2]:
        raise NotHereError
    rows = by_query.any(-1).flatten(0, -2).any(0)
    return MovedRows(count // 2, tuple(rows.nonzero().flatten().tolist()))
