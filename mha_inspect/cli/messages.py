"""What ended a command: said on stderr in a line or two (what was asked, the rule, a way out), and the exit code."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from typer._click.exceptions import BadOptionUsage, BadParameter, ClickException, NoSuchOption

from ..build.vocabulary import dashed, flag_of
from ..errors import DoesNotFitError, ExitCode, InputError, MhaInspectError, is_out_of_memory
from ..text import MESSAGE, byte_size, did_you_mean, listed, message_of, printable, printable_lines, shortened, shown

_LONGEST = 1500
_ELSEWHERE = {"output": "export", "out": "export", "save": "export", "gpu": "device", "cuda": "device"}
"""What other programs call an option."""


def explain(error: BaseException) -> ExitCode:
    """Say what went wrong, and give the exit code for it. Only a fault of ours shows a traceback."""
    if isinstance(error, typer.Exit):
        # Typer's own options (--show-completion) leave with 1 when they cannot; here 1 is an answer.
        return ExitCode.USAGE if error.exit_code else ExitCode.OK
    if isinstance(error, OSError):
        error = _of_file(error)
    if is_out_of_memory(error):
        error = does_not_fit(error)
    if isinstance(error, MhaInspectError):
        if error.exit_code is not ExitCode.CLOSED_PIPE:
            say(str(error))
        return error.exit_code
    if isinstance(error, ClickException):
        say(usage_message(error))
        return ExitCode.USAGE
    if isinstance(error, KeyboardInterrupt):
        say("interrupted.")
        return ExitCode.INTERRUPTED
    import traceback

    traceback.print_exception(type(error), error, error.__traceback__)
    say("this is a fault of mha-inspect. Please report it, with the command and the lines above.")
    return ExitCode.BUG


def _of_file(error: OSError) -> BaseException:
    """Return what an error of the system means: for stdout, to which Typer prints by itself, or for a user's file."""
    from .output import unwritable

    ours = Path(__file__).parents[1]
    if error.filename is None or ours in Path(os.fsdecode(error.filename)).parents:
        return unwritable(error) or error
    return InputError(f"{printable(error.filename, 200)} cannot be used: {error.strerror}. Name another one.")


def say(message: str) -> None:
    """Print a message on stderr, printable whatever it repeats; of one that nobody reads to the end, both ends."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"mha-inspect: {shortened(printable_lines(message), _LONGEST)}", file=sys.stderr)


def does_not_fit(error: BaseException, free: int | None = None) -> DoesNotFitError:
    """Return a failed allocation as the refusal that it is; `free` is how much memory there was."""
    text = _allocation(error)
    shapes = "" if text.startswith("Storage size") else ", or --device meta for shapes"
    there = "" if free is None else f", and {byte_size(free)} were free"
    return DoesNotFitError(f"out of memory: {text}{there}. Try a smaller --batch or --seq-len{shapes}.")


def _allocation(error: BaseException) -> str:
    """Return what was asked for, out of a message that begins with the line of C++ which asked."""
    text = message_of(error)
    start = max(text.find("you tried to allocate"), text.find("Tried to allocate"), text.find("Storage size"), 0)
    return (text[start:].strip() or "an allocation failed").splitlines()[0].split(". ")[0].rstrip(".")


def usage_message(error: ClickException) -> str:
    """Return the message for a command line that cannot be understood."""
    ctx: Any = getattr(error, "ctx", None)
    if isinstance(error, NoSuchOption) and ctx is not None:
        return _no_such_option(error, ctx, ctx.command_path.removeprefix("mha-inspect "))
    if isinstance(error, BadOptionUsage) and ctx is not None:
        name = shown(error.option_name)
        option = next((option for option in ctx.command.params if name in (*option.opts, *option.secondary_opts)), None)
        if option is not None and option.is_flag:
            others = option.opts if name in option.secondary_opts else option.secondary_opts
            return f"{name} takes no value: write {name} alone" + (f", or {others[0]}." if others else ".")
        value = "VALUE" if option is None else option.make_metavar(ctx)
        return f"{name} was given without a value: write {name} {value}. What it takes: {ctx.command_path} --help"
    if isinstance(error, BadParameter) and error.param is not None and ctx is not None:
        parameter, message = error.param, shown(" ".join(error.message.split()), MESSAGE)
        source = ctx.get_parameter_source(parameter.name)
        if source is not None and source.name == "ENVIRONMENT":
            if getattr(parameter, "is_flag", False):
                typed = shown(repr(os.environ.get(str(parameter.envvar))))
                message = f"{typed} is neither true nor false: write one of the two."
            return f"{parameter.envvar} {message}"
        return f"{next((name for name in parameter.opts if name.startswith('--')), parameter.opts[0])} {message}"
    return shown(" ".join(error.format_message().split()), MESSAGE)


def _no_such_option(error: NoSuchOption, ctx: Any, command: str) -> str:
    asked = error.option_name
    if len(asked) == 2:  # of -num-heads a letter is left
        asked = next((word for word in sys.argv if re.match(rf"-\w*{re.escape(asked[1])}", word) and word[2:]), asked)
    name = shown(asked)
    word = asked.strip("-").replace("-", "_")
    flag = _ELSEWHERE.get(word) or flag_of(word)
    options = _options(ctx.command)
    same = flag is not None and dashed(flag) in options
    near = f" Did you mean {dashed(flag)}?" if flag is not None and same else did_you_mean(asked, options)
    group = (ctx.parent or ctx).command
    others = group.list_commands(ctx)
    homes = [f"`mha-inspect {one}`" for one in others if asked in _options(group.get_command(ctx, one))]
    if ctx.parent is None:
        if homes:
            return f"{name} stands before the command: options come after it, as in {homes[0][1:-1]} {name}."
        return f"there is no option {name} before the command.{near} All of them: mha-inspect --help"
    if homes:
        return f"{command} has no option {name}: it belongs to {listed(homes)}.{near}"
    return f"{command} has no option {name}.{near} All of them: mha-inspect {command} --help"


def _options(command: Any) -> list[str]:
    return ["--help", *(name for one in command.params for name in (*one.opts, *one.secondary_opts))]
