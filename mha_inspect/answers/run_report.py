"""Report a run as plain data: its attentions, stage by stage, what it returned, its operations, and the proof."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..graph.dataflow import Graph
from ..layers.spec import Show
from ..measure.content import stats_of, values_of
from ..naming.axes import AxisNames
from ..naming.canonical import NamedAxes, own_axes
from ..naming.pattern import STAGES
from ..naming.stage_facts import StageFacts, weighs_by_others, without_dot
from ..naming.visibility import Rows
from ..record.arguments import tensors_in
from ..record.ops import Kernel, Op, TensorRef
from ..reports.common import Environment, LayerInfo
from ..reports.trace import AttentionReport, OpLine, OpRef, OpTensor, Path, Proof, Returned, Stage, Trace
from ..running.subject import Run, Subject

_UNSAID = "torch names none; its fast path asks for biases"
"""It goes on without a word where there is no in_proj_bias."""
_NESTED = (
    "Rows of different lengths (nested tensors) have no axes to follow, and attention over them is not found: pad "
    "them, and pass a mask, to see it."
)
_PRODUCTS = ("aten.baddbmm", "aten.addmm")
"""Kernels that are a product, with a mask added: they are told as operations like any others."""


def path_of(run: Run) -> Path:
    """Return the kernels of a run, why it is not the fast path in torch's own words, and which kernels were opened."""
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
    """Return the kernels of a run, each in a phrase, and its name by that."""
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
    """Return the operation that made a tensor; None for an input."""
    op = run.recording.producer(tensor)
    return None if op is None else OpRef(op.index, run.recording.name_of(op), op.source)


def is_hidden(run: Run, stage: str, tensor: TensorRef) -> bool:
    """Return whether a stage was hidden in a fused kernel, which was opened to show it."""
    op = run.recording.producer(tensor)
    return op is not None and op.kernel is not None and stage in run.recording.kernels[op.kernel].hides


def has_shape_only(run: Run, tensor: TensorRef) -> bool:
    """Return whether a stage was never made, its kernel having too many scores to make them."""
    op = run.recording.producer(tensor)
    kernel = None if op is None or op.kernel is None else run.recording.kernels[op.kernel]
    return kernel is not None and kernel.shapes_only and op is not None and not op.makes_result


def drops_at_random(run: Run) -> bool:
    """Return whether a run drops elements at random: by a dropout, or in a fused kernel."""
    ops, kernels = run.recording.ops, run.recording.kernels
    return any(op.does("draws") for op in ops) or any(kernel.drops for kernel in kernels)


def proof_of(run: Run) -> Proof:
    """Return how near the steps of the run's kernels come to what the kernels gave: of all of them, the farthest."""
    kernels = run.recording.kernels
    meta = any(tensor.is_meta for _, tensor in tensors_in(run.returned))
    if not kernels and not meta:
        return Proof(0.0, None, True, "No fused kernels: every stage is exactly what PyTorch computed.")
    checked = [(kernel.check, kernel) for kernel in kernels if kernel.opened and kernel.check is not None]
    notes = dict.fromkeys(f"{_short(kernel)}: {kernel.note}" for kernel in kernels if kernel.note)
    if not checked:
        return Proof(None, None, None, "device meta has shapes and no numbers" if meta else "; ".join(notes))
    worst, kernel = max(checked, key=lambda pair: (pair[0].times, pair[0].difference))
    if worst.verdict == "differs":
        notes = {f"{_short(kernel)} differs": None, **notes}
    return Proof(worst.difference, worst.error, worst.verdict != "differs", "; ".join(notes))


def _short(kernel: Kernel) -> str:
    return kernel.op.rpartition(".")[0] or kernel.op


def environment_of(subject: Subject) -> Environment:
    """Return what the numbers of a subject are made with."""
    tensors = [tensor for _, tensor in tensors_in((subject.args, subject.kwargs))] + list(subject.module.parameters())
    floating = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    return Environment(
        torch.__version__,
        str(tensors[0].device) if tensors else "cpu",
        "" if floating is None else str(floating.dtype).removeprefix("torch."),
        subject.seed,
    )


def layer_of(subject: Subject) -> LayerInfo:
    """Return what a subject is called, and what it was made with."""
    return LayerInfo(subject.name, dict(subject.made_with))


def report(
    run: Run,
    show: Show,
    *,
    environment: Environment,
    layer: LayerInfo,
    proof: Proof | None = None,
    kinds: Sequence[tuple[str, ...]] = (),
) -> Trace:
    """Return a run as plain data; `proof` is given where there is none to read off it."""
    axes = own_axes(run)
    modules = [attention.module for attention, _ in run.attentions]
    # What is recorded as one buffer has no axes to follow, but in kernels that are opened, whose rows are padded.
    missed = not run.attentions or any(not kernel.opened for kernel in run.recording.kernels)
    nested = missed and any("nested" in op.base_name for op in run.recording.ops)
    return Trace(
        environment=environment,
        layer=layer,
        path=path_of(run),
        attentions=tuple(
            replace(
                _attention(run, attention, names, axes.stages[place], show),
                kind=kinds[place] if place < len(kinds) else (),
                call=modules[: place + 1].count(attention.module) if modules.count(attention.module) > 1 else None,
            )
            for place, (attention, names) in enumerate(run.attentions)
        ),
        returns=tuple(_returns(run, axes, show)),
        proof=proof_of(run) if proof is None else proof,
        notes=(*((_NESTED,) if nested else ()), *run.recording.notes),
        ops=tuple(_op_lines(run, axes)) if show.ops else None,
    )


