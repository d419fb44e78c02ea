"""The Typer app `mha-inspect COMMAND`: commands made from functions, and the pages of --help."""

from __future__ import annotations

import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command
from typer.models import OptionInfo

from .. import __version__
from ..errors import ExitCode, SpecError
from ..layers.catalog import LAYERS, LETTERS, find_layer
from ..making.vocabulary import dashed
from ..render import screen
from ..text import did_you_mean, shown
from .help import COMMANDS, PROGRAM, SHORT, TOPICS, first_page, manual
from .options import EXPECTATIONS, OUTPUTS, SHARED, Options, arguments_of
from .output import checked_destination, print_and_export, say, write
from .ranks import require_one_process
from .target_text import command_for, completed, namesake

STARTED = time.perf_counter()
"""The moment at which this program was imported."""
_ALL = "mha_inspect.all"
"""The key of a context in which every option is listed."""
COMPLETE = "_MHA_INSPECT_COMPLETE"
"""The environment variable with which a shell requests completions."""
_NAMES_OF_TARGETS = ("target", "left", "right", "reference", "like")
"""Parameters of commands that name a target."""
TARGETS = (
    "TARGET is a class, a function that returns a module, or a module. Its arguments come from --set and from options "
    "of a matching name, e.g. --embed-dim sets d_model. Its inputs follow the signature of its forward. A function may "
    "also return the inputs: (module, args) or (module, args, kwargs). Importing TARGET runs its code."
)


class _Grouped:
    """The help of a command: options in groups, names never cut, examples at the end; bold on a terminal in colour."""

    epilog: Any
    get_params: Any

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the command line. Add the command to errors that Typer's parser raises without it."""
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc]  # a method of the other base class
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                vars(error)["ctx"] = ctx
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page, short unless all was asked for. Typer removes the escapes again if it finds no terminal."""
        ctx.color = screen.in_color(sys.stdout)
        short = SHORT.get(ctx.info_name)
        if short is not None and not ctx.meta.get(_ALL):
            formatter.write(short.text(_described(ctx, self.get_params(ctx)), lambda text: _bold(text, ctx)))
            return
        super().format_help(ctx, formatter)  # type: ignore[misc]  # a method of the other base class

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options by panel, in the order of the panels."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, help = record
            said = help.replace("[default: (", "[default: ").replace(")]", "]")
            panel = parameter.rich_help_panel or "Options"
            panels.setdefault(panel, []).append((name, said))
        # Options without a panel (--help) come last.
        for panel in sorted(panels, key="Options".__eq__):
            _write_list(ctx, formatter, panel, panels[panel])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, one per line and never wrapped, so that they can be copied."""
        lines = "".join(f"  {PROGRAM} {line}\n" for line in self.epilog.split("\n"))
        formatter.write(f"\n{_bold('Examples:', ctx)}\n{lines}")


def _described(ctx: Any, parameters: Sequence[Any]) -> dict[str, tuple[str, str]]:
    """Return the name of each parameter and the first sentence of its help, with its default if that is a number."""
    described: dict[str, tuple[str, str]] = {}
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        name, help = record
        said, _, default = help.partition("  [")
        first, *_ = re.split(r"(?<=\w)\. ", said)
        first = first.rstrip(".")
        number = re.match(r"default: \(?(\d+)", default)
        if number is not None:
            first += f" [{number[1]}]"
        described[parameter.name] = name, first
    return described


def _write_list(ctx: Any, formatter: Any, title: str, rows: list[tuple[str, str]]) -> None:
    bold = [(_bold(name, ctx), said) for name, said in rows]
    with formatter.section(_bold(title, ctx)):
        formatter.write_dl(bold)


def _bold(text: str, ctx: Any) -> str:
    return typer.style(text, bold=True) if ctx.color else text


class Command(_Grouped, TyperCommand):
    """A command with its options in groups, and --help-all, which lists them."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options, with --help-all as the last."""
        return [*super().get_params(ctx), _help_all()]


