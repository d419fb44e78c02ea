"""Find the projections behind heads: the products with parameters that give queries, keys and values.

Convolutions and pooling may change the positions before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..record.ops import Op, TensorRef
from .attention import Attention, features_place
from .axis import Axis, setting, wide
from .dataflow import Graph, inside, made_of
from .part import may_overlap
from .scores import mixing_of

Origin = tuple[int, int, int]
_LONGEST = 20
"""Operations after which it is no step before a projection."""


@dataclass(frozen=True)
class Projection:
    """A product with a parameter that gives heads, and the operations from it to the heads, in order."""

    op: Op
    path: tuple[Op, ...]
    earlier: tuple[Op, ...] = ()
    """The low-rank projections before it, in order."""


def projections_behind(
    graph: Graph, heads: Mapping[str, TensorRef], module: str, positions: Mapping[str, set[Axis]]
) -> dict[str, Projection]:
    """Return the projections of query, key and value; a side without a projection is absent.

    Args:
        graph: the dataflow.
        heads: the heads of queries, keys and values by stage name.
        module: path of the module that computes the scores.
        positions: the position axes of each side.
    """
    query = _projection(graph, heads["q_heads"], module, set()) if "q_heads" in heads else None
    if query is not None and graph.is_by_head(query.op):
        behind = _projection(graph, graph.projected(query.op), module, set(), outside=False)
        made = {atom for dim in graph.dimensions.of(query.op.output)[:1] for atom in wide(dim)}
        if behind is not None and made & {*graph.dimensions.of(behind.op.output)[-1]}:
            query = replace(behind, path=(*behind.path, query.op, *query.path))
    like = None if query is None else _origin(graph, query.op)
    nearest = {"query": query} | {
        name: _projection(graph, heads[f"{name[0]}_heads"], module, positions[name], like)
        for name in ("key", "value")
        if f"{name[0]}_heads" in heads
    }
    ends = {name: end for name, end in nearest.items() if end and not _is_a_step(graph, end, positions[name])}
    first: Origin | None = None
    for name, end in ends.items():
        ends[name] = replace(end, earlier=earlier_projections(graph, end.op, module, first))
        first = _origin(graph, (*ends[name].earlier, end.op)[0]) if name == "query" else first
    return ends


def with_projections(
    graph: Graph, heads: Mapping[str, TensorRef], ends: Mapping[str, Projection]
) -> dict[str, TensorRef]:
    """Return the stages up to the heads: the inputs of the projections, their results, and the heads."""
    given: dict[str, TensorRef] = {}
    same: dict[object, TensorRef] = {}
    for name, end in ends.items():
        op = end.earlier[0] if end.earlier else end.op
        source = graph.before_flattening(graph.before_call(op, graph.projected(op)), op.module)
        origin = graph.before_moves(source)
        given[name] = origin if origin.id in graph.recording.input_ids else source
        given[name] = same.setdefault(_gathered(graph, given[name]), given[name])
    projected = {f"{name[0]}_proj": _projected(graph, name, ends, heads[f"{name[0]}_heads"]) for name in ends}
    return {**given, **projected, **heads}


def _gathered(graph: Graph, tensor: TensorRef) -> object:
    """Return a key that is equal for tensors that each side gathers from all ranks for itself; else the tensor's id."""

    def passes(op: Op) -> bool:
        return op.kind == "view" or (op.does("joins") and len({read.storage for read in op.inputs}) == 1)

    op = graph.recording.producer(graph.before(tensor, passes))
    if op is None or not op.is_collective:
        return tensor.id
    return op.name, graph.before_moves(op.inputs[-1]).id, tensor.shape


