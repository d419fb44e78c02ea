"""Find a norm of a whole projection that is applied to heads: 4 heads of 4 features, and a weight of 16.

Models differ in where they normalise queries and keys: before they are split into heads, or each head by itself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import text
from .facts import BROADCASTS, HEADS, Facts, Operand
from .suspect import Suspect
from .tried import Fix, of_shape

_NORMS = ("layer_norm", "rms_norm")


def norm_of_whole(facts: Facts) -> Suspect | None:
    """Return why a norm does not fit its input, if it is for all heads together; else None."""
    given = _input_and_features(facts)
    if given is None:
        return None
    x, weight, takes = given
    place = x.place(*HEADS)
    if place is None and x.place("head_dim") is None and len(x.shape) >= 4:
        place = len(x.shape) - 2
    if place is None or len(x.shape) < 3 or place not in (1, len(x.shape) - 2):
        return None
    heads, head_dim = x.shape[place], x.shape[-1]
    if heads < 2 or heads * head_dim != takes:
        return None
    is_behind = place == len(x.shape) - 2

    def joined(tensor: Tensor) -> Tensor:
        """Return `batch sequence (heads head_dim)` of heads."""
        return (tensor if is_behind else tensor.transpose(1, -2)).flatten(-2)

    name = weight.name.removesuffix(".weight") if weight is not None else "the norm"
    norm = f"{weight.name} has" if weight is not None else "The norm is for"
    what = (
        f"{norm} {takes} features = {text.plural(heads, 'head')} · {head_dim}, for the whole projection; {x.name} is "
        f"already split into heads, {text.shape(x.shape)}."
    )
    before = Fix(f"apply {name} before the heads are split", [(x, joined)])
    return Suspect("norm_of_whole", what, (before, _of_each_head(facts, weight, head_dim)))


def _input_and_features(facts: Facts) -> tuple[Operand, Operand | None, int] | None:
    """Return the input of a norm, its weight if there is one, and its features; None for other calls."""
    if facts.base in _NORMS and facts.operands:
        shape: Any = facts.call.kwargs.get("normalized_shape", facts.call.args[1] if len(facts.call.args) > 1 else ())
        features = shape[-1] if isinstance(shape, (tuple, list)) and shape else 0
        weight = next((o for o in facts.operands[1:] if o.is_parameter), None)
        return facts.operands[0], weight, features
    if facts.base not in BROADCASTS or len(facts.operands) != 2:
        return None
    # The norm of a model may multiply by its weight itself.
    left, right = facts.operands
    x, weight = (right, left) if left.is_parameter else (left, right)
    is_scale = weight.is_parameter and len(weight.shape) == 1 and not x.is_parameter
    return (x, weight, weight.shape[0]) if is_scale else None


def _of_each_head(facts: Facts, weight: Operand | None, head_dim: int) -> Fix:
    """Return the fix to make the norm for the features of one head."""
    way = f"create it for {head_dim} features if each head is normalised by itself"
    if facts.base not in _NORMS:
        return Fix(way, [(weight, of_shape((head_dim,)))] if weight is not None else ())
    function = facts.call.function

    def smaller(x: Tensor, *_: Any, **__: Any) -> Any:
        assert function is not None
        return function(x, (head_dim,))

    return Fix(way, function=smaller)
