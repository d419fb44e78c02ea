"""What every comparison of head counts reports alike: a row a count, a row a pair, one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from torch import Tensor, nn

from ...measure.stage_difference import distances
from ...record.rounding import judge
from ...reports.common import Verdict
from ...reports.compare_heads import HeadCount, HeadPair
from ...targets.spec import AttentionSpec
from .weights import Carried


def count_row(
    spec: AttentionSpec,
    module: nn.Module,
    outputs: tuple[Tensor, Tensor],
    noise_floor: float,
    carried: Carried,
    size: float | None = None,
) -> HeadCount:
    """The row of one head count, without the stage that differs and the reason.

    Args:
        spec: for the number of heads and their size.
        module: for its parameters.
        outputs: the baseline's, and its own.
        noise_floor: of the baseline's output.
        carried: what became of the baseline's weights.
        size: ‖the baseline's output‖, where it is known.
    """
    largest, relative = distances(*outputs, size)
    times, verdict = judge(largest, noise_floor)
    return HeadCount(
        num_heads=spec.num_heads,
        head_dim=int(spec.head_dim),
        numel=sum(parameter.numel() for parameter in module.parameters()),
        same_parameters=carried.same,
        output_shape=tuple(outputs[1].shape),
        max_abs_difference=largest,
        relative_difference=relative,
        noise_floor=noise_floor,
        times_noise=times,
        verdict=verdict,
        first_differing_stage=None,
        reason="The baseline.",
    )


def pair_rows(outputs: Sequence[tuple[int, Tensor]], noise_floor: float) -> tuple[HeadPair, ...]:
    """Every head count against every other, by the number of heads and the output."""
    pairs = []
    for (one, left), (other, right) in combinations(outputs, 2):
        largest, relative = distances(left, right)
        pairs.append(HeadPair(one, other, largest, relative, *judge(largest, noise_floor)))
    return tuple(pairs)


def overall(verdicts: Sequence[Verdict | None]) -> Verdict:
    """`differs` where one does, `same` where all are."""
    return "differs" if "differs" in verdicts else "inconclusive" if "inconclusive" in verdicts else "same"
