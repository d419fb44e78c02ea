"""--causal, --padding and --attn-mask for a forward that is not ours: only where it is known what it takes them for."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, SpecError
from .aliases import Flags, plain
from .files import read_tensor
from .spec import InputSpec

_ATTENTION_MASKS = ("attnmask", "attentionmask", "mask", "srcmask", "bias", "attnbias")
_PADDING_MASKS = ("keypaddingmask", "srckeypaddingmask")
_CAUSAL = ("iscausal", "causal")


def masks_of(
    module: nn.Module,
    parameters: Mapping[str, Parameter],
    values: Mapping[str, Any],
    inputs: InputSpec,
    flags: Flags,
    device: torch.device,
) -> dict[str, Any]:
    """The masks that were asked for, by the names of the forward's arguments.

    Raises:
        SpecError: the forward takes no such mask, or nothing says what its masks mean.
        InputError: a file does not hold one tensor.
    """
    names = {plain(name): name for name in parameters}
    owner = f"{type(module).__qualname__}.forward"
    masks: dict[str, Any] = {}
    if inputs.attn_mask is not None:
        name = next((names[word] for word in _ATTENTION_MASKS if word in names), None)
        if name is None:
            raise _takes_no_mask(owner, parameters, "--attn-mask")
        mask = read_tensor(inputs.attn_mask).to(device)
        first = next((p for p in module.parameters() if p.is_floating_point()), None)
        masks[name] = mask.to(first.dtype) if mask.is_floating_point() and first is not None else mask
    takes_any = any("mask" in word or word in (*_ATTENTION_MASKS, *_CAUSAL) for word in names)
    if inputs.causal and "causal" in flags.typed and not _built_causal(flags, module):
        if not takes_any:
            raise _takes_no_mask(owner, parameters, "--causal")
        masks |= _causal(module, names, values, owner, device)
    if inputs.padding:
        if not takes_any:
            raise _takes_no_mask(owner, parameters, "--padding")
        masks |= _padding(module, names, values, inputs, owner, device)
    return masks


def _takes_no_mask(owner: str, parameters: Mapping[str, Parameter], flag: str) -> SpecError:
    return SpecError(f"{owner} takes no mask: its arguments are {', '.join(parameters)}. Drop {flag}.")


def _built_causal(flags: Flags, module: nn.Module) -> bool:
    """Whether the constructor took --causal."""
    return any(bool(getattr(module, name, False)) for name in ("causal", "is_causal", "masked"))


def _causal(
    module: nn.Module, names: Mapping[str, str], values: Mapping[str, Any], owner: str, device: torch.device
) -> dict[str, Any]:
    if _is_torchs(module):
        name = next((names[word] for word in ("attnmask", "srcmask", "mask", "tgtmask") if word in names), None)
        if name is not None:
            lengths = _lengths(module, values)
            above = torch.ones(lengths, dtype=torch.bool, device="cpu").triu_(diagonal=1)
            return {name: above.to(device)}
    for word in _CAUSAL:
        if word in names:
            return {names[word]: True}
    raise SpecError(
        f"{owner} does not say what its mask means, so --causal cannot make one. Give it as it takes it: "
        "--attn-mask FILE, or --input FILE with the mask by name."
    )


def _padding(
    module: nn.Module,
    names: Mapping[str, str],
    values: Mapping[str, Any],
    inputs: InputSpec,
    owner: str,
    device: torch.device,
) -> dict[str, Any]:
    """`batch key`: True where padded for torch's own modules, 0 where padded for Hugging Face's."""
    from .hugging_face_inputs import is_hugging_face

    key_len = inputs.seq_len if inputs.key_len is None else inputs.key_len
    counts = inputs.padding if len(inputs.padding) > 1 else inputs.padding * inputs.batch
    if len(counts) != inputs.batch or max(counts) > key_len:
        raise InputError(
            f"padding {','.join(map(str, inputs.padding))} does not fit batch {inputs.batch}, {key_len} keys."
        )
    padded = torch.arange(key_len)[None, :] >= key_len - torch.tensor(counts)[:, None]
    if _is_torchs(module):
        name = next((names[word] for word in _PADDING_MASKS if word in names), None)
        if name is not None:
            return {name: (padded[0] if inputs.unbatched else padded).to(device)}
    if is_hugging_face(module) and "attentionmask" in names:
        return {names["attentionmask"]: (~padded).long().to(device)}
    raise SpecError(
        f"{owner} does not say what its mask means, so --padding cannot make one. Give it as it takes it: "
        "--input FILE with the mask by name."
    )


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _lengths(module: nn.Module, values: Mapping[str, Any]) -> tuple[int, int]:
    """Query and key length of a call of one of torch's own modules."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    query = next(iter(tensors.values()))
    key = tensors.get("key", query)
    owner = next((m for m in module.modules() if isinstance(getattr(m, "batch_first", None), bool)), None)
    place = -2 if query.dim() == 2 or owner is None or owner.batch_first else 0
    return query.shape[place], key.shape[place]
