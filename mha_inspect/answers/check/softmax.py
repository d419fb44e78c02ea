"""Faults of the softmax and of what masks it: another axis, taken twice, and masks that leave weight where they bar."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...graph.attention import Attention
from ...record.ops import Op
from ...reports.check import Finding
from .bench import Bench, each_kind
from .sight import SeenKeys
from .tokens import LostError, Tokens, between

_WEAK = 1.0
"""A constant of this size or less, put where a mask bars, is no bar."""


def softmax(bench: Bench) -> Iterator[Finding]:
    """Yield where what the values are averaged with does not sum to one over them."""
    yield from lone_softmaxes(bench)
    yield from _softmax(bench)


@each_kind("the weights are no softmax, meet sinks, a mixing matrix or dropout, or the values without a product")
def _softmax(bench: Bench, tokens: Tokens) -> Iterator[Finding]:
    attention = tokens.attention
    weights, over = tokens.weights()
    drops = any(op.does("draws") for op in attention.weights_path)
    if (
        attention.weighing
        or attention.sinks is not None
        or attention.divided is not None
        or attention.mixed_weights
        or drops
    ):
        raise LostError
    sums, other = _sums(weights, over), _sums(weights, -1 if over == -2 else -2)
    if sums is None or weights.shape[over] < 2 or _are_one(sums):
        return
    lowest, highest = sums
    through = [op for op in attention.weights_path if op.does("scales", "masks", "fills") and op.kind != "view"]
    evidence = f"What meets the values sums to {lowest:.3g} at the least and {highest:.3g} at the most, row by row."
    sure, at, fix = True, attention.softmax, "softmax over the keys: dim=-1 of scores that are query by key."
    if other is not None and _are_one(other) and (attention.over_queries or not attention.weights_changed):
        sentence = "The softmax runs over the queries: the weights of a query do not sum to one over its keys."
        evidence += " Over the queries they sum to 1."
    elif through and highest < 1.02 and _is_masked(bench, attention, through):
        sentence = (
            "The mask comes after the softmax: what it bars has taken its part of the weight, and the rest does not "
            "sum to one."
        )
        at, fix = through[-1], "mask the scores with -inf before the softmax."
    elif biased := _biased(bench, attention):
        sentence = "A bias is added to the weights, after the softmax: those of a query do not sum to one."
        at, fix = biased, "add it to the scores, before the softmax."
    elif (
        not through and not attention.weights_changed and attention.softmax.output.id in bench.recorded.recording.values
    ):
        axis = "heads or sequences" if weights.dim() < 3 or weights.shape[0] > 1 else "another axis"
        sentence = f"The softmax runs over {axis}, not over the keys: the weights of a query do not sum to one."
    else:
        sentence = "The weights of a query may be meant not to sum to one: they are changed after the softmax."
        sure, at, fix = False, (through or [attention.softmax])[-1], ""
    yield Finding("softmax", sentence, evidence, sure, at.source, fix=fix)


def _biased(bench: Bench, attention: Attention) -> Op | None:
    """Return what adds to the weights something that hangs on nothing that was given, as biases of positions do."""
    graph = bench.recorded.graph
    adding = (op for op in attention.weights_path if op.base_name.rstrip("_") in ("add", "sub") and len(op.inputs) > 1)
    return next((op for op in adding if not all(map(graph.comes_from_inputs, op.inputs))), None)


def _sums(weights: Tensor, over: int) -> tuple[float, float] | None:
    """Return the smallest and the largest sum of rows that have keys; None where none is finite."""
    sums = weights.double().sum(over)
    sums = sums[sums.isfinite() & (weights != 0).any(over)]
    return (float(sums.min()), float(sums.max())) if sums.numel() else None


def _are_one(sums: tuple[float, float]) -> bool:
    return max(abs(number - 1) for number in sums) < 0.02


def _is_masked(bench: Bench, attention: Attention, through: list[Op]) -> bool:
    """Whether one of these operations multiplies by zeros and ones, or fills in zeros, whatever the weights are."""
    recording, weights = bench.recorded.recording, attention.softmax.output.id
    contents = [(tensor, recording.values.get(tensor.id)) for op in through for tensor in op.inputs]
    masks = [tensor for tensor, value in contents if value is not None and value.numel() > 1 and _is_zero_one(value)]
    return any(not between(recording, {weights}, mask) for mask in masks)


def _is_zero_one(value: Tensor) -> bool:
    return bool(((value == 0) | (value == 1)).all())


def lone_softmaxes(bench: Bench) -> Iterator[Finding]:
    """Yield softmaxes of another softmax: they make no attention."""
    known = {
        branch.softmax.index
        for attention, _ in bench.recorded.attentions
        for branch in (attention, *attention.branches)
    }
    lines: set[str] = set()
    for op in bench.recorded.recording.ops:
        behind = _before(bench, op) if op.does("softmax") and op.index not in known and op.source not in lines else None
        if behind is None or not behind.does("softmax"):
            continue
        lines.add(op.source)
        yield Finding(
            "softmax",
            "The softmax is taken twice: the weights are next to equal, whatever the scores are.",
            f"What the softmax at {op.source} is taken of was made by another one, at {behind.source}.",
            source=op.source,
            module=op.module,
            fix="take one of them out.",
        )


def _before(bench: Bench, op: Op) -> Op | None:
    """Return the operation before what is moved, scaled and masked in between."""
    recording = bench.recorded.recording
    behind = recording.producer(op.inputs[0]) if op.inputs else None
    while behind is not None and behind.inputs and (behind.pointwise or behind.kind != "compute"):
        behind = recording.producer(max(behind.inputs, key=lambda tensor: tensor.numel))
    return behind


def masking(bench: Bench) -> Iterator[Finding]:
    """Yield masks that leave weight where they bar: scores multiplied by a mask, or filled with a small number."""
    sight = next(filter(masks_everything, bench.sights), None)
    if sight is None:
        yield from weak_masks(bench)
        return
    yield sight.finding(
        "masking",
        "The mask bars every key to every query: the weights are what they are without scores, or NaN.",
        f"Of {sight.seen.numel()} pairs of a query and a key not one is left, with the mask that was given.",
        "turn the mask round, or give it the other way round.",
    )


def masks_everything(sight: SeenKeys) -> bool:
    """Whether a mask leaves no query a key."""
    return sight.masked and not bool(sight.seen.any())


@each_kind()
def weak_masks(bench: Bench, tokens: Tokens) -> Iterator[Finding]:
    """Yield masks that leave weight where they mask."""
    attention = tokens.attention
    for op in attention.masks:
        values = [bench.recorded.recording.values.get(tensor.id) for tensor in op.inputs]
        name, fault = op.base_name.rstrip("_"), None
        if op.does("fills_where"):
            fault = _weak_fill(bench, attention, op, values)
        elif name == "mul":
            fault = _multiplied(bench, attention, values)
        elif name in ("add", "sub", "baddbmm"):
            fault = _weak_bar(values)
        if fault is not None:
            sentence, evidence, fix = fault
            yield Finding("masking", sentence, evidence, source=op.source, fix=fix)


Fault = tuple[str, str, str]
"""Sentence, evidence and fix."""


def _weak_fill(bench: Bench, attention: Attention, op: Op, values: list[Tensor | None]) -> Fault | None:
    number = _filled(op, values)
    bars = next((v for v in values if v is not None and v.dtype == torch.bool), None)
    bars = ~bars if bars is not None and op.base_name == "where" and op.inputs[-1].numel > 1 else bars
    if number is None or not 0 < abs(number) <= _WEAK or not _weighs(bench, attention, bars):
        return None
    return (
        f"The mask fills in {number:.3g}, which bars nothing: a barred key keeps a weight like any other.",
        f"exp({number:.3g}) is {torch.tensor(number).exp():.3g}; a bar is -inf, or -1e9.",
        "masked_fill(mask, float('-inf')).",
    )


def _multiplied(bench: Bench, attention: Attention, values: list[Tensor | None]) -> Fault | None:
    mask = next((v for v in values if v is not None and v.numel() > 1 and _is_zero_one(v)), None)
    if mask is None or bool((mask == 1).all()) or not _weighs(bench, attention, mask == 0):
        return None
    return (
        "The scores are multiplied by the mask: a barred key gets the score 0, not -inf, and keeps its weight.",
        f"{int((mask == 0).sum())} of {mask.numel()} factors are 0 before the softmax.",
        "masked_fill(mask == 0, float('-inf')).",
    )


def _weak_bar(values: list[Tensor | None]) -> Fault | None:
    """Judge a mask of zeros and one other number that is added."""
    for value in values:
        if value is None or value.numel() < 4 or not value.is_floating_point():
            continue
        known = torch.unique(value.detach().float()).tolist()
        if len(known) == 2 and 0.0 in known:
            number, evidence = sum(known), "It is added before the softmax."
            if 0 < abs(number) < 1e-3:
                return f"The mask adds {number:.3g} where it bars, which changes no weight.", evidence, ""
            if number == 1.0:
                what = "The mask is added as zeros and ones: it bars nothing, and what it marks gains weight."
                return what, evidence, ""
    return None


def _weighs(bench: Bench, attention: Attention, bars: Tensor | None) -> bool:
    """Whether weight is left where a mask bars; where that is not known, it is."""
    weights = bench.recorded.recording.values.get(attention.softmax.output.id)
    if bars is None or weights is None:
        return True
    try:
        return bool((weights * bars.expand(weights.shape)).amax() > 1e-6)
    except RuntimeError:  # laid out otherwise
        return True


def _filled(op: Op, values: list[Tensor | None]) -> float | None:
    """Return the number that is put where a mask says; None where it is none."""
    if op.base_name.startswith("masked_fill"):
        if len(op.args) > 2 and isinstance(op.args[2], (int, float)):
            return float(op.args[2])
        last = values[-1] if len(values) > 2 else None
        return float(last) if last is not None and last.numel() == 1 else None
    single = [v for v in values if v is not None and v.numel() == 1 and v.dtype != torch.bool]
    numbers = [float(a) for a in op.args[1:] if isinstance(a, (int, float)) and not isinstance(a, bool)]
    return float(single[0]) if single else numbers[0] if numbers else None
