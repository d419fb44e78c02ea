"""`mha-inspect compare-heads`: the same weights and the same input through several head counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import ExitCode, SpecError
from ..layers.spec import divisors, require_steps
from ..making.vocabulary import flag_of
from ..text import listed, plural, shown
from . import subject
from .app import command
from .options import FAIL_IF, NUMBERS, TARGET, Options, counts, option, require_numbers, size
from .output import Drawn, checked_destination, print_and_export, require_drawable, shows_pictures

if TYPE_CHECKING:
    from torch import Tensor

    from ..call.call import Call
    from ..compare.comparable_run import ComparableRun
    from ..making.target import Target
    from ..pictures.stages import Attended
    from ..running.subject import Subject

PANEL = "Comparison"
USUAL = (1, 2, 4, 8, 16)


@command(
    "compare-heads --embed-dim 512 --heads 1,2,4,8,16",
    "compare-heads --embed-dim 512 --heads 1,8 --steps 1 --focus --fail-if differs",
    without=(*NUMBERS, "num_heads"),
)
def compare_heads(
    options: Options,
    target: str | None = TARGET,
    heads: str = option(
        PANEL,
        "Head counts to compare. The first is the baseline.",
        "",
        metavar="N,N,...",
        show_default="those of 1,2,4,8,16 that divide embed_dim",
    ),
    steps: int | None = size(PANEL, "Train each head count N steps on one task. With 1, compare the first gradient."),
    focus: bool = option(
        PANEL,
        "Show what each head attends to. The page has the key with the most weight, how many share it, and how far.",
        False,
    ),
    time: bool = option(PANEL, "Measure how long each head count takes.", False),
    picture: bool = option(
        PANEL,
        "Draw the weights of every head in full. On a terminal in colour they are drawn small without it.",
        False,
        allow_from_autoenv=False,
    ),
    fail_if: str | None = FAIL_IF,
) -> ExitCode:
    """Run the same weights and the same input through several head counts, and show what differs, where and why.

    A difference counts if it exceeds the rounding error, which is measured in the same run.

    TARGET is a class or a function that returns a module. It takes a number of heads, and is built once for each.
    """
    if steps is not None:
        require_steps(steps)
    compared = _checked_counts(target, options, counts("heads", heads))
    if picture:
        require_drawable(options)
    export = checked_destination(options, draws=picture)
    is_page = export is not None and export.format == "html"
    on_terminal = shows_pictures(options)
    draws = picture or is_page or on_terminal
    attended: list[Attended] = []
    named = f" {listed([str(count) for count in compared])}" if compared else ""
    with subject.running(options, f"comparing{named} heads") as tick:
        from ..call.call import explaining
        from ..questions.compare_heads import compare_heads as report_of

        subjects = _subjects(target, options, compared)
        baseline = subjects[0][1]
        with explaining(baseline):
            report = report_of(
                subjects,
                steps=steps or 0,
                focus=focus,
                time=time,
                tick=tick,
                see=partial(_keep, attended) if draws else None,
            )
    drawn = _drawn(attended, is_page=is_page, asked=picture, on_terminal=on_terminal) if draws else None
    subject.print_notes(baseline.notes, options)
    print_and_export(report, options, export, drawn)
    return ExitCode.CONDITION if report.outcome == fail_if else ExitCode.OK


def _checked_counts(target: str | None, options: Options, heads: tuple[int, ...]) -> tuple[int, ...]:
    """Return the head counts to compare, checked before torch is imported. Empty if a target's width decides them."""
    sizes = " For shapes side by side: `mha-inspect params --num-heads 1,2,4 --device meta`."
    require_numbers(options.device, "compare", sizes)
    if target is None:
        options.take_settings("compare-heads")
        options.attention_spec(1)  # embed_dim is a size
        of_layer = chosen_counts(options.embed_dim, heads)
        subject.check_layer(options, of_layer)
        return of_layer
    subject.check_target(target, options, "compare-heads")
    is_decided = heads or "embed_dim" in options.given
    compared = chosen_counts(options.embed_dim, heads) if is_decided else ()
    options.input_spec()
    subject.require_open_head_count(options, compared or USUAL, "--heads gives the counts to compare.")
    return compared


