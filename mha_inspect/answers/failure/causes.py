"""The mistakes that people make in attention, each told by evidence and never by a name or a guess.

To add one, name it in `CAUSES`, and let the judge of the calls that it happens in return it: a `Cause` with what is
wrong, in the real numbers, and what to write instead. The judges are asked in order, and the first that answers is
believed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ...reports.failure import Cause
from .of_masks import masks_of_layers, masks_over_scores, sequences_of_layers
from .of_operands import devices, dtypes, mask_dtype, widths
from .of_products import einops_sizes, heads_not_transposed, keys_not_transposed, not_split, two_sizes, views
from .operand import ATTENTION, LAYERS
from .scene import VIEWS, Scene

CAUSES: dict[str, str] = {
    "mixed_devices": "tensors of several devices in one call",
    "mask_dtype": "a mask of integers",
    "mixed_dtypes": "tensors of several dtypes in one call",
    "heads_not_joined": "heads not put side by side behind the sequence",
    "weight_not_transposed": "a weight matrix that is the wrong way round",
    "features_not_last": "features in another dimension than the last",
    "wrong_width": "a width that the layer does not take",
    "batch_and_sequence_swapped": "sequence first where batch first is expected, or the other way round",
    "batch_differs": "queries and keys of different batch sizes",
    "lengths_differ": "as many values as keys are needed, and there are not",
    "mask_rank": "a mask that lacks a dimension",
    "heads_not_transposed": "divided into heads, and left behind the sequence",
    "mask_transposed": "a mask with queries and keys swapped",
    "mask_size": "a mask of other lengths",
    "heads_not_split": "one operand is divided into heads and the other is not",
    "key_not_transposed": "the keys' features and positions are not swapped for the product",
    "heads_not_repeated": "fewer key heads than query heads, not repeated",
    "head_dim_differs": "queries and keys with heads of different widths",
    "not_contiguous": "a view of what a transpose has left scattered in memory",
    "heads_do_not_divide": "a width that the heads do not divide",
    "wrong_head_dim": "heads times head_dim is not the width",
}
"""Name of each cause, and what it is in a phrase."""
_JUDGES: list[tuple[Callable[[Scene], Cause | None], Collection[str]]] = [
    (devices, ()),
    (mask_dtype, ()),
    (dtypes, ()),
    (widths, ()),
    (sequences_of_layers, LAYERS),
    (masks_of_layers, (ATTENTION,)),
    (masks_over_scores, ()),
    (not_split, ()),
    (keys_not_transposed, ()),
    (heads_not_transposed, ()),
    (two_sizes, ()),
    (views, VIEWS),
    (einops_sizes, ()),
]
"""What judges a scene, and the calls that it is asked about; all where there are none."""


def find_cause(scene: Scene) -> Cause | None:
    """Return the mistake that the evidence shows; None where it shows none."""
    found = (judge(scene) for judge, calls in _JUDGES if not calls or scene.base in calls)
    return next((cause for cause in found if cause is not None), None)
