"""Find queries, keys and values that a file has under each other's names, e.g. after a wrong split of one tensor.

    q, v, k = in_proj_weight.chunk(3)    # q, k, v

Each part of the left is compared with each part of the right, whatever tensors they are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..files.attentions import NamedAttention, Role
from ..text import first_few, listed, shown
from .head_numbers import numbers_of
from .tensor_pairs import is_same
from .two_files import AttentionPair, FileSide, TwoFiles

_KINDS = ({"W_q", "W_k", "W_v"}, {"b_q", "b_k", "b_v"})
Moves = tuple[tuple[str, str], ...]
"""Each part on the left with the part on the right that is equal to it: `W_k` and `W_v`."""


@dataclass(frozen=True)
class Exchange:
    """Parts of one kind that are each other's on the other side."""

    module: str
    """The path of the attention on the left."""
    moves: Moves
    left_names: frozenset[str]
    """The tensors of these parts on the left."""
    right_names: frozenset[str]
    """The tensors of these parts on the right."""

    @property
    def parts(self) -> set[str]:
        """The parts that change places."""
        return {left for left, _ in self.moves}

    def words(self) -> str:
        """Return which parts are exchanged: `k and v are exchanged`."""
        return f"{_letters(self.moves)} are exchanged"


def find_exchanged(pair: AttentionPair, files: TwoFiles) -> list[Exchange]:
    """Return the exchanged parts of two attentions, for their matrices and for their biases."""
    whole = pair.as_one_head()
    exchanges = []
    for kind in _KINDS:
        left = _of_kind(kind, whole.left, files.left)
        right = _of_kind(kind, whole.right, files.right)
        moves = _moves(left, right)
        if not moves:
            continue
        moved = {part for part, _ in moves}  # all change places, so the right has the same
        left_names = frozenset(_with_parts(whole.left, moved))
        right_names = frozenset(_with_parts(whole.right, moved))
        exchanges.append(Exchange(pair.left.stored.module, moves, left_names, right_names))
    return exchanges


def _of_kind(kind: set[str], attention: NamedAttention, side: FileSide) -> dict[str, Tensor]:
    """Return the parts of a kind, each as one head."""
    roles = _with_parts(attention, kind)
    wholes: dict[str, Tensor] = {}
    for part, numbers in numbers_of(roles, side.tensors).items():
        if part in kind:
            wholes[part] = numbers[0]
    return wholes


def _with_parts(attention: NamedAttention, parts: set[str]) -> dict[str, Role]:
    """Return the tensors that have one of these parts, with their roles."""
    roles = {}
    for name, role in attention.roles.items():
        if not parts.isdisjoint(piece.part for piece in role.heads):
            roles[name] = role
    return roles


def _moves(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Moves:
    """Return each part that is not the same on both sides, with the part that it is; empty unless all change places.

    `W_q` of the left that is `W_k` of the right is an exchange only if some other part of the left is `W_q`.
    """
    differing = []
    for part, numbers in left.items():
        if part in right and not is_same(numbers, right[part]):
            differing.append(part)
    moves = []
    for part in differing:
        # No part is equal to the one of its own name: all of these differ.
        equal = [place for place in differing if is_same(left[part], right[place])]
        if len(equal) == 1:
            moves.append((part, equal[0]))
    sources = {source for source, _ in moves}
    targets = {target for _, target in moves}
    return tuple(moves) if sources == targets else ()


def exchange_sentences(exchanges: Iterable[Exchange]) -> Iterator[str]:
    """Yield a sentence for each exchange, with the attentions that have it."""
    modules: dict[Moves, list[str]] = {}
    for exchange in exchanges:
        paths = modules.setdefault(exchange.moves, [])
        if exchange.module:
            paths.append(shown(exchange.module))
    for moves, paths in modules.items():
        letters = _letters(moves)
        beginning = letters[0].upper() + letters[1:]
        where = f" in {first_few(paths, 3)}" if paths else ""
        equal = listed([f"{left} on the left is {right} on the right" for left, right in moves])
        equal = equal.replace(" and ", ", and ")
        yield f"{beginning} are exchanged{where}: {equal}."


def _letters(moves: Moves) -> str:
    """Return the letters of the parts on the left: `k and v`."""
    return listed([left[-1] for left, _ in moves])
