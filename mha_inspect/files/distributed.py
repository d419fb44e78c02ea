"""Read which tensors a directory of torch.distributed.checkpoint has, without a process group and without torch.

They are listed in its `.metadata`, a pickle. No class of the pickle is imported: each object is a `_Stored`.
"""

from __future__ import annotations

import io
import pickle
from math import prod
from pathlib import Path
from typing import Any

from ..errors import InputError, UnsafeFileError
from .tensors import DTYPE_BITS, StoredTensor, made_by_code, opened, path_name, sizes

METADATA = ".metadata"
_LONGEST = 1 << 28
"""Bytes of the metadata; a tensor in 1,000 pieces has about 200,000."""
_EXPECTED = ("torch", "pathlib", "collections")
"""The packages whose classes torch writes into the metadata."""
_TENSOR = "torch.distributed.checkpoint.metadata.TensorStorageMetadata"


class _Stored:
    """An object of a pickle: the name of its class, its arguments and its state."""

    name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Stored:
        made = super().__new__(cls)
        made.args = args
        return made

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
    """Return the tensors that a `.metadata` file lists, without numbers, in the dicts of the saved state dict.

    Raise `InputError` if the file is missing or damaged, and `UnsafeFileError` if it names a class that is not torch's.
    """
    with opened(path, METADATA) as (file, size):
        try:
            if size > _LONGEST:
                raise ValueError
            metadata, nested = _Reader(file.read(size), path_name(path)).load().state, dict[str, Any]()
            for name, entry in metadata["state_dict_metadata"].items():
                if entry.name == _TENSOR:
                    keys = (metadata.get("planner_data") or {}).get(name) or (name,)
                    inside = nested.setdefault(str(keys[0]), {}) if len(keys) > 1 else nested
                    inside[".".join(map(str, keys[1:] or keys))] = _tensor(entry.state)
            return nested
        except UnsafeFileError:
            raise
        except Exception:  # an unpickler raises anything for a damaged file
            end = "was not written by torch.distributed.checkpoint, or it is truncated. Save it again."
            raise InputError(f"{path_name(path)} {end}") from None


def _tensor(state: dict[str, Any]) -> StoredTensor:
    shape, dtype = sizes(list(*state["size"].args)), state["properties"].state[0].name.removeprefix("torch.")
    return StoredTensor(shape, dtype, prod(shape) * DTYPE_BITS[dtype] // 8, None)
