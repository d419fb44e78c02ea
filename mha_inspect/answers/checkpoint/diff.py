"""diff() of two files: checkpoints compared tensor by tensor, and attention by attention head by head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ...errors import SpecError
from ...files.attentions import NamedAttention, StoredProjection, find_attentions
from ...files.checkpoint import Checkpoint, read_checkpoint
from ...files.stored import StoredTensor
from ...files.tensors import read_stored
from ...reports.diff import CheckpointDiffReport, CheckpointSide, PartPair, TensorPair, TensorVerdict
from ...reports.params import StoredName
from ...text import listed, plural, shown
from .heads import Distance, distance, numbers_of
from .sentences import answer

_SAME: tuple[TensorVerdict, ...] = ("same bits", "same within rounding")
_WORSE: tuple[TensorVerdict, ...] = (*_SAME, "same, permuted", "other shape", "differs")
"""The verdict of several tensors is the last of theirs in this order."""
_FIRST = 64
"""Elements that are compared before two tensors are compared whole."""


def diff_of_checkpoints(left: Path, right: Path, *, num_heads: int | None = None) -> CheckpointDiffReport:
    """Compare two checkpoints: tensors of one name, the heads of attentions, and what has another name on one side.

    Args:
        left: a file, an index of shards, or a folder.
        right: likewise.
        num_heads: heads of the attentions, where it is known and the files do not tell it.

    Raises:
        InputError: a side has no tensors, or a file is damaged.
        UnsafeFileError: a file is compressed, or could only be opened by running code in it.
        SpecError: the shapes on neither side allow the head count that was given.
        DoesNotFitError: a tensor takes more memory than is free.
    """
    ours, theirs = (_Side.of(read_checkpoint(path), num_heads) for path in (left, right))
    counts = [own.stored.num_heads for side in (ours, theirs) for own in side.attentions.values()]
    if num_heads is not None and counts and num_heads not in counts:
        raise SpecError(f"num_heads {num_heads} does not fit the shapes of any attention in the two files.")
    pairs = {name: _pair(name, name, ours, theirs) for name in ours.tensors if name in theirs.tensors}
    parts: list[PartPair] = []
    unknown = 0
    every = [*pairs.values()]
    for one, other in _paired(ours, theirs):
        names = one.stored.parameters
        if {*names} == {*other.stored.parameters} and all(pairs[name].verdict in _SAME for name in names):
            continue
        count = one.stored.num_heads or other.stored.num_heads
        if count is None:
            unknown += 1
            continue
        attentions = ours.with_heads(one, count), theirs.with_heads(other, count)
        compared = _parts(*attentions, ours, theirs)
        parts += compared
        every += _renamed(*attentions, compared, ours, theirs)
    every += _moved(ours, theirs, {pair.name for pair in every}, {pair.other for pair in every})
    only_left = _absent(ours, {pair.name for pair in every})
    only_right = _absent(theirs, {pair.other for pair in every})
    place = {name: number for number, name in enumerate(ours.tensors)}
    same = not only_left and not only_right and all(pair.verdict in _SAME for pair in every)
    report = CheckpointDiffReport(
        ours.report(),
        theirs.report(),
        tuple(sorted(every, key=lambda pair: place[pair.name])),
        only_left,
        only_right,
        tuple(parts),
        "same" if same else "differs",
        tuple(_notes(ours, theirs, unknown)),
        (),
    )
    return replace(report, answer=tuple(answer(report)))


@dataclass(frozen=True)
class _Side:
    checkpoint: Checkpoint
    attentions: dict[str, NamedAttention]
    """By the path of the module."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, num_heads: int | None) -> _Side:
        attentions = find_attentions(checkpoint.tensors, checkpoint.config, num_heads)
        return cls(checkpoint, {attention.stored.module: attention for attention in attentions})

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return self.checkpoint.tensors

    def report(self) -> CheckpointSide:
        tensors = self.tensors.values()
        dtypes = Counter(tensor.dtype for tensor in tensors).most_common()
        return CheckpointSide(
            self.checkpoint.path.resolve().name,
            len(self.tensors),
            sum(tensor.numel for tensor in tensors),
            sum(tensor.nbytes for tensor in tensors),
            tuple(dtype for dtype, _ in dtypes),
        )

    def with_heads(self, attention: NamedAttention, count: int) -> NamedAttention:
        """Return one attention as it is with so many heads; as it was where they do not fit."""
        tensors = {name: self.tensors[name] for name in attention.stored.parameters}
        return next(iter(find_attentions(tensors, self.checkpoint.config, count)), attention)

    def read(self, name: str) -> Tensor:
        return read_stored(self.tensors[name], shown(name))


def _paired(left: _Side, right: _Side) -> Iterator[tuple[NamedAttention, NamedAttention]]:
    """Yield the attentions of one path; where names share none, and both have as many, those in one place."""
    ours, theirs = left.attentions, right.attentions
    if not ours.keys() & theirs.keys() and len(ours) == len(theirs):
        yield from zip(ours.values(), theirs.values(), strict=True)
        return
    yield from ((attention, theirs[module]) for module, attention in ours.items() if module in theirs)


# -- heads ------------------------------------------------------------------------------------------------------------


