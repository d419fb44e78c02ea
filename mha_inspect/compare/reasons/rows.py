"""Find the parameters whose rows two sides read in another order, and the line that converts one into the other.

qkv.weight on the left     "(qkv heads head_dim) embed"
qkv.weight on the right    "(heads qkv head_dim) embed"
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...measure.reorder import NamedOrder, Reordering, explain
from ...measure.weights import Numbers, Weights
from ...text import first_few, spans
from ..comparable_run import ComparableRun, unreadable
from ..pair import Where, Why
from ..shared_weights import weights_by_name, write_by_name


@contextmanager
def by_head(left: ComparableRun, right: ComparableRun, where: Where) -> Iterator[tuple[Why, ...]]:
    """Write the left weights into the right head by head for the body, and yield the orders that this changes.

    Without an order nothing is written. One parameter may be read by several projections: then it cannot be written.
    """
    pairs = list(zip(left.weights, right.weights, strict=False))
    if unreadable(left, right) or any(ours.shapes != theirs.shapes for ours, theirs in pairs):
        yield ()
        return
    numbers = [ours.read() for ours, _ in pairs]
    if _have_all(right, numbers):
        yield ()
        return
    before = {name: tensor.detach().clone() for name, tensor in weights_by_name(right).items()}
    try:
        right.forget()
        for (_, theirs), of_left in zip(pairs, numbers, strict=True):
            theirs.write(of_left)
        yield _orders(left, right, where) if _have_all(right, numbers) else ()
    finally:
        write_by_name(right, before)
        right.forget()


def _have_all(side: ComparableRun, numbers: Sequence[Numbers]) -> bool:
    """Return whether each attention of a side has these weights."""
    return all(_are_equal(wanted, weights.read()) for wanted, weights in zip(numbers, side.weights, strict=True))


def _are_equal(wanted: Numbers, after: Numbers) -> bool:
    """Return whether the weights are there as they were written, in the dtype of the side."""
    return all(torch.equal(after[part], tensor.to(after[part].dtype)) for part, tensor in wanted.items())


def _orders(left: ComparableRun, right: ComparableRun, where: Where) -> tuple[Why, ...]:
    """Return how the sides read each matrix that they read differently; the left weights are in the right.

    Empty if that is not known of one of them. The parameters have the same names and shapes.
    """
    copies = {copy.name: copy for copy in _copies(left, right, by_name=True)}
    if not _matrices_that_differ(left, right) <= copies.keys():
        return ()
    whys: dict[str, Why] = {}
    for copy in copies.values():
        if copy.order.transposed:
            sentence = f"{copy.name} is read as it is on one side, and transposed on the other."
            whys.setdefault(copy.name, Why("transposed", sentence))
        if not copy.order.names:
            if not copy.order.transposed:
                return ()
            continue
        named = copy.order.names[0]
        sentence = _read_in_another_order(copy, named, where) + _example(copy, where)
        line = named.line(copy.name.rpartition(".")[2], copy.order.axis)
        whys.setdefault(named.pattern, Why("order", f"{sentence}.", line))
    # Which side reads a weight the other way is seen at its stage.
    has_order = any(why.kind == "order" for why in whys.values())
    return tuple(whys.values()) if has_order else ()


def _matrices_that_differ(left: ComparableRun, right: ComparableRun) -> set[str]:
    """Return the matrices of one name that have other numbers."""
    theirs = weights_by_name(right)
    differing = set()
    for name, ours in weights_by_name(left).items():
        if ours.dim() == 2 and name in theirs and not torch.equal(ours, theirs[name].to(ours)):
            differing.add(name)
    return differing


def _read_in_another_order(copy: _Copy, named: NamedOrder, where: Where) -> str:
    """Return how both sides read the rows of a parameter, without a full stop."""
    axis = copy.order.axis
    before, arrow, after = named.pattern.partition(" -> ")
    if arrow:
        return f"The {axis} of {copy.name} are read as {before} {where.left} and as {after} {where.right}"
    return f"The {axis} of {copy.name} are read in another order: {before}"


def reordered_copies(left: ComparableRun, right: ComparableRun) -> Iterator[str]:
    """Yield sentences for parameters that were copied in another order, or transposed, into one of another name.

    The weights are the same head by head. A file of one module would not fit the other, although its shapes do.
    """
    mentioned: set[str] = set()
    transposed: list[str] = []
    for copy in _copies(left, right, by_name=False):
        if not copy.order.names:
            if copy.order.transposed:
                transposed.append(copy.both_names)
            continue
        named = copy.order.names[0]
        if named.pattern in mentioned:
            continue
        mentioned.add(named.pattern)
        yield (
            f"The {copy.order.axis} of {copy.name} are in another order in {copy.right_name}, {named.pattern}: loaded "
            "as it is, the file of one side is wrong on the other."
        )
        line = named.line("w", copy.order.axis)
        if line:
            yield f"To convert the weights of the left: {line}"
    if transposed:
        yield (
            f"Transposed copies: {first_few(transposed, 3)}. Loaded as it is, the file of one side is wrong on the "
            "other, and square shapes do not show it."
        )


@dataclass(frozen=True, eq=False)
class _Copy:
    """A parameter of the left whose numbers are in one of the right, in another order."""

    name: str
    right_name: str
    parts: Sequence[str]
    """The matrices in the parameter: `W_q`, `W_k` and `W_v`."""
    order: Reordering
    weights: Weights
    """The weights of the left attention that has the parameter."""
    right_weights: Weights

    @property
    def both_names(self) -> str:
        """The name, or both names where they differ: `q.weight in wq`."""
        if self.name == self.right_name:
            return self.name
        return f"{self.name} in {self.right_name}"


def _copies(left: ComparableRun, right: ComparableRun, *, by_name: bool) -> Iterator[_Copy]:
    """Yield the parameters of the left whose numbers are in one of the right, in another order.

    That one has the same name and shape, or, unless `by_name`, the same matrices and exactly the same numbers.
    """
    ours = weights_by_name(left)
    theirs = weights_by_name(right)
    for weights, right_weights in zip(left.weights, right.weights, strict=False):
        by_parts: dict[tuple[str, ...], str] = {}
        for name, parts in _parts_by_parameter(right_weights).items():
            by_parts[tuple(parts)] = name
        for name, parts in _parts_by_parameter(weights).items():
            right_name = name if by_name else by_parts.get(tuple(parts), "")
            if name not in ours or right_name not in theirs or ours[name].dim() != 2:
                continue
            if by_name and ours[name].shape != theirs[name].shape:
                continue
            order = explain(ours[name], theirs[right_name], _sizes(weights, parts))
            if order is not None and (by_name or order.is_exact):
                yield _Copy(name, right_name, parts, order, weights, right_weights)


def _sizes(weights: Weights, parts: Sequence[str]) -> dict[str, int]:
    """Return the sizes that a pattern of the rows of a parameter may have: heads, their features, packed matrices."""
    return {
        "heads": weights.num_heads,
        "kv_heads": weights.num_kv_heads,
        "parts": len(parts),
        "head_dim": weights.shapes[parts[0]][1],
    }


def _parts_by_parameter(weights: Weights) -> dict[str, list[str]]:
    """Return the matrices in each parameter: `{"qkv.weight": ["W_q", "W_k", "W_v"]}`."""
    parts: dict[str, list[str]] = {}
    for part, projection in weights.projections.items():
        if not part.startswith("W"):
            continue
        for name in dict.fromkeys(projection.parameters):
            parts.setdefault(name, []).append(part)
    return parts


def _example(copy: _Copy, where: Where) -> str:
    """Return where a head of a part is on both sides, of those that are elsewhere; empty if its rows are unknown."""
    for part in copy.parts:
        for head in (1, 0):
            ours = _rows(copy.weights, copy.name, part, head)
            theirs = _rows(copy.right_weights, copy.name, part, head)
            if ours and theirs and ours != theirs:
                return f": {part} of head {head} is rows {ours} {where.left} and rows {theirs} {where.right}"
    return ""


def _rows(weights: Weights, name: str, part: str, head: int) -> str:
    """Return the rows of a head of a part in a parameter: `8–15`; empty if unknown."""
    if part not in weights.projections:
        return ""
    width = weights.module.get_parameter(name).shape[-1]
    for piece in weights.projections[part].parts:
        is_by_row = piece.inner == (width, 1)
        if piece.parameter.name == name and head in piece.heads and is_by_row:
            return spans([int(place) // width for place in piece.heads[head]])
    return ""
