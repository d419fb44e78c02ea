"""Common mistakes behind failing calls, found from the operands and never guessed from a name.

To add one, name it in `CAUSES` and yield a `Cause` from one of the functions here: what is wrong, with the real
numbers, and what to write instead. The functions run in order, and the first cause is reported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from math import prod

from ... import text
from ...record.ops import TensorRef
from ...reports.trace import Cause
from .facts import BROADCASTS, CONVOLUTIONS, HEADS, SEQUENCES, VIEWS, Facts, Operand, first_clash
from .reached import ATTENTION, LAYERS, SDPA

CAUSES = (
    *("argument_is_none", "index_out_of_range", "wrong_rank", "no_room", "cut_over_ranks"),
    *("mixed_devices", "mask_dtype", "mixed_dtypes", "heads_not_joined", "weight_not_transposed", "features_not_last"),
    *("wrong_width", "batch_and_sequence_swapped", "batch_differs", "lengths_differ", "mask_rank"),
    *("heads_not_transposed", "mask_transposed", "mask_size", "heads_not_split", "key_not_transposed"),
    *("heads_not_repeated", "head_dim_differs", "not_contiguous", "heads_do_not_divide", "wrong_head_dim"),
)
"""The name of each cause."""

_UNPACKED = r"values to unpack \(expected (?:at least )?(\d+)"
Shape = tuple[int, ...]

_SAME_EXAMPLES = "Both must have the same batch size; use .expand on the batch dimension to share one item."
_SAME_SEQUENCE = "Keys and values must come from the same sequence."


def find_cause(facts: Facts) -> Cause | None:
    """Return the first cause that the facts show; None if there is none."""
    judges = (_arguments, _tables, _kinds, _widths, _sequences, _masks, _products, _views, _einops)
    return next(chain.from_iterable(judge(facts) for judge in judges), None)


def _arguments(facts: Facts) -> Iterator[Cause]:
    """Judge an argument that is None, and the rank of one whose shape is unpacked, or of a convolution's input."""
    x, weight, said = facts.given("input"), facts.given("weight"), re.findall(_UNPACKED, facts.message)
    for o in facts.operands if said and facts.unpacks_shape and len(facts.operands) == 1 else ():
        if (rank := int(said[0])) != len(o.shape):
            what = f"{o.is_shape}, {text.plural(len(o.shape), 'dimension')}; this line expects {rank}."
            add = f", e.g. {o.name}[None] for a batch of one" * (rank == len(o.shape) + 1)
            yield Cause("wrong_rank", what, f"Give {o.name} {rank} dimensions{add}.")
    for name in facts.missing if facts.error in ("TypeError", "AttributeError") else ():
        yield Cause(
            "argument_is_none",
            f"{name} is None, and this line uses it as a tensor.",
            f"Pass {name}, e.g. trace TARGET --input-shape {name}=SIZES:DTYPE, or skip this line if {name} is None.",
        )
    if x is None or weight is None or not x.given.value.numel() or x.given.value.is_meta:
        return
    rank = len(weight.shape) - 1
    if facts.base in CONVOLUTIONS and len(x.shape) not in (rank, rank + 1):
        layout = "batch channels " + ("length", "height width", "depth height width")[rank - 2]
        what = f"{x.is_shape}, {len(x.shape)} dimensions; {facts.base} expects {rank + 1}: {layout}."
        yield Cause("wrong_rank", what, f"Give {x.name} {rank + 1} dimensions, channels second.")


def _tables(facts: Facts) -> Iterator[Cause]:
    """Judge what does not fit into a table or a cache: ids and positions that it lacks, more tokens than it has."""
    table = facts.given("weight") if facts.base == "embedding" else next(iter(facts.operands), None)
    ids = next((o for o in facts.operands if _is_whole(o) and o is not table), None)
    said = re.search(r"out of bounds for dimension \d+ with size (\d+)", facts.message)
    size = table.shape[0] if table and facts.base == "embedding" else int(said[1]) if said else 0
    if table is not None and ids is not None and size and ids.given.value.numel() and not ids.given.value.is_meta:
        first, last = (int(bound) for bound in ids.given.value.aminmax())
        what = f"{ids.name} has numbers from {first} to {last}; {table.is_shape}: 0 to {size - 1} are in range."
        way = f"Use numbers below {size}, or make {table.name} for {last + 1}."
        if first < 0:
            way = "Replace ids below 0, e.g. by the padding id: .clamp(min=0)."
        if first < 0 or last >= size:
            yield Cause("index_out_of_range", what, way)
    for place, (cache, room, other) in ((first_clash(room[1], room[2].shape), room) for room in _rooms(facts)):
        if place is not None and room[place] < other.shape[place]:
            needs, where = cache.shape[place] - room[place] + other.shape[place], len(cache.shape) + place
            what = f"{other.is_shape}; {cache.is_shape}, with room for {room[place]} in dimension {where}."
            yield Cause("no_room", what, f"Make dimension {where} of {cache.name} {needs} or more, or pass less.")