def _masked_of(run: Run, attention: Attention) -> Tensor | None:
    """Return where a mask has put -inf: where the scores are not -inf, or where what is added to them is."""
    values, masked = run.recording.values, attention.stages.get("masked_scores")
    if masked is None or masked.id not in values:
        return None
    low: Tensor = values[masked.id] == -torch.inf
    if "scores" not in attention.stages:
        added: Tensor = values[attention.masks[0].inputs[0].id] == -torch.inf
        return low & added
    scores = values[attention.stages["scores"].id]
    return low & (scores != -torch.inf).view(low.shape) if scores.numel() == low.numel() else low


def _attention(
    run: Run, attention: Attention, names: AxisNames, axes: Mapping[str, str], show: Show
) -> AttentionReport:
    facts = StageFacts(run.graph, attention, dict(axes))
    masked = _masked_of(run, attention) if show.stats else None
    stages = [
        Stage(
            name=name,
            shape=tensor.shape,
            axes=axes[name],
            formula=facts.formula(name),
            _brief=facts.formula(name, brief=True),
            dtype=tensor.dtype,
            nbytes=tensor.nbytes,
            flops=facts.flops(name),
            memory=facts.memory(name),
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
        notes=_notes(run.graph, attention, names, facts),
    )


def _content(run: Run, show: Show, tensor: TensorRef, masked: Tensor | None = None) -> dict[str, Any]:
    value = run.recording.values.get(tensor.id)
    stats = stats_of(value, masked) if show.stats and value is not None else None
    return {"stats": stats, "values": values_of(value, show) if show.values and value is not None else None}


def _notes(graph: Graph, attention: Attention, names: AxisNames, facts: StageFacts) -> tuple[str, ...]:
    beside = " … is made of all scores of the same query." if weighs_by_others(graph, attention) else ""
    parts = facts.has_other_keys()
    number = len(attention.branches)
    mixed = ["scores before the softmax"] if attention.mixed_scores else []
    mixed += ["weights after it"] if attention.mixed_weights else []
    sentences = {
        without_dot(attention): True,
        f"The weights are made of the scores without a softmax.{beside}": attention.weighing,
        "The mask is added inside the product (baddbmm): the scores without it are never made.": (
            attention.masks and "scores" not in attention.stages
        ),
        "The heads are split by a view without a transpose, which mixes positions: a head has features of a few "
        "positions, and not its own features of every position. View to (…, heads, head_dim), then transpose.": (
            names.mixes_positions
        ),
        "The features of a head attend to one another: the scores sum over the positions, and the softmax is over "
        "the features of the keys.": names.over_features,
        "The softmax is over the queries, not over the keys: the weights of a key add up to 1, those of a query "
        "need not.": attention.over_queries,
        "The weights are never formed: exponentials of the scores meet the values, and their sum divides that.": (
            attention.divided is not None
        ),
        "Scores of other keys stand beside these, by a product of their own: the softmax is over both, and what is "
        "shown is a part of the attention.": parts,
        "Sinks stand beside the scores: they take a part of the weight and have no value.": (
            attention.sinks is not None and not parts
        ),
        f"The weights of {names.maps} maps become those of one head before they meet the values.": names.maps > 1,
        f"The heads are a loop: stages of a single head are those of the first of {number}, and so are their bytes "
        "and FLOPs.": attention.branches,
        f"A matrix mixes the heads' {' and their '.join(mixed)} (talking heads).": mixed,
        "Weights are shown as softmax gives them, before dropout.": facts.drops(),
    }
    return tuple(sentence for sentence, holds in sentences.items() if sentence and holds)


def _returns(run: Run, axes: NamedAxes, show: Show) -> Iterator[Returned]:
    """Yield what the module returned: its output, the weights where it gives them, anything else by its place."""
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
    """Return the arguments that are no tensors, as Python would write them."""

    def holds_tensor(value: Any) -> bool:
        return isinstance(value, TensorRef) or (isinstance(value, tuple) and any(map(holds_tensor, value)))

    named = [("", value) for value in op.args] + [(f"{name}=", value) for name, value in op.kwargs.items()]
    shown = (
        (name, list(value) if isinstance(value, tuple) else value) for name, value in named if not holds_tensor(value)
    )
    return ", ".join(f"{name}{value}" for name, value in shown)


def fate_of(weights: Tensor | None, rows: Rows) -> str:
    """Return what the weights, `batch heads query key`, of queries without keys are: `NaN`, `zero`, `uniform`.

    `numbers` where they are anything else, or not known: one head without keys is enough for a query to be one.
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


def masked_sentence(rows: Rows, fate: str) -> str:
    """Return which queries see no key, and what becomes of them."""
    have = "1 query has" if len(rows) == 1 else f"{len(rows):,} queries have"
    batch, query = rows[0]
    return f"{have} no key left to look at (the first: query {query} of batch row {batch}): {fate}."
