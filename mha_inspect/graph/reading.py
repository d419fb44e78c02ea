"""Read an attention from measured answers: its weights, its stages, and the steps between scores and weights.

Weights sum to one, or are computed of each score (`sigmoid(scores)`, `relu(scores) / n`), or are exponentials whose sum
the context is divided by.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isclose
from typing import NamedTuple

import torch
from torch import Tensor

from ..record.ops import Op, TensorRef
from .attention import Mixing
from .axis import plain_name
from .dataflow import Graph, made_of
from .ids import any_in, ids_of
from .meet import Meeting
from .mixing import mixings_of
from .products import Joint, Product, ProductPath
from .replay import NotReplayedError, Replay, drawn, measuring, region
from .rerun import Constants
from .response import Cut, Response, Softmaxed, Step

_STEEP = 30
"""Scales above this are measured with smaller scores."""
_DIVISORS = {"div": 1, "reciprocal": 0}
"""Operations that divide, and the place of the divisor among their tensors."""
_COMBINES = ("add", "sub", "mul", "div")
"""Functions of two tensors, whose names say nothing of what becomes of the scores."""


class Softmax(NamedTuple):
    """What computes weights from scores: a softmax, or other operations."""

    op: Op
    """The operation that gives the weights; or the exponentials, if the values product comes before the division."""
    masked: TensorRef
    """The input of the softmax."""
    dim: int
    masks: tuple[Op, ...] = ()
    """The operations that set exponentials to zero before the sum."""
    divided: Op | None = None
    """The operation that divides the values product by the sum, if the weights are never computed; otherwise None."""
    ops: tuple[Op, ...] = ()
    """The operations that compute weights without a softmax, in order; `op` is the last."""


class Scoring(NamedTuple):
    """The steps from the product of queries and keys to the softmax, in the order of the run."""

    scores: TensorRef
    """Scaled scores, before any mask, bias or nonlinear function."""
    masked: TensorRef
    """The input of the softmax, without sinks."""
    scale: float | None
    """The factor between q·kᵀ and `scores`, e.g. 1/√head_dim; None if unknown."""
    late_scale: float | None
    """The factor between `scores` and the softmax, which also scales the masks before it; None if unknown."""
    masks: list[Op]
    """The operations that add, fill in or multiply by a mask or a bias."""
    mixed: list[Mixing]
    """The projections that mix the scores of heads."""
    steps: list[tuple[str, float | None]]
    """The steps from the scores to the softmax, in order: `add`, `fill` or `times` for a mask, `scale` and its number,
    `mixed` for a projection of heads, or the name of a function."""
    sinks: Op | None = None
    """The operation that appends attention sinks."""
    shifts: tuple[Op, ...] = ()
    """Those of the masks that add one number to all scores of a query, which changes no weight."""
    joined_scale: float | None = 1.0
    """The part of the late scale after sinks were joined to the scores, which scales both; None if unknown."""


def multiply(numbers: Iterable[float | None]) -> float | None:
    """Return the product of the numbers; None if one is unknown."""
    product = 1.0
    for number in numbers:
        if number is None:
            return None
        product *= number
    return product


def adds_mask(op: Op) -> bool:
    """Return whether an operation fills in numbers, or adds or subtracts a tensor that is not a single number."""
    if op.does("fills"):
        return True
    if plain_name(op) not in ("add", "sub"):
        return False
    return sum(bool(tensor.shape) for tensor in op.inputs) > 1


@dataclass(frozen=True, eq=False)
class Reading:
    """One attention as it was measured."""

    softmax: Softmax
    scores: ProductPath
    values: ProductPath
    scoring: Scoring
    factor: float | None
    """The number that q·kᵀ is multiplied by before the softmax; None if it differs by head, or is unknown."""
    seen: Tensor | None
    """Which weights are not set to zero after the exponentials, in the layout of the weights; None if none is, or if
    numbers that are unknown decide it."""
    has_factors: bool = False
    """Whether exponentials are multiplied by numbers other than 0 and 1."""
    weights_scale: float = 1.0
    """The number that the input of the softmax is multiplied by in it."""
    mixes_positions: bool = False
    """Whether a step computes the input of the softmax from several scores, e.g. a cumulative sum."""

    @property
    def hides_scale(self) -> bool:
        """Whether the input of the softmax is the scores but for a number, and no tensor has these multiplied."""
        is_scaled = all(kind == "scale" for kind, _ in self.scoring.steps)
        return self.weights_scale != 1 and not self.scoring.masks and is_scaled


def read(graph: Graph, meeting: Meeting, constants: Constants) -> Reading | None:
    """Return the attention of two products; None if nothing between them sums to one, or it cannot be run again."""
    try:
        with measuring():
            response = _measured(graph, meeting, constants)
            reading = None if response is None else _read(graph, meeting, response)
            if reading is None or not _needs_both(graph, meeting.scores, reading.softmax.op.output, constants):
                return None
            return reading
    except NotReplayedError:
        return _read_unmeasured(graph, meeting)


def _read_unmeasured(graph: Graph, meeting: Meeting) -> Reading | None:
    """Return the attention of two products around torch's own softmax, where nothing can be run again.

    Its scale is known where each operation on the way multiplies by a number or reads another tensor: that is the mask.
    """
    product = meeting.scores.op
    softmaxes = [op for op in region(graph, (product.output,), meeting.values.tensor).ops if op.does("softmax")]
    if len(softmaxes) != 1 or isinstance(meeting.scores, Joint):
        return None
    (softmax,) = softmaxes
    masked = softmax.inputs[0]
    path = _way(graph, product.output, masked)
    scores, masks = product.output, list[Op]()
    scales: list[float | None] = [_alpha(meeting)]
    steps: list[tuple[str, float | None]] = []
    for op in path:
        if adds_mask(op):
            masks.append(op)
            steps.append(("add", None))
        elif graph.is_scale(op):
            scales.append(graph.scale_of(op))
        elif not _only_moves(op):
            scales.append(None)
            steps.append(("f", None))
        if not steps:
            scores = op.output
    scale = multiply(scales)
    return Reading(
        softmax=Softmax(softmax, masked, int(softmax.args[1]) % max(len(masked.shape), 1)),
        scores=ProductPath(meeting.scores, path, product.output),
        values=meeting.values._replace(path=_way(graph, softmax.output, meeting.values.tensor)),
        scoring=Scoring(scores, masked, scale, 1.0, masks, mixings_of(graph, path), steps),
        factor=scale,
        seen=None,
    )


def _measured(graph: Graph, meeting: Meeting, constants: Constants) -> Response | None:
    """Return the response of weights to scores; None if nothing between them sums to one.

    Weights that are changed by the scores once more, e.g. `scores.softmax(-1) * (scores > 0)`, end where they are one.
    """
    scores, target = meeting.scores.op.output, meeting.values.tensor
    response = Response(graph, scores, target, constants)
    if not response.softmaxed:
        inner = response.first_of_sum_one()
        if inner is None:
            return None
        target = inner
        response = Response(graph, scores, target, constants)
    steepness = response.steepness()
    if steepness > _STEEP:
        # A score that is multiplied by thousands is no mask.
        response = Response(graph, scores, target, constants, 1 / steepness)
    return response


def read_weighing(graph: Graph, meeting: Meeting, constants: Constants) -> Reading | None:
    """Return the attention of two products whose weights are no softmax; None if they are no function of the scores.

    Each weight depends on scores of its own query. Weights that are linear in the scores are linear attention: its
    products can be reordered, so it has no weights. Values that are made of the scores are no values of theirs.
    """
    if graph.leads_to(meeting.scores.op.output, meeting.values.values):
        return None
    try:
        with measuring():
            response = Response(graph, meeting.scores.op.output, meeting.values.tensor, constants)
            weights = _weights_by_element(graph, meeting, response)
            if weights is None or not response.is_of_query(weights) or response.is_linear(weights):
                return None
            masked = _before_bend(response, weights)
            reading = None
            exponent = response.exponent(masked, weights)
            if exponent:
                reading = _read_late(graph, meeting, response, masked, weights)
            is_divided_unseen = bool(exponent) and response.are_exponentials(masked, weights, exponent or 0.0)
            if reading is None and not is_divided_unseen:
                reading = _read_by_element(graph, meeting, response, masked, weights)
            if reading is None or not _needs_both(graph, meeting.scores, meeting.values.tensor, constants):
                return None
            return reading
    except NotReplayedError:
        return None


def _needs_both(graph: Graph, scores: Product, weights: TensorRef, constants: Constants) -> bool:
    """Return whether weights of joined queries and keys depend on both; a product does.

    Without a nonlinear function a query adds the same number to all of its scores and changes no weight. Neither does
    what was computed of the keys, e.g. their mean: other keys have another one.
    """
    if not isinstance(scores, Joint):
        return True
    factors = graph.before_moves(scores.left), graph.before_moves(scores.right)
    if factors[0].id == factors[1].id:
        return False
    replay = Replay(graph, region(graph, factors, weights), constants)
    generator = torch.Generator().manual_seed(0)
    given = {factor.id: drawn(factor, generator) for factor in factors}
    before = replay.run(given)[weights.id]
    for factor in factors:
        changed = {**given, factor.id: drawn(factor, generator)}
        after = replay.run(changed)[weights.id]
        if torch.allclose(before, after, rtol=1e-9, atol=1e-12, equal_nan=True):
            return False
    return True


def _read(graph: Graph, meeting: Meeting, response: Response) -> Reading | None:
    weights = _weights(response)
    if weights is None:
        return None
    masked = _masked(response, weights)
    exponentials = _exponentials(response, masked, weights)
    if exponentials is None:
        return None
    softmax = _softmax(response, masked, weights)
    if softmax.masked.shape != softmax.op.output.shape:
        return None
    scoring = _scoring(graph, response, masked, weights, _alpha(meeting))
    seen = None if exponentials.is_softmax or response.unknown else response.seen(weights)
    hides_keys = seen is not None and not bool(seen.all())
    if hides_keys and not softmax.masks and not scoring.masks:
        softmax = softmax._replace(masks=(_hiding(response, weights),))
    return Reading(
        softmax=softmax,
        scores=ProductPath(meeting.scores, _path_before(response, masked), meeting.scores.op.output),
        values=meeting.values._replace(path=_path_to_values(graph, meeting, response, weights)),
        scoring=scoring,
        factor=multiply((scoring.scale, scoring.late_scale, exponentials.exponent)),
        seen=seen,
        has_factors=exponentials.has_factors,
        weights_scale=(1.0 if exponentials.is_softmax else exponentials.exponent) * (scoring.joined_scale or 1.0),
        mixes_positions=_mixes_positions(graph, response, masked, weights),
    )


def _weights_by_element(graph: Graph, meeting: Meeting, response: Response) -> Softmaxed | None:
    """Return the cut that gives weights without a softmax, and the dimension of the keys; None if it has none.

    It is the last but for moves and dropout.
    """
    place = len(response.cuts) - 1
    while place > 0 and all(map(_keeps_weights, response.cuts[place].ops)):
        place -= 1
    dims = graph.dimensions.of(response.cuts[place].tensor)
    keys = [dim for dim, axes in enumerate(dims) if not meeting.over.isdisjoint(axes)]
    return Softmaxed(place, (keys[0],)) if place and len(keys) == 1 else None


def _keeps_weights(op: Op) -> bool:
    return _only_moves(op) or op.base_name in ("native_dropout", "_fused_dropout")


def _before_bend(response: Response, weights: Softmaxed) -> int:
    """Return the last cut that is scores: multiplied by a number, moved, and with a mask or a bias."""
    masked = 0
    for place in range(1, weights.cut):
        effect = response.step(place, weights).effect
        if effect in ("bend", "mix", "times"):
            break
        if effect != "shift":
            masked = place
    return masked


def _read_late(graph: Graph, meeting: Meeting, response: Response, masked: int, weights: Softmaxed) -> Reading | None:
    """Return an attention whose context is divided by the sum of the exponentials; None if nothing is divided.

    numbers = (q @ k.mT).exp()                                     # batch heads query key
    context = numbers @ v / numbers.sum(-1, keepdim=True)
    """
    exponentials = _first_bend(response, masked, weights)
    op = response.cuts[exponentials].op
    divided = _division(graph, op, meeting.values.product.op)
    if divided is None:
        return None
    seen = None if response.unknown else response.seen(weights)
    hides_keys = seen is not None and not bool(seen.all())
    masks = _masks_of_exponentials(response, masked, weights)
    scoring = _scoring(graph, response, masked, weights, _alpha(meeting))
    if hides_keys and not masks and not scoring.masks:
        masks = (_hiding(response, weights),)
    (dim,) = weights.places
    tensor = response.cuts[masked].tensor
    exponent = response.exponent(masked, weights)
    has_factors = exponent is not None and response.adds_inside(masked, weights, exponent)
    return Reading(
        softmax=Softmax(op, tensor, dim, masks, divided=divided),
        scores=ProductPath(meeting.scores, _path_before(response, masked), meeting.scores.op.output),
        values=meeting.values._replace(path=_path_after(response, Softmaxed(exponentials, weights.places))),
        scoring=scoring,
        factor=multiply((scoring.scale, scoring.late_scale)),
        seen=seen if hides_keys else None,
        has_factors=has_factors,
    )


def _first_bend(response: Response, masked: int, weights: Softmaxed) -> int:
    """Return the cut that the first nonlinear function of the scores gives."""
    for place in range(masked + 1, weights.cut):
        if response.step(place, weights).effect in ("bend", "mix"):
            return place
    return weights.cut


def _read_by_element(
    graph: Graph, meeting: Meeting, response: Response, masked: int, weights: Softmaxed
) -> Reading | None:
    """Return an attention whose weights are functions of each score, and of sums of a query's: `sigmoid(scores)`."""
    weighing = _way(graph, response.cuts[masked].tensor, response.cuts[weights.cut].tensor)
    bent = _first_bend(response, masked, weights)
    masks = []
    for place in range(bent + 1, weights.cut + 1):
        op = response.cuts[place].op
        if response.step(place, weights).effect in ("times", "fill") and _applies_mask(op):
            masks.append(op)
    scoring = _scoring(graph, response, masked, weights, _alpha(meeting))
    (dim,) = weights.places
    tensor = response.cuts[masked].tensor
    seen = None
    if masks:
        seen = response.kept_of_ones(response.cuts[bent].tensor, response.cuts[weights.cut].tensor)
    if not weighing or len(tensor.shape) != len(weighing[-1].output.shape):
        return None
    return Reading(
        softmax=Softmax(weighing[-1], tensor, dim, tuple(masks), ops=weighing),
        scores=ProductPath(meeting.scores, _path_before(response, masked), meeting.scores.op.output),
        values=meeting.values._replace(path=_path_after(response, weights)),
        scoring=scoring,
        factor=multiply((scoring.scale, scoring.late_scale)),
        seen=seen,
    )


