"""What torch.save wrote, read without running anything: by a machine that knows tensors and plain data alone.

torch.load with weights_only calls functions with the numbers that the file gives; here nothing is called. Whatever
would need code stands as `Unknown`, and is refused only where it is asked for.
"""

from __future__ import annotations

import struct
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from pickletools import genops
from typing import Any, BinaryIO

from ..errors import InputError, UnsafeFileError
from .stored import BITS, DamagedError, StoredTensor, path_name, read_exactly, sizes_of

_LONGEST_PICKLE = 64 * 2**20
"""Bytes of what describes the tensors: half a million of them take fewer."""
_MOST_STEPS = 8_000_000
"""Instructions of a pickle: 40 for a tensor."""
_MAGIC = 0x1950A86A20F9469CFC6C
"""First in every file that torch.save wrote before it wrote zip archives."""


@dataclass(frozen=True, eq=False)
class Unknown:
    """An object that only code could make, or the name of what would make it."""

    name: str


@dataclass(frozen=True, eq=False)
class Unusual:
    """A tensor whose elements are not laid out with strides."""

    kind = "a sparse, nested or quantized tensor"


@dataclass(frozen=True, eq=False)
class _Storage:
    """Bytes of a file that tensors lie in."""

    path: Path
    start: int
    nbytes: int
    dtype: str | None
    """None: each tensor says its own."""


def read_pickled(file: BinaryIO, size: int, path: Path) -> Any:
    """Return what is in the file: `StoredTensor` for a tensor, plain data as it is, `Unusual` and `Unknown` objects.

    Raises:
        InputError: it is not a file that torch.save wrote, or it is cut short.
        UnsafeFileError: it is compressed.
    """
    try:
        zipped = bytes(read_exactly(file, 0, min(4, size))) == b"PK\x03\x04"
        return (_read_zip if zipped else _read_old)(file, size, path)
    except (InputError, UnsafeFileError, OSError):
        raise
    except Exception:  # zipfile alone raises a dozen kinds for damaged archives
        raise InputError(
            f"{path_name(path)} is not a file that torch.save wrote, or it is cut short. Save it again."
        ) from None


# -- archives -----------------------------------------------------------------------------------------------------


