"""Attention masks: made from --causal and --padding, read from files, in the form that a forward takes.

The form is known for torch's modules and the catalog's layers. For other modules the usual forms are tried, and the
weights show which one masks out the keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from ..making.vocabulary import MASKS_OF_KEYS, MASKS_OF_SCORES, flag_of, kind_of, plain
from ..naming.canonical import content_of
from ..text import printable
from .call import Forward
from .probe import probe

if TYPE_CHECKING:
    from ..layers.catalog import MaskStyle

# -- what is masked ----------------------------------------------------------------------------------------------------


def causal_mask(query: int, key: int, device: torch.device | str = "cpu") -> Tensor:
    """Return `query key`, True where a key comes after the query: both sequences start together, as in torch."""
    if torch.device(device).type == "meta":
        return torch.empty(query, key, dtype=torch.bool, device=device)
    pairs = torch.ones(query, key, dtype=torch.bool, device="cpu")
    later = pairs.triu_(diagonal=1)
    return later.to(device)


def padding_mask(inputs: InputSpec, batch: int, keys: int, device: torch.device) -> Tensor | None:
    """Return `batch key`, True on the last keys of each item; None without padding.

    Raises `InputError` if the padding does not fit the tensors of a file.
    """
    if not inputs.padding:
        return None
    if misfit := inputs.misfit_of_padding(batch, keys):
        raise InputError(misfit)
    if device.type == "meta":
        return torch.empty(batch, keys, dtype=torch.bool, device=device)
    counts = torch.tensor(inputs.padding, device="cpu").expand(batch)
    places = torch.arange(keys, device="cpu")
    return (places >= keys - counts[:, None]).to(device)


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


# -- in the form that is known -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Masks:
    """The masks of a call by name, and sentences on how they were found."""

    by_name: Mapping[str, Any]
    notes: Sequence[str] = ()
    missed: Sequence[str] = ()
    """Required masks of which no usual form runs: they are None."""


def masks_of(forward: Forward, target: Target, inputs: InputSpec, values: Mapping[str, Any], seed: int) -> Masks:
    """Return the masks that the user asked for, in the form that the forward takes. `values` are other arguments.

    Raises `SpecError` if the forward takes no such mask, `InputError` if a file does not fit.
    """
    is_of_torch = type(forward.module).__module__.startswith("torch.nn.")
    if target.layer is None and not is_of_torch:
        return _unknown_masks(forward, inputs, values, seed)
    masks = _known_masks(forward, target, inputs, values)
    return Masks(masks)


def _asked_flags(inputs: InputSpec) -> list[str]:
    """Return the flags of the masks that the user asked for."""
    asked = {
        "--attn-mask": inputs.attn_mask is not None,
        "--causal": inputs.causal,
        "--padding": bool(inputs.padding),
    }
    return [flag for flag, is_asked in asked.items() if is_asked]


def _no_mask(forward: Forward, flag: str) -> NoMaskError:
    arguments = "it names no arguments"
    if forward.parameters:
        arguments = f"its arguments are {', '.join(forward.parameters)}"
    return NoMaskError(f"{forward.label} takes no mask: {arguments}. Drop {flag}.")


def _named(forward: Forward, words: Sequence[str]) -> list[str]:
    """Return the arguments of a forward with these names, read without underscores."""
    names = {plain(name): name for name in forward.parameters}
    return [names[word] for word in words if word in names]


def _known_masks(forward: Forward, target: Target, inputs: InputSpec, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the masks of a module of torch or a layer of the catalog, without those that mask nothing."""
    of_scores, of_keys = _named(forward, MASKS_OF_SCORES), _named(forward, MASKS_OF_KEYS)
    style = None if target.layer is None else target.layer.masks
    flags = _asked_flags(inputs)
    for flag in flags:
        takes_padding = bool(of_keys or style)
        is_taken = takes_padding if flag == "--padding" else bool(of_scores)
        if not is_taken:
            raise _no_mask(forward, flag)
    tensors = _tensors_among(forward, values)
    if not flags or not tensors:
        return {}
    sizes = _Sizes.of(forward, tensors)
    scores = _scores_mask(forward, target, inputs, sizes)
    keys = padding_mask(inputs, sizes.batch, sizes.padded, forward.device)
    if keys is not None and sizes.is_unbatched:
        keys = keys[0]
    if style:
        batch = None if sizes.is_unbatched else sizes.batch
        scores = merged_mask(scores, keys, style, forward.dtype, batch, target.made_from)
        keys = None
    elif keys is not None and scores is not None and scores.is_floating_point():
        # Torch deprecates masks of two kinds.
        keys = merged_mask(keys, None, "additive", scores.dtype, None, target.made_from)
    masks: dict[str, Tensor] = {}
    if scores is not None:
        masks[of_scores[0]] = scores
    if keys is not None:
        masks.update(dict.fromkeys(of_keys, keys))
    return masks


