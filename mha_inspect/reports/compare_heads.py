"""The report of `compare-heads`."""

from __future__ import annotations

from dataclasses import dataclass

from .common import Environment, LayerInfo, Verdict


@dataclass(frozen=True)
class HeadCount:
    """One head count against the baseline."""

    num_heads: int
    head_dim: int
    numel: int
    """Number of parameters."""
    same_parameters: bool
    """Whether every parameter equals the baseline's, bit for bit."""
    output_shape: tuple[int, ...]
    max_abs_difference: float
    """Largest difference between an element of the output and the baseline's."""
    relative_difference: float
    """‖output - baseline‖ / ‖baseline‖."""
    noise_floor: float
    """Largest rounding error of the baseline's output against float64, measured in this run."""
    times_noise: float
    """max_abs_difference / noise_floor."""
    verdict: Verdict
    """Above 10 times the noise floor `differs`, at or below twice `same`, between `inconclusive`."""
    first_differing_stage: str | None
    """None where no stage differs."""
    reason: str
    """Why, in one sentence."""


@dataclass(frozen=True)
class HeadPair:
    """Two head counts against each other."""

    left: int
    right: int
    max_abs_difference: float
    relative_difference: float
    times_noise: float
    verdict: Verdict


@dataclass(frozen=True)
class CompareHeadsReport:
    """The same weights and the same input through several head counts."""

    environment: Environment
    layer: LayerInfo
    baseline: int
    """The head count that the others are compared with: the first that was given."""
    counts: tuple[HeadCount, ...]
    verdict: Verdict
    """`differs` when any count differs from the baseline, `same` when all are the same."""
    equalities: tuple[str, ...]
    """Where outputs must be equal, and why: one key, the first position under a causal mask, keys all the same."""
    answer: tuple[str, ...]
    """The answer in two plain sentences."""
    pairs: tuple[HeadPair, ...] | None = None
    """Every pair, when asked for."""
