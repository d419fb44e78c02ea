"""What each operation does to dimensions: one rule for each way of moving, joining, cutting and multiplying tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate

from ..record.catalog import axes_rule
from ..record.ops import Op
from .axis import Axis, Dim, Dims, fresh, join, outer_product, piece, reshape, resolve, setting, size_of, twin, unify

Rule = Callable[[Op, tuple[Dims, ...]], Sequence[Dims]]
"""An operation and the dimensions of what went in, to the dimensions of what came out."""


def rule_of(op: Op) -> Rule | None:
    """Return the rule for an operation; None where its outputs are of axes of their own."""
    rule = _rule(op.base_name)
    if rule is None and op.pointwise:
        return _pointwise
    if rule is None and op.inputs and op.kind != "view":
        return _same
    return rule


def reduced_places(op: Op) -> tuple[int, ...]:
    """Return the dimensions that a sum, a mean or another reduction runs over."""
    rank = len(op.inputs[0].shape)
    asked = setting(op, 2 if "norm" in op.base_name else 1, "dim")
    places = range(rank) if asked is None else asked if isinstance(asked, tuple) else (asked,)
    return tuple(sorted({int(place) % max(rank, 1) for place in places}))


def uneven_slices(ops: Iterable[Op]) -> set[int]:
    """Return the indices of slices of tensors out of which pieces of unlike sizes are cut: they are no equal pieces."""
    cut: dict[tuple[int, int], dict[int, list[int]]] = {}
    for op in ops:
        if op.base_name == "slice" and op.outputs and setting(op, 4, "step", 1) == 1:
            place = setting(op, 1, "dim", 0) % len(op.output.shape)
            size = op.output.shape[place]
            if size != op.inputs[0].shape[place]:
                cut.setdefault((op.inputs[0].id, place), {}).setdefault(size, []).append(op.index)
    return {index for sizes in cut.values() if len(sizes) > 1 for indices in sizes.values() for index in indices}


def _same(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Outputs that have the shape of the first input have its axes."""
    shape = op.inputs[0].shape
    return [inputs[0] if output.shape == shape else tuple(map(fresh, output.shape)) for output in op.outputs]


