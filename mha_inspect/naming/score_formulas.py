"""Write the formulas of scores and weights: what is scaled, masked, bent, and by what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isclose

from ..graph.attention import Attention
from ..graph.dataflow import Graph
from ..graph.products import Joint
from ..record.ops import Op
from .named_run import NamedRun

_ADDED = {
    "add": "mask",
    "bias": "bias",
    "product": "another q · kᵀ",
    "rotated both": "rotary(q) · rotary(k)ᵀ",
    "rotated query": "rotary(q) · another kᵀ",
    "rotated key": "another q · rotary(k)ᵀ",
    "made": "…",
}
"""Steps that add to the scores, and what they add."""
_SIGNS = {"add": "+", "sub": "-", "mul": "·", "div": "/"}


_JOINED = {"add": "{} + {}", "sub": "{} - {}", "cat": "[{}, {}]"}
"""How queries and keys meet without a product; any other way is a distance."""
_REDUCTIONS = {"sum": "Σ", "mean": "mean of"}


@dataclass(frozen=True)
class _Formula:
    """A formula, and whether it can be a factor without brackets: `softmax(a)`, not `a + b`."""

    text: str
    is_whole: bool

    @property
    def inside(self) -> str:
        """The formula as a factor: `(a + b)`."""
        return self.text if self.is_whole else f"({self.text})"

    def as_argument(self, function: str) -> _Formula:
        """Return a function of it: `tanh(a + b)`."""
        return _Formula(f"{function}({self.text})", is_whole=True)

    def plus(self, term: str) -> _Formula:
        """Return the sum with a term."""
        return _Formula(f"{self.text} + {term}", is_whole=False)


def joint_text(graph: Graph, scored: Joint, *, key_first: bool) -> str:
    """Return the formula of scores without a dot product: `w · tanh(q_heads + k_heads)`."""
    sides = ("k_heads", "q_heads") if key_first else ("q_heads", "k_heads")
    text = _JOINED.get(scored.multiply.base_name.rstrip("_"), "|{} - {}|").format(*sides)
    formula = _Formula(text, is_whole=text.startswith(("[", "|")))
    for op in scored.between:
        name = op.base_name.rstrip("_")
        if name in _REDUCTIONS or graph.is_projection(op):
            sign = _REDUCTIONS.get(name, "W ·")
            formula = replace(formula, text=f"{sign} {formula.inside}")
        elif graph.bends(op):
            formula = formula.as_argument(name)
        elif any(map(graph.is_weight, op.inputs)):
            inside = formula.inside
            formula = replace(formula, text=f"W ∘ {inside}" if op.does("scales") else f"{inside} + b")
        elif op.base_name.rstrip("_") in ("add", "sub") and len(op.inputs) > 1:
            formula = formula.plus("another term")
    return formula.text


def _is_by_a_number(op: Op) -> bool:
    """Return whether an operation is `+`, `-`, `·` or `/` with a number."""
    if op.base_name.rstrip("_") not in _SIGNS:
        return False
    return len(op.inputs) == 1 and len(op.args) > 1


def weighs_by_others(graph: Graph, attention: Attention) -> bool:
    """Return whether weights without a softmax also depend on other scores of the same query, e.g. on their sum."""
    for op in attention.weighing:
        if op in attention.masks:
            continue
        if graph.is_scale(op) or graph.bends(op) or graph.moves(op):
            continue
        if not _is_by_a_number(op):
            return True
    return False


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
    sentences = dict.fromkeys(without_dot(attention) for attention, _ in run.attentions)
    sentences.pop("", None)
    return tuple(sentences)


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
    formula = _Formula(scores, is_whole=" " not in scores)
    kinds = ["", *(kind for kind, _ in steps), ""]
    for place, (kind, number) in enumerate(steps):
        before, after = kinds[place], kinds[place + 2]
        is_again = kind == before and kind in ("fill", *_ADDED)
        if not is_again:
            formula = _after_step(formula, kind, number, beside={before, after})
    return formula.text


def _after_step(
    formula: _Formula,
    kind: str,
    number: float | None,
    *,
    beside: set[str],
) -> _Formula:
    """Return a formula after one more step; `beside` are the kinds of the steps before and after it."""
    if kind in _ADDED:
        return formula.plus(_ADDED[kind])
    if kind == "fill":
        return formula.as_argument("mask")
    if kind == "mixed":
        return formula.as_argument("mix")
    if kind == "times":
        return _Formula(f"{formula.inside} · mask", is_whole=False)
    if kind == "weighed":
        return _Formula(f"{formula.inside} · factors", is_whole=False)
    if kind == "scale":
        functions = beside - {"", "scale", "fill", "times", "weighed", "mixed", *_ADDED}
        bends = bool(number) and bool(functions)
        return _Formula(_scaled(formula.inside, number, as_a_root=not bends), is_whole=False)
    if " " in kind:
        return _Formula(f"{formula.inside} {kind}", is_whole=False)
    return formula.as_argument(kind)


def _scaled(text: str, number: float | None, *, as_a_root: bool) -> str:
    """Return a product with a number; the argument of a function is divided by 30 rather than √900."""
    if number is None or as_a_root:
        return f"{text}{scale_text(number)}"
    if number and abs(number) < 1:
        return f"{text} / {1 / number:g}"
    return f"{number:g} · {text}"


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
