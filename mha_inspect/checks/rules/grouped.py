"""Check by following one token which key head each query head shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ...compare.replay import LostError, content_of
from ...graph.attention import Attention
from ...measure.repeats import row_of_each
from ...naming.axes import AxisNames
from ...naming.pattern import dims_of
from ...reports.check import Finding
from ..each_kind import of_each_kind
from ..evidence import Evidence
from ..factors import Factor, NotHereError, Row
from ..lab import NotPossibleError
from ..registry import rule


@dataclass(frozen=True)
class _HeadInGroup:
    """A head of a projection, and a group of the product that uses it."""

    head: int
    group: int


@rule()
def grouped(evidence: Evidence) -> Iterator[Finding]:
    """Query head h uses key head h // group.

    One head of a projected token is changed at a time, and the query and key heads that it reaches in
    the scores are found. In grouped-query attention, neighbours share a key head: with 4 query heads
    and 2 key heads, query heads 0 and 1 use key head 0. In another order, a model that is trained from
    scratch works, but loaded weights, e.g. of Llama, get the wrong heads.

    Keys that occur several times, bit for bit, are a fault as well: the sequence was repeated instead
    of the heads, e.g. because the repeat comes before the transpose.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention
    from torch import nn


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
            self.k, self.v = nn.Linear(16, 8), nn.Linear(16, 8)

        def forward(self, x):
            parts = self.q(x), self.k(x), self.v(x)
            q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in parts)
            k, v = (t.repeat(1, 2, 1, 1) for t in (k, v))
            weights = (q @ k.mT / 4**0.5).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
    ```

    ## Right

    ```diff
    -        k, v = (t.repeat(1, 2, 1, 1) for t in (k, v))
    +        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    ```
    """
    repeated = list(_repeated_keys(evidence))
    yield from repeated
    with suppress(NotPossibleError) if repeated else nullcontext():
        yield from _shared_heads(evidence)


@partial(of_each_kind, "no shared key heads were found")
def _shared_heads(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
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


# -- a sequence that was repeated instead of the heads ------------------------------------------------------------


@partial(of_each_kind, "")
def _repeated_keys(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if each key and its value are there several times, bit for bit, `batch kv_heads (key 4) head_dim`.

    The number of times is that of the query heads that share a key head.
    """
    projected = attention.stages.get("k_proj")
    keys = _along_keys(evidence, attention, names, "k_heads")
    values = _along_keys(evidence, attention, names, "v_heads")
    if projected is None or keys is None or values is None:
        return
    count = names.lengths[1]
    for tokens in dict.fromkeys(projected.shape[:-1]):
        times, rest = divmod(count, max(tokens, 1))
        if rest or times < 2:
            continue
        if keys.is_repeated(times) and values.is_repeated(times):
            proof = f"{count} keys and values are {tokens} tokens of k_proj, each repeated {times} times, bit for bit."
            if times == names.num_heads // names.num_kv_heads:
                yield _instead_of_heads(attention, times, proof)
            return


def _instead_of_heads(attention: Attention, times: int, proof: str) -> Finding:
    return Finding(
        "grouped",
        f"Each key occurs {times} times: the sequence was repeated instead of the heads.",
        proof,
        source=attention.score_product.op.source,
        fix="Use .transpose(1, 2) before the heads are repeated, so that dimension 1 is the heads.",
    )


@dataclass(frozen=True, eq=False)
class _Heads:
    """The keys or values in heads."""

    content: Tensor
    axis: int
    """The dimension of their tokens."""

    def is_repeated(self, times: int) -> bool:
        """Return whether each token is there so many times."""
        return row_of_each(self.content, self.axis, times) is not None


def _along_keys(evidence: Evidence, attention: Attention, names: AxisNames, stage: str) -> _Heads | None:
    """Return the keys or values in heads; None if there is no such stage, or not one dimension of its tokens."""
    tensor = attention.stages.get(stage)
    if tensor is None:
        return None
    axes = [axis for axis, words in enumerate(dims_of(names.of_stage(stage))) if "key" in words]
    if len(axes) != 1 or tensor.shape[axes[0]] != names.lengths[1]:
        return None
    return _Heads(content_of(evidence, tensor), axes[0])
