"""Causes in a mask that does not fit the scores, `batch heads query key`: first its layout, then its sizes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .. import text
from ..graph.axis import resolve
from ..graph.dataflow import Graph
from ..record.ops import TensorRef
from .facts import HEADS, Facts, Operand, first_clash
from .padding_masks import as_padding
from .reached import SDPA, behind_of
from .sequences import extent_of, swapped
from .suspect import Shape, Suspect
from .tried import Edit, Fix, of_shape, transposed


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
        if len(self.mask.shape) == 1:
            return 1
        return self.mask.shape[-2]

    @property
    def columns(self) -> int:
        """The keys of the mask."""
        return self.mask.shape[-1]

    @property
    def expected(self) -> str:
        """`query 5, key 7 for scores [2, 4, 5, 7]`."""
        return f"query {self.query}, key {self.key} for scores {text.shape(self.scores)}"

    def fix(self, way: str, edit: Edit) -> Fix:
        """Return the fix to edit the mask, which must give the shape of the scores."""
        return Fix.editing(self.mask, edit, way, self.result)


def _misfit(facts: Facts) -> _Masking | None:
    """Return the mask that does not fit its scores; None if every mask fits."""
    masking = _masking(facts)
    if masking is None or not masking.mask.shape:
        return None
    if not 2 <= len(masking.scores) <= 4:
        return None
    if len(masking.mask.shape) > len(masking.scores):
        return masking
    if first_clash(masking.mask.shape, masking.scores) is None:
        return None
    return masking


def _masking(facts: Facts) -> _Masking | None:
    """Return the mask of the failing call with the scores that it is for."""
    if facts.mask_and_scores is not None:
        mask, scores = facts.mask_and_scores
        return _Masking(mask, scores.shape, result=scores.shape)
    given_mask = facts.given("attn_mask")
    query = facts.given("query")
    key = facts.given("key")
    if given_mask is None or query is None or key is None:
        return None
    if facts.attention is not None:
        of_query = extent_of(facts, query)
        of_key = extent_of(facts, key)
        products = max(of_query.batch, 1) * facts.attention.num_heads
        return _Masking(given_mask, (products, of_query.length, of_key.length), result=None)
    if facts.base != SDPA:
        return None
    if len(query.shape) < 2 or len(key.shape) < 2:
        return None
    return _Masking(given_mask, (*query.shape[:-1], key.shape[-2]), result=None)


# -- heads in the place of positions ----------------------------------------------------------------------------------


def scores_of_heads(facts: Facts) -> Suspect | None:
    """Judge scores `batch query heads heads`, of queries and keys that were split but not transposed."""
    if facts.mask_and_scores is None:
        return None
    _, scores = facts.mask_and_scores
    if len(scores.shape) != 4:
        return None
    row, column = scores.dims[-2:]
    if row[0] not in HEADS or column[0] not in HEADS:
        return None
    batch, length, heads, _ = scores.shape
    right_shape = (batch, heads, length, length)
    fix = Fix.editing(
        scores,
        of_shape(right_shape),
        "use .transpose(1, 2) on q, k and v after the view that splits them: heads must come before the sequence",
        shape=right_shape,
    )
    return Suspect(
        "heads_not_transposed",
        f"{scores.text}: heads are multiplied with heads; queries and keys were split but not transposed.",
        (fix,),
    )


# -- masks of keys ----------------------------------------------------------------------------------------------------


def padding_mask_size(facts: Facts) -> Suspect | None:
    """Judge the key_padding_mask of nn.MultiheadAttention, which is `batch key`."""
    padding = facts.given("key_padding_mask")
    key = facts.given("key")
    if facts.attention is None or padding is None or key is None:
        return None
    extent = extent_of(facts, key)
    expected: Shape = (extent.batch, extent.length)
    if extent.batch == 0:
        expected = (extent.length,)
    if padding.shape == expected:
        return None
    fix = Fix.editing(
        padding,
        of_shape(expected),
        f"build the mask for batch {extent.batch} and key {extent.length}",
    )
    return Suspect(
        "mask_size",
        f"{padding.is_shape}; expected batch key, {text.shape(expected)}, for key_padding_mask.",
        (fix,),
    )


# -- the layout of a mask ---------------------------------------------------------------------------------------------


def mask_rank(facts: Facts) -> Suspect | None:
    """Judge a mask that lacks dimensions of the scores, or has others: `batch key` for `batch heads query key`."""
    masking = _misfit(facts)
    if masking is None:
        return None
    if facts.attention is not None:
        return _rank_for_layer(facts, facts.attention, masking)
    layout = _layout_of(masking)
    if layout is None:
        return None
    mask = masking.mask
    return Suspect(
        "mask_rank",
        f"{mask.is_shape}, {layout.axes}, and the scores are {text.shape(masking.scores)}.",
        (masking.fix(f"{mask.name}{layout.way}", layout.edit),),
    )


def _rank_for_layer(facts: Facts, layer: nn.MultiheadAttention, masking: _Masking) -> Suspect | None:
    """Judge a mask that nn.MultiheadAttention takes as `query key`, or as `(batch heads) query key`."""
    query = facts.given("query")
    assert query is not None
    mask = masking.mask
    heads = layer.num_heads
    batch = extent_of(facts, query).batch
    pairs = (masking.query, masking.key)
    wanted = f"{text.shape(pairs)} or {text.shape(masking.scores)}, batch·heads first"
    if mask.shape in ((batch, heads, *pairs), (batch, 1, *pairs)):
        return Suspect(
            "mask_rank",
            f"{mask.is_shape}; the layer expects {wanted}.",
            (_with_heads_in_batch(mask, heads),),
        )
    if mask.shape == (batch, *pairs):
        return Suspect(
            "mask_rank",
            f"{mask.is_shape}, one for each batch item; the layer expects {wanted}.",
            (_repeated_for_heads(mask, heads),),
        )
    if mask.shape == (batch, masking.key):
        return Suspect(
            "mask_rank",
            f"{mask.is_shape}, batch key; expected attn_mask {wanted}.",
            (as_padding(facts, mask),),
        )
    return None


def _with_heads_in_batch(mask: Operand, heads: int) -> Fix:
    """Return the fix from `batch heads query key`, or `batch 1 query key`, to `(batch heads) query key`."""
    expand = ""
    if mask.shape[1] != heads:
        expand = f".expand(-1, {heads}, -1, -1)"

    def flattened(tensor: Tensor) -> Tensor:
        by_head = tensor.expand(-1, heads, -1, -1)
        return by_head.flatten(0, 1)

    return Fix.editing(mask, flattened, f"{mask.name}{expand}.flatten(0, 1)")


def _repeated_for_heads(mask: Operand, heads: int) -> Fix:
    """Return the fix from `batch query key` to `(batch heads) query key`."""

    def repeated(tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(heads, dim=0)

    return Fix.editing(mask, repeated, f"{mask.name}.repeat_interleave({heads}, dim=0)")


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
    if len(masking.scores) == 3:
        return _layout_for_batches(masking)
    if len(masking.scores) == 4:
        return _layout_for_heads(masking)
    return None


def _layout_for_batches(masking: _Masking) -> _Layout | None:
    """Return the layout of a mask for the scores `batch query key`."""
    batch, _, key = masking.scores
    if masking.mask.shape != (batch, key):
        return None
    return _Layout(
        axes="batch key",
        way="[:, None, :]: add a dimension for the queries",
        edit=lambda tensor: tensor[:, None, :],
    )


def _layout_for_heads(masking: _Masking) -> _Layout | None:
    """Return the layout of a mask for the scores `batch heads query key`."""
    batch, heads, query, key = masking.scores
    shape = masking.mask.shape
    if shape == (batch * heads, query, key):
        return _Layout(
            axes="(batch heads) query key",
            way=f".view({batch}, {heads}, {query}, {key}): give the heads their own dimension",
            edit=lambda tensor: tensor.view(batch, heads, query, key),
        )
    if shape == (batch, 1, key):
        return _Layout(
            axes="batch 1 key",
            way="[:, None]: add a dimension for the heads",
            edit=lambda tensor: tensor[:, None],
        )
    if shape == (batch, query, key):
        return _Layout(
            axes="batch query key",
            way="[:, None]: add a dimension for the heads",
            edit=lambda tensor: tensor[:, None],
        )
    if shape == (batch, key):
        return _Layout(
            axes="batch key",
            way="[:, None, None, :]: add dimensions for heads and queries",
            edit=lambda tensor: tensor[:, None, None, :],
        )
    if shape == (key, batch):
        return _Layout(
            axes="key batch",
            way=".T[:, None, None, :]: batch first, then heads and queries",
            edit=lambda tensor: tensor.T[:, None, None, :],
        )
    return None


def mask_transposed(facts: Facts) -> Suspect | None:
    """Judge a mask `key query`."""
    masking = _misfit(facts)
    if masking is None:
        return None
    mask = masking.mask
    query = masking.query
    key = masking.key
    if key == query or mask.shape[-2:] != (key, query):
        return None
    scores = text.shape(masking.scores)
    return Suspect(
        "mask_transposed",
        f"{mask.is_shape}, with key {key} before query {query}, and the scores are {scores}.",
        (masking.fix(f"{mask.name}.transpose(-2, -1)", transposed(-2, -1)),),
    )


def mask_of_the_batch(facts: Facts) -> Suspect | None:
    """Judge a mask `query key` whose sizes are those of dimension 0, which is taken as the batch."""
    masking = _misfit(facts)
    if masking is None or len(masking.scores) < 3:
        return None
    mask = masking.mask
    scores = masking.scores
    first = scores[0]
    if mask.shape != (first, first):
        return None
    if first in (masking.query, masking.key):
        return None
    edits = swapped(facts)
    if not edits and len(scores) == 4 and facts.mask_and_scores is not None:
        _, operand = facts.mask_and_scores
        right_shape = (masking.query, scores[1], first, first)
        edits = [(operand, of_shape(right_shape))]
    fixes: tuple[Fix, ...] = ()
    if edits:
        fixes = (Fix("use x.transpose(0, 1), or change batch_first", edits),)
    return Suspect(
        "batch_and_sequence_swapped",
        f"{mask.is_shape}, and the scores are {text.shape(scores)}: it fits dimension 0, which is taken as the batch. "
        "The input and the layer disagree on whether batch or sequence comes first.",
        fixes,
    )


# -- the sizes of a mask ----------------------------------------------------------------------------------------------


def mask_size(facts: Facts) -> Suspect | None:
    """Judge a mask for other numbers of queries or keys."""
    masking = _misfit(facts)
    if masking is None:
        return None
    if masking.rows in (1, masking.query) and masking.columns in (1, masking.key):
        return None
    covers = f"query {masking.rows}, key {masking.columns}"
    if masking.rows == 1:
        covers = f"{masking.columns} keys"
    what = f"{masking.mask.name} covers {covers}; expected {masking.expected}."
    projection = _projection_of_keys(facts, masking.key, masking.columns)
    if projection:
        projected = f"{projection} projected the {masking.columns} keys to {masking.key}"
        what += f" {projected}: apply a mask of keys before it."
    fix = _mask_of_right_size(facts, masking)
    if fix is None:
        return Suspect("mask_size", what)
    return Suspect("mask_size", what, (fix,))


def _mask_of_right_size(facts: Facts, masking: _Masking) -> Fix | None:
    """Return how to give a mask the sizes of the scores; None if it is unknown which entries are the right ones."""
    query = masking.query
    key = masking.key
    source = _source_of_keys(facts)
    has_more_keys = masking.columns > key
    if has_more_keys and source.has_size(masking.columns) and not source.has_size(key):
        return None  # the module has cut, pooled or projected the keys, and the mask is for those before
    if query != key and masking.columns == query:
        # Its columns are the queries: cutting them to the number of keys would mask other keys.
        if not source.name:
            return None
        of_keys = f"give a mask of the {key} keys of this product, which come from {source.name}"
        return masking.fix(f"{of_keys}: {query} is the number of queries", _new_mask(masking))
    if _has_first_rows(masking) and masking.columns >= key:
        return _cut_to_lengths(masking)
    way = f"build the mask for query {query} and key {key}"
    if masking.rows < query or masking.columns < key:
        way += ", or pass fewer positions"
    return masking.fix(way, _new_mask(masking))


def _has_first_rows(masking: _Masking) -> bool:
    """Return whether the first rows of a mask are those of the queries.

    With fewer queries than keys, the queries may be the last positions: which rows are right is unknown.
    """
    if masking.rows in (1, masking.query):
        return True
    return masking.query == masking.key and masking.rows >= masking.query


def _cut_to_lengths(masking: _Masking) -> Fix:
    """Return the fix to keep the first rows and columns of a mask."""
    query = masking.query
    key = masking.key
    index = f"[..., :{query}, :{key}]"
    if len(masking.mask.shape) == 1:
        index = f"[:{key}]"
    return masking.fix(
        f"cut the mask to the lengths of this call: {masking.mask.name}{index}",
        lambda tensor: _first_entries(tensor, query, key),
    )


def _new_mask(masking: _Masking) -> Edit:
    """Return the edit that makes a mask of the sizes of the scores; with one row, if it has one for all queries."""
    rows = masking.query
    if masking.rows == 1:
        rows = 1
    return of_shape((*masking.mask.shape[:-2], rows, masking.key))


def _first_entries(mask: Tensor, query: int, key: int) -> Tensor:
    """Return the first entries of a mask: `… query key`, or `key`."""
    if mask.dim() == 1:
        return mask[:key]
    return mask[..., :query, :key]


@dataclass(frozen=True, eq=False)
class _Factors:
    """The factors of the scores."""

    query: TensorRef
    key: TensorRef


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
    factors = _factors(facts)
    if factors is None:
        return _SourceOfKeys()
    behind_query = _ids_behind(graph, factors.query)
    behind_key = _ids_behind(graph, factors.key)
    shapes = []
    names = []
    for named in graph.recording.inputs:
        if named.tensor.id not in behind_key:
            continue
        shapes.append(named.tensor.shape)
        if named.tensor.id not in behind_query:
            names.append(named.name)
    if len(names) != 1:
        return _SourceOfKeys(tuple(shapes))
    return _SourceOfKeys(tuple(shapes), names[0])


def _factors(facts: Facts) -> _Factors | None:
    """Return the factors of the scores: those of the product before them, or the operands of a call of both."""
    if facts.mask_and_scores is not None:
        _, scores = facts.mask_and_scores
        return _factors_of_product(facts, scores)
    query = facts.given("query")
    key = facts.given("key")
    if query is None or key is None:
        return None
    return _Factors(query.given.tensor, key.given.tensor)


def _factors_of_product(facts: Facts, scores: Operand) -> _Factors | None:
    """Return the factors of the last product before the scores; None without one."""
    for _, op in facts.reached.steps_back(scores.given.tensor):
        if op is None:
            continue
        product = facts.reached.graph.product(op)
        if product is not None:
            return _Factors(product.left, product.right)
    return None


def _ids_behind(graph: Graph, tensor: TensorRef) -> set[int]:
    return {source.id for source in behind_of(graph, tensor)}


def _projection_of_keys(facts: Facts, key: int, columns: int) -> str:
    """Return the module that projects this many keys to fewer, as in Linformer; empty if none does."""
    graph = facts.reached.graph
    if facts.mask_and_scores is None:
        return ""
    _, scores = facts.mask_and_scores
    *_, key_dim = graph.dimensions.of(scores.given.tensor)
    keys = set(resolve(key_dim))
    for op in graph.recording.ops:
        if not graph.is_projection(op):
            continue
        if op.output.shape[-1:] != (key,) or graph.projected(op).shape[-1:] != (columns,):
            continue
        *_, features = graph.dimensions.of(op.output)
        if not keys.isdisjoint(resolve(features)):
            return op.module or "A projection"
    return ""
