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
from ..record.ops import TensorRef
from ..reports.trace import Position
from ..running.subject import Run
from ..text import plural, shortened, small, spans
from .replay import KeptRun, LostError, again
from .same_tokens import NO_TOKEN, InBoth, are_unlike, near, shape_without, tolerance

_TOP_LEFT_FIX = "Align the mask bottom right: triu(diagonal=1 + past), past = keys - queries."
_POSITIONS_FIX = "Count positions from the number of all tokens so far."
_APPEND_FIX = "Join the new keys and values to the cached ones, in order: torch.cat((past, new), dim=2)."
_ANGLES_FIX = "Compute the angles of the positions of each call, or keep them by position."
_TURNED = 3
"""The number of cached keys whose angles are read."""
_FAR = 60
"""Operations after which a walk gives up: a rotation needs fewer."""
_SAME_SCALE = 1e-3
"""Scales whose ratio is this close to 1 are the same."""
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

    @property
    def length(self) -> int:
        """The number of tokens of the call."""
        return self.stop - self.start


def reason_of(continued: Continued) -> Reason | None:
    """Return the first thing that differs; None if the runs cannot be compared."""
    count = len(continued.whole.attentions)
    if count != len(continued.call.attentions) or not continued.named_call.attentions:
        return None
    kinds = kinds_of(continued.whole)
    pairs = zip(continued.whole.attentions, continued.named_call.attentions, strict=False)
    for place, ((whole, whole_names), (call, call_names)) in enumerate(pairs):
        both = _AttentionOfBoth(
            continued=continued,
            place=place,
            whole=whole,
            whole_names=whole_names,
            call=call,
            call_names=call_names,
        )
        if both.is_of_other_tokens:
            continue  # e.g. of an encoder, which every call runs again
        if not both.is_comparable:
            return None
        reason = both.reason_over_other_keys() if "cross" in kinds[place] else both.reason()
        if reason is not None:
            return reason
    attention = "The attention" if count == 1 else "Every attention"
    return Reason(f"{attention} of this call equals that of one call: an operation after it makes the difference.")


@dataclass(frozen=True)
class _Difference:
    """One thing that differs, before it is known which line of the code makes it."""

    sentence: str
    fix: str = ""


@dataclass(frozen=True)
class _BiasOfQuery:
    """What is added to the score of one key for one query, in both runs, where it differs."""

    position: int
    """The position of the query among all tokens."""
    key: int
    """The token of the key."""
    added: Tensor
    """The number that the call adds."""
    expected: Tensor
    """The number that the one call adds."""


