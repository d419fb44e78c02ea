"""Parts that several pages share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any, TypeVar

from .. import text
from ..reports.common import Environment, LayerInfo, MeasuredAgainst, Stats, Values, Verdict
from .page import LONGEST, Cell, Column, Facts, Page, Paragraph, Section, Table, Tone, Verbatim, facts, section
from .page import table as table_of

if TYPE_CHECKING:
    from ..reports.common import Difference
    from ..reports.compare_heads import HeadCount
    from ..reports.diff import StageRow

T = TypeVar("T")

SETTINGS_AS_USUAL: dict[str, Any] = {"bias": True, "batch_first": True}
"""Settings that are True unless someone asks otherwise: they are named only when they are not."""

MEASURED: dict[MeasuredAgainst, str] = {
    "float64": "measured against float64",
    "half a digit": "measured with weights and inputs off by half a last digit, for no copy of it runs in float64",
}

SHAPE = Column("shape", tone="shape")
AXES = Column("axes", tone="axes")
DTYPE = Column("dtype", optional=True)


def sizes(layer: LayerInfo) -> str:
    """Return the sizes of a layer, and every setting that is not as usual: `embed_dim 512, num_heads 2`."""
    first = ("embed_dim", "num_heads", "num_kv_heads", "head_dim")
    parts = [f"{name} {layer.spec[name]}" for name in first if layer.spec.get(name) is not None]
    for name, value in layer.spec.items():
        # Dtype and seed stand on the next line, with what the numbers were made with.
        is_usual = value is None or value == SETTINGS_AS_USUAL.get(name, False)
        if not is_usual and name not in (*first, "dtype", "seed"):
            parts.append(name if value is True else f"{name} {value}")
    return ", ".join(parts)


def layer_page(environment: Environment, layer: LayerInfo, sections: Iterable[Section], title: str = "") -> Page:
    """Return a page under the usual heading: the layer with its sizes, and what the numbers were made with."""
    # A module without parameters and inputs has no dtype, and a file is read without torch.
    made_with = [part for part in (environment.device, environment.dtype) if part]
    made_with += [] if environment.seed is None else [f"seed {environment.seed}"]
    made_with += [f"torch {environment.torch}"] if environment.torch else []
    return Page(title or f"layer {layer.name}", sizes(layer), ", ".join(made_with), tuple(sections))


def number(value: float | None) -> str:
    """Return a difference; empty where there is none."""
    return "" if value is None else text.small(value)


def multiple(value: float | None) -> str:
    """Return a multiple of the rounding error; empty where there is none."""
    return "" if value is None else text.times(value)


def verdict_cell(verdict: Verdict | None, *, baseline: bool = False) -> Cell:
    """Return the verdict; `baseline` where it would be of something against itself."""
    if baseline:
        return Cell("baseline", "muted")
    return Cell(verdict or "", "good" if verdict == "same" else "warn" if verdict else "")


def difference_columns(relative: str, drops: tuple[int, int]) -> tuple[Column, ...]:
    """Return the columns of `difference`: `relative` is the title of the second, `drops` that of the first two."""
    return (
        Column("largest difference", "right", drop=drops[0]),
        Column(relative, "right", drop=drops[1]),
        Column("× noise", "right"),
        Column("verdict"),
    )


def difference(of: HeadCount | Difference | StageRow, *, baseline: bool = False) -> tuple[Cell | str, ...]:
    """Return the largest difference, the relative one, the multiple of the rounding error, and the verdict."""
    largest, relative = number(of.max_abs_difference), number(of.relative_difference)
    return largest, relative, multiple(of.times_noise), verdict_cell(of.verdict, baseline=baseline)


def grouped(items: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    """Return the items in groups of the same key, in the order in which the first of each came."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def alike(name: str) -> str:
    """Return what names have in common that differ in their numbers alone, where those can be reckoned with."""
    return re.sub(r"\d{1,9}", "0", name) if len(name) < LONGEST and name.isascii() else name


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


def shape_cell(sizes: tuple[int, ...], axes: str) -> Cell:
    """Return a field with a shape that knows its axes."""
    return Cell(text.shape(sizes), "shape", axes)


def changes_only(names: Iterable[str], before: str) -> Iterator[str]:
    """Yield each name where it is another than the one before it, else nothing."""
    for name in names:
        yield "" if name == before else name
        before = name


def notes(sentences: Iterable[str]) -> tuple[Facts, ...]:
    """Return a paragraph for each sentence that a reader should not miss."""
    return tuple(facts(("note", sentence)) for sentence in sentences)


def answered(sentences: Iterable[str]) -> Section:
    """Return the section that a page ends with."""
    return section("answer", *(Paragraph(sentence, "strong") for sentence in sentences))


def statistics(rows: Iterable[tuple[str, Stats | None]]) -> tuple[Table, ...]:
    """Return the statistics of those that have any; nothing where none has."""

    def counted(number: int, tone: Tone) -> Cell:
        return Cell(text.count(number), tone if number else "muted")

    fields = []
    for name, stats in rows:
        if stats is not None:
            # Where no element is finite, there is nothing to take the mean of.
            finite = ("" if isnan(n) else text.statistic(n) for n in (stats.mean, stats.std, stats.min, stats.max))
            odd = counted(stats.nan, "bad"), counted(stats.inf, "bad"), counted(stats.masked, "")
            fields.append((name, *finite, *odd))
    numbers = [Column(title, "right") for title in ("mean", "std", "min", "max")]
    counts = [Column(title, "right", drop=drop) for drop, title in enumerate(("NaN", "inf", "masked"), 1)]
    return (table_of([Column("statistics"), *numbers, *counts], fields),) if fields else ()


def contents(rows: Iterable[tuple[str, tuple[int, ...], str, Values | None]]) -> tuple[Verbatim, ...]:
    """Return the tensors of those that have them: name, shape, axes, content."""
    return tuple(
        Verbatim(tuple(values.text.split("\n")), name, text.shape(sizes), axes)
        for name, sizes, axes, values in rows
        if values is not None
    )
