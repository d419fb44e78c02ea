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
    files = _files(path)
    notes: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        stored = _state_dict(content_of(file, SUFFIXES), file)
        for name in stored.tensors:
            if name in tensors:
                raise InputError(f"{shown(name)} is in two files of {path_name(path)}. Give one of the files.")
        tensors |= stored.tensors
        if stored.key:
            notes.append(f"The tensors come from the key {stored.key!r} of the file.")
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
            notes.append(f"Every name in the file begins with {wrapper}, which is omitted here.")
    if len(files) > 1:
        notes.append(f"The tensors are in {plural(len(files), 'file')}.")
    folder = path if os.path.isdir(path) else path.parent
    config: Mapping[str, Any] = {}
    with suppress(InputError):  # a config is optional
        config = read_json(folder / "config.json")
    in_order = {name: tensors[name] for name in sorted(tensors, key=_natural)}
    return Checkpoint(path, in_order, config, tuple(notes))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    key: list[tuple[int, str]] = []
    for part in re.split(r"(\d+)", name):
        # Python parses a number of more digits only slowly, or not at all.
        is_number = part.isdecimal() and len(part) < 19
        key.append((int(part), "") if is_number else (0, part))
    return key


def _files(path: Path) -> list[Path]:
    """Return the files with the tensors of a path: the file itself, those in a folder, or the shards of an index.

    Raise `InputError` if there are none, and `UnsafeFileError` for an index that names files elsewhere.
    """
    files = _files_in(path) if os.path.isdir(path) else [path]
    if path.name == METADATA or (not files and os.path.exists(path / METADATA)):
        convert = "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(FOLDER, 'model.pt')"
        raise InputError(f"{path_name(path)} is a distributed checkpoint. Convert it: {convert}")
    if not files:
        raise InputError(f"{path_name(path)} has no file of tensors ({', '.join(SUFFIXES)}). Give another folder.")
    if files[0].name.casefold().endswith(_INDEX):
        return _shards_of(files[0])
    return files


def _files_in(folder: Path) -> list[Path]:
    """Return the files of a folder that match the first pattern with a match; empty if there are none."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise InputError(f"{path_name(folder)} cannot be read: {error.strerror}.") from None
    for pattern in _PLACES:
        matching = fnmatch.filter(names, pattern)
        if matching:
            return [folder / name for name in matching]
    return []


def _shards_of(index: Path) -> list[Path]:
    """Return the files that an index names, which are beside it."""
    weights = read_json(index).get("weight_map")
    files = list(weights.values()) if isinstance(weights, dict) else []
    if not files or not all(isinstance(name, str) for name in files):
        raise InputError(f"{path_name(index)} is not an index of shards: weight_map is missing. Give their folder.")
    shards = sorted(set(files))
    for name in shards:
        if Path(name).name != name:
            raise UnsafeFileError(f"{path_name(index)} names {shown(name)}, but shards must be beside their index.")
    return [index.parent / name for name in shards]


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


@dataclass(frozen=True)
class _StateDict:
    """The tensors of a file by name."""

    tensors: dict[str, StoredTensor]
    key: str = ""
    """The key of the file that they are under; empty if there is none."""


def _state_dict(content: Any, path: Path) -> _StateDict:
    """Return the tensors of a file. Raise `InputError` if it has none."""
    if isinstance(content, StoredTensor):
        return _StateDict({path.stem: content})
    if isinstance(content, Unknown):
        raise made_by_code(path_name(path), content.name)
    if not isinstance(content, dict):
        raise InputError(f"{path_name(path)} is {kind_of(content)}, expected a state dict. Save model.state_dict().")
    has_tensors = any(isinstance(value, StoredTensor) for value in content.values())
    if not has_tensors:
        for key in _STATE_DICTS:
            tensors = _flat(content.get(key))
            if tensors:
                return _StateDict(tensors, key)
    tensors = _flat(content)
    if not tensors:
        raise InputError(
            f"{path_name(path)} is a dict without tensors, expected a state dict. Save model.state_dict()."
        )
    return _StateDict(tensors)


def _flat(content: object, depth: int = 0) -> dict[str, StoredTensor]:
    """Return the tensors of nested dicts, with dots between the names."""
    tensors: dict[str, StoredTensor] = {}
    if not isinstance(content, dict) or depth >= _DEEPEST:
        return tensors
    for key, value in content.items():
        if isinstance(value, StoredTensor):
            tensors[str(key)] = value
        for name, tensor in _flat(value, depth + 1).items():
            tensors[f"{key}.{name}"] = tensor
    return tensors
