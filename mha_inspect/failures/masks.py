"""Edits of a mask that does not fit the scores, `batch heads query key`: its layout before its sizes.

A mask turns only where both sizes then meet, gets dimensions of size one behind its first, and is cut to the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import text
from .edit import SWAP, Change, Edit, Step
from .facts import BROADCASTS, HEADS, LOGICAL, SEQUENCES, TAKE_MASKS, Facts, Operand, Shape, first_clash
from .layers import extent_of, swapped
from .meeting import called
from .padding_masks import as_padding, is_of_two, is_readable
from .reached import SDPA, behind_of

_WHOLE = slice(None)


@dataclass(frozen=True, eq=False)
class _Masking:
    """A mask, and the scores that it does not fit."""

    mask: Operand
    scores: Shape
    """`batch heads query key`, `(batch heads) query key` or `query key`."""
    operand: Operand | None
    """The scores as an operand of the call, which keep their shape; None for a call that makes them itself."""
    is_added: bool = True
    """Whether it is added to the scores, or hides some: what multiplies them is a scale."""

    @property
    def rows(self) -> int:
        """The queries of the mask; 1 without a dimension for them."""
        return 1 if len(self.mask.shape) == 1 else self.mask.shape[-2]

    @property
    def columns(self) -> int:
        """The keys of the mask."""
        return self.mask.shape[-1]

    @property
    def anew(self) -> Step:
        """The step to a mask of the sizes of the scores; with one row, if it has one for all queries."""
        rows = [] if len(self.mask.shape) == 1 else [1 if self.rows == 1 else self.scores[-2]]
        return "new_zeros", (*self.mask.shape[:-2], *rows, self.scores[-1])

    def edit(self, cause: str, why: str, *steps: Step, cost: int, way: str = "", note: str = "") -> Edit:
        """Return an edit of the mask, which must leave the scores their shape."""
        shape = None if self.operand is None else self.scores
        return Edit(cause, why, (Change(self.mask, steps),), way, note, cost=cost, shape=shape)


def edits_of_masks(facts: Facts) -> Iterator[Edit]:
    """Yield the edits of the mask of a call."""
    masking = _misfit(facts)
    if masking is not None:
        yield from _layouts(facts, masking)
        yield from _sizes(facts, masking)
    else:
        yield from _of_two(facts)
    yield from _scores_of_heads(facts)


def _misfit(facts: Facts) -> _Masking | None:
    """Return the mask that does not fit its scores; None if every mask fits."""
    masking = _masking(facts)
    if masking is None or not masking.mask.shape or len(masking.scores) < 2:
        return None
    if len(masking.mask.shape) > len(masking.scores):
        return masking
    return None if first_clash(masking.mask.shape, masking.scores) is None else masking


def _masking(facts: Facts) -> _Masking | None:
    """Return the mask of the failing call with the scores that it is for."""
    if facts.mask_and_scores is not None:
        mask, scores = facts.mask_and_scores
        return _Masking(mask, scores.shape, scores, facts.base in TAKE_MASKS)
    given, query, key = facts.given("attn_mask"), facts.given("query"), facts.given("key")
    if given is None or query is None or key is None:
        return None
    if facts.attention is not None:
        of_query, of_key = extent_of(facts, query), extent_of(facts, key)
        products = max(of_query.batch, 1) * facts.attention.num_heads
        return _Masking(given, (products, of_query.length, of_key.length), None)
    if facts.base != SDPA or len(query.shape) < 2 or len(key.shape) < 2:
        return None
    return _Masking(given, (*query.shape[:-1], key.shape[-2]), None)


# -- layouts ----------------------------------------------------------------------------------------------------------


def _layouts(facts: Facts, masking: _Masking) -> Iterator[Edit]:
    """Yield a mask's axes in another order, split or joined, or with dimensions of size one."""
    mask, scores = masking.mask, masking.scores
    shape = mask.shape
    query, key = scores[-2:]
    first = scores[0]
    if shape[-2:] == (key, query) and key != query:
        what = f"{mask.is_shape}, with key {key} before query {query}, and the scores are {text.shape(scores)}."
        is_of_batch = shape == (key, first) and len(scores) == 4
        yield masking.edit("mask_transposed", what, SWAP, cost=2, note="if it is `key query`" if is_of_batch else "")
    if facts.attention is not None:
        yield from _for_layer(facts, masking, facts.attention.num_heads)
        return
    if shape == (first, first) and len(scores) > 2 and first not in (query, key):
        yield _of_the_batch(facts, masking)
    what = f"{mask.is_shape}, and the scores are {text.shape(scores)}."
    missing = len(scores) - len(shape)
    yield from _with_axes(masking, "mask_rank" if len(scores) < 5 else "lacks_an_axis", missing)
    if len(scores) == 4:
        yield from _reordered(masking, what)


