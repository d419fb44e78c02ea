"""Common mistakes behind failing calls, found from the operands and never guessed from a name.

To add one, name it in `CAUSES` and yield a `Suspect` from one of the functions here: what is wrong, with the real
numbers, and what to write instead, with the edit of the operands that it stands for. The functions run in order, and
the first cause is reported, with the fixes with which the failing call runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ... import text
from ...graph.axis import resolve
from ...record.ops import TensorRef
from ...reports.trace import Cause
from .edits import mismatches
from .facts import BROADCASTS, CONVOLUTIONS, HEADS, SEQUENCES, VIEWS, Facts, Operand, first_clash
from .head_counts import heads_clash
from .large_numbers import number_too_large
from .norms import norm_of_whole
from .padding_masks import as_padding
from .position_tables import transposed_table
from .positions import split_positions
from .reached import ATTENTION, LAYERS, SDPA, behind_of
from .tried import Edit, Fix, fix_that_runs, of_shape, resized, runs

CAUSES = (
    *("argument_is_none", "index_out_of_range", "wrong_rank", "no_room", "cut_over_ranks"),
    "number_too_large",
    *("mixed_devices", "mask_dtype", "mixed_dtypes", "heads_not_joined", "weight_not_transposed", "features_not_last"),
    *("wrong_width", "batch_and_sequence_swapped", "batch_differs", "lengths_differ", "mask_rank"),
    *("heads_not_transposed", "mask_transposed", "mask_size", "heads_not_split", "key_not_transposed"),
    *(
        "heads_not_repeated",
        "heads_differ",
        "head_dim_differs",
        "not_contiguous",
        "heads_do_not_divide",
        "wrong_head_dim",
    ),
    *("norm_of_whole", "table_transposed", "lacks_an_axis", "table_size", "view_sizes", "unequal_parts", "output_rows"),
)
"""The name of each cause."""

_OF_WIDTHS = ("heads_do_not_divide", "wrong_head_dim", "wrong_width", "heads_not_joined", "view_sizes", "table_size")
"""Causes that a width of the inputs may have."""
_UNPACKED = r"values to unpack \(expected (?:at least )?(\d+)"
Shape = tuple[int, ...]

_SAME_BATCH = "Both tensors must have the same batch size."
_SAME_SEQUENCE = "take keys and values from the same sequence"


@dataclass(frozen=True, eq=False)
class Suspect:
    """A cause with its fixes, which are not tried yet."""

    name: str
    explanation: str
    fixes: tuple[Fix, ...] = ()


def find_cause(facts: Facts, drawn_width: int = 0) -> Cause | None:
    """Return the first cause that the facts show, with the fixes that run; None if there is none.

    A width that was drawn because nothing in the module shows it is not the user's mistake: the fix is to give it.
    """
    inputs = (_arguments, _positions, _layouts, _tables, _kinds, _widths, _sequences)
    judges = (*inputs, _masks, _products, _views, _einops)
    suspect = next(chain.from_iterable(judge(facts) for judge in (*judges, _edits)), None)
    if suspect is None:
        return None
    drawn = [named.name for named in facts.reached.graph.recording.inputs if named.tensor.shape[-1:] == (drawn_width,)]
    if drawn and suspect.name in _OF_WIDTHS and any(o.shape[-1:] == (drawn_width,) for o in facts.operands):
        what = f"The width {drawn_width} was chosen by mha-inspect: nothing in the module shows it."
        way = f"Give the width: --input-shape {drawn[0]}=2x10x512 with its own sizes."
        return Cause(suspect.name, f"{suspect.explanation} {what}", way)
    return Cause(suspect.name, suspect.explanation, fix_that_runs(facts.call, suspect.fixes))


def _edits(facts: Facts) -> Iterator[Suspect]:
    """Judge by edits of an operand with which the call runs."""
    for mismatch in mismatches(facts):
        if any(runs(facts.call, fix) for fix in mismatch.fixes):
            yield Suspect(mismatch.name, mismatch.explanation, mismatch.fixes)


def _positions(facts: Facts) -> Iterator[Suspect]:
    """Judge a view that makes positions of features."""
    view = split_positions(facts)
    if view is not None:
        yield Suspect("wrong_head_dim", view.explanation, view.fixes)


def _layouts(facts: Facts) -> Iterator[Suspect]:
    """Judge a norm of all heads together that gets heads, and a table with the batch where positions are."""
    norm = norm_of_whole(facts)
    if norm is not None:
        yield Suspect("norm_of_whole", norm.explanation, norm.fixes)
    table = transposed_table(facts)
    if table is not None:
        yield Suspect("table_transposed", table.explanation, table.fixes)


def _arguments(facts: Facts) -> Iterator[Suspect]:
    """Judge an argument that is None, and the rank of one whose shape is unpacked, or of a convolution's input."""
    x, weight, said = facts.given("input"), facts.given("weight"), re.findall(_UNPACKED, facts.message)
    for o in facts.operands if said and facts.unpacks_shape and len(facts.operands) == 1 else ():
        if (rank := int(said[0])) != len(o.shape):
            what = f"{o.is_shape}, {text.plural(len(o.shape), 'dimension')}; this line expects {rank}."
            add = f", e.g. {o.name}[None] for a batch of one" * (rank == len(o.shape) + 1)
            yield Suspect("wrong_rank", what, (Fix(f"give {o.name} {rank} dimensions{add}"),))
    for name in facts.missing if facts.error in ("TypeError", "AttributeError") else ():
        way = f"pass {name}, e.g. trace TARGET --input-shape {name}=SIZES:DTYPE, or skip this line if {name} is None"
        yield Suspect("argument_is_none", f"{name} is None, and this line uses it as a tensor.", (Fix(way),))
    if x is None or weight is None or not x.given.value.numel() or x.given.value.is_meta:
        return
    rank = len(weight.shape) - 1
    if facts.base in CONVOLUTIONS and len(x.shape) not in (rank, rank + 1):
        layout = "batch channels " + ("length", "height width", "depth height width")[rank - 2]
        what = f"{x.is_shape}, {len(x.shape)} dimensions; {facts.base} expects {rank + 1}: {layout}."
        yield Suspect("wrong_rank", what)


