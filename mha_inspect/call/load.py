"""Make a Subject of a layer of the catalog or a target, once or for each of several head counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from inspect import Parameter, signature
from operator import index
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import InputError, SpecError
from ..layers.catalog import find_layer
from ..layers.spec import AttentionSpec, DerivedInt, InputSpec, RunSpec, plain_fields
from ..making.target import Target, resolve
from ..making.vocabulary import SWITCHES, argument_of_forward, flag_of
from ..record.arguments import copy_module
from ..running.subject import Subject
from ..text import a_kind, did_you_mean
from .call import Call, TargetFailedError, explaining
from .inputs import Asked, make_call

# -- a target ----------------------------------------------------------------------------------------------------------


def call_target(target: Target, asked: Asked, *, may_fail: bool = False, like: Call | None = None) -> Call:
    """Make the arguments of a target's forward. Lazy parameters get their shapes from one call with them.

    With `may_fail`, an error in that call is ignored: it is raised again when the forward is recorded. `like` is the
    call of another module with the same forward, whose arguments are reused.

    Raises as `make_call`, `InputError` if there is no forward, `TargetFailedError` if lazy parameters get no shape.
    """
    module = target.module
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise InputError(f"{target.name} has no forward, so it cannot be called. Name a module that has one.")
    call = like or make_call(target, asked)
    has_lazy_layers = any(map(is_lazy, module.parameters()))
    if has_lazy_layers:
        try:
            subject = subject_of(target, call, asked.seed)
            with torch.no_grad(), explaining(subject):
                subject.plain()
        except TargetFailedError:
            if not may_fail:
                raise
    return call


def subject_of(target: Target, call: Call, seed: int, grad: bool | None = None) -> Subject:
    """Return a target with the arguments of its forward. Every run of it is seeded.

    A layer of the catalog has no notes and no hint: none of its arguments are guessed.
    """
    layer = target.layer.name if target.layer else ""
    return replace(
        call.of(target.module),
        label=layer or target.name,
        layer=layer,
        made_with=target.passed,
        notes=() if layer else (*target.notes, *call.notes),
        hint="" if layer else call.hint,
        drawn_width=call.drawn_width,
        guessed=() if layer else (*call.guessed, *call.missed),
        seed=seed,
        grad=grad,
        batch_first=call.batch_first if call.drawn and call.is_layout_known else None,
    )


# -- a layer of the catalog --------------------------------------------------------------------------------------------


def load_layer(spec: AttentionSpec, inputs: InputSpec, run: RunSpec, layer: str = "torch") -> Subject:
    """Build a layer of the catalog, and make its inputs.

    Raises `MhaInspectError` if a setting does not apply, a file does not fit, or the device is missing.
    """
    kind = find_layer(layer)
    kind.check(spec, inputs, run)
    resolve(run.device, spec.dtype)
    module = kind.build(spec, run.device)
    random = "weights and inputs" if inputs.input is None else "weights"
    subject = replace(layer_called(module, spec, inputs, run, layer), random=random)
    if spec.num_heads != 1 and spec.head_dim != 1:
        return subject
    return replace(subject, without_ones=lambda _: _without_ones(spec, inputs, run, layer))


def _without_ones(spec: AttentionSpec, inputs: InputSpec, run: RunSpec, layer: str) -> Subject:
    """Return the same layer with as many heads (three instead of one), and with inputs without a size of 1."""
    heads = 3 if spec.num_heads == 1 else spec.num_heads
    head_dim = 10
    given_head_dim = head_dim * (heads if spec.head_dim == spec.embed_dim else 2)
    small = replace(
        spec,
        num_heads=heads,
        num_kv_heads=None if spec.kv_heads == spec.num_heads else spec.kv_heads,
        embed_dim=heads * head_dim,
        kdim=17 if spec.key_width != spec.embed_dim else None,
        vdim=19 if spec.value_width != spec.embed_dim else None,
        head_dim=given_head_dim if spec.head_dim_given else DerivedInt(0),
    )
    few = InputSpec(
        batch=1 if inputs.unbatched else 7,
        seq_len=11,
        key_len=inputs.key_len and 13,
        unbatched=inputs.unbatched,
        causal=inputs.causal or inputs.attn_mask is not None,
        padding=(2,) if inputs.padding else (),
    )
    return load_layer(small, few, run, layer)


def layer_called(module: nn.Module, spec: AttentionSpec, inputs: InputSpec, run: RunSpec, layer: str) -> Subject:
    """Return the subject of a layer that was built from this spec, with inputs."""
    settings = plain_fields(spec)
    names = signature(module.forward).parameters
    switches: dict[str, bool] = {}
    for setting in SWITCHES:
        argument = argument_of_forward(setting, names)
        if argument is not None:
            switches[argument] = getattr(run, setting)
    target = Target(
        module=module,
        made_from=layer,
        passed=settings,
        arguments=settings,
        forward_settings=switches,
        layer=find_layer(layer),
    )
    call = call_target(target, Asked(inputs, seed=spec.seed))
    return subject_of(target, call, spec.seed, run.grad)


# -- several head counts -----------------------------------------------------------------------------------------------


def counts_of(heads: Iterable[int]) -> tuple[int, ...]:
    """Return head counts, each once. Raises `SpecError` if they are not whole numbers."""
    try:
        return tuple(dict.fromkeys(map(index, heads)))
    except TypeError:
        raise SpecError(f"heads {heads!r:.60} are not whole numbers. Give some, e.g. (1, 2, 4).") from None


def layers_by_name(layer: str, heads: Sequence[int], settings: Mapping[str, Any]) -> list[tuple[int, Subject]]:
    """Return a layer of the catalog for each head count. `settings` are fields of its specs, by name.

    Raises `SpecError` if a head count does not fit, or a setting is unknown or contradicts another.
    """
    if not heads:
        raise SpecError("no head counts were given. Give two or more, e.g. compare_heads((1, 2, 4)).")
    kind = find_layer(layer)
    _require_settings(settings)
    of_layer = _settings_of(AttentionSpec, settings)
    inputs = InputSpec(**_settings_of(InputSpec, settings))
    run = RunSpec(**_settings_of(RunSpec, settings))
    if run.device == "meta":
        raise SpecError(
            "device meta has shapes and no numbers, but compare-heads compares numbers. Use --device cpu, or "
            "see the shapes side by side with `mha-inspect params --num-heads 1,2,4 --device meta`."
        )
    specs = [kind.spec(num_heads=count, **of_layer) for count in dict.fromkeys(heads)]
    return [(spec.num_heads, load_layer(spec, inputs, run, layer)) for spec in specs]


def _settings_of(
    spec: type[AttentionSpec] | type[InputSpec] | type[RunSpec], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that are fields of a spec."""
    chosen: dict[str, Any] = {}
    for field in fields(spec):
        if field.name in settings:
            chosen[field.name] = settings[field.name]
    return chosen