class _Bounded:
    """A file of which nobody takes more at once than a directory of an archive has."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        """Return at most so many bytes, or all. Raises `DamagedError` where these are too many."""
        data = self._file.read(_LONGEST_PICKLE + 1 if size < 0 else min(size, _LONGEST_PICKLE + 1))
        if len(data) > _LONGEST_PICKLE:
            raise DamagedError
        return data


def _read_zip(file: BinaryIO, size: int, path: Path) -> Any:
    with zipfile.ZipFile(_Bounded(file)) as archive:
        entries = archive.infolist()
    by_name = {entry.filename: entry for entry in entries}
    if len(by_name) != len(entries):
        raise DamagedError  # which of two would be read is anybody's guess
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise UnsafeFileError(
            f"{path_name(path)} is compressed, and may unpack to any size; torch.save does not compress. "
            "Save the tensor again with torch.save."
        )
    (pickle,) = [name for name in by_name if name.count("/") == 1 and name.endswith("/data.pkl")]
    root = pickle.removesuffix("data.pkl")

    @cache
    def where(name: str) -> tuple[int, int]:
        entry = by_name[name]
        header = read_exactly(file, entry.header_offset, 30)
        start = entry.header_offset + 30 + sum(struct.unpack_from("<HH", header, 26))
        if entry.flag_bits & 1 or start + entry.file_size > size or entry.file_size != entry.compress_size:
            raise DamagedError
        return start, entry.file_size

    if f"{root}byteorder" in by_name:
        start, length = where(f"{root}byteorder")
        if read_exactly(file, start, min(6, length)) != sys.byteorder.encode():
            raise DamagedError
    start, length = where(pickle)
    if length > _LONGEST_PICKLE:
        raise DamagedError
    content = BytesIO(read_exactly(file, start, length))
    return _Machine(content, lambda key, dtype: _Storage(path, *where(f"{root}data/{key}"), dtype)).run()


def _read_old(file: BinaryIO, size: int, path: Path) -> Any:
    content = read_exactly(file, 0, min(size, _LONGEST_PICKLE))
    dtypes: dict[str, str | None] = {}

    def anywhere(key: str, dtype: str | None) -> _Storage:
        return _Storage(path, 0, 2**64, dtypes.setdefault(key, dtype))

    # What is behind the pickles tells where the numbers lie: they are run once more with that.
    machine = _Machine(BytesIO(content), anywhere)
    magic, version, _system, _value, keys = (machine.run() for _ in range(5))
    if (magic, version) != (_MAGIC, 1001):
        raise DamagedError
    place, storages = machine.file.tell(), dict[str, _Storage]()
    for key in keys:
        count = int.from_bytes(read_exactly(file, place, 8), "little")
        storages[key] = _Storage(path, place + 8, count * BITS[dtypes[key] or "uint8"] // 8, dtypes[key])
        place += 8 + storages[key].nbytes
        if place > size:
            raise DamagedError
    machine = _Machine(BytesIO(content), lambda key, _: storages[key])
    return [machine.run() for _ in range(4)][-1]


# -- the machine ----------------------------------------------------------------------------------------------------


def _rebuilt(storage: object, first: object, shape: object, strides: object, *rest: object) -> object:
    """Return a tensor over a storage; `rest` ends in flags such as conj where it is a view of that kind."""
    if not isinstance(storage, _Storage) or type(first) is not int or not 0 <= first < 2**63:
        raise DamagedError
    if rest and isinstance(rest[-1], dict) and any(rest[-1].get(flag) for flag in ("conj", "neg")):
        return Unusual()
    dtype = storage.dtype
    if len(rest) > 2 and isinstance(rest[2], Unknown):
        dtype = rest[2].name.removeprefix("torch.")
    sizes, steps = sizes_of(shape), sizes_of(strides)
    if dtype not in BITS or len(sizes) != len(steps):
        raise DamagedError
    before = first * BITS[dtype] // 8
    stored = StoredTensor(sizes, dtype, steps, storage.path, storage.start + before)
    if before + stored.span > storage.nbytes:
        raise DamagedError
    return stored


def _on_meta(dtype: object, shape: object, strides: object, *rest: object) -> object:
    name = dtype.name.removeprefix("torch.") if isinstance(dtype, Unknown) else ""
    sizes, steps = sizes_of(shape), sizes_of(strides)
    if name not in BITS or len(sizes) != len(steps):
        raise DamagedError
    return StoredTensor(sizes, name, steps, Path(), None)


def _of_type(function: object, kind: object, args: object, *rest: object) -> object:
    """Return the plain tensor in one of a class of its own."""
    if not isinstance(function, Unknown) or not isinstance(args, tuple) or function.name not in _PLAIN:
        raise DamagedError
    return _PLAIN[function.name](*args)


def _ordered(pairs: object = ()) -> object:
    if not isinstance(pairs, (list, tuple)):
        raise DamagedError
    return {_key(key): value for key, value in pairs}


_PLAIN: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _rebuilt,
    "torch._utils._rebuild_tensor_v2": _rebuilt,
    "torch._utils._rebuild_tensor_v3": _rebuilt,
    "torch._utils._rebuild_meta_tensor_no_storage": _on_meta,
}
_MADE_BY: dict[str, Callable[..., object]] = {
    **_PLAIN,
    "torch._utils._rebuild_parameter": lambda data, *rest: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *rest: data,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.Size": lambda sizes=(): sizes,
    "collections.OrderedDict": _ordered,
    **dict.fromkeys(
        (
            f"torch._utils._rebuild_{kind}"
            for kind in ("sparse_tensor", "sparse_csr_tensor", "nested_tensor", "qtensor", "wrapper_subclass")
        ),
        lambda *args: Unusual(),
    ),
}
"""What torch's functions make, by their names. None of them is called."""
_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in (
        *(("Float", "float32"), ("Double", "float64"), ("Half", "float16"), ("BFloat16", "bfloat16"), ("Bool", "bool")),
        *(("Long", "int64"), ("Int", "int32"), ("Short", "int16"), ("Char", "int8"), ("Byte", "uint8")),
        *(("ComplexFloat", "complex64"), ("ComplexDouble", "complex128")),
        *(("QInt8", "int8"), ("QUInt8", "uint8"), ("QInt32", "int32")),
    )
}
_BYTES = ("torch.storage.UntypedStorage", "torch.UntypedStorage")


