"""Build the user's module from `package.module:Class`, `path/to/file.py:Class` or `hf:TYPE`.

A target is a class, a module, or a function that returns a module, alone or with the arguments of its forward.
Loading one runs its code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, is_dataclass, replace
from inspect import Parameter
from typing import Any

import torch
from torch import nn

from ..errors import DeviceError, DoesNotFitError, InputError, SpecError, is_out_of_memory
from ..layers.catalog import LayerKind
from ..record.arguments import cast_module, cast_tensors
from ..running.subject import seed_everything
from ..text import a_kind, shown
from .arguments import Arguments, bind, of_bounded_number, settings_of_forward, signature_of
from .hugging_face import build_model
from .importing import in_one_line, load_object
from .vocabulary import Flags, dashed

_OF_CONSTRUCTION = frozenset({"embed_dim", "num_heads", "num_kv_heads"})
"""Flags that only a constructor can take."""
_WANTED = "a torch.nn.Module. A target is a class of modules, a function that returns one, or a module."


@dataclass(frozen=True)
class TargetSpec:
    """The settings of a target besides its name and --set."""

    flags: Flags = field(default_factory=Flags)
    dtype: str | None = None
    """None for the dtype that the target itself chooses."""
    device: str = "cpu"
    training: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Target:
    """A module that was built, and how."""

    module: nn.Module
    made_from: str
    """The text of the command line."""
    passed: dict[str, Any]
    """The arguments passed to its constructor, by name, as plain data."""
    notes: tuple[str, ...] = ()
    """Sentences about arguments that were passed under another name than the user's."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Every argument of its constructor, defaults included."""
    forward_settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of the forward that --set gave."""
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """The arguments of its forward, positional and named, if the function that made it returned them."""
    layer: LayerKind | None = None
    """The layer of the catalog, if it is one."""

    @property
    def name(self) -> str:
        """Name of its class."""
        return type(self.module).__qualname__


def load_target(text: str, settings: Mapping[str, str], spec: TargetSpec) -> Target:
    """Import what the text names, and build it.

    Its random numbers come from spec.seed; it is in eval mode unless spec.training, on spec.device, in spec.dtype.

    Raises `MhaInspectError` where it cannot be: not importable, no module, a wrong argument, no memory, no device.
    """
    resolve(spec.device, spec.dtype or "float32")
    seed_everything(spec.seed)
    if text.startswith("hf:"):
        module, passed, notes, chosen = build_model(text, settings, spec.flags, spec.device, spec.seed)
        target = Target(module, text, passed, notes, vars(module.config), chosen)
    else:
        target = _load_python(text, settings, spec)
    target.module.train(spec.training)
    try:
        # Without --dtype, a module that builds itself in half precision keeps its dtype.
        dtype = None if spec.dtype is None else getattr(torch, spec.dtype)
        if dtype is not None or spec.device != "cpu":
            device = torch.device(spec.device)
            cast_module(target.module, dtype, device)
            target = replace(target, call=cast_tensors(target.call, dtype, device))
    except (RuntimeError, NotImplementedError, TypeError) as error:  # no such device, meta, or a dtype of another kind
        raise InputError(f"{target.made_from} cannot be moved to {spec.device}: {in_one_line(error)}") from None
    return target


def _load_python(text: str, settings: Mapping[str, str], spec: TargetSpec) -> Target:
    named, home = load_object(text)
    typed, namespace = _OF_CONSTRUCTION & spec.flags.typed, vars(home)
    if isinstance(named, nn.Module):
        if typed:
            raise SpecError(
                f"{text} is a module, not a class: {dashed(min(typed))} cannot change it. "
                f"Name its class, {type(named).__name__}, to build another."
            )
        of_forward = settings_of_forward(named, settings, [], text, namespace, spec.flags.setting)
        return Target(named, text, {}, forward_settings=of_forward)
    if not callable(named) or (isinstance(named, type) and not issubclass(named, nn.Module)):
        what = f"the class {named.__qualname__}" if isinstance(named, type) else f"of type {type(named).__name__}"
        raise InputError(f"{shown(text)} is {what}, not {_WANTED}")
    name = getattr(named, "__name__", text.rpartition(":")[2])
    bound = bind(named, settings, spec.flags, namespace, name)
    module = _build(named, bound, name, spec)
    call = None
    if isinstance(module, tuple) and module and isinstance(module[0], nn.Module):
        module, *returned = module
        call = _returned_call(name, returned)
    if not isinstance(module, nn.Module):
        raise InputError(f"{name}() returned {a_kind(module)}, not {_WANTED}")
    forward_settings = settings_of_forward(module, bound.left, bound.names, name, namespace, spec.flags.setting)
    if typed - bound.used:
        raise SpecError(
            f"{name} has no argument for {dashed(min(typed - bound.used))}. Arguments: "
            f"{', '.join(bound.names) or 'none'}. Drop it, or name the argument: {spec.flags.setting} NAME=VALUE."
        )
    # Values in a config are named by their path.
    configs = {n: _inside(value) for n, value in bound.values.items() if _is_config(value, n, bound)}
    passed = {n: _plain(value) for n, value in bound.values.items() if n not in configs}
    passed |= {f"{n}.{key}": _plain(value) for n, inner in configs.items() for key, value in inner.items()}
    from_flags = [f"{n}={passed[n]} ({flag})" for n, flag in bound.origins.items() if n in passed]
    defaults = {n: p.default for n, p in signature_of(named).items() if p.default is not Parameter.empty}
    insides = {key: item for value in bound.values.values() for key, item in _inside(value).items()}
    return Target(
        module=module,
        made_from=text,
        passed=passed,
        notes=(f"Built with {', '.join(from_flags)}.",) if from_flags else (),
        arguments={**defaults, **insides, **bound.values},
        forward_settings=forward_settings,
        call=call,
    )


def _is_config(value: Any, name: str, bound: Arguments) -> bool:
    is_built = any(n.startswith(f"{name}.") for n in bound.names)
    return is_built or (is_dataclass(value) and not isinstance(value, type))


def _inside(value: Any) -> dict[str, Any]:
    """Return the values in a config by name. Empty for a class or a module."""
    if isinstance(value, (type, nn.Module)):
        return {}
    inside = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return {str(key): item for key, item in inside.items() if not str(key).startswith("_")}


def _returned_call(name: str, returned: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a function returned with its module. Raises `InputError` for anything else."""
    args: Any = returned[0] if returned else ()
    kwargs: Any = returned[1] if len(returned) > 1 else {}
    if len(returned) > 2 or not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise InputError(
            f"{name}() returned a module and {', '.join(map(a_kind, returned))}. Return (module, args) or "
            "(module, args, kwargs): args is a tuple and kwargs a dictionary, for its forward."
        )
    return tuple(args), dict(kwargs)


