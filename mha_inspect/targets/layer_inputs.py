"""Query, key, value and masks of a layer of the catalog, drawn from a seed or read from files, and their places.

They are made before it is known how the layer's forward calls them, so that several layers can have the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..layers.catalog import find_layer
from ..text import printable
from .constructor import signature_of
from .device import resolve
from .drawing import Plan, draw, generator_of
from .files import read_tensors
from .masks import MaskSizes, apart, attention_mask, in_style, merged, padding_mask
from .spec import AttentionSpec, InputSpec, RunSpec, divisors
from .vocabulary import kind_of

Triple = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What goes into one forward pass, on its device and in its dtype, laid out as the layer takes it."""

    query: Tensor
    """`batch query embed`, `query batch embed` when the layer takes sequence first, `query embed` when unbatched."""
    key: Tensor
    """`batch key kdim`, laid out as the query. The query itself in self-attention: torch's fast path asks for that."""
    value: Tensor
    """`batch key vdim`, laid out as the query. The key itself where nothing tells them apart."""
    attn_mask: Tensor | None
    """`query key` or `(batch heads) query key`: boolean (True: not allowed), or added to the scores."""
    key_padding_mask: Tensor | None
    """`batch key`, `key` when unbatched: boolean, True where the key is padding and ignored."""
    batch: int
    query_len: int
    key_len: int
    unbatched: bool = False


def make_inputs(spec: AttentionSpec, inputs: InputSpec, run: RunSpec) -> Inputs:
    """Return the inputs that the flags describe.

    Numbers are drawn from a normal distribution in float32 on the CPU and then cast and moved: they are the same
    whatever the head count, the layout, the dtype (but for its rounding) and the device. On meta there are shapes only.

    Raises:
        InputError: a file, its shape or its dtype does not fit the layer, or the padding does not fit the file.
        UnsafeFileError: a file could only be read by running code in it.
        DeviceError: the device is not there, or cannot run spec.dtype.
    """
    device = resolve(run.device, spec.dtype)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if inputs.input is None:
        query, key, value = _drawn(spec, inputs, dtype, device)
    else:
        read = read_query_key_value(inputs.input, spec, inputs)
        # One tensor that serves as several stays one.
        moved = {id(tensor): tensor.to(device=device, dtype=dtype).contiguous() for tensor in read}
        query, key, value = (moved[id(tensor)] for tensor in read)
    length = 0 if inputs.unbatched or not spec.batch_first else 1
    batch = 1 if inputs.unbatched else query.shape[1 - length]
    sizes = MaskSizes(batch, spec.num_heads, query.shape[length], key.shape[length])
    return Inputs(
        query,
        key,
        value,
        attn_mask=attention_mask(inputs, sizes, dtype, device),
        key_padding_mask=padding_mask(inputs, batch, sizes.key, device),
        batch=batch,
        query_len=sizes.query,
        key_len=sizes.key,
        unbatched=inputs.unbatched,
    )


def _drawn(spec: AttentionSpec, inputs: InputSpec, dtype: torch.dtype, device: torch.device) -> Triple:
    """Query, key and value from the seed; one tensor serves as several where nothing tells them apart."""
    generator = generator_of(spec.seed)

    def drawn(length: int, width: int) -> Tensor:
        # Always drawn as `batch seq width`: the content of a row does not hang on the layout.
        batched = draw(Plan("query", (inputs.batch, length, width)), dtype, device, generator)
        if inputs.unbatched:
            return batched[0]
        return batched if spec.batch_first else batched.transpose(0, 1).contiguous()

    key_len = inputs.seq_len if inputs.key_len is None else inputs.key_len
    query = drawn(inputs.seq_len, spec.embed_dim)
    self_attention = inputs.key_len is None and spec.key_width == spec.embed_dim
    key = query if self_attention else drawn(key_len, spec.key_width)
    value = key if spec.value_width == spec.key_width else drawn(key_len, spec.value_width)
    return query, key, value


# -- out of files ------------------------------------------------------------------------------------------------------


def read_query_key_value(path: Path, spec: AttentionSpec, inputs: InputSpec) -> Triple:
    """Read query, key and value, laid out as the layer takes them.

    A key that is not there is the query, a value the key. Raises `InputError` when something does not fit.
    """
    file = printable(path)
    content = read_tensors(path)
    if isinstance(content, Tensor):
        content = {"query": content}
    elif len(content) == 1:
        content = {"query": next(iter(content.values()))}
    if "query" not in content or not set(content) <= {"query", "key", "value"}:
        names = ", ".join(map(repr, content)) or "nothing"
        raise InputError(
            f"{file} holds {names}: the names query, key and value are meant, and query must be among them."
        )
    query = content["query"]
    key = content.get("key", query)
    value = content.get("value", key)
    require_fit(file, (query, key, value), spec, inputs)
    return query, key, value


