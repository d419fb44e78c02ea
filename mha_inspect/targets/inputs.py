"""What a forward is called with: tensors that follow its signature, and what somebody said of them.

A layer of the catalog says how wide they are. Of a target a name says what an argument is (`vocabulary`), and a small
run says how wide it is and which axis is the batch (`probe`). --input-shape and --input say it outright, and come
first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import InputError, SpecError
from ..layers import torch_mha
from ..layers.spec import InputSpec
from ..naming.subject import Subject
from ..record.arguments import described, parts_of
from ..record.rehearsal import rehearsed
from ..text import did_you_mean, printable, shown
from .call import Call
from .constructor import signature_of
from .drawing import Plan, draw, generator_of
from .files import read_tensors
from .holders import Entries, Holder, Questioned, annotated
from .hugging_face_inputs import is_hugging_face, ways_of
from .layout import MISTAKEN, TURN, Layout, batch_axes_in_words, batch_axis_in_words, layout_of
from .learned_masks import Learned, Taker, learn_blanks, learn_masks
from .masks import Masks, is_torchs, mask_arguments, masks_of
from .probe import Evidence, Probed, probe
from .target import Target
from .triple import Triple, require_fit
from .values import InputShape
from .vocabulary import ALIASES, Flags, Kind, dashed, kind_of, plain

_UNUSUAL = 37
"""A width that nothing has: whatever takes it, does not look at it."""


@dataclass(frozen=True)
class Known:
    """What the first call of a forward showed, for another one with other sizes."""

    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    """The arguments that are drawn without a configuration that tells what they are."""
    way: int = 0
    """Which of the ways that a configuration allows to call it was taken."""
    layout: Layout | None = None
    masks: tuple[Learned, ...] = ()
    holders: Mapping[str, Holder] = field(default_factory=dict)
    """Arguments that hold tensors, and how."""


@dataclass(frozen=True)
class Asked:
    """What was asked for the inputs."""

    inputs: InputSpec
    flags: Flags = field(default_factory=Flags)
    shapes: Mapping[str, InputShape] = field(default_factory=dict)
    seed: int = 0
    ids: Tensor | None = None
    """Tokens of a text, `batch seq`: the forward's `input_ids`."""
    given: Triple | None = None
    """Query, key and value of another forward, laid out as this one takes them."""
    blank: Tensor | None = None
    """An attention mask of another size: one like it that bars nothing is taken."""
    known: Known | None = None


def make_call(target: Target, asked: Asked) -> Call:
    """Make the arguments of the target's forward.

    Raises:
        InputError: an argument is needed that nothing tells, or a file does not fit.
        SpecError: a name is none of the forward's, or a flag is of no use to it.
    """
    asked = _in_rehearsal(asked)
    maker = _Maker(target, asked)
    call, inputs = maker.call(), asked.inputs.without_ones()
    if inputs is None or asked.shapes or asked.inputs.input is not None or asked.ids is not None:
        return call
    other = replace(asked, inputs=inputs, known=maker.known)
    return replace(call, without_ones=lambda module: make_call(replace(target, module=module), other))


def _in_rehearsal(asked: Asked) -> Asked:
    """What is left of the inputs in a rehearsal; without one all of them."""
    cut, inputs = rehearsed(), asked.inputs
    if cut is None:
        return asked
    keys = cut.length(inputs.seq_len if inputs.key_len is None else inputs.key_len)
    batch = cut.rows(inputs.batch)
    smaller = replace(
        inputs,
        batch=batch,
        seq_len=cut.length(inputs.seq_len),
        key_len=None if inputs.key_len is None else keys,
        padding=tuple(min(count, keys) for count in inputs.padding[: max(batch, 1)]),
    )
    shapes = {
        name: replace(one, shape=cut.shape(one.shape, vectors=one.is_of_vectors)) for name, one in asked.shapes.items()
    }
    return replace(asked, inputs=smaller, shapes=shapes)


