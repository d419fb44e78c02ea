"""All entries: what imports this has them registered."""

from . import base, claims, grouped, idioms, loops, near, packed, positions, separate, variants, weighing, windows  # noqa: F401
from .entry import ENTRIES as ENTRIES
from .entry import entries as entries
