"""`mha-inspect trace`: every stage of one forward pass, and its pictures."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ExitCode, ForwardError, SpecError
from ..naming.pattern import STAGES
from ..text import did_you_mean, shown
from . import subject
from .app import STARTED, command
from .help import PROGRAM
from .options import TARGET, Options, completing, counts, option, require_ranks, size, size_number, word_of
from .output import Drawn, checked_destination, print_and_export, require_drawable
from .ranks import of_all_ranks, place, prints_answer

if TYPE_CHECKING:
    from ..pictures.grid import Picture
    from ..pictures.stages import Attended
    from ..render.export import Destination
    from ..reports.trace import Trace
    from ..running.subject import Run, Subject

PANEL, DECODE, RANKS, PICTURE = "Trace", "Decode", "Ranks", "Picture"


def _picture_typed(typed: str) -> str:
    """Return the stage and the heads to draw as they were typed: `weights`, or `weights:0,3`."""
    word_of(STAGES)(typed.partition(":")[0])
    return typed


def _ranks_typed(typed: str) -> str:
    """Return the number of ranks and the plan as they were typed: `2`, or `2:plan.json`."""
    size_number(typed.partition(":")[0])
    return typed


@command(
    "trace --embed-dim 512 --num-heads 2 --batch 1 --seq-len 12",
    "trace hf:gpt2 --set num_hidden_layers=2 --set hidden_size=96 --decode 3",
    targets=True,
)
def trace(
    options: Options,
    target: str | None = TARGET,
    attention: str | None = option(
        PANEL,
        "Show only this attention in full, or those of a module.",
        metavar="N|PATH",
        show_default="one of each kind",
    ),
    watch: bool = option(PANEL, "Print the page again on each save of TARGET's file, until Ctrl-C.", False),
    decode: int | None = size(
        DECODE,
        "Decode the last N tokens one by one, with a cache. The stages are those of the last step.",
        unset="one call",
    ),
    ranks: str | None = option(
        RANKS,
        "Shard the heads over N ranks, all in this process; PLAN is JSON from module path to colwise, rowwise or "
        "replicate, or FILE.py:NAME.",
        metavar="N[:PLAN]",
        parser=_ranks_typed,
        show_default="one",
    ),
    picture: str | None = option(
        PICTURE,
        "Draw this stage, a heat map per head. E.g. weights, or weights:0,3 for some heads.",
        metavar="STAGE[:HEADS]",
        parser=_picture_typed,
        autocompletion=completing(STAGES),
    ),
    tokens: str | None = option(
        PICTURE,
        "Tokens to label the axes: a file with one per line, or a comma list.",
        metavar="FILE|A,B,...",
        show_default="numbers",
    ),
) -> ExitCode:
    """Show every stage of one forward pass: its name, its formula, its shape and its axes.

    The module is run once, unchanged, and the first line says what is wrong in that run. If a fused kernel of PyTorch
    hides stages, they are computed separately, and the last line shows how close they are to the result of the kernel.

    With --decode, a table has a row for each call. The last position of each is compared with one forward over all
    tokens; the exit code is 1 if one differs.

    With --ranks, W_q, W_k and W_v are sharded by whole heads and W_o by columns. The stages are those of rank 0, the
    plan is ready to paste, and the outputs of all ranks are compared with that of the whole module.
    """
    subject.check(target, options, "trace")
    count, _, plan = (ranks or "").partition(":")
    number_of_ranks = int(count) if count else None
    require_ranks(number_of_ranks, decode=decode is not None, picture=picture is not None)
    wanted = _wanted(options, picture, tokens)
    export = checked_destination(options, draws=wanted is not None)
    options.quiet = options.quiet or not prints_answer()
    asked = _Asked(target, options, decode, wanted, export, attention, number_of_ranks, plan, watch)
    if watch:
        return _watched(asked)
    report = asked.answer()
    if report.failure is None and not prints_answer():
        return ExitCode.OK
    return ExitCode.OK if report.complete else ExitCode.CONDITION


@dataclass(frozen=True)
class _Asked:
    """What is traced, and where its page goes."""

    target: str | None
    options: Options
    decode: int | None
    """Tokens that are given one by one; None for one call."""
    wanted: Wanted | None
    export: Destination | None
    attention: str | None
    ranks: int | None
    plan: str
    """A file that says how to shard, or code that does; empty to find it."""
    watch: bool = False
    """Whether it is traced again on each save."""

    def answer(self) -> Trace:
        """Trace, print the page and write the file; return the trace."""
        options, wanted = self.options, self.wanted
        began = time.perf_counter() if self.watch else STARTED
        report, run = self._traced(keep=wanted is not None)
        report = self._with_patch(report, began)
        if run is None:  # every rank that raised prints its failure
            print_and_export(report, options, _unless_picture(self.export, options))
            return report
        if prints_answer():
            report = choose(report, self.attention)
            drawn = None if wanted is None else _draw(report, run, wanted, self.export)
            print_and_export(report, options, self.export, drawn)
        return report

    def _with_patch(self, report: Trace, began: float) -> Trace:
        """Return a trace with a patch of the target's file, where one call of one process shows what is wrong."""
        if self.decode is not None or self.ranks is not None or place() is not None:
            return report
        sure = [finding for finding in report.findings if finding.sure]
        if report.failure is None and not sure:
            return report
        from ..checks.intent import Intent
        from .patch import patch_beside

        intent = Intent(causal=True if self.options.causal else None)
        with subject.running(self.options, f"fixing {self.target or self.options.layer}"):
            patch = patch_beside(self.target, self.options, intent, began)
        return replace(report, patch=patch)

    def _traced(self, *, keep: bool) -> tuple[Trace, Run | None]:
        """Return the report of one run, or of a decode loop, and the run; None for it if the forward raised."""
        options = self.options
        with subject.running(options, f"tracing {self.target or options.layer}") as tick:
            from ..call.call import explaining

            loaded = subject.load(self.target, options, tick)
            try:
                with explaining(loaded):
                    return self._recorded(loaded, keep=keep)
            except ForwardError as failed:
                is_one_call = self.decode is None and self.ranks is None
                is_explained = failed.trace.failure is not None and failed.trace.failure.cause is not None
                hint = loaded.hint if is_one_call and not is_explained else ""
                return _with_notes(failed.trace, (*loaded.notes, hint)), None

    def _recorded(self, loaded: Subject, *, keep: bool) -> tuple[Trace, Run]:
        """Run a subject as it was asked for: by tokens, over ranks, or once."""
        show = self.options.show()
        if self.decode is not None:
            from ..questions.decode import decoded

            return decoded(loaded, show, self.decode)
        if self.ranks is not None:
            from ..questions.shard_plan import plan_from
            from ..questions.sharding import sharded

            return sharded(loaded, show, self.ranks, plan_from(self.plan) if self.plan else None)
        from ..questions.trace import traced

        report, run = traced(loaded, show, keep=keep or show.stats or show.values, judge=True)
        return of_all_ranks(report, run, loaded), run


