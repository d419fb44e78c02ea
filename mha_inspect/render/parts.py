"""Parts that several documents share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isnan
from typing import TYPE_CHECKING, Any

from .. import text
from ..reports.common import Environment, LayerInfo, Measured, Stats, Values, Verdict
from .page import Block, Cell, Column, Page, Paragraph, Section, Table, Tone, Verbatim, table

if TYPE_CHECKING:
    from ..reports.compare_heads import HeadCount, HeadPair
    from ..reports.diff import OutputDifference, StageRow

SETTINGS_AS_USUAL: dict[str, Any] = {"bias": True, "batch_first": True}
"""Settings that are True unless someone asks otherwise: they are named only when they are not."""

MEASURED: dict[Measured, str] = {
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
        if name in SETTINGS_AS_USUAL:
            if value != SETTINGS_AS_USUAL[name]:
                parts.append(f"{name} {value}")
        elif value is True:
            parts.append(name)
        elif value is not None and value is not False and value != 0:
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
    shown = tuple(section for section in sections if section.blocks or section.title)
    return Page(f"layer {layer.name}", sizes(layer), ", ".join(made_with), shown)


def number(value: float | None) -> str:
    """Return a difference; empty where there is none."""
    return "" if value is None else text.small(value)


def multiple(value: float | None) -> str:
    """Return a multiple of the rounding error; empty where there is none."""
    return "" if value is None else text.times(value)


def verdict_cell(verdict: Verdict | None, *, baseline: bool = False) -> Cell:
    """Return the verdict; `baseline` where it would be of something against itself."""
    return Cell("baseline", "muted") if baseline else Cell(verdict or "", VERDICT_TONES[verdict] if verdict else "")


def difference_cells(
    item: HeadCount | HeadPair | OutputDifference | StageRow, *, baseline: bool = False
) -> tuple[Cell, ...]:
    """Return the largest difference, the relative one, the multiple of the rounding error, and the verdict."""
    return (
        Cell(number(item.max_abs_difference)),
        Cell(number(item.relative_difference)),
        Cell(multiple(item.times_noise)),
        verdict_cell(item.verdict, baseline=baseline),
    )


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
    return tuple(Paragraph(sentence, label="note") for sentence in sentences)


def statistics(rows: Iterable[tuple[str, Stats | None]]) -> tuple[Table, ...]:
    """Return the statistics of those that have any; nothing where none has."""
    filled = [(name, stats) for name, stats in rows if stats is not None]
    if not filled:
        return ()
    columns = (
        Column("statistics"),
        *(Column(name, "right") for name in ("mean", "std", "min", "max")),
        *(Column(name, "right", drop=drop) for name, drop in (("NaN", 1), ("inf", 2), ("masked", 3))),
    )
    return (
        table(
            columns,
            (
                (
                    Cell(name),
                    # Where no element is finite there is nothing to take the mean of.
                    *("" if isnan(n) else text.statistic(n) for n in (stats.mean, stats.std, stats.min, stats.max)),
                    *(Cell(text.count(n), "bad" if n else "muted") for n in (stats.nan, stats.inf)),
                    Cell(text.count(stats.masked), "" if stats.masked else "muted"),
                )
                for name, stats in filled
            ),
        ),
    )


def contents(rows: Iterable[tuple[str, tuple[int, ...], str, Values | None]]) -> tuple[Verbatim, ...]:
    """Return the tensors of those that have them: name, shape, axes, content."""
    return tuple(
        Verbatim(values.text, name, text.shape(sizes), axes) for name, sizes, axes, values in rows if values is not None
    )
