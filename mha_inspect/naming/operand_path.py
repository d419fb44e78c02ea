"""Follow queries and keys from their projection to the scores: norms, and a cache that adds keys of earlier calls."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose, prod

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
_NORMS = {"native_layer_norm": "layer", "_fused_rms_norm": "rms"}


class OperandPath:
    """The operations from the projection of queries, keys or values to their product, in order."""

    def __init__(self, graph: Graph, attention: Attention, side: str, *, from_first: bool = False) -> None:
        """Take one side; with `from_first` from the first of several successive projections."""
        self.graph, self.side = graph, side
        product = attention.value_product if side == "value" else attention.score_product
        first = attention.value_first if side == "value" else attention.key_first == (side == "key")
        self.target = product.left if first else product.right
        self.projection = attention.first_projection(side) if from_first else attention.projections.get(side)
        self.ops: list[Op] = []
        self.reached: set[int] = set()
        """Ids of the tensors on the way."""
        self.read: set[int] = set()
        """Ids of these, and of the tensors that their operations read for the product."""
        if self.projection is None:
            return
        source = self.projection.output
        ops = graph.recording.ops[self.projection.index + 1 : product.multiply.index]
        dependent = made_of({source.id}, ops)
        path: dict[int, Op] = {}
        start = self.projection.index
        for step in graph.back(self.target, lambda op: op.index > start and any(t.id in dependent for t in op.inputs)):
            op = graph.recording.producer(step.tensor)
            self.read.add(step.tensor.id)
            if step.tensor.id in dependent:
                self.reached.add(step.tensor.id)
                if op is not None and op.index > start:
                    path[op.index] = op
        self.ops = [path[index] for index in sorted(path)]

    def others(self, op: Op) -> list[TensorRef]:
        """Return what an operation reads besides the tensors on the way."""
        return [tensor for tensor in op.inputs if tensor.id not in self.reached]


# -- norms ------------------------------------------------------------------------------------------------------------


def norm_of(path: OperandPath, names: AxisNames) -> tuple[QKNorm, range] | None:
    """Return the norm between a projection and the scores, and the indices of its operations; None without one."""
    for op in path.ops:
        norm = _fused_norm(op) or _norm_in_steps(path, op)
        if norm is None:
            continue
        kind, size, start = norm
        heads = names.num_heads if path.side == "query" else names.num_kv_heads
        over = "all" if heads > 1 and size == heads * names.head_dim else "head"
        end = op
        for later in path.ops:
            gain = later.does("scales") and any(map(path.graph.is_weight, later.inputs))
            if later.index > op.index and (gain or later.base_name == "_to_copy") and end.output in later.inputs:
                end = later
            number = path.graph.scale_of(later) if kind == "l2" and op.index < later.index < op.index + 4 else None
            if number is not None and isclose(number, size**0.5, rel_tol=1e-4):
                kind, end = "rms", later
        return QKNorm(kind, over), range(start, end.index + 1)  # type: ignore[arg-type]  # a word of the tables
    return None


def _fused_norm(op: Op) -> tuple[str, int, int] | None:
    """Return the kind of a norm that is one operation, the number of features that it is over, and its index."""
    sizes = op.args[1] if op.base_name in _NORMS else ()
    return (_NORMS[op.base_name], prod(sizes), op.index) if sizes else None


def _norm_in_steps(path: OperandPath, op: Op) -> tuple[str, int, int] | None:
    """Return the same for a tensor that is scaled by a statistic of its own features."""
    if not op.does("scales") or len(op.inputs) != 2 or path.others(op):
        return None
    statistics = [_statistic(path, tensor) for tensor in op.inputs]
    known = [statistic for statistic in statistics if statistic is not None]
    if len(known) != 1:
        return None
    whole = op.inputs[statistics[0] is not None]
    before = path.graph.recording.producer(whole)
    kind, start = _REDUCED[known[0].base_name], known[0].index - 1
    mean = _statistic(path, before.inputs[-1]) if before is not None and before.base_name == "sub" else None
    if mean is not None:
        kind, start = "layer", min(mean.index, start)
    read = known[0].inputs[0]
    return kind, read.numel // max(known[0].output.numel, 1), start


def _statistic(path: OperandPath, tensor: TensorRef) -> Op | None:
    """Return the reduction of features that a tensor is computed from, element by element; None without one."""
    op = path.graph.recording.producer(tensor)
    while op is not None and tensor.id in path.reached:
        if op.base_name in _REDUCED:
            size, kept = op.inputs[0].shape, op.output.shape
            return op if kept == (*size[:-1], 1) or kept == size[:-1] else None
        if not (path.graph.moves(op) or (op.pointwise and len(op.inputs) == 1)):
            return None
        tensor = op.inputs[0]
        op = path.graph.recording.producer(tensor)
    return None


# -- caches -----------------------------------------------------------------------------------------------------------


def cache_of(
    path: OperandPath, constants: Constants, names: AxisNames, who_sees: Callable[[], Tensor | None]
) -> tuple[Cache, set[int]] | None:
    """Return the cache behind keys or values, and the indices of the operations that fill it; None without one.

    Args:
        path: the operations of that side.
        constants: values of indices.
        names: the axes.
        who_sees: returns `query key`, which query sees which key; None if unknown.
    """
    queries, keys = names.lengths
    written: Op | None = None
    for op in path.ops:
        if op.base_name == "cat" and written is None:
            earlier = [tensor for tensor in path.others(op) if tensor.numel and tensor.id in path.read]
            place = setting(op, 1, "dim", 0)
            new = sum(t.shape[place] for t in op.inputs if t.id in path.reached)
            past = sum(t.shape[place] for t in earlier)
            if past and new and past + new >= keys > new and all(_is_earlier(path, tensor) for tensor in earlier):
                return Cache(keys - new, new, 0, "concatenated"), {op.index}
        elif op.kind == "write" and op.inputs and op.inputs[0].id not in path.reached:
            written = op
    if written is None:
        return None
    ends = [op for op in path.ops if op.index > written.index and op.does("gathers") and _is_paged(path, op, keys)]
    new, first = _written_keys(path, constants, written, queries)
    seen = who_sees()
    open_slots = [] if seen is None else [not bool(key) for key in seen.any(0).tolist()]
    last = keys
    while last > (first or 0) + new and len(open_slots) == keys and open_slots[last - 1]:
        last -= 1
    if seen is None and first is not None and not ends:
        last = min(first + new, keys)
    past = last - new
    if past < 0 or (past == 0 and last == keys):
        return None
    ops = {written.index, *(op.index for op in ends)}
    return Cache(past, new, keys - last, "paged" if ends else "in place"), ops


def _is_earlier(path: OperandPath, tensor: TensorRef) -> bool:
    """Return whether a tensor came in, or was projected by the same weight in an earlier call."""
    graph, projection = path.graph, path.projection
    assert projection is not None
    weights = {read.storage for read in projection.inputs if graph.is_weight(read)}
    outside = projected = False
    for step in graph.back(tensor, lambda op: not graph.is_projection(op)):
        op = graph.recording.producer(step.tensor)
        if op is None:
            outside = outside or step.tensor.id not in graph.recording.parameter_names
            if step.tensor.id in graph.recording.parameter_names and len(step.tensor.shape) > 1:
                return False
        elif graph.is_projection(op):
            if weights & {read.storage for read in op.inputs}:
                return True
            projected = True  # keys and values may be in one tensor
    return outside and not projected


def _is_paged(path: OperandPath, op: Op, keys: int) -> bool:
    """Return whether an operation gathers keys by their slots, rather than rows of a batch in another order."""
    indices = path.others(op)
    return any(tensor.dtype.startswith("int") and (len(tensor.shape) > 1 or tensor.numel == keys) for tensor in indices)


def _written_keys(path: OperandPath, constants: Constants, op: Op, queries: int) -> tuple[int, int | None]:
    """Return how many keys an operation writes into a cache, and the slot of the first; None if that is unknown."""
    name = op.base_name.rstrip("_")
    if name in ("index_copy", "index_put"):
        places = op.args[2] if name == "index_copy" else op.args[1]
        indices = [place for place in (places if isinstance(places, tuple) else (places,)) if place is not None]
        numbers = constants.numbers(indices[0]) if len(indices) == 1 and len(indices[0].shape) == 1 else []
        new = indices[0].numel if len(indices) == 1 and len(indices[0].shape) == 1 else queries
        return new, min(numbers) if numbers and max(numbers) - min(numbers) == len(numbers) - 1 else None
    cut = path.graph.recording.producer(op.inputs[0])
    while cut is not None and cut.kind == "view" and cut.inputs:
        source = cut.inputs[0]
        place = int(cut.args[1]) if len(cut.args) > 1 and cut.base_name in ("slice", "select") else 0
        new = cut.output.shape[place] if cut.base_name == "slice" else 1
        if cut.base_name in ("slice", "select") and new == queries < source.shape[place] and source.stride[place]:
            return queries, (cut.output.offset - source.offset) // source.stride[place]
        cut = path.graph.recording.producer(source)
    return queries, None
