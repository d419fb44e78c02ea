"""Tensors out of .pt, .npy and .safetensors files, copied once their sizes are checked: no file stays mapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DoesNotFitError, InputError, is_out_of_memory
from ..text import MESSAGE, a_kind, byte_size, shortened, shown
from .content import content_of
from .pickled import Unknown, Unusual, made_by_code
from .stored import StoredTensor, path_name

SUFFIXES = (".pt", ".pth", ".npy", ".safetensors")


def read_tensors(path: Path) -> Tensor | dict[str, Tensor]:
    """Return the tensor in the file, or its tensors by name, on the CPU and without gradients.

    Where meta is the default device they are made there, of the file's shapes and dtypes: no number is read.

    Raises:
        InputError: the file is absent, cannot be read, or holds something else than tensors.
        UnsafeFileError: reading it would run code that is in it, or unpack what may be any size.
        DoesNotFitError: a tensor in it is larger than the free memory.
    """
    name, content = path_name(path), content_of(path, SUFFIXES)
    if not isinstance(content, dict):
        return _read(content, name)
    strange = next((key for key in content if not isinstance(key, str)), None)
    if strange is not None:
        raise InputError(f"{name} holds a mapping with the key {shown(repr(strange))}: names of tensors are meant.")
    return {key: _read(value, f"{shown(repr(key))} in {name}") for key, value in content.items()}


def read_tensor(path: Path) -> Tensor:
    """Return the mask that is the one tensor in the file, named or not.

    Raises as `read_tensors`, and `InputError` when there are several.
    """
    with torch.device("cpu"):  # of a mask the numbers are needed, whatever runs where
        content = read_tensors(path)
    content = {"": content} if isinstance(content, Tensor) else content
    if len(content) != 1:
        names = shortened(", ".join(map(repr, content)) or "none", MESSAGE // 2)
        raise InputError(
            f"{path_name(path)} holds {len(content)} tensors ({names}) where one is meant. Save that one alone."
        )
    (mask,) = content.values()
    return mask


def _read(value: Any, name: str) -> Tensor:
    """Return the tensor, when it is a plain one with elements that fit in memory."""
    if isinstance(value, Unknown):
        raise made_by_code(name, value.name)
    if isinstance(value, Unusual):
        raise InputError(f"{name} is {value.kind}. Save to_dense() or dequantize() of it.")
    if not isinstance(value, StoredTensor):
        raise InputError(f"{name} is {a_kind(value)} and not a tensor. Save a tensor, or a dict of tensors by name.")
    if value.numel == 0:
        raise InputError(f"{name} is empty: its shape is {list(value.shape)}. Every size must be 1 or more.")
    if torch.get_default_device().type == "meta":
        return torch.empty(value.shape, dtype=_dtype_of(value, name))
    return read_stored(value, name)


def read_stored(stored: StoredTensor, name: str) -> Tensor:
    """Return a copy of a stored tensor that has elements, on the CPU.

    Raises:
        InputError: it is on meta, the file has become shorter, or this version of torch has no such dtype.
        DoesNotFitError: it is larger than the free memory.
    """
    shape = list(stored.shape)
    if stored.read is None:
        raise InputError(f"{name} is on meta: it has the shape {shape} and no numbers. Save one that has some.")
    _dtype_of(stored, name)
    try:
        return stored.read()
    except (RuntimeError, MemoryError) as error:  # a stride of 0 lets a file of a few bytes claim any size
        if not is_out_of_memory(error):
            raise
        raise DoesNotFitError(
            f"{name} with shape {shown(shape)} takes {byte_size(stored.nbytes)}, more than is free. Save a smaller one."
        ) from None


def _dtype_of(stored: StoredTensor, name: str) -> torch.dtype:
    dtype = getattr(torch, stored.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(
            f"{name} holds {stored.dtype}, which torch {torch.__version__} has no dtype for. Cast it first."
        )
    return dtype