def _tables(facts: Facts) -> Iterator[Suspect]:
    """Judge what does not fit into a table or a cache: ids and positions that it lacks, more tokens than it has."""
    table = facts.given("weight") if facts.base == "embedding" else next(iter(facts.operands), None)
    ids = next((o for o in facts.operands if _is_whole(o) and o is not table), None)
    said = re.search(r"out of bounds for dimension \d+ with size (\d+)", facts.message)
    size = table.shape[0] if table and facts.base == "embedding" else int(said[1]) if said else 0
    if table is not None and ids is not None and size and ids.given.value.numel() and not ids.given.value.is_meta:
        first, last = (int(bound) for bound in ids.given.value.aminmax())
        what = f"{ids.name} has numbers from {first} to {last}; {table.is_shape}: 0 to {size - 1} are in range."
        in_range = [(ids, lambda ids: ids.clamp(0, size - 1))]
        fix = Fix(f"use numbers below {size}, or make {table.name} for {last + 1}", in_range)
        if first < 0 and last < size:
            fix = Fix(
                "replace ids below 0, e.g. by the padding id: .clamp(min=0)", [(ids, lambda ids: ids.clamp(min=0))]
            )
        elif first < 0:
            fix = Fix(f"use numbers from 0 to {size - 1}", in_range)
        if first < 0 or last >= size:
            yield Suspect("index_out_of_range", what, (fix,))
    for place, (cache, room, other) in ((first_clash(room[1], room[2].shape), room) for room in _rooms(facts)):
        if place is not None and room[place] < other.shape[place]:
            needs, where = cache.shape[place] - room[place] + other.shape[place], len(cache.shape) + place
            what = f"{other.is_shape}; {cache.is_shape}, with room for {room[place]} in dimension {where}."
            way = f"make dimension {where} of {cache.name} {needs} or more, or pass less"
            yield Suspect("no_room", what, (Fix(way, [(cache, resized(where, needs))]),))


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


def _kinds(facts: Facts) -> Iterator[Suspect]:
    """Judge devices, then numbers that a dtype lacks, then the dtypes of masks, then other dtypes."""
    if facts.mixes_devices:
        odd, usual = _odd_one(facts, "device")
        what = f"{odd.name} is on {odd.device}; the other tensors are on {usual}."
        yield Suspect("mixed_devices", what, tuple(_moves(facts, odd, usual)))
    too_large = number_too_large(facts)
    if too_large is not None:
        yield Suspect("number_too_large", too_large.explanation, too_large.fixes)
    mask, rule = facts.given("attn_mask"), ""
    if facts.base in LAYERS:
        masks = [o for o in (facts.given("key_padding_mask"), mask) if o is not None and _is_whole(o)]
        # A mask of keys in the place of a mask of queries and keys: its dtype is the smaller mistake.
        masks = [o for o in masks if o is not mask or not _is_mask_of_keys(facts, o)]
        if masks:
            mask = masks[0]
            rule = "The layer expects a boolean mask (True masks a key out) or a floating one (added to the scores)."
    elif facts.base == "masked_fill" and "boolean mask" in facts.message and len(facts.operands) > 1:
        mask, rule = facts.operands[1], "masked_fill takes a boolean mask (True masks a key out)."
    if mask is not None and rule:
        yield Suspect("mask_dtype", f"{mask.name} is {mask.dtype}. {rule}", _as_boolean(mask, "means masked out"))
    if not facts.mixes_dtypes:
        return
    odd, usual = _odd_one(facts, "dtype")
    if odd is mask:
        fixes: tuple[Fix, ...] = (_converted([odd], usual),)
        if _is_whole(odd):
            fixes = (
                Fix(f"{odd.name}.bool() if 1 keeps a key", [(odd, lambda mask: mask.bool())]),
                Fix(f"{odd.name} == 0 if 0 does", [(odd, lambda mask: mask == 0)]),
            )
        yield Suspect(
            "mask_dtype",
            f"{odd.name} is {odd.dtype} and the queries are {usual}. A mask must be boolean (True keeps a key) or have "
            "the dtype of the queries (added to the scores).",
            fixes,
        )
    x = facts.given("input")
    if x is not None and _is_whole(x):
        what = f"{x.name} is {x.dtype}: integers, as token ids are."
        yield Suspect("mixed_dtypes", what, tuple(_from_integers(facts, x, usual)))
    what = f"{odd.name} is {odd.dtype}; the other tensors are {usual}."
    yield Suspect("mixed_dtypes", what, tuple(_to_one_dtype(facts, odd, usual)))


def _moves(facts: Facts, odd: Operand, usual: str) -> Iterator[Fix]:
    """Yield how to get the tensors of another device to the usual one. A tensor on meta has no numbers to move."""
    others = [o for o in facts.operands if o.device != usual]
    if odd.device == "meta":
        made = [(o, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype, device=usual)) for o in others]
        yield Fix(f"create {odd.name} on {usual}, e.g. with device=x.device or register_buffer", made)
        return
    yield Fix(
        f"use .to({usual!r}) on the tensor, or move the module and its inputs to one device. Create tensors inside "
        "the module with device=x.device or register_buffer",
        [(o, lambda tensor: tensor.to(usual)) for o in others],
    )


