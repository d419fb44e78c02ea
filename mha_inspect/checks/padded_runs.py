"""Runs in which some tokens are padding: whether its content or its length changes outputs that are real.

Every second batch item, from the first on, has padding at one end. The padding is filled with other numbers, and the
first item is run without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..reports.check import Finding, SkippedCheck
from .arguments import Source
from .evidence import OTHER_SIZES, Evidence
from .lab import NotPossibleError, RaisedError
from .laid_over import MASK_THE_KEYS, laid_over
from .masked_runs import padding_mask


@dataclass(frozen=True, eq=False)
class _PaddedRun:
    """A run with padding at one end of every second batch item, from the first on."""

    evidence: Evidence
    """Of the call without this padding."""
    run: Evidence
    name: str
    """The argument that takes the mask."""
    mask: Tensor
    source: Source
    """The tokens of which some are padding."""
    side: Literal["left", "right"]
    count: int
    """The number of padding tokens."""

    @property
    def real(self) -> slice:
        """The places of the real tokens."""
        if self.side == "right":
            return slice(0, self.source.length - self.count)
        return slice(self.count, self.source.length)

    @property
    def pads(self) -> slice:
        """The places of the padding."""
        return _end(self.source, self.side, self.count)

    @property
    def words(self) -> str:
        """Which tokens are padding: `the last 3 tokens of batch item 0 padded`."""
        return f"the {'last' if self.side == 'right' else 'first'} {self.count} tokens of batch item 0 padded"

    @property
    def proof(self) -> str:
        """The change that shows a fault of the content, as the beginning of a sentence."""
        means = self.evidence.intent.padding_true or "keep"
        return f"With {self.words} ({self.name}: True or 1 means {means}), changing them changes"

    @property
    def fix(self) -> str:
        """How the mask is laid over the scores."""
        sights = self.run.sights
        return laid_over(MASK_THE_KEYS, sights[0].layout) if sights else ""

    def output_with_other_padding(self) -> Tensor:
        """Return the output of a run with other numbers, or ids, in the padding."""
        return self.evidence.output_with({self.name: self.mask, **self.source.others(self.pads, by=6.0)})

    def output_without_padding(self) -> Tensor:
        """Return the output of a run with the real tokens alone."""
        start, stop = self.real.start, self.real.stop
        return self.evidence.output_with(self.run.piece(self.source, start, stop, first=start))


def _padded_run(evidence: Evidence, name: str, source: Source) -> _PaddedRun:
    side = evidence.intent.padding_side or "right"
    count = max(min(2, source.length - 2), source.length // 4)
    mask = padding_mask(evidence, name, source, _end(source, side, count))
    return _PaddedRun(evidence, evidence.with_arguments({name: mask}), name, mask, source, side, count)


def _end(source: Source, side: str, count: int) -> slice:
    """Return the first or the last places of a sequence."""
    return slice(source.length - count, None) if side == "right" else slice(0, count)


# -- an output with an entry for each token ---------------------------------------------------------------------------


def of_real_outputs(evidence: Evidence, name: str, source: Source) -> Iterator[Finding | SkippedCheck]:
    """Yield the fault of padding that changes the outputs of real tokens."""
    padded = _padded_run(evidence, name, source)
    base = padded.run.output
    # Padding in another source makes no output padding.
    places = padded.real if source is evidence.source else slice(None)
    first_item = evidence.source.at(slice(0, 1), places)[: base.dim()]
    if bool(base[first_item].isnan().any()):
        yield Finding("padding", "Padding makes the outputs of real tokens NaN.", f"With {padded.words} by {name}.")
        return
    leak = float(padded.run.differences(padded.output_with_other_padding())[0, places].max())
    if leak:
        yield _of_content(padded, places, leak)
        return
    try:
        short = padded.output_without_padding()[evidence.source.at(slice(0, 1), slice(None))[: base.dim()]]
        apart = evidence.apart(short, base[first_item], times=OTHER_SIZES)
    except NotPossibleError as error:
        yield SkippedCheck("padding", f"length of the padding: the forward rejects an unpadded item ({error})")
        return
    if apart:
        yield _of_length(padded, apart)


def _of_content(padded: _PaddedRun, places: slice, leak: float) -> Finding:
    """Return the fault of padding whose content changes outputs at these places, by this much."""
    evidence = padded.evidence
    lengths = evidence.source.length, padded.source.length
    seen = [sight.seen[0, places] for sight in padded.run.sights if sight.seen.shape[1:] == lengths]  # query key
    more = "" if evidence.intent.padding_true else ", whichever value of the mask means ignore"
    if any(not bool(pairs.any(-1).all()) for pairs in seen):
        more += ", since a query with every key masked out has uniform weights"
        fix = "Leave each query a key, or set the weights of fully masked queries to zero."
    elif seen and not any(bool(pairs[:, padded.pads].any()) for pairs in seen):
        more += ", although it has no attention weight: another operation mixes positions"
        fix = "Check norms, convolutions and means over the positions, and the split of the heads."
    else:
        fix = padded.fix
    sentence = f"The content of padding changes real outputs{more}."
    return Finding("padding", sentence, f"{padded.proof} a real output by {leak:.3g}.", fix=fix)


def _of_length(padded: _PaddedRun, apart: float) -> Finding:
    """Return the fault of padding that changes real outputs although its content does not."""
    side, real = padded.side, padded.real
    is_left = side == "left"
    return Finding(
        "padding",
        f"The {'side' if is_left else 'length'} of the padding changes real outputs by {apart:.3g}.",
        f"With {padded.count} padding tokens on the {side}, the outputs of batch item 0 at tokens "
        f"{real.start}–{real.stop - 1} differ from those without padding. The content of the padding has no effect.",
        fix="Count positions from the first real token: position_ids = mask.cumsum(-1) - 1." if is_left else "",
    )


# -- an output with an entry for each batch item ----------------------------------------------------------------------


def of_pooled_output(evidence: Evidence, name: str, source: Source) -> Iterator[Finding]:
    """Yield the fault of padding that changes an output with entries for each batch item, and none for its tokens.

    Entries whose number changes with that of the tokens may belong to tokens, of which some are padding.
    """
    padded = _padded_run(evidence, name, source)
    output = padded.run.output
    try:
        short = padded.output_without_padding()
    except RaisedError as error:
        raise NotPossibleError(
            f"the output has no entry for each token, and fewer tokens are rejected ({error})"
        ) from error
    if short.shape != output.shape:
        raise NotPossibleError("the output has no entry for each token, and its size changes with their number")
    if bool(output[:1].isnan().any()):
        yield Finding("padding", "Padding makes the output of its batch item NaN.", f"With {padded.words} by {name}.")
        return
    leak = float(padded.run.differences(padded.output_with_other_padding())[0].max())
    if leak:
        yield _of_pooled_content(padded, leak)
        return
    apart = evidence.apart(short[:1], output[:1], times=OTHER_SIZES)
    if apart:
        yield Finding(
            "padding",
            f"The number of padding tokens changes the output of their batch item by {apart:.3g}.",
            f"With {padded.count} padding tokens on the {padded.side}, the output of batch item 0 differs from that "
            "without padding. The content of the padding has no effect.",
            fix="Divide means by the number of real tokens, and count positions from the first real token.",
        )


def _of_pooled_content(padded: _PaddedRun, leak: float) -> Finding:
    """Return the fault of padding whose content changes the output of its batch item, by this much."""
    proof = f"{padded.proof} the output by {leak:.3g}."
    if _is_unseen(padded):
        return Finding(
            "padding",
            "The content of padding changes the output of its batch item, although no real query attends to it.",
            proof,
            fix="Pool over the real tokens alone, e.g. (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).",
        )
    return Finding("padding", "The content of padding changes the output of its batch item.", proof, fix=padded.fix)


def _is_unseen(padded: _PaddedRun) -> bool:
    """Return whether no query of the first item that is real sees the padding; False if no scores show it."""
    length = padded.source.length
    is_real = torch.ones(length, dtype=torch.bool)
    is_real[padded.pads] = False
    sights = [sight for sight in padded.run.sights if sight.keys == length]
    for sight in sights:
        pairs = sight.seen[0]  # query key
        if len(pairs) == length:
            pairs = pairs[is_real]
        if bool(pairs[:, padded.pads].any()):
            return False
    return bool(sights)
