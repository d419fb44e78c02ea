"""Follow queries and keys from their projection to the scores: norms, and a cache that adds keys of earlier calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isclose, prod
from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..graph.attention import Attention
from ..graph.dataflow import Graph, made_of
from ..graph.label import Axis, Label, Span
from ..graph.labels import Labels, shape_of
from ..record.ops import Op, TensorRef
from ..reports.trace import Cache, QKNorm
from .axes import AxisNames
from .pattern import dims_of

_REDUCED = {"mean": "rms", "sum": "l2", "linalg_vector_norm": "l2", "var": "layer", "var_mean": "layer"}
"""What a norm is that divides by such a statistic."""
Way = Literal["concatenated", "in place", "paged"]
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
        self.stage = f"{side[0]}_heads"
        self.heads = attention.stages[self.stage]
        self._call = _call_of(self.projection, attention.softmax)
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

    def is_of_call(self, op: Op) -> bool:
        """Return whether an operation ran in the call that these queries, keys or values are projected and used in."""
        return op.forwards[: len(self._call)] == self._call

    def others(self, op: Op) -> list[TensorRef]:
        """Return what an operation reads besides the tensors on the way."""
        return [tensor for tensor in op.inputs if tensor.id not in self.reached]


def _call_of(projection: Op | None, softmax: Op) -> tuple[int, ...]:
    """Return the innermost call that has both a projection and a softmax, as `Op.forwards` begins in it."""
    numbers: list[int] = []
    forwards = () if projection is None else projection.forwards
    for number, of_softmax in zip(forwards, softmax.forwards, strict=False):
        if number != of_softmax:
            break
        numbers.append(number)
    return tuple(numbers)


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


def cache_of(path: OperandPath, names: AxisNames, who_sees: Callable[[], Tensor | None]) -> CacheSteps | None:
    """Return the cache behind keys or values, and the operations that fill and read it; None without one.

    A cache was there before the call: keys of other tokens that the same call projects, e.g. of global tokens beside
    local ones, are none.

    Args:
        path: the operations of that side.
        names: the axes.
        who_sees: returns `query key`, which query sees which key; None if unknown.
    """
    dims = dims_of(names.of_stage(path.stage))
    joins: list[Op] = []
    earlier: list[TensorRef] = []
    for op in path.ops:
        joined = _joined_earlier(path, op)
        earlier += joined
        if joined or fills_memory(path, op):
            joins.append(op)
    is_written = any(op.kind == "write" for op in joins)
    if not joins or ["key"] not in dims or path.projection is None:
        return None
    _, keys = names.lengths
    gathers = [op for op in path.ops if is_written and _is_paged(path, op, keys)]
    seen = who_sees() if is_written else None
    marked = _marked_keys(path, earlier, dims.index(["key"]))
    new, end = _counted(*marked, names.lengths, seen, is_written=is_written, is_gathered=bool(gathers))
    if new > end or new == keys or (new < end and not earlier):
        return None
    cache = Cache(past=end - new, new=new, empty=keys - end, way=_way(joins, gathers))
    return CacheSteps(cache, frozenset(op.index for op in (*joins, *gathers)))


def _counted(
    is_new: npt.NDArray[np.bool_],
    is_earlier: npt.NDArray[np.bool_],
    lengths: tuple[int, int],
    seen: Tensor | None,
    *,
    is_written: bool,
    is_gathered: bool,
) -> tuple[int, int]:
    """Return how many keys are new, and at which the keys end, of which the memory may have more."""
    queries, end = lengths
    # Of an index that was not kept, or is of more than one dimension, no slot is known.
    are_slots_known = bool(is_new.any()) and not (is_written and bool(is_new.all()))
    if is_written and not is_gathered and (are_slots_known or seen is not None):
        last = int(is_new.nonzero()[0].max()) if are_slots_known else queries - 1
        end = _end_of_keys(seen, end, least=last + 1)
    new = int((is_new | ~is_earlier)[:end].sum()) if are_slots_known else queries
    return new, end


def _way(joins: list[Op], gathers: list[Op]) -> Way:
    """Return how new keys join earlier ones."""
    if gathers:
        return "paged"
    return "in place" if any(op.kind == "write" for op in joins) else "concatenated"


def _joined_earlier(path: OperandPath, op: Op) -> list[TensorRef]:
    """Return the tensors of earlier calls that an operation joins new keys with, before this call wrote into them."""
    if op.base_name != "cat" and not fills_memory(path, op):
        return []
    tensors: list[TensorRef] = []
    for tensor in path.others(op):
        before = path.graph.before(tensor, lambda earlier: earlier.kind in ("view", "write"))
        if tensor.id in path.read and tensor.numel and _is_earlier(path, before):
            tensors.append(before)
    return tensors


def fills_memory(path: OperandPath, op: Op) -> bool:
    """Return whether an operation writes keys into memory that was there before."""
    return op.kind == "write" and bool(op.inputs) and op.inputs[0].id not in path.reached


def _marked_keys(
    path: OperandPath,
    earlier: list[TensorRef],
    place: int,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which of the keys are projected in this call, and which are of earlier calls, or were there before.

    Args:
        path: the operations of that side.
        earlier: the tensors of earlier calls that they are joined with.
        place: the dimension of the keys.
    """
    graph = path.graph
    assert path.projection is not None
    marked = {Axis("new"): [path.projection.output], Axis("earlier"): earlier}
    given: list[tuple[TensorRef, Label]] = []
    for axis, tensors in marked.items():
        for tensor in tensors:
            shape = shape_of(tensor)
            given.append((tensor, Label(shape, {axis: Span.of(np.zeros([1] * len(shape), np.int64))})))
    on_path = {op.index for op in path.ops}
    labels = Labels(graph, given)
    for op in graph.recording.ops:
        if op.index in on_path or (op.kind == "write" and path.is_of_call(op)):
            labels.follow([op])
    label = labels.of(path.heads)
    of_new, of_earlier = (_known_along(label, axis, place) for axis in marked)
    return of_new, of_earlier


