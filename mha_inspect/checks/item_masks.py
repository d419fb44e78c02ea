"""Find a mask of one batch item that reaches another item: a run in which item 0 has the mask of another item.

    attn_mask.repeat(heads, 1, 1)        # for scores of (batch heads): repeat_interleave(heads, 0)

Only masks that differ between the items are changed: one mask for all items is right wherever it is read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..record.ops import Op
from ..reports.check import Finding
from .arguments import CACHES
from .evidence import OTHER_SIZES, Evidence, RaisedError

_LAYOUTS = {
    "(batch heads) query key": "mask.repeat_interleave(heads, 0) for scores of (batch heads) query key",
    "(heads batch) query key": "mask.repeat(heads, 1, 1) for scores of (heads batch) query key",
    "batch heads query key": "mask[:, None] for scores of batch heads query key",
}
"""How a mask of `batch query key` is laid over scores, by their axes."""


def masks_of_other_items(evidence: Evidence) -> Iterator[Finding]:
    """Yield the first argument whose entry for batch item 0 changes the output of another item."""
    for name, given in evidence.values.items():
        if not isinstance(given, Tensor) or not _is_by_item(evidence, name, given):
            continue
        item = _item_with_another_mask(given)
        if item is None:
            continue
        changed = given.clone()
        changed[0] = given[item]
        try:
            output = evidence.output_with({name: changed})
        except RaisedError:
            continue
        moved = evidence.differences(output, times=OTHER_SIZES)[1:].amax(1)
        if bool((moved > 0).any()):
            yield _finding(evidence, name, item, moved)
            return


def _is_by_item(evidence: Evidence, name: str, given: Tensor) -> bool:
    """Return whether an argument is `batch query key` or `batch heads query key`, by its sizes.

    With as many heads as items, the three dimensions of a mask may be `heads query key`.
    """
    if name in CACHES or name == evidence.intent.cache:
        return False
    if any(name in source.names for source in evidence.sources):
        return False
    if given.is_meta or given.is_complex() or given.dim() not in (3, 4):
        return False
    items = given.shape[0]
    if items != evidence.source.rows:
        return False
    if given.dim() == 3 and items in _numbers_of_heads(evidence):
        return False
    return any(_fits(given, sight.queries, sight.keys) for sight in evidence.sights)


def _numbers_of_heads(evidence: Evidence) -> set[int]:
    """Return the numbers of query heads and of key heads of all attentions."""
    numbers: set[int] = set()
    for _, names in evidence.run.attentions:
        numbers.update((names.num_heads, names.num_kv_heads))
    return numbers


def _fits(given: Tensor, queries: int, keys: int) -> bool:
    """Return whether a mask has a place for each key, and for each query or for all of them."""
    if keys < 2 or given.shape[-1] != keys:
        return False
    return given.shape[-2] in (1, queries)


def _item_with_another_mask(given: Tensor) -> int | None:
    """Return the first item whose mask is not that of item 0; None if all items have one mask."""
    for item in range(1, len(given)):
        if not torch.equal(given[item], given[0]):
            return item
    return None


def _finding(evidence: Evidence, name: str, item: int, moved: Tensor) -> Finding:
    """Return the fault; `moved` is the change of the output by item, from item 1 on."""
    items = moved.nonzero().flatten()
    first = int(items[0])
    repeat = _repeat_of(evidence, name)
    if repeat is None:
        line = evidence.mask_line
        fix = _how_to_lay_over(evidence)
    else:
        line = repeat.source
        fix = f"Use {name}.repeat_interleave(heads, 0): the heads of one item are neighbours."
    return Finding(
        "batch",
        f"The {name} of one batch item changes the output of another.",
        f"With the {name} of item {item} given to item 0 too, the output of item {first + 1} changes by "
        f"{float(moved[first]):.3g}. In all, {len(items)} of the {len(moved)} other items change.",
        source=line,
        fix=fix,
    )


def _how_to_lay_over(evidence: Evidence) -> str:
    """Return how a mask is laid over the first masked scores; empty if their axes are others than usual."""
    for sight in evidence.sights:
        if sight.masked:
            how = _LAYOUTS.get(sight.layout)
            return "" if how is None else f"Align the mask with the batch: {how}."
    return ""


def _repeat_of(evidence: Evidence, name: str) -> Op | None:
    """Return the operation that repeats an argument along its first dimension; None if there is none."""
    graph = evidence.run.graph
    given = {named.tensor.id for named in graph.recording.inputs if named.name == name}
    for op in graph.recording.ops:
        if op.base_name != "repeat" or not op.inputs:
            continue
        repeated = op.inputs[0]
        if op.output.shape[:1] == repeated.shape[:1]:
            continue
        if graph.before_moves(repeated).id in given:
            return op
    return None
