"""One module's arguments for another: the same tensors for two forwards, or a model's for one of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, SpecError
from ..making.arguments import signature_of
from ..making.target import Target
from ..making.vocabulary import Kind
from ..record.arguments import described, parts_of, tensors_in, with_copies
from ..text import did_you_mean, first_few, shown
from .call import Call, Forward
from .layout import layout_of, sequence_first

_STANDS_FOR: dict[Kind, tuple[Kind, ...]] = {
    "query": ("query", "hidden", "unknown"),
    "hidden": ("hidden", "query", "unknown"),
    "unknown": ("unknown", "hidden", "query"),
    "key": ("key", "other", "query", "hidden", "unknown"),
    "value": ("value", "key", "other", "query", "hidden", "unknown"),
    "other": ("other", "key", "value", "query", "hidden", "unknown"),
    "ids": ("ids", "hidden", "unknown"),
    "image": ("image", "hidden", "unknown"),
}
"""Kind of an argument to the kinds of the other forward that may replace it, the nearest first."""
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, Tensor)


class _CaughtError(BaseException):
    """Raised in the call of the module, with its arguments: the rest of the run is not needed."""


# -- the arguments of a call by name -----------------------------------------------------------------------------------


def named_arguments(module: nn.Module, call: Call) -> dict[str, Any]:
    """Return the arguments of a call by the names of the forward, `x` for one without a name."""
    names: list[str] = []
    for name, parameter in signature_of(module.forward).items():
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            names.append(name)
    arguments = dict(zip(names or ["x"], call.args, strict=False))
    arguments.update(call.kwargs)
    return arguments


@dataclass(frozen=True)
class NamedTensor:
    """A tensor among the arguments of a call."""

    path: str
    """The name of the argument, with the place in it: `x`, `rotary.0`."""
    kind: Kind
    """Its kind by the last part of its path."""
    tensor: Tensor

    @property
    def in_words(self) -> str:
        """Its path and shape: `x [2, 10, 512]`."""
        return f"{self.path} {list(self.tensor.shape)}"


def tensors_of(module: nn.Module, call: Call) -> dict[str, NamedTensor]:
    """Return the tensors of a call by path: arguments, then tensors in arguments."""
    forward = Forward.of(module)
    arguments: dict[str, NamedTensor] = {}
    inside: dict[str, NamedTensor] = {}
    for path, tensor in tensors_in(named_arguments(module, call)):
        name = path.rpartition(".")[2]
        named = NamedTensor(path, forward.kind(name), tensor)
        if "." in path:
            inside[path] = named
        else:
            arguments[path] = named
    return {**arguments, **inside}


def call_with(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], origin: str) -> Call:
    """Return a call with these arguments, by the names of the forward as far as possible."""
    names: list[str] = []
    # An argument after one without a name can only be positional.
    is_by_place = False
    parameters = signature_of(module.forward)
    for name, parameter in parameters.items():
        if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD:
            names.append(name)
        elif parameter.kind is Parameter.POSITIONAL_ONLY:
            is_by_place = True
    if len(args) > len(names):
        is_by_place = True
    by_name = {} if is_by_place else dict(zip(names, args, strict=False))
    layout = layout_of(module, parameters)
    batch_first = layout.batch_first
    if layout.is_assumed:
        batch_first = not sequence_first(module)
    call = Call(
        args=() if by_name else args,
        kwargs={**by_name, **kwargs},
        described="",
        origin=origin,
        batch_first=batch_first,
        is_layout_known=False,
    )
    values = {name: value for name, value in named_arguments(module, call).items() if value is not None}
    drawn: list[str] = []
    for path, named in tensors_of(module, call).items():
        if named.kind not in ("mask", "setting"):
            drawn.append(path)
    return replace(call, described=described(values), drawn=tuple(drawn))


# -- the same tensors into two forwards --------------------------------------------------------------------------------


def _tensor_for(name: str, kind: Kind, given: Mapping[str, NamedTensor], *, whole: bool = False) -> Tensor | None:
    """Return the tensor of another call for an argument of this name and kind; None if there is none.

    `whole` says that it must contain whole numbers.
    """
    fitting: dict[str, NamedTensor] = {}
    for path, named in given.items():
        if named.tensor.is_floating_point() != whole:
            fitting[path] = named
    if name in fitting:
        return fitting[name].tensor
    for similar in _STANDS_FOR.get(kind, ()):
        for named in fitting.values():
            if named.kind == similar:
                return named.tensor
    return None


@dataclass(frozen=True)
class _Source:
    """Another call of another module, whose tensors replace those of a call."""

    module: nn.Module
    call: Call
    tensors: Mapping[str, NamedTensor]

    def tensor_for(self, drawn: NamedTensor) -> Tensor | None:
        """Return the tensor that replaces a drawn one; None if there is none."""
        has_whole_numbers = not drawn.tensor.is_floating_point()
        return _tensor_for(drawn.path, drawn.kind, self.tensors, whole=has_whole_numbers)

    def laid_out(self, tensor: Tensor, *, batch_first: bool) -> Tensor:
        """Return a tensor of this call, `batch sequence embed` or `sequence batch embed`, or tokens without embed."""
        axes = 3 if tensor.is_floating_point() else 2
        if batch_first == self.call.batch_first or tensor.dim() != axes:
            return tensor
        return tensor.transpose(0, 1).contiguous()


def with_the_same(
    call: Call, module: nn.Module, source_call: Call, source_module: nn.Module, *, rounded: bool = True
) -> Call:
    """Return the call with drawn tensors replaced by the tensors of another call, in the dtype of this one.

    They are laid out as this forward takes them; a tensor used several times stays one tensor. If they are not
    `rounded`, they keep the dtype of the other call.

    Raises `InputError` if the other call has no tensor for an argument, or one of another shape.
    """
    source = _Source(source_module, source_call, tensors_of(source_module, source_call))
    tensors = tensors_of(module, call)
    instead: dict[str, Tensor] = {}
    moved: dict[int, Tensor] = {}
    # Tensors inside an argument are not replaced.
    for name in [path for path in call.drawn if "." not in path]:
        drawn = tensors[name]
        match = source.tensor_for(drawn)
        if match is None:
            raise InputError(_no_match(module, source, drawn))
        if id(match) not in moved:
            dtype = drawn.tensor.dtype if rounded and drawn.tensor.is_floating_point() else None
            laid_out = source.laid_out(match, batch_first=call.batch_first)
            moved[id(match)] = laid_out.to(device=drawn.tensor.device, dtype=dtype)
        if not _fits(moved[id(match)], drawn):
            raise InputError(_no_match(module, source, drawn))
        instead[name] = moved[id(match)]
    return _with_tensors(call, module, instead, source)


def _fits(tensor: Tensor, drawn: NamedTensor) -> bool:
    """Return whether a tensor may replace a drawn one: the lengths of a model's tensors may differ."""
    if tensor.dim() != drawn.tensor.dim():
        return False
    if drawn.kind == "image":
        return tensor.shape == drawn.tensor.shape
    if drawn.tensor.is_floating_point():
        return tensor.shape[-1:] == drawn.tensor.shape[-1:]
    return True