def _help_all() -> TyperOption:
    return TyperOption(
        param_decls=["--help-all"],
        is_flag=True,
        default=False,
        is_eager=True,
        expose_value=False,
        callback=_print_all,
        help="Show all options, in groups.",
    )


def _print_all(ctx: Any, _: Any, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        write(ctx.get_help() + "\n")
        raise typer.Exit


class Commands(_Grouped, TyperGroup):
    """The commands, each imported on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command's file. None for an unknown command."""
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        home = __name__ if name in ("layers", "help") else f"{__package__}.{name}"
        return get_command(getattr(import_module(home), name))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command by its name. Raises `SpecError` with the nearest name for an unknown one."""
        asked = args[0]
        if asked.endswith(".ipynb") and not ctx.resilient_parsing:
            raise SpecError(
                f"{shown(asked)} is a notebook. In a cell of it: import mha_inspect; mha_inspect.trace(module, x). "
                f"The page: {PROGRAM} help library."
            )
        meant = None if asked in COMMANDS or asked.startswith("-") else command_for(completed(asked))
        if meant is not None and not ctx.resilient_parsing:
            return super().resolve_command(ctx, [meant, *args])
        if asked not in COMMANDS and not asked.startswith("-") and not ctx.resilient_parsing:
            raise SpecError(
                f"{shown(asked)} was not found: there is no such command, file, layer, or class in a file here."
                f"{did_you_mean(asked, [*COMMANDS, *LAYERS])} Commands: {', '.join(COMMANDS)}. See `{PROGRAM} --help`."
            )
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the first page, without loading the commands."""
        formatter.write(first_page())

    def run(self, args: Sequence[str] | None = None) -> Any:
        """Run the command and return its result. Errors go to the caller, who maps them to exit codes."""
        if COMPLETE in os.environ:
            self._main_shell_completion({}, PROGRAM, COMPLETE)
        with self.make_context(PROGRAM, _with_command(sys.argv[1:] if args is None else args)) as ctx:
            return self.invoke(ctx)


_OF_PROGRAM = ("-h", "--help", "-V", "--version", "--install-completion", "--show-completion", "--")


def _with_command(args: Sequence[str]) -> list[str]:
    """Return the words of a command line, with `trace` in front where they begin with an option of a command."""
    begins_with_option = bool(args) and args[0].startswith("-") and args[0] not in _OF_PROGRAM
    if begins_with_option and not any(word in COMMANDS for word in args):
        return ["trace", *args]
    return list(args)


def _with_dashes(name: str) -> str:
    """Return the name of an option or a command with dashes, as it is declared: `num_heads` is `num-heads`."""
    return name.replace("_", "-")


app = typer.Typer(
    cls=Commands,
    epilog="trace --embed-dim 512 --num-heads 2 --seq-len 12\ncompare-heads --embed-dim 512 --heads 1,2,4,8,16",
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _with_dashes},
)


def main_command() -> Commands:
    """Return the app as a command that can be run."""
    group = get_command(app)
    assert isinstance(group, Commands)
    return group


def _print_version(asked: bool) -> None:
    if asked:
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
    """See inside attention layers: every shape, every parameter, and the effect of the number of heads.

    `mha-inspect COMMAND --help` lists the options. Each has a default, and reads MHA_INSPECT_<NAME>.
    """
    if ctx.invoked_subcommand is None:
        write(ctx.get_help() + "\n")
    return ExitCode.OK


