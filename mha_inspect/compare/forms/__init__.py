"""What a difference of numbers can be made of: one form a file, asked in a fixed order.

    q_heads on the left = 0.5 · q_heads on the right        a scale of 0.5

A form is named only if it is all of the difference, within the measured rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..pair import Difference, Why
from .dtype import rounded
from .factor import factor, factors
from .order import exchanged, order
from .positions import shifted
from .region import zeros
from .term import term

Form = Callable[[Difference], Why | None]

FOR_ALL: tuple[Form, ...] = (factor, order, exchanged, shifted, term, zeros, rounded)
"""Forms that are the same for all of a stage, from the strongest to the weakest."""
FORMS: tuple[Form, ...] = (*FOR_ALL, factors)
"""These, and at last a number for each head, query or key."""


def form_of(difference: Difference, forms: Sequence[Form] = FORMS) -> Why | None:
    """Return the first form that is all of a difference; None if none is."""
    if not difference.left.numel() or difference.left.is_complex() or difference.right.is_complex():
        return None
    if not difference.is_clear:
        return None
    for form in forms:
        why = form(difference)
        if why is not None:
            return why
    return None
