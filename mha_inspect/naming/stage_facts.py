"""Describe each stage of an attention from its recording: its formula, its cost, and whether its memory is new."""

from __future__ import annotations

from ..graph.attention import Attention
from ..graph.axis import setting
from ..graph.dataflow import Graph, made_of
from ..graph.gates import gates_of
from ..graph.products import Joint
from ..graph.projections import reduction_of
from ..graph.values import power_of
from ..record.ops import Op, TensorRef
from ..reports.trace import Cache, Memory
from .inner_steps import InnerSteps, OperandSteps, bias_steps
from .pattern import dims_of, rearrangement
from .score_formulas import joint_text, masked_text, scale_text, weighed_text

_INPUTS = ("query", "key", "value")
_PROJECTED = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "output": "output"}
"""Stage to the projection that makes it."""
_BEFORE: dict[str, tuple[str, ...]] = {
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
"""Stage to the stages that it may be made of."""
_REORDERS = ("flip", "roll", "index_select")
"""Copies in another order of one axis, which no pattern of axes shows."""
_SIDES = {"q_heads": "query", "k_heads": "key", "v_heads": "value"}


class StageFacts:
    """Formula, operations and memory of the stages of one attention."""

    def __init__(
        self, graph: Graph, attention: Attention, axes: dict[str, str], inner: InnerSteps | None = None, group: int = 1
    ) -> None:
        """Take the axes of each stage, and the number of query heads that share a key head."""
        self._graph = graph
        self._attention = attention
        self._axes = axes
        self._inner = inner or InnerSteps()
        self._group = group

    def formula(self, stage: str, *, brief: bool = False) -> str:
        """Return the formula with the real numbers, or an einops pattern where elements only move.

        A `brief` formula says `split` or `merge` instead of the pattern.
        """
        attention, stages = self._attention, self._attention.stages
        scores = "masked_scores" if "masked_scores" in stages else "scores"
        if stage in _INPUTS:
            before = (name for name in _INPUTS[: _INPUTS.index(stage)] if name in stages)
            same = next((f"the {name}" for name in before if stages[name].id == stages[stage].id), "")
            source, ops = ("", ()) if same else reduction_of(self._graph, attention, stage)
            names = ", ".join(dict.fromkeys(op.base_name for op in ops))
            return same or (f"{source}, then {names}" if names else self._origin(stages[stage]))
        if stage in _PROJECTED:
            return self._projection(stage)
        if stage in ("scores", "masked_scores"):
            return self._scores(stage)
        if stage == "weights":
            over = " over the queries" if attention.over_queries else ""
            if brief and not attention.weighing and scores != "scores":
                return f"softmax{over}"
            if attention.weighing:
                return weighed_text(self._graph, attention, scores)
            return f"softmax{over}({self._softmaxed(scores)})"
        if stage != "context":
            joined = ", joined with those of another projection" if self.joins_projections(stage) else ""
            return self._rearranged(stage, brief=brief) + joined
        if attention.divided is not None:
            is_masked = any(op.index > attention.softmax.index for op in attention.masks)
            exponentials = f"mask(exp({scores}))" if is_masked else f"exp({scores})"
            total = f"Σ {exponentials}" if attention.average_of_ones is None else "…"
            return f"{exponentials} · v_heads / {total}"
        weights = "dropout(weights)" if self.drops() else "weights"
        powers = [power_of(self._graph, op.output, stages["weights"]) for op in attention.weights_path]
        if max(powers, default=0) > 1:
            weights = f"({' · '.join([weights] * max(powers))})"
        weights = f"mix({weights})" if attention.mixed_weights else weights
        others = dict.fromkeys(op.base_name.rstrip("_") for op in attention.weights_path if self._changes(op))
        return f"({weights}, then {', '.join(others)}) · v_heads" if others else f"{weights} · v_heads"

    def _softmaxed(self, scores: str) -> str:
        """Return what the softmax is computed of, with what happens to the exponentials before they are summed.

        An exponential that is set to zero has a score that is masked out: `softmax(mask(scores))`. One that is
        multiplied by a number has a score with its logarithm added: `softmax(scores + bias)`.
        """
        attention = self._attention
        text = f"{scores}{scale_text(attention.weights_scale)}"
        if attention.has_factors:
            text = f"{text} + bias"
        hides = attention.seen is not None and scores == "scores" and not bool(attention.seen.all())
        text = f"mask({text})" if hides else text
        return f"[{text}, sinks]" if attention.sinks is not None else text

    def flops(self, stage: str) -> int:
        """Return the floating-point operations of the stage's matrix products; a multiply-add counts as two.

        The cost of one product for several stages (a packed projection) is divided by their numbers of elements.
        """
        attention = self._attention
        op = attention.projections.get(_PROJECTED.get(stage, ""))
        if stage == "output" and attention.summed:
            return sum(map(_product_flops, attention.summed))
        if op is not None:
            tensor = attention.stages[stage]
            users = [s for s, side in _PROJECTED.items() if attention.projections.get(side) is op]
            equal = [name for name in users if name == stage or attention.stages.get(name) == tensor]
            part = tensor.numel / max(op.output.numel, 1)
            # Of the output a rank may keep a piece.
            part = max(part, 1.0) if stage == "output" else part
            return round(_product_flops(op) * part / len(equal))
        if stage == "scores":
            return attention.score_product.flops
        return attention.value_product.flops if stage == "context" else 0

    def memory(self, stage: str) -> Memory:
        """Return how a stage got its memory: `input`, `view` of an earlier stage, `copy` of its elements, or `new`."""
        made = self._made(stage) if stage not in _INPUTS else []
        if not made:
            return "input"
        return "new" if any(map(_computes, made)) else "view" if all(op.kind == "view" for op in made) else "copy"

    def _made(self, stage: str) -> list[Op]:
        """Return the operations between a stage and the stages that it is made of, the last first."""
        stages, turns = self._attention.stages, (self._attention, *self._attention.turns)
        turns = turns if stage == "concat" or self._attention.pieces else turns[:1]
        names = (*_BEFORE.get(stage, ()), *_INPUTS)
        before = {turn.stages[name].id for turn in turns for name in names if name in turn.stages}
        own = self._attention.projections.get(_SIDES.get(stage, ""))
        since = len(self._graph.recording.ops) if own is None else own.index
        made: dict[int, Op] = {}
        queue = [stages[stage]]
        while queue:
            tensor = queue.pop()
            op = self._graph.recording.producer(tensor)
            if op is not None and op.index not in made and tensor.id not in before:
                made[op.index] = op
                through = self._graph.is_by_head(op) or op.index > since or not self._graph.is_projection(op)
                queue += op.inputs if through else ()
        return [*made.values()]

    def _projection(self, stage: str) -> str:
        attention, source = self._attention, _PROJECTED[stage]
        letter, op = source[0], attention.projections[source]
        earlier = len(attention.earlier.get(source, ()))
        given = getattr(attention.stages.get(source), "numel", 0)
        if source == "output":
            source = "concat" if "concat" in attention.stages else "context"
        elif not (attention.earlier or attention.pieces) and self._graph.projected(op).numel < given:
            source = f"a part of {source}"  # the input itself was split, before any projection
        ends = [self._graph.recording.producer(attention.stages[stage])] if letter == "o" else []
        adds_bias = self._graph.has_bias(op) or any(end is not None and self._graph.adds_bias(end) for end in ends)
        bias = f" + b_{letter}" if adds_bias else ""
        through = f", through {earlier} down-projection{'s' if earlier > 1 else ''}" if earlier else ""
        read, cache = source + through, self._cache_before(stage)
        read = f"(cache ({cache.past}) + {read} ({cache.new}))" if cache is not None else read
        return f"{read} · W_{letter}ᵀ{bias}"

    def _cache_before(self, stage: str) -> Cache | None:
        """Return the cache of what a projection reads, e.g. of latents; None if the projected keys are cached."""
        cache, dims = self._inner.operands.get(f"{stage[0]}_heads", OperandSteps()).cache, dims_of(self._axes[stage])
        if cache is None or ["key"] not in dims:
            return None
        keys = self._attention.stages[stage].shape[dims.index(["key"])]
        return cache if cache.past and keys == cache.past + cache.new + cache.empty else None

    def _scores(self, stage: str) -> str:
        attention, scored = self._attention, self._attention.score_product
        if stage == "masked_scores":
            return masked_text("scores", bias_steps(attention, self._inner.added))
        if isinstance(scored, Joint):
            return joint_text(self._graph, scored, key_first=attention.key_first)
        return f"q_heads · k_headsᵀ{scale_text(attention.scores_scale)}"

    def has_other_keys(self) -> bool:
        """Return whether the scores are joined with scores of other keys from a second product, instead of sinks."""
        joined, graph = self._attention.sinks, self._graph
        for tensor in joined.inputs if joined is not None else ():
            makers = [graph.recording.producer(step.tensor) for step in graph.back(tensor, graph.passes_on)]
            products = [op.index for op in makers if op is not None and graph.product(op) is not None]
            if products and self._attention.score_product.op.index not in products:
                return True
        return False

    def drops(self) -> bool:
        """Return whether there is a dropout between the softmax and the product with the values."""
        return any(map(self._drops, self._attention.weights_path))

    def _drops(self, op: Op) -> bool:
        """Return whether an operation is a dropout, or multiplies by a random mask as in a decomposed dropout."""
        return op.does("draws") or (op.does("scales") and len(op.inputs) == 2 and any(map(self._is_drawn, op.inputs)))

    def _is_drawn(self, tensor: TensorRef) -> bool:
        """Return whether a tensor was drawn at random, and at most changed elementwise after that."""
        op = self._graph.recording.producer(tensor)
        while op is not None and not op.does("draws") and len(op.inputs) == 1 and op.pointwise:
            op = self._graph.recording.producer(op.inputs[0])
        return op is not None and op.does("draws")

    def joins_projections(self, stage: str) -> bool:
        """Return whether heads are joined, along their positions, with those of a projection by other weights."""
        graph, own = self._graph, self._attention.projections.get(_SIDES.get(stage, ""))
        if own is None:
            return False

        def weights_of(op: Op) -> set[int]:
            return {read.storage for read in op.inputs if graph.is_weight(read)}

        for op in self._made(stage):
            rank = len(op.output.shape)
            joins = op.base_name == "cat" and setting(op, 1, "dim", 0) % rank < rank - 1
            for read in op.inputs if joins else ():
                steps = graph.back(read, lambda passed: not graph.is_projection(passed))
                makers = [graph.recording.producer(step.tensor) for step in steps]
                known = [weights_of(maker) for maker in makers if maker is not None and graph.is_projection(maker)]
                if known and not any(weights & weights_of(own) for weights in known):
                    return True
        return False

    def _changes(self, op: Op) -> bool:
        """Return whether an operation changes the weights after the softmax, other than by dropout or mixing."""
        changes = op.kind == "compute" and op.base_name != "_to_copy" and not op.does("product")
        computes = changes or (op.does("gathers") and op.inputs[-1].dtype.startswith("int"))
        mixes = any(mixing.op is op for mixing in self._attention.mixed_weights)
        makes_noise = op.base_name.endswith("_like") or (bool(op.outputs) and self._is_drawn(op.output))
        return computes and not mixes and not makes_noise and not self._drops(op)

    def _origin(self, tensor: TensorRef) -> str:
        """Return where the first stage of a side comes from: `given` for an input or the result of another layer."""
        if self._graph.comes_from_inputs(tensor):
            return "given"
        source, recording = self._graph.before_moves(tensor), self._graph.recording
        for kind, named in (("parameter", recording.parameters), ("buffer", recording.buffers)):
            for each in named:
                if each.tensor.storage == source.storage:
                    return f"the {kind} {each.name}"
        if tensor.id in self._graph.learned:
            return "computed from parameters"
        return "computed from no input"

    def _rearranged(self, stage: str, *, brief: bool) -> str:
        """Return how a stage rearranges its source, with anything computed or repeated on the way."""
        stages, branches = self._attention.stages, self._attention.branches
        source = next((name for name in _BEFORE[stage] if name in stages), None)
        if source is None:
            return self._origin(stages[stage])
        made, before, after = self._made(stage)[::-1], stages[source].numel, stages[stage].numel
        joined = after > before and any(op.does("joins") or op.kind == "write" for op in made)
        if stage == "concat" and not branches and joined:
            joins = [op for op in made if op.does("joins")]
            alone = not joins and sum(op.kind == "write" for op in made) == 1
            if alone or any(read.shape != op.inputs[0].shape for op in joins for read in op.inputs):
                return f"context in heads, beside other {'positions' if alone else 'features'}"
        if stage == "concat" and (branches or joined):
            parts = "ranks" if any(op.is_collective for op in made) else "attentions"
            count, apart = (len(branches), "heads") if branches else (after // max(before, 1), parts)
            return f"contexts of {count} {apart} side by side"
        made.sort(key=lambda op: op.index)
        # Operations that make positions and masks do not read the source, and are skipped.
        turns = (self._attention, *(self._attention.turns if self._attention.pieces else ()))
        derived = made_of({turn.stages[source].id for turn in turns}, made)
        steps = self._inner.operands.get(stage, OperandSteps())
        changing = [op for op in made if _computes(op) or _reorders(op)]
        computing = [op for op in changing if any(read.id in derived for read in op.inputs)]
        ordered = {op.index: op.base_name for op in computing if not _moves_in_place(op)} | dict(steps.names)
        gated = [turn.stages[source] for turn in turns]
        ordered |= {gate.op.index: gate.name for gate in gates_of(self._graph, gated, made)}
        computed = [*filter(None, dict.fromkeys(ordered[index] for index in sorted(ordered)))]
        if computed or steps != OperandSteps():
            return self._in_heads(stage, source, steps, computed, brief=brief)
        left, right = self._axes[source], self._axes[stage]
        pattern = rearrangement(left, right, (stages[source].shape, stages[stage].shape))
        if brief and pattern:
            pattern = "merge" if stage == "concat" else "split"
        same = left == right or stages[source].id == stages[stage].id
        moved = source if same else pattern or f"{source} in heads"
        return moved + self._grown(source, stage, brief=brief)

    def _in_heads(self, stage: str, source: str, steps: OperandSteps, computed: list[str], *, brief: bool) -> str:
        """Return the norm, the rotation, the cache and the repeated heads on the way to a stage.

        A brief text lists them: `split, rms_norm, rotary`.
        """
        text, norm, last = f"{source} in heads", "" if steps.norm is None else f"{steps.norm.kind}_norm", ""
        for name in computed:
            if name == norm and text == f"{source} in heads" and steps.norm is not None and steps.norm.over == "all":
                text = f"{name}({source}) in heads"
            elif name in (norm, "rotary"):
                text = f"{name}({text})"
            else:
                text += f"{',' if last not in ('', norm, 'rotary') else ', then'} {name}"
            last = name
        text = ", ".join(("merge" if stage == "concat" else "split", *computed)) if brief else text
        cache = steps.cache
        if cache is not None and self._cache_before(source) is None:
            text += self._further_keys(stage, source, cache)
            past, empty = f"cache ({cache.past}) + " if cache.past else "", f" + empty ({cache.empty})"
            text = f"{past}{f'({text})' if ', ' in text else text} ({cache.new}){empty if cache.empty else ''}"
        return text + self._repeated(stage, brief=brief)

    def _further_keys(self, stage: str, source: str, cache: Cache) -> str:
        """Return how many keys of this call are not of the projection, e.g. those of global tokens; empty for none."""
        dims = dims_of(self._axes[source])
        own = self._attention.stages[source].shape[dims.index(["key"])] if ["key"] in dims else cache.new
        if own >= cache.new:
            return ""
        more = cache.new - own
        return f", plus {more} further {'value' if stage == 'v_heads' else 'key'}{'s' if more > 1 else ''}"

    def _grown(self, source: str, stage: str, *, brief: bool) -> str:
        """Return what was added on the way: keys that the layer appends, repeated heads; otherwise empty."""
        stages, (left, right) = self._attention.stages, (dims_of(self._axes[name]) for name in (source, stage))
        if stage in ("k_heads", "v_heads") and any("query" in dim for dim in right):
            return ", gathered for each query"
        # A key several times is one in overlapping windows, or one of another projection.
        windows = {"windows"} & {word for dim in right for word in dim} or self.joins_projections(stage)
        is_known = ["key"] in left and ["key"] in right and not windows
        more = stages[stage].shape[right.index(["key"])] - stages[source].shape[left.index(["key"])] if is_known else 0
        if more > 0:
            return f", plus {self._more(source, stage, more)}"
        return self._repeated(stage, brief=brief)

    def _more(self, source: str, stage: str, more: int) -> str:
        """Return how many keys or values the layer has of its own, and where: `2 prepended keys`, `1 appended key`."""
        word = f"{'value' if stage == 'v_heads' else 'key'}{'s' if more > 1 else ''}"
        first, last = self._beside(source, stage)
        if first + last != more or not first:
            return f"{more} appended {word}"
        if not last:
            return f"{more} prepended {word}"
        return f"{more} {word}, {first} prepended and {last} appended"

    def _beside(self, source: str, stage: str) -> tuple[int, int]:
        """Return how many positions are joined before and after those of the source, by concatenations."""
        made = sorted(self._made(stage), key=lambda op: op.index)
        derived = made_of({self._attention.stages[source].id}, made)
        first = last = 0
        for op in made:
            mine = [place for place, read in enumerate(op.inputs) if read.id in derived]
            if op.base_name != "cat" or not mine or len(mine) == len(op.inputs):
                continue
            dim = setting(op, 1, "dim", 0)
            first += sum(read.shape[dim] for read in op.inputs[: mine[0]])
            last += sum(read.shape[dim] for read in op.inputs[mine[-1] + 1 :])
        return first, last

    def _repeated(self, stage: str, *, brief: bool) -> str:
        """Return how often each key or value head is repeated for its query heads; empty if it is not."""
        words = {word for dim in dims_of(self._axes[stage]) for word in dim}
        if self._group < 2 or stage not in ("k_heads", "v_heads") or not words & {"heads", "group"}:
            return ""
        return f", ×{self._group}" if brief else f", each head repeated {self._group} times"


def _moves_in_place(op: Op) -> bool:
    """Return whether an operation only copies into memory, or makes memory to copy into."""
    made = op.base_name.removeprefix("new_").removesuffix("_like")
    return made in ("copy_", "index_copy_", "index_put_", "empty", "zeros")


def _reorders(op: Op) -> bool:
    """Return whether an operation copies all elements in another order of one axis, e.g. with the heads reversed."""
    return op.base_name in _REORDERS and op.output.shape == op.inputs[0].shape


def _product_flops(op: Op) -> int:
    """Return 2 · batch · n · k · m for `batch n k, batch k m -> batch n m`, as `torch.utils.flop_counter` counts."""
    if op.base_name == "convolution":
        weight = op.inputs[1]
        each = op.inputs[0] if setting(op, 6, "transposed", False) else op.output
        return 2 * each.numel * (weight.numel // max(weight.shape[0], 1))
    return 2 * op.output.numel * op.inputs[-2].shape[-1]


def _computes(op: Op) -> bool:
    """Return whether an operation computes new numbers from its inputs."""
    return op.kind in ("compute", "write") and bool(op.inputs)
