"""Find layers that repeat in a recording, and leave all but three of them out: each distinct layer is read once.

Two layers are equal if their operations are: the same names, arguments, shapes, strides, dtypes, numbers and notes, on
tensors that were made or last read equally many operations ago. A stack of twelve equal layers is shortened to three:
the first, one between equal layers, and the last. What is found in the second is translated for those left out.

>>> import torch
>>> from mha_inspect.record.recorder import Recorder
>>> layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
>>> recorder = Recorder(layers)
>>> with torch.no_grad(), recorder:
...     _ = layers(torch.randn(2, 4))
>>> recording = recorder.finish()
>>> shortened = shortened_of(recording)
>>> [op.module for op in recording.ops if op.does("product")]
['0', '1', '2', '3', '4', '5']
>>> [op.module for op in shortened.recording.ops if op.does("product")]
['0', '1', '2']
>>> [translation.op(shortened.recording.ops[1]).module for translation in shortened.translations(1)]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..record.ops import Named, Op, Recording, TensorRef
from ..record.sight import Sight
from .dimensions import Dim, Dimensions
from .ids import by_id

_KEPT = 3
"""How many layers stay of each stack: the first, one between equal layers, and the last."""
_SLACK = 8
"""The last of them may lack one part in so many, e.g. as the first operation of a stack reads an input of the model."""
_CANDIDATES = 6
"""How many distances between equal operations are tried as the length of a layer."""

T = TypeVar("T")


class UnlikeError(Exception):
    """A recording cannot be shortened, or something found in it is part of no layer."""


@dataclass(frozen=True)
class Stack:
    """Equal layers in a row: operations that repeat those `period` before them. The last layer may be cut short."""

    start: int
    period: int
    length: int
    """Number of operations from the first that repeats."""

    @property
    def left_out(self) -> int:
        """Number of layers that are left out."""
        kept = _KEPT * self.period
        slack = self.period // _SLACK
        return max(0, (self.length - kept + slack) // self.period)

    @property
    def removed(self) -> int:
        """Number of operations that are left out."""
        return self.left_out * self.period

    @property
    def kept(self) -> int:
        """Number of operations that stay: those of the first layer, those of the second, and those up to the end."""
        return self.length - self.removed

    @property
    def end(self) -> int:
        """Index of the operation after the last layer."""
        return self.start + self.length

    def has(self, index: int) -> bool:
        """Return whether an operation is part of the stack."""
        return self.start <= index < self.end

    def overlaps(self, stack: Stack) -> bool:
        """Return whether two stacks have operations in common."""
        return self.start < stack.end and stack.start < self.end

    def kept_index(self, index: int) -> int:
        """Return the index of an operation of the stack in the layer that stays for it."""
        place = index - self.start
        if place < self.period:
            return index
        if place >= (self.left_out + 2) * self.period:
            return index - self.removed
        return self.start + self.period + place % self.period


# -- which operations are equal ---------------------------------------------------------------------------------------


class _Signatures:
    """Numbers of the operations of a recording, in order: two are equal if the operations are.

    A tensor is described by the operation that made or read it last: how long ago that was, and in which place. So
    operations of two layers are equal where each layer's tensors are connected in the same way.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._kinds = _kinds_of(recording)
        self._sights: list[Sight] = []
        self._contents: list[torch.Tensor] = []
        self._layouts: dict[object, int] = {}
        self._tensors: dict[int, tuple[int, int, int]] = {}
        """Id of a tensor to the last operation with it, its place there, and the number of its layout."""
        self._storages: dict[int, int] = {}
        self._calls: dict[int, int] = {}
        self._kernels: dict[int, int] = {}
        self._modules: dict[str, int] = {}

    def all(self) -> list[int]:
        """Return the number of each operation."""
        numbers: dict[object, int] = {}
        ops, before = self._recording.ops, None
        result = []
        for op in ops:
            result.append(numbers.setdefault(self._key(op, before), len(numbers)))
            before = op
        return result

    def _key(self, op: Op, before: Op | None) -> object:
        index = op.index
        module = self._module(op, before)
        last_call = self._calls.get(op.call)
        self._calls[op.call] = index
        mentions = []
        for place, tensor in enumerate(op.inputs + op.outputs):
            mentions.append(self._mention(tensor, index, place))
        kwargs = None
        if op.kwargs:
            plain = [(name, without_tensors(value)) for name, value in op.kwargs.items()]
            kwargs = tuple(plain)
        return (
            op.name,
            len(op.inputs),
            tuple(mentions),
            None if op.args is op.inputs else without_tensors(op.args),
            kwargs,
            op.kind,
            op.source,
            None if last_call is None else index - last_call,
            module,
            None if before is None else _shared(op.forwards, before.forwards),
            len(op.forwards),
            None if op.kernel is None else self._kernel(op.kernel, index),
            self._sight_of(op),
        )

    def _mention(self, tensor: TensorRef, index: int, place: int) -> object:
        """Return how long ago a tensor was made or read, and where, with the number of its layout."""
        last = self._tensors.get(tensor.id)
        if last is None:
            layout = tensor.shape, tensor.stride, tensor.offset, tensor.dtype
            number = self._layouts.setdefault(layout, len(self._layouts))
            mention = self._first_mention(tensor, index, number)
        else:
            number = last[2]
            mention = number, index - last[0], last[1]
        self._tensors[tensor.id] = index, place, number
        self._storages[tensor.storage] = index
        return mention

    def _first_mention(self, tensor: TensorRef, index: int, number: int) -> object:
        """Return what is known of a tensor that no operation made or read before, with the number of its layout."""
        seen = self._storages.get(tensor.storage)
        content = (
            self._recording.scalars.get(tensor.id),
            self._kinds.get(tensor.id),
            self._content_of(tensor),
        )
        return number, None if seen is None else index - seen, content

    def _module(self, op: Op, before: Op | None) -> tuple[int, int | None]:
        """Return how many modules are around that of an operation, and how long ago it ran another operation.

        An operation of a module is one of the modules around it too.
        """
        depth = op.module.count(".")
        if before is not None and op.module == before.module:
            return depth, 1
        if before is not None:
            self._modules[""] = before.index
            for path in _with_parents(before.module):
                self._modules[path] = before.index
        last = self._modules.get(op.module)
        return depth, None if last is None else op.index - last

    def _kernel(self, place: int, index: int) -> object:
        last = self._kernels.get(place)
        self._kernels[place] = index
        if last is not None:
            return index - last
        kernel = self._recording.kernels[place]
        outer = None if kernel.within is None else place - kernel.within
        return replace(kernel, check=None, within=None), kernel.check is None, outer

    def _content_of(self, tensor: TensorRef) -> int | None:
        """Return the number of the content of a constant, e.g. of a mask, equal for equal content; else None."""
        content = self._recording.constants.get(tensor.id)
        if content is None:
            return None
        for number, like in enumerate(self._contents):
            if content is like or _same_content(content, like):
                return number
        self._contents.append(content)
        return len(self._contents) - 1

    def _sight_of(self, op: Op) -> int | None:
        """Return the number of what is noted about weights, equal for notes with the same content."""
        if not op.outputs:
            return None
        sight = self._recording.sights.get(op.output.id)
        if sight is None:
            return None
        for number, like in enumerate(self._sights):
            if sight is like or _same_sight(sight, like):
                return number
        self._sights.append(sight)
        return len(self._sights) - 1


