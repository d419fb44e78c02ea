"""Attention masks: made from --causal and --padding, read from files, in the form that a forward takes.

The form is known for torch's modules and the catalog's layers. For other modules the usual forms are tried, and the
weights show which one masks out the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from ..errors import InputError, NoMaskError, SpecError
from ..files.tensors import read_tensor
from ..layers.spec import InputSpec
from ..making.target import Target
from ..making.vocabulary import flag_of, kind_of, plain
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


# -- what is masked ----------------------------------------------------------------------------------------------------


def causal_mask(query: int, key: int, device: torch.device | str = "cpu") -> Tensor:
    """Return `query key`, True where a key comes after the query: both sequences start together, as in torch."""
    if torch.device(device).type == "meta":
        return torch.empty(query, key, dtype=torch.bool, device=device)
    pairs = torch.ones(query, key, dtype=torch.bool, device="cpu")
    later = pairs.triu_(diagonal=1)
    return later.to(device)


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
        places = torch.arange(keys, device="cpu")
        mask = (places >= keys - counts[:, None]).to(device)
    return mask[0] if inputs.unbatched else mask


def _both(mask: Tensor | None, masked: Tensor) -> Tensor:
    """Return a mask that also masks out these keys."""
    if mask is None:
        return masked
    if mask.dtype == torch.bool:
        return mask | masked
    return mask.masked_fill(masked, float("-inf"))


def read_attn_mask(path: Path, batch: int, heads: int, query: int, key: int) -> Tensor:
    """Read a boolean mask (True: masked out) or an additive one, `query key` or `(batch heads) query key`.

    Raises `InputError` if its shape does not fit, or it has numbers instead of booleans.
    """
    mask = read_tensor(path)
    of_all = (query, key)
    of_each_head = (batch * heads, query, key)
    if mask.shape not in (of_all, of_each_head):
        raise InputError(
            f"{printable(path)} has shape {list(mask.shape)}. For batch {batch} and {heads} heads, expected "
            f"`query key` {list(of_all)} or `(batch heads) query key` {list(of_each_head)}. For padding, use --padding."
        )
    if mask.dtype == torch.bool:
        return mask
    dtype = str(mask.dtype).removeprefix("torch.")
    if _is_of_zeros_and_ones(mask):
        raise InputError(
            f"{printable(path)} has the {dtype} numbers 0 and 1, expected booleans. In torch True masks out a key: "
            "save mask.bool() if 1 masks out, or ~mask.bool() if 1 keeps."
        )
    if not mask.is_floating_point():
        raise InputError(
            f"{printable(path)} has dtype {dtype}, expected booleans (True: masked out) or floating-point numbers to "
            "add to the scores. Save mask.bool() or mask.float()."
        )
    return mask


def _is_of_zeros_and_ones(mask: Tensor) -> bool:
    """Return whether the numbers of a mask stand for booleans, so that nobody knows which of them masks out."""
    if mask.is_complex():
        return False
    if not bool(((mask == 0) | (mask == 1)).all()):
        return False
    # Floating-point zeros alone are fine: as an additive mask they mask out nothing.
    return not mask.is_floating_point() or bool(mask.any())


# -- in the form that a forward takes ----------------------------------------------------------------------------------


def _no_mask(forward: Forward, flag: str) -> NoMaskError:
    arguments = "it names no arguments"
    if forward.parameters:
        arguments = f"its arguments are {', '.join(forward.parameters)}"
    return NoMaskError(f"{forward.label} takes no mask: {arguments}. Drop {flag}.")


@dataclass(frozen=True)
class _MaskArguments:
    """The arguments of a forward that may take a mask, by what they mean."""

    of_scores: str | None
    of_keys: tuple[str, ...]
    switches: tuple[str, ...]
    """Booleans that turn a causal mask on."""
    likely: tuple[str, ...]
    """Arguments that look like masks, whatever they mean."""
    attention_mask: str | None
    """In a Hugging Face model it takes `batch key`, 1 for a token and 0 for padding."""

    @classmethod
    def of(cls, forward: Forward) -> _MaskArguments:
        """Return the arguments of a forward, read by their names without underscores."""
        names = {plain(name): name for name in forward.parameters}
        of_scores = [names[word] for word in _OF_SCORES if word in names]
        return cls(
            of_scores=of_scores[0] if of_scores else None,
            of_keys=tuple(names[word] for word in _OF_KEYS if word in names),
            switches=tuple(name for name in forward.parameters if flag_of(name) == "causal"),
            likely=tuple(mask_arguments(forward.parameters)),
            attention_mask=names.get("attentionmask"),
        )


@dataclass(frozen=True)
class MadeMasks:
    """The masks whose form is known."""

    by_name: Mapping[str, Any]
    """By the names of a forward's arguments."""
    open_flags: Sequence[str] = ()
    """The flags whose masks have an unknown form."""


