"""Reading tensors out of .pt, .npy and .safetensors files without running anything that is in them."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, UnsafeFileError
from ..text import message_of, printable
from .memory import require_memory

SUFFIXES = (".pt", ".pth", ".npy", ".safetensors")

_NEEDS_CODE = re.compile(r"Unsupported (global|class)|not an allowed global|TorchScript|torch\.jit|persistent_load")
_GLOBAL = re.compile(r"GLOBAL ([A-Za-z_][\w.]*)")


def read_tensors(path: Path) -> Tensor | dict[str, Tensor]:
    """The tensor in the file, or its tensors by name, on the CPU and without gradients.

    Raises:
        InputError: the file is absent, cannot be read, or holds something else than tensors.
        UnsafeFileError: reading it would run code that is in it, or unpack what may be any size.
        DoesNotFitError: a tensor in it is larger than the free memory.
    """
    name = printable(path)
    if not path.exists():
        raise InputError(f"{name} is not there. Give the path of a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file.")
    if not path.is_file():
        raise InputError(f"{name} is not a file. Give the path of a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file.")
    reader = {".pt": _read_pt, ".pth": _read_pt, ".npy": _read_npy, ".safetensors": _read_safetensors}.get(
        path.suffix.lower()
    )
    if reader is None:
        raise InputError(f"{name} has a suffix that says nothing: tensors are read from {', '.join(SUFFIXES)} files.")
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{name} is empty: 0 bytes. Save the tensor again.")
        content = reader(path)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or 'it is cut short or damaged'}.") from None
    if isinstance(content, Mapping):
        return {_key(key, name): _tensor(value, f"{key!r} in {name}") for key, value in content.items()}
    return _tensor(content, name)


def read_tensor(path: Path) -> Tensor:
    """The one tensor in the file, named or not. Raises as `read_tensors`, and `InputError` when there are several."""
    content = read_tensors(path)
    if isinstance(content, Tensor):
        return content
    if len(content) != 1:
        names = ", ".join(map(repr, content)) or "none"
        raise InputError(
            f"{printable(path)} holds {len(content)} tensors ({names}) where one is meant. Save that one alone."
        )
    return next(iter(content.values()))


def _key(key: object, name: str) -> str:
    if not isinstance(key, str):
        raise InputError(f"{name} holds a mapping with the key {key!r}: names of tensors are meant.")
    return key


def _tensor(value: object, name: str) -> Tensor:
    """The value, when it is a plain tensor with elements that fit in memory."""
    if not isinstance(value, Tensor):
        raise InputError(
            f"{name} is a {type(value).__name__} and not a tensor. Save a tensor, or a dict of tensors by name."
        )
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        raise InputError(f"{name} is a sparse, nested or quantized tensor. Save to_dense() or dequantize() of it.")
    if value.numel() == 0:
        raise InputError(f"{name} is empty: its shape is {list(value.shape)}. Every size must be 1 or more.")
    # A stride of 0 lets a file of a few bytes claim any size: a copy of it would fill the memory.
    require_memory(
        value.numel() * value.element_size(), "cpu", f"{name} with shape {list(value.shape)}", "Save a smaller one."
    )
    return value.detach()


def _read_pt(path: Path) -> Any:
    zipped = zipfile.is_zipfile(path)
    try:
        if zipped:
            with zipfile.ZipFile(path) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise UnsafeFileError(
                        f"{printable(path)} is compressed, and may unpack to any size; torch.save does not compress. "
                        "Save the tensor again with torch.save."
                    )
        # Said by name: an environment variable can turn the default off.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except UnsafeFileError:
        raise
    except (
        RuntimeError,
        pickle.UnpicklingError,
        EOFError,
        zipfile.BadZipFile,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        UnicodeDecodeError,
        AssertionError,
    ) as error:
        text = message_of(error)
        if _NEEDS_CODE.search(text):
            named = _GLOBAL.search(text)
            what = f" ({named.group(1)})" if named else ""
            raise UnsafeFileError(
                f"{printable(path)} holds an object that only runs as code{what}, and opening it would run that code. "
                "Save plain tensors: torch.save(tensor, file), or a dict of tensors."
            ) from None
        raise InputError(
            f"{printable(path)} is not a file that torch.save wrote, or it is cut short. Save it again."
        ) from None


def _read_npy(path: Path) -> Tensor:
    name = printable(path)
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise InputError(f"{name} is not a .npy file: numpy's signature is missing. Save it with numpy.save.")
        file.seek(0)
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
        except ValueError:
            raise InputError(f"{name} is cut short or damaged: its header cannot be read. Save it again.") from None
    if dtype.hasobject:
        raise UnsafeFileError(
            f"{name} holds Python objects, and opening it would run their code. Save an array of numbers."
        )
    if 0 in shape:
        raise InputError(f"{name} is empty: its shape is {list(shape)}. Every size must be 1 or more.")
    try:
        # Mapped, so that a header that claims more than the file has is refused and not allocated.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError:
        raise InputError(
            f"{name} is cut short: its header says shape {list(shape)}, and the file is smaller."
        ) from None
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except TypeError:
        raise InputError(
            f"{name} holds {array.dtype}, and tensors hold numbers or booleans. Save an array of those."
        ) from None


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise InputError(f"{printable(path)} needs the library safetensors: pip install safetensors.") from None
    try:
        return dict(load_file(path))
    except (SafetensorError, ValueError, KeyError, RuntimeError):
        raise InputError(f"{printable(path)} is not a .safetensors file, or it is cut short. Save it again.") from None
