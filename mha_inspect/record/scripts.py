"""Tell the calls of a compiled script apart: in TorchScript Python stands still, and every operation has one place."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .ops import Op

_COUNTED = r"(?:clone )?(?:view|_unsafe_view) "
_COMPOSITES = re.compile(
    "|".join(
        (
            rf"(?:expand {_COUNTED}){{2}}bmm {_COUNTED}",  # a matrix product
            rf"(?P<rows>(?:{_COUNTED})?(?:t )?(?:addmm|mm) (?:view |_unsafe_view )?)",  # a linear layer
            rf"(?:(?:unsqueeze )*permute ){{2}}(?:permute {_COUNTED}){{2}}bmm {_COUNTED}permute {_COUNTED}",  # einsum
        )
    )
)
"""What one call to torch dispatches where it multiplies matrices, by the names of the operations."""


def is_script(ops: Sequence[Op]) -> bool:
    """Return whether what Python called once are several calls: none of torch takes a product and a softmax."""
    return any(op.does("softmax") for op in ops) and any(op.does("product") for op in ops)


def calls_in_script(ops: Sequence[Op], first: int) -> list[int]:
    """Return the number of the call of each operation, from `first` on: one each, but for what a product consists of.

    A linear layer counts its rows as one dimension, and back. A view that leaves no row whole is no part of it.
    """
    told = [first + place for place in range(len(ops))]
    names = "".join(f"{op.base_name} " for op in ops)
    for found in _COMPOSITES.finditer(names):
        start, stop = (names.count(" ", 0, end) for end in found.span())
        if found["rows"]:
            start += not _keeps_rows(ops[start])
            stop -= not _keeps_rows(ops[stop - 1])
        told[start:stop] = [told[start]] * (stop - start)
    return told


def _keeps_rows(op: Op) -> bool:
    """Return whether this is no view that cuts rows up."""
    return op.kind == "compute" or op.base_name == "t" or op.inputs[0].shape[-1:] == op.output.shape[-1:]
