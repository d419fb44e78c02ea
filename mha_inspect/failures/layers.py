"""Edits of what a layer is given: features that it takes, and the batch and sequence of torch's attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from .. import text
from .edit import SWAP, Change, Edit, Step
from .factors import SAME_SEQUENCE, of_sizes, with_size
from .facts import HEADS, NORMS, Facts, Operand
from .meeting import clashes
from .reached import LAYERS, PRODUCTS, behind_of

_SETTING_OF = {"query": "embed_dim", "key": "kdim", "value": "vdim"}
"""Argument of nn.MultiheadAttention to the setting for its width."""


@dataclass(frozen=True)
class Extent:
    """The sizes of `batch sequence embed` as a layer reads them."""

    batch: int
    """0 if the input has no batch."""
    length: int


def extent_of(facts: Facts, given: Operand) -> Extent:
    """Return batch and length of an input as the layer reads them."""
    if len(given.shape) != 3:
        return Extent(batch=0, length=given.shape[0] if given.shape else 0)
    first, second, _ = given.shape
    if facts.call.batch_first:
        return Extent(batch=first, length=second)
    return Extent(batch=second, length=first)


def swapped(facts: Facts) -> list[Change]:
    """Return the changes that swap batch and sequence of what a layer is given."""
    changes = []
    for operand in facts.operands:
        is_sequence = operand.role in ("query", "key", "value", "src", "tgt")
        if is_sequence and len(operand.shape) == 3:
            changes.append(Change(operand, (("transpose", 0, 1),)))
    return changes


# -- batch and sequence -----------------------------------------------------------------------------------------------


def edits_of_sequences(facts: Facts) -> Iterator[Edit]:
    """Yield the edits of the sequences that a layer of torch is given, and of its mask of keys."""
    query, key = facts.given("query", "tgt"), facts.given("key", "src")
    if facts.base not in LAYERS or query is None or key is None:
        return
    of_query, of_key = extent_of(facts, query), extent_of(facts, key)
    place = 0 if facts.call.batch_first else 1
    reading = f"batch_first={facts.call.batch_first} takes dimension {place} as the batch"
    sizes = f"{query.name} has batch {of_query.batch}, length {of_query.length}"
    if key.given.tensor.id != query.given.tensor.id:
        sizes += f" and {key.name} has batch {of_key.batch}, length {of_key.length}"
    padding, mask = facts.given("key_padding_mask"), facts.given("attn_mask")
    way = "create the layer with batch_first=True or pass x.transpose(0, 1), if the batch is dimension 0"
    if facts.call.batch_first:
        way = "pass x.transpose(0, 1) to make the sequence dimension 1, or create the layer with batch_first=False"
    what = f"{reading}: {sizes}."
    if padding is not None and padding.shape != (of_key.batch, of_key.length):
        yield from _of_padding(facts, padding, key, what)
    elif mask is not None and mask.shape == (of_query.batch, of_query.batch) != (of_query.length, of_key.length):
        what = f"{what} {mask.is_shape} and fits dimension {place}."
        yield Edit("batch_and_sequence_swapped", what, swapped(facts), way, cost=0)
    elif of_query.batch != of_key.batch and of_query.length == of_key.length:
        what = f"{what} They agree in the other dimension."
        yield Edit("batch_and_sequence_swapped", what, swapped(facts), way)
    yield from _of_clashes(facts, padding, reading)


def _of_clashes(facts: Facts, padding: Operand | None, reading: str) -> Iterator[Edit]:
    """Yield keys and values of one sequence, and one batch, where those of a layer differ."""
    for clash in clashes(facts):
        if {clash.left.role, clash.right.role} == {"key", "value"}:
            key, value = clash.left, clash.right
            what = f"Keys and values differ: {key.is_shape}, {value.is_shape}."
            change = Change(value, (("new_zeros", (*key.shape[:2], value.shape[-1])),))
            yield Edit("lengths_differ", what, (change,), SAME_SEQUENCE, cost=5)
        elif clash.letter == "b" and clash.right is not padding:
            for edit in of_sizes(clash):
                yield Edit(edit.cause, f"{reading}: {edit.why}", edit.changes, edit.way, cost=edit.cost)


def _of_padding(facts: Facts, padding: Operand, key: Operand, what: str) -> Iterator[Edit]:
    """Yield a mask of keys turned, or made for the keys, which are `batch key` whatever the order of the layer."""
    extent = extent_of(facts, key)
    expected = (extent.batch, extent.length) if extent.batch else (extent.length,)
    yield from _of_pairs(facts, padding)
    yield from _of_other_padding(facts, padding, expected)
    is_turned = padding.shape == expected[::-1] != expected
    if is_turned:
        expects = f"{what} {padding.is_shape}; it must be batch key, {text.shape(expected)}, with either batch_first."
        way = "x.transpose(0, 1)" if facts.call.batch_first else "batch_first=True"
        turned = Change(padding, (("transpose", 0, 1),))
        cause = "batch_and_sequence_swapped"
        yield Edit(cause, expects, (turned,), f"use {padding.spelled}.T if {key.spelled} is right")
        yield Edit(cause, expects, swapped(facts), f"use {way} for {key.spelled} if the mask is right")
    axes = "batch key" if extent.batch else "key"
    what = f"{padding.is_shape}; expected {axes}, {text.shape(expected)}, for key_padding_mask."
    of_batch = f"batch {extent.batch} and " if extent.batch else ""
    way = f"build the mask for {of_batch}key {extent.length}"
    yield Edit("mask_size", what, (Change(padding, (("new_zeros", expected),)),), way, cost=5)


def _of_pairs(facts: Facts, padding: Operand) -> Iterator[Edit]:
    """Yield a mask of queries and keys that was given in the place of that of keys, as the fourth argument is."""
    query, key = facts.given("query"), facts.given("key")
    if facts.attention is None or query is None or key is None or facts.given("attn_mask") is not None:
        return
    of_query, of_key = extent_of(facts, query), extent_of(facts, key)
    pairs = (of_query.length, of_key.length)
    if padding.shape not in (pairs, (of_query.batch * facts.attention.num_heads, *pairs)):
        return
    what = f"{padding.is_shape}, query key, and was given as key_padding_mask, which is batch key."
    mask = {"attn_mask": padding.given.value, "key_padding_mask": None}
    yield Edit("mask_rank", what, way=f"pass attn_mask={padding.spelled}", kwargs=mask, cost=0)


def _of_other_padding(facts: Facts, padding: Operand, expected: tuple[int, ...]) -> Iterator[Edit]:
    """Yield the mask of keys that the line gives for another sequence, if it alone is of these keys."""
    fitting = []
    for argument, passed in facts.passed.items():
        if argument.endswith("key_padding_mask") and tuple(passed.value.shape) == expected:
            fitting.append(passed)
    if len(fitting) != 1 or padding.shape == expected:
        return
    other = fitting[0]
    what = f"{padding.is_shape}; these keys are {text.shape(expected)}, as {other.name} is."
    mask = {"key_padding_mask": other.value}
    yield Edit(
        "mask_size",
        what,
        way=f"use {other.name} for these keys, and {padding.spelled} for the others",
        kwargs=mask,
        cost=4,
    )


# -- features ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Misfit:
    """An input whose last dimension is not what its layer takes."""

    x: Operand
    takes: int
    """The features that the layer takes."""
    weight: Operand | None
    """The weight of the layer; None for nn.MultiheadAttention, and for a norm without one."""
    name: str
    """What takes them: `q_proj.weight`."""


def edits_of_features(facts: Facts) -> Iterator[Edit]:
    """Yield the edits of the first input that has other features than its layer takes."""
    for misfit in _taken(facts):
        if misfit.x.shape and misfit.takes and misfit.x.shape[-1] != misfit.takes:
            if not facts.of_part("key", "value") and not _is_of_weights(facts, misfit.x):
                yield from _of_layout(facts, misfit)
                yield from _of_width(facts, misfit)
            return


def _is_of_weights(facts: Facts, x: Operand) -> bool:
    """Return whether an operand is the weights of the attention, or its scores: their keys are no features."""
    scored = [facts.reached.stages.get(stage) for stage in ("weights", "masked_scores", "scores")]
    return x.from_scores or any(tensor is not None and tensor.id == x.given.tensor.id for tensor in scored)


def _taken(facts: Facts) -> Iterator[_Misfit]:
    """Yield the inputs of a layer with the features that it takes, whether they fit or not; nothing for other calls."""
    if facts.attention is not None:
        yield from _taken_by_attention(facts, facts.attention)
    elif facts.base in NORMS and facts.operands:
        weight = next((operand for operand in facts.operands[1:] if operand.is_parameter), None)
        yield _Misfit(facts.operands[0], _normalized(facts), weight, "the norm" if weight is None else weight.name)
    elif facts.base == "linear" and len(facts.operands) >= 2:
        x, weight = facts.operands[:2]
        yield _Misfit(x, weight.shape[-1] if weight.shape else 0, weight, weight.name)
    elif facts.base in (*PRODUCTS, "mul", "imul") and len(facts.operands) == 2:
        # The norm of a model may multiply by its weight itself.
        weight, x = sorted(facts.operands, key=lambda operand: not operand.is_parameter)
        rank = 1 if facts.pair is None else 2
        if weight.is_parameter and len(weight.shape) == rank and not x.is_parameter:
            yield _Misfit(x, weight.shape[0], weight, weight.name)


def _taken_by_attention(facts: Facts, layer: nn.MultiheadAttention) -> Iterator[_Misfit]:
    """Yield the inputs of nn.MultiheadAttention, whose widths are its settings."""
    for role, takes in (("query", layer.embed_dim), ("key", layer.kdim), ("value", layer.vdim)):
        x = facts.given(role)
        if x is not None and takes is not None:
            yield _Misfit(x, takes, None, f"the layer ({_SETTING_OF[role]})")


def _normalized(facts: Facts) -> int:
    """Return the last of the sizes that a norm of torch is for; 0 if they are unknown."""
    shape: Any = facts.call.kwargs.get("normalized_shape", facts.call.args[1] if len(facts.call.args) > 1 else ())
    return shape[-1] if isinstance(shape, (tuple, list)) and shape else 0


def _is_norm(facts: Facts) -> bool:
    return facts.base not in ("linear",) and facts.pair is None and facts.attention is None


def _of_layout(facts: Facts, misfit: _Misfit) -> Iterator[Edit]:
    """Yield the heads joined, the features moved to the end, and the weight transposed."""
    x, takes, weight = misfit.x, misfit.takes, misfit.weight
    is_norm = _is_norm(facts)
    for place, steps, note in _joined(x, takes):
        if is_norm:
            yield from _norm_of_heads(facts, misfit, x.shape[place], steps)
        elif facts.attention is None:
            yield _with_heads_joined(misfit, x.shape[place], steps, note)
    if is_norm:
        if len(x.shape) > 2 and x.shape[1:-1].count(takes) == 1:
            yield Edit("features_not_last", _features_elsewhere(misfit))
        return
    if weight is not None and facts.pair is not None and weight.shape[-1] == x.shape[-1]:
        what = f"{weight.is_shape}, (out_features, in_features) as in nn.Linear; {x.name} has {x.shape[-1]} features."
        way = f"multiply by {weight.spelled}.T, or call the layer"
        yield Edit("weight_not_transposed", what, (Change(weight, (("transpose", 0, 1),)),), way)
    if len(x.shape) > 2 and x.shape[1:-1].count(takes) == 1:
        place = x.shape.index(takes, 1)
        # Images have their places behind the features, and heads may have been joined in another order.
        is_known = len(x.shape) == 3 and len(x.dims[place]) == 1
        change = Change(x, (("transpose", place, -1),))
        way = f"use {x.source}" if is_known and change.code == x.source else ""
        what = _features_elsewhere(misfit)
        if is_known:
            what = f"{x.name} has its {takes} features in dimension {place}; {misfit.name} expects them last."
        yield Edit("features_not_last", what, (change,) if is_known else (), way, cost=2)


def _with_heads_joined(misfit: _Misfit, heads: int, steps: Sequence[Step], note: str) -> Edit:
    x, takes = misfit.x, misfit.takes
    head_dim = takes // heads
    what = f"{x.name} still has {heads} heads of {head_dim}"
    if x.place(*HEADS) is None:
        what = f"{x.name} ends in {x.axis(-2)} and {x.axis(-1)}"
    what = f"{what}; {misfit.name} expects them side by side, {heads}·{head_dim} = {takes}."
    changes = (Change(x, steps),) if steps else ()
    return Edit("heads_not_joined", what, changes, note=note)


def _features_elsewhere(misfit: _Misfit) -> str:
    x, takes = misfit.x, misfit.takes
    place = x.shape.index(takes, 1)
    return f"{x.name} has {takes} in dimension {place}; {misfit.name} expects its {takes} features last."


def _joined(x: Operand, takes: int) -> Iterator[tuple[int, list[Step], str]]:
    """Yield the dimension of the heads, how to join them with their features, and when that is right.

    No steps where the heads come before the batch: it is unknown which layout is meant.
    """
    rank = len(x.shape)
    heads = x.place(*HEADS)
    if heads is None and rank > 3 and x.shape[-1] * x.shape[-2] == takes:
        yield rank - 1, [SWAP, ("flatten", -2)], "if the heads come last"
        yield rank - 2, [("flatten", -2)], "if their features do"
    elif heads is not None and rank > 2 and heads < rank - 1 and x.shape[heads] * x.shape[-1] == takes:
        if heads == rank - 2:
            yield heads, [("flatten", -2)], ""
        elif heads == 1:
            yield heads, [("transpose", 1, rank - 2), ("flatten", -2)], ""
        else:
            yield heads, [], ""


def _norm_of_heads(facts: Facts, misfit: _Misfit, heads: int, steps: list[Step]) -> Iterator[Edit]:
    """Yield the norm before the heads are split, and one for each head."""
    x, head_dim = misfit.x, misfit.takes // heads
    features = f"{misfit.takes} features = {text.plural(heads, 'head')} · {head_dim}"
    what = (
        f"{misfit.name} has {features}, for the whole projection; "
        f"{x.name} is already split into heads, {text.shape(x.shape)}."
    )
    name = misfit.name.removesuffix(".weight")
    yield Edit("norm_of_whole", what, (Change(x, steps),), f"apply {name} before the heads are split")
    way = f"create it for {head_dim} features if each head is normalised by itself"
    if facts.base in NORMS:
        yield Edit("norm_of_whole", what, way=way, args=(x.given.value, (head_dim,)))
    elif misfit.weight is not None:
        yield Edit("norm_of_whole", what, (Change(misfit.weight, (("new_zeros", (head_dim,)),)),), way)


def _of_width(facts: Facts, misfit: _Misfit) -> Iterator[Edit]:
    """Yield a layer for the features of the input, and an input of those that the layer takes."""
    x, takes, weight = misfit.x, misfit.takes, misfit.weight
    is_norm = _is_norm(facts)
    if is_norm and facts.base != "layer_norm":
        return
    if takes in x.shape[1:-1]:
        return  # the features are there, in another dimension
    width = x.shape[-1]
    what = f"{x.name} has {width} features; {misfit.name} expects {takes}."
    if not _keeps_tokens(facts, x) or (len(x.shape) > 2 and x.shape[0] == takes):
        # After a wrong view or a forgotten step, the width is not what is wrong.
        yield Edit("wrong_width", what, cost=9)
        return
    if facts.attention is not None:
        yield from _attention_for(facts, facts.attention, x, what)
    elif is_norm:
        yield Edit("wrong_width", what, way=f"create the layer for {width}", args=(x.given.value, (width,)), cost=9)
    elif weight is not None:
        place = -1 if facts.base == "linear" else 0
        change = Change(weight, (("new_zeros", with_size(weight.shape, place, width)),))
        yield Edit("wrong_width", what, (change,), f"create the layer with in_features {width}", cost=9)
    change = Change(x, (("new_zeros", (*x.shape[:-1], takes)),))
    yield Edit("wrong_width", what, (change,), f"give {x.name} {takes} features", cost=9)


def _attention_for(facts: Facts, layer: nn.MultiheadAttention, x: Operand, what: str) -> Iterator[Edit]:
    """Yield an nn.MultiheadAttention for other widths, tried with such a layer."""
    sizes = {"embed_dim": layer.embed_dim, "kdim": layer.kdim, "vdim": layer.vdim}
    if x.role == "query":
        settings = {"embed_dim": x.shape[-1]}
        if layer._qkv_same_embed_dim:
            # Keys and values have the width of the queries, if nothing else was given.
            sizes = dict.fromkeys(sizes, x.shape[-1])
    else:
        given = {_SETTING_OF[role]: facts.given(role) for role in ("key", "value")}
        settings = {name: o.shape[-1] for name, o in given.items() if o is not None and o.shape[-1] != sizes[name]}
    try:
        wide = nn.MultiheadAttention(
            **{**sizes, **settings},
            num_heads=layer.num_heads,
            batch_first=layer.batch_first,
            device="meta",
            dtype=layer.out_proj.weight.dtype,
        ).to_empty(device=x.given.value.device)
    except (AssertionError, ValueError):  # the heads do not divide that width
        return
    written = ", ".join(f"{name}={size}" for name, size in settings.items())
    yield Edit("wrong_width", what, way=f"create the layer with {written}", function=wide.forward, cost=9)


def _keeps_tokens(facts: Facts, x: Operand) -> bool:
    """Return whether an operand has one row for each token of an input of the module: `batch sequence features`."""
    rows = prod(x.shape[:-1])
    sources = {tensor.id for tensor in behind_of(facts.reached.graph, x.given.tensor)}
    for named in facts.reached.graph.recording.inputs:
        # Token ids are `batch sequence`.
        shape = named.tensor.shape
        if named.tensor.id in sources and rows in (prod(shape), prod(shape[:-1])):
            return True
    return False
