"""Attention masks: read from files, made of --causal and --padding, and given as a forward takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ..errors import InputError, SpecError
from ..text import printable
from .files import read_tensor
from .hugging_face_inputs import is_hugging_face
from .spec import InputSpec
from .vocabulary import Flags, plain

if TYPE_CHECKING:
    from ..layers.catalog import MaskStyle

_ATTENTION_MASKS = ("attnmask", "attentionmask", "mask", "srcmask", "bias", "attnbias")
_CAUSAL = ("iscausal", "causal")


@dataclass(frozen=True)
class MaskSizes:
    """What masks are made for."""

    batch: int
    heads: int
    query: int
    key: int


# -- what is masked ----------------------------------------------------------------------------------------------------


def attention_mask(inputs: InputSpec, sizes: MaskSizes, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return the causal mask, the one in the file, or both together; an additive one in `dtype`.

    `query key` or `(batch heads) query key`; None where nothing is masked.

    Raises `InputError` where the file does not fit.
    """
    mask = None if inputs.attn_mask is None else read_attn_mask(inputs.attn_mask, sizes)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    if mask is None and not inputs.causal:
        return None
    if device.type == "meta":
        shape = (sizes.query, sizes.key) if mask is None else mask.shape
        return torch.empty(shape, dtype=torch.bool if mask is None else mask.dtype, device=device)
    if inputs.causal:
        # Both sequences start together, as in torch: query i sees keys 0 to i, also where the lengths differ.
        above = torch.ones(sizes.query, sizes.key, dtype=torch.bool, device="cpu").triu_(diagonal=1)
        if mask is None:
            mask = above
        else:
            mask = mask | above if mask.dtype == torch.bool else mask.masked_fill(above, float("-inf"))
    return None if mask is None else mask.to(device)


def padding_mask(inputs: InputSpec, batch: int, key_len: int, device: torch.device) -> Tensor | None:
    """Return `batch key` (`key` when unbatched), True on the last keys of each row; None where nothing is padded.

    Raises `InputError` where the padding does not fit what a file holds.
    """
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


def read_attn_mask(path: Path, sizes: MaskSizes) -> Tensor:
    """Read a boolean mask (True: not allowed) or an additive one, `query key` or `(batch heads) query key`.

    Raises `InputError` where its shape does not fit, or it holds numbers where booleans are meant.
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


def _require_mask_shape(mask: Tensor, file: str, sizes: MaskSizes) -> None:
    batch, heads, query, key = sizes.batch, sizes.heads, sizes.query, sizes.key
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


# -- as a forward takes them -------------------------------------------------------------------------------------------


def apart(attn_mask: Tensor | None, padding: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return both masks of one kind: torch deprecates a boolean padding mask beside an additive mask."""
    if padding is None or attn_mask is None or attn_mask.dtype == torch.bool:
        return attn_mask, padding
    return attn_mask, torch.zeros_like(padding, dtype=attn_mask.dtype).masked_fill_(padding, float("-inf"))


def merged(mask: Tensor | None, padding: Tensor | None, batch: int | None) -> Tensor | None:
    """Return one mask out of both; None where nothing is masked. `batch` is None where there is no batch.

    Boolean (True: not allowed), or additive where the attention mask is. Its axes are `query key` where every sequence
    and head has the same one, else `batch heads query key` (`heads query key` without a batch), 1 wide where it does
    not matter.
    """
    if mask is not None and mask.dim() == 3 and batch is not None:
        mask = rearrange(mask, "(batch heads) query key -> batch heads query key", batch=batch)
    if padding is None:
        return mask
    padding = rearrange(padding, "... key -> ... 1 1 key")
    if mask is None:
        return padding
    return mask | padding if mask.dtype == torch.bool else mask.masked_fill(padding, float("-inf"))


def in_style(mask: Tensor | None, style: MaskStyle, dtype: torch.dtype, layer: str) -> Tensor | None:
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