def _as_boolean(mask: Operand, means: str) -> tuple[Fix, ...]:
    """Return both ways to make a mask of integers boolean, for calls in which True masks a key out."""
    return (
        Fix(f"{mask.name} == 0 if 0 {means}", [(mask, lambda tensor: tensor == 0)]),
        Fix(f"{mask.name}.bool() if 1 does", [(mask, lambda tensor: tensor.bool())]),
    )


def _converted(operands: Sequence[Operand], dtype: str) -> Fix:
    kind: torch.dtype = getattr(torch, dtype)
    return Fix(f"use {operands[0].name}.to(torch.{dtype})", [(o, lambda tensor: tensor.to(kind)) for o in operands])


def _from_integers(facts: Facts, x: Operand, usual: str) -> Iterator[Fix]:
    """Yield what to do with integers that a layer for floating numbers gets."""
    kind: torch.dtype = getattr(torch, usual)
    if facts.base == "linear":
        embedded = of_shape((*x.shape, facts.operands[1].shape[-1]), kind)
        yield Fix("pass token ids through nn.Embedding first", [(x, embedded)])
    yield Fix(f"convert numbers with .to(torch.{usual})", [(x, lambda tensor: tensor.to(kind))])


def _to_one_dtype(facts: Facts, odd: Operand, usual: str) -> Iterator[Fix]:
    """Yield how to bring the operands to one dtype."""
    yield _converted([o for o in facts.operands if o.dtype == odd.dtype], usual)
    others = [o for o in facts.operands if o.dtype == usual]
    if all(o.is_parameter for o in others):
        kind: torch.dtype = getattr(torch, odd.dtype)
        edits = [(o, lambda tensor: tensor.to(kind)) for o in others]
        yield Fix(f"convert the module with .to(torch.{odd.dtype})", edits)
    function, device = facts.call.function, odd.given.value.device.type
    if function is not None:

        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device):
                return function(*args, **kwargs)

        yield Fix("run under torch.autocast", function=under_autocast)


def _is_whole(operand: Operand) -> bool:
    return operand.dtype.startswith(("int", "uint"))


def _odd_one(facts: Facts, what: str) -> tuple[Operand, str]:
    """Return the operand that differs from the majority, and the value of the majority; parameters count twice.

    A tensor that is given several times counts once.
    """
    votes = Counter[str]()
    for operand in {o.given.tensor.id: o for o in facts.operands}.values():
        votes[getattr(operand, what)] += 2 if operand.is_parameter else 1
    usual = max(votes, key=votes.__getitem__)
    return next(o for o in facts.operands if getattr(o, what) != usual), usual


def _widths(facts: Facts) -> Iterator[Suspect]:
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


def _width(facts: Facts, x: Operand, takes: int, weight: Operand | None) -> Iterator[Suspect]:
    has = x.shape[-1]
    if weight is not None and facts.pair is not None and weight.shape[-1] == has:
        yield Suspect(
            "weight_not_transposed",
            f"{weight.is_shape}, (out_features, in_features) as in nn.Linear; {x.name} has {has} features.",
            (Fix(f"{x.name} @ {weight.name}.T, or call the layer", [(weight, lambda tensor: tensor.T)]),),
        )
    places = [place for place, size in enumerate(x.shape[:-1]) if size == takes]
    if len(places) == 1 and len(x.shape) >= 3:
        place = places[0]
        yield Suspect(
            "features_not_last",
            f"{x.name} has its {takes} features in dimension {place}; the layer expects them last.",
            (Fix(f"{x.name}.transpose({place}, -1)", [(x, lambda tensor: tensor.transpose(place, -1))]),),
        )
    if weight is None:
        setting = {"query": "embed_dim", "key": "kdim", "value": "vdim"}[x.role]
        what = f"the layer expects {takes} for {x.role} ({setting})"
        fixes = _for_width(facts, x)
    else:
        what = f"{weight.name} expects {takes}"
        make = f"with in_features {has}" if facts.base == "linear" else f"for {has}"
        fixes = [_for_features(facts, make, weight, has)]
    fixes.append(Fix(f"give {x.name} {takes} features", [(x, resized(-1, takes))]))
    # After a wrong view or a forgotten step, the width is not what is wrong.
    shown = fixes if _keeps_tokens(facts, x) else []
    yield Suspect("wrong_width", f"{x.name} has {has} features; {what}.", tuple(shown))


def _for_features(facts: Facts, make: str, weight: Operand, has: int) -> Fix:
    """Return the fix to create a layer for another width, tried with zeros."""
    text = f"create the layer {make}"
    if facts.base == "layer_norm":
        return Fix(text, function=lambda x, *args, **kwargs: nn.functional.layer_norm(x, (has,)))
    other = (weight.shape[0], has) if facts.base == "linear" else (has, weight.shape[1])
    return Fix(text, [(weight, of_shape(other))])


