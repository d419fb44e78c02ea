"""Find who sees whom from the scores and weights of a run, and judge whether it is causal or a window."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import text
from ...graph.attention import Attention
from ...graph.rerun import between
from ...naming.axes import AxisNames
from ...naming.canonical import canonical, content_of, sizes_in
from ...naming.stage_facts import StageFacts
from ...naming.visibility import is_causal, masks_of, sees, sees_by_head
from ...record.ops import Op
from ...reports.check import Finding
from ...running.subject import Run

_MASKED_BY = 90.0
"""A mask lowers a score by at least this number below others; -100 is the weakest in use."""
_HEAVY = 1e-3
"""A weight above this changes a sum by more than rounding."""
_SIDE = 12
"""The largest number of rows and columns of a picture."""


class SeenKeys:
    """The keys that each query of one attention sees."""

    def __init__(
        self,
        run: Run,
        attention: Attention,
        weights: Tensor,
        scores: Tensor | None,
        first: int | None,
        padded: Tensor | None,
        *,
        faint: float,
        layout: str,
    ) -> None:
        """Read the weights and the scores before them: `batch heads query key`, from a run with its tensors."""
        self.layout = layout
        """The axes of the scores, as the code lays them out, e.g. `(batch heads) query key`."""
        self.faint = faint
        """The largest weight that a mask of finite numbers leaves to a key, too small to change a sum; else 0."""
        self.attention = attention
        """The attention that these are the keys of."""
        masks, stages, seen = attention.masks, attention.stages, torch.ones(weights[:, 0].shape, dtype=torch.bool)
        by_head = sees_by_head(weights, scores).cpu() if masks or scores is not None else seen[:, None]
        self.has_blind_query = bool(masks) and not bool(by_head.any(-1).all())
        """Whether a query has every key masked out in a head."""
        self.seen = seen = by_head.any(1)
        """`batch query key`: True if any head sees the key."""
        self.zeros = (weights == 0).cpu()
        """`batch heads query key`: True where a head gives no weight to a key."""
        none, every = ~by_head.any(-1).any(-1).any(0), by_head.any(0)
        self.blind_heads = tuple(none.nonzero().flatten().tolist()) if not bool(none.all()) else ()
        """The heads that see no key, if others see any."""
        self.heads_differ = bool(masks) and not bool((every[~none] == every[~none][:1]).all())
        """Whether the heads that see any key have different masks."""
        self.line, self.module = (masks[-1] if masks else attention.softmax).source, attention.module
        self.masked = bool(masks)
        """Whether the scores are masked."""
        self.heavy = (weights[0] > _HEAVY).any(0).cpu() & (not attention.weights_changed)
        """`query key`: True if any head of the first batch item has a weight above `_HEAVY`."""
        self.shares = ((weights > _HEAVY).sum(-1) > 1).any(-1).any(0)
        """By head: whether a query gives weight to several keys."""
        self.shared = "q_proj" in stages and stages["q_proj"] == stages.get("k_proj")
        """Whether queries and keys are one projection: a query then excludes its own key on purpose (Reformer)."""
        of_keys = run.graph.inputs_of(stages["k_heads"]) if "k_heads" in stages else set()
        self.origins = frozenset(named.name for named in run.recording.inputs if named.tensor.id in of_keys)
        """Names of the inputs that the keys depend on."""
        self.queries, self.keys = seen.shape[1:]
        # If nobody sees the last keys, they are empty slots.
        used = max((seen.any(0).any(0).nonzero() + 1).flatten().tolist(), default=0)
        self.first = max(used - self.queries, 0) if first is None else first
        """The key at the position of the first query: cached keys come before it, empty slots of a cache after."""
        given = [stages[side].shape for side in ("query", "key") if side in stages]
        self.knows_own = self.queries == self.keys or (first is not None and given[:1] == given[1:])
        """Whether the key of each query's own token is known."""
        pads = None if padded is None else padded[:, self.first : self.first + self.queries]
        real = seen if pads is None or pads.shape != seen.shape[:2] else seen & ~pads[:, :, None]
        self.any_row = real.any(0)
        """`query key`: True if the query sees the key in any batch item where the query is no padding."""
        self.known = self.any_row.any(0)[None]
        """`1 key`: True if any query sees the key; a key masked out for every query is padding."""
        self.distance = torch.arange(self.queries)[:, None] + self.first - torch.arange(self.keys)[None]
        """`query key`: query position minus key position, negative for future keys."""
        behind = slice(self.first + self.queries, None)
        steps = between(run.recording, of_keys, stages["k_heads"]) if "k_heads" in stages else []
        if steps and bool(self.any_row[:, behind].all()) and all(op.kind != "write" for op in steps):
            self.distance[:, behind] = 0  # keys of no position that are joined, e.g. `add_bias_kv` of torch
        self.open = bool(seen.all())
        """Whether every query sees every key."""
        self.alike = torch.equal(self.any_row, self.known.expand_as(self.any_row))
        self.alone = self.queries == self.keys and not bool((self.any_row & (self.distance != 0)).any())
        """Whether no query sees another position."""
        self.over = _laid_over(weights, scores) if masks and bool((seen == seen[:, :1]).all()) else ""
        """`heads` or `batch items` if a triangular mask is laid over these instead of the queries; else empty."""
        read = (mask for op in masks for mask in masks_of(run.graph, attention, op)) if self.over else ()
        of_masks = {number for mask in read for number in run.graph.inputs_of(mask)}
        self.lengths = [named.name for named in run.recording.inputs if named.tensor.id in of_masks]
        """Names of the inputs that such a mask depends on: they may say the lengths of the batch items."""
        self.sees_future = bool((self.any_row & (self.distance < 0)).any())
        self.is_causal = self.queries > 1 and not self.open and not self.alone and not self.sees_future
        past = self.distance[self.any_row & (self.distance >= 0)]
        far = int(past.max()) + 1 if past.numel() else 0
        is_padding = torch.zeros(self.queries, dtype=torch.bool) if pads is None else _in_every_item(pads, self.queries)
        """`query`: True where the token is padding in every batch item."""
        possible = int(self.distance[~is_padding].max()) + 1 if not bool(is_padding.all()) else 0
        self.width = far if far < min(self.keys, possible) and self.keys > 2 else None
        """The largest number of positions that a query sees, including its own; None if it is all of them."""
        in_width = (self.distance >= 0) & (self.distance < (self.width or max(self.queries, self.keys) + 1))
        # Queries of padding may see anything: they count as if they saw what the others do.
        expected = self.known.expand_as(self.any_row) if self.sees_future else in_width & self.known
        self.any_row = torch.where(is_padding[:, None], expected, self.any_row)
        self.is_regular = torch.equal(self.any_row, in_width & self.known)
        """Whether every query sees as many positions, its own the last."""

    @property
    def is_top_left(self) -> bool:
        """Whether a causal mask is aligned with the first keys of a cache: queries see the oldest, not their own."""
        seen = (self.distance >= self.first) & self.known
        return self.knows_own and self.first > 0 and bool(seen.any()) and torch.equal(self.any_row, seen)

    @property
    def almost_causal(self) -> str:
        """How the mask differs from a causal one, or from that of a causal window, e.g. `inverted`; else empty."""
        if self.is_top_left:
            return "aligned top left"
        if self.queries == 1:
            return "one diagonal early" * bool(self.any_row.any() and self._hides_itself.any())
        if int(self.known.sum()) < 3 or self.alike or self.alone:
            return ""
        places, width = self.distance, self.width or self.keys + 1
        ahead, hidden = 1 - int(places[self.any_row].min()), places[self.known & ~self.any_row]
        near = int(hidden.max()) if hidden.numel() else 0  # 0: a query sees all but itself, which is no mistake
        masks = {
            "one diagonal late": (places > -2) & (places < width) & (width != 2),  # -1 to 1 is a window to both sides
            "one diagonal early": (places > 0) & (places < width),
            "reversed": (places < 1) & (places > -ahead),
            "inverted": ((places < 0) | (places > near)) & (near > 0),
        }
        return next((name for name, mask in masks.items() if self._is_like(mask & self.known)), "")

    def _is_like(self, seen: Tensor) -> bool:
        """Return whether most queries see a key by this mask, and they see the same keys."""
        rows = seen.any(1)  # scores that are masked throughout show nothing
        return 2 * int(rows.sum()) > self.queries and torch.equal(self.any_row[rows], seen[rows])

    @property
    def _hides_itself(self) -> Tensor:
        """`query key`: True at the key of a query's own token if the query does not see it, and it is no padding."""
        known = self.known if self.queries > 1 else torch.ones_like(self.known)
        judged = self.knows_own and not self.shared
        return known & ~self.any_row & (self.distance == 0) & judged

    @property
    def picture(self) -> tuple[str, ...]:
        """One row per query, one column per key: `■` if the query sees the key."""
        return tuple(
            "".join("■" if seen else "·" for seen in row[:_SIDE]) + ("…" if self.keys > _SIDE else "")
            for row in self.any_row[:_SIDE].tolist()
        )

    def words(self) -> str:
        """Return a name for who sees whom, and say if it is not so in every head."""
        words = self._words()
        if self.heads_differ:
            words = f"{words}, in at least one head: the masks of the heads differ"
        if not self.blind_heads:
            return words
        numbers, several = text.listed([*map(str, self.blind_heads)]), len(self.blind_heads) > 1
        blind = f"heads {numbers} see no key" if several else f"head {numbers} sees no key"
        return f"{blind}; in the other heads, {words}"

    def _words(self) -> str:
        """Return a name for who sees whom in any head."""
        if self.open:
            return "every query sees every key"
        if self.alone:
            return "each query sees only itself"
        if self.is_causal:
            sees_itself = bool((self.any_row | ~self.known)[self.distance == 0].all()) or self.queries != self.keys
            name = "causal" if self.width is None else f"causal, a window of {self.width}"
            if self.is_regular:
                masked = int((~self.known).sum())
                keys = f"{text.plural(masked, 'key')} {'is' if masked == 1 else 'are'}"
                return f"{name}; {keys} masked out for every query" if masked else name
            return f"{name}, with gaps" if sees_itself else f"{name}, but a query does not see itself"
        mirrored = int(self.distance[self.any_row].abs().max())
        if torch.equal(self.any_row, self.distance.abs() <= mirrored) and mirrored + 1 < self.keys:
            return f"each query sees {mirrored} positions to each side"
        if self.alike:
            numbers = sorted({*map(int, self.seen.any(1).sum(-1).aminmax())})  # of the batch items
            return f"every query sees {' to '.join(map(str, numbers))} of {self.keys} keys"
        if self.almost_causal == "reversed":
            return "causal, reversed: each query sees itself and later tokens"
        if self.almost_causal:
            return f"causal, {self.almost_causal}"
        return self._band_words() or "a custom pattern"

    def _band_words(self) -> str:
        """Return which distances every query sees, or which are masked out for every query; empty if they differ."""
        seen = torch.isin(self.distance, self.distance[self.any_row])
        sees_itself = bool((self.distance == 0).any()) and bool(seen[self.distance == 0].all())
        if not self.knows_own or not sees_itself or not torch.equal(self.any_row, seen & self.known):
            return ""
        masked = sorted({*self.distance[~seen].tolist()})
        before, after = ([place for place in masked if place > 0], [-place for place in reversed(masked) if place < 0])
        sides = _near_words(before, int(self.distance.max())), _near_words(after, -int(self.distance.min()))
        if all(sides):
            return f"each query sees itself, {sides[0]} before and {sides[1]} after"
        return _gap_words(before, after)

    def masks_out(self, keys: Tensor) -> bool:
        """Return whether no query of a batch item sees any of these keys, `batch key`."""
        return not bool((self.seen & keys[:, None]).any())

    def finding(self, check: str, sentence: str, evidence: str, fix: str = "") -> Finding:
        """Return a finding at the mask of this attention."""
        return Finding(check, sentence, evidence, source=self.line, module=self.module, fix=fix)

    def against_causal(self, window: int | None) -> Finding | None:
        """Return a finding if the attention is not causal, within a window if one is given; else None."""
        if self.queries > self.keys or not bool(self.any_row.any()):
            return None
        unseen = self.known & ~self.any_row
        if self.over:
            return self.finding(
                "causal",
                f"The causal mask is laid over the {self.over} instead of the queries.",
                f"All queries see the same keys, and each of the {self.over} sees other keys.",
                "Give it the axes of the scores: mask[None, None, :, :] for batch heads query key.",
            )
        if self.is_top_left:
            return self.finding(
                "causal",
                "The causal mask is aligned top left: queries see the oldest keys of the cache instead of their own.",
                f"Query 0 is the token of key {self.first}, and sees key 0 alone.",
                "Align the mask bottom right: triu(diagonal=1 + past), past = keys - queries.",
            )
        if self.sees_future and self.queries > 1:  # after the slot of one token, a ring has older ones
            future = self.any_row & (self.distance < 0)
            next_pairs = (self.distance == -1) & self.known
            late = torch.equal(future, next_pairs)
            inverted = not bool((self.any_row & (self.distance > 0)).any()) or self.almost_causal == "inverted"
            return self.finding(
                "causal",
                "Each position can see one future token: the causal mask starts one diagonal too late."
                if late
                else f"Positions can see future tokens{' instead of their past: the mask is inverted' * inverted}.",
                f"{self._first(future, 'weight')}; {int(future.sum())} of {int((self.distance < 0).sum())} such pairs.",
                "Mask out triu(diagonal=1).",
            )
        itself = self._hides_itself
        if bool(itself.any()):
            past = " + past" * (self.queries < self.keys)
            # A query with every key masked out by a finite number gives weight to all of them.
            weightless = self.zeros.flatten(0, 1).all(0) & (self.distance == 0)
            queries = (weightless if bool(weightless.any()) else itself).any(1).nonzero().flatten().tolist()
            return self.finding(
                "causal",
                "A position cannot see itself: the mask includes the diagonal.",
                f"{len(queries)} of {self.queries} queries give no weight to their own key; the first is query "
                f"{queries[0]}.",
                f"Mask out triu(diagonal=1{past}) instead of diagonal=0{past}.",
            )
        missed = unseen & (self.distance > 0)
        # A sliding window is causal too; with --window its width is checked.
        if window is None and bool(missed.any()) and (self.alone or not self.is_regular):
            query, key = missed.nonzero()[0].tolist()
            evidence = f"Query {query} gives no weight to key {key}; {int(missed.sum())} past pairs have no weight."
            fix = f"If the window is meant, add --window {self.width}." if self.width else ""
            return self.finding("causal", "A position cannot see all of its past.", evidence, fix)
        return None

    def against_window(self, width: int, causal: bool | None) -> Finding | None:
        """Return a finding if the attention does not fit a window of this width; else None."""
        if self.keys <= width or self.queries < 2:
            return None
        # A two-sided window n may mean 2 · n + 1 positions, n to each side.
        both = causal is not True and self.sees_future
        beyond = self.any_row & ((self.distance.abs() if both else self.distance) >= width)
        if bool(beyond.any()):
            far = int(self.distance[self.any_row].max()) + 1
            sentence = f"A position sees {far} positions, including its own; expected a window of {width}."
            return self.finding("window", sentence, f"{self._first(beyond, 'weight')}.")
        missing = (self.distance >= 0) & (self.distance < width) & self.known & ~self.any_row
        if bool(missing.any()) and causal is not False and not self.sees_future:
            sentence = f"A position cannot see all of its window of {width}."
            return self.finding("window", sentence, f"{self._first(missing, 'no weight')}.")
        return None

    def _first(self, marks: Tensor, what: str) -> str:
        """Return the first marked pair in words: `Query 3 gives weight to key 5, 2 after it`."""
        query, key = (int(number) for number in marks.nonzero()[0])
        distance = int(self.distance[query, key])
        place = f"{distance} before it" if distance > 0 else f"{-distance} after it" if distance else "its own"
        return f"Query {query} gives {what} to key {key}, {place}"


