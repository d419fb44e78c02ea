"""Find why a call that continues from a cache differs from one call over all tokens: the first thing that differs.

Both runs are recorded with their tensors. For each attention, in order, the input, the values, the keys and queries,
the visible keys and the bias of the call are compared with those of the one call, each in canonical axes. A row of the
call's keys is the token whose value it has: a cache may drop rows, or have empty ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..graph.rerun import between
from ..measure.replaced import replacement
from ..naming.axes import AxisNames
from ..naming.canonical import canonical, content_of, sizes_in
from ..naming.inner_steps import InnerStepsReader
from ..naming.pattern import CANONICAL_AXES, dims_of
from ..naming.visibility import kinds_of, sees
from ..record.arguments import tensors_in
from ..reports.trace import Position
from ..running.subject import Run
from ..text import plural, shortened, small, spans
from .check.replay import KeptRun, LostError, again

_ROUNDING = 1600.0
"""Calls of other sizes round differently: numbers within this many epsilons of the largest are equal."""
_TOP_LEFT_FIX = "Align the mask bottom right: triu(diagonal=1 + past), past = keys - queries."
_POSITIONS_FIX = "Count positions from the number of all tokens so far."
_APPEND_FIX = "Join the new keys and values to the cached ones, in order: torch.cat((past, new), dim=2)."
_ANGLES_FIX = "Compute the angles of the positions of each call, or keep them by position."
_TURNED = 3
"""The number of cached keys whose angles are read."""
_FAR = 60
"""Operations after which a walk gives up: a rotation needs fewer."""
_OWN_FIX = "Join the new keys and values to the cached ones before the scores: torch.cat((past, new), dim=2)."


@dataclass(frozen=True)
class Reason:
    """The first thing that a call has unlike one call over all tokens."""

    sentence: str
    fix: str = ""
    source: str = ""
    module: str = ""


@dataclass(frozen=True)
class Continued:
    """A call with the tokens from `start` to `stop`, which continues from a cache, beside one call over all tokens."""

    whole: Run
    call: Run
    start: int
    stop: int
    whole_leaves: Mapping[int, Tensor]
    """Values of inputs, parameters and buffers of the one call, by tensor id."""
    call_leaves: Mapping[int, Tensor]

    @cached_property
    def named_call(self) -> Run:
        """The call, with the names that the one call gives to axes of size one."""
        return self.call.beside(self.whole)


def reason_of(continued: Continued) -> Reason | None:
    """Return the first thing that differs; None if the runs cannot be compared."""
    pairs = [*zip(continued.whole.attentions, continued.named_call.attentions, strict=False)]
    if not pairs or len(continued.whole.attentions) != len(continued.call.attentions):
        return None
    kinds = kinds_of(continued.whole)
    for place, (whole, call) in enumerate(pairs):
        beside = _Beside(continued, place, *whole, *call)
        if beside.is_of_other_tokens:
            continue  # e.g. of an encoder, which every call runs again
        if not beside.is_comparable:
            return None
        reason = beside.reason_over_other_keys() if "cross" in kinds[place] else beside.reason()
        if reason is not None:
            return reason
    attention = "The attention" if len(pairs) == 1 else "Every attention"
    return Reason(f"{attention} of this call equals that of one call: an operation after it makes the difference.")


@dataclass(frozen=True)
class _Beside:
    """One attention of the call beside the same attention of the one call."""

    continued: Continued
    place: int
    whole: Attention
    whole_names: AxisNames
    call: Attention
    call_names: AxisNames

    # -- stages -------------------------------------------------------------------------------------------------------

    def _of_whole(self, stage: str) -> Tensor | None:
        if stage not in self.whole.stages:
            return None
        return content_of(self.continued.whole, self.whole, self.whole_names, stage)

    def _of_call(self, stage: str) -> Tensor | None:
        if stage not in self.call.stages:
            return None
        return content_of(self.continued.named_call, self.call, self.call_names, stage)

    @cached_property
    def _values(self) -> tuple[Tensor, Tensor] | None:
        """The values of the one call and of the call: `batch kv_heads key head_dim`."""
        return self._pair("v_heads", 2)

    def _pair(self, stage: str, positions: int) -> tuple[Tensor, Tensor] | None:
        """Return a stage of both runs; None if it is missing, or they differ in another axis than the positions."""
        whole, call = self._of_whole(stage), self._of_call(stage)
        if whole is None or call is None:
            return None
        are_alike = _shape_without(positions, whole) == _shape_without(positions, call)
        return (whole, call) if are_alike else None

    def _of_queries(self, stage: str, axis: int) -> tuple[Tensor, Tensor] | None:
        """Return a stage of the call's tokens in both runs; None if it is missing or has other positions."""
        pair = self._pair(stage, axis)
        if pair is None or pair[0].shape[axis] < self.continued.stop or pair[1].shape[axis] != self._queries:
            return None
        return pair[0].narrow(axis, self.continued.start, self._queries), pair[1]

    @property
    def _queries(self) -> int:
        return self.continued.stop - self.continued.start

    @property
    def is_comparable(self) -> bool:
        """Whether scores and values of both runs are known, with a query for each token of the call."""
        return self._values is not None and self._scores is not None

    @property
    def is_of_other_tokens(self) -> bool:
        """Whether both runs compute the same from the same queries: their tokens are not those of the call."""
        queries = self._of_call("q_heads")
        if queries is None or queries.shape[2] == self._queries:
            return False
        for stage in ("q_heads", "v_heads", "context"):
            whole, call = self._of_whole(stage), self._of_call(stage)
            if whole is None or call is None:
                return False
            if whole.shape != call.shape or not _near(whole, call):
                return False
        return True

    def reason_over_other_keys(self) -> Reason | None:
        """Return the first thing that differs in an attention whose keys are not of the call's tokens."""
        source, module = self.call.score_product.op.source, self.call.module
        sentence_and_fix = self._input()
        if sentence_and_fix is not None:
            return Reason(*sentence_and_fix, source, module)
        for stage, side in (("k_heads", "keys"), ("v_heads", "values")):
            pair = self._pair(stage, 2)
            if pair is None:
                continue
            whole, call = pair
            if whole.shape != call.shape or not _near(whole, call):
                sentence = f"The {side} of the other sequence differ from those of one call."
                return Reason(sentence, "", source, module)
        return self._of_output()

    @cached_property
    def _scores(self) -> tuple[Tensor, Tensor] | None:
        """The scores of the call's tokens in both runs: `batch heads query key`."""
        return self._rows_of("scores")

    def _rows_of(self, stage: str) -> tuple[Tensor, Tensor] | None:
        """Return `batch heads query key` of the call's tokens in both runs; None if a run lacks one of them."""
        whole, call = self._of_whole(stage), self._of_call(stage)
        if whole is None or call is None:
            return None
        if whole.shape[:2] != call.shape[:2] or call.shape[2] != self._queries:
            return None
        if whole.shape[2] < self.continued.stop:
            return None
        return whole[:, :, self.continued.start : self.continued.stop], call

    @cached_property
    def _tokens(self) -> Tensor:
        """`key`: the token whose value is in this row of the call; -1 where it is none of them."""
        whole, call = self._values or (torch.zeros(0), torch.zeros(0))
        return _matches(whole, call, self._expected(call.shape[2], whole.shape[2]))

    def _expected(self, rows: int, tokens: int) -> Tensor:
        """Return the token that a row should have: all tokens in order, or the last ones if there are fewer rows."""
        expected = torch.arange(rows) + max(self.continued.stop - rows, 0)
        return expected.masked_fill(expected >= min(tokens, self.continued.stop), -1)

    @cached_property
    def _seen(self) -> tuple[Tensor, Tensor]:
        """`batch query key` of the call's tokens in both runs: True if any head sees the key."""
        whole, call = _seen_in(self._of_whole), _seen_in(self._of_call)
        return whole[:, self.continued.start : self.continued.stop], call

    @cached_property
    def _filled(self) -> Tensor:
        """The rows of the call that have a token."""
        return (self._tokens >= 0).nonzero().flatten()

    # -- what differs -------------------------------------------------------------------------------------------------

    def reason(self) -> Reason | None:
        """Return the first thing that differs in this attention; None without one."""
        source = self.call.score_product.op.source
        for difference in (self._input, self._future, self._slots, self._missing, self._keys):
            sentence_and_fix = difference()
            if sentence_and_fix is not None:
                return Reason(*sentence_and_fix, source, self.call.module)
        mask_source = self.call.masks[-1].source if self.call.masks else source
        for difference in (self._visible, self._bias):
            sentence_and_fix = difference()
            if sentence_and_fix is not None:
                return Reason(*sentence_and_fix, mask_source, self.call.module)
        return self._of_output()

    def _of_output(self) -> Reason | None:
        """Return whether the output differs, although nothing before it does."""
        output = self._of_queries("output", 1) or self._of_queries("context", 2)
        if output is not None and not _near(*output):
            return Reason("The output of the attention differs, although its scores and values are equal.")
        return None

    def _input(self) -> tuple[str, str] | None:
        """Return whether the input of the attention differs, e.g. by the positions that are added to it."""
        pair = self._of_queries("query", 1)
        if pair is None or _near(*pair):
            return None
        first = self.continued.start + _first_unlike(*pair, 1)
        added = _added_positions(self.continued) if self.place == 0 else None
        if added is not None:
            position = self.continued.start
            return f"Position {position} gets the embedding of position {added}{_restarts(added)}.", _POSITIONS_FIX
        before = "before it" if self.place == 0 else f"between attentions {self.place} and {self.place + 1}"
        differs = f"The input of attention {self.place + 1} differs at position {first}"
        return f"{differs}: an operation {before} makes the difference.", ""

    def _future(self) -> tuple[str, str] | None:
        """Return whether the one call attends to tokens after the call's."""
        seen, _ = self._seen
        later = seen[..., self.continued.stop :].any(0)
        if not bool(later.any()):
            return None
        query, key = (int(number) for number in later.nonzero()[0])
        return (
            f"In one call, position {self.continued.start + query} attends to the future position "
            f"{self.continued.stop + key}, which is missing in this call.",
            "",
        )

    def _slots(self) -> tuple[str, str] | None:
        """Return whether the value of a token is in another row than its key, or keys and values are swapped."""
        keys, values = self._pair("k_heads", 2), self._values
        if keys is None or values is None:
            return None
        whole, call = keys
        if self._are_swapped(keys, values):
            return (
                "The cached values are the keys of the earlier calls.",
                "Return keys and values in the order in which the next call reads them.",
            )
        if not _is_unique(whole) or not _is_unique(values[0]):
            return None  # several tokens have the same numbers
        of_keys = _matches(whole, call, self._expected(call.shape[2], whole.shape[2]))
        apart = (of_keys >= 0) & (self._tokens >= 0) & (of_keys != self._tokens)
        if not bool(apart.any()):
            return None
        row = int(apart.nonzero()[0])
        return (
            f"Key {row} of this call is that of token {int(of_keys[row])}, and value {row} that of token "
            f"{int(self._tokens[row])}.",
            "Join keys and values in the same order.",
        )

    def _are_swapped(self, keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]) -> bool:
        """Return whether cached values are the keys of their tokens, and none of them is its own value."""
        whole, call = keys
        if whole.shape != values[0].shape or call.shape != values[1].shape:
            return False
        expected = self._expected(call.shape[2], whole.shape[2])
        is_cached = expected.lt(self.continued.start) & expected.ge(0)
        has_key = _matches(whole, values[1], expected) == expected
        has_value = self._tokens == expected
        return bool(has_key[is_cached].any()) and not bool(has_value[is_cached].any())

    def _missing(self) -> tuple[str, str] | None:
        """Return whether a token that the one call attends to has no value in the call, or another value."""
        seen, _ = self._seen
        attended = seen.any(0).any(0)[: self.continued.stop].nonzero().flatten().tolist()
        kept = set(self._tokens.tolist())
        missing = [token for token in attended if token not in kept]
        if not missing:
            return None
        rows, start = len(self._tokens), self.continued.start
        new = [token for token in missing if token >= start]
        past = [token for token in missing if token < start]
        query = start + int(seen.any(0)[:, missing[0]].nonzero()[0])
        if rows <= self._queries and not new:
            return (
                f"This call has {plural(rows, 'key')} for {plural(self._queries, 'token')}: the keys of the "
                f"{plural(start, 'earlier token')} are missing.",
                _APPEND_FIX,
            )
        if new:
            if not past and self._reads_tokens_alone:
                return self._without_own(new), _OWN_FIX
            differs = f"The value of the new position {new[0]} differs from that of one call."
            return f"{differs}{self._tried('v_heads')}", ""
        if bool((self._tokens >= 0).all()):
            return (
                f"The cache has lost position {missing[0]}: this call has {plural(rows, 'key')}, of positions "
                f"{_places(self._tokens)}, and in one call position {query} attends to position {missing[0]}.",
                "",
            )
        differ = f"The cached values of positions {_ranges(missing)} differ from those of one call."
        return f"{differ}{self._tried('v_heads')}", ""

    @property
    def _reads_tokens_alone(self) -> bool:
        """Whether the keys and the values of this call are rows of tokens, each its own: a missing one is in no row."""
        keys = self._pair("k_heads", 2)
        if keys is None or not len(self._tokens):
            return False
        has_repeated = len(set(self._tokens.tolist())) < len(self._tokens)
        if has_repeated or bool(self._tokens.lt(0).any()):
            return False
        return torch.equal(_matches(*keys, self._tokens), self._tokens)

    def _without_own(self, new: list[int]) -> str:
        """Return that new tokens have no key in this call, and whether their keys are in the cache that it returns."""
        keys = plural(len(self._tokens), "key")
        new_keys = f"the key of position {new[0]} itself is"
        if len(new) > 1:
            new_keys = f"the keys of positions {_ranges(new)} themselves are"
        where = "missing"
        if any(self._has_values_of(tensor, new) for _, tensor in tensors_in(self.continued.call.returned)):
            where = "only in the cache that the call returns"
        return f"Position {new[0]} attends to {keys}, of positions {_places(self._tokens)}; {new_keys} {where}."

    def _has_values_of(self, returned: Tensor, new: list[int]) -> bool:
        """Return whether a returned tensor, `batch kv_heads row feature`, has the values of these tokens as rows."""
        if self._values is None:
            return False
        whole = self._values[0]
        if returned.dim() != 4 or returned.shape[:2] != whole.shape[:2] or returned.shape[3] != whole.shape[3]:
            return False
        rows = _matches(whole, returned.to(whole), torch.full((returned.shape[2],), -1))
        return set(new) <= set(rows.tolist())

    def _keys(self) -> tuple[str, str] | None:
        """Return whether the scores differ where both runs attend, and which of queries and keys make them differ."""
        pair = self._scores
        if pair is None:
            return None
        whole, call = pair[0][..., self._tokens[self._filled]], pair[1][..., self._filled]
        both = self._both[:, None].to(whole.device)
        if _near(whole.masked_fill(~both, 0.0), call.masked_fill(~both, 0.0)):
            return None
        keys, queries = self._pair("k_heads", 2), self._of_queries("q_heads", 2)
        if keys is None or queries is None:
            return "The scores differ from those of one call.", ""
        are_read = both.any(2)[:, 0].any(0).cpu()
        unlike = self._unlike_keys(keys, self._filled[are_read].tolist())
        cached = [token for token in unlike if token < self.continued.start]
        return (
            self._of_positions(cached)
            or self._of_angles(cached, queries[1])
            or self._of_cached_angles(cached, keys[1])
            or self._of_operands(unlike, cached, queries, keys)
        )

    def _unlike_keys(self, keys: tuple[Tensor, Tensor], rows: list[int]) -> list[int]:
        """Return the tokens in these rows of the call whose keys differ from those of the one call."""
        whole, call = keys
        unlike = []
        for row in rows:
            token = int(self._tokens[row])
            if not _near(whole[:, :, token], call[:, :, row]):
                unlike.append(token)
        return unlike

    def _of_angles(self, cached: list[int], queries: Tensor) -> tuple[str, str] | None:
        """Return whether the queries are rotated by the angles of other positions, e.g. by those of an earlier call.

        `queries` are those of the call, `batch heads query head_dim`.
        """
        start = self.continued.start
        if cached:
            return None
        fits = self._positions_of_angle("query", start, queries[:, :, 0])
        if len(fits) != 1 or fits[0] == start:
            return None
        rotated = f"Position {start} is rotated by the angle of position {fits[0]}"
        if self._keeps_angles:
            return f"{rotated}, which the module keeps from an earlier call.", _ANGLES_FIX
        return f"{rotated}{_restarts(fits[0])}.", _POSITIONS_FIX

    def _of_cached_angles(self, cached: list[int], keys: Tensor) -> tuple[str, str] | None:
        """Return whether cached keys are rotated a second time; `keys` are those of the call, by row.

        Two turns by the angle of a position are one by the angle of twice that position.
        """
        rows = {int(token): row for row, token in enumerate(self._tokens)}
        twice = [token for token in cached if token and 2 * token < self.continued.stop]
        for token in twice[:_TURNED]:
            if self._positions_of_angle("key", token, keys[:, :, rows[token]]) != [2 * token]:
                return None
        if not twice:
            return None
        return (
            f"The cached keys of positions {_ranges(cached)} are rotated a second time: that of position {twice[0]} "
            f"has the angle of position {2 * twice[0]}.",
            "Rotate the new keys alone before they are joined with the cache, or cache keys that are not rotated.",
        )

    def _positions_of_angle(self, side: str, token: int, numbers: Tensor) -> list[int]:
        """Return the positions whose angles make these numbers, `batch heads head_dim`, of a projected token.

        The token of the one call is put at every position of it, and the steps behind the projection run again.
        """
        projection, heads = f"{side[0]}_proj", f"{side[0]}_heads"
        stage, names = self.whole.stages.get(projection), self.whole_names
        if stage is None:
            return []
        dims, recorded = dims_of(names.of_stage(projection)), KeptRun(self.continued.whole, self.continued.whole_leaves)
        projected = recorded.content(stage)
        if [side] not in dims or projected is None:
            return []
        place = dims.index([side])
        if projected.shape[place] < self.continued.stop:
            return []
        moved = projected.narrow(place, token, 1).expand_as(projected)
        try:
            value = again(recorded, stage, moved, self.whole.stages[heads])
        except LostError:
            return []
        sizes = sizes_in(self.whole, names, heads)
        everywhere = canonical(value, heads, names.of_stage(heads), sizes, names.head_order)
        if everywhere is None or everywhere.shape[:2] != numbers.shape[:2]:
            return []
        return [at for at in range(everywhere.shape[2]) if _near(everywhere[:, :, at], numbers)]

    @property
    def _keeps_angles(self) -> bool:
        """Whether the rotation of the queries reads a tensor of an earlier call: no operation of this one made it."""
        if "q_proj" not in self.call.stages:
            return False
        recording, leaves = self.continued.call.recording, self.continued.call_leaves
        projected = self.call.stages["q_proj"]
        steps = between(recording, {projected.id}, self.call.stages["q_heads"])
        path = {projected.id, *(tensor.id for op in steps for tensor in op.outputs)}
        queue = [tensor for op in steps for tensor in op.inputs if tensor.id not in path]
        for tensor, _ in zip(queue, range(_FAR), strict=False):  # the queue grows in this loop
            producer = recording.producer(tensor)
            if producer is not None:
                queue += producer.inputs
            elif tensor.id not in leaves and tensor.numel > 1:
                return True
        return False

    def _of_positions(self, cached: list[int]) -> tuple[str, str] | None:
        """Return whether new tokens are rotated by other positions than their own; `cached` keys differ."""
        position, start = self._position(self.call, self.call_names, of_call=True), self.continued.start
        expected = self._position(self.whole, self.whole_names, of_call=False)
        if position is None or expected is None or expected.query_offset is None:
            return None
        offset, rows = position.query_offset, len(self._tokens) - self._queries
        right = expected.query_offset + start
        if offset is None or offset == right or cached:
            return None
        if offset == rows + expected.query_offset and rows < start:
            return (
                f"Position {right} is rotated as position {offset}: positions count the {rows} rows that the cache "
                f"keeps, instead of all {start} tokens so far.",
                "Count all tokens so far, instead of the rows that the cache keeps.",
            )
        return f"Position {right} is rotated as position {offset}{_restarts(offset)}.", _POSITIONS_FIX

    def _position(self, attention: Attention, names: AxisNames, *, of_call: bool) -> Position | None:
        run = self.continued.named_call if of_call else self.continued.whole
        leaves = self.continued.call_leaves if of_call else self.continued.whole_leaves
        return InnerStepsReader(run, leaves).of(attention, names).position

    def _of_operands(
        self, unlike: list[int], cached: list[int], queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor]
    ) -> tuple[str, str]:
        """Return which of queries, new keys and cached keys differ."""
        new = [token for token in unlike if token >= self.continued.start]
        if cached and not new:
            differ = f"The cached keys of positions {_ranges(cached)} differ from those of one call."
            return f"{differ}{self._tried('k_heads')}", ""
        if cached:
            differ = f"The keys of positions {_ranges(unlike)} differ from those of one call."
            return f"{differ}{self._tried('k_heads')}", ""
        sides = []
        if not _near(*queries):
            sides.append("queries")
        if new:
            sides.append("keys")
        if sides:
            differ = f"The {' and the '.join(sides)} of the new position {self.continued.start} differ from those of"
            stage = "q_heads" if "queries" in sides else "k_heads"
            return f"{differ} one call.{self._tried(stage)}", ""
        of_whole, of_call = self.whole.scale, self.call.scale
        if of_whole and of_call and abs(of_whole / of_call - 1) > 1e-3:
            return f"The scores are scaled by {of_call:.4g}, and in one call by {of_whole:.4g}.", ""
        return "The scores differ from those of one call, although queries and keys are equal.", ""

    def _tried(self, stage: str) -> str:
        """Return, as a further sentence, the change that makes a stage of this call that of one call; empty if none.

        Of keys and values that are a row for each token so far, all are tried, then the cached ones and the new ones.
        """
        pair = self._pair(stage, 2)
        if pair is None:
            return ""
        whole, call = pair
        start, stop = self.continued.start, self.continued.stop
        if call.shape[2] == self._queries and whole.shape[2] >= stop:
            parts = [(whole[:, :, start:stop], call)]
        elif call.shape[2] == stop <= whole.shape[2]:
            parts = [(whole[:, :, at], call[:, :, at]) for at in (slice(stop), slice(start), slice(start, stop))]
        else:
            return ""
        called = "in one call", "in this call"
        for ours, theirs in parts:
            change = replacement(stage, CANONICAL_AXES[stage], (ours, theirs), _tolerance(whole), called)
            if change is not None:
                return f" {change.sentence}"
        return ""

    @cached_property
    def _both(self) -> Tensor:
        """`batch query row` for the rows that have a token: True where both runs attend to it."""
        whole, call = self._seen
        return whole[..., self._tokens[self._filled]] & call[..., self._filled]

    def _visible(self) -> tuple[str, str] | None:
        """Return whether a query of the call sees other keys than in the one call."""
        whole, call = self._seen
        rows, queries = call.shape[2], call.shape[1]
        empty = call.any(0) & (self._tokens < 0)
        if bool(empty.any()):
            query, row = (int(number) for number in empty.nonzero()[0])
            return f"Position {self.continued.start + query} attends to row {row} of the cache, which has no token.", ""
        of_call = torch.zeros(call.shape[0], queries, whole.shape[2], dtype=torch.bool)
        of_call[..., self._tokens[self._filled]] = call[..., self._filled]
        if torch.equal(of_call, whole):
            return None
        if torch.equal(call, torch.ones(queries, rows, dtype=torch.bool).tril().expand_as(call)):
            return (
                f"The mask is aligned top left: with {_queries(queries)} and {rows} keys, position "
                f"{self.continued.start} sees key 0 alone.",
                _TOP_LEFT_FIX if self.call.masks and queries > 1 else _TOP_LEFT_FIX + " A single query needs no mask.",
            )
        query = int((of_call != whole).any(2).any(0).nonzero()[0])
        opened = (of_call & ~whole).any(0)[query]
        closed = (whole & ~of_call).any(0)[query]
        position = self.continued.start + query
        if bool(opened.any()):
            future = bool(opened[position + 1 :].any())
            what = "future positions" if future else "positions"
            return f"Position {position} sees {what} {_places_of(opened)}, which are masked out in one call.", ""
        return f"Position {position} does not see positions {_places_of(closed)}, which it sees in one call.", ""

    def _bias(self) -> tuple[str, str] | None:
        """Return whether what is added to the scores differs where both runs attend."""
        pair, scores = self._rows_of("masked_scores"), self._scores
        if pair is None or scores is None:
            return None
        whole, call = pair[0][..., self._tokens[self._filled]], pair[1][..., self._filled]
        both = self._both[:, None].expand_as(whole).to(whole.device)
        attended = whole.masked_fill(~both, 0.0)
        if _near(attended, call.masked_fill(~both, 0.0)):
            return None
        added = call - scores[1][..., self._filled]
        expected = whole - scores[0][..., self._tokens[self._filled]]
        apart = (added - expected).abs().masked_fill(~both, 0.0)
        differs = (apart > _tolerance(attended)).any(3).any(1).any(0).nonzero()
        if not len(differs):
            return None  # the scores differ, and what is added to them does not
        query = int(differs[0])
        of_query = apart[:, :, query : query + 1]
        batch, head, _, row = (int(number) for number in (of_query > 0.999 * of_query.max()).nonzero()[0])
        key, position = int(self._tokens[self._filled][row]), self.continued.start + query
        like = self._position_of_bias(added[:, :, query])
        more = "" if like is None else f", as for a query at position {like}"
        return (
            f"The keys are equal, and the bias differs: position {position} adds "
            f"{_term(added[batch, head, query, row])} to the score of key {key}{more}; expected "
            f"{_term(expected[batch, head, query, row])}.",
            "Count the positions of the queries in the bias from the number of all tokens so far.",
        )

    def _position_of_bias(self, added: Tensor) -> int | None:
        """Return the only position of the one call whose bias is this, `batch heads row`; None if not exactly one."""
        masked, scores = self._of_whole("masked_scores"), self._of_whole("scores")
        weights = self._of_whole("weights")
        if masked is None or scores is None or weights is None:
            return None
        seen = sees(weights, masked).cpu()
        whole, tokens = masked - scores, self._tokens[self._filled]
        fits, near = [], _tolerance(scores)
        for position in range(whole.shape[2]):
            mark = seen[:, position, tokens][:, None].expand_as(added).to(added.device)
            row = whole[:, :, position, tokens]
            apart = (row - added).abs().masked_fill(~mark, 0.0)
            if bool(mark.any()) and float(apart.max()) <= near:
                fits.append(position)
        return fits[0] if len(fits) == 1 else None


