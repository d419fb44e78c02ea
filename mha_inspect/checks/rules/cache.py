"""Check that calls that continue from a cache give the outputs of one call, also with a padding mask of all tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor

from ...compare.calls import reason_of
from ...compare.pair import Why
from ...record.site import place_of
from ...reports.check import Finding
from ..arguments import CACHES, counts, second_output
from ..cache_loop import Cache, Loop
from ..evidence import OF_OUTPUTS, Evidence
from ..factors import factors_of
from ..lab import NotPossibleError, RaisedError, UndeclaredError
from ..masked_runs import padded_sources, padding_mask
from ..registry import rule
from ..seen_keys import SeenKeys

_FEW = 4
"""The smallest number of tokens that shows how calls continue from a cache."""
_CHUNKS, _SINGLES = "chunks", "token by token"


@rule(
    runs=True,
    after=OF_OUTPUTS,
    by_position=True,
    of_outputs="one pass, chunks, and one token at a time give the same output",
)
def cache(evidence: Evidence) -> Iterator[Finding]:
    """One pass, chunks, and one token at a time give the same output.

    `--cache NAME` declares the argument. The sequence is given in one call, then in chunks, then one
    token at a time with the cache, and the outputs are compared. Training uses one call and generation
    the cache: if they differ, the loss is good and the text is bad. Here the mask of a later call
    starts at the first key again. A call whose newest token has no key is a suspicion, and so is a
    returned cache without the newest token.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention --causal --cache past
    import torch
    from torch import nn


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x, past=None):
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
            if past is not None:
                k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
            scores = (q @ k.mT / 8**0.5).masked_fill(~seen, float("-inf"))
            out = scores.softmax(-1) @ v
            return self.out(out.transpose(1, 2).flatten(2)), (k, v)
    ```

    ## Right

    ```diff
    -        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    +        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    +        seen = seen.tril(k.shape[2] - q.shape[2])
    ```
    """
    yield from _of_continued_calls(evidence)


def _of_continued_calls(evidence: Evidence) -> list[Finding]:
    return list(_continued_calls(evidence)) or _with_declared_mask(evidence)


def _continued_calls(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if calls that continue from a cache give other outputs than one call."""
    memory = _cache_of(evidence)
    evidence.arguments.require(memory.name)
    if not evidence.follows or evidence.source.length < 3:
        raise NotPossibleError("the output has no entry for each token, or there are fewer than 3 tokens")
    loop = Loop(evidence, memory, _mask_of(evidence))
    ways = _ways_to_try(evidence, memory)
    is_declared = evidence.intent.cache is not None
    changed: dict[str, Tensor] = {}
    for way, places in ways.items():
        if changed and not is_declared and not bool(changed[_CHUNKS].any()):
            break  # an undeclared cache gets the cheaper test only
        try:
            changed[way] = loop.changed(places).amax(0)  # position
        except RaisedError as error:
            _require_cut(evidence)
            yield from _of_raised(loop, way, error)
            return
    if any(bool(positions.any()) for positions in changed.values()):
        _require_cut(evidence)
        yield _of_difference(loop, ways, changed)


def _of_difference(loop: Loop, ways: Mapping[str, list[int]], changed: Mapping[str, Tensor]) -> Finding:
    """Return the fault of calls that give other outputs than one call, with the reason if the recording shows it.

    `changed` says for each way how much the output of each position differs.
    """
    evidence = loop.evidence
    wrong = {way: positions.nonzero().flatten().tolist() for way, positions in changed.items()}
    differing = [way for way, positions in wrong.items() if positions]
    first = differing[0]
    position = wrong[first][0]
    reason = _reason_at(loop, ways[first], position)
    return Finding(
        "cache",
        f"Calls with the cache ({', '.join(differing)}) differ from one call by {float(changed[first].max()):.3g}, "
        f"from position {position} on. {reason.sentence}".rstrip(),
        _counted(wrong, evidence.source.length),
        source=reason.source or evidence.mask_line,
        module=reason.module,
        fix=reason.fix,
    )


def _reason_at(loop: Loop, places: list[int], position: int) -> Why:
    """Return why the call that makes an output gives another one; one without words if the recording does not show it.

    `places` are where the calls begin and end.
    """
    unknown = Why("call", "", source=loop.evidence.mask_line)
    continued = loop.call_with(places, position)
    if continued is None:
        return unknown
    return reason_of(continued) or unknown


def _counted(wrong: Mapping[str, list[int]], length: int) -> str:
    """Return how many positions differ in each way.

    >>> _counted({"chunks": [3, 4], "token by token": []}, 5)
    'chunks: 2 of 5 positions differ; token by token: equal.'
    """
    counted = []
    for way, positions in wrong.items():
        result = f"{len(positions)} of {length} positions differ" if positions else "equal"
        counted.append(f"{way}: {result}")
    return f"{'; '.join(counted)}."


def _ways_to_try(evidence: Evidence, memory: Cache) -> dict[str, list[int]]:
    """Return the ways to make calls that the module takes. Raises `UndeclaredError` for a cache that takes no chunks.

    A ring of slots in a module may take several tokens in the first call alone.
    """
    ways = _ways(evidence)
    half = ways[_CHUNKS][1]
    if not memory.in_module or _takes_chunks(evidence, memory.name, half):
        return ways
    if evidence.intent.cache is None:
        raise UndeclaredError("--cache NAME")
    return {_SINGLES: ways[_SINGLES]}


def _ways(evidence: Evidence) -> dict[str, list[int]]:
    """Return where the calls of a loop begin and end, for each way to make them."""
    length = evidence.source.length
    least = _padding_at_start(evidence) + 1
    half = _between(length // 2, least, length - 2)
    single = _between(length - 3 if length > 16 else 1, least, length - 2)
    return {
        _CHUNKS: [0, half, length - 1, length],
        _SINGLES: [0, *range(single, length + 1)],
    }


def _padding_at_start(evidence: Evidence) -> int:
    """Return the largest number of padding tokens at the start: they belong to the first call of a loop."""
    if evidence.padded is None:
        return 0
    from_start = evidence.padded.long().cumprod(1)  # batch position: 1 until the first real token
    return int(from_start.sum(1).max())


def _between(place: int, least: int, most: int) -> int:
    return min(max(place, least), most)


# -- a mask of all tokens ---------------------------------------------------------------------------------------------


def _mask_of(evidence: Evidence) -> str:
    """Return the argument that was given a mask of `batch key`, the declared one first; empty without one."""
    for name in (evidence.intent.padding, *sorted(evidence.by_item)):
        if name and isinstance(evidence.values.get(name), Tensor):
            return name
    return ""


def _with_declared_mask(evidence: Evidence) -> list[Finding]:
    """Return a fault of calls that continue from the cache with a declared mask: of all tokens, padded on the left."""
    name = evidence.intent.padding
    if name is None or "padding" in evidence.failed:
        return []
    try:
        return _of_padding_on_the_left(evidence, name)
    except NotPossibleError as error:
        evidence.notes.append(f"The cache was not checked together with {name}: {error}.")
        return []


def _of_padding_on_the_left(evidence: Evidence, name: str) -> list[Finding]:
    """Return the fault of calls with padding on the left, or of the mask itself if the call has none without it."""
    findings: list[Finding] = []
    padded = _padded_on_the_left(evidence, name)
    if padded is not None:
        findings = list(_continued_calls(padded))
        evidence.notes.extend(padded.notes)
        if not any(map(_is_of_difference, findings)):
            return findings
    if not isinstance(evidence.values.get(name), Tensor):
        of_whole_mask = list(_continued_calls(_with_mask(evidence, name, pads=0)))
        if of_whole_mask:
            proof = f" Without {name}, the calls equal one call."
            return [_led(finding, f"With {name} of all tokens", proof) for finding in of_whole_mask]
    proof = f" Without padding, the calls equal one call. Padded: the first tokens of batch item 0, by {name}."
    return [_led(finding, f"With padding on the left in {name}", proof) for finding in findings]


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
    if evidence.intent.padding_side == "right" or evidence.padded is not None:
        return None
    if source.batch is None or length < _FEW:
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
    is_real = ~expected.to(padded.output.device)
    outputs = padded.output.movedim(source.axes, (0, 1))[is_real]
    return None if bool(outputs.isnan().any()) else padded


# -- calls that raise -------------------------------------------------------------------------------------------------


def _of_raised(loop: Loop, way: str, error: RaisedError) -> Iterator[Finding]:
    """Yield a fault of calls that raise; of a mask of all tokens, where they run with another one or without."""
    evidence, memory = loop.evidence, loop.memory
    is_declared = evidence.intent.cache is not None
    what, fix = "its cache", ""
    if loop.mask and not memory.in_module:
        if _takes_new_alone(loop):
            evidence.notes.append(f"In calls that continue from the cache, {loop.mask} covers the new tokens only.")
            return
        ways = _ways(evidence).values()
        if replace(loop, given="keys").is_equal(ways):
            what = f"its cache with {loop.mask} of all tokens"
            last_keys = ":, -keys:" if loop.mask in evidence.by_item else "..., -keys:"
            fix = f"Cut the mask to the keys of the call: {loop.mask}[{last_keys}]."
        elif replace(loop, given="none").is_equal(ways):
            what = f"its cache with {loop.mask} of all tokens"
    if not is_declared and not fix:
        raise UndeclaredError("--cache NAME") from error
    cause = error.__cause__
    if not memory.in_module and isinstance(cause, AttributeError) and isinstance(cause.obj, Tensor):
        why = f"the second output is a tensor, which {memory.name} does not take"
        raise NotPossibleError(why, give="Check a module that returns its cache as its second value") from error
    how = f"{memory.name} advanced" if memory.in_module else f"its second output as {memory.name}"
    yield Finding(
        "cache",
        f"The forward raises when it continues from {what} ({way}): {error}.",
        f"The call had {how} and the next tokens.",
        sure=is_declared,
        source=_line_that_raised(error),
        fix=fix,
    )


def _line_that_raised(error: RaisedError) -> str:
    """Return the innermost line of the user's code that raised; empty if it is unknown."""
    line = ""
    cause = error.__cause__
    for frame, number in walk_tb(None if cause is None else cause.__traceback__):
        place = place_of(frame.f_code)
        if place.file and not place.library:
            line = f"{place.file}:{number}"
    return line


def _takes_new_alone(loop: Loop) -> bool:
    """Return whether calls with the mask of their new tokens alone equal one call, with padding on the left too."""
    evidence = loop.evidence
    padded = evidence if evidence.padded is not None else _padded_on_the_left(evidence, loop.mask)
    if padded is None:
        return False
    return replace(loop, evidence=padded, given="new").is_equal(_ways(padded).values())


# -- which calls ------------------------------------------------------------------------------------------------------


def _require_cut(evidence: Evidence) -> None:
    """Raise `NotPossibleError` if an argument of a chunk is not that of its tokens: the forward is not to blame."""
    names = evidence.arguments.uncut(evidence.source)
    if names:
        raise NotPossibleError(
            f"{', '.join(names)} has a size for each token, and no rule says how to cut it for a chunk",
            give="Call the forward without it, or name it as a mask, a position or a rotation",
        )


def _cache_of(evidence: Evidence) -> Cache:
    """Return the declared cache, or that of a causal module: by the usual names, or of calls with positions.

    Raises `UndeclaredError` if there is none.
    """
    declared = evidence.intent.cache
    memory = _usual_cache(evidence) if declared is None else _declared_cache(evidence, declared)
    if memory is None:
        raise UndeclaredError("--cache NAME")
    return memory


def _declared_cache(evidence: Evidence, name: str) -> Cache:
    """Return a cache that takes this argument: an argument of positions says that the module keeps it."""
    arguments = evidence.arguments
    parameter = arguments.parameters.get(name)
    default = None if parameter is None else parameter.default
    value = evidence.values.get(name, default)
    return Cache(name, in_module=counts(value) or name in arguments.unset_positions())


def _usual_cache(evidence: Evidence) -> Cache | None:
    """Return the cache of a causal module: an argument with a usual name that is not given; else one in the module."""
    sights = _continued_sights(evidence)
    if not sights or not all(_is_plainly_causal(sight) for sight in sights):
        return None
    is_whole = all(sight.queries == sight.keys for sight in sights)
    name = _usual_argument(evidence)
    if name is not None and is_whole and _may_return_cache(evidence):
        return Cache(name, in_module=False)
    positions = list(evidence.arguments.positions())
    return Cache(positions[0], in_module=True) if positions else None


def _is_plainly_causal(sight: SeenKeys) -> bool:
    """Return whether a mask is causal, and not one of its usual mistakes."""
    return sight.is_causal and not sight.almost_causal


def _usual_argument(evidence: Evidence) -> str | None:
    """Return the argument with a usual name of a cache that has none in the call; None if there is none."""
    for name in CACHES:
        if name in evidence.arguments.parameters and evidence.values.get(name) is None:
            return name
    return None


def _may_return_cache(evidence: Evidence) -> bool:
    """Return whether the forward returns a second output, or takes an argument that asks for a cache."""
    if "use_cache" in evidence.arguments.parameters:
        return True
    return second_output(evidence.run.returned) is not None


def _continued_sights(evidence: Evidence) -> list[SeenKeys]:
    """Return the attentions with keys of the tokens of the call; those over an encoder's keys continue from no call."""
    recording, names = evidence.run.recording, evidence.source.names
    tokens = {named.tensor.id for named in recording.inputs if named.name in names}
    if not tokens:
        return list(evidence.sights)
    continued = []
    for sight in evidence.sights:
        keys = factors_of(sight.attention)["key"]
        if tokens & evidence.run.graph.inputs_of(keys):
            continued.append(sight)
    return continued


def _takes_chunks(evidence: Evidence, name: str, half: int) -> bool:
    """Return whether other tokens in a call change the output of a next call with several tokens, or it raises.

    A ring of slots may take several tokens in the first call alone.
    """
    source = evidence.source
    first = evidence.piece(source, 0, half, positions=name)
    later = evidence.piece(source, half, source.length, positions=name)
    tokens = source.at(slice(None), slice(0, half))
    others = {}
    for argument, value in source.others(slice(0, half), row=slice(None)).items():
        others[argument] = value[tokens]
    with suppress(RaisedError):
        after_first = _output_after(evidence, first, later)
        after_others = _output_after(evidence, {**first, **others}, later)
        return evidence.apart(after_first, after_others) > 0
    return True


def _output_after(evidence: Evidence, first: Mapping[str, Any], later: Mapping[str, Any]) -> Tensor:
    """Return the output of a call that continues from the state of another one."""
    evidence.returned(first)
    return evidence.output_of(evidence.returned(later, go_on=True))