def _way(graph: Graph, start: TensorRef, end: TensorRef) -> tuple[Op, ...]:
    """Return the operations on the shortest way between two tensors."""
    for step in graph.back(end, lambda op: bool(op.inputs)):
        if step.tensor.id == start.id:
            return step.path[::-1]
    return ()


def _applies_mask(op: Op) -> bool:
    """Return whether an operation applies a mask that is a tensor, and does not only scale by a number."""
    return op.does("fills_where") or len(op.inputs) == 2


def _division(graph: Graph, exponential: Op, product: Op) -> Op | None:
    """Return the last operation that divides what is made of a product with values by what is made of exponentials.

    It is the addition to other pieces after it, if there is one. None if nothing is divided so.
    """
    later = graph.recording.ops[exponential.index :]
    after = [op for op in later if not op.does("product")]
    contexts = made_of({product.output.id}, after)
    sums = made_of({exponential.output.id}, after)
    inverse = made_of(_divided_by(after, sums), after)
    of_sums = sums - contexts
    divisions: list[Op] = []
    for op in after:
        divides = op.does("scales") and op.output.id in inverse
        if divides and any_in(op.inputs, contexts) and any_in(op.inputs, of_sums):
            divisions.append(op)
    if not divisions:
        return None
    first = divisions[0].output
    if divisions[0].kind == "write":  # other queries may be in the same memory
        divisions = [op for op in divisions if op.output.offset == first.offset]
    last = divisions[-1]
    both = sums | contexts
    for reader in graph.readers(last.output):
        if reader.base_name == "add" and both.issuperset(ids_of(reader.inputs)):
            return reader
    return last