def masks_of(
    forward: Forward, target: Target, inputs: InputSpec, values: Mapping[str, Any], free: Collection[str]
) -> MadeMasks:
    """Return the masks that the user asked for. `free` has the arguments that may take one and have no value.

    Raises `SpecError` if the forward takes no such mask, `InputError` if a file does not fit.
    """
    arguments = _MaskArguments.of(forward)
    style = None if target.layer is None else target.layer.masks
    home = type(forward.module).__module__
    is_known = style is not None or home.startswith("torch.nn.")
    taken = _taken_by_known(arguments, style) if is_known else _taken_by_unknown(forward, arguments, free)
    flags = _asked_flags(inputs)
    for flag in flags:
        if flag not in taken:
            raise _no_mask(forward, flag)
    tensors: dict[str, Tensor] = {}
    for name in forward.parameters:
        value = values.get(name)
        if isinstance(value, Tensor):
            tensors[name] = value
    if flags and tensors and is_known:
        return _masks_of_known(forward, target, inputs, tensors, arguments)
    return _masks_by_name(forward, inputs, arguments, flags)


def _asked_flags(inputs: InputSpec) -> list[str]:
    """Return the flags of the masks that the user asked for."""
    asked = {
        "--attn-mask": inputs.attn_mask is not None,
        "--causal": inputs.causal,
        "--padding": bool(inputs.padding),
    }
    return [flag for flag, is_asked in asked.items() if is_asked]


def _taken_by_known(arguments: _MaskArguments, style: MaskStyle | None) -> set[str]:
    """Return the flags whose masks a module of torch or a layer of the catalog takes."""
    taken = set[str]()
    if arguments.of_scores:
        taken |= {"--attn-mask", "--causal"}
    if arguments.of_keys or style:
        taken.add("--padding")
    return taken


def _taken_by_unknown(forward: Forward, arguments: _MaskArguments, free: Collection[str]) -> set[str]:
    """Return the flags whose masks a module of the user may take: the form is found later, by its weights."""
    taken = set[str]()
    if arguments.of_scores:
        taken |= {"--attn-mask", "--causal"}
    if arguments.of_keys:
        taken.add("--padding")
    if free or arguments.switches or arguments.likely:
        taken |= {"--causal", "--padding"}
    if forward.device.type != "meta":
        # A module of the user may mask by itself: its weights show that.
        taken.add("--causal")
    return taken


def _masks_of_known(
    forward: Forward, target: Target, inputs: InputSpec, tensors: Mapping[str, Tensor], arguments: _MaskArguments
) -> MadeMasks:
    """Return the masks of a module whose form of masks is known, without those that mask nothing."""
    masks = _known_masks(forward, target, inputs, tensors)
    style = None if target.layer is None else target.layer.masks
    scores = masks.scores
    keys = None
    if style:
        first = next(iter(tensors.values()))
        batch = None if inputs.unbatched else first.shape[0]
        scores = merged_mask(masks.scores, masks.keys, style, forward.dtype, batch, target.made_from)
    else:
        keys = masks.keys_like_scores()
    by_name: dict[str, Any] = {}
    if arguments.of_scores is not None and scores is not None:
        by_name[arguments.of_scores] = scores
    if keys is not None:
        by_name.update(dict.fromkeys(arguments.of_keys, keys))
    return MadeMasks(by_name)