def _reordered(masking: _Masking, what: str) -> Iterator[Edit]:
    """Yield a mask beside `batch heads query key` whose axes are those of the scores, split or in another order."""
    shape, scores = masking.mask.shape, masking.scores
    first, heads, query, key = scores
    if shape == (first * heads, query, key):
        note = "to give the heads their own dimension"
        yield masking.edit("mask_rank", what, ("view", *scores), cost=1, note=note)
    if shape == (query, key, heads):
        yield masking.edit("mask_rank", what, ("permute", 2, 0, 1), cost=2)


def _of_the_batch(facts: Facts, masking: _Masking) -> Edit:
    """Return the edit for a mask `query key` whose sizes are those of dimension 0, which is taken as the batch."""
    shape = masking.scores
    changes = swapped(facts)
    if not changes and masking.operand is not None and len(shape) == 4:
        changes = [Change(masking.operand, (("new_zeros", (shape[2], shape[1], shape[0], shape[0])),))]
    sizes = f"{masking.mask.is_shape}, and the scores are {text.shape(shape)}"
    what = f"{sizes}: it fits dimension 0, which is taken as the batch."
    disagree = "The input and the layer disagree on whether batch or sequence comes first."
    way = "use x.transpose(0, 1), or change batch_first"
    return Edit("batch_and_sequence_swapped", f"{what} {disagree}", changes, way, cost=0)


def _with_axes(masking: _Masking, cause: str, missing: int) -> Iterator[Edit]:
    """Yield a mask with the dimensions of size one that it lacks, behind its first one."""
    mask, scores = masking.mask, masking.scores
    if missing < 1 or first_clash(mask.shape, scores) is None:
        return
    seen = set()
    for place in range(1, len(mask.shape)):
        with_axes = (*mask.shape[:place], *[1] * missing, *mask.shape[place:])
        if first_clash(with_axes, scores) is not None or with_axes in seen:
            continue
        seen.add(with_axes)
        lacks = "an axis" if missing == 1 else f"{missing} axes"
        if masking.operand is not None and len(with_axes) == len(scores):
            lacks = f"an axis for {text.listed([masking.operand.axis(at) for at in range(place, place + missing)])}"
        what = f"{mask.is_shape}, and the scores are {text.shape(scores)}: {mask.name} lacks {lacks}."
        index = (*[_WHOLE] * place, *[None] * missing)
        note = f"for {text.shape(scores)}"
        yield masking.edit(cause, what, ("__getitem__", index), cost=1, note=note)


def _for_layer(facts: Facts, masking: _Masking, heads: int) -> Iterator[Edit]:
    """Yield a mask as nn.MultiheadAttention takes it: `query key`, or `(batch heads) query key`."""
    mask, pairs = masking.mask, masking.scores[-2:]
    batch = masking.scores[0] // heads
    wanted = f"the layer expects {text.shape(pairs)} or {text.shape(masking.scores)}, batch·heads first."
    what = f"{mask.is_shape}; {wanted}"
    if mask.shape == (batch, heads, *pairs):
        yield masking.edit("mask_rank", what, ("flatten", 0, 1), cost=1)
    elif mask.shape == (batch, *pairs):
        what = f"{mask.is_shape}, one for each batch item; {wanted}"
        yield masking.edit("mask_rank", what, ("repeat_interleave", heads, 0), cost=1)
    elif mask.shape == (batch, pairs[1]):
        yield from as_padding(facts, mask, f"{mask.is_shape}, batch key; {wanted}")


# -- sizes ------------------------------------------------------------------------------------------------------------


def _sizes(facts: Facts, masking: _Masking) -> Iterator[Edit]:
    """Yield a mask for other numbers of queries or keys, cut or made anew."""
    query, key = masking.scores[-2:]
    rows, columns = masking.rows, masking.columns
    if rows in (1, query) and columns in (1, key):
        return
    if not _is_mask(masking) or _is_flattened(masking):
        return
    yield _of_other_size(facts, masking)


