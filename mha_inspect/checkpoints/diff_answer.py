"""Say in sentences whether two checkpoints are the same, and what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from ..reports.diff import CheckpointDiffReport, PartPair, RowOrder, TensorPair, TensorVerdict
from ..text import first_few, listed, percent, plural, shown, spans
from .exchanged import Exchange, exchange_sentences
from .reordered import order_words
from .tensor_pairs import NOT_TRANSPOSED, SAME, TRANSPOSED, ZEROS_LEFT, ZEROS_RIGHT

_NAMED = 5
"""Number of heads in the answer."""


def answer_of(report: CheckpointDiffReport, exchanges: Sequence[Exchange]) -> Iterator[str]:
    """Yield sentences: whether both are the same, and what differs."""
    number = plural(len(report.tensors), "tensor")
    if _has_same_bits(report):
        yield f"Yes: all {number} are the same, bit for bit."
        return
    if _has_same_shared(report):
        yield _shared_sentence(report)
    else:
        yield _counts_sentence(report)
    unpaired = _renamed_or_absent(report)
    if unpaired:
        yield f"{listed(unpaired)}."
    if not exchanges:
        for note in _notes_on_packing(report.tensors):
            beginning = note[0].upper()
            yield f"{beginning}{note[1:]}."
    yield from exchange_sentences(exchanges)
    infinite = [pair.name for pair in report.tensors if pair.max_abs_difference == inf]
    if infinite:
        yield f"{first_few(infinite, 3)}: NaN or inf on one side, where the other has another number."
    yield from _of_notes(report.tensors)
    yield from _orders(report.tensors)
    yield from _most_changed(_changed_matrices(report.parts, exchanges))


def _has_same_bits(report: CheckpointDiffReport) -> bool:
    """Return whether both sides have the same names with the same bits."""
    if report.only_left or report.only_right:
        return False
    return all(pair.verdict == "same bits" and pair.name == pair.right_name for pair in report.tensors)


def _has_same_shared(report: CheckpointDiffReport) -> bool:
    """Return whether every tensor on both sides is the same, and some are on one side alone."""
    is_partial = bool(report.only_left or report.only_right)
    return is_partial and bool(report.tensors) and all(pair.verdict in SAME for pair in report.tensors)


def _shared_sentence(report: CheckpointDiffReport) -> str:
    """Return `The 8 tensors on both sides are the same, bit for bit; 1 is only in the left.`"""
    count = len(report.tensors)
    subject = f"The {count:,} tensors on both sides are" if count > 1 else "The tensor on both sides is"
    is_exact = all(pair.verdict == "same bits" for pair in report.tensors)
    how = "bit for bit" if is_exact else "within rounding"
    alone = []
    for side, tensors in (("left", report.only_left), ("right", report.only_right)):
        if tensors:
            alone.append(f"{len(tensors):,} {'is' if len(tensors) == 1 else 'are'} only in the {side}")
    return f"{subject} the same, {how}; {listed(alone)}."


def _counts_sentence(report: CheckpointDiffReport) -> str:
    """Return `No: 5 tensors on both sides: 3 the same bit for bit and 2 different.`"""
    answer = "Yes" if report.outcome == "same" else "No"
    sentence = f"{answer}: {plural(len(report.tensors), 'tensor')} on both sides"
    counts = _counts(report.tensors)
    if counts:
        sentence += f": {listed(counts)}"
    return f"{sentence}."


def _counts(pairs: Sequence[TensorPair]) -> list[str]:
    """Return how many tensors have each verdict: `3 the same bit for bit`, `1 different`."""
    verdicts = Counter(pair.verdict for pair in pairs)
    rounded = {dtype for pair in pairs if pair.verdict == "same within rounding" for dtype in _dtypes(pair)}
    words: dict[TensorVerdict, str] = {
        "same bits": "the same bit for bit",
        "same within rounding": f"the same within the rounding of {listed(sorted(rounded))}",
        "same, permuted": "the same in another order",
        "differs": "different",
        "other shape": "of another shape",
    }
    return [f"{verdicts[verdict]:,} {text}" for verdict, text in words.items() if verdict in verdicts]


def _dtypes(pair: TensorPair) -> set[str]:
    return {pair.left_dtype, pair.right_dtype}


def _renamed_or_absent(report: CheckpointDiffReport) -> list[str]:
    """Return how many tensors have another name on the right, or are on one side only."""
    renamed = [pair for pair in report.tensors if pair.name != pair.right_name]
    counts = []
    if renamed:
        counts.append(f"{len(renamed):,} renamed")
    if _has_same_shared(report):  # said at first
        return counts
    if report.only_left:
        counts.append(f"{len(report.only_left):,} only in the left")
    if report.only_right:
        counts.append(f"{len(report.only_right):,} only in the right")
    return counts


def _notes_on_packing(pairs: Sequence[TensorPair]) -> list[str]:
    """Return the notes on the tensors that several tensors of the other side are paired with, each once."""
    on_left = Counter(pair.name for pair in pairs)
    on_right = Counter(pair.right_name for pair in pairs)
    notes: dict[str, None] = {}
    for pair in pairs:
        if on_left[pair.name] > 1 or on_right[pair.right_name] > 1:
            notes[pair.note] = None
    return list(notes)


def _of_notes(pairs: Sequence[TensorPair]) -> Iterator[str]:
    """Yield the tensors that are all zeros on one side alone, those that are transposed, and those that are not."""
    for note in (ZEROS_LEFT, ZEROS_RIGHT, TRANSPOSED, NOT_TRANSPOSED):
        names = [pair.name for pair in pairs if pair.note == note]
        words = note
        if note == NOT_TRANSPOSED:
            words = "square and not transposed, while the other matrices of the block are; it loads either way"
        if names:
            yield f"{first_few(names, _NAMED)}: {words}."


def _orders(pairs: Sequence[TensorPair]) -> Iterator[str]:
    """Yield a sentence for each order of rows, with the tensors that have it, and the lines that convert the left."""
    alike: dict[tuple[str, RowOrder], list[TensorPair]] = {}
    # A bias comes after the weights: it has the order of theirs, whatever their layout.
    for pair in sorted(pairs, key=_is_bias):
        if pair.order is not None:
            key = next((key for key in alike if _is_bias(pair) and _is_like(key, pair)), (pair.note, pair.order))
            alike.setdefault(key, []).append(pair)
    for (_, order), tensors in alike.items():
        first = first_few([pair.name for pair in tensors], _NAMED)
        yield f"{first}: {order_words(order)}."
        lines = dict.fromkeys(pair.order.line for pair in tensors if pair.order is not None and pair.order.line)
        for line, what in zip(lines, ("the left", "the biases"), strict=False):
            yield f"To convert {what}: {line}"


def _is_bias(pair: TensorPair) -> bool:
    return len(pair.left_shape) == 1


def _is_like(key: tuple[str, RowOrder], bias: TensorPair) -> bool:
    """Return whether a bias has an order of weights: they may be transposed, and in columns."""
    note, order = key
    in_layout = bias.order and replace(bias.order, axis=order.axis, transposed=order.transposed, line=order.line)
    return note == bias.note and in_layout == order


# -- heads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ChangedHead:
    """A head that differs in one matrix."""

    part: PartPair
    head: int
    change: float
    """Relative to the left norm."""

    def words(self) -> str:
        """Return the head and its change: `head 3 of W_q in layers.0 (12.3 %)`."""
        where = f" in {shown(self.part.left)}" if self.part.left else ""
        change = percent(self.change) if isfinite(self.change) else "not finite"
        return f"head {self.head} of {self.part.part}{where} ({change})"


def _changed_matrices(parts: Sequence[PartPair], exchanges: Sequence[Exchange]) -> list[PartPair]:
    """Return the matrices that were compared by head, without exchanged ones."""
    exchanged: set[tuple[str, str]] = set()
    for exchange in exchanges:
        for part in exchange.parts:
            exchanged.add((exchange.module, part))
    matrices = []
    for pair in parts:
        is_compared = pair.part.startswith("W") and pair.differences
        if is_compared and (pair.left, pair.part) not in exchanged:
            matrices.append(pair)
    return matrices


def _most_changed(matrices: Sequence[PartPair]) -> Iterator[str]:
    """Yield a sentence about the heads that differ most, and one per attention with only a few changed heads."""
    heads: list[_ChangedHead] = []
    for matrix in matrices:
        heads += _changed_heads(matrix)
    if not heads:
        return
    heads.sort(key=lambda head: head.change, reverse=True)
    most = [head.words() for head in heads[:_NAMED]]
    yield f"Heads that changed most, relative to the left norm: {', '.join(most)}."
    modules = dict.fromkeys(head.part.left for head in heads)
    for module in modules if len(modules) <= _NAMED else ():
        few = _few_changed([matrix for matrix in matrices if matrix.left == module])
        if few:
            yield f"In {shown(module) or 'the file'} only {listed(few)} changed."


def _changed_heads(matrix: PartPair) -> list[_ChangedHead]:
    """Return the heads of a matrix that differ."""
    return [_ChangedHead(matrix, head, change) for head, change in enumerate(matrix.differences) if change > 0]


def _few_changed(matrices: Sequence[PartPair]) -> list[str]:
    """Return the changed heads of each matrix of which not all changed: `heads 0, 2 of W_q`."""
    few = []
    for matrix in matrices:
        changed = [changed.head for changed in _changed_heads(matrix)]
        if changed and len(changed) < len(matrix.differences):
            heads = "heads" if len(changed) > 1 else "head"
            few.append(f"{heads} {spans(changed)} of {matrix.part}")
    return few
