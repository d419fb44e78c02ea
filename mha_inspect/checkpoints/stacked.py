"""Queries, keys and values that a file has in one tensor and a module in three, or the other way round.

    state["q_proj.weight"], state["k_proj.weight"], state["v_proj.weight"] = state.pop("in_proj_weight").chunk(3)

Names and shapes show it: the parts lie one after the other, whatever the number of heads is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..files.attentions import NamedAttention, find_attentions
from ..files.tensors import StoredTensor
from ..reports.params import HeadSlice
from ..text import first_few, listed, shown, span

_DIMS = ("rows", "columns")


@dataclass(frozen=True)
class Stacked:
    """One tensor, and the tensors of its parts on the other side."""

    packed: str
    """The name of the tensor."""
    blocks: tuple[HeadSlice, ...]
    """Where each part lies in it."""
    apart: tuple[str, ...]
    """The names of the tensors of the parts, in the same order."""
    axis: int
    """The dimension along which the parts lie."""
    is_vector: bool
    """Whether it is a bias."""

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The first and the last row of each part, or the columns if the parts lie side by side."""
        if self.axis == 0 or self.is_vector:
            return [block.rows for block in self.blocks]
        return [block.columns for block in self.blocks if block.columns is not None]

    @property
    def _along(self) -> str:
        """The last argument of a call along the dimension of the parts; empty for dimension 0."""
        return f", {self.axis}" if self.axis else ""

    def split_line(self) -> str:
        """Return the line that splits the tensor of a state dict: by `chunk(3)`, or `split([64, 32, 32])`."""
        sizes = []
        for start, stop in self.bounds:
            sizes.append(stop - start)
        cut = f"split({sizes}{self._along})"
        if len({*sizes}) == 1:
            cut = f"chunk({len(sizes)}{self._along})"
        entries = ", ".join(f"state[{_quoted(name)}]" for name in self.apart)
        return f"{entries} = state.pop({_quoted(self.packed)}).{cut}"

    def join_line(self) -> str:
        """Return the line that joins the tensors of a state dict."""
        entries = ", ".join(f"state.pop({_quoted(name)})" for name in self.apart)
        return f"state[{_quoted(self.packed)}] = torch.cat([{entries}]{self._along})"

    def words(self) -> str:
        """Return what the tensor is: `q, k and v stacked: rows 0–31, 32–63, 64–95`."""
        letters = listed([block.part[-1] for block in self.blocks])
        way = "side by side" if self.axis else "stacked"
        unit = _DIMS[self.axis]
        if self.is_vector:
            unit = "elements"
        bounds = ", ".join(map(span, self.bounds))
        return f"{letters} {way}: {unit} {bounds}"


def _quoted(name: str) -> str:
    written = shown(name).replace('"', "'")
    return f'"{written}"'


def find_stacked(packed: Mapping[str, StoredTensor], apart: Mapping[str, StoredTensor]) -> list[Stacked]:
    """Return the tensors of one side whose parts are tensors of the other side, matrices first.

    Attentions are paired by their paths. A tensor that both sides have is none.
    """
    by_path = {attention.stored.module: attention for attention in find_attentions(apart, {}, None)}
    result: list[Stacked] = []
    for attention in find_attentions(packed, {}, None):
        of_parts = by_path.get(attention.stored.module)
        if of_parts is None:
            continue
        for stacked in _of_attention(attention, of_parts):
            if stacked.packed in apart or not packed.keys().isdisjoint(stacked.apart):
                continue
            shapes = [apart[name].shape for name in stacked.apart]
            if shapes == [_shape(block) for block in stacked.blocks]:
                result.append(stacked)
    return sorted(result, key=lambda stacked: stacked.is_vector)


def _of_attention(attention: NamedAttention, of_parts: NamedAttention) -> Iterator[Stacked]:
    """Yield the tensors with several parts, each of which is a tensor in the same layout on the other side."""
    singles: dict[tuple[str, int], str] = {}
    for name, role in of_parts.roles.items():
        singles[role.part, role.axis] = name
    for name, role in attention.roles.items():
        apart: list[str] = []
        for block in role.blocks:
            part = block.part, role.axis
            if part in singles:
                apart.append(singles[part])
        if len(apart) < 2 or len(apart) < len(role.blocks):
            continue
        is_vector = role.blocks[0].columns is None
        yield Stacked(name, role.blocks, tuple(apart), role.axis, is_vector=is_vector)


def _shape(block: HeadSlice) -> tuple[int, ...]:
    """Return the sizes of a part: `rows columns` of a matrix, `rows` of a bias."""
    start, stop = block.rows
    if block.columns is None:
        return (stop - start,)
    left, right = block.columns
    return stop - start, right - left


def stacked_notes(to_split: Sequence[Stacked], to_join: Sequence[Stacked], label: str) -> Iterator[str]:
    """Yield how to split the tensors of a file, and how to join them, with the line for the first."""
    for first in to_split[:1]:
        packed = shown(first.packed)
        names = listed([shown(name) for name in first.apart])
        likewise = _likewise(to_split[1:])
        line = first.split_line()
        yield f"{packed} is {first.words()}; {label} has {names}.{likewise} To split it: {line}"
    for first in to_join[:1]:
        packed = shown(first.packed)
        likewise = _likewise(to_join[1:])
        line = first.join_line()
        yield f"{packed} of {label} is {first.words()}.{likewise} To join them: {line}"


def _likewise(further: Sequence[Stacked]) -> str:
    """Return the sentence on further tensors: ` Likewise in_proj_bias.`; empty without any."""
    names = [shown(stacked.packed) for stacked in further]
    return f" Likewise {first_few(names, 3)}." if names else ""