def _divided_by(ops: Iterable[Op], divisors: set[int]) -> set[int]:
    """Return the ids of what is divided by one of these, or the inverse of it."""
    quotients = set()
    for op in ops:
        place = _DIVISORS.get(plain_name(op))
        if place is not None and any_in(op.inputs[place:], divisors):
            quotients.add(op.output.id)
    return quotients


def _mixes_positions(graph: Graph, response: Response, masked: int, weights: Softmaxed) -> bool:
    """Return whether a step from the scores to the softmax combines scores, other than those of several heads."""
    for place in range(1, masked + 1):
        ops = response.cuts[place].ops
        if response.step(place, weights).effect != "mix" or all(map(_only_moves, ops)):
            continue
        is_of_heads = bool(mixings_of(graph, ops)) or any(map(graph.norm_name, ops))
        if not is_of_heads:
            return True
    return False


@dataclass(frozen=True)
class _Exponentials:
    """How weights are made of the scores: as exponentials, divided by their sum."""

    is_softmax: bool
    """Whether one operation makes them."""
    exponent: float
    """The number that the last scores are multiplied by in them, e.g. log(2) where powers of two are taken."""
    has_factors: bool
    """Whether exponentials are multiplied by numbers before the sum."""


def _exponentials(
    response: Response,
    masked: int,
    weights: Softmaxed,
) -> _Exponentials | None:
    """Return how weights are made of the last scores; None if they are no exponentials as far as is known."""
    op = response.cuts[weights.cut].op
    is_softmax = op.does("softmax")
    exponent = response.exponent(masked, weights)
    if exponent is None:
        scores = response.cuts[masked].tensor
        reads_scores = is_softmax and op.inputs[0].id == scores.id
        return _Exponentials(is_softmax, 1.0, has_factors=False) if reads_scores else None
    has_factors = response.adds_inside(masked, weights, exponent)
    if has_factors and is_softmax:
        return None  # scores are changed in a place that no cut shows, e.g. by writing into a part of them
    is_one = isclose(exponent, 1, rel_tol=1e-6)
    return _Exponentials(is_softmax, 1.0 if is_one else float(f"{exponent:.6g}"), has_factors)


