"""Causes in masks: what is laid over the scores and does not lie over them."""

from __future__ import annotations

from ...reports.failure import Cause
from .scene import Given, Scene, first_clash, shape_text


def of_mask(scene: Scene) -> Cause | None:
    """A mask that does not fit the scores: by hand, or in scaled_dot_product_attention."""
    if scene.base == "scaled_dot_product_attention":
        query, key, mask = scene.given("query"), scene.given("key"), scene.given("attn_mask")
        if query is None or key is None or mask is None or min(len(query.shape), len(key.shape)) < 2:
            return None
        return mask_cause(mask, (*query.shape[:-1], key.shape[-2]))
    pair = scene.mask_and_scores
    if pair is None:
        return None
    mask, scores = pair
    if scene.base == "masked_fill" and "boolean mask" in scene.message:
        return Cause(
            "mask_dtype",
            f"{mask.name} is {mask.dtype}; masked_fill takes a boolean mask, True where a key is to be hidden.",
            f"{mask.name} == 0 where 0 means hidden, {mask.primary}.bool() where 1 does.",
        )
    over = scores.axes[-2:]
    if len(scores.shape) == 4 and all(dim[0] in ("heads", "kv_heads") for dim in over):
        return Cause(
            "heads_not_transposed",
            f"{scores.text}: heads are compared with heads, so queries and keys were split but not transposed.",
            "q.transpose(1, 2), and k and v alike, after the view that splits: heads must come before the sequence.",
        )
    return mask_cause(mask, scores.shape)


def mask_cause(mask: Given, scores: tuple[int, ...]) -> Cause | None:
    """Why a mask does not lie over scores of this shape, `batch heads query key` or without the first ones."""
    if first_clash(mask.shape, scores) is None and len(mask.shape) <= len(scores):
        return None
    if not 2 <= len(scores) <= 4 or len(mask.shape) < 1:
        return None
    query, key = scores[-2:]
    over = f"the scores are {shape_text(scores)}"
    found = _lacks_dimension(mask, scores)
    if found is not None:
        what, fix = found
        return Cause("mask_rank", f"{mask.name} is {shape_text(mask.shape)}, {what}, and {over}.", fix)
    rows, columns = mask.shape[-2:] if len(mask.shape) > 1 else (1, mask.shape[-1])
    if (rows, columns) == (key, query) and query != key:
        return Cause(
            "mask_transposed",
            f"{mask.name} is {shape_text(mask.shape)}, key {key} before query {query}, and {over}.",
            f"{mask.primary}.transpose(-2, -1).",
        )
    if len(scores) > 2 and rows == columns == scores[0] and scores[0] not in (query, key) and len(mask.shape) == 2:
        return Cause(
            "batch_and_sequence_swapped",
            f"{mask.name} is {shape_text(mask.shape)}, and {over}: it fits dimension 0, which is read as the batch.",
            "The input has its sequence first and the layer takes the batch first, or the other way round: "
            "x.transpose(0, 1), or batch_first.",
        )
    if (rows, columns) != (query, key) and (rows not in (1, query) or columns not in (1, key)):
        larger = rows in (1, *range(query, rows + 1)) and columns >= key
        return Cause(
            "mask_size",
            f"{mask.name} covers {_lengths(rows, columns)}, and {over}: query {query}, key {key}.",
            f"Cut it to the lengths of this call: {mask.primary}[..., :{query}, :{key}]."
            if larger
            else f"Make it for query {query} and key {key}, or give no more positions than it covers.",
        )
    return None


def _lengths(rows: int, columns: int) -> str:
    return f"{columns} keys" if rows == 1 else f"query {rows}, key {columns}"


def _lacks_dimension(mask: Given, scores: tuple[int, ...]) -> tuple[str, str] | None:
    """What a mask of too few dimensions is, and how it gets the one that it lacks."""
    query, key = scores[-2:]
    shape, batch = mask.shape, scores[0]
    if len(scores) == 4:
        heads = scores[1]
        known = {
            (batch, key): (
                "batch key",
                f"{mask.primary}[:, None, None, :]: one dimension for the heads, one for the queries.",
            ),
            (key, batch): ("key batch", f"{mask.primary}.T[:, None, None, :]: batch first, then heads and queries."),
            (batch, query, key): ("batch query key", f"{mask.primary}[:, None]: one dimension for the heads."),
            (batch, 1, key): ("batch 1 key", f"{mask.primary}[:, None]: one dimension for the heads."),
            (batch * heads, query, key): (
                "(batch heads) query key",
                f"{mask.primary}.view({batch}, {heads}, {query}, {key}): heads in a dimension of their own.",
            ),
        }
        if shape == (key, batch) and key == query:
            # As well a mask that is simply too small for its queries: the sizes do not tell.
            return None if batch == query else known[shape]
        return known.get(shape)
    if len(scores) == 3:
        if shape == (batch, key):
            return "batch key", f"{mask.primary}[:, None, :]: one dimension for the queries."
        if len(shape) == 3 and shape[1:] == (query, key) and 1 < shape[0] < batch and batch % shape[0] == 0:
            times = batch // shape[0]
            return (
                "batch query key",
                f"{mask.primary}.repeat_interleave({times}, dim=0): batch and {times} heads are one dimension here.",
            )
    return None
