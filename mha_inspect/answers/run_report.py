"""Report a run as plain data: its attentions, stage by stage, what it returned, its operations, and the proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..graph.attention import Attention
from ..layers.spec import Show
from ..measure.statistics import stats_of, values_of
from ..naming.axes import AxisNames
from ..naming.canonical import NamedAxes
from ..naming.linear import product_pairs
from ..naming.stage_facts import StageFacts, without_dot
from ..naming.stages import STAGES
from ..naming.subject import Run, Subject
from ..naming.wider import pairs_named_after
from ..record.arguments import tensors_in
from ..record.ops import Op, TensorRef
from ..reports.common import Environment, LayerInfo, Stats, Values
from ..reports.trace import Attention as AttentionReport
from ..reports.trace import MaskedRow, Operand, OpLine, OpRef, ProductPair, Proof, Returned, Stage, Trace
from .kernels import has_shape_only, is_hidden, path_of, proof_of


def environment_of(own: Subject) -> Environment:
    """Return what the numbers of a subject are made with."""
    tensors = [tensor for _, tensor in tensors_in((own.args, own.kwargs))] + list(own.module.parameters())
    floating = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    return Environment(
        torch.__version__,
        str(tensors[0].device) if tensors else "cpu",
        "" if floating is None else str(floating.dtype).removeprefix("torch."),
        own.seed,
    )


def layer_of(own: Subject) -> LayerInfo:
    """Return what a subject is called, and what it was made with."""
    return LayerInfo(own.name, dict(own.made_with))


def report(
    seen: Run,
    axes: NamedAxes,
    show: Show,
    *,
    environment: Environment,
    layer: LayerInfo,
    proof: Proof | None = None,
    masked: tuple[MaskedRow, ...] = (),
    kinds: Sequence[tuple[str, ...]] = (),
) -> Trace:
    """A run as plain data; `proof` is given where there is none to read off it."""
    content = _Content(seen, show)
    calls = _calls([found.module for found, _ in seen.attentions])
    return Trace(
        environment=environment,
        layer=layer,
        path=path_of(seen),
        attentions=tuple(
            replace(
                _attention(seen, found, names, axes.stages[place], content),
                kind=kinds[place] if place < len(kinds) else (),
                call=calls[place],
            )
            for place, (found, names) in enumerate(seen.attentions)
        ),
        returns=_returns(seen, axes, content),
        proof=proof_of(seen) if proof is None else proof,
        masked_rows=masked,
        notes=(*_of_rows(seen), *seen.recording.notes),
        products=_products(seen),
        ops=_op_lines(seen, axes) if show.ops else None,
    )


def _of_rows(seen: Run) -> tuple[str, ...]:
    """Say what is not seen of rows that are recorded as one buffer: those of kernels that are opened are padded."""
    closed = any("nested" in kernel.note for kernel in seen.recording.kernels if not kernel.opened)
    missed = closed or not seen.attentions
    nested = missed and any("nested" in op.base_name for op in seen.graph.recording.ops)
    said = "Rows of different lengths (nested tensors) have no axes to follow, and attention over them is not found: "
    return (f"{said}pad them, and pass a mask, to see it.",) if nested else ()


def _products(seen: Run) -> tuple[ProductPair, ...]:
    """Products without a softmax between them, named as in the wider run where there is one."""
    own = product_pairs(seen.graph, (found for found, _ in seen.attentions))
    return pairs_named_after(own, _products(seen.wider)) if own and seen.wider is not None else own


def _calls(modules: Sequence[str]) -> list[int | None]:
    """For each attention, which one of its module's it is; None where the module has but one."""
    return [
        modules[: place + 1].count(module) if modules.count(module) > 1 else None
        for place, module in enumerate(modules)
    ]


class _Content:
    """Statistics and elements of tensors, as far as they are asked for."""

    def __init__(self, seen: Run, show: Show) -> None:
        self._values = seen.recording.values
        self._show = show

    def stats(self, tensor: TensorRef, masked: torch.Tensor | None = None) -> Stats | None:
        value = self._values.get(tensor.id)
        return stats_of(value, masked) if self._show.stats and value is not None else None

    def values(self, tensor: TensorRef) -> Values | None:
        value = self._values.get(tensor.id)
        return values_of(value, self._show) if self._show.values and value is not None else None

    def masked(self, found: Attention) -> torch.Tensor | None:
        """Where a mask has put -inf: where the scores are not -inf, or where what is added to them is."""
        masked = found.stages.get("masked_scores")
        if not self._show.stats or masked is None or masked.id not in self._values:
            return None
        barred: torch.Tensor = self._values[masked.id] == -torch.inf
        if "scores" in found.stages:
            scores = self._values[found.stages["scores"].id]
            return barred & (scores != -torch.inf).view(barred.shape) if scores.numel() == barred.numel() else barred
        added: torch.Tensor = self._values[found.masks[0].inputs[0].id] == -torch.inf
        return barred & added


