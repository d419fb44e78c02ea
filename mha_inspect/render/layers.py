"""The page of `layers`."""

from __future__ import annotations

from .. import text
from ..reports.layers import LayersReport
from .page import Column, Facts, Page, Paragraph, Section, table


def layers_page(report: LayersReport) -> Page:
    """Return the page: a row a layer, then how each splits its heads, what it takes and where it comes from."""
    letters = ", ".join(f"{letter} {name}" for letter, name in report.letters.items())
    layers = table(
        report.layers,
        (Column("layer", tone="strong"), lambda layer: layer.name),
        (Column("how it is written", wrap=30), lambda layer: layer.summary),
        (Column("parameters"), lambda layer: layer.formula),
    )
    return Page(
        "layers",
        f"{text.plural(len(report.layers), 'way')} to write attention, each for --layer and diff",
        f"parameter counts with biases: {letters}",
        (
            Section((layers,)),
            Section((Facts(tuple((layer.name, layer.split) for layer in report.layers)),), "how the heads are split"),
            Section(
                (Facts(tuple((layer.name, ", ".join(layer.takes) or "none") for layer in report.layers)),),
                "settings beyond those that every layer takes",
            ),
            Section(
                (
                    Facts(tuple((layer.name, layer.source) for layer in report.layers)),
                    Paragraph("mha-inspect diff LEFT RIGHT shows where two of them part ways.", "muted"),
                ),
                "source of the style",
            ),
        ),
    )
