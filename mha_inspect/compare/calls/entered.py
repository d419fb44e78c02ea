"""The input of the attention differs, e.g. by the positions that are added to it."""

from __future__ import annotations

from torch import Tensor

from ...running.subject import Run
from ..pair import Why, are_near
from .pair import CallPair, Continued, restarts, shape_without

POSITIONS_FIX = "Count positions from the number of all tokens so far."


def entered(pair: CallPair) -> Why | None:
    """Return where the input of the attention differs, and whether it has the embedding of another position."""
    queries = pair.queries("query", 1)
    if queries is None or queries.are_near:
        return None
    before = f"between attentions {pair.place} and {pair.place + 1}"
    if pair.place == 0:
        before = "before it"
        added = _added_position(pair.continued)
        if added is not None:
            gets = f"Position {pair.start} gets the embedding of position {added}"
            return Why("call", f"{gets}{restarts(added)}.", fix=POSITIONS_FIX)
    first = pair.start + queries.first_unlike(1)
    differs = f"The input of attention {pair.place + 1} differs at position {first}"
    return Why("call", f"{differs}: an operation {before} makes the difference.")


def _added_position(continued: Continued) -> int | None:
    """Return the position whose embedding the first token of the call gets instead of its own; None if unknown.

    In both runs, embeddings are the operands of additions before the first attention.
    """
    of_whole = _operands_added(continued.whole)
    of_call = _operands_added(continued.call)
    if len(of_whole) != len(of_call):
        return None
    for whole, call in zip(of_whole, of_call, strict=True):
        if call.dim() < 2 or whole.dim() != call.dim() or shape_without(-2, whole) != shape_without(-2, call):
            continue
        if call.shape[-2] != continued.length or whole.shape[-2] < continued.stop:
            continue
        places = []
        for start in range(whole.shape[-2] - continued.length + 1):
            if are_near(whole.narrow(-2, start, continued.length), call):
                places.append(start)
        if places and continued.start not in places:
            return places[0]
    return None


def _operands_added(run: Run) -> list[Tensor]:
    """Return the values of the operands of additions before the first attention, in order."""
    first = min(attention.score_product.op.index for attention, _ in run.attentions)
    values = run.recording.values
    operands: list[Tensor] = []
    for op in run.recording.ops[:first]:
        if op.base_name.rstrip("_") == "add" and len(op.inputs) == 2:
            operands += [values[tensor.id] for tensor in op.inputs if tensor.id in values]
    return operands
