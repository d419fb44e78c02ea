"""Models of Hugging Face transformers, from a configuration: `hf:TYPE` and `hf:DIRECTORY`.

Nothing here touches the network, and no code is imported because a configuration names it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import sys
import typing
from collections.abc import Mapping
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ExitCode, InputError, MhaInspectError, SpecError, UnsafeFileError
from ..memory import require_memory
from .aliases import ALIASES, dashed, plain
from .arguments import unknown_setting
from .importing import in_one_line
from .values import convert, nearest, shown

if TYPE_CHECKING:
    from .target import Target, TargetSpec

INSTALL = 'pip install "mha-inspect[hf]"'
_ATTENTION = "attn_implementation"
_NETWORK = re.compile(
    r"couldn't connect|offline mode|OfflineMode|outgoing traffic|ConnectionError|cached files|resolve"
)
_LENGTHS = ("layer_types", "mlp_layer_types")
"""Lists in a config with one entry a layer, which follow num_hidden_layers."""


class NetworkNeededError(MhaInspectError):
    """What was asked for is not on this machine, and nothing is downloaded."""

    exit_code = ExitCode.REFUSED


def load_hugging_face(text: str, settings: Mapping[str, str], spec: TargetSpec) -> Target:
    """Build the model that `hf:TYPE` or `hf:DIRECTORY` names.

    Raises:
        InputError: transformers is missing, or the type or the configuration is none.
        SpecError: a setting is none of the configuration's.
        NetworkNeededError: it would have to be downloaded.
        UnsafeFileError: the configuration asks for code of its own.
        DoesNotFitError: the model is larger than the free memory.
    """
    from .target import Target, settings_of_forward

    transformers = _transformers()
    name = text.removeprefix("hf:")
    if not name:
        raise InputError("hf: names no model. Write hf:TYPE, as in hf:bert, or hf:DIRECTORY.")
    own = dict(settings)
    attention = own.pop(_ATTENTION, None)
    place = Path(name)
    if place.exists():
        file = place / "config.json" if place.is_dir() else place
        held = _read_config(file, text)
        kind, folder = str(held.pop("model_type")), file.parent
    else:
        kind, held, folder = name, {}, None
    config_class = _config_class(transformers, kind, text, None if folder is None else held)
    values, left, flags = _values(config_class, held, own, spec)
    config = _make_config(config_class, {**held, **values}, text)
    model_class = _model_class(transformers, config, kind)
    module = _build(model_class, config, attention, folder, text, spec)
    chosen = settings_of_forward(module, left, [*_names(config_class), _ATTENTION], f"the configuration of {kind}", {})
    weights = f"its weights are random, from seed {spec.seed}"
    if spec.device == "meta":
        weights = "on meta it has shapes and no weights"
    elif folder is not None and _weights(folder):
        weights = "its weights are those in the directory"
    notes = [f"{type(module).__name__} was built from a configuration of type {kind}; {weights}."]
    if flags:
        notes.append(f"The configuration got {', '.join(flags)}.")
    return Target(module, text, _flat(values), tuple(notes), vars(config), chosen)


def _transformers() -> ModuleType:
    """The library, told to stay off the network.

    Raises `InputError` with the command that installs it, where it is missing.
    """
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if importlib.util.find_spec("transformers") is None:
        raise InputError(f"hf: needs the library transformers, which is not installed. Install it: {INSTALL}")
    try:
        import transformers
    except Exception as error:
        raise InputError(f"transformers is installed and cannot be imported: {in_one_line(error)}") from None
    hub = sys.modules.get("huggingface_hub.constants")
    if hub is not None:
        # The environment is read once, and may have been: the constant is what is asked afterwards.
        hub.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # An optional library: where it is absent, mypy knows it as Any.
    return transformers  # type: ignore[no-any-return]


# -- the configuration ------------------------------------------------------------------------------------------------


def _read_config(file: Path, text: str) -> dict[str, Any]:
    if not file.is_file():
        raise InputError(
            f"{shown(text)}: there is no config.json in {shown(str(file.parent))}. Give a folder that save_pretrained "
            "wrote, or a type, as in hf:bert."
        )
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{shown(str(file))} is not a configuration: {in_one_line(error)}") from None
    if not isinstance(held, dict) or not isinstance(held.get("model_type"), str):
        raise InputError(
            f"{shown(str(file))} is not a configuration of a Hugging Face model: it has no model_type. Give a folder "
            "that save_pretrained wrote, or a type, as in hf:bert."
        )
    return held


def _types(transformers: ModuleType) -> list[str]:
    return sorted(transformers.CONFIG_MAPPING.keys())


def _config_class(transformers: ModuleType, kind: str, text: str, held: Mapping[str, Any] | None) -> Any:
    """The class of a type's configuration; `held` is what its file says, where it is out of one."""
    known = _types(transformers)
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
            f"{nearest(kind, known)}"
        )
    started = [name for name in known if kind.casefold().startswith((f"{name}-", f"{name}_"))]
    if "/" in kind or started:
        guess = f" Its shapes with random weights: hf:{max(started, key=len)}." if started else ""
        raise NetworkNeededError(
            f"{shown(kind)} is not a folder here, and nothing is downloaded. Download it first "
            f"(hf download {shown(kind)} --local-dir DIR) and give hf:DIR.{guess}"
        )
    near = nearest(kind, known) or f" There are {len(known)}, among them bert, gpt2, llama, t5 and vit."
    raise InputError(f"{shown(kind)} is neither a folder nor a type of model that transformers has.{near}")


