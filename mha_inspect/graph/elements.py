"""Follow single elements of a tensor back through a recording, to the elements of parameters that they were made with.

A view shares memory, so where an element of it comes from is arithmetic with strides; what is copied, joined or done
element by element keeps its coordinates. No number of a tensor is looked at, but those of tables of indices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from ..record.catalog import axes_rule, does, named
from ..record.ops import Named, Op, TensorRef
from .axis import setting
from .dataflow import Graph
from .dimensions import Axis, wide
from .moves import MOVES, coordinates_of, index_of
from .products import summed_places

_LONGEST = 600
"""Steps after which a walk gives up: no projection takes so many."""
_BY_CHANNEL = {name for name in named("norms") if "batch_norm" in name or "group_norm" in name}
_STATISTICS = named("norms") - _BY_CHANNEL - {"native_layer_norm", "_fused_rms_norm", "pow"} | {"amax", "var", "std"}
"""What a norm divides by hangs on all features: it is taken as a number that is given."""
_NO_SOURCE = {"new_zeros", "zeros_like", "ones_like", "full_like", "empty_like", "new_empty", "new_full", "bernoulli"}


@dataclass(frozen=True, eq=False)
class Elements:
    """Elements of one tensor, each with the number of what is asked about."""

    tensor: TensorRef
    at: Tensor
    """Where each is, counted in row-major order."""
    ids: Tensor
    """What each belongs to; several elements may belong to one."""
    kind: str = ""
    """What is done with the parameter that they are a part of: see `Met`; empty on the way through activations."""
    lane: Tensor | None = None
    """Whether each is the real or the imaginary part of a complex number."""
    operation: Op | None = None
    """The one by which the parameter meets the activations."""

    def taking(self, tensor: TensorRef, at: Tensor, kept: Tensor | None = None) -> Elements:
        """Those of another tensor that these come from; those that are not `kept` come from somewhere else."""
        if kept is None:
            return replace(self, tensor=tensor, at=at)
        lane = None if self.lane is None else self.lane[kept]
        return replace(self, tensor=tensor, at=at[kept], ids=self.ids[kept], lane=lane)


@dataclass(frozen=True, eq=False)
class Met:
    """Elements of a parameter that were come to."""

    parameter: Named
    kind: str
    """`W` for a factor of a product that ends a way, `before` for that of another one, `b` for what is added, `norm`
    for what is multiplied, `appended` for what is joined, `learned` for anything else."""
    ids: Tensor
    places: Tensor
    """Where in the parameter each is, in elements of its memory from its first one."""
    operation: Op | None


@dataclass
class Trail:
    """What was come to on the way back from some elements."""

    met: list[Met] = field(default_factory=list)
    reached: list[Elements] = field(default_factory=list)
    """Elements of the tensors that the walk was to stop at."""


class Origins:
    """Walks back from elements in one recording."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._recording = graph.recording
        self._parameters: dict[int, list[Named]] = defaultdict(list)
        for own in self._recording.parameters:
            self._parameters[own.tensor.storage].append(own)
        self._makers: dict[int, list[Op]] = defaultdict(list)
        for op in self._recording.ops:
            if op.kind != "view":
                for storage in {tensor.storage for tensor in op.outputs}:
                    self._makers[storage].append(op)

    def back(
        self, start: Elements, stops: Iterable[TensorRef] = (), *, ends: Iterable[Op] = (), since: int = -1
    ) -> Trail:
        """Walk back to parameters and to the tensors `stops`, each way as far as it goes.

        The products `ends` end a way at the rows of their matrices. At any other product with a weight what it projects
        is followed on, of which every feature has a part in all that it gives. Of what was made by the operation
        `since` or before only weights are followed.
        """
        trail, own, last = Trail(), {tensor.id for tensor in stops}, {op.index for op in ends}
        pending = [start]
        steps = 0
        while pending and steps < _LONGEST:
            now = pending.pop()
            steps += 1
            if not len(now.at) or not now.tensor.numel:
                continue
            if now.tensor.id in own:
                trail.reached.append(now)
                continue
            op = self._recording.producer(now.tensor)
            if op is None:
                self._meet(now, trail)
            elif op.index > since or now.kind or self._graph.is_weight(now.tensor):
                pending += list(self._behind(op, now, last))[::-1]
        return trail

    @cached_property
    def _features(self) -> set[Axis]:
        """The axes of what projections take in and give, but for those of size one."""
        return set(wide(self._graph.features))

    def _meet(self, now: Elements, trail: Trail) -> None:
        address = _address(now.tensor, now.at)
        for own in self._parameters.get(now.tensor.storage, ()):
            _, inside = _locate(own.tensor, address)
            if bool(inside.any()):
                places = (address - own.tensor.offset)[inside]
                trail.met.append(Met(own, now.kind or "learned", now.ids[inside], places, now.operation))

    def _behind(self, op: Op, now: Elements, ends: set[int]) -> Iterator[Elements]:
        """What the elements come from, one operation earlier."""
        if op.kind == "view" and op.inputs:
            yield self._seen_through(op, now)
            return
        if op.kind == "write" or now.tensor.storage != op.output.storage:
            address = _address(now.tensor, now.at)
            at, inside = _locate(op.output, address)
            if not bool(inside.all()):
                yield from self._earlier(op, now.taking(now.tensor, address, ~inside))
            now = now.taking(op.output, at, inside)
            if not len(now.at):
                return
        name = op.base_name.rstrip("_")
        if name in _NO_SOURCE:
            return
        if op.base_name in _STATISTICS:
            yield from self._pooled(op, now)
            return
        if does(name, "product", "convolution"):
            yield from self._factors(op, now, ends)
        elif name in MOVES:
            for place, (tensor, at, kept) in enumerate(MOVES[name](op, now.tensor, now.at)):
                kind = "appended" if name in ("cat", "stack") and self._joins(op, place) else ""
                yield self._marked(op, now.taking(tensor, at, kept), kind)
        elif does(name, "gathers"):
            yield from self._gathered(op, now)
        else:
            yield from self._by_element(op, now)

    def _seen_through(self, op: Op, now: Elements) -> Elements:
        source = op.inputs[0]
        if op.base_name == "view_as_complex":
            lane = torch.zeros_like(now.at) if now.lane is None else now.lane
            return replace(now, tensor=source, at=2 * now.at + lane, lane=None)
        if op.base_name == "view_as_real":
            return replace(now, tensor=source, at=now.at // 2, lane=now.at % 2)
        at, inside = _locate(source, _address(now.tensor, now.at))
        return now.taking(source, at, inside)

    def _earlier(self, op: Op, now: Elements) -> Iterator[Elements]:
        """Elements, given by their addresses, that something before this operation wrote into the same memory."""
        for maker in reversed(self._makers[now.tensor.storage]):
            if maker.index >= op.index:
                continue
            out = next(tensor for tensor in maker.outputs if tensor.storage == now.tensor.storage)
            at, inside = _locate(out, now.at)
            if bool(inside.any()):
                yield now.taking(out, at, inside)
                now = now.taking(now.tensor, now.at, ~inside)
                if not len(now.at):
                    return

    def _marked(self, op: Op, source: Elements, kind: str) -> Elements:
        """With what an operation does with them, where they are of a parameter and activations are met here."""
        if source.kind or not kind or not self._graph.is_weight(source.tensor):
            return source
        return replace(source, kind=kind, operation=op)

    def _joins(self, op: Op, place: int) -> bool:
        return self._graph.is_weight(op.inputs[place]) and not all(map(self._graph.is_weight, op.inputs))

    def _by_element(self, op: Op, now: Elements) -> Iterator[Elements]:
        """Element by element, with broadcasting; the channels of a norm are its second dimension."""
        name = op.base_name.rstrip("_")
        shape = now.tensor.shape
        coordinates = coordinates_of(now.at, shape)
        own: list[Tensor] | None
        for place, source in enumerate(op.inputs):
            if source.dtype == "bool" or (op.kind == "write" and name == "copy" and place == 0):
                continue
            if does(name, "pools"):
                own = [
                    c if a == b else torch.zeros_like(c)
                    for c, a, b in zip(coordinates, shape, source.shape, strict=False)
                ]
            elif op.base_name in _BY_CHANNEL and place:
                own = [coordinates[1]]
            else:
                own = _broadcast(coordinates, shape, source.shape)
            if own is None or len(own) != len(source.shape):
                continue
            kind = {"add": "b", "sub": "b", "mul": "norm", "div": "norm", "copy": "appended"}.get(name, "learned")
            kind = "norm" if does(name, "norms") else kind
            yield self._marked(op, now.taking(source, index_of(own, source.shape, len(now.at))), kind)

    def _pooled(self, op: Op, now: Elements) -> Iterator[Elements]:
        """Where positions were put together: what one of them holds. Of what hangs on all features none is followed."""
        source = op.inputs[0]
        if axes_rule(op.base_name) != "reduce" or "norm" in op.base_name:
            return
        places, dims = summed_places(op), self._graph.dimensions.of(source)
        if not self._features.isdisjoint(axis for place in places for axis in dims[place]):
            return
        coordinates = coordinates_of(now.at, now.tensor.shape)
        for place in places if len(now.tensor.shape) < len(source.shape) else ():
            coordinates.insert(place, torch.zeros_like(now.at))
        own = [torch.zeros_like(now.at) if place in places else c for place, c in enumerate(coordinates)]
        yield now.taking(source, index_of(own, source.shape, len(now.at)))

    def _gathered(self, op: Op, now: Elements) -> Iterator[Elements]:
        """Where elements were picked by a table of indices: by what it holds, where that was kept."""
        source, coordinates = op.inputs[0], coordinates_of(now.at, now.tensor.shape)
        indices = op.inputs[-1]
        if op.base_name == "index":
            places = [place for place, index in enumerate(op.args[1]) if index is not None]
        else:
            places = [0 if op.base_name == "embedding" else setting(op, 1, "dim", 0) % max(len(source.shape), 1)]
        if len(places) != 1 or indices.dtype == "bool":
            return
        place, rank = places[0], len(indices.shape)
        if op.base_name == "gather":
            own, place, rank = list(coordinates), place, 1
            picked = self._picked(indices, now.at)
        elif op.base_name == "embedding":
            picked, own = (
                self._picked(indices, index_of(coordinates[:rank], indices.shape, len(now.at))),
                [now.at, coordinates[-1]],
            )
            rank = 1
        else:
            picked = self._picked(indices, index_of(coordinates[place : place + rank], indices.shape, len(now.at)))
            own = list(coordinates)
        if picked is None and not self._features.isdisjoint(self._graph.dimensions.of(source)[place]):
            return  # which features they are nobody knows
        own[place : place + rank] = [torch.zeros_like(now.at) if picked is None else picked]
        if len(own) == len(source.shape):
            own[place] = own[place] % source.shape[place]
            yield self._marked(op, now.taking(source, index_of(own, source.shape, len(now.at))), "learned")

    def _picked(self, indices: TensorRef, at: Tensor) -> Tensor | None:
        if indices.id in self._recording.scalars:
            return torch.full_like(at, int(self._recording.scalars[indices.id]))
        kept: Tensor | None = self._recording.values.get(indices.id)
        return None if kept is None or kept.is_meta else kept.flatten().cpu()[at].long()

    def _factors(self, op: Op, now: Elements, ends: set[int]) -> Iterator[Elements]:
        """The factors of a product: the one whose rows are asked about, and the other where the features pass it."""
        coordinates = coordinates_of(now.at, now.tensor.shape)
        sources = product_sources(op, coordinates)
        if len(op.inputs) == 3:
            added = op.inputs[2] if op.base_name == "convolution" else op.inputs[0]
            by_channel = op.base_name == "convolution"
            own = [coordinates[1]] if by_channel else _broadcast(coordinates, now.tensor.shape, added.shape)
            if own is not None:
                yield self._marked(op, now.taking(added, index_of(own, added.shape, len(now.at))), "b")
        weights = [place for place, (tensor, _) in enumerate(sources) if self._graph.is_weight(tensor)]
        if now.kind or not weights:
            # Inside of what is made of parameters alone it is a product of two of them.
            for tensor, at in sources:
                yield now.taking(tensor, at)
            return
        (tensor, at), (other, behind) = sources[weights[-1]], sources[1 - weights[-1]]
        yield replace(now.taking(tensor, at), kind="W" if op.index in ends else "before", operation=op)
        if op.index not in ends:
            yield now.taking(other, behind)


def product_sources(op: Op, coordinates: Sequence[Tensor], inner: int | Tensor = 0) -> list[tuple[TensorRef, Tensor]]:
    """The two factors of a product, and where in each stands what gives the elements at these coordinates.

    Args:
        op: a matrix product or a convolution.
        coordinates: of elements of what it gives.
        inner: which of the products that are summed up.
    """
    k = inner if isinstance(inner, Tensor) else torch.full_like(coordinates[0], inner) if coordinates else None
    assert k is not None, "a product gives at least one number"
    if op.base_name == "convolution":
        source, weight = op.inputs[:2]
        zero = torch.zeros_like(k)
        group = coordinates[1] // (weight.shape[0] // setting(op, 8, "groups", 1))
        sizes = zip(coordinates[2:], source.shape[2:], op.output.shape[2:], strict=True)
        space = [c if before == after else zero for c, before, after in sizes]
        taken = [coordinates[0], group * weight.shape[1] + k, *space]
        row = [coordinates[1], k, *(zero for _ in weight.shape[2:])]
        return [(source, index_of(taken, source.shape)), (weight, index_of(row, weight.shape))]
    left, right = op.inputs[-2:]
    batch, rest = coordinates[:-2], coordinates[-2:]
    if op.base_name == "mv":
        return [(left, index_of([coordinates[0], k], left.shape)), (right, k)]
    if op.base_name == "dot":
        return [(left, k), (right, k)]
    return [
        (left, index_of([*batch, rest[0], k], left.shape)),
        (right, index_of([*batch, k, rest[1]], right.shape)),
    ]


def _has_no_gaps(tensor: TensorRef) -> bool:
    """Whether elements lie in memory one after the other in row-major order."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _address(tensor: TensorRef, at: Tensor) -> Tensor:
    """Where in its memory each element is."""
    if _has_no_gaps(tensor):
        return at + tensor.offset
    address = torch.full_like(at, tensor.offset)
    for coordinate, stride in zip(coordinates_of(at, tensor.shape), tensor.stride, strict=True):
        address = address + coordinate * stride
    return address


def _locate(tensor: TensorRef, address: Tensor) -> tuple[Tensor, Tensor]:
    """The elements of a tensor at these addresses, and which of the addresses are its; what the others get is void."""
    rest = address - tensor.offset
    inside = (rest >= 0) & (0 not in tensor.shape)
    if _has_no_gaps(tensor):
        return rest, inside & (rest < tensor.numel)
    at = torch.zeros_like(rest)
    for dim in sorted(range(len(tensor.shape)), key=lambda dim: (-tensor.stride[dim], -tensor.shape[dim])):
        size, stride = tensor.shape[dim], tensor.stride[dim]
        if size > 1 and stride > 0:
            coordinate = rest.floor_divide(stride).clamp(0, size - 1)
            rest = rest - coordinate * stride
            at = at + coordinate * prod(tensor.shape[dim + 1 :])
    return at, inside & (rest == 0)


def coordinates_in(tensor: TensorRef, places: Tensor) -> list[Tensor]:
    """The coordinates of elements of a parameter, given by where they are in its memory."""
    at, _ = _locate(replace(tensor, offset=0), places)
    return coordinates_of(at, tensor.shape)


def elements_at(
    tensor: TensorRef, coordinates: Sequence[Tensor], ids: Tensor, shape: Sequence[int] | None = None
) -> Elements:
    """The elements of a tensor at these coordinates, which may be in a shape that its dimensions are split to."""
    return Elements(tensor, index_of(coordinates, tensor.shape if shape is None else shape), ids)


def _broadcast(coordinates: Sequence[Tensor], shape: Sequence[int], own: Sequence[int]) -> list[Tensor] | None:
    """The coordinates in an operand; None where it does not have the shape of one."""
    if len(own) > len(shape):
        return None
    last = list(zip(coordinates, shape, strict=True))[len(shape) - len(own) :]
    if any(size not in (1, whole) for (_, whole), size in zip(last, own, strict=True)):
        return None
    return [torch.zeros_like(c) if size == 1 else c for (c, _), size in zip(last, own, strict=True)]
