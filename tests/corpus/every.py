"""All entries: what imports this has them registered."""

from __future__ import annotations

from importlib import import_module

from .entry import ENTRIES as ENTRIES
from .entry import entries as entries

KINDS = """base separate packed grouped loops windows positions weighing
    variants inside claims published owned idioms near""".split()  # noqa: SIM905

for kind in KINDS:
    import_module(f".{kind}", __package__)
