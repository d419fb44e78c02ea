"""The page of `params`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .. import text
from ..reports.params import (
    HeadCountColumn,
    HeadSlice,
    LikeModule,
    Parameter,
    ParametersTotal,
    ParamsReport,
    StoredAttention,
)
from .page import Block, Cell, Column, Facts, Page, Paragraph, Section, Table, Tone, facts, section, table
from .parts import AXES, SHAPE, alike, contents, grouped, layer_page, notes, shape_cell, statistics, times


def page(report: ParamsReport) -> Page:
    """Return the page: every parameter, the total with its closed formula, and what belongs to which head."""
    title = "" if report.stored_attentions is None else f"checkpoint {report.layer.name}"
    return layer_page(report.environment, report.layer, _sections(report), title)


def _sections(report: ParamsReport) -> Iterator[Section]:
    parameters = report.parameters
    if report.stored_attentions:
        by = "by the names of their tensors" if report.like is None else f"by the run of {report.like.module}"
        yield section("attentions", _attentions(report.stored_attentions), detail=by)
    if report.like is not None:
        yield section("fit", *_fit(report.like), detail=f"against {report.like.module}")
    yield section(
        "parameters",
        _parameters(parameters if report.stored_attentions is None else _folded(parameters), report.total),
        *_formula(report.total),
        *statistics((p.name, p.stats) for p in parameters),
        *contents((p.name, p.shape, p.axes, p.values) for p in parameters),
    )
    if any(p.heads is not None for p in parameters):
        yield _per_head(parameters)
    changes = [facts(("what changes", report.changes))] if report.changes else []
    if report.side_by_side is not None:
        yield section("by head count", _side_by_side(report.side_by_side), *changes)
    else:
        yield section("", *changes)
    yield section("", *notes(report.notes))


def _fit(like: LikeModule) -> Iterator[Block]:
    """Yield how a checkpoint fits a module: a line, and a row for all that does not."""
    fits = [f"{like.matching} of the same name and shape"]
    fits += [f"{len(like.missing)} only in {like.module}"] if like.missing else []
    fits += [f"{len(like.unexpected)} only in the file"] if like.unexpected else []
    fits += [f"{len(like.wrong_shape)} of another shape"] if like.wrong_shape else []
    yield facts(("tensors", ", ".join(fits)), tone="good" if len(fits) == 1 else "warn")
    if like.prefix:
        inside, outside = (like.module, "the file") if like.prefix.startswith("-") else ("the file", like.module)
        yield facts(("names", f"{like.prefix.lstrip('-')} stands before names in {inside} and not in {outside}."))
    pieces = [("missing", tensor.name, "", text.shape(tensor.shape)) for tensor in like.missing]
    pieces += [("unexpected", tensor.name, text.shape(tensor.shape), "") for tensor in like.unexpected]
    for tensor in like.wrong_shape:
        pieces.append(("wrong shape", tensor.name, text.shape(tensor.shape), text.shape(tensor.expected)))
    if pieces:
        groups = grouped(pieces, lambda piece: (piece[0], alike(piece[1]), *piece[2:]))
        rows = [(group[0][0], times([name for _, name, *_ in group]), *group[0][2:]) for group in groups]
        columns = [Column("what"), Column("name", tone="strong"), Column("in the file"), Column(f"in {like.module}")]
        yield table(columns, rows)


def _folded(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Return tensors that repeat from layer to layer as one, whose sizes are those of all."""

    def kind(p: Parameter) -> object:
        is_listed = p.stats is not None or p.heads is not None
        return p.name if is_listed else replace(p, name=alike(p.name), values=None)

    folded = []
    for group in grouped(parameters, kind):
        numel, nbytes, share = (sum(getattr(p, part) for p in group) for part in ("numel", "nbytes", "share"))
        folded.append(replace(group[0], name=times([p.name for p in group]), numel=numel, nbytes=nbytes, share=share))
    return folded


def _attentions(attentions: Sequence[StoredAttention]) -> Table:
    columns = [
        Column("module", tone="strong"),
        *(Column(title, "right") for title in ("num_heads", "num_kv_heads", "head_dim")),
        Column("heads that fit", wrap=24, optional=True),
    ]
    rows = []
    for group in grouped(attentions, lambda a: (alike(a.module), replace(a, module="", parameters=()))):
        module, first = times([attention.module for attention in group]) or "the whole file", group[0]
        numbers = (size or "?" for size in (first.num_heads, first.num_kv_heads, first.head_dim))
        rows.append((module, *numbers, ", ".join(map(str, first.fits))))
    return table(columns, rows)


