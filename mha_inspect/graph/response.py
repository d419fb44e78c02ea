"""Measure how the weights of an attention respond to its scores: the axis of the softmax, scale, masks, biases, caps.

The part of the run between scores and weights is run again on drawn scores, whatever it is written with. From

    weights = softmax(scale · scores + bias)                    # batch heads query key

follows `log weights = scale · scores + bias - a number for each query`. So the difference of two answers, without the
mean of each query, is the scale times the difference of the two drawn scores, without its mean; the rest is the bias.

Where all of the way from scores to weights passes through one tensor it is cut. What happens from one cut to the next
is a step, and measured: it multiplies by a number, adds what the scores have no part in, masks keys out, or bends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

import torch
from torch import Tensor

from ..record.ops import Op, TensorRef
from .axis import wide
from .dataflow import Graph
from .replay import NotReplayedError, Region, Replay, drawn, region, results_of
from .rerun import Constants

_CLOSE = 1e-7
"""Differences up to this, relative to the largest number, are rounding errors of float64."""
_SMALL = 1e-4
"""The size of scores for which every smooth function is linear."""
_HIDDEN = -1e4
"""A score of at most this masks its key out."""
_FAINT = 1e-12
"""Weights up to this have few digits of their own, beside rounding errors."""
_LOGITS = 1e-6
"""The largest difference between scores and the logarithms of their weights, apart from a number for each softmax."""
_ONE = 1e-3
"""The largest distance of a sum of weights from 1: a sum may be guarded against zero, as in `e / (e.sum() + 1e-6)`."""

Effect = Literal["same", "scale", "add", "fill", "times", "shift", "bend", "mix", "further"]
"""What a step does to the scores. `same`: nothing. `scale`: multiplies by a number. `add`: adds numbers that the scores
have no part in. `fill`: masks keys out. `times`: multiplies by numbers that differ by key. `shift`: adds a number for
each softmax, which changes no weight. `bend`: a function of each score alone. `mix`: anything else. `further`: appends
other scores."""


@dataclass(frozen=True)
class Cut:
    """A tensor through which all of the way from the scores to the weights passes."""

    tensor: TensorRef
    ops: tuple[Op, ...]
    """The operations since the cut before, in order."""

    @property
    def op(self) -> Op:
        """The operation that makes the tensor."""
        return self.ops[-1]


@dataclass(frozen=True)
class Step:
    """What happens from one cut to the next."""

    effect: Effect
    factor: float | None = 1.0
    """The number that scores are multiplied by; None if it differs by head, or is unknown."""


@dataclass(frozen=True)
class Softmaxed:
    """A cut whose numbers sum to one along some of its dimensions."""

    cut: int
    places: tuple[int, ...]
    """The dimensions of the sum, the innermost last."""


def cuts_of(graph: Graph, part: Region) -> list[Cut]:
    """Return the tensors that all of the way through a region passes through, in order; the source is the first.

    With `e = exp(x - max(x))` and `e / sum(e)` these are x, x - max(x), e, and the result: no maximum, and no sum.
    """
    read_last: dict[int, int] = {}
    in_memory: dict[int, list[int]] = {}
    for place, op in enumerate(part.ops):
        for tensor in op.inputs:
            read_last[tensor.id] = place
            in_memory.setdefault(tensor.storage, []).append(tensor.id)
        if op.kind == "write" and len(graph.results(op)) > len(op.outputs):
            # What was not written over is read again later, by another name.
            read_last.update(dict.fromkeys(in_memory.get(op.output.storage, ()), place))
        for output in op.outputs:
            in_memory.setdefault(output.storage, []).append(output.id)
    made = {*part.made, part.sources[0].id}
    cuts, since = [Cut(part.sources[0], ())], list[Op]()
    alive = {part.sources[0].id}
    for place, op in enumerate(part.ops):
        since.append(op)
        alive |= {output.id for output in op.outputs if output.id in made}
        alive = {number for number in alive if read_last.get(number, -1) > place or number == part.target.id}
        if len(alive) == 1 and op.output.id in alive:
            cuts.append(Cut(op.output, tuple(since)))
            since = []
    return cuts


class Response:
    """The answers of a region from scores to weights to drawn scores."""

    def __init__(
        self, graph: Graph, scores: TensorRef, target: TensorRef, constants: Constants, size: float = 1.0
    ) -> None:
        """Draw scores of this size. Raise `NotReplayedError` if the region cannot be run again."""
        self.graph = graph
        self.scores = scores
        if scores.dtype.startswith("complex"):
            raise NotReplayedError("complex scores")
        self.part = region(graph, (scores,), target)
        self._replay = Replay(graph, self.part, constants)
        self.cuts = cuts_of(graph, self.part)
        self._orders: dict[int, Tensor | None] = {}
        self._in_order: dict[int, tuple[Tensor, Tensor] | None] = {}
        self._rows: dict[Softmaxed, Tensor | None] = {}
        self._slopes: dict[tuple[int, Softmaxed | None, bool], Slope | None] = {}
        self._measured_steps: dict[tuple[int, Softmaxed], Step] = {}
        generator = torch.Generator().manual_seed(0)
        first, second = (drawn(scores, generator, size) for _ in range(2))
        self._drawn = first, second
        self._answers = [self._replay.run({scores.id: numbers}) for numbers in self._drawn]
        self._places = _places(self.part, self._answers[0])
        self._with_others = [self._replay.run({scores.id: numbers}, 1) for numbers in self._drawn if self.unknown]

    @property
    def unknown(self) -> list[TensorRef]:
        """The tensors from outside that other numbers stand in for."""
        return self._replay.unknown

    # -- in the order of the scores -----------------------------------------------------------------------------------

    def _order_of(self, tensor: TensorRef) -> Tensor | None:
        """Return which score each element of a tensor comes from, -1 for none; None if it is unknown."""
        if tensor.id not in self._orders:
            self._orders[tensor.id] = self._read_order(tensor)
        return self._orders[tensor.id]

    def _read_order(self, tensor: TensorRef) -> Tensor | None:
        order = self._places.get(tensor.id)
        if order is None and tensor.shape == self.scores.shape:
            return torch.arange(self.scores.numel).view(tensor.shape)
        if order is None:
            return None
        real = order[order >= 0]
        is_once = bool(real.numel()) and int(torch.bincount(real).max()) == 1
        return order if is_once else None

    def _by_score(self, tensor: TensorRef, numbers: Tensor) -> Tensor | None:
        """Return the numbers of a tensor in the order of the scores, NaN where it has none; None if it has no order."""
        order = self._order_of(tensor)
        if order is None or order.shape != numbers.shape:
            return None
        real = order >= 0
        result = torch.full((self.scores.numel,), torch.nan, dtype=torch.float64)
        result[order[real]] = numbers[real].double() if not numbers.is_complex() else numbers[real].real
        return result

    def answers(self, place: int) -> tuple[Tensor, Tensor] | None:
        """Return both answers of a cut, in the order of the scores; None if its order is unknown."""
        if place not in self._in_order:
            self._in_order[place] = self._read_answers(place)
        return self._in_order[place]

    def _read_answers(self, place: int) -> tuple[Tensor, Tensor] | None:
        """Return both answers of a cut, in the order of the scores; None if its order is unknown."""
        tensor = self.cuts[place].tensor
        if not place:
            first, second = (numbers.flatten() for numbers in self._drawn)
            return first, second
        answers = [self._by_score(tensor, answer[tensor.id]) for answer in self._answers]
        return None if answers[0] is None or answers[1] is None else (answers[0], answers[1])

    # -- weights ------------------------------------------------------------------------------------------------------

    @cached_property
    def softmaxed(self) -> list[Softmaxed]:
        """The cuts that sum to one, in order."""
        summed = []
        for place, cut in enumerate(self.cuts[1:], 1):
            places = self._sums_to_one(cut.tensor)
            if places:
                summed.append(Softmaxed(place, places))
        return summed

    def _sums_to_one(self, tensor: TensorRef) -> tuple[int, ...]:
        """Return the dimensions along which the numbers of a tensor sum to one in both answers; empty if none do."""
        answers = [answer[tensor.id] for answer in self._answers]
        if answers[0].dtype != torch.float64 or not tensor.shape:
            return ()
        if any(bool((answer < -_ONE).any()) for answer in answers):
            return ()
        rank = len(tensor.shape)
        single = [place for place in range(rank) if all(_is_one(answer.sum(place)) for answer in answers)]
        long = [place for place in single if tensor.shape[place] > 1]
        if long:
            return (long[-1],)
        # The exponential of a single score less the maximum is one too.
        maker = self.graph.recording.producer(tensor)
        if single and maker is not None and maker.does("softmax"):
            return (single[-1],)
        for place in range(rank - 1):  # e.g. over the rows and the columns of an image
            if min(tensor.shape[place : place + 2]) < 2:
                continue
            if all(_is_one(answer.sum((place, place + 1))) for answer in answers):
                return (place, place + 1)
        return ()

    def rows(self, found: Softmaxed) -> Tensor | None:
        """Return the number of the softmax that each score has a part in, -1 for none; None if unknown."""
        if found not in self._rows:
            self._rows[found] = self._read_rows(found)
        return self._rows[found]

    def _read_rows(self, found: Softmaxed) -> Tensor | None:
        """Return the number of the softmax that each score has a part in, -1 for none; None if unknown."""
        tensor = self.cuts[found.cut].tensor
        order = self._order_of(tensor)
        if order is None:
            return None
        shape = [1 if place in found.places else size for place, size in enumerate(tensor.shape)]
        numbers = torch.arange(torch.Size(shape).numel()).view(shape).expand(tensor.shape)
        real = order >= 0
        rows = torch.full((self.scores.numel,), -1)
        rows[order[real]] = numbers[real]
        return rows

    # -- logits -------------------------------------------------------------------------------------------------------

    def slope(self, place: int, found: Softmaxed | None, *, logarithm: bool) -> Slope | None:
        """Return by what a cut, or its logarithm, is multiplied when small scores grow; None if it is not linear."""
        key = place, found, logarithm
        if key not in self._slopes:
            self._slopes[key] = self._measure_slope(place, found, logarithm=logarithm)
        return self._slopes[key]

    def _measure_slope(self, place: int, found: Softmaxed | None, *, logarithm: bool) -> Slope | None:
        """Return by what a cut, or its logarithm, is multiplied when small scores grow; None if it is not linear."""
        rows = self.rows(found) if found is not None else None
        if found is not None and rows is None:
            return None
        small = self._small()
        slopes = []
        for draw in range(2 if self.unknown else 1):
            tensor = self.cuts[place].tensor
            values = []
            for numbers in small:
                answer = self._replay.run({self.scores.id: numbers}, draw)
                value = self._by_score(tensor, answer[tensor.id])
                if value is None:
                    return None
                values.append(value.log() if logarithm else value)
            fitted = _fitted(values, [numbers.flatten() for numbers in small], rows, self.scores.shape)
            if fitted is None:
                return None
            slopes.append(fitted)
        first, last = slopes[0], slopes[-1]
        if first.number is None or last.number is None or not _near(first.number, last.number, 1e-5):
            return Slope(None)
        return first

    def are_logits(self, place: int, found: Softmaxed) -> bool:
        """Return whether the softmax of a cut is the weights, apart from keys that are masked out later."""
        rows, values, weights = self.rows(found), self.answers(place), self.answers(found.cut)
        if rows is None or values is None or weights is None:
            return False
        for value, weight in zip(values, weights, strict=True):
            logarithm = weight.log()
            seen = (rows >= 0) & logarithm.isfinite() & value.isfinite()
            apart = _centred(value, rows, seen) - _centred(logarithm, rows, seen)
            if not bool(seen.any()) or float(apart[seen].abs().max()) > _LOGITS:
                return False
        return True

    def exponent(self, place: int, found: Softmaxed) -> float | None:
        """Return the number c for which the weights are exponentials of c times a cut, each with a factor of its own.

        From `weights = factors * exp(c * cut) / sum` follows that the difference of two logarithms is c times that of
        the cut, apart from a number for each softmax, however large the scores are. None if it is anything else, e.g.
        `(1 + cut + cut² / 2) / sum`, or if other weights are zero in the other answer.
        """
        rows, values, weights = self.rows(found), self.answers(place), self.answers(found.cut)
        if rows is None or values is None or weights is None:
            return None
        is_seen = [
            (rows >= 0) & (weight > _FAINT) & value.isfinite() for weight, value in zip(weights, values, strict=True)
        ]
        is_zero = [(rows >= 0) & (weight == 0) for weight in weights]
        # Far below the largest score an exponential is zero in any case.
        if bool((is_zero[0] & is_seen[1] | is_zero[1] & is_seen[0]).any()):
            return None
        seen = is_seen[0] & is_seen[1]
        if not bool(seen.any()):
            return None
        given = _centred(values[1] - values[0], rows, seen)[seen]
        answer = _centred(weights[1].log() - weights[0].log(), rows, seen)[seen]
        if not bool((given.abs() > _CLOSE).any()):
            return 1.0  # a single key for each query: its weight is one, whatever its score is
        return _factor(given, answer)

    def seen(self, found: Softmaxed) -> Tensor:
        """Return which weights are not zero in either answer to small scores, in the layout of the weights."""
        tensor = self.cuts[found.cut].tensor
        first, second = (self._replay.run({self.scores.id: numbers})[tensor.id] for numbers in self._small())
        return (first != 0) | (second != 0)

    def _small(self) -> list[Tensor]:
        """Return scores for which every smooth function is linear."""
        generator = torch.Generator().manual_seed(1)
        return [drawn(self.scores, generator, _SMALL) for _ in range(2)]

    def adds_inside(self, place: int, found: Softmaxed, exponent: float) -> bool:
        """Return whether weights are not the softmax of a cut alone: exponentials have factors of their own.

        Weights that are zero are no matter: their keys are masked out.
        """
        rows, values, weights = self.rows(found), self.answers(place), self.answers(found.cut)
        if rows is None or values is None or weights is None:
            return False
        seen = (rows >= 0) & (weights[0] > _FAINT) & values[0].isfinite()
        apart = _centred(weights[0].log() - exponent * values[0], rows, seen)[seen]
        return bool(apart.numel()) and float(apart.abs().max()) > _LOGITS

    def step(self, place: int, found: Softmaxed) -> Step:
        """Return what happens between a cut and the one before."""
        key = place, found
        if key not in self._measured_steps:
            self._measured_steps[key] = self._measure_step(place, found)
        return self._measured_steps[key]

    def _measure_step(self, place: int, found: Softmaxed) -> Step:
        """Return what happens between a cut and the one before."""
        before, after = self.answers(place - 1), self.answers(place)
        order, rows = self._order_of(self.cuts[place].tensor), self.rows(found)
        if before is None or after is None or order is None:
            return Step("mix", None)
        if rows is None:
            return self._plain(place, before, after)
        if bool((order < 0).any()) and not self.has_others(place - 1):
            return Step("further")
        # A masked-out score times zero is NaN too: that is the user's, and no other step.
        if any(bool((after[draw].isnan() & (before[draw] > _HIDDEN)).any()) for draw in (0, 1)):
            return Step("mix", None)
        return self._measured(place, before, after, rows)

    def _plain(self, place: int, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Step:
        """Return a step before the scores are mixed, e.g. averaged: `same` or `scale`, and `mix` for all others."""
        if any(not bool(numbers.isfinite().all()) for numbers in (*before, *after)):
            return Step("mix", None)
        factor = _factor(torch.cat(before), torch.cat(after))
        if factor is None or not self._has_factor(place, factor):
            return Step("mix", None)
        return Step("same" if _near(factor, 1, _CLOSE) else "scale", factor)

    def is_extended(self, place: int) -> bool:
        """Return whether a cut has all scores, and other numbers beside them."""
        order = self._order_of(self.cuts[place].tensor)
        return order is not None and bool((order < 0).any()) and int((order >= 0).sum()) == self.scores.numel

    def is_reordered(self, place: int) -> bool:
        """Return whether scores are moved to other queries or keys at a cut, e.g. rolled, and not only transposed.

        A transposed or reshaped tensor takes equal steps through the scores along its last two dimensions, and the same
        from everywhere.
        """
        order = self._order_of(self.cuts[place].tensor)
        if order is None or order.dim() < 2 or bool((order < 0).any()) or not order.numel():
            return False
        origin = order.flatten()[0]
        together = torch.zeros_like(order)
        for dim, size in enumerate(order.shape):
            first = order.movedim(dim, -1).flatten(0, -2)[0] - origin
            steps = first.diff()
            if dim >= order.dim() - 2 and bool((steps <= 0).any()):
                return True
            together += first.view([size if at == dim else 1 for at in range(order.dim())])
        return not torch.equal(together, order - origin)

    def has_others(self, place: int) -> bool:
        """Return whether a cut has elements that are no scores."""
        order = self._order_of(self.cuts[place].tensor)
        return order is not None and bool((order < 0).any())

    def _measured(self, place: int, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], rows: Tensor) -> Step:
        hidden = [(numbers <= _HIDDEN) | numbers.isnan() for numbers in (*before, *after)]
        masked = hidden[2] & hidden[3] & ~hidden[0] & ~hidden[1]
        seen = ~(hidden[0] | hidden[1] | hidden[2] | hidden[3])
        seen = seen & after[0].isfinite() & after[1].isfinite() & before[0].isfinite() & before[1].isfinite()
        if not bool(seen.any()):
            return Step("fill")
        old, new = (torch.stack(numbers)[:, seen] for numbers in (before, after))
        factor = _factor(old[1] - old[0], new[1] - new[0])
        if factor is not None:
            offset = new[0] - factor * old[0]
            factor = factor if self._has_factor(place, factor) else None
            size = max(float(new.abs().max()), 1.0) * _CLOSE
            if bool(masked.any()):
                return Step("fill", factor)
            if float(_centred(offset, rows[seen], torch.ones_like(offset, dtype=torch.bool)).abs().max()) > size:
                return Step("add", factor)
            is_plain = factor is not None and _near(factor, 1, _CLOSE)
            if not is_plain:
                return Step("scale", factor)
            return Step("same" if float(offset.abs().max()) <= size else "shift")
        everything = torch.ones_like(seen[seen])
        factor = _factor(
            _centred(old[1] - old[0], rows[seen], everything), _centred(new[1] - new[0], rows[seen], everything)
        )
        if factor is not None and factor:
            rests = [_centred(new[draw] - factor * old[draw], rows[seen], everything) for draw in (0, 1)]
            size = max(float(new.abs().max()), 1.0) * _CLOSE
            if all(float(rest.abs().max()) <= size for rest in rests):
                return Step("shift", factor)
        factors = new / old
        if bool(factors.isfinite().all()) and torch.allclose(factors[0], factors[1], rtol=1e-6, atol=1e-9):
            return self._of_factors(factors[0], seen, rows)
        return Step("bend" if self._is_elementwise(place) else "mix", None)

    def _has_factor(self, place: int, factor: float) -> bool:
        """Return whether a factor stays with other numbers in the place of unknown ones."""
        if not self._with_others:
            return True
        old, new = (self.cuts[at].tensor for at in (place - 1, place))
        pairs = []
        for tensor in (old, new):
            values = [self._by_score(tensor, answer[tensor.id]) for answer in self._with_others]
            if values[0] is None or values[1] is None:
                return False
            pairs.append(values[1] - values[0])
        seen = pairs[0].isfinite() & pairs[1].isfinite() & (pairs[1] != 0)
        again = _factor(pairs[0][seen], pairs[1][seen]) if bool(seen.any()) else None
        return again is not None and _near(again, factor, 1e-5)

    def _of_factors(self, factors: Tensor, seen: Tensor, rows: Tensor) -> Step:
        """Return the step that multiplies each score by a number of its own, the same in both answers.

        One number for each head, or for each softmax, is a scale, as long as it leaves some of the score.
        """
        if bool((factors != 0).all()) and _is_constant(factors, rows[seen]):
            return Step("scale", None)
        whole = torch.full((self.scores.numel,), torch.nan, dtype=torch.float64)
        whole[seen] = factors
        heads = whole.view(-1, self._size_of_head())
        spread = heads.nan_to_num(-torch.inf).amax(1) - heads.nan_to_num(torch.inf).amin(1)
        is_by_head = bool((spread <= _CLOSE * heads.nan_to_num(0.0).abs().amax(1)).all())
        return Step("scale", None) if is_by_head else Step("times", None)

    def _size_of_head(self) -> int:
        """Return the number of scores of one head: those of one query if they are `batch heads key`."""
        shape, op = self.scores.shape, self.graph.recording.producer(self.scores)
        product = None if op is None else self.graph.product(op)
        if product is not None and not product.multiply.does("product") and len(shape) > 1:
            dimensions = self.graph.dimensions
            beside_keys = {*wide(dimensions.of(self.scores)[-2])}
            if beside_keys and beside_keys <= {*wide(product.axes(dimensions).batch)}:
                return shape[-1]
        return prod(shape[-2:])

    def _is_elementwise(self, place: int) -> bool:
        """Return whether the operations of a step compute each number from a single one."""
        made = {self.cuts[place - 1].tensor.id, *(output.id for op in self.cuts[place].ops for output in op.outputs)}
        for op in self.cuts[place].ops:
            read = [tensor for tensor in op.inputs if tensor.id in made]
            if not (op.pointwise or op.kind in ("view", "copy")) or len({tensor.id for tensor in read}) > 1:
                return False
        return True


@dataclass(frozen=True)
class Slope:
    """By what scores are multiplied."""

    number: float | None
    """None if it differs by head, or with numbers that are unknown."""


def _is_one(sums: Tensor) -> bool:
    """Return whether most sums are one, and all others are of masked-out rows: zero or NaN."""
    is_one = (sums - 1).abs() < _ONE
    is_empty = sums.isnan() | (sums.abs() < _ONE)
    return bool((is_one | is_empty).all()) and bool(is_one.any())


def _is_constant(numbers: Tensor, rows: Tensor) -> bool:
    """Return whether all numbers of each row are equal, of rows that are known by number."""
    count = int(rows.max()) + 1
    start = torch.zeros(count, dtype=torch.float64)
    lowest = start.scatter_reduce(0, rows, numbers, "amin", include_self=False)
    highest = start.scatter_reduce(0, rows, numbers, "amax", include_self=False)
    return bool((highest - lowest <= _CLOSE * highest.abs()).all())


def _near(left: float, right: float, error: float) -> bool:
    return abs(left - right) <= error * max(abs(left), abs(right), 1e-12)


def _fitted(
    values: Sequence[Tensor], scores: Sequence[Tensor], rows: Tensor | None, shape: Sequence[int]
) -> Slope | None:
    """Return the factor between the differences of two answers and of two scores, apart from a number for each row.

    None if the rest is more than a rounding error. Differences that are infinite or NaN are of masked-out keys.
    """
    answer, given = values[1] - values[0], scores[1] - scores[0]
    seen = answer.isfinite()
    if rows is not None:
        seen = seen & (rows >= 0)
        answer, given = _centred(answer, rows, seen), _centred(given, rows, seen)
    if not bool(seen.any()):
        return None
    answer, given = torch.where(seen, answer, 0.0), torch.where(seen, given, 0.0)
    if not bool((given != 0).any()):
        return None
    whole = float((answer * given).sum() / (given * given).sum())
    limit = 1e-5 * max(float(answer.abs().max()), abs(whole) * float(given.abs().max()), 1e-12)
    if float((answer - whole * given).abs().max()) <= limit:
        return Slope(whole)
    if len(shape) < 3:
        return None
    heads = answer.view(-1, shape[-2] * shape[-1]), given.view(-1, shape[-2] * shape[-1])
    factors = (heads[0] * heads[1]).sum(1, keepdim=True) / (heads[1] * heads[1]).sum(1, keepdim=True).clamp(min=1e-300)
    return Slope(None) if float((heads[0] - factors * heads[1]).abs().max()) <= limit else None


def _factor(given: Tensor, answer: Tensor) -> float | None:
    """Return the number that all differences are multiplied by; None if there is no such number."""
    square = float((given * given).sum())
    if not square:
        return None
    # Twelve digits are measured, and a scale of 1.5 is not 1.5000000000000002.
    factor = float(f"{float((given * answer).sum()) / square:.12g}")
    limit = 1e-6 * max(float(answer.abs().max()), 1e-12)
    return factor if float((answer - factor * given).abs().max()) <= limit else None


def _centred(numbers: Tensor, rows: Tensor, seen: Tensor) -> Tensor:
    """Return numbers less the mean of each row, of what is seen."""
    kept = torch.where(seen, numbers, 0.0)
    place = rows.clamp(min=0)
    count = int(place.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64).index_add(0, place, kept)
    counts = torch.zeros(count, dtype=torch.float64).index_add(0, place, seen.double())
    return kept - (sums / counts.clamp(min=1))[place]


# -- where each score goes --------------------------------------------------------------------------------------------


def _places(part: Region, answers: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return which score each element of the tensors of a region comes from, as far as elements only move.

    An operation that keeps the shape is taken to keep the places.
    """
    source = part.sources[0]
    numbers = torch.arange(1, source.numel + 1, dtype=torch.float64).view(source.shape)
    places = {source.id: numbers}
    for op in part.ops:
        moved = [tensor for tensor in op.inputs if tensor.id in places]
        if not moved or not op.outputs or op.base_name.endswith("_like") or op.base_name.startswith("new_"):
            continue
        if _moves_elements(op):
            places.update(_moved(op, places, answers))
            continue
        for output in op.outputs:
            same = next((tensor for tensor in moved if tensor.shape == output.shape), None)
            if same is not None and not output.dtype.startswith("int"):
                places[output.id] = places[same.id]
    return {number: (found - 1).long().clamp(min=-1) for number, found in places.items()}


def _moves_elements(op: Op) -> bool:
    if op.base_name in ("_to_copy", "clone", "contiguous", "detach", "alias", "lift_fresh", "view_as_real"):
        return False
    return op.kind in ("view", "copy") or op.does("joins", "cuts", "gathers", "copies")


def _moved(op: Op, places: dict[int, Tensor], answers: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the places after an operation that only moves elements; empty if it cannot be run on them."""

    def content(tensor: TensorRef) -> Tensor:
        if tensor.id in places:
            return places[tensor.id]
        if tensor.dtype.startswith(("int", "bool")):
            return answers[tensor.id]
        return torch.zeros(tensor.shape, dtype=torch.float64)

    try:
        results = results_of(op, content)
    except Exception:  # an operation may raise anything when it is called directly
        return {}
    finite = [result.nan_to_num(0.0, 0.0, 0.0).clamp(min=0) for result in results if result.is_floating_point()]
    return {output.id: result for output, result in zip(op.outputs, finite, strict=False)}
