"""What a mask argument means, learned by running the forward with masks of a few forms and looking at the weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor

from ..build.vocabulary import plain
from ..errors import SpecError
from ..layers.spec import InputSpec
from ..naming.canonical import content_of
from ..running.subject import Subject
from .forward import Forward
from .masks import causal_mask, padding_mask

_Says = Literal["keeps", "masks", "adds"]
_OF_QUERIES = ("query key", "batch query key", "batch 1 query key")
_OF_KEYS = ("batch key", "batch 1 key", "batch 1 1 key")
_VALUES: tuple[tuple[_Says, torch.dtype | None], ...] = (
    ("keeps", torch.bool),
    ("masks", torch.bool),
    ("keeps", torch.int64),
    ("adds", None),
)
"""What True, 1 or a number says; None stands for the dtype of the module."""
_MEANS = {"keeps": "{} keeps a key", "masks": "{} bars a key", "adds": "it is added to the scores"}
_MASKED = 1e-6
"""A weight up to which a key is not looked at."""
_HINTS = {
    "--causal": (("tgt", "trg", "causal", "look", "future", "dec", "self"), ("pad", "key", "src", "enc", "memory")),
    "--padding": (("pad", "key", "src", "enc", "attention"), ("tgt", "trg", "causal", "look", "future", "dec")),
}
"""Parts of names that are for a mask of this kind, and those that are for another."""


@dataclass(frozen=True)
class MaskForm:
    """How an argument of a forward takes the mask that some flags ask for."""

    flags: tuple[str, ...]
    argument: str
    axes: str
    says: _Says
    dtype: torch.dtype
    more: tuple[int, int]
    """How many queries and keys the attention has beyond those of the inputs."""

    @property
    def words(self) -> str:
        """What was learned, as a sentence."""
        kind = f"{str(self.dtype).removeprefix('torch.')} `{self.axes}`"
        means = _MEANS[self.says].format("True" if self.dtype == torch.bool else "1")
        return f"{' and '.join(self.flags)} made {self.argument}, {kind}: {means}, as is learned from the weights."

    def masked(self, inputs: InputSpec, device: torch.device) -> Tensor:
        """Return `batch query key`, True where a query may not look. Raises `InputError` where padding does not fit."""
        queries, keys = inputs.seq_len + self.more[0], inputs.keys + self.more[1]
        masked = torch.zeros(inputs.batch, queries, keys, dtype=torch.bool, device=device)
        if "--causal" in self.flags:
            masked |= causal_mask(queries, keys, device)
        padded = padding_mask(inputs, inputs.batch, keys, device) if "--padding" in self.flags else None
        return masked if padded is None else masked | rearrange(padded, "... key -> ... 1 key")

    def mask(self, inputs: InputSpec, device: torch.device) -> Tensor:
        """Return the mask for inputs as the argument takes it."""
        masked = self.masked(inputs, device)
        masked = masked if "batch" in self.axes else masked[0]
        masked = masked if "query" in self.axes else masked[..., 0, :]
        left = self.axes.replace(" 1", "")
        masked = rearrange(masked, f"{left} -> {self.axes}")
        if self.says == "adds":
            return torch.zeros(masked.shape, dtype=self.dtype, device=device).masked_fill(masked, -torch.inf)
        return (masked if self.says == "masks" else ~masked).to(self.dtype)


def learn_masks(
    forward: Forward,
    inputs: InputSpec,
    flags: Sequence[str],
    free: Sequence[str],
    make: Callable[[Mapping[str, Tensor]], Subject],
) -> tuple[dict[str, Tensor], list[str]]:
    """Learn how a forward takes the masks that flags ask for, each in an argument of its own or all in one.

    Args:
        forward: that is to take them.
        inputs: for their sizes.
        flags: `--causal`, `--padding` or both.
        free: the mask arguments that nobody gave anything.
        make: makes its run with these masks by name.

    Returns the masks by name, and what was learned as sentences. Raises `SpecError` where no form does what is asked.
    """
    if forward.device.type == "meta":
        raise SpecError(
            f"what the masks of {forward.label} mean is learned from numbers, and meta has none: {flags[0]} cannot "
            "make one there. Take --device cpu, or give the mask by name: --input FILE."
        )
    base = _weights(make({}))
    sizes = {(w.shape[-2] - inputs.seq_len, w.shape[-1] - inputs.keys): None for w in base} or {(0, 0): None}
    notes, left = [], []
    for flag in flags:
        every = (MaskForm((flag,), "", "", "masks", torch.bool, more) for more in sizes)
        if not any(form.masked(inputs, forward.device).any() for form in every):
            notes.append(f"What {flag} asks for bars no key here: no mask was given.")
        elif flag == "--causal" and any(_is_causal(weights) for weights in base):
            notes.append(f"The forward does by itself what {flag} asks for: no mask was given.")
        else:
            left.append(flag)

    def learned(groups: Sequence[Sequence[str]]) -> list[MaskForm]:
        """Return a form for each group of flags, in an argument of its own, up to the first that has none."""
        forms: list[MaskForm] = []
        taken: dict[str, Tensor] = {}
        before = base
        for group in groups:
            for form in _candidates(forward, group, [name for name in free if name not in taken], sizes):
                mask = form.mask(inputs, forward.device)
                after = _weights(make({**taken, form.argument: mask}))
                if _any_does(after, before, form.masked(inputs, forward.device)):
                    forms.append(form)
                    taken[form.argument], before = mask, after
                    break
            else:
                break
        return forms

    forms = learned([[flag] for flag in left])
    if len(forms) < len(left):
        lacking = left[len(forms)]
        forms = learned([left]) if len(left) > 1 else []
        if not forms:
            raise SpecError(_unlearned(forward, lacking, free))
    masks = {form.argument: form.mask(inputs, forward.device) for form in forms}
    return masks, [*notes, *(form.words for form in forms)]


def _candidates(
    forward: Forward, flags: Sequence[str], free: Sequence[str], sizes: Collection[tuple[int, int]]
) -> Iterator[MaskForm]:
    """Yield what an argument may take a mask as, the likeliest first."""
    axes = _OF_QUERIES if "--causal" in flags else (*_OF_KEYS, *_OF_QUERIES)
    for argument, more, pattern, (says, dtype) in product(_likeliest(flags[0], free), sizes, axes, _VALUES):
        yield MaskForm(tuple(flags), argument, pattern, says, dtype or forward.dtype, more)


def _likeliest(flag: str, free: Sequence[str]) -> list[str]:
    """Return the arguments that may take what a flag asks for, those first whose names are for this."""
    good, bad = _HINTS[flag]

    def rank(name: str) -> int:
        word = plain(name)
        return sum(part in word for part in bad) - sum(part in word for part in good)

    return sorted(free, key=rank)


def _unlearned(forward: Forward, flag: str, free: Sequence[str]) -> str:
    names = ", ".join(_likeliest(flag, free)) or "its mask"
    file = "--attn-mask FILE, or " if flag == "--causal" else ""
    return (
        f"{forward.label} does not show what {names} means, so {flag} cannot make it: no mask of the usual "
        f"forms changed what its attention looks at. Give it as it takes it: {file}--input FILE with the mask by name."
    )


def _is_causal(weights: Tensor) -> bool:
    queries, keys = weights.shape[-2:]
    return queries == keys > 1 and _any_does([weights], [], causal_mask(queries, keys).expand(len(weights), -1, -1))


def _any_does(after: Sequence[Tensor], before: Sequence[Tensor], masked: Tensor) -> bool:
    """Return whether the weights of an attention are zero where they are masked, and nowhere else but where they were.

    One that was so before is not meant.
    """
    for place, weights in enumerate(after):
        if (weights.shape[0], *weights.shape[-2:]) != masked.shape:
            continue
        hidden = masked[:, None].expand_as(weights)
        seen = torch.ones_like(hidden)
        if len(before) == len(after) and before[place].shape == weights.shape:
            seen = before[place] > _MASKED
        looked_at = ~hidden & seen
        hidden = hidden & looked_at.any(-1, keepdim=True)
        if not bool((hidden & seen).any()):
            continue
        if bool((weights[hidden] <= _MASKED).all()) and bool((weights[looked_at] > _MASKED).double().mean() > 0.9):
            return True
    return False


def _weights(subject: Subject) -> list[Tensor]:
    """Return the weights of each attention in a run, `batch heads query key`; none where it raises."""
    contents = []
    with suppress(Exception):  # whatever somebody's code may raise for a mask that it does not take
        with subject.apart() as fresh:
            run = fresh.recorded(keep=True)
        for attention, names in run.attentions:
            if (weights := attention.stages.get("weights")) is None:
                continue
            for op in attention.weights_path:  # a mask that is multiplied comes after the softmax
                weights = op.output if op.output.shape == weights.shape else weights
            masked = replace(attention, stages={**attention.stages, "weights": weights})
            contents.append(content_of(run, masked, names, "weights"))
    return [content.detach() for content in contents if content is not None and content.dim() == 4]
