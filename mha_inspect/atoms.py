"""Axes as sequences of atoms: what a view splits, merges or leaves whole, and what is found to be the same axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod


class Atom:
    """An axis that nothing has split yet."""

    __slots__ = ("counter", "origin", "parts", "size", "twins")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: tuple[Atom, ...] = ()
        """What it was split into, or the atom that it turned out to be."""
        self.twins: tuple[Atom, ...] = ()
        """Atoms of the same origin that are a different axis: the query and the key of self-attention."""
        self.origin: tuple[Dim, int] | None = None
        """The dimension that this is a piece of, and where in it the piece begins."""
        self.counter: Dim = ()
        """The axis that counts the equal pieces of which this is one."""

    def __repr__(self) -> str:
        return f"Atom({self.size})"


Dim = tuple[Atom, ...]
"""One dimension of a tensor."""


def resolve(dim: Iterable[Atom]) -> Dim:
    """The atoms as they are known now."""
    found: list[Atom] = []
    for atom in dim:
        if atom.parts:
            found.extend(_leaves(atom))
        else:
            found.append(atom)
    return tuple(found)


def _leaves(atom: Atom) -> Dim:
    """What an atom consists of in the end. What was walked over is shortened, so that it is walked over once."""
    pending = [atom]
    while pending:
        top = pending[-1]
        deeper = [part for part in top.parts if any(inner.parts for inner in part.parts)]
        if deeper:
            pending.extend(deeper)
            continue
        pending.pop()
        top.parts = tuple(leaf for part in top.parts for leaf in (part.parts or (part,)))
    return atom.parts


def size_of(dim: Iterable[Atom]) -> int:
    """How many elements the dimension has."""
    return prod(atom.size for atom in dim)


def fresh(size: int) -> Dim:
    """A dimension of which nothing is known but its size."""
    return (Atom(size),)


def piece(whole: Dim, start: int, size: int) -> Dim:
    """A part of a dimension, which is whole again when all its parts are put together."""
    atom = Atom(size)
    atom.origin = (whole, start)
    return (atom,)


def together(dims: Sequence[Dim]) -> Dim | None:
    """The dimension of which these are all the pieces, in whatever order; None where they are not."""
    origins = []
    for dim in dims:
        known = resolve(dim)
        if len(known) != 1 or known[0].origin is None:
            return None
        origins.append((*known[0].origin, known[0].size))
    whole = origins[0][0]
    leaves = resolve(whole)
    if any(resolve(other) != leaves for other, _, _ in origins[1:]):
        return None
    end = 0
    for _, start, size in sorted(origins, key=lambda origin: origin[1]):
        if start != end:
            return None
        end += size
    return whole if end == size_of(leaves) else None


def unify(left: Dim, right: Dim) -> bool:
    """Say that two dimensions are the same axis. False where they cannot be, or are known to be different axes."""
    a, b = resolve(left), resolve(right)
    if a == b:
        return True
    if size_of(a) != size_of(b):
        return False
    # The next to compare stands last.
    rest, others = ([atom for atom in reversed(side) if atom.size != 1] for side in (a, b))
    while rest and others:
        x, y = rest.pop(), others.pop()
        if x is y:
            continue
        if _are_twins(x, y):
            return False
        if x.size == y.size:
            _merge(x, y)
        elif x.size < y.size and y.size % x.size == 0:
            y.parts = (x, Atom(y.size // x.size))
            others.append(y.parts[1])
        elif y.size < x.size and x.size % y.size == 0:
            x.parts = (y, Atom(x.size // y.size))
            rest.append(x.parts[1])
        else:
            return False
    return True


_MANY = 4
"""Twins that an atom remembers. Each layer may add some, and comparing must not grow with the number of layers."""


def _merge(x: Atom, y: Atom) -> None:
    """From now on `y` is `x`; what both are pieces of is the same too."""
    y.parts = (x,)
    if y.twins:
        x.twins = (*y.twins, *x.twins)[:_MANY]
    if y.origin is not None:
        if x.origin is None:
            x.origin = y.origin
        elif x.origin[1] == y.origin[1] and size_of(x.origin[0]) == size_of(y.origin[0]):
            unify(x.origin[0], y.origin[0])
    if y.counter:
        if not x.counter:
            x.counter = y.counter
        elif size_of(x.counter) == size_of(y.counter):
            unify(x.counter, y.counter)


def twin(atom: Atom) -> Atom:
    """Another axis of the same size and origin."""
    made = Atom(atom.size)
    made.twins = (atom,)
    return made


def _are_twins(x: Atom, y: Atom) -> bool:
    return bool((x.twins and y in resolve(x.twins)) or (y.twins and x in resolve(y.twins)))


def reshape(dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...]:
    """The dimensions after a view to `shape`, splitting atoms where it splits them.

    An atom of size one goes to the next dimension of size one, or else in front of what follows it.
    """
    left = [atom for dim in reversed(dims) for atom in reversed(resolve(dim))]
    result: list[Dim] = []
    for place, size in enumerate(shape):
        taken: list[Atom] = []
        got = 1
        if size == 1:
            result.append((left.pop(),) if left and left[-1].size == 1 else fresh(1))
            continue
        while left and got < size:
            atom = left.pop()
            if size % (got * atom.size) == 0:
                taken.append(atom)
                got *= atom.size
            elif atom.size % (size // got) == 0 and size % got == 0:
                atom.parts = (Atom(size // got), Atom(atom.size * got // size))
                taken.append(atom.parts[0])
                left.append(atom.parts[1])
                got = size
            else:  # the view cuts across an axis
                return (*result, *(fresh(rest) for rest in shape[place:]))
        if all(rest == 1 for rest in shape[place + 1 :]):
            while len(left) > len(shape) - place - 1:
                taken.append(left.pop())
        result.append(tuple(taken) if taken else fresh(size))
    return tuple(result)
