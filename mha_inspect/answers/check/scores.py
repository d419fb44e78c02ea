"""Faults on the way from scores to weights: their scale, what masks them, the softmax, and numbers that are not finite.

A softmax may run over another axis or be taken twice, and a mask may leave weight where it masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from ...graph.attention import Attention
from ...naming.axes import AxisNames
from ...naming.visibility import visibility
from ...record.arguments import tensors_in
from ...record.ops import Op, TensorRef
from ...reports.check import Finding
from .evidence import Evidence, NotPossibleError, UndeclaredError
from .sight import SeenKeys
from .tokens import LostError, between, content_of, of_each_kind

_WEAK = 1.0
"""A constant of this size or less, put where a mask is True, masks nothing."""
_SMALLER_SCORES = "scale the queries before the product, or compute the scores in float32."


def scale(evidence: Evidence) -> Iterator[Finding]:
    """Yield scales that are not 1/√head_dim, where that was declared."""
    if evidence.intent.scale is None:
        raise UndeclaredError("--scale sqrt_head_dim")
    for attention, names in evidence.run.attentions:
        if not attention.is_dot:
            raise NotPossibleError("the scores are additive: there is no dot product that a scale is for")
        wanted = max(names.head_dim, 1) ** -0.5
        if attention.scale is None:
            raise NotPossibleError("the scale is no number that can be read off the run")
        if abs(attention.scale / wanted - 1) > 0.01:
            yield Finding(
                "scale",
                f"The scores are scaled by {scale_words(attention, names)}, and 1/√head_dim is {wanted:.4g}.",
                f"head_dim is {names.head_dim}; what q·kᵀ is multiplied by on the way to the softmax was read off the "
                "run.",
                source=attention.score_product.op.source,
                module=attention.module,
                fix="divide by math.sqrt(head_dim), once.",
            )
            return


def scale_words(attention: Attention, names: AxisNames) -> str:
    """Return a scale and what it is of head_dim: `0.125 = 1/√head_dim`."""
    if not attention.is_dot:
        return "none is due: the scores are additive"
    if attention.scale is None:
        return "no single number"
    head_dim = max(names.head_dim, 1)
    width = attention.stages["query"].shape[-1] if "query" in attention.stages else 0
    if math.isclose(attention.scale, 1, rel_tol=1e-3):
        return "1: none"
    known = {
        " = 1/√head_dim": head_dim**-0.5,
        " = 1/head_dim": 1 / head_dim,
        " = √head_dim": head_dim**0.5,
        " = head_dim^(-1/4)": head_dim**-0.25,
        " = 1/√(heads · head_dim)": (names.num_heads * head_dim) ** -0.5,
        " = 1/√embed_dim": width**-0.5 if width > 1 else 0.0,
    }
    otherwise = f", {attention.scale * head_dim**0.5:.4g} times 1/√head_dim"
    like = (name for name, value in known.items() if math.isclose(attention.scale, value, rel_tol=1e-3))
    return f"{attention.scale:.4g}{next(like, otherwise)}"


def softmax(evidence: Evidence) -> Iterator[Finding]:
    """Yield where what the values are averaged with does not sum to one over them."""
    yield from lone_softmaxes(evidence)
    yield from _softmax(evidence)


@partial(
    of_each_kind, "the weights are no softmax, meet sinks, a mixing matrix or dropout, or the values without a product"
)
def _softmax(evidence: Evidence, attention: Attention, _: AxisNames) -> Iterator[Finding]:
    product = attention.value_product
    drops = any(op.does("draws") for op in attention.weights_path)
    others = attention.weighing or attention.sinks or attention.divided or attention.mixed_weights
    if drops or others or not product.multiply.does("product"):
        raise LostError
    by_right = attention.value_first
    weights, over = content_of(evidence, product.right if by_right else product.left), -2 if by_right else -1
    sums, by_query = _sums(weights, over), _are_one(_sums(weights, -1 if over == -2 else -2))
    if not sums.numel() or weights.shape[over] < 2 or _are_one(sums):
        return
    lowest, highest = float(sums.min()), float(sums.max())
    through = [op for op in attention.weights_path if op.does("scales", "masks", "fills") and op.kind != "view"]
    proof = f"What meets the values sums to {lowest:.3g} at the least and {highest:.3g} at the most, row by row."
    sure, at, fix = True, attention.softmax, "softmax over the keys: dim=-1 of scores that are query by key."
    if by_query and (attention.over_queries or not attention.weights_changed):
        sentence = "The softmax runs over the queries: the weights of a query do not sum to one over its keys."
        proof += " Over the queries they sum to 1."
    elif through and highest < 1.02 and _is_masked(evidence, attention, through):
        sentence = (
            "The mask comes after the softmax: what it bars has taken its part of the weight, and the rest does not "
            "sum to one."
        )
        at, fix = through[-1], "mask the scores with -inf before the softmax."
    elif biased := _biased(evidence, attention):
        sentence = "A bias is added to the weights, after the softmax: those of a query do not sum to one."
        at, fix = biased, "add it to the scores, before the softmax."
    elif not through and not attention.weights_changed and evidence.content(attention.softmax.output) is not None:
        axis = "heads or sequences" if weights.dim() < 3 or weights.shape[0] > 1 else "another axis"
        sentence = f"The softmax runs over {axis}, not over the keys: the weights of a query do not sum to one."
    else:
        sentence = "The weights of a query may be meant not to sum to one: they are changed after the softmax."
        sure, at, fix = False, (through or [attention.softmax])[-1], ""
    yield Finding("softmax", sentence, proof, sure, at.source, fix=fix)


def _biased(evidence: Evidence, attention: Attention) -> Op | None:
    """Return what adds to the weights something that hangs on nothing that was given, as biases of positions do."""
    graph = evidence.run.graph
    adding = (op for op in attention.weights_path if op.base_name.rstrip("_") in ("add", "sub") and len(op.inputs) > 1)
    return next((op for op in adding if not all(map(graph.comes_from_inputs, op.inputs))), None)


def _sums(weights: Tensor, over: int) -> Tensor:
    """Return the sums of rows that have keys, those that are finite."""
    sums = weights.double().sum(over)
    return sums[sums.isfinite() & (weights != 0).any(over)]


def _are_one(sums: Tensor) -> bool:
    return bool(sums.numel()) and float((sums - 1).abs().max()) < 0.02


def _is_masked(evidence: Evidence, attention: Attention, through: list[Op]) -> bool:
    """Whether one of these operations multiplies by zeros and ones, or fills in zeros, whatever the weights are."""
    recording, weights = evidence.run.recording, attention.softmax.output.id
    masks = [tensor for op in through for tensor in op.inputs if _is_zero_one(evidence.content(tensor))]
    return any(not between(recording, {weights}, mask) for mask in masks)


def _is_zero_one(value: Tensor | None) -> bool:
    return value is not None and value.numel() > 1 and bool(((value == 0) | (value == 1)).all())


def lone_softmaxes(evidence: Evidence) -> Iterator[Finding]:
    """Yield softmaxes of another softmax: they make no attention."""
    graph, recording = evidence.run.graph, evidence.run.recording
    turns = [turn for attention, _ in evidence.run.attentions for turn in (attention, *attention.branches)]
    known, lines = {turn.softmax.index for turn in turns}, set[str]()
    for op in (op for op in recording.ops if op.does("softmax") and op.index not in known):
        first = recording.producer(graph.before(op.inputs[0], _passes))
        if first is not None and first.does("softmax") and op.source not in lines:
            lines.add(op.source)
            yield Finding(
                "softmax",
                "The softmax is taken twice: the weights are next to equal, whatever the scores are.",
                f"What the softmax at {op.source} is taken of was made by another one, at {first.source}.",
                source=op.source,
                module=op.module,
                fix="take one of them out.",
            )


def _passes(op: Op) -> bool:
    return bool(op.inputs) and (op.pointwise or op.kind != "compute")


def masking(evidence: Evidence) -> Iterator[Finding]:
    """Yield masks that leave weight where they mask: scores multiplied by a mask, or filled with a small number."""
    sight = next(filter(masks_everything, evidence.sights), None)
    if sight is None:
        yield from weak_masks(evidence)
        return
    yield sight.finding(
        "masking",
        "The mask bars every key to every query: the weights are what they are without scores, or NaN.",
        f"Of {sight.seen.numel()} pairs of a query and a key not one is left, with the mask that was given.",
        "turn the mask round, or give it the other way round.",
    )


def masks_everything(sight: SeenKeys) -> bool:
    """Return whether a mask leaves no query a key."""
    return sight.masked and not bool(sight.seen.any())


@partial(of_each_kind, "")
def weak_masks(evidence: Evidence, attention: Attention, _: AxisNames) -> Iterator[Finding]:
    """Yield masks that leave weight where they mask."""
    weights = evidence.content(attention.softmax.output)
    for op in attention.masks:
        values = [evidence.content(tensor) for tensor in op.inputs]
        fault = _weak_mask(op, values, weights)
        if fault is not None:
            sentence, proof, fix = fault
            yield Finding("masking", sentence, proof, source=op.source, fix=fix)


def _weak_mask(op: Op, values: list[Tensor | None], weights: Tensor | None) -> tuple[str, str, str] | None:
    """Return sentence, evidence and fix of a mask that leaves weight where it masks; None where it does not."""
    name = op.base_name.rstrip("_")
    if op.does("fills_where"):
        number = _filled(op, values)
        masked = next((v for v in values if v is not None and v.dtype == torch.bool), None)
        masked = ~masked if masked is not None and name == "where" and op.inputs[-1].numel > 1 else masked
        if number is None or not 0 < abs(number) <= _WEAK or not _weighs(weights, masked):
            return None
        return (
            f"The mask fills in {number:.3g}, which bars nothing: a barred key keeps a weight like any other.",
            f"exp({number:.3g}) is {torch.tensor(number).exp():.3g}; a bar is -inf, or -1e9.",
            "masked_fill(mask, float('-inf')).",
        )
    if name == "mul":
        mask = next((v for v in values if v is not None and _is_zero_one(v)), None)
        if mask is None or bool((mask == 1).all()) or not _weighs(weights, mask == 0):
            return None
        return (
            "The scores are multiplied by the mask: a barred key gets the score 0, not -inf, and keeps its weight.",
            f"{int((mask == 0).sum())} of {mask.numel()} factors are 0 before the softmax.",
            "masked_fill(mask == 0, float('-inf')).",
        )
    for value in values if name in ("add", "sub", "baddbmm") else ():
        known = torch.unique(value.float()).tolist() if value is not None and value.numel() > 3 else []
        number = sum(known) if len(known) == 2 and 0.0 in known else 0.0
        if 0 < abs(number) < 1e-3 or number == 1:
            sentence = f"The mask adds {number:.3g} where it bars, which changes no weight."
            if number == 1:
                sentence = "The mask is added as zeros and ones: it bars nothing, and what it marks gains weight."
            return sentence, "It is added before the softmax.", ""
    return None


def _weighs(weights: Tensor | None, masked: Tensor | None) -> bool:
    if masked is None or weights is None:
        return True
    with suppress(RuntimeError):  # laid out otherwise
        return bool((weights * masked).amax() > 1e-6)
    return True


def _filled(op: Op, values: list[Tensor | None]) -> float | None:
    """Return the number that is put where a mask says; None where it is none."""
    single = [v for v in values if v is not None and v.numel() == 1 and v.dtype != torch.bool]
    numbers = [float(a) for a in op.args[1:] if isinstance(a, (int, float)) and not isinstance(a, bool)]
    return float(single[-1]) if single else numbers[-1] if numbers else None


def finite(evidence: Evidence) -> Iterator[Finding]:
    """Yield the first stage that is not finite, or the scores that would not be in float16, or the output."""
    for name, tensor in tensors_in(evidence.values):
        if tensor.is_floating_point() and "mask" not in name and bool(tensor.isnan().any()):
            raise NotPossibleError(f"the argument {name} has NaN in it")
    for attention, names in evidence.run.attentions:
        for stage, stage_tensor in attention.stages.items():
            finding = _unfinite(evidence, attention, names, stage, stage_tensor)
            if finding is not None:
                yield finding
                return
    yield from _too_large_for_half(evidence)
    unfinite = int((~evidence.output.isfinite()).sum())
    if unfinite:
        proof = f"{unfinite} of {evidence.output.numel()} numbers."
        yield Finding("finite", "The output is not finite, and every stage of attention is.", proof)


def _unfinite(
    evidence: Evidence, attention: Attention, names: AxisNames, stage: str, tensor: TensorRef
) -> Finding | None:
    value = evidence.content(tensor)
    if value is None or not value.is_floating_point() or bool(value.sum().isfinite()):
        return None
    nan = int(value.isnan().sum())
    infinite = 0 if stage == "masked_scores" else int(value.isinf().sum())
    if not nan and not infinite:
        return None
    known = visibility(evidence.run.graph, attention, names) if nan else None
    if known is not None and known.blind:
        row, query = known.blind[0]
        sentence = f"A query to which no key is left gives NaN, first in {stage}."
        more = f", and to {len(known.blind) - 1} more" if len(known.blind) > 1 else ""
        proof = f"Every key is barred to query {query} of row {row}{more}; {nan} of {tensor.numel} numbers are NaN."
        fix = "leave each query a key, or set the weights of such rows to zero."
    elif infinite and tensor.dtype in ("float16", "bfloat16") and stage == "scores":
        sentence = f"The {stage} overflow in {tensor.dtype}: {infinite} of {tensor.numel} are infinite."
        proof, fix = f"The largest number of this dtype is {torch.finfo(value.dtype).max:.3g}.", _SMALLER_SCORES
    else:
        sentence = (
            f"{stage} is the first stage that is not finite: {nan} NaN and {infinite} infinite of {tensor.numel}."
        )
        proof, fix = "Every argument is finite.", ""
    return Finding("finite", sentence, proof, source=evidence.line_of(tensor), module=attention.module, fix=fix)


@partial(of_each_kind, "")
def _too_large_for_half(evidence: Evidence, attention: Attention, _: AxisNames) -> Iterator[Finding]:
    """Yield products of queries and keys that float16 has no number for."""
    op, largest = attention.score_product.op, torch.finfo(torch.float16).max
    value = evidence.content(op.output)
    if value is None or value.dtype not in (torch.float32, torch.float64) or not value.numel():
        return
    size = float(value.abs().max())
    if largest < size < math.inf:
        yield Finding(
            "finite",
            f"In float16 the scores would overflow: the largest product of a query and a key is {size:.3g}.",
            f"The largest number of float16 is {largest:.3g}; in {op.output.dtype} the product is finite.",
            sure=False,
            source=op.source,
            fix=_SMALLER_SCORES,
        )
