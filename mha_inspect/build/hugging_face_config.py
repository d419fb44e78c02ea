"""Configurations of Hugging Face transformers: found by type or read from a file, and what --set and flags change."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import typing
from collections.abc import Mapping
from contextlib import suppress
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import DoesNotFitError, ExitCode, InputError, MhaInspectError, SpecError, UnsafeFileError
from ..files.stored import opened
from ..text import did_you_mean, message_of, shown
from .arguments import unknown_setting
from .importing import in_one_line
from .target import TargetSpec
from .values import convert
from .vocabulary import ALIASES, dashed, named_for, plain

_MOST_LAYERS = 5000
_LONGEST_FILE = 2**24
"""Bytes of a configuration: those that save_pretrained writes have some thousands."""
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
_LENGTHS = ("layer_types", "mlp_layer_types")
"""Lists in a config with one entry a layer, which follow num_hidden_layers."""


class NetworkNeededError(MhaInspectError):
    """What was asked for is not on this machine, and nothing is downloaded."""

    exit_code = ExitCode.REFUSED


def read_config(file: Path, text: str) -> dict[str, Any]:
    """What the file of a configuration says. Raises `InputError` where it is none."""
    if not os.path.isfile(file):
        raise InputError(
            f"{shown(text)}: there is no config.json in {shown(str(file.parent))}. Give a folder that save_pretrained "
            "wrote, or a type, as in hf:bert."
        )
    try:
        with opened(file, ".json") as (content, _):
            held = json.loads(content.read(_LONGEST_FILE))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{shown(str(file))} is not a configuration: {in_one_line(error)}") from None
    if not isinstance(held, dict) or not isinstance(held.get("model_type"), str):
        raise InputError(
            f"{shown(str(file))} is not a configuration of a Hugging Face model: it has no model_type. Give a folder "
            "that save_pretrained wrote, or a type, as in hf:bert."
        )
    return held


def require_few_layers(values: Mapping[str, Any], text: str) -> None:
    """Raise `DoesNotFitError` for more layers than can be built: each takes milliseconds, also without memory."""
    for own in (values, *(value for value in values.values() if isinstance(value, Mapping))):
        for name in _COUNTS:
            number = own.get(name)
            if isinstance(number, int) and number > _MOST_LAYERS:
                raise DoesNotFitError(
                    f"{shown(text)} has {name} {shown(number)}, and at most {_MOST_LAYERS} layers can be built. "
                    f"Fewer show the same: --set {name}=2."
                )


def find_config_class(transformers: ModuleType, kind: str, text: str, held: Mapping[str, Any] | None) -> Any:
    """The class of a type's configuration; `held` is what its file says, where it is out of one."""
    known = sorted(transformers.CONFIG_MAPPING.keys())
    if kind in known:
        return transformers.CONFIG_MAPPING[kind]
    spelled = next((name for name in known if plain(name.replace("-", "_")) == plain(kind.replace("-", "_"))), None)
    if spelled is not None and held is None:
        return transformers.CONFIG_MAPPING[spelled]
    if held is not None and "auto_map" in held:
        raise UnsafeFileError(
            f"{shown(text)} is of type {shown(kind)}, which transformers does not have: its configuration names code "
            "of its own, and that is not run. Import the class yourself: path/to/file.py:Name."
        )
    if held is not None:
        raise InputError(
            f"{shown(text)} is of type {shown(kind)}, which transformers {transformers.__version__} does not have."
            f"{did_you_mean(kind, known)}"
        )
    if kind.startswith((".", "/", "~")):
        raise InputError(
            f"there is no folder {shown(kind)}. Give one that save_pretrained wrote, or a type, as hf:bert."
        )
    started = [name for name in known if kind.casefold().startswith((f"{name}-", f"{name}_"))]
    if "/" in kind or started:
        guess = f" Its shapes with random weights: hf:{max(started, key=len)}." if started else ""
        raise NetworkNeededError(
            f"{shown(kind)} is not a folder here, and nothing is downloaded. Download it first "
            f"(hf download {shown(kind)} --local-dir DIR) and give hf:DIR.{guess}"
        )
    near = did_you_mean(kind, known) or f" There are {len(known)}, among them bert, gpt2, llama, t5 and vit."
    raise InputError(f"{shown(kind)} is neither a folder nor a type of model that transformers has.{near}")


def setting_names(config_class: Any) -> list[str]:
    """Every name that --set could give a configuration."""
    every = [f.name for f in dataclasses.fields(config_class)] if dataclasses.is_dataclass(config_class) else []
    own = [name for name in every if name in vars(config_class).get("__annotations__", {})]
    # What every configuration has is the least of it.
    names = dict.fromkeys((*own, *getattr(config_class, "attribute_map", {}), *every))
    return [name for name in names if not name.startswith("_")]


