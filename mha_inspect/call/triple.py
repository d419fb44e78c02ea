"""Query, key and value out of a file: whether they are what a layer takes."""

from __future__ import annotations

from torch import Tensor

from ..errors import InputError
from ..layers.spec import AttentionSpec, divisors

Triple = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""


def require_fit(file: str, tensors: Triple, spec: AttentionSpec, *, unbatched: bool) -> None:
    """Raise `InputError` where the rank, width, length or dtype of query, key and value is not what the layer takes."""
    query, key, value = tensors
    axis = "query" if key is query else "key"
    for name, tensor, seq, width, size_name, size in (
        ("query", query, "query", "embed", "embed_dim", spec.embed_dim),
        ("key", key, axis, "kdim", "kdim", spec.key_width),
        ("value", value, axis, "vdim", "vdim", spec.value_width),
    ):
        said, pattern = f"{file}: {name} has shape {list(tensor.shape)}", _layout(seq, width, spec, unbatched)
        rank = 2 if unbatched else 3
        if tensor.dim() != rank:
            ways = {2: "Try --unbatched.", 3: "Drop --unbatched."}
            way_out = ways.get(tensor.dim(), f"Save it with {rank} dimensions.")
            raise InputError(f"{said}: `{pattern}` is expected, so it must have {rank} dimensions. {way_out}")
        if tensor.shape[-1] != size:
            raise InputError(
                f"{said}: `{pattern}` with {size_name} {size} is expected, so the last size must be {size}. "
                f"Try {_width_flags(size_name, tensor.shape[-1], spec)}."
            )
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(
                f"{file}: {name} holds {kind} where floating-point numbers are meant. Save {name}.float()."
            )
    length = 0 if unbatched or not spec.batch_first else 1
    batches = [1 if unbatched else tensor.shape[1 - length] for tensor in tensors]
    if len(set(batches)) > 1:
        raise InputError(
            f"{file}: the batch sizes of query, key and value are {batches[0]}, {batches[1]} and {batches[2]}, "
            f"and must be one number. Their axes are `{_layout('seq', 'width', spec, unbatched)}`."
        )
    _, keys, values = (tensor.shape[length] for tensor in tensors)
    if keys != values:
        raise InputError(
            f"{file}: key has length {keys} and value {values}: "
            f"each key needs its value. Their axes are `{_layout('key', 'width', spec, unbatched)}`."
        )


def _layout(seq: str, width: str, spec: AttentionSpec, unbatched: bool) -> str:
    if unbatched:
        return f"{seq} {width}"
    return f"batch {seq} {width}" if spec.batch_first else f"{seq} batch {width}"


def _width_flags(size_name: str, width: int, spec: AttentionSpec) -> str:
    """The flags under which a tensor of this width would fit."""
    if size_name != "embed_dim":
        return f"--{size_name} {width}"
    if width % spec.num_heads == 0:
        return f"--embed-dim {width}"
    return f"--embed-dim {width} --num-heads {max(n for n in divisors(width) if n <= spec.num_heads)}"


def turned(tensors: Triple) -> Triple:
    """Return the tensors with batch and length in each other's place, one that serves as several staying one."""
    changed = {id(tensor): tensor.transpose(0, 1).contiguous() for tensor in tensors}
    query, key, value = (changed[id(tensor)] for tensor in tensors)
    return query, key, value
