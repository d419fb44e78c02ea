"""The mistakes that people make in attention, each told by evidence and never by a name or a guess.

To add one, write a rule: `@_cause(name, what it is in a phrase, the calls that it judges)` over a function that looks
at a failing call and returns what is wrong, with the real numbers, and what to write instead; or None. Rules are asked
in the order in which they stand, and the first one that answers is believed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from math import prod
from typing import TypeAlias

from ...record.ops import TensorRef
from ...reports.failure import Cause
from .operand import HEADS, SEQUENCES, Operand, shape_text
from .scene import VIEWS, Scene, first_clash

Told: TypeAlias = "tuple[str, str] | None"
"""What is wrong and a way out; None where the evidence shows no such mistake."""
Rule: TypeAlias = Callable[[Scene], Told]

CAUSES: dict[str, str] = {}
"""Name of each cause, and what it is in a phrase."""
_RULES: list[tuple[str, Collection[str], Rule]] = []
_LAYERS = ("multi_head_attention", "transformer")
_SDPA = "scaled_dot_product_attention"


def find_cause(scene: Scene) -> Cause | None:
    """Return the mistake that the evidence shows; None where it shows none."""
    for name, calls, rule in _RULES:
        if (not calls or scene.base in calls) and (told := rule(scene)) is not None:
            return Cause(name, *told)
    return None


def _cause(name: str, phrase: str = "", calls: Collection[str] = ()) -> Callable[[Rule], Rule]:
    """Add a rule for a cause; the phrase stands at the first one for it, `calls` are those that it judges, or all."""

    def add(rule: Rule) -> Rule:
        CAUSES.setdefault(name, phrase)
        _RULES.append((name, calls, rule))
        return rule

    return add


# ---------------------------------------------------------------- devices and dtypes


@_cause("mixed_devices", "tensors of several devices in one call")
def _devices(scene: Scene) -> Told:
    if not scene.mixes_devices:
        return None
    odd, usual = _odd_one(scene, "device")
    return (
        f"{odd.name} is on {odd.device}, the others are on {usual}.",
        f"Move it: .to({usual!r}) on a tensor, or the module and its inputs to one device. A tensor that the module "
        "makes for itself needs device=x.device, or register_buffer.",
    )


@_cause("mask_dtype", "a mask of integers")
def _mask_dtype(scene: Scene) -> Told:
    for mask in (scene.given("key_padding_mask"), scene.given("attn_mask")) if scene.base in _LAYERS else ():
        if mask is not None and mask.dtype.startswith(("int", "uint")):
            return (
                f"{mask.name} is {mask.dtype}; {mask.role} is boolean, True where a key is hidden, or floating, which "
                "is added.",
                f"{mask.name} == 0 where 0 means hidden, {mask.primary}.bool() where 1 does.",
            )
    if scene.base == "masked_fill" and "boolean mask" in scene.message and scene.mask_and_scores is not None:
        mask = scene.mask_and_scores[0]
        return (
            f"{mask.name} is {mask.dtype}; masked_fill takes a boolean mask, True where a key is to be hidden.",
            f"{mask.name} == 0 where 0 means hidden, {mask.primary}.bool() where 1 does.",
        )
    mask = scene.given("attn_mask")
    if mask is None or not scene.mixes_dtypes:
        return None
    odd, usual = _odd_one(scene, "dtype")
    if odd is not mask:
        return None
    return (
        f"{mask.name} is {mask.dtype}, the queries are {usual}; a mask is boolean, True where a key is seen, or of "
        "their dtype, which is added.",
        f"{mask.primary}.bool(), or {mask.primary}.to(torch.{usual}).",
    )


@_cause("mixed_dtypes", "tensors of several dtypes in one call")
def _dtypes(scene: Scene) -> Told:
    if not scene.mixes_dtypes:
        return None
    x = scene.given("input")
    if x is not None and x.dtype.startswith(("int", "uint")):
        return (
            f"{x.name} is {x.dtype}: whole numbers, as token ids are.",
            "Token ids go through an nn.Embedding first; numbers need .float().",
        )
    odd, usual = _odd_one(scene, "dtype")
    return (
        f"{odd.name} is {odd.dtype}, the others are {usual}.",
        f"Bring them to one: {odd.primary}.to(torch.{usual}), or the module with .to(torch.{odd.dtype}); "
        "under torch.autocast neither is needed.",
    )


def _odd_one(scene: Scene, what: str) -> tuple[Operand, str]:
    """Return the operand that differs from most (a parameter is less likely the odd one), and what most are."""
    weights: dict[str, int] = {}
    for operand in scene.operands:
        value = getattr(operand, what)
        weights[value] = weights.get(value, 0) + (2 if operand.is_parameter else 1)
    usual = max(weights, key=lambda value: weights[value])
    return next(o for o in scene.operands if getattr(o, what) != usual), usual


# ---------------------------------------------------------------- what a layer takes


def _width_clash(scene: Scene) -> tuple[Operand, int, Operand | None] | None:
    """Return an input, the features that its layer takes, and its weight, where the input has others; else None."""
    x: Operand | None = None
    weight: Operand | None = None
    takes = 0
    if scene.widths:
        roles = [(scene.given(role), width) for role, width in scene.widths.items()]
        x, takes = next(((o, n) for o, n in roles if o is not None and o.shape and o.shape[-1] != n), (None, 0))
    elif scene.base in ("linear", "layer_norm") and len(scene.operands) >= 2:
        x, weight = scene.operands[0], scene.operands[1 if scene.base == "linear" else -1]
        takes = weight.shape[-1] if weight.shape else 0
    elif scene.pair is not None and scene.pair[1].is_parameter and len(scene.pair[1].shape) == 2:
        x, weight = scene.pair
        takes = weight.shape[0]
    return None if x is None or not x.shape or not takes or x.shape[-1] == takes else (x, takes, weight)


@_cause("heads_not_joined", "heads not put side by side behind the sequence")
def _not_joined(scene: Scene) -> Told:
    if scene.widths or (found := _width_clash(scene)) is None:
        return None
    x, takes, _ = found
    heads, features = x.place(*HEADS), x.place("head_dim")
    if heads is None and len(x.shape) >= 4 and x.shape[-1] * x.shape[-2] == takes:
        return (
            f"{x.name} ends in two dimensions, {x.axis(-2)} and {x.axis(-1)}; the layer takes them as one, {takes}.",
            "torch.cat(heads, dim=-1), or .flatten(-2) with the heads in front of their features.",
        )
    if heads is None or features is None or heads == features or x.shape[heads] * x.shape[features] != takes:
        return None
    swap = "" if heads == len(x.shape) - 2 else ".transpose(1, 2)"
    return (
        f"{x.name} still has {x.shape[heads]} heads of {x.shape[features]}; the layer takes them side by side, "
        f"{x.shape[heads]}·{x.shape[features]} = {takes}.",
        f"{x.primary}{swap}.flatten(-2) first: heads behind the sequence, then one dimension with their features.",
    )


@_cause("weight_not_transposed", "a weight matrix that is the wrong way round")
def _weight(scene: Scene) -> Told:
    x, _, weight = _width_clash(scene) or (None, 0, None)
    by_hand = x is not None and weight is not None and scene.base not in ("linear", "layer_norm")
    if x is None or weight is None or not by_hand or weight.shape[-1] != x.shape[-1]:
        return None
    return (
        f"{weight.is_shape}, out_features in_features as nn.Linear keeps it, and {x.name} has {x.shape[-1]} features.",
        f"{x.primary} @ {weight.primary}.T, or call the layer.",
    )


@_cause("features_not_last", "features in another dimension than the last")
def _features(scene: Scene) -> Told:
    x, takes, _ = _width_clash(scene) or (None, 0, None)
    places = [place for place, size in enumerate(x.shape[:-1]) if size == takes] if x is not None else []
    if x is None or len(places) != 1 or len(x.shape) < 3:
        return None
    return (
        f"{x.name} has the {takes} features in dimension {places[0]}; the layer takes them last.",
        f"{x.primary}.transpose({places[0]}, -1).",
    )


@_cause("wrong_width", "a width that the layer does not take")
def _width(scene: Scene) -> Told:
    x, takes, weight = _width_clash(scene) or (None, 0, None)
    if x is None:
        return None
    has = x.shape[-1]
    if weight is None:
        setting = {"query": "embed_dim", "key": "kdim", "value": "vdim"}[x.role]
        return (
            f"{x.name} has {has} features, the layer takes {takes} as {x.role} ({setting}).",
            f"Make the layer with {setting}={has}, or bring {x.name} to {takes}.",
        )
    make = f"with in_features {has}" if scene.base == "linear" else f"for {has}"
    return (
        f"{x.name} has {has} features, {weight.name} takes {takes}.",
        f"Make the layer {make}, or bring {x.name} to {takes}.",
    )


# ---------------------------------------------------------------- torch's own layers


def _lengths(scene: Scene, given: Operand) -> tuple[int, int]:
    """Return batch and length as the layer reads them; a batch of 0 where the input has none."""
    if len(given.shape) != 3:
        return 0, given.shape[0] if given.shape else 0
    return (given.shape[0], given.shape[1]) if scene.batch_first else (given.shape[1], given.shape[0])


def _sequences(scene: Scene) -> tuple[Operand, Operand] | None:
    """Return what a layer of torch takes queries and keys from."""
    query, key = scene.given("query", "tgt"), scene.given("key", "src")
    return None if query is None or key is None else (query, key)


def _reading(scene: Scene) -> str:
    read = "batch" if scene.batch_first else "sequence"
    return f"batch_first={scene.batch_first} reads dimension 0 as the {read}"


@_cause(
    "batch_and_sequence_swapped",
    "sequence first where batch first is expected, or the other way round",
    _LAYERS,
)
def _order(scene: Scene) -> Told:
    """Find evidence for the other order of batch and sequence: what does not fit this one, and fits that."""
    if (given := _sequences(scene)) is None:
        return None
    query, key = given
    (batch, length), (key_batch, key_length) = _lengths(scene, query), _lengths(scene, key)
    mask, padding = scene.given("attn_mask"), scene.given("key_padding_mask")
    if not batch or not key_batch:
        return None
    why = ""
    if batch != key_batch and length == key_length:
        why = (
            f"batch {batch} against batch {key_batch}, where {query.name} and {key.name} agree in the other dimension."
        )
    elif mask is not None and length != batch and mask.shape == (batch, key_batch) and batch == key_batch:
        place = 0 if scene.batch_first else 1
        why = f"length {length}, batch {batch}; {mask.is_shape} and fits dimension {place}."
    elif mask is not None and length != batch and mask.shape == (length * scene.num_heads, batch, key_batch):
        why = f"length {length}, batch {batch}; {mask.name} {shape_text(mask.shape)} fits the other."
    elif padding is not None and padding.shape == (key_length, key_batch) and key_length != key_batch:
        way = "x.transpose(0, 1)" if scene.batch_first else "batch_first=True"
        return (
            f"{_reading(scene)}: batch {key_batch}, key {key_length}; {padding.is_shape}, and key_padding_mask is "
            "batch key in either case.",
            f"If {key.name} is right, {padding.primary}.T; if the mask is, {key.name} is the other way round: {way}.",
        )
    if not why:
        return None
    return (
        f"{_reading(scene)}: {why}",
        "Give the sequence in dimension 1: x.transpose(0, 1), or make the layer with batch_first=False."
        if scene.batch_first
        else "Make the layer with batch_first=True if the batch is in dimension 0, or give it x.transpose(0, 1).",
    )


_SAME_EXAMPLES = "Both must have the same examples; one example for all needs .expand on the batch dimension."
_SAME_SEQUENCE = "Keys and values must come from the same sequence."


@_cause("batch_differs", "queries and keys of different batch sizes", _LAYERS)
def _batch(scene: Scene) -> Told:
    if (given := _sequences(scene)) is None:
        return None
    batch, key_batch = (_lengths(scene, operand)[0] for operand in given)
    if not batch or not key_batch or batch == key_batch:
        return None
    query, key = given
    return (
        f"{_reading(scene)}: {query.name} has batch {batch}, {key.name} has batch {key_batch}.",
        _SAME_EXAMPLES,
    )


@_cause("lengths_differ", "as many values as keys are needed, and there are not", _LAYERS[:1])
def _values(scene: Scene) -> Told:
    key, value = scene.given("key"), scene.given("value")
    if key is None or value is None or len(key.shape) != 3 or len(value.shape) != 3:
        return None
    same = _lengths(scene, key) == _lengths(scene, value)
    return None if same else (f"{key.is_shape}, {value.is_shape}.", _SAME_SEQUENCE)


def _padding(scene: Scene) -> tuple[Operand, tuple[int, int], str] | None:
    """Return a key_padding_mask of torch's layer that does not fit, batch and key length, and what is wrong."""
    padding, given = scene.given("key_padding_mask"), _sequences(scene)
    if scene.base != "multi_head_attention" or padding is None or given is None:
        return None
    batch, length = _lengths(scene, given[1])
    expected = (batch, length) if batch else (length,)
    why = f"{padding.is_shape}; key_padding_mask is batch key, {shape_text(expected)}."
    return None if padding.shape == expected else (padding, (batch, length), why)


