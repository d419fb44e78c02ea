"""One dimension of a tensor as names, and axes where there is no name."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..graph.dimensions import Axis, Dim, resolve, size_of
from .roles import Group

Tokens = list[list[str | Axis]]
"""The dimensions of a tensor, each as names, and atoms where there is none."""


def name_dimension(dim: Dim, known: Sequence[Group]) -> list[str | Axis]:
    """A dimension as names, and atoms where there is none; `known` are the groups as they are resolved now.

    An axis that stands in several dimensions here, such as the height and width of an image, has a number to its name.
    """
    atoms = list(resolve(dim))
    tokens: list[str | Axis] = []
    while atoms:
        for name, group in known:
            run = tuple(atoms[: len(group)])
            if run != group and not (name.endswith("head_dim") and _are_all_of(run, group, known)):
                continue
            # A single query, or key, leaves no trace beside other axes: it may have got anywhere.
            if len(dim) == len(group) or name not in ("query", "key") or size_of(group) > 1:
                tokens.append(name)
                del atoms[: len(group)]
                break
        else:
            atom = atoms.pop(0)
            parts = (f"{name}_{group.index(atom) + 1}" for name, group in known if len(group) > 1 and atom in group)
            tokens.append(next(parts, atom) if atom.size > 1 else atom)
    return tokens


def _are_all_of(atoms: Sequence[Axis], group: Dim, known: Sequence[Group]) -> bool:
    """Whether these are the parts of an axis, whole and in order.

    What features that are turned in part are looked at apart for may leave another axis for one of their parts: it has
    the place and the size of that part, and is no part of anything else.
    """
    if len(atoms) != len(group) or not any(atom in group for atom in atoms):
        return False
    named = {atom for _, own in known for atom in own}
    pairs = zip(atoms, group, strict=True)
    return all(atom is own or (atom.size == own.size and atom not in named) for atom, own in pairs)


def has(dims: Tokens, name: str) -> bool:
    """Whether a name is there already, in one dimension or in several."""
    return any(isinstance(token, str) and (token == name or token.startswith(f"{name}_")) for d in dims for token in d)


def is_open(dim: list[str | Axis]) -> bool:
    """Whether nothing of a dimension has a name, and it is not of size one."""
    return not any(isinstance(token, str) for token in dim) and size_of_run(dim, (0, len(dim))) > 1


def unnamed(dim: list[str | Axis]) -> list[tuple[int, int]]:
    """Where atoms without a name stand side by side; those of size one tell nothing beside others."""
    runs: list[tuple[int, int]] = []
    for place, token in enumerate(dim):
        if isinstance(token, str):
            continue
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


def write_dimension(dim: list[str | Axis]) -> str:
    """One dimension of an einops pattern. Neighbours without a name are one number."""
    words: list[str] = []
    number = 1
    for token in [*dim, ""]:
        if isinstance(token, Axis):
            number *= token.size
            continue
        if number > 1 or (not token and not words):
            words.append(str(number))
        number = 1
        if token:
            words.append(token)
    return words[0] if len(words) == 1 else f"({' '.join(words)})"


def size_of_run(dim: Sequence[str | Axis], run: tuple[int, int]) -> int:
    """How many elements the axes without a name have there."""
    return prod(token.size for token in dim[run[0] : run[1]] if isinstance(token, Axis))
