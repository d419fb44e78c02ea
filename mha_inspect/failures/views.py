"""Edits of a view that splits a width into heads, `batch sequence (heads head_dim)`: its sizes, or what it reads."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from .. import text
from ..running.asserted import divided
from .edit import Change, Edit
from .factors import SAME_BATCH, with_size
from .facts import VIEWS, Facts, Operand, Shape
from .reached import behind_of


def edits_of_views(facts: Facts) -> Iterator[Edit]:
    """Yield the edits of a view."""
    if facts.base not in VIEWS or not facts.operands or not facts.operands[0].shape:
        return
    x, sizes = facts.operands[0], facts.sizes_of_view
    if facts.fractions_of_view:
        yield _of_whole_numbers(facts)
    if not sizes:
        return
    if "stride" in facts.message and not x.given.value.is_contiguous():
        yield _contiguous(facts, x, sizes)
        return
    yield from _batch_of_another(x, sizes)
    if len(sizes) == len(x.shape) + 1 and sizes[:-2] == x.shape[:-1]:
        yield from _heads(facts, x, sizes)
    yield from _other_size(facts, x, sizes)


def _of_whole_numbers(facts: Facts) -> Edit:
    """Return the view with whole numbers in the place of those that a division made."""
    fraction = facts.fractions_of_view[0]
    what = f"{fraction:g} is a float; the sizes of a view are whole numbers."
    if fraction != int(fraction):
        return Edit("view_sizes", what)
    args = [int(value) if isinstance(value, float) else value for value in facts.call.args]
    return Edit("view_sizes", what, way="use // in place of / where that size is computed", args=args)


def _viewed(facts: Facts, x: Operand, sizes: Shape, cause: str, what: str, way: str, cost: int) -> Edit:
    """Return the edit of a view's sizes; -1 is left as it is."""
    return Edit(cause, what, way=way, args=(x.given.value, sizes), cost=cost)


def _contiguous(facts: Facts, x: Operand, sizes: Shape) -> Edit:
    """Return the edit of a view of a tensor that is transposed, or a slice of a larger one."""
    in_order = _split_in_order(x, sizes)
    if in_order:
        # As a copy the view would run, with the heads in the place of the positions.
        what = f"This view would put parts of one token of {x.name} into different positions of a head."
        return Edit("not_contiguous", what, (), f"use {in_order}")
    steps = [step for size, step in zip(x.shape, x.given.value.stride(), strict=True) if size > 1]
    how = "is a slice of a larger tensor" if steps == sorted(steps, reverse=True) else "is transposed"
    what = f"{x.name} {how}: its elements in memory are not in the order that view() reads."
    way = "use .contiguous() before .view(...), or .reshape(...) instead"
    return Edit("not_contiguous", what, (Change(x, (("contiguous",),)),), way)


