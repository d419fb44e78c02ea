"""diff() of two files: checkpoints compared tensor by tensor, and attention by attention head by head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from torch import Tensor

from ...errors import SpecError
from ...files.attentions import FoundAttention, StoredProjection, find_attentions
from ...files.checkpoint import Checkpoint, read_checkpoint
from ...files.stored import StoredTensor
from ...files.tensors import read_stored
from ...reports.checkpoint_diff import CheckpointDiffReport, CheckpointSide, PartPair, TensorPair, TensorVerdict
from ...reports.params import StoredName
from ...text import listed, plural, shown
from .heads import Distance, Numbers, distance, has_numbers, matched, numbers_of
from .sentences import answer

_PIECE = 1 << 20
"""Elements that are read and compared at a time."""
Projections = tuple[StoredProjection, ...]
_Way = tuple[Projections, Projections, str, bool]
"""Where each side has its heads, a note on how they are packed, and whether that is known."""
_SAME: tuple[TensorVerdict, ...] = ("same bits", "same within rounding")
_WORSE: tuple[TensorVerdict, ...] = (*_SAME, "same, permuted", "other shape", "differs")
"""What stands for several, the last of them."""


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
        DoesNotFitError: the parts of one attention take more memory than is free.
    """
    return _Comparison(read_checkpoint(left), read_checkpoint(right), num_heads).report()


