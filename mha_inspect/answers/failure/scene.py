"""The call that failed, its operands, and what does not fit in it: what `causes` judges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from ... import text
from .call import Call
from .operand import LAYERS, SDPA, Operand
from .reached import PRODUCTS, Reached

BROADCASTS = {"add", "sub", "mul", "div", "truediv", "masked_fill", "where", "addcmul", "iadd", "isub", "imul", "pow"}
"""Calls that stretch their operands over one another, by their names without underscores."""
VIEWS = ("view", "reshape", "unflatten")
"""Calls that divide dimensions, or put them together."""


@dataclass(frozen=True, eq=False)
class Scene:
    """A failing call, its operands, and how far the attention had come."""

    error: str
    message: str
    call: Call | None
    operands: tuple[Operand, ...]
    reached: Reached
    variables: dict[int, str]
    """TensorRef id to what the user's code calls it."""

    @property
    def base(self) -> str:
        """Name of the call without namespace and underscores: `matmul`; empty without a call."""
        return "" if self.call is None else self.call.base

    @property
    def batch_first(self) -> bool:
        """Whether the call takes the batch first."""
        return self.call is None or self.call.batch_first

    @property
    def num_heads(self) -> int:
        """Heads of torch's attention; 0 for any other call."""
        layer = None if self.call is None else self.call.layer
        return layer.num_heads if isinstance(layer, nn.MultiheadAttention) else 0

    @property
    def widths(self) -> dict[str, int]:
        """What torch's attention takes as query, key and value; empty for any other call."""
        layer = None if self.call is None else self.call.layer
        if not isinstance(layer, nn.MultiheadAttention):
            return {}
        return {"query": layer.embed_dim, "key": layer.kdim, "value": layer.vdim}

    def given(self, *roles: str) -> Operand | None:
        """Return the operand that has one of these roles; None where none has."""
        return next((o for o in self.operands if o.role in roles), None)

    @property
    def pair(self) -> tuple[Operand, Operand] | None:
        """The two factors of a product, left and right."""
        return (self.operands[-2], self.operands[-1]) if self.base in PRODUCTS and len(self.operands) >= 2 else None

    @property
    def factors(self) -> tuple[Operand, ...]:
        """The operands of a product of scores, or of weights and values."""
        return tuple(o for o in self.operands if o.part)

    @property
    def mask_and_scores(self) -> tuple[Operand, Operand] | None:
        """The mask and the scores, where the call lays the one over the other."""
        if self.base not in BROADCASTS:
            return None
        scores = next((o for o in self.operands if o.from_scores), None)
        mask = next((o for o in self.operands if not o.from_scores and not o.from_parameters and o.shape), None)
        return None if scores is None or mask is None else (mask, scores)

    @property
    def mixes_dtypes(self) -> bool:
        """Whether the call refused its operands for their dtypes, and they are of several."""
        words = ("dtype", "scalar type", "data type")
        said = "boolean mask" not in self.message and any(word in self.message for word in words)
        return said and len({o.dtype for o in self.operands}) > 1

    @property
    def mixes_devices(self) -> bool:
        """Whether the call refused its operands for their devices."""
        return "device" in self.message and len({o.device for o in self.operands}) > 1

    @property
    def sizes_clash(self) -> bool:
        """Whether the shapes clash at all: an error about something else is no evidence."""
        if self.pair is None:
            return any(word in self.message for word in ("size", "shape", "subscript", "dimension"))
        left, right = (o.shape for o in self.pair)
        if min(len(left), len(right)) < 2 or (self.base == "bmm" and (len(left) != 3 or len(right) != 3)):
            return True
        return left[-1] != right[-2] or first_clash(left[:-2], right[:-2]) is not None

    @property
    def sizes_of_view(self) -> tuple[int, ...]:
        """What a view was asked to make; empty where that is not known."""
        flat = tuple(_numbers_in(() if self.call is None else self.call.settings))
        if self.base == "unflatten" and flat and self.operands:
            shape = self.operands[0].shape
            place = flat[0] % max(len(shape), 1)
            return (*shape[:place], *flat[1:], *shape[place + 1 :])
        return flat


def first_clash(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    """Return how far from the right two shapes cannot be stretched over one another, -1 for the last; else None."""
    for back in range(1, min(len(left), len(right)) + 1):
        if left[-back] != right[-back] and 1 not in (left[-back], right[-back]):
            return -back
    return None


def _numbers_in(settings: Any) -> Iterable[int]:
    for value in settings:
        if isinstance(value, (tuple, list)):
            yield from _numbers_in(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield value


def clash(scene: Scene) -> str:
    """Return what does not fit in the call, in words with the real numbers; empty where nothing is seen not to."""
    given = scene.operands
    if scene.mixes_devices:
        return f"{', '.join(f'{o.name} is {o.device}' for o in given)}: a call computes on one device."
    if scene.mixes_dtypes:
        numbers = [o for o in given if (o.value.is_floating_point() or o.role == "input") and o.role != "bias"]
        return f"{', '.join(f'{o.name} is {o.dtype}' for o in numbers)}: a product takes one dtype."
    if scene.pair is not None:
        return _of_product(*scene.pair)
    if scene.base in (SDPA, *LAYERS, "einsum"):
        return _alike(given) + "."
    if scene.base in VIEWS and given:
        return _of_view(scene)
    if len(given) < 2:
        return ""
    x, other = given[:2]
    if scene.base in BROADCASTS and (place := first_clash(x.shape, other.shape)) is not None:
        return f"{x.text}, {other.text}. {_clashes(x, other, place)}"
    if scene.base == "linear" and x.role == "input" and x.shape and x.shape[-1] != other.shape[-1]:
        return f"{x.text}, and {other.name} {text.shape(other.shape)} takes {other.shape[-1]} features."
    return ""


def _alike(given: tuple[Operand, ...]) -> str:
    """Return each tensor once, however often it was given."""
    alike: dict[int, list[Operand]] = {}
    for operand in given:
        alike.setdefault(operand.tensor.id, []).append(operand)
    texts = []
    for same in alike.values():
        roles = [o.role for o in same if o.role and o.role != o.name]
        texts.append(same[0].text + (f" (as {', '.join(roles)})" if len(same) > 1 and roles else ""))
    return "; ".join(texts)


def _of_product(left: Operand, right: Operand) -> str:
    start = f"{left.name} @ {right.name}: {left.text}, {right.text}."
    if min(len(left.shape), len(right.shape)) < 2:
        return start
    if left.shape[-1] != right.shape[-2]:
        return f"{start} The dimensions that are summed over clash: {left.axis(-1)} against {right.axis(-2)}."
    place = first_clash(left.shape[:-2], right.shape[:-2])
    return start if place is None else f"{start} {_clashes(left, right, place - 2)}"


def _clashes(left: Operand, right: Operand, place: int) -> str:
    rank = max(len(left.shape), len(right.shape))
    return f"Dimension {rank + place} clashes: {left.axis(place)} against {right.axis(place)}."


def _of_view(scene: Scene) -> str:
    x, sizes = scene.operands[0], scene.sizes_of_view
    if not sizes or "stride" in scene.message:
        return f"{x.text}." if x.value.is_contiguous() else f"{x.text}, and not contiguous in memory."
    has, wanted = x.tensor.numel, prod(size for size in sizes if size != -1)
    start = f"{x.text}, {has} elements; {text.shape(sizes)}"
    if -1 in sizes:
        return f"{start} needs a multiple of {wanted}." if not wanted or has % wanted else ""
    return f"{start} has {wanted}." if has != wanted else ""