def _kinds_of(recording: Recording) -> dict[int, object]:
    """Return what tensors from outside the run are, by id: parameters and buffers are alike, inputs are not."""
    kinds: dict[int, object] = {}
    for named in recording.parameters:
        kinds[named.tensor.id] = "parameter"
    for named in recording.buffers:
        kinds[named.tensor.id] = "buffer"
    for named in recording.inputs:
        kinds[named.tensor.id] = ("input", named.tensor.id)
    return kinds


def without_tensors(value: Any) -> Any:
    """Return arguments with None for each tensor; a number comes with its type, since 1 == 1.0 == True."""
    kind = type(value)
    if kind is tuple:
        return tuple([without_tensors(item) for item in value])
    if kind is TensorRef:
        return None
    return (kind, value) if kind in (bool, float) else value


def _shared(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the length of the common beginning of two sequences."""
    if left == right:
        return len(left)
    count = 0
    for first, second in zip(left, right, strict=False):
        if first != second:
            break
        count += 1
    return count


def _same_content(left: torch.Tensor, right: torch.Tensor) -> bool:
    return not left.is_meta and same_content(left, right)


def _same_sight(left: Sight, right: Sight) -> bool:
    if left.pairs.keys() != right.pairs.keys():
        return False
    if left.blind is None or right.blind is None:
        if left.blind is not right.blind:
            return False
    elif not torch.equal(left.blind, right.blind):
        return False
    pairs = left.pairs.items()
    return all(torch.equal(seen, right.pairs[key]) for key, seen in pairs)


# -- stacks of equal layers -------------------------------------------------------------------------------------------


def _stacks(numbers: Sequence[int]) -> list[Stack]:
    """Return where a sequence repeats itself, without overlaps, the largest first.

    >>> _stacks([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 8])
    [Stack(start=1, period=3, length=15)]
    """
    stacks: list[Stack] = []
    every = np.array(numbers)
    for period in _periods(numbers):
        stacks += _stacks_of(every, period)
    chosen: list[Stack] = []
    for stack in sorted(stacks, key=lambda stack: (-stack.removed, stack.period)):
        if not any(map(stack.overlaps, chosen)):
            chosen.append(stack)
    return sorted(chosen, key=lambda stack: stack.start)


def _periods(numbers: Sequence[int]) -> list[int]:
    """Return the most common distances between equal numbers, the most common first."""
    distances: Counter[int] = Counter()
    last: dict[int, int] = {}
    for place, number in enumerate(numbers):
        if number in last:
            distances[place - last[number]] += 1
        last[number] = place
    return [period for period, _ in distances.most_common(_CANDIDATES)]


def _stacks_of(numbers: np.ndarray[Any, Any], period: int) -> Iterator[Stack]:
    """Yield where a sequence repeats itself after `period`, more often than layers stay."""
    last = len(numbers) - period
    differs = np.flatnonzero(numbers[:last] != numbers[period:])
    bounds = np.concatenate(([-1], differs, [last]))
    # In between they are equal; most of these parts are too short for a layer.
    shortest = (_KEPT - 1) * period
    long_parts = np.flatnonzero(np.diff(bounds) > shortest)
    for part in long_parts.tolist():
        before, after = bounds[part : part + 2].tolist()
        start = before + 1
        stack = Stack(start, period, after - start + period)
        if stack.left_out:
            yield stack


# -- a shorter recording ----------------------------------------------------------------------------------------------


def shortened_of(recording: Recording) -> Shortened | None:
    """Return a recording without the layers that are equal to others; None if no stack has more than three of them."""
    stacks = tuple(_stacks(_Signatures(recording).all()))
    if not stacks:
        return None
    try:
        return _Cut(recording).shortened(stacks)
    except UnlikeError:
        return None


class _Cut:
    """Makes the shorter recording: what follows a stack reads the last layer that stays in place of the last layer."""

    def __init__(self, whole: Recording) -> None:
        self._whole = whole
        self._ops: list[Op] = []
        self._renamed: dict[int, TensorRef] = {}
        """Id of a tensor in the last layer of a stack to the tensor in the last layer that stays."""
        self._storages: dict[int, int] = {}
        """The same for the numbers of storages."""
        self._calls: dict[int, int] = {}
        self._forwards: dict[int, int] = {}
        self._kernels: dict[int | None, int | None] = {}
        self._modules: dict[str, str] = {}
        self._gone: set[int] = set()
        """Ids of tensors of a stack that nothing after it may read."""
        self._gone_storages: set[int] = set()

    def shortened(self, stacks: tuple[Stack, ...]) -> Shortened:
        """Return the shortened recording. Raises `UnlikeError` if something after a stack reads one of its middle."""
        whole, done = self._whole, 0
        for stack in stacks:
            self._append(whole.ops[done : stack.start + stack.kept])
            _require_same_modules(whole.ops, stack)
            self._leave_out(stack)
            done = stack.end
        self._append(whole.ops[done:])
        shortened = Shortened(whole, replace(whole, ops=tuple(self._ops), joins={}), stacks)
        recording = replace(
            shortened.recording,
            parameters=self._used(whole.parameters),
            buffers=self._used(whole.buffers),
            producers=self._producers(shortened),
        )
        shortened = replace(shortened, recording=recording)
        outputs = [replace(named, tensor=shortened.back(named.tensor)) for named in whole.outputs]
        return replace(shortened, recording=replace(recording, outputs=tuple(outputs)))

    def _tensors(self) -> Iterator[TensorRef]:
        """Yield the tensors of the operations that stay."""
        for op in self._ops:
            yield from op.inputs
            yield from op.outputs

    def _producers(self, shortened: Shortened) -> dict[int, int]:
        """Return the id of each tensor to the index of the operation that made it, among those that stay."""
        producers = {}
        for number in by_id(self._tensors()):
            index = self._whole.producers.get(number)
            if index is not None:
                producers[number] = shortened.index_after_cut(index)
        return producers

    def _used(self, every: tuple[Named, ...]) -> tuple[Named, ...]:
        """Return the parameters or buffers that the operations that stay read, or of which they read a view."""
        ids: set[int] = set()
        storages: set[int] = set()
        for tensor in self._tensors():
            ids.add(tensor.id)
            storages.add(tensor.storage)
        used = []
        for named in every:
            if named.tensor.id in ids or named.tensor.storage in storages:
                used.append(named)
        return tuple(used)

    def _append(self, ops: Sequence[Op]) -> None:
        first = ops[0].index if ops else 0
        if not self._renamed and len(self._ops) == first:
            self._ops += ops
            return
        for op in ops:
            self._ops.append(self._op(op, len(self._ops)))

    def _op(self, op: Op, index: int) -> Op:
        """Return an operation after a stack, at another index, with the tensors of the layers that stay."""
        inputs = tuple(map(self._tensor, op.inputs))
        outputs = tuple(map(self._tensor, op.outputs))
        args = inputs if op.args is op.inputs else self._argument(op.args)
        kwargs = {name: self._argument(value) for name, value in op.kwargs.items()}
        return replace(
            op,
            index=index,
            args=args,
            kwargs=kwargs,
            inputs=inputs,
            outputs=outputs,
            module=self._module(op.module),
            call=self._calls.get(op.call, op.call),
            kernel=self._kernels.get(op.kernel, op.kernel),
            forwards=tuple([self._forwards.get(number, number) for number in op.forwards]),
        )

    def _module(self, path: str) -> str:
        """Return the path of a module, with the layer that stays in place of the last layer: `blocks.2.out`."""
        for outer in reversed(_with_parents(path)):
            if outer in self._modules:
                return self._modules[outer] + path[len(outer) :]
        return path

    def _argument(self, value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(self._argument, value))
        return self._tensor(value) if type(value) is TensorRef else value

    def _tensor(self, tensor: TensorRef) -> TensorRef:
        renamed = self._renamed.get(tensor.id)
        if renamed is not None:
            return renamed
        if tensor.id in self._gone or tensor.storage in self._gone_storages:
            raise UnlikeError
        storage = self._storages.get(tensor.storage, tensor.storage)
        return tensor if storage == tensor.storage else replace(tensor, storage=storage)

    def _leave_out(self, stack: Stack) -> None:
        """Take the last layer that stays for the last layer, and forget the tensors of the others."""
        whole = self._whole
        later = stack.kept - stack.period
        last_layer = whole.ops[stack.end - later : stack.end]
        for op, kept in zip(last_layer, self._ops[-later:], strict=True):
            self._rename_op(op, kept, stack)
        for op in whole.ops[stack.start : stack.end]:
            for tensor in op.inputs + op.outputs:
                if self._is_of_stack(tensor, stack):
                    self._gone.add(tensor.id)
                    self._gone_storages.add(tensor.storage)
        self._gone -= self._renamed.keys()
        self._gone_storages -= self._storages.keys()

    def _is_of_stack(self, tensor: TensorRef, stack: Stack) -> bool:
        """Return whether an operation of a stack, or none at all, made a tensor that the stack has."""
        producer_index = self._whole.producers.get(tensor.id)
        return producer_index is None or producer_index >= stack.start

    def _rename_op(self, op: Op, kept: Op, stack: Stack) -> None:
        """Take an operation of the last layer that stays for one of the last layer, with all that it names.

        Raises `UnlikeError` if each layer reads another result of what is before the stack.
        """
        self._calls[op.call] = kept.call
        self._kernels[op.kernel] = kept.kernel
        self._forwards.update(zip(op.forwards, kept.forwards, strict=True))
        self._modules.update(zip(_with_parents(op.module), _with_parents(kept.module), strict=True))
        tensors = op.inputs + op.outputs
        for tensor, stays in zip(tensors, kept.inputs + kept.outputs, strict=True):
            if tensor.id != stays.id and not self._is_of_stack(tensor, stack):
                raise UnlikeError
            self._rename(tensor, stays)

    def _rename(self, tensor: TensorRef, stays: TensorRef) -> None:
        """Take a tensor that stays for one of the last layer. Raises `UnlikeError` if another stands for it already."""
        if self._renamed.setdefault(tensor.id, stays).id != stays.id:
            raise UnlikeError
        if self._storages.setdefault(tensor.storage, stays.storage) != stays.storage:
            raise UnlikeError


def _require_same_modules(ops: Sequence[Op], stack: Stack) -> None:
    """Raise `UnlikeError` unless the modules of every layer are nested as those of the second layer are."""
    second = stack.start + stack.period
    like = _modules_of(ops, second, second + stack.period)
    for start in range(stack.start, stack.end, stack.period):
        end = min(start + stack.period, stack.end)
        pairs = set(zip(like, _modules_of(ops, start, end), strict=False))
        parts: set[tuple[str, str]] = set()
        for left, right in pairs:
            parts.update(zip(_with_parents(left), _with_parents(right), strict=True))
        lefts, rights = (set(paths) for paths in zip(*parts, strict=True))
        if not len(parts) == len(lefts) == len(rights):
            raise UnlikeError


def _modules_of(ops: Sequence[Op], start: int, end: int) -> list[str]:
    """Return the path of the module of each operation of a layer."""
    return [op.module for op in ops[start:end]]


@cache
def _with_parents(path: str) -> tuple[str, ...]:
    """Return the path of a module with the paths of the modules around it: `blocks`, `blocks.0`, `blocks.0.attn`."""
    return tuple(accumulate(path.split("."), "{}.{}".format))


def _shifts_of(layer: int, left_out: int) -> list[int]:
    """Return how many layers later one of the three that stay ran: the middle one stands for those left out too."""
    if layer == 0:
        return [0]
    if layer == 1:
        return list(range(left_out + 1))
    return [left_out]


@dataclass(frozen=True)
class Shortened:
    """A recording without the layers that are equal to others, and how to find what was left out."""

    whole: Recording
    recording: Recording
    """The recording with three layers of each stack."""
    stacks: tuple[Stack, ...]
    """The stacks of equal layers in `whole`, in order."""

    def short_index(self, index: int) -> int:
        """Return the index in the short recording of an operation, or of that which stays for it."""
        removed = 0
        for stack in self.stacks:
            if index < stack.end:
                return (stack.kept_index(index) if stack.has(index) else index) - removed
            removed += stack.removed
        return index - removed

    def index_after_cut(self, index: int) -> int:
        """Return the index in the short recording of an operation that was not left out."""
        removed = 0
        for stack in self.stacks:
            if stack.end <= index:
                removed += stack.removed
        return index - removed

    def back(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor in the short recording of a tensor in the whole one, or that which stays for it.

        Raises `UnlikeError` if no operation made it, although a layer has it.
        """
        producer_index = self.whole.producers.get(tensor.id)
        if producer_index is None:
            return tensor
        op = self.whole.ops[producer_index]
        kept = self.recording.ops[self.short_index(producer_index)]
        for output, stays in zip(op.outputs, kept.outputs, strict=True):
            if output.id == tensor.id:
                return stays
        if any(stack.has(producer_index) for stack in self.stacks):
            raise UnlikeError
        return tensor

    @cached_property
    def windows(self) -> tuple[range, ...]:
        """The indices in the short recording of the layers that stay, by stack."""
        windows, removed = [], 0
        for stack in self.stacks:
            start = stack.start - removed
            windows.append(range(start, start + stack.kept))
            removed += stack.removed
        return tuple(windows)

    def _ops_of(self, window: range) -> tuple[Op, ...]:
        """Return the operations of the layers that stay of a stack."""
        return self.recording.ops[window.start : window.stop]

    @cached_property
    def places(self) -> tuple[dict[int, tuple[int, int]], ...]:
        """By stack, the id of each tensor in the layers that stay to its first operation, and its place there."""
        places: list[dict[int, tuple[int, int]]] = []
        for window in self.windows:
            first: dict[int, tuple[int, int]] = {}
            for op in self._ops_of(window):
                for place, tensor in enumerate(op.inputs + op.outputs):
                    first.setdefault(tensor.id, (op.index, place))
            places.append(first)
        return tuple(places)

    @cached_property
    def parameters(self) -> dict[str, TensorRef]:
        """The parameters by name."""
        return {named.name: named.tensor for named in self.recording.parameters}

    @cached_property
    def tables(self) -> list[TensorRef]:
        """The integers and booleans in the layers that stay whose numbers were kept."""
        tables: dict[int, TensorRef] = {}
        for window in self.windows:
            for op in self._ops_of(window):
                for tensor in op.inputs + op.outputs:
                    is_table = tensor.dtype.startswith(("int", "uint", "bool"))
                    if is_table and tensor.id in self.whole.values:
                        tables[tensor.id] = tensor
        return [*tables.values()]

    def translations(self, anchors: Iterable[int]) -> list[Translation]:
        """Return where these operations of the short recording ran in the whole one, once or several times.

        The layer between equal layers stands for all that were left out. Raises `UnlikeError` if the operations belong
        to several layers.
        """
        places = {self._place(index) for index in anchors}
        if len(places) != 1:
            raise UnlikeError
        ((number, layer),) = places
        last = [stack.left_out for stack in self.stacks]
        # A stack before is seen from its end, and one after from its beginning.
        before = last[:number]
        after = [0] * (len(last) - number)
        if layer is None:
            return [Translation(self, (*before, *after), number, is_in_stack=False)]
        shifts = _shifts_of(layer, last[number])
        return [Translation(self, (*before, shift, *after[1:]), number) for shift in shifts]

    def _place(self, index: int) -> tuple[int, int | None]:
        """Return the number of the stack with an operation and its layer there; with None the stack that follows."""
        for number, (window, stack) in enumerate(zip(self.windows, self.stacks, strict=True)):
            if index < window.start:
                return number, None
            if index < window.stop:
                return number, min((index - window.start) // stack.period, 2)
        return len(self.stacks), None


@dataclass(frozen=True, eq=False)
class Translation:
    """Where operations of a shortened recording ran in the whole one: so many layers later, by stack."""

    shortened: Shortened
    shifts: tuple[int, ...]
    stack: int
    """The number of the stack that is translated, or of the stack that follows."""
    is_in_stack: bool = True

    @cached_property
    def _in_order(self) -> list[int]:
        """The numbers of the stacks, beginning with the one that is translated."""
        return sorted(range(len(self.shifts)), key=lambda number: number != self.stack)

    def op(self, op: Op) -> Op:
        """Return the operation of the whole recording."""
        return self.shortened.whole.ops[self._index(op.index)]

    def _index(self, index: int) -> int:
        added = 0
        for window, stack, shift in zip(self.shortened.windows, self.shortened.stacks, self.shifts, strict=True):
            if index < window.start:
                break
            if index < window.stop:
                return index + added + shift * stack.period
            added += stack.removed
        return index + added

    def tensor(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor of the whole recording. Raises `UnlikeError` for a tensor that is only put together."""
        if tensor.id < 0:
            raise UnlikeError
        for number in self._in_order:
            place = self.shortened.places[number].get(tensor.id)
            if place is not None:
                index, at = place
                op = self.shortened.whole.ops[self._index(index)]
                return (op.inputs + op.outputs)[at]
        return tensor

    def back(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor of the short recording for a tensor of the whole one, as seen from these layers."""
        whole = self.shortened.whole
        producer_index = whole.producers.get(tensor.id)
        if producer_index is None:
            return tensor
        short_index = self._short_index(producer_index)
        if short_index is None:
            return self.shortened.back(tensor)
        kept = self.shortened.recording.ops[short_index]
        for output, stays in zip(whole.ops[producer_index].outputs, kept.outputs, strict=True):
            if output.id == tensor.id:
                return stays
        return tensor

    def _short_index(self, index: int) -> int | None:
        """Return the index in the short recording of an operation that these layers stand for; None for others."""
        removed = 0
        for shift, stack in zip(self.shifts, self.shortened.stacks, strict=True):
            first = index - shift * stack.period
            is_kept = stack.start <= first < stack.start + stack.kept
            if is_kept and index < stack.end:
                return first - removed
            removed += stack.removed
        return None

    def module(self, path: str) -> str:
        """Return the path of the module in the whole recording."""
        if not path:
            return path
        depth = path.count(".") + 1
        for number in self._in_order:
            window = self.shortened.windows[number]
            for op in self.shortened.recording.ops[window.start : window.stop]:
                if op.module == path or op.module.startswith(path + "."):
                    return ".".join(self.op(op).module.split(".")[:depth])
        return path

    def parameter(self, name: str) -> str:
        """Return the name of the parameter in the whole recording. Raises `UnlikeError` if no operation reads it."""
        tensor = self.shortened.parameters[name]
        is_read = any(tensor.id in places for places in self.shortened.places)
        if self.is_in_stack and not is_read:
            raise UnlikeError
        return self.shortened.whole.parameter_names[self.tensor(tensor).id]

    def has_same_tables(self) -> bool:
        """Return whether the integers and booleans that were kept have the same numbers in the whole recording."""
        values = self.shortened.whole.values
        for table in self.shortened.tables:
            left = values[table.id]
            right = values.get(self.tensor(table).id)
            if left is not right and not same_content(left, right):
                return False
        return True

    def of(self, value: T) -> T:
        """Return plain data with its operations, its tensors, and the paths in fields `module` translated."""
        translated: Any = self._of(value)
        return translated  # type: ignore[no-any-return]  # of the type of what is translated

    def _of(self, value: Any) -> Any:
        if isinstance(value, Op):
            return self.op(value)
        if isinstance(value, TensorRef):
            return self.tensor(value)
        if isinstance(value, Mapping):
            return {key: self._of(item) for key, item in value.items()}
        if isinstance(value, tuple):
            items = [self._of(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if not is_dataclass(value) or isinstance(value, type):
            return value
        return self._of_fields(value)

    def _of_fields(self, value: Any) -> Any:
        """Return a dataclass with its fields translated; the same object if nothing in them changes."""
        changes = {}
        for field in fields(value):
            before = getattr(value, field.name)
            after = self.module(before) if field.name == "module" else self._of(before)
            if after is not before:
                changes[field.name] = after
        return replace(value, **changes) if changes else value


def same_content(left: Tensor | None, right: Tensor | None) -> bool:
    """Return whether two tensors have the same shape, dtype and numbers; on meta there are no numbers.

    The numbers of a sparse or nested tensor are not compared.
    """
    if left is None or right is None:
        return False
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_meta and right.is_meta:
        return True
    is_plain = left.layout == right.layout == torch.strided and not left.is_nested and not right.is_nested
    if not is_plain:
        return left is right
    return left.device == right.device and torch.equal(left, right)


class TranslatedDimensions:
    """The dimensions of tensors of the whole recording, from those of the short one."""

    def __init__(self, dimensions: Dimensions, translation: Translation) -> None:
        self._dimensions, self._translation = dimensions, translation

    def of(self, tensor: TensorRef) -> tuple[Dim, ...]:
        """Return the dimensions of a tensor, each as its atoms."""
        return self._dimensions.of(self._translation.back(tensor))
