"""The arguments of a forward: tensors that follow its signature and the user's options.

The name of an argument gives its kind (`vocabulary`); the module, or else one run, gives its width (`guess`, `probe`).
--input-shape and --input come first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, SpecError
from ..files.tensors import read_tensors
from ..layers.spec import InputSpec
from ..making.settings import InputShape
from ..making.target import Target
from ..making.vocabulary import ALIASES, Flags, Kind, flag_of, typed_as
from ..text import printable, shown
from .call import Call, Forward, Plan
from .guess import Guesser, Sizes, configured_plans, is_hugging_face, needed
from .layout import Layout, layout_by_layers, layout_of
from .masks import masks_of
from .part import call_with
from .probe import Probed, probe

_STREAM = 0x6D68612D696E70
"""Added to the seed of the inputs, so that they differ from the numbers of the parameters."""
_ORDER: dict[Kind, int] = {"key": 1, "value": 2, "mask": 3}
"""The order of drawing: a kind that may share the tensor of another kind comes after it."""
_OF_INPUTS = ("batch", "seq_len", "key_len", "unbatched", "input", "input_shape", "attn_mask", "padding")
"""Flags that set the inputs."""


@dataclass(frozen=True)
class Asked:
    """The user's settings of the inputs."""

    inputs: InputSpec
    flags: Flags = field(default_factory=Flags)
    shapes: Mapping[str, InputShape] = field(default_factory=dict)
    seed: int = 0


def make_call(target: Target, asked: Asked) -> Call:
    """Make the arguments of the target's forward.

    Raises `InputError` if an argument cannot be guessed or a file does not fit, `SpecError` for a useless option.
    """
    if target.call is not None:
        return _returned_call(target, asked)
    forward = Forward.of(target.module, target.name)
    # For the runs that show the inputs, before it is known which of them are sequences.
    forward = replace(forward, batch_first=_layout(forward, forward.tensors, asked).batch_first)
    lengths = (asked.inputs.seq_len, asked.inputs.keys)
    sizes = Sizes(target, forward, asked.inputs.unbatched, lengths)
    shapes = forward.named(asked.shapes, "--input-shape")
    given = dict(target.forward_settings)
    if asked.inputs.input is not None:
        given.update(_of_file(sizes, asked.inputs.input))
    for name in shapes:
        if name in given:
            raise SpecError(f"--input-shape and --input (or --set) both give {name}. Drop one of the two.")
    notes = () if shapes or asked.inputs.input else sizes.lazy_note()
    drawing = _Drawing(forward, given, asked)
    plans = _plans(sizes, drawing, shapes)
    sequences = _sequences(plans, given)
    layout = _layout(forward, sequences, asked)
    if layout.is_assumed:
        layout = drawing.layout_by_layers(plans)
    notes += _note_on_layout(layout, sequences, plans, asked)
    notes += _note_without_batch(plans, asked)
    forward = replace(forward, batch_first=layout.batch_first)
    values = replace(drawing, forward=forward).values(plans)
    try:
        masks = masks_of(forward, target, _with_causal(target, asked), values, asked.seed)
    except SpecError as error:  # another layout may be the solution
        raise type(error)(" ".join((str(error), *notes))) from None
    call = forward.call({**values, **masks.by_name})
    # An argument without a name comes first, then the others in the order of the signature.
    drawn = [name for name in plans if name not in forward.parameters]
    drawn += [name for name in forward.parameters if name in plans]
    guessed: dict[str, str] = {}
    for name in drawn:
        if not plans[name].is_given:
            guessed[name] = _written(values[name])
    return replace(
        call,
        drawn=tuple(drawn),
        guessed=guessed,
        missed=tuple(masks.missed),
        drawn_width=sizes.drawn_width(plans.values()),
        said=(*notes, *masks.notes),
    )


def _note_without_batch(plans: Mapping[str, Plan], asked: Asked) -> tuple[str, ...]:
    """Return that a tensor of tokens was drawn without a batch: it is where the forward raised on one with a batch."""
    if asked.inputs.unbatched:
        return ()
    for name, plan in plans.items():
        if plan.kind == "unknown" and not plan.is_given and "batch" not in plan.axes:
            return (f"{name} was drawn without a batch: with one the forward raises.",)
    return ()


