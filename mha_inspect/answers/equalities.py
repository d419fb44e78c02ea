"""Where the output cannot depend on the head count, and whether it does: one key, keys or values all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..measure.stage_difference import BLOCKED_BELOW
from ..record.rounding import SAME_UP_TO, judge, max_difference
from .head_runs import HeadRun
from .look import Look


@dataclass(frozen=True, eq=False)
class Claim:
    """Rows of the output that must be the same for every head count."""

    rows: Tensor
    """`batch query`, boolean."""
    why: str
    """One sentence."""
    short: str
    """The cause in a few words, for a reason."""


class Sight:
    """What each query can see, whatever the weights are: what the mask left of the scores, and keys and values."""

    def __init__(self, look: Look, each: Sequence[Tensor]) -> None:
        self._look = look
        self.each = each
        """`batch query key` of each attention: True where no mask forbids a query to look."""
        self.allowed, self.rows = each[0], (each[0].shape[0], each[0].shape[1])

    @property
    def left(self) -> Tensor:
        """`batch query`: how many keys are left to look at."""
        return self.allowed.sum(dim=-1)

    @property
    def one_key(self) -> Tensor:
        """`batch query`: whether it is one alone, in every attention.

        Where several follow, that key must hang on one alone itself.
        """
        one = torch.stack([allowed.sum(dim=-1) == 1 for allowed in self.each]).all(dim=0)
        before = None
        while len(self.each) > 1 and (before is None or not torch.equal(before, one)):
            before = one
            for allowed in self.each:
                one = one & one.gather(1, allowed.int().argmax(dim=-1))
        return one

    @property
    def masked(self) -> bool:
        """Whether there is a mask."""
        return any(not bool(one.all()) for one in self.each)

    @property
    def causal(self) -> bool:
        """Whether a mask forbids every key behind the query's own position."""
        return self.masked and self.allowed.shape[1] > 1 and not bool(self.allowed.triu(1).any())

    @cached_property
    def values(self) -> Tensor:
        """`batch query`: whether all values that it can see are the same."""
        return self._alike("v_heads")

    @cached_property
    def keys(self) -> Tensor:
        """`batch query`: whether all keys that it can see are the same, and its weights equal."""
        alike = self._alike("k_heads")
        return alike if not bool(alike.any()) or self.gives_equal_weights(self._look, alike) else alike & False

    @property
    def tells_nothing(self) -> bool:
        """Whether no row must be equal."""
        return not (self.masked or bool(self.one_key.any()) or bool(self.values.any()) or bool(self.keys.any()))

    def is_like(self, other: Sight | None) -> bool:
        """Whether the queries of another head count see the same keys."""
        return other is not None and len(other.each) == len(self.each) and all(map(torch.equal, self.each, other.each))

    def gives_equal_weights(self, look: Look, alike: Tensor) -> bool:
        """Whether a look at this place shows equal weights, of every head, where the keys are alike."""
        weights = look.get(0, "weights")
        if weights is None:
            return False
        equal = self.allowed / self.left[..., None].clamp(min=1)
        apart = float(((weights.detach().cpu().double() - equal[:, None]).abs() * alike[:, None, :, None]).max())
        return judge(apart, self._look.floor(0, "weights", weights))[1] == "same"

    def _alike(self, stage: str) -> Tensor:
        """Whether all that a query can see of `batch heads key head_dim` is the same, but for rounding."""
        content = self._look.get(0, stage)
        keys = (self.rows[0], self.allowed.shape[2])
        if len(self.each) > 1 or content is None or (content.shape[0], content.shape[2]) != keys:
            return torch.zeros(self.rows, dtype=torch.bool)
        rows = content.detach().cpu().transpose(1, 2).flatten(2)
        seen = self.allowed.any(dim=1)
        first = rows[torch.arange(len(rows)), seen.int().argmax(dim=1)][:, None]
        floor = SAME_UP_TO * self._look.floor(0, stage, content)
        near = (rows - first).abs() <= floor
        return (near.all(dim=-1) | ~seen).all(dim=1)[:, None].expand(self.rows)


def sight_of(look: Look) -> Sight | None:
    """Return what a look tells; None where it is not known what a query can see.

    An axis has no name, it depends on the head, or sinks take a part of the weight.
    """
    found = [attention for attention, _ in look.attentions]
    softmaxes = all(own.sinks is None and not own.masks and not own.weighing for own in found)
    if softmaxes and all(own.softmax.output.shape[own.softmax_dim] == 1 for own in found):
        # One query and one key leave no trace in a shape, and need none.
        return Sight(look, [torch.ones(1, 1, 1, dtype=torch.bool)])
    each = []
    for number, attention in enumerate(found):
        weights, scores = look.get(number, "weights"), look.get(number, "masked_scores")
        no_softmax = bool(attention.weighing) or attention.sinks is not None
        if weights is None or no_softmax or (attention.masks and scores is None):
            return None
        allowed = torch.ones(weights.shape, dtype=torch.bool) if scores is None else (scores > BLOCKED_BELOW).cpu()
        if allowed.shape != weights.shape or not bool((allowed == allowed[:, :1]).all()):
            return None
        each.append(allowed[:, 0])
    square = all(one.shape == each[0].shape and one.shape[1] == one.shape[2] for one in each)
    return Sight(look, each) if len(each) == 1 or square else None


_ALIKE = {
    "values": "the weights sum to 1, so the context is that one value whatever they are",
    "keys": "every score of a query is the same, so its weights are equal for every head count",
}
"""What may be the same wherever a query looks, and what follows."""


