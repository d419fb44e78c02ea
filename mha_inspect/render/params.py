"""The page of `params`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .. import text
from ..reports.params import (
    Buffer,
    HeadCountColumn,
    HeadSlice,
    LikeModule,
    Parameter,
    ParametersTotal,
    ParamsReport,
    StoredName,
)
from .page import Block, Cell, Column, Page, Paragraph, Section, Table, facts, section, table
from .parts import AXES, alike, contents, folded, grouped, layer_page, notes, ranks_section, shape_cell, times


def params_page(report: ParamsReport) -> Page:
    """Return the page: every parameter, the total with its closed formula, and what belongs to which head."""
    title = "" if report.stored_attentions is None else f"checkpoint {report.layer.name}"
    return layer_page(report.environment, report.layer, _sections(report), title)


def _sections(report: ParamsReport) -> Iterator[Section]:
    parameters, total = report.parameters, report.total
    if report.stored_attentions:
        like = report.like
        by = "the names of their tensors" if like is None or not like.called else f"a run of {like.module}"
        columns = [
            Column("module", lambda attention: attention.module or "the whole file", tone="strong"),
            Column("num_heads", lambda attention: attention.num_heads or "?", "right"),
            Column("num_kv_heads", lambda attention: attention.num_kv_heads or "?", "right"),
            Column("head_dim", lambda attention: attention.head_dim or "?", "right"),
            Column("heads that fit", lambda attention: ", ".join(map(str, attention.fits)), wrap=24, optional=True),
        ]
        attentions = folded(report.stored_attentions, "module", merged={"parameters": lambda parts: ()})
        yield section("attentions", table(attentions, columns), detail=f"read from {by}")
    if report.like is not None:
        yield section("fit", *_fit(report.like), detail=f"against {report.like.module}")
    formula = []
    if total.formula_numel is not None:
        is_right = total.formula_numel == total.numel
        wrong = f"but {total.numel:,} were counted: a bug in mha-inspect"
        said = f"{total.formula} = {total.formula_numel:,}, {'as counted' if is_right else wrong}"
        formula = [facts(("formula", said), tone="good" if is_right else "bad")]
    yield section("parameters", _parameters(parameters, total), *formula, *contents(parameters))
    if report.buffers:
        yield section("buffers", _buffers(report.buffers), detail="no parameters, left out of the total")
    if any(p.heads is not None for p in parameters):
        yield _per_head(parameters)
    changes = [facts(("what changes", report.changes))] if report.changes else []
    if report.side_by_side is not None:
        yield section("by head count", _side_by_side(report.side_by_side), *changes)
    else:
        yield section("", *changes)
    yield section("", *notes(report.notes))
    yield ranks_section(report.ranks)


def _fit(like: LikeModule) -> Iterator[Block]:
    """Yield how a checkpoint fits a module: a summary, and one row per kind of misfit."""
    counts = {
        "only in " + like.module: like.missing,
        "only in the file": like.unexpected,
        "with another shape": like.wrong_shape,
        "transposed": like.transposed,
    }
    fits = [f"{like.matching} with the same name and shape"]
    fits += [f"{len(tensors)} {what}" for what, tensors in counts.items() if tensors]
    yield facts(("tensors", ", ".join(fits)), tone="good" if len(fits) == 1 else "warn")
    if like.prefix:
        inside, outside = (like.module, "the file") if like.prefix.startswith("-") else ("the file", like.module)
        yield facts(("names", f"Names in {inside} begin with {like.prefix.lstrip('-')}, names in {outside} do not."))
    pieces = [(_misfit("missing", tensor), tensor.name, "", text.shape(tensor.shape)) for tensor in like.missing]
    pieces += [("unexpected", tensor.name, text.shape(tensor.shape), "") for tensor in like.unexpected]
    for tensor in like.wrong_shape:
        pieces.append(
            (_misfit("wrong shape", tensor), tensor.name, text.shape(tensor.shape), text.shape(tensor.expected or ()))
        )
    for tensor in like.transposed:
        pieces.append(("transposed", tensor.name, text.shape(tensor.shape), text.shape(tensor.expected or ())))
    if pieces:
        columns = [
            Column("what", lambda group: group[0][0]),
            Column("name", lambda group: times([name for _, name, *_ in group]), tone="strong"),
            Column("in the file", lambda group: group[0][2]),
            Column(f"in {like.module}", lambda group: group[0][3]),
        ]
        yield table(grouped(pieces, lambda piece: (piece[0], alike(piece[1]), *piece[2:])), columns)


def _misfit(what: str, tensor: StoredName) -> str:
    """Return how a tensor of the module does not fit, and whether it is a buffer: `missing buffer`."""
    if not tensor.buffer:
        return what
    return "missing buffer" if what == "missing" else f"{what} (buffer)"


@dataclass(frozen=True)
class _Row:
    """A parameter, or parameters that repeat from layer to layer, with the sizes of all."""

    name: str
    role: str
    tied: str
    shape: tuple[int, ...]
    axes: str
    whole: tuple[int, ...] | None
    dtype: str
    numel: int
    nbytes: int
    share: float


def _row(parameter: Parameter) -> _Row:
    return _Row(
        name=parameter.name,
        role=parameter.role,
        tied=", ".join(times(names) for names in grouped(parameter.tied, alike)),
        shape=parameter.shape,
        axes=parameter.axes,
        whole=parameter.whole,
        dtype=parameter.dtype,
        numel=parameter.numel,
        nbytes=parameter.nbytes,
        share=parameter.share,
    )


def _use(row: _Row) -> str:
    """Return the role and the other names: `Embedding; tied to head.weight`."""
    tied = f"tied to {row.tied}" if row.tied else ""
    return "; ".join(filter(None, (row.role, tied)))


def _parameters(parameters: Sequence[Parameter], total: ParametersTotal) -> Table:
    """Return the table of parameters; parameters that differ only in the numbers of their names are one row."""
    rows = folded(map(_row, parameters), "name", "tied", merged={"numel": sum, "nbytes": sum, "share": sum})
    sum_of_all = _Row("total", "", "", (), "", None, "", total.numel, total.nbytes, 0.0)

    def unless_total(of: Any) -> Any:
        return lambda p: "" if p is sum_of_all else of(p)

    columns = [
        Column("name", lambda p: p.name, tone="strong"),
        Column("shape", unless_total(lambda p: shape_cell(p.shape, p.axes, p.whole)), tone="shape"),
        AXES,
        Column("dtype", lambda p: p.dtype, tone="muted", drop=3),
        Column("count", lambda p: f"{p.numel:,}", "right"),
        Column("bytes", lambda p: text.byte_size(p.nbytes), "right", "muted", drop=2),
        Column("share", unless_total(lambda p: text.percent(p.share)), "right", "muted", drop=1),
        Column("role", _use, wrap=24, into="axes"),
    ]
    return table([*rows, sum_of_all], columns, total=True)


def _buffers(buffers: Sequence[Buffer]) -> Table:
    columns = [
        Column("name", lambda buffer: buffer.name, tone="strong"),
        Column("shape", lambda buffer: text.shape(buffer.shape), tone="shape"),
        Column("dtype", lambda buffer: buffer.dtype, tone="muted"),
        Column("count", lambda buffer: f"{buffer.numel:,}", "right"),
        Column("bytes", lambda buffer: text.byte_size(buffer.nbytes), "right", "muted", drop=1),
        Column("state dict", lambda buffer: "saved" if buffer.saved else "not saved"),
    ]
    return table(folded(buffers, "name", merged={"numel": sum, "nbytes": sum}), columns)


def _per_head(parameters: Sequence[Parameter]) -> Section:
    """Return a table with one row per head. In a model with several attentions, a row is a part with all its heads."""
    pieces = [(p.name, piece) for p in parameters for piece in p.heads or ()]
    parts = grouped(pieces, lambda named: (named[0], named[1].part))
    if not parts:
        return section("by head", Paragraph("No parameter has a part that belongs to one head only."))
    is_model = len(parts) > len({piece.part for _, piece in pieces})
    lines = [
        (part[0][0], part[0][1].part, *line)
        for part in parts
        for line in _by_head([piece for _, piece in part], is_model=is_model)
    ]
    columns = [
        Column("parameter", lambda group: times([line[0] for line in group])),
        Column("part", lambda group: group[0][1], tone="strong"),
        Column("head", lambda group: group[0][2], "right"),
        Column("rows", lambda group: group[0][3], "right"),
        Column("columns", lambda group: group[0][4], "right", optional=True),
    ]
    groups = grouped(lines, lambda line: (alike(line[0]) if is_model else line[0], *line[1:]))
    detail = "ranges include both ends" + (", h is the head" if is_model else "")
    return section("by head", table(groups, columns), detail=detail)


def _by_head(pieces: Sequence[HeadSlice], *, is_model: bool) -> list[tuple[str, str, str]]:
    """Return one row per head. In a model, heads at even steps share a row: `64h to 64h+63`."""
    rows = _in_steps([(piece.head, piece.rows) for piece in pieces])
    columns = _in_steps([(piece.head, piece.columns) for piece in pieces if piece.columns is not None])
    if is_model and len(pieces) > 1 and rows is not None and columns is not None:
        return [(text.spans(piece.head for piece in pieces), rows, columns)]
    bounds = ((piece, "" if piece.columns is None else text.span(piece.columns)) for piece in pieces)
    return [(str(piece.head), text.span(piece.rows), columns) for piece, columns in bounds]


def _in_steps(bounds: Sequence[tuple[int, tuple[int, int]]]) -> str | None:
    """Return the bounds of head h as a formula; empty without bounds, None if the steps are uneven."""
    if not bounds:
        return ""
    (first, (start, stop)), (last, (end, _)) = bounds[0], bounds[-1]
    step = (end - start) // (last - first) if last != first else 0
    begin, width = start - step * first, stop - start
    if any(bound != (begin + step * head, begin + step * head + width) for head, bound in bounds):
        return None
    if not step:
        return text.span((begin, begin + width))
    ends = [f"{step}h+{offset}" if offset else f"{step}h" for offset in dict.fromkeys((begin, begin + width - 1))]
    return " to ".join(ends)


def _side_by_side(counts: tuple[HeadCountColumn, ...]) -> Table:
    """Return a table with one column per head count. Values that differ between columns are strong."""
    lines: list[tuple[str, list[str]]] = [
        ("head_dim", [str(c.head_dim) for c in counts]),
        ("parameters", [f"{c.numel:,}" for c in counts]),
    ]
    for name in dict.fromkeys(name for c in counts for name in c.shapes):
        lines.append((name, [text.shape(c.shapes[name]) if name in c.shapes else "" for c in counts]))
        slices = [{piece.part: piece for piece in c.first_head.get(name, ())} for c in counts]
        for part in dict.fromkeys(part for parts in slices for part in parts):
            owned = _owned([parts.get(part) for parts in slices], [c.shapes.get(name, ()) for c in counts])
            lines.append((f"head 0 of {part}", owned))

    def column(place: int) -> Column:
        def cell(line: tuple[str, list[str]]) -> Cell:
            return Cell(line[1][place], "strong" if len(set(line[1])) > 1 else "muted")

        # Where the page is narrow, the last counts go first.
        return Column(str(counts[place].num_heads), cell, "right", drop=place)

    return table(lines, [Column("num_heads", lambda line: line[0]), *map(column, range(len(counts)))])


def _owned(pieces: Sequence[HeadSlice | None], shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """Return the slice of head 0 for each head count, along the dimension that changes: `rows 0–255`."""
    both = [(piece, shape) for piece, shape in zip(pieces, shapes, strict=True) if piece is not None]
    by_columns = any(piece.columns not in (None, (0, shape[-1])) for piece, shape in both)
    by_rows = not by_columns or any(piece.rows != (0, shape[0]) for piece, shape in both)

    def owned(piece: HeadSlice) -> str:
        rows = text.span(piece.rows)
        if piece.columns is None:
            return f"elements {rows}"
        return ", ".join([f"rows {rows}"] * by_rows + [f"columns {text.span(piece.columns)}"] * by_columns)

    return ["" if piece is None else owned(piece) for piece in pieces]