def command(
    *examples: str,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    targets: bool = False,
    expects: bool = False,
) -> Callable[[Callable[..., ExitCode]], typer.Typer]:
    """Make a command of a function whose first parameter is an `Options`, with a parameter for every shared option.

    The function's other options come first in `--help`. `only` names the shared options to take, `without` those to
    drop, which stay at their defaults. With `targets` the help explains TARGET. A command that `expects` a behaviour
    takes the options that declare it.
    """
    dropped = {*without} if expects else {*without, *EXPECTATIONS}

    def decorate(function: Callable[..., ExitCode]) -> typer.Typer:
        name = function.__name__.replace("_", "-")
        _, *parameters = inspect.signature(function, eval_str=True).parameters.values()
        shared = [parameter for parameter in SHARED if parameter.name not in dropped]
        if only:
            shared = [parameter for parameter in SHARED if parameter.name in only]
        for parameter in (*parameters, *shared):
            if isinstance(parameter.default, OptionInfo) and not parameter.default.param_decls:
                parameter.default.param_decls = (dashed(parameter.name),)

        def flat(ctx: typer.Context, **given: Any) -> ExitCode:
            if name != "trace":
                require_one_process(name)
            values = {option.name: given.pop(option.name) for option in shared}
            for parameter in _NAMES_OF_TARGETS:
                if given.get(parameter) is not None:
                    given[parameter] = completed(given[parameter])
            options = Options.parsed(ctx, values)
            for parameter in _NAMES_OF_TARGETS:
                other = namesake(given.get(parameter) or "")
                if other and not options.quiet:
                    say(f"{given[parameter]} is the built-in layer. For the path of this name, type {other}.")
            if given.get("target") in LAYERS:
                options.take_layer(given["target"])
                given["target"] = None
            return function(options, **given)

        context, _ = inspect.signature(flat, eval_str=True).parameters.values()
        signature = inspect.Signature([context, *parameters, *shared])
        flat.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect, and so by Typer
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        paragraphs += [TARGETS] if targets else []
        flat.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        typed = typer.Typer(add_completion=False, rich_markup_mode=None)
        settings = {"auto_envvar_prefix": "MHA_INSPECT", "allow_extra_args": True}
        typed.command(name, cls=Command, epilog="\n".join(examples), context_settings=settings)(flat)
        return typed

    return decorate


help = typer.Typer(add_completion=False, rich_markup_mode=None)


@help.command("help", context_settings={"help_option_names": ["-h", "--help"]})
def _help(
    ctx: typer.Context,
    topic: Annotated[str | None, typer.Argument(help="A command, or a page: " + ", ".join(TOPICS) + ".")] = None,
) -> ExitCode:
    """Show a page of the manual, or the help of a command."""
    if topic is None:
        write(ctx.find_root().get_help() + "\n")
    elif topic in SHORT:
        group = ctx.find_root()
        of_topic = main_command().get_command(group, topic)
        write(typer.Context(of_topic, info_name=topic, parent=group).get_help() + "\n")
    elif topic in TOPICS:
        write(screen.markdown(manual(topic)))
    else:
        near = did_you_mean(topic, [*SHORT, *TOPICS])
        raise SpecError(
            f"there is no page {shown(topic)}. Pages: {', '.join(TOPICS)}; commands: {', '.join(SHORT)}.{near}"
        )
    return ExitCode.OK


@command("layers", "layers torch", only=OUTPUTS)
def layers(
    options: Options,
    name: str | None = typer.Argument(None, metavar="[NAME]", help="A layer, to list its arguments for --set."),
) -> ExitCode:
    """List the built-in attention layers: name, parameters, how heads are split, and where the style comes from.

    With NAME, also list the arguments of this layer that --set gives, with their types and defaults.
    """
    from ..reports.common import LayersReport, ListedLayer

    listed = [
        ListedLayer(
            name=kind.name,
            summary=kind.summary,
            formula=kind.parameter_formula,
            split=kind.split,
            source=kind.origin,
            arguments=arguments_of(kind.takes),
        )
        for kind in (LAYERS.values() if name is None else [find_layer(name)])
    ]
    formulas = "".join(layer.formula for layer in listed)
    letters = {letter: name for letter, name in LETTERS.items() if letter in formulas}
    print_and_export(LayersReport(tuple(listed), letters), options, checked_destination(options, computes=False))
    return ExitCode.OK