def _for_width(facts: Facts, x: Operand) -> list[Fix]:
    """Return the fix to create an nn.MultiheadAttention for other widths, tried with such a layer."""
    layer = facts.attention
    assert layer is not None
    sizes = {"embed_dim": layer.embed_dim, "kdim": layer.kdim, "vdim": layer.vdim}
    if x.role == "query":
        settings = {"embed_dim": x.shape[-1]}
        # Keys and values have the width of the queries, if nothing else was given.
        sizes |= dict.fromkeys(sizes, x.shape[-1]) if layer._qkv_same_embed_dim else settings
    else:
        widths = {"kdim": facts.given("key"), "vdim": facts.given("value")}
        settings = {name: o.shape[-1] for name, o in widths.items() if o is not None and o.shape[-1] != sizes[name]}
        sizes |= settings
    try:
        other = nn.utils.skip_init(  # type: ignore[no-untyped-call]  # draws no random numbers
            nn.MultiheadAttention,
            **sizes,
            num_heads=layer.num_heads,
            batch_first=layer.batch_first,
            device=x.given.value.device,
            dtype=layer.out_proj.weight.dtype,
        )
    except (AssertionError, ValueError):  # the heads do not divide that width
        return []
    text = f"create the layer with {', '.join(f'{name}={size}' for name, size in settings.items())}"
    return [Fix(text, function=other.forward)]


def _keeps_tokens(facts: Facts, x: Operand) -> bool:
    """Return whether an operand has one row for each token of an input of the module: `batch sequence features`."""
    rows = prod(x.shape[:-1])
    graph = facts.reached.graph
    behind = {tensor.id for tensor in behind_of(graph, x.given.tensor)}
    inputs = [named.tensor for named in graph.recording.inputs if named.tensor.id in behind]
    return any(rows in (prod(tensor.shape), prod(tensor.shape[:-1])) for tensor in inputs)


def _unjoined(x: Operand, takes: int) -> Iterator[Suspect]:
    """Judge an input whose heads would fit the layer if they were concatenated."""
    heads, features = x.place(*HEADS), x.place("head_dim")
    if heads is None and len(x.shape) >= 4 and x.shape[-1] * x.shape[-2] == takes:
        yield Suspect(
            "heads_not_joined",
            f"{x.name} ends in {x.axis(-2)} and {x.axis(-1)}; the layer expects one dimension of {takes}.",
            (
                Fix(
                    "use torch.cat(heads, dim=-1), or .flatten(-2) with the heads just before their features",
                    [(x, lambda tensor: tensor.transpose(-2, -1).flatten(-2))],
                ),
            ),
        )
    if heads not in (None, features) and features is not None and x.shape[heads] * x.shape[features] == takes:
        is_behind = heads == len(x.shape) - 2
        swap = "" if is_behind else ".transpose(1, 2)"

        def joined(tensor: Tensor) -> Tensor:
            """Return `batch sequence (heads head_dim)` of the operand."""
            return (tensor if is_behind else tensor.transpose(1, 2)).flatten(-2)

        way = f"{x.name}{swap}.flatten(-2): move heads after the sequence, then merge them with their features"
        yield Suspect(
            "heads_not_joined",
            f"{x.name} still has {x.shape[heads]} heads of {x.shape[features]}; the layer expects them concatenated, "
            f"{x.shape[heads]}·{x.shape[features]} = {takes}.",
            (Fix(way, [(x, joined)]),) if is_behind or heads == 1 else (),
        )


def _views(facts: Facts) -> Iterator[Suspect]:
    """Judge a view that does not fit its tensor."""
    x, sizes = facts.operands[0] if facts.operands else None, facts.sizes_of_view
    if x is None or facts.base not in VIEWS:
        return
    if "stride" in facts.message and not x.given.value.is_contiguous():
        way = "use .contiguous() before .view(...), or .reshape(...) instead"
        yield Suspect(
            "not_contiguous",
            f"{x.name} is transposed: its elements in memory are not in the order that view() reads.",
            (Fix(way, [(x, lambda tensor: tensor.contiguous())]),),
        )
    width = x.shape[-1] if x.shape else 0
    if len(sizes) == len(x.shape) + 1 and sizes[:-2] == x.shape[:-1]:
        heads, head_dim = sizes[-2:]
        whole = facts.cut.get(width, 0)
        if whole and (head_dim <= 0 or whole % head_dim == 0):
            way, inside = "divide the number of heads by the number of ranks, or give -1", ""
            if head_dim > 0 and width % head_dim:
                way = (
                    f"shard it at whole heads, over {whole // head_dim} ranks or fewer, or keep it whole on every rank"
                )
                inside = f", which cuts through a head of {head_dim}"
            what = f"{x.name} has {width} of {whole} features: its layer is sharded over ranks{inside}."
            yield Suspect("cut_over_ranks", what, (Fix(way),))
        count = head_dim if heads == -1 else heads
        if count > 0 and width % count:
            asked = "" if -1 in sizes[-2:] else f"{heads}·{head_dim} = {heads * head_dim}"
            yield _uneven(width, count, asked, are_heads=heads != -1)
        if min(heads, head_dim) > 0:
            yield Suspect(
                "wrong_head_dim",
                f"{heads} heads of {head_dim} need {heads * head_dim} features; {x.name} has {width}.",
                (
                    # Whole heads divide the width, or a cause was found above.
                    Fix(f"use head_dim {width // heads} ({heads} heads, width {width})"),
                    Fix(f"use a projection with out_features {heads * head_dim}", [(x, resized(-1, heads * head_dim))]),
                ),
            )
    if len(sizes) == 4 and len(x.shape) == 3 and sizes[1] == -1 and prod(sizes[2:]) == width:
        yield Suspect(
            "batch_differs",
            f"{x.name} has batch {x.shape[0]}; the view expects batch {sizes[0]}. "
            "Queries, keys and values need the same batch size.",
            tuple(_shared_item(x, 0, sizes[0])),
        )


