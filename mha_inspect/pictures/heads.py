"""Pictures of heads beside each other: the size of what each holds of the parameters, and what each count looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SpecError
from ..reports.params import HeadNorms
from .grid import Picture, Side

if TYPE_CHECKING:
    from .stages import Attended


def norms_picture(norms: Sequence[HeadNorms]) -> Picture:
    """Return the norms of each head's part of W_q, W_k, W_v and W_o: a panel for each attention, heads side by side.

    What is drawn is how many times the mean of its matrix a head has, for one matrix may be as a whole far smaller than
    another: a dead head is 0, and twins are alike in every row. A head of keys and values that several heads of queries
    share stands at each of them. Raises `SpecError` where there are no norms.
    """
    parts = list(dict.fromkeys(one.part for one in norms))
    owners = list(dict.fromkeys(one.owner for one in norms))
    if not norms:
        raise SpecError("there is nothing to draw: no parameter is known to be split between heads.")
    most = max(len(one.norms) for one in norms)
    values = np.full((len(owners), len(parts), most), -np.inf, np.float32)
    for one in norms:
        heads = max(len(other.norms) for other in norms if other.owner == one.owner)
        own = np.array(one.norms)
        shared = np.repeat(own / (own.mean() or 1.0), heads // max(len(one.norms), 1))
        values[owners.index(one.owner), parts.index(one.part), : len(shared)] = shared
    every = {part: [norm for one in norms if one.part == part for norm in one.norms] for part in parts}
    ranges = ", ".join(f"{part} {min(own):.4g} to {max(own):.4g}" for part, own in every.items())
    return Picture(
        "norm of each head's part, over the mean of its matrix",
        tuple(owner or "the layer itself" for owner in owners),
        values,
        Side("part", tuple(parts)),
        Side("head"),
        notes=(f"Norms: {ranges}.",),
    )


def counts_picture(counts: Sequence[tuple[int, Attended]]) -> Picture:
    """Return the weights of each head count, averaged over the heads, one below the other.

    An element is masked where it is for every head. Raises `SpecError` as `Attended.picture`.
    """
    drawn = [one.picture("weights") for _, one in counts]
    first = drawn[0]
    panels = []
    for picture in drawn:
        masked = picture.values == -np.inf
        mean = np.where(masked, 0, picture.values).mean(axis=0, dtype=np.float32)
        panels.append(np.where(masked.all(axis=0), np.float32(-np.inf), mean))
    names = tuple(f"{count} head{'' if count == 1 else 's'}" for count, _ in counts)
    title = "weights, averaged over the heads"
    title += f", of {counts[0][1].name}" if counts[0][1].name else ""
    return Picture(title, names, np.stack(panels), first.rows, first.columns, notes=first.notes, below=True)
