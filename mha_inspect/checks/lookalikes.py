"""Say in one sentence what a run without softmax(QKᵀ)V has of it, as the dataflow shows.

q @ (k.mT @ v)                       # linear attention: no score of a query and a key is ever computed
(q[..., None] * k).softmax(-1)       # the products of the features are never summed: each attends alone
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..graph.axis import setting
from ..graph.rerun import between
from ..record.ops import Op, TensorRef
from ..running.subject import Run

_MOST_PRODUCTS = 64
"""The largest number of products of activations to look at."""


def found_instead(run: Run) -> str:
    """Return what is there of an attention, as a sentence; empty if nothing is, or an attention was found."""
    if run.attentions:
        return ""
    return _without_sum(run) or _weights(run) or _products_in_a_row(run)


def _without_sum(run: Run) -> str:
    """Return the sentence of a softmax whose scores are a query times keys, feature by feature, without the sum."""
    graph, recording = run.graph, run.recording
    for softmax in recording.ops:
        if not softmax.does("softmax") or not softmax.inputs:
            continue
        multiply = recording.producer(graph.before_moves(softmax.inputs[0]))
        if multiply is None or multiply.base_name.rstrip("_") != "mul" or len(multiply.inputs) < 2:
            continue
        # One query stands beside all of its keys, which the softmax runs over.
        sizes = {tensor.shape[-1:] for tensor in multiply.inputs}
        if len(sizes) < 2 or (1,) not in sizes or not graph.comes_from_inputs(*multiply.inputs):
            continue
        return (
            f"Found instead: a softmax of queries times keys, element by element ({multiply.source}). The product is "
            "never summed over the features, so each feature attends alone."
        )
    return ""


def _weights(run: Run) -> str:
    """Return the sentence of weights of a few keys each that sum to one, made of a product of activations."""
    recording = run.recording
    for product in run.recording.ops:
        content = recording.values.get(product.inputs[0].id) if product.inputs else None
        if content is None or content.is_nested or content.dim() < 3 or len(product.inputs) < 2:
            continue
        if not product.does("product") or not _is_of_activations(run, product) or not _sums_to_one(content, (-1,)):
            continue
        made_of = [op for op in recording.ops[: product.index] if op.does("product") and _is_of_activations(run, op)]
        if not any(between(recording, {op.output.id}, product.inputs[0]) for op in made_of):
            continue
        counts = (content != 0).sum(-1)
        fewest, most, keys = int(counts.min()), int(counts.max()), content.shape[-1]
        if most == keys:
            continue
        seen = str(most) if fewest == most else f"{fewest} to {most}"
        return (
            f"Found instead: weights that sum to 1 and no softmax over all keys ({product.source}): each query gives "
            f"weight to {seen} of {keys} keys."
        )
    return ""


def _is_of_activations(run: Run, op: Op) -> bool:
    return len(op.inputs) > 1 and run.graph.comes_from_inputs(*op.inputs[-2:])


def _products_in_a_row(run: Run) -> str:
    """Return the sentence of two products of activations with nothing between them that sums to one."""
    graph = run.graph
    products = []
    for op in run.recording.ops:
        factors = op.inputs[-2:]
        if op.does("product") and len(factors) == 2 and graph.comes_from_inputs(*factors):
            products.append(op)
    if len(products) > _MOST_PRODUCTS:
        return ""
    for place, first in enumerate(products):
        for second in products[place + 1 :]:
            softmax = _softmax_between(run, first, second)
            if softmax is not None:
                over = setting(softmax, 1, "dim")
                return (
                    f"Found instead: a softmax over dimension {over} of {list(softmax.output.shape)}, between two "
                    f"products ({softmax.source}). Attention needs it over the keys of each query."
                )
            if any(_follows(run, first, factor) for factor in second.inputs[-2:]):
                return (
                    "Found instead: two products of activations in a row, "
                    f"{first.base_name} {list(first.output.shape)} at {first.source} and "
                    f"{second.base_name} {list(second.output.shape)} at {second.source}. "
                    "Nothing between them sums to 1, as in linear attention."
                )
    return ""


def _softmax_between(run: Run, first: Op, second: Op) -> Op | None:
    """Return the softmax over another dimension than the last on a way between two products; None without one."""
    for factor in second.inputs[-2:]:
        for op in between(run.recording, {first.output.id}, factor):
            over = setting(op, 1, "dim") if op.does("softmax") else None
            if over is not None and over not in (-1, len(op.output.shape) - 1):
                return op
    return None


def _follows(run: Run, first: Op, factor: TensorRef) -> bool:
    """Return whether a factor is computed from a product, and no product and nothing that sums to one is between."""
    steps = between(run.recording, {first.output.id}, factor)
    if not steps and factor.id != first.output.id:
        return False
    for op in [first, *steps]:
        contents = [run.recording.values.get(tensor.id) for tensor in op.outputs]
        if op is not first and op.does("product"):
            return False
        if any(content is None or _may_sum_to_one(content) for content in contents):
            return False
    return True


def _may_sum_to_one(content: Tensor) -> bool:
    """Return whether numbers are weights over their last dimension, or over the last two."""
    return _sums_to_one(content, (-1,)) or _sums_to_one(content, (-2, -1))


def _sums_to_one(content: Tensor, over: tuple[int, ...]) -> bool:
    """Return whether numbers are weights over these dimensions."""
    is_plain = content.layout is torch.strided and not content.is_nested and not content.is_meta
    if not is_plain or not content.is_floating_point() or content.dim() < 2 or bool((content < 0).any()):
        return False
    sums = content.detach().double().sum(over)
    return sums.numel() < content.numel() and float((sums - 1).abs().max()) < 1e-3
