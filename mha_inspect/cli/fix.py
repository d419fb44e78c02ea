"""`mha-inspect fix`: print a patch of the user's file that was run, and write it with --write."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from ..checks.intent import Intent
from ..errors import ExitCode, InputError, SpecError
from ..making.importing import file_of
from ..text import shown
from . import subject
from .app import command
from .expected import declared_by
from .options import NUMBERS, TARGET, Options, option
from .output import checked_destination, print_and_export, say
from .patch import module_of, target_of
from .patch_file import require_writable, write_patched

if TYPE_CHECKING:
    from ..questions.fix import Fixed


@command(
    "fix model.py:Attention",
    "fix model.py:Attention --causal --write",
    without=(*NUMBERS, "train", "attn_mask"),
    targets=True,
    expects=True,
)
def fix(
    options: Options,
    target: str | None = TARGET,
    write: bool = option("Patch", "Write the patch to the file. The old file is kept as FILE.orig.", False, "--write"),
) -> ExitCode:
    """Print a patch of the target's file with which its problems no longer occur.

    Edits of the expressions that a finding of `check` or a failure names are run in memory, with the same weights and
    inputs. A patch is printed if the problem no longer occurs, no other one is new, and every other answer is as
    before. The exit code is 1 if a problem remains.
    """
    if target is None:
        raise SpecError("fix edits a file of your own: name a target in it, e.g. mha-inspect fix model.py:Attention.")
    if target.startswith("hf:"):
        raise InputError(f"{shown(target)} is built by transformers, an installed package: nothing is edited.")
    declared = declared_by(options)
    intent = Intent(**declared)
    subject.check(target, options, "fix")
    file = file_of(target)
    if write and file:
        require_writable(Path(file))
    export = checked_destination(options)
    with subject.running(options, f"fixing {target}"):
        result = _fixed(target, options, intent)
    print_and_export(result.report, options, export)
    if write and result.report.patch:
        kept = write_patched(Path(result.path), result.before, result.after)
        if not options.quiet:
            say(f"{shown(result.report.file)} is written; the old file is {shown(kept.name)}.")
    return ExitCode.OK if result.report.ok else ExitCode.CONDITION


def _fixed(target: str, options: Options, intent: Intent) -> Fixed:
    """Search a patch for the target's own file."""
    from ..questions.fix import fixed

    made = target_of(target, options, intent)
    made.make(0)  # imports the file
    # What the file prints is shown once, and not again for every edit.
    with redirect_stdout(StringIO()):
        return fixed(replace(made, module=module_of(target)))
