"""Define what each operation does to dimensions: one rule for each family of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from ..record.catalog import axes_rule
from ..record.ops import Op, TensorRef
from .axis import Axis, Dim, Dims, fresh, join, piece, reshape, resolve, setting, size_of, twin, unify, wide

Rule = Callable[[Op, tuple[Dims, ...]], Sequence[Dims]]
"""A function of an operation and its inputs' dimensions that returns the dimensions of each output."""


@cache
def rule_of(name: str, kind: str, pointwise: bool) -> Rule:
    """Return the rule for an operation: the rule in `record.catalog`, or the default of its kind."""
    rule = RULES.get(axes_rule(name.split(".")[1]))
    if rule is not None:
        return rule
    if pointwise:
        return _pointwise
    return _strided if kind == "view" else _same_sizes


def reduced_places(op: Op) -> tuple[int, ...]:
    """Return the dimensions that a sum, a mean or another reduction runs over."""
    rank = len(op.inputs[0].shape)
    default = 0 if op.base_name == "unbind" else None
    dims = setting(op, 2 if "norm" in op.base_name else 1, "dim", default)
    if dims is None:
        return tuple(range(rank))
    places = dims if isinstance(dims, tuple) else (dims,)
    return tuple(sorted({int(place) % max(rank, 1) for place in places}))


def _place(op: Op, argument: int, rank: int) -> int:
    """Return the dimension argument of an operation, counted from 0."""
    return int(setting(op, argument, "dim", 0)) % max(rank, 1)


