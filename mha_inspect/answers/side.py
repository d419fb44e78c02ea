"""One side of a diff: a subject and what sets it apart from the other, and its runs, each made once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from einops import repeat
from torch import Tensor

from ..errors import InputError
from ..measure.stage_difference import BLOCKED_BELOW, stage_noise
from ..measure.weights import Weights, weights_of
from ..naming.canonical import canonical, contents_of, own_axes
from ..naming.stages import CANONICAL_AXES
from ..record.arguments import first_tensor
from ..record.rounding import rounding_error
from ..record.subject import Run, Subject
from ..reports.common import Environment
from ..reports.diff import DiffSide, SideName, StageSide
from ..reports.trace import OpRef
from ..targets.layer_sides import written
from ..targets.load import Layer
from ..targets.memory import is_out_of_memory
from ..text import first_line
from .kernels import drops_at_random, is_hidden, path_of
from .trace import environment_of, layer_of

_STEP = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
"""Rounding of float64 in units of float32's."""
_OF_KEYS = ("key", "value", "k_proj", "v_proj", "k_heads", "v_heads")
_OF_ALL_HEADS = ("query", "key", "value", "concat", "output")
"""Stages that a loop over heads does not make again in each turn."""

Rows = list[tuple[int, int]]
"""(batch, query) of queries whose every key is masked."""


@dataclass(frozen=True)
class Side:
    """A subject, and what sets it apart from the other side."""

    name: SideName
    own: Subject
    settings: dict[str, Any] = field(default_factory=dict)
    """What was set for this side alone."""
    finer: Subject | None = None
    """The same with weights and inputs in the dtype of the other side, where that is the finer one."""

    @property
    def label(self) -> str:
        """What sentences call it: `torch`, `torch with dtype bfloat16`."""
        name = layer_of(self.own).name
        parts = [f"{setting} {written(value)}" for setting, value in self.settings.items()]
        return f"{name} with {', '.join(parts)}" if parts else name

    @property
    def dtype(self) -> str:
        """The dtype of its numbers."""
        return environment_of(self.own).dtype or "float32"


