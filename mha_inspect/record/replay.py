"""Work out what was written down while a forward ran: which tensor is which, what made it, and who asked for it."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from threading import Lock
from typing import Any

from .catalog import does
from .ops import Kind, Named, Op, TensorRef
from .schema import About
from .sight import Sight
from .site import Site, is_in_script, place_of_site
from .storage import Look

_VIEWS_IN_PLACE = frozenset({"transpose_", "t_", "squeeze_", "unsqueeze_", "detach_"})
"""They give their tensor another shape, and write nothing."""
_DTYPE_NAMES: dict[Any, str] = {}

Entry = tuple[About, list[Any], tuple[str, ...], Any, list[Look] | None, Site, int, Kind | None, int | None]
"""An operation: what it is; its arguments as they were written down, those by name last, and the names of these; what
came out (a look or a list of them, anything else where that is no tensor), what it wrote into, where Python stood, the
mark of its call, its kind where that is known, and the kernel that it is a step of."""


class _Storage:
    """What is known of one piece of memory: which tensors look at it."""

    __slots__ = ("made_by", "number", "owner", "seen")

    def __init__(self, number: int, made_by: int | None, owner: Any) -> None:
        self.number = number
        self.owner = owner
        """The weak reference that tells it from others, held so that no other comes to have its id."""
        self.made_by = made_by
        """The operation that wrote it last; None where it came from outside."""
        self.seen: dict[tuple[Any, ...], TensorRef] = {}
        """Offset, shape, stride and dtype, to the tensor that was seen since the memory was written last."""


class Replay:
    """Goes through what was written down, in order."""

    def __init__(self) -> None:
        self.producers: dict[int, int] = {}
        self.scalars: dict[int, float] = {}
        self.values: dict[int, Any] = {}
        self.sights: dict[int, Sight] = {}
        self._held: dict[int, list[Any]] = {}
        self._storages: dict[int, _Storage] = {}
        self._num_storages = 0
        self._num_tensors = 0
        self._ops: list[Op] = []
        self._calls: list[int] = []
        """The number of the call of each operation, before turns of loops are told apart."""
        self._whole: set[int] = set()
        self._scripts: set[int] = set()
        """Numbers of calls of which each is all of a compiled module."""
        self._last: tuple[Any, int, tuple[str, str]] = (None, 0, ("", ""))
        self._names: dict[Any, str] = {}

    def read(self, look: Look) -> TensorRef:
        """Return the tensor that was looked at."""
        storage = self._storages.get(id(look[0]))
        if storage is None:
            storage = self._add_storage(look, None)
        key = look[1:5]
        seen = storage.seen.get(key)
        if seen is not None:
            return seen
        # Written since through another view, or never seen: its content is what the last writer of this memory left.
        return self._new(look, key, storage, storage.made_by)

    def add(self, entry: Entry) -> None:
        """Take in one operation."""
        known, arguments, names, made, written, site, mark, kind, kernel = entry
        index = len(self._ops)
        inputs: list[TensorRef] = []
        plain_args = tuple([self._plain(value, inputs) for value in arguments])
        plain_kwargs: dict[str, Any] = {}
        if names:
            first = len(plain_args) - len(names)
            plain_kwargs, plain_args = dict(zip(names, plain_args[first:], strict=True)), plain_args[:first]
        given = {tensor.storage: tensor for tensor in inputs}
        in_place, told = written is not None, kind is not None
        results = made if isinstance(made, list) else [made] if isinstance(made, tuple) else []
        outputs = [self._write(look, index, given, in_place, told) for look in results]
        if written is not None:
            left = [self._write(look, index, given, True, told) for look in written]
            outputs = outputs or left
        if kind is None:
            kind = "copy" if does(known.base_name, "copies") else "compute"
            if outputs and all(output.storage in given for output in outputs):
                kind = "view" if written is None or known.base_name in _VIEWS_IN_PLACE else "write"
        last_site, last_mark, place = self._last
        same = site is last_site
        if not same:
            place = place_of_site(site)
        if same and (mark == last_mark or self._follows_kernel(known)):
            call = self._calls[-1]
        else:
            call = self._calls[-1] + 1 if self._calls else 0
            if same and kernel is not None:
                self._take_in_what_leads_here(call)
            self._last = site, mark, place
        self._calls.append(call)
        if mark < 0:
            self._whole.add(call)
        elif is_in_script(site):
            self._scripts.add(call)
        read = tuple(inputs)
        read = plain_args if read == plain_args else read  # one tuple where it may be: there are many
        wrote = tuple(outputs)
        self._ops.append(
            Op(index, known.name, plain_args, plain_kwargs, read, wrote, kind, known.pointwise, *place, call, kernel)
        )

    def _follows_kernel(self, known: About) -> bool:
        """Return whether an operation takes off what the call to the kernel before it has put on: a batch of one."""
        return known.base_name == "squeeze" and self._ops[-1].kernel is not None

    def _take_in_what_leads_here(self, call: int) -> None:
        """Count the operations just before a kernel that the same call in Python makes of inputs without a batch."""
        asked = self._calls[-1]
        for index in reversed(range(len(self._ops))):
            if self._calls[index] != asked or self._ops[index].base_name != "unsqueeze":
                return
            self._calls[index] = call

    def ops(self) -> tuple[Op, ...]:
        """Return the operations up to here."""
        free = max(self._calls, default=-1) + 1
        for call, group in groupby(zip(self._calls, self._ops, strict=True), key=itemgetter(0)):
            ops = [op for _, op in group]
            if call in self._whole or len(ops) == 1:
                own = [call] * len(ops)
            elif call in self._scripts or is_script(ops):
                own = calls_in_script(ops, free)
            else:
                own = turns_of(call, [op.name for op in ops], free)
            free = max(free, max(own) + 1)
            for op, number in zip(ops, own, strict=True):
                op.call = number
        return tuple(self._ops)

    def named(self, looks: Iterable[tuple[str, Look]]) -> list[Named]:
        """Return the tensors that were looked at, by name."""
        return [Named(name, self.read(look)) for name, look in looks]

    def _plain(self, value: Any, inputs: list[TensorRef]) -> Any:
        """Return an argument as plain data; tensors in it are added to `inputs`."""
        kind = type(value)
        if kind is tuple:
            tensor = self.read(value)
            inputs.append(tensor)
            return tensor
        if kind is list:
            return tuple([self._plain(item, inputs) for item in value])
        if value is None or isinstance(value, (int, float, complex, str)):
            return value
        name = self._names.get(value)
        if name is None:
            name = self._names[value] = str(value)
        return name

    def _write(self, look: Look, index: int, given: Mapping[int, TensorRef], in_place: bool, told: bool) -> TensorRef:
        """Return the tensor that operation `index` has just returned; `given` are its own, by storage."""
        storage = self._storages.get(id(look[0]))
        key = look[1:5]
        if storage is None or not (told or storage.number in given or storage.made_by == index):
            storage = self._add_storage(look, index)
        elif in_place and storage.made_by != index:
            storage.seen.clear()
            storage.made_by = index
        else:
            seen = storage.seen.get(key)
            unchanged = seen is not None and seen is given.get(storage.number)  # a view that changes nothing
            if seen is not None and (unchanged or self.producers.get(seen.id) == index):  # what it wrote, as well
                return seen
        return self._new(look, key, storage, index)

    def _add_storage(self, look: Look, made_by: int | None) -> _Storage:
        storage = self._storages[id(look[0])] = _Storage(self._num_storages, made_by, look[0])
        self._num_storages += 1
        return storage

    def _new(self, look: Look, key: tuple[Any, ...], storage: _Storage, made_by: int | None) -> TensorRef:
        offset, size, stride, dtype = key
        shape = tuple(size)
        number = self._num_tensors
        name = _DTYPE_NAMES.get(dtype) or _DTYPE_NAMES.setdefault(dtype, str(dtype).removeprefix("torch."))
        made = TensorRef(number, shape, stride, offset, name, dtype.itemsize, storage.number)
        self._num_tensors = number + 1
        storage.seen[offset, shape, stride, dtype] = made
        if made_by is not None:
            self.producers[number] = made_by
        if len(look) > 5:
            if look[5] is not None:
                self.scalars[number] = look[5]
            if len(look) > 6 and look[6] is not None:
                self._held[number] = look[6]
            if len(look) > 7 and look[7] is not None:
                self.sights[number] = look[7]
        return made

    def release(self) -> dict[int, Any]:
        """Return the kept tensors by the tensor's number."""
        self.values.update({number: held[0] for number, held in self._held.items()})
        self._held.clear()
        return self.values


