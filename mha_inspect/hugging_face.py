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

from .errors import ExitCode, InputError, MhaInspectError, SpecError, UnsafeFileError
from .memory import require_memory
from .target_aliases import ALIASES, dashed, plain
from .target_arguments import unknown_setting
from .target_import import in_one_line
from .target_values import convert, nearest, shown

if TYPE_CHECKING:
    from .spec import InputSpec
    from .target import Target, TargetSpec
    from .target_inputs import Plan

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
    config_class = _config_class(transformers, kind, text, held)
    values, left, flags = _values(config_class, held, own, spec)
    config = _make_config(config_class, {**held, **values}, text)
    model_class = _model_class(transformers, config, kind)
    module = _build(model_class, config, attention, folder, text, spec)
    chosen = settings_of_forward(module, left, [*_names(config_class), _ATTENTION], f"the configuration of {kind}", {})
    weights = "those in the directory" if folder is not None and _weights(folder) else f"random, from seed {spec.seed}"
    notes = [f"{type(module).__name__} was built from a configuration of type {kind}; its weights are {weights}."]
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
        hub.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
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


def _config_class(transformers: ModuleType, kind: str, text: str, held: Mapping[str, Any]) -> Any:
    known = _types(transformers)
    if kind in known:
        return transformers.CONFIG_MAPPING[kind]
    spelled = next((name for name in known if plain(name.replace("-", "_")) == plain(kind.replace("-", "_"))), None)
    if spelled is not None and not held:
        return transformers.CONFIG_MAPPING[spelled]
    if "auto_map" in held:
        raise UnsafeFileError(
            f"{shown(text)} is of type {shown(kind)}, which transformers does not have: its configuration names code "
            "of its own, and that is not run. Import the class yourself: path/to/file.py:Name."
        )
    if held:
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
    own = [f.name for f in dataclasses.fields(config_class)] if dataclasses.is_dataclass(config_class) else []
    return [name for name in (*own, *getattr(config_class, "attribute_map", {})) if not name.startswith("_")]


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


# -- inputs -----------------------------------------------------------------------------------------------------------


def is_hugging_face(module: nn.Module) -> bool:
    """Whether a module is a whole model of transformers, which says itself what it takes."""
    return hasattr(module, "main_input_name") and hasattr(getattr(module, "config", None), "model_type")


def plans_of(module: nn.Module, names: list[str], free: set[str], inputs: InputSpec) -> dict[str, Plan]:
    """Plans for the arguments that the configuration tells about: those in `names`, and what has to come with them.

    Args:
        module: of transformers.
        names: arguments that are needed.
        free: arguments that nobody has given.
        inputs: for batch and lengths.
    """
    config: Any = module.config
    wanted = list(names)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in free:
        wanted.append("decoder_input_ids")
    if hasattr(module, "logit_scale") and "pixel_values" in free:
        wanted.append("pixel_values")  # a text and an image are held against each other
    decodes = "decoder_input_ids" in wanted
    plans = {}
    for name in dict.fromkeys(wanted):
        plan = _plan(name, config, inputs, decodes)
        if plan is not None:
            plans[name] = plan
    return plans


def _plan(name: str, config: Any, inputs: InputSpec, decodes: bool) -> Plan | None:
    from .target_inputs import Plan

    batch = inputs.batch
    key_len = inputs.seq_len if inputs.key_len is None else inputs.key_len
    if name in ("input_ids", "decoder_input_ids"):
        length = key_len if decodes and name == "input_ids" else inputs.seq_len
        words = config.get_text_config(decoder=name == "decoder_input_ids")
        vocabulary = getattr(words, "vocab_size", None)
        if not isinstance(vocabulary, int):
            return None
        return Plan("ids", (batch, length), "int64", vocabulary, _special(words))
    if name in ("pixel_values", "pixel_values_videos"):
        return _image(getattr(config, "vision_config", config), batch)
    if name == "input_values":
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
            return Plan("other", (batch, config.max_length, config.num_mel_bins))
        return Plan("other", (batch, 400 + 320 * (inputs.seq_len - 1)))
    if name == "input_features":
        if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
            return Plan("other", (batch, config.num_mel_bins, 2 * config.max_source_positions))
        for field, times in (("input_feat_per_channel", 4), ("feature_projection_input_dim", 1), ("num_mel_bins", 1)):
            if isinstance(getattr(config, field, None), int):
                return Plan("other", (batch, times * key_len, getattr(config, field)))
    return None


def _special(config: Any) -> tuple[int, ...]:
    """Tokens that mean something of their own: a padding token would be left out, and its position counted anew."""
    special: list[int] = []
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        special += [
            v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, int) and v >= 0
        ]
    return tuple(dict.fromkeys(special))


def _image(config: Any, batch: int) -> Plan:
    from .target_inputs import Plan

    size = getattr(config, "image_size", None) or getattr(config, "crop_size", None) or 224
    if isinstance(size, Mapping):
        size = (size["height"], size["width"])
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))
    channels = next((getattr(config, n) for n in ("num_channels", "in_channels", "in_chans") if hasattr(config, n)), 3)
    if hasattr(config, "tubelet_size") or hasattr(config, "num_frames"):
        return Plan("image", (batch, getattr(config, "num_frames", 8), channels, height, width))
    return Plan("image", (batch, channels, height, width))
