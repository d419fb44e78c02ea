"""Check the slots of a cache: a token is in its slot, its value is beside its key, and empty slots get no weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod

from torch import Tensor

from ..compare.replay import Factor, LostError, NotHereError, factors_of
from ..graph.attention import Attention
from ..graph.rerun import between
from ..naming.axes import AxisNames
from ..naming.canonical import content_of
from ..record.ops import Op
from ..reports.check import Finding
from ..text import plural, shortened, spans
from .each_kind import of_each_kind
from .evidence import Evidence

_MOST_TOKENS = 64
"""The largest number of tokens to follow into their slots."""


@partial(of_each_kind, "no cache was found")
def slots(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if a token's value is not in the slot of its key, or empty slots after it get weight."""
    key = Factor(evidence, attention, names, "key")
    writes = _writes_of_keys(evidence, key)
    if not writes and names.lengths[0] == names.lengths[1]:
        raise NotHereError
    slot_of = _slots_of_ends(key)
    if slot_of is not None:
        finding = _value_elsewhere(evidence, attention, names, key, slot_of)
        if finding is None and writes:
            finding = _empty(evidence, attention, names, writes[-1], max(slot_of.values()))
    else:
        finding = _missing(evidence, attention, names, key, writes) if writes else None
        if finding is None:
            raise LostError  # keys of some tokens are left out on purpose
    if finding is not None:
        yield finding


def _writes_of_keys(evidence: Evidence, key: Factor) -> list[Op]:
    """Return the operations that write keys on the way to the scores."""
    steps = between(evidence.run.recording, {key.source.id}, key.target)
    return [op for op in steps if op.kind == "write"]


def _slots_of_ends(key: Factor) -> dict[tuple[int, ...], int] | None:
    """Return the slots of the first and of the last token; None if one of them is in no slot.

    Raises `LostError` if a token is in several.
    """
    rows_of: dict[tuple[int, ...], set[int]] = {}
    for number in sorted({0, prod(key.tokens) - 1}):
        token = key.token(number)
        rows_of[token] = key.rows_of(token)
        if len(rows_of[token]) > 1:
            raise LostError  # neighbours are mixed on purpose, or a token is in several windows
    if not all(rows_of.values()):
        return None
    return {token: min(rows) for token, rows in rows_of.items()}


def tokens_of_keys(evidence: Evidence, key: Factor) -> dict[int, int]:
    """Return the token of batch item 0 that is in each key row; rows without a token are missing.

    Each token is changed in turn, from its projection on. Raises `LostError` if a row has several tokens, or a token is
    in several rows.
    """
    source = evidence.source
    place = min(source.positions or 0, len(key.tokens) - 1)
    if key.tokens[place] != source.length or source.length > _MOST_TOKENS:
        raise LostError
    tokens = dict[int, int]()
    for token in range(source.length):
        index = [0] * len(key.tokens)
        index[place] = token
        rows = key.rows_of(tuple(index))
        if len(rows) > 1 or rows & tokens.keys():
            raise LostError
        for row in rows:
            tokens[row] = token
    return tokens


def has_lost_tokens(evidence: Evidence) -> bool:
    """Return whether tokens of this call are in no key row of an attention, so that a row is not its token."""
    for attention, names, _ in evidence.kinds:
        with suppress(LostError):
            key = Factor(evidence, attention, names, "key")
            if len(tokens_of_keys(evidence, key)) < evidence.source.length:
                return True
    return False