def _build(function: Callable[..., Any], bound: Arguments, name: str, spec: TargetSpec) -> Any:
    called = f"{name}({', '.join(f'{n}={_plain(value)}' for n, value in bound.values.items())})"
    try:
        with of_bounded_number(shown(called)), torch.device("meta") if spec.device == "meta" else nullcontext():
            seed_everything(spec.seed)  # again, because the import may have drawn numbers
            return function(**bound.values)
    except Exception as error:
        if isinstance(error, DoesNotFitError) or is_out_of_memory(error):
            raise
        raise InputError(f"{called} cannot be built: {in_one_line(error)}") from None


def _plain(value: Any) -> Any:
    """Return a value as plain data for the report."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.__name__ if isinstance(value, type) else a_kind(value)


# -- the device -------------------------------------------------------------------------------------------------------


def available() -> list[str]:
    """Return the names of the available devices: cpu, meta, and each accelerator."""
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return ["cpu", "meta", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def resolve(name: str, dtype: str) -> torch.device:
    """Return the device called `name` (`cuda` is the current CUDA device), which can run `dtype`.

    Raises `DeviceError` if it is unknown or absent, or cannot multiply in this dtype.
    """
    here = available()
    wanted = "cuda:0" if name == "cuda" else name
    if wanted not in here:
        cpu_alone = wanted.startswith("cuda") and torch.version.cuda is None and torch.version.hip is None
        why = f": torch {torch.__version__} is built for the CPU only" if cpu_alone else ""
        raise DeviceError(f"device {shown(repr(name))} is not available{why}. Available devices: {', '.join(here)}.")
    device = torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(wanted)
    if device.type == "meta" or (device.type == "cpu" and dtype in ("float32", "float64")):
        return device
    try:  # a small product and softmax, to see whether they work
        probe = torch.ones(2, 2, device="cpu").to(device=device, dtype=getattr(torch, dtype))
        (probe @ probe).softmax(dim=-1).cpu()
    except (RuntimeError, TypeError, NotImplementedError):  # backends differ in how they refuse a dtype
        raise DeviceError(f"device {device} cannot run dtype {dtype}. Try --dtype float32 or --device cpu.") from None
    return device