@dataclass(frozen=True)
class _AttentionOfBoth:
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

    def _of_both(self, stage: str) -> InBoth | None:
        """Return a stage of both runs, of any shapes; None if a run lacks it."""
        whole = self._of_whole(stage)
        call = self._of_call(stage)
        if whole is None or call is None:
            return None
        return InBoth(whole, call)

    def _alike(self, stage: str, positions: int) -> InBoth | None:
        """Return a stage of both runs; None if it is missing, or they differ in another axis than the positions."""
        both = self._of_both(stage)
        if both is None or shape_without(positions, both.whole) != shape_without(positions, both.call):
            return None
        return both

    def _of_queries(self, stage: str, axis: int) -> InBoth | None:
        """Return a stage of the call's tokens in both runs; None if it is missing or has other positions."""
        both = self._alike(stage, axis)
        if both is None:
            return None
        if both.whole.shape[axis] < self.continued.stop or both.call.shape[axis] != self.continued.length:
            return None
        whole = both.whole.narrow(axis, self.continued.start, self.continued.length)
        return InBoth(whole, both.call)

    def _rows_of(self, stage: str) -> InBoth | None:
        """Return `batch heads query key` of the call's tokens in both runs; None if a run lacks some of them."""
        both = self._of_both(stage)
        if both is None or both.whole.shape[:2] != both.call.shape[:2]:
            return None
        if both.call.shape[2] != self.continued.length or both.whole.shape[2] < self.continued.stop:
            return None
        whole = both.whole[:, :, self.continued.start : self.continued.stop]
        return InBoth(whole, both.call)

    @cached_property
    def _values(self) -> InBoth | None:
        """The values of both runs: `batch kv_heads key head_dim`."""
        return self._alike("v_heads", 2)

    @cached_property
    def _keys(self) -> InBoth | None:
        """The keys of both runs: `batch kv_heads key head_dim`."""
        return self._alike("k_heads", 2)

    @cached_property
    def _scores(self) -> InBoth | None:
        """The scores of the call's tokens in both runs: `batch heads query key`."""
        return self._rows_of("scores")

    @cached_property
    def _tokens(self) -> Tensor:
        """`row`: the token whose value is in this row of the call; -1 where it is none of them."""
        if self._values is None:
            return torch.full((0,), NO_TOKEN)
        return self._values.rows(self._expected_tokens(self._values))

    def _expected_tokens(self, both: InBoth) -> Tensor:
        """Return the token that each row should have: all tokens in order, or the last ones if there are fewer rows.

        `both` are keys or values, `batch kv_heads row head_dim`. Of a row after the last token, it is -1.
        """
        rows = both.call.shape[2]
        tokens = both.whole.shape[2]
        dropped = max(self.continued.stop - rows, 0)
        expected = torch.arange(rows) + dropped
        return expected.masked_fill(expected >= min(tokens, self.continued.stop), NO_TOKEN)

    @cached_property
    def _filled(self) -> Tensor:
        """The rows of the call that have a token."""
        return (self._tokens >= 0).nonzero().flatten()

    @cached_property
    def _seen(self) -> InBoth:
        """`batch query key` of the call's tokens in both runs: True if any head sees the key."""
        whole = _seen_in(self._of_whole)
        of_queries = whole[:, self.continued.start : self.continued.stop]
        return InBoth(of_queries, _seen_in(self._of_call))

    @cached_property
    def _seen_in_both(self) -> Tensor:
        """`batch query row` for the rows that have a token: True where both runs attend to it."""
        seen = self._by_filled_row(self._seen)
        return seen.whole & seen.call

    def _by_filled_row(self, both: InBoth) -> InBoth:
        """Return `… key` of both runs as `… row`, for the rows of the call that have a token."""
        whole = both.whole[..., self._tokens[self._filled]]
        call = both.call[..., self._filled]
        return InBoth(whole, call)

    # -- whether both runs can be compared ----------------------------------------------------------------------------

    @property
    def is_comparable(self) -> bool:
        """Whether scores and values of both runs are known, with a query for each token of the call."""
        return self._values is not None and self._scores is not None

    @property
    def is_of_other_tokens(self) -> bool:
        """Whether both runs compute the same from the same queries: their tokens are not those of the call."""
        queries = self._of_call("q_heads")
        if queries is None or queries.shape[2] == self.continued.length:
            return False
        for stage in ("q_heads", "v_heads", "context"):
            both = self._of_both(stage)
            if both is None or not both.are_the_same:
                return False
        return True

    # -- what differs -------------------------------------------------------------------------------------------------

    def reason(self) -> Reason | None:
        """Return the first thing that differs in this attention; None without one."""
        source = self.call.score_product.op.source
        before_the_mask = (
            self._unlike_input,
            self._future_seen,
            self._unlike_slots,
            self._missing_values,
            self._unlike_scores,
        )
        for find in before_the_mask:
            difference = find()
            if difference is not None:
                return self._reason_at(source, difference)
        if self.call.masks:
            source = self.call.masks[-1].source
        for find in (self._unlike_visibility, self._unlike_bias):
            difference = find()
            if difference is not None:
                return self._reason_at(source, difference)
        return self._unlike_output()

    def reason_over_other_keys(self) -> Reason | None:
        """Return the first thing that differs in an attention whose keys are not of the call's tokens."""
        source = self.call.score_product.op.source
        difference = self._unlike_input()
        if difference is not None:
            return self._reason_at(source, difference)
        for side, both in (("keys", self._keys), ("values", self._values)):
            if both is not None and not both.are_the_same:
                sentence = f"The {side} of the other sequence differ from those of one call."
                return self._reason_at(source, _Difference(sentence))
        return self._unlike_output()

    def _reason_at(self, source: str, difference: _Difference) -> Reason:
        """Return the reason for a difference that the line at `source` makes."""
        return Reason(
            sentence=difference.sentence,
            fix=difference.fix,
            source=source,
            module=self.call.module,
        )

    def _unlike_output(self) -> Reason | None:
        """Return whether the output differs, although nothing before it does."""
        output = self._of_queries("output", 1)
        if output is None:
            output = self._of_queries("context", 2)
        if output is None or output.are_near:
            return None
        return Reason("The output of the attention differs, although its scores and values are equal.")

    def _unlike_input(self) -> _Difference | None:
        """Return whether the input of the attention differs, e.g. by the positions that are added to it."""
        queries = self._of_queries("query", 1)
        if queries is None or queries.are_near:
            return None
        before = f"between attentions {self.place} and {self.place + 1}"
        if self.place == 0:
            before = "before it"
            added = _added_position(self.continued)
            if added is not None:
                gets = f"Position {self.continued.start} gets the embedding of position {added}"
                return _Difference(f"{gets}{_restarts(added)}.", _POSITIONS_FIX)
        first = self.continued.start + queries.first_unlike(1)
        differs = f"The input of attention {self.place + 1} differs at position {first}"
        return _Difference(f"{differs}: an operation {before} makes the difference.")

    def _future_seen(self) -> _Difference | None:
        """Return whether the one call attends to tokens after the call's."""
        later = self._seen.whole[..., self.continued.stop :].any(0)
        first = _first_true(later)
        if first is None:
            return None
        query, key = first
        return _Difference(
            f"In one call, position {self.continued.start + query} attends to the future position "
            f"{self.continued.stop + key}, which is missing in this call."
        )

    # -- keys and values ----------------------------------------------------------------------------------------------

    def _unlike_slots(self) -> _Difference | None:
        """Return whether the value of a token is in another row than its key, or keys and values are swapped."""
        keys = self._keys
        values = self._values
        if keys is None or values is None:
            return None
        if self._are_swapped(keys, values):
            return _Difference(
                "The cached values are the keys of the earlier calls.",
                "Return keys and values in the order in which the next call reads them.",
            )
        if not are_unlike(keys.whole) or not are_unlike(values.whole):
            return None  # several tokens have the same numbers
        of_keys = keys.rows(self._expected_tokens(keys))
        have_tokens = (of_keys >= 0) & (self._tokens >= 0)
        are_apart = have_tokens & (of_keys != self._tokens)
        if not bool(are_apart.any()):
            return None
        row = int(are_apart.nonzero()[0])
        return _Difference(
            f"Key {row} of this call is that of token {int(of_keys[row])}, and value {row} that of token "
            f"{int(self._tokens[row])}.",
            "Join keys and values in the same order.",
        )

    def _are_swapped(self, keys: InBoth, values: InBoth) -> bool:
        """Return whether cached values are the keys of their tokens, and none of them is its own value."""
        if keys.whole.shape != values.whole.shape or keys.call.shape != values.call.shape:
            return False
        expected = self._expected_tokens(keys)
        is_cached = expected.lt(self.continued.start) & expected.ge(0)
        keys_as_values = InBoth(keys.whole, values.call)
        has_key = keys_as_values.rows(expected) == expected
        if not bool(has_key[is_cached].any()):
            return False
        has_value = self._tokens == expected
        return not bool(has_value[is_cached].any())

    def _missing_values(self) -> _Difference | None:
        """Return whether a token that the one call attends to has no value in the call, or another value."""
        missing = self._missing_tokens()
        if not missing:
            return None
        start = self.continued.start
        rows = len(self._tokens)
        new = [token for token in missing if token >= start]
        if rows <= self.continued.length and not new:
            return _Difference(
                f"This call has {plural(rows, 'key')} for {plural(self.continued.length, 'token')}: the keys of the "
                f"{plural(start, 'earlier token')} are missing.",
                _APPEND_FIX,
            )
        if new:
            are_all_new = len(new) == len(missing)
            if are_all_new and self._reads_tokens_alone:
                return _Difference(self._without_own(new), _OWN_FIX)
            differs = f"The value of the new position {new[0]} differs from that of one call."
            return _Difference(f"{differs}{self._tried('v_heads')}")
        if bool((self._tokens >= 0).all()):
            return self._lost_position(missing[0])
        differ = f"The cached values of positions {_ranges(missing)} differ from those of one call."
        return _Difference(f"{differ}{self._tried('v_heads')}")

    def _missing_tokens(self) -> list[int]:
        """Return the tokens that the one call attends to, and whose values are in no row of the call."""
        is_attended = self._seen.whole.any(0).any(0)
        attended = is_attended[: self.continued.stop].nonzero().flatten().tolist()
        kept = set(self._tokens.tolist())
        return [token for token in attended if token not in kept]

    def _lost_position(self, token: int) -> _Difference:
        """Return that the cache has dropped a token which a query of the one call attends to."""
        is_read = self._seen.whole.any(0)[:, token]
        query = self.continued.start + int(is_read.nonzero()[0])
        return _Difference(
            f"The cache has lost position {token}: this call has {plural(len(self._tokens), 'key')}, of positions "
            f"{_places(self._tokens)}, and in one call position {query} attends to position {token}."
        )

    @property
    def _reads_tokens_alone(self) -> bool:
        """Whether the keys and the values of this call are rows of tokens, each its own: a missing one is in no row."""
        if self._keys is None or not len(self._tokens):
            return False
        has_repeated = len(set(self._tokens.tolist())) < len(self._tokens)
        if has_repeated or bool(self._tokens.lt(0).any()):
            return False
        return torch.equal(self._keys.rows(self._tokens), self._tokens)

    def _without_own(self, new: list[int]) -> str:
        """Return that new tokens have no key in this call, and whether their keys are in the cache that it returns."""
        keys = plural(len(self._tokens), "key")
        new_keys = f"the key of position {new[0]} itself is"
        if len(new) > 1:
            new_keys = f"the keys of positions {_ranges(new)} themselves are"
        where = "missing"
        for _, returned in tensors_in(self.continued.call.returned):
            if self._has_values_of(returned, new):
                where = "only in the cache that the call returns"
        return f"Position {new[0]} attends to {keys}, of positions {_places(self._tokens)}; {new_keys} {where}."

    def _has_values_of(self, returned: Tensor, new: list[int]) -> bool:
        """Return whether a returned tensor, `batch kv_heads row feature`, has the values of these tokens as rows."""
        if self._values is None or returned.dim() != 4:
            return False
        whole = self._values.whole
        if shape_without(2, returned) != shape_without(2, whole):
            return False
        any_token = torch.full((returned.shape[2],), NO_TOKEN)
        tokens = InBoth(whole, returned.to(whole)).rows(any_token)
        return set(new) <= set(tokens.tolist())

    # -- scores -------------------------------------------------------------------------------------------------------

    def _unlike_scores(self) -> _Difference | None:
        """Return whether the scores differ where both runs attend, and which of queries and keys make them differ."""
        if self._scores is None:
            return None
        scores = self._by_filled_row(self._scores)
        are_seen = self._seen_in_both[:, None].to(scores.whole.device)
        if near(scores.whole.masked_fill(~are_seen, 0.0), scores.call.masked_fill(~are_seen, 0.0)):
            return None
        queries = self._of_queries("q_heads", 2)
        if self._keys is None or queries is None:
            return _Difference("The scores differ from those of one call.")
        are_read = are_seen.any(2)[:, 0].any(0).cpu()
        unlike = self._unlike_keys(self._keys, self._filled[are_read].tolist())
        cached = [token for token in unlike if token < self.continued.start]
        if cached:
            difference = self._keys_turned_twice(cached, self._keys.call)
        else:
            difference = self._counted_positions() or self._angle_of_queries(queries.call)
        if difference is not None:
            return difference
        return self._unlike_operands(unlike, cached, queries)

    def _unlike_keys(self, keys: InBoth, rows: list[int]) -> list[int]:
        """Return the tokens in these rows of the call whose keys differ from those of the one call."""
        unlike = []
        for row in rows:
            token = int(self._tokens[row])
            if not near(keys.whole[:, :, token], keys.call[:, :, row]):
                unlike.append(token)
        return unlike

    def _angle_of_queries(self, queries: Tensor) -> _Difference | None:
        """Return whether the queries are rotated by the angles of other positions, e.g. by those of an earlier call.

        `queries` are those of the call, `batch heads query head_dim`.
        """
        start = self.continued.start
        fits = self._positions_of_angle("query", start, queries[:, :, 0])
        if len(fits) != 1 or fits[0] == start:
            return None
        rotated = f"Position {start} is rotated by the angle of position {fits[0]}"
        if self._keeps_angles:
            return _Difference(f"{rotated}, which the module keeps from an earlier call.", _ANGLES_FIX)
        return _Difference(f"{rotated}{_restarts(fits[0])}.", _POSITIONS_FIX)

    def _keys_turned_twice(self, cached: list[int], keys: Tensor) -> _Difference | None:
        """Return whether cached keys are rotated a second time; `keys` are those of the call, by row.

        Two turns by the angle of a position are one by the angle of twice that position.
        """
        rows = {int(token): row for row, token in enumerate(self._tokens)}
        # Position 0 has the angle 0, also twice, and twice a late position is after the last token.
        readable = [token for token in cached if token and 2 * token < self.continued.stop]
        if not readable:
            return None
        for token in readable[:_TURNED]:
            turned = keys[:, :, rows[token]]
            if self._positions_of_angle("key", token, turned) != [2 * token]:
                return None
        return _Difference(
            f"The cached keys of positions {_ranges(cached)} are rotated a second time: that of position {readable[0]} "
            f"has the angle of position {2 * readable[0]}.",
            "Rotate the new keys alone before they are joined with the cache, or cache keys that are not rotated.",
        )

    def _positions_of_angle(self, side: str, token: int, numbers: Tensor) -> list[int]:
        """Return the positions whose angles make these numbers, `batch heads head_dim`, of a projected token.

        `side` is `query` or `key`.
        """
        everywhere = self._turned_everywhere(side, token)
        if everywhere is None or everywhere.shape[:2] != numbers.shape[:2]:
            return []
        fits = []
        for position in range(everywhere.shape[2]):
            if near(everywhere[:, :, position], numbers):
                fits.append(position)
        return fits

    def _turned_everywhere(self, side: str, token: int) -> Tensor | None:
        """Return one token as it would be at each position: `batch heads position head_dim`; None if not known.

        The projected token of the one call is put at every position of it, and the steps behind the projection run
        again.
        """
        projection, heads = f"{side[0]}_proj", f"{side[0]}_heads"
        stage = self.whole.stages.get(projection)
        if stage is None:
            return None
        recorded = KeptRun(self.continued.whole, self.continued.whole_leaves)
        projected = recorded.content(stage)
        dims = dims_of(self.whole_names.of_stage(projection))
        if [side] not in dims or projected is None:
            return None
        axis = dims.index([side])
        if projected.shape[axis] < self.continued.stop:
            return None
        moved = projected.narrow(axis, token, 1).expand_as(projected)
        try:
            value = again(recorded, stage, moved, self.whole.stages[heads])
        except LostError:
            return None
        names = self.whole_names
        sizes = sizes_in(self.whole, names, heads)
        return canonical(value, heads, names.of_stage(heads), sizes, names.head_order)

    @property
    def _keeps_angles(self) -> bool:
        """Whether the rotation of the queries reads a tensor of an earlier call: no operation of this one made it."""
        recording = self.continued.call.recording
        queue = self._angle_operands()
        for tensor, _ in zip(queue, range(_FAR), strict=False):  # the queue grows in this loop
            producer = recording.producer(tensor)
            if producer is not None:
                queue += producer.inputs
            elif tensor.id not in self.continued.call_leaves and tensor.numel > 1:
                return True
        return False

    def _angle_operands(self) -> list[TensorRef]:
        """Return what the steps from the projected queries to the heads read beside the queries: their angles."""
        if "q_proj" not in self.call.stages:
            return []
        projected = self.call.stages["q_proj"]
        steps = between(self.continued.call.recording, {projected.id}, self.call.stages["q_heads"])
        path = {projected.id}
        for op in steps:
            path.update(tensor.id for tensor in op.outputs)
        operands: list[TensorRef] = []
        for op in steps:
            operands += [tensor for tensor in op.inputs if tensor.id not in path]
        return operands

    def _counted_positions(self) -> _Difference | None:
        """Return whether the tokens of the call are rotated by other positions than their own."""
        position = self._position_of_call
        expected = self._position_of_whole
        if position is None or expected is None:
            return None
        offset = position.query_offset
        if offset is None or expected.query_offset is None:
            return None
        start = self.continued.start
        right = expected.query_offset + start
        if offset == right:
            return None
        rows = len(self._tokens) - self.continued.length
        if offset == rows + expected.query_offset and rows < start:
            return _Difference(
                f"Position {right} is rotated as position {offset}: positions count the {rows} rows that the cache "
                f"keeps, instead of all {start} tokens so far.",
                "Count all tokens so far, instead of the rows that the cache keeps.",
            )
        return _Difference(f"Position {right} is rotated as position {offset}{_restarts(offset)}.", _POSITIONS_FIX)

    @property
    def _position_of_call(self) -> Position | None:
        steps = InnerStepsReader(self.continued.named_call, self.continued.call_leaves)
        return steps.of(self.call, self.call_names).position

    @property
    def _position_of_whole(self) -> Position | None:
        steps = InnerStepsReader(self.continued.whole, self.continued.whole_leaves)
        return steps.of(self.whole, self.whole_names).position

    def _unlike_operands(self, unlike: list[int], cached: list[int], queries: InBoth) -> _Difference:
        """Return which of queries, new keys and cached keys differ."""
        new = [token for token in unlike if token >= self.continued.start]
        if cached and not new:
            differ = f"The cached keys of positions {_ranges(cached)} differ from those of one call."
            return _Difference(f"{differ}{self._tried('k_heads')}")
        if cached:
            differ = f"The keys of positions {_ranges(unlike)} differ from those of one call."
            return _Difference(f"{differ}{self._tried('k_heads')}")
        sides = []
        if not queries.are_near:
            sides.append("queries")
        if new:
            sides.append("keys")
        if sides:
            differ = f"The {' and the '.join(sides)} of the new position {self.continued.start} differ from those of"
            stage = "q_heads" if "queries" in sides else "k_heads"
            return _Difference(f"{differ} one call.{self._tried(stage)}")
        return self._unlike_scale()

    def _unlike_scale(self) -> _Difference:
        """Return how scores of equal queries and keys differ: by their scale, or it is not known how."""
        expected = self.whole.scale
        scale = self.call.scale
        if expected and scale and abs(expected / scale - 1) > _SAME_SCALE:
            return _Difference(f"The scores are scaled by {scale:.4g}, and in one call by {expected:.4g}.")
        return _Difference("The scores differ from those of one call, although queries and keys are equal.")

    def _tried(self, stage: str) -> str:
        """Return, as a further sentence, the change that makes a stage of this call that of one call; empty if none."""
        both = self._alike(stage, 2)
        if both is None:
            return ""
        nearness = tolerance(both.whole)
        for part in self._parts_to_try(both):
            change = replacement(
                stage,
                CANONICAL_AXES[stage],
                (part.whole, part.call),
                nearness,
                called=("in one call", "in this call"),
            )
            if change is not None:
                return f" {change.sentence}"
        return ""

    def _parts_to_try(self, both: InBoth) -> list[InBoth]:
        """Return what may be changed alike in a stage, `batch heads position head_dim`.

        Of queries, and of keys without a cache, it is the whole stage. Of keys and values that are a row for each token
        so far, it is all of them, then the cached ones and the new ones.
        """
        start = self.continued.start
        stop = self.continued.stop
        positions = both.call.shape[2]
        if both.whole.shape[2] < stop:
            return []
        if positions == self.continued.length:
            return [InBoth(both.whole[:, :, start:stop], both.call)]
        if positions != stop:
            return []
        return [
            InBoth(both.whole[:, :, :stop], both.call),
            InBoth(both.whole[:, :, :start], both.call[:, :, :start]),
            InBoth(both.whole[:, :, start:stop], both.call[:, :, start:]),
        ]

    # -- masks and biases ---------------------------------------------------------------------------------------------

    def _unlike_visibility(self) -> _Difference | None:
        """Return whether a query of the call sees other keys than in the one call."""
        seen = self._seen
        is_empty = seen.call.any(0) & (self._tokens < 0)
        first = _first_true(is_empty)
        if first is not None:
            query, row = first
            position = self.continued.start + query
            return _Difference(f"Position {position} attends to row {row} of the cache, which has no token.")
        by_token = torch.zeros(*seen.call.shape[:2], seen.whole.shape[2], dtype=torch.bool)
        by_token[..., self._tokens[self._filled]] = seen.call[..., self._filled]
        if torch.equal(by_token, seen.whole):
            return None
        if torch.equal(seen.call, torch.ones_like(seen.call).tril()):
            return self._top_left(keys=seen.call.shape[2])
        return self._unlike_sight(InBoth(seen.whole, by_token))

    def _top_left(self, keys: int) -> _Difference:
        """Return that the first token of the call sees the first key alone."""
        queries = self.continued.length
        fix = _TOP_LEFT_FIX
        if not self.call.masks or queries == 1:
            fix += " A single query needs no mask."
        return _Difference(
            f"The mask is aligned top left: with {_queries(queries)} and {keys} keys, position "
            f"{self.continued.start} sees key 0 alone.",
            fix,
        )

    def _unlike_sight(self, seen: InBoth) -> _Difference:
        """Return which positions the first query with another mask sees or does not see: `batch query token`."""
        is_unlike = (seen.call != seen.whole).any(2).any(0)
        query = int(is_unlike.nonzero()[0])
        position = self.continued.start + query
        opened = (seen.call & ~seen.whole).any(0)[query]
        closed = (seen.whole & ~seen.call).any(0)[query]
        if not bool(opened.any()):
            return _Difference(
                f"Position {position} does not see positions {_places_of(closed)}, which it sees in one call."
            )
        are_future = bool(opened[position + 1 :].any())
        what = "future positions" if are_future else "positions"
        return _Difference(f"Position {position} sees {what} {_places_of(opened)}, which are masked out in one call.")

    def _unlike_bias(self) -> _Difference | None:
        """Return whether what is added to the scores differs where both runs attend."""
        masked = self._rows_of("masked_scores")
        if masked is None or self._scores is None:
            return None
        masked = self._by_filled_row(masked)
        scores = self._by_filled_row(self._scores)
        are_unseen = ~self._seen_in_both[:, None].expand_as(masked.whole).to(masked.whole.device)
        attended = masked.whole.masked_fill(are_unseen, 0.0)
        if near(attended, masked.call.masked_fill(are_unseen, 0.0)):
            return None
        bias = InBoth(masked.whole - scores.whole, masked.call - scores.call)
        apart = (bias.call - bias.whole).abs().masked_fill(are_unseen, 0.0)
        differs = (apart > tolerance(attended)).any(3).any(1).any(0)
        if not bool(differs.any()):
            return None  # the scores differ, and what is added to them does not
        query = int(differs.nonzero()[0])
        furthest = self._furthest_bias(query, bias, apart)
        like = self._position_of_bias(bias.call[:, :, query])
        more = "" if like is None else f", as for a query at position {like}"
        return _Difference(
            f"The keys are equal, and the bias differs: position {furthest.position} adds "
            f"{_term(furthest.added)} to the score of key {furthest.key}{more}; expected {_term(furthest.expected)}.",
            "Count the positions of the queries in the bias from the number of all tokens so far.",
        )

    def _furthest_bias(self, query: int, bias: InBoth, apart: Tensor) -> _BiasOfQuery:
        """Return the bias of a query where it differs most, all of `batch heads query row`."""
        of_query = apart[:, :, query]
        is_furthest = of_query > 0.999 * of_query.max()
        batch, head, row = (int(number) for number in is_furthest.nonzero()[0])
        return _BiasOfQuery(
            position=self.continued.start + query,
            key=int(self._tokens[self._filled][row]),
            added=bias.call[batch, head, query, row],
            expected=bias.whole[batch, head, query, row],
        )

    def _position_of_bias(self, added: Tensor) -> int | None:
        """Return the only position of the one call whose bias is this, `batch heads row`; None if not exactly one."""
        masked = self._of_whole("masked_scores")
        scores = self._of_whole("scores")
        weights = self._of_whole("weights")
        if masked is None or scores is None or weights is None:
            return None
        tokens = self._tokens[self._filled]
        seen = sees(weights, masked)[:, :, tokens].to(added.device)
        bias = (masked - scores)[:, :, :, tokens]
        nearness = tolerance(scores)
        fits = []
        for position in range(bias.shape[2]):
            is_seen = seen[:, position][:, None].expand_as(added)
            apart = (bias[:, :, position] - added).abs().masked_fill(~is_seen, 0.0)
            if bool(is_seen.any()) and float(apart.max()) <= nearness:
                fits.append(position)
        return fits[0] if len(fits) == 1 else None