def _near_words(masked: list[int], farthest: int) -> str:
    """Return how many positions are seen on one side, if only the farthest are masked out; else empty."""
    near = farthest - len(masked)
    if masked != [*range(near + 1, farthest + 1)]:
        return ""
    return str(near) if masked else "all"


def _gap_words(before: list[int], after: list[int]) -> str:
    """Return which distances are masked out, if they are neighbours on each side; else empty."""
    for masked in (before, after):
        if masked and masked != [*range(masked[0], masked[-1] + 1)]:
            return ""
    words = [f"{text.spans(masked)} {side}" for masked, side in ((before, "before"), (after, "after")) if masked]
    if len(words) == 2:
        return f"the keys {words[0]} and {words[1]} a query are masked out"
    if len(before) + len(after) == 1:
        return f"the key {words[0]} a query is masked out"
    return f"the keys {words[0]} a query are masked out, and none {'after' if before else 'before'}"


def _in_every_item(pads: Tensor, queries: int) -> Tensor:
    """Return `query`, True where `pads`, `batch query`, is True for every batch item."""
    return pads.all(0) if pads.shape[1] == queries else torch.zeros(queries, dtype=torch.bool)


def sights_of(
    run: Run, first_key: Callable[[Attention, AxisNames], int | None], padded: Tensor | None = None
) -> tuple[SeenKeys, ...]:
    """Return the visible keys of each attention whose weights are known, from a run with its tensors.

    `first_key` returns the key at the position of the first query, if there are more keys than queries. `padded` is
    `batch position`, True at padding, whose queries may see anything.
    """
    sights = []
    for attention, names in run.attentions:
        weights, scores, plain = (
            _content(run, attention, names, stage) for stage in ("weights", "masked_scores", "scores")
        )
        if weights is None or weights.dim() != 4 or _has_keys_of_other_ranks(run, attention):
            continue
        zeroed, faint = _zeroed_after_softmax(run, attention, names), 0.0
        if zeroed is not None and zeroed.shape == weights.shape:
            weights, scores = weights.masked_fill(zeroed, 0.0), torch.zeros_like(weights) if scores is None else scores
        elif scores is not None and plain is not None and plain.shape == scores.shape == weights.shape:
            # A weight may be too small for its dtype although nothing masks it.
            lowered = (plain.double() - scores.double()).nan_to_num(torch.inf)
            small = (weights == 0) & (lowered - lowered.amin(-1, keepdim=True) < _MASKED_BY)
            is_faint = torch.zeros_like(small)
            if attention.masks:  # other steps, e.g. a negation, lower scores too
                is_faint = _masked_by_a_number(weights, scores, lowered)
            faint = float(weights[is_faint].max()) if bool(is_faint.any()) else 0.0
            weights = weights.masked_fill(small, torch.finfo(weights.dtype).tiny).masked_fill(is_faint, 0.0)
        first = first_key(attention, names) if weights.shape[-2] < weights.shape[-1] else None
        layout = names.of_stage("scores") if "scores" in attention.stages else ""
        sights.append(SeenKeys(run, attention, weights, scores, first, padded, faint=faint, layout=layout))
    return tuple(sights)


