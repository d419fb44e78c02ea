"""Find the roles of the tensors of a checkpoint from their names and shapes; nothing is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import SpecError
from ..files.attentions import Role, find_attentions
from ..files.checkpoint import Checkpoint
from ..reports.params import LikeModule, StoredAttention
from ..text import listed, plural, shown


@dataclass(frozen=True)
class FileRoles:
    """The roles of a file's tensors, from their names or from a run of a module."""

    attentions: tuple[StoredAttention, ...] = ()
    roles: Mapping[str, Role] = field(default_factory=dict)
    """By the names in the file."""
    notes: tuple[str, ...] = ()
    like: LikeModule | None = None


def roles_by_names(checkpoint: Checkpoint, num_heads: int | None, *, loads: bool = True) -> FileRoles:
    """Return the roles from names and shapes. Raises `SpecError` if no attention can have that many heads.

    `loads` says whether the shapes are those of the module that the file is for.
    """
    named = find_attentions(checkpoint.tensors, checkpoint.config, num_heads)
    attentions = [attention.stored for attention in named]
    if num_heads is not None:
        _require_head_count(attentions, num_heads, checkpoint.path)
    roles: dict[str, Role] = {}
    for attention in named:
        roles.update(attention.roles)
    uses_config = num_heads is None and bool(checkpoint.config)
    notes = _notes(attentions, uses_config=uses_config, loads=loads)
    return FileRoles(tuple(attentions), roles, tuple(notes))


def _require_head_count(attentions: Sequence[StoredAttention], num_heads: int, path: Path) -> None:
    """Raise `SpecError` if there are attentions, and none of them can have this number of heads."""
    allowed: set[int] = set()
    for stored in attentions:
        if stored.num_heads == num_heads:
            return
        allowed.update(stored.fits)
        if stored.num_heads is not None:
            allowed.add(stored.num_heads)
    if attentions:
        raise SpecError(f"num_heads {num_heads} does not fit the shapes in {shown(path)}. Use {_numbers(allowed)}.")


def _notes(attentions: Sequence[StoredAttention], *, uses_config: bool, loads: bool) -> Iterator[str]:
    """Yield sentences on where roles and head counts come from, and on the head counts that are unknown."""
    if not attentions:
        yield "No tensor has the name of an attention's projection, so their roles are unknown."
        return
    yield "Roles come from names and shapes; nothing was run."
    ambiguous = Counter[tuple[int, ...]]()
    impossible = 0
    for stored in attentions:
        if stored.fits:
            ambiguous[stored.fits] += 1
        elif stored.num_heads is None:
            impossible += 1
    for counts, number in ambiguous.items():
        attentions_of_them = plural(number, "attention")
        yield f"num_heads is not in the file: {_numbers(counts)} fit the shapes of {attentions_of_them}."
    if ambiguous:
        # A file of other shapes than the module's does not load with any number of heads.
        warning = "Each of these head counts loads without an error. " if loads else ""
        yield f"{warning}Give the right head count: --num-heads N."
    if uses_config and any(stored.num_heads for stored in attentions):
        yield "Head counts are from config.json, or the only ones that fit the shapes."
    if impossible:
        yield f"No number of heads fits the shapes of {plural(impossible, 'attention')}."


def _numbers(counts: set[int] | tuple[int, ...]) -> str:
    """Return head counts in words, from low to high: `3, 6, 15 and 30`."""
    return listed([str(count) for count in sorted(counts)])
