"""Read an attention from measured answers: its softmax, its stages, and the steps between scores and weights."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose

import torch
from torch import Tensor

from ..record.ops import Op, TensorRef
from .attention import Mixing
from .dataflow import Graph
from .pairs import Pair
from .products import ProductPath
from .replay import NotReplayedError
from .rerun import Constants
from .response import Response, Slope, Softmaxed
from .scores import Scoring, adds_mask, mixing_of, multiply
from .softmax import Softmax, is_shift
from .standardised import statistic_step

_STEEP = 30
"""Scales above this are measured with smaller scores."""


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

    @property
    def hides_scale(self) -> bool:
        """Whether the input of the softmax is the scores but for a number, and no tensor has these multiplied."""
        is_scaled = all(kind == "scale" for kind, _ in self.scoring.steps)
        return self.weights_scale != 1 and not self.scoring.masks and is_scaled


def read(graph: Graph, pair: Pair, constants: Constants) -> Reading | None:
    """Return the attention of two products; None if nothing between them sums to one, or it cannot be run again."""
    try:
        with torch.device("cpu"):  # whatever the surrounding default is
            response = Response(graph, pair.scores.op.output, pair.values.tensor, constants)
            found = _weights(response)
            slope = None if found is None else response.slope(found.cut, found, logarithm=True)
            if slope is not None and slope.number is not None and abs(slope.number) > _STEEP:
                # A score that is multiplied by thousands is no mask.
                size = 1 / abs(slope.number)
                response = Response(graph, pair.scores.op.output, pair.values.tensor, constants, size)
            return _read(graph, pair, response)
    except NotReplayedError:
        return None


def _read(graph: Graph, pair: Pair, response: Response) -> Reading | None:
    found = _weights(response)
    if found is None:
        return None
    masked = _masked(response, found)
    is_softmax = response.cuts[found.cut].op.does("softmax")
    exponent = response.exponent(masked, found)
    reads_masked = is_softmax and response.cuts[found.cut].op.inputs[0].id == response.cuts[masked].tensor.id
    if exponent is None and not reads_masked:
        return None  # weights that sum to one, and are no exponentials as far as is known
    has_factors = exponent is not None and response.adds_inside(masked, found, exponent)
    if has_factors and is_softmax:
        return None  # scores are changed in a place that no cut shows, e.g. by writing into a part of them
    slope = response.slope(found.cut, found, logarithm=True)
    weights = response.cuts[found.cut]
    *beside, dim = found.places
    masks = _masks_of_exponentials(response, masked, found)
    softmax = Softmax(weights.op, response.cuts[masked].tensor, dim, masks, beside=tuple(beside))
    if response.cuts[masked].tensor.shape != weights.tensor.shape:
        return None
    values = ProductPath(pair.values.product, _path_after(response, found), pair.values.tensor)
    before = tuple(op for cut in response.cuts[1 : masked + 1] for op in cut.ops)
    scores = ProductPath(pair.scores, before, pair.scores.op.output)
    scoring = _scoring(graph, response, masked, found, _alpha(pair))
    if scoring.sinks is not None and _has_other_scores(graph, pair, scoring.sinks):
        return None
    seen = None if is_softmax or response.unknown else response.seen(found)
    if seen is not None and not masks and not bool(seen.all()) and not scoring.masks:
        softmax = softmax._replace(masks=(_hiding(response, found),))
    return Reading(
        softmax,
        scores,
        values,
        scoring,
        seen=seen,
        factor=_factor(pair, scoring, None if slope is None else slope.number),
        has_factors=has_factors,
        weights_scale=_weights_scale(response, masked, found, scoring, slope),
    )


def _weights_scale(response: Response, masked: int, found: Softmaxed, scoring: Scoring, slope: Slope | None) -> float:
    """Return the number that the input of the softmax is multiplied by in it: the weights' slope over its own.

    Without a mask that input is the scores.
    """
    if response.cuts[found.cut].op.does("softmax") or slope is None or not slope.number:
        return 1.0
    before = response.slope(masked, None, logarithm=False)
    if before is None or not before.number:
        return 1.0
    ratio = slope.number / before.number
    if isclose(ratio, 1, rel_tol=1e-4):
        return 1.0
    if not scoring.masks and scoring.scale:
        ratio = slope.number / scoring.scale
    return float(f"{ratio:.6g}")


def _hiding(response: Response, found: Softmaxed) -> Op:
    """Return the operation, of those that compute weights at once, that sets some to zero."""
    cut = response.cuts[found.cut]
    outside = {tensor.id for tensor in response.part.from_outside()}
    for op in cut.ops:
        if op.does("runs", "fills_where") or any(tensor.id in outside and tensor.shape for tensor in op.inputs):
            return op
    return cut.op


def _path_after(response: Response, found: Softmaxed) -> tuple[Op, ...]:
    """Return the operations from the weights to the product with the values, without sums on the way."""
    path = []
    for cut in response.cuts[found.cut + 1 :]:
        for op in cut.ops:
            if op is cut.op or op.does("picks") or op.output.shape == cut.tensor.shape:
                path.append(op)
    return tuple(path)


def _factor(pair: Pair, scoring: Scoring, slope: float | None) -> float | None:
    """Return the factor of q·kᵀ: the product of the factors of all steps, where it is the slope, or where none is."""
    of_steps = multiply((scoring.scale, scoring.late_scale))
    is_multiplied = any(kind == "times" for kind, _ in scoring.steps)
    if slope is None or is_multiplied:
        return of_steps
    slope *= _alpha(pair)
    return of_steps if of_steps is not None and isclose(of_steps, slope, rel_tol=1e-6) else float(f"{slope:.6g}")


def _has_other_scores(graph: Graph, pair: Pair, joins: Op) -> bool:
    """Return whether the scores are joined with those of another product, and not with sinks."""
    for tensor in joins.inputs:
        makers = [graph.recording.producer(step.tensor) for step in graph.back(tensor, graph.passes_on)]
        products = [op.index for op in makers if op is not None and graph.product(op) is not None]
        if products and pair.scores.op.index not in products:
            return True
    return False


def _alpha(pair: Pair) -> float:
    """Return the number that a product multiplies its result by, as baddbmm may."""
    return float(pair.scores.op.kwargs.get("alpha", 1))


def _weights(response: Response) -> Softmaxed | None:
    """Return the cut that computes the weights; None if no cut does.

    This is the first that sums to one. If it was changed and divided by its sum again, along the same axis, it is the
    result of that: `softmax(scores) * mask / sum`.
    """
    weights: Softmaxed | None = None
    for found in response.softmaxed:
        if weights is None or _is_divided_again(response, weights, found):
            weights = found
    return weights


def _is_divided_again(response: Response, weights: Softmaxed, found: Softmaxed) -> bool:
    between = range(weights.cut + 1, found.cut)
    summed = {softmaxed.cut for softmaxed in response.softmaxed}
    if all(place in summed for place in between):
        return False
    first, rows = response.rows(weights), response.rows(found)
    if first is None or rows is None or not _is_same_partition(first, rows):
        return False
    return response.exponent(_masked(response, found), found) is not None


def _is_same_partition(first: Tensor, rows: Tensor) -> bool:
    """Return whether two numberings put the same scores together."""
    pairs = torch.unique(torch.stack((first, rows)), dim=1)
    counts = pairs.shape[1], torch.unique(first).numel(), torch.unique(rows).numel()
    return len(set(counts)) == 1


def _masked(response: Response, found: Softmaxed) -> int:
    """Return the cut that the softmax is computed of: the last before exponentials, without shifts."""
    weights = response.cuts[found.cut]
    if weights.op.does("softmax") and weights.op.inputs[0].id == response.cuts[found.cut - 1].tensor.id:
        return found.cut - 1
    masked = 0
    is_shifted = False
    for place in range(1, found.cut):
        effect = response.step(place, found).effect
        if effect in ("bend", "mix", "times") and not response.are_logits(place, found):
            break
        if effect == "shift":
            is_shifted = True
        elif effect != "same":
            is_shifted = False
        if not is_shifted:
            masked = place
    return masked


def _masks_of_exponentials(response: Response, masked: int, found: Softmaxed) -> tuple[Op, ...]:
    """Return the operations that set exponentials to zero, or multiply them by numbers, before their sum."""
    masks = []
    for place in range(masked + 1, found.cut):
        if response.step(place, found).effect in ("times", "fill"):
            masks.append(response.cuts[place].op)
    return tuple(masks)


def _scoring(graph: Graph, response: Response, masked: int, found: Softmaxed, alpha: float) -> Scoring:
    """Return the steps from the scores to the softmax as they were measured."""
    reader = _Steps(graph, response, found, alpha)
    for place in range(1, masked + 1):
        if not reader.take(place):
            break
    return reader.scoring()


def _only_moves(op: Op) -> bool:
    """Return whether an operation only moves elements, pads them, or makes room for them."""
    if op.kind in ("view", "copy") or not op.inputs or op.base_name == "copy_":
        return True
    return op.does("copies", "joins", "cuts", "gathers") or op.base_name.startswith("new_")


class _Steps:
    """Collects the steps from scores to the softmax, one cut after another."""

    def __init__(self, graph: Graph, response: Response, found: Softmaxed, alpha: float) -> None:
        self._graph = graph
        self._response = response
        self._found = found
        self._product = response.cuts[0].tensor
        self._scores = self._tensor = self._before_scale = self._product
        self._scale: float | None = alpha
        self._last_scale: float | None = alpha
        self._late_scales: list[float | None] = []
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
        cut, step = self._response.cuts[place], self._response.step(place, self._found)
        if step.effect == "further" and self._response.is_extended(self._found.cut):
            self._sinks = cut.op
            return False
        mixings = [mixing for op in cut.ops if (mixing := mixing_of(self._graph, op)) is not None]
        if mixings:
            self._leave_plain()
            self._mixed.extend(mixings)
            self._steps.append(("mixed", None))
        elif any(self._graph.norm_name(op) for op in cut.ops):
            self._bend(cut.ops)
        elif step.effect == "same" and adds_mask(self._with_operand(cut.ops)):
            self._mask(cut.ops, "fill", 1.0)  # in this run it masks out no key
        elif step.effect in ("same", "scale") and step.factor is not None and self._multiplies(cut.ops):
            self._mask(cut.ops, "times", 1.0)  # in this run by one number
        elif step.effect == "same" or (step.effect == "mix" and all(map(_only_moves, cut.ops))):
            if self._moves_positions(place):
                self._bend(cut.ops)
            else:
                self._move(cut.tensor, cut.op)
        elif step.effect == "scale":
            self._multiply(self._as_written(cut.op, step.factor), cut.tensor)
        elif step.effect in ("add", "fill", "times"):
            self._mask(cut.ops, step.effect, step.factor)
        elif step.effect == "shift":
            self._shift(cut.ops, step.factor)
        else:
            self._bend(cut.ops)
        self._tensor = cut.tensor
        return True

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
        return any(size > 1 for size in min(op.inputs, key=lambda read: read.numel).shape[-2:])

    def _moved(self, ops: tuple[Op, ...]) -> TensorRef:
        """Return the scores after the operations at the beginning of a step that only move them."""
        moved, made = self._scores, {self._tensor.id}
        for op in ops[:-1]:
            if not any(tensor.id in made for tensor in op.inputs):
                continue
            if not _only_moves(op):
                break
            results = self._graph.results(op)
            made.update(tensor.id for tensor in results)
            whole = [tensor for tensor in results if tensor.numel == ops[-1].output.numel]
            moved = whole[-1] if whole else moved
        return moved

    def _with_operand(self, ops: tuple[Op, ...]) -> Op:
        """Return the last operation that reads something beside the scores; the last of all if none does."""
        made = {self._tensor.id, *(output.id for op in ops for output in op.outputs)}
        for op in reversed(ops):
            if op.kind == "compute" and any(tensor.id not in made and tensor.shape for tensor in op.inputs):
                return op
        return ops[-1]

    def _reads_others(self, op: Op) -> bool:
        """Return whether an operation reads a tensor that is not made of the scores themselves."""
        part = self._response.part
        return any(tensor.shape and tensor.id not in {*part.made, self._product.id} for tensor in op.inputs)

    def _shift(self, ops: tuple[Op, ...], factor: float | None) -> None:
        """Take a number that is added for each softmax: it changes no weight, and is shown unless it guards exp()."""
        if factor is not None and not isclose(factor, 1, rel_tol=1e-9):
            self._late_scales.append(factor)
            self._steps.append(("scale", factor))
        if any(is_shift(self._graph.recording, op) for op in ops):
            return
        statistics = [statistic for op in ops if (statistic := statistic_step(self._graph, op, self._product))]
        op = self._with_operand(ops)
        if statistics:
            self._leave_plain()
            self._steps.extend((statistic, None) for statistic in statistics)
        elif adds_mask(op):
            self._masks.append(op)
            self._shifts.append(op)
            self._steps.append(("add", None))

    def _move(self, tensor: TensorRef, op: Op) -> None:
        if self._is_plain and op.base_name != "_to_copy":
            self._scores = tensor

    def _as_written(self, op: Op, factor: float | None) -> float | None:
        """Return a measured factor with all digits of the number in the operation, where it is that number."""
        written = self._graph.scale_of(op)
        if factor is None or written is None or not isclose(written, factor, rel_tol=1e-9):
            return factor
        return written

    def _multiply(self, factor: float | None, tensor: TensorRef) -> None:
        # Scores are the product before its sign changes.
        if self._is_plain and (factor is None or factor > 0):
            self._before_scale, self._last_scale = self._tensor, factor
            self._scale, self._scores = multiply((self._scale, factor)), tensor
            return
        self._late_scales.append(factor)
        self._steps.append(("scale", factor))

    def _mask(self, ops: tuple[Op, ...], effect: str, factor: float | None) -> None:
        op = self._with_operand(ops)
        if self._is_plain:
            self._scores = self._moved(ops)
        if factor is None or not isclose(factor, 1, rel_tol=1e-6):
            self._late_scales.append(factor if effect != "times" else 1.0)
            if effect != "times":
                self._steps.append(("scale", factor))
        self._masks.append(op)
        is_filled = effect == "fill" and op.does("fills")
        self._steps.append(("times" if effect == "times" else "fill" if is_filled else "add", None))

    def _bend(self, ops: tuple[Op, ...]) -> None:
        computing = [op for op in ops if op.kind in ("compute", "write")] or list(ops)
        name = computing[-1].base_name.rstrip("_")
        statistics = [statistic for op in ops if (statistic := statistic_step(self._graph, op, self._product))]
        norm = next(filter(None, map(self._graph.norm_name, ops)), "")
        is_normed = any(is_shift(self._graph.recording, op) for op in ops)  # along another axis than the softmax
        adds_mask_to = adds_mask(computing[-1]) and any(map(self._reads_others, ops))
        if not statistics and not norm and not is_normed and adds_mask_to:
            self._mask(ops, "add", 1.0)
            return
        if name == "tanh" and self._is_plain and self._last_scale and self._scale is not None:
            self._scale, self._scores = self._scale / self._last_scale, self._before_scale
            self._late_scales.append(self._last_scale)
            self._steps.append(("scale", self._last_scale))
        elif statistics or norm:
            self._leave_plain()
            if norm or any(op.does("scales") for op in computing):
                self._late_scales.append(None)
        if statistics and not norm:
            self._steps.extend((statistic, None) for statistic in statistics)
        else:
            # What is added is made of the scores too, e.g. their own transpose.
            if name in ("add", "sub"):
                name = "made"
                self._late_scales.append(None)
            self._steps.append((norm or ("log_softmax" if is_normed else name), None))

    def _leave_plain(self) -> None:
        """Leave the scores as they were before a permutation for what comes next."""
        if self._is_plain:
            plain = self._graph.before_moves(self._scores)
            maker = self._graph.recording.producer(self._product)
            is_product = plain.id == self._product.id and maker is not None
            self._scores = self._graph.after_call(maker) if is_product and maker is not None else plain

    def scoring(self) -> Scoring:
        """Return what was taken."""
        masked = self._scores if self._sinks is not None and self._is_plain else self._tensor
        late = multiply(self._late_scales)
        return Scoring(
            scores=self._scores,
            masked=masked,
            scale=self._scale,
            late_scale=late,
            masks=self._masks,
            mixed=self._mixed,
            steps=self._steps,
            sinks=self._sinks,
            shifts=tuple(self._shifts),
        )
