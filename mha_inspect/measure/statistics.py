"""What a tensor holds: its statistics, and its elements as text."""

from __future__ import annotations

import math

from torch import Tensor
from torch._tensor_str import printoptions

from ..layers.spec import Show
from ..reports.common import Stats, Values

_CHUNK = 1 << 17
"""Elements that are turned to float64 at a time."""


def stats_of(tensor: Tensor, masked: Tensor | None = None) -> Stats | None:
    """Statistics over the finite elements, computed in float64; NaN where there is none. None on meta.

    Args:
        tensor: of any shape and dtype but complex.
        masked: boolean, broadcastable to the tensor: True where a mask has put its -inf, which is then no alarm.

    The deviation is torch's (divided by n - 1), and 0 for a single element.
    """
    if tensor.is_meta:
        return None
    flat = tensor.detach().reshape(-1)
    barred = 0
    if masked is not None:
        barred = int((masked.expand(tensor.shape).reshape(-1) & (flat == -math.inf)).sum())
    count, total, smallest, largest, nan, inf = 0, 0.0, math.nan, math.nan, 0, 0
    chunks = [flat[start : start + _CHUNK] for start in range(0, flat.numel(), _CHUNK)]
    for chunk in chunks:
        finite = chunk[chunk.isfinite()]
        nan += int(chunk.isnan().sum())
        inf += int(chunk.isinf().sum())
        if finite.numel():
            numbers = _float64(finite)
            count += numbers.numel()
            total += float(numbers.sum())
            # min and max keep their first argument beside a NaN, so the NaN that they start from goes second.
            smallest = min(float(numbers.min()), smallest)
            largest = max(float(numbers.max()), largest)
    mean = total / count if count else math.nan
    # Twice over the elements: squares of elements that share a large mean would cancel.
    squares = (
        sum(float((_float64(chunk[chunk.isfinite()]) - mean).square().sum()) for chunk in chunks) if count else 0.0
    )
    std = math.sqrt(squares / (count - 1)) if count > 1 else (0.0 if count else math.nan)
    return Stats(mean=mean, std=std, min=smallest, max=largest, nan=nan, inf=inf - barred, masked=barred)


def _float64(numbers: Tensor) -> Tensor:
    """In float64, on the CPU where the device has none."""
    return (numbers.cpu() if numbers.device.type == "mps" else numbers).double()


def values_of(tensor: Tensor, show: Show) -> Values | None:
    """The elements as torch prints them, and as nested lists when show.full_values asks for them. None on meta.

    torch's print options are set for this text only, all of them: the same tensor gives the same text in every session.
    """
    if tensor.is_meta:
        return None
    plain = tensor.detach().cpu()
    with printoptions(precision=show.precision, edgeitems=show.edge_items, threshold=1000, linewidth=80, sci_mode=None):
        text = repr(plain)
    data = (plain if plain.dim() else plain.reshape(1)).tolist() if show.full_values else None
    return Values(text=text, data=data)
