"""`mha-inspect check`: whether attention that runs is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from ..answers.check.intent import CHECKS, Intent
from ..errors import ExitCode, MhaInspectError, SpecError
from ..text import did_you_mean, shown
from . import subject
from .options import NUMBERS, Options, TargetArgument, command, option, size
from .output import give, prepare, write
from .screen import Tick

if TYPE_CHECKING:
    from ..naming.subject import Subject
    from ..reports.check import CheckReport

PANEL = "Check"
INTENT = "What is meant"
_MEANINGS = ("keep", "ignore")


@command(
    "check model.py:Attention --causal",
    "check hf:gpt2 --causal --mask attention_mask=keep --padding-side left --cache past_key_values",
    without=(*NUMBERS, "grad"),
)
def check(
    options: Options,
    target: TargetArgument = None,
    window: Annotated[int | None, size("--window", INTENT, "A position sees N, its own included.")] = None,
    mask: Annotated[
        str | None,
        option(
            "--mask",
            INTENT,
            "The argument that takes the padding mask, and what 1 or True means in it.",
            metavar="NAME=keep|ignore",
        ),
    ] = None,
    padding_side: Annotated[
        str | None,
        option("--padding-side", INTENT, "Where padding stands.", known=("left", "right"), show_default="right"),
    ] = None,
    cache: Annotated[
        str | None,
        option("--cache", INTENT, "The argument that takes what the forward returned second.", metavar="NAME"),
    ] = None,
    batch_axis: Annotated[
        int | None, size("--batch-axis", INTENT, "The dimension that counts sequences.", show_default="0, if unsaid")
    ] = None,
    scale: Annotated[
        str | None, option("--scale", INTENT, "What the scores are scaled by.", known=("sqrt_head_dim",))
    ] = None,
    reference: Annotated[
        str | None, option("--reference", INTENT, "A trusted TARGET with the same arguments.", metavar="TARGET")
    ] = None,
    only: Annotated[
        list[str] | None, option("--only", PANEL, "Make this check alone; again for another.", metavar="NAME")
    ] = None,
    skip: Annotated[
        list[str] | None, option("--skip", PANEL, "Leave this check out; again for another.", metavar="NAME")
    ] = None,
    evidence_only: Annotated[
        bool, option("--evidence-only", PANEL, "Run it once, and tell what one recording shows.")
    ] = False,
    list_checks: Annotated[bool, option("--list", PANEL, "List the checks, and leave.")] = False,
) -> ExitCode:
    """Check whether attention that runs is right: run it again with one thing changed, and see which outputs move.

    With --causal, --window, --mask, --cache, --scale or --reference it is held to what is meant as well. It exits with
    1 where something is wrong.

    TARGET is a class, a function that returns a module, or a module of your own: its arguments come from --set and from
    the options under the names that it has for them, its inputs follow the signature of its forward. Importing it runs
    its code.
    """
    if list_checks:
        width = max(map(len, CHECKS))
        write("".join(f"{name:{width}}  {holds}\n" for name, holds in CHECKS.items()))
        return ExitCode.OK
    for name in (*(only or ()), *(skip or ())):
        if name not in CHECKS:
            raise SpecError(f"{shown(name)} is no check: there are {', '.join(CHECKS)}.{did_you_mean(name, CHECKS)}")
    declared: dict[str, Any] = {
        "causal": True if options.causal else None,
        "window": window,
        "padding_side": padding_side,
        "cache": cache,
        "batch_axis": 1 if target is None and not options.batch_first and not options.unbatched else batch_axis,
        "scale": scale,
        **_meaning(mask),
    }
    if "batch" not in options.given and not options.unbatched:
        options.batch = 2  # a row can be seen to move another
    subject.check(target, options, "check")
    if reference is not None:
        subject.check_target(reference, options, "check", beside_layer=True)
    export = prepare(options)
    with subject.running(options, f"checking {target or options.layer}") as tick:
        from ..answers.check.check import check as report_of
        from ..targets.call import explained

        if reference is not None:
            declared["reference"] = subject.load_target(reference, options).module
        asked: dict[str, Any] = {"only": only or (), "skip": skip or (), "evidence_only": evidence_only}

        def checked(own: Subject, tick: Tick) -> CheckReport:
            return report_of(own, Intent(**declared), tick=tick, **asked)

        own = _load(target, options, lambda: checked(subject.load(target, options), lambda words: None))
        try:
            report = checked(own, tick)
        except Exception as error:
            raise explained(error, own) from error
    give(report, options, export)
    return ExitCode.CONDITION if report.failed else ExitCode.OK


def _meaning(mask: str | None) -> dict[str, str]:
    """Return the intent that --mask tells. Raises `SpecError` where it is not NAME=keep or NAME=ignore."""
    if mask is None:
        return {}
    name, sign, means = mask.partition("=")
    if not name or (sign and means not in _MEANINGS):
        raise SpecError(
            f"--mask {shown(mask)} is not NAME=keep or NAME=ignore: say what 1 or True means, as in "
            "--mask attention_mask=keep."
        )
    return {"padding": name, **({"padding_true": means} if means else {})}


def _load(target: str | None, options: Options, again: Callable[[], object]) -> Subject:
    """Return what is checked, where all that `again` does has room.

    That a target is causal is what is meant: one that has no setting and no mask for it is built without.

    Raises `MhaInspectError` where it cannot be built or called.
    """
    from ..targets.room import Room

    if target is None or not options.causal:
        return subject.load(target, options, Room(again))
    options.causal = "causal" in options.typed
    try:
        return subject.load(target, options, Room(again))
    except MhaInspectError:
        options.causal = False
        return subject.load(target, options, Room(again))
