"""The keys that each query of one attention sees, and the words for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .. import text
from ..graph.attention import Attention
from ..reports.check import Finding

_SIDE = 12
"""The largest number of rows and columns of a picture."""
_ITEMS = 3
"""The most batch items to describe."""


@dataclass(frozen=True, eq=False)
class SeenKeys:
    """The keys that each query of one attention sees, as its weights and scores in one run show them."""

    attention: Attention
    layout: str
    """The axes of the scores, as the code lays them out, e.g. `(batch heads) query key`."""
    by_head: Tensor
    """`batch heads query key`: True if the head sees the key; one head stands for all where nothing is masked."""
    zeros: Tensor
    """`batch heads query key`: True where a head gives no weight to a key."""
    weighed: Tensor
    """`query key`: False if every head of the first batch item gives a weight that its dtype rounds away in a sum."""
    shares: Tensor
    """`heads`: whether a query gives weight to several keys."""
    faint: float
    """The largest weight that a mask of finite numbers leaves to a key, too small to change a sum; else 0."""
    vanished: float
    """The share of the weights of visible keys that are 0 by their scores."""
    first: int
    """The key at the position of the first query: cached keys come before it, empty slots of a cache after."""
    knows_own: bool
    """Whether the key of each query's own token is known."""
    distance: Tensor
    """`query key`: query position minus key position, negative for future keys."""
    pads: Tensor
    """`batch query`: True where the token is padding."""
    origins: frozenset[str]
    """Names of the inputs that the keys depend on."""
    origins_of_queries: frozenset[str]
    """Names of the inputs that the queries depend on."""
    over_heads: bool
    """Whether a triangular mask is laid over the heads instead of the queries."""
    row: str = "batch item"
    """What an entry of the batch is: a batch item, or one of its windows."""

    # -- the attention ------------------------------------------------------------------------------------------------

    @property
    def masked(self) -> bool:
        """Whether the scores are masked."""
        return bool(self.attention.masks)

    @property
    def module(self) -> str:
        """The module of the attention."""
        return self.attention.module

    @property
    def line(self) -> str:
        """The line of the last mask; of the softmax without one."""
        masks = self.attention.masks
        return masks[-1].source if masks else self.attention.softmax.source

    @property
    def shared(self) -> bool:
        """Whether queries and keys are one projection: a query then excludes its own key on purpose (Reformer)."""
        stages = self.attention.stages
        return "q_proj" in stages and stages["q_proj"] == stages.get("k_proj")

    def finding(self, check: str, sentence: str, evidence: str, fix: str = "") -> Finding:
        """Return a finding at the mask of this attention."""
        return Finding(check, sentence, evidence, source=self.line, module=self.module, fix=fix)

    # -- heads --------------------------------------------------------------------------------------------------------

    @cached_property
    def seen(self) -> Tensor:
        """`batch query key`: True if any head sees the key."""
        return self.by_head.any(1)

    @property
    def has_zeros(self) -> bool:
        """Whether a head gives no weight to a key."""
        return bool(self.zeros.any())

    @property
    def has_blind_query(self) -> bool:
        """Whether a query has every key masked out in a head."""
        return self.masked and not bool(self.by_head.any(-1).all())

    @cached_property
    def _is_blind(self) -> Tensor:
        """`heads`: True where no query of any batch item sees a key."""
        return ~self.by_head.any(-1).any(-1).any(0)

    @property
    def blind_heads(self) -> tuple[int, ...]:
        """The heads that see no key, if others see any."""
        if bool(self._is_blind.all()):
            return ()
        return tuple(self._is_blind.nonzero().flatten().tolist())

    @property
    def heads_differ(self) -> bool:
        """Whether the heads that see any key have different masks."""
        if not self.masked:
            return False
        masks = self.by_head.any(0)[~self._is_blind]
        return not bool((masks == masks[:1]).all())

    # -- positions ----------------------------------------------------------------------------------------------------

    @cached_property
    def real_pairs(self) -> Tensor:
        """`query key`: True if the query sees the key in any batch item where the query is no padding."""
        return (self.seen & ~self.pads[:, :, None]).any(0)

    @cached_property
    def is_padding(self) -> Tensor:
        """`query`: True where the token is padding in every batch item."""
        return self.pads.all(0)

    @cached_property
    def items(self) -> tuple[SeenKeys, ...]:
        """The keys that are seen in each batch item."""
        if len(self.by_head) == 1:
            return (self,)
        items = []
        for item in range(len(self.by_head)):
            one = slice(item, item + 1)
            items.append(replace(self, by_head=self.by_head[one], zeros=self.zeros[one], pads=self.pads[one]))
        return tuple(items)

    @property
    def items_agree(self) -> bool:
        """Whether the queries that are no padding see the same keys in every batch item."""
        return all(torch.equal(item.pairs, self.pairs) for item in self.items)

    @property
    def queries(self) -> int:
        """Number of queries."""
        return int(self.seen.shape[1])

    @property
    def keys(self) -> int:
        """Number of keys."""
        return int(self.seen.shape[2])

    @property
    def open(self) -> bool:
        """Whether every query sees every key."""
        return bool(self.seen.all())

    @cached_property
    def visible(self) -> Tensor:
        """`1 key`: True if any query sees the key; a key masked out for every query is padding."""
        return self.real_pairs.any(0)[None]

    @property
    def queries_agree(self) -> bool:
        """Whether all queries that are no padding see the same keys."""
        of_real_queries = self.real_pairs[~self.is_padding]
        return torch.equal(of_real_queries, self.visible.expand_as(of_real_queries))

    @property
    def shows_order(self) -> bool:
        """Whether a mask of past and future tokens could be seen: there are several keys, and no more queries."""
        return self.queries <= self.keys > 1 and bool(self.pairs.any())

    @property
    def alone(self) -> bool:
        """Whether no query sees another position."""
        return self.queries == self.keys and not bool((self.real_pairs & (self.distance != 0)).any())

    @cached_property
    def sees_future(self) -> bool:
        """Whether a query sees a later position."""
        return bool((self.real_pairs & (self.distance < 0)).any())

    @property
    def is_causal(self) -> bool:
        """Whether queries see themselves and their past, and no future position."""
        return self.queries > 1 and not self.open and not self.alone and not self.sees_future

    @cached_property
    def width(self) -> int | None:
        """The largest number of positions that a query sees, including its own; None if it is all of them."""
        past = self.distance[self.real_pairs & (self.distance >= 0)]
        if not past.numel() or self.keys < 3 or bool(self.is_padding.all()):
            return None
        farthest = int(past.max()) + 1
        # No query can see further back than the first key that any query sees.
        of_real_queries = self.distance[~self.is_padding]
        possible = int(of_real_queries[:, self.visible[0]].max()) + 1
        return farthest if farthest < min(self.keys, possible) else None

    @cached_property
    def pairs(self) -> Tensor:
        """`query key`: True if the query sees the key in any batch item.

        Queries of padding may see anything: they count as if they saw what the others do.
        """
        expected = self.visible.expand_as(self.real_pairs) if self.sees_future else self._in_width & self.visible
        return torch.where(self.is_padding[:, None], expected, self.real_pairs)

    @property
    def _in_width(self) -> Tensor:
        """`query key`: True where a key is the query's own or before it, and not beyond the width."""
        width = self.width or max(self.queries, self.keys) + 1
        return (self.distance >= 0) & (self.distance < width)

    @property
    def is_regular(self) -> bool:
        """Whether every query sees as many positions, its own the last."""
        return torch.equal(self.pairs, self._in_width & self.visible)

    @property
    def is_by_distance(self) -> bool:
        """Whether queries see their past at the same distances, e.g. every third, beside the first keys (sinks).

        A single distance that is left out is no pattern that anybody draws.
        """
        past = (self.distance >= 0) & self.visible
        seen_by_all = (self.pairs | ~past).all(0)  # key
        is_sink = seen_by_all.long().cumprod(0).bool()[None]
        seen = set(self.distance[past & ~is_sink & self.pairs].tolist())
        hidden = set(self.distance[past & ~is_sink & ~self.pairs].tolist())
        return len(hidden) > 1 and not seen & hidden

    @property
    def hides_itself(self) -> Tensor:
        """`query key`: True at the key of a query's own token if the query does not see it, and it is no padding."""
        if not self.knows_own or self.shared:
            return torch.zeros_like(self.pairs)
        is_hidden = ~self.pairs & (self.distance == 0)
        return is_hidden & self.visible if self.queries > 1 else is_hidden

    # -- groups of tokens ---------------------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of tokens that see only each other, e.g. packed documents, of one batch item or of all together.

        Within a group, each query sees all keys at the distances that any query sees. Empty for a single group, if the
        keys are no queries, or if a query does not see such a key.
        """
        if self.queries != self.keys or not self.knows_own or self.first:
            return ()
        group = _connected(self.real_pairs)
        sees_any = self.real_pairs.any(1)
        is_used = sees_any | self.real_pairs.any(0)
        numbers = sorted(set(group[is_used].tolist()))
        if len(numbers) < 2:
            return ()
        distances = self.distance[self.real_pairs]
        is_near = (self.distance >= distances.min()) & (self.distance <= distances.max())
        expected = (group[:, None] == group) & is_near & self.visible & sees_any[:, None]
        if not torch.equal(expected, self.real_pairs):
            return ()
        return tuple(tuple((group == number).nonzero().flatten().tolist()) for number in numbers)

    @property
    def is_causal_in_groups(self) -> bool:
        """Whether, in every batch item, each token sees its past, at least that of its group or its window."""
        return all(item.is_regular or item._is_in_groups for item in self.items)

    @property
    def _is_in_groups(self) -> bool:
        return bool(self.groups) and not self.sees_future

    def _group_words(self) -> str:
        """Return which groups of tokens see only each other; empty without groups."""
        groups = self.groups
        if not groups:
            return ""
        distances = self.distance[self.real_pairs]
        back, ahead = int(distances.max()), -int(distances.min())
        longest = max(group[-1] - group[0] for group in groups)
        places = text.shortened(" | ".join([text.spans(group) for group in groups]), 60)
        is_limited = back < longest
        if ahead == 0:
            how = f"causal, a window of {back + 1}" if is_limited else "causal"
        elif is_limited or 0 < ahead < longest:
            how = f"each token sees {back} before it and {ahead} after it"
        else:
            how = "each token sees all tokens"
        return f"{how}, within groups of tokens: {places}"

    def masks_out(self, keys: Tensor) -> bool:
        """Return whether no query of a batch item sees any of these keys, `batch key`."""
        return not bool((self.seen & keys[:, None]).any())

    # -- masks that are almost causal ---------------------------------------------------------------------------------

    @property
    def is_top_left(self) -> bool:
        """Whether a causal mask is aligned with the first keys of a cache: queries see the oldest, not their own."""
        if not self.knows_own or self.first <= 0:
            return False
        seen = (self.distance >= self.first) & self.visible
        return bool(seen.any()) and torch.equal(self.pairs, seen)

    @property
    def almost_causal(self) -> str:
        """How the mask differs from a causal one, or from that of a causal window, e.g. `inverted`; else empty."""
        if self.is_top_left:
            return "aligned top left"
        if self.queries == 1:
            hides = bool(self.pairs.any()) and bool(self.hides_itself.any())
            return "one diagonal early" if hides else ""
        if int(self.visible.sum()) < 3 or self.queries_agree or self.alone:
            return ""
        for name, mask in self._masks_like_causal().items():
            if self._is_like(mask & self.visible):
                return name
        return ""

    def _masks_like_causal(self) -> dict[str, Tensor]:
        """Return mistakes of a causal mask by name, each `query key`: True where a query sees a key."""
        distance, width = self.distance, self.width or self.keys + 1
        ahead = 1 - int(distance[self.pairs].min())
        hidden = distance[self.visible & ~self.pairs]
        masks = {
            "one diagonal early": (distance > 0) & (distance < width),
            "reversed": (distance < 1) & (distance > -ahead),
        }
        if width != 2:  # distances of -1 to 1 are a window to both sides
            masks = {"one diagonal late": (distance > -2) & (distance < width), **masks}
        back = int(distance[self.pairs].max())
        if 0 < back < self.keys - 1 and self.queries == self.keys:
            masks["open to all later tokens"] = distance <= back
        near = int(hidden.max()) if hidden.numel() else 0
        if near > 0:  # at 0 a query sees all but itself, which is no mistake
            masks["inverted"] = (distance < 0) | (distance > near)
        return masks

    def _is_like(self, seen: Tensor) -> bool:
        """Return whether most queries see a key by this mask, and they see the same keys."""
        rows = seen.any(1)  # scores that are masked throughout show nothing
        return 2 * int(rows.sum()) > self.queries and torch.equal(self.pairs[rows], seen[rows])

    # -- words --------------------------------------------------------------------------------------------------------

    @property
    def picture(self) -> tuple[str, ...]:
        """One row per query of the first batch item, one column per key: `■` if the query sees the key in any head."""
        more = "…" if self.keys > _SIDE else ""
        rows = []
        for row in self.items[0].pairs[:_SIDE].tolist():
            rows.append("".join("■" if seen else "·" for seen in row[:_SIDE]) + more)
        return tuple(rows)

    def words(self) -> str:
        """Return a name for who sees whom, and say if it is not so in every head, or in every batch item."""
        words = self._words_of_items()
        if self.vanished:
            words = f"{words}; {max(self.vanished, 0.01):.0%} of these weights are 0 by their scores"
        if self.heads_differ:
            words = f"{words}, in at least one head: the masks of the heads differ"
        blind = self.blind_heads
        if not blind:
            return words
        numbers = text.listed([str(head) for head in blind])
        if len(blind) == 1:
            return f"head {numbers} sees no key; in the other heads, {words}"
        return f"heads {numbers} see no key; in the other heads, {words}"

    def _words_of_items(self) -> str:
        """Return a name for who sees whom in any head, of each batch item where they differ."""
        if self.items_agree:
            return self._words_of_any_head()
        if all(item.queries_agree for item in self.items):
            counts = [int(item.visible.sum()) for item in self.items]
            if min(counts) < max(counts):
                return f"every query sees {min(counts)} to {max(counts)} of {self.keys} keys"
            return f"every query sees {counts[0]} of {self.keys} keys, not the same in every {self.row}"
        items_by_words: dict[str, list[int]] = {}
        for number, item in enumerate(self.items):
            items_by_words.setdefault(item._words_of_any_head(), []).append(number)
        if len(items_by_words) == 1:
            return next(iter(items_by_words))
        parts = []
        for words, numbers in items_by_words.items():
            row = self.row if len(numbers) == 1 else f"{self.row}s"
            parts.append(f"{row} {text.shortened(text.spans(numbers), 20)}: {words}")
        return "; ".join([*parts[:_ITEMS], *["…"] * (len(parts) > _ITEMS)])

    def _words_of_any_head(self) -> str:
        """Return a name for who sees whom in any head."""
        if self.open:
            return "every query sees every key"
        if not bool(self.pairs.any()):
            return "no query sees a key"
        if self.alone:
            return "each query sees only itself"
        if self.is_causal:
            return self._causal_words()
        mirrored = int(self.distance[self.pairs].abs().max())
        if torch.equal(self.pairs, self.distance.abs() <= mirrored) and mirrored + 1 < self.keys:
            return f"each query sees {mirrored} positions to each side"
        if self.queries_agree:
            return f"every query sees {int(self.visible.sum())} of {self.keys} keys"
        if self._band_words():
            return self._band_words()
        mistake = self.almost_causal
        if mistake == "reversed":
            return "causal, reversed: each query sees itself and later tokens"
        if mistake:
            return f"causal, {mistake}"
        return self._group_words() or "a custom pattern"

    def _band_words(self) -> str:
        """Return how far each query sees to both sides, if it sees itself and all between; else empty."""
        distances = self.distance[self.pairs]
        back, ahead = int(distances.max()), -int(distances.min())
        band = (self.distance <= back) & (self.distance >= -ahead)
        if min(back, ahead) < 1 or self.queries != self.keys or not torch.equal(self.pairs, band):
            return ""
        before, after = ("all" if far == self.keys - 1 else str(far) for far in (back, ahead))
        return f"each query sees {before} positions before it and {after} after it"

    def _causal_words(self) -> str:
        """Return the width of a causal mask, and what is not regular in it."""
        name = "causal" if self.width is None else f"causal, a window of {self.width}"
        if self.is_regular:
            masked = int((~self.visible).sum())
            if not masked:
                return name
            return f"{name}; {text.plural(masked, 'key')} {'is' if masked == 1 else 'are'} masked out for every query"
        if self._group_words():
            return self._group_words()
        is_itself = self.distance == 0
        sees_itself = bool((self.pairs | ~self.visible)[is_itself].all())
        if sees_itself or self.queries != self.keys:
            return f"{name}, with gaps"
        return f"{name}, but a query does not see itself"


def _connected(seen: Tensor) -> Tensor:
    """Return the number of each token's group, the least of its tokens, where tokens see only each other: `token`."""
    joined = seen | seen.T | torch.eye(len(seen), dtype=torch.bool)
    group = torch.arange(len(seen))
    while True:
        least = torch.where(joined, group, len(seen)).amin(1)
        if torch.equal(least, group):
            return group
        group = least[least]
