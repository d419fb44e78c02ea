"""What torch.save wrote, read without running anything: by a machine that knows tensors and plain data alone.

torch.load with weights_only calls functions with the numbers that the file gives; here nothing is called. Whatever
would need code stands as `Unknown`, and is refused only where it is asked for.
"""

from __future__ import annotations

import struct
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
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


@dataclass(eq=False)
class _Storage:
    key: str
    dtype: str | None
    """None: bytes, and each tensor says its own."""
    start: int = -1
    """In the file; -1 until it is known."""
    nbytes: int = 0


@dataclass(frozen=True, eq=False)
class _Tensor:
    storage: _Storage | None
    """None for a tensor on meta."""
    dtype: str
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_pickled(file: BinaryIO, size: int, path: Path) -> Any:
    """Return what is in the file: `StoredTensor` for a tensor, plain data as it is, `Unusual` and `Unknown` objects.

    Raises:
        InputError: it is not a file that torch.save wrote, or it is cut short.
        UnsafeFileError: it is compressed.
    """
    try:
        zipped = bytes(read_exactly(file, 0, min(4, size))) == b"PK\x03\x04"
        value, storages = (_read_zip if zipped else _read_old)(file, size, path)
        return _stored(value, storages, path)
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


def _read_zip(file: BinaryIO, size: int, path: Path) -> tuple[Any, dict[str, _Storage]]:
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

    def where(name: str) -> tuple[int, int]:
        entry = by_name[name]
        header = read_exactly(file, entry.header_offset, 30)
        start = entry.header_offset + 30 + sum(struct.unpack_from("<HH", header, 26))
        if entry.flag_bits & 1 or start + entry.file_size > size or entry.file_size != entry.compress_size:
            raise DamagedError
        return start, entry.file_size

    if f"{root}byteorder" in by_name:
        order = bytes(read_exactly(file, where(f"{root}byteorder")[0], min(6, where(f"{root}byteorder")[1])))
        if order != sys.byteorder.encode():
            raise DamagedError
    start, length = where(pickle)
    if length > _LONGEST_PICKLE:
        raise DamagedError
    machine = _Machine(bytes(read_exactly(file, start, length)))
    value = machine.run()
    for storage in machine.storages.values():
        storage.start, storage.nbytes = where(f"{root}data/{storage.key}")
    return value, machine.storages


def _read_old(file: BinaryIO, size: int, path: Path) -> tuple[Any, dict[str, _Storage]]:
    machine = _Machine(bytes(read_exactly(file, 0, min(size, _LONGEST_PICKLE))))
    magic, version, _system, value, keys = (machine.run() for _ in range(5))
    if (magic, version) != (_MAGIC, 1001):
        raise DamagedError
    place = machine.place
    for key in keys:
        storage = machine.storages[key]
        count = int.from_bytes(read_exactly(file, place, 8), "little")
        storage.start, storage.nbytes = place + 8, count * BITS[storage.dtype or "uint8"] // 8
        place = storage.start + storage.nbytes
        if place > size:
            raise DamagedError
    return value, machine.storages


