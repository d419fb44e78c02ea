"""A cut of a subject: the same module on a few rows and positions of its arguments, to look inside at little cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..naming.subject import Subject
from ..record.arguments import changed, tensors_in

ROWS, POSITIONS = 3, 32
"""Sequences and positions that are left: more than one sequence, for a size of one leaves no trace in a view."""
_WORTH_IT = 4
"""A cut that leaves more than this share of all positions saves too little."""
_MANY = 256
"""Positions of all sequences together, below which the whole is looked at as quickly as a part."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Where sequences and their positions are in the arguments of a forward."""

    batch: int | None
    """Dimension of the first tensor in which the sequences are; None where there is one without a dimension."""
    length: int
    """Dimension of the first tensor in which the positions are."""
    rows: int
    """How many sequences there are."""
    lengths: frozenset[int]
    """How many positions the tensors have that are laid out as the first one."""
    first: torch.Tensor

    def is_laid_out_so(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the same dimensions as the first one."""
        same = tensor.dim() == self.first.dim() and tensor.is_floating_point() == self.first.is_floating_point()
        return same and (self.batch is None or tensor.shape[self.batch] == self.rows)


def layouts_of(own: Subject) -> Iterator[Layout]:
    """Yield the ways in which the arguments may be laid out, the usual one first; none where a cut saves little.

    Which one holds is seen in a run of the cut: its attention must have as many queries as were left.
    """
    tensors = [tensor for _, tensor in tensors_in((own.args, own.kwargs))]
    if not tensors:
        return
    first = tensors[0]
    vectors = first.dim() - int(first.is_floating_point())  # token ids have no features
    for batch, length in {2: ((0, 1), (1, 0)), 1: ((None, 0),)}.get(vectors, ()):
        rows = 1 if batch is None else first.shape[batch]
        layout = Layout(batch, length, rows, frozenset(), first)
        lengths = frozenset(tensor.shape[length] for tensor in tensors if layout.is_laid_out_so(tensor))
        left = min(rows, ROWS) * min(first.shape[length], POSITIONS)
        every = rows * first.shape[length]
        if every >= _MANY and left * _WORTH_IT <= every and not (batch is not None and rows in lengths):
            yield replace(layout, lengths=lengths)


def cut(own: Subject, layout: Layout, row: int = 0, *, few: bool = False) -> Subject:
    """Return the subject with a few of its sequences, from about `row` on; with `few`, their first positions alone."""
    start = max(0, min(row, layout.rows - ROWS))
    cutter = _Cutter(layout, start, min(layout.rows, start + ROWS), few)
    args, kwargs = changed((own.args, own.kwargs), cutter.cut)
    return replace(own, args=args, kwargs=kwargs)


class _Cutter:
    def __init__(self, layout: Layout, start: int, stop: int, few: bool) -> None:
        self._layout, self._rows, self._few = layout, slice(start, stop), few

    def cut(self, tensor: Any) -> Any:
        """Cut a tensor; anything else stays."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        layout = self._layout
        if layout.is_laid_out_so(tensor):
            if layout.batch is not None:
                tensor = self._narrowed(tensor, layout.batch, self._rows)
            return self._short(tensor, layout.length).contiguous()
        # A mask: its sizes tell its dimensions, for there are not as many sequences as positions.
        for dim, size in enumerate(tensor.shape):
            if size in layout.lengths:
                tensor = self._short(tensor, dim)
            elif dim == 0 and size % layout.rows == 0 and (size == layout.rows or tensor.dim() == 3):
                each = size // layout.rows  # for every head of every sequence
                tensor = self._narrowed(tensor, 0, slice(self._rows.start * each, self._rows.stop * each))
        return tensor.contiguous()

    def _short(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return self._narrowed(tensor, dim, slice(0, POSITIONS)) if self._few else tensor

    def _narrowed(self, tensor: torch.Tensor, dim: int, kept: slice) -> torch.Tensor:
        whole = [slice(None)] * tensor.dim()
        whole[dim] = kept
        return tensor[tuple(whole)]
