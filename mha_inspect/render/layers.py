"""The page of `layers`."""

from __future__ import annotations

from .. import text
from ..reports.layers import LayersReport
from .page import Column, Page, Paragraph, facts, section, table


def page(report: LayersReport) -> Page:
    """Return the page: a row a layer, then how each splits its heads, what it takes and where it comes from."""
    letters = ", ".join(f"{letter} {name}" for letter, name in report.letters.items())
    columns = [Column("layer", tone="strong"), Column("how it is written", wrap=30), Column("parameters")]
    rows = [(layer.name, layer.summary, layer.formula) for layer in report.layers]
    takes = [(layer.name, ", ".join(layer.takes) or "none") for layer in report.layers]
    more = Paragraph("mha-inspect diff LEFT RIGHT shows where two of them part ways.", "muted")
    return Page(
        "layers",
        f"{text.plural(len(report.layers), 'way')} to write attention, each for --layer and diff",
        f"parameter counts with biases: {letters}",
        (
            section("", table(columns, rows)),
            section("how the heads are split", facts(*((layer.name, layer.split) for layer in report.layers))),
            section("settings beyond those that every layer takes", facts(*takes)),
            section("source of the style", facts(*((layer.name, layer.source) for layer in report.layers)), more),
        ),
    )
