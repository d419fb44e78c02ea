"""Read the attentions of fused kernels: a kernel says what its queries, keys, values, scale and bias are.

    F.scaled_dot_product_attention(q, k, v, is_causal=True)

is recorded as its steps, which are named after their stages, so nothing has to be searched for or measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..record.kernels import Places
from ..record.ops import Op
from .dataflow import Graph
from .products import KernelScores, Product, ProductPath
from .reading import Reading, Scoring, Softmax


def readings_of_kernels(graph: Graph) -> Iterator[Reading]:
    """Yield the attention of each fused kernel that was opened, in order."""
    for op in graph.recording.ops:
        if op.base_name == "attention_context" and op.is_step:
            yield _reading(graph, op)


def _reading(graph: Graph, context: Op) -> Reading:
    """Return the attention of a kernel, from the last of its steps."""
    weights, value = context.inputs
    softmax = _maker(graph, context)
    masked = softmax.inputs[0]
    before = _maker(graph, softmax)
    masks: list[Op] = []
    product = before
    if before.base_name == "attention_mask":
        masks.append(before)
        product = _maker(graph, before)
    scores = product.output
    scale = float(product.kwargs["scale"])
    return Reading(
        softmax=Softmax(softmax, masked, len(masked.shape) - 1),
        scores=ProductPath(KernelScores(product, product, *product.inputs), (), scores),
        values=ProductPath(Product(context, context, weights, value), (), weights),
        scoring=Scoring(
            scores=scores,
            masked=masked,
            scale=scale,
            late_scale=1.0,
            masks=masks,
            mixed=[],
            steps=[("add", None) for _ in masks],
        ),
        factor=scale,
        seen=None,
    )


def _maker(graph: Graph, op: Op) -> Op:
    """Return the step that makes the first operand of a step."""
    maker = graph.producer(op.inputs[0])
    assert maker is not None
    return maker


def places_of(op: Op) -> Places:
    """Return which keys a step of a fused kernel masks out by their positions; none for any other operation."""
    return Places(**op.kwargs) if op.is_step and op.base_name == "attention_mask" else Places()