def _rooms(facts: Facts) -> Iterator[tuple[Operand, tuple[int, ...], Operand]]:
    """Yield a cache or a table, the shape of the part that is written or added, and the other operand."""
    if len(facts.operands) != 2 or any(o.from_scores for o in facts.operands):
        return
    table, other = facts.operands
    if facts.base == "setitem" and facts.call.args[2] is other.given.value:
        with suppress(IndexError, TypeError):  # the index itself may be wrong
            yield table, tuple(table.given.value[facts.call.args[1]].shape), other
    elif facts.base in BROADCASTS:
        for own, given in ((table, other), (other, table)):
            if own.is_table and not given.is_table and own.shape[-1:] == given.shape[-1:]:
                yield own, own.shape, given


def _kinds(facts: Facts) -> Iterator[Cause]:
    """Judge devices, then the dtypes of masks, then other dtypes."""
    if facts.mixes_devices:
        odd, usual = _odd_one(facts, "device")
        yield Cause(
            "mixed_devices",
            f"{odd.name} is on {odd.device}; the other tensors are on {usual}.",
            f"Use .to({usual!r}) on the tensor, or move the module and its inputs to one device. Create tensors inside "
            "the module with device=x.device or register_buffer.",
        )
    mask, rule = facts.given("attn_mask"), ""
    if facts.base in LAYERS:
        masks = [o for o in (facts.given("key_padding_mask"), mask) if o is not None and _is_whole(o)]
        if masks:
            mask = masks[0]
            rule = "The layer expects a boolean mask (True masks a key out) or a floating one (added to the scores)."
    elif facts.base == "masked_fill" and "boolean mask" in facts.message and len(facts.operands) > 1:
        mask, rule = facts.operands[1], "masked_fill takes a boolean mask (True masks a key out)."
    if mask is not None and rule:
        way = f"{mask.name} == 0 if 0 means masked out, or {mask.name}.bool() if 1 does."
        yield Cause("mask_dtype", f"{mask.name} is {mask.dtype}. {rule}", way)
    if not facts.mixes_dtypes:
        return
    odd, usual = _odd_one(facts, "dtype")
    if odd is mask:
        yield Cause(
            "mask_dtype",
            f"{odd.name} is {odd.dtype} and the queries are {usual}. A mask must be boolean (True keeps a key) or have "
            "the dtype of the queries (added to the scores).",
            f"{odd.name}.bool() or {odd.name}.to(torch.{usual}).",
        )
    x = facts.given("input")
    if x is not None and _is_whole(x):
        way = "Pass token ids through nn.Embedding first; convert numbers with .float()."
        yield Cause("mixed_dtypes", f"{x.name} is {x.dtype}: integers, as token ids are.", way)
    yield Cause(
        "mixed_dtypes",
        f"{odd.name} is {odd.dtype}; the other tensors are {usual}.",
        f"Use {odd.name}.to(torch.{usual}), or convert the module with .to(torch.{odd.dtype}). "
        "Alternatively, run under torch.autocast.",
    )


def _is_whole(operand: Operand) -> bool:
    return operand.dtype.startswith(("int", "uint"))


def _odd_one(facts: Facts, what: str) -> tuple[Operand, str]:
    """Return the operand that differs from the majority, and the value of the majority; parameters count twice."""
    votes = Counter[str]()
    for operand in facts.operands:
        votes[getattr(operand, what)] += 2 if operand.is_parameter else 1
    usual = max(votes, key=votes.__getitem__)
    return next(o for o in facts.operands if getattr(o, what) != usual), usual


