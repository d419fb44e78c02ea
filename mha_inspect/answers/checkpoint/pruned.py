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
    shapes = {each.part: each.shape for each in projections}
    tensors = {each.part: each.parameters for each in projections if each.part in (*_MATRICES, *_BIASES)}
    single = [names[0] for names in tensors.values() if len(names) == 1]
    if not {*_MATRICES} <= tensors.keys() or len({*single}) < len(tensors):
        return None
    counts = {shapes[part][0] for part in tensors}
    kept = {_kept(name, roles, expected, stored) for name in single}
    if len(counts) > 1 or len(kept) > 1:
        return None
    (heads,), (count,) = counts, kept
    if not 0 < count < heads:
        return None
    return Pruned(module, tuple(single), count, heads, shapes["W_q"][1])


def _kept(
    name: str, roles: Mapping[str, ParameterRole], expected: Mapping[str, Shape], stored: Mapping[str, Shape]
) -> int:
    """Return the number of heads that a tensor of a file has; 0 if its shape is not that of some heads."""
    pieces = roles[name].heads if name in roles else ()
    if name not in stored or len(pieces) < 2 or len(stored[name]) != len(expected[name]):
        return 0
    axis = int(len({piece.rows for piece in pieces}) == 1)
    if any(stored[name][dim] != size for dim, size in enumerate(expected[name]) if dim != axis):
        return 0
    width, rest = divmod(expected[name][axis], len(pieces))
    count, more = divmod(stored[name][axis], width) if width else (0, 1)
    return 0 if rest or more else count


def with_kept_heads(role: ParameterRole, pruned: Pruned) -> ParameterRole:
    """Return the role of a tensor in the file: without the heads that it lacks."""
    return replace(role, heads=tuple(piece for piece in role.heads if piece.head < pruned.kept))


def pruned_notes(found: list[Pruned], label: str) -> Iterator[str]:
    """Yield a sentence for each number of heads that are left, with the attentions."""
    groups: dict[tuple[int, int, int], list[str]] = {}
    for each in found:
        groups.setdefault((each.kept, each.heads, each.head_dim), []).append(each.module)
    for (kept, heads, head_dim), paths in groups.items():
        named = [shown(path) for path in dict.fromkeys(paths) if path]
        where = f" in {first_few(named, 3)}" if named else ""
        yield (
            f"The file has {plural(kept, 'head')} of {head_dim} features{where} where {label} has {heads}: "
            "heads were pruned. Prune the same heads of the module before loading, in transformers by "
            "config.pruned_heads."
        )
