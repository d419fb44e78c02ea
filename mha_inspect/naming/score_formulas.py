"""Write the formulas of scores and weights: what is scaled, masked, bent, and by what."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose

from ..graph.attention import Attention
from ..graph.dataflow import Graph
from ..graph.products import Joint
from ..graph.scores import further_term
from ..record.ops import Op
from .named_run import NamedRun

_ADDED = {
    "add": "mask",
    "bias": "bias",
    "product": "another q · kᵀ",
    "rotary": "rotary(q) · rotary(k)ᵀ",
    "made": "…",
}
"""Steps that add to the scores, and what they add."""
_SIGNS = {"add": "+", "sub": "-", "mul": "·", "div": "/"}


def joint_text(graph: Graph, scored: Joint, *, key_first: bool) -> str:
    """Return the formula of scores without a dot product: `w · tanh(q_heads + k_heads)`."""
    sides = ("k_heads", "q_heads") if key_first else ("q_heads", "k_heads")
    joined, ends = {"add": (" + ", ""), "sub": (" - ", ""), "cat": (", ", "[]")}.get(
        scored.multiply.base_name.rstrip("_"), (" - ", "||")
    )
    text, whole = joined.join(sides).join(ends or ("", "")), bool(ends)
    for op in scored.between:
        name, inside = op.base_name.rstrip("_"), text if whole else f"({text})"
        if name in ("sum", "mean") or graph.is_projection(op):
            text = f"{ {'sum': 'Σ', 'mean': 'mean of'}.get(name, 'W ·') } {inside}"
        elif graph.bends(op):
            text, whole = f"{name}{inside if inside.startswith('(') else f'({inside})'}", True
        elif any(map(graph.is_weight, op.inputs)):
            text = f"W ∘ {inside}" if op.does("scales") else f"{inside} + b"
        elif further_term(graph, scored, op) is not None:
            text, whole = f"{text} + another term", False
    return text


def _is_by_a_number(op: Op) -> bool:
    return len(op.inputs) == 1 < len(op.args) and op.base_name.rstrip("_") in _SIGNS


def weighs_by_others(graph: Graph, attention: Attention) -> bool:
    """Return whether weights without a softmax also depend on other scores of the same query, e.g. on their sum."""
    steps = (op for op in attention.weighing if op not in attention.masks)
    steps = (op for op in steps if not (graph.is_scale(op) or graph.bends(op) or graph.moves(op)))
    return not all(map(_is_by_a_number, steps))


def weighed_text(graph: Graph, attention: Attention, scores: str) -> str:
    """Return the formula of weights without a softmax: `sigmoid(scores)`, `relu(scores) / …`."""
    steps: list[tuple[str, float | None]] = []
    for op in attention.weighing:
        name = "mask" if op in attention.masks else op.base_name.rstrip("_")
        if graph.is_scale(op):
            steps.append(("scale", graph.scale_of(op)))
        elif graph.bends(op) or name == "mask":
            steps.append((name, None))
        elif not graph.moves(op):
            beside = f"{op.args[1]:.4g}" if _is_by_a_number(op) else "…"
            steps.append((f"{_SIGNS.get(name, name)} {beside}", None))
    return masked_text(scores, steps)


def unlike_dot(run: NamedRun) -> tuple[str, ...]:
    """Return a sentence for each way in which the scores of a run are no dot products."""
    return tuple(dict.fromkeys(filter(None, (without_dot(attention) for attention, _ in run.attentions))))


def without_dot(attention: Attention) -> str:
    """Return a sentence about scores that are no dot products; empty for dot products."""
    scored = attention.score_product
    if not isinstance(scored, Joint):
        return ""
    return (
        f"The scores are additive, not dot products: {scored.meeting} of queries and keys, then a nonlinearity and a "
        "reduction. No scale of 1/√head_dim is expected."
    )


def masked_text(scores: str, steps: Sequence[tuple[str, float | None]]) -> str:
    """Return the formula from the scores to the softmax: `scores + mask`, `mask(scores)`, `30 · tanh(scores / 30)`.

    Args:
        scores: the formula to begin with.
        steps: as in `dataflow.scoring.Scoring.steps`. Several masks in a row are written once.
    """
    text, whole, last = scores, " " not in scores, ""
    for place, (kind, number) in enumerate(steps):
        inside = text if whole else f"({text})"
        if kind in _ADDED:
            text, whole = text if last == kind else f"{text} + {_ADDED[kind]}", False
        elif kind in ("fill", "mixed"):
            name = "mask" if kind == "fill" else "mix"
            text, whole = text if last == kind == "fill" else f"{name}({text})", True
        elif kind == "times":
            text, whole = f"{inside} · mask", False
        elif kind == "scale":
            beside = {last, steps[place + 1][0] if place + 1 < len(steps) else ""}
            bends = bool(number) and bool(beside - {"", "scale", "fill", "times", "mixed", *_ADDED})
            text, whole = _scaled(inside, number, as_a_root=not bends), False
        elif " " in kind:
            text, whole = f"{inside} {kind}", False
        else:
            text, whole = f"{kind}({text})", True
        last = kind
    return text


def _scaled(text: str, number: float | None, *, as_a_root: bool) -> str:
    """Return a product with a number; the argument of a function is divided by 30 rather than √900."""
    if number is None or as_a_root:
        return f"{text}{scale_text(number)}"
    return f"{number:g} · {text}" if abs(number) >= 1 or not number else f"{text} / {1 / number:g}"


def scale_text(scale: float | None) -> str:
    """Return a scale as it is written behind a product: ` / √64`, empty for 1, otherwise a factor."""
    if scale is None:
        return " · scale"
    if isclose(scale, 1, rel_tol=1e-6):
        return ""
    square = 1 / scale**2 if scale > 1e-9 else 0
    if square > 1 and isclose(square, round(square), rel_tol=1e-4):
        return f" / √{round(square)}"
    return f" · {scale:.4g}"
