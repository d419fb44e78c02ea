"""Faults between scores and weights: the scale, masks, the softmax, and numbers that are not finite.

A softmax may run over the wrong axis or be applied twice, and a masked key may keep weight.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from ...graph.attention import Attention
from ...graph.rerun import between
from ...graph.rules import reduced_places
from ...naming.axes import AxisNames
from ...naming.pattern import STAGES, dims_of
from ...naming.stage_facts import StageFacts
from ...naming.visibility import visibility
from ...record.arguments import tensors_in
from ...record.ops import Op, TensorRef
from ...reports.check import Finding
from ..run_report import in_heads
from .evidence import Evidence, NotPossibleError, UndeclaredError
from .inverted import inverted_padding
from .replay import NotHereError, content_of
from .sight import SeenKeys
from .tokens import of_each_kind

_WEAK = 1.0
"""A mask that fills in a constant of at most this size has no effect."""
_STRONG = 1e3
"""A mask that adds a constant of at least this size decides which keys have all of the weight."""
_SMALLER_SCORES = "Scale the queries before the product, or compute the scores in float32."


def scale(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if the declared scale is 1/√head_dim and the scores have another."""
    attentions = evidence.run.attentions
    if evidence.intent.scale is None:
        if all(_is_mistaken(evidence, attention, names) for attention, names in attentions):
            unless = ", unless the weights were trained with this scale, e.g. T5 with none"
            yield _other_scale(*attentions[0], unless, "No norm is before it.", sure=False)
        raise UndeclaredError("--scale sqrt_head_dim")
    for attention, names in attentions:
        if not attention.is_dot:
            raise NotPossibleError("the scores are additive, so there is no dot product to scale")
        if attention.scale is None:
            raise NotPossibleError("the scale could not be determined")
        if abs(attention.scale / max(names.head_dim, 1) ** -0.5 - 1) > 0.01:
            yield _other_scale(attention, names, "", f"head_dim is {names.head_dim}.")
            return


def _other_scale(attention: Attention, names: AxisNames, unless: str, more: str, *, sure: bool = True) -> Finding:
    is_one = math.isclose(attention.scale or 0.0, 1, rel_tol=1e-3)
    scaled = "not scaled" if is_one else f"scaled by {scale_words(attention, names)}"
    return Finding(
        "scale",
        f"The scores are {scaled}; expected 1/√{names.head_dim} = {max(names.head_dim, 1) ** -0.5:.4g}{unless}.",
        f"The scale is the recorded factor between q·kᵀ and the softmax. {more}",
        sure,
        attention.score_product.op.source,
        attention.module,
        "Divide by math.sqrt(head_dim) once.",
    )


def _is_mistaken(evidence: Evidence, attention: Attention, names: AxisNames) -> bool:
    """Return whether a dot product of queries and keys has no scale or a usual mistaken one, and no norm before it."""
    sides = [attention.stages.get(f"{side}_proj") for side in "qk"]
    ends = (attention.score_product.left, attention.score_product.right)
    ops = [op for side in sides if side for end in ends for op in between(evidence.run.recording, {side.id}, end)]
    normed = any(op.does("norms") for op in ops)
    known = [*_known_scales(attention, names).values(), 1.0]
    near = [math.isclose(attention.scale or 0.0, value, rel_tol=1e-3) for value in known]
    plain = attention.is_dot and names.head_dim > 1 and not normed and not attention.weighing and None not in sides
    return plain and any(near[1:]) and not near[0]


def scale_words(attention: Attention, names: AxisNames) -> str:
    """Return a scale and its formula: `0.125 = 1/√head_dim`."""
    if not attention.is_dot:
        return "not needed: the scores are additive"
    if attention.scale is None:
        return "not a single number"
    if math.isclose(attention.scale, 1, rel_tol=1e-3):
        return "not scaled"
    otherwise = f", {attention.scale * max(names.head_dim, 1) ** 0.5:.4g} times 1/√head_dim"
    known = [*_known_scales(attention, names).items(), *_chosen_scales(attention, names).items()]
    like = (f" = {name}" for name, value in known if math.isclose(attention.scale, value, rel_tol=1e-3))
    return f"{attention.scale:.4g}{next(like, otherwise)}"


