"""The page of `trace`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from .. import text
from ..reports.trace import AttentionReport, OpLine, OpTensor, Path, Proof, Returned, Stage, Trace
from .failure import failure_sections
from .page import Block, Cell, Column, Facts, Page, Paragraph, Section, Table, facts, section, table
from .parts import AXES, DTYPE, SHAPE, changes_only, contents, grouped, layer_page, notes, shape_cell, statistics

LEGENDS = {
    "*": "inside a kernel of torch, opened where it ran",
    "°": "its shape alone is known: it was never made, for it has too many numbers",
}
"""What the signs behind the name of a stage mean."""


def page(trace: Trace) -> Page:
    """Return the page: the stages, what is returned, how PyTorch runs it, and the proof, which is the last line.

    Of a forward that failed: what was completed, and the failure with its cause, which is the last line.
    """
    return layer_page(trace.environment, trace.layer, _sections(trace))


def _sections(trace: Trace) -> Iterator[Section]:
    if len(trace.attentions) > 1:
        yield section(f"{len(trace.attentions)} attentions", _summary(trace.attentions))
    yield from _in_full(trace)
    if not trace.attentions and trace.failure is None:
        none = "No attention was found: no softmax lies between two matrix products of activations."
        yield section("", Paragraph(none, "warn"))
    if trace.returns:
        yield section("returned by the module", *_returns(trace.returns, trace.environment.dtype))
    if trace.failure is None or trace.attentions:
        yield section("kernels", _path(trace.path))
    if trace.ops is not None:
        yield section("operations", _ops(trace.ops), detail=text.count(len(trace.ops)))
    yield section("", *notes(trace.notes))
    if trace.failure is None:
        yield section("", _proof(trace.proof))
    else:
        yield from failure_sections(trace.failure, trace.environment.dtype)


MOST_SHOWN = 4
"""Attentions that are shown in full where nobody has chosen; the rest are named, or counted."""


def _in_full(trace: Trace) -> Iterator[Section]:
    """Yield the attentions in full: those that were chosen, or else each kind once, with those that are alike."""
    groups = grouped(trace.chosen or range(1, len(trace.attentions) + 1), lambda number: _kind(trace, number))
    shown, rest = (groups, []) if trace.chosen else (groups[:MOST_SHOWN], groups[MOST_SHOWN:])
    for first, *others in shown:
        said = list(trace.attentions[first - 1].notes)
        if others:
            those = "Attention {} is" if len(others) == 1 else "Attentions {} are"
            said.append(f"{those.format(text.spans(others))} alike: same shapes, axes and formulas.")
        title = f"attention {first}" if len(trace.attentions) > 1 else "attention"
        yield _attention(trace.attentions[first - 1], title, trace.environment.dtype, said)
    layouts = (tuple(_layout(trace.attentions[first - 1])) for first, *_ in shown)
    yield section("", *(Paragraph(line, "muted") for line in next(filter(None, layouts), ())))
    if rest:
        numbers = ", ".join(str(first) for first, *_ in rest)
        more = f"{len(rest)} more that differ: see them with --attention N, N one of {numbers}."
        yield section("", Paragraph(more))


def _kind(trace: Trace, number: int) -> object:
    """Return what attentions have in common that are shown as one: all but where they stand."""
    attention = trace.attentions[number - 1]
    # Statistics and values are each attention's own.
    if trace.chosen or any(stage.stats is not None or stage.values is not None for stage in attention.stages):
        return number
    # The scale, which may be no number, is in the formulas.
    stages = tuple(replace(stage, op=None) for stage in attention.stages)
    return replace(attention, module="", call=None, scale=0.0, stages=stages)


_NAMES = re.compile(r"\([^)]*\)|\S+")


def _layout(attention: AttentionReport) -> Iterator[str]:
    """Yield what there is to say, once a page, of axes that share a dimension, and of a layout that turns."""
    sizes = {"heads": attention.num_heads, "head_dim": attention.head_dim}
    patterns = [(stage, _NAMES.findall(stage.axes)) for stage in attention.stages]
    for shared in ("(batch heads)", "(heads head_dim)"):
        size = next((s.shape[n.index(shared)] for s, n in patterns if shared in n and len(n) == len(s.shape)), None)
        if size is not None:
            fast = shared.strip("()").split()[1]
            product = f"{size // sizes[fast]} × {sizes[fast]} = {size}"
            yield f"{shared} is one axis with both in it, {fast} counting fastest: {product}."
            break
    turned = [stage for stage, names in patterns if _is_sequence_first(names)]
    if turned and any(names[:1] == ["batch"] for _, names in patterns):
        first, last = turned[0], turned[-1]
        inside = first.op is not None and first.op.source.startswith("torch/")
        so = "torch works sequence-first inside" if inside else "sequence-first"
        yield (
            f"From {first.name} to {last.name} positions stand before the batch ({so}): {text.shape(first.shape)} is "
            f"{first.axes}."
        )


def _is_sequence_first(names: Sequence[str]) -> bool:
    """Return whether positions stand before the batch."""
    order = [name for name in re.findall(r"\w+", " ".join(names)) if name in ("query", "key", "batch")]
    return order[:2] in (["query", "batch"], ["key", "batch"])


def _path(path: Path) -> Facts:
    items = [("PyTorch runs", path.plain), ("reason", path.reason or ""), ("opened", ", ".join(path.opened))]
    items += [("not opened", kernel) for kernel in path.not_opened]
    return facts(*(item for item in items if item[1]))


def _summary(attentions: tuple[AttentionReport, ...]) -> Table:
    """Return a table with one row an attention."""
    columns = [
        Column("#", "right", "muted"),
        Column("module", tone="strong"),
        Column("kind", drop=4, optional=True),
        Column("num_heads", "right"),
        Column("head_dim", "right", drop=1),
        Column("scores", tone="shape"),
        Column("axes", tone="axes", drop=3),
        Column("scale", drop=2),
        Column("notes", wrap=24, into="module", optional=True),
    ]
    rows = []
    for number, a in enumerate(attentions, 1):
        heads = f"{a.num_heads} over {a.num_kv_heads}" if a.num_kv_heads != a.num_heads else a.num_heads
        stages = {stage.name: stage for stage in a.stages}
        scores = stages.get("scores") or stages.get("weights")
        shape, axes = (shape_cell(scores.shape, scores.axes), scores.axes) if scores else ("", "")
        place, scale = _place(a) or "(the layer itself)", text.scale(a.scale, a.head_dim)
        rows.append((number, place, ", ".join(a.kind), heads, a.head_dim, shape, axes, scale, " ".join(a.notes)))
    return table(columns, rows)


def _place(attention: AttentionReport) -> str:
    """Return the module, and which of its attentions where it computes several."""
    call = "" if attention.call is None else f"call {attention.call}"
    return ", ".join(filter(None, (attention.module, call)))


def _attention(attention: AttentionReport, title: str, dtype: str, said: Iterable[str]) -> Section:
    """Return the sizes, the table of stages, what was asked for beyond it, and what is `said` of it."""
    sizes = [", ".join(attention.kind)] if attention.kind else []
    sizes.append(f"num_heads {attention.num_heads}")
    if attention.num_kv_heads != attention.num_heads:
        sizes.append(f"num_kv_heads {attention.num_kv_heads}")
    sizes += [f"head_dim {attention.head_dim}", f"scale {text.scale(attention.scale, attention.head_dim)}"]
    place = _place(attention)
    return section(
        f"{title} in {place}" if place else title,
        _stages(attention.stages, dtype),
        *statistics((stage.name, stage.stats) for stage in attention.stages),
        *contents((stage.name, stage.shape, stage.axes, stage.values) for stage in attention.stages),
        *notes(said),
        detail=", ".join(sizes),
    )


def _stages(stages: tuple[Stage, ...], dtype: str) -> Table:
    columns = [
        Column("stage", tone="strong"),
        SHAPE,
        AXES,
        Column("computed", wrap=26, into="axes"),
        DTYPE,
        Column("bytes", "right", "muted", drop=2),
        Column("FLOPs", "right", "muted", drop=3),
        Column("memory", tone="muted", into="axes", optional=True),
    ]
    rows, marks = [], ""
    for stage, changed in zip(stages, changes_only((stage.dtype for stage in stages), dtype), strict=True):
        mark = "*" * stage.opened + "°" * stage.shape_only
        marks += mark
        cells = Cell(stage.name, mark=mark), shape_cell(stage.shape, stage.axes), stage.axes, stage.formula, changed
        rows.append((*cells, text.byte_size(stage.nbytes), text.flops(stage.flops), _moved(stage)))
    return table(columns, rows, legend="; ".join(f"{sign} {said}" for sign, said in LEGENDS.items() if sign in marks))


def _moved(stage: Stage | OpLine) -> str:
    """Return how a tensor came by its memory, where that is worth a word."""
    return stage.memory if stage.memory in ("view", "copy") else ""


def _returns(returned: tuple[Returned, ...], dtype: str) -> Iterator[Block]:
    dtypes = changes_only((tensor.dtype for tensor in returned), dtype)
    rows = [(t.name, shape_cell(t.shape, t.axes), t.axes, next(dtypes)) for t in returned]
    yield table([Column("name", tone="strong"), SHAPE, AXES, DTYPE], rows)
    yield from statistics((tensor.name, tensor.stats) for tensor in returned)
    yield from contents((tensor.name, tensor.shape, tensor.axes, tensor.values) for tensor in returned)


def _ops(ops: tuple[OpLine, ...]) -> Table:
    def written(operands: tuple[OpTensor, ...]) -> str:
        return ", ".join(f"%{operand.id} {text.shape(operand.shape)}" for operand in operands)

    columns = [
        Column("#", "right", "muted"),
        Column("operation", tone="strong"),
        Column("inputs", wrap=18),
        Column("outputs", wrap=18, into="inputs"),
        Column("axes", tone="axes", drop=3, wrap=18, optional=True),
        Column("settings", tone="muted", drop=4, wrap=14, optional=True),
        Column("memory", tone="muted", drop=1, optional=True),
        Column("stage", into="operation", optional=True),
        Column("source", tone="muted", into="operation"),
        Column("module", tone="muted", drop=2, optional=True),
    ]
    rows = []
    for op in ops:
        axes = ", ".join(operand.axes for operand in op.outputs if operand.axes)
        tensors = written(op.inputs), written(op.outputs), axes
        rows.append((op.index, op.name, *tensors, op.settings, _moved(op), op.stage, op.source, op.module))
    return table(columns, rows)


def _proof(proof: Proof) -> Paragraph:
    """Return the sentence that says whether what was shown is what PyTorch computes."""
    note = f"; {proof.note}" if proof.note else ""
    if proof.agrees is None:
        return Paragraph(f"the stages were not compared with a kernel's own result{note}", "muted")
    if proof.max_abs_difference == 0 and proof.noise_floor is None:
        return Paragraph(proof.note, "good")
    measured = ""
    if proof.max_abs_difference is not None:
        measured += f": largest difference {text.small(proof.max_abs_difference)}"
    if proof.noise_floor is not None:
        measured += f"{',' if measured else ':'} noise floor {text.small(proof.noise_floor)} (measured against float64)"
    verdict = "agree" if proof.agrees else "DIFFER"
    said = f"the opened stages and the kernels' own results {verdict}{measured}{note}"
    return Paragraph(said, "good" if proof.agrees else "bad")
