"""Faults found by comparing outputs that should be equal: repeated runs, train, a cache, a reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from ...errors import MhaInspectError
from ...reports.check import Finding
from ...running.subject import Subject
from ..diff import Side, diff
from .arguments import CACHES, second_output
from .evidence import OTHER_SIZES, Evidence, NotPossibleError, RaisedError, UndeclaredError

_OTHER_KERNELS = 20.0
"""Train may use other kernels than eval, which round differently: its tolerance is this many times larger."""
_CHUNKS, _SINGLES = "chunks", "token by token"


def repeat(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if two runs give different outputs."""
    again = evidence.returned(more_seed=1) if evidence.again is None else evidence.again
    if not evidence.apart(evidence.output_of(again)):
        return
    recording = evidence.run.recording
    by_seed = evidence.apart(evidence.output_of(evidence.returned(more_seed=1)))
    by_state = evidence.apart(evidence.output_of(evidence.returned(go_on=True)))
    if by_state:
        buffers = {named.tensor.storage for named in recording.buffers}
        yield Finding(
            "repeat",
            "A run changes the output of the next run: the module keeps state between calls.",
            f"Two runs in a row on the same input, with the same seed, differ by {by_state:.3g}.",
            sure=not any(op.inputs[0].storage in buffers for op in evidence.writes),
        )
    elif by_seed:
        no_dropout = "native_dropout", (False,)
        drawn = [op for op in recording.ops if op.does("draws") and (op.base_name, op.args[2:3]) != no_dropout]
        dropout = [op for op in drawn if "dropout" in op.base_name or "bernoulli" in op.base_name]
        where = next(iter(dropout or drawn), None)
        cause, fix = "The forward draws random numbers in eval: two runs give different outputs.", ""
        if dropout:
            cause = "Dropout is on in eval: two runs give different outputs."
            fix = "Pass training=self.training to F.dropout (dropout_p=self.p if self.training else 0.0)."
        yield Finding(
            "repeat",
            cause,
            f"Two runs on the same input, with different seeds, differ by {by_seed:.3g}.",
            sure=bool(dropout),
            source=where.source if where else "",
            module=where.module if where else "",
            fix=fix,
        )


