"""Define what each operation does to dimensions: one rule for each family of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

from ..record.catalog import axes_rule
from ..record.ops import Op
from .axis import Axis, Dim, Dims, fresh, join, piece, reshape, resolve, setting, size_of, twin, unify, wide

Rule = Callable[[Op, tuple[Dims, ...]], Sequence[Dims]]
"""A function of an operation and its inputs' dimensions that returns the dimensions of each output."""


@cache
def rule_of(name: str, kind: str, pointwise: bool) -> Rule:
    """Return the rule for an operation: the rule in `record.catalog`, or the default of its kind."""
    rule = RULES.get(axes_rule(name.split(".")[1]))
    return rule or (_pointwise if pointwise else _strided if kind == "view" else _same_sizes)


def reduced_places(op: Op) -> tuple[int, ...]:
    """Return the dimensions that a sum, a mean or another reduction runs over."""
    rank = len(op.inputs[0].shape)
    dims = setting(op, 2 if "norm" in op.base_name else 1, "dim", 0 if op.base_name == "unbind" else None)
    places = range(rank) if dims is None else dims if isinstance(dims, tuple) else (dims,)
    return tuple(sorted({int(place) % max(rank, 1) for place in places}))


def _place(op: Op, argument: int, rank: int) -> int:
    """Return the dimension argument of an operation, counted from 0."""
    return int(setting(op, argument, "dim", 0)) % max(rank, 1)


