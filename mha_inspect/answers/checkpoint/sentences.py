"""What a comparison of two checkpoints found, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite

from ...reports.checkpoint_diff import CheckpointDiffReport, PartPair, TensorVerdict
from ...text import first_few, listed, percent, plural, shown, spans

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
    for note in dict.fromkeys(
        one.note for one in report.tensors if one.note.endswith((" on the left", " on the right"))
    ):
        yield f"{note[0].upper()}{note[1:]}."
    yield from _orders(report.parts)
    yield from _most_changed(report.parts)


def _orders(parts: Iterable[PartPair]) -> Iterator[str]:
    """Yield a sentence for each way in which attentions hold the same numbers in another order."""
    by_module: dict[str, list[PartPair]] = {}
    for one in parts:
        by_module.setdefault(one.left, []).append(one)
    ways: dict[str, list[str]] = {}
    for module, own in by_module.items():
        moved = [one for one in own if one.verdict == "same, permuted"]
        if moved:
            ways.setdefault(_order(own, moved), []).append(module)
    for way, modules in ways.items():
        yield f"In {first_few([shown(module) or 'the file' for module in modules], 1)} {way}"


def _order(own: list[PartPair], moved: list[PartPair]) -> str:
    said = []
    exchanged = [f"{one.part} is {one.source} of the left" for one in moved if one.source != one.part]
    if exchanged:
        said.append(f"{listed(exchanged)}: q, k and v lie in another order")
    rotary = {one.rotary for one in moved if one.rotary}
    if rotary:
        parts = listed([one.part for one in moved if one.rotary])
        said.append(f"{parts} have the features that a rotary embedding turns in {' or '.join(rotary)}")
    matrices = {one.part: one.order for one in own if one.part.startswith("W") and one.verdict != "differs"}
    shifted = {part: heads for part, heads in matrices.items() if heads != tuple(range(len(heads)))}
    if shifted:
        part, heads = next(iter(shifted.items()))
        order = ", ".join(map(str, heads[:16])) + (", …" if len(heads) > 16 else "")
        alike = _is_consistent(matrices) and len(matrices) == sum(one.part.startswith("W") for one in own)
        same = (
            "of all parts alike, so that it computes the same"
            if alike
            else (f"of {listed(list(shifted))}, and not of all parts alike, so that it computes something else")
        )
        said.append(f"the heads are permuted, {same}: heads 0–{len(heads) - 1} of {part} are heads {order} of the left")
    return "; ".join(said or ["parts lie in one tensor in another packing"]) + "."


def _is_consistent(matrices: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether keys and values go with their queries, and columns of W_o with their heads."""
    query = matrices.get("W_q", ())
    if matrices.get("W_o", query) != query:
        return False
    for part in ("W_k", "W_v"):
        own = matrices.get(part, ())
        group = len(query) // max(len(own), 1)
        if not own or any(own[head // group] != source // group for head, source in enumerate(query)):
            return False
    return True


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