def _parts(one: NamedAttention, other: NamedAttention, left: _Side, right: _Side) -> list[PartPair]:
    """Compare two attentions part by part: `W_q`, `b_q` and so on, by head."""
    ours = numbers_of(one.projections, left.tensors)
    theirs = numbers_of(other.projections, right.tensors)
    pairs = []
    for part in sorted({*ours} & {*theirs}, key=lambda part: (part[0], "qkvo".find(part[-1]))):
        verdict: TensorVerdict = "other shape"
        differences: tuple[float, ...] = ()
        if ours[part].shape == theirs[part].shape:
            verdict = _verdict(distance(ours[part], theirs[part]))
        if verdict == "differs":
            differences = tuple(distance(*heads).relative for heads in zip(ours[part], theirs[part], strict=True))
        pairs.append(PartPair(one.stored.module, other.stored.module, part, verdict, differences))
    return pairs


# -- tensors ----------------------------------------------------------------------------------------------------------


def _verdict(apart: Distance) -> TensorVerdict:
    return "same bits" if apart.same_bits else "same within rounding" if apart.within_rounding else "differs"


def _pair(name: str, other: str, left: _Side, right: _Side) -> TensorPair:
    """Compare two tensors."""
    ours, theirs = left.tensors[name], right.tensors[other]
    pair = TensorPair(name, other, ours.shape, theirs.shape, ours.dtype, theirs.dtype, "other shape", None, None)
    turned = ours.shape != theirs.shape
    if turned and (ours.shape != theirs.shape[::-1] or len(ours.shape) != 2):
        return pair
    if not ours.numel:
        return replace(pair, verdict="same bits")
    if not (ours.has_numbers and theirs.has_numbers):
        absent = ours.read is None or theirs.read is None
        return replace(pair, verdict="differs", note="it has no numbers in the file" if absent else "complex numbers")
    if turned:
        same = distance(left.read(name).T.contiguous(), right.read(other)).within_rounding
        return replace(pair, verdict="same, permuted", note="transposed") if same else pair
    apart = distance(left.read(name), right.read(other))
    return replace(pair, verdict=_verdict(apart), max_abs_difference=apart.largest, relative_difference=apart.relative)


def _renamed(
    one: NamedAttention, other: NamedAttention, parts: Iterable[PartPair], left: _Side, right: _Side
) -> Iterator[TensorPair]:
    """Yield the tensors of two attentions that have the same parts under other names, or in more tensors or fewer."""
    verdicts = {part.part: part.verdict for part in parts}
    where = {projection.part: projection for projection in other.projections if projection.tensor not in left.tensors}
    shared: dict[tuple[str, str], list[tuple[StoredProjection, StoredProjection]]] = {}
    for ours in one.projections:
        if ours.part in where and ours.part in verdicts and ours.tensor not in right.tensors:
            theirs = where[ours.part]
            shared.setdefault((ours.tensor, theirs.tensor), []).append((ours, theirs))
    for (name, other_name), projections in shared.items():
        verdict = max((verdicts[ours.part] for ours, _ in projections), key=_WORSE.index)
        note = _packing(shared, (name, other_name))
        if not note and any(ours.axis != theirs.axis for ours, theirs in projections):
            note = "transposed"
        verdict = "same, permuted" if note and verdict in _SAME else verdict
        ours_stored, theirs_stored = left.tensors[name], right.tensors[other_name]
        shapes, dtypes = (ours_stored.shape, theirs_stored.shape), (ours_stored.dtype, theirs_stored.dtype)
        yield TensorPair(name, other_name, *shapes, *dtypes, verdict, None, None, note)


def _packing(
    shared: Mapping[tuple[str, str], list[tuple[StoredProjection, StoredProjection]]], pair: tuple[str, str]
) -> str:
    """Return in words that several tensors of one side are one on the other; empty where they are not."""
    for side, (packed, apart) in enumerate((("left", "right"), ("right", "left"))):
        several = [names for names in shared if names[side] == pair[side]]
        if len(several) > 1:
            letters = sorted((ours.part[-1] for names in several for ours, _ in shared[names]), key="qkv".find)
            return f"{listed(letters)} lie in one tensor on the {packed}, in several on the {apart}"
    return ""


def _moved(left: _Side, right: _Side, named: Collection[str], others: Collection[str]) -> Iterator[TensorPair]:
    """Yield tensors that are on one side under one name and on the other under another, with the same numbers."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for other, stored in right.tensors.items():
        if other not in others and stored.has_numbers:
            by_shape.setdefault(stored.shape, []).append(other)
    first = {name: right.read(name).flatten()[:_FIRST].clone() for names in by_shape.values() for name in names}
    for name, stored in left.tensors.items():
        if name in named or not stored.has_numbers or stored.shape not in by_shape:
            continue
        numbers = left.read(name)
        is_constant = bool(
            (numbers == numbers.flatten()[0]).all()
        )  # a norm that never learned: others are so by chance
        for other in by_shape[stored.shape]:
            alike = name.rsplit(".", 2)[-2:] == other.rsplit(".", 2)[-2:]
            if (is_constant and not alike) or not distance(numbers.flatten()[:_FIRST], first[other]).within_rounding:
                continue
            pair = _pair(name, other, left, right)
            if pair.verdict in _SAME:
                by_shape[stored.shape].remove(other)
                yield pair
                break


def _absent(side: _Side, names: Collection[str]) -> tuple[StoredName, ...]:
    return tuple(StoredName(name, stored.shape) for name, stored in side.tensors.items() if name not in names)


def _notes(left: _Side, right: _Side, unknown: int) -> Iterator[str]:
    for name, side in (("left", left), ("right", right)):
        yield from (f"The {name}: {note}" for note in side.checkpoint.notes)
    if unknown:
        yield (
            f"Nothing tells the heads of {plural(unknown, 'attention')} that differ: give them, as in --num-heads "
            "8, to see which heads changed."
        )
