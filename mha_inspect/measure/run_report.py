"""Report a run as plain data: its attentions, stage by stage, its returned tensors, its operations, and the proof."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..graph.dataflow import Graph
from ..layers.spec import Show
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
from ..record.rounding import Rounding
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
from .content import stats_of, values_of

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
    outer: list[Kernel] = []
    opened: dict[str, None] = {}
    not_opened: dict[str, None] = {}
    for kernel in run.recording.kernels:
        if not kernel.opened:
            not_opened[f"{_short(kernel)}: {kernel.note}"] = None
        if kernel.within is not None or kernel.op.startswith(_PRODUCTS):
            continue
        outer.append(kernel)
        if kernel.opened:
            opened[_short(kernel)] = None
    phrases = _phrases(run, outer)
    return Path(
        plain="; ".join(phrases) or "no attention kernel",
        reason="; ".join(_refusals(run)) or None,
        opened=tuple(opened),
        not_opened=tuple(not_opened),
        _kernels=tuple(dict.fromkeys(phrases.values())) or ("no attention kernel",),
    )


def _refusals(run: Run) -> list[str]:
    """Return torch's reasons against its fast path, each once, on one line."""
    refusals = run.recording.fast_path_refusals
    reasons = [reason for reason in dict.fromkeys(refusals) if reason]
    if reasons:
        return [" ".join(reason.split()) for reason in reasons]
    ran_fast = any(kernel.op.startswith("aten._native_multi_head_attention") for kernel in run.recording.kernels)
    return [_UNSAID] if refusals and not ran_fast else []


def _phrases(run: Run, outer: list[Kernel]) -> dict[str, str]:
    """Return for each kernel of a run its phrase and, as the value, its name."""
    phrases = {f"{_short(kernel)} ({kernel.title})": _short(kernel) for kernel in outer}
    for attention, _ in run.attentions:
        if attention.softmax.kernel is None:
            phrases[f"separate operations: {_operations(run, attention)}"] = "separate operations"
    return phrases


def _operations(run: Run, attention: Attention) -> str:
    """Return the operations of an attention without a kernel: `matmul, softmax, matmul`."""
    product, place = attention.score_product, attention.score_product.op.kernel
    scores = product.name if place is None else run.recording.kernels[place].op.split(".")[1]
    softmax = attention.softmax.base_name.strip("_")
    return f"{scores}, {softmax}, {attention.value_product.name}"


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
    if op is None or op.kernel is None or op.makes_result:
        return False
    return run.recording.kernels[op.kernel].shapes_only


def drops_at_random(run: Run) -> bool:
    """Return whether a run drops elements at random, by a dropout or in a fused kernel."""
    ops, kernels = run.recording.ops, run.recording.kernels
    return any(op.does("draws") for op in ops) or any(kernel.drops for kernel in kernels)


def proof_of(run: Run) -> Proof:
    """Return the largest difference between the kernels' results and their recomputed steps."""
    kernels = run.recording.kernels
    is_meta = any(tensor.is_meta for _, tensor in tensors_in(run.returned))
    if not kernels and not is_meta:
        if run.recording.hides_compiled:
            return Proof(None, None, None, "the operations of compiled code are not shown")
        return Proof(0.0, None, True, "No fused kernels: every stage is exactly what PyTorch computed.")
    notes = dict.fromkeys(f"{_short(kernel)}: {kernel.note}" for kernel in kernels if kernel.note)
    checked = _furthest_off(kernels)
    if checked is None and is_meta:
        return Proof(None, None, None, "device meta has shapes but no numbers")
    if checked is None:
        return Proof(None, None, None, "; ".join(notes))
    is_same = checked.result.verdict != "differs"
    if not is_same:
        notes = {f"{checked.kernel} differs": None, **notes}
    return Proof(checked.result.difference, checked.result.error, is_same, "; ".join(notes))


@dataclass(frozen=True)
class _Checked:
    """A kernel whose recomputed steps were compared with its result."""

    kernel: str
    result: Rounding


def _furthest_off(kernels: Iterable[Kernel]) -> _Checked | None:
    """Return the kernel whose result is furthest from its steps, in rounding errors; None if none was compared."""
    checked = []
    for kernel in kernels:
        if kernel.opened and kernel.check is not None:
            checked.append(_Checked(_short(kernel), kernel.check))
    return max(checked, key=lambda kernel: (kernel.result.times, kernel.result.difference), default=None)