class _Maker:
    """Works out the arguments of one forward."""

    def __init__(self, target: Target, asked: Asked) -> None:
        self.target, self.module, self.asked = target, target.module, asked
        every = signature_of(self.module.forward)
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
        self.spec = target.spec
        if self.spec is None and type(self.module) is nn.MultiheadAttention:
            self.spec = torch_mha.spec_of(self.module)
        floating = next((p for p in self.module.parameters() if p.is_floating_point()), None)
        self.dtype = torch.float32 if floating is None else floating.dtype
        first = next(self.module.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device
        self.generator = generator_of(asked.seed)
        self.known = asked.known or Known()
        self.holders |= self.known.holders
        self.batch_first = self._told_layout()
        self.open: tuple[str, ...] = ()
        self.asks: dict[str, Holder] = {}
        self.entered: list[str] = []
        self.lacking: list[str] = []
        self.raises = False
        self.said: list[str] = []

    def call(self) -> Call:
        """The arguments, worked out."""
        shapes = self._named(self.asked.shapes, "--input-shape")
        given = {**self.target.forward_settings, **self._given(), **self._from_text()}
        twice = [name for name in shapes if name in given]
        if twice:
            raise SpecError(f"--input-shape and --input (or --set) both give {twice[0]}. Drop one of the two.")
        plans = {name: self._plan_of_shape(name, said) for name, said in shapes.items()}
        self._say_widths(shapes)
        plans |= self._planned(self._needed(given, shapes), given, plans)
        self._lay_out(plans, given)
        values = {**given, **self._draw(plans, given)}
        values |= self._masks(values)
        self._switch(values)
        values = self._learned(self._with_none(values))
        call = self._in_order(values)
        drawn = tuple(name for name in self._in_their_order(plans) if plans[name].kind != "lengths")
        return replace(
            call,
            drawn=drawn,
            guessed={name: _as_shape(values[name]) for name in drawn if name not in shapes},
            said=(*(self._held(owner, values) for owner in self.entered), *self.said),
        )

    def _in_their_order(self, names: Iterable[str]) -> list[str]:
        order = list(self.parameters)
        return sorted(names, key=lambda n: order.index(n.partition(".")[0]) if n.partition(".")[0] in order else -1)

    # -- what was said ------------------------------------------------------------------------------------------------

    def _named(self, said: Mapping[str, Any], flag: str) -> dict[str, Any]:
        """What was said, by the names of the forward; one without a name is the first argument's."""
        tensors = [n for n in self.parameters if self.kinds[n] not in _NO_TENSORS] or list(self.parameters)
        named = {}
        for name, value in said.items():
            if name == "" and not tensors:
                raise SpecError(f"{self._owner()} takes no argument: {flag} has nothing to give a tensor to.")
            key = name or tensors[0] + (".0" if self._is_star(tensors[0]) else "")
            if key.partition(".")[0] not in self.parameters and not self.open_ended:
                listed = ", ".join(self.parameters)
                raise SpecError(
                    f"{flag} names {shown(key)}, which is no argument of {self._owner()}: {listed}."
                    f"{did_you_mean(key, self.parameters)}"
                )
            named[key] = value
        return named

    def _given(self) -> dict[str, Any]:
        """Tensors out of a file, or of another forward."""
        if self.asked.given is not None:
            return self._in_roles(self.asked.given)
        path = self.asked.inputs.input
        if path is None:
            return {}
        content, file = read_tensors(Path(path)), printable(path)
        held = {"": content} if isinstance(content, Tensor) else content
        cut = rehearsed()
        held = held if cut is None else {name: cut.tensor(tensor) for name, tensor in held.items()}
        names = {"query", "key", "value"} if self.target.spec is not None else set(self.parameters)
        if len(held) == 1 and next(iter(held)) not in self.parameters:
            held = {"": next(iter(held.values()))}
        if self.spec is None:
            return {name: self._moved(tensor) for name, tensor in self._named(held, f"{shown(str(path))}").items()}
        held = {"query": held[""]} if "" in held else held
        if "query" not in held or not set(held) <= names:
            listed = ", ".join(map(repr, held)) or "nothing"
            raise InputError(
                f"{file} holds {listed}: the names query, key and value are meant, and query must be among them."
            )
        query = held["query"]
        key = held.get("key", query)
        triple = query, key, held.get("value", key)
        unbatched = self.asked.inputs.unbatched if self.target.spec is not None else query.dim() == 2
        require_fit(file, triple, self.spec, unbatched=unbatched)
        rest = {name: self._moved(t) for name, t in held.items() if name not in ("query", "key", "value")}
        return self._in_roles(triple) | rest

    def _in_roles(self, triple: Triple) -> dict[str, Any]:
        """Query, key and value in the arguments that they are meant for; one tensor that serves as several stays one.

        Raises `InputError` where key and value are two, and the forward takes one sequence for both.
        """
        moved = {id(tensor): self._moved(tensor).contiguous() for tensor in triple}
        query, key, value = (moved[id(tensor)] for tensor in triple)
        if "value" not in self.kinds.values() and key is not value:
            raise InputError(
                f"{self.target.made_from} makes keys and values from the same hidden states, and this input has a key "
                "and a value. Give one of them, or take a layer that has both: torch, split-heads, fold-heads, "
                "per-head, narrow or wide."
            )
        roles = {"query": query, "hidden": query, "key": key, "value": value, "other": None if key is query else key}
        return {name: roles[kind] for name, kind in self.kinds.items() if kind in roles}

    def _from_text(self) -> dict[str, Any]:
        if self.asked.ids is None:
            return {}
        if "input_ids" not in self.parameters:
            raise InputError(
                f"--text gives input_ids, which {self._owner()} does not take: {', '.join(self.parameters)}."
            )
        return {"input_ids": self._moved(self.asked.ids)}

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype if tensor.is_floating_point() else None)

    def _plan_of_shape(self, name: str, said: InputShape) -> Plan:
        kind = self._kind(name)
        if said.dtype is None:
            return Plan(kind, said.shape, "int64" if kind == "ids" else "", self._vocabulary())
        whole = said.dtype.startswith("int")
        return Plan("ids" if whole else "unknown", said.shape, said.dtype, self._vocabulary() if whole else 2)

    # -- what is needed -----------------------------------------------------------------------------------------------

    def _kind(self, name: str) -> Kind:
        """What an argument is, or an entry of one that holds tensors: `batch.input_ids`."""
        owner, dot, key = name.rpartition(".")
        if dot and self._is_entry(name):
            if self._kind(owner) == "mask":
                return "mask"
            name = self.holders.get(owner, Holder()).word(key)
        elif name in self.kinds:
            return self.kinds[name]
        return kind_of(Parameter(name, Parameter.KEYWORD_ONLY)) if name.isidentifier() else "unknown"

    def _needed(self, given: Mapping[str, Any], shapes: Mapping[str, Any]) -> list[str]:
        """Names of the tensors to draw."""
        said = {*given, *shapes, *(name.partition(".")[0] for name in shapes)}
        required = [n for n, p in self.parameters.items() if p.default is Parameter.empty and n not in said]
        unsaid = [n for n in required if self.kinds[n] == "setting"]
        if unsaid:
            raise InputError(
                f"{self._owner()} needs {unsaid[0]}, which is no tensor. Give it: --set {unsaid[0]}=VALUE."
            )
        needed = [n for n in required if self.kinds[n] != "mask"]
        if not needed and not said:
            tensors = [n for n in self.parameters if self.kinds[n] not in _NO_TENSORS]
            main = getattr(self.module, "main_input_name", None)
            needed = [main] if main in self.parameters else tensors[:1]
        if self.asked.inputs.key_len is not None and not self._encodes_and_decodes():
            second = [n for n in self.parameters if self.kinds[n] in ("key", "value", "other")]
            if not second:
                raise SpecError(
                    f"--key-len has nothing to set: {self._owner()} takes one sequence ({', '.join(self.parameters)})."
                )
            others = [n for n in second if self.kinds[n] == "other"][:1] or second
            needed += [n for n in others if n not in needed and n not in said]
        return needed

    def _encodes_and_decodes(self) -> bool:
        return any(plain(n) in ("tgt", "trg", "decoderinputids", "target") for n in self.parameters)

    def _planned(self, names: list[str], given: Mapping[str, Any], said: Mapping[str, Plan]) -> dict[str, Plan]:
        """Plans for the tensors that nobody said anything of."""
        known: dict[str, Plan] = {}
        if is_hugging_face(self.module):
            free = set(self.parameters) - set(given) - set(said)
            ways = [*ways_of(self.module, names, free, self.asked.inputs)]
            way, evidence = self.known.way, self.known.evidence
            drawn = any(not plan.dtype for plan in ways[0].values())  # of which the width may be another
            if self.asked.known is None and (drawn or len(ways) > 1):
                probed = ((at, self._probe(own, given, said, whole=True)) for at, own in enumerate(ways))
                runs = ((at, one.evidence) for at, one in probed if one.error is None)
                way, evidence = next(runs, (0 if ways[-1] else len(ways) - 1, {}))
                self.known = replace(self.known, way=way, evidence=evidence)
            known = {n: self._as_wide(plan, evidence.get(n)) for n, plan in ways[way].items()}
            names = list(dict.fromkeys((*names, *ways[0], *known)))
        guessed = [name for name in names if name not in known]
        if self.spec is not None:
            return {name: self._first_guess(name) for name in guessed}
        if self.asked.known is not None:
            evidence = self.known.evidence
            return known | {n: self._corrected(n, self._first_guess(n), evidence.get(n)) for n in self.known.names}
        asks = guessed or (self.open_ended and not (self.parameters or said or given))
        plans = self._probed({n: self._first_guess(n) for n in guessed}, given, {**said, **known}) if asks else {}
        self.known = replace(self.known, names=tuple(plans))
        return known | plans

    def _first_guess(self, name: str) -> Plan:
        kind = self._kind(name)
        if kind == "ids":
            return self._ids(name)
        if kind == "image":
            return self._image(None)
        if kind == "lengths":
            return Plan(kind, (self.asked.inputs.batch,), "int64", rows=(self.asked.inputs.seq_len,))
        return Plan(kind, (*self._batch_and_length(name), self._width(kind)), sequence=self._batched)

    def _ids(self, name: str, vocabulary: int | None = None) -> Plan:
        return Plan(
            "ids", self._batch_and_length(name), "int64", vocabulary or self._vocabulary(), sequence=self._batched
        )

    def _image(self, channels: int | None) -> Plan:
        known = self.target.arguments
        channels = channels or _first_int(known, "channels", "in_channels", "in_chans", "num_channels") or 3
        size = next(
            (known[n] for n in ("image_size", "img_size", "input_resolution", "resolution") if n in known), None
        )
        size = size or next(
            (getattr(m, n) for m in self.module.modules() for n in ("image_size", "img_size") if hasattr(m, n)), 32
        )
        height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))
        return Plan("image", (self.asked.inputs.batch, channels, height, width))

    @property
    def _batched(self) -> bool:
        return not self.asked.inputs.unbatched

    def _batch_and_length(self, name: str) -> tuple[int, ...]:
        inputs = self.asked.inputs
        key_len = inputs.seq_len if inputs.key_len is None else inputs.key_len
        encodes = self._encodes_and_decodes() and plain(name) in ("src", "source", "inputids", "xids", "srcids")
        length = key_len if self._kind(name) in ("key", "value", "other") or encodes else inputs.seq_len
        return (inputs.batch, length) if self._batched else (length,)

    # -- evidence -----------------------------------------------------------------------------------------------------

    def _probed(self, plans: dict[str, Plan], given: Mapping[str, Any], said: Mapping[str, Plan]) -> dict[str, Plan]:
        """The plans, corrected by what the module does with them."""
        for owner in [name for name in plans if name in self.holders]:
            plans |= self._entries(owner, {n: p for n, p in plans.items() if n != owner}, given, said, sure=True)
            del plans[owner]
        # An argument of an unknown name that stands behind others may be let out, or is one that somebody must give.
        extra = [
            n for n in list(plans) if self._kind(n) in ("unknown", "lengths") and (len(plans) > 1 or said or given)
        ]
        extra = [n for n in extra if n != next(iter(self.parameters), n) and "." not in n]
        certain = {n: plan for n, plan in plans.items() if n not in extra}
        attempts = [certain, plans] if extra else [plans]
        loose = [n for n, plan in plans.items() if plan.kind in ("hidden", "unknown", "query")]
        for other in (self._ids, lambda _: self._image(None)) if loose else ():
            attempts += [
                {**attempt, **{n: other(n) for n in loose if n in attempt}} for attempt in attempts[: 1 + bool(extra)]
            ]
        best: tuple[int, dict[str, Plan], Probed] | None = None
        for attempt in attempts:
            probed = self._probe(attempt, given, said, whole=bool(extra) or self.open_ended)
            missing = probed.error.args[0] if isinstance(probed.error, KeyError) and probed.error.args else None
            if self.open_ended and isinstance(missing, str) and missing not in (*plans, *said, *given, *self.lacking):
                if self._kind(missing) != "mask":
                    return self._probed({**plans, missing: self._first_guess(missing)}, given, said)
                self.lacking.append(missing)
            for owner in filter(None, (probed.holder, probed.maybe)):
                rest = {n: plan for n, plan in plans.items() if n != owner}
                held = self._entries(owner, rest, given, said, sure=owner == probed.holder)
                if held:
                    return self._probed({**rest, **held}, given, said)
            known = len(probed.evidence) if probed.error is not None else len(plans) + 1
            if best is None or known > best[0]:
                best = (known, attempt, probed)
            if known >= len(plans):
                break
        assert best is not None
        _, chosen, probed = best
        self.raises = probed.error is not None
        firm = {n for n, evidence in probed.evidence.items() if evidence.firm}
        doubtful = [n for n in extra if self._kind(n) == "unknown" and n not in firm]
        untold = [n for n in doubtful if (n in chosen or probed.error is not None)]
        for name in untold or (plans if isinstance(probed.error, TypeError) else ()):
            rest = {n: plan for n, plan in plans.items() if n != name}
            if held := self._entries(name, rest, given, said, sure=False):
                return self._probed({**rest, **held}, given, said)
        if untold:
            raise InputError(
                f"{self._owner()} needs {untold[0]}, and nothing tells what that is. Give it: --input-shape "
                f"{untold[0]}=2x10x512:float32 with its own sizes, or --input FILE with {untold[0]} in it."
            )
        self.known = replace(self.known, evidence=probed.evidence, holders=self.holders)
        return {name: self._corrected(name, plan, probed.evidence.get(name)) for name, plan in chosen.items()}

    def _entries(
        self, owner: str, plans: Mapping[str, Plan], given: Mapping[str, Any], said: Mapping[str, Plan], *, sure: bool
    ) -> dict[str, Plan]:
        """Plans for what an argument holds: the entries that the forward asks it for, or two where it joins them.

        Empty where it does not run with them, unless it is `sure` that it holds any.

        Raises `InputError` where it is sure, and nothing tells what it holds.
        """
        if self._is_star(owner):
            return self._starred(owner, plans, given, said)
        holder = self.holders.get(owner, Holder())
        found = self._first_guesses(owner, holder.keys)
        while len(found) < _MOST_KEYS:
            self.asks = {owner: holder}
            wanted = self._probe({**plans, **found}, given, said, whole=True).wanted
            self.asks = {}
            keys = [] if wanted is None else [key for key in wanted.keys if key not in holder.keys]
            if wanted is None or not keys:
                break
            kind = wanted.kind if holder.kind is Entries else holder.kind
            holder = Holder(kind, (*holder.keys, *keys), wanted.words or holder.words)
            self.holders[owner] = holder
            found |= self._first_guesses(owner, keys)
        runs = sure and bool(holder.keys)
        if not holder.keys:  # it asks for none by name or place: what joins tensors takes any number of them
            self.holders[owner] = Holder(list, ("0", "1"))
            found = self._first_guesses(owner, ("0", "1"))
        for attempt in () if runs else (found, {name: self._ids(name) for name in found}):
            if self._probe({**plans, **attempt}, given, said, whole=True).error is None:
                found, runs = attempt, True
                break
        if sure and not (found and runs):
            raise InputError(
                f"{self._owner()} takes several tensors in {owner}, and nothing tells what is in it. Give each entry: "
                f"--input-shape {owner}.KEY=2x10x512:float32 with its own sizes."
            )
        if not (found and runs):
            self.holders.pop(owner, None)
            return {}
        self.entered.append(owner)
        return found

    def _first_guesses(self, owner: str, keys: Iterable[str]) -> dict[str, Plan]:
        names = [f"{owner}.{key}" for key in keys]
        return {name: self._first_guess(name) for name in names if self._kind(name) != "mask"}

    def _starred(
        self, owner: str, plans: Mapping[str, Plan], given: Mapping[str, Any], said: Mapping[str, Plan]
    ) -> dict[str, Plan]:
        """Plans for `*args`: as few as make it run, or one where none do."""
        for count in (*range(1, _MOST_STARS + 1), 1):
            self.holders[owner] = Holder(tuple, tuple(map(str, range(count))))
            found = self._first_guesses(owner, self.holders[owner].keys)
            if self._probe({**plans, **found}, given, said, whole=True).error is None:
                break
        if len(found) > 1:
            self.entered.append(owner)
        return found

    def _held(self, owner: str, values: Mapping[str, Any]) -> str:
        """What was found out about an argument that holds tensors, as a sentence."""
        holder = self.holders[owner]
        there = {key for key in holder.keys if any(f"{name}.".startswith(f"{owner}.{key}.") for name in values)}
        names = [holder.word(key) + ("" if key in there else " (None)") for key in holder.keys]
        if holder.kind in (tuple, list):
            named = f": {', '.join(names)}" if any(holder.words) else ""
            told = f"is a {holder.kind.__name__} of {len(names)}{named}"
        else:
            told = f"{'holds' if holder.kind is Entries else f'is {holder.kind.__name__} with'} {', '.join(names)}"
        return f"{owner} {told}, as the forward uses it."

    def _probe(
        self, plans: Mapping[str, Plan], given: Mapping[str, Any], said: Mapping[str, Plan], *, whole: bool
    ) -> Probed:
        state = self.generator.get_state()
        values = self._with_none({**given, **self._draw({**said, **plans}, given)})
        self.generator.set_state(state)
        call = self._in_order(values)
        return probe(self.module, call.args, call.kwargs, {name: values[name] for name in plans}, whole=whole)

    def _as_wide(self, plan: Plan, evidence: Evidence | None) -> Plan:
        """The plan that a configuration tells, with the width that the forward takes."""
        if evidence is None or plan.dtype or evidence.kind != "width":
            return plan
        return replace(plan, shape=(*plan.shape[:-1], evidence.size))

    def _corrected(self, name: str, plan: Plan, evidence: Evidence | None) -> Plan:
        if evidence is None:
            return plan
        if evidence.kind == "ids":
            return self._ids(name, evidence.size)
        if evidence.kind == "image":
            return self._image(evidence.size)
        return replace(plan, shape=(*plan.shape[:-1], evidence.size))

    def _width(self, kind: Kind) -> int:
        if self.spec is not None:
            widths = {"key": self.spec.key_width, "other": self.spec.key_width, "value": self.spec.value_width}
            return widths.get(kind, self.spec.embed_dim)
        flags = {"key": ("kdim", "embed_dim"), "value": ("vdim", "embed_dim"), "other": ("kdim", "embed_dim")}
        for flag in flags.get(kind, ("embed_dim",)):
            for source in (self.target.arguments, vars(self.module), _config_of(self.module)):
                width = _first_int(source, *ALIASES[flag])
                if width is not None:
                    return width
        linears = [m for m in self.module.modules() if isinstance(m, nn.Linear)]
        lazy = [m.out_features for m in linears if not m.in_features]
        return next((m.in_features for m in linears if m.in_features), lazy[0] if lazy else _UNUSUAL)

    def _say_widths(self, shapes: Mapping[str, InputShape]) -> None:
        """Say that lazy layers take any width. Raises `InputError` where nothing suggests one."""
        if shapes or self.asked.inputs.input is not None or self.asked.known is not None:
            return
        lazy = [module for module in self.module.modules() if any(map(is_lazy, module.parameters(recurse=False)))]
        if not lazy or any(self._kind(n) in ("ids", "image") for n in self.parameters):
            return
        width, name = self._width("hidden"), next(iter(self.parameters), "x")
        if width == _UNUSUAL:
            raise InputError(
                f"{self.target.name} has lazy layers ({type(lazy[0]).__name__}), which take any width, and nothing "
                f"tells which is meant. Give it: --input-shape {name}=2x10x512 with its own sizes."
            )
        self.said.append(f"Its lazy layers take any width, and were given {width}: --input-shape gives another.")

    def _vocabulary(self) -> int:
        names = ("vocab_size", "n_vocab", "num_tokens", "num_embeddings", "vocabulary_size", "src_vocab_size")
        for source in (self.target.arguments, vars(self.module), _config_of(self.module)):
            size = _first_int(source, *names)
            if size is not None:
                return size
        return next((m.num_embeddings for m in self.module.modules() if isinstance(m, nn.Embedding)), 2)

    # -- layout -------------------------------------------------------------------------------------------------------

    def _told_layout(self) -> bool | None:
        """Whether the batch comes first, as was said or as the module says of itself.

        None where what it does has to tell.
        """
        if "batch_first" in self.asked.flags.given:
            return bool(self.asked.flags.values.get("batch_first", True))
        if self.known.layout is not None:
            return self.known.layout.batch_first
        if self.spec is not None:
            return self.spec.batch_first
        inside = self.module.modules() if is_torchs(self.module) else [self.module]
        own = next((one for part in inside if isinstance(one := getattr(part, "batch_first", None), bool)), None)
        return True if own is None and is_hugging_face(self.module) else own

    def _lay_out(self, plans: Mapping[str, Plan], given: Mapping[str, Any]) -> None:
        """Find whether the batch comes first, where nobody said so: by the words of the forward, or by what it does."""
        if self.batch_first is not None:
            return
        state = self.generator.get_state()
        values = {**given, **self._draw(plans, given)}
        self.generator.set_state(state)
        names = [
            n
            for n, v in values.items()
            if isinstance(v, Tensor) and v.dim() > 1 and self._kind(n) not in ("image", "mask", "lengths")
        ]
        told = batch_axis_in_words(self.module, names)
        # Another inside that takes the sequence first says nothing of what goes into the whole.
        doubtful = any(getattr(module, "batch_first", None) is False for module in self.module.modules())

        def run(changed: Mapping[str, Tensor]) -> Any:
            call = self._in_order(self._with_none({**values, **changed}))
            with replace(call.of(self.module), seed=0, grad=False).apart() as own:
                return own.plain()

        layout = None
        untold = told is None and batch_axes_in_words(self.module) != {0}
        if (untold or doubtful) and names and self._batched and not self.raises and self.device.type != "meta":
            layout = layout_of(run, {name: values[name] for name in names})
        if told is not None:
            first, others_meet = told[0] == 0, layout is not None and not layout.batch_first
            layout = Layout(first, f"{told[1]}." + ((MISTAKEN if others_meet else "") if first else f" {TURN}"))
        if layout is None:
            return
        self.known, self.batch_first = replace(self.known, layout=layout), layout.batch_first
        if layout.batch_first and not (doubtful or layout.why.endswith(MISTAKEN)):
            return
        axes = "batch seq" if layout.batch_first else "seq batch"
        embed = " embed" if any(values[name].is_floating_point() for name in names) else ""
        self.said.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} `{axes}{embed}`: {layout.why}")

    # -- tensors ------------------------------------------------------------------------------------------------------

    def _draw(self, plans: Mapping[str, Plan], given: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors; query, key and value are one tensor where nothing tells them apart."""
        drawn: dict[str, Tensor] = {}
        apart = self.asked.inputs.key_len is not None
        has_key = "key" in self.kinds.values()
        for name, plan in sorted(plans.items(), key=lambda item: _ORDER.get(item[1].kind, 0)):
            like: Kind | None = "key" if plan.kind == "value" and has_key else "query"
            if plan.kind not in ("key", "value") or name in self.asked.shapes or (apart and like == "query"):
                like = None
            same = [
                tensor
                for other, tensor in {**given, **drawn}.items()
                if isinstance(tensor, Tensor) and self._kind(other) == like
                if tensor.shape[-1] == plan.shape[-1] and tensor.dim() == len(plan.shape)
            ]
            if same:
                drawn[name] = same[0]
                continue
            tensor = draw(plan, self.dtype, self.device, self.generator)
            # Always drawn batch first: the content of a row does not hang on the layout.
            turned = plan.sequence and self.batch_first is False
            drawn[name] = tensor.transpose(0, 1).contiguous() if turned else tensor
        return drawn

    def _masks(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The masks that were asked for, as far as it is known how the forward takes them."""
        flags, inputs = self.asked.flags, self.asked.inputs
        # Where its constructor took --causal, it has a mask of its own.
        built_causal = any(bool(getattr(self.module, name, False)) for name in ("causal", "is_causal", "masked"))
        causal = inputs.causal and "causal" in flags.typed and not built_causal
        self.masks = Masks(
            self.module,
            self.target.masks,
            replace(inputs, causal=causal),
            self.dtype,
            self.device,
            self.batch_first is not False,
            heads=_heads_of(self.module) if self.spec is None else self.spec.num_heads,
            blank=self.asked.blank,
            owner=self.target.made_from,
        )
        made, self.open = masks_of(self.masks, self.parameters, values, self._free_masks(values))
        return made

    def _learned(self, values: dict[str, Any]) -> dict[str, Any]:
        """The arguments with the masks whose meaning has to be learned by running the forward.

        Those are what was asked for, and what it does not run without.
        """
        if self.asked.known is not None:
            learned = tuple(one.at(self.masks) for one in self.known.masks)
        else:
            learned, free = self._blanks(values), self._free_masks(values)
            values = {**values, **{one.argument: one.mask for one in learned}}
            asked = learn_masks(self._taker(values, free), self.open) if self.open else ()
            taken = {one.argument for one in asked}
            learned = (*(one for one in learned if one.argument not in taken), *asked)
            self.said += [one.words for one in learned]
        self.known = replace(self.known, masks=learned, holders=self.holders)
        return {**values, **{one.argument: one.mask for one in learned if one.mask is not None}}

    def _blanks(self, values: Mapping[str, Any]) -> tuple[Learned, ...]:
        """Masks that bar nothing for a forward that does not run without any."""
        empty = [n for n in self._free_masks(values) if values.get(n) is None]
        required = [n for n in empty if n not in self.parameters or self.parameters[n].default is Parameter.empty]
        if not required or self.device.type == "meta":
            return ()
        call = self._in_order(dict(values))
        if not isinstance(probe(self.module, call.args, call.kwargs, {}, whole=True).error, _OF_NONE):
            return ()
        for owner in [name for name in required if name in self.parameters]:
            if held := self._held_masks(owner, values):
                required[required.index(owner) : required.index(owner) + 1] = held
        return learn_blanks(self._taker(values, required), required)

    def _held_masks(self, owner: str, values: Mapping[str, Any]) -> list[str]:
        """The masks that the forward asks a mask argument for by name; none where it takes one as it is."""
        others = {name: value for name, value in values.items() if name != owner}
        holder = Holder()
        while len(holder.keys) < _MOST_KEYS:
            self.asks = {owner: holder}
            call = self._in_order(others)
            wanted = probe(self.module, call.args, call.kwargs, {}, whole=True).wanted
            self.asks = {}
            if wanted is None or wanted.kind is not Entries:
                break
            holder = Holder(Entries, (*holder.keys, *wanted.keys))
        if holder.keys:
            self.holders[owner] = holder
            self.entered.append(owner)
        return [f"{owner}.{key}" for key in holder.keys]

    def _free_masks(self, values: Mapping[str, Any]) -> list[str]:
        """The arguments that may take a mask and that nobody gave one, and entries of what holds several."""
        named = [n for n in mask_arguments(self.parameters) if n not in self.holders]
        entries = [f"{owner}.{key}" for owner, holder in self.holders.items() for key in holder.keys]
        named += [n for n in entries if self._kind(n) == "mask"]
        return [n for n in (*named, *self.lacking) if values.get(n) is None or self._kind(n) == "lengths"]

    def _taker(self, values: Mapping[str, Any], free: list[str]) -> Taker:
        """The forward with these arguments, of which those that are free may be other masks."""

        def make(masks: Mapping[str, Tensor]) -> Subject:
            own = self._in_order({**values, **masks}).of(self.module)
            return replace(own, seed=self.asked.seed, grad=False)

        return Taker(make, free, [n for n in free if self._kind(n) == "lengths"], self.masks)

    def _switch(self, values: dict[str, Any]) -> None:
        """The switches of our own that torch's layer has, and some of the others."""
        flags = self.asked.flags
        for flag, names in (
            ("need_weights", ("need_weights", "output_attentions")),
            ("average_weights", ("average_attn_weights",)),
        ):
            name = next((name for name in names if name in self.parameters), None)
            if flag not in flags.given:
                continue
            if name is not None:
                values.setdefault(name, bool(flags.values[flag]))
            elif flag in flags.typed:
                raise SpecError(
                    f"{self._owner()} has no argument {names[0]}: {dashed(flag)} is of no use to it. Drop it."
                )

    def _with_none(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values, None for what is needed and not there: a mask that was not given is no mask."""
        needed = (n for n, p in self.parameters.items() if p.default is Parameter.empty)
        held = {name.partition(".")[0] for name in values}
        return {**values, **{name: None for name in needed if name not in held}}

    def _in_order(self, values: Mapping[str, Any]) -> Call:
        folded = self._folded(values)
        ordered = {name: folded[name] for name in self._in_their_order(folded) if name in self.parameters}
        ordered |= {name: value for name, value in folded.items() if name not in ordered}
        kinds = {n: p.kind for n, p in self.parameters.items() if n in ordered}
        places = [ordered[n] for n, kind in kinds.items() if kind is Parameter.POSITIONAL_ONLY]
        places += [one for n in kinds if self._is_star(n) for one in ordered[n] or ()]
        nameless = (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL)
        return Call(
            tuple(places),
            {name: value for name, value in ordered.items() if kinds.get(name) not in nameless},
            "" if self.asks else described(ordered),
            batch_first=self.batch_first is not False,
        )

    def _folded(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values with the entries of what holds several in it, the innermost first."""
        folded = dict(values)
        paths = [*(name for name in values if self._is_entry(name)), *(f"{owner}." for owner in self.asks)]
        owners = {name.rsplit(".", depth)[0] for name in paths for depth in range(1, name.count(".") + 1)}
        for owner in sorted(owners, key=lambda name: -name.count(".")):
            inside = [name for name in folded if name.rpartition(".")[0] == owner and self._is_entry(name)]
            held = {name.rpartition(".")[2]: folded.pop(name) for name in inside}
            usual = Holder(tuple if all(map(str.isdecimal, held)) else Entries)
            whole = self.asks.get(owner, self.holders.get(owner, usual)).filled(held)
            folded[owner] = Questioned(self.asks[owner], parts_of(whole)) if owner in self.asks else whole
        return folded

    def _is_entry(self, name: str) -> bool:
        owner, dot, _ = name.partition(".")
        return bool(dot) and owner in self.parameters

    def _is_star(self, name: str) -> bool:
        return name in self.parameters and self.parameters[name].kind is Parameter.VAR_POSITIONAL

    def _owner(self) -> str:
        return f"{self.target.name}.forward"


_NO_TENSORS = ("setting", "mask", "lengths")
"""Kinds of arguments that say something of the others."""
_ORDER: dict[Kind, int] = {"key": 1, "value": 2, "mask": 3}
"""Kinds that may be the tensor of an earlier one are drawn after it."""
_MOST_KEYS = 16
"""Keys that a dictionary is asked for, at most."""
_MOST_STARS = 4
"""Tensors that `*args` is tried with, at most."""
_OF_NONE = (TypeError, AttributeError, AssertionError, KeyError)
"""What is raised where a mask is None, or not there, and is used all the same."""


def _as_shape(tensor: Tensor) -> str:
    """A tensor as --input-shape gives one: `2x10x512:float32`."""
    return f"{'x'.join(map(str, tensor.shape))}:{str(tensor.dtype).removeprefix('torch.')}"


def _config_of(module: nn.Module) -> dict[str, Any]:
    config = getattr(module, "config", None)
    if isinstance(config, dict):
        return config
    return dict(vars(config)) if hasattr(config, "__dict__") else {}


def _first_int(source: Mapping[str, Any], *names: str) -> int | None:
    """The first of these names that is a size in the source, whatever its spelling."""
    known = {plain(name): value for name, value in source.items()}
    found = (known.get(plain(name)) for name in names)
    return next(
        (value for value in found if isinstance(value, int) and not isinstance(value, bool) and value > 0), None
    )


def _heads_of(module: nn.Module) -> int:
    """Return the heads of the first of torch's attentions in a module, which masks for each head have; else 1."""
    return next((part.num_heads for part in module.modules() if isinstance(part, nn.MultiheadAttention)), 1)
