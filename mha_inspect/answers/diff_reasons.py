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
from math import isclose

import torch
from torch import Tensor

from ..measure.reorder import Reordering, explain, reordered
from ..measure.slopes import NEAR, rises_with_distance, slopes_in
from ..measure.weights import Numbers, Weights
from ..naming.canonical import returned_content
from ..naming.score_formulas import scale_text
from ..naming.visibility import sees_by_head, visibility
from ..record.arguments import argument_names, first_tensor, tensors_in
from ..reports.diff import DiffReason
from ..text import first_few, listed, plural, small, spans
from .comparable_run import ComparableRun, Comparison, overall
from .norm_reasons import of_norms
from .shared_weights import unreadable, weights_by_name, write_by_name
from .stage_reasons import stage_reason

_OF_QUERIES = ("W_q", "b_q")
_OF_ROTATION = ("W_q", "b_q", "W_k", "b_k")
_BY_HEAD = ("W_q", "b_q", "W_o", "W_g", "b_g")
"""The parts whose heads are query heads."""
_AFTER_SCORES = ("masked_scores", "weights")
_LOWERED = 1e-3
"""What a mask takes from a score at least; less may be rounding."""
_MASKED_OUT = 1e4
"""A score that is lowered by this gets no weight in any dtype."""
_NEAR = 100
"""Outputs that are this many rounding errors apart, and more, are not the same."""
_CERTAIN = 10
"""Differences above this many rounding errors are no rounding."""
_HEADS = 8
"""The most slopes to list."""
_SAME_RATIO = 1e-6
"""Scales are the same if their ratio is 1 up to this."""
_TOGETHER = 2
"""The most changes that are tried together."""
_OF_BIASES = ("add", "fill", "times", "scale")
"""Steps from the scores to the softmax that mask, scale, or add a bias."""
_ALONE = " Nothing else differs."


@dataclass(frozen=True, eq=False)
class _Change:
    """A change of the weights of each attention that may make two sides the same."""

    reason: DiffReason
    """What differs."""
    apply: Callable[[int, Numbers], Numbers]
    """From the place of an attention and its weights by part to changed weights."""
    weights: str = ""
    """The weights with which the sides may be the same, in words; empty for a number that is no weight."""


@dataclass(frozen=True)
class Where:
    """How the two sides are called in a sentence."""

    left: str = "on the left"
    right: str = "on the right"
    subject: str = "the right"
    """The right side as the subject of a sentence."""


def reasons(
    left: ComparableRun, right: ComparableRun, first: str | None, where: Where | None = None, place: int = 0
) -> tuple[DiffReason, ...]:
    """Return why two sides with the same weights and input differ; empty if no candidate was the reason.

    `first` is the first stage that differs, in the attention at `place`. The weights of the right side are as before
    when this returns.
    """
    called = where or Where()
    changes = _tried(left, right, called)
    if changes:
        return changes
    for candidates in (
        _of_masks(left, right, first, called),
        of_norms(left, right, first, called),
        _of_stage(left, right, first, place, called),
        _of_padding(left, right),
    ):
        why = tuple(candidates)
        if why:
            return why
    return ()


def _of_stage(
    left: ComparableRun, right: ComparableRun, first: str | None, place: int, where: Where
) -> Iterator[DiffReason]:
    """Yield what makes the first stage that differs the same."""
    if first is None:
        return
    reason = stage_reason(left, right, place, first, (where.left, where.right))
    if reason is not None:
        yield reason


def _tried(left: ComparableRun, right: ComparableRun, where: Where) -> tuple[DiffReason, ...]:
    """Return the reasons of the changes that make both sides the same; the fewest that do."""
    if unreadable(left, right) or not _have_the_same_shapes(left, right):
        return ()
    before = {name: tensor.detach().clone() for name, tensor in weights_by_name(right).items()}
    numbers = [weights.read() for weights in left.weights]
    nearness = _Nearness(left, right)
    try:
        return _agreeing(left, right, numbers, where, nearness)
    finally:
        write_by_name(right, before)
        right.forget()


