"""All planted mistakes: what imports this has them in one list."""

from __future__ import annotations

from importlib import import_module

from .planted import CASES as CASES
from .planted import Case as Case

TOPICS = ("masks", "layers", "caches")

for topic in TOPICS:
    CASES.extend(import_module(f".wrong_{topic}", __package__).CASES)
