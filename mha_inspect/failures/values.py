"""Edits of devices, dtypes and numbers, and of tables: ids, positions and caches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import torch

from .. import text
from .edit import Change, Edit
from .factors import with_size
from .facts import BROADCASTS, Facts, Operand, Shape, first_clash
from .padding_masks import is_of_two
from .reached import LAYERS


def edits_of_dtypes(facts: Facts) -> Iterator[Edit]:
    """Yield the operands of one device and one dtype."""
    yield from _integers_as_mask(facts)
    if facts.mixes_devices:
        yield from _of_one_device(facts)
    if facts.mixes_dtypes:
        yield from _of_one_dtype(facts)


def _odd_one(facts: Facts, what: Literal["device", "dtype"]) -> tuple[Operand, str]:
    """Return the first operand that differs from the parameters, or else from the majority, and what these have.

    A tensor that is given several times counts once.
    """
    once = {operand.given.tensor.id: operand for operand in facts.operands}.values()
    parameters = [operand for operand in once if operand.is_parameter]
    votes = Counter[str](getattr(operand, what) for operand in parameters or once)
    ((usual, _),) = votes.most_common(1)
    return next(operand for operand in facts.operands if getattr(operand, what) != usual), usual


def _of_one_device(facts: Facts) -> Iterator[Edit]:
    odd, usual = _odd_one(facts, "device")
    elsewhere = [operand for operand in facts.operands if operand.device != usual]
    what = f"{odd.name} is on {odd.device}; the other tensors are on {usual}."
    way = f"use .to({usual!r}) on the tensor, or create it inside the module with device=x.device or register_buffer"
    moved = [Change(operand, (("to", usual),)) for operand in elsewhere]
    if odd.device == "meta":
        # It has no numbers to move.
        way = f"create {odd.spelled} on {usual}, e.g. with device=x.device or register_buffer"
        moved = [Change(operand, (("created_on", usual),)) for operand in elsewhere]
    yield Edit("mixed_devices", what, moved, way)


def _integers_as_mask(facts: Facts) -> Iterator[Edit]:
    """Yield a mask of integers as booleans, where True masks a key out, or for the kernel keeps it."""
    if facts.base in LAYERS:
        masks = [operand for operand in facts.operands if operand.role in ("key_padding_mask", "attn_mask")]
        rule = "The layer takes a boolean mask (True masks a key out) or a floating one (added to the scores)."
    elif facts.base == "masked_fill" and len(facts.operands) > 1:
        masks = [facts.operands[1]]
        rule = "masked_fill takes a boolean mask (True masks a key out)."
    else:
        return
    for mask in masks:
        if mask.has_integers or (facts.base == "masked_fill" and mask.dtype != "bool"):
            what = f"{mask.name} is {mask.dtype}. {rule}"
            yield Edit("mask_dtype", what, (Change(mask, (("eq", 0),)),), note="if 0 means masked out", cost=0)
            yield Edit("mask_dtype", what, (Change(mask, (("bool",),)),), note="if 1 does", cost=0)
            return


def _of_one_dtype(facts: Facts) -> Iterator[Edit]:
    odd, usual = _odd_one(facts, "dtype")
    dtype = getattr(torch, usual)
    what = f"{odd.name} is {odd.dtype}; the other tensors are {usual}."
    alike = [operand for operand in facts.operands if operand.dtype == odd.dtype]
    usual_ones = [operand for operand in facts.operands if operand.dtype == usual]
    converted = [Change(operand, (("to", dtype),)) for operand in alike]
    if odd.role == "attn_mask":
        rule = f"A mask must be boolean (True keeps a key) or {usual} as the queries are (added to the scores)."
        what = f"{odd.name} is {odd.dtype}. {rule}"
        if odd.has_integers or _says_which(odd):
            yield Edit("mask_dtype", what, (Change(odd, (("bool",),)),), note="if 1 keeps a key")
            yield Edit("mask_dtype", what, (Change(odd, (("eq", 0),)),), note="if 0 does")
        else:
            yield Edit("mask_dtype", what, converted[:1])
        return
    if odd.role == "input" and odd.has_integers:
        what = f"{odd.name} is {odd.dtype}: integers, as token ids are."
        if facts.base == "linear":
            embedded = Change(odd, (("new_zeros", (*odd.shape, facts.operands[1].shape[-1])), ("to", dtype)))
            yield Edit("mixed_dtypes", what, (embedded,), "pass token ids through nn.Embedding first")
        yield Edit("mixed_dtypes", what, converted, f"convert numbers with .to(torch.{usual})")
        return
    yield Edit("mixed_dtypes", what, converted, f"use {odd.spelled}.to(torch.{usual})")
    if all(operand.is_parameter for operand in usual_ones):
        module = [Change(operand, (("to", getattr(torch, odd.dtype)),)) for operand in usual_ones]
        yield Edit("mixed_dtypes", what, module, f"convert the module with .to(torch.{odd.dtype})")


def _says_which(mask: Operand) -> bool:
    """Return whether a mask of floats has zeros and ones alone: to add them to the scores would mask nothing out."""
    numbers = mask.given.value
    return is_of_two(numbers) and bool(numbers.any())


def edits_of_numbers(facts: Facts) -> Iterator[Edit]:
    """Yield the end of the range of a dtype in the place of a number beyond it: a mask of -1e10 in half precision."""
    if not facts.operands or not facts.operands[0].given.value.is_floating_point():
        return
    operand = facts.operands[0]
    limits = torch.finfo(operand.given.value.dtype)
    for place, value in enumerate(facts.call.args):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or abs(value) <= limits.max:
            continue
        end, limit, adjective = ("min", limits.min, "smallest") if value < 0 else ("max", limits.max, "largest")
        what = f"{operand.name} is {operand.dtype}, and its {adjective} number is {limit:,.6g}: {value:g} does not fit."
        args = [*facts.call.args[:place], limit, *facts.call.args[place + 1 :]]
        way = f"use torch.finfo({operand.spelled}.dtype).{end} in place of {value:g}"
        yield Edit("number_too_large", what, way=way, args=args, kwargs=facts.call.kwargs)


def edits_of_joins(facts: Facts) -> Iterator[Edit]:
    """Yield a cat along another dimension, and a product of more dimensions than bmm takes."""
    if facts.base == "bmm" and any(len(operand.shape) != 3 for operand in facts.operands):
        shapes = " and ".join(operand.is_shape for operand in facts.operands)
        what = f"{shapes}; torch.bmm takes 3 dimensions of each."
        yield Edit("wrong_rank", what, way="use torch.matmul", function=torch.matmul)
    if facts.base not in ("cat", "concat", "concatenate") or len(facts.operands) < 2:
        return
    yield from _shared_before_join(facts)
    given = facts.call.kwargs.get("dim", facts.call.args[1] if len(facts.call.args) > 1 else 0)
    rank = len(facts.operands[0].shape)
    for dim in range(rank):
        if dim != given % max(rank, 1):
            what = f"{'; '.join(operand.text for operand in facts.operands)}: they differ in dimension {dim} alone."
            yield Edit("joined_along_another", what, way=f"use dim={dim}", args=(facts.call.args[0], dim))


def _shared_before_join(facts: Facts) -> Iterator[Edit]:
    """Yield an item for all of a batch, as a class token is, shared by them."""
    batch = max(operand.shape[0] if operand.shape else 0 for operand in facts.operands)
    for operand in facts.operands:
        if operand.shape[:1] == (1,) and batch > 1:
            change = Change(operand, (("expand", batch, *[-1] * (len(operand.shape) - 1)),))
            what = f"{operand.is_shape}, and the other tensors have {batch} items in dimension 0."
            yield Edit("batch_differs", what, (change,), f"use {change.code} to share its one item", cost=0)


# -- tables -----------------------------------------------------------------------------------------------------------


def edits_of_tables(facts: Facts) -> Iterator[Edit]:
    """Yield ids within a table, positions of a table in another dimension, and a table or cache with more room."""
    yield from _ids_in_range(facts)
    if len(facts.operands) == 2 and not any(operand.from_scores for operand in facts.operands):
        yield from _positions_turned(facts)
        yield from _with_room(facts)


def _ids_in_range(facts: Facts) -> Iterator[Edit]:
    """Yield numbers that a table has; of those below 0 alone it is only said, because which are meant is unknown."""
    table = facts.given("weight") if facts.base == "embedding" else next(iter(facts.operands), None)
    ids = next((operand for operand in facts.operands if operand is not table and operand.has_integers), None)
    if table is None or ids is None or ids.given.value.is_meta or not ids.given.value.numel():
        return
    first, last = (int(number) for number in ids.given.value.aminmax())
    what = f"{ids.name} has numbers from {first} to {last}; {table.is_shape}"
    for place, size in enumerate(_sizes_of_table(facts, table)):
        if first >= 0 and last < size:
            continue
        why = f"{what}: 0 to {size - 1} are in range."
        if last < size:
            yield Edit("index_out_of_range", why)
            return
        way = f"use numbers below {size}, or make {table.spelled} for {last + 1}"
        if first < 0:
            way = f"use numbers from 0 to {size - 1}"
        change = Change(ids, (("clamp", 0, size - 1),))
        yield Edit("index_out_of_range", why, (change,), way, cost=place)


def _sizes_of_table(facts: Facts, table: Operand) -> list[int]:
    """Return the rows of an embedding, or the sizes of what is indexed that the numbers may be for."""
    if facts.base == "embedding":
        return [table.shape[0]]
    if facts.base not in ("getitem", "setitem", "index_select", "gather", "index", "index_put"):
        return []
    return sorted(set(table.shape), reverse=True)


def _positions_turned(facts: Facts) -> Iterator[Edit]:
    """Yield a table `position 1 embed` beside `batch sequence embed`, turned or cut: what the input is is unknown."""
    if facts.base not in BROADCASTS:
        return
    x, table = sorted(facts.operands, key=lambda operand: operand.is_table)
    if x.is_table or not table.is_table or len(x.shape) != 3 or len(table.shape) != 3:
        return
    place = 0 if table.shape[1] == 1 else 1
    positions, tokens, other = table.shape[place], x.shape[1 - place], x.shape[place]
    if (
        table.shape[1 - place] != 1
        or positions == 1
        or table.shape[-1] != x.shape[-1]
        or positions < max(tokens, other)
    ):
        return
    if positions not in (tokens, other) and not _is_whole(facts, table):
        return  # other positions were chosen: which are meant is unknown
    layout = "position 1 embed" if place == 0 else "1 position embed"
    meets = f"the {positions} positions meet dimension {place} of {x.name}, {x.axis(place)}"
    what = f"{table.name} is {text.shape(table.shape)}, {layout}, and {x.name} is {text.shape(x.shape)}: {meets}."
    layouts = ["batch sequence embed", "sequence batch embed"]
    turned, plain = layouts if place == 0 else layouts[::-1]
    whole = () if place == 0 else (slice(None),)
    for size, steps, meant in ((tokens, (("transpose", 0, 1),), turned), (other, (), plain)):
        change = Change(table, (("__getitem__", (*whole, slice(None, size))), *steps))
        note = f"if {x.name} is `{meant}`"
        yield Edit("table_transposed", what, (change,), note=note, shape=x.shape, cost=2)


def _is_whole(facts: Facts, table: Operand) -> bool:
    """Return whether a table is all of a parameter or buffer, perhaps in another shape."""
    source, _ = list(facts.reached.steps_back(table.given.tensor))[-1]
    return source.numel == table.given.tensor.numel and facts.reached.graph.recording.producer(source) is None


def _could_be_longer(facts: Facts, table: Operand, size: int) -> bool:
    """Return whether a table was cut, or looked up, from one that has room for so many."""
    if not table.is_table:
        return False
    source, op = list(facts.reached.steps_back(table.given.tensor))[-1]
    if op is not None and op.base_name == "embedding":
        source = op.inputs[0]
    return max(source.shape[:-1], default=0) >= size


def _with_room(facts: Facts) -> Iterator[Edit]:
    """Yield a cache or a table with more room."""
    for cache, shape, incoming in _rooms(facts):
        place = first_clash(shape, incoming.shape)
        if place is None or shape[place] > incoming.shape[place]:
            continue
        if facts.base in BROADCASTS and _could_be_longer(facts, cache, incoming.shape[place]):
            continue
        size = shape[place]
        needs = cache.shape[place] - size + incoming.shape[place]
        dimension = len(cache.shape) + place
        what = f"{incoming.is_shape}; {cache.is_shape}, with room for {size} in dimension {dimension}."
        change = Change(cache, (("new_zeros", with_size(cache.shape, place, needs)),))
        way = f"make dimension {dimension} of {cache.spelled} {needs} or more, or pass less"
        yield Edit("no_room", what, (change,), way, cost=3)
        return


def _rooms(facts: Facts) -> Iterator[tuple[Operand, Shape, Operand]]:
    """Yield a cache with the shape of the part that is written, or a table; and what is written or added."""
    left, right = facts.operands
    if facts.base == "setitem" and facts.call.args[2] is right.given.value:
        try:
            part: Any = left.given.value[facts.call.args[1]]
        except (IndexError, TypeError):  # the index itself may be wrong
            return
        yield left, tuple(part.shape), right
    elif facts.base in BROADCASTS:
        for table, incoming in ((left, right), (right, left)):
            if table.is_table and not incoming.is_table and table.shape[-1:] == incoming.shape[-1:]:
                yield table, table.shape, incoming
