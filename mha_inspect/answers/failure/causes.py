"""Common mistakes behind failing calls, found from the operands and never guessed from a name.

To add one, name it in `CAUSES` and yield a `Cause` from one of the functions here or in `attention_causes`: what is
wrong, with the real numbers, and what to write instead. The functions run in order, and the first cause is reported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from math import prod

from ... import text
from ...reports.trace import Cause
from .attention_causes import masks, products, sequences
from .facts import BROADCASTS, HEADS, VIEWS, Facts, Operand, first_clash
from .reached import LAYERS

CAUSES = (
    *("argument_is_none", "index_out_of_range", "wrong_rank", "no_room", "cut_over_ranks"),
    *("mixed_devices", "mask_dtype", "mixed_dtypes", "heads_not_joined", "weight_not_transposed", "features_not_last"),
    *("wrong_width", "batch_and_sequence_swapped", "batch_differs", "lengths_differ", "mask_rank"),
    *("heads_not_transposed", "mask_transposed", "mask_size", "heads_not_split", "key_not_transposed"),
    *("heads_not_repeated", "head_dim_differs", "not_contiguous", "heads_do_not_divide", "wrong_head_dim"),
)
"""The name of each cause."""

_UNPACKED = r"values to unpack \(expected (?:at least )?(\d+)"


def find_cause(facts: Facts) -> Cause | None:
    """Return the first cause that the facts show; None if there is none."""
    judges = (_arguments, _tables, _kinds, _widths, sequences, masks, products, _views, _einops)
    return next(chain.from_iterable(judge(facts) for judge in judges), None)


def _arguments(facts: Facts) -> Iterator[Cause]:
    """Judge an argument that is None, and the rank of one whose shape is unpacked."""
    said = re.findall(_UNPACKED, facts.message)
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
