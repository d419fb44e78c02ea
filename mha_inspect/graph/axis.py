"""Represent a dimension as a sequence of atoms: a split of one dimension is then known wherever its axis is used.

A linear layer gives 12 features. A view splits these into 3 heads of 4, and so splits the rows of the weight too:

>>> import torch
>>> x, weight = torch.randn(2, 8), torch.randn(12, 8)
>>> y = x @ weight.T
>>> rows, features, weight_rows = fresh(2), fresh(12), fresh(12)
>>> unify(features, weight_rows)  # by the product, the features of y are the rows of the weight
True
>>> dims = reshape((rows, features), y.view(2, 3, 4).shape)
>>> [[atom.size for atom in dim] for dim in dims]
[[2], [3], [4]]
>>> [atom.size for atom in resolve(weight_rows)]  # (heads head_dim)
[3, 4]
>>> resolve(weight_rows) == (*dims[1], *dims[2])
True
>>> torch.allclose(y.view(2, 3, 4)[:, 1], x @ weight.view(3, 4, 8)[1].T, atol=1e-5)  # head 1 is 4 rows of the weight
True
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from ..record.ops import Op


class Axis:
    """An indivisible axis (an atom), until a view splits it."""

    __slots__ = ("counters", "joined", "origins", "parts", "repeats", "size", "twins")

    def __init__(self, size: int, *, repeats: bool = False) -> None:
        self.size = size
        self.parts: tuple[Axis, ...] = ()
        """The axes that this one was split into, or the one axis that it was merged with; empty before either."""
        self.twins: tuple[Axis, ...] = ()
        """Different axes of the same origin, e.g. the query and the key of self-attention."""
        self.origins: dict[int, tuple[Dim, int]] = {}
        """Size of a piece that begins with this axis, to the dimension it was cut from and the start of the cut."""
        self.counters: dict[int, Dim] = {}
        """Size of a piece that begins with this axis, to the axis that counts the equal pieces."""
        self.joined: tuple[Dim, ...] = ()
        """The dimensions that were concatenated into this axis; empty if there are none."""
        self.repeats = repeats
        """Whether the tensor has the same content at every index of this axis, as after `expand`."""


Dim = tuple[Axis, ...]
"""One dimension of a tensor."""
Dims = tuple[Dim, ...]
"""The dimensions of a tensor."""

_MANY = 4
"""Twins that an atom remembers. Every layer may add some, and the time of a comparison must not grow with the layers.
"""


def resolve(dim: Dim) -> Dim:
    """Return the atoms of a dimension, with every split atom replaced by its parts."""
    for atom in dim:
        if atom.parts:
            return _resolved(dim)
    return dim


def _resolved(dim: Dim) -> Dim:
    """Return the atoms of a dimension of which some are split."""
    leaves: list[Axis] = []
    for atom in dim:
        if atom.parts:
            leaves += _leaves(atom)
        else:
            leaves.append(atom)
    return tuple(leaves)


def _leaves(atom: Axis) -> Dim:
    """Return the final parts of an atom, and cache them in the atom."""
    while any(part.parts for part in atom.parts):
        leaves: list[Axis] = []
        for part in atom.parts:
            leaves += part.parts or (part,)
        atom.parts = tuple(leaves)
    return atom.parts


def size_of(dim: Iterable[Axis]) -> int:
    """Return the number of elements of a dimension."""
    return prod(atom.size for atom in dim)


def wide(*dims: Iterable[Axis]) -> Dim:
    """Return the atoms of these dimensions that have more than one element; empty if there are none."""
    return tuple([atom for dim in dims for atom in dim if atom.size > 1])


def fresh(size: int) -> Dim:
    """Return a new dimension of this size, unrelated to any other."""
    return (Axis(size),)


def join(dims: Sequence[Dim]) -> Dim:
    """Return the concatenation of dimensions: the dimension that they are all the pieces of, otherwise a new one."""
    whole = _cut_into(dims)
    if whole is not None:
        return whole
    atom = Axis(sum(map(size_of, dims)))
    atom.joined = tuple(dims)
    return (atom,)


def _cut_into(dims: Sequence[Dim]) -> Dim | None:
    """Return the dimension that these are all the pieces of, in any order; None if there is none."""
    sources: list[Dim] = []
    cuts: list[tuple[int, int]] = []
    for dim in dims:
        size = size_of(dim)
        first = resolve(dim)[:1]
        if not first or size not in first[0].origins:
            return None
        source, start = first[0].origins[size]
        sources.append(source)
        cuts.append((start, size))
    if not cuts:
        return None
    end = 0
    for start, size in sorted(cuts, key=lambda cut: cut[0]):
        if start != end:
            return None
        end += size
    whole = resolve(sources[0])
    if size_of(whole) != end:
        return None
    is_one_source = all(resolve(source) == whole for source in sources)
    return whole if is_one_source else None


def piece(whole: Dim, start: int, size: int) -> Dim:
    """Return a slice of a dimension: a dimension that was joined into it, or a new one that remembers the cut."""
    atoms = resolve(whole)
    if len(atoms) == 1:
        end = 0
        for part in atoms[0].joined:
            if end == start and size_of(part) == size:
                return part
            end += size_of(part)
    atom = Axis(size)
    atom.origins[size] = (whole, start)
    return (atom,)


def unify(left: Dim, right: Dim) -> bool:
    """Make two dimensions the same axis. Return False if their sizes do not fit, or if they are known to differ.

    Given `(12)` and `(3, 4)`, the atom of 12 is split into those of 3 and 4. Given `(2, 3)` and `(3, 2)`, no atom is
    split, because neither size divides the other.
    """
    a, b = resolve(left), resolve(right)
    if a == b:
        return True
    if size_of(a) != size_of(b) or not size_of(a):
        return False
    # Start at the last atom: leading atoms may be in another order, e.g. windows before or after the batch.
    rest = [*wide(a)]
    others = [*wide(b)]
    while rest and others:
        x, y = rest.pop(), others.pop()
        if x.parts or y.parts:  # an earlier merge may have split this atom
            rest.extend(wide(resolve((x,))))
            others.extend(wide(resolve((y,))))
        elif x is y:
            continue
        elif x in others or y in rest or _are_twins(x, y):
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


def _are_twins(x: Axis, y: Axis) -> bool:
    return y in resolve(x.twins) or x in resolve(y.twins)


def _merge(x: Axis, y: Axis) -> None:
    """Replace `y` by `x`, and unify the dimensions that both were cut from, counted by or joined of."""
    y.parts = (x,)
    x.repeats = x.repeats and y.repeats
    if y.twins:
        x.twins = (*y.twins, *x.twins)[:_MANY]
    for size, counter in y.counters.items():
        unify(x.counters.setdefault(size, counter), counter)
    for size, cut in y.origins.items():
        whole, start = x.origins.setdefault(size, cut)
        if start == cut[1]:
            unify(whole, cut[0])
    if list(map(size_of, x.joined)) == list(map(size_of, y.joined)):
        for left, right in zip(x.joined, y.joined, strict=True):
            unify(left, right)
    x.joined = x.joined or y.joined


def _split(atom: Axis, last: Axis) -> Axis:
    """Split an atom into a new axis followed by `last`. Return the new axis."""
    first = Axis(atom.size // last.size, repeats=atom.repeats)
    first.counters, first.origins = atom.counters, atom.origins
    atom.parts = (first, last)
    for twin_atom in atom.twins:
        _split_alike(twin_atom, atom)
    return first


def _split_alike(twin_atom: Axis, atom: Axis) -> None:
    """Split the twin of an atom that was split, and make the parts of both twins."""
    first, last = atom.parts
    leaves = resolve((twin_atom,))
    if len(leaves) == 1:
        leaf = leaves[0]
        if leaf.size == atom.size and leaf is not atom:
            _split(leaf, Axis(last.size))
            leaves = leaf.parts
    if [leaf.size for leaf in leaves] == [first.size, last.size]:
        for part, leaf in zip(atom.parts, leaves, strict=True):
            part.twins = (leaf, *part.twins)[:_MANY]


def twin(dim: Dim, axes: Iterable[Axis]) -> Dim:
    """Return a dimension in which each of these axes is replaced by a new axis of the same size, its twin."""
    atoms = []
    for atom in resolve(dim):
        if atom.size > 1 and atom in axes:
            twin_atom = Axis(atom.size)
            twin_atom.twins = (atom,)
            atom = twin_atom
        atoms.append(atom)
    return tuple(atoms)


def reshape(dims: Sequence[Dim], shape: Sequence[int]) -> Dims:
    """Return the dimensions after a view to `shape`, splitting atoms if needed.

    An atom of size one goes to the next dimension of size one. Without such a dimension it goes before the next atom.
    """
    if 0 in shape:  # an empty tensor gives no evidence of where an axis goes
        return tuple(map(fresh, shape))
    left: list[Axis] = []
    for dim in reversed(dims):
        left += reversed(resolve(dim))
    result: list[Dim] = []
    for place, size in enumerate(shape):
        if size == 1:
            has_single = bool(left) and left[-1].size == 1
            result.append((left.pop(),) if has_single else fresh(1))
            continue
        taken = _taken(left, size)
        if taken is None:  # the view cuts across an axis
            return (*result, *map(fresh, shape[place:]))
        remaining = shape[place + 1 :]
        if all(length == 1 for length in remaining):
            while len(left) > len(remaining):
                taken.append(left.pop())
        result.append(tuple(taken) if taken else fresh(size))
    return tuple(result)


def _taken(left: list[Axis], size: int) -> list[Axis] | None:
    """Take the next atoms from the end of a list, until they have this size together; split the last if needed.

    None if their sizes do not fit.
    """
    taken: list[Axis] = []
    total = 1
    while left and total < size:
        atom = left.pop()
        if size % (total * atom.size) == 0:
            taken.append(atom)
            total *= atom.size
        elif atom.size % (size // total) == 0 and size % total == 0:
            last = Axis(atom.size * total // size, repeats=atom.repeats)
            taken.append(_split(atom, last))
            left.append(last)
            total = size
        else:
            return None
    return taken


def setting(op: Op, place: int, name: str, default: Any = None) -> Any:
    """Return a plain argument of an operation, by position or by name; `default` if it is absent."""
    if place < len(op.args):
        return op.args[place]
    return op.kwargs.get(name, default)


def plain_name(op: Op) -> str:
    """Return the name of an operation, also for the one that writes its result over its input: `add` for `add_`."""
    return op.base_name.rstrip("_")
