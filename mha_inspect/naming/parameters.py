"""The projections of an attention: where in the parameters of a module each matrix and bias is, head by head.

Sorted by how far apart they lie in a parameter, the axes that count parts, heads and features are a pattern of einops,
and a head's weights are a view of the parameter, to read and to write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.places import coordinates_in
from ..reports.params import HeadSlice
from .named_run import NamedRun
from .parts import Part, parts_of

_PACKED = {"qkv": "qkv", "kv": "kv", "qk": "qk"}
"""What the axis is called that counts the parts in one parameter."""


@dataclass(frozen=True)
class View:
    """A matrix or bias by head, as the parameters of a module hold it."""

    shape: tuple[int, ...]
    """`heads head_dim embed` of a matrix, `heads head_dim` of a bias, `embed` of b_o."""
    pieces: tuple[tuple[Part, Tensor], ...]
    """What each parameter holds of it, and the parameter."""

    def read(self) -> Tensor:
        """Return a copy of the numbers by head, with zeros for the features that a head does not read."""
        numbers = self.pieces[0][1].new_zeros(self.shape)
        for own, features, memory, places in self._pieces(numbers):
            own[features] = memory[places]
        return numbers

    def write(self, numbers: Tensor) -> None:
        """Copy numbers by head into the parameters; what a head does not read has no place, and is left out."""
        for own, features, memory, places in self._pieces(numbers):
            memory[places] = own[features].to(memory)

    def _pieces(self, numbers: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Each head's numbers, which features of them a parameter holds, its memory, and where there these are."""
        for part, parameter in self.pieces:
            last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
            memory = parameter.detach().as_strided((last + 1,), (1,), parameter.storage_offset())
            for head, every in part.heads.items():
                own = numbers if len(self.shape) == 1 else numbers[head]
                features = (every >= 0).nonzero().flatten()
                places = every[features]
                if part.inner is not None:
                    reads = 0 if part.reads is None else part.reads.get(head, 0)
                    own = own[:, reads : reads + part.inner[0]]
                    places = places[:, None] + part.inner[1] * torch.arange(part.inner[0])
                yield own, features, memory, places


@dataclass(frozen=True, eq=False)
class Projection:
    """A matrix or bias of an attention, and where in the parameters it is."""

    attention: int
    """Which attention of the run, in the order in which they were computed."""
    part: str
    """`W_q`, `W_k`, `W_v`, `W_o`, `b_q` to `b_o`; `bias_k` and `bias_v` for a learned key and value."""
    shape: tuple[int, ...]
    """`heads head_dim embed` of a matrix, also of W_o; `heads head_dim` of a bias, `embed` of b_o."""
    is_whole: bool
    """Whether that is known of every feature, and the numbers there are used as they are: not so for weights that the
    forward makes of several parameters."""
    serves: tuple[tuple[int, ...], ...]
    """For each key/value head the query heads that use it, where heads share them; else empty."""
    parts: tuple[Part, ...]
    """What each parameter holds of it."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that hold it: several where each head has one of its own."""
        return tuple(part.parameter.name for part in self.parts)

    def view(self, module: nn.Module) -> View | None:
        """Return the numbers by head as this module holds them, to read and to write; None where not all is known.

        The module is the one that was run, or one whose parameters are laid out as there.
        """
        if not self.is_whole:
            return None
        return View(self.shape, tuple((part, module.get_parameter(part.parameter.name)) for part in self.parts))


def projections(run: NamedRun) -> tuple[Projection, ...]:
    """Return every matrix and bias of every attention of a run that parameters hold, with where each head's part is.

    Nothing is run again; the tensors of the run need not have been kept. A side that has no projection has none here.
    """
    found: list[Projection] = []
    for number, (finder, parts) in enumerate(parts_of(run)):
        by_name: dict[str, list[Part]] = {}
        for part in parts:
            if part.name and not (part.kind == "W" and len(part.parameter.tensor.shape) == 1):
                by_name.setdefault(part.name, []).append(part)
        for name, of_name in by_name.items():
            serves = finder.serves if name[-1] in "kv" else ()
            found.append(_projection(number, name, of_name, finder.num_heads(name[-1]), serves))
    return tuple(found)


def _projection(
    number: int, name: str, parts: list[Part], num_heads: int, serves: tuple[tuple[int, ...], ...]
) -> Projection:
    first, single = parts[0], name == "b_o"
    width = max((len(places) for part in parts for places in part.heads.values()), default=0)
    covered = torch.zeros(1 if single else num_heads, width, dtype=torch.long)
    for part in parts:
        for head, places in part.heads.items():
            if head < len(covered):
                covered[head, : len(places)] += places >= 0
    embed = first.width if first.inner is not None else 0
    shape = (width,) if single else (num_heads, width, embed) if first.kind == "W" else (num_heads, width)
    is_whole = (
        width > 0
        and bool((covered == 1).all())
        and all(head < len(covered) for part in parts for head in part.heads)
        and all(part.moved and (single or not part.is_shared or len(part.heads) == 1) for part in parts)
        and all((part.inner is not None) == (part.kind == "W") and part.width == first.width for part in parts)
    )
    return Projection(number, name, shape, is_whole, serves, tuple(parts))


def outside_of(part: Part) -> set[int]:
    """The dimensions of a matrix that are not of heads and their features."""
    if part.inner is None:
        return set()
    number, step = part.inner
    places = torch.tensor([0, (number - 1) * step])
    return {dim for dim, c in enumerate(coordinates_in(part.parameter.tensor, places)) if int(c[1]) != int(c[0])}


