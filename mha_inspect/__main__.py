"""Run `mha-inspect` or `python -m mha_inspect`, and return an exit code for every outcome."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing it from typing would slow the start
if TYPE_CHECKING:
    from collections.abc import Sequence


def main() -> int:
    """Run the command line of this process, and return the exit code."""
    try:
        import gc

        gc.disable()  # a command is short: collections would only take time
        code = run()
        gc.freeze()  # the process ends: skip the last collection
    except KeyboardInterrupt:  # before or after `run` handles it
        code = 130
    return code


def run(args: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit code; print any error on stderr."""
    try:
        from .cli.app import main_command

        return int(main_command().run(args) or 0)
    except (Exception, KeyboardInterrupt) as error:
        from .cli.messages import explain

        return explain(error)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        # `python -m` puts the current folder first; move it last, so that its files do not replace installed packages.
        sys.path.append(sys.path.pop(0))
    sys.exit(main())