def _of_other_size(facts: Facts, masking: _Masking) -> Edit:
    """Return the edit of a mask for other numbers of queries or keys."""
    query, key = masking.scores[-2:]
    rows, columns = masking.rows, masking.columns
    covers = f"{columns} keys" if rows == 1 else f"query {rows}, key {columns}"
    expected = f"expected query {query}, key {key} for scores {text.shape(masking.scores)}"
    what = f"{masking.mask.name} covers {covers}; {expected}."
    source = _SourceOfKeys.of(facts)
    other = _of_another_input(facts, masking)
    if other and query == key < columns:
        return Edit("mask_size", f"{what} {other} has {columns}.", cost=9)
    if columns > key and source.has_size(columns) and not source.has_size(key):
        # The module has cut, pooled or projected the keys, and the mask is for those before.
        return Edit("mask_size", f"{what} The keys come from an input of {columns}.", cost=9)
    if query != key and columns == query:
        # Its columns are the queries: cutting them to the number of keys would mask other keys.
        return _of_keys(masking, what, source)
    if query < key and source.has_queries and rows > 1:
        return _of_cached_keys(masking, what)
    has_rows = rows in (1, query) or (query == key and rows >= query)
    if has_rows and columns >= key:
        return _cut_to_call(masking, what)
    return _made_anew(masking, what)


def _of_keys(masking: _Masking, what: str, source: _SourceOfKeys) -> Edit:
    """Return the edit for a mask whose columns are the queries; only said if the input of the keys is unknown."""
    query, key = masking.scores[-2:]
    if not source.name:
        return Edit("mask_size", what, cost=9)
    of_keys = f"give a mask of the {key} keys of this product, which come from {source.name}"
    way = f"{of_keys}: {query} is the number of queries"
    if masking.rows == masking.columns:
        way = f"{of_keys}, or none: this one is of the {query} queries with themselves"
    return masking.edit("mask_size", what, masking.anew, way=way, cost=9)


def _of_cached_keys(masking: _Masking, what: str) -> Edit:
    """Return the edit for a causal mask beside keys of which the last are those of the queries.

    A query sees the keys before it, so its row is that of its position among the keys: not one of the first.
    """
    mask, (query, key) = masking.mask, masking.scores[-2:]
    is_square = masking.rows == masking.columns >= key
    if not is_square or not _is_triangular(mask.given.value):
        return Edit("mask_size", what, cost=9)
    last = ("__getitem__", (..., slice(key - query, key), slice(None, key)))
    way = f"take the rows of the last {query} of {key} positions"
    if mask.is_code:
        way = f"{way}: {Change(mask, (last,)).code}"
    return masking.edit("mask_size", what, last, way=way, cost=5)


_LOW = -1e3
"""Numbers below it hide a key when they are added to scores."""


def _is_mask(masking: _Masking) -> bool:
    """Return whether the numbers of a tensor show that it is a mask, or its sizes that it is for pairs of tokens.

    What scales heads, a residual, and a bias of each head are no masks.
    """
    mask, operand = masking.mask, masking.operand
    if operand is not None and any(called(name) == "head_dim" for dim in operand.dims[-2:] for name in dim):
        return False  # an earlier product is wrong: these are no scores
    numbers = mask.given.value
    is_square = len(mask.shape) > 1 and masking.rows == masking.columns
    if numbers.dtype == torch.bool or is_square:
        return True
    if mask.is_table and masking.rows > 1 and mask.is_learned:
        return False
    if not is_readable(numbers) or not numbers.numel():
        return True
    return is_of_two(numbers) or bool(numbers.min() < _LOW) or _is_of_keys(masking)


def _is_of_keys(masking: _Masking) -> bool:
    """Return whether a tensor that is added has one row of more than one number: a number for each key."""
    return masking.rows == 1 and masking.columns > 1 and masking.is_added


def _is_flattened(masking: _Masking) -> bool:
    """Return whether the only dimension of a mask is that of all keys of the batch."""
    return len(masking.mask.shape) == 1 and masking.columns == masking.scores[0] * masking.scores[-1]


def _is_triangular(mask: Tensor) -> bool:
    """Return whether a mask hides the later keys of each query alone: all that is above its diagonal, and no more."""
    if not is_readable(mask):
        return False
    above = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    values = mask.to(torch.float32)
    hidden, shown = values[..., above], values[..., ~above]
    if not hidden.numel():
        return False
    is_of_one_value = bool((hidden == hidden.flatten()[0]).all()) and bool((shown == shown.flatten()[0]).all())
    return is_of_one_value and bool(hidden.flatten()[0] != shown.flatten()[0])


