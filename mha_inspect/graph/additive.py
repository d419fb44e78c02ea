"""Scores without a dot product: queries and keys are added, subtracted or put side by side, bent, and reduced.

So are the attention of Bahdanau, its relatives on graphs, and scores by distance. The bend is what makes it attention:
without one, what comes of the queries is the same number for every key, and no weight hangs on it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from ..record.catalog import axes_rule
from ..record.ops import Op, TensorRef
from .axis import setting
from .dataflow import Graph, Step
from .dimensions import Axis, Dim, Dimensions, wide
from .products import Product, ProductAxes, is_wide
from .rules import reduced_places

_DISTANCE = "distance"
_LAYERS = {"add": 1, "sub": 1, "cat": 2, _DISTANCE: 0}
"""What queries and keys meet in, and how many reductions there may be from there to the scores: features that stand
side by side are mixed before they are bent, and a distance is a score."""

_ORDERS = {"sort": 1, "topk": 2}
"""What puts numbers in order, and which of its arguments says along which dimension."""


@dataclass(frozen=True)
class Joint(Product):
    """What scores two factors that are broadcast against each other and added, subtracted or put side by side.

    `multiply` is the operation that does that, `op` the one that reduces what comes of it to scores.
    """

    between: tuple[Op, ...] = ()
    """The operations from the one to the other, in order; that to the scores is the last."""

    @property
    def is_dot(self) -> bool:
        """Whether the scores are dot products."""
        return False

    @property
    def meeting(self) -> str:
        """What queries and keys meet in."""
        name = self.multiply.base_name.rstrip("_")
        return {"add": "a sum", "cat": "one row of features"}.get(name, "a difference")

    @property
    def flops(self) -> int:
        """None are counted: those of an addition are none of a product."""
        return 0

    def axes(self, dimensions: Dimensions) -> ProductAxes:
        """Return what the dimensions of the factors and of the result are to the scores."""
        scores = wide(*dimensions.of(self.op.output))
        axes: dict[str, Dim] = defaultdict(tuple)
        known: set[Axis] = set()
        for out, left, right in _sides(dimensions, self.multiply):
            known.update(out)
            if not right:
                axes["rows"] += out
                axes["left_rows"] += left
            elif not left:
                axes["columns"] += out
                axes["right_columns"] += right
            elif out and set(out) <= set(scores):
                axes["batch"] += out
            else:
                axes["left_inner"] += left
                axes["right_inner"] += right
        # What reduces the features may give several scores, one for each head.
        axes["batch"] += tuple(atom for atom in scores if atom not in known)
        return ProductAxes(**axes)


def joint_scores(graph: Graph, masked: TensorRef, dim: int) -> tuple[Joint, tuple[Op, ...]] | None:
    """Return what scored queries and keys without a dot product, and the operations from there to the softmax."""
    over = graph.dimensions.along(masked, dim)
    queue, seen = deque([Step(masked)] if over else []), {masked.id}
    while queue:
        step = queue.popleft()
        op = graph.recording.producer(step.tensor)
        if op is None or not op.inputs:
            continue
        path = tuple(reversed(step.path))
        joint = _joined(graph, op, path, over)
        if joint is not None:
            return joint
        reductions = sum(graph.reduces(passed) for passed in (op, *path))
        if reductions > max(_LAYERS.values()) or not (graph.carries(op) or graph.reduces(op)):
            continue
        for tensor in op.inputs:
            if tensor.id not in seen and graph.comes_from_inputs(tensor) and tensor.dtype != "bool":
                seen.add(tensor.id)
                queue.append(Step(tensor, (*step.path, op)))
    return None


def _joined(graph: Graph, op: Op, path: tuple[Op, ...], over: set[Axis]) -> tuple[Joint, tuple[Op, ...]] | None:
    """Return the scores that an operation joins queries and keys for, and what is between them and the softmax."""
    name = _DISTANCE if op.does("distances") else op.base_name.rstrip("_")
    if name not in _LAYERS or len(op.inputs) != 2 or not all(map(graph.comes_from_inputs, op.inputs)):
        return None
    ends = [place for place, passed in enumerate(path) if graph.reduces(passed)]
    bent = name == _DISTANCE or any(graph.bends(passed) for passed in path)
    if len(ends) > _LAYERS[name] or (name == "cat" and not ends) or not bent:
        return None
    count = ends[-1] + 1 if ends else 0
    while 0 < count < len(path) and path[count].call == path[ends[-1]].call:
        count += 1  # a bias
    keys = [(left, right) for out, left, right in _sides(graph.dimensions, op) if set(out) & over]
    if {(bool(left), bool(right)) for left, right in keys} not in ({(True, False)}, {(False, True)}):
        return None
    if _is_statistic(graph, op.inputs[bool(keys[0][0])], {atom for pair in keys for dim in pair for atom in dim}):
        return None
    left, right = (_unrepeated(graph, tensor) for tensor in op.inputs)
    return Joint(path[count - 1] if count else op, op, left, right, path[:count]), path[count:]


def _is_statistic(graph: Graph, query: TensorRef, keys: set[Axis]) -> bool:
    """Return whether this is a mean of the keys, another number of a norm over them, or the keys put in order."""
    op = graph.recording.producer(graph.before_moves(query))
    if op is None or not op.inputs:
        return False
    places: tuple[int, ...] = ()
    if axes_rule(op.base_name) == "reduce":
        places = reduced_places(op)
    elif op.base_name in _ORDERS:
        places = (int(setting(op, _ORDERS[op.base_name], "dim", -1)),)
    dims = graph.dimensions.of(op.inputs[0])
    return bool(dims) and any(keys & set(dims[place]) for place in places)


def _unrepeated(graph: Graph, factor: TensorRef) -> TensorRef:
    """Return a factor before it was laid out to meet the other."""
    once = graph.before_repeats(factor)
    return graph.before(once, lambda op: op.does("broadcasts") and has_sizes_of(op.inputs[0], op.output))


def has_sizes_of(source: TensorRef, tensor: TensorRef) -> bool:
    """Return whether two tensors have the same sizes, those of one aside."""
    return [size for size in source.shape if size != 1] == [size for size in tensor.shape if size != 1]


def _sides(dimensions: Dimensions, op: Op) -> Iterator[tuple[Dim, Dim, Dim]]:
    """Yield each axis of what two factors are joined in, and what it is in the left and in the right factor.

    A factor has no axis where it is broadcast or repeated. Features that stand side by side are no axis of the whole.
    """
    left, right = (dimensions.of(factor) for factor in op.inputs)
    whole = dimensions.of(op.output)
    if op.does("distances"):
        batch = zip(whole[:-2], left[:-2], right[:-2], strict=False)
        yield from (*batch, (whole[-2], left[-2], ()), (whole[-1], (), right[-2]), ((), left[-1], right[-1]))
        return
    rank = len(whole)
    joined = setting(op, 1, "dim", 0) % rank if op.base_name == "cat" else None
    left, right = (((),) * (rank - len(dims)) + dims for dims in (left, right))
    for place, out in enumerate(map(wide, whole)):
        first, second = (
            wide(dims[place]) if place == joined or is_wide(factor, rank, place) else ()
            for dims, factor in zip((left, right), op.inputs, strict=True)
        )
        sizes = [[atom.size for atom in dim] for dim in (out, first, second) if dim]
        if place == joined:
            yield (), first, second
        elif any(dim != sizes[0] for dim in sizes):
            yield out, first, second
        else:
            nothing = (None,) * len(out)
            for atom, a, b in zip(out, first or nothing, second or nothing, strict=True):
                yield (atom,), _unrepeated_axis(a), _unrepeated_axis(b)


def _unrepeated_axis(atom: Axis | None) -> Dim:
    return () if atom is None or atom.repeats else (atom,)
