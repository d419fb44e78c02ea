"""The report of `diff` of two checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .params import StoredName
from .report import Report

TensorVerdict = Literal["same bits", "same within rounding", "same, permuted", "differs", "other shape"]


@dataclass(frozen=True)
class CheckpointSide:
    """One of the two that are compared."""

    name: str
    tensors: int
    numel: int
    nbytes: int
    dtypes: tuple[str, ...]
    """Those of its tensors, the most frequent first."""


@dataclass(frozen=True)
class TensorPair:
    """A tensor on both sides."""

    name: str
    """On the left."""
    other: str
    """On the right: the same name, or one under which the same numbers lie."""
    left_shape: tuple[int, ...]
    right_shape: tuple[int, ...]
    left_dtype: str
    right_dtype: str
    verdict: TensorVerdict
    max_abs_difference: float | None
    """None where there is nothing to subtract, or nothing to be found in it."""
    relative_difference: float | None
    """‖left - right‖ / ‖left‖."""
    note: str = ""


@dataclass(frozen=True)
class PartPair:
    """A matrix or a bias of an attention, head by head."""

    left: str
    """Path of the attention."""
    right: str
    part: str
    """`W_q`, `b_v`."""
    verdict: TensorVerdict
    differences: tuple[float, ...]
    """‖left - right‖ / ‖left‖ of each head; empty where they are the same, or of another shape."""


@dataclass(frozen=True, repr=False)
class CheckpointDiffReport(Report):
    """Two checkpoints, tensor by tensor and head by head."""

    command = "diff-checkpoints"

    left: CheckpointSide
    right: CheckpointSide
    tensors: tuple[TensorPair, ...]
    only_left: tuple[StoredName, ...]
    only_right: tuple[StoredName, ...]
    parts: tuple[PartPair, ...]
    """Those of attentions in which a tensor is not the same."""
    verdict: Literal["same", "differs"]
    """`same` where every tensor is on both sides, with the same bits or within the rounding of the dtypes."""
    notes: tuple[str, ...]
    answer: tuple[str, ...]
    """The answer in plain sentences."""
