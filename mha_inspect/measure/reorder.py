"""Explain two tensors that have the same rows in another order, and name the order by einops axes.

    meta = hf.view(heads, 2, half, embed).transpose(1, 2).reshape(heads * 2 * half, embed)

`meta` and `hf` have no row in common at the same place, but each row of one is a row of the other. Rows are matched by
their bits, or where one side was rounded or trained a little by the nearest row, if it is much nearer than any other.
The order is then compared with those that known layouts give. Nothing is named that does not give the order exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
        return bool(self.meaning) and bool(axes & {"heads", "kv_heads"}) and not axes & _RARE

    def line(self, name: str, axis: str, dims: int) -> str:
        """Return the line that reorders a tensor: `rearrange(w, "(two half) e -> (half two) e", two=2)`.

        Empty if the pattern is in words. `axis` is `rows` or `columns`, `dims` the number of dimensions of the tensor.
        """
        if not self.sizes:
            return ""
        before, after = self.pattern.split(" -> ")
        if dims > 1:
            before, after = (f"{side} e" if axis == "rows" else f"e {side}" for side in (before, after))
        lengths = ", ".join(f"{axis}={size}" for axis, size in self.sizes[:-1])
        return f'rearrange({name}, "{before} -> {after}", {lengths})'


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
    >>> found = explain(left, left.view(2, 2, 2, 4).transpose(1, 2).reshape(8, 4), {"heads": 2, "head_dim": 4})
    >>> found.names[0].pattern
    '(heads two half) -> (heads half two)'
    """
    if not left.numel() or not right.numel() or left.is_complex() or right.is_complex():
        return None
    ours, theirs = (side.detach().reshape(side.shape[0] if side.dim() else 1, -1) for side in (left, right))
    dtype = _coarser(ours.dtype, theirs.dtype)
    ours, theirs = ours.to(dtype).contiguous(), theirs.to(dtype).contiguous()
    found = _exact(ours, theirs, sizes) or _nearest(ours, theirs)
    if found is None:
        return None
    in_order = torch.equal(found.order, torch.arange(len(found.order)))
    if in_order and not found.view.transposed and len(found.order) == ours.shape[found.view.left]:
        return None
    names = () if in_order else tuple(name(found.order, ours.shape[found.view.left], sizes))
    order = tuple(found.order.tolist())
    return Reordering(found.view.axis, order, names, found.view.transposed, found.remaining)


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
        self._known: dict[int, list[int]] = {}

    def along(self, dim: int) -> list[int]:
        """Return the digests of the rows (0) or of the columns (1)."""
        if dim not in self._known:
            self._known[dim] = digests(self._matrix if dim == 0 else self._matrix.T)
        return self._known[dim]


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
        if torch.equal(left.index_select(view.left, order).movedim(view.left, view.right), right):
            return _Match(view, order, 0.0)
    return None


