"""Read the tensors of a .pt or .safetensors file: shapes and dtypes first, the numbers on request.

No code in a file is run, its sizes are checked before any copy, and no file stays memory-mapped.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import DoesNotFitError, InputError, UnsafeFileError, is_out_of_memory
from ..text import MESSAGE, a_kind, byte_size, printable, shortened, shown

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".pt", ".pth", ".safetensors")
"""Suffixes of files with inputs and masks."""
_LONGEST_PATH = 200
_UNUSUAL = "a sparse, nested or quantized tensor"
"""Tensors whose elements have no strides."""
_SAFETENSORS_DTYPES = {
    **{"BOOL": ("bool", 8), "BF16": ("bfloat16", 16), "C64": ("complex64", 64)},
    **{f"I{bits}": (f"int{bits}", bits) for bits in (8, 16, 32, 64)},
    **{f"U{bits}": (f"uint{bits}", bits) for bits in (8, 16, 32, 64)},
    **{f"F{bits}": (f"float{bits}", bits) for bits in (16, 32, 64)},
    **{"F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8), "F8_E8M0": ("float8_e8m0fnu", 8)},
    **{"F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8)},
    **{"F4": ("float4_e2m1", 4), "F6_E2M3": ("float6_e2m3", 6), "F6_E3M2": ("float6_e3m2", 6)},
}
"""The format's dtype name to torch's name and the bits of an element."""
_LONGEST_SAFETENSORS_HEADER = 25_000_000
"""Bytes; enough for about 200,000 tensors."""
_MOST_DIMENSIONS = 64
"""The maximal number of dimensions in torch."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, before its numbers are read."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name of the dtype."""
    nbytes: int
    """Bytes of the whole tensor, counting every element that a stride of 0 repeats."""
    read: Callable[[], Tensor] | None
    """Returns a contiguous copy on the CPU; None if the file has no numbers for the tensor (meta)."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def has_numbers(self) -> bool:
        """Whether the file has real numbers for the tensor: False if it is empty, complex or on meta."""
        return self.numel > 0 and self.read is not None and not self.dtype.startswith("complex")


class Unknown:
    """Placeholder for an object of a class that torch.load does not know: its class name only; no code is run."""

    name = ""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def read_tensors(path: Path) -> Tensor | dict[str, Tensor]:
    """Return the tensor in the file, or its tensors by name, on the CPU and without gradients.

    If meta is the default device, the tensors are made there with the shapes and dtypes of the file, without numbers.

    Raise the errors of `content_of`, `InputError` for any other object, and `DoesNotFitError` for a tensor larger than
    the free memory.
    """
    name, content = path_name(path), content_of(path, SUFFIXES)
    if not isinstance(content, dict):
        return _read(content, name)
    for key in content:
        if not isinstance(key, str):
            raise InputError(f"{name} has the key {shown(repr(key))}, expected tensor names. Use strings as keys.")
    return {key: _read(value, f"{shown(repr(key))} in {name}") for key, value in content.items()}