def require_fit(file: str, tensors: Triple, spec: AttentionSpec, inputs: InputSpec) -> None:
    """Raise `InputError` where the rank, width, length or dtype of query, key and value is not what the layer takes."""
    query, key, value = tensors
    axis = "query" if key is query else "key"
    for name, tensor, seq, width, size_name, size in (
        ("query", query, "query", "embed", "embed_dim", spec.embed_dim),
        ("key", key, axis, "kdim", "kdim", spec.key_width),
        ("value", value, axis, "vdim", "vdim", spec.value_width),
    ):
        said, pattern = f"{file}: {name} has shape {list(tensor.shape)}", _layout(seq, width, spec, inputs)
        rank = 2 if inputs.unbatched else 3
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
    _require_agreement(file, tensors, spec, inputs)


def _layout(seq: str, width: str, spec: AttentionSpec, inputs: InputSpec) -> str:
    if inputs.unbatched:
        return f"{seq} {width}"
    return f"batch {seq} {width}" if spec.batch_first else f"{seq} batch {width}"


def _width_flags(size_name: str, width: int, spec: AttentionSpec) -> str:
    """The flags under which a tensor of this width would fit."""
    if size_name != "embed_dim":
        return f"--{size_name} {width}"
    if width % spec.num_heads == 0:
        return f"--embed-dim {width}"
    return f"--embed-dim {width} --num-heads {max(n for n in divisors(width) if n <= spec.num_heads)}"


def _require_agreement(file: str, tensors: Triple, spec: AttentionSpec, inputs: InputSpec) -> None:
    """One batch for all three, one length for key and value."""
    length = 0 if inputs.unbatched or not spec.batch_first else 1
    batches = [1 if inputs.unbatched else tensor.shape[1 - length] for tensor in tensors]
    if len(set(batches)) > 1:
        raise InputError(
            f"{file}: the batch sizes of query, key and value are {batches[0]}, {batches[1]} and {batches[2]}, "
            f"and must be one number. Their axes are `{_layout('seq', 'width', spec, inputs)}`."
        )
    _, keys, values = (tensor.shape[length] for tensor in tensors)
    if keys != values:
        raise InputError(
            f"{file}: key has length {keys} and value {values}: "
            f"each key needs its value. Their axes are `{_layout('key', 'width', spec, inputs)}`."
        )


# -- their places ------------------------------------------------------------------------------------------------------


def arguments_of(module: nn.Module, layer: str, inputs: Inputs, run: RunSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a layer's forward: its inputs, masks, and what it is to return.

    Raises `InputError` where key and value are two tensors and it takes one sequence for both, or where its dtype
    cannot hold its mask.
    """
    parameters = signature_of(module.forward)
    kinds = {kind_of(parameter): name for name, parameter in parameters.items()}
    if "value" in kinds:
        args: tuple[Any, ...] = (inputs.query, inputs.key, inputs.value)
        kwargs: dict[str, Any] = {}
    else:
        args, kwargs = (inputs.query,), {kinds.get("other") or kinds["key"]: _states(inputs, layer)}
    style, masks = find_layer(layer).masks, (inputs.attn_mask, inputs.key_padding_mask)
    if style == "apart":
        kwargs |= dict(zip(("attn_mask", "key_padding_mask"), apart(*masks), strict=True))
    else:
        mask = merged(*masks, None if inputs.unbatched else inputs.batch)
        kwargs[kinds["mask"]] = in_style(mask, style, inputs.query.dtype, layer)
    returns = {"need_weights": run.need_weights, "output_attentions": run.need_weights}
    returns["average_attn_weights"] = run.average_weights
    return args, kwargs | {name: asked for name, asked in returns.items() if name in parameters}


def _states(inputs: Inputs, layer: str) -> Tensor | None:
    """Return what keys and values are both made from, or None where it is the query (self-attention).

    Raises `InputError` where key and value are two tensors: a layer that takes hidden states has no place for them.
    """
    if inputs.key is not inputs.value:
        raise InputError(
            f"{layer} makes keys and values from the same hidden states, and this input has a key and a value. "
            "Give one of them, or take a layer that has both: torch, split-heads, fold-heads, per-head, narrow or wide."
        )
    return None if inputs.key is inputs.query else inputs.key