def _tensors_among(forward: Forward, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the arguments that are tensors, in the order of the signature."""
    tensors: dict[str, Tensor] = {}
    for name in forward.parameters:
        value = values.get(name)
        if isinstance(value, Tensor):
            tensors[name] = value
    return tensors


@dataclass(frozen=True)
class _Sizes:
    """The sizes of the masks of a module. In a decoder of torch the mask of scores is for self-attention."""

    batch: int
    is_unbatched: bool
    query: int
    key: int
    padded: int
    """The length of the sequence that may have padding: in a decoder of torch the output of the encoder."""

    @classmethod
    def of(cls, forward: Forward, tensors: Mapping[str, Tensor]) -> _Sizes:
        """Return the sizes for these arguments."""
        query = tensors.get("tgt", next(iter(tensors.values())))
        key = query
        for name, tensor in tensors.items():
            if forward.kind(name) in ("key", "other") and "tgt" not in tensors:
                key = tensor
                break
        padded = tensors.get("src", tensors.get("memory", key))
        is_unbatched = query.dim() == 2
        length = 1 if forward.batch_first and not is_unbatched else 0
        return cls(
            batch=1 if is_unbatched else query.shape[1 - length],
            is_unbatched=is_unbatched,
            query=query.shape[length],
            key=key.shape[length],
            padded=padded.shape[length],
        )


def _scores_mask(forward: Forward, target: Target, inputs: InputSpec, sizes: _Sizes) -> Tensor | None:
    """Return the mask of scores, `query key` or `(batch heads) query key`; None if it masks nothing."""
    scores = None
    if inputs.attn_mask is not None:
        num_heads = _num_heads(forward, target)
        read = read_attn_mask(inputs.attn_mask, sizes.batch, num_heads, sizes.query, sizes.key)
        scores = read.to(forward.device)
        if scores.dtype != torch.bool:
            scores = scores.to(forward.dtype)
    # A single token attends to itself, whatever is causal.
    if inputs.causal and (sizes.query, sizes.key) != (1, 1):
        causal = causal_mask(sizes.query, sizes.key, forward.device)
        scores = _both(scores, causal)
    return scores


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

_FORMS = ("batch key", "batch 1 1 key", "query key", "batch query key", "batch 1 query key", "batch heads query key")
"""Forms of masks of keys first: padding does not depend on the query, as a causal mask does."""
_MEANS = {
    "keeps": "True keeps a key",
    "masks": "True masks out a key",
    "keeps as 1": "1 keeps a key and 0 masks it out",
    "adds": "0 keeps a key and -inf masks it out",
}
"""Meanings of a mask with their words: two of booleans, one of whole numbers, and one of numbers that are added."""
_MASKED = 1e-6
"""Up to this weight a key counts as masked out."""


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


def _unknown_masks(forward: Forward, inputs: InputSpec, values: Mapping[str, Any], seed: int) -> Masks:
    """Return the masks of a module of the user. Where no name says the form of a mask, the usual forms are tried.

    A required mask that the user did not ask for is made as with --causal, if the forward uses it.
    """
    flags = _asked_flags(inputs)
    given: dict[str, Any] = {}
    of_scores = _named(forward, MASKS_OF_SCORES)
    if inputs.attn_mask is not None:
        flags.remove("--attn-mask")
        if not of_scores:
            raise _no_mask(forward, "--attn-mask")
        mask = read_tensor(inputs.attn_mask).to(forward.device)
        given[of_scores[0]] = mask.to(forward.dtype) if mask.is_floating_point() else mask
    switches = [name for name in forward.parameters if flag_of(name) == "causal"]
    if inputs.causal and switches:
        flags.remove("--causal")
        given[switches[0]] = True
    known = {**values, **given}
    free = [name for name in mask_arguments(forward.parameters) if known.get(name) is None]
    trial = _Trial(forward, inputs, known, seed)
    if flags:
        tried = trial.masks(flags, free)
        return Masks({**given, **tried.by_name}, tried.notes)
    missed = _missed(forward, known, free)
    if not missed:
        return Masks(given)
    if forward.device.type == "meta":
        return Masks(given, missed=missed)
    with suppress(SpecError):
        tried = replace(trial, inputs=replace(inputs, causal=True)).masks(["--causal"], missed)
        notes = [f"{name} is required, so a mask was made as with --causal." for name in tried.by_name]
        return Masks({**given, **tried.by_name}, [*notes, *tried.notes])
    form = replace(trial, inputs=replace(inputs, padding=(1,))).form(["--padding"], missed, [])
    if form is not None:
        note = f"{form.argument} is required, so one was made that masks out no key: {form.in_words}."
        return Masks({**given, form.argument: trial.open_mask(form)}, [note])
    form = trial.form_that_runs(missed)
    if form is None:
        return Masks(given, missed=missed)
    kind = str(form.dtype).removeprefix("torch.")
    note = (
        f"{form.argument} is required. The forward runs with {kind} `{form.axes}`, so one that keeps all keys was made."
    )
    return Masks({**given, form.argument: trial.open_mask(form)}, [note])


def _missed(forward: Forward, values: Mapping[str, Any], free: Sequence[str]) -> list[str]:
    """Return the required masks of a forward that raises where they are None."""
    required = [name for name in free if forward.is_needed(name)]
    if not required:
        return []
    error = probe(forward.call(values).of(forward.module), {}, whole=True).error
    return [] if error is None else required


@dataclass(frozen=True)
class MaskForm:
    """A form in which an argument of a forward may take a mask."""

    argument: str
    axes: str
    means: str
    dtype: torch.dtype

    @property
    def in_words(self) -> str:
        """The type, the axes and the meaning, as the weights showed it."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} `{self.axes}`: {_MEANS[self.means]}, as the weights show"

    def words(self, flags: Iterable[str]) -> str:
        """Return a sentence on the mask that these flags made."""
        asked = " and ".join(flags)
        return f"{asked} made {self.argument}, {self.in_words}."

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
        if self.means == "masks":
            return masked
        if self.means.startswith("keeps"):
            return (~masked).to(self.dtype)
        zeros = torch.zeros(masked.shape, dtype=self.dtype, device=masked.device)
        return zeros.masked_fill(masked, -torch.inf)


@dataclass(frozen=True)
class _Trial:
    """Runs of a forward with masks in usual forms: the weights show which form masks out the keys."""

    forward: Forward
    inputs: InputSpec
    values: Mapping[str, Any]
    """The other arguments by name."""
    seed: int

    def masks(self, flags: Sequence[str], free: Sequence[str]) -> Masks:
        """Make one mask of all flags, in the first form with which a run masks out these keys and no others.

        `free` has the mask arguments that the user did not give. No mask is made where none is needed.

        Raises `SpecError` if no form has the requested effect.
        """
        if self.forward.device.type == "meta":
            raise SpecError(
                f"{flags[0]} cannot make a mask for {self.forward.label} on meta, because only numbers show its form. "
                "Use --device cpu, or give the mask by name: --input FILE."
            )
        unmasked = self._weights({})
        needed: list[str] = []
        notes: list[str] = []
        for flag in flags:
            masked = self._masked([flag])
            if not masked.any():
                notes.append(f"{flag} masks out no key here, so no mask was given.")
            elif flag == "--causal" and _masks_out_only(masked, unmasked, []):
                notes.append(f"The forward already does what {flag} asks for, so no mask was given.")
            else:
                needed.append(flag)
        if not needed:
            return Masks({}, notes)
        if not free:
            raise _no_mask(self.forward, needed[0])
        form = self.form(needed, free, unmasked)
        if form is not None:
            mask = form.mask(self._masked(needed), _heads_of(unmasked))
            return Masks({form.argument: mask}, [*notes, form.words(needed)])
        asked = " and ".join(needed)
        arguments = ", ".join(free)
        raise SpecError(
            f"{asked} cannot be applied to {self.forward.label}: no usual form of {arguments} "
            "masks out these keys alone. Let a function return the module with its inputs and masks: (module, args)."
        )

    def form(self, flags: Sequence[str], free: Sequence[str], unmasked: Sequence[Tensor]) -> MaskForm | None:
        """Return the first form with which a run masks out the keys of these flags and no others; None without one.

        `unmasked` has the weights of each attention in a run without a mask, `batch heads query key`.
        """
        masked = self._masked(flags)
        for form in self._forms(free, flags):
            weights = self._weights({form.argument: form.mask(masked, _heads_of(unmasked))})
            if not weights:
                continue
            before = unmasked or self._weights({form.argument: self.open_mask(form)})
            if _masks_out_only(masked, weights, before):
                return form
        return None

    def open_mask(self, form: MaskForm) -> Tensor:
        """Return a mask in a form that masks out no key."""
        return form.mask(torch.zeros_like(self._masked([])), 1)

    def form_that_runs(self, free: Sequence[str]) -> MaskForm | None:
        """Return the first form of a mask of no key with which queries see keys; None without one."""
        for form in self._forms(free, []):
            weights = self._weights({form.argument: self.open_mask(form)})
            if weights and all(bool((of_attention > _MASKED).any(-1).all()) for of_attention in weights):
                return form
        return None

    def _forms(self, free: Sequence[str], flags: Sequence[str]) -> Iterator[MaskForm]:
        """Yield the forms to try: for a causal mask only those with queries."""
        for argument, axes, means in product(free, _FORMS, _MEANS):
            if "--causal" in flags and "query" not in axes:
                continue
            dtype = torch.bool
            if means == "keeps as 1":
                dtype = torch.long
            elif means == "adds":
                dtype = self.forward.dtype
            yield MaskForm(argument, axes, means, dtype)

    def _masked(self, flags: Sequence[str]) -> Tensor:
        """Return `batch query key`, True for masked keys. Raises `InputError` if padding does not fit."""
        inputs, device = self.inputs, self.forward.device
        masked = torch.zeros(inputs.batch, inputs.seq_len, inputs.keys, dtype=torch.bool, device=device)
        if "--causal" in flags:
            masked |= causal_mask(inputs.seq_len, inputs.keys, device)
        padded = padding_mask(inputs, inputs.batch, inputs.keys, device)
        if padded is None or "--padding" not in flags:
            return masked
        # For every query the same keys.
        return masked | padded[:, None]

    def _weights(self, masks: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the weights of each attention in a run with masks, `batch heads query key`; empty if it raises."""
        call = self.forward.call({**self.values, **masks})
        subject = replace(call.of(self.forward.module), seed=self.seed, grad=False)
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


def _heads_of(weights: Sequence[Tensor]) -> int:
    """Return the most heads of several attentions, each `batch heads query key`; 1 without any."""
    return max((of_attention.shape[1] for of_attention in weights), default=1)


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
