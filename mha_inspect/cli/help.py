"""Help pages: the options in groups, commands before them, names never cut; bold on a terminal in colour."""

from __future__ import annotations

import sys
from typing import Any

from typer import style
from typer._click.exceptions import UsageError
from typer.core import TyperCommand, TyperGroup

from ..render.screen import in_color


class _Grouped:
    """What the help of a command and of the whole program have in common."""

    epilog: Any
    get_params: Any

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the command line; an error of it knows the command, which Typer's parser does not tell."""
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc]  # of the class beside this one
        except UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page; Typer takes the escapes out again where it thinks that there is no terminal."""
        ctx.color = in_color(sys.stdout)
        super().format_help(ctx, formatter)  # type: ignore[misc]  # of the class beside this one

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options under the panel that each belongs to, in the order in which the panels come."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                name, said = record
                said = said.replace("[default: (", "[default: ").replace(")]", "]")
                panels.setdefault(parameter.rich_help_panel or "Options", []).append((name, said))
        # What stands in no panel (--help) is the least of it: last.
        for panel in sorted(panels, key=lambda panel: panel == "Options"):
            write_list(ctx, formatter, panel, panels[panel])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples under the options, one a line, never wrapped: they are there to be copied."""
        heading, *lines = self.epilog.split("\n\n")
        formatter.write(f"\n{_bold(heading, ctx)}\n" + "".join(f"  {line}\n" for line in lines))


def examples(*lines: str) -> str:
    """Return what stands under the options: command lines without the name of the program."""
    return "\n\n".join(["Examples:", *(f"mha-inspect {line}" for line in lines)])


def write_list(ctx: Any, formatter: Any, title: str, rows: list[tuple[str, str]]) -> None:
    """Write names and what each is under a title."""
    with formatter.section(_bold(title, ctx)):
        formatter.write_dl([(_bold(name, ctx), said) for name, said in rows])


def _bold(text: str, ctx: Any) -> str:
    return style(text, bold=True) if ctx.color else text


class GroupedCommand(_Grouped, TyperCommand):
    """A command with its options in groups."""

    allow_extra_args = True  # said by the options, which know what people mean by a word more


class GroupedGroup(_Grouped, TyperGroup):
    """A group of commands, which stand before its options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the options."""
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)