def _widths(facts: Facts) -> Iterator[Cause]:
    """Judge an input whose number of features does not fit its layer."""
    inputs: list[tuple[Operand | None, int, Operand | None]] = []  # input, features that its layer takes, weight
    if (layer := facts.attention) is not None:
        takes = {"query": layer.embed_dim, "key": layer.kdim, "value": layer.vdim}
        inputs = [(facts.given(role), width, None) for role, width in takes.items()]
    elif facts.base in ("linear", "layer_norm") and len(facts.operands) >= 2 and facts.given("input") is not None:
        scale = facts.operands[1 if facts.base == "linear" else -1]
        inputs = [(facts.operands[0], scale.shape[-1] if scale.shape else 0, scale)]
    elif facts.pair is not None and facts.pair[1].is_parameter and len(facts.pair[1].shape) == 2:
        inputs = [(facts.pair[0], facts.pair[1].shape[0], facts.pair[1])]
    for x, takes_in, weight in inputs:
        if x is not None and x.shape and takes_in and x.shape[-1] != takes_in:
            if layer is None:
                yield from _unjoined(x, takes_in)
            yield from _width(facts, x, takes_in, weight)


def _width(facts: Facts, x: Operand, takes: int, weight: Operand | None) -> Iterator[Cause]:
    has = x.shape[-1]
    if weight is not None and facts.pair is not None and weight.shape[-1] == has:
        yield Cause(
            "weight_not_transposed",
            f"{weight.is_shape}, (out_features, in_features) as in nn.Linear; {x.name} has {has} features.",
            f"{x.name} @ {weight.name}.T, or call the layer.",
        )
    places = [place for place, size in enumerate(x.shape[:-1]) if size == takes]
    if len(places) == 1 and len(x.shape) >= 3:
        yield Cause(
            "features_not_last",
            f"{x.name} has its {takes} features in dimension {places[0]}; the layer expects them last.",
            f"{x.name}.transpose({places[0]}, -1).",
        )
    if weight is None:
        setting = {"query": "embed_dim", "key": "kdim", "value": "vdim"}[x.role]
        what, make = f"the layer expects {takes} for {x.role} ({setting})", f"with {setting}={has}"
    else:
        what = f"{weight.name} expects {takes}"
        make = f"with in_features {has}" if facts.base == "linear" else f"for {has}"
    way = f"Create the layer {make}, or give {x.name} {takes} features."
    yield Cause("wrong_width", f"{x.name} has {has} features; {what}.", way)


def _unjoined(x: Operand, takes: int) -> Iterator[Cause]:
    """Judge an input whose heads would fit the layer if they were concatenated."""
    heads, features = x.place(*HEADS), x.place("head_dim")
    if heads is None and len(x.shape) >= 4 and x.shape[-1] * x.shape[-2] == takes:
        yield Cause(
            "heads_not_joined",
            f"{x.name} ends in {x.axis(-2)} and {x.axis(-1)}; the layer expects one dimension of {takes}.",
            "Use torch.cat(heads, dim=-1), or .flatten(-2) with the heads just before their features.",
        )
    if heads not in (None, features) and features is not None and x.shape[heads] * x.shape[features] == takes:
        swap = "" if heads == len(x.shape) - 2 else ".transpose(1, 2)"
        yield Cause(
            "heads_not_joined",
            f"{x.name} still has {x.shape[heads]} heads of {x.shape[features]}; the layer expects them concatenated, "
            f"{x.shape[heads]}·{x.shape[features]} = {takes}.",
            f"{x.name}{swap}.flatten(-2): move heads after the sequence, then merge them with their features.",
        )


