"""Find the order in which the rows of one tensor are those of another, and name it by einops axes.

    meta = hf.view(heads, 2, half, embed).transpose(1, 2).reshape(heads * 2 * half, embed)

Each row of `meta` is a row of `hf`, but at another position. Rows are matched by their bits. If one side was rounded or
trained a little, a row is matched with the nearest row, which must be much nearer than any other. The order is then
compared with those between known layouts, and gets a name only if one of them is exactly equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations, product
from math import prod

import torch
from torch import Tensor

from ..text import spans

Sizes = Mapping[str, int]
"""`heads`, `kv_heads` and `head_dim` of the attention that a tensor belongs to, and `parts`, where it is known, the
number of projections that are packed in the tensor."""

_SKETCH = 128
"""Number of features that the search for the nearest row compares."""
_MARGIN = 0.5
"""A row matches the nearest one only if its distance is below this share of the distance to the second nearest."""
_MOST_REMAINING = 0.3
"""The most that may remain of the difference, relative to the size of the right side."""
_FEWEST_ROWS = 4
"""With fewer rows, an order may be chance."""
_FEWEST_FEATURES = 8
"""With fewer features, the nearest row may be chance."""
_RARE_AXES = frozenset({"ranks", "rotary_axes"})
"""Axes of layouts that few models have."""
_LISTED_FEATURES = 16
"""Features of a head that are listed where their order has no name."""


@dataclass(frozen=True)
class NamedOrder:
    """A name of an order: the axes of the rows on both sides, and what they mean."""

    pattern: str
    """`(heads two half) -> (heads half two)`, or in words where no pattern gives it: `heads 0, 2 of 4`."""
    meaning: str = ""
    """`rotary halves on the left, interleaved pairs on the right`; empty if it has no usual meaning."""
    sizes: tuple[tuple[str, int], ...] = ()
    """The size of each axis of the left pattern; empty if the pattern is in words."""

    @property
    def is_usual(self) -> bool:
        """Whether this is an order of heads that most models have: not of ranks, and not of rotations by two axes."""
        axes = {axis for axis, _ in self.sizes}
        if not self.meaning or not axes.isdisjoint(_RARE_AXES):
            return False
        return "heads" in axes or "kv_heads" in axes

    def line(self, name: str, axis: str) -> str:
        """Return the line for a weight and its bias: `rearrange(w, "(two half) ... -> (half two) ...", two=2)`.

        Empty if the pattern is in words. `axis` is `rows` or `columns`.
        """
        if not self.sizes:
            return ""
        before, after = self.pattern.split(" -> ")
        pattern = f"... {before} -> ... {after}"
        if axis == "rows":
            pattern = f"{before} ... -> {after} ..."
        lengths = ", ".join(f"{inner}={size}" for inner, size in self.sizes[:-1])
        return f'rearrange({name}, "{pattern}", {lengths})'


@dataclass(frozen=True)
class Reordering:
    """`right[i] = left[order[i]]` along an axis of the right tensor; with `transposed` of the left's transpose."""

    axis: str
    """`rows` or `columns`."""
    order: tuple[int, ...]
    names: tuple[NamedOrder, ...]
    """The names of the order, the most usual first; several if sizes are equal (3 heads, and q, k, v). Empty: none."""
    transposed: bool
    remaining: float
    """‖left[order] - right‖ / ‖right‖: 0 if the bits are the same."""

    @property
    def is_exact(self) -> bool:
        """Whether the reordered left side is the right side bit for bit."""
        return self.remaining == 0


@dataclass(frozen=True)
class _Comparison:
    """Which dimension of the left matrix is compared with which of the right one."""

    axis: str
    """`rows` or `columns` of the right matrix."""
    transposed: bool
    left_dim: int
    """The dimension of the left matrix that is reordered."""
    right_dim: int
    """The dimension of the right matrix that it becomes."""

    def reordered(self, left: Tensor, order: Tensor) -> Tensor:
        """Return the left matrix in this order, transposed if the right one is."""
        return left.index_select(self.left_dim, order).movedim(self.left_dim, self.right_dim)


@dataclass(frozen=True)
class _Match:
    """An order in which one side becomes the other."""

    compared: _Comparison
    order: Tensor
    remaining: float


