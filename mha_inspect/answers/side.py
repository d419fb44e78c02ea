"""One side of a diff: a subject, what sets it apart from the other, what its runs show; a layer beside a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch

from ..build.layer_sides import LayerSide, layer_side, require_same_input, written
from ..call.call import Call
from ..call.load import load_layer
from ..call.part import layer_inputs
from ..call.triple import Triple
from ..errors import SpecError
from ..layers.catalog import LayerKind
from ..layers.settings import spec_for
from ..layers.spec import AttentionSpec, DtypeName, InputSpec, RunSpec
from ..measure.weights import Weights, weights_of
from ..naming.subject import Subject
from ..naming.visibility import Rows
from ..record.arguments import first_tensor
from ..reports.diff import DiffSide, SideName, StageSide
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
        """Take a side.

        Args:
            name: left or right.
            subject: what is run.
            settings: what was set for this side alone.
            finer: the same with inputs, and weights that are drawn, in the dtype of the other side, where that is the
                finer one.
        """
        self.name, self.settings, self.finer = name, settings or {}, finer
        super().__init__(subject)

    @classmethod
    def of_layer(cls, asked: LayerSide, *, dtype: DtypeName | None = None, given: Triple | None = None) -> Side:
        """Build a layer as a side, with its inputs, or those that are `given` by the other side, as its weights are.

        Where the other side has a finer `dtype`, it is built in that as well. Raises as `load_layer`.
        """

        def made(spec: AttentionSpec) -> Subject:
            return load_layer(spec, asked.inputs, asked.run, asked.kind.name, given)

        own = replace(made(asked.spec), notes=asked.unheard)
        finer = made(replace(asked.spec, dtype=dtype)) if dtype and dtype != asked.spec.dtype else None
        if finer is not None and given is not None:
            finer = replace(own, args=finer.args, kwargs=finer.kwargs)
        return cls(asked.name, own, asked.settings, finer)

    def _copied(self, dtype: torch.dtype) -> Subject:
        of = self.finer if self.finer is not None and dtype == torch.float64 else self.subject
        return of.copied(dtype)

    @property
    def label(self) -> str:
        """What sentences call it: `torch`, `torch with dtype bfloat16`."""
        parts = [f"{setting} {written(value)}" for setting, value in self.settings.items()]
        return f"{super().label} with {', '.join(parts)}" if parts else super().label

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided about it, as sentences that name its forward."""
        return tuple(note.replace("The forward", f"{self.subject.label}.forward", 1) for note in self.subject.notes)

    @cached_property
    def weights(self) -> tuple[Weights, ...]:
        """Where the weights of each attention are."""
        return weights_of(self.run, self.subject.module)

    def stage(self, place: int, stage: str) -> StageSide | None:
        """Return how this side has a stage; None where it does not."""
        if place >= len(self.attentions) or stage not in self.attentions[place][0].stages:
            return None
        found, names = self.attentions[place]
        tensor = found.stages[stage]
        return StageSide(
            shape=tensor.shape,
            axes=names.of_stage(stage),
            dtype=tensor.dtype,
            opened=is_hidden(self.run, stage, tensor),
            op=maker_of(self.run, tensor),
            count=len(found.branches) if found.branches and stage not in _OF_ALL_HEADS else 1,
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
            output_shape=tuple(first_tensor(self.run.returned).shape),
            rounding_error=None if self.dtype == "float64" or self.drops else self.output_floor(rows),
            measured_against=self.measured_against,
        )


def _plain(value: object) -> object:
    """A setting as JSON carries it."""
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


_GIVEN = ("num_kv_heads", "head_dim", "rope", "add_bias_kv", "add_zero_attn", "dropout")
"""Sizes and settings that a layer has of its own where somebody gave them."""


def two_layers(planned: Iterable[LayerSide]) -> tuple[Side, Side]:
    """Build two layers that `make_sides` planned. Raises as `load_layer`."""
    planned = tuple(planned)
    finer = _finer(*(side.spec.dtype for side in planned))
    left, right = (Side.of_layer(side, dtype=finer) for side in planned)
    return left, right


