"""Find the output of an attention whose heads are projected one by one and then added up.

`sum(context[:, head] @ weight[:, columns_of(head)].T for head in heads) + bias` is the output; one term is none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..record.ops import Op, TensorRef
from .attention import Attention
from .dataflow import Graph, made_of


def with_summed_output(graph: Graph, attention: Attention) -> Attention:
    """Return an attention whose output is the sum over its heads, if these are projected apart.

    It has no output if the sum also has another term, e.g. the residual.
    """
    first = attention.projections.get("output")
    if first is None or attention.branches or attention.pieces:
        return attention
    terms = _projections_of(graph, attention.stages["context"], first)
    if len(terms) < 2 and not graph.is_by_head(first):
        return attention
    sum_of_terms = _sum_of(graph, terms)
    if sum_of_terms is None:
        return attention
    stages = {name: tensor for name, tensor in attention.stages.items() if name not in ("concat", "output")}
    if len(terms) == 1 and "concat" in attention.stages:
        stages["concat"] = attention.stages["concat"]
    if not sum_of_terms.has_others:
        stages["output"] = _with_bias(graph, sum_of_terms.result)
    return replace(attention, stages=stages, summed=tuple(terms) if len(terms) > 1 else ())


class _Sum(NamedTuple):
    """A sum, and whether it has terms that are other activations."""

    result: TensorRef
    has_others: bool


def _projections_of(graph: Graph, context: TensorRef, first: Op) -> list[Op]:
    """Return the projections, like the first one, of parts of a context that are only moved."""
    terms = {first.index: first}
    for op, _ in graph.forward(context, graph.moves):
        if graph.is_projection(op) and op.output.shape == first.output.shape:
            terms[op.index] = op
    return [terms[index] for index in sorted(terms)]


def _sum_of(graph: Graph, terms: list[Op]) -> _Sum | None:
    """Return the sum of the results of projections; None if they are not added up.

    One projection of all heads, as a product for each, is summed over the heads.
    """
    ops = [op for op in graph.recording.ops if op.index > terms[0].index and _adds(graph, op)]
    made_from = [made_of({op.output.id}, ops) for op in terms]
    made_from_any = set[int]().union(*made_from)
    has_others, is_joined = False, len(terms) == 1
    for op in ops:
        others = [tensor for tensor in op.inputs if tensor.id not in made_from_any]
        if len(others) == len(op.inputs):
            continue
        if op.base_name.rstrip("_") == "add":
            has_others |= any(graph.comes_from_inputs(tensor) and not _is_zeros(graph, tensor) for tensor in others)
        if not all(op.output.id in made for made in made_from):
            continue
        is_joined |= op.does("joins")
        if op.base_name == "sum" if is_joined else op.base_name.rstrip("_") == "add":
            return _Sum(op.output, has_others)
    return None


def _is_zeros(graph: Graph, tensor: TensorRef) -> bool:
    """Return whether this is a new tensor of zeros, to which the terms are added in place."""
    op = graph.recording.producer(graph.before_moves(tensor))
    return op is not None and op.base_name in ("zeros", "zeros_like", "new_zeros", "zero_")


def _adds(graph: Graph, op: Op) -> bool:
    """Return whether a sum passes through this: it moves, joins or adds tensors."""
    return graph.moves(op) or op.does("joins") or op.base_name.rstrip("_") in ("add", "sum")


def _with_bias(graph: Graph, added: TensorRef) -> TensorRef:
    """Return a sum with the bias that is added to it, if there is one."""
    with_bias = graph.after(added, lambda reader: True, lambda reader: graph.moves(reader) or graph.adds_bias(reader))
    op = graph.recording.producer(with_bias)
    return with_bias if op is not None and graph.adds_bias(op) else added
