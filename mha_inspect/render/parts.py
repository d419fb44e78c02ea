"""Parts that several documents share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import isnan
from typing import TYPE_CHECKING, Any, TypeVar

from .. import text
from ..reports.common import Environment, LayerInfo, MeasuredAgainst, Stats, Values, Verdict
from .page import Block, Cell, Column, Field, Page, Paragraph, Section, Table, Tone, Verbatim, facts, section, table

if TYPE_CHECKING:
    from ..reports.compare_heads import HeadCount
    from ..reports.diff import OutputDifference, StageRow

    Measured = HeadCount | OutputDifference | StageRow

T = TypeVar("T")

SETTINGS_AS_USUAL: dict[str, Any] = {"bias": True, "batch_first": True}
"""Settings that are True unless someone asks otherwise: they are named only when they are not."""

MEASURED: dict[MeasuredAgainst, str] = {
    "float64": "measured against float64",
    "half a digit": "measured with weights and inputs off by half a last digit, for no copy of it runs in float64",
}

VERDICT_TONES: dict[Verdict, Tone] = {"same": "good", "differs": "warn", "inconclusive": "warn"}


def sizes(layer: LayerInfo) -> str:
    """Return the sizes of a layer, and every setting that is not as usual: `embed_dim 512, num_heads 2`."""
    first = ("embed_dim", "num_heads", "num_kv_heads", "head_dim")
    # Dtype and seed stand on the next line, with what the numbers were made with.
    rest = [name for name in layer.spec if name not in (*first, "dtype", "seed")]
    parts = [f"{name} {layer.spec[name]}" for name in first if layer.spec.get(name) is not None]
    for name in rest:
        value = layer.spec[name]
        if value is True and name not in SETTINGS_AS_USUAL:
            parts.append(name)
        elif value != SETTINGS_AS_USUAL[name] if name in SETTINGS_AS_USUAL else value not in (None, False):
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def layer_page(environment: Environment, layer: LayerInfo, sections: Iterable[Section]) -> Page:
    """Return a page under the usual heading: the layer with its sizes, and what the numbers were made with."""
    # A module without parameters and inputs has no dtype.
    made_with = [part for part in (environment.device, environment.dtype) if part]
    if environment.seed is not None:
        made_with.append(f"seed {environment.seed}")
    if environment.torch:  # a file is read without it
        made_with.append(f"torch {environment.torch}")
    return Page(f"layer {layer.name}", sizes(layer), ", ".join(made_with), tuple(sections))


def number(value: float | None) -> str:
    """Return a difference; empty where there is none."""
    return "" if value is None else text.small(value)


def multiple(value: float | None) -> str:
    """Return a multiple of the rounding error; empty where there is none."""
    return "" if value is None else text.times(value)


def verdict_cell(verdict: Verdict | None, *, baseline: bool = False) -> Cell:
    """Return the verdict; `baseline` where it would be of something against itself."""
    return Cell("baseline", "muted") if baseline else Cell(verdict or "", VERDICT_TONES[verdict] if verdict else "")


def difference_columns(
    relative: str,
    drops: tuple[int, int] = (0, 0),
    *,
    of: Callable[[Any], Measured] = lambda item: item,
    is_baseline: Callable[[Any], bool] = lambda item: False,
) -> tuple[tuple[Column, Callable[[Any], Field]], ...]:
    """Return columns for the largest difference, the relative one, the multiple of the rounding error, and the verdict.

    Args:
        relative: title of the second.
        drops: `drop` of the first two.
        of: what of an item was measured.
        is_baseline: whether an item is what the others are compared with.
    """
    return (
        (Column("largest difference", "right", drop=drops[0]), lambda item: number(of(item).max_abs_difference)),
        (Column(relative, "right", drop=drops[1]), lambda item: number(of(item).relative_difference)),
        (Column("× noise", "right"), lambda item: multiple(of(item).times_noise)),
        (Column("verdict"), lambda item: verdict_cell(of(item).verdict, baseline=is_baseline(item))),
    )


def grouped(items: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    """Return the items in groups of the same key, in the order in which the first of each came."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def shape_cell(sizes: tuple[int, ...], axes: str) -> Cell:
    """Return a field with a shape that knows its axes."""
    return Cell(text.shape(sizes), "shape", axes)


def changes_only(names: Iterable[str], before: str) -> Iterator[str]:
    """Yield each name where it is another than the one before it, else nothing."""
    for name in names:
        yield "" if name == before else name
        before = name


def notes(sentences: Iterable[str]) -> tuple[Block, ...]:
    """Return a paragraph for each sentence that a reader should not miss."""
    return tuple(facts(("note", sentence)) for sentence in sentences)


def answered(sentences: Iterable[str]) -> Section:
    """Return the section that a page ends with."""
    return section("answer", *(Paragraph(sentence, "strong") for sentence in sentences))


def statistics(rows: Iterable[tuple[str, Stats | None]]) -> tuple[Table, ...]:
    """Return the statistics of those that have any; nothing where none has."""
    filled = [(name, stats) for name, stats in rows if stats is not None]
    if not filled:
        return ()

    def finite(number: float) -> str:
        """Return a number; nothing where no element is finite, and there is nothing to take the mean of."""
        return "" if isnan(number) else text.statistic(number)

    def counted(number: int, tone: Tone) -> Cell:
        return Cell(text.count(number), tone if number else "muted")

    return (
        table(
            filled,
            (Column("statistics"), lambda row: row[0]),
            (Column("mean", "right"), lambda row: finite(row[1].mean)),
            (Column("std", "right"), lambda row: finite(row[1].std)),
            (Column("min", "right"), lambda row: finite(row[1].min)),
            (Column("max", "right"), lambda row: finite(row[1].max)),
            (Column("NaN", "right", drop=1), lambda row: counted(row[1].nan, "bad")),
            (Column("inf", "right", drop=2), lambda row: counted(row[1].inf, "bad")),
            (Column("masked", "right", drop=3), lambda row: counted(row[1].masked, "")),
        ),
    )


def contents(rows: Iterable[tuple[str, tuple[int, ...], str, Values | None]]) -> tuple[Verbatim, ...]:
    """Return the tensors of those that have them: name, shape, axes, content."""
    return tuple(
        Verbatim(values.text, name, text.shape(sizes), axes) for name, sizes, axes, values in rows if values is not None
    )