def _softmax(response: Response, masked: int, weights: Softmaxed) -> Softmax:
    """Return the softmax of the last scores, with the operations that mask exponentials."""
    dim = weights.places[-1]
    masks = _masks_of_exponentials(response, masked, weights)
    op = response.cuts[weights.cut].op
    return Softmax(op, response.cuts[masked].tensor, dim, masks)


def _path_before(response: Response, masked: int) -> tuple[Op, ...]:
    """Return the operations from the scores to the softmax."""
    path: list[Op] = []
    for cut in response.cuts[1 : masked + 1]:
        path += cut.ops
    return tuple(path)


def _hiding(response: Response, weights: Softmaxed) -> Op:
    """Return the operation, of those that compute weights at once, that sets some to zero."""
    cut = response.cuts[weights.cut]
    outside = ids_of(response.part.from_outside())
    for op in cut.ops:
        reads_outside = any(tensor.shape for tensor in op.inputs if tensor.id in outside)
        if reads_outside or op.does("runs", "fills_where"):
            return op
    return cut.op


def _path_to_values(graph: Graph, meeting: Meeting, response: Response, weights: Softmaxed) -> tuple[Op, ...]:
    """Return the operations from the weights to the product with the values."""
    measured = response.part.target
    if measured.id == meeting.values.tensor.id:
        return _path_after(response, weights)
    further = region(graph, (measured,), meeting.values.tensor).ops
    return tuple(op for op in further if op.output.numel == meeting.values.tensor.numel)


