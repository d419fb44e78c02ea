"""What stands between the product q·kᵀ and the softmax: scale, mask, soft cap, sinks, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isclose

from ..record.ops import Op, TensorRef
from .dataflow import Graph
from .products import Product
from .softmax import is_shift


@dataclass
class Scoring:
    """The way from the product of queries and keys to the softmax, in the order in which it ran."""

    scores: TensorRef
    """Scaled, before any mask, bias or bend; None of them may be there."""
    masked: TensorRef
    """What the softmax is taken of, without sinks."""
    scale: float | None = 1.0
    """What the scores were multiplied by up to there."""
    late_scale: float | None = 1.0
    """What they were multiplied by afterwards, together with the masks."""
    masks: list[Op] = field(default_factory=list)
    mixed: list[Op] = field(default_factory=list)
    """Projections that mix the scores of the heads."""
    bent: bool = False
    """Whether they went through something that is neither a scale nor a mask."""
    steps: list[tuple[str, float | None]] = field(default_factory=list)
    """What was done to the scores, in order: `add`, `fill` or `times` for a mask, `scale` and its number, `mixed` for
    a projection from heads to heads, or the name of a function."""
    softcap: float | None = None
    sinks: Op | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing but scales has met the scores."""
        return not self.masks and not self.bent

    def bend(self, name: str) -> None:
        """Note that a function, or a projection, was applied."""
        self.bent = True
        self.steps.append((name, None))

    def multiply(self, number: float | None) -> None:
        """Note a scale after the first mask or bend."""
        self.late_scale = multiply((self.late_scale, number))
        self.steps.append(("scale", number))

    def mask(self, op: Op, how: str) -> None:
        """Note an operation that adds, fills in or multiplies a mask."""
        self.masks.append(op)
        self.steps.append((how, None))


def multiply(numbers: Iterable[float | None]) -> float | None:
    """Return the product; None where one of them is not known."""
    product = 1.0
    for number in numbers:
        if number is None:
            return None
        product *= number
    return product


def read_scoring(graph: Graph, scored: Product, path: tuple[Op, ...], softmax_input: TensorRef, dim: int) -> Scoring:
    """Follow `path`, the operations from the product to the softmax over `dim` in the order in which they ran.

    In `softmax(c · tanh(q·kᵀ · s / c) + mask)` the scores are `q·kᵀ · s`, the soft cap is c, and the steps are
    a `scale` of 1 / c, `tanh`, a `scale` of c, and `add`.
    """
    product = scored.op
    scoring = Scoring(product.output, softmax_input, scale=float(product.kwargs.get("alpha", 1)))
    if scored.is_dot and adds_mask(product):
        scoring.masks.append(product)
    tensor, before_scale, last_scale = product.output, product.output, scoring.scale
    # Some of the scores, cut out to be masked and written back, are not the scores.
    smallest = min(product.output.numel, softmax_input.numel)
    waiting: float | None = None  # the soft cap that tanh was divided by, until it is multiplied by it again
    for op in path:
        name = op.base_name.rstrip("_")
        if name == "cat" or (name == "constant_pad_nd" and op.output.id == softmax_input.id):
            scoring.sinks, scoring.masked = op, scoring.scores if scoring.is_plain else tensor
            break
        if graph.is_projection(op):
            if scoring.is_plain:
                # What turns the heads to the end for the projection is no part of the scores.
                scores = graph.before_moves(scoring.scores)
                scoring.scores = graph.after_call(product) if scores.id == product.output.id else scores
            scoring.mixed.append(op)
            scoring.bend("mixed")
        elif graph.is_scale(op):
            number = graph.scale_of(op)
            if scoring.is_plain:
                before_scale, last_scale = tensor, number
                scoring.scale, scoring.scores = multiply((scoring.scale, number)), op.output
            elif waiting is not None and number is not None and isclose(number, waiting, rel_tol=1e-5):
                scoring.steps.append(("scale", number))
                scoring.softcap, waiting = waiting, None
            else:
                scoring.multiply(number)
        elif is_shift(graph.recording, op):
            # What is taken off every score of a row changes no weight; along another axis the scores are normalised.
            if _depends_on(graph, op.inputs[1], softmax_input, dim):
                scoring.bend("log_softmax")
        elif adds_mask(op) and not (op.base_name == "copy_" and op.inputs[-1].id == tensor.id):
            if name == "sub" and op.inputs[1].id == tensor.id != op.inputs[0].id:
                scoring.multiply(-1.0)
            scoring.mask(op, "fill" if op.does("fills") else "add")
        elif name == "tanh":
            if scoring.is_plain and last_scale and scoring.scale is not None and scoring.scores.id == tensor.id:
                waiting = 1 / last_scale
                scoring.scale, scoring.scores = scoring.scale / last_scale, before_scale
                scoring.steps.append(("scale", last_scale))
            scoring.bend(name)
        elif name == "neg":
            scoring.multiply(-1.0)
            scoring.bent = True
        elif op.does("bends"):
            scoring.bend(name)
        elif op.does("scales"):  # by a number for each head, or by a mask
            factor = min(op.inputs, key=lambda read: read.numel)
            if any(size > 1 for size in factor.shape[-2:]):
                scoring.mask(op, "times")
            elif scoring.is_plain:
                scoring.scale, scoring.scores = None, op.output
            else:
                scoring.multiply(None)
        elif scoring.is_plain and name != "_to_copy" and op.output.numel >= smallest:
            scoring.scores = op.output
        tensor = op.output
    if waiting is not None:  # a tanh that was not a soft cap: nothing of the scale belonged to it
        scoring.late_scale = multiply((scoring.late_scale, 1 / waiting))
    return scoring


def _depends_on(graph: Graph, shift: TensorRef, softmax_input: TensorRef, dim: int) -> bool:
    """Return whether what is taken off scores is another number for each that the softmax runs over."""
    over = graph.dimensions.along(softmax_input, dim)
    return not over.isdisjoint(atom for axis in graph.dimensions.of(shift) for atom in axis)


def adds_mask(op: Op) -> bool:
    """Return whether this adds, or fills in, something that scores do not come from."""
    name = op.base_name.rstrip("_")
    if name in ("baddbmm", "addmm"):
        return bool(op.kwargs.get("beta", 1) != 0)
    if op.does("fills"):
        return True
    return name in ("add", "sub") and sum(bool(t.shape) for t in op.inputs) > 1
