"""Which reports can be rendered. A new one needs its page function and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..reports.check import CheckReport
from ..reports.checkpoint_diff import CheckpointDiffReport
from ..reports.compare_heads import CompareHeadsReport
from ..reports.diff import DiffReport
from ..reports.layers import LayersReport
from ..reports.params import ParamsReport
from ..reports.trace import Trace
from .check import check_page
from .checkpoint_diff import checkpoint_diff_page
from .compare_heads import compare_heads_page
from .diff import diff_page
from .layers import layers_page
from .page import Page
from .params import params_page
from .trace import trace_page


@dataclass(frozen=True)
class Kind:
    """How one class of report is rendered."""

    command: str
    """The command that makes it: the `command` of its JSON, and the name of its schema."""
    page: Callable[[Any], Page]


KINDS: dict[type, Kind] = {
    Trace: Kind("trace", trace_page),
    ParamsReport: Kind("params", params_page),
    CompareHeadsReport: Kind("compare-heads", compare_heads_page),
    DiffReport: Kind("diff", diff_page),
    CheckpointDiffReport: Kind("diff-checkpoints", checkpoint_diff_page),
    CheckReport: Kind("check", check_page),
    LayersReport: Kind("layers", layers_page),
}


def kind_of(report: object) -> Kind:
    """Return how this report is rendered. Raises `TypeError` for what is not a report."""
    try:
        return KINDS[type(report)]
    except KeyError:
        known = ", ".join(cls.__name__ for cls in KINDS)
        raise TypeError(f"{type(report).__name__} is not a report that can be rendered: {known}") from None
