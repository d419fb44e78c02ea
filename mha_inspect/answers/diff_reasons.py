"""Find why two modules with the same weights do not compute the same: each candidate is tried first.

A candidate is a change of the weights of one side: the rows of a packed weight in the order in which that side reads
them, the features of each head as its rotation pairs them, its heads as they share keys, its scale. The other side's
weights are written into it with that change, and it runs again. If both sides return the same now, this was the reason,
and the only one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
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
_TOGETHER = 2
"""The most changes that are tried together."""


@dataclass(frozen=True, eq=False)
class _Change:
    """A change of the weights of each attention that may make two sides the same."""

    reason: DiffReason
    apply: Callable[[int, Numbers], Numbers]
    """From the place of an attention and its weights by part to changed weights."""


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
    found = _tried(left, right, called) or tuple(_of_masks(left, right, first, called))
    found = found or tuple(of_norms(left, right, first, called))
    if not found and first is not None:
        reason = stage_reason(left, right, place, first, (called.left, called.right))
        found = () if reason is None else (reason,)
    return found or tuple(_of_padding(left, right))


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
                return (*orders, *(change.reason for change in together))
    return ()


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
    masked = tuple(sorted({row for rows in comparison.masked for row in rows}))
    others = (difference.verdict for difference in comparison.further())
    return overall([comparison.output(masked).verdict, *others]) == "same"


# -- the order of rows ------------------------------------------------------------------------------------------------


def _orders(left: ComparableRun, right: ComparableRun, where: Where) -> Iterator[DiffReason]:
    """Yield a reason for each parameter whose rows the sides read in another order; the left weights are in the right.

    The parameters have the same names and shapes.
    """
    ours, theirs = weights_by_name(left), weights_by_name(right)
    told: set[str] = set()
    for weights, others in zip(left.weights, right.weights, strict=True):
        for name, parts in _parts_by_parameter(weights).items():
            if name not in theirs or ours[name].shape != theirs[name].shape or ours[name].dim() != 2:
                continue
            sizes = {"heads": weights.num_heads, "kv_heads": weights.num_kv_heads, "parts": len(parts)}
            sizes["head_dim"] = weights.shapes[parts[0]][1]
            found = explain(ours[name], theirs[name], sizes)
            if found is None or not found.names or found.names[0].pattern in told:
                continue
            named = found.names[0]
            told.add(named.pattern)
            before, after = named.pattern.split(" -> ") if " -> " in named.pattern else (named.pattern, "")
            sentence = f"The {found.axis} of {name} are read as {before} {where.left} and as {after} {where.right}"
            if not after:
                sentence = f"The {found.axis} of {name} are read in another order: {before}"
            sentence += _example((weights, others), name, parts, where)
            yield DiffReason("order", f"{sentence}.", named.line(name.rpartition(".")[2], found.axis, 2))


def reordered_copies(left: ComparableRun, right: ComparableRun) -> Iterator[str]:
    """Yield sentences for parameters that were copied in another order, or transposed, into one of another name.

    The weights are the same head by head. A file of one module would not fit the other, although its shapes do.
    """
    told: set[str] = set()
    transposed: list[str] = []
    for name, other, found in _copies(left, right):
        if not found.names:
            if found.transposed:
                transposed.append(name if name == other else f"{name} in {other}")
            continue
        named = found.names[0]
        if named.pattern in told:
            continue
        told.add(named.pattern)
        yield (
            f"The {found.axis} of {name} are in another order in {other}, {named.pattern}: loaded as it is, the "
            "file of one side is wrong on the other."
        )
        line = named.line("w", found.axis, 2)
        if line:
            yield f"To convert the weights of the left: {line}"
    if transposed:
        yield (
            f"Transposed copies: {first_few(transposed, 3)}. Loaded as it is, the file of one side is wrong on the "
            "other, and square shapes do not show it."
        )


def _copies(left: ComparableRun, right: ComparableRun) -> Iterator[tuple[str, str, Reordering]]:
    """Yield the pairs of parameters of two sides with the same numbers in another order, and that order."""
    ours, theirs = weights_by_name(left), weights_by_name(right)
    for weights, others in zip(left.weights, right.weights, strict=False):
        names = {tuple(parts): name for name, parts in _parts_by_parameter(others).items()}
        for name, parts in _parts_by_parameter(weights).items():
            other = names.get(tuple(parts))
            if other is None or name not in ours or other not in theirs or ours[name].dim() != 2:
                continue
            sizes = {"heads": weights.num_heads, "kv_heads": weights.num_kv_heads, "parts": len(parts)}
            found = explain(ours[name], theirs[other], sizes | {"head_dim": weights.shapes[parts[0]][1]})
            if found is not None and found.is_exact:
                yield name, other, found


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
        sentence = (
            f"The rotation turns features {ours} of a head together {where.left}, and {theirs} {where.right}. "
            f"With the rows of each head of W_q and W_k in the order {shown}, {where.subject} returns the same."
        )
        line = f'rearrange(w, "(heads {before}) e -> (heads {after}) e", two=2, half={half})'
        yield _Change(DiffReason("rotation", sentence, line), _reordering(_OF_ROTATION, order, dim=1))


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
        f"{where.right}{_ways(ours, theirs)}. With the query heads in the order {' '.join(map(str, order))}, in W_q "
        f"and W_o, {where.subject} returns the same."
    )
    yield _Change(DiffReason("shared heads", sentence), _reordering(_BY_HEAD, torch.tensor(order), dim=0))


def _ways(left: Sequence[int], right: Sequence[int]) -> str:
    """Return how torch repeats key heads for these query heads, on both sides; empty for other orders."""
    names = []
    for users in (left, right):
        count = len(set(users))
        tiled = [head % count for head in range(len(users))]
        interleaved = [head * count // len(users) for head in range(len(users))]
        names.append("repeat" if list(users) == tiled else "repeat_interleave" if list(users) == interleaved else "")
    return f", {names[0]} against {names[1]}" if all(names) else ""


def _scales(left: ComparableRun, right: ComparableRun, where: Where) -> Iterator[_Change]:
    """Yield the ratio of the scales, if they differ."""
    pairs = [
        (ours.scale, theirs.scale) for (ours, _), (theirs, _) in zip(left.attentions, right.attentions, strict=False)
    ]
    ratios = [ours / theirs if ours and theirs else 1.0 for ours, theirs in pairs]
    place = next((place for place, ratio in enumerate(ratios) if abs(ratio - 1) > 1e-6), None)
    if place is None:
        return
    ours, theirs = (_scale_words(scale) for scale in pairs[place])
    sentence = f"The scores are {ours} {where.left} and {theirs} {where.right}. Nothing else differs."

    def apply(at: int, numbers: Numbers) -> Numbers:
        for part in _OF_QUERIES:
            if part in numbers:
                numbers[part] = numbers[part] * ratios[at]
        return numbers

    yield _Change(DiffReason("scale", sentence), apply)


def _scale_words(scale: float | None) -> str:
    text = scale_text(scale).strip()
    if not text:
        return "not scaled"
    return (
        f"divided by {text.removeprefix('/').strip()}" if text.startswith("/") else f"multiplied by {text[1:].strip()}"
    )


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
            if bool(masked.any()) and not bool(masked.all()) and not bool((differs & ~masked).any()):
                tokens = f"{plural(int(masked.sum()), 'token')} of {masked.numel()}"
                yield DiffReason(
                    "padding",
                    f"The outputs differ only at the {tokens} where {name} is {value}.",
                )
                return


def visible_pairs(left: ComparableRun, right: ComparableRun, place: int, where: Where) -> str:
    """Return which pairs of a query and a key only one side sees; empty if both see the same, or it is unknown."""
    seen = []
    for side in (left, right):
        known = visibility(side.run.graph, *side.attentions[place])
        if known is None or known.seen is None:
            return ""
        seen.append(known.seen)
    ours, theirs = seen
    if ours.shape != theirs.shape or torch.equal(ours, theirs):
        return ""
    apart = ours != theirs
    query = int(apart.any(1).nonzero()[0])
    return (
        f"The masks differ in {int(apart.sum()):,} of {plural(apart.numel(), 'pair')} of a query and a key: query "
        f"{query} sees {_keys(ours[query])} {where.left} and {_keys(theirs[query])} {where.right}."
    )


def _of_slopes(left: ComparableRun, right: ComparableRun, place: int, where: Where) -> str:
    """Return the slopes of two biases that are linear in the position of the key; empty for other or equal biases."""
    biased = [_biased(side, place) for side in (left, right)]
    if biased[0] is None or biased[1] is None:
        return ""
    ours, theirs = slopes_in(*biased[0]), slopes_in(*biased[1])
    if not ours or len(ours) != len(theirs):
        return ""
    shown = [", ".join(map(small, side[:_HEADS])) + (", …" if len(side) > _HEADS else "") for side in (ours, theirs)]
    if all(isclose(a, b, rel_tol=NEAR) for a, b in zip(ours, theirs, strict=True)):
        raises = [rises_with_distance(*side) for side in biased if side is not None]
        if raises[0] == raises[1]:
            return ""
        far, near = (where.left, where.right) if raises[0] else (where.right, where.left)
        return (
            f"The slopes of the bias by head are {shown[0]} on both sides, with opposite signs. Keys far from their "
            f"query get higher scores {far} and lower ones {near}."
        )
    sentence = f"The slopes of the bias by head are {shown[0]} {where.left} and {shown[1]} {where.right}."
    return sentence + _shift(ours, theirs, where)


def _biased(side: ComparableRun, place: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return scores, what they are with a bias, and which keys are seen, each `batch heads query key`; None without."""
    scores, masked, weights = (side.content(place, stage) for stage in ("scores", "masked_scores", "weights"))
    if scores is None or masked is None or weights is None or not scores.shape == masked.shape == weights.shape:
        return None
    return scores, masked, sees_by_head(weights, masked)