def _split_in_order(x: Operand, sizes: Shape) -> str:
    """Return how a view of `batch position features` as `batch heads position head_dim` is written rightly; or nothing.

    As many heads as positions may be either.
    """
    if len(x.shape) != 3 or len(sizes) != 4:
        return ""
    batch, positions, width = x.shape
    heads, head_dim = sizes[1], sizes[3]
    is_of_heads = sizes[2] == positions != heads and sizes[0] in (batch, -1)
    if not is_of_heads or heads < 1 or width % heads or head_dim not in (-1, width // heads):
        return ""
    return f".view({batch}, {positions}, {heads}, {width // heads}).transpose(1, 2)"


def _batch_of_another(x: Operand, sizes: Shape) -> Iterator[Edit]:
    """Yield the one item shared, of `keys.view(batch, -1, heads, head_dim)` with the batch of the queries."""
    if (
        len(sizes) != 4
        or len(x.shape) != 3
        or sizes[1] != -1
        or prod(sizes[2:]) != x.shape[-1]
        or sizes[0] == x.shape[0]
    ):
        return
    what = f"{x.name} has batch {x.shape[0]}; the view expects batch {sizes[0]}. {SAME_BATCH}"
    changes = [Change(x, (("expand", sizes[0], -1, -1),))] if x.shape[0] == 1 else []
    way = f"use {changes[0].code} to share its one item" if changes else ""
    yield Edit("batch_differs", what, changes, way, cost=2)


def _heads(facts: Facts, x: Operand, sizes: Shape) -> Iterator[Edit]:
    """Yield the other width of a head, or of the projection; what is said where heads do not divide the width."""
    heads, head_dim = sizes[-2:]
    width = x.shape[-1]
    if heads == -1:
        if head_dim > 0 and width % head_dim:
            asked = f"{width} / {head_dim} = {width / head_dim:.4g}"
            what = f"Width {width} cannot be split into heads of {head_dim}: {asked}."
            yield Edit("heads_do_not_divide", what, way=f"use a head_dim that divides {divided(width)}")
    elif heads > 0 and width % heads:
        asked = f"{heads}·{head_dim} = {heads * head_dim}" if head_dim > 0 else ""
        yield uneven(width, heads, asked)
    elif heads > 0 and head_dim > 0:
        yield from _other_heads(facts, x, sizes)


def _other_heads(facts: Facts, x: Operand, sizes: Shape) -> Iterator[Edit]:
    """Yield the heads in which a width is split, where a view asks for others; and a projection for those.

    Which of the three numbers is wrong is shown by the heads that were split before, and by the module's own numbers.
    """
    heads, head_dim = sizes[-2:]
    width, needs = x.shape[-1], heads * head_dim
    what = f"{heads} heads of {head_dim} need {needs} features; {x.name} has {width}."
    count, rest = divmod(width, head_dim)
    before = facts.reached.head_dims
    asked, other = {heads, width // heads}, {count, head_dim}
    is_exchanged = not before and other == asked
    is_otherwise = other <= facts.numbers and not asked <= facts.numbers
    if not rest and (is_exchanged or is_otherwise):
        yield Edit("wrong_head_dim", what)  # which of the numbers is the wrong one is unknown
        return
    if head_dim not in before and (not before or width // heads in before):
        way = f"use head_dim {width // heads} ({heads} heads, width {width})"
        yield _viewed(facts, x, (*sizes[:-1], width // heads), "wrong_head_dim", what, way, 2)
    change = Change(x, (("new_zeros", with_size(x.shape, -1, needs)),))
    yield Edit("wrong_head_dim", what, (change,), f"use a projection with out_features {needs}", cost=2)


def uneven(width: int, heads: int, asked: str = "") -> Edit:
    """Return what is said of a width that does not divide by a number of heads; `asked` is what a call asks for."""
    if not asked:
        asked = f"{width} / {heads} = {width / heads:.4g}" if heads else "use at least 1"
    what = f"Width {width} cannot be split into {heads} heads: {asked}."
    return Edit("heads_do_not_divide", what, way=f"use a head count that divides {divided(width)}")


def _other_size(facts: Facts, x: Operand, sizes: Shape) -> Iterator[Edit]:
    """Yield a view with one other size: it keeps those of its operand, splits the last in two, or joins the last."""
    if -1 in sizes or prod(sizes) == prod(x.shape) or facts.fractions_of_view:
        return
    if sizes[:-2] == x.shape[:-1]:
        return  # it splits the last dimension alone: a size would be one of the heads
    for place, size in enumerate(sizes):
        rest = prod(sizes[:place]) * prod(sizes[place + 1 :])
        if not rest or prod(x.shape) % rest:
            continue
        right = with_size(sizes, place, prod(x.shape) // rest)
        keeps = [number for number in right if number != 1] == [number for number in x.shape if number != 1]
        splits = right[:-2] == x.shape[:-1] != sizes[:-2]
        joins = place == len(right) - 1 and right[:-1] == x.shape[:place] and place < len(x.shape) - 1
        if keeps or splits or joins:
            if right == x.shape:
                return  # a view that changes nothing: what it should make is unknown
            what = f"{x.is_shape}; {text.shape(sizes)} has {size} in the place of {right[place]}."
            if sizes.count(size) > 1:
                what = f"{x.is_shape}; {text.shape(sizes)} takes {size} twice."
            if place == 0 and right[0] != 1 and _is_batch_of_another(facts, x, size):
                yield Edit("view_sizes", what)
                return
            way = f"use {x.spelled}.{facts.base}({', '.join(map(str, right))})"
            yield _viewed(facts, x, right, "view_sizes", what, way, 1)
            return


def _is_batch_of_another(facts: Facts, x: Operand, size: int) -> bool:
    """Return whether an input that an operand is not made of has this size first: the batches differ, not the view."""
    graph = facts.reached.graph
    behind = {source.id for source in behind_of(graph, x.given.tensor)}
    others = [named.tensor for named in graph.recording.inputs if named.tensor.id not in behind]
    return any(other.shape[:1] == (size,) for other in others)
