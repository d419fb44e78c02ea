"""Axes as sequences of atoms: what a view splits, merges or leaves whole, and what is found to be the same axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

from ..record.ops import Op


class Axis:
    """An axis that nothing has split yet."""

    __slots__ = ("counters", "joined", "origins", "parts", "repeats", "size", "twins")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: tuple[Axis, ...] = ()
        """What it was split into, or the atom that it turned out to be."""
        self.twins: tuple[Axis, ...] = ()
        """Atoms of the same origin that are a different axis: the query and the key of self-attention."""
        self.origins: dict[int, tuple[Dim, int]] = {}
        """Size of a piece that begins with this, to the dimension that it is cut from and where in it it begins."""
        self.counters: dict[int, Dim] = {}
        """Size of a piece that begins with this, to the axis that counts such pieces."""
        self.joined: tuple[Dim, ...] = ()
        """The dimensions that were put together, one after the other, into this one."""
        self.repeats = False
        """Whether the same stands at every place along it, as far as nothing else has met it."""


Dim = tuple[Axis, ...]
"""One dimension of a tensor."""


def resolve(dim: Dim) -> Dim:
    """The atoms as they are known now."""
    for atom in dim:
        if atom.parts:
            return tuple([leaf for one in dim for leaf in (_leaves(one) if one.parts else (one,))])
    return dim


def _leaves(atom: Axis) -> Dim:
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


def size_of(dim: Iterable[Axis]) -> int:
    """How many elements the dimension has."""
    return prod(atom.size for atom in dim)


def wide(*dims: Iterable[Axis]) -> Dim:
    """The atoms of these dimensions that have more than one element."""
    return tuple(atom for dim in dims for atom in dim if atom.size > 1)


def fresh(size: int) -> Dim:
    """A dimension of which nothing is known but its size."""
    return (Axis(size),)


def repeating(size: int) -> Dim:
    """A dimension along which the same is repeated."""
    axis = Axis(size)
    axis.repeats = True
    return (axis,)


def join(dims: Sequence[Dim]) -> Dim:
    """Dimensions one after the other: whole again if these are all the pieces of one, else an axis of their own."""
    whole = _together(dims)
    if whole is not None:
        return whole
    atom = Axis(sum(size_of(dim) for dim in dims))
    atom.joined = tuple(dims)
    return (atom,)


def piece(whole: Dim, start: int, size: int) -> Dim:
    """A part of a dimension: one that was joined to it before, or one that makes it whole again with all the others."""
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
    """The dimension of which these are all the pieces, in whatever order; None where they are not."""
    origins = []
    for dim in dims:
        known, size = resolve(dim), size_of(dim)
        if not known or size not in known[0].origins:
            return None
        origins.append((*known[0].origins[size], size))
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
            # What was found so far may have split what comes after it.
            rest.extend(reversed(_large(x)))
            others.extend(reversed(_large(y)))
            continue
        if x is y:
            continue
        if _are_twins(x, y):
            return False
        if x.size == y.size:
            _merge(x, y)
        elif x.size < y.size and y.size % x.size == 0:
            others.append(_take(y, x))
        elif y.size < x.size and x.size % y.size == 0:
            rest.append(_take(x, y))
        else:
            _merge_last([*rest, x], [*others, y])
            return False
    return True


def _merge_last(rest: list[Axis], others: list[Axis]) -> None:
    """Say that what two dimensions end with is the same, as far as their sizes agree from there; the last come first.

    What is before it may be counted in another order: windows before the batch, and behind it.
    """
    for x, y in zip(rest, others, strict=False):
        if x.parts or y.parts or x.size != y.size or x in others or y in rest or _are_twins(x, y):
            return
        _merge(x, y)


def _cross(a: Dim, b: Dim) -> bool:
    """Whether the same axis stands at different places in two dimensions: one is the other in another order."""
    places: list[dict[Axis, int]] = []
    for dim in (a, b):
        within, found = size_of(dim), {}
        for atom in dim:
            within //= atom.size
            found[atom] = within
        places.append(found)
    return any(atom.size > 1 and places[1].get(atom, at) != at for atom, at in places[0].items())


def _large(atom: Axis) -> list[Axis]:
    """What an atom consists of now, but for what has size one."""
    return [leaf for leaf in (_leaves(atom) if atom.parts else (atom,)) if leaf.size != 1]


_MANY = 4
"""Twins that an atom remembers. Each layer may add some, and comparing must not grow with the number of layers."""


def _merge(x: Axis, y: Axis) -> None:
    """From now on `y` is `x`; what both are pieces of is the same too."""
    y.parts = (x,)
    if y.twins:
        x.twins = (*y.twins, *x.twins)[:_MANY]
    for size, counter in y.counters.items():
        unify(x.counters.setdefault(size, counter), counter)
    for size, (whole, start) in y.origins.items():
        other, place = x.origins.setdefault(size, (whole, start))
        if place == start:
            unify(other, whole)
    if [size_of(dim) for dim in x.joined] == [size_of(dim) for dim in y.joined]:
        for left, right in zip(x.joined, y.joined, strict=True):
            unify(left, right)
    x.joined = x.joined or y.joined


def _take(atom: Axis, first: Axis) -> Axis:
    """Say that an atom begins with another; returns what is left of it."""
    rest = Axis(atom.size // first.size)
    for size, counter in atom.counters.items():
        first.counters.setdefault(size, counter)
    for size, origin in atom.origins.items():
        first.origins.setdefault(size, origin)
    atom.parts = (first, rest)
    _tell_parts_apart(atom)
    return rest


def split(atom: Axis, size: int) -> None:
    """Split an atom in two: `size` of what is left."""
    first, rest = Axis(size), Axis(atom.size // size)
    first.counters, first.origins = atom.counters, atom.origins
    first.repeats = rest.repeats = atom.repeats
    atom.parts = (first, rest)
    _tell_parts_apart(atom)


def _tell_parts_apart(atom: Axis) -> None:
    """Say that the parts of an atom are other axes than those of its twins, as far as these have such parts."""
    for other in atom.twins:
        leaves = resolve((other,))
        if len(leaves) == 1 and leaves[0].size == atom.size and leaves[0] is not atom:
            split(leaves[0], atom.parts[0].size)
            leaves = leaves[0].parts
        if [leaf.size for leaf in leaves] == [part.size for part in atom.parts]:
            for part, leaf in zip(atom.parts, leaves, strict=True):
                part.twins = (leaf, *part.twins)[:_MANY]


def twin(atom: Axis) -> Axis:
    """Another axis of the same size and origin."""
    made = Axis(atom.size)
    made.twins = (atom,)
    return made


def _are_twins(x: Axis, y: Axis) -> bool:
    return bool((x.twins and y in resolve(x.twins)) or (y.twins and x in resolve(y.twins)))


def outer_product(inputs: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """Return the dimensions where each of two operands is repeated along what the other has; empty where they are not.

    As with broadcasting, what one of them brings is another axis than what the other brings, also of one origin.
    """
    if len(inputs) != 2 or len(inputs[0]) != len(inputs[1]):
        return ()
    if not all(any(atom.repeats for dim in own for atom in dim) for own in inputs):
        return ()
    pairs = [tuple(wide(resolve(dim)) for dim in both) for both in zip(*inputs, strict=True)]
    if any([atom.size for atom in left] != [atom.size for atom in right] for left, right in pairs):
        return ()
    met = [(a, b) for left, right in pairs for a, b in zip(left, right, strict=True)]
    if not {(True, False), (False, True)} <= {(a.repeats, b.repeats) for a, b in met}:
        return ()
    brought = {a for a, b in met if b.repeats and not a.repeats}
    found = []
    for dim, (left, right) in zip(inputs[0], pairs, strict=True):
        atoms = []
        for a, b in zip(left, right, strict=True):
            if a.repeats == b.repeats:
                unify((a,), (b,))
            atoms.append(a if not a.repeats else twin(b) if b in brought else b)
        found.append(tuple(atoms) or dim)
    return tuple(found)


def reshape(dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...]:
    """The dimensions after a view to `shape`, splitting atoms where it splits them.

    An atom of size one goes to the next dimension of size one, or else in front of what follows it.
    """
    if 0 in shape:  # without an element nothing tells where an axis goes
        return tuple(fresh(size) for size in shape)
    left = [atom for dim in reversed(dims) for atom in reversed(resolve(dim))]
    result: list[Dim] = []
    for place, size in enumerate(shape):
        taken: list[Axis] = []
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
                split(atom, size // got)
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


Dims = tuple[Dim, ...]


def setting(op: Op, place: int, name: str, default: Any = None) -> Any:
    """A plain argument of an operation, by place or by name."""
    return op.args[place] if place < len(op.args) else op.kwargs.get(name, default)


def split_pieces(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """Equal pieces of a dimension are an axis of their own, after the axis that counts the pieces."""
    dims = inputs[0]
    place = setting(op, 2, "dim", 0) % len(dims)
    sizes = [output.shape[place] for output in op.outputs]
    if len(set(sizes)) == 1 and sizes[0]:
        return [_piece_of(op, dims, place, len(sizes))] * len(sizes)
    starts = accumulate(sizes, initial=0)
    pieces = [piece(dims[place], start, size) for start, size in zip(starts, sizes, strict=False)]
    return [(*dims[:place], part, *dims[place + 1 :]) for part in pieces]


def slice_piece(op: Op, inputs: tuple[Dims, ...], *, is_even: bool = True) -> Iterable[Dims]:
    """A slice of the features that is one of equal pieces is treated as a split; so is every n-th feature.

    Not so one out of which pieces of other sizes are cut as well: it is not `is_even`.
    """
    dims = inputs[0]
    place = setting(op, 1, "dim", 0) % len(dims)
    whole, size = op.inputs[0].shape[place], op.output.shape[place]
    if size == whole:
        return [dims]
    start, step = setting(op, 2, "start", 0) or 0, setting(op, 4, "step", 1)
    if start < 0:
        start += whole
    equal = is_even and place == len(dims) - 1 and size > 1 and whole % size == 0
    if step == 1 and equal and start % size == 0:
        return [_piece_of(op, dims, place, whole // size)]
    if step > 1 and equal and whole // size == step:
        shape = op.inputs[0].shape
        parts = reshape(dims, (*shape[:place], size, step, *shape[place + 1 :]))
        return [counted(parts, place, place + 1)]
    part = piece(dims[place], start, size) if step == 1 else fresh(size)
    return [(*dims[:place], part, *dims[place + 1 :])]


def uneven_slices(ops: Iterable[Op]) -> set[int]:
    """Indices of the slices of tensors out of which pieces of different sizes are cut: they are no equal pieces."""
    cut: dict[tuple[int, int], dict[int, list[int]]] = {}
    for op in ops:
        if op.base_name == "slice" and op.outputs and setting(op, 4, "step", 1) == 1:
            place = setting(op, 1, "dim", 0) % len(op.output.shape)
            size = op.output.shape[place]
            if size != op.inputs[0].shape[place]:
                cut.setdefault((op.inputs[0].id, place), {}).setdefault(size, []).append(op.index)
    return {index for sizes in cut.values() if len(sizes) > 1 for indices in sizes.values() for index in indices}


def _piece_of(op: Op, dims: Dims, place: int, count: int) -> Dims:
    shape = op.inputs[0].shape
    parts = reshape(dims, (*shape[:place], count, shape[place] // count, *shape[place + 1 :]))
    return counted(parts, place + 1, place)


def counted(dims: Dims, piece_place: int, counter_place: int) -> Dims:
    """Without the dimension that counts pieces, which the piece remembers."""
    resolved = resolve(dims[piece_place])
    if resolved:
        resolved[0].counters.setdefault(size_of(resolved), dims[counter_place])
    return (*dims[:counter_place], *dims[counter_place + 1 :])


def counter(dim: Dim, count: int) -> Dim:
    """The axis that counts equal pieces like this one, where as many are put together again."""
    resolved = resolve(dim)
    known = resolved[0].counters.get(size_of(resolved), ()) if resolved else ()
    return known if known and size_of(known) == count else fresh(count)