@_cause("mask_rank", "a mask that lacks a dimension", _LAYERS[:1])
def _mask_of_torch(scene: Scene) -> Told:
    found, mask, given = _padding(scene), scene.given("attn_mask"), _sequences(scene)
    if found is not None and len(found[0].shape) != (2 if found[1][0] else 1):
        return found[
            2
        ], "A mask over pairs of positions is attn_mask; one over keys has no dimension for heads or queries."
    if found is not None or mask is None or given is None:
        return None
    (batch, length), (_, key_length) = (_lengths(scene, operand) for operand in given)
    heads, pairs = scene.num_heads, (length, key_length)
    all_heads = max(batch, 1) * heads
    wanted = f"[{length}, {key_length}] or [{all_heads}, {length}, {key_length}], batch·heads first"
    if mask.shape == (batch, *pairs) != (all_heads, *pairs):
        return (
            f"{mask.is_shape}, one for each example; the layer takes {wanted}.",
            f"{mask.primary}.repeat_interleave({heads}, dim=0).",
        )
    if mask.shape in ((batch, 1, *pairs), (batch, heads, *pairs)):
        expand = "" if mask.shape[1] == heads else f".expand(-1, {heads}, -1, -1)"
        return f"{mask.is_shape}; the layer takes {wanted}.", f"{mask.primary}{expand}.flatten(0, 1)."
    if mask.shape == (batch, key_length) != pairs:
        return (
            f"{mask.is_shape}, batch key; attn_mask is {wanted}.",
            f"Give it as key_padding_mask={mask.primary}.",
        )
    return None


