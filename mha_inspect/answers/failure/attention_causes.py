"""Causes in calls of torch's own multi-head attention, which says what it expected and not why."""

from __future__ import annotations

from ...reports.failure import Cause
from .mask_causes import mask_cause
from .scene import Given, Scene, shape_text


def of_torch_attention(scene: Scene) -> Cause | None:
    """What is wrong with the arguments of nn.MultiheadAttention."""
    if scene.base == "transformer":
        source, target = scene.given("src"), scene.given("tgt")
        return (
            None if source is None or target is None else _order(scene, target, source) or _batch(scene, target, source)
        )
    query, key, value = (scene.given(role) for role in ("query", "key", "value"))
    if scene.base != "multi_head_attention" or query is None or key is None or value is None:
        return None
    rules = (_masks_dtype, _width, _order, _batch, _padding, _attn_mask)
    return next((cause for rule in rules if (cause := rule(scene, query, key, value)) is not None), None)


def _lengths(scene: Scene, given: Given) -> tuple[int, int]:
    """Batch and length as the layer reads them; a batch of 0 where the input has none."""
    if len(given.shape) != 3:
        return 0, given.shape[0] if given.shape else 0
    return (given.shape[0], given.shape[1]) if scene.batch_first else (given.shape[1], given.shape[0])


def _reading(scene: Scene) -> str:
    return (
        f"batch_first={scene.batch_first} reads dimension 0 as {'the batch' if scene.batch_first else 'the sequence'}"
    )


def _swapped(scene: Scene, why: str) -> Cause:
    fix = (
        "Give the sequence in dimension 1: x.transpose(0, 1), or make the layer with batch_first=False."
        if scene.batch_first
        else "Make the layer with batch_first=True if the batch is in dimension 0, or give it x.transpose(0, 1)."
    )
    return Cause("batch_and_sequence_swapped", f"{_reading(scene)}: {why}", fix)


def _masks_dtype(scene: Scene, *_: Given) -> Cause | None:
    for role in ("key_padding_mask", "attn_mask"):
        mask = scene.given(role)
        if mask is not None and mask.dtype.startswith(("int", "uint")):
            return Cause(
                "mask_dtype",
                f"{mask.name} is {mask.dtype}; {role} is boolean, True where a key is hidden, "
                "or floating, which is added.",
                f"{mask.name} == 0 where 0 means hidden, {mask.primary}.bool() where 1 does.",
            )
    return None


def _width(scene: Scene, *given: Given) -> Cause | None:
    for operand in given:
        takes = scene.widths.get(operand.role, 0)
        if not operand.shape or operand.shape[-1] == takes:
            continue
        places = [place for place, size in enumerate(operand.shape[:-1]) if size == takes]
        if len(places) == 1 and len(operand.shape) == 3:
            return Cause(
                "features_not_last",
                f"{operand.name} has the {takes} features in dimension {places[0]}; the layer takes them last.",
                f"{operand.primary}.transpose({places[0]}, -1).",
            )
        setting = {"query": "embed_dim", "key": "kdim", "value": "vdim"}[operand.role]
        return Cause(
            "wrong_width",
            f"{operand.name} has {operand.shape[-1]} features, the layer takes {takes} as {operand.role} ({setting}).",
            f"Make the layer with {setting}={operand.shape[-1]}, or bring {operand.name} to {takes}.",
        )
    return None