def _of_another_input(facts: Facts, masking: _Masking) -> str:
    """Return an input of the forward that the queries are not made of, and that is as long as the mask; or nothing."""
    query = facts.given("query")
    if query is None or facts.attention is None or masking.rows not in (1, masking.columns):
        return ""
    graph = facts.reached.graph
    behind = {source.id for source in behind_of(graph, query.given.tensor)}
    masks = {masking.mask.given.tensor.id}
    for named in graph.recording.inputs:
        if named.tensor.id in behind or named.tensor.id in masks or len(named.tensor.shape) < 2:
            continue
        if masking.columns in named.tensor.shape[:2] and named.tensor.shape != masking.mask.shape:
            return named.name
    return ""


def _cut_to_call(masking: _Masking, what: str) -> Edit:
    """Return the edit that keeps the first rows and columns of a mask."""
    query, key = masking.scores[-2:]
    index: tuple[Any, ...] = (..., slice(None, query), slice(None, key))
    if len(masking.mask.shape) == 1:
        index = (slice(None, key),)
    cut = ("__getitem__", index)
    way = "cut the mask to the lengths of this call"
    if masking.mask.is_code:
        way = f"{way}: {Change(masking.mask, (cut,)).code}"
    return masking.edit("mask_size", what, cut, way=way, cost=5)


def _made_anew(masking: _Masking, what: str) -> Edit:
    """Return the edit for a mask that is too small: made by another line, or a table for fewer tokens."""
    mask, (query, key) = masking.mask, masking.scores[-2:]
    way = f"build the mask for query {query} and key {key}"
    if masking.rows < query or masking.columns < key:
        way += ", or pass fewer positions"
    if mask.is_table and masking.columns < key and query == key:
        what = f"{mask.is_shape}, made for {masking.columns} tokens, and this call has {key}."
        longer = f"make {mask.name} for {key} or more and cut it to the call: {mask.name}[..., :{query}, :{key}]"
        way = f"pass at most {masking.columns} tokens, e.g. --seq-len {masking.columns}, or {longer}"
    return masking.edit("mask_size", what, masking.anew, way=way, cost=9)


@dataclass(frozen=True)
class _SourceOfKeys:
    """The inputs of the module that the keys come from."""

    shapes: tuple[Shape, ...] = ()
    name: str = ""
    """The only one, if the queries do not come from it; else empty."""
    has_queries: bool = False
    """Whether the queries come from one of them too, as they do beside a cache of earlier keys."""

    def has_size(self, size: int) -> bool:
        """Return whether one of the inputs has a dimension of this size."""
        return any(size in shape for shape in self.shapes)

    @classmethod
    def of(cls, facts: Facts) -> _SourceOfKeys:
        """Return the inputs that the keys of the failing attention come from; none if its keys are unknown."""
        graph = facts.reached.graph
        query, key = facts.reached.stages.get("q_heads"), facts.reached.stages.get("k_heads")
        if facts.attention is not None or query is None or key is None:
            given = facts.given("query"), facts.given("key")
            query, key = (None if operand is None else operand.given.tensor for operand in given)
        if query is None or key is None:
            return cls()
        behind_query = {source.id for source in behind_of(graph, query)}
        behind_key = {source.id for source in behind_of(graph, key)}
        inputs = [named for named in graph.recording.inputs if named.tensor.id in behind_key]
        names = [named.name for named in inputs if named.tensor.id not in behind_query]
        shapes = tuple(named.tensor.shape for named in inputs)
        has_queries = len(names) < len(inputs)
        is_known = len(names) == 1 and not has_queries
        return cls(shapes, names[0] if is_known else "", has_queries)


# -- other operands ---------------------------------------------------------------------------------------------------


def _of_two(facts: Facts) -> Iterator[Edit]:
    """Yield the edits of two operands that are broadcast: an axis that one lacks, a mask or a table that is longer."""
    if facts.base not in BROADCASTS and facts.base not in LOGICAL:
        return
    if len(facts.operands) != 2:
        return
    fewer, more = sorted(facts.operands, key=lambda operand: len(operand.shape))
    if len(more.shape) > len(fewer.shape) and not _may_be_positions_of_batch(fewer, more):
        for edit in _with_axes(_Masking(fewer, more.shape, more), "lacks_an_axis", 1):
            what = f"{fewer.is_shape}; {more.text} has {len(more.shape)} dimensions: {fewer.name} lacks an axis."
            yield Edit(edit.cause, what, edit.changes, note=edit.note, shape=more.shape)
    yield from _swapped_beside(fewer, more)
    yield from _cut_to_other(facts, fewer, more)