def _no_match(module: nn.Module, source: _Source, drawn: NamedTensor) -> str:
    """Return the message for an argument that no tensor of the other call fits."""
    has = ", ".join(named.in_words for named in source.tensors.values()) or "no tensor"
    return (
        f"{type(module).__name__}.forward takes {drawn.in_words} and {type(source.module).__name__}"
        f".forward takes {has}, and both get the same input. "
        "Give both the same sizes: --left-set, --right-set, or --input-shape."
    )


def _with_tensors(call: Call, module: nn.Module, instead: Mapping[str, Tensor], source: _Source) -> Call:
    """Return a call with other tensors for the arguments of these names."""
    arguments = {**named_arguments(module, call), **instead}
    kwargs: dict[str, Any] = {}
    for name in call.kwargs:
        kwargs[name] = arguments.pop(name)
    # The arguments that are left have a place; those after them have no name.
    nameless = call.args[len(arguments) :]
    origin = call.origin
    if instead and source.call.origin != call.origin:
        origin = f"copied from {type(source.module).__name__}"
    return replace(call, args=(*arguments.values(), *nameless), kwargs=kwargs, origin=origin)


def layer_inputs(module: nn.Module, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value for a layer, from the arguments of a forward.

    Raises `InputError` if the forward takes no sequence of vectors.
    """
    given = tensors_of(module, call)
    query = _tensor_for("", "query", given)
    key = _tensor_for("", "key", given)
    value = _tensor_for("", "value", given)
    if query is None or key is None or value is None or query.dim() not in (2, 3):
        takes = ", ".join(named.in_words for named in given.values()) or "no tensor"
        raise InputError(
            f"{type(module).__name__}.forward takes {takes}, but a layer takes a query, batch query embed. Both sides "
            "get the same input. Compare its attention: --left-module or --right-module PATH, as in trace."
        )
    return query, key, value


# -- a module of a target ----------------------------------------------------------------------------------------------


def part_of(target: Target, call: Call, path: str) -> tuple[Target, Call]:
    """Return the module at `path` as a target, with the arguments of its first call in a run of the whole target.

    The whole target is not changed.

    Raises `SpecError` if there is no such module, `InputError` if it is not called.
    """
    modules = {name: module for name, module in target.module.named_modules() if name}
    if path not in modules:
        listed = first_few(list(modules), 4) or "none"  # enough of a long list to show the form of paths
        hint = did_you_mean(path, modules)
        raise SpecError(f"{target.name} has no module {shown(path)}. Its modules: {listed}.{hint}")
    module = modules[path]
    args, kwargs = _caught_arguments(target, call, path, module)
    given = call_with(module, args, kwargs, f"given by {target.name}")
    part = Target(
        module=module,
        made_from=f"{target.made_from} {path}",
        passed=target.passed,
        notes=target.notes,
        arguments=target.arguments,
    )
    return part, _without_state(module, given)


def _without_state(module: nn.Module, call: Call) -> Call:
    """Return a call without optional arguments that a run may change, e.g. a cache of keys."""
    parameters = signature_of(module.forward)
    kwargs: dict[str, Any] = {}
    for name, value in call.kwargs.items():
        is_optional = name in parameters and parameters[name].default is None
        if not is_optional or _is_plain(value):
            kwargs[name] = value
    plain = call_with(module, call.args, kwargs, call.origin)
    # Tensors inside an argument belong to it, and are not drawn anew.
    drawn = [path for path in plain.drawn if "." not in path]
    return replace(plain, drawn=tuple(drawn))


def _caught_arguments(
    target: Target, call: Call, path: str, module: nn.Module
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of the arguments of the first call of the module at `path` in a run of the whole target.

    Raises `InputError` if the module is not called.
    """

    def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _CaughtError(args, kwargs)

    whole = call.of(target.module)
    handle = module.register_forward_pre_hook(catch, prepend=True, with_kwargs=True)
    try:
        with torch.no_grad(), whole.replaying(whole.state()):
            whole.plain()
    except _CaughtError as caught:
        args, kwargs = with_copies(caught.args)
        return args, kwargs
    finally:
        handle.remove()
    raise InputError(
        f"{target.name} does not call its module {shown(path)} in this forward, so its inputs are unknown. "
        "Name a module that is called."
    )


def _is_plain(value: Any) -> bool:
    """Return whether a value is data that a run does not change, unlike e.g. a cache of keys."""
    if not isinstance(value, (list, tuple, dict)):
        return isinstance(value, _PLAIN)
    parts = [part for _, part in parts_of(value)]
    return all(map(_is_plain, parts))


def with_arguments_of(target: Target, call: Call) -> Target:
    """Return a target whose forward gets the arguments of this call with the same names, unless --set gave them.

    A port of a module often has the argument names of the original: rotary positions, a mask.
    """
    parameters = signature_of(target.module.forward)
    shared: dict[str, Any] = {}
    for name, value in call.kwargs.items():
        if name in parameters and value is not None:
            shared[name] = value
    return replace(target, forward_settings={**shared, **target.forward_settings})
