"""Find convolutions and pooling that change the positions of queries, keys or values before their projection."""

from __future__ import annotations

from ..record.ops import Op, TensorRef
from .attention import Attention
from .dataflow import Graph, inside

_LONGEST = 20
"""Operations after which it is no step before a projection."""


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
