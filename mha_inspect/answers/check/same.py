"""Faults found by comparing outputs that should be equal: repeated runs, train, a cache, a reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import MhaInspectError
from ...record.arguments import with_copies
from ...reports.check import Finding
from ...reports.diff import DiffReason
from ...running.subject import Subject
from ...text import first_line
from ..continuation import Continued, Reason, reason_of
from ..diff import Side, diff
from ..diff_reasons import Where, reasons
from ..shared_weights import copy_all
from .arguments import CACHES, counts, second_output
from .evidence import OTHER_SIZES, Evidence, NotPossibleError, RaisedError, UndeclaredError
from .replay import first_key
from .slots import slots

_OTHER_KERNELS = 20.0
"""Train may use other kernels than eval, which round differently: its tolerance is this many times larger."""
_SAME_SIZES = "Give a reference with the same names and shapes of parameters"
_FEW = 4
"""The smallest number of tokens that shows how calls continue from a cache."""
_DRAWN = "With other tokens, from position 0 on: "
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
        # Keys before that of the first query are of a cache.
        if any(first_key(evidence, *attention) for attention in evidence.run.attentions) or _continues(evidence):
            raise NotPossibleError("each run continues from the cache of the run before it")
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


def _continues(evidence: Evidence) -> bool:
    """Return whether all tokens but the last, and then the last, give the output of one call."""
    with suppress(NotPossibleError, RaisedError):
        length = evidence.source.length
        output = _continued(evidence, _Cache("", in_module=True), [0, length - 1, length])
        return evidence.follows and not evidence.apart(output, times=OTHER_SIZES)
    return False


def training(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if train and eval give different outputs with every dropout set to 0."""
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in evidence.subject.module.modules()):
        raise NotPossibleError("batch norm uses different statistics in train")
    with evidence.runner.changed_by(_train_without_dropout):
        output = evidence.output_with({})
        apart = evidence.apart(output, times=_OTHER_KERNELS)
        if not apart:
            evidence.notes.extend(_of_padded_outputs(evidence, output))
            return
        if evidence.apart(output, evidence.output_of(evidence.returned(more_seed=1))):
            raise NotPossibleError("train draws a dropout that cannot be set to 0")
    yield Finding(
        "training",
        f"With dropout off, train and eval differ by {apart:.3g}.",
        "Both modes had the same input and seed, and every dropout was 0.",
    )


def _of_padded_outputs(evidence: Evidence, output: Tensor) -> Iterator[str]:
    """Yield a sentence if the outputs of padded tokens differ in train, although those of real tokens are equal."""
    padded = evidence.padded
    if padded is None or not bool(evidence.differences_with_padding(output, times=_OTHER_KERNELS).any()):
        return
    outputs = evidence.output.movedim(evidence.source.axes, (0, 1)).cpu()
    if bool((outputs[padded] == 0).all()):
        yield "Outputs of padded tokens are 0 in eval and not in train; those of real tokens are equal."
    else:
        yield "Outputs of padded tokens differ in train and eval; those of real tokens are equal."


def _train_without_dropout(module: nn.Module) -> None:
    for part in module.modules():
        part.training = True
        for name, value in list(vars(part).items()):
            drops = "drop" in name.lower() or (isinstance(part, nn.modules.dropout._DropoutNd) and name == "p")
            if drops and isinstance(value, float):
                setattr(part, name, 0.0)


class _Cache(NamedTuple):
    """A cache, and how calls continue from it."""

    name: str
    """The argument that takes the cache; for a cache in the module, the argument that takes the positions."""
    in_module: bool
    """Whether the module keeps the cache, in buffers or attributes that the forward writes into."""


