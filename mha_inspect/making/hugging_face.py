"""Models of Hugging Face transformers from a configuration: `hf:TYPE` and `hf:DIRECTORY`.

The network is never used, and code that a configuration names is never imported.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import (
    DoesNotFitError,
    ExitCode,
    InputError,
    MhaInspectError,
    SpecError,
    UnsafeFileError,
    is_out_of_memory,
)
from ..files.checkpoint import read_json
from ..text import did_you_mean, shown
from .arguments import convert, of_bounded_number, settings_of_forward, unknown_setting
from .importing import in_one_line
from .vocabulary import ALIASES, Flags, dashed, named_for, plain

INSTALL = 'pip install "mha-inspect[hf]"'
_ATTENTION = "attn_implementation"
_FEWER = "--set num_hidden_layers=2 --set hidden_size=64"
"""Settings that make most types small."""
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")

Built = tuple[nn.Module, dict[str, Any], tuple[str, ...], dict[str, Any]]


class NetworkNeededError(MhaInspectError):
    """The model is not on this machine, and nothing is downloaded."""

    exit_code = ExitCode.REFUSED


def build_model(text: str, settings: Mapping[str, str], flags: Flags, device: str, seed: int) -> Built:
    """Build the model that `hf:TYPE` or `hf:DIRECTORY` names.

    Returns the module, the values passed to its configuration by name as plain data, notes on how it was built, and
    the arguments of its forward that --set gave.

    Raises `MhaInspectError` if the model is missing, unknown, unsafe, too large or not on this machine.
    """
    transformers = _transformers()
    kind = text.removeprefix("hf:")
    if not kind:
        raise InputError("hf: is missing the model. Write hf:TYPE, e.g. hf:bert, or hf:DIRECTORY.")
    if "small" in settings:
        raise SpecError(
            f"{flags.setting} small is gone. Give sizes, e.g. {_FEWER}, or show shapes only: --device meta."
        )
    settings = dict(settings)
    attention = settings.pop(_ATTENTION, None)
    values, weights, is_file = dict[str, Any](), list[Path](), Path(kind).exists()
    if is_file:
        file = Path(kind) / "config.json" if Path(kind).is_dir() else Path(kind)
        values = read_config(file, text)
        kind = str(values.pop("model_type"))
        weights = [*file.parent.glob("*.safetensors"), *file.parent.glob("pytorch_model*.bin")]
    config_class = _config_class(transformers, kind, text, values if is_file else None)
    changes, left = _of_settings(config_class, values, settings, flags.setting)
    of_flags = _of_flags(config_class, values, changes, flags)
    config = _config(config_class, {**_with_layers_cut(values, changes), **changes}, text)
    extra = {} if attention is None else {_ATTENTION: attention}
    module = _build(_model_class(transformers, config, kind), config, extra, weights, text, device, seed)
    said = "with the weights of the directory" if weights else f"with random weights from seed {seed}"
    said = "without weights, on meta" if device == "meta" else said
    notes = [f"Built from a configuration of type {kind}, {said}."]
    if of_flags:
        notes.append(f"Configured with {', '.join(of_flags)}.")
    passed = {name: value for name, value in changes.items() if not isinstance(value, dict)}
    for part, inner in changes.items():
        plain_values = inner.items() if isinstance(inner, dict) else ()
        passed |= {f"{part}.{name}": value for name, value in plain_values if not isinstance(value, (dict, list))}
    names = [*_setting_names(config_class), _ATTENTION]
    chosen = settings_of_forward(module, left, names, f"the configuration of {kind}", {}, flags.setting)
    return module, passed, tuple(notes), chosen


def _transformers() -> ModuleType:
    """Return the library, set to offline mode.

    Raises `InputError` with the command that installs it if it is missing.
    """
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if importlib.util.find_spec("transformers") is None:
        raise InputError(f"hf: needs transformers, which is not installed. Install it: {INSTALL}")
    try:
        import transformers
    except Exception as error:
        raise InputError(f"transformers is installed but cannot be imported: {in_one_line(error)}") from None
    hub = sys.modules.get("huggingface_hub.constants")
    if hub is not None:
        # The environment may have been read already: set the constant made from it too.
        vars(hub)["HF_HUB_OFFLINE"] = True
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # An optional library: Any for mypy if it is not installed.
    return transformers  # type: ignore[no-any-return]  # not installed where mypy runs


# -- the configuration ------------------------------------------------------------------------------------------------


def read_config(file: Path, text: str) -> dict[str, Any]:
    """Return the values of a configuration file. Raises `InputError` if it is not one."""
    way_out = "Give a folder that save_pretrained wrote, or a type, e.g. hf:bert."
    if not os.path.isfile(file):
        raise InputError(f"{shown(text)}: config.json not found in {shown(str(file.parent))}. {way_out}")
    values = read_json(file)
    if not isinstance(values.get("model_type"), str):
        raise InputError(
            f"{shown(str(file))} is not a configuration of a Hugging Face model: model_type is missing. {way_out}"
        )
    return values


def _config_class(transformers: ModuleType, kind: str, text: str, values: Mapping[str, Any] | None) -> Any:
    """Return the configuration class of a type; `values` is the content of its file, None without a file."""
    known = sorted(transformers.CONFIG_MAPPING.keys())
    spelled = {plain(name.replace("-", "_")): name for name in known}
    name = kind if kind in known or values is not None else spelled.get(plain(kind.replace("-", "_")))
    if name in known:
        return transformers.CONFIG_MAPPING[name]
    if values is not None:
        said = f"{shown(text)} is of type {shown(kind)}, which transformers"
        if "auto_map" in values:
            raise UnsafeFileError(
                f"{said} does not have. Its configuration names custom code, which is never run. Import the class "
                "yourself: path/to/file.py:Name."
            )
        raise InputError(f"{said} {transformers.__version__} does not have.{did_you_mean(kind, known)}")
    if kind.startswith((".", "/", "~")):
        raise InputError(
            f"there is no folder {shown(kind)}. Give one that save_pretrained wrote, or a type, e.g. hf:bert."
        )
    started = [name for name in known if kind.casefold().startswith((f"{name}-", f"{name}_"))]
    if "/" in kind or started:
        guess = f" For its shapes with random weights: hf:{max(started, key=len)}." if started else ""
        raise NetworkNeededError(
            f"{shown(kind)} is not a folder here, and nothing is downloaded. Download it first "
            f"(hf download {shown(kind)} --local-dir DIR) and give hf:DIR.{guess}"
        )
    near = did_you_mean(kind, known) or f" There are {len(known)} types, e.g. bert, gpt2, llama, t5 and vit."
    raise InputError(f"{shown(kind)} is not a folder, and not a model type of transformers.{near}")


def _setting_names(config_class: Any) -> list[str]:
    """Return every name that --set could give a configuration, with names of all configurations last."""
    every = [f.name for f in dataclasses.fields(config_class)] if dataclasses.is_dataclass(config_class) else []
    special = [name for name in every if name in vars(config_class).get("__annotations__", {})]
    names = dict.fromkeys((*special, *getattr(config_class, "attribute_map", {}), *every))
    return [name for name in names if not name.startswith("_")]


def _mapped(config_class: Any, name: str) -> str:
    return str(getattr(config_class, "attribute_map", {}).get(name, name))


def _of_settings(
    config_class: Any, values: Mapping[str, Any], settings: Mapping[str, str], flag: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of a configuration by name, and the settings that it does not have."""
    changes: dict[str, Any] = {}
    left: dict[str, str] = {}
    parts: dict[str, Any] = getattr(config_class, "sub_configs", {}) or {}
    known = {part: _setting_names(kind) if hasattr(kind, "model_type") else [] for part, kind in parts.items()}
    for key, text in settings.items():
        part, point, name = key.partition(".")
        owners = {part: name} if point and part in parts else {part: key for part in parts if key in known[part]}
        if point and part in parts and name not in known[part]:
            raise SpecError(unknown_setting(key, [f"{part}.{name}" for name in known[part]], part, flag))
        if key in _setting_names(config_class):
            owners = {"": key}
        for owner, name in owners.items():
            kind = parts[owner] if owner else config_class
            into = changes.setdefault(owner, dict(values.get(owner) or {})) if owner else changes
            mapped = _mapped(kind, name)
            into[mapped] = convert(key, text, Any, getattr(kind, mapped, Parameter.empty), {}, flag)
        if not owners:
            left[key] = text
    return changes, left


