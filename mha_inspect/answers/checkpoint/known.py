"""What is known of the tensors of a checkpoint, by their names or by a run of the module that they are for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...files.attentions import Role
from ...reports.params import HeadSlice, LikeModule, StoredAttention

if TYPE_CHECKING:
    from .heads import Numbers


@dataclass(frozen=True)
class Known:
    """What the tensors are for."""

    attentions: tuple[StoredAttention, ...] = ()
    roles: Mapping[str, Role] = field(default_factory=dict)
    """By the names in the file."""
    heads: Mapping[str, tuple[HeadSlice, ...]] = field(default_factory=dict)
    """By name, where rows and columns of heads were asked for."""
    notes: tuple[str, ...] = ()
    reading: tuple[Callable[[], Numbers], ...] = ()
    """What reads each attention by head."""
    like: LikeModule | None = None

    def within(self, names: Collection[str], note: str) -> Known:
        """Return what is known of some of the tensors, with a note that says which."""
        both = zip(self.attentions, self.reading, strict=True)
        kept = [(own, read) for own, read in both if any(name in names for name in own.parameters)]
        attentions, reading = tuple(own for own, _ in kept), tuple(read for _, read in kept)
        return replace(self, attentions=attentions, reading=reading, notes=(*self.notes, note))