def _agreeing(
    left: ComparableRun, right: ComparableRun, numbers: Sequence[Numbers], where: Where, nearness: _Nearness
) -> tuple[DiffReason, ...]:
    """Return the reasons of the fewest changes with which both sides return the same."""
    as_read = _written(left, right, numbers, ())
    orders = tuple(_orders(left, right, where)) if as_read else ()
    if as_read and nearness.may_be_same() and _is_same(left, right):
        return orders
    changes = list(_changes(left, right, where))
    for count in range(1, _TOGETHER + 1):
        for together in combinations(changes, count):
            if _written(left, right, numbers, together) and nearness.may_be_same() and _is_same(left, right):
                return (*orders, *_as_reasons(together, where, is_alone=not orders and count == 1))
    return ()


def _as_reasons(together: Sequence[_Change], where: Where, *, is_alone: bool) -> Iterator[DiffReason]:
    """Yield the reason of each change, and what was tried: one change alone, or several that are needed together."""
    for place, change in enumerate(together, 1):
        sentence = change.reason.sentence
        if is_alone:
            sentence += f" With {change.weights}, {where.subject} returns the same." if change.weights else _ALONE
        elif change.weights:
            sentence += f" Take {change.weights}."
        if not is_alone and place == len(together):
            sentence += f" With all of these changes, {where.subject} returns the same."
        yield replace(change.reason, sentence=sentence)


def _have_the_same_shapes(left: ComparableRun, right: ComparableRun) -> bool:
    pairs = zip(left.weights, right.weights, strict=True)
    return all(ours.shapes == theirs.shapes for ours, theirs in pairs)


def _written(left: ComparableRun, right: ComparableRun, numbers: Sequence[Numbers], changes: Sequence[_Change]) -> bool:
    """Write the left weights into the right side, head by head and changed; return whether they are there as written.

    One parameter may be read by several projections: then the last one wins.
    """
    right.forget()
    wanted = []
    for place, (weights, given) in enumerate(zip(right.weights, numbers, strict=True)):
        changed = given
        for change in changes:
            changed = change.apply(place, dict(changed))
        weights.write(changed)
        wanted.append(changed)
    for weights, changed in zip(right.weights, wanted, strict=True):
        after = weights.read()
        if any(not torch.equal(after[part], tensor.to(after[part].dtype)) for part, tensor in changed.items()):
            return False
    return True


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
        return not apart.numel() or float(apart.max()) <= _NEAR * max(self._floor, torch.finfo(torch.float64).tiny)


def _is_same(left: ComparableRun, right: ComparableRun) -> bool:
    comparison = Comparison(left, right)
    masked = tuple(sorted(set(chain.from_iterable(comparison.masked))))
    further = (difference.verdict for difference in comparison.further())
    return overall([comparison.output(masked).verdict, *further]) == "same"


# -- the order of rows ------------------------------------------------------------------------------------------------


def _orders(left: ComparableRun, right: ComparableRun, where: Where) -> Iterator[DiffReason]:
    """Yield a reason for each parameter whose rows the sides read in another order; the left weights are in the right.

    The parameters have the same names and shapes.
    """
    ours, theirs = weights_by_name(left), weights_by_name(right)
    mentioned: set[str] = set()
    for weights, right_weights in zip(left.weights, right.weights, strict=True):
        for name, parts in _parts_by_parameter(weights).items():
            if name not in theirs or ours[name].shape != theirs[name].shape or ours[name].dim() != 2:
                continue
            order = explain(ours[name], theirs[name], _sizes(weights, parts))
            if order is None or not order.names or order.names[0].pattern in mentioned:
                continue
            named = order.names[0]
            mentioned.add(named.pattern)
            before, arrow, after = named.pattern.partition(" -> ")
            sentence = f"The {order.axis} of {name} are read in another order: {before}"
            if arrow:
                sentence = f"The {order.axis} of {name} are read as {before} {where.left} and as {after} {where.right}"
            sentence += _example((weights, right_weights), name, parts, where)
            yield DiffReason("order", f"{sentence}.", named.line(name.rpartition(".")[2], order.axis, 2))


