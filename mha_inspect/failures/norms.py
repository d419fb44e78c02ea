"""Find a norm of a whole projection that is applied to heads: 4 heads of 4 features, and a weight of 16.

Models differ in where they normalise queries and keys: before they are split into heads, or each head by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import text
from .call import Call
from .facts import BROADCASTS, HEADS, Facts, Operand
from .suspect import Suspect
from .tried import Edit, Fix, of_shape

_NORMS = ("layer_norm", "rms_norm")


@dataclass(frozen=True, eq=False)
class _Norm:
    """The input of a norm, and what it is normalised by."""

    x: Operand
    weight: Operand | None
    """None for a norm without one."""
    features: int
    """The features that the norm is for; 0 if they are unknown."""


def norm_of_whole(facts: Facts) -> Suspect | None:
    """Return why a norm does not fit its input, if it is for all heads together; else None."""
    norm = _norm_of(facts)
    if norm is None:
        return None
    x = norm.x
    place = _place_of_heads(x)
    if place is None:
        return None
    heads = x.shape[place]
    head_dim = x.shape[-1]
    if heads < 2 or heads * head_dim != norm.features:
        return None
    name = "the norm"
    beginning = "The norm is for"
    if norm.weight is not None:
        name = norm.weight.name.removesuffix(".weight")
        beginning = f"{norm.weight.name} has"
    features = f"{norm.features} features = {text.plural(heads, 'head')} · {head_dim}"
    before_split = Fix.editing(
        x,
        _joining(x, place),
        f"apply {name} before the heads are split",
    )
    return Suspect(
        "norm_of_whole",
        f"{beginning} {features}, for the whole projection; "
        f"{x.name} is already split into heads, {text.shape(x.shape)}.",
        (before_split, _of_each_head(facts, norm.weight, head_dim)),
    )


def _joining(x: Operand, place: int) -> Edit:
    """Return the edit that gives `batch sequence (heads head_dim)`; the heads are at a place."""
    is_behind = place == len(x.shape) - 2

    def joined(tensor: Tensor) -> Tensor:
        if is_behind:
            return tensor.flatten(-2)
        return tensor.transpose(1, -2).flatten(-2)

    return joined


def _place_of_heads(x: Operand) -> int | None:
    """Return the dimension of the heads: 1 in `batch heads sequence head_dim`, or that before head_dim; else None."""
    before_last = len(x.shape) - 2
    place = x.place(*HEADS)
    if place is None:
        is_unnamed = x.place("head_dim") is None
        if is_unnamed and len(x.shape) >= 4:
            return before_last
        return None
    if len(x.shape) < 3 or place not in (1, before_last):
        return None
    return place


def _norm_of(facts: Facts) -> _Norm | None:
    """Return the norm that fails: a call of torch, or a product with its weight; None for other calls."""
    if facts.base in _NORMS and facts.operands:
        x, *settings = facts.operands
        weight = next((operand for operand in settings if operand.is_parameter), None)
        return _Norm(x, weight, _normalized_features(facts.call))
    if facts.base not in BROADCASTS or len(facts.operands) != 2:
        return None
    # The norm of a model may multiply by its weight itself.
    x, scale = facts.operands
    if x.is_parameter:
        x, scale = scale, x
    if x.is_parameter or not scale.is_parameter:
        return None
    if len(scale.shape) != 1:
        return None
    return _Norm(x, scale, scale.shape[0])


def _normalized_features(call: Call) -> int:
    """Return the last of the sizes that a norm of torch is for; 0 if they are unknown."""
    shape: Any = call.kwargs.get("normalized_shape")
    if shape is None and len(call.args) > 1:
        shape = call.args[1]
    if not isinstance(shape, (tuple, list)) or not shape:
        return 0
    features: int = shape[-1]
    return features


def _of_each_head(facts: Facts, weight: Operand | None, head_dim: int) -> Fix:
    """Return the fix to make the norm for the features of one head."""
    way = f"create it for {head_dim} features if each head is normalised by itself"
    function = facts.call.function
    if facts.base in _NORMS:

        def smaller(x: Tensor, *_: Any, **__: Any) -> Any:
            assert function is not None
            return function(x, (head_dim,))

        return Fix(way, function=smaller)
    if weight is None:
        return Fix(way)
    return Fix.editing(weight, of_shape((head_dim,)), way)