def _masks_by_name(forward: Forward, inputs: InputSpec, arguments: _MaskArguments, flags: Sequence[str]) -> MadeMasks:
    """Return the masks whose form the name of an argument says, and the flags that are left."""
    by_name: dict[str, Any] = {}
    left = list(flags)
    if inputs.attn_mask is not None and arguments.of_scores is not None:
        mask = read_tensor(inputs.attn_mask).to(forward.device)
        if mask.is_floating_point():
            mask = mask.to(forward.dtype)
        by_name[arguments.of_scores] = mask
        left.remove("--attn-mask")
    if inputs.causal and arguments.switches:
        by_name[arguments.switches[0]] = True
        left.remove("--causal")
    # If the form of the causal mask is unknown too, both masks may belong in one argument.
    attention_mask = arguments.attention_mask if left == ["--padding"] else None
    if attention_mask is None or not is_hugging_face(forward.module):
        return MadeMasks(by_name, left)
    padded = padding_mask(inputs, inputs.batch, inputs.keys, forward.device)
    assert padded is not None
    by_name[attention_mask] = (~padded).long()
    return MadeMasks(by_name)


def mask_arguments(parameters: Mapping[str, Parameter]) -> list[str]:
    """Return the arguments that may take a mask: by their names, or else those that may be None."""
    named: list[str] = []
    nullable: list[str] = []
    for name, parameter in parameters.items():
        kind = kind_of(parameter)
        if kind == "mask" or "bias" in plain(name):
            named.append(name)
        elif kind == "unknown" and parameter.default is None:
            nullable.append(name)
    return named or nullable


@dataclass(frozen=True)
class _KnownMasks:
    """The masks of a module that takes one of scores and one of keys; None for a mask that was not requested."""

    scores: Tensor | None
    """`query key` or `(batch heads) query key`."""
    keys: Tensor | None
    """`batch key`, or `key` without a batch. In a decoder of torch it is of the output of the encoder."""

    def keys_like_scores(self) -> Tensor | None:
        """Return the mask of keys as one to add, if that of scores is one to add: torch deprecates mixed kinds."""
        if self.keys is None or self.scores is None:
            return self.keys
        if not self.scores.is_floating_point():
            return self.keys
        zeros = torch.zeros_like(self.keys, dtype=self.scores.dtype)
        return zeros.masked_fill_(self.keys, float("-inf"))


def _known_masks(forward: Forward, target: Target, inputs: InputSpec, tensors: Mapping[str, Tensor]) -> _KnownMasks:
    """Return the masks for these tensors. In a decoder of torch the mask of scores is for self-attention."""
    query = tensors.get("tgt", next(iter(tensors.values())))
    key = _key_of(forward, tensors, query)
    padded = tensors.get("src", tensors.get("memory", key))
    if query.dim() == 2:
        length_axis, batch = 0, 1
        inputs = replace(inputs, unbatched=True, batch=1)
    elif forward.batch_first:
        length_axis, batch = 1, query.shape[0]
    else:
        length_axis, batch = 0, query.shape[1]
    query_length = query.shape[length_axis]
    key_length = key.shape[length_axis]
    scores = None
    if inputs.attn_mask is not None:
        num_heads = _num_heads(forward, target)
        scores = read_attn_mask(inputs.attn_mask, batch, num_heads, query_length, key_length).to(forward.device)
        if scores.dtype != torch.bool:
            scores = scores.to(forward.dtype)
    # A single token attends to itself, whatever is causal.
    if inputs.causal and (query_length, key_length) != (1, 1):
        scores = _both(scores, causal_mask(query_length, key_length, forward.device))
    return _KnownMasks(scores, padding_mask(inputs, batch, padded.shape[length_axis], forward.device))


def _key_of(forward: Forward, tensors: Mapping[str, Tensor], query: Tensor) -> Tensor:
    """Return the tensor with the keys of the first attention: the query itself in self-attention."""
    if "tgt" in tensors:
        return query
    for name, tensor in tensors.items():
        if forward.kind(name) in ("key", "other"):
            return tensor
    return query


