"""Models of Hugging Face transformers, from a configuration: `hf:TYPE` and `hf:DIRECTORY`.

Nothing here touches the network, and no code is imported because a configuration names it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import InputError, MhaInspectError, is_out_of_memory
from ..files.memory import require_memory
from ..text import message_of, shown
from .hugging_face_config import (
    NetworkNeededError,
    config_values,
    find_config_class,
    make_config,
    one_line,
    read_config,
    require_few_layers,
    setting_names,
)
from .hugging_face_small import small_values
from .importing import in_one_line
from .target import Target, TargetSpec, of_bounded_number, settings_of_forward
from .values import convert

INSTALL = 'pip install "mha-inspect[hf]"'
_ATTENTION = "attn_implementation"
_SMALL = "small"
_LARGE = 60_000_000
"""Parameters from which a small model is made smaller still, if it can be."""
_TOKENIZERS = ("tokenizer", "vocab", "spiece", "sentencepiece", "source.spm")
"""How the files of tokenizers begin."""
_NETWORK = re.compile(
    r"couldn't connect|offline mode|OfflineMode|outgoing traffic|ConnectionError|cached files|resolve"
)


def load_hugging_face(text: str, settings: Mapping[str, str], spec: TargetSpec) -> Target:
    """Build the model that `hf:TYPE` or `hf:DIRECTORY` names.

    Raises:
        InputError: transformers is missing, or the type or the configuration is none.
        SpecError: a setting is none of the configuration's.
        NetworkNeededError: it would have to be downloaded.
        UnsafeFileError: the configuration asks for code of its own.
        DoesNotFitError: the model is larger than the free memory.
    """
    transformers = _transformers()
    name = text.removeprefix("hf:")
    if not name:
        raise InputError("hf: names no model. Write hf:TYPE, as in hf:bert, or hf:DIRECTORY.")
    own = dict(settings)
    attention = own.pop(_ATTENTION, None)
    small = own.pop(_SMALL, "false")
    place = Path(name)
    kind, held, weights = name, dict[str, Any](), list[Path]()
    if place.exists():
        file = place / "config.json" if place.is_dir() else place
        held = read_config(file, text)
        kind = str(held.pop("model_type"))
        weights = [*file.parent.glob("*.safetensors"), *file.parent.glob("pytorch_model*.bin")]
    config_class = find_config_class(transformers, kind, text, held if place.exists() else None)
    described = f"a configuration of type {kind}"
    if convert(_SMALL, small, bool, False, {}):
        # Weights would not fit it.
        (held, smaller), weights = _small(transformers, config_class, held, text), []
        described = f"a small configuration of type {kind}, {smaller}"
    values, left, flags = config_values(config_class, held, own, spec)
    require_few_layers({**held, **values}, text)
    config = make_config(config_class, {**held, **values}, text)
    model_class = _model_class(transformers, config, kind)
    extra = {} if attention is None else {_ATTENTION: attention}
    module = _build(model_class, config, extra, weights, text, spec)
    chosen = settings_of_forward(
        module, left, [*setting_names(config_class), _ATTENTION, _SMALL], f"the configuration of {kind}", {}
    )
    said = "its weights are those in the directory" if weights else f"its weights are random, from seed {spec.seed}"
    said = "on meta it has shapes and no weights" if spec.device == "meta" else said
    notes = [f"{type(module).__name__} was built from {described}; {said}."]
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
        vars(hub)["HF_HUB_OFFLINE"] = True
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # An optional library: where it is absent, mypy knows it as Any.
    return transformers  # type: ignore[no-any-return]


def tokenized(target: str, text: str) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Return the ids of a text, `batch seq`, and what each stands for, by the tokenizer in `hf:DIRECTORY`.

    Raises `InputError` where there is none, or it cannot be read.
    """
    place = Path(target.removeprefix("hf:"))
    if not target.startswith("hf:") or not place.is_dir():
        raise InputError(f"--text needs a tokenizer, and {shown(target)} has none: name a directory, as in hf:path/to.")
    # Where there is none, transformers makes one up that knows no word.
    if not any(file.name.startswith(_TOKENIZERS) for file in place.iterdir()):
        raise InputError(f"{shown(target)} has no tokenizer: save one there, with tokenizer.save_pretrained.")
    transformers = _transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(place), local_files_only=True, trust_remote_code=False
        )
        ids = tokenizer(text)["input_ids"]
        names = tokenizer.convert_ids_to_tokens(ids)
    except Exception as error:
        raise InputError(f"{shown(target)} has no tokenizer that can be read: {in_one_line(error)}") from None
    if not ids:
        raise InputError(f"--text {shown(text)} has no tokens. Give some words.")
    return torch.tensor([ids]), tuple(map(str, names))


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


def _small(
    transformers: ModuleType, config_class: Any, held: Mapping[str, Any], text: str
) -> tuple[dict[str, Any], str]:
    """Return the first small configuration that can be built, or a smaller one where that is still large.

    Also returns how it was made smaller, in words.
    """
    before = torch.get_default_dtype()
    ways = [*small_values(config_class, held, text)]
    built: list[tuple[int, int]] = []
    for at, (values, _) in enumerate(ways):
        with suppress(Exception), torch.device("meta"):
            config = make_config(config_class, values, text)
            module = _model_class(transformers, config, text)._from_config(config)
            built.append((sum(parameter.numel() for parameter in module.parameters()), at))
            if built[-1][0] <= _LARGE:
                return ways[at]
        torch.set_default_dtype(before)
    return ways[min(built)[1] if built else -1]  # why it cannot be built is told where it is


def _build(
    model_class: Any, config: Any, extra: Mapping[str, Any], weights: list[Path], text: str, spec: TargetSpec
) -> nn.Module:
    """The model; it is made without memory first, to learn how much it would take."""
    before = torch.get_default_dtype()
    try:
        with torch.device("meta"), of_bounded_number(shown(text)):
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
            f"A small one of its kind needs less (--set {_SMALL}=true); shapes need none (--device meta).",
        )
        torch.manual_seed(spec.seed)
        if not weights:
            made: nn.Module = model_class._from_config(config, **extra)
            return made
        read: nn.Module = model_class.from_pretrained(
            str(weights[0].parent),
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=any(path.suffix == ".safetensors" for path in weights),
            weights_only=True,
            ignore_mismatched_sizes=False,
            **extra,
        )
        return read
    except MhaInspectError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        said = f"{type(error).__name__} {message_of(error)}"
        if _NETWORK.search(said) and isinstance(error, (OSError, ConnectionError)):
            raise NetworkNeededError(
                f"{shown(text)} would have to download a part of it, and nothing is downloaded: {in_one_line(error)}"
            ) from None
        raise InputError(f"{shown(text)} cannot be built: {one_line(error)}") from None
    finally:
        torch.set_default_dtype(before)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": item for key, item in value.items() if not isinstance(item, (Mapping, list))}
        else:
            flat[name] = list(value) if isinstance(value, tuple) else value
    return flat
