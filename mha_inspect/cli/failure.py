"""What ended a command: said on stderr in a line or two, and turned into an exit code."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import typer
from typer._click.exceptions import ClickException

from ..errors import ExitCode, InputError, MhaInspectError
from ..targets.memory import is_out_of_memory
from ..text import message_of, printable, shortened

_LONGEST = 1500


def explain(error: BaseException) -> ExitCode:
    """Say what went wrong, and give the exit code for it. Only a fault of ours shows a traceback."""
    if isinstance(error, typer.Exit):
        # Typer's own options (--show-completion) leave with 1 when they cannot; here 1 is an answer.
        return ExitCode.USAGE if error.exit_code else ExitCode.OK
    if isinstance(error, OSError):
        error = _of_file(error)
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
        said = _allocation(error)
        shapes = "" if said.startswith("Storage size") else ", or --device meta for shapes"
        say(f"out of memory: {said}. Try a smaller --batch or --seq-len{shapes}.")
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
    start = max(text.find("you tried to allocate"), text.find("Tried to allocate"), text.find("Storage size"), 0)
    return (text[start:].strip() or "an allocation failed").splitlines()[0].split(". ")[0].rstrip(".")


def _of_file(error: OSError) -> BaseException:
    """Return what an error of the system means: for stdout, to which Typer prints by itself, or for a user's file."""
    from .answer import unwritable

    ours = Path(__file__).parents[1]
    if error.filename is None or ours in Path(os.fsdecode(error.filename)).parents:
        return unwritable(error) or error
    return InputError(f"{printable(error.filename, 200)} cannot be used: {error.strerror}. Name another one.")


def _fault(error: BaseException) -> ExitCode:
    import traceback

    traceback.print_exception(type(error), error, error.__traceback__)
    say("this is a fault of mha-inspect. Please report it, with the command and the lines above.")
    return ExitCode.BUG