def _num_heads(forward: Forward, target: Target) -> int:
    """Return the heads of a mask with one part per head: as many as in the first attention of torch."""
    num_heads: int = target.arguments.get("num_heads", 1)
    for module in forward.module.modules():
        if isinstance(module, nn.MultiheadAttention):
            num_heads = module.num_heads
            break
    return num_heads


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
        # For all heads and queries the same keys.
        padded = rearrange(padding, "... key -> ... 1 1 key")
        mask = _both(mask, padded)
    if mask is None or style == "boolean":
        return mask
    is_boolean = mask.dtype == torch.bool
    if style == "ones":
        if is_boolean:
            return mask.to(dtype)
        if dtype == torch.float16:
            raise InputError(
                f"{layer} multiplies its mask by -1e9, but float16 has no numbers small enough for an additive one. "
                "Give a boolean mask, or dtype float32."
            )
        ones = mask.to(dtype) / -1e9
        return ones.clamp(max=1.0)
    blocked = torch.finfo(dtype).min if style == "lowest" else float("-inf")
    if is_boolean:
        zeros = torch.zeros_like(mask, dtype=dtype)
        return zeros.masked_fill(mask, blocked)
    return mask.to(dtype).clamp(min=blocked)


# -- trying the forms that a forward may take -------------------------------------------------------------------------

_FORMS = ("query key", "batch key", "batch query key", "batch 1 1 key", "batch 1 query key", "batch heads query key")
_MEANS = {
    "keeps": "True keeps a key",
    "masks": "True masks out a key",
    "keeps as 1": "1 keeps a key and 0 masks it out",
    "masks as 1": "1 masks out a key and 0 keeps it",
    "adds": "0 keeps a key and -inf masks it out",
}
"""Meanings of a mask with their words: two of booleans, two of whole numbers, and one of numbers that are added."""
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
        dtype = str(self.dtype).removeprefix("torch.")
        mask = f"{' and '.join(flags)} made {self.argument}, {dtype} `{self.axes}`"
        return f"{mask}: {_MEANS[self.means]}, as the weights show."

    def mask(self, masked: Tensor, heads: int) -> Tensor:
        """Return a mask in this form. `masked` is `batch query key`, True for masked keys."""
        if "batch" not in self.axes:
            masked = masked[0]
        if "query" not in self.axes:
            masked = masked[..., 0, :]
        axes = self.axes.replace(" 1", "").replace(" heads", "")
        if "heads" in self.axes:
            masked = repeat(masked, f"{axes} -> {self.axes}", heads=heads)
        else:
            masked = repeat(masked, f"{axes} -> {self.axes}")
        if self.means.startswith("masks"):
            return masked.to(self.dtype)
        if self.means.startswith("keeps"):
            return (~masked).to(self.dtype)
        zeros = torch.zeros(masked.shape, dtype=self.dtype, device=masked.device)
        return zeros.masked_fill(masked, -torch.inf)


@dataclass(frozen=True)
class TriedMasks:
    """A mask whose form was found by runs."""

    by_name: Mapping[str, Tensor]
    """By the name of the argument; empty if no mask is needed."""
    notes: Sequence[str]
    """Sentences on it."""


def try_masks(
    forward: Forward,
    inputs: InputSpec,
    flags: Sequence[str],
    free: Sequence[str],
    make: Callable[[Mapping[str, Tensor]], Subject],
) -> TriedMasks:
    """Make one mask of all flags, in the first usual form with which a run masks out these keys and no others.

    `free` has the mask arguments that the user did not give; `make` makes a subject with masks by name.

    Raises `SpecError` if no form has the requested effect.
    """
    if forward.device.type == "meta":
        raise SpecError(
            f"{flags[0]} cannot make a mask for {forward.label} on meta, because only numbers show its form. "
            "Use --device cpu, or give the mask by name: --input FILE."
        )
    unmasked = _weights(make({}))
    effect = _effect_of(flags, inputs, unmasked, forward.device)
    if not effect.flags:
        return TriedMasks({}, effect.notes)
    if not free:
        raise _no_mask(forward, effect.flags[0])
    masked = _masked(inputs, effect.flags, forward.device)
    heads = max((weights.shape[1] for weights in unmasked), default=1)
    for form in _forms(forward, free, effect.flags):
        mask = form.mask(masked, heads)
        weights = _weights(make({form.argument: mask}))
        if _masks_out_only(masked, weights, unmasked):
            words = form.words(effect.flags)
            return TriedMasks({form.argument: mask}, [*effect.notes, words])
    flags_in_words = " and ".join(effect.flags)
    arguments = ", ".join(free)
    raise SpecError(
        f"{flags_in_words} cannot be applied to {forward.label}: no usual form of {arguments} masks out "
        "these keys alone. Let a function return the module with its inputs and masks: (module, args)."
    )


