"""Describe each stage of an attention from its recording: its formula, its cost, and whether its memory is new.

A stage is a tensor of an attention with a name, e.g. `q_heads`; `pattern.STAGES` has all names. A side is what a
projection makes: `query`, `key`, `value` or `output`. The way to a stage are the operations from the stages that it is
made of. `Attention` explains the turns of a loop over heads, and the pieces of an attention that is computed in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.attention import Attention
from ..graph.axis import setting
from ..graph.dataflow import Graph, made_of
from ..graph.gates import gates_of
from ..graph.products import Joint
from ..graph.unlike import power_of
from ..record.ops import Op, TensorRef
from ..reports.trace import Cache, Memory, QKNorm
from .inner_steps import InnerSteps, OperandSteps, bias_steps
from .operand_path import weights_of
from .pattern import dims_of, rearrangement
from .score_formulas import joint_text, masked_text, scale_text, weighed_text
from .weight_order import reads_as_stored

_INPUTS = ("query", "key", "value")
_PROJECTED = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "output": "output"}
"""Stage to the side whose projection makes it."""
_SIDE_OF_HEADS = {"q_heads": "query", "k_heads": "key", "v_heads": "value"}
"""Stage to the side whose projection it splits into heads."""
_MADE_OF: dict[str, tuple[str, ...]] = {
    "q_heads": ("q_proj", "query"),
    "k_heads": ("k_proj", "key"),
    "v_heads": ("v_proj", "value"),
    "scores": ("q_heads", "k_heads"),
    "masked_scores": ("scores", "q_heads", "k_heads"),
    "weights": ("masked_scores", "scores"),
    "context": ("weights", "v_heads"),
    "concat": ("context",),
    "output": ("concat", "context"),
}
"""Stage to the stages that it may be made of. The first of them that the attention has is its source."""
_REORDERS = ("flip", "roll", "index_select")
"""Copies in another order of one axis, which no pattern of axes shows."""


class StageFacts:
    """Formula, floating-point operations and memory of the stages of one attention."""

    def __init__(
        self,
        graph: Graph,
        attention: Attention,
        axes: dict[str, str],
        inner: InnerSteps | None = None,
        group: int = 1,
    ) -> None:
        """Take one attention of a recording and the names that were found for it.

        Args:
            graph: the recording with its dataflow.
            attention: an attention in it.
            axes: stage to its axes, e.g. `batch query (heads head_dim)`. Only formulas need them.
            inner: the norms, rotations and caches between projections and scores; by default none.
            group: the number of query heads that share a key head.
        """
        self._graph = graph
        self._attention = attention
        self._axes = axes
        self._inner = inner or InnerSteps()
        self._group = group

    # -- formulas -----------------------------------------------------------------------------------------------------

    def formula(self, stage: str, *, brief: bool = False) -> str:
        """Return the formula of a stage with the numbers of the run, or an einops pattern where elements only move.

        Examples are `q_heads · k_headsᵀ / √64` and `batch query (heads head_dim) -> batch heads query head_dim`. A
        `brief` formula says `split` or `merge` instead of the pattern.
        """
        if stage in _INPUTS:
            return self._input(stage)
        if stage in _PROJECTED:
            return self._projection(stage)
        if stage == "scores":
            return self._scores()
        if stage == "masked_scores":
            return masked_text("scores", bias_steps(self._attention, self._inner.added))
        if stage == "weights":
            return self._weights(brief=brief)
        if stage == "context":
            return self._context()
        text = self._rearranged(stage, brief=brief)
        if self.joins_projections(stage):
            return f"{text}, joined with those of another projection"
        return text

    def _input(self, stage: str) -> str:
        """Return where a query, key or value comes from.

        `the query` if it is the same tensor, else as `_origin`.
        """
        stages = self._attention.stages
        tensor = stages[stage]
        for earlier in _INPUTS[: _INPUTS.index(stage)]:
            if earlier in stages and stages[earlier].id == tensor.id:
                return f"the {earlier}"
        return self._origin(tensor)

    def _origin(self, tensor: TensorRef) -> str:
        """Return where a tensor that is made of no stage comes from.

        `given` for an input of the forward or what depends on one, e.g. the result of another layer; `the parameter
        latents`; `the buffer table`.
        """
        recording = self._graph.recording
        if self._graph.comes_from_inputs(tensor):
            return "given"
        storage = self._graph.before_moves(tensor).storage
        for parameter in recording.parameters:
            if parameter.tensor.storage == storage:
                return f"the parameter {parameter.name}"
        for buffer in recording.buffers:
            if buffer.tensor.storage == storage:
                return f"the buffer {buffer.name}"
        if tensor.id in self._graph.learned:
            return "computed from parameters"
        return "computed from no input"

    def _projection(self, stage: str) -> str:
        """Return the formula of a projection, `query · W_qᵀ + b_q`, with low-rank projections and a cache before it.

        Example: `(cache (12) + key, through 1 down-projection (1)) · W_kᵀ`.
        """
        side = _PROJECTED[stage]
        letter = side[0]
        op = self._attention.projections[side]
        source = self._projected_source(side, op)
        low_rank = len(self._attention.earlier.get(side, ()))
        if low_rank:
            source += f", through {low_rank} {_counted('down-projection', low_rank)}"
        cache = self._cache_before(stage)
        if cache is not None:
            source = f"(cache ({cache.past}) + {source} ({cache.new}))"
        bias = f" + b_{letter}" if self._adds_bias(stage, op) else ""
        transposed = "" if reads_as_stored(self._graph, op) else "ᵀ"
        return f"{source} · W_{letter}{transposed}{bias}"

    def _projected_source(self, side: str, op: Op) -> str:
        """Return the stage that a projection reads; `a part of query` if the input is split before its projection."""
        attention = self._attention
        if side == "output":
            return "concat" if "concat" in attention.stages else "context"
        if attention.earlier or attention.pieces or side not in attention.stages:
            return side
        if self._graph.projected(op).numel < attention.stages[side].numel:
            return f"a part of {side}"
        return side

    def _adds_bias(self, stage: str, op: Op) -> bool:
        """Return whether a projection has a bias; that of the output may be added by a later operation."""
        if self._graph.has_bias(op):
            return True
        if stage != "output":
            return False
        last = self._graph.recording.producer(self._attention.stages[stage])
        return last is not None and self._graph.adds_bias(last)

    def _cache_before(self, stage: str) -> Cache | None:
        """Return the cache before the projection to `k_proj` or `v_proj`, e.g. of latents; None if it comes after.

        If the projected stage has the keys of all calls, they were cached before their projection.
        """
        cache = self._steps_to(f"{stage[0]}_heads").cache
        if cache is None or not cache.past:
            return None
        keys_of_all_calls = cache.past + cache.new + cache.empty
        return cache if self._keys_in(stage) == keys_of_all_calls else None

    def _steps_to(self, stage: str) -> OperandSteps:
        """Return the norm, the rotation and the cache on the way to `q_heads`, `k_heads` or `v_heads`."""
        return self._inner.operands.get(stage, OperandSteps())

    def _keys_in(self, stage: str) -> int | None:
        """Return the number of keys in a stage, e.g. `batch key embed`; None if no dimension has keys alone."""
        dims = dims_of(self._axes[stage])
        if ["key"] not in dims:
            return None
        return self._attention.stages[stage].shape[dims.index(["key"])]

    def _scores(self) -> str:
        """Return the formula of the scores: `q_heads · k_headsᵀ / √64`."""
        attention = self._attention
        product = attention.score_product
        if isinstance(product, Joint):
            return joint_text(self._graph, product, key_first=attention.key_first)
        return f"q_heads · k_headsᵀ{scale_text(attention.scores_scale)}"

    def _weights(self, *, brief: bool) -> str:
        """Return the formula of the weights: `softmax(scores)`, or in brief `softmax` where scores were masked."""
        attention = self._attention
        scores = self._name_of_last_scores()
        if attention.weighing:
            return weighed_text(self._graph, attention, scores)
        softmax = "softmax over the queries" if attention.over_queries else "softmax"
        if brief and scores == "masked_scores":
            return softmax
        return f"{softmax}({self._softmaxed(scores)})"

    def _name_of_last_scores(self) -> str:
        """Return the name of the scores that the weights are made of."""
        return "masked_scores" if "masked_scores" in self._attention.stages else "scores"

    def _softmaxed(self, scores: str) -> str:
        """Return the argument of the softmax, given the name of the scores: `scores`, `[mask(scores + bias), sinks]`.

        The code may change the exponentials before they are summed. The formula has the change of the scores that does
        the same: where an exponential is set to zero, a mask; where it is multiplied by a number, a bias.
        """
        attention = self._attention
        text = f"{scores}{scale_text(attention.weights_scale)}"
        if attention.has_factors:
            text = f"{text} + bias"
        masks_exponentials = attention.seen is not None and not bool(attention.seen.all())
        if masks_exponentials and scores == "scores":  # `masked_scores` are masked by name
            text = f"mask({text})"
        if attention.sinks is not None:
            text = f"[{text}, sinks]"
        return text

    def _context(self) -> str:
        """Return the formula of the context: `weights · v_heads`, `(dropout(weights), then mul) · v_heads`."""
        attention = self._attention
        if attention.divided is not None:
            return self._divided_context()
        weights = self._averaging_weights()
        changing = filter(self._changes_weights, attention.weights_path)
        changes = dict.fromkeys(op.base_name.rstrip("_") for op in changing)
        if not changes:
            return f"{weights} · v_heads"
        return f"({weights}, then {', '.join(changes)}) · v_heads"

    def _divided_context(self) -> str:
        """Return the formula of a context that is divided at the end: `exp(scores) · v_heads / Σ exp(scores)`.

        The divisor is `…` if it is not the sum of these exponentials: values that are all one then give no ones.
        """
        attention = self._attention
        exponentials = f"exp({self._name_of_last_scores()})"
        if any(op.index > attention.softmax.index for op in attention.masks):
            exponentials = f"mask({exponentials})"
        total = f"Σ {exponentials}" if attention.average_of_ones is None else "…"
        return f"{exponentials} · v_heads / {total}"

    def _averaging_weights(self) -> str:
        """Return the factor of the values: `weights`, `dropout(weights)`, `mix((weights · weights))`.

        `mix` is a projection that mixes the heads. `weights · weights` is the matrix product of the weights.
        """
        attention = self._attention
        text = "dropout(weights)" if self.drops() else "weights"
        power = 1
        for op in attention.weights_path:
            weights = attention.stages["weights"]
            power = max(power, power_of(self._graph, op.output, weights))
        if power > 1:
            text = f"({' · '.join([text] * power)})"
        return f"mix({text})" if attention.mixed_weights else text

    # -- what happens to the weights and the keys ---------------------------------------------------------------------

    def has_other_keys(self) -> bool:
        """Return whether the scores are joined with those of other keys, by a second product, and not with sinks."""
        sinks = self._attention.sinks
        if sinks is None:
            return False
        product = self._attention.score_product.op
        for tensor in sinks.inputs:
            products = self._products_behind(tensor)
            if products and product.index not in products:
                return True
        return False

    def _products_behind(self, tensor: TensorRef) -> set[int]:
        """Return the indices of the matrix products whose results are passed on to a tensor."""
        products: set[int] = set()
        for step in self._graph.back(tensor, self._graph.passes_on):
            op = self._graph.recording.producer(step.tensor)
            if op is not None and self._graph.product(op) is not None:
                products.add(op.index)
        return products

    def drops(self) -> bool:
        """Return whether there is a dropout between the softmax and the product with the values."""
        return any(map(self._is_dropout, self._attention.weights_path))

    def _is_dropout(self, op: Op) -> bool:
        """Return whether an operation is a dropout, or multiplies by a random mask as in a decomposed dropout."""
        if op.does("draws"):
            return True
        if not op.does("scales") or len(op.inputs) != 2:
            return False
        return any(map(self._is_drawn, op.inputs))

    def _is_drawn(self, tensor: TensorRef) -> bool:
        """Return whether a tensor was drawn at random, and at most changed elementwise after that."""
        op = self._graph.recording.producer(tensor)
        while op is not None and not op.does("draws"):
            if len(op.inputs) != 1 or not op.pointwise:
                return False
            op = self._graph.recording.producer(op.inputs[0])
        return op is not None

    def _changes_weights(self, op: Op) -> bool:
        """Return whether an operation changes the weights after the softmax, other than by dropout or mixing."""
        if not (_computes_elements(op) or _picks_by_index(op)):
            return False
        if any(mixing.op is op for mixing in self._attention.mixed_weights):
            return False
        # `rand_like(weights)` makes new numbers of the shape of the weights, and does not change them.
        if op.base_name.endswith("_like"):
            return False
        if op.outputs and self._is_drawn(op.output):
            return False
        return not self._is_dropout(op)

    def joins_projections(self, stage: str) -> bool:
        """Return whether heads are joined, along their positions, with those of a projection by another parameter."""
        projection = self._attention.projections.get(_SIDE_OF_HEADS.get(stage, ""))
        if projection is None:
            return False
        of_projection = weights_of(self._graph, projection)
        for op in self._way_to(stage):
            if not _joins_positions(op):
                continue
            for tensor in op.inputs:
                others = self._projections_behind(tensor)
                if others and all(of_projection.isdisjoint(weights_of(self._graph, other)) for other in others):
                    return True
        return False

    def _projections_behind(self, tensor: TensorRef) -> list[Op]:
        """Return the nearest projections that a tensor comes from."""
        projections: list[Op] = []
        for step in self._graph.back(tensor, lambda op: not self._graph.is_projection(op)):
            op = self._graph.producer(step.tensor)
            if op is not None and self._graph.is_projection(op):
                projections.append(op)
        return projections

    # -- cost and memory ----------------------------------------------------------------------------------------------

    def flops(self, stage: str) -> int:
        """Return the floating-point operations of the stage's matrix products; a multiply-add counts as two.

        The cost of one product for several stages (a packed projection) is divided by their numbers of elements, or
        equally among stages that are the same tensor.
        """
        attention = self._attention
        if stage == "scores":
            return attention.score_product.flops
        if stage == "context":
            return attention.value_product.flops
        if stage == "output" and attention.summed:
            return sum(map(_product_flops, attention.summed))
        op = attention.projections.get(_PROJECTED.get(stage, ""))
        if op is None:
            return 0
        share = attention.stages[stage].numel / max(op.output.numel, 1)
        if stage == "output":
            # A rank that computes the whole product may keep a piece of it. The whole cost is that of the output.
            share = max(share, 1.0)
        flops = _product_flops(op) * share
        return round(flops / self._count_of_same_tensor(stage, op))

    def _count_of_same_tensor(self, stage: str, op: Op) -> int:
        """Return how many stages are the same tensor as this one, itself included, made by the same projection."""
        attention = self._attention
        tensor = attention.stages[stage]
        count = 0
        for name, side in _PROJECTED.items():
            if attention.projections.get(side) is not op:
                continue
            if name == stage or attention.stages.get(name) == tensor:
                count += 1
        return count

    def memory(self, stage: str) -> Memory:
        """Return how a stage got its memory: `input`, `view` of an earlier stage, `copy` of its elements, or `new`."""
        ops = [] if stage in _INPUTS else self._way_to(stage)
        if not ops:
            return "input"
        if any(map(_computes, ops)):
            return "new"
        if all(op.kind == "view" for op in ops):
            return "view"
        return "copy"

    def _way_to(self, stage: str) -> list[Op]:
        """Return the operations that make a stage of the stages before it, in order.

        Where an earlier stage is missing, the way begins with the projection that it would have come from.
        """
        attention = self._attention
        sources = self._sources_of(stage)
        projection = attention.projections.get(_SIDE_OF_HEADS.get(stage, ""))
        ops: dict[int, Op] = {}
        queue = [attention.stages[stage]]
        while queue:
            tensor = queue.pop()
            op = self._graph.recording.producer(tensor)
            if op is None or op.index in ops or tensor.id in sources:
                continue
            ops[op.index] = op
            if self._continues_through(op, projection):
                queue += op.inputs
        return [ops[index] for index in sorted(ops)]

    def _sources_of(self, stage: str) -> set[int]:
        """Return the ids of the tensors that a stage may be made of, in all turns of a loop where it joins them."""
        attention = self._attention
        turns = [attention]
        if stage == "concat" or attention.pieces:
            turns += attention.turns
        sources: set[int] = set()
        for turn in turns:
            for name in (*_MADE_OF.get(stage, ()), *_INPUTS):
                if name in turn.stages:
                    sources.add(turn.stages[name].id)
        return sources

    def _continues_through(self, op: Op, projection: Op | None) -> bool:
        """Return whether what makes the inputs of an operation is on the way too: not if it is a projection.

        Exceptions are projections after that of the side, and products with one matrix for each head.
        """
        if projection is not None and op.index > projection.index:
            return True
        return self._graph.is_by_head(op) or not self._graph.is_projection(op)

    # -- stages that move elements ------------------------------------------------------------------------------------

    def _rearranged(self, stage: str, *, brief: bool) -> str:
        """Return how a stage rearranges its source, with what is computed, joined or repeated on the way.

        Examples for `k_heads`: `batch key (heads head_dim) -> batch heads key head_dim`, `rotary(k_proj in heads)`.
        """
        stages = self._attention.stages
        present = [name for name in _MADE_OF[stage] if name in stages]
        if not present:
            return self._origin(stages[stage])
        source = present[0]
        ops = self._way_to(stage)
        if stage == "concat":
            joined = self._joined_contexts(source, ops)
            if joined is not None:
                return joined
        computed = self._computed(stage, source, ops)
        steps = self._steps_to(stage)
        if computed or steps != OperandSteps():
            return self._computed_heads(stage, source, steps, computed, brief=brief)
        moved = self._moved(source, stage, brief=brief)
        return moved + self._added(source, stage, brief=brief)

    def _joined_contexts(self, source: str, ops: Sequence[Op]) -> str | None:
        """Return what the context is joined with in `concat`; None if `concat` is this context alone.

        Example: `contexts of 4 heads side by side` if each turn of a loop gives the context of one head, `batch query
        head_dim`.
        """
        attention = self._attention
        if attention.branches:
            return f"contexts of {len(attention.branches)} heads side by side"
        before = attention.stages[source].numel
        after = attention.stages["concat"].numel
        joins = [op for op in ops if op.does("joins")]
        writes = [op for op in ops if op.kind == "write"]
        if after <= before or not (joins or writes):
            return None
        is_joined_alike = all(len({tensor.shape for tensor in op.inputs}) <= 1 for op in joins)
        if not is_joined_alike or (not joins and len(writes) == 1):
            # What has another shape is no context; nor is what else is in memory that is written once.
            return "context in heads, beside other elements"
        parts = "ranks" if any(op.is_collective for op in ops) else "attentions"
        return f"contexts of {after // max(before, 1)} {parts} side by side"

    def _computed(self, stage: str, source: str, ops: Sequence[Op]) -> list[str]:
        """Return the names of what is computed on the way from its source to a stage, in order, each once.

        Example: `rms_norm`, `rotary` for keys that are normed and then rotated.
        """
        attention = self._attention
        turns = (attention, *attention.turns) if attention.pieces else (attention,)
        sources = [turn.stages[source] for turn in turns]
        derived = made_of({tensor.id for tensor in sources}, ops)
        names: dict[int, str] = {}
        for op in ops:
            # Operations that make positions and masks do not read the source, and are skipped.
            reads_source = any(tensor.id in derived for tensor in op.inputs)
            if reads_source and _has_a_name(op):
                names[op.index] = op.base_name
        names.update(self._steps_to(stage).names)
        for gate in gates_of(self._graph, sources, ops):
            names[gate.op.index] = gate.name
        in_order = dict.fromkeys(names[index] for index in sorted(names))
        return [name for name in in_order if name]

    def _moved(self, source: str, stage: str, *, brief: bool) -> str:
        """Return how elements only move from a source to a stage.

        An einops pattern, e.g. `batch query (heads head_dim) -> batch heads query head_dim`, or in brief a word for it.
        `k_proj in heads` if no pattern says it, and the source's own name if nothing moves.
        """
        stages = self._attention.stages
        before, after = stages[source], stages[stage]
        left, right = self._axes[source], self._axes[stage]
        if left == right or before.id == after.id:
            return source
        pattern = rearrangement(left, right, (before.shape, after.shape))
        if not pattern:
            return f"{source} in heads"
        return _split_or_merge(stage) if brief else pattern

    def _computed_heads(
        self,
        stage: str,
        source: str,
        steps: OperandSteps,
        computed: list[str],
        *,
        brief: bool,
    ) -> str:
        """Return what a stage is computed by from its source: norm, rotation, cache, repeated heads.

        Example: `cache (12) + rotary(k_proj in heads) (1), each head repeated 4 times`. A brief text lists the steps:
        `split, rms_norm, rotary`.

        Args:
            stage: the stage, in heads.
            source: the stage that it is made of.
            steps: the norm and the cache on the way.
            computed: the names of what is computed on the way, in order: `rms_norm`, `rotary`.
            brief: whether to list the steps only.
        """
        names = (_split_or_merge(stage), *computed)
        text = ", ".join(names) if brief else _applied(source, steps.norm, computed)
        cache = steps.cache
        is_in_formula_of_source = self._cache_before(source) is not None
        if cache is not None and not is_in_formula_of_source:
            text += self._keys_of_others(stage, source, cache)
            text = _with_cache(text, cache)
        return text + self._repeated(stage, brief=brief)

    def _keys_of_others(self, stage: str, source: str, cache: Cache) -> str:
        """Return how many keys of this call are not of the source, e.g. those of global tokens; empty for none.

        Example: `, plus 2 further keys`.
        """
        keys = self._keys_in(source)
        if keys is None or keys >= cache.new:
            return ""
        more = cache.new - keys
        return f", plus {more} further {_counted(_position_word(stage), more)}"

    def _added(self, source: str, stage: str, *, brief: bool) -> str:
        """Return what a stage has more than its source: keys of the layer's own, repeated heads; empty for nothing.

        Examples: `, plus 1 appended key`, `, each head repeated 4 times`, `, gathered for each query`.
        """
        names = _axis_names_in(self._axes[stage])
        if stage in ("k_heads", "v_heads") and "query" in names:
            return ", gathered for each query"
        before, after = self._keys_in(source), self._keys_in(stage)
        # More keys are no keys of the layer's own if windows overlap, or if another projection made them.
        has_keys_of_input = "windows" in names or self.joins_projections(stage)
        if before is None or after is None or has_keys_of_input or after <= before:
            return self._repeated(stage, brief=brief)
        return f", plus {self._added_positions(source, stage, after - before)}"

    def _added_positions(self, source: str, stage: str, more: int) -> str:
        """Return how many keys or values are added, and where: `2 prepended keys`, `1 appended key`.

        They are called appended if they are not seen to be concatenated, e.g. if they are written into memory.
        """
        word = _counted(_position_word(stage), more)
        first, last = self._joined_positions(source, stage)
        if first + last != more or not first:
            return f"{more} appended {word}"
        if not last:
            return f"{more} prepended {word}"
        return f"{more} {word}, {first} prepended and {last} appended"

    def _joined_positions(self, source: str, stage: str) -> tuple[int, int]:
        """Return how many positions are joined before and after those of the source, by concatenations."""
        ops = self._way_to(stage)
        derived = made_of({self._attention.stages[source].id}, ops)
        first = last = 0
        for op in ops:
            if op.base_name != "cat":
                continue
            places = [place for place, tensor in enumerate(op.inputs) if tensor.id in derived]
            if not places or len(places) == len(op.inputs):
                continue
            dim = setting(op, 1, "dim", 0)
            sizes = [tensor.shape[dim] for tensor in op.inputs]
            first += sum(sizes[: places[0]])
            last += sum(sizes[places[-1] + 1 :])
        return first, last

    def _repeated(self, stage: str, *, brief: bool) -> str:
        """Return how often each key or value head is repeated for its query heads; empty if it is not.

        Without `heads` or `group` among the axes of the stage, there is no axis along which heads are repeated.
        """
        if self._group < 2 or stage not in ("k_heads", "v_heads"):
            return ""
        if _axis_names_in(self._axes[stage]).isdisjoint(("heads", "group")):
            return ""
        return f", ×{self._group}" if brief else f", each head repeated {self._group} times"


# -- texts ------------------------------------------------------------------------------------------------------------


def _split_or_merge(stage: str) -> str:
    """Return the word for the rearrangement to a stage."""
    return "merge" if stage == "concat" else "split"


def _applied(source: str, norm: QKNorm | None, computed: list[str]) -> str:
    """Return what is computed of a source: `rotary(rms_norm(k_proj in heads))`, `k_proj in heads, then mul, add`."""
    text = f"{source} in heads"
    norm_name = "" if norm is None else f"{norm.kind}_norm"
    if norm is not None and norm.over == "all" and computed[:1] == [norm_name]:
        # A norm over the features of all heads comes before the heads are split, so it is inside.
        text = f"{norm_name}({source}) in heads"
        computed = computed[1:]
    functions = ("rotary", norm_name)
    is_list = False
    for name in computed:
        if name in functions:
            text = f"{name}({text})"
        elif is_list:
            text += f", {name}"
        else:
            text += f", then {name}"
        is_list = name not in functions
    return text


def _with_cache(text: str, cache: Cache) -> str:
    """Return the keys of a call beside those of the cache: `cache (12) + k_proj in heads (1) + empty (3)`."""
    if ", " in text:
        text = f"({text})"
    text = f"{text} ({cache.new})"
    if cache.past:
        text = f"cache ({cache.past}) + {text}"
    if cache.empty:
        text = f"{text} + empty ({cache.empty})"
    return text


def _position_word(stage: str) -> str:
    """Return what the positions of a stage by heads are: `value` or `key`."""
    return "value" if stage == "v_heads" else "key"


def _counted(word: str, number: int) -> str:
    """Return a word as it follows a number: `key` after 1, `keys` after 2."""
    return word if number == 1 else f"{word}s"


def _axis_names_in(pattern: str) -> set[str]:
    """Return the names of all axes in a pattern: batch, heads, key for `(batch heads) key`."""
    return {word for dim in dims_of(pattern) for word in dim}


# -- operations -------------------------------------------------------------------------------------------------------


def _has_a_name(op: Op) -> bool:
    """Return whether a formula names an operation: it computes numbers, or changes the order of elements."""
    return (_computes(op) or _reorders(op)) and not _fills_memory(op)


def _fills_memory(op: Op) -> bool:
    """Return whether an operation only copies into memory, or makes memory to copy into."""
    name = op.base_name.removeprefix("new_").removesuffix("_like")
    return name in ("copy_", "index_copy_", "index_put_", "empty", "zeros")


def _reorders(op: Op) -> bool:
    """Return whether an operation copies all elements in another order of one axis, e.g. with the heads reversed."""
    if op.base_name not in _REORDERS:
        return False
    return op.output.shape == op.inputs[0].shape


def _computes(op: Op) -> bool:
    """Return whether an operation computes new numbers from its inputs."""
    return op.kind in ("compute", "write") and bool(op.inputs)


def _computes_elements(op: Op) -> bool:
    """Return whether an operation computes new numbers, other than by a cast or a matrix product."""
    return op.kind == "compute" and op.base_name != "_to_copy" and not op.does("product")


def _picks_by_index(op: Op) -> bool:
    """Return whether an operation gathers elements by integers."""
    return op.does("gathers") and op.inputs[-1].dtype.startswith("int")


def _joins_positions(op: Op) -> bool:
    """Return whether an operation concatenates tensors along another dimension than the last, that of features."""
    if op.base_name != "cat":
        return False
    rank = len(op.output.shape)
    dim = setting(op, 1, "dim", 0) % rank
    return bool(dim < rank - 1)


def _product_flops(op: Op) -> int:
    """Return 2 · batch · n · k · m for `batch n k, batch k m -> batch n m`, as `torch.utils.flop_counter` counts."""
    if op.base_name != "convolution":
        summed = op.inputs[-2].shape[-1]  # the `k` of `batch n k`; the operand before it may be a bias
        return 2 * op.output.numel * summed
    # A weight is `out in …`: each output element sums over `in …`. Transposed it is `in out …`, and each input element
    # is added to `out …`.
    weight = op.inputs[1]
    is_transposed = setting(op, 6, "transposed", False)
    positions = op.inputs[0] if is_transposed else op.output
    summed = weight.numel // max(weight.shape[0], 1)
    return 2 * positions.numel * summed
