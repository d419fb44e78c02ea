"""The matrices and biases of an attention, and the place of each head's part in the parameters of its module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from ..graph.indices import Indices
from ..record.ops import Named, TensorRef
from .placement import Placement, placement_of, places_along

_FURTHER = ("beside", "joined W")
"""Kinds of use of a projection other than the nearest one."""
Content = Callable[[str], Tensor]
"""A function from the name of a parameter to its tensor."""


@dataclass(frozen=True, eq=False)
class Part:
    """One parameter's part of a matrix, bias, or other numbers of one side of an attention."""

    kind: str
    """`W` and `b` for the projection, `joined W` and `joined b` for that of further tokens, `before` and `beside` for
    another projection, `absorbed` for that of shared keys or values by head, `gate` for what queries, keys or values
    are multiplied by, `norm` and `norm before` for a factor after or before the projection, `shift` and `shift before`
    for what is added there, `filter` and `filter before` for a convolution of each channel by itself, `appended` and
    `prepended` for a further key or value, `factor`, `added factor` and `computed` for a parameter that the
    matrix is computed from, by a product of matrices, by one that is added, or by other functions of all elements,
    `learned` for anything else."""
    letter: str
    """`q`, `k`, `v` or `o`; `g` for a gate of the contexts."""
    parameter: Named
    heads: dict[int, Indices]
    """Head to the place of each of its features in the memory of the parameter; -1 for a feature outside it."""
    is_shared: bool = False
    """Whether heads have elements in common: then the elements belong to no single head."""
    inner: tuple[int, int] | None = None
    """Count of each feature's numbers in a matrix (its inputs; for W_o its outputs), and the step from one to the next;
    None for a single number per feature, or if it could not be determined."""
    reads: dict[int, int] | None = None
    """Head to the first input feature that it reads; None if every head reads all of them."""
    width: int = 0
    """Number of input features, including those that a head does not read."""
    taps: int = 0
    """Number of its last dimensions that count the taps of a convolution."""
    moved: bool = True
    """Whether the numbers are used unchanged: at most viewed, copied or cast."""

    @property
    def name(self) -> str:
        """`W_q`, `b_q`, or `bias_k` of a learned key; empty for other kinds."""
        kind = {"appended": "bias", "prepended": "bias", "W": "W", "b": "b"}.get(self.kind, "")
        return f"{kind}_{self.letter}" if kind else ""

    @cached_property
    def placement(self) -> Placement:
        """Where its heads lie along the dimensions of the parameter."""
        tensor = self.parameter.tensor
        rows = tuple((head, row.tobytes()) for head, row in self.heads.items())
        return placement_of(tensor.shape, tensor.stride, rows, self.inner, self.taps)

    @property
    def is_vector(self) -> bool:
        """Whether this is a matrix with a single dimension, which projects to one number."""
        return self.kind == "W" and len(self.parameter.tensor.shape) == 1


@dataclass(frozen=True, eq=False)
class Projection:
    """A matrix or bias of an attention, and its place in the parameters."""

    part: str
    """`W_q`, `W_k`, `W_v`, `W_o`, `b_q` to `b_o`; `bias_k` and `bias_v` for a learned key and value."""
    shape: tuple[int, ...]
    """`heads head_dim embed` of a matrix, also of W_o; `heads head_dim` of a bias, `embed` of b_o."""
    is_whole: bool
    """Whether the place of every feature is known and its numbers are used unchanged; false for weights that the
    forward computes from several parameters."""
    serves: tuple[tuple[int, ...], ...]
    """For each key/value head the query heads that use it; empty without shared heads."""
    parts: tuple[Part, ...]
    """The part of each parameter."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters: several if e.g. each head has its own."""
        return tuple(part.parameter.name for part in self.parts)

    def read(self, content_of: Content) -> Tensor:
        """Return a copy of the numbers by head, with zeros for the features that a head does not read.

        The parameters may be those of another module with the same layout.
        """
        numbers = content_of(self.parameters[0]).detach().new_zeros(self.shape)
        for piece in self._pieces(numbers):
            parameter = content_of(piece.parameter).detach()
            piece.numbers[piece.features] = parameter[piece.places]
        return numbers

    def write(self, content_of: Content, numbers: Tensor) -> None:
        """Copy numbers by head into the parameters; features that a head does not read are skipped."""
        for piece in self._pieces(numbers):
            parameter = content_of(piece.parameter).detach()
            parameter[piece.places] = piece.numbers[piece.features].to(parameter)

    def _pieces(self, numbers: Tensor) -> Iterator[_Piece]:
        """Yield the numbers of each head in each parameter."""
        for part in self.parts:
            for head, row in part.heads.items():
                by_head = numbers if len(self.shape) == 1 else numbers[head]
                features = np.flatnonzero(row >= 0)
                places = row[features]
                if part.inner is not None:
                    count, step = part.inner
                    start = 0 if part.reads is None else part.reads.get(head, 0)
                    by_head = by_head[:, start : start + count]
                    places = places[:, None] + step * np.arange(count)
                yield _Piece(
                    parameter=part.parameter.name,
                    numbers=by_head,
                    features=features,
                    places=coordinates(places, part.parameter.tensor),
                )


