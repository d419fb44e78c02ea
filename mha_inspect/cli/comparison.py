"""What the commands that compare have in common: their panel in the help, and the verdict that a script waits for."""

# No `from __future__ import annotations` here: Typer reads these annotations at run time.

from typing import Annotated

from ..errors import ExitCode
from .options import option

PANEL = "Comparison"

FailIf = Annotated[
    str | None,
    option(
        "--fail-if",
        PANEL,
        "Exit with code 1 when this is the verdict, for scripts.",
        known=("differs", "same"),
        show_default="never",
    ),
]


def exit_code(verdict: str, fail_if: str | None) -> ExitCode:
    """What a comparison with this verdict leaves with."""
    return ExitCode.CONDITION if verdict == fail_if else ExitCode.OK
