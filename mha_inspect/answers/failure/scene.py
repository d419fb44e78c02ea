"""The call that failed, its operands, and what does not fit in it: what `causes` judges."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ...naming.pattern import dims_of
from ...record.ops import TensorRef
from .reached import PRODUCTS, Reached

BROADCASTS = {"add", "sub", "mul", "div", "truediv", "masked_fill", "where", "addcmul", "iadd", "isub", "imul", "pow"}
"""Calls that stretch their operands over one another, by their names without underscores."""
VIEWS = ("view", "reshape", "unflatten")
"""Calls that divide dimensions, or put them together."""
HEADS = ("heads", "kv_heads")
SEQUENCES = ("query", "key", "sequence")


@dataclass(frozen=True)
class Given:
    """One tensor that the failing call was given."""

    name: str
    role: str
    tensor: TensorRef
    device: str
    pattern: str
    """What each dimension is, as an einops pattern."""
    part: str = ""
    """What it is to the attention: `query`, `key`, `value`, `weights`; empty where that is not known."""
    is_parameter: bool = False
    is_contiguous: bool = True
    is_floating: bool = True
    from_scores: bool = False
    """Whether it was made from the product of the scores."""
    from_parameters: bool = False
    """Whether a parameter has gone into it: else it came in as it is, like a mask."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        return self.tensor.shape

    @property
    def dtype(self) -> str:
        """`float32`, `bool`, ..."""
        return self.tensor.dtype

    @property
    def axes(self) -> list[list[str]]:
        """The names in each dimension, and numbers where there is none."""
        return dims_of(self.pattern)

    @property
    def is_shape(self) -> str:
        """`q is [2, 8, 5, 64]`."""
        return f"{self.name} is {shape_text(self.shape)}"

    @property
    def text(self) -> str:
        """`q is [2, 8, 5, 64] batch heads query head_dim`; the axes where one at least has a name."""
        named = any(not name.isdigit() for names in self.axes for name in names)
        return f"{self.is_shape} {self.pattern}" if named else self.is_shape

    @property
    def primary(self) -> str:
        """The name as it can be indexed, or a method of it called: `(mask == 0)`."""
        try:
            tree = ast.parse(self.name, mode="eval").body
        except SyntaxError:
            return f"({self.name})"
        return self.name if isinstance(tree, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({self.name})"

    def place(self, *names: str) -> int | None:
        """Return the first dimension that is one of these axes, or has one in it; None where none is."""
        return next((place for place, dim in enumerate(self.axes) if not set(names).isdisjoint(dim)), None)

    def size(self, *names: str) -> int:
        """Return the size of the dimension that is one of these axes alone; 0 where there is none."""
        own = zip(self.shape, self.axes, strict=True)
        return next((size for size, dim in own if len(dim) == 1 and dim[0] in names), 0)

    def axis(self, place: int) -> str:
        """Return what a dimension is, with its size: `head_dim 64`; the size alone where it has no name."""
        dim = self.axes[place]
        name = dim[0] if len(dim) == 1 else f"({' '.join(dim)})"
        return str(self.shape[place]) if name.isdigit() else f"{name} {self.shape[place]}"

    @property
    def heads_are_behind(self) -> bool:
        """Whether the heads stand behind the sequence."""
        heads, sequence = self.place(*HEADS), self.place(*SEQUENCES)
        return heads is not None and sequence is not None and len(self.shape) >= 4 and sequence < heads


@dataclass(frozen=True)
class Scene:
    """A failing call, its operands, and how far the attention had come."""

    error: str
    message: str
    call: str
    base: str
    """Name of the call without namespace and underscores: `matmul`."""
    operands: tuple[Given, ...]
    reached: Reached
    variables: dict[int, str] = field(default_factory=dict)
    """TensorRef id to what the user's code calls it."""
    settings: tuple[Any, ...] = ()
    """The arguments by place that are not tensors."""
    num_heads: int = 0
    """Of the torch layer that failed; 0 for any other call."""
    widths: dict[str, int] = field(default_factory=dict)
    """What it takes as query, key and value."""
    batch_first: bool = True

    def given(self, *roles: str) -> Given | None:
        """Return the operand that has one of these roles; None where none has."""
        return next((o for o in self.operands if o.role in roles), None)

    @property
    def pair(self) -> tuple[Given, Given] | None:
        """The two factors of a product, left and right."""
        return (self.operands[-2], self.operands[-1]) if self.base in PRODUCTS and len(self.operands) >= 2 else None

    @property
    def factors(self) -> tuple[Given, ...]:
        """The operands of a product of scores, or of weights and values."""
        return tuple(o for o in self.operands if o.part)

    @property
    def mask_and_scores(self) -> tuple[Given, Given] | None:
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
        flat = tuple(_numbers_in(self.settings))
        if self.base == "unflatten" and flat and self.operands:
            shape = self.operands[0].shape
            place = flat[0] % max(len(shape), 1)
            return (*shape[:place], *flat[1:], *shape[place + 1 :])
        return flat


def shape_text(shape: tuple[int, ...]) -> str:
    """`[2, 8, 5, 64]`."""
    return str(list(shape))


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
        numbers = [o for o in given if (o.is_floating or o.role == "input") and o.role != "bias"]
        return f"{', '.join(f'{o.name} is {o.dtype}' for o in numbers)}: a product takes one dtype."
    if scene.pair is not None:
        return _of_product(*scene.pair)
    if scene.base in ("scaled_dot_product_attention", "multi_head_attention", "transformer", "einsum"):
        return _alike(given) + "."
    if scene.base in VIEWS and given:
        return _of_view(scene)
    if len(given) < 2:
        return ""
    x, other = given[:2]
    if scene.base in BROADCASTS and (place := first_clash(x.shape, other.shape)) is not None:
        return f"{x.text}, {other.text}. {_clashes(x, other, place)}"
    if scene.base == "linear" and x.shape and x.shape[-1] != other.shape[-1]:
        return f"{x.text}, and {other.name} {shape_text(other.shape)} takes {other.shape[-1]} features."
    return ""


def _alike(given: tuple[Given, ...]) -> str:
    """Return each tensor once, however often it was given."""
    alike: dict[int, list[Given]] = {}
    for operand in given:
        alike.setdefault(operand.tensor.id, []).append(operand)
    texts = []
    for same in alike.values():
        roles = [o.role for o in same if o.role and o.role != o.name]
        texts.append(same[0].text + (f" (as {', '.join(roles)})" if len(same) > 1 and roles else ""))
    return "; ".join(texts)


def _of_product(left: Given, right: Given) -> str:
    start = f"{left.name} @ {right.name}: {left.text}, {right.text}."
    if min(len(left.shape), len(right.shape)) < 2:
        return start
    if left.shape[-1] != right.shape[-2]:
        return f"{start} The dimensions that are summed over clash: {left.axis(-1)} against {right.axis(-2)}."
    place = first_clash(left.shape[:-2], right.shape[:-2])
    return start if place is None else f"{start} {_clashes(left, right, place - 2)}"


def _clashes(left: Given, right: Given, place: int) -> str:
    rank = max(len(left.shape), len(right.shape))
    return f"Dimension {rank + place} clashes: {left.axis(place)} against {right.axis(place)}."


def _of_view(scene: Scene) -> str:
    x, sizes = scene.operands[0], scene.sizes_of_view
    if not sizes or "stride" in scene.message:
        return f"{x.text}." if x.is_contiguous else f"{x.text}, and not contiguous in memory."
    has, wanted = x.tensor.numel, prod(size for size in sizes if size != -1)
    start = f"{x.text}, {has} elements; {shape_text(sizes)}"
    if -1 in sizes:
        return f"{start} needs a multiple of {wanted}." if not wanted or has % wanted else ""
    return f"{start} has {wanted}." if has != wanted else ""
