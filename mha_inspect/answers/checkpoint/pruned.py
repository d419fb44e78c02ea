"""Find attentions of which a file has fewer heads than a module: heads were pruned before it was saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...text import first_few, plural, shown

if TYPE_CHECKING:
    from ...naming.parameter_words import ParameterRole
    from ...naming.projection import Projection

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
    if not shapes.keys() >= {*_MATRICES}:
        return None
    tensors = _tensor_of_each_part(projections)
    if tensors is None:
        return None
    counts = {shapes[part][0] for part in tensors}
    counts_in_file = {_kept(name, roles, expected, stored) for name in tensors.values()}
    if len(counts) > 1 or len(counts_in_file) > 1:
        return None
    (heads,), (kept,) = counts, counts_in_file
    if not 0 < kept < heads:
        return None
    return Pruned(module, tuple(tensors.values()), kept, heads, head_dim=shapes["W_q"][1])


def _tensor_of_each_part(projections: list[Projection]) -> dict[str, str] | None:
    """Return the parameter of each matrix and bias by head; None unless each is a parameter of its own."""
    tensors = {}
    for projection in projections:
        if projection.part in (*_MATRICES, *_BIASES):
            if len(projection.parameters) != 1:
                return None
            tensors[projection.part] = projection.parameters[0]
    are_distinct = len({*tensors.values()}) == len(tensors)
    return tensors if are_distinct else None


def _kept(
    name: str, roles: Mapping[str, ParameterRole], expected: Mapping[str, Shape], stored: Mapping[str, Shape]
) -> int:
    """Return the number of heads that a tensor of a file has; 0 if its shape is not that of some heads."""
    pieces = roles[name].heads if name in roles else ()
    if name not in stored or len(pieces) < 2:
        return 0
    whole, shape = expected[name], stored[name]
    # With the same rows for all heads, these are columns: as in W_o.
    axis = 1 if len({piece.rows for piece in pieces}) == 1 else 0
    if len(shape) != len(whole) or not _differs_only_in(axis, shape, whole):
        return 0
    width, rest = divmod(whole[axis], len(pieces))
    if rest or not width or shape[axis] % width:
        return 0
    return shape[axis] // width


def _differs_only_in(axis: int, shape: Shape, whole: Shape) -> bool:
    """Return whether two shapes have the same sizes in all other dimensions."""
    return shape[:axis] == whole[:axis] and shape[axis + 1 :] == whole[axis + 1 :]


def with_kept_heads(role: ParameterRole, pruned: Pruned) -> ParameterRole:
    """Return the role of a tensor in the file: without the heads that it lacks."""
    return replace(role, heads=tuple(piece for piece in role.heads if piece.head < pruned.kept))


def pruned_notes(attentions: list[Pruned], label: str) -> Iterator[str]:
    """Yield a sentence for each number of heads that are left, with the attentions."""
    groups: dict[tuple[int, int, int], list[str]] = {}
    for attention in attentions:
        sizes = attention.kept, attention.heads, attention.head_dim
        groups.setdefault(sizes, []).append(attention.module)
    for (kept, heads, head_dim), paths in groups.items():
        named = [shown(path) for path in dict.fromkeys(paths) if path]
        where = f" in {first_few(named, 3)}" if named else ""
        yield (
            f"The file has {plural(kept, 'head')} of {head_dim} features{where} where {label} has {heads}: "
            "heads were pruned. Prune the same heads of the module before loading, in transformers by "
            "config.pruned_heads."
        )
