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

    def split_line(self) -> str:
        """Return the line that splits the tensor of a state dict."""
        entries = ", ".join(map(_entry, self.apart))
        return f"{entries} = {_popped(self.packed)}.{self._cut()}"

    def join_line(self) -> str:
        """Return the line that joins the tensors of a state dict."""
        entries = ", ".join(map(_popped, self.apart))
        return f"{_entry(self.packed)} = torch.cat([{entries}]{self._along()})"

    def _cut(self) -> str:
        """Return the call that cuts the tensor into its parts: `chunk(3)`, or `split([64, 32, 32])`."""
        sizes = [stop - start for start, stop in self._bounds()]
        if min(sizes) == max(sizes):
            return f"chunk({len(sizes)}{self._along()})"
        return f"split({sizes}{self._along()})"

    def _along(self) -> str:
        """Return the last argument of a call along the dimension of the parts; empty for dimension 0."""
        if self.axis == 0:
            return ""
        return f", {self.axis}"

    def _bounds(self) -> list[tuple[int, int]]:
        """Return the first and the last row of each part, or the columns if the parts lie side by side."""
        bounds = []
        for block in self.blocks:
            if self.axis == 1 and block.columns is not None:
                bounds.append(block.columns)
            else:
                bounds.append(block.rows)
        return bounds

    def words(self) -> str:
        """Return what the tensor is: `q, k and v stacked: rows 0–31, 32–63, 64–95`."""
        letters = listed([block.part[-1] for block in self.blocks])
        way = "stacked"
        if self.axis == 1:
            way = "side by side"
        unit = _DIMS[self.axis]
        if self.is_vector:
            unit = "elements"
        spans = ", ".join(map(span, self._bounds()))
        return f"{letters} {way}: {unit} {spans}"


def _entry(name: str) -> str:
    """Return an entry of a state dict: `state["q_proj.weight"]`."""
    return f"state[{_quoted(name)}]"


def _popped(name: str) -> str:
    """Return the call that removes an entry of a state dict: `state.pop("q_proj.weight")`."""
    return f"state.pop({_quoted(name)})"


def _quoted(name: str) -> str:
    written = shown(name).replace('"', "'")
    return f'"{written}"'


def find_stacked(packed: Mapping[str, StoredTensor], apart: Mapping[str, StoredTensor]) -> list[Stacked]:
    """Return the tensors of one side whose parts are tensors of the other side, matrices first.

    Attentions are paired by their paths. A tensor that both sides have is none.
    """
    by_path = {}
    for attention in find_attentions(apart, {}, None):
        by_path[attention.stored.module] = attention
    result: list[Stacked] = []
    for attention in find_attentions(packed, {}, None):
        of_parts = by_path.get(attention.stored.module)
        if of_parts is None:
            continue
        for stacked in _of_attention(attention, of_parts):
            if _is_on_both_sides(stacked, packed, apart):
                continue
            if _has_shapes(stacked, apart):
                result.append(stacked)
    return sorted(result, key=lambda stacked: stacked.is_vector)


def _of_attention(attention: NamedAttention, of_parts: NamedAttention) -> Iterator[Stacked]:
    """Yield the tensors with several parts, each of which is a tensor in the same layout on the other side."""
    singles = {}
    for name, role in of_parts.roles.items():
        singles[role.part, role.axis] = name
    for name, role in attention.roles.items():
        names = []
        for block in role.blocks:
            single = singles.get((block.part, role.axis))
            if single is not None:
                names.append(single)
        if len(role.blocks) < 2 or len(names) != len(role.blocks):
            continue
        yield Stacked(
            packed=name,
            blocks=role.blocks,
            apart=tuple(names),
            axis=role.axis,
            is_vector=role.blocks[0].columns is None,
        )


def _is_on_both_sides(stacked: Stacked, packed: Mapping[str, object], apart: Mapping[str, object]) -> bool:
    """Return whether a side has the tensor as well as its parts."""
    if stacked.packed in apart:
        return True
    return not packed.keys().isdisjoint(stacked.apart)


def _has_shapes(stacked: Stacked, apart: Mapping[str, StoredTensor]) -> bool:
    """Return whether the tensors of the parts have the sizes of the parts."""
    shapes = [apart[name].shape for name in stacked.apart]
    return shapes == list(map(_shape, stacked.blocks))


def _shape(block: HeadSlice) -> tuple[int, ...]:
    """Return the sizes of a part: `rows columns` of a matrix, `rows` of a bias."""
    start, stop = block.rows
    if block.columns is None:
        return (stop - start,)
    left, right = block.columns
    return stop - start, right - left


def stacked_notes(to_split: Sequence[Stacked], to_join: Sequence[Stacked], label: str) -> Iterator[str]:
    """Yield how to split the tensors of a file, and how to join them, with the line for the first."""
    if to_split:
        first = to_split[0]
        names = listed(list(map(shown, first.apart)))
        likewise = _likewise(to_split[1:])
        yield (
            f"{shown(first.packed)} is {first.words()}; {label} has {names}.{likewise} "
            f"To split it: {first.split_line()}"
        )
    if to_join:
        first = to_join[0]
        likewise = _likewise(to_join[1:])
        yield f"{shown(first.packed)} of {label} is {first.words()}.{likewise} To join them: {first.join_line()}"


def _likewise(further: Sequence[Stacked]) -> str:
    """Return the sentence on further tensors: ` Likewise in_proj_bias.`; empty without any."""
    if not further:
        return ""
    names = [shown(stacked.packed) for stacked in further]
    return f" Likewise {first_few(names, 3)}."
