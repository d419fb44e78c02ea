"""Check that tokens have an effect on each other: one token is changed, and the other positions are compared.

The `reach` of a token of batch item 0 is how much each output changes with it, `batch position`, compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ...graph.dataflow import made_of
from ...naming.visibility import kinds_of
from ...reports.check import Finding
from ...text import shortened, spans
from ..evidence import Evidence
from ..lab import NotPossibleError
from ..muted import is_muted, path_to_outputs
from ..one_position import one_position
from ..registry import rule
from .batch import changes_beside

_OVER_OTHER_AXES = (
    "attention runs over heads or features instead of positions",
    "Use transpose(1, 2) after splitting the heads: positions are the second-to-last dimension of q, k, v.",
)
"""Why tokens have no effect where the result of the attention is used, and the fix."""
_UNUSED = (
    "the attention's result is unused",
    "Return the result of the attention, or add it to what is returned.",
)
"""The same where it is not."""


@rule(runs=True, after=("heads", "softmax", "masking", "batch", "finite"), by_position=True)
def mixing(evidence: Evidence) -> Iterator[Finding]:
    """Changing a token changes outputs of other tokens.

    One token is changed, and the outputs at the other positions are compared with those before. Each
    output that may attend to the token must change. If none does, attention has no effect: the model
    trains, the loss falls a little, and it never learns from context. Here the result of the attention
    is computed and not used.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention
    from torch import nn


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(16, 16)

        def forward(self, x):
            heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
            weights = (heads @ heads.mT / 8**0.5).softmax(-1)
            context = (weights @ heads).transpose(1, 2).flatten(2)
            return x + self.out(x)
    ```

    ## Right

    ```diff
    -        return x + self.out(x)
    +        return x + self.out(context)
    ```
    """
    yield from one_position(evidence)
    if evidence.source.positions is None:
        raise NotPossibleError("the tokens have two dimensions or more, and are not changed one by one", "an image")
    if not evidence.follows or evidence.source.length < 2:
        raise NotPossibleError("the output has no entry for each token")
    reach = evidence.reach_in_bits
    if all(attention.is_over_memory for attention, _ in evidence.run.attentions):
        raise NotPossibleError("the keys are parameters, so no token attends to another")
    if evidence.padded is not None and _count_real_tokens(evidence.padded) < 2:
        raise NotPossibleError("batch item 0 has one real token: all others are padding")
    if not _has_effect(reach):
        yield _fault_at_all_positions(evidence, reach)
        return
    if len(reach) == evidence.source.length:
        yield from _at_other_places(evidence)


def _count_real_tokens(padded: Tensor) -> int:
    """Return how many tokens of batch item 0 are no padding: `batch position`, True for padding."""
    return int((~padded[0]).sum())


def _has_effect(reach: Mapping[int, Tensor]) -> bool:
    """Return whether a token of batch item 0 changes another position of this item."""
    return any(changes_beside(changed[:1], token) for token, changed in reach.items())


# -- outputs at other places ------------------------------------------------------------------------------------------


def _at_other_places(evidence: Evidence) -> Iterator[Finding]:
    """Yield a suspicion if outputs are made of tokens of another group than their own, e.g. of another window."""
    seen = torch.stack([changed[0] > 0 for changed in evidence.reach.values()], 1)  # output token
    groups = _groups_of(seen)
    moved = [place for place, group in enumerate(groups) if place not in group]
    # Two sequences in one that attend to each other have no output at its place.
    if not moved or len(moved) == len(groups):
        return
    first = moved[0]
    of_first = spans(sorted(groups[first]))
    yield Finding(
        "mixing",
        f"Outputs are at other places than their tokens: output {first} is made of tokens {of_first}.",
        f"The {len(set(groups))} groups of tokens that see each other are in place for {len(groups) - len(moved)} "
        f"outputs and not for {len(moved)}: {shortened(spans(moved), 40)}.",
        sure=False,
        source=evidence.scores_line,
        fix="Check the order of axes where windows are put back: it is the opposite of the one that cut them.",
    )


def _groups_of(seen: Tensor) -> list[frozenset[int]]:
    """Return the group of tokens that each output is made of, its own token of a residual left out.

    `seen` is `output token`. The groups have several tokens each, and every token is in one; else empty.
    """
    rows = [frozenset(row.nonzero().flatten().tolist()) for row in seen]
    with_own = [row | {place} for place, row in enumerate(rows)]
    for size in sorted({len(row) for row in rows} | {len(row) - 1 for row in rows}):
        groups = []
        for place, row in enumerate(rows):
            is_beside = len(row) == size + 1 and row == with_own[place]
            groups.append(row - {place} if is_beside else row)
        are_equal = all(len(group) == size for group in groups)
        if (
            1 < size < len(rows)
            and are_equal
            and len(set(groups)) * size == len(rows) == len(frozenset().union(*groups))
        ):
            return groups
    return []


# -- no token has an effect -------------------------------------------------------------------------------------------


def _fault_at_all_positions(evidence: Evidence, reach: Mapping[int, Tensor]) -> Finding:
    """Return the fault that no token changes another position.

    Raises `NotPossibleError` if there is another reason for it, or their effect is hidden in this run.
    """
    reason = _reason_without_effect(evidence, reach)
    if reason:
        raise NotPossibleError(reason)
    # A token that a mask hides from every other query proves nothing: others are named where there are any.
    visible = [token for token in reach if token in evidence.seen_by_others] or list(reach)
    tokens = f"token {visible[0]}" if len(visible) == 1 else f"tokens {spans(visible)}, one by one,"
    is_used = _is_used(evidence)
    why, fix = _UNUSED
    if is_used:
        why, fix = _OVER_OTHER_AXES
    # Masks that leave each query only its own key explain it too, and may be intended.
    is_explained_by_masks = all(sight.alone for sight in evidence.sights)
    return Finding(
        "mixing",
        f"No token has an effect on another: {why}.",
        f"Changing {tokens} of {evidence.source.names[0]} leaves every other output position unchanged, bit for bit.",
        sure=not is_explained_by_masks,
        source=evidence.scores_line,
        fix=fix,
    )


def _reason_without_effect(evidence: Evidence, reach: Mapping[int, Tensor]) -> str:
    """Return why no token may change another position although attention is right; empty if nothing explains it."""
    if any(bool((changed[1:] > 0).any()) for changed in reach.values()):
        return "the tokens change other batch items alone"
    if _has_keys_of_another_source(evidence):
        return "the keys are of another sequence, so no token attends to another of its own"
    if any(sight.is_top_left for sight in evidence.sights):
        return "the mask hides the keys of all tokens of this call"
    if is_muted(evidence):
        return "the result is multiplied by zeros, e.g. by a new W_o or gate"
    if _is_picked_by_number(evidence):
        return "the result picks entries of a table, which may be the same for another token"
    visible = [token for token in reach if token in evidence.seen_by_others]
    if visible and not any(_is_weighed_by_others(evidence, token) for token in visible):
        return "the weights are so sharp that the changed tokens have none from other queries"
    return ""


def _is_used(evidence: Evidence) -> bool:
    """Return whether an output is made of the context of an attention."""
    recording = evidence.run.recording
    contexts = [attention.stages["context"].id for attention, _ in evidence.run.attentions]
    after = made_of(set(contexts), recording.ops)
    return any(named.tensor.id in after for named in recording.outputs)


def _is_weighed_by_others(evidence: Evidence, token: int) -> bool:
    """Return whether another query gives a token of batch item 0 a weight that is not rounded away in a sum.

    True too if no weights of all tokens show it.
    """
    length = evidence.source.length
    sights = [sight for sight in evidence.sights if sight.queries == length <= sight.keys]
    for sight in sights:
        key = sight.first + token
        is_other_query = sight.distance[:, key] != 0
        if bool((sight.weighed[:, key] & is_other_query).any()):
            return True
    return not sights


def _has_keys_of_another_source(evidence: Evidence) -> bool:
    """Return whether queries attend to the tokens of another argument, e.g. of an encoder, as the output shows."""
    if all("cross" in kind for kind in kinds_of(evidence.run)):
        return True
    return any(bool((changed[0] > 0).any()) for changed in evidence.reach_of_others.values())


def _is_picked_by_number(evidence: Evidence) -> bool:
    """Return whether the result of attention becomes whole numbers on the way to the output, e.g. the nearest code."""
    contexts = {attention.value_product.op.output.id for attention, _ in evidence.run.attentions}
    path = path_to_outputs(evidence, contexts)
    return any(op.output.dtype.startswith("int") for op in path)