def _known_scales(attention: Attention, names: AxisNames) -> dict[str, float]:
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
    others = attention.weighing or attention.sinks or attention.divided or attention.mixed_weights
    if others or StageFacts(evidence.run.graph, attention, {}).drops():
        raise NotHereError
    final = _averaging(evidence, attention)
    sums = final.sums_over_keys()
    if not sums.numel() or final.keys < 2 or _are_one(sums):
        return
    lowest, highest = float(sums.min()), float(sums.max())
    through = [
        op
        for op in attention.weights_path
        if (op.does("scales", "masks", "fills") and op.kind not in ("view", "copy")) or _is_triangle(op)
    ]
    later = through or [op for op in attention.weights_path if op.kind == "compute" and op.base_name != "_to_copy"]
    proof = f"The weights of a query sum to between {lowest:.3g} and {highest:.3g}; expected 1."
    sure, at, fix = True, attention.softmax, "Apply softmax over the keys: dim=-1 of scores with axes query key."
    if final.sum_to_one_over_queries() and (attention.over_queries or not attention.weights_changed):
        sentence = "The softmax runs over the queries instead of the keys: the weights of a query do not sum to one."
        proof += " Over the queries, they sum to 1."
    elif through and highest < 1.02 and _is_masked(evidence, attention, through):
        sentence = (
            "The mask is applied after the softmax: masked keys take a share of the weight, and the rest does not sum "
            "to one."
        )
        at, fix = through[-1], "Mask the scores with -inf before the softmax."
    elif biased := _biased(evidence, attention):
        sentence = "A bias is added after the softmax: the weights of a query do not sum to one."
        at, fix = biased, "Add the bias to the scores before the softmax."
    elif not later and not attention.weights_changed and evidence.content(attention.softmax.output) is not None:
        axis = _axis_of_softmax(attention, names)
        sentence = f"The softmax runs over {axis} instead of the keys: the weights of a query do not sum to one."
    else:
        sentence = "The weights are changed after the softmax and do not sum to one. This may be intended."
        sure, at, fix = False, (later or [attention.softmax])[-1], ""
    yield Finding("softmax", sentence, proof, sure, at.source, fix=fix)


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
    adding = (op for op in attention.weights_path if op.base_name.rstrip("_") in ("add", "sub") and len(op.inputs) > 1)
    return next((op for op in adding if not all(map(graph.comes_from_inputs, op.inputs))), None)


def _sums(weights: Tensor, over: tuple[int, ...]) -> Tensor:
    """Return the sums of rows that have keys, without what is NaN."""
    numbers = weights.double().nan_to_num(0.0)
    return numbers.sum(over)[(numbers != 0).sum(over) > 0]


def _are_one(sums: Tensor) -> bool:
    return bool(sums.numel()) and float((sums - 1).abs().max()) < 0.02


def _is_masked(evidence: Evidence, attention: Attention, through: list[Op]) -> bool:
    """Return whether an operation multiplies by zeros and ones, or fills in zeros, independently of the weights."""
    recording, weights = evidence.run.recording, attention.softmax.output.id
    masks = [tensor for op in through for tensor in op.inputs if _is_zero_one(evidence.content(tensor))]
    return any(map(_is_triangle, through)) or any(not between(recording, {weights}, mask) for mask in masks)


def _is_triangle(op: Op) -> bool:
    return op.base_name.rstrip("_") in ("tril", "triu")


def _is_zero_one(value: Tensor | None) -> bool:
    return value is not None and value.numel() > 1 and bool(((value == 0) | (value == 1)).all())


def lone_softmaxes(evidence: Evidence) -> Iterator[Finding]:
    """Yield faults of softmaxes that form no attention: of another softmax, or of scores multiplied by a mask."""
    graph, recording = evidence.run.graph, evidence.run.recording
    turns = [turn for attention, _ in evidence.run.attentions for turn in (attention, *attention.branches)]
    known, lines = {turn.softmax.index for turn in turns}, set[str]()
    for op in (op for op in recording.ops if op.does("softmax") and op.index not in known):
        first = recording.producer(graph.before(op.inputs[0], _passes))
        if first is not None and first.does("softmax") and op.source not in lines:
            lines.add(op.source)
            yield Finding(
                "softmax",
                "The softmax is applied twice: the weights are almost equal, whatever the scores are.",
                f"The input of the softmax at {op.source} comes from the softmax at {first.source}.",
                source=op.source,
                module=op.module,
                fix="Remove one of them.",
            )
        multiplied = _multiplied_by_argument(evidence, op)
        if multiplied is not None and multiplied.source not in lines:
            lines.add(multiplied.source)
            fault = _weak_mask(multiplied, list(map(evidence.content, multiplied.inputs)), evidence.content(op.output))
            if fault is not None:
                sentence, proof, fix = fault
                yield Finding("masking", sentence, proof, source=multiplied.source, module=op.module, fix=fix)