def _einops(facts: Facts) -> Iterator[Suspect]:
    """Judge an einops pattern that cannot divide a width evenly."""
    said = re.search(r"can't divide axis of length (\d+) in chunks of (\d+)", facts.message)
    if facts.error == "EinopsError" and said is not None:
        yield _uneven(int(said[1]), int(said[2]))


def _uneven(width: int, number: int, asked: str = "", *, are_heads: bool = True) -> Suspect:
    """Return the cause of a width that does not divide by heads, or by their width; `asked` is what a call asks for."""
    counts = ", ".join(str(n) for n in range(1, min(width, 64) + 1) if width % n == 0)
    asked = asked or (f"{width} / {number} = {width / number:.4g}" if number else "use at least 1")
    return Suspect(
        "heads_do_not_divide",
        f"Width {width} cannot be split into {f'{number} heads' if are_heads else f'heads of {number}'}: {asked}.",
        (
            Fix(
                f"use a {'head count' if are_heads else 'head_dim'} that divides {width}"
                f"{' (up to 64)' if width > 64 else ''}: {counts}"
            ),
        ),
    )


def _shared_item(x: Operand, dimension: int, batch: int) -> Iterator[Fix]:
    """Yield the fix to share the only item of a batch; several items cannot be shared."""
    if x.shape[dimension] == 1:
        sizes = [-1] * len(x.shape)
        sizes[dimension] = batch
        text = f"use {x.name}.expand({', '.join(map(str, sizes))}) to share its one item"
        yield Fix(text, [(x, lambda tensor: tensor.expand(sizes))])


# -- what an attention is given, its mask, and the factors of its products -------------------------------------------


def _lengths(facts: Facts, given: Operand) -> tuple[int, int]:
    """Return batch and length as the layer reads them; batch 0 means that the input has no batch."""
    if len(given.shape) != 3:
        return 0, given.shape[0] if given.shape else 0
    first, second, _ = given.shape
    return (first, second) if facts.call.batch_first else (second, first)


def _sequences(facts: Facts) -> Iterator[Suspect]:
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
        yield Suspect(
            "batch_and_sequence_swapped",
            f"{reading}: batch {key_batch}, key {key_length}. {padding.is_shape}; with either batch_first, "
            f"key_padding_mask must be batch key, [{key_batch}, {key_length}].",
            (
                Fix(f"use {padding.name}.T if {key.name} is right", [(padding, lambda tensor: tensor.T)]),
                Fix(f"use {way} for {key.name} if the mask is right", _swapped(facts)),
            ),
        )
    if why:
        way = "create the layer with batch_first=True or pass x.transpose(0, 1), if the batch is dimension 0"
        if batch_first:
            way = "pass x.transpose(0, 1) to make the sequence dimension 1, or create the layer with batch_first=False"
        yield Suspect("batch_and_sequence_swapped", f"{reading}: {why}", (Fix(way, _swapped(facts)),))
    if both and batch != key_batch:
        what = f"{reading}: {query.name} has batch {batch} and {key.name} has batch {key_batch}. {_SAME_BATCH}"
        place = 0 if batch_first else 1
        fewer, most = (query, key_batch) if batch < key_batch else (key, batch)
        yield Suspect("batch_differs", what, tuple(_shared_item(fewer, place, most)))
    whole = facts.base == ATTENTION and value is not None and len(key.shape) == len(value.shape) == 3
    if whole and value is not None and _lengths(facts, key) != _lengths(facts, value):
        what = f"Keys and values differ: {key.is_shape}, {value.is_shape}."
        shape = (*key.shape[:2], value.shape[-1])
        yield Suspect("lengths_differ", what, (Fix(_SAME_SEQUENCE, [(value, of_shape(shape))]),))


def _is_mask_of_keys(facts: Facts, mask: Operand) -> bool:
    """Return whether a mask is `batch key`, and could not be `query key`."""
    query, key = facts.given("query"), facts.given("key")
    if facts.attention is None or query is None or key is None:
        return False
    (batch, length), (_, key_length) = _lengths(facts, query), _lengths(facts, key)
    return mask.shape == (batch, key_length) != (length, key_length)


def _swapped(facts: Facts) -> list[tuple[Operand, Edit]]:
    """Return the edits that swap batch and sequence of what a layer is given."""
    given = [o for o in facts.operands if o.role in ("query", "key", "value", "src", "tgt") and len(o.shape) == 3]
    return [(o, lambda tensor: tensor.transpose(0, 1)) for o in given]


