"""Find the output of an attention whose heads are projected one by one and then added up.

`sum(context[:, head] @ weight[:, columns_of(head)].T for head in heads) + bias` is the output; one term is none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..record.ops import Op, TensorRef
from .attention import Attention
from .axis import plain_name
from .dataflow import Graph, made_of
from .ids import in_order


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
    stages = dict(attention.stages)
    stages.pop("output", None)
    if len(terms) > 1:
        stages.pop("concat", None)
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
    return in_order(terms)


def _sum_of(graph: Graph, terms: list[Op]) -> _Sum | None:
    """Return the sum of the results of projections; None if they are not added up.

    One projection of all heads, as a product for each, is summed over the heads.
    """
    later = graph.recording.ops[terms[0].index + 1 :]
    ops = [op for op in later if _adds(graph, op)]
    of_terms = [made_of({op.output.id}, ops) for op in terms]
    of_any = set.union(*of_terms)
    of_all = set.intersection(*of_terms)
    has_others = False
    is_joined = len(terms) == 1
    for op in ops:
        others = [tensor for tensor in op.inputs if tensor.id not in of_any]
        if len(others) == len(op.inputs):
            continue
        is_addition = plain_name(op) == "add"
        if is_addition and any(_is_activation(graph, tensor) for tensor in others):
            has_others = True
        if op.output.id not in of_all:
            continue
        is_joined = is_joined or op.does("joins")
        if is_joined:
            is_addition = op.base_name == "sum"
        if is_addition:
            return _Sum(op.output, has_others)
    return None


def _is_activation(graph: Graph, tensor: TensorRef) -> bool:
    """Return whether a tensor depends on an input, and is not a new tensor of zeros."""
    return graph.comes_from_inputs(tensor) and not _is_zeros(graph, tensor)


def _is_zeros(graph: Graph, tensor: TensorRef) -> bool:
    """Return whether this is a new tensor of zeros, to which the terms are added in place."""
    op = graph.producer(graph.before_moves(tensor))
    return op is not None and op.base_name in ("zeros", "zeros_like", "new_zeros", "zero_")


def _adds(graph: Graph, op: Op) -> bool:
    """Return whether a sum passes through this: it moves, joins or adds tensors."""
    if plain_name(op) in ("add", "sum"):
        return True
    return graph.moves(op) or op.does("joins")


def _with_bias(graph: Graph, added: TensorRef) -> TensorRef:
    """Return a sum with the bias that is added to it, if there is one."""

    def through(reader: Op) -> bool:
        return graph.moves(reader) or graph.adds_bias(reader)

    with_bias = graph.after(added, lambda reader: True, through)
    op = graph.producer(with_bias)
    return with_bias if op is not None and graph.adds_bias(op) else added
