"""What a target's forward is called with: tensors that follow its signature, and what somebody said of them.

A name says what an argument is (`vocabulary`), a small run says how wide it is (`probe`). --input-shape and
--input say it outright, and come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, SpecError
from ..layers import torch_mha
from ..record.arguments import described
from ..text import did_you_mean, printable, shown
from .call import Call
from .constructor import signature_of
from .drawing import Plan, draw, generator_of
from .files import read_tensors
from .layer_inputs import require_fit
from .masks import masks_of
from .probe import Evidence, Probed, probe
from .spec import InputSpec
from .target import Target
from .values import InputShape
from .vocabulary import ALIASES, Flags, Kind, dashed, kind_of, plain

_UNUSUAL = 37
"""A width that nothing has: whatever takes it, does not look at it."""


@dataclass(frozen=True)
class Asked:
    """What was asked for the inputs."""

    inputs: InputSpec
    flags: Flags = field(default_factory=Flags)
    shapes: Mapping[str, InputShape] = field(default_factory=dict)
    seed: int = 0
    ids: Tensor | None = None
    """Tokens of a text, `batch seq`: the forward's `input_ids`."""


def make_call(target: Target, asked: Asked) -> Call:
    """The arguments of the target's forward.

    Raises:
        InputError: an argument is needed that nothing tells, or a file does not fit.
        SpecError: a name is none of the forward's, or a flag is of no use to it.
    """
    call, other = _Maker(target, asked).call(), _without_ones(asked)
    if other is None:
        return call
    return replace(call, without_ones=lambda module: _Maker(replace(target, module=module), other).call())


def _without_ones(asked: Asked) -> Asked | None:
    """The same with another size in the place of each that is one; None where none is, or inputs were given."""
    inputs = None if asked.shapes or asked.inputs.input is not None else asked.inputs.without_ones()
    return None if inputs is None else replace(asked, inputs=inputs, ids=None)