def _of_flags(config_class: Any, values: Mapping[str, Any], changes: dict[str, Any], flags: Flags) -> list[str]:
    """Add the values of flags to the `changes` of a configuration; return in words which were added."""
    names, said = _setting_names(config_class), []
    for flag in sorted(flags.given & set(ALIASES) - {"seq_len", "causal", "batch_first"}):
        name = next(iter(named_for(flag, names)), None)
        if name is None and flag in flags.typed:
            raise SpecError(
                f"the configuration {config_class.__name__} has no setting for {dashed(flag)}. Name the setting: "
                f"{flags.setting} NAME=VALUE."
            )
        if name is not None and _mapped(config_class, name) not in changes:
            changes[_mapped(config_class, name)] = flags.value(flag)
            said.append(f"{name}={flags.value(flag)} ({dashed(flag)})")
    with suppress(Exception):  # a configuration may have no defaults
        default = config_class()
        if default.vocab_size is None and values.get("vocab_size", changes.get("vocab_size")) is None:
            opened_up = {"vocab_size": 32} | ({"pad_token_id": 0} if default.pad_token_id is None else {})
            changes |= opened_up
            said += [f"{name}={value} (it had none)" for name, value in opened_up.items()]
    return said


def _with_layers_cut(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration with fewer layers: lists by layer are cut with them."""
    count = next((name for name in _COUNTS if name in changes and name in values), None)
    if count is None:
        return values
    every, fewer = values[count], changes[count]
    is_cut = {name for name, value in values.items() if isinstance(value, list) and len(value) == every > fewer}
    return {name: value[:fewer] if name in is_cut else value for name, value in values.items()}


def _config(config_class: Any, values: dict[str, Any], text: str) -> Any:
    """Return the configuration with these values. Raises `InputError` if its checks refuse them."""
    try:
        return config_class.from_dict(values) if values else config_class()
    except Exception as error:
        raise InputError(f"{shown(text)} cannot have these settings: {in_one_line(error)}") from None


# -- the model --------------------------------------------------------------------------------------------------------


def _model_class(transformers: ModuleType, config: Any, kind: str) -> Any:
    mapping = transformers.MODEL_MAPPING
    if type(config) not in mapping:
        raise InputError(
            f"transformers has no base model for type {shown(kind)}, which is a part of other models. "
            "Give its class, transformers:NAME, or another type."
        )
    kind_of_model = mapping[type(config)]
    return kind_of_model[0] if isinstance(kind_of_model, (tuple, list)) else kind_of_model


def _build(
    model_class: Any, config: Any, extra: Mapping[str, Any], weights: list[Path], text: str, device: str, seed: int
) -> nn.Module:
    """Return the model. Raises `DoesNotFitError` if it has too many parameters, or they need too much memory."""
    before = torch.get_default_dtype()
    module: nn.Module
    try:
        torch.manual_seed(seed)
        if device == "meta" or not weights:
            with torch.device("meta" if device == "meta" else "cpu"), of_bounded_number(shown(text)):
                module = model_class._from_config(config, **extra)
            return module
        safe = any(path.suffix == ".safetensors" for path in weights)
        asked = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": safe, "weights_only": True}
        module = model_class.from_pretrained(str(weights[0].parent), config=config, **asked, **extra)
        return module
    except MhaInspectError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            way = f"Make it smaller, e.g. {_FEWER}, or show shapes only: --device meta."
            raise DoesNotFitError(f"{shown(text)} needs more memory than is free. {way}") from None
        raise InputError(f"{shown(text)} cannot be built: {in_one_line(error)}") from None
    finally:
        torch.set_default_dtype(before)
