"""What each operation does to dimensions: one rule for each way of moving, joining, cutting and multiplying tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..record.catalog import axes_rule
from ..record.ops import Op
from .axis import (
    Dim,
    Dims,
    counted,
    counter,
    fresh,
    join,
    outer_product,
    repeating,
    reshape,
    resolve,
    setting,
    size_of,
    slice_piece,
    split_pieces,
    twin,
    unify,
)

Rule = Callable[[Op, tuple[Dims, ...]], Iterable[Dims]]
"""An operation and the dimensions of what went in, to the dimensions of what came out."""


def rule_of(op: Op) -> Rule | None:
    """The rule for an operation. Pointwise ones, and those that keep the shape, need none of their own."""
    rule = _RULES.get(axes_rule(op.base_name))
    if rule is None and op.pointwise:
        return _pointwise
    if rule is None and op.inputs and op.kind != "view":
        return _same
    return rule


def _same(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """Outputs that have the shape of the first input have its axes."""
    for output in op.outputs:
        yield inputs[0] if output.shape == op.inputs[0].shape else tuple(fresh(size) for size in output.shape)


def _pointwise(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """Element by element, with broadcasting from the right."""
    outer = outer_product(inputs)
    if outer:
        yield outer
        return
    shape = op.output.shape
    dims: list[Dim | None] = [None] * len(shape)
    for operand in inputs:
        for back, dim in enumerate(reversed(operand)):
            place = len(shape) - 1 - back
            if place < 0 or size_of(dim) != shape[place]:
                continue
            known = dims[place]
            if known is None:
                dims[place] = dim
            else:
                unify(known, dim)
    yield _told_apart([fresh(size) if dim is None else dim for dim, size in zip(dims, shape, strict=True)], inputs)


def _told_apart(dims: list[Dim], inputs: tuple[Dims, ...]) -> Dims:
    """One axis that two operands bring to two dimensions, as in `x[:, None] * x[None]`, is two axes there."""
    if len(inputs) != 2:
        return tuple(dims)
    owners = [_owner(dim, inputs, len(dims) - 1 - place) for place, dim in enumerate(dims)]
    if not {0, 1} <= set(owners):
        return tuple(dims)
    left = {atom for dim, owner in zip(dims, owners, strict=True) if owner == 0 for atom in resolve(dim)}
    return tuple(
        tuple(twin(atom) if atom in left and atom.size > 1 else atom for atom in resolve(dim)) if owner == 1 else dim
        for dim, owner in zip(dims, owners, strict=True)
    )


def _owner(dim: Dim, inputs: tuple[Dims, ...], back: int) -> int | None:
    """The one operand that has a dimension, at so many places from the last; None where both have it."""
    size = size_of(dim)
    owners = [
        which
        for which, operand in enumerate(inputs)
        if back < len(operand) and size > 1 and size_of(operand[len(operand) - 1 - back]) == size
    ]
    return owners[0] if len(owners) == 1 else None


def _reshape(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    yield inputs[0] if op.output.shape == op.inputs[0].shape else reshape(inputs[0], op.output.shape)


def _transpose(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    dims = list(inputs[0])
    a, b = (op.args[1], op.args[2]) if op.base_name.startswith("transpose") else (0, len(dims) - 1)
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    yield tuple(dims)


def _permute(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    yield tuple(inputs[0][place] for place in op.args[1])


def _unsqueeze(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    place = op.args[1] % (len(inputs[0]) + 1)
    yield (*inputs[0][:place], fresh(1), *inputs[0][place:])


def _squeeze(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    dims, shape = inputs[0], op.inputs[0].shape
    asked = setting(op, 1, "dim", tuple(range(len(dims))))
    places = {place % len(dims) for place in (asked if isinstance(asked, tuple) else (asked,))} if dims else set()
    yield tuple(dim for place, dim in enumerate(dims) if place not in places or shape[place] != 1)


def _expand(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    shape, dims = op.output.shape, inputs[0]
    padded = [None] * (len(shape) - len(dims)) + list(dims)
    yield tuple(
        dim if dim is not None and size_of(dim) == size else repeating(size)
        for dim, size in zip(padded, shape, strict=True)
    )


def _repeat(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    times, dims = op.args[1], inputs[0]
    padded = [fresh(1)] * (len(times) - len(dims)) + list(dims)
    yield tuple(dim if n == 1 else (*repeating(n), *dim) for n, dim in zip(times, padded, strict=True))


def _select(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    place = setting(op, 1, "dim", 0) % len(inputs[0])
    dims = (*inputs[0][:place], *inputs[0][place + 1 :])
    yield from (dims for _ in op.outputs)


def _narrow(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """Paddings and the like: a dimension whose size is unchanged is the same axis."""
    known: dict[tuple[int, ...], Dims] = {}  # what is picked, and where it was, have the same axes
    for output in op.outputs:
        told = zip(inputs[0], output.shape, strict=True)
        yield known.setdefault(output.shape, tuple(dim if size_of(dim) == size else fresh(size) for dim, size in told))


def _pad(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """What is padded is joined with what it is padded with."""
    dims = list(inputs[0])
    pads = setting(op, 1, "pad")
    for back, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        place = len(dims) - 1 - back
        parts = [dim for dim in (fresh(max(before, 0)), dims[place], fresh(max(after, 0))) if size_of(dim)]
        dims[place] = join(parts) if len(parts) > 1 and min(before, after) >= 0 else dims[place]
    yield tuple(dims)


def _cat(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    rank = len(op.output.shape)
    operands = [d for d, t in zip(inputs, op.inputs, strict=True) if len(t.shape) == rank and t.numel]
    if not operands:
        return
    place = setting(op, 1, "dim", 0) % rank
    first = operands[0]
    outer = outer_product(tuple((*own[:place], *own[place + 1 :]) for own in operands))
    if outer:
        first = (*outer[:place], first[place], *outer[place:])
    for other in operands[1:] if not outer else ():
        for at, (a, b) in enumerate(zip(first, other, strict=True)):
            if at != place:
                unify(a, b)
    joined = [operand[place] for operand in operands]
    if len(joined) == 1:
        yield first
        return
    if len({tensor.id for tensor in op.inputs}) == 1:
        dim = (*fresh(len(joined)), *joined[0])
    elif place == rank - 1 and len({size_of(part) for part in joined}) == 1:
        for part in joined[1:]:
            unify(joined[0], part)
        dim = (*counter(joined[0], len(joined)), *joined[0])
    elif count := _turned(operands, place):
        # Equal pieces of the features one after the other along another dimension: heads before the batch.
        dim = (*count, *joined[0])
    else:
        dim = join(joined)
    yield (*first[:place], dim, *first[place + 1 :])


def _turned(operands: list[Dims], place: int) -> Dim:
    """The axis that counts the pieces that operands are, cut along their last dimension; empty where they are not."""
    first = operands[0]
    if any(resolve(dim) != resolve(other) for own in operands[1:] for dim, other in zip(first, own, strict=True)):
        return ()
    pieces = resolve(first[-1])
    known = pieces[0].counters.get(size_of(pieces), ()) if pieces and place != len(first) - 1 else ()
    return known if known and size_of(known) == len(operands) else ()


def _stack(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    place = setting(op, 1, "dim", 0) % len(op.output.shape)
    first = inputs[0]
    for other in inputs[1:]:
        for a, b in zip(first, other, strict=True):
            unify(a, b)
    last = first[-1] if first and place == len(first) else ()
    yield (*first[:place], counter(last, op.output.shape[place]), *first[place:])


def _reduce(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    dims = inputs[0]
    asked = setting(op, 2 if "norm" in op.base_name else 1, "dim")
    if asked is None or not dims:
        asked = range(len(dims))
    places = {place % len(dims) for place in (asked if isinstance(asked, (tuple, range)) else (asked,))}
    keep = len(op.output.shape) == len(dims)
    kept = [fresh(1) if place in places else dim for place, dim in enumerate(dims) if keep or place not in places]
    yield from (tuple(kept) for _ in op.outputs)


def _product(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """bmm, mm and their adding forms: `batch n k, batch k m -> batch n m`."""
    a, b = inputs[-2:]
    unify(a[-1], b[-2])
    if len(a) == 3:
        unify(a[0], b[0])
    rows, columns = a[-2], b[-1]
    if {*resolve(rows), *(atom for dim in a[:-2] for atom in resolve(dim))} & set(resolve(columns)):
        columns = tuple(twin(atom) if atom.size > 1 else atom for atom in resolve(columns))
    dims = (*a[:-2], rows, columns)
    if len(inputs) == 3:
        for back, (added, dim) in enumerate(zip(reversed(inputs[0]), reversed(dims), strict=False)):
            if op.inputs[0].shape[-1 - back] == op.output.shape[-1 - back]:
                unify(dim, added)
    yield dims


def _distance(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """cdist: `batch n k, batch m k -> batch n m`."""
    a, b = inputs[:2]
    for one, other in zip(a[:-2], b[:-2], strict=False):
        unify(one, other)
    yield from _product(op, (a, (*b[:-2], b[-1], b[-2])))


def _vector_product(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """mv, dot: `n k, k -> n`, `k, k ->`."""
    a, b = inputs[-2:]
    unify(a[-1], b[-1])
    yield a[:-1]


def _fused_attention(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    query, key, value = inputs[:3]
    unify(query[-1], key[-1])
    unify(key[-2], value[-2])
    yield (*query[:-1], value[-1])


def _embedding(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    yield (*inputs[1], *inputs[0][1:])


def _index(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """`table[..., indices, ...]` with one tensor of indices."""
    indices = op.args[1]
    given = [place for place, index in enumerate(indices) if index is not None]
    if len(given) != 1 or indices[given[0]].dtype == "bool":
        return _narrow(op, inputs) if len(op.output.shape) == len(inputs[0]) else []
    return [(*inputs[0][: given[0]], *inputs[1], *inputs[0][given[0] + 1 :])]


def _gather(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """The axes of the source, and of the indices where the source is read by them."""
    source, indices = inputs[0], inputs[-1]
    place = setting(op, 1, "dim", 0) % max(len(source), 1)
    yield tuple(
        b if at == place or size_of(a) != size_of(b) or any(atom.repeats for atom in resolve(a)) else a
        for at, (a, b) in enumerate(zip(source, indices, strict=True))
    )


def _convolution(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """`batch in *space, out in/groups *kernel -> batch out *space`: a size that is unchanged is the same axis."""
    source, weight = inputs[:2]
    groups = setting(op, 8, "groups", 1)
    channels = source[1] if groups == op.output.shape[1] == op.inputs[0].shape[1] else weight[0]
    space = zip(source[2:], op.inputs[0].shape[2:], op.output.shape[2:], strict=True)
    yield (source[0], channels, *(dim if before == after else fresh(after) for dim, before, after in space))


def _strided(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """A view by strides: one that only splits and moves dimensions is that.

    Of another a dimension of the same size and stride is the same axis, where no other one runs over it.
    """
    source, out = op.inputs[0], op.output
    order = sorted(range(len(out.shape)), key=lambda place: (-out.stride[place], -out.shape[place]))
    moved, steps = ([own[place] for place in order] for own in (out.shape, out.stride))
    if out.numel == source.numel and _is_dense(source.shape, source.stride) and _is_dense(moved, steps):
        split = reshape(inputs[0], moved)
        yield tuple(split[order.index(place)] for place in range(len(order)))
        return
    known = {
        (size, stride): dim
        for size, stride, dim in zip(source.shape, source.stride, inputs[0], strict=True)
        if size > 1
    }
    places = list(zip(out.shape, out.stride, strict=True))
    # Windows that overlap: the next one begins before this one ends.
    others = [stride for size, stride in places if size > 1 and (size, stride) not in known]
    yield tuple(
        fresh(size) if any(stride < step < size * stride for step in others) else known.get((size, stride), fresh(size))
        for size, stride in places
    )


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements lie in memory in row-major order, without a gap."""
    step = 1
    for size, own in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and own != step:
            return False
        step *= size
    return True


