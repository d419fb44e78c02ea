"""Read the tensors of a directory that torch.distributed.checkpoint wrote, without a process group.

Names, shapes and dtypes come from its `.metadata`, a pickle, without torch. No class of the pickle is imported: each
object is a `_Stored`, which only keeps what the pickle says of it.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, UnsafeFileError
from ..text import shown
from .tensors import DTYPE_BITS, StoredTensor, made_by_code, opened, path_name, sizes

if TYPE_CHECKING:
    from torch import Tensor

METADATA = ".metadata"
_LONGEST = 1 << 28
"""Bytes of the metadata; a tensor in 1,000 pieces has about 200,000."""
_EXPECTED = ("torch", "pathlib", "collections")
"""The packages whose classes torch writes into the metadata."""
_PIECE = "torch.distributed.checkpoint.metadata.TensorStorageMetadata"


class _Stored:
    """An object of a pickle: the class that it names, the arguments it is made with, and its state."""

    name = ""

    def __init__(self, *args: Any) -> None: ...

    def __new__(cls, *args: Any) -> _Stored:
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle._Unpickler):  # the one in C allocates whatever number of objects a pickle claims
    def __init__(self, content: bytes, called: str) -> None:
        super().__init__(io.BytesIO(content))
        self._called = called

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in _EXPECTED:
            raise made_by_code(self._called, f"{module}.{name}")
        return type("_Stored", (_Stored,), {"name": f"{module}.{name}"})


def read_distributed(path: Path) -> dict[str, Any]:
    """Return the tensors that a `.metadata` file lists, in the dicts of the state dict that was saved.

    Raise `InputError` if the file is missing or damaged, and `UnsafeFileError` if it names a class that is not torch's.
    """
    with opened(path, METADATA) as (file, size):
        try:
            if size > _LONGEST:
                raise ValueError
            metadata = _Reader(file.read(size), path_name(path)).load().state
            pieces = _pieces(metadata["storage_data"], path)
            nested: dict[str, Any] = {}
            for name, entry in metadata["state_dict_metadata"].items():
                if entry.name == _PIECE:
                    # The keys of the state dict, and its names without these keys.
                    keys = (metadata.get("planner_data") or {}).get(name) or (name,)
                    inside = nested.setdefault(str(keys[0]), {}) if len(keys) > 1 else nested
                    inside[".".join(map(str, keys[1:] or keys))] = _tensor(str(name), entry.state, pieces)
            return nested
        except UnsafeFileError:
            raise
        except Exception:  # an unpickler raises anything for a damaged file
            raise InputError(
                f"{path_name(path)} is not the metadata of torch.distributed.checkpoint, or it is truncated. "
                "Save it again."
            ) from None


Pieces = dict[str, dict[tuple[int, ...], tuple[Path, int, int]]]
"""Name of a tensor to the offset of each of its pieces, and the file, start and length of the piece."""


def _pieces(storage: Any, metadata: Path) -> Pieces:
    pieces: Pieces = {}
    for index, place in storage.items():
        if index.state.get("offset") is not None and not place.state.get("transform_descriptors"):
            file, start, length = (place.state[key] for key in ("relative_path", "offset", "length"))
            if Path(file).name != file:
                raise UnsafeFileError(f"{path_name(metadata)} names {shown(file)}, but its files must be beside it.")
            where = metadata.parent / file, *sizes([start, length])
            pieces.setdefault(index.state["fqn"], {})[_size(index.state["offset"])] = where
    return pieces


def _size(size: Any) -> tuple[int, ...]:
    return sizes(list(*size.args))


def _tensor(name: str, state: Any, pieces: Pieces) -> StoredTensor:
    shape, dtype = _size(state["size"]), state["properties"].state[0].name.removeprefix("torch.")
    parts = [(_size(chunk.state["offsets"]), _size(chunk.state["sizes"])) for chunk in state["chunks"]]
    if any(start + size > whole for part in parts for start, size, whole in zip(*part, shape, strict=True)):
        raise ValueError
    read = partial(_read, name, shape, dtype, parts, pieces.get(name, {}))
    return StoredTensor(shape, dtype, prod(shape) * DTYPE_BITS[dtype] // 8, read)


def _read(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    parts: list[tuple[tuple[int, ...], tuple[int, ...]]],
    pieces: dict[tuple[int, ...], tuple[Path, int, int]],
) -> Tensor:
    """Return a tensor put together from its pieces. Raise `InputError` if a piece is missing or damaged."""
    import torch

    whole, filled = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu"), 0
    for offset, size in parts:
        try:
            file, start, length = pieces[offset]
            with opened(file, ".distcp") as (content, available):
                content.seek(start)
                data = io.BytesIO(content.read(min(length, available)))
            with zipfile.ZipFile(data) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise ValueError
            data.seek(0)
            piece = torch.load(data, map_location="cpu", weights_only=True)
            at = tuple(slice(first, first + count) for first, count in zip(offset, size, strict=True))
            whole[at] = piece.reshape(size)
            filled += piece.numel()
        except InputError:
            raise
        except Exception:  # zipfile and torch raise many kinds of errors for damaged files
            raise InputError(f"a piece of {shown(name)} is missing or damaged. Save the checkpoint again.") from None
    if filled != whole.numel():
        raise InputError(f"the pieces of {shown(name)} have {filled} of {whole.numel()} elements. Save it again.")
    return whole
