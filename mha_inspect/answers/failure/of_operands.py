"""What is wrong with the operands of any call: their devices and dtypes, and widths that a layer does not take."""

from __future__ import annotations

from ...reports.failure import Cause
from .operand import HEADS, LAYERS, Operand
from .scene import Scene


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
        way = f"{mask.name} == 0 where 0 means hidden, {mask.primary}.bool() where 1 does."
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
        f"{mask.primary}.bool(), or {mask.primary}.to(torch.{usual}).",
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
            f"{x.primary} @ {weight.primary}.T, or call the layer.",
        )
    places = [place for place, size in enumerate(x.shape[:-1]) if size == takes]
    if len(places) == 1 and len(x.shape) >= 3:
        return Cause(
            "features_not_last",
            f"{x.name} has the {takes} features in dimension {places[0]}; the layer takes them last.",
            f"{x.primary}.transpose({places[0]}, -1).",
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
        f"{x.primary}{swap}.flatten(-2) first: heads behind the sequence, then one dimension with their features.",
    )
