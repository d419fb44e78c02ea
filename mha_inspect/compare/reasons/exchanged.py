"""A stage of one side is another stage of the other side: keys and values are exchanged."""

from __future__ import annotations

from ..pair import Difference, Pair, Why

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("q_heads", "k_heads", "v_heads"))


def exchanged(pair: Pair, difference: Difference) -> Why | None:
    """Return the stage of the right that is this stage of the left."""
    if not difference.is_clear:
        return None
    stage, where = difference.stage, difference.where
    for group in _GROUPS:
        for other in group:
            if stage not in group or other == stage:
                continue
            content = pair.right.stage(other)
            if content is not None and difference.is_explained_by(content):
                return Why("order", f"{stage} {where.left} is {other} {where.right}.")
    return None
