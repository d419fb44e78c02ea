"""Compare two checkpoints tensor by tensor, and their attentions head by head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import SpecError
from ...files.attentions import NamedAttention, Role, find_attentions
from ...files.checkpoint import Checkpoint, read_checkpoint
from ...files.tensors import StoredTensor, read_stored
from ...record.rounding import distances, parts, same_bits
from ...reports.diff import CheckpointDiffReport, CheckpointSide, PartPair, RowOrder, TensorPair, TensorVerdict
from ...reports.params import StoredName
from ...text import first_few, listed, percent, plural, shown, spans
from .exchanged import Exchange, as_one_head, exchange_sentences, find_exchanged
from .head_numbers import numbers_of
from .reordered import Reordered, is_reordered, order_words, reordered
from .transposed import is_transposed

_SAME: tuple[TensorVerdict, ...] = ("same bits", "same within rounding")
_WORSE: tuple[TensorVerdict, ...] = (*_SAME, "same, permuted", "other shape", "differs")
"""The verdicts from best to worst: several tensors together get their worst one."""
_FIRST = 64
"""Elements that are compared first, before two tensors are compared completely."""
_NAMED = 5
"""Number of heads in the answer."""


def diff_of_checkpoints(left: Path, right: Path, *, num_heads: int | None = None) -> CheckpointDiffReport:
    """Compare two checkpoints: tensors of one name, the heads of attentions, and renamed tensors.

    A side is a file, an index of shards, or a folder. `num_heads` is the head count, if no file has it. Raises the
    errors of `params_of_checkpoint`, and `DoesNotFitError` if a tensor takes more memory than is free.
    """
    ours, theirs = (_Side.of(read_checkpoint(path), num_heads) for path in (left, right))
    counts = [attention.stored.num_heads for side in (ours, theirs) for attention in side.attentions.values()]
    if num_heads is not None and counts and num_heads not in counts:
        raise SpecError(f"num_heads {num_heads} does not fit the shapes of any attention in the two files.")
    same_name = {name: _pair(name, name, ours, theirs) for name in ours.tensors if name in theirs.tensors}
    pairs, of_parts, unknown = [*same_name.values()], list[PartPair](), 0
    found: list[Reordered] = []
    shown_count: int | None = None
    exchanged: list[Exchange] = []
    for attention, other in _paired(ours, theirs):
        names = attention.stored.parameters
        if {*names} == {*other.stored.parameters} and all(same_name[name].verdict in _SAME for name in names):
            continue
        of_attention = find_exchanged(attention, other, ours.tensors, theirs.tensors)
        exchanged += of_attention
        count = attention.stored.num_heads or other.stored.num_heads or shown_count
        if count is None and not of_attention:
            count = shown_count = _count_of_orders(attention, other, ours, theirs, same_name)
        both = attention, other
        if count is not None:
            both = ours.with_heads(attention, count), theirs.with_heads(other, count)
        # Exchanged parts of one tensor are also its rows in another order: the exchange says more.
        orders = [] if of_attention else _reordered(*both, ours, theirs, same_name)
        found += orders
        if count is None:
            whole = _whole_parts(attention, other, ours, theirs, same_name, orders)
            pairs += _renamed(as_one_head(attention), as_one_head(other), whole, ours, theirs)
            are_same = bool(whole) and all(verdict in _SAME for verdict in whole.values())
            unknown += not (are_same or orders or of_attention)
            continue
        compared = _parts(*both, ours, theirs, _known_parts(*both, same_name, orders))
        of_parts += compared
        pairs += _renamed(*both, {part.part: part.verdict for part in compared}, ours, theirs)
    pairs = [_with_exchange(pair, exchanged) for pair in _with_orders(pairs, found, ours, theirs)]
    pairs += _moved(ours, theirs, {pair.name for pair in pairs}, {pair.other for pair in pairs})
    only_left = _absent(ours, {pair.name for pair in pairs})
    only_right = _absent(theirs, {pair.other for pair in pairs})
    place = {name: number for number, name in enumerate(ours.tensors)}
    same = not only_left and not only_right and all(pair.verdict in _SAME for pair in pairs)
    notes = [f"The {name}: {note}" for name, side in (("left", ours), ("right", theirs)) for note in side.file.notes]
    if unknown:
        notes.append(
            f"The head count of {plural(unknown, 'differing attention')} is unknown. "
            "Use e.g. --num-heads 8 to see which heads changed."
        )
    report = CheckpointDiffReport(
        ours.report(),
        theirs.report(),
        tuple(sorted(pairs, key=lambda pair: place[pair.name])),
        only_left,
        only_right,
        tuple(of_parts),
        "same" if same else "differs",
        tuple(notes),
        (),
    )
    return replace(report, answer=tuple(_answer(report, exchanged)))


@dataclass(frozen=True)
class _Side:
    file: Checkpoint
    attentions: dict[str, NamedAttention]
    """By the path of the module."""

    @classmethod
    def of(cls, file: Checkpoint, num_heads: int | None) -> _Side:
        attentions = find_attentions(file.tensors, file.config, num_heads)
        return cls(file, {attention.stored.module: attention for attention in attentions})

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return self.file.tensors

    def report(self) -> CheckpointSide:
        tensors = self.tensors.values()
        dtypes = [dtype for dtype, _ in Counter(tensor.dtype for tensor in tensors).most_common()]
        numel, nbytes = sum(tensor.numel for tensor in tensors), sum(tensor.nbytes for tensor in tensors)
        return CheckpointSide(self.file.path.resolve().name, len(tensors), numel, nbytes, tuple(dtypes))

    def with_heads(self, attention: NamedAttention, count: int) -> NamedAttention:
        """Return an attention with this number of heads; unchanged if it does not fit."""
        tensors = {name: self.tensors[name] for name in attention.stored.parameters}
        return next(iter(find_attentions(tensors, self.file.config, count)), attention)

    def read(self, name: str) -> Tensor:
        return read_stored(self.tensors[name], shown(name))


def _paired(left: _Side, right: _Side) -> Iterable[tuple[NamedAttention, NamedAttention]]:
    """Return pairs of attentions with the same path; by order if no path is common and both have equally many."""
    ours, theirs = left.attentions, right.attentions
    if not ours.keys() & theirs.keys() and len(ours) == len(theirs):
        return zip(ours.values(), theirs.values(), strict=True)
    return ((attention, theirs[module]) for module, attention in ours.items() if module in theirs)


def _known_parts(
    attention: NamedAttention,
    other: NamedAttention,
    same_name: Mapping[str, TensorPair],
    orders: Iterable[Reordered],
) -> dict[str, TensorVerdict]:
    """Return the parts whose tensors are the same, or have the same rows in another order: none is to be read again."""
    known: dict[str, TensorVerdict] = {}
    for name, role in attention.roles.items():
        pair = same_name.get(name)
        if pair is not None and pair.verdict in _SAME and name in other.roles and role == other.roles[name]:
            known |= dict.fromkeys((piece.part for piece in role.heads), pair.verdict)
    explained = {each.part: each.order for each in orders if each.order.kept == "all"}
    for role in attention.roles.values():
        for piece in role.heads:
            if is_reordered(piece.part, explained):
                known[piece.part] = "same, permuted"
    return known


def _parts(
    attention: NamedAttention,
    other: NamedAttention,
    left: _Side,
    right: _Side,
    known: Mapping[str, TensorVerdict],
) -> list[PartPair]:
    """Compare two attentions part by part: `W_q`, `b_q` and so on, by head; parts with a known verdict are not read."""
    paths = attention.stored.module, other.stored.module
    there = [{piece.part for role in side.roles.values() for piece in role.heads} for side in (attention, other)]
    pairs = [PartPair(*paths, part, verdict, ()) for part, verdict in known.items() if part in there[1]]
    ours, theirs = (
        numbers_of({name: role for name, role in side.roles.items() if _has_unknown(role, known)}, tensors)
        for side, tensors in ((attention, left.tensors), (other, right.tensors))
    )
    for part in {*ours} & {*theirs} - {*known}:
        verdict: TensorVerdict = "other shape"
        differences: tuple[float, ...] = ()
        if ours[part].shape == theirs[part].shape:
            verdict = _distance(ours[part], theirs[part]).verdict
        if verdict == "differs":
            differences = tuple(_distance(*heads).relative for heads in zip(ours[part], theirs[part], strict=True))
        pairs.append(PartPair(*paths, part, verdict, differences))
    return sorted(pairs, key=lambda pair: (pair.part[0], "qkvo".find(pair.part[-1])))


def _whole_parts(
    attention: NamedAttention,
    other: NamedAttention,
    left: _Side,
    right: _Side,
    same_name: Mapping[str, TensorPair],
    orders: Iterable[Reordered],
) -> dict[str, TensorVerdict]:
    """Return the verdict of each part of two attentions whose number of heads is unknown.

    Empty if both have the same tensors: the names pair them already.
    """
    if {*attention.stored.parameters} == {*other.stored.parameters}:
        return {}
    both = as_one_head(attention), as_one_head(other)
    compared = _parts(*both, left, right, _known_parts(*both, same_name, orders))
    return {part.part: part.verdict for part in compared}


def _has_unknown(role: Role, known: Mapping[str, TensorVerdict]) -> bool:
    """Return whether a tensor has a part whose verdict is not known."""
    return any(piece.part not in known for piece in role.heads)


# -- the same rows in another order -----------------------------------------------------------------------------------


def _reordered(
    attention: NamedAttention,
    other: NamedAttention,
    left: _Side,
    right: _Side,
    same_name: Mapping[str, TensorPair],
) -> list[Reordered]:
    """Return the tensors of two attentions that have the same rows in another order."""

    def same(name: str, other_name: str) -> bool:
        """Return whether two tensors are known to be the same, or have no numbers to compare."""
        if not (left.tensors[name].has_numbers and right.tensors[other_name].has_numbers):
            return True
        return name == other_name and same_name[name].verdict in (*_SAME, "same, permuted")

    return list(reordered(attention, other, left.read, right.read, same))


def _count_of_orders(
    attention: NamedAttention,
    other: NamedAttention,
    left: _Side,
    right: _Side,
    same_name: Mapping[str, TensorPair],
) -> int | None:
    """Return the only number of heads with which the orders of rows have a usual meaning; None if there is none.

    Rows that are halves of 4 heads on one side and pairs on the other have no order of 8 heads. Of 2 heads they would
    have rotations of two axes each, which is rare.
    """
    named = []
    for count in attention.stored.fits:
        both = left.with_heads(attention, count), right.with_heads(other, count)
        orders = _reordered(*both, left, right, same_name)
        if orders and all(each.is_usual for each in orders):
            named.append(count)
    return named[0] if len(named) == 1 else None


def _with_orders(
    pairs: Iterable[TensorPair], found: Iterable[Reordered], left: _Side, right: _Side
) -> list[TensorPair]:
    """Return pairs of tensors with the orders of their rows, and with the pairs that only these show."""
    orders = {(name, each.other): each for each in found for name in each.names}
    result = []
    for pair in pairs:
        each = orders.pop((pair.name, pair.other), None)
        result.append(pair if each is None else _ordered(pair, each))
    result += [_ordered(_beside(*names, left, right), each) for names, each in orders.items()]
    return result


def _ordered(pair: TensorPair, found: Reordered) -> TensorPair:
    """Return a pair of tensors with the order of its rows."""
    order = found.order
    verdict: TensorVerdict = "same, permuted"
    if order.remaining:
        verdict = "differs"
    elif order.kept != "all":
        verdict = "other shape"
    together = f"{len(found.names)} tensors together" if len(found.names) > 1 else ""
    note = ", ".join(filter(None, (together, *order.patterns[:1]))) or "no name for this order"
    return replace(pair, verdict=verdict, order=order, note=note)


# -- tensors ----------------------------------------------------------------------------------------------------------


class _Distance(NamedTuple):
    """The distance of two tensors of one shape."""

    verdict: TensorVerdict
    largest: float
    relative: float
    """‖left - right‖ / ‖left‖, of the finite numbers."""


def _distance(left: Tensor, right: Tensor) -> _Distance:
    """Return the distance of two tensors of one shape; NaN equals NaN and is infinitely far from any number."""
    if same_bits(left, right):
        return _Distance("same bits", 0.0, 0.0)
    floats = [torch.finfo(side.dtype) for side in (left, right) if side.dtype.is_floating_point]
    slack, lowest = sum(info.eps for info in floats) / 2, sum(info.tiny * info.eps for info in floats)
    is_rounding = True
    for ours, theirs in parts(left, right):
        a, b = ours.double(), theirs.double()
        allowed = slack * torch.maximum(a.abs(), b.abs()) + lowest
        equal = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= allowed.nan_to_num(0, 0, 0))
        is_rounding &= bool(equal.all())
    return _Distance("same within rounding" if is_rounding else "differs", *distances(left, right))


def _beside(name: str, other: str, left: _Side, right: _Side) -> TensorPair:
    ours, theirs = left.tensors[name], right.tensors[other]
    return TensorPair(name, other, ours.shape, theirs.shape, ours.dtype, theirs.dtype, "other shape", None, None)


def _pair(name: str, other: str, left: _Side, right: _Side) -> TensorPair:
    """Compare two tensors."""
    ours, theirs, pair = left.tensors[name], right.tensors[other], _beside(name, other, left, right)
    is_turned = ours.shape != theirs.shape
    if is_turned and not is_transposed(ours.shape, theirs.shape):
        return pair
    if not ours.numel:
        return replace(pair, verdict="same bits")
    if not (ours.has_numbers and theirs.has_numbers):
        absent = ours.read is None or theirs.read is None
        return replace(pair, verdict="differs", note="the file has no numbers for it" if absent else "complex numbers")
    numbers, others = left.read(name), right.read(other)
    if is_turned:
        return _transposed(pair) if _is_same_transposed(numbers, others) else pair
    verdict, largest, relative = _distance(numbers, others)
    if verdict == "differs" and _is_same_transposed(numbers, others):
        return _transposed(pair)
    return replace(pair, verdict=verdict, max_abs_difference=largest, relative_difference=relative)


def _transposed(pair: TensorPair) -> TensorPair:
    return replace(pair, verdict="same, permuted", note="transposed")


def _is_same_transposed(left: Tensor, right: Tensor) -> bool:
    """Return whether a matrix is the transpose of another; its first row is compared before the rest."""
    if left.dim() != 2 or left.shape != right.shape[::-1]:
        return False
    first = _distance(left[0], right[:, 0].contiguous()).verdict
    return first in _SAME and _distance(left.T.contiguous(), right).verdict in _SAME


def _renamed(
    attention: NamedAttention,
    other: NamedAttention,
    verdicts: Mapping[str, TensorVerdict],
    left: _Side,
    right: _Side,
) -> Iterator[TensorPair]:
    """Yield pairs of tensors of two attentions with the same parts, but other names or another packing."""
    ours, theirs = (
        {piece.part: name for name, role in side.roles.items() if name not in beside.tensors for piece in role.heads}
        for side, beside in ((attention, right), (other, left))
    )
    shared: dict[tuple[str, str], list[str]] = {}
    for part in (part for part in ours if part in theirs and part in verdicts):
        shared.setdefault((ours[part], theirs[part]), []).append(part)
    for names, of_names in shared.items():
        verdict = max((verdicts[part] for part in of_names), key=_WORSE.index)
        is_turned = attention.roles[names[0]].axis != other.roles[names[1]].axis
        note = "transposed" if is_turned else ""
        for side, (packed, apart) in enumerate((("left", "right"), ("right", "left"))):
            pieces = [parts for pair, parts in shared.items() if pair[side] == names[side]]
            if len(pieces) > 1:
                every = [part for parts in pieces for part in parts]
                are_same = all(verdicts[part] in _SAME for part in every)
                note = _packing(every, packed, apart, len(pieces), same=are_same)
        if is_turned and verdict in _SAME:
            verdict = "same, permuted"
        yield replace(_beside(*names, left, right), verdict=verdict, note=note)


def _packing(parts: Iterable[str], packed: str, apart: str, count: int, *, same: bool) -> str:
    """Return where parts are together and where they are apart: `q, k and v are in one tensor on the left and …`."""
    letters = listed(sorted((part[-1] for part in parts), key="qkv".find))
    words = "the same, in" if same else "in"
    number = {2: "two", 3: "three"}.get(count, str(count))
    return f"{letters} are {words} one tensor on the {packed} and in {number} on the {apart}"


def _with_exchange(pair: TensorPair, exchanged: Iterable[Exchange]) -> TensorPair:
    """Return a pair of tensors that differ, with the exchange of the parts that they have."""
    for each in exchanged:
        if pair.verdict == "differs" and pair.name in each.names and pair.other in each.others:
            return replace(pair, note=", ".join(filter(None, (pair.note, each.words()))))
    return pair


def _moved(left: _Side, right: _Side, named: Collection[str], others: Collection[str]) -> Iterator[TensorPair]:
    """Yield pairs of tensors with the same numbers under different names."""
    by_shape: dict[tuple[int, ...], dict[str, Tensor]] = {}
    for other, stored in right.tensors.items():
        if other not in others and stored.has_numbers:
            by_shape.setdefault(stored.shape, {})[other] = right.read(other).flatten()[:_FIRST].clone()
    for name, stored in left.tensors.items():
        if name in named or not stored.has_numbers or stored.shape not in by_shape:
            continue
        numbers = left.read(name).flatten()
        is_constant = bool((numbers == numbers[0]).all())  # an untrained norm: equality is no proof
        for other, first in by_shape[stored.shape].items():
            alike = not is_constant or name.rsplit(".", 2)[-2:] == other.rsplit(".", 2)[-2:]
            if alike and _distance(numbers[:_FIRST], first).verdict in _SAME:
                pair = _pair(name, other, left, right)
                if pair.verdict in _SAME:
                    del by_shape[stored.shape][other]
                    yield pair
                    break


def _absent(side: _Side, names: Collection[str]) -> tuple[StoredName, ...]:
    return tuple(StoredName(name, stored.shape) for name, stored in side.tensors.items() if name not in names)


# -- the answer -------------------------------------------------------------------------------------------------------


def _answer(report: CheckpointDiffReport, exchanged: Sequence[Exchange]) -> Iterator[str]:
    """Yield sentences: whether both are the same, and what differs."""
    verdicts = Counter(pair.verdict for pair in report.tensors)
    number = len(report.tensors)
    renamed = sum(pair.name != pair.other for pair in report.tensors)
    if verdicts["same bits"] == number and not (report.only_left or report.only_right or renamed):
        yield f"Yes: all {plural(number, 'tensor')} are the same, bit for bit."
        return
    rounded = [pair for pair in report.tensors if pair.verdict == "same within rounding"]
    dtypes = sorted({dtype for pair in rounded for dtype in (pair.left_dtype, pair.right_dtype)})
    words: dict[TensorVerdict, str] = {
        "same bits": "the same bit for bit",
        "same within rounding": f"the same within the rounding of {listed(dtypes)}",
        "same, permuted": "the same in another order",
        "differs": "different",
        "other shape": "of another shape",
    }
    said = [f"{count:,} {words[verdict]}" for verdict in words if (count := verdicts[verdict])]
    answer = "Yes" if report.outcome == "same" else "No"
    yield f"{answer}: {plural(number, 'tensor')} on both sides{': ' if said else ''}{listed(said)}."
    beside = [f"{renamed:,} renamed"] if renamed else []
    for names, where in ((report.only_left, "left"), (report.only_right, "right")):
        beside += [f"{len(names):,} only in the {where}"] if names else []
    if beside:
        yield f"{listed(beside)}."
    times = Counter(name for pair in report.tensors for name in (("left", pair.name), ("right", pair.other)))
    packed = [pair for pair in report.tensors if times["left", pair.name] > 1 or times["right", pair.other] > 1]
    for note in dict.fromkeys(pair.note for pair in packed) if not exchanged else ():
        yield f"{note[0].upper()}{note[1:]}."
    yield from exchange_sentences(exchanged)
    yield from _orders(report.tensors)
    known = {(each.module, part) for each in exchanged for part in each.parts}
    changed = (part for part in report.parts if (part.left, part.part) not in known)
    yield from _most_changed([part for part in changed if part.part.startswith("W") and part.differences])


def _orders(pairs: Iterable[TensorPair]) -> Iterator[str]:
    """Yield a sentence for each order of rows, with the tensors that have it, and the line that converts the left."""
    names: dict[tuple[str, RowOrder], list[str]] = {}
    for pair in pairs:
        if pair.order is not None:
            names.setdefault((pair.note, pair.order), []).append(pair.name)
    for (_, order), tensors in names.items():
        yield f"{first_few(tensors, _NAMED)}: {order_words(order)}."
        if order.line:
            yield f"To convert the left: {order.line}"


def _most_changed(matrices: list[PartPair]) -> Iterator[str]:
    """Yield a sentence about the heads that differ most, and one per attention with only a few changed heads."""
    heads = [(change, pair, head) for pair in matrices for head, change in enumerate(pair.differences) if change > 0]
    heads.sort(key=lambda item: -item[0])
    said = [
        f"head {head} of {pair.part}{f' in {shown(pair.left)}' if pair.left else ''} "
        f"({percent(change) if isfinite(change) else 'not finite'})"
        for change, pair, head in heads[:_NAMED]
    ]
    if said:
        yield f"Heads that changed most, relative to the left norm: {', '.join(said)}."
    modules = dict.fromkeys(pair.left for _, pair, _ in heads)
    for module in modules if len(modules) <= _NAMED else ():
        few = []
        for pair in (pair for pair in matrices if pair.left == module):
            changed = [head for head, change in enumerate(pair.differences) if change > 0]
            if 0 < len(changed) < len(pair.differences):
                few.append(f"head{'s' if len(changed) > 1 else ''} {spans(changed)} of {pair.part}")
        if few:
            yield f"In {shown(module) or 'the file'} only {listed(few)} changed."
