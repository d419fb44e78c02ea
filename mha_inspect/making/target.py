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
from ..running.asserted import asserted_numbers
from ..running.subject import seed_everything
from ..text import a_kind, shown
from .arguments import Arguments, bind, settings_of_forward, signature_of
from .bounded import built
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
        model = build_model(text, settings, spec.flags, spec.device, spec.seed)
        target = Target(
            module=model.module,
            made_from=text,
            passed=model.passed,
            notes=model.notes,
            arguments=vars(model.module.config),
            forward_settings=model.forward_settings,
        )
    else:
        target = _load_python(text, settings, spec)
    target.module.train(spec.training)
    return _moved(target, spec)


def _moved(target: Target, spec: TargetSpec) -> Target:
    """Return a target with its module and arguments on the device and in the dtype of the spec."""
    # Without --dtype, a module that builds itself in half precision keeps its dtype.
    dtype = None if spec.dtype is None else getattr(torch, spec.dtype)
    if dtype is None and spec.device == "cpu":
        return target
    try:
        device = torch.device(spec.device)
        cast_module(target.module, dtype, device)
        return replace(target, call=cast_tensors(target.call, dtype, device))
    except (RuntimeError, NotImplementedError, TypeError) as error:  # no such device, meta, or a dtype of another kind
        raise InputError(f"{target.made_from} cannot be moved to {spec.device}: {in_one_line(error)}") from None


def _load_python(text: str, settings: Mapping[str, str], spec: TargetSpec) -> Target:
    """Import a Python object by its name, and return it if it is a module, or else what it makes."""
    value, home = load_object(text)
    if isinstance(value, nn.Module):
        return _of_module(value, text, settings, spec, vars(home))
    if isinstance(value, type) and not issubclass(value, nn.Module):
        raise InputError(f"{shown(text)} is the class {value.__qualname__}, not {_WANTED}")
    if not callable(value):
        raise InputError(f"{shown(text)} is of type {type(value).__name__}, not {_WANTED}")
    return _of_function(value, text, settings, spec, vars(home))


def _of_module(
    module: nn.Module, text: str, settings: Mapping[str, str], spec: TargetSpec, namespace: Mapping[str, Any]
) -> Target:
    """Return a module of the user as a target. Raises `SpecError` for a setting that only a constructor takes."""
    typed = _OF_CONSTRUCTION & spec.flags.typed
    if typed:
        raise SpecError(
            f"{text} is a module, not a class: {dashed(min(typed))} cannot change it. "
            f"Name its class, {type(module).__name__}, to build another."
        )
    of_forward = settings_of_forward(module, settings, [], text, namespace, spec.flags.setting)
    return Target(module, text, {}, forward_settings=of_forward)


def _of_function(
    function: Callable[..., Any],
    text: str,
    settings: Mapping[str, str],
    spec: TargetSpec,
    namespace: Mapping[str, Any],
) -> Target:
    """Return the module that a class or a function makes as a target."""
    name = getattr(function, "__name__", text.rpartition(":")[2])
    bound = bind(function, settings, spec.flags, namespace, name)
    module = _build(function, bound, name, spec)
    call = None
    if isinstance(module, tuple) and module and isinstance(module[0], nn.Module):
        module, *returned = module
        call = _returned_call(name, returned)
    if not isinstance(module, nn.Module):
        raise InputError(f"{name}() returned {a_kind(module)}, not {_WANTED}")
    forward_settings = settings_of_forward(module, bound.left, bound.names, name, namespace, spec.flags.setting)
    unused = _OF_CONSTRUCTION & spec.flags.typed - bound.used
    if unused:
        raise SpecError(
            f"{name} has no argument for {dashed(min(unused))}. Arguments: "
            f"{', '.join(bound.names) or 'none'}. Drop it, or name the argument: {spec.flags.setting} NAME=VALUE."
        )
    passed = _passed(bound)
    from_flags = [f"{key}={passed[key]} ({flag})" for key, flag in bound.origins.items() if key in passed]
    return Target(
        module=module,
        made_from=text,
        passed=passed,
        notes=(*bound.notes, *([f"Built with {', '.join(from_flags)}."] if from_flags else [])),
        arguments=_with_defaults(function, bound),
        forward_settings=forward_settings,
        call=call,
    )


def _passed(bound: Arguments) -> dict[str, Any]:
    """Return the arguments of a constructor as plain data, those in a config by their path: `config.n_head`."""
    passed: dict[str, Any] = {}
    in_configs: dict[str, Any] = {}
    for name, value in bound.values.items():
        if not _is_config(value, name, bound):
            passed[name] = _plain(value)
            continue
        for key, inner in _inside(value).items():
            in_configs[f"{name}.{key}"] = _plain(inner)
    return {**passed, **in_configs}


def _with_defaults(function: Callable[..., Any], bound: Arguments) -> dict[str, Any]:
    """Return every argument of a constructor by name: its defaults, the values in a config, and those passed."""
    arguments: dict[str, Any] = {}
    for name, parameter in signature_of(function).items():
        if parameter.default is not Parameter.empty:
            arguments[name] = parameter.default
    for value in bound.values.values():
        arguments.update(_inside(value))
    return {**arguments, **bound.values}


def _is_config(value: Any, name: str, bound: Arguments) -> bool:
    """Return whether an argument is a config: one that was built of settings, or a dataclass."""
    if any(key.startswith(f"{name}.") for key in bound.names):
        return True
    return is_dataclass(value) and not isinstance(value, type)


def _inside(value: Any) -> dict[str, Any]:
    """Return the values in a config by name. Empty for a class or a module."""
    if isinstance(value, (type, nn.Module)):
        return {}
    fields = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    inside: dict[str, Any] = {}
    for key, item in fields.items():
        if not str(key).startswith("_"):
            inside[str(key)] = item
    return inside


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
    """Return the result of a constructor, on meta if the spec says so. Raises `InputError` if it raises."""
    values = ", ".join(f"{key}={_plain(value)}" for key, value in bound.values.items())
    called = f"{name}({values})"
    on_meta = torch.device("meta") if spec.device == "meta" else nullcontext()

    def make() -> Any:
        with on_meta, torch.enable_grad():  # as Python itself: a function may train what it returns
            seed_everything(spec.seed)  # again, because the import may have drawn numbers
            return function(**bound.values)

    try:
        return built(make, shown(called), "Make it smaller, or show shapes only: --device meta.")
    except Exception as error:
        if isinstance(error, DoesNotFitError) or is_out_of_memory(error):
            raise
        numbers = asserted_numbers(error)
        what = f"{called} cannot be built: {in_one_line(error)}"
        raise InputError(f"{what}: {numbers}" if numbers else what) from None


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
    names = ["cpu", "meta"]
    if torch.cuda.is_available():
        names += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return names


def resolve(name: str, dtype: str) -> torch.device:
    """Return the device called `name` (`cuda` is the current CUDA device), which can run `dtype`.

    Raises `DeviceError` if it is unknown or absent, or cannot multiply in this dtype.
    """
    here = available()
    wanted = "cuda:0" if name == "cuda" else name
    if wanted not in here:
        is_cpu_build = torch.version.cuda is None and torch.version.hip is None
        why = ""
        if wanted.startswith("cuda") and is_cpu_build:
            why = f": torch {torch.__version__} is built for the CPU only"
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
