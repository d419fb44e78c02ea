"""`mha-inspect check`: find mistakes in attention that runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..answers.check.intent import CHECKS, Intent, chosen_checks
from ..errors import ExitCode, MhaInspectError, SpecError
from ..render import screen
from ..text import shown
from . import subject
from .app import command
from .help import PROGRAM, page_of_check
from .options import NUMBERS, RETURNED_WEIGHTS, TARGET, Options, option, size
from .output import give, prepare, write

if TYPE_CHECKING:
    from ..reports.check import CheckReport
    from ..running.subject import Subject

PANEL = "Check"
INTENT = "Expected behaviour"


@command(
    "check model.py:Attention --causal",
    "check hf:gpt2 --causal --mask attention_mask=keep --padding-side left --cache past_key_values",
    without=(*NUMBERS, *RETURNED_WEIGHTS, "grad", "train"),
    targets=True,
)
def check(
    options: Options,
    target: str | None = TARGET,
    window: int | None = size(INTENT, "Sliding window: each position attends to N positions, its own included."),
    mask: str | None = option(
        INTENT, "The argument of the padding mask, and the meaning of 1 or True in it.", metavar="NAME=keep|ignore"
    ),
    padding_side: str | None = option(INTENT, "Side of the padding.", known=("left", "right"), show_default="right"),
    cache: str | None = option(
        INTENT, "The argument of the cache, which forward returns second; or of positions.", metavar="NAME"
    ),
    batch_axis: int | None = size(INTENT, "Batch dimension of the inputs: 0 or 1.", unset="as the code says, or 0"),
    scale: str | None = option(INTENT, "The expected scale of the scores.", known=("sqrt_head_dim",)),
    reference: str | None = option(INTENT, "A trusted TARGET to compare with; same arguments.", metavar="TARGET"),
    only: list[str] | None = option(PANEL, "Run only this check; repeatable.", metavar="NAME"),
    skip: list[str] | None = option(PANEL, "Skip this check; repeatable.", metavar="NAME"),
    strict: bool = option(PANEL, "Exit with code 1 also if something may be wrong.", False),
    list_checks: bool = option(PANEL, "List the checks and exit.", False, "--list"),
    explain: str | None = option(
        PANEL, "Explain a check with an example that fails, and exit.", known=tuple(CHECKS), metavar="NAME"
    ),
) -> ExitCode:
    """Check an attention module for mistakes: change one thing at a time, run it again, and see which outputs change.

    --causal, --window, --mask, --cache, --scale and --reference say what behaviour to expect, and add checks. The exit
    code is 1 if a check fails, and with --strict also if something may be wrong.
    """
    if list_checks:
        width = max(map(len, CHECKS))
        write("".join(f"{name:{width}}  {claim}\n" for name, claim in CHECKS.items()))
        write(f"\n{PROGRAM} check --explain NAME explains a check with an example that fails.\n")
        return ExitCode.OK
    if explain is not None:
        write(screen.markdown(page_of_check(explain)))
        return ExitCode.OK
    chosen_checks(only or (), skip or ())
    declared: dict[str, Any] = {
        "causal": True if options.causal else None,
        "window": window,
        "padding_side": padding_side,
        "cache": cache,
        "batch_axis": _batch_axis(target, options) if batch_axis is None else batch_axis,
        "scale": scale,
        **_meaning(mask),
    }
    Intent(**declared)
    if padding_side is not None and mask is None:
        raise SpecError(f"--padding-side {padding_side} needs a padding mask. Add --mask NAME=keep.")
    if "batch" not in options.given and not options.unbatched:
        options.batch = 2  # one item may affect the other
    subject.check(target, options, "check")
    if reference is not None:
        subject.check_target(reference, options, "check", beside_layer=True)
    export = prepare(options)
    with subject.running(options, f"checking {target or options.layer}") as tick:
        from ..answers.check.check import check as report_of
        from ..call.call import TargetFailedError, explaining

        if reference is not None:
            declared["reference"] = subject.load_target(reference, options).module
        asked: dict[str, Any] = {"only": only or (), "skip": skip or ()}

        def checked() -> CheckReport:
            subject = _load(target, options, declared.get("padding"), declared.get("padding_true"))
            with explaining(subject):
                return report_of(subject, Intent(**declared), tick=tick, **asked)

        try:
            report = checked()
        except TargetFailedError as failed:
            if "batch" in options.given or options.batch == 1:
                raise
            options.batch = 1  # e.g. a cache of one item
            try:
                report = checked()
            except TargetFailedError:
                raise failed from None
    give(report, options, export)
    if strict and report.findings:
        return ExitCode.CONDITION
    return ExitCode.OK if report.ok else ExitCode.CONDITION


def _batch_axis(target: str | None, options: Options) -> int | None:
    """Return the batch axis that --seq-first or --batch-first declares, or that a layer has; None if neither does."""
    declared = "batch_first" in options.given if target is not None else not options.batch_first
    return int(not options.batch_first) if declared and not options.unbatched else None


def _meaning(mask: str | None) -> dict[str, str]:
    """Return the intent that --mask declares. Raises `SpecError` if it is not NAME=keep or NAME=ignore."""
    if mask is None:
        return {}
    name, sign, means = mask.partition("=")
    if not name or (sign and means not in ("keep", "ignore")):
        raise SpecError(
            f"--mask {shown(mask)} is not NAME=keep or NAME=ignore. Say what 1 or True means, e.g. "
            "--mask attention_mask=keep."
        )
    return {"padding": name, **({"padding_true": means} if means else {})}


def _load(target: str | None, options: Options, padding: str | None, means: str | None) -> Subject:
    """Return the subject to check. A target may lack a setting or mask for --causal, which declares an expectation."""
    loaded = None
    if target is not None and options.causal:
        options.causal = "causal" in options.typed
        try:
            loaded = subject.load(target, options)
        except MhaInspectError:
            options.causal = False
    loaded = subject.load(target, options) if loaded is None else loaded
    if padding is not None:
        loaded = _with_mask(loaded, padding, keep=means != "ignore")
    return loaded if options.input is None else replace(loaded, batch_first=None)  # the user made the inputs


def _with_mask(subject: Subject, name: str, *, keep: bool) -> Subject:
    """Return a subject called with a mask that keeps every key, if the forward needs one and none was made."""
    import torch

    from ..answers.check.arguments import Arguments

    arguments = Arguments(subject)
    if not arguments.is_missing(name):
        return subject
    tokens = next((value for value in arguments.values.values() if isinstance(value, torch.Tensor)), None)
    if tokens is None or tokens.dim() < 2:
        return subject
    args, kwargs = arguments.of_call({name: torch.full(tokens.shape[:2], keep, device=tokens.device)})
    return replace(subject, args=args, kwargs=kwargs)
