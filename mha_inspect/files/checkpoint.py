"""The tensors of a checkpoint, in one file or in many, and the numbers of the config.json beside them."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, UnsafeFileError
from ..text import a_kind, plural, shown
from .content import READERS, content_of
from .pickled import Unknown, Unusual, made_by_code
from .stored import StoredTensor, opened, path_name

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_INDEX = ".index.json"
_PLACES = (
    "*.safetensors.index.json",
    "*.safetensors",
    "*.bin.index.json",
    "pytorch_model*.bin",
    "*.bin",
    "*.pth",
    "*.pt",
)
"""What is looked for in a folder: the first of these that is there."""
_STATE_DICTS = ("state_dict", "model_state_dict", "model", "module", "net", "params", "ema", "weights")
"""Under what training scripts save the state dict of a model, beside that of its optimizer."""
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""What stands before every name where a model was wrapped."""
_LONGEST_JSON = 2**25
_DEEPEST = 16


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, in the order of their layers."""

    path: Path
    tensors: dict[str, StoredTensor]
    config: Mapping[str, Any]
    """What config.json says; empty where there is none."""
    notes: tuple[str, ...]


def is_checkpoint(text: str) -> bool:
    """Return whether a text is the path of a file of tensors by its form, or a folder."""
    return text.casefold().endswith((*READERS, _INDEX)) or (":" not in text and os.path.isdir(text))


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the tensors of a file, of the files that an index names, or of those in a folder.

    Raises:
        InputError: there are none, or a file is damaged or absent.
        UnsafeFileError: a file is compressed, or what is in it is made by code alone.
    """
    files, notes = _files(path), []
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        held, inside = _state_dict(content_of(file, SUFFIXES), file)
        twice = next((name for name in held if name in tensors), None)
        if twice is not None:
            raise InputError(f"{shown(twice)} is in two files of {path_name(path)}. Name one of the files.")
        tensors |= held
        notes += [f"The tensors are those under {inside!r} of the file."] if inside else []
    if not tensors:
        raise InputError(f"{path_name(path)} holds no tensors. Give a file that has some: {', '.join(SUFFIXES)}.")
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
            notes.append(f"{wrapper} stands before every name in the file, and is left out.")
    if len(files) > 1:
        notes.append(f"The tensors lie in {plural(len(files), 'file')}.")
    ordered = {name: tensors[name] for name in sorted(tensors, key=_natural)}
    config: Mapping[str, Any] = {}
    with suppress(InputError):  # it only adds to what the tensors say
        config = _json((path if os.path.isdir(path) else path.parent) / "config.json")
    return Checkpoint(path, ordered, config, tuple(notes))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() and len(part) < 19 else (0, part) for part in re.split(r"(\d+)", name)]


def _files(path: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(path)) if os.path.isdir(path) else None
    except OSError as error:
        raise InputError(f"{path_name(path)} cannot be read: {error.strerror}.") from None
    places = ([path / name for name in fnmatch.filter(names or [], place)] for place in _PLACES)
    found = [path] if names is None else next((own for own in places if own), [])
    if not found:
        raise InputError(f"{path_name(path)} has no file of tensors in it: {', '.join(SUFFIXES)}. Name another folder.")
    if not found[0].name.casefold().endswith(_INDEX):
        return found
    weights = _json(found[0]).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(name, str) for name in weights.values()):
        raise InputError(f"{path_name(found[0])} is no index of shards: it has no weight_map. Name the files' folder.")
    shards = sorted(set(weights.values()))
    outside = next((name for name in shards if Path(name).name != name), None)
    if outside is not None:
        raise UnsafeFileError(f"{path_name(found[0])} names {shown(outside)}: shards lie beside their index alone.")
    return [found[0].parent / name for name in shards]


def _json(path: Path) -> dict[str, Any]:
    with opened(path, ".json") as (file, size):
        try:
            if size > _LONGEST_JSON:
                raise ValueError
            data = json.loads(file.read(size))
        except (ValueError, RecursionError):
            raise InputError(f"{path_name(path)} is not JSON that can be read. Save it again.") from None
    return data if isinstance(data, dict) else {}


def _state_dict(content: Any, path: Path) -> tuple[dict[str, StoredTensor], str]:
    """Return the tensors in a file by name, and under what they lie in it."""
    if isinstance(content, dict):
        named = {name: _flat(content[name]) for name in _STATE_DICTS if isinstance(content.get(name), dict)}
        if any(isinstance(value, StoredTensor) for value in content.values()):
            named = {}
        inside = next((name for name, own in named.items() if own), "")
        own = named.get(inside, _flat(content))
        if own:
            return own, inside
    if isinstance(content, StoredTensor):
        return {path.stem: content}, ""
    if isinstance(content, Unknown):
        raise made_by_code(path_name(path), content.name)
    what = content.kind if isinstance(content, Unusual) else a_kind(content)
    what = "a dict without tensors" if isinstance(content, dict) else what
    raise InputError(f"{path_name(path)} is {what}, and not a state dict. Save model.state_dict().")


def _flat(content: Mapping[Any, Any]) -> dict[str, StoredTensor]:
    """Return the tensors in dicts within dicts, with points between the names."""
    found: dict[str, StoredTensor] = {}
    level = {str(key): held for key, held in content.items()}
    for _ in range(_DEEPEST):
        found |= {name: held for name, held in level.items() if isinstance(held, StoredTensor)}
        dicts = {name: held for name, held in level.items() if isinstance(held, dict)}
        level = {f"{name}.{key}": inner for name, held in dicts.items() for key, inner in held.items()}
    return found
