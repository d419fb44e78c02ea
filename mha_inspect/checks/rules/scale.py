"""Check the scale of the scores."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from ...graph.attention import Attention
from ...graph.rerun import between
from ...naming.axes import AxisNames
from ...reports.check import Finding
from ..evidence import Evidence
from ..lab import NotPossibleError, UndeclaredError
from ..registry import rule


@rule(on_meta="the scores are scaled as declared", confirm="--scale sqrt_head_dim")
def scale(evidence: Evidence) -> Iterator[Finding]:
    """The scores are scaled as declared.

    `--scale sqrt_head_dim` declares the scale. Nothing is changed: the factor between q·kᵀ and the
    softmax is read from the run and compared with 1/√head_dim. With `--scale none` it is compared
    with 1, as T5 has no scale.
    With a smaller factor all keys get similar weights, with a larger one a single key gets almost all.
    Loaded weights then attend in another way than they were trained to.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention --scale sqrt_head_dim
    from torch import nn


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
            weights = (q @ k.mT / 16**0.5).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
    ```

    ## Right

    ```diff
    -        weights = (q @ k.mT / 16**0.5).softmax(-1)
    +        weights = (q @ k.mT / 8**0.5).softmax(-1)
    ```
    """
    attentions = evidence.run.attentions
    if evidence.intent.scale is None:
        if all(_is_mistaken(evidence, attention, names) for attention, names in attentions):
            unless = ", unless the weights were trained with this scale, e.g. T5 with none"
            attention, names = attentions[0]
            yield _other_scale(evidence, attention, names, unless, "No norm is before it.", sure=False)
        raise UndeclaredError("--scale sqrt_head_dim")
    for attention, names in attentions:
        if not attention.is_dot:
            raise NotPossibleError("the scores are additive, so there is no dot product to scale")
        if attention.scale is None:
            raise NotPossibleError("the scale could not be determined")
        if any(step == "times" for step, _ in attention.scoring):
            raise NotPossibleError("the scores are also multiplied by numbers that differ by key")
        if evidence.intent.scale == "none":
            if not _is_scaled_by(attention, 1.0):
                yield _scaled_all_the_same(evidence, attention, names)
                return
        elif abs(attention.scale / max(names.head_dim, 1) ** -0.5 - 1) > 0.01:
            yield _other_scale(evidence, attention, names, "", f"head_dim is {names.head_dim}.")
            return


def _scaled_all_the_same(evidence: Evidence, attention: Attention, names: AxisNames) -> Finding:
    return Finding(
        "scale",
        f"The scores are scaled by {scale_words(attention, names)}; declared: not scaled.",
        "The scale is the recorded factor between q·kᵀ and the softmax.",
        source=_line_of_scale(evidence, attention),
        module=attention.module,
        fix="Leave out the factor.",
    )


def _other_scale(
    evidence: Evidence, attention: Attention, names: AxisNames, unless: str, more: str, *, sure: bool = True
) -> Finding:
    scaled = "not scaled" if _is_scaled_by(attention, 1.0) else f"scaled by {scale_words(attention, names)}"
    return Finding(
        "scale",
        f"The scores are {scaled}; expected 1/√{names.head_dim} = {max(names.head_dim, 1) ** -0.5:.4g}{unless}.",
        f"The scale is the recorded factor between q·kᵀ and the softmax. {more}",
        sure=sure,
        source=_line_of_scale(evidence, attention),
        module=attention.module,
        fix="Divide by math.sqrt(head_dim) once.",
    )


def _line_of_scale(evidence: Evidence, attention: Attention) -> str:
    """Return the first line that scales queries, keys or scores and is not that of their product; else that line."""
    run, product = evidence.run, attention.score_product.op
    ends = ("q_proj", "k_proj", "q_heads", "k_heads")
    starts = {attention.stages[stage].id for stage in ends if stage in attention.stages}
    for op in between(run.recording, starts, attention.softmax.inputs[0]):
        if op.source != product.source and run.graph.is_scale(op):
            return op.source
    return product.source


def _is_mistaken(evidence: Evidence, attention: Attention, names: AxisNames) -> bool:
    """Return whether a dot product has no scale, a negative or a usual mistaken one, and no norm before it."""
    if not attention.is_dot or attention.weighing or names.head_dim < 2:
        return False
    expected, *mistaken = _usual_scales(attention, names).values()
    if _is_scaled_by(attention, expected):
        return False
    is_negative = attention.scale is not None and attention.scale < 0
    is_usual = any(_is_scaled_by(attention, scale) for scale in (*mistaken, 1.0))
    if not is_usual and not is_negative:
        return False
    return _has_no_norm(evidence, attention) and _keeps_sizes(evidence, attention, names)


def _keeps_sizes(evidence: Evidence, attention: Attention, names: AxisNames) -> bool:
    """Return whether queries and keys are as large in the product as after their projection; True if it is unknown.

    A rotation keeps their size; a product with other numbers, or a gain, is a scale of its own.
    """
    if any(scale != 1 for scale in attention.early_scales.values()):
        return True  # a part of the scale
    product = attention.score_product
    factors = {"k_proj": product.right, "q_proj": product.left}
    if attention.key_first:
        factors = {"k_proj": product.left, "q_proj": product.right}
    change = 1.0
    for stage, factor in factors.items():
        projected = evidence.content(attention.stages[stage])
        multiplied = evidence.content(factor)
        if projected is None or multiplied is None or multiplied.numel() % projected.numel():
            continue  # e.g. packed with others
        change *= _size(multiplied) / max(_size(projected), 1e-30)
    if _is_scaled_by(attention, 1 / names.head_dim):
        # The scale once before the product, and again in it.
        return math.isclose(change, 1, rel_tol=0.01) or math.isclose(change, names.head_dim**-0.5, rel_tol=0.01)
    return math.isclose(change, 1, rel_tol=0.01)


def _size(numbers: Tensor) -> float:
    """Return the root of the mean square of finite numbers."""
    finite = numbers.double().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.square().mean().sqrt())


def _is_scaled_by(attention: Attention, scale: float) -> bool:
    return math.isclose(attention.scale or 0.0, scale, rel_tol=1e-3)


def _has_no_norm(evidence: Evidence, attention: Attention) -> bool:
    """Return whether queries and keys are projected, and no norm is between a projection and the scores."""
    product = attention.score_product
    for side in ("q_proj", "k_proj"):
        projected = attention.stages.get(side)
        if projected is None:
            return False
        for factor in (product.left, product.right):
            if any(op.does("norms") for op in between(evidence.run.recording, {projected.id}, factor)):
                return False
    return True


def scale_words(attention: Attention, names: AxisNames) -> str:
    """Return a scale and its formula: `0.125 = 1/√head_dim`."""
    if not attention.is_dot:
        return "not needed: the scores are additive"
    if attention.scale is None:
        return "not a single number"
    if _is_scaled_by(attention, 1.0):
        return "not scaled"
    formulas = {**_usual_scales(attention, names), **_chosen_scales(attention, names)}
    for formula, scale in formulas.items():
        if _is_scaled_by(attention, scale):
            return f"{attention.scale:.4g} = {formula}"
    return f"{attention.scale:.4g}, {attention.scale * max(names.head_dim, 1) ** 0.5:.4g} times 1/√head_dim"


def _usual_scales(attention: Attention, names: AxisNames) -> dict[str, float]:
    """Return the expected scale, then other usual scales, by formula."""
    head_dim, width = max(names.head_dim, 1), _width(attention)
    return {
        "1/√head_dim": head_dim**-0.5,
        "1/head_dim": 1 / head_dim,
        "√head_dim": head_dim**0.5,
        "head_dim^(-1/4)": head_dim**-0.25,
        "1/√(heads · head_dim)": (names.num_heads * head_dim) ** -0.5,
        "1/√embed_dim": width**-0.5 if width > 1 else 0.0,
    }


def _chosen_scales(attention: Attention, names: AxisNames) -> dict[str, float]:
    """Return scales by formula that some models have on purpose, e.g. Gemma 2, and others by mistake."""
    width, heads = _width(attention), max(names.num_heads, 1)
    return {"1/√(embed_dim / heads)": (width / heads) ** -0.5 if width > heads else 0.0}


def _width(attention: Attention) -> int:
    """Return the number of features of the input of the queries; 0 if it is unknown."""
    return attention.stages["query"].shape[-1] if "query" in attention.stages else 0