# ---------------------------------------------------------------- masks over scores


@_cause("heads_not_transposed", "divided into heads, and left behind the sequence")
def _scores_between_heads(scene: Scene) -> Told:
    scores = scene.mask_and_scores[1] if scene.mask_and_scores is not None else None
    if scores is None or len(scores.shape) != 4 or not all(dim[0] in HEADS for dim in scores.axes[-2:]):
        return None
    return (
        f"{scores.text}: heads are compared with heads, so queries and keys were split but not transposed.",
        "q.transpose(1, 2), and k and v alike, after the view that splits: heads must come before the sequence.",
    )


def _laid_over(scene: Scene) -> tuple[Operand, tuple[int, ...]] | None:
    """Return a mask and the shape of the scores (query and key last) that it does not lie over; else None."""
    mask = scene.given("attn_mask")
    scores: tuple[int, ...] = ()
    if scene.base == "multi_head_attention" and (given := _sequences(scene)) is not None:
        (batch, length), (_, key_length) = (_lengths(scene, operand) for operand in given)
        scores = (max(batch, 1) * scene.num_heads, length, key_length)
    elif scene.base == _SDPA and (given := _sequences(scene)) is not None:
        query, key = given
        scores = (*query.shape[:-1], key.shape[-2]) if min(len(query.shape), len(key.shape)) > 1 else ()
    elif scene.mask_and_scores is not None:
        mask, scores = scene.mask_and_scores[0], scene.mask_and_scores[1].shape
    if mask is None or not mask.shape or not 2 <= len(scores) <= 4:
        return None
    fits = first_clash(mask.shape, scores) is None and len(mask.shape) <= len(scores)
    return None if fits else (mask, scores)