class Equalities:
    """What must be equal of all head counts, as far as all of them see the same."""

    def __init__(self, baseline: HeadRun) -> None:
        self._baseline = baseline
        self._near = self._sight = sight_of(baseline.nearest)
        if baseline.layout is not None and self._near is not None:
            # What says nothing of a few queries says nothing of the others; a mask is seen whole.
            self._sight = None if self._near.tells_nothing else sight_of(baseline.look())
        self._keys_hold = True

    def see(self, other: HeadRun) -> None:
        """Look at another head count while its stages are there: its queries must see what the baseline's see."""
        near, look = self._near, other.nearest
        if self._sight is None or near is None or not near.is_like(sight_of(look)):
            self._sight = None
        elif bool(near.keys.any()):
            self._keys_hold = self._keys_hold and near.gives_equal_weights(look, near.keys)

    @cached_property
    def claims(self) -> list[Claim]:
        """The rows that must be equal, once every head count has been seen."""
        sight = self._sight
        if sight is None:
            return []
        claims = [Claim(sight.one_key, _one_key(sight), "one key has weight 1")]
        others = (sight.left > 1) & ~sight.one_key
        for name, why in _ALIKE.items():
            if bool(others.any()) and (name == "values" or self._keys_hold):
                same = others & (sight.values if name == "values" else sight.keys)
                others = others & ~same
                sentence = f"The {name} that {_rows(same)} can see are all the same: {why}."
                claims.append(Claim(same, sentence, f"its {name} are all the same"))
        return [claim for claim in claims if bool(claim.rows.any())]

    @property
    def cause(self) -> str:
        """Why every output must be equal, in a few words; empty where nothing says that they must."""
        return next((claim.short for claim in self.claims if bool(claim.rows.all())), "")

    def measured(self, runs: Sequence[HeadRun], unless: str = "") -> tuple[str, ...]:
        """Return where outputs must be equal, why, and what was measured there.

        `unless` names a module of which nothing else is known: what comes after its attention may hang on the heads.
        """
        said = []
        for claim in self.claims if len(runs) > 1 else ():
            # Whatever the output is laid out like, every row is all of it.
            every = bool(claim.rows.all())
            rows = torch.ones(1, 1, dtype=torch.bool) if every else claim.rows
            outputs = [run.output[None, None] if every else run.by_query for run in runs]
            known = [output for output in outputs if output is not None and output.shape[:2] == rows.shape]
            if len(known) == len(runs):
                said.append(_confirmed(claim, rows, known, self._baseline.output_floor, unless))
        return tuple(said)


def _one_key(sight: Sight) -> str:
    one = sight.one_key
    if sight.allowed.shape[-1] == 1:
        return "There is one key: its softmax weight is exactly 1 for every head count."
    cause = " (causal mask)" if _only_first(one) and sight.causal else ""
    whom = "every query" if bool(one.all()) else _rows(one)
    return f"The mask leaves one key to {whom}{cause}: its softmax weight is exactly 1 for every head count."


def _only_first(rows: Tensor) -> bool:
    return bool(rows[:, 0].all()) and not bool(rows[:, 1:].any())


def _rows(rows: Tensor) -> str:
    """`every query`, `the first position`, `query 3 of batch row 0`, `17 of 24 queries`."""
    if bool(rows.all()):
        return "every query"
    if _only_first(rows):
        return "the first position"
    found = rows.nonzero().tolist()
    if len(found) == 1:
        return f"query {found[0][1]} of batch row {found[0][0]}"
    return f"{len(found)} of {rows.numel()} queries"


def _confirmed(claim: Claim, rows: Tensor, outputs: Sequence[Tensor], noise_floor: float, unless: str) -> str:
    """The claim with what was measured in its rows: `batch query embed` of each head count, the baseline first."""
    rows = rows.to(outputs[0].device)
    expected = outputs[0][rows]
    largest = max(max_difference(output[rows], expected) for output in outputs[1:])
    times, verdict = judge(largest, noise_floor)
    if largest == 0:
        found = "the same to the bit"
    elif verdict == "same":
        found = f"at most {times:.2g} times the noise floor apart"
    else:
        but = "so something else in it does" if unless else "against expectation"
        found = f"{times:.3g} times the noise floor apart, {but}"
    which = "all outputs" if bool(rows.all()) else "the outputs there"
    must = f"Unless something else in {unless} hangs on the head count, {which}" if unless else which.capitalize()
    return f"{claim.why} {must} must be equal; measured: {found}."


def masked_note(runs: Sequence[HeadRun]) -> str:
    """Return what is to be said of queries that no key is left to; empty where there is none, or it is not known."""
    baseline = runs[0]
    rows = baseline.look().masked_queries(0) if baseline.nearest.attentions[0][0].masks else []
    outputs = [run.by_query for run in runs]
    # One head of which every key is masked is enough: W_o mixes its context into the whole row.
    if not rows or any(one is None or one.shape[0] <= rows[-1][0] or one.shape[1] <= rows[-1][1] for one in outputs):
        return ""
    batches, queries = map(list, zip(*rows, strict=True))
    nan = [bool(output[batches, queries].isnan().all()) for output in outputs if output is not None]
    have = "1 query has" if len(rows) == 1 else f"{len(rows)} queries have"
    first = f"(the first: query {rows[0][1]} of batch row {rows[0][0]})"
    text = f"{have} no key left to look at {first}: the output there is"
    if all(nan):
        return f"{text} NaN for every head count. NaN beside NaN is no difference."
    if not any(nan):
        return f"{text} a number all the same, for every head count."
    return f"{text} NaN for some head counts and a number for others."
