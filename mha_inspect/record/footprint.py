"""How much memory a forward pass needs, from its recording: which storages are alive at the same time."""

from __future__ import annotations

from .ops import Recording, TensorRef


def peak_bytes(recording: Recording) -> int:
    """Most bytes that the operations' own results take at one time, parameters and arguments not counted.

    A storage lives from the operation that made it to the last one that reads it, or to the end where it is returned.
    Code that holds on to a tensor after its last use needs more.
    """
    sizes, first, last = _lives(recording)
    changes: dict[int, int] = {}
    for storage, made in first.items():
        changes[made] = changes.get(made, 0) + sizes[storage]
        after = last[storage] + 1
        changes[after] = changes.get(after, 0) - sizes[storage]
    peak = now = 0
    for place in sorted(changes):
        now += changes[place]
        peak = max(peak, now)
    return peak


def kept_bytes(recording: Recording) -> int:
    """Bytes of all the operations' own results together, as when every tensor is kept."""
    sizes, first, _ = _lives(recording)
    return sum(sizes[storage] for storage in first)


def given_bytes(recording: Recording) -> int:
    """Bytes of the parameters, buffers and arguments."""
    given: dict[int, int] = {}
    for named in (*recording.parameters, *recording.buffers, *recording.inputs):
        _grow(given, named.tensor)
    return sum(given.values())


def _lives(recording: Recording) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Storage to its bytes, to the operation that made it, and to the last that uses it."""
    outside = {named.tensor.storage for named in (*recording.parameters, *recording.buffers, *recording.inputs)}
    sizes: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for op in recording.ops:
        for tensor in op.outputs:
            if tensor.storage not in outside:
                _grow(sizes, tensor)
                first.setdefault(tensor.storage, op.index)
        for tensor in (*op.inputs, *op.outputs):
            last[tensor.storage] = op.index
    for named in recording.outputs:
        last[named.tensor.storage] = len(recording.ops)
    return sizes, first, last


def _grow(sizes: dict[int, int], tensor: TensorRef) -> None:
    """A storage is at least as large as what is seen of it; an expanded view shows more than there is."""
    real = tensor.itemsize * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=False)))
    whole = tensor.offset * tensor.itemsize + (real if tensor.numel else 0)
    sizes[tensor.storage] = max(sizes.get(tensor.storage, 0), whole)
