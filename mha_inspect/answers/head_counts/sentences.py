"""What compare-heads says in words, from what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from ...reports.compare_heads import HeadCount
from ...targets.spec import AttentionSpec
from ...text import listed, multiple, percent, plural
from .runs import Walk
from .weights import Carried

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_HEADS = ("q_heads", "k_heads", "v_heads")


def reason(base: AttentionSpec, spec: AttentionSpec, walk: Walk, count: HeadCount, carried: Carried, cause: str) -> str:
    """Why this head count's output differs from the baseline's, or does not, in one sentence.

    Args:
        base: the baseline's spec.
        spec: this head count's.
        walk: what the stages have been found to hold.
        count: the row of the report, its verdict in it.
        carried: what became of the baseline's weights.
        cause: why all outputs must be equal, in a few words; empty where nothing says that they must.
    """
    if walk.first is None:
        if count.verdict == "differs":
            return "No stage that can be compared differs before the output itself."
        where = f" in the {walk.looked_at} queries that were looked at" if walk.looked_at else ""
        return f"Every stage holds the same numbers{where}{f': {cause}' if cause else ''}."
    parts = [f"{_same(walk.same)}; "] if walk.same else []
    parts.append(f"{walk.first} {'differ' if walk.first.endswith('s') else 'differs'}")
    parts.append(f": {_how(base, spec, walk, carried)}")
    if count.verdict != "differs":
        parts.append(f"; {_how_it_ends(walk, count, cause)}")
    return "".join(parts) + "."


def _same(stages: Sequence[str]) -> str:
    """`q_proj, k_proj, v_proj and the split hold the same numbers`."""
    named = [stage for stage in stages if stage not in _HEADS]
    if set(_HEADS) <= set(stages):
        named.insert(sum(stage in _PROJECTIONS for stage in named), "the split")
    else:
        named = list(stages)
    return f"{listed(named)} {'hold' if len(named) > 1 else 'holds'} the same numbers"


def _how(base: AttentionSpec, spec: AttentionSpec, walk: Walk, carried: Carried) -> str:
    if walk.first in ("scores", "masked_scores"):
        return f"{_sums(spec)} instead of {_sums(base)}"
    if not carried.same:
        change = _about(walk.first or "", carried.changes)
        return f"{change}{f', so it is {walk.note}' if walk.note else ''}"
    if spec.rope and walk.first in _HEADS:
        return f"positions turn the features within {_split(spec)} instead of {_of(base)}"
    return walk.note or f"{_split(spec)} features instead of {_of(base)}"


def _about(stage: str, changes: Sequence[str]) -> str:
    """The change of the weights that a stage is made with, or the first that there is."""
    letter = stage[0]
    return next((change for change in changes if change[2:3] == letter), changes[0])


def _sums(spec: AttentionSpec) -> str:
    width = int(spec.head_dim)
    number = f"{spec.num_heads} sums" if spec.num_heads > 1 else "1 sum"
    return f"{number} over {width} {'feature' if width == 1 else 'features'}{' each' if spec.num_heads > 1 else ''}"


def _split(spec: AttentionSpec) -> str:
    return f"{plural(spec.num_heads, 'head')} of {int(spec.head_dim)}"


def _of(spec: AttentionSpec) -> str:
    return f"{spec.num_heads} of {int(spec.head_dim)}"


def _how_it_ends(walk: Walk, count: HeadCount, cause: str) -> str:
    if count.verdict == "inconclusive":
        return f"the outputs are {count.times_noise:.2g} times the rounding error apart, too close to tell"
    because = f", because {cause}" if cause else ""
    if walk.rejoined is None:
        return f"the output is the same all the same{because}"
    return f"from {walk.rejoined} on the numbers are the same again{because}"


def answer(counts: Sequence[HeadCount], carried: Sequence[Carried], *, all_nan: bool = False) -> tuple[str, str]:
    """Whether the number of heads changes the output, and whether it changes the parameters."""
    if all_nan:
        about_output = "It cannot be told from this input: the output is NaN throughout, for every head count."
    else:
        about_output = _about_output(counts, all(one.same for one in carried))
    return about_output, about_parameters(counts, carried)


def _about_output(counts: Sequence[HeadCount], same_weights: bool) -> str:
    base, others = counts[0], counts[1:]
    baseline = plural(base.num_heads, "head")
    if not others:
        return f"It cannot be told: {baseline} alone were run, and there is nothing to compare with."
    given = "the same weights and the same input" if same_weights else "the same input and what weights can be the same"
    differing = [count for count in others if count.verdict == "differs"]
    unsure = [count for count in others if count.verdict == "inconclusive"]
    if not differing and not unsure:
        by = "to the bit" if all(count.max_abs_difference == 0 for count in others) else "within rounding"
        return f"No: with {given} the output is the same for {_heads_of(counts)}, {by}."
    if not differing:
        return (
            f"It cannot be told: with {given} the output of {_heads_of(unsure)} is within 10 times the rounding error."
        )
    furthest = max(differing, key=lambda count: count.relative_difference)
    text = (
        f"Yes: with {given} the output of {_heads_of(differing)} differs from that of {baseline}, "
        f"by up to {percent(furthest.relative_difference)} and by up to "
        f"{multiple(max(c.times_noise for c in differing))} times the rounding error"
    )
    rest = [count for count in others if count.verdict == "same"]
    if rest:
        text += f"; that of {_heads_of(rest)} is the same"
    if unsure:
        text += f"; that of {_heads_of(unsure)} is too close to tell"
    return f"{text}."


def about_parameters(counts: Sequence[HeadCount], carried: Sequence[Carried]) -> str:
    """Whether the parameters are the same numbers, and what changes where they are not."""
    changed = [(count, one) for count, one in zip(counts, carried, strict=True) if not one.same]
    if not changed:
        return (
            f"The parameters are the same {counts[0].numel:,} numbers for every head count; only which of them belong "
            "to which head changes."
        )
    count, one = changed[0]
    numbers = listed([f"{c.numel:,} with {plural(c.num_heads, 'head')}" for c in counts])
    same = f"; {listed(one.carried)} {'are' if len(one.carried) > 1 else 'is'} the same" if one.carried else ""
    few = ", ".join(one.changes[:3])
    return (
        f"The weights cannot be the same, for the head count changes the parameters ({numbers}): with "
        f"{plural(count.num_heads, 'head')} {few}{same}."
    )


def _heads_of(counts: Sequence[HeadCount]) -> str:
    numbers = listed([str(count.num_heads) for count in counts])
    return f"{numbers} {'head' if numbers == '1' else 'heads'}"
