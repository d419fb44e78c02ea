"""Attention masks: made from --causal and --padding, read from files, in the form that a forward takes.

The form is known for torch's modules and the catalog's layers. For other modules the usual forms are tried, and the
weights show which one masks out the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import Parameter
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from ..errors import InputError, NoMaskError, SpecError
from ..files.tensors import read_tensor
from ..layers.spec import InputSpec
from ..making.target import Target
from ..making.vocabulary import kind_of, plain
from ..naming.canonical import content_of
from ..running.subject import Subject
from ..text import printable
from .call import Forward
from .guess import is_hugging_face

if TYPE_CHECKING:
    from ..layers.catalog import MaskStyle

_OF_SCORES = ("attnmask", "attentionmask", "tgtmask", "mask", "srcmask", "bias", "attnbias")
"""Names of masks of scores, the most specific first."""
_OF_KEYS = ("srckeypaddingmask", "memorykeypaddingmask", "keypaddingmask")
_CAUSAL = ("iscausal", "causal")


# -- what is masked ----------------------------------------------------------------------------------------------------


def causal_mask(query: int, key: int, device: torch.device | str = "cpu") -> Tensor:
    """Return `query key`, True where a key comes after the query: both sequences start together, as in torch."""
    if torch.device(device).type == "meta":
        return torch.empty(query, key, dtype=torch.bool, device=device)
    return torch.ones(query, key, dtype=torch.bool, device="cpu").triu_(diagonal=1).to(device)


def padding_mask(inputs: InputSpec, batch: int, keys: int, device: torch.device) -> Tensor | None:
    """Return `batch key` (`key` when unbatched), True on the last keys of each item; None without padding.

    Raises `InputError` if the padding does not fit the tensors of a file.
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


def _both(mask: Tensor | None, masked: Tensor) -> Tensor:
    """Return a mask that also masks out these keys."""
    if mask is None:
        return masked
    return mask | masked if mask.dtype == torch.bool else mask.masked_fill(masked, float("-inf"))


def read_attn_mask(path: Path, batch: int, heads: int, query: int, key: int) -> Tensor:
    """Read a boolean mask (True: masked out) or an additive one, `query key` or `(batch heads) query key`.

    Raises `InputError` if its shape does not fit, or it has numbers instead of booleans.
    """
    file, mask = printable(path), read_tensor(path)
    shape = tuple(mask.shape)
    if shape not in ((query, key), (batch * heads, query, key)):
        raise InputError(
            f"{file} has shape {list(shape)}. For batch {batch} and {heads} heads, expected `query key` "
            f"[{query}, {key}] or `(batch heads) query key` [{batch * heads}, {query}, {key}]. "
            "For padding, use --padding."
        )
    kind, boolean = str(mask.dtype).removeprefix("torch."), mask.dtype == torch.bool
    like_one = not boolean and not mask.is_complex() and bool(((mask == 0) | (mask == 1)).all())
    # Floating-point zeros alone are fine: as an additive mask they mask out nothing.
    if like_one and (not mask.is_floating_point() or bool(mask.any())):
        raise InputError(
            f"{file} has the {kind} numbers 0 and 1, expected booleans. In torch True masks out a key: "
            "save mask.bool() if 1 masks out, or ~mask.bool() if 1 keeps."
        )
    if not boolean and not mask.is_floating_point():
        raise InputError(
            f"{file} has dtype {kind}, expected booleans (True: masked out) or floating-point numbers to add to "
            "the scores. Save mask.bool() or mask.float()."
        )
    return mask


# -- in the form that a forward takes ----------------------------------------------------------------------------------


def _no_mask(forward: Forward, flag: str) -> NoMaskError:
    listed = ", ".join(forward.parameters)
    arguments = f"its arguments are {listed}" if listed else "it names no arguments"
    return NoMaskError(f"{forward.label} takes no mask: {arguments}. Drop {flag}.")


