"""Faults that show when the module is run with one argument, row or token changed: what moves, and should not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from ...record.arguments import argument_names, tensors_in
from ...reports.check import Finding
from .arguments import Source, batch_axis_of
from .evidence import Evidence, NotPossibleError, UndeclaredError
from .scores import masking
from .tokens import heads


def inputs(evidence: Evidence) -> Iterator[Finding]:
    """Yield arguments that the forward wrote into."""
    recording, module = evidence.run.recording, evidence.subject.module
    before = dict(tensors_in(argument_names(module, *evidence.arguments.of_call({}))))
    reported = set[int]()
    for name, tensor in tensors_in(argument_names(module, *evidence.arguments_after)):
        same = tensor.shape != before[name].shape or torch.equal(tensor.nan_to_num(), before[name].nan_to_num())
        if same or id(tensor) in reported or name.split(".")[0] == evidence.intent.cache:
            continue
        reported.add(id(tensor))
        storages = {named.tensor.storage for named in recording.inputs if named.name == name}
        yield Finding(
            "inputs",
            f"The forward writes into its argument {name}.",
            f"{int((tensor != before[name]).sum())} of {tensor.numel()} numbers are others after the run.",
            sure=tensor.is_floating_point() and "mask" not in name and "cache" not in name,
            source=next((op.source for op in evidence.writes if op.inputs[0].storage in storages), ""),
            fix="write into a copy: x = x + ..., not x += ....",
        )


def batch(evidence: Evidence) -> Iterator[Finding]:
    """Yield rows of the batch that move others."""
    source = evidence.source
    if source.batch is None:
        raise NotPossibleError("the input has no batch")
    if evidence.output.dim() <= source.batch or evidence.output.shape[source.batch] != source.rows:
        raise NotPossibleError("the output has no place for each row of the batch")
    if source.rows < 2:
        raise NotPossibleError("there is one row: give a batch of 2")
    findings = list(_leaks(evidence, evidence.reach, source))
    yield from findings
    for place, moved in evidence.reach_of_others.items() if not findings else ():
        further = evidence.sources[place]
        yield from _leaks(evidence, {further.length // 2: moved}, further)


def _leaks(evidence: Evidence, reach: Mapping[int, Tensor], source: Source) -> Iterator[Finding]:
    """Yield what is wrong where tokens of row 0 move other rows; `reach` has what each of them moves."""
    leaks = {place: moved for place, moved in reach.items() if bool((moved[1:] > 0).any())}
    if not leaks:
        return
    place, moved = next(iter(leaks.items()))
    row, position = (int(number) for number in (moved[1:] > 0).nonzero()[0])
    alone = not _moves_beside(moved[:1], place)
    mixes = not any(_moves_beside(moved, at) for at, moved in reach.items() if at < moved.shape[1])
    others = int((moved[1:].amax(1) > 0).sum())
    is_first = source.names == evidence.source.names
    fix = "keep the batch apart: look at each view, repeat and mask that joins it with heads or positions."
    axis, sure = batch_axis_of(evidence.subject.module, evidence.values, evidence.intent)
    if not (mixes and alone and evidence.follows):
        sure = not (is_first and any(s.queries == evidence.source.length < s.keys for s in evidence.sights))
        sentence = "A row of the batch moves the output of another row" + (
            "." if sure else ": it may be meant, where keys beside the row's own are a memory that rows share."
        )
    elif sure:
        sentence = (
            "Attention runs over the batch, not over the positions: rows move each other, and the tokens of a row do "
            "not."
        )
        fix = "transpose(0, 1) before and after, or batch_first=True."
    else:
        sentence = (
            f"Attention may run over the batch: dimension {axis} of the input is mixed, and dimension {1 - axis} is "
            "not. It is right where the sequence comes first; say so with batch_axis."
        )
        fix = ""
    proof = (
        f"Token {place} of row 0 of {source.names[0]} was changed, and the output of row {row + 1} moved at position "
        f"{position} by {float(moved[row + 1, position]):.3g}; {others} of {len(moved) - 1} other rows moved."
    )
    yield Finding("batch", sentence, proof, sure, evidence.scores_line, fix=fix)


def _moves_beside(moved: Tensor, place: int) -> bool:
    return bool((moved[:, torch.arange(moved.shape[1]) != place] > 0).any())


def mixing(evidence: Evidence) -> Iterator[Finding]:
    """Yield where tokens never meet although nothing keeps them apart."""
    if not evidence.follows or evidence.source.length < 2:
        raise NotPossibleError("the output has no place for each token")
    source, sights, reach = evidence.source, evidence.sights, evidence.reach_in_bits
    if not any(_moves_beside(moved[:1], place) for place, moved in reach.items()):
        if any(bool((moved[1:] > 0).any()) for moved in reach.values()):
            return  # the check of the batch tells that
        if any(bool((moved[0] > 0).any()) for moved in evidence.reach_of_others.values()):
            return  # the keys are of another source
        yield Finding(
            "mixing",
            "No token moves another: attention runs over heads or features, not over positions, or nothing is made of "
            "it.",
            f"Tokens {', '.join(map(str, reach))} of {source.names[0]} were changed one by one, and no other position "
            "of the output moved, by one bit.",
            sure=not all(sight.alone for sight in sights),
            source=evidence.scores_line,
            fix="positions must be the last but one dimension of q, k, v: transpose(1, 2) after the heads are split.",
        )
        return
    if not sights or not all(sight.open and sight.queries == source.length == sight.keys for sight in sights):
        return
    # A weight that is next to nothing moves nothing: the softmax is saturated.
    counts = torch.stack([sight.heavy for sight in sights]).all(0)
    deaf = [(p, int(i)) for p, moved in reach.items() for i in (~(moved[0] > 0) & counts[:, p]).nonzero()]
    if deaf:
        place, position = deaf[0]
        yield Finding(
            "mixing",
            f"Tokens that no mask keeps apart never meet: position {position} does not see token {place}.",
            f"Token {place} was changed, and {sum(p == place for p, _ in deaf)} of {source.length} positions did not "
            "move by one bit; no score is masked.",
            source=evidence.scores_line,
            fix="split heads with view(batch, positions, heads, head_dim), then transpose(1, 2).",
        )


def causal(evidence: Evidence) -> Iterator[Finding]:
    """Yield what a causal module sees of its future, and does not see of its past."""
    if evidence.intent.causal is False:
        return
    judged = (sight.against_causal(evidence.intent.window) for sight in evidence.sights)
    if evidence.intent.causal is None:
        finding = next(_not_as_called(evidence), None)
        if finding is None:
            raise UndeclaredError("--causal")
    elif not evidence.follows and not evidence.sights:
        raise NotPossibleError("neither the output nor the scores show who sees whom")
    else:
        finding = next(filter(None, judged), None) or _by_outputs(evidence)
    yield from [finding] if finding else []


def _by_outputs(evidence: Evidence) -> Finding | None:
    """Return what is seen of the future, and not by the weights."""
    for place, moved in evidence.reach.items() if evidence.follows else ():
        early = (moved[0, :place] > 0).nonzero().flatten().tolist()
        if not early:
            continue
        with suppress(NotPossibleError):
            if any(finding.sure for check in (masking, heads) for finding in check(evidence)):
                return None
        return Finding(
            "causal",
            "A position sees its future, and not by its weights: something else joins the positions.",
            f"Token {place} was changed, and the output at position {early[-1]} moved by "
            f"{float(moved[0, early[-1]]):.3g}; so did {len(early) - 1} more before it.",
            fix="look at norms, convolutions and means over the positions.",
        )
    return None


def _not_as_called(evidence: Evidence) -> Iterator[Finding]:
    words = ("is_causal", "causal")
    asked = [f"{name} is True" for name in words if evidence.values.get(name) is True]
    parts = dict(evidence.subject.module.named_modules(remove_duplicate=False))
    for sight in evidence.sights:
        part = parts[sight.module]
        called = type(part).__name__
        flags = [f"{called}.{name} is True" for name in reversed(words) if vars(part).get(name) is True]
        who = [*([called] if "causal" in called.lower() else []), *asked, *flags]
        finding = sight.against_causal(evidence.intent.window or sight.width) if who else None
        if finding is not None:
            yield replace(finding, evidence=f"{finding.evidence} It is meant to be causal: {who[0]}.")


def window(evidence: Evidence) -> Iterator[Finding]:
    """Yield what is seen beyond a declared window, or not seen within."""
    width, sights = evidence.intent.window, evidence.sights
    if width is None:
        raise UndeclaredError("--window N")
    if not sights:
        raise NotPossibleError("the scores do not show who sees whom")
    findings = [sight.against_window(width, evidence.intent.causal) for sight in sights]
    local = [finding for sight, finding in zip(sights, findings, strict=True) if sight.width is not None]
    if None not in findings or len(local) == len(findings) or any(local):  # some layers may well see everything
        yield from list(filter(None, findings))[:1]
