"""Follow one token through a recorded attention: change it in one stage, and recompute a later stage.

Only the operations between two stages run, on recorded tensors. The result shows which token each row of a product
contains, whatever reshapes, norms and rotations are in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...graph.attention import Attention
from ...graph.dataflow import made_of
from ...naming.axes import AxisNames
from ...record.arguments import tensors_in
from ...record.ops import Op, Recording, TensorRef
from ...reports.check import Finding
from ...running.subject import Run
from ...text import listed
from .evidence import Evidence, NotPossibleError

Row = tuple[int, int]
"""Index in the batch dimensions of a product (batch items and heads), and row in that batch."""
Judge = Callable[[Evidence, Attention, AxisNames], Iterator[Finding]]
"""Yields the faults of one attention."""
SIDES = ("query", "key", "value")
_MOST = 64
"""The largest number of slices of a projection to follow."""


class LostError(Exception):
    """A property of an attention cannot be determined, e.g. because a tensor cannot be recomputed."""


def kinds(run: Run) -> list[tuple[Attention, AxisNames, int]]:
    """Return one attention for each combination of lines and shapes, with the number of equal ones."""
    groups: dict[tuple[object, ...], list[tuple[Attention, AxisNames]]] = defaultdict(list)
    for attention, names in run.attentions:
        ops = (attention.score_product.op, attention.value_product.op)
        sign = (*((op.source, op.output.shape, op.name) for op in ops), attention.scale, len(attention.masks))
        groups[sign].append((attention, names))
    return [(*group[0], len(group)) for group in groups.values()]


def of_each_kind(without: str, judge: Judge) -> Callable[[Evidence], Iterator[Finding]]:
    """Build a check from a function that judges one attention and raises `LostError` if it cannot.

    The check yields the findings of each kind of attention, with its module and the number of equal attentions. If no
    attention could be judged, it raises `NotPossibleError` with the reason `without`, or passes if that is empty.
    """

    @wraps(judge)
    def check(evidence: Evidence) -> Iterator[Finding]:
        is_known = not without
        for attention, names, count in kinds(evidence.run):
            with suppress(LostError):
                findings = list(judge(evidence, attention, names))
                is_known = True
                more = f" {count} attentions share this code." if count > 1 else ""
                for finding in findings:
                    yield replace(finding, module=attention.module, evidence=finding.evidence + more)
        if not is_known:
            raise NotPossibleError(without, "none here")

    return check


def content_of(evidence: Evidence, tensor: TensorRef) -> Tensor:
    """Return the value of a recorded tensor. Raise `LostError` if it was not kept."""
    value = evidence.content(tensor)
    if value is None:
        raise LostError
    return value


def again(evidence: Evidence, source: TensorRef, value: Tensor, target: TensorRef) -> Tensor:
    """Return the value of `target` if `source` had this value. Raise `LostError` if it cannot be computed."""
    known = {source.id: value}
    memory = _Memory(evidence.run.recording)
    for op in between(evidence.run.recording, {source.id}, target):

        def content(tensor: TensorRef, op: Op = op) -> Tensor:
            value = known[tensor.id] if tensor.id in known else memory.read(tensor, content_of(evidence, tensor))
            return value.clone() if op.kind == "write" else value  # the recorded tensor must not be overwritten

        try:
            with torch.no_grad():
                results = zip(op.outputs, _results(op, content), strict=False)
                known.update({tensor.id: result for tensor, result in results if tensor.id != source.id})
                if op.kind == "write":
                    memory.write(op, known)
        except Exception as error:  # an operation may raise anything when called directly
            raise LostError from error
    if target.id not in known and not memory.has(target):
        raise LostError
    return known[target.id] if target.id in known else memory.read(target, content_of(evidence, target))


class _Memory:
    """What recomputed operations wrote into memory that later tensors read, such as a cache."""

    def __init__(self, recording: Recording) -> None:
        self._producers = recording.producers
        self._writes: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Storage to the addresses of each write and the numbers written, in order."""
        self._written: set[int] = set()

    def write(self, op: Op, known: Mapping[int, Tensor]) -> None:
        """Note what a write operation wrote."""
        self._written.add(op.index)
        written = known[op.output.id]
        self._writes.setdefault(op.output.storage, []).append((_addresses(op.output).to(written.device), written))

    def has(self, tensor: TensorRef) -> bool:
        """Return whether a tensor was read from memory after a write operation that was recomputed."""
        return self._producers.get(tensor.id) in self._written

    def read(self, tensor: TensorRef, value: Tensor) -> Tensor:
        """Return the recorded value of a tensor, with what was written into its memory since in its place."""
        if not self.has(tensor):
            return value
        places = _addresses(tensor).to(value.device)
        size = 1 + max(int(at.max()) for at, _ in [*self._writes[tensor.storage], (places, value)])
        flat = value.new_empty(size)
        flat[places] = value
        for at, numbers in self._writes[tensor.storage]:
            flat[at] = numbers.to(flat.dtype)
        return flat[places]


