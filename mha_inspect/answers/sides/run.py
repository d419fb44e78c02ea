"""One side of a diff, run: as it is, and in float64, to measure its rounding against."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ...layers.weights import AttentionWeights
from ...measure.stage_difference import stage_noise
from ...measure.stages import StageContents, exact_forward, in_dtype, sizes_of
from ...naming.canonical import canonical
from ...naming.stages import CANONICAL_AXES
from ...record.rounding import first_tensor
from ...reports.common import Environment, LayerInfo
from ...reports.diff import DiffSide, StageSide
from ...reports.trace import OpRef
from ...targets.load import Layer, load_layer
from ...targets.spec import DtypeName, plain_fields
from ..kernels import is_hidden, path_of
from .compared import ComparedRun, Rows, without
from .settings import Side
from .shared_weights import load_what_fits

_STEP = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
"""Rounding of float64 in units of float32's."""


class LayerRun(ComparedRun):
    """A side with its weights loaded, and every run of it that a diff needs, each made once."""

    def __init__(self, side: Side, weights: AttentionWeights, finer: DtypeName) -> None:
        self.side = side
        self.forward = load_layer(side.spec, side.inputs, side.run, side.kind.name)
        self.left_out = load_what_fits(self.forward.module, weights, side.label)
        self._weights = weights
        self._finer = finer

    @property
    def drops(self) -> bool:
        """Whether dropout is at work."""
        return self.side.spec.training and self.side.spec.dropout > 0

    @cached_property
    def opened(self) -> StageContents:
        """The run, with every stage kept."""
        return StageContents(self.forward, self.forward.recorded(keep=True))

    @cached_property
    def _exact(self) -> StageContents:
        """In float64, from the weights and inputs as the finer of both sides has them."""
        source = self.forward
        if self._finer != self.side.spec.dtype:
            spec = replace(self.side.spec, dtype=self._finer)
            source = load_layer(spec, self.side.inputs, self.side.run, self.side.kind.name)
            load_what_fits(source.module, self._weights, self.side.label)
        return _kept(exact_forward(source))

    @cached_property
    def _measured(self) -> StageContents:
        """The run whose rounding is measured: the opened one, but for float64 and for dropout."""
        if self.side.spec.dtype == "float64":
            return _kept(in_dtype(self.forward, torch.float32))
        return _kept(in_dtype(self.forward, getattr(torch, self.side.spec.dtype))) if self.drops else self.opened

    @property
    def unit(self) -> float:
        """What a measured error counts. Beside a coarser dtype that of float64 is nothing."""
        return _STEP if self.side.spec.dtype == "float64" else 1.0

    def stage_floor(self, stage: str, like: Tensor, rows: Rows) -> float:
        """Rounding error of a stage without these queries, in the form in which it is compared with `like`.

        A query whose every key is masked has no result that rounding could be measured against.
        """
        content, exact = self._measured.get(stage), self._exact.get(stage)
        if content is None or exact is None:
            return 0.0
        content, exact = (without(stage, tensor, rows) for tensor in (content, exact))
        return stage_noise(stage, content, exact, like) * self.unit

    def measured_outputs(self) -> tuple[Tensor, Tensor]:
        """The output as its rounding is measured, computed step by step, and that in float64."""
        return _output(self._measured), _output(self._exact)

    @cached_property
    def output(self) -> Tensor:
        """What the plain forward returns, in canonical axes where they are known."""
        return _in_canonical_axes(self.opened, first_tensor(self.opened.seen.returned).detach())

    @property
    def rows(self) -> tuple[int, int] | None:
        """How many sequences and queries the output has, where it is `batch query` and one more."""
        rows = (self.forward.inputs.batch, self.forward.inputs.query_len)
        has_them = tuple(self.output.shape[:2]) == rows
        return rows if has_them else None

    def stage(self, stage: str) -> StageSide | None:
        """How this side has a stage; None where it does not."""
        contents = self.opened
        if stage not in contents.stages:
            return None
        found = contents.found[0]
        tensor = found.stages[stage]
        op = contents.seen.recording.producer(tensor)
        joined = "heads" in CANONICAL_AXES[stage].split() or stage in ("q_proj", "k_proj", "v_proj")
        return StageSide(
            shape=tensor.shape,
            axes=contents.axes.stages[0][stage],
            dtype=tensor.dtype,
            opened=is_hidden(contents.seen, stage, tensor),
            op=None if op is None else OpRef(op.index, contents.seen.recording.name_of(op), op.source),
            count=len(contents.parts) if contents.by_head and joined else 1,
        )

    def report(self, rows: Rows) -> DiffSide:
        """This side as the report has it."""
        side, error = self.side, None
        if side.spec.dtype != "float64" and not self.drops:
            error = self.output_error(rows)
        return DiffSide(
            label=side.label,
            environment=Environment(
                torch.__version__, str(self.forward.inputs.query.device), side.spec.dtype, side.spec.seed
            ),
            layer=LayerInfo(side.kind.name, plain_fields(side.spec)),
            settings={name: _plain(value) for name, value in side.settings.items()},
            path=path_of(self.opened.seen),
            numel=sum(parameter.numel() for parameter in self.forward.module.parameters()),
            output_shape=tuple(first_tensor(self.opened.seen.returned).shape),
            rounding_error=error,
        )


def _kept(forward: Layer) -> StageContents:
    return StageContents(forward, forward.recorded(keep=True))


def _output(contents: StageContents) -> Tensor:
    return _in_canonical_axes(contents, first_tensor(contents.seen.returned).detach())


def _in_canonical_axes(contents: StageContents, output: Tensor) -> Tensor:
    """`batch query embed`, or `batch query (heads head_dim)` where there is no output projection."""
    axes, sizes = contents.axes.returned[0], sizes_of(contents.forward)
    for stage in ("output", "concat"):
        content = canonical(output, stage, axes, sizes)
        if content is not None:
            return content
    return output


def _plain(value: object) -> object:
    """A setting as JSON carries it."""
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
