"""Where the output cannot depend on the head count, and whether it does: one key, keys or values all the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..inputs import Inputs
from ..noise import judge, max_difference
from ..spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class Claim:
    """Rows of the output that must be the same for every head count."""

    rows: Tensor
    """`batch query`, boolean."""
    why: str
    """One sentence."""
    short: str
    """The cause in a few words, for a reason."""


def claims(spec: AttentionSpec, inputs: Inputs, key: Tensor, value: Tensor) -> list[Claim]:
    """What the mathematics says of these inputs, whatever the weights are.

    Args:
        spec: for rotary positions.
        inputs: for the masks.
        key: `batch key kdim`.
        value: `batch key vdim`.
    """
    allowed = allowed_keys(inputs)
    if allowed is None:
        return []
    return [claim for claim in _claims(spec, inputs, allowed, key, value) if bool(claim.rows.any())]


def _claims(spec: AttentionSpec, inputs: Inputs, allowed: Tensor, key: Tensor, value: Tensor) -> Iterator[Claim]:
    left = (allowed.sum(dim=-1) + inputs.extra_keys).expand(inputs.batch, inputs.query_len)
    one = left == 1
    said = one
    if bool(one.any()):
        yield Claim(one, _one_key(one, inputs, left), "one key has weight 1")
    if inputs.extra_keys:
        return
    for name, content, why in (
        ("values", value, "the weights sum to 1, so the context is that one value whatever they are"),
        ("keys", key, "every score of a query is the same, so its weights are equal for every head count"),
    ):
        if name == "keys" and spec.rope:
            continue
        same = _all_alike(content, allowed)[:, None] & (left > 1) & ~said
        if bool(same.any()):
            said = said | same
            yield Claim(
                same, f"The {name} that {_rows(same)} can see are all the same: {why}.", f"its {name} are all the same"
            )


def _one_key(one: Tensor, inputs: Inputs, left: Tensor) -> str:
    if inputs.key_len + inputs.extra_keys == 1:
        return "There is one key: its softmax weight is exactly 1 for every head count."
    cause = " (causal mask)" if inputs.attn_mask is not None and _only_first(one) else ""
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


def allowed_keys(inputs: Inputs) -> Tensor | None:
    """True where no mask forbids a query to look: `batch query key`, 1 wide where batch or query does not matter.

    None where it depends on the head.
    """
    allowed = torch.ones(1, 1, 1, dtype=torch.bool)
    if inputs.attn_mask is not None:
        mask = inputs.attn_mask.cpu()
        if mask.dim() == 3:
            return None
        allowed = allowed & ~(mask if mask.dtype == torch.bool else mask == -math.inf)
    if inputs.key_padding_mask is not None:
        allowed = allowed & ~inputs.key_padding_mask.cpu().view(inputs.batch, 1, inputs.key_len)
    return allowed.expand(-1, -1, inputs.key_len)


def _all_alike(content: Tensor, allowed: Tensor) -> Tensor:
    """`batch key width -> batch`: whether all that any query of the row can see are the same."""
    content = content.detach().cpu()
    seen = allowed.any(dim=1).expand(content.shape[0], -1)
    first = content[torch.arange(content.shape[0]), seen.int().argmax(dim=1)][:, None]
    # A quick look at one feature spares a pass over all of them.
    if not bool((((content[..., 0] == first[..., 0]) | ~seen).all(dim=1)).any()):
        return torch.zeros(content.shape[0], dtype=torch.bool)
    return ((content == first).all(dim=-1) | ~seen).all(dim=1)


def confirmed(claim: Claim, outputs: Sequence[Tensor], noise_floor: float) -> str:
    """The claim with what was measured in its rows: `batch query embed` of each head count, the baseline first."""
    rows = claim.rows.to(outputs[0].device)
    expected = outputs[0][rows]
    largest = max((max_difference(output[rows], expected) for output in outputs[1:]), default=0.0)
    times, verdict = judge(largest, noise_floor)
    if largest == 0:
        found = "the same to the bit"
    elif verdict == "same":
        found = f"at most {times:.2g} times the noise floor apart"
    else:
        found = f"{times:.3g} times the noise floor apart, against expectation"
    whole = bool(claim.rows.all())
    return f"{claim.why} {'All outputs must' if whole else 'The outputs there must'} be equal; measured: {found}."


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