def _seen_in(content: Callable[[str], Tensor | None]) -> Tensor:
    """Return `batch query key` of a run, given its stages by name: True if any head sees the key."""
    weights = content("weights")
    scores = content("scores")
    if weights is None and scores is not None:
        weights = torch.ones_like(scores)
    if weights is None:
        weights = torch.zeros(1, 1, 1, 1)
    return sees(weights, content("masked_scores")).cpu()


def _first_true(marks: Tensor) -> tuple[int, int] | None:
    """Return the row and the column of the first True in a matrix; None if there is none."""
    places = marks.nonzero().tolist()
    if not places:
        return None
    row, column = places[0]
    return row, column


def _added_position(continued: Continued) -> int | None:
    """Return the position whose embedding the first token of the call gets instead of its own; None if unknown.

    In both runs, embeddings are the operands of additions before the first attention.
    """
    of_whole = _operands_added(continued.whole)
    of_call = _operands_added(continued.call)
    if len(of_whole) != len(of_call):
        return None
    for whole, call in zip(of_whole, of_call, strict=True):
        if not _may_be_rows(whole, call):
            continue
        if call.shape[-2] != continued.length or whole.shape[-2] < continued.stop:
            continue
        places = []
        for start in range(whole.shape[-2] - continued.length + 1):
            if near(whole.narrow(-2, start, continued.length), call):
                places.append(start)
        if places and continued.start not in places:
            return places[0]
    return None


def _may_be_rows(whole: Tensor, call: Tensor) -> bool:
    """Return whether two tensors `... position features` differ at most in their number of positions."""
    if call.dim() < 2 or whole.dim() != call.dim():
        return False
    return shape_without(-2, whole) == shape_without(-2, call)


def _operands_added(run: Run) -> list[Tensor]:
    """Return the values of the operands of additions before the first attention, in order."""
    first = min(attention.score_product.op.index for attention, _ in run.attentions)
    values = run.recording.values
    operands: list[Tensor] = []
    for op in run.recording.ops[:first]:
        if op.base_name.rstrip("_") == "add" and len(op.inputs) == 2:
            operands += [values[tensor.id] for tensor in op.inputs if tensor.id in values]
    return operands


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