def _of_biases(left: ComparableRun, right: ComparableRun, place: int, where: Where) -> str:
    """Return where two biases differ most, if both sides see the same keys; empty otherwise, or if it is unknown."""
    ours, theirs = _biased(left, place), _biased(right, place)
    if ours is None or theirs is None or ours[0].shape != theirs[0].shape or not torch.equal(ours[2], theirs[2]):
        return ""
    seen = ours[2]
    added = [(masked.double() - scores.double()).masked_fill(~seen, 0.0) for scores, masked, _ in (ours, theirs)]
    apart = (added[0] - added[1]).abs()
    if not bool(apart.isfinite().all()) or float(apart.max()) <= _LOWERED:
        return ""
    item, head, query, key = (int(index) for index in torch.unravel_index(apart.argmax(), apart.shape))
    at = (item, head, query, key)
    mine, other = (small(float(side[at])) for side in added)
    count = int((apart > _LOWERED).sum())
    return (
        f"The bias differs in {count:,} of {int(seen.sum()):,} visible scores. Head {head} adds {mine} to the score of "
        f"query {query} and key {key} {where.left}, and {other} {where.right}."
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
    added = []
    for side in (left, right):
        masked, scores = (side.as_made(place, stage) for stage in ("masked_scores", "scores"))
        if masked is None or scores is None:
            return ""
        if scores.numel() != masked.numel():
            return ""
        added.append(masked.double() - scores.double().reshape(masked.shape))
    ours, theirs = added
    if ours.shape != theirs.shape:
        return ""
    said = []
    for called, mine, other in ((where.left, ours, theirs), (where.right, theirs, ours)):
        alone = (mine < -_LOWERED) & (other >= -_LOWERED)
        if bool(alone.any()):
            most = -float(mine[alone].min())
            by = f"by up to {most:.4g}" if most < _MASKED_OUT else "to about -inf"
            said.append(f"{int(alone.sum()):,} {called} alone, {by}")
    if said:
        return f"The masks differ: of {ours.numel():,} scores, they lower {listed(said)}."
    count = int(((ours - theirs).nan_to_num(0.0).abs() > _LOWERED).sum())
    return f"The masks add different numbers to {count:,} of {ours.numel():,} scores." if count else ""


def _keys(seen: Tensor) -> str:
    places = seen.nonzero().flatten().tolist()
    return f"key{'' if len(places) == 1 else 's'} {spans(places)}" if places else "no key"
