"""What a mask argument means, learned by running the forward with masks of a few forms and looking at the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

import torch
from einops import rearrange
from torch import Tensor

from ..errors import SpecError
from ..layers.spec import InputSpec
from ..naming.canonical import content_of
from ..running.subject import Subject
from .forward import Forward
from .masks import causal_mask, padding_mask

_OF_QUERIES = ("query key", "batch query key", "batch 1 query key")
_OF_KEYS = ("batch key", "batch 1 key", "batch 1 1 key")
_MEANS = {
    "keeps": (torch.bool, "True keeps a key"),
    "masks": (torch.bool, "True bars a key"),
    "keeps as a number": (torch.int64, "1 keeps a key"),
    "adds": (None, "it is added to the scores"),
}
"""What a mask may say, the dtype that it has then (None: that of the module), and the words for it."""
_MASKED = 1e-6
"""A weight up to which a key is not looked at."""


@dataclass(frozen=True)
class MaskForm:
    """How an argument of a forward takes a mask."""

    argument: str
    axes: str
    means: str
    dtype: torch.dtype

    def words(self, flags: Iterable[str]) -> str:
        """Say what was learned of the mask that these flags made."""
        kind = f"{str(self.dtype).removeprefix('torch.')} `{self.axes}`"
        means = _MEANS[self.means][1]
        return f"{' and '.join(flags)} made {self.argument}, {kind}: {means}, as is learned from the weights."

    def mask(self, masked: Tensor) -> Tensor:
        """Return a mask as the argument takes it. `masked` is `batch query key`, True where a query may not look."""
        masked = masked if "batch" in self.axes else masked[0]
        masked = masked if "query" in self.axes else masked[..., 0, :]
        masked = rearrange(masked, f"{self.axes.replace(' 1', '')} -> {self.axes}")
        if self.means == "adds":
            return torch.zeros(masked.shape, dtype=self.dtype, device=masked.device).masked_fill(masked, -torch.inf)
        return (masked if self.means == "masks" else ~masked).to(self.dtype)


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
    plain, notes = _weights(make({})), []
    asked: dict[tuple[str, ...], Tensor] = {}
    for flag in flags:
        masked = _masked(inputs, (flag,), forward.device)
        if not masked.any():
            notes.append(f"What {flag} asks for bars no key here: no mask was given.")
        elif flag == "--causal" and _does(plain, [], masked):
            notes.append(f"The forward does by itself what {flag} asks for: no mask was given.")
        else:
            asked[(flag,)] = masked

    def learned(asked: Mapping[tuple[str, ...], Tensor]) -> dict[tuple[str, ...], MaskForm]:
        """Return a form for each group of flags, in an argument of its own, up to the first that has none."""
        forms: dict[tuple[str, ...], MaskForm] = {}
        taken: dict[str, Tensor] = {}
        before = plain
        for group, masked in asked.items():
            axes = _OF_QUERIES if "--causal" in group else (*_OF_KEYS, *_OF_QUERIES)
            left = [name for name in free if name not in taken]
            for argument, pattern, (means, (dtype, _)) in product(left, axes, _MEANS.items()):
                form = MaskForm(argument, pattern, means, dtype or forward.dtype)
                after = _weights(make({**taken, argument: form.mask(masked)}))
                if _does(after, before, masked):
                    forms[group], taken[argument], before = form, form.mask(masked), after
                    break
            else:
                break
        return forms

    forms = learned(asked)
    if len(forms) < len(asked):
        (lacking,) = list(asked)[len(forms)]
        both = tuple(flag for (flag,) in asked)
        asked = {both: _masked(inputs, both, forward.device)}
        forms = learned(asked) if len(both) > 1 else {}
        if not forms:
            file = "--attn-mask FILE, or " if lacking == "--causal" else ""
            raise SpecError(
                f"{forward.label} does not show what {', '.join(free) or 'its mask'} means, so {lacking} cannot make "
                "it: no mask of the usual forms changed what its attention looks at. Give it as it takes it: "
                f"{file}--input FILE with the mask by name."
            )
    masks = {form.argument: form.mask(asked[group]) for group, form in forms.items()}
    return masks, [*notes, *(form.words(group) for group, form in forms.items())]


def _masked(inputs: InputSpec, flags: Iterable[str], device: torch.device) -> Tensor:
    """Return `batch query key`, True where a query may not look. Raises `InputError` where padding does not fit."""
    masked = torch.zeros(inputs.batch, inputs.seq_len, inputs.keys, dtype=torch.bool, device=device)
    if "--causal" in flags:
        masked |= causal_mask(inputs.seq_len, inputs.keys, device)
    padded = padding_mask(inputs, inputs.batch, inputs.keys, device) if "--padding" in flags else None
    return masked if padded is None else masked | rearrange(padded, "... key -> ... 1 key")


def _does(after: Sequence[Tensor], before: Sequence[Tensor], masked: Tensor) -> bool:
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
        hidden = hidden & seen & looked_at.any(-1, keepdim=True)
        is_hidden = bool(hidden.any()) and bool((weights[hidden] <= _MASKED).all())
        if is_hidden and bool((weights[looked_at] > _MASKED).double().mean() > 0.9):
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