def layer_beside(
    name: SideName,
    kind: LayerKind,
    beside: Side,
    call: Call,
    given: Mapping[str, Any],
    inputs: InputSpec,
    run: RunSpec,
    settings: Mapping[str, Any],
) -> Side:
    """Return a layer as a side, with the input of the module beside it.

    Args:
        name: left or right.
        kind: the layer.
        beside: the other side, whose sizes it has but for those that somebody gave.
        call: what the module beside it is called with.
        given: fields of `AttentionSpec` that somebody gave.
        inputs: what goes in; its sizes are those of the call.
        run: how it is run.
        settings: what is set for this side alone.

    Raises `SpecError` where a size contradicts the module, or the layer has no use for a setting.
    """
    tensors = layer_inputs(beside.subject.module, call)
    unbatched = tensors[0].dim() == 2
    if not unbatched and not call.batch_first:
        tensors = _turned(tensors)
    query, key, _ = tensors
    batch, query_len = (1, query.shape[0]) if unbatched else (query.shape[0], query.shape[1])
    key_len = None if key is query else key.shape[-2]
    inputs = replace(inputs, input=None, batch=batch, seq_len=query_len, key_len=key_len, unbatched=unbatched)
    spec = _spec(kind, beside, tensors, given)
    side, like = (
        layer_side(name, kind, spec, inputs, run, settings, kind),
        LayerSide(beside.name, kind, spec, inputs, run),
    )
    require_same_input(*((side, like) if name == "left" else (like, side)))
    tensors = tensors if side.spec.batch_first or unbatched else _turned(tensors)
    return Side.of_layer(side, dtype=_finer(side.spec.dtype, cast(DtypeName, beside.dtype)), given=tensors)


def _finer(*dtypes: DtypeName) -> DtypeName:
    return min(dtypes, key=lambda name: torch.finfo(getattr(torch, name)).eps)


def _turned(tensors: Triple) -> Triple:
    """Return the tensors with batch and length in each other's place, one that serves as several staying one."""
    changed = {id(tensor): tensor.transpose(0, 1).contiguous() for tensor in tensors}
    query, key, value = (changed[id(tensor)] for tensor in tensors)
    return query, key, value


def _spec(kind: LayerKind, beside: Side, tensors: Triple, given: Mapping[str, Any]) -> AttentionSpec:
    """Return the sizes of the layer: those of the module beside it, but for those that somebody gave."""
    embed_dim, kdim, vdim = (tensor.shape[-1] for tensor in tensors)
    if given.get("embed_dim", embed_dim) != embed_dim:
        module = beside.subject.label
        raise SpecError(
            f"embed_dim {given['embed_dim']} contradicts {module}, which takes {embed_dim} features: diff gives both "
            f"the same input. Drop --embed-dim, or give {module} another size: --{beside.name}-set NAME=VALUE."
        )
    found = {"num_heads": AttentionSpec.num_heads, "bias": AttentionSpec.bias, **sizes_of(beside)}
    sizes = {flag: given.get(flag, found[flag]) for flag in ("num_heads", "bias")}
    if "num_kv_heads" in kind.takes and found.get("num_kv_heads", found["num_heads"]) != found["num_heads"]:
        sizes["num_kv_heads"] = found["num_kv_heads"]
    if "head_dim" in kind.takes and found.get("head_dim", 0) * found["num_heads"] not in (0, embed_dim):
        sizes["head_dim"] = found["head_dim"]
    sizes |= {flag: given[flag] for flag in _GIVEN if flag in given and flag in (*kind.takes, "dropout")}
    return spec_for(
        kind,
        embed_dim=embed_dim,
        kdim=kdim if kdim != embed_dim else None,
        vdim=vdim if vdim != embed_dim else None,
        training=given["training"],
        dtype=given.get("dtype", beside.dtype),
        seed=given["seed"],
        **sizes,
    )


def sizes_of(side: Side) -> dict[str, Any]:
    """Return those sizes of a side's first attention that show when it runs, by the names of `AttentionSpec`."""
    if not side.attentions:
        return {}
    found, names = side.attentions[0]
    sizes: dict[str, Any] = {
        "num_heads": names.num_heads,
        "num_kv_heads": names.num_kv_heads,
        "head_dim": names.head_dim,
    }
    if "query" in found.stages:
        sizes["embed_dim"] = found.stages["query"].shape[-1]
    if found.projections:
        sizes["bias"] = any(map(side.run.graph.has_bias, found.projections.values()))
    return sizes