def _pointwise(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Element by element, with broadcasting from the right."""
    shape = op.output.shape
    if len(inputs) == 1 and op.inputs[0].shape == shape:
        return inputs
    outer = outer_product(inputs)
    if outer:
        return [outer]
    dims: list[Dim] = []
    apart: list[int | None] = []
    for back in range(len(shape), 0, -1):
        size = shape[-back]
        whole = [at for at, dim in enumerate(inputs) if len(dim) >= back and size_of(dim[-back]) == size]
        for at in whole[1:]:
            unify(inputs[whole[0]][-back], inputs[at][-back])
        dims.append(inputs[whole[0]][-back] if whole else fresh(size))
        apart.append(whole[0] if len(whole) == 1 and size > 1 else None)
    if len(inputs) == 2:
        # One axis that both bring to a dimension of its own, as in `x[:, None] * x[None]`, is two axes there.
        left = {atom for dim, at in zip(dims, apart, strict=True) if at == 0 for atom in resolve(dim)}
        dims = [twin(dim, left) if at == 1 else dim for dim, at in zip(dims, apart, strict=True)]
    return [tuple(dims)]


def _reshape(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    return [inputs[0] if op.output.shape == op.inputs[0].shape else reshape(inputs[0], op.output.shape)]


def _transpose(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    dims = list(inputs[0])
    a, b = (op.args[1], op.args[2]) if op.base_name.startswith("transpose") else (0, len(dims) - 1)
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return [tuple(dims)]


def _permute(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    return [tuple(inputs[0][place] for place in op.args[1])]


def _unsqueeze(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    place = op.args[1] % (len(inputs[0]) + 1)
    return [(*inputs[0][:place], fresh(1), *inputs[0][place:])]


def _squeeze(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    places = reduced_places(op)
    return [tuple(dim for at, dim in enumerate(inputs[0]) if at not in places or op.inputs[0].shape[at] != 1)]


def _expand(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    shape = op.output.shape
    dims = [()] * (len(shape) - len(inputs[0])) + list(inputs[0])
    return [
        tuple(
            dim if dim and size_of(dim) == size else (Axis(size, repeats=True),)
            for dim, size in zip(dims, shape, strict=True)
        )
    ]


def _repeat(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    times = op.args[1]
    dims = [fresh(1)] * (len(times) - len(inputs[0])) + list(inputs[0])
    return [tuple(dim if n == 1 else (Axis(n, repeats=True), *dim) for n, dim in zip(times, dims, strict=True))]


def _select(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    place = setting(op, 1, "dim", 0) % len(inputs[0])
    return [(*inputs[0][:place], *inputs[0][place + 1 :])] * len(op.outputs)


def _split(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Equal pieces of a dimension are an axis of their own, after the axis that counts the pieces."""
    dims = inputs[0]
    place = setting(op, 2, "dim", 0) % len(dims)
    sizes = [output.shape[place] for output in op.outputs]
    if len(set(sizes)) == 1 and sizes[0]:
        return [_equal_piece(op, dims, place, len(sizes))] * len(sizes)
    starts = accumulate(sizes, initial=0)
    pieces = [piece(dims[place], start, size) for start, size in zip(starts, sizes, strict=False)]
    return [(*dims[:place], part, *dims[place + 1 :]) for part in pieces]


def slice_piece(op: Op, inputs: tuple[Dims, ...], *, is_even: bool = True) -> Sequence[Dims]:
    """Return the dimensions of a slice: one of equal pieces of the features, or every n-th of them, is as if split.

    Not so where pieces of other sizes are cut out of the same tensor: then it is not `is_even`.
    """
    dims, shape = inputs[0], op.inputs[0].shape
    place = setting(op, 1, "dim", 0) % len(dims)
    whole, size = shape[place], op.output.shape[place]
    if size == whole:
        return [dims]
    start, step = setting(op, 2, "start", 0) or 0, setting(op, 4, "step", 1)
    start += whole if start < 0 else 0
    if is_even and place == len(dims) - 1 and size > 1 and whole % size == 0:
        if step == 1 and start % size == 0:
            return [_equal_piece(op, dims, place, whole // size)]
        if step > 1 and whole // size == step:
            return [_without_counter(reshape(dims, (*shape[:place], size, step)), place, place + 1)]
    part = piece(dims[place], start, size) if step == 1 else fresh(size)
    return [(*dims[:place], part, *dims[place + 1 :])]


def _equal_piece(op: Op, dims: Dims, place: int, count: int) -> Dims:
    shape = op.inputs[0].shape
    parts = reshape(dims, (*shape[:place], count, shape[place] // count, *shape[place + 1 :]))
    return _without_counter(parts, place + 1, place)


def _without_counter(dims: Dims, piece_place: int, counter_place: int) -> Dims:
    """Take away the dimension that counts pieces, which the piece remembers."""
    atoms = resolve(dims[piece_place])
    if atoms:
        atoms[0].counters.setdefault(size_of(atoms), dims[counter_place])
    return (*dims[:counter_place], *dims[counter_place + 1 :])


def _counter(dim: Dim) -> Dim:
    """Return the axis that counts equal pieces like this one; empty where it is no such piece."""
    atoms = resolve(dim)
    return atoms[0].counters.get(size_of(atoms), ()) if atoms else ()


def _counter_of(dim: Dim, count: int) -> Dim:
    """Return the axis that counts equal pieces like this one, where as many are put together again, or a new one."""
    known = _counter(dim)
    return known if known and size_of(known) == count else fresh(count)


def _narrow(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Where something is picked, or pooled, a dimension whose size is unchanged is the same axis."""
    known: dict[tuple[int, ...], Dims] = {}  # what is picked, and where it was, have the same axes
    for output in op.outputs:
        sizes = zip(inputs[0], output.shape, strict=True)
        known.setdefault(output.shape, tuple(dim if size_of(dim) == size else fresh(size) for dim, size in sizes))
    return [known[output.shape] for output in op.outputs]


def _pad(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """What is padded is joined with what it is padded with."""
    dims = list(inputs[0])
    pads = setting(op, 1, "pad")
    for back, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        place = len(dims) - 1 - back
        parts = [dim for dim in (fresh(max(before, 0)), dims[place], fresh(max(after, 0))) if size_of(dim)]
        dims[place] = join(parts) if len(parts) > 1 and min(before, after) >= 0 else dims[place]
    return [tuple(dims)]


def _cat(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    rank = len(op.output.shape)
    operands = [dims for dims, tensor in zip(inputs, op.inputs, strict=True) if len(dims) == rank and tensor.numel]
    if not operands:
        return []
    place = setting(op, 1, "dim", 0) % rank
    first, parts = operands[0], [dims[place] for dims in operands]
    outer = outer_product([(*dims[:place], *dims[place + 1 :]) for dims in operands])
    if outer:
        first = (*outer[:place], first[place], *outer[place:])
    for dims in operands[1:] if not outer else ():
        for at in range(rank):
            if at != place:
                unify(first[at], dims[at])
    if len(parts) == 1:
        return [first]
    if len({tensor.id for tensor in op.inputs}) == 1:
        joined = (*fresh(len(parts)), *parts[0])
    elif place == rank - 1 and len(set(map(size_of, parts))) == 1:
        for part in parts[1:]:
            unify(parts[0], part)
        joined = (*_counter_of(parts[0], len(parts)), *parts[0])
    elif place < rank - 1 and size_of(_counter(first[-1])) == len(parts) and _are_same(operands):
        # Equal pieces of the features one after the other along another dimension: heads before the batch.
        joined = (*_counter(first[-1]), *parts[0])
    else:
        joined = join(parts)
    return [(*first[:place], joined, *first[place + 1 :])]


def _are_same(operands: Sequence[Dims]) -> bool:
    return len({tuple(map(resolve, dims)) for dims in operands}) == 1


def _stack(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    place = setting(op, 1, "dim", 0) % len(op.output.shape)
    first = inputs[0]
    for dims in inputs[1:]:
        for a, b in zip(first, dims, strict=True):
            unify(a, b)
    last = first[-1] if first and place == len(first) else ()
    return [(*first[:place], _counter_of(last, op.output.shape[place]), *first[place:])]


def _reduce(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    places, keep = reduced_places(op), len(op.output.shape) == len(inputs[0])
    dims = [fresh(1) if at in places else dim for at, dim in enumerate(inputs[0]) if keep or at not in places]
    return [tuple(dims)] * len(op.outputs)


def _product(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """bmm, mm and their adding forms: `batch n k, batch k m -> batch n m`."""
    dims = _of_product(*inputs[-2:])
    if len(inputs) == 3:
        for back, (added, dim) in enumerate(zip(reversed(inputs[0]), reversed(dims), strict=False)):
            if op.inputs[0].shape[-1 - back] == op.output.shape[-1 - back]:
                unify(dim, added)
    return [dims]


def _of_product(a: Dims, b: Dims) -> Dims:
    unify(a[-1], b[-2])
    for left, right in zip(a[:-2], b[:-2], strict=False):
        unify(left, right)
    kept, columns = {atom for dim in a[:-1] for atom in resolve(dim)}, set(resolve(b[-1]))
    return (*a[:-1], twin(b[-1], columns) if kept & columns else b[-1])


def _distance(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """cdist: `batch n k, batch m k -> batch n m`."""
    a, b = inputs[:2]
    return [_of_product(a, (*b[:-2], b[-1], b[-2]))]


def _vector_product(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """mv, dot: `n k, k -> n`, `k, k ->`."""
    a, b = inputs[-2:]
    unify(a[-1], b[-1])
    return [a[:-1]]


def _fused_attention(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    query, key, value = inputs[:3]
    unify(query[-1], key[-1])
    unify(key[-2], value[-2])
    return [(*query[:-1], value[-1])]


def _embedding(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    return [(*inputs[1], *inputs[0][1:])]


def _index(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """`table[..., indices, ...]` with one tensor of indices."""
    indices = op.args[1]
    given = [place for place, index in enumerate(indices) if index is not None]
    if len(given) != 1 or indices[given[0]].dtype == "bool":
        return _narrow(op, inputs) if len(op.output.shape) == len(inputs[0]) else []
    return [(*inputs[0][: given[0]], *inputs[1], *inputs[0][given[0] + 1 :])]


def _index_select(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    place = setting(op, 1, "dim", 0) % max(len(inputs[0]), 1)
    return [(*inputs[0][:place], inputs[-1][0] if inputs[-1] else fresh(1), *inputs[0][place + 1 :])]


def _gather(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """The axes of the source, and of the indices where the source is read by them."""
    source, indices = inputs[0], inputs[-1]
    place = setting(op, 1, "dim", 0) % max(len(source), 1)
    dims = [
        b if at == place or size_of(a) != size_of(b) or any(atom.repeats for atom in resolve(a)) else a
        for at, (a, b) in enumerate(zip(source, indices, strict=True))
    ]
    return [tuple(dims)]


def _convolution(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """`batch in *space, out in/groups *kernel -> batch out *space`: a size that is unchanged is the same axis."""
    source, weight = inputs[:2]
    groups, (before, after) = setting(op, 8, "groups", 1), (op.inputs[0].shape, op.output.shape)
    channels = source[1] if groups == after[1] == before[1] else weight[0]
    space = zip(source[2:], before[2:], after[2:], strict=True)
    return [(source[0], channels, *(dim if was == now else fresh(now) for dim, was, now in space))]


def _strided(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """A view by strides: one that only splits and moves dimensions is that.

    Of another a dimension of the same size and stride is the same axis, where no other one runs over it.
    """
    source, out = op.inputs[0], op.output
    order = sorted(range(len(out.shape)), key=lambda place: (-out.stride[place], -out.shape[place]))
    shape, stride = ([numbers[place] for place in order] for numbers in (out.shape, out.stride))
    if out.numel == source.numel and _is_dense(source.shape, source.stride) and _is_dense(shape, stride):
        dims = reshape(inputs[0], shape)
        return [tuple(dims[order.index(place)] for place in range(len(order)))]
    strides = zip(source.shape, source.stride, inputs[0], strict=True)
    known = {(size, step): dim for size, step, dim in strides if size > 1}
    places = list(zip(out.shape, out.stride, strict=True))
    # Windows that overlap: the next one begins before this one ends.
    others = [step for size, step in places if size > 1 and (size, step) not in known]
    return [
        tuple(
            fresh(size) if any(step < other < size * step for other in others) else known.get((size, step), fresh(size))
            for size, step in places
        )
    ]


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements lie in memory in row-major order, without a gap."""
    steps = list(accumulate(reversed(shape), lambda step, size: step * size, initial=1))
    return all(size == 1 or step == own for size, step, own in zip(shape, reversed(steps[:-1]), stride, strict=True))


def _unfold(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """Windows of a dimension: how many there are in its place, and their elements last."""
    place = op.args[1] % max(len(inputs[0]), 1)
    shape = op.output.shape
    return [(*inputs[0][:place], fresh(shape[place]), *inputs[0][place + 1 :], fresh(shape[-1]))]


def _columns(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    """im2col: `*batch channels height width -> *batch (channels kernel) positions`."""
    *batch, channels, _, _ = inputs[0]
    shape = op.output.shape
    return [(*batch, (*channels, *fresh(shape[-2] // max(op.inputs[0].shape[-3], 1))), fresh(shape[-1]))]


def _complex(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    dims = inputs[0]
    return [_without_counter(dims, len(dims) - 2, len(dims) - 1) if len(dims) > 1 else dims[:-1]]


def _real(op: Op, inputs: tuple[Dims, ...]) -> Sequence[Dims]:
    return [(*inputs[0], _counter_of(inputs[0][-1], 2) if inputs[0] else fresh(2))]


RULES: dict[str, Rule] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "repeat": _repeat,
    "select": _select,
    "slice": slice_piece,
    "narrow": _narrow,
    "split": _split,
    "pad": _pad,
    "cat": _cat,
    "stack": _stack,
    "reduce": _reduce,
    "product": _product,
    "vector_product": _vector_product,
    "distance": _distance,
    "attention": _fused_attention,
    "embedding": _embedding,
    "index": _index,
    "index_select": _index_select,
    "gather": _gather,
    "convolution": _convolution,
    "strided": _strided,
    "unfold": _unfold,
    "columns": _columns,
    "complex": _complex,
    "real": _real,
    "pointwise": _pointwise,
}
"""The rules by the names that `record.catalog` gives them."""


@cache
def _rule(base_name: str) -> Rule | None:
    return RULES.get(axes_rule(base_name))
