"""`mha-inspect fix`: print a patch of the user's file that was run, and write it with --write."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks.intent import Intent
from ..errors import ExitCode, InputError, SpecError
from ..text import shown
from . import subject
from .app import command
from .expected import INTENT, meaning_of
from .options import NUMBERS, TARGET, Options, option, size
from .output import checked_destination, print_and_export, say
from .patch import module_of, target_of
from .patch_file import require_writable, write_patched

if TYPE_CHECKING:
    from ..questions.fix import Fixed


@command(
    "fix model.py:Attention",
    "fix model.py:Attention --causal --write",
    without=(*NUMBERS, "train"),
    targets=True,
)
def fix(
    options: Options,
    target: str | None = TARGET,
    write: bool = option("Patch", "Write the patch to the file; the old file is kept as FILE.orig.", False, "--write"),
    window: int | None = size(INTENT, "Sliding window: each position attends to N positions, its own included."),
    mask: str | None = option(
        INTENT, "The argument of the padding mask, and the meaning of 1 or True in it.", metavar="NAME=keep|ignore"
    ),
    padding_side: str | None = option(INTENT, "Side of the padding.", words=("left", "right"), show_default="right"),
    cache: str | None = option(
        INTENT, "The argument that takes the cache (the forward's second output), or positions.", metavar="NAME"
    ),
    scale: str | None = option(INTENT, "The expected scale of the scores.", words=("sqrt_head_dim",)),
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
    declared: dict[str, Any] = {
        "causal": True if options.causal else None,
        "window": window,
        "padding_side": padding_side,
        "cache": cache,
        "scale": scale,
        **meaning_of(mask),
    }
    intent = Intent(**declared)
    if padding_side is not None and mask is None:
        raise SpecError(f"--padding-side {padding_side} needs a padding mask. Add --mask NAME=keep.")
    if "batch" not in options.given and not options.unbatched:
        options.batch = 2  # one item may affect the other
    subject.check(target, options, "fix")
    file = target.partition(".py")[0] + ".py" if ".py" in target else ""
    if write and file and os.path.exists(file):
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
    return fixed(replace(made, module=module_of(target)))
