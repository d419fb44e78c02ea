"""What is in a file of tensors, by its suffix: of .safetensors and .npy the header tells it."""

from __future__ import annotations

import json
import warnings
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import InputError, UnsafeFileError
from ..text import shown
from .pickled import read_pickled
from .stored import DamagedError, StoredTensor, opened, path_name, read_exactly

if TYPE_CHECKING:
    from torch import Tensor

_SAFETENSORS_DTYPES = {
    **{"BOOL": ("bool", 8), "BF16": ("bfloat16", 16), "C64": ("complex64", 64)},
    **{f"I{bits}": (f"int{bits}", bits) for bits in (8, 16, 32, 64)},
    **{f"U{bits}": (f"uint{bits}", bits) for bits in (8, 16, 32, 64)},
    **{f"F{bits}": (f"float{bits}", bits) for bits in (16, 32, 64)},
    **{"F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8), "F8_E8M0": ("float8_e8m0fnu", 8)},
    **{"F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8)},
    **{"F4": ("float4_e2m1", 4), "F6_E2M3": ("float6_e2m3", 6), "F6_E3M2": ("float6_e3m2", 6)},
}
"""A format's name of a dtype, to torch's name and the bits of an element."""
_LONGEST_SAFETENSORS_HEADER = 25_000_000
"""Bytes: some 200,000 tensors."""
_MOST_DIMENSIONS = 64
"""More than any tensor that torch or numpy computes with has."""


def read_safetensors(file: BinaryIO, size: int, path: Path) -> dict[str, StoredTensor]:
    """Return the tensors by name. Raises `InputError` where the header is none, or does not fit the file.

    Our own reading of the header, since it needs neither torch nor a library that a checkpoint is shown without.
    """
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
    named = dict(pairs)
    if len(named) != len(pairs):
        raise DamagedError
    return named


def _tensor(entry: dict[str, Any], start: int, size: int, path: Path) -> StoredTensor:
    dtype, bits = _SAFETENSORS_DTYPES[entry["dtype"]]
    shape, (first, last) = _sizes(entry["shape"]), _sizes(entry["data_offsets"])
    if first > last or start + last > size or prod(shape) * bits != 8 * (last - first):
        raise DamagedError
    read = partial(_read_bytes, path, start + first, last - first, shape, dtype)
    return StoredTensor(shape, dtype, last - first, read)


def _sizes(value: object) -> tuple[int, ...]:
    """Return a shape or offsets out of a header. Raises `DamagedError` for what cannot be one."""
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        raise DamagedError
    if not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise DamagedError
    return tuple(value)


def _read_bytes(path: Path, offset: int, nbytes: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    import torch

    data = _bytes(path, offset, nbytes)
    kind: torch.dtype = getattr(torch, dtype)
    if kind == torch.bool:  # a byte that is neither 0 nor 1 may be anything to torch's kernels
        return torch.frombuffer(data, dtype=torch.uint8).ne(0).reshape(shape)
    return torch.frombuffer(data, dtype=kind).reshape(shape)


def _bytes(path: Path, offset: int, nbytes: int) -> bytearray:
    try:
        with opened(path, "readable") as (file, _):
            return read_exactly(file, offset, nbytes)
    except DamagedError:
        raise InputError(f"{path_name(path)} has become shorter meanwhile. Try it again.") from None


def read_npy(file: BinaryIO, size: int, path: Path) -> StoredTensor:
    """Return the array as its header has it.

    Raises:
        InputError: it is not a .npy file, is cut short, or holds something else than numbers.
        UnsafeFileError: it holds Python objects.
    """
    import numpy as np
    from numpy.lib import format

    name = path_name(path)
    if not file.read(6) == format.MAGIC_PREFIX:
        raise InputError(f"{name} is not a .npy file: numpy's signature is missing. Save it with numpy.save.")
    file.seek(0)
    try:
        read_header = (
            format.read_array_header_1_0 if format.read_magic(file) == (1, 0) else format.read_array_header_2_0
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sizes, by_columns, dtype = read_header(file)
        shape = _sizes([*sizes])
    except Exception:  # numpy's reading of a header raises what its tokenizer and its parser do
        raise InputError(f"{name} is cut short or damaged: its header cannot be read. Save it again.") from None
    if dtype.hasobject:
        end = "and opening it would run their code. Save an array of numbers."
        raise UnsafeFileError(f"{name} holds Python objects, {end}")
    if dtype.kind not in "biufc" or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise InputError(
            f"{name} holds {shown(dtype.name)}, and tensors hold numbers or booleans. Save an array of those."
        )
    start, nbytes = file.tell(), prod(shape) * dtype.itemsize
    if start + nbytes > size:
        raise InputError(f"{name} is cut short: its header says shape {shown([*shape])}, and the file is smaller.")

    def read() -> Tensor:
        import torch

        flat = np.frombuffer(_bytes(path, start, nbytes), dtype).astype(dtype.newbyteorder("="))
        array = flat.reshape(shape[::-1]).T if by_columns else flat.reshape(shape)
        return torch.from_numpy(np.ascontiguousarray(array)).reshape(shape)

    return StoredTensor(shape, dtype.name, nbytes, read)


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
