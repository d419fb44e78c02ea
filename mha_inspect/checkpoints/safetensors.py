"""The header of a .safetensors file, which is all that tells its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError
from .stored import BITS, DamagedError, StoredTensor, contiguous, path_name, read_exactly, sizes_of

_DTYPES = {
    **{"BOOL": "bool", "BF16": "bfloat16", "C64": "complex64"},
    **{
        f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1"},
    **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
    **{"F6_E2M3": "float6_e2m3", "F6_E3M2": "float6_e3m2"},
}
_LONGEST_HEADER = 25_000_000
"""Bytes: some 200,000 tensors."""


def read_safetensors(file: BinaryIO, size: int, path: Path) -> dict[str, StoredTensor]:
    """Return the tensors by name. Raises `InputError` where the header is none, or does not fit the file."""
    name = path_name(path)
    try:
        length = int.from_bytes(read_exactly(file, 0, 8), "little")
        if length > min(size - 8, _LONGEST_HEADER):
            raise DamagedError
        header = json.loads(read_exactly(file, 8, length), object_pairs_hook=_without_duplicates)
        entries = {key: value for key, value in header.items() if key != "__metadata__"}
        return {key: _tensor(value, 8 + length, size, path) for key, value in entries.items()}
    # RecursionError: nested as deep as no header is.
    except (DamagedError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{name} is not a .safetensors file, or it is cut short. Save it again.") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise DamagedError
    return found


def _tensor(entry: dict[str, Any], start: int, size: int, path: Path) -> StoredTensor:
    dtype, shape = _DTYPES[entry["dtype"]], sizes_of(entry["shape"])
    first, last = sizes_of(entry["data_offsets"])
    tensor = StoredTensor(shape, dtype, contiguous(shape), path, start + first)
    if first > last or start + last > size or tensor.numel * BITS[dtype] != 8 * (last - first):
        raise DamagedError
    return tensor
