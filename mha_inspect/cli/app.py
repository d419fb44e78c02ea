"""The Typer app: `mha-inspect COMMAND`. A command's own file is imported when it is the one that was asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_command

from ..errors import ExitCode, SpecError
from ..render import screen
from ..text import did_you_mean, shown
from .help import GroupedGroup, examples, write_list

PROGRAM = "mha-inspect"

COMPLETE = "_MHA_INSPECT_COMPLETE"
"""The variable by which a shell asks for completions."""

COMMANDS = {
    "trace": "Show every stage of one forward pass: its shape, its axes, what is computed.",
    "params": "Show every parameter, what it is for, and which part belongs to which head.",
    "compare-heads": "Show what the number of heads changes in the output, with the same weights.",
    "diff": "Show where two layers, or modules of your own, part ways with the same weights.",
    "check": "Check whether attention that runs is right: heads, masks, caches, batches.",
    "layers": "List the ways to write attention that --layer and diff take.",
}
"""Each command with its line in the help; its file in this folder bears its name."""


class Commands(GroupedGroup):
    """The commands, each loaded when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command's file; None where there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        return get_command(getattr(import_module(f"{__package__}.{name}"), name))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that was asked for. Raises `SpecError` with the nearest one where there is none."""
        asked = args[0]
        if asked not in COMMANDS and not asked.startswith("-") and not ctx.resilient_parsing:
            from .options import is_target

            near = did_you_mean(asked, COMMANDS)
            if not near and is_target(asked):
                near = f" Did you mean {PROGRAM} trace {shown(asked)}?"
            raise SpecError(
                f"{shown(asked)} is not a command: {', '.join(COMMANDS)}.{near} `{PROGRAM} --help` says what each does."
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands without loading them."""
        write_list(ctx, formatter, "Commands", list(COMMANDS.items()))

    def run(self, args: Sequence[str] | None = None) -> Any:
        """Run the command and return what it returns; every error goes to the caller, who knows the exit codes."""
        if COMPLETE in os.environ:
            self._main_shell_completion({}, PROGRAM, COMPLETE)
        try:
            with self.make_context(PROGRAM, list(sys.argv[1:] if args is None else args)) as ctx:
                return self.invoke(ctx)
        finally:
            screen.asked_color = "auto"


app = typer.Typer(
    cls=Commands,
    epilog=examples(
        "trace --embed-dim 512 --num-heads 2 --seq-len 12", "compare-heads --embed-dim 512 --heads 1,2,4,8,16"
    ),
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command() -> Commands:
    """Return the app as the command that can be run."""
    group = get_command(app)
    assert isinstance(group, Commands)
    return group


def _print_version(asked: bool) -> None:
    if asked:
        from .. import __version__
        from .output import write

        write(f"{PROGRAM} {__version__}\n")
        raise typer.Exit


@app.callback()
def mha_inspect(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("-V", "--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> ExitCode:
    """See inside attention layers: every shape, every parameter, and what the number of heads changes.

    `mha-inspect COMMAND --help` has the options of each. All have defaults, and read MHA_INSPECT_<NAME> as well.
    """
    if ctx.invoked_subcommand is None:
        from .output import write

        write(ctx.get_help() + "\n")
    return ExitCode.OK