@_cause("mask_rank")
def _lacks_dimension(scene: Scene) -> Told:
    """Find what a mask of too few dimensions is, and how it gets the one that it lacks."""
    if (found := _laid_over(scene)) is None:
        return None
    mask, scores = found
    shape, (batch, *_), (query, key) = mask.shape, scores, scores[-2:]
    known: dict[tuple[int, ...], tuple[str, str]] = {}
    if len(scores) == 4:
        heads = scores[1]
        view = f".view({batch}, {heads}, {query}, {key}): heads in a dimension of their own."
        known = {
            (batch, key): ("batch key", "[:, None, None, :]: one dimension for the heads, one for the queries."),
            (key, batch): ("key batch", ".T[:, None, None, :]: batch first, then heads and queries."),
            (batch, query, key): ("batch query key", "[:, None]: one dimension for the heads."),
            (batch, 1, key): ("batch 1 key", "[:, None]: one dimension for the heads."),
            (batch * heads, query, key): ("(batch heads) query key", view),
        }
        if batch == query == key:
            known.pop((key, batch))  # as well a mask that is simply too small for its queries
    elif len(scores) == 3:
        known = {(batch, key): ("batch key", "[:, None, :]: one dimension for the queries.")}
        if len(shape) == 3 and shape[1:] == (query, key) and 1 < shape[0] < batch and batch % shape[0] == 0:
            times = batch // shape[0]
            repeat = f".repeat_interleave({times}, dim=0): batch and {times} heads are one dimension here."
            known = {shape: ("batch query key", repeat)}
    if shape not in known:
        return None
    what, way = known[shape]
    return f"{mask.is_shape}, {what}, and the scores are {shape_text(scores)}.", mask.primary + way