_collecting = Lock()
_paused: list[bool] = []
"""For each thread that is in `uncollected` now, whether Python collected when the first of them entered."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Make much of which nothing can be freed, without Python going through all that there is to find that out.

    No code of the user's runs in here: what a forward leaves behind is collected as ever.
    """
    with _collecting:
        _paused.append(_paused[0] if _paused else gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _collecting:
            if _paused.pop() and not _paused:
                gc.enable()


def turns_of(call: int, names: Sequence[str], free: int) -> list[int]:
    """Return the number of the call of each operation, those of each turn of `for w in ws: x = w @ x` their own.

    A call is told by where Python stands, and there it stands in every turn. What gives the turns away is that the same
    operations come over and over. The first turn keeps the number; the others take those from `free` on.
    """
    size = _period(names)
    return [call if place < size else free + place // size - 1 for place in range(len(names))]


def _period(names: Sequence[str]) -> int:
    """Return the length of what is repeated from the first to the last name; all of it where nothing is."""
    whole = len(names)
    lengths = (size for size in range(1, whole // 2 + 1) if whole % size == 0)
    return next((size for size in lengths if names[size:] == names[:-size]), whole)


_COUNTED = r"(?:clone )?(?:view|_unsafe_view) "
_COMPOSITES = re.compile(
    "|".join(
        (
            rf"(?:expand {_COUNTED}){{2}}bmm {_COUNTED}",  # a matrix product
            rf"(?P<rows>(?:{_COUNTED})?(?:t )?(?:addmm|mm) (?:view |_unsafe_view )?)",  # a linear layer
            rf"(?:(?:unsqueeze )*permute ){{2}}(?:permute {_COUNTED}){{2}}bmm {_COUNTED}permute {_COUNTED}",  # einsum
        )
    )
)
"""What one call to torch dispatches where it multiplies matrices, by the names of the operations."""


def is_script(ops: Sequence[Op]) -> bool:
    """Return whether what Python called once are several calls: none of torch takes a product and a softmax."""
    return any(op.does("softmax") for op in ops) and any(op.does("product") for op in ops)


def calls_in_script(ops: Sequence[Op], first: int) -> list[int]:
    """Return the number of the call of each operation, from `first` on: one each, but for what a product consists of.

    A linear layer counts its rows as one dimension, and back. A view that leaves no row whole is no part of it.
    """
    told = [first + place for place in range(len(ops))]
    names = "".join(f"{op.base_name} " for op in ops)
    for found in _COMPOSITES.finditer(names):
        start, stop = (names.count(" ", 0, end) for end in found.span())
        if found["rows"]:
            start += not _keeps_rows(ops[start])
            stop -= not _keeps_rows(ops[stop - 1])
        told[start:stop] = [told[start]] * (stop - start)
    return told


def _keeps_rows(op: Op) -> bool:
    """Return whether this is no view that cuts rows up."""
    return op.kind == "compute" or op.base_name == "t" or op.inputs[0].shape[-1:] == op.output.shape[-1:]
