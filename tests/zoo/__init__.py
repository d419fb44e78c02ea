"""Libraries that others wrote, tried by numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from .oracle import Configuration

TABLES = sorted(
    file.stem
    for file in Path(__file__).parent.glob("*.py")
    if file.stem not in ("oracle", "table", "test_zoo") and not file.stem.startswith("_") and file.stem != "configurations"
)


def configurations(words: Sequence[str] = ()) -> Iterator[Configuration]:
    """Every configuration, or those with one of these words in their name."""
    for name in TABLES:
        for own in import_module(f".{name}", __package__).CONFIGURATIONS:
            if not words or any(word in own.name for word in words):
                yield own