@dataclass(frozen=True)
class _Effect:
    """The flags that change which keys are attended to, and those that do not."""

    flags: Sequence[str]
    """The flags that need a mask."""
    notes: Sequence[str]
    """A sentence on each flag that needs none."""


def _effect_of(flags: Sequence[str], inputs: InputSpec, unmasked: Sequence[Tensor], device: torch.device) -> _Effect:
    """Return which flags need a mask. `unmasked` has the weights of a run without a mask."""
    needed: list[str] = []
    notes: list[str] = []
    for flag in flags:
        masked = _masked(inputs, [flag], device)
        if not masked.any():
            notes.append(f"{flag} masks out no key here, so no mask was given.")
        elif flag == "--causal" and _masks_out_only(masked, unmasked, []):
            notes.append(f"The forward already does what {flag} asks for, so no mask was given.")
        else:
            needed.append(flag)
    return _Effect(needed, notes)


def _forms(forward: Forward, free: Sequence[str], flags: Sequence[str]) -> Iterator[MaskForm]:
    """Yield the forms to try: masks of keys alone do not depend on the query, as a causal mask does."""
    for argument in free:
        for axes in _FORMS:
            if "--causal" in flags and "query" not in axes:
                continue
            for means in _MEANS:
                dtype = torch.long if means.endswith("1") else torch.bool
                if means == "adds":
                    dtype = forward.dtype
                yield MaskForm(argument, axes, means, dtype)


def _masked(inputs: InputSpec, flags: Collection[str], device: torch.device) -> Tensor:
    """Return `batch query key`, True for masked keys. Raises `InputError` if padding does not fit."""
    masked = torch.zeros(inputs.batch, inputs.seq_len, inputs.keys, dtype=torch.bool, device=device)
    if "--causal" in flags:
        masked |= causal_mask(inputs.seq_len, inputs.keys, device)
    if "--padding" not in flags:
        return masked
    padded = padding_mask(inputs, inputs.batch, inputs.keys, device)
    if padded is None:
        return masked
    # For every query the same keys.
    by_query = rearrange(padded, "... key -> ... 1 key")
    return masked | by_query


def _masks_out_only(masked: Tensor, after: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Return whether one attention's weights became zero for masked keys, and for no other keys.

    `masked` is `batch query key`; `after` and `before` have the weights of each attention, `batch heads query key`.
    Weights that were zero before do not count.
    """
    for place, weights in enumerate(after):
        batch, _, query, key = weights.shape
        if (batch, query, key) != masked.shape:
            continue
        by_head = masked[:, None].expand_as(weights)
        attended = torch.ones_like(by_head)
        if len(before) == len(after) and before[place].shape == weights.shape:
            attended = before[place] > _MASKED
        masked_out = by_head & attended
        kept = ~by_head & attended
        if _are_zero_only_where(masked_out, weights, kept=kept):
            return True
    return False


def _are_zero_only_where(masked: Tensor, weights: Tensor, *, kept: Tensor) -> bool:
    """Return whether weights are zero where they are masked, and nearly everywhere not zero where they are kept.

    All are `batch heads query key`.
    """
    # A query all of whose keys are masked may have any weights.
    has_kept = kept.any(-1, keepdim=True)
    masked = masked & has_kept
    if not masked.any():
        return False
    if not (weights[masked] <= _MASKED).all():
        return False
    share = (weights[kept] > _MASKED).double().mean()
    return bool(share > 0.9)


def _weights(subject: Subject) -> list[Tensor]:
    """Return the weights of each attention in a run, `batch heads query key`; empty if it raises."""
    contents: list[Tensor] = []
    with suppress(Exception):  # a user's code may raise anything for a mask of a wrong form
        with subject.apart() as fresh:
            run = fresh.recorded(keep=True)
        for attention, names in run.attentions:
            weights = attention.stages.get("weights")
            if weights is None:
                continue
            scores = attention.stages.get("scores", weights)
            if len(scores.shape) != len(weights.shape):
                continue  # a mask of too many dimensions gave them to the scores
            for op in attention.weights_path:
                # A multiplied mask comes after the softmax.
                if op.output.shape == weights.shape:
                    weights = op.output
            masked = replace(attention, stages={**attention.stages, "weights": weights})
            content = content_of(run, masked, names, "weights")
            if content is not None and content.dim() == 4:
                contents.append(content.detach())
    return contents