def _parameters(parameters: Sequence[Parameter], total: ParametersTotal) -> Table:
    columns = [
        Column("name", tone="strong"),
        SHAPE,
        AXES,
        Column("dtype", tone="muted", drop=3),
        Column("count", "right"),
        Column("bytes", "right", "muted", drop=2),
        Column("share", "right", "muted", drop=1),
        Column("role", wrap=24, into="axes"),
    ]
    rows: list[tuple[object, ...]] = []
    for p in parameters:
        sizes = text.count(p.numel), text.byte_size(p.nbytes), text.percent(p.share)
        rows.append((p.name, shape_cell(p.shape, p.axes), p.axes, p.dtype, *sizes, p.role))
    rows.append(("total", "", "", "", text.count(total.numel), text.byte_size(total.nbytes), "", ""))
    return table(columns, rows, total=True)


def _formula(total: ParametersTotal) -> tuple[Facts, ...]:
    """Return the closed formula beside the count."""
    if total.formula_numel is None:
        return ()
    given, is_right = f"{total.formula} = {text.count(total.formula_numel)}", total.formula_numel == total.numel
    wrong = f"but {text.count(total.numel)} were counted: one of the two is wrong"
    said = f"{given}, {'as counted' if is_right else wrong}"
    return (facts(("formula", said), tone="good" if is_right else "bad"),)


def _bounds(piece: HeadSlice) -> tuple[str, str]:
    return text.span(piece.rows), "" if piece.columns is None else text.span(piece.columns)


def _per_head(parameters: Sequence[Parameter]) -> Section:
    """Return a table with a row a head; of a model, which has several attentions, a row a part, all heads in it."""
    pieces = [(p.name, piece) for p in parameters for piece in p.heads or ()]
    parts = grouped(pieces, lambda named: (named[0], named[1].part))
    if not parts:
        return section("by head", Paragraph("No parameter has a part that is one head's alone."))
    is_model = len(parts) > len({piece.part for _, piece in pieces})
    lines = [
        (part[0][0], part[0][1].part, *line)
        for part in parts
        for line in _by_head([piece for _, piece in part], is_model=is_model)
    ]
    groups = grouped(lines, lambda line: (alike(line[0]) if is_model else line[0], *line[1:]))
    columns = [
        Column("parameter"),
        Column("part", tone="strong"),
        Column("head", "right"),
        Column("rows", "right"),
        Column("columns", "right", optional=True),
    ]
    detail = "both ends included" + (", h the number of the head" if is_model else "")
    rows = [(times([line[0] for line in group]), *group[0][1:]) for group in groups]
    return section("by head", table(columns, rows), detail=detail)


def _by_head(pieces: Sequence[HeadSlice], *, is_model: bool) -> list[tuple[str, str, str]]:
    """Return a row a head; of a model one for heads whose bounds go up in even steps, `64h to 64h+63`."""
    rows = _in_steps([(piece.head, piece.rows) for piece in pieces])
    columns = _in_steps([(piece.head, piece.columns) for piece in pieces if piece.columns is not None])
    if is_model and len(pieces) > 1 and rows is not None and columns is not None:
        return [(text.spans(piece.head for piece in pieces), rows, columns)]
    return [(str(piece.head), *_bounds(piece)) for piece in pieces]


def _in_steps(bounds: Sequence[tuple[int, tuple[int, int]]]) -> str | None:
    """Return the bounds of head h; empty where there are none, None where no line goes through them."""
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
    """Return a table with a column a head count. What is not the same in every column is set in strong type."""
    lines: list[tuple[str, list[str]]] = [
        ("head_dim", [str(c.head_dim) for c in counts]),
        ("parameters", [text.count(c.numel) for c in counts]),
    ]
    for name in dict.fromkeys(name for c in counts for name in c.shapes):
        lines.append((name, [text.shape(c.shapes[name]) if name in c.shapes else "" for c in counts]))
        slices = [{piece.part: piece for piece in c.first_head.get(name, ())} for c in counts]
        for part in dict.fromkeys(part for parts in slices for part in parts):
            owned = _owned([parts.get(part) for parts in slices], [c.shapes.get(name, ()) for c in counts])
            lines.append((f"head 0 of {part}", owned))
    columns = [Column("num_heads"), *(Column(str(c.num_heads), "right") for c in counts)]
    tones: list[Tone] = ["strong" if len(set(line)) > 1 else "muted" for _, line in lines]
    rows = [(name, *(Cell(field, tone) for field in line)) for (name, line), tone in zip(lines, tones, strict=True)]
    return table(columns, rows, split=True)


def _owned(pieces: Sequence[HeadSlice | None], shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """Return what head 0 owns under each head count, in the bounds that the count moves: `rows 0–255`."""
    both = [(piece, shape) for piece, shape in zip(pieces, shapes, strict=True) if piece is not None]
    by_columns = any(piece.columns not in (None, (0, shape[-1])) for piece, shape in both)
    by_rows = not by_columns or any(piece.rows != (0, shape[0]) for piece, shape in both)

    def owned(piece: HeadSlice) -> str:
        rows, columns = _bounds(piece)
        if piece.columns is None:
            return f"elements {rows}"
        return ", ".join([f"rows {rows}"] * by_rows + [f"columns {columns}"] * by_columns)

    return ["" if piece is None else owned(piece) for piece in pieces]