def _views(facts: Facts) -> Iterator[Cause]:
    """Judge a view that does not fit its tensor."""
    x, sizes = facts.operands[0] if facts.operands else None, facts.sizes_of_view
    if x is None or facts.base not in VIEWS:
        return
    if "stride" in facts.message and not x.given.value.is_contiguous():
        yield Cause(
            "not_contiguous",
            f"{x.name} is transposed: its elements in memory are not in the order that view() reads.",
            "Use .contiguous() before .view(...), or .reshape(...) instead.",
        )
    width = x.shape[-1] if x.shape else 0
    if len(sizes) == len(x.shape) + 1 and sizes[:-2] == x.shape[:-1]:
        heads, head_dim = sizes[-2:]
        whole = facts.cut.get(width, 0)
        if whole and (head_dim <= 0 or whole % head_dim == 0):
            way, inside = "Divide the number of heads by the number of ranks, or give -1.", ""
            if head_dim > 0 and width % head_dim:
                way = f"Cut it at whole heads, over {whole // head_dim} ranks or fewer, or keep it whole on every rank."
                inside = f", inside of a head of {head_dim}"
            what = f"{x.name} has {width} of {whole} features: its layer is cut over ranks{inside}."
            yield Cause("cut_over_ranks", what, way)
        count = head_dim if heads == -1 else heads
        if count > 0 and width % count:
            asked = "" if -1 in sizes[-2:] else f"{heads}·{head_dim} = {heads * head_dim}"
            yield _uneven(width, count, asked, are_heads=heads != -1)
        if min(heads, head_dim) > 0:
            yield Cause(
                "wrong_head_dim",
                f"{heads} heads of {head_dim} need {heads * head_dim} features; {x.name} has {width}.",
                f"Use head_dim {width // heads} ({heads} heads, width {width}), or a projection with "
                f"out_features {heads * head_dim}.",
            )
    if len(sizes) == 4 and len(x.shape) == 3 and sizes[1] == -1 and prod(sizes[2:]) == width:
        yield Cause(
            "batch_differs",
            f"{x.name} has batch {x.shape[0]}; the view expects batch {sizes[0]}.",
            "Queries, keys and values need the same batch size; use .expand on the batch dimension to share one item.",
        )


def _einops(facts: Facts) -> Iterator[Cause]:
    """Judge an einops pattern that cannot divide a width evenly."""
    said = re.search(r"can't divide axis of length (\d+) in chunks of (\d+)", facts.message)
    if facts.error == "EinopsError" and said is not None:
        yield _uneven(int(said[1]), int(said[2]))


def _uneven(width: int, number: int, asked: str = "", *, are_heads: bool = True) -> Cause:
    """Return the cause of a width that does not divide by heads, or by their width; `asked` is what a call asks for."""
    counts = ", ".join(str(n) for n in range(1, min(width, 64) + 1) if width % n == 0)
    asked = asked or (f"{width} / {number} = {width / number:.4g}" if number else "use at least 1")
    return Cause(
        "heads_do_not_divide",
        f"Width {width} cannot be split into {f'{number} heads' if are_heads else f'heads of {number}'}: {asked}.",
        f"Use a {'head count' if are_heads else 'head_dim'} that divides {width}"
        f"{' (up to 64)' if width > 64 else ''}: {counts}.",
    )


# -- what an attention is given, its mask, and the factors of its products -------------------------------------------


def _lengths(facts: Facts, given: Operand) -> tuple[int, int]:
    """Return batch and length as the layer reads them; batch 0 means that the input has no batch."""
    if len(given.shape) != 3:
        return 0, given.shape[0] if given.shape else 0
    first, second, _ = given.shape
    return (first, second) if facts.call.batch_first else (second, first)


