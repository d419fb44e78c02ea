"""The part of a trace's page that tells of products which follow one another without a softmax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..reports.products import Product, ProductPair
from .common import shape_cell
from .document import Cell, Column, Paragraph, Section, table

MOST_SHOWN = 4
"""Pairs that are shown: of a model of many kinds, the rest are counted."""

_FORMS = {
    "scores": "queries meet keys, then values",
    "state": "keys meet values, then queries (linear attention)",
}
_COLUMNS = (
    Column("step", tone="strong"),
    Column("shape", tone="shape"),
    Column("axes", tone="axes", wrap=12),
    Column("operation", tone="muted", into="axes"),
    Column("source", tone="muted", into="axes"),
)


def products_sections(pairs: tuple[ProductPair, ...]) -> Iterator[Section]:
    """Each kind of pair once, with the modules in which it is."""
    alike: dict[ProductPair, list[ProductPair]] = {}
    for pair in pairs:
        alike.setdefault(replace(pair, module="", count=0), []).append(pair)
    for group in list(alike.values())[:MOST_SHOWN]:
        yield _section(group)
    if len(alike) > MOST_SHOWN:
        rest = len(alike) - MOST_SHOWN
        yield Section((Paragraph(f"{rest} more pairs of products that differ: they are all in --format json."),))


def _section(group: list[ProductPair]) -> Section:
    pair = group[0]
    where = [f"in {pair.module}"] if pair.module else []
    if len(group) > 1:
        where.append(f"in {group[1].module}" if len(group) == 2 else f"and in {len(group) - 1} more modules")
    if pair.count > 1:
        where.append(f"{pair.count} times")
    between = f"between them {', '.join(pair.between)}" if pair.between else "nothing is between them"
    reading = f"{_FORMS[pair.form]}; " if pair.form else ""
    text = f"Two products follow one another, as in attention, but with no softmax: {reading}{between}."
    first = _names(pair.first, "a", "b")
    second = _names(pair.second, "c")
    rows = [
        *_factors(pair.first, first),
        _result(pair.first, " · ".join(first)),
        *((step, "", "", "", "") for step in pair.between),
        *_factors(pair.second, second),
        _result(pair.second, f"({' · '.join(first)}) · {second[0]}"),
    ]
    return Section((Paragraph(text), table(_COLUMNS, rows)), "products without a softmax", ", ".join(where))


def _names(product: Product, *otherwise: str) -> list[str]:
    """What the factors are called: by what they would be in attention, where that is known."""
    return [factor.role or name for factor, name in zip(product.factors, otherwise, strict=False)]


def _factors(product: Product, names: list[str]) -> Iterator[tuple[str | Cell, ...]]:
    for name, factor in zip(names, product.factors, strict=True):
        yield name, shape_cell(factor.shape, factor.axes), factor.axes, "", ""


def _result(product: Product, name: str) -> tuple[str | Cell, ...]:
    return name, shape_cell(product.shape, product.axes), product.axes, product.name, product.source
