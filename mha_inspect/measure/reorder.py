"""Explain two tensors that have the same rows in another order, and name the order by einops axes.

    meta = hf.view(heads, 2, half, embed).transpose(1, 2).reshape(heads * 2 * half, embed)

`meta` and `hf` have no row in common at the same place, but each row of one is a row of the other. Rows are matched by
their bits, or where one side was rounded or trained a little by the nearest row, if it is much nearer than any other.
The order is then compared with those that known layouts give. Nothing is named that does not give the order exactly.
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
"""Features in which the nearest row is searched."""
_MARGIN = 0.5
"""The nearest row is at most this times as far as the second nearest."""
_NEARLY = 0.3
"""The most that may remain of the difference, relative to the size of the right side."""
_FEWEST = 4
"""Rows below which an order may be chance."""
_FEW_FEATURES = 8
"""Features below which the nearest row may be chance."""
_RARE = frozenset({"ranks", "rotary_axes"})
"""Axes of layouts that few models have."""
_SHOWN = 16
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
        if not self.meaning or not axes.isdisjoint(_RARE):
            return False
        return "heads" in axes or "kv_heads" in axes

    def line(self, name: str, axis: str, dims: int) -> str:
        """Return the line that reorders a tensor: `rearrange(w, "(two half) e -> (half two) e", two=2)`.

        Empty if the pattern is in words. `axis` is `rows` or `columns`, `dims` the number of dimensions of the tensor.
        """
        if not self.sizes:
            return ""
        before, after = self.pattern.split(" -> ")
        if dims <= 1:
            pattern = self.pattern
        elif axis == "rows":
            pattern = f"{before} e -> {after} e"
        else:
            pattern = f"e {before} -> e {after}"
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
class _View:
    """How rows or columns of one side are looked for in the other."""

    axis: str
    transposed: bool
    left: int
    """The dimension of the left matrix that is reordered."""
    right: int
    """The dimension of the right matrix that it becomes."""

    def reordered(self, left: Tensor, order: Tensor) -> Tensor:
        """Return the left matrix in this order, transposed if the right one is."""
        return left.index_select(self.left, order).movedim(self.left, self.right)


@dataclass(frozen=True)
class _Match:
    """An order in which one side becomes the other."""

    view: _View
    order: Tensor
    remaining: float


_VIEWS = (
    _View("rows", transposed=False, left=0, right=0),
    _View("columns", transposed=False, left=1, right=1),
    _View("rows", transposed=True, left=1, right=0),
    _View("columns", transposed=True, left=0, right=1),
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
    count = ours.shape[match.view.left]
    is_in_order = torch.equal(match.order, torch.arange(len(match.order)))
    if is_in_order and not match.view.transposed and len(match.order) == count:
        return None
    names = () if is_in_order else tuple(name(match.order, count, sizes))
    return Reordering(
        axis=match.view.axis,
        order=tuple(match.order.tolist()),
        names=names,
        transposed=match.view.transposed,
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
    for view in _VIEWS:
        features = left.shape[1 - view.left]
        if features != right.shape[1 - view.right]:
            continue
        fewest = _FEWEST if features > 1 else 2 * _FEWEST
        order = _matched(ours.along(view.left), theirs.along(view.right), sizes, fewest)
        if order is None:
            continue
        if torch.equal(view.reordered(left, order), right):
            return _Match(view, order, 0.0)
    return None


def _matched(ours: list[int], theirs: list[int], sizes: Sizes, fewest: int) -> Tensor | None:
    """Return the place of each right row among the left ones; of equal rows only if a known layout decides."""
    places = {digest: place for place, digest in enumerate(ours)}
    if len(places) == len(ours) >= fewest:
        return _places_of(theirs, places)
    # Heads of a group may have equal rows: those of their key head, repeated.
    repeated = sizes.get("kv_heads", 0) * sizes.get("head_dim", 0)
    has_enough = len(places) == repeated or len(places) >= max(2 * _FEWEST, len(ours) // 16)
    if len(ours) != len(theirs) or not has_enough:
        return None
    for order, _ in layouts(len(ours), sizes):
        if [ours[place] for place in order.tolist()] == theirs:
            return order
    return None


def _places_of(theirs: list[int], places: Mapping[int, int]) -> Tensor | None:
    """Return the place of each right row among the left ones, which are all different; None if one has no place.

    Rows may occur several times only if there are more of them on the right.
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
    """Find rows or columns of which each is much nearer than any other: rounded, or trained a little."""
    if not left.is_floating_point() or not right.is_floating_point():
        return None
    for view in _VIEWS:
        features = left.shape[1 - view.left]
        has_enough = features >= _FEW_FEATURES and left.shape[view.left] >= _FEWEST
        if features != right.shape[1 - view.right] or not has_enough:
            continue
        order = _nearest_along(view, left, right)
        if order is None or _repeats(order):
            continue
        reordered = view.reordered(left, order).float()
        remaining = float((reordered - right.float()).norm() / right.float().norm())
        if remaining < _NEARLY:
            return _Match(view, order, remaining)
    return None


