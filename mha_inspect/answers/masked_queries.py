"""Queries that see no key, for a mask forbids them all: which they are, and what becomes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..naming.canonical import content_of
from ..naming.visibility import Rows, visibility
from ..running.run import Run


def fate_of(weights: Tensor | None, rows: Rows) -> str:
    """Return what the weights, `batch heads query key`, of queries without keys are: `NaN`, `zero`, `uniform`.

    `numbers` where they are anything else, or not known: one head without keys is enough for a query to be one.
    """
    if weights is None:
        return "numbers"
    known = [weights[batch, :, query] for batch, query in rows if batch < len(weights) and query < weights.shape[2]]
    if not known:
        return "numbers"
    low, high = torch.cat(known).double().aminmax(dim=-1)
    if bool(high.isnan().any()):
        return "NaN"
    if bool((high == 0).any()):
        return "zero"
    return "uniform" if bool((high - low <= 1e-2 * high).any()) else "numbers"


def masked_sentence(rows: Rows, fate: str) -> str:
    """Return which queries see no key, and what becomes of them."""
    have = "1 query has" if len(rows) == 1 else f"{len(rows):,} queries have"
    batch, query = rows[0]
    return f"{have} no key left to look at (the first: query {query} of batch row {batch}): {fate}."


def blind_attention(run: Run) -> tuple[int, Rows] | None:
    """Return the place of the first attention with queries that see no key, and these; None where there is none."""
    if all(sight.blind is None for sight in run.recording.sights.values()):
        return None
    for place, (attention, names) in enumerate(run.attentions):
        known = visibility(run.graph, attention, names)
        if known is not None and known.blind:
            return place, known.blind
    return None


def masked_note(place: int, rows: Rows, kept: Run | None) -> str:
    """Return which queries of an attention see no key, and what becomes of them in a run whose tensors are kept."""
    if kept is None:
        return masked_sentence(rows, "what becomes of them is not seen, for the module does not run a second time")
    weights = content_of(kept, *kept.attentions[place], "weights")
    return masked_sentence(rows, f"their weights are {fate_of(weights, rows)}")