def _multiplied_by_argument(evidence: Evidence, softmax: Op) -> Op | None:
    """Return the multiplication just before a softmax if one factor is an argument without tokens; else None."""
    graph, recording = evidence.run.graph, evidence.run.recording
    op = recording.producer(graph.before_moves(softmax.inputs[0]))
    if op is None or op.base_name.rstrip("_") != "mul":
        return None
    tokens = {name for source in evidence.sources for name in source.names}
    given = {named.tensor.id for named in recording.inputs if named.name not in tokens}
    return op if any(graph.before_moves(factor).id in given for factor in op.inputs) else None


def _passes(op: Op) -> bool:
    return bool(op.inputs) and (op.pointwise or op.kind != "compute")


def masking(evidence: Evidence) -> Iterator[Finding]:
    """Yield masks that leave weight on masked keys: scores multiplied by a mask, or filled with a small number."""
    sights = next(_masked_throughout(evidence), None)
    if sights is None:
        yield from inverted_padding(evidence)
        yield from weak_masks(evidence)
        yield from _finite_masks(evidence)
        return
    pairs = sum(sight.seen.numel() for sight in sights)
    yield sights[0].finding(
        "masking",
        "The mask masks out every key for every query: the weights ignore the scores, or are NaN.",
        f"With the given mask, all {pairs} pairs of a query and a key are masked out.",
        "Invert the mask where it is applied, or pass the inverted mask.",
    )


def _finite_masks(evidence: Evidence) -> Iterator[Finding]:
    """Yield the first mask of a finite number that leaves masked keys a weight, although one too small for a sum."""
    for sight in evidence.sights:
        # Smaller ones are no longer normal numbers, e.g. with -100 in float32, the mask of Swin.
        if sight.faint > 1e-37:
            finding = sight.finding(
                "masking",
                f"The mask is a finite number, and leaves masked keys a weight of up to {sight.faint:.2g}.",
                "It is too small to change a sum in this dtype; larger scores or other dtypes may show it.",
                "Use masked_fill(mask, float('-inf')).",
            )
            yield replace(finding, sure=False)
            return


def masks_everything(evidence: Evidence) -> bool:
    """Return whether a mask masks out every key for every query of an attention."""
    return any(True for _ in _masked_throughout(evidence))


def _masked_throughout(evidence: Evidence) -> Iterator[list[SeenKeys]]:
    """Yield the sights of each attention whose mask masks out every key for every query.

    A loop that computes one query at a time has a sight for each: all of them are one attention.
    """
    groups: dict[object, list[SeenKeys]] = defaultdict(list)
    for place, sight in enumerate(evidence.sights):
        stages, projections = sight.attention.stages, ("query", "q_proj", "key", "k_proj")
        given = tuple(stages[name].storage for name in projections if name in stages)
        groups[given or place].append(sight)
    for sights in groups.values():
        if all(sight.masked and not bool(sight.seen.any()) for sight in sights):
            yield sights


@partial(of_each_kind, "")
def weak_masks(evidence: Evidence, attention: Attention, _: AxisNames) -> Iterator[Finding]:
    """Yield masks that leave weight on masked keys."""
    weights, padded = _final_weights(evidence, attention), evidence.padded
    if weights is not None and weights.dim() == 4 and padded is not None and weights.shape[::2] == padded.shape:
        weights = weights.masked_fill(padded[:, None, :, None].to(weights.device), 0.0)  # padding may see anything
    contents = [[evidence.content(tensor) for tensor in op.inputs] for op in attention.masks]
    faults = [(op, _weak_mask(op, values, weights)) for op, values in zip(attention.masks, contents, strict=True)]
    if not any(fault for _, fault in faults):  # a mask that is too weak is masked out by no step after it
        faults = [(op, _undone(evidence, attention, op)) for op in attention.masks]
    for op, fault in faults:
        if fault:
            sentence, proof, fix = fault
            yield Finding("masking", sentence, proof, source=op.source, fix=fix)


