"""Find the projections behind heads: the products with parameters that give queries, keys and values.

Convolutions and pooling may change the positions before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..record.ops import Op, TensorRef
from .attention import features_place
from .axis import Axis, plain_name, setting, wide
from .dataflow import Graph, inside, made_of
from .ids import ids_of
from .labels import is_made_of
from .mixing import mixing_of

Origin = tuple[int, int, int]


@dataclass(frozen=True)
class Projection:
    """A product with a parameter that gives heads, and the operations from it to the heads, in order."""

    op: Op
    path: tuple[Op, ...]
    earlier: tuple[Op, ...] = ()
    """The low-rank projections before it, in order."""

    @property
    def first(self) -> Op:
        """The first of the successive projections."""
        return self.earlier[0] if self.earlier else self.op


def projections_behind(
    graph: Graph,
    heads: Mapping[str, TensorRef],
    module: str,
    positions: Mapping[str, set[Axis]],
) -> dict[str, Projection]:
    """Return the projections of query, key and value; a side without a projection is absent.

    Args:
        graph: the dataflow.
        heads: the heads of queries, keys and values by stage name.
        module: path of the module that computes the scores.
        positions: the position axes of each side.
    """
    nearest: dict[str, Projection | None] = {}
    query = _query_projection(graph, heads, module)
    like = None if query is None else _origin(graph, query.op)
    nearest["query"] = query
    for name in ("key", "value"):
        stage = f"{name[0]}_heads"
        if stage in heads:
            nearest[name] = _projection(graph, heads[stage], module, positions[name], like)
    ends: dict[str, Projection] = {}
    of_query: Origin | None = None
    for name, end in nearest.items():
        if end is None or _is_a_step(graph, end, positions[name]):
            continue
        ends[name] = replace(end, earlier=earlier_projections(graph, end.op, module, of_query))
        if name == "query":
            of_query = _origin(graph, ends[name].first)
    return ends


def _query_projection(
    graph: Graph,
    heads: Mapping[str, TensorRef],
    module: str,
) -> Projection | None:
    """Return the projection of the queries; None if they have none.

    If the heads are multiplied by a matrix each, as an absorbed projection of the keys does, it is the one before that.
    """
    if "q_heads" not in heads:
        return None
    query = _projection(graph, heads["q_heads"], module, set())
    if query is None or not graph.is_by_head(query.op):
        return query
    before = _projection(graph, graph.projected(query.op), module, set(), outside=False)
    if before is None:
        return query
    separate_heads = set(wide(*graph.dimensions.of(query.op.output)[:1]))
    if separate_heads.isdisjoint(graph.dimensions.of(before.op.output)[-1]):
        return query
    return replace(before, path=(*before.path, query.op, *query.path))


def with_projections(
    graph: Graph,
    heads: Mapping[str, TensorRef],
    ends: Mapping[str, Projection],
) -> dict[str, TensorRef]:
    """Return the stages up to the heads: the inputs of the projections, their results, and the heads."""
    inputs: dict[str, TensorRef] = {}
    projected: dict[str, TensorRef] = {}
    gathered: dict[object, TensorRef] = {}
    for name, end in ends.items():
        source = _projected_input(graph, end)
        inputs[name] = gathered.setdefault(_gathered(graph, source), source)
        letter = name[0]
        projected[f"{letter}_proj"] = _projected(graph, name, ends, heads[f"{letter}_heads"])
    return {**inputs, **projected, **heads}


def _projected_input(graph: Graph, end: Projection) -> TensorRef:
    """Return what the first projection of a side projects, as it was given to the run or to its module."""
    op = end.first
    source = graph.before_flattening(graph.before_call(op, graph.projected(op)), op.module)
    origin = graph.before_moves(source)
    return origin if origin.id in graph.recording.input_ids else source


def _gathered(graph: Graph, tensor: TensorRef) -> object:
    """Return a key that is equal for tensors that each side gathers from all ranks for itself; else the tensor's id."""
    op = graph.producer(graph.before(tensor, _keeps_gathered))
    if op is None or not op.is_collective:
        return tensor.id
    return op.name, graph.before_moves(op.inputs[-1]).id, tensor.shape


def _keeps_gathered(op: Op) -> bool:
    """Return whether this views gathered parts, or joins those in one memory."""
    if op.kind == "view":
        return True
    storages = {read.storage for read in op.inputs}
    return op.does("joins") and len(storages) == 1


