"""Who sees whom, read off the scores and weights of a run, and whether that is causal or a window."""

from __future__ import annotations

import torch
from torch import Tensor

from ...graph.attention import Attention
from ...naming.axes import AxisNames
from ...naming.canonical import content_of
from ...naming.visibility import sees
from ...reports.check import Finding
from ...running.subject import Run

_HEAVY = 1e-3
"""A weight above this moves what it is multiplied with by more than rounding."""
_SIDE = 12
"""Rows and columns of a picture."""


class SeenKeys:
    """The keys that the queries of one attention see."""

    def __init__(self, seen: Tensor, line: str, module: str, *, masked: bool, heavy: Tensor) -> None:
        self.seen, self.line, self.module = seen, line, module
        """`batch query key`: True where any head looks."""
        self.masked = masked
        """Whether anything masks the scores."""
        self.heavy = heavy
        """`query key`: True where a head of the first row has a weight that counts."""
        self.queries, self.keys = seen.shape[1:]
        self.any_row = seen.any(0)
        """`query key`: True where the query of any sequence sees the key."""
        self.known = self.any_row.any(0)[None]
        """`1 key`: True where any query sees the key: one that is masked for all is padding."""
        first = max(self.keys - self.queries, 0)
        self.distance = torch.arange(self.queries)[:, None] + first - torch.arange(self.keys)[None]
        """`query key`: how far the key lies before the query; negative in its future. A cache comes before all."""
        self.open = bool(seen.all())
        """Whether every query sees every key."""
        self.alone = self.queries == self.keys and not bool((self.any_row & (self.distance != 0)).any())
        """Whether each query sees itself at most."""
        self.sees_future = bool((self.any_row & (self.distance < 0)).any())
        self.is_causal = not self.open and not self.alone and not self.sees_future
        past = self.distance[self.any_row & (self.distance >= 0)]
        far = int(past.max()) + 1 if past.numel() else 0
        self.width = far if far < self.keys and self.keys > 2 else None
        """How many positions a query sees at most, its own included, where it is fewer than there are."""

    @property
    def picture(self) -> tuple[str, ...]:
        """A row a query, a column a key: `■` where it is seen."""
        return tuple(
            "".join("■" if seen else "·" for seen in row[:_SIDE]) + ("…" if self.keys > _SIDE else "")
            for row in self.any_row[:_SIDE].tolist()
        )

    def words(self) -> str:
        """Return a name for who sees whom."""
        if self.open:
            return "every query sees every key"
        if self.alone:
            return "each query sees itself alone"
        if self.is_causal:
            expected = (self.distance >= 0) & (self.distance < (self.width or self.keys + 1))
            sees_itself = bool((self.any_row | ~self.known)[self.distance == 0].all()) or self.queries != self.keys
            name = "causal" if self.width is None else f"causal, a window of {self.width}"
            if torch.equal(self.any_row, expected & self.known):
                masked = int((~self.known).sum())
                return f"{name}; {masked} keys are barred to all" if masked else name
            return f"{name}, with gaps" if sees_itself else f"{name}, and a query does not see itself"
        mirrored = int(self.distance[self.any_row].abs().max())
        if torch.equal(self.any_row, self.distance.abs() <= mirrored) and mirrored + 1 < self.keys:
            return f"{mirrored} positions to each side"
        if torch.equal(self.any_row, self.known.expand_as(self.any_row)):
            return f"every query sees {int(self.known.sum())} of {self.keys} keys"
        return "a pattern of its own"

    def finding(self, check: str, sentence: str, evidence: str, fix: str = "") -> Finding:
        """Return a finding of this attention, at its mask."""
        return Finding(check, sentence, evidence, source=self.line, module=self.module, fix=fix)

    def against_causal(self, window: int | None) -> Finding | None:
        """Judge it as causal, within a window if one is given; None where it is."""
        if self.queries < 2 or self.queries > self.keys:
            return None
        unseen = self.known & ~self.any_row
        if self.sees_future:
            future = self.any_row & (self.distance < 0)
            late = bool((self.distance[future] == -1).all())
            return self.finding(
                "causal",
                "A position sees its future" + (", by one: the mask begins a diagonal too late." if late else "."),
                f"{self._first(future, 'weight')}; {int(future.sum())} such pairs of {int((self.distance < 0).sum())}.",
                "triu(diagonal=1) is what a causal mask bars.",
            )
        itself = unseen & (self.distance == 0)
        if bool(itself.any()) and self.queries == self.keys:
            return self.finding(
                "causal",
                "A position does not see itself: the mask bars the diagonal.",
                f"Query {int(itself.nonzero()[0][0])} gives no weight to its own key; {int(itself.sum())} such of "
                f"{self.queries}.",
                "triu(diagonal=1), not diagonal=0.",
            )
        past = unseen & (self.distance > 0)
        if window is None and bool(past.any()):
            query, key = past.nonzero()[0].tolist()
            evidence = f"Query {query} gives no weight to key {key}; {int(past.sum())} such pairs."
            return self.finding("causal", "A position does not see all of its past.", evidence)
        return None

    def against_window(self, width: int, causal: bool | None) -> Finding | None:
        """Judge it as a window of this width; None where it fits."""
        if self.keys <= width or self.queries < 2:
            return None
        # To both sides, a window of 2 · n + 1, or of n to each side, is called n by some.
        both = causal is not True and self.sees_future
        beyond = self.any_row & ((self.distance.abs() if both else self.distance) >= width)
        if bool(beyond.any()):
            far = int(self.distance[self.any_row].max()) + 1
            sentence = f"A position sees beyond its window of {width}: it sees {far} positions, its own included."
            return self.finding("window", sentence, f"{self._first(beyond, 'weight')}.")
        missing = (self.distance >= 0) & (self.distance < width) & self.known & ~self.any_row
        if bool(missing.any()) and causal is not False and not self.sees_future:
            sentence = f"A position does not see all of its window of {width}."
            return self.finding("window", sentence, f"{self._first(missing, 'no weight')}.")
        return None

    def _first(self, marks: Tensor, what: str) -> str:
        """Return the first pair that is marked: `Query 3 gives weight to key 5, 2 behind it`."""
        query, key = (int(number) for number in marks.nonzero()[0])
        distance = int(self.distance[query, key])
        place = f"{distance} before it" if distance > 0 else f"{-distance} behind it" if distance else "its own"
        return f"Query {query} gives {what} to key {key}, {place}"


def sights_of(run: Run) -> tuple[SeenKeys, ...]:
    """Return what the queries of each attention see, of those of which it is known."""
    sights = []
    for attention, names in run.attentions:
        weights, scores = (_content(run, attention, names, stage) for stage in ("weights", "masked_scores"))
        if weights is None or weights.dim() != 4:
            continue
        if attention.masks or scores is not None:
            seen = sees(weights, scores).cpu()
        else:
            seen = torch.ones(weights[:, 0].shape, dtype=torch.bool)
        heavy = (weights[0] > _HEAVY).any(0).cpu() & (not attention.weights_changed)
        line = (attention.masks[-1] if attention.masks else attention.softmax).source
        sights.append(SeenKeys(seen, line, attention.module, masked=bool(attention.masks), heavy=heavy))
    return tuple(sights)


def _content(run: Run, attention: Attention, names: AxisNames, stage: str) -> Tensor | None:
    """Return a stage in canonical axes; None where there is none, or an axis has no name."""
    has_stage = all(stage in turn.stages for turn in (attention, *attention.branches))
    return content_of(run, attention, names, stage) if has_stage else None