def _masked_by_a_number(weights: Tensor, scores: Tensor, lowered: Tensor) -> Tensor:
    """Return where a mask of one finite number leaves a weight that is too small to change a sum.

    All are `batch heads query key`. With scores of -30 the weights are about 1e-13, and no output in float32 differs.
    A bias by distance lowers far scores as much, but by several numbers: nothing is masked by it.
    """
    is_faint = (weights > 0) & (weights < torch.finfo(weights.dtype).eps / 8) & (lowered > 0)
    if not bool(is_faint.any()):
        return is_faint
    filled, added = scores[is_faint], lowered[is_faint]
    is_one_number = bool((filled == filled[0]).all()) or bool(torch.isclose(added, added[0]).all())
    return is_faint if is_one_number else torch.zeros_like(is_faint)


def _zeroed_after_softmax(run: Run, attention: Attention, names: AxisNames) -> Tensor | None:
    """Return the weights that steps after the softmax set to zero: `batch heads query key`; None if there are none.

    Such are tril, and a product with a mask of zeros and ones; a sum that divides the weights may follow.
    """
    stage, values = attention.stages["weights"], run.recording.values
    steps = [op for op in attention.weights_path if op.output.shape == stage.shape]
    if attention.branches or StageFacts(run.graph, attention, {}).drops():
        return None
    masking = [op for op in steps if _sets_to_zero(run, attention, op)]
    value = values.get(masking[-1].output.id) if masking else None
    if value is None or bool((value == 0).all()):
        return None
    sizes = sizes_in(attention, names, "weights")
    return canonical(value == 0, "weights", names.of_stage("weights"), sizes, names.head_order)


