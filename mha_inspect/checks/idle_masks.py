"""Masks that are given and leave the output as it is, e.g. since a block takes one and does not pass it on.

    class Block(nn.Module):
        def forward(self, x, mask):
            return x + self.attention(self.norm(x))        # expected: self.attention(self.norm(x), mask)

Every value of the mask is changed to its opposite, and the outputs are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..record.arguments import tensors_in
from ..reports.check import Finding
from .evidence import Evidence, RaisedError


def idle_masks(evidence: Evidence) -> Iterator[Finding]:
    """Yield the masks of the call that have no effect on any output, but a declared one, which is judged elsewhere."""
    if evidence.failed.intersection(("repeat", "finite")):
        return
    if evidence.sights and all(sight.keys == 1 for sight in evidence.sights):
        return  # the weight of a single key is 1 with any mask
    for name, value in evidence.values.items():
        if name == evidence.intent.padding or not isinstance(value, Tensor):
            continue
        if "mask" not in name and value.dtype != torch.bool:
            continue
        inverted = _inverted(value)
        if inverted is not None and _is_idle(evidence, name, inverted):
            yield _finding(evidence, name)


def _inverted(mask: Tensor) -> Tensor | None:
    """Return a mask with the opposite of every value; None if it has other values than two, or no mask's values."""
    if mask.is_meta or not mask.numel() or mask.is_complex():
        return None
    if mask.dtype == torch.bool:
        return ~mask
    is_zero = mask == 0
    is_one = mask == 1
    if bool((is_zero | is_one).all()):
        return 1 - mask
    if mask.is_floating_point() and bool((mask <= 0).all()):
        return torch.where(is_zero, mask.min(), torch.zeros_like(mask))
    return None


def _is_idle(evidence: Evidence, name: str, inverted: Tensor) -> bool:
    """Return whether a run with another value of an argument returns the same, bit for bit."""
    try:
        returned = evidence.returned({name: inverted})
    except RaisedError:
        return False
    before = _tensors(evidence.run.returned)
    after = _tensors(returned)
    if not before or len(before) != len(after):
        return False
    return all(map(_is_same, before, after))


def _tensors(returned: object) -> list[Tensor]:
    return [tensor.detach() for _, tensor in tensors_in(returned)]


def _is_same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.nan_to_num(), right.nan_to_num())


def _finding(evidence: Evidence, name: str) -> Finding:
    proof = f"With the opposite of every value in {name}, the output is the same bit for bit"
    return Finding(
        "padding",
        f"{name} is given and has no effect on the output.",
        f"{proof}." if _is_read(evidence, name) else f"{proof}: no operation reads it.",
        sure=False,
        fix=f"Pass {name} on to the attention, and apply it to the scores before the softmax.",
    )


def _is_read(evidence: Evidence, name: str) -> bool:
    """Return whether an operation reads an argument of the call."""
    recording = evidence.run.recording
    given = {named.tensor.id for named in recording.inputs if named.name == name}
    for op in recording.ops:
        for tensor in op.inputs:
            if tensor.id in given:
                return True
    return False
