"""`mha-inspect trace`: every stage of one forward pass."""

from __future__ import annotations

import typer

from ..errors import ExitCode
from ..layers.registry import LAYERS
from .collection import resume
from .help import GroupedCommand
from .options import Options, shares_options

app = typer.Typer(add_completion=False)

EPILOG = """Examples:

mha-inspect trace --embed-dim 512 --num-heads 2 --batch 1 --seq-len 12

mha-inspect trace --seq-len 10 --causal --padding 3 --per-head-weights --values"""


@app.command(cls=GroupedCommand, epilog=EPILOG)
@shares_options
def trace(options: Options) -> ExitCode:
    """Show every stage of one forward pass: its name, what is computed, its shape, and what each axis is.

    The plain forward is run too, and the last line says whether both outputs agree.
    """
    spec = options.attention(options.single_head_count("trace"))
    inputs, run, show = options.inputs(), options.run(), options.show()

    from ..layers.settings import check_settings

    check_settings(LAYERS[options.layer], spec, inputs, run)
    from .answer import give, prepare

    target = prepare(options)

    from ..tracing import trace_spec

    resume()
    give(trace_spec(spec, inputs, run, show, layer=options.layer), options, target)
    return ExitCode.OK
