"""What is wrong with the tensors that a call is given: devices, dtypes, widths, the order of sequences, and masks."""

from __future__ import annotations

from ... import text
from ...reports.trace import Cause
from .operand import ATTENTION, HEADS, LAYERS, SDPA, Operand
from .scene import Scene, first_clash


def devices(scene: Scene) -> Cause | None:
    """Judge operands of several devices."""
    if not scene.mixes_devices:
        return None
    odd, usual = _odd_one(scene, "device")
    return Cause(
        "mixed_devices",
        f"{odd.name} is on {odd.device}, the others are on {usual}.",
        f"Move it: .to({usual!r}) on a tensor, or the module and its inputs to one device. A tensor that the module "
        "makes for itself needs device=x.device, or register_buffer.",
    )


def mask_dtype(scene: Scene) -> Cause | None:
    """Judge a mask whose dtype the call does not take."""
    mask, rule = scene.given("attn_mask"), ""
    if scene.base in LAYERS:
        masks = (scene.given("key_padding_mask"), mask)
        mask = next((one for one in masks if one is not None and one.dtype.startswith(("int", "uint"))), mask)
        if mask is not None and mask.dtype.startswith(("int", "uint")):
            rule = f"{mask.role} is boolean, True where a key is hidden, or floating, which is added."
    elif scene.base == "masked_fill" and "boolean mask" in scene.message and scene.mask_and_scores is not None:
        mask, rule = scene.mask_and_scores[0], "masked_fill takes a boolean mask, True where a key is to be hidden."
    if mask is not None and rule:
        way = f"{mask.name} == 0 where 0 means hidden, {mask.name}.bool() where 1 does."
        return Cause("mask_dtype", f"{mask.name} is {mask.dtype}; {rule}", way)
    if mask is None or not scene.mixes_dtypes:
        return None
    odd, usual = _odd_one(scene, "dtype")
    if odd is not mask:
        return None
    return Cause(
        "mask_dtype",
        f"{mask.name} is {mask.dtype}, the queries are {usual}; a mask is boolean, True where a key is seen, or of "
        "their dtype, which is added.",
        f"{mask.name}.bool(), or {mask.name}.to(torch.{usual}).",
    )