def _masks(facts: Facts) -> Iterator[Suspect]:
    """Judge a mask that does not fit the scores."""
    under = facts.mask_and_scores[1] if facts.mask_and_scores is not None else None
    if under is not None and len(under.shape) == 4 and all(dim[0] in HEADS for dim in under.dims[-2:]):
        batch, length, heads, _ = under.shape
        way = "use .transpose(1, 2) on q, k and v after the view that splits them: heads must come before the sequence"
        right = (batch, heads, length, length)
        yield Suspect(
            "heads_not_transposed",
            f"{under.text}: heads are multiplied with heads; queries and keys were split but not transposed.",
            (Fix(way, [(under, of_shape(right))], right),),
        )
    mask, scores, by_shape = _laid_mask(facts)
    padding, key_given = facts.given("key_padding_mask"), facts.given("key")
    if facts.attention is not None and padding is not None and key_given is not None:
        batch, length = _lengths(facts, key_given)
        expected = (batch, length) if batch else (length,)
        if padding.shape != expected:
            what = f"{padding.is_shape}; expected batch key, {text.shape(expected)}, for key_padding_mask."
            way = f"build the mask for batch {batch} and key {length}"
            yield Suspect("mask_size", what, (Fix(way, [(padding, of_shape(expected))]),))
    fits = mask is None or (first_clash(mask.shape, scores) is None and len(mask.shape) <= len(scores))
    if mask is None or fits or not mask.shape or not 2 <= len(scores) <= 4:
        return
    (query, key), over = scores[-2:], f"and the scores are {text.shape(scores)}"
    if mask.shape in by_shape:
        said, fix = by_shape[mask.shape]
        yield Suspect("mask_rank", f"{mask.is_shape}{said}", (fix,))
    if mask.shape[-2:] == (key, query) and key != query:
        what = f"{mask.is_shape}, with key {key} before query {query}, {over}."
        turned = [(mask, lambda tensor: tensor.transpose(-2, -1))]
        yield Suspect("mask_transposed", what, (Fix(f"{mask.name}.transpose(-2, -1)", turned, _result(facts, scores)),))
    if len(scores) >= 3 and mask.shape == (scores[0], scores[0]) and scores[0] not in (query, key):
        way = "use x.transpose(0, 1), or change batch_first"
        turned = _swapped(facts)
        if not turned and len(scores) == 4 and facts.mask_and_scores is not None:
            right = (query, scores[1], scores[0], scores[0])
            turned = [(facts.mask_and_scores[1], of_shape(right))]
        yield Suspect(
            "batch_and_sequence_swapped",
            f"{mask.is_shape}, {over}: it fits dimension 0, which is taken as the batch. "
            "The input and the layer disagree on whether batch or sequence comes first.",
            (Fix(way, turned),) if turned else (),
        )
    rows, columns = (1, *mask.shape)[-2:]
    if rows not in (1, query) or columns not in (1, key):
        covers = f"{columns} keys" if rows == 1 else f"query {rows}, key {columns}"
        what = f"{mask.name} covers {covers}; expected query {query}, key {key} for scores {text.shape(scores)}."
        projected = _projects_keys(facts, key, columns)
        if projected:
            what += f" {projected} projected the {columns} keys to {key}: apply a mask of keys before it."
        yield Suspect("mask_size", what, tuple(_of_size(facts, mask, scores)))


def _of_size(facts: Facts, mask: Operand, scores: Shape) -> Iterator[Fix]:
    """Yield how to give a mask the sizes of the scores; nothing if it is unknown which entries are the right ones."""
    (rows, columns), (query, key) = (1, *mask.shape)[-2:], scores[-2:]
    built = [(mask, of_shape((*mask.shape[:-2], 1 if rows == 1 else query, key)))]
    result = _result(facts, scores)
    inputs, source = _inputs_of_keys(facts)
    if columns > key and any(columns in shape for shape in inputs) and not any(key in shape for shape in inputs):
        return  # the module has cut, pooled or projected the keys, and the mask is for those before
    if columns == query != key:
        # Its columns are the queries: cutting them to the number of keys would mask other keys.
        if source:
            yield Fix(
                f"give a mask of the {key} keys of this product, which come from {source}: "
                f"{columns} is the number of queries",
                built,
                result,
            )
        return
    # With fewer queries than keys, the queries may be the last positions: which rows are right is unknown.
    is_first = rows == 1 or rows == query or query == key
    if is_first and (rows == 1 or rows >= query) and columns >= key:
        cut = f"[..., :{query}, :{key}]" if len(mask.shape) > 1 else f"[:{key}]"
        way = f"cut the mask to the lengths of this call: {mask.name}{cut}"
        yield Fix(way, [(mask, lambda tensor: _first_entries(tensor, query, key))], result)
        return
    fewer = ", or pass fewer positions" if rows < query or columns < key else ""
    yield Fix(f"build the mask for query {query} and key {key}{fewer}", built, result)


def _first_entries(mask: Tensor, query: int, key: int) -> Tensor:
    """Return the first entries of a mask: `… query key`, or `key`."""
    return mask[..., :query, :key] if mask.dim() > 1 else mask[:key]


def _inputs_of_keys(facts: Facts) -> tuple[list[Shape], str]:
    """Return the shapes of the inputs that the keys come from, and the only one that the queries do not come from.

    The second is the name, empty if there are none or several.
    """
    graph, pair = facts.reached.graph, facts.mask_and_scores
    query, key = facts.given("query"), facts.given("key")
    factors = None if query is None or key is None else (query.given.tensor, key.given.tensor)
    if pair is not None:
        ops = [op for _, op in facts.reached.steps_back(pair[1].given.tensor) if op is not None]
        product = next((product for op in ops if (product := graph.product(op)) is not None), None)
        factors = None if product is None else (product.left, product.right)
    if factors is None:
        return [], ""
    of_queries, of_keys = ({tensor.id for tensor in behind_of(graph, factor)} for factor in factors)
    inputs = [named for named in graph.recording.inputs if named.tensor.id in of_keys]
    names = [named.name for named in inputs if named.tensor.id not in of_queries]
    return [named.tensor.shape for named in inputs], names[0] if len(names) == 1 else ""


def _result(facts: Facts, scores: Shape) -> Shape | None:
    """Return the shape that masked scores must have; None if the call returns another tensor."""
    return scores if facts.base in BROADCASTS else None


