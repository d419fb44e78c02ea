"""Find queries, keys and values that a file has under each other's names, e.g. after a wrong split of one tensor.

    q, v, k = in_proj_weight.chunk(3)    # q, k, v

Each part of the left is compared with each part of the right, whatever tensors they are in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..files.attentions import NamedAttention, Role
from ..files.tensors import StoredTensor
from ..text import first_few, listed, shown
from .head_numbers import numbers_of
from .tensor_pairs import is_same
from .two_files import AttentionPair, TwoFiles

_MATRICES = ("W_q", "W_k", "W_v")
_BIASES = ("b_q", "b_k", "b_v")


@dataclass(frozen=True)
class Move:
    """A part on the left, and the part on the right that is equal to it: `W_k` and `W_v`."""

    left: str
    right: str

    def words(self) -> str:
        """Return `W_k on the left is W_v on the right`."""
        return f"{self.left} on the left is {self.right} on the right"


@dataclass(frozen=True)
class Exchange:
    """Parts of one kind that are each other's on the other side."""

    module: str
    """The path of the attention on the left."""
    moves: tuple[Move, ...]
    left_names: frozenset[str]
    """The tensors of these parts on the left."""
    right_names: frozenset[str]
    """The tensors of these parts on the right."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts on the left."""
        return tuple(move.left for move in self.moves)

    def words(self) -> str:
        """Return which parts are exchanged: `k and v are exchanged`."""
        return f"{_letters(self.moves)} are exchanged"


def find_exchanged(pair: AttentionPair, files: TwoFiles) -> list[Exchange]:
    """Return the exchanged parts of two attentions, for their matrices and for their biases."""
    whole = pair.as_one_head()
    exchanges = []
    for parts in (_MATRICES, _BIASES):
        left = _numbers(whole.left, files.left.tensors, parts)
        right = _numbers(whole.right, files.right.tensors, parts)
        moves = _moves(left, right)
        if not moves:
            continue
        moved = {move.left for move in moves}  # all change places, so the right has the same
        exchange = Exchange(
            module=pair.left.stored.module,
            moves=tuple(moves),
            left_names=frozenset(_with_parts(whole.left, moved)),
            right_names=frozenset(_with_parts(whole.right, moved)),
        )
        exchanges.append(exchange)
    return exchanges


def _with_parts(attention: NamedAttention, parts: Collection[str]) -> dict[str, Role]:
    """Return the tensors that have one of these parts, with their roles."""
    roles = {}
    for name, role in attention.roles.items():
        if any(piece.part in parts for piece in role.heads):
            roles[name] = role
    return roles


def _numbers(
    attention: NamedAttention,
    tensors: Mapping[str, StoredTensor],
    parts: Collection[str],
) -> dict[str, Tensor]:
    """Return the numbers of these parts, with the features of the heads first: `features embed` of a matrix."""
    numbers = {}
    for part, heads in numbers_of(_with_parts(attention, parts), tensors).items():
        if part in parts:
            numbers[part] = heads[0]
    return numbers


def _moves(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[Move]:
    """Return each part that is not the same on both sides, with the part that it is; empty unless all change places.

    `W_q` of the left that is `W_k` of the right is an exchange only if some other part of the left is `W_q`.
    """
    differing = []
    for part in left:
        if part in right and not is_same(left[part], right[part]):
            differing.append(part)
    moves = []
    for part in differing:
        # No part is equal to the one of its own name: all of these differ.
        equal = [place for place in differing if is_same(left[part], right[place])]
        if len(equal) == 1:
            moves.append(Move(part, equal[0]))
    sources = {move.left for move in moves}
    targets = {move.right for move in moves}
    if sources != targets:
        return []
    return moves


def exchange_sentences(exchanges: Iterable[Exchange]) -> Iterator[str]:
    """Yield a sentence for each exchange, with the attentions that have it."""
    paths_by_moves: dict[tuple[Move, ...], list[str]] = {}
    for exchange in exchanges:
        paths = paths_by_moves.setdefault(exchange.moves, [])
        if exchange.module:
            paths.append(shown(exchange.module))
    for moves, paths in paths_by_moves.items():
        letters = _letters(moves)
        where = f" in {first_few(paths, 3)}" if paths else ""
        equal = listed([move.words() for move in moves]).replace(" and ", ", and ")
        yield f"{letters[0].upper()}{letters[1:]} are exchanged{where}: {equal}."


def _letters(moves: Iterable[Move]) -> str:
    """Return the letters of the parts on the left: `k and v`."""
    return listed([move.left[-1] for move in moves])
