"""What torch.save wrote, read by torch.load with weights_only: classes that it does not know are never imported."""

from __future__ import annotations

import warnings
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError, UnsafeFileError, is_out_of_memory
from ..text import shown
from .stored import StoredTensor, path_name


class Unknown:
    """Stands for an object whose class torch.load does not know: it has the name of the class, and nothing is run."""

    name = ""

    def __new__(cls, *args: object, **kwargs: object) -> Unknown:
        """Return an object without anything in it."""
        return object.__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class Unusual:
    """Stands for a tensor whose elements are not laid out with strides."""

    kind = "a sparse, nested or quantized tensor"


def read_pickled(file: BinaryIO, size: int, path: Path) -> Any:
    """Return what is in the file: `StoredTensor` for a tensor, plain data as it is, `Unusual` and `Unknown` objects.

    The numbers of an archive stay in the file until they are read.

    Raises:
        InputError: it is not a file that torch.save wrote, or it is cut short.
        UnsafeFileError: it is compressed, or is made by code that may not run.
    """
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    name = path_name(path)
    classes: list[str] = []
    try:
        zipped = file.read(4) == b"PK\x03\x04"
        if zipped:
            with zipfile.ZipFile(file) as archive:
                compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
            if compressed:
                raise UnsafeFileError(
                    f"{name} is compressed, and may unpack to any size; torch.save does not compress. "
                    "Save the tensor again with torch.save."
                )
            classes = get_unsafe_globals_in_checkpoint(path)
        stand_ins = [(type("Unknown", (Unknown,), {"name": name}), name) for name in classes]
        with warnings.catch_warnings(), torch.device("cpu"), safe_globals(list(stand_ins)):
            warnings.simplefilter("ignore")
            return _with_stored(torch.load(path, map_location="cpu", weights_only=True, mmap=zipped))
    except (InputError, UnsafeFileError, OSError):
        raise
    except Exception as error:  # zipfile and torch raise a dozen kinds for damaged files
        if is_out_of_memory(error):
            raise
        if classes:
            raise made_by_code(name, classes[0]) from None
        raise InputError(f"{name} is not a file that torch.save wrote, or it is cut short. Save it again.") from None


def made_by_code(name: str, kind: str) -> UnsafeFileError:
    """Return the error for an object that only running its class could make."""
    return UnsafeFileError(
        f"{name} is an object that only runs as code ({shown(kind)}), and opening it would run that code. "
        "Save plain tensors: torch.save(tensor, file), or a dict of tensors."
    )


def _with_stored(content: Any) -> Any:
    """Return the content with a `StoredTensor` for each tensor in its dicts, lists and tuples."""
    import torch

    if isinstance(content, torch.Tensor):
        if content.layout != torch.strided or content.is_quantized or content.is_nested:
            return Unusual()
        values = content.detach().resolve_conj().resolve_neg()
        copied = partial(values.clone, memory_format=torch.contiguous_format)
        dtype, nbytes = str(values.dtype).removeprefix("torch."), values.numel() * values.element_size()
        return StoredTensor(tuple(values.shape), dtype, nbytes, None if values.is_meta else copied)
    if isinstance(content, dict):
        return {key: _with_stored(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        items = map(_with_stored, content)
        return [*items] if isinstance(content, list) else (*items,)
    return content