class _Maker:
    """Works out the arguments of one forward."""

    def __init__(self, target: Target, asked: Asked) -> None:
        self.target, self.module, self.asked = target, target.module, asked
        every = signature_of(self.module.forward)
        self.parameters = {n: p for n, p in every.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        self.open_ended = any(p.kind is Parameter.VAR_KEYWORD for p in every.values())
        self.nameless = not self.parameters and any(p.kind is Parameter.VAR_POSITIONAL for p in every.values())
        if self.nameless:
            self.parameters = {"x": Parameter("x", Parameter.POSITIONAL_ONLY)}
        self.kinds = {n: kind_of(p) for n, p in self.parameters.items()}
        floating = next((p for p in self.module.parameters() if p.is_floating_point()), None)
        self.dtype = torch.float32 if floating is None else floating.dtype
        first = next(self.module.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device
        self.batch_first = self._is_batch_first()
        self.generator = generator_of(asked.seed)

    def call(self) -> Call:
        """The arguments, worked out."""
        shapes = self._named(self.asked.shapes, "--input-shape")
        given: dict[str, Any] = {**self.target.forward_settings, **self._from_file(), **self._from_text()}
        twice = [name for name in shapes if name in given]
        if twice:
            raise SpecError(f"--input-shape and --input (or --set) both give {twice[0]}. Drop one of the two.")
        needed = self._needed(given, shapes)
        plans = {name: self._plan_of_shape(name, shapes[name]) for name in shapes}
        plans |= self._planned([name for name in needed if name not in shapes], given, plans)
        values = {**given, **self._draw(plans, given)}
        values |= masks_of(self.module, self.parameters, values, self.asked.inputs, self.asked.flags, self.device)
        for name, parameter in self.parameters.items():
            # A mask that was not given is no mask, and what the forward does without is none.
            if parameter.default is Parameter.empty and name not in values:
                values[name] = None
        self._switch(values)
        call = self._in_order(values)
        drawn = tuple(name for name in (*call.kwargs, *self.parameters) if name in plans)
        return replace(
            call,
            drawn=tuple(dict.fromkeys(drawn)),
            guessed=tuple(dict.fromkeys(name for name in drawn if name not in shapes)),
        )

    # -- what was said ------------------------------------------------------------------------------------------------

    def _named(self, said: Mapping[str, Any], flag: str) -> dict[str, Any]:
        """What was said, by the names of the forward; one without a name is the first argument's."""
        tensors = [n for n in self.parameters if self.kinds[n] not in ("setting", "mask")] or list(self.parameters)
        named = {}
        for name, value in said.items():
            if name == "" and not tensors:
                raise SpecError(f"{self._owner()} takes no argument: {flag} has nothing to give a tensor to.")
            key = name or tensors[0]
            if key not in self.parameters and not self.open_ended:
                listed = ", ".join(self.parameters)
                raise SpecError(
                    f"{flag} names {shown(key)}, which is no argument of {self._owner()}: {listed}."
                    f"{did_you_mean(key, self.parameters)}"
                )
            named[key] = value
        return named

    def _from_file(self) -> dict[str, Any]:
        path = self.asked.inputs.input
        if path is None:
            return {}
        content = read_tensors(Path(path))
        held = {"": content} if isinstance(content, Tensor) else content
        if len(held) == 1 and next(iter(held)) not in self.parameters:
            held = {"": next(iter(held.values()))}
        given = self._named(held, f"{shown(str(path))}")
        query = given.get("query")
        if isinstance(self.module, nn.MultiheadAttention) and query is not None:
            key = given.get("key", query)
            inputs = replace(self.asked.inputs, unbatched=query.dim() == 2)
            spec = torch_mha.spec_of(self.module)
            require_fit(printable(path), (query, key, given.get("value", key)), spec, inputs)
        return {name: self._moved(tensor) for name, tensor in given.items()}

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
        kind = self.kinds.get(name, "unknown")
        if said.dtype is None:
            return Plan(kind, said.shape, "int64" if kind == "ids" else "", self._vocabulary())
        whole = said.dtype.startswith("int")
        return Plan("ids" if whole else "unknown", said.shape, said.dtype, self._vocabulary() if whole else 2)

    # -- what is needed -----------------------------------------------------------------------------------------------

    def _needed(self, given: Mapping[str, Any], shapes: Mapping[str, Any]) -> list[str]:
        """Names of the tensors to draw."""
        required = [n for n, p in self.parameters.items() if p.default is Parameter.empty]
        unsaid = [n for n in required if self.kinds[n] == "setting" and n not in given and n not in shapes]
        if unsaid:
            raise InputError(
                f"{self._owner()} needs {unsaid[0]}, which is no tensor. Give it: --set {unsaid[0]}=VALUE."
            )
        needed = [n for n in required if self.kinds[n] not in ("setting", "mask") and n not in given]
        if not needed and not given and not shapes:
            tensors = [n for n in self.parameters if self.kinds[n] not in ("setting", "mask")]
            main = getattr(self.module, "main_input_name", None)
            needed = [main] if main in self.parameters else tensors[:1]
        if "key_len" in self.asked.flags.given and not self._encodes_and_decodes(needed):
            second = [n for n in self.parameters if self.kinds[n] in ("key", "value", "other")]
            if not second:
                raise SpecError(
                    f"--key-len has nothing to set: {self._owner()} takes one sequence ({', '.join(self.parameters)})."
                )
            others = [n for n in second if self.kinds[n] == "other"][:1] or second
            needed += [n for n in others if n not in needed and n not in given and n not in shapes]
        return needed

    def _encodes_and_decodes(self, names: list[str]) -> bool:
        return any(plain(n) in ("tgt", "trg", "decoderinputids", "target") for n in (*names, *self.parameters))

    def _planned(self, names: list[str], given: Mapping[str, Any], said: Mapping[str, Plan]) -> dict[str, Plan]:
        """Plans for the tensors that nobody said anything of."""
        from .hugging_face_inputs import is_hugging_face, plans_of

        if is_hugging_face(self.module):
            free = set(self.parameters) - set(given) - set(said)
            known = self._with_more(plans_of(self.module, names, free, self.asked.inputs), given, said, free)
            names = list(dict.fromkeys((*names, *known)))
            if "input_values" in known and self._probe(known, given, said, whole=True).error is not None:
                # A waveform is what it is for most; what takes something else says so when it runs.
                known = {}
        else:
            known = {}
        open_names = [name for name in names if name not in known]
        plans = {name: self._first_guess(name) for name in open_names}
        if not plans:
            return dict(known)
        return {**known, **self._probed(plans, given, {**said, **known})}

    def _with_more(
        self, plans: dict[str, Plan], given: Mapping[str, Any], said: Mapping[str, Plan], free: set[str]
    ) -> dict[str, Plan]:
        """The plans, and what else comes with a text or an image where the model does not do without."""
        from .hugging_face_inputs import SOMETIMES, plans_of

        more = [name for name in SOMETIMES if name in free - set(plans)]
        if not plans or not more or self._probe(plans, given, said, whole=True).error is None:
            return plans
        both = plans | plans_of(self.module, more, free, self.asked.inputs)
        return both if self._probe(both, given, said, whole=True).error is None else plans

    def _first_guess(self, name: str) -> Plan:
        kind = self.kinds.get(name, "unknown")
        if kind == "ids":
            return self._ids(name)
        if kind == "image":
            return self._image(None)
        return self._sequence(kind, name, self._width(kind))

    def _sequence(self, kind: Kind, name: str, width: int) -> Plan:
        return Plan(kind, (*self._batch_and_length(name), width))

    def _ids(self, name: str, vocabulary: int | None = None) -> Plan:
        return Plan("ids", self._batch_and_length(name), "int64", vocabulary or self._vocabulary())

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

    def _batch_and_length(self, name: str) -> tuple[int, ...]:
        inputs = self.asked.inputs
        key_len = inputs.seq_len if inputs.key_len is None else inputs.key_len
        encodes = self._encodes_and_decodes([]) and plain(name) in ("src", "source", "inputids", "xids", "srcids")
        length = key_len if self.kinds.get(name) in ("key", "value", "other") or encodes else inputs.seq_len
        if inputs.unbatched:
            return (length,)
        return (inputs.batch, length) if self.batch_first else (length, inputs.batch)

    # -- evidence -----------------------------------------------------------------------------------------------------

    def _probed(self, plans: dict[str, Plan], given: Mapping[str, Any], said: Mapping[str, Plan]) -> dict[str, Plan]:
        """The plans, corrected by what the module does with them."""
        # An argument of an unknown name that stands behind others may be let out, or is one that somebody must give.
        extra = [n for n in list(plans) if self.kinds.get(n) == "unknown" and (len(plans) > 1 or said or given)]
        extra = [n for n in extra if n != next(iter(self.parameters))]
        certain = {n: plan for n, plan in plans.items() if n not in extra}
        attempts = [certain, plans] if extra else [plans]
        loose = [n for n, plan in plans.items() if plan.kind in ("hidden", "unknown", "query")]
        for other in (self._ids, lambda _: self._image(None)) if loose else ():
            attempts += [
                {**attempt, **{n: other(n) for n in loose if n in attempt}} for attempt in attempts[: 1 + bool(extra)]
            ]
        best: tuple[int, dict[str, Plan], Probed] | None = None
        for attempt in attempts:
            probed = self._probe(attempt, given, said, whole=bool(extra))
            known = len(probed.evidence) if probed.error is not None else len(plans) + 1
            if best is None or known > best[0]:
                best = (known, attempt, probed)
            if known >= len(plans):
                break
        assert best is not None
        _, chosen, probed = best
        firm = {n for n, evidence in probed.evidence.items() if evidence.firm}
        untold = [n for n in extra if n not in firm and (n in chosen or probed.error is not None)]
        if untold:
            name = untold[0]
            raise InputError(
                f"{self._owner()} needs {name}, and nothing tells what that is. "
                f"Give it: --input-shape {name}=2x10x512:float32 with its own sizes, or --input FILE with {name} in it."
            )
        return {name: self._corrected(name, plan, probed.evidence.get(name)) for name, plan in chosen.items()}

    def _probe(
        self, plans: Mapping[str, Plan], given: Mapping[str, Any], said: Mapping[str, Plan], *, whole: bool
    ) -> Probed:
        state = self.generator.get_state()
        values = {**given, **self._draw({**said, **plans}, given)}
        self.generator.set_state(state)
        for name, parameter in self.parameters.items():
            if parameter.default is Parameter.empty:
                values.setdefault(name, None)
        call = self._in_order(values)
        return probe(self.module, call.args, call.kwargs, {name: values[name] for name in plans}, whole=whole)

    def _corrected(self, name: str, plan: Plan, evidence: Evidence | None) -> Plan:
        if evidence is None:
            return plan
        if evidence.kind == "ids":
            return self._ids(name, evidence.size)
        if evidence.kind == "image":
            return self._image(evidence.size)
        return replace(plan, shape=(*plan.shape[:-1], evidence.size))

    def _width(self, kind: Kind) -> int:
        flags = {"key": ("kdim", "embed_dim"), "value": ("vdim", "embed_dim"), "other": ("kdim", "embed_dim")}
        for flag in flags.get(kind, ("embed_dim",)):
            for source in (self.target.arguments, vars(self.module), _config_of(self.module)):
                width = _first_int(source, *ALIASES[flag])
                if width is not None:
                    return width
        return next((m.in_features for m in self.module.modules() if isinstance(m, nn.Linear)), _UNUSUAL)

    def _vocabulary(self) -> int:
        names = ("vocab_size", "n_vocab", "num_tokens", "num_embeddings", "vocabulary_size", "src_vocab_size")
        for source in (self.target.arguments, vars(self.module), _config_of(self.module)):
            size = _first_int(source, *names)
            if size is not None:
                return size
        return next((m.num_embeddings for m in self.module.modules() if isinstance(m, nn.Embedding)), 2)

    def _is_batch_first(self) -> bool:
        if "batch_first" in self.asked.flags.given:
            return bool(self.asked.flags.values.get("batch_first", True))
        owner = next((m for m in self.module.modules() if isinstance(getattr(m, "batch_first", None), bool)), None)
        return True if owner is None else bool(owner.batch_first)

    # -- tensors ------------------------------------------------------------------------------------------------------

    def _draw(self, plans: Mapping[str, Plan], given: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors; query, key and value are one tensor where nothing tells them apart."""
        drawn: dict[str, Tensor] = {}
        apart = "key_len" in self.asked.flags.given
        for name, plan in sorted(plans.items(), key=lambda item: _ORDER.get(item[1].kind, 0)):
            shared = {"key": () if apart else ("query",), "value": ("key",) if apart else ("key", "query")}
            like = next(
                (
                    tensor
                    for kind in shared.get(plan.kind, ())
                    for other, tensor in {**given, **drawn}.items()
                    if isinstance(tensor, Tensor) and self.kinds.get(other) == kind and name not in self.asked.shapes
                    if tensor.shape[-1] == plan.shape[-1] and tensor.dim() == len(plan.shape)
                ),
                None,
            )
            drawn[name] = draw(plan, self.dtype, self.device, self.generator) if like is None else like
        return drawn

    def _switch(self, values: dict[str, Any]) -> None:
        """The two switches of our own that torch's layer has."""
        flags = self.asked.flags
        for flag, name in (("need_weights", "need_weights"), ("average_weights", "average_attn_weights")):
            if flag not in flags.given:
                continue
            if name in self.parameters:
                values.setdefault(name, bool(flags.values[flag]))
            elif flag in flags.typed:
                raise SpecError(f"{self._owner()} has no argument {name}: {dashed(flag)} is of no use to it. Drop it.")

    def _in_order(self, values: dict[str, Any]) -> Call:
        ordered = {name: values[name] for name in self.parameters if name in values}
        ordered |= {name: value for name, value in values.items() if name not in ordered}
        places = [n for n, p in self.parameters.items() if p.kind is Parameter.POSITIONAL_ONLY and n in ordered]
        return Call(
            tuple(ordered[name] for name in places),
            {name: value for name, value in ordered.items() if name not in places},
            described(ordered),
        )

    def _owner(self) -> str:
        return f"{self.target.name}.forward"


_ORDER: dict[Kind, int] = {"key": 1, "value": 2, "mask": 3}
"""Kinds that may be the tensor of an earlier one are drawn after it."""


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
