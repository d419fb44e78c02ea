"""Report a run as plain data: its attentions, stage by stage, its returned tensors, its operations, and the proof."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..graph.dataflow import Graph
from ..layers.spec import Show
from ..measure.content import stats_of, values_of
from ..naming.axes import AxisNames
from ..naming.canonical import NamedAxes, own_axes
from ..naming.inner_steps import InnerSteps, InnerStepsReader
from ..naming.named_run import NamedRun
from ..naming.pattern import STAGES, dims_of
from ..naming.score_formulas import weighs_by_others, without_dot
from ..naming.stage_facts import StageFacts
from ..naming.visibility import Rows
from ..record.arguments import tensors_in
from ..record.ops import Kernel, Op, TensorRef
from ..reports.common import Environment, LayerInfo
from ..reports.trace import (
    AttentionReport,
    Collective,
    Memory,
    OpLine,
    OpRef,
    OpTensor,
    Path,
    Proof,
    Returned,
    Stage,
    Trace,
)
from ..running.subject import Run, Subject
from ..text import listed

_UNSAID = "torch gives no reason; its fast path requires biases"
"""The reason if torch gives none, e.g. without in_proj_bias."""
_NESTED = (
    "Attention over nested tensors (rows of different lengths) cannot be followed. "
    "Pad the rows and pass a mask to see it."
)
_PRODUCTS = ("aten.baddbmm", "aten.addmm")
"""Kernels that are a matrix product with a mask added; the report lists them as ordinary operations."""


def path_of(run: Run) -> Path:
    """Return the kernels of a run, torch's own reason against the fast path, and the opened kernels."""
    recording = run.recording
    outer = [kernel for kernel in recording.kernels if kernel.within is None and not kernel.op.startswith(_PRODUCTS)]
    refusals = dict.fromkeys(reason for reason in recording.fast_path_refusals if reason)
    fast = any(kernel.op.startswith("aten._native_multi_head_attention") for kernel in recording.kernels)
    if recording.fast_path_refusals and not refusals and not fast:
        refusals[_UNSAID] = None
    phrases = _phrases(run, outer)
    return Path(
        plain="; ".join(phrases) or "no attention kernel",
        reason="; ".join(" ".join(reason.split()) for reason in refusals) or None,
        opened=tuple(dict.fromkeys(_short(kernel) for kernel in outer if kernel.opened)),
        not_opened=tuple(dict.fromkeys(f"{_short(k)}: {k.note}" for k in recording.kernels if not k.opened)),
        _kernels=tuple(dict.fromkeys(phrases.values())) or ("no attention kernel",),
    )


def _phrases(run: Run, outer: list[Kernel]) -> dict[str, str]:
    """Return for each kernel of a run its phrase and, as the value, its name."""
    phrases = {f"{_short(kernel)} ({kernel.title})": _short(kernel) for kernel in outer}
    for attention, _ in run.attentions:
        if attention.softmax.kernel is None:
            product, place = attention.score_product, attention.score_product.op.kernel
            scores = product.name if place is None else run.recording.kernels[place].op.split(".")[1]
            softmax = attention.softmax.base_name.strip("_")
            separate = "separate operations"
            phrases[f"{separate}: {scores}, {softmax}, {attention.value_product.name}"] = separate
    return phrases


def maker_of(run: Run, tensor: TensorRef) -> OpRef | None:
    """Return the operation whose result is this tensor; None for an input."""
    op = run.recording.producer(tensor)
    while op is not None and op.output.id in run.recording.joins:
        op = run.recording.producer(op.inputs[0])
    return None if op is None else OpRef(op.index, run.recording.name_of(op), op.source)


def is_hidden(run: Run, stage: str, tensor: TensorRef) -> bool:
    """Return whether a stage is inside a fused kernel that was opened to show it."""
    op = run.recording.producer(tensor)
    return op is not None and op.kernel is not None and stage in run.recording.kernels[op.kernel].hides


