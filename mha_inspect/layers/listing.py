"""The layers that can be built, as a report. No torch here: the listing is instant."""

from __future__ import annotations

from ..reports.layers import LayersReport, ListedLayer
from .catalog import LAYERS
from .settings import OPTIONAL

LETTERS = {
    "E": "embed_dim",
    "H": "num_heads",
    "G": "num_kv_heads",
    "D": "head_dim",
    "K": "kdim",
    "V": "vdim",
}
"""The letters that `mha_inspect.layers.spec.symbols` gives values to."""


def list_layers() -> LayersReport:
    """Every layer of the catalog, in its order; only the letters that some formula has."""
    formulas = "".join(kind.parameter_formula for kind in LAYERS.values())
    return LayersReport(
        layers=tuple(
            ListedLayer(
                name=kind.name,
                summary=kind.summary,
                formula=kind.parameter_formula,
                split=kind.split,
                source=kind.origin,
                takes=tuple(name for name in OPTIONAL if name in kind.takes),
            )
            for kind in LAYERS.values()
        ),
        letters={letter: name for letter, name in LETTERS.items() if letter in formulas},
    )