def _hints(config_class: Any) -> dict[str, Any]:
    with suppress(Exception):  # it may name what is not installed
        # An annotation may name what is imported for type checkers alone.
        return typing.get_type_hints(config_class, localns={"torch": sys.modules["torch"]})
    return {}


def config_values(
    config_class: Any, held: Mapping[str, Any], settings: Mapping[str, str], spec: TargetSpec
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """What --set and our flags change in a configuration; what is left of --set; and which flags went where."""
    values: dict[str, Any] = {}
    left: dict[str, str] = {}
    parts: dict[str, Any] = getattr(config_class, "sub_configs", {}) or {}
    known = {part: setting_names(kind) if hasattr(kind, "model_type") else [] for part, kind in parts.items()}
    names = setting_names(config_class)
    for key, text in settings.items():
        head, _, tail = key.partition(".")
        if tail and head in parts and tail not in known[head]:
            raise SpecError(unknown_setting(key, [f"{head}.{name}" for name in known[head]], head))
        if key in names:
            values[_own_name(config_class, key)] = _converted(config_class, key, text)
            continue
        owners = [head] if tail and head in parts else [part for part in parts if key in known[part]]
        for part in owners:
            inner = values.setdefault(part, dict(held.get(part) or {}))
            own = tail if tail and head in parts else key
            inner[_own_name(parts[part], own)] = _converted(parts[part], own, text)
            _shorten_lists(inner)
        if not owners:
            left[key] = text
    flags = []
    for flag in sorted(spec.flags.given & set(ALIASES) - {"seq_len", "causal", "batch_first"}):
        name = next(iter(named_for(flag, names)), None)
        if name is None and flag in spec.flags.typed:
            raise SpecError(
                f"the configuration {config_class.__name__} has nothing that {dashed(flag)} could be. Name it: "
                "--set NAME=VALUE."
            )
        if name is not None and _own_name(config_class, name) not in values:
            values[_own_name(config_class, name)] = spec.flags.value(flag)
            flags.append(f"{name}={spec.flags.value(flag)} ({dashed(flag)})")
    for name, value in _open_values(config_class, values, held, spec).items():
        values[name] = value
        flags.append(f"{name}={value} (it says none)")
    return values, left, flags


def _own_name(config_class: Any, name: str) -> str:
    return str(getattr(config_class, "attribute_map", {}).get(name, name))


def _converted(config_class: Any, name: str, text: str) -> Any:
    own = _own_name(config_class, name)
    default = getattr(config_class, own, Parameter.empty)
    return convert(name, text, _hints(config_class).get(own, Parameter.empty), default, {})


def _shorten_lists(part: dict[str, Any]) -> None:
    """Fewer layers leave the rest of what a part lists layer by layer; what the whole lists is cut where it is made."""
    count = next((part[n] for n in _COUNTS if n in part), None)
    if isinstance(count, int):
        part |= {name: part[name][:count] for name in _LENGTHS if isinstance(part.get(name), list)}


def make_config(config_class: Any, values: dict[str, Any], text: str) -> Any:
    """The configuration with these values. Raises `InputError` where its own checks refuse them."""
    try:
        return config_class.from_dict(values) if values else config_class()
    except Exception as error:
        fewer = _with_fewer_layers(config_class, values)
        if fewer is None:
            raise InputError(f"{shown(text)} cannot be configured so: {one_line(error)}") from None
        return fewer


def _with_fewer_layers(config_class: Any, values: Mapping[str, Any]) -> Any:
    """A configuration that lists something layer by layer, whatever it calls that, cut to as many layers as asked for.

    None where it has no such list.
    """
    with suppress(Exception):  # what it is configured by is refused by its own checks: the first refusal is told
        name = next(n for n in _COUNTS if n in values)
        config = config_class.from_dict({n: value for n, value in values.items() if n != name})
        count, every = values[name], getattr(config, name)
        lists = {n: held for n, held in vars(config).items() if isinstance(held, list) and len(held) == every > count}
        for own, value in {name: count, **{n: held[:count] for n, held in lists.items()}}.items():
            setattr(config, own, value)
        return config if lists else None
    return None


def _open_values(
    config_class: Any, values: Mapping[str, Any], held: Mapping[str, Any], spec: TargetSpec
) -> dict[str, int]:
    """What a configuration says nothing of, and no model can be built without."""
    fill = {"vocab_size": 32, "prediction_length": spec.flags.value("seq_len")}
    names = {n for n in setting_names(config_class) if n not in values and held.get(n) is None}
    with suppress(Exception):  # a configuration may have no default at all
        default = config_class()
        found = {n: fill[n] for n in fill if n in names and getattr(default, n) is None}
        if "vocab_size" in found and "pad_token_id" in names and default.pad_token_id is None:
            found["pad_token_id"] = 0
        return found
    return {}


def one_line(error: Exception) -> str:
    """An error in one line. The library's checks of a configuration say what matters in the second one."""
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    return in_one_line(error)
