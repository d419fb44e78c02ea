"""The header of a .npy file. It is written in Python's syntax, and read as a pattern: nothing evaluates it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import BinaryIO

from ..errors import InputError, UnsafeFileError
from ..text import shown
from .stored import DamagedError, StoredTensor, contiguous, path_name, read_exactly, sizes_of

_DTYPES = {
    **{"b1": "bool", "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128"},
    **{f"{kind[0]}{width}": f"{kind}{8 * width}" for kind in ("int", "uint") for width in (1, 2, 4, 8)},
}
_LONGEST_HEADER = 2**16
_ORDER = re.compile(r"""["']fortran_order["']\s*:\s*(True|False)\b""")
_SHAPE = re.compile(r"""["']shape["']\s*:\s*\(([\d,\s]*)\)""")
_DESCR = re.compile(
    r"""["']descr["']\s*:\s*(["'](?P<order>[<>|=]?)(?P<kind>\w+)["']|["'][^"']*["']|\[.*\]|.*)""", re.DOTALL
)
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
        header = read_exactly(file, first, length).decode("latin-1")
        descr, order, shape = (pattern.search(header) for pattern in (_DESCR, _ORDER, _SHAPE))
        if descr is None or order is None or shape is None:
            raise DamagedError
        sizes = sizes_of([int(number) for number in shape[1].split(",") if number.strip()])
    except (DamagedError, IndexError, ValueError):
        raise InputError(f"{name} is cut short or damaged: its header cannot be read. Save it again.") from None
    dtype = _DTYPES.get(descr["kind"] or "")
    if dtype is None and _OBJECT.search(descr[1]):
        raise UnsafeFileError(
            f"{name} holds Python objects, and opening it would run their code. Save an array of numbers."
        )
    if dtype is None:
        kind = shown(descr["kind"] or descr[1])
        raise InputError(f"{name} holds {kind}, and tensors hold numbers or booleans. Save an array of those.")
    strides = contiguous(sizes[::-1])[::-1] if order[1] == "True" else contiguous(sizes)
    swapped = descr["order"] == {"little": ">", "big": "<"}[sys.byteorder]
    tensor = StoredTensor(sizes, dtype, strides, path, first + length, swapped)
    if first + length + tensor.nbytes > size and tensor.numel:
        raise InputError(f"{name} is cut short: its header says shape {shown(list(sizes))}, and the file is smaller.")
    return tensor
