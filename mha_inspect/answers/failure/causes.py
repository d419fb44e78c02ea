"""Named causes: the mistakes that people make in attention, each told by evidence and never by a name or a guess.

A rule looks at a failing call and gives a cause, or None. The first one that gives a cause is believed; where none
does there is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ...record.ops import TensorRef
from ...reports.failure import Cause
from .attention_causes import of_torch_attention
from .mask_causes import of_mask
from .scene import Given, Scene, first_clash, mixed_dtypes, shape_text
from .width_causes import heads_do_not_divide, of_linear, of_view

CAUSES = {
    "mixed_dtypes": "tensors of several dtypes in one call",
    "mixed_devices": "tensors of several devices in one call",
    "heads_not_split": "one operand is divided into heads and the other is not",
    "heads_not_transposed": "divided into heads, and left behind the sequence",
    "key_not_transposed": "the keys' features and positions are not swapped for the product",
    "heads_not_repeated": "fewer key heads than query heads, not repeated",
    "head_dim_differs": "queries and keys with heads of different widths",
    "lengths_differ": "as many values as keys are needed, and there are not",
    "batch_differs": "queries and keys of different batch sizes",
    "batch_and_sequence_swapped": "sequence first where batch first is expected, or the other way round",
    "heads_do_not_divide": "a width that the heads do not divide",
    "wrong_head_dim": "heads times head_dim is not the width",
    "heads_not_joined": "heads not put side by side behind the sequence",
    "not_contiguous": "a view of what a transpose has left scattered in memory",
    "wrong_width": "a width that the layer does not take",
    "features_not_last": "features in another dimension than the last",
    "weight_not_transposed": "a weight matrix that is the wrong way round",
    "mask_rank": "a mask that lacks a dimension",
    "mask_transposed": "a mask with queries and keys swapped",
    "mask_size": "a mask of other lengths",
    "mask_dtype": "a mask of integers",
}
"""Name of each cause, and what it is in a phrase."""


def find_cause(scene: Scene) -> Cause | None:
    """The mistake that the evidence shows; None where it shows none."""
    return next((cause for rule in RULES if (cause := rule(scene)) is not None), None)


def _devices(scene: Scene) -> Cause | None:
    devices = {o.device for o in scene.operands}
    if len(devices) < 2 or "device" not in scene.message:
        return None
    odd, usual = _odd_one(scene, "device")
    return Cause(
        "mixed_devices",
        f"{odd.name} is on {odd.device}, the others are on {usual}.",
        f"Move it: .to({usual!r}) on a tensor, or the module and its inputs to one device. A tensor that the module "
        "makes for itself needs device=x.device, or register_buffer.",
    )


def _dtypes(scene: Scene) -> Cause | None:
    if not mixed_dtypes(scene):
        return None
    layer_input = scene.given("input")
    if layer_input is not None and layer_input.dtype.startswith(("int", "uint")):
        return Cause(
            "mixed_dtypes",
            f"{layer_input.name} is {layer_input.dtype}: whole numbers, as token ids are.",
            "Token ids go through an nn.Embedding first; numbers need .float().",
        )
    odd, usual = _odd_one(scene, "dtype")
    if odd.role == "attn_mask":
        return Cause(
            "mask_dtype",
            f"{odd.name} is {odd.dtype}, the queries are {usual}; a mask is boolean, True where a key is seen, or of "
            "their dtype, which is added.",
            f"{odd.primary}.bool(), or {odd.primary}.to(torch.{usual}).",
        )
    return Cause(
        "mixed_dtypes",
        f"{odd.name} is {odd.dtype}, the others are {usual}.",
        f"Bring them to one: {odd.primary}.to(torch.{usual}), or the module with .to(torch.{odd.dtype}); "
        "under torch.autocast neither is needed.",
    )


def _odd_one(scene: Scene, what: str) -> tuple[Given, str]:
    """The operand that differs from most (a parameter is less likely the odd one), and what most are."""
    values = [getattr(o, what) for o in scene.operands]
    weights = {
        value: sum(2 if o.is_parameter else 1 for o in scene.operands if getattr(o, what) == value)
        for value in dict.fromkeys(values)
    }
    usual = max(weights, key=lambda value: weights[value])
    return next(o for o in scene.operands if getattr(o, what) != usual), usual


def _einops(scene: Scene) -> Cause | None:
    """einops says in words what a view says in sizes."""
    said = re.search(r"can't divide axis of length (\d+) in chunks of (\d+)", scene.message)
    return None if scene.error != "EinopsError" or said is None else heads_do_not_divide(int(said[1]), int(said[2]))


def _factors(scene: Scene) -> tuple[Given, ...]:
    """The operands of a product of scores, or of weights and values, that are split into heads."""
    return tuple(o for o in scene.operands if o.part in ("query", "key", "value", "weights"))


def _split(scene: Scene) -> Cause | None:
    """One side has heads, the other still has them side by side."""
    factors = [o for o in _factors(scene) if o.part != "weights"]
    with_heads = [o for o in factors if o.place("heads", "kv_heads") is not None]
    without = [o for o in factors if o.place("heads", "kv_heads") is None and len(o.shape) == 3]
    if not with_heads or not without:
        return None
    heads = _size(with_heads[0], "heads", "kv_heads")
    whole = heads * _size(with_heads[0], "head_dim")
    odd = without[0]
    if whole not in odd.shape[1:] or len(with_heads[0].shape) < 4:
        return None
    return Cause(
        "heads_not_split",
        f"{with_heads[0].name} is divided into {heads} heads, {odd.name} is not.",
        f"Divide it too: .view(batch, length, {heads}, {whole // heads}).transpose(1, 2).",
    )


def _transposed(scene: Scene) -> Cause | None:
    """Heads behind the sequence, where the product runs over what stands in front."""
    bad = [o for o in _factors(scene) if o.part != "weights" and _heads_are_behind(o)]
    if not bad or not _does_not_fit(scene):
        return None
    names = _and([_variable(scene, o) for o in bad])
    was = "was" if len(bad) == 1 else "were"
    sequence = " and ".join(dict.fromkeys("query" if o.part == "query" else "key" for o in bad))
    if all(_was_right_before(scene, o.tensor) for o in bad):
        did, origin = "transposed back", _made_at(scene, bad[0].tensor)
        fix = "Leave that transpose out: the heads were in front already."
    else:
        did, origin = "split but not transposed", _split_at(scene, bad[0].tensor)
        fix = f"{_variable(scene, bad[0])}.transpose(1, 2) after the view that splits."
    return Cause(
        "heads_not_transposed",
        f"{names} {was} {did}{f' ({origin})' if origin else ''}. Heads must come before {sequence}.",
        fix,
    )


def _made_at(scene: Scene, tensor: TensorRef) -> str:
    op = scene.reached.graph.recording.producer(tensor)
    return "" if op is None else op.source


def _heads_are_behind(given: Given) -> bool:
    heads, sequence = given.place("heads", "kv_heads"), given.place("query", "key", "sequence")
    return heads is not None and sequence is not None and len(given.shape) >= 4 and sequence < heads


def _was_right_before(scene: Scene, tensor: TensorRef) -> bool:
    """Whether an earlier step had the heads in front of the sequence."""
    for earlier in _steps_back(scene, tensor):
        axes = scene.reached.of(earlier)
        flat = [token for dim in axes for token in dim]
        heads = next((i for i, token in enumerate(flat) if token in ("heads", "kv_heads")), None)
        sequence = next((i for i, token in enumerate(flat) if token in ("query", "key", "sequence")), None)
        if heads is not None and sequence is not None and len(axes) >= 4 and heads < sequence:
            return True
    return False


def _steps_back(scene: Scene, tensor: TensorRef) -> list[TensorRef]:
    graph, steps = scene.reached.graph, []
    while (op := graph.recording.producer(tensor)) is not None and (graph.moves(op) or graph.is_scale(op)):
        tensor = op.inputs[0]
        steps.append(tensor)
    return steps


def _split_at(scene: Scene, tensor: TensorRef) -> str:
    """The line of the view that divided a width into heads."""
    graph = scene.reached.graph
    for step in [tensor, *_steps_back(scene, tensor)]:
        op = graph.recording.producer(step)
        if (
            op is not None
            and op.base_name in ("view", "_unsafe_view")
            and len(op.output.shape) > len(op.inputs[0].shape)
        ):
            return op.source
    return ""


def _variable(scene: Scene, given: Given) -> str:
    """The plain variable behind an operand: `k` behind `k.transpose(-2, -1)`."""
    tensors = [given.tensor, *_steps_back(scene, given.tensor)]
    names = [scene.variables[t.id] for t in tensors[:2] if t.id in scene.variables]
    return names[0] if names else given.name


def _keys(scene: Scene) -> Cause | None:
    """The keys' last two dimensions are not swapped, or others are."""
    pair = scene.pair
    if pair is None or pair[1].part != "key" or min(len(o.shape) for o in pair) < 2:
        return None
    query, key = pair
    name = _variable(scene, key)
    if not _does_not_fit(scene):
        return None
    if len(key.shape) > 2 and key.axes[-1] == ("batch",):
        return Cause(
            "key_not_transposed",
            f"{key.name} is {shape_text(key.shape)} {key.pattern}: all dimensions are turned round, as .T does.",
            f"Swap the last two alone: {name}.transpose(-2, -1), or {name}.mT.",
        )
    if key.place("key", "sequence") == len(key.shape) - 2 and query.shape[-1] == key.shape[-1] != key.shape[-2]:
        return Cause(
            "key_not_transposed",
            f"{key.name} ends in {' '.join(key.axis(place) for place in (-2, -1))}; q·kᵀ sums over {key.axis(-1)}.",
            f"Multiply by {name}.transpose(-2, -1).",
        )
    if _heads_are_behind(key) and _was_right_before(scene, key.tensor):
        return Cause(
            "key_not_transposed",
            f"{key.name} swaps heads and key; q·kᵀ needs key and head_dim swapped.",
            "Swap the last two: .transpose(-2, -1).",
        )
    return None


