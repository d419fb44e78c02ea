"""Follow queries and keys from their projection to the scores: norms, and a cache that adds keys of earlier calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isclose, prod

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..graph.axis import setting
from ..graph.dataflow import Graph, made_of
from ..graph.rerun import Constants
from ..record.ops import Op, TensorRef
from ..reports.trace import Cache, QKNorm
from .axes import AxisNames

_REDUCED = {"mean": "rms", "sum": "l2", "linalg_vector_norm": "l2", "var": "layer", "var_mean": "layer"}
"""What a norm is that divides by such a statistic."""
_LARGEST = 1 << 24
"""Elements of memory that are compared one by one."""
_NORMS = {"native_layer_norm": "layer", "_fused_rms_norm": "rms"}


@dataclass(frozen=True)
class NormSteps:
    """The norm of queries or keys, and its operations."""

    norm: QKNorm
    span: range
    """The indices of its operations, and of those between."""


@dataclass(frozen=True)
class CacheSteps:
    """The cache behind keys or values, and the operations that fill and read it."""

    cache: Cache
    ops: frozenset[int]
    """The indices of the operations."""


class OperandPath:
    """The operations from the projection of queries, keys or values to their product, in order."""

    def __init__(
        self,
        graph: Graph,
        attention: Attention,
        side: str,
        *,
        from_first: bool = False,
    ) -> None:
        """Take one side; with `from_first` from the first of several successive projections."""
        self.graph = graph
        self.side = side
        if side == "value":
            product = attention.value_product
            is_left = attention.value_first
        else:
            product = attention.score_product
            is_left = attention.key_first == (side == "key")
        self.target = product.left if is_left else product.right
        self.projection = attention.projections.get(side)
        if from_first:
            self.projection = attention.first_projection(side)
        self.forward = _Forward.around(graph, attention, self.projection)
        """The call that these queries, keys or values are projected and used in."""
        self.own_projections = frozenset(op.index for op in _projections(attention))
        """Indices of the projections that this attention shows."""
        self.ops: list[Op] = []
        self.reached: set[int] = set()
        """Ids of the tensors on the way."""
        self.read: set[int] = set()
        """Ids of these, and of the tensors that their operations read for the product."""
        if self.projection is not None:
            self._follow(self.projection, product.multiply)

    def _follow(self, projection: Op, product: Op) -> None:
        """Find the operations between a projection and a product, and the tensors on the way."""
        recording = self.graph.recording
        later = recording.ops[projection.index + 1 : product.index + 1]
        dependent = made_of({projection.output.id}, later)

        def is_on_way(op: Op) -> bool:
            if op.index <= projection.index:
                return False
            return any(tensor.id in dependent for tensor in op.inputs)

        path: dict[int, Op] = {}
        for step in self.graph.back(self.target, is_on_way):
            self.read.add(step.tensor.id)
            if step.tensor.id not in dependent:
                continue
            self.reached.add(step.tensor.id)
            op = recording.producer(step.tensor)
            if op is not None and op.index > projection.index:
                path[op.index] = op
        self.ops = [path[index] for index in sorted(path)]

    def others(self, op: Op) -> list[TensorRef]:
        """Return what an operation reads besides the tensors on the way."""
        return [tensor for tensor in op.inputs if tensor.id not in self.reached]


@dataclass(frozen=True)
class _Forward:
    """One call of the module that projects and uses keys; of a script, what ran since the attention before."""

    numbers: tuple[int, ...]
    """`Op.forwards` of the operations directly in the call; empty in a script that calls no module around both."""
    start: int
    """In a script: index of the last softmax before the projection; -1 if there is none."""

    @classmethod
    def around(cls, graph: Graph, attention: Attention, projection: Op | None) -> _Forward:
        """Return the innermost call that has both the projection and the softmax of an attention."""
        if projection is None:
            return cls((), -1)
        numbers: list[int] = []
        for number, of_softmax in zip(projection.forwards, attention.softmax.forwards, strict=False):
            if number != of_softmax:
                break
            numbers.append(number)
        if numbers:
            return cls(tuple(numbers), -1)
        start = -1
        for op in graph.recording.ops[: projection.index]:
            if op.does("softmax"):
                start = op.index
        return cls((), start)

    def has(self, op: Op) -> bool:
        """Return whether an operation ran in this call."""
        if not self.numbers:
            return op.index > self.start
        return op.forwards[: len(self.numbers)] == self.numbers

    def is_earlier_turn(self, op: Op, projection: Op) -> bool:
        """Return whether an operation is `projection` in an earlier call of the same module, or ran before any."""
        if self.has(op):
            return False
        if not self.numbers or op.forwards[:1] != self.numbers[:1]:
            return True
        # What the caller projects by itself, with a matrix of this module, is of the same forward.
        if op.module != projection.module:
            return False
        return len(op.forwards) == len(projection.forwards)


def _projections(attention: Attention) -> list[Op]:
    """Return all projections of an attention, with those before the last of each side."""
    projections = list(attention.projections.values())
    for earlier in attention.earlier.values():
        projections += earlier
    return projections


# -- norms ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scaling:
    """The operations that divide features by a statistic of them, before any gain."""

    kind: str
    size: int
    """The number of features that the statistic is over."""
    start: int
    """The index of the first operation."""


def norm_of(path: OperandPath, names: AxisNames) -> NormSteps | None:
    """Return the norm between a projection and the scores; None without one."""
    for op in path.ops:
        scaling = _fused_norm(op) or _norm_in_steps(path, op)
        if scaling is not None:
            return _with_gain(path, op, scaling, names)
    return None


def _with_gain(
    path: OperandPath,
    op: Op,
    scaling: _Scaling,
    names: AxisNames,
) -> NormSteps:
    """Return a norm with the gain that is multiplied after it: `x / |x| · √size` is an RMS norm."""
    heads = names.num_heads if path.side == "query" else names.num_kv_heads
    width = heads * names.head_dim
    is_over_all = heads > 1 and scaling.size == width
    kind, end = scaling.kind, op
    for later in path.ops:
        if later.index <= op.index:
            continue
        if end.output in later.inputs and _is_gain(path, later):
            end = later
        is_near = later.index < op.index + 4
        if kind == "l2" and is_near and _scales_by(path, later, scaling.size**0.5):
            kind, end = "rms", later
    norm = QKNorm(kind, "all" if is_over_all else "head")  # type: ignore[arg-type]  # a word of the tables
    return NormSteps(norm, range(scaling.start, end.index + 1))


def _is_gain(path: OperandPath, op: Op) -> bool:
    """Return whether an operation multiplies by a parameter, or is the cast before it."""
    if op.base_name == "_to_copy":
        return True
    return op.does("scales") and any(map(path.graph.is_weight, op.inputs))


def _scales_by(path: OperandPath, op: Op, number: float) -> bool:
    """Return whether an operation multiplies by about this number."""
    scale = path.graph.scale_of(op)
    return scale is not None and isclose(scale, number, rel_tol=1e-4)


def _fused_norm(op: Op) -> _Scaling | None:
    """Return the norm that is one operation; None for another operation."""
    kind = _NORMS.get(op.base_name)
    if kind is None or not op.args[1]:
        return None
    size = prod(op.args[1])
    return _Scaling(kind, size, op.index)


def _norm_in_steps(path: OperandPath, op: Op) -> _Scaling | None:
    """Return the norm that scales a tensor by a statistic of its own features; None for another operation."""
    if not op.does("scales") or len(op.inputs) != 2 or path.others(op):
        return None
    left, right = op.inputs
    of_left, of_right = _statistic(path, left), _statistic(path, right)
    if of_left is None and of_right is not None:
        whole, statistic = left, of_right
    elif of_left is not None and of_right is None:
        whole, statistic = right, of_left
    else:
        return None
    elements = statistic.inputs[0].numel
    size = elements // max(statistic.output.numel, 1)
    start = statistic.index - 1
    mean = _subtracted_mean(path, whole)
    if mean is not None:
        return _Scaling("layer", size, min(mean.index, start))
    return _Scaling(_REDUCED[statistic.base_name], size, start)


def _subtracted_mean(path: OperandPath, tensor: TensorRef) -> Op | None:
    """Return the mean that was subtracted to get a tensor; None if none was."""
    op = path.graph.recording.producer(tensor)
    if op is None or op.base_name != "sub":
        return None
    return _statistic(path, op.inputs[-1])


def _statistic(path: OperandPath, tensor: TensorRef) -> Op | None:
    """Return the reduction of features that a tensor is computed from, element by element; None without one."""
    op = path.graph.recording.producer(tensor)
    while op is not None and tensor.id in path.reached:
        if op.base_name in _REDUCED:
            rows = op.inputs[0].shape[:-1]
            is_over_features = op.output.shape in (rows, (*rows, 1))
            return op if is_over_features else None
        is_elementwise = op.pointwise and len(op.inputs) == 1
        if not is_elementwise and not path.graph.moves(op):
            return None
        tensor = op.inputs[0]
        op = path.graph.recording.producer(tensor)
    return None


# -- caches -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Written:
    """The keys that one operation writes into a cache."""

    count: int
    first: int | None
    """The slot of the first one; None if it is unknown."""


def cache_of(
    path: OperandPath,
    constants: Constants,
    names: AxisNames,
    who_sees: Callable[[], Tensor | None],
) -> CacheSteps | None:
    """Return the cache behind keys or values, and the operations that fill it; None without one.

    A cache was there before the call: keys of other tokens that the same call projects, e.g. of global tokens beside
    local ones, are none.

    Args:
        path: the operations of that side.
        constants: values of indices.
        names: the axes.
        who_sees: returns `query key`, which query sees which key; None if unknown.
    """
    write: Op | None = None
    for op in path.ops:
        if op.base_name == "cat" and write is None:
            joined = _concatenated(path, op, names.lengths[1])
            if joined is not None:
                return joined
        elif fills_memory(path, op):
            write = op
    if write is None:
        return None
    return _in_memory(path, constants, write, names, who_sees)


def fills_memory(path: OperandPath, op: Op) -> bool:
    """Return whether an operation writes keys into memory that was there before."""
    if op.kind != "write" or not op.inputs:
        return False
    memory = op.inputs[0]
    return memory.id not in path.reached


def _in_memory(
    path: OperandPath,
    constants: Constants,
    write: Op,
    names: AxisNames,
    who_sees: Callable[[], Tensor | None],
) -> CacheSteps | None:
    """Return the cache in memory that new keys are written into; None if it has no earlier keys."""
    queries, keys = names.lengths
    gathers: list[Op] = []
    for op in path.ops:
        if op.index > write.index and _is_paged(path, op, keys):
            gathers.append(op)
    written = _written_keys(path, constants, write, queries)
    end = _end_of_keys(who_sees(), keys, written, is_paged=bool(gathers))
    past = end - written.count
    if past < 0 or (past == 0 and end == keys):
        return None
    if past and not _was_there(path, write):
        return None
    cache = Cache(
        past=past,
        new=written.count,
        empty=keys - end,
        way="paged" if gathers else "in place",
    )
    return CacheSteps(cache, frozenset(op.index for op in (write, *gathers)))


def _concatenated(path: OperandPath, op: Op, keys: int) -> CacheSteps | None:
    """Return the cache that new keys are appended to by `cat([past, new])`; None if no earlier keys are joined."""
    place = setting(op, 1, "dim", 0)
    earlier: list[TensorRef] = []
    new = 0
    for tensor in op.inputs:
        if tensor.id in path.reached:
            new += tensor.shape[place]
        elif tensor.numel and tensor.id in path.read:
            earlier.append(tensor)
    past = sum(tensor.shape[place] for tensor in earlier)
    has_all_keys = past > 0 and past + new >= keys
    if has_all_keys and 0 < new < keys and all(_is_earlier(path, tensor) for tensor in earlier):
        cached = keys - new
    else:
        cached = _cache_beside(path, earlier, place)
        if not cached or past + new != keys:
            return None
    cache = Cache(past=cached, new=keys - cached, empty=0, way="concatenated")
    return CacheSteps(cache, frozenset({op.index}))


def _cache_beside(path: OperandPath, tensors: list[TensorRef], place: int) -> int:
    """Return the number of keys that came in, where further keys of this call are joined too; 0 without such keys.

    Example: `cat([past, of_global_tokens, new])`, where the keys of global tokens are projected in each call.
    """
    count = 0
    further: list[TensorRef] = []
    for tensor in tensors:
        if path.graph.before_moves(tensor).id in path.graph.recording.input_ids:
            count += tensor.shape[place]
        else:
            further.append(tensor)
    is_of_call = all(tensor.id in path.graph.learned for tensor in further)
    return count if further and is_of_call else 0


def _end_of_keys(
    seen: Tensor | None,
    keys: int,
    written: _Written,
    *,
    is_paged: bool,
) -> int:
    """Return the number of slots with content: those up to the last new key, or up to the last key that is seen."""
    if seen is None:
        if written.first is None or is_paged:
            return keys
        return min(written.first + written.count, keys)
    is_seen = seen.any(0).tolist()
    end = keys
    if len(is_seen) != keys:
        return end
    least = (written.first or 0) + written.count
    while end > least and not is_seen[end - 1]:
        end -= 1
    return end


def _is_earlier(path: OperandPath, tensor: TensorRef) -> bool:
    """Return whether a tensor came in, or was projected by the same weight in an earlier call.

    The tokens that the new keys are projected from came in too, and are not earlier.
    """
    graph, projection = path.graph, path.projection
    assert projection is not None
    weights = _weights_of(graph, projection)
    tokens = _tokens(path, projection)
    came_in = is_projected = False
    for step in graph.back(tensor, lambda op: not graph.is_projection(op)):
        op = graph.recording.producer(step.tensor)
        if op is None:
            is_parameter = step.tensor.id in graph.recording.parameter_names
            if is_parameter and len(step.tensor.shape) > 1:
                return False
            if not is_parameter and step.tensor.id not in tokens:
                came_in = True
        elif graph.is_projection(op):
            if any(read.storage in weights for read in op.inputs):
                return path.forward.is_earlier_turn(op, projection)
            is_projected = True  # keys and values may be in one tensor
    return came_in and not is_projected


def _weights_of(graph: Graph, projection: Op) -> set[int]:
    """Return the storages of the parameters that a projection reads."""
    return {tensor.storage for tensor in projection.inputs if graph.is_weight(tensor)}


def _tokens(path: OperandPath, projection: Op) -> set[int]:
    """Return the ids of the tensors that a projection reads, before any norm or embedding, without products."""
    start = path.graph.projected(projection)
    steps = path.graph.back(start, lambda op: not op.does("product", "convolution"))
    return {step.tensor.id for step in steps}


def _was_there(path: OperandPath, write: Op) -> bool:
    """Return whether the memory that new keys are written into was there before this call, with other keys.

    It was not if this call made it, or wrote the keys of other tokens into it too.
    """
    graph, storage = path.graph, write.output.storage
    for op in graph.recording.ops[: write.index]:
        if not path.forward.has(op) or not _makes_memory(op, storage):
            continue
        # A copy of keys of an earlier call has them too.
        if not any(_is_earlier(path, tensor) for tensor in op.inputs):
            return False
    read = _read_after(path, write)
    last = max(path.ops[-1].index, write.index)
    for op in graph.recording.ops[:last]:
        if op.kind != "write" or op.index == write.index:
            continue
        if op.output.storage != storage or not path.forward.has(op):
            continue
        if _overlap(op.output, read) and _writes_other_keys(path, op):
            return False
    return True


def _makes_memory(op: Op, storage: int) -> bool:
    """Return whether an operation makes a tensor in this memory."""
    if op.kind not in ("compute", "copy"):
        return False
    return any(output.storage == storage for output in op.outputs)


def _read_after(path: OperandPath, write: Op) -> TensorRef:
    """Return the smallest part of the written memory that is read for the product."""
    smallest: TensorRef | None = None
    for op in path.ops:
        if op.index <= write.index:
            continue
        for tensor in op.inputs:
            if tensor.storage != write.output.storage or not tensor.numel:
                continue
            if smallest is None or tensor.numel < smallest.numel:
                smallest = tensor
    return write.output if smallest is None else smallest


def _overlap(first: TensorRef, second: TensorRef) -> bool:
    """Return whether two tensors of one storage have an element in common; also if that takes too long to find out."""
    start = min(first.offset, second.offset)
    end_of_first, end_of_second = last_place(first), last_place(second)
    size = max(end_of_first, end_of_second) - start + 1
    are_apart = first.offset > end_of_second or second.offset > end_of_first
    if are_apart or size > _LARGEST:
        return not are_apart
    # E.g. the keys of two layers, side by side for each token.
    both = _elements(first, start, size) & _elements(second, start, size)
    return bool(both.any())


def last_place(tensor: TensorRef) -> int:
    """Return the place of the last element of a tensor in its storage."""
    place = tensor.offset
    for size, step in zip(tensor.shape, tensor.stride, strict=True):
        place += (size - 1) * step
    return place


def _elements(tensor: TensorRef, start: int, size: int) -> Tensor:
    """Return the places of a tensor in its storage, from `start`: True for its elements."""
    places = torch.zeros(size, dtype=torch.bool)
    elements = places.as_strided(tensor.shape, tensor.stride, tensor.offset - start)
    elements.fill_(True)
    return places


def _writes_other_keys(path: OperandPath, op: Op) -> bool:
    """Return whether an operation writes what this call projected, other than by the projections of the attention."""
    for value in op.inputs[1:]:
        for projection in _projections_behind(path.graph, value):
            if projection.index not in path.own_projections and path.forward.has(projection):
                return True
    return False


def _projections_behind(graph: Graph, tensor: TensorRef) -> Iterator[Op]:
    """Yield the nearest projections that a tensor comes from."""
    for step in graph.back(tensor, lambda op: not graph.is_projection(op)):
        op = graph.recording.producer(step.tensor)
        if op is not None and graph.is_projection(op):
            yield op


def _is_paged(path: OperandPath, op: Op, keys: int) -> bool:
    """Return whether an operation gathers keys by their slots, rather than rows of a batch in another order."""
    if not op.does("gathers"):
        return False
    for tensor in path.others(op):
        is_for_keys = len(tensor.shape) > 1 or tensor.numel == keys
        if tensor.dtype.startswith("int") and is_for_keys:
            return True
    return False


def _written_keys(
    path: OperandPath,
    constants: Constants,
    op: Op,
    queries: int,
) -> _Written:
    """Return the keys that an operation writes into a cache: as many as queries, if nothing else is known."""
    name = op.base_name.rstrip("_")
    if name == "index_copy":
        return _written_by_index(constants, (op.args[2],), queries)
    if name == "index_put":
        indices = op.args[1]
        return _written_by_index(constants, indices if isinstance(indices, tuple) else (indices,), queries)
    return _written_by_slice(path, op, queries)


def _written_by_index(
    constants: Constants,
    indices: tuple[TensorRef | None, ...],
    queries: int,
) -> _Written:
    """Return the keys that are written into the slots of an index, which may be neighbours."""
    present = [index for index in indices if index is not None]
    if len(present) != 1 or len(present[0].shape) != 1:
        return _Written(queries, None)
    index = present[0]
    numbers = constants.numbers(index)
    if not numbers:
        return _Written(index.numel, None)
    first = min(numbers)
    are_neighbours = max(numbers) - first == len(numbers) - 1
    return _Written(index.numel, first if are_neighbours else None)


def _written_by_slice(path: OperandPath, op: Op, queries: int) -> _Written:
    """Return the keys that are written into a slice of memory, as by `cache[:, 4:6] = keys`."""
    cut = path.graph.recording.producer(op.inputs[0])
    while cut is not None and cut.kind == "view" and cut.inputs:
        source = cut.inputs[0]
        if cut.base_name in ("slice", "select"):
            place = int(cut.args[1]) if len(cut.args) > 1 else 0
            new = cut.output.shape[place] if cut.base_name == "slice" else 1
            step = source.stride[place]
            if step and new == queries < source.shape[place]:
                distance = cut.output.offset - source.offset
                return _Written(queries, distance // step)
        cut = path.graph.recording.producer(source)
    return _Written(queries, None)