def _projects_keys(facts: Facts, key: int, columns: int) -> str:
    """Return the module that projects this many keys to fewer, as in Linformer; empty if none does."""
    graph, pair = facts.reached.graph, facts.mask_and_scores
    if pair is None:
        return ""
    keys = set(resolve(graph.dimensions.of(pair[1].given.tensor)[-1]))
    for op in graph.recording.ops:
        if not graph.is_projection(op) or op.output.shape[-1:] != (key,):
            continue
        features = resolve(graph.dimensions.of(op.output)[-1])
        if graph.projected(op).shape[-1:] == (columns,) and not keys.isdisjoint(features):
            return op.module or "A projection"
    return ""


def _laid_mask(facts: Facts) -> tuple[Operand | None, Shape, dict[Shape, tuple[str, Fix]]]:
    """Return a mask, the shape of its scores, and for masks of a wrong rank their explanation and fix."""
    mask, query, key = facts.given("attn_mask"), facts.given("query"), facts.given("key")
    scores: Shape = ()
    if facts.attention is not None and query is not None and key is not None and mask is not None:
        (batch, length), (_, key_length) = _lengths(facts, query), _lengths(facts, key)
        heads, pairs = facts.attention.num_heads, (length, key_length)
        scores = (max(batch, 1) * heads, *pairs)
        wanted = f"{text.shape(pairs)} or {text.shape(scores)}, batch·heads first"
        expand = "" if mask.shape[1:2] == (heads,) else f".expand(-1, {heads}, -1, -1)"
        flat = [(mask, lambda tensor: tensor.expand(-1, heads, -1, -1).flatten(0, 1))]
        split = f"; the layer expects {wanted}.", Fix(f"{mask.name}{expand}.flatten(0, 1)", flat)
        of_heads = [(mask, lambda tensor: tensor.repeat_interleave(heads, dim=0))]
        repeated = Fix(f"{mask.name}.repeat_interleave({heads}, dim=0)", of_heads)
        of_keys = f", batch key; expected attn_mask {wanted}.", as_padding(facts, mask)
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
    if mask is None:
        return None, scores, {}
    rows: list[tuple[Shape, str, str, Edit]] = []
    if len(scores) == 4:
        batch, heads, length, key_length = scores
        view = f".view({batch}, {heads}, {length}, {key_length}): give the heads their own dimension"
        rows = [
            (
                (key_length, batch),
                "key batch",
                ".T[:, None, None, :]: batch first, then heads and queries",
                lambda tensor: tensor.T[:, None, None, :],
            ),
            (
                (batch, key_length),
                "batch key",
                "[:, None, None, :]: add dimensions for heads and queries",
                lambda tensor: tensor[:, None, None, :],
            ),
            (
                (batch, length, key_length),
                "batch query key",
                "[:, None]: add a dimension for the heads",
                lambda tensor: tensor[:, None],
            ),
            (
                (batch, 1, key_length),
                "batch 1 key",
                "[:, None]: add a dimension for the heads",
                lambda tensor: tensor[:, None],
            ),
            (
                (batch * heads, length, key_length),
                "(batch heads) query key",
                view,
                lambda tensor: tensor.view(batch, heads, length, key_length),
            ),
        ]
    elif len(scores) == 3:
        way = "[:, None, :]: add a dimension for the queries"
        rows = [((scores[0], scores[2]), "batch key", way, lambda tensor: tensor[:, None, :])]
    by_shape: dict[Shape, tuple[str, Fix]] = {}
    for shape, what, way, edit in rows:
        said = f", {what}, and the scores are {text.shape(scores)}."
        by_shape[shape] = said, Fix(mask.name + way, [(mask, edit)], _result(facts, scores))
    return mask, scores, by_shape


def _products(facts: Facts) -> Iterator[Suspect]:
    """Judge the factors of a product of queries and keys, or of weights and values: first their layouts."""
    yield from _unsplit(facts)
    if not facts.sizes_clash:
        return
    if facts.pair is not None and facts.pair[1].part == "key":
        yield from _keys(facts, *facts.pair)
    left = next((o for o in facts.operands if o.part in ("query", "weights")), None)
    right = next((o for o in facts.operands if o.part in ("key", "value")), None)
    if facts.base == "einsum" and left is not None and right is not None:
        # An equation may put the heads anywhere.
        heads = heads_clash(facts, left, right)
        if heads is not None:
            yield Suspect(heads.name, heads.explanation, heads.fixes)
    if bad := [o for o in facts.factors if o.heads_are_behind]:
        yield _heads_behind(facts, bad)
    if left is not None and right is not None:
        yield from _two_sizes(facts, left, right)


def _unsplit(facts: Facts) -> Iterator[Suspect]:
    split = next((o for o in facts.factors if o.place(*HEADS) is not None), None)
    odd = next((o for o in facts.factors if o.place(*HEADS) is None and len(o.shape) == 3), None)
    if split is None or odd is None or len(split.shape) < 4:
        return
    heads, head_dim = split.size(*HEADS), split.size("head_dim")
    if heads and heads * head_dim in odd.shape[1:]:
        way = f"split {odd.variable} too: .view(batch, length, {heads}, {head_dim}).transpose(1, 2)"
        is_turned = odd.shape[-1] != heads * head_dim

        def edit(tensor: Tensor) -> Tensor:
            rows = tensor.mT if is_turned else tensor
            parts = rows.reshape(*rows.shape[:-1], heads, head_dim).transpose(1, 2)
            return parts.mT if is_turned else parts

        what = f"{split.name} is split into {heads} heads; {odd.name} is not."
        yield Suspect("heads_not_split", what, (Fix(way, [(odd, edit)]),))


