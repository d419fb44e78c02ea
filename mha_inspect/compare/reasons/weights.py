"""Find why two modules with the same weights do not compute the same: each candidate is tried first.

A candidate is a change of the weights of one side: the rows of a packed weight in the order in which that side reads
them, the features of each head as its rotation pairs them, its heads as they share keys, its scale. The other side's
weights are written into it with that change, and it runs again. If both sides return the same now, this was the reason,
and the only one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

import torch
from torch import Tensor

from ...measure.reorder import reordered
from ...measure.weights import Numbers, Weights
from ...naming.canonical import returned_content
from ...naming.score_formulas import scale_text
from ...record.arguments import first_tensor
from ..comparable_run import ComparableRun, Comparison, overall
from ..pair import Where, Why
from ..shared_weights import unreadable, weights_by_name, write_by_name
from .rows import orders

_OF_QUERIES = ("W_q", "b_q")
_OF_ROTATION = ("W_q", "b_q", "W_k", "b_k")
_BY_HEAD = ("W_q", "b_q", "W_o", "W_g", "b_g")
"""The parts whose heads are query heads."""
_NEAR = 100
"""Outputs that are this many rounding errors apart, and more, are not the same."""
_SHOWN = 8
"""The most features of an order to list."""
_SAME_RATIO = 1e-6
"""Scales are the same if their ratio is 1 up to this."""
_TOGETHER = 2
"""The most changes that are tried together."""
_ALONE = " Nothing else differs."


@dataclass(frozen=True, eq=False)
class _Change:
    """A change of the weights of each attention that may make two sides the same."""

    reason: Why
    """What differs."""
    apply: Callable[[int, Numbers], Numbers]
    """From the place of an attention and its weights by part to changed weights."""
    weights: str = ""
    """The weights with which the sides may be the same, in words; empty for a number that is no weight."""


def of_weights(left: ComparableRun, right: ComparableRun, where: Where) -> tuple[Why, ...]:
    """Return the reasons of the changes that make both sides the same; the fewest that do."""
    if unreadable(left, right) or not _have_the_same_shapes(left, right):
        return ()
    before: Numbers = {}
    for name, tensor in weights_by_name(right).items():
        before[name] = tensor.detach().clone()
    trial = _Trial(
        left=left,
        right=right,
        numbers=[weights.read() for weights in left.weights],
        nearness=_Nearness(left, right),
    )
    try:
        return _agreeing(trial, where)
    finally:
        write_by_name(right, before)
        right.forget()


def _agreeing(trial: _Trial, where: Where) -> tuple[Why, ...]:
    """Return the reasons of the fewest changes with which both sides return the same."""
    left, right = trial.left, trial.right
    of_orders: tuple[Why, ...] = ()
    if trial.write(()):
        of_orders = tuple(orders(left, right, where))
        if trial.is_same():
            return of_orders
    changes = list(_changes(left, right, where))
    for count in range(1, _TOGETHER + 1):
        for together in combinations(changes, count):
            if trial.write(together) and trial.is_same():
                is_alone = count == 1 and not of_orders
                return (*of_orders, *_as_reasons(together, where, is_alone=is_alone))
    return ()


def _as_reasons(together: Sequence[_Change], where: Where, *, is_alone: bool) -> Iterator[Why]:
    """Yield the reason of each change, and what was tried: one change alone, or several that are needed together."""
    for place, change in enumerate(together, 1):
        sentence = change.reason.sentence
        if is_alone and change.weights:
            sentence += f" With {change.weights}, {where.subject} returns the same."
        elif is_alone:
            sentence += _ALONE
        elif change.weights:
            sentence += f" Take {change.weights}."
        if not is_alone and place == len(together):
            sentence += f" With all of these changes, {where.subject} returns the same."
        yield replace(change.reason, sentence=sentence)


def _have_the_same_shapes(left: ComparableRun, right: ComparableRun) -> bool:
    pairs = zip(left.weights, right.weights, strict=True)
    return all(ours.shapes == theirs.shapes for ours, theirs in pairs)


@dataclass(frozen=True, eq=False)
class _Trial:
    """Two sides, and the left weights, which are written into the right side with changes."""

    left: ComparableRun
    right: ComparableRun
    numbers: Sequence[Numbers]
    """The left weights of each attention, by part."""
    nearness: _Nearness

    def write(self, changes: Sequence[_Change]) -> bool:
        """Write the left weights into the right side, head by head and changed; return whether they are there then.

        One parameter may be read by several projections: then the last one wins.
        """
        self.right.forget()
        written = []
        for place, weights in enumerate(self.right.weights):
            changed = self.numbers[place]
            for change in changes:
                changed = change.apply(place, dict(changed))
            weights.write(changed)
            written.append(changed)
        for weights, changed in zip(self.right.weights, written, strict=True):
            if not _are_equal(changed, weights.read()):
                return False
        return True

    def is_same(self) -> bool:
        """Return whether both sides return the same with the weights that were written."""
        if not self.nearness.may_be_same():
            return False
        comparison = Comparison(self.left, self.right)
        masked = tuple(sorted(set(chain.from_iterable(comparison.masked))))
        further = [difference.verdict for difference in comparison.further()]
        return overall([comparison.output(masked).verdict, *further]) == "same"


def _are_equal(wanted: Numbers, after: Numbers) -> bool:
    """Return whether the weights are there as they were written, in the dtype of the side."""
    return all(torch.equal(after[part], tensor.to(after[part].dtype)) for part, tensor in wanted.items())


class _Nearness:
    """Compares the plain outputs of two sides after a change of weights, before both are recorded and measured."""

    def __init__(self, left: ComparableRun, right: ComparableRun) -> None:
        """Keep the output of the left, its rounding error, and how the right lays its output out."""
        self._expected = left.output
        self._floor = left.output_floor(())
        self._right = right
        self._names = right.run

    def may_be_same(self) -> bool:
        """Return whether the right side's output is near the left one's, or in a layout that is not known."""
        with torch.no_grad(), self._right.subject.apart() as subject:
            returned = first_tensor(subject.plain()).detach()
        content = returned_content(self._names, returned)
        output = returned if content is None else content
        if output.shape != self._expected.shape:
            return True
        apart = (output.double() - self._expected.double()).nan_to_num(0.0).abs()
        if not apart.numel():
            return True
        floor = max(self._floor, torch.finfo(torch.float64).tiny)
        return float(apart.max()) <= _NEAR * floor


# -- changes that are tried -------------------------------------------------------------------------------------------


def _changes(left: ComparableRun, right: ComparableRun, where: Where) -> Iterator[_Change]:
    """Yield what may make two sides the same, beside the order of rows."""
    yield from _scales(left, right, where)
    yield from _rotations(left.weights, where)
    yield from _shared_heads(left.weights, right.weights, where)


def _rotations(weights: Sequence[Weights], where: Where) -> Iterator[_Change]:
    """Yield both ways between a rotation of the halves of a head and one of neighbouring features."""
    width = weights[0].shapes.get("W_q", (0, 0))[1]
    if width < 4 or width % 2:
        return
    half = width // 2
    halves = _Pairing("two half", f"(i, i + {half})")
    neighbours = _Pairing("half two", "(2i, 2i + 1)")
    yield _rotation(halves, neighbours, width, where)
    yield _rotation(neighbours, halves, width, where)


@dataclass(frozen=True)
class _Pairing:
    """Which features of a head a rotation turns together."""

    pattern: str
    """The axes of a head's features, as in einops: `two half`."""
    features: str
    """`(2i, 2i + 1)`."""


