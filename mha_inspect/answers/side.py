"""One side of a diff: a subject, and what sets it apart from the other; a layer beside a module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..naming.visibility import Rows
from ..reports.diff import DiffSide, SideName, StageSide
from ..running.subject import Subject
from .comparable_run import ComparableRun
from .run_report import environment_of, is_hidden, layer_of, maker_of, path_of

_OF_ALL_HEADS = ("query", "key", "value", "concat", "output")
"""Stages that a loop over heads does not make again in each turn."""


class Side(ComparableRun):
    """A subject as one side of a diff."""

    def __init__(
        self,
        name: SideName,
        subject: Subject,
        settings: dict[str, Any] | None = None,
        finer: Subject | None = None,
    ) -> None:
        """Take a side; `settings` are those for it alone, and `finer` is as `ComparableRun` has it."""
        super().__init__(subject, finer=finer)
        self.name, self.settings = name, settings or {}

    @property
    def label(self) -> str:
        """What sentences call it: `torch`, `torch with dtype bfloat16`."""
        parts = [f"{setting} {_written(value)}" for setting, value in self.settings.items()]
        return f"{super().label} with {', '.join(parts)}" if parts else super().label

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided about it, as sentences that name its forward."""
        return tuple(note.replace("The forward", f"{self.subject.label}.forward", 1) for note in self.subject.notes)

    def stage(self, place: int, stage: str) -> StageSide | None:
        """Return how this side has a stage; None where it does not."""
        if place >= len(self.attentions) or stage not in self.attentions[place][0].stages:
            return None
        attention, names = self.attentions[place]
        tensor = attention.stages[stage]
        return StageSide(
            shape=tensor.shape,
            axes=names.of_stage(stage),
            dtype=tensor.dtype,
            opened=is_hidden(self.run, stage, tensor),
            op=maker_of(self.run, tensor),
            count=len(attention.branches) if attention.branches and stage not in _OF_ALL_HEADS else 1,
        )

    def report(self, rows: Rows) -> DiffSide:
        """Return this side as the report has it; rows whose every key is masked have no rounding error."""
        return DiffSide(
            label=self.label,
            environment=replace(environment_of(self.subject), dtype=self.dtype),
            layer=layer_of(self.subject),
            settings={name: _plain(value) for name, value in self.settings.items()},
            path=path_of(self.run),
            numel=sum(parameter.numel() for parameter in self.subject.module.parameters()),
            output_shape=tuple(self.returned.shape),
            rounding_error=None if self.dtype == "float64" or self.drops else self.output_floor(rows),
            measured_against=self.measured_against,
        )


def _written(value: object) -> str:
    """Return a setting as it would be typed."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _plain(value: object) -> object:
    """Return a setting as JSON carries it."""
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def sizes_of(side: Side) -> dict[str, Any]:
    """Return those sizes of a side's first attention that show when it runs, by the names of `AttentionSpec`."""
    if not side.attentions:
        return {}
    attention, names = side.attentions[0]
    sizes: dict[str, Any] = {
        "num_heads": names.num_heads,
        "num_kv_heads": names.num_kv_heads,
        "head_dim": names.head_dim,
    }
    if "query" in attention.stages:
        sizes["embed_dim"] = attention.stages["query"].shape[-1]
    if attention.projections:
        sizes["bias"] = any(map(side.run.graph.has_bias, attention.projections.values()))
    return sizes