def _require_settings(names: Iterable[str]) -> None:
    """Raise `SpecError` if a name is not a field of a spec, or is num_heads, which is compared."""
    settings: list[str] = []
    for spec in (AttentionSpec, InputSpec, RunSpec):
        settings += [field.name for field in fields(spec) if field.name != "num_heads"]
    for name in names:
        if name not in settings:
            hint = did_you_mean(name, settings)
            raise SpecError(f"{name} is not a setting of a layer: {', '.join(settings)}.{hint}")


def modules_with_heads(
    make: Callable[..., nn.Module], counts: Sequence[int], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[int, Subject]]:
    """Yield a module for each head count, with the arguments of its forward. Each is a copy of the result of `make`.

    The number goes to the argument with a name for it (num_heads, nhead, n_head), or else to the only required
    argument.

    Raises `SpecError` if `make` takes no number of heads or returns no module, or there are fewer than two counts.
    """
    if len(counts) < 2:
        raise SpecError(f"heads {list(counts)} are fewer than two head counts. Give two or more, e.g. (1, 2, 4).")
    name = getattr(make, "__name__", type(make).__name__)
    if isinstance(make, nn.Module):
        raise SpecError(f"{name} is a module with a fixed number of heads. Give its class, or a function of heads.")
    keyword = _argument_for_heads(make, name)
    for count in counts:
        module = make(count) if keyword is None else make(**{keyword: count})
        if not isinstance(module, nn.Module):
            raise SpecError(f"{name} returned {a_kind(module)} for {count} heads, not a torch.nn.Module.")
        yield count, Subject(copy_module(module), args, dict(kwargs), seed=0)


def _argument_for_heads(make: Callable[..., nn.Module], name: str) -> str | None:
    """Return the name of the argument that takes the number of heads; None if it is positional."""
    try:
        parameters = signature(make).parameters
    except ValueError:  # a function written in C may have none
        return None
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    for argument, parameter in parameters.items():
        if flag_of(argument) == "num_heads" and parameter.kind in by_name:
            return argument
    required = [p for p in parameters.values() if p.default is Parameter.empty and p.kind in by_place]
    if len(required) != 1:
        raise SpecError(
            f"{name} takes no number of heads (its arguments: {', '.join(parameters) or 'none'}). "
            "Name one num_heads, or give a function of the number, e.g. lambda heads: MyAttention(64, heads)."
        )
    return None
