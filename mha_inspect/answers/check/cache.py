"""Check that calls that continue from a cache give the outputs of one call, also with a padding mask of all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...errors import ForwardError
from ...layers.spec import Show
from ...record.arguments import tensors_in
from ...reports.check import Finding
from ...reports.trace import Failure
from ...running.subject import run_and_record
from ...text import plural
from ..continuation import Continued, Reason, reason_of
from ..failure.report import forward_error
from .arguments import CACHES, counts, second_output
from .evidence import OTHER_SIZES, Evidence, NotPossibleError, RaisedError, UndeclaredError
from .newest import without_newest
from .padding import padded_sources, padding_mask
from .replay import factors_of
from .seen_keys import SeenKeys
from .slots import slots

_FEW = 4
"""The smallest number of tokens that shows how calls continue from a cache."""
_DRAWN = "With other tokens, from position 0 on: "
_CHUNKS, _SINGLES = "chunks", "token by token"


class _Cache(NamedTuple):
    """A cache, and how calls continue from it."""

    name: str
    """The argument that takes the cache; for a cache in the module, the argument that takes the positions."""
    in_module: bool
    """Whether the module keeps the cache, in buffers or attributes that the forward writes into."""


@dataclass(frozen=True)
class _Loop:
    """Calls that continue from a cache, and what they are given of a mask of all tokens.

    The module keeps its state from call to call, as in a real loop: it may keep angles or masks of earlier calls.
    """

    evidence: Evidence
    memory: _Cache
    mask: str = ""
    """The argument that takes the mask of `batch key`; empty without one."""
    given: Literal["all", "keys", "new", "none"] = "all"
    """The mask of a call: of all tokens so far, of as many last ones as the call has keys, of its own tokens, or none.
    """

    def output(self, places: list[int]) -> Tensor:
        """Return the concatenated outputs of successive calls, each from one of these places to the next.

        If they differ from those of one call, positions that are None by default are given too. Raises `RaisedError`.
        """
        outputs: list[Tensor | RaisedError] = []
        for positions in self._ways_to_advance():
            try:
                output = self._stepwise(places, positions)
                if not self.evidence.differences(output, times=OTHER_SIZES).any():
                    return output
                outputs.append(output)
            except RaisedError as error:
                outputs.append(error)
        if isinstance(outputs[0], RaisedError):
            raise outputs[0]
        return outputs[0]

    def is_equal(self, ways: dict[str, list[int]]) -> bool:
        """Return whether the calls run in each way, and give the outputs of one call."""
        with suppress(NotPossibleError):
            return not any(self._changed(places).any() for places in ways.values())
        return False

    def runs(self, places: list[int]) -> bool:
        """Return whether the calls run."""
        with suppress(NotPossibleError):
            self.output(places)
            return True
        return False

    def _changed(self, places: list[int]) -> Tensor:
        return self.evidence.differences(self.output(places), times=OTHER_SIZES)

    def call_with(self, places: list[int], position: int) -> Continued | None:
        """Return the recorded call with a position, after the calls before it; None if it cannot be made."""
        for positions in self._ways_to_advance():
            with suppress(NotPossibleError):
                return self._recorded(places, positions, position)
        return None

    def failing(self, places: list[int]) -> tuple[int, int, dict[str, Any]]:
        """Return the first call that raises: where its tokens begin and end, and its arguments.

        Raises `NotPossibleError` if none does.
        """
        past = None
        for start, stop in pairwise(places):
            changes = self._changes((start, stop), self._ways_to_advance()[0], past)
            try:
                past = self._past(self.evidence.returned(changes, go_on=start > 0))
            except RaisedError:
                return start, stop, changes
        raise NotPossibleError("no call raises")

    def keys_of(self, place: tuple[int, int], changes: dict[str, Any]) -> int | None:
        """Return how many of the last tokens a mask must have for a call to run; None if no number is found."""
        whole, count = changes.get(self.mask), place[1] - place[0]
        if not isinstance(whole, Tensor):
            return None
        # Most likely as many as are cached, and the new ones.
        cached = {size + count for _, tensor in tensors_in(changes.get(self.memory.name)) for size in tensor.shape}
        numbers = range(place[1] - 1, max(count, 2) - 1, -1)
        for keys in sorted(numbers, key=lambda number: number not in cached):
            with suppress(RaisedError):
                self.evidence.returned({**changes, self.mask: whole[..., -keys:]}, go_on=place[0] > 0)
                return keys
        return None

    def _stepwise(self, places: list[int], positions: str | None) -> Tensor:
        outputs, past = [], None
        for start, stop in pairwise(places):
            changes = self._changes((start, stop), positions, past)
            returned = self.evidence.returned(changes, go_on=start > 0)
            outputs.append(self.evidence.output_of(returned))
            past = self._past(returned)
        return torch.cat(outputs, dim=self.evidence.source.positions or 0)

    def _recorded(self, places: list[int], positions: str | None, position: int) -> Continued:
        evidence, past = self.evidence, None
        for start, stop in pairwise(places):
            changes = self._changes((start, stop), positions, past)
            if position < stop:
                run, subject = evidence.recorded(changes, go_on=start > 0)
                return Continued(evidence.run, run, start, stop, evidence.leaves, subject.leaves(run.recording))
            past = self._past(evidence.returned(changes, go_on=start > 0))
        raise NotPossibleError("no call has this position")

    def _changes(self, place: tuple[int, int], positions: str | None, past: Any) -> dict[str, Any]:
        """Return the arguments of a call with some of the tokens, after a call that returned the cache `past`."""
        changes = self.evidence.piece(self.evidence.source, *place, positions=positions)
        if past is not None:
            changes[self.memory.name] = past
        whole = changes.get(self.mask)
        if not isinstance(whole, Tensor):
            return changes
        if self.given == "none":
            changes[self.mask] = None
        if self.given == "new":
            changes[self.mask] = whole[..., place[0] :]
        if self.given == "keys" and place[0]:
            keys = self.keys_of(place, changes)
            changes[self.mask] = whole if keys is None else whole[..., -keys:]
        return changes

    def _past(self, returned: Any) -> Any:
        """Return the cache that a call returned; None where the module keeps it."""
        if self.memory.in_module:
            return None
        past = second_output(returned)
        if past is None:
            raise NotPossibleError("the forward has no second output that could be its cache")
        return past

    def _ways_to_advance(self) -> list[str | None]:
        """Return the further argument to advance, one a try; None for no further one."""
        memory, unset = self.memory, self.evidence.arguments.positions(unset=True)
        first = (memory.name or None) if memory.in_module else None
        return [first, *(name for name in unset if name != memory.name)]


def continues(evidence: Evidence) -> bool:
    """Return whether all tokens but the last, and then the last, give the output of one call by state alone."""
    with suppress(NotPossibleError, RaisedError):
        length = evidence.source.length
        output = _Loop(evidence, _Cache("", in_module=True)).output([0, length - 1, length])
        return evidence.follows and not evidence.apart(output, times=OTHER_SIZES)
    return False


def cache(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault of slots or of calls that continue from a cache; else a suspicion of a call without its newest."""
    newest = list(without_newest(evidence))
    try:
        findings = list(_of_calls(evidence))
    except NotPossibleError:
        yield from newest
        raise
    yield from findings or newest


