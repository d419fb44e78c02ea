"""Axes as sequences of atoms: what a view splits, merges or leaves whole, and which of them are the same axis.

A dimension of 12 that a view splits in 3 and 4 is `(heads, head_dim)` wherever it stands; where a product sums over it
together with a dimension of another tensor, that one is `(heads, head_dim)` as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..record.ops import Op


class Axis:
    """An axis that nothing has split yet."""

    __slots__ = ("counters", "joined", "origins", "parts", "repeats", "size", "twins")

    def __init__(self, size: int, *, repeats: bool = False) -> None:
        self.size = size
        self.parts: tuple[Axis, ...] = ()
        """The axes that it was split into, or the one axis that it is the same as."""
        self.twins: tuple[Axis, ...] = ()
        """Axes of the same origin that are different ones: the query and the key of self-attention."""
        self.origins: dict[int, tuple[Dim, int]] = {}
        """Size of a piece that begins with this, to the dimension that it is cut from and where in it it begins."""
        self.counters: dict[int, Dim] = {}
        """Size of a piece that begins with this, to the axis that counts such pieces."""
        self.joined: tuple[Dim, ...] = ()
        """The dimensions that were put together, one after the other, into this one."""
        self.repeats = repeats
        """Whether the same stands at every place along it, as far as it was not made one with another axis."""


Dim = tuple[Axis, ...]
"""One dimension of a tensor."""
Dims = tuple[Dim, ...]
"""The dimensions of a tensor."""


def resolve(dim: Dim) -> Dim:
    """Return the atoms that a dimension is known to consist of."""
    for atom in dim:
        if atom.parts:
            return tuple([leaf for part in dim for leaf in (_leaves(part) if part.parts else (part,))])
    return dim


def _leaves(atom: Axis) -> Dim:
    """Return what an atom consists of in the end, and shorten the way there, so that it is gone once."""
    pending = [atom]
    while pending:
        top = pending[-1]
        deeper = [part for part in top.parts if any(inner.parts for inner in part.parts)]
        if deeper:
            pending.extend(deeper)
            continue
        pending.pop()
        top.parts = tuple([leaf for part in top.parts for leaf in (part.parts or (part,))])
    return atom.parts


def size_of(dim: Iterable[Axis]) -> int:
    """Return how many elements a dimension has."""
    size = 1
    for atom in dim:
        size *= atom.size
    return size


def wide(*dims: Iterable[Axis]) -> Dim:
    """Return the atoms of these dimensions that have more than one element."""
    return tuple([atom for dim in dims for atom in dim if atom.size > 1])


def fresh(size: int) -> Dim:
    """Return a dimension of which nothing is known but its size."""
    return (Axis(size),)


def join(dims: Sequence[Dim]) -> Dim:
    """Return dimensions one after the other: the dimension that they are all the pieces of, or else a new one."""
    whole = _together(dims)
    if whole is not None:
        return whole
    atom = Axis(sum(size_of(dim) for dim in dims))
    atom.joined = tuple(dims)
    return (atom,)


def piece(whole: Dim, start: int, size: int) -> Dim:
    """Return a part of a dimension: one that was joined to it, or a new one that remembers what it is cut from."""
    known = resolve(whole)
    at = 0
    for dim in known[0].joined if len(known) == 1 else ():
        if at == start and size_of(dim) == size:
            return dim
        at += size_of(dim)
    atom = Axis(size)
    atom.origins[size] = (whole, start)
    return (atom,)


def _together(dims: Sequence[Dim]) -> Dim | None:
    """Return the dimension of which these are all the pieces, in whatever order; None where they are not."""
    origins = []
    for dim in dims:
        first, size = resolve(dim)[:1], size_of(dim)
        if not first or size not in first[0].origins:
            return None
        origins.append((*first[0].origins[size], size))
    whole = origins[0][0]
    leaves = resolve(whole)
    end = 0
    for source, start, size in sorted(origins, key=lambda origin: origin[1]):
        if start != end or resolve(source) != leaves:
            return None
        end += size
    return whole if end == size_of(leaves) else None


def unify(left: Dim, right: Dim) -> bool:
    """Make two dimensions the same axis. Return False where they cannot be, or are known to be different axes.

    With `(12)` and `(3, 4)` the atom of 12 is split in those of 3 and 4. With `(2, 3)` and `(3, 2)` nothing is, for
    neither size divides the other; but what both end with may be the same.
    """
    a, b = resolve(left), resolve(right)
    if a == b:
        return True
    if size_of(a) != size_of(b) or not size_of(a):
        return False
    # The next to compare stands last.
    rest, others = ([atom for atom in reversed(side) if atom.size != 1] for side in (a, b))
    if _cross(a, b):
        _merge_last(rest, others)
        return False
    while rest and others:
        x, y = rest.pop(), others.pop()
        if x.parts or y.parts:
            # What was merged before may have split what comes after it.
            rest.extend(atom for atom in reversed(resolve((x,))) if atom.size != 1)
            others.extend(atom for atom in reversed(resolve((y,))) if atom.size != 1)
        elif x is y:
            continue
        elif _are_twins(x, y):
            return False
        elif x.size == y.size:
            _merge(x, y)
        elif y.size % x.size == 0:
            others.append(_take(y, x))
        elif x.size % y.size == 0:
            rest.append(_take(x, y))
        else:
            _merge_last([*rest, x], [*others, y])
            return False
    return True


def _merge_last(rest: list[Axis], others: list[Axis]) -> None:
    """Make what two dimensions end with the same, as far as their sizes agree from there; the last come first.

    What is before it may be counted in another order: windows before the batch, and behind it.
    """
    for x, y in zip(rest, others, strict=False):
        if x.parts or y.parts or x.size != y.size or x in others or y in rest or _are_twins(x, y):
            return
        _merge(x, y)


def _cross(a: Dim, b: Dim) -> bool:
    """Return whether the same axis stands at different places in two dimensions: one is the other in another order."""
    if len(a) == 1 or len(b) == 1:
        return False
    places = [{atom: size_of(dim[at + 1 :]) for at, atom in enumerate(dim)} for dim in (a, b)]
    return any(atom.size > 1 and places[1].get(atom, at) != at for atom, at in places[0].items())


_MANY = 4
"""Twins that an atom remembers. Each layer may add some, and comparing must not grow with the number of layers."""


def _merge(x: Axis, y: Axis) -> None:
    """Make `y` be `x`, and what both are pieces of the same too."""
    y.parts = (x,)
    if y.twins:
        x.twins = (*y.twins, *x.twins)[:_MANY]
    for size, counter in y.counters.items():
        unify(x.counters.setdefault(size, counter), counter)
    for size, (whole, start) in y.origins.items():
        known, place = x.origins.setdefault(size, (whole, start))
        if place == start:
            unify(known, whole)
    if [size_of(dim) for dim in x.joined] == [size_of(dim) for dim in y.joined]:
        for left, right in zip(x.joined, y.joined, strict=True):
            unify(left, right)
    x.joined = x.joined or y.joined


def _take(atom: Axis, first: Axis) -> Axis:
    """Split an atom that begins with another one, and return what is left of it."""
    rest = Axis(atom.size // first.size)
    first.counters = atom.counters | first.counters
    first.origins = atom.origins | first.origins
    atom.parts = (first, rest)
    _tell_parts_apart(atom)
    return rest


def split(atom: Axis, size: int) -> None:
    """Split an atom in two: `size` of what is left."""
    first, rest = Axis(size, repeats=atom.repeats), Axis(atom.size // size, repeats=atom.repeats)
    first.counters, first.origins = atom.counters, atom.origins
    atom.parts = (first, rest)
    _tell_parts_apart(atom)


def _tell_parts_apart(atom: Axis) -> None:
    """Make the parts of an atom other axes than those of its twins, as far as these have such parts."""
    for other in atom.twins:
        leaves = resolve((other,))
        if len(leaves) == 1 and leaves[0].size == atom.size and leaves[0] is not atom:
            split(leaves[0], atom.parts[0].size)
            leaves = leaves[0].parts
        if [leaf.size for leaf in leaves] == [part.size for part in atom.parts]:
            for part, leaf in zip(atom.parts, leaves, strict=True):
                part.twins = (leaf, *part.twins)[:_MANY]


def twin(dim: Dim, known: set[Axis]) -> Dim:
    """Return a dimension with other axes of the same sizes and origin in the place of those that are known."""
    return tuple(_twin(atom) if atom.size > 1 and atom in known else atom for atom in resolve(dim))


def _twin(atom: Axis) -> Axis:
    other = Axis(atom.size)
    other.twins = (atom,)
    return other


def _are_twins(x: Axis, y: Axis) -> bool:
    return bool((x.twins and y in resolve(x.twins)) or (y.twins and x in resolve(y.twins)))


def outer_product(inputs: Sequence[Dims]) -> Dims:
    """Return the dimensions where each of two operands is repeated along what the other has; empty where they are not.

    As with broadcasting, what one of them brings is another axis than what the other brings, also of one origin:
    `(a, repeated)` and `(repeated, a)` give `(a, twin of a)`.
    """
    if len(inputs) != 2 or len(inputs[0]) != len(inputs[1]):
        return ()
    if not all(any(atom.repeats for dim in dims for atom in dim) for dims in inputs):
        return ()
    pairs = [tuple(wide(resolve(dim)) for dim in both) for both in zip(*inputs, strict=True)]
    if any([atom.size for atom in left] != [atom.size for atom in right] for left, right in pairs):
        return ()
    atoms = [both for left, right in pairs for both in zip(left, right, strict=True)]
    if not {(True, False), (False, True)} <= {(a.repeats, b.repeats) for a, b in atoms}:
        return ()
    for a, b in atoms:
        if a.repeats == b.repeats:
            unify((a,), (b,))
    brought = {a for a, b in atoms if b.repeats and not a.repeats}
    outer = [
        tuple(a if not a.repeats else _twin(b) if b in brought else b for a, b in zip(left, right, strict=True))
        for left, right in pairs
    ]
    return tuple(dim or first for dim, first in zip(outer, inputs[0], strict=True))


def reshape(dims: Sequence[Dim], shape: Sequence[int]) -> Dims:
    """Return the dimensions after a view to `shape`, splitting atoms where it splits them.

    An atom of size one goes to the next dimension of size one, or else in front of what follows it.
    """
    if 0 in shape:  # without an element nothing tells where an axis goes
        return tuple(map(fresh, shape))
    left = [atom for dim in reversed(dims) for atom in reversed(resolve(dim))]
    result: list[Dim] = []
    for place, size in enumerate(shape):
        if size == 1:
            result.append((left.pop(),) if left and left[-1].size == 1 else fresh(1))
            continue
        taken: list[Axis] = []
        got = 1
        while left and got < size:
            atom = left.pop()
            if size % (got * atom.size) == 0:
                taken.append(atom)
                got *= atom.size
            elif atom.size % (size // got) == 0 and size % got == 0:
                split(atom, size // got)
                taken.append(atom.parts[0])
                left.append(atom.parts[1])
                got = size
            else:  # the view cuts across an axis
                return (*result, *map(fresh, shape[place:]))
        if all(rest == 1 for rest in shape[place + 1 :]):
            while len(left) > len(shape) - place - 1:
                taken.append(left.pop())
        result.append(tuple(taken) if taken else fresh(size))
    return tuple(result)


def setting(op: Op, place: int, name: str, default: Any = None) -> Any:
    """Return a plain argument of an operation, by place or by name."""
    return op.args[place] if place < len(op.args) else op.kwargs.get(name, default)
