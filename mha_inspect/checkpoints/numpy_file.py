"""The header of a .npy file."""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path
from typing import BinaryIO

from ..errors import InputError, UnsafeFileError
from ..text import shown
from .stored import StoredTensor, contiguous, path_name, sizes_of

_SUPPORTED = {
    **{"b1": "bool", "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128"},
    **{
        f"{letter}{width}": f"{kind}{8 * width}"
        for letter, kind in (("i", "int"), ("u", "uint"))
        for width in (1, 2, 4, 8)
    },
}


def read_npy(file: BinaryIO, size: int, path: Path) -> StoredTensor:
    """Return the array as its header has it.

    Raises:
        InputError: it is not a .npy file, is cut short, or holds something else than numbers.
        UnsafeFileError: it holds Python objects.
    """
    import numpy as np

    name = path_name(path)
    if file.read(6) != b"\x93NUMPY":
        raise InputError(f"{name} is not a .npy file: numpy's signature is missing. Save it with numpy.save.")
    file.seek(0)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read(file)
        if dtype.hasobject:
            raise UnsafeFileError(
                f"{name} holds Python objects, and opening it would run their code. Save an array of numbers."
            )
        sizes = sizes_of(shape)
    except (UnsafeFileError, OSError):
        raise
    except Exception:  # numpy reads the header as Python, which has its own ways to end
        raise InputError(f"{name} is cut short or damaged: its header cannot be read. Save it again.") from None
    kind = _SUPPORTED.get(f"{dtype.kind}{dtype.itemsize}") if dtype.names is None and dtype.subdtype is None else None
    if kind is None:
        raise InputError(f"{name} holds {shown(dtype)}, and tensors hold numbers or booleans. Save an array of those.")
    if prod(sizes) * dtype.itemsize > size - file.tell():
        raise InputError(f"{name} is cut short: its header says shape {list(sizes)}, and the file is smaller.")
    strides = contiguous(sizes[::-1])[::-1] if by_columns else contiguous(sizes)
    swapped = dtype.byteorder == {"little": ">", "big": "<"}[sys.byteorder]
    return StoredTensor(sizes, kind, strides, path, file.tell(), swapped)
