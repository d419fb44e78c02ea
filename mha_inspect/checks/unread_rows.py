"""Find rows of a learned table that the stored index of its module never gives: relative places then share others."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..record.ops import Op
from ..reports.check import Finding
from ..text import plural
from .evidence import Evidence


def unread_rows(evidence: Evidence) -> Iterator[Finding]:
    """Yield each table that is read with a whole buffer of numbers of rows, if some rows are not among them.

    Numbers that are computed in the forward, or cut to its tokens, may be others in another call.
    """
    if evidence.on_meta:
        return
    recording = evidence.run.recording
    stored = {named.tensor.storage: named for named in recording.buffers}
    for op in recording.ops:
        if op.base_name not in ("index", "embedding", "index_select") or len(op.inputs) != 2:
            continue
        table = recording.parameter_names.get(op.inputs[0].id)
        index = stored.get(op.inputs[1].storage)
        if table is None or index is None or index.tensor.numel != op.inputs[1].numel:
            continue
        is_of_pairs = sum(size > 1 for size in index.tensor.shape) > 1
        if not is_of_pairs:  # e.g. positions up to the longest sequence
            continue
        finding = _of_table(evidence, op, table, index.name)
        if finding is not None:
            yield finding


def _of_table(evidence: Evidence, op: Op, table: str, index: str) -> Finding | None:
    """Return that rows of a table are never read; None if all are, or if only one is."""
    numbers = evidence.content(op.inputs[1])
    rows = op.inputs[0].shape[0]
    if numbers is None or numbers.dtype == torch.bool:
        return None
    read = len(torch.unique(numbers % rows))
    if not 1 < read < rows:
        return None
    return Finding(
        "parameters",
        f"{rows - read} of {plural(rows, 'row')} of {table} are never read: {index} does not give their numbers.",
        f"{index} has {plural(numbers.numel(), 'number')} from {int(numbers.min())} to {int(numbers.max())}, of which "
        f"{read} are distinct.",
        sure=False,
        source=op.source,
        fix=f"Give each relative place a number of its own in {index}.",
    )
