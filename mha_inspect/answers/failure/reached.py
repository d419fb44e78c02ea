"""How far an attention came before the forward failed: the stages that there are.

`graph.attention` starts from a softmax that is followed by the product with the values. Here there may be neither yet.
The walk starts from what there is: a softmax, the product of the scores, or the operands of the call that failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from ...graph.dataflow import Graph
from ...graph.pairing import as_written, score_product
from ...graph.products import Product
from ...graph.projections import projections_behind, with_projections
from ...naming.axes import AxisNames
from ...naming.stages import STAGES
from ...record.ops import Op, TensorRef
from ...running.run import Run
from .call import Call
from .operand import ATTENTION, LAYERS, SDPA, Operand
from .partial_axes import PartialAxes, Whose, axes_of

PRODUCTS = {"matmul", "bmm", "mm", "baddbmm"}
"""Calls that multiply two tensors, by their names without underscores."""

_FAR = 60
"""Tensors that are looked at for the nearest stage."""
_PARTS = ("query", "key", "value")


def side_of_stage(stage: str) -> Whose:
    """Return whose sequence a stage has."""
    if stage in _PARTS or stage[1] == "_":
        return "query" if stage[0] == "q" else "key"
    return "scores"


@dataclass(frozen=True)
class Reached:
    """The stages that there are, and the axes of any tensor."""

    graph: Graph
    axes: PartialAxes
    stages: Mapping[str, TensorRef]
    sides: Mapping[int, Whose]
    """TensorRef id to whose sequence the tensor has."""
    roles: Mapping[int, str] = field(default_factory=dict)
    """TensorRef id to the side of an operand of the failing call: `query`, `key`, `value`, `weights`."""
    completed: int = 0
    """How many attentions were completed before."""
    names: AxisNames | None = None
    """The axes of the attention that the failure belongs to, where that had been computed up to its context."""

    def of(self, tensor: TensorRef) -> str:
        """Return what each dimension of a tensor is, as a pattern: its sequence is that of the nearest stage behind."""
        side: Whose = next(
            (self.sides[now.id] for now in islice(self.behind(tensor), _FAR) if now.id in self.sides), ""
        )
        return self.axes.of(tensor, side)

    def named(self, operand: Operand, number: int) -> Operand:
        """Return an operand with its axes, what it is to the attention, and a name if it has none: the stage's."""
        tensor = operand.tensor
        stage = next((stage for stage, known in self.stages.items() if known.id == tensor.id), "")
        return replace(
            operand,
            name=operand.name or stage or operand.role or f"operand {number}",
            pattern=self.of(tensor),
            part=self.roles.get(tensor.id, ""),
            from_scores=self.is_of_scores(tensor),
            from_parameters=any(self.graph.is_weight(behind) for behind in self.behind(tensor)),
        )

    def of_stage(self, stage: str) -> str:
        """Return the axes of a stage."""
        if self.names is not None:
            return self.names.of_stage(stage)
        return self.axes.of(self.stages[stage], side_of_stage(stage))

    def behind(self, tensor: TensorRef) -> Iterator[TensorRef]:
        """Yield the tensor, and every one that it was made from, the nearest first."""
        return _behind(self.graph, tensor)

    def is_of_scores(self, tensor: TensorRef) -> bool:
        """Whether this is the scores, scaled or masked at most: not the context, which is a product as well."""
        scores = self.stages.get("scores")
        steps = self.graph.back(tensor, self.graph.carries)
        return scores is not None and any(step.tensor.id == scores.id for step in steps)

    def steps_back(self, tensor: TensorRef) -> Iterator[TensorRef]:
        """Yield a tensor, and what it was before it was moved and scaled."""
        yield tensor
        while (op := self.graph.recording.producer(tensor)) and (self.graph.moves(op) or self.graph.is_scale(op)):
            tensor = op.inputs[0]
            yield tensor


def reach(run: Run, call: Call | None, operands: Sequence[Operand]) -> Reached:
    """Find the stages of the attention that a failing call belongs to.

    Args:
        run: as far as it came.
        call: None where nothing is known of it.
        operands: what it was given.
    """
    graph, attentions, base = run.graph, run.attentions, "" if call is None else call.base
    batch_first = call is None or call.batch_first
    first = [operand.tensor for operand in operands if _is_activation(base, operand)]
    contexts = [last.value_product.op.output.id for last, _ in attentions[-1:] if "output" not in last.projections]
    if contexts and (not operands or any(_is_made_of(graph, operand.tensor, *contexts) for operand in operands)):
        # What failed was made from the context of the last one. What follows the context may be a part of the very
        # call that failed: a product flattens what it is given.
        last, names = attentions[-1]
        sides = {tensor.id: side_of_stage(name) for name, tensor in reversed(last.stages.items())}
        sides |= {product.op.output.id: "scores" for product in (last.value_product, last.score_product)}
        stages = {name: tensor for name, tensor in last.stages.items() if name != "concat"}
        axes = axes_of(graph, batch_first=batch_first, first=first, query=last.stages["q_heads"])
        return Reached(graph, axes, stages, sides, completed=len(attentions) - 1, names=names)
    tail = graph.recording.ops[attentions[-1][0].value_product.op.index + 1 if attentions else 0 :]
    softmax = next((op for op in reversed(tail) if graph.is_softmax(op)), None)
    product = _score_product(graph, tail, softmax)
    parts = _parts(graph, base, operands, softmax, product)
    if base == ATTENTION:
        factors = {}
        stages = {operand.role: operand.tensor for operand in operands if operand.role in _PARTS}
        sides = {tensor.id: side_of_stage(name) for name, tensor in reversed(stages.items())}
    else:
        factors = {role: tensor for role, tensor in parts.items() if role in _PARTS}
        if product is not None:
            written = (as_written(graph, product, tensor) for tensor in (product.left, product.right))
            factors = dict(zip(("query", "key"), written, strict=True)) | factors
        stages, sides = _before_product(graph, factors)
    if product is not None:
        scores = _scores(graph, product, softmax)
        stages |= scores
        sides |= dict.fromkeys((product.op.output.id, graph.after_call(product.op).id), "scores")
    return Reached(
        graph,
        axes_of(graph, batch_first=batch_first, first=first, factors=factors.values(), query=factors.get("query")),
        {name: stages[name] for name in STAGES if name in stages},
        sides,
        {tensor.id: role for role, tensor in parts.items()},
        len(attentions),
    )