def _watched(asked: _Asked) -> ExitCode:
    """Answer on each save of the target's file, until Ctrl-C. Raises `SpecError` without a file."""
    from ..making.importing import file_of
    from .watch import watched

    file = file_of(asked.target or "")
    if not file:
        raise SpecError(f"--watch needs a Python file, e.g. {PROGRAM} path/to/file.py --watch.")

    def verdict() -> str:
        from ..render.verdict import verdict_of

        said = verdict_of(asked.answer())
        return "" if said is None else said.text

    return watched(verdict, Path(file))


def _unless_picture(export: Destination | None, options: Options) -> Destination | None:
    """Return where the failure of a forward is written: nowhere for a PNG, because there is nothing to draw."""
    if export is None or export.format != "png":
        return export
    note = f"{shown(export.asked)} was not written, because the forward raised before it ended."
    subject.print_notes([note], options)
    return None


def _with_notes(trace: Trace, notes: Iterable[str]) -> Trace:
    """Return the trace of a forward that raised, with these notes and the rank of this process; not empty ones."""
    here = place()
    where = "" if here is None else f"The stages are those of {here}."
    further = [note for note in (*notes, where) if note]
    return replace(trace, notes=(*trace.notes, *further))


def choose(trace: Trace, asked: str | None) -> Trace:
    """Mark the attentions to show in full, by number or by the path of a module.

    Raises `SpecError` if there is no such attention.
    """
    if asked is None:
        return trace
    paths = [report.module for report in trace.attentions]
    if asked.isascii() and asked.isdigit():
        return replace(trace, chosen=(_number_of(asked, len(paths)),))
    inside = tuple(n for n, path in enumerate(paths, 1) if path == asked or path.startswith(f"{asked}."))
    if not inside:
        where = _modules_with_attention(paths)
        raise SpecError(f"module {shown(asked)} has no attention. {where}{did_you_mean(asked, paths)}")
    return replace(trace, chosen=inside)