@_cause("mask_transposed", "a mask with queries and keys swapped")
def _mask_transposed(scene: Scene) -> Told:
    mask, scores = _laid_over(scene) or (None, ())
    if mask is None or len(mask.shape) < 2 or mask.shape[-2:] != scores[:-3:-1] or scores[-1] == scores[-2]:
        return None
    query, key = scores[-2:]
    return (
        f"{mask.is_shape}, key {key} before query {query}, and the scores are {shape_text(scores)}.",
        f"{mask.primary}.transpose(-2, -1).",
    )


@_cause("batch_and_sequence_swapped")
def _mask_over_batch(scene: Scene) -> Told:
    mask, scores = _laid_over(scene) or (None, ())
    if mask is None or len(scores) < 3 or mask.shape != (scores[0], scores[0]) or scores[0] in scores[-2:]:
        return None
    return (
        f"{mask.is_shape}, and the scores are {shape_text(scores)}: it fits dimension 0, which is read as the batch.",
        "The input has its sequence first and the layer takes the batch first, or the other way round: "
        "x.transpose(0, 1), or batch_first.",
    )


@_cause("mask_size", "a mask of other lengths")
def _mask_size(scene: Scene) -> Told:
    if (found := _padding(scene)) is not None:
        return found[2], f"Make it for batch {found[1][0]} and key {found[1][1]}."
    mask, scores = _laid_over(scene) or (None, ())
    if mask is None:
        return None
    query, key = scores[-2:]
    rows, columns = (1, *mask.shape)[-2:]
    if rows in (1, query) and columns in (1, key):
        return None
    covers = f"{columns} keys" if rows == 1 else f"query {rows}, key {columns}"
    return (
        f"{mask.name} covers {covers}, and the scores are {shape_text(scores)}: query {query}, key {key}.",
        f"Cut it to the lengths of this call: {mask.primary}[..., :{query}, :{key}]."
        if (rows == 1 or rows >= query) and columns >= key
        else f"Make it for query {query} and key {key}, or give no more positions than it covers.",
    )


