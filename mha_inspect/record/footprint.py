"""How much memory the results of a run take together, from its recording."""

from __future__ import annotations

from .ops import Recording, TensorRef


def kept_bytes(recording: Recording) -> int:
    """Bytes of all the operations' own results together, as when every tensor is kept."""
    outside = {named.tensor.storage for named in (*recording.parameters, *recording.buffers, *recording.inputs)}
    sizes: dict[int, int] = {}
    for op in recording.ops:
        for tensor in op.outputs:
            if tensor.storage not in outside:
                _grow(sizes, tensor)
    return sum(sizes.values())


def _grow(sizes: dict[int, int], tensor: TensorRef) -> None:
    """A storage is at least as large as what is seen of it; an expanded view shows more than there is."""
    real = tensor.itemsize * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=False)))
    whole = tensor.offset * tensor.itemsize + (real if tensor.numel else 0)
    sizes[tensor.storage] = max(sizes.get(tensor.storage, 0), whole)
