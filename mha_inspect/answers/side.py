"""One side of a diff: a subject, what sets it apart from the other, and what its runs show."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from einops import repeat
from torch import Tensor

from ..layers.spec import AttentionSpec, DtypeName
from ..measure.weights import Weights, weights_of
from ..naming.subject import Subject
from ..record.arguments import first_tensor
from ..reports.common import Environment
from ..reports.diff import DiffSide, SideName, StageSide
from ..reports.trace import OpRef
from ..targets.layer_sides import LayerSide, written
from ..targets.load import Layer, load_layer
from ..targets.room import Room
from ..targets.triple import Triple
from .kernels import is_hidden, path_of
from .look import Look, Rows, WiderRun
from .run_report import environment_of, layer_of

_OF_ALL_HEADS = ("query", "key", "value", "concat", "output")
"""Stages that a loop over heads does not make again in each turn."""


class Side(Look):
    """A subject as one side of a diff."""

    def __init__(
        self,
        name: SideName,
        own: Subject,
        settings: dict[str, Any] | None = None,
        finer: Subject | None = None,
        *,
        wider: WiderRun | None = None,
    ) -> None:
        """Take a side.

        Args:
            name: left or right.
            own: what is run.
            settings: what was set for this side alone.
            finer: the same with weights and inputs in the dtype of the other side, where that is the finer one.
            wider: what its axes are named after, where that has been made.
        """
        self.name, self.settings, self.finer = name, settings or {}, finer
        super().__init__(own, wider=wider, copied=self._copy)

    @classmethod
    def of_layer(
        cls, asked: LayerSide, *, dtype: DtypeName | None = None, room: Room | None = None, given: Triple | None = None
    ) -> Side:
        """Build a layer as a side, with its inputs or those that are `given`.

        Where the other side has a finer `dtype`, it is built in that as well. Raises as `load_layer`.
        """

        def made(spec: AttentionSpec, room: Room | None = None) -> Subject:
            return load_layer(spec, asked.inputs, asked.run, asked.kind.name, room, given)

        own = replace(made(asked.spec, room), notes=asked.unheard)
        finer = made(replace(asked.spec, dtype=dtype)) if dtype and dtype != asked.spec.dtype else None
        return cls(asked.name, own, asked.settings, finer)

    def _copy(self, dtype: torch.dtype) -> Subject:
        of = self.finer if self.finer is not None and dtype == torch.float64 else self.own
        return of.copied(dtype)

    @property
    def label(self) -> str:
        """What sentences call it: `torch`, `torch with dtype bfloat16`."""
        parts = [f"{setting} {written(value)}" for setting, value in self.settings.items()]
        return f"{super().label} with {', '.join(parts)}" if parts else super().label

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided about it, as sentences that name its forward."""
        return tuple(note.replace("The forward", f"{self.own.label}.forward", 1) for note in self.own.notes)

    def with_module(self, module: torch.nn.Module) -> Side:
        """Return the same side with another module, which is run as this one."""
        return Side(self.name, replace(self.own, module=module), self.settings, self.finer, wider=self._wider)

    @cached_property
    def weights(self) -> tuple[Weights, ...]:
        """Where the weights of each attention are; a layer shows that with little input."""
        small = isinstance(self.own, Layer) and "run" not in vars(self)
        seen = Look(self.own.small()) if small and isinstance(self.own, Layer) else self
        return weights_of(seen.run, self.own.module)

    def stage(self, place: int, stage: str) -> StageSide | None:
        """Return how this side has a stage; None where it does not."""
        if place >= len(self.attentions) or stage not in self.attentions[place][0].stages:
            return None
        found, names = self.attentions[place]
        tensor = found.stages[stage]
        op = self.run.recording.producer(tensor)
        return StageSide(
            shape=tensor.shape,
            axes=names.of_stage(stage),
            dtype=tensor.dtype,
            opened=is_hidden(self.run, stage, tensor),
            op=None if op is None else OpRef(op.index, self.run.recording.name_of(op), op.source),
            count=len(found.branches) if found.branches and stage not in _OF_ALL_HEADS else 1,
        )

    def in_query_heads(self, place: int, content: Tensor) -> tuple[Tensor, int]:
        """Return `batch key (heads head_dim)` with a key and value for every head, and how many each stands for."""
        names = self.attentions[place][1]
        count = names.num_kv_heads
        each = names.num_heads // count if count and names.num_heads % count == 0 else 1
        if each == 1 or content.shape[-1] != count * names.head_dim:
            return content, 1
        pattern = "batch key (kv_heads head_dim) -> batch key (kv_heads group head_dim)"
        return repeat(content, pattern, kv_heads=count, group=each), each

    def report(self, rows: Rows) -> DiffSide:
        """Return this side as the report has it; rows whose every key is masked have no rounding error."""
        environment = environment_of(self.own)
        return DiffSide(
            label=self.label,
            environment=Environment(environment.torch, environment.device, self.dtype, environment.seed),
            layer=layer_of(self.own),
            settings={name: _plain(value) for name, value in self.settings.items()},
            path=path_of(self.run),
            numel=sum(parameter.numel() for parameter in self.own.module.parameters()),
            output_shape=tuple(first_tensor(self.run.returned).shape),
            rounding_error=None if self.dtype == "float64" or self.drops else self.output_floor(rows),
            measured_against=self.measured_against,
        )


def _plain(value: object) -> object:
    """A setting as JSON carries it."""
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