def _with_causal(target: Target, asked: Asked) -> InputSpec:
    """Return the inputs; causal ones for a target only if --causal was typed, and the module does not mask by itself.

    A setting of its constructor may have taken --causal.
    """
    inputs = asked.inputs
    if target.layer is not None or not inputs.causal:
        return inputs
    if "causal" not in asked.flags.typed:
        return replace(inputs, causal=False)
    is_built_causal = any(getattr(target.module, name, False) for name in ALIASES["causal"])
    return replace(inputs, causal=not is_built_causal)


def _has_named_sizes(target: Target) -> bool:
    """Return whether the sizes of a module's arguments follow from its settings, without a run."""
    return target.layer is not None or type(target.module) is nn.MultiheadAttention


def _written(tensor: Tensor) -> str:
    """Return the shape and dtype of a tensor as --input-shape takes them: `2x10x512:float32`."""
    shape = "x".join(map(str, tensor.shape))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{shape}:{dtype}"


def _returned_call(target: Target, asked: Asked) -> Call:
    """Return a call with the arguments returned with the module. Raises `SpecError` if the user asks for others."""
    assert target.call is not None
    unused = asked.flags.typed - {flag_of(name) for name in target.arguments}
    for flag in _OF_INPUTS:
        if flag in unused:
            raise SpecError(
                f"{shown(target.made_from)} returns its own inputs, so {typed_as(flag)} does not apply. Drop it."
            )
    args, kwargs = target.call
    call = call_with(target.module, args, {**kwargs, **target.forward_settings}, "returned with the module")
    if "causal" not in unused:
        return call
    made_from = shown(target.made_from)
    note = f"--causal made no mask, because {made_from} returns its own inputs."
    return replace(call, said=(note,))


# -- the tensors to draw ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Drawing:
    """The arguments of a forward that were given, and how the others are drawn."""

    forward: Forward
    given: Mapping[str, Any]
    """Tensors of a file and settings, by name."""
    asked: Asked

    def values(self, plans: Mapping[str, Plan]) -> dict[str, Any]:
        """Return all arguments by name. Every call returns the same values.

        Query, key and value share one tensor if their shapes are equal and not given.
        """
        values = dict(self.given)
        seed = (self.asked.seed + _STREAM) % 2**64
        generator = torch.Generator("cpu").manual_seed(seed)
        for name in sorted(plans, key=lambda name: _ORDER.get(plans[name].kind, 0)):
            plan = plans[name]
            tensor = self._shared_with(plan, values)
            if tensor is None:
                tensor = plan.draw(self.forward, self.asked.inputs, generator)
            values[name] = tensor
        return values

    def _shared_with(self, plan: Plan, values: Mapping[str, Any]) -> Tensor | None:
        """Return the tensor of the query or key that a key or value shares; None if it needs its own."""
        if plan.kind not in ("key", "value") or plan.is_given:
            return None
        source = self._source_of(plan.kind)
        # There may be more keys than queries.
        if source == "query" and self.asked.inputs.key_len is not None:
            return None
        shape = plan.shape(self.asked.inputs)
        for name, value in values.items():
            if self.forward.kind(name) != source or not isinstance(value, Tensor):
                continue
            if value.dim() == len(shape) and value.shape[-1] == shape[-1]:
                return value
        return None

    def _source_of(self, kind: Kind) -> Kind:
        """Return the kind whose tensor a key or a value shares: values share that of the keys, if there are keys."""
        if kind == "value":
            for name in self.forward.parameters:
                if self.forward.kind(name) == "key":
                    return "key"
        return "query"

    def probed(
        self, plans: Mapping[str, Plan], guesses: Mapping[str, Plan], watched: Collection[str], whole: bool
    ) -> Probed:
        """Run the forward with plans and guesses, and return the use of the watched arguments."""
        values = self.values({**plans, **guesses})
        tensors = {name: values[name] for name in watched}
        subject = self.forward.call(values).of(self.forward.module)
        return probe(subject, tensors, whole=whole)

    def layout_by_layers(self, plans: Mapping[str, Plan]) -> Layout:
        """Return the layout with which the layers of the forward take these inputs, from one run batch first."""
        inputs = self.asked.inputs
        call = self.forward.call(self.values(plans))
        return layout_by_layers(call.of(self.forward.module), inputs.batch, inputs.seq_len)