def _seen_in(content: Callable[[str], Tensor | None]) -> Tensor:
    """Return `batch query key` of a run, given its stages by name: True if any head sees the key."""
    weights, scores = content("weights"), content("scores")
    if weights is None and scores is not None:
        weights = torch.ones_like(scores)
    if weights is None:
        weights = torch.zeros(1, 1, 1, 1)
    return sees(weights, content("masked_scores")).cpu()


def _added_positions(continued: Continued) -> int | None:
    """Return the position whose embedding the first token of the call gets instead of its own; None if unknown.

    In both runs, embeddings are the operands of additions before the first attention.
    """
    of_whole, of_call = _operands_added(continued.whole), _operands_added(continued.call)
    if len(of_whole) != len(of_call):
        return None
    queries = continued.stop - continued.start
    for whole, call in zip(of_whole, of_call, strict=True):
        if not _may_be_rows(whole, call) or call.shape[-2] != queries or whole.shape[-2] < continued.stop:
            continue
        starts = range(whole.shape[-2] - queries + 1)
        places = [start for start in starts if _near(whole.narrow(-2, start, queries), call)]
        if places and continued.start not in places:
            return places[0]
    return None


def _may_be_rows(whole: Tensor, call: Tensor) -> bool:
    """Return whether two tensors `... position features` differ at most in their number of positions."""
    return call.dim() > 1 and whole.dim() == call.dim() and _shape_without(-2, whole) == _shape_without(-2, call)


