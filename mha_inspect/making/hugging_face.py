"""Models of Hugging Face transformers from a configuration: `hf:TYPE` and `hf:DIRECTORY`.

The network is never used, and code that a configuration names is never imported.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
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
from .arguments import settings_of_forward, unknown_setting
from .bounded import built
from .importing import in_one_line
from .settings import convert
from .vocabulary import ALIASES, Flags, dashed, named_for

INSTALL = 'pip install "mha-inspect[hf]"'
_ATTENTION = "attn_implementation"
_FEWER = "--set num_hidden_layers=2 --set hidden_size=64"
"""Settings that make most types small."""
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")


@dataclass(frozen=True)
class BuiltModel:
    """A model, and how it was built."""

    module: nn.Module
    passed: dict[str, Any]
    """The values passed to its configuration by name, as plain data."""
    notes: tuple[str, ...]
    """How it was built, as sentences."""
    forward_settings: dict[str, Any]
    """The arguments of its forward that --set gave."""


class NetworkNeededError(MhaInspectError):
    """The model is not on this machine, and nothing is downloaded."""

    exit_code = ExitCode.REFUSED


def build_model(text: str, settings: Mapping[str, str], flags: Flags, device: str, seed: int) -> BuiltModel:
    """Build the model that `hf:TYPE` or `hf:DIRECTORY` names.

    Raises `MhaInspectError` if the model is missing, unknown, unsafe, too large or not on this machine.
    """
    transformers = _transformers()
    name = text.removeprefix("hf:")
    if not name:
        raise InputError("hf: is missing the model. Write hf:TYPE, e.g. hf:bert, or hf:DIRECTORY.")
    source = _source(transformers, name, text)
    of_config = {key: value for key, value in settings.items() if key != _ATTENTION}
    changes = _Changes({}, {}, {})
    changes.take_settings(source, of_config, flags.setting)
    of_flags = changes.take_flags(source.config_class, flags)
    values = {**_with_layers_cut(source.values, changes.values), **changes.values}
    config = _config(source.config_class, values, text)
    extra = {_ATTENTION: settings[_ATTENTION]} if _ATTENTION in settings else {}
    model_class = _model_class(transformers, config, source.kind)
    module = _build(model_class, config, extra, source.weights, text, device, seed)
    notes = [f"Built from a configuration of type {source.kind}, {_origin_of_weights(source, device, seed)}."]
    if of_flags:
        notes.append(f"Configured with {', '.join(of_flags)}.")
    names = [*_setting_names(source.config_class), _ATTENTION]
    for part, kind in _parts(source.config_class).items():
        names += [f"{part}.{name}" for name in _setting_names(kind)]
    owner = f"the configuration of {source.kind}"
    return BuiltModel(
        module=module,
        passed=changes.passed,
        notes=tuple(notes),
        forward_settings=settings_of_forward(module, changes.left, names, owner, {}, flags.setting),
    )


@dataclass(frozen=True)
class _Source:
    """The configuration that a target names, by its type or in a folder."""

    kind: str
    """The type of model: `bert`."""
    config_class: Any
    values: dict[str, Any]
    """The content of the file; empty for a type."""
    weights: list[Path]
    """The files with weights in the folder."""


def _source(transformers: ModuleType, name: str, text: str) -> _Source:
    """Return the configuration of a folder or file of this name, or else of a type."""
    path = Path(name)
    if not path.exists():
        return _Source(name, _class_of_type(transformers, name), {}, [])
    file = path / "config.json" if path.is_dir() else path
    values = read_config(file, text)
    kind = str(values.pop("model_type"))
    weights = [*file.parent.glob("*.safetensors"), *file.parent.glob("pytorch_model*.bin")]
    return _Source(kind, _class_of_file(transformers, kind, text, values), values, weights)


def _origin_of_weights(source: _Source, device: str, seed: int) -> str:
    """Return where the weights come from, in words."""
    if device == "meta":
        return "without weights, on meta"
    if source.weights:
        return "with the weights of the directory"
    return f"with random weights from seed {seed}"


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


def _class_of_file(transformers: ModuleType, kind: str, text: str, values: Mapping[str, Any]) -> Any:
    """Return the configuration class of the type that a file names; `values` is the content of the file."""
    kinds = sorted(transformers.CONFIG_MAPPING.keys())
    if kind in kinds:
        return transformers.CONFIG_MAPPING[kind]
    said = f"{shown(text)} is of type {shown(kind)}, which transformers"
    if "auto_map" in values:
        raise UnsafeFileError(
            f"{said} does not have. Its configuration names custom code, which is never run. Import the class "
            "yourself: path/to/file.py:Name."
        )
    raise InputError(f"{said} {transformers.__version__} does not have.{did_you_mean(kind, kinds)}")


def _class_of_type(transformers: ModuleType, kind: str) -> Any:
    """Return the configuration class of a type that the user names."""
    kinds = sorted(transformers.CONFIG_MAPPING.keys())
    if kind in kinds:
        return transformers.CONFIG_MAPPING[kind]
    if kind.startswith((".", "/", "~")):
        raise InputError(
            f"there is no folder {shown(kind)}. Give one that save_pretrained wrote, or a type, e.g. hf:bert."
        )
    # A name of a model on the hub begins with its type: `bert-base-uncased`.
    begun = [name for name in kinds if kind.casefold().startswith((f"{name}-", f"{name}_"))]
    if "/" in kind or begun:
        guess = f" For its shapes with random weights: hf:{max(begun, key=len)}." if begun else ""
        raise NetworkNeededError(
            f"{shown(kind)} is not a folder here, and mha-inspect never downloads. Download it first "
            f"(hf download {shown(kind)} --local-dir DIR) and give hf:DIR.{guess}"
        )
    near = did_you_mean(kind, kinds) or f" There are {len(kinds)} types, e.g. bert, gpt2, llama, t5 and vit."
    raise InputError(f"{shown(kind)} is neither a folder nor a model type of transformers.{near}")


def _setting_names(config_class: Any) -> list[str]:
    """Return every name that --set could give a configuration: empty for a part of any type."""
    names = list(getattr(config_class, "attribute_map", {}))
    if dataclasses.is_dataclass(config_class):
        fields = [field.name for field in dataclasses.fields(config_class)]
        # Those of this type first, then those of every configuration.
        of_this_type = vars(config_class).get("__annotations__", {})
        names += sorted(fields, key=lambda name: name not in of_this_type)
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def _mapped(config_class: Any, name: str) -> str:
    return str(getattr(config_class, "attribute_map", {}).get(name, name))


def _parts(config_class: Any) -> Mapping[str, Any]:
    """Return the classes of the parts of a configuration by name: `text_config`."""
    return getattr(config_class, "sub_configs", None) or {}


@dataclass(frozen=True)
class _Changes:
    """The values that the user gave a configuration."""

    values: dict[str, Any]
    """By the names of the configuration; those of a part are in a dictionary."""
    passed: dict[str, Any]
    """The same by the names of the user, those of a part by their path: `text_config.num_hidden_layers`."""
    left: dict[str, str]
    """The settings that the configuration does not have."""

    def take_settings(self, source: _Source, settings: Mapping[str, str], flag: str) -> None:
        """Take the settings of the configuration, or of a part before a point.

        Raises `SpecError` if the part before the point does not have it.
        """
        for key, text in settings.items():
            part, _, name = key.rpartition(".")
            owner, into = source.config_class, self.values
            if part in _parts(source.config_class):
                owner = _parts(source.config_class)[part]
                names = _setting_names(owner)
                if name not in names:
                    raise SpecError(unknown_setting(key, [f"{part}.{name}" for name in names], part, flag))
                into = self.values.setdefault(part, dict(source.values.get(part) or {}))
            elif key not in _setting_names(owner):
                self.left[key] = text
                continue
            mapped = _mapped(owner, name)
            default = getattr(owner, mapped, Parameter.empty)
            into[mapped] = convert(key, text, Any, default, {}, flag)
            self.passed[key] = into[mapped]

    def take_flags(self, config_class: Any, flags: Flags) -> list[str]:
        """Take the values of flags; return in words which were taken."""
        names = _setting_names(config_class)
        said: list[str] = []
        for flag in sorted(flags.given & set(ALIASES) - {"seq_len", "causal", "batch_first"}):
            matching = named_for(flag, names)
            if not matching and flag in flags.typed:
                raise SpecError(
                    f"the configuration {config_class.__name__} has no setting for {dashed(flag)}. Name the setting: "
                    f"{flags.setting} NAME=VALUE."
                )
            if not matching or _mapped(config_class, matching[0]) in self.values:
                continue
            self.values[_mapped(config_class, matching[0])] = flags.value(flag)
            self.passed[matching[0]] = flags.value(flag)
            said.append(f"{matching[0]}={flags.value(flag)} ({dashed(flag)})")
        return said


def _with_layers_cut(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration with fewer layers: lists by layer are cut with them."""
    counts = [name for name in _COUNTS if name in changes and name in values]
    if not counts:
        return values
    num_layers, fewer = values[counts[0]], changes[counts[0]]
    cut = dict(values)
    for name, value in values.items():
        if isinstance(value, list) and len(value) == num_layers > fewer:
            cut[name] = value[:fewer]
    return cut


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
    way = f"Make it smaller, e.g. {_FEWER}, or show shapes only: --device meta."

    def make() -> nn.Module:
        torch.manual_seed(seed)
        made: nn.Module = model_class._from_config(config, **extra)
        return made

    try:
        if device == "meta":
            with torch.device("meta"):
                return built(make, shown(text), way)
        if not weights:
            return built(make, shown(text), way)
        safe = any(path.suffix == ".safetensors" for path in weights)
        asked = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": safe, "weights_only": True}
        module = model_class.from_pretrained(str(weights[0].parent), config=config, **asked, **extra)
        return module
    except MhaInspectError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise DoesNotFitError(f"{shown(text)} needs more memory than is free. {way}") from None
        raise InputError(f"{shown(text)} cannot be built: {in_one_line(error)}") from None
    finally:
        torch.set_default_dtype(before)
