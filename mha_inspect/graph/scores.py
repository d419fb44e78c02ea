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


def multiply(numbers: Iterable[float | None]) -> float | None:
    """The product; None where one of them is not known."""
    product = 1.0
    for number in numbers:
        if number is None:
            return None
        product *= number
    return product


def read_scoring(graph: Graph, scored: Product, path: tuple[Op, ...], softmax_input: TensorRef, dim: int) -> Scoring:
    """Follow `path`, the operations from the product to the softmax over `dim` in the order in which they ran."""
    product = scored.op
    found = Scoring(product.output, softmax_input, scale=float(product.kwargs.get("alpha", 1)))
    if scored.is_dot and adds_mask(product):
        found.masks.append(product)
    tensor, before_scale, last_scale = product.output, product.output, found.scale
    # Some of the scores, cut out to be masked and written back, are not the scores.
    smallest = min(product.output.numel, softmax_input.numel)
    waiting: float | None = None  # the soft cap that tanh was divided by, until it is multiplied by it again
    for op in path:
        early = not found.masks and not found.bent
        name = op.base_name.rstrip("_")
        if name == "cat" or (name == "constant_pad_nd" and op.output.id == softmax_input.id):
            found.sinks, found.masked = op, tensor
            if not found.masks and not found.bent:
                found.masked = found.scores
            break
        if graph.is_projection(op):
            if early:
                # What turns the heads to the end for the projection is no part of the scores.
                scores = graph.before_moves(found.scores)
                found.scores = graph.after_call(product) if scores.id == product.output.id else scores
            found.mixed.append(op)
            found.steps.append(("mixed", None))
            found.bent = True
        elif graph.is_scale(op):
            number = graph.scale_of(op)
            if early:
                before_scale, last_scale = tensor, number
                found.scale, found.scores = multiply((found.scale, number)), op.output
            else:
                found.steps.append(("scale", number))
                if waiting is not None and number is not None and isclose(number, waiting, rel_tol=1e-5):
                    found.softcap, waiting = waiting, None
                else:
                    found.late_scale = multiply((found.late_scale, number))
        elif is_shift(graph.recording, op):
            # What is taken off every score of a row changes no weight; along another axis the scores are normalised.
            if _depends_on(graph, op.inputs[1], softmax_input, dim):
                found.bent = True
                found.steps.append(("log_softmax", None))
        elif adds_mask(op) and not (op.base_name == "copy_" and op.inputs[-1].id == tensor.id):
            if name == "sub" and op.inputs[1].id == tensor.id != op.inputs[0].id:
                found.late_scale = multiply((found.late_scale, -1.0))
                found.steps.append(("scale", -1.0))
            found.masks.append(op)
            found.steps.append(("fill" if op.does("fills") else "add", None))
        elif name == "tanh":
            if early and last_scale and found.scale is not None and found.scores.id == tensor.id:
                waiting = 1 / last_scale
                found.scale, found.scores = found.scale / last_scale, before_scale
                found.steps.append(("scale", last_scale))
            found.bent = True
            found.steps.append((name, None))
        elif name == "neg":
            found.late_scale = multiply((found.late_scale, -1.0))
            found.steps.append(("scale", -1.0))
            found.bent = True
        elif op.does("bends"):
            found.bent = True
            found.steps.append((name, None))
        elif op.does("scales"):  # by a number for each head, or by a mask
            other = min(op.inputs, key=lambda t: t.numel)
            if any(size > 1 for size in other.shape[-2:]):
                found.masks.append(op)
                found.steps.append(("times", None))
            elif early:
                found.scale, found.scores = None, op.output
            else:
                found.late_scale = None
                found.steps.append(("scale", None))
        elif early and name != "_to_copy" and op.output.numel >= smallest:
            found.scores = op.output
        tensor = op.output
    if waiting is not None:  # a tanh that was not a soft cap: nothing of the scale belonged to it
        found.late_scale = multiply((found.late_scale, 1 / waiting if waiting else None))
    return found


def _depends_on(graph: Graph, shift: TensorRef, softmax_input: TensorRef, dim: int) -> bool:
    """Whether what is taken off scores is another number for each that the softmax runs over."""
    over = graph.dimensions.along(softmax_input, dim)
    return not over.isdisjoint(atom for axis in graph.dimensions.of(shift) for atom in axis)


def adds_mask(op: Op) -> bool:
    """Whether this adds, or fills in, something that scores do not come from."""
    name = op.base_name.rstrip("_")
    if name in ("baddbmm", "addmm"):
        return bool(op.kwargs.get("beta", 1) != 0)
    if op.does("fills"):
        return True
    return name in ("add", "sub") and sum(bool(t.shape) for t in op.inputs) > 1
