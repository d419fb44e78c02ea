"""Tensors as a file describes them: names, shapes, dtypes, and where their bytes lie."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from typing import BinaryIO

from ..errors import InputError
from ..text import printable

BITS = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 8),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 16),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 32),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 64),
    **{"complex128": 128, "float8_e8m0fnu": 8, "float4_e2m1": 4, "float6_e2m3": 6, "float6_e3m2": 6},
}
"""Bits of an element, by torch's name of its dtype."""
MOST_DIMENSIONS = 64
"""More than any tensor that torch or numpy computes with has."""
_LONGEST_PATH = 200


class DamagedError(Exception):
    """What a file says of itself cannot be. The reader of its format says so in its own words."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, whose numbers have not been read."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    """In elements."""
    path: Path
    offset: int | None
    """Bytes before its first element in the file; None where the file has no numbers for it (meta)."""
    swapped: bool = False
    """Whether its bytes are in the other order than this machine's."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, with every element that a stride of 0 repeats."""
        return (self.numel * BITS[self.dtype] + 7) // 8

    def rows(self, start: int, stop: int) -> StoredTensor:
        """Return some of its rows."""
        offset = None if self.offset is None else self.offset + start * self.strides[0] * BITS[self.dtype] // 8
        return replace(self, shape=(stop - start, *self.shape[1:]), offset=offset)

    @property
    def span(self) -> int:
        """Bytes from its first element to its last one in the file."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return ((last + 1) * BITS[self.dtype] + 7) // 8


def path_name(path: Path) -> str:
    """Return a path as a message repeats it."""
    return printable(path, _LONGEST_PATH)


def sizes_of(value: object) -> tuple[int, ...]:
    """Return a shape or strides out of a file. Raises `DamagedError` for what cannot be one."""
    if not isinstance(value, (list, tuple)) or len(value) > MOST_DIMENSIONS:
        raise DamagedError
    if not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise DamagedError
    return tuple(value)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements lie in row-major order."""
    strides = [*accumulate(reversed(shape[1:]), mul, initial=1)]
    return tuple(reversed(strides[: len(shape)]))


@contextmanager
def opened(path: Path, kinds: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a plain file, and give its size in bytes too. Nothing else is opened: a pipe would wait, a device act.

    Raises `InputError` where it is not there, is something else or empty, or cannot be read; `kinds` are the suffixes
    that the message offers.
    """
    name = path_name(path)
    if "\0" in str(path):
        raise InputError(f"{name} cannot be the name of a file. Give the path of a {kinds} file.")
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError(f"{name} is not a file. Give the path of a {kinds} file.")
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(path, flags), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise InputError(f"{name} is not a file. Give the path of a {kinds} file.")
            if found.st_size == 0:
                raise InputError(f"{name} is empty: 0 bytes. Save it again.")
            yield file, found.st_size
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise InputError(f"{name} is not there. Give the path of a {kinds} file.") from None
        raise InputError(f"{name} cannot be read: {error.strerror or 'it is cut short or damaged'}.") from None


def read_exactly(file: BinaryIO, offset: int, size: int) -> bytearray:
    """Return bytes of a file. Raises `DamagedError` where it has fewer."""
    file.seek(offset)
    data = bytearray(size)
    if file.readinto(data) != size:  # type: ignore[attr-defined]  # a buffered reader has it, its abstract class has not
        raise DamagedError
    return data
