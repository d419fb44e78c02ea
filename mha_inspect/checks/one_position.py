"""Find a table of positions of which one row is added to all tokens, so that their order makes no difference.

    x = x + self.pe[:, x.shape[1]]       # pe[:, :x.shape[1]]

The number of the row is the number of tokens, also in a run with one token fewer: rows of a layer, a time or a kind of
token stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..record.ops import TensorRef
from ..reports.check import Finding
from ..running.subject import Run
from .arguments import Source
from .evidence import OTHER_SIZES, Evidence
from .lab import NotPossibleError


@dataclass(frozen=True)
class _Row:
    """A row of a table that is added to all tokens."""

    table: str
    """The name of the parameter or buffer."""
    row: int
    rows: int
    """The number of rows of the table."""
    source: str
    """The line that reads it."""


def one_position(evidence: Evidence) -> Iterator[Finding]:
    """Yield a suspicion if one row of a table, numbered by the number of tokens, is added to all tokens."""
    if evidence.once or not evidence.sources:
        return
    source = evidence.sources[0]
    if source.positions is None or source.length < 3:
        return
    for row in _rows_of_length(evidence.run, source, source.length):
        if _follows_the_length(evidence, source, row) and _is_without_order(evidence, source):
            before = row.row - 1
            same = "the output is the same in reverse order" if evidence.follows else "the output is the same"
            yield Finding(
                "mixing",
                f"The order of the tokens makes no difference: {row.table} adds one row to all of them, "
                f"row {row.row} of {row.rows}.",
                f"With {source.length - 1} tokens, row {before} is added. With the tokens in reverse order, {same}.",
                sure=False,
                source=row.source,
                fix="Read a row for each token, e.g. pe[:, :x.shape[1]] instead of pe[:, x.shape[1]].",
            )
            return


def _rows_of_length(run: Run, source: Source, length: int) -> list[_Row]:
    """Return the rows that are read by the number of tokens, or as the last one, and added to all tokens."""
    recording, graph = run.recording, run.graph
    tables = {named.tensor.id: named.name for named in (*recording.parameters, *recording.buffers)}
    tokens = source.value.shape[: len(source.axes)]
    added = []
    for op in recording.ops:
        if op.base_name != "select" or len(op.args) < 3:
            continue
        name = tables.get(graph.before_moves(op.inputs[0]).id)
        dim, row = op.args[1:3]
        rows = op.inputs[0].shape[dim]
        if name and row in (length, length - 1) and rows > length and _is_added(run, op.output, tokens):
            added.append(_Row(name, row, rows, op.source))
    return added


def _is_added(run: Run, row: TensorRef, tokens: tuple[int, ...]) -> bool:
    """Return whether a row, as it is or repeated, is added to a tensor with an entry for each token."""
    recording, queue = run.recording, [row]
    while queue:
        tensor = queue.pop()
        for op in recording.consumers.get(tensor.id, ()):
            # A module may put the positions before the batch.
            if op.base_name.rstrip("_") == "add" and sorted(op.output.shape[: len(tokens)]) == sorted(tokens):
                return True
            if op.kind in ("view", "copy"):
                queue += op.outputs
    return False


def _follows_the_length(evidence: Evidence, source: Source, row: _Row) -> bool:
    """Return whether a run with one token fewer reads the row before this one."""
    fewer = source.length - 1
    try:
        run = evidence.with_arguments(evidence.piece(source, 0, fewer)).run
    except NotPossibleError:
        return False
    shorter = Source(source.names, source.value.narrow(source.positions or 0, 0, fewer), source.batch, source.positions)
    before = replace(row, row=row.row - 1)
    return before in _rows_of_length(run, shorter, fewer)


def _is_without_order(evidence: Evidence, source: Source) -> bool:
    """Return whether tokens in reverse order give the outputs in reverse order, or the same output for all tokens."""
    places = [source.positions or 0]
    try:
        output = evidence.output_with(dict.fromkeys(source.names, source.value.flip(places)))
        if evidence.follows:
            output = output.flip(places)
        return not evidence.apart(output, times=OTHER_SIZES)
    except NotPossibleError:
        return False