class SideRun:
    """A side, run as it is, and once more in float64, to measure its rounding against."""

    def __init__(self, side: Side, wider: Run | None = None) -> None:
        """`wider` is what an earlier run of the same module found its axes to be named after."""
        self.side = side
        self._named_after = wider

    @cached_property
    def run(self) -> Run:
        """The run, with every tensor kept."""
        return self._named(self._recorded(self.side.own))

    @cached_property
    def weights(self) -> tuple[Weights, ...]:
        """Where the weights of each attention are; a layer shows that with little input."""
        own = self.side.own
        if isinstance(own, Layer) and "run" not in vars(self):
            small = own.small()
            seen = self._recorded(small)
            return weights_of(replace(seen, wider=small.wider_run(seen)), own.module)
        return weights_of(self.run, own.module)

    def forget(self) -> None:
        """Let go of what was run: the weights are others now."""
        for name in ("run", "contents", "output", "_exact", "_measured", "_measuring"):
            vars(self).pop(name, None)

    def _recorded(self, own: Subject) -> Run:
        """Run it with what it keeps from run to run as it was at first."""
        own = own.fresh()
        with torch.set_grad_enabled(bool(own.grad)), own.replaying(own.state()):
            return own.recorded(keep=True)

    def _named(self, seen: Run) -> Run:
        """The run with the one that its axes are named after, whatever its dtype."""
        if self._named_after is None:
            with torch.no_grad():
                self._named_after = self.side.own.wider_run(seen)
        return replace(seen, wider=self._named_after)

    @property
    def drops(self) -> bool:
        """Whether it draws random numbers, as a module in training does."""
        draws = drops_at_random(self.run) or any(op.does("draws") for op in self.run.recording.ops)
        return self.side.own.module.training and draws

    @cached_property
    def _exact(self) -> Run:
        return self._in(torch.float64, self.side.finer or self.side.own)

    @cached_property
    def _measured(self) -> Run:
        """The run whose rounding is measured: the one that there is, but for float64, and where elements are drawn."""
        if self.side.dtype == "float64":
            return self._in(torch.float32, self.side.own)
        return self._in(getattr(torch, self.side.dtype), self.side.own) if self.drops else self.run

    @property
    def unit(self) -> float:
        """What a measured error counts: that of float64 is measured in float32, and is less."""
        return _STEP if self.side.dtype == "float64" else 1.0

    def _in(self, dtype: torch.dtype, own: Subject) -> Run:
        """Run a copy in another dtype; in eval mode where it would draw other elements in it."""
        label, name = self.side.label, str(dtype).removeprefix("torch.")
        try:
            copied = own.copied(dtype)
        except (RuntimeError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            raise InputError(
                f"{label} cannot be copied, and to measure rounding a copy is run in another dtype: {first_line(error)}"
            ) from None
        if self.drops:
            copied.module.eval()
        try:
            return self._named(self._recorded(copied))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise InputError(
                f"{label} cannot be run in {name}, and rounding is measured by that: {first_line(error)}. What it "
                "makes in its forward has a dtype of its own."
            ) from None

    @cached_property
    def contents(self) -> list[dict[str, Tensor]]:
        """The stages of each attention, in canonical axes."""
        return _contents(self.run)

    @cached_property
    def _measuring(self) -> list[list[dict[str, Tensor]]]:
        """The same of the run whose rounding is measured, and of the one in float64."""
        return [self.contents if seen is self.run else _contents(seen) for seen in (self._measured, self._exact)]

    def get(self, place: int, stage: str) -> Tensor | None:
        """Return a stage of an attention in canonical axes; None where it has none, or an axis has no name."""
        return self.contents[place].get(stage) if place < len(self.contents) else None

    def masked_queries(self, place: int) -> Rows:
        """Return the queries of an attention to which no key is left in at least one head."""
        scores = self.get(place, "masked_scores")
        if scores is None:
            return []
        rows = (scores < BLOCKED_BELOW).all(dim=-1).any(dim=1)
        return [(int(batch), int(query)) for batch, query in rows.nonzero().tolist()]

    def floor(self, place: int, stage: str, like: Tensor, rows: Rows) -> float:
        """Measure the rounding error of a stage without these queries, in the form in which it is compared with `like`.

        A query whose every key is masked has no result that rounding could be measured against.
        """
        found = [contents[place].get(stage) if place < len(contents) else None for contents in self._measuring]
        if found[0] is None or found[1] is None:
            return 0.0
        content, exact = (without(stage, tensor, rows) for tensor in found if tensor is not None)
        return stage_noise(stage, content, exact, like) * self.unit

    @cached_property
    def output(self) -> Tensor:
        """What the forward returns first, in canonical axes where they are known."""
        return _output(self.run)

    @property
    def rows(self) -> tuple[int, int] | None:
        """How many sequences and queries the output has, where it is `batch query` and one more."""
        weights = self.contents[-1].get("weights") if self.contents else None
        if weights is None or self.output.shape[:2] != (weights.shape[0], weights.shape[2]):
            return None
        return weights.shape[0], weights.shape[2]

    def output_floor(self, rows: Rows) -> float:
        """Measure the rounding error of the output without these queries."""
        return self._apart(_output(self._measured), _output(self._exact), rows) * self.unit

    def _apart(self, output: Tensor, exact: Tensor, rows: Rows) -> float:
        if self.rows is not None:
            output, exact = (without("output", tensor, rows) for tensor in (output, exact))
        return rounding_error(output, exact)

    def stage(self, place: int, stage: str) -> StageSide | None:
        """Return how this side has a stage; None where it does not."""
        if place >= len(self.run.attentions) or stage not in self.run.attentions[place][0].stages:
            return None
        found, names = self.run.attentions[place]
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

    def in_query_heads(self, place: int, stage: str, content: Tensor) -> tuple[Tensor, int]:
        """Return `batch key (heads head_dim)` with a key and value for every head, and how many each stands for."""
        names = self.run.attentions[place][1]
        count = names.num_kv_heads
        each = names.num_heads // count if count and names.num_heads % count == 0 else 1
        if each == 1 or content.shape[-1] != count * names.head_dim:
            return content, 1
        pattern = "batch key (kv_heads head_dim) -> batch key (kv_heads group head_dim)"
        return repeat(content, pattern, kv_heads=count, group=each), each

    def report(self, rows: Rows) -> DiffSide:
        """Return this side as the report has it; rows whose every key is masked have no rounding error."""
        side, environment = self.side, environment_of(self.side.own)
        error = None
        if side.dtype != "float64" and not self.drops:
            error = self._apart(self.output, _output(self._exact), rows)
        return DiffSide(
            label=side.label,
            environment=Environment(environment.torch, environment.device, side.dtype, environment.seed),
            layer=layer_of(side.own),
            settings={name: _plain(value) for name, value in side.settings.items()},
            path=path_of(self.run),
            numel=sum(parameter.numel() for parameter in side.own.module.parameters()),
            output_shape=tuple(first_tensor(self.run.returned).shape),
            rounding_error=error,
        )


def without(stage: str, content: Tensor, rows: Rows) -> Tensor:
    """Return the stage, in canonical axes, with zeros for these queries, those of them that it has."""
    if stage in _OF_KEYS or not rows:
        return content
    cleared = content.clone()
    by_query = cleared.transpose(1, 2) if "heads" in CANONICAL_AXES[stage].split() else cleared
    for batch, query in rows:
        if batch < by_query.shape[0] and query < by_query.shape[1]:
            by_query[batch, query] = 0
    return cleared


def _contents(seen: Run) -> list[dict[str, Tensor]]:
    return [contents_of(seen, found, names) for found, names in seen.attentions]


def _output(seen: Run) -> Tensor:
    """The first tensor that was returned, `batch query embed` or `batch query (heads head_dim)` where that is known."""
    output = first_tensor(seen.returned).detach()
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


def _plain(value: object) -> object:
    """A setting as JSON carries it."""
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