_COMPARISONS = (
    _Comparison("rows", transposed=False, left_dim=0, right_dim=0),
    _Comparison("columns", transposed=False, left_dim=1, right_dim=1),
    _Comparison("rows", transposed=True, left_dim=1, right_dim=0),
    _Comparison("columns", transposed=True, left_dim=0, right_dim=1),
)


def explain(left: Tensor, right: Tensor, sizes: Sizes) -> Reordering | None:
    """Return how rows or columns of `right` are those of `left` in another order.

    None if they are not, or are in the same order. Tensors of more than two dimensions are read as rows of all else.

    >>> left = torch.arange(32.0).view(8, 4)
    >>> right = left.view(2, 2, 2, 4).transpose(1, 2).reshape(8, 4)
    >>> explain(left, right, {"heads": 2, "head_dim": 4}).names[0].pattern
    '(heads two half) -> (heads half two)'
    """
    if not left.numel() or not right.numel() or left.is_complex() or right.is_complex():
        return None
    dtype = _coarser(left.dtype, right.dtype)
    ours, theirs = _as_rows(left, dtype), _as_rows(right, dtype)
    match = _exact(ours, theirs, sizes) or _nearest(ours, theirs)
    if match is None:
        return None
    count = ours.shape[match.compared.left_dim]
    is_in_order = torch.equal(match.order, torch.arange(len(match.order)))
    if is_in_order and not match.compared.transposed and len(match.order) == count:
        return None
    names = () if is_in_order else tuple(name(match.order, count, sizes))
    return Reordering(
        axis=match.compared.axis,
        order=tuple(match.order.tolist()),
        names=names,
        transposed=match.compared.transposed,
        remaining=match.remaining,
    )


def _as_rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor as a matrix, `rows features`."""
    rows = tensor.shape[0] if tensor.dim() else 1
    return tensor.detach().reshape(rows, -1).to(dtype).contiguous()


def _coarser(left: torch.dtype, right: torch.dtype) -> torch.dtype:
    """Return the dtype with the larger rounding step; of others than floats the left one."""
    if not (left.is_floating_point and right.is_floating_point):
        return left
    return max(left, right, key=lambda dtype: torch.finfo(dtype).eps)


# -- finding the order ------------------------------------------------------------------------------------------------


def digests(matrix: Tensor) -> list[int]:
    """Return a number for each row of `rows columns`: equal rows have the same, and others almost surely another."""
    numbers = matrix.detach().cpu().contiguous().view(torch.uint8).numpy()
    return [hash(row.tobytes()) for row in numbers]


class _Digests:
    """The digests of the rows and columns of a matrix, each computed when it is asked for."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix
        self._by_dim: dict[int, list[int]] = {}

    def along(self, dim: int) -> list[int]:
        """Return the digests of the rows (0) or of the columns (1)."""
        if dim not in self._by_dim:
            self._by_dim[dim] = digests(self._matrix if dim == 0 else self._matrix.T)
        return self._by_dim[dim]


def _exact(left: Tensor, right: Tensor, sizes: Sizes) -> _Match | None:
    """Find rows or columns with the same bits."""
    ours, theirs = _Digests(left), _Digests(right)
    for compared in _COMPARISONS:
        features = left.shape[1 - compared.left_dim]
        if features != right.shape[1 - compared.right_dim]:
            continue
        fewest = _FEWEST_ROWS if features > 1 else 2 * _FEWEST_ROWS
        order = _matched(ours.along(compared.left_dim), theirs.along(compared.right_dim), sizes, fewest)
        if order is None:
            continue
        if torch.equal(compared.reordered(left, order), right):
            return _Match(compared, order, 0.0)
    return None


