"""What a forward is called with: tensors that follow its signature, and what somebody said of them.

A layer of the catalog says how wide they are. Of a target a name says what an argument is (`vocabulary`), and a small
run says how wide it is and which axis is the batch (`probe`). --input-shape and --input say it outright, and come
first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..build.target import Target
from ..build.values import InputShape
from ..build.vocabulary import Flags, dashed
from ..errors import InputError, SpecError
from ..files.tensors import read_tensors
from ..layers import torch_mha
from ..layers.spec import InputSpec
from ..text import printable, shown
from .call import Call
from .drawing import Plan
from .finding import Finder, Guesses
from .forward import Forward, ForwardMasks
from .holders import Holder
from .hugging_face_inputs import is_hugging_face, ways_of
from .layout import MISTAKEN, TURN, Layout, batch_axes_in_words, batch_axis_in_words, layout_of
from .learned_masks import Learned
from .masks import Masks, is_torchs
from .probe import Evidence
from .triple import Triple, require_fit


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
    maker = _Maker(target, asked)
    call, inputs = maker.call(), asked.inputs.without_ones()
    if inputs is None or asked.shapes or asked.inputs.input is not None or asked.ids is not None:
        return call
    other = replace(asked, inputs=inputs, known=maker.known)
    return replace(call, without_ones=lambda module: make_call(replace(target, module=module), other))


class _Maker:
    """Works out the arguments of one forward."""

    def __init__(self, target: Target, asked: Asked) -> None:
        self.target, self.module, self.asked = target, target.module, asked
        self.known = asked.known or Known()
        self.spec = target.spec
        if self.spec is None and type(self.module) is nn.MultiheadAttention:
            self.spec = torch_mha.spec_of(self.module)
        self.forward = Forward(self.module, target.name)
        self.forward.holders |= self.known.holders
        self.forward.batch_first = self._told_layout()
        self.guesses = Guesses(target, self.forward, asked.inputs, self.spec, asked.seed, asked.shapes)
        self.said: list[str] = []

    def call(self) -> Call:
        """The arguments, worked out."""
        forward = self.forward
        shapes = forward.named(self.asked.shapes, "--input-shape")
        given = {**self.target.forward_settings, **self._given(), **self._from_text()}
        twice = [name for name in shapes if name in given]
        if twice:
            raise SpecError(f"--input-shape and --input (or --set) both give {twice[0]}. Drop one of the two.")
        plans = {name: self.guesses.of_shape(name, said) for name, said in shapes.items()}
        if not shapes and self.asked.inputs.input is None and self.asked.known is None:
            self.said += self.guesses.of_lazy()
        finder = Finder(self.guesses, given, plans)
        plans = plans | self._planned(self._needed(given, shapes), finder)
        self._lay_out(plans, given, runs=not finder.raises)
        values = self.guesses.drawn(plans, given)
        masks = ForwardMasks(forward, self._masks(), self.asked.seed)
        values |= masks.asked(values)
        self._switch(values)
        values = self._learned(forward.with_none(values), masks)
        drawn = tuple(name for name in forward.in_order(plans) if plans[name].kind != "lengths")
        return replace(
            forward.call(values),
            drawn=drawn,
            guessed={
                name: f"{'x'.join(map(str, values[name].shape))}:{str(values[name].dtype).removeprefix('torch.')}"
                for name in drawn
                if name not in shapes
            },
            said=(*(forward.holding(owner, values) for owner in forward.entered), *self.said),
        )

    # -- what was said ------------------------------------------------------------------------------------------------

    def _given(self) -> dict[str, Any]:
        """Tensors out of a file, or of another forward."""
        if self.asked.given is not None:
            return self._in_roles(self.asked.given)
        path = self.asked.inputs.input
        if path is None:
            return {}
        content, file = read_tensors(Path(path)), printable(path)
        held = {"": content} if isinstance(content, Tensor) else content
        if len(held) == 1 and next(iter(held)) not in self.forward.parameters:
            held = {"": next(iter(held.values()))}
        if self.spec is None:
            return {name: self._moved(own) for name, own in self.forward.named(held, shown(str(path))).items()}
        names = {"query", "key", "value"} if self.target.spec is not None else set(self.forward.parameters)
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
        if "value" not in self.forward.kinds.values() and key is not value:
            raise InputError(
                f"{self.target.made_from} makes keys and values from the same hidden states, and this input has a key "
                "and a value. Give one of them, or take a layer that has both: torch, split-heads, fold-heads, "
                "per-head, narrow or wide."
            )
        roles = {"query": query, "hidden": query, "key": key, "value": value, "other": None if key is query else key}
        return {name: roles[kind] for name, kind in self.forward.kinds.items() if kind in roles}

    def _from_text(self) -> dict[str, Any]:
        names = self.forward.parameters
        if self.asked.ids is not None and "input_ids" not in names:
            raise InputError(f"--text gives input_ids, which {self.forward.label} does not take: {', '.join(names)}.")
        return {} if self.asked.ids is None else {"input_ids": self._moved(self.asked.ids)}

    def _moved(self, tensor: Tensor) -> Tensor:
        forward = self.forward
        return tensor.to(device=forward.device, dtype=forward.dtype if tensor.is_floating_point() else None)

    # -- what is needed -----------------------------------------------------------------------------------------------

    def _needed(self, given: Mapping[str, Any], shapes: Mapping[str, Any]) -> list[str]:
        """Names of the tensors to draw."""
        forward = self.forward
        kinds, said = forward.kinds, {*given, *shapes, *(name.partition(".")[0] for name in shapes)}
        required = [n for n, p in forward.parameters.items() if p.default is Parameter.empty and n not in said]
        unsaid = [n for n in required if kinds[n] == "setting"]
        if unsaid:
            raise InputError(
                f"{forward.label} needs {unsaid[0]}, which is no tensor. Give it: --set {unsaid[0]}=VALUE."
            )
        needed = [n for n in required if kinds[n] != "mask"]
        if not needed and not said:
            main = getattr(self.module, "main_input_name", None)
            needed = [main] if main in forward.parameters else forward.tensors[:1]
        if self.asked.inputs.key_len is not None and not forward.encodes_and_decodes:
            second = [n for n, kind in kinds.items() if kind in ("key", "value", "other")]
            if not second:
                listed = ", ".join(forward.parameters)
                raise SpecError(f"--key-len has nothing to set: {forward.label} takes one sequence ({listed}).")
            others = [n for n in second if kinds[n] == "other"][:1] or second
            needed += [n for n in others if n not in needed and n not in said]
        return needed

    def _planned(self, names: list[str], finder: Finder) -> dict[str, Plan]:
        """Plans for the tensors that nobody said anything of."""
        forward, guesses = self.forward, self.guesses
        known: dict[str, Plan] = {}
        if is_hugging_face(self.module):
            free = set(forward.parameters) - set(finder.given) - set(finder.said)
            ways = [*ways_of(self.module, names, free, self.asked.inputs)]
            way, evidence = self.known.way, self.known.evidence
            drawn = any(not plan.dtype for plan in ways[0].values())  # of which the width may be another
            if self.asked.known is None and (drawn or len(ways) > 1):
                probed = ((at, finder.probe(own, whole=True)) for at, own in enumerate(ways))
                runs = ((at, one.evidence) for at, one in probed if one.error is None)
                way, evidence = next(runs, (0 if ways[-1] else len(ways) - 1, {}))
                self.known = replace(self.known, way=way, evidence=evidence)
            known = {n: _as_wide(plan, evidence.get(n)) for n, plan in ways[way].items()}
            names = list(dict.fromkeys((*names, *ways[0], *known)))
        guesses_of = {name: guesses.of(name) for name in names if name not in known}
        if self.spec is not None:
            return guesses_of
        if self.asked.known is not None:
            evidence = self.known.evidence
            return known | {n: guesses.corrected(n, guesses.of(n), evidence.get(n)) for n in self.known.names}
        if guesses_of or (forward.open_ended and not (forward.parameters or finder.said or finder.given)):
            finder.said = {**finder.said, **known}
            plans = finder.find(guesses_of)
            self.known = replace(self.known, names=tuple(plans), evidence=finder.evidence)
            return known | plans
        return known

    # -- layout and masks ---------------------------------------------------------------------------------------------

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

    def _lay_out(self, plans: Mapping[str, Plan], given: Mapping[str, Any], *, runs: bool) -> None:
        """Find whether the batch comes first, where nobody said so: by the words of the forward, or by what it does."""
        forward = self.forward
        if forward.batch_first is not None:
            return
        values = self.guesses.drawn(plans, given)
        names = [name for name, value in values.items() if isinstance(value, Tensor) and value.dim() > 1]
        names = [name for name in names if forward.kind(name) not in ("image", "mask", "lengths")]
        told = batch_axis_in_words(self.module, names)
        # Another inside that takes the sequence first says nothing of what goes into the whole.
        doubtful = any(getattr(module, "batch_first", None) is False for module in self.module.modules())

        def run(changed: Mapping[str, Tensor]) -> Any:
            call = forward.call(forward.with_none({**values, **changed}))
            with replace(call.of(self.module), seed=0, grad=False).apart() as own:
                return own.plain()

        layout = None
        untold = told is None and batch_axes_in_words(self.module) != {0}
        if (
            (untold or doubtful)
            and names
            and not self.asked.inputs.unbatched
            and runs
            and forward.device.type != "meta"
        ):
            layout = layout_of(run, {name: values[name] for name in names})
        if told is not None:
            first, others_meet = told[0] == 0, layout is not None and not layout.batch_first
            layout = Layout(first, f"{told[1]}." + ((MISTAKEN if others_meet else "") if first else f" {TURN}"))
        if layout is None:
            return
        self.known, forward.batch_first = replace(self.known, layout=layout), layout.batch_first
        if layout.batch_first and not (doubtful or layout.why.endswith(MISTAKEN)):
            return
        axes = "batch seq" if layout.batch_first else "seq batch"
        embed = " embed" if any(values[name].is_floating_point() for name in names) else ""
        self.said.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} `{axes}{embed}`: {layout.why}")

    def _masks(self) -> Masks:
        """The masks that were asked for, and how the forward may take them."""
        inputs = self.asked.inputs
        # Where its constructor took --causal, it has a mask of its own.
        built_causal = any(bool(getattr(self.module, name, False)) for name in ("causal", "is_causal", "masked"))
        causal = inputs.causal and "causal" in self.asked.flags.typed and not built_causal
        # Of the first of torch's attentions in it, which masks for each head have.
        heads = next((part.num_heads for part in self.module.modules() if isinstance(part, nn.MultiheadAttention)), 1)
        return Masks(
            self.module,
            self.target.masks,
            replace(inputs, causal=causal),
            self.forward.dtype,
            self.forward.device,
            self.forward.batch_first is not False,
            heads=heads if self.spec is None else self.spec.num_heads,
            blank=self.asked.blank,
            owner=self.target.made_from,
        )

    def _learned(self, values: dict[str, Any], masks: ForwardMasks) -> dict[str, Any]:
        """The arguments with the masks whose meaning has to be learned by running the forward."""
        if self.asked.known is not None:
            learned = tuple(one.at(masks.masks) for one in self.known.masks)
        else:
            learned = masks.learned(values)
            self.said += [one.words for one in learned]
        self.known = replace(self.known, masks=learned, holders=self.forward.holders)
        return {**values, **{one.argument: one.mask for one in learned if one.mask is not None}}

    def _switch(self, values: dict[str, Any]) -> None:
        """The switches of our own that torch's layer has, and some of the others."""
        flags = self.asked.flags
        of_flags = {"need_weights": ["need_weights", "output_attentions"], "average_weights": ["average_attn_weights"]}
        for flag, names in of_flags.items():
            name = next((name for name in names if name in self.forward.parameters), None)
            if flag in flags.given and name is not None:
                values.setdefault(name, bool(flags.values[flag]))
            elif flag in flags.given & flags.typed:
                raise SpecError(
                    f"{self.forward.label} has no argument {names[0]}: {dashed(flag)} is of no use to it. Drop it."
                )


def _as_wide(plan: Plan, evidence: Evidence | None) -> Plan:
    """The plan that a configuration tells, with the width that the forward takes."""
    if evidence is None or plan.dtype or evidence.kind != "width":
        return plan
    return replace(plan, shape=(*plan.shape[:-1], evidence.size))