def _sequences(facts: Facts) -> Iterator[Cause]:
    """Judge batch sizes and lengths; first whether swapping the two would make them fit."""
    query, key, value = facts.given("query", "tgt"), facts.given("key", "src"), facts.given("value")
    if query is None or key is None or facts.base not in LAYERS:
        return
    (batch, length), (key_batch, key_length) = _lengths(facts, query), _lengths(facts, key)
    mask, padding, batch_first = facts.given("attn_mask"), facts.given("key_padding_mask"), facts.call.batch_first
    reading = f"batch_first={batch_first} takes dimension 0 as the {'batch' if batch_first else 'sequence'}"
    both, why = bool(batch and key_batch), ""
    if both and batch != key_batch and length == key_length:
        agree = f"{query.name} and {key.name} agree in the other dimension"
        why = f"batch {batch} does not match batch {key_batch}, but {agree}."
    elif both and mask is not None and length != batch == key_batch and mask.shape == (batch, batch):
        why = f"length {length}, batch {batch}; {mask.is_shape} and fits dimension {0 if batch_first else 1}."
    elif both and padding is not None and padding.shape == (key_length, key_batch) and key_length != key_batch:
        way = "x.transpose(0, 1)" if batch_first else "batch_first=True"
        yield Cause(
            "batch_and_sequence_swapped",
            f"{reading}: batch {key_batch}, key {key_length}. {padding.is_shape}; with either batch_first, "
            f"key_padding_mask must be batch key, [{key_batch}, {key_length}].",
            f"If {key.name} is right, use {padding.name}.T. If the mask is right, use {way} for {key.name}.",
        )
    if why:
        way = "If the batch is dimension 0, create the layer with batch_first=True or pass x.transpose(0, 1)."
        if batch_first:
            way = "Pass x.transpose(0, 1) to make the sequence dimension 1, or create the layer with batch_first=False."
        yield Cause("batch_and_sequence_swapped", f"{reading}: {why}", way)
    if both and batch != key_batch:
        what = f"{reading}: {query.name} has batch {batch} and {key.name} has batch {key_batch}."
        yield Cause("batch_differs", what, _SAME_EXAMPLES)
    whole = facts.base == ATTENTION and value is not None and len(key.shape) == len(value.shape) == 3
    if whole and value is not None and _lengths(facts, key) != _lengths(facts, value):
        yield Cause("lengths_differ", f"Keys and values differ: {key.is_shape}, {value.is_shape}.", _SAME_SEQUENCE)


def _masks(facts: Facts) -> Iterator[Cause]:
    """Judge a mask that does not fit the scores."""
    under = facts.mask_and_scores[1] if facts.mask_and_scores is not None else None
    if under is not None and len(under.shape) == 4 and all(dim[0] in HEADS for dim in under.dims[-2:]):
        yield Cause(
            "heads_not_transposed",
            f"{under.text}: heads are multiplied with heads; queries and keys were split but not transposed.",
            "Use .transpose(1, 2) on q, k and v after the view that splits them: heads must come before the sequence.",
        )
    mask, scores, by_shape = _laid_mask(facts)
    padding, key_given = facts.given("key_padding_mask"), facts.given("key")
    if facts.attention is not None and padding is not None and key_given is not None:
        batch, length = _lengths(facts, key_given)
        expected = (batch, length) if batch else (length,)
        if padding.shape != expected:
            what = f"{padding.is_shape}; expected batch key, {text.shape(expected)}, for key_padding_mask."
            yield Cause("mask_size", what, f"Build the mask for batch {batch} and key {length}.")
    fits = mask is None or (first_clash(mask.shape, scores) is None and len(mask.shape) <= len(scores))
    if mask is None or fits or not mask.shape or not 2 <= len(scores) <= 4:
        return
    (query, key), over = scores[-2:], f"and the scores are {text.shape(scores)}"
    if mask.shape in by_shape:
        yield Cause("mask_rank", f"{mask.is_shape}{by_shape[mask.shape][0]}", by_shape[mask.shape][1])
    if mask.shape[-2:] == (key, query) and key != query:
        what = f"{mask.is_shape}, with key {key} before query {query}, {over}."
        yield Cause("mask_transposed", what, f"{mask.name}.transpose(-2, -1).")
    if len(scores) >= 3 and mask.shape == (scores[0], scores[0]) and scores[0] not in (query, key):
        yield Cause(
            "batch_and_sequence_swapped",
            f"{mask.is_shape}, {over}: it fits dimension 0, which is taken as the batch.",
            "The input and the layer disagree on whether batch or sequence comes first. "
            "Use x.transpose(0, 1), or change batch_first.",
        )
    rows, columns = (1, *mask.shape)[-2:]
    if rows not in (1, query) or columns not in (1, key):
        covers = f"{columns} keys" if rows == 1 else f"query {rows}, key {columns}"
        way = f"Build the mask for query {query} and key {key}, or pass fewer positions."
        if columns == query != key:
            # Its columns are the queries: cutting them to the number of keys would mask other keys.
            way = f"Give a mask of the {key} keys of this product: {columns} is the number of queries."
        elif (rows == 1 or rows >= query) and columns >= key:
            way = f"Cut the mask to the lengths of this call: {mask.name}[..., :{query}, :{key}]."
        what = f"{mask.name} covers {covers}; expected query {query}, key {key} for scores {text.shape(scores)}."
        yield Cause("mask_size", what, way)