def _keys(facts: Facts, query: Operand, key: Operand) -> Iterator[Suspect]:
    """Judge keys whose features and positions are not transposed for the product."""
    cause, name = "key_not_transposed", key.variable
    if min(len(query.shape), len(key.shape)) < 2:
        return
    if len(key.shape) > 2 and key.dims[-1] == ["batch"]:
        what = f"{key.is_shape} {key.axes}: all dimensions are reversed, as by .T."
        way = f"swap only the last two: {name}.transpose(-2, -1) or {name}.mT"
        yield Suspect(cause, what, (Fix(way, [(key, _unreversed)]),))
    if key.place("key", "sequence") == len(key.shape) - 2 and query.shape[-1] == key.shape[-1] != key.shape[-2]:
        what = f"{key.name} ends in {key.axis(-2)} and {key.axis(-1)}; q·kᵀ needs {key.axis(-1)} before {key.axis(-2)}."
        turned = [(key, lambda tensor: tensor.transpose(-2, -1))]
        yield Suspect(cause, what, (Fix(f"multiply by {key.name}.transpose(-2, -1)", turned),))
    if key.heads_are_behind and _was_right_before(facts, key.given.tensor):
        what = f"{key.name} swaps heads and key; q·kᵀ needs key and head_dim swapped."
        heads, sequence = key.place(*HEADS), key.place(*SEQUENCES)
        assert heads is not None
        assert sequence is not None
        turned = [(key, lambda tensor: tensor.transpose(sequence, heads).transpose(-2, -1))]
        yield Suspect(cause, what, (Fix("swap the last two dimensions instead: .transpose(-2, -1)", turned),))


def _unreversed(key: Tensor) -> Tensor:
    """Return keys whose dimensions were all reversed, with only the last two swapped."""
    return key.permute(*reversed(range(key.dim()))).transpose(-2, -1)


def _heads_behind(facts: Facts, bad: list[Operand]) -> Suspect:
    """Return the cause of heads after the sequence, where the product expects them before."""
    names = list(dict.fromkeys(o.variable for o in bad))
    sequence = " and ".join(dict.fromkeys("query" if o.part == "query" else "key" for o in bad))
    steps = [op for _, op in facts.reached.steps_back(bad[0].given.tensor) if op is not None]
    if all(_was_right_before(facts, o.given.tensor) for o in bad):
        state, origin = "transposed back", steps[0].source if steps else ""
        way = "remove that transpose: the heads already came before the sequence"
    else:
        splits = [op for op in steps if op.base_name in ("view", "_unsafe_view")]
        origins = (op.source for op in splits if len(op.output.shape) > len(op.inputs[0].shape))
        state, origin = "split but not transposed", next(origins, "")
        turned = text.listed([f"{name}.transpose(1, 2)" for name in names])
        way = f"use {turned} after the view that splits the heads"
    where = f" ({origin})" if origin else ""
    were = f"{' and '.join(names)} {'was' if len(bad) == 1 else 'were'}"
    what = f"{were} {state}{where}. Heads must come before {sequence}."
    return Suspect("heads_not_transposed", what, (Fix(way, [(o, _heads_first(o)) for o in bad]),))


def _heads_first(operand: Operand) -> Edit:
    """Return an edit that moves the heads before the sequence.

    The operand is `batch sequence heads head_dim`, or has its last two swapped.
    """
    is_turned = operand.place(*HEADS) == len(operand.shape) - 1

    def edit(tensor: Tensor) -> Tensor:
        if is_turned:
            return tensor.transpose(-2, -1).transpose(1, 2).transpose(-2, -1)
        return tensor.transpose(1, 2)

    return edit


def _was_right_before(facts: Facts, tensor: TensorRef) -> bool:
    """Return whether an earlier step had the heads before the sequence."""
    for earlier, _ in list(facts.reached.steps_back(tensor))[1:]:
        names = [name for name in re.findall(r"\w+", facts.reached.of(earlier)) if name in (*HEADS, *SEQUENCES)]
        if len(earlier.shape) >= 4 and names and names[0] in HEADS and not set(SEQUENCES).isdisjoint(names):
            return True
    return False


def _two_sizes(facts: Facts, left: Operand, right: Operand) -> Iterator[Suspect]:
    """Judge two factors of the same layout (queries or weights, keys or values) whose sizes differ."""
    heads = heads_clash(facts, left, right)
    if heads is not None:
        yield Suspect(heads.name, heads.explanation, heads.fixes)
    batches = left.size("batch"), right.size("batch")
    if 0 not in batches and batches[0] != batches[1]:
        what = f"{left.name} has batch {batches[0]} and {right.name} has batch {batches[1]}. {_SAME_BATCH}"
        yield Suspect("batch_differs", what)
    widths = left.size("head_dim"), right.size("head_dim")
    if 0 not in widths and widths[0] != widths[1] and left.part == "query":
        place = right.place("head_dim")
        assert place is not None
        way = "split queries and keys into heads of the same width: the product sums over their features"
        what = f"{left.name} has head_dim {widths[0]} and {right.name} has head_dim {widths[1]}."
        yield Suspect("head_dim_differs", what, (Fix(way, [(right, resized(place, widths[0]))]),))
    has = right.size("key", "sequence")
    if left.part == "weights" and has and left.shape[-1] != has:
        what = f"{left.name} has weights for {left.shape[-1]} keys and {right.name} has {has} values."
        place = right.place("key", "sequence")
        assert place is not None
        yield Suspect("lengths_differ", what, (Fix(_SAME_SEQUENCE, [(right, resized(place, left.shape[-1]))]),))
