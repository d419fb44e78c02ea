"""`mha-inspect compare-heads`: the same weights and the same input through several head counts."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from ..build.vocabulary import flag_of
from ..errors import ExitCode, SpecError
from ..layers.spec import divisors, require_steps
from ..text import listed, shown
from . import subject
from .options import FAIL_IF, NUMBERS, TARGET, Options, command, counts, option, require_numbers, size
from .output import give, prepare
from .picture import Drawn, keep_weights, require_drawable

if TYPE_CHECKING:
    from ..call.call import Call
    from ..pictures.grid import Picture
    from ..running.subject import Subject

PANEL = "Comparison"
USUAL = (1, 2, 4, 8, 16)


@command(
    "compare-heads --embed-dim 512 --heads 1,2,4,8,16",
    "compare-heads --embed-dim 512 --heads 1,8 --gradients --focus --fail-if differs",
    without=(*NUMBERS, "grad"),
)
def compare_heads(
    options: Options,
    target: str | None = TARGET,
    heads: str = option(
        PANEL,
        "Head counts to compare, the first being the baseline.",
        "",
        metavar="N,N,...",
        show_default="those of 1,2,4,8,16 that divide embed_dim",
    ),
    gradients: bool = option(PANEL, "Compare the gradient of every parameter, with the same loss.", False),
    steps: int | None = size(PANEL, "Train each head count for N steps on the same task, and compare the weights."),
    focus: bool = option(PANEL, "Measure what each head looks at; with --steps before training and after it.", False),
    time: bool = option(PANEL, "Measure how long each head count takes.", False),
    picture: bool = option(PANEL, "Draw the weights of each head count, averaged over the heads.", False, envvar=""),
    fail_if: str | None = FAIL_IF,
) -> ExitCode:
    """Run the same weights and the same input through several head counts, and say what differs, where and why.

    A difference counts when it is above the rounding error that is measured in the same run.

    TARGET is a class, or a function that returns a module, which takes a number of heads: it is built once for each.
    """
    if steps is not None:
        require_steps(steps)
    asked: dict[str, Any] = {"gradients": gradients, "steps": steps or 0}
    asked |= {"focus": focus, "time": time}
    compared = _checked_counts(target, options, counts("heads", heads))
    if picture:
        require_drawable(options)
    export = prepare(options, draws=picture)
    seen: list[tuple[int, list[Picture]]] = []
    counted = f" {listed([str(count) for count in compared])}" if compared else ""
    with subject.running(options, f"comparing{counted} heads") as tick:
        from ..answers.compare_heads import compare_heads as report_of
        from ..call.call import explaining

        if target is not None and not compared:
            compared = chosen_counts(_of_its_width(target, options), ())
        made = _made(target, options, compared)
        own = made[0][1]
        with explaining(own):
            report = report_of(made, **asked, tick=tick, see=partial(keep_weights, seen) if picture else None)
    drawn = None
    if picture:
        from ..pictures.stages import counts_pictures

        drawn = Drawn(counts_pictures(seen), printed=True)
    subject.tell(own.notes, options)
    give(report, options, export, drawn)
    return ExitCode.CONDITION if report.verdict == fail_if else ExitCode.OK


def _checked_counts(text: str | None, options: Options, heads: tuple[int, ...]) -> tuple[int, ...]:
    """Return the head counts to compare; none where they hang on the width that a target has by itself.

    Raises `MhaInspectError` where none will do, before torch is imported.
    """
    sizes = " The shapes side by side: `mha-inspect params --num-heads 1,2,4 --device meta`."
    require_numbers(options.device, "compare", sizes)
    if text is None:
        options.require_no_target_settings("compare-heads")
        compared = chosen_counts(options, heads)
        subject.check_layer(options, compared)
        subject.show(options)
        return compared
    subject.check_target(text, options, "compare-heads")
    known = heads or "embed_dim" in options.given or len(subject.head_counts(options)) > 1
    compared = chosen_counts(options, heads) if known else ()
    subject.inputs(options)
    subject.show(options)
    subject.require_open_head_count(options, compared or USUAL, "--heads gives the counts to compare.")
    return compared


def _of_its_width(text: str, options: Options) -> Options:
    """Return the options with the embed_dim that a target has with them.

    Raises `MhaInspectError` where it cannot be built, takes no number of heads, or has no argument for its width.
    """
    target = subject.load_target(text, subject.with_heads(options, 1))
    subject.require_head_count(target, "compare-heads")
    widths = [value for name, value in target.arguments.items() if flag_of(name) == "embed_dim"]
    if not widths or not isinstance(widths[0], int):
        raise SpecError(
            f"compare-heads builds {shown(text)} once for each number of heads, and nothing tells which fit: give "
            "them, as in --heads 1,2,4."
        )
    changed = copy(options)
    changed.embed_dim = widths[0]
    return changed


def _made(text: str | None, options: Options, compared: tuple[int, ...]) -> list[tuple[int, Subject]]:
    """Build a layer or a target with each number of heads; all have the same input.

    Raises `MhaInspectError` where it cannot be built or called as asked, or takes no number of heads.
    """
    if text is None:
        from ..call.head_counts import layers_with_heads

        spec, inputs, run = subject.attention(options, compared[0]), subject.inputs(options), subject.run(options)
        return layers_with_heads(spec, compared, inputs, run, options.layer)
    from ..call.load import subject_of

    made: list[tuple[int, Subject]] = []
    call: Call | None = None
    for count in compared:
        target = subject.load_target(text, subject.with_heads(options, count))
        subject.require_head_count(target, "compare-heads")
        call = subject.call_of(target, options, call)
        made.append((count, subject_of(target, call, options.seed)))
    return made


def chosen_counts(options: Options, heads: tuple[int, ...]) -> tuple[int, ...]:
    """Return the head counts to compare, each once, the baseline first.

    Without --heads: those of 1, 2, 4, 8 and 16 that divide embed_dim, or else its divisors. A --num-heads that is not
    the default is the baseline; a list of them is what --heads would have been.

    Raises `SpecError` when fewer than two are left.
    """
    named = subject.head_counts(options)
    if named == subject.head_counts(Options(layer=options.layer)) or (heads and len(named) > 1):
        named = ()
    if not heads and len(named) < 2:
        subject.attention(options, 1)
        usual = tuple(count for count in USUAL if options.embed_dim % count == 0)
        heads = usual if len(usual) > 1 else tuple(divisors(options.embed_dim))
    compared = tuple(dict.fromkeys((*named, *heads)))
    if len(compared) < 2:
        raise SpecError(_nothing_to_compare(options.embed_dim, compared))
    return compared


def _nothing_to_compare(embed_dim: int, compared: tuple[int, ...]) -> str:
    if min(compared, default=1) < 1:
        return f"heads {min(compared)} is not a number of heads: each must be 1 or more. Try --heads 1,2."
    only = f"heads {compared[0]} is one head count: there is nothing to compare it with."
    others = [count for count in divisors(embed_dim) if count not in compared] if embed_dim > 0 else []
    if not others:
        return f"{only} embed_dim {embed_dim} has no other; try --embed-dim 512."
    return f"{only} Give two or more, as in --heads {compared[0]},{others[0]}."
