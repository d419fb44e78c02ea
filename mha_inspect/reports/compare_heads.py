"""The report of `compare-heads`."""

from __future__ import annotations

from dataclasses import dataclass

from .common import Difference, Environment, LayerInfo, MeasuredAgainst, Report, Verdict


@dataclass(frozen=True, kw_only=True)
class HeadCount(Difference):
    """One head count, and how far its output is from the baseline's, beside the rounding error of that."""

    num_heads: int
    head_dim: int
    numel: int
    """Number of parameters."""
    same_parameters: bool
    """Whether every parameter equals the baseline's, bit for bit."""
    output_shape: tuple[int, ...]
    max_abs_difference: float
    relative_difference: float
    noise_floor: float
    times_noise: float
    verdict: Verdict
    first_differing_stage: str | None
    """None where no stage differs."""
    reason: str
    """Why, in one sentence."""
    _pieces: tuple[str, str, str, str] | None = None
    """Start, sizes, sizes in brief and end of the reason: head counts with one start and end share a sentence."""


@dataclass(frozen=True, kw_only=True)
class PartGradient(Difference):
    """The gradient of one matrix or bias under one head count, against the baseline's.

    Nothing of the difference where the baseline has no part of this name and shape. The relative one is infinite where
    the baseline's gradient is 0, or rounding, and this one is not.
    """

    part: str
    """`W_q`, `W_k`, `W_v`, `W_o`, `b_q`, `b_k`, `b_v`, `b_o`; `bias_k`, `bias_v` for a learned key and value. Of a
    module that was brought along the parameter, by its own name."""
    norm: float
    """‖gradient‖."""


@dataclass(frozen=True)
class HeadGradients:
    """The gradient of every parameter under one head count."""

    num_heads: int
    loss: float
    parts: tuple[PartGradient, ...]
    verdict: Verdict
    """`differs` when any part differs from the baseline's, `same` when all that can be compared are the same."""


@dataclass(frozen=True)
class Gradients:
    """What a first step of learning would change, with the same weights, input and loss."""

    loss: str
    """What the loss is, in words."""
    counts: tuple[HeadGradients, ...]
    answer: str
    """One or two plain sentences."""


@dataclass(frozen=True)
class HeadTraining:
    """One head count after the same steps on the same task."""

    num_heads: int
    first_loss: float
    last_loss: float
    moved: float
    """‖weights after - weights before‖."""
    max_abs_difference: float | None
    """Largest difference of a weight from the baseline's after the last step; None where their shapes differ."""
    apart: float | None
    """‖weights - baseline's‖ / ‖baseline's movement‖, after the last step."""
    noise_floor: float | None
    """The larger rounding error of the two trainings, each measured against float64: of the matrix or bias that is
    furthest apart in units of its own."""
    times_noise: float | None
    verdict: Verdict | None


@dataclass(frozen=True)
class Training:
    """How far the weights move apart when each head count learns the same task from the same start."""

    steps: int
    optimizer: str
    task: str
    counts: tuple[HeadTraining, ...]
    answer: str
    """One or two plain sentences."""


@dataclass(frozen=True)
class Strongest:
    """One pair of a query and a key that a head gives much weight to."""

    query: int
    key: int
    weight: float
    """Averaged over the batch."""


@dataclass(frozen=True)
class Alike:
    """How alike two heads are."""

    left: int
    right: int
    divergence: float
    """Jensen-Shannon divergence of their weights, in nats, averaged over batch and queries; ln 2 at most."""


@dataclass(frozen=True)
class HeadFocus:
    """What one head looks at, averaged over batch and queries."""

    head: int
    entropy: float
    """-Σ w ln w of a query's weights, in nats."""
    effective_keys: float
    """exp(entropy): as many keys with equal weights would have it."""
    distance: float
    """Σ w |query - key|, in positions."""
    strongest: tuple[Strongest, ...]
    """The pairs with the largest weights, the largest first; queries that see one key alone are left out."""


@dataclass(frozen=True)
class HeadsFocus:
    """What the heads of one head count look at."""

    num_heads: int
    by_head: tuple[HeadFocus, ...]
    divergence: float
    """Jensen-Shannon divergence of the heads, in nats: the entropy of their mean less the mean of their entropies."""
    largest_divergence: float
    """ln num_heads: that of heads which look at nothing in common."""
    most_alike: Alike | None = None
    """The two heads that are most alike; None of a single head."""
    least_alike: Alike | None = None
    """The two heads that are least alike; None where there are fewer than three."""
    attention: int | None = None
    """Which of several attentions, from 1; None where there is one."""
    module: str | None = None
    """The path of its module; None where there is one attention."""


@dataclass(frozen=True)
class Focus:
    """How heads look at different parts."""

    weights: str
    """Which weights the heads had: `as given`, `after 100 steps`."""
    counts: tuple[HeadsFocus, ...]
    answer: str
    """One or two plain sentences."""


@dataclass(frozen=True)
class StageFlops:
    """The floating-point operations of a stage's products, of all attentions together."""

    stage: str
    flops: int


@dataclass(frozen=True)
class HeadTime:
    """What one head count takes."""

    num_heads: int
    median_ms: float
    low_ms: float
    """A quarter of the runs were faster."""
    high_ms: float
    """A quarter of the runs were slower."""
    runs: int
    flops: tuple[StageFlops, ...]
    """Those stages that have products."""


@dataclass(frozen=True)
class Timing:
    """What each head count takes, measured in turns."""

    counts: tuple[HeadTime, ...]
    threads: int
    answer: str
    """One plain sentence."""


@dataclass(frozen=True, repr=False)
class CompareHeadsReport(Report):
    """The same weights and the same input through several head counts."""

    command = "compare-heads"

    environment: Environment
    layer: LayerInfo
    baseline: int
    """The head count that the others are compared with: the first that was given."""
    counts: tuple[HeadCount, ...]
    verdict: Verdict
    """`differs` when any count differs from the baseline, `same` when all are the same."""
    answer: tuple[str, ...]
    """The answer in plain sentences: of the output, of the parameters, and of queries that see no key."""
    gradients: Gradients | None = None
    """The gradient of every parameter, when asked for."""
    training: Training | None = None
    """How the weights move apart, when asked for."""
    focus: Focus | None = None
    """What each head looks at, when asked for."""
    focus_after: Focus | None = None
    """The same after training, when both were asked for."""
    timing: Timing | None = None
    """How long each head count takes, when asked for: the one part that is another in every run."""
    measured_against: MeasuredAgainst = "float64"
    """What the rounding error of the baseline is measured against."""
