"""`mha-inspect layers`: the ways of writing attention that can be built by name."""

from __future__ import annotations

from ..errors import ExitCode
from ..layers.catalog import LAYERS, LETTERS, OPTIONAL
from ..reports.layers import LayersReport, ListedLayer
from .app import command
from .options import OUTPUTS, Options
from .output import give, prepare


@command("layers", "layers --format json", only=OUTPUTS)
def layers(options: Options) -> ExitCode:
    """List the ways to write attention: name, parameters, how the heads are split, and where the style comes from."""
    listed = [
        ListedLayer(
            name=kind.name,
            summary=kind.summary,
            formula=kind.parameter_formula,
            split=kind.split,
            source=kind.origin,
            takes=tuple(name for name in OPTIONAL if name in kind.takes),
        )
        for kind in LAYERS.values()
    ]
    formulas = "".join(layer.formula for layer in listed)
    letters = {letter: name for letter, name in LETTERS.items() if letter in formulas}
    give(LayersReport(tuple(listed), letters), options, prepare(options, computes=False))
    return ExitCode.OK
