"""A trace of a layer of the catalog, or of a module, in one call."""

from __future__ import annotations

from typing import Any

from torch import nn

from mha_inspect.answers.trace import trace
from mha_inspect.call.load import load_layer
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec, Show
from mha_inspect.naming.subject import Subject
from mha_inspect.reports.trace import Trace


def trace_layer(
    spec: AttentionSpec, inputs: InputSpec, run: RunSpec, show: Show | None = None, *, layer: str = "torch"
) -> Trace:
    return trace(load_layer(spec, inputs, run, layer), show)


def trace_module(module: nn.Module, *args: Any, show: Show | None = None, **kwargs: Any) -> Trace:
    return trace(Subject(module, args, kwargs), show)
