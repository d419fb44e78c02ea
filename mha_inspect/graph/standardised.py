"""Recognise scores that are combined with a statistic of themselves, as a norm in several operations does.

    centred = scores - scores.mean(-1, keepdim=True)            # batch heads query key
    weights = (centred / scores.std(-1, keepdim=True)).softmax(-1)

The mean and the deviation are computed from the scores, so they are no bias and no mask.
"""

from __future__ import annotations

from ..record.ops import Op, TensorRef
from .axis import plain_name
from .dataflow import Graph

_SIGNS = {"add": "+", "sub": "-", "mul": "·", "div": "/"}
_INVERSES = {"·": "/", "/": "·"}
_DEVIATIONS = ("std", "std_mean", "var", "var_mean")
_STATISTICS = {
    **dict.fromkeys(("amax", "max"), "max"),
    **dict.fromkeys(("amin", "min"), "min"),
    **dict.fromkeys(_DEVIATIONS, "std"),
    "mean": "mean",
    "median": "median",
    "sum": "sum",
    "linalg_vector_norm": "norm",
}
"""The name of an operation to the statistic that it gives."""
_OF_SQUARES = {"mean": "rms", "sum": "norm"}
"""The name of a statistic to that of its root."""
_ROOTS = ("sqrt", "rsqrt")


def statistic_step(graph: Graph, op: Op, scores: TensorRef) -> str:
    """Return how an operation combines scores with a statistic of them: `- mean`, `/ std`; empty for anything else.

    Args:
        graph: the dataflow.
        op: an operation on the way from the scores to the softmax.
        scores: the result of the product of queries and keys.
    """
    name = plain_name(op)
    if name not in _SIGNS or len(op.inputs) != 2:
        return ""
    operand = graph.before_repeats(op.inputs[1])
    if operand.numel >= op.output.numel:
        return ""
    names = []
    statistics = set()
    for passed, output in _path_from(graph, scores, operand):
        names.append(plain_name(passed))
        statistics.add(_statistic_of(passed, output))
    statistics.discard("")
    if not statistics:
        return ""
    sign = _SIGNS[name]
    if names.count("rsqrt") + names.count("reciprocal") == 1:
        sign = _INVERSES.get(sign, sign)
    return f"{sign} {_combined(statistics, has_root=any(root in names for root in _ROOTS))}"


def _statistic_of(op: Op, output: TensorRef) -> str:
    """Return the statistic that an operation gives in this output; empty for other operations."""
    if op.base_name in ("std_mean", "var_mean") and output.id != op.output.id:
        return "mean"
    return _STATISTICS.get(op.base_name, "")


def _combined(statistics: set[str], *, has_root: bool) -> str:
    """Return the name of a statistic; `…` for a combination of several."""
    if "std" in statistics:
        return "std"
    if len(statistics) > 1:
        return "…"
    (statistic,) = statistics
    return _OF_SQUARES.get(statistic, statistic) if has_root else statistic


def _path_from(
    graph: Graph,
    scores: TensorRef,
    tensor: TensorRef,
) -> list[tuple[Op, TensorRef]]:
    """Return the operations between the scores and a tensor, without products, each with the output that is read.

    Empty if the tensor does not depend on the scores.
    """
    steps: list[tuple[Op, TensorRef]] = []
    depends = False

    def through(op: Op) -> bool:
        return not op.does("product") and op.index not in graph.softmaxes

    for step in graph.back(tensor, through):
        op = graph.producer(step.tensor)
        if step.tensor.id == scores.id:
            depends = True
        elif op is not None:
            steps.append((op, step.tensor))
    return steps if depends else []