def _final_weights(evidence: Evidence, attention: Attention) -> Tensor | None:
    """Return the weights that meet the values, if they are laid out as those of the softmax; else those."""
    product = attention.value_product
    final = evidence.content(product.right if attention.value_first else product.left)
    weights = evidence.content(attention.softmax.output)
    if final is None or weights is None or final.numel() != weights.numel():
        return weights
    return final.reshape(weights.shape) if final.shape[-2:] == weights.shape[-2:] else weights


def _undone(evidence: Evidence, attention: Attention, op: Op) -> tuple[str, str, str] | None:
    """Return sentence, evidence and fix if a later step, e.g. a tanh that caps the scores, undoes a mask; else None.

    What the mask did is read from the scores after it, whether it fills in a number or adds one.
    """
    filled, scores = (evidence.content(tensor) for tensor in (op.output, attention.softmax.inputs[0]))
    if filled is None or scores is None or filled.shape != scores.shape or not filled.is_floating_point():
        return None
    masked = filled <= -_STRONG
    # A query with every key masked out has no weights of a meaning, e.g. zeros against NaN.
    undone = masked & (scores > -_STRONG) & ~masked.all(-1, keepdim=True)
    if not undone.any() or not _weighs(_final_weights(evidence, attention), undone):
        return None
    return (
        "A step between the mask and the softmax undoes the mask: a masked key gets weight.",
        f"The mask makes a score {float(filled[undone].max()):.3g}, and the softmax gets "
        f"{float(scores[undone].max()):.3g} there.",
        "Apply the mask last, just before the softmax.",
    )


def _weak_mask(op: Op, values: list[Tensor | None], weights: Tensor | None) -> tuple[str, str, str] | None:
    """Return sentence, evidence and fix if a mask leaves weight on masked keys; else None."""
    name = op.base_name.rstrip("_")
    if op.does("fills_where"):
        number = _filled(op, values)
        masked = next((v for v in values if v is not None and v.dtype == torch.bool), None)
        masked = ~masked if masked is not None and name == "where" and op.inputs[-1].numel == 1 else masked
        if masked is not None and weights is not None:
            masked = _with_other_keys(masked, weights)
        if number is not None and number >= _STRONG and _weighs(weights, masked):
            return _opposite(f"fills in {number:.3g}")
        if number is None or abs(number) > _WEAK or not _weighs(weights, masked):
            return None
        return (
            f"The mask fills in {number:.3g}, which has no effect: a masked key gets weight like any other.",
            f"exp({number:.3g}) is {torch.tensor(number).exp():.3g}. A mask needs -inf or -1e9.",
            "Use masked_fill(mask, float('-inf')).",
        )
    if name == "mul":
        mask = next((v for v in values if v is not None and _is_zero_one(v)), None)
        if mask is None or bool((mask == 1).all()) or not _weighs(weights, mask == 0):
            return None
        return (
            "The scores are multiplied by the mask: a masked key has score 0 instead of -inf, so it gets weight.",
            f"{int((mask == 0).sum())} of {mask.numel()} factors are 0 before the softmax.",
            "Use masked_fill(mask == 0, float('-inf')).",
        )
    for value in values if name in ("add", "sub") else ():
        known = torch.unique(value.float()).tolist() if value is not None and value.numel() > 1 else []
        number = sum(known) if len(known) == 2 and 0.0 in known else 0.0
        bonus = -number if name == "sub" else number
        if value is not None and _STRONG <= bonus < math.inf and _weighs(weights, value != 0):
            return _opposite(f"adds {bonus:.3g}")
        if 0 < abs(number) < 1e-3 or number == 1:
            return _of_zeros_and_ones(name) if number == 1 else _without_effect(number)
    return None


def _of_zeros_and_ones(name: str) -> tuple[str, str, str]:
    does, effect = ("subtracted", "lose") if name == "sub" else ("added", "gain")
    return (
        f"The mask is {does} as zeros and ones: it masks out no key, and keys with 1 {effect} weight.",
        f"A score that is {'lower' if name == 'sub' else 'higher'} by 1 changes a weight by a factor of at most e.",
        "Add -inf where a key is masked out and 0 elsewhere, or give torch a boolean mask.",
    )


