"""Calls that continue from a cache, one after the other, as a loop that generates tokens makes them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from ..compare.calls.pair import Continued
from ..record.arguments import tensors_in
from .arguments import second_output
from .evidence import OTHER_SIZES, Evidence
from .lab import NotPossibleError, RaisedError


@dataclass(frozen=True)
class Cache:
    """A cache, and how calls continue from it."""

    name: str
    """The argument that takes the cache; for a cache in the module, the argument that takes the positions."""
    in_module: bool
    """Whether the module keeps the cache, in buffers or attributes that the forward writes into."""


@dataclass(frozen=True)
class Loop:
    """Calls that continue from a cache, and what they are given of a mask of all tokens.

    The module keeps its state from call to call, as in a real loop: it may keep angles or masks of earlier calls.
    """

    evidence: Evidence
    memory: Cache
    mask: str = ""
    """The argument that takes the mask of `batch key`; empty without one."""
    given: Literal["all", "keys", "new", "none"] = "all"
    """The mask of a call: of all tokens so far, of as many last ones as the call has keys, of its own tokens, or none.
    """

    # -- all calls ----------------------------------------------------------------------------------------------------

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

    def changed(self, places: list[int]) -> Tensor:
        """Return how much the output of each token differs from that of one call, `batch position`."""
        return self.evidence.differences(self.output(places), times=OTHER_SIZES)

    def is_equal(self, ways: Iterable[list[int]]) -> bool:
        """Return whether the calls run in each way, and give the outputs of one call."""
        with suppress(NotPossibleError):
            return not any(self.changed(places).any() for places in ways)
        return False

    def _stepwise(self, places: list[int], positions: str | None) -> Tensor:
        outputs, past = [], None
        for start, stop in pairwise(places):
            changes = self._changes(start, stop, positions, past)
            returned = self.evidence.returned(changes, go_on=start > 0)
            outputs.append(self.evidence.output_of(returned))
            past = self._past(returned)
        return torch.cat(outputs, dim=self.evidence.source.positions or 0)

    # -- one of them --------------------------------------------------------------------------------------------------

    def call_with(self, places: list[int], position: int) -> Continued | None:
        """Return the recorded call with a position, after the calls before it; None if it cannot be made."""
        for positions in self._ways_to_advance():
            with suppress(NotPossibleError):
                return self._recorded(places, positions, position)
        return None

    def keys_of(self, start: int, stop: int, changes: dict[str, Any]) -> int | None:
        """Return how many of the last tokens a mask must have for a call to run; None if no number is found."""
        whole, count = changes.get(self.mask), stop - start
        if not isinstance(whole, Tensor):
            return None
        sizes: set[int] = set()
        for _, tensor in tensors_in(changes.get(self.memory.name)):
            sizes.update(tensor.shape)
        # Most likely as many as are cached, and the new ones.
        numbers = range(stop - 1, max(count, 2) - 1, -1)
        for keys in sorted(numbers, key=lambda number: number - count not in sizes):
            with suppress(RaisedError):
                self.evidence.returned({**changes, self.mask: whole[..., -keys:]}, go_on=start > 0)
                return keys
        return None

    def _recorded(self, places: list[int], positions: str | None, position: int) -> Continued:
        evidence, past = self.evidence, None
        for start, stop in pairwise(places):
            changes = self._changes(start, stop, positions, past)
            if position < stop:
                call = evidence.with_arguments(changes, go_on=start > 0)
                return Continued(
                    whole=evidence.run,
                    call=call.run,
                    start=start,
                    stop=stop,
                    whole_leaves=evidence.leaves,
                    call_leaves=call.leaves,
                    subject=evidence.subject,
                )
            past = self._past(evidence.returned(changes, go_on=start > 0))
        raise NotPossibleError("no call has this position")

    # -- its arguments ------------------------------------------------------------------------------------------------

    def _changes(self, start: int, stop: int, positions: str | None, past: Any) -> dict[str, Any]:
        """Return the arguments of a call with some of the tokens, after a call that returned the cache `past`."""
        changes = self.evidence.piece(self.evidence.source, start, stop, positions=positions)
        if past is not None:
            changes[self.memory.name] = past
        whole = changes.get(self.mask)
        if not isinstance(whole, Tensor):
            return changes
        if self.given == "none":
            changes[self.mask] = None
        if self.given == "new":
            changes[self.mask] = whole[..., start:]
        if self.given == "keys" and start:
            keys = self.keys_of(start, stop, changes)
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
        first = (self.memory.name or None) if self.memory.in_module else None
        unset = self.evidence.arguments.unset_positions()
        return [first, *(name for name in unset if name != self.memory.name)]


def continues(evidence: Evidence) -> bool:
    """Return whether all tokens but the last, and then the last, give the output of one call by state alone."""
    with suppress(NotPossibleError, RaisedError):
        length = evidence.source.length
        output = Loop(evidence, Cache("", in_module=True)).output([0, length - 1, length])
        return evidence.follows and not evidence.apart(output, times=OTHER_SIZES)
    return False
