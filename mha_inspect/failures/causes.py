"""Common mistakes behind failing calls, found from the operands and never guessed from a name.

A cause is a function of the facts in `_JUDGES`, in the file of its kind. It returns a `Suspect`, or None if the facts
show another mistake: what is wrong, with the real numbers, and what to write instead, with the edit of the operands
that it stands for. To add one, write it there, name it in `CAUSES`, and give it a place in `_JUDGES`: the first suspect
is reported, with the fixes with which the failing call runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from .. import text
from ..reports.trace import Cause
from . import arguments, dtypes, masks, products, sequences, tables, views, widths
from .edits import mismatch_with_edit
from .facts import Facts, Operand
from .large_numbers import number_too_large
from .norms import norm_of_whole
from .position_tables import transposed_table
from .positions import split_positions
from .suspect import Suspect
from .tried import fix_that_runs

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
)
"""The name of each cause."""

_JUDGES: tuple[Callable[[Facts], Suspect | None], ...] = (
    # What the line is given, before what it computes.
    arguments.unpacked_rank,
    arguments.argument_is_none,
    arguments.rank_of_convolution,
    split_positions,
    norm_of_whole,
    transposed_table,
    tables.index_out_of_range,
    tables.no_room,
    # Dtypes before widths: a call of torch looks at them first.
    dtypes.mixed_devices,
    number_too_large,
    dtypes.mask_of_integers,
    dtypes.mask_of_another_dtype,
    dtypes.integers_for_numbers,
    dtypes.mixed_dtypes,
    # The width of an input.
    widths.heads_without_name,
    widths.heads_not_joined,
    widths.weight_not_transposed,
    widths.features_not_last,
    widths.wrong_width,
    # The sequences that a layer of torch is given.
    sequences.batch_and_sequence_swapped,
    sequences.padding_mask_swapped,
    sequences.batch_differs,
    sequences.lengths_differ,
    # A mask that does not fit the scores; its layout before its sizes.
    masks.scores_of_heads,
    masks.padding_mask_size,
    masks.mask_rank,
    masks.mask_transposed,
    masks.mask_of_the_batch,
    masks.mask_size,
    # The factors of a product: their layouts before their sizes.
    products.heads_not_split,
    products.key_reversed,
    products.key_not_transposed,
    products.key_with_heads_swapped,
    products.heads_of_equation,
    products.heads_not_transposed,
    products.heads_of_factors,
    products.batch_differs,
    products.head_dim_differs,
    products.lengths_differ,
    # Views, and what only an edit explains.
    views.not_contiguous,
    views.cut_over_ranks,
    views.heads_do_not_divide,
    views.wrong_head_dim,
    views.batch_differs,
    views.einops_does_not_divide,
    mismatch_with_edit,
)
"""A function a cause, in the order in which they are asked."""

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
    """Return the first cause that the facts show, with the fixes that run; None if there is none.

    A shape that was guessed is not the user's mistake: the fix is to give it.
    """
    suspect = _first_suspect(facts)
    drawn = _input_of_drawn_width(facts, guesses.width)
    is_of_width = suspect is not None and suspect.name in _OF_WIDTHS
    if drawn and is_of_width and any(o.shape[-1:] == (guesses.width,) for o in facts.operands):
        assert suspect is not None
        what = f"The width {guesses.width} was chosen by mha-inspect: nothing in the module shows it."
        way = f"Give the width: --input-shape {drawn}=2x10x512 with its own sizes."
        return Cause(suspect.name, f"{suspect.explanation} {what}", way)
    if suspect is not None and suspect.name == "argument_is_none" and facts.missing[0] in guesses.names:
        name = facts.missing[0]
        said = f"{name} was not given, so it is None, and this line uses it as a tensor."
        return Cause("guessed_input", said, f"Give {name}: --input-shape {name}=SIZES:DTYPE, or --input FILE.")
    guessed = _guessed_operand(facts, suspect, guesses.names)
    if guessed is not None:
        name, operand = guessed
        dtype = operand.dtype.removeprefix("torch.")
        said = f"{name} was guessed to be {dtype} {text.shape(operand.shape)}, and this line takes another."
        if suspect is not None:
            said += f" With such an input: {suspect.explanation}"
        way = f"Give its shape: --input-shape {name}=SIZES:{dtype}."
        if "ndarray" in facts.message:
            way = f"Give an array: let a function return the module with its inputs, (module, ({name},))."
        return Cause("guessed_input", said, way)
    if suspect is None:
        return None
    return Cause(suspect.name, suspect.explanation, fix_that_runs(facts.call, suspect.fixes))


def _first_suspect(facts: Facts) -> Suspect | None:
    for judge in _JUDGES:
        suspect = judge(facts)
        if suspect is not None:
            return suspect
    return None


def _guessed_operand(facts: Facts, suspect: Suspect | None, guessed: Collection[str]) -> tuple[str, Operand] | None:
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
    edited = [operand for fix in (suspect.fixes if suspect else ()) for operand, _ in fix.edits]
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