def _laid_mask(facts: Facts) -> tuple[Operand | None, Shape, dict[Shape, tuple[str, str]]]:
    """Return a mask, the shape of its scores, and for masks of a wrong rank their explanation and fix."""
    mask, query, key = facts.given("attn_mask"), facts.given("query"), facts.given("key")
    scores: Shape = ()
    if facts.attention is not None and query is not None and key is not None and mask is not None:
        (batch, length), (_, key_length) = _lengths(facts, query), _lengths(facts, key)
        heads, pairs = facts.attention.num_heads, (length, key_length)
        scores = (max(batch, 1) * heads, *pairs)
        wanted = f"{text.shape(pairs)} or {text.shape(scores)}, batch·heads first"
        expand = "" if mask.shape[1:2] == (heads,) else f".expand(-1, {heads}, -1, -1)"
        split = f"; the layer expects {wanted}.", f"{mask.name}{expand}.flatten(0, 1)."
        repeated = f"{mask.name}.repeat_interleave({heads}, dim=0)."
        of_keys = f", batch key; expected attn_mask {wanted}.", f"Pass it as key_padding_mask={mask.name}."
        return (
            mask,
            scores,
            {
                (batch, key_length): of_keys,
                (batch, *pairs): (f", one for each batch item; the layer expects {wanted}.", repeated),
                (batch, 1, *pairs): split,
                (batch, heads, *pairs): split,
            },
        )
    if facts.base == SDPA and query is not None and key is not None:
        scores = (*query.shape[:-1], key.shape[-2]) if min(len(query.shape), len(key.shape)) > 1 else ()
    elif facts.mask_and_scores is not None:
        mask, scores = facts.mask_and_scores[0], facts.mask_and_scores[1].shape
    rows: list[tuple[Shape, str, str]] = []
    if len(scores) == 4:
        batch, heads, length, key_length = scores
        view = f".view({batch}, {heads}, {length}, {key_length}): give the heads their own dimension."
        rows = [
            ((key_length, batch), "key batch", ".T[:, None, None, :]: batch first, then heads and queries."),
            ((batch, key_length), "batch key", "[:, None, None, :]: add dimensions for heads and queries."),
            ((batch, length, key_length), "batch query key", "[:, None]: add a dimension for the heads."),
            ((batch, 1, key_length), "batch 1 key", "[:, None]: add a dimension for the heads."),
            ((batch * heads, length, key_length), "(batch heads) query key", view),
        ]
    elif len(scores) == 3:
        rows = [((scores[0], scores[2]), "batch key", "[:, None, :]: add a dimension for the queries.")]
    name, over = "" if mask is None else mask.name, f"and the scores are {text.shape(scores)}"
    return mask, scores, {shape: (f", {what}, {over}.", name + way) for shape, what, way in rows}


def _products(facts: Facts) -> Iterator[Cause]:
    """Judge the factors of a product of queries and keys, or of weights and values: first their layouts."""
    yield from _unsplit(facts)
    if not facts.sizes_clash:
        return
    if facts.pair is not None and facts.pair[1].part == "key":
        yield from _keys(facts, *facts.pair)
    if bad := [o for o in facts.factors if o.heads_are_behind]:
        yield _heads_behind(facts, bad)
    left = next((o for o in facts.operands if o.part in ("query", "weights")), None)
    right = next((o for o in facts.operands if o.part in ("key", "value")), None)
    if left is not None and right is not None:
        yield from _two_sizes(left, right)


def _unsplit(facts: Facts) -> Iterator[Cause]:
    split = next((o for o in facts.factors if o.place(*HEADS) is not None), None)
    odd = next((o for o in facts.factors if o.place(*HEADS) is None and len(o.shape) == 3), None)
    if split is None or odd is None or len(split.shape) < 4:
        return
    heads, head_dim = split.size(*HEADS), split.size("head_dim")
    if heads and heads * head_dim in odd.shape[1:]:
        yield Cause(
            "heads_not_split",
            f"{split.name} is split into {heads} heads; {odd.name} is not.",
            f"Split {odd.variable} too: .view(batch, length, {heads}, {head_dim}).transpose(1, 2).",
        )


