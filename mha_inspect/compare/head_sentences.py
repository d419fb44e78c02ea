"""Write the sentences of compare-heads from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from ..reports.common import Verdict
from ..reports.compare_heads import HeadCount, ReasonPieces
from ..text import listed, multiple, percent, plural

_HEADS = ("q_heads", "k_heads", "v_heads")


@dataclass(frozen=True)
class Change:
    """A weight that another head count changes."""

    sentence: str
    """`W_k [32, 64] becomes [16, 64]`."""
    part: str = ""
    """`W_k`; empty for a parameter that belongs to no projection."""


@dataclass(frozen=True)
class CopiedWeights:
    """The baseline's weights that a module with another head count could take, and the changes of the others."""

    same: bool
    """Whether all weights equal the baseline's."""
    copied: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class StageWalk:
    """The stages of two head counts side by side, in order, in the first attention in which one differs."""

    same: tuple[str, ...] = ()
    first: str | None = None
    """The first stage whose content differs; all before it are the same."""
    note: str = ""
    """The difference of the shapes, where the stages could not be subtracted."""
    rejoined: str | None = None
    """The later stage from which on every stage is the same again."""
    unnamed: tuple[str, ...] = ()
    """Stages that could not be compared: an axis has no name."""
    rotated: bool = False
    """Whether positions rotate the features of each head (RoPE)."""


def reason(base: HeadCount, count: HeadCount, walk: StageWalk, copied: CopiedWeights) -> ReasonPieces:
    """Return why this head count's output differs from the baseline's, or does not, in pieces.

    Where only the sizes differ, several head counts share start and end.
    """
    if walk.first is None:
        return ReasonPieces(_without_difference(count, walk))
    pieces = _how(base, count, walk, copied)
    differs = "differ" if walk.first.endswith("s") else "differs"
    start = f"{walk.first} {differs}: {pieces.start}"
    if walk.same:
        start = f"{_same(walk.same)}; {start}"
    end = pieces.end
    if count.verdict != "differs":
        end += f"; {_how_it_ends(walk, count)}"
    return pieces._replace(start=start, end=f"{end}.")


def _without_difference(count: HeadCount, walk: StageWalk) -> str:
    """Return a sentence about stages of which none differs."""
    if walk.unnamed:
        names = ", ".join(walk.unnamed)
        return f"All compared stages are identical. Not compared, because an axis has no name: {names}."
    if count.verdict == "differs":
        return "All compared stages are identical; only the output itself differs."
    return "Every stage is identical."


def _same(stages: Sequence[str]) -> str:
    """Return `q_proj, k_proj and v_proj are identical, and are cut into other heads`."""
    names = [stage for stage in stages if stage not in _HEADS]
    if not names:
        return "the numbers of all heads are identical, and are cut into other heads"
    verb = "is" if len(names) == 1 else "are"
    cut = f", and {verb} cut into other heads" if set(_HEADS) <= set(stages) else ""
    return f"{listed(names)} {verb} identical{cut}"


def _how(base: HeadCount, count: HeadCount, walk: StageWalk, copied: CopiedWeights) -> ReasonPieces:
    """Return how a stage differs, in pieces."""
    if walk.first in ("scores", "masked_scores"):
        return _features_used(base, count)
    if not copied.same:
        return ReasonPieces(end=_changed_weights(walk, copied))
    rotated = walk.rotated and walk.first in _HEADS
    if walk.note and not rotated:
        return ReasonPieces(end=walk.note)
    return ReasonPieces(
        start="positions rotate the features within " if rotated else "",
        sizes=f"{plural(count.num_heads, 'head')} of {plural(count.head_dim, 'feature')}",
        brief=f"{count.num_heads} of {count.head_dim}",
        end=f" instead of {base.num_heads} of {base.head_dim}",
    )


def _changed_weights(walk: StageWalk, copied: CopiedWeights) -> str:
    """Return the change of the weights that the stage is computed with; otherwise the first change."""
    letter = (walk.first or "")[:1]
    change = copied.changes[0]
    for candidate in copied.changes:
        if candidate.part[2:] == letter:
            change = candidate
            break
    if walk.note:
        return f"{change.sentence}, so it is {walk.note}"
    return change.sentence


def _features_used(base: HeadCount, count: HeadCount) -> ReasonPieces:
    """Return `2 heads use 256 features each; 1 head uses all 512`, in pieces."""
    has_same_width = base.num_heads * base.head_dim == count.num_heads * count.head_dim
    every = "all " if has_same_width else ""
    end = f"; the baseline's {base.num_heads} use {base.head_dim}"
    if base.num_heads == 1:
        end = f"; 1 head uses {every}{base.head_dim}"
    features = plural(count.head_dim, "feature")
    if count.num_heads == 1:
        return ReasonPieces(
            sizes=f"1 head uses {every}{features}",
            brief=f"1 uses {count.head_dim}",
            end=end,
        )
    return ReasonPieces(
        sizes=f"{count.num_heads} heads use {features} each",
        brief=f"{count.num_heads} use {count.head_dim}",
        end=end,
    )


