"""What compare-heads says in words, from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from ..reports.compare_heads import HeadCount
from ..text import listed, multiple, percent, plural

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_HEADS = ("q_heads", "k_heads", "v_heads")


class Change(NamedTuple):
    """A weight that cannot be the same."""

    sentence: str
    """`W_k [32, 64] becomes [16, 64]`."""
    part: str = ""
    """`W_k`; empty for a parameter that belongs to no projection."""


class CarriedWeights(NamedTuple):
    """Whether a module with another head count holds the baseline's numbers and no others, which, and what changes."""

    same: bool
    went: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


class Walk(NamedTuple):
    """The stages of two head counts side by side, in order, in the first attention in which one differs."""

    same: tuple[str, ...] = ()
    first: str | None = None
    """The first whose content differs; those before it are the same."""
    note: str = ""
    """Why it could not be subtracted, where the shapes differ."""
    rejoined: str | None = None
    """The stage after it from which on everything is the same again."""
    unnamed: tuple[str, ...] = ()
    """Stages that could not be compared, for an axis of them has no name."""
    turned: bool = False
    """Whether positions turn the features of each head (RoPE)."""


def reason(base: HeadCount, count: HeadCount, walk: Walk, carried: CarriedWeights) -> tuple[str, str, str]:
    """Return why this head count's output differs from the baseline's, or does not, in one sentence of three pieces.

    The second tells the sizes of this head count, where there is such a piece: the others may be those of all.
    """
    if walk.first is None and walk.unnamed:
        names = ", ".join(walk.unnamed)
        text = f"All that can be compared holds the same numbers; not compared, for an axis has no name: {names}."
        return text, "", ""
    if walk.first is None:
        if count.verdict == "differs":
            return "No stage that can be compared differs before the output itself.", "", ""
        return "Every stage holds the same numbers.", "", ""
    text = f"{_same(walk.same)}; " if walk.same else ""
    text += f"{walk.first} {'differ' if walk.first.endswith('s') else 'differs'}: "
    sizes, rest = _how(base, count, walk, carried)
    if count.verdict != "differs":
        rest += f"; {_how_it_ends(walk, count)}"
    return text, sizes, f"{rest}."


def _same(stages: Sequence[str]) -> str:
    """Return `q_proj, k_proj, v_proj and the split hold the same numbers`."""
    named = [stage for stage in stages if stage not in _HEADS]
    if set(_HEADS) <= set(stages):
        named.insert(sum(stage in _PROJECTIONS for stage in named), "the split")
    else:
        named = list(stages)
    return f"{listed(named)} {'hold' if len(named) > 1 else 'holds'} the same numbers"


def _how(base: HeadCount, count: HeadCount, walk: Walk, carried: CarriedWeights) -> tuple[str, str]:
    """Return how a stage differs: the sizes of this head count, where it is them, and the rest."""
    if walk.first in ("scores", "masked_scores"):
        return _sums(count), f" instead of {_sums(base)}"
    if not carried.same:
        # The change of the weights that the stage is made with, or the first that there is.
        letter = (walk.first or "")[:1]
        change = next((change for change in carried.changes if change.part[2:] == letter), carried.changes[0])
        return "", f"{change.sentence}{f', so it is {walk.note}' if walk.note else ''}"
    split = f"{plural(count.num_heads, 'head')} of {plural(count.head_dim, 'feature')}"
    instead = f" instead of {base.num_heads} of {base.head_dim}"
    if walk.turned and walk.first in _HEADS:
        return f"positions turn the features within {split}", instead
    return ("", walk.note) if walk.note else (split, instead)


def _sums(count: HeadCount) -> str:
    each = " each" if count.num_heads > 1 else ""
    return f"{plural(count.num_heads, 'sum')} over {plural(count.head_dim, 'feature')}{each}"


def _how_it_ends(walk: Walk, count: HeadCount) -> str:
    if count.verdict == "inconclusive":
        return f"the outputs are {count.times_noise:.2g} times the rounding error apart, too close to tell"
    if walk.rejoined is None:
        return "the output is the same all the same"
    return f"from {walk.rejoined} on the numbers are the same again"


def answer(counts: Sequence[HeadCount], carried: Sequence[CarriedWeights], *, all_nan: bool = False) -> tuple[str, str]:
    """Return whether the number of heads changes the output, and whether it changes the parameters."""
    if all_nan:
        about_output = "It cannot be told from this input: the output is NaN throughout, for every head count."
    else:
        about_output = _about_output(counts, all(weights.same for weights in carried))
    return about_output, _about_parameters(counts, carried)


def _about_output(counts: Sequence[HeadCount], same_weights: bool) -> str:
    others, baseline = counts[1:], plural(counts[0].num_heads, "head")
    if not others:
        return f"It cannot be told: {baseline} alone were run, and there is nothing to compare with."
    given = "the same weights and the same input" if same_weights else "the same input and what weights can be the same"
    differing, unsure, rest = (
        [count for count in others if count.verdict == verdict] for verdict in ("differs", "inconclusive", "same")
    )
    if not differing and not unsure:
        by = "to the bit" if all(count.max_abs_difference == 0 for count in others) else "within rounding"
        return f"No: with {given} the output is the same for {_heads_of(counts)}, {by}."
    if not differing:
        within = f"the output of {_heads_of(unsure)} is within 10 times the rounding error"
        return f"It cannot be told: with {given} {within}."
    furthest = max(differing, key=lambda count: count.relative_difference)
    if not isfinite(furthest.relative_difference):
        return f"Yes: with {given} the outputs of {_heads_of(counts)} are not finite in the same places."
    text = (
        f"Yes: with {given} the output of {_heads_of(differing)} differs from that of {baseline}, "
        f"by up to {percent(furthest.relative_difference)} and by up to "
        f"{multiple(max(c.times_noise for c in differing))} times the rounding error"
    )
    if rest:
        text += f"; that of {_heads_of(rest)} is the same"
    if unsure:
        text += f"; that of {_heads_of(unsure)} is too close to tell"
    return f"{text}."


def _about_parameters(counts: Sequence[HeadCount], carried: Sequence[CarriedWeights]) -> str:
    changed = [(count, weights) for count, weights in zip(counts, carried, strict=True) if not weights.same]
    if not changed:
        return (
            f"The parameters are the same {counts[0].numel:,} numbers for every head count; only which of them belong "
            "to which head changes."
        )
    count, weights = changed[0]
    numbers = listed([f"{c.numel:,} with {plural(c.num_heads, 'head')}" for c in counts])
    same = f"; {listed(weights.went)} {'are' if len(weights.went) > 1 else 'is'} the same" if weights.went else ""
    return (
        f"The weights cannot be the same, for the head count changes the parameters ({numbers}): with "
        f"{plural(count.num_heads, 'head')} {', '.join(change.sentence for change in weights.changes[:3])}{same}."
    )


def _heads_of(counts: Sequence[HeadCount]) -> str:
    numbers = listed([str(count.num_heads) for count in counts])
    return f"{numbers} {'head' if numbers == '1' else 'heads'}"
