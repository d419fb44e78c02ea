"""The page of `trace`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from .. import text
from ..reports.trace import Attention, MaskedRow, Memory, Operand, OpLine, Path, Proof, Returned, Stage, Trace
from .failure import failure_sections
from .page import Block, Cell, Column, Facts, Page, Paragraph, Section, Table, facts, section, table
from .parts import changes_only, contents, grouped, layer_page, notes, shape_cell, statistics

OPENED = "*"
"""Behind the name of a stage that the plain run hides."""
LEGEND = f"{OPENED} inside a kernel of torch, opened where it ran"
SHAPE_ONLY = "°"
SHAPE_LEGEND = f"{SHAPE_ONLY} its shape alone is known: it was never made, for it has too many numbers"


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
    if trace.masked_rows:
        yield section("fully masked rows", _masked(trace.masked_rows), detail="queries that may look at no key")
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
    several = len(trace.attentions) > 1
    groups = _alike(trace)
    shown = groups[:MOST_SHOWN] if trace.chosen is None else groups
    for numbers_of, attention in shown:
        title = f"attention {numbers_of[0]}" if several else "attention"
        those = "Attention {} is" if len(numbers_of) == 2 else "Attentions {} are"
        others = f"{those.format(text.spans(numbers_of[1:]))} alike: same shapes, axes and formulas."
        said = [*attention.notes, *([others] if len(numbers_of) > 1 else [])]
        yield _attention(attention, title, trace.environment.dtype, said)
    explained = next(filter(None, (tuple(_layout(attention)) for _, attention in shown)), ())
    yield section("", *(Paragraph(line, "muted") for line in explained))
    if trace.chosen is None and len(groups) > MOST_SHOWN:
        rest = ", ".join(str(numbers_of[0]) for numbers_of, _ in groups[MOST_SHOWN:])
        more = f"{len(groups) - MOST_SHOWN} more that differ: see them with --attention N, N one of {rest}."
        yield section("", Paragraph(more))


_NAMES = re.compile(r"\([^)]*\)|\S+")


def _layout(attention: Attention) -> Iterator[str]:
    """Yield what there is to say, once a page, of axes that share a dimension, and of a layout that turns."""
    sizes = {"heads": attention.num_heads, "head_dim": attention.head_dim}
    patterns = [(stage, _NAMES.findall(stage.axes)) for stage in attention.stages]
    for shared in ("(batch heads)", "(heads head_dim)"):
        found = next((s.shape[n.index(shared)] for s, n in patterns if shared in n and len(n) == len(s.shape)), None)
        if found is not None:
            fast = shared.strip("()").split()[1]
            product = f"{found // sizes[fast]} × {sizes[fast]} = {found}"
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


def _alike(trace: Trace) -> list[tuple[list[int], Attention]]:
    """Return attentions to show in full, each with the numbers of those that it stands for."""
    chosen = trace.chosen or range(1, len(trace.attentions) + 1)

    def kind(number: int) -> object:
        attention = trace.attentions[number - 1]
        # Statistics and values are each attention's own.
        content = any(stage.stats is not None or stage.values is not None for stage in attention.stages)
        if content or trace.chosen is not None:
            return number
        # All but where it stands; the scale, which may be no number, is in the formulas.
        stages = tuple(replace(stage, op=None) for stage in attention.stages)
        return replace(attention, module="", call=None, scale=0.0, stages=stages)

    return [(numbers_of, trace.attentions[numbers_of[0] - 1]) for numbers_of in grouped(chosen, kind)]


def _path(path: Path) -> Facts:
    items = [("PyTorch runs", path.plain), ("reason", path.reason or ""), ("opened", ", ".join(path.opened))]
    items += [("not opened", kernel) for kernel in path.not_opened]
    return facts(*(item for item in items if item[1]))


def _summary(attentions: tuple[Attention, ...]) -> Table:
    """Return a table with one row an attention."""
    stages = [{stage.name: stage for stage in one.stages} for one in attentions]
    scores = [own.get("scores") or own.get("weights") for own in stages]
    return table(
        [(n, *both) for n, both in enumerate(zip(attentions, scores, strict=True), 1)],
        (Column("#", "right", "muted"), lambda row: row[0]),
        (Column("module", tone="strong"), lambda row: _place(row[1]) or "(the layer itself)"),
        (Column("kind", drop=4, optional=True), lambda row: ", ".join(row[1].kind)),
        (Column("num_heads", "right"), lambda row: _heads(row[1])),
        (Column("head_dim", "right", drop=1), lambda row: row[1].head_dim),
        (Column("scores", tone="shape"), lambda row: shape_cell(row[2].shape, row[2].axes) if row[2] else ""),
        (Column("axes", tone="axes", drop=3), lambda row: row[2].axes if row[2] else ""),
        (Column("scale", drop=2), lambda row: text.scale(row[1].scale, row[1].head_dim)),
        (Column("notes", wrap=24, into="module", optional=True), lambda row: " ".join(row[1].notes)),
    )


def _place(attention: Attention) -> str:
    """Return the module, and which of its attentions where it computes several."""
    calls = [] if attention.call is None else [f"call {attention.call}"]
    return ", ".join([attention.module, *calls] if attention.module else calls)


def _heads(attention: Attention) -> str:
    shared = attention.num_kv_heads != attention.num_heads
    return f"{attention.num_heads} over {attention.num_kv_heads}" if shared else str(attention.num_heads)


def _attention(attention: Attention, title: str, dtype: str, said: Iterable[str]) -> Section:
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


def _mark(stage: Stage) -> str:
    return OPENED * stage.opened + SHAPE_ONLY * stage.shape_only


def _stages(stages: tuple[Stage, ...], dtype: str) -> Table:
    legends = {OPENED: LEGEND, SHAPE_ONLY: SHAPE_LEGEND}
    dtypes = changes_only((stage.dtype for stage in stages), dtype)
    return table(
        stages,
        (Column("stage", tone="strong"), lambda stage: Cell(stage.name, mark=_mark(stage))),
        (Column("shape", tone="shape"), lambda stage: shape_cell(stage.shape, stage.axes)),
        (Column("axes", tone="axes"), lambda stage: stage.axes),
        (Column("computed", wrap=26, into="axes"), lambda stage: stage.formula),
        (Column("dtype", optional=True), lambda _: next(dtypes)),
        (Column("bytes", "right", "muted", drop=2), lambda stage: text.byte_size(stage.nbytes)),
        (Column("FLOPs", "right", "muted", drop=3), lambda stage: text.flops(stage.flops)),
        (Column("memory", tone="muted", into="axes", optional=True), lambda stage: _moved(stage.memory)),
        legend="; ".join(text for sign, text in legends.items() if any(sign in _mark(stage) for stage in stages)),
    )


def _moved(memory: Memory) -> str:
    """Return how a tensor came by its memory, where that is worth a word."""
    return memory if memory in ("view", "copy") else ""


def _returns(returned: tuple[Returned, ...], dtype: str) -> tuple[Block, ...]:
    dtypes = changes_only((r.dtype for r in returned), dtype)
    return (
        table(
            returned,
            (Column("name", tone="strong"), lambda own: own.name),
            (Column("shape", tone="shape"), lambda own: shape_cell(own.shape, own.axes)),
            (Column("axes", tone="axes"), lambda own: own.axes),
            (Column("dtype", optional=True), lambda _: next(dtypes)),
        ),
        *statistics((r.name, r.stats) for r in returned),
        *contents((r.name, r.shape, r.axes, r.values) for r in returned),
    )


def _masked(rows: tuple[MaskedRow, ...]) -> Table:
    """Return a table in which rows that fare alike stand in one line."""

    def fate(name: str) -> Cell:
        return Cell("NaN" if name == "nan" else name, "bad" if name == "nan" else "")

    return table(
        grouped(rows, lambda row: replace(row, query=0)),
        (Column("batch", "right"), lambda own: own[0].batch),
        (Column("query", "right", wrap=8), lambda own: text.spans(row.query for row in own)),
        (Column("first seen in"), lambda own: own[0].stage or "no stage"),
        (Column("opened run"), lambda own: fate(own[0].opened)),
        (Column("plain run"), lambda own: fate(own[0].plain)),
    )


def _operands(operands: tuple[Operand, ...]) -> str:
    return ", ".join(f"%{operand.id} {text.shape(operand.shape)}" for operand in operands)


def _ops(ops: tuple[OpLine, ...]) -> Table:
    return table(
        ops,
        (Column("#", "right", "muted"), lambda op: op.index),
        (Column("operation", tone="strong"), lambda op: op.name),
        (Column("inputs", wrap=18), lambda op: _operands(op.inputs)),
        (Column("outputs", wrap=18, into="inputs"), lambda op: _operands(op.outputs)),
        (
            Column("axes", tone="axes", drop=3, wrap=18, optional=True),
            lambda op: ", ".join(operand.axes for operand in op.outputs if operand.axes),
        ),
        (Column("settings", tone="muted", drop=4, wrap=14, optional=True), lambda op: op.settings),
        (Column("memory", tone="muted", drop=1, optional=True), lambda op: _moved(op.memory)),
        (Column("stage", into="operation", optional=True), lambda op: op.stage),
        (Column("source", tone="muted", into="operation"), lambda op: op.source),
        (Column("module", tone="muted", drop=2, optional=True), lambda op: op.module),
    )


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
