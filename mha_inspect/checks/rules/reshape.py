"""Check that a reshape does not stand where a transposition belongs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, permutations
from math import prod
from operator import mul

import numpy as np

from ...graph.rerun import between
from ...record.ops import Op
from ...reports.check import Finding
from ...running.subject import Run
from ...text import listed, shape
from ..evidence import Evidence
from ..lab import NotPossibleError
from ..registry import rule

_RESHAPES = ("view", "_unsafe_view", "_reshape_alias")
_MOST_DIMS = 6
"""Of a tensor with more dimensions, no permutation is searched."""


@rule(after=("heads",), on_meta="every reshape splits or joins whole dimensions")
def reshape(evidence: Evidence) -> Iterator[Finding]:
    """Every reshape splits or joins whole dimensions.

    A reshape keeps the order of the elements in memory: a dimension is split in two, or neighbours are
    joined, and two are never exchanged. A video of `batch channel time pixel` that is reshaped to
    `(batch time) channel pixel` has the right sizes, and its frames are some channels of some times. No
    error says so, and the model trains. The sizes of each reshape are compared: one that neither splits
    nor joins mixes dimensions. Between queries and weights that is meant, as in the shift of relative
    scores.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:OfFrames --input-shape x=2x10x3x7
    from torch import nn


    class OfFrames(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(10, 30)

        def forward(self, x):
            batch, channels, times, pixels = x.shape
            frames = x.reshape(batch * times, channels, pixels)
            q, k, v = self.qkv(frames.mT).chunk(3, -1)
            return (q @ k.mT / 10**0.5).softmax(-1) @ v
    ```

    ## Right

    ```diff
    -        frames = x.reshape(batch * times, channels, pixels)
    +        frames = x.permute(0, 2, 1, 3).flatten(0, 1)
    ```
    """
    run = evidence.run
    if not run.attentions:
        raise NotPossibleError("no attention was found")
    # Without a permutation that would keep dimensions whole, e.g. in stripes of a length, mixing is meant.
    mixing = [op for op in run.recording.ops if _mixes(op) and _fix_of(op) and not _is_shift(run, op)]
    if not mixing:
        return
    first = mixing[0]
    before, after = first.inputs[0].shape, first.output.shape
    elsewhere = dict.fromkeys(op.source for op in mixing if op.source != first.source)
    more = f" The same at {listed(list(elsewhere))}." if elsewhere else ""
    yield Finding(
        "reshape",
        f"The reshape of {shape(before)} to {shape(after)} mixes dimensions: it stands where a transposition belongs.",
        _carry(before, after) + more,
        sure=False,
        source=first.source,
        fix=_fix_of(first),
    )


def _mixes(op: Op) -> bool:
    """Return whether an operation reshapes, and neither splits nor joins whole dimensions."""
    if op.base_name not in _RESHAPES or not op.output.numel:
        return False
    before, after = op.inputs[0].shape, op.output.shape
    return _is_mixed(before, after) or _exchanges(before, after)


def _is_mixed(before: Sequence[int], after: Sequence[int]) -> bool:
    """Return whether a reshape of these sizes cuts across dimensions.

    >>> _is_mixed((2, 12, 5), (2, 3, 4, 5)), _is_mixed((2, 12, 5), (2, 5, 12))
    (False, True)
    """
    return bool(_mixed_dims(before, after))


def _exchanges(before: Sequence[int], after: Sequence[int]) -> bool:
    """Return whether neighbours that are joined have the sizes after a reshape, in another order.

    >>> _exchanges((2, 32, 4, 4), (2, 16, 32)), _exchanges((2, 8, 4, 8), (2, 8, 32))
    (True, False)
    """
    before, after = ([size for size in sizes if size > 1] for sizes in (before, after))
    if not after or len(after) >= len(before) or len(before) > _MOST_DIMS:
        return False
    joined = []
    for cuts in combinations(range(1, len(before)), len(after) - 1):
        joined.append(tuple(prod(before[start:stop]) for start, stop in pairwise((0, *cuts, len(before)))))
    has_others = any(sorted(sizes) == sorted(after) for sizes in joined)
    return has_others and tuple(after) not in joined


def _mixed_dims(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Return the dimensions after a reshape that have a part of each of two dimensions before it."""
    whole = set(_cuts(before))
    ends = _cuts(after)
    mixed = []
    for dim, (low, high) in enumerate(reversed([*pairwise(ends)])):
        inner = [cut for cut in whole if low < cut < high]
        is_ragged = any(cut % low or high % cut for cut in inner)
        has_parts = bool(inner) and low not in whole and high not in whole
        if is_ragged or has_parts:
            mixed.append(dim)
    return mixed


def _cuts(sizes: Sequence[int]) -> list[int]:
    """Return the number of elements behind each dimension, from the last: `[1, 5, 60]` of `(12, 5)`."""
    return list(accumulate(reversed(sizes), mul, initial=1))


def _is_shift(run: Run, op: Op) -> bool:
    """Return whether the reshape is between the queries, or a product of them with distances, and the weights."""
    graph = run.graph
    for attention, _ in run.attentions:
        if not graph.leads_to(op.output, attention.stages["weights"]):
            continue
        if graph.leads_to(attention.value_product.op.output, op.output):
            continue
        queries = attention.stages.get("q_heads")
        if queries is not None and graph.leads_to(queries, op.output):
            return True
        # Queries with a bias of their own for distances are no stage.
        steps = between(run.recording, set(run.recording.input_ids), op.output)
        if any(step.does("product") and not graph.is_projection(step) for step in steps):
            return True
    return False


# -- what is mixed ----------------------------------------------------------------------------------------------------


def _carry(before: Sequence[int], after: Sequence[int]) -> str:
    """Return two neighbours of the result that are at other places of two dimensions before it; empty without any."""
    for dim in _mixed_dims(before, after):
        found = _neighbours(before, after, dim)
        if found is not None:
            return found.sentence
    return ""


@dataclass(frozen=True)
class _Neighbours:
    """Two entries of one dimension after a reshape, and where they were before it."""

    dim: int
    entries: tuple[list[int], list[int]]
    were: tuple[list[int], list[int]]

    @property
    def sentence(self) -> str:
        here, there = self.entries
        was_here, was_there = self.were
        return (
            f"Along dimension {self.dim} of the result, entry {here} is {was_here} of what is reshaped, and entry "
            f"{there} is {was_there}."
        )


def _neighbours(before: Sequence[int], after: Sequence[int], dim: int) -> _Neighbours | None:
    """Return two neighbours along a dimension between which two dimensions before the reshape change."""
    start = [0] * len(after)
    place = 0
    for number in range(after[dim]):
        entry = [*start[:dim], number, *start[dim + 1 :]]
        step = prod(after[dim + 1 :])
        was = np.unravel_index(number * step, before)
        earlier = np.unravel_index(place * step, before)
        changed = sum(int(one != other) for one, other in zip(was, earlier, strict=True))
        if changed > 1:
            last = [*start[:dim], place, *start[dim + 1 :]]
            return _Neighbours(dim, (last, entry), ([*map(int, earlier)], [*map(int, was)]))
        place = number
    return None


# -- the permutation that is missing ----------------------------------------------------------------------------------


def _fix_of(op: Op) -> str:
    """Return the one permutation before or after the reshape with which dimensions stay whole; empty without one."""
    before, after = op.inputs[0].shape, op.output.shape
    order = _order(before, after)
    if _may_be_patches(before, after) or _may_be_patches(after, before):
        return "Split the height and the width first, and permute: (H/p, p, W/p, p) to (H/p, W/p, p, p) and back."
    if order is not None:
        return f"Use permute{order} before the reshape."
    order = _order(after, before)
    if order is None:
        return ""
    sizes = tuple(after[dim] for dim in order)
    back = tuple(int(place) for place in np.argsort(order))
    return f"Use reshape{sizes}, then permute{back}."


def _may_be_patches(image: Sequence[int], pieces: Sequence[int]) -> bool:
    """Return whether a square image may be cut into square pieces, of as many places or as many pieces.

    >>> _may_be_patches((2, 3, 16, 16), (2, 16, 48)), _may_be_patches((4, 16, 8, 8), (4, 64, 16))
    (True, False)
    """
    for height, width in pairwise(image):
        if height != width or height * width in pieces:
            continue
        for side in range(2, height):
            if height % side == 0 and ({side**2, (height // side) ** 2} & {*pieces}):
                return True
    return False


def _keeps_whole(before: Sequence[int], after: Sequence[int]) -> bool:
    """Return whether each dimension after a reshape is a part of one dimension before it, or some of them whole."""
    whole = set(_cuts(before))
    for low, high in pairwise(_cuts(after)):
        joins = any(low < cut < high for cut in whole)
        if joins and not {low, high} <= whole:
            return False
    return not _mixed_dims(before, after)


def _order(sizes: Sequence[int], other: Sequence[int]) -> tuple[int, ...] | None:
    """Return the order of dimensions that exchanges the fewest pairs and is whole in `other`; None without one alone.

    >>> _order((2, 5, 12), (2, 3, 4, 5)), _order((2, 32, 4, 5), (2, 20, 32))
    ((0, 2, 1), (0, 2, 3, 1))
    """
    if len(sizes) > _MOST_DIMS:
        return None
    by_exchanges: dict[int, list[tuple[int, ...]]] = {}
    for order in permutations(range(len(sizes))):
        if order == tuple(range(len(sizes))) or (sizes[0] == other[0] and order[0]):
            continue  # the batch stays in front
        ordered = [sizes[dim] for dim in order]
        if _keeps_whole(ordered, other):
            exchanged = sum(left > right for left, right in combinations(order, 2))
            by_exchanges.setdefault(exchanged, []).append(order)
    if not by_exchanges:
        return None
    fewest = by_exchanges[min(by_exchanges)]
    return fewest[0] if len(fewest) == 1 else None
