"""Check by following one token that heads are split and merged within tokens, and which key heads are shared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from math import prod

import torch

from ...graph.attention import Attention
from ...naming.axes import AxisNames
from ...naming.pattern import dims_of
from ...reports.check import Finding
from ...text import listed, plural
from .evidence import Evidence, NotPossibleError
from .replay import SIDES, Factor, LostError, NotHereError, Row, changed_by, content_of

_MOST_TOKENS = 64
"""The largest number of tokens to follow."""
Judge = Callable[[Evidence, Attention, AxisNames], Iterator[Finding]]
"""Yields the faults of one attention."""


def of_each_kind(without: str, judge: Judge) -> Callable[[Evidence], Iterator[Finding]]:
    """Build a check from a function that judges one attention and raises `LostError` if it cannot.

    The check yields the findings of each kind of attention, with its module and the number of equal attentions. If no
    attention could be judged, it raises `NotPossibleError`, with the reason `without` if each judge raised
    `NotHereError`; or it passes if `without` is empty.
    """

    @wraps(judge)
    def check(evidence: Evidence) -> Iterator[Finding]:
        is_known, is_absent = not without, True
        found = _Found()
        for attention, names, count in evidence.kinds:
            try:
                for finding in list(judge(evidence, attention, names)):
                    found.add(replace(finding, module=attention.module), count)
            except LostError as error:
                is_absent = is_absent and isinstance(error, NotHereError)
                continue
            is_known = True
        yield from found.findings()
        if not is_known and is_absent:
            raise NotPossibleError(without, "none here")
        if not is_known:
            reason = "could not be recomputed"
            raise NotPossibleError(f"the steps from a projection to the products {reason}", reason)

    return check


class _Found:
    """Findings of attentions, each once: attentions of different code may have a line in common, and its fault."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str, str], Finding] = {}
        self._counts: dict[tuple[str, str, str], list[int]] = defaultdict(list)

    def add(self, finding: Finding, count: int) -> None:
        """Add a finding of attentions with equal code."""
        sign = finding.check, finding.sentence, finding.source
        self._first.setdefault(sign, finding)
        self._counts[sign].append(count)

    def findings(self) -> Iterator[Finding]:
        """Yield each finding with the number of attentions that have it."""
        for sign, finding in self._first.items():
            total, is_one_code = sum(self._counts[sign]), len(self._counts[sign]) == 1
            if total == 1:
                yield finding
            elif is_one_code:
                yield replace(finding, evidence=f"{finding.evidence} {total} attentions share this code.")
            else:
                yield replace(finding, evidence=f"{finding.evidence} {total} attentions have this fault.")