def dtypes(scene: Scene) -> Cause | None:
    """Judge operands of several dtypes."""
    if not scene.mixes_dtypes:
        return None
    x = scene.given("input")
    if x is not None and x.dtype.startswith(("int", "uint")):
        way = "Token ids go through an nn.Embedding first; numbers need .float()."
        return Cause("mixed_dtypes", f"{x.name} is {x.dtype}: whole numbers, as token ids are.", way)
    odd, usual = _odd_one(scene, "dtype")
    return Cause(
        "mixed_dtypes",
        f"{odd.name} is {odd.dtype}, the others are {usual}.",
        f"Bring them to one: {odd.name}.to(torch.{usual}), or the module with .to(torch.{odd.dtype}); "
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


def _width_clash(scene: Scene) -> tuple[Operand, int, Operand | None] | None:
    """Return an input, the features that its layer takes, and its weight, where the input has others; else None."""
    x: Operand | None = None
    weight: Operand | None = None
    takes = 0
    if scene.widths:
        roles = [(scene.given(role), width) for role, width in scene.widths.items()]
        x, takes = next(((o, n) for o, n in roles if o is not None and o.shape and o.shape[-1] != n), (None, 0))
    elif scene.base in ("linear", "layer_norm") and len(scene.operands) >= 2 and scene.given("input") is not None:
        x, weight = scene.operands[0], scene.operands[1 if scene.base == "linear" else -1]
        takes = weight.shape[-1] if weight.shape else 0
    elif scene.pair is not None and scene.pair[1].is_parameter and len(scene.pair[1].shape) == 2:
        x, weight = scene.pair
        takes = weight.shape[0]
    return None if x is None or not x.shape or not takes or x.shape[-1] == takes else (x, takes, weight)


def widths(scene: Scene) -> Cause | None:
    """Judge an input that has other features than its layer takes."""
    if (found := _width_clash(scene)) is None:
        return None
    x, takes, weight = found
    has = x.shape[-1]
    if not scene.widths and (unjoined := _unjoined(x, takes)) is not None:
        return unjoined
    if weight is not None and scene.base not in ("linear", "layer_norm") and weight.shape[-1] == has:
        return Cause(
            "weight_not_transposed",
            f"{weight.is_shape}, out_features in_features as nn.Linear keeps it, and {x.name} has {has} features.",
            f"{x.name} @ {weight.name}.T, or call the layer.",
        )
    places = [place for place, size in enumerate(x.shape[:-1]) if size == takes]
    if len(places) == 1 and len(x.shape) >= 3:
        return Cause(
            "features_not_last",
            f"{x.name} has the {takes} features in dimension {places[0]}; the layer takes them last.",
            f"{x.name}.transpose({places[0]}, -1).",
        )
    if weight is None:
        setting = {"query": "embed_dim", "key": "kdim", "value": "vdim"}[x.role]
        what = f"{x.name} has {has} features, the layer takes {takes} as {x.role} ({setting})."
        return Cause("wrong_width", what, f"Make the layer with {setting}={has}, or bring {x.name} to {takes}.")
    make = f"with in_features {has}" if scene.base == "linear" else f"for {has}"
    what = f"{x.name} has {has} features, {weight.name} takes {takes}."
    return Cause("wrong_width", what, f"Make the layer {make}, or bring {x.name} to {takes}.")


def _unjoined(x: Operand, takes: int) -> Cause | None:
    """Judge an input of a layer whose heads, side by side, would be as wide as that takes."""
    heads, features = x.place(*HEADS), x.place("head_dim")
    if heads is None and len(x.shape) >= 4 and x.shape[-1] * x.shape[-2] == takes:
        return Cause(
            "heads_not_joined",
            f"{x.name} ends in two dimensions, {x.axis(-2)} and {x.axis(-1)}; the layer takes them as one, {takes}.",
            "torch.cat(heads, dim=-1), or .flatten(-2) with the heads in front of their features.",
        )
    if heads is None or features is None or heads == features or x.shape[heads] * x.shape[features] != takes:
        return None
    swap = "" if heads == len(x.shape) - 2 else ".transpose(1, 2)"
    return Cause(
        "heads_not_joined",
        f"{x.name} still has {x.shape[heads]} heads of {x.shape[features]}; the layer takes them side by side, "
        f"{x.shape[heads]}·{x.shape[features]} = {takes}.",
        f"{x.name}{swap}.flatten(-2) first: heads behind the sequence, then one dimension with their features.",
    )


SAME_EXAMPLES = "Both must have the same examples; one example for all needs .expand on the batch dimension."
SAME_SEQUENCE = "Keys and values must come from the same sequence."


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


def sequences_of_layers(scene: Scene) -> Cause | None:
    """Judge batches and lengths; first the order of the two: what does not fit in this one, and fits in the other."""
    given = _sequences(scene)
    if given is None or scene.base not in LAYERS:
        return None
    query, key = given
    (batch, length), (key_batch, key_length) = _lengths(scene, query), _lengths(scene, key)
    mask, padding, value = scene.given("attn_mask"), scene.given("key_padding_mask"), scene.given("value")
    both, why = bool(batch and key_batch), ""
    if both and batch != key_batch and length == key_length:
        why = (
            f"batch {batch} against batch {key_batch}, where {query.name} and {key.name} agree in the other dimension."
        )
    elif both and mask is not None and length != batch and mask.shape == (batch, key_batch) and batch == key_batch:
        place = 0 if scene.batch_first else 1
        why = f"length {length}, batch {batch}; {mask.is_shape} and fits dimension {place}."
    elif both and mask is not None and length != batch and mask.shape == (length * scene.num_heads, batch, key_batch):
        why = f"length {length}, batch {batch}; {mask.name} {text.shape(mask.shape)} fits the other."
    elif both and padding is not None and padding.shape == (key_length, key_batch) and key_length != key_batch:
        way = "x.transpose(0, 1)" if scene.batch_first else "batch_first=True"
        return Cause(
            "batch_and_sequence_swapped",
            f"{_reading(scene)}: batch {key_batch}, key {key_length}; {padding.is_shape}, and key_padding_mask is "
            "batch key in either case.",
            f"If {key.name} is right, {padding.name}.T; if the mask is, {key.name} is the other way round: {way}.",
        )
    if why:
        return Cause(
            "batch_and_sequence_swapped",
            f"{_reading(scene)}: {why}",
            "Give the sequence in dimension 1: x.transpose(0, 1), or make the layer with batch_first=False."
            if scene.batch_first
            else "Make the layer with batch_first=True if the batch is in dimension 0, or give it x.transpose(0, 1).",
        )
    if both and batch != key_batch:
        what = f"{_reading(scene)}: {query.name} has batch {batch}, {key.name} has batch {key_batch}."
        return Cause("batch_differs", what, SAME_EXAMPLES)
    whole = scene.base == ATTENTION and value is not None and len(key.shape) == len(value.shape) == 3
    if whole and value is not None and _lengths(scene, key) != _lengths(scene, value):
        return Cause("lengths_differ", f"{key.is_shape}, {value.is_shape}.", SAME_SEQUENCE)
    return None


def _padding(scene: Scene) -> tuple[Operand, tuple[int, int], str] | None:
    """Return a key_padding_mask of torch's layer that does not fit, batch and key length, and what is wrong."""
    padding, given = scene.given("key_padding_mask"), _sequences(scene)
    if scene.base != ATTENTION or padding is None or given is None:
        return None
    batch, length = _lengths(scene, given[1])
    expected = (batch, length) if batch else (length,)
    why = f"{padding.is_shape}; key_padding_mask is batch key, {text.shape(expected)}."
    return None if padding.shape == expected else (padding, (batch, length), why)


def masks_of_layers(scene: Scene) -> Cause | None:
    """Judge the masks of torch's attention that lack a dimension, or have one too many."""
    found, mask = _padding(scene), scene.given("attn_mask")
    given = _sequences(scene) if scene.base == ATTENTION else None
    if found is not None and len(found[0].shape) != (2 if found[1][0] else 1):
        way = "A mask over pairs of positions is attn_mask; one over keys has no dimension for heads or queries."
        return Cause("mask_rank", found[2], way)
    if found is not None or mask is None or given is None:
        return None
    (batch, length), (_, key_length) = (_lengths(scene, operand) for operand in given)
    heads, pairs = scene.num_heads, (length, key_length)
    all_heads = max(batch, 1) * heads
    wanted = f"[{length}, {key_length}] or [{all_heads}, {length}, {key_length}], batch·heads first"
    expand = "" if mask.shape[1:2] == (heads,) else f".expand(-1, {heads}, -1, -1)"
    known: dict[tuple[int, ...], tuple[str, str]] = {
        (batch, key_length): (f", batch key; attn_mask is {wanted}.", f"Give it as key_padding_mask={mask.name}."),
        (batch, *pairs): (
            f", one for each example; the layer takes {wanted}.",
            f"{mask.name}.repeat_interleave({heads}, dim=0).",
        ),
    }
    for shape in ((batch, 1, *pairs), (batch, heads, *pairs)):
        known[shape] = f"; the layer takes {wanted}.", f"{mask.name}{expand}.flatten(0, 1)."
    if mask.shape in (pairs, (all_heads, *pairs)) or mask.shape not in known:
        return None
    what, way = known[mask.shape]
    return Cause("mask_rank", f"{mask.is_shape}{what}", way)


def _laid_over(scene: Scene) -> tuple[Operand, tuple[int, ...]] | None:
    """Return a mask and the shape of the scores (query and key last) that it does not lie over; else None."""
    mask = scene.given("attn_mask")
    scores: tuple[int, ...] = ()
    if scene.base == ATTENTION and (given := _sequences(scene)) is not None:
        (batch, length), (_, key_length) = (_lengths(scene, operand) for operand in given)
        scores = (max(batch, 1) * scene.num_heads, length, key_length)
    elif scene.base == SDPA and (given := _sequences(scene)) is not None:
        query, key = given
        scores = (*query.shape[:-1], key.shape[-2]) if min(len(query.shape), len(key.shape)) > 1 else ()
    elif scene.mask_and_scores is not None:
        mask, scores = scene.mask_and_scores[0], scene.mask_and_scores[1].shape
    if mask is None or not mask.shape or not 2 <= len(scores) <= 4:
        return None
    fits = first_clash(mask.shape, scores) is None and len(mask.shape) <= len(scores)
    return None if fits else (mask, scores)


def masks_over_scores(scene: Scene) -> Cause | None:
    """Judge a mask that does not lie over the scores."""
    laid = scene.mask_and_scores[1] if scene.mask_and_scores is not None else None
    if laid is not None and len(laid.shape) == 4 and all(dim[0] in HEADS for dim in laid.axes[-2:]):
        return Cause(
            "heads_not_transposed",
            f"{laid.text}: heads are compared with heads, so queries and keys were split but not transposed.",
            "q.transpose(1, 2), and k and v alike, after the view that splits: heads must come before the sequence.",
        )
    found, padding = _laid_over(scene), _padding(scene)
    if found is not None:
        mask, scores = found
        (query, key), over = scores[-2:], f"and the scores are {text.shape(scores)}"
        if (lacks := _lacking(mask.shape, scores)) is not None:
            return Cause("mask_rank", f"{mask.is_shape}, {lacks[0]}, {over}.", mask.name + lacks[1])
        if len(mask.shape) >= 2 and mask.shape[-2:] == (key, query) and key != query:
            what = f"{mask.is_shape}, key {key} before query {query}, {over}."
            return Cause("mask_transposed", what, f"{mask.name}.transpose(-2, -1).")
        if len(scores) >= 3 and mask.shape == (scores[0], scores[0]) and scores[0] not in (query, key):
            return Cause(
                "batch_and_sequence_swapped",
                f"{mask.is_shape}, {over}: it fits dimension 0, which is read as the batch.",
                "The input has its sequence first and the layer takes the batch first, or the other way round: "
                "x.transpose(0, 1), or batch_first.",
            )
    if padding is not None:
        return Cause("mask_size", padding[2], f"Make it for batch {padding[1][0]} and key {padding[1][1]}.")
    if found is None:
        return None
    rows, columns = (1, *mask.shape)[-2:]
    if rows in (1, query) and columns in (1, key):
        return None
    covers = f"{columns} keys" if rows == 1 else f"query {rows}, key {columns}"
    return Cause(
        "mask_size",
        f"{mask.name} covers {covers}, {over}: query {query}, key {key}.",
        f"Cut it to the lengths of this call: {mask.name}[..., :{query}, :{key}]."
        if (rows == 1 or rows >= query) and columns >= key
        else f"Make it for query {query} and key {key}, or give no more positions than it covers.",
    )


def _lacking(shape: tuple[int, ...], scores: tuple[int, ...]) -> tuple[str, str] | None:
    """Return what a mask of too few dimensions is, and how it gets the one that it lacks; None where it is neither."""
    (batch, *_), (query, key) = scores, scores[-2:]
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
    return known.get(shape)