def _plans(sizes: Sizes, drawing: _Drawing, shapes: Mapping[str, InputShape]) -> dict[str, Plan]:
    """Return the plans of the tensors to draw: with a given shape, a configured one, and then a guessed one.

    Raises as `make_call`.
    """
    forward, module = drawing.forward, sizes.target.module
    plans: dict[str, Plan] = {}
    for name, shape in shapes.items():
        plans[name] = sizes.given(name, shape)
    given = {*drawing.given, *plans}
    names = needed(forward, drawing.asked.inputs, given)
    if is_hugging_face(module):
        free = forward.parameters.keys() - given
        plans.update(configured_plans(module.config, names, free))
    names = [name for name in names if name not in plans]
    if _has_named_sizes(sizes.target):
        for name in names:
            plans[name] = sizes.plan(name)
    elif names:
        given = {*drawing.given, *plans}
        guesser = Guesser(sizes, names, given, partial(drawing.probed, plans))
        plans.update(guesser.plans())
    return plans


# -- the layout -------------------------------------------------------------------------------------------------------


def _sequences(plans: Mapping[str, Plan], given: Mapping[str, Any]) -> list[str]:
    """Return the names of the arguments whose batch may come first or second."""
    names: list[str] = []
    for name, plan in plans.items():
        if len(plan.axes) > 1 and plan.kind not in ("image", "mask"):
            names.append(name)
    for name, value in given.items():
        if isinstance(value, Tensor) and value.dim() > 1:
            names.append(name)
    return names


def _layout(forward: Forward, names: Sequence[str], asked: Asked) -> Layout:
    """Return the layout that the user chose, or else the one that the module shows for these arguments."""
    if "batch_first" not in asked.flags.given:
        return layout_of(forward.module, names)
    batch_first = bool(asked.flags.values.get("batch_first", True))
    return Layout(batch_first)


def _note_on_layout(layout: Layout, names: Sequence[str], plans: Mapping[str, Plan], asked: Asked) -> tuple[str, ...]:
    """Return a sentence on the layout: `x is `seq batch embed`: ...`; empty if it is plain."""
    if not layout.why or not names or asked.inputs.unbatched:
        return ()
    axes = "batch seq" if layout.batch_first else "seq batch"
    kinds = {plan.kind for name, plan in plans.items() if name in names}
    if kinds - {"ids"}:
        axes += " embed"
    verb = "is" if len(names) == 1 else "are"
    listed = ", ".join(names)
    return (f"{listed} {verb} `{axes}`: {layout.why}",)


# -- from the options --------------------------------------------------------------------------------------------------


def _of_file(sizes: Sizes, path: Path) -> dict[str, Any]:
    """Return the tensors of a file by the names of the forward; a single one is the first argument.

    Raises `InputError` if a tensor does not fit a layer, `SpecError` for an unknown name.
    """
    forward = sizes.forward
    content = read_tensors(path)
    if isinstance(content, Tensor):
        content = {"": content}
    elif len(content) == 1 and not content.keys() & forward.parameters.keys():
        (tensor,) = content.values()
        content = {"": tensor}
    tensors: dict[str, Any] = {}
    for name, tensor in forward.named(content, shown(str(path))).items():
        if _has_named_sizes(sizes.target):
            _require_fit(printable(path), name, tensor, sizes)
        # On the device of the parameters, and in their dtype unless it has whole numbers.
        dtype = forward.dtype if tensor.is_floating_point() else None
        moved = tensor.to(device=forward.device, dtype=dtype)
        tensors[name] = moved.contiguous()
    return tensors


def _require_fit(file: str, name: str, tensor: Tensor, sizes: Sizes) -> None:
    """Raise `InputError` if the rank, width or dtype of a tensor does not fit a layer."""
    *places, width = sizes.plan(name).axes
    if not layout_of(sizes.forward.module, ()).batch_first:
        places.reverse()
    # As a layer and torch call the sizes of their inputs.
    size, option = "embed_dim", "--embed-dim "
    kind = sizes.forward.kind(name)
    if kind in ("key", "value"):
        size = "kdim" if kind == "key" else "vdim"
        option = f"--set {size}="
    words = [str(place) for place in places]
    axes = " ".join([*words, size.removesuffix("_dim")])
    said = f"{file}: {name} has shape {list(tensor.shape)}"
    rank = len(places) + 1
    if tensor.dim() != rank:
        ways = {2: "Try --set unbatched=true.", 3: "Drop unbatched."}
        way_out = ways.get(tensor.dim(), f"Save it with {rank} dimensions.")
        raise InputError(f"{said}, expected {rank} dimensions: `{axes}`. {way_out}")
    if tensor.shape[-1] != width:
        raise InputError(
            f"{said}, expected `{axes}` with {size} {width} as the last size. Try {option}{tensor.shape[-1]}."
        )
    if not tensor.is_floating_point():
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{file}: {name} has dtype {dtype}, expected floating-point numbers. Save {name}.float().")
