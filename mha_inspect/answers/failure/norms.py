"""Find a norm of a whole projection that is applied to heads: 4 heads of 4 features, and a weight of 16.

Models differ in where they normalise queries and keys: before they are split into heads, or each head by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ... import text
from .call import Call
from .facts import BROADCASTS, HEADS, Facts, Operand
from .suspect import Suspect
from .tried import Fix, of_shape

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
    x, weight = norm.x, norm.weight
    place = _place_of_heads(x)
    if place is None:
        return None
    heads, head_dim = x.shape[place], x.shape[-1]
    if heads < 2 or heads * head_dim != norm.features:
        return None
    is_behind = place == len(x.shape) - 2

    def joined(tensor: Tensor) -> Tensor:
        """Return `batch sequence (heads head_dim)` of heads."""
        return (tensor if is_behind else tensor.transpose(1, -2)).flatten(-2)

    name, has = "the norm", "The norm is for"
    if weight is not None:
        name, has = weight.name.removesuffix(".weight"), f"{weight.name} has"
    what = (
        f"{has} {norm.features} features = {text.plural(heads, 'head')} · {head_dim}, for the whole projection; "
        f"{x.name} is already split into heads, {text.shape(x.shape)}."
    )
    before = Fix(f"apply {name} before the heads are split", [(x, joined)])
    return Suspect("norm_of_whole", what, (before, _of_each_head(facts, weight, head_dim)))


def _place_of_heads(x: Operand) -> int | None:
    """Return the dimension of the heads: 1 in `batch heads sequence head_dim`, or that before head_dim; else None."""
    before_last = len(x.shape) - 2
    place = x.place(*HEADS)
    if place is None and x.place("head_dim") is None and len(x.shape) >= 4:
        return before_last
    if len(x.shape) < 3 or place not in (1, before_last):
        return None
    return place


def _norm_of(facts: Facts) -> _Norm | None:
    """Return the norm that fails: a call of torch, or a product with its weight; None for other calls."""
    if facts.base in _NORMS and facts.operands:
        weight = next((o for o in facts.operands[1:] if o.is_parameter), None)
        return _Norm(facts.operands[0], weight, _normalized_features(facts.call))
    if facts.base not in BROADCASTS or len(facts.operands) != 2:
        return None
    # The norm of a model may multiply by its weight itself.
    left, right = facts.operands
    x, scale = (right, left) if left.is_parameter else (left, right)
    if not scale.is_parameter or len(scale.shape) != 1 or x.is_parameter:
        return None
    return _Norm(x, scale, scale.shape[0])


def _normalized_features(call: Call) -> int:
    """Return the last of the sizes that a norm of torch is for; 0 if they are unknown."""
    shape: Any = call.kwargs.get("normalized_shape", call.args[1] if len(call.args) > 1 else ())
    return shape[-1] if isinstance(shape, (tuple, list)) and shape else 0


def _of_each_head(facts: Facts, weight: Operand | None, head_dim: int) -> Fix:
    """Return the fix to make the norm for the features of one head."""
    way = f"create it for {head_dim} features if each head is normalised by itself"
    if facts.base not in _NORMS:
        edits = () if weight is None else [(weight, of_shape((head_dim,)))]
        return Fix(way, edits)
    function = facts.call.function

    def smaller(x: Tensor, *_: Any, **__: Any) -> Any:
        assert function is not None
        return function(x, (head_dim,))

    return Fix(way, function=smaller)
