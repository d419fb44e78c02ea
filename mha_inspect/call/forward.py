"""What a forward takes: its arguments, what their names say, which hold several tensors, and the masks of one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from ..build.arguments import signature_of
from ..build.vocabulary import Kind, kind_of, plain
from ..errors import SpecError
from ..naming.subject import Subject
from ..record.arguments import described, parts_of
from ..text import did_you_mean, shown
from .call import Call
from .holders import MOST_KEYS, Entries, Holder, Questioned, annotated
from .learned_masks import Learned, Taker, learn_blanks, learn_masks
from .masks import Masks, mask_arguments, masks_of
from .probe import Probed, probe

_NO_TENSORS = ("setting", "mask", "lengths")
"""Kinds of arguments that say something of the others."""


class Forward:
    """What a module's forward takes, as far as it is known."""

    def __init__(self, module: nn.Module, name: str) -> None:
        every = signature_of(module.forward)
        self.module, self.label = module, f"{name}.forward"
        own = [*module.parameters()]
        self.device = own[0].device if own else torch.device("cpu")
        self.dtype = next((one.dtype for one in own if one.is_floating_point()), torch.float32)
        self.parameters = {n: p for n, p in every.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        self.open_ended = any(p.kind is Parameter.VAR_KEYWORD for p in every.values())
        if not self.parameters:
            self.parameters = {n: p for n, p in every.items() if p.kind is p.VAR_POSITIONAL}
        self.kinds = {n: kind_of(p) for n, p in self.parameters.items()}
        told = {
            n: Holder(tuple, ("0",)) if p.kind is p.VAR_POSITIONAL else annotated(p.annotation)
            for n, p in self.parameters.items()
        }
        self.holders = {n: holder for n, holder in told.items() if holder is not None}
        """Arguments that hold tensors, and how."""
        self.entered: list[str] = []
        """Those of which it was found out what they hold."""
        self.lacking: list[str] = []
        """Masks that an open-ended forward asked for by name."""
        self.batch_first: bool | None = None
        """None where nothing has told yet."""

    @property
    def tensors(self) -> list[str]:
        """The arguments that are tensors and say nothing of others."""
        return [name for name, kind in self.kinds.items() if kind not in _NO_TENSORS]

    @property
    def encodes_and_decodes(self) -> bool:
        """Whether it takes what goes into a decoder beside what is encoded."""
        return any(plain(name) in ("tgt", "trg", "decoderinputids", "target") for name in self.parameters)

    def kind(self, name: str) -> Kind:
        """Return what an argument is, or an entry of one that holds tensors: `batch.input_ids`."""
        owner, dot, key = name.rpartition(".")
        if dot and self.is_entry(name):
            if self.kind(owner) == "mask":
                return "mask"
            name = self.holders.get(owner, Holder()).word(key)
        elif name in self.kinds:
            return self.kinds[name]
        return kind_of(Parameter(name, Parameter.KEYWORD_ONLY)) if name.isidentifier() else "unknown"

    def is_entry(self, name: str) -> bool:
        """Return whether a name is one of what an argument holds."""
        owner, dot, _ = name.partition(".")
        return bool(dot) and owner in self.parameters

    def is_star(self, name: str) -> bool:
        """Return whether an argument is `*args`."""
        return name in self.parameters and self.parameters[name].kind is Parameter.VAR_POSITIONAL

    def named(self, said: Mapping[str, Any], flag: str) -> dict[str, Any]:
        """Return what was said by the names of the forward; what has no name is the first argument's.

        Raises `SpecError` for a name that it does not have.
        """
        tensors = self.tensors or list(self.parameters)
        found = {}
        for name, value in said.items():
            if name == "" and not tensors:
                raise SpecError(f"{self.label} takes no argument: {flag} has nothing to give a tensor to.")
            key = name or tensors[0] + (".0" if self.is_star(tensors[0]) else "")
            if key.partition(".")[0] not in self.parameters and not self.open_ended:
                listed = ", ".join(self.parameters)
                raise SpecError(
                    f"{flag} names {shown(key)}, which is no argument of {self.label}: {listed}."
                    f"{did_you_mean(key, self.parameters)}"
                )
            found[key] = value
        return found

    def free_masks(self, values: Mapping[str, Any]) -> list[str]:
        """Return what may take a mask and was not given one: arguments, and entries of those that hold several."""
        named = [name for name in mask_arguments(self.parameters) if name not in self.holders]
        entries = [f"{owner}.{key}" for owner, holder in self.holders.items() for key in holder.keys]
        named += [name for name in entries if self.kind(name) == "mask"]
        return [name for name in (*named, *self.lacking) if values.get(name) is None or self.kind(name) == "lengths"]

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Return names in the order of its arguments, what it does not name first."""
        order = list(self.parameters)
        return sorted(names, key=lambda n: order.index(n.partition(".")[0]) if n.partition(".")[0] in order else -1)

    def with_none(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values with None for what is needed and not there: a mask that was not given is no mask."""
        needed = (n for n, p in self.parameters.items() if p.default is Parameter.empty)
        held = {name.partition(".")[0] for name in values}
        return {**values, **{name: None for name in needed if name not in held}}

    def call(self, values: Mapping[str, Any], asks: Mapping[str, Holder] | None = None) -> Call:
        """Return a call with these values; the arguments in `asks` say what they are asked for, when it runs."""
        folded = self._folded(values, asks or {})
        ordered = {name: folded[name] for name in self.in_order(folded) if name in self.parameters}
        ordered |= {name: value for name, value in folded.items() if name not in ordered}
        named, text = dict(ordered), "" if asks else described(ordered)
        nameless = [n for n, p in self.parameters.items() if p.kind is Parameter.POSITIONAL_ONLY and n in named]
        places = [named.pop(name) for name in nameless]
        places += [one for n in self.parameters if self.is_star(n) for one in named.pop(n, None) or ()]
        return Call(tuple(places), named, text, batch_first=self.batch_first is not False)

    def probe(
        self,
        values: Mapping[str, Any],
        asks: Mapping[str, Holder] | None = None,
        *,
        about: Iterable[str] = (),
        whole: bool = True,
    ) -> Probed:
        """Run it once with these values, and say what it does with those that are asked `about`."""
        call = self.call(values, asks)
        return probe(self.module, call.args, call.kwargs, {name: values[name] for name in about}, whole=whole)

    def _folded(self, values: Mapping[str, Any], asks: Mapping[str, Holder]) -> dict[str, Any]:
        """The values with the entries of what holds several in it, the innermost first."""
        folded = dict(values)
        paths = [*(name for name in values if self.is_entry(name)), *(f"{owner}." for owner in asks)]
        owners = {name.rsplit(".", depth)[0] for name in paths for depth in range(1, name.count(".") + 1)}
        for owner in sorted(owners, key=lambda name: -name.count(".")):
            inside = [name for name in folded if name.rpartition(".")[0] == owner and self.is_entry(name)]
            held = {name.rpartition(".")[2]: folded.pop(name) for name in inside}
            usual = Holder(tuple if all(map(str.isdecimal, held)) else Entries)
            whole = asks.get(owner, self.holders.get(owner, usual)).filled(held)
            folded[owner] = Questioned(asks[owner], parts_of(whole)) if owner in asks else whole
        return folded

    def holding(self, owner: str, values: Mapping[str, Any]) -> str:
        """Return what was found out about an argument that holds tensors, as a sentence."""
        holder = self.holders[owner]
        there = {key for key in holder.keys if any(f"{name}.".startswith(f"{owner}.{key}.") for name in values)}
        names = [holder.word(key) + ("" if key in there else " (None)") for key in holder.keys]
        if holder.kind in (tuple, list):
            named = f": {', '.join(names)}" if any(holder.words) else ""
            told = f"is a {holder.kind.__name__} of {len(names)}{named}"
        else:
            told = f"{'holds' if holder.kind is Entries else f'is {holder.kind.__name__} with'} {', '.join(names)}"
        return f"{owner} {told}, as the forward uses it."


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
        optional = {n for n, p in forward.parameters.items() if p.default is not Parameter.empty}
        required = [n for n in forward.free_masks(values) if values.get(n) is None and n not in optional]
        if not required or self.masks.device.type == "meta":
            return ()
        if not isinstance(forward.probe(values).error, _OF_NONE):
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
            wanted = forward.probe(others, {owner: holder}).wanted
            if wanted is None or not (wanted.kind is Entries or wanted.words):
                break
            holder = replace(holder, kind=wanted.kind, keys=(*holder.keys, *wanted.keys), words=wanted.words)
        if holder.keys:
            forward.holders[owner] = replace(holder, tells_masks=False)
            forward.entered += [owner] if owner not in forward.entered else []
        return [f"{owner}.{key}" for key in holder.keys]

    def _taker(self, values: Mapping[str, Any], free: list[str]) -> Taker:
        """The forward with these arguments, of which those that are free may be other masks."""
        forward = self.forward

        def make(masks: Mapping[str, Tensor]) -> Subject:
            return replace(forward.call({**values, **masks}).of(forward.module), seed=self.seed, grad=False)

        return Taker(make, free, [name for name in free if forward.kind(name) == "lengths"], self.masks)
