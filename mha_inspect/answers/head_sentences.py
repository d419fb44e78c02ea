"""Write the sentences of compare-heads from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from ..reports.common import Verdict
from ..reports.compare_heads import HeadCount
from ..text import listed, multiple, percent, plural

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_HEADS = ("q_heads", "k_heads", "v_heads")


class Change(NamedTuple):
    """A weight that another head count changes."""

    sentence: str
    """`W_k [32, 64] becomes [16, 64]`."""
    part: str = ""
    """`W_k`; empty for a parameter that belongs to no projection."""


class CopiedWeights(NamedTuple):
    """The baseline's weights that a module with another head count could take, and the changes of the others."""

    same: bool
    """Whether all weights equal the baseline's."""
    copied: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


class StageWalk(NamedTuple):
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


Pieces = tuple[str, str, str, str]
"""A reason in pieces: its start, the sizes of this head count, the same in brief, its end."""


def reason(base: HeadCount, count: HeadCount, walk: StageWalk, copied: CopiedWeights) -> Pieces:
    """Return why this head count's output differs from the baseline's, or does not, in pieces.

    Start, sizes and end make the sentence. Where only the sizes differ, several head counts share start and end.
    """
    if walk.first is None and walk.unnamed:
        names = ", ".join(walk.unnamed)
        return f"All compared stages are identical. Not compared, because an axis has no name: {names}.", "", "", ""
    if walk.first is None:
        if count.verdict == "differs":
            return "All compared stages are identical; only the output itself differs.", "", "", ""
        return "Every stage is identical.", "", "", ""
    text = f"{_same(walk.same)}; " if walk.same else ""
    text += f"{walk.first} {'differ' if walk.first.endswith('s') else 'differs'}: "
    start, sizes, brief, end = _how(base, count, walk, copied)
    if count.verdict != "differs":
        end += f"; {_how_it_ends(walk, count)}"
    return f"{text}{start}", sizes, brief, f"{end}."


def _same(stages: Sequence[str]) -> str:
    """Return `q_proj, k_proj, v_proj and the split are identical`."""
    named = list(stages)
    if set(_HEADS) <= set(stages):
        named = [stage for stage in stages if stage not in _HEADS]
        projections = [stage for stage in named if stage in _PROJECTIONS]
        named.insert(len(projections), "the split")
    return f"{listed(named)} {'are' if len(named) > 1 else 'is'} identical"


def _how(base: HeadCount, count: HeadCount, walk: StageWalk, copied: CopiedWeights) -> Pieces:
    """Return how a stage differs, in pieces."""
    if walk.first in ("scores", "masked_scores"):
        return _features_used(base, count)
    if not copied.same:
        so = f", so it is {walk.note}" if walk.note else ""
        return "", "", "", f"{_change_of(walk.first or '', copied).sentence}{so}"
    is_rotated = walk.rotated and walk.first in _HEADS
    if walk.note and not is_rotated:
        return "", "", "", walk.note
    start = "positions rotate the features within " if is_rotated else ""
    sizes = f"{plural(count.num_heads, 'head')} of {plural(count.head_dim, 'feature')}"
    brief, instead = f"{count.num_heads} of {count.head_dim}", f" instead of {base.num_heads} of {base.head_dim}"
    return start, sizes, brief, instead


def _change_of(stage: str, copied: CopiedWeights) -> Change:
    """Return the change of the weights that a stage is computed with, of W_k for `k_proj`; else the first change."""
    for change in copied.changes:
        if change.part[2:] == stage[:1]:
            return change
    return copied.changes[0]


def _features_used(base: HeadCount, count: HeadCount) -> Pieces:
    """Return `2 heads use 256 features each; 1 head uses all 512`, in pieces."""
    every = "all " if base.num_heads * base.head_dim == count.num_heads * count.head_dim else ""
    end = f"; the baseline's {base.num_heads} use {base.head_dim}"
    if base.num_heads == 1:
        end = f"; 1 head uses {every}{base.head_dim}"
    if count.num_heads == 1:
        return "", f"1 head uses {every}{plural(count.head_dim, 'feature')}", f"1 uses {count.head_dim}", end
    brief = f"{count.num_heads} use {count.head_dim}"
    return "", f"{count.num_heads} heads use {plural(count.head_dim, 'feature')} each", brief, end