def _path_after(response: Response, weights: Softmaxed) -> tuple[Op, ...]:
    """Return the operations from the weights to the product with the values, without sums on the way."""
    path = []
    for cut in response.cuts[weights.cut + 1 :]:
        for op in cut.ops:
            is_whole = op.output.shape == cut.tensor.shape
            if is_whole or op is cut.op or op.does("picks"):
                path.append(op)
    return tuple(path)


def _alpha(meeting: Meeting) -> float:
    """Return the number that a product multiplies its result by, as baddbmm may."""
    return float(meeting.scores.op.kwargs.get("alpha", 1))


def _weights(response: Response) -> Softmaxed | None:
    """Return the cut that computes the weights; None if no cut does.

    This is the first that sums to one. If it was changed and divided by its sum again, along the same axis, it is the
    result of that: `softmax(scores) * mask / sum`.
    """
    weights: Softmaxed | None = None
    for softmaxed in response.softmaxed:
        if weights is None or _is_divided_again(response, weights, softmaxed):
            weights = softmaxed
    return weights


def _is_divided_again(response: Response, weights: Softmaxed, later: Softmaxed) -> bool:
    between = range(weights.cut + 1, later.cut)
    summed = {softmaxed.cut for softmaxed in response.softmaxed}
    if summed.issuperset(between):
        return False
    first, rows = response.rows(weights), response.rows(later)
    if first is None or rows is None or not _is_same_partition(first, rows):
        return False
    return response.exponent(_masked(response, later), later) is not None


