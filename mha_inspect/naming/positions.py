"""Find how positions enter the scores: rotated queries and keys, and numbers that are added to the scores.

A rotation multiplies pairs of features by numbers that no projection has a part in. The operations around these tables
are run again on two sets of random features, the second with each pair multiplied by a complex number of its own. In a
rotation, whatever its code, exactly the results are multiplied by the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import pi, prod
from typing import Any, Literal

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..graph.axis import Axis, setting
from ..graph.dataflow import Graph, made_of
from ..graph.ids import any_in, ids_of
from ..graph.kernels import places_of
from ..graph.products import Product
from ..graph.replay import NotReplayedError, Region, measuring, region
from ..graph.rerun import Constants, run_again
from ..record.ops import Op, TensorRef
from ..record.sight import MASKED_BELOW
from ..reports.trace import Position
from .axes import AxisNames
from .operand_path import OperandPath

Layout = Literal["half", "interleaved"]
_LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")
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


@dataclass(frozen=True)
class Rotation:
    """A rotation of queries or keys by their positions."""

    layout: Layout
    dims: int
    offset: int | None
    """Position of the first token; None if unknown."""
    frequencies: tuple[float, ...] = ()
    """The angle between neighbours in each pair that is rotated; empty if it is unknown."""


@dataclass(frozen=True)
class Turned:
    """A rotation, and its operations."""

    rotation: Rotation
    span: range
    """The indices of its operations, and of those between."""


def rotation_of(
    path: OperandPath,
    names: AxisNames,
    *,
    constants: Constants,
    rotations: dict[Any, Rotation | None],
) -> Turned | None:
    """Return the rotation between a projection and the scores; None without one, or if its table has no values.

    Args:
        path: the operations of queries or keys.
        names: the axes.
        constants: values of tables.
        rotations: those that were read before by their operations, so that layers with one table are computed once.
    """
    tables = list(_tables(path))
    part = _part_of_heads(path, tables, names.head_dim)
    if part is None:
        return None
    key = tuple(_signature(path, op) for op in part.ops)
    if key not in rotations:
        queries, _ = names.lengths
        starts = _first_positions(path.graph, constants, [tensor for _, tensor in tables])
        rotations[key] = _read(_Again(constants, part), _widths(tables), starts, is_single=queries == 1)
    rotation = rotations[key]
    if rotation is None or not part.ops:
        return None
    return Turned(rotation, range(part.ops[0].index, part.ops[-1].index + 1))


def _signature(path: OperandPath, op: Op) -> tuple[Any, ...]:
    """Return what two operations have in common if they compute the same of a tensor: name, shape and tables."""
    places: list[tuple[Any, ...]] = []
    for tensor in path.others(op):
        places.append((tensor.storage, tensor.offset, tensor.stride))
    return (op.name, op.output.shape, *places)


# -- where a rotation is ----------------------------------------------------------------------------------------------


def _tables(path: OperandPath) -> Iterator[tuple[Op, TensorRef]]:
    """Yield what heads are multiplied by, feature by feature, other than learned gains, and where."""
    graph = path.graph
    for op in path.ops:
        if op.base_name.rstrip("_") not in ("mul", "addcmul") and not op.does("product"):
            continue
        for tensor in path.others(op):
            is_gain = graph.is_weight(tensor) and tensor.id in graph.learned
            if tensor.shape[-1:] not in ((), (1,)) and not is_gain:
                yield op, tensor


def _widths(tables: Iterable[tuple[Op, TensorRef]]) -> list[int]:
    """Return how many features tables may rotate: as many as they have numbers in a row, or twice as many."""
    widths: set[int] = set()
    for _, table in tables:
        pairs = table.shape[-1]
        widths |= {pairs, 2 * pairs}
    return sorted(widths)


def _part_of_heads(path: OperandPath, tables: Sequence[tuple[Op, TensorRef]], width: int) -> Region | None:
    """Return the operations that multiply heads of at most this width by tables; None if they are not in one part."""
    graph, products = path.graph, [op for op, _ in tables]
    after = _first_after(path, products)
    if not tables or path.projection is None or after is None:
        return None
    to_tables: list[_Passage] = []
    for passage in _passages(graph, path.projection.output, after):
        if passage.ops and passage.ops[-1].index >= products[0].index:
            break
        to_tables.append(passage)
    from_tables = _passages(graph, after, path.target)
    source = _widest(graph, _only_moved(graph, _turned_round(to_tables)), width)
    target = _widest(graph, _only_moved(graph, from_tables), width)
    if source is None or target is None:
        return None
    if _features(source) != _features(target) or source.numel > _LARGEST:
        return None
    return region(graph, (source,), target)


def _first_after(path: OperandPath, products: Iterable[Op]) -> TensorRef | None:
    """Return the first tensor on the way that all products with tables lead to; None if there is no such."""
    common = set(path.reached)
    for op in products:
        # A matrix of its own for each pair of features is multiplied and summed.
        sums = [reader for reader in path.graph.readers(op.output) if reader.base_name == "sum"]
        common &= made_of({one.output.id for one in sums or [op]}, path.ops)
    for op in path.ops:
        for tensor in path.graph.results(op):
            if tensor.id in common:
                return tensor
    return None


@dataclass(frozen=True)
class _Passage:
    """A tensor that all of a way passes through."""

    tensor: TensorRef
    ops: tuple[Op, ...]
    """The operations between it and the passage before."""


def _passages(graph: Graph, source: TensorRef, target: TensorRef) -> list[_Passage]:
    """Return the tensors that all of the way from one tensor to another passes through, in order."""
    ops = region(graph, (source,), target).ops
    passages = [_Passage(source, ())]
    since: list[Op] = []
    for op in ops:
        since.append(op)
        for tensor in graph.results(op):
            if tensor.id == target.id or not _leads_around(graph, ops, source, tensor):
                passages.append(_Passage(tensor, tuple(since)))
                since = []
    return passages


def _leads_around(graph: Graph, ops: Sequence[Op], source: TensorRef, tensor: TensorRef) -> bool:
    """Return whether there is a way from a source to the result of the last operation that avoids a tensor."""
    reached = {source.id}
    for op in ops:
        if any_in(op.inputs, reached):
            reached.update(ids_of(graph.results(op)))
            reached.discard(tensor.id)
    return ops[-1].output.id in reached


def _turned_round(passages: Sequence[_Passage]) -> list[_Passage]:
    """Return passages from the last to the first, each with the operations between it and the one after it."""
    turned: list[_Passage] = []
    between: tuple[Op, ...] = ()
    for passage in reversed(passages):
        turned.append(_Passage(passage.tensor, between))
        between = passage.ops
    return turned


def _only_moved(graph: Graph, passages: Iterable[_Passage]) -> Iterator[TensorRef]:
    """Yield the first of these tensors, and those after it for as long as all of its elements are only moved."""
    sizes: set[int] = set()
    for passage in passages:
        sizes.add(_real_numbers(passage.tensor))
        if len(sizes) > 1 or not all(graph.moves(op) or op.does("joins") for op in passage.ops):
            return
        yield passage.tensor


def _widest(graph: Graph, tensors: Iterable[TensorRef], width: int) -> TensorRef | None:
    """Return the last of these tensors with the most features, at most those of a head, and then dimensions."""
    widest: TensorRef | None = None
    most = (0, 0)
    features: set[Axis] = set()
    for tensor in tensors:
        # And not the positions, if transposed.
        last = graph.dimensions.along(tensor, -1)
        features = features or last
        size = (_features(tensor), len(tensor.shape))
        if not features.isdisjoint(last) and width >= size[0] and size >= most:
            widest, most = tensor, size
    return widest


def _features(tensor: TensorRef) -> int:
    """Return the number of real features in the last dimension."""
    if not tensor.shape:
        return 0
    size = tensor.shape[-1]
    return 2 * size if tensor.dtype.startswith("complex") else size


def _real_numbers(tensor: TensorRef) -> int:
    """Return the number of real numbers in a tensor."""
    return 2 * tensor.numel if tensor.dtype.startswith("complex") else tensor.numel


# -- what is computed there -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Again:
    """Operations of queries or keys, to run again on other features."""

    constants: Constants
    part: Region

    @property
    def before(self) -> TensorRef:
        """The heads before these operations."""
        return self.part.sources[0]

    def of_pairs(self, order: Tensor, numbers: Tensor) -> Tensor:
        """Return the results for pairs of features, given as complex numbers.

        Args:
            order: the places of the two features of each pair, `pair 2`.
            numbers: the features of each pair.
        """
        dtype = getattr(torch, self.before.dtype)
        features = torch.view_as_real(numbers).flatten()[order.flatten().argsort()]
        if dtype.is_complex:
            features = torch.view_as_complex(features.view(-1, 2))
        contents = {self.before.id: self._in_recorded_layout(features.to(dtype))}

        def content(tensor: TensorRef) -> Tensor:
            number = contents.get(tensor.id)
            if number is None:
                number = self.constants.value(tensor)
            if number is None:
                raise NotReplayedError("a table has no values")
            return number

        for op in self.part.ops:
            contents.update(run_again(self.constants.graph, op, content))
        return contents[self.part.target.id]

    def _in_recorded_layout(self, features: Tensor) -> Tensor:
        """Return heads with these features in memory as they were recorded, which writes need."""
        before = self.before
        ends = [_end(before)]
        for op in self.part.ops:
            ends += [_end(tensor) for tensor in (*op.inputs, *op.outputs) if tensor.storage == before.storage]
        memory = torch.full((max(ends),), torch.nan, dtype=features.dtype)
        heads = memory.as_strided(before.shape, before.stride, before.offset)
        # An expanded key is one in memory.
        once = tuple(slice(None) if step else slice(1) for step in before.stride)
        heads[once] = features
        return heads


def _end(tensor: TensorRef) -> int:
    """Return the position in memory after the last element of a tensor."""
    places = [(size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True)]
    return tensor.offset + sum(places) + 1


def _read(again: _Again, widths: Iterable[int], starts: list[int], *, is_single: bool) -> Rotation | None:
    """Return the rotation that operations compute; None if they compute something else.

    With `is_single` there is one query, and no other position to compare with.
    """
    width = _features(again.before)
    if width % 2:
        return None
    values, factors = _drawn(width // 2)
    eps = torch.finfo(getattr(torch, again.before.dtype)).eps
    largest = float(values.abs().max()) * float(factors.abs().max())
    near = largest * max(1e-4, 8 * eps)
    for layout, dims in _guesses(width, widths):
        order = _order(layout, dims, width)
        try:
            with measuring():
                plain = again.of_pairs(order, values)
                multiplied = again.of_pairs(order, values * factors)
        except NotReplayedError:
            return None
        # The results may be in the other layout.
        for result_layout in _LAYOUTS:
            order = _order(result_layout, dims, width)
            first, second = _pairs(plain, order), _pairs(multiplied, order)
            if bool(((first * factors - second).abs() <= near).all()):
                return _measured(layout, first / values, starts, is_single=is_single)
    return None


def _drawn(pairs: int) -> tuple[Tensor, Tensor]:
    """Return random features, and random factors of them, as complex numbers: one for each pair.

    They are rounded, so that features that are left alone are exactly the same in every dtype.
    """
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randn(2, 2, pairs, generator=draw)
    real, imaginary = numbers.bfloat16().double()
    values, factors = torch.complex(real, imaginary)
    return values, factors


def _guesses(width: int, widths: Iterable[int]) -> Iterator[tuple[Layout, int]]:
    """Yield the layouts to try, with the number of features that are rotated: all, or as many as a table has."""
    for layout in _LAYOUTS:
        yield layout, width
    # Features that are not rotated may be joined with the rotated ones in one step.
    for size in widths:
        if size < width and size % 2 == 0:
            yield "half", size


def _order(layout: Layout, dims: int, width: int) -> Tensor:
    """Return the features of each pair, `pair 2`; features after the first `dims` are paired with their neighbours."""
    rotated = torch.arange(dims)
    rest = torch.arange(dims, width).view(-1, 2)
    pairs = rotated.view(2, -1).T if layout == "half" else rotated.view(-1, 2)
    return torch.cat((pairs, rest))


def _pairs(value: Tensor, order: Tensor) -> Tensor:
    """Return features as complex numbers, a pair each, in double precision."""
    if value.is_complex():
        value = torch.view_as_real(value.contiguous()).flatten(-2)
    return torch.view_as_complex(value.double()[..., order].contiguous())


def _measured(
    layout: Layout,
    turns: Tensor,
    starts: list[int],
    *,
    is_single: bool,
) -> Rotation | None:
    """Return a rotation by its complex numbers, `... pair`; None if they do not turn, or do not vary by position."""
    angles = _units(turns).imag.abs().flatten(0, -2).amax(0)
    is_turned = angles > 1e-9
    dims = 2 * _number_of_turned(angles[is_turned], len(angles))
    places = _places_of_positions(turns)
    if not places:
        if not is_single:
            return None
        return Rotation(layout, dims, starts[0] if starts else None)
    if float(angles.max()) < _NEAR:
        return None
    by_position = turns.movedim(places[-1], -2)
    first_item = by_position.reshape(-1, *by_position.shape[-2:])[0]
    rows = _units(first_item)
    steps = rows[1:] / rows[:-1]
    # Padding on the left gives batch items positions of their own, and a position may repeat.
    if len(places) > 1 or not _are_even(steps, fewest=2 if is_single else 1):
        return Rotation(layout, dims, None)
    frequencies = steps.angle().abs().median(0).values[is_turned]
    return Rotation(layout, dims, _offset(rows), tuple(frequencies.tolist()))


def _units(turns: Tensor) -> Tensor:
    """Return complex numbers with the same angles, of length one."""
    return turns / turns.abs().clamp(min=1e-12)


def _number_of_turned(angles: Tensor, pairs: int) -> int:
    """Return the number of rotated pairs, given the angles of those that turn; all pairs if some hardly turn.

    Slow pairs hardly turn: a table that leaves pairs alone does so beside pairs that turn visibly.
    """
    if len(angles) and float(angles.min()) > 1e-3:
        return len(angles)
    return pairs


def _places_of_positions(turns: Tensor) -> list[int]:
    """Return the dimensions of complex numbers, `... pair`, along which they change."""
    near = _NEAR * turns.abs().max()
    places: list[int] = []
    for dim in range(turns.dim() - 1):
        changes = (turns - turns.narrow(dim, 0, 1)).abs()
        if bool((changes > near).any()):
            places.append(dim)
    return places


def _are_even(steps: Tensor, fewest: int) -> bool:
    """Return whether the turns from position to position, `position pair`, are about the same."""
    if len(steps) < fewest:
        return False
    return bool(((steps - steps[:1]).abs() < _UNEVEN).all())


def _offset(turns: Tensor) -> int | None:
    """Return the position of the first row of a table, `position pair`; None if no integer fits its angles.

    The step from row to row is the angle of one position. Its rounding error grows with the position.
    """
    start = turns[0]
    steps = (turns[1] / start).angle()
    numbers = _positions_by_slow_pair(start.angle(), steps)[:, None]
    rounding = 4e-7 * numbers**2 * steps.abs()
    near = 1e-3 + 1e-7 * numbers.abs() + rounding
    angles = torch.polar(torch.ones((), dtype=torch.float64), numbers * steps)
    is_near = ((angles - start).abs() <= near).all(-1)
    is_sharp = (near < steps.abs() / 2).any(-1)
    fitting: list[int] = numbers[is_near & is_sharp].flatten().tolist()
    return min(fitting, key=abs, default=None)


def _positions_by_slow_pair(start: Tensor, steps: Tensor) -> Tensor:
    """Return integers that may be the first position, by the pair that turns slowest, in each lap of its circle."""
    sizes = steps.abs()
    slow = int(torch.where(sizes > 1e-7, sizes, torch.inf).argmin())
    step = float(steps[slow])
    first = circle = 0.0
    if abs(step) > 1e-7:
        first = float(start[slow]) / step
        circle = 2 * pi / abs(step)
    positions = [first + lap * circle for lap in range(-1, 9)]
    laps = torch.tensor(positions).round().long()
    nearby = laps[:, None] + torch.arange(-8, 9)
    return nearby.flatten()


# -- where a table begins ---------------------------------------------------------------------------------------------


def _first_positions(graph: Graph, constants: Constants, tables: Iterable[TensorRef]) -> list[int]:
    """Return the position that each table begins at, where the integers or the slice that it is made of say it."""
    starts: list[int] = []
    for table in tables:
        for step in islice(graph.back(table, lambda _: True), _FAR):
            start = _first_position(graph, constants, step.tensor)
            if start is not None:
                starts.append(start)
                break
    return starts


def _first_position(graph: Graph, constants: Constants, tensor: TensorRef) -> int | None:
    """Return the first of some integers, or the first row that a slice takes of a table, `position pair`."""
    numbers = constants.numbers(tensor) if tensor.dtype in ("int64", "int32") else []
    if numbers:
        return numbers[0]
    op = graph.producer(tensor)
    if op is None or op.base_name not in ("slice", "select"):
        return None
    table = op.inputs[0]
    place = int(op.args[1]) % len(table.shape)
    # Before the rows of a table there are no others, and its last dimension has pairs.
    if tensor.numel == table.numel or prod(table.shape[:place]) > 1 or place == len(table.shape) - 1:
        return None
    return int(setting(op, 2, "start", 0)) % table.shape[place]


# -- numbers added to the scores --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Added:
    """Numbers that one operation adds to scores."""

    bias: bool = False
    """Whether it has finite numbers that are no mask."""
    mask: bool = False
    """Whether it masks keys out."""
    position: Position | None = None
    of_scores: bool = False
    """Whether it is computed from the scores themselves."""
    product: Product | None = None
    """A second product of queries and keys, e.g. of the features that are rotated; None for anything else."""
    rotated: str = ""
    """Which sides of that product are rotated: `query`, `key` or `both`; empty if neither is."""


def added_by(
    graph: Graph,
    constants: Constants,
    attention: Attention,
    operands: Callable[[Op], list[TensorRef]],
) -> dict[int, Added]:
    """Return what each operation that masks scores adds, by its index; `operands` gives what it reads besides them."""
    added: dict[int, Added] = {}
    product, softmax = attention.score_product.op, attention.softmax
    between_both = graph.recording.ops[product.index + 1 : softmax.index]
    of_scores = made_of({product.output.id}, between_both)
    for op in attention.masks:
        # After exponentials nothing is added to the scores.
        if op.index > softmax.index or op.does("fills") or op.does("scales"):
            continue
        read = [tensor for tensor in operands(op) if tensor.numel > 1]
        beside = [tensor for tensor in read if tensor.id not in of_scores]
        if read and not beside:
            added[op.index] = Added(of_scores=True)
            continue
        parts: list[Added] = []
        for tensor in beside:
            parts.append(_added(graph, constants, tensor, sign=-1 if op.base_name.rstrip("_") == "sub" else 1))
        if places_of(op).mask_keys:
            parts.append(Added(mask=True))
        # A number that is added for each softmax changes no weight.
        is_shift = op in attention.shifts
        added[op.index] = _together(parts, is_shift=is_shift)
    return added


def _together(parts: Iterable[Added], *, is_shift: bool) -> Added:
    """Return what several tensors add by one operation."""
    bias = mask = False
    position: Position | None = None
    product: Product | None = None
    for part in parts:
        bias = bias or (part.bias and not is_shift)
        mask = mask or part.mask
        position = part.position if position is None else position
        product = part.product if product is None else product
    return Added(bias=bias, mask=mask, position=position, product=product)


def _added(graph: Graph, constants: Constants, tensor: TensorRef, *, sign: int) -> Added:
    """Return what a tensor adds to the scores, times a sign."""
    product = _second_product(graph, tensor)
    if product is not None:
        return Added(product=product)
    if tensor.dtype == "bool":
        return Added(mask=True)
    numbers = Added()
    value = constants.value(tensor)
    if value is not None and value.dtype != torch.bool:
        numbers = _added_numbers(sign * value)
        if numbers.position is not None:
            return numbers
    origin = _origin(graph, tensor)
    position = Position("relative bias") if origin.is_by_distance else None
    return Added(bias=numbers.bias or origin.is_learned, mask=numbers.mask, position=position)


def _second_product(graph: Graph, tensor: TensorRef) -> Product | None:
    """Return the product of queries and keys that a tensor is, at most moved and scaled; None for anything else."""

    def is_passed(op: Op) -> bool:
        return graph.moves(op) or graph.is_scale(op)

    for step in graph.back(tensor, is_passed):
        op = graph.recording.producer(step.tensor)
        product = None if op is None else graph.product(op)
        if product is None:
            continue
        if _is_given(graph, product.left) and _is_given(graph, product.right):
            return product
    return None


def _added_numbers(value: Tensor) -> Added:
    """Return whether numbers, `... query key`, are a mask, a bias, or slopes of ALiBi."""
    finite = value.isfinite() & (value > MASKED_BELOW)
    hides = not bool(finite.all())
    numbers = value[finite]
    low = high = 0.0
    if numbers.numel():
        low, high = map(float, numbers.aminmax())
    has_two = bool(((numbers == low) | (numbers == high)).all())
    if has_two and high == 0 and low < _HIDES:
        return Added(mask=True)
    if has_two and low in (0, 1) and high in (0, 1):
        return Added(mask=hides)
    position = Position("alibi") if _is_linear(value, finite) else None
    return Added(bias=True, mask=hides, position=position)


@dataclass(frozen=True)
class _Origin:
    """Where numbers come from that are added to the scores."""

    is_learned: bool
    """Whether they depend on parameters."""
    is_by_distance: bool
    """Whether they are read from a table of distances, or projected from distances."""


def _origin(graph: Graph, tensor: TensorRef) -> _Origin:
    """Return whether a tensor depends on parameters, and whether by a table of distances.

    A table of distances is read by integers that do not come from the inputs, or is a projection of such numbers.
    """
    is_learned = False

    def through(op: Op) -> bool:
        return not graph.is_projection(op) or not _is_given(graph, graph.projected(op))

    for step in graph.back(tensor, through):
        op = graph.recording.producer(step.tensor)
        is_learned = is_learned or step.tensor.id in graph.recording.parameter_names
        if op is None or not op.inputs:
            continue
        if graph.is_projection(op):
            is_learned = True
            if not _is_given(graph, graph.projected(op)):
                return _Origin(is_learned=True, is_by_distance=True)
        if _reads_by_distance(graph, op):
            return _Origin(is_learned=True, is_by_distance=True)
    return _Origin(is_learned, is_by_distance=False)


def _reads_by_distance(graph: Graph, op: Op) -> bool:
    """Return whether an operation reads a learned table by integers that do not come from the inputs."""
    if not op.does("gathers") or op.inputs[0].id not in graph.learned:
        return False
    indices = [tensor for tensor in op.inputs if tensor.dtype in ("int64", "int32")]
    return bool(indices) and not any(_is_given(graph, index) for index in indices)


def _is_given(graph: Graph, tensor: TensorRef) -> bool:
    """Return whether a tensor depends on an argument of the forward."""
    if graph.recording.inputs:
        return bool(graph.inputs_of(tensor))
    return graph.comes_from_inputs(tensor)


def _is_linear(value: Tensor, finite: Tensor) -> bool:
    """Return whether numbers, `... query key`, change from key to key by a constant of each head, up to its sign."""
    if value.dim() < 2 or value.shape[-1] < 3 or not value.is_floating_point():
        return False
    eps = torch.finfo(value.dtype).eps
    value = value.double()
    has_next = finite[..., 1:] & finite[..., :-1]
    steps = value.diff(dim=-1).abs()
    steps = torch.where(has_next, steps, torch.nan)
    queries, keys = steps.shape[-2:]
    rows = steps.reshape(-1, queries * keys)
    high = rows.nan_to_num(-torch.inf).amax(-1)
    low = rows.nan_to_num(torch.inf).amin(-1)
    # The steps between rounded numbers are rounded too.
    largest = float(value[finite].abs().max())
    rounding = 2 * eps * largest
    near = (1e-3 * high).clamp(min=rounding)
    # A head may be without a slope, and a row without two keys.
    has_slopes = bool(has_next.any() and (high > 0).any())
    return has_slopes and bool((high - low <= near).all())
