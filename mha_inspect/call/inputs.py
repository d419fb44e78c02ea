"""The arguments of a forward: tensors that follow its signature and the user's options.

The name of an argument gives its kind (`vocabulary`); the module, or else one run, gives its width (`guess`, `probe`).
--input-shape and --input come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, SpecError
from ..files.tensors import read_tensors
from ..layers.spec import InputSpec
from ..making.arguments import InputShape
from ..making.target import Target
from ..making.vocabulary import Flags, Kind, dashed, flag_of
from ..running.subject import Subject
from ..text import printable, shown
from .call import Call, Forward, Plan
from .guess import Sizes, batch_first_of, beside, configured_plans, guessed_plans, is_hugging_face, needed
from .masks import mask_arguments, masks_of, try_masks
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
    forward, inputs = Forward.of(target.module, target.name), asked.inputs
    sizes = Sizes(target, forward, inputs.unbatched)
    has_named_sizes = target.layer is not None or type(target.module) is nn.MultiheadAttention
    shapes = forward.named(asked.shapes, "--input-shape")
    file = {} if inputs.input is None else _of_file(sizes, inputs.input, checked=has_named_sizes)
    given = {**target.forward_settings, **file}
    twice = next((name for name in shapes if name in given), None)
    if twice is not None:
        raise SpecError(f"--input-shape and --input (or --set) both give {twice}. Drop one of the two.")
    plans = {name: sizes.given(name, shape) for name, shape in shapes.items()}
    notes = () if shapes or inputs.input else sizes.lazy_note()
    names = needed(forward, target, inputs, {*given, *plans})

    def run(known: Mapping[str, Plan], guesses: Mapping[str, Plan], whole: bool) -> Probed:
        values = _drawn(forward, {**known, **guesses}, given, asked)
        return probe(forward.call(values).of(target.module), {name: values[name] for name in guesses}, whole=whole)

    if is_hugging_face(target.module):
        free = set(forward.parameters) - {*given, *plans}
        both = beside([*names, *plans, *given], free)
        plans, more = (
            {**configured_plans(target.module, wanted, free, inputs.seq_len), **plans}
            for wanted in (names, [*names, *both])
        )
        if len(more) > len(plans) and run(plans, {}, True).error is not None and run(more, {}, True).error is None:
            plans = more
        names = [name for name in names if name not in plans]
    if has_named_sizes:
        plans |= {name: sizes.plan(name) for name in names}
    elif names:
        plans |= guessed_plans(sizes, names, {*given, *plans}, partial(run, plans))
    first, why = _layout(forward, plans, given, asked)
    forward, notes = replace(forward, batch_first=first), (*notes, *why)
    values = _drawn(forward, plans, given, asked)
    masks, of_masks = _masks(forward, target, asked, values, notes)
    values = {**_switches(forward, asked.flags), **values, **masks}
    order = [*forward.parameters]
    drawn = sorted(plans, key=lambda name: order.index(name) if name in order else -1)
    guessed = {
        name: f"{'x'.join(map(str, values[name].shape))}:{str(values[name].dtype).removeprefix('torch.')}"
        for name in drawn
        if not plans[name].is_given
    }
    unknown = next((plan.axes[-1] for plan in plans.values() if sizes.has_drawn_width(plan)), 0)
    return replace(
        forward.call(values),
        drawn=tuple(drawn),
        guessed=guessed,
        drawn_width=unknown if isinstance(unknown, int) else 0,
        said=(*notes, *of_masks),
    )


def _returned_call(target: Target, asked: Asked) -> Call:
    """Return a call with the arguments returned with the module. Raises `SpecError` if the user asks for others."""
    assert target.call is not None
    unused = asked.flags.typed - {flag_of(name) for name in target.arguments}
    typed = next((flag for flag in _OF_INPUTS if flag in unused), None)
    if typed is not None:
        raise SpecError(
            f"{shown(target.made_from)} returns its own inputs, so {dashed(typed)} does not apply. Drop it."
        )
    args, kwargs = target.call
    call = call_with(target.module, args, {**kwargs, **target.forward_settings}, "returned with the module")
    said = f"--causal made no mask, because {shown(target.made_from)} returns its own inputs."
    return replace(call, said=(said,) if "causal" in unused else ())


def _drawn(forward: Forward, plans: Mapping[str, Plan], given: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """Return the arguments by name. Query, key and value share one tensor if their shapes are equal and not given.

    Every call returns the same values.
    """
    inputs, values = asked.inputs, dict(given)
    generator = torch.Generator("cpu").manual_seed((asked.seed + _STREAM) % 2**64)
    kinds = [forward.kind(name) for name in forward.parameters]
    for name, plan in sorted(plans.items(), key=lambda item: _ORDER.get(item[1].kind, 0)):
        like: Kind = "key" if plan.kind == "value" and "key" in kinds else "query"
        is_apart = plan.is_given or (inputs.key_len is not None and like == "query")
        alike = [] if plan.kind not in ("key", "value") or is_apart else values.items()
        shape = plan.shape(inputs)
        tensors = (t for n, t in alike if forward.kind(n) == like and isinstance(t, Tensor))
        fitting = next((t for t in tensors if t.dim() == len(shape) and t.shape[-1] == shape[-1]), None)
        values[name] = plan.draw(forward, inputs, generator) if fitting is None else fitting
    return values


def _layout(
    forward: Forward, plans: Mapping[str, Plan], given: Mapping[str, Any], asked: Asked
) -> tuple[bool, tuple[str, ...]]:
    """Return whether the batch is the first axis, and a sentence on that if it is not plain."""
    if "batch_first" in asked.flags.given:
        return bool(asked.flags.values.get("batch_first", True)), ()
    names = [name for name, plan in plans.items() if len(plan.axes) > 1 and plan.kind not in ("image", "mask")]
    names += [name for name, value in given.items() if isinstance(value, Tensor) and value.dim() > 1]
    first, why = batch_first_of(forward.module, names)
    if not why or not names or asked.inputs.unbatched:
        return first, ()
    embed = "" if all(plans[name].kind == "ids" for name in names if name in plans) else " embed"
    axes = f"batch seq{embed}" if first else f"seq batch{embed}"
    return first, (f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} `{axes}`: {why}",)


def _masks(
    forward: Forward, target: Target, asked: Asked, values: Mapping[str, Any], notes: tuple[str, ...]
) -> tuple[dict[str, Any], list[str]]:
    """Return masks by name, and sentences on how they were found. Raises as `make_call`."""
    inputs = asked.inputs
    if target.layer is None:
        # A module whose constructor took --causal masks by itself.
        is_built = any(bool(getattr(target.module, name, False)) for name in ("causal", "is_causal", "masked"))
        inputs = replace(inputs, causal=inputs.causal and "causal" in asked.flags.typed and not is_built)
    free = [name for name in mask_arguments(forward.parameters) if values.get(name) is None]
    masks, flags = masks_of(forward, target, inputs, values, free)
    if not flags:
        return masks, []

    def run(tried: Mapping[str, Tensor]) -> Subject:
        call = forward.call({**values, **masks, **tried})
        return replace(call.of(target.module), seed=asked.seed, grad=False)

    try:
        made, said = try_masks(forward, inputs, flags, [name for name in free if name not in masks], run)
    except SpecError as error:  # another layout may be the solution
        raise type(error)(" ".join((str(error), *notes))) from None
    return {**masks, **made}, said


# -- from the options --------------------------------------------------------------------------------------------------


def _of_file(sizes: Sizes, path: Path, *, checked: bool) -> dict[str, Any]:
    """Return the tensors of a file by the names of the forward, or by their roles: query, key and value.

    Raises `InputError` if a `checked` tensor does not fit the layer, `SpecError` for an unknown name.
    """
    forward, content = sizes.forward, read_tensors(path)
    tensors = {"": content} if isinstance(content, Tensor) else content
    if len(tensors) == 1 and next(iter(tensors)) not in forward.parameters:
        tensors = {"": next(iter(tensors.values()))}
    kinds = {"query": ("query", "hidden"), "key": ("key", "other"), "value": ("value",)}
    roles = {role: name for name in forward.parameters for role in kinds if forward.kind(name) in kinds[role]}
    renamed = {n if n in forward.parameters else roles.get(n, n): tensor for n, tensor in tensors.items()}
    named = forward.named(renamed, shown(str(path)))
    for name, tensor in named.items() if checked else ():
        _require_fit(printable(path), name, tensor, sizes)
    return {name: _moved(forward, tensor).contiguous() for name, tensor in named.items()}


def _require_fit(file: str, name: str, tensor: Tensor, sizes: Sizes) -> None:
    """Raise `InputError` if the rank, width or dtype of a tensor does not fit a layer."""
    *places, width = sizes.plan(name).axes
    role = next((n for n in ("key", "value") if sizes.forward.kind(name) == n), "query")
    flag = {"key": "kdim", "value": "vdim"}.get(role, "embed-dim")
    option = "--embed-dim " if flag == "embed-dim" else f"--set {flag}="
    ordered = places if batch_first_of(sizes.forward.module, ())[0] else reversed(places)
    axes = f"`{' '.join(map(str, ordered))} {flag.removesuffix('-dim')}`"
    said = f"{file}: {name} has shape {list(tensor.shape)}"
    if tensor.dim() != len(places) + 1:
        ways = {2: "Try --unbatched.", 3: "Drop --unbatched."}
        way_out = ways.get(tensor.dim(), f"Save it with {len(places) + 1} dimensions.")
        raise InputError(f"{said}, expected {len(places) + 1} dimensions: {axes}. {way_out}")
    if tensor.shape[-1] != width:
        raise InputError(
            f"{said}, expected {axes} with {flag.replace('-', '_')} {width} as the last size. "
            f"Try {option}{tensor.shape[-1]}."
        )
    if not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{file}: {name} has dtype {kind}, expected floating-point numbers. Save {name}.float().")


def _moved(forward: Forward, tensor: Tensor) -> Tensor:
    return tensor.to(device=forward.device, dtype=forward.dtype if tensor.is_floating_point() else None)


def _switches(forward: Forward, flags: Flags) -> dict[str, bool]:
    """Return the switches for returned weights by name. Raises `SpecError` if one does not apply."""
    of_flags = {"need_weights": ["need_weights", "output_attentions"], "average_weights": ["average_attn_weights"]}
    switches = {}
    for flag, names in of_flags.items():
        name = next((name for name in names if name in forward.parameters), None)
        if flag in flags.given and name is not None:
            switches[name] = bool(flags.values[flag])
        elif flag in flags.given & flags.typed:
            raise SpecError(f"{forward.label} has no argument {names[0]}, so {dashed(flag)} does not apply. Drop it.")
    return switches
