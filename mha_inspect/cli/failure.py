"""What ended a command: said on stderr in a line or two, and turned into an exit code."""

from __future__ import annotations

import sys
from contextlib import suppress

import typer
from typer._click.exceptions import ClickException

from ..errors import ExitCode, MhaInspectError
from ..targets.memory import is_out_of_memory
from ..text import message_of, shortened

_LONGEST = 1500


def explain(error: BaseException) -> ExitCode:
    """Say what went wrong, and give the exit code for it. Only a fault of ours shows a traceback."""
    if isinstance(error, typer.Exit):
        # Typer's own options (--show-completion) leave with 1 when they cannot; here 1 is an answer.
        return ExitCode.USAGE if error.exit_code else ExitCode.OK
    if isinstance(error, OSError):
        error = _of_stdout(error)
    if isinstance(error, MhaInspectError):
        if error.exit_code is not ExitCode.CLOSED_PIPE:
            say(str(error))
        return error.exit_code
    if isinstance(error, ClickException):
        from .voice import usage_message

        say(usage_message(error))
        return ExitCode.USAGE
    if isinstance(error, KeyboardInterrupt):
        say("interrupted.")
        return ExitCode.INTERRUPTED
    if is_out_of_memory(error):
        say(f"out of memory: {_allocation(error)}. Try a smaller --batch or --seq-len, or --device meta for shapes.")
        return ExitCode.REFUSED
    return _fault(error)


def say(message: str) -> None:
    """Print a message on stderr, if there is one; of one that nobody reads to the end, both ends."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"mha-inspect: {shortened(message, _LONGEST)}", file=sys.stderr)


def _allocation(error: BaseException) -> str:
    """What was asked for, out of a message that begins with the line of C++ which asked."""
    text = message_of(error)
    start = max(text.find("you tried to allocate"), text.find("Tried to allocate"), 0)
    return (text[start:].strip() or "an allocation failed").splitlines()[0].split(". ")[0].rstrip(".")


def _of_stdout(error: OSError) -> BaseException:
    """The error that stands for a stdout that took no more, when it is one: Typer prints help pages by itself."""
    from .answer import unwritable

    return unwritable(error) or error


def _fault(error: BaseException) -> ExitCode:
    import traceback

    traceback.print_exception(type(error), error, error.__traceback__)
    say("this is a fault of mha-inspect. Please report it, with the command and the lines above.")
    return ExitCode.BUG
