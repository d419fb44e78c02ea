"""The page of `params`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from .. import text
from ..reports.params import (
    Buffer,
    HeadCountColumn,
    HeadSlice,
    LikeModule,
    Parameter,
    ParametersTotal,
    ParamsReport,
    StoredAttention,
    StoredName,
)
from .page import Block, Cell, Column, Facts, Page, Paragraph, Section, Table, facts, section, table
from .parts import AXES, alike, contents, folded, grouped, layer_page, notes, ranks_section, shape_cell, times


def params_page(report: ParamsReport) -> Page:
    """Return the page: every parameter, the total with its closed formula, and what belongs to which head."""
    title = "" if report.stored_attentions is None else f"checkpoint {report.layer.name}"
    return layer_page(report.environment, report.layer, _sections(report), title)


def _sections(report: ParamsReport) -> Iterator[Section]:
    parameters, total = report.parameters, report.total
    if report.stored_attentions:
        yield _stored_attentions(report.stored_attentions, report.like)
    if report.like is not None:
        yield section("fit", *_fit(report.like), detail=f"against {report.like.module}")
    yield section("parameters", _parameters(parameters, total), *_formula(total), *contents(parameters))
    if report.buffers:
        yield section("buffers", _buffers(report.buffers), detail="no parameters, left out of the total")
    if any(parameter.heads is not None for parameter in parameters):
        yield _per_head(parameters)
    changes = [facts(("what changes", report.changes))] if report.changes else []
    if report.side_by_side is None:
        yield section("", *changes)
    else:
        yield section("by head count", _side_by_side(report.side_by_side), *changes)
    yield section("", *notes(report.notes))
    yield ranks_section(report.ranks)


def _stored_attentions(attentions: Sequence[StoredAttention], like: LikeModule | None) -> Section:
    """Return the attentions of a checkpoint; attentions that repeat from layer to layer are one row."""
    columns = [
        Column("module", lambda attention: attention.module or "the whole file", tone="strong"),
        Column("num_heads", lambda attention: attention.num_heads or "?", "right"),
        Column("num_kv_heads", lambda attention: attention.num_kv_heads or "?", "right"),
        Column("head_dim", lambda attention: attention.head_dim or "?", "right"),
        Column("heads that fit", lambda attention: ", ".join(map(str, attention.fits)), wrap=24, optional=True),
    ]
    evidence = "the names of their tensors"
    if like is not None and like.called:
        evidence = f"a run of {like.module}"
    rows = folded(attentions, "module", merged={"parameters": lambda parts: ()})
    return section("attentions", table(rows, columns), detail=f"read from {evidence}")


def _formula(total: ParametersTotal) -> Iterator[Facts]:
    """Yield the closed formula of a layer from options, and whether it gives the counted number."""
    if total.formula_numel is None:
        return
    formula = f"{total.formula} = {total.formula_numel:,}"
    if total.formula_numel == total.numel:
        yield facts(("formula", f"{formula}, as counted"), tone="good")
    else:
        yield facts(("formula", f"{formula}, but {total.numel:,} were counted: a bug in mha-inspect"), tone="bad")


def _fit(like: LikeModule) -> Iterator[Block]:
    """Yield how a checkpoint fits a module: a summary, and one row per kind of misfit."""
    counts = {
        "only in " + like.module: like.missing,
        "only in the file": like.unexpected,
        "with another shape": like.wrong_shape,
        "transposed": [tensor for tensor in like.transposed if not _fits_both_ways(tensor)],
        "square and likely transposed": [tensor for tensor in like.transposed if _fits_both_ways(tensor)],
    }
    fits = [f"{like.matching} with the same name and shape"]
    for misfit, tensors in counts.items():
        if tensors:
            fits.append(f"{len(tensors)} {misfit}")
    all_fit = len(fits) == 1
    yield facts(("tensors", ", ".join(fits)), tone="good" if all_fit else "warn")
    if like.prefix:
        yield facts(("names", _prefixed(like)))
    misfits = [*_misfits(like)]
    if misfits:
        columns = [
            Column("what", lambda misfit: misfit.kind),
            Column("name", lambda misfit: misfit.name, tone="strong"),
            Column("in the file", lambda misfit: misfit.in_file),
            Column(f"in {like.module}", lambda misfit: misfit.in_module),
        ]
        yield table(folded(misfits, "name"), columns)


def _fits_both_ways(tensor: StoredName) -> bool:
    """Return whether a transposed weight is square, so that its shape does not show it."""
    return tensor.shape == tensor.expected


def _prefixed(like: LikeModule) -> str:
    """Return which side has a prefix before its names. One with a minus is that of the module."""
    if like.prefix.startswith("-"):
        longer, shorter = like.module, "the file"
    else:
        longer, shorter = "the file", like.module
    return f"Names in {longer} begin with {like.prefix.lstrip('-')}, names in {shorter} do not."


@dataclass(frozen=True)
class _Misfit:
    """A tensor that does not fit, with its shape on each side; empty where it is missing."""

    kind: str
    name: str
    in_file: str
    in_module: str


def _misfits(like: LikeModule) -> Iterator[_Misfit]:
    for tensor in like.missing:
        kind = "missing buffer" if tensor.buffer else "missing"
        yield _Misfit(kind, tensor.name, in_file="", in_module=text.shape(tensor.shape))
    for tensor in like.unexpected:
        yield _Misfit("unexpected", tensor.name, in_file=text.shape(tensor.shape), in_module="")
    for tensor in like.wrong_shape:
        kind = "wrong shape (buffer)" if tensor.buffer else "wrong shape"
        expected = tensor.expected or ()
        yield _Misfit(kind, tensor.name, in_file=text.shape(tensor.shape), in_module=text.shape(expected))
    for tensor in like.transposed:
        expected = tensor.expected or ()
        kind = "likely transposed" if _fits_both_ways(tensor) else "transposed"
        yield _Misfit(kind, tensor.name, in_file=text.shape(tensor.shape), in_module=text.shape(expected))


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
    if not row.tied:
        return row.role
    tied = f"tied to {row.tied}"
    return f"{row.role}; {tied}" if row.role else tied


def _parameters(parameters: Sequence[Parameter], total: ParametersTotal) -> Table:
    """Return the table of parameters; parameters that differ only in the numbers of their names are one row."""
    rows = folded(map(_row, parameters), "name", "tied", merged={"numel": sum, "nbytes": sum, "share": sum})
    last = _Row(
        name="total",
        role="",
        tied="",
        shape=(),
        axes="",
        whole=None,
        dtype="",
        numel=total.numel,
        nbytes=total.nbytes,
        share=0.0,
    )

    def shape(row: _Row) -> Cell:
        return Cell("") if row is last else shape_cell(row.shape, row.axes, row.whole)

    def share(row: _Row) -> str:
        return "" if row is last else text.percent(row.share)

    columns = [
        Column("name", lambda row: row.name, tone="strong"),
        Column("shape", shape, tone="shape"),
        AXES,
        Column("dtype", lambda row: row.dtype, tone="muted", drop=3),
        Column("count", lambda row: f"{row.numel:,}", "right"),
        Column("bytes", lambda row: text.byte_size(row.nbytes), "right", "muted", drop=2),
        Column("share", share, "right", "muted", drop=1),
        Column("role", _use, wrap=24, into="axes"),
    ]
    return table([*rows, last], columns, total=True)


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


@dataclass(frozen=True)
class _HeadRow:
    """The rows and columns of a head in a part of a parameter, or of several heads as a formula."""

    parameter: str
    part: str
    heads: str
    """A number, or a range: `0–7`."""
    rows: str
    columns: str


def _per_head(parameters: Sequence[Parameter]) -> Section:
    """Return a table with one row per head. In a model with several attentions, a row is a part with all its heads."""
    parts: list[tuple[Parameter, list[HeadSlice]]] = []
    for parameter in parameters:
        of_parts = grouped(parameter.heads or (), lambda piece: piece.part)
        parts += [(parameter, pieces) for pieces in of_parts]
    if not parts:
        return section("by head", Paragraph("No parameter has a part that belongs to one head only."))
    different = {pieces[0].part for _, pieces in parts}
    # Where a part is there several times, there are several attentions.
    is_model = len(parts) > len(different)
    rows: list[_HeadRow] = []
    for parameter, pieces in parts:
        in_steps = _in_steps_of_heads(parameter, pieces) if is_model else None
        rows += _by_head(parameter, pieces) if in_steps is None else [in_steps]
    columns = [
        Column("parameter", lambda row: row.parameter),
        Column("part", lambda row: row.part, tone="strong"),
        Column("head", lambda row: row.heads, "right"),
        Column("rows", lambda row: row.rows, "right"),
        Column("columns", lambda row: row.columns, "right", optional=True),
    ]
    detail = "ranges include both ends, h is the head" if is_model else "ranges include both ends"
    return section("by head", table(folded(rows, "parameter"), columns), detail=detail)


def _by_head(parameter: Parameter, pieces: Iterable[HeadSlice]) -> Iterator[_HeadRow]:
    for piece in pieces:
        yield _HeadRow(
            parameter=parameter.name,
            part=piece.part,
            heads=str(piece.head),
            rows=text.span(piece.rows),
            columns="" if piece.columns is None else text.span(piece.columns),
        )


def _in_steps_of_heads(parameter: Parameter, pieces: Sequence[HeadSlice]) -> _HeadRow | None:
    """Return one row of several heads at even steps, `64h to 64h+63`; None for one head, or uneven steps."""
    if len(pieces) < 2:
        return None
    bounds_of_rows, bounds_of_columns = [], []
    for piece in pieces:
        bounds_of_rows.append((piece.head, piece.rows))
        if piece.columns is not None:
            bounds_of_columns.append((piece.head, piece.columns))
    rows, columns = _in_steps(bounds_of_rows), _in_steps(bounds_of_columns)
    if rows is None or columns is None:
        return None
    heads = text.spans(piece.head for piece in pieces)
    return _HeadRow(parameter.name, pieces[0].part, heads, rows, columns)


def _in_steps(bounds: Sequence[tuple[int, tuple[int, int]]]) -> str | None:
    """Return the bounds of each head as a formula of h; empty without bounds, None if the steps are uneven."""
    if not bounds:
        return ""
    first, (start, stop) = bounds[0]
    last, (start_of_last, _) = bounds[-1]
    step = (start_of_last - start) // (last - first) if last != first else 0
    width = stop - start
    origin = start - step * first
    for head, bound in bounds:
        begin = origin + step * head
        if bound != (begin, begin + width):
            return None
    if step == 0:
        return text.span((origin, origin + width))
    begins = _times_head(step, origin)
    if width == 1:
        return begins
    ends = _times_head(step, origin + width - 1)
    return f"{begins} to {ends}"


def _times_head(step: int, offset: int) -> str:
    """Return an index as a formula of the head: `64h`, `64h+63`."""
    return f"{step}h+{offset}" if offset else f"{step}h"


@dataclass(frozen=True)
class _Line:
    """What one quantity is for each head count."""

    title: str
    values: tuple[str, ...]

    def cell(self, place: int) -> Cell:
        """Return the field of a head count, strong if the quantity depends on it."""
        differs = len(set(self.values)) > 1
        return Cell(self.values[place], "strong" if differs else "muted")


def _side_by_side(counts: tuple[HeadCountColumn, ...]) -> Table:
    """Return a table with one column per head count. Values that differ between columns are strong."""
    head_dims = [str(count.head_dim) for count in counts]
    numels = [f"{count.numel:,}" for count in counts]
    lines = [_Line("head_dim", tuple(head_dims)), _Line("parameters", tuple(numels))]
    names: dict[str, None] = {}
    for count in counts:
        names.update(dict.fromkeys(count.shapes))
    for name in names:
        shapes = [_shape_of(name, count) for count in counts]
        lines.append(_Line(name, tuple(shapes)))
        lines += _first_heads(name, counts)
    columns = [Column("num_heads", lambda line: line.title)]
    for place, count in enumerate(counts):
        # Where the page is narrow, the last counts go first.
        columns.append(Column(str(count.num_heads), partial(_Line.cell, place=place), "right", drop=place))
    return table(lines, columns)


def _shape_of(name: str, count: HeadCountColumn) -> str:
    """Return the shape of a parameter for a head count; empty if there is no such parameter."""
    return text.shape(count.shapes[name]) if name in count.shapes else ""


def _first_heads(name: str, counts: Sequence[HeadCountColumn]) -> Iterator[_Line]:
    """Yield a line for each part of a parameter: the slice of head 0 for each head count."""
    parts: dict[str, None] = {}
    for count in counts:
        for piece in count.first_head.get(name, ()):
            parts[piece.part] = None
    for part in parts:
        pieces = [_first_head(count, name, part) for count in counts]
        shapes = [count.shapes.get(name, ()) for count in counts]
        dimensions = _split_dimensions(pieces, shapes)
        values = ["" if piece is None else _bounds(piece, dimensions) for piece in pieces]
        yield _Line(f"head 0 of {part}", tuple(values))


def _first_head(count: HeadCountColumn, name: str, part: str) -> HeadSlice | None:
    """Return the slice of head 0 in a part of a parameter, the last if there are several; None if there is none."""
    for piece in reversed(count.first_head.get(name, ())):
        if piece.part == part:
            return piece
    return None


def _split_dimensions(pieces: Iterable[HeadSlice | None], shapes: Iterable[tuple[int, ...]]) -> list[str]:
    """Return `rows`, `columns` or both: where head 0 has a part only, for some head count; rows if it never has."""
    split = set()
    for piece, shape in zip(pieces, shapes, strict=True):
        if piece is None:
            continue
        if piece.rows != (0, shape[0]):
            split.add("rows")
        if piece.columns not in (None, (0, shape[-1])):
            split.add("columns")
    return sorted(split, reverse=True) or ["rows"]


def _bounds(piece: HeadSlice, dimensions: Iterable[str]) -> str:
    """Return the bounds of a slice in these dimensions: `rows 0–255`, or `elements 0–255` of a vector."""
    if piece.columns is None:
        return f"elements {text.span(piece.rows)}"
    bounds = {"rows": piece.rows, "columns": piece.columns}
    texts = [f"{dimension} {text.span(bounds[dimension])}" for dimension in dimensions]
    return ", ".join(texts)
