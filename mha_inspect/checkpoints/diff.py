"""Compare two checkpoints tensor by tensor, and their attentions head by head."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..reports.diff import CheckpointDiffReport, PartPair, TensorPair, TensorVerdict
from ..reports.params import StoredName
from ..text import plural
from .attention_diff import AttentionComparison, AttentionDiff
from .diff_answer import answer_of
from .exchanged import Exchange
from .reordered import Reordered
from .tensor_pairs import SAME, moved_pairs, pair_of_other_shape, tensor_pair, with_untransposed
from .two_files import FileSide, TwoFiles


def diff_of_checkpoints(left: Path, right: Path, *, num_heads: int | None = None) -> CheckpointDiffReport:
    """Compare two checkpoints: tensors of one name, the heads of attentions, and renamed tensors.

    A side is a file, an index of shards, or a folder. `num_heads` is the head count, if no file has it. Raises the
    errors of `params_of_checkpoint`, and `DoesNotFitError` if a tensor takes more memory than is free.
    """
    files = TwoFiles.of(left, right, num_heads)
    same_name = _pairs_with_same_name(files)
    diffs = list(AttentionComparison(files, same_name).diffs())
    exchanges: list[Exchange] = []
    parts: list[PartPair] = []
    for diff in diffs:
        exchanges += diff.exchanges
        parts += diff.parts
    pairs = _in_order_of_left(_all_pairs(files, same_name, diffs, exchanges), files)
    only_left = _absent(files.left, {pair.name for pair in pairs})
    only_right = _absent(files.right, {pair.right_name for pair in pairs})
    are_same = all(pair.verdict in SAME for pair in pairs)
    report = CheckpointDiffReport(
        left=files.left.report(),
        right=files.right.report(),
        tensors=tuple(pairs),
        only_left=only_left,
        only_right=only_right,
        parts=tuple(parts),
        outcome="differs" if only_left or only_right or not are_same else "same",
        notes=tuple(_notes(files, diffs)),
        answer=(),
    )
    return replace(report, answer=tuple(answer_of(report, exchanges)))


def _pairs_with_same_name(files: TwoFiles) -> dict[str, TensorPair]:
    """Return the tensors that both files have under one name, compared."""
    pairs: dict[str, TensorPair] = {}
    for name in files.left.tensors:
        if name in files.right.tensors:
            pairs[name] = tensor_pair(files, name, name)
    return pairs


def _all_pairs(
    files: TwoFiles,
    same_name: Mapping[str, TensorPair],
    diffs: Sequence[AttentionDiff],
    exchanges: Sequence[Exchange],
) -> list[TensorPair]:
    """Return the pairs of tensors with one name, with the same parts, and with the same numbers."""
    unordered = list(same_name.values())
    orders: list[Reordered] = []
    for diff in diffs:
        unordered += diff.renamed
        orders += diff.orders
    pairs = [_with_exchange(pair, exchanges) for pair in _with_orders(unordered, orders, files)]
    pairs += moved_pairs(files, {pair.name for pair in pairs}, {pair.right_name for pair in pairs})
    return list(with_untransposed(pairs, files))


def _in_order_of_left(pairs: Iterable[TensorPair], files: TwoFiles) -> list[TensorPair]:
    places = {name: place for place, name in enumerate(files.left.tensors)}
    return sorted(pairs, key=lambda pair: places[pair.name])


def _absent(side: FileSide, paired: Collection[str]) -> tuple[StoredName, ...]:
    """Return the tensors of one side that are not paired."""
    absent = []
    for name, stored in side.tensors.items():
        if name not in paired:
            absent.append(StoredName(name, stored.shape))
    return tuple(absent)


def _notes(files: TwoFiles, diffs: Sequence[AttentionDiff]) -> Iterator[str]:
    """Yield the notes on both files, and a sentence on attentions that lack a head count."""
    for note in files.left.file.notes:
        yield f"The left: {note}"
    for note in files.right.file.notes:
        yield f"The right: {note}"
    unknown = sum(diff.lacks_head_count for diff in diffs)
    if unknown:
        yield (
            f"The head count of {plural(unknown, 'differing attention')} is unknown. "
            "Use e.g. --num-heads 8 to see which heads changed."
        )


def _with_orders(pairs: Iterable[TensorPair], orders: Iterable[Reordered], files: TwoFiles) -> Iterator[TensorPair]:
    """Yield pairs of tensors with the orders of their rows, and with the pairs that only these show."""
    remaining: dict[tuple[str, str], Reordered] = {}
    for tensors in orders:
        for name in tensors.names:
            remaining[name, tensors.right_name] = tensors
    for pair in pairs:
        names = pair.name, pair.right_name
        if names in remaining:
            yield _with_order(pair, remaining.pop(names))
        else:
            yield pair
    for names, tensors in remaining.items():
        yield _with_order(pair_of_other_shape(files, *names), tensors)


def _with_order(pair: TensorPair, tensors: Reordered) -> TensorPair:
    """Return a pair of tensors with the order of its rows."""
    order = tensors.order
    verdict: TensorVerdict = "same, permuted"
    if order.remaining:
        verdict = "differs"
    elif order.kept != "all":
        verdict = "other shape"
    words = []
    if len(tensors.names) > 1:
        words.append(f"{len(tensors.names)} tensors together")
    words += order.patterns[:1]
    note = ", ".join(words) or "no name for this order"
    return replace(pair, verdict=verdict, order=order, note=note)


def _with_exchange(pair: TensorPair, exchanges: Iterable[Exchange]) -> TensorPair:
    """Return a pair of tensors that differ, with the exchange of the parts that they have."""
    for exchange in exchanges if pair.verdict == "differs" else ():
        if pair.name in exchange.left_names and pair.right_name in exchange.right_names:
            return replace(pair, note=f"{pair.note}, {exchange.words()}".removeprefix(", "))
    return pair
