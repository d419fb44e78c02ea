"""The masks of one call: those that were asked for, and those that its forward does not run without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any

from torch import Tensor

from ..naming.subject import Subject
from .forward import Forward
from .holders import MOST_KEYS, Entries, Holder
from .learned_masks import Learned, Taker, learn_blanks, learn_masks
from .masks import Masks, masks_of
from .probe import probe

_OF_NONE = (TypeError, AttributeError, AssertionError, KeyError)
"""What is raised where a mask is None, or not there, and is used all the same."""


@dataclass
class ForwardMasks:
    """Makes the masks that a forward takes."""

    forward: Forward
    masks: Masks
    seed: int
    open: tuple[str, ...] = ()
    """The flags for which nothing tells how the forward takes them."""

    def asked(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the masks that were asked for, as far as it is known how the forward takes them.

        Raises `SpecError` where it takes no such mask, `InputError` where a file does not fit.
        """
        forward, inputs = self.forward, self.masks.inputs
        if inputs.causal or inputs.padding:
            for owner in [name for name in forward.entered if "." not in name]:
                self._held(owner, values)
        made, self.open = masks_of(self.masks, forward.parameters, values, forward.free_masks(values))
        return made

    def learned(self, values: Mapping[str, Any]) -> tuple[Learned, ...]:
        """Return the masks whose meaning has to be learned by running the forward.

        Those are what was asked for, and what it does not run without.

        Raises `SpecError` where what was asked for cannot be learned.
        """
        blanks = self._blanks(values)
        if not self.open:
            return blanks
        free = self._entries(self.forward.free_masks(values), values)
        taker = self._taker({**values, **{one.argument: one.mask for one in blanks}}, free)
        asked = learn_masks(taker, self.open)
        taken = {one.argument for one in asked}
        return (*(one for one in blanks if one.argument not in taken), *asked)

    def _blanks(self, values: Mapping[str, Any]) -> tuple[Learned, ...]:
        """Masks that bar nothing for a forward that does not run without any."""
        forward = self.forward
        empty = [name for name in forward.free_masks(values) if values.get(name) is None]
        optional = {n for n, p in forward.parameters.items() if p.default is not Parameter.empty}
        required = [name for name in empty if name not in optional]
        if not required or self.masks.device.type == "meta":
            return ()
        call = forward.call(values)
        if not isinstance(probe(forward.module, call.args, call.kwargs, {}, whole=True).error, _OF_NONE):
            return ()
        required = self._entries(required, values)
        return learn_blanks(self._taker(values, required), required)

    def _entries(self, names: list[str], values: Mapping[str, Any]) -> list[str]:
        """Return the names of masks, with those that an argument holds in its place."""
        held = {name: self._held(name, values) for name in names if name in self.forward.parameters}
        return [one for name in names for one in held.get(name) or [name]]

    def _held(self, owner: str, values: Mapping[str, Any]) -> list[str]:
        """The masks that the forward asks a mask argument for by name; none where it takes one as it is."""
        forward = self.forward
        holder = replace(forward.holders.get(owner, Holder()), tells_masks=True)
        others = {name: value for name, value in values.items() if name != owner}
        while len(holder.keys) < MOST_KEYS:
            call = forward.call(others, {owner: holder})
            wanted = probe(forward.module, call.args, call.kwargs, {}, whole=True).wanted
            if wanted is None or not (wanted.kind is Entries or wanted.words):
                break
            holder = replace(holder, kind=wanted.kind, keys=(*holder.keys, *wanted.keys), words=wanted.words)
        if holder.keys and owner not in forward.entered:
            forward.entered.append(owner)
        if holder.keys:
            forward.holders[owner] = replace(holder, tells_masks=False)
        return [f"{owner}.{key}" for key in holder.keys]

    def _taker(self, values: Mapping[str, Any], free: list[str]) -> Taker:
        """The forward with these arguments, of which those that are free may be other masks."""
        forward = self.forward

        def make(masks: Mapping[str, Tensor]) -> Subject:
            return replace(forward.call({**values, **masks}).of(forward.module), seed=self.seed, grad=False)

        return Taker(make, free, [name for name in free if forward.kind(name) == "lengths"], self.masks)
