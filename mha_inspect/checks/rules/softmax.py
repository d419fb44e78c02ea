"""Faults between scores and weights: the scale, and a softmax over the wrong axis, or applied twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod

from torch import Tensor

from ...compare.replay import content_of
from ...graph.attention import Attention
from ...graph.axis import setting
from ...graph.rerun import between
from ...graph.rules import reduced_places
from ...naming.axes import AxisNames
from ...naming.pattern import dims_of
from ...naming.stage_facts import StageFacts
from ...record.ops import Op
from ...reports.check import Finding
from ...text import shape, shortened, spans
from ..each_kind import of_each_kind
from ..evidence import Evidence
from ..factors import NotHereError
from ..probe import moved_rows
from ..registry import rule
from .masking import is_zero_one

_OVER_KEYS = "Apply softmax over the keys: dim=-1 of scores with axes query key."
"""How to fix a softmax over another axis."""


@rule()
def softmax(evidence: Evidence) -> Iterator[Finding]:
    """The weights sum to 1 over the axis that the values are averaged over.

    Nothing is changed: the weights of one run are summed over the axis that the values are averaged
    over. Each sum must be 1. With a softmax over the queries, as here, each query depends on the other
    queries. Under a causal mask the future then leaks, and generation token by token gives other
    outputs than training did.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention
    from torch import nn


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
            weights = (q @ k.mT / 8**0.5).softmax(-2)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
    ```

    ## Right

    ```diff
    -        weights = (q @ k.mT / 8**0.5).softmax(-2)
    +        weights = (q @ k.mT / 8**0.5).softmax(-1)
    ```
    """
    yield from lone_softmaxes(evidence)
    faults = list(_softmax(evidence))
    yield from faults or _by_other_queries(evidence)


@partial(of_each_kind, "")
def _by_other_queries(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a suspicion if one query changes the weights of another, as `scores / scores.max()` does."""
    rows = moved_rows(evidence, attention, names)
    if len(rows.moved) < 2:
        return
    yield Finding(
        "softmax",
        "The weights of one query depend on the other queries.",
        f"Changing query {rows.changed} alone changes the weights of queries {shortened(spans(rows.moved), 40)}.",
        sure=False,
        source=attention.score_product.op.source,
        fix="Take the max, mean or norm of scores over the keys alone: dim=-1 of scores with axes query key.",
    )


def _other_sum(divided: Op, lowest: float, highest: float) -> Finding:
    """Return the fault of exponentials that are divided, after their product with the values, by another sum."""
    return Finding(
        "softmax",
        "The weights do not sum to 1: exp(scores) · values is divided by something other than the sum of exp(scores).",
        f"On random scores, with all values 1, the result is between {lowest:.3g} and {highest:.3g}; expected 1.",
        source=divided.source,
        fix="Mask and rescale exp(scores) · values and the sum of exp(scores) alike; sum over the keys.",
    )


@partial(of_each_kind, "the weights are not a plain softmax times the values (e.g. sinks, mixed heads, dropout)")
def _softmax(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    if attention.divided is not None and attention.average_of_ones is not None:
        yield _other_sum(attention.divided, *attention.average_of_ones)
        return
    if any(op.base_name == "_log_softmax" for op in attention.weighing):
        yield _logarithms(attention)
        return
    if not _is_plain(evidence, attention) or names.maps > 1:  # a head may subtract one map of weights from another
        raise NotHereError
    final = _averaging(evidence, attention)
    sums = final.sums_over_keys()
    if not sums.numel() or final.keys < 2 or _are_one(sums):
        return
    yield _unlike_one(evidence, attention, names, final, sums)


def _logarithms(attention: Attention) -> Finding:
    return Finding(
        "softmax",
        "The weights are logarithms: log_softmax stands in the place of softmax.",
        "Logarithms of weights are 0 or less, and do not sum to 1.",
        source=attention.weighing[0].source,
        module=attention.module,
        fix="Use softmax(dim=-1).",
    )


def _is_plain(evidence: Evidence, attention: Attention) -> bool:
    """Return whether the weights are a softmax of the scores that meets the values, without sinks or dropout."""
    if attention.weighing or attention.sinks or attention.divided or attention.mixed_weights:
        return False
    return not StageFacts(evidence.run.graph, attention, {}).drops()


def _unlike_one(evidence: Evidence, attention: Attention, names: AxisNames, final: _Averaging, sums: Tensor) -> Finding:
    """Return why the weights of a query do not sum to one."""
    lowest, highest = float(sums.min()), float(sums.max())
    proof = f"The weights of a query sum to between {lowest:.3g} and {highest:.3g}; expected 1."
    if final.sum_to_one_over_queries() and (attention.over_queries or not attention.weights_changed):
        return _over_queries(attention, proof)
    masking = [op for op in attention.weights_path if _may_mask(op)]
    if masking and highest < 1.02 and _is_masked(evidence, attention, masking):
        return _masked_afterwards(masking[-1], proof)
    changing = masking or _computing(attention)
    if changing:
        return _changed_at(changing[-1], proof)
    if attention.weights_changed or evidence.content(attention.softmax.output) is None:
        return _changed_at(attention.softmax, proof)
    return _over_another_axis(attention, names, proof)


def _computing(attention: Attention) -> list[Op]:
    """Return the steps after the softmax that compute other numbers."""
    steps = attention.weights_path
    return [op for op in steps if op.kind == "compute" and op.base_name != "_to_copy"]


def _over_queries(attention: Attention, proof: str) -> Finding:
    return Finding(
        "softmax",
        "The softmax runs over the queries instead of the keys: the weights of a query do not sum to one.",
        f"{proof} Over the queries, they sum to 1.",
        source=attention.softmax.source,
        fix=f"{_OVER_KEYS} Or transpose the weights before their product with the values, if the softmax is as meant.",
    )


def _masked_afterwards(mask: Op, proof: str) -> Finding:
    return Finding(
        "softmax",
        "The mask is applied after the softmax: masked keys take a share of the weight, and the rest does not sum "
        "to one.",
        proof,
        source=mask.source,
        fix="Mask the scores with -inf before the softmax.",
    )


def _over_another_axis(attention: Attention, names: AxisNames, proof: str) -> Finding:
    axis = _axis_of_softmax(attention, names)
    return Finding(
        "softmax",
        f"The softmax runs over {axis} instead of the keys: the weights of a query do not sum to one.",
        proof,
        source=attention.softmax.source,
        fix=_OVER_KEYS,
    )


def _changed_at(op: Op, proof: str) -> Finding:
    return Finding(
        "softmax",
        "The weights are changed after the softmax and do not sum to one. The change may be intended.",
        proof,
        sure=False,
        source=op.source,
    )


def _may_mask(op: Op) -> bool:
    """Return whether a step after the softmax multiplies or fills the weights, or takes a triangle of them."""
    if _is_triangle(op):
        return True
    return op.does("scales", "masks", "fills") and op.kind not in ("view", "copy")


@dataclass(frozen=True)
class _Averaging:
    """The weights that meet the values, as a factor of their product."""

    weights: Tensor
    over: tuple[int, ...]
    """The dimensions of the keys."""
    queries: int | None
    """The dimension of the queries in a matrix product; None for a broadcast multiplication and a sum."""

    @property
    def keys(self) -> int:
        """The number of keys."""
        return prod(self.weights.shape[place] for place in self.over)

    def sums_over_keys(self) -> Tensor:
        """Return the sum of the weights of each query."""
        return _sums(self.weights, self.over)

    def sum_to_one_over_queries(self) -> bool:
        """Return whether the weights of each key sum to one."""
        return self.queries is not None and _are_one(_sums(self.weights, (self.queries,)))


def _averaging(evidence: Evidence, attention: Attention) -> _Averaging:
    """Return the weights that meet the values. Raise `LostError` if they were not kept, or there is one key."""
    product = attention.value_product
    if product.op is product.multiply and not product.op.does("product"):
        raise NotHereError  # nothing is summed
    by_right = attention.value_first
    weights = content_of(evidence, product.right if by_right else product.left)
    if product.multiply.does("product"):
        over, queries = (-2, -1) if by_right else (-1, -2)
        return _Averaging(weights, (over,), queries if weights.dim() > 1 else None)
    # A factor that is broadcast has all of the dimensions that are summed.
    missing = len(product.multiply.output.shape) - weights.dim()
    return _Averaging(weights, tuple(place - missing for place in reduced_places(product.op)), None)


def _axis_of_softmax(attention: Attention, names: AxisNames) -> str:
    """Return what a softmax over no keys, or not over them alone, runs over."""
    dims, result = dims_of(names.of_stage("weights")), attention.softmax.output
    words = dims[attention.softmax_dim] if len(dims) == len(result.shape) else []
    if "query" in words and "key" in words:
        return "queries and keys together"
    return "heads or batch items" if prod(result.shape[:-2]) > 1 else "another axis"


def _sums(weights: Tensor, over: tuple[int, ...]) -> Tensor:
    """Return the sums of rows that have keys, without what is NaN."""
    numbers = weights.double().nan_to_num(0.0)
    return numbers.sum(over)[(numbers != 0).sum(over) > 0]


def _are_one(sums: Tensor) -> bool:
    return bool(sums.numel()) and float((sums - 1).abs().max()) < 0.02


def _is_masked(evidence: Evidence, attention: Attention, through: list[Op]) -> bool:
    """Return whether an operation multiplies by zeros and ones, or fills in zeros, independently of the weights."""
    recording, weights = evidence.run.recording, attention.softmax.output.id
    for op in through:
        if _is_triangle(op):
            return True
        for tensor in op.inputs:
            if is_zero_one(evidence.content(tensor)) and not between(recording, {weights}, tensor):
                return True
    return False


def _is_triangle(op: Op) -> bool:
    return op.base_name.rstrip("_") in ("tril", "triu")


def lone_softmaxes(evidence: Evidence) -> Iterator[Finding]:
    """Yield faults of softmaxes that form no attention: of the weights of another softmax, or of single scores."""
    graph, recording = evidence.run.graph, evidence.run.recording
    of_attentions = _softmaxes_of_attentions(evidence)
    lines = set[str]()
    for op in recording.ops:
        if not op.does("softmax") or op.index in of_attentions:
            continue
        first = recording.producer(graph.before(op.inputs[0], _passes))
        if first is not None and first.does("softmax") and op.source not in lines:
            lines.add(op.source)
            yield _applied_twice(op, first)
        elif first is not None and _is_of_single_scores(evidence, op, first):
            yield _of_single_scores(op)


def _is_of_single_scores(evidence: Evidence, op: Op, first: Op) -> bool:
    """Return whether a softmax runs over the single feature that a projection makes of each token."""
    scores = op.inputs[0]
    over = setting(op, 1, "dim")
    if type(over) is not int or over % len(scores.shape) != len(scores.shape) - 1:
        return False
    is_single = scores.shape[-1] == 1 and first.output.shape[-1] == 1 and scores.numel > 1
    return is_single and evidence.run.graph.is_projection(first)


def _of_single_scores(op: Op) -> Finding:
    return Finding(
        "softmax",
        "The softmax runs over the one score of each token, so all weights are 1.",
        f"The softmax of {shape(op.inputs[0].shape)} is over dimension {len(op.inputs[0].shape) - 1}, of size 1.",
        source=op.source,
        module=op.module,
        fix="Use the dimension of the tokens, e.g. softmax(dim=1) for scores of batch token 1.",
    )


def _softmaxes_of_attentions(evidence: Evidence) -> set[int]:
    """Return the indices of the softmaxes of attentions and of their branches."""
    indices = set()
    for attention, _ in evidence.run.attentions:
        for turn in (attention, *attention.branches):
            indices.add(turn.softmax.index)
    return indices


def _applied_twice(op: Op, first: Op) -> Finding:
    return Finding(
        "softmax",
        "The softmax is applied twice: the weights are almost equal, whatever the scores are.",
        f"The input of the softmax at {op.source} comes from the softmax at {first.source}.",
        source=op.source,
        module=op.module,
        fix="Remove one of them.",
    )


def _passes(op: Op) -> bool:
    return bool(op.inputs) and (op.pointwise or op.kind != "compute")