def axes_of(parts: Sequence[Part], words: dict[str, str], *, single: bool) -> list[str] | None:
    """Return the words of each dimension, `1` or empty for those of no head; None where no pattern says it.

    Args:
        parts: what the parameter holds, in the order in which it lies there.
        words: what the axes of heads and of features are called.
        single: whether it holds one head of several.
    """
    widths = {(len(part.heads), len(own)) for part in parts for own in part.heads.values()}
    if len(widths) != 1 or any(bool((own < 0).any()) for part in parts for own in part.heads.values()):
        return None
    shape = parts[0].parameter.tensor.shape
    table = torch.stack([torch.stack([part.heads[head] for head in sorted(part.heads)]) for part in parts])
    outside = outside_of(parts[0])
    packed = _PACKED.get("".join(part.letter for part in parts), "packed")
    names = (packed, words["heads"], words["head_dim"])
    every = coordinates_in(parts[0].parameter.tensor, table.flatten())
    found: list[Any] = []  # the names in each dimension, or an empty text
    told = 1
    for dim, size in enumerate(shape):
        if dim in outside:
            found.append("")
            continue
        index = every[dim].reshape(table.shape)
        axes = _sorted_axes(index, size)
        if axes is None:
            return None
        told *= size
        found.append([names[axis] for axis in axes])
    if told != table.numel():
        return None
    return _with_axes_of_one(found, table.shape, names, single)


def _sorted_axes(index: Tensor, size: int) -> list[int] | None:
    """The axes of a table that count an index from 0 to `size`, the slowest first; None where they do not."""
    corner = index.flatten()[0]
    steps = [int(index.select(axis, 1).flatten()[0] - corner) if n > 1 else 0 for axis, n in enumerate(index.shape)]
    grid = torch.zeros_like(index)
    for axis, (n, step) in enumerate(zip(index.shape, steps, strict=True)):
        grid = grid + (torch.arange(n) * step).reshape([-1 if other == axis else 1 for other in range(index.dim())])
    order = sorted((axis for axis, step in enumerate(steps) if step), key=lambda axis: -steps[axis])
    expected = 1
    for axis in reversed(order):
        if steps[axis] != expected:
            return None
        expected *= index.shape[axis]
    return order if expected == size and bool((grid == index).all()) else None


def _with_axes_of_one(
    dims: list[list[str] | str], sizes: Sequence[int], names: tuple[str, str, str], single: bool
) -> list[str]:
    """The words of each dimension, with axes of size one where others of their kind are."""
    large = [place for place, dim in enumerate(dims) if isinstance(dim, list) and dim]
    free = [place for place, dim in enumerate(dims) if isinstance(dim, list)]
    home = large[-1] if large else free[-1] if free else None
    if home is not None:
        own = dims[home]
        assert isinstance(own, list)
        if sizes[2] == 1:
            own.append(names[2])
        if sizes[1] == 1 and not single:
            own.insert(own.index(names[2]) if names[2] in own else len(own), names[1])
    words = []
    for dim in dims:
        if isinstance(dim, str):
            words.append(dim)
        else:
            words.append("1" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})")
    return words


def indices_of(part: Part, dim: int) -> dict[int, Tensor]:
    """Return for each head the indices of a dimension at which it has elements, in order."""
    tensor = part.parameter.tensor
    if dim in outside_of(part):
        return dict.fromkeys(part.heads, torch.arange(tensor.shape[dim]))
    return {head: _distinct(coordinates_in(tensor, own[own >= 0])[dim]) for head, own in part.heads.items()}


def _distinct(numbers: Tensor) -> Tensor:
    """In order, each once; those that are so already cost nothing."""
    return numbers if bool((numbers.diff() > 0).all()) else torch.unique(numbers)


def dimension_of(parts: Sequence[Part]) -> int | None:
    """The one dimension along which parts and heads lie; None where it is not one alone."""
    shape = parts[0].parameter.tensor.shape
    varying = []
    for dim in sorted(set(range(len(shape))) - outside_of(parts[0])):
        rows = [own for part in parts for own in indices_of(part, dim).values()]
        if any(not torch.equal(rows[0], own) for own in rows[1:]):
            varying.append(dim)
    if not varying:
        free = [dim for dim in range(len(shape)) if dim not in outside_of(parts[0]) and shape[dim] > 1]
        return free[0] if len(free) == 1 else None
    return varying[0] if len(varying) == 1 else None


def runs_of(indices: Tensor) -> list[tuple[int, int]]:
    """Indices as runs, the start included, the stop not."""
    own = _distinct(indices)
    if not len(own):
        return []
    if int(own[-1] - own[0]) == len(own) - 1:
        return [(int(own[0]), int(own[-1]) + 1)]
    breaks = (own.diff() != 1).nonzero().flatten() + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in torch.tensor_split(own, breaks.tolist())]


def slices_of(kind: str, parts: Sequence[Part]) -> tuple[HeadSlice, ...]:
    """The rows and columns of each head, where they are all of its elements."""
    shape = parts[0].parameter.tensor.shape
    large = [dim for dim, size in enumerate(shape) if size > 1] or [0]
    if kind == "W" and len(shape) == 2:
        large = [0, 1]
    if len(large) > 2:
        return ()
    found = []
    for part in parts:
        if part.is_shared or (part.letter == "o" and kind == "b"):
            continue
        name = part.name or f"{kind}_{part.letter}"
        indices = [indices_of(part, dim) for dim in range(len(shape))]
        for head, own in sorted(part.heads.items()):
            number = len(_distinct(own[own >= 0])) * (1 if part.inner is None else part.inner[0])
            if prod(len(of_dim[head]) for of_dim in indices) != number:
                return ()
            rows = runs_of(indices[large[0]][head])
            columns = runs_of(indices[large[1]][head]) if len(large) > 1 else [None]
            found += [HeadSlice(head, name, row, column) for row in rows for column in columns]
    return tuple(found)
