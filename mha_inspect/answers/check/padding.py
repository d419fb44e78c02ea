"""What padding masks show: whether they move real outputs, and whether they mean what was declared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...reports.check import Finding, LeftOut
from .bench import LOOSE, Bench
from .masks import mask_faults
from .outputs import NotPossibleError, difference
from .reach import other_tokens
from .runner import RaisedError
from .sources import Source


def padding(bench: Bench) -> Iterator[Finding | LeftOut]:
    """Yield where padding moves real outputs, or its mask means the opposite of what was declared."""
    found = list(mask_faults(bench))
    yield from found
    name, told = bench.intent.padding, bench.intent.padding_true
    if name is None and not found:
        raise NotPossibleError("not declared: padding")
    if name is None or any(finding.sure for finding in found):
        return
    bench.given.require(name)
    if not bench.sources or not bench.follows or bench.sources[0].batch is None:
        raise NotPossibleError("the output has no place for each token of each row")
    source = _padded_source(bench, name)
    if source.length < 3:
        raise NotPossibleError("there are fewer than 3 tokens: give more")
    padded = _Padded(bench, name, source, keeps=told != "ignore")
    if told is None and (padded.leaks or padded.is_dead):
        padded = _Padded(bench, name, source, keeps=False)
    fault = padded.fault()
    if fault is not None:
        yield fault


def _padded_source(bench: Bench, name: str) -> Source:
    given = bench.values.get(name)
    sources = [source for source in bench.sources if source.positions is not None]
    fitting = [source for source in sources if isinstance(given, Tensor) and given.shape[-1] == source.length]
    if not fitting and any(word in name for word in ("encoder", "memory", "key", "src", "context")):
        fitting = sources[1:2]
    return (fitting or sources)[0]


class _Padded:
    """Every other row of the batch, the first among them, with padding at one end, and what moves then."""

    def __init__(self, bench: Bench, name: str, source: Source, *, keeps: bool) -> None:
        """Run it with a mask in which True `keeps`, with other padding, and with another real token."""
        self._bench, self._name, self._source = bench, name, source
        self._is_own = source is bench.sources[0]
        self._side = bench.intent.padding_side or "right"
        count = max(min(2, source.length - 2), source.length // 4)
        cut = source.length - count if self._side == "right" else count
        self._real, pads = slice(0, cut), slice(cut, None)
        if self._side == "left":
            self._real, pads = pads, self._real
        positions = range(source.length)
        self._pads, real = positions[pads], positions[self._real]
        padded = torch.zeros(source.rows, source.length, dtype=torch.bool)
        padded[0::2, pads] = True
        given = bench.values.get(name)
        self._mask = mask_like(given, padded, keeps)
        try:
            self._base = bench.run({name: self._mask})
        except RaisedError:
            if given is not None:
                raise
            self._mask = self._mask.long()
            self._base = bench.run({name: self._mask})
        self._moved = bench.moved(self._with_others(0, torch.tensor(self._pads), by=6.0), self._base)
        places = list(real if self._is_own else range(bench.sources[0].length))
        self.leaks = float(self._moved[0, places].max())
        """By how much other padding moves real outputs."""
        apart = bench.apart(self._with_others(0, real[0]), self._base)[0]
        rest = [place for place in places if not self._is_own or place != real[0]]
        self.is_dead = not bool((apart[rest] > 0).any())
        """Whether another real token moves no other real output."""
        behind = self._is_own and len(self._pads) > 1 and self._pads[0] > real[0]
        if behind and not self.is_dead and not self.leaks and not bool((apart[list(self._pads)] > 0).any()):
            # Behind a causal mask real tokens see no padding; what padding sees tells the mask's direction.
            apart = bench.apart(self._with_others(0, self._pads[0]), self._base)[0]
            self.is_dead = bool((apart[list(self._pads[1:])] > 0).any())

    def _with_others(self, row: int, positions: int | Tensor, *, by: float = 2.0) -> Tensor:
        """The output with other tokens at some positions of a row."""
        tokens = other_tokens(self._bench, self._source, self._source.at(row, positions), by=by)
        return self._bench.run({self._name: self._mask, **tokens})

    def _finding(self, sentence: str, evidence: str, fix: str = "") -> Finding:
        return Finding("padding", sentence, evidence, source=self._bench.mask_line, fix=fix)

    def fault(self) -> Finding | LeftOut | None:
        """Return what is wrong, or why its length could not be checked; None where nothing is."""
        name, leaks, told = self._name, self.leaks, self._bench.intent.padding_true
        ends = f"the {'last' if self._side == 'right' else 'first'} {len(self._pads)} tokens of row 0 were padded"
        meaning = f"{name} with True or 1 for {told or 'keep'}"
        rows = _of_row(self._bench, self._real if self._is_own else slice(None))
        if bool(self._base[rows].isnan().any()):
            return self._finding("Padding gives NaN at real tokens.", f"T{ends[1:]} with {name}.")
        if self.is_dead:
            seen = ", and what it ignores is seen." if leaks else "."
            moved = f"; padding was changed, and they moved by {leaks:.3g}." if leaks else "."
            return self._finding(
                f"The mask works the other way round: what {name} keeps is barred{seen}",
                f"With {meaning}, a real token of row 0 was changed, and no other real output moved by one bit{moved}",
                f"turn the mask round where it is applied (~{name}), or say what it means otherwise.",
            )
        if leaks:
            return self._finding(
                "The content of padding moves real outputs"
                + ("." if told else ", whichever value of the mask ignores."),
                f"With {meaning}, {ends} and changed, and a real output moved by {leaks:.3g}.",
                "the mask belongs to the keys: mask[:, None, None, :] beside batch heads query key.",
            )
        if others := self._of_other_rows():
            return self._finding(
                "The mask of one row bars keys of another row.",
                others,
                "repeat the mask in the order in which batch and heads are folded: repeat_interleave(heads, 0) for "
                "(batch heads).",
            )
        return self._of_length(self._base[rows])

    def _of_other_rows(self) -> str:
        """What the padding of one row does to another; empty where that is nothing."""
        bench, source, place = self._bench, self._source, self._pads[0]
        if not self._is_own or source.rows < 2:
            return ""
        # Row 1 has no padding: where row 0 is padded it has real tokens.
        far = bench.apart(self._with_others(1, place), self._base)[1]
        far[place] = 0
        without = bench.run(other_tokens(bench, source, source.at(1, place)))
        is_open = int((bench.apart(without, bench.output)[1] > 0).sum()) > 1
        if is_open and not bool((far > 0).any()):
            return (
                f"Token {place} of row 1, where row 0 alone is padded, was changed, and no other output of row 1 "
                "moved; without padding they do."
            )
        moves = bool((self._moved[1:] > 0).any())
        return "Padding of row 0 was changed, and outputs of another row moved." if moves else ""

    def _of_length(self, before: Tensor) -> Finding | LeftOut | None:
        """Return what is wrong where row 0 gives something else without its padding."""
        bench, count = self._bench, len(self._pads)
        try:
            short = self._cropped()
        except RaisedError as error:
            return LeftOut("padding", f"its length: the forward does not take the row without it ({error})")
        apart = float(difference(short[_of_row(bench, slice(None))], before).max())
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
        """The output of row 0 alone, without its padding."""
        bench, length, rows = self._bench, self._source.length, self._source.rows
        given = {name: value for name, value in bench.values.items() if isinstance(value, Tensor)}
        changes: dict[str, Tensor] = {}
        for name, value in {**given, self._name: self._mask}.items():
            sizes, index = list(value.shape), [slice(None)] * value.dim()
            own = next((source for source in bench.sources if name in source.names), None)
            pairs = name in given and sizes == [length, length]
            if own is not None:
                index = list(own.at(slice(0, 1), self._real if own is self._source else slice(None)))
            elif value.dim() > 1 and sizes[0] == rows and not pairs:
                index[0] = slice(0, 1)
            if own is None and (self._is_own or name == self._name):
                for place in range(max(value.dim() - 2, 0), value.dim()):
                    if sizes[place] == length and (place > 0 or pairs):
                        index[place] = self._real
            changes[name] = value[tuple(index)]
        return bench.run(changes)


def _of_row(bench: Bench, positions: slice) -> tuple[Any, ...]:
    """The index of some outputs of row 0."""
    return bench.sources[0].at(0, positions)[: bench.output.dim()]


def mask_like(given: Any, padded: Tensor, keeps: bool) -> Tensor:
    """A mask as the forward takes it, of `batch key` where True is padded."""
    kept = ~padded
    if isinstance(given, Tensor) and given.is_floating_point() and bool((given <= 0).all()) and given.dim() > 2:
        value = torch.zeros(padded.shape, dtype=given.dtype).masked_fill(padded, torch.finfo(given.dtype).min)
    else:
        value = kept if keeps else padded
        dtype = given.dtype if isinstance(given, Tensor) else torch.bool
        value = value.to(dtype)
    if isinstance(given, Tensor):
        value = value.to(given.device)
        if given.dim() == 2 and given.shape == padded.shape[::-1] and given.shape != padded.shape:
            value = value.T
        while value.dim() < given.dim():
            value = value.unsqueeze(1)
        if given.dim() > 2:
            value = value.expand(value.shape[0], *given.shape[1:-2], given.shape[-2], value.shape[-1]).contiguous()
    return value
