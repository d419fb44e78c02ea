"""The output of the attention differs, although nothing before it does."""

from __future__ import annotations

from ..pair import Why
from .pair import CallPair


def output(pair: CallPair) -> Why | None:
    """Return whether the output of the call's tokens differs."""
    both = pair.queries("output", 1) or pair.queries("context", 2)
    if both is None or both.is_none:
        return None
    return Why("call", "The output of the attention differs, although its scores and values are equal.")
