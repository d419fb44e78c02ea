"""Causes in the arguments of a forward: one that is None, and one of the wrong rank."""

from __future__ import annotations

import re

from ... import text
from ..edit import Edit
from ..facts import Facts
from ..views import uneven

_UNPACKED = r"values to unpack \(expected (?:at least )?(\d+)"
_UNEVEN_AXIS = r"can't divide axis of length (\d+) in chunks of (\d+)"
_EINOPS_SHAPE = r"Input tensor shape: (?:torch\.Size\()?\[[\d, ]*?(\d+)\]"
_CONVOLVED = {
    "conv1d": "batch channels length",
    "conv2d": "batch channels height width",
    "conv3d": "batch channels depth height width",
}
"""Convolution to the axes of its input, which may lack the batch."""


def unpacked_rank(facts: Facts) -> Edit | None:
    """Judge a tensor of another rank than the line that unpacks its shape: `batch, length, width = x.shape`."""
    said = re.search(_UNPACKED, facts.message)
    if said is None or not facts.unpacks_shape or len(facts.operands) != 1:
        return None
    operand, rank = facts.operands[0], int(said[1])
    if rank == len(operand.shape):
        return None
    way = f"give {operand.spelled} {rank} dimensions"
    if rank == len(operand.shape) + 1:
        way += f", e.g. {operand.spelled}[None] for a batch of one"
    what = f"{operand.is_shape}, {text.plural(len(operand.shape), 'dimension')}; this line expects {rank}."
    return Edit("wrong_rank", what, way=way)


def argument_is_none(facts: Facts) -> Edit | None:
    """Judge an argument that is None where the line uses it as a tensor."""
    if facts.error not in ("TypeError", "AttributeError") or not facts.missing:
        return None
    name = facts.missing[0]
    way = f"pass {name}, e.g. trace TARGET --input-shape {name}=SIZES:DTYPE, or skip this line if {name} is None"
    return Edit("argument_is_none", f"{name} is None, and this line uses it as a tensor.", way=way)


def rank_of_convolution(facts: Facts) -> Edit | None:
    """Judge the rank of a convolution's input, which is `batch channels length` for conv1d."""
    x, axes = facts.given("input"), _CONVOLVED.get(facts.base)
    if axes is None or x is None or not x.given.value.numel() or x.given.value.is_meta:
        return None
    rank = len(axes.split())
    if len(x.shape) in (rank - 1, rank):
        return None
    return Edit("wrong_rank", f"{x.is_shape}, {len(x.shape)} dimensions; {facts.base} expects {rank}: {axes}.")


def pattern_of_einops(facts: Facts) -> Edit | None:
    """Judge an einops pattern that cannot divide a width, the last dimension, evenly."""
    said = re.search(_UNEVEN_AXIS, facts.message)
    width = re.search(_EINOPS_SHAPE, facts.message)
    if facts.error != "EinopsError" or said is None or width is None:
        return None
    if said[1] != width[1]:
        return None  # the pattern divides another dimension: the sequence, perhaps
    return uneven(int(said[1]), int(said[2]))
