"""Queries, keys and values that a file has in one tensor and a module in three, or the other way round.

    state["q_proj.weight"], state["k_proj.weight"], state["v_proj.weight"] = state.pop("in_proj_weight").chunk(3)

Names and shapes show it: the parts lie one after the other, whatever the number of heads is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...files.attentions import NamedAttention, find_attentions
from ...files.tensors import StoredTensor
from ...reports.params import HeadSlice
from ...text import first_few, listed, shown, span

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
        return f"{self._apart()} = {_state(self.packed, pop=True)}.{self._cut()}"

    def join_line(self) -> str:
        """Return the line that joins the tensors of a state dict."""
        along = f", {self.axis}" if self.axis else ""
        return f"{_state(self.packed)} = torch.cat([{self._apart(pop=True)}]{along})"

    def _apart(self, *, pop: bool = False) -> str:
        return ", ".join(_state(name, pop=pop) for name in self.apart)

    def _cut(self) -> str:
        """Return the call that cuts the tensor into its parts."""
        sizes = [stop - start for start, stop in self._bounds()]
        along = f", {self.axis}" if self.axis else ""
        if len({*sizes}) == 1:
            return f"chunk({len(sizes)}{along})"
        return f"split({sizes}{along})"

    def _bounds(self) -> list[tuple[int, int]]:
        return [(block.columns if self.axis and block.columns else block.rows) for block in self.blocks]

    def words(self) -> str:
        """Return what the tensor is: `q, k and v stacked: rows 0–31, 32–63, 64–95`."""
        letters = listed([block.part[-1] for block in self.blocks])
        unit = "elements" if self.is_vector else _DIMS[self.axis]
        way = "side by side" if self.axis else "stacked"
        return f"{letters} {way}: {unit} {', '.join(map(span, self._bounds()))}"


def _state(name: str, *, pop: bool = False) -> str:
    written = shown(name).replace('"', "'")
    return f'state.pop("{written}")' if pop else f'state["{written}"]'


def find_stacked(packed: Mapping[str, StoredTensor], apart: Mapping[str, StoredTensor]) -> list[Stacked]:
    """Return the tensors of one side whose parts are tensors of the other side, matrices first.

    Attentions are paired by their paths. A tensor that both sides have is none.
    """
    found = list(_found(packed, apart))
    return sorted(found, key=lambda each: each.is_vector)


def _found(packed: Mapping[str, StoredTensor], apart: Mapping[str, StoredTensor]) -> Iterator[Stacked]:
    others = {attention.stored.module: attention for attention in find_attentions(apart, {}, None)}
    for attention in find_attentions(packed, {}, None):
        other = others.get(attention.stored.module)
        if other is not None:
            yield from _of_attention(attention, other, packed, apart)


def _of_attention(
    attention: NamedAttention,
    other: NamedAttention,
    packed: Mapping[str, StoredTensor],
    apart: Mapping[str, StoredTensor],
) -> Iterator[Stacked]:
    singles = {role.part: name for name, role in other.roles.items()}
    for name, role in attention.roles.items():
        parts = [block.part for block in role.blocks]
        if len(parts) < 2 or name in apart or not all(part in singles for part in parts):
            continue
        names = tuple(singles[part] for part in parts)
        shapes = [_shape(block) for block in role.blocks]
        is_same_layout = all(other.roles[single].axis == role.axis for single in names)
        if is_same_layout and not {*names} & packed.keys() and shapes == [apart[single].shape for single in names]:
            yield Stacked(name, role.blocks, names, role.axis, len(packed[name].shape) == 1)


def _shape(block: HeadSlice) -> tuple[int, ...]:
    bounds = [bound for bound in (block.rows, block.columns) if bound is not None]
    return tuple(stop - start for start, stop in bounds)


def stacked_notes(to_split: Sequence[Stacked], to_join: Sequence[Stacked], label: str) -> Iterator[str]:
    """Yield how to split the tensors of a file, and how to join them, with the line for the first."""
    if to_split:
        first, more = to_split[0], _likewise([each.packed for each in to_split[1:]])
        names = listed([shown(name) for name in first.apart])
        yield (
            f"{shown(first.packed)} is {first.words()}; {label} has {names}.{more} To split it: {first.split_line()}"
        )
    if to_join:
        first, more = to_join[0], _likewise([each.packed for each in to_join[1:]])
        yield f"{shown(first.packed)} of {label} is {first.words()}.{more} To join them: {first.join_line()}"


def _likewise(names: Collection[str]) -> str:
    return f" Likewise {first_few([shown(name) for name in names], 3)}." if names else ""