def _key(key: object) -> object:
    """Return what may be a key: the hash of a tuple that is nested deep enough ends the process."""
    return key if isinstance(key, (str, int, float, bytes, Unknown)) or key is None else Unknown(type(key).__name__)


@dataclass
class _Machine:
    """Runs the instructions of the pickles in a file, one pickle after the other."""

    file: BytesIO
    storage: Callable[[str, str | None], _Storage]
    """Where the bytes lie that are called so, and are of this dtype."""
    steps: int = 0

    def run(self) -> Any:
        """Return the value of the pickle that begins here, and stand behind it."""
        stack, marks, memo = list[Any](), list[int](), dict[Any, Any]()

        def above_mark() -> list[Any]:
            start = marks.pop()
            items = stack[start:]
            del stack[start:]
            return items

        for op, arg, _ in genops(self.file):
            self.steps += 1
            if self.steps > _MOST_STEPS:
                raise DamagedError
            match op.name:
                case name if name in _GIVEN:
                    stack.append(arg)
                case "BINPUT" | "LONG_BINPUT":
                    memo[arg] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[arg])
                case name if name in _CONSTANTS:
                    stack.append(_CONSTANTS[name]())
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "MARK":
                    marks.append(len(stack))
                case "TUPLE":
                    stack.append(tuple(above_mark()))
                case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                    items = [stack.pop() for _ in range(int(name[-1]))]
                    stack.append(tuple(reversed(items)))
                case "GLOBAL":
                    stack.append(Unknown(str(arg).replace(" ", ".")))
                case "STACK_GLOBAL":
                    name, module = stack.pop(), stack.pop()
                    if not isinstance(name, str) or not isinstance(module, str):
                        raise DamagedError
                    stack.append(Unknown(f"{module}.{name}"))
                case "REDUCE" | "NEWOBJ":
                    args, function = stack.pop(), stack.pop()
                    stack.append(self._made(function, args))
                case "BINPERSID":
                    stack.append(self._storage(stack.pop()))
                case "SETITEM" | "SETITEMS" as name:
                    items = above_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                    if isinstance(stack[-1], dict):
                        stack[-1].update((_key(key), value) for key, value in zip(items[::2], items[1::2], strict=True))
                case "APPEND" | "APPENDS" as name:
                    items = above_mark() if name == "APPENDS" else [stack.pop()]
                    if isinstance(stack[-1], list):
                        stack[-1].extend(items)
                case "ADDITEMS":
                    above_mark()
                case "FROZENSET":
                    above_mark()
                    stack.append(Unknown("frozenset"))
                case "BUILD" | "POP":
                    stack.pop()
                case "FRAME" | "PROTO":
                    pass
                case "STOP":
                    return stack.pop()
                case _:
                    raise DamagedError
        raise DamagedError

    def _made(self, function: object, args: object) -> object:
        if not isinstance(function, Unknown) or not isinstance(args, tuple):
            raise DamagedError
        make = _MADE_BY.get(function.name)
        return Unknown(function.name) if make is None else make(*args)

    def _storage(self, id: object) -> _Storage:
        if not isinstance(id, tuple) or len(id) < 5 or id[0] != "storage" or any(part is not None for part in id[5:]):
            raise DamagedError
        kind, key = id[1], id[2]
        if not isinstance(kind, Unknown) or not isinstance(key, str):
            raise DamagedError
        dtype = None if kind.name in _BYTES else _STORAGES[kind.name]
        return self.storage(key, dtype)


_GIVEN = frozenset(
    (
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES"),
        *("BINBYTES", "BINBYTES8", "BYTEARRAY8", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    )
)
"""Instructions that have their value with them."""
_CONSTANTS: dict[str, Callable[[], Any]] = {
    **{"NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False},
    **{"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": lambda: Unknown("set")},
}
