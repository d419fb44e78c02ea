"""The same attention in one call over all tokens and in a call that continues from a cache, row beside row.

whole   token  0 1 2 3        one call over all tokens
call    row      0 1 2        a call with a cache that dropped token 0: its rows are the tokens 1, 2 and 3

A row of the call's keys is the token whose value it has: a cache may drop rows, or have empty ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...naming.pattern import CANONICAL_AXES
from ...naming.visibility import sees
from ...record.arguments import first_tensor
from ...record.rounding import beside, rounding_error
from ...running.subject import Run, Subject
from ...text import shortened, spans
from ..pair import Difference, Pair, Side, Where, tolerance

NO_TOKEN = -1
"""The token of a row that has the numbers of none."""


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
    subject: Subject
    """What was run over all tokens."""

    @cached_property
    def exact(self) -> Run | None:
        """The one call in another dtype, which shows its rounding error; None if it does not run in that."""
        dtype, _ = beside(_dtype_of(self.whole))
        try:
            with torch.no_grad(), self.subject.apart() as fresh:
                return fresh.copied(dtype).recorded(keep=True)
        except Exception:  # user code may raise anything in another dtype
            return None

    @cached_property
    def named_call(self) -> Run:
        """The call, with the names that the one call gives to axes of size one."""
        return self.call.beside(self.whole)

    @property
    def length(self) -> int:
        """The number of tokens of the call."""
        return self.stop - self.start


@dataclass(frozen=True, eq=False, kw_only=True)
class CallPair(Pair):
    """One attention of one call over all tokens, the left, beside the same attention of the call, the right."""

    continued: Continued
    place: int

    @classmethod
    def of(cls, continued: Continued, place: int) -> CallPair:
        """Return an attention of both runs."""
        whole, call = continued.whole, continued.named_call
        return cls(
            left=Side(whole, *whole.attentions[place], continued.whole_leaves),
            right=Side(call, *call.attentions[place], continued.call_leaves),
            where=Where("in one call", "in this call"),
            continued=continued,
            place=place,
        )

    @property
    def start(self) -> int:
        """The first token of the call."""
        return self.continued.start

    @property
    def stop(self) -> int:
        """The first token after the call."""
        return self.continued.stop

    @property
    def length(self) -> int:
        """The number of tokens of the call."""
        return self.continued.length

    # -- stages of both -----------------------------------------------------------------------------------------------

    def both(self, stage: str) -> Difference | None:
        """Return a stage of both runs, of any shapes; None if a run lacks it."""
        whole, call = self.left.stage(stage), self.right.stage(stage)
        if whole is None or call is None:
            return None
        return Difference(stage, CANONICAL_AXES[stage], whole, call, self._near(stage, whole), self.where)

    def _near(self, stage: str, whole: Tensor) -> float:
        """Return how far apart numbers of a stage may be and are still equal, by the measured rounding error."""
        unmeasured = tolerance(whole)
        exact = self.continued.exact
        if exact is None or self.place >= len(exact.attentions):
            return unmeasured
        precise = Side(exact, *exact.attentions[self.place], {}).stage(stage)
        if precise is None or precise.shape != whole.shape:
            return unmeasured
        _, unit = beside(whole.dtype)
        return min(unmeasured, tolerance(whole, rounding_error(whole, precise) * unit))

    def alike(self, stage: str, positions: int) -> Difference | None:
        """Return a stage of both runs; None if it is missing, or they differ in another axis than the positions."""
        both = self.both(stage)
        if both is None or shape_without(positions, both.left) != shape_without(positions, both.right):
            return None
        return both

    def queries(self, stage: str, axis: int) -> Difference | None:
        """Return a stage of the call's tokens in both runs; None if it is missing or has other positions."""
        both = self.both(stage)
        if both is None or both.left.dim() != both.right.dim():
            return None
        if both.left.shape[axis] < self.stop or both.right.shape[axis] != self.length:
            return None
        return replace(both, left=both.left.narrow(axis, self.start, self.length))

    def of_rows(self, stage: str) -> Difference | None:
        """Return scores, `batch heads query row`, of the call's tokens and of the rows that have one, in both runs."""
        both = self.queries(stage, 2)
        if both is None or both.left.shape[:2] != both.right.shape[:2]:
            return None
        return replace(both, left=both.left[..., self.tokens[self.filled]], right=both.right[..., self.filled])

    @cached_property
    def values(self) -> Difference | None:
        """The values of both runs: `batch kv_heads key head_dim`."""
        return self.alike("v_heads", 2)

    @cached_property
    def keys(self) -> Difference | None:
        """The keys of both runs: `batch kv_heads key head_dim`."""
        return self.alike("k_heads", 2)

    # -- the rows of the call -----------------------------------------------------------------------------------------

    @cached_property
    def tokens(self) -> Tensor:
        """`row`: the token whose value is in this row of the call; -1 where it is none of them."""
        if self.values is None:
            return torch.full((0,), NO_TOKEN)
        return rows_of(self.values, self.expected_tokens(self.values))

    def expected_tokens(self, both: Difference) -> Tensor:
        """Return the token that each row should have: all tokens in order, or the last ones if there are fewer rows.

        `both` are keys or values, `batch kv_heads row head_dim`. Of a row after the last token, it is -1.
        """
        rows = both.right.shape[2]
        dropped = max(self.stop - rows, 0)
        expected = torch.arange(rows) + dropped
        return expected.masked_fill(expected >= min(both.left.shape[2], self.stop), NO_TOKEN)

    @cached_property
    def filled(self) -> Tensor:
        """The rows of the call that have a token."""
        return (self.tokens >= 0).nonzero().flatten()

    @cached_property
    def seen(self) -> Difference:
        """`batch query key` of the call's tokens in both runs: True if any head sees the key."""
        whole, call = _seen_in(self.left), _seen_in(self.right)
        return Difference("weights", "", whole[:, self.start : self.stop], call, near=0.0, where=self.where)

    @cached_property
    def seen_in_both(self) -> Tensor:
        """`batch query row` for the rows that have a token: True where both runs attend to it."""
        return self.seen.left[..., self.tokens[self.filled]] & self.seen.right[..., self.filled]

    # -- whether both runs can be compared ----------------------------------------------------------------------------

    @property
    def is_comparable(self) -> bool:
        """Whether scores and values of both runs are known, with a query for each token of the call."""
        return self.values is not None and self.of_rows("scores") is not None

    @property
    def is_of_other_tokens(self) -> bool:
        """Whether both runs compute the same from the same queries: their tokens are not those of the call."""
        queries = self.right.stage("q_heads")
        if queries is None or queries.shape[2] == self.length:
            return False
        for stage in ("q_heads", "v_heads", "context"):
            both = self.both(stage)
            if both is None or not both.is_none:
                return False
        return True


