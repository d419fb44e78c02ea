"""`mha-inspect` and `python -m mha_inspect`: run a command, and turn what happens into an exit code."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main() -> int:
    """Run the command line of this process; the exit code."""
    try:
        import gc

        from .cli.process import leave_on_interrupt

        gc.disable()
        with leave_on_interrupt():
            code = run()
        gc.freeze()  # all of it goes with the process
    except KeyboardInterrupt:  # before it is answered elsewhere, or after
        code = 130
    return code


def run(args: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code. Whatever goes wrong is said on stderr."""
    try:
        from .cli.app import main_command

        return int(main_command().run(args) or 0)
    except (Exception, KeyboardInterrupt) as error:
        from .cli.messages import explain

        return explain(error)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        # `python -m` puts the current folder first: what lies there is not run in the place of what is installed.
        sys.path.append(sys.path.pop(0))
    sys.exit(main())
