"""Parts that several pages share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import isnan
from typing import Any, TypeVar

from .. import text
from ..reports.common import Environment, LayerInfo, MeasuredAgainst, Verdict
from ..reports.trace import Rank
from .page import LONGEST, Cell, Column, Facts, Page, Paragraph, Section, Table, Tone, Verbatim, facts, section, table

T = TypeVar("T")

SIZES = ("embed_dim", "num_heads", "num_kv_heads", "head_dim")
SETTINGS_AS_USUAL: dict[str, Any] = {"bias": True, "batch_first": True}
"""Settings that are True by default, and shown only if they are not."""

MEASURED: dict[MeasuredAgainst, str] = {
    "float64": "measured against float64",
    "half a digit": "measured by changing weights and inputs by half a digit, since no copy of it runs in float64",
}


def sizes(layer: LayerInfo) -> str:
    """Return the sizes of a layer and every unusual setting: `embed_dim 512, num_heads 2`."""
    parts = [f"{name} {layer.spec[name]}" for name in SIZES if layer.spec.get(name) is not None]
    for name, value in layer.spec.items():
        # Dtype and seed stand on the next line, with what the numbers were made with.
        is_usual = value is None or value == SETTINGS_AS_USUAL.get(name, False)
        if not is_usual and name not in (*SIZES, "dtype", "seed"):
            parts.append(name if value is True else f"{name} {value}")
    return ", ".join(parts)


def layer_page(environment: Environment, layer: LayerInfo, sections: Iterable[Section], title: str = "") -> Page:
    """Return a page with the usual heading: the layer with its sizes, device, dtype, seed and torch version."""
    # A module without parameters and inputs has no dtype, and a file is read without torch.
    seed = "" if environment.seed is None else f"seed {environment.seed}"
    version = environment.torch and f"torch {environment.torch}"
    made_with = ", ".join(filter(None, (environment.device, environment.dtype, seed, version)))
    return Page(title or f"layer {layer.name}", sizes(layer), made_with, tuple(sections))


def shape_cell(sizes: tuple[int, ...], axes: str, whole: tuple[int, ...] | None = None) -> Cell:
    """Return a field with a shape and the names of its axes; a part of a tensor also gets the shape of the `whole`."""
    of = "" if whole is None else f" of {text.shape(whole)}"
    return Cell(text.shape(sizes) + of, "shape", axes)


SHAPE = Column("shape", lambda row: shape_cell(row.shape, row.axes), tone="shape")
AXES = Column("axes", lambda row: row.axes, tone="axes")


def dtypes(usual: str) -> Column:
    """Return the column of dtypes, filled where one differs from `usual` or from the row above."""
    return Column("dtype", lambda row: row.dtype, optional=True, after=usual)


def number(value: float | None) -> str:
    """Return a difference as text; empty for None."""
    return "" if value is None else text.small(value)


def multiple(value: float | None) -> str:
    """Return the order of magnitude of a multiple of the rounding error; empty for None."""
    return "" if value is None else text.magnitude(value)


def verdict_column(is_baseline: Callable[[Any], bool] = lambda row: False) -> Column:
    """Return the column of verdicts. The baseline has none: it is not compared with itself."""
    tones: dict[Verdict | None, Tone] = {"same": "good", "differs": "warn", "inconclusive": "warn"}

    def cell(row: Any) -> Cell:
        return Cell("baseline", "muted") if is_baseline(row) else Cell(row.verdict or "", tones.get(row.verdict, ""))

    return Column("verdict", cell)


def difference_columns(
    relative: str, drops: tuple[int, int], is_baseline: Callable[[Any], bool] = lambda row: False
) -> tuple[Column, ...]:
    """Return the columns of a difference: `relative` is the title of the second, `drops` that of the first two."""
    return (
        Column("largest difference", lambda row: number(row.max_abs_difference), "right", drop=drops[0]),
        Column(relative, lambda row: number(row.relative_difference), "right", drop=drops[1]),
        Column("× noise", lambda row: multiple(row.times_noise), "right"),
        verdict_column(is_baseline),
    )


def grouped(items: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    """Return the items in groups of equal key, in order of first appearance."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def alike(name: str) -> str:
    """Return the name with its numbers replaced by 0, so that repeated layers compare equal."""
    return re.sub(r"\d{1,9}", "0", name) if len(name) < LONGEST and name.isascii() else name


def times(names: Sequence[str]) -> str:
    """Return names that differ only in their numbers as one, with the count: `layers.0–31.self_attn ×32`."""
    if len(names) == 1 or not names[0]:
        return names[0]
    columns = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    spanned = [
        text.spans(map(int, dict.fromkeys(column))) if place % 2 and len(set(column)) > 1 else column[0]
        for place, column in enumerate(columns)
    ]
    return f"{''.join(spanned)} ×{len(names)}"


