"""What is in a file of tensors, by its suffix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InputError
from .numpy_file import read_npy
from .pickled import read_pickled
from .safetensors import read_safetensors
from .stored import opened, path_name

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
