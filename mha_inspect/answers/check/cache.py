"""What a cache shows: whether going on from it gives what one go gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...reports.check import Finding
from .bench import LOOSE, Bench
from .runner import NotPossibleError, RaisedError
from .sources import Source

_CACHES = ("past_key_values", "past_key_value", "layer_past", "past", "kv_cache", "cache", "past_kv", "caches")
"""Names of arguments that take what the forward returned second."""
_CHUNKS, _SINGLES = "chunks", "token by token"


def cache(bench: Bench) -> Iterator[Finding]:
    """Yield where going on from a cache gives something else than going in one go."""
    declared = bench.intent.cache
    name = declared or _cache_name(bench)
    if name is None:
        raise NotPossibleError("not declared: cache")
    bench.given.require(name)
    if not bench.sources or not bench.follows or bench.sources[0].length < 3:
        raise NotPossibleError("the output has no place for each of 3 tokens or more")
    source, length = bench.sources[0], bench.sources[0].length
    half, first = length // 2, length - 3 if length > 16 else 1
    ways = {
        _CHUNKS: [(0, half), (half, length)],
        _SINGLES: [(0, first), *((at, at + 1) for at in range(first, length))],
    }
    given, base = bench.values, bench.output
    if declared is None:
        # Where nobody declared the cache it costs little to look.
        del ways[_SINGLES]
        row = bench.first_row()
        given = {**given, **row}
        base = base.narrow(source.batch, 0, 1) if row and source.batch is not None else base
    apart: dict[str, Tensor] = {}
    for how, steps in ways.items():
        try:
            output = _stepwise(bench, name, steps, given)
        except RaisedError as error:
            if declared is None:
                raise NotPossibleError("not declared: cache") from error
            yield Finding(
                "cache",
                f"The forward raises when it goes on from its cache, {how}: {error}.",
                f"It was given what it returned second as {name}, and the tokens that follow.",
            )
            return
        apart[how] = bench.apart(output, base).amax(0)
    wrong = {how: (by > LOOSE * bench.limit).nonzero().flatten().tolist() for how, by in apart.items()}
    hows = [how for how, places in wrong.items() if places]
    if hows:
        cause, fix = _cause(wrong)
        evidence = "; ".join(
            f"{how}: {f'{len(places)} of {length} positions differ' if places else 'the same'}"
            for how, places in wrong.items()
        )
        yield Finding(
            "cache",
            f"Going on from the cache ({', '.join(hows)}) gives something else than one go, from position "
            f"{wrong[hows[0]][0]} on, by {float(apart[hows[0]].max()):.3g}. {cause}",
            f"{evidence}.",
            source=bench.mask_line,
            fix=fix,
        )


def _cause(wrong: dict[str, list[int]]) -> tuple[str, str]:
    """Return why going on gives something else, and the fix, from where it does in chunks and token by token."""
    if _SINGLES not in wrong:
        return (
            "The mask of a chunk may be aligned top left, positions may begin at 0 in each call, or keys be put in "
            "another order.",
            "offset positions by the length of the cache, and align the mask bottom right: triu(diagonal=1 + past).",
        )
    if not wrong[_SINGLES]:
        return (
            "The mask of a chunk is aligned top left: its queries do not see the keys in front of them, or see too "
            "few.",
            "align it bottom right: triu(diagonal=1 + past), past = keys - queries.",
        )
    if 0 in (*wrong[_CHUNKS][:1], *wrong[_SINGLES][:1]):
        return "In one go sees what is not there yet token by token: the future.", ""
    return (
        "What was cached is not what one go computes: positions that begin at 0 in each call do this, keys that are "
        "cached before they are rotated, and new keys that are not put behind the earlier ones.",
        "offset positions by the length of the cache.",
    )


def _cache_name(bench: Bench) -> str | None:
    """Return the argument that takes a cache by its name, of a causal module that returns something second."""
    name = next((name for name in _CACHES if name in bench.given.parameters and bench.values.get(name) is None), None)
    every = bench.sights
    if name is None or not every or not all(sight.is_causal and sight.queries == sight.keys for sight in every):
        return None
    try:
        _second(bench.recorded.returned)
    except NotPossibleError:
        return None
    return name


def _stepwise(bench: Bench, name: str, steps: list[tuple[int, int]], given: dict[str, Any]) -> Tensor:
    """Return the outputs of calls that follow each other, side by side; `given` are the arguments of one go."""
    source = bench.sources[0]
    outputs = []
    past: Any = None
    assert source.positions is not None
    for start, stop in steps:
        changes: dict[str, Any] = {name: past} if past is not None else {}
        for argument, value in given.items():
            if isinstance(value, Tensor) and argument != name:
                changes[argument] = _piece(argument, value, source, start, stop)
        returned = bench.returned(changes)
        outputs.append(bench.output_of(returned))
        past = _second(returned)
    return torch.cat(outputs, dim=source.positions)


def _piece(name: str, value: Tensor, source: Source, start: int, stop: int) -> Tensor:
    """Return the part of an argument that belongs to some positions; of a mask, to those before them as well."""
    length = source.length
    if name in source.names:
        assert source.positions is not None
        return value.narrow(source.positions, start, stop - start)
    if "mask" in name or value.dtype == torch.bool:
        if value.dim() > 1 and value.shape[-2] == length:
            value = value.narrow(-2, start, stop - start)
        return value.narrow(-1, 0, stop) if value.shape[-1] == length else value
    if "position" in name and value.shape[-1] == length:
        return value.narrow(-1, start, stop - start)
    return value


def _second(returned: Any) -> Any:
    """Return what a forward returned second, its cache. Raises `NotPossibleError` where there is none."""
    for name in ("past_key_values", "past_key_value", "cache"):
        if getattr(returned, name, None) is not None:
            return getattr(returned, name)
    if hasattr(returned, "to_tuple"):
        returned = returned.to_tuple()
    if isinstance(returned, dict):
        returned = tuple(returned.values())
    if not isinstance(returned, (tuple, list)) or len(returned) < 2 or returned[1] is None:
        raise NotPossibleError("the forward returns no second thing that could be its cache")
    return returned[1]