def _of_calls(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if slots of a cache are wrong, or calls that continue from it give other outputs than one call."""
    for call in chain((evidence,), _from_start(evidence)):
        more = _DRAWN if call is not evidence else ""
        with suppress(NotPossibleError):  # without a cache in this call
            findings = [replace(found, evidence=more + found.evidence) for found in slots(call)]
            yield from findings
            if findings:
                return
    findings = list(_continued_calls(call)) or list(_with_declared_mask(call))
    yield from (replace(found, evidence=more + found.evidence) for found in findings)


def _continued_calls(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if calls that continue from a cache give other outputs than one call."""
    declared = evidence.intent.cache
    memory = _cache_of(evidence)
    evidence.arguments.require(memory.name)
    if not evidence.follows or evidence.source.length < 3:
        raise NotPossibleError("the output has no entry for each token, or there are fewer than 3 tokens")
    loop, length = _Loop(evidence, memory, _mask_of(evidence)), evidence.source.length
    ways = _ways(evidence)
    if memory.in_module and not _takes_chunks(evidence, memory.name, ways[_CHUNKS][1]):
        if declared is None:
            raise UndeclaredError("--cache NAME")
        del ways[_CHUNKS]  # the first call alone may have several tokens
    changed = dict[str, Tensor]()
    for way, places in ways.items():
        if declared is None and changed and not bool(changed[_CHUNKS].any()):
            break  # an undeclared cache gets the cheaper test only
        try:
            changed[way] = evidence.differences(loop.output(places), times=OTHER_SIZES).amax(0)
        except RaisedError as error:
            _require_cut(evidence)
            yield from _of_raised(loop, way, places, error)
            return
    wrong = {way: places.nonzero().flatten().tolist() for way, places in changed.items()}
    proofs = (f"{way}: {f'{len(at)} of {length} positions differ' if at else 'equal'}" for way, at in wrong.items())
    for first in [way for way, places in wrong.items() if places][:1]:
        _require_cut(evidence)
        continued = loop.call_with(ways[first], wrong[first][0])
        reason = (continued and reason_of(continued)) or Reason("", source=evidence.mask_line)
        yield Finding(
            "cache",
            f"Calls with the cache ({', '.join(way for way in wrong if wrong[way])}) differ from one call by "
            f"{float(changed[first].max()):.3g}, from position {wrong[first][0]} on. {reason.sentence}".rstrip(),
            f"{'; '.join(proofs)}.",
            source=reason.source or evidence.mask_line,
            module=reason.module,
            fix=reason.fix,
        )


def _ways(evidence: Evidence) -> dict[str, list[int]]:
    """Return where the calls of a loop begin and end, for each way to make them."""
    length = evidence.source.length
    # Padding on the left belongs to the first call: no loop continues with it.
    pads = 0 if evidence.padded is None else int(evidence.padded.long().cumprod(1).sum(1).max())
    half, single = (min(max(place, pads + 1), length - 2) for place in (length // 2, length - 3 if length > 16 else 1))
    return {_CHUNKS: [0, half, length - 1, length], _SINGLES: [0, *range(single, length + 1)]}


# -- a mask of all tokens ---------------------------------------------------------------------------------------------


def _mask_of(evidence: Evidence) -> str:
    """Return the argument that was given a mask of `batch key`, the declared one first; empty without one."""
    names = (evidence.intent.padding, *sorted(evidence.by_item))
    return next((name for name in names if name and isinstance(evidence.values.get(name), Tensor)), "")


def _with_declared_mask(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault of calls that continue from the cache with a declared mask: of all tokens, padded on the left."""
    name = evidence.intent.padding
    if name is None or "padding" in evidence.failed:
        return
    try:
        padded = _padded_on_the_left(evidence, name)
        if padded is not None:
            findings = list(_continued_calls(padded))
            evidence.notes.extend(padded.notes)
            if not any(map(_is_of_difference, findings)):
                yield from findings
                return
        is_given = isinstance(evidence.values.get(name), Tensor)
        without = [] if is_given else list(_continued_calls(_with_mask(evidence, name, pads=0)))
    except NotPossibleError as error:
        evidence.notes.append(f"The cache was not checked together with {name}: {error}.")
        return
    if without:
        proof = f" Without {name}, the calls equal one call."
        yield from (_led(finding, f"With {name} of all tokens", proof) for finding in without)
    elif padded is not None:
        proof = f" Without padding, the calls equal one call. Padded: the first tokens of batch item 0, by {name}."
        yield from (_led(finding, f"With padding on the left in {name}", proof) for finding in findings)


def _led(finding: Finding, lead: str, proof: str) -> Finding:
    """Return a finding about calls that differ with what makes them differ; one of calls that raise says it itself."""
    if not _is_of_difference(finding):
        return finding
    return replace(finding, sentence=f"{lead}, c{finding.sentence[1:]}", evidence=finding.evidence + proof)


def _is_of_difference(finding: Finding) -> bool:
    """Return whether a finding is of calls that ran and gave other outputs."""
    return finding.evidence.startswith((_CHUNKS, _SINGLES))


def _with_mask(evidence: Evidence, name: str, *, pads: int) -> Evidence:
    """Return the evidence of the call with a mask of all tokens, with padding at the start of every second item."""
    source = padded_sources(evidence, name)[0]
    return evidence.with_arguments({name: padding_mask(evidence, name, source, slice(0, pads))})


def _padded_on_the_left(evidence: Evidence, name: str) -> Evidence | None:
    """Return the evidence of the call with padding on the left; None if the module takes none there.

    It does if no real token sees the padding, and the outputs of real tokens are numbers.
    """
    source, length = evidence.source, evidence.source.length
    if evidence.intent.padding_side == "right" or source.batch is None or evidence.padded is not None or length < _FEW:
        return None
    pads = max(min(2, length - 3), length // 4)
    try:
        padded = _with_mask(evidence, name, pads=pads)
    except RaisedError:
        return None
    expected = torch.zeros(source.rows, length, dtype=torch.bool)
    expected[0::2, :pads] = True
    if padded.padded is None or not torch.equal(padded.padded, expected) or not padded.follows:
        return None
    real = padded.output.movedim(source.axes, (0, 1))[~expected.to(padded.output.device)]
    return None if bool(real.isnan().any()) else padded


def _of_raised(loop: _Loop, way: str, places: list[int], error: RaisedError) -> Iterator[Finding]:
    """Yield a fault of calls that raise: where the mask of all tokens makes them raise, with the sizes and the fix."""
    evidence, memory, name = loop.evidence, loop.memory, loop.mask
    is_declared = evidence.intent.cache is not None
    by_mask = bool(name) and not memory.in_module
    trimmed = replace(loop, given="keys")
    runs_cut = by_mask and trimmed.runs(places)
    if by_mask and (runs_cut or replace(loop, given="none").runs(places)):
        if _takes_new_alone(loop):
            evidence.notes.append(f"In calls that continue from the cache, {name} covers the new tokens only.")
            return
        yield from _of_mask(trimmed, way, error, runs_cut=runs_cut, sure=is_declared)
        return
    if not is_declared:
        raise UndeclaredError("--cache NAME") from error
    if not memory.in_module and _is_no_cache(error):
        why = f"the second output is a tensor, which {memory.name} does not take"
        raise NotPossibleError(why, give="Check a module that returns its cache as its second value") from error
    how = f"{memory.name} advanced" if memory.in_module else f"its second output as {memory.name}"
    yield Finding(
        "cache",
        f"The forward raises when it continues from its cache ({way}): {error}.",
        f"The call had {how} and the next tokens.",
    )


def _is_no_cache(error: RaisedError) -> bool:
    """Return whether a call raised because it used a tensor as an object: it was given something else than a cache."""
    cause = error.__cause__
    return isinstance(cause, AttributeError) and isinstance(cause.obj, Tensor)


def _of_mask(trimmed: _Loop, way: str, error: RaisedError, *, runs_cut: bool, sure: bool) -> Iterator[Finding]:
    """Yield the fault of a call that raises with a mask of all tokens; `trimmed` cuts it to the keys of each call."""
    evidence, name, ways = trimmed.evidence, trimmed.mask, _ways(trimmed.evidence)
    start, stop, changes = replace(trimmed, given="all").failing(ways[way])
    keys = trimmed.keys_of((start, stop), changes) if runs_cut else None
    failure = _failure_of(evidence, changes)
    what = str(error)
    fix = "" if failure is None or failure.cause is None else failure.cause.fix
    if keys is not None:
        what = f"{keys} keys, mask of {stop}"
        if trimmed.is_equal(ways):
            fix = f"Cut the mask to the keys of the call: {name}[{_last_keys(changes[name])}]."
    yield Finding(
        "cache",
        f"The forward raises when it continues from its cache with {name} of all tokens ({way}): {what}.",
        f"The call has {plural(stop - start, 'token')} after {start} that are cached. {error}.",
        sure=sure,
        source="" if failure is None else failure.source,
        module="" if failure is None else failure.module,
        fix=fix,
    )


def _last_keys(mask: Tensor) -> str:
    return ":, -keys:" if mask.dim() == 2 else "..., -keys:"


def _takes_new_alone(loop: _Loop) -> bool:
    """Return whether calls with the mask of their new tokens alone equal one call, with padding on the left too."""
    evidence = loop.evidence
    padded = evidence if evidence.padded is not None else _padded_on_the_left(evidence, loop.mask)
    if padded is None:
        return False
    return replace(loop, evidence=padded, given="new").is_equal(_ways(padded))


def _failure_of(evidence: Evidence, changes: dict[str, Any]) -> Failure | None:
    """Return the failure of a call that raises; None if the forward is not to blame."""
    subject = evidence.runner.prepared(evidence.arguments.of_call(changes))
    with subject.settings():
        before = subject.state()
        run = run_and_record(subject.module, subject.args, subject.kwargs)
        error = None if run.error is None else forward_error(subject, run, Show(), before)
    return error.trace.failure if isinstance(error, ForwardError) else None


# -- which calls ------------------------------------------------------------------------------------------------------


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


def _cache_of(evidence: Evidence) -> _Cache:
    """Return the declared cache, or that of a causal module: by the usual names, or of calls with positions.

    Raises `UndeclaredError` if there is none.
    """
    declared, arguments = evidence.intent.cache, evidence.arguments
    if declared is not None:
        parameter = arguments.parameters.get(declared)
        value = evidence.values.get(declared, None if parameter is None else parameter.default)
        return _Cache(declared, counts(value) or declared in arguments.positions(unset=True))
    takes, sights = arguments.parameters, _continued_sights(evidence)
    name = next((name for name in CACHES if name in takes and evidence.values.get(name) is None), None)
    causal = bool(sights) and all(sight.is_causal and not sight.almost_causal for sight in sights)
    is_whole = causal and all(sight.queries == sight.keys for sight in sights)
    if name is not None and is_whole and (second_output(evidence.run.returned) is not None or "use_cache" in takes):
        return _Cache(name, in_module=False)
    if causal and (positions := arguments.positions()):
        return _Cache(next(iter(positions)), in_module=True)
    raise UndeclaredError("--cache NAME")


def _continued_sights(evidence: Evidence) -> list[SeenKeys]:
    """Return the attentions with keys of the tokens of the call; those over an encoder's keys continue from no call."""
    graph, source = evidence.run.graph, evidence.source
    given = {named.tensor.id for named in evidence.run.recording.inputs if named.name in source.names}
    own = [sight for sight in evidence.sights if given & graph.inputs_of(factors_of(sight.attention)["key"])]
    return own if given else list(evidence.sights)


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
