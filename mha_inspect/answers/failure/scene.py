"""The call that failed and what it was given, as plain data for `failure_causes` to judge."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ...record.ops import TensorRef
from .axes import Tokens, pattern
from .stages import PRODUCTS, Reached

BROADCASTS = {"add", "sub", "mul", "div", "truediv", "masked_fill", "where", "addcmul", "iadd", "isub", "imul", "pow"}
"""Calls that stretch their operands over one another, by their names without underscores."""


@dataclass(frozen=True)
class Given:
    """One tensor that the failing call was given."""

    name: str
    role: str
    tensor: TensorRef
    device: str
    axes: tuple[Tokens, ...]
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
    def pattern(self) -> str:
        """The axes as an einops pattern."""
        return pattern(self.axes)

    @property
    def text(self) -> str:
        """`q is [2, 8, 5, 64] batch heads query head_dim`; the axes where one at least has a name."""
        named = any(not token.isdigit() for dim in self.axes for token in dim)
        return f"{self.name} is {shape_text(self.shape)}{' ' + self.pattern if named else ''}"

    @property
    def primary(self) -> str:
        """The name as it can be indexed, or a method of it called: `(mask == 0)`."""
        try:
            tree = ast.parse(self.name, mode="eval").body
        except SyntaxError:
            return f"({self.name})"
        return self.name if isinstance(tree, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({self.name})"

    def place(self, *names: str) -> int | None:
        """The first dimension that is one of these axes, or has one in it."""
        return next((i for i, dim in enumerate(self.axes) if any(name in dim for name in names)), None)

    def axis(self, place: int) -> str:
        """What a dimension is, with its size: `head_dim 64`; the size alone where it has no name."""
        dim = self.axes[place]
        name = dim[0] if len(dim) == 1 else f"({' '.join(dim)})"
        return str(self.shape[place]) if name.isdigit() else f"{name} {self.shape[place]}"


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
        """The operand that has one of these roles, or plays one of these parts."""
        return next((o for o in self.operands if o.role in roles or o.part in roles), None)

    @property
    def pair(self) -> tuple[Given, Given] | None:
        """The two factors of a product, left and right."""
        if self.base in PRODUCTS and len(self.operands) >= 2:
            return self.operands[-2], self.operands[-1]
        return None

    @property
    def mask_and_scores(self) -> tuple[Given, Given] | None:
        """The mask and the scores, where the call lays the one over the other."""
        if self.base not in BROADCASTS:
            return None
        scores = next((o for o in self.operands if o.from_scores), None)
        mask = next((o for o in self.operands if not o.from_scores and not o.from_parameters and o.shape), None)
        return None if scores is None or mask is None else (mask, scores)


def shape_text(shape: tuple[int, ...]) -> str:
    """`[2, 8, 5, 64]`."""
    return str(list(shape))


def clash(scene: Scene) -> str:
    """What does not fit in the call, in words with the real numbers; empty where nothing is seen not to."""
    given = scene.operands
    if len({o.device for o in given}) > 1 and "device" in scene.message:
        return f"{_each(given, 'device')}: a call computes on one device."
    if mixed_dtypes(scene):
        numbers = [o for o in given if (o.is_floating or o.role == "input") and o.role != "bias"]
        return f"{_each(numbers, 'dtype')}: a product takes one dtype."
    if (pair := scene.pair) is not None:
        return _of_product(*pair)
    if scene.base in BROADCASTS and len(given) >= 2:
        return _of_broadcast(*given[:2])
    if scene.base == "linear" and len(given) >= 2:
        x, weight = given[:2]
        if x.shape and x.shape[-1] != weight.shape[-1]:
            return f"{x.text}, and {weight.name} {shape_text(weight.shape)} takes {weight.shape[-1]} features."
    if scene.base in ("view", "reshape", "unflatten") and given:
        return _of_view(scene)
    if scene.base in ("scaled_dot_product_attention", "multi_head_attention", "transformer", "einsum"):
        return _alike(given) + "."
    return ""


def mixed_dtypes(scene: Scene) -> bool:
    """Whether the call refused its operands for their dtypes, and they are of several."""
    words = ("dtype", "scalar type", "data type")
    if "boolean mask" in scene.message:
        return False
    return any(word in scene.message for word in words) and len({o.dtype for o in scene.operands}) > 1


def sizes_of_view(scene: Scene) -> tuple[int, ...]:
    """What a view was asked to make; empty where that is not known."""
    flat = tuple(_flat(scene.settings))
    if scene.base == "unflatten" and flat and scene.operands:
        shape, place = scene.operands[0].shape, flat[0] % max(len(scene.operands[0].shape), 1)
        return (*shape[:place], *flat[1:], *shape[place + 1 :])
    return flat


def first_clash(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    """How far from the right two shapes cannot be stretched over one another, -1 for the last dimension; else None."""
    for back in range(1, min(len(left), len(right)) + 1):
        if left[-back] != right[-back] and 1 not in (left[-back], right[-back]):
            return -back
    return None


def _flat(settings: Any) -> Iterator[int]:
    for value in settings:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield value


def _each(given: Any, what: str) -> str:
    return ", ".join(f"{o.name} is {getattr(o, what)}" for o in given)


def _alike(given: tuple[Given, ...]) -> str:
    """Each tensor once, however often it was given."""
    alike: dict[int, list[Given]] = {}
    for operand in given:
        alike.setdefault(operand.tensor.id, []).append(operand)
    texts = []
    for same in alike.values():
        roles = [o.role for o in same if o.role and o.role != o.name]
        texts.append(same[0].text + (f" (as {', '.join(roles)})" if len(same) > 1 and roles else ""))
    return "; ".join(texts)


def _of_product(left: Given, right: Given) -> str:
    start = f"{left.name} @ {right.name}: {left.text}, {right.text}"
    if len(left.shape) < 2 or len(right.shape) < 2:
        return f"{start}."
    inner = left.shape[-1] != right.shape[-2]
    outer = first_clash(left.shape[:-2], right.shape[:-2])
    if inner:
        return f"{start}. The dimensions that are summed over clash: {left.axis(-1)} against {right.axis(-2)}."
    if outer is not None:
        return f"{start}. {_dimension(len(left.shape), outer - 2)} clashes: " + (
            f"{left.axis(outer - 2)} against {right.axis(outer - 2)}."
        )
    return f"{start}."


def _of_broadcast(left: Given, right: Given) -> str:
    place = first_clash(left.shape, right.shape)
    if place is None:
        return ""
    rank = max(len(left.shape), len(right.shape))
    return (
        f"{left.text}, {right.text}. {_dimension(rank, place)} clashes: {left.axis(place)} against {right.axis(place)}."
    )


def _dimension(rank: int, place: int) -> str:
    return f"Dimension {rank + place}"


def _of_view(scene: Scene) -> str:
    x, sizes = scene.operands[0], sizes_of_view(scene)
    if not sizes or "stride" in scene.message:
        return f"{x.text}." if x.is_contiguous else f"{x.text}, and not contiguous in memory."
    wanted = prod(size for size in sizes if size != -1)
    has = x.tensor.numel
    if -1 in sizes:
        return f"{x.text}, {has} elements; {shape_text(sizes)} needs a multiple of {wanted}." if has % wanted else ""
    return f"{x.text}, {has} elements; {shape_text(sizes)} has {wanted}." if has != wanted else ""