def _addresses(tensor: TensorRef) -> Tensor:
    """Return the position of each element of a tensor in its storage."""
    places = torch.full(tensor.shape, tensor.offset)
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride, strict=True)):
        places += (torch.arange(size) * step).view(-1, *[1] * (len(tensor.shape) - dim - 1))
    return places


def _results(op: Op, content: Callable[[TensorRef], Tensor]) -> list[Tensor]:
    """Run an operation again and return its outputs. Raise `LostError` if their shapes differ."""
    if op.makes_result or op.base_name in ("view", "_unsafe_view", "_reshape_alias"):
        # The changed tensor may have another memory layout than the recorded one.
        return [content(op.inputs[0]).reshape(op.output.shape)]

    def argument(value: Any) -> Any:
        if isinstance(value, TensorRef):
            return content(value)
        if isinstance(value, tuple):
            return [argument(item) for item in value]
        is_dtype = isinstance(value, str) and value.startswith("torch.")
        return getattr(torch, value.removeprefix("torch.")) if is_dtype else value

    namespace, name, overload = op.name.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    result = function(*map(argument, op.args), **{key: argument(value) for key, value in op.kwargs.items()})
    results = [tensor for _, tensor in tensors_in(result)]
    if [tuple(tensor.shape) for tensor in results] != [tensor.shape for tensor in op.outputs]:
        raise LostError
    return results


def between(recording: Recording, sources: set[int], target: TensorRef) -> list[Op]:
    """Return the operations on the paths from sources to a tensor, in order."""
    needed: dict[int, Op] = {}
    queue = [target]
    while queue:
        tensor = queue.pop()
        op = recording.producer(tensor)
        if tensor.id not in sources and op is not None and op.index not in needed:
            needed[op.index] = op
            queue += op.inputs
    ordered = [needed[index] for index in sorted(needed)]
    reached = made_of(sources, ordered)
    return [op for op in ordered if any(tensor.id in reached for tensor in op.inputs)] if target.id in reached else []


def _changed_by(evidence: Evidence, source: TensorRef, marks: Tensor, target: TensorRef) -> Tensor:
    """Return which elements of `target` change when the marked elements of `source` change."""
    value = content_of(evidence, source)
    base = again(evidence, source, value, target)
    other = again(evidence, source, torch.where(marks, value + 1 + value.abs(), value), target)
    return (base != other) & ~(base.isnan() & other.isnan())


