"""Check by following one token which key head each query head shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ..compare.replay import Factor, LostError, NotHereError, Row
from ..graph.attention import Attention
from ..naming.axes import AxisNames
from ..reports.check import Finding
from .each_kind import of_each_kind
from .evidence import Evidence


@dataclass(frozen=True)
class _HeadInGroup:
    """A head of a projection, and a group of the product that uses it."""

    head: int
    group: int


@partial(of_each_kind, "no shared key heads were found")
def grouped(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if query heads use a shared key head of another group."""
    if names.num_heads == 1:
        raise NotHereError
    try:
        reads = _reads(evidence, attention, names)
    except LostError as error:
        is_shared = names.num_kv_heads not in (1, names.num_heads)
        raise (LostError if is_shared else NotHereError)(*error.args) from error
    if reads.values != reads.keys:
        yield _different_heads(attention, reads)
    elif [*reads.keys] != reads.expected:
        yield _wrong_order(attention, reads)


@dataclass(frozen=True)
class _Reads:
    """The key head and the value head that each query head uses, in the order of the query heads."""

    keys: Sequence[int]
    values: Sequence[int]
    num_kv_heads: int

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return len(self.keys) // self.num_kv_heads

    @property
    def expected(self) -> list[int]:
        """The key heads where neighbours share one, e.g. 0, 0, 1, 1."""
        return [head // self.group for head in range(len(self.keys))]

    @property
    def tiled(self) -> list[int]:
        """The key heads where they are repeated as a whole, e.g. 0, 1, 0, 1."""
        return [head % self.num_kv_heads for head in range(len(self.keys))]

    @property
    def words(self) -> str:
        """Which key head each query head uses."""
        return f"Query heads 0–{len(self.keys) - 1} use key heads {_numbers(self.keys)}"


def _reads(evidence: Evidence, attention: Attention, names: AxisNames) -> _Reads:
    """Return which heads each query head uses. Raise `LostError` if they are not shared, or it is unknown."""
    queries = Factor(evidence, attention, names, "query")
    _require_apart(queries)
    group_of = _group_by_head(_heads_in_groups(queries))
    key_of = _head_by_group(_heads_in_groups(Factor(evidence, attention, names, "key")))
    value_of = _head_by_group(_heads_in_groups(Factor(evidence, attention, names, "value")))
    if not set(group_of.values()) == key_of.keys() == value_of.keys():
        raise LostError
    num_heads, num_kv_heads = len(group_of), len(set(key_of.values()))
    if num_kv_heads != len(set(value_of.values())) or num_kv_heads in (1, num_heads) or num_heads % num_kv_heads:
        raise LostError
    groups = [group_of[head] for head in sorted(group_of)]
    return _Reads([key_of[group] for group in groups], [value_of[group] for group in groups], num_kv_heads)


def _require_apart(queries: Factor) -> None:
    """Raise `LostError` if two heads of a token are one row of the product: their queries are added up."""
    seen = set[Row]()
    for rows in queries.by_piece(queries.token(0)).values():
        if seen & rows:
            raise LostError("several query heads are added up before the scores")
        seen |= rows


def _heads_in_groups(factor: Factor) -> list[_HeadInGroup]:
    """Return each head of a projection with a group of the product that uses it, found with one token."""
    pairs = set()
    for head, rows in enumerate(factor.by_piece(factor.token(0)).values()):
        for group, _ in rows:
            pairs.add((head, group))
    return [_HeadInGroup(head, group) for head, group in sorted(pairs)]


def _group_by_head(pairs: Sequence[_HeadInGroup]) -> dict[int, int]:
    """Return the group of each query head; a group may have several. Raise `LostError` if a head has several."""
    groups = {pair.head: pair.group for pair in pairs}
    if len(groups) < len(pairs):
        raise LostError
    return groups


def _head_by_group(pairs: Sequence[_HeadInGroup]) -> dict[int, int]:
    """Return the key or value head of each group. Raise `LostError` if a group has several."""
    heads = {pair.group: pair.head for pair in pairs}
    if len(heads) < len(pairs):
        raise LostError
    return heads


def _different_heads(attention: Attention, reads: _Reads) -> Finding:
    return Finding(
        "grouped",
        "A query head uses different heads for its keys and its values.",
        f"{reads.words}, and value heads {_numbers(reads.values)}.",
        source=attention.value_product.op.source,
    )


def _wrong_order(attention: Attention, reads: _Reads) -> Finding:
    is_tiled = [*reads.keys] == reads.tiled
    how = " (repeat, expand before the heads, or groups before key heads)" if is_tiled else ""
    return Finding(
        "grouped",
        f"The shared key heads are used in the wrong order{how}: query head 1 uses key head {reads.keys[1]}, "
        f"but {reads.group} neighbours should share one. Weights of Llama or torch would get the wrong heads.",
        f"{reads.words}; expected {_numbers(reads.expected)}.",
        source=attention.score_product.op.source,
        fix="Use repeat_interleave(group, dim=1), expand after the heads, or split queries as (kv_heads group).",
    )


def _numbers(heads: Sequence[int]) -> str:
    return ", ".join(str(head) for head in heads)
