"""How the two sides of a comparison are called in its sentences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Where:
    """How the two sides are called in a sentence."""

    left: str = "on the left"
    right: str = "on the right"
    subject: str = "the right"
    """The right side as the subject of a sentence."""
