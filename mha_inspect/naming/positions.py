"""Find how positions enter the scores: rotated queries and keys, and numbers that are added to the scores.

A rotation multiplies pairs of features by numbers that no projection has a part in. The operations around these tables
are run again on two sets of random features, the second with each pair multiplied by a complex number of its own. In a
rotation, whatever its code, exactly the results are multiplied by the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import pi
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..graph.dataflow import Graph, made_of
from ..graph.products import Product
from ..graph.rerun import Constants, between, run_again
from ..record.ops import Op, TensorRef
from ..record.sight import MASKED_BELOW
from ..reports.trace import Position
from .axes import AxisNames
from .operand_path import OperandPath

Layout = Literal["half", "interleaved"]
_LAYOUTS: tuple[Layout, Layout] = ("half", "interleaved")
_FAR = 60
"""Tensors after which a walk gives up."""
_NEAR = 1e-5
"""Relative differences below this are rounding."""
_UNEVEN = 0.1
"""Angles between neighbours that differ by more are not of one position each."""
_HIDES = -50.0
"""Scores that are lower by this have no weight beside others, in any dtype: Swin adds -100 or 0."""
_LARGEST = 1 << 24
"""Heads with more elements are not computed again."""


class Rotation(NamedTuple):
    """A rotation of queries or keys by their positions."""

    layout: Layout
    dims: int
    offset: int | None
    """Position of the first token; None if unknown."""
    frequencies: tuple[float, ...] = ()
    """The angle between neighbours in each pair that is rotated; empty if it is unknown."""


Turned = tuple[Rotation, range]
"""A rotation, and the indices of its operations."""


def rotation_of(
    path: OperandPath, names: AxisNames, *, constants: Constants, known: dict[Any, Rotation | None]
) -> Turned | None:
    """Return the rotation between a projection and the scores; None without one, or if its table has no values.

    Args:
        path: the operations of queries or keys.
        names: the axes.
        constants: values of tables.
        known: rotations by their operations, so that layers with one table are computed once.
    """
    tables = [(op, table) for op in path.ops for table in _tables(path, op)]
    width, single = names.head_dim, names.lengths[0] == 1
    # A matrix of its own for each pair of features is multiplied and summed.
    read = [reader for op, _ in tables for reader in path.graph.recording.consumers.get(op.output.id, ())]
    ends = _region(path, [*(op for op, _ in tables), *(op for op in read if op.base_name == "sum")]) if tables else None
    if ends is None:
        return None
    before, after = (_widest(path, end, width, backward=end is ends[0]) for end in ends)
    if before is None or after is None or _features(before) != _features(after) or before.numel > _LARGEST:
        return None
    ops = between(path.graph.recording, {before.id}, after)
    key = tuple((op.name, op.output.shape, *((t.storage, t.offset, t.stride) for t in path.others(op))) for op in ops)
    if key not in known:
        known[key] = _read(path, constants, ops, (before, after), [table for _, table in tables], single=single)
    rotation = known[key]
    return None if rotation is None or not ops else (rotation, range(ops[0].index, ops[-1].index + 1))


def _tables(path: OperandPath, op: Op) -> Iterator[TensorRef]:
    """Yield what an operation multiplies heads by, feature by feature, other than learned gains."""
    multiplies = op.base_name.rstrip("_") in ("mul", "addcmul") or op.does("product")
    for tensor in path.others(op) if multiplies else ():
        gain = path.graph.is_weight(tensor) and tensor.id in path.graph.learned
        if tensor.shape[-1:] not in ((), (1,)) and not gain:
            yield tensor


def _region(path: OperandPath, ops: list[Op]) -> tuple[TensorRef, TensorRef] | None:
    """Return the last tensor before all of these operations, and the first after them; None if there is no such."""
    recording, inside = path.graph.recording, {op.index for op in path.ops}
    ends: list[TensorRef] = []
    for backward in (True, False):
        nearest = max if backward else min
        sides = (op.inputs if backward else path.graph.results(op) for op in ops)
        front = {t.id: t for side in sides for t in side if t.id in path.reached}
        while len(front) > 1:
            tensor = front.pop(nearest(front, key=lambda number: recording.producers.get(number, -1)))
            maker = recording.producer(tensor)
            if backward:
                after = maker.inputs if maker is not None and maker.index in inside else ()
            else:
                readers = (op for op in recording.consumers.get(tensor.id, ()) if op.index in inside)
                after = tuple(output for op in readers for output in path.graph.results(op))
            more = {t.id: t for t in after if t.id in path.reached}
            if not more:
                return None
            front |= more
        ends += front.values()
    return (ends[0], ends[1]) if len(ends) == 2 else None


def _features(tensor: TensorRef) -> int:
    """Return the number of real features in the last dimension."""
    return (tensor.shape[-1] if tensor.shape else 0) * (1 + tensor.dtype.startswith("complex"))


def _widest(path: OperandPath, tensor: TensorRef, width: int, *, backward: bool) -> TensorRef | None:
    """Return the last tensor with the most features, at most those of a head, that this is a whole view or copy of.

    Otherwise the last that is a view or copy of it.
    """
    best: TensorRef | None = None
    dimensions = path.graph.dimensions
    features = dimensions.along(tensor, -1)
    while True:
        known = (0, 0) if best is None else (_features(best), len(best.shape))
        is_last = not features or bool(features & dimensions.along(tensor, -1))  # and not the positions, if transposed
        if is_last and width >= _features(tensor) and (_features(tensor), len(tensor.shape)) >= known:
            best = tensor
        recording = path.graph.recording
        made = (
            [op for op in (recording.producer(tensor),) if op] if backward else recording.consumers.get(tensor.id, ())
        )
        near = [op for op in made if op in path.ops]
        ends = _region(path, near) if near and (not backward or len(near) == len(made)) else None
        if ends is None or len({end.numel * (1 + end.dtype.startswith("complex")) for end in ends}) > 1:
            return best
        steps = between(recording, {ends[0].id}, ends[1])
        if not all(path.graph.moves(op) or op.does("joins") for op in steps):
            return best
        tensor = ends[not backward]


def _read(
    path: OperandPath,
    constants: Constants,
    ops: list[Op],
    ends: tuple[TensorRef, TensorRef],
    tables: list[TensorRef],
    *,
    single: bool,
) -> Rotation | None:
    """Return the rotation that operations compute; None if they compute something else."""
    (before, after), width = ends, _features(ends[0])
    # Features that are not rotated may be joined with the rotated ones in one step.
    parts = sorted(
        {size for table in tables for size in (table.shape[-1], 2 * table.shape[-1]) if size < width and size % 2 == 0}
    )
    tried: list[tuple[Layout, int]] = [*((each, width) for each in _LAYOUTS), *(("half", size) for size in parts)]
    draw = torch.Generator().manual_seed(0)
    # Rounded, so that features that are left alone are exactly the same in every dtype.
    values, factors = torch.complex(*torch.randn(2, 2, width // 2, generator=draw).bfloat16().double())
    dtype = getattr(torch, before.dtype)

    def computed(order: Tensor, numbers: Tensor) -> Tensor | None:
        features = torch.view_as_real(numbers).flatten()[order.flatten().argsort()]
        if dtype.is_complex:
            features = torch.view_as_complex(features.view(-1, 2))
        return _run(constants, ops, before, features.to(dtype).expand(before.shape), after)

    near = max(1e-4, 8 * torch.finfo(dtype).eps) * float(values.abs().max()) * float(factors.abs().max())
    for layout, dims in tried if width % 2 == 0 else ():
        order = _order(layout, dims, width)
        plain, multiplied = computed(order, values), computed(order, values * factors)
        if plain is None or multiplied is None:
            return None
        for other in (layout, *(each for each in _LAYOUTS if each != layout)):
            first, second = (_pairs(value, _order(other, dims, width)) for value in (plain, multiplied))
            if bool(((first * factors - second).abs() <= near).all()):
                return _measured(path, constants, layout, first / values, tables, single=single)
    return None


def _order(layout: Layout, dims: int, width: int) -> Tensor:
    """Return the features of each pair, `pair 2`; features after the first `dims` are paired with their neighbours."""
    first, rest = torch.arange(dims), torch.arange(dims, width)
    return torch.cat((first.view(2, -1).T if layout == "half" else first.view(-1, 2), rest.view(-1, 2)))


def _pairs(value: Tensor, order: Tensor) -> Tensor:
    """Return features as complex numbers, a pair each, in double precision."""
    if value.is_complex():
        value = torch.view_as_real(value.contiguous()).flatten(-2)
    return torch.view_as_complex(value.double()[..., order].contiguous())


def _run(constants: Constants, ops: list[Op], before: TensorRef, value: Tensor, after: TensorRef) -> Tensor | None:
    """Return what operations compute of another value; None if one of them cannot be run again."""
    same = [t for op in ops for t in (*op.inputs, *op.outputs) if t.storage == before.storage]
    ends = [t.offset + sum((n - 1) * step for n, step in zip(t.shape, t.stride, strict=True)) for t in same]
    # Writes need the recorded layout.
    memory = torch.full((max(ends) + 1,), torch.nan, dtype=value.dtype)
    known = {before.id: memory.as_strided(before.shape, before.stride, before.offset)}
    once = tuple(slice(None) if step else slice(1) for step in before.stride)  # an expanded key is one in memory
    known[before.id][once] = value[once]

    def content(tensor: TensorRef) -> Tensor:
        number = known[tensor.id] if tensor.id in known else constants.value(tensor)
        if number is None:
            raise ValueError("no value")
        return number

    try:
        with torch.no_grad():
            for op in ops:
                if op.does("draws"):
                    return None
                known.update(run_again(constants.graph, op, content))
    except Exception:  # an operation may raise anything when called directly
        return None
    return known.get(after.id)


def _measured(
    path: OperandPath, constants: Constants, layout: Layout, turns: Tensor, tables: list[TensorRef], *, single: bool
) -> Rotation | None:
    """Return a rotation by its complex numbers, `... pair`; None if they do not turn, or do not vary by position."""
    angles = (turns / turns.abs().clamp(min=1e-12)).imag.abs().flatten(0, -2).amax(0)
    turned = angles[angles > 1e-9]
    # Slow pairs hardly turn: a table that leaves pairs alone does so beside pairs that turn visibly.
    dims = 2 * (len(turned) if len(turned) and float(turned.min()) > 1e-3 else len(angles))
    near = _NEAR * turns.abs().max()
    places = [dim for dim in range(turns.dim() - 1) if bool(((turns - turns.narrow(dim, 0, 1)).abs() > near).any())]
    starts = [start for table in tables if (start := _start(path.graph, constants, table)) is not None]
    if not places:
        return Rotation(layout, dims, starts[0] if starts else None) if single else None
    if float(angles.max()) < _NEAR:
        return None
    rows = turns.movedim(places[-1], -2).reshape(-1, turns.shape[places[-1]], turns.shape[-1])[0]
    rows = rows / rows.abs().clamp(min=1e-12)
    # Padding on the left gives batch items positions of their own, and a position may repeat.
    steps = rows[1:] / rows[:-1]
    even = len(places) == 1 and len(rows) > 1 + single and bool(((steps - steps[:1]).abs() < _UNEVEN).all())
    if not even:
        return Rotation(layout, dims, None)
    frequencies = steps.angle().abs().median(0).values[angles > 1e-9]
    return Rotation(layout, dims, _offset(rows, starts), tuple(frequencies.tolist()))


def _offset(turns: Tensor, guesses: list[int]) -> int | None:
    """Return the position of the first row of a table, `position pair`; None if no integer fits its angles.

    The step from row to row is the angle of one position. Its rounding error grows with the position.
    """
    start, steps = turns[0].angle(), (turns[1] / turns[0]).angle()
    slow = int(torch.where(steps.abs() > 1e-7, steps.abs(), torch.inf).argmin())
    step = float(steps[slow])
    first, circle = (float(start[slow]) / step, 2 * pi / abs(step)) if abs(step) > 1e-7 else (0.0, 0.0)
    laps = torch.tensor([first + lap * circle for lap in range(-1, 9)]).round().long()
    numbers = torch.cat((torch.tensor(guesses, dtype=torch.long), (laps[:, None] + torch.arange(-8, 9)).flatten()))
    near = 1e-3 + 1e-7 * numbers.abs()[:, None] + 4e-7 * numbers[:, None] ** 2 * steps.abs()
    angles = torch.polar(torch.ones((), dtype=torch.float64), numbers[:, None] * steps)
    fits = ((angles - turns[0]).abs() <= near).all(-1) & (near < steps.abs() / 2).any(-1)
    return min(numbers[fits].tolist(), key=lambda number: (number not in guesses, abs(number)), default=None)


def _start(graph: Graph, constants: Constants, table: TensorRef) -> int | None:
    """Return the position that a table begins at, from the integers or the slice that it was made with."""
    queue = [table]
    for tensor, _ in zip(queue, range(_FAR), strict=False):  # which grows meanwhile
        numbers = constants.numbers(tensor) if tensor.dtype in ("int64", "int32") and tensor.numel else []
        if numbers:
            return numbers[0]
        op = graph.recording.producer(tensor)
        if op is None:
            continue
        if op.base_name in ("add", "sub") and len(op.inputs) == 1:  # positions counted from a number
            shifted = constants.value(tensor)
            if shifted is not None and shifted.numel() and bool((shifted == shifted.round()).all()):
                return int(shifted.flatten()[0])
        if op.base_name in ("slice", "select") and isinstance((*op.args, None, None)[2], int):
            shape, place = op.inputs[0].shape, int(op.args[1]) % len(op.inputs[0].shape)
            first = place == 0 or (set(shape[:place]) == {1} and place < len(shape) - 1)  # the last has the pairs
            shorter = first and (op.base_name == "select" or op.output.shape[place] < shape[place])
            rows = constants.value(op.inputs[0]) if shorter else None
            # Equal rows are the directions of an image, and not positions.
            if shorter and (rows is None or not rows.equal(rows.narrow(place, 0, 1).expand_as(rows))):
                return int(op.args[2]) % shape[place]
        if op.base_name == "arange" and (only := constants.value(tensor)) is not None and only.numel() == 1:
            return int(only)
        queue += [read for read in op.inputs if read not in queue]
    return None


# -- numbers added to the scores --------------------------------------------------------------------------------------


class Added(NamedTuple):
    """What is added to scores by one operation."""

    bias: bool
    """Whether it has finite numbers that are no mask."""
    mask: bool
    """Whether it masks keys out."""
    position: Position | None = None
    of_scores: bool = False
    """Whether it is computed from the scores themselves."""
    product: Product | None = None
    """A second product of queries and keys, e.g. of the features that are rotated; None for anything else."""


def added_by(
    graph: Graph, constants: Constants, attention: Attention, operands: Callable[[Op], list[TensorRef]]
) -> dict[int, Added]:
    """Return what each operation that masks scores adds, by its index; `operands` gives what it reads besides them."""
    added: dict[int, Added] = {}
    product = attention.score_product.op
    own = made_of({product.output.id}, graph.recording.ops[product.index + 1 : attention.softmax.index])
    for op in attention.masks:
        is_of_scores = op.index <= attention.softmax.index  # after exponentials nothing is added to the scores
        if is_of_scores and not op.does("fills") and not op.does("scales"):
            read = [tensor for tensor in operands(op) if tensor.numel > 1]
            others = [tensor for tensor in read if tensor.id not in own]
            taken_off = op.inputs[1].id if op.base_name.rstrip("_") == "sub" and len(op.inputs) == 2 else None
            parts = [_added(graph, constants, tensor, is_taken_off=tensor.id == taken_off) for tensor in others]
            position = next((part.position for part in parts if part.position is not None), None)
            other = next((part.product for part in parts if part.product is not None), None)
            # A number that is added for each softmax changes no weight.
            bias = op not in attention.shifts and any(part.bias for part in parts)
            mask = any(part.mask for part in parts)
            added[op.index] = Added(bias, mask, position, bool(read) and not others, other)
    return added


def _added(graph: Graph, constants: Constants, tensor: TensorRef, *, is_taken_off: bool = False) -> Added:
    """Return what a tensor adds to the scores, or is taken off them."""
    for step in graph.back(tensor, lambda op: graph.moves(op) or graph.is_scale(op)):
        op = graph.recording.producer(step.tensor)
        product = None if op is None else graph.product(op)
        if product is not None and _is_given(graph, product.left) and _is_given(graph, product.right):
            return Added(False, False, product=product)
    op = graph.recording.producer(tensor)
    if op is not None and op.base_name == "where" and all(read.numel == 1 for read in op.inputs[1:]):
        return Added(False, True)  # one number where a key may be seen, and another one where not
    value = constants.value(tensor)
    value = -value if is_taken_off and value is not None and value.is_floating_point() else value
    finite = None if value is None or value.dtype == torch.bool else value.isfinite() & (value > MASKED_BELOW)
    bias, mask = False, finite is not None and not bool(finite.all())
    if value is not None and finite is not None:
        numbers = value[finite]
        low, high = map(float, numbers.aminmax()) if numbers.numel() else (0.0, 0.0)
        hides, ends = low < _HIDES and high == 0, (numbers == low) | (numbers == high)
        few = bool(ends.all()) and (hides or (low in (0, 1) and high in (0, 1)))
        mask, bias = mask or (few and hides), not few
        if bias and _is_linear(value, finite):
            return Added(True, mask, Position("alibi"))
    learned, relative = _origin(graph, tensor)
    return Added(bias or learned, mask, Position("relative bias") if relative else None)


def _origin(graph: Graph, tensor: TensorRef) -> tuple[bool, bool]:
    """Return whether a tensor depends on parameters, and whether by a table of distances.

    A table of distances is read by integers that do not come from the inputs, or is a projection of such numbers.
    """
    learned = False

    def through(op: Op) -> bool:
        like = op.base_name.startswith("new_") or op.base_name.endswith("_like")
        return not like and not (graph.is_projection(op) and _is_given(graph, graph.projected(op)))

    for step in graph.back(tensor, through):
        op = graph.recording.producer(step.tensor)
        learned = learned or step.tensor.id in graph.recording.parameter_names
        if op is None or not op.inputs:
            continue
        if graph.is_projection(op):
            learned = True
            if not _is_given(graph, graph.projected(op)):
                return True, True
        indices = [read for read in op.inputs if read.dtype in ("int64", "int32")]
        by_distance = bool(indices) and not any(_is_given(graph, read) for read in indices)
        if op.does("gathers") and by_distance and op.inputs[0].id in graph.learned:
            return True, True
    return learned, False


def _is_given(graph: Graph, tensor: TensorRef) -> bool:
    """Return whether a tensor depends on an argument of the forward."""
    return bool(graph.inputs_of(tensor)) if graph.recording.inputs else graph.comes_from_inputs(tensor)


def _is_linear(value: Tensor, finite: Tensor) -> bool:
    """Return whether numbers, `... query key`, change from key to key by a constant of each head, up to its sign."""
    if value.dim() < 2 or value.shape[-1] < 3 or not value.is_floating_point():
        return False
    value, eps = value.double(), torch.finfo(value.dtype).eps
    both = finite[..., 1:] & finite[..., :-1]
    steps = torch.where(both, (value[..., 1:] - value[..., :-1]).abs(), torch.nan)
    rows = steps.reshape(-1, steps.shape[-2] * steps.shape[-1])
    high, low = rows.nan_to_num(-torch.inf).amax(-1), rows.nan_to_num(torch.inf).amin(-1)
    near = (1e-3 * high).clamp(min=2 * eps * float(value[finite].abs().max()))  # of the steps between rounded numbers
    # A head may be without a slope, and a row without two keys.
    return bool(both.any() and (high > 0).any()) and bool((high - low <= near).all())