# ---------------------------------------------------------------- products of queries, keys and values


@_cause("heads_not_split", "one operand is divided into heads and the other is not")
def _not_split(scene: Scene) -> Told:
    factors = [o for o in scene.factors if o.part != "weights"]
    split = next((o for o in factors if o.place(*HEADS) is not None), None)
    odd = next((o for o in factors if o.place(*HEADS) is None and len(o.shape) == 3), None)
    if split is None or odd is None or len(split.shape) < 4:
        return None
    heads, head_dim = split.size(*HEADS), split.size("head_dim")
    if not heads or heads * head_dim not in odd.shape[1:]:
        return None
    return (
        f"{split.name} is divided into {heads} heads, {odd.name} is not.",
        f"Divide it too: .view(batch, length, {heads}, {head_dim}).transpose(1, 2).",
    )


@_cause("key_not_transposed", "the keys' features and positions are not swapped for the product")
def _keys(scene: Scene) -> Told:
    if scene.pair is None or not scene.sizes_clash or min(len(o.shape) for o in scene.pair) < 2:
        return None
    query, key = scene.pair
    name = _variable(scene, key)
    if key.part != "key":
        return None
    if len(key.shape) > 2 and key.axes[-1] == ["batch"]:
        return (
            f"{key.is_shape} {key.pattern}: all dimensions are turned round, as .T does.",
            f"Swap the last two alone: {name}.transpose(-2, -1), or {name}.mT.",
        )
    if key.place("key", "sequence") == len(key.shape) - 2 and query.shape[-1] == key.shape[-1] != key.shape[-2]:
        return (
            f"{key.name} ends in {key.axis(-2)} {key.axis(-1)}; q·kᵀ sums over {key.axis(-1)}.",
            f"Multiply by {name}.transpose(-2, -1).",
        )
    if key.heads_are_behind and _was_right_before(scene, key.tensor):
        return (
            f"{key.name} swaps heads and key; q·kᵀ needs key and head_dim swapped.",
            "Swap the last two: .transpose(-2, -1).",
        )
    return None


@_cause("heads_not_transposed")
def _transposed(scene: Scene) -> Told:
    """Find heads behind the sequence, where the product runs over what stands in front."""
    bad = [o for o in scene.factors if o.part != "weights" and o.heads_are_behind]
    if not bad or not scene.sizes_clash:
        return None
    names = list(dict.fromkeys(_variable(scene, o) for o in bad))
    was = "was" if len(bad) == 1 else "were"
    sequence = " and ".join(dict.fromkeys("query" if o.part == "query" else "key" for o in bad))
    if all(_was_right_before(scene, o.tensor) for o in bad):
        op = scene.reached.graph.recording.producer(bad[0].tensor)
        did, origin = "transposed back", "" if op is None else op.source
        way = "Leave that transpose out: the heads were in front already."
    else:
        did, origin = "split but not transposed", _split_at(scene, bad[0].tensor)
        way = f"{names[0]}.transpose(1, 2) after the view that splits."
    where = f" ({origin})" if origin else ""
    return f"{' and '.join(names)} {was} {did}{where}. Heads must come before {sequence}.", way


def _was_right_before(scene: Scene, tensor: TensorRef) -> bool:
    """Whether an earlier step had the heads in front of the sequence."""
    for earlier in list(scene.reached.steps_back(tensor))[1:]:
        names = scene.reached.of(earlier).replace("(", " ").replace(")", " ").split()
        first = next((name for name in names if name in (*HEADS, *SEQUENCES)), "")
        if first in HEADS and len(earlier.shape) >= 4 and not set(SEQUENCES).isdisjoint(names):
            return True
    return False