def _stored(value: Any, storages: dict[str, _Storage], path: Path) -> Any:
    """Return the value with its tensors placed in the file."""

    def placed(tensor: _Tensor) -> StoredTensor:
        storage = tensor.storage
        bits = BITS[tensor.dtype]
        offset = None if storage is None else storage.start + tensor.first * bits // 8
        stored = StoredTensor(tensor.shape, tensor.dtype, tensor.strides, path, offset)
        if storage is not None and (storage.start < 0 or tensor.first * bits // 8 + stored.span > storage.nbytes):
            raise DamagedError
        return stored

    # By a list and not by calls: what is nested ten thousand deep is no reason to fail.
    done: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if id(item) in done or not isinstance(item, (dict, list, _Tensor)):
            continue
        if isinstance(item, _Tensor):
            done[id(item)] = placed(item)
            continue
        done[id(item)] = item
        waiting += item.values() if isinstance(item, dict) else item
    for item in done.values():
        if isinstance(item, dict):
            item.update({key: done[id(held)] for key, held in item.items() if isinstance(held, _Tensor)})
        elif isinstance(item, list):
            item[:] = [done[id(held)] if isinstance(held, _Tensor) else held for held in item]
    return done.get(id(value), value)


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
    return _Tensor(storage, dtype, first, sizes, steps)


def _on_meta(dtype: object, shape: object, strides: object, *rest: object) -> object:
    name = dtype.name.removeprefix("torch.") if isinstance(dtype, Unknown) else ""
    sizes, steps = sizes_of(shape), sizes_of(strides)
    if name not in BITS or len(sizes) != len(steps):
        raise DamagedError
    return _Tensor(None, name, 0, sizes, steps)


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
    """Runs the instructions of a pickle."""

    data: bytes
    place: int = 0
    storages: dict[str, _Storage] = field(default_factory=dict)
    steps: int = 0

    def run(self) -> Any:
        """Return the value of the pickle that begins here, and stand behind it."""
        data, stack, marks, memo = self.data, list[Any](), list[int](), dict[int, Any]()
        place = self.place

        def text(start: int, length: int) -> str:
            return str(taken(start, length), "utf-8", "surrogatepass")

        def taken(start: int, length: int) -> bytes:
            if start + length > len(data):
                raise DamagedError
            return data[start : start + length]

        def number(width: int) -> int:
            return int.from_bytes(taken(place, width), "little")

        def above_mark() -> list[Any]:
            start = marks.pop()
            items = stack[start:]
            del stack[start:]
            return items

        while True:
            self.steps += 1
            if self.steps > _MOST_STEPS:
                raise DamagedError
            op = data[place]
            place += 1
            if op in _COUNTED:
                width, kind = _COUNTED[op]
                length = number(width)
                place += width
                if kind == "text":
                    stack.append(text(place, length))
                elif kind == "int":
                    stack.append(int.from_bytes(taken(place, length), "little", signed=True))
                else:
                    stack.append(taken(place, length))
                place += length
            elif op in _INTEGERS:
                width, signed = _INTEGERS[op]
                stack.append(int.from_bytes(taken(place, width), "little", signed=signed))
                place += width
            elif op in _PUTS:
                memo[number(_PUTS[op])] = stack[-1]
                place += _PUTS[op]
            elif op in _GETS:
                stack.append(memo[number(_GETS[op])])
                place += _GETS[op]
            elif op in _CONSTANTS:
                stack.append(_CONSTANTS[op]())
            elif op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif op == 0x28:  # MARK
                marks.append(len(stack))
            elif op == 0x74:  # TUPLE
                stack.append(tuple(above_mark()))
            elif 0x85 <= op <= 0x87:  # TUPLE1 to TUPLE3
                width = op - 0x84
                if len(stack) < width:
                    raise DamagedError
                stack[-width:] = [tuple(stack[-width:])]
            elif op == 0x63:  # GLOBAL
                middle = data.index(b"\n", place)
                end = data.index(b"\n", middle + 1)
                stack.append(Unknown(f"{text(place, middle - place)}.{text(middle + 1, end - middle - 1)}"))
                place = end + 1
            elif op == 0x93:  # STACK_GLOBAL
                name, module = stack.pop(), stack.pop()
                if not isinstance(name, str) or not isinstance(module, str):
                    raise DamagedError
                stack.append(Unknown(f"{module}.{name}"))
            elif op in (0x52, 0x81):  # REDUCE, NEWOBJ
                args, function = stack.pop(), stack.pop()
                stack.append(self._made(function, args))
            elif op == 0x51:  # BINPERSID
                stack.append(self._storage(stack.pop()))
            elif op in (0x73, 0x75):  # SETITEM, SETITEMS
                items = above_mark() if op == 0x75 else [stack.pop(-2), stack.pop()]
                if isinstance(stack[-1], dict):
                    stack[-1].update((_key(key), value) for key, value in zip(items[::2], items[1::2], strict=True))
            elif op in (0x61, 0x65):  # APPEND, APPENDS
                items = above_mark() if op == 0x65 else [stack.pop()]
                if isinstance(stack[-1], list):
                    stack[-1].extend(items)
            elif op == 0x47:  # BINFLOAT
                stack.append(struct.unpack_from(">d", data, place)[0])
                place += 8
            elif op == 0x90:  # ADDITEMS
                above_mark()
            elif op == 0x91:  # FROZENSET
                above_mark()
                stack.append(Unknown("frozenset"))
            elif op in (0x62, 0x30):  # BUILD, POP
                stack.pop()
            elif op == 0x95:  # FRAME
                place += 8
            elif op == 0x80:  # PROTO
                place += 1
            elif op == 0x2E:  # STOP
                self.place = place
                return stack.pop()
            else:
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
        return self.storages.setdefault(key, _Storage(key, dtype))


_COUNTED = {
    **{0x8C: (1, "text"), 0x58: (4, "text"), 0x8D: (8, "text"), 0x55: (1, "text"), 0x54: (4, "text")},
    **{0x43: (1, "bytes"), 0x42: (4, "bytes"), 0x8E: (8, "bytes"), 0x96: (8, "bytes")},
    **{0x8A: (1, "int"), 0x8B: (4, "int")},
}
"""Instructions that are followed by a length of so many bytes, and that many bytes of text, bytes or a number."""
_INTEGERS = {0x4A: (4, True), 0x4B: (1, False), 0x4D: (2, False)}
_PUTS = {0x71: 1, 0x72: 4}
_GETS = {0x68: 1, 0x6A: 4}
_CONSTANTS: dict[int, Callable[[], Any]] = {
    **{0x4E: lambda: None, 0x88: lambda: True, 0x89: lambda: False, 0x7D: dict, 0x5D: list, 0x29: tuple},
    0x8F: lambda: Unknown("set"),
}