def _keys(facts: Facts, query: Operand, key: Operand) -> Iterator[Cause]:
    """Judge keys whose features and positions are not transposed for the product."""
    cause, name = "key_not_transposed", key.variable
    if min(len(query.shape), len(key.shape)) < 2:
        return
    if len(key.shape) > 2 and key.dims[-1] == ["batch"]:
        what = f"{key.is_shape} {key.axes}: all dimensions are reversed, as by .T."
        yield Cause(cause, what, f"Swap only the last two: {name}.transpose(-2, -1) or {name}.mT.")
    if key.place("key", "sequence") == len(key.shape) - 2 and query.shape[-1] == key.shape[-1] != key.shape[-2]:
        what = f"{key.name} ends in {key.axis(-2)} and {key.axis(-1)}; q·kᵀ needs {key.axis(-1)} before {key.axis(-2)}."
        yield Cause(cause, what, f"Multiply by {name}.transpose(-2, -1).")
    if key.heads_are_behind and _was_right_before(facts, key.given.tensor):
        what = f"{key.name} swaps heads and key; q·kᵀ needs key and head_dim swapped."
        yield Cause(cause, what, "Swap the last two dimensions: .transpose(-2, -1).")


def _heads_behind(facts: Facts, bad: list[Operand]) -> Cause:
    """Return the cause of heads after the sequence, where the product expects them before."""
    names = list(dict.fromkeys(o.variable for o in bad))
    sequence = " and ".join(dict.fromkeys("query" if o.part == "query" else "key" for o in bad))
    steps = [op for _, op in facts.reached.steps_back(bad[0].given.tensor) if op is not None]
    if all(_was_right_before(facts, o.given.tensor) for o in bad):
        state, origin = "transposed back", steps[0].source if steps else ""
        way = "Remove that transpose: the heads already came before the sequence."
    else:
        splits = [op for op in steps if op.base_name in ("view", "_unsafe_view")]
        origins = (op.source for op in splits if len(op.output.shape) > len(op.inputs[0].shape))
        state, origin = "split but not transposed", next(origins, "")
        way = f"Use {names[0]}.transpose(1, 2) after the view that splits the heads."
    where = f" ({origin})" if origin else ""
    were = f"{' and '.join(names)} {'was' if len(bad) == 1 else 'were'}"
    return Cause("heads_not_transposed", f"{were} {state}{where}. Heads must come before {sequence}.", way)


def _was_right_before(facts: Facts, tensor: TensorRef) -> bool:
    """Return whether an earlier step had the heads before the sequence."""
    for earlier, _ in list(facts.reached.steps_back(tensor))[1:]:
        names = [name for name in re.findall(r"\w+", facts.reached.of(earlier)) if name in (*HEADS, *SEQUENCES)]
        if len(earlier.shape) >= 4 and names and names[0] in HEADS and not set(SEQUENCES).isdisjoint(names):
            return True
    return False


def _two_sizes(left: Operand, right: Operand) -> Iterator[Cause]:
    """Judge two factors of the same layout (queries or weights, keys or values) whose sizes differ."""
    heads, kv_heads = left.size("heads"), right.size(*HEADS)
    if heads != kv_heads and kv_heads and heads % kv_heads == 0 < heads and len(left.shape) == len(right.shape) == 4:
        each = heads // kv_heads
        yield Cause(
            "heads_not_repeated",
            f"{left.name} has {heads} heads and {right.name} has {kv_heads}, each shared by {each} query heads.",
            f"Use {right.variable}.repeat_interleave({each}, dim=1) on keys and values before the product; "
            "for scaled_dot_product_attention, enable_gqa=True.",
        )
    same = "Split queries and keys into heads of the same width: the product sums over their features."
    for axis, name, way in (("batch", "batch_differs", _SAME_EXAMPLES), ("head_dim", "head_dim_differs", same)):
        sizes = left.size(axis), right.size(axis)
        if 0 not in sizes and sizes[0] != sizes[1] and (axis == "batch" or left.part == "query"):
            yield Cause(name, f"{left.name} has {axis} {sizes[0]} and {right.name} has {axis} {sizes[1]}.", way)
    has = right.size("key", "sequence")
    if left.part == "weights" and has and left.shape[-1] != has:
        what = f"{left.name} has weights for {left.shape[-1]} keys and {right.name} has {has} values."
        yield Cause("lengths_differ", what, _SAME_SEQUENCE)
