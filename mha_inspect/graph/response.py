"""Measure how the weights of an attention respond to its scores: the axis of the softmax, scale, masks, biases, caps.

The part of the run between scores and weights is run again on drawn scores, whatever it is written with. From

    weights = softmax(scale · scores + bias)                    # batch heads query key

follows `log weights = scale · scores + bias - a number for each query`. So the difference of two answers, without the
mean of each query, is the scale times the difference of the two drawn scores, without its mean; the rest is the bias.

Where all of the way from scores to weights passes through one tensor it is cut. What happens from one cut to the next
is a step, and measured: it multiplies by a number, adds what the scores have no part in, masks keys out, or bends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

import torch
from torch import Tensor

from ..record.ops import Op, TensorRef
from .axis import wide
from .dataflow import Graph
from .ids import any_in, ids_of
from .narrow import narrowed
from .replay import NotReplayedError, Region, Replay, drawn, in_layout, region, results_of
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


@dataclass(frozen=True)
class _Answers:
    """Two answers of one cut to drawn scores, in the order of the scores."""

    first: Tensor
    second: Tensor

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        """Both answers."""
        return self.first, self.second

    @property
    def difference(self) -> Tensor:
        """What changed from the first answer to the second."""
        return self.second - self.first

    def of(self, seen: Tensor) -> _Answers:
        """Return the answers for some of the scores."""
        return _Answers(self.first[seen], self.second[seen])


@dataclass(frozen=True)
class _Rows:
    """The softmax that each score has a part in, a cut, and the weights, all in the order of the scores."""

    rows: Tensor
    """The number of the softmax; -1 for none."""
    values: _Answers
    weights: _Answers


def cuts_of(graph: Graph, part: Region) -> list[Cut]:
    """Return the tensors that all of the way through a region passes through, in order; the source is the first.

    With `e = exp(x - max(x))` and `e / sum(e)` these are x, x - max(x), e, and the result: no maximum, and no sum.
    """
    read_last = _last_reads(graph, part)
    read_last[part.target.id] = len(part.ops)
    source = part.sources[0]
    on_the_way = {*part.results, source.id}
    cuts = [Cut(source, ())]
    since: list[Op] = []
    alive = {source.id}
    for place, op in enumerate(part.ops):
        if since and op.does("softmax"):
            # Other views of the same memory may be read later too, where a part of the scores was written over.
            cuts.append(Cut(op.inputs[0], tuple(since)))
            since = []
        since.append(op)
        alive.update(output.id for output in op.outputs if output.id in on_the_way)
        alive = {number for number in alive if read_last.get(number, -1) > place}
        if len(alive) == 1 and op.output.id in alive:
            cuts.append(Cut(op.output, tuple(since)))
            since = []
    return cuts


def _last_reads(graph: Graph, part: Region) -> dict[int, int]:
    """Return the place in a region of the last operation that reads each tensor, by id."""
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
    return read_last


class Response:
    """The answers of a region from scores to weights to drawn scores."""

    def __init__(
        self,
        graph: Graph,
        scores: TensorRef,
        target: TensorRef,
        constants: Constants,
        size: float = 1.0,
    ) -> None:
        """Draw scores of this size. Raise `NotReplayedError` if the region cannot be run again."""
        self.graph = graph
        if scores.dtype.startswith("complex"):
            raise NotReplayedError("complex scores")
        self.part = region(graph, (scores,), target)
        self._constants = constants
        self._narrow = narrowed(graph, self.part, constants)
        self.scores = self._narrow.of_run(scores)
        """The scores that are measured: some of them, if there are many."""
        self._replay = Replay(graph, self._narrow, constants)
        self.cuts = cuts_of(graph, self.part)
        self._orders: dict[int, Tensor | None] = {}
        self._in_order: dict[int, _Answers | None] = {}
        self._rows: dict[Softmaxed, Tensor | None] = {}
        self._measured_steps: dict[tuple[int, Softmaxed], Step] = {}
        generator = torch.Generator().manual_seed(0)
        first = drawn(self.scores, generator, size)
        second = drawn(self.scores, generator, size)
        self._drawn = first, second
        self._answers = [self._replay.run({scores.id: numbers}) for numbers in self._drawn]
        self._places = _places(self._narrow, self._answers[0])
        self._with_others: list[dict[int, Tensor]] = []
        """The answers with other numbers in the place of unknown ones; empty if there are none."""
        if self.unknown:
            self._with_others = [self._replay.run({scores.id: numbers}, 1) for numbers in self._drawn]

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
        shape = self._narrow.of_run(tensor).shape
        if order is None and shape == self.scores.shape:
            return torch.arange(self.scores.numel).view(shape)
        if order is None:
            return None
        real = order[order >= 0]
        if not real.numel():
            return None
        most = int(torch.bincount(real).max())
        return order if most == 1 else None

    def _by_score(self, tensor: TensorRef, numbers: Tensor) -> Tensor | None:
        """Return the numbers of a tensor in the order of the scores, NaN where it has none; None if it has no order."""
        order = self._order_of(tensor)
        if order is None or order.shape != numbers.shape:
            return None
        is_score = order >= 0
        of_scores = numbers[is_score]
        result = torch.full((self.scores.numel,), torch.nan, dtype=torch.float64)
        result[order[is_score]] = of_scores.real if numbers.is_complex() else of_scores.double()
        return result

    def answers(self, place: int) -> _Answers | None:
        """Return both answers of a cut, in the order of the scores; None if its order is unknown."""
        if place not in self._in_order:
            self._in_order[place] = self._read_answers(place)
        return self._in_order[place]

    def _read_answers(self, place: int) -> _Answers | None:
        """Return both answers of a cut, in the order of the scores; None if its order is unknown."""
        if not place:
            first, second = self._drawn
            return _Answers(first.flatten(), second.flatten())
        return self._both_by_score(self.cuts[place].tensor, self._answers)

    def _both_by_score(
        self,
        tensor: TensorRef,
        answers: Sequence[dict[int, Tensor]],
    ) -> _Answers | None:
        """Return the numbers of a tensor in two answers, in the order of the scores; None if its order is unknown."""
        in_order = [self._by_score(tensor, answer[tensor.id]) for answer in answers]
        first, second = in_order
        if first is None or second is None:
            return None
        return _Answers(first, second)

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

    def first_of_sum_one(self) -> TensorRef | None:
        """Return the first tensor between scores and target that sums to one; None if none does."""
        for op in self.part.ops:
            for output in op.outputs:
                is_number = output.dtype.startswith(("float", "bfloat"))
                if is_number and self._sums_to_one(output):
                    return output
        return None

    def _sums_to_one(self, tensor: TensorRef) -> tuple[int, ...]:
        """Return the dimensions along which the numbers of a tensor sum to one in both answers; empty if none do."""
        shape = self._narrow.of_run(tensor).shape
        answers = [answer[tensor.id] for answer in self._answers]
        if answers[0].dtype != torch.float64 or not shape:
            return ()
        if any(bool((answer < -_ONE).any()) for answer in answers):
            return ()
        maker = self.graph.producer(tensor)
        if maker is not None and maker.does("softmax"):
            place = int(maker.args[1]) % len(shape)
            return (place,) if all(_is_one_or_empty(answer.sum(place)) for answer in answers) else ()
        single = [place for place in range(len(shape)) if _sum_to_one(answers, place)]
        for place in reversed(single):
            if shape[place] > 1:
                return (place,)
        for place in range(len(shape) - 1):  # e.g. over the rows and the columns of an image
            pair = (place, place + 1)
            is_long = min(shape[place], shape[place + 1]) > 1
            if is_long and _sum_to_one(answers, pair):
                return pair
        return ()

    def rows(self, softmaxed: Softmaxed) -> Tensor | None:
        """Return the number of the softmax that each score has a part in, -1 for none; None if unknown."""
        if softmaxed not in self._rows:
            self._rows[softmaxed] = self._read_rows(softmaxed)
        return self._rows[softmaxed]

    def _read_rows(self, softmaxed: Softmaxed) -> Tensor | None:
        """Return the number of the softmax that each score has a part in, -1 for none; None if unknown."""
        tensor = self.cuts[softmaxed.cut].tensor
        order = self._order_of(tensor)
        if order is None:
            return None
        whole = self._narrow.of_run(tensor).shape
        shape = list(whole)
        for place in softmaxed.places:
            shape[place] = 1
        numbers = torch.arange(prod(shape)).view(shape).expand(whole)
        is_score = order >= 0
        rows = torch.full((self.scores.numel,), -1)
        rows[order[is_score]] = numbers[is_score]
        return rows

    def _with_rows(self, place: int, softmaxed: Softmaxed) -> _Rows | None:
        """Return a cut and the weights by the softmax that each score has a part in; None if any is unknown."""
        rows = self.rows(softmaxed)
        values = self.answers(place)
        weights = self.answers(softmaxed.cut)
        if rows is None or values is None or weights is None:
            return None
        return _Rows(rows, values, weights)

    # -- logits -------------------------------------------------------------------------------------------------------

    def steepness(self) -> float:
        """Return by how much more than the scores anything changes on the way to the weights, for small scores."""
        first, second = _small(self.scores)
        given = _largest(second - first)
        answers = [self._replay.run({self.scores.id: numbers}) for numbers in (first, second)]
        steepest = 0.0
        for cut in self.cuts[1:]:
            change = answers[1][cut.tensor.id] - answers[0][cut.tensor.id]
            finite = change[change.isfinite()]
            if finite.numel():
                steepest = max(steepest, _largest(finite) / given)
        return steepest

    def are_logits(self, place: int, softmaxed: Softmaxed) -> bool:
        """Return whether the softmax of a cut is the weights, apart from keys that are masked out later."""
        by_row = self._with_rows(place, softmaxed)
        if by_row is None:
            return False
        rows = by_row.rows
        for value, weight in zip(by_row.values.both, by_row.weights.both, strict=True):
            logarithm = weight.log()
            seen = (rows >= 0) & logarithm.isfinite() & value.isfinite()
            apart = _centred(value, rows, seen) - _centred(logarithm, rows, seen)
            if not bool(seen.any()) or _largest(apart[seen]) > _LOGITS:
                return False
        return True

    def exponent(self, place: int, softmaxed: Softmaxed) -> float | None:
        """Return the number c for which the weights are exponentials of c times a cut, each with a factor of its own.

        From `weights = factors * exp(c * cut) / sum` follows that the difference of two logarithms is c times that of
        the cut, apart from a number for each softmax, however large the scores are. None if it is anything else, e.g.
        `(1 + cut + cut² / 2) / sum`, or if other weights are zero in the other answer.
        """
        by_row = self._with_rows(place, softmaxed)
        if by_row is None:
            return None
        rows, values, weights = by_row.rows, by_row.values, by_row.weights
        is_real = rows >= 0
        seen_first = is_real & (weights.first > _FAINT) & values.first.isfinite()
        seen_second = is_real & (weights.second > _FAINT) & values.second.isfinite()
        # Far below the largest score an exponential is zero in any case.
        vanishes = (weights.second == 0) & seen_first
        appears = (weights.first == 0) & seen_second
        if bool((vanishes | appears).any()):
            return None
        seen = seen_first & seen_second
        if not bool(seen.any()):
            return None
        given = _centred(values.difference, rows, seen)[seen]
        logarithms = weights.second.log() - weights.first.log()
        answer = _centred(logarithms, rows, seen)[seen]
        if not bool((given.abs() > _CLOSE).any()):
            return 1.0  # a single key for each query: its weight is one, whatever its score is
        return _factor(given, answer)

    def seen(self, softmaxed: Softmaxed) -> Tensor | None:
        """Return which weights are not zero in either answer to small scores, in the layout of the weights.

        All of them are run again here, since each may be masked out. None if they are too many.
        """
        tensor = self.cuts[softmaxed.cut].tensor
        seen = torch.zeros(tensor.shape, dtype=torch.bool)
        scores = self.part.sources[0]
        try:
            whole = Replay(self.graph, self.part, self._constants)
            for numbers in _small(scores):
                answer = whole.run({scores.id: numbers})
                seen = seen | (answer[tensor.id] != 0)
        except NotReplayedError:
            return None
        return seen

    def kept_of_ones(self, before: TensorRef, after: TensorRef) -> Tensor | None:
        """Return where a tensor is not zero if all of one before it is one; None if numbers that are unknown decide."""
        try:
            replay = Replay(self.graph, region(self.graph, (before,), after), self._constants)
            ones = torch.ones(before.shape, dtype=torch.float64)
            return None if replay.unknown else replay.run({before.id: in_layout(ones, before)})[after.id] != 0
        except NotReplayedError:
            return None

    def adds_inside(self, place: int, softmaxed: Softmaxed, exponent: float) -> bool:
        """Return whether weights are not the softmax of a cut alone: exponentials have factors of their own.

        Weights that are zero are no matter: their keys are masked out.
        """
        by_row = self._with_rows(place, softmaxed)
        if by_row is None:
            return False
        value, weight = by_row.values.first, by_row.weights.first
        seen = (by_row.rows >= 0) & (weight > _FAINT) & value.isfinite()
        rest = weight.log() - exponent * value
        apart = _centred(rest, by_row.rows, seen)[seen]
        return bool(apart.numel()) and _largest(apart) > _LOGITS

    def is_guard(self, place: int, softmaxed: Softmaxed) -> bool:
        """Return whether a cut is scores less the largest of each softmax, or less the logarithm of their sum.

        Either keeps exponentials from overflowing, whatever the scores are.
        """
        by_row = self._with_rows(place, softmaxed)
        if by_row is None:
            return False
        is_score = by_row.rows >= 0
        rows = by_row.rows[is_score]
        count = int(rows.max()) + 1
        start = torch.full((count,), -torch.inf, dtype=torch.float64)
        largest, sums = [], []
        for numbers in by_row.values.both:
            given = numbers[is_score].nan_to_num(-torch.inf)
            largest.append(start.scatter_reduce(0, rows, given, "amax"))
            sums.append(torch.zeros_like(start).index_add(0, rows, given.exp()).log())
        return all(map(_is_nothing, largest)) or all(map(_is_nothing, sums))

    def is_of_query(self, weights: Softmaxed) -> bool:
        """Return whether weights depend on scores of their own query alone: of every second one the others change."""
        rows = self.rows(weights)
        given = self.answers(0)
        before = self.answers(weights.cut)
        if rows is None or given is None or before is None:
            return False
        others = rows % 2 == 1
        changed = torch.where(others, given.second, given.first)
        scores = self.cuts[0].tensor
        answer = self._replay.run({scores.id: changed.view(self.scores.shape)})
        tensor = self.cuts[weights.cut].tensor
        after = self._by_score(tensor, answer[tensor.id])
        if after is None:
            return False
        own = (rows >= 0) & ~others
        return torch.allclose(after[own], before.first[own], rtol=1e-9, atol=1e-12, equal_nan=True)

    def are_exponentials(self, place: int, weights: Softmaxed, exponent: float) -> bool:
        """Return whether weights are exponentials of a cut with nothing that is computed of other scores."""
        values, both = self.answers(place), self.answers(weights.cut)
        if values is None or both is None:
            return False
        seen = (both.first > _FAINT) & (both.second > _FAINT)
        logarithms = both.second.log() - both.first.log()
        apart = (logarithms - exponent * values.difference)[seen]
        return bool(apart.numel()) and _largest(apart) <= _LOGITS

    def is_linear(self, weights: Softmaxed) -> bool:
        """Return whether weights of the mean of both drawn scores are the mean of both weights."""
        given = self.answers(0)
        both = self.answers(weights.cut)
        if given is None or both is None:
            return False
        scores = self.cuts[0].tensor
        middle = (given.first + given.second) / 2
        answer = self._replay.run({scores.id: middle.view(self.scores.shape)})
        tensor = self.cuts[weights.cut].tensor
        between = self._by_score(tensor, answer[tensor.id])
        mean = (both.first + both.second) / 2
        return between is not None and torch.allclose(between, mean, rtol=1e-7, atol=1e-9, equal_nan=True)

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, place: int, softmaxed: Softmaxed) -> Step:
        """Return what happens between a cut and the one before."""
        key = place, softmaxed
        if key not in self._measured_steps:
            self._measured_steps[key] = self._measure_step(place, softmaxed)
        return self._measured_steps[key]

    def _measure_step(self, place: int, softmaxed: Softmaxed) -> Step:
        """Return what happens between a cut and the one before."""
        before, after = self.answers(place - 1), self.answers(place)
        order = self._order_of(self.cuts[place].tensor)
        rows = self.rows(softmaxed)
        if before is None or after is None or order is None:
            return Step("mix", None)
        if rows is None:
            return self._plain(place, before, after)
        if bool((order < 0).any()) and not self.has_others(place - 1):
            return Step("further")
        # A masked-out score times zero is NaN too: that is the user's, and no other step.
        for old, new in zip(before.both, after.both, strict=True):
            is_lost = new.isnan() & (old > _HIDDEN)
            if bool(is_lost.any()):
                return Step("mix", None)
        return self._measured(place, before, after, rows)

    def _plain(self, place: int, before: _Answers, after: _Answers) -> Step:
        """Return a step before the scores are mixed, e.g. averaged: `same` or `scale`, and `mix` for all others."""
        for numbers in (*before.both, *after.both):
            if not bool(numbers.isfinite().all()):
                return Step("mix", None)
        factor = _factor(torch.cat(before.both), torch.cat(after.both))
        if factor is None or not self._has_factor(place, factor):
            return Step("mix", None)
        return Step("same" if _near(factor, 1, _CLOSE) else "scale", factor)

    # -- logits -------------------------------------------------------------------------------------------------------

    def is_extended(self, place: int) -> bool:
        """Return whether a cut has all scores, and other numbers beside them."""
        order = self._order_of(self.cuts[place].tensor)
        if order is None or not bool((order < 0).any()):
            return False
        return int((order >= 0).sum()) == self.scores.numel

    def is_reordered(self, place: int) -> bool:
        """Return whether scores are moved to other queries or keys at a cut, e.g. rolled, and not only transposed.

        A transposed or reshaped tensor takes equal steps through the scores along its last two dimensions, and the same
        from everywhere.
        """
        order = self._order_of(self.cuts[place].tensor)
        if order is None or order.dim() < 2 or not order.numel():
            return False
        if bool((order < 0).any()):
            return False
        rank = order.dim()
        origin = order.flatten()[0]
        together = torch.zeros_like(order)
        for dim, size in enumerate(order.shape):
            first = order.movedim(dim, -1).flatten(0, -2)[0] - origin
            if dim >= rank - 2 and bool((first.diff() <= 0).any()):
                return True
            shape = [1] * rank
            shape[dim] = size
            together += first.view(shape)
        return not torch.equal(together, order - origin)

    def has_others(self, place: int) -> bool:
        """Return whether a cut has elements that are no scores."""
        order = self._order_of(self.cuts[place].tensor)
        return order is not None and bool((order < 0).any())

    def _measured(
        self,
        place: int,
        before: _Answers,
        after: _Answers,
        rows: Tensor,
    ) -> Step:
        """Return the step from one cut to the next, whose order is known."""
        shows_before = ~_is_hidden(before.first) & ~_is_hidden(before.second)
        shows_after = ~_is_hidden(after.first) & ~_is_hidden(after.second)
        masked = shows_before & _is_hidden(after.first) & _is_hidden(after.second)
        seen = shows_before & shows_after
        for numbers in (*after.both, *before.both):
            seen = seen & numbers.isfinite()
        if not bool(seen.any()):
            return Step("fill")
        change = _Change(before.of(seen), after.of(seen), rows[seen])
        factor = _factor(change.before.difference, change.after.difference)
        if factor is not None:
            is_sure = self._has_factor(place, factor)
            return _linear_step(change, factor, is_sure=is_sure, masks=bool(masked.any()))
        given = change.centred(change.before.difference)
        shift = _factor(given, change.centred(change.after.difference))
        if shift and change.is_shift(shift):
            return Step("shift", shift)
        factors = change.factors()
        if factors is not None:
            return self._of_factors(factors, seen, rows)
        return Step("bend", self._slope(place)) if self._is_elementwise(place) else Step("mix", None)

    def _slope(self, place: int) -> float:
        """Return by what a function of each score multiplies small ones: 1/4 for a sigmoid; 1 if that differs."""
        before, after = [], []
        for numbers in _small(self.scores):
            answer = self._replay.run({self.scores.id: numbers})
            before.append(self._by_score(self.cuts[place - 1].tensor, answer[self.cuts[place - 1].tensor.id]))
            after.append(self._by_score(self.cuts[place].tensor, answer[self.cuts[place].tensor.id]))
        if before[0] is None or before[1] is None or after[0] is None or after[1] is None:
            return 1.0
        given, answered = before[1] - before[0], after[1] - after[0]
        seen = given.isfinite() & answered.isfinite()
        small = _small(self.scores)
        if _factor((small[1] - small[0]).flatten()[seen], given[seen]) is None:
            return 1.0  # what is bent is no number times the scores, e.g. their square
        slope = _factor(given[seen], answered[seen])
        return float(f"{slope:.6g}") if slope else 1.0

    def _has_factor(self, place: int, factor: float) -> bool:
        """Return whether a factor stays with other numbers in the place of unknown ones."""
        if not self._with_others:
            return True
        old = self._both_by_score(self.cuts[place - 1].tensor, self._with_others)
        new = self._both_by_score(self.cuts[place].tensor, self._with_others)
        if old is None or new is None:
            return False
        given, answer = old.difference, new.difference
        seen = given.isfinite() & answer.isfinite() & (answer != 0)
        if not bool(seen.any()):
            return False
        again = _factor(given[seen], answer[seen])
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
        highest = heads.nan_to_num(-torch.inf).amax(1)
        lowest = heads.nan_to_num(torch.inf).amin(1)
        size = heads.nan_to_num(0.0).abs().amax(1)
        is_by_head = bool((highest - lowest <= _CLOSE * size).all())
        if is_by_head:
            return Step("scale", None)
        is_zero_or_one = _is_near(factors, 0) | _is_near(factors, 1)
        return Step("times", 1.0 if bool(is_zero_or_one.all()) else None)

    def _size_of_head(self) -> int:
        """Return the number of scores of one head: those of one query if they are `batch heads key`."""
        shape = self.scores.shape
        return shape[-1] if self._has_one_query() else prod(shape[-2:])

    def _has_one_query(self) -> bool:
        """Return whether the dimension before the keys is one of a batch: each query has keys of its own."""
        op = self.graph.producer(self.scores)
        product = None if op is None else self.graph.product(op)
        if product is None or len(self.scores.shape) < 2:
            return False
        if product.multiply.does("product"):
            return False
        dimensions = self.graph.dimensions
        beside_keys = set(wide(dimensions.of(self.scores)[-2]))
        batch = set(wide(product.axes(dimensions).batch))
        return bool(beside_keys) and beside_keys <= batch

    def _is_elementwise(self, place: int) -> bool:
        """Return whether the operations of a step compute each number from a single one."""
        derived = {self.cuts[place - 1].tensor.id}
        for op in self.cuts[place].ops:
            derived.update(ids_of(op.outputs))
        for op in self.cuts[place].ops:
            if not op.pointwise and op.kind not in ("view", "copy"):
                return False
            read = ids_of(op.inputs)
            if len(read & derived) > 1:
                return False
        return True


@dataclass(frozen=True)
class _Change:
    """The scores that are seen before and after a step, in both answers."""

    before: _Answers
    after: _Answers
    rows: Tensor
    """The number of the softmax that each of them has a part in."""

    @property
    def limit(self) -> float:
        """The largest rounding error of what comes after."""
        return max(_largest(self.after.first), _largest(self.after.second), 1.0) * _CLOSE

    def centred(self, numbers: Tensor) -> Tensor:
        """Return numbers less the mean of each softmax."""
        return _centred(numbers, self.rows, torch.ones_like(numbers, dtype=torch.bool))

    def is_shift(self, factor: float) -> bool:
        """Return whether the step multiplies by this factor, apart from a number for each softmax."""
        for old, new in zip(self.before.both, self.after.both, strict=True):
            if _largest(self.centred(new - factor * old)) > self.limit:
                return False
        return True

    def factors(self) -> Tensor | None:
        """Return the number that each score is multiplied by; None if it is not the same in both answers.

        Zero shows nothing of it: the other answer does, and without one it is as if multiplied by one.
        """
        ratios = []
        for old, new in zip(self.before.both, self.after.both, strict=True):
            is_nothing = (old == 0) & (new == 0)
            ratios.append(torch.where(is_nothing, torch.nan, new / old))
        first = torch.where(ratios[0].isnan(), ratios[1], ratios[0]).nan_to_num(1.0)
        second = torch.where(ratios[1].isnan(), ratios[0], ratios[1]).nan_to_num(1.0)
        if not bool(first.isfinite().all() and second.isfinite().all()):
            return None
        return first if torch.allclose(first, second, rtol=1e-6, atol=1e-9) else None


def _is_nothing(numbers: Tensor) -> bool:
    """Return whether numbers are zero, where they are finite, and some are."""
    finite = numbers[numbers.isfinite()]
    return bool(finite.numel()) and _largest(finite) <= _CLOSE


def _small(scores: TensorRef) -> list[Tensor]:
    """Return scores for which every smooth function is linear, twice."""
    generator = torch.Generator().manual_seed(1)
    first = drawn(scores, generator, _SMALL)
    second = drawn(scores, generator, _SMALL)
    return [first, second]


def _is_hidden(numbers: Tensor) -> Tensor:
    """Return which scores mask their key out, or are NaN."""
    return (numbers <= _HIDDEN) | numbers.isnan()


def _linear_step(change: _Change, factor: float, *, is_sure: bool, masks: bool) -> Step:
    """Return a step that multiplies by a factor, and may add what the scores have no part in.

    Args:
        change: the scores that are seen before and after it.
        factor: the factor.
        is_sure: whether it is the same whatever unknown numbers are.
        masks: whether keys are masked out by the step.
    """
    number = factor if is_sure else None
    if masks:
        return Step("fill", number)
    offset = change.after.first - factor * change.before.first
    if _largest(change.centred(offset)) > change.limit:
        return Step("add", number)
    if number is None or not _near(number, 1, _CLOSE):
        return Step("scale", number)
    return Step("same" if _largest(offset) <= change.limit else "shift")


def _sum_to_one(answers: Sequence[Tensor], places: int | tuple[int, ...]) -> bool:
    """Return whether these answers sum to one along these dimensions."""
    return all(_is_one(answer.sum(places)) for answer in answers)


def _is_one(sums: Tensor) -> bool:
    """Return whether most sums are one, and all others are of masked-out rows: zero or NaN."""
    return _is_one_or_empty(sums) and bool(((sums - 1).abs() < _ONE).any())


def _is_one_or_empty(sums: Tensor) -> bool:
    """Return whether sums are one, or those of rows in which every key is masked out: zero or NaN."""
    is_empty = sums.isnan() | (sums.abs() < _ONE)
    return bool((((sums - 1).abs() < _ONE) | is_empty).all())


def _is_constant(numbers: Tensor, rows: Tensor) -> bool:
    """Return whether all numbers of each row are equal, of rows that are known by number."""
    count = int(rows.max()) + 1
    start = torch.zeros(count, dtype=torch.float64)
    lowest = start.scatter_reduce(0, rows, numbers, "amin", include_self=False)
    highest = start.scatter_reduce(0, rows, numbers, "amax", include_self=False)
    return bool((highest - lowest <= _CLOSE * highest.abs()).all())


def _is_near(numbers: Tensor, number: float) -> Tensor:
    """Return which numbers are this one, apart from rounding errors."""
    return (numbers - number).abs() <= _CLOSE


def _near(left: float, right: float, error: float) -> bool:
    size = max(abs(left), abs(right), 1e-12)
    return abs(left - right) <= error * size


def _largest(numbers: Tensor) -> float:
    """Return the largest absolute number."""
    return float(numbers.abs().max())


def _factor(given: Tensor, answer: Tensor) -> float | None:
    """Return the number that all differences are multiplied by; None if there is no such number."""
    square = float((given * given).sum())
    if not square:
        return None
    # Twelve digits are measured, and a scale of 1.5 is not 1.5000000000000002.
    factor = float(f"{float((given * answer).sum()) / square:.12g}")
    limit = 1e-6 * max(_largest(answer), 1e-12)
    return factor if _largest(answer - factor * given) <= limit else None


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
    numbers = torch.arange(1, source.numel + 1, dtype=torch.float64)
    counted = {source.id: numbers.view(source.shape)}
    for op in part.ops:
        makes_numbers = op.base_name.endswith("_like") or op.base_name.startswith("new_")
        if makes_numbers or not op.outputs or not any_in(op.inputs, counted):
            continue
        if _moves_elements(op):
            counted.update(_moved(op, counted, answers))
        else:
            counted.update(_in_place(op, counted))
    places = {}
    for number, order in counted.items():
        places[number] = (order - 1).long().clamp(min=-1)
    return places


def _in_place(op: Op, counted: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the places after an operation that changes elements where they are: those of an input of the shape."""
    by_shape: dict[tuple[int, ...], Tensor] = {}
    for tensor in op.inputs:
        if tensor.id in counted:
            by_shape.setdefault(tensor.shape, counted[tensor.id])
    places = {}
    for output in op.outputs:
        if output.shape in by_shape and not output.dtype.startswith("int"):
            places[output.id] = by_shape[output.shape]
    return places


def _moves_elements(op: Op) -> bool:
    if op.base_name in ("_to_copy", "clone", "contiguous", "detach", "alias", "lift_fresh", "view_as_real"):
        return False
    return op.kind in ("view", "copy") or op.does("joins", "cuts", "gathers", "copies")


def _moved(
    op: Op,
    places: dict[int, Tensor],
    answers: dict[int, Tensor],
) -> dict[int, Tensor]:
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
    floats = [result for result in results if result.is_floating_point()]
    moved = {}
    for output, result in zip(op.outputs, floats, strict=False):
        moved[output.id] = result.nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
    return moved
