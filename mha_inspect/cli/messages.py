"""Errors on stderr, in a line or two (what was asked, the rule, a way out), and their exit codes."""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import typer
from typer._click.exceptions import BadOptionUsage, BadParameter, ClickException, NoSuchOption

from ..errors import DoesNotFitError, ExitCode, InputError, MhaInspectError, is_out_of_memory
from ..making.vocabulary import dashed, flag_of
from ..text import MESSAGE, did_you_mean, listed, message_of, printable, shown
from .help import SHORT
from .options import SET_BY_TEXT
from .output import say, stdout_failure

_ELSEWHERE = {
    "output": "export",
    "out": "export",
    "save": "export",
    "gpu": "device",
    "cuda": "device",
    "num_heads": "heads",
}
"""Names that other programs and commands have for an option."""


def explain(error: BaseException) -> ExitCode:
    """Print an error, and return its exit code. Only a bug of mha-inspect prints a traceback."""
    if isinstance(error, typer.Exit):
        # Typer's --show-completion exits with 1 on failure; here 1 is an answer.
        return ExitCode.USAGE if error.exit_code else ExitCode.OK
    if isinstance(error, OSError):  # from stdout, where Typer prints too, or from a user's file
        if error.filename is None or Path(__file__).parents[1] in Path(os.fsdecode(error.filename)).parents:
            error = stdout_failure(error) or error
        else:
            named = printable(error.filename, 200)
            error = InputError(f"{named} cannot be used: {error.strerror}. Give another file.")
    if is_out_of_memory(error):
        error = does_not_fit(error)
    if isinstance(error, MhaInspectError):
        if error.exit_code is not ExitCode.CLOSED_PIPE:
            say(str(error))
        return error.exit_code
    if isinstance(error, ClickException):
        say(_usage(error, getattr(error, "ctx", None)))
        return ExitCode.USAGE
    if isinstance(error, KeyboardInterrupt):
        say("interrupted.")
        return ExitCode.INTERRUPTED
    traceback.print_exception(type(error), error, error.__traceback__)
    say("this is a bug in mha-inspect. Please report it with the command and the lines above.")
    return ExitCode.BUG


def does_not_fit(error: BaseException) -> DoesNotFitError:
    """Return the refusal for a failed allocation."""
    # The message begins with the line of C++ that failed.
    asked = re.search(r"(?:(?:you )?[Tt]ried to allocate|Storage size).*?(?=\. |\.?$)", message_of(error), re.MULTILINE)
    text = asked[0] if asked else message_of(error).strip().partition("\n")[0] or "an allocation failed"
    shapes = "" if text.startswith("Storage size") else ", or --device meta for shapes"
    return DoesNotFitError(f"out of memory: {text}. Try a smaller --batch or --seq-len{shapes}.")


def _usage(error: ClickException, ctx: Any) -> str:
    """Return the message for an invalid command line."""
    if isinstance(error, NoSuchOption) and ctx is not None:
        return _no_such_option(error.option_name, ctx)
    if isinstance(error, BadOptionUsage) and ctx is not None:
        name = shown(error.option_name)
        for option in ctx.command.params:
            if name in (*option.opts, *option.secondary_opts):
                return _misused(option, name, ctx)
        return f"{name} needs a value: write {name} VALUE. For details: {ctx.command_path} --help"
    if isinstance(error, BadParameter) and error.param is not None and ctx is not None:
        message = " ".join(error.message.split())
        source = _source(error.param, ctx)
        return f"{source} {shown(message, MESSAGE)}"
    return shown(" ".join(error.format_message().split()), MESSAGE)


def _misused(option: Any, name: str, ctx: Any) -> str:
    """Return the message for an option without its value, or a switch with one."""
    if not option.is_flag:
        return f"{name} needs a value: write {name} {option.make_metavar(ctx)}. For details: {ctx.command_path} --help"
    opposite = option.opts if name in option.secondary_opts else option.secondary_opts
    if not opposite:
        return f"{name} takes no value: write {name} alone."
    return f"{name} takes no value: write {name} alone, or {opposite[0]}."


def _source(option: Any, ctx: Any) -> str:
    """Return where the value of an option comes from: `--seed`, or the variable `MHA_INSPECT_SEED`."""
    source = ctx.get_parameter_source(option.name)
    if source is not None and source.name == "ENVIRONMENT":
        return f"{ctx.auto_envvar_prefix}_{option.name}".upper()
    return str(option.opts[-1])


def _no_such_option(asked: str, ctx: Any) -> str:
    asked = _as_typed(asked)
    name = shown(asked)
    options = _options(ctx.command)
    setting = asked.strip("-").removeprefix("no-").replace("-", "_")
    if setting in SET_BY_TEXT and "--set" in options:
        return f"{ctx.info_name} has no option {name}: write --set {setting}=VALUE."
    near = _near_option(asked, options)
    group = ctx.find_root().command
    homes: list[str] = []
    for command in group.list_commands(ctx):
        if asked in _options(group.get_command(ctx, command)):
            homes.append(f"`mha-inspect {command}`")
    if ctx.parent is not None and homes:
        return f"{ctx.info_name} has no option {name}: it belongs to {listed(homes)}.{near}"
    if ctx.parent is not None:
        whole = "--help-all" if ctx.info_name in SHORT else "--help"
        return f"{ctx.info_name} has no option {name}.{near} All options: {ctx.command_path} {whole}"
    if homes:
        return f"{name} comes before the command. Put options after it, e.g. {homes[0][1:-1]} {name}."
    return f"there is no option {name} before the command.{near} All options: mha-inspect --help"


def _as_typed(asked: str) -> str:
    """Return an option as the user typed it: of `-num-heads` the parser keeps one letter."""
    if len(asked) != 2:
        return asked
    for word in sys.argv:
        if re.match(rf"-\w*{re.escape(asked[1])}", word) and word[2:]:
            return word
    return asked


def _near_option(asked: str, options: list[str]) -> str:
    """Return ` Did you mean X?` for the option of the same meaning, or else of a similar name; empty without one."""
    word = asked.strip("-").replace("-", "_")
    flag = dashed(_ELSEWHERE.get(word) or flag_of(word) or "")
    if flag in options:
        return f" Did you mean {flag}?"
    return did_you_mean(asked, options)


def _options(command: Any) -> list[str]:
    """Return every way to write an option of a command."""
    options = ["--help"]
    for option in command.params:
        options += [*option.opts, *option.secondary_opts]
    return options