def _passes(graph: Graph, op: Op) -> bool:
    """Return whether this operation may come between a projection and its heads."""
    if op.does("product"):
        return graph.is_by_table(op)
    passes = op.does("norms", "passes_on", "gathers", "pools") or graph.is_by_channel(op)
    return op.kind != "compute" or op.pointwise or passes


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
    nearest: Projection | None = None
    direct: Projection | None = None
    of_positions: Projection | None = None
    adapter: Projection | None = None
    adapted: Origin | None = None

    def through(op: Op) -> bool:
        return (outside or inside(op.module, module)) and (_passes(graph, op) or _gives(graph, op, positions))

    for step in graph.back(heads, through):
        op = graph.recording.producer(step.tensor)
        if op is None or not graph.is_projection(op) or not (outside or inside(op.module, module)):
            continue
        end = Projection(op, step.path[::-1])
        joined = any(passed.base_name == "cat" for passed in end.path)
        several = joined or _adds_activations(graph, end.path)
        is_apart = joined and like is None and not inside(op.module, module)  # e.g. the embedding of a class token
        chosen = joined and like is not None
        earlier = earlier_projections(graph, op, module, like) if chosen and op.does("product") else ()
        is_like = like is None or not several or _origin(graph, (*earlier, op)[0]) == like
        if _gives(graph, op, positions):
            of_positions = of_positions or end
        elif is_like and chosen and not earlier:
            direct = direct or end
        elif is_like and not is_apart and (nearest is None or several):
            low_rank = () if joined or not several else earlier_projections(graph, op, module, like)
            if adapter is None and not low_rank:
                return end
            if adapter is None:  # what it is added to may have a projection of its own
                adapter, adapted = end, _origin(graph, low_rank[0])
            elif not low_rank and _origin(graph, op) == adapted:
                return end
        else:
            nearest = nearest or end
    return adapter or direct or nearest or of_positions


def _is_a_step(graph: Graph, end: Projection, positions: set[Axis]) -> bool:
    """Return whether this projection gives one of several concatenated positions, as each step of a recurrence does."""
    for op in end.path:
        if op.base_name in ("cat", "stack") and len(op.inputs) > 2:
            joined = graph.dimensions.of(op.output)[setting(op, 1, "dim", 0) % len(op.output.shape)]
            if set(joined) & positions and graph.leads_to(op.inputs[0], op.inputs[1]):
                return True
    return False


def _gives(graph: Graph, op: Op, positions: set[Axis]) -> bool:
    """Return whether a projection gives positions instead of features."""
    mixing = mixing_of(graph, op) if positions else None
    given = set() if mixing is None else set(wide(graph.dimensions.of(op.output)[mixing.place]))
    return bool(given) and given <= positions


def _adds_activations(graph: Graph, path: Iterable[Op]) -> bool:
    """Return whether two tensors that depend on the inputs are added on this path."""
    added = (op for op in path if op.base_name.rstrip("_") == "add")
    return any(sum(map(graph.comes_from_inputs, op.inputs)) > 1 for op in added)


def earlier_projections(graph: Graph, op: Op, module: str, like: Origin | None = None) -> tuple[Op, ...]:
    """Return the low-rank projections before a projection, in the same module, in order.

    Where latents of an earlier call are joined with new ones, it is the projection with the input `like`.
    """
    earlier: list[Op] = []
    while (read := graph.projected(op)).shape[-1:] < op.output.shape[-1:]:
        end = _projection(graph, read, module, set(), like, outside=False)
        # A residual adds the output of another attention: its W_o is no step of this projection.
        if end is None or _adds_activations(graph, end.path) or read.shape[-1] >= graph.projected(end.op).shape[-1]:
            break
        op = end.op
        earlier.insert(0, op)
    return tuple(earlier)


def _projected(graph: Graph, name: str, ends: Mapping[str, Projection], heads: TensorRef) -> TensorRef:
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
    shared_ops = {op.index for side in sharing for op in side.path}
    made_at = graph.recording.producers.get(whole.id, -1)
    since_whole = [op for op in end.path if op.index > made_at]
    piece = whole
    for op, reader in _with_readers(_without_other_writes(since_whole, heads)):
        if not graph.moves(op):
            break
        read = _output_read(op, [heads] if reader is None else reader.inputs)
        if read.numel < piece.numel and _has_rows_of(whole, read, end.op):
            piece = read
        is_of_this_side = reader is None or reader.index not in shared_ops
        if piece is not whole and is_of_this_side:
            break
    return piece


def _without_other_writes(path: Sequence[Op], heads: TensorRef) -> list[Op]:
    """Return a path without writes into slices that have no part of the heads, and without these slices."""
    kept: list[Op] = []
    for op in path:
        target = op.inputs[0] if op.kind == "write" and op.inputs else None
        if target is None or target.storage != heads.storage or may_overlap(target, heads):
            kept.append(op)
        elif kept and kept[-1].outputs and kept[-1].output.id == target.id:
            kept.pop()
    return kept