def masks_of(
    forward: Forward, target: Target, inputs: InputSpec, values: Mapping[str, Any], free: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the masks by the names of a forward's arguments, and the flags whose masks have an unknown form.

    `free` has the arguments that may take a mask and that the user did not give.

    Raises `SpecError` if the forward takes no such mask, `InputError` if a file does not fit.
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
        # A module of the user may mask by itself: its weights show that.
        may_be_built_in = flag == "--causal" and not is_known and forward.device.type != "meta"
        if not asked[flag][1] and not may_be_built_in:
            raise _no_mask(forward, flag)
    tensors = {name: value for name in forward.parameters if isinstance(value := values.get(name), Tensor)}
    if flags and tensors and is_known:
        scores, padded = _known_masks(forward, target, inputs, tensors)
        if style:
            batch = None if inputs.unbatched else next(iter(tensors.values())).shape[0]
            masks = {of_scores: merged_mask(scores, padded, style, forward.dtype, batch, target.made_from)}
        else:
            if padded is not None and scores is not None and scores.is_floating_point():  # torch deprecates mixed kinds
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
    # If the form of the causal mask is unknown too, both masks may belong in one argument.
    if flags == ["--padding"] and is_hugging_face(forward.module) and "attentionmask" in names:
        padded = padding_mask(inputs, inputs.batch, inputs.keys, forward.device)
        assert padded is not None
        return {**given, names["attentionmask"]: (~padded).long()}, []
    return given, flags


def mask_arguments(parameters: Mapping[str, Parameter]) -> list[str]:
    """Return the arguments that may take a mask: by their names, or else those that may be None."""
    named = [n for n, p in parameters.items() if kind_of(p) == "mask" or "bias" in plain(n)]
    return named or [n for n, p in parameters.items() if p.default is None and kind_of(p) == "unknown"]


def _known_masks(
    forward: Forward, target: Target, inputs: InputSpec, tensors: Mapping[str, Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask of the scores and the mask of padded keys; None for a mask that was not requested.

    In a decoder of torch the first is for self-attention, and the padding is in the output of the encoder.
    """
    query = tensors.get("tgt", next(iter(tensors.values())))
    second = (t for name, t in tensors.items() if "tgt" not in tensors and forward.kind(name) in ("key", "other"))
    key = next(second, query)
    padded = tensors.get("src", tensors.get("memory", key))
    # A mask per head has the number of heads of the first attention.
    heads = (m.num_heads for m in forward.module.modules() if isinstance(m, nn.MultiheadAttention))
    unbatched = query.dim() == 2
    length = 0 if unbatched or not forward.batch_first else 1
    batch = 1 if unbatched else query.shape[1 - length]
    inputs = replace(inputs, unbatched=True, batch=1) if unbatched else inputs
    lengths, scores = (query.shape[length], key.shape[length]), None
    if inputs.attn_mask is not None:
        num_heads = next(heads, target.arguments.get("num_heads", 1))
        scores = read_attn_mask(inputs.attn_mask, batch, num_heads, *lengths).to(forward.device)
        scores = scores if scores.dtype == torch.bool else scores.to(forward.dtype)
    if inputs.causal and lengths != (1, 1):  # a single token attends to itself
        scores = _both(scores, causal_mask(*lengths, forward.device))
    return scores, padding_mask(inputs, batch, padded.shape[length], forward.device)


def merged_mask(
    mask: Tensor | None, padding: Tensor | None, style: MaskStyle, dtype: torch.dtype, batch: int | None, layer: str
) -> Tensor | None:
    """Merge both masks into one in the form of a layer of the catalog; None if nothing is masked.

    `batch` is None without a batch dimension. The axes are `query key` if all sequences and heads have the same mask,
    else `batch heads query key` (`heads query key` without a batch), of size 1 where a mask is shared.

    Raises `InputError` if the mask is multiplied by -1e9 and float16 cannot represent it.
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


# -- trying the forms that a forward may take -------------------------------------------------------------------------

_FORMS = ("query key", "batch key", "batch 1 1 key", "batch 1 query key", "batch heads query key")
_MEANS = {
    "keeps": "True keeps a key",
    "masks": "True masks out a key",
    "adds": "0 keeps a key and -inf masks it out",
}
"""Meanings of a mask with their words: two of booleans, and one of numbers."""
_MASKED = 1e-6
"""Up to this weight a key counts as masked out."""


@dataclass(frozen=True)
class MaskForm:
    """A form in which an argument of a forward may take a mask."""

    argument: str
    axes: str
    means: str
    dtype: torch.dtype

    def words(self, flags: Iterable[str]) -> str:
        """Return a sentence on the mask that these flags made."""
        kind = f"{str(self.dtype).removeprefix('torch.')} `{self.axes}`"
        return f"{' and '.join(flags)} made {self.argument}, {kind}: {_MEANS[self.means]}, as the weights show."

    def mask(self, masked: Tensor, heads: int) -> Tensor:
        """Return a mask in this form. `masked` is `batch query key`, True for masked keys."""
        if "batch" not in self.axes:
            masked = masked[0]
        if "query" not in self.axes:
            masked = masked[..., 0, :]
        given_axes = self.axes.replace(" 1", "").replace(" heads", "")
        sizes = {"heads": heads} if "heads" in self.axes else {}
        masked = repeat(masked, f"{given_axes} -> {self.axes}", **sizes)
        if self.means == "adds":
            return torch.zeros(masked.shape, dtype=self.dtype, device=masked.device).masked_fill(masked, -torch.inf)
        return masked if self.means == "masks" else ~masked


def try_masks(
    forward: Forward,
    inputs: InputSpec,
    flags: Sequence[str],
    free: Sequence[str],
    make: Callable[[Mapping[str, Tensor]], Subject],
) -> tuple[dict[str, Tensor], list[str]]:
    """Make one mask of all flags, in the first usual form with which a run masks out these keys and no others.

    `free` has the mask arguments that the user did not give; `make` makes a subject with masks by name.

    Returns the mask by name, and sentences on it. Raises `SpecError` if no form has the requested effect.
    """
    if forward.device.type == "meta":
        raise SpecError(
            f"{flags[0]} cannot make a mask for {forward.label} on meta, because only numbers show its form. "
            "Use --device cpu, or give the mask by name: --input FILE."
        )
    plain, notes, asked = _weights(make({})), list[str](), list[str]()
    for flag in flags:
        masked = _masked(inputs, (flag,), forward.device)
        if not masked.any():
            notes.append(f"{flag} masks out no key here, so no mask was given.")
        elif flag == "--causal" and _does(plain, [], masked):
            notes.append(f"The forward already does what {flag} asks for, so no mask was given.")
        else:
            asked.append(flag)
    if not asked:
        return {}, notes
    if not free:
        raise _no_mask(forward, asked[0])
    masked = _masked(inputs, asked, forward.device)
    heads = max((weights.shape[1] for weights in plain), default=1)
    for form in _forms(forward, free, asked):
        mask = form.mask(masked, heads)
        if _does(_weights(make({form.argument: mask})), plain, masked):
            return {form.argument: mask}, [*notes, form.words(asked)]
    raise SpecError(
        f"{' and '.join(asked)} cannot be applied to {forward.label}: no usual form of {', '.join(free)} masks out "
        "these keys alone. Let a function return the module with its inputs and masks: (module, args)."
    )


def _forms(forward: Forward, free: Sequence[str], flags: Sequence[str]) -> Iterator[MaskForm]:
    """Yield the forms to try: masks of keys alone do not depend on the query, as a causal mask does."""
    axes = [form for form in _FORMS if "query" in form or "--causal" not in flags]
    for argument, pattern, means in product(free, axes, _MEANS):
        yield MaskForm(argument, pattern, means, forward.dtype if means == "adds" else torch.bool)


def _masked(inputs: InputSpec, flags: Iterable[str], device: torch.device) -> Tensor:
    """Return `batch query key`, True for masked keys. Raises `InputError` if padding does not fit."""
    masked = torch.zeros(inputs.batch, inputs.seq_len, inputs.keys, dtype=torch.bool, device=device)
    if "--causal" in flags:
        masked |= causal_mask(inputs.seq_len, inputs.keys, device)
    padded = padding_mask(inputs, inputs.batch, inputs.keys, device) if "--padding" in flags else None
    return masked if padded is None else masked | rearrange(padded, "... key -> ... 1 key")


def _does(after: Sequence[Tensor], before: Sequence[Tensor], masked: Tensor) -> bool:
    """Return whether a mask set an attention's weights to zero for masked keys, and for no other keys.

    Weights that were zero before do not count.
    """
    for place, weights in enumerate(after):
        if (weights.shape[0], *weights.shape[-2:]) != masked.shape:
            continue
        masked_out = masked[:, None].expand_as(weights)
        attended = torch.ones_like(masked_out)
        if len(before) == len(after) and before[place].shape == weights.shape:
            attended = before[place] > _MASKED
        kept = ~masked_out & attended
        masked_out = masked_out & attended & kept.any(-1, keepdim=True)
        is_masked = bool(masked_out.any()) and bool((weights[masked_out] <= _MASKED).all())
        if is_masked and bool((weights[kept] > _MASKED).double().mean() > 0.9):
            return True
    return False


def _weights(subject: Subject) -> list[Tensor]:
    """Return the weights of each attention in a run, `batch heads query key`; empty if it raises."""
    contents = []
    with suppress(Exception):  # a user's code may raise anything for a mask of a wrong form
        with subject.apart() as fresh:
            run = fresh.recorded(keep=True)
        for attention, names in run.attentions:
            if (weights := attention.stages.get("weights")) is None:
                continue
            for op in attention.weights_path:  # a multiplied mask comes after the softmax
                weights = op.output if op.output.shape == weights.shape else weights
            masked = replace(attention, stages={**attention.stages, "weights": weights})
            contents.append(content_of(run, masked, names, "weights"))
    return [content.detach() for content in contents if content is not None and content.dim() == 4]