def folded(
    items: Iterable[Any],
    *names: str,
    merged: Mapping[str, Callable[[list[Any]], object]] | None = None,
    apart: Callable[[Any], bool] = lambda item: False,
) -> list[Any]:
    """Return items that differ only in the numbers of their names as one; items for which `apart` is true stay.

    Fields that are `merged` may differ, and get the result of their function over all the items.
    """
    merged = merged or {}

    def key(item: Any) -> object:
        same = {name: alike(getattr(item, name)) for name in names}
        return id(item) if apart(item) else replace(item, **same, **dict.fromkeys(merged))

    together = {**dict.fromkeys(names, times), **merged}
    return [
        replace(group[0], **{name: merge([getattr(item, name) for item in group]) for name, merge in together.items()})
        for group in grouped(items, key)
    ]


def notes(sentences: Iterable[str]) -> tuple[Facts, ...]:
    """Return a line for each note."""
    return tuple(facts(("note", sentence)) for sentence in sentences)


def answered(sentences: Sequence[str]) -> Section:
    """Return the section with the rest of an answer, whose first sentence is the verdict."""
    return section("answer" if sentences[1:] else "", *(Paragraph(sentence, "strong") for sentence in sentences[1:]))


def contents(tensors: Iterable[Any]) -> tuple[Table | Verbatim, ...]:
    """Return the table of statistics and the contents, of tensors that have them."""

    def finite(name: str) -> Column:
        # Where no element is finite, there is nothing to take the mean of.
        return Column(name, lambda t: "" if isnan(n := getattr(t.stats, name)) else text.statistic(n), "right")

    def counted(title: str, drop: int, tone: Tone = "") -> Column:
        def cell(tensor: Any) -> Cell:
            number = getattr(tensor.stats, title.lower())
            return Cell(f"{number:,}", tone if number else "muted")

        return Column(title, cell, "right", drop=drop)

    columns = [Column("statistics", lambda tensor: tensor.name), *map(finite, ("mean", "std", "min", "max"))]
    columns += [counted("NaN", 1, "bad"), counted("inf", 2, "bad"), counted("masked", 3)]
    tensors = list(tensors)
    measured = [tensor for tensor in tensors if tensor.stats is not None]
    shown = [tensor for tensor in tensors if tensor.values is not None]
    return (
        *([table(measured, columns)] if measured else []),
        *(Verbatim(tuple(t.values.text.split("\n")), t.name, text.shape(t.shape), t.axes) for t in shown),
    )


def ranks_section(ranks: Sequence[Rank] | None) -> Section:
    """Return the table of ranks; ranks that differ only in the place of their rows are one row."""
    if ranks is None:
        return section("")

    def key(rank: Rank) -> object:
        sizes = {name: stop - start for name, (start, stop) in rank.rows.items()}
        return *sizes.items(), rank.heads, rank.kv_heads, rank.kv_copied, rank.bytes, rank.flops, rank.exchanged

    def rows(name: str, what: str) -> Column:
        def spans(alike: list[Rank]) -> str:
            places = [*dict.fromkeys(text.span(rank.rows[name]) for rank in alike if name in rank.rows)]
            return ", ".join(places) if len(places) < 3 else f"{places[0]}, …, {places[-1]}"

        return Column(f"{name} {what}", spans, tone="shape", optional=True, drop=1 if name in ("W_q", "W_o") else 2)

    columns = [
        Column("rank", lambda alike: text.spans(rank.rank for rank in alike), tone="strong"),
        Column("heads", lambda alike: alike[0].heads or "", "right", optional=True),
        Column("kv_heads", lambda r: f"{r[0].kv_heads or ''}{', copied' * r[0].kv_copied}", "right", optional=True),
        *(rows(f"W_{letter}", "columns" if letter == "o" else "rows") for letter in "qkvo"),
        Column("parameters", lambda alike: text.byte_size(alike[0].bytes), "right"),
        Column("FLOPs", lambda alike: text.flops(alike[0].flops), "right"),
        Column("exchanged", lambda alike: text.byte_size(alike[0].exchanged), "right", drop=3),
    ]
    flops = [rank.flops for rank in ranks]
    busiest, most = ranks[flops.index(max(flops))].rank, max(flops) * len(flops) / (sum(flops) or 1)
    balance = f"rank {busiest} computes {most:.2f} × the mean FLOPs" if len(set(flops)) > 1 else ""
    return section(text.plural(len(ranks), "rank"), table(grouped(ranks, key), columns), detail=balance)
