"""Find equal layers in a recording, leave all but three of them out, and say what each operation is in the others.

Two layers are equal if their operations are: the same names, arguments, layouts and notes, on tensors that belong
together one by one. Of twelve equal layers the first, the second and the last stay. The second stands for those left
out: what has a place in its operations has the same place in the operations of each of them.

>>> import torch
>>> from mha_inspect.record.recorder import Recorder
>>> layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
>>> recorder = Recorder(layers)
>>> with torch.no_grad(), recorder:
...     _ = layers(torch.randn(2, 4))
>>> shortened = shortened_of(recorder.finish())
>>> [op.module for op in shortened.recording.ops if op.does("product")]
['0', '1', '5']
>>> [layer.op(shortened.recording.ops[1]).module for layer in shortened.layers_with({1})]
['1', '2', '3', '4']
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import is_
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..record.ops import Named, Op, Recording, TensorRef
from ..record.sight import Sight

_KEPT = 3
"""How many layers stay of each stack: the first, one between equal layers, and the last."""
_SLACK = 8
"""The last of them may lack one part in so many."""
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
    stop: int
    """Index of the operation after the last layer."""

    @property
    def left_out(self) -> int:
        """Number of layers that are left out."""
        length = self.stop - self.start
        slack = self.period // _SLACK
        return max(0, (length + slack) // self.period - _KEPT)

    @property
    def removed(self) -> range:
        """Indices of the operations that are left out: those after the second layer, except the last ones."""
        first = self.start + 2 * self.period
        return range(first, first + self.left_out * self.period)

    @property
    def kept(self) -> int:
        """Number of operations that stay."""
        return self.stop - self.start - len(self.removed)

    def layers_at(self, index: int) -> range:
        """Return how many layers later an operation that stays is found again, 0 for itself."""
        if index < self.start + self.period:
            return range(1)
        if index < self.removed.start:
            return range(self.left_out + 1)
        return range(self.left_out, self.left_out + 1)


def _tensors_of(op: Op) -> tuple[TensorRef, ...]:
    return op.inputs + op.outputs


# -- which operations are equal ---------------------------------------------------------------------------------------


def _numbers(recording: Recording) -> list[int]:
    """Return a number for each operation; only operations with one number may be equal."""
    numbers: dict[Hashable, int] = {}
    sights: list[Sight] = []
    result = []
    for op in recording.ops:
        sizes = op.outputs[0].shape if op.outputs else None
        args = None if op.args is op.inputs else without_tensors(op.args)
        sight = recording.sights.get(op.outputs[0].id) if op.outputs else None
        key = (op.name, op.source, sizes, args, None if sight is None else _number_of(sight, sights))
        result.append(numbers.setdefault(key, len(numbers)))
    return result


def _number_of(sight: Sight, before: list[Sight]) -> int:
    """Return the place of an equal note about weights among those before, at which it is added if it is new."""
    for number, like in enumerate(before):
        if _same_sight(sight, like):
            return number
    before.append(sight)
    return len(before) - 1


def without_tensors(value: Any) -> Any:
    """Return arguments with None for each tensor; a number comes with its type, since 1 == 1.0 == True."""
    kind = type(value)
    if kind is tuple:
        return tuple([without_tensors(item) for item in value])
    if kind is TensorRef:
        return None
    return (kind, value) if kind in (bool, float) else value


class _Pairs:
    """Names of one layer and those of the next one, one by one."""

    def __init__(self) -> None:
        self.later: dict[Hashable, Hashable] = {}
        self._earlier: dict[Hashable, Hashable] = {}

    def have(self, name: Hashable, later: Hashable) -> bool:
        """Return whether a name is paired with one of the next layer, or both are new, and are paired now."""
        is_one = self.later.setdefault(name, later) == later
        return is_one and self._earlier.setdefault(later, name) == name


class _NextLayer:
    """Says of operations since `start` which ones they are in the next layer."""

    def __init__(self, recording: Recording, start: int, period: int) -> None:
        self._recording, self._start, self._second = recording, start, start + period
        self._tensors, self._storages = _Pairs(), _Pairs()
        self._calls, self._places = _Pairs(), _Pairs()
        self._place: tuple[object, ...] = ()

    def has(self, op: Op, later: Op) -> bool:
        """Return whether an operation with the same number is this one in the next layer."""
        place = op.module, op.forwards, op.kernel, later.module, later.forwards, later.kernel
        if place != self._place:
            self._place = place
            if not self._is_in_same_place(op, later):
                return False
        if not self._calls.have(op.call, later.call) or not _are_like_calls(op, later):
            return False
        known = self._tensors.later
        for tensor, like in zip(_tensors_of(op), _tensors_of(later), strict=True):
            if known.get(tensor.id) != like.id and not self._is_new_pair(op, tensor, like):
                return False
        return True

    def _is_in_same_place(self, op: Op, later: Op) -> bool:
        """Return whether the modules around an operation, and its kernel, are those of the other in the next layer."""
        paths, like = _with_parents(op.module), _with_parents(later.module)
        if len(paths) != len(like) or len(op.forwards) != len(later.forwards):
            return False
        pairs = zip((*paths, *op.forwards), (*like, *later.forwards), strict=True)
        if not all(self._places.have(*pair) for pair in pairs):
            return False
        if op.kernel is None or later.kernel is None:
            return op.kernel is later.kernel
        kernel, other = self._recording.kernels[op.kernel], self._recording.kernels[later.kernel]
        if (kernel.check is None, kernel.within is None) != (other.check is None, other.within is None):
            return False
        return replace(kernel, check=None, within=None) == replace(other, check=None, within=None)

    def _is_new_pair(self, op: Op, tensor: TensorRef, later: TensorRef) -> bool:
        """Return whether two tensors of one layout are not paired yet, and are alike by content or by what they are."""
        if tensor.shape != later.shape or tensor.stride != later.stride:
            return False
        if tensor.offset != later.offset or tensor.dtype != later.dtype:
            return False
        if not self._tensors.have(tensor.id, later.id) or not self._storages.have(tensor.storage, later.storage):
            return False
        return tensor.id == later.id or self._is_like(op, tensor, later)

    def _is_like(self, op: Op, tensor: TensorRef, later: TensorRef) -> bool:
        recording = self._recording
        made = recording.producers.get(later.id)
        if made is not None:
            # The first layer alone reads what was made before the layers as others read the layer before them.
            return made >= (self._start if op.index < self._second else self._second)
        if tensor.id in recording.producers:
            return False
        if not recording.input_ids.isdisjoint((tensor.id, later.id)):
            return False
        if (tensor.id in recording.parameter_names) != (later.id in recording.parameter_names):
            return False
        if recording.scalars.get(tensor.id) != recording.scalars.get(later.id):
            return False
        left, right = recording.constants.get(tensor.id), recording.constants.get(later.id)
        return left is right or (not _is_on_meta(left) and same_content(left, right))


def _are_like_calls(op: Op, later: Op) -> bool:
    """Return whether operations with one number read and return as many tensors, with the same named arguments."""
    if op.kind != later.kind or len(op.outputs) != len(later.outputs) or len(op.inputs) != len(later.inputs):
        return False
    if not op.kwargs and not later.kwargs:
        return True
    left, right = (without_tensors(tuple(named.kwargs.items())) for named in (op, later))
    return bool(left == right)


def _is_on_meta(content: Tensor | None) -> bool:
    return content is not None and content.is_meta


def _same_sight(left: Sight, right: Sight) -> bool:
    """Return whether the same is noted about the weights of two operations."""
    if left is right:
        return True
    if left.pairs.keys() != right.pairs.keys():
        return False
    if left.blind is not right.blind and not same_content(left.blind, right.blind):
        return False
    return all(torch.equal(seen, right.pairs[key]) for key, seen in left.pairs.items())


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


def _with_parents(path: str) -> tuple[str, ...]:
    """Return the path of a module with the paths of the modules around it: `blocks`, `blocks.0`, `blocks.0.attn`."""
    return tuple(accumulate(path.split("."), "{}.{}".format))


# -- stacks of equal layers -------------------------------------------------------------------------------------------


def _stacks(recording: Recording) -> list[Stack]:
    """Return the stacks of equal layers that have more layers than stay, without overlaps, in order."""
    numbers = _numbers(recording)
    stacks: list[Stack] = []
    for period in _periods(numbers):
        for first, last in _repeats(np.array(numbers), period):
            if not any(stack.start <= first and last + period <= stack.stop for stack in stacks):
                stacks += _checked(recording, period, range(first, last))
    chosen: list[Stack] = []
    for stack in sorted(stacks, key=lambda stack: (-len(stack.removed), stack.period)):
        if all(stack.stop <= other.start or other.stop <= stack.start for other in chosen):
            chosen.append(stack)
    return sorted(chosen, key=lambda stack: stack.start)


def _periods(numbers: Sequence[int]) -> list[int]:
    """Return the most common distances between equal numbers, the most common first; rare numbers weigh more.

    >>> _periods([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 8])
    [3]
    """
    counts = Counter(numbers)
    distances: Counter[int] = Counter()
    last: dict[int, int] = {}
    for place, number in enumerate(numbers):
        if number in last:
            # A loop in a layer repeats its operations more often than the layers do.
            distances[place - last[number]] += len(numbers) // counts[number]
        last[number] = place
    return [period for period, _ in distances.most_common(_CANDIDATES)]


def _repeats(numbers: np.ndarray[Any, Any], period: int) -> Iterator[tuple[int, int]]:
    """Yield where a sequence is followed by itself after `period`, long enough for layers to be left out.

    >>> [*_repeats(np.array([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 8]), 3)]
    [(1, 10)]
    """
    last = len(numbers) - period
    differs = np.flatnonzero(numbers[:last] != numbers[period:])
    bounds = np.concatenate(([-1], differs, [last]))
    long_parts = np.flatnonzero(np.diff(bounds) > (_KEPT - 1) * period)
    for part in long_parts.tolist():
        before, after = bounds[part : part + 2].tolist()
        yield before + 1, after


def _checked(recording: Recording, period: int, indices: range) -> Iterator[Stack]:
    """Yield the stacks in a part of a recording whose operations may be equal to those `period` later."""
    ops, start = recording.ops, indices.start
    following = _NextLayer(recording, start, period)
    for index in (*indices, indices.stop):
        if index in indices and following.has(ops[index], ops[index + period]):
            continue
        stack = Stack(start, period, index + period)
        if stack.left_out:
            yield stack
        start = index + 1
        following = _NextLayer(recording, start, period)


# -- a shorter recording ----------------------------------------------------------------------------------------------


def shortened_of(recording: Recording) -> Shortened | None:
    """Return a recording without the layers that are equal to others; None if no stack has more than three of them."""
    stacks = tuple(_stacks(recording))
    if not stacks:
        return None
    try:
        return _Cut(recording, stacks).shortened()
    except UnlikeError:
        return None


class _Cut:
    """Leaves layers out: what read the last of those left out reads the layer before them."""

    def __init__(self, whole: Recording, stacks: tuple[Stack, ...]) -> None:
        self._whole, self._stacks = whole, stacks
        self._instead: dict[int, TensorRef] = {}
        """Id of a tensor that was left out to the one that is read instead."""
        self._storages: dict[int, int] = {}
        """The same for the numbers of storages."""

    def shortened(self) -> Shortened:
        """Return the shortened recording. Raises `UnlikeError` if something after a stack reads one of its middle."""
        whole = self._whole
        removed = set[int]()
        for stack in self._stacks:
            removed.update(stack.removed)
            self._join(stack)
        kept = [index for index in range(len(whole.ops)) if index not in removed]
        places = {index: place for place, index in enumerate(kept)}
        ops = tuple([self._op(whole.ops[index], place) for index, place in places.items()])
        recording = replace(
            whole,
            ops=ops,
            producers={number: places[index] for number, index in whole.producers.items() if index in places},
            parameters=_used(whole.parameters, ops),
            buffers=_used(whole.buffers, ops),
            outputs=tuple([replace(named, tensor=self._returned(named.tensor)) for named in whole.outputs]),
            joins={},
        )
        return Shortened(whole, recording, self._stacks, kept, places, self._restored(kept))

    def _returned(self, tensor: TensorRef) -> TensorRef:
        """Return what stays for a tensor that is returned: that of the second layer for one that was left out.

        Raises `UnlikeError` if it is no result of an operation as it is.
        """
        made = self._whole.producers.get(tensor.id)
        for stack in self._stacks:
            if made is not None and made in stack.removed:
                op = self._whole.ops[made]
                stays = self._whole.ops[stack.start + stack.period + (made - stack.start) % stack.period]
                return _same_output(tensor, op, stays)
        return tensor

    def _join(self, stack: Stack) -> None:
        """Let the last layer read the layer that stays before it."""
        ops = self._whole.ops
        for index in range(stack.removed.stop, stack.stop):
            like = ops[index - len(stack.removed)]
            for tensor, instead in zip(_tensors_of(ops[index]), _tensors_of(like), strict=True):
                if self._is_removed(tensor):
                    self._instead[tensor.id] = instead
                    self._storages[tensor.storage] = instead.storage

    def _is_removed(self, tensor: TensorRef) -> bool:
        """Return whether an operation that is left out made a tensor."""
        made = self._whole.producers.get(tensor.id)
        return made is not None and any(made in stack.removed for stack in self._stacks)

    def _op(self, op: Op, index: int) -> Op:
        """Return an operation at another index, with the tensors that stay."""
        if op.index == index:
            return op
        tensors = [self._tensor(tensor) for tensor in _tensors_of(op)]
        if all(map(is_, tensors, _tensors_of(op))):
            return replace(op, index=index)
        inputs = tuple(tensors[: len(op.inputs)])
        args = inputs if op.args is op.inputs else self._argument(op.args)
        kwargs = {name: self._argument(value) for name, value in op.kwargs.items()}
        outputs = tuple(tensors[len(op.inputs) :])
        return replace(op, index=index, args=args, kwargs=kwargs, inputs=inputs, outputs=outputs)

    def _argument(self, value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(self._argument, value))
        return self._tensor(value) if type(value) is TensorRef else value

    def _tensor(self, tensor: TensorRef) -> TensorRef:
        instead = self._instead.get(tensor.id)
        if instead is not None:
            return instead
        if self._is_removed(tensor):
            raise UnlikeError
        storage = self._storages.get(tensor.storage, tensor.storage)
        return tensor if storage == tensor.storage else replace(tensor, storage=storage)

    def _restored(self, kept: Iterable[int]) -> dict[int, TensorRef]:
        """Return the tensors that are read outside of all stacks, by the ids of those that stand for them."""
        read: dict[int, TensorRef] = {}
        for index in kept:
            if any(stack.start <= index < stack.stop for stack in self._stacks):
                continue
            for tensor in self._whole.ops[index].inputs:
                short = self._instead.get(tensor.id, tensor)
                if read.setdefault(short.id, tensor).id != tensor.id:
                    raise UnlikeError
        return {number: tensor for number, tensor in read.items() if tensor.id != number}


def _same_output(tensor: TensorRef, op: Op, like: Op) -> TensorRef:
    """Return the output of an equal operation in the place of an output of `op`. Raises `UnlikeError` if it is none."""
    for output, other in zip(op.outputs, like.outputs, strict=True):
        if output.id == tensor.id:
            return other
    raise UnlikeError


def _used(every: tuple[Named, ...], ops: Sequence[Op]) -> tuple[Named, ...]:
    """Return the parameters or buffers that operations read, or of which they read a view."""
    storages = set[int]()
    for op in ops:
        storages.update(tensor.storage for tensor in op.inputs)
    return tuple(named for named in every if named.tensor.storage in storages)


@dataclass(frozen=True, eq=False)
class Shortened:
    """A recording without the layers that are equal to others, and where what stays was in the whole one."""

    whole: Recording
    recording: Recording
    """The recording with three layers of each stack."""
    stacks: tuple[Stack, ...]
    """The stacks of equal layers in `whole`, in order."""
    kept: Sequence[int]
    """The index in the whole recording of each operation that stays."""
    places: Mapping[int, int]
    """The reverse of `kept`."""
    restored: Mapping[int, TensorRef]
    """Id of a tensor to the one that it stands for outside of all stacks."""

    def layers_with(self, anchors: Iterable[int]) -> list[Layer]:
        """Return the layers in which these operations of the short recording are found again, the first one first.

        Raises `UnlikeError` if the operations belong to several layers.
        """
        places = {self._place(self.kept[anchor]) for anchor in anchors}
        if len(places) != 1:
            raise UnlikeError
        ((stack, later),) = places
        return [Layer(self, stack, number) for number in later]

    def _place(self, index: int) -> tuple[Stack | None, range]:
        for stack in self.stacks:
            if stack.start <= index < stack.stop:
                return stack, stack.layers_at(index)
        return None, range(1)

    def _ops_of(self, stack: Stack) -> Sequence[Op]:
        """Return the operations of the layers that stay of a stack."""
        start = self.places[stack.start]
        return self.recording.ops[start : start + stack.kept]

    @cached_property
    def mentions(self) -> dict[Stack, dict[int | str, tuple[int, int]]]:
        """By stack, the id of each tensor and the path of each module to its first operation, and its place there."""
        mentions: dict[Stack, dict[int | str, tuple[int, int]]] = {}
        for stack in self.stacks:
            first: dict[int | str, tuple[int, int]] = {}
            for op in self._ops_of(stack):
                for place, tensor in enumerate(_tensors_of(op)):
                    first.setdefault(tensor.id, (op.index, place))
                for depth, path in enumerate(_with_parents(op.module)):
                    first.setdefault(path, (op.index, depth))
            mentions[stack] = first
        return mentions

    @cached_property
    def tables(self) -> dict[Stack, Collection[TensorRef]]:
        """By stack, the integers and booleans whose numbers were kept."""
        tables: dict[Stack, Collection[TensorRef]] = {}
        for stack in self.stacks:
            of_stack: dict[int, TensorRef] = {}
            for op in self._ops_of(stack):
                for tensor in _tensors_of(op):
                    if tensor.id in self.whole.values and tensor.dtype.startswith(("int", "uint", "bool")):
                        of_stack[tensor.id] = tensor
            tables[stack] = of_stack.values()
        return tables

    @cached_property
    def parameters(self) -> dict[str, TensorRef]:
        """The parameters by name."""
        return {named.name: named.tensor for named in self.recording.parameters}


@dataclass(frozen=True, eq=False)
class Layer:
    """What operations of a shortened recording are in the whole one, so many layers later in their stack."""

    shortened: Shortened
    stack: Stack | None
    """None for operations outside of all stacks."""
    later: int

    def op(self, op: Op) -> Op:
        """Return the operation of the whole recording."""
        return self._op_at(op.index)

    def _op_at(self, place: int) -> Op:
        whole, stack, index = self.shortened.whole, self.stack, self.shortened.kept[place]
        if stack is None or not stack.start <= index < stack.stop:
            return whole.ops[index]
        since = place - self.shortened.places[stack.start]
        return whole.ops[stack.start + since + self.later * stack.period]

    @property
    def _mentions(self) -> Mapping[int | str, tuple[int, int]]:
        return {} if self.stack is None else self.shortened.mentions[self.stack]

    def tensor(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor of the whole recording. Raises `UnlikeError` for a tensor that is only put together."""
        if tensor.id < 0:
            raise UnlikeError
        mention = self._mentions.get(tensor.id)
        if mention is None:
            return self.shortened.restored.get(tensor.id, tensor)
        index, place = mention
        return _tensors_of(self._op_at(index))[place]

    def module(self, path: str) -> str:
        """Return the path of the module in the whole recording."""
        mention = self._mentions.get(path)
        if mention is None:
            return path
        index, depth = mention
        found = _with_parents(self._op_at(index).module)[depth]
        return path if found == path else found

    def parameter(self, name: str) -> Named:
        """Return the parameter of the whole recording. Raises `UnlikeError` if no operation of the layers reads it."""
        tensor = self.shortened.parameters[name]
        if self.stack is not None and tensor.id not in self._mentions:
            raise UnlikeError
        tensor = self.tensor(tensor)
        return Named(self.shortened.whole.parameter_names[tensor.id], tensor)

    def has_same(self, tensors: Iterable[TensorRef], *contents: Mapping[int, Tensor]) -> bool:
        """Return whether tensors of the short recording have the same content here, as far as it is known."""
        for tensor in tensors:
            like = self.tensor(tensor)
            for content in contents:
                left, right = content.get(tensor.id), content.get(like.id)
                if left is not right and not same_content(left, right):
                    return False
        return True

    def has_same_tables(self) -> bool:
        """Return whether the integers and booleans whose numbers were kept have the same numbers in this layer."""
        tables = () if self.stack is None else self.shortened.tables[self.stack]
        return self.has_same(tables, self.shortened.whole.values)

    def of(self, value: T) -> T:
        """Return plain data with its operations, its tensors, and the paths in fields `module` of this layer."""
        found: Any = self._of(value)
        return found  # type: ignore[no-any-return]  # of the type of what was given

    def _of(self, value: Any) -> Any:
        if isinstance(value, Op):
            return self.op(value)
        if isinstance(value, TensorRef):
            return self.tensor(value)
        if isinstance(value, Mapping):
            found = {key: self._of(item) for key, item in value.items()}
            return value if all(map(is_, found.values(), value.values())) else found
        if isinstance(value, tuple):
            items = [self._of(item) for item in value]
            if all(map(is_, items, value)):
                return value
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
