"""What a forward is called with: tensors that follow its signature, and what somebody said of them.

A layer of the catalog says how wide they are. Of a target a name says what an argument is (`vocabulary`), and one run
says how wide it is (`guess`, `probe`). --input-shape and --input say it outright, and come first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..build.arguments import InputShape
from ..build.target import Target
from ..build.vocabulary import Flags, Kind, dashed, flag_of
from ..errors import InputError, SpecError
from ..files.tensors import read_tensors
from ..layers.spec import AttentionSpec, InputSpec, spec_of
from ..running.subject import Subject
from ..text import printable, shown
from .call import Call
from .drawing import Plan, generator_of
from .forward import Forward
from .guess import Sizes, guessed, needed
from .hugging_face import beside, is_hugging_face, plans_of
from .layout import batch_first_of
from .learn_masks import learn_masks
from .masks import mask_arguments, masks_of, of_layer
from .part import call_with
from .probe import Probed, probe
from .triple import Triple, require_fit

_ORDER: dict[Kind, int] = {"key": 1, "value": 2, "mask": 3}
"""Kinds that may be the tensor of an earlier one are drawn after it."""
_OF_INPUTS = ("batch", "seq_len", "key_len", "unbatched", "input", "input_shape", "text", "attn_mask", "padding")
"""Flags that make the inputs."""


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


def make_call(target: Target, asked: Asked) -> Call:
    """Make the arguments of the target's forward.

    Raises:
        InputError: an argument is needed that nothing tells, or a file does not fit.
        SpecError: a name is none of the forward's, or a flag is of no use to it.
    """
    if target.call is not None:
        return _returned_call(target, asked)
    draft = _draft(target, asked)
    forward, values = draft.forward, draft.values()
    masks, notes = _masks(draft, target, values)
    plans = {name: draft.plans[name] for name in forward.in_order(draft.plans)}
    values = {**_switches(forward, asked.flags), **values, **masks}
    shapes = {
        name: f"{'x'.join(map(str, values[name].shape))}:{str(values[name].dtype).removeprefix('torch.')}"
        for name, plan in plans.items()
        if not plan.is_given and plan.kind != "lengths"
    }
    drawn = tuple(name for name, plan in plans.items() if plan.kind != "lengths")
    return replace(forward.call(values), drawn=drawn, guessed=shapes, said=(*draft.notes, *notes))


def _returned_call(target: Target, asked: Asked) -> Call:
    """Return a call with the arguments that came with the module. Raises `SpecError` where others are asked for."""
    assert target.call is not None
    unheard = asked.flags.typed - {flag_of(name) for name in target.arguments}
    typed = next((flag for flag in _OF_INPUTS if flag in unheard), None)
    if typed is not None:
        raise SpecError(
            f"{shown(target.made_from)} returns what its forward is called with, and {dashed(typed)} would make "
            "another input. Drop it."
        )
    args, kwargs = target.call
    call = call_with(target.module, args, {**kwargs, **target.forward_settings}, "returned with the module")
    said = f"--causal made no mask: {shown(target.made_from)} returns what its forward is called with."
    return replace(call, said=(said,) if "causal" in unheard else ())


@dataclass(frozen=True)
class _Draft:
    """What is known of the arguments of a forward, but for masks."""

    asked: Asked
    forward: Forward
    plans: Mapping[str, Plan]
    """What to draw, by name."""
    given: Mapping[str, Any]
    """Arguments that are there."""
    notes: tuple[str, ...] = ()

    def values(self) -> dict[str, Any]:
        """Return the arguments by name: query, key and value are one tensor where nothing tells them apart.

        As often as it is called, they are the same.
        """
        inputs, forward, values = self.asked.inputs, self.forward, dict(self.given)
        generator = generator_of(self.asked.seed)
        for name, plan in sorted(self.plans.items(), key=lambda item: _ORDER.get(item[1].kind, 0)):
            like: Kind = "key" if plan.kind == "value" and "key" in forward.kinds else "query"
            is_apart = plan.is_given or (inputs.key_len is not None and like == "query")
            shape = plan.shape(inputs)
            alike = [] if plan.kind not in ("key", "value") or is_apart else values.items()
            tensors = [t for n, t in alike if forward.kind(n) == like and isinstance(t, Tensor)]
            fitting = (t for t in tensors if t.dim() == len(shape) and t.shape[-1] == shape[-1])
            tensor = next(fitting, None)
            if tensor is None:
                tensor = plan.draw(inputs, forward.dtype, forward.device, generator)
                # Always drawn batch first: the content of a row does not hang on the layout.
                if plan.is_sequence and not forward.batch_first:
                    tensor = tensor.transpose(0, 1).contiguous()
            values[name] = tensor
        return values

    def probe(self, about: Collection[str], *, whole: bool) -> Probed:
        """Run the forward once, and say what it does with these of its arguments."""
        values = self.values()
        call = self.forward.call(values)
        return probe(self.forward.module, call.args, call.kwargs, {name: values[name] for name in about}, whole=whole)


def _draft(target: Target, asked: Asked) -> _Draft:
    """Find out how to call a forward. Raises as `make_call`."""
    module, inputs = target.module, asked.inputs
    spec = target.spec or (spec_of(module) if type(module) is nn.MultiheadAttention else None)
    forward = Forward.of(module, target.name)
    sizes = Sizes(target, forward, spec, inputs.unbatched)
    shapes = forward.named(asked.shapes, "--input-shape")
    given = {**target.forward_settings, **_of_file(target, forward, asked, spec), **_of_text(forward, asked)}
    twice = next((name for name in shapes if name in given), None)
    if twice is not None:
        raise SpecError(f"--input-shape and --input (or --set) both give {twice}. Drop one of the two.")
    shaped = {name: sizes.of_shape(name, shape) for name, shape in shapes.items()}
    notes = () if shapes or inputs.input is not None else sizes.of_lazy()
    draft = _Draft(asked, forward, shaped, given, notes)
    names = needed(forward, target, inputs, {*given, *shaped})
    if is_hugging_face(module):
        draft = _as_configured(draft, names)
        names = [name for name in names if name not in draft.plans]
    return _laid_out(_with_guesses(draft, sizes, names), spec)


def _masks(draft: _Draft, target: Target, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return masks by name, and what was learned of them, as sentences. Raises as `make_call`."""
    asked, forward = draft.asked, draft.forward
    if target.masks is not None:
        return of_layer(forward, target, asked.inputs, values), []
    # Where its constructor took --causal, it has a mask of its own.
    is_built = any(bool(getattr(target.module, name, False)) for name in ("causal", "is_causal", "masked"))
    causal = asked.inputs.causal and "causal" in asked.flags.typed and not is_built
    inputs = replace(asked.inputs, causal=causal)
    free = [name for name in mask_arguments(forward.parameters) if values.get(name) is None]
    masks, flags = masks_of(forward, inputs, values, free)
    if not flags:
        return masks, []

    def run(learned: Mapping[str, Tensor]) -> Subject:
        call = forward.call({**values, **masks, **learned})
        return replace(call.of(target.module), seed=asked.seed, grad=False)

    try:
        learned, notes = learn_masks(forward, inputs, flags, [name for name in free if name not in masks], run)
    except SpecError as error:  # it may be laid out the other way
        raise SpecError(" ".join((str(error), *draft.notes))) from None
    return {**masks, **learned}, notes


