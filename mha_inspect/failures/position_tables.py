"""Find a table of positions, `position 1 embed`, that is added to inputs with the batch first, `batch sequence embed`.

A table for inputs with the sequence first has its axis of size 1 for the batch. Cutting it along that axis changes
nothing, so its positions meet the batch.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from torch import Tensor

from .. import text
from .facts import BROADCASTS, Facts, Operand, first_clash
from .suspect import Suspect
from .tried import Edit, Fix, cut


@dataclass(frozen=True, eq=False)
class _Table:
    """A table of positions with an axis of size 1, and the input that it is added to."""

    table: Operand
    x: Operand
    place: int
    """The dimension of its positions: 0 in `position 1 embed`, 1 in `1 position embed`."""

    @property
    def sequence(self) -> int:
        """The dimension of size 1, where a right table has its positions."""
        return 1 - self.place

    @property
    def positions(self) -> int:
        """The number of positions in the table."""
        return self.table.shape[self.place]

    @property
    def tokens(self) -> int:
        """The size of the input where the table has size 1."""
        return self.x.shape[self.sequence]


def transposed_table(facts: Facts) -> Suspect | None:
    """Return why a table does not fit, if its positions are in the dimension of the batch; else None."""
    pair = _table_of(facts)
    if pair is None or not _meets_the_batch(pair):
        return None
    is_cut = _is_cut_along(facts, pair.table, pair.sequence)
    if not is_cut and pair.positions < pair.x.shape[pair.place]:
        return None  # more tokens than the table has positions
    what = _what_meets(pair)
    if not is_cut:
        return Suspect("table_transposed", what, _either_way(pair))
    return Suspect(
        "table_transposed",
        f"{what} The cut is along dimension {pair.sequence} of the table, which has size 1.",
        (_turned(pair),),
    )


def _what_meets(pair: _Table) -> str:
    """Return the sentence on the dimension of the input that the positions of a table meet."""
    table = pair.table
    x = pair.x
    layout = "1 position embed"
    if pair.place == 0:
        layout = "position 1 embed"
    return (
        f"{table.name} is {text.shape(table.shape)}, {layout}, and {x.name} is {text.shape(x.shape)}: the "
        f"{pair.positions} positions meet dimension {pair.place} of {x.name}, {x.axis(pair.place)}."
    )


def _table_of(facts: Facts) -> _Table | None:
    """Return the table that is added to an input, both of three dimensions; None for other calls."""
    if facts.base not in BROADCASTS or len(facts.operands) != 2:
        return None
    table, x = facts.operands
    if x.is_table:
        table, x = x, table
    if not table.is_table or x.is_table:
        return None
    if x.from_scores:
        return None
    if len(table.shape) != 3 or len(x.shape) != 3:
        return None
    if table.shape[1] == 1:
        return _Table(table, x, place=0)
    return _Table(table, x, place=1)


def _meets_the_batch(pair: _Table) -> bool:
    """Return whether the positions of a table clash with the input, and would fit in the dimension of size 1."""
    table = pair.table
    x = pair.x
    if table.shape[pair.sequence] != 1 or pair.positions == 1:
        return False
    if first_clash(table.shape, x.shape) != pair.place - 3:
        return False
    if table.shape[-1] != x.shape[-1]:
        return False
    return pair.positions >= pair.tokens


def _turned(pair: _Table) -> Fix:
    """Return the fix to move the positions of a table to the other dimension, if the line cuts the wrong one."""
    width = pair.table.shape[-1]
    shape = (1, pair.tokens, width)
    if pair.place == 1:
        shape = (pair.tokens, 1, width)
    return Fix.editing(
        pair.table,
        _turn(pair.place, pair.tokens),
        f"{_cut(pair, pair.tokens)}.transpose(0, 1), which gives {text.shape(shape)}",
        shape=pair.x.shape,
    )


def _either_way(pair: _Table) -> tuple[Fix, ...]:
    """Return how to make the positions of the table those of the input, whose layout is unknown: two ways."""
    x = pair.x
    size = x.shape[pair.place]
    turned_layout = "batch sequence embed"
    plain_layout = "sequence batch embed"
    if pair.place == 1:
        turned_layout, plain_layout = plain_layout, turned_layout
    turned = Fix.editing(
        pair.table,
        _turn(pair.place, pair.tokens),
        f"{_cut(pair, pair.tokens)}.transpose(0, 1) if {x.name} is `{turned_layout}`",
        shape=x.shape,
    )
    plain = Fix.editing(
        pair.table,
        cut(pair.place, 0, size),
        f"{_cut(pair, size)} if it is `{plain_layout}`",
        shape=x.shape,
    )
    return turned, plain


def _cut(pair: _Table, size: int) -> str:
    """Return source code for the first positions of a table: `pe[:12]`."""
    if pair.place == 0:
        return f"{pair.table.name}[:{size}]"
    return f"{pair.table.name}[:, :{size}]"


def _turn(place: int, tokens: int) -> Edit:
    """Return an edit that cuts the positions of a table to tokens, and moves them to the other dimension."""

    def edit(table: Tensor) -> Tensor:
        return table.narrow(place, 0, tokens).transpose(0, 1)

    return edit


def _is_cut_along(facts: Facts, table: Operand, dimension: int) -> bool:
    """Return whether the line cuts the table along this dimension alone: `pe[:, :n]` for dimension 1.

    A cut that keeps everything is no operation, so the code shows it and the recording does not.
    """
    statement = facts.line.removeprefix("return ").rstrip(":")
    try:
        tree = ast.parse(statement)
    except (SyntaxError, ValueError):  # the line is a part of a statement
        return False
    attribute = table.name.rpartition(".")[2]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Subscript):
            continue
        if _last_name(node.value) != attribute:
            continue
        if _cut_dimensions(node.slice) == [dimension]:
            return True
    return False


def _last_name(node: ast.expr) -> str:
    """Return `pe` for `self.pe` and for `pe`; empty for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""


def _cut_dimensions(index: ast.expr) -> list[int]:
    """Return the dimensions that an index cuts; `[:, :n]` cuts dimension 1."""
    parts = [index]
    if isinstance(index, ast.Tuple):
        parts = index.elts
    return [place for place, part in enumerate(parts) if not _is_whole(part)]


def _is_whole(part: ast.expr) -> bool:
    if not isinstance(part, ast.Slice):
        return False
    return part.lower is None and part.upper is None
