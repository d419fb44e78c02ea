"""Check that tokens have an effect on each other: one token is changed, and the other positions are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...graph.rerun import between
from ...naming.visibility import kinds_of
from ...record.ops import Op, TensorRef
from ...reports.check import Finding
from .batch_items import changes_beside
from .evidence import Evidence, NotPossibleError


def mixing(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if tokens have no effect on each other although no mask separates them."""
    if not evidence.follows or evidence.source.length < 2:
        raise NotPossibleError("the output has no entry for each token")
    reach = evidence.reach_in_bits
    if all(attention.is_over_memory for attention, _ in evidence.run.attentions):
        raise NotPossibleError("the keys are parameters, so no token attends to another")
    if evidence.padded is not None and int((~evidence.padded[0]).sum()) < 2:
        raise NotPossibleError("batch item 0 has one real token: all others are padding")
    judge = _of_unmoved_position if _has_effect(reach) else _of_no_effect
    finding = judge(evidence, reach)
    if finding is not None:
        yield finding


def _has_effect(reach: Mapping[int, Tensor]) -> bool:
    """Return whether a token changes another position of its batch item."""
    return any(changes_beside(changed[:1], token) for token, changed in reach.items())


# -- no token has an effect -------------------------------------------------------------------------------------------


def _of_no_effect(evidence: Evidence, reach: Mapping[int, Tensor]) -> Finding | None:
    """Return the fault that no token changes another position; None if there is another reason for it."""
    if any(bool((changed[1:] > 0).any()) for changed in reach.values()):
        return None  # the check `batch` reports this
    if _has_keys_of_another_source(evidence):
        return None
    if any(sight.is_top_left for sight in evidence.sights):
        raise NotPossibleError("the mask hides the keys of all tokens of this call")
    if _is_muted(evidence):
        raise NotPossibleError("the result is multiplied by zeros, e.g. by a new W_o or gate")
    tried = [token for token in reach if token in evidence.seen_by_others]
    if not tried:
        tried = list(reach)
    tokens = " or ".join(map(str, tried))
    return Finding(
        "mixing",
        "No token has an effect on another: attention runs over heads or features instead of positions, or its "
        "result is unused.",
        f"Changing token {tokens} of {evidence.source.names[0]} leaves every other output "
        "position unchanged, bit for bit.",
        sure=not all(sight.alone for sight in evidence.sights),
        source=evidence.scores_line,
        fix="Use transpose(1, 2) after splitting the heads: positions are the second-to-last dimension of q, k, v.",
    )


def _has_keys_of_another_source(evidence: Evidence) -> bool:
    """Return whether tokens of another argument change the output, or every attention is over another source."""
    further = evidence.reach_of_others.values()
    if all("cross" in kind for kind in kinds_of(evidence.run)):
        return True
    return any(bool((changed[0] > 0).any()) for changed in further)


def _is_muted(evidence: Evidence) -> bool:
    """Return whether the result of attention is multiplied by a parameter or gate of zeros on the way to the output."""
    for factor in _factors_of_result(evidence):
        if factor.numel > 1 or _is_gate(evidence, factor):
            value = evidence.content(factor)
            if value is not None and not bool(value.any()):
                return True
    return False


def _factors_of_result(evidence: Evidence) -> Iterator[TensorRef]:
    """Yield what multiplies the result of attention on the way to the output, and is not made of it."""
    of_result = {attention.value_product.op.output.id for attention, _ in evidence.run.attentions}
    path = _path_to_outputs(evidence, of_result)
    for op in path:
        of_result.update(output.id for output in op.outputs)
    for op in path:
        if not op.does("product") and not op.does("scales"):
            continue
        for factor in op.inputs:
            if factor.id not in of_result:
                yield factor


def _is_gate(evidence: Evidence, tensor: TensorRef) -> bool:
    """Return whether a tensor is a parameter of one number, or computed from one: `gate.tanh()`."""
    recording = evidence.run.recording
    gates = {named.tensor.id for named in recording.parameters if named.tensor.numel == 1}
    return tensor.id in gates or bool(between(recording, gates, tensor))


def _path_to_outputs(evidence: Evidence, contexts: set[int]) -> list[Op]:
    """Return the operations from the results of attention, by tensor id, to the outputs of the forward."""
    recording = evidence.run.recording
    path: list[Op] = []
    for named in recording.outputs:
        path += between(recording, contexts, named.tensor)
    return path


# -- a token has no effect on one position ----------------------------------------------------------------------------


def _of_unmoved_position(evidence: Evidence, reach: Mapping[int, Tensor]) -> Finding | None:
    """Return the fault of a token that leaves a position as it is, although every query sees every key."""
    length = evidence.source.length
    sights = evidence.sights
    if not sights:
        return None
    if not all(sight.open and sight.queries == length == sight.keys for sight in sights):
        return None
    # A weight close to zero changes no output: the softmax is saturated.
    counts = torch.stack([sight.heavy for sight in sights]).all(0)  # query key
    if evidence.padded is not None:
        counts &= ~evidence.padded[0][:, None]
    for token, changed in reach.items():
        is_unmoved = ~(changed[0] > 0) & counts[:, token]
        unmoved = is_unmoved.nonzero().flatten().tolist()
        if unmoved:
            return _unmoved(evidence, token, unmoved)
    return None


def _unmoved(evidence: Evidence, token: int, positions: Sequence[int]) -> Finding:
    return Finding(
        "mixing",
        f"Token {token} has no effect on position {positions[0]}, although no mask separates them.",
        f"Changing token {token} leaves {len(positions)} of {evidence.source.length} positions unchanged, bit for bit. "
        "No score is masked.",
        source=evidence.scores_line,
        fix="Split heads with view(batch, positions, heads, head_dim), then transpose(1, 2).",
    )
