"""Compare the attentions of two checkpoints, whatever tensors their parts are in.

q_proj, k_proj, v_proj    on the left        W_q, W_k, W_v: 32 rows each, by head
in_proj                   on the right       W_q, W_k, W_v: rows 0–31, 32–63, 64–95, by head
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor

from ..files.attentions import NamedAttention
from ..files.tensors import StoredTensor
from ..reports.diff import PartPair, TensorPair, TensorVerdict
from ..text import listed
from .exchanged import Exchange, find_exchanged
from .head_numbers import numbers_of
from .reordered import Reordered, is_reordered, reordered
from .tensor_pairs import SAME, distance, pair_of_other_shape, tensor_pair
from .two_files import AttentionPair, TwoFiles

_WORSE: tuple[TensorVerdict, ...] = (*SAME, "same, permuted", "other shape", "differs")
"""The verdicts from best to worst: several tensors together get their worst one."""
_EQUAL: tuple[TensorVerdict, ...] = (*SAME, "same, permuted")
"""The verdicts on tensors with the same numbers, some of them transposed."""


@dataclass(frozen=True)
class AttentionDiff:
    """How two attentions differ."""

    exchanges: Sequence[Exchange] = ()
    orders: Sequence[Reordered] = ()
    parts: Sequence[PartPair] = ()
    """Their matrices and biases by head; empty without a number of heads."""
    renamed: Sequence[TensorPair] = ()
    """Tensors with the same parts under other names, or packed in another way."""
    lacks_head_count: bool = False
    """Whether they differ, and a number of heads would show where."""


@dataclass(frozen=True)
class AttentionComparison:
    """Compares the attentions of two files."""

    files: TwoFiles
    same_name: Mapping[str, TensorPair]
    """The tensors that both files have under one name, compared."""

    def diffs(self) -> Iterator[AttentionDiff]:
        """Yield how each two attentions differ, without those whose tensors are all the same.

        The number of heads that the orders of rows in one attention show is also that of the later ones.
        """
        count_of_orders: int | None = None
        for pair in self.files.attentions():
            if self._has_same_tensors(pair):
                continue
            exchanges = find_exchanged(pair, self.files)
            count = pair.num_heads or count_of_orders
            if count is None and not exchanges:
                count = count_of_orders = self._count_of_orders(pair)
            if count is None:
                yield self._diff_of_wholes(pair, exchanges)
            else:
                yield self._diff_by_head(self.files.with_heads(pair, count), exchanges)

    def _has_same_tensors(self, pair: AttentionPair) -> bool:
        """Return whether all tensors have the same names and the same numbers."""
        return pair.has_same_names and self._verdicts_of(pair).issubset(SAME)

    def _has_same_numbers(self, pair: AttentionPair) -> bool:
        """Return whether all tensors have the same names and the same numbers, some of them transposed."""
        return pair.has_same_names and self._verdicts_of(pair).issubset(_EQUAL)

    def _verdicts_of(self, pair: AttentionPair) -> set[TensorVerdict]:
        return {self.same_name[name].verdict for name in pair.left.stored.parameters}

    def _diff_by_head(self, pair: AttentionPair, exchanges: Sequence[Exchange]) -> AttentionDiff:
        """Compare two attentions whose number of heads is known."""
        orders = self._unexchanged_orders(pair, exchanges)
        parts = self._parts(pair, orders)
        renamed = list(_renamed(pair, _verdicts(parts), self.files))
        return AttentionDiff(exchanges=exchanges, orders=orders, parts=parts, renamed=renamed)

    def _diff_of_wholes(self, pair: AttentionPair, exchanges: Sequence[Exchange]) -> AttentionDiff:
        """Compare two attentions whose number of heads is unknown, each part as a whole."""
        orders = self._unexchanged_orders(pair, exchanges)
        whole = pair.as_one_head()
        verdicts: dict[str, TensorVerdict] = {}
        if not pair.has_same_names:  # otherwise the names pair their tensors already
            verdicts = _verdicts(self._parts(whole, orders))
        is_explained = bool(orders) or bool(exchanges)
        return AttentionDiff(
            exchanges=exchanges,
            orders=orders,
            renamed=list(_renamed(whole, verdicts, self.files)),
            lacks_head_count=not is_explained and not _are_all_same(verdicts) and not self._has_same_numbers(pair),
        )

    # -- the same rows in another order -------------------------------------------------------------------------------

    def _unexchanged_orders(self, pair: AttentionPair, exchanges: Sequence[Exchange]) -> list[Reordered]:
        """Return the tensors with the same rows in another order, in attentions without an exchange.

        Exchanged parts of one tensor are also its rows in another order: the exchange says more.
        """
        if exchanges:
            return []
        return self._orders(pair)

    def _orders(self, pair: AttentionPair) -> list[Reordered]:
        """Return the tensors of two attentions that have the same rows in another order."""
        return list(reordered(pair, self.files, self._needs_no_order))

    def _needs_no_order(self, name: str, right_name: str) -> bool:
        """Return whether two tensors are known to be the same, or have no numbers to compare."""
        left = self.files.left.tensors[name]
        right = self.files.right.tensors[right_name]
        if not left.has_numbers or not right.has_numbers:
            return True
        if name != right_name:
            return False
        verdict = self.same_name[name].verdict
        return verdict in _EQUAL

    def _count_of_orders(self, pair: AttentionPair) -> int | None:
        """Return the only number of heads with which the orders of rows have a usual meaning; None if there is none.

        Rows that are halves of 4 heads on one side and pairs on the other have no order of 8 heads. Of 2 heads they
        would have rotations of two axes each, which is rare.
        """
        counts = []
        for count in pair.left.stored.fits:
            orders = self._orders(self.files.with_heads(pair, count))
            if orders and all(order.is_usual for order in orders):
                counts.append(count)
        if len(counts) != 1:
            return None
        return counts[0]

    # -- parts by head ------------------------------------------------------------------------------------------------

    def _parts(self, pair: AttentionPair, orders: Sequence[Reordered]) -> list[PartPair]:
        """Compare two attentions part by part: `W_q`, `b_q` and so on, by head."""
        verdicts = {**self._verdicts_of_same(pair), **_verdicts_of_reordered(pair, orders)}
        on_right = _parts_of(pair.right)
        parts = []
        for part, verdict in verdicts.items():
            if part in on_right:
                parts.append(_part_pair(pair, part, verdict))
        left = _unread_numbers(pair.left, self.files.left.tensors, verdicts)
        right = _unread_numbers(pair.right, self.files.right.tensors, verdicts)
        for part, heads in left.items():
            if part in right and part not in verdicts:
                parts.append(_compared_part(pair, part, heads, right[part]))
        return sorted(parts, key=_place_of_part)

    def _verdicts_of_same(self, pair: AttentionPair) -> dict[str, TensorVerdict]:
        """Return the parts whose tensors are the same on both sides: these are not read again."""
        verdicts: dict[str, TensorVerdict] = {}
        for name, role in pair.left.roles.items():
            if name not in self.same_name:
                continue
            verdict = self.same_name[name].verdict
            if verdict not in _EQUAL:
                continue
            if pair.right.roles.get(name) != role:
                continue
            for piece in role.heads:
                verdicts[piece.part] = verdict
        return verdicts


def _verdicts_of_reordered(pair: AttentionPair, orders: Sequence[Reordered]) -> dict[str, TensorVerdict]:
    """Return the parts whose tensors have the same rows in another order: these are not read again."""
    of_all_rows = {}
    for tensors in orders:
        if tensors.order.kept == "all":
            of_all_rows[tensors.part] = tensors.order
    verdicts: dict[str, TensorVerdict] = {}
    for part in _parts_of(pair.left):
        if is_reordered(part, of_all_rows):
            verdicts[part] = "same, permuted"
    return verdicts


def _are_all_same(verdicts: Mapping[str, TensorVerdict]) -> bool:
    """Return whether parts were compared, and all of them are the same."""
    if not verdicts:
        return False
    return all(verdict in SAME for verdict in verdicts.values())


def _parts_of(attention: NamedAttention) -> dict[str, None]:
    """Return the parts of an attention with heads, in the order of its tensors: `W_q`, `b_q` and so on."""
    parts: dict[str, None] = {}
    for role in attention.roles.values():
        for piece in role.heads:
            parts[piece.part] = None
    return parts


def _verdicts(parts: Sequence[PartPair]) -> dict[str, TensorVerdict]:
    return {part.part: part.verdict for part in parts}


def _place_of_part(part: PartPair) -> tuple[str, int]:
    """Return the place of a part: matrices before biases, in the order of q, k, v and o."""
    kind = part.part[0]
    letter = part.part[-1]
    return kind, "qkvo".find(letter)


def _unread_numbers(
    attention: NamedAttention, tensors: Mapping[str, StoredTensor], verdicts: Mapping[str, TensorVerdict]
) -> dict[str, Tensor]:
    """Return by head the numbers of the tensors that have a part without a verdict."""
    roles = {}
    for name, role in attention.roles.items():
        if not {piece.part for piece in role.heads} <= verdicts.keys():
            roles[name] = role
    return numbers_of(roles, tensors)


def _part_pair(pair: AttentionPair, part: str, verdict: TensorVerdict, by_head: Sequence[float] = ()) -> PartPair:
    return PartPair(pair.left.stored.module, pair.right.stored.module, part, verdict, tuple(by_head))


def _compared_part(pair: AttentionPair, part: str, left: Tensor, right: Tensor) -> PartPair:
    """Compare a part, `heads head_dim embed` or `heads head_dim`, and each head of it if it differs."""
    if left.shape != right.shape:
        return _part_pair(pair, part, "other shape")
    verdict = distance(left, right).verdict
    if verdict != "differs":
        return _part_pair(pair, part, verdict)
    by_head = [distance(*heads).relative for heads in zip(left, right, strict=True)]
    return _part_pair(pair, part, verdict, by_head)


@dataclass(frozen=True)
class _Shared:
    """The parts that are compared in tensors of other names or another packing."""

    parts: Mapping[_Names, list[str]]
    verdicts: Mapping[str, TensorVerdict]
    """The verdict of each part that was compared."""

    def worst(self, parts: Iterable[str]) -> TensorVerdict:
        """Return the worst verdict of several parts together."""
        return max((self.verdicts[part] for part in parts), key=_WORSE.index)

    def packing(self, names: _Names) -> str:
        """Return which side has the parts of several tensors in one: `q, k and v are in one tensor on the left and …`.

        Empty if neither has.
        """
        in_right = [parts for pair, parts in self.parts.items() if pair.right == names.right]
        in_left = [parts for pair, parts in self.parts.items() if pair.left == names.left]
        if len(in_right) > 1:
            return self._packed(in_right, "right", "left")
        if len(in_left) > 1:
            return self._packed(in_left, "left", "right")
        return ""

    def _packed(self, pieces: Sequence[Sequence[str]], packed: str, apart: str) -> str:
        """Return on which side the parts are in one tensor, and in how many on the other."""
        parts = list(chain.from_iterable(pieces))
        letters = [part[-1] for part in parts]
        letters.sort(key="qkv".find)
        words = "in"
        if self.worst(parts) in SAME:
            words = "the same, in"
        count = "two"
        if len(pieces) > 2:
            count = "three"
        names = listed(letters)
        return f"{names} are {words} one tensor on the {packed} and in {count} on the {apart}"


# -- tensors under other names ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """A tensor of the left, and one of the right that has parts of it."""

    left: str
    right: str


def _renamed(pair: AttentionPair, verdicts: Mapping[str, TensorVerdict], files: TwoFiles) -> Iterator[TensorPair]:
    """Yield pairs of tensors of two attentions with the same parts, but other names or another packing.

    `verdicts` has the verdict of each part that was compared.
    """
    shared = _Shared(_shared_parts(pair, verdicts, files), verdicts)
    for names, parts in shared.parts.items():
        verdict = shared.worst(parts)
        note = shared.packing(names)
        left_role = pair.left.roles[names.left]
        right_role = pair.right.roles[names.right]
        is_turned = left_role.axis != right_role.axis
        tensors = pair_of_other_shape(files, names.left, names.right)
        if is_turned and not note:
            # The layouts differ, and the numbers may not: a square weight that was not transposed.
            tensors = tensor_pair(files, names.left, names.right)
        if tensors.verdict in _EQUAL:
            yield tensors
            continue
        if is_turned and verdict in SAME:
            verdict = "same, permuted"
        yield replace(tensors, verdict=verdict, note=note)


def _shared_parts(
    pair: AttentionPair, verdicts: Mapping[str, TensorVerdict], files: TwoFiles
) -> dict[_Names, list[str]]:
    """Return the compared parts that two tensors have in common, of tensors that one file alone has by its name."""
    left = _tensors_by_part(pair.left, without=files.right.tensors)
    right = _tensors_by_part(pair.right, without=files.left.tensors)
    shared: dict[_Names, list[str]] = {}
    for part, name in left.items():
        if part not in right or part not in verdicts:
            continue
        names = _Names(name, right[part])
        shared.setdefault(names, []).append(part)
    return shared


def _tensors_by_part(attention: NamedAttention, *, without: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return the tensor that has each part, except tensors whose names are also in the file of the other side."""
    tensors = {}
    for name, role in attention.roles.items():
        if name not in without:
            for piece in role.heads:
                tensors[piece.part] = name
    return tensors
