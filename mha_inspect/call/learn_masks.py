"""What a mask argument means, learned by running the forward with masks of a few forms and looking at the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor

from ..build.vocabulary import plain
from ..errors import InputError, SpecError
from ..layers.spec import InputSpec
from ..naming.canonical import content_of
from ..naming.subject import Run, Subject
from .forward import Forward
from .masks import causal_mask, padding_mask

_OF_QUERIES = ("query key", "batch query key", "batch 1 query key")
_OF_KEYS = ("batch key", "batch 1 key", "batch 1 1 key")
_VALUES: tuple[tuple[Literal["keeps", "masks", "adds"], torch.dtype | None], ...] = (
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
    says: Literal["keeps", "masks", "adds"]
    dtype: torch.dtype
    more: tuple[int, int] = (0, 0)
    """How many queries and keys the attention has beyond those of the inputs."""

    @property
    def words(self) -> str:
        """What was learned, as a sentence."""
        kind = f"{str(self.dtype).removeprefix('torch.')} `{self.axes}`"
        means = _MEANS[self.says].format("True" if self.dtype == torch.bool else "1")
        return f"{' and '.join(self.flags)} made {self.argument}, {kind}: {means}, as is learned from the weights."

    def mask(self, inputs: InputSpec, device: torch.device) -> Tensor:
        """Return the mask for inputs."""
        sizes = inputs.batch, inputs.seq_len + self.more[0], inputs.keys + self.more[1]
        return self.of(_masked(inputs, self.flags, sizes, device))

    def of(self, masked: Tensor) -> Tensor:
        """Return the mask that masks out what is True in `batch query key`."""
        masked = masked if "batch" in self.axes else masked[0]
        masked = masked if "query" in self.axes else masked[..., 0, :]
        shape = dict(zip(self.axes.replace(" 1", "").split(), masked.shape, strict=True))
        masked = masked.reshape([shape.get(axis, 1) for axis in self.axes.split()])
        if self.says == "adds":
            return torch.zeros(masked.shape, dtype=self.dtype, device=masked.device).masked_fill(masked, -torch.inf)
        return (masked if self.says == "masks" else ~masked).to(self.dtype)


def learn_masks(
    forward: Forward,
    inputs: InputSpec,
    flags: Sequence[str],
    free: Sequence[str],
    make: Callable[[Mapping[str, Tensor]], Subject],
) -> tuple[tuple[MaskForm, ...], tuple[str, ...]]:
    """Learn how a forward takes the masks that flags ask for, each in an argument of its own or all in one.

    Args:
        forward: that is to take them.
        inputs: for their sizes.
        flags: `--causal`, `--padding` or both.
        free: the mask arguments that nobody gave anything.
        make: makes its run with these masks by name.

    Returns the forms, and sentences on flags that need no mask. Raises `SpecError` where no form does what is asked.
    """
    if forward.device.type == "meta":
        raise SpecError(
            f"what the masks of {forward.label} mean is learned from numbers, and meta has none: {flags[0]} cannot "
            "make one there. Take --device cpu, or give the mask by name: --input FILE."
        )
    base = _weights(make({}))
    sizes = list(dict.fromkeys((w.shape[0], *w.shape[-2:]) for w in base)) or [
        (inputs.batch, inputs.seq_len, inputs.keys)
    ]
    notes: list[str] = []
    left: list[str] = []
    for flag in flags:
        if not any(_masks_any(inputs, flag, each, forward.device) for each in sizes):
            notes.append(f"What {flag} asks for bars no key here: no mask was given.")
        elif flag == "--causal" and any(
            weights.shape[-1] == weights.shape[-2] > 1 and _does(weights, causal_mask(*weights.shape[-2:]), None)
            for weights in base
        ):
            notes.append(f"The forward does by itself what {flag} asks for: no mask was given.")
        else:
            left.append(flag)

    def learned(asked: Sequence[str], taken: Mapping[str, Tensor], before: Sequence[Tensor]) -> MaskForm | None:
        """Return the first form in which an argument does what is asked, beside masks that are taken."""
        axes = _OF_QUERIES if "--causal" in asked else (*_OF_KEYS, *_OF_QUERIES)
        for argument, each in product((n for n in _likeliest(asked[0], free) if n not in taken), sizes):
            more = each[1] - inputs.seq_len, each[2] - inputs.keys
            with suppress(InputError):  # padding of each row of another batch
                masked = _masked(inputs, asked, each, forward.device)
                for pattern, (says, dtype) in product(axes, _VALUES):
                    form = MaskForm(tuple(asked), argument, pattern, says, dtype or forward.dtype, more)
                    seen = _weights(make({**taken, argument: form.of(masked)}))
                    if any(_does(weights, masked, old) for weights, old in _paired(seen, before)):
                        return form
        return None

    forms: list[MaskForm] = []
    taken: dict[str, Tensor] = {}
    for flag in left:
        form = learned([flag], taken, base)
        if form is not None:
            forms.append(form)
            taken[form.argument] = form.mask(inputs, forward.device)
            base = _weights(make(taken))
    if len(forms) < len(left):
        together = learned(left, {}, _weights(make({}))) if len(left) > 1 else None
        if together is None:
            raise SpecError(_unlearned(forward, left, forms, free))
        forms = [together]
    return tuple(forms), tuple(notes)


def _likeliest(flag: str, free: Sequence[str]) -> list[str]:
    """Return the arguments that may take what a flag asks for, those first whose names are for this."""
    good, bad = _HINTS[flag]

    def rank(name: str) -> int:
        word = plain(name)
        return any(part in word for part in bad) - any(part in word for part in good)

    return sorted(free, key=rank)


def _unlearned(forward: Forward, flags: Sequence[str], forms: Sequence[MaskForm], free: Sequence[str]) -> str:
    lacking = next(flag for flag in flags if not any(flag in form.flags for form in forms))
    names = ", ".join(_likeliest(lacking, free)) or "its mask"
    file = "--attn-mask FILE, or " if lacking == "--causal" else ""
    return (
        f"{forward.label} does not show what {names} means, so {lacking} cannot make it: no mask of the usual "
        f"forms changed what its attention looks at. Give it as it takes it: {file}--input FILE with the mask by name."
    )


def _masked(inputs: InputSpec, flags: Sequence[str], sizes: tuple[int, int, int], device: torch.device) -> Tensor:
    """Return `batch query key`, True where a query may not look. Raises `InputError` where padding has other rows."""
    batch, query, key = sizes
    masked = torch.zeros(sizes, dtype=torch.bool, device=device)
    if "--causal" in flags:
        masked |= causal_mask(query, key, device)
    padded = padding_mask(inputs, batch, key, device) if "--padding" in flags else None
    return masked if padded is None else masked | rearrange(padded, "... key -> ... 1 key")


def _masks_any(inputs: InputSpec, flag: str, sizes: tuple[int, int, int], device: torch.device) -> bool:
    """Return whether what a flag asks for masks out any key of an attention of these sizes."""
    with suppress(InputError):
        return bool(_masked(inputs, (flag,), sizes, device).any())
    return True


def _paired(seen: Sequence[Tensor], base: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the weights of each attention with those that it had before; None where it had others."""
    for place, weights in enumerate(seen):
        before = base[place] if len(base) == len(seen) else None
        yield weights, before if before is not None and before.shape == weights.shape else None