def _names(config_class: Any) -> list[str]:
    """Every name that --set could give a configuration."""
    every = [f.name for f in dataclasses.fields(config_class)] if dataclasses.is_dataclass(config_class) else []
    own = [name for name in every if name in vars(config_class).get("__annotations__", {})]
    # What every configuration has is the least of it.
    names = dict.fromkeys((*own, *getattr(config_class, "attribute_map", {}), *every))
    return [name for name in names if not name.startswith("_")]


def _hints(config_class: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(config_class)
    except Exception:  # an annotation may name what is not installed
        return {}


def _values(
    config_class: Any, held: Mapping[str, Any], settings: Mapping[str, str], spec: TargetSpec
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """What --set and our flags change in a configuration; what is left of --set; and which flags went where."""
    values: dict[str, Any] = {}
    left: dict[str, str] = {}
    parts: dict[str, Any] = getattr(config_class, "sub_configs", {}) or {}
    for key, text in settings.items():
        head, _, tail = key.partition(".")
        if tail and head in parts:
            _set_part(values, held, parts, head, tail, text, key)
        elif key in _names(config_class):
            values[_own_name(config_class, key)] = _converted(config_class, key, text)
        else:
            owners = [part for part, kind in parts.items() if hasattr(kind, "model_type") and key in _names(kind)]
            for part in owners:
                _set_part(values, held, parts, part, key, text, key)
            if not owners:
                left[key] = text
    flags = []
    for flag in sorted(spec.flags.typed & set(ALIASES) - {"seq_len", "causal", "batch_first"}):
        name = next((n for alias in ALIASES[flag] for n in _names(config_class) if plain(n) == plain(alias)), None)
        if name is None:
            raise SpecError(
                f"the configuration {config_class.__name__} has nothing that {dashed(flag)} could be. Name it: "
                "--set NAME=VALUE."
            )
        if _own_name(config_class, name) not in values:
            values[_own_name(config_class, name)] = spec.flags.value(flag)
            flags.append(f"{name}={spec.flags.value(flag)} ({dashed(flag)})")
    _shorten_lists(held, values)
    return values, left, flags


def _set_part(
    values: dict[str, Any],
    held: Mapping[str, Any],
    parts: Mapping[str, Any],
    part: str,
    name: str,
    text: str,
    key: str,
) -> None:
    kind = parts[part]
    if not hasattr(kind, "model_type") or name not in _names(kind):
        known = [f"{part}.{n}" for n in _names(kind)] if hasattr(kind, "model_type") else []
        raise SpecError(unknown_setting(key, known, part))
    inner = values.setdefault(part, dict(held.get(part) or {}))
    inner[_own_name(kind, name)] = _converted(kind, name, text)
    _shorten_lists(inner, inner)


def _own_name(config_class: Any, name: str) -> str:
    return str(getattr(config_class, "attribute_map", {}).get(name, name))


def _converted(config_class: Any, name: str, text: str) -> Any:
    own = _own_name(config_class, name)
    default = getattr(config_class, own, Parameter.empty)
    return convert(name, text, _hints(config_class).get(own, Parameter.empty), default, {})


def _shorten_lists(held: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Fewer layers leave the rest of what a file lists layer by layer."""
    count = next((values[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if n in values), None)
    for name in _LENGTHS:
        listed = held.get(name)
        if isinstance(count, int) and isinstance(listed, list) and len(listed) > count:
            values.setdefault(name, listed[:count])
            if len(values[name]) > count:
                values[name] = values[name][:count]


def _make_config(config_class: Any, values: dict[str, Any], text: str) -> Any:
    try:
        return config_class.from_dict(values) if values else config_class()
    except Exception as error:
        raise InputError(f"{shown(text)} cannot be configured so: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    """An error in one line. The library's checks of a configuration say what matters in the second one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    return in_one_line(error)


# -- the model --------------------------------------------------------------------------------------------------------


def _model_class(transformers: ModuleType, config: Any, kind: str) -> Any:
    mapping = transformers.MODEL_MAPPING
    if type(config) not in mapping:
        raise InputError(
            f"transformers has no plain model for type {shown(kind)}: it is a part of another one. "
            "Give the class: transformers:NAME, or another type."
        )
    found = mapping[type(config)]
    return found[0] if isinstance(found, (tuple, list)) else found


def _weights(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])


def _build(
    model_class: Any, config: Any, attention: str | None, folder: Path | None, text: str, spec: TargetSpec
) -> nn.Module:
    """The model; it is made without memory first, to learn how much it would take."""
    extra = {} if attention is None else {_ATTENTION: attention}
    before = torch.get_default_dtype()
    try:
        with torch.device("meta"):
            empty: nn.Module = model_class._from_config(config, **extra)
        if spec.device == "meta":
            return empty
        count = sum(parameter.numel() for parameter in empty.parameters())
        size = sum(parameter.numel() * parameter.element_size() for parameter in empty.parameters())
        require_memory(
            # A copy in float64 measures the noise floor.
            size + 8 * count,
            "cpu",
            f"{shown(text)} with {count:,} parameters".replace(",", " "),
            "Fewer layers need less (--set num_hidden_layers=2); shapes need none (--device meta).",
        )
        torch.manual_seed(spec.seed)
        if folder is not None and _weights(folder):
            return _from_folder(model_class, config, folder, extra)
        module: nn.Module = model_class._from_config(config, **extra)
        return module
    except MhaInspectError:
        raise
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if _NETWORK.search(f"{type(error).__name__} {error}") and isinstance(error, (OSError, ConnectionError)):
            raise NetworkNeededError(
                f"{shown(text)} would have to download a part of it, and nothing is downloaded: {in_one_line(error)}"
            ) from None
        raise InputError(f"{shown(text)} cannot be built: {_one_line(error)}") from None
    finally:
        torch.set_default_dtype(before)


def _from_folder(model_class: Any, config: Any, folder: Path, extra: Mapping[str, Any]) -> nn.Module:
    safe = any(path.suffix == ".safetensors" for path in _weights(folder))
    module: nn.Module = model_class.from_pretrained(
        str(folder),
        config=config,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=safe,
        weights_only=True,
        ignore_mismatched_sizes=False,
        **extra,
    )
    return module


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": item for key, item in value.items() if not isinstance(item, (Mapping, list))}
        else:
            flat[name] = list(value) if isinstance(value, tuple) else value
    return flat
