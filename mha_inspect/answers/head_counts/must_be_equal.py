"""Where the output cannot depend on the head count, and whether it does: one key, keys or values all the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...record.rounding import judge, max_difference
from .sight import Sight


@dataclass(frozen=True, eq=False)
class Claim:
    """Rows of the output that must be the same for every head count."""

    rows: Tensor
    """`batch query`, boolean."""
    why: str
    """One sentence."""
    short: str
    """The cause in a few words, for a reason."""


def claims(sight: Sight | None) -> list[Claim]:
    """What the mathematics says of what the queries can see, whatever the weights are."""
    return [] if sight is None else [claim for claim in _claims(sight) if bool(claim.rows.any())]


def _claims(sight: Sight) -> Iterator[Claim]:
    one = sight.one_key
    said = one
    if bool(one.any()):
        yield Claim(one, _one_key(one, sight), "one key has weight 1")
    several = sight.left > 1
    for name, alike, why in (
        ("values", sight.alike_values, "the weights sum to 1, so the context is that one value whatever they are"),
        ("keys", sight.alike_keys, "every score of a query is the same, so its weights are equal for every head count"),
    ):
        open_yet = several & ~said
        same = open_yet & alike() if bool(open_yet.any()) else open_yet
        if bool(same.any()):
            said = said | same
            yield Claim(
                same, f"The {name} that {_rows(same)} can see are all the same: {why}.", f"its {name} are all the same"
            )


def _one_key(one: Tensor, sight: Sight) -> str:
    if sight.allowed.shape[-1] + sight.extra_keys == 1:
        return "There is one key: its softmax weight is exactly 1 for every head count."
    cause = " (causal mask)" if _only_first(one) and sight.causal else ""
    if bool(one.all()):
        return "The mask leaves one key to every query: its softmax weight is exactly 1 for every head count."
    return f"The mask leaves one key to {_rows(one)}{cause}: its softmax weight is exactly 1 for every head count."


def _only_first(rows: Tensor) -> bool:
    return bool(rows[:, 0].all()) and not bool(rows[:, 1:].any())


def _rows(rows: Tensor) -> str:
    """`every query`, `the first position`, `query 3 of batch 0`, `17 of 24 queries`."""
    if bool(rows.all()):
        return "every query"
    if _only_first(rows):
        return "the first position"
    found = rows.nonzero().tolist()
    if len(found) == 1:
        return f"query {found[0][1]} of batch row {found[0][0]}"
    return f"{len(found)} of {rows.numel()} queries"


def confirmed(claim: Claim, outputs: Sequence[Tensor], noise_floor: float, unless: str = "") -> str:
    """The claim with what was measured in its rows: `batch query embed` of each head count, the baseline first.

    `unless` names a module of which nothing else is known: what comes after its attention may hang on the head count.
    """
    rows = claim.rows.to(outputs[0].device)
    expected = outputs[0][rows]
    largest = max((max_difference(output[rows], expected) for output in outputs[1:]), default=0.0)
    times, verdict = judge(largest, noise_floor)
    if largest == 0:
        found = "the same to the bit"
    elif verdict == "same":
        found = f"at most {times:.2g} times the noise floor apart"
    elif unless:
        found = f"{times:.3g} times the noise floor apart, so something else in it does"
    else:
        found = f"{times:.3g} times the noise floor apart, against expectation"
    which = "all outputs" if bool(claim.rows.all()) else "the outputs there"
    must = f"Unless something else in {unless} hangs on the head count, {which}" if unless else which.capitalize()
    return f"{claim.why} {must} must be equal; measured: {found}."


def masked_note(rows: Sequence[tuple[int, int]], outputs: Sequence[Tensor]) -> str:
    """What is to be said of queries that no key is left to."""
    places = torch.tensor(rows)
    nan = [bool(output[places[:, 0], places[:, 1]].isnan().all()) for output in outputs]
    number = f"{len(rows)} {'query has' if len(rows) == 1 else 'queries have'} no key left to look at"
    first = f"(the first: query {rows[0][1]} of batch row {rows[0][0]})"
    if all(nan):
        return f"{number} {first}: the output there is NaN for every head count. NaN beside NaN is no difference."
    if not any(nan):
        return f"{number} {first}: the output there is a number all the same, for every head count."
    return f"{number} {first}: the output there is NaN for some head counts and a number for others."
