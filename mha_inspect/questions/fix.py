"""Fix the problems of a module one by one, each by an edit of its file that was run."""

from __future__ import annotations

import difflib
import os
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO

from ..errors import InputError
from ..fixes.grammar import RAISES
from ..fixes.loading import in_place_of
from ..fixes.search import SEEDS, Found, Search
from ..fixes.source import Source
from ..fixes.trial import Judged, OutOfTimeError, Target
from ..making.importing import SECONDS, in_one_line
from ..measure.run_report import environment_of, layer_of
from ..reports.check import Finding
from ..reports.fix import FixReport
from ..text import listed, shown

_LONGEST_IMPORT = 60.0
"""The most seconds that a file and its libraries may take to be run a second time."""
_LONGEST_RUN = 5.0
"""The most seconds that the file itself may run: it is run some hundred times."""


@dataclass(frozen=True)
class Fixed:
    """The report, with the bytes of the file before and after."""

    report: FixReport
    path: str
    before: bytes
    after: bytes


def fixed(target: Target) -> Fixed:
    """Return the problems of a target and a patch of its file. Nothing is written.

    Raises `InputError` if the file is not UTF-8 or cannot be run again and again, or if the module has no attention to
    check.
    """
    path = target.module.__file__ or ""
    source = first = Source(_read(path))
    _require_runs_again(target, first)
    search = Search(target, source)
    kept = search.kept
    before = judged = search.judge(source, SEEDS[0])
    found, alternative, tried = Found(), "", 0
    while problems_of(judged):
        found = search.fix(judged)
        tried += search.tried
        if not found.trials:
            break
        trial, *others = found.trials
        if others and source is first:
            alternative = patch_of(path, first, others[0].source)
        elif source is not first:
            alternative = ""
        source, judged = trial.source, trial.judged
        search = Search(target, source, kept)
    reason = found.reason
    rivals = found.rivals if source is first else ()
    if problems_of(judged) and source is not first:
        # An edit for one of several problems may be wrong where the others remain.
        reason = f"{_part_that_is_fixed(first, source, judged)} {reason}"
        source, judged = first, before
    elif tried and judged.failure is not None and problems_of(judged)[0].fix:
        reason += " The advice above is for the failing call alone."
    with in_place_of(target.module, first.content):
        subject = target.make(SEEDS[0])
    report = FixReport(
        environment=environment_of(subject),
        layer=layer_of(subject),
        file=_shown_path(path),
        problems=problems_of(before),
        patch=patch_of(path, first, source),
        alternative="" if source is first else alternative,
        rivals=tuple(patch_of(path, first, rival.source) for rival in rivals),
        remaining=problems_of(judged),
        reason=reason,
        edits_run=tried,
    )
    return Fixed(report, path, first.content, source.content)


def _require_runs_again(target: Target, source: Source) -> None:
    """Raise `InputError` for a file that raises when it is run a second time, or that takes long: it may train."""
    file = shown(target.module.__file__ or "")
    seconds = SECONDS.get(target.module.__name__, 0.0)
    began = time.perf_counter()
    try:
        # Libraries are imported once, so only a second run shows how long the file itself takes.
        if seconds <= _LONGEST_IMPORT:
            with in_place_of(target.module, source.content):
                seconds = time.perf_counter() - began
    except (Exception, SystemExit) as error:
        again = f"{file} cannot be run a second time, as fix does for every edit: {in_one_line(error)}"
        raise InputError(f"{again.rstrip('.')}. Move that line to another file.") from None
    if seconds > _LONGEST_RUN:
        raise InputError(
            f"{file} takes {seconds:.0f} seconds whenever it is imported, and is run once for every edit. Put what "
            'only the program does, such as training, under `if __name__ == "__main__":`.'
        )


def _part_that_is_fixed(first: Source, edited: Source, judged: Judged) -> str:
    """Return the sentence about an edit that leaves problems; of a forward that still raises, with its next error."""
    failure = judged.failure
    if failure is None:
        return f"An edit fixes a part of the problems, and {len(judged.problems)} remain."
    written = [line for line in _lines(edited) if line not in _lines(first)]
    lines = listed([f"`{line.strip()}`" for line in written])
    (problem,) = problems_of(judged)
    error = problem.sentence.rstrip(".")
    return f"With {lines} the forward gets further, and then fails at {problem.source}: {error}."


def patch_in_time(target: Target) -> str | None:
    """Return a patch of a target that is found before its time is over; None without one.

    Nothing that goes wrong in the search, in the user's code too, is an error of the page that shows the patch.
    """
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return fixed(target).report.patch or None
        except (Exception, OutOfTimeError):
            return None


def problems_of(judged: Judged) -> tuple[Finding, ...]:
    """Return the sure findings; of a forward that raises, what it raised."""
    failure = judged.failure
    if failure is None:
        return judged.problems
    sentence = f"The forward raises {failure.error}: {failure.message.partition(chr(10))[0]}"
    if failure.cause is None:
        return (Finding(RAISES, sentence, failure.clash, source=failure.source),)
    return (Finding(RAISES, failure.cause.explanation, sentence, source=failure.source, fix=failure.cause.fix),)


def patch_of(path: str, before: Source, after: Source) -> str:
    """Return the unified diff of a file; empty if nothing is changed."""
    name = _shown_path(path)
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}", lineterm="")
    return "".join(f"{line}\n" for line in lines)


def _lines(source: Source) -> list[str]:
    return source.content.decode("utf-8-sig").splitlines()


def _read(path: str) -> bytes:
    """Return the bytes of a file. Raises `InputError` if they are not UTF-8."""
    with open(path, "rb") as file:
        content = file.read()
    try:
        content.decode()
    except UnicodeDecodeError:
        raise InputError(f"{shown(path)} is not UTF-8, so it is not edited. Convert it to UTF-8 first.") from None
    return content


def _shown_path(path: str) -> str:
    """Return a path from the current folder where it is in there."""
    here = os.path.relpath(path)
    name = path if here.startswith(os.pardir) else here
    return name.replace(os.sep, "/").lstrip("/")