def _without_effect(number: float) -> tuple[str, str, str]:
    sentence = f"The mask adds {number:.3g}, which has no effect on the weights."
    return sentence, "The mask is added before the softmax.", ""


def _with_other_keys(masked: Tensor, weights: Tensor) -> Tensor:
    """Return a mask without the queries of which it masks every key, e.g. padding: their weights have no meaning."""
    try:
        whole = masked.expand(weights.shape)
    except RuntimeError:  # laid out otherwise
        return masked
    return whole & ~whole.all(-1, keepdim=True)


def _opposite(what: str) -> tuple[str, str, str]:
    return (
        f"The mask {what}: the masked keys get all of the weight.",
        "The sign is that of a bonus. A mask needs -inf or -1e9.",
        "Use masked_fill(mask, float('-inf')).",
    )


def _weighs(weights: Tensor | None, masked: Tensor | None) -> bool:
    if masked is None or weights is None:
        return True
    with suppress(RuntimeError):  # shapes do not match
        return not bool((weights * masked).amax() <= 1e-6)  # NaN is no weight of zero
    return True


def _filled(op: Op, values: list[Tensor | None]) -> float | None:
    """Return the constant that a mask fills in; None if it is not a constant."""
    single = [v for v in values if v is not None and v.numel() == 1 and v.dtype != torch.bool]
    numbers = [float(a) for a in op.args[1:] if isinstance(a, (int, float)) and not isinstance(a, bool)]
    return float(single[-1]) if single else numbers[-1] if numbers else None


def finite(evidence: Evidence) -> Iterator[Finding]:
    """Yield the first stage with NaN or infinity, scores that would overflow in float16, or such an output."""
    for name, tensor in tensors_in(evidence.values):
        if tensor.is_floating_point() and "mask" not in name and bool(tensor.isnan().any()):
            raise NotPossibleError(f"the argument {name} contains NaN")
    for attention, names in evidence.run.attentions:
        for stage, stage_tensor in attention.stages.items():
            finding = _unfinite(evidence, attention, names, stage, stage_tensor)
            if finding is not None:
                yield finding
                return
    yield from _too_large_for_half(evidence)
    if unfinite := int((~evidence.output.isfinite()).sum()):
        proof = f"{unfinite} of {evidence.output.numel()} numbers are NaN or infinite."
        yield Finding("finite", "The output is not finite, although every stage of the attention is.", proof)


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
    masked = stage in STAGES[STAGES.index("scores") + 1 :]
    known = visibility(evidence.run.graph, attention, names) if nan and masked else None
    if known is not None and known.blind:
        row, query = known.blind[0]
        at_start = not any(at for _, at in known.blind)
        if evidence.intent.causal and at_start and any(sight.almost_causal for sight in evidence.sights):
            raise NotPossibleError("cannot be judged until causal passes", "until causal passes")
        sentence = f"A query with every key masked out gives NaN, first in {stage}."
        more = f" (and {len(known.blind) - 1} more)" if len(known.blind) > 1 else ""
        where = in_heads(known.blind_heads)
        proof = f"Query {query} of item {row}{more} has every key masked out{where}; "
        proof += f"{nan} of {tensor.numel} numbers are NaN."
        fix = "Leave each query a key, or give its scores a finite number before the softmax."
    elif infinite and tensor.dtype in ("float16", "bfloat16") and stage == "scores":
        sentence = f"The {stage} overflow in {tensor.dtype}: {infinite} of {tensor.numel} are infinite."
        proof, fix = f"The largest number of this dtype is {torch.finfo(value.dtype).max:.3g}.", _SMALLER_SCORES
    else:
        sentence = (
            f"{stage} is the first stage that is not finite: {nan} of {tensor.numel} are NaN, {infinite} infinite."
        )
        proof, fix = "Every argument is finite.", ""
    context = evidence.content(attention.stages["context"])
    replaced = stage == "weights" and context is not None and bool(context.isfinite().all())
    proof += " The weights are replaced before the context." if replaced else ""
    return Finding("finite", sentence, proof, not replaced, evidence.line_of(tensor), attention.module, fix)


@partial(of_each_kind, "")
def _too_large_for_half(evidence: Evidence, attention: Attention, _: AxisNames) -> Iterator[Finding]:
    """Yield products of queries and keys that are too large for float16."""
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