def _sizes(weights: Weights, parts: Sequence[str]) -> dict[str, int]:
    """Return the sizes that a pattern of the rows of a parameter may have: heads, their features, packed matrices."""
    return {
        "heads": weights.num_heads,
        "kv_heads": weights.num_kv_heads,
        "parts": len(parts),
        "head_dim": weights.shapes[parts[0]][1],
    }


def reordered_copies(left: ComparableRun, right: ComparableRun) -> Iterator[str]:
    """Yield sentences for parameters that were copied in another order, or transposed, into one of another name.

    The weights are the same head by head. A file of one module would not fit the other, although its shapes do.
    """
    mentioned: set[str] = set()
    transposed: list[str] = []
    for copy in _copies(left, right):
        name, right_name, order = copy.name, copy.right_name, copy.order
        if not order.names:
            if order.transposed:
                transposed.append(name if name == right_name else f"{name} in {right_name}")
            continue
        named = order.names[0]
        if named.pattern in mentioned:
            continue
        mentioned.add(named.pattern)
        yield (
            f"The {order.axis} of {name} are in another order in {right_name}, {named.pattern}: loaded as it is, the "
            "file of one side is wrong on the other."
        )
        line = named.line("w", order.axis, 2)
        if line:
            yield f"To convert the weights of the left: {line}"
    if transposed:
        yield (
            f"Transposed copies: {first_few(transposed, 3)}. Loaded as it is, the file of one side is wrong on the "
            "other, and square shapes do not show it."
        )


@dataclass(frozen=True)
class _Copy:
    """A parameter of the left whose numbers are in one of the right, in another order."""

    name: str
    right_name: str
    order: Reordering


def _copies(left: ComparableRun, right: ComparableRun) -> Iterator[_Copy]:
    """Yield the parameters of the left whose numbers are in one of the right in another order."""
    ours, theirs = weights_by_name(left), weights_by_name(right)
    for weights, right_weights in zip(left.weights, right.weights, strict=False):
        names = {tuple(parts): name for name, parts in _parts_by_parameter(right_weights).items()}
        for name, parts in _parts_by_parameter(weights).items():
            right_name = names.get(tuple(parts))
            if right_name is None or name not in ours or right_name not in theirs or ours[name].dim() != 2:
                continue
            order = explain(ours[name], theirs[right_name], _sizes(weights, parts))
            if order is not None and order.is_exact:
                yield _Copy(name, right_name, order)


def _parts_by_parameter(weights: Weights) -> dict[str, list[str]]:
    """Return the matrices in each parameter: `{"qkv.weight": ["W_q", "W_k", "W_v"]}`."""
    parts: dict[str, list[str]] = {}
    for part, projection in weights.projections.items():
        if part.startswith("W"):
            for name in dict.fromkeys(projection.parameters):
                parts.setdefault(name, []).append(part)
    return parts


def _example(sides: Sequence[Weights], name: str, parts: Sequence[str], where: Where) -> str:
    """Return where a head of a part is on both sides, of those that are elsewhere; empty if its rows are unknown."""
    for part in parts:
        for head in (1, 0):
            ours, theirs = (_rows(side, name, part, head) for side in sides)
            if ours and theirs and ours != theirs:
                return f": {part} of head {head} is rows {ours} {where.left} and rows {theirs} {where.right}"
    return ""