def _does_not_fit(scene: Scene) -> bool:
    """Whether the shapes clash at all: an error about something else is no evidence."""
    pair = scene.pair
    if pair is None:
        return any(word in scene.message for word in ("size", "shape", "subscript", "dimension"))
    left, right = (o.shape for o in pair)
    if len(left) < 2 or len(right) < 2:
        return True
    if scene.base == "bmm" and (len(left) != 3 or len(right) != 3):
        return True
    return left[-1] != right[-2] or first_clash(left[:-2], right[:-2]) is not None


def _sizes(scene: Scene) -> Cause | None:
    """Operands that are laid out alike, and one axis of theirs has two sizes."""
    factors = _factors(scene)
    query = next((o for o in factors if o.part in ("query", "weights")), None)
    key = next((o for o in factors if o.part in ("key", "value")), None)
    if query is None or key is None or not _does_not_fit(scene):
        return None
    q_heads, k_heads = _size(query, "heads"), _size(key, "kv_heads", "heads")
    if (
        q_heads
        and k_heads
        and q_heads != k_heads
        and q_heads % k_heads == 0
        and len(query.shape) == len(key.shape) == 4
    ):
        name = _variable(scene, key)
        return Cause(
            "heads_not_repeated",
            f"{query.name} has {q_heads} heads, {key.name} has {k_heads}: each of these serves {q_heads // k_heads}.",
            f"{name}.repeat_interleave({q_heads // k_heads}, dim=1) before the product, for keys and values alike; "
            "scaled_dot_product_attention takes enable_gqa=True.",
        )
    for axis, name in (("batch", "batch_differs"), ("head_dim", "head_dim_differs")):
        left, right = _size(query, axis), _size(key, axis)
        if left and right and left != right and (axis == "batch" or query.part == "query"):
            return Cause(name, f"{query.name} has {axis} {left}, {key.name} has {axis} {right}.", _WAYS_OUT[name])
    if query.part == "weights" and query.shape[-1] != _size(key, "key", "sequence") != 0:
        return Cause(
            "lengths_differ",
            f"{query.name} weighs {query.shape[-1]} keys, {key.name} has {_size(key, 'key', 'sequence')} values.",
            "Keys and values must come from the same sequence.",
        )
    return None


_WAYS_OUT = {
    "batch_differs": "Both must have the same examples; one example for all needs .expand on the batch dimension.",
    "head_dim_differs": "Queries and keys are compared feature by feature: divide both into heads of the same width.",
}


def _size(given: Given, *names: str) -> int:
    """Size of the dimension that is one of these axes alone; 0 where there is none."""
    return next(
        (size for size, dim in zip(given.shape, given.axes, strict=True) if dim[0] in names and len(dim) == 1), 0
    )


def _and(names: list[str]) -> str:
    return " and ".join(dict.fromkeys(names)) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"


RULES: tuple[Callable[[Scene], Cause | None], ...] = (
    _devices,
    _dtypes,
    of_torch_attention,
    of_mask,
    _split,
    _keys,
    _transposed,
    _sizes,
    of_linear,
    of_view,
    _einops,
)
"""In the order in which they are asked."""
