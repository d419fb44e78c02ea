"""What a mask argument means, learned by running the forward with masks of every form and looking at the weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
from einops import rearrange, repeat
from torch import Tensor

from ..build.vocabulary import plain
from ..errors import MhaInspectError, SpecError
from ..naming.canonical import content_of
from ..naming.subject import Run, Subject
from .masks import Masks, MaskSizes, padding_mask

Says = Literal["bars", "keeps", "adds", "counts"]

_AXES = (
    "query key",
    "batch query key",
    "batch 1 query key",
    "batch heads query key",
    "(batch heads) query key",
    "key query",
    "batch key query",
    "batch key",
    "batch 1 key",
    "batch 1 1 key",
    "key batch",
)
_FOR_KEYS = (*(axes for axes in _AXES if "query" not in axes), *(axes for axes in _AXES if "query" in axes))
_VALUES: tuple[tuple[Says, torch.dtype | None], ...] = (
    ("keeps", torch.bool),
    ("bars", torch.bool),
    ("keeps", torch.int64),
    ("bars", torch.int64),
    ("keeps", None),
    ("bars", None),
    ("adds", None),  # after those: what is 1 - mask, or mask times a large number, bars what is -inf as well
    ("keeps", torch.uint8),
    ("bars", torch.uint8),
)
"""What True, one or a number says; None stands for the dtype of the module."""
_COUNTS: tuple[tuple[str, tuple[Says, torch.dtype | None]], ...] = (("batch", ("counts", torch.int64)),)
"""What the lengths of sequences say."""
_BARRED = 1e-6
"""A weight up to which a key is not looked at."""
_HINTS = {
    "--causal": (("tgt", "trg", "causal", "look", "future", "dec", "self"), ("pad", "key", "src", "enc", "memory")),
    "--padding": (("pad", "key", "src", "enc", "attention"), ("tgt", "trg", "causal", "look", "future", "dec")),
}
"""Parts of names that are for a mask of this kind, and those that are for another."""


@dataclass(frozen=True)
class Learned:
    """A mask in the form that an argument of a forward takes it in."""

    flags: tuple[str, ...]
    argument: str = ""
    """Empty where none is needed: the forward does it by itself, or it would bar nothing."""
    axes: str = ""
    says: Says = "bars"
    dtype: torch.dtype = torch.bool
    sizes: MaskSizes | None = None
    seq_len: int = 0
    """Length of the inputs that these sizes are for."""
    mask: Tensor | None = None
    bars: bool = True
    """Whether it bars any key."""

    @property
    def words(self) -> str:
        """What was learned, as a sentence."""
        if not self.bars:
            return f"What {self.flags[0]} asks for bars no key here: no mask was given."
        if not self.argument:
            return f"The forward does by itself what {self.flags[0]} asks for: no mask was given."
        one = "True" if self.dtype == torch.bool else "1"
        means = {
            "keeps": f"{one} keeps a key",
            "bars": f"{one} bars a key",
            "adds": "it is added to the scores",
            "counts": "it is how many keys of a row are no padding",
        }
        kind = f"{str(self.dtype).removeprefix('torch.')} `{self.axes}`"
        made = f"{' and '.join(self.flags)} made {self.argument}, {kind}:"
        if not self.flags:
            made = f"The forward needs {self.argument}: it got {kind} that bars nothing;"
        return f"{made} {means[self.says]}, as is learned from the weights."

    def of(self, barred: Tensor) -> Tensor:
        """Return the mask that bars what is True in `batch query key`."""
        if self.says == "counts":
            return (~barred[:, 0]).sum(-1).to(self.dtype)
        held = barred if "batch" in self.axes else barred[:1]
        held = held if "query" in self.axes else held[:, :1]
        left = f"{'batch' if 'batch' in self.axes else '1'} {'query' if 'query' in self.axes else '1'} key"
        sizes = {"heads": self.sizes.heads} if self.sizes and "heads" in self.axes else {}
        laid_out: Tensor = repeat(held, f"{left} -> {self.axes}", **sizes)
        if self.says == "adds":
            return torch.zeros(laid_out.shape, dtype=self.dtype, device=barred.device).masked_fill(laid_out, -torch.inf)
        return (laid_out if self.says == "bars" else ~laid_out).to(self.dtype)

    def at(self, masks: Masks) -> Learned:
        """Return it for inputs of other sizes."""
        if self.mask is None or self.sizes is None:
            return self
        more = masks.inputs.seq_len - self.seq_len
        _, heads, query, key = self.sizes
        sizes = MaskSizes(masks.inputs.batch, heads, query + more, key + more)
        return replace(self, mask=self.of(_barred(masks, self.flags, sizes)))


@dataclass(frozen=True)
class Taker:
    """A forward that is to take masks."""

    make: Callable[[Mapping[str, Tensor]], Subject]
    """Makes its run with these masks by name."""
    free: Collection[str]
    """The mask arguments that nobody gave anything."""
    lengths: Collection[str]
    """Those among them that take the lengths of sequences."""
    masks: Masks

    def arguments(self, flag: str) -> list[str]:
        """Return the arguments that may take what a flag asks for, those first whose names are for this."""
        good, bad = _HINTS[flag]

        def rank(name: str) -> int:
            word = plain(name)
            return any(part in word for part in bad) - any(part in word for part in good)

        return sorted((n for n in self.free if flag == "--padding" or n not in self.lengths), key=rank)


def learn_masks(taker: Taker, flags: Sequence[str]) -> tuple[Learned, ...]:
    """Learn how a forward takes the masks that flags ask for, each in an argument of its own or all in one.

    Raises `SpecError` where no form that was tried does what is asked.
    """
    masks = taker.masks
    if masks.device.type == "meta":
        raise SpecError(
            f"what the masks of {masks.forward} mean is learned from numbers, and meta has none: {flags[0]} cannot "
            "make one there. Take --device cpu, or give the mask by name: --input FILE."
        )
    base = _weights(taker.make({}))
    own_flags = [flag for flag in flags if _bars_any(masks, flag, base)]
    found = [Learned((flag,), bars=False) for flag in flags if flag not in own_flags]
    if base and "--causal" in own_flags:
        square = [w for w in base if w.shape[-1] == w.shape[-2] > 1]
        if any(_does(w, _barred(masks, ("--causal",), MaskSizes(*w.shape)), None) for w in square):
            found.append(Learned(("--causal",)))
            own_flags.remove("--causal")
    apart, seen, taken = list(found), base, dict[str, Tensor]()
    for flag in own_flags:
        one = _learned(taker, [flag], seen, taken)
        if one is not None and one.mask is not None:
            apart.append(one)
            taken[one.argument] = one.mask
            seen = _weights(taker.make(taken))
    if len(apart) == len(flags):
        return tuple(apart)
    together = _learned(taker, own_flags, base, {}) if len(own_flags) > 1 else None
    if together is None:
        lacking = next(flag for flag in own_flags if not any(flag in one.flags for one in apart))
        names = ", ".join(taker.arguments(lacking)) or "its mask"
        file = "--attn-mask FILE, or " if lacking == "--causal" else ""
        raise SpecError(
            f"{masks.forward} does not show what {names} means, so {lacking} cannot make it: no mask of the usual "
            f"forms changed what its attention looks at. Give it as it takes it: {file}--input FILE with the mask by "
            "name."
        )
    return (*found, together)


def _bars_any(masks: Masks, flag: str, base: list[Tensor]) -> bool:
    """Return whether what a flag asks for bars any key of an attention."""
    with suppress(MhaInspectError):  # padding of each row of another batch
        return any(bool(_barred(masks, (flag,), sizes).any()) for sizes in _every_size(masks, base))
    return True


def _every_size(masks: Masks, base: list[Tensor]) -> list[MaskSizes]:
    """Return the sizes of each attention, by its weights, or by the inputs where none are known."""
    return list(dict.fromkeys(MaskSizes(*weights.shape) for weights in base)) or [_asked(masks)]


def _asked(masks: Masks) -> MaskSizes:
    inputs = masks.inputs
    return MaskSizes(inputs.batch, masks.heads, inputs.seq_len, inputs.keys)


def learn_blanks(taker: Taker, names: Sequence[str]) -> tuple[Learned, ...]:
    """Learn the form of masks that a forward does not run without, by barring the last key: theirs bar nothing.

    Empty where none that was tried makes it run, or moves its weights as it should.
    """
    masks = replace(taker.masks, inputs=replace(taker.masks.inputs, padding=(1,)))
    sizes = _asked(masks)
    barred = _barred(masks, ("--padding",), sizes)
    for axes, (says, dtype) in product(_FOR_KEYS, _VALUES):
        form = Learned((), "", axes, says, dtype or masks.dtype, sizes, masks.inputs.seq_len)
        blank = form.of(torch.zeros_like(barred))
        base = _weights(taker.make(dict.fromkeys(names, blank)))
        bars = (_weights(taker.make({**dict.fromkeys(names, blank), name: form.of(barred)})) for name in names)
        if base and all(any(_does(w, barred, before) for w, before in _pairs(seen, base)) for seen in bars):
            return tuple(replace(form, argument=name, mask=blank) for name in names)
    return ()


def _learned(taker: Taker, flags: Sequence[str], base: list[Tensor], taken: Mapping[str, Tensor]) -> Learned | None:
    """The first form in which an argument does what the flags ask for, beside masks that are taken; None if none."""
    masks = taker.masks
    axes = _AXES if "--causal" in flags else _FOR_KEYS
    for argument, sizes in product((n for n in taker.arguments(flags[0]) if n not in taken), _every_size(masks, base)):
        try:
            barred = _barred(masks, flags, sizes)
        except MhaInspectError:  # padding of each row of another batch
            continue
        for pattern, (says, dtype) in _COUNTS if argument in taker.lengths else product(axes, _VALUES):
            if "query" not in pattern and "--causal" in flags:
                continue
            one = Learned(tuple(flags), argument, pattern, says, dtype or masks.dtype, sizes, masks.inputs.seq_len)
            mask = one.of(barred)
            seen = _weights(taker.make({**taken, argument: mask}))
            if any(_does(w, barred, before) for w, before in _pairs(seen, base)):
                return replace(one, mask=mask)
    return None


def _pairs(seen: list[Tensor], base: list[Tensor]) -> Iterator[tuple[Tensor, Tensor | None]]:
    for weights, before in zip(seen, base if len(base) == len(seen) else [None] * len(seen), strict=True):
        yield weights, before if before is not None and before.shape == weights.shape else None


def _barred(masks: Masks, flags: Sequence[str], sizes: MaskSizes) -> Tensor:
    """`batch query key`, True where a query may not look. Raises `InputError` where padding has other rows."""
    barred = torch.zeros(sizes.batch, sizes.query, sizes.key, dtype=torch.bool, device=masks.device)
    if "--causal" in flags:
        barred |= torch.ones(sizes.query, sizes.key, dtype=torch.bool, device=masks.device).triu(1)
    padded = padding_mask(masks.inputs, sizes.batch, sizes.key, masks.device) if "--padding" in flags else None
    return barred if padded is None else barred | rearrange(padded, "... key -> ... 1 key")


def _does(weights: Tensor, barred: Tensor, before: Tensor | None) -> bool:
    """Whether weights are zero where they are barred, and nowhere else where they were not before.

    False where they were so before: another attention is looked for.
    """
    if weights.shape[0] != barred.shape[0] or weights.shape[-2:] != barred.shape[-2:]:
        return False
    barred = barred[:, None].expand_as(weights)
    seen = torch.ones_like(barred) if before is None else before > _BARRED
    looked_at = ~barred & seen
    hidden = barred & looked_at.any(-1, keepdim=True)
    if not bool((hidden & seen).any()):
        return False
    return bool((weights[hidden] <= _BARRED).all()) and bool((weights[looked_at] > _BARRED).double().mean() > 0.9)


def _weights(own: Subject) -> list[Tensor]:
    """The weights of each attention in a run, `batch heads query key`; none where it raises."""
    with suppress(Exception):  # whatever somebody's code may raise for a mask that it does not take
        with own.apart() as fresh:
            seen = fresh.recorded(keep=True)
        found = [_content(seen, *one) for one in seen.attentions if "weights" in one[0].stages]
        return [content.detach() for content in found if content is not None and content.dim() == 4]
    return []


def _content(seen: Run, attention: Any, names: Any) -> Tensor | None:
    weights = attention.stages["weights"]
    for op in attention.weights_path:  # a mask that is multiplied comes after the softmax
        weights = op.output if op.output.shape == weights.shape else weights
    attention = replace(attention, stages={**attention.stages, "weights": weights})
    return content_of(seen, attention, names, "weights")
