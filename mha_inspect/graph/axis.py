"""Axes as sequences of atoms: what a view splits, merges or leaves whole, and which of them are the same axis.

A dimension of 12 that a view splits in 3 and 4 is `(heads, head_dim)` wherever it stands; where a product sums over it
together with a dimension of another tensor, that one is `(heads, head_dim)` as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
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

_MANY = 4
"""Twins that an atom remembers. Each layer may add some, and comparing must not grow with the number of layers."""


def resolve(dim: Dim) -> Dim:
    """Return the atoms that a dimension is known to consist of."""
    for atom in dim:
        if atom.parts:
            return tuple([leaf for part in dim for leaf in (_leaves(part) if part.parts else (part,))])
    return dim


def _leaves(atom: Axis) -> Dim:
    """Return what an atom consists of in the end, and remember it."""
    while any(part.parts for part in atom.parts):
        atom.parts = tuple([leaf for part in atom.parts for leaf in part.parts or (part,)])
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
    sizes = [size_of(dim) for dim in dims]
    firsts = [(resolve(dim)[:1], size) for dim, size in zip(dims, sizes, strict=True)]
    cuts = [(*first[0].origins[size], size) for first, size in firsts if first and size in first[0].origins]
    if len(cuts) == len(dims):
        whole = resolve(cuts[0][0])
        _, starts, lengths = zip(*sorted(cuts, key=lambda cut: cut[1]), strict=True)
        ends = list(accumulate(lengths, initial=0))
        if [*starts, size_of(whole)] == ends and all(resolve(source) == whole for source, _, _ in cuts):
            return whole
    atom = Axis(sum(sizes))
    atom.joined = tuple(dims)
    return (atom,)


def piece(whole: Dim, start: int, size: int) -> Dim:
    """Return a part of a dimension: one that was joined to it, or a new one that remembers what it is cut from."""
    known = resolve(whole)
    parts = known[0].joined if len(known) == 1 else ()
    for part, at in zip(parts, accumulate(map(size_of, parts), initial=0), strict=False):
        if at == start and size_of(part) == size:
            return part
    atom = Axis(size)
    atom.origins[size] = (whole, start)
    return (atom,)


def unify(left: Dim, right: Dim) -> bool:
    """Make two dimensions the same axis. Return False where they cannot be, or are known to be different axes.

    With `(12)` and `(3, 4)` the atom of 12 is split in those of 3 and 4. With `(2, 3)` and `(3, 2)` nothing is, for
    neither size divides the other.
    """
    a, b = resolve(left), resolve(right)
    if a == b:
        return True
    if size_of(a) != size_of(b) or not size_of(a):
        return False
    # From the last: what is before may be counted in another order, windows before the batch and behind it.
    rest, others = [*wide(a)], [*wide(b)]
    while rest and others:
        x, y = rest.pop(), others.pop()
        if x.parts or y.parts:  # what was merged before may have split this one
            rest.extend(wide(resolve((x,))))
            others.extend(wide(resolve((y,))))
        elif x is y:
            continue
        elif x in others or y in rest or y in resolve(x.twins) or x in resolve(y.twins):
            return False  # the same axes in another order, or twins
        elif x.size == y.size:
            _merge(x, y)
        elif y.size % x.size == 0:
            others.append(_split(y, x))
        elif x.size % y.size == 0:
            rest.append(_split(x, y))
        else:
            return False
    return True


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
    if list(map(size_of, x.joined)) == list(map(size_of, y.joined)):
        for left, right in zip(x.joined, y.joined, strict=True):
            unify(left, right)
    x.joined = x.joined or y.joined


def _split(atom: Axis, last: Axis) -> Axis:
    """Split an atom that ends with another one, and return what is before it."""
    first = Axis(atom.size // last.size, repeats=atom.repeats)
    first.counters, first.origins = atom.counters, atom.origins
    atom.parts = (first, last)
    for other in atom.twins:  # the parts of twins are twins as well
        leaves = resolve((other,))
        if len(leaves) == 1 and leaves[0].size == atom.size and leaves[0] is not atom:
            _split(leaves[0], Axis(last.size))
            leaves = leaves[0].parts
        if [leaf.size for leaf in leaves] == [first.size, last.size]:
            for part, leaf in zip(atom.parts, leaves, strict=True):
                part.twins = (leaf, *part.twins)[:_MANY]
    return first


def twin(dim: Dim, known: Iterable[Axis]) -> Dim:
    """Return a dimension with other axes of the same sizes and origin in the place of those that are known."""
    atoms = []
    for atom in resolve(dim):
        if atom.size > 1 and atom in known:
            other = Axis(atom.size)
            other.twins = (atom,)
            atom = other
        atoms.append(atom)
    return tuple(atoms)


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
                last = Axis(atom.size * got // size, repeats=atom.repeats)
                taken.append(_split(atom, last))
                left.append(last)
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
