"""`mha-inspect check`: find mistakes in attention that runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..checks.intent import CHECKS, Intent, chosen_checks
from ..checks.pages import claim_of, page_of
from ..errors import ExitCode, SpecError
from ..layers.catalog import LAYERS
from ..render import screen
from ..text import quoted, shown
from . import subject
from .app import STARTED, command
from .expected import declared_by, loaded_for
from .help import PROGRAM
from .options import EXPECTED, NUMBERS, TARGET, Options, is_target, option
from .output import checked_destination, print_and_export, write
from .patch import patch_beside

if TYPE_CHECKING:
    from ..render.screen import Tick
    from ..reports.check import CheckReport

PANEL = "Check"


@command(
    "check model.py:Attention --causal",
    "check hf:gpt2 --causal --mask attention_mask=keep --padding-side left --cache past_key_values",
    without=(*NUMBERS, "train", "attn_mask"),
    targets=True,
    expects=True,
)
def check(
    options: Options,
    target: str | None = TARGET,
    reference: str | None = option(EXPECTED, "A trusted version of TARGET.", metavar="TARGET"),
    only: list[str] | None = option(PANEL, "Run only this check. Repeatable, as --skip.", metavar="NAME"),
    skip: list[str] | None = option(PANEL, "Skip this check; repeatable.", metavar="NAME"),
    strict: bool = option(PANEL, "Exit with code 1 also if something may be wrong.", False),
    explain: str | None = option(
        PANEL,
        "Explain a check, or list all. The page has an example that fails.",
        words=(*CHECKS, "all"),
        metavar="NAME|all",
    ),
) -> ExitCode:
    """Check an attention module for mistakes: change one thing at a time, run it again, and see which outputs change.

    --causal, --window, --mask, --cache, --scale and --reference say what behaviour to expect, and add checks. The exit
    code is 1 if a check fails, and with --strict also if something may be wrong.
    """
    if explain == "all":
        _write_list()
        return ExitCode.OK
    if explain is not None:
        write(screen.markdown(page_of(explain)))
        return ExitCode.OK
    wanted, unwanted = only or (), skip or ()
    chosen_checks(wanted, unwanted)
    declared = declared_by(options)
    declared["batch_axis"] = _batch_axis(target, options)
    Intent(**declared)
    subject.check(target, options, "check")
    if reference is not None:
        _check_reference(reference, target or options.layer, options)
    export = checked_destination(options)
    with subject.running(options, f"checking {target or options.layer}") as tick:
        if reference is not None:
            declared["reference"] = subject.load_target(reference, options).module
        report = _checked(target, options, declared, tick, only=wanted, skip=unwanted)
        if not report.ok and reference is None and not (wanted or unwanted):
            tick("a patch")
            report = replace(report, patch=patch_beside(target, options, Intent(**declared), STARTED))
    print_and_export(report, options, export)
    return _exit_code(report, strict=strict)


def _check_reference(reference: str, checked: str, options: Options) -> None:
    """Check a reference before it is imported. Raises `SpecError` for the name of a layer, or of no target."""
    if not is_target(reference):
        others = [name for name in (reference, "torch", "per-head") if name in LAYERS and name != checked]
        raise SpecError(
            f"--reference {shown(reference)} is no target: give a trusted version of {shown(checked)} with its "
            "arguments and parameters, e.g. --reference old_model.py:Attention. To compare with a layer: `mha-inspect "
            f"diff {quoted(checked)} {others[0]}`."
        )
    subject.check_target(reference, options, "check", beside_layer=True)


def _write_list() -> None:
    """Print the checks, with the claim that each of them checks."""
    width = max(map(len, CHECKS))
    for name in CHECKS:
        write(f"{name:{width}}  {claim_of(name)}\n")
    write(f"\n{PROGRAM} check --explain NAME explains a check with an example that fails.\n")


def _exit_code(report: CheckReport, *, strict: bool) -> ExitCode:
    """Return whether a check failed, or with --strict whether anything was found."""
    is_right = report.ok and not (strict and report.findings)
    return ExitCode.OK if is_right else ExitCode.CONDITION


def _checked(
    target: str | None, options: Options, declared: dict[str, Any], tick: Tick, **chosen: Sequence[str]
) -> CheckReport:
    """Check a target with a batch of two items, or of one if the forward raises: a cache may be of one item."""
    from ..call.call import TargetFailedError

    try:
        return _report(target, options, declared, tick, **chosen)
    except TargetFailedError as failed:
        if "batch" in options.given or options.batch == 1:
            raise
        options.batch = 1
        try:
            return _report(target, options, declared, tick, **chosen)
        except TargetFailedError:
            raise failed from None


def _report(
    target: str | None, options: Options, declared: dict[str, Any], tick: Tick, **chosen: Sequence[str]
) -> CheckReport:
    """Load a target and check it, with this batch."""
    from ..call.call import explaining
    from ..checks.check import check as report_of

    loaded = loaded_for(target, options, declared.get("padding"), declared.get("padding_true"))
    with explaining(loaded):
        return report_of(loaded, Intent(**declared), tick=tick, **chosen)


def _batch_axis(target: str | None, options: Options) -> int | None:
    """Return the batch axis that --seq-first or --batch-first declares, or that a layer has; None if neither does."""
    is_declared = "batch_first" in options.given if target is not None else not options.batch_first
    if not is_declared or options.unbatched:
        return None
    return 0 if options.batch_first else 1
