"""What is in a file of tensors, by its suffix: of .safetensors and .npy the header tells it."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError, UnsafeFileError
from ..text import shown
from .pickled import read_pickled
from .stored import BITS, DamagedError, StoredTensor, contiguous, opened, path_name, read_exactly, sizes_of

_SAFETENSORS_DTYPES = {
    **{"BOOL": "bool", "BF16": "bfloat16", "C64": "complex64"},
    **{
        f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1"},
    **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
    **{"F6_E2M3": "float6_e2m3", "F6_E3M2": "float6_e3m2"},
}
_LONGEST_SAFETENSORS_HEADER = 25_000_000
"""Bytes: some 200,000 tensors."""


def read_safetensors(file: BinaryIO, size: int, path: Path) -> dict[str, StoredTensor]:
    """Return the tensors by name. Raises `InputError` where the header is none, or does not fit the file."""
    name = path_name(path)
    try:
        length = int.from_bytes(read_exactly(file, 0, 8), "little")
        if length > min(size - 8, _LONGEST_SAFETENSORS_HEADER):
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
    dtype, shape = _SAFETENSORS_DTYPES[entry["dtype"]], sizes_of(entry["shape"])
    first, last = sizes_of(entry["data_offsets"])
    tensor = StoredTensor(shape, dtype, contiguous(shape), path, start + first)
    if first > last or start + last > size or tensor.numel * BITS[dtype] != 8 * (last - first):
        raise DamagedError
    return tensor


_DTYPES = {
    **{"b1": "bool", "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128"},
    **{f"{kind[0]}{width}": f"{kind}{8 * width}" for kind in ("int", "uint") for width in (1, 2, 4, 8)},
}
_LONGEST_HEADER = 2**16
_OBJECT = re.compile(r"""["']\|?O\d*["']""")


def read_npy(file: BinaryIO, size: int, path: Path) -> StoredTensor:
    """Return the array as its header has it.

    Raises:
        InputError: it is not a .npy file, is cut short, or holds something else than numbers.
        UnsafeFileError: it holds Python objects.
    """
    name = path_name(path)
    start = bytes(read_exactly(file, 0, min(12, size)))
    if not start.startswith(b"\x93NUMPY"):
        raise InputError(f"{name} is not a .npy file: numpy's signature is missing. Save it with numpy.save.")
    try:
        first = 10 if start[6] == 1 else 12
        length = int.from_bytes(start[8:first], "little")
        if not 1 <= start[6] <= 3 or length > _LONGEST_HEADER:
            raise DamagedError
        header = ast.literal_eval(read_exactly(file, first, length).decode("latin-1"))
        descr, by_columns, sizes = header["descr"], header["fortran_order"], sizes_of(header["shape"])
    except (DamagedError, LookupError, ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise InputError(f"{name} is cut short or damaged: its header cannot be read. Save it again.") from None
    kind = descr.lstrip("<>|=") if isinstance(descr, str) else ""
    dtype = _DTYPES.get(kind)
    if dtype is None:
        if _OBJECT.search(repr(descr)):
            end = "and opening it would run their code. Save an array of numbers."
            raise UnsafeFileError(f"{name} holds Python objects, {end}")
        kind = shown(kind if kind.isalnum() else repr(descr))
        raise InputError(f"{name} holds {kind}, and tensors hold numbers or booleans. Save an array of those.")
    strides = contiguous(sizes[::-1])[::-1] if by_columns else contiguous(sizes)
    swapped = descr[0] == {"little": ">", "big": "<"}[sys.byteorder]
    tensor = StoredTensor(sizes, dtype, strides, path, first + length, swapped)
    if first + length + tensor.nbytes > size and tensor.numel:
        raise InputError(f"{name} is cut short: its header says shape {shown(list(sizes))}, and the file is smaller.")
    return tensor


READERS = {
    **dict.fromkeys((".pt", ".pth", ".bin"), read_pickled),
    **{".npy": read_npy, ".safetensors": read_safetensors},
}


def content_of(path: Path, suffixes: tuple[str, ...]) -> Any:
    """Return the tensors of a file as `StoredTensor`, in the dicts and lists that they lie in.

    Args:
        path: the file.
        suffixes: those that are meant, of `READERS`.

    Raises:
        InputError: the file is absent, cannot be read, or is damaged.
        UnsafeFileError: it is compressed or holds nothing but objects that code makes.
    """
    kinds = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
    with opened(path, kinds) as (file, size):
        suffix = path.suffix.lower()
        if suffix not in suffixes:
            raise InputError(f"{path_name(path)} is not a {kinds} file by its suffix. Give one of those.")
        return READERS[suffix](file, size, path)