def _matched(ours: list[int], theirs: list[int], sizes: Sizes, fewest: int) -> Tensor | None:
    """Return the place of each right row among the left ones; of equal rows only if a known layout decides."""
    places = {digest: place for place, digest in enumerate(ours)}
    if len(places) == len(ours) >= fewest:
        order = torch.tensor([places.get(digest, -1) for digest in theirs])
        repeats = len(order) <= len(ours) and len({*order.tolist()}) < len(order)
        return None if int(order.min()) < 0 or repeats else order
    shared = sizes.get("kv_heads", 0) * sizes.get("head_dim", 0)  # repeated for each head of a group
    has_enough = len(places) == shared or len(places) >= max(2 * _FEWEST, len(ours) // 16)
    if len(ours) != len(theirs) or not has_enough:
        return None
    for way, _ in layouts(len(ours), sizes):
        if [ours[place] for place in way.tolist()] == theirs:
            return way
    return None


def _nearest(left: Tensor, right: Tensor) -> _Match | None:
    """Find rows or columns of which each is much nearer than any other: rounded, or trained a little."""
    if not left.is_floating_point() or not right.is_floating_point():
        return None
    for view in _VIEWS:
        features = left.shape[1 - view.left]
        has_enough = features >= _FEW_FEATURES and left.shape[view.left] >= _FEWEST
        if features != right.shape[1 - view.right] or not has_enough:
            continue
        some = slice(None, None, max(1, features // _SKETCH))
        ours = left.movedim(view.left, 0)[:, some].float()
        theirs = right.movedim(view.right, 0)[:, some].float()
        if _clear(ours, theirs[:: max(1, len(theirs) // 16)]) is None:
            continue
        order = _clear(ours, theirs)
        if order is None or len({*order.tolist()}) < len(order):
            continue
        turned = left.index_select(view.left, order).movedim(view.left, view.right).float()
        remaining = float((turned - right.float()).norm() / right.float().norm())
        if remaining < _NEARLY:
            return _Match(view, order, remaining)
    return None


def _clear(ours: Tensor, theirs: Tensor) -> Tensor | None:
    """Return the nearest row of `ours` for each of `theirs`; None if one is not clear."""
    distances, places = torch.cdist(theirs, ours).topk(2, largest=False)
    is_clear = distances[:, 0] < _MARGIN * distances[:, 1]
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
    named = of_axes(order, count, sizes) or of_heads(order, count, sizes)
    rows = order.tolist()
    if not named and len(rows) < count and rows == sorted(rows):
        return [NamedOrder(f"{spans(rows)} of {count}")]
    if named or len(order) != count:
        return named
    axes = strides_of(order)
    if len(axes) < 2:
        return []
    before = " ".join(str(size) for size, _ in sorted(axes, key=lambda axis: -abs(axis[1])))
    after = " ".join(str(size) for size, _ in axes)
    return [NamedOrder(f"({before}) -> ({after})")]


def layouts(count: int, sizes: Sizes) -> Iterator[tuple[Tensor, NamedOrder]]:
    """Yield the order from each known layout of `count` rows to each other one, with its name."""
    heads, width = sizes.get("heads", 0), sizes.get("head_dim", 0)
    kv_heads = sizes.get("kv_heads", heads) or heads
    if not heads or not width or heads % kv_heads:
        return
    group = heads // kv_heads
    known = {**sizes, "kv_heads": kv_heads, "group": group, "qkv": 3, "kv": 2, "two": 2, "rotary_axes": 2}
    known |= {"half": width // 2, "quarter": width // 4, "part": width // 2 // group}
    for family in _FAMILIES:
        first = next(iter(family)).split()
        if "kv_heads" in first and "kv" not in first and group == 1:
            continue  # with as many key heads as query heads, the families of `heads` name it
        packed = 3 if "qkv" in first else 2 if "kv" in first else 1
        if sizes.get("parts", packed) != packed:
            continue
        for ranks in range(2, kv_heads) if "ranks" in first else (1,):
            every = {**known, "ranks": ranks, "local_heads": heads // ranks}
            if prod(every[axis] for axis in first) == count:
                yield from _ways(family, every)


def _ways(family: Mapping[str, str], sizes: Sizes) -> Iterator[tuple[Tensor, NamedOrder]]:
    """Yield the order from each layout of a family to each other one; axes of size one are left out."""
    for before, after in permutations(family, 2):
        axes, moved = ([axis for axis in side.split() if sizes[axis] > 1] for side in (before, after))
        meaning = f"{family[before]} on the left, {family[after]} on the right".format(**sizes)
        lengths = tuple((axis, sizes[axis]) for axis in axes)
        pattern = f"({' '.join(axes)}) -> ({' '.join(moved)})"
        yield reordered(before, after, sizes), NamedOrder(pattern, meaning, lengths)


def of_axes(order: Tensor, count: int, sizes: Sizes) -> list[NamedOrder]:
    """Name an order by all pairs of known layouts that give it."""
    named: dict[str, NamedOrder] = {}
    for way, known in layouts(count, sizes):
        if not torch.equal(order, way):
            continue
        before, after = known.pattern.split(" -> ")
        inverse = f"{after} -> {before}"
        if inverse in named:  # the order is its own inverse: which side is which does not show
            either = (
                named[inverse].meaning.replace("on the left", "on one side").replace("on the right", "on the other")
            )
            named[inverse] = NamedOrder(inverse, either, named[inverse].sizes)
        else:
            named.setdefault(known.pattern, known)
    return [*named.values()]


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
        step, length = int(order[1] - order[0]), len(order)
        size = 0
        for candidate in range(length, 1, -1):
            if length % candidate == 0 and torch.equal(order, _walk(order[::candidate], candidate, step)):
                size = candidate
                break
        if not size:
            return []
        axes.insert(0, (size, step))
        order = order[::size]
    return axes


def _walk(starts: Tensor, size: int, step: int) -> Tensor:
    return (starts[:, None] + torch.arange(size) * step).flatten()


def of_heads(order: Tensor, count: int, sizes: Sizes) -> list[NamedOrder]:
    """Name an order of whole heads, and an order of the features inside of each."""
    width = sizes.get("head_dim", 0)
    if not width or len(order) % width or count % width:
        return []
    units = order.view(-1, width)
    blocks, inside = units[:, 0] // width, units % width
    if not torch.equal(units // width, blocks[:, None].expand_as(units)):
        return []
    said = []
    if not torch.equal(blocks, torch.arange(count // width)):
        said.append(_name_blocks(blocks, count // width, sizes))
    said += _name_insides(inside, width)
    meanings = [named.meaning for named in said if named.meaning]
    return [NamedOrder("; ".join(named.pattern for named in said), "; ".join(meanings))]


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
            pattern = named[0].pattern
            return NamedOrder(pattern if size == width else f"the first {size} of {width} {pattern}", named[0].meaning)
    return NamedOrder(f"features {' '.join(map(str, way[:_SHOWN].tolist()))}")


def _name_blocks(blocks: Tensor, count: int, sizes: Sizes) -> NamedOrder:
    """Name the order of heads by the first known order that is equal."""
    heads = sizes.get("heads", 0)
    for named in of_axes(blocks, count, {**sizes, "head_dim": 1}):
        return named
    for way, named in _known_orders(len(blocks), count, heads, sizes.get("kv_heads", heads) or heads):
        if torch.equal(blocks, way):
            return named
    kept = blocks.tolist()
    if len(kept) < count and kept == sorted(kept):
        gone = sorted({*range(count)} - {*kept})
        return NamedOrder(f"heads {spans(kept)} of {count}", f"without {_heads(gone)} (pruned)")
    return NamedOrder(f"heads {' '.join(map(str, kept))}")


def _heads(numbers: list[int]) -> str:
    return f"head{'' if len(numbers) == 1 else 's'} {spans(numbers)}"


def _known_orders(length: int, count: int, heads: int, kv_heads: int) -> Iterator[tuple[Tensor, NamedOrder]]:
    """Yield orders of heads that no pair of layouts gives."""
    every = torch.arange(count)
    if heads and length == count == heads + 2 * kv_heads:
        yield from _by_group(every, heads, kv_heads)
    if heads and length == count == 3 * heads:
        yield from _by_letters(every, heads)
    if length > count and length % count == 0:
        times = length // count
        side_by_side = NamedOrder(f"repeat_interleave({times})", f"each head {times} times, side by side")
        yield every.repeat_interleave(times), side_by_side
        yield every.repeat(times), NamedOrder(f"repeat({times})", f"all heads {times} times, in turns")
    if length == count:
        yield every.flip(0), NamedOrder("heads reversed")
        if kv_heads and count == heads:
            yield every.view(kv_heads, -1).flip(1).flatten(), NamedOrder("heads reversed in each group")
        for shift in range(1, count):
            yield every.roll(shift), NamedOrder(f"heads rolled by {shift}")


def _by_group(every: Tensor, heads: int, kv_heads: int) -> Iterator[tuple[Tensor, NamedOrder]]:
    """Yield the orders between `[q | k | v]` and queries, key and value of each group side by side."""
    parts = [part.view(kv_heads, -1) for part in torch.split(every, [heads, kv_heads, kv_heads])]
    way = torch.cat(parts, 1).flatten()
    apart, grouped, means = "[q | k | v]", "(kv_heads (group + 2) head_dim)", "q, k, v group by group"
    yield way, NamedOrder(f"{apart} -> {grouped}", f"{apart} on the left, {means} on the right")
    yield way.argsort(), NamedOrder(f"{grouped} -> {apart}", f"{means} on the left, {apart} on the right")


def _by_letters(every: Tensor, heads: int) -> Iterator[tuple[Tensor, NamedOrder]]:
    """Yield the orders between `[q | k | v]` and the same parts in another order, of all heads or of each rank's."""
    apart = "[q | k | v]"
    for letters, ranks in product(permutations("qkv"), range(1, heads + 1)):
        if heads % ranks:
            continue
        moved = every.view(3, heads)[["qkv".index(letter) for letter in letters]]
        way = moved.view(3, ranks, -1).transpose(0, 1).flatten()
        text = f"[{' | '.join(letters)}]"
        text += {1: "", heads: " of each head"}.get(ranks, f" of each of {ranks} ranks")
        yield way, NamedOrder(f"{apart} -> {text}", f"{apart} on the left, {text} on the right")
        yield way.argsort(), NamedOrder(f"{text} -> {apart}", f"{text} on the left, {apart} on the right")
