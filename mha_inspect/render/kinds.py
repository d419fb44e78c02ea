"""Which reports can be rendered. A new one needs its document function and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..reports.compare_heads import CompareHeadsReport
from ..reports.diff import DiffReport
from ..reports.layers import LayersReport
from ..reports.params import ParamsReport
from ..reports.trace import Trace
from .compare_heads_document import compare_heads_document
from .diff_document import diff_document
from .document import Document
from .layers_document import layers_document
from .params_document import params_document
from .trace_document import trace_document


@dataclass(frozen=True)
class Kind:
    """How one class of report is rendered."""

    command: str
    """The command that makes it: the `command` of its JSON, and the name of its schema."""
    document: Callable[[Any], Document]


KINDS: dict[type, Kind] = {
    Trace: Kind("trace", trace_document),
    ParamsReport: Kind("params", params_document),
    CompareHeadsReport: Kind("compare-heads", compare_heads_document),
    DiffReport: Kind("diff", diff_document),
    LayersReport: Kind("layers", layers_document),
}


def kind_of(report: object) -> Kind:
    """How this report is rendered. Raises `TypeError` for what is not a report."""
    try:
        return KINDS[type(report)]
    except KeyError:
        known = ", ".join(cls.__name__ for cls in KINDS)
        raise TypeError(f"{type(report).__name__} is not a report that can be rendered: {known}") from None