def _rotation(left: _Pairing, right: _Pairing, width: int, where: Where) -> _Change:
    """Return the change of heads of this width from the pairing of the left side to that of the right."""
    half = width // 2
    order = reordered(left.pattern, right.pattern, {"two": 2, "half": half})
    shown = " ".join(map(str, order[:_SHOWN].tolist()))
    if width > _SHOWN:
        shown += " …"
    sentence = (
        f"The rotation turns features {left.features} of a head together {where.left}, and {right.features} "
        f"{where.right}."
    )
    line = f'rearrange(w, "(heads {left.pattern}) e -> (heads {right.pattern}) e", two=2, half={half})'
    return _Change(
        Why("rotation", sentence, line),
        _reordering(_OF_ROTATION, order, dim=1),
        weights=f"the rows of each head of W_q and W_k in the order {shown}",
    )


def _reordering(parts: Sequence[str], order: Tensor, dim: int) -> Callable[[int, Numbers], Numbers]:
    """Return a change that takes heads, or features of heads, in an order: of `heads head_dim embed` along `dim`."""

    def reorder(_: int, numbers: Numbers) -> Numbers:
        for part in parts:
            if part in numbers:
                places = order.to(numbers[part].device)
                numbers[part] = numbers[part].index_select(dim, places)
        return numbers

    return reorder


