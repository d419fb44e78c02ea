"""Common mistakes behind failing calls, found from the operands and never guessed from a name.

First what an earlier line shows (`earlier/`), then a grammar of edits of the failing call: each is tried on the real
call, and of those that run the best are reported. To add one, yield it in the file of its kind, and name its cause in
`CAUSES`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from .. import text
from ..reports.trace import Cause
from .earlier import arguments, parts, positions
from .edit import Edit, runs, sentence
from .factors import edits_of_factors
from .facts import Facts, Operand
from .layers import edits_of_features, edits_of_sequences
from .masks import edits_of_masks
from .meeting import conflicts
from .values import edits_of_dtypes, edits_of_joins, edits_of_numbers, edits_of_tables
from .views import edits_of_views

CAUSES = (
    "guessed_input",
    "argument_is_none",
    "index_out_of_range",
    "wrong_rank",
    "no_room",
    "cut_over_ranks",
    "number_too_large",
    "mixed_devices",
    "mask_dtype",
    "mixed_dtypes",
    "heads_not_joined",
    "weight_not_transposed",
    "features_not_last",
    "wrong_width",
    "batch_and_sequence_swapped",
    "batch_differs",
    "lengths_differ",
    "mask_rank",
    "heads_not_transposed",
    "mask_transposed",
    "mask_size",
    "heads_not_split",
    "key_not_transposed",
    "value_transposed",
    "axes_out_of_order",
    "heads_not_repeated",
    "heads_differ",
    "head_dim_differs",
    "not_contiguous",
    "heads_do_not_divide",
    "wrong_head_dim",
    "norm_of_whole",
    "table_transposed",
    "lacks_an_axis",
    "table_size",
    "view_sizes",
    "unequal_parts",
    "output_rows",
    "joined_along_another",
)
"""The name of each cause."""

_EARLIER: tuple[Callable[[Facts], Edit | None], ...] = (
    arguments.unpacked_rank,
    arguments.argument_is_none,
    arguments.rank_of_convolution,
    arguments.pattern_of_einops,
    positions.split_positions,
    parts.equal_parts,
    parts.rows_of_output,
    parts.cut_over_ranks,
)
"""What an earlier line or the call of the forward shows, before the failing call is edited."""

_EDITS: tuple[Callable[[Facts], Iterator[Edit]], ...] = (
    edits_of_dtypes,
    edits_of_numbers,
    edits_of_tables,
    edits_of_sequences,
    edits_of_masks,
    edits_of_features,
    edits_of_factors,
    edits_of_views,
    edits_of_joins,
)
"""The grammar: what the operands of a call may be made into, each limited to their roles."""

_OF_WIDTHS = ("heads_do_not_divide", "wrong_head_dim", "wrong_width", "heads_not_joined", "view_sizes", "table_size")
"""Causes that a width of the inputs may have."""


_OF_SHAPES = ("RuntimeError", "ValueError", "IndexError", "AssertionError", "EinopsError")
"""Errors that a shape or a dtype may raise: a name that a module lacks is no fault of its inputs."""


@dataclass(frozen=True)
class Guesses:
    """What was guessed of the inputs of a forward."""

    names: Collection[str] = ()
    """Inputs whose shape was guessed, or that were left None."""
    width: int = 0
    """The width of them that was drawn because nothing in the module shows it; 0 if none was."""


NO_GUESSES = Guesses()


def find_cause(facts: Facts, guesses: Guesses = NO_GUESSES) -> Cause | None:
    """Return the cause that the facts show, with the edits that run; None if there is none.

    A shape that was guessed is not the user's mistake: the fix is to give it.
    """
    suspects = _suspects(facts)
    suspect = suspects[0] if suspects else None
    drawn = _input_of_drawn_width(facts, guesses.width)
    is_of_width = suspect is not None and suspect.cause in _OF_WIDTHS
    if drawn and is_of_width and any(o.shape[-1:] == (guesses.width,) for o in facts.operands):
        assert suspect is not None
        what = f"The width {guesses.width} was chosen by mha-inspect: nothing in the module shows it."
        way = f"Give the width: --input-shape {drawn}=2x10x512 with its own sizes."
        return Cause(suspect.cause, f"{suspect.why} {what}", way)
    if suspect is not None and suspect.cause == "argument_is_none" and facts.missing[0] in guesses.names:
        name = facts.missing[0]
        said = f"{name} was not given, so it is None, and this line uses it as a tensor."
        return Cause("guessed_input", said, f"Give {name}: --input-shape {name}=SIZES:DTYPE, or --input FILE.")
    guessed = _guessed_operand(facts, suspect, guesses.names)
    if guessed is not None:
        name, operand = guessed
        dtype = operand.dtype.removeprefix("torch.")
        said = f"{name} was guessed to be {dtype} {text.shape(operand.shape)}, and this line takes another."
        if suspect is not None:
            said += f" With such an input: {suspect.why}"
        way = f"Give its shape: --input-shape {name}=SIZES:{dtype}."
        if "ndarray" in facts.message:
            way = f"Give an array: let a function return the module with its inputs, (module, ({name},))."
        return Cause("guessed_input", said, way)
    if suspect is None:
        return None
    return Cause(suspect.cause, suspect.why, sentence(suspects))


def _suspects(facts: Facts) -> list[Edit]:
    """Return the edits that explain the failure: what an earlier line shows, else those of the call that are best.

    Edits are tried in the order of how well the names of the axes then meet, then of how far they are from the code.
    Those that are equally good are all returned, and what no edit mends is only said.
    """
    for judge in _EARLIER:
        earlier = judge(facts)
        if earlier is not None:
            tried = (
                earlier if not earlier.is_tried or runs(facts.call, earlier) else replace(earlier, way="", changes=())
            )
            return [tried]
    ranked: dict[tuple[bool, int, int], list[Edit]] = defaultdict(list)
    for edits in _EDITS:
        for edit in edits(facts):
            dims = {change.operand: change.dims for change in edit.changes}
            differing = conflicts(facts, dims)
            if differing and dims:
                continue  # an edit that merely runs: axes of other names would meet
            ranked[not edit.is_tried, differing, edit.cost].append(edit)
    for rank in sorted(ranked):
        running = [edit for edit in ranked[rank] if not edit.is_tried or runs(facts.call, edit)]
        if running:
            return [edit for edit in running if edit.cause == running[0].cause]
    return []


def _guessed_operand(facts: Facts, suspect: Edit | None, guessed: Collection[str]) -> tuple[str, Operand] | None:
    """Return the guessed input that the failing line reads as it came in, and the operand that it is.

    None if there is none, or several: two inputs that were guessed alike clash by what the module does. None also if
    what must change is another operand.
    """
    if suspect is None and not _may_be_of_input(facts):
        return None
    inputs = {named.tensor.id: named.name for named in facts.reached.graph.recording.inputs if named.name in guessed}
    found: list[tuple[str, Operand]] = []
    for operand in facts.operands:
        name = _input_behind(facts, operand, inputs)
        if name:
            found.append((name, operand))
    if len(found) != 1:
        return None
    edited = [change.operand for change in suspect.changes] if suspect is not None else []
    if any(operand is not found[0][1] for operand in edited):
        return None
    return found[0]


def _may_be_of_input(facts: Facts) -> bool:
    """Return whether an error without a cause may be about an input: its shape, its dtype, or that it is a tensor."""
    if facts.error in _OF_SHAPES:
        return True
    return facts.error == "TypeError" and "Tensor" in facts.message


def _input_behind(facts: Facts, operand: Operand, inputs: Mapping[int, str]) -> str:
    """Return the name of the input that an operand is, or is a view of; empty if it is computed."""
    for step, _ in facts.reached.steps_back(operand.given.tensor):
        if step.id in inputs:
            return inputs[step.id]
    return ""


def _input_of_drawn_width(facts: Facts, drawn_width: int) -> str:
    """Return the name of the first input of this width; empty if there is none."""
    for named in facts.reached.graph.recording.inputs:
        if named.tensor.shape[-1:] == (drawn_width,):
            return named.name
    return ""
