"""Faults of heads: tokens mixed where they are split or merged, and shared key heads that the wrong queries read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod

from ...reports.check import Finding
from ...text import listed
from .bench import Bench, each_kind
from .tokens import Factor, LostError, Row, Tokens

_SIDES = ("query", "key", "value")


@each_kind("no projection leads to the products by steps that can be computed again")
def heads(bench: Bench, tokens: Tokens) -> Iterator[Finding]:
    """Yield where heads are split or merged so that tokens are mixed."""
    looked_at, shared = 0, 0
    split: dict[str, dict[str, str]] = defaultdict(dict)
    for name in ("key", "value", "query"):
        try:
            factor = tokens.factor(name)
            pieces = factor.by_piece(factor.token(1 if prod(factor.tokens) > 1 else 0))
        except LostError:
            continue
        looked_at += 1
        shared = shared or (len(pieces) if name != "query" else 0)
        apart = _apart(pieces)
        if apart is None or (name == "query" and 0 < shared < len(pieces)):
            continue  # beside a key head that they share, query heads may stand in the rows of one product
        start, other, group, row, other_row = apart
        end = factor.width - 1
        split[_splitting(bench, factor) or tokens.attention.score_product.op.source][name] = (
            f"Changed in one token of {name[0]}_proj: features {start}–{start + end} are position {row} of head "
            f"{group}, features {other}–{other + end} position {other_row} of the same head."
        )
    for source, evidence in split.items():
        names = [name for name in _SIDES if name in evidence]
        yield Finding(
            "heads",
            f"The heads of the {listed(names)} are split without transposing: pieces of one token stand where "
            "positions of one head belong, so a head attends within a few tokens alone.",
            evidence[names[0]],
            source=source,
            fix="view(batch, positions, heads, head_dim), then transpose(1, 2).",
        )
    if not split:
        try:
            yield from _merged(bench, tokens)
        except LostError:
            if not looked_at:
                raise


def _apart(pieces: dict[int, set[Row]]) -> tuple[int, int, int, int, int] | None:
    """Return two pieces of one token that are two rows of one group; None where there are none."""
    first: dict[int, tuple[int, int]] = {}
    for start, rows in pieces.items():
        if len({row for _, row in rows}) > 1:
            return None  # neighbours are mixed on purpose, as by a convolution
        for group, row in rows:
            if group in first and first[group][1] != row:
                return first[group][0], start, group, first[group][1], row
            first.setdefault(group, (start, row))
    return None


def _splitting(bench: Bench, factor: Factor) -> str:
    """Return the line of the view that splits the heads; empty where there is none."""
    tensor, source = factor.target, ""
    while (op := bench.recorded.recording.producer(tensor)) is not None and tensor.id != factor.source.id and op.inputs:
        if op.kind == "view" and len(op.output.shape) > len(op.inputs[0].shape):
            source = op.source
        tensor = op.inputs[0]
    return source


def _merged(bench: Bench, tokens: Tokens) -> Iterator[Finding]:
    """Yield what is wrong with the rows of concat, each of which should have the numbers of one token.

    Raises `LostError` where that cannot be told.
    """
    factor = tokens.factor("query")
    concat = tokens.attention.stages.get("concat")
    if concat is None or tokens.attention.branches:
        raise LostError
    total = prod(factor.tokens)
    comparable = factor.tokens == concat.shape[:-1] and len(set(factor.tokens)) == len(factor.tokens)
    for number in sorted({0, 1, total // 2, total - 1} & set(range(total))):
        token = factor.token(number)
        rows = factor.changed(token)
        if len(rows) > tokens.names.num_heads:
            raise LostError  # a token is in several rows of a head on purpose, as with windows that overlap
        spread = sorted(tokens.concat_rows(rows))
        evidence = f"The context of the query at {list(token)} was changed"
        if len(spread) > 1:
            sentence = (
                f"The heads are merged without transposing: the context of one query is spread over {len(spread)} "
                "tokens of concat, each of which holds numbers of several queries."
            )
            more = ", …" if len(spread) > 4 else ""
            evidence += f" in all heads, and concat moved at {', '.join(str(list(row)) for row in spread[:4])}{more}."
        elif comparable and spread and spread[0] != token:
            sentence = "The context comes out at another token than the one that asked: queries change places."
            evidence += f", and concat moved at {list(spread[0])}."
        else:
            continue
        op = bench.recorded.recording.producer(concat)
        fix = "transpose(1, 2) before the heads are put side by side."
        yield Finding("heads", sentence, evidence, source=op.source if op else "", fix=fix)
        return


@each_kind("no key heads are shared, or it cannot be told which")
def grouped(_: Bench, tokens: Tokens) -> Iterator[Finding]:
    """Yield where shared key heads are given to other query heads than those of their group."""
    attention, names = tokens.attention, tokens.names
    if names.num_kv_heads == 1 and names.num_heads == 1:
        raise LostError
    query, key, value = (_heads_read(tokens.factor(name)) for name in _SIDES)
    heads, kv, values = (len(set(groups.values())) for groups in (query, key, value))
    alike = query.keys() == key.keys() == value.keys() and heads == len(query) and kv == values
    if not alike or kv in (1, heads) or heads % kv:
        raise LostError
    order = sorted(query, key=query.__getitem__)
    reads, each = [key[group] for group in order], heads // kv
    means, tiled = [place // each for place in range(heads)], [place % kv for place in range(heads)]
    reading = f"Query heads 0–{heads - 1} read key heads {', '.join(map(str, reads))}"
    if [value[group] for group in order] != reads:
        yield Finding(
            "grouped",
            "A query head takes its values from another head than its keys.",
            f"{reading}, and value heads {', '.join(str(value[group]) for group in order)}.",
            source=attention.value_product.op.source,
        )
    elif reads != means:
        yield Finding(
            "grouped",
            "The shared key heads are repeated in the wrong order: "
            + ("one after the other (repeat, expand in front)" if reads == tiled else "in an order of its own")
            + f", so query head 1 reads key head {reads[1]}, and a group of {each} neighbours should share one. "
            "Weights that were trained as Llama's or torch's are met by the wrong heads.",
            f"{reading}; in groups it is {', '.join(map(str, means))}.",
            source=attention.score_product.op.source,
            fix="repeat_interleave(group, dim=1), or expand behind the heads.",
        )


def _heads_read(factor: Factor) -> dict[int, int]:
    """Return for each group of the product the head of a projection that it reads, by one token.

    Raises `LostError` where that is not one each.
    """
    reads: dict[int, int] = {}
    for place, rows in enumerate(factor.by_piece(factor.token(0)).values()):
        for group, _ in rows:
            if group in reads:
                raise LostError
            reads[group] = place
    return reads
