"""Define what each operation does to dimensions: one rule for each family of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from ..record.catalog import axes_rule
from ..record.ops import Op, TensorRef
from .axis import Axis, Dim, Dims, fresh, join, piece, reshape, resolve, setting, size_of, twin, unify, wide
from .ids import ids_of

Inputs = tuple[Dims, ...]
"""The dimensions of each input of an operation."""
Results = Sequence[Dims]
"""The dimensions of each output of an operation."""
Rule = Callable[[Op, Inputs], Results]
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


def _same_sizes(op: Op, inputs: Inputs) -> Results:
    """Keep the dimensions whose size is unchanged; two outputs of one shape have the same axes."""
    if not inputs:
        return [()] * len(op.outputs)
    source = inputs[0]
    by_shape: dict[tuple[int, ...], Dims] = {}
    results = []
    for output in op.outputs:
        shape = output.shape
        if shape not in by_shape:
            is_alike = len(source) == len(shape)
            by_shape[shape] = tuple(map(_resized, source, shape)) if is_alike else ()
        results.append(by_shape[shape])
    return results


def _resized(dim: Dim, size: int) -> Dim:
    """Return a dimension if it has this size; otherwise a new one."""
    return dim if size_of(dim) == size else fresh(size)


def _pointwise(op: Op, inputs: Inputs) -> Results:
    shape = op.output.shape
    if len(inputs) == 1 and op.inputs[0].shape == shape:
        return inputs
    return [_broadcast(inputs, shape)]


def _broadcast(operands: Sequence[Dims], shape: Sequence[int]) -> Dims:
    """Return the dimensions of operands broadcast or repeated to one shape; unify the dimensions that they share.

    In `x[:, None] * x[None]` each operand has the axis of x where the other is repeated: these are two axes.
    """
    out = []
    back = len(shape)
    for size in shape:
        out.append(_shared(operands, back, size))
        back -= 1
    of_first: set[Axis] = set()
    for dim in out:
        for axis, operand in dim:
            if operand == 0:
                of_first.update(resolve((axis,)))
    return tuple([_apart_from(of_first, dim) for dim in out])


class _Atom(NamedTuple):
    """An axis of a result of several operands."""

    axis: Axis
    operand: int | None
    """The only operand that has it; None if several have it."""


def _shared(operands: Sequence[Dims], back: int, size: int) -> list[_Atom]:
    """Return the axes of one dimension of a result, counted from the last one, and unify those of the operands."""
    places = _operands_with(operands, back, size)
    if not places:
        return _atoms(fresh(size), None)
    first, *later = places
    dim = operands[first][-back]
    if not later:
        return _atoms(dim, first if size > 1 else None)
    if len(later) == 1:
        pairs = _repeated_pairs(dim, operands[later[0]][-back])
        if pairs:
            return [_of_pair(left, right, places) for left, right in pairs]
    for place in later:
        _meet(operands[first], operands[place], back)
    return _atoms(dim, None)


def _operands_with(operands: Sequence[Dims], back: int, size: int) -> list[int]:
    """Return which operands have a dimension of this size, counted from the last one."""
    places = []
    for place, dims in enumerate(operands):
        if len(dims) < back:
            continue
        if size_of(dims[-back]) == size:
            places.append(place)
    return places


def _atoms(dim: Dim, operand: int | None) -> list[_Atom]:
    """Return the axes of a dimension as those of one operand, or of several."""
    return [_Atom(axis, operand) for axis in dim]


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
    first, second = left[-back], right[-back]
    axes = wide(resolve(first), resolve(second))
    if set(axes).isdisjoint(resolve(tuple(beside))):
        unify(first, second)


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


def _reshape(op: Op, inputs: Inputs) -> Results:
    if op.output.shape == op.inputs[0].shape:
        return [inputs[0]]
    return [reshape(inputs[0], op.output.shape)]


def _permute(op: Op, inputs: Inputs) -> Results:
    dims = inputs[0]
    order = list(range(len(dims)))
    if op.base_name == "permute":
        order = op.args[1]
    elif len(order) > 1:
        first, second = 0, 1
        if len(op.args) > 2:
            first, second = op.args[1:3]
        order[first], order[second] = order[second], order[first]
    return [tuple([dims[place] for place in order])]


def _repeat(op: Op, inputs: Inputs) -> Results:
    """Expand or repeat a dimension: the axis of copies comes before it."""
    shape = op.output.shape
    dims = inputs[0]
    missing = len(shape) - len(dims)
    return [tuple(map(_repeated, ((),) * missing + dims, shape))]


def _repeated(dim: Dim, size: int) -> Dim:
    """Return a dimension repeated to a size: `(copies features)`."""
    times = size // max(size_of(dim), 1)
    if times == 1 and dim:
        return dim
    return (Axis(times, repeats=True), *wide(dim))


def _reduce(op: Op, inputs: Inputs) -> Results:
    """Remove dimensions, or make them 1: sum, mean, select or squeeze."""
    source = inputs[0]
    shape = op.inputs[0].shape
    places = set(reduced_places(op))
    keeps_places = len(op.output.shape) == len(source)
    only_single = op.does("reshapes")
    dims: list[Dim] = []
    for place, dim in enumerate(source):
        is_reduced = place in places and (shape[place] == 1 or not only_single)
        if not is_reduced:
            dims.append(dim)
        elif keeps_places:
            dims.append(fresh(1))
    return [tuple(dims)] * len(op.outputs)


def _unsqueeze(op: Op, inputs: Inputs) -> Results:
    dims = inputs[0]
    place = op.args[1] % (len(dims) + 1)
    return [_inserted(dims, place, fresh(1))]


# -- pieces -----------------------------------------------------------------------------------------------------------


def _inserted(dims: Dims, place: int, dim: Dim) -> Dims:
    """Return dimensions with another one before that at a place."""
    return (*dims[:place], dim, *dims[place:])


def _replaced(dims: Dims, place: int, *by: Dim) -> Dims:
    """Return dimensions with others in the place of one."""
    return (*dims[:place], *by, *dims[place + 1 :])


def split_pieces(op: Op, inputs: Inputs, *, is_even: bool = True) -> Results:
    """Return the dimensions of each piece of a split; with `is_even` False the pieces are not alike."""
    dims = inputs[0]
    place = _place(op, 2, len(dims))
    sizes = [output.shape[place] for output in op.outputs]
    is_even = is_even and len(set(sizes)) == 1
    pieces = []
    start = 0
    for size in sizes:
        pieces.append(_cut(op, dims, _Slice(place, start, size), is_even=is_even))
        start += size
    return pieces


class _Slice(NamedTuple):
    """Consecutive indices of a dimension."""

    place: int
    start: int
    size: int


def slice_piece(op: Op, inputs: Inputs, *, is_even: bool = True) -> Results:
    """Return the dimensions of a slice; an equal piece of the features, or every n-th feature, is as after a split.

    With `is_even` False other slices of the same tensor are not like this one, so no slice is an equal piece.
    """
    dims = inputs[0]
    place = _place(op, 1, len(dims))
    whole = op.inputs[0].shape[place]
    size = op.output.shape[place]
    is_last = place == len(dims) - 1
    is_even = is_even and is_last and size > 1
    step = setting(op, 4, "step", 1)
    if step == 1:
        start = setting(op, 2, "start", 0) or 0
        if start < 0:
            start += whole
        return [_cut(op, dims, _Slice(place, start, size), is_even=is_even)]
    if is_even and whole == size * step:
        rows = op.inputs[0].shape[:place]
        parts = reshape(dims, (*rows, size, step))
        return [_without_counter(parts, place, place + 1)]
    return [_replaced(dims, place, fresh(size))]


def _cut(op: Op, dims: Dims, cut: _Slice, *, is_even: bool) -> Dims:
    """Cut a slice out of a dimension; an equal piece is an axis of its own, after the axis that counts the pieces."""
    place, start, size = cut
    shape = op.inputs[0].shape
    whole = shape[place]
    if is_even and size and whole % size == start % size == 0:
        new_shape = list(shape)
        new_shape[place : place + 1] = [whole // size, size]
        parts = reshape(dims, new_shape)
        return _without_counter(parts, place + 1, place)
    return _replaced(dims, place, piece(dims[place], start, size))


def _without_counter(dims: Dims, piece_place: int, counter_place: int) -> Dims:
    """Remove the dimension that counts equal pieces, and remember it in the piece."""
    atoms = resolve(dims[piece_place])
    if atoms:
        counters = atoms[0].counters
        counters.setdefault(size_of(atoms), dims[counter_place])
    return _replaced(dims, counter_place)


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


def _join(op: Op, inputs: Inputs) -> Results:
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


def _stacked(op: Op, operands: Inputs, place: int) -> Dims:
    """Return the dimensions of a stack along a new dimension."""
    dims = _broadcast(operands, op.inputs[0].shape)
    is_last = place == len(dims) or _are_alike(operands)
    features = dims[-1] if dims and is_last else ()
    count = op.output.shape[place]
    return _inserted(dims, place, _counter_of(features, count))


def _concatenated(op: Op, operands: Sequence[Dims], place: int) -> Dims:
    """Return the dimensions of a concatenation."""
    shape = list(op.output.shape)
    del shape[place]
    beside = _broadcast([_replaced(dims, place) for dims in operands], shape)
    parts = [dims[place] for dims in operands]
    is_repeated = len(ids_of(op.inputs)) == 1
    if is_repeated:
        joined = (*fresh(len(parts)), *parts[0])
    elif place == len(shape) and len(set(map(size_of, parts))) == 1:
        joined = _joined_pieces(parts)
    else:
        joined = _joined_heads(parts, _counter(beside[-1]), operands)
    return _inserted(beside, place, joined)


def _joined_heads(parts: Sequence[Dim], counter: Dim, operands: Sequence[Dims]) -> Dim:
    """Return the dimension that these are joined to; equal pieces of the features come after the axis of heads."""
    if size_of(counter) == len(parts) and _are_alike(operands):
        return (*counter, *parts[0])
    return join(parts)


def _joined_pieces(parts: Sequence[Dim]) -> Dim:
    """Return the features that these equal pieces are joined to: `(pieces features)`."""
    first, *later = parts
    for part in later:
        unify(first, part)
    return (*_counter_of(first, len(parts)), *first)


def _pad(op: Op, inputs: Inputs) -> Results:
    """Join a padded dimension with its padding."""
    dims = list(inputs[0])
    pads = setting(op, 1, "pad")
    sides = zip(pads[::2], pads[1::2], strict=True)
    for back, (before, after) in enumerate(sides, 1):
        dims[-back] = _padded(dims[-back], before, after)
    return [tuple(dims)]


def _padded(dim: Dim, before: int, after: int) -> Dim:
    """Return a dimension joined with so much padding; the dimension itself if elements are cut off."""
    if min(before, after) < 0:
        return dim
    parts = [dim] if size_of(dim) else []
    if before:
        parts.insert(0, fresh(before))
    if after:
        parts.append(fresh(after))
    return join(parts) if len(parts) > 1 else dim


# -- products ---------------------------------------------------------------------------------------------------------


def _product(op: Op, inputs: Inputs) -> Results:
    """Multiply `batch n k, batch k m -> batch n m`, with an added term; the second factor of cdist is `batch m k`."""
    *added, left, right = inputs
    if op.does("distances"):
        *batch, last, inner = right
        right = (*batch, inner, last)
    if len(right) == 1:  # mv, dot
        unify(left[-1], right[-1])
        return [left[:-1]]
    unify(left[-1], right[-2])
    batches = zip(left[:-2], right[:-2], strict=False)
    for first, second in batches:
        unify(first, second)
    beside: set[Axis] = set()
    for dim in left[:-1]:
        beside.update(resolve(dim))
    columns = right[-1]
    axes = set(resolve(columns))
    if not beside.isdisjoint(axes):
        columns = twin(columns, axes)
    dims = (*left[:-1], columns)
    if added:
        _unify_added(op, added[0], dims)
    return [dims]


def _unify_added(op: Op, added: Dims, dims: Dims) -> None:
    """Make the dimensions of a term that is added to a product those of the product, where it is not broadcast."""
    shape, result = op.inputs[0].shape, op.output.shape
    for back, dim in enumerate(reversed(added), 1):
        if shape[-back] == result[-back]:
            unify(dims[-back], dim)


def _scores_of_kernel(op: Op, inputs: Inputs) -> Results:
    """Multiply `batch heads query head_dim, batch kv_heads key head_dim -> batch heads query key`."""
    query, (*lead, keys, features) = inputs
    return _product_by_head(op, (query, (*lead, features, keys)))


def _product_by_head(op: Op, inputs: Inputs) -> Results:
    """Multiply matrices, `batch heads n k, batch kv_heads k m -> batch heads n m`: several heads may share one."""
    left, right = inputs
    if len(right) > 2:
        *batch, heads, rows, columns = right
        group = size_of(left[-3]) // max(size_of(heads), 1)
        if group > 1:
            heads = (*heads, Axis(group, repeats=True))
        right = (*batch, heads, rows, columns)
    return _product(op, (left, right))


def _mask_of_kernel(op: Op, inputs: Inputs) -> Results:
    """Add a bias to the scores; further tensors are where packed sequences start."""
    return [_broadcast(inputs[: len(op.args)], op.output.shape)]


def _convolution(op: Op, inputs: Inputs) -> Results:
    """Convolve `batch in *space, out in/groups *kernel -> batch out *space`: an unchanged size is the same axis.

    The weight of a transposed convolution is `in out/groups *kernel`.
    """
    source, weight = inputs[:2]
    before = op.inputs[0].shape
    after = op.output.shape
    groups = setting(op, 8, "groups", 1)
    if groups == after[1] == before[1]:
        channels = source[1]
    else:
        is_transposed = setting(op, 6, "transposed", False)
        channels = _resized(weight[1 if is_transposed else 0], after[1])
    space = []
    for place in range(2, len(source)):
        is_same = before[place] == after[place]
        space.append(source[place] if is_same else fresh(after[place]))
    return [(source[0], channels, *space)]


# -- indices ----------------------------------------------------------------------------------------------------------


def _indexed_places(op: Op) -> list[int]:
    """Return the dimensions that an operation indexes: `table[:, indices]` the second one."""
    return [place for place, index in enumerate(op.args[1]) if index is not None]


def _index(op: Op, inputs: Inputs) -> Results:
    """Read `table[..., indices, ...]` with one tensor of indices, whose axes replace the indexed dimension."""
    table, indices = inputs[0], inputs[-1]
    place = 0
    if op.base_name == "index_select":
        place = _place(op, 1, len(table))
    elif op.base_name == "index":
        places = _indexed_places(op)
        if len(places) != 1 or op.inputs[-1].dtype == "bool":
            return []
        place = places[0]
    return [_replaced(table, place, *indices)]


def written_places(op: Op) -> tuple[int, int] | None:
    """Return the dimension that an indexed write replaces, and the rank of its indices; None if there are several."""
    if not op.base_name.startswith("index_put"):
        return _place(op, 1, len(op.inputs[0].shape)), 1
    places = _indexed_places(op)
    if len(places) != 1:
        return None
    place = places[0]
    index = op.args[1][place]
    return None if index.dtype == "bool" else (place, len(index.shape))


def _index_write(op: Op, inputs: Inputs) -> Results:
    """Write `table[..., indices, ...] = values`, e.g. into a cache: the other dimensions are the same axes."""
    table, values = inputs[0], inputs[-1]
    written = written_places(op)
    if written is None or len(inputs) < 3:
        return [table]
    place, rank = written
    expected: list[Dim | None] = list(table)
    expected[place : place + 1] = [None] * rank
    dims = zip(reversed(expected), reversed(values), strict=False)
    for dim, value in dims:
        if dim is not None and size_of(dim) == size_of(value):
            unify(dim, value)
    return [table]


def _gather(op: Op, inputs: Inputs) -> Results:
    """Keep the axes of the source, except in the gathered dimension, which has the axis of the indices.

    Fewer dimensions come from a scalar, which torch gathers from too.
    """
    source, indices = inputs[0], inputs[-1]
    gathered = _place(op, 1, len(source))
    dims = []
    for place, (dim, index) in enumerate(zip(source, indices, strict=False)):
        is_kept = place != gathered and _keeps_axis(dim, index)
        dims.append(dim if is_kept else index)
    return [tuple(dims)]


def _keeps_axis(dim: Dim, index: Dim) -> bool:
    """Return whether a dimension beside the gathered one stays: it is as large, and not repeated."""
    if size_of(dim) != size_of(index):
        return False
    return not any(atom.repeats for atom in resolve(dim))


# -- strides ----------------------------------------------------------------------------------------------------------


def _strided(op: Op, inputs: Inputs) -> Results:
    """Follow a view by strides: a split or permutation exactly, otherwise the dimensions with an unchanged stride."""
    source, out = op.inputs[0], op.output
    if _is_dense(source) and _is_dense(out):
        return [_in_memory_order(source, out, inputs[0])]
    unchanged: dict[tuple[int, int], Dim] = {}
    for place, dim in enumerate(inputs[0]):
        if source.shape[place] > 1:
            unchanged[source.shape[place], source.stride[place]] = dim
    places = [*zip(out.shape, out.stride, strict=True)]
    new_steps = []
    for size, step in places:
        if size > 1 and (size, step) not in unchanged:
            new_steps.append(step)
    result = []
    for size, step in places:
        dim = unchanged.get((size, step), ())
        # Windows overlap where another step is shorter than this dimension.
        overlaps = any(step < new_step < size * step for new_step in new_steps)
        result.append(fresh(size) if overlaps or not dim else dim)
    return [tuple(result)]


def _in_memory_order(source: TensorRef, out: TensorRef, dims: Dims) -> Dims:
    """Return the dimensions of a dense view of a dense tensor: it is a reshape of both in the order of memory."""
    before, after = _by_stride(source), _by_stride(out)
    shape = [out.shape[place] for place in after]
    reshaped = reshape([dims[place] for place in before], shape)
    result: list[Dim] = [()] * len(shape)
    for place, dim in zip(after, reshaped, strict=True):
        result[place] = dim
    return tuple(result)


def _is_dense(tensor: TensorRef) -> bool:
    """Return whether a tensor fills the memory from its first element to its last."""
    last = 0
    for size, step in zip(tensor.shape, tensor.stride, strict=True):
        last += (size - 1) * step
    return last + 1 == tensor.numel


def _by_stride(tensor: TensorRef) -> list[int]:
    """Return the dimensions of a tensor in the order of memory, the outermost first."""
    places = range(len(tensor.shape))
    return sorted(places, key=lambda place: (-tensor.stride[place], -tensor.shape[place]))


def _columns(op: Op, inputs: Inputs) -> Results:
    """Unfold (im2col) `*batch channels height width -> *batch (channels kernel) positions`."""
    *batch, channels, _, _ = inputs[0]
    *_, rows, positions = op.output.shape
    count = op.inputs[0].shape[-3]
    kernel = fresh(rows // max(count, 1))
    return [(*batch, (*channels, *kernel), fresh(positions))]


def _complex(op: Op, inputs: Inputs) -> Results:
    """View complex numbers as pairs of features, or pairs as complex numbers: a pair is an equal piece."""
    dims = inputs[0]
    rank = len(dims)
    if op.base_name == "view_as_real":
        pair = _counter_of(dims[-1], 2) if dims else fresh(2)
        return [(*dims, pair)]
    if rank < 2:
        return [dims[:-1]]
    return [_without_counter(dims, rank - 2, rank - 1)]


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
    "scores": _scores_of_kernel,
    "mask": _mask_of_kernel,
    "context": _product_by_head,
    "convolution": _convolution,
    "index": _index,
    "index_write": _index_write,
    "gather": _gather,
    "columns": _columns,
    "complex": _complex,
}
"""The rules by their names in `record.catalog`."""
