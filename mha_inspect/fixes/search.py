"""Find the smallest edit of a file with which a problem is gone, and every other answer is as before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, islice, product
from math import prod

import torch
from torch import Tensor

from ..reports.check import CheckReport, Finding
from ..reports.trace import Failure
from .grammar import RAISES, edits
from .lines import executed_lines, named_line
from .loading import in_place_of
from .source import Edit, Source
from .trial import (
    Judged,
    Kept,
    Target,
    axes_of_stage,
    judged,
    kept_of,
    made,
    outputs_of,
    rows_in_use,
    shapes_of,
    stages_of,
)

SEEDS = (0, 1, 2)
"""The seeds of weights and inputs with which an edit has to be right: the first is that of the finding."""
_MOST = 900
"""The most edits that are run for one problem."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_CALL_BEFORE, _CALL_AFTER = re.compile(r"[\w.]+\Z"), re.compile(r"\w*\(?")
_MOST_RIVALS = 3
"""The most edits with other outputs that are shown."""
_MOST_ALIKE = 4
"""The most lines that are alike and edited at once."""
_MOST_TOGETHER = 150
"""The most of them that change two expressions apart from each other."""
_OF_MASKS = ("causal", "window", "padding", "masking", "softmax", "finite", "heads", "batch", "cache", "mixing", RAISES)
_MAY_CHANGE = {
    "scale": ("scale", "reference", RAISES),
    "who sees whom": (*_OF_MASKS, "training", "reference"),
    "mask": ("padding", "masking", "softmax", "finite", RAISES),
    "rotary by pair": ("rotary", "cache", "reference", RAISES),
}
"""Each fact of `check` to the checks whose findings concern it; any other fact stays."""
_OF_EVERY_ATTENTION = {"heads", "softmax", "batch"}
"""The checks that an edit for a forward that raises has to pass: nothing else shows what was meant."""
_SUSPECTED_ANYWAY = {"parameters", "scale"}
"""Checks that may suspect what an edit of operands does not concern."""
_MAY_BE_SKIPPED = {"repeat": {"training"}}
"""Checks that passed and may be skipped after a fix: a function that drops in training alone cannot be switched off."""
_FEATURES_FIRST = "(head_dim heads)"
"""The heads are merged in another order than they were split in: no other fix of their order makes that."""
_HIDDEN = 1e-6
"""A smaller weight is that of a key that is masked out."""
_WITHIN_TOKEN = "attended over"
"""The fact of a module whose heads attend within a token: never a fix."""
_OF_SEVERAL_PLACES = ("heads", "batch", "mixing", RAISES)
"""Checks whose findings may need an edit of several places: where heads are split, and where they are merged."""
_OF_SEVERAL_LINES = (*_OF_SEVERAL_PLACES, "rotary", "grouped", "cache")
"""Checks whose findings may need one edit of several lines that are alike: of queries, of keys and of values."""
_OF_EITHER_LINE = ("name_used_twice", "attribute_used_twice")
"""Rows for a tensor or a module that is used twice: the line that is named may be the one that is right."""
_HIDES = "sign_of_mask"
"""The row for a mask that hides nothing: after it, some weight is 0."""
_SAME_OUTPUT = ("cache", "inputs", "training")
"""Checks whose findings do not concern the output of one plain run in eval mode."""


@dataclass(frozen=True, eq=False)
class Trial:
    """An edit that was run, and what is then wrong."""

    edit: Edit
    source: Source
    judged: Judged
    outputs: list[Tensor]
    changed_stages: int
    """The number of stages of the attention with other values than before."""


@dataclass(frozen=True, eq=False)
class Found:
    """The edits that fix one problem: equally small ones, whose outputs are equal."""

    trials: tuple[Trial, ...] = ()
    rivals: tuple[Trial, ...] = ()
    """The edits that fix it too, if their outputs differ: which one is meant is not known."""
    reason: str = ""
    """Why there is none, as a sentence; empty if there is one."""


@dataclass(eq=False)
class Search:
    """A search for edits of one source."""

    target: Target
    source: Source
    kept: dict[int, Kept] = field(default_factory=dict)
    """What every edit keeps of the original, by the seed."""
    tried: int = 0

    def judge(self, source: Source, seed: int, only: Sequence[str] = ()) -> Judged:
        """Judge the subject of a source with the weights of the original one."""
        with in_place_of(self.target.module, source.content):
            return judged(self.target, seed, self._kept(seed), only)

    def outputs(self, source: Source, seed: int, *, training: bool = False) -> list[Tensor]:
        """Return the outputs of the subject of a source."""
        with in_place_of(self.target.module, source.content):
            return outputs_of(made(self.target, seed, self._kept(seed)), training=training)

    def _kept(self, seed: int) -> Kept:
        if seed not in self.kept:
            with in_place_of(self.target.module, self.source.content):
                self.kept[seed] = kept_of(self.target.make(seed))
        return self.kept[seed]

    def fix(self, before: Judged) -> Found:
        """Return the smallest edits with which the first problem is gone."""
        if _is_of_a_guess(before.failure):
            return Found(reason="No edit was looked for: without the input nothing is known of the code.")
        self._kept(SEEDS[0])
        check, line = _first_problem(before)
        number = named_line(self.target.module, line, self.source.content.count(b"\n") + 1)
        passing: list[Trial] = []
        for edit in islice(self._edits(check, number), _MOST):
            if passing and edit.cost > passing[0].edit.cost:
                break
            trial = self._trial(edit, check, before)
            if trial is not None:
                passing.append(trial)
        if not passing:
            further = self._further(before.failure, number)
            if further is not None:
                return Found((further,))
        return self._decided(passing)

    def _further(self, failure: Failure | None, number: int | None) -> Trial | None:
        """Return the edit that the advice on a failure names, if the forward then gets further and raises again."""
        if failure is None or failure.cause is None or number is None:
            return None
        for edit in edits(self.source, self.source.nodes_on({number}), RAISES):
            call = _call_written_by(edit, self.source)
            if not call or call not in failure.cause.fix:
                continue
            try:
                source = self.source.edited(edit.replacements)
                after = self.judge(source, SEEDS[0])
            except (Exception, SystemExit):  # an edited source may raise anything
                continue
            if after.failure is not None and after.failure.num_ops > failure.num_ops:
                return Trial(edit, source, after, [], 0)
        return None

    def _decided(self, passing: list[Trial]) -> Found:
        """Return the best of the edits that pass, if all that are as good compute the same."""
        if not passing:
            return Found(reason=f"No edit fixes it: {self.tried} were run.")
        least = min(_changes(trial) for trial in passing)
        best = [trial for trial in passing if _changes(trial) == least]
        if best[0].edit.row in _OF_EITHER_LINE:
            # What reads a tensor late is no more likely to be wrong than what reads it early.
            best = [trial for trial in passing if trial.edit.row in _OF_EITHER_LINE]
        best.sort(key=lambda trial: len(trial.source.content))
        if all(_are_close(best[0].outputs, other.outputs) for other in best):
            others = [trial for trial in best[1:] if trial.edit.row != best[0].edit.row]
            return Found((best[0], *others[:1]))
        reason = f"{len(best)} edits fix it, and their outputs differ: which one is meant is not known."
        return Found(rivals=tuple(best[:_MOST_RIVALS]), reason=reason)

    def _edits(self, check: str, number: int | None) -> Iterator[Edit]:
        """Yield edits in the order to try: of the named line, then of the others that run; then several at once."""
        seen: set[tuple[object, ...]] = set()
        near_lines = set() if number is None else {number}
        near = list(edits(self.source, self.source.nodes_on(near_lines), check))
        lines = self._lines(check) - near_lines
        far = list(edits(self.source, self.source.nodes_on(lines), check))
        alike = self._alike([*near, *far]) if check in _OF_SEVERAL_LINES else []
        together = _together([*near, *far]) if check in _OF_SEVERAL_PLACES else iter(())
        far = [edit if edit.row in _OF_EITHER_LINE else replace(edit, cost=2) for edit in far]
        far.sort(key=lambda edit: edit.cost)
        for edit in (*near, *alike, *far, *together):
            if edit.replacements not in seen:
                seen.add(edit.replacements)
                yield edit

    def _alike(self, single: Sequence[Edit]) -> list[Edit]:
        """Return the edits of all lines that are alike but for their names: of `q = split(q)` and `k = split(k)`."""
        by_pattern: dict[tuple[str, ...], list[Edit]] = {}
        for edit in single:
            line = _NAME.sub("_", self.source.line_at(edit.replacements[0].start))
            texts = [replacement.text for replacement in edit.replacements]
            patterns = [_NAME.sub("_", text) for text in texts]
            by_pattern.setdefault((edit.row, line, *texts), []).append(edit)
            if patterns != texts:
                by_pattern.setdefault((edit.row, line, *patterns), []).append(edit)
        groups = [edits for edits in by_pattern.values() if 1 < len(edits) <= _MOST_ALIKE]
        return [replace(_joined(edits[0].row, edits), cost=2) for edits in groups]

    def _lines(self, check: str) -> set[int]:
        """Return the lines that run when the subject is built and called, and checked with a cache."""
        if check == "cache":
            return executed_lines(self.target.module, lambda: self.judge(self.source, SEEDS[0], [check]))
        with in_place_of(self.target.module, self.source.content) as module:

            def run() -> None:
                outputs_of(self.target.make(SEEDS[0]))

            return executed_lines(module, run)

    def _trial(self, edit: Edit, check: str, before: Judged) -> Trial | None:
        """Run an edit; None if it does not fix the problem, or changes anything else."""
        self.tried += 1
        try:
            source = self.source.edited(edit.replacements)
            outputs = self.outputs(source, SEEDS[0])
            if not self._keeps_the_rest(edit, source, outputs, check, before.failure):
                return None
            after = self._judged_better(source, check, before)
            if after is None or not self._keeps_sight(edit, source, check):
                return None
        except (Exception, SystemExit):  # an edited source may raise anything
            return None
        return Trial(edit, source, after, outputs, self._changed_stages(source))

    def _keeps_the_rest(
        self, edit: Edit, source: Source, outputs: list[Tensor], check: str, failure: Failure | None
    ) -> bool:
        """Return whether an edit leaves the shapes of the outputs, and every row of a matrix its part in them.

        Where the forward raised, there are stages that were completed in place of outputs.
        """
        if failure is not None:
            return self._keeps_sizes(edit, source, failure)
        return self._keeps_output(outputs, check) and self._in_use <= self.rows_in_use(source)

    def _judged_better(self, source: Source, check: str, before: Judged) -> Judged | None:
        """Return the judgement of an edited source if a problem is gone and nothing is new, with other numbers too."""
        if check != RAISES and self.judge(source, SEEDS[0], [check]).problems:
            return None
        after = self.judge(source, SEEDS[0])
        is_better = _is_better(before, after, check) and self._is_right_elsewhere(source, after)
        return after if is_better else None

    def _keeps_sight(self, edit: Edit, source: Source, check: str) -> bool:
        """Return whether an edit hides and shows what its row, or the fix of its problem, may hide and show."""
        if edit.row == _HIDES and not self._hides(source):
            return False
        if check == "padding" and self._turns_sight(source):
            return False
        if edit.row == "causal_mask_put_in" and not self._is_alike_in_heads(source):
            return False
        return check not in _OF_SEVERAL_PLACES or not self._puts_features_first(source)

    def _hides(self, source: Source) -> bool:
        """Return whether a source masks some key out; True where its weights are not computed."""
        has_weights = False
        for name, stage in self.stages(source).items():
            if not name.endswith(" weights"):
                continue
            has_weights = True
            if bool((stage < _HIDDEN).any()):
                return True
        return not has_weights

    def _turns_sight(self, source: Source) -> bool:
        """Return whether a key becomes visible to one query and hidden to another: padding is hidden from all alike."""
        after = self.stages(source)
        for name, weights in self._stages_before.items():
            if not name.endswith(" weights") or name not in after or after[name].shape != weights.shape:
                continue
            was_seen = weights > _HIDDEN
            is_seen = after[name] > _HIDDEN
            appears = is_seen & ~was_seen
            vanishes = was_seen & ~is_seen
            if bool((appears.any(-2) & vanishes.any(-2)).any()):
                return True
        return False

    def _is_alike_in_heads(self, source: Source) -> bool:
        """Return whether all heads of `batch heads query key` see the same keys: no wrong mask is left beside it."""
        for name, weights in self.stages(source).items():
            if name.endswith(" weights") and weights.dim() == 4:
                seen = weights > _HIDDEN
                if not bool((seen == seen[:, :1]).all()):
                    return False
        return True

    def _puts_features_first(self, source: Source) -> bool:
        """Return whether a source merges heads in another order than it splits them."""
        with in_place_of(self.target.module, source.content):
            subject = made(self.target, SEEDS[0], self._kept(SEEDS[0]))
            merged = axes_of_stage(subject, "concat")
        return any(_FEATURES_FIRST in axes for axes in merged)

    @cached_property
    def _stages_before(self) -> dict[str, Tensor]:
        return self.stages(self.source)

    def _changed_stages(self, source: Source) -> int:
        """Return in how many stages an edited source computes other values."""
        before, after = self._stages_before, self.stages(source)
        changed = 0
        for name, tensor in before.items():
            if name in after and not _are_close([tensor], [after[name]]):
                changed += 1
        return changed

    def stages(self, source: Source) -> dict[str, Tensor]:
        """Return the stages of the attentions of a source, by their name and number; none where its forward raises."""
        with in_place_of(self.target.module, source.content):
            return stages_of(made(self.target, SEEDS[0], self._kept(SEEDS[0])))

    def _keeps_sizes(self, edit: Edit, source: Source, failure: Failure) -> bool:
        """Return whether the stages that were computed before a failure have the same sizes, in any order.

        Where something is repeated along another axis they have as many elements.
        """
        after = {}
        for name, tensor in self.stages(source).items():
            _, _, title = name.partition(" ")
            after[title] = tensor
        for stage in failure.completed:
            computed = after.get(stage.name)
            if computed is None or sorted(computed.shape) == sorted(stage.shape):
                continue
            if edit.row != "dim_of_repeat" or computed.numel() != prod(stage.shape):
                return False
        return True

    @cached_property
    def _outputs_before(self) -> list[Tensor]:
        return self.outputs(self.source, SEEDS[0])

    @cached_property
    def _in_use(self) -> set[tuple[str, int]]:
        """The rows of matrices of the original module that have a part in its outputs: with a fix they still have.

        None if they are unknown: it may write into what the gradients need.
        """
        try:
            return self.rows_in_use(self.source)
        except RuntimeError:
            return set()

    def rows_in_use(self, source: Source) -> set[tuple[str, int]]:
        """Return the rows of matrices of a source that have a part in its outputs; biases do not count."""
        with in_place_of(self.target.module, source.content):
            return rows_in_use(made(self.target, SEEDS[0], self._kept(SEEDS[0])))

    def _keeps_output(self, outputs: list[Tensor], check: str) -> bool:
        """Return whether the outputs have the shapes of the original, and its values if the problem is elsewhere."""
        before = self._outputs_before
        if check == "cache":  # what is kept for the next call may change
            before, outputs = before[:1], outputs[:1]
        if shapes_of(before) != shapes_of(outputs):
            return False
        return check not in _SAME_OUTPUT or _are_close(before, outputs)

    def _is_right_elsewhere(self, source: Source, after: Judged) -> bool:
        """Return whether it is right with other weights and inputs too, and runs in training mode."""
        for seed in SEEDS[1:]:
            other = self.judge(source, seed)
            if other.failure is not None or other.checks - after.checks:
                return False
        training = self.outputs(source, SEEDS[0], training=True)
        return shapes_of(training) == shapes_of(self.outputs(source, SEEDS[0]))


def _is_of_a_guess(failure: Failure | None) -> bool:
    """Return whether a forward raises because of an input that was guessed or left out."""
    return failure is not None and failure.cause is not None and failure.cause.name == "guessed_input"


def _changes(trial: Trial) -> tuple[int, int, int]:
    """Return how much an edit leaves wrong, changes of the stages, and of the source: the least is the best."""
    return len(trial.judged.problems), trial.changed_stages, len(trial.edit.replacements)


def _first_problem(judged: Judged) -> tuple[str, str]:
    """Return the check that found the first problem, and its line."""
    if judged.failure is not None:
        return RAISES, judged.failure.source
    finding: Finding = judged.problems[0]
    return finding.check, finding.source


def _is_better(before: Judged, after: Judged, check: str) -> bool:
    """Return whether a problem is gone, no finding is new, what passed passes, and the facts beside it are the same."""
    if after.report is None or after.failure is not None:
        return False
    if any(fact.name == _WITHIN_TOKEN for fact in after.report.facts):
        return False
    if before.report is None:
        has_passed = {passed.check for passed in after.report.passed}
        suspected = after.checks - _SUSPECTED_ANYWAY
        return not after.problems and not suspected and has_passed >= _OF_EVERY_ATTENTION
    if check in {finding.check for finding in after.problems} or after.checks - before.checks:
        return False
    passed = {passed.check for passed in after.report.passed}
    lost = {passed.check for passed in before.report.passed} - passed
    if check not in passed or lost - _MAY_BE_SKIPPED.get(check, set()):
        return False
    return _facts_beside(before.report, check) <= _facts_beside(after.report, check)


def _facts_beside(report: CheckReport, check: str) -> set[str]:
    """Return the facts that a finding of a check does not concern."""
    facts = set()
    for fact in report.facts:
        may_change = check in _MAY_CHANGE.get(fact.name, ())
        if not may_change and fact.name != _WITHIN_TOKEN:
            facts.add(f"{fact.name}: {fact.sentence}")
    return facts


def _together(single: Sequence[Edit]) -> Iterator[Edit]:
    """Yield edits of several places: those of one row everywhere, and two of them."""
    by_row: dict[str, list[Edit]] = {}
    for edit in single:
        by_row.setdefault(edit.row, []).append(edit)
    everywhere = []
    for row, of_row in by_row.items():
        if len(of_row) > 1:
            everywhere.append(_joined(row, of_row))
    yield from everywhere
    for pairs in (combinations(single, 2), product(everywhere, single)):
        for one, other in islice(pairs, _MOST_TOGETHER):
            yield _joined(f"{one.row} and {other.row}", (one, other))


def _call_written_by(edit: Edit, source: Source) -> str:
    """Return the call that an edit of one place makes: `k.transpose(-2, -1)`, `.reshape(`; empty if it is none."""
    if len(edit.replacements) != 1:
        return ""
    (replacement,) = edit.replacements
    before = _CALL_BEFORE.findall(source.text(0, replacement.start))
    after = _CALL_AFTER.match(source.text(replacement.end, len(source.content)))
    call = "".join(before[:1]) + replacement.text + (after.group() if after else "")
    return call if "(" in call else ""


def _joined(row: str, parts: Iterable[Edit]) -> Edit:
    replacements = [replacement for edit in parts for replacement in edit.replacements]
    return Edit(row, tuple(replacements), cost=1 + len(replacements))


def _are_close(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Return whether tensors are equal up to rounding."""
    if shapes_of(left) != shapes_of(right):
        return False
    for one, other in zip(left, right, strict=True):
        tolerance = 1e-4 if one.dtype in (torch.float32, torch.float64) else 1e-2
        if not torch.allclose(one.double(), other.double(), tolerance, tolerance, equal_nan=True):
            return False
    return True