class Factor:
    """The query, key or value of an attention, from its projection to the product: maps tokens to rows."""

    def __init__(self, evidence: Evidence, attention: Attention, names: AxisNames, side: str) -> None:
        """Take one side. Raise `LostError` without a projection of tokens or a matrix product."""
        product = attention.value_product if side == "value" else attention.score_product
        source = attention.stages.get(f"{side[0]}_proj") or attention.stages.get(side)
        projection = attention.projections.get(side)
        convolved = projection is not None and projection.base_name == "convolution"
        if source is None or not product.multiply.does("product") or len(source.shape) < 2 or convolved:
            raise LostError
        left = {"query": not attention.key_first, "key": attention.key_first, "value": attention.value_first}[side]
        self.evidence, self.source, self.target = evidence, source, product.left if left else product.right
        # The contracted dimension is the last of the left factor; in the value product it counts positions.
        self.rows = -2 if left != (side == "value") else -1
        """The position dimension of the target."""
        self.width = max(names.head_dim, 1)
        """The number of features per head."""
        self.tokens = source.shape[:-1]

    def token(self, number: int) -> tuple[int, ...]:
        """Return the index of a token from its flat number."""
        return tuple(int(place) for place in np.unravel_index(number, self.tokens))

    def changed(self, token: tuple[int, ...], start: int = 0, stop: int | None = None) -> set[Row]:
        """Return the rows that change when features of a token change."""
        marks = torch.zeros(self.source.shape, dtype=torch.bool)
        marks[token][start:stop] = True
        marks = marks.to(content_of(self.evidence, self.source).device)
        by_row = _changed_by(self.evidence, self.source, marks, self.target).any(dim=-1 if self.rows == -2 else -2)
        return {(group, row) for group, row in by_row.reshape(-1, by_row.shape[-1]).nonzero().tolist()}

    def by_piece(self, token: tuple[int, ...]) -> dict[int, set[Row]]:
        """Return the first feature of each slice of a token that reaches the target, with the rows that contain it.

        A slice is as wide as a head; a packed projection gives the slices of query, key and value.
        """
        features = self.source.shape[-1]
        starts = range(0, features, self.width) if features <= _MOST * self.width else ()
        reached = {start: self.changed(token, start, start + self.width) for start in starts}
        return {start: rows for start, rows in reached.items() if rows}


def first_key(evidence: Evidence, attention: Attention, names: AxisNames) -> int | None:
    """Return the key that the first token of a run makes, behind those of a cache; None if it is unknown."""
    try:
        factor = Factor(evidence, attention, names, "key")
        rows = {row for _, row in factor.changed(factor.token(0))}
    except LostError:
        return None
    return rows.pop() if len(rows) == 1 else None


