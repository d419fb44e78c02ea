"""Find a table of positions, `position 1 embed`, that is added to inputs with the batch first, `batch sequence embed`.

A table for inputs with the sequence first has its axis of size 1 for the batch. Cutting it along that axis changes
nothing, so its positions meet the batch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import Tensor

from ... import text
from .facts import BROADCASTS, Facts, Operand, first_clash
from .suspect import Suspect
from .tried import Edit, Fix


def transposed_table(facts: Facts) -> Suspect | None:
    """Return why a table does not fit, if its positions are in the dimension of the batch; else None."""
    if facts.base not in BROADCASTS or len(facts.operands) != 2:
        return None
    left, right = facts.operands
    table, x = (right, left) if right.is_table else (left, right)
    if not table.is_table or x.is_table or x.from_scores or len(table.shape) != 3 or len(x.shape) != 3:
        return None
    place, one = (0, 1) if table.shape[1] == 1 else (1, 0)
    size, tokens = table.shape[place], x.shape[one]
    if table.shape[one] != 1 or size == 1 or first_clash(table.shape, x.shape) != place - 3:
        return None
    if table.shape[-1] != x.shape[-1] or size < tokens:
        return None
    is_cut = _is_cut_along(facts, table, one)
    if size < x.shape[place] and not is_cut:
        return None  # more tokens than the table has positions
    name = table.name
    layout = "position 1 embed" if place == 0 else "1 position embed"
    what = (
        f"{name} is {text.shape(table.shape)}, {layout}, and {x.name} is {text.shape(x.shape)}: the {size} positions "
        f"meet dimension {place} of {x.name}, {x.axis(place)}."
    )
    if is_cut:
        what += f" The cut is along dimension {one} of the table, which has size 1."
    return Suspect("table_transposed", what, tuple(_fixes(table, x, place, is_cut=is_cut)))


def _fixes(table: Operand, x: Operand, place: int, *, is_cut: bool) -> Iterator[Fix]:
    """Yield how to make the positions of the table those of the input; two ways if the layout of the input is open."""
    one = 1 - place
    tokens, other = x.shape[one], x.shape[place]
    cut = f"[:{tokens}]" if place == 0 else f"[:, :{tokens}]"
    turned = f"{table.name}{cut}.transpose(0, 1)"
    if is_cut:
        yield Fix(
            f"{turned}, which gives {text.shape(_turned_shape(table, one, tokens))}",
            [(table, _turn(place, tokens))],
            x.shape,
        )
        return
    plain = f"{table.name}[:{other}]" if place == 0 else f"{table.name}[:, :{other}]"
    first, second = ("batch sequence", "sequence batch") if place == 0 else ("sequence batch", "batch sequence")
    yield Fix(f"{turned} if {x.name} is `{first} embed`", [(table, _turn(place, tokens))], x.shape)
    yield Fix(f"{plain} if it is `{second} embed`", [(table, lambda tensor: tensor.narrow(place, 0, other))], x.shape)


def _turned_shape(table: Operand, one: int, tokens: int) -> tuple[int, ...]:
    return (1, tokens, table.shape[-1]) if one == 1 else (tokens, 1, table.shape[-1])


def _turn(place: int, tokens: int) -> Edit:
    """Return an edit that cuts the positions of a table to tokens, and moves them to the other dimension."""

    def edit(table: Tensor) -> Tensor:
        return table.narrow(place, 0, tokens).transpose(0, 1)

    return edit


def _is_cut_along(facts: Facts, table: Operand, dimension: int) -> bool:
    """Return whether the line cuts the table along this dimension alone: `pe[:, :n]` for dimension 1.

    A cut that keeps everything is no operation, so the code shows it and the recording does not.
    """
    try:
        tree = ast.parse(facts.line.removeprefix("return ").rstrip(":"))
    except (SyntaxError, ValueError):  # the line is a part of a statement
        return False
    cuts = [node for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    attribute = table.name.rpartition(".")[2]
    return any(_last_name(cut.value) == attribute and _cut_dimensions(cut.slice) == [dimension] for cut in cuts)


def _last_name(node: ast.expr) -> str:
    """Return `pe` for `self.pe` and for `pe`; empty for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _cut_dimensions(index: ast.expr) -> list[int]:
    """Return the dimensions that an index cuts; `[:, :n]` cuts dimension 1."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return [at for at, part in enumerate(parts) if not _is_whole(part)]


def _is_whole(part: ast.expr) -> bool:
    return isinstance(part, ast.Slice) and part.lower is None and part.upper is None