def _joined_heads(graph: Graph, end: Projection) -> TensorRef | None:
    """Return the joined results of several projections of one input, e.g. one for each head; None for one projection.

    They are concatenated along the features, `batch position (heads head_dim)`, or stacked.
    """
    for op in end.path:
        if op.base_name not in ("cat", "stack") or len(op.inputs) < 2:
            continue
        projections = [_only_projection(graph, read) for read in op.inputs]
        if any(each is None or _origin(graph, each) != _origin(graph, end.op) for each in projections):
            return None
        if len({each.index for each in projections if each is not None}) < len(op.inputs):
            return None
        rank = len(op.output.shape)
        features = op.base_name == "cat" and setting(op, 1, "dim", 0) % rank == rank - 1
        is_flat = features and op.output.shape[:-1] == graph.after_projection(end.op).shape[:-1]
        are_alike = len({read.shape for read in op.inputs}) == 1
        return op.output if is_flat or are_alike else None
    return None


def _only_projection(graph: Graph, tensor: TensorRef) -> Op | None:
    """Return the projection that a tensor is the result of, with its bias, in any shape; None for anything else."""
    end = graph.before(tensor, lambda op: not graph.is_projection(op) and (graph.moves(op) or graph.adds_bias(op)))
    op = graph.recording.producer(end)
    return op if op is not None and graph.is_projection(op) else None


def _sides_sharing(name: str, ends: Mapping[str, Projection]) -> list[Projection]:
    """Return the other sides that come through the projection of this side, at once or through a low-rank one."""
    op = ends[name].op
    others = [other for side, other in ends.items() if side != name]
    return [other for other in others if op in (other.op, *other.earlier)]


def _with_readers(path: Sequence[Op]) -> Iterator[tuple[Op, Op | None]]:
    """Yield each operation of a path with the next one, which reads its result; None after the last."""
    readers: list[Op | None] = [*path[1:], None]
    return zip(path, readers, strict=False)


def _output_read(op: Op, read: Iterable[TensorRef]) -> TensorRef:
    """Return the output of `op` that is among the tensors `read`, as a split has one for each side; else the first."""
    ids = {tensor.id for tensor in read}
    for output in op.outputs:
        if output.id in ids:
            return output
    return op.output


def _has_rows_of(whole: TensorRef, part: TensorRef, projection: Op) -> bool:
    """Return whether only features are missing in a part: `batch position features`, not yet split into heads.

    The features of a convolution are in the second dimension: `batch features position`.
    """
    rank = len(whole.shape)
    if features_place(projection, rank) == -1:
        return len(part.shape) <= rank and part.shape[:-1] == whole.shape[:-1]
    return len(part.shape) == rank and part.shape[:1] == whole.shape[:1] and part.shape[2:] == whole.shape[2:]


def joined_projections(graph: Graph, own: Op, ops: Sequence[Op]) -> dict[int, set[int]]:
    """Return the projections that give heads of further tokens, joined with those of `own` along their positions.

    Each comes with the ids of the tensors that these operations make of it.
    """
    projections = [op for op in ops if op is not own and graph.is_projection(op) and not graph.is_weight(op.output)]
    made, own_ids = {op.index: made_of({op.output.id}, ops) for op in projections}, made_of({own.output.id}, ops)
    joined: dict[int, set[int]] = {}
    for op in projections:
        both = (each for each in ops if {t.id for t in each.inputs} & made[op.index] - own_ids)
        join = next((each for each in both if {t.id for t in each.inputs} & own_ids - made[op.index]), None)
        if join is not None and join.base_name == "cat" and own.output.id not in made[op.index]:
            rank = len(join.output.shape)
            if setting(join, 1, "dim", 0) % rank < rank - 1:
                joined[op.index] = made[op.index]
    outputs = {op.index: op.output.id for op in projections}
    return {
        index: ids
        for index, ids in joined.items()
        if not any(outputs[other] in ids for other in joined if other != index)  # a step before another
    }


def reduction_of(graph: Graph, attention: Attention, side: str) -> tuple[str, tuple[Op, ...]]:
    """Return what a query, key or value is computed from, `the query` or `the input`, and the operations, in order.

    Empty without a convolution or pooling in the module of the attention.
    """
    query, ops = attention.stages.get("query"), list[Op]()
    origin = None if query is None or side == "query" else graph.before_moves(query).id
    tensor: TensorRef | None = attention.stages.get(side)
    while tensor is not None:
        op = graph.recording.producer(tensor)
        is_query = graph.before_moves(tensor).id == origin
        if op is None or is_query or not inside(op.module, attention.module):
            reduces = any(passed.does("convolution", "pools") for passed in ops)
            return ("the query" if is_query else "the input", tuple(ops[::-1])) if reduces else ("", ())
        read = {each.id: each for each in op.inputs if graph.comes_from_inputs(each)}
        ops += [op] if op.kind == "compute" else []
        tensor = next(iter(read.values())) if len(read) == 1 and len(ops) < _LONGEST else None
    return "", ()