def _is_same_partition(first: Tensor, rows: Tensor) -> bool:
    """Return whether two numberings put the same scores together."""
    meetings = torch.unique(torch.stack((first, rows)), dim=1)
    counts = {torch.unique(numbers).numel() for numbers in (first, rows)}
    return counts == {meetings.shape[1]}


def _masked(response: Response, weights: Softmaxed) -> int:
    """Return the cut that the softmax is computed of: the last before exponentials, without shifts."""
    op = response.cuts[weights.cut].op
    last = weights.cut - 1
    source = response.cuts[last].tensor
    if op.does("softmax") and op.inputs[0].id == source.id:
        return last
    masked = 0
    is_shifted = False
    for place in range(1, weights.cut):
        effect = response.step(place, weights).effect
        if effect in ("bend", "mix", "times") and not response.are_logits(place, weights):
            break
        if effect == "shift":
            is_shifted = True
        elif effect != "same":
            is_shifted = False
        if not is_shifted:
            masked = place
    return masked


def _masks_of_exponentials(
    response: Response,
    masked: int,
    weights: Softmaxed,
) -> tuple[Op, ...]:
    """Return the operations that set exponentials to zero, or multiply them by numbers, before their sum."""
    masks = []
    for place in range(masked + 1, weights.cut):
        if response.step(place, weights).effect in ("times", "fill"):
            masks.append(response.cuts[place].op)
    return tuple(masks)


def _scoring(
    graph: Graph,
    response: Response,
    masked: int,
    weights: Softmaxed,
    alpha: float,
) -> Scoring:
    """Return the steps from the scores to the softmax as they were measured."""
    reader = _Steps(graph, response, weights, alpha)
    for place in range(1, masked + 1):
        if not reader.take(place):
            break
    return reader.scoring()


def _computing(ops: tuple[Op, ...]) -> list[Op]:
    """Return the operations of a step that compute numbers; all of them if none does."""
    computing = [op for op in ops if op.kind in ("compute", "write")]
    return computing or list(ops)


def _only_moves(op: Op) -> bool:
    """Return whether an operation only moves elements, pads them, or makes room for them."""
    if op.kind in ("view", "copy") or not op.inputs or op.base_name == "copy_":
        return True
    return op.does("copies", "joins", "cuts", "gathers") or op.base_name.startswith("new_")