def _number_of(asked: str, count: int) -> int:
    """Return the number of one of `count` attentions. Raises `SpecError` if there is none of this number."""
    number = int(asked) if len(asked) < 10 else 0
    if 1 <= number <= count:
        return number
    if count == 0:
        there = "none was found"
    elif count == 1:
        there = "there is only 1"
    else:
        there = f"there are 1 to {count}"
    raise SpecError(f"attention {shown(asked)} does not exist: {there}. Without --attention, all are listed.")


def _modules_with_attention(paths: list[str]) -> str:
    """Return a sentence on the modules that have an attention: `Modules with attention: layers.0, layers.1, ….`."""
    listed = ", ".join(shown(path) for path in paths[:4] if path)
    if len(paths) > 4:
        listed += ", …"
    if paths and not listed:
        return "The only attention is in the layer itself. Drop --attention."
    return f"Modules with attention: {listed or 'none'}."


@dataclass(frozen=True)
class Wanted:
    """The requested pictures, and where they go."""

    stage: str
    heads: tuple[int, ...] | None
    """None for all heads."""
    tokens: tuple[str, ...]
    printed: bool
    """Whether they follow the report; otherwise only the file has them."""


def _wanted(options: Options, picture: str | None, tokens: str | None) -> Wanted | None:
    """Return the pictures to draw; None without any. Raises `MhaInspectError` for an option that needs a picture."""
    labels = () if tokens is None else tokens_of(tokens)
    if picture is None and options.ending not in (".png", ".html"):
        if tokens:
            raise SpecError(
                f"--tokens {shown(tokens)} only affects pictures, and none is drawn. Add --picture weights."
            )
        return None
    # A page shows shapes where there are no numbers.
    if picture is not None or options.ending != ".html":
        require_drawable(options)
    stage, _, heads = (picture or "weights").partition(":")
    chosen = tuple(dict.fromkeys(counts("head", heads, f"--picture {stage}:0,3")))
    return Wanted(stage, chosen or None, labels, picture is not None)


def tokens_of(typed: str) -> tuple[str, ...]:
    """Return the labels of a file, one per line, or of a comma list. Raises `SpecError` if there is no such file."""
    path = Path(typed)
    if not path.is_file():
        if "," in typed or not (path.suffix or os.sep in typed):
            return tuple(part.strip() for part in typed.split(","))
        raise SpecError(f"tokens {shown(typed)}: no such file. Give a file with one token per line, or a list a,b,c.")
    with path.open(encoding="utf-8", errors="replace") as file:
        return tuple(file.read(1 << 20).splitlines())


def _draw(trace: Trace, run: Run, wanted: Wanted, export: Destination | None) -> Drawn | None:
    """Return the pictures of the chosen attentions (by default the first), and of all of them for a page.

    None if a page has nothing to show. Raises `SpecError` if there is no such stage or head to draw.
    """
    from ..pictures.stages import for_viewer

    attended = _attended(trace, run)
    chosen = trace.chosen or (1,)
    viewed: dict[str, Any] | None = None
    if export is not None and export.format == "html":
        viewed = for_viewer(
            attended,
            more=[wanted.stage],
            labels=wanted.tokens,
            attention=chosen[0] - 1,
            stage=wanted.stage,
            head=wanted.heads[0] if wanted.heads else 0,
        )
        if viewed is None and not wanted.printed:
            return None
    if not attended:
        raise SpecError(f"{wanted.stage} cannot be drawn: no attention was found.")
    if not wanted.printed and viewed is not None:
        return Drawn((), printed=False, viewed=viewed)
    pictures: list[Picture] = []
    for number in chosen:
        pictures.append(attended[number - 1].picture(wanted.stage, heads=wanted.heads, labels=wanted.tokens))
    if trace.chosen is None and len(attended) > 1:
        rest = "attention 2" if len(attended) == 2 else f"attentions 2 to {len(attended)}"
        note = f"To draw {rest}: --attention N, or the path of a module."
        pictures[0] = replace(pictures[0], notes=(*pictures[0].notes, note))
    return Drawn(tuple(pictures), wanted.printed, viewed=viewed)


def _attended(trace: Trace, run: Run) -> list[Attended]:
    """Return the attentions of a run as pictures need them, with tensors that are made when they are drawn."""
    from ..naming.canonical import drawn_of
    from ..pictures.stages import Attended, sharing_heads
    from ..reports.trace import attention_names

    attended: list[Attended] = []
    of_trace = zip(attention_names(trace), trace.attentions, strict=True)
    for (name, report), attention, shared in zip(of_trace, run.attentions, sharing_heads(run), strict=True):
        attended.append(
            Attended(
                name,
                report.num_heads,
                report.num_kv_heads,
                partial(drawn_of, run, *attention),
                num_windows=attention[1].num_windows,
                report=report,
                shared=shared,
            )
        )
    return attended
