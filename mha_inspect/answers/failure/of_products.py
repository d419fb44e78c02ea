"""What is wrong with products of queries, keys, weights and values, and with the views that divide them into heads."""

from __future__ import annotations

import re
from math import prod

from ...record.ops import TensorRef
from ...reports.trace import Cause
from .of_tensors import SAME_EXAMPLES, SAME_SEQUENCE
from .operand import HEADS, SEQUENCES, Operand
from .scene import VIEWS, Scene


def not_split(scene: Scene) -> Cause | None:
    """Judge a factor that is not divided into heads, where another is."""
    factors = [o for o in scene.factors if o.part != "weights"]
    split = next((o for o in factors if o.place(*HEADS) is not None), None)
    odd = next((o for o in factors if o.place(*HEADS) is None and len(o.shape) == 3), None)
    if split is None or odd is None or len(split.shape) < 4:
        return None
    heads, head_dim = split.size(*HEADS), split.size("head_dim")
    if not heads or heads * head_dim not in odd.shape[1:]:
        return None
    return Cause(
        "heads_not_split",
        f"{split.name} is divided into {heads} heads, {odd.name} is not.",
        f"Divide it too: .view(batch, length, {heads}, {head_dim}).transpose(1, 2).",
    )


def keys_not_transposed(scene: Scene) -> Cause | None:
    """Judge keys whose features and positions are not swapped for the product."""
    if scene.pair is None or not scene.sizes_clash or min(len(o.shape) for o in scene.pair) < 2:
        return None
    query, key = scene.pair
    name = _variable(scene, key)
    if key.part != "key":
        return None
    if len(key.shape) > 2 and key.axes[-1] == ["batch"]:
        what = f"{key.is_shape} {key.pattern}: all dimensions are turned round, as .T does."
        way = f"Swap the last two alone: {name}.transpose(-2, -1), or {name}.mT."
    elif key.place("key", "sequence") == len(key.shape) - 2 and query.shape[-1] == key.shape[-1] != key.shape[-2]:
        what = f"{key.name} ends in {key.axis(-2)} {key.axis(-1)}; q·kᵀ sums over {key.axis(-1)}."
        way = f"Multiply by {name}.transpose(-2, -1)."
    elif key.heads_are_behind and _was_right_before(scene, key.tensor):
        what = f"{key.name} swaps heads and key; q·kᵀ needs key and head_dim swapped."
        way = "Swap the last two: .transpose(-2, -1)."
    else:
        return None
    return Cause("key_not_transposed", what, way)


def heads_not_transposed(scene: Scene) -> Cause | None:
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
    what = f"{' and '.join(names)} {was} {did}{where}. Heads must come before {sequence}."
    return Cause("heads_not_transposed", what, way)


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
    views = (op for op in makers if op is not None and op.base_name in ("view", "_unsafe_view"))
    return next((op.source for op in views if len(op.output.shape) > len(op.inputs[0].shape)), "")


def _variable(scene: Scene, given: Operand) -> str:
    """Return the plain variable behind an operand: `k` behind `k.transpose(-2, -1)`."""
    names = [scene.variables.get(tensor.id, "") for tensor in list(scene.reached.steps_back(given.tensor))[:2]]
    return next(filter(None, names), given.name)


def two_sizes(scene: Scene) -> Cause | None:
    """Judge two factors that are laid out alike, queries or weights and keys or values, where they do not fit."""
    query = next((o for o in scene.factors if o.part in ("query", "weights")), None)
    key = next((o for o in scene.factors if o.part in ("key", "value")), None)
    if query is None or key is None or not scene.sizes_clash:
        return None
    heads, kv_heads = query.size("heads"), key.size(*HEADS)
    if heads and kv_heads and heads != kv_heads and not heads % kv_heads and len(query.shape) == len(key.shape) == 4:
        each = heads // kv_heads
        return Cause(
            "heads_not_repeated",
            f"{query.name} has {heads} heads, {key.name} has {kv_heads}: each of these serves {each}.",
            f"{_variable(scene, key)}.repeat_interleave({each}, dim=1) before the product, for keys and "
            "values alike; scaled_dot_product_attention takes enable_gqa=True.",
        )
    same = "Queries and keys are compared feature by feature: divide both into heads of the same width."
    judged = [("batch", "batch_differs", SAME_EXAMPLES)]
    judged += [("head_dim", "head_dim_differs", same)] if query.part == "query" else []
    for axis, name, way in judged:
        left, right = query.size(axis), key.size(axis)
        if left and right and left != right:
            return Cause(name, f"{query.name} has {axis} {left}, {key.name} has {axis} {right}.", way)
    has = key.size("key", "sequence")
    if query.part == "weights" and has and query.shape[-1] != has:
        what = f"{query.name} weighs {query.shape[-1]} keys, {key.name} has {has} values."
        return Cause("lengths_differ", what, SAME_SEQUENCE)
    return None


