"""Follow every dimension through a recording: which parts of which tensors are the same axis.

A dimension is a sequence of atoms, indivisible axes in row-major order. A view that splits a dimension splits its atom,
wherever that atom is used; a view that merges dimensions puts their atoms side by side; a product makes the atoms that
it contracts one. What comes out holds for one run at its real sizes, also where sizes coincide. Only dimensions of size
one leave no trace in a view; who can, looks at a run without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from .ops import Op, Recording, Tensor


class Atom:
    """An axis that nothing has split yet."""

    __slots__ = ("parts", "size", "twins")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: tuple[Atom, ...] = ()
        """What it was split into, or the atom that it turned out to be."""
        self.twins: frozenset[Atom] = frozenset()
        """Atoms of the same origin that are a different axis: the query and the key of self-attention."""

    def __repr__(self) -> str:
        return f"Atom({self.size})"


Dim = tuple[Atom, ...]
"""One dimension of a tensor."""


def resolve(dim: Iterable[Atom]) -> Dim:
    """The atoms as they are known now."""
    found: list[Atom] = []
    for atom in dim:
        found.extend(resolve(atom.parts) if atom.parts else (atom,))
    return tuple(found)


def size_of(dim: Iterable[Atom]) -> int:
    """How many elements the dimension has."""
    return prod(atom.size for atom in dim)


def fresh(size: int) -> Dim:
    """A dimension of which nothing is known but its size."""
    return (Atom(size),)


def unify(left: Dim, right: Dim) -> bool:
    """Say that two dimensions are the same axis. False where they cannot be, or are known to be different axes."""
    a, b = list(resolve(left)), list(resolve(right))
    if size_of(a) != size_of(b):
        return False
    a, b = [atom for atom in a if atom.size != 1], [atom for atom in b if atom.size != 1]
    while a and b:
        x, y = a.pop(0), b.pop(0)
        if x is y:
            continue
        if _are_twins(x, y):
            return False
        if x.size == y.size:
            y.parts = (x,)
            x.twins |= y.twins
        elif x.size < y.size and y.size % x.size == 0:
            y.parts = (x, Atom(y.size // x.size))
            b.insert(0, y.parts[1])
        elif y.size < x.size and x.size % y.size == 0:
            x.parts = (y, Atom(x.size // y.size))
            a.insert(0, x.parts[1])
        else:
            return False
    return True


def _are_twins(x: Atom, y: Atom) -> bool:
    return y in resolve(x.twins) or x in resolve(y.twins)


def reshape(dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...]:
    """The dimensions after a view to `shape`, splitting atoms where it splits them.

    An atom of size one goes to the next dimension of size one, or else in front of what follows it.
    """
    left = [atom for dim in dims for atom in resolve(dim)]
    result: list[Dim] = []
    for place, size in enumerate(shape):
        taken: list[Atom] = []
        got = 1
        if size == 1:
            result.append((left.pop(0),) if left and left[0].size == 1 else fresh(1))
            continue
        while left and got < size:
            atom = left.pop(0)
            if size % (got * atom.size) == 0:
                taken.append(atom)
                got *= atom.size
            elif atom.size % (size // got) == 0 and size % got == 0:
                atom.parts = (Atom(size // got), Atom(atom.size * got // size))
                taken.append(atom.parts[0])
                left.insert(0, atom.parts[1])
                got = size
            else:  # the view cuts across an axis
                return (*result, *(fresh(rest) for rest in shape[place:]))
        if all(rest == 1 for rest in shape[place + 1 :]):
            while len(left) > len(shape) - place - 1:
                taken.append(left.pop(0))
        result.append(tuple(taken) if taken else fresh(size))
    return tuple(result)


class Dimensions:
    """The dimensions of every tensor of a recording."""

    def __init__(self, recording: Recording) -> None:
        self._dims: dict[int, tuple[Dim, ...]] = {}
        self._places: dict[tuple[Any, ...], tuple[Dim, ...]] = {}
        for op in recording.ops:
            for tensor in op.inputs:
                self._known(tensor)
            self._follow(op)
        for named in (*recording.inputs, *recording.parameters, *recording.outputs):
            self._known(named.tensor)

    def of(self, tensor: Tensor) -> tuple[Dim, ...]:
        """The dimensions of a tensor, each as the atoms that it is known to consist of."""
        return tuple(resolve(dim) for dim in self._known(tensor))

    def _known(self, tensor: Tensor) -> tuple[Dim, ...]:
        dims = self._dims.get(tensor.id)
        if dims is None:
            # The same place in memory, written since: other content, the same axes.
            dims = self._places.get(_place(tensor)) or tuple(fresh(size) for size in tensor.shape)
            self._set(tensor, dims)
        return dims

    def _set(self, tensor: Tensor, dims: Sequence[Dim]) -> None:
        if tensor.id not in self._dims:
            self._dims[tensor.id] = self._places[_place(tensor)] = tuple(dims)

    def _follow(self, op: Op) -> None:
        rule = _RULES.get(op.base_name)
        if rule is None and op.pointwise:
            rule = _pointwise
        if rule is None and op.inputs and op.kind != "view":
            rule = _same
        inputs = tuple(self._known(tensor) for tensor in op.inputs)
        results = list(rule(op, inputs)) if rule is not None else []
        for place, tensor in enumerate(op.outputs):
            dims = results[place] if place < len(results) else ()
            if tuple(size_of(resolve(dim)) for dim in dims) != tensor.shape:
                dims = tuple(fresh(size) for size in tensor.shape)
            self._set(tensor, dims)


Dims = tuple[Dim, ...]
Rule = Callable[[Op, tuple[Dims, ...]], Iterable[Dims]]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage, tensor.offset, tensor.shape, tensor.stride


def _setting(op: Op, place: int, name: str, default: Any = None) -> Any:
    """A plain argument of an operation, by place or by name."""
    return op.args[place] if place < len(op.args) else op.kwargs.get(name, default)


def _same(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """Outputs that have the shape of the first input have its axes."""
    for output in op.outputs:
        yield inputs[0] if output.shape == op.inputs[0].shape else tuple(fresh(size) for size in output.shape)


def _pointwise(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """Element by element, with broadcasting from the right."""
    shape = op.output.shape
    dims: list[Dim | None] = [None] * len(shape)
    for operand in inputs:
        for back, dim in enumerate(reversed(operand)):
            place = len(shape) - 1 - back
            if place < 0 or size_of(resolve(dim)) != shape[place]:
                continue
            known = dims[place]
            if known is None:
                dims[place] = dim
            else:
                unify(known, dim)
    yield tuple(fresh(size) if dim is None else dim for dim, size in zip(dims, shape, strict=True))


def _reshape(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    yield inputs[0] if op.output.shape == op.inputs[0].shape else reshape(inputs[0], op.output.shape)


def _transpose(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    dims = list(inputs[0])
    a, b = (op.args[1], op.args[2]) if op.base_name == "transpose" else (0, len(dims) - 1)
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
    asked = _setting(op, 1, "dim", tuple(range(len(dims))))
    places = {place % len(dims) for place in (asked if isinstance(asked, tuple) else (asked,))} if dims else set()
    yield tuple(dim for place, dim in enumerate(dims) if place not in places or shape[place] != 1)


def _expand(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    shape, dims = op.output.shape, inputs[0]
    padded = [None] * (len(shape) - len(dims)) + list(dims)
    yield tuple(
        dim if dim is not None and size_of(resolve(dim)) == size else fresh(size)
        for dim, size in zip(padded, shape, strict=True)
    )


def _repeat(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    times, dims = op.args[1], inputs[0]
    padded = [fresh(1)] * (len(times) - len(dims)) + list(dims)
    yield tuple(dim if n == 1 else (*fresh(n), *dim) for n, dim in zip(times, padded, strict=True))


def _select(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    place = _setting(op, 1, "dim", 0) % len(inputs[0])
    dims = (*inputs[0][:place], *inputs[0][place + 1 :])
    yield from (dims for _ in op.outputs)


def _narrow(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """Slices, splits and paddings: a dimension whose size is unchanged is the same axis."""
    for output in op.outputs:
        yield tuple(
            dim if size_of(resolve(dim)) == size else fresh(size)
            for dim, size in zip(inputs[0], output.shape, strict=True)
        )


def _split(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """Equal pieces of a dimension are an axis of their own, after the axis that counts the pieces."""
    place = _setting(op, 2, "dim", 0) % len(inputs[0])
    sizes = {output.shape[place] for output in op.outputs}
    if len(sizes) != 1:
        return _narrow(op, inputs)
    shape = op.inputs[0].shape
    pieces = reshape(inputs[0], (*shape[:place], len(op.outputs), *sizes, *shape[place + 1 :]))
    return [(*pieces[:place], *pieces[place + 1 :])] * len(op.outputs)


def _slice(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """A slice that is one of equal pieces is treated as a split."""
    place = _setting(op, 1, "dim", 0) % len(inputs[0])
    whole, piece = op.inputs[0].shape[place], op.output.shape[place]
    start, step = _setting(op, 2, "start", 0) or 0, _setting(op, 4, "step", 1)
    feature = place == len(inputs[0]) - 1 and piece > 1
    if step != 1 or not feature or piece == whole or whole % piece or start % piece:
        return _narrow(op, inputs)
    shape = op.inputs[0].shape
    pieces = reshape(inputs[0], (*shape[:place], whole // piece, piece, *shape[place + 1 :]))
    return [(*pieces[:place], *pieces[place + 1 :])]


def _cat(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    operands = [
        dims for dims, tensor in zip(inputs, op.inputs, strict=True) if len(tensor.shape) == len(op.output.shape)
    ]
    place = _setting(op, 1, "dim", 0) % len(op.output.shape)
    for other in operands[1:]:
        for at, (a, b) in enumerate(zip(operands[0], other, strict=True)):
            if at != place:
                unify(a, b)
    first = operands[0]
    yield (*first[:place], fresh(op.output.shape[place]), *first[place + 1 :])


def _stack(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    place = _setting(op, 1, "dim", 0) % len(op.output.shape)
    for other in inputs[1:]:
        for a, b in zip(inputs[0], other, strict=True):
            unify(a, b)
    yield (*inputs[0][:place], fresh(op.output.shape[place]), *inputs[0][place:])


def _reduce(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    dims = inputs[0]
    asked = _setting(op, 1, "dim")
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
    if set(resolve(rows)) & set(resolve(columns)):
        columns = tuple(_twin(atom) for atom in resolve(columns))
    dims = (*a[:-2], rows, columns)
    if len(inputs) == 3:
        for back, (added, dim) in enumerate(zip(reversed(inputs[0]), reversed(dims), strict=False)):
            if op.inputs[0].shape[-1 - back] == op.output.shape[-1 - back]:
                unify(dim, added)
    yield dims


def _twin(atom: Atom) -> Atom:
    twin = Atom(atom.size)
    twin.twins = frozenset({atom})
    return twin


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
    yield inputs[1]


def _convolution(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    source, weight = inputs[:2]
    yield (source[0], weight[0], *(fresh(size) for size in op.output.shape[2:]))


def _diagonal(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    return []


def _rules(*groups: tuple[str, Rule]) -> dict[str, Rule]:
    return {name: rule for names, rule in groups for name in names.split()}


_RULES: dict[str, Rule] = _rules(
    ("view _unsafe_view reshape _reshape_alias", _reshape),
    ("transpose t", _transpose),
    ("permute", _permute),
    ("unsqueeze", _unsqueeze),
    ("squeeze", _squeeze),
    ("expand", _expand),
    ("repeat", _repeat),
    ("select unbind", _select),
    ("slice", _slice),
    ("constant_pad_nd topk", _narrow),
    ("split", _split),
    ("split_with_sizes", _split),
    ("cat", _cat),
    ("stack", _stack),
    ("sum mean amax amin var std prod any all argmax argmin linalg_vector_norm max min logsumexp", _reduce),
    ("bmm mm addmm baddbmm", _product),
    (
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable",
        _fused_attention,
    ),
    ("embedding", _embedding),
    ("index", _index),
    ("gather", _gather),
    ("convolution", _convolution),
    ("as_strided diagonal unfold", _diagonal),
    ("detach alias clone lift_fresh _to_copy masked_fill where", _pointwise),
)
"""Base name of an operation to the rule that follows its dimensions. Pointwise ones, and those that keep the shape, need
none."""
