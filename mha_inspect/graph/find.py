"""Find every attention in a recording by its dataflow: no class name and no source text is looked at.

From each softmax the walk goes back through mask and scale to the product that made the scores, or to what scored
queries and keys without one (`additive`), and forward to the product with the values. Weights that are no softmax are
found from that product backward (`weighing`). From the operands the walk goes on to the projections, and from the
product with the values forward to the output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from math import isclose, prod

from ..record.ops import Op, Recording, TensorRef
from .attention import Attention, Mixing
from .dataflow import Graph, inside
from .loops import merge_branches
from .pairing import Meeting, mixing_of, moved_for, score_product, softmaxed_side, value_product
from .products import Product
from .projections import Projection, Projections, adds_up
from .scores import multiply, read_scoring
from .softmax import LateSoftmax, late_softmax_of, masks_on_exponentials
from .weighing import Weighing, find_weighings


def find_attentions(recording: Recording) -> list[Attention]:
    """Every attention of the recording, in the order in which they were computed."""
    return attentions_of(Graph(recording))


def attentions_of(graph: Graph) -> list[Attention]:
    """Every attention of a recording whose dataflow has been read already, in the order of computation."""
    finder = _Finder(graph)
    found = [own for op in graph.recording.ops if (own := finder.attention(op)) is not None]
    others = [own for way in find_weighings(graph, found) if (own := finder.weighed(way)) is not None]
    found = sorted((*found, *others), key=lambda own: own.softmax.index) if others else found
    return merge_branches(graph, finder.with_own_outputs([own for own in found if not _is_dispatch(graph, own, found)]))


def _is_dispatch(graph: Graph, own: Attention, every: list[Attention]) -> bool:
    """Whether one product gives the weights of two averages, the one of what comes of the other.

    That is a soft mixture of experts: tokens are handed out to slots as they are, and what is made of them is handed
    back. Where values are projected, two sides attend to each other.
    """
    others = [other for other in every if other is not own and other.score_product.op is own.score_product.op]
    return any(
        "value" not in first.projections and graph.leads_to(first.stages["context"], second.stages["v_heads"])
        for other in others
        for first, second in ((own, other), (other, own))
    )


class _Finder:
    """Finds the stages around one softmax."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.recording = graph.recording
        self.projections = Projections(graph)

    def attention(self, op: Op) -> Attention | None:
        """The attention whose softmax an operation completes; None where it completes none of an attention."""
        softmax = self.graph.softmax(op)
        if softmax is not None:
            masked, dim = softmax
            ahead = value_product(self.graph, op.output, dim)
            return None if ahead is None else self._around(op, masked, dim, ahead)
        late = late_softmax_of(self.recording, op)
        if late is None:
            return None
        return self._around(late.exponential, late.masked, late.dim, Meeting(late.product, (), late.carried), late)

    def weighed(self, way: Weighing) -> Attention | None:
        """The attention whose weights are made in another way than by a softmax."""
        found = self._around(way.ops[-1], way.masked, way.dim, way.ahead, behind=way.behind)
        return None if found is None else replace(found, weighing=way.ops)

    def _around(
        self,
        softmax: Op,
        masked: TensorRef,
        dim: int,
        ahead: Meeting,
        late: LateSoftmax | None = None,
        behind: Meeting | None = None,
    ) -> Attention | None:
        """The stages around a softmax whose weights, or exponentials, meet the values in `ahead`."""
        graph = self.graph
        behind = behind or score_product(graph, masked, dim)
        if behind is None:
            return None
        product, averaged = behind.product, ahead.product
        softmaxed = softmaxed_side(graph, behind, ahead, masked, dim)
        if softmaxed is None:
            return None
        scoring = read_scoring(graph, product, behind.path, masked, dim)
        key_first = softmaxed.key_first
        query, key = (product.right, product.left) if key_first else (product.left, product.right)
        value_first = averaged.right.id == ahead.carried.id
        value = averaged.left if value_first else averaged.right
        if any(step.tensor.id == softmax.output.id for step in graph.back(value, graph.carries)):
            return None  # weights that meet themselves, as where a matrix of them is inverted
        if graph.comes_from_inputs(key) and not graph.is_given_or_learned(value):
            return None  # the mean of numbers that nobody gave or learned, such as places: it says where, and not what
        q_heads, q_scale = self._heads(product, query, transposed=key_first)
        k_heads, k_scale = self._heads(product, key, transposed=not key_first)
        v_heads, _ = self._heads(averaged, value, transposed=value_first)
        stages = {"q_heads": q_heads, "k_heads": k_heads, "v_heads": v_heads}
        scored, summed = product.axes(graph.dimensions), averaged.axes(graph.dimensions)
        keys = scored.left_rows if key_first else scored.right_columns
        values = summed.left_inner if value_first else summed.right_inner
        queries = scored.columns if key_first else scored.rows
        positions = {"query": set(queries), "key": set(keys), "value": set(values)}
        ends = self.projections.behind(stages, product.multiply.module, positions)
        projections = self.projections.put_before(stages, ends)
        if not (scoring.masks and scoring.masks[0] is product.op):
            stages["scores"] = scoring.scores
        if scoring.masks or scoring.bent:
            stages["masked_scores"] = scoring.masked
        if late is None:
            stages["weights"] = _without_sinks(softmax.output, dim, ahead.path)
        stages["context"] = graph.after_call(averaged.op) if late is None else late.divided.output
        self._combine(stages, projections, product.multiply.module)
        scores_scale = multiply([q_scale, k_scale, scoring.scale]) if product.is_dot else None
        early = [self._early_scale(ends[name]) for name in ("query", "key") if name in ends]
        return Attention(
            softmax=softmax,
            score_product=product,
            value_product=averaged,
            stages=stages,
            scale=multiply([*early, scores_scale, scoring.late_scale]),
            scores_scale=scores_scale,
            softmax_dim=dim,
            key_first=key_first,
            over_queries=softmaxed.over_queries,
            value_first=value_first,
            masks=(*scoring.masks, *masks_on_exponentials(self.recording, softmax if late is None else late.total)),
            divided=None if late is None else late.divided,
            scoring=tuple(scoring.steps),
            softcap=scoring.softcap,
            sinks=scoring.sinks,
            mixed_scores=self._mixings(scoring.mixed),
            mixed_weights=self._mixings(ahead.path),
            weights_path=ahead.path,
            projections=projections,
            earlier={name: end.earlier for name, end in ends.items() if end.earlier},
            before_repeats={"key": graph.before_repeats(k_heads), "value": graph.before_repeats(v_heads)},
        )

    def with_own_outputs(self, found: list[Attention]) -> list[Attention]:
        """Without outputs that are another's queries, keys or values: what projects those is no W_o."""
        taken = {op.index for own in found for side, op in own.projections.items() if side != "output"}
        return [
            self._without_output(own) if (end := own.projections.get("output")) and end.index in taken else own
            for own in found
        ]

    def _without_output(self, own: Attention) -> Attention:
        stages = {name: tensor for name, tensor in own.stages.items() if name not in ("concat", "output")}
        self._join(stages, own.module)
        return replace(own, stages=stages, projections={k: op for k, op in own.projections.items() if k != "output"})

    def _mixings(self, ops: Iterable[Op]) -> tuple[Mixing, ...]:
        return tuple(mixing for op in ops if (mixing := mixing_of(self.graph, op)) is not None)

    def _heads(self, product: Product, operand: TensorRef, *, transposed: bool) -> tuple[TensorRef, float | None]:
        """The operand as the implementation wrote it, before it was scaled, or transposed for the product alone."""
        scales: list[float | None] = [1.0]
        swapped = False
        tensor = operand
        while (op := self.recording.producer(tensor)) is not None and op.inputs:
            if moved_for(self.graph, op, product):
                swapped = swapped or op.swaps_last_two
            elif product.is_dot and self._scales(op):
                scales.append(self.graph.scale_of(op))
            elif op.makes_result and (made := self.recording.producer(op.inputs[0])) is not None and self._scales(made):
                pass
            elif transposed and not swapped and op.swaps_last_two:
                swapped = True
            else:
                break
            tensor = max(op.inputs, key=lambda t: t.numel) if self._scales(op) else op.inputs[0]
        return tensor, multiply(scales)

    def _scales(self, op: Op) -> bool:
        """Whether this multiplies everything by one number, and is not the second half of a mean."""
        if not self.graph.is_scale(op):
            return False
        behind = self.recording.producer(max(op.inputs, key=lambda t: t.numel))
        if behind is None or behind.base_name != "sum":
            return True
        summed = behind.inputs[0].numel / max(behind.output.numel, 1)
        return not isclose((self.graph.scale_of(op) or 0) * summed, 1, rel_tol=1e-6)

    def _early_scale(self, end: Projection) -> float | None:
        """What was multiplied in between a projection and its heads, after the last norm."""
        after = max((place for place, op in enumerate(end.path) if self._norms(op)), default=-1)
        return multiply(self.graph.scale_of(op) for op in end.path[after + 1 :] if self._scales(op))

    def _norms(self, op: Op) -> bool:
        """Whether this is a norm, or the last step of one that was written out: a division by a length, or a gain."""
        if op.does("norms"):
            return op.base_name not in ("sum", "mean")  # by themselves they pool positions
        if not op.does("scales") or len(op.inputs) != 2 or self.graph.is_scale(op):
            return False
        smaller = min(op.inputs, key=_elements)
        return self.graph.is_weight(smaller) or _elements(smaller) * op.output.shape[-1] == op.output.numel

    # -- output -------------------------------------------------------------------------------------------------------

    def _combine(self, stages: dict[str, TensorRef], projections: dict[str, Op], module: str) -> None:
        """Add the heads side by side, and the output, after the context."""
        context = stages["context"]
        apart = len(context.shape) > 2 and context.shape != stages.get("query", context).shape

        # What a context is put beside its own query for, as in a decoder, is made of both.
        queries = {self.graph.before_moves(stages[name]).id for name in ("query", "q_heads") if name in stages}

        def through(op: Op) -> bool:
            # What is added while heads are still apart belongs to the attention.
            residual = adds_up((op,)) and not (op.module == module and apart and op.output.shape == context.shape)
            return (
                not self.graph.operands(op)
                and not residual
                and not (op.base_name == "cat" and queries & {self.graph.before_moves(t).id for t in op.inputs})
                and (
                    op.kind != "compute"
                    or op.pointwise
                    or op.does("carries")
                    or (op.does("norms") and inside(op.module, module))
                )
            )

        for op, step in self.graph.forward(context, through):
            if self.graph.is_projection(op):
                projections["output"] = op
                concat = self.graph.before_call(op, step.tensor)
                # In the attention's own code the reshape that puts heads side by side may flatten rows as well.
                stages["concat"] = concat if op.module == module else self.graph.before_flattening(concat, op.module)
                # What moves the features away from the last dimension belongs to what comes after.
                last = op.base_name != "convolution"
                stages["output"] = self._onward(self.graph.after_projection(op), module, features_last=last)
                return
        self._join(stages, module)

    def _join(self, stages: dict[str, TensorRef], module: str) -> None:
        """Add the heads side by side, where nothing projects them."""
        concat = self._onward(stages["context"], module)
        if concat.id != stages["context"].id:
            stages["concat"] = concat

    @cached_property
    def _calls_of_products(self) -> frozenset[int]:
        """The calls that multiply matrices: what moves a factor for one belongs to it."""
        return frozenset(op.call for op in self.recording.ops if op.does("product"))

    def _onward(self, tensor: TensorRef, module: str, *, features_last: bool = False) -> TensorRef:
        """The end of a chain of moves that begins here and stays in the module; with `features_last`, of those moves
        that leave the last dimension where it is."""
        features = self.graph.dimensions.of(tensor)[-1:]
        while True:
            followers = [
                op
                for op in self.recording.consumers.get(tensor.id, ())
                if op.outputs
                and self.graph.moves(op)
                and inside(op.module, module)
                and op.output.id != tensor.id
                and op.call not in self._calls_of_products
            ]
            if len(followers) != 1 or followers[0].output.numel != tensor.numel or not tensor.numel:
                return tensor
            if features_last and self.graph.dimensions.of(followers[0].output)[-1:] != features:
                return tensor
            tensor = followers[0].output


def _elements(tensor: TensorRef) -> int:
    """Return how many elements a tensor has, those that it repeats counted once."""
    return prod(size for size, stride in zip(tensor.shape, tensor.stride, strict=True) if stride)


def _without_sinks(weights: TensorRef, dim: int, path: tuple[Op, ...]) -> TensorRef:
    """The weights without those of the sinks, which are cut off before the values are averaged."""
    for op in path:
        kept = len(op.output.shape) == len(weights.shape) and op.output.shape[dim] == weights.shape[dim]
        if op.does("cuts") and op.output.numel < weights.numel and not kept:
            return next((t for t in op.outputs if t.numel < weights.numel), op.output)
    return weights
