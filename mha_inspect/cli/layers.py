"""`mha-inspect layers`: the ways of writing attention that can be built by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ExitCode
from ..layers.catalog import LAYERS, LETTERS, OPTIONAL
from .options import OUTPUTS, Options, command

if TYPE_CHECKING:
    from ..reports.layers import LayersReport


@command("layers", "layers --format json", only=OUTPUTS)
def layers(options: Options) -> ExitCode:
    """List the ways to write attention: name, parameters, how the heads are split, and where the style comes from."""
    from .output import give, prepare

    give(list_layers(), options, prepare(options, computes=False))
    return ExitCode.OK


def list_layers() -> LayersReport:
    """Every layer of the catalog, in its order; only the letters that some formula has."""
    from ..reports.layers import LayersReport, ListedLayer

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