def _shape_without(axis: int, tensor: Tensor) -> tuple[int, ...]:
    """Return the sizes of all dimensions but one; `axis` is not the last."""
    return (*tensor.shape[:axis], *tensor.shape[axis + 1 :])


def _operands_added(run: Run) -> list[Tensor]:
    """Return the values of the operands of additions before the first attention, in order."""
    first = min(attention.score_product.op.index for attention, _ in run.attentions)
    values = run.recording.values
    operands: list[Tensor] = []
    for op in run.recording.ops[:first]:
        if op.base_name.rstrip("_") == "add" and len(op.inputs) == 2:
            operands += [values[tensor.id] for tensor in op.inputs if tensor.id in values]
    return operands


def _matches(whole: Tensor, call: Tensor, expected: Tensor) -> Tensor:
    """Return for each row of `batch heads row feature` the token with the same numbers; -1 without one.

    Of several tokens, the expected one is taken.
    """
    tokens = torch.full((call.shape[2],), -1)
    for row in range(call.shape[2]):
        apart = (whole - call[:, :, row : row + 1]).abs().nan_to_num(torch.inf).amax((0, 1, 3))
        fits = (apart <= _tolerance(whole)).nonzero().flatten().tolist()
        if int(expected[row]) in fits:
            tokens[row] = expected[row]
        elif fits:
            tokens[row] = fits[0]
    return tokens