def _as_configured(draft: _Draft, names: list[str]) -> _Draft:
    """Return the draft with what the configuration of a model says of these arguments, and of those beside them."""
    module, shaped = draft.forward.module, draft.plans
    free = set(draft.forward.parameters) - {*draft.given, *shaped}

    def of(names: list[str]) -> _Draft:
        return replace(draft, plans={**plans_of(module, names, free, draft.asked.inputs.seq_len), **shaped})

    alone = of(names)
    more = beside(alone.plans, free)
    if not more or alone.probe((), whole=True).error is None:
        return alone
    both = of([*names, *more])
    return both if both.probe((), whole=True).error is None else alone


def _with_guesses(draft: _Draft, sizes: Sizes, names: list[str]) -> _Draft:
    """Return the draft with plans for these arguments."""

    def having(plans: Mapping[str, Plan]) -> _Draft:
        return replace(draft, plans={**draft.plans, **plans})

    def run(plans: Mapping[str, Plan], whole: bool) -> Probed:
        return having(plans).probe([n for n, plan in plans.items() if plan.kind != "lengths"], whole=whole)

    if not names or sizes.spec is not None:
        return having({name: sizes.plan(name) for name in names})
    return having(guessed(sizes, names, {*draft.given, *draft.plans}, run))


def _laid_out(draft: _Draft, spec: AttentionSpec | None) -> _Draft:
    """Return the draft with the batch first or not, and a sentence on that where it is not plain."""
    forward, asked = draft.forward, draft.asked
    plans = draft.plans
    names = [n for n, plan in plans.items() if len(plan.axes) > 1 and plan.kind not in ("image", "mask", "lengths")]
    names += [n for n, value in draft.given.items() if isinstance(value, Tensor) and value.dim() > 1]
    why = ""
    if "batch_first" in asked.flags.given:
        first = bool(asked.flags.values.get("batch_first", True))
    elif spec is not None:
        first = spec.batch_first
    else:
        first, why = (True, "") if is_hugging_face(forward.module) else batch_first_of(forward.module, names)
    draft = replace(draft, forward=replace(forward, batch_first=first))
    if not why or not names or asked.inputs.unbatched:
        return draft
    embed = "" if all(plans[name].kind == "ids" for name in names if name in plans) else " embed"
    axes = f"batch seq{embed}" if first else f"seq batch{embed}"
    return replace(
        draft, notes=(*draft.notes, f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} `{axes}`: {why}")
    )