@dataclass(frozen=True)
class _Slots:
    """The tokens of a call in the key rows of an attention, where some tokens are in no row."""

    tokens: Mapping[int, int]
    """The token in each key row that has one."""
    count: int
    """The number of tokens of the call."""
    rows: int
    """The number of key rows."""
    blank: frozenset[int]
    """The rows that are zeros."""

    @property
    def is_ring(self) -> bool:
        """Whether later tokens overwrote the missing ones: each row has the last of its tokens, modulo the rows."""
        if self.rows >= self.count:
            return False
        last = range(self.count - self.rows, self.count)
        return all(self.tokens.get(token % self.rows) == token for token in last)

    @property
    def _shift(self) -> int | None:
        """How many tokens each row is behind its token; None if it is not the same for all rows."""
        shifts = {token - row for row, token in self.tokens.items()}
        return shifts.pop() if len(shifts) == 1 else None

    def fault(self, query: int, row: int) -> str:
        """Return what is in a row, if the query should not see it: a later token or zeros; else empty."""
        if row in self.blank:
            return "an empty slot"
        token = self.tokens.get(row)
        if token is None or token <= query:
            return ""
        return f"token {token}"

    def sentence(self) -> str:
        """Return which tokens are in the key rows, and what became of the others."""
        missing = [token for token in range(self.count) if token not in self.tokens.values()]
        is_single = len(missing) < 2
        lost = f"{'token' if is_single else 'tokens'} {shortened(spans(missing), 40)}"
        if self.is_ring:
            ring = f"a ring of {self.rows} slots has overwritten {lost}"
            return f"{self._tokens_in_rows()}: {ring}, and the mask counts slots as tokens."
        shift = self._shift
        present = self._tokens_in_rows() if shift is None else _moved_by(shift)
        lost = f"{lost} {'is' if is_single else 'are'} in no key"
        if not self.blank:
            return f"{present}: {lost}."
        empty = shortened(spans(self.blank), 40)
        is_empty = f"keys {empty} are empty slots" if len(self.blank) > 1 else f"key {empty} is an empty slot"
        return f"{present}: {lost}, and {is_empty} of zeros."

    def _tokens_in_rows(self) -> str:
        """Return the token of each row: `Keys 0–3 are tokens 4, 5, 2–3`."""
        rows = sorted(self.tokens)
        tokens = [self.tokens[row] for row in rows]
        return f"Keys {shortened(spans(rows), 40)} are tokens {_in_turn(tokens)}"

    def fix(self) -> str:
        """Return what to change."""
        if self.is_ring:
            return f"Attend to the keys of the call itself, or call it with at most {self.rows} tokens at a time."
        return "Read the same slots that were written."


def _moved_by(shift: int) -> str:
    """Return which token is key j, where each is as many tokens behind.

    >>> _moved_by(-2)
    'Key j is token j - 2'
    """
    sign = "+" if shift > 0 else "-"
    return f"Key j is token j {sign} {abs(shift)}"


def _in_turn(numbers: Sequence[int]) -> str:
    """Return `8, 9, 5–7` for 8, 9, 5, 6, 7."""
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return shortened(", ".join(map(spans, runs)), 40)


def _missing(
    evidence: Evidence, attention: Attention, names: AxisNames, key: Factor, writes: Sequence[Op]
) -> Finding | None:
    """Return a fault if keys of this call's tokens are in no slot, and a mask that counts slots shows others instead.

    These are keys of later tokens, or slots of zeros.
    """
    sight = evidence.sight_of(attention)
    tokens = tokens_of_keys(evidence, key)
    count = evidence.source.length
    heads = content_of(evidence.run, attention, names, "k_heads")
    if sight is None or heads is None or not tokens:
        return None
    if sight.queries != count or heads.shape[2] != sight.keys:
        return None
    blank = _blank(heads).all(0).nonzero().flatten().tolist()
    slots = _Slots(tokens, count, sight.keys, frozenset(blank) - tokens.keys())
    for query, row in sight.pairs.nonzero().tolist():
        instead = slots.fault(query, row)
        if instead:
            return Finding(
                "cache",
                slots.sentence(),
                f"Query {query} gives weight to key {row}, which is {instead}.",
                source=writes[-1].source,
                fix=slots.fix(),
            )
    return None


@dataclass(frozen=True)
class _ValueElsewhere:
    """A token whose value is not in the slot of its key."""

    token: tuple[int, ...]
    slot: int
    """The slot of its key."""
    where: str
    """Where its value is, in words."""
    line: str
    """The line that writes it; empty if it is unknown."""


def _value_elsewhere(
    evidence: Evidence, attention: Attention, names: AxisNames, key: Factor, slot_of: Mapping[tuple[int, ...], int]
) -> Finding | None:
    """Return a fault if the value of a token is in another slot than its key, or in one that is not read."""
    try:
        value = Factor(evidence, attention, names, "value")
        lost = _first_elsewhere(evidence, attention, key, value, slot_of)
    except LostError:
        lost = _unread_without_projection(evidence, attention, key, slot_of)
    if lost is None:
        return None
    return Finding(
        "cache",
        "The value of a token is not in the slot of its key: the weight of the key multiplies another value.",
        f"The key of token {list(lost.token)} is in slot {lost.slot} of the cache, and its value {lost.where}.",
        source=lost.line or attention.value_product.op.source,
        fix="Write the key and the value of a token into the same slot.",
    )


