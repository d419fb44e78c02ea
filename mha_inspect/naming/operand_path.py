"""Follow queries and keys from their projection to the scores: norms, and a cache that adds keys of earlier calls."""

from __future__ import annotations

from collections.abc import Callable
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


class OperandPath:
    """The operations from the projection of queries, keys or values to their product, in order."""

    def __init__(self, graph: Graph, attention: Attention, side: str, *, from_first: bool = False) -> None:
        """Take one side; with `from_first` from the first of several successive projections."""
        self.graph, self.side = graph, side
        product = attention.value_product if side == "value" else attention.score_product
        first = attention.value_first if side == "value" else attention.key_first == (side == "key")
        self.target = product.left if first else product.right
        self.projection = attention.first_projection(side) if from_first else attention.projections.get(side)
        self.forward = _Forward.around(graph, attention, self.projection)
        """The call that these queries, keys or values are projected and used in."""
        self.own_projections = frozenset(op.index for op in _projections(attention))
        """Indices of the projections that this attention shows."""
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
        numbers = []
        for number, other in zip(projection.forwards, attention.softmax.forwards, strict=False):
            if number != other:
                break
            numbers.append(number)
        if numbers:
            return cls(tuple(numbers), -1)
        before = [softmax.op.index for softmax in graph.softmaxes.values() if softmax.op.index < projection.index]
        return cls((), max(before, default=-1))

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
        return op.module == projection.module and len(op.forwards) == len(projection.forwards)


def _projections(attention: Attention) -> list[Op]:
    """Return all projections of an attention, with those before the last of each side."""
    earlier = [op for ops in attention.earlier.values() for op in ops]
    return [*earlier, *attention.projections.values()]


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

    A cache was there before the call: keys of other tokens that the same call projects, e.g. of global tokens beside
    local ones, are none.

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
            beside = _cache_beside(path, earlier, place)
            if beside and past + new == keys:
                return Cache(beside, keys - beside, 0, "concatenated"), {op.index}
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
    if past and not _was_there(path, written):
        return None
    ops = {written.index, *(op.index for op in ends)}
    return Cache(past, new, keys - last, "paged" if ends else "in place"), ops


def _cache_beside(path: OperandPath, others: list[TensorRef], place: int) -> int:
    """Return the number of keys that came in, where further keys of this call are joined too; 0 without such keys.

    Example: `cat([past, of_global_tokens, new])`, where the keys of global tokens are projected in each call.
    """
    given = [tensor for tensor in others if path.graph.before_moves(tensor).id in path.graph.recording.input_ids]
    further = [tensor for tensor in others if tensor not in given]
    is_of_call = all(tensor.id in path.graph.learned for tensor in further)
    return sum(tensor.shape[place] for tensor in given) if given and further and is_of_call else 0


def _is_earlier(path: OperandPath, tensor: TensorRef) -> bool:
    """Return whether a tensor came in, or was projected by the same weight in an earlier call.

    The tokens that the new keys are projected from came in too, and are not earlier.
    """
    graph, projection = path.graph, path.projection
    assert projection is not None
    weights = {read.storage for read in projection.inputs if graph.is_weight(read)}
    outside = projected = False
    tokens = _tokens(path, projection)
    for step in graph.back(tensor, lambda op: not graph.is_projection(op)):
        op = graph.recording.producer(step.tensor)
        if op is None:
            given = step.tensor.id not in graph.recording.parameter_names and step.tensor.id not in tokens
            outside = outside or given
            if step.tensor.id in graph.recording.parameter_names and len(step.tensor.shape) > 1:
                return False
        elif graph.is_projection(op):
            if weights & {read.storage for read in op.inputs}:
                return path.forward.is_earlier_turn(op, projection)
            projected = True  # keys and values may be in one tensor
    return outside and not projected


def _tokens(path: OperandPath, projection: Op) -> set[int]:
    """Return the ids of the tensors that a projection reads, before any norm or embedding, without products."""
    start = path.graph.projected(projection)
    return {step.tensor.id for step in path.graph.back(start, lambda op: not op.does("product", "convolution"))}


def _was_there(path: OperandPath, written: Op) -> bool:
    """Return whether the memory that new keys are written into was there before this call, with other keys.

    It was not if this call made it, or wrote the keys of other tokens into it too.
    """
    graph, storage = path.graph, written.output.storage
    for op in graph.recording.ops[: written.index]:
        makes = op.kind in ("compute", "copy") and any(output.storage == storage for output in op.outputs)
        if makes and path.forward.has(op) and not any(_is_earlier(path, tensor) for tensor in op.inputs):
            return False
    read = _read_after(path, written)
    for op in graph.recording.ops[: max(path.ops[-1].index, written.index)]:
        if op.kind != "write" or op.index == written.index or not path.forward.has(op):
            continue
        if op.output.storage == storage and _overlap(op.output, read) and _writes_other_keys(path, op):
            return False
    return True


def _read_after(path: OperandPath, written: Op) -> TensorRef:
    """Return the smallest part of the written memory that is read for the product."""
    parts = [tensor for op in path.ops for tensor in op.inputs if op.index > written.index]
    views = [tensor for tensor in parts if tensor.storage == written.output.storage and tensor.numel]
    return min(views, key=lambda tensor: tensor.numel, default=written.output)


def _overlap(first: TensorRef, second: TensorRef) -> bool:
    """Return whether two tensors of one storage have an element in common; also if that takes too long to find out."""
    starts = first.offset, second.offset
    ends = [t.offset + sum((n - 1) * step for n, step in zip(t.shape, t.stride, strict=True)) for t in (first, second)]
    size = max(ends) - min(starts) + 1
    if max(starts) > min(ends) or size > _LARGEST:
        return max(starts) <= min(ends)
    # E.g. the keys of two layers, side by side for each token.
    taken = [torch.zeros(size, dtype=torch.bool) for _ in starts]
    for tensor, elements in zip((first, second), taken, strict=True):
        elements.as_strided(tensor.shape, tensor.stride, tensor.offset - min(starts)).fill_(True)
    return bool((taken[0] & taken[1]).any())


def _writes_other_keys(path: OperandPath, op: Op) -> bool:
    """Return whether an operation writes what this call projected, other than by the projections of the attention."""
    graph = path.graph
    for value in op.inputs[1:]:
        for step in graph.back(value, lambda through: not graph.is_projection(through)):
            made = graph.recording.producer(step.tensor)
            if made is None or not graph.is_projection(made) or made.index in path.own_projections:
                continue
            if path.forward.has(made):
                return True
    return False


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
