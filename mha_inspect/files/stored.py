"""Tensors as a file describes them: shapes, dtypes, and what reads their numbers."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..errors import InputError
from ..text import printable

if TYPE_CHECKING:
    from torch import Tensor


_LONGEST_PATH = 200


class DamagedError(Exception):
    """What a file says of itself cannot be. The reader of its format says so in its own words."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, whose numbers have not been read."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name of it."""
    nbytes: int
    """Bytes of the whole tensor, with every element that a stride of 0 repeats."""
    read: Callable[[], Tensor] | None
    """Returns a contiguous copy on the CPU; None where the file has no numbers for it (meta)."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def has_numbers(self) -> bool:
        """Whether it has real numbers in the file."""
        return self.numel > 0 and self.read is not None and not self.dtype.startswith("complex")


def path_name(path: Path) -> str:
    """Return a path as a message repeats it."""
    return printable(path, _LONGEST_PATH)


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
