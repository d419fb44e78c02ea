"""What padding masks show: whether they move real outputs, and whether they mean what was declared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...reports.check import Finding, SkippedCheck
from .bench import LOOSE, Bench
from .masks import Masked, mask_faults, masked_runs, padded_source
from .reach import other_tokens
from .runner import NotPossibleError, RaisedError, difference
from .sources import Source


def padding(bench: Bench) -> Iterator[Finding | SkippedCheck]:
    """Yield where padding moves real outputs, or its mask means the opposite of what was declared."""
    findings = list(mask_faults(bench))
    yield from findings
    name = bench.intent.padding
    if name is None and not findings:
        raise NotPossibleError("not declared: padding")
    if name is None or any(finding.sure for finding in findings):
        return
    if not bench.sources or not bench.follows or bench.sources[0].batch is None:
        raise NotPossibleError("the output has no place for each token of each row")
    source = padded_source(bench, name)
    if source.length < 3:
        raise NotPossibleError("there are fewer than 3 tokens: give more")
    fault = _Padded(bench, name, source).fault()
    if fault is not None:
        yield fault


class _Padded:
    """Every other row of the batch, the first among them, with padding at one end, and what moves then."""

    def __init__(self, bench: Bench, name: str, source: Source) -> None:
        self._bench, self._name, self._source = bench, name, source
        self._is_first = source is bench.sources[0]
        self._side = bench.intent.padding_side or "right"
        count = max(min(2, source.length - 2), source.length // 4)
        cut = source.length - count if self._side == "right" else count
        self._real, pads = slice(0, cut), slice(cut, None)
        if self._side == "left":
            self._real, pads = pads, self._real
        self._pads = range(source.length)[pads]
        padded = torch.zeros(source.rows, source.length, dtype=torch.bool)
        padded[0::2, pads] = True
        like, keeps = bench.values.get(name), bench.intent.padding_true != "ignore"
        for run in masked_runs(bench):
            if isinstance(run, Masked) and run.name == name:
                like = run.value.new_zeros(padded.shape) if like is None else like
                keeps = bool(run.meaning[0]) if run.bars != run.opens else keeps
        self._mask = mask_like(like, padded, keeps)
        self._base = bench.run({name: self._mask})

    def _finding(self, sentence: str, evidence: str, fix: str = "") -> Finding:
        return Finding("padding", sentence, evidence, source=self._bench.mask_line, fix=fix)

    def fault(self) -> Finding | SkippedCheck | None:
        """Return what is wrong, or why its length could not be checked; None where nothing is."""
        bench, name, means = self._bench, self._name, self._bench.intent.padding_true
        ends = f"the {'last' if self._side == 'right' else 'first'} {len(self._pads)} tokens of row 0 were padded"
        real = bench.base_row(self._real if self._is_first else slice(None))
        if bool(self._base[real].isnan().any()):
            return self._finding("Padding gives NaN at real tokens.", f"T{ends[1:]} with {name}.")
        others = other_tokens(bench, self._source, self._source.at(0, torch.tensor(self._pads)), by=6.0)
        moved = bench.moved(bench.run({name: self._mask, **others}), self._base)[0]
        leaks = float((moved[self._real] if self._is_first else moved).max())
        if leaks:
            return self._finding(
                "The content of padding moves real outputs"
                + ("." if means else ", whichever value of the mask ignores."),
                f"With {name} True or 1 for {means or 'keep'}, {ends} and changed, and a real output moved by "
                f"{leaks:.3g}.",
                "the mask belongs to the keys: mask[:, None, None, :] beside batch heads query key.",
            )
        return self._of_length(self._base[real])

    def _of_length(self, before: Tensor) -> Finding | SkippedCheck | None:
        """Return what is wrong where row 0 gives something else without its padding."""
        bench, count = self._bench, len(self._pads)
        try:
            short = self._cropped()
        except RaisedError as error:
            return SkippedCheck("padding", f"its length: the forward does not take the row without it ({error})")
        apart = float(difference(short[bench.base_row(slice(None))], before).max())
        if apart <= LOOSE * bench.limit:
            return None
        start = self._real.start
        is_left = self._side == "left"
        return self._finding(
            f"{'The side' if is_left else 'The length'} of the padding moves real outputs, by {apart:.3g}.",
            f"Row 0 with {count} tokens of padding on the {self._side} gives something else at tokens {start}–"
            f"{start + self._source.length - count - 1} than without it; the padding's content moves nothing.",
            "count positions from the first real token: position_ids = mask.cumsum(-1) - 1." if is_left else "",
        )

    def _cropped(self) -> Tensor:
        """Return the output of row 0 alone, without its padding."""
        bench, length, rows = self._bench, self._source.length, self._source.rows
        given = {name: value for name, value in bench.values.items() if isinstance(value, Tensor)}
        changes: dict[str, Tensor] = {}
        for name, value in {**given, self._name: self._mask}.items():
            sizes, index = list(value.shape), [slice(None)] * value.dim()
            same = next((source for source in bench.sources if name in source.names), None)
            pairs = name in given and sizes == [length, length]
            if same is not None:
                index = list(same.at(slice(0, 1), self._real if same is self._source else slice(None)))
            elif value.dim() > 1 and sizes[0] == rows and not pairs:
                index[0] = slice(0, 1)
            if same is None and (self._is_first or name == self._name):
                for place in range(max(value.dim() - 2, 0), value.dim()):
                    if sizes[place] == length and (place > 0 or pairs):
                        index[place] = self._real
            changes[name] = value[tuple(index)]
        return bench.run(changes)


def mask_like(given: Any, padded: Tensor, keeps: bool) -> Tensor:
    """Return a mask as the forward takes it, from `batch key` where True is padded."""
    value = ~padded if keeps else padded
    if not isinstance(given, Tensor):
        return value
    if given.is_floating_point() and given.dim() > 2 and bool((given <= 0).all()):
        value = torch.zeros(padded.shape).masked_fill(padded, torch.finfo(given.dtype).min)
    value = value.to(given)
    if given.dim() == 2 and given.shape == padded.shape[::-1] != padded.shape:
        value = value.T
    while value.dim() < given.dim():
        value = value.unsqueeze(1)
    if given.dim() > 2:
        value = value.expand(value.shape[0], *given.shape[1:-2], given.shape[-2], value.shape[-1]).contiguous()
    return value
