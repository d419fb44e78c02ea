"""What a comparison of two checkpoints found, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import isfinite

from ...reports.diff import CheckpointDiffReport, PartPair, TensorVerdict
from ...text import listed, percent, plural, shown, spans

_NAMED = 5
"""Heads that the answer names."""


def answer(report: CheckpointDiffReport) -> Iterator[str]:
    """Yield whether both are the same, and what makes the difference, in sentences."""
    verdicts = Counter(one.verdict for one in report.tensors)
    number = len(report.tensors)
    renamed = sum(one.name != one.other for one in report.tensors)
    if verdicts["same bits"] == number and not (report.only_left or report.only_right or renamed):
        yield f"Yes: all {plural(number, 'tensor')} are the same bit for bit."
        return
    rounded = [one for one in report.tensors if one.verdict == "same within rounding"]
    dtypes = sorted({dtype for one in rounded for dtype in (one.left_dtype, one.right_dtype)})
    words: dict[TensorVerdict, str] = {
        "same bits": "the same bit for bit",
        "same within rounding": f"the same within the rounding of {listed(dtypes)}",
        "same, permuted": "the same numbers in another order",
        "differs": "different",
        "other shape": "of another shape",
    }
    said = [f"{count:,} {words[verdict]}" for verdict in words if (count := verdicts[verdict])]
    answer = "Yes" if report.verdict == "same" else "No"
    yield f"{answer}: {plural(number, 'tensor')} on both sides{': ' if said else ''}{listed(said)}."
    beside = [f"{renamed:,} of them under another name"] if renamed else []
    for own, where in ((report.only_left, "left"), (report.only_right, "right")):
        beside += [f"{len(own):,} only in the {where}"] if own else []
    if beside:
        yield f"{listed(beside)}."
    times = Counter(name for pair in report.tensors for name in (("left", pair.name), ("right", pair.other)))
    packed = (pair for pair in report.tensors if times["left", pair.name] > 1 or times["right", pair.other] > 1)
    for note in dict.fromkeys(pair.note for pair in packed):
        yield f"{note[0].upper()}{note[1:]}."
    yield from _most_changed(report.parts)


def _most_changed(parts: Iterable[PartPair]) -> Iterator[str]:
    """Yield the heads that differ most."""
    every = [
        (change, one.part, head, one.left)
        for one in parts
        if one.part.startswith("W")
        for head, change in enumerate(one.differences)
        if change > 0
    ]
    if not every:
        return
    every.sort(key=lambda item: -item[0])
    said = [
        f"head {head} of {part}{f' in {shown(module)}' if module else ''} "
        f"({percent(change) if isfinite(change) else 'not finite'})"
        for change, part, head, module in every[:_NAMED]
    ]
    yield f"Heads that changed most, by their share of the left one's norm: {', '.join(said)}."
    modules = list(dict.fromkeys(module for *_, module in every))
    for module in modules if len(modules) <= _NAMED else ():
        own: dict[str, list[int]] = {part: [] for part in ("W_q", "W_k", "W_v", "W_o")}
        for _, part, head, where in every:
            if where == module:
                own[part].append(head)
        total = {one.part: len(one.differences) for one in parts if one.left == module and one.differences}
        few = [
            f"head{'s' if len(heads) > 1 else ''} {spans(heads)} of {part}"
            for part, heads in own.items()
            if 0 < len(heads) < total.get(part, 0)
        ]
        if few:
            yield f"In {shown(module) or 'the file'} only {listed(few)} changed."
