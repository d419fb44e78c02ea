"""Query, key, value and masks: drawn from a seed, or read from files."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from .device import resolve
from .input_files import Triple, read_attn_mask, read_query_key_value
from .spec import AttentionSpec, InputSpec, RunSpec

INPUT_STREAM = 0x6D68612D696E70
"""Added to the seed of the inputs, so that they are not the numbers that the parameters were drawn from."""


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
    extra_keys: int = 0
    """Keys that the layer appends itself, which no mask covers (add_bias_kv, add_zero_attn)."""

    def fully_masked_rows(self, num_heads: int) -> list[tuple[int, int]]:
        """(batch, query) of every row that has no key left to look at, in at least one head.

        One such head is enough: W_o mixes its context into the whole row of the output. Empty where the layer appends a
        key of its own, and on meta, where a mask has no content.
        """
        if self.extra_keys or self.query.is_meta or (self.attn_mask is None and self.key_padding_mask is None):
            return []
        masked = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
        if self.attn_mask is not None:
            barred = (self.attn_mask if self.attn_mask.dtype == torch.bool else self.attn_mask == float("-inf")).cpu()
            masked = masked | (barred.view(self.batch, num_heads, *barred.shape[-2:]) if barred.dim() == 3 else barred)
        if self.key_padding_mask is not None:
            masked = masked | self.key_padding_mask.cpu().view(self.batch, 1, 1, self.key_len)
        rows = masked.all(dim=-1).any(dim=1).expand(self.batch, self.query_len)
        return [(int(row), int(query)) for row, query in rows.nonzero().tolist()]


def make_inputs(spec: AttentionSpec, inputs: InputSpec, run: RunSpec) -> Inputs:
    """The inputs that the flags describe.

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
        query, key, value = _draw(spec, inputs, device)
    else:
        query, key, value = _move_together(read_query_key_value(inputs.input, spec, inputs), device, dtype)
    batch, query_len = (1, query.shape[0]) if inputs.unbatched else _batch_and_length(query, spec)
    key_len = key.shape[0] if inputs.unbatched else _batch_and_length(key, spec)[1]
    return Inputs(
        query=query,
        key=key,
        value=value,
        attn_mask=_attn_mask(spec, inputs, batch, query_len, key_len, device),
        key_padding_mask=_padding_mask(inputs, batch, key_len, device),
        batch=batch,
        query_len=query_len,
        key_len=key_len,
        unbatched=inputs.unbatched,
        extra_keys=int(spec.add_bias_kv) + int(spec.add_zero_attn),
    )


def _batch_and_length(tensor: Tensor, spec: AttentionSpec) -> tuple[int, int]:
    first, second = tensor.shape[:2]
    return (first, second) if spec.batch_first else (second, first)


def _draw(spec: AttentionSpec, inputs: InputSpec, device: torch.device) -> Triple:
    """Query, key and value from the seed; one tensor serves as several where nothing tells them apart."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    generator = torch.Generator("cpu").manual_seed((spec.seed + INPUT_STREAM) % 2**64)

    def draw(length: int, width: int) -> Tensor:
        if device.type == "meta":
            batched = torch.empty(inputs.batch, length, width, dtype=dtype, device=device)
        else:
            # Always drawn as `batch seq width`: the content of a row does not hang on the layout.
            drawn = torch.randn(inputs.batch, length, width, generator=generator, dtype=torch.float32, device="cpu")
            batched = drawn.to(device=device, dtype=dtype)
        if inputs.unbatched:
            return batched[0]
        return batched if spec.batch_first else batched.transpose(0, 1).contiguous()

    key_len = inputs.seq_len if inputs.key_len is None else inputs.key_len
    query = draw(inputs.seq_len, spec.embed_dim)
    self_attention = inputs.key_len is None and spec.key_width == spec.embed_dim
    key = query if self_attention else draw(key_len, spec.key_width)
    value = key if spec.value_width == spec.key_width else draw(key_len, spec.value_width)
    return query, key, value


def _move_together(tensors: Triple, device: torch.device, dtype: torch.dtype) -> Triple:
    """Cast and move, one tensor that serves as several staying one."""
    moved = {id(tensor): tensor.to(device=device, dtype=dtype).contiguous() for tensor in tensors}
    query, key, value = (moved[id(tensor)] for tensor in tensors)
    return query, key, value


def _attn_mask(
    spec: AttentionSpec, inputs: InputSpec, batch: int, query_len: int, key_len: int, device: torch.device
) -> Tensor | None:
    """The causal mask, the one in the file, or both together; on `device`, an additive one in spec.dtype."""
    mask: Tensor | None = None
    if inputs.attn_mask is not None:
        mask = read_attn_mask(inputs.attn_mask, (batch, spec.num_heads, query_len, key_len))
        if mask.dtype != torch.bool:
            mask = mask.to(getattr(torch, spec.dtype))
    if device.type == "meta":
        shape = (query_len, key_len) if mask is None else mask.shape
        kind = torch.bool if mask is None else mask.dtype
        return torch.empty(shape, dtype=kind, device=device) if mask is not None or inputs.causal else None
    if inputs.causal:
        # Both sequences start together, as in torch: query i sees keys 0 to i, also where the lengths differ.
        above = torch.ones(query_len, key_len, dtype=torch.bool, device="cpu").triu_(diagonal=1)
        if mask is None:
            mask = above
        else:
            mask = mask | above if mask.dtype == torch.bool else mask.masked_fill(above, float("-inf"))
    return None if mask is None else mask.to(device)


def _padding_mask(inputs: InputSpec, batch: int, key_len: int, device: torch.device) -> Tensor | None:
    """`batch key` (`key` when unbatched), True on the last keys of each row; None where nothing is padded."""
    if not inputs.padding:
        return None
    if len(inputs.padding) not in (1, batch):
        raise InputError(
            f"padding has {len(inputs.padding)} numbers for batch {batch}: "
            "give one number, or one per row of the batch."
        )
    if any(not 0 <= count <= key_len for count in inputs.padding):
        raise InputError(
            f"padding {','.join(map(str, inputs.padding))} does not fit {key_len} keys: "
            f"each number must be 0 to {key_len}."
        )
    if device.type == "meta":
        mask = torch.empty(batch, key_len, dtype=torch.bool, device=device)
    else:
        counts = torch.tensor(inputs.padding, device="cpu").expand(batch)
        mask = (torch.arange(key_len, device="cpu")[None, :] >= key_len - counts[:, None]).to(device)
    return mask[0] if inputs.unbatched else mask
