"""Say what a run without softmax(QKᵀ)V has of it: weights without values, or products in a row without a softmax.

    softmax(q @ k.mT)                    # weights that nothing multiplies by values, as in DETR's MHAttentionMap
    q @ (k.mT @ v)                       # linear attention: no score of a query and a key is ever computed

Both show in the dataflow and the numbers of the run: in products of two activations, and tensors that sum to one.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..graph.rerun import between
from ..record.ops import Op
from ..running.subject import Run

_NEAR = 1e-3
"""Sums this near to one are one: of weights in a coarse dtype too."""
_MOST_PRODUCTS = 64
"""The largest number of products of activations to look at."""


def found_instead(run: Run) -> str:
    """Return what is there of an attention, as a sentence; empty if nothing is, or an attention was found."""
    if run.attentions:
        return ""
    products = _products(run)
    if not products or len(products) > _MOST_PRODUCTS:
        return ""
    return next(_weights_alone(run, products), "") or next(_without_weights(run, products), "")


def _products(run: Run) -> list[Op]:
    """Return the products of two tensors that both depend on the inputs, and are no parameter."""
    graph = run.graph
    products = []
    for op in run.recording.ops:
        factors = op.inputs[-2:]
        if not op.does("product") or graph.is_projection(op) or len(factors) < 2:
            continue
        if graph.comes_from_inputs(*factors):
            products.append(op)
    return products


def _weights_alone(run: Run, products: list[Op]) -> Iterator[str]:
    """Yield returned weights of which nothing makes an average of values."""
    recording = run.recording
    for named in recording.outputs:
        content = recording.values.get(named.tensor.id)
        over = "" if content is None else _sums_to_one(content)
        if not over:
            continue
        for product in products:
            steps = between(recording, {product.output.id}, named.tensor)
            if not steps or _have_product(steps):
                continue
            name = f" {named.name}" if named.name else ""
            yield (
                f"Found instead: weights without values. Output{name} {list(named.tensor.shape)} sums to 1 over "
                f"{over}, comes from the product of two activations at {product.source}, and is returned without "
                "a product with values."
            )


def _sums_to_one(content: Tensor) -> str:
    """Return over which dimensions the weights of each query sum to one, in words; empty if over none."""
    if not content.is_floating_point() or content.is_meta:
        return ""
    if content.dim() < 2 or not content.numel():
        return ""
    numbers = content.detach().double()
    if not bool((numbers >= 0).all()):
        return ""
    for count in range(1, min(content.dim() - 1, 3) + 1):
        sums = numbers.sum(tuple(range(-count, 0)))
        if float((sums - 1).abs().max()) < _NEAR and numbers.shape[-count:].numel() > 1:
            return "its last dimension" if count == 1 else f"its last {count} dimensions"
    return ""


def _without_weights(run: Run, products: list[Op]) -> Iterator[str]:
    """Yield two products of activations in a row, with nothing that sums to one between them."""
    for first in products:
        for second in products:
            steps = [] if second is first else _steps_between(run, first, second)
            if not steps or _may_have_weights(run, steps):
                continue
            yield (
                f"Found instead: two products of activations in a row, {first.base_name} {list(first.output.shape)} at "
                f"{first.source} and {second.base_name} {list(second.output.shape)} at {second.source}. "
                "Nothing between them sums to 1, as in linear attention."
            )


def _may_have_weights(run: Run, steps: list[Op]) -> bool:
    """Return whether a result of these operations sums to one, or is not there to be summed."""
    for op in steps:
        for tensor in op.outputs:
            content = run.recording.values.get(tensor.id)
            if content is None or _sums_to_one(content):
                return True
    return False


def _have_product(steps: list[Op]) -> bool:
    return any(op.does("product") for op in steps)


def _steps_between(run: Run, first: Op, second: Op) -> list[Op]:
    """Return the operations from one product to a factor of a later one, and the first product itself; else empty."""
    for factor in second.inputs[-2:]:
        if factor.id == first.output.id:
            return [first]
        steps = between(run.recording, {first.output.id}, factor)
        if steps and not _have_product(steps):
            return [first, *steps]
    return []