def views(scene: Scene) -> Cause | None:
    """Judge a view that does not fit what it is of."""
    x, sizes = scene.operands[0] if scene.operands else None, scene.sizes_of_view
    if x is None or scene.base not in VIEWS:
        return None
    if "stride" in scene.message and not x.value.is_contiguous():
        return _scattered(x)
    width = x.shape[-1] if x.shape else 0
    if len(sizes) == len(x.shape) + 1 and sizes[:-2] == x.shape[:-1]:
        heads, head_dim = sizes[-2:]
        count = head_dim if heads == -1 else heads
        if count > 0 and width % count:
            return _uneven(width, count, "" if -1 in sizes[-2:] else f"{heads}·{head_dim} = {heads * head_dim}")
        if min(heads, head_dim) > 0:
            return Cause(
                "wrong_head_dim",
                f"{heads} heads of {head_dim} are {heads * head_dim} features, and {x.name} has {width}.",
                f"{heads} heads of a width of {width} have head_dim {width // heads}; a projection for "
                f"{heads} heads of {head_dim} needs out_features {heads * head_dim}.",
            )
    elif sizes and len(x.shape) == len(sizes) + 1 and sizes[:-1] == x.shape[:-2]:
        first, second = x.shape[-2:]
        if sizes[-1] not in (-1, first * second):
            return Cause(
                "wrong_head_dim",
                f"{x.axis(-2)} and {x.axis(-1)} side by side are {first}·{second} = {first * second}, not {sizes[-1]}.",
                f"Write {first * second} or -1 for the last size; the output projection must take as many.",
            )
    if len(sizes) == 4 and len(x.shape) == 3 and sizes[1] == -1 and prod(sizes[2:]) == width:
        return Cause(
            "batch_differs",
            f"{x.name} has {x.shape[0]} examples, and the view takes a batch of {sizes[0]}.",
            "Queries, keys and values must have the same examples; one for all needs .expand on the batch dimension.",
        )
    return None


def _scattered(x: Operand) -> Cause:
    """Judge a view of what is not in memory in the order in which the view would read it."""
    heads, last = x.place(*HEADS), len(x.shape) - 1
    if heads is not None and x.place("head_dim") == last and heads < last - 1:
        return Cause(
            "heads_not_joined",
            f"{x.name} is {x.pattern}: the heads are not beside their features, so no view puts them side by side.",
            f"{x.name}.transpose({heads}, {last - 1}).flatten(-2).",
        )
    return Cause(
        "not_contiguous",
        f"{x.name} is a transpose: its elements are not in memory in the order in which the view would read them.",
        ".contiguous() before .view(...), or .reshape(...) in its place.",
    )


def einops_sizes(scene: Scene) -> Cause | None:
    """Judge a pattern of einops that divides a width evenly, where it cannot be."""
    said = re.search(r"can't divide axis of length (\d+) in chunks of (\d+)", scene.message)
    return None if scene.error != "EinopsError" or said is None else _uneven(int(said[1]), int(said[2]))


def _uneven(width: int, heads: int, asked: str = "") -> Cause:
    """Tell of a width that so many heads do not divide; `asked` is what they would need in its place."""
    counts = ", ".join(str(n) for n in range(1, min(width, 64) + 1) if width % n == 0)
    asked = asked or (f"{width} / {heads} = {width / heads:.4g}" if heads else "there is no head")
    return Cause(
        "heads_do_not_divide",
        f"A width of {width} cannot be split over {heads} heads: {asked}.",
        f"Head counts{' up to 64' if width > 64 else ''} that divide {width}: {counts}.",
    )