def _how_it_ends(walk: StageWalk, count: HeadCount) -> str:
    if count.verdict == "inconclusive":
        return f"the outputs differ by {count.times_noise:.2g} times the rounding error, too little to be sure"
    if walk.rejoined is None:
        return "the output is the same anyway"
    return f"from {walk.rejoined} on, the numbers are the same again"


def answer(counts: Sequence[HeadCount], copied: Sequence[CopiedWeights], *, all_nan: bool = False) -> tuple[str, str]:
    """Return whether the number of heads changes the output, and whether it changes the parameters."""
    if all_nan:
        about_output = "Undecided: with this input, the output of every head count is NaN throughout."
    else:
        about_output = _about_output(counts, all(weights.same for weights in copied))
    return about_output, _about_parameters(counts, copied)


def _about_output(counts: Sequence[HeadCount], same_weights: bool) -> str:
    """Return whether the outputs of the head counts differ from that of the first, the baseline."""
    baseline = plural(counts[0].num_heads, "head")
    if len(counts) == 1:
        return f"Undecided: only one head count was given ({baseline}). Give two or more to compare."
    given = "the same weights and input" if same_weights else "the same input, and the same weights where shapes allow"
    by_verdict: dict[Verdict, list[HeadCount]] = {"same": [], "inconclusive": [], "differs": []}
    for count in counts[1:]:
        by_verdict[count.verdict].append(count)
    same, unsure, differing = by_verdict["same"], by_verdict["inconclusive"], by_verdict["differs"]
    if not differing and not unsure:
        is_exact = all(count.max_abs_difference == 0 for count in counts[1:])
        by = "bit for bit" if is_exact else "within rounding"
        return f"No: with {given}, {_heads_of(counts)} give the same output, {by}."
    if not differing:
        return f"Undecided: with {given}, the output of {_heads_of(unsure)} is within 10 times the rounding error."
    largest = max(count.relative_difference for count in differing)
    if not isfinite(largest):
        return f"Yes: with {given}, the outputs of {_heads_of(counts)} have NaN or inf in different places."
    times_noise = max(count.times_noise for count in differing)
    text = (
        f"Yes: with {given}, the output of {_heads_of(differing)} differs from that of {baseline}. "
        f"The difference is up to {percent(largest)}, "
        f"{multiple(times_noise)} times the rounding error."
    )
    if same:
        text += f" The output of {_heads_of(same)} is the same."
    if unsure:
        text += f" The difference of {_heads_of(unsure)} is too small to be sure."
    return text


def _about_parameters(counts: Sequence[HeadCount], copied: Sequence[CopiedWeights]) -> str:
    """Return whether all head counts have the same parameters; if not, how the first other one changes them."""
    for count, weights in zip(counts, copied, strict=True):
        if not weights.same:
            return _changed_parameters(counts, count, weights)
    return f"Every head count uses the same {counts[0].numel:,} parameters, only split differently."


def _changed_parameters(counts: Sequence[HeadCount], count: HeadCount, weights: CopiedWeights) -> str:
    """Return the parameters of all head counts, and the weights that change with this one."""
    numbers = listed([f"{column.numel:,} with {plural(column.num_heads, 'head')}" for column in counts])
    changes = ", ".join(change.sentence for change in weights.changes[:3])
    same = ""
    if weights.copied:
        same = f". {listed(weights.copied)} {'stay' if len(weights.copied) > 1 else 'stays'} the same"
    return (
        f"The head count changes the parameters: {numbers}. Not all weights can be the same. "
        f"With {plural(count.num_heads, 'head')}, {changes}{same}."
    )


def _heads_of(counts: Sequence[HeadCount]) -> str:
    numbers = listed([str(count.num_heads) for count in counts])
    return f"{numbers} {'head' if numbers == '1' else 'heads'}"
