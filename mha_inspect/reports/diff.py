"""The reports of `diff`: of two layers, and of two checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .common import Difference, Environment, LayerInfo, MeasuredAgainst, Report, Verdict
from .params import StoredName
from .trace import OpRef, Path

SideName = Literal["left", "right"]
TensorVerdict = Literal["same bits", "same within rounding", "same, permuted", "differs", "other shape"]


@dataclass(frozen=True)
class DiffSide:
    """One of the two that are compared."""

    label: str
    """What sentences call it: `torch`, `torch with dtype bfloat16`."""
    environment: Environment
    layer: LayerInfo
    settings: dict[str, Any]
    """What was set for this side alone."""
    path: Path
    """How PyTorch runs its plain forward."""
    numel: int
    """Number of its parameters."""
    output_shape: tuple[int, ...]
    rounding_error: float | None
    """Largest distance of the plain output from the same computation in float64; None where it is float64 itself, or
    where dropout is at work."""
    measured_against: MeasuredAgainst = "float64"
    """What that, and the rounding error of its stages, is measured against."""


@dataclass(frozen=True)
class StageSide:
    """A stage as one side has it."""

    shape: tuple[int, ...]
    axes: str
    dtype: str
    opened: bool
    """Whether its plain forward fuses this stage away, and it was opened to be seen."""
    op: OpRef | None
    """None for an input."""
    count: int = 1
    """How many such tensors there are: one a head, where a layer loops over its heads."""


@dataclass(frozen=True, kw_only=True)
class StageRow(Difference):
    """A stage on both sides, and how far apart they are; no verdict where one side does not have the stage."""

    name: str
    left: StageSide | None
    """None where this side does not have it."""
    right: StageSide | None
    compared: str
    """The canonical axes in which it was compared, or what stands for them."""
    note: str = ""
    attention: int | None = None
    """Which of several attentions, from 1; None where each side has one."""


@dataclass(frozen=True)
class NoiseSource:
    """What rounding the differences are measured against."""

    dtype: str
    """The coarser of the two dtypes."""
    sides: tuple[SideName, ...]
    """The sides that have it."""


@dataclass(frozen=True)
class SharedWeights:
    """How both sides came to the same weights."""

    whole: bool
    """Whether every number of the one is in the other."""
    sentence: str
    left_out: tuple[str, ...]
    """What a side has no place for, and why."""


@dataclass(frozen=True, repr=False)
class DiffReport(Report):
    """Two layers, or one under two settings, with the same weights and the same input."""

    command = "diff"

    left: DiffSide
    right: DiffSide
    weights: SharedWeights
    noise: NoiseSource
    stages: tuple[StageRow, ...]
    first_differing_stage: str | None
    """None where no stage differs."""
    output: Difference
    """Of what the two plain forwards return, compared in canonical axes."""
    verdict: Verdict
    """That of the outputs of the plain forwards."""
    notes: tuple[str, ...]
    """Sentences that a reader should not miss."""
    answer: tuple[str, ...]
    """The answer in plain sentences, from what was measured."""

    @property
    def ok(self) -> bool:
        """Whether the sides are the same."""
        return self.verdict == "same"


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

    @property
    def ok(self) -> bool:
        """Whether the sides are the same."""
        return self.verdict == "same"