def _short(kernel: Kernel) -> str:
    return kernel.op.rpartition(".")[0] or kernel.op


def environment_of(subject: Subject) -> Environment:
    """Return the environment of a subject's run: torch, device, dtype, seed."""
    tensors = [tensor for _, tensor in tensors_in((subject.args, subject.kwargs))]
    tensors += subject.module.parameters()
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return Environment(
        torch=torch.__version__,
        device=str(tensors[0].device) if tensors else "cpu",
        dtype=str(dtypes[0]).removeprefix("torch.") if dtypes else "",
        seed=subject.seed,
        random=subject.random,
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
    attentions = []
    for place, (attention, names) in enumerate(run.attentions):
        attention_report = _attention(run, attention, names, axes.stages[place], show, facts[place])
        if place < len(kinds):
            attention_report = replace(attention_report, kind=kinds[place])
        if modules.count(attention.module) > 1:
            call = modules[: place + 1].count(attention.module)
            attention_report = replace(attention_report, call=call)
        attentions.append(attention_report)
    return Trace(
        environment=environment,
        layer=layer,
        path=path_of(run),
        attentions=tuple(attentions),
        returns=tuple(_returns(run, axes, show)),
        proof=proof_of(run) if proof is None else proof,
        notes=(*_notes_on_nested(run), *run.recording.notes),
        ops=tuple(_op_lines(run, axes)) if show.ops else None,
        collectives=tuple(_collectives(run)) or None,
        _shows_cost=show.ops,
    )


def _notes_on_nested(run: Run) -> Iterator[str]:
    """Yield the sentence on nested tensors, if an attention over them may be missing."""
    # Nested tensors are recorded as one buffer without axes; only opened kernels pad their rows.
    if run.attentions and all(kernel.opened for kernel in run.recording.kernels):
        return
    if any("nested" in op.base_name for op in run.recording.ops):
        yield _NESTED


def _collectives(run: Run) -> Iterator[Collective]:
    """Yield the operations that exchange tensors between ranks, with the first stage that is made of the result."""
    stages: dict[int, str] = {}
    for attention, _ in run.attentions:
        for stage, tensor in attention.stages.items():
            stages.setdefault(tensor.id, stage)
    for op in run.recording.ops:
        tensors = [*op.inputs, *op.outputs]
        if not op.is_collective or not tensors:
            continue
        largest = sorted(tensors, key=lambda tensor: tensor.nbytes)[-1]
        yield Collective(
            name=op.base_name.strip("_"),
            stage=_stage_made_of(run, op, stages),
            shape=largest.shape,
            dtype=largest.dtype,
            nbytes=largest.nbytes,
            module=op.module,
            source=op.source,
        )


def _stage_made_of(run: Run, op: Op, stages: Mapping[int, str]) -> str:
    """Return the first stage that is a result of an operation, or its numbers arranged in another way; else empty."""

    def arranges(reader: Op) -> bool:
        moves = run.graph.moves(reader) or reader.does("joins", "passes_on") or reader.base_name == "copy_"
        return moves or run.graph.adds_bias(reader)

    for tensor in op.outputs:
        if tensor.id in stages:
            return stages[tensor.id]
    for tensor in op.outputs:
        for reader, _ in run.graph.forward(tensor, arranges):
            if arranges(reader) and reader.output.id in stages:
                return stages[reader.output.id]
    return ""


def _masked_of(run: Run, attention: Attention) -> Tensor | None:
    """Return where a mask put -inf, as a bool; None if the masked scores were not kept."""
    values = run.recording.values
    masked = attention.stages.get("masked_scores")
    if masked is None or masked.id not in values:
        return None
    low: Tensor = values[masked.id] == -torch.inf
    scores = values[attention.stages["scores"].id]
    if scores.numel() != low.numel():
        return low
    was_low: Tensor = scores == -torch.inf
    return low & ~was_low.view(low.shape)


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
    reader = InnerStepsReader(distinct.run, leaves)
    once = []
    for attention, names in distinct.run.attentions:
        once.append(_read_facts(distinct.run, attention, names, reader))
    whole_reader = InnerStepsReader(run, leaves)
    facts = []
    for (attention, names), instance in zip(run.attentions, distinct.instances, strict=True):
        of_first = once[instance.place]
        layer = instance.layer
        is_shared = layer is None  # no layers are equal
        if layer is not None and reader.read_the_same_in(layer):
            is_shared = not of_first.names_parameters
        if is_shared:
            facts.append(of_first)
        else:
            facts.append(_read_facts(run, attention, names, whole_reader))
    return facts


def _read_facts(run: NamedRun, attention: Attention, names: AxisNames, reader: InnerStepsReader) -> _Facts:
    inner = reader.of(attention, names)
    axes = {stage: names.of_stage(stage) for stage in attention.stages}
    group = names.num_heads // max(names.num_kv_heads, 1)
    facts = StageFacts(run.graph, attention, axes, inner, group)
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
    stages = []
    for name in STAGES:
        if name not in attention.stages:
            continue
        tensor = attention.stages[name]
        masked = None
        if name == "masked_scores" and show.stats:
            masked = _masked_of(run, attention)
        formula, brief = facts.formulas[name]
        stage = Stage(
            name=name,
            shape=tensor.shape,
            axes=axes[name],
            formula=formula,
            _brief=brief,
            dtype=tensor.dtype,
            nbytes=tensor.nbytes,
            flops=facts.flops[name],
            memory=facts.memory[name],
            opened=is_hidden(run, name, tensor),
            op=maker_of(run, tensor),
            **_content(run, show, tensor, masked),
            shape_only=has_shape_only(run, tensor),
        )
        stages.append(stage)
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
    """Return the statistics and the values of a tensor, as far as they are shown and its numbers were kept."""
    value = run.recording.values.get(tensor.id)
    if value is None:
        return {"stats": None, "values": None}
    return {
        "stats": stats_of(value, masked) if show.stats else None,
        "values": values_of(value, show) if show.values else None,
    }


def _notes(graph: Graph, attention: Attention, names: AxisNames, facts: StageFacts) -> tuple[str, ...]:
    """Return sentences on an attention that is unlike the textbook's, or that the stages show in part."""
    sentences = [without_dot(attention)]
    sentences += _notes_on_weights(graph, attention, names)
    sentences += _notes_on_parts(attention, names, facts)
    sentences += _notes_on_mixed_heads(attention)
    if facts.drops():
        sentences.append("Weights are shown as softmax gives them, before dropout.")
    return tuple(sentence for sentence in sentences if sentence)


def _notes_on_weights(graph: Graph, attention: Attention, names: AxisNames) -> Iterator[str]:
    """Yield sentences on how the weights come from the scores, if not by a softmax over the keys."""
    if attention.weighing:
        beside = " The … depends on all scores of the same query." if weighs_by_others(graph, attention) else ""
        yield f"The weights come from the scores without a softmax.{beside}"
    if names.over_features:
        yield (
            "The features of a head attend to one another: the scores sum over positions, the softmax is over features."
        )
    if attention.average_of_ones is not None:
        yield (
            "The weights are never formed, and do not sum to 1: exp(scores) is multiplied by the values, then divided "
            "by something other than its sum."
        )
        return
    if attention.over_queries:
        yield "The softmax is over the queries instead of the keys: the weights of each key sum to 1."
    if attention.divided is not None:
        yield "The weights are never formed: exp(scores) is multiplied by the values, then divided by its sum."


def _notes_on_parts(attention: Attention, names: AxisNames, facts: StageFacts) -> Iterator[str]:
    """Yield sentences on stages that show a part of the attention, or several parts together."""
    shows_part_of_keys = facts.has_other_keys()
    if shows_part_of_keys:
        yield (
            "The softmax also covers scores of other keys from a second product: the stages show a part of the "
            "attention."
        )
    if facts.joins_projections("q_heads"):
        yield "Several projections give the queries: query, q_proj, concat and output are those of a single one."
    if attention.sinks is not None and not shows_part_of_keys:
        yield "Attention sinks are joined to the scores: they take weight and have no value."
    if names.maps > 1:
        yield f"Each head combines the weights of {names.maps} softmaxes before the values."
    if attention.branches:
        number = len(attention.branches)
        yield f"The heads are computed one by one: stages of a single head are those of the first of {number}."
    pieces, along = len(attention.pieces), _along(attention, names)
    if along:
        yield f"This attention is computed in {pieces} pieces along {along}; each stage shows all of them."
    elif pieces:
        yield f"This attention is computed in {pieces} pieces of its keys; the stages show the first."


def _notes_on_mixed_heads(attention: Attention) -> Iterator[str]:
    """Yield the sentence on a matrix that mixes the scores or the weights of the heads."""
    if attention.mixed_scores and attention.mixed_weights:
        mixed = "scores before the softmax and their weights after it"
    elif attention.mixed_scores:
        mixed = "scores before the softmax"
    elif attention.mixed_weights:
        mixed = "weights after the softmax"
    else:
        return
    yield f"A matrix mixes the heads' {mixed} (talking heads)."


def _along(attention: Attention, names: AxisNames) -> str:
    """Return the name of the axis of the scores that pieces are cut from; empty without pieces."""
    shapes = [turn.stages["scores"].shape for turn in (attention, *attention.pieces[:1])]
    for words, *sizes in zip(dims_of(names.of_stage("scores")), *shapes, strict=True):
        if len(set(sizes)) > 1:
            return " and ".join(words)
    return ""


def _returns(run: Run, axes: NamedAxes, show: Show) -> Iterator[Returned]:
    """Yield the returned tensors: the output, the weights if returned, any others by their place."""
    for place, (named, pattern) in enumerate(zip(run.recording.outputs, axes.returned, strict=True)):
        if place == 0:
            name = "output"
        elif {"query", "key"} <= {*pattern.split()}:
            name = "weights"
        else:
            name = named.name
        tensor = named.tensor
        yield Returned(name, tensor.shape, pattern, tensor.dtype, **_content(run, show, tensor))


@dataclass(frozen=True)
class _StageOfTensor:
    """The stage that a tensor is, and its axes."""

    name: str
    axes: str


def _op_lines(run: Run, axes: NamedAxes) -> Iterator[OpLine]:
    """Yield every operation, with the stages that it makes."""
    stages: dict[int, _StageOfTensor] = {}
    for (attention, _), patterns in zip(run.attentions, axes.stages, strict=True):
        for name, tensor in attention.stages.items():
            stages.setdefault(tensor.id, _StageOfTensor(name, patterns[name]))
    for op in run.recording.ops:
        made_stages = []
        for tensor in op.outputs:
            # A later operation may have written into the same tensor.
            if tensor.id in stages and run.recording.producers.get(tensor.id) == op.index:
                made_stages.append(stages[tensor.id].name)
        yield OpLine(
            index=op.index,
            name=run.recording.name_of(op),
            module=op.module,
            source=op.source,
            inputs=_op_tensors(op.inputs, stages),
            outputs=_op_tensors(op.outputs, stages),
            settings=_settings(op),
            memory=_memory_of(op),
            stage=", ".join(made_stages),
        )


def _op_tensors(tensors: Sequence[TensorRef], stages: Mapping[int, _StageOfTensor]) -> tuple[OpTensor, ...]:
    """Return tensors with the axes of those that are stages."""
    op_tensors = []
    for tensor in tensors:
        axes = stages[tensor.id].axes if tensor.id in stages else ""
        op_tensors.append(OpTensor(tensor.id, tensor.shape, tensor.dtype, axes))
    return tuple(op_tensors)


def _memory_of(op: Op) -> Memory:
    """Return whether an operation views the memory of its input, copies it, or makes new elements."""
    if op.kind == "view":
        return "view"
    if op.kind == "copy":
        return "copy"
    return "new"


def _settings(op: Op) -> str:
    """Return the arguments other than tensors, as Python would write them: `2, [1, 3], dim=-1`."""
    settings = [_written(value) for value in op.args if not _has_tensor(value)]
    settings += [f"{name}={_written(value)}" for name, value in op.kwargs.items() if not _has_tensor(value)]
    return ", ".join(settings)


def _has_tensor(value: Any) -> bool:
    """Return whether an argument is a tensor, or a tuple with one."""
    if isinstance(value, tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, TensorRef)


def _written(value: Any) -> str:
    """Return an argument as text, a tuple as the list that the operation was given."""
    return str(list(value)) if isinstance(value, tuple) else str(value)


def fate_of(weights: Tensor | None, rows: Rows) -> str:
    """Return the kind of weights, `batch heads query key`, of queries with every key masked out.

    The kind is `NaN`, `zero` or `uniform`, in at least one head; `numbers` for anything else, or if unknown.
    """
    if weights is None:
        return "numbers"
    batches, _, queries, _ = weights.shape
    blind = []
    for batch, query in rows:
        if batch < batches and query < queries:
            blind.append(weights[batch, :, query])
    if not blind:
        return "numbers"
    low, high = torch.cat(blind).double().aminmax(dim=-1)
    if bool(high.isnan().any()):
        return "NaN"
    if bool((high == 0).any()):
        return "zero"
    if bool((high - low <= 1e-2 * high).any()):
        return "uniform"
    return "numbers"


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