# -- what was said -----------------------------------------------------------------------------------------------------


def _of_file(target: Target, forward: Forward, asked: Asked, spec: AttentionSpec | None) -> dict[str, Any]:
    """Return tensors out of a file, or of another forward, by the names of the forward."""
    if asked.given is not None:
        return _in_roles(target, forward, asked.given)
    path = asked.inputs.input
    if path is None:
        return {}
    content, file = read_tensors(Path(path)), printable(path)
    tensors = {"": content} if isinstance(content, Tensor) else content
    if len(tensors) == 1 and next(iter(tensors)) not in forward.parameters:
        tensors = {"": next(iter(tensors.values()))}
    if spec is None:
        return {name: _moved(forward, tensor) for name, tensor in forward.named(tensors, shown(str(path))).items()}
    names = {"query", "key", "value"} if target.spec is not None else set(forward.parameters)
    tensors = {"query": tensors[""]} if "" in tensors else tensors
    if "query" not in tensors or not set(tensors) <= names:
        listed = ", ".join(map(repr, tensors)) or "nothing"
        raise InputError(
            f"{file} holds {listed}: the names query, key and value are meant, and query must be among them."
        )
    query = tensors["query"]
    key = tensors.get("key", query)
    triple = query, key, tensors.get("value", key)
    unbatched = asked.inputs.unbatched if target.spec is not None else query.dim() == 2
    require_fit(file, triple, spec, unbatched=unbatched)
    rest = {name: _moved(forward, t) for name, t in tensors.items() if name not in ("query", "key", "value")}
    return _in_roles(target, forward, triple) | rest


def _in_roles(target: Target, forward: Forward, triple: Triple) -> dict[str, Any]:
    """Return query, key and value by the names of the forward; one tensor that serves as several stays one.

    Raises `InputError` where key and value are two, and the forward takes one sequence for both.
    """
    moved = {id(tensor): _moved(forward, tensor).contiguous() for tensor in triple}
    query, key, value = (moved[id(tensor)] for tensor in triple)
    if "value" not in forward.kinds and key is not value:
        raise InputError(
            f"{target.made_from} makes keys and values from the same hidden states, and this input has a key "
            "and a value. Give one of them, or take a layer that has both: torch, split-heads, fold-heads, "
            "per-head, narrow or wide."
        )
    roles = {"query": query, "hidden": query, "key": key, "value": value, "other": None if key is query else key}
    return {name: roles[forward.kind(name)] for name in forward.parameters if forward.kind(name) in roles}


def _of_text(forward: Forward, asked: Asked) -> dict[str, Any]:
    if asked.ids is None:
        return {}
    if "input_ids" not in forward.parameters:
        listed = ", ".join(forward.parameters)
        raise InputError(f"--text gives input_ids, which {forward.label} does not take: {listed}.")
    return {"input_ids": _moved(forward, asked.ids)}


def _moved(forward: Forward, tensor: Tensor) -> Tensor:
    return tensor.to(device=forward.device, dtype=forward.dtype if tensor.is_floating_point() else None)


def _switches(forward: Forward, flags: Flags) -> dict[str, bool]:
    """Return the switches that torch's layer has, and some of the others. Raises `SpecError` for one of no use."""
    of_flags = {"need_weights": ["need_weights", "output_attentions"], "average_weights": ["average_attn_weights"]}
    switches = {}
    for flag, names in of_flags.items():
        name = next((name for name in names if name in forward.parameters), None)
        if flag in flags.given and name is not None:
            switches[name] = bool(flags.values[flag])
        elif flag in flags.given & flags.typed:
            raise SpecError(f"{forward.label} has no argument {names[0]}: {dashed(flag)} is of no use to it. Drop it.")
    return switches