def _attention(
    seen: Run,
    found: Attention,
    names: AxisNames,
    axes: Mapping[str, str],
    content: _Content,
) -> AttentionReport:
    facts = StageFacts(seen.graph, found, dict(axes))
    stages = []
    for name in STAGES:
        tensor = found.stages.get(name)
        if tensor is None:
            continue
        op = seen.recording.producer(tensor)
        stages.append(
            Stage(
                name=name,
                shape=tensor.shape,
                axes=axes[name],
                formula=facts.formula(name),
                dtype=tensor.dtype,
                nbytes=tensor.nbytes,
                flops=facts.flops(name),
                memory=facts.memory(name),
                opened=is_hidden(seen, name, tensor),
                op=None if op is None else OpRef(op.index, seen.recording.name_of(op), op.source),
                stats=content.stats(tensor, content.masked(found) if name == "masked_scores" else None),
                values=content.values(tensor),
                shape_only=has_shape_only(seen, tensor),
            )
        )
    scale = found.scale
    return AttentionReport(
        module=found.module,
        num_heads=names.num_heads,
        num_kv_heads=names.num_kv_heads,
        head_dim=names.head_dim,
        scale=float("nan") if scale is None else scale,
        stages=tuple(stages),
        notes=_notes(found, names, facts),
    )


def _notes(found: Attention, names: AxisNames, facts: StageFacts) -> tuple[str, ...]:
    notes = list(filter(None, [without_dot(found)]))
    if found.weighing:
        beside = " … is made of all scores of the same query." if "…" in facts.formula("weights") else ""
        notes.append(f"The weights are made of the scores without a softmax.{beside}")
    if found.masks and "scores" not in found.stages:
        notes.append("The mask is added inside the product (baddbmm): the scores without it are never made.")
    if names.mixes_positions:
        notes.append(
            "The heads are split by a view without a transpose, which mixes positions: a head has features of a few "
            "positions, and not its own features of every position. View to (…, heads, head_dim), then transpose."
        )
    if names.over_features:
        notes.append(
            "The features of a head attend to one another: the scores sum over the positions, and the softmax is over "
            "the features of the keys."
        )
    if found.over_queries:
        notes.append(
            "The softmax is over the queries, not over the keys: the weights of a key add up to 1, those of a query "
            "need not."
        )
    if found.divided is not None:
        notes.append(
            "The weights are never formed: exponentials of the scores meet the values, and their sum divides that."
        )
    if found.sinks is not None and facts.has_other_keys():
        notes.append(
            "Scores of other keys stand beside these, by a product of their own: the softmax is over both, and what is "
            "shown is a part of the attention."
        )
    elif found.sinks is not None:
        notes.append("Sinks stand beside the scores: they take a part of the weight and have no value.")
    if names.maps > 1:
        notes.append(f"The weights of {names.maps} maps become those of one head before they meet the values.")
    if found.branches:
        turns = "rows and heads" if found.turned else "heads"
        notes.append(
            f"The {turns} are a loop: stages of a single head are those of the first of {len(found.branches)}, "
            "and so are their bytes and FLOPs."
        )
    mixed = ["scores before the softmax"] if found.mixed_scores else []
    mixed += ["weights after it"] if found.mixed_weights else []
    if mixed:
        notes.append(f"A matrix mixes the heads' {' and their '.join(mixed)} (talking heads).")
    if facts.drops():
        notes.append("Weights are shown as softmax gives them, before dropout.")
    return tuple(notes)


def _returns(seen: Run, axes: NamedAxes, content: _Content) -> tuple[Returned, ...]:
    """What the module returned: its output, the weights where it gives them, anything else by its place."""
    returned = []
    for place, (named, pattern) in enumerate(zip(seen.recording.outputs, axes.returned, strict=True)):
        name = "output" if place == 0 else "weights" if pattern.endswith("query key") else named.name
        tensor = named.tensor
        returned.append(
            Returned(name, tensor.shape, pattern, tensor.dtype, content.stats(tensor), content.values(tensor))
        )
    return tuple(returned)


def _op_lines(seen: Run, axes: NamedAxes) -> tuple[OpLine, ...]:
    known: dict[int, tuple[str, str]] = {}
    for (found, _), patterns in zip(seen.attentions, axes.stages, strict=True):
        for stage, tensor in found.stages.items():
            known.setdefault(tensor.id, (stage, patterns[stage]))

    def operands(tensors: tuple[TensorRef, ...]) -> tuple[Operand, ...]:
        return tuple(Operand(t.id, t.shape, t.dtype, known.get(t.id, ("", ""))[1]) for t in tensors)

    def stage_of(op: Op) -> str:
        made = [t for t in op.outputs if seen.recording.producers.get(t.id) == op.index]
        return ", ".join(known[t.id][0] for t in made if t.id in known)

    return tuple(
        OpLine(
            index=op.index,
            name=seen.recording.name_of(op),
            module=op.module,
            source=op.source,
            inputs=operands(op.inputs),
            outputs=operands(op.outputs),
            settings=_settings(op),
            memory="view" if op.kind == "view" else "copy" if op.kind == "copy" else "new",
            stage=stage_of(op),
        )
        for op in seen.recording.ops
    )


def _settings(op: Op) -> str:
    """The arguments that are no tensors, as Python would write them."""
    parts = [_written(value) for value in op.args if not _holds_tensor(value)]
    parts += [f"{name}={_written(value)}" for name, value in op.kwargs.items() if not _holds_tensor(value)]
    return ", ".join(parts)


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, TensorRef) or (isinstance(value, tuple) and any(map(_holds_tensor, value)))


def _written(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