def _does(weights: Tensor, masked: Tensor, before: Tensor | None) -> bool:
    """Return whether weights are zero where they are to be masked, and nowhere else where they were not before.

    False where they were so before: another attention is looked for.
    """
    if masked.dim() == 3:
        if weights.shape[0] != masked.shape[0]:
            return False
        masked = masked[:, None]
    if weights.shape[-2:] != masked.shape[-2:]:
        return False
    masked = masked.expand_as(weights)
    seen = torch.ones_like(masked) if before is None else before > _MASKED
    looked_at = ~masked & seen
    hidden = masked & looked_at.any(-1, keepdim=True)
    if not bool((hidden & seen).any()):
        return False
    return bool((weights[hidden] <= _MASKED).all()) and bool((weights[looked_at] > _MASKED).double().mean() > 0.9)


def _weights(subject: Subject) -> list[Tensor]:
    """Return the weights of each attention in a run, `batch heads query key`; none where it raises."""
    with suppress(Exception):  # whatever somebody's code may raise for a mask that it does not take
        with subject.apart() as fresh:
            run = fresh.recorded(keep=True)
        contents = [_content(run, *one) for one in run.attentions if "weights" in one[0].stages]
        return [content.detach() for content in contents if content is not None and content.dim() == 4]
    return []


def _content(run: Run, attention: Any, names: Any) -> Tensor | None:
    weights = attention.stages["weights"]
    for op in attention.weights_path:  # a mask that is multiplied comes after the softmax
        weights = op.output if op.output.shape == weights.shape else weights
    attention = replace(attention, stages={**attention.stages, "weights": weights})
    return content_of(run, attention, names, "weights")
