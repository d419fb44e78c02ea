"""A suspected cause of a failing call: what is wrong, and fixes that are not tried yet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .facts import Operand
from .tried import Fix

Shape = tuple[int, ...]

SAME_BATCH = "Both tensors must have the same batch size."
SAME_SEQUENCE = "take keys and values from the same sequence"


@dataclass(frozen=True, eq=False)
class Suspect:
    """A cause with its fixes, which are not tried yet."""

    name: str
    """One of `causes.CAUSES`."""
    explanation: str
    """What is wrong, as sentences with the real numbers."""
    fixes: tuple[Fix, ...] = ()


def shared_item(x: Operand, dimension: int, batch: int) -> tuple[Fix, ...]:
    """Return the fix to share the only item of a batch; several items cannot be shared."""
    if x.shape[dimension] != 1:
        return ()
    sizes = [-1] * len(x.shape)
    sizes[dimension] = batch
    written = ", ".join(map(str, sizes))

    def expanded(tensor: Tensor) -> Tensor:
        return tensor.expand(sizes)

    return (Fix.editing(x, expanded, f"use {x.name}.expand({written}) to share its one item"),)