def _known_along(label: Label, axis: Axis, place: int) -> npt.NDArray[np.bool_]:
    """Return for each index of a dimension whether an element there is made of an axis."""
    size = label.shape[place]
    if axis not in label.spans:
        return np.zeros(size, np.bool_)
    others = tuple(other for other in range(len(label.shape)) if other != place)
    return np.broadcast_to(label.spans[axis].is_known.any(others), (size,))


def _end_of_keys(seen: Tensor | None, keys: int, *, least: int) -> int:
    """Return the number of slots with content: those up to the last new key, or up to the last key that is seen."""
    is_seen = [] if seen is None else seen.any(0).tolist()
    end = keys if len(is_seen) == keys else least
    while end > least and not is_seen[end - 1]:
        end -= 1
    return end


def _is_earlier(path: OperandPath, tensor: TensorRef) -> bool:
    """Return whether a tensor came in, or was projected by the same weight in an earlier call.

    The tokens that the new keys are projected from came in too, and are not earlier.
    """
    graph, projection = path.graph, path.projection
    assert projection is not None
    tokens = _tokens(path, projection)
    came_in = is_projected = False
    for step in graph.back(tensor, lambda op: not graph.is_projection(op)):
        op = graph.producer(step.tensor)
        if op is None:
            is_parameter = step.tensor.id in graph.recording.parameter_names
            if is_parameter and len(step.tensor.shape) > 1:
                return False
            if not is_parameter and step.tensor.id not in tokens:
                came_in = True
        elif graph.is_projection(op):
            if not weights_of(graph, op).isdisjoint(weights_of(graph, projection)):
                return not path.is_of_call(op)
            is_projected = True  # keys and values may be in one tensor
    return came_in and not is_projected


def weights_of(graph: Graph, projection: Op) -> set[int]:
    """Return the storages of the parameters that a projection reads."""
    return {tensor.storage for tensor in projection.inputs if graph.is_weight(tensor)}


def _tokens(path: OperandPath, projection: Op) -> set[int]:
    """Return the ids of the tensors that a projection reads, before any norm or embedding, without products."""
    start = path.graph.projected(projection)
    steps = path.graph.back(start, lambda op: not op.does("product", "convolution"))
    return {step.tensor.id for step in steps}


def _is_paged(path: OperandPath, op: Op, keys: int) -> bool:
    """Return whether an operation gathers keys by their slots, rather than rows of a batch in another order."""
    if not op.does("gathers"):
        return False
    for tensor in path.others(op):
        if tensor.dtype.startswith("int") and (len(tensor.shape) > 1 or tensor.numel == keys):
            return True
    return False