def _unfold(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """Windows of a dimension: how many there are in its place, and their elements last."""
    place = op.args[1] % max(len(inputs[0]), 1)
    shape = op.output.shape
    yield (*inputs[0][:place], fresh(shape[place]), *inputs[0][place + 1 :], fresh(shape[-1]))


def _columns(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """im2col: `batch channels height width -> batch (channels kernel) positions`."""
    batch, channels = inputs[0][:2] if len(inputs[0]) == 4 else ((), inputs[0][0])
    shape = op.output.shape
    kernel = fresh(shape[-2] // max(op.inputs[0].shape[-3], 1))
    yield (*((batch,) if len(shape) == 3 else ()), (*channels, *kernel), fresh(shape[-1]))


def _complex(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    yield counted(inputs[0], len(inputs[0]) - 2, len(inputs[0]) - 1) if len(inputs[0]) > 1 else inputs[0][:-1]


def _real(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    yield (*inputs[0], counter(inputs[0][-1], 2) if inputs[0] else fresh(2))


def _index_select(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    place = setting(op, 1, "dim", 0) % max(len(inputs[0]), 1)
    yield (*inputs[0][:place], inputs[-1][0] if inputs[-1] else fresh(1), *inputs[0][place + 1 :])


_RULES: dict[str, Rule] = {
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
    "split": split_pieces,
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