def _same_sizes(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Keep the dimensions whose size is unchanged; two outputs of one shape have the same axes."""
    known: dict[tuple[int, ...], Dims] = {}
    for output in op.outputs:
        if inputs and len(inputs[0]) == len(output.shape):
            sizes = zip(inputs[0], output.shape, strict=True)
            known.setdefault(output.shape, tuple(dim if size_of(dim) == size else fresh(size) for dim, size in sizes))
    return [known.get(output.shape, ()) for output in op.outputs]


def _pointwise(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    if len(inputs) == 1 and op.inputs[0].shape == op.output.shape:
        return inputs
    return [_broadcast(inputs, op.output.shape)]


def _broadcast(operands: Sequence[Dims], shape: Sequence[int]) -> Dims:
    """Return the dimensions of operands broadcast or repeated to one shape; unify the dimensions that they share.

    In `x[:, None] * x[None]` each operand has the axis of x where the other is repeated: these are two axes.
    """
    out: list[list[tuple[Axis, int | None]]] = []  # each atom, and the only operand that has it; None if both do
    for back, size in zip(range(len(shape), 0, -1), shape, strict=True):
        there = [at for at, dims in enumerate(operands) if len(dims) >= back and size_of(dims[-back]) == size]
        pairs = _repeated_pairs(*(operands[at][-back] for at in there)) if len(there) == 2 else ()
        if pairs:
            out.append([])
            for x, y in pairs:
                if x.repeats == y.repeats:
                    unify((x,), (y,))
                alone = None if x.repeats == y.repeats else there[x.repeats]
                out[-1].append((y if x.repeats > y.repeats else x, alone))
            continue
        for at in there[1:]:
            _meet(operands[there[0]], operands[at], back)
        alone = there[0] if len(there) == 1 and size > 1 else None
        out.append([(atom, alone) for atom in (operands[there[0]][-back] if there else fresh(size))])
    first = {leaf for dim in out for atom, alone in dim if alone == 0 for leaf in resolve((atom,))}
    return tuple(
        tuple(leaf for atom, alone in dim for leaf in (twin((atom,), first) if alone == 1 else (atom,))) for dim in out
    )


def _meet(left: Dims, right: Dims, back: int) -> None:
    """Make two dimensions one axis, unless a tensor would have it twice, as where a bias is made of pairs."""
    others = [atom for dims in (left, right) for at, dim in enumerate(dims, back) for atom in dim if at != len(dims)]
    if not {*resolve(tuple(others))} & {*wide(resolve(left[-back]), resolve(right[-back]))}:
        unify(left[-back], right[-back])


def _repeated_pairs(left: Dim, right: Dim) -> Sequence[tuple[Axis, Axis]]:
    """Return the atoms of two dimensions in pairs, if an atom is repeated in one of them only; otherwise empty."""
    left, right = wide(resolve(left)), wide(resolve(right))
    if not any(atom.repeats for atom in (*left, *right)) or [a.size for a in left] != [a.size for a in right]:
        return ()
    pairs = [*zip(left, right, strict=True)]
    return pairs if any(x.repeats != y.repeats for x, y in pairs) else ()


def _reshape(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    return [inputs[0] if op.output.shape == op.inputs[0].shape else reshape(inputs[0], op.output.shape)]


def _permute(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    order = list(range(len(inputs[0])))
    if op.base_name == "permute":
        order = op.args[1]
    elif len(order) > 1:
        a, b = op.args[1:3] if len(op.args) > 2 else (0, 1)
        order[a], order[b] = order[b], order[a]
    return [tuple(inputs[0][place] for place in order)]


def _repeat(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Expand or repeat a dimension: the axis of copies comes before it."""
    shape = op.output.shape
    dims = ((),) * (len(shape) - len(inputs[0])) + inputs[0]
    times = [size // max(size_of(dim), 1) for dim, size in zip(dims, shape, strict=True)]
    return [
        tuple(
            dim if n == 1 and dim else (Axis(n, repeats=True), *wide(dim)) for n, dim in zip(times, dims, strict=True)
        )
    ]


def _reduce(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Remove dimensions, or make them 1: sum, mean, select or squeeze."""
    places, keep = set(reduced_places(op)), len(op.output.shape) == len(inputs[0])
    if op.does("reshapes"):
        places = {place for place in places if op.inputs[0].shape[place] == 1}
    dims = [fresh(1) if at in places else dim for at, dim in enumerate(inputs[0]) if keep or at not in places]
    return [tuple(dims)] * len(op.outputs)


def _unsqueeze(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    place = op.args[1] % (len(inputs[0]) + 1)
    return [(*inputs[0][:place], fresh(1), *inputs[0][place:])]


def split_pieces(op: Op, inputs: tuple[Dims, ...], *, is_even: bool = True) -> Sequence[Dims]:
    """Return the dimensions of each piece of a split; with `is_even` False the pieces are not alike."""
    dims, place = inputs[0], _place(op, 2, len(inputs[0]))
    sizes = [output.shape[place] for output in op.outputs]
    starts, is_even = accumulate(sizes, initial=0), is_even and len(set(sizes)) == 1
    return [_cut(op, dims, place, start, size, is_even=is_even) for start, size in zip(starts, sizes, strict=False)]


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
        return [_cut(op, dims, place, start + (whole if start < 0 else 0), size, is_even=is_even)]
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
    return atoms[0].counters.get(size_of(atoms), ()) if atoms else ()


def _counter_of(dim: Dim, count: int) -> Dim:
    """Return the axis that counts equal pieces like this one, if it counts as many; otherwise a new axis."""
    known = _counter(dim)
    return known if known and size_of(known) == count else fresh(count)


def _are_alike(operands: Sequence[Dims]) -> bool:
    return len({tuple(map(resolve, dims)) for dims in operands}) == 1


def _join(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Concatenate or stack: equal pieces of the features come after the axis that counts them."""
    rank = len(op.output.shape)
    place = _place(op, 1, rank)
    if op.base_name == "stack":
        first = _broadcast(inputs, op.inputs[0].shape)
        last = first[-1] if first and (place == len(first) or _are_alike(inputs)) else ()
        return [(*first[:place], _counter_of(last, op.output.shape[place]), *first[place:])]
    operands = [dims for dims, tensor in zip(inputs, op.inputs, strict=True) if len(dims) == rank and tensor.numel]
    parts = [dims[place] for dims in operands]
    if len(parts) < 2:
        return operands
    shape = (*op.output.shape[:place], *op.output.shape[place + 1 :])
    first = _broadcast([(*dims[:place], *dims[place + 1 :]) for dims in operands], shape)
    if len({tensor.id for tensor in op.inputs}) == 1:
        joined = (*fresh(len(parts)), *parts[0])
    elif place == rank - 1 and len(set(map(size_of, parts))) == 1:
        for part in parts[1:]:
            unify(parts[0], part)
        joined = (*_counter_of(parts[0], len(parts)), *parts[0])
    elif size_of(_counter(first[-1])) == len(parts) and _are_alike(operands):
        joined = (*_counter(first[-1]), *parts[0])  # equal pieces of the features in another dimension: heads first
    else:
        joined = join(parts)
    return [(*first[:place], joined, *first[place:])]


def _pad(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Join a padded dimension with its padding."""
    dims = list(inputs[0])
    pads = setting(op, 1, "pad")
    for back, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True), 1):
        parts = [dim for dim in (fresh(max(before, 0)), dims[-back], fresh(max(after, 0))) if size_of(dim)]
        dims[-back] = join(parts) if len(parts) > 1 and min(before, after) >= 0 else dims[-back]
    return [tuple(dims)]


def _product(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Multiply `batch n k, batch k m -> batch n m`, with an added term; the second factor of cdist is `batch m k`."""
    *added, a, b = inputs
    if op.does("distances"):
        b = (*b[:-2], b[-1], b[-2])
    unify(a[-1], b[-2])
    for left, right in zip(a[:-2], b[:-2], strict=False):
        unify(left, right)
    left_atoms, columns = {atom for dim in a[:-1] for atom in resolve(dim)}, set(resolve(b[-1]))
    dims = (*a[:-1], twin(b[-1], columns) if left_atoms & columns else b[-1])
    for back, dim in enumerate(reversed(added[0]), 1) if added else ():
        if op.inputs[0].shape[-back] == op.output.shape[-back]:
            unify(dims[-back], dim)
    return [dims]


def _convolution(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Convolve `batch in *space, out in/groups *kernel -> batch out *space`: an unchanged size is the same axis.

    The weight of a transposed convolution is `in out/groups *kernel`.
    """
    (source, weight), (before, after) = inputs[:2], (op.inputs[0].shape, op.output.shape)
    groups, place = setting(op, 8, "groups", 1), 1 if setting(op, 6, "transposed", False) else 0
    made = weight[place] if size_of(weight[place]) == after[1] else fresh(after[1])
    channels = source[1] if groups == after[1] == before[1] else made
    space = zip(source[2:], before[2:], after[2:], strict=True)
    return [(source[0], channels, *(dim if was == now else fresh(now) for dim, was, now in space))]


def _index(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Read `table[..., indices, ...]` with one tensor of indices, whose axes replace the indexed dimension."""
    table, place = inputs[0], _place(op, 1, len(inputs[0])) if op.base_name == "index_select" else 0
    if op.base_name == "index":
        given = [place for place, index in enumerate(op.args[1]) if index is not None]
        if len(given) != 1 or op.inputs[-1].dtype == "bool":
            return []
        place = given[0]
    return [(*table[:place], *inputs[-1], *table[place + 1 :])]


def written_places(op: Op) -> tuple[int, int] | None:
    """Return the dimension that an indexed write replaces, and the rank of its indices; None if there are several."""
    if op.base_name.startswith("index_put"):
        given = [(place, index) for place, index in enumerate(op.args[1]) if index is not None]
        single = len(given) == 1 and given[0][1].dtype != "bool"
        return (given[0][0], len(given[0][1].shape)) if single else None
    return _place(op, 1, len(op.inputs[0].shape)), 1


def _index_write(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Write `table[..., indices, ...] = values`, e.g. into a cache: the other dimensions are the same axes."""
    written, table, values = written_places(op), inputs[0], inputs[-1]
    if written is not None and len(inputs) > 2:
        place, rank = written
        others = [*table[:place], *[None] * rank, *table[place + 1 :]]
        for known, value in zip(reversed(others), reversed(values), strict=False):
            if known is not None and size_of(known) == size_of(value):
                unify(known, value)
    return [table]


def _gather(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Keep the axes of the source, except in the gathered dimension, which has the axis of the indices.

    Fewer dimensions come from a scalar, which torch gathers from too.
    """
    source, indices = inputs[0], inputs[-1]
    place = _place(op, 1, len(source))
    dims = [
        b if at == place or size_of(a) != size_of(b) or any(atom.repeats for atom in resolve(a)) else a
        for at, (a, b) in enumerate(zip(source, indices, strict=False))
    ]
    return [tuple(dims)]


def _strided(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Follow a view by strides: a split or permutation exactly, otherwise the dimensions with an unchanged stride."""
    source, out = op.inputs[0], op.output
    if all(
        1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride, strict=True)) == t.numel for t in (source, out)
    ):
        before, after = (
            sorted(range(len(t.shape)), key=lambda place: (-t.stride[place], -t.shape[place])) for t in (source, out)
        )
        dims = reshape([inputs[0][place] for place in before], [out.shape[place] for place in after])
        return [tuple(dims[after.index(place)] for place in range(len(after)))]
    known = {(n, step): dim for n, step, dim in zip(source.shape, source.stride, inputs[0], strict=True) if n > 1}
    places = [*zip(out.shape, out.stride, strict=True)]
    others = [step for n, step in places if n > 1 and (n, step) not in known]
    apart = [not any(step < other < n * step for other in others) for n, step in places]  # no overlapping windows
    return [tuple((is_apart and known.get(at)) or fresh(at[0]) for at, is_apart in zip(places, apart, strict=True))]


def _columns(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Unfold (im2col) `*batch channels height width -> *batch (channels kernel) positions`."""
    *batch, channels, _, _ = inputs[0]
    shape = op.output.shape
    return [(*batch, (*channels, *fresh(shape[-2] // max(op.inputs[0].shape[-3], 1))), fresh(shape[-1]))]


def _complex(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """View complex numbers as pairs of features, or pairs as complex numbers: a pair is an equal piece."""
    dims = inputs[0]
    if op.base_name == "view_as_real":
        return [(*dims, _counter_of(dims[-1], 2) if dims else fresh(2))]
    return [_without_counter(dims, len(dims) - 2, len(dims) - 1) if len(dims) > 1 else dims[:-1]]


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
