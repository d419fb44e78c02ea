"""`mha-inspect` and `python -m mha_inspect`: run a command, and turn what happens into an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress


def main() -> int:
    """Run the command line of this process; the exit code."""
    from .cli.collection import hold
    from .cli.interrupt import leave_on_interrupt

    hold()
    with leave_on_interrupt():
        return run()


def run(args: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code. Whatever goes wrong is said on stderr."""
    import typer
    from typer._click.exceptions import ClickException

    from .cli.app import command
    from .errors import ExitCode, MhaInspectError

    try:
        return int(command().run(args) or ExitCode.OK)
    except typer.Exit as leaving:
        # Typer's own commands (--show-completion) leave with 1 when they cannot; 1 is an answer here.
        return ExitCode.OK if leaving.exit_code == 0 else ExitCode.USAGE
    except MhaInspectError as error:
        if error.exit_code != ExitCode.CLOSED_PIPE:
            _say(str(error))
        return error.exit_code
    except BrokenPipeError:
        from .cli.answer import forget_stdout

        forget_stdout()
        return ExitCode.CLOSED_PIPE
    except ClickException as error:
        from .cli.voice import usage_message

        _say(usage_message(error))
        return ExitCode.USAGE
    except KeyboardInterrupt:
        _say("interrupted.")
        return ExitCode.INTERRUPTED
    except Exception as error:
        if is_out_of_memory(error):
            _say(
                f"out of memory: {_allocation(error)}. Try a smaller --batch or --seq-len, or --device meta for shapes."
            )
            return ExitCode.REFUSED
        import traceback

        traceback.print_exc()
        _say("this is a fault of mha-inspect. Please report it, with the command and the lines above.")
        return ExitCode.BUG


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in Python or in torch, on the CPU or on a device."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("not enough memory" in text or "can't allocate memory" in text)


def _allocation(error: BaseException) -> str:
    """What was asked for, out of a message that begins with the line of C++ which asked."""
    text = str(error)
    start = max(text.find("you tried to allocate"), text.find("Tried to allocate"), 0)
    return (text[start:].strip() or "an allocation failed").splitlines()[0].split(". ")[0].rstrip(".")


def _say(message: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"mha-inspect: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