@partial(of_each_kind, "the steps from a projection to the products could not be recomputed")
def heads(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if splitting or merging heads mixes tokens."""
    split: dict[str, dict[str, str]] = defaultdict(dict)
    shared: dict[str, int] = {}
    for side in ("key", "value", "query"):
        try:
            factor = Factor(evidence, attention, names, side)
            token = factor.token(1 if prod(factor.tokens) > 1 else 0)
            pieces = factor.by_piece(token)
        except LostError:
            continue
        shared[side] = len(pieces)
        apart = _apart(pieces)
        if apart is None or (side == "query" and 0 < (shared.get("key") or shared.get("value", 0)) < len(pieces)):
            continue  # query heads that share a key head may be rows of one product
        start, other, group, row, other_row = apart
        end = factor.width - 1
        split[_splitting(evidence, factor) or attention.score_product.op.source][side] = (
            f"{side[0]}_proj features {start}–{start + end} of token {list(token)} end up at position {row} of head "
            f"{group}, features {other}–{other + end} at position {other_row}."
        )
    for source, proofs in split.items():
        sides = [side for side in SIDES if side in proofs]
        yield Finding(
            "heads",
            f"The heads of the {listed(sides)} are split without transpose. view() puts parts of one token into "
            "different positions of a head, so each head sees only a few tokens.",
            proofs[sides[0]],
            source=source,
            fix="Use view(batch, positions, heads, head_dim), then transpose(1, 2).",
        )
    if not split:
        try:
            yield from _merged(evidence, attention, names)
        except LostError:
            if not shared:
                raise


def _apart(pieces: dict[int, set[Row]]) -> tuple[int, int, int, int, int] | None:
    """Return two slices of one token that are different rows of one group; None if there are none."""
    first: dict[int, tuple[int, int]] = {}
    for start, rows in pieces.items():
        if len({row for _, row in rows}) > 1:
            return None  # neighbours are mixed on purpose, e.g. by a convolution
        for group, row in rows:
            begin, known = first.setdefault(group, (start, row))
            if known != row:
                return begin, start, group, known, row
    return None


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
    total = prod(factor.tokens)
    comparable = factor.tokens == concat.shape[:-1] and len(set(factor.tokens)) == len(factor.tokens)
    for token in map(factor.token, sorted({0, 1, total // 2, total - 1} & set(range(total)))):
        rows = factor.changed(token)
        if len(rows) > names.num_heads:
            raise LostError  # a token is in several rows of a head on purpose, e.g. in overlapping windows
        spread = _tokens_of_concat(evidence, attention, rows)
        proof = f"Changing the context of query {list(token)}"
        if len(spread) > 1:
            sentence = (
                f"The heads are merged without transpose: the context of one query is spread over {len(spread)} tokens "
                "of concat, and each of them mixes several queries."
            )
            more = ", …" if len(spread) > 4 else ""
            proof += f" in all heads changes concat at {', '.join(map(str, spread[:4]))}{more}."
        elif comparable and spread and tuple(spread[0]) != token:
            sentence = "The context of a query ends up at another token."
            proof += f" changes concat at {spread[0]}."
        else:
            continue
        fix = "Use transpose(1, 2) before merging the heads."
        yield Finding("heads", sentence, proof, source=evidence.line_of(concat), fix=fix)
        return


def _tokens_of_concat(evidence: Evidence, attention: Attention, rows: Iterable[Row]) -> list[list[int]]:
    """Return the tokens of concat that change when these rows of the context change, in order."""
    context, scores = attention.value_product.op.output, attention.score_product.op.output.shape
    *batch, left, right = context.shape
    queries = right if attention.value_first else left
    if prod(scores[:-2]) != prod(batch) or scores[-1 if attention.key_first else -2] != queries:
        raise LostError  # overlapping chunks: rows of the two products do not match
    marks = torch.zeros(prod(batch), queries, dtype=torch.bool, device=content_of(evidence, context).device)
    for row in rows:
        marks[row] = True
    marks = marks.view(*batch, queries).unsqueeze(-2 if attention.value_first else -1)
    return _changed_by(evidence, context, marks, attention.stages["concat"]).any(-1).nonzero().tolist()


@partial(of_each_kind, "no shared key heads were found")
def grouped(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if query heads use a shared key head of another group."""
    if names.num_kv_heads == 1 and names.num_heads == 1:
        raise LostError
    query, key, value = (_heads_read(Factor(evidence, attention, names, side)) for side in SIDES)
    heads, kv, values = (len(set(groups.values())) for groups in (query, key, value))
    alike = query.keys() == key.keys() == value.keys() and heads == len(query) and kv == values
    if not alike or kv in (1, heads) or heads % kv:
        raise LostError
    order = sorted(query, key=query.__getitem__)
    reads, each = [key[group] for group in order], heads // kv
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
            "The shared key heads are repeated in the wrong order"
            + (" (repeat, or expand before the heads)" if reads == tiled else "")
            + f": query head 1 uses key head {reads[1]}, but {each} neighbours should share one. "
            "Weights of Llama or torch would meet the wrong heads.",
            f"{reading}; expected {', '.join(map(str, means))}.",
            source=attention.score_product.op.source,
            fix="Use repeat_interleave(group, dim=1), or expand after the heads.",
        )


def _heads_read(factor: Factor) -> dict[int, int]:
    """Return the projection head that each group of the product uses, found with one token.

    Raises `LostError` if a group uses several heads.
    """
    rows = [(group, place) for place, rows in enumerate(factor.by_piece(factor.token(0)).values()) for group, _ in rows]
    if len(dict(rows)) < len(rows):
        raise LostError
    return dict(rows)