def _order(scene: Scene, query: Given, key: Given, *_: Given) -> Cause | None:
    """Evidence for the other order of batch and sequence: what does not fit this one, and fits that."""
    (batch, length), (key_batch, key_length) = _lengths(scene, query), _lengths(scene, key)
    if not batch or not key_batch:
        return None
    if batch != key_batch and length == key_length:
        return _swapped(
            scene,
            f"batch {batch} against batch {key_batch}, where {query.name} and {key.name} agree in the other dimension.",
        )
    mask = scene.given("attn_mask")
    if mask is not None and length != batch:
        if mask.shape == (batch, key_batch) and batch == key_batch:
            return _swapped(
                scene,
                f"length {length}, batch {batch}; {mask.name} is {shape_text(mask.shape)} and fits dimension "
                f"{0 if scene.batch_first else 1}.",
            )
        if mask.shape == (length * scene.num_heads, batch, key_batch):
            return _swapped(
                scene, f"length {length}, batch {batch}; {mask.name} {shape_text(mask.shape)} fits the other."
            )
    padding = scene.given("key_padding_mask")
    if padding is not None and padding.shape == (key_length, key_batch) and key_length != key_batch:
        return Cause(
            "batch_and_sequence_swapped",
            f"{_reading(scene)}: batch {key_batch}, key {key_length}; {padding.name} is {shape_text(padding.shape)}, "
            "and key_padding_mask is batch key in either case.",
            f"If {key.name} is right, {padding.primary}.T; if the mask is, {key.name} is the other way round: "
            f"{'x.transpose(0, 1)' if scene.batch_first else 'batch_first=True'}.",
        )
    return None


def _batch(scene: Scene, query: Given, key: Given, *rest: Given) -> Cause | None:
    (batch, _), (key_batch, key_length) = _lengths(scene, query), _lengths(scene, key)
    if batch and key_batch and batch != key_batch:
        return Cause(
            "batch_differs",
            f"{_reading(scene)}: {query.name} has batch {batch}, {key.name} has batch {key_batch}.",
            "Both must have the same examples; one example for all needs .expand on the batch dimension.",
        )
    for value in rest:
        if (key_batch, key_length) == _lengths(scene, value) or len(key.shape) != 3 or len(value.shape) != 3:
            continue
        return Cause(
            "lengths_differ",
            f"{key.name} is {shape_text(key.shape)}, {value.name} is {shape_text(value.shape)}.",
            "Keys and values must come from the same sequence.",
        )
    return None


def _padding(scene: Scene, query: Given, key: Given, value: Given) -> Cause | None:
    padding = scene.given("key_padding_mask")
    batch, length = _lengths(scene, key)
    expected = (batch, length) if batch else (length,)
    if padding is None or padding.shape == expected:
        return None
    if len(padding.shape) != len(expected):
        return Cause(
            "mask_rank",
            f"{padding.name} is {shape_text(padding.shape)}; key_padding_mask is batch key, {shape_text(expected)}.",
            "A mask over pairs of positions is attn_mask; one over keys has no dimension for heads or queries.",
        )
    return Cause(
        "mask_size",
        f"{padding.name} is {shape_text(padding.shape)}; key_padding_mask is batch key, {shape_text(expected)}.",
        f"Make it for batch {batch} and key {length}.",
    )


def _attn_mask(scene: Scene, query: Given, key: Given, value: Given) -> Cause | None:
    mask = scene.given("attn_mask")
    if mask is None:
        return None
    (batch, length), (_, key_length) = _lengths(scene, query), _lengths(scene, key)
    all_heads = max(batch, 1) * scene.num_heads
    if mask.shape in ((length, key_length), (all_heads, length, key_length)):
        return None
    wanted = f"[{length}, {key_length}] or [{all_heads}, {length}, {key_length}], batch·heads first"
    if mask.shape == (batch, length, key_length):
        return Cause(
            "mask_rank",
            f"{mask.name} is {shape_text(mask.shape)}, one for each example; the layer takes {wanted}.",
            f"{mask.primary}.repeat_interleave({scene.num_heads}, dim=0).",
        )
    if mask.shape in ((batch, 1, length, key_length), (batch, scene.num_heads, length, key_length)):
        expand = "" if mask.shape[1] == scene.num_heads else f".expand(-1, {scene.num_heads}, -1, -1)"
        return Cause(
            "mask_rank",
            f"{mask.name} is {shape_text(mask.shape)}; the layer takes {wanted}.",
            f"{mask.primary}{expand}.flatten(0, 1).",
        )
    if mask.shape == (batch, key_length) and batch != length:
        return Cause(
            "mask_rank",
            f"{mask.name} is {shape_text(mask.shape)}, batch key; attn_mask is {wanted}.",
            f"Give it as key_padding_mask={mask.primary}.",
        )
    return mask_cause(mask, (all_heads, length, key_length))