def masks_of(
    module: nn.Module,
    parameters: Mapping[str, Parameter],
    values: Mapping[str, Any],
    inputs: InputSpec,
    flags: Flags,
    device: torch.device,
) -> dict[str, Any]:
    """Return the masks that were asked for, by the names of a forward's arguments: those that it is known to take.

    Raises:
        SpecError: the forward takes no such mask, or nothing says what its masks mean.
        InputError: a file does not fit.
    """
    names = {plain(name): name for name in parameters}
    # Where its constructor took --causal, it has a mask of its own.
    built_causal = any(bool(getattr(module, name, False)) for name in ("causal", "is_causal", "masked"))
    causal = inputs.causal and "causal" in flags.typed and not built_causal
    name = next((names[word] for word in _ATTENTION_MASKS if word in names), None)
    takes_any = any("mask" in word or word in (*_ATTENTION_MASKS, *_CAUSAL) for word in names)
    asked = {
        "--attn-mask": (inputs.attn_mask, name),
        "--causal": (causal, takes_any),
        "--padding": (inputs.padding, takes_any),
    }
    for flag, (wanted, taken) in asked.items():
        if wanted and not taken:
            listed = ", ".join(parameters)
            raise SpecError(f"{_owner(module)} takes no mask: its arguments are {listed}. Drop {flag}.")
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    dtype = torch.float32 if first is None else first.dtype
    if not any(wanted for wanted, _ in asked.values()):
        return {}
    if type(module).__module__.startswith("torch.nn."):
        sizes = _sizes(module, values)
        mask = attention_mask(replace(inputs, causal=causal), sizes, dtype, device)
        return _of_torchs(module, names, apart(mask, padding_mask(inputs, sizes.batch, sizes.key, device)))
    masks: dict[str, Any] = {}
    if inputs.attn_mask is not None and name is not None:
        mask = read_tensor(inputs.attn_mask).to(device)
        masks[name] = mask.to(dtype) if mask.is_floating_point() else mask
    if causal:
        masks[_needed(module, names, _CAUSAL, "--causal")] = True
    if inputs.padding:
        own = _needed(module, names, ("attentionmask",) if is_hugging_face(module) else (), "--padding")
        key_len = inputs.seq_len if inputs.key_len is None else inputs.key_len
        padded = padding_mask(inputs, inputs.batch, key_len, device)
        masks[own] = None if padded is None else (~padded).long()
    return masks


def _of_torchs(
    module: nn.Module, names: Mapping[str, str], masks: tuple[Tensor | None, Tensor | None]
) -> dict[str, Any]:
    """The masks of one of torch's own modules, which mean what `nn.MultiheadAttention` says."""
    of_scores, of_keys = ("attnmask", "srcmask", "mask", "tgtmask"), ("keypaddingmask", "srckeypaddingmask")
    flags = ("--causal", "--padding")
    return {
        _needed(module, names, words, flag): mask
        for words, flag, mask in zip((of_scores, of_keys), flags, masks, strict=True)
        if mask is not None
    }


def _needed(module: nn.Module, names: Mapping[str, str], words: tuple[str, ...], flag: str) -> str:
    """The argument of one of these names. Raises `SpecError` where there is none."""
    name = next((names[word] for word in words if word in names), None)
    if name is None:
        give = "--attn-mask FILE, or " if flag == "--causal" else ""
        raise SpecError(
            f"{_owner(module)} does not say what its mask means, so {flag} cannot make one. Give it as it takes it: "
            f"{give}--input FILE with the mask by name."
        )
    return name


def _owner(module: nn.Module) -> str:
    return f"{type(module).__qualname__}.forward"


def _sizes(module: nn.Module, values: Mapping[str, Any]) -> MaskSizes:
    """The sizes of a call of one of torch's own modules."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    query = next(iter(tensors.values()))
    key = tensors.get("key", query)
    layout = next((m.batch_first for m in module.modules() if isinstance(getattr(m, "batch_first", None), bool)), True)
    length = 0 if query.dim() == 2 or not layout else 1
    heads = next((m.num_heads for m in module.modules() if isinstance(m, nn.MultiheadAttention)), 1)
    batch = 1 if query.dim() == 2 else query.shape[1 - length]
    return MaskSizes(batch, heads, query.shape[length], key.shape[length])
