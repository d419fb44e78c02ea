"""Causes in a mask that does not fit the scores, `batch heads query key`: first its layout, then its sizes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ... import text
from ...graph.axis import resolve
from ...graph.dataflow import Graph
from ...record.ops import TensorRef
from .facts import HEADS, Facts, Operand, first_clash
from .padding_masks import as_padding
from .reached import SDPA, behind_of
from .sequences import extent_of, swapped
from .suspect import Shape, Suspect
from .tried import Edit, Fix, of_shape


@dataclass(frozen=True, eq=False)
class _Masking:
    """A mask, and the scores that it does not fit."""

    mask: Operand
    scores: Shape
    """`batch heads query key`, `(batch heads) query key` or `query key`."""
    result: Shape | None
    """The shape that masked scores must have; None if the call returns another tensor."""

    @property
    def query(self) -> int:
        """The number of queries."""
        return self.scores[-2]

    @property
    def key(self) -> int:
        """The number of keys."""
        return self.scores[-1]

    @property
    def rows(self) -> int:
        """The queries of the mask; 1 without a dimension for them."""
        return self.mask.shape[-2] if len(self.mask.shape) > 1 else 1

    @property
    def columns(self) -> int:
        """The keys of the mask."""
        return self.mask.shape[-1]

    def fix(self, way: str, edit: Edit) -> Fix:
        """Return the fix to edit the mask, which must give the shape of the scores."""
        return Fix(way, [(self.mask, edit)], self.result)


def _misfit(facts: Facts) -> _Masking | None:
    """Return the mask that does not fit its scores; None if every mask fits."""
    masking = _masking(facts)
    if masking is None or not masking.mask.shape or not 2 <= len(masking.scores) <= 4:
        return None
    fits = first_clash(masking.mask.shape, masking.scores) is None
    return None if fits and len(masking.mask.shape) <= len(masking.scores) else masking


def _masking(facts: Facts) -> _Masking | None:
    """Return the mask of the failing call with the scores that it is for."""
    mask, query, key = facts.given("attn_mask"), facts.given("query"), facts.given("key")
    if facts.mask_and_scores is not None:
        mask, scores = facts.mask_and_scores
        return _Masking(mask, scores.shape, result=scores.shape)
    if mask is None or query is None or key is None:
        return None
    if facts.attention is not None:
        extent = extent_of(facts, query)
        products = max(extent.batch, 1) * facts.attention.num_heads
        return _Masking(mask, (products, extent.length, extent_of(facts, key).length), result=None)
    if facts.base == SDPA and len(query.shape) > 1 and len(key.shape) > 1:
        return _Masking(mask, (*query.shape[:-1], key.shape[-2]), result=None)
    return None


# -- heads in the place of positions ----------------------------------------------------------------------------------


def scores_of_heads(facts: Facts) -> Suspect | None:
    """Judge scores `batch query heads heads`, of queries and keys that were split but not transposed."""
    if facts.mask_and_scores is None:
        return None
    scores = facts.mask_and_scores[1]
    if len(scores.shape) != 4 or not all(dim[0] in HEADS for dim in scores.dims[-2:]):
        return None
    batch, length, heads, _ = scores.shape
    way = "use .transpose(1, 2) on q, k and v after the view that splits them: heads must come before the sequence"
    right = (batch, heads, length, length)
    return Suspect(
        "heads_not_transposed",
        f"{scores.text}: heads are multiplied with heads; queries and keys were split but not transposed.",
        (Fix(way, [(scores, of_shape(right))], right),),
    )


# -- masks of keys ----------------------------------------------------------------------------------------------------


def padding_mask_size(facts: Facts) -> Suspect | None:
    """Judge the key_padding_mask of nn.MultiheadAttention, which is `batch key`."""
    padding, key = facts.given("key_padding_mask"), facts.given("key")
    if facts.attention is None or padding is None or key is None:
        return None
    extent = extent_of(facts, key)
    expected = (extent.batch, extent.length) if extent.batch else (extent.length,)
    if padding.shape == expected:
        return None
    what = f"{padding.is_shape}; expected batch key, {text.shape(expected)}, for key_padding_mask."
    way = f"build the mask for batch {extent.batch} and key {extent.length}"
    return Suspect("mask_size", what, (Fix(way, [(padding, of_shape(expected))]),))


# -- the layout of a mask ---------------------------------------------------------------------------------------------


def mask_rank(facts: Facts) -> Suspect | None:
    """Judge a mask that lacks dimensions of the scores, or has others: `batch key` for `batch heads query key`."""
    masking = _misfit(facts)
    if masking is None:
        return None
    if facts.attention is not None:
        return _rank_for_layer(facts, masking)
    layout = _layout_of(masking)
    if layout is None:
        return None
    what = f"{masking.mask.is_shape}, {layout.axes}, and the scores are {text.shape(masking.scores)}."
    return Suspect("mask_rank", what, (masking.fix(f"{masking.mask.name}{layout.way}", layout.edit),))


def _rank_for_layer(facts: Facts, masking: _Masking) -> Suspect | None:
    """Judge a mask that nn.MultiheadAttention takes as `query key`, or as `(batch heads) query key`."""
    layer, query = facts.attention, facts.given("query")
    assert layer is not None
    assert query is not None
    mask, heads, batch = masking.mask, layer.num_heads, extent_of(facts, query).batch
    pairs = (masking.query, masking.key)
    wanted = f"{text.shape(pairs)} or {text.shape(masking.scores)}, batch·heads first"
    if mask.shape in ((batch, heads, *pairs), (batch, 1, *pairs)):
        expand = "" if mask.shape[1] == heads else f".expand(-1, {heads}, -1, -1)"
        flat = [(mask, lambda tensor: tensor.expand(-1, heads, -1, -1).flatten(0, 1))]
        fix = Fix(f"{mask.name}{expand}.flatten(0, 1)", flat)
        return Suspect("mask_rank", f"{mask.is_shape}; the layer expects {wanted}.", (fix,))
    if mask.shape == (batch, *pairs):
        of_heads = [(mask, lambda tensor: tensor.repeat_interleave(heads, dim=0))]
        fix = Fix(f"{mask.name}.repeat_interleave({heads}, dim=0)", of_heads)
        what = f"{mask.is_shape}, one for each batch item; the layer expects {wanted}."
        return Suspect("mask_rank", what, (fix,))
    if mask.shape == (batch, masking.key):
        what = f"{mask.is_shape}, batch key; expected attn_mask {wanted}."
        return Suspect("mask_rank", what, (as_padding(facts, mask),))
    return None


@dataclass(frozen=True)
class _Layout:
    """The axes of a mask, and how to give it those of the scores."""

    axes: str
    way: str
    """What to write behind its name."""
    edit: Edit


def _layout_of(masking: _Masking) -> _Layout | None:
    """Return the layout that the sizes of a mask show: `batch key` for the scores `batch heads query key`.

    With one head or one query several layouts have the same shape; the one with most axes is taken.
    """
    shape = masking.mask.shape
    if len(masking.scores) == 3:
        batch, _, key = masking.scores
        if shape != (batch, key):
            return None
        way = "[:, None, :]: add a dimension for the queries"
        return _Layout("batch key", way, lambda tensor: tensor[:, None, :])
    if len(masking.scores) != 4:
        return None
    batch, heads, query, key = masking.scores
    for_heads = "[:, None]: add a dimension for the heads"
    if shape == (batch * heads, query, key):
        way = f".view({batch}, {heads}, {query}, {key}): give the heads their own dimension"
        return _Layout("(batch heads) query key", way, lambda tensor: tensor.view(batch, heads, query, key))
    if shape == (batch, 1, key):
        return _Layout("batch 1 key", for_heads, lambda tensor: tensor[:, None])
    if shape == (batch, query, key):
        return _Layout("batch query key", for_heads, lambda tensor: tensor[:, None])
    if shape == (batch, key):
        way = "[:, None, None, :]: add dimensions for heads and queries"
        return _Layout("batch key", way, lambda tensor: tensor[:, None, None, :])
    if shape == (key, batch):
        way = ".T[:, None, None, :]: batch first, then heads and queries"
        return _Layout("key batch", way, lambda tensor: tensor.T[:, None, None, :])
    return None


def mask_transposed(facts: Facts) -> Suspect | None:
    """Judge a mask `key query`."""
    masking = _misfit(facts)
    if masking is None:
        return None
    mask, query, key = masking.mask, masking.query, masking.key
    if mask.shape[-2:] != (key, query) or key == query:
        return None
    over = f"and the scores are {text.shape(masking.scores)}"
    what = f"{mask.is_shape}, with key {key} before query {query}, {over}."
    turned = masking.fix(f"{mask.name}.transpose(-2, -1)", lambda tensor: tensor.transpose(-2, -1))
    return Suspect("mask_transposed", what, (turned,))


def mask_of_the_batch(facts: Facts) -> Suspect | None:
    """Judge a mask `query key` whose sizes are those of dimension 0, which is taken as the batch."""
    masking = _misfit(facts)
    if masking is None or len(masking.scores) < 3:
        return None
    mask, scores = masking.mask, masking.scores
    if mask.shape != (scores[0], scores[0]) or scores[0] in (masking.query, masking.key):
        return None
    edits = swapped(facts)
    if not edits and len(scores) == 4 and facts.mask_and_scores is not None:
        right = (masking.query, scores[1], scores[0], scores[0])
        edits = [(facts.mask_and_scores[1], of_shape(right))]
    return Suspect(
        "batch_and_sequence_swapped",
        f"{mask.is_shape}, and the scores are {text.shape(scores)}: it fits dimension 0, which is taken as the batch. "
        "The input and the layer disagree on whether batch or sequence comes first.",
        (Fix("use x.transpose(0, 1), or change batch_first", edits),) if edits else (),
    )


# -- the sizes of a mask ----------------------------------------------------------------------------------------------


def mask_size(facts: Facts) -> Suspect | None:
    """Judge a mask for other numbers of queries or keys."""
    masking = _misfit(facts)
    if masking is None:
        return None
    query, key, rows, columns = masking.query, masking.key, masking.rows, masking.columns
    if rows in (1, query) and columns in (1, key):
        return None
    covers = f"{columns} keys" if rows == 1 else f"query {rows}, key {columns}"
    expected = f"query {query}, key {key} for scores {text.shape(masking.scores)}"
    what = f"{masking.mask.name} covers {covers}; expected {expected}."
    projection = _projection_of_keys(facts, key, columns)
    if projection:
        what += f" {projection} projected the {columns} keys to {key}: apply a mask of keys before it."
    fix = _mask_of_right_size(facts, masking)
    return Suspect("mask_size", what, () if fix is None else (fix,))


def _mask_of_right_size(facts: Facts, masking: _Masking) -> Fix | None:
    """Return how to give a mask the sizes of the scores; None if it is unknown which entries are the right ones."""
    mask, query, key, rows, columns = masking.mask, masking.query, masking.key, masking.rows, masking.columns
    build = of_shape((*mask.shape[:-2], 1 if rows == 1 else query, key))
    source = _source_of_keys(facts)
    if columns > key and source.has_size(columns) and not source.has_size(key):
        return None  # the module has cut, pooled or projected the keys, and the mask is for those before
    if columns == query != key:
        # Its columns are the queries: cutting them to the number of keys would mask other keys.
        if not source.name:
            return None
        way = f"give a mask of the {key} keys of this product, which come from {source.name}"
        return masking.fix(f"{way}: {columns} is the number of queries", build)
    # With fewer queries than keys, the queries may be the last positions: which rows are right is unknown.
    rows_are_first = rows in (1, query) or (query == key and rows >= query)
    if rows_are_first and columns >= key:
        cut = f"[..., :{query}, :{key}]" if len(mask.shape) > 1 else f"[:{key}]"
        way = f"cut the mask to the lengths of this call: {mask.name}{cut}"
        return masking.fix(way, lambda tensor: _first_entries(tensor, query, key))
    fewer = ", or pass fewer positions" if rows < query or columns < key else ""
    return masking.fix(f"build the mask for query {query} and key {key}{fewer}", build)


def _first_entries(mask: Tensor, query: int, key: int) -> Tensor:
    """Return the first entries of a mask: `… query key`, or `key`."""
    return mask[..., :query, :key] if mask.dim() > 1 else mask[:key]


@dataclass(frozen=True)
class _SourceOfKeys:
    """The inputs of the module that the keys come from."""

    shapes: tuple[Shape, ...] = ()
    name: str = ""
    """The only one that the queries do not come from; empty if there are none or several."""

    def has_size(self, size: int) -> bool:
        """Return whether one of the inputs has a dimension of this size."""
        return any(size in shape for shape in self.shapes)


def _source_of_keys(facts: Facts) -> _SourceOfKeys:
    """Return the inputs that the keys of the failing attention come from; none if its keys are unknown."""
    graph = facts.reached.graph
    factors = _query_and_key(facts)
    if factors is None:
        return _SourceOfKeys()
    of_query, of_key = (_ids_behind(graph, factor) for factor in factors)
    inputs = [named for named in graph.recording.inputs if named.tensor.id in of_key]
    names = [named.name for named in inputs if named.tensor.id not in of_query]
    return _SourceOfKeys(tuple(named.tensor.shape for named in inputs), names[0] if len(names) == 1 else "")


def _ids_behind(graph: Graph, tensor: TensorRef) -> set[int]:
    return {source.id for source in behind_of(graph, tensor)}


def _query_and_key(facts: Facts) -> tuple[TensorRef, TensorRef] | None:
    """Return the factors of the scores: those of the product before them, or the operands of a call of both."""
    if facts.mask_and_scores is not None:
        scores = facts.mask_and_scores[1]
        for _, op in facts.reached.steps_back(scores.given.tensor):
            product = None if op is None else facts.reached.graph.product(op)
            if product is not None:
                return product.left, product.right
        return None
    query, key = facts.given("query"), facts.given("key")
    return None if query is None or key is None else (query.given.tensor, key.given.tensor)


def _projection_of_keys(facts: Facts, key: int, columns: int) -> str:
    """Return the module that projects this many keys to fewer, as in Linformer; empty if none does."""
    graph = facts.reached.graph
    if facts.mask_and_scores is None:
        return ""
    scores = facts.mask_and_scores[1]
    keys = set(resolve(graph.dimensions.of(scores.given.tensor)[-1]))
    for op in graph.recording.ops:
        if not graph.is_projection(op) or op.output.shape[-1:] != (key,):
            continue
        features = resolve(graph.dimensions.of(op.output)[-1])
        if graph.projected(op).shape[-1:] == (columns,) and not keys.isdisjoint(features):
            return op.module or "A projection"
    return ""