@dataclass(frozen=True, eq=False)
class _Piece:
    """The numbers of one head in one parameter."""

    parameter: str
    numbers: Tensor
    """A view of the numbers of the head, `head_dim embed` of a matrix."""
    features: Indices
    """The features that the parameter has."""
    places: tuple[Indices, ...]
    """The indices of these in the parameter, along each dimension."""


def coordinates(places: Indices, tensor: TensorRef) -> tuple[Indices, ...]:
    """Return the indices along each dimension of a parameter for these places in its memory."""
    return places_along(places, tensor.shape, tensor.stride)


def have_in_common(heads: dict[int, Indices]) -> bool:
    """Return whether two heads have elements in common."""
    if len(heads) < 2:
        return False
    rows = [np.unique(row[row >= 0]) for row in heads.values()]
    every = np.concatenate(rows)
    return len(np.unique(every)) < len(every)


def of_no_head(part: Part) -> Part:
    """Return a part of the output as belonging to no head."""
    if part.kind not in ("b", "joined b"):
        return replace(part, heads={}, is_shared=True)
    every = np.arange(part.parameter.tensor.numel)
    return replace(part, heads={0: every}, is_shared=False)


def with_projections_of_heads(parts: list[Part]) -> list[Part]:
    """Return the parts of one side, where projections of further heads are `W` as well.

    The first of several projections side by side is `W`, and gives its own heads only. Another one that gives heads
    that no other has is their matrix; one that adds to heads is not.
    """
    beside = _side_by_side(parts)
    kinds = {part.kind for part in beside}
    counts: Counter[int] = Counter()
    for part in beside:
        if part.inner is not None:
            counts.update(list(part.heads))
    if "W" not in kinds or max(counts.values(), default=0) != 1:
        return parts
    result: list[Part] = []
    for part in parts:
        is_further = part.kind != "W" and part in beside
        if is_further or part.kind == "joined b":
            result.append(_as_own(part))
        else:
            result.append(part)
    return result


def _side_by_side(parts: list[Part]) -> list[Part]:
    """Return the projections of heads that read equally many features: low-rank adapters read fewer."""
    beside: list[Part] = []
    widest = 0
    for part in parts:
        if part.heads and not part.is_shared and part.kind in ("W", *_FURTHER):
            beside.append(part)
            widest = max(widest, part.width)
    return [part for part in beside if part.inner is None or part.width == widest]


def _as_own(part: Part) -> Part:
    """Return a part of another projection as one of the matrix or bias of its heads."""
    is_bias = len(part.parameter.tensor.shape) == 1
    return replace(part, kind="b" if is_bias else "W")


def of_whole_rows(part: Part) -> Part:
    """Return a part of a factor `B` of `B @ A` with all its numbers of each feature, if it has rows of features."""
    tensor = part.parameter.tensor
    if not part.heads or len(tensor.shape) != 2:
        return part
    places = np.concatenate(list(part.heads.values()))
    along = coordinates(places, tensor)
    summed = [dim for dim, indices in enumerate(along) if not indices.any()]
    if len(summed) != 1:
        return part
    (dim,) = summed
    size = tensor.shape[dim]
    return replace(part, inner=(size, tensor.stride[dim]), width=size)


def merged(parts: Iterable[Part]) -> list[Part]:
    """Return one part per parameter and kind of use, with the heads of all turns."""
    by_use: dict[tuple[str, str], Part] = {}
    for part in parts:
        use = (part.parameter.name, part.kind)
        if use in by_use:
            by_use[use] = _together(by_use[use], part)
        else:
            by_use[use] = part
    return list(by_use.values())


def _together(first: Part, part: Part) -> Part:
    """Return two parts of one parameter as one, with the places of the first where both have a head."""
    heads = dict(sorted({**part.heads, **first.heads}.items()))
    reads = {**(part.reads or {}), **(first.reads or {})}
    is_shared = part.is_shared or first.is_shared or have_in_common(heads)
    return replace(first, heads=heads, reads=reads or None, is_shared=is_shared)