@partial(of_each_kind, "no heads were found")
def heads(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if splitting or merging heads mixes tokens."""
    split: dict[bool, list[_Split]] = defaultdict(list)
    shared: dict[str, int] = {}
    for side in ("key", "value", "query"):
        try:
            factor = Factor(evidence, attention, names, side)
            token = factor.token(1 if prod(factor.tokens) > 1 else 0)
            pieces = factor.by_piece(token)
        except LostError:
            continue
        shared[side] = len(pieces)
        width, apart = factor.width, _apart(pieces)
        for start in [start for start, rows in pieces.items() if len({row for _, row in rows}) > 1][:1]:
            width, apart = 1, _features_apart(factor, token, start)
        shares = side == "query" and shared.get("key", 0) < shared["query"]
        if apart is None or (shares and factor.target.shape[factor.rows] > names.lengths[0]):
            continue  # query heads that share a key head are rows of one product
        start, other, group, row, other_row = apart
        here, there = (f"features {at}–{at + width - 1}" if width > 1 else f"feature {at}" for at in (start, other))
        line = _splitting(evidence, factor) or attention.score_product.op.source
        moved = f"{side[0]}_proj {here} of token {list(token)} end{'s' * (width == 1)} up at "
        tokens, total = _tokens_of_a_head(factor, group), names.lengths[side != "query"]
        is_whole = tokens == 1 and _is_whole(factor, group, {row for rows in pieces.values() for row in rows})
        alone = f"row {row} of scores [{group}], {there} at row {other_row}: the other rows are of the same token."
        apart_in_head = f"position {row} of head {group}, {there} at position {other_row}."
        split[factor.features == 1].append(
            _Split(side, line, moved + (alone if is_whole else apart_in_head), is_whole, tokens, total)
        )
    for convolved, sides in split.items():
        yield _split_finding(sorted(sides, key=lambda each: SIDES.index(each.side)), convolved)
    if not split:
        try:
            yield from _merged(evidence, attention, names)
        except LostError:
            sizes = attention.stages["q_heads"].shape if "q_heads" in attention.stages else ()
            if len({*sizes}) < len(sizes) and not evidence.once:  # e.g. as many tokens as heads
                with suppress(LostError):
                    yield from _merged(*_with_fewer_tokens(evidence, attention))
                    return
            if not shared:
                raise


@dataclass(frozen=True)
class _Split:
    """Heads of one side that were split in a wrong way."""

    side: str
    line: str
    """The line of the view that splits the heads."""
    proof: str
    within_token: bool
    """Whether all rows of a product are of one token."""
    tokens: int | None
    """The number of tokens in one head; None if there are too many to count."""
    total: int
    """The number of tokens of the side."""


def _split_finding(sides: Sequence[_Split], convolved: bool) -> Finding:
    """Return one finding for all sides that are split in the same wrong way, at the first of their lines."""
    lines = {each.side: each.line for each in sides if each.line != sides[0].line}
    more = f" The same at {listed([f'{line} ({side})' for side, line in lines.items()])}." if lines else ""
    by_channel = "Use view(batch, heads, head_dim, positions), then transpose(2, 3)."
    fix = by_channel if convolved else "Use view(batch, positions, heads, head_dim), then transpose(1, 2)."
    return Finding("heads", _split_sentence(sides), sides[0].proof + more, source=sides[0].line, fix=fix)


def _split_sentence(sides: Sequence[_Split]) -> str:
    """Return what is wrong, and what follows for the keys, the values or the queries."""
    known = {each.side: each for each in sides}
    split = f"The heads of the {listed([*known])} are split without transpose"
    if all(side in known and known[side].within_token for side in ("query", "key")):
        return f"{split}: attention runs over the heads within each token, and no token attends to another."
    split = f"{split}. view() puts parts of one token into different positions of a head, so "
    if "key" not in known:
        return f"{split}the {listed([*known])} at a position of a head is not of the token at this position."
    tokens = known["key"].tokens
    if tokens is None or tokens == known["key"].total:
        return f"{split}a position of a head is not a token."
    return f"{split}each head sees only {plural(tokens, 'token')}."


def _is_whole(factor: Factor, group: int, rows: set[Row]) -> bool:
    """Return whether these rows are all rows of a group."""
    return len({row for place, row in rows if place == group}) == factor.target.shape[factor.rows]


def _tokens_of_a_head(factor: Factor, group: int) -> int | None:
    """Return the number of tokens with a part in a group of the product; None if there are too many to try."""
    total = prod(factor.tokens)
    if total > _MOST_TOKENS:
        return None
    tokens = map(factor.token, range(total))
    return sum(any(place == group for place, _ in factor.changed(token)) for token in tokens)


def _apart(pieces: dict[int, set[Row]]) -> tuple[int, int, int, int, int] | None:
    """Return two slices of one token that are different rows of one group; None if there are none, or a slice is."""
    first: dict[int, tuple[int, int]] = {}
    for start, rows in pieces.items():
        if len({row for _, row in rows}) > 1:
            return None
        for group, row in rows:
            begin, known = first.setdefault(group, (start, row))
            if known != row:
                return begin, start, group, known, row
    return None


def _features_apart(factor: Factor, token: tuple[int, ...], start: int) -> tuple[int, int, int, int, int] | None:
    """Return two features of a slice of one token that are different rows of one group.

    None where neighbours are mixed on purpose, e.g. by a convolution, or where features are the rows: of every token.
    """
    last = factor.token(prod(factor.tokens) - 1)
    mine, others = (factor.in_piece(at, start) for at in (token, last))
    rows = [{feature: {row for _, row in each[feature]} for feature in each} for each in (mine, others)]
    return _apart(mine) if rows[0] != rows[1] else None


def _splitting(evidence: Evidence, factor: Factor) -> str:
    """Return the line of the view that splits the heads; empty if none was found."""
    tensor, source = factor.target, ""
    while (op := evidence.run.recording.producer(tensor)) is not None and tensor.id != factor.source.id and op.inputs:
        if op.kind == "view" and len(op.output.shape) > len(op.inputs[0].shape):
            source = op.source
        tensor = op.inputs[0]
    return source


def _merged(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if a row of concat mixes tokens, or belongs to another token.

    Raises `LostError` if that cannot be determined.
    """
    factor = Factor(evidence, attention, names, "query")
    concat = attention.stages.get("concat")
    if concat is None or attention.branches:
        raise LostError
    place = attention.feature_place("output", len(concat.shape)) % len(concat.shape)
    apart, shape = dims_of(names.of_stage("concat")), list(concat.shape)
    (features,) = apart[place : place + 1] or [[]]
    del apart[place : place + 1], shape[place]
    # With as many tokens as heads, heads that are merged without a transpose are rows, each of all tokens.
    has_rows_of_heads = ["heads"] in apart and not ("query" in features and factor.tokens == tuple(shape))
    if has_rows_of_heads or any("head_dim" in word for dim in apart for word in dim):
        raise LostError  # heads that are not merged yet, or features before positions, as in a convolution
    total = prod(factor.tokens)
    tokens = max(total, prod(shape))
    if prod(attention.score_product.op.output.shape) < tokens * names.num_heads * names.lengths[1]:
        raise LostError  # a row of the scores belongs to several tokens on purpose, e.g. to a column of a table
    comparable = factor.tokens == tuple(shape) and len(set(factor.tokens)) == len(factor.tokens)
    for token in map(factor.token, sorted({0, 1, total // 2, total - 1} & set(range(total)))):
        rows = factor.changed(token)
        if len(rows) > names.num_heads:
            raise LostError  # a token is in several rows of a head on purpose, e.g. in overlapping windows
        spread = _tokens_of_concat(evidence, attention, names, rows)
        proof = f"Changing the context of query {list(token)}"
        if len(spread) > 1:
            sentence = (
                "The heads are merged in a wrong order, e.g. without transpose: the context of one query is spread "
                f"over {len(spread)} tokens of concat, and each of them mixes several queries."
            )
            more = ", …" if len(spread) > 4 else ""
            proof += f" in all heads changes concat at {', '.join(map(str, spread[:4]))}{more}."
        elif comparable and spread and tuple(spread[0]) != token:
            sentence = "The context of a query ends up at another token."
            proof += f" changes concat at {spread[0]}."
        else:
            continue
        fix = "Merge the heads in the order in which they were split, e.g. transpose(1, 2) before flatten(2)."
        yield Finding("heads", sentence, proof, source=evidence.line_of(concat), fix=fix)
        return


def _with_fewer_tokens(evidence: Evidence, attention: Attention) -> tuple[Evidence, Attention, AxisNames]:
    """Return an attention of another run, with all tokens but the last. Raise `LostError` if there is none."""
    try:
        fewer = evidence.with_arguments(evidence.piece(evidence.source, 0, evidence.source.length - 1))
    except NotPossibleError as error:
        raise LostError from error
    place = next(at for at, (known, _) in enumerate(evidence.run.attentions) if known is attention)
    if len(fewer.run.attentions) != len(evidence.run.attentions):
        raise LostError
    return fewer, *fewer.run.attentions[place]


def _tokens_of_concat(
    evidence: Evidence, attention: Attention, names: AxisNames, rows: Iterable[Row]
) -> list[list[int]]:
    """Return the tokens of concat that change when these rows of the scores change, in order."""
    scores, context = attention.score_product.op.output, attention.value_product.op.output
    keys = -2 if attention.key_first else -1
    *batch, queries = (size for axis, size in enumerate(scores.shape) if axis != len(scores.shape) + keys)
    marks = torch.zeros(prod(batch), queries, dtype=torch.bool, device=content_of(evidence, scores).device)
    for row in rows:
        marks[row] = True
    changed = changed_by(evidence, scores, marks.view(*batch, queries).unsqueeze(keys), context)
    changed = changed.any(-2 if attention.value_first else -1, keepdim=True)
    if int(changed.sum()) > names.num_heads:
        raise LostError  # a query is in several rows of the context on purpose, e.g. in overlapping chunks
    place = attention.feature_place("output", len(attention.stages["concat"].shape))
    return changed_by(evidence, context, changed, attention.stages["concat"]).any(place).nonzero().tolist()


@partial(of_each_kind, "no shared key heads were found")
def grouped(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if query heads use a shared key head of another group."""
    if names.num_heads == 1:
        raise NotHereError
    lost = NotHereError if names.num_kv_heads in (1, names.num_heads) else LostError
    try:
        pairs, keys, values = (_heads_read(Factor(evidence, attention, names, side)) for side in SIDES)
    except LostError as error:
        raise lost from error
    # A group of the product may have several query heads, and has one key head.
    query, key, value = dict(pairs), *({group: place for place, group in each} for each in (keys, values))
    heads, kv = len(query), len(set(key.values()))
    whole = [len(each) for each in (query, key, value)] == [len(each) for each in (pairs, keys, values)]
    alike = set(query.values()) == key.keys() == value.keys() and kv == len(set(value.values()))
    if not (whole and alike) or kv in (1, heads) or heads % kv:
        raise lost
    order, each = [query[place] for place in sorted(query)], heads // kv
    reads = [key[group] for group in order]
    means, tiled = [place // each for place in range(heads)], [place % kv for place in range(heads)]
    reading = f"Query heads 0–{heads - 1} use key heads {', '.join(map(str, reads))}"
    if [value[group] for group in order] != reads:
        yield Finding(
            "grouped",
            "A query head uses different heads for its keys and its values.",
            f"{reading}, and value heads {', '.join(str(value[group]) for group in order)}.",
            source=attention.value_product.op.source,
        )
    elif reads != means:
        yield Finding(
            "grouped",
            "The shared key heads are used in the wrong order"
            + (" (repeat, expand before the heads, or groups before key heads)" if reads == tiled else "")
            + f": query head 1 uses key head {reads[1]}, but {each} neighbours should share one. "
            "Weights of Llama or torch would meet the wrong heads.",
            f"{reading}; expected {', '.join(map(str, means))}.",
            source=attention.score_product.op.source,
            fix="Use repeat_interleave(group, dim=1), expand after the heads, or split queries as (kv_heads group).",
        )


def _heads_read(factor: Factor) -> list[tuple[int, int]]:
    """Return pairs of a projection head and a group of the product that uses it, found with one token."""
    pieces = factor.by_piece(factor.token(0)).values()
    return sorted({(place, group) for place, rows in enumerate(pieces) for group, _ in rows})
