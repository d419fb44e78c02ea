"""Place query, key, value and masks among the arguments of a layer's forward, as its signature names them."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ..errors import InputError
from ..layers.catalog import MaskStyle, find_layer
from .arguments import signature_of
from .flag_inputs import Inputs
from .names import kind_of
from .spec import RunSpec


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
    style = find_layer(layer).masks
    if style == "apart":
        padding = _padding_like(inputs.key_padding_mask, inputs.attn_mask)
        kwargs |= {"attn_mask": inputs.attn_mask, "key_padding_mask": padding}
    else:
        kwargs[kinds["mask"]] = _in_style(merged_mask(inputs), style, inputs.query.dtype, layer)
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


def _padding_like(padding: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """Return the padding mask in the attn_mask's kind: torch deprecates a boolean mask beside an additive one."""
    if padding is None or attn_mask is None or attn_mask.dtype == torch.bool:
        return padding
    return torch.zeros_like(padding, dtype=attn_mask.dtype).masked_fill_(padding, float("-inf"))


def merged_mask(inputs: Inputs) -> Tensor | None:
    """Return one mask out of attn_mask and key_padding_mask; None where nothing is masked.

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


def _in_style(mask: Tensor | None, style: MaskStyle, dtype: torch.dtype, layer: str) -> Tensor | None:
    """Return a merged mask as a layer takes it.

    Raises `InputError` where float16 cannot hold what is multiplied by -1e9.
    """
    if mask is None or style == "boolean":
        return mask
    boolean = mask.dtype == torch.bool
    if style == "ones":
        if not boolean and dtype == torch.float16:
            raise InputError(
                f"{layer} multiplies its mask by -1e9, and float16 has no numbers small enough for an additive one. "
                "Give a boolean mask, or dtype float32."
            )
        return mask.to(dtype) if boolean else (mask.to(dtype) / -1e9).clamp(max=1.0)
    blocked = torch.finfo(dtype).min if style == "lowest" else float("-inf")
    if boolean:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, blocked)
    return mask.to(dtype).clamp(min=blocked)