def _passes(graph: Graph, op: Op) -> bool:
    """Return whether this operation may come between a projection and its heads."""
    if op.does("product"):
        return graph.is_by_table(op)
    if op.kind != "compute" or op.pointwise or graph.is_by_channel(op):
        return True
    return op.does("norms", "passes_on", "gathers", "pools")


def _origin(graph: Graph, op: Op) -> Origin:
    """Return the id of a projection's input before views and copies, and which part of it the projection reads."""
    read = graph.projected(op)
    return graph.before_moves(read).id, read.numel, read.offset


def _projection(
    graph: Graph,
    heads: TensorRef,
    module: str,
    positions: set[Axis],
    like: Origin | None = None,
    *,
    outside: bool = True,
) -> Projection | None:
    """Return the nearest projection behind a tensor of heads; of added or joined ones, the one with the input `like`.

    Of joined ones, it may have that input through low-rank projections, as the keys of a latent beside rotated ones. A
    projection that gives `positions` reduces the number of keys: it is passed if another one gives the features. With
    `outside` the projection may be outside the module. None if there is no projection.
    """

    def is_allowed(op: Op) -> bool:
        return outside or inside(op.module, module)

    def through(op: Op) -> bool:
        return is_allowed(op) and (_passes(graph, op) or _gives(graph, op, positions))

    candidates = _Candidates(graph, module, positions, like)
    for step in graph.back(heads, through):
        op = graph.producer(step.tensor)
        if op is None or not graph.is_projection(op) or not is_allowed(op):
            continue
        end = Projection(op, step.path[::-1])
        if candidates.take(end):
            return end
    return candidates.best


class _Candidates:
    """The projections on the walk back from heads, which are taken until one is surely theirs."""

    def __init__(
        self,
        graph: Graph,
        module: str,
        positions: set[Axis],
        like: Origin | None,
    ) -> None:
        self._graph = graph
        self._module = module
        self._positions = positions
        self._like = like
        self._nearest: Projection | None = None
        self._direct: Projection | None = None
        """The first of joined ones that projects `like` itself."""
        self._of_positions: Projection | None = None
        self._adapter: Projection | None = None
        """The first of added ones that is the end of low-rank projections."""
        self._adapted: Origin | None = None
        """What these project."""

    @property
    def best(self) -> Projection | None:
        """The most likely one if none is sure."""
        return self._adapter or self._direct or self._nearest or self._of_positions

    def take(self, end: Projection) -> bool:
        """Take a projection; return whether it is surely the one."""
        graph, op = self._graph, end.op
        if _gives(graph, op, self._positions):
            self._of_positions = self._of_positions or end
            return False
        if any(passed.base_name == "cat" for passed in end.path):
            return self._take_joined(end)
        if _adds_activations(graph, end.path):
            return self._take_added(end)
        if self._nearest is None:
            return self._is_sure(end)
        return False

    def _take_joined(self, end: Projection) -> bool:
        """Take one of several projections whose results are joined."""
        graph, op, like = self._graph, end.op, self._like
        if like is None:
            # E.g. the embedding of a class token is apart.
            if inside(op.module, self._module):
                return self._is_sure(end)
            return self._keep(end)
        earlier = earlier_projections(graph, op, self._module, like) if op.does("product") else ()
        if _origin(graph, earlier[0] if earlier else op) != like:
            return self._keep(end)
        if earlier:
            return self._is_sure(end)
        self._direct = self._direct or end
        return False

    def _take_added(self, end: Projection) -> bool:
        """Take one of several projections whose results are added; that of an adapter is the end of low-rank ones."""
        graph, op, like = self._graph, end.op, self._like
        if like is not None and _origin(graph, op) != like:
            return self._keep(end)
        low_rank = earlier_projections(graph, op, self._module, like)
        if not low_rank:
            return self._is_sure(end)
        if self._adapter is None:  # what it is added to may have a projection of its own
            self._adapter = end
            self._adapted = _origin(graph, low_rank[0])
        return False

    def _is_sure(self, end: Projection) -> bool:
        """Return whether nothing speaks against a projection: no adapter of another input is added to it."""
        return self._adapter is None or _origin(self._graph, end.op) == self._adapted

    def _keep(self, end: Projection) -> bool:
        self._nearest = self._nearest or end
        return False