def _split_at(scene: Scene, tensor: TensorRef) -> str:
    """Return the line of the view that divided a width into heads."""
    makers = (scene.reached.graph.recording.producer(step) for step in scene.reached.steps_back(tensor))
    for op in makers:
        is_view = op is not None and op.base_name in ("view", "_unsafe_view")
        if op is not None and is_view and len(op.output.shape) > len(op.inputs[0].shape):
            return op.source
    return ""


def _variable(scene: Scene, given: Operand) -> str:
    """Return the plain variable behind an operand: `k` behind `k.transpose(-2, -1)`."""
    names = [scene.variables.get(tensor.id, "") for tensor in list(scene.reached.steps_back(given.tensor))[:2]]
    return next(filter(None, names), given.name)


def _two_sizes(scene: Scene) -> tuple[Operand, Operand] | None:
    """Return two factors that are laid out alike, queries or weights and keys or values, where they do not fit."""
    query = next((o for o in scene.factors if o.part in ("query", "weights")), None)
    key = next((o for o in scene.factors if o.part in ("key", "value")), None)
    return None if query is None or key is None or not scene.sizes_clash else (query, key)


@_cause("heads_not_repeated", "fewer key heads than query heads, not repeated")
def _not_repeated(scene: Scene) -> Told:
    if (found := _two_sizes(scene)) is None:
        return None
    query, key = found
    heads, kv_heads = query.size("heads"), key.size(*HEADS)
    if not heads or not kv_heads or heads == kv_heads or heads % kv_heads or {len(query.shape), len(key.shape)} != {4}:
        return None
    return (
        f"{query.name} has {heads} heads, {key.name} has {kv_heads}: each of these serves {heads // kv_heads}.",
        f"{_variable(scene, key)}.repeat_interleave({heads // kv_heads}, dim=1) before the product, for keys and "
        "values alike; scaled_dot_product_attention takes enable_gqa=True.",
    )


@_cause("batch_differs")
def _batch_of_factors(scene: Scene) -> Told:
    return _differ(scene, "batch", _SAME_EXAMPLES)


@_cause("head_dim_differs", "queries and keys with heads of different widths")
def _head_dim(scene: Scene) -> Told:
    same = "Queries and keys are compared feature by feature: divide both into heads of the same width."
    query, _ = _two_sizes(scene) or (None, None)
    return _differ(scene, "head_dim", same) if query is not None and query.part == "query" else None


def _differ(scene: Scene, axis: str, way: str) -> Told:
    if (found := _two_sizes(scene)) is None:
        return None
    left, right = (operand.size(axis) for operand in found)
    if not left or not right or left == right:
        return None
    return f"{found[0].name} has {axis} {left}, {found[1].name} has {axis} {right}.", way


@_cause("lengths_differ")
def _length_of_values(scene: Scene) -> Told:
    weights, value = _two_sizes(scene) or (None, None)
    if weights is None or value is None or weights.part != "weights":
        return None
    has = value.size("key", "sequence")
    if not has or weights.shape[-1] == has:
        return None
    return f"{weights.name} weighs {weights.shape[-1]} keys, {value.name} has {has} values.", _SAME_SEQUENCE


# ---------------------------------------------------------------- views


@_cause("heads_not_joined", calls=VIEWS)
def _scattered_heads(scene: Scene) -> Told:
    x = scene.operands[0] if scene.operands else None
    heads, features = (None, None) if x is None else (x.place(*HEADS), x.place("head_dim"))
    if x is None or not _is_scattered(scene) or heads is None or features != len(x.shape) - 1 or heads >= features - 1:
        return None
    return (
        f"{x.name} is {x.pattern}: the heads are not beside their features, so no view puts them side by side.",
        f"{x.primary}.transpose({heads}, {features - 1}).flatten(-2).",
    )


