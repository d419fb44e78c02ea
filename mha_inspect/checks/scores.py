"""Faults between scores and weights: the scale, and a softmax over the wrong axis, or applied twice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from torch import Tensor

from ..compare.replay import NotHereError, content_of
from ..graph.attention import Attention
from ..graph.rerun import between
from ..graph.rules import reduced_places
from ..naming.axes import AxisNames
from ..naming.pattern import dims_of
from ..naming.stage_facts import StageFacts
from ..record.ops import Op
from ..reports.check import Finding
from .each_kind import of_each_kind
from .evidence import Evidence, NotPossibleError, UndeclaredError
from .masking import is_zero_one, weak_mask

_OVER_KEYS = "Apply softmax over the keys: dim=-1 of scores with axes query key."
"""How to fix a softmax over another axis."""


def scale(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if the declared scale is 1/√head_dim and the scores have another."""
    attentions = evidence.run.attentions
    if evidence.intent.scale is None:
        if all(_is_mistaken(evidence, attention, names) for attention, names in attentions):
            unless = ", unless the weights were trained with this scale, e.g. T5 with none"
            attention, names = attentions[0]
            yield _other_scale(attention, names, unless, "No norm is before it.", sure=False)
        raise UndeclaredError("--scale sqrt_head_dim")
    for attention, names in attentions:
        if not attention.is_dot:
            raise NotPossibleError("the scores are additive, so there is no dot product to scale")
        if attention.scale is None:
            raise NotPossibleError("the scale could not be determined")
        if any(step == "times" for step, _ in attention.scoring):
            raise NotPossibleError("the scores are also multiplied by numbers that differ by key")
        if abs(attention.scale / max(names.head_dim, 1) ** -0.5 - 1) > 0.01:
            yield _other_scale(attention, names, "", f"head_dim is {names.head_dim}.")
            return


def _other_scale(attention: Attention, names: AxisNames, unless: str, more: str, *, sure: bool = True) -> Finding:
    scaled = "not scaled" if _is_scaled_by(attention, 1.0) else f"scaled by {scale_words(attention, names)}"
    return Finding(
        "scale",
        f"The scores are {scaled}; expected 1/√{names.head_dim} = {max(names.head_dim, 1) ** -0.5:.4g}{unless}.",
        f"The scale is the recorded factor between q·kᵀ and the softmax. {more}",
        sure=sure,
        source=attention.score_product.op.source,
        module=attention.module,
        fix="Divide by math.sqrt(head_dim) once.",
    )


def _is_mistaken(evidence: Evidence, attention: Attention, names: AxisNames) -> bool:
    """Return whether a dot product of queries and keys has no scale or a usual mistaken one, and no norm before it."""
    if not attention.is_dot or attention.weighing or names.head_dim < 2:
        return False
    expected, *mistaken = _usual_scales(attention, names).values()
    if _is_scaled_by(attention, expected):
        return False
    if not any(_is_scaled_by(attention, scale) for scale in (*mistaken, 1.0)):
        return False
    return _has_no_norm(evidence, attention) and _keeps_sizes(evidence, attention)


def _keeps_sizes(evidence: Evidence, attention: Attention) -> bool:
    """Return whether queries and keys are as large in the product as after their projection; True if it is unknown.

    A rotation keeps their size; a product with other numbers, or a gain, is a scale of its own.
    """
    if any(scale != 1 for scale in attention.early_scales.values()):
        return True  # a part of the scale
    product = attention.score_product
    factors = {"k_proj": product.right, "q_proj": product.left}
    if attention.key_first:
        factors = {"k_proj": product.left, "q_proj": product.right}
    change = 1.0
    for stage, factor in factors.items():
        projected = evidence.content(attention.stages[stage])
        multiplied = evidence.content(factor)
        if projected is None or multiplied is None or multiplied.numel() % projected.numel():
            continue  # e.g. packed with others
        change *= _size(multiplied) / max(_size(projected), 1e-30)
    return abs(change - 1) < 0.01


def _size(numbers: Tensor) -> float:
    """Return the root of the mean square of finite numbers."""
    finite = numbers.double().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.square().mean().sqrt())


def _is_scaled_by(attention: Attention, scale: float) -> bool:
    return math.isclose(attention.scale or 0.0, scale, rel_tol=1e-3)


def _has_no_norm(evidence: Evidence, attention: Attention) -> bool:
    """Return whether queries and keys are projected, and no norm is between a projection and the scores."""
    product = attention.score_product
    for side in ("q_proj", "k_proj"):
        projected = attention.stages.get(side)
        if projected is None:
            return False
        for factor in (product.left, product.right):
            if any(op.does("norms") for op in between(evidence.run.recording, {projected.id}, factor)):
                return False
    return True