class _Steps:
    """Collects the steps from scores to the softmax, one cut after another."""

    def __init__(
        self,
        graph: Graph,
        response: Response,
        weights: Softmaxed,
        alpha: float,
    ) -> None:
        self._graph = graph
        self._response = response
        self._weights = weights
        self._product = response.cuts[0].tensor
        self._scores = self._tensor = self._before_scale = self._product
        self._scale: float | None = alpha
        self._last_scale: float | None = alpha
        self._late_scales: list[float | None] = []
        self._joined_scales: list[float | None] = []
        self._masks: list[Op] = []
        self._mixed: list[Mixing] = []
        self._steps: list[tuple[str, float | None]] = []
        self._shifts: list[Op] = []
        self._sinks: Op | None = None

    @property
    def _is_plain(self) -> bool:
        """Whether the scores were only moved and scaled so far."""
        return not self._masks and not self._steps

    def take(self, place: int) -> bool:
        """Take the step to a cut; return whether there may be further ones."""
        cut = self._response.cuts[place]
        step = self._response.step(place, self._weights)
        if self._sinks is not None:
            # What comes after the sinks were joined is done to both.
            self._joined_scales.append(step.factor if step.effect in ("same", "scale") else None)
            return True
        if step.effect == "further" and self._response.is_extended(self._weights.cut):
            self._sinks = cut.op
            return True
        self._take(place, cut, step)
        self._tensor = cut.tensor
        return True

    def _take(self, place: int, cut: Cut, step: Step) -> None:
        mixings = mixings_of(self._graph, cut.ops)
        if mixings:
            return self._mix(mixings)
        if any(map(self._graph.norm_name, cut.ops)):
            return self._bend(cut.ops, 1.0)
        if step.effect == "same" and adds_mask(self._with_operand(cut.ops)):
            return self._mask(cut.ops, "fill", 1.0)  # in this run it masks out no key
        is_number = step.effect in ("same", "scale") and step.factor is not None
        is_scale = step.effect == "scale" and step.factor != 0
        if is_number and not is_scale and self._multiplies(cut.ops):
            return self._mask(cut.ops, "times", 1.0)  # in this run by ones or zeros
        only_moves = step.effect == "mix" and all(map(_only_moves, cut.ops))
        if step.effect == "same" or only_moves:
            return self._move(place, cut)
        if step.effect == "scale":
            return self._multiply(self._as_written(cut.op, step.factor), cut.tensor)
        if step.effect in ("add", "fill", "times"):
            return self._mask(cut.ops, step.effect, step.factor)
        if step.effect == "shift":
            return self._shift(place, cut.ops, step.factor)
        return self._bend(cut.ops, 1.0 if step.factor is None else step.factor)

    def _mix(self, mixings: list[Mixing]) -> None:
        self._leave_plain()
        self._mixed.extend(mixings)
        self._steps.append(("mixed", None))

    def _moves_positions(self, place: int) -> bool:
        """Return whether a step moves scores to other queries or keys, and they are not moved back before the end."""
        response = self._response
        if not response.is_reordered(place) or response.is_reordered(place - 1):
            return False
        return response.is_reordered(len(response.cuts) - 1)

    def _multiplies(self, ops: tuple[Op, ...]) -> bool:
        """Return whether scores are multiplied by numbers of each query or key, which are ones in this run."""
        op = self._with_operand(ops)
        if not op.does("scales") or len(op.inputs) != 2:
            return False
        factor = min(op.inputs, key=lambda read: read.numel)
        return any(size > 1 for size in factor.shape[-2:])

    def _moved(self, ops: tuple[Op, ...]) -> TensorRef:
        """Return the scores after the operations at the beginning of a step that only move them."""
        moved = self._scores
        derived = {self._tensor.id}
        for op in ops[:-1]:
            if not any_in(op.inputs, derived):
                continue
            if not _only_moves(op):
                break
            for tensor in self._graph.results(op):
                derived.add(tensor.id)
                if tensor.numel == ops[-1].output.numel:
                    moved = tensor
        return moved

    def _with_operand(self, ops: tuple[Op, ...]) -> Op:
        """Return the last operation that reads something beside the scores; the last of all if none does."""
        derived = {self._tensor.id}
        for op in ops:
            derived.update(ids_of(op.outputs))
        for op in reversed(ops):
            if op.kind != "compute":
                continue
            if any(tensor.shape for tensor in op.inputs if tensor.id not in derived):
                return op
        return ops[-1]

    def _reads_others(self, op: Op) -> bool:
        """Return whether an operation reads a tensor that is not made of the scores themselves."""
        results = self._response.part.results
        for tensor in op.inputs:
            is_scores = tensor.id in results or tensor.id == self._product.id
            if tensor.shape and not is_scores:
                return True
        return False

    def _shift(self, place: int, ops: tuple[Op, ...], factor: float | None) -> None:
        """Take a number that is added for each softmax: it changes no weight, and is shown unless it guards exp()."""
        if factor is not None and not isclose(factor, 1, rel_tol=1e-9):
            self._scale_late(factor)
        op = self._with_operand(ops)
        if self._response.is_guard(place, self._weights):
            return
        if not adds_mask(op):
            return self._add_number(ops[-1])
        if not any(map(self._reads_others, ops)):
            self._leave_plain()
            self._steps.append(("made", None))
            return
        self._masks.append(op)
        self._shifts.append(op)
        self._steps.append(("add", None))

    def _add_number(self, op: Op) -> None:
        """Take a number that is added to all scores: it matters to a nonlinear function that follows."""
        numbers = [arg for arg in op.args if type(arg) in (int, float)]
        name = plain_name(op)
        if name not in ("add", "sub", "rsub") or len(op.inputs) != 1 or len(numbers) != 1 or not numbers[0]:
            return
        number = float(numbers[0]) if name == "add" else -float(numbers[0])
        if name == "rsub" or op.args[0] is numbers[0]:
            number = float(numbers[0])
        self._steps.append((f"{'+' if number > 0 else '-'} {abs(number):g}", None))

    def _scale_late(self, factor: float | None) -> None:
        """Take a multiplication after the stage of the scores."""
        self._late_scales.append(factor)
        self._steps.append(("scale", factor))

    def _move(self, place: int, cut: Cut) -> None:
        if self._moves_positions(place):
            self._bend(cut.ops, 1.0)
        elif self._is_plain and cut.op.base_name != "_to_copy":
            self._scores = cut.tensor

    def _as_written(self, op: Op, factor: float | None) -> float | None:
        """Return a measured factor with all digits of the number in the operation, where it is that number."""
        written = self._graph.scale_of(op)
        if factor is None or written is None or not isclose(written, factor, rel_tol=1e-9):
            return factor
        return written

    def _multiply(self, factor: float | None, tensor: TensorRef) -> None:
        # Scores are the product before its sign changes.
        if not self._is_plain or (factor is not None and factor <= 0):
            return self._scale_late(factor)
        self._before_scale, self._last_scale = self._tensor, factor
        self._scale = multiply((self._scale, factor))
        self._scores = tensor
        return None

    def _mask(self, ops: tuple[Op, ...], effect: str, factor: float | None) -> None:
        op = self._with_operand(ops)
        if self._is_plain:
            self._scores = self._moved(ops)
        is_scaled = factor is None or not isclose(factor, 1, rel_tol=1e-6)
        if effect == "times":
            if factor is None:
                self._late_scales.append(None)
            if factor is None:
                self._steps.append(("weighed", None))
                return
            self._masks.append(op)
            self._steps.append(("times", None))
            return
        if is_scaled:
            self._scale_late(factor)
        self._masks.append(op)
        is_filled = effect == "fill" and op.does("fills")
        self._steps.append(("fill" if is_filled else "add", None))

    def _bend(self, ops: tuple[Op, ...], slope: float) -> None:
        """Take a function of the scores: a norm, or a nonlinear function of each or of all of them."""
        computing = _computing(ops)
        norms = list(filter(None, map(self._graph.norm_name, ops)))
        name = plain_name(computing[-1])
        if norms:
            self._leave_plain()
            self._late_scales.append(None)
            self._steps.append((norms[0], None))
        elif adds_mask(computing[-1]) and any(map(self._reads_others, ops)):
            self._mask(ops, "add", 1.0)
        elif computing[-1].kind == "write":
            # A part of the scores is written over.
            self._late_scales.append(None)
            self._steps.append(("f", None))
        else:
            self._late_scales.append(slope)
            self._bend_alone(name)

    def _bend_alone(self, name: str) -> None:
        """Take a function of the scores alone."""
        if name == "tanh" and self._may_be_capped:
            self._leave_cap()
        if name in _COMBINES:
            # What is added, or multiplies, is made of the scores too, e.g. their own transpose, or their deviation.
            self._leave_plain()
            self._late_scales.append(None)
            name = "made" if name in ("add", "sub") else "f"
        self._steps.append((name, None))

    @property
    def _may_be_capped(self) -> bool:
        """Whether the last scale may be the first half of a soft cap."""
        return self._is_plain and bool(self._last_scale) and self._scale is not None

    def _leave_cap(self) -> None:
        """Take the scale just before a tanh out of the scores: it belongs to the soft cap."""
        if self._last_scale and self._scale is not None:
            self._scale /= self._last_scale
            self._scores = self._before_scale
            self._scale_late(self._last_scale)

    def _leave_plain(self) -> None:
        """Leave the scores as they were before a permutation for what comes next."""
        if not self._is_plain:
            return
        self._scores = self._graph.before_moves(self._scores)
        maker = self._graph.producer(self._product)
        if self._scores.id == self._product.id and maker is not None:
            self._scores = self._graph.after_call(maker)

    def scoring(self) -> Scoring:
        """Return what was taken."""
        is_before_sinks = self._sinks is not None and self._is_plain
        return Scoring(
            scores=self._scores,
            masked=self._scores if is_before_sinks else self._tensor,
            scale=self._scale,
            late_scale=multiply((*self._late_scales, *self._joined_scales)),
            masks=self._masks,
            mixed=self._mixed,
            steps=self._steps,
            sinks=self._sinks,
            shifts=tuple(self._shifts),
            joined_scale=multiply(self._joined_scales),
        )