def _matched(ours: list[int], theirs: list[int], sizes: Sizes, fewest: int) -> Tensor | None:
    """Return the index of each right row among the left rows, by their digests; None if a right row is missing there.

    If left rows are equal to each other, only the order between two known layouts is accepted.
    """
    places = {digest: place for place, digest in enumerate(ours)}
    if len(places) == len(ours) >= fewest:
        return _places_of(theirs, places)
    # Heads of a group may have equal rows: those of their key head, repeated.
    repeated = sizes.get("kv_heads", 0) * sizes.get("head_dim", 0)
    has_enough = len(places) == repeated or len(places) >= max(2 * _FEWEST_ROWS, len(ours) // 16)
    if len(ours) != len(theirs) or not has_enough:
        return None
    for order, _ in layouts(len(ours), sizes):
        if [ours[place] for place in order.tolist()] == theirs:
            return order
    return None


def _places_of(theirs: list[int], places: Mapping[int, int]) -> Tensor | None:
    """Return the index of each right row among the left rows, which are all different; None if one is missing there.

    A left row may be repeated only if the right side has more rows.
    """
    order = torch.tensor([places.get(digest, -1) for digest in theirs])
    if int(order.min()) < 0:
        return None
    if len(order) <= len(places) and _repeats(order):
        return None
    return order


def _repeats(order: Tensor) -> bool:
    return len(set(order.tolist())) < len(order)


def _nearest(left: Tensor, right: Tensor) -> _Match | None:
    """Find rows or columns that were rounded or trained a little: each has one that is much nearer than any other."""
    if not left.is_floating_point() or not right.is_floating_point():
        return None
    for compared in _COMPARISONS:
        features = left.shape[1 - compared.left_dim]
        has_enough = features >= _FEWEST_FEATURES and left.shape[compared.left_dim] >= _FEWEST_ROWS
        if features != right.shape[1 - compared.right_dim] or not has_enough:
            continue
        order = _nearest_along(compared, left, right)
        if order is None or _repeats(order):
            continue
        reordered = compared.reordered(left, order).float()
        remaining = float((reordered - right.float()).norm() / right.float().norm())
        if remaining < _MOST_REMAINING:
            return _Match(compared, order, remaining)
    return None


def _nearest_along(compared: _Comparison, left: Tensor, right: Tensor) -> Tensor | None:
    """Return the index on the left of each row or column on the right, by some of the features; None if unclear."""
    features = left.shape[1 - compared.left_dim]
    some = slice(None, None, max(1, features // _SKETCH))
    ours = left.movedim(compared.left_dim, 0)[:, some].float()
    theirs = right.movedim(compared.right_dim, 0)[:, some].float()
    # A few first: most pairs of tensors are unrelated.
    step = max(1, len(theirs) // 16)
    if _clearly_nearest(ours, theirs[::step]) is None:
        return None
    return _clearly_nearest(ours, theirs)


def _clearly_nearest(ours: Tensor, theirs: Tensor) -> Tensor | None:
    """Return the index of the nearest row of `ours` for each of `theirs`; None if a second row is almost as near."""
    distances, places = torch.cdist(theirs, ours).topk(2, largest=False)
    is_clear = distances[:, 0] < _MARGIN * distances[:, 1]
    return places[:, 0] if bool(is_clear.all()) else None


# -- naming the order -------------------------------------------------------------------------------------------------


_FAMILIES: tuple[dict[str, str], ...] = (
    {
        "qkv heads head_dim": "[q | k | v]",
        "heads qkv head_dim": "q, k, v head by head",
        "heads head_dim qkv": "q, k, v feature by feature",
        "qkv head_dim heads": "[q | k | v] with heads varying fastest",
    },
    {"heads two half": "rotary halves", "heads half two": "interleaved pairs"},
    {"kv_heads two half": "rotary halves", "kv_heads half two": "interleaved pairs"},
    {
        "kv_heads group head_dim": "heads of a group side by side",
        "group kv_heads head_dim": "heads of groups interleaved",
    },
    {
        "kv kv_heads head_dim": "[k | v]",
        "kv_heads kv head_dim": "k, v head by head",
        "kv_heads head_dim kv": "k, v feature by feature",
    },
    {
        "kv_heads two group part": "rotary halves",
        "kv_heads group two part": "rotary halves as if of {heads} heads, not {kv_heads}",
    },
    {
        "kv_heads group part two": "interleaved pairs",
        "kv_heads group two part": "rotary halves as if of {heads} heads, not {kv_heads}",
    },
    {
        "heads rotary_axes two quarter": "rotary halves in each half of a head",
        "heads rotary_axes quarter two": "interleaved pairs in each half of a head",
    },
    {"qkv ranks local_heads head_dim": "[q | k | v]", "ranks qkv local_heads head_dim": "shards of {ranks} ranks"},
    {"heads head_dim": "heads stacked", "head_dim heads": "heads varying fastest"},
)
"""Families of layouts of the same rows: axes of the rows, outermost first, to what they mean.

An order is named after two layouts of one family: `heads two half` to `heads half two` is the order from rotary halves
to interleaved pairs.
"""


def name(order: Tensor, count: int, sizes: Sizes) -> list[NamedOrder]:
    """Return the names of an order of `count` rows: by axes, by heads and their features, or by strides alone."""
    names = named_by_axes(order, count, sizes) or named_by_heads(order, count, sizes)
    if names:
        return names
    rows = order.tolist()
    if len(rows) < count and rows == sorted(rows):
        return [NamedOrder(f"{spans(rows)} of {count}")]
    if len(order) != count:
        return []
    axes = strides_of(order)
    if len(axes) < 2:
        return []
    by_stride = sorted(axes, key=lambda axis: -abs(axis[1]))
    before = " ".join(str(size) for size, _ in by_stride)
    after = " ".join(str(size) for size, _ in axes)
    return [NamedOrder(f"({before}) -> ({after})")]


def layouts(count: int, sizes: Sizes) -> Iterator[tuple[Tensor, NamedOrder]]:
    """Yield the order between each two layouts of a family that have `count` rows, with its name."""
    lengths = _lengths(sizes)
    if lengths is None:
        return
    for family in _FAMILIES:
        axes = next(iter(family)).split()
        if "kv_heads" in axes and "kv" not in axes and lengths["group"] == 1:
            continue  # with as many key heads as query heads, the families of `heads` name it
        packed = _packed(axes)
        if sizes.get("parts", packed) != packed:
            continue
        for ranks in range(2, lengths["kv_heads"]) if "ranks" in axes else (1,):
            of_ranks = {**lengths, "ranks": ranks, "local_heads": lengths["heads"] // ranks}
            if prod(of_ranks[axis] for axis in axes) == count:
                yield from _orders_between(family, of_ranks)


def _lengths(sizes: Sizes) -> dict[str, int] | None:
    """Return the length of each axis in `_FAMILIES`, except those of ranks; None if the heads do not form groups."""
    heads, width = sizes.get("heads", 0), sizes.get("head_dim", 0)
    kv_heads = sizes.get("kv_heads", heads) or heads
    if not heads or not width or heads % kv_heads:
        return None
    group = heads // kv_heads
    return {
        **sizes,
        "kv_heads": kv_heads,
        "group": group,
        "qkv": 3,
        "kv": 2,
        "two": 2,
        "rotary_axes": 2,
        "half": width // 2,
        "quarter": width // 4,
        "part": width // 2 // group,
    }


def _packed(axes: list[str]) -> int:
    """Return how many projections are packed in rows with these axes."""
    if "qkv" in axes:
        return 3
    return 2 if "kv" in axes else 1


def _orders_between(family: Mapping[str, str], sizes: Sizes) -> Iterator[tuple[Tensor, NamedOrder]]:
    """Yield the order from each layout of a family to each other one; its name omits axes of size one."""
    for before, after in permutations(family, 2):
        axes = _visible(before, sizes)
        moved = _visible(after, sizes)
        meaning = f"{family[before]} on the left, {family[after]} on the right"
        named = NamedOrder(
            pattern=f"({' '.join(axes)}) -> ({' '.join(moved)})",
            meaning=meaning.format(**sizes),
            sizes=tuple((axis, sizes[axis]) for axis in axes),
        )
        yield reordered(before, after, sizes), named


def _visible(layout: str, sizes: Sizes) -> list[str]:
    return [axis for axis in layout.split() if sizes[axis] > 1]


def named_by_axes(order: Tensor, count: int, sizes: Sizes) -> list[NamedOrder]:
    """Name an order by all pairs of known layouts that give it."""
    names: dict[str, NamedOrder] = {}
    for layout, named in layouts(count, sizes):
        if not torch.equal(order, layout):
            continue
        before, after = named.pattern.split(" -> ")
        inverse = f"{after} -> {before}"
        if inverse in names:
            # The order is its own inverse, so it does not show which side has which layout.
            meaning = names[inverse].meaning.replace("on the left", "on one side")
            meaning = meaning.replace("on the right", "on the other")
            names[inverse] = replace(names[inverse], meaning=meaning)
        else:
            names.setdefault(named.pattern, named)
    return [*names.values()]


def reordered(before: str, after: str, sizes: Sizes) -> Tensor:
    """Return `rearrange(arange, "(before) -> (after)")`: for each row on the right its place on the left.

    >>> reordered("two half", "half two", {"two": 2, "half": 3}).tolist()
    [0, 3, 1, 4, 2, 5]
    """
    names = before.split()
    lengths = [sizes[axis] for axis in names]
    places = [names.index(axis) for axis in after.split()]
    return torch.arange(prod(lengths)).view(lengths).permute(places).flatten()


def strides_of(order: Tensor) -> list[tuple[int, int]]:
    """Return the size and stride of each axis that gives an order, outermost first; empty if no axes give it.

    >>> strides_of(torch.tensor([0, 3, 1, 4, 2, 5]))
    [(3, 1), (2, 3)]
    """
    axes: list[tuple[int, int]] = []
    while len(order) > 1:
        step = int(order[1] - order[0])
        size = _innermost(order, step)
        if size is None:
            return []
        axes.insert(0, (size, step))
        order = order[::size]
    return axes


def _innermost(order: Tensor, step: int) -> int | None:
    """Return the size of the innermost axis of an order, the largest possible with this stride; None without one."""
    length = len(order)
    for size in range(length, 1, -1):
        if length % size == 0 and torch.equal(order, _with_axis(order[::size], size, step)):
            return size
    return None


def _with_axis(starts: Tensor, size: int, step: int) -> Tensor:
    """Return an order with an axis inside of another: starts 0, 1 with size 2 and step 3 give 0, 3, 1, 4."""
    return (starts[:, None] + torch.arange(size) * step).flatten()


def named_by_heads(order: Tensor, count: int, sizes: Sizes) -> list[NamedOrder]:
    """Name an order of whole heads, and an order of the features within each head; empty if heads are torn apart.

    The order 6, 7, 8, 0, 1, 2, 3, 4, 5 of 9 rows with head_dim 3 is the order 2, 0, 1 of heads.
    """
    head_dim = sizes.get("head_dim", 0)
    if not head_dim or len(order) % head_dim or count % head_dim:
        return []
    rows = order.view(-1, head_dim)
    head_of_row, feature_of_row = rows // head_dim, rows % head_dim
    heads = head_of_row[:, 0]
    if not torch.equal(head_of_row, heads[:, None].expand_as(rows)):
        return []
    names = []
    if not torch.equal(heads, torch.arange(count // head_dim)):
        names.append(_name_heads(heads, count // head_dim, sizes))
    names += _name_features(feature_of_row, head_dim)
    patterns = [named.pattern for named in names]
    meanings = [named.meaning for named in names if named.meaning]
    return [NamedOrder("; ".join(patterns), "; ".join(meanings))]


def _name_features(features: Tensor, head_dim: int) -> Iterator[NamedOrder]:
    """Yield the names of the orders of features within heads, one for all heads that have the same order.

    `features` is `heads head_dim`: for each feature of a right head, its index in the left head.
    """
    different = torch.unique(features, dim=0)
    if len(different) > 3:
        yield NamedOrder("in each head: another order of features")
        return
    for order in different:
        if torch.equal(order, torch.arange(head_dim)):
            continue
        heads = (features == order).all(1).nonzero().flatten().tolist()
        named = _name_features_of_head(order, head_dim)
        where = "each head" if len(heads) == len(features) else f"heads {spans(heads)} of {len(features)}"
        yield NamedOrder(f"in {where}: {named.pattern}", named.meaning)


def _name_features_of_head(order: Tensor, head_dim: int) -> NamedOrder:
    """Name the order of features in a head. The last features may stay in place, as in a partial rotary embedding."""
    for size in range(2, head_dim + 1, 2):
        if not torch.equal(order[size:], torch.arange(size, head_dim)):
            continue
        named = named_by_axes(order[:size], size, {"heads": 1, "head_dim": size})
        if named:
            first = named[0]
            pattern = first.pattern if size == head_dim else f"the first {size} of {head_dim} {first.pattern}"
            return NamedOrder(pattern, first.meaning)
    return NamedOrder(f"features {' '.join(map(str, order[:_LISTED_FEATURES].tolist()))}")


def _name_heads(order: Tensor, count: int, sizes: Sizes) -> NamedOrder:
    """Name an order of `count` heads, by the first known order that is equal."""
    heads = sizes.get("heads", 0)
    kv_heads = sizes.get("kv_heads", heads) or heads
    for named in named_by_axes(order, count, {**sizes, "head_dim": 1}):
        return named
    for usual, named in _orders_of_heads(len(order), count, heads, kv_heads):
        if torch.equal(order, usual):
            return named
    numbers = order.tolist()
    if len(numbers) < count and numbers == sorted(numbers):
        pruned = sorted(set(range(count)) - set(numbers))
        return NamedOrder(f"heads {spans(numbers)} of {count}", f"without {_heads(pruned)} (pruned)")
    return NamedOrder(f"heads {' '.join(map(str, numbers))}")


def _heads(numbers: list[int]) -> str:
    return f"head {spans(numbers)}" if len(numbers) == 1 else f"heads {spans(numbers)}"


def _orders_of_heads(length: int, count: int, heads: int, kv_heads: int) -> Iterator[tuple[Tensor, NamedOrder]]:
    """Yield orders of `count` heads, to `length` of them, that no pair of layouts gives."""
    numbers = torch.arange(count)
    if heads and length == count == heads + 2 * kv_heads:
        yield from _by_group(numbers, heads, kv_heads)
    if heads and length == count == 3 * heads:
        yield from _by_projection(numbers, heads)
    if length > count and length % count == 0:
        times = length // count
        interleaved = NamedOrder(f"repeat_interleave({times})", f"each head {times} times in a row")
        repeated = NamedOrder(f"repeat({times})", f"all heads in order, {times} times")
        yield numbers.repeat_interleave(times), interleaved
        yield numbers.repeat(times), repeated
    if length == count:
        yield numbers.flip(0), NamedOrder("heads reversed")
        if kv_heads and count == heads:
            reversed_in_groups = numbers.view(kv_heads, -1).flip(1).flatten()
            yield reversed_in_groups, NamedOrder("heads reversed in each group")
        for shift in range(1, count):
            yield numbers.roll(shift), NamedOrder(f"heads rolled by {shift}")


def _by_group(numbers: Tensor, heads: int, kv_heads: int) -> Iterator[tuple[Tensor, NamedOrder]]:
    """Yield the orders between `[q | k | v]` and the query heads, key head and value head of each group together."""
    parts = torch.split(numbers, [heads, kv_heads, kv_heads])
    by_group = [part.view(kv_heads, -1) for part in parts]
    order = torch.cat(by_group, 1).flatten()
    apart = "[q | k | v]"
    grouped = "(kv_heads (group + 2) head_dim)"
    meaning = "q, k, v group by group"
    yield order, NamedOrder(f"{apart} -> {grouped}", f"{apart} on the left, {meaning} on the right")
    yield order.argsort(), NamedOrder(f"{grouped} -> {apart}", f"{meaning} on the left, {apart} on the right")


def _by_projection(numbers: Tensor, heads: int) -> Iterator[tuple[Tensor, NamedOrder]]:
    """Yield the orders between `[q | k | v]` and another order of q, k and v: `[v | q | k]`, also within each rank."""
    apart = "[q | k | v]"
    for letters, ranks in product(permutations("qkv"), range(1, heads + 1)):
        if heads % ranks:
            continue
        parts = ["qkv".index(letter) for letter in letters]
        moved = numbers.view(3, heads)[parts]
        order = moved.view(3, ranks, -1).transpose(0, 1).flatten()
        text = f"[{' | '.join(letters)}]"
        if ranks == heads:
            text += " of each head"
        elif ranks > 1:
            text += f" of each of {ranks} ranks"
        yield order, NamedOrder(f"{apart} -> {text}", f"{apart} on the left, {text} on the right")
        yield order.argsort(), NamedOrder(f"{text} -> {apart}", f"{text} on the left, {apart} on the right")
