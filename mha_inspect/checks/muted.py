"""Whether the result of attention has no effect because it is multiplied by zeros, e.g. by a gate before training."""

from __future__ import annotations

from collections.abc import Iterator

from ..graph.rerun import between
from ..record.ops import Op, TensorRef
from .evidence import Evidence


def is_muted(evidence: Evidence) -> bool:
    """Return whether the result of attention is multiplied by a parameter or gate of zeros on the way to the output."""
    for factor in _factors_of_result(evidence):
        # A single number that depends on no parameter is a scale of the forward: a zero there is a fault.
        if factor.numel <= 1 and not _is_gate(evidence, factor):
            continue
        value = evidence.content(factor)
        if value is not None and not bool(value.any()):
            return True
    return False


def _factors_of_result(evidence: Evidence) -> Iterator[TensorRef]:
    """Yield what multiplies the result of attention on the way to the output, and is not made of it."""
    contexts = {attention.value_product.op.output.id for attention, _ in evidence.run.attentions}
    path = path_to_outputs(evidence, contexts)
    of_result = set(contexts)
    for op in path:
        of_result.update(output.id for output in op.outputs)
    for op in path:
        if not op.does("product", "scales"):
            continue
        for factor in op.inputs:
            if factor.id not in of_result:
                yield factor


def path_to_outputs(evidence: Evidence, contexts: set[int]) -> list[Op]:
    """Return the operations from the contexts of all attentions, by tensor id, to the outputs of the forward."""
    recording = evidence.run.recording
    path: list[Op] = []
    for named in recording.outputs:
        path += between(recording, contexts, named.tensor)
    return path


def _is_gate(evidence: Evidence, tensor: TensorRef) -> bool:
    """Return whether a tensor is a parameter of one number, or computed from one: `gate.tanh()`."""
    recording = evidence.run.recording
    gates = {named.tensor.id for named in recording.parameters if named.tensor.numel == 1}
    return tensor.id in gates or bool(between(recording, gates, tensor))