def _shared_heads(left: Sequence[Weights], right: Sequence[Weights], where: Where) -> Iterator[_Change]:
    """Yield the query heads in the order in which the right side shares keys, if the left shares them in another."""
    ours = left[0].users()
    theirs = right[0].users()
    if ours == theirs or sorted(ours) != sorted(theirs):
        return
    remaining: dict[int, list[int]] = {}
    for head, key_head in enumerate(ours):
        remaining.setdefault(key_head, []).append(head)
    order = [remaining[key_head].pop(0) for key_head in theirs]
    sentence = (
        f"Query heads share keys in another order: head 1 uses key head {ours[1]} {where.left} and {theirs[1]} "
        f"{where.right}{_repeats(ours, theirs)}."
    )
    yield _Change(
        Why("shared heads", sentence),
        _reordering(_BY_HEAD, torch.tensor(order), dim=0),
        weights=f"the query heads in the order {' '.join(map(str, order))}, in W_q and W_o",
    )


def _repeats(left: Sequence[int], right: Sequence[int]) -> str:
    """Return how torch repeats key heads for these query heads, on both sides; empty for other orders."""
    ours = _repeat(left)
    theirs = _repeat(right)
    return f", {ours} against {theirs}" if ours and theirs else ""


def _repeat(users: Sequence[int]) -> str:
    """Return how torch repeats key heads: `0 1 0 1` by repeat, `0 0 1 1` by repeat_interleave; empty for others."""
    heads, count = len(users), len(set(users))
    if list(users) == [head % count for head in range(heads)]:
        return "repeat"
    if list(users) == [head * count // heads for head in range(heads)]:
        return "repeat_interleave"
    return ""


def _scales(left: ComparableRun, right: ComparableRun, where: Where) -> Iterator[_Change]:
    """Yield the ratio of the scales, if they differ."""
    ratios: list[float] = []
    sentence = ""
    for (ours, _), (theirs, _) in zip(left.attentions, right.attentions, strict=False):
        ratio = _ratio(ours.scale, theirs.scale)
        ratios.append(ratio)
        if not sentence and abs(ratio - 1) > _SAME_RATIO:
            on_left, on_right = _scale_words(ours.scale), _scale_words(theirs.scale)
            sentence = f"The scores are {on_left} {where.left} and {on_right} {where.right}."
    if not sentence:
        return

    def scaled(place: int, numbers: Numbers) -> Numbers:
        for part in _OF_QUERIES:
            if part in numbers:
                numbers[part] = numbers[part] * ratios[place]
        return numbers

    yield _Change(Why("scale", sentence), scaled)


def _ratio(left: float | None, right: float | None) -> float:
    """Return by how much the left scale is larger; 1 if one of them is unknown."""
    return left / right if left and right else 1.0


def _scale_words(scale: float | None) -> str:
    """Return a scale in words: `divided by √8`."""
    text = scale_text(scale).strip()
    if not text:
        return "not scaled"
    if text.startswith("/"):
        return f"divided by {text.removeprefix('/').strip()}"
    return f"multiplied by {text[1:].strip()}"
