"""A trace of a layer of the catalog, or of a module, in one call."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, nn

from mha_inspect.call.call import Call
from mha_inspect.call.load import load_layer
from mha_inspect.call.part import layer_inputs
from mha_inspect.cli.options import Options
from mha_inspect.cli.sides import AskedSide, checked_sides, runs
from mha_inspect.compare.diff import Side
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec, Show
from mha_inspect.questions.trace import traced
from mha_inspect.reports.trace import Trace
from mha_inspect.running.subject import Subject


@dataclass(frozen=True)
class Layer(Subject):
    """A layer of the catalog, and the specs that it was made from."""

    spec: AttentionSpec = field(default_factory=AttentionSpec, kw_only=True)
    inputs: InputSpec = field(default_factory=InputSpec, kw_only=True)
    run: RunSpec = field(default_factory=RunSpec, kw_only=True)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, laid out as the layer takes them."""
        return layer_inputs(self.module, Call(self.args, self.kwargs, ""))


def with_specs(subject: Subject, spec: AttentionSpec, inputs: InputSpec, run: RunSpec) -> Layer:
    """Return a layer with the specs that it was made from."""
    own = {one.name: getattr(subject, one.name) for one in fields(Subject)}
    return Layer(**own, spec=spec, inputs=inputs, run=run)


def built_layer(spec: AttentionSpec, inputs: InputSpec, run: RunSpec, layer: str = "torch") -> Layer:
    return with_specs(load_layer(spec, inputs, run, layer), spec, inputs, run)


def trace(subject: Subject, show: Show | None = None) -> Trace:
    show = show or Show()
    return traced(subject, show, keep=show.stats or show.values)[0]


def trace_layer(
    spec: AttentionSpec, inputs: InputSpec, run: RunSpec, show: Show | None = None, *, layer: str = "torch"
) -> Trace:
    return trace(load_layer(spec, inputs, run, layer), show)


def trace_module(module: nn.Module, *args: Any, show: Show | None = None, **kwargs: Any) -> Trace:
    return trace(Subject(module, args, kwargs), show)


def two_layers(
    left: str, right: str, spec: AttentionSpec, inputs: InputSpec, run: RunSpec, *sets: dict[str, Any]
) -> tuple[Side, Side]:
    """Build two layers as the sides of a diff, with settings of each alone, as the command line does."""
    return runs(*planned(left, right, spec, inputs, run, *sets))


def planned(
    left: str, right: str, spec: AttentionSpec, inputs: InputSpec, run: RunSpec, *sets: dict[str, Any]
) -> tuple[Options, AskedSide, AskedSide]:
    """Return the options of two layers, and what each is, with settings of each alone."""
    values = {one.name: getattr(part, one.name) for part in (spec, inputs, run) for one in fields(part)}
    values |= {"num_heads": str(spec.num_heads), "train": values.pop("training")}
    values |= {
        "padding": ",".join(map(str, inputs.padding)),
        "head_dim": spec.head_dim if spec.head_dim_given else None,
    }
    typed = [[f"{name}={_typed(value)}" for name, value in each.items()] for each in sets]
    ours, theirs = [*typed, [], []][:2]
    sides = AskedSide("left", left, ours, None), AskedSide("right", right, theirs, None)
    return Options(**values), *checked_sides(Options(**values), *sides)


def _typed(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
