"""Query, key, value and masks out of files, checked against the layer that they are meant for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError
from ..text import printable
from .files import read_tensor, read_tensors
from .spec import AttentionSpec, InputSpec, divisors

Triple = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""

_NAMES = ("query", "key", "value")


def read_query_key_value(path: Path, spec: AttentionSpec, inputs: InputSpec) -> Triple:
    """Query, key and value, laid out as the layer takes them. A key that is not there is the query, a value the key.

    Raises `InputError` when a name, rank, width, length or dtype does not fit.
    """
    file = printable(path)
    content = read_tensors(path)
    if isinstance(content, Tensor):
        content = {"query": content}
    elif len(content) == 1:
        content = {"query": next(iter(content.values()))}
    strange = [name for name in content if name not in _NAMES]
    if strange or "query" not in content:
        names = ", ".join(map(repr, content)) or "nothing"
        raise InputError(
            f"{file} holds {names}: the names query, key and value are meant, and query must be among them."
        )
    query = content["query"]
    key = content.get("key", query)
    value = content.get("value", key)
    axis = "query" if key is query else "key"
    _require_fit(query, file, "query", ("query", "embed"), "embed_dim", spec.embed_dim, spec, inputs)
    _require_fit(key, file, "key", (axis, "kdim"), "kdim", spec.key_width, spec, inputs)
    _require_fit(value, file, "value", (axis, "vdim"), "vdim", spec.value_width, spec, inputs)
    _require_agreement(file, query, key, value, spec, inputs)
    return query, key, value


def _layout(seq: str, width: str, spec: AttentionSpec, inputs: InputSpec) -> str:
    if inputs.unbatched:
        return f"{seq} {width}"
    return f"batch {seq} {width}" if spec.batch_first else f"{seq} batch {width}"


def _require_fit(
    tensor: Tensor,
    file: str,
    name: str,
    axes: tuple[str, str],
    size_name: str,
    size: int,
    spec: AttentionSpec,
    inputs: InputSpec,
) -> None:
    """Rank, width and dtype of one of the three."""
    pattern = _layout(*axes, spec, inputs)
    said = f"{file}: {name} has shape {list(tensor.shape)}"
    rank = 2 if inputs.unbatched else 3
    if tensor.dim() != rank:
        way_out = {2: "Try --unbatched.", 3: "Drop --unbatched."}.get(tensor.dim(), f"Save it with {rank} dimensions.")
        raise InputError(f"{said}: `{pattern}` is expected, so it must have {rank} dimensions. {way_out}")
    if tensor.shape[-1] != size:
        raise InputError(
            f"{said}: `{pattern}` with {size_name} {size} is expected, so the last size must be {size}. "
            f"Try {_width_flags(size_name, tensor.shape[-1], spec)}."
        )
    if not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{file}: {name} holds {kind} where floating-point numbers are meant. Save {name}.float().")


def _width_flags(size_name: str, width: int, spec: AttentionSpec) -> str:
    """The flags under which a tensor of this width would fit."""
    if size_name != "embed_dim":
        return f"--{size_name} {width}"
    if width % spec.num_heads == 0:
        return f"--embed-dim {width}"
    return f"--embed-dim {width} --num-heads {max(n for n in divisors(width) if n <= spec.num_heads)}"


def _require_agreement(
    file: str, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, inputs: InputSpec
) -> None:
    """One batch for all three, one length for key and value."""
    batch_axis, seq_axis = (0, 1) if spec.batch_first else (1, 0)
    if inputs.unbatched:
        seq_axis = 0
    else:
        batches = [tensor.shape[batch_axis] for tensor in (query, key, value)]
        if len(set(batches)) > 1:
            raise InputError(
                f"{file}: the batch sizes of query, key and value are {batches[0]}, {batches[1]} and {batches[2]}, "
                f"and must be one number. Their axes are `{_layout('seq', 'width', spec, inputs)}`."
            )
    if key.shape[seq_axis] != value.shape[seq_axis]:
        raise InputError(
            f"{file}: key has length {key.shape[seq_axis]} and value {value.shape[seq_axis]}: "
            f"each key needs its value. Their axes are `{_layout('key', 'width', spec, inputs)}`."
        )


def read_attn_mask(path: Path, sizes: tuple[int, int, int, int]) -> Tensor:
    """A boolean mask (True: not allowed) or an additive one, `query key` or `(batch heads) query key`.

    Args:
        path: the file.
        sizes: batch, heads, query, key of the run that it is meant for.

    Raises:
        InputError: its shape does not fit, or it holds numbers where booleans are meant.
    """
    file = printable(path)
    mask = read_tensor(path)
    _require_mask_shape(mask, file, sizes)
    if mask.dtype == torch.bool:
        return mask
    kind = str(mask.dtype).removeprefix("torch.")
    if _is_zeros_and_ones(mask):
        raise InputError(
            f"{file} holds the {kind} numbers 0 and 1 where booleans are meant. In torch True means *not allowed*: "
            "save mask.bool() if 1 means that, and ~mask.bool() if 1 means allowed."
        )
    if not mask.is_floating_point():
        raise InputError(
            f"{file} holds {kind}: a mask is boolean (True: not allowed) or floating-point numbers that are added to "
            "the scores. Save mask.bool() or mask.float()."
        )
    return mask


def _is_zeros_and_ones(mask: Tensor) -> bool:
    """Whether numbers look like a boolean mask. Floating-point zeros alone do not: either way they bar nothing."""
    if mask.is_complex() or not bool(((mask == 0) | (mask == 1)).all()):
        return False
    return not mask.is_floating_point() or bool((mask == 1).any())


def _require_mask_shape(mask: Tensor, file: str, sizes: tuple[int, int, int, int]) -> None:
    batch, heads, query, key = sizes
    shape = tuple(mask.shape)
    if shape in ((query, key), (batch * heads, query, key)):
        return
    hints = {
        (key, query): "Try mask.T.",
        (batch, query, key): f"Try mask.repeat_interleave({heads}, dim=0), which gives each head its batch row's mask.",
        (heads, query, key): f"Try mask.repeat({batch}, 1, 1), which gives each batch row the heads' masks.",
        (batch, heads, query, key): "Try mask.flatten(0, 1).",
        (batch, 1, query, key): f"Try mask.squeeze(1).repeat_interleave({heads}, dim=0).",
        (1, 1, query, key): "Try mask[0, 0].",
        (batch, key): "For padding keys use --padding.",
    }
    hint = hints.get(shape, "")
    raise InputError(
        f"{file} has shape {list(shape)}: for batch {batch}, {heads} heads, {query} queries and {key} keys a mask is "
        f"`query key` [{query}, {key}] or `(batch heads) query key` [{batch * heads}, {query}, {key}]. {hint}".rstrip()
    )