def _rows(weights: Weights, name: str, part: str, head: int) -> str:
    """Return the rows of a head of a part in a parameter: `8–15`; empty if unknown."""
    projection = weights.projections.get(part)
    width = weights.module.get_parameter(name).shape[-1]
    for piece in projection.parts if projection is not None else ():
        if piece.parameter.name == name and head in piece.heads and piece.inner == (width, 1):
            return spans([int(place) // width for place in piece.heads[head]])
    return ""


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
    sizes = {"two": 2, "half": half}
    halves, pairs = f"(i, i + {half})", "(2i, 2i + 1)"
    ways = (("two half", "half two", halves, pairs), ("half two", "two half", pairs, halves))
    for before, after, ours, theirs in ways:
        order = reordered(before, after, sizes)
        shown = " ".join(map(str, order[:8].tolist())) + (" …" if width > 8 else "")
        sentence = f"The rotation turns features {ours} of a head together {where.left}, and {theirs} {where.right}."
        needed = f"the rows of each head of W_q and W_k in the order {shown}"
        line = f'rearrange(w, "(heads {before}) e -> (heads {after}) e", two=2, half={half})'
        yield _Change(DiffReason("rotation", sentence, line), _reordering(_OF_ROTATION, order, dim=1), needed)


def _reordering(parts: Sequence[str], order: Tensor, dim: int) -> Callable[[int, Numbers], Numbers]:
    """Return a change that takes heads, or features of heads, in an order: of `heads head_dim embed` along `dim`."""

    def apply(_: int, numbers: Numbers) -> Numbers:
        for part in parts:
            if part in numbers:
                numbers[part] = numbers[part].index_select(dim, order.to(numbers[part].device))
        return numbers

    return apply


def _shared_heads(left: Sequence[Weights], right: Sequence[Weights], where: Where) -> Iterator[_Change]:
    """Yield the query heads in the order in which the right side shares keys, if the left shares them in another."""
    ours, theirs = left[0].users(), right[0].users()
    if ours == theirs or sorted(ours) != sorted(theirs):
        return
    remaining: dict[int, list[int]] = {}
    for head, key_head in enumerate(ours):
        remaining.setdefault(key_head, []).append(head)
    order = [remaining[key_head].pop(0) for key_head in theirs]
    sentence = (
        f"Query heads share keys in another order: head 1 uses key head {ours[1]} {where.left} and {theirs[1]} "
        f"{where.right}{_ways(ours, theirs)}."
    )
    needed = f"the query heads in the order {' '.join(map(str, order))}, in W_q and W_o"
    yield _Change(DiffReason("shared heads", sentence), _reordering(_BY_HEAD, torch.tensor(order), dim=0), needed)


def _ways(left: Sequence[int], right: Sequence[int]) -> str:
    """Return how torch repeats key heads for these query heads, on both sides; empty for other orders."""
    way, right_way = _repeat(left), _repeat(right)
    return f", {way} against {right_way}" if way and right_way else ""


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
    scales = [
        (ours.scale, theirs.scale) for (ours, _), (theirs, _) in zip(left.attentions, right.attentions, strict=False)
    ]
    ratios = [_ratio(ours, theirs) for ours, theirs in scales]
    place = next((place for place, ratio in enumerate(ratios) if abs(ratio - 1) > _SAME_RATIO), None)
    if place is None:
        return
    ours, theirs = (_scale_words(scale) for scale in scales[place])
    sentence = f"The scores are {ours} {where.left} and {theirs} {where.right}."

    def apply(at: int, numbers: Numbers) -> Numbers:
        for part in _OF_QUERIES:
            if part in numbers:
                numbers[part] = numbers[part] * ratios[at]
        return numbers

    yield _Change(DiffReason("scale", sentence), apply)


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


# -- masks ------------------------------------------------------------------------------------------------------------


def _of_masks(left: ComparableRun, right: ComparableRun, first: str | None, where: Where) -> Iterator[DiffReason]:
    """Yield how the masks differ, where the scores are the same and the masked scores or weights are not."""
    if first not in _AFTER_SCORES:
        return
    for place in range(min(len(left.attentions), len(right.attentions))):
        sentence = (
            visible_pairs(left, right, place, where)
            or _of_slopes(left, right, place, where)
            or _of_biases(left, right, place, where)
            or _of_lowered_scores(left, right, place, where)
        )
        if sentence:
            yield DiffReason("mask", sentence)
            return


def _of_padding(left: ComparableRun, right: ComparableRun) -> Iterator[DiffReason]:
    """Yield the mask that says where the outputs differ: they are the same at every token that it keeps.

    Kernels and implementations are free in what they return for padding.
    """
    ours, theirs = left.output, right.output
    output = Comparison(left, right).output(())
    if ours.shape != theirs.shape or ours.dim() < 3 or output.noise_floor is None:
        return
    apart = (ours.double() - theirs.double()).nan_to_num(torch.inf).abs().flatten(2).amax(2)  # batch token
    differs = apart > _CERTAIN * output.noise_floor
    subject = left.subject
    for name, mask in tensors_in(argument_names(subject.module, subject.args, subject.kwargs)):
        if mask.shape != differs.shape or not bool(((mask == 0) | (mask == 1)).all()):
            continue
        for value in (0, 1):
            masked = (mask == value).to(differs.device)
            if not _has_all(masked, differs):
                continue
            tokens = f"{plural(int(masked.sum()), 'token')} of {masked.numel()}"
            yield DiffReason(
                "padding",
                f"The outputs differ only at the {tokens} where {name} is {value}.",
            )
            return


def _has_all(masked: Tensor, differs: Tensor) -> bool:
    """Return whether every token that differs is masked, and some tokens are masked and some not: `batch token`."""
    return bool(masked.any()) and not bool(masked.all()) and not bool((differs & ~masked).any())


def visible_pairs(left: ComparableRun, right: ComparableRun, place: int, where: Where) -> str:
    """Return which pairs of a query and a key only one side sees; empty if both see the same, or it is unknown."""
    seen = []
    for side in (left, right):
        visible = visibility(side.run.graph, *side.attentions[place])
        if visible is None or visible.seen is None:
            return ""
        seen.append(visible.seen)
    ours, theirs = seen
    if ours.shape != theirs.shape or torch.equal(ours, theirs):
        return ""
    apart = ours != theirs
    query = int(apart.any(1).nonzero()[0])
    return (
        f"The masks differ in {int(apart.sum()):,} of {plural(apart.numel(), 'pair')} of a query and a key: query "
        f"{query} sees {_keys(ours[query])} {where.left} and {_keys(theirs[query])} {where.right}."
    )


@dataclass(frozen=True, eq=False)
class _Biased:
    """Scores with a bias, `batch heads query key`."""

    scores: Tensor
    """The scores without it."""
    masked: Tensor
    """The scores with it."""
    seen: Tensor
    """True for the keys that a query sees."""

    @property
    def slopes(self) -> Sequence[float]:
        """The slope of each head by the position of the key; empty if the bias is not linear in it."""
        return slopes_in(self.scores, self.masked, self.seen)

    @property
    def rises_with_distance(self) -> bool:
        """Whether keys far from their query get higher scores."""
        return rises_with_distance(self.scores, self.masked, self.seen)

    @property
    def bias(self) -> Tensor:
        """The bias; 0 where a query does not see a key."""
        return (self.masked.double() - self.scores.double()).masked_fill(~self.seen, 0.0)


def _biased(side: ComparableRun, place: int) -> _Biased | None:
    """Return the scores of an attention without and with a bias; None if one of them is unknown."""
    scores, masked, weights = (side.content(place, stage) for stage in ("scores", "masked_scores", "weights"))
    if scores is None or masked is None or weights is None or not scores.shape == masked.shape == weights.shape:
        return None
    return _Biased(scores, masked, sees_by_head(weights, masked))


def _of_slopes(left: ComparableRun, right: ComparableRun, place: int, where: Where) -> str:
    """Return the slopes of two biases that are linear in the position of the key; empty for other or equal biases."""
    if _changes_scores(left, right, place):
        return ""
    left_biased, right_biased = _biased(left, place), _biased(right, place)
    if left_biased is None or right_biased is None:
        return ""
    ours, theirs = left_biased.slopes, right_biased.slopes
    if not ours or len(ours) != len(theirs):
        return ""
    if not all(isclose(a, b, rel_tol=NEAR) for a, b in zip(ours, theirs, strict=True)):
        sentence = f"The slopes of the bias by head are {_shown(ours)} {where.left} and {_shown(theirs)} {where.right}."
        return sentence + _shift(ours, theirs, where)
    if left_biased.rises_with_distance == right_biased.rises_with_distance:
        return ""
    far, near = (where.left, where.right) if left_biased.rises_with_distance else (where.right, where.left)
    return (
        f"The slopes of the bias by head are {_shown(ours)} on both sides, with opposite signs. Keys far from their "
        f"query get higher scores {far} and lower ones {near}."
    )


def _shown(slopes: Sequence[float]) -> str:
    """Return the slopes of the first heads: `0.25, 0.0625, …`."""
    shown = ", ".join(map(small, slopes[:_HEADS]))
    return f"{shown}, …" if len(slopes) > _HEADS else shown


def _changes_scores(left: ComparableRun, right: ComparableRun, place: int) -> bool:
    """Return whether a function changes the scores on one side, e.g. a soft cap: the rest is then no bias alone."""
    steps = [step for side in (left, right) for step, _ in side.attentions[place][0].scoring]
    return any(step not in _OF_BIASES for step in steps)


def _of_biases(left: ComparableRun, right: ComparableRun, place: int, where: Where) -> str:
    """Return where two biases differ most, if both sides see the same keys; empty otherwise, or if it is unknown."""
    if _changes_scores(left, right, place):
        return ""
    ours, theirs = _biased(left, place), _biased(right, place)
    if ours is None or theirs is None or ours.scores.shape != theirs.scores.shape:
        return ""
    if not torch.equal(ours.seen, theirs.seen):
        return ""
    bias, right_bias = ours.bias, theirs.bias
    apart = (bias - right_bias).abs()
    if not bool(apart.isfinite().all()) or float(apart.max()) <= _LOWERED:
        return ""
    item, head, query, key = (int(index) for index in torch.unravel_index(apart.argmax(), apart.shape))
    at = (item, head, query, key)
    count, visible = int((apart > _LOWERED).sum()), int(ours.seen.sum())
    return (
        f"The bias differs in {count:,} of {visible:,} visible scores. Head {head} adds {small(float(bias[at]))} to "
        f"the score of query {query} and key {key} {where.left}, and {small(float(right_bias[at]))} {where.right}."
    )


def _shift(left: Sequence[float], right: Sequence[float], where: Where) -> str:
    """Return that one ladder is the other one, a step off; empty if it is not."""
    ways = ((left, right, where.left, where.right), (right, left, where.right, where.left))
    for first, second, here, there in ways:
        if all(isclose(a, b, rel_tol=NEAR) for a, b in zip(first[1:], second[:-1], strict=True)):
            return f" Head 1 {here} has the slope of head 0 {there}: the slopes are off by one head."
    return ""


def _of_lowered_scores(left: ComparableRun, right: ComparableRun, place: int, where: Where) -> str:
    """Return how many scores only one side's mask lowers, or how many get other numbers; empty if it is unknown.

    What a side adds is its masked scores without its scores.
    """
    if _changes_scores(left, right, place):
        return ""
    ours, theirs = _added(left, place), _added(right, place)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return ""
    lowered = [_lowered_alone(ours, theirs, where.left), _lowered_alone(theirs, ours, where.right)]
    alone = [phrase for phrase in lowered if phrase]
    if alone:
        return f"The masks differ: of {ours.numel():,} scores, they lower {listed(alone)}."
    count = int(((ours - theirs).nan_to_num(0.0).abs() > _LOWERED).sum())
    return f"The masks add different numbers to {count:,} of {ours.numel():,} scores." if count else ""


def _added(side: ComparableRun, place: int) -> Tensor | None:
    """Return what a mask adds to the scores, in the axes of the masked scores; None if it is unknown."""
    masked, scores = side.as_made(place, "masked_scores"), side.as_made(place, "scores")
    if masked is None or scores is None or scores.numel() != masked.numel():
        return None
    return masked.double() - scores.double().reshape(masked.shape)


def _lowered_alone(added: Tensor, beside: Tensor, called: str) -> str:
    """Return how many scores a mask lowers that the other one, `beside`, does not lower; empty for none."""
    alone = (added < -_LOWERED) & (beside >= -_LOWERED)
    if not bool(alone.any()):
        return ""
    most = -float(added[alone].min())
    by = f"by up to {most:.4g}" if most < _MASKED_OUT else "to about -inf"
    return f"{int(alone.sum()):,} {called} alone, {by}"


def _keys(seen: Tensor) -> str:
    """Return the keys that a query sees in words: `keys 0–3`."""
    places = seen.nonzero().flatten().tolist()
    if not places:
        return "no key"
    return f"key {spans(places)}" if len(places) == 1 else f"keys {spans(places)}"