def _sets_to_zero(run: Run, attention: Attention, op: Op) -> bool:
    """Return whether an operation sets weights to zero, at places that do not depend on the weights."""
    after = run.recording.values.get(op.output.id)
    before = run.recording.values.get(op.inputs[0].id) if op.inputs else None
    if after is None or before is None or int((after == 0).sum()) <= int((before == 0).sum()):
        return False
    if op.base_name.rstrip("_") in ("tril", "triu"):
        return True
    # A threshold or the largest k of the weights follow the scores, and are no mask.
    softmax = attention.softmax.output.id
    masks = [tensor for tensor in op.inputs if tensor.id != softmax and not between(run.recording, {softmax}, tensor)]
    return bool(masks) and op.does("scales", "masks", "fills", "fills_where")


def _laid_over(weights: Tensor, scores: Tensor | None) -> str:
    """Return `heads` or `batch items` if these see keys as queries do under a causal mask; else empty."""
    by_head = sees(weights.transpose(1, 2), None if scores is None else scores.transpose(1, 2)).cpu()
    axes = {"heads": by_head, "batch items": by_head.transpose(0, 1)}
    return next((name for name, each in axes.items() if all(is_causal(rows, (0,)) for rows in each)), "")


def _has_keys_of_other_ranks(run: Run, attention: Attention) -> bool:
    """Return whether ranks exchange keys and no queries, so that the positions of the queries are unknown."""

    def exchanged(stage: str) -> bool:
        tensor = attention.stages.get(stage)
        steps = () if tensor is None else run.graph.back(tensor, lambda op: not run.graph.is_projection(op))
        return any(op.is_collective for step in steps for op in step.path)

    return exchanged("k_heads") and not exchanged("q_heads")


def _content(run: Run, attention: Attention, names: AxisNames, stage: str) -> Tensor | None:
    """Return a stage in canonical axes; None if it is missing, or an axis has no name."""
    has_stage = all(stage in turn.stages for turn in (attention, *attention.branches))
    return content_of(run, attention, names, stage) if has_stage else None
