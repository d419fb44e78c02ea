"""Compare the attentions of two checkpoints, whatever tensors their parts are in.

q_proj, k_proj, v_proj    on the left        W_q, W_k, W_v: 32 rows each, by head
in_proj                   on the right       W_q, W_k, W_v: rows 0–31, 32–63, 64–95, by head
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...files.attentions import NamedAttention
from ...files.tensors import StoredTensor
from ...reports.diff import PartPair, TensorPair, TensorVerdict
from ...text import listed
from .exchanged import Exchange, find_exchanged
from .head_numbers import numbers_of
from .reordered import Reordered, is_reordered, reordered
from .tensor_pairs import SAME, distance, pair_of_other_shape
from .two_files import AttentionPair, TwoFiles

_WORSE: tuple[TensorVerdict, ...] = (*SAME, "same, permuted", "other shape", "differs")
"""The verdicts from best to worst: several tensors together get their worst one."""


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
        if not pair.has_same_names:
            return False
        return all(self.same_name[name].verdict in SAME for name in pair.left.stored.parameters)

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
        are_same = bool(verdicts) and {*verdicts.values()} <= {*SAME}
        return AttentionDiff(
            exchanges=exchanges,
            orders=orders,
            renamed=list(_renamed(whole, verdicts, self.files)),
            lacks_head_count=not (are_same or orders or exchanges),
        )

    # -- the same rows in another order -------------------------------------------------------------------------------

    def _unexchanged_orders(self, pair: AttentionPair, exchanges: Sequence[Exchange]) -> list[Reordered]:
        """Return the tensors with the same rows in another order, in attentions without an exchange.

        Exchanged parts of one tensor are also its rows in another order: the exchange says more.
        """
        return [] if exchanges else self._orders(pair)

    def _orders(self, pair: AttentionPair) -> list[Reordered]:
        """Return the tensors of two attentions that have the same rows in another order."""
        return list(reordered(pair, self.files, self._needs_no_order))

    def _needs_no_order(self, name: str, right_name: str) -> bool:
        """Return whether two tensors are known to be the same, or have no numbers to compare."""
        left, right = self.files.left.tensors[name], self.files.right.tensors[right_name]
        if not (left.has_numbers and right.has_numbers):
            return True
        return name == right_name and self.same_name[name].verdict in (*SAME, "same, permuted")

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
        return counts[0] if len(counts) == 1 else None

    # -- parts by head ------------------------------------------------------------------------------------------------

    def _parts(self, pair: AttentionPair, orders: Sequence[Reordered]) -> list[PartPair]:
        """Compare two attentions part by part: `W_q`, `b_q` and so on, by head."""
        verdicts = self._verdicts_of_tensors(pair, orders)
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

    def _verdicts_of_tensors(self, pair: AttentionPair, orders: Sequence[Reordered]) -> dict[str, TensorVerdict]:
        """Return the parts whose tensors are the same, or the same in another order: these are not read again."""
        verdicts: dict[str, TensorVerdict] = {}
        for name, role in pair.left.roles.items():
            tensors = self.same_name.get(name)
            if tensors is None or tensors.verdict not in SAME:
                continue
            if name in pair.right.roles and role == pair.right.roles[name]:
                for piece in role.heads:
                    verdicts[piece.part] = tensors.verdict
        of_all_rows = {}
        for reordered_tensors in orders:
            if reordered_tensors.order.kept == "all":
                of_all_rows[reordered_tensors.part] = reordered_tensors.order
        for part in _parts_of(pair.left):
            if is_reordered(part, of_all_rows):
                verdicts[part] = "same, permuted"
        return verdicts


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
    return part.part[0], "qkvo".find(part.part[-1])


def _unread_numbers(
    attention: NamedAttention, tensors: Mapping[str, StoredTensor], verdicts: Mapping[str, TensorVerdict]
) -> dict[str, Tensor]:
    """Return by head the numbers of the tensors that have a part without a verdict."""
    roles = {}
    for name, role in attention.roles.items():
        if any(piece.part not in verdicts for piece in role.heads):
            roles[name] = role
    return numbers_of(roles, tensors)


def _part_pair(pair: AttentionPair, part: str, verdict: TensorVerdict, differences: tuple[float, ...] = ()) -> PartPair:
    return PartPair(pair.left.stored.module, pair.right.stored.module, part, verdict, differences)


def _compared_part(pair: AttentionPair, part: str, left: Tensor, right: Tensor) -> PartPair:
    """Compare a part, `heads head_dim embed` or `heads head_dim`, and each head of it if it differs."""
    if left.shape != right.shape:
        return _part_pair(pair, part, "other shape")
    verdict = distance(left, right).verdict
    if verdict != "differs":
        return _part_pair(pair, part, verdict)
    by_head = tuple(distance(*heads).relative for heads in zip(left, right, strict=True))
    return _part_pair(pair, part, verdict, by_head)


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
    shared = _shared_parts(pair, verdicts, files)
    for names, parts in shared.items():
        verdict = _worst(parts, verdicts)
        is_turned = pair.left.roles[names.left].axis != pair.right.roles[names.right].axis
        if is_turned and verdict in SAME:
            verdict = "same, permuted"
        note = _packing(names, shared, verdicts)
        if is_turned and not note:
            note = "transposed"
        yield replace(pair_of_other_shape(files, names.left, names.right), verdict=verdict, note=note)


def _worst(parts: Sequence[str], verdicts: Mapping[str, TensorVerdict]) -> TensorVerdict:
    """Return the worst verdict of several parts together."""
    return max((verdicts[part] for part in parts), key=_WORSE.index)


def _shared_parts(
    pair: AttentionPair, verdicts: Mapping[str, TensorVerdict], files: TwoFiles
) -> dict[_Names, list[str]]:
    """Return the compared parts that two tensors have in common, of tensors that one file alone has by its name."""
    left = _tensors_by_part(pair.left, without=files.right.tensors)
    right = _tensors_by_part(pair.right, without=files.left.tensors)
    shared: dict[_Names, list[str]] = {}
    for part, name in left.items():
        if part in right and part in verdicts:
            shared.setdefault(_Names(name, right[part]), []).append(part)
    return shared


def _tensors_by_part(attention: NamedAttention, *, without: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return the tensor that has each part, except tensors whose names are also in the file of the other side."""
    tensors = {}
    for name, role in attention.roles.items():
        if name not in without:
            for piece in role.heads:
                tensors[piece.part] = name
    return tensors


def _packing(names: _Names, shared: Mapping[_Names, list[str]], verdicts: Mapping[str, TensorVerdict]) -> str:
    """Return which side has the parts of several tensors in one: `q, k and v are in one tensor on the left and …`.

    Empty if neither has.
    """
    from_several = [parts for pair, parts in shared.items() if pair.right == names.right]
    if len(from_several) > 1:
        return _packed_words(from_several, verdicts, "right", "left")
    into_several = [parts for pair, parts in shared.items() if pair.left == names.left]
    if len(into_several) > 1:
        return _packed_words(into_several, verdicts, "left", "right")
    return ""


def _packed_words(pieces: list[list[str]], verdicts: Mapping[str, TensorVerdict], packed: str, apart: str) -> str:
    """Return in words where parts are together, and where they are in one tensor for each piece."""
    parts: list[str] = []
    for piece in pieces:
        parts += piece
    letters = sorted((part[-1] for part in parts), key="qkv".find)
    words = "the same, in" if _worst(parts, verdicts) in SAME else "in"
    count = {2: "two", 3: "three"}.get(len(pieces), str(len(pieces)))
    return f"{listed(letters)} are {words} one tensor on the {packed} and in {count} on the {apart}"
