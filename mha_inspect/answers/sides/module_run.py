"""One side of a diff that is any module: run as it is, and in float64, every attention in canonical axes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...measure.stage_difference import stage_noise
from ...naming.canonical import canonical, contents_of, own_axes
from ...record.copying import copy_module
from ...record.rounding import cast_tensors, first_tensor
from ...record.subject import Run, Subject
from ...reports.common import Environment, LayerInfo
from ...reports.diff import DiffSide, SideName, StageSide
from ...reports.trace import OpRef
from ...targets.memory import is_out_of_memory
from ...text import first_line
from ..kernels import is_hidden, path_of
from ..trace import environment_of
from .compared import ComparedRun, Rows, masked_queries, without

_STEP = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class ModuleSide:
    """A module with its arguments, and what to call it."""

    name: SideName
    label: str
    own: Subject
    layer: LayerInfo
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    """What was set for this side alone."""

    @property
    def dtype(self) -> str:
        """The dtype of its numbers."""
        return environment_of(self.own).dtype or "float32"

    def in_dtype(self, dtype: torch.dtype, *, training: bool = False) -> Subject:
        """The same module, weights and arguments in another dtype; in eval mode, for dropout draws other elements.

        Raises `InputError` where the module cannot be copied.
        """
        try:
            module = copy_module(self.own.module).to(dtype=dtype).train(training)
        except (RuntimeError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            raise InputError(
                f"{self.label} cannot be copied, and to measure rounding a copy is run in another dtype: "
                f"{first_line(error)}"
            ) from None
        seen: dict[int, Tensor] = {}
        args, kwargs = (cast_tensors(given, dtype, None, seen) for given in (self.own.args, self.own.kwargs))
        return Subject(module, args, kwargs)


class ModuleRun(ComparedRun):
    """A side, and every run of it that a diff needs, each made once."""

    def __init__(self, side: ModuleSide) -> None:
        self.side = side
        self._start = side.own.state()

    def _run(self, own: Subject) -> Run:
        """One run that leaves the module and the generators as they were, its random numbers those of the seed."""
        with self.side.own.replaying(self._start), torch.no_grad():
            torch.manual_seed(self.side.seed)
            return own.recorded(keep=True)

    @cached_property
    def opened(self) -> Run:
        """The run, with every tensor kept."""
        return replace(self._alone, wider=self._wider)

    @cached_property
    def _alone(self) -> Run:
        return self._run(self.side.own)

    @cached_property
    def _wider(self) -> Run | None:
        """What the axes of every run are named after, whatever its dtype."""
        with torch.no_grad():
            return self.side.own.wider_run(self._alone)

    @cached_property
    def _exact(self) -> Run:
        return self._in(torch.float64)

    @cached_property
    def _measured(self) -> Run:
        """The run whose rounding is measured: the opened one, but for float64 and in training mode."""
        if self.side.dtype == "float64":
            return self._in(torch.float32)
        return self._in(getattr(torch, self.side.dtype)) if self.side.own.module.training else self.opened

    @property
    def unit(self) -> float:
        """What a measured error counts: that of float64 is measured in float32."""
        return _STEP if self.side.dtype == "float64" else 1.0

    def _in(self, dtype: torch.dtype) -> Run:
        own = self.side.in_dtype(dtype)
        try:
            return replace(self._run(own), wider=self._wider)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            name = str(dtype).removeprefix("torch.")
            raise InputError(
                f"{self.side.label} cannot be run in {name}, and rounding is measured by that: "
                f"{first_line(error)}. What it makes in its forward has a dtype of its own."
            ) from None

    @cached_property
    def contents(self) -> list[dict[str, Tensor]]:
        """The stages of each attention, in canonical axes."""
        return _contents(self.opened)

    def masked_queries(self, place: int) -> list[tuple[int, int]]:
        """(batch, query) of those whose every key is masked, in at least one head of an attention."""
        scores = self.contents[place].get("masked_scores") if place < len(self.contents) else None
        return [] if scores is None else masked_queries(scores)

    def floor(self, place: int, stage: str, like: Tensor, rows: Rows = ()) -> float:
        """Rounding error of a stage without these queries, in the form in which it is compared with `like`.

        A query whose every key is masked has no result that rounding could be measured against.
        """
        exact, measured = self._all_exact, self._all_measured
        if place >= min(len(exact), len(measured)) or stage not in exact[place] or stage not in measured[place]:
            return 0.0
        content, finer = (without(stage, tensor, rows) for tensor in (measured[place][stage], exact[place][stage]))
        return stage_noise(stage, content, finer, like) * self.unit

    @cached_property
    def _all_exact(self) -> list[dict[str, Tensor]]:
        return _contents(self._exact)

    @cached_property
    def _all_measured(self) -> list[dict[str, Tensor]]:
        return self.contents if self._measured is self.opened else _contents(self._measured)

    @cached_property
    def output(self) -> Tensor:
        """What the plain forward returns first, in canonical axes where they are known."""
        return _output(self.opened, self.opened.returned)

    @property
    def rows(self) -> tuple[int, int] | None:
        """How many sequences and queries the output has, where it is `batch query` and one more."""
        weights = self.contents[-1].get("weights") if self.contents else None
        if weights is None or self.output.shape[:2] != (weights.shape[0], weights.shape[2]):
            return None
        return weights.shape[0], weights.shape[2]

    def measured_outputs(self) -> tuple[Tensor, Tensor]:
        """The output as its rounding is measured, computed step by step, and that in float64."""
        return _output(self._measured), _output(self._exact)

    def stage(self, place: int, stage: str) -> StageSide | None:
        """How this side has a stage; None where it does not."""
        if place >= len(self.opened.attentions) or stage not in self.opened.attentions[place][0].stages:
            return None
        found, names = self.opened.attentions[place]
        tensor = found.stages[stage]
        op = self.opened.recording.producer(tensor)
        shared = stage in ("query", "key", "value", "concat", "output")
        return StageSide(
            shape=tensor.shape,
            axes=names.of_stage(stage),
            dtype=tensor.dtype,
            opened=is_hidden(self.opened, stage, tensor),
            op=None if op is None else OpRef(op.index, self.opened.recording.name_of(op), op.source),
            count=len(found.branches) if found.branches and not shared else 1,
        )

    def report(self, rows: Rows = ()) -> DiffSide:
        """This side as the report has it."""
        side, environment = self.side, environment_of(self.side.own)
        error = None
        if side.dtype != "float64" and not side.own.module.training:
            error = self.output_error(rows)
        return DiffSide(
            label=side.label,
            environment=Environment(environment.torch, environment.device, side.dtype, side.seed),
            layer=side.layer,
            settings=side.settings,
            path=path_of(self.opened),
            numel=sum(parameter.numel() for parameter in side.own.module.parameters()),
            output_shape=tuple(first_tensor(self.opened.returned).shape),
            rounding_error=error,
        )


def _contents(seen: Run) -> list[dict[str, Tensor]]:
    return [contents_of(seen, found, names) for found, names in seen.attentions]


def _output(seen: Run, returned: Any = None) -> Tensor:
    """The first tensor that was returned, `batch query embed` or `batch query (heads head_dim)` where that is known."""
    output = first_tensor(seen.returned if returned is None else returned).detach()
    patterns = own_axes(seen).returned
    if not seen.attentions or not patterns:
        return output
    names = seen.attentions[-1][1]
    sizes = {"heads": names.num_heads, "kv_heads": names.num_kv_heads, "head_dim": names.head_dim}
    for stage in ("output", "concat"):
        if len(patterns[0].split()) == output.dim() or "(" in patterns[0]:
            content = canonical(output, stage, patterns[0], sizes)
            if content is not None:
                return content
    return output