def _subjects(target: str | None, options: Options, compared: tuple[int, ...]) -> list[tuple[int, Subject]]:
    """Build a layer or a target with each number of heads, all with the same input."""
    from ..call.load import subject_of

    if target is None:
        return [(count, subject.load(None, options.with_heads(count))) for count in compared]

    def built(count: int) -> Target:
        module = subject.load_target(target, options.with_heads(count))
        subject.require_head_count(module, "compare-heads")
        return module

    if not compared:
        width = None
        for name, value in built(1).arguments.items():
            if flag_of(name) == "embed_dim":
                width = value
                break
        if not isinstance(width, int):
            raise SpecError(
                f"compare-heads cannot find the width of {shown(target)}, which limits the head counts. "
                "Give the numbers, e.g. --heads 1,2,4."
            )
        compared = chosen_counts(width, ())
    subjects: list[tuple[int, Subject]] = []
    call: Call | None = None
    for count in compared:
        module = built(count)
        call = subject.call_of(module, options, call)
        subjects.append((count, subject_of(module, call, options.seed)))
    return subjects


def _keep(attended: list[Attended], count: int, run: ComparableRun) -> None:
    """Add the attentions in the run of a head count, with their stages, and the numbers of scores and weights."""
    from ..layers.spec import Show
    from ..measure.run_report import environment_of, layer_of, report
    from ..naming.visibility import kinds_of
    from ..pictures.stages import Attended, sharing_heads

    subject = run.subject
    trace = report(
        run.run,
        Show(),
        environment=environment_of(subject),
        layer=layer_of(subject),
        kinds=kinds_of(run.run),
    )
    number = len(run.attentions)
    for place, (attention, shared) in enumerate(zip(trace.attentions, sharing_heads(run.run), strict=True)):
        contents: dict[str, Tensor] = {}
        for stage in ("scores", "masked_scores", "weights"):
            tensor = run.content(place, stage)
            if tensor is not None:
                contents[stage] = tensor
        which = f", attention {place + 1} of {number}" if number > 1 else ""
        drawn = Attended(
            f"{plural(count, 'head')}{which}",
            count,
            count,
            partial(dict, contents),
            report=attention,
            shared=shared,
            count=count,
        )
        attended.append(drawn)


def _drawn(attended: Sequence[Attended], *, is_page: bool, asked: bool, on_terminal: bool) -> Drawn:
    """Return a picture of each head count with a panel for each head, and for a page the viewer of all of them.

    Unless `asked` for, the panels are small, and weights that cannot be drawn are left out.
    """
    from ..pictures.stages import for_viewer

    # The middle one is shown first: a single head has nothing beside it.
    viewed = for_viewer(attended, attention=len(attended) // 2) if is_page else None
    if asked:
        return Drawn(tuple(item.picture("weights") for item in attended), viewed=viewed)
    pictures = [item.picture("weights") for item in attended if "weights" in item.contents()]
    return Drawn(tuple(pictures), printed=on_terminal, small=True, viewed=viewed)


def chosen_counts(embed_dim: int, heads: tuple[int, ...]) -> tuple[int, ...]:
    """Return the head counts to compare, each once, the baseline first. Raises `SpecError` for fewer than two.

    Without --heads, use those of 1, 2, 4, 8 and 16 that divide embed_dim, or else its divisors.
    """
    if not heads:
        usual = tuple(count for count in USUAL if embed_dim % count == 0)
        heads = usual if len(usual) > 1 else tuple(divisors(embed_dim))
    compared = tuple(dict.fromkeys(heads))
    if len(compared) > 1:
        return compared
    if compared[0] < 1:
        raise SpecError(f"heads {compared[0]} is not a number of heads: each must be 1 or more. Try --heads 1,2.")
    only = compared[0]
    way = f"embed_dim {embed_dim} allows no other head count. Try --embed-dim 512."
    if embed_dim > 0:
        others = [count for count in divisors(embed_dim) if count != only]
        if others:
            way = f"Try --heads {only},{others[0]}."
    raise SpecError(f"heads {only} is one head count, but compare-heads needs two or more. {way}")