@_cause("not_contiguous", "a view of what a transpose has left scattered in memory", VIEWS)
def _contiguous(scene: Scene) -> Told:
    if not _is_scattered(scene):
        return None
    return (
        f"{scene.operands[0].name} is a transpose: its elements are not in memory in the order in which the view would "
        "read them.",
        ".contiguous() before .view(...), or .reshape(...) in its place.",
    )


def _is_scattered(scene: Scene) -> bool:
    return "stride" in scene.message and bool(scene.operands) and not scene.operands[0].value.is_contiguous()


def _division(scene: Scene) -> tuple[Operand, int, int] | None:
    """Return what a view divides in its last dimension, and the two sizes asked for."""
    x, sizes = scene.operands[0] if scene.operands else None, scene.sizes_of_view
    if x is None or len(sizes) != len(x.shape) + 1 or sizes[:-2] != x.shape[:-1]:
        return None
    return x, sizes[-2], sizes[-1]


@_cause("heads_do_not_divide", "a width that the heads do not divide", VIEWS)
def _uneven(scene: Scene) -> Told:
    if (found := _division(scene)) is None:
        return None
    x, heads, head_dim = found
    asked = "" if -1 in (heads, head_dim) else f"{heads}·{head_dim} = {heads * head_dim}"
    count = head_dim if heads == -1 else heads
    return _does_not_divide(x.shape[-1], count, asked) if count > 0 and x.shape[-1] % count else None


@_cause("heads_do_not_divide")
def _uneven_for_einops(scene: Scene) -> Told:
    said = re.search(r"can't divide axis of length (\d+) in chunks of (\d+)", scene.message)
    return None if scene.error != "EinopsError" or said is None else _does_not_divide(int(said[1]), int(said[2]))


def _does_not_divide(width: int, heads: int, asked: str = "") -> tuple[str, str]:
    """Tell of a width that so many heads do not divide; `asked` is what they would need in its place."""
    counts = ", ".join(str(n) for n in range(1, min(width, 64) + 1) if width % n == 0)
    asked = asked or (f"{width} / {heads} = {width / heads:.4g}" if heads else "there is no head")
    return (
        f"A width of {width} cannot be split over {heads} heads: {asked}.",
        f"Head counts{' up to 64' if width > 64 else ''} that divide {width}: {counts}.",
    )


@_cause("wrong_head_dim", "heads times head_dim is not the width", VIEWS)
def _head_dim_of_view(scene: Scene) -> Told:
    sizes = scene.sizes_of_view
    if (found := _division(scene)) is not None:
        x, heads, head_dim = found
        return (
            None
            if min(heads, head_dim) <= 0
            else (
                f"{heads} heads of {head_dim} are {heads * head_dim} features, and {x.name} has {x.shape[-1]}.",
                f"{heads} heads of a width of {x.shape[-1]} have head_dim {x.shape[-1] // heads}; a projection for "
                f"{heads} heads of {head_dim} needs out_features {heads * head_dim}.",
            )
        )
    if not sizes or not scene.operands or len(scene.operands[0].shape) != len(sizes) + 1:
        return None
    x, (first, second) = scene.operands[0], scene.operands[0].shape[-2:]
    if sizes[:-1] != x.shape[:-2]:
        return None
    if sizes[-1] in (-1, first * second):
        return None
    return (
        f"{x.axis(-2)} and {x.axis(-1)} side by side are {first}·{second} = {first * second}, not {sizes[-1]}.",
        f"Write {first * second} or -1 for the last size; the output projection must take as many.",
    )


@_cause("batch_differs", calls=VIEWS)
def _batch_of_view(scene: Scene) -> Told:
    """Find heads that are divided for a batch which this tensor does not have."""
    sizes = scene.sizes_of_view
    if not scene.operands or len(sizes) != 4 or len(scene.operands[0].shape) != 3:
        return None
    x = scene.operands[0]
    if sizes[1] != -1 or prod(sizes[2:]) != x.shape[-1]:
        return None
    return (
        f"{x.name} has {x.shape[0]} examples, and the view takes a batch of {sizes[0]}.",
        "Queries, keys and values must have the same examples; one for all needs .expand on the batch dimension.",
    )
