"""Help pages: panels of Rich on a terminal, the same groups as plain text in a pipe, where Rich is not imported."""

from __future__ import annotations

import sys
from typing import Any, Literal

from typer.core import TyperCommand, TyperGroup

from .screen import in_color, is_terminal


def write_groups(command: Any, ctx: Any, formatter: Any) -> None:
    """Write the options under the panel that each belongs to, in the order in which the panels come."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            panels.setdefault(parameter.rich_help_panel or "Options", []).append(record)
    # What stands in no panel (--help) is the least of it: last.
    for name in sorted(panels, key=lambda name: name == "Options"):
        with formatter.section(name):
            formatter.write_dl(panels[name])


def write_examples(epilog: str | None, formatter: Any) -> None:
    """Write the examples under the options, one a line, never wrapped: they are there to be copied."""
    if epilog:
        heading, *lines = epilog.split("\n\n")
        formatter.write(f"\n{heading}\n" + "".join(f"  {line}\n" for line in lines))


def markup_mode() -> Literal["rich"] | None:
    """Return `rich` where there is a terminal to show panels, and have them drawn in colours that can be read."""
    if not is_terminal(sys.stdout):
        return None
    from typer import rich_utils

    if not in_color(sys.stdout):
        rich_utils.COLOR_SYSTEM = None
    for name, style in vars(rich_utils).copy().items():
        if name.startswith("STYLE_") and "yellow" in str(style):  # pale on white
            setattr(rich_utils, name, style.replace("yellow", "default"))
    return "rich"


class GroupedCommand(TyperCommand):
    """A command whose help is grouped in a pipe as well."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page, with Rich where there is a terminal to show it."""
        self.rich_markup_mode = markup_mode()
        super().format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options by panel."""
        write_groups(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        write_examples(self.epilog, formatter)


class GroupedGroup(TyperGroup):
    """A group of commands with the same help pages."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page, with Rich where there is a terminal to show it."""
        self.rich_markup_mode = markup_mode()
        super().format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the options by panel."""
        self.format_commands(ctx, formatter)
        write_groups(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        write_examples(self.epilog, formatter)
