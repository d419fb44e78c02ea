"""Find gates: factors of the contexts, or of queries, keys or values, that are projected from an input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from ..record.ops import Op, TensorRef
from .dataflow import Graph, made_of


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
        functions = (op for op in self.steps if op.kind == "compute" and op.pointwise and len(op.inputs) == 1)
        names = [op.base_name.rstrip("_") for op in functions if not op.does("copies", "scales")]
        return f"gate ({', '.join(names)})" if names else "gate"


def gates_of(graph: Graph, gated: Iterable[TensorRef], ops: Iterable[Op]) -> Iterator[Gate]:
    """Yield the gates that these operations multiply tensors by, or what is made of them."""
    made = sorted(ops, key=lambda op: op.index)
    derived = made_of((tensor.id for tensor in gated), made)
    for op in made:
        factors = [tensor for tensor in op.inputs if tensor.id not in derived]
        if op.base_name.rstrip("_") != "mul" or len(op.inputs) != 2 or len(factors) != 1:
            continue
        projections: dict[int, Op] = {}
        steps: dict[int, Op] = {}
        for step in graph.back(factors[0], partial(_passes, graph)):
            maker = graph.recording.producer(step.tensor)
            if maker is not None and graph.is_projection(maker) and graph.comes_from_inputs(graph.projected(maker)):
                projections[maker.index] = maker
                steps |= {passed.index: passed for passed in step.path}
        if projections:
            yield Gate(op, factors[0], tuple(projections.values()), tuple(steps[index] for index in sorted(steps)))


def _passes(graph: Graph, op: Op) -> bool:
    return not graph.is_projection(op) and (op.kind != "compute" or op.pointwise or op.does("norms"))