def training(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if train and eval give different outputs with every dropout set to 0."""
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in evidence.subject.module.modules()):
        raise NotPossibleError("batch norm uses different statistics in train")
    with evidence.runner.changed_by(_train_without_dropout):
        with suppress(NotPossibleError):
            row = evidence.first_row()
            if row and not evidence.apart(evidence.output_with(row), _first_row_of(evidence), times=_OTHER_KERNELS):
                return
        output = evidence.output_with({})  # if batch items affect each other, one alone gives another output
        apart = evidence.apart(output, times=_OTHER_KERNELS)
        if not apart:
            return
        if evidence.apart(output, evidence.output_of(evidence.returned(more_seed=1))):
            raise NotPossibleError("train draws a dropout that cannot be set to 0")
    yield Finding(
        "training",
        f"With dropout off, train and eval differ by {apart:.3g}.",
        "Both modes had the same input and seed, and every dropout was 0.",
    )


def _first_row_of(evidence: Evidence) -> Tensor:
    return evidence.output.narrow(evidence.source.batch or 0, 0, 1)


def _train_without_dropout(module: nn.Module) -> None:
    for part in module.modules():
        part.training = True
        for name, value in list(vars(part).items()):
            drops = "drop" in name.lower() or (isinstance(part, nn.modules.dropout._DropoutNd) and name == "p")
            if drops and isinstance(value, float):
                setattr(part, name, 0.0)


def cache(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if calls that continue from a cache give other outputs than one call."""
    declared = evidence.intent.cache
    name = declared or _cache_name(evidence)
    if name is None:
        raise UndeclaredError("--cache NAME")
    evidence.arguments.require(name)
    if not evidence.follows or evidence.source.length < 3:
        raise NotPossibleError("the output has no entry for each token, or there are fewer than 3 tokens")
    length = evidence.source.length
    half, single = length // 2, length - 3 if length > 16 else 1
    ways = {_CHUNKS: [0, half, length - 1, length], _SINGLES: [0, *range(single, length + 1)]}
    row: dict[str, Tensor] = {}
    if declared is None:
        del ways[_SINGLES]  # an undeclared cache gets the cheaper test only
        row = evidence.first_row()
    base = _first_row_of(evidence) if row else evidence.output
    changed: dict[str, Tensor] = {}
    for way, places in ways.items():
        try:
            changed[way] = evidence.differences(_stepwise(evidence, name, places, row), base, times=OTHER_SIZES).amax(0)
        except RaisedError as error:
            if declared is None:
                raise UndeclaredError("--cache NAME") from error
            yield Finding(
                "cache",
                f"The forward raises when it continues from its cache ({way}): {error}.",
                f"It was called with its second output as {name}, and the next tokens.",
            )
            return
    wrong = {way: places.nonzero().flatten().tolist() for way, places in changed.items()}
    proofs = (f"{way}: {f'{len(at)} of {length} positions differ' if at else 'equal'}" for way, at in wrong.items())
    for first in [way for way, places in wrong.items() if places][:1]:
        cause, fix = _cause(wrong)
        yield Finding(
            "cache",
            f"Calls with the cache ({', '.join(way for way in wrong if wrong[way])}) differ from one call by "
            f"{float(changed[first].max()):.3g}, from position {wrong[first][0]} on. {cause}",
            f"{'; '.join(proofs)}.",
            source=evidence.mask_line,
            fix=fix,
        )


def _cause(wrong: dict[str, list[int]]) -> tuple[str, str]:
    """Return the cause of a difference and its fix, from the positions that differ in chunks and token by token."""
    if _SINGLES not in wrong:
        return (
            "Possible causes: the mask of a chunk is aligned top left, positions restart at 0, keys are out of order.",
            "Offset positions by the length of the cache, and align the mask bottom right: triu(diagonal=1 + past).",
        )
    if not wrong[_SINGLES]:
        return (
            "The mask of a chunk is aligned top left: its queries do not see all of the earlier keys.",
            "Align the mask bottom right: triu(diagonal=1 + past), past = keys - queries.",
        )
    if 0 in (*wrong[_CHUNKS][:1], *wrong[_SINGLES][:1]):
        return "One call attends to future tokens, which are missing when tokens come one at a time.", ""
    return (
        "The cached keys differ from those of one call. Possible causes: positions restart at 0 in each call, keys are "
        "cached before rotation, or new keys are not appended after the cached keys.",
        "Offset positions by the length of the cache.",
    )


def _cache_name(evidence: Evidence) -> str | None:
    """Return the cache argument of a causal module by its usual names; None if there is no second output."""
    takes, sights = evidence.arguments.parameters, evidence.sights
    name = next((name for name in CACHES if name in takes and evidence.values.get(name) is None), None)
    if not sights or not all(sight.is_causal and sight.queries == sight.keys for sight in sights):
        return None
    return None if second_output(evidence.run.returned) is None else name


def _stepwise(evidence: Evidence, name: str, places: list[int], row: dict[str, Tensor]) -> Tensor:
    """Return the concatenated outputs of successive calls, each from one of these places to the next."""
    source = evidence.source
    outputs, past = [], None
    for start, stop in pairwise(places):
        changes = evidence.arguments.piece(source, start, stop, row)
        returned = evidence.returned(changes if past is None else {**changes, name: past})
        outputs.append(evidence.output_of(returned))
        past = second_output(returned)
        if past is None:
            raise NotPossibleError("the forward has no second output that could be its cache")
    return torch.cat(outputs, dim=source.positions or 0)


def reference(evidence: Evidence) -> Iterator[Finding]:
    """Yield the first stage that differs from a trusted module; each side keeps its own weights.

    Weights are not copied by their role in the attention: that would hide a swapped query and key.
    """
    trusted = evidence.intent.reference
    if trusted is None:
        raise UndeclaredError("--reference TARGET")
    args, kwargs = evidence.arguments.of_call({})
    other = replace(evidence.subject, module=trusted, args=args, kwargs=kwargs, without_ones=None)
    with other.replaying(other.state()):
        trusted.eval()
        findings = list(_against(evidence, other))
    yield from findings


def _against(evidence: Evidence, other: Subject) -> Iterator[Finding]:
    try:
        returned = other.plain()
    except Exception as error:  # user code may raise anything
        raise NotPossibleError(f"the reference raises on these arguments: {type(error).__name__}") from error
    theirs = evidence.output_of(returned)
    if theirs.shape != evidence.output.shape:
        sentence = (
            f"Expected output shape {list(theirs.shape)}, as the reference has; got {list(evidence.output.shape)}."
        )
        yield Finding("reference", sentence, "Both ran on the same arguments.")
        return
    apart = evidence.apart(theirs, times=OTHER_SIZES)
    if not apart:
        return
    left, right = Side("left", evidence.subject), Side("right", other)
    where, line, module = "the output", "", ""
    with suppress(MhaInspectError):  # a module may not be copyable, or not run in float64
        rows = diff(left, right, same_weights=False).stages if len(left.attentions) == len(right.attentions) else ()
        for row in [row for row in rows if row.verdict == "differs"][:1]:
            attention, _ = evidence.run.attentions[(row.attention or 1) - 1]
            where, module = f"{row.name} of attention {row.attention or 1}", attention.module
            line = evidence.line_of(attention.stages[row.name])
    yield Finding(
        "reference",
        f"The output differs from the reference by {apart:.3g}; the first difference is in {where}.",
        "Both ran on the same arguments. Their stages were compared in canonical axes.",
        source=line,
        module=module,
    )
