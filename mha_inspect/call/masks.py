"""Attention masks: made of --causal and --padding, read from files, and given as a forward takes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from ..build.target import Target
from ..build.vocabulary import kind_of, plain
from ..errors import InputError, SpecError
from ..files.tensors import read_tensor
from ..layers.spec import InputSpec
from ..text import printable
from .forward import Forward
from .hugging_face import is_hugging_face

if TYPE_CHECKING:
    from ..layers.catalog import MaskStyle

_OF_SCORES = ("attnmask", "attentionmask", "tgtmask", "mask", "srcmask", "bias", "attnbias")
"""Names of masks of scores, the most telling first."""
_OF_KEYS = ("srckeypaddingmask", "memorykeypaddingmask", "keypaddingmask")
_CAUSAL = ("iscausal", "causal")


class MaskSizes(NamedTuple):
    """What masks are made for."""

    batch: int
    heads: int
    query: int
    key: int


# -- what is masked ----------------------------------------------------------------------------------------------------


def causal_mask(query: int, key: int, device: torch.device | str = "cpu") -> Tensor:
    """Return `query key`, True where a key comes after the query: both sequences start together, as in torch."""
    if torch.device(device).type == "meta":
        return torch.empty(query, key, dtype=torch.bool, device=device)
    return torch.ones(query, key, dtype=torch.bool, device="cpu").triu_(diagonal=1).to(device)


def padding_mask(inputs: InputSpec, batch: int, keys: int, device: torch.device) -> Tensor | None:
    """Return `batch key` (`key` when unbatched), True on the last keys of each row; None where nothing is padded.

    Raises `InputError` where the padding does not fit what a file holds.
    """
    if not inputs.padding:
        return None
    if misfit := inputs.misfit_of_padding(batch, keys):
        raise InputError(misfit)
    if device.type == "meta":
        mask = torch.empty(batch, keys, dtype=torch.bool, device=device)
    else:
        counts = torch.tensor(inputs.padding, device="cpu").expand(batch)
        mask = (torch.arange(keys, device="cpu") >= keys - counts[:, None]).to(device)
    return mask[0] if inputs.unbatched else mask


def attention_mask(inputs: InputSpec, sizes: MaskSizes, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return the causal mask, the one in the file, or both together; an additive one in `dtype`.

    `query key` or `(batch heads) query key`; None where nothing is masked.

    Raises `InputError` where the file does not fit.
    """
    mask = None if inputs.attn_mask is None else read_attn_mask(inputs.attn_mask, sizes).to(device)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    if not inputs.causal or sizes.query == sizes.key == 1:  # a token sees itself
        return mask
    return _both(mask, causal_mask(sizes.query, sizes.key, device))


def _both(mask: Tensor | None, masked: Tensor) -> Tensor:
    """Return a mask that masks these keys out as well."""
    if mask is None:
        return masked
    return mask | masked if mask.dtype == torch.bool else mask.masked_fill(masked, float("-inf"))


def read_attn_mask(path: Path, sizes: MaskSizes) -> Tensor:
    """Read a boolean mask (True: not allowed) or an additive one, `query key` or `(batch heads) query key`.

    Raises `InputError` where its shape does not fit, or it holds numbers where booleans are meant.
    """
    file, mask = printable(path), read_tensor(path)
    batch, heads, query, key = sizes
    shape = tuple(mask.shape)
    if shape not in ((query, key), (batch * heads, query, key)):
        raise InputError(
            f"{file} has shape {list(shape)}: for batch {batch}, {heads} heads, {query} queries and {key} keys a mask "
            f"is `query key` [{query}, {key}] or `(batch heads) query key` [{batch * heads}, {query}, {key}]. "
            "Padding keys are for --padding."
        )
    kind, boolean = str(mask.dtype).removeprefix("torch."), mask.dtype == torch.bool
    like_one = not boolean and not mask.is_complex() and bool(((mask == 0) | (mask == 1)).all())
    # Floating-point zeros alone are no such mask: either way they bar nothing.
    if like_one and (not mask.is_floating_point() or bool(mask.any())):
        raise InputError(
            f"{file} holds the {kind} numbers 0 and 1 where booleans are meant. In torch True means *not allowed*: "
            "save mask.bool() if 1 means that, and ~mask.bool() if 1 means allowed."
        )
    if not boolean and not mask.is_floating_point():
        raise InputError(
            f"{file} holds {kind}: a mask is boolean (True: not allowed) or floating-point numbers that are added to "
            "the scores. Save mask.bool() or mask.float()."
        )
    return mask


# -- as a forward takes them -------------------------------------------------------------------------------------------


