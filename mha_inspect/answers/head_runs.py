"""One head count, run: once as it is, and looked into, whole or at a few queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..call.call import explaining
from ..call.load import Layer
from ..errors import InputError
from ..naming.canonical import returned_content
from ..naming.subject import Subject
from ..record.arguments import changed, first_tensor, tensors_in
from ..record.rounding import beside, rounding_error
from ..reports.common import Verdict
from .look import Look, WiderRun, in_dtype, run_in_dtype


class HeadRun:
    """One head count: what it returns, and looks inside as they are asked for."""

    def __init__(self, num_heads: int, own: Subject, like: HeadRun | None = None, *, whole: bool = False) -> None:
        """`like` is the baseline, which has found how to cut the arguments; with `whole` they are not cut."""
        self.num_heads, self.own = num_heads, own
        self._looks: dict[bool, Look] = {}
        """Of all there is, and of a part."""
        self._wider = WiderRun(own)
        self._copies: dict[torch.dtype, Subject] = {}
        self.layout: Layout | None = None
        if not whole:
            self.layout = self._found_layout() if like is None else like.layout

    @property
    def is_known(self) -> bool:
        """Whether nothing but its attention hangs on the head count, which nobody knows of a module of the user's."""
        return isinstance(self.own, Layer)

    @property
    def module(self) -> nn.Module:
        """The module."""
        return self.own.module

    @property
    def label(self) -> str:
        """What reports call it."""
        return self.own.name

    @cached_property
    def output(self) -> Tensor:
        """What its one run returned first, as it lays that out."""
        if self.layout is None or True in self._looks:
            return first_tensor(self.look().run.returned).detach()
        with self._explaining():
            return self._plain(self.own)

    @cached_property
    def output_floor(self) -> float:
        """The rounding error of the whole output, measured against the same computation in another dtype."""
        if self.layout is None:
            return self.look().output_floor()
        dtype, unit = beside(getattr(torch, self.nearest.dtype))
        try:
            other = run_in_dtype(self.label, dtype, lambda: self._plain(self._copy(dtype)))
        except InputError:
            self.nearest.measured_against, unit = "half a digit", 1.0
            other = self._plain(self.own.shaken())
        return rounding_error(self.output, other) * unit

    def _plain(self, own: Subject) -> Tensor:
        with torch.no_grad(), own.apart() as one:
            return first_tensor(one.plain()).detach()

    def _copy(self, dtype: torch.dtype) -> Subject:
        """The whole subject in another dtype."""
        if dtype not in self._copies:
            self._copies[dtype] = in_dtype(self.label, self.own.copied, dtype)
        return self._copies[dtype]

    def look(self, *, whole: bool = True) -> Look:
        """Return the stages; else those of a few positions of a few sequences, unless the arguments are not cut."""
        layout = None if whole else self.layout
        if (layout is None) not in self._looks:
            own = self.own if layout is None else cut(self.own, layout)
            look = Look(own, wider=self._wider, copied=lambda dtype: self._copy(dtype).with_arguments_of(own, dtype))
            with self._explaining():
                _ = look.run
            self._looks[layout is None] = look
        return self._looks[layout is None]

    def _explaining(self) -> AbstractContextManager[None]:
        """Run it inside: a target's error is raised with how it was built."""
        return explaining(self.own, f" with num_heads {self.num_heads}")

    @property
    def nearest(self) -> Look:
        """The look that costs least: what it was built of can be seen in any."""
        return self.look(whole=False)

    def forget(self) -> None:
        """Let go of what was looked at."""
        self._looks.clear()
        self._copies.clear()

    @cached_property
    def by_query(self) -> Tensor | None:
        """The output as `batch query embed`; None where it has other axes."""
        look = self.nearest
        content = returned_content(look.run, self.output)
        if content is not None:
            return content
        # Of a model the output has features of its own, laid out as its attention is all the same.
        weights = look.get(len(look.attentions) - 1, "weights")
        rows = None if weights is None else (weights.shape[0], weights.shape[2])
        if self.layout is not None and self.layout.batch == 0:
            rows = (self.layout.rows, self.layout.first.shape[1])
        return self.output if self.output.shape[:2] == rows else None

    def _found_layout(self) -> Layout | None:
        """How the arguments are laid out, as a run of a cut shows; None where that saves little, or cannot be."""
        for layout in layouts_of(self.own):
            self.layout = layout
            try:
                look = self.nearest
            except Exception:  # whatever somebody's forward may raise at sizes that nobody asked for
                continue
            weights = look.get(0, "weights") if look.attentions else None
            rows = min(layout.rows, ROWS), min(layout.first.shape[layout.length], POSITIONS)
            if weights is not None and (weights.shape[0], weights.shape[2]) == rows:
                return layout
            self._looks.clear()
        return None


def overall(verdicts: Sequence[Verdict | None]) -> Verdict:
    """Return `differs` where one does, `same` where all are."""
    return "differs" if "differs" in verdicts else "inconclusive" if "inconclusive" in verdicts else "same"


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
    first: Tensor

    def is_laid_out_so(self, tensor: Tensor) -> bool:
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


def cut(own: Subject, layout: Layout) -> Subject:
    """Return the subject with the first positions of its first sequences alone."""
    rows = min(ROWS, layout.rows)

    def short(tensor: Tensor, dim: int) -> Tensor:
        return tensor.narrow(dim, 0, min(POSITIONS, tensor.shape[dim]))

    def part_of(value: Any) -> Any:
        """Cut a tensor; anything else stays."""
        if not isinstance(value, Tensor):
            return value
        if layout.is_laid_out_so(value):
            value = value if layout.batch is None else value.narrow(layout.batch, 0, rows)
            return short(value, layout.length).contiguous()
        # A mask: its sizes tell its dimensions, for there are not as many sequences as positions.
        for dim, size in enumerate(value.shape):
            if size in layout.lengths:
                value = short(value, dim)
            elif dim == 0 and size % layout.rows == 0 and (size == layout.rows or value.dim() == 3):
                value = value.narrow(0, 0, size // layout.rows * rows)  # for every head of every sequence
        return value.contiguous()

    args, kwargs = changed((own.args, own.kwargs), part_of)
    return replace(own, args=args, kwargs=kwargs)
