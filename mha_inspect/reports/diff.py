"""Define the reports of `diff`, for two layers and for two checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..explained import explain_fields
from .common import Difference, Environment, LayerInfo, MeasuredAgainst, Report, Verdict
from .params import StoredName
from .trace import OpRef, Path

SideName = Literal["left", "right"]
ReasonKind = Literal[
    "order",
    "rotation",
    "shared heads",
    "scale",
    "mask",
    "norm",
    "padding",
    "number",
    "position",
    "dtype",
    "term",
    "factor",
    "transposed",
    "low rank",
]
TensorVerdict = Literal["same bits", "same within rounding", "same, permuted", "differs", "other shape"]


@dataclass(frozen=True)
class DiffSide:
    """One of the two compared layers."""

    label: str
    """Name of the side in sentences: `torch`, `torch with dtype bfloat16`."""
    environment: Environment
    """The conditions of the run: device, dtype, seed and version of torch."""
    layer: LayerInfo
    """The inspected layer with its sizes."""
    settings: dict[str, Any]
    """Settings for this side only."""
    path: Path
    """How PyTorch runs its plain forward."""
    numel: int
    """Number of its parameters."""
    output_shape: tuple[int, ...]
    """Shape of the output of its plain forward."""
    rounding_error: float | None
    """Largest difference of the plain output from the same computation in float64; None if the layer is in float64 or
    uses dropout."""
    measured_against: MeasuredAgainst = "float64"
    """The run that this rounding error and those of the stages are measured against."""


@dataclass(frozen=True)
class StageSide:
    """A stage on one side."""

    shape: tuple[int, ...]
    """Size of each dimension."""
    axes: str
    """Name of each dimension, as an einops pattern; a dimension whose name is not known is a number."""
    dtype: str
    """Data type of the elements."""
    opened: bool
    """Whether a fused kernel of the plain forward hides this stage, so that the kernel was opened."""
    op: OpRef | None
    """The operation that made it; None for an input."""
    count: int = 1
    """Number of tensors: one per head if the layer loops over its heads."""


@dataclass(frozen=True, kw_only=True)
class StageRow(Difference):
    """A stage on both sides, and the difference; no verdict if one side does not have the stage."""

    name: str
    """One of `mha_inspect.naming.pattern.STAGES`."""
    left: StageSide | None
    """None if the left side does not have this stage."""
    right: StageSide | None
    """None if the right side does not have this stage."""
    compared: str
    """The canonical axes in which the stage was compared, or a phrase in their place."""
    note: str = ""
    """Why the stage was not compared, or an important sentence on the comparison; else empty."""
    attention: int | None = None
    """Number of the attention, from 1; None if each side has only one."""


@dataclass(frozen=True)
class NoiseSource:
    """The dtype whose rounding the differences are compared with."""

    dtype: str
    """The coarser of the two dtypes."""
    sides: tuple[SideName, ...]
    """The sides with this dtype."""


@dataclass(frozen=True)
class SharedWeights:
    """How both sides got the same weights."""

    whole: bool
    """Whether every number of one side is also in the other."""
    sentence: str
    """How the weights were copied, or why they were not."""
    left_out: tuple[str, ...]
    """Weights that were not copied, and why."""


@dataclass(frozen=True, kw_only=True)
class OutputDifference(Difference):
    """The difference of another tensor that both forwards return."""

    name: str
    """Its name or number among what the forward returns: `pooled`, `1`."""


@dataclass(frozen=True)
class DiffReason:
    """Why both sides differ, as it was tried or measured."""

    kind: ReasonKind
    """The kind of the difference."""
    sentence: str
    """The reason, with the numbers of both sides."""
    line: str = ""
    """The line that converts a weight of the left, named `w`, for the right; else empty."""


@dataclass(frozen=True, repr=False)
class DiffReport(Report):
    """The comparison of two layers, or of one layer in two settings, with the same weights and input."""

    command = "diff"

    left: DiffSide
    """The left side."""
    right: DiffSide
    """The right side."""
    weights: SharedWeights
    """How both sides got the same weights."""
    noise: NoiseSource
    """The dtype whose rounding the differences are compared with."""
    stages: tuple[StageRow, ...]
    """Each stage on both sides, in the order of computation."""
    first_differing_stage: str | None
    """Name of the first stage that differs; None if no stage differs."""
    output: Difference
    """Difference of the outputs of the two plain forwards, in canonical axes."""
    outcome: Verdict
    """The verdict on the outputs of the plain forwards; `inconclusive` also if the weights could not be copied."""
    notes: tuple[str, ...]
    """Important sentences on this comparison."""
    answer: tuple[str, ...]
    """The answer in sentences, from the measurements."""
    further: tuple[OutputDifference, ...] = ()
    """Differences of the other tensors that both forwards return by the same name, in one shape."""
    reasons: tuple[DiffReason, ...] = ()
    """Why the outputs differ, as far as that could be tried or measured."""
    buffers: tuple[str, ...] = ()
    """Names of buffers that differ. Buffers are not weights: they are not copied, and each side keeps its own."""
    _shows_all: bool = False
    """Whether its page has a row for each stage, also for those that are the same."""

    @property
    def ok(self) -> bool:
        """Whether the sides are the same."""
        return self.outcome == "same"


@dataclass(frozen=True)
class CheckpointSide:
    """One of the two compared checkpoints."""

    name: str
    """Name of the file or folder."""
    tensors: int
    """Number of its tensors."""
    numel: int
    """Number of elements of all its tensors."""
    nbytes: int
    """Bytes of all its tensors."""
    dtypes: tuple[str, ...]
    """The dtypes of its tensors, the most frequent first."""


@dataclass(frozen=True)
class RowOrder:
    """How the rows or columns of the right tensor are those of the left one in another order."""

    axis: Literal["rows", "columns"]
    """What is in another order."""
    patterns: tuple[str, ...]
    """The order as an einops pattern, or in words; several if sizes are equal, empty if the order has no name."""
    meanings: tuple[str, ...]
    """What each pattern means, e.g. `rotary halves on the left, interleaved pairs on the right`; else empty."""
    line: str
    """The line that reorders the left tensor, named `w`; empty if no pattern gives it."""
    transposed: bool
    """Whether the left tensor is transposed too."""
    remaining: float
    """What remains of the difference, relative to the size of the right tensor: 0 if the numbers are the same."""
    kept: Literal["all", "some", "repeated"] = "all"
    """Whether the right tensor has all rows of the left one, some (without pruned heads), or repeats them."""
    swapped: bool = False
    """Whether left and right are swapped in this description: the left tensor has some rows of the right one."""


@dataclass(frozen=True)
class TensorPair:
    """A tensor that is in both checkpoints."""

    name: str
    """Name on the left."""
    right_name: str
    """Name on the right: the same, or that of a tensor with the same numbers."""
    left_shape: tuple[int, ...]
    """Shape on the left."""
    right_shape: tuple[int, ...]
    """Shape on the right."""
    left_dtype: str
    """Data type on the left."""
    right_dtype: str
    """Data type on the right."""
    verdict: TensorVerdict
    """Whether both tensors are the same: bit for bit, within rounding, or in another order."""
    max_abs_difference: float | None
    """Largest absolute difference; None if it was not computed: no elements, no numbers, another shape or layout."""
    relative_difference: float | None
    """‖left - right‖ / ‖left‖."""
    note: str = ""
    """Important sentence on this pair; else empty."""
    order: RowOrder | None = None
    """The order of its rows, if both sides have the same rows in another order; else None."""


@dataclass(frozen=True)
class PartPair:
    """A matrix or bias of an attention, compared head by head."""

    left: str
    """Path of the attention."""
    right: str
    """Path of the attention on the right."""
    part: str
    """Name of the matrix or bias: `W_q`, `b_v`."""
    verdict: TensorVerdict
    """Whether both parts are the same."""
    differences: tuple[float, ...]
    """‖left - right‖ / ‖left‖ of each head; empty if both sides are the same or differ in shape."""


@dataclass(frozen=True, repr=False)
class CheckpointDiffReport(Report):
    """The comparison of two checkpoints, tensor by tensor and head by head."""

    command = "diff-checkpoints"

    left: CheckpointSide
    """The left checkpoint."""
    right: CheckpointSide
    """The right checkpoint."""
    tensors: tuple[TensorPair, ...]
    """The tensors that are in both."""
    only_left: tuple[StoredName, ...]
    """The tensors that are only on the left."""
    only_right: tuple[StoredName, ...]
    """The tensors that are only on the right."""
    parts: tuple[PartPair, ...]
    """The parts of attentions that have a tensor which differs."""
    outcome: Literal["same", "differs"]
    """`same` if every tensor is on both sides, with the same bits or equal within the rounding of the dtypes."""
    notes: tuple[str, ...]
    """Important sentences on this report."""
    answer: tuple[str, ...]
    """The answer in sentences."""

    @property
    def ok(self) -> bool:
        """Whether the sides are the same."""
        return self.outcome == "same"


explain_fields(globals())
