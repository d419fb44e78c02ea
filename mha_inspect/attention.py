"""Find every attention in a recording by its dataflow: no class name and no source text is looked at.

From each softmax the walk goes back through mask and scale to the product that made the scores, and forward to the
product with the values; from the operands of those two products back to the projections, and forward to the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod

from .dimensions import Dimensions
from .ops import Op, Recording, Tensor

_PRODUCTS = {"bmm", "mm", "addmm", "baddbmm", "_addmm_activation"}
_SOFTMAXES = {"_softmax", "_safe_softmax"}
_NORMS = {
    "native_layer_norm",
    "native_group_norm",
    "_fused_rms_norm",
    "linalg_vector_norm",
    "mean",
    "sum",
    "var_mean",
    "pow",
}
_GATHERING = {"gather", "index", "index_select", "embedding"}
_JOINING = {"cat", "stack", "constant_pad_nd", "native_dropout", "repeat", "roll", "view_as_complex", "view_as_real"}
_SCALES: dict[str, Callable[[float], float]] = {"mul": lambda number: number, "div": lambda number: 1 / number}
_FAR = 60
"""Steps after which a walk gives up: attention is never that long."""


@dataclass(frozen=True)
class Found:
    """One scaled-dot-product computation, as it stands in a recording."""

    softmax: Op
    score_product: Op
    value_product: Op
    stages: dict[str, Tensor]
    """Stage name to the tensor it is, in the order of `stages.STAGES`; those that there are."""
    scale: float | None
    """What q·kᵀ is multiplied by before the softmax; None where it is a tensor whose number is not known."""
    softmax_dim: int
    key_first: bool
    """Whether the keys are the left operand of the product of scores."""
    masks: tuple[Op, ...]
    """The operations that add, or fill in, a mask or a bias."""
    projections: dict[str, Op] = field(default_factory=dict)
    """`query`, `key`, `value`, `output` to the product with the weight matrix that projects it."""

    @property
    def module(self) -> str:
        """Path of the module whose forward computes the scores."""
        return self.score_product.module


def find_attentions(recording: Recording) -> list[Found]:
    """Every attention of the recording, in the order in which they were computed."""
    graph = Graph(recording)
    found = [graph.attention(op, *softmax) for op in recording.ops if (softmax := graph.softmax(op)) is not None]
    return [attention for attention in found if attention is not None]


@dataclass(frozen=True)
class Step:
    """A tensor that a walk came to, and the operations that it passed, nearest to the start first."""

    tensor: Tensor
    path: tuple[Op, ...] = ()


class Graph:
    """Walks over the dataflow of a recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.dimensions = Dimensions(recording)

    # -- what an operation is -----------------------------------------------------------------------------------------

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether this is a parameter, moved or cast at most."""
        while (op := self.recording.producer(tensor)) is not None:
            if op.kind not in ("view", "copy") or not op.inputs:
                return False
            tensor = op.inputs[0]
        return tensor.id in self.recording.parameter_names

    def operands(self, op: Op) -> tuple[Tensor, Tensor] | None:
        """The two factors of a matrix product; None for any other operation."""
        return (op.inputs[-2], op.inputs[-1]) if op.base_name in _PRODUCTS and len(op.inputs) >= 2 else None

    def is_projection(self, op: Op) -> bool:
        """Whether this is a product, or a convolution, with a parameter."""
        if op.base_name == "convolution":
            return self.is_weight(op.inputs[1])
        factors = self.operands(op)
        return factors is not None and (self.is_weight(factors[0]) != self.is_weight(factors[1]))

    def is_product(self, op: Op) -> bool:
        """Whether this is a product of two tensors neither of which is a parameter."""
        factors = self.operands(op)
        return factors is not None and not any(map(self.is_weight, factors))

    def projected(self, op: Op) -> Tensor:
        """What a projection projects."""
        if op.base_name == "convolution":
            return op.inputs[0]
        left, right = self.operands(op) or op.inputs[:2]
        return right if self.is_weight(left) else left

    def scale_of(self, op: Op) -> float | None:
        """The number that an operation multiplies by; None where it does something else."""
        rule = _SCALES.get(op.base_name)
        if rule is None:
            return None
        numbers = [arg for arg in op.args if isinstance(arg, (int, float)) and not isinstance(arg, bool)]
        numbers += [self.recording.scalars[t.id] for t in op.inputs[1:] if t.id in self.recording.scalars]
        return rule(float(numbers[0])) if len(numbers) == 1 and numbers[0] != 0 else None

    def is_scale(self, op: Op) -> bool:
        """Whether this multiplies everything by one number."""
        return op.base_name in _SCALES and sum(t.numel > 1 for t in op.inputs) <= 1 and op.output.numel > 1

    def softmax(self, op: Op) -> tuple[Tensor, int] | None:
        """What a softmax was taken of, and over which dimension; also of one written out as exp over sum."""
        if op.base_name in _SOFTMAXES:
            return op.inputs[0], int(op.args[1]) % max(len(op.output.shape), 1)
        if op.base_name != "div" or len(op.inputs) != 2:
            return None
        above, below = (self.recording.producer(tensor) for tensor in op.inputs)
        if above is None or below is None or above.base_name != "exp":
            return None
        while below is not None and below.kind == "view":
            below = self.recording.producer(below.inputs[0])
        if below is None or below.base_name != "sum" or below.inputs[0].id != above.output.id or len(below.args) < 2:
            return None
        dims = below.args[1] if isinstance(below.args[1], tuple) else (below.args[1],)
        behind = self.recording.producer(above.inputs[0])
        shifted = behind is not None and behind.base_name == "sub" and behind.inputs[-1].numel < behind.output.numel
        return (behind.inputs[0] if behind is not None and shifted else above.inputs[0]), dims[0] % len(op.output.shape)

    # -- walks --------------------------------------------------------------------------------------------------------

    def back(self, start: Tensor, through: Callable[[Op], bool]) -> Iterator[Step]:
        """Tensors from which `start` was made, nearest first, passing operations that `through` lets pass."""
        queue, seen = [Step(start)], {start.id}
        while queue:
            step = queue.pop(0)
            yield step
            op = self.recording.producer(step.tensor)
            if op is None or len(step.path) >= _FAR or not through(op):
                continue
            for tensor in op.inputs:
                if tensor.id not in seen and tensor.dtype != "bool":
                    seen.add(tensor.id)
                    queue.append(Step(tensor, (*step.path, op)))

    def forward(self, start: Tensor, through: Callable[[Op], bool]) -> Iterator[tuple[Op, Step]]:
        """Operations that read what was made from `start`, nearest first, with the tensor that they read."""
        queue, seen = [Step(start)], {start.id}
        while queue:
            step = queue.pop(0)
            for op in self.recording.consumers.get(step.tensor.id, ()):
                yield op, step
                if len(step.path) < _FAR and through(op):
                    for tensor in op.outputs:
                        if tensor.id not in seen:
                            seen.add(tensor.id)
                            queue.append(Step(tensor, (*step.path, op)))

    def moves(self, op: Op) -> bool:
        """Whether this only moves elements about."""
        return op.kind in ("view", "copy") and op.base_name not in ("cat", "stack", "constant_pad_nd")

    def carries(self, op: Op) -> bool:
        """Whether scores and weights pass through this unharmed: moved, masked, scaled, dropped, cast."""
        return (
            op.kind != "compute" or op.pointwise or op.base_name in _GATHERING | _JOINING | {"masked_fill", "where"}
        ) and not self.is_softmax(op)

    def is_softmax(self, op: Op) -> bool:
        """Whether `softmax` finds one here."""
        return self.softmax(op) is not None

    def after_call(self, op: Op) -> Tensor:
        """What the call in Python returned that this operation is the heart of: its result, moved and biased."""
        tensor = op.output
        while True:
            followers = [
                f
                for f in self.recording.consumers.get(tensor.id, ())
                if f.call == op.call and f.index > op.index and f.output.id != tensor.id
            ]
            if len(followers) != 1 or not (self.moves(followers[0]) or self._adds_bias(followers[0])):
                return tensor
            tensor = followers[0].output

    def before_call(self, op: Op, tensor: Tensor) -> Tensor:
        """What was handed to that call: the operand before the call moved it."""
        while (behind := self.recording.producer(tensor)) is not None:
            if behind.call != op.call or not self.moves(behind):
                break
            tensor = behind.inputs[0]
        return tensor

    def before_moves(self, tensor: Tensor) -> Tensor:
        """Where elements come from that were only moved."""
        while (behind := self.recording.producer(tensor)) is not None and self.moves(behind):
            tensor = behind.inputs[0]
        return tensor

    def has_bias(self, op: Op) -> bool:
        """Whether a projection adds a bias, in itself or at the end of its call."""
        if len(op.inputs) == 3:
            return True
        followers = [f for step in (op.output, self.after_call(op)) for f in self.recording.consumers.get(step.id, ())]
        made = self.recording.producer(self.after_call(op))
        return any(self._adds_bias(f) for f in ([made] if made is not None else []) + followers)

    def _adds_bias(self, op: Op) -> bool:
        return op.base_name == "add" and len(op.inputs) == 2 and any(map(self.is_weight, op.inputs))

    # -- one attention ------------------------------------------------------------------------------------------------

    def attention(self, softmax: Op, masked: Tensor, dim: int) -> Found | None:
        """The attention around one softmax; None where it is a softmax of something else."""
        behind = self._score_product(masked)
        ahead = self._value_product(softmax.output)
        if behind is None or ahead is None:
            return None
        product, path = behind
        value_product, weights = ahead
        scores, masks = self._scores(product, path)
        left, right = self.operands(product) or product.inputs[:2]
        key_first = self._key_first(product, masked, dim)
        query, key = (right, left) if key_first else (left, right)
        factors = self.operands(value_product) or value_product.inputs[:2]
        value = factors[0] if factors[1].id == weights.id else factors[1]
        q_heads, q_scale = self._heads(product, query, transposed=key_first)
        k_heads, k_scale = self._heads(product, key, transposed=not key_first)
        v_heads, _ = self._heads(value_product, value, transposed=value.id == factors[0].id)
        stages = {"q_heads": q_heads, "k_heads": k_heads, "v_heads": v_heads}
        projections = self._project(stages, product.module)
        if not (masks and masks[0] is product):
            stages["scores"] = scores
        if masks:
            stages["masked_scores"] = masked
        stages["weights"] = softmax.output
        stages["context"] = self.after_call(value_product)
        self._combine(stages, projections, product.module)
        return Found(
            softmax=softmax,
            score_product=product,
            value_product=value_product,
            stages=stages,
            scale=_multiply([q_scale, k_scale, self._product_scale(product, path)]),
            softmax_dim=dim,
            key_first=key_first,
            masks=masks,
            projections=projections,
        )

    def _score_product(self, masked: Tensor) -> tuple[Op, tuple[Op, ...]] | None:
        """The product that made the scores, and the operations from it to the softmax, in the order they ran."""
        best: tuple[tuple[bool, int], Op, tuple[Op, ...]] | None = None
        for step in self.back(masked, self.carries):
            op = self.recording.producer(step.tensor)
            if op is not None and self.is_product(op):
                rank = (any(passed.base_name in _GATHERING for passed in step.path), len(step.path))
                if best is None or rank < best[0]:
                    best = (rank, op, tuple(reversed(step.path)))
        return None if best is None else best[1:]

    def _value_product(self, weights: Tensor) -> tuple[Op, Tensor] | None:
        """The product of weights and values, and the operand of it that is the weights."""
        for op, step in self.forward(weights, self.carries):
            if self.is_product(op):
                return op, step.tensor
        return None

    def _scores(self, product: Op, path: tuple[Op, ...]) -> tuple[Tensor, tuple[Op, ...]]:
        """The scores before any mask, and the operations that put a mask or a bias in."""
        scores = product.output
        masks = [product] if self._adds_mask(product) else []
        for op in path:
            if self._adds_mask(op):
                masks.append(op)
            elif not masks and op.base_name != "_to_copy":
                scores = op.output
        return scores, tuple(masks)

    def _adds_mask(self, op: Op) -> bool:
        if op.base_name in ("baddbmm", "addmm"):
            return bool(op.kwargs.get("beta", 1) != 0)
        if op.base_name in ("masked_fill", "masked_fill_", "where", "index_put_", "copy_"):
            return True
        return op.base_name in ("add", "add_", "sub", "sub_") and sum(t.numel > 1 for t in op.inputs) > 1

    def _product_scale(self, product: Op, path: tuple[Op, ...]) -> float | None:
        scales: list[float | None] = [float(product.kwargs.get("alpha", 1))]
        scales += [self.scale_of(op) for op in path if self.is_scale(op)]
        return _multiply(scales)

    def _key_first(self, product: Op, masked: Tensor, dim: int) -> bool:
        """Whether the softmax runs over the rows of the product, so that its left operand holds the keys."""
        rows, columns = self.dimensions.of(product.output)[-2:]
        over = set(self.dimensions.of(masked)[dim])
        return bool(over & set(rows)) and not over & set(columns)

    def _heads(self, product: Op, operand: Tensor, *, transposed: bool) -> tuple[Tensor, float | None]:
        """The operand as the implementation wrote it, before it was scaled, or transposed for the product alone."""
        scales: list[float | None] = [1.0]
        swapped = False
        tensor = operand
        while (op := self.recording.producer(tensor)) is not None:
            if op.call == product.call and self.moves(op):
                swapped = swapped or _swaps_last_two(op)
            elif self.is_scale(op):
                scales.append(self.scale_of(op))
            elif transposed and not swapped and _swaps_last_two(op):
                swapped = True
            else:
                break
            tensor = op.inputs[0]
        return tensor, _multiply(scales)

    def _project(self, stages: dict[str, Tensor], module: str) -> dict[str, Op]:
        """Add the projections and what they project, before the heads; return their products."""
        ends: dict[str, tuple[Op, tuple[Op, ...]]] = {}
        for name in ("query", "key", "value"):
            found = self._projection(stages[f"{name[0]}_heads"], module)
            if found is not None:
                ends[name] = found
        before: dict[str, Tensor] = {}
        for name, (op, _) in ends.items():
            source = self.before_call(op, self.projected(op))
            origin = self.before_moves(source)
            before[name] = origin if origin.id in self.recording.input_ids else source
        projected = {f"{name[0]}_proj": self._projected(name, ends) for name in ends}
        heads = dict(stages)
        stages.clear()
        stages.update(before)
        stages.update(projected)
        stages.update(heads)
        return {name: op for name, (op, _) in ends.items()}

    def _projection(self, heads: Tensor, module: str) -> tuple[Op, tuple[Op, ...]] | None:
        """The nearest projection behind a tensor of heads, and the operations from it to them, in order."""

        def through(op: Op) -> bool:
            return not self.operands(op) and (
                op.kind != "compute" or op.pointwise or op.base_name in _NORMS | _JOINING | _GATHERING
            )

        for step in self.back(heads, through):
            op = self.recording.producer(step.tensor)
            if op is not None and self.is_projection(op):
                crossed = any(passed.base_name in _NORMS for passed in step.path)
                if crossed and not _inside(op.module, module):
                    return None
                return op, tuple(reversed(step.path))
        return None

    def _projected(self, name: str, ends: dict[str, tuple[Op, tuple[Op, ...]]]) -> Tensor:
        """What a projection gives: the end of its call, or where it is shared, what is unpacked for this one alone."""
        op, path = ends[name]
        tensor = self.after_call(op)
        others = [ops for other, (product, ops) in ends.items() if other != name and product is op]
        if not others:
            return tensor
        shared = {passed.index for passed in path if all(passed in ops for ops in others)}
        own = [passed for passed in path if passed.index not in shared]
        # A split that hands a piece to each of them is one operation, and the first that they do not share afterwards
        # reads its piece.
        unpacked = self._piece(own, path, shared)
        if unpacked is not None and self._is_merged(unpacked, tensor):
            return unpacked
        return tensor

    def _piece(self, own: list[Op], path: tuple[Op, ...], shared: set[int]) -> Tensor | None:
        last = max((place for place, op in enumerate(path) if op.index in shared), default=-1)
        splitting = path[last] if last >= 0 and len(path[last].outputs) > 1 else None
        if splitting is not None and last + 1 < len(path):
            pieces = {tensor.id for tensor in splitting.outputs}
            return next((tensor for tensor in path[last + 1].inputs if tensor.id in pieces), None)
        return own[0].output if own and self.moves(own[0]) else None

    def _is_merged(self, piece: Tensor, whole: Tensor) -> bool:
        """Whether the heads of a piece are still in one dimension with their features, as in the whole."""
        return len(piece.shape) <= len(whole.shape)

    def _combine(self, stages: dict[str, Tensor], projections: dict[str, Op], module: str) -> None:
        """Add the heads side by side, and the output, after the context."""

        def through(op: Op) -> bool:
            residual = op.base_name in ("add", "add_") and sum(t.numel == op.output.numel for t in op.inputs) > 1
            inside = _inside(op.module, module)
            return (
                not self.operands(op)
                and not residual
                and (
                    op.kind != "compute"
                    or op.pointwise
                    or op.base_name in _JOINING
                    or (op.base_name in _NORMS and inside)
                )
            )

        for op, step in self.forward(stages["context"], through):
            if self.is_projection(op):
                projections["output"] = op
                stages["concat"] = self.before_call(op, step.tensor)
                stages["output"] = self._onward(self.after_call(op), module)
                return
        stages["concat"] = self._onward(stages["context"], module)
        if stages["concat"].id == stages["context"].id:
            del stages["concat"]

    def _onward(self, tensor: Tensor, module: str) -> Tensor:
        """The end of a chain of moves that begins here and stays in the module."""
        while True:
            followers = [
                op
                for op in self.recording.consumers.get(tensor.id, ())
                if self.moves(op) and _inside(op.module, module) and op.output.id != tensor.id and op.output.numel
            ]
            if len(followers) != 1 or followers[0].output.numel != tensor.numel:
                return tensor
            tensor = followers[0].output


def _multiply(scales: list[float | None]) -> float | None:
    known = [scale for scale in scales if scale is not None]
    return prod(known) if len(known) == len(scales) else None


def _swaps_last_two(op: Op) -> bool:
    shape = op.output.shape
    rank = len(shape)
    if rank < 2:
        return False
    if op.base_name == "t":
        return True
    if op.base_name == "transpose":
        return {int(op.args[1]) % rank, int(op.args[2]) % rank} == {rank - 1, rank - 2}
    if op.base_name == "permute":
        return [int(place) % rank for place in op.args[1]] == [*range(rank - 2), rank - 1, rank - 2]
    return False


def _inside(path: str, module: str) -> bool:
    """Whether a module is the given one or below it."""
    return not module or path == module or path.startswith(module + ".")
