"""Read the tensors of a checkpoint, in one file or several, and the config.json beside them."""

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
from ..text import plural, shown
from .tensors import READERS, StoredTensor, Unknown, content_of, kind_of, made_by_code, opened, path_name

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
METADATA = ".metadata"
"""The file of torch.distributed.checkpoint that lists the tensors of a folder."""
_INDEX = ".index.json"
_PLACES = ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin", "*.pth", "*.pt")
"""File patterns in a folder, by priority: the first pattern with a match is read."""
_STATE_DICTS = ("state_dict", "model_state_dict", "model", "module", "net", "params", "ema", "weights")
"""Keys under which training scripts save a model's state dict, beside the optimizer's."""
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""Prefixes of every name if the model was wrapped."""
_LONGEST_JSON = 2**25
_DEEPEST = 16


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, in the order of their layers."""

    path: Path
    tensors: dict[str, StoredTensor]
    config: Mapping[str, Any]
    """The content of config.json; empty if there is no such file."""
    notes: tuple[str, ...]


def is_checkpoint(text: str) -> bool:
    """Return whether a text has the form of a path to a file of tensors, or is the path of a folder."""
    return text.casefold().endswith((*READERS, _INDEX, METADATA)) or (":" not in text and os.path.isdir(text))


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the tensors of a file, of the files in an index, or of the files in a folder.

    Raise the errors of `content_of`, and `InputError` if there are no tensors.
    """
    files, notes = _files(path), []
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        inner, key = _state_dict(content_of(file, SUFFIXES), file)
        twice = next((name for name in inner if name in tensors), None)
        if twice is not None:
            raise InputError(f"{shown(twice)} is in two files of {path_name(path)}. Give one of the files.")
        tensors |= inner
        notes += [f"The tensors come from the key {key!r} of the file."] if key else []
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
            notes.append(f"Every name in the file begins with {wrapper}, which is omitted here.")
    if len(files) > 1:
        notes.append(f"The tensors are in {plural(len(files), 'file')}.")
    config: Mapping[str, Any] = {}
    with suppress(InputError):  # a config is optional
        config = read_json((path if os.path.isdir(path) else path.parent) / "config.json")
    return Checkpoint(path, {name: tensors[name] for name in sorted(tensors, key=_natural)}, config, tuple(notes))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() and len(part) < 19 else (0, part) for part in re.split(r"(\d+)", name)]


def _files(path: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(path)) if os.path.isdir(path) else None
    except OSError as error:
        raise InputError(f"{path_name(path)} cannot be read: {error.strerror}.") from None
    places = ([path / name for name in fnmatch.filter(names or [], place)] for place in _PLACES)
    files = [path] if names is None else next(filter(None, places), [])
    if path.name == METADATA or (not files and METADATA in (names or [])):
        convert = "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(FOLDER, 'model.pt')"
        raise InputError(f"{path_name(path)} is a distributed checkpoint. Convert it: {convert}")
    if not files:
        raise InputError(f"{path_name(path)} has no file of tensors ({', '.join(SUFFIXES)}). Give another folder.")
    if not files[0].name.casefold().endswith(_INDEX):
        return files
    weights = read_json(files[0]).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(name, str) for name in weights.values()):
        raise InputError(f"{path_name(files[0])} is not an index of shards: weight_map is missing. Give their folder.")
    shards = sorted(set(weights.values()))
    outside = next((name for name in shards if Path(name).name != name), None)
    if outside is not None:
        raise UnsafeFileError(f"{path_name(files[0])} names {shown(outside)}, but shards must be beside their index.")
    return [files[0].parent / name for name in shards]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty for any other value. Raise `InputError` if it cannot be read."""
    with opened(path, ".json") as (file, size):
        try:
            if size > _LONGEST_JSON:
                raise ValueError
            data = json.loads(file.read(size))
        except (ValueError, RecursionError):
            raise InputError(f"{path_name(path)} is not valid JSON. Save it again.") from None
    return data if isinstance(data, dict) else {}


def _state_dict(content: Any, path: Path) -> tuple[dict[str, StoredTensor], str]:
    """Return the tensors of a file by name, and the key of the file that they are under; empty if there is none."""
    if isinstance(content, StoredTensor):
        return {path.stem: content}, ""
    if isinstance(content, Unknown):
        raise made_by_code(path_name(path), content.name)
    if isinstance(content, dict):
        inside = () if any(isinstance(value, StoredTensor) for value in content.values()) else _STATE_DICTS
        for name in (*inside, ""):
            tensors = _flat(content.get(name) if name else content)
            if tensors:
                return tensors, name
    kind = "a dict without tensors" if isinstance(content, dict) else kind_of(content)
    raise InputError(f"{path_name(path)} is {kind}, expected a state dict. Save model.state_dict().")


def _flat(content: object, depth: int = 0) -> dict[str, StoredTensor]:
    """Return the tensors of nested dicts, with dots between the names."""
    tensors: dict[str, StoredTensor] = {}
    for key, value in content.items() if isinstance(content, dict) and depth < _DEEPEST else ():
        if isinstance(value, StoredTensor):
            tensors[str(key)] = value
        tensors |= {f"{key}.{name}": tensor for name, tensor in _flat(value, depth + 1).items()}
    return tensors
