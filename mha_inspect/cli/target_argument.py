"""The argument that names a target: apart from what is done with one, since every help page shows it."""

# No `from __future__ import annotations` here: Typer reads these annotations at run time.

from typing import Annotated

import typer

FORMS = "package.module:Name, path/to/file.py:Name, hf:TYPE or hf:DIRECTORY"
HELP = f"A module of your own: {FORMS}. Importing it runs its code. Without one, a layer is built from the options."

TargetArgument = Annotated[
    str | None, typer.Argument(metavar="[TARGET]", help=HELP, show_default=False, rich_help_panel="Target")
]


def is_target(text: str) -> bool:
    """Whether a text has the form of a target, and not that of a layer's name."""
    return ":" in text or text.endswith(".py")
