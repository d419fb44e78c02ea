"""Check the slots of a cache: each token's value is beside its key, and empty slots get no weight."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

import torch
from torch import Tensor

from ...graph.attention import Attention
from ...graph.rerun import between
from ...naming.axes import AxisNames
from ...naming.canonical import content_of
from ...record.ops import Op
from ...reports.check import Finding
from ...text import plural
from .evidence import Evidence
from .replay import Factor, LostError, NotHereError, factors_of
from .tokens import of_each_kind


@partial(of_each_kind, "no cache was found")
def slots(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if a token's value is not in the slot of its key, or empty slots after it get weight."""
    key = Factor(evidence, attention, names, "key")
    writes = [op for op in between(evidence.run.recording, {key.source.id}, key.target) if op.kind == "write"]
    if not writes and names.lengths[0] == names.lengths[1]:
        raise NotHereError
    ends = [key.token(number) for number in sorted({0, prod(key.tokens) - 1})]
    own = [{row for _, row in key.changed(token)} for token in ends]
    if any(len(rows) != 1 for rows in own):
        raise LostError  # neighbours are mixed on purpose, or a token is in several windows
    found = _apart(evidence, attention, names, key, dict(zip(ends, (min(rows) for rows in own), strict=True)))
    if found is None and writes:
        found = _empty(evidence, attention, names, writes[-1], max(map(max, own)))
    yield from [found] if found else []


def _apart(
    evidence: Evidence, attention: Attention, names: AxisNames, key: Factor, slots: dict[tuple[int, ...], int]
) -> Finding | None:
    """Return a fault if the value of a token is in another slot than its key, or in one that is not read."""
    where, line = "", ""
    try:
        value = Factor(evidence, attention, names, "value")
        if value.tokens != key.tokens or value.target.shape[value.rows] != key.target.shape[key.rows]:
            return None
        for token, slot in slots.items():
            rows = {row for _, row in value.changed(token)}
            unread = [op for op in _unread(evidence, attention, key) if value.changes(token, op.inputs[-1])]
            if len(rows) == 1 and rows != {slot}:
                where, line = f"in slot {min(rows)}", next((op.source for op in unread), "")
            elif not rows and unread:
                where, line = "in a slot that is not read", unread[-1].source
            if where:
                break
    except LostError:
        unread = [] if "value" in attention.projections else _unread(evidence, attention, key)
        if unread:
            where, line, (token, slot) = "in a slot that is not read", unread[-1].source, next(iter(slots.items()))
    if not where:
        return None
    return Finding(
        "cache",
        "The value of a token is not in the slot of its key: the weight of the key goes to another value.",
        f"The key of token {list(token)} is in slot {slot} of the cache, and its value {where}.",
        source=line or attention.value_product.op.source,
        fix="Write the key and the value of a token into the same slot.",
    )


def _unread(evidence: Evidence, attention: Attention, key: Factor) -> list[Op]:
    """Return the operations that write what comes from the inputs into the memory of the values, and not the keys."""
    graph, product = evidence.run.graph, attention.value_product
    values = factors_of(attention)["value"]
    behind = graph.back(values, lambda op: not op.does("product", "convolution"))
    storages = {step.tensor.storage for step in behind}
    of_keys = {op.index for op in between(graph.recording, {key.source.id}, key.target)}
    writes = (op for op in evidence.writes if op.index < product.op.index and op.index not in of_keys)
    return [
        op
        for op in writes
        if op.inputs[0].storage in storages and len(op.inputs) > 1 and graph.comes_from_inputs(op.inputs[-1])
    ]


def _empty(evidence: Evidence, attention: Attention, names: AxisNames, write: Op, own: int) -> Finding | None:
    """Return a fault if slots after the new keys that nothing has been written into get weight."""
    sight = next((sight for sight in evidence.sights if sight.attention is attention), None)
    heads = [content_of(evidence.run, attention, names, f"{side}_heads") for side in "kv"]
    if sight is None or any(each is None or each.shape[2] != sight.keys for each in heads):
        return None
    blank = torch.stack([_blank(each) for each in heads if each is not None]).all(0)  # batch key
    filled = ~blank[:, :own].all(1)  # else nobody has called the module with the tokens before
    starts = evidence.arguments.starts_at_zero()
    weighed = (sight.seen & (blank & (filled | starts)[:, None])[:, None].cpu()).any(0).any(0)
    keys = weighed.nonzero().flatten().tolist()
    if not keys:
        return None
    where = "behind" if keys[-1] > own else "before"
    return Finding(
        "cache",
        f"Empty slots of the cache get weight: they are {where} the newest key, and no token was written into them.",
        f"The newest key is in slot {own}; {plural(len(keys), 'slot')} of zeros from slot {keys[0]} on get weight.",
        sure=where == "behind",
        source=write.source,
        fix="Cut the cache to the tokens so far, or mask out the other slots.",
    )


def _blank(heads: Tensor) -> Tensor:
    return (heads == 0).all(-1).all(1)