def _how_it_ends(walk: StageWalk, count: HeadCount) -> str:
    if count.verdict == "inconclusive":
        return f"the outputs differ by {count.times_noise:.2g} times the rounding error, too little to be sure"
    if walk.rejoined is None:
        return "the output is the same anyway"
    return f"from {walk.rejoined} on, the numbers are the same again"


def answer(
    counts: Sequence[HeadCount], copied: Sequence[CopiedWeights], *, own: str = "", all_nan: bool = False
) -> tuple[str, str]:
    """Return whether the number of heads changes the output, and whether it changes the parameters.

    `own` is what a head has of W_q, W_k and W_v for itself, `rows` or `columns`; empty if it is not so of all heads.
    """
    if all_nan:
        about_output = "Undecided: with this input, the output of every head count is NaN throughout."
    else:
        about_output = _about_output(counts, all(weights.same for weights in copied))
    return about_output, _about_parameters(counts, copied, own)


def _about_output(counts: Sequence[HeadCount], same_weights: bool) -> str:
    """Return whether the outputs of the head counts differ from that of the first, the baseline."""
    first, *compared = counts
    baseline = plural(first.num_heads, "head")
    if not compared:
        return f"Undecided: only one head count was given ({baseline}). Give two or more to compare."
    given = "the same weights and input" if same_weights else "the same input, and the same weights where shapes allow"
    differing = _with_verdict("differs", compared)
    unsure = _with_verdict("inconclusive", compared)
    if differing:
        return _difference(counts, differing, unsure, given)
    if unsure:
        return f"Undecided: with {given}, the output of {_heads_of(unsure)} is within 10 times the rounding error."
    are_equal = all(count.max_abs_difference == 0 for count in compared)
    by = "bit for bit" if are_equal else "within rounding"
    return f"No: with {given}, {_heads_of(counts)} give the same output, {by}."


def _with_verdict(verdict: Verdict, counts: Sequence[HeadCount]) -> list[HeadCount]:
    return [count for count in counts if count.verdict == verdict]


def _difference(
    counts: Sequence[HeadCount], differing: Sequence[HeadCount], unsure: Sequence[HeadCount], given: str
) -> str:
    """Return by how much the outputs of these head counts differ from that of the baseline, which is the first."""
    furthest = max(differing, key=lambda count: count.relative_difference)
    if not isfinite(furthest.relative_difference):
        return f"Yes: with {given}, the outputs of {_heads_of(counts)} have NaN or inf in different places."
    baseline = plural(counts[0].num_heads, "head")
    times_noise = max(count.times_noise for count in differing)
    text = (
        f"Yes: with {given}, the output of {_heads_of(differing)} differs from that of {baseline}. "
        f"The difference is up to {percent(furthest.relative_difference)}, "
        f"{multiple(times_noise)} times the rounding error."
    )
    same = _with_verdict("same", counts[1:])
    if same:
        text += f" The output of {_heads_of(same)} is the same."
    if unsure:
        text += f" The difference of {_heads_of(unsure)} is too small to be sure."
    return text


def _about_parameters(counts: Sequence[HeadCount], copied: Sequence[CopiedWeights], own: str) -> str:
    """Return whether all head counts have the same parameters; if not, how the first other one changes them."""
    for count, weights in zip(counts, copied, strict=True):
        if not weights.same:
            return _changed_parameters(counts, count, weights)
    number = f"The parameters are the same in number: {counts[0].numel:,}."
    if not own:
        return number
    return (
        f"The {own} of W_q, W_k and W_v of a head are that head's own projection. "
        f"So the heads differ in what they attend to. {number}"
    )


def _changed_parameters(counts: Sequence[HeadCount], count: HeadCount, weights: CopiedWeights) -> str:
    """Return the parameters of all head counts, and the weights that change with this one."""
    numbers = listed([f"{column.numel:,} with {plural(column.num_heads, 'head')}" for column in counts])
    changes = ", ".join(change.sentence for change in weights.changes[:3])
    same = ""
    if weights.copied:
        verb = "stays" if len(weights.copied) == 1 else "stay"
        same = f". {listed(weights.copied)} {verb} the same"
    return (
        f"The head count changes the parameters: {numbers}. Not all weights can be the same. "
        f"With {plural(count.num_heads, 'head')}, {changes}{same}."
    )


def _heads_of(counts: Sequence[HeadCount]) -> str:
    numbers = listed([str(count.num_heads) for count in counts])
    return f"{numbers} {'head' if numbers == '1' else 'heads'}"
