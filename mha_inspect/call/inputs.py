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

from ..build.target import Target
from ..build.values import InputShape
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
from .learn_masks import MaskForm, learn_masks
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
    return _recipe(target, asked).call()


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
class _Recipe:
    """How to call a forward."""

    target: Target
    asked: Asked
    forward: Forward
    plans: Mapping[str, Plan]
    """What to draw, by name."""
    given: Mapping[str, Any]
    """Arguments that are there."""
    forms: tuple[MaskForm, ...] = ()
    """Masks whose meaning was learned."""
    notes: tuple[str, ...] = ()

    def values(self) -> dict[str, Any]:
        """Return the arguments by name, without masks: query, key and value are one where nothing tells them apart.

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

    def masks(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return masks by name, and the flags of which nothing tells how the forward takes their masks."""
        inputs = self.asked.inputs
        if self.target.masks is not None:
            return of_layer(self.forward, self.target, inputs, values), ()
        # Where its constructor took --causal, it has a mask of its own.
        module, is_typed = self.forward.module, "causal" in self.asked.flags.typed
        is_built = any(bool(getattr(module, name, False)) for name in ("causal", "is_causal", "masked"))
        inputs = replace(inputs, causal=inputs.causal and is_typed and not is_built)
        return masks_of(self.forward, inputs, values, self.free_masks(values))

    def free_masks(self, values: Mapping[str, Any]) -> list[str]:
        """Return the arguments that may take a mask, and that nobody gave one."""
        return [name for name in mask_arguments(self.forward.parameters) if values.get(name) is None]

    def call(self) -> Call:
        """Return a call of the forward."""
        forward, values = self.forward, self.values()
        values |= self.masks(values)[0]
        values |= {form.argument: form.mask(self.asked.inputs, forward.device) for form in self.forms}
        values = {**_switches(forward, self.asked.flags), **values}
        drawn = tuple(name for name in forward.in_order(self.plans) if self.plans[name].kind != "lengths")
        shapes = {
            name: f"{'x'.join(map(str, values[name].shape))}:{str(values[name].dtype).removeprefix('torch.')}"
            for name in drawn
            if not self.plans[name].is_given
        }
        return replace(forward.call(values), drawn=drawn, guessed=shapes, said=self.notes)

    def probe(self, about: Collection[str], *, whole: bool) -> Probed:
        """Run the forward once, and say what it does with these of its arguments."""
        values = self.values()
        call = self.forward.call(values)
        return probe(self.forward.module, call.args, call.kwargs, {name: values[name] for name in about}, whole=whole)


def _recipe(target: Target, asked: Asked) -> _Recipe:
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
    recipe = _Recipe(target, asked, forward, shaped, given, notes=notes)
    names = needed(forward, target, inputs, {*given, *shaped})
    if is_hugging_face(module):
        recipe = _as_configured(recipe, names)
        names = [name for name in names if name not in recipe.plans]
    recipe = _with_guesses(recipe, sizes, names)
    recipe = _laid_out(recipe, spec)
    values = recipe.values()
    masks, flags = recipe.masks(values)
    if not flags:
        return recipe

    def run(learned: Mapping[str, Tensor]) -> Subject:
        call = recipe.forward.call({**values, **masks, **learned})
        return replace(call.of(module), seed=asked.seed, grad=False)

    try:
        forms, said = learn_masks(recipe.forward, inputs, flags, recipe.free_masks(values), run)
    except SpecError as error:  # it may be laid out the other way
        raise SpecError(" ".join((str(error), *recipe.notes))) from None
    return replace(recipe, forms=tuple(forms), notes=(*recipe.notes, *said, *(form.words for form in forms)))


def _as_configured(recipe: _Recipe, names: list[str]) -> _Recipe:
    """Return the recipe with what the configuration of a model says of these arguments, and of those beside them."""
    module, shaped = recipe.forward.module, recipe.plans
    free = set(recipe.forward.parameters) - {*recipe.given, *shaped}

    def of(names: list[str]) -> _Recipe:
        return replace(recipe, plans={**plans_of(module, names, free, recipe.asked.inputs.seq_len), **shaped})

    alone = of(names)
    more = beside(alone.plans, free)
    if not more or alone.probe((), whole=True).error is None:
        return alone
    both = of([*names, *more])
    return both if both.probe((), whole=True).error is None else alone


def _with_guesses(recipe: _Recipe, sizes: Sizes, names: list[str]) -> _Recipe:
    """Return the recipe with plans for these arguments."""

    def having(plans: Mapping[str, Plan]) -> _Recipe:
        return replace(recipe, plans={**recipe.plans, **plans})

    def run(plans: Mapping[str, Plan], whole: bool) -> Probed:
        return having(plans).probe([n for n, plan in plans.items() if plan.kind != "lengths"], whole=whole)

    if not names or sizes.spec is not None:
        return having({name: sizes.plan(name) for name in names})
    return having(guessed(sizes, names, {*recipe.given, *recipe.plans}, run))


def _laid_out(recipe: _Recipe, spec: AttentionSpec | None) -> _Recipe:
    """Return the recipe with the batch first or not, and a sentence on that where it is not plain."""
    forward, asked = recipe.forward, recipe.asked
    plans = recipe.plans
    names = [n for n, plan in plans.items() if len(plan.axes) > 1 and plan.kind not in ("image", "mask", "lengths")]
    names += [n for n, value in recipe.given.items() if isinstance(value, Tensor) and value.dim() > 1]
    why = ""
    if "batch_first" in asked.flags.given:
        first = bool(asked.flags.values.get("batch_first", True))
    elif spec is not None:
        first = spec.batch_first
    else:
        first, why = (True, "") if is_hugging_face(forward.module) else batch_first_of(forward.module, names)
    recipe = replace(recipe, forward=replace(forward, batch_first=first))
    if not why or not names or asked.inputs.unbatched:
        return recipe
    embed = "" if all(plans[name].kind == "ids" for name in names if name in plans) else " embed"
    axes = f"batch seq{embed}" if first else f"seq batch{embed}"
    return replace(
        recipe, notes=(*recipe.notes, f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} `{axes}`: {why}")
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
