"""`mha-inspect check`: whether attention that runs is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..answers.check.intent import CHECKS, Intent, chosen_checks
from ..errors import ExitCode, MhaInspectError, SpecError
from ..text import shown
from . import subject
from .app import command
from .options import NUMBERS, TARGET, Options, option, size
from .output import give, prepare, write

if TYPE_CHECKING:
    from ..running.subject import Subject

PANEL = "Check"
INTENT = "What is meant"


@command(
    "check model.py:Attention --causal",
    "check hf:gpt2 --causal --mask attention_mask=keep --padding-side left --cache past_key_values",
    without=(*NUMBERS, "grad"),
    targets=True,
)
def check(
    options: Options,
    target: str | None = TARGET,
    window: int | None = size(INTENT, "A position sees N, its own included."),
    mask: str | None = option(
        INTENT, "The argument that takes the padding mask, and what 1 or True means in it.", metavar="NAME=keep|ignore"
    ),
    padding_side: str | None = option(INTENT, "Where padding stands.", known=("left", "right"), show_default="right"),
    cache: str | None = option(INTENT, "The argument that takes what the forward returned second.", metavar="NAME"),
    batch_axis: int | None = size(INTENT, "The dimension that counts sequences: 0 or 1.", unset="0, if unsaid"),
    scale: str | None = option(INTENT, "What the scores are scaled by.", known=("sqrt_head_dim",)),
    reference: str | None = option(INTENT, "A trusted TARGET with the same arguments.", metavar="TARGET"),
    only: list[str] | None = option(PANEL, "Make this check alone; again for another.", metavar="NAME"),
    skip: list[str] | None = option(PANEL, "Leave this check out; again for another.", metavar="NAME"),
    evidence_only: bool = option(PANEL, "Run it once, and tell what one recording shows.", False),
    list_checks: bool = option(PANEL, "List the checks, and leave.", False, "--list", envvar="MHA_INSPECT_LIST"),
) -> ExitCode:
    """Check whether attention that runs is right: run it again with one thing changed, and see which outputs move.

    With --causal, --window, --mask, --cache, --scale or --reference it is held to what is meant as well. It exits with
    1 where something is wrong.
    """
    if list_checks:
        width = max(map(len, CHECKS))
        write("".join(f"{name:{width}}  {holds}\n" for name, holds in CHECKS.items()))
        return ExitCode.OK
    chosen_checks(only or (), skip or ())
    declared: dict[str, Any] = {
        "causal": True if options.causal else None,
        "window": window,
        "padding_side": padding_side,
        "cache": cache,
        "batch_axis": 1 if target is None and not options.batch_first and not options.unbatched else batch_axis,
        "scale": scale,
        **_meaning(mask),
    }
    Intent(**declared)
    if padding_side is not None and mask is None:
        raise SpecError(
            f"--padding-side {padding_side} says where padding stands, and none is declared. Add --mask NAME=keep."
        )
    if "batch" not in options.given and not options.unbatched:
        options.batch = 2  # a row can be seen to move another
    subject.check(target, options, "check")
    if reference is not None:
        subject.check_target(reference, options, "check", beside_layer=True)
    export = prepare(options)
    with subject.running(options, f"checking {target or options.layer}") as tick:
        from ..answers.check.check import check as report_of
        from ..call.call import explaining

        if reference is not None:
            declared["reference"] = subject.load_target(reference, options).module
        checked = _load(target, options)
        asked: dict[str, Any] = {"only": only or (), "skip": skip or (), "evidence_only": evidence_only}
        with explaining(checked):
            report = report_of(checked, Intent(**declared), tick=tick, **asked)
    give(report, options, export)
    return ExitCode.OK if report.ok else ExitCode.CONDITION


def _meaning(mask: str | None) -> dict[str, str]:
    """Return the intent that --mask tells. Raises `SpecError` where it is not NAME=keep or NAME=ignore."""
    if mask is None:
        return {}
    name, sign, means = mask.partition("=")
    if not name or (sign and means not in ("keep", "ignore")):
        raise SpecError(
            f"--mask {shown(mask)} is not NAME=keep or NAME=ignore: say what 1 or True means, as in "
            "--mask attention_mask=keep."
        )
    return {"padding": name, **({"padding_true": means} if means else {})}


def _load(target: str | None, options: Options) -> Subject:
    """Return what is checked: causal is what is meant, and a target need not have a setting or a mask for it."""
    if target is not None and options.causal:
        options.causal = "causal" in options.typed
        try:
            return subject.load(target, options)
        except MhaInspectError:
            options.causal = False
    return subject.load(target, options)