def cache(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if slots of a cache are wrong, or calls that continue from it give other outputs than one call."""
    for call in chain((evidence,), _from_start(evidence)):
        more = _DRAWN if call is not evidence else ""
        with suppress(NotPossibleError):  # without a cache in this call
            findings = [replace(found, evidence=more + found.evidence) for found in slots(call)]
            yield from findings
            if findings:
                return
    yield from (replace(found, evidence=more + found.evidence) for found in _continued_calls(call))


def _continued_calls(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if calls that continue from a cache give other outputs than one call."""
    declared = evidence.intent.cache
    memory = _cache_of(evidence)
    evidence.arguments.require(memory.name)
    if not evidence.follows or evidence.source.length < 3:
        raise NotPossibleError("the output has no entry for each token, or there are fewer than 3 tokens")
    length = evidence.source.length
    # Padding on the left belongs to the first call: no loop continues with it.
    pads = 0 if evidence.padded is None else int(evidence.padded.long().cumprod(1).sum(1).max())
    half, single = (min(max(place, pads + 1), length - 2) for place in (length // 2, length - 3 if length > 16 else 1))
    ways = {_CHUNKS: [0, half, length - 1, length], _SINGLES: [0, *range(single, length + 1)]}
    if memory.in_module and not _takes_chunks(evidence, memory.name, half):
        if declared is None:
            raise UndeclaredError("--cache NAME")
        del ways[_CHUNKS]  # the first call alone may have several tokens
    changed = dict[str, Tensor]()
    try:
        for way, places in ways.items():
            if declared is None and changed and not bool(changed[_CHUNKS].any()):
                break  # an undeclared cache gets the cheaper test only
            changed[way] = evidence.differences(_continued(evidence, memory, places), times=OTHER_SIZES).amax(0)
    except RaisedError as error:
        _require_cut(evidence)
        if declared is None:
            raise UndeclaredError("--cache NAME") from error
        how = f"{memory.name} advanced" if memory.in_module else f"its second output as {memory.name}"
        yield Finding(
            "cache",
            f"The forward raises when it continues from its cache ({way}): {error}.",
            f"It was called with {how}, and the next tokens.",
        )
        return
    wrong = {way: places.nonzero().flatten().tolist() for way, places in changed.items()}
    proofs = (f"{way}: {f'{len(at)} of {length} positions differ' if at else 'equal'}" for way, at in wrong.items())
    for first in [way for way, places in wrong.items() if places][:1]:
        _require_cut(evidence)
        reason = _reason(evidence, memory, ways[first], wrong[first][0]) or Reason("", source=evidence.mask_line)
        yield Finding(
            "cache",
            f"Calls with the cache ({', '.join(way for way in wrong if wrong[way])}) differ from one call by "
            f"{float(changed[first].max()):.3g}, from position {wrong[first][0]} on. {reason.sentence}".rstrip(),
            f"{'; '.join(proofs)}.",
            source=reason.source or evidence.mask_line,
            module=reason.module,
            fix=reason.fix,
        )


def _from_start(evidence: Evidence) -> Iterator[Evidence]:
    """Yield the evidence of a call with other tokens at the first positions, if the given one continues from a cache.

    It shows what this call alone does not: whether the keys of earlier calls are still there.
    """
    arguments, source, values = evidence.arguments, evidence.source, evidence.values
    places = [*arguments.positions(), *(name for name in CACHES if values.get(name) is not None)]
    tensors = {name: v for name, v in values.items() if isinstance(v, Tensor) and name not in (*places, *source.names)}
    whole = not any(sight.first for sight in evidence.sights) or any(source.length in v.shape for v in tensors.values())
    if whole or not places or not evidence.follows:
        return
    evidence.require_passed("rotary")
    with suppress(RaisedError):
        yield evidence.with_arguments(arguments.from_start(source, max(source.length, _FEW)))


def _require_cut(evidence: Evidence) -> None:
    """Raise `NotPossibleError` if an argument of a chunk is not that of its tokens: the forward is not to blame."""
    names = evidence.arguments.uncut(evidence.source)
    if names:
        raise NotPossibleError(
            f"{', '.join(names)} has a size for each token, and no rule says how to cut it for a chunk",
            give="Call the forward without it, or name it as a mask, a position or a rotation",
        )


def _reason(evidence: Evidence, memory: _Cache, places: list[int], position: int) -> Reason | None:
    """Return what the first call that differs, the one with a position, has unlike one call; None if unknown."""
    for positions in _ways_to_advance(evidence, memory):
        with suppress(NotPossibleError):
            return reason_of(_call_with(evidence, memory, places, positions, position))
    return None


def _call_with(
    evidence: Evidence, memory: _Cache, places: list[int], positions: str | None, position: int
) -> Continued:
    """Return the recorded call with a position, after the calls before it. Raises `NotPossibleError`."""
    past = None
    for start, stop in pairwise(places):
        changes, go_on = _changes(evidence, memory, (start, stop), positions, past), memory.in_module and start > 0
        if position < stop:
            run, subject = evidence.recorded(changes, go_on=go_on)
            return Continued(evidence.run, run, start, stop, evidence.leaves, subject.leaves(run.recording))
        past = _past(memory, evidence.returned(changes, go_on=go_on))
    raise NotPossibleError("no call has this position")


def _cache_of(evidence: Evidence) -> _Cache:
    """Return the declared cache, or that of a causal module: by the usual names, or of calls with positions.

    Raises `UndeclaredError` if there is none.
    """
    declared, arguments = evidence.intent.cache, evidence.arguments
    if declared is not None:
        parameter = arguments.parameters.get(declared)
        value = evidence.values.get(declared, None if parameter is None else parameter.default)
        return _Cache(declared, counts(value) or declared in arguments.positions(unset=True))
    takes, sights = arguments.parameters, evidence.sights
    name = next((name for name in CACHES if name in takes and evidence.values.get(name) is None), None)
    causal = bool(sights) and all(sight.is_causal and not sight.almost_causal for sight in sights)
    is_whole = causal and all(sight.queries == sight.keys for sight in sights)
    if name is not None and is_whole and (second_output(evidence.run.returned) is not None or "use_cache" in takes):
        return _Cache(name, in_module=False)
    if causal and (positions := arguments.positions()):
        return _Cache(next(iter(positions)), in_module=True)
    raise UndeclaredError("--cache NAME")


def _takes_chunks(evidence: Evidence, name: str, half: int) -> bool:
    """Return whether other tokens in a call change the output of a next call with several tokens, or it raises.

    A ring of slots may take several tokens in the first call alone.
    """
    source, every, ends = evidence.source, slice(None), pairwise((0, half, evidence.source.length))
    first, later = (evidence.piece(source, *each, positions=name) for each in ends)
    others = source.others(slice(0, half), row=every)
    outputs = []
    with suppress(RaisedError):
        for changes in ({}, {each: value[source.at(every, slice(0, half))] for each, value in others.items()}):
            evidence.returned({**first, **changes})
            outputs.append(evidence.output_of(evidence.returned(later, go_on=True)))
        return evidence.apart(*outputs) > 0
    return True


def _continued(evidence: Evidence, memory: _Cache, places: list[int]) -> Tensor:
    """Return the concatenated outputs of successive calls, each from one of these places to the next.

    If they differ from those of one call, positions that are None by default are given too. Raises `RaisedError`.
    """
    outputs: list[Tensor | RaisedError] = []
    for positions in _ways_to_advance(evidence, memory):
        try:
            output = _stepwise(evidence, memory, places, positions)
            if not evidence.differences(output, times=OTHER_SIZES).any():
                return output
            outputs.append(output)
        except RaisedError as error:
            outputs.append(error)
    if isinstance(outputs[0], RaisedError):
        raise outputs[0]
    return outputs[0]


def _stepwise(evidence: Evidence, memory: _Cache, places: list[int], positions: str | None) -> Tensor:
    outputs, past = [], None
    for start, stop in pairwise(places):
        changes = _changes(evidence, memory, (start, stop), positions, past)
        returned = evidence.returned(changes, go_on=memory.in_module and start > 0)
        outputs.append(evidence.output_of(returned))
        past = _past(memory, returned)
    return torch.cat(outputs, dim=evidence.source.positions or 0)


def _changes(
    evidence: Evidence, memory: _Cache, place: tuple[int, int], positions: str | None, past: Any
) -> dict[str, Any]:
    """Return the arguments of a call with some of the tokens, after a call that returned the cache `past`."""
    changes = evidence.piece(evidence.source, *place, positions=positions)
    return changes if past is None else {**changes, memory.name: past}


def _past(memory: _Cache, returned: Any) -> Any:
    """Return the cache that a call returned; None where the module keeps it."""
    if memory.in_module:
        return None
    past = second_output(returned)
    if past is None:
        raise NotPossibleError("the forward has no second output that could be its cache")
    return past


def _ways_to_advance(evidence: Evidence, memory: _Cache) -> list[str | None]:
    """Return the further argument to advance, one a try; None for no further one."""
    unset = [name for name in evidence.arguments.positions(unset=True) if name != memory.name]
    return [(memory.name or None) if memory.in_module else None, *unset]


def reference(evidence: Evidence) -> Iterator[Finding]:
    """Yield the first stage that differs from a trusted module with the weights of the checked module.

    They are copied by name; only where names differ, by their role: that hides a swapped query and key. The reference
    is left as it was.
    """
    trusted = evidence.intent.reference
    if trusted is None:
        raise UndeclaredError("--reference TARGET")
    args, kwargs = evidence.arguments.of_call({})
    label = f"the reference {type(trusted).__name__}"
    other = replace(evidence.subject, module=trusted, args=args, kwargs=kwargs, label=label, without_ones=None)
    before = [(tensor, tensor.detach().clone()) for tensor in trusted.parameters()]
    with other.replaying(other.state()):
        trusted.eval()
        try:
            findings = list(_against(evidence, other))
        finally:
            with torch.no_grad():
                for tensor, numbers in before:
                    tensor.copy_(numbers)
    yield from findings


def _output_of_reference(evidence: Evidence, other: Subject) -> Tensor:
    # The reference may write into its arguments.
    args, kwargs = with_copies((other.args, other.kwargs))
    try:
        returned = replace(other, args=args, kwargs=kwargs).plain()
    except Exception as error:  # user code may raise anything
        mine, theirs = (dict(side.named_parameters()) for side in (evidence.subject.module, other.module))
        why = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        for name in [name for name in mine if name in theirs and mine[name].shape != theirs[name].shape][:1]:
            why = f"{name} is {list(mine[name].shape)}, and {list(theirs[name].shape)} in the reference"
        raise NotPossibleError(f"the reference raises on these arguments: {why}", give=_SAME_SIZES) from error
    return evidence.output_of(returned)


def _against(evidence: Evidence, other: Subject) -> Iterator[Finding]:
    theirs = _output_of_reference(evidence, other)
    if theirs.shape != evidence.output.shape:
        sentence = (
            f"Expected output shape {list(theirs.shape)}, as the reference has; got {list(evidence.output.shape)}."
        )
        yield Finding("reference", sentence, "Both ran on the same arguments.")
        return
    left, right = Side("left", evidence.subject), Side("right", other)
    try:
        reason = copy_all(left, right)
    except MhaInspectError as error:
        reason = str(error)
    if reason:
        raise NotPossibleError(
            f"the weights could not be copied into the reference: {reason.rstrip('.')}",
            give=_SAME_SIZES,
        )
    apart = evidence.apart(_output_of_reference(evidence, other), times=OTHER_SIZES)
    if not apart:
        return
    where, line, module = "the output", "", ""
    why: tuple[DiffReason, ...] = ()
    with suppress(MhaInspectError):  # a module may not be copyable, or not run in float64
        rows = diff(left, right, same_weights=False).stages if len(left.attentions) == len(right.attentions) else ()
        for row in [row for row in rows if row.verdict == "differs"][:1]:
            attention, _ = evidence.run.attentions[(row.attention or 1) - 1]
            where, module = f"{row.name} of attention {row.attention or 1}", attention.module
            line = evidence.line_of(attention.stages[row.name])
            why = reasons(left, right, row.name, Where("here", "in the reference", "the reference"))
    sentences = [f"The output differs from the reference by {apart:.3g}; the first difference is in {where}."]
    sentences += [reason.sentence for reason in why]
    yield Finding(
        "reference",
        " ".join(sentences),
        "Both ran on the same arguments with the same weights. Their stages were compared in canonical axes.",
        source=line,
        module=module,
    )
