"""The page of `trace`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .. import text
from ..reports.trace import (
    PIECES_OF_TOKENS,
    WITHIN_TOKENS,
    AttentionReport,
    Collective,
    DecodeProof,
    FailedOperand,
    Failure,
    OpLine,
    OpTensor,
    Path,
    Proof,
    ReachedOp,
    ReachedStage,
    Returned,
    Stage,
    Step,
    Trace,
)
from .check import findings_sections, patch_sections
from .page import Block, Cell, Column, Page, Paragraph, Section, Table, Tone, Verbatim, facts, section, table
from .parts import (
    AXES,
    SHAPE,
    alike,
    contents,
    dtypes,
    folded,
    grouped,
    layer_page,
    notes,
    ranks_section,
    shape_cell,
    times,
)

LEGENDS = {
    "*": "inside a fused kernel, whose steps were computed again",
    "°": "too large to compute: only its shape is known",
}
"""The meaning of the signs after the name of a stage."""
_CHECK_FINDS_MORE = (
    "One run cannot show every mistake. mha-inspect check changes the input to find more, and exits with 1 for CI."
)
MEMORY = "view: shares memory with the stage before; copy: PyTorch copies it to new memory"

_SPLIT_WRONGLY = {
    WITHIN_TOKENS: "no token attends to another. Transpose heads and positions after the view",
    PIECES_OF_TOKENS: "a view without a transpose splits the heads. View to (…, heads, head_dim), then transpose",
}
"""What attention runs over if the heads were split wrongly, and the consequence or the cause."""


def trace_page(trace: Trace) -> Page:
    """Return the page: what is wrong, the stages, the returned tensors, the kernel and its proof.

    For a forward that raised: the completed stages, the failure, and the cause.
    """
    return layer_page(trace.environment, trace.layer, _sections(trace))


def _sections(trace: Trace) -> Iterator[Section]:
    yield from findings_sections(trace.findings)
    if trace.failure is None:
        yield from patch_sections(trace.patch)
    ran = trace.failure is None and bool(trace.attentions)
    is_judged = ran and trace.unjudged is None
    if is_judged and not trace.findings:
        yield section("", Paragraph(_CHECK_FINDS_MORE, "muted"), more="")
    if trace.steps is not None:
        below = "" if trace.decode is None else "the last is shown below"
        yield section(text.plural(len(trace.steps), "call"), _steps(trace.steps), detail=below)
    if len(trace.attentions) > 1:
        more = "" if trace.chosen else None
        yield section(f"{len(trace.attentions)} attentions", _summary(trace), more=more)
    yield from _in_full(trace)
    lines = [*_run(trace)]
    blocks: list[Block] = []
    if lines:
        blocks.append(facts(*lines))
    yield section("", *blocks, *contents(trace.returns))
    yield ranks_section(trace.ranks)
    if trace.plan_code is not None:
        yield section("plan", Verbatim(tuple(trace.plan_code.splitlines())))
    if trace.ops is not None:
        yield section("operations", _ops(trace.ops), detail=f"{len(trace.ops):,}")
    if trace.failure is not None:
        yield from _failure(trace.failure, trace.environment.dtype, with_ops=trace.ops is not None)
        yield from patch_sections(trace.patch)
        return
    if trace.decode is not None:
        yield section("", _decode(trace.decode), _closing(trace))
    else:
        yield section("", _closing(trace))


def _run(trace: Trace) -> Iterator[tuple[str, str]]:
    """Yield the returned tensors, the kernel, what is sent between ranks, and the notes."""
    if trace.returns:
        yield "returns", _returned(trace)
    if trace.failure is None or trace.attentions:
        yield from _path(trace.path)
    if trace.collectives:
        yield "between ranks", _sent(trace.collectives)
    for note in trace.notes:
        yield "note", note


def _sent(collectives: Iterable[Collective]) -> str:
    """Return the exchanges with other ranks by kind and stage: `2 all_reduce of output, 4.0 KiB`."""
    kinds = []
    for kind in grouped(collectives, lambda collective: (collective.name, collective.stage)):
        first = kind[0]
        exchanges = f"{len(kind)} {first.name}"
        if first.stage:
            exchanges += f" of {first.stage}"
        nbytes = sum(collective.nbytes for collective in kind)
        kinds.append(f"{exchanges}, {text.byte_size(nbytes)}")
    return "; ".join(kinds)


def _returned(trace: Trace) -> str:
    """Return the returned tensors in a line; equal ones are one, and axes that a stage shows are not repeated."""
    stages: set[tuple[str, tuple[int, ...], str]] = set()
    for attention in trace.attentions:
        for stage in attention.stages:
            stages.add((stage.name, stage.shape, stage.axes))
    texts = []
    for tensor in folded(trace.returns, "name", apart=_has_contents):
        words = [tensor.name, text.shape(tensor.shape)]
        if tensor.mean_of_heads:
            words[-1] += f", the mean of {tensor.mean_of_heads} heads"
        elif tensor.axes and (tensor.name, tensor.shape, tensor.axes) not in stages:
            words.append(tensor.axes)
        if tensor.dtype != trace.environment.dtype:
            words.append(tensor.dtype)
        texts.append(" ".join(filter(None, words)))
    return "; ".join(texts)


def _has_contents(tensor: Stage | Returned) -> bool:
    """Return whether statistics or values of a tensor are shown, which are its alone."""
    return tensor.stats is not None or tensor.values is not None


MOST_SHOWN = 4
"""Most kinds of attention shown in full without --attention."""


def _in_full(trace: Trace) -> Iterator[Section]:
    """Yield attentions in full: the chosen ones, else the first of each kind."""
    numbers = trace.chosen or range(1, len(trace.attentions) + 1)
    groups = grouped(numbers, lambda number: _kind(trace, number))
    most = len(groups) if trace.chosen else MOST_SHOWN
    for group in groups[:most]:
        yield _first_of(trace, group)
    yield section("", *_layout_of_first(trace, groups[:most]), more="")
    rest = groups[most:]
    if rest:
        first_of_rest = ", ".join(str(group[0]) for group in rest)
        yield section("", Paragraph(f"{len(rest)} more kinds: --attention {first_of_rest} shows them."), more="")


def _first_of(trace: Trace, group: Sequence[int]) -> Section:
    """Return the first attention of a group in full, and the numbers of those like it."""
    first, *alike = group
    attention = trace.attentions[first - 1]
    sentences = list(attention.notes)
    if len(alike) == 1:
        sentences.append(f"Attention {alike[0]} has the same shapes, axes and formulas.")
    elif alike:
        sentences.append(f"Attentions {text.spans(alike)} have the same shapes, axes and formulas.")
    if len(trace.attentions) == 1:
        return _attention(trace, attention, "attention", sentences)
    more = None if trace.chosen else "--attention N shows every stage of attention N."
    return _attention(trace, attention, f"attention {first}", sentences, more)


def _layout_of_first(trace: Trace, groups: Iterable[Sequence[int]]) -> list[Paragraph]:
    """Return the explanations of the layout of the first shown attention that has any."""
    for first, *_ in groups:
        attention = trace.attentions[first - 1]
        lines = [Paragraph(line, "muted") for line in _layout(attention)]
        if lines:
            return lines
    return []


def _kind(trace: Trace, number: int) -> object:
    """Return a key that is equal for attentions that differ only in their place in the model."""
    attention = trace.attentions[number - 1]
    if trace.chosen or any(map(_has_contents, attention.stages)):
        return number
    # The scale, which may be no number, is in the formulas.
    stages = tuple(replace(stage, op=None) for stage in attention.stages)
    return replace(attention, module="", call=None, scale=0.0, stages=stages)


def _layout(attention: AttentionReport) -> Iterator[str]:
    """Yield the explanations of merged axes and of a sequence-first layout."""
    merged = _merged(attention)
    if merged is not None:
        yield merged
    axes = [_AXIS.findall(stage.axes) for stage in attention.stages]
    if any(names[:1] == ["batch"] for names in axes):
        yield from _sequence_first(attention.stages)


_AXIS = re.compile(r"\([^)]*\)|\S+")
"""An axis of a tensor, which may be several in one: `(batch heads)`."""


_ORDER = {
    "(batch heads)": "all heads of the first item, then those of the next",
    "(heads head_dim)": "all features of the first head, then those of the next",
}
"""The order of the elements of two axes in one."""


def _merged(attention: AttentionReport) -> str | None:
    """Return the explanation of the first axis that is two in one; None if there is none.

    `(heads head_dim) is one axis of size 8 × 64 = 512: all features of the first head, then those of the next.`
    """
    for merged, size_of_fast in (("(batch heads)", attention.num_heads), ("(heads head_dim)", attention.head_dim)):
        for stage in attention.stages:
            names = _AXIS.findall(stage.axes)
            if merged not in names or len(names) != len(stage.shape):
                continue
            size = stage.shape[names.index(merged)]
            product = f"{size // size_of_fast} × {size_of_fast} = {size}"
            return f"{merged} is one axis of size {product}: {_ORDER[merged]}."
    return None


def _sequence_first(stages: Iterable[Stage]) -> Iterator[str]:
    """Yield the explanation of stages whose positions come before the batch."""
    turned = []
    for stage in stages:
        order = re.findall(r"\b(?:query|key|batch)\b", stage.axes)[:2]
        if order in (["query", "batch"], ["key", "batch"]):
            turned.append(stage)
    if not turned:
        return
    first = turned[0]
    last = turned[-1]
    yield (
        f"From {first.name} to {last.name}, positions come before the batch (sequence-first): "
        f"{text.shape(first.shape)} is {first.axes}."
    )


def _path(path: Path) -> Iterator[tuple[str, str]]:
    yield "kernel", path.plain
    if path.reason:
        yield "reason", path.reason
    if not set(path.opened).issubset(path._kernels):
        yield "opened", ", ".join(path.opened)
    for kernel in path.not_opened:
        yield "not opened", kernel


@dataclass(frozen=True)
class _Numbered:
    """The attentions of one kind, which differ in their place alone, with their numbers in the run, from 1."""

    numbers: tuple[int, ...]
    places: tuple[str, ...]
    report: AttentionReport
    """The first of them."""

    @property
    def place(self) -> str:
        """The modules: `layers.0–11.attn ×12`."""
        return times(self.places) or "(the layer itself)"

    @property
    def scores(self) -> Stage | None:
        """The scores, or the weights if no stage has the scores."""
        stages = {stage.name: stage for stage in self.report.stages}
        return stages.get("scores") or stages.get("weights")

    @property
    def shape_of_scores(self) -> Cell:
        """The shape of the scores."""
        scores = self.scores
        return Cell("") if scores is None else shape_cell(scores.shape, scores.axes)

    @property
    def axes_of_scores(self) -> str:
        """The axes of the scores."""
        scores = self.scores
        return "" if scores is None else scores.axes

    @property
    def num_heads(self) -> str:
        """The number of heads, and of their key and value heads if it is another: `8 over 2`."""
        heads = self.report.num_heads
        kv_heads = self.report.num_kv_heads
        if kv_heads == heads:
            return str(heads)
        return f"{heads} over {kv_heads}"


def _summary(trace: Trace) -> Table:
    """Return a row for each attention; those of layers that are alike are one row."""
    columns = [
        Column("#", lambda row: text.spans(row.numbers), "right", "muted"),
        Column("module", lambda row: row.place, tone="strong"),
        Column("kind", lambda row: kind_of(row.report), drop=3, optional=True),
        Column("num_heads", lambda row: row.num_heads, "right"),
        Column("head_dim", lambda row: row.report.head_dim, "right", drop=1),
        Column("scores", lambda row: row.shape_of_scores, tone="shape"),
        Column("axes", lambda row: row.axes_of_scores, tone="axes", drop=4),
        Column("scale", lambda row: text.scale(row.report.scale, row.report.head_dim), drop=2),
        Column("notes", lambda row: " ".join(row.report.notes), wrap=24, into="module", optional=True),
    ]
    return table(_rows_of_summary(trace), columns)


def _rows_of_summary(trace: Trace) -> list[_Numbered]:
    """Return the rows: attentions of one kind, whose modules differ in their numbers alone, are one."""

    def key(number: int) -> object:
        return _kind(trace, number), alike(_place(trace.attentions[number - 1]))

    rows = []
    for numbers in grouped(range(1, len(trace.attentions) + 1), key):
        attentions = [trace.attentions[number - 1] for number in numbers]
        places = tuple(map(_place, attentions))
        rows.append(_Numbered(tuple(numbers), places, attentions[0]))
    return rows


def kind_of(attention: AttentionReport) -> str:
    """Return the kind with the window after it: `self, causal, window 4`."""
    words = list(attention.kind)
    if attention.window is not None:
        words.append(f"window {attention.window}")
    return ", ".join(words)


def _place(attention: AttentionReport) -> str:
    """Return the module, and which of its calls: `decoder.0.self_attn, call 2`."""
    words = [attention.module] if attention.module else []
    if attention.call is not None:
        words.append(f"call {attention.call}")
    return ", ".join(words)


def _attention(
    trace: Trace, attention: AttentionReport, title: str, sentences: Iterable[str], more: str | None = None
) -> Section:
    """Return the sizes, the table of stages, requested contents, and notes."""
    kind = kind_of(attention)
    sizes = [kind] if kind else []
    sizes.append(f"num_heads {attention.num_heads}")
    if attention.num_kv_heads != attention.num_heads:
        sizes.append(f"num_kv_heads {attention.num_kv_heads}")
    sizes.append(f"head_dim {attention.head_dim}")
    sizes.append(f"scale {text.scale(attention.scale, attention.head_dim)}")
    place = _place(attention)
    return section(
        f"{title} in {place}" if place else title,
        _stages(attention.stages, trace.environment.dtype, with_cost=trace._shows_cost),
        *contents(attention.stages),
        *notes(sentences),
        detail=", ".join(sizes),
        more=more,
    )


def _stages(stages: tuple[Stage, ...], dtype: str, *, with_cost: bool) -> Table:
    columns = [
        Column("stage", lambda stage: Cell(stage.name, mark=_mark(stage)), tone="strong"),
        replace(SHAPE, of=lambda stage: shape_cell(stage.shape, stage.axes, stage.whole)),
        replace(AXES, wrap=28),
        Column("computed", lambda stage: stage._brief or stage.formula, wrap=16, into="axes"),
        dtypes(dtype),
    ]
    if with_cost:
        columns += _COST
    marks = "".join(map(_mark, stages))
    legend = [f"{sign} {meaning}" for sign, meaning in LEGENDS.items() if sign in marks]
    return table(stages, columns, legend="; ".join(legend))


_COST = (
    Column("bytes", lambda stage: text.byte_size(stage.nbytes), "right", "muted", drop=2),
    Column("FLOPs", lambda stage: text.flops(stage.flops), "right", "muted", drop=3),
    Column("memory", lambda stage: _moved(stage), tone="muted", drop=1, optional=True, legend=MEMORY),
)
"""The columns of what stages take, behind --ops."""


def _mark(stage: Stage) -> str:
    """Return the signs after the name of a stage, which the legend explains."""
    mark = ""
    if stage.opened:
        mark += "*"
    if stage.shape_only:
        mark += "°"
    return mark


def _moved(tensor: Stage | OpLine) -> str:
    """Return `view` or `copy`; empty for inputs and computed tensors."""
    return tensor.memory if tensor.memory in ("view", "copy") else ""


def _operands_of(operands: Iterable[OpTensor]) -> str:
    """Return the numbers and shapes of tensors: `%3 [2, 10, 64], %4 [64]`."""
    texts = [f"%{operand.id} {text.shape(operand.shape)}" for operand in operands]
    return ", ".join(texts)


def _axes_of_outputs(op: OpLine) -> str:
    """Return the axes of the outputs that have names."""
    named = [operand.axes for operand in op.outputs if operand.axes]
    return ", ".join(named)


def _ops(ops: tuple[OpLine, ...]) -> Table:
    columns = [
        Column("#", lambda op: op.index, "right", "muted"),
        Column("operation", lambda op: op.name, tone="strong"),
        Column("inputs", lambda op: _operands_of(op.inputs), wrap=18),
        Column("outputs", lambda op: _operands_of(op.outputs), wrap=18, into="inputs"),
        Column("axes", _axes_of_outputs, tone="axes", drop=3, wrap=18, optional=True),
        Column("settings", lambda op: op.settings, tone="muted", drop=4, wrap=14, optional=True),
        Column("memory", _moved, tone="muted", drop=1, optional=True),
        Column("stage", lambda op: op.stage, into="operation", optional=True),
        Column("source", lambda op: op.source, tone="muted", into="operation"),
        Column("module", lambda op: op.module, tone="muted", drop=2, optional=True),
    ]
    return table(ops, columns)


@dataclass(frozen=True)
class _Call:
    """A call with the number of its step; the first is the prompt."""

    step: str
    numbers: Step


def _steps(steps: tuple[Step, ...]) -> Table:
    columns = [
        Column("step", lambda call: call.step, tone="strong"),
        Column("queries", lambda call: call.numbers.queries, "right"),
        Column("past", lambda call: call.numbers.past, "right"),
        Column("new", lambda call: call.numbers.new, "right"),
        Column("positions", lambda call: _positions(call.numbers), "right", optional=True),
        Column("scores", lambda call: text.shape(call.numbers.scores), tone="shape"),
        Column("cache", lambda call: text.byte_size(call.numbers.cache_bytes), "right", drop=1),
        Column("FLOPs", lambda call: text.flops(call.numbers.flops), "right", "muted", drop=2),
    ]
    calls = []
    for place, step in enumerate(steps):
        name = "prompt" if place == 0 else str(place)
        calls.append(_Call(name, step))
    return table(calls, columns)


def _positions(step: Step) -> str:
    """Return the positions that a call is rotated by, `0–5`; empty if they are unknown."""
    if step.query_offset is None:
        return ""
    first = step.query_offset
    return text.spans(range(first, first + step.queries))


def _decode(proof: DecodeProof) -> Paragraph:
    """Return the sentence on whether every call equals one forward over all tokens."""
    forward = f"one forward over all {proof.tokens} tokens"
    if proof.verdict is None or proof.max_abs_difference is None:
        return Paragraph(f"The steps were not compared with {forward}: {proof.note}.", "muted")
    relation, tone = _TONE_OF_DECODE.get(proof.verdict, ("a call may differ from", "warn"))
    sentence = f"The last position of {relation} that of {forward}{_measured(proof)}"
    if proof.reason:
        sentence = f"{sentence}. {proof.reason}"
        if proof.fix:
            sentence = f"{sentence} {proof.fix}"
    return Paragraph(sentence, tone)


_TONE_OF_DECODE: dict[str, tuple[str, Tone]] = {
    "same": ("every call equals", "good"),
    "differs": ("a call DIFFERS from", "bad"),
}
"""How the calls relate to one forward, and the tone in which it is said, by verdict."""


def _measured(proof: Proof | DecodeProof) -> str:
    """Return the numbers of a proof: `: difference 1.2e-07, rounding error 2.4e-07`; empty if it has none."""
    numbers = []
    if proof.max_abs_difference is not None:
        numbers.append(f"difference {text.small(proof.max_abs_difference)}")
    if proof.noise_floor is not None:
        numbers.append(f"rounding error {text.small(proof.noise_floor)}")
    return f": {', '.join(numbers)}" if numbers else ""


def _closing(trace: Trace) -> Paragraph:
    """Return the last line: the proof, and a warning if heads that were split wrongly attend to something else.

    Where the page has findings, the warning is one of them, and the proof is no good news.
    """
    proof = _proof(trace.proof)
    if trace.findings:
        return replace(proof, tone="muted") if proof.tone == "good" else proof
    for over, consequence in _SPLIT_WRONGLY.items():
        if any(over in attention.kind for attention in trace.attentions):
            return Paragraph(f"{proof.text} Attention runs {over}: {consequence}.", "warn")
    return proof


def _proof(proof: Proof) -> Paragraph:
    """Return the sentence on whether the shown stages, or the outputs of the ranks, are what PyTorch computes."""
    note = f"; {proof.note}" if proof.note else ""
    of_ranks = proof.of == "ranks"
    whole = "whole module" if of_ranks else "kernel"
    if proof.agrees is None:
        parts = "ranks" if of_ranks else "opened stages"
        return Paragraph(f"The {parts} were not compared with the {whole}{note}.", "muted")
    if proof.max_abs_difference == 0 and proof.noise_floor is None:
        return Paragraph(proof.note, "good")
    parts = "The outputs of all ranks" if of_ranks else "Opened stages"
    if proof.agrees:
        return Paragraph(f"{parts} agree with the {whole}{_measured(proof)}{note}", "good")
    return Paragraph(f"{parts} DIFFER from the {whole}{_measured(proof)}{note}", "bad")


# -- a forward that failed: what was completed, then the failure, then why --------------------------------------------


def _failure(failure: Failure, dtype: str, *, with_ops: bool) -> Iterator[Section]:
    """Yield the completed stages, the last operations if asked for, the failure, and the cause if one was found."""
    if failure.completed:
        yield section("completed before the failure", _completed(failure.completed, dtype))
    if with_ops and failure.last_ops:
        shown = len(failure.last_ops)
        detail = ""
        if shown < failure.num_ops:
            detail = f"the last {shown} of {failure.num_ops:,}"
        yield section("operations", _last_ops(failure.last_ops), detail=detail, more="")
    yield section("failed", *_failed(failure, dtype), detail=f"{failure.error} at {failure.source}")
    if failure.cause is not None:
        # Its sentence and its fix are the verdict.
        yield section("cause", detail=failure.cause.name.replace("_", " "))


def _completed(stages: Iterable[ReachedStage], dtype: str) -> Table:
    columns = [
        Column("stage", lambda stage: stage.name, tone="strong", optional=True),
        Column("called", lambda stage: stage.variable, optional=True),
        SHAPE,
        AXES,
        dtypes(dtype),
        Column("operation", lambda stage: stage.op, tone="muted", drop=2, optional=True),
        Column("source", lambda stage: stage.source, tone="muted", drop=1, optional=True),
    ]
    return table(stages, columns)


def _last_ops(ops: Iterable[ReachedOp]) -> Table:
    columns = [
        Column("#", lambda op: op.index, "right", "muted"),
        Column("operation", lambda op: op.name, tone="strong"),
        Column("inputs", lambda op: ", ".join(map(text.shape, op.inputs)), wrap=18),
        Column("outputs", lambda op: ", ".join(map(text.shape, op.outputs)), wrap=18, into="inputs"),
        Column("source", lambda op: op.source, tone="muted", into="operation"),
        Column("module", lambda op: op.module, tone="muted", drop=1, optional=True),
    ]
    return table(ops, columns)


def _failed(failure: Failure, dtype: str) -> Iterator[Block]:
    """Yield the call that failed with its message, its operands, and what is wrong with their shapes."""
    items = [
        ("line", failure.line),
        ("call", failure.call),
        ("operation", failure.op),
        ("module", failure.module),
    ]
    items += [("message", line) for line in failure.message.splitlines()]
    filled = [(label, words) for label, words in items if words]
    yield facts(*filled)
    if failure.operands:
        yield _operands(failure.operands, dtype)
    if failure.clash:
        yield Paragraph(failure.clash, "warn")
    if failure.cause is None:
        yield Paragraph("No cause found; the values involved are above.", "muted")
    if failure.note:
        yield facts(("note", failure.note))


def _operands(operands: Sequence[FailedOperand], dtype: str) -> Table:
    """Return the operands of the call; a dtype or a device that differs from the usual one stands out."""
    device = operands[0].device

    def marked(value: str, usual: str) -> Cell:
        return Cell(value) if value == usual else Cell(value, "warn")

    columns = [
        Column("given", lambda operand: operand.name, tone="strong"),
        Column("as", lambda operand: "" if operand.role == operand.name else operand.role, optional=True),
        SHAPE,
        AXES,
        Column("dtype", lambda operand: marked(operand.dtype, dtype)),
        Column("device", lambda operand: marked(operand.device, device)),
    ]
    return table(operands, columns)
