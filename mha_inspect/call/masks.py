"""Attention masks: read from files, made of --causal and --padding, and given as a forward takes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from ..build.vocabulary import kind_of, plain
from ..errors import InputError, SpecError
from ..files.tensors import read_tensor
from ..layers.spec import InputSpec
from ..text import printable
from .hugging_face_inputs import is_hugging_face

if TYPE_CHECKING:
    from ..layers.catalog import MaskStyle

_OF_SCORES = ("attnmask", "attentionmask", "tgtmask", "mask", "srcmask", "bias", "attnbias")
"""Names of masks of scores, the most telling first."""
_CAUSAL = ("iscausal", "causal")


class MaskSizes(NamedTuple):
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
    if inputs.causal and device.type == "meta" and mask is None:
        return torch.empty(sizes.query, sizes.key, dtype=torch.bool, device=device)
    if inputs.causal:
        # Both sequences start together, as in torch: query i sees keys 0 to i, also where the lengths differ.
        mask = _both(mask, torch.ones(sizes.query, sizes.key, dtype=torch.bool, device="cpu").triu_(diagonal=1))
    return None if mask is None else mask.to(device)


def _both(mask: Tensor | None, barred: Tensor) -> Tensor:
    """Return a mask that bars these as well."""
    if mask is None:
        return barred
    return mask | barred if mask.dtype == torch.bool else mask.masked_fill(barred, float("-inf"))


def padding_mask(inputs: InputSpec, batch: int, key_len: int, device: torch.device) -> Tensor | None:
    """Return `batch key` (`key` when unbatched), True on the last keys of each row; None where nothing is padded.

    Raises `InputError` where the padding does not fit what a file holds.
    """
    if not inputs.padding:
        return None
    if misfit := inputs.misfit_of_padding(batch, key_len):
        raise InputError(misfit)
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
    file, mask = printable(path), read_tensor(path)
    batch, heads, query, key = sizes
    shape = tuple(mask.shape)
    hints = {
        (key, query): "Try mask.T.",
        (batch, query, key): f"Try mask.repeat_interleave({heads}, dim=0), which gives each head its batch row's mask.",
        (heads, query, key): f"Try mask.repeat({batch}, 1, 1), which gives each batch row the heads' masks.",
        (batch, heads, query, key): "Try mask.flatten(0, 1).",
        (batch, 1, query, key): f"Try mask.squeeze(1).repeat_interleave({heads}, dim=0).",
        (1, 1, query, key): "Try mask[0, 0].",
        (batch, key): "For padding keys use --padding.",
    }
    if shape not in ((query, key), (batch * heads, query, key)):
        raise InputError(
            f"{file} has shape {list(shape)}: for batch {batch}, {heads} heads, {query} queries and {key} keys a mask "
            f"is `query key` [{query}, {key}] or `(batch heads) query key` [{batch * heads}, {query}, {key}]. "
            f"{hints.get(shape, '')}".rstrip()
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
    return _both(mask, rearrange(padding, "... key -> ... 1 1 key"))


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


@dataclass(frozen=True)
class Masks:
    """The masks that were asked for, and the forward that is to take them."""

    module: nn.Module
    style: MaskStyle | None
    """How a layer of the catalog takes them; None for any other module."""
    inputs: InputSpec
    dtype: torch.dtype
    device: torch.device
    batch_first: bool
    heads: int = 1
    blank: Tensor | None = None
    """A mask of another size, in the place of which one that bars nothing is taken."""
    owner: str = ""
    """What messages call the module."""

    @property
    def forward(self) -> str:
        """What messages call the forward."""
        return f"{type(self.module).__qualname__}.forward"

    def pair(self, query: Tensor, key: Tensor, padded: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the mask of scores between query and key, and that of padded keys; each None where none is asked."""
        unbatched = query.dim() == 2
        length = 0 if unbatched or not self.batch_first else 1
        batch = 1 if unbatched else query.shape[1 - length]
        inputs = replace(self.inputs, unbatched=True, batch=1) if unbatched else self.inputs
        sizes = MaskSizes(batch, self.heads, query.shape[length], key.shape[length])
        if self.blank is None:
            scores = attention_mask(inputs, sizes, self.dtype, self.device)
        else:
            shape = (batch * self.heads, sizes.query, sizes.key)[3 - self.blank.dim() :]
            dtype = torch.bool if self.blank.dtype == torch.bool else self.dtype
            scores = torch.zeros(shape, dtype=dtype, device=self.device)
        return scores, padding_mask(inputs, batch, padded.shape[length], self.device)


