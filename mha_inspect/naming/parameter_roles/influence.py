"""Which elements of which parameters have a part in a tensor of a recording.

The operations from the parameters to that tensor are run once more, with gradients: an element of a parameter has a
part in a head where the gradient of that head is not zero. This holds for whatever is done on the way: packed and
interleaved projections, transposed weights, einsum, rotary positions, norms, repeated key/value heads.

No number of the recording is needed for that, so others are taken, in which no gradient is zero by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ...graph.attention import Graph
from ...graph.evaluate import CannotReplayError, run_again
from ...record.catalog import named
from ...record.ops import Op, Recording, TensorRef

_LONGEST = 400
"""Operations after which it gives up: no projection takes so many."""
_STATISTICS = named("norms") - {"native_layer_norm", "_fused_rms_norm", "pow"} | {"amax", "var", "std"}
"""What a norm divides by hangs on all heads: it counts as a number that is given."""
_DROPOUTS = {"native_dropout", "bernoulli", "bernoulli_"}


@dataclass(frozen=True)
class Touch:
    """The elements of a parameter that have a part in something."""

    places: tuple[tuple[int, ...], ...]
    """For each dimension, the indices of those elements."""
    is_box: bool
    """Whether they are all the elements at those indices."""

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Touch | None:
        """The elements of a gradient that are not zero; None where all are."""
        touched = gradient != 0
        count = int(touched.sum())
        if not count:
            return None
        dims = range(touched.dim())
        places = tuple(_indices(touched.any(dim=[d for d in dims if d != dim])) for dim in dims)
        size = 1
        for place in places:
            size *= len(place)
        return cls(places, size == count)


def _indices(touched: torch.Tensor) -> tuple[int, ...]:
    return tuple(touched.reshape(-1).nonzero().flatten().tolist())


@dataclass
class Path:
    """The operations from some tensors that are taken as given, and from parameters, to a tensor."""

    graph: Graph
    sources: tuple[TensorRef, ...]
    target: TensorRef
    ops: list[Op] = field(default_factory=list)
    parameters: dict[str, TensorRef] = field(default_factory=dict)
    """Name to the tensor by which the recording knows it, in the order in which they are met."""

    def __post_init__(self) -> None:
        recording = self.graph.recording
        names = recording.parameter_storages
        own = {tensor.id for tensor in self.sources}
        made = [recording.producers.get(tensor.id, -1) for tensor in self.sources]
        start = min(made, default=-1)
        found: dict[int, Op] = {}
        queue, seen = [self.target], {*own}
        while queue:
            tensor = queue.pop()
            if tensor.id in seen:
                continue
            seen.add(tensor.id)
            op = recording.producer(tensor)
            if op is None and tensor.storage in names:
                named = names[tensor.storage]
                self.parameters.setdefault(named.name, named.tensor)
            if op is None or (op.index <= start and not self.graph.is_weight(tensor)):
                continue
            found[op.index] = op
            if len(found) > _LONGEST:
                raise CannotReplayError("it takes too long")
            queue += op.inputs
        self.ops = [found[index] for index in sorted(found)]
        order = [name for op in self.ops for name in parameters_behind(self.graph, op.inputs)]
        self.parameters = {name: self.parameters[name] for name in dict.fromkeys(order) if name in self.parameters}

    def signature(self) -> tuple[object, ...]:
        """What is the same for two paths that do the same to other tensors: the attentions of a model are alike."""
        numbers: dict[int, int] = {}

        def plain(value: object) -> object:
            if isinstance(value, TensorRef):
                number = numbers.setdefault(value.id, len(numbers))
                return (number, value.shape, value.stride, value.offset)
            return tuple(map(plain, value)) if isinstance(value, tuple) else value

        def all_of(op: Op) -> object:
            kwargs = tuple((name, plain(value)) for name, value in op.kwargs.items())
            return (op.name, plain(op.args), kwargs, tuple(map(plain, op.outputs)))

        ends = tuple(plain(tensor) for tensor in (*self.parameters.values(), *self.sources))
        return (ends, tuple(map(all_of, self.ops)), plain(self.target))


def parameters_behind(graph: Graph, tensors: Iterable[TensorRef]) -> list[str]:
    """The parameters that tensors are, moved, cast or scaled at most."""
    recording = graph.recording
    names = recording.parameter_storages
    found: list[str] = []
    queue, seen = list(tensors), set()
    while queue:
        tensor = queue.pop(0)
        op = recording.producer(tensor)
        if tensor.id in seen:
            continue
        seen.add(tensor.id)
        if op is None and tensor.storage in names:
            found.append(names[tensor.storage].name)
        elif op is not None and graph.is_weight(tensor):
            queue += op.inputs
    return list(dict.fromkeys(found))


class Influence:
    """One run of a path with gradients, which must be enabled."""

    def __init__(self, path: Path, given: Callable[[TensorRef], torch.Tensor]) -> None:
        """`given` makes the content of the sources. Raises `CannotReplayError` where the path cannot be run again."""
        self._recording: Recording = path.graph.recording
        self._by_storage: dict[int, tuple[TensorRef, torch.Tensor]] = {}
        self._known: dict[int, torch.Tensor] = {}
        self._memory: dict[int, torch.Tensor] = {}
        """Storage to its elements, for what is written piece by piece; nothing is written in place here."""
        self._written: set[int] = set()
        self.leaves: dict[str, torch.Tensor] = {}
        for name, tensor in path.parameters.items():
            value = self._recording.values[tensor.id]
            if value.is_meta or not value.is_floating_point():
                raise CannotReplayError("there are no numbers of which to take a gradient")
            self.leaves[name] = _any_numbers(value).requires_grad_()
            self._by_storage[tensor.storage] = (tensor, self.leaves[name])
        self._known |= {source.id: given(source) for source in path.sources}
        self._run(path)
        self.result = self._content(path.target)

    def of(self, part: torch.Tensor) -> dict[str, Touch]:
        """The elements of each parameter that have a part in a part of the result."""
        if not part.requires_grad:
            return {}
        names, leaves = list(self.leaves), list(self.leaves.values())
        gradients = torch.autograd.grad(part, leaves, _any_numbers(part), retain_graph=True, allow_unused=True)
        touches = {n: Touch.of(g) for n, g in zip(names, gradients, strict=True) if g is not None}
        return {name: touch for name, touch in touches.items() if touch is not None}

    def _run(self, path: Path) -> None:
        try:
            for op in path.ops:
                if not any(map(self._hangs_on_leaves, op.inputs)):
                    continue
                for tensor, made in self._made(op):
                    self._known[tensor.id] = made
                    if op.kind == "write":
                        self._remember(tensor, made, op.index)
        except CannotReplayError:
            raise
        except Exception as error:  # whatever an operation that is called from outside may raise
            raise CannotReplayError(str(error)) from None

    def _hangs_on_leaves(self, tensor: TensorRef) -> bool:
        return tensor.id in self._known or self._is_leaf(tensor) or self._was_written(tensor)

    def _was_written(self, tensor: TensorRef) -> bool:
        return self._recording.producers.get(tensor.id) in self._written

    def _remember(self, tensor: TensorRef, made: torch.Tensor, index: int) -> None:
        """Keep what was written, for those who read it together with what stands beside it."""
        size = max(map(_end, (t for t in self._recording.tensors() if t.storage == tensor.storage)))
        before = self._memory.get(tensor.storage)
        if before is None:
            before = torch.zeros(size, dtype=made.dtype, device=made.device)
        self._memory[tensor.storage] = before.index_put((_places(tensor, before),), made)
        self._written.add(index)

    def _is_leaf(self, tensor: TensorRef) -> bool:
        return tensor.storage in self._by_storage and tensor.id not in self._recording.producers

    def _made(self, op: Op) -> list[tuple[TensorRef, torch.Tensor]]:
        name = op.base_name
        if name in _STATISTICS:
            return []
        if name in _DROPOUTS:
            return [(op.output, self._content(op.inputs[0]))]
        if name in ("native_layer_norm", "_fused_rms_norm"):
            x, *learned = map(self._content, op.inputs)
            for place, tensor in enumerate(learned):
                x = x + tensor if place else x * tensor
            return [(op.output, x)]
        return run_again(op, self._content)

    def _content(self, tensor: TensorRef) -> torch.Tensor:
        if tensor.id in self._known:
            return self._known[tensor.id]
        if self._is_leaf(tensor):
            origin, leaf = self._by_storage[tensor.storage]
            if tensor.id == origin.id:
                return leaf
            if leaf.numel() != leaf.untyped_storage().nbytes() // leaf.element_size():
                raise CannotReplayError("a parameter is part of a larger one")
            return leaf.as_strided(tensor.shape, tensor.stride, tensor.offset - origin.offset)
        if self._was_written(tensor):
            memory = self._memory[tensor.storage]
            return memory[_places(tensor, memory)]
        if tensor.id not in self._recording.values:
            raise CannotReplayError("its content was not kept")
        kept: torch.Tensor = self._recording.values[tensor.id]
        return kept


def _any_numbers(like: torch.Tensor) -> torch.Tensor:
    """Numbers between a half and one and a half, none of which cancels another."""
    generator = torch.Generator("cpu").manual_seed(like.numel())
    numbers = torch.rand(like.shape, generator=generator) + 0.5
    # Strides are kept: views that the forward made are made again.
    return torch.empty_like(like, requires_grad=False).copy_(numbers)


def _end(tensor: TensorRef) -> int:
    """The first element of a storage behind those of a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))
    return tensor.offset + last + 1


def _places(tensor: TensorRef, memory: torch.Tensor) -> torch.Tensor:
    """Where in its storage each element of a tensor is."""
    every = torch.arange(memory.numel(), device=memory.device)
    return every.as_strided(tensor.shape, tensor.stride, tensor.offset)


def numbers_like(recording: Recording) -> Callable[[TensorRef], torch.Tensor]:
    """What makes the content of sources: numbers of the right shape, dtype and layout."""
    return lambda tensor: _any_numbers(recording.values[tensor.id])


def only_first_feature(recording: Recording) -> Callable[[TensorRef], torch.Tensor]:
    """The same, and zero but for the first element of the last dimension."""

    def made(tensor: TensorRef) -> torch.Tensor:
        numbers = _any_numbers(recording.values[tensor.id])
        numbers[..., 1:] = 0
        return numbers

    return made


def only(masks: Mapping[int, torch.Tensor], recording: Recording) -> Callable[[TensorRef], torch.Tensor]:
    """The same, and zero where the mask of a source is, or all of it where it has none."""

    def made(tensor: TensorRef) -> torch.Tensor:
        numbers = _any_numbers(recording.values[tensor.id])
        return numbers * masks[tensor.id] if tensor.id in masks else torch.zeros_like(numbers)

    return made
