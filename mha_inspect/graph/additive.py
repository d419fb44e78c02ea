"""Scores without a dot product: queries and keys are added, subtracted or put side by side, bent, and reduced.

So are the attention of Bahdanau, its relatives on graphs, and scores by distance. The bend is what makes it attention:
without one, what comes of the queries is the same number for every key, and no weight hangs on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from ..record.catalog import axes_rule
from ..record.ops import Op, TensorRef
from .axis import fresh, setting
from .dimensions import Axis, Dim, Dimensions, resolve, size_of, wide
from .elements import Elements, Origins
from .moves import coordinates_of, index_of
from .products import Product, ProductAxes, summed_places
from .walk import Graph, Step

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
    sides: tuple[tuple[Dim, Dim, Dim], ...] = ()
    """Each axis of what they are joined in, of the graph that this was found in, and what it is in the left and in the
    right factor; empty where that has none."""

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
        """What the dimensions of the factors and of the result are to the scores."""
        kept = {atom for dim in dimensions.of(self.op.output) for atom in dim}
        found: dict[str, Dim] = {}

        def put(**dims: Dim) -> None:
            for name, dim in dims.items():
                found[name] = (*found.get(name, ()), *resolve(dim))

        for out, left, right in self.sides:
            if left and right:
                here = set(resolve(out)) <= kept
                put(**({"batch": out} if here else {"left_inner": left, "right_inner": right}))
            elif left:
                put(rows=out, left_rows=left)
            else:
                put(columns=out, right_columns=right)
        known = {atom for out, _, _ in self.sides for atom in resolve(out)}
        # What reduces the features may give several scores, one for each head.
        put(batch=tuple(atom for dim in dimensions.of(self.op.output) for atom in wide(dim) if atom not in known))
        return ProductAxes(**found)


def joint_scores(graph: Graph, masked: TensorRef, dim: int) -> tuple[Joint, tuple[Op, ...]] | None:
    """What scored queries and keys without a dot product, and the operations from there to the softmax, in order."""
    over = set(wide(graph.dimensions.of(masked)[dim])) if masked.shape else set()
    queue, seen = deque([Step(masked)] if over else []), {masked.id}
    while queue:
        step = queue.popleft()
        op = graph.recording.producer(step.tensor)
        if op is None or not op.inputs:
            continue
        path = tuple(reversed(step.path))
        found = _joined(graph, op, path, over)
        if found is not None:
            return found
        reductions = sum(graph.reduces(passed) for passed in (op, *path))
        if reductions > max(_LAYERS.values()) or not (graph.carries(op) or graph.reduces(op)):
            continue
        for tensor in op.inputs:
            if tensor.id not in seen and graph.comes_from_inputs(tensor) and tensor.dtype != "bool":
                seen.add(tensor.id)
                queue.append(Step(tensor, (*step.path, op)))
    return None


def _joined(graph: Graph, op: Op, path: tuple[Op, ...], over: set[Axis]) -> tuple[Joint, tuple[Op, ...]] | None:
    """The scores that an operation joins queries and keys for, and what is between them and the softmax."""
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
    sides = _sides(graph, op)
    keys = [(left, right) for out, left, right in sides if set(resolve(out)) & over]
    if len({(bool(left), bool(right)) for left, right in keys}) != 1 or all(keys[0]):
        return None
    if _is_statistic(graph, op.inputs[bool(keys[0][0])], {atom for own in keys for dim in own for atom in dim}):
        return None
    left, right = (_unrepeated(graph, tensor) for tensor in op.inputs)
    return Joint(path[count - 1] if count else op, op, left, right, path[:count], sides), path[count:]


def _is_statistic(graph: Graph, query: TensorRef, keys: set[Axis]) -> bool:
    """Whether this is a mean of the keys, another number of a norm over them, or the keys themselves in order."""
    op = graph.recording.producer(graph.before_moves(query))
    if op is None or not op.inputs:
        return False
    places: tuple[int, ...] = ()
    if axes_rule(op.base_name) == "reduce":
        places = summed_places(op)
    elif op.base_name in _ORDERS:
        places = (int(setting(op, _ORDERS[op.base_name], "dim", -1)),)
    dims = graph.dimensions.of(op.inputs[0])
    return bool(dims) and any(keys & set(dims[place]) for place in places)


def _unrepeated(graph: Graph, factor: TensorRef) -> TensorRef:
    """A factor before it was laid out to meet the other."""
    found = graph.before_repeats(factor)
    while (op := graph.recording.producer(found)) is not None and op.does("broadcasts"):
        if [size for size in op.inputs[0].shape if size != 1] != [size for size in found.shape if size != 1]:
            break
        found = op.inputs[0]
    return found


def _sides(graph: Graph, op: Op) -> tuple[tuple[Dim, Dim, Dim], ...]:
    """What each axis of what two factors are joined in is in each of them."""
    whole, place = op.output, -1
    dims = list(graph.dimensions.of(whole))
    if op.does("distances"):
        one, other = (graph.dimensions.of(factor) for factor in op.inputs)
        batch = zip(dims[:-2], one[:-2], other[:-2], strict=False)
        return (*batch, (dims[-2], one[-2], ()), (dims[-1], (), other[-2]), (fresh(1), one[-1], other[-1]))
    if op.base_name == "cat":
        place = setting(op, 1, "dim", 0) % len(whole.shape)
        dims[place] = ()
    steps = [(atom, step) for atom, step in _steps(dims, whole.shape) if atom.size > 1]
    coordinates = coordinates_of(torch.tensor([0, *(step for _, step in steps)]), whole.shape)
    found: list[list[Dim]] = []
    for factor in op.inputs:
        last = list(zip(coordinates, whole.shape, strict=True))[len(whole.shape) - len(factor.shape) :]
        own = [c if size > 1 else torch.zeros_like(c) for (c, _), size in zip(last, factor.shape, strict=True)]
        source = graph.before_moves(_unrepeated(graph, factor))
        start = Elements(factor, index_of(own, factor.shape, len(steps) + 1), torch.arange(len(steps) + 1))
        trail = Origins(graph).back(start, [source])
        at = {int(i): int(a) for reached in trail.reached for i, a in zip(reached.ids, reached.at, strict=True)}
        axes = [own for own in _steps(graph.dimensions.of(source), source.shape) if own[0].size > 1]
        moved = [abs(at.get(number, 0) - at.get(0, 0)) for number in range(1, len(steps) + 1)]
        found.append([_run(axes, atom, step) if step else () for step, (atom, _) in zip(moved, steps, strict=True)])
    sides: list[tuple[Dim, Dim, Dim]] = [
        ((atom,), left, right) for (atom, _), left, right in zip(steps, *found, strict=True)
    ]
    if place >= 0:
        left, right = (graph.dimensions.of(factor)[place - len(whole.shape)] for factor in op.inputs)
        sides.append((fresh(1), left, right))
    return tuple(sides)


def _run(axes: Sequence[tuple[Axis, int]], atom: Axis, step: int) -> Dim:
    """The axes of a factor, so far apart at the last of them, that one of what it is joined in runs over."""
    last = next((place for place, (_, own) in enumerate(axes) if own == step), -1)
    first = last
    while first > 0 and prod(own.size for own, _ in axes[first : last + 1]) < atom.size:
        first -= 1
    run = tuple(own for own, _ in axes[first : last + 1])
    return run if last >= 0 and size_of(run) == atom.size else (atom,)


def _steps(dims: Sequence[Dim], shape: Sequence[int]) -> Iterator[tuple[Axis, int]]:
    """The axes of a tensor, and how far apart in row-major order the elements along each are."""
    step = prod(shape)
    for dim, size in zip(dims, shape, strict=True):
        inside = step // max(size, 1)
        for atom in dim:
            step //= max(atom.size, 1)
            yield atom, step
        step = inside