def masks_of(
    asked: Masks, parameters: Mapping[str, Parameter], values: Mapping[str, Any], free: Collection[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the masks by the names of a forward's arguments, and the flags for which nothing tells how it takes them.

    `free` has the places for masks that nobody gave one, also those inside of arguments.

    Raises:
        SpecError: the forward takes no such mask.
        InputError: a file does not fit.
    """
    inputs, names = asked.inputs, {plain(name): name for name in parameters}
    tensors = {name: values[name] for name in parameters if isinstance(values.get(name), Tensor)}
    if asked.style is not None:
        query = next(iter(tensors.values()))
        other = next((t for n, t in tensors.items() if kind_of(parameters[n]) in ("key", "other")), query)
        pair = asked.pair(query, other, other)
        if asked.style == "apart":
            return dict(zip(("attn_mask", "key_padding_mask"), apart(*pair), strict=True)), ()
        mask = merged(*pair, None if inputs.unbatched else query.shape[0])
        own = next(name for name, parameter in parameters.items() if kind_of(parameter) == "mask")
        return {own: in_style(mask, asked.style, query.dtype, asked.owner)}, ()
    of_scores = next((names[word] for word in _OF_SCORES if word in names), None)
    taken = [*mask_arguments(parameters), *free, *(name for word, name in names.items() if word in _CAUSAL)]
    for flag, is_asked, is_taken in (
        ("--attn-mask", inputs.attn_mask is not None, of_scores is not None),
        ("--causal", inputs.causal, bool(taken)),
        ("--padding", bool(inputs.padding), bool(taken)),
    ):
        if is_asked and not is_taken:
            listed = f"its arguments are {', '.join(parameters)}" if parameters else "it names no arguments"
            raise SpecError(f"{asked.forward} takes no mask: {listed}. Drop {flag}.")
    if inputs.attn_mask is None and not inputs.causal and not inputs.padding:
        return {}, ()
    if is_torchs(asked.module) and tensors:
        return _of_torchs(asked, names, tensors)
    made: dict[str, Any] = {}
    if inputs.attn_mask is not None and of_scores is not None:
        mask = read_tensor(inputs.attn_mask).to(asked.device)
        made[of_scores] = mask.to(asked.dtype) if mask.is_floating_point() else mask
    switches = [names[word] for word in _CAUSAL if word in names] if inputs.causal else []
    made |= dict.fromkeys(switches[:1], True)
    is_open = inputs.causal and not switches
    # Where the causal mask is to be learned too, both may have to go into one argument.
    is_padded = bool(inputs.padding) and is_hugging_face(asked.module) and "attentionmask" in names and not is_open
    if is_padded:
        padded = padding_mask(inputs, inputs.batch, inputs.keys, asked.device)
        assert padded is not None
        made[names["attentionmask"]] = (~padded).long()
    left = {"--causal": is_open, "--padding": bool(inputs.padding) and not is_padded}
    return made, tuple(flag for flag, is_left in left.items() if is_left)


def mask_arguments(parameters: Mapping[str, Parameter]) -> list[str]:
    """Return the arguments that may take a mask: by their names, or, where none has such a one, which may be None."""
    named = [n for n, p in parameters.items() if kind_of(p) in ("mask", "lengths") or "bias" in plain(n)]
    return named or [n for n, p in parameters.items() if p.default is None and kind_of(p) == "unknown"]


def is_torchs(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own."""
    return type(module).__module__.startswith("torch.nn.")


def _of_torchs(
    asked: Masks, names: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The masks of one of torch's own modules, which mean what `nn.MultiheadAttention` says.

    Of a decoder they are those of its attention to itself; what an encoder gave is what has padding.
    """
    query = tensors.get("tgt", next(iter(tensors.values())))
    key = query if "tgt" in tensors else tensors.get("key", query)
    source = tensors.get("src", tensors.get("memory", key))
    scores, padded = apart(*asked.pair(query, key, source))
    of_scores = next((names[word] for word in _OF_SCORES if word in names), "")
    of_keys = [word for word in ("srckeypaddingmask", "memorykeypaddingmask", "keypaddingmask") if word in names]
    made = {of_scores: scores, **{names[word]: padded for word in of_keys}}
    return {name: mask for name, mask in made.items() if mask is not None}, ()