def _first_elsewhere(
    evidence: Evidence, attention: Attention, key: Factor, value: Factor, slot_of: Mapping[tuple[int, ...], int]
) -> _ValueElsewhere | None:
    """Return the first token whose value is in another row than its key, or in none although it is written."""
    if value.tokens != key.tokens or value.target.shape[value.rows] != key.target.shape[key.rows]:
        return None
    for token, slot in slot_of.items():
        rows = value.rows_of(token)
        unread = [op for op in _unread(evidence, attention, key) if value.changes(token, op.inputs[-1])]
        if len(rows) == 1 and rows != {slot}:
            line = unread[0].source if unread else ""
            return _ValueElsewhere(token, slot, f"in slot {min(rows)}", line)
        if unread and not rows:
            return _ValueElsewhere(token, slot, "in a slot that is not read", unread[-1].source)
    return None


def _unread_without_projection(
    evidence: Evidence, attention: Attention, key: Factor, slot_of: Mapping[tuple[int, ...], int]
) -> _ValueElsewhere | None:
    """Return the first token, if values are written that nothing reads: they have no projection then."""
    if "value" in attention.projections:
        return None
    unread = _unread(evidence, attention, key)
    if not unread:
        return None
    token, slot = next(iter(slot_of.items()))
    return _ValueElsewhere(token, slot, "in a slot that is not read", unread[-1].source)


def _unread(evidence: Evidence, attention: Attention, key: Factor) -> list[Op]:
    """Return the operations that write what comes from the inputs into the memory of the values, and not the keys."""
    graph = evidence.run.graph
    storages = _memory_of_values(evidence, attention)
    of_keys = {op.index for op in between(graph.recording, {key.source.id}, key.target)}
    unread = []
    for op in evidence.writes:
        if op.index >= attention.value_product.op.index or op.index in of_keys:
            continue
        if len(op.inputs) < 2 or op.inputs[0].storage not in storages:
            continue
        if graph.comes_from_inputs(op.inputs[-1]):
            unread.append(op)
    return unread


def _memory_of_values(evidence: Evidence, attention: Attention) -> set[int]:
    """Return the storages that the values are in, from their projection to their product."""
    values = factors_of(attention)["value"]
    steps = evidence.run.graph.back(values, lambda op: not op.does("product", "convolution"))
    return {step.tensor.storage for step in steps}


def _empty(evidence: Evidence, attention: Attention, names: AxisNames, write: Op, newest: int) -> Finding | None:
    """Return a fault if slots after the new keys that nothing has been written into get weight."""
    sight = evidence.sight_of(attention)
    keys = content_of(evidence.run, attention, names, "k_heads")
    values = content_of(evidence.run, attention, names, "v_heads")
    if sight is None or keys is None or values is None:
        return None
    if not keys.shape[2] == values.shape[2] == sight.keys:
        return None
    blank = _blank(keys) & _blank(values)  # batch key
    if not evidence.arguments.starts_at_zero():
        # Where slots before the newest are empty too, nobody has called the module with the tokens before.
        filled = ~blank[:, :newest].all(1)
        blank = blank & filled[:, None]
    weighed = sight.seen & blank[:, None].cpu()  # batch query key
    places = weighed.any(0).any(0).nonzero().flatten().tolist()
    if not places:
        return None
    is_behind = places[-1] > newest
    where = "behind" if is_behind else "before"
    return Finding(
        "cache",
        f"Empty slots of the cache get weight: they are {where} the newest key, and no token was written into them.",
        f"The newest key is in slot {newest}; {plural(len(places), 'slot')} of zeros from slot {places[0]} on get "
        "weight.",
        sure=is_behind,
        source=write.source,
        fix="Cut the cache to the tokens so far, or mask out the other slots.",
    )


def _blank(heads: Tensor) -> Tensor:
    """Return `batch key` from `batch kv_heads key head_dim`: True where a key is zeros in all heads."""
    return (heads == 0).all(-1).all(1)