@dataclass(frozen=True)
class _Side:
    checkpoint: Checkpoint
    attentions: dict[str, FoundAttention]
    """By the path of the module."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, num_heads: int | None) -> _Side:
        found = find_attentions(checkpoint.tensors, checkpoint.config, num_heads)
        return cls(checkpoint, {own.stored.module: own for own in found})

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return self.checkpoint.tensors

    def report(self) -> CheckpointSide:
        every = self.tensors.values()
        dtypes = Counter(tensor.dtype for tensor in every).most_common()
        return CheckpointSide(
            self.checkpoint.path.resolve().name,
            len(self.tensors),
            sum(tensor.numel for tensor in every),
            sum(tensor.nbytes for tensor in every),
            tuple(dtype for dtype, _ in dtypes),
        )

    def with_heads(self, module: str, count: int) -> FoundAttention:
        """Return one attention as it is with so many heads."""
        own = self.attentions[module]
        held = {name: self.tensors[name] for name in own.stored.parameters}
        return next(iter(find_attentions(held, self.checkpoint.config, count)), own)


class _Comparison:
    def __init__(self, left: Checkpoint, right: Checkpoint, num_heads: int | None) -> None:
        self._left, self._right = _Side.of(left, num_heads), _Side.of(right, num_heads)
        every = [own.stored for side in (self._left, self._right) for own in side.attentions.values()]
        if num_heads is not None and every and all(own.num_heads != num_heads for own in every):
            raise SpecError(f"num_heads {num_heads} does not fit the shapes of any attention in the two files.")

    def report(self) -> CheckpointDiffReport:
        """Return the report, with its sentences."""
        left, right = self._left, self._right
        shared = [name for name in left.tensors if name in right.tensors]
        pairs = {name: _pair(name, name, left.tensors[name], right.tensors[name]) for name in shared}
        readings: list[_Reading] = []
        for ours, theirs in self._paired():
            own = ours.stored.parameters
            if {*own} != {*theirs.stored.parameters} or any(pairs[name].verdict not in _SAME for name in own):
                found = self._read(ours, theirs)
                readings.append(found)
                for name in own:
                    if name in pairs and pairs[name].verdict not in _SAME and found.holds(name):
                        pairs[name] = replace(pairs[name], verdict="same, permuted", note=found.packing)
        found_pairs = [*pairs.values(), *self._renamed(readings)]
        found_pairs += self._moved(found_pairs)
        names, others = {one.name for one in found_pairs}, {one.other for one in found_pairs}
        only_left = tuple(StoredName(name, own.shape) for name, own in left.tensors.items() if name not in names)
        only_right = tuple(StoredName(name, own.shape) for name, own in right.tensors.items() if name not in others)
        place = {name: at for at, name in enumerate(left.tensors)}
        tensors = tuple(sorted(found_pairs, key=lambda one: place[one.name]))
        same = not only_left and not only_right and all(one.verdict in _SAME for one in tensors)
        report = CheckpointDiffReport(
            left.report(),
            right.report(),
            tensors,
            only_left,
            only_right,
            tuple(part for one in readings for part in one.parts),
            "same" if same else "differs",
            tuple(self._notes(readings)),
            (),
        )
        return replace(report, answer=tuple(answer(report)))

    def _paired(self) -> Iterator[tuple[FoundAttention, FoundAttention]]:
        """Yield the attentions of one path; where names share none, and both have as many, those in one place."""
        ours, theirs = self._left.attentions, self._right.attentions
        if not ours.keys() & theirs.keys() and len(ours) == len(theirs):
            yield from zip(ours.values(), theirs.values(), strict=True)
            return
        yield from ((own, theirs[module]) for module, own in ours.items() if module in theirs)

    # -- heads --------------------------------------------------------------------------------------------------------

    def _read(self, ours: FoundAttention, theirs: FoundAttention) -> _Reading:
        """Compare two attentions by head: as they are, or as another order or packing makes them the same."""
        first: _Reading | None = None
        for left, right, note, is_known in self._ways(ours, theirs):
            one, other = numbers_of(left, self._left.tensors), numbers_of(right, self._right.tensors)
            order = sorted((part for part in other if part in one), key=lambda part: (part[0], "qkvo".find(part[-1])))
            parts = [_part(ours.stored.module, theirs.stored.module, part, one, other) for part in order]
            found = _Reading(tuple(parts), left, right, note)
            if parts and all(part.verdict not in ("differs", "other shape") for part in parts):
                return found
            # Where the heads are not known none can be said to have changed.
            first = first or (found if is_known else None)
        return first or _Reading((), (), (), "")

    def _ways(self, ours: FoundAttention, theirs: FoundAttention) -> Iterator[_Way]:
        """Yield where each side may have its heads, and whether that is known: as names tell, and as shapes allow.

        With a note where q, k and v are taken to be packed in two ways.
        """
        known = ours.stored.num_heads or theirs.stored.num_heads
        for count in [known] if known else sorted({*ours.stored.fits} & {*theirs.stored.fits}):
            one = self._left.with_heads(ours.stored.module, count)
            other = self._right.with_heads(theirs.stored.module, count)
            if one.stored.num_heads != other.stored.num_heads:
                one, other = ours, theirs
            if all(any(part.part == "W_q" for part in own.projections) for own in (one, other)):
                yield one.projections, other.projections, "", known is not None
            for (own, left), (way, right) in product(_packings(one), _packings(other)):
                note = f"q, k and v are packed {own} on the left, {way} on the right" if own and way != own else ""
                yield left, right, note if way else "", False

    # -- names ---------------------------------------------------------------------------------------------------------

    def _renamed(self, readings: Iterable[_Reading]) -> Iterator[TensorPair]:
        """Yield the tensors of attentions that hold the same parts under other names, or in more tensors or fewer."""
        for reading in readings:
            verdicts = {part.part: part.verdict for part in reading.parts}
            where = {own.part: own for own in reading.right if own.tensor not in self._left.tensors}
            held: dict[tuple[str, str], list[str]] = {}
            turned = set()
            for own in reading.left:
                if own.part in where and own.part in verdicts and own.tensor not in self._right.tensors:
                    theirs = where[own.part]
                    held.setdefault((own.tensor, theirs.tensor), []).append(own.part)
                    if own.axis != theirs.axis:
                        turned.add(theirs.tensor)
            lefts, rights = (Counter(pair[side] for pair in held) for side in (0, 1))
            for (name, other), parts in held.items():
                one, two = self._left.tensors[name], self._right.tensors[other]
                verdict, note = max((verdicts[part] for part in parts), key=_WORSE.index), ""
                if lefts[name] > 1 or rights[other] > 1:
                    side, packed, apart = (0, "left", "right") if lefts[name] > 1 else (1, "right", "left")
                    inside = (part for pair, own in held.items() if pair[side] == (name, other)[side] for part in own)
                    letters = sorted((part[-1] for part in inside), key="qkv".find)
                    note = f"{listed(letters)} lie in one tensor on the {packed}, in several on the {apart}"
                elif other in turned:
                    note = "transposed"
                verdict = "same, permuted" if note and verdict in _SAME else verdict
                yield TensorPair(name, other, one.shape, two.shape, one.dtype, two.dtype, verdict, None, None, note)

    def _moved(self, pairs: Sequence[TensorPair]) -> Iterator[TensorPair]:
        """Yield tensors that are on one side under one name and on the other under another, with the same numbers."""
        known, taken = {one.name for one in pairs}, {one.other for one in pairs}
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name, own in self._right.tensors.items():
            if name not in taken:
                by_shape.setdefault(own.shape, []).append(name)
        for name, own in self._left.tensors.items():
            for other in () if name in known else by_shape.get(own.shape, ()):
                found = _pair(name, other, own, self._right.tensors[other], until_differs=True)
                ends = [text.rsplit(".", 2)[-2:] for text in (name, other)]
                if found.verdict in _SAME and (ends[0] == ends[1] or not _is_constant(own, name)):
                    by_shape[own.shape].remove(other)
                    yield found
                    break

    def _notes(self, readings: Iterable[_Reading]) -> Iterator[str]:
        for name, side in (("left", self._left), ("right", self._right)):
            yield from (f"The {name}: {note}" for note in side.checkpoint.notes)
        unknown = sum(not reading.parts for reading in readings)
        if unknown:
            yield (
                f"Nothing tells the heads of {plural(unknown, 'attention')} that differ: give them, as in --num-heads "
                "8, to see which heads changed."
            )


def _packings(found: FoundAttention) -> list[tuple[str, Projections]]:
    """Return the ways in which an attention may be packed; the one without a name where it is not."""
    return list(found.packed.items()) or [("", found.projections)]


@dataclass(frozen=True)
class _Reading:
    """Two attentions, compared part by part, and where each side was taken to have them."""

    parts: tuple[PartPair, ...]
    left: Projections
    right: Projections
    packing: str
    """How q, k and v are packed, where it is not the same on both sides."""

    def holds(self, name: str) -> bool:
        """Return whether all that a tensor of the left holds is the same on the right, in another order."""
        own = {one.part for one in self.left if one.tensor == name}
        verdicts = {part.part: part.verdict for part in self.parts}
        return bool(own) and all(verdicts.get(part) in (*_SAME, "same, permuted") for part in own)


def _part(module: str, other: str, part: str, left: Numbers, right: Numbers) -> PartPair:
    """Compare a part of two attentions."""
    ours, theirs = left[part], right[part]
    heads = tuple(range(len(theirs)))
    if ours.shape == theirs.shape:
        whole = distance(ours, theirs)
        if whole.within_rounding:
            return PartPair(module, other, part, _verdict(whole), part, heads, "", ())
    found = matched(part, left, right)
    if found is not None:
        return PartPair(module, other, part, "same, permuted", *found, ())
    if ours.shape != theirs.shape:
        return PartPair(module, other, part, "other shape", part, (), "", ())
    each = tuple(distance(one, two).relative for one, two in zip(ours, theirs, strict=True))
    return PartPair(module, other, part, "differs", part, heads, "", each)


def _is_constant(tensor: StoredTensor, name: str) -> bool:
    """Return whether all elements are one number, as in a norm that never learned: others may be that by chance."""
    bounds = [(float(own.double().min()), float(own.double().max())) for own in _pieces(tensor, name)]
    return min(low for low, _ in bounds) == max(high for _, high in bounds)


def _verdict(found: Distance) -> TensorVerdict:
    return "same bits" if found.same_bits else "same within rounding" if found.within_rounding else "differs"


def _pair(name: str, other: str, left: StoredTensor, right: StoredTensor, *, until_differs: bool = False) -> TensorPair:
    """Compare two tensors, a piece at a time; with `until_differs` no further than to the first piece that does."""
    pair = TensorPair(name, other, left.shape, right.shape, left.dtype, right.dtype, "other shape", None, None)
    if left.shape != right.shape and (left.shape != right.shape[::-1] or len(left.shape) != 2):
        return pair
    if not left.numel:
        return replace(pair, verdict="same bits")
    if not (has_numbers(left) and has_numbers(right)):
        whole = left.offset is not None and right.offset is not None
        return replace(pair, verdict="differs", note="complex numbers" if whole else "it has no numbers in the file")
    if left.shape != right.shape:
        same = distance(read_stored(left, shown(name)).T.contiguous(), read_stored(right, shown(other))).within_rounding
        return replace(pair, verdict="same, permuted", note="transposed") if same else pair
    found = Distance()
    for one, two in zip(_pieces(left, name), _pieces(right, other), strict=True):
        found.add(one, two)
        if until_differs and not found.within_rounding:
            return replace(pair, verdict="differs")
    return replace(pair, verdict=_verdict(found), max_abs_difference=found.largest, relative_difference=found.relative)


def _pieces(tensor: StoredTensor, name: str) -> Iterator[Tensor]:
    """Yield the rows of a tensor, some at a time."""
    if not tensor.shape:
        yield read_stored(tensor, shown(name))
        return
    rows = max(1, _PIECE * tensor.shape[0] // tensor.numel)
    for start in range(0, tensor.shape[0], rows):
        yield read_stored(tensor.rows(start, min(start + rows, tensor.shape[0])), shown(name))
