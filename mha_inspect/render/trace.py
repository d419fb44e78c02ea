"""The page of `trace`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from .. import text
from ..reports.trace import (
    PIECES_OF_TOKENS,
    WITHIN_TOKENS,
    AttentionReport,
    DecodeProof,
    Failure,
    OpLine,
    OpTensor,
    Path,
    Proof,
    Stage,
    Step,
    Trace,
)
from .check import findings_sections
from .page import Block, Cell, Column, Page, Paragraph, Section, Table, Verbatim, facts, section, table
from .parts import AXES, SHAPE, contents, dtypes, folded, grouped, layer_page, notes, ranks_section, shape_cell

LEGENDS = {
    "*": "inside a fused kernel, opened",
    "°": "too large to compute: only its shape is known",
}
"""The meaning of the signs after the name of a stage."""
_NOT_LOOKED_AT = "Not looked at: what other inputs do. mha-inspect check changes the input and looks further."
MEMORY = "view: shares memory with the stage before; copy: moved to new memory, as PyTorch's code does there"

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
    if trace.unjudged is None and not trace.findings and trace.failure is None and trace.attentions:
        yield section("", Paragraph(_NOT_LOOKED_AT, "muted"), more="")
    if trace.steps is not None:
        below = "" if trace.decode is None else "the last is shown below"
        yield section(text.plural(len(trace.steps), "call"), _steps(trace.steps), detail=below)
    if len(trace.attentions) > 1:
        more = "" if trace.chosen else None
        yield section(f"{len(trace.attentions)} attentions", _summary(trace.attentions), more=more)
    yield from _in_full(trace)
    run = _path(trace.path) if trace.failure is None or trace.attentions else ()
    returned = [("returns", _returned(trace))] if trace.returns else []
    lines = [*returned, *run, *_collectives(trace), *(("note", note) for note in trace.notes)]
    yield section("", *([facts(*lines)] if lines else []), *contents(trace.returns))
    yield ranks_section(trace.ranks)
    if trace.plan_code is not None:
        yield section("plan", Verbatim(tuple(trace.plan_code.splitlines())))
    if trace.ops is not None:
        yield section("operations", _ops(trace.ops), detail=f"{len(trace.ops):,}")
    if trace.failure is None:
        yield section("", *([_decode(trace.decode)] if trace.decode else []), _closing(trace))
    else:
        yield from _failure(trace.failure, trace.environment.dtype, with_ops=trace.ops is not None)


def _collectives(trace: Trace) -> Iterator[tuple[str, str]]:
    """Yield the exchanges with other ranks, each kind with its number, its bytes and the stage that it makes."""
    said = [
        f"{len(kind)} {kind[0].name}{f' of {kind[0].stage}' if kind[0].stage else ''}, "
        f"{text.byte_size(sum(collective.nbytes for collective in kind))}"
        for kind in grouped(trace.collectives or (), lambda collective: (collective.name, collective.stage))
    ]
    if said:
        yield "between ranks", "; ".join(said)


def _returned(trace: Trace) -> str:
    """Return the returned tensors in a line; equal ones are one, and axes that a stage shows are not repeated."""
    stages = {(stage.name, stage.shape, stage.axes) for attention in trace.attentions for stage in attention.stages}
    tensors = folded(trace.returns, "name", apart=lambda tensor: tensor.stats is not None or tensor.values is not None)
    said = []
    for tensor in tensors:
        axes = "" if (tensor.name, tensor.shape, tensor.axes) in stages else tensor.axes
        dtype = "" if tensor.dtype == trace.environment.dtype else tensor.dtype
        said.append(" ".join(filter(None, (tensor.name, text.shape(tensor.shape), axes, dtype))))
    return "; ".join(said)


MOST_SHOWN = 4
"""Most kinds of attention shown in full without --attention."""


def _in_full(trace: Trace) -> Iterator[Section]:
    """Yield attentions in full: the chosen ones, else the first of each kind."""
    groups = grouped(trace.chosen or range(1, len(trace.attentions) + 1), lambda number: _kind(trace, number))
    shown, rest = (groups, []) if trace.chosen else (groups[:MOST_SHOWN], groups[MOST_SHOWN:])
    for first, *others in shown:
        said = list(trace.attentions[first - 1].notes)
        if others:
            which = f"Attention {others[0]} has" if len(others) == 1 else f"Attentions {text.spans(others)} have"
            said.append(f"{which} the same shapes, axes and formulas.")
        several = len(trace.attentions) > 1
        title = f"attention {first}" if several else "attention"
        more = "--attention N shows every stage of attention N." if several and not trace.chosen else None
        yield _attention(trace.attentions[first - 1], title, trace.environment.dtype, said, more)
    layouts = (tuple(_layout(trace.attentions[first - 1])) for first, *_ in shown)
    yield section("", *(Paragraph(line, "muted") for line in next(filter(None, layouts), ())), more="")
    if rest:
        numbers = ", ".join(str(first) for first, *_ in rest)
        yield section("", Paragraph(f"{len(rest)} more kinds: --attention {numbers} shows them."), more="")


def _kind(trace: Trace, number: int) -> object:
    """Return a key that is equal for attentions that differ only in their place in the model."""
    attention = trace.attentions[number - 1]
    # Statistics and values are each attention's own.
    if trace.chosen or any(stage.stats is not None or stage.values is not None for stage in attention.stages):
        return number
    # The scale, which may be no number, is in the formulas.
    stages = tuple(replace(stage, op=None) for stage in attention.stages)
    return replace(attention, module="", call=None, scale=0.0, stages=stages)


def _layout(attention: AttentionReport) -> Iterator[str]:
    """Yield the explanations of merged axes and of a sequence-first layout."""
    sizes = {"heads": attention.num_heads, "head_dim": attention.head_dim}
    patterns = [(stage, re.findall(r"\([^)]*\)|\S+", stage.axes)) for stage in attention.stages]
    for shared in ("(batch heads)", "(heads head_dim)"):
        size = next((s.shape[n.index(shared)] for s, n in patterns if shared in n and len(n) == len(s.shape)), None)
        if size is not None:
            fast = shared.strip("()").split()[1]
            product = f"{size // sizes[fast]} × {sizes[fast]} = {size}"
            yield f"{shared} is one axis of size {product}; {fast} counts fastest."
            break
    order = {stage.name: re.findall(r"\b(?:query|key|batch)\b", stage.axes)[:2] for stage in attention.stages}
    turned = [stage for stage in attention.stages if order[stage.name] in (["query", "batch"], ["key", "batch"])]
    if turned and any(names[:1] == ["batch"] for _, names in patterns):
        first, last = turned[0], turned[-1]
        inside = first.op is not None and first.op.source.startswith("torch/")
        so = "torch works sequence-first inside" if inside else "sequence-first"
        yield (
            f"From {first.name} to {last.name}, positions come before the batch ({so}): {text.shape(first.shape)} is "
            f"{first.axes}."
        )


def _path(path: Path) -> Iterator[tuple[str, str]]:
    yield "kernel", path.plain
    if path.reason:
        yield "reason", path.reason
    if path.opened and any(kernel not in path._kernels for kernel in path.opened):
        yield "opened", ", ".join(path.opened)
    yield from (("not opened", kernel) for kernel in path.not_opened)


def _summary(attentions: tuple[AttentionReport, ...]) -> Table:

    def scores(attention: AttentionReport) -> Stage | None:
        stages = {stage.name: stage for stage in attention.stages}
        return stages.get("scores") or stages.get("weights")

    def heads(attention: AttentionReport) -> object:
        several = attention.num_kv_heads != attention.num_heads
        return f"{attention.num_heads} over {attention.num_kv_heads}" if several else attention.num_heads

    columns = [
        Column("#", lambda row: row[0], "right", "muted"),
        Column("module", lambda row: _place(row[1]) or "(the layer itself)", tone="strong"),
        Column("kind", lambda row: kind_of(row[1]), drop=3, optional=True),
        Column("num_heads", lambda row: heads(row[1]), "right"),
        Column("head_dim", lambda row: row[1].head_dim, "right", drop=1),
        Column("scores", lambda row: SHAPE.of(stage) if (stage := scores(row[1])) else "", tone="shape"),
        Column("axes", lambda row: stage.axes if (stage := scores(row[1])) else "", tone="axes", drop=4),
        Column("scale", lambda row: text.scale(row[1].scale, row[1].head_dim), drop=2),
        Column("notes", lambda row: " ".join(row[1].notes), wrap=24, into="module", optional=True),
    ]
    return table(enumerate(attentions, 1), columns)


def kind_of(attention: AttentionReport) -> str:
    """Return the kind with the window after it: `self, causal, window 4`."""
    window = "" if attention.window is None else f"window {attention.window}"
    return ", ".join(filter(None, (*attention.kind, window)))


def _place(attention: AttentionReport) -> str:
    call = "" if attention.call is None else f"call {attention.call}"
    return ", ".join(filter(None, (attention.module, call)))


def _attention(
    attention: AttentionReport, title: str, dtype: str, said: Iterable[str], more: str | None = None
) -> Section:
    """Return the sizes, the table of stages, requested contents, and the notes `said`."""
    kind = kind_of(attention)
    sizes = [kind] if kind else []
    sizes.append(f"num_heads {attention.num_heads}")
    if attention.num_kv_heads != attention.num_heads:
        sizes.append(f"num_kv_heads {attention.num_kv_heads}")
    sizes += [f"head_dim {attention.head_dim}", f"scale {text.scale(attention.scale, attention.head_dim)}"]
    place = _place(attention)
    return section(
        f"{title} in {place}" if place else title,
        _stages(attention.stages, dtype),
        *contents(attention.stages),
        *notes(said),
        detail=", ".join(sizes),
        more=more,
    )


def _stages(stages: tuple[Stage, ...], dtype: str) -> Table:
    def mark(stage: Stage) -> str:
        return "*" * stage.opened + "°" * stage.shape_only

    columns = [
        Column("stage", lambda stage: Cell(stage.name, mark=mark(stage)), tone="strong"),
        replace(SHAPE, of=lambda stage: shape_cell(stage.shape, stage.axes, stage.whole)),
        replace(AXES, wrap=28),
        Column("computed", lambda stage: Cell(stage.formula, brief=stage._brief), wrap=16, into="axes"),
        dtypes(dtype),
        Column("bytes", lambda stage: text.byte_size(stage.nbytes), "right", "muted", wide=True, drop=2),
        Column("FLOPs", lambda stage: text.flops(stage.flops), "right", "muted", wide=True, drop=3),
        Column("memory", _moved, tone="muted", wide=True, drop=1, optional=True, legend=MEMORY),
    ]
    marks = set("".join(map(mark, stages)))
    return table(stages, columns, legend="; ".join(f"{sign} {said}" for sign, said in LEGENDS.items() if sign in marks))


def _moved(tensor: Stage | OpLine) -> str:
    """Return `view` or `copy`; empty for inputs and computed tensors."""
    return tensor.memory if tensor.memory in ("view", "copy") else ""


def _ops(ops: tuple[OpLine, ...]) -> Table:
    def written(operands: tuple[OpTensor, ...]) -> str:
        return ", ".join(f"%{operand.id} {text.shape(operand.shape)}" for operand in operands)

    def axes(op: OpLine) -> str:
        return ", ".join(operand.axes for operand in op.outputs if operand.axes)

    columns = [
        Column("#", lambda op: op.index, "right", "muted"),
        Column("operation", lambda op: op.name, tone="strong"),
        Column("inputs", lambda op: written(op.inputs), wrap=18),
        Column("outputs", lambda op: written(op.outputs), wrap=18, into="inputs"),
        Column("axes", axes, tone="axes", drop=3, wrap=18, optional=True),
        Column("settings", lambda op: op.settings, tone="muted", drop=4, wrap=14, optional=True),
        Column("memory", _moved, tone="muted", drop=1, optional=True),
        Column("stage", lambda op: op.stage, into="operation", optional=True),
        Column("source", lambda op: op.source, tone="muted", into="operation"),
        Column("module", lambda op: op.module, tone="muted", drop=2, optional=True),
    ]
    return table(ops, columns)


def _steps(steps: tuple[Step, ...]) -> Table:
    columns = [
        Column("step", lambda row: row[0] or "prompt", tone="strong"),
        Column("queries", lambda row: row[1].queries, "right"),
        Column("past", lambda row: row[1].past, "right"),
        Column("new", lambda row: row[1].new, "right"),
        Column("positions", lambda row: _positions(row[1]), "right", optional=True),
        Column("scores", lambda row: text.shape(row[1].scores), tone="shape"),
        Column("cache", lambda row: text.byte_size(row[1].cache_bytes), "right", drop=1),
        Column("FLOPs", lambda row: text.flops(row[1].flops), "right", "muted", drop=2),
    ]
    return table(enumerate(steps), columns)


def _positions(step: Step) -> str:
    """Return the positions that a call is rotated by, `0–5`; empty if they are unknown."""
    if step.query_offset is None:
        return ""
    return text.spans(range(step.query_offset, step.query_offset + step.queries))


def _decode(proof: DecodeProof) -> Paragraph:
    """Return the sentence on whether every call equals one forward over all tokens."""
    one = f"one forward over all {proof.tokens} tokens"
    if proof.verdict is None or proof.max_abs_difference is None:
        return Paragraph(f"The steps were not compared with {one}: {proof.note}.", "muted")
    verdict = {"same": "every call equals", "differs": "a call DIFFERS from"}.get(
        proof.verdict, "a call may differ from"
    )
    sentence = f"The last position of {verdict} that of {one}{_measured(proof)}"
    if proof.reason:
        sentence = " ".join(filter(None, (f"{sentence}.", proof.reason, proof.fix)))
    return Paragraph(sentence, "good" if proof.verdict == "same" else "bad" if proof.verdict == "differs" else "warn")


def _measured(proof: Proof | DecodeProof) -> str:
    numbers = {"difference": proof.max_abs_difference, "rounding error": proof.noise_floor}
    said = ", ".join(f"{name} {text.small(number)}" for name, number in numbers.items() if number is not None)
    return f": {said}" if said else ""


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
    if proof.agrees is None:
        ours, theirs = ("ranks", "whole module") if of_ranks else ("opened stages", "kernel")
        return Paragraph(f"The {ours} were not compared with the {theirs}{note}.", "muted")
    if proof.max_abs_difference == 0 and proof.noise_floor is None:
        return Paragraph(proof.note, "good")
    verdict = f"{'agree with' if proof.agrees else 'DIFFER from'} the {'whole module' if of_ranks else 'kernel'}"
    shown = "The outputs of all ranks" if of_ranks else "Opened stages"
    return Paragraph(f"{shown} {verdict}{_measured(proof)}{note}", "good" if proof.agrees else "bad")


# -- a forward that failed: what was completed, then the failure, then why --------------------------------------------


def _failure(failure: Failure, dtype: str, *, with_ops: bool) -> Iterator[Section]:
    """Yield the completed stages, the last operations if asked for, the failure, and the cause if one was found."""
    if failure.completed:
        columns = [
            Column("stage", lambda stage: stage.name, tone="strong", optional=True),
            Column("called", lambda stage: stage.variable, optional=True),
            SHAPE,
            AXES,
            dtypes(dtype),
            Column("operation", lambda stage: stage.op, tone="muted", drop=2, optional=True),
            Column("source", lambda stage: stage.source, tone="muted", drop=1, optional=True),
        ]
        yield section("completed before the failure", table(failure.completed, columns))
    if with_ops and failure.last_ops:
        columns = [
            Column("#", lambda op: op.index, "right", "muted"),
            Column("operation", lambda op: op.name, tone="strong"),
            Column("inputs", lambda op: ", ".join(map(text.shape, op.inputs)), wrap=18),
            Column("outputs", lambda op: ", ".join(map(text.shape, op.outputs)), wrap=18, into="inputs"),
            Column("source", lambda op: op.source, tone="muted", into="operation"),
            Column("module", lambda op: op.module, tone="muted", drop=1, optional=True),
        ]
        shown = len(failure.last_ops)
        detail = "" if shown == failure.num_ops else f"the last {shown} of {failure.num_ops:,}"
        yield section("operations", table(failure.last_ops, columns), detail=detail, more="")
    yield section("failed", *_failed(failure, dtype), detail=f"{failure.error} at {failure.source}")
    if failure.cause is not None:
        # Its sentence and its fix are the verdict.
        yield section("cause", detail=failure.cause.name.replace("_", " "))


def _failed(failure: Failure, dtype: str) -> Iterator[Block]:
    items = [("line", failure.line), ("call", failure.call), ("operation", failure.op), ("module", failure.module)]
    items += [("message", line) for line in failure.message.splitlines()]
    yield facts(*((label, text) for label, text in items if text))
    if failure.operands:

        def odd(value: str, usual: str) -> Cell:
            return Cell(value, "" if value == usual else "warn")

        columns = [
            Column("given", lambda operand: operand.name, tone="strong"),
            Column("as", lambda operand: "" if operand.role == operand.name else operand.role, optional=True),
            SHAPE,
            AXES,
            Column("dtype", lambda operand: odd(operand.dtype, dtype)),
            Column("device", lambda operand: odd(operand.device, failure.operands[0].device)),
        ]
        yield table(failure.operands, columns)
    if failure.clash:
        yield Paragraph(failure.clash, "warn")
    if failure.cause is None:
        yield Paragraph("No cause found; the values involved are above.", "muted")
    if failure.note:
        yield facts(("note", failure.note))