def _behind(graph: Graph, tensor: TensorRef) -> Iterator[TensorRef]:
    return (step.tensor for step in graph.back(tensor, lambda _: True))


def _is_made_of(graph: Graph, tensor: TensorRef, *ids: int) -> bool:
    """Whether one of these tensors went into a tensor."""
    return any(behind.id in ids for behind in _behind(graph, tensor))


def _is_activation(base: str, operand: Operand) -> bool:
    """Whether this is what a layer takes in: batch, sequence, features."""
    if base in LAYERS:
        return operand.role in (*_PARTS, "src", "tgt")
    return base == "linear" and operand.role == "input" and operand.value.is_floating_point()


def _score_product(graph: Graph, tail: tuple[Op, ...], softmax: Op | None) -> Product | None:
    """Return the product of the scores: the one before the softmax, or where there is none yet, the last one."""
    if softmax is not None:
        meeting = score_product(graph, *(graph.softmax(softmax) or (softmax.inputs[0], -1)))
        return None if meeting is None else meeting.product
    last = next((product for op in reversed(tail) if (product := graph.product(op)) is not None), None)
    factors = () if last is None else (last.left, last.right)
    behind = {step.tensor.id for factor in factors for step in graph.back(factor, graph.carries)}
    # What another product goes into is no scores: a softmax was left out, or there is none to come.
    return None if any(graph.product(op) and op.output.id in behind for op in tail) else last


def _scores(graph: Graph, product: Product, softmax: Op | None) -> dict[str, TensorRef]:
    """Return the stages from the product of the scores to the softmax, those that there are."""
    scores = graph.after_call(product.op)
    while len(followers := graph.recording.consumers.get(scores.id, ())) == 1 and graph.is_scale(followers[0]):
        scores = followers[0].output
    if softmax is None:
        return {"scores": scores}
    masked, _ = graph.softmax(softmax) or (softmax.inputs[0], 0)
    stages = {"scores": scores, "weights": softmax.output}
    return stages if masked.id == scores.id else {**stages, "masked_scores": masked}


def _parts(
    graph: Graph, base: str, operands: Sequence[Operand], softmax: Op | None, product: Product | None
) -> dict[str, TensorRef]:
    """Return what each operand of the failing call is to the attention, by its place in the call."""
    if base == SDPA:
        return {operand.role: operand.tensor for operand in operands if operand.role in _PARTS}
    if base not in {"einsum", *PRODUCTS} or len(operands) < 2:
        return {}
    if any(operand.is_parameter or graph.is_weight(operand.tensor) for operand in operands[-2:]):
        return {}
    left, right = (operand.tensor for operand in operands[-2:])
    made = softmax or (product.op if product is not None else None)
    if made is None:
        return {"query": left, "key": right}
    for weights, value in ((left, right), (right, left)):
        if _is_made_of(graph, weights, made.output.id):
            return {"weights": weights, "value": value}
    return {}


def _before_product(graph: Graph, factors: Mapping[str, TensorRef]) -> tuple[dict[str, TensorRef], dict[int, Whose]]:
    """Walk from the factors of products back to what came in: the stages that are met, and the side of each tensor."""
    heads, sides = dict[str, TensorRef](), dict[int, Whose]()
    for role, tensor in factors.items():
        side = sides[tensor.id] = side_of_stage(role)
        swaps = role == "key"
        while (op := graph.recording.producer(tensor)) is not None and (
            (swaps and op.swaps_last_two) or graph.is_scale(op)
        ):
            tensor, swaps = op.inputs[0], False
            sides[tensor.id] = side
        heads[f"{role[0]}_heads"] = tensor
    ends = projections_behind(graph, heads, "", {role: set() for role in ("query", *factors)})
    stages = with_projections(graph, heads, ends)
    for name, tensor in stages.items():
        # One product may serve all three: then it is nobody's own.
        side = side_of_stage(name)
        sides[tensor.id] = side if sides.get(tensor.id) in (None, side) else ""
    unsplit = [name for name in heads if stages[name].id == getattr(stages.get(f"{name[0]}_proj"), "id", None)]
    return {name: tensor for name, tensor in stages.items() if name not in unsplit}, sides
