"""Say in one sentence what a run without softmax(QKᵀ)V has of it, as the dataflow shows.

q @ (k.mT @ v)                       # linear attention: no score of a query and a key is ever computed
(q @ k.mT).softmax(1) @ v            # a softmax over another dimension than the keys
"""

from __future__ import annotations

from itertools import combinations

from ..graph.axis import setting
from ..graph.rerun import between
from ..record.ops import Op
from ..running.subject import Run

_MOST_PRODUCTS = 64
"""The largest number of products of activations to look at."""


def found_instead(run: Run) -> str:
    """Return what two products of activations in a row are, as a sentence; empty without them, or with an attention."""
    products = [] if run.attentions else _products(run)
    if len(products) > _MOST_PRODUCTS:
        return ""
    for first, second in combinations(products, 2):
        for factor in second.inputs[-2:]:
            steps = between(run.recording, {first.output.id}, factor)
            if not steps and factor.id != first.output.id:
                continue
            softmaxes = [op for op in steps if op.does("softmax")]
            elsewhere = [op for op in softmaxes if not _is_over_the_last(op)]
            if elsewhere:
                return _with_softmax(elsewhere[0])
            if not softmaxes and not any(op.does("product") for op in steps):
                return _without_softmax(first, second)
    return ""


def _products(run: Run) -> list[Op]:
    """Return the products of two factors that are both computed from inputs."""
    products = []
    for op in run.recording.ops:
        factors = op.inputs[-2:]
        if op.does("product") and len(factors) == 2 and run.graph.comes_from_inputs(*factors):
            products.append(op)
    return products


def _is_over_the_last(softmax: Op) -> bool:
    return setting(softmax, 1, "dim") in (-1, len(softmax.output.shape) - 1)


def _with_softmax(softmax: Op) -> str:
    over = setting(softmax, 1, "dim")
    return (
        f"Found instead: a softmax over dimension {over} of {list(softmax.output.shape)}, between two products "
        f"({softmax.source}). Attention needs it over the keys of each query."
    )


def _without_softmax(first: Op, second: Op) -> str:
    return (
        f"Found instead: two products of activations in a row, {first.base_name} {list(first.output.shape)} at "
        f"{first.source} and {second.base_name} {list(second.output.shape)} at {second.source}. No softmax is between "
        "them, as in linear attention."
    )
