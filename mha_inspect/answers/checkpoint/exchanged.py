"""Find queries, keys and values that a file has under each other's names, e.g. after a wrong split of one tensor.

    q, v, k = in_proj_weight.chunk(3)    # q, k, v

Each part of the left is compared with each part of the right, whatever tensors they are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...files.attentions import NamedAttention
from ...files.tensors import StoredTensor
from ...text import first_few, listed, shown
from .head_numbers import numbers_of

_LETTERS = "qkv"


@dataclass(frozen=True)
class Exchange:
    """Parts of one kind that are each other's on the other side."""

    module: str
    """The path of the attention on the left."""
    moves: tuple[tuple[str, str], ...]
    """Pairs of a part on the left, and the part on the right that is equal to it: `("W_k", "W_v")`."""
    names: frozenset[str]
    """The tensors of these parts on the left."""
    others: frozenset[str]
    """The tensors of these parts on the right."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts on the left."""
        return tuple(part for part, _ in self.moves)

    def words(self) -> str:
        """Return which parts are exchanged: `k and v are exchanged`."""
        return f"{listed([part[-1] for part in self.parts])} are exchanged"


def as_one_head(attention: NamedAttention) -> NamedAttention:
    """Return an attention with each part as one head: a comparison of whole parts needs no head count."""
    roles = {name: replace(role, heads=role.blocks) for name, role in attention.roles.items()}
    return replace(attention, roles=roles)


def find_exchanged(
    attention: NamedAttention,
    other: NamedAttention,
    left: Mapping[str, StoredTensor],
    right: Mapping[str, StoredTensor],
) -> list[Exchange]:
    """Return the exchanged parts of two attentions, for their matrices and for their biases."""
    sides = as_one_head(attention), as_one_head(other)
    found = []
    for kind in "Wb":
        parts = [f"{kind}_{letter}" for letter in _LETTERS]
        ours, theirs = (_numbers(side, tensors, parts) for side, tensors in zip(sides, (left, right), strict=True))
        moves = tuple(_moves(ours, theirs))
        if moves:
            moved = ({part for part, _ in moves}, {part for _, part in moves})
            names, others = (_tensors(side, which) for side, which in zip(sides, moved, strict=True))
            found.append(Exchange(attention.stored.module, moves, names, others))
    return found


def _numbers(attention: NamedAttention, tensors: Mapping[str, StoredTensor], parts: list[str]) -> dict[str, Tensor]:
    """Return the numbers of these parts, with the features of the heads first."""
    roles = {name: role for name, role in attention.roles.items() if any(piece.part in parts for piece in role.heads)}
    return {part: numbers[0] for part, numbers in numbers_of(roles, tensors).items() if part in parts}


def _tensors(attention: NamedAttention, parts: Iterable[str]) -> frozenset[str]:
    wanted = {*parts}
    return frozenset(
        name for name, role in attention.roles.items() if any(piece.part in wanted for piece in role.heads)
    )


def _moves(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield each part that is not the same on both sides, with the part that it is, if these are the same parts."""
    differing = [part for part in ours if part in theirs and not _is_same(ours[part], theirs[part])]
    moves = []
    for part in differing:
        equal = [other for other in differing if other != part and _is_same(ours[part], theirs[other])]
        if len(equal) == 1:
            moves.append((part, equal[0]))
    if {part for part, _ in moves} == {part for _, part in moves}:
        yield from moves


def _is_same(left: Tensor, right: Tensor) -> bool:
    """Return whether two parts have the same numbers, within the rounding of the coarser dtype."""
    if left.shape != right.shape:
        return False
    floats = [torch.finfo(side.dtype).eps for side in (left, right) if side.dtype.is_floating_point]
    step = max(floats, default=0.0)
    first = slice(0, 1)  # most parts differ there, and need no copy of the rest
    if not torch.allclose(left[first].double(), right[first].double(), rtol=step, atol=0, equal_nan=True):
        return False
    return torch.allclose(left.double(), right.double(), rtol=step, atol=0, equal_nan=True)


def exchange_sentences(exchanged: Iterable[Exchange]) -> Iterator[str]:
    """Yield a sentence for each exchange, with the attentions that have it."""
    modules: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for each in exchanged:
        modules.setdefault(each.moves, []).append(each.module)
    for moves, paths in modules.items():
        letters = listed([part[-1] for part, _ in moves])
        named = [shown(path) for path in paths if path]
        where = f" in {first_few(named, 3)}" if named else ""
        equal = listed([f"{part} on the left is {other} on the right" for part, other in moves])
        yield f"{letters[0].upper()}{letters[1:]} are exchanged{where}: {equal.replace(' and ', ', and ')}."