def masks_of(
    forward: Forward, target: Target, inputs: InputSpec, values: Mapping[str, Any], free: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the masks by the names of a forward's arguments, and the flags for which nothing tells how it takes them.

    `free` has the arguments that may take a mask, and that nobody gave one.

    Raises:
        SpecError: the forward takes no such mask.
        InputError: a file does not fit.
    """
    names = {plain(name): name for name in forward.parameters}
    of_scores = next((names[word] for word in _OF_SCORES if word in names), None)
    switches = [name for word, name in names.items() if word in _CAUSAL]
    style = None if target.layer is None else target.layer.masks
    is_known = style is not None or type(forward.module).__module__.startswith("torch.nn.")
    is_taken = not is_known and bool(free or switches or mask_arguments(forward.parameters))
    of_keys = [names[word] for word in _OF_KEYS if word in names]
    asked = {
        "--attn-mask": (inputs.attn_mask is not None, of_scores),
        "--causal": (inputs.causal, of_scores or is_taken),
        "--padding": (bool(inputs.padding), of_keys or style or is_taken),
    }
    flags = [flag for flag, (is_asked, _) in asked.items() if is_asked]
    for flag in flags:
        if not asked[flag][1]:
            listed = ", ".join(forward.parameters)
            arguments = f"its arguments are {listed}" if listed else "it names no arguments"
            raise SpecError(f"{forward.label} takes no mask: {arguments}. Drop {flag}.")
    tensors = {name: value for name in forward.parameters if isinstance(value := values.get(name), Tensor)}
    if flags and tensors and is_known:
        scores, padded = _known_masks(forward, target, inputs, tensors)
        if style:
            batch = None if inputs.unbatched else next(iter(tensors.values())).shape[0]
            masks = {of_scores: merged_mask(scores, padded, style, forward.dtype, batch, target.made_from)}
        else:
            if padded is not None and scores is not None and scores.is_floating_point():  # torch deprecates two kinds
                padded = torch.zeros_like(padded, dtype=scores.dtype).masked_fill_(padded, float("-inf"))
            masks = {of_scores: scores, **dict.fromkeys(of_keys, padded)}
        return {name: mask for name, mask in masks.items() if name is not None and mask is not None}, []
    given: dict[str, Any] = {}
    if inputs.attn_mask is not None and of_scores is not None:
        mask = read_tensor(inputs.attn_mask).to(forward.device)
        given[of_scores] = mask.to(forward.dtype) if mask.is_floating_point() else mask
        flags.remove("--attn-mask")
    if inputs.causal and switches:
        given[switches[0]] = True
        flags.remove("--causal")
    # Where the causal mask is to be learned too, both may have to go into one argument.
    if flags == ["--padding"] and is_hugging_face(forward.module) and "attentionmask" in names:
        padded = padding_mask(inputs, inputs.batch, inputs.keys, forward.device)
        assert padded is not None
        return {**given, names["attentionmask"]: (~padded).long()}, []
    return given, flags


def mask_arguments(parameters: Mapping[str, Parameter]) -> list[str]:
    """Return the arguments that may take a mask: by their names, or, where none has such a one, which may be None."""
    named = [n for n, p in parameters.items() if kind_of(p) == "mask" or "bias" in plain(n)]
    return named or [n for n, p in parameters.items() if p.default is None and kind_of(p) == "unknown"]


def _known_masks(
    forward: Forward, target: Target, inputs: InputSpec, tensors: Mapping[str, Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask of scores between query and key, and that of the padded keys; None for what nobody asked for.

    Of a decoder of torch they are those of its attention to itself; what an encoder gave is what has padding.
    """
    query = tensors.get("tgt", next(iter(tensors.values())))
    second = (t for name, t in tensors.items() if "tgt" not in tensors and forward.kind(name) in ("key", "other"))
    key = next(second, query)
    padded = tensors.get("src", tensors.get("memory", key))
    # Masks for each head have those of the first attention in it.
    heads = (m.num_heads for m in forward.module.modules() if isinstance(m, nn.MultiheadAttention))
    unbatched = query.dim() == 2
    length = 0 if unbatched or not forward.batch_first else 1
    batch = 1 if unbatched else query.shape[1 - length]
    inputs = replace(inputs, unbatched=True, batch=1) if unbatched else inputs
    sizes = MaskSizes(batch, next(heads, target.arguments.get("num_heads", 1)), query.shape[length], key.shape[length])
    scores = attention_mask(inputs, sizes, forward.dtype, forward.device)
    return scores, padding_mask(inputs, batch, padded.shape[length], forward.device)


def merged_mask(
    mask: Tensor | None, padding: Tensor | None, style: MaskStyle, dtype: torch.dtype, batch: int | None, layer: str
) -> Tensor | None:
    """Return one mask out of both as a layer of the catalog takes it; None where nothing is masked.

    `batch` is None where there is no batch. Its axes are `query key` where every sequence and head has the same one,
    else `batch heads query key` (`heads query key` without a batch), 1 wide where it does not matter.

    Raises `InputError` where float16 cannot hold what is multiplied by -1e9.
    """
    if mask is not None and mask.dim() == 3 and batch is not None:
        mask = rearrange(mask, "(batch heads) query key -> batch heads query key", batch=batch)
    if padding is not None:
        mask = _both(mask, rearrange(padding, "... key -> ... 1 1 key"))
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