def has_shape_only(run: Run, tensor: TensorRef) -> bool:
    """Return whether a stage has a shape only, because its kernel has too many scores to recompute."""
    op = run.recording.producer(tensor)
    kernel = None if op is None or op.kernel is None else run.recording.kernels[op.kernel]
    return kernel is not None and kernel.shapes_only and op is not None and not op.makes_result


def drops_at_random(run: Run) -> bool:
    """Return whether a run drops elements at random, by a dropout or in a fused kernel."""
    ops, kernels = run.recording.ops, run.recording.kernels
    return any(op.does("draws") for op in ops) or any(kernel.drops for kernel in kernels)


def proof_of(run: Run) -> Proof:
    """Return the largest difference between the kernels' results and their recomputed steps."""
    kernels = run.recording.kernels
    meta = any(tensor.is_meta for _, tensor in tensors_in(run.returned))
    if not kernels and not meta and run.recording.hides_compiled:
        return Proof(None, None, None, "the operations of compiled code are not shown")
    if not kernels and not meta:
        return Proof(0.0, None, True, "No fused kernels: every stage is exactly what PyTorch computed.")
    checked = [(kernel.check, kernel) for kernel in kernels if kernel.opened and kernel.check is not None]
    notes = dict.fromkeys(f"{_short(kernel)}: {kernel.note}" for kernel in kernels if kernel.note)
    if not checked:
        return Proof(None, None, None, "device meta has shapes but no numbers" if meta else "; ".join(notes))
    worst, kernel = max(checked, key=lambda pair: (pair[0].times, pair[0].difference))
    if worst.verdict == "differs":
        notes = {f"{_short(kernel)} differs": None, **notes}
    return Proof(worst.difference, worst.error, worst.verdict != "differs", "; ".join(notes))


def _short(kernel: Kernel) -> str:
    return kernel.op.rpartition(".")[0] or kernel.op


def environment_of(subject: Subject) -> Environment:
    """Return the environment of a subject's run: torch, device, dtype, seed."""
    tensors = [tensor for _, tensor in tensors_in((subject.args, subject.kwargs))] + list(subject.module.parameters())
    floating = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    return Environment(
        torch.__version__,
        str(tensors[0].device) if tensors else "cpu",
        "" if floating is None else str(floating.dtype).removeprefix("torch."),
        subject.seed,
    )


def layer_of(subject: Subject) -> LayerInfo:
    """Return the name of a subject, and the arguments that it was built with."""
    return LayerInfo(subject.name, dict(subject.made_with))


def report(
    run: Run,
    show: Show,
    *,
    environment: Environment,
    layer: LayerInfo,
    proof: Proof | None = None,
    kinds: Sequence[tuple[str, ...]] = (),
    leaves: Mapping[int, Tensor] | None = None,
) -> Trace:
    """Return a run as plain data; `proof` replaces the proof of the run's kernels."""
    axes, facts = own_axes(run), _facts_of(run, leaves or {})
    modules = [attention.module for attention, _ in run.attentions]
    # Nested tensors are recorded as one buffer without axes; only opened kernels pad their rows.
    missed = not run.attentions or any(not kernel.opened for kernel in run.recording.kernels)
    nested = missed and any("nested" in op.base_name for op in run.recording.ops)
    return Trace(
        environment=environment,
        layer=layer,
        path=path_of(run),
        attentions=tuple(
            replace(
                _attention(run, attention, names, axes.stages[place], show, facts[place]),
                kind=kinds[place] if place < len(kinds) else (),
                call=modules[: place + 1].count(attention.module) if modules.count(attention.module) > 1 else None,
            )
            for place, (attention, names) in enumerate(run.attentions)
        ),
        returns=tuple(_returns(run, axes, show)),
        proof=proof_of(run) if proof is None else proof,
        notes=(*((_NESTED,) if nested else ()), *run.recording.notes),
        ops=tuple(_op_lines(run, axes)) if show.ops else None,
        collectives=tuple(_collectives(run)) or None,
    )


