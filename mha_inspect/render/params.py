"""The page of `params`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

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
from .page import LONGEST, Block, Cell, Column, Facts, Page, Paragraph, Section, Table, facts, section, table
from .parts import contents, grouped, layer_page, notes, shape_cell, statistics


def page(report: ParamsReport) -> Page:
    """Return the page: every parameter, the total with its closed formula, and what belongs to which head."""
    page = layer_page(report.environment, report.layer, _sections(report))
    if report.stored_attentions is None:
        return page
    return replace(page, title=f"checkpoint {report.layer.name}")


def _sections(report: ParamsReport) -> Iterator[Section]:
    parameters = report.parameters
    if report.stored_attentions:
        by = "by the names of their tensors" if report.like is None else f"by the run of {report.like.module}"
        yield section("attentions", _attentions(report.stored_attentions), detail=by)
    if report.like is not None:
        yield section("fit", *_fit(report.like), detail=f"against {report.like.module}")
    rows = [(p.name, p) for p in parameters] if report.stored_attentions is None else _folded(parameters)
    yield section(
        "parameters",
        _parameters(rows, report.total),
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
    pieces = [("missing", one.name, "", text.shape(one.shape)) for one in like.missing]
    pieces += [("unexpected", one.name, text.shape(one.shape), "") for one in like.unexpected]
    pieces += [("wrong shape", one.name, text.shape(one.shape), text.shape(one.expected)) for one in like.wrong_shape]
    rows = grouped(pieces, lambda one: (one[0], alike(one[1]), *one[2:]))
    if rows:
        yield table(
            rows,
            (Column("what"), lambda own: own[0][0]),
            (Column("name", tone="strong"), lambda own: times([one[1] for one in own])),
            (Column("in the file"), lambda own: own[0][2]),
            (Column(f"in {like.module}"), lambda own: own[0][3]),
        )


def times(names: Sequence[str]) -> str:
    """Return names that differ in their numbers alone as one, with how many they are: `layers.0–31.self_attn ×32`."""
    if len(names) == 1:
        return names[0]
    columns = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    spanned = [
        text.spans(map(int, dict.fromkeys(column))) if place % 2 and len(set(column)) > 1 else column[0]
        for place, column in enumerate(columns)
    ]
    return f"{''.join(spanned)} ×{len(names)}"


def alike(name: str) -> str:
    """Return what names have in common that differ in their numbers alone, where those can be reckoned with."""
    return re.sub(r"\d{1,9}", "0", name) if len(name) < LONGEST and name.isascii() else name


def _folded(parameters: Sequence[Parameter]) -> list[tuple[str, Parameter]]:
    """Return tensors that repeat from layer to layer as one row, whose sizes are those of all."""

    def kind(p: Parameter) -> object:
        apart = p.stats is not None or p.heads is not None
        return p.name if apart else replace(p, name=alike(p.name), values=None)

    rows = []
    for own in grouped(parameters, kind):
        whole = [sum(getattr(p, part) for p in own) for part in ("numel", "nbytes", "share")]
        one = replace(own[0], numel=whole[0], nbytes=whole[1], share=whole[2])
        rows.append((times([p.name for p in own]), one))
    return rows


def _attentions(attentions: Sequence[StoredAttention]) -> Table:
    return table(
        grouped(attentions, lambda one: (alike(one.module), replace(one, module="", parameters=()))),
        (Column("module", tone="strong"), lambda own: times([one.module for one in own]) or "the whole file"),
        (Column("num_heads", "right"), lambda own: own[0].num_heads or "?"),
        (Column("num_kv_heads", "right"), lambda own: own[0].num_kv_heads or "?"),
        (Column("head_dim", "right"), lambda own: own[0].head_dim or "?"),
        (Column("heads that fit", wrap=24, optional=True), lambda own: ", ".join(map(str, own[0].fits))),
    )


def _parameters(named: Sequence[tuple[str, Parameter]], total: ParametersTotal) -> Table:
    return table(
        named,
        (Column("name", tone="strong"), lambda row: row[0]),
        (Column("shape", tone="shape"), lambda row: shape_cell(row[1].shape, row[1].axes)),
        (Column("axes", tone="axes"), lambda row: row[1].axes),
        (Column("dtype", tone="muted", drop=3), lambda row: row[1].dtype),
        (Column("count", "right"), lambda row: text.count(row[1].numel)),
        (Column("bytes", "right", "muted", drop=2), lambda row: text.byte_size(row[1].nbytes)),
        (Column("share", "right", "muted", drop=1), lambda row: text.percent(row[1].share)),
        (Column("role", wrap=24, into="axes"), lambda row: row[1].role),
        total=("total", "", "", "", text.count(total.numel), text.byte_size(total.nbytes), "", ""),
    )


def _formula(total: ParametersTotal) -> tuple[Facts, ...]:
    """Return the closed formula beside the count."""
    if total.formula_numel is None:
        return ()
    given = f"{total.formula} = {text.count(total.formula_numel)}"
    if total.formula_numel == total.numel:
        return (facts(("formula", f"{given}, as counted"), tone="good"),)
    return (
        facts(("formula", f"{given}, but {text.count(total.numel)} were counted: one of the two is wrong"), tone="bad"),
    )


def _bounds(piece: HeadSlice) -> tuple[str, str]:
    return text.span(piece.rows), "" if piece.columns is None else text.span(piece.columns)


def _per_head(parameters: Sequence[Parameter]) -> Section:
    """Return a table with a row a head; of a model, which has several attentions, a row a part, all heads in it."""
    parts: dict[tuple[str, str], list[HeadSlice]] = {}
    for p in parameters:
        for piece in p.heads or ():
            parts.setdefault((p.name, piece.part), []).append(piece)
    is_model = len(parts) > len({part for _, part in parts})
    rows = [
        (name, part, *own)
        for (name, part), pieces in parts.items()
        for own in (_every_head(pieces) if is_model else _each_head(pieces))
    ]
    if not rows:
        return section("by head", Paragraph("No parameter has a part that is one head's alone."))
    found = table(
        grouped(rows, lambda row: (alike(row[0]) if is_model else row[0], *row[1:])),
        (Column("parameter"), lambda own: times([row[0] for row in own])),
        (Column("part", tone="strong"), lambda own: own[0][1]),
        (Column("head", "right"), lambda own: own[0][2]),
        (Column("rows", "right"), lambda own: own[0][3]),
        (Column("columns", "right", optional=True), lambda own: own[0][4]),
    )
    detail = "both ends included" + (", h the number of the head" if is_model else "")
    return section("by head", found, detail=detail)


def _each_head(pieces: Sequence[HeadSlice]) -> Iterator[tuple[str, str, str]]:
    return ((str(piece.head), *_bounds(piece)) for piece in pieces)


def _every_head(pieces: Sequence[HeadSlice]) -> Iterator[tuple[str, str, str]]:
    """Yield one row for heads whose bounds go up in even steps, `64h to 64h+63`; else a row a head."""
    rows = _in_steps([(piece.head, piece.rows) for piece in pieces])
    columns = _in_steps([(piece.head, piece.columns) for piece in pieces if piece.columns is not None])
    if len(pieces) == 1 or rows is None or columns is None:
        yield from _each_head(pieces)
    else:
        yield text.spans(piece.head for piece in pieces), rows, columns


def _in_steps(bounds: Sequence[tuple[int, tuple[int, int]]]) -> str | None:
    """Return the bounds of head h; empty where there are none, None where no line goes through them."""
    if not bounds:
        return ""
    (first, (start, stop)), (last, (end, _)) = bounds[0], bounds[-1]
    step = (end - start) // (last - first) if last != first else 0
    begin, width = start - step * first, stop - start
    if any(own != (begin + step * head, begin + step * head + width) for head, own in bounds):
        return None
    if not step:
        return text.span((begin, begin + width))
    ends = [f"{step}h+{offset}" if offset else f"{step}h" for offset in dict.fromkeys((begin, begin + width - 1))]
    return " to ".join(ends)


def _side_by_side(counts: tuple[HeadCountColumn, ...]) -> Table:
    """Return a table with a column a head count. What is not the same in every column is set in strong type."""
    rows: list[tuple[str, list[str]]] = [
        ("head_dim", [str(c.head_dim) for c in counts]),
        ("parameters", [text.count(c.numel) for c in counts]),
    ]
    for name in dict.fromkeys(name for c in counts for name in c.shapes):
        rows.append((name, [text.shape(c.shapes[name]) if name in c.shapes else "" for c in counts]))
        parts = dict.fromkeys(s.part for c in counts for s in c.first_head.get(name, ()))
        for part in parts:
            pieces = [next((own for own in c.first_head.get(name, ()) if own.part == part), None) for c in counts]
            rows.append((f"head 0 of {part}", _owned(pieces, [c.shapes.get(name, ()) for c in counts])))

    def cell(place: int, row: tuple[str, list[str]]) -> Cell:
        return Cell(row[1][place], "strong" if len(set(row[1])) > 1 else "muted")

    return table(
        rows,
        (Column("num_heads"), lambda row: row[0]),
        *((Column(str(c.num_heads), "right"), partial(cell, place)) for place, c in enumerate(counts)),
        split=True,
    )


def _owned(pieces: Sequence[HeadSlice | None], shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """Return what head 0 owns under each head count, in the bounds that the count moves: `rows 0–255`."""
    both = [(piece, shape) for piece, shape in zip(pieces, shapes, strict=True) if piece is not None]
    by_columns = any(piece.columns not in (None, (0, shape[-1])) for piece, shape in both)
    by_rows = not by_columns or any(piece.rows != (0, shape[0]) for piece, shape in both)
    texts = []
    for piece in pieces:
        rows, columns = _bounds(piece) if piece is not None else ("", "")
        if piece is not None and piece.columns is None:
            texts.append(f"elements {rows}")
        else:
            bounds = [f"rows {rows}"] * by_rows + [f"columns {columns}"] * by_columns
            texts.append(", ".join(bounds) if piece is not None else "")
    return texts