def scale_words(attention: Attention, names: AxisNames) -> str:
    """Return a scale and its formula: `0.125 = 1/√head_dim`."""
    if not attention.is_dot:
        return "not needed: the scores are additive"
    if attention.scale is None:
        return "not a single number"
    if _is_scaled_by(attention, 1.0):
        return "not scaled"
    formulas = {**_usual_scales(attention, names), **_chosen_scales(attention, names)}
    for formula, scale in formulas.items():
        if _is_scaled_by(attention, scale):
            return f"{attention.scale:.4g} = {formula}"
    return f"{attention.scale:.4g}, {attention.scale * max(names.head_dim, 1) ** 0.5:.4g} times 1/√head_dim"


def _usual_scales(attention: Attention, names: AxisNames) -> dict[str, float]:
    """Return the expected scale, then other usual scales, by formula."""
    head_dim, width = max(names.head_dim, 1), _width(attention)
    return {
        "1/√head_dim": head_dim**-0.5,
        "1/head_dim": 1 / head_dim,
        "√head_dim": head_dim**0.5,
        "head_dim^(-1/4)": head_dim**-0.25,
        "1/√(heads · head_dim)": (names.num_heads * head_dim) ** -0.5,
        "1/√embed_dim": width**-0.5 if width > 1 else 0.0,
    }


def _chosen_scales(attention: Attention, names: AxisNames) -> dict[str, float]:
    """Return scales by formula that some models have on purpose, e.g. Gemma 2, and others by mistake."""
    width, heads = _width(attention), max(names.num_heads, 1)
    return {"1/√(embed_dim / heads)": (width / heads) ** -0.5 if width > heads else 0.0}


def _width(attention: Attention) -> int:
    """Return the number of features of the input of the queries; 0 if it is unknown."""
    return attention.stages["query"].shape[-1] if "query" in attention.stages else 0


def softmax(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if the weights of a query do not sum to one over its keys."""
    yield from lone_softmaxes(evidence)
    yield from _softmax(evidence)


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
    if not _is_plain(evidence, attention):
        raise NotHereError
    final = _averaging(evidence, attention)
    sums = final.sums_over_keys()
    if not sums.numel() or final.keys < 2 or _are_one(sums):
        return
    yield _unlike_one(evidence, attention, names, final, sums)


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
    bias = _biased(evidence, attention)
    if bias is not None:
        return _biased_afterwards(bias, proof)
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
        fix=_OVER_KEYS,
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


def _biased_afterwards(bias: Op, proof: str) -> Finding:
    return Finding(
        "softmax",
        "A bias is added after the softmax: the weights of a query do not sum to one.",
        proof,
        source=bias.source,
        fix="Add the bias to the scores before the softmax.",
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


def _biased(evidence: Evidence, attention: Attention) -> Op | None:
    """Return the operation that adds to the weights a term independent of the inputs (e.g. a position bias)."""
    graph = evidence.run.graph
    for op in attention.weights_path:
        if op.base_name.rstrip("_") not in ("add", "sub") or len(op.inputs) < 2:
            continue
        if not all(graph.comes_from_inputs(tensor) for tensor in op.inputs):
            return op
    return None


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
    """Yield faults of softmaxes that form no attention: of another softmax, or of scores multiplied by a mask."""
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
        multiplied = _multiplied_by_argument(evidence, op)
        if multiplied is None or multiplied.source in lines:
            continue
        lines.add(multiplied.source)
        factors = [evidence.content(tensor) for tensor in multiplied.inputs]
        fault = weak_mask(multiplied, factors, evidence.content(op.output))
        if fault is not None:
            yield replace(fault.finding(multiplied), module=op.module)


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


def _multiplied_by_argument(evidence: Evidence, softmax: Op) -> Op | None:
    """Return the multiplication just before a softmax if one factor is an argument without tokens; else None."""
    graph, recording = evidence.run.graph, evidence.run.recording
    op = recording.producer(graph.before_moves(softmax.inputs[0]))
    if op is None or op.base_name.rstrip("_") != "mul":
        return None
    tokens: set[str] = set()
    for source in evidence.sources:
        tokens.update(source.names)
    arguments = {named.tensor.id for named in recording.inputs if named.name not in tokens}
    return op if any(graph.before_moves(factor).id in arguments for factor in op.inputs) else None


def _passes(op: Op) -> bool:
    return bool(op.inputs) and (op.pointwise or op.kind != "compute")