def _collectives(run: Run) -> Iterator[Collective]:
    of_all = [item for attention, _ in run.attentions for item in attention.stages.items()]
    stages = {tensor.id: stage for stage, tensor in reversed(of_all)}

    def arranges(op: Op) -> bool:
        arranges = run.graph.moves(op) or op.does("joins", "passes_on") or op.base_name == "copy_"
        return arranges or run.graph.adds_bias(op)

    for op in run.recording.ops:
        tensors = sorted((*op.inputs, *op.outputs), key=lambda tensor: tensor.nbytes)
        if op.is_collective and tensors:
            readers = (reader for tensor in op.outputs for reader, _ in run.graph.forward(tensor, arranges))
            made = (*op.outputs, *(reader.output for reader in readers if arranges(reader)))
            stage = next((stages[tensor.id] for tensor in made if tensor.id in stages), "")
            name, largest = op.base_name.strip("_"), tensors[-1]
            yield Collective(name, stage, largest.shape, largest.dtype, largest.nbytes, op.module, op.source)


def _masked_of(run: Run, attention: Attention) -> Tensor | None:
    """Return where a mask put -inf, as a bool; None if the masked scores were not kept."""
    values, masked = run.recording.values, attention.stages.get("masked_scores")
    if masked is None or masked.id not in values:
        return None
    low: Tensor = values[masked.id] == -torch.inf
    scores = values[attention.stages["scores"].id]
    return low & (scores != -torch.inf).view(low.shape) if scores.numel() == low.numel() else low


@dataclass(frozen=True)
class _Facts:
    """What a report says of an attention that equal attentions have in common."""

    inner: InnerSteps
    formulas: dict[str, tuple[str, str]]
    """Stage to its formula, and to its brief formula."""
    flops: dict[str, int]
    memory: dict[str, Memory]
    notes: tuple[str, ...]
    names_parameters: bool
    """Whether a stage depends on no input, so that its formula may name a parameter."""


def _facts_of(run: Run, leaves: Mapping[int, Tensor]) -> list[_Facts]:
    """Return the facts of each attention; those of equal layers once, unless constants or parameters differ."""
    distinct = run.distinct
    reader, whole_reader = InnerStepsReader(distinct.run, leaves), InnerStepsReader(run, leaves)
    once = [_read_facts(distinct.run, *named, reader) for named in distinct.run.attentions]
    facts = []
    for named, instance in zip(run.attentions, distinct.instances, strict=True):
        alike = instance.translation is None or reader.are_alike(instance.translation)
        shares = alike and (instance.translation is None or not once[instance.place].names_parameters)
        facts.append(once[instance.place] if shares else _read_facts(run, *named, whole_reader))
    return facts