def _is_a_step(graph: Graph, end: Projection, positions: set[Axis]) -> bool:
    """Return whether this projection gives one of several concatenated positions, as each step of a recurrence does."""
    for op in end.path:
        if op.base_name not in ("cat", "stack") or len(op.inputs) < 3:
            continue
        joined = graph.dimensions.of(op.output)[_place_of_join(op)]
        if positions.isdisjoint(joined):
            continue
        first, second = op.inputs[:2]
        if graph.leads_to(first, second):
            return True
    return False


def _place_of_join(op: Op) -> int:
    """Return the dimension of the result that a concatenation or a stack joins along, counted from 0."""
    return int(setting(op, 1, "dim", 0)) % len(op.output.shape)


def _gives(graph: Graph, op: Op, positions: set[Axis]) -> bool:
    """Return whether a projection gives positions instead of features."""
    if not positions:
        return False
    mixing = mixing_of(graph, op)
    if mixing is None:
        return False
    axes = wide(graph.dimensions.of(op.output)[mixing.place])
    return bool(axes) and positions.issuperset(axes)


def _adds_activations(graph: Graph, path: Iterable[Op]) -> bool:
    """Return whether two tensors that depend on the inputs are added on this path."""
    additions = [op for op in path if plain_name(op) == "add"]
    return any(sum(map(graph.comes_from_inputs, op.inputs)) > 1 for op in additions)


def earlier_projections(
    graph: Graph,
    op: Op,
    module: str,
    like: Origin | None = None,
) -> tuple[Op, ...]:
    """Return the low-rank projections before a projection, in the same module, in order.

    Where latents of an earlier call are joined with new ones, it is the projection with the input `like`.
    """
    earlier: list[Op] = []
    read = graph.projected(op)
    while read.shape[-1:] < op.output.shape[-1:]:
        end = _projection(graph, read, module, set(), like, outside=False)
        # A residual adds the output of another attention: its W_o is no step of this projection.
        if end is None or _adds_activations(graph, end.path):
            break
        source = graph.projected(end.op)
        if read.shape[-1] >= source.shape[-1]:
            break
        op, read = end.op, source
        earlier.insert(0, op)
    return tuple(earlier)


def _projected(
    graph: Graph,
    name: str,
    ends: Mapping[str, Projection],
    heads: TensorRef,
) -> TensorRef:
    """Return the result of a projection; if several sides share the projection, the piece of this side.

    `q, k, v = linear(x).chunk(3, -1)` makes `batch position (qkv heads head_dim)`, and the piece of each side is
    `batch position (heads head_dim)`. With one head the piece may be the `heads` themselves.
    """
    end = ends[name]
    joined = _joined_heads(graph, end)
    if joined is not None:
        return joined
    whole = graph.after_projection(end.op)
    sharing = _sides_sharing(name, ends)
    if not sharing:
        return whole
    shared_ops: set[int] = set()
    for side in sharing:
        shared_ops.update(op.index for op in side.path)
    producer_index = graph.recording.producers.get(whole.id, -1)
    since_whole = [op for op in end.path if op.index > producer_index]
    piece = whole
    for op, reader in _with_readers(_without_other_writes(graph, since_whole, heads)):
        if not graph.moves(op):
            break
        read = _output_read(op, [heads] if reader is None else reader.inputs)
        if read.numel < piece.numel and _has_rows_of(whole, read, end.op):
            piece = read
        is_of_this_side = reader is None or reader.index not in shared_ops
        if piece is not whole and is_of_this_side:
            break
    return piece


def _without_other_writes(graph: Graph, path: Sequence[Op], heads: TensorRef) -> list[Op]:
    """Return a path without writes into slices that have no part of the heads, and without these slices."""
    kept: list[Op] = []
    for place, op in enumerate(path):
        if op.kind != "write" or is_made_of(graph, heads, op.output, path[place + 1 :]):
            kept.append(op)
        elif kept and _makes_target(kept[-1], op):
            kept.pop()
    return kept


def _makes_target(op: Op, write: Op) -> bool:
    """Return whether an operation makes the slice that another one writes into."""
    return bool(op.outputs) and op.output.id == write.inputs[0].id


