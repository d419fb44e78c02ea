"""Query heads share keys and values in another order: `0 0 1 1` by repeat_interleave, `0 1 0 1` by repeat."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..pair import Difference, Pair, Why


def shared(pair: Pair, difference: Difference) -> Why | None:
    """Return which key head a query head uses on each side, if that is all of the difference of keys or values."""
    if pair.weights is None or difference.stage not in ("k_heads", "v_heads"):
        return None
    ours, theirs = (weights.users() for weights in pair.weights)
    heads = difference.left.shape[1]
    if ours == theirs or sorted(ours) != sorted(theirs) or len(ours) != heads:
        return None
    order = torch.tensor([theirs.index(key_head) for key_head in ours])
    if not difference.is_explained_by(difference.right.index_select(1, order.to(difference.right.device))):
        return None
    where = difference.where
    return Why(
        "shared heads",
        f"Query heads share keys in another order: head 1 uses key head {ours[1]} {where.left} and {theirs[1]} "
        f"{where.right}{_repeats(ours, theirs)}. Query heads {_in_order_of(ours, theirs)} {where.left} share them "
        f"alike.",
        fact="shared",
    )


def _in_order_of(left: Sequence[int], right: Sequence[int]) -> str:
    """Return the query heads of the left in the order in which the right shares keys: `0 2 1 3`."""
    remaining: dict[int, list[int]] = {}
    for head, key_head in enumerate(left):
        remaining.setdefault(key_head, []).append(head)
    return " ".join(str(remaining[key_head].pop(0)) for key_head in right)


def _repeats(left: Sequence[int], right: Sequence[int]) -> str:
    """Return how torch repeats key heads for these query heads, on both sides; empty for other orders."""
    ours = _repeat(left)
    theirs = _repeat(right)
    return f", {ours} against {theirs}" if ours and theirs else ""


def _repeat(users: Sequence[int]) -> str:
    """Return how torch repeats key heads: `0 1 0 1` by repeat, `0 0 1 1` by repeat_interleave; empty for others."""
    heads, count = len(users), len(set(users))
    if list(users) == [head % count for head in range(heads)]:
        return "repeat"
    if list(users) == [head * count // heads for head in range(heads)]:
        return "repeat_interleave"
    return ""