def _nearest_along(view: _View, left: Tensor, right: Tensor) -> Tensor | None:
    """Return the place on the left of each row or column on the right, by some of the features; None if unclear."""
    features = left.shape[1 - view.left]
    some = slice(None, None, max(1, features // _SKETCH))
    ours = left.movedim(view.left, 0)[:, some].float()
    theirs = right.movedim(view.right, 0)[:, some].float()
    # A few first: most pairs of tensors are unrelated.
    step = max(1, len(theirs) // 16)
    if _clear(ours, theirs[::step]) is None:
        return None
    return _clear(ours, theirs)


def _clear(ours: Tensor, theirs: Tensor) -> Tensor | None:
    """Return the nearest row of `ours` for each of `theirs`; None if one is not clear."""
    distances, places = torch.cdist(theirs, ours).topk(2, largest=False)
    nearest, second = distances.unbind(1)
    is_clear = nearest < _MARGIN * second
    return places[:, 0] if bool(is_clear.all()) else None


# -- naming the order -------------------------------------------------------------------------------------------------


_FAMILIES: tuple[dict[str, str], ...] = (
    {
        "qkv heads head_dim": "[q | k | v]",
        "heads qkv head_dim": "q, k, v head by head",
        "heads head_dim qkv": "q, k, v feature by feature",
        "qkv head_dim heads": "[q | k | v] with heads inside of features",
    },
    {"heads two half": "rotary halves", "heads half two": "interleaved pairs"},
    {"kv_heads two half": "rotary halves", "kv_heads half two": "interleaved pairs"},
    {"kv_heads group head_dim": "heads of a group side by side", "group kv_heads head_dim": "heads of groups in turns"},
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
    {"heads head_dim": "heads stacked", "head_dim heads": "heads inside of features"},
)
"""Layouts of the same rows, the most usual first: axes, and their name."""


def name(order: Tensor, count: int, sizes: Sizes) -> list[NamedOrder]:
    """Return the names of an order of `count` rows: of axes, or of heads and of the features inside of them."""
    names = of_axes(order, count, sizes) or of_heads(order, count, sizes)
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
    """Yield the order from each known layout of `count` rows to each other one, with its name."""
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
                yield from _ways(family, of_ranks)


def _lengths(sizes: Sizes) -> dict[str, int] | None:
    """Return the length of each axis in `_FAMILIES` but those of ranks; None if the heads do not form groups."""
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


def _ways(family: Mapping[str, str], sizes: Sizes) -> Iterator[tuple[Tensor, NamedOrder]]:
    """Yield the order from each layout of a family to each other one; axes of size one are left out."""
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


def of_axes(order: Tensor, count: int, sizes: Sizes) -> list[NamedOrder]:
    """Name an order by all pairs of known layouts that give it."""
    names: dict[str, NamedOrder] = {}
    for layout, named in layouts(count, sizes):
        if not torch.equal(order, layout):
            continue
        before, after = named.pattern.split(" -> ")
        inverse = f"{after} -> {before}"
        if inverse in names:
            # The order is its own inverse: which side is which does not show.
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
    """Return the size and stride of each axis that an order walks, outermost first; empty if it is no walk.

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
    """Return the size of the innermost axis of an order, the largest that is walked in this step; None if none is."""
    length = len(order)
    for size in range(length, 1, -1):
        if length % size == 0 and torch.equal(order, _walk(order[::size], size, step)):
            return size
    return None


def _walk(starts: Tensor, size: int, step: int) -> Tensor:
    """Return this many steps from each start, one start after the other: 0 3 1 4 for starts 0 1 and two steps of 3."""
    steps = torch.arange(size) * step
    return (starts[:, None] + steps).flatten()


def of_heads(order: Tensor, count: int, sizes: Sizes) -> list[NamedOrder]:
    """Name an order of whole heads, and an order of the features inside of each."""
    width = sizes.get("head_dim", 0)
    if not width or len(order) % width or count % width:
        return []
    units = order.view(-1, width)
    blocks, inside = units[:, 0] // width, units % width
    if not torch.equal(units // width, blocks[:, None].expand_as(units)):
        return []
    names = []
    if not torch.equal(blocks, torch.arange(count // width)):
        names.append(_name_blocks(blocks, count // width, sizes))
    names += _name_insides(inside, width)
    patterns = [named.pattern for named in names]
    meanings = [named.meaning for named in names if named.meaning]
    return [NamedOrder("; ".join(patterns), "; ".join(meanings))]


def _name_insides(inside: Tensor, width: int) -> Iterator[NamedOrder]:
    """Yield the names of the orders of features in heads: `heads head_dim` with the place of each feature."""
    ways = torch.unique(inside, dim=0)
    if len(ways) > 3:
        yield NamedOrder("in each head: another order of features")
        return
    for way in ways:
        if torch.equal(way, torch.arange(width)):
            continue
        places = (inside == way).all(1).nonzero().flatten().tolist()
        named = _name_inside(way, width)
        where = "each head" if len(places) == len(inside) else f"heads {spans(places)} of {len(inside)}"
        yield NamedOrder(f"in {where}: {named.pattern}", named.meaning)


def _name_inside(way: Tensor, width: int) -> NamedOrder:
    """Name the order of features in a head, of which the last ones may stay (partial rotary)."""
    for size in range(2, width + 1, 2):
        if not torch.equal(way[size:], torch.arange(size, width)):
            continue
        named = of_axes(way[:size], size, {"heads": 1, "head_dim": size})
        if named:
            first = named[0]
            pattern = first.pattern if size == width else f"the first {size} of {width} {first.pattern}"
            return NamedOrder(pattern, first.meaning)
    return NamedOrder(f"features {' '.join(map(str, way[:_SHOWN].tolist()))}")


def _name_blocks(blocks: Tensor, count: int, sizes: Sizes) -> NamedOrder:
    """Name the order of heads by the first known order that is equal."""
    heads = sizes.get("heads", 0)
    kv_heads = sizes.get("kv_heads", heads) or heads
    for named in of_axes(blocks, count, {**sizes, "head_dim": 1}):
        return named
    for order, named in _orders_of_heads(len(blocks), count, heads, kv_heads):
        if torch.equal(blocks, order):
            return named
    kept = blocks.tolist()
    if len(kept) < count and kept == sorted(kept):
        pruned = sorted(set(range(count)) - set(kept))
        return NamedOrder(f"heads {spans(kept)} of {count}", f"without {_heads(pruned)} (pruned)")
    return NamedOrder(f"heads {' '.join(map(str, kept))}")


def _heads(numbers: list[int]) -> str:
    return f"head {spans(numbers)}" if len(numbers) == 1 else f"heads {spans(numbers)}"


def _orders_of_heads(length: int, count: int, heads: int, kv_heads: int) -> Iterator[tuple[Tensor, NamedOrder]]:
    """Yield orders of `count` heads, to `length` of them, that no pair of layouts gives."""
    numbers = torch.arange(count)
    if heads and length == count == heads + 2 * kv_heads:
        yield from _by_group(numbers, heads, kv_heads)
    if heads and length == count == 3 * heads:
        yield from _by_letters(numbers, heads)
    if length > count and length % count == 0:
        times = length // count
        side_by_side = NamedOrder(f"repeat_interleave({times})", f"each head {times} times, side by side")
        in_turns = NamedOrder(f"repeat({times})", f"all heads {times} times, in turns")
        yield numbers.repeat_interleave(times), side_by_side
        yield numbers.repeat(times), in_turns
    if length == count:
        yield numbers.flip(0), NamedOrder("heads reversed")
        if kv_heads and count == heads:
            reversed_in_groups = numbers.view(kv_heads, -1).flip(1).flatten()
            yield reversed_in_groups, NamedOrder("heads reversed in each group")
        for shift in range(1, count):
            yield numbers.roll(shift), NamedOrder(f"heads rolled by {shift}")


def _by_group(numbers: Tensor, heads: int, kv_heads: int) -> Iterator[tuple[Tensor, NamedOrder]]:
    """Yield the orders between `[q | k | v]` and queries, key and value of each group side by side."""
    parts = torch.split(numbers, [heads, kv_heads, kv_heads])
    by_group = [part.view(kv_heads, -1) for part in parts]
    order = torch.cat(by_group, 1).flatten()
    apart = "[q | k | v]"
    grouped = "(kv_heads (group + 2) head_dim)"
    meaning = "q, k, v group by group"
    yield order, NamedOrder(f"{apart} -> {grouped}", f"{apart} on the left, {meaning} on the right")
    yield order.argsort(), NamedOrder(f"{grouped} -> {apart}", f"{meaning} on the left, {apart} on the right")


def _by_letters(numbers: Tensor, heads: int) -> Iterator[tuple[Tensor, NamedOrder]]:
    """Yield the orders between `[q | k | v]` and the same parts in another order, of all heads or of each rank's."""
    apart = "[q | k | v]"
    for letters, ranks in product(permutations("qkv"), range(1, heads + 1)):
        if heads % ranks:
            continue
        parts = ["qkv".index(letter) for letter in letters]
        moved = numbers.view(3, heads)[parts]
        way = moved.view(3, ranks, -1).transpose(0, 1).flatten()
        text = f"[{' | '.join(letters)}]"
        if ranks == heads:
            text += " of each head"
        elif ranks > 1:
            text += f" of each of {ranks} ranks"
        yield way, NamedOrder(f"{apart} -> {text}", f"{apart} on the left, {text} on the right")
        yield way.argsort(), NamedOrder(f"{text} -> {apart}", f"{text} on the left, {apart} on the right")