def _joined_heads(graph: Graph, end: Projection) -> TensorRef | None:
    """Return the joined results of several projections of one input, e.g. one for each head; None for one projection.

    They are concatenated along the features, `batch position (heads head_dim)`, or stacked.
    """
    for op in end.path:
        if op.base_name in ("cat", "stack") and len(op.inputs) > 1:
            return op.output if _joins_projections_like(graph, op, end.op) else None
    return None


def _joins_projections_like(graph: Graph, op: Op, first: Op) -> bool:
    """Return whether every operand of a join is the result of a projection of its own, of the input of the first."""
    projections: set[int] = set()
    for read in op.inputs:
        projection = _only_projection(graph, read)
        if projection is None or _origin(graph, projection) != _origin(graph, first):
            return False
        projections.add(projection.index)
    if len(projections) < len(op.inputs):
        return False
    if len({read.shape for read in op.inputs}) == 1:
        return True
    rank = len(op.output.shape)
    if op.base_name != "cat" or _place_of_join(op) != rank - 1:
        return False
    rows = graph.after_projection(first).shape[:-1]
    return op.output.shape[:-1] == rows


def _only_projection(graph: Graph, tensor: TensorRef) -> Op | None:
    """Return the projection that a tensor is the result of, with its bias, in any shape; None for anything else."""

    def through(op: Op) -> bool:
        if graph.is_projection(op):
            return False
        return graph.moves(op) or graph.adds_bias(op)

    op = graph.producer(graph.before(tensor, through))
    return op if op is not None and graph.is_projection(op) else None


def _sides_sharing(name: str, ends: Mapping[str, Projection]) -> list[Projection]:
    """Return the other sides that come through the projection of this side, at once or through a low-rank one."""
    op = ends[name].op
    sharing = []
    for side, end in ends.items():
        if side != name and op in (end.op, *end.earlier):
            sharing.append(end)
    return sharing


def _with_readers(path: Sequence[Op]) -> Iterator[tuple[Op, Op | None]]:
    """Yield each operation of a path with the next one, which reads its result; None after the last."""
    readers: list[Op | None] = [*path[1:], None]
    return zip(path, readers, strict=False)


def _output_read(op: Op, read: Iterable[TensorRef]) -> TensorRef:
    """Return the output of `op` that is among the tensors `read`, as a split has one for each side; else the first."""
    ids = ids_of(read)
    for output in op.outputs:
        if output.id in ids:
            return output
    return op.output


def _has_rows_of(whole: TensorRef, part: TensorRef, projection: Op) -> bool:
    """Return whether only features are missing in a part: `batch position features`, not yet split into heads.

    The features of a convolution are in the second dimension: `batch features position`.
    """
    rank = len(whole.shape)
    rows, rows_of_part = list(whole.shape), list(part.shape)
    if features_place(projection, rank) == -1:
        has_rank = len(rows_of_part) <= rank
        return has_rank and rows_of_part[:-1] == rows[:-1]
    if len(rows_of_part) != rank:
        return False
    del rows[1], rows_of_part[1]
    return rows == rows_of_part


def joined_projections(graph: Graph, first: Op, ops: Sequence[Op]) -> dict[int, set[int]]:
    """Return the projections that give heads of further tokens, joined with those of `first` along their positions.

    Each comes with the ids of the tensors that these operations make of it.
    """
    of_first = made_of({first.output.id}, ops)
    derived: dict[int, set[int]] = {}
    outputs: dict[int, int] = {}
    for op in ops:
        if op is first or not graph.is_projection(op):
            continue
        if graph.is_weight(op.output):
            continue
        ids = made_of({op.output.id}, ops)
        join = _join_of_both(ops, ids, of_first)
        if join is None or first.output.id in ids:
            continue
        features = len(join.output.shape) - 1
        if join.base_name == "cat" and _place_of_join(join) < features:
            derived[op.index] = ids
            outputs[op.index] = op.output.id
    joined: dict[int, set[int]] = {}
    for index, ids in derived.items():
        later = [output for number, output in outputs.items() if number != index]
        # A projection that leads to another one is only a step before it.
        if ids.isdisjoint(later):
            joined[index] = ids
    return joined


def _join_of_both(ops: Sequence[Op], left: set[int], right: set[int]) -> Op | None:
    """Return the first operation that reads a tensor of each set that is not in the other one; None without one."""
    only_left, only_right = left - right, right - left
    for op in ops:
        ids = ids_of(op.inputs)
        if not ids.isdisjoint(only_left) and not ids.isdisjoint(only_right):
            return op
    return None
