"""Say in words what does not fit in a failing call, with the real numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod

from .. import text
from .facts import BROADCASTS, NORMS, VIEWS, Facts, Operand, first_clash
from .reached import LAYERS, SDPA


def clash(facts: Facts) -> str:
    """Return in words what does not fit in the call, with the real numbers; empty if everything fits."""
    if facts.mixes_devices:
        devices = [f"{operand.name} is {operand.device}" for operand in facts.operands]
        return f"{', '.join(devices)}: all tensors of a call must be on one device."
    if facts.mixes_dtypes:
        dtypes = [f"{operand.name} is {operand.dtype}" for operand in facts.operands if _is_factor(operand)]
        if facts.given("attn_mask") is not None:
            return f"{', '.join(dtypes)}: a mask must be bool, or of the dtype of the queries."
        return f"{', '.join(dtypes)}: all factors of a product must have one dtype."
    if facts.pair is not None:
        return _of_product(*facts.pair)
    if facts.base in (SDPA, *LAYERS, "einsum"):
        texts = _each_once(facts.operands)
        return f"{'; '.join(texts)}."
    if facts.base in VIEWS and facts.operands:
        return _of_view(facts)
    if len(facts.operands) >= 2:
        return _of_two(facts.base, *facts.operands[:2])
    return ""


def _of_two(base: str, first: Operand, second: Operand) -> str:
    """Return what does not fit in a call that broadcasts, or in a linear layer; empty for other calls."""
    if base == "linear":
        return _of_linear(first, second)
    if base in NORMS:
        return _of_norm(first, second)
    if base not in BROADCASTS:
        return ""
    place = first_clash(first.shape, second.shape)
    if place is None:
        return ""
    return f"{first.text}, {second.text}. {_clashes(first, second, place)}"


def _is_factor(operand: Operand) -> bool:
    """Return whether the dtype of an operand must be that of the others: numbers, but no bias."""
    if operand.role == "bias":
        return False
    return operand.role in ("input", "attn_mask") or operand.given.value.is_floating_point()


def _of_product(left: Operand, right: Operand) -> str:
    """Return what does not fit in `left @ right`: the dimensions that are summed over, or those of the batch."""
    start = f"{left.name} @ {right.name}: {left.text}, {right.text}."
    if len(left.shape) < 2 or len(right.shape) < 2:
        return start
    if left.shape[-1] != right.shape[-2]:
        return f"{start} The product sums over dimensions that differ: {left.axis(-1)} and {right.axis(-2)}."
    place = first_clash(left.shape[:-2], right.shape[:-2])
    return start if place is None else f"{start} {_clashes(left, right, place - 2)}"


def _of_linear(x: Operand, weight: Operand) -> str:
    """Return what does not fit in a linear layer; empty if its input has the features of the weight."""
    if x.role != "input" or not x.shape:
        return ""
    features = weight.shape[-1]
    if x.shape[-1] == features:
        return ""
    return f"{x.text}; {weight.name} {text.shape(weight.shape)} expects {features} features."


def _of_norm(x: Operand, weight: Operand) -> str:
    """Return the dimension of the input that differs from that of a norm's weight; empty if none does."""
    size = len(weight.shape)
    if len(x.shape) < size:
        return ""
    for place in range(-size, 0):
        if x.shape[place] != weight.shape[place]:
            start = (
                f"{x.text}; {weight.is_shape}, for the last {size} dimensions"
                if size > 1
                else f"{x.text}; {weight.is_shape}"
            )
            return f"{start}: {x.axis(place)} meets {weight.shape[place]}."
    return ""


def _clashes(left: Operand, right: Operand, place: int) -> str:
    rank = max(len(left.shape), len(right.shape))
    return f"Dimension {rank + place} clashes: {left.axis(place)} against {right.axis(place)}."


def _each_once(operands: Sequence[Operand]) -> Iterator[str]:
    """Yield the text of each tensor once, even if it was passed several times."""
    by_tensor: dict[int, list[Operand]] = defaultdict(list)
    for operand in operands:
        by_tensor[operand.given.tensor.id].append(operand)
    for same in by_tensor.values():
        first = same[0]
        roles = [operand.role for operand in same if operand.role not in ("", operand.name)]
        if len(same) > 1 and roles:
            yield f"{first.text} (as {', '.join(roles)})"
        else:
            yield first.text


def _of_view(facts: Facts) -> str:
    """Return what does not fit in a view: its elements in memory, or the number of its elements."""
    x = facts.operands[0]
    sizes = facts.sizes_of_view
    if not sizes or "stride" in facts.message:
        if x.given.value.is_contiguous():
            return f"{x.text}."
        return f"{x.text}, not contiguous in memory."
    elements = prod(x.shape)
    wanted = prod(size for size in sizes if size != -1)
    start = f"{x.text}, {elements} elements; {text.shape(sizes)}"
    if -1 not in sizes:
        if elements == wanted:
            return ""
        return f"{start} has {wanted}."
    if wanted != 0 and elements % wanted == 0:
        return ""
    return f"{start} needs a multiple of {wanted}."
