"""Common mistakes behind failing calls, found from the operands and never guessed from a name.

A cause is a function of the facts in `_JUDGES`, in the file of its kind. It returns a `Suspect`, or None if the facts
show another mistake: what is wrong, with the real numbers, and what to write instead, with the edit of the operands
that it stands for. To add one, write it there, name it in `CAUSES`, and give it a place in `_JUDGES`: the first suspect
is reported, with the fixes with which the failing call runs.
"""

from __future__ import annotations

from collections.abc import Callable

from ...reports.trace import Cause
from . import arguments, dtypes, masks, products, sequences, tables, views, widths
from .edits import mismatch_with_edit
from .facts import Facts
from .large_numbers import number_too_large
from .norms import norm_of_whole
from .position_tables import transposed_table
from .positions import split_positions
from .suspect import Suspect
from .tried import fix_that_runs

CAUSES = (
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


def find_cause(facts: Facts, drawn_width: int = 0) -> Cause | None:
    """Return the first cause that the facts show, with the fixes that run; None if there is none.

    A width that was drawn because nothing in the module shows it is not the user's mistake: the fix is to give it.
    """
    suspect = _first_suspect(facts)
    if suspect is None:
        return None
    drawn = _input_of_drawn_width(facts, drawn_width)
    if drawn and suspect.name in _OF_WIDTHS and any(o.shape[-1:] == (drawn_width,) for o in facts.operands):
        what = f"The width {drawn_width} was chosen by mha-inspect: nothing in the module shows it."
        way = f"Give the width: --input-shape {drawn}=2x10x512 with its own sizes."
        return Cause(suspect.name, f"{suspect.explanation} {what}", way)
    return Cause(suspect.name, suspect.explanation, fix_that_runs(facts.call, suspect.fixes))


def _first_suspect(facts: Facts) -> Suspect | None:
    for judge in _JUDGES:
        suspect = judge(facts)
        if suspect is not None:
            return suspect
    return None


def _input_of_drawn_width(facts: Facts, drawn_width: int) -> str:
    """Return the name of the first input of this width; empty if there is none."""
    for named in facts.reached.graph.recording.inputs:
        if named.tensor.shape[-1:] == (drawn_width,):
            return named.name
    return ""