def _same_sizes(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Keep the dimensions whose size is unchanged; two outputs of one shape have the same axes."""
    if not inputs:
        return [()] * len(op.outputs)
    by_shape: dict[tuple[int, ...], Dims] = {}
    for output in op.outputs:
        if output.shape not in by_shape and len(inputs[0]) == len(output.shape):
            by_shape[output.shape] = tuple(map(_resized, inputs[0], output.shape))
    return [by_shape.get(output.shape, ()) for output in op.outputs]


def _resized(dim: Dim, size: int) -> Dim:
    """Return a dimension if it has this size; otherwise a new one."""
    return dim if size_of(dim) == size else fresh(size)


def _pointwise(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    if len(inputs) == 1 and op.inputs[0].shape == op.output.shape:
        return inputs
    return [_broadcast(inputs, op.output.shape)]


def _broadcast(operands: Sequence[Dims], shape: Sequence[int]) -> Dims:
    """Return the dimensions of operands broadcast or repeated to one shape; unify the dimensions that they share.

    In `x[:, None] * x[None]` each operand has the axis of x where the other is repeated: these are two axes.
    """
    out = [_shared(operands, back, size) for back, size in zip(range(len(shape), 0, -1), shape, strict=True)]
    of_first: set[Axis] = set()
    for dim in out:
        for atom in dim:
            if atom.operand == 0:
                of_first.update(resolve((atom.axis,)))
    return tuple([_apart_from(of_first, dim) for dim in out])


class _Atom(NamedTuple):
    """An axis of a result of several operands."""

    axis: Axis
    operand: int | None
    """The only operand that has it; None if several have it."""


def _shared(operands: Sequence[Dims], back: int, size: int) -> list[_Atom]:
    """Return the axes of one dimension of a result, counted from the last one, and unify those of the operands."""
    places = [place for place, dims in enumerate(operands) if len(dims) >= back and size_of(dims[-back]) == size]
    if not places:
        return [_Atom(axis, None) for axis in fresh(size)]
    first = places[0]
    dim = operands[first][-back]
    if len(places) == 1:
        operand = first if size > 1 else None
        return [_Atom(axis, operand) for axis in dim]
    if len(places) == 2:
        pairs = _repeated_pairs(dim, operands[places[1]][-back])
        if pairs:
            return [_of_pair(left, right, places) for left, right in pairs]
    for place in places[1:]:
        _meet(operands[first], operands[place], back)
    return [_Atom(axis, None) for axis in dim]


def _of_pair(left: Axis, right: Axis, places: Sequence[int]) -> _Atom:
    """Return the axis that two operands give: of the one that is not repeated along it, or of both."""
    if left.repeats == right.repeats:
        unify((left,), (right,))
        return _Atom(left, None)
    return _Atom(right, places[1]) if left.repeats else _Atom(left, places[0])


def _apart_from(of_first: set[Axis], dim: Sequence[_Atom]) -> Dim:
    """Return a dimension of a result, with twins of the axes that the second operand has like the first."""
    atoms: list[Axis] = []
    for axis, operand in dim:
        if operand == 1:
            atoms += twin((axis,), of_first)
        else:
            atoms.append(axis)
    return tuple(atoms)


def _meet(left: Dims, right: Dims, back: int) -> None:
    """Make two dimensions one axis, unless a tensor would have it twice, as where a bias is made of pairs."""
    beside: list[Axis] = []
    for dims in (left, right):
        place = len(dims) - back
        for dim in (*dims[:place], *dims[place + 1 :]):
            beside += dim
    axes = wide(resolve(left[-back]), resolve(right[-back]))
    if set(axes).isdisjoint(resolve(tuple(beside))):
        unify(left[-back], right[-back])


def _repeated_pairs(left: Dim, right: Dim) -> Sequence[tuple[Axis, Axis]]:
    """Return the atoms of two dimensions in pairs, if an atom is repeated in one of them only; otherwise empty."""
    left, right = wide(resolve(left)), wide(resolve(right))
    if len(left) != len(right):
        return ()
    is_repeated = False
    for x, y in zip(left, right, strict=True):
        if x.size != y.size:
            return ()
        is_repeated = is_repeated or x.repeats != y.repeats
    return [*zip(left, right, strict=True)] if is_repeated else ()


def _reshape(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    if op.output.shape == op.inputs[0].shape:
        return [inputs[0]]
    return [reshape(inputs[0], op.output.shape)]


def _permute(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    order = list(range(len(inputs[0])))
    if op.base_name == "permute":
        order = op.args[1]
    elif len(order) > 1:
        a, b = op.args[1:3] if len(op.args) > 2 else (0, 1)
        order[a], order[b] = order[b], order[a]
    return [tuple([inputs[0][place] for place in order])]


def _repeat(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Expand or repeat a dimension: the axis of copies comes before it."""
    shape = op.output.shape
    missing = len(shape) - len(inputs[0])
    return [tuple(map(_repeated, ((),) * missing + inputs[0], shape))]


def _repeated(dim: Dim, size: int) -> Dim:
    """Return a dimension repeated to a size: `(copies features)`."""
    times = size // max(size_of(dim), 1)
    if times == 1 and dim:
        return dim
    return (Axis(times, repeats=True), *wide(dim))


def _reduce(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Remove dimensions, or make them 1: sum, mean, select or squeeze."""
    places = set(reduced_places(op))
    if op.does("reshapes"):
        places = {place for place in places if op.inputs[0].shape[place] == 1}
    keeps_places = len(op.output.shape) == len(inputs[0])
    dims: list[Dim] = []
    for place, dim in enumerate(inputs[0]):
        if place not in places:
            dims.append(dim)
        elif keeps_places:
            dims.append(fresh(1))
    return [tuple(dims)] * len(op.outputs)


def _unsqueeze(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    place = op.args[1] % (len(inputs[0]) + 1)
    return [(*inputs[0][:place], fresh(1), *inputs[0][place:])]


def split_pieces(op: Op, inputs: tuple[Dims, ...], *, is_even: bool = True) -> Sequence[Dims]:
    """Return the dimensions of each piece of a split; with `is_even` False the pieces are not alike."""
    dims = inputs[0]
    place = _place(op, 2, len(dims))
    sizes = [output.shape[place] for output in op.outputs]
    is_even = is_even and len(set(sizes)) == 1
    pieces = []
    start = 0
    for size in sizes:
        pieces.append(_cut(op, dims, place, start, size, is_even=is_even))
        start += size
    return pieces


def slice_piece(op: Op, inputs: tuple[Dims, ...], *, is_even: bool = True) -> Sequence[Dims]:
    """Return the dimensions of a slice; an equal piece of the features, or every n-th feature, is as after a split.

    With `is_even` False other slices of the same tensor are not like this one, so no slice is an equal piece.
    """
    dims, shape = inputs[0], op.inputs[0].shape
    place = _place(op, 1, len(dims))
    whole, size = shape[place], op.output.shape[place]
    start, step = setting(op, 2, "start", 0) or 0, setting(op, 4, "step", 1)
    is_even = is_even and place == len(dims) - 1 and size > 1
    if step == 1:
        first = start + whole if start < 0 else start
        return [_cut(op, dims, place, first, size, is_even=is_even)]
    if is_even and whole == size * step:
        return [_without_counter(reshape(dims, (*shape[:place], size, step)), place, place + 1)]
    return [(*dims[:place], fresh(size), *dims[place + 1 :])]


def _cut(op: Op, dims: Dims, place: int, start: int, size: int, *, is_even: bool) -> Dims:
    """Cut a slice out of a dimension; an equal piece is an axis of its own, after the axis that counts the pieces."""
    shape = op.inputs[0].shape
    if is_even and size and shape[place] % size == start % size == 0:
        parts = reshape(dims, (*shape[:place], shape[place] // size, size, *shape[place + 1 :]))
        return _without_counter(parts, place + 1, place)
    return (*dims[:place], piece(dims[place], start, size), *dims[place + 1 :])


def _without_counter(dims: Dims, piece_place: int, counter_place: int) -> Dims:
    """Remove the dimension that counts equal pieces, and remember it in the piece."""
    atoms = resolve(dims[piece_place])
    if atoms:
        atoms[0].counters.setdefault(size_of(atoms), dims[counter_place])
    return (*dims[:counter_place], *dims[counter_place + 1 :])


def _counter(dim: Dim) -> Dim:
    """Return the axis that counts equal pieces like this one; empty if this is no equal piece."""
    atoms = resolve(dim)
    if not atoms:
        return ()
    return atoms[0].counters.get(size_of(atoms), ())


def _counter_of(dim: Dim, count: int) -> Dim:
    """Return the axis that counts equal pieces like this one, if it counts as many; otherwise a new axis."""
    counter = _counter(dim)
    return counter if counter and size_of(counter) == count else fresh(count)


def _are_alike(operands: Sequence[Dims]) -> bool:
    return len({tuple(map(resolve, dims)) for dims in operands}) == 1


def _join(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Concatenate or stack: equal pieces of the features come after the axis that counts them."""
    rank = len(op.output.shape)
    place = _place(op, 1, rank)
    if op.base_name == "stack":
        return [_stacked(op, inputs, place)]
    operands = []
    for dims, tensor in zip(inputs, op.inputs, strict=True):
        if len(dims) == rank and tensor.numel:
            operands.append(dims)
    if len(operands) < 2:
        return operands
    return [_concatenated(op, operands, place)]


def _stacked(op: Op, operands: tuple[Dims, ...], place: int) -> Dims:
    """Return the dimensions of a stack along a new dimension."""
    dims = _broadcast(operands, op.inputs[0].shape)
    is_last = place == len(dims) or _are_alike(operands)
    last = dims[-1] if dims and is_last else ()
    return (*dims[:place], _counter_of(last, op.output.shape[place]), *dims[place:])


def _concatenated(op: Op, operands: Sequence[Dims], place: int) -> Dims:
    """Return the dimensions of a concatenation."""
    shape = op.output.shape
    parts = [dims[place] for dims in operands]
    beside = [_without(dims, place) for dims in operands]
    first = _broadcast(beside, (*shape[:place], *shape[place + 1 :]))
    if len({tensor.id for tensor in op.inputs}) == 1:
        joined = (*fresh(len(parts)), *parts[0])
    elif place == len(shape) - 1 and len(set(map(size_of, parts))) == 1:
        for part in parts[1:]:
            unify(parts[0], part)
        joined = (*_counter_of(parts[0], len(parts)), *parts[0])
    elif size_of(_counter(first[-1])) == len(parts) and _are_alike(operands):
        joined = (*_counter(first[-1]), *parts[0])  # equal pieces of the features in another dimension: heads first
    else:
        joined = join(parts)
    return (*first[:place], joined, *first[place:])


def _without(dims: Dims, place: int) -> Dims:
    return (*dims[:place], *dims[place + 1 :])


def _pad(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Join a padded dimension with its padding."""
    dims = list(inputs[0])
    pads = setting(op, 1, "pad")
    for back, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True), 1):
        dims[-back] = _padded(dims[-back], before, after)
    return [tuple(dims)]


def _padded(dim: Dim, before: int, after: int) -> Dim:
    """Return a dimension joined with so much padding; the dimension itself if elements are cut off."""
    padding = fresh(max(before, 0)), fresh(max(after, 0))
    parts = [part for part in (padding[0], dim, padding[1]) if size_of(part)]
    if len(parts) < 2 or min(before, after) < 0:
        return dim
    return join(parts)


def _product(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Multiply `batch n k, batch k m -> batch n m`, with an added term; the second factor of cdist is `batch m k`."""
    *added, a, b = inputs
    if op.does("distances"):
        b = (*b[:-2], b[-1], b[-2])
    unify(a[-1], b[-2])
    for left, right in zip(a[:-2], b[:-2], strict=False):
        unify(left, right)
    beside: set[Axis] = set()
    for dim in a[:-1]:
        beside.update(resolve(dim))
    columns = set(resolve(b[-1]))
    dims = (*a[:-1], b[-1] if beside.isdisjoint(columns) else twin(b[-1], columns))
    if added:
        _unify_added(op, added[0], dims)
    return [dims]


def _unify_added(op: Op, added: Dims, dims: Dims) -> None:
    """Make the dimensions of a term that is added to a product those of the product, where it is not broadcast."""
    for back, dim in enumerate(reversed(added), 1):
        if op.inputs[0].shape[-back] == op.output.shape[-back]:
            unify(dims[-back], dim)


def _convolution(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Convolve `batch in *space, out in/groups *kernel -> batch out *space`: an unchanged size is the same axis.

    The weight of a transposed convolution is `in out/groups *kernel`.
    """
    source, weight = inputs[:2]
    before, after = op.inputs[0].shape, op.output.shape
    groups = setting(op, 8, "groups", 1)
    if groups == after[1] == before[1]:
        channels = source[1]
    else:
        is_transposed = setting(op, 6, "transposed", False)
        channels = _resized(weight[1 if is_transposed else 0], after[1])
    space = []
    for dim, was, size in zip(source[2:], before[2:], after[2:], strict=True):
        space.append(dim if was == size else fresh(size))
    return [(source[0], channels, *space)]


def _index(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Read `table[..., indices, ...]` with one tensor of indices, whose axes replace the indexed dimension."""
    table, place = inputs[0], 0
    if op.base_name == "index_select":
        place = _place(op, 1, len(table))
    elif op.base_name == "index":
        indexed = [place for place, index in enumerate(op.args[1]) if index is not None]
        if len(indexed) != 1 or op.inputs[-1].dtype == "bool":
            return []
        place = indexed[0]
    return [(*table[:place], *inputs[-1], *table[place + 1 :])]


def written_places(op: Op) -> tuple[int, int] | None:
    """Return the dimension that an indexed write replaces, and the rank of its indices; None if there are several."""
    if not op.base_name.startswith("index_put"):
        return _place(op, 1, len(op.inputs[0].shape)), 1
    indexed = [(place, index) for place, index in enumerate(op.args[1]) if index is not None]
    if len(indexed) != 1:
        return None
    place, index = indexed[0]
    return None if index.dtype == "bool" else (place, len(index.shape))


def _index_write(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Write `table[..., indices, ...] = values`, e.g. into a cache: the other dimensions are the same axes."""
    written, table, values = written_places(op), inputs[0], inputs[-1]
    if written is None or len(inputs) < 3:
        return [table]
    place, rank = written
    expected = [*table[:place], *[None] * rank, *table[place + 1 :]]
    for dim, value in zip(reversed(expected), reversed(values), strict=False):
        if dim is not None and size_of(dim) == size_of(value):
            unify(dim, value)
    return [table]


def _gather(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Keep the axes of the source, except in the gathered dimension, which has the axis of the indices.

    Fewer dimensions come from a scalar, which torch gathers from too.
    """
    source, indices = inputs[0], inputs[-1]
    gathered = _place(op, 1, len(source))
    dims = []
    for place, (dim, index) in enumerate(zip(source, indices, strict=False)):
        is_same_size = size_of(dim) == size_of(index)
        is_repeated = any(atom.repeats for atom in resolve(dim))
        keeps_axis = place != gathered and is_same_size and not is_repeated
        dims.append(dim if keeps_axis else index)
    return [tuple(dims)]


def _strided(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Follow a view by strides: a split or permutation exactly, otherwise the dimensions with an unchanged stride."""
    source, out = op.inputs[0], op.output
    if _is_dense(source) and _is_dense(out):
        before, after = _by_stride(source), _by_stride(out)
        dims = reshape([inputs[0][place] for place in before], [out.shape[place] for place in after])
        return [tuple([dims[after.index(place)] for place in range(len(after))])]
    unchanged: dict[tuple[int, int], Dim] = {}
    for size, step, dim in zip(source.shape, source.stride, inputs[0], strict=True):
        if size > 1:
            unchanged[size, step] = dim
    places = [*zip(out.shape, out.stride, strict=True)]
    new_steps = [step for size, step in places if size > 1 and (size, step) not in unchanged]
    result = []
    for size, step in places:
        old_dim = unchanged.get((size, step))
        # Windows overlap where another step is shorter than this dimension.
        overlaps = any(step < new_step < size * step for new_step in new_steps)
        result.append(old_dim if old_dim and not overlaps else fresh(size))
    return [tuple(result)]


def _is_dense(tensor: TensorRef) -> bool:
    """Return whether a tensor fills the memory from its first element to its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    return last + 1 == tensor.numel


def _by_stride(tensor: TensorRef) -> list[int]:
    """Return the dimensions of a tensor in the order of memory, the outermost first."""
    return sorted(range(len(tensor.shape)), key=lambda place: (-tensor.stride[place], -tensor.shape[place]))


def _columns(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Unfold (im2col) `*batch channels height width -> *batch (channels kernel) positions`."""
    *batch, channels, _, _ = inputs[0]
    *_, rows, positions = op.output.shape
    kernel = rows // max(op.inputs[0].shape[-3], 1)
    return [(*batch, (*channels, *fresh(kernel)), fresh(positions))]


def _complex(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """View complex numbers as pairs of features, or pairs as complex numbers: a pair is an equal piece."""
    dims = inputs[0]
    if op.base_name == "view_as_real":
        return [(*dims, _counter_of(dims[-1], 2) if dims else fresh(2))]
    if len(dims) < 2:
        return [dims[:-1]]
    return [_without_counter(dims, len(dims) - 2, len(dims) - 1)]


RULES: dict[str, Rule] = {
    "pointwise": _pointwise,
    "reshape": _reshape,
    "permute": _permute,
    "repeat": _repeat,
    "reduce": _reduce,
    "unsqueeze": _unsqueeze,
    "split": split_pieces,
    "slice": slice_piece,
    "join": _join,
    "pad": _pad,
    "product": _product,
    "convolution": _convolution,
    "index": _index,
    "index_write": _index_write,
    "gather": _gather,
    "columns": _columns,
    "complex": _complex,
}
"""The rules by their names in `record.catalog`."""
