"""`mha-inspect trace`: every stage of one forward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import DoesNotFitError, ExitCode, ForwardError, SpecError
from ..naming.stages import STAGES
from ..text import did_you_mean, shown
from . import subject
from .options import TARGET, Options, command, option, size
from .output import give, prepare
from .picture import Wanted, check_text, draw, wanted, with_text

if TYPE_CHECKING:
    from ..reports.trace import Trace
    from ..running.run import Run

PANEL, PICTURE = "Trace", "Picture"
_ITSELF = "The only one is in the layer itself: leave --module out."


@command(
    "trace --embed-dim 512 --num-heads 2 --batch 1 --seq-len 12",
    "trace torch.nn:TransformerEncoderLayer --embed-dim 64 --num-heads 4 --seq-len 10",
)
def trace(
    options: Options,
    target: str | None = TARGET,
    attention: int | None = size(PANEL, "Show this attention of several in full.", show_default="each kind once"),
    module: str | None = option(
        PANEL, "Show those of this module in full.", metavar="PATH", show_default="each kind once"
    ),
    picture: str | None = option(
        PICTURE,
        "Draw this stage, a heat map for each head: weights, scores or any other.",
        known=STAGES,
        metavar="STAGE",
    ),
    head: str = option(PICTURE, "The heads to draw, as in 0,3-5.", "", metavar="N,N-N", show_default="all"),
    batch_row: int = size(PICTURE, "The row of the batch to draw.", 0),
    tokens: str | None = option(
        PICTURE,
        "What stands at each place, to label the axes: a file with one a line, or a comma list.",
        metavar="FILE|A,B,...",
        show_default="numbers",
    ),
    text: str | None = option(
        PICTURE,
        "Make the input of this text, by the tokenizer in hf:DIRECTORY, and label the axes with its tokens.",
        metavar="TEXT",
    ),
) -> ExitCode:
    """Show every stage of one forward pass: its name, what is computed, its shape, and what each axis is.

    It is run once, as it is. Where PyTorch hides stages in a fused kernel, its steps are computed beside it, and the
    last line says how near they come to its result.

    TARGET is a class, a function that returns a module, or a module of your own: its arguments come from --set and from
    the options under the names that it has for them, its inputs follow the signature of its forward, or a function
    returns them as well: (module, args) or (module, args, kwargs). Importing it runs its code.
    """
    subject.check(target, options, "trace")
    if text is not None:
        check_text(target, options)
    want = wanted(options, picture, head, batch_row, tokens)
    export = prepare(options, draws=want is not None)
    if text is not None:
        options, want = with_text(text, target, options, want)
    try:
        report, run = _trace(target, options, want)
    except DoesNotFitError as error:
        if want is None or want.asked or export is None or export.format != "html":
            raise
        subject.tell([f"The page has no pictures, for which the tensors have to be kept: {error}"], options)
        want = None
        report, run = _trace(target, options, None)
    if run is None:
        give(report, options, export)
        return ExitCode.CONDITION
    report = choose(report, attention, module)
    give(report, options, export, None if want is None else draw(report, run, want, export))
    return ExitCode.OK


def _trace(target: str | None, options: Options, want: Wanted | None) -> tuple[Trace, Run | None]:
    """Build what was asked for, run it, and report what it did; where its forward raises, as far as it came.

    The run comes with it, its tensors kept where they are to be drawn; None where the forward raised.

    Raises:
        MhaInspectError: it cannot be built or called as asked.
        TargetFailedError: the call did not fit its forward.
    """
    show = subject.show(options)
    keep = want is not None or show.stats or show.values
    with subject.running(options, f"tracing {target or options.layer}"):
        from ..answers.trace import traced
        from ..call.call import explaining, way_out

        own = subject.load(target, options)
        try:
            with explaining(own):
                return traced(own, show, keep=keep)
        except ForwardError as failed:
            told = failed.trace.failure is not None and failed.trace.failure.cause is not None
            notes = (*failed.trace.notes, *own.notes, *filter(None, ["" if told else way_out(own)]))
            return replace(failed.trace, notes=notes), None


def choose(trace: Trace, attention: int | None, module: str | None) -> Trace:
    """Return the trace with those marked that are to be shown in full: the one of this number, or those of this module.

    Raises `SpecError` when there is no such attention.
    """
    if attention is None and module is None:
        return trace
    count = len(trace.attentions)
    paths = [one.module for one in trace.attentions]
    if attention is not None and not 1 <= attention <= count:
        there = "none was found" if not count else "there is only 1" if count == 1 else f"there are 1 to {count}"
        raise SpecError(f"attention {attention} is not there: {there}. Without --attention all are listed.")
    chosen = set(range(1, count + 1)) if attention is None else {attention}
    if module is not None:
        inside = {n for n, path in enumerate(paths, 1) if path == module or path.startswith(f"{module}.")}
        if not inside:
            listed = ", ".join(shown(path) for path in paths[:4] if path) + (", …" if count > 4 else "")
            where = f"Modules that have one: {listed or 'none'}." if listed or not count else _ITSELF
            raise SpecError(f"module {shown(module)} has no attention. {where}{did_you_mean(module, paths)}")
        chosen &= inside
        if not chosen:
            own = shown(paths[(attention or 1) - 1])
            raise SpecError(f"attention {attention} is in module {own}, not in {shown(module)}.")
    return replace(trace, chosen=tuple(sorted(chosen)))