def read_tensor(path: Path) -> Tensor:
    """Return the mask in the file, which has one tensor, named or not.

    Raise the errors of `read_tensors`, and `InputError` for any other number of tensors.
    """
    import torch

    with torch.device("cpu"):  # a mask needs its numbers, whatever the default device
        content = read_tensors(path)
    if not isinstance(content, dict):
        return content
    if len(content) != 1:
        names = shortened(", ".join(map(repr, content)) or "none", MESSAGE // 2)
        raise InputError(f"{path_name(path)} has {len(content)} tensors ({names}), expected 1. Save only the mask.")
    return next(iter(content.values()))


def _read(value: Any, name: str) -> Tensor:
    """Return a `StoredTensor` as a tensor. Raise `InputError` for any other object and for an empty tensor."""
    if isinstance(value, Unknown):
        raise made_by_code(name, value.name)
    if not isinstance(value, StoredTensor):
        kind = kind_of(value)
        if kind == _UNUSUAL:
            raise InputError(f"{name} is {kind}. Save tensor.to_dense() or tensor.dequantize().")
        raise InputError(f"{name} is {kind}, expected a tensor. Save a tensor, or a dict of tensors by name.")
    if value.numel == 0:
        raise InputError(f"{name} is empty: its shape is {list(value.shape)}. Every size must be 1 or more.")
    return read_stored(value, name)


def read_stored(stored: StoredTensor, name: str) -> Tensor:
    """Return a copy of a stored tensor on the CPU; without numbers if meta is the default device.

    Raise `InputError` if it has no numbers or torch lacks its dtype, and `DoesNotFitError` if it needs more bytes than
    the free memory.
    """
    import torch

    dtype = getattr(torch, stored.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(
            f"{name} has dtype {stored.dtype}, which torch {torch.__version__} does not support. Cast it first."
        )
    if torch.get_default_device().type == "meta":
        return torch.empty(stored.shape, dtype=dtype)
    if stored.read is None:
        shape = list(stored.shape)
        raise InputError(f"{name} is on device meta: it has shape {shape} and no numbers. Save it from another device.")
    try:
        return stored.read()
    except (RuntimeError, MemoryError) as error:  # a stride of 0 lets a file of a few bytes claim any size
        if not is_out_of_memory(error):
            raise
        raise DoesNotFitError(
            f"{name} with shape {shown([*stored.shape])} needs {byte_size(stored.nbytes)}, more than the free memory. "
            "Save a smaller tensor."
        ) from None


def content_of(path: Path, suffixes: tuple[str, ...]) -> Any:
    """Return the content of a file, with each tensor as a `StoredTensor`, in the dicts of the file.

    Any other object is returned unchanged, or as `Unknown`. The suffix of the file is one of `suffixes`, keys of
    `READERS`.

    Raise `InputError` if the file is missing or damaged, and `UnsafeFileError` if it is compressed or needs code to
    load.
    """
    kinds = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
    with opened(path, kinds) as (file, size):
        suffix = path.suffix.lower()
        if suffix == ".npy":
            way = "Convert it: torch.save(torch.from_numpy(array), FILE)."
            raise InputError(f"{path_name(path)} is an array of numpy, expected {kinds}. {way}")
        if suffix not in suffixes:
            raise InputError(f"{path_name(path)} does not end in {kinds}. Give such a file.")
        return READERS[suffix](file, size, path)


@contextmanager
def opened(path: Path, kinds: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file, and yield it with its size in bytes. Refuse pipes, which would block, and devices.

    Raise `InputError` if the file is missing, empty, unreadable or no regular file. `kinds` is a list of suffixes for
    the message.
    """
    name = path_name(path)
    if "\0" in str(path):
        raise InputError(f"{name} is not a valid path. Give the path of a {kinds} file.")
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError(f"{name} is not a file. Give the path of a {kinds} file.")
        # O_NONBLOCK: do not wait for a pipe that replaces the file between the check and this call.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(path, flags), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise InputError(f"{name} is empty: 0 bytes. Save it again.")
            yield file, size
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise InputError(f"{name} was not found. Give the path of a {kinds} file.") from None
        raise InputError(f"{name} cannot be read: {error.strerror or 'the file is truncated or damaged'}.") from None


def path_name(path: Path) -> str:
    """Return a path as messages show it: printable, and at most 200 characters long."""
    return printable(path, _LONGEST_PATH)


def kind_of(value: object) -> str:
    """Return the kind of an object that is no `StoredTensor`, e.g. `a list`."""
    return _UNUSUAL if hasattr(value, "layout") else a_kind(value)


def made_by_code(name: str, kind: str) -> UnsafeFileError:
    """Return the error for an object that only its own class can load."""
    return UnsafeFileError(
        f"{name} is a pickled object ({shown(kind)}). Opening it would run its code. "
        "Save plain tensors: torch.save(tensor, file), or a dict of tensors."
    )


def _read_safetensors(file: BinaryIO, size: int, path: Path) -> dict[str, StoredTensor]:
    """Read the header without torch and without safetensors: a checkpoint is shown without either."""
    try:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _LONGEST_SAFETENSORS_HEADER):
            raise ValueError
        header = json.loads(file.read(length))
        tensors: dict[str, StoredTensor] = {}
        for key, entry in header.items():
            if key != "__metadata__":
                tensors[key] = _entry(entry, 8 + length, size, path)
        return tensors
    # RecursionError: nested deeper than any real header.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path_name(path)} is not a .safetensors file, or it is truncated. Save it again.") from None


def _entry(entry: Any, start: int, size: int, path: Path) -> StoredTensor:
    """Return the tensor of an entry of a header. `start` is where the numbers of the file begin, `size` its bytes.

    Raise `ValueError`, `KeyError` or `TypeError` for an invalid entry.
    """
    dtype, bits = _SAFETENSORS_DTYPES[entry["dtype"]]
    shape = _sizes(entry["shape"])
    first, last = _sizes(entry["data_offsets"])
    nbytes = last - first
    if nbytes < 0 or start + last > size or prod(shape) * bits != 8 * nbytes:
        raise ValueError
    read = partial(_read_bytes, path, start + first, nbytes, shape, dtype)
    return StoredTensor(shape, dtype, nbytes, read)


def _sizes(value: Any) -> tuple[int, ...]:
    """Return a shape or offsets of a header as a tuple. Raise `ValueError` for an invalid value."""
    is_short = isinstance(value, (list, tuple)) and len(value) <= _MOST_DIMENSIONS
    if not is_short or not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise ValueError
    return tuple(value)


def _read_bytes(path: Path, offset: int, nbytes: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    import torch

    data = bytearray(nbytes)
    with opened(path, "readable") as (file, _):
        file.seek(offset)
        if file.readinto(data) != nbytes:  # type: ignore[attr-defined]  # a buffered reader has it
            raise _shorter(path)
    kind: torch.dtype = getattr(torch, dtype)
    if kind == torch.bool:  # torch's kernels misread bytes other than 0 and 1
        return torch.frombuffer(data, dtype=torch.uint8).ne(0).reshape(shape)
    return torch.frombuffer(data, dtype=kind).reshape(shape)


def _shorter(path: Path) -> InputError:
    return InputError(f"{path_name(path)} became shorter while it was read. Try again.")


def _read_pickled(file: BinaryIO, size: int, path: Path) -> Any:
    """Read a file of torch.save without loading unknown classes. The numbers of a zip archive stay in the file."""
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    name = path_name(path)
    classes: list[str] = []
    try:
        is_zip = file.read(4) == b"PK\x03\x04"
        if is_zip:
            _require_stored(file, name)
            classes = get_unsafe_globals_in_checkpoint(path)
        stand_ins = [(type("Unknown", (Unknown,), {"name": name}), name) for name in classes]
        with warnings.catch_warnings(), torch.device("cpu"), safe_globals(list(stand_ins)):
            warnings.simplefilter("ignore")
            return _with_stored(torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip))
    except (InputError, UnsafeFileError, OSError):
        raise
    except Exception as error:  # zipfile and torch raise many kinds of errors for damaged files
        if is_out_of_memory(error):
            raise
        if classes:
            raise made_by_code(name, classes[0]) from None
        raise InputError(f"{name} was not written by torch.save, or it is truncated. Save it again.") from None


def _require_stored(file: BinaryIO, name: str) -> None:
    """Raise `UnsafeFileError` if an entry of a zip archive is compressed."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise UnsafeFileError(
            f"{name} is compressed, so its unpacked size is unlimited. "
            "Save the tensor again with torch.save, which does not compress."
        )


def _with_stored(content: Any) -> Any:
    """Return the content with each tensor in its dicts as a `StoredTensor`."""
    import torch

    if isinstance(content, torch.Tensor):
        if content.layout != torch.strided or content.is_quantized or content.is_nested:
            return content
        values = content.detach().resolve_conj().resolve_neg()
        return StoredTensor(
            shape=tuple(values.shape),
            dtype=str(values.dtype).removeprefix("torch."),
            nbytes=values.numel() * values.element_size(),
            read=None if values.is_meta else partial(values.clone, memory_format=torch.contiguous_format),
        )
    if isinstance(content, dict):
        return {key: _with_stored(value) for key, value in content.items()}
    return content


READERS: dict[str, Callable[[BinaryIO, int, Path], Any]] = {
    **dict.fromkeys((".pt", ".pth", ".bin"), _read_pickled),
    ".safetensors": _read_safetensors,
}