def _read_facts(run: NamedRun, attention: Attention, names: AxisNames, reader: InnerStepsReader) -> _Facts:
    inner = reader.of(attention, names)
    axes = {stage: names.of_stage(stage) for stage in attention.stages}
    facts = StageFacts(run.graph, attention, axes, inner, names.num_heads // max(names.num_kv_heads, 1))
    return _Facts(
        inner=inner,
        formulas={stage: (facts.formula(stage), facts.formula(stage, brief=True)) for stage in axes},
        flops={stage: facts.flops(stage) for stage in axes},
        memory={stage: facts.memory(stage) for stage in axes},
        notes=_notes(run.graph, attention, names, facts),
        names_parameters=not run.graph.comes_from_inputs(*attention.stages.values()),
    )


def _attention(
    run: Run, attention: Attention, names: AxisNames, axes: Mapping[str, str], show: Show, facts: _Facts
) -> AttentionReport:
    masked = _masked_of(run, attention) if show.stats else None
    stages = [
        Stage(
            name=name,
            shape=tensor.shape,
            axes=axes[name],
            formula=facts.formulas[name][0],
            _brief=facts.formulas[name][1],
            dtype=tensor.dtype,
            nbytes=tensor.nbytes,
            flops=facts.flops[name],
            memory=facts.memory[name],
            opened=is_hidden(run, name, tensor),
            op=maker_of(run, tensor),
            **_content(run, show, tensor, masked if name == "masked_scores" else None),
            shape_only=has_shape_only(run, tensor),
        )
        for name, tensor in ((name, attention.stages[name]) for name in STAGES if name in attention.stages)
    ]
    return AttentionReport(
        module=attention.module,
        num_heads=names.num_heads,
        num_kv_heads=names.num_kv_heads,
        head_dim=names.head_dim,
        scale=float("nan") if attention.scale is None else attention.scale,
        stages=tuple(stages),
        notes=facts.notes,
        position=facts.inner.position,
        qk_norm=facts.inner.qk_norm,
        cache=facts.inner.cache,
        window=facts.inner.window,
        bias=facts.inner.bias,
    )


def _content(run: Run, show: Show, tensor: TensorRef, masked: Tensor | None = None) -> dict[str, Any]:
    value = run.recording.values.get(tensor.id)
    stats = stats_of(value, masked) if show.stats and value is not None else None
    return {"stats": stats, "values": values_of(value, show) if show.values and value is not None else None}


def _notes(graph: Graph, attention: Attention, names: AxisNames, facts: StageFacts) -> tuple[str, ...]:
    beside = " The … depends on all scores of the same query." if weighs_by_others(graph, attention) else ""
    parts = facts.has_other_keys()
    number = len(attention.branches)
    along = _along(attention, names)
    mixed = ["scores before the softmax"] if attention.mixed_scores else []
    mixed += [f"weights after {'it' if mixed else 'the softmax'}"] if attention.mixed_weights else []
    sentences = {
        without_dot(attention): True,
        f"The weights come from the scores without a softmax.{beside}": attention.weighing,
        "The features of a head attend to one another: the scores sum over positions, the softmax is over "
        "features.": names.over_features,
        "The softmax is over the queries instead of the keys: the weights of each key sum to 1.": (
            attention.over_queries and attention.average_of_ones is None
        ),
        "The weights are never formed: exp(scores) is multiplied by the values, then divided by its sum.": (
            attention.divided is not None and attention.average_of_ones is None
        ),
        "The weights are never formed, and do not sum to 1: exp(scores) is multiplied by the values, then divided by "
        "something other than its sum.": attention.average_of_ones is not None,
        "The softmax also covers scores of other keys from a second product: the stages show a part of the "
        "attention.": parts,
        "Several projections give the queries: query, q_proj, concat and output are those of a single one.": (
            facts.joins_projections("q_heads")
        ),
        "Attention sinks are joined to the scores: they take weight and have no value.": (
            attention.sinks is not None and not parts
        ),
        f"Each head combines the weights of {names.maps} softmaxes before the values.": names.maps > 1,
        f"The heads are a loop: stages, bytes and FLOPs of a single head are of the first of {number}.": (
            attention.branches
        ),
        f"This attention is computed in {len(attention.pieces)} pieces along {along}; each stage shows all of them.": (
            along
        ),
        f"This attention is computed in {len(attention.pieces)} pieces of its keys; the stages show the first.": (
            attention.pieces and not along
        ),
        f"A matrix mixes the heads' {' and their '.join(mixed)} (talking heads).": mixed,
        "Weights are shown as softmax gives them, before dropout.": facts.drops(),
    }
    return tuple(sentence for sentence, applies in sentences.items() if sentence and applies)


def _along(attention: Attention, names: AxisNames) -> str:
    """Return the name of the axis of the scores that pieces are cut from; empty without pieces."""
    if attention.cut_place is not None:
        return " and ".join(dims_of(names.of_stage("weights"))[attention.cut_place])
    shapes = (turn.stages["scores"].shape for turn in (attention, *attention.pieces[:1]))
    dims = zip(dims_of(names.of_stage("scores")), *shapes, strict=True)
    return next((" and ".join(words) for words, *sizes in dims if len(set(sizes)) > 1), "")


def _returns(run: Run, axes: NamedAxes, show: Show) -> Iterator[Returned]:
    """Yield the returned tensors: the output, the weights if returned, any others by their place."""
    for place, (named, pattern) in enumerate(zip(run.recording.outputs, axes.returned, strict=True)):
        is_weights = {"query", "key"} <= set(pattern.split())
        name = "output" if place == 0 else "weights" if is_weights else named.name
        tensor = named.tensor
        yield Returned(name, tensor.shape, pattern, tensor.dtype, **_content(run, show, tensor))


def _op_lines(run: Run, axes: NamedAxes) -> Iterator[OpLine]:
    known: dict[int, tuple[str, str]] = {}
    for (attention, _), patterns in zip(run.attentions, axes.stages, strict=True):
        for stage, tensor in attention.stages.items():
            known.setdefault(tensor.id, (stage, patterns[stage]))

    def operands(tensors: tuple[TensorRef, ...]) -> tuple[OpTensor, ...]:
        return tuple(OpTensor(t.id, t.shape, t.dtype, known.get(t.id, ("", ""))[1]) for t in tensors)

    for op in run.recording.ops:
        made = [tensor.id for tensor in op.outputs if run.recording.producers.get(tensor.id) == op.index]
        yield OpLine(
            index=op.index,
            name=run.recording.name_of(op),
            module=op.module,
            source=op.source,
            inputs=operands(op.inputs),
            outputs=operands(op.outputs),
            settings=_settings(op),
            memory="view" if op.kind == "view" else "copy" if op.kind == "copy" else "new",
            stage=", ".join(known[number][0] for number in made if number in known),
        )


def _settings(op: Op) -> str:
    """Return the arguments other than tensors, as Python would write them."""

    def has_tensor(value: Any) -> bool:
        return isinstance(value, TensorRef) or (isinstance(value, tuple) and any(map(has_tensor, value)))

    named = [("", value) for value in op.args] + [(f"{name}=", value) for name, value in op.kwargs.items()]
    shown = (
        (name, list(value) if isinstance(value, tuple) else value) for name, value in named if not has_tensor(value)
    )
    return ", ".join(f"{name}{value}" for name, value in shown)


def fate_of(weights: Tensor | None, rows: Rows) -> str:
    """Return the kind of weights, `batch heads query key`, of queries with every key masked out.

    The kind is `NaN`, `zero` or `uniform`, in at least one head; `numbers` for anything else, or if unknown.
    """
    if weights is None:
        return "numbers"
    known = [weights[batch, :, query] for batch, query in rows if batch < len(weights) and query < weights.shape[2]]
    if not known:
        return "numbers"
    low, high = torch.cat(known).double().aminmax(dim=-1)
    if bool(high.isnan().any()):
        return "NaN"
    if bool((high == 0).any()):
        return "zero"
    return "uniform" if bool((high - low <= 1e-2 * high).any()) else "numbers"


def in_heads(heads: tuple[int, ...] | None) -> str:
    """Return in which heads queries have every key masked out, e.g. ` in head 2`: `Visibility.blind_heads` in words."""
    if heads is None:
        return " in at least one head"
    if not heads:
        return ""
    return f" in head{'s' if len(heads) > 1 else ''} {listed([*map(str, heads)])}"


def masked_sentence(rows: Rows, fate: str, heads: tuple[int, ...] | None = ()) -> str:
    """Return a sentence about queries with every key masked out in `heads`; `fate` says what their weights are."""
    have = "1 query has" if len(rows) == 1 else f"{len(rows):,} queries have"
    batch, query = rows[0]
    return f"{have} every key masked out{in_heads(heads)} (first: query {query} of batch item {batch}): {fate}."
