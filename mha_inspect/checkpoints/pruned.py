"""Find attentions of which a file has fewer heads than a module: heads were pruned before it was saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..text import first_few, plural, shown

if TYPE_CHECKING:
    from ..naming.parameter_words import ParameterRole
    from ..naming.projection import Projection

_MATRICES = ("W_q", "W_k", "W_v", "W_o")
_BIASES = ("b_q", "b_k", "b_v")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pruned:
    """An attention of a module, and the heads of it that a file has."""

    module: str
    """The path of the attention."""
    parameters: tuple[str, ...]
    """The names in the module of the tensors that have fewer heads in the file."""
    kept: int
    """The number of heads in the file."""
    heads: int
    """The number of heads in the module."""
    head_dim: int
    """The number of features of a query head."""


def pruned_in(
    module: str,
    projections: list[Projection],
    roles: Mapping[str, ParameterRole],
    expected: Mapping[str, Shape],
    stored: Mapping[str, Shape],
) -> Pruned | None:
    """Return the heads of an attention that a file has: fewer than the module, and equally many in every tensor.

    Args:
        module: the path of the attention.
        projections: its matrices and biases.
        roles: the role of each parameter of the module.
        expected: the shape of each parameter of the module.
        stored: the shape that the file has instead, of those parameters that have another there.
    """
    shapes = {projection.part: projection.shape for projection in projections}
    if not shapes.keys() >= set(_MATRICES):
        return None
    tensors = _tensor_of_each_part(projections)
    if tensors is None:
        return None
    heads = shapes["W_q"][0]
    kept = _kept(tensors["W_q"], roles, expected, stored)
    if not 0 < kept < heads:
        return None
    for part, name in tensors.items():
        if shapes[part][0] != heads:
            return None
        if _kept(name, roles, expected, stored) != kept:
            return None
    return Pruned(
        module=module,
        parameters=tuple(tensors.values()),
        kept=kept,
        heads=heads,
        head_dim=shapes["W_q"][1],
    )


def _tensor_of_each_part(projections: list[Projection]) -> dict[str, str] | None:
    """Return the parameter of each matrix and bias by head; None unless each is a parameter of its own."""
    tensors = {}
    for projection in projections:
        if projection.part not in _MATRICES and projection.part not in _BIASES:
            continue
        if len(projection.parameters) != 1:
            return None
        tensors[projection.part] = projection.parameters[0]
    if len(set(tensors.values())) < len(tensors):
        return None
    return tensors


def _kept(
    name: str,
    roles: Mapping[str, ParameterRole],
    expected: Mapping[str, Shape],
    stored: Mapping[str, Shape],
) -> int:
    """Return the number of heads that a tensor of a file has; 0 if its shape is not that of some heads."""
    if name not in stored or name not in roles:
        return 0
    pieces = roles[name].heads
    if len(pieces) < 2:
        return 0
    whole = expected[name]
    shape = stored[name]
    # With the same rows for all heads, these are columns: as in W_o.
    are_columns = len({piece.rows for piece in pieces}) == 1
    axis = int(are_columns)
    if len(shape) != len(whole) or not _differs_only_in(axis, shape, whole):
        return 0
    width, rest = divmod(whole[axis], len(pieces))
    if rest or not width:
        return 0
    kept, rest = divmod(shape[axis], width)
    if rest:
        return 0
    return kept


def _differs_only_in(axis: int, shape: Shape, whole: Shape) -> bool:
    """Return whether two shapes have the same sizes in all other dimensions."""
    return shape[:axis] == whole[:axis] and shape[axis + 1 :] == whole[axis + 1 :]


def with_kept_heads(role: ParameterRole, pruned: Pruned) -> ParameterRole:
    """Return the role of a tensor in the file: without the heads that it lacks."""
    heads = tuple(piece for piece in role.heads if piece.head < pruned.kept)
    return replace(role, heads=heads)


@dataclass(frozen=True)
class _Pruning:
    """Numbers of heads that several attentions share."""

    kept: int
    heads: int
    head_dim: int


def pruned_notes(attentions: list[Pruned], label: str) -> Iterator[str]:
    """Yield a sentence for each number of heads that are left, with the attentions."""
    paths_by_pruning: dict[_Pruning, list[str]] = {}
    for attention in attentions:
        pruning = _Pruning(attention.kept, attention.heads, attention.head_dim)
        paths = paths_by_pruning.setdefault(pruning, [])
        if attention.module and attention.module not in paths:
            paths.append(attention.module)
    for pruning, paths in paths_by_pruning.items():
        where = ""
        if paths:
            where = f" in {first_few(list(map(shown, paths)), 3)}"
        kept = plural(pruning.kept, "head")
        yield (
            f"The file has {kept} of {pruning.head_dim} features{where} where {label} has {pruning.heads}: "
            "heads were pruned. Prune the same heads of the module before loading, in transformers by "
            "config.pruned_heads."
        )