def _may_be_positions_of_batch(table: Operand, other: Operand) -> bool:
    """Return whether the rows of a table would meet dimension 0 of an operand, which may be the batch."""
    if not table.is_table or len(table.shape) != 2 or other.dims[0][0] in SEQUENCES:
        return False
    return len(other.shape) == 3 and table.shape[0] == other.shape[0] != other.shape[1]


def _swapped_beside(left: Operand, right: Operand) -> Iterator[Edit]:
    """Yield `sequence batch embed` turned, beside an operand that has the batch first."""
    if len(left.shape) != 3 or right.shape != (left.shape[1], left.shape[0], left.shape[2]):
        return
    for behind, first in ((left, right), (right, left)):
        if first.dims[0] == ["batch"] and behind.dims[1] == ["batch"]:
            what = f"{behind.text}; {first.text}: the batch comes second in one and first in the other."
            change = Change(behind, (("transpose", 0, 1),))
            yield Edit("batch_and_sequence_swapped", what, (change,), shape=first.shape)


def _cut_to_other(facts: Facts, fewer: Operand, more: Operand) -> Iterator[Edit]:
    """Yield the first entries of a mask that is combined with another, or of a table for more features."""
    place = first_clash(fewer.shape, more.shape)
    if place is None or place < -2:
        return
    longer, shorter = (fewer, more) if fewer.shape[place] > more.shape[place] else (more, fewer)
    wanted, size = shorter.shape[place], longer.shape[place]
    rest = () if place == -1 else (_WHOLE,)
    first = Change(longer, (("__getitem__", (..., slice(None, wanted), *rest)),))
    last = Change(longer, (("__getitem__", (..., slice(-wanted, None), *rest)),))
    what = f"{longer.is_shape}, and {shorter.is_shape}:"
    if facts.base in LOGICAL:
        unit = "keys" if place == -1 else "queries"
        what = f"{what} one covers {size} {unit}, the other {wanted}."
        of_last = f"for the last {wanted} {unit}, as in a cache of the latest keys"
        yield Edit("mask_size", what, (last,), note=of_last, cost=5)
        yield Edit("mask_size", what, (first,), note=f"for the first {wanted}", cost=5)
    elif longer is fewer and place == -1 and longer.dtype != "bool" and not more.from_scores:
        if _is_torn(more):
            return  # an earlier line moved a part of the features: the table may be right
        what = f"{what} the table is for {size} features, and not for {wanted}."
        way = f"make {longer.variable} for {wanted} features"
        if _has_equal_halves(first.apply(longer.given.value)):
            way = f"{way}, or take {first.code}"
        yield Edit("table_size", what, (first,), way, cost=5)


def _is_torn(operand: Operand) -> bool:
    """Return whether a part of the axis of the last dimension is in another one: `(head_dim_1 heads) … head_dim_2`."""
    before = {called(name) for dim in operand.dims[:-1] for name in dim if not name.isdigit()}
    return any(called(name) in before for name in operand.dims[-1])


def _has_equal_halves(table: Tensor) -> bool:
    """Return whether a table of angles has each twice, as it has for all features of a head."""
    if table.shape[-1] % 2 or not is_readable(table):
        return False
    first, second = table.chunk(2, -1)
    return torch.equal(first, second)


def _scores_of_heads(facts: Facts) -> Iterator[Edit]:
    """Yield the edit of scores `batch query heads heads`, of queries and keys that were split but not transposed."""
    if facts.mask_and_scores is None:
        return
    _, scores = facts.mask_and_scores
    if len(scores.shape) != 4 or not all(dim[0] in HEADS for dim in scores.dims[-2:]):
        return
    batch, length, heads, _ = scores.shape
    shape = (batch, heads, length, length)
    what = f"{scores.text}: heads are multiplied with heads; queries and keys were split but not transposed."
    way = "use .transpose(1, 2) on q, k and v after the view that splits them: heads must come before the sequence"
    change = Change(scores, (("new_zeros", shape),))
    yield Edit("heads_not_transposed", what, (change,), way, cost=0, shape=shape)
