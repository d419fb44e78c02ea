"""Say how a mask of padding is laid over scores, whatever their axes."""

from __future__ import annotations

_PLACES = {
    "batch heads query key": "mask[:, None, None, :] for scores of batch heads query key",
    "batch query key": "mask[:, None, :] for scores of batch query key",
    "(batch heads) query key": "mask.repeat_interleave(heads, 0)[:, None, :] for scores of (batch heads) query key",
    "(heads batch) query key": "mask.repeat(heads, 1)[:, None, :] for scores of (heads batch) query key",
}
"""How a mask of `batch key` is laid over scores, by their axes."""
MASK_THE_KEYS = "Apply the mask to the keys"


def laid_over(sentence: str, layout: str) -> str:
    """Return how a mask of `batch key` is laid over scores of these axes; empty for other axes than the usual."""
    return f"{sentence}: {_PLACES[layout]}." if layout in _PLACES else ""