def _is_unique(heads: Tensor) -> bool:
    """Return whether no two tokens have the same numbers: `batch heads key feature`."""
    rows = heads.movedim(2, 0).flatten(1)
    return len(torch.unique(rows, dim=0)) == len(rows)


def _tolerance(numbers: Tensor) -> float:
    finite = numbers[numbers.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 1.0
    if not (numbers.is_floating_point() or numbers.is_complex()):
        return 0.0  # positions and ids: whole numbers are equal, or they are not
    return min(_ROUNDING * torch.finfo(numbers.dtype).eps, 1 / 8) * max(largest, 1e-6)


def _near(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors are equal but for rounding; two NaNs and two equal infinities are."""
    apart = (left.double() - right.double()).abs()
    are_equal = (left == right) | (left.isnan() & right.isnan())
    apart = apart.masked_fill(are_equal, 0.0).nan_to_num(torch.inf)
    return not apart.numel() or float(apart.max()) <= _tolerance(left)


def _first_unlike(left: Tensor, right: Tensor, axis: int) -> int:
    """Return the first position along an axis at which two tensors differ."""
    for position in range(left.shape[axis]):
        if not _near(left.narrow(axis, position, 1), right.narrow(axis, position, 1)):
            return position
    return 0


def _restarts(position: int) -> str:
    return ": positions restart at 0" if position == 0 else ""


def _term(number: Tensor) -> str:
    """Return a number that is added to a score."""
    rounded = round(float(number), 5)
    return small(rounded) if rounded else "0"


def _queries(count: int) -> str:
    return "1 query" if count == 1 else f"{count} queries"


def _ranges(places: list[int]) -> str:
    return shortened(spans(places), 40)


def _places(tokens: Tensor) -> str:
    return _ranges([int(token) for token in tokens])


def _places_of(marks: Tensor) -> str:
    return _ranges([int(place) for place in marks.nonzero().flatten()])
