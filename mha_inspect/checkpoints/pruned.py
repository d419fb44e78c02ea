"""Find attentions of which a file has fewer heads than a module: heads were pruned before it was saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..text import first_few, plural, shown

if TYPE_CHECKING:
    from ..naming.parameter_words import ParameterRole
    from ..naming.projection import Projection

_MATRICES = {"W_q", "W_k", "W_v", "W_o"}
_BY_HEAD = _MATRICES | {"b_q", "b_k", "b_v"}
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
    by_head = {projection.part: projection for projection in projections if projection.part in _BY_HEAD}
    if not by_head.keys() >= _MATRICES:
        return None
    names = [name for projection in by_head.values() for name in projection.parameters]
    if len(set(names)) < len(by_head) or len(names) > len(by_head):
        return None  # several parts in one tensor, or a part in several
    heads, head_dim, *_ = by_head["W_q"].shape
    counts = {_kept(name, roles, expected, stored) for name in names}
    counts_of_module = {projection.shape[0] for projection in by_head.values()}
    kept = counts.pop()
    if counts or counts_of_module != {heads} or not 0 < kept < heads:
        return None
    return Pruned(module, tuple(names), kept, heads, head_dim)


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
    whole, shape = expected[name], stored[name]
    if len(pieces) < 2 or len(shape) != len(whole):
        return 0
    # With the same rows for all heads, these are columns: as in W_o.
    by_rows = len({piece.rows for piece in pieces}) > 1
    axis = 0 if by_rows else 1
    width, rest = divmod(whole[axis], len(pieces))
    if rest or not width:
        return 0
    kept, rest = divmod(shape[axis], width)
    others = shape[:axis] + shape[axis + 1 :]
    others_of_whole = whole[:axis] + whole[axis + 1 :]
    return kept if others == others_of_whole and not rest else 0


def with_kept_heads(role: ParameterRole, pruned: Pruned) -> ParameterRole:
    """Return the role of a tensor in the file: without the heads that it lacks."""
    return replace(role, heads=tuple(piece for piece in role.heads if piece.head < pruned.kept))


def pruned_notes(attentions: list[Pruned], label: str) -> Iterator[str]:
    """Yield a sentence for each number of heads that are left, with the attentions."""
    paths: dict[tuple[int, int, int], dict[str, None]] = defaultdict(dict)
    for attention in attentions:
        alike = paths[attention.kept, attention.heads, attention.head_dim]
        if attention.module:
            alike[shown(attention.module)] = None
    for (kept, heads, head_dim), modules in paths.items():
        where = f" in {first_few([*modules], 3)}" if modules else ""
        yield (
            f"The file has {plural(kept, 'head')} of {head_dim} features{where} where {label} has {heads}: "
            "heads were pruned. Prune the same heads of the module before loading, in transformers by "
            "config.pruned_heads."
        )
