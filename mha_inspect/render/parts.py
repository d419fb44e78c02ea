"""Parts that several pages share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
    parts = []
    for name in SIZES:
        if layer.spec.get(name) is not None:
            parts.append(f"{name} {layer.spec[name]}")
    for name, value in layer.spec.items():
        # Dtype and seed stand on the next line, with what the numbers were made with.
        if name in (*SIZES, "dtype", "seed"):
            continue
        is_usual = value is None or value == SETTINGS_AS_USUAL.get(name, False)
        if not is_usual:
            parts.append(name if value is True else f"{name} {value}")
    return ", ".join(parts)


def layer_page(environment: Environment, layer: LayerInfo, sections: Iterable[Section], title: str = "") -> Page:
    """Return a page with the usual heading: the layer with its sizes, device, dtype, seed and torch version."""
    # A module without parameters and inputs has no dtype, and a file is read without torch.
    made_with = [environment.device, environment.dtype]
    if environment.seed is not None:
        random = f"random {environment.random}, " if environment.random else ""
        made_with.append(f"{random}seed {environment.seed}")
    if environment.torch:
        made_with.append(f"torch {environment.torch}")
    subtitle = ", ".join(filter(None, made_with))
    return Page(
        title=title or f"layer {layer.name}",
        detail=sizes(layer),
        subtitle=subtitle,
        sections=tuple(sections),
    )


def shape_cell(sizes: tuple[int, ...], axes: str, whole: tuple[int, ...] | None = None) -> Cell:
    """Return a field with a shape and the names of its axes; a part of a tensor also gets the shape of the `whole`."""
    shape = text.shape(sizes)
    if whole is not None:
        shape += f" of {text.shape(whole)}"
    return Cell(shape, "shape", axes)


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


_TONE_OF_VERDICT: dict[Verdict | None, Tone] = {"same": "good", "differs": "warn", "inconclusive": "warn"}


def _never(row: object) -> bool:
    return False


def verdict_column(is_baseline: Callable[[Any], bool] = _never) -> Column:
    """Return the column of verdicts. The baseline has none: it is not compared with itself."""

    def cell(row: Any) -> Cell:
        if is_baseline(row):
            return Cell("baseline", "muted")
        return Cell(row.verdict or "", _TONE_OF_VERDICT.get(row.verdict, ""))

    return Column("verdict", cell)


def difference_columns(
    relative: str, drops: tuple[int, int], is_baseline: Callable[[Any], bool] = _never
) -> tuple[Column, ...]:
    """Return the columns of a difference: `relative` is the title of the second, `drops` that of the first two."""
    drop_largest, drop_relative = drops
    return (
        Column("largest difference", lambda row: number(row.max_abs_difference), "right", drop=drop_largest),
        Column(relative, lambda row: number(row.relative_difference), "right", drop=drop_relative),
        Column("times rounding", lambda row: multiple(row.times_noise), "right"),
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
    if len(name) >= LONGEST or not name.isascii():
        return name
    return re.sub(r"\d{1,9}", "0", name)


def times(names: Sequence[str]) -> str:
    """Return names that differ only in their numbers as one, with the count: `layers.0–31.self_attn ×32`."""
    if len(names) == 1 or not names[0]:
        return names[0]
    pieces = [re.split(r"(\d+)", name) for name in names]  # layers. 0 .self_attn
    joined = ""
    for column in zip(*pieces, strict=True):
        # Between the numbers the names are the same.
        numbers = dict.fromkeys(column)
        if len(numbers) > 1:
            joined += text.spans(map(int, numbers))
        else:
            joined += column[0]
    return f"{joined} ×{len(names)}"


def folded(
    items: Iterable[Any],
    *names: str,
    merged: Mapping[str, Callable[[list[Any]], object]] | None = None,
    apart: Callable[[Any], bool] = _never,
) -> list[Any]:
    """Return items that differ only in the numbers of their names as one; items for which `apart` is true stay.

    Fields that are `merged` may differ, and get the result of their function over all the items.
    """
    merged = merged or {}

    def key(item: Any) -> object:
        if apart(item):
            return id(item)
        same: dict[str, Any] = dict.fromkeys(merged)
        for name in names:
            same[name] = alike(getattr(item, name))
        return replace(item, **same)

    functions = {**dict.fromkeys(names, times), **merged}
    folded = []
    for group in grouped(items, key):
        joined = {}
        for name, function in functions.items():
            values = [getattr(item, name) for item in group]
            joined[name] = function(values)
        folded.append(replace(group[0], **joined))
    return folded


def notes(sentences: Iterable[str]) -> tuple[Facts, ...]:
    """Return a line for each note."""
    lines = [facts(("note", sentence)) for sentence in sentences]
    return tuple(lines)


def answered(sentences: Sequence[str]) -> Section:
    """Return the section with the rest of an answer, whose first sentence is the verdict."""
    rest = [Paragraph(sentence, "strong") for sentence in sentences[1:]]
    title = "answer" if rest else ""
    return section(title, *rest)


def contents(tensors: Iterable[Any]) -> Iterator[Table | Verbatim]:
    """Yield the table of statistics and the contents, of tensors that have them."""
    measured: list[Any] = []
    written: list[Verbatim] = []
    for tensor in tensors:
        if tensor.stats is not None:
            measured.append(tensor)
        if tensor.values is not None:
            lines = tuple(tensor.values.text.split("\n"))
            shape = text.shape(tensor.shape)
            written.append(Verbatim(lines, tensor.name, shape, tensor.axes))
    if measured:
        yield table(measured, _STATISTICS)
    yield from written


def _statistic(name: str) -> Column:
    def cell(tensor: Any) -> str:
        number = getattr(tensor.stats, name)
        # Where no element is finite, there is nothing to take the mean of.
        return "" if isnan(number) else text.statistic(number)

    return Column(name, cell, "right")


def _counted(title: str, drop: int, tone: Tone = "") -> Column:
    """Return the column of a number of elements, whose tone is for numbers other than 0."""

    def cell(tensor: Any) -> Cell:
        number = getattr(tensor.stats, title.lower())
        return Cell(f"{number:,}", tone if number else "muted")

    return Column(title, cell, "right", drop=drop)


_STATISTICS = (
    Column("statistics", lambda tensor: tensor.name),
    _statistic("mean"),
    _statistic("std"),
    _statistic("min"),
    _statistic("max"),
    _counted("NaN", 1, "bad"),
    _counted("inf", 2, "bad"),
    _counted("masked", 3),
)


def ranks_section(ranks: Sequence[Rank] | None) -> Section:
    """Return the table of ranks; ranks that differ only in the place of their rows are one row."""
    if ranks is None:
        return section("")
    columns = [
        Column("rank", lambda alike: text.spans(rank.rank for rank in alike), tone="strong"),
        Column("heads", lambda alike: alike[0].heads or "", "right", optional=True),
        Column("kv_heads", lambda alike: _kv_heads(alike[0]), "right", optional=True),
        Column("W_q rows", partial(_spans_of, "W_q"), tone="shape", optional=True, drop=1),
        Column("W_k rows", partial(_spans_of, "W_k"), tone="shape", optional=True, drop=2),
        Column("W_v rows", partial(_spans_of, "W_v"), tone="shape", optional=True, drop=2),
        Column("W_o columns", partial(_spans_of, "W_o"), tone="shape", optional=True, drop=1),
        Column("parameters", lambda alike: text.byte_size(alike[0].bytes), "right"),
        Column("FLOPs", lambda alike: text.flops(alike[0].flops), "right"),
        Column("exchanged", lambda alike: text.byte_size(alike[0].exchanged), "right", drop=3),
    ]
    rows = table(grouped(ranks, _but_its_place), columns)
    return section(text.plural(len(ranks), "rank"), rows, detail=_balance(ranks))


def _but_its_place(rank: Rank) -> object:
    """Return all of a rank but its number and the place of its rows: of these only how many there are."""
    counts = []
    for name, (start, stop) in rank.rows.items():
        counts.append((name, stop - start))
    sizes = rank.bytes, rank.flops, rank.exchanged
    return tuple(counts), rank.heads, rank.kv_heads, rank.kv_copied, sizes


def _kv_heads(rank: Rank) -> str:
    count = str(rank.kv_heads or "")
    return f"{count}, copied" if rank.kv_copied else count


def _spans_of(name: str, ranks: Sequence[Rank]) -> str:
    """Return the rows of a part on these ranks, at most three of them: `0–63, …, 448–511`."""
    spans: dict[str, None] = {}
    for rank in ranks:
        if name in rank.rows:
            spans[text.span(rank.rows[name])] = None
    places = list(spans)
    if len(places) > 2:
        places = [places[0], "…", places[-1]]
    return ", ".join(places)


def _balance(ranks: Sequence[Rank]) -> str:
    """Return how much the busiest rank computes; empty if all compute the same."""
    flops = [rank.flops for rank in ranks]
    most = max(flops)
    if most == min(flops):
        return ""
    busiest = ranks[flops.index(most)].rank
    times_mean = most * len(flops) / sum(flops)
    return f"rank {busiest} computes {times_mean:.2f} × the mean FLOPs"
