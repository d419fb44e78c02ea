"""A layer, a class or a function made once for each of several head counts, with the same input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from inspect import Parameter, signature
from operator import index
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from ..build.target import resolve
from ..build.vocabulary import flag_of
from ..errors import SpecError
from ..layers.catalog import find_layer
from ..layers.spec import AttentionSpec, InputSpec, RunSpec
from ..record.arguments import copy_module
from ..running.subject import Subject
from ..text import a_kind, did_you_mean
from .load import layer_called, load_layer, require_memory_of_layer


def counts_of(heads: Iterable[int]) -> tuple[int, ...]:
    """Return head counts, each once. Raises `SpecError` for what are no whole numbers."""
    try:
        return tuple(dict.fromkeys(map(index, heads)))
    except TypeError:
        raise SpecError(f"heads {heads!r:.60} are no whole numbers: give some, as in (1, 2, 4).") from None


def layers_by_name(layer: str, heads: Sequence[int], settings: Mapping[str, Any]) -> list[tuple[int, Subject]]:
    """Return a layer of the catalog for each head count; settings are those of its specs, by name.

    Raises:
        SpecError: a head count does not fit, a setting is none that there is, or settings contradict each other.
    """
    if not heads:
        raise SpecError("no head counts were given: give two or more, as in compare_heads((1, 2, 4)).")
    known = [f.name for cls in (AttentionSpec, InputSpec, RunSpec) for f in fields(cls) if f.name != "num_heads"]
    for name in settings:
        if name not in known:
            raise SpecError(f"{name} is no setting of a layer: {', '.join(known)}.{did_you_mean(name, known)}")
    of_spec, of_inputs, of_run = (
        {name: value for name, value in settings.items() if name in spec.__dataclass_fields__}
        for spec in (AttentionSpec, InputSpec, RunSpec)
    )
    spec = find_layer(layer).spec(num_heads=heads[0], **of_spec)
    return layers_with_heads(spec, heads, InputSpec(**of_inputs), RunSpec(**of_run), layer)


def layers_with_heads(
    spec: AttentionSpec,
    counts: Sequence[int],
    inputs: InputSpec,
    run: RunSpec,
    layer: str = "torch",
) -> list[tuple[int, Subject]]:
    """Return a layer of the catalog for each head count, each once, with the same input.

    Where the baseline's parameters fit into the others, those hold whatever their memory held: to draw the numbers of a
    large layer takes longer than to run it, and the baseline's are given to them.

    Raises:
        SpecError: the layer is unknown, a head count does not fit, or there are no numbers to compare.
        InputError: a file or a mask does not fit.
        DeviceError: the device is not there, or cannot run spec.dtype.
        DoesNotFitError: it needs more memory than there is.
    """
    specs = [replace(spec, num_heads=count) for count in dict.fromkeys(counts)]
    find_layer(layer).check(specs[0], inputs, run)
    if resolve(run.device, spec.dtype).type == "meta":
        raise SpecError(
            "device meta has shapes and no numbers, and compare-heads compares numbers. Take --device cpu, or "
            "see the shapes side by side with `mha-inspect params --num-heads 1,2,4 --device meta`."
        )
    for each in specs:
        require_memory_of_layer(each, inputs, run)
    base = load_layer(specs[0], inputs, run, layer)
    others = [layer_called(_like(base.module, each, layer, run), each, inputs, run, layer) for each in specs[1:]]
    return [(each.num_heads, subject) for each, subject in zip(specs, (base, *others), strict=True)]


def _like(base: nn.Module, spec: AttentionSpec, layer: str, run: RunSpec) -> nn.Module:
    """Return a layer, without numbers where the baseline's parameters fit into it."""
    kind = find_layer(layer)
    with _Undrawn():
        module = kind.build(spec, run.device)
    shapes, of_base = ({name: t.shape for name, t in m.state_dict().items()} for m in (module, base))
    return module if shapes == of_base else kind.build(spec, run.device)


class _Undrawn(TorchFunctionMode):
    """Draw nothing inside the block: parameters that are built there hold whatever their memory held."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, unless it would fill a tensor with random numbers."""
        kwargs = kwargs or {}
        if func.__name__ in ("uniform_", "normal_", "kaiming_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def modules_with_heads(
    make: Callable[..., nn.Module], counts: Sequence[int], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[int, Subject]]:
    """Yield a module for each head count, with the arguments of its forward. What `make` returns is copied.

    The number goes to the argument that bears one of the names for it (num_heads, nhead, n_head), or else to the one
    argument that is needed.

    Raises `SpecError` when it takes no number of heads, returns no module, or there are not two counts to compare.
    """
    if len(counts) < 2:
        raise SpecError(f"heads {list(counts)} leaves nothing to compare: give two or more, as in (1, 2, 4).")
    name = getattr(make, "__name__", type(make).__name__)
    if isinstance(make, nn.Module):
        raise SpecError(f"{name} has been made already, with one number of heads: give its class, or a function of it.")
    for count in counts:
        module = _made(make, name, count)
        if not isinstance(module, nn.Module):
            raise SpecError(f"{name} returned {a_kind(module)} for {count} heads, and not a torch.nn.Module.")
        yield count, Subject(copy_module(module), args, dict(kwargs), seed=0)


def _made(make: Callable[..., nn.Module], name: str, count: int) -> nn.Module:
    try:
        parameters = signature(make).parameters
    except ValueError:  # what is written in C need not have one
        return make(count)
    named = next((n for n, p in parameters.items() if flag_of(n) == "num_heads" and p.kind in _BY_NAME), None)
    if named is not None:
        return make(**{named: count})
    needed = [p for p in parameters.values() if p.default is Parameter.empty and p.kind in _BY_PLACE]
    if len(needed) != 1:
        raise SpecError(
            f"{name} takes no number of heads (its arguments: {', '.join(parameters) or 'none'}), and is called with "
            "each. Name one num_heads, or give a function of it: lambda heads: MyAttention(64, heads)."
        )
    return make(count)


_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