def rows_of(both: Difference, expected: Tensor) -> Tensor:
    """Return for each row of `batch heads row feature` of the call its token: that with the same numbers.

    Of several such tokens, the `expected` token of the row is taken. Without one it is `NO_TOKEN`.
    """
    tokens = []
    for row, wanted in enumerate(expected.tolist()):
        apart = both.left - both.right[:, :, row : row + 1]
        by_token = apart.abs().nan_to_num(torch.inf).amax((0, 1, 3))
        fits = (by_token <= both.near).nonzero().flatten().tolist()
        token = fits[0] if fits else NO_TOKEN
        if wanted in fits:
            token = wanted
        tokens.append(token)
    return torch.tensor(tokens, dtype=torch.long)


def _dtype_of(run: Run) -> torch.dtype:
    """Return the dtype of what a run returns; float32 without a floating one."""
    dtype = first_tensor(run.returned).dtype
    return dtype if dtype.is_floating_point else torch.float32


def _seen_in(side: Side) -> Tensor:
    """Return `batch query key`: True if any head sees the key."""
    weights, scores = side.stage("weights"), side.stage("scores")
    if weights is None and scores is not None:
        weights = torch.ones_like(scores)
    if weights is None:
        weights = torch.zeros(1, 1, 1, 1)
    return sees(weights, side.stage("masked_scores")).cpu()


def shape_without(axis: int, tensor: Tensor) -> tuple[int, ...]:
    """Return the sizes of all dimensions but one; `axis` is not the last."""
    return (*tensor.shape[:axis], *tensor.shape[axis + 1 :])


def ranges(places: Sequence[int] | Tensor) -> str:
    """Return places in few words: `0–2 and 5`."""
    return shortened(spans([int(place) for place in places]), 40)


def restarts(position: int) -> str:
    """Return the end of a sentence about a position that is counted from the first token of the call."""
    return ": positions restart at 0" if position == 0 else ""
