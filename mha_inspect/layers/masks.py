"""The masks of an input, brought into the form that a layer takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange

from ..errors import InputError

if TYPE_CHECKING:
    from ..targets.flag_inputs import Inputs
    from ..targets.spec import RunSpec


def merged_mask(inputs: Inputs) -> torch.Tensor | None:
    """One mask out of attn_mask and key_padding_mask, or None where nothing is masked.

    Boolean (True: not allowed), or additive where attn_mask is. Its axes are `query key` where every sequence and head
    has the same one, else `batch heads query key` (`heads query key` without a batch), 1 wide where it does not matter.
    """
    mask, padding = inputs.attn_mask, inputs.key_padding_mask
    if mask is not None and mask.dim() == 3 and not inputs.unbatched:
        mask = rearrange(mask, "(batch heads) query key -> batch heads query key", batch=inputs.batch)
    if padding is None:
        return mask
    padding = rearrange(padding, "... key -> ... 1 1 key")
    if mask is None:
        return padding
    return mask | padding if mask.dtype == torch.bool else mask.masked_fill(padding, float("-inf"))


def arguments_with_one_mask(inputs: Inputs, run: RunSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """query, key, value and one mask for all, for a forward that takes these."""
    return (inputs.query, inputs.key, inputs.value), {"mask": merged_mask(inputs), "need_weights": run.need_weights}


def additive_mask(inputs: Inputs, blocked: float = float("-inf")) -> torch.Tensor | None:
    """The merged mask as numbers to add to the scores, `blocked` where it is not allowed. Axes as in `merged_mask`."""
    mask = merged_mask(inputs)
    if mask is None:
        return None
    dtype = inputs.query.dtype
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, blocked)
    return mask.to(dtype).clamp(min=blocked)


def mask_of_head(mask: torch.Tensor | None, head: int) -> torch.Tensor | None:
    """The part of a merged mask that one head sees: `query key` or `batch query key`."""
    if mask is None or mask.dim() == 2:
        return mask
    return mask.select(-3, head if mask.size(-3) > 1 else 0)


def same_key_and_value(inputs: Inputs, layer: str) -> torch.Tensor | None:
    """What keys and values are both made from, or None where it is the query (self-attention).

    Raises `InputError` where key and value are two tensors: a layer that takes hidden states has no place for them.
    """
    if inputs.key is not inputs.value:
        raise InputError(
            f"{layer} makes keys and values from the same hidden states, and this input has a key and a value. "
            "Give one of them, or take a layer that has both: torch, split-heads, fold-heads, per-head, narrow or wide."
        )
    return None if inputs.key is inputs.query else inputs.key
