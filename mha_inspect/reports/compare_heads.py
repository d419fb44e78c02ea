"""Define the report of `compare-heads`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..explained import explain_fields
from .check import Finding
from .common import Difference, Environment, LayerInfo, MeasuredAgainst, Report, Verdict


class ReasonPieces(NamedTuple):
    """A reason in pieces: head counts with equal start and end share a line of the page. The brief sizes are extra.

    It is a tuple, and so no part of the schema: only pages show it.
    """

    start: str = ""
    """`scores differ: `."""
    sizes: str = ""
    """The sizes of this head count: `2 heads use 6 features each`."""
    brief: str = ""
    """The same in brief, after those of another head count: `4 use 3`."""
    end: str = ""
    """`; 1 head uses all 12.`."""

    @property
    def sentence(self) -> str:
        """The reason of this head count alone."""
        return f"{self.start}{self.sizes}{self.end}"


@dataclass(frozen=True, kw_only=True)
class HeadCount(Difference):
    """One head count, and the difference of its output from the baseline's, with the baseline's rounding error."""

    num_heads: int
    """Number of query heads."""
    head_dim: int
    """Number of features of a head."""
    numel: int
    """Number of parameters."""
    same_parameters: bool
    """Whether every parameter equals the baseline's, bit for bit."""
    output_shape: tuple[int, ...]
    """Shape of the output."""
    max_abs_difference: float
    relative_difference: float
    noise_floor: float
    times_noise: float
    verdict: Verdict
    first_differing_stage: str | None
    """Name of the first stage that differs from the baseline's; None if no stage differs."""
    reason: str
    """One sentence on why the output differs or does not."""
    _pieces: ReasonPieces | None = None
    """The reason in pieces; None for the baseline."""


@dataclass(frozen=True)
class StageShapes:
    """The shapes of one stage of the first attention, for each head count, in canonical axes."""

    name: str
    """A stage of `mha_inspect.naming.pattern.STAGES`."""
    axes: str
    """The canonical axes: `batch heads query key`."""
    shapes: tuple[tuple[int, ...] | None, ...]
    """A shape for each head count, in their order; None where the stage was not computed, or an axis has no name."""

    @property
    def same(self) -> bool:
        """Whether every head count has this shape."""
        return len(set(self.shapes)) == 1


@dataclass(frozen=True, kw_only=True)
class PartTraining(Difference):
    """One matrix or bias after training, compared with the baseline's; None if the two did not start the same.

    The relative difference is ‖change - baseline's change‖ / ‖baseline's change‖, which after one step compares the
    gradients. A baseline's change of 0, or only rounding, makes it infinite if this change is larger.
    """

    part: str
    """`W_q`, `W_k`, `W_v`, `W_o`, `b_q`, `b_k`, `b_v`, `b_o`; `bias_k`, `bias_v` for a learned key and value. For the
    user's own module, the name of the parameter."""
    moved: float
    """‖after - before‖."""


@dataclass(frozen=True)
class HeadTraining:
    """One head count after the same training steps on the same task."""

    num_heads: int
    """Number of query heads."""
    first_loss: float
    """Loss before the first step."""
    last_loss: float
    """Loss after the last step."""
    moved: float
    """‖weights after - weights before‖."""
    max_abs_difference: float | None
    """Largest difference of a weight from the baseline's after the last step; None if the weights' shapes differ."""
    apart: float | None
    """‖weights - baseline's weights‖ / ‖baseline's change of weights‖, after the last step."""
    noise_floor: float | None
    """The larger rounding error of the two trainings, measured against float64, in the matrix or bias whose difference
    is largest in units of it."""
    times_noise: float | None
    """Largest difference from the baseline in that matrix or bias / noise_floor."""
    verdict: Verdict | None
    """Whether the weights differ from the baseline's; None if they cannot be compared."""
    parts: tuple[PartTraining, ...]
    """The change of each matrix and bias."""


@dataclass(frozen=True)
class Training:
    """The differences of the weights after each head count has learned the same task from the same start."""

    steps: int
    """Number of training steps."""
    optimizer: str
    """The optimizer with its settings."""
    task: str
    """The task that was learned, in words."""
    counts: tuple[HeadTraining, ...]
    """The result of each head count, in their order."""
    answer: str
    """The answer in one or two sentences."""


@dataclass(frozen=True)
class HeadFocus:
    """The keys that one head attends to, averaged over batch and queries."""

    head: int
    """Number of the head, from 0."""
    most_attended_key: int
    """The key with the largest weight."""
    share: float
    """The weight of that key."""
    effective_keys: float
    """How many keys share the weight: exp(-Σ w ln w), which is n for n equal weights."""
    distance: float
    """Σ w |query - key|, in positions."""


@dataclass(frozen=True)
class HeadsFocus:
    """The keys that the heads of one head count attend to."""

    num_heads: int
    """Number of query heads."""
    by_head: tuple[HeadFocus, ...]
    """The keys that each head attends to."""
    attention: int | None = None
    """Number of the attention, from 1; None if there is only one."""
    module: str | None = None
    """Path of its module; None if there is only one attention."""


@dataclass(frozen=True)
class Focus:
    """The keys that the heads of each head count attend to."""

    counts: tuple[HeadsFocus, ...]
    """The keys that each head count attends to, in their order."""
    answer: str
    """The answer in one or two sentences."""


@dataclass(frozen=True)
class StageFlops:
    """The floating-point operations of a stage's matrix products, summed over all attentions."""

    stage: str
    """Name of the stage."""
    flops: int
    """Floating-point operations; a multiply-add counts as two."""


@dataclass(frozen=True)
class HeadTime:
    """The time that one head count takes."""

    num_heads: int
    """Number of query heads."""
    median_ms: float
    """Median of the runs, in milliseconds."""
    low_ms: float
    """First quartile: a quarter of the runs were faster."""
    high_ms: float
    """Third quartile: a quarter of the runs were slower."""
    runs: int
    """Number of runs that were measured."""
    flops: tuple[StageFlops, ...]
    """The floating-point operations of each stage with matrix products."""


@dataclass(frozen=True)
class Timing:
    """The time that each head count takes, measured by torch.utils.benchmark."""

    counts: tuple[HeadTime, ...]
    """The time of each head count, in their order."""
    threads: int
    """Number of threads that torch used."""
    answer: str
    """The answer in one sentence."""


@dataclass(frozen=True, repr=False)
class CompareHeadsReport(Report):
    """The results of the same weights and input for several head counts."""

    command = "compare-heads"

    environment: Environment
    """The conditions of the run: device, dtype, seed and version of torch."""
    layer: LayerInfo
    """The inspected layer with its sizes."""
    baseline: int
    """The head count that the others are compared with, the first one given."""
    counts: tuple[HeadCount, ...]
    """The result of each head count, the baseline first."""
    stages: tuple[StageShapes, ...]
    """The stages of the first attention."""
    outcome: Verdict
    """`differs` if any head count differs from the baseline, `same` if all are the same."""
    answer: tuple[str, ...]
    """The answer in sentences: on the output, on the parameters, and on queries that can attend to no key."""
    training: Training | None = None
    """The differences of the weights after training; None if not requested."""
    focus: Focus | None = None
    """The keys that each head attends to; None if not requested."""
    timing: Timing | None = None
    """The time that each head count takes, the only part that changes in every run; None if not requested."""
    measured_against: MeasuredAgainst = "float64"
    """The run that the baseline's rounding error is measured against."""
    findings: tuple[Finding, ...] = ()
    """Problems and suspicions in the run of the first head count above 1, as `trace` finds them."""


explain_fields(globals())
