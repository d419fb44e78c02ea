"""Find gates: factors of the contexts, or of queries, keys or values, that are projected from an input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from ..record.ops import Op, TensorRef
from .axis import plain_name
from .dataflow import Graph, made_of
from .ids import ids_of, in_order


@dataclass(frozen=True)
class Gate:
    """A multiplication by a projection that has no other part in the attention."""

    op: Op
    """The multiplication."""
    factor: TensorRef
    projections: tuple[Op, ...]
    """The last projections behind the factor."""
    steps: tuple[Op, ...]
    """The operations from there to the factor, in order."""

    @property
    def name(self) -> str:
        """`gate (sigmoid)`: the functions of the projection that the tensor is multiplied by."""
        names = []
        for op in self.steps:
            is_function = op.kind == "compute" and op.pointwise and len(op.inputs) == 1
            if is_function and not op.does("copies", "scales"):
                names.append(plain_name(op))
        return f"gate ({', '.join(names)})" if names else "gate"


def gates_of(
    graph: Graph,
    gated: Iterable[TensorRef],
    ops: Iterable[Op],
) -> Iterator[Gate]:
    """Yield the gates that these operations multiply tensors by, or what is made of them."""
    run = sorted(ops, key=lambda op: op.index)
    derived = made_of(ids_of(gated), run)
    for op in run:
        if plain_name(op) != "mul" or len(op.inputs) != 2:
            continue
        factors = [tensor for tensor in op.inputs if tensor.id not in derived]
        gate = _gate(graph, op, factors[0]) if len(factors) == 1 else None
        if gate is not None:
            yield gate


def _gate(graph: Graph, op: Op, factor: TensorRef) -> Gate | None:
    """Return a multiplication by a factor as a gate; None if the factor is not projected from an input."""
    projections: dict[int, Op] = {}
    steps: dict[int, Op] = {}
    for step in graph.back(factor, partial(_passes, graph)):
        maker = graph.producer(step.tensor)
        if maker is None or not graph.is_projection(maker):
            continue
        if graph.comes_from_inputs(graph.projected(maker)):
            projections[maker.index] = maker
            steps.update((passed.index, passed) for passed in step.path)
    if not projections:
        return None
    return Gate(op, factor, tuple(projections.values()), tuple(in_order(steps)))


def _passes(graph: Graph, op: Op) -> bool:
    if graph.is_projection(op):
        return False
    return op.kind != "compute" or op.pointwise or op.does("norms")
