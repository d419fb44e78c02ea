"""Causes in projections and views: widths that do not fit, do not divide, or were not put together again."""

from __future__ import annotations

from math import prod

from ...reports.failure import Cause
from .scene import Given, Scene, shape_text, sizes_of_view


def of_linear(scene: Scene) -> Cause | None:
    """A projection that was given features it does not take."""
    if scene.base == "linear" and len(scene.operands) >= 2:
        x, weight = scene.operands[:2]
        takes = weight.shape[-1]
    elif scene.base == "layer_norm" and scene.operands:
        x, weight = scene.operands[0], scene.operands[-1]
        takes = weight.shape[-1] if weight is not x and weight.shape else 0
    elif (pair := scene.pair) is not None and pair[1].is_parameter and len(pair[1].shape) == 2:
        x, weight = pair
        takes = weight.shape[0]
    else:
        return None
    if not x.shape or not takes or x.shape[-1] == takes:
        return None
    joined = _not_joined(x, takes)
    if joined is not None:
        return joined
    if scene.base not in ("linear", "layer_norm") and weight.shape[-1] == x.shape[-1]:
        return Cause(
            "weight_not_transposed",
            f"{weight.name} is {shape_text(weight.shape)}, out_features in_features as nn.Linear keeps it, and "
            f"{x.name} has {x.shape[-1]} features.",
            f"{x.primary} @ {weight.primary}.T, or call the layer.",
        )
    places = [place for place, size in enumerate(x.shape[:-1]) if size == takes]
    if len(places) == 1 and len(x.shape) > 2:
        return Cause(
            "features_not_last",
            f"{x.name} has the {takes} features in dimension {places[0]}; the layer takes them last.",
            f"{x.primary}.transpose({places[0]}, -1).",
        )
    return Cause(
        "wrong_width",
        f"{x.name} has {x.shape[-1]} features, {weight.name} takes {takes}.",
        f"Make the layer with in_features {x.shape[-1]}, or bring {x.name} to {takes}."
        if scene.base == "linear"
        else f"Make the layer for {x.shape[-1]}, or bring {x.name} to {takes}.",
    )


def _not_joined(x: Given, takes: int) -> Cause | None:
    """What still has its heads, where the layer takes them side by side."""
    heads, features = x.place("heads", "kv_heads"), x.place("head_dim")
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
        f"{x.primary}{swap}.flatten(-2) first: heads behind the sequence, then one dimension with their features.",
    )


def of_view(scene: Scene) -> Cause | None:
    """A view that divides a width, or puts the heads together."""
    if scene.base not in ("view", "reshape", "unflatten") or not scene.operands:
        return None
    x, sizes = scene.operands[0], sizes_of_view(scene)
    if not sizes:
        return None
    if "stride" in scene.message and not x.is_contiguous:
        return _scattered(x)
    same = 0
    while same < min(len(sizes), len(x.shape)) and sizes[same] == x.shape[same]:
        same += 1
    if same == len(x.shape) - 1 and len(sizes) == len(x.shape) + 1:
        return _division(x, sizes[same:])
    if len(x.shape) == 3 and len(sizes) == 4 and sizes[1] == -1 and prod(sizes[2:]) == x.shape[-1]:
        return _batch(x, sizes[0])
    if same == len(sizes) - 1 and len(x.shape) == len(sizes) + 1 and sizes[-1] not in (-1, prod(x.shape[same:])):
        first, second = x.shape[same:]
        return Cause(
            "wrong_head_dim",
            f"{x.axis(-2)} and {x.axis(-1)} side by side are {first}·{second} = {first * second}, not {sizes[-1]}.",
            f"Write {first * second} or -1 for the last size; the output projection must take as many.",
        )
    return None


def _batch(x: Given, batch: int) -> Cause:
    """Heads are divided for a batch that this tensor does not have."""
    return Cause(
        "batch_differs",
        f"{x.name} has {x.shape[0]} examples, and the view takes a batch of {batch}.",
        "Queries, keys and values must have the same examples; one for all needs .expand on the batch dimension.",
    )


def _scattered(x: Given) -> Cause:
    heads, features = x.place("heads", "kv_heads"), x.place("head_dim")
    if heads is not None and features == len(x.shape) - 1 and heads < features - 1:
        return Cause(
            "heads_not_joined",
            f"{x.name} is {x.pattern}: the heads are not beside their features, so no view puts them side by side.",
            f"{x.primary}.transpose({heads}, {features - 1}).flatten(-2).",
        )
    return Cause(
        "not_contiguous",
        f"{x.name} is a transpose: its elements are not in memory in the order in which the view would read them.",
        ".contiguous() before .view(...), or .reshape(...) in its place.",
    )


def _division(x: Given, parts: tuple[int, ...]) -> Cause | None:
    """A last dimension divided in two."""
    width, (heads, head_dim) = x.shape[-1], parts
    given = heads if head_dim == -1 else head_dim if heads == -1 else heads
    if given <= 0:
        return None
    if width % given:
        return heads_do_not_divide(width, given, "" if -1 in parts else f"{heads}·{head_dim} = {heads * head_dim}")
    if -1 in parts:
        return None
    return Cause(
        "wrong_head_dim",
        f"{heads} heads of {head_dim} are {heads * head_dim} features, and {x.name} has {width}.",
        f"{heads} heads of a width of {width} have head_dim {width // heads}; a projection for {heads} heads of "
        f"{head_dim} needs out_features {heads * head_dim}.",
    )


def heads_do_not_divide(width: int, heads: int, asked: str = "") -> Cause:
    """A width that so many heads do not divide; `asked` is what they would need in its place."""
    counts = ", ".join(str(n) for n in range(1, min(width, 64) + 1) if width % n == 0)
    asked = asked or f"{width} / {heads} = {width / heads:.4g}"
    return Cause(
        "heads_do_not_divide",
        f"A width of {width} cannot be split over {heads} heads: {asked}.",
        f"Head counts{' up to 64' if width > 64 else ''} that divide {width}: {counts}.",
    )
