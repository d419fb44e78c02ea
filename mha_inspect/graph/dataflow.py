"""Walk the dataflow of a recording, and say how each operation treats scores, weights and heads.

A walk back from the input of a softmax follows the axis of the heads to the product of queries and keys:

>>> import torch
>>> from mha_inspect.record.recorder import Recorder
>>> q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)  # batch heads position head_dim
>>> recorder = Recorder(None)
>>> recorder.take_inputs({"q": q, "k": k})
>>> with recorder:
...     weights = (q @ k.transpose(-1, -2) / 2).softmax(-1)
>>> graph = Graph(recorder.finish(weights))
>>> (softmax,) = graph.softmaxes.values()
>>> for step in graph.back(softmax.masked, graph.passes_on):
...     op, dims = graph.recording.producer(step.tensor), graph.dimensions.of(step.tensor)
...     print(op.base_name, op.output.shape, [[atom.size for atom in dim] for dim in dims])
div (2, 3, 5, 7) [[2], [3], [5], [7]]
_unsafe_view (2, 3, 5, 7) [[2], [3], [5], [7]]
bmm (6, 5, 7) [[2, 3], [5], [7]]

The first dimension of bmm is (batch heads). torch agrees: matrix 1 · 3 + 2 has the scores of batch item 1, head 2.

>>> scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
>>> torch.allclose((scores[1 * 3 + 2] / 2).softmax(-1), weights[1, 2], atol=1e-5)
True
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from ..record.ops import Named, Op, Recording, TensorRef
from ..record.tensors import uncollected
from .axis import setting
from .computed_weights import computed_weights
from .dimensions import Axis, Dimensions, wide
from .part import Part, parts_behind, whole
from .products import Product, product_of
from .softmax import Softmax, softmax_of

_FAR = 60
"""Steps after which a walk gives up. Every attention is shorter."""
_INDICES = ("int64", "int32")
"""Dtypes of indices: an index has no numbers of the tensors that it was computed from."""
_NORM = re.compile(r"(?:batch|group|layer|rms)_norm")
"""The kind of a norm in the name of its operation."""
_LINEAR = ("neg", "add", "sub", "rsub", "positive", "conj")
"""Pointwise operations of one tensor that are linear."""


class Step(NamedTuple):
    """A tensor that a walk visited, and the operations on the way to it, the nearest to the start first."""

    tensor: TensorRef
    path: tuple[Op, ...] = ()


class Graph:
    """The dataflow of a recording, and the axes of its tensors."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._after_calls: dict[int, TensorRef] = {}

    @cached_property
    def dimensions(self) -> Dimensions:
        """The dimensions of every tensor, as axes."""
        with uncollected():
            return Dimensions(self.recording)

    @cached_property
    def _weights(self) -> frozenset[int]:
        """Ids of parameters, of buffers that are matrices, and of the weights that are computed from these alone."""
        buffers = (named.tensor for named in self.recording.buffers)
        ids = {*self.recording.parameter_names, *(tensor.id for tensor in buffers if len(tensor.shape) == 2)}
        for op in self.recording.ops:
            if op.inputs and (op.is_collective or op.kind != "write") and self._is_of(op, ids):
                weighs = op.pointwise or op.does("norms") or op.base_name == "_weight_norm_interface"
                if weighs or op.kind != "compute" or op.is_collective:
                    ids.update(tensor.id for tensor in (self.results(op) if op.is_collective else op.outputs))
        return frozenset(ids | computed_weights(self, ids, self._from_inputs))

    def _is_of(self, op: Op, weights: set[int]) -> bool:
        """Return whether an operation reads weights alone, or joins weights with constants, e.g. a bias with zeros."""
        if op.is_collective:  # it may also read the memory that it writes
            return op.inputs[-1].id in weights
        if op.does("joins"):
            weight = any(tensor.id in weights for tensor in op.inputs)
            return weight and not any(tensor.id in self._from_inputs for tensor in op.inputs)
        return op.inputs[0].id in weights and all(tensor.id in weights for tensor in op.inputs)

    @cached_property
    def _from_inputs(self) -> set[int]:
        """Ids of tensors that depend on an input of the run; parameters and buffers are no inputs."""
        named = {named.tensor.id for named in (*self.recording.parameters, *self.recording.buffers)}
        read = {tensor.id for op in self.recording.ops for tensor in op.inputs}
        outside = read - self.recording.producers.keys() - self.recording.scalars.keys() - named
        return made_of(outside, self.recording.ops) | self.recording.input_ids

    @cached_property
    def given_or_learned(self) -> set[int]:
        """Ids of tensors that depend on an input of the run or on a parameter."""
        return self._from_inputs | self.learned

    @cached_property
    def learned(self) -> set[int]:
        """Ids of parameters and of tensors that depend on one."""
        return made_of(self.recording.parameter_names, self.recording.ops)

    @cached_property
    def _from_each_input(self) -> dict[int, set[int]]:
        """Id of an input of the forward to the ids of all tensors that depend on it."""
        return {input_id: made_of({input_id}, self.recording.ops) for input_id in self.recording.input_ids}

    @cached_property
    def _reread(self) -> dict[int, list[TensorRef]]:
        """Index of a writing operation to the tensors that view the written memory, other than its own outputs."""
        tensors: dict[int, dict[int, TensorRef]] = {}
        for op in self.recording.ops:
            for tensor in op.inputs:
                writer = self.recording.producer(tensor)
                if writer is not None and all(output.id != tensor.id for output in writer.outputs):
                    tensors.setdefault(writer.index, {})[tensor.id] = tensor
        return {index: list(by_id.values()) for index, by_id in tensors.items()}

    @cached_property
    def _cut_apart(self) -> set[int]:
        """Ids of tensors that depend on joined tensors, or on written memory, of which a part is cut off."""
        ops = self.recording.ops
        views = (op for op in ops if op.kind == "view" and op.outputs and op.output.numel < op.inputs[0].numel)
        cut = {op.output.storage for op in views}
        made = (op for op in ops if op.outputs and (op.does("joins") or op.kind == "write"))
        return made_of((tensor.id for op in made if op.output.storage in cut for tensor in self.results(op)), ops)

    # -- what a tensor is ---------------------------------------------------------------------------------------------

    def is_weight(self, tensor: TensorRef) -> bool:
        """Return whether this is a parameter, at most viewed, copied, cast or scaled."""
        return tensor.id in self._weights

    def comes_from_inputs(self, *tensors: TensorRef) -> bool:
        """Return whether all of these depend on an input of the run."""
        return all(tensor.id in self._from_inputs for tensor in tensors)

    def inputs_of(self, tensor: TensorRef) -> set[int]:
        """Return the ids of the forward's inputs that a tensor depends on."""
        return {input_id for input_id, dependent in self._from_each_input.items() if tensor.id in dependent}

    def leads_to(self, start: TensorRef, end: TensorRef) -> bool:
        """Return whether `end` depends on `start`, by any operations."""
        return end.id in made_of({start.id}, self.recording.ops)

    @cached_property
    def features(self) -> set[Axis]:
        """The axes of the weights of all projections: the input features and the output features."""
        projections = filter(self.is_projection, self.recording.ops)
        weights = (tensor for op in projections for tensor in op.inputs if self.is_weight(tensor))
        return {atom for tensor in weights for dim in self.dimensions.of(tensor) for atom in dim}

    def parameters_in(self, storage: int) -> list[Named]:
        """Return the parameters in a memory: several if they are views of one tensor."""
        return self._parameters_by_storage.get(storage, [])

    @cached_property
    def _parameters_by_storage(self) -> dict[int, list[Named]]:
        by_storage: dict[int, list[Named]] = {}
        for named in self.recording.parameters:
            by_storage.setdefault(named.tensor.storage, []).append(named)
        return by_storage

    # -- what an operation is -----------------------------------------------------------------------------------------

    def is_projection(self, op: Op) -> bool:
        """Return whether this is a product or a convolution with a parameter; the projected tensor may be one too."""
        if not op.does("product", "convolution") or len(op.inputs) < 2 or self.is_by_channel(op):
            return False
        factors = op.inputs[-2:] if op.does("product") else op.inputs[1:2]
        return any(factor.id in self._weights for factor in factors)

    def is_by_channel(self, op: Op) -> bool:
        """Return whether this is a convolution of each channel by itself, which mixes positions and no features."""
        return op.does("convolution") and setting(op, 8, "groups", 1) == op.output.shape[1] == op.inputs[0].shape[1] > 1

    def is_by_table(self, op: Op) -> bool:
        """Return whether this multiplies by square matrices that are neither given nor learned, e.g. of a rotation.

        Neither their rows nor their columns are split into heads.
        """
        tables = [factor for factor in op.inputs[-2:] if factor.id not in self.given_or_learned]
        if not op.does("product") or len(tables) != 1 or self.is_weight(tables[0]):
            return False
        sides = [wide(dim) for dim in self.dimensions.of(tables[0])[-2:]]
        return len(sides) == 2 and len(set(tables[0].shape[-2:])) == 1 == max(map(len, sides))

    def is_by_head(self, op: Op) -> bool:
        """Return whether this multiplies heads by a matrix each, as absorbed projections of keys and values do."""
        return op.base_name == "bmm" and self.is_projection(op) and op.output.shape[0] > 1

    def projected(self, op: Op) -> TensorRef:
        """Return the tensor that a projection is applied to."""
        if op.base_name == "convolution":
            return op.inputs[0]
        left, right = op.inputs[-2:]
        return left if self.is_weight(right) else right

    @cached_property
    def products(self) -> dict[int, Product]:
        """Index of an operation to the product that it completes, for products without a parameter."""
        products: dict[int, Product] = {}
        for op in self.recording.ops:
            product = product_of(self.recording, op)
            if product is None or self.is_weight(product.left) or self.is_weight(product.right):
                continue
            # A multiplication with another reader, or with a table, is not a product written as mul and sum.
            alone = len(self.recording.consumers.get(product.multiply.output.id, ())) == 1
            if product.multiply is op or (alone and self.comes_from_inputs(product.left, product.right)):
                products[op.index] = product
        return products

    @cached_property
    def products_by_multiplication(self) -> dict[int, Product]:
        """Index of the operation that reads the factors to its product; the sum may be a later operation."""
        return {product.multiply.index: product for product in self.products.values()}

    def weight_of(self, op: Op) -> TensorRef:
        """Return the weight of a projection."""
        if op.base_name == "convolution":
            return op.inputs[1]
        return op.inputs[-1] if self.is_weight(op.inputs[-1]) else op.inputs[-2]

    def places_of_weight(self, op: Op) -> tuple[int, int]:
        """Return the dimension of a projection's weight that is summed over, and that of its output features."""
        if op.base_name == "convolution":
            return (0, 1) if setting(op, 6, "transposed", False) else (1, 0)
        if len(self.weight_of(op).shape) < 2:
            return -1, -1
        return (-1, -2) if self.projected(op) is op.inputs[-1] else (-2, -1)

    def norm_name(self, op: Op) -> str:
        """Return the kind of a norm that is one operation: `layer_norm`; empty for other operations."""
        found = _NORM.search(op.base_name) if self.norms_scores(op) else None
        return "" if found is None else found[0]

    def product(self, op: Op) -> Product | None:
        """Return the product without a parameter that an operation completes; None if it completes no such product."""
        return self.products.get(op.index)

    @cached_property
    def calls_of_products(self) -> frozenset[int]:
        """The calls that multiply matrices: operations that rearrange a factor in such a call belong to the product."""
        return frozenset(op.call for op in self.recording.ops if op.does("product"))

    def scale_of(self, op: Op) -> float | None:
        """Return the number that an operation multiplies by; None if it is unknown or the operation is no scaling."""
        if not op.does("scales"):
            return None
        divides = op.base_name.rstrip("_") == "div"
        numbers = [arg for arg in op.args if isinstance(arg, (int, float)) and not isinstance(arg, bool)]
        tensors = op.inputs[1:] if divides else op.inputs
        numbers += [number for tensor in tensors if (number := self._number(tensor)) is not None]
        if len(numbers) != 1 or numbers[0] == 0:
            return None
        return 1 / float(numbers[0]) if divides else float(numbers[0])

    def _number(self, tensor: TensorRef) -> float | None:
        """Return the value of a tensor of one element; None if it is unknown."""
        op = self.recording.producer(tensor) if tensor.numel == 1 else None
        while op is not None and op.base_name == "pow":
            op = self.recording.producer(op.inputs[0])
        ones = 1.0 if op is not None and op.base_name in ("ones", "ones_like") else None
        return self.recording.scalars.get(tensor.id, ones)

    def is_scale(self, op: Op) -> bool:
        """Return whether this multiplies every element by one number."""
        return op.does("scales") and sum(tensor.numel > 1 for tensor in op.inputs) <= 1 and op.output.numel > 0

    def reduces(self, op: Op) -> bool:
        """Return whether this reduces features to scores: a projection, a sum, a mean, a norm or a distance."""
        return self.is_projection(op) or op.does("distances") or op.base_name in ("sum", "mean", "linalg_vector_norm")

    def bends(self, op: Op) -> bool:
        """Return whether this is a nonlinear function of one tensor, element by element."""
        name = op.base_name.rstrip("_")
        if name == "linalg_vector_norm":
            return True
        if op.kind != "compute" or not op.pointwise or name in _LINEAR or len({t.id for t in op.inputs}) > 1:
            return False
        squares = name == "mul" and len(op.inputs) == 2
        others = op.does("scales", "fills", "copies", "masks", "guards", "draws")
        return squares or op.does("bends", "norms") or not others

    @cached_property
    def softmaxes(self) -> dict[int, Softmax]:
        """Index of the operation that gives the weights (or exponentials that are divided later) to its softmax."""
        softmaxes = (softmax_of(self.recording, op) for op in self.recording.ops)
        return {softmax.op.index: softmax for softmax in softmaxes if softmax is not None}

    def moves(self, op: Op) -> bool:
        """Return whether this only views or copies elements, or adds up the ranks' parts of a tensor."""
        return moves(op)

    def norms_scores(self, op: Op) -> bool:
        """Return whether this is a norm as one operation, whose result has the shape of its input."""
        is_whole = bool(op.outputs and op.inputs) and op.output.shape == op.inputs[0].shape
        return op.kind == "compute" and is_whole and op.does("norms") and _NORM.search(op.base_name) is not None

    def passes_on(self, op: Op) -> bool:
        """Return whether scores pass through this as scores: viewed, masked, scaled, dropped or cast."""
        keeps_scores = op.kind != "compute" or op.pointwise or op.does("gathers", "passes_on", "fills_where")
        return keeps_scores and op.index not in self.softmaxes

    # -- walks --------------------------------------------------------------------------------------------------------

    def back(self, start: TensorRef, through: Callable[[Op], bool]) -> Iterator[Step]:
        """Yield the tensors that `start` was computed from, nearest first, through operations accepted by `through`."""
        part = whole(start) if start.id in self._cut_apart else None
        queue, visited = deque([(Step(start), part)]), {start.id: {part}}
        while queue:
            step, part = queue.popleft()
            yield step
            op = self.recording.producer(step.tensor)
            if op is None or len(step.path) >= _FAR or not through(op):
                continue
            for tensor, behind in self.parts_read(op, step.tensor, part):
                known = visited.setdefault(tensor.id, set())
                if behind not in known and tensor.dtype != "bool":
                    known.add(behind)
                    queue.append((Step(tensor, (*step.path, op)), behind))

    def parts_read(self, op: Op, result: TensorRef, part: Part | None) -> Iterator[tuple[TensorRef, Part | None]]:
        """Yield the inputs that a part of a result is made of, each with its own part; all for no part."""
        if part is None:
            yield from ((tensor, None) for tensor in op.inputs)
        else:
            yield from parts_behind(op, result, part)

    def forward(self, start: TensorRef, through: Callable[[Op], bool]) -> Iterator[tuple[Op, Step]]:
        """Yield the operations that read results of `start`, nearest first, with the step to the tensor they read."""
        writer = self.recording.producers.get(start.id, -1)
        queue = deque(Step(tensor) for tensor in (start, *self._reread.get(writer, ())))
        visited = {step.tensor.id for step in queue}
        while queue:
            step = queue.popleft()
            for op in self.recording.consumers.get(step.tensor.id, ()):
                yield op, step
                if len(step.path) < _FAR and through(op):
                    for tensor in self.results(op):
                        if tensor.id not in visited and tensor.dtype not in _INDICES:
                            visited.add(tensor.id)
                            queue.append(Step(tensor, (*step.path, op)))

    def results(self, op: Op) -> tuple[TensorRef, ...]:
        """Return the outputs of an operation, and the other tensors that view the memory that it wrote."""
        return *op.outputs, *self._reread.get(op.index, ())

    def before(self, tensor: TensorRef, passes: Callable[[Op], bool]) -> TensorRef:
        """Return the tensor behind successive operations that `passes` accepts, always from the first operand."""
        while (op := self.recording.producer(tensor)) is not None and passes(op):
            tensor = op.inputs[0]
        return tensor

    def before_call(self, op: Op, tensor: TensorRef) -> TensorRef:
        """Return the operand as it was given to the call of an operation, before the call rearranged it."""
        return self.before(tensor, lambda earlier: earlier.call == op.call and self.moves(earlier))

    def before_moves(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor before all views and copies."""
        return self.before(tensor, self.moves)

    def before_repeats(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor before it was repeated along any dimension; the tensor itself if it was not repeated."""
        once = tensor
        while (op := self.recording.producer(tensor)) is not None and op.inputs:
            source = op.inputs[0]
            if not (self.moves(op) or (op.pointwise and source.shape == tensor.shape)):  # e.g. scaled after the repeat
                break
            if op.base_name == "expand" or tensor.numel > source.numel:
                once = source
            tensor = source
        return once

    def before_flattening(self, tensor: TensorRef, module: str) -> TensorRef:
        """Return the tensor before the module flattened its rows, with the features unchanged."""
        return self.before(tensor, lambda op: op.module == module and _keeps_features(op))

    def after(self, tensor: TensorRef, counts: Callable[[Op], bool], passes: Callable[[Op], bool]) -> TensorRef:
        """Follow a tensor while exactly one counted operation reads it and passes; return the last result."""
        while True:
            readers = self.recording.consumers.get(tensor.id, ())
            counted = [op for op in readers if op.outputs and op.output.id != tensor.id and counts(op)]
            if len(counted) != 1 or not passes(counted[0]):
                return tensor
            tensor = counted[0].output

    def after_call(self, op: Op) -> TensorRef:
        """Return the result of the Python call around this operation: after views, copies and the bias."""
        if op.index not in self._after_calls:
            self._after_calls[op.index] = self.after(
                op.output,
                lambda reader: reader.call == op.call and reader.index > op.index,
                lambda reader: self.moves(reader) or self.adds_bias(reader),
            )
        return self._after_calls[op.index]

    def after_projection(self, op: Op) -> TensorRef:
        """Return the result of a projection with its bias, added up over ranks, before its features are split."""

        def passes(reader: Op) -> bool:
            return reader.module in modules and (self.adds_bias(reader) or _keeps_features(reader))

        made, modules = self.after_call(op), {op.module}
        if self._adds_ranks:
            moved = self.forward(made, lambda reader: reader.kind in ("view", "copy"))
            added = next((reader for reader, _ in moved if reader.does("adds_ranks") and reader.outputs), None)
            if added is not None:
                modules.add(added.module)  # a bias is added once, after the sum
                # torch waits, copies gloo's result, and cuts off the padding of uneven parts
                made = self.after(
                    added.output,
                    lambda reader: reader.module == added.module,
                    lambda reader: reader.does("cuts", "passes_on") or reader.base_name == "copy_",
                )
        return self.after(made, lambda reader: True, passes)

    @cached_property
    def _adds_ranks(self) -> bool:
        return any(op.does("adds_ranks") for op in self.recording.ops)

    def has_bias(self, op: Op) -> bool:
        """Return whether a projection adds a bias, itself or at the end of its call."""
        called = self.after_call(op)
        readers = [reader for end in (op.output, called) for reader in self.recording.consumers.get(end.id, ())]
        ends = [self.recording.producer(end) for end in (called, self.after_projection(op))]
        return len(op.inputs) == 3 or any(self.adds_bias(end) for end in (*ends, *readers) if end is not None)

    def adds_bias(self, op: Op) -> bool:
        """Return whether this adds a parameter along the last dimensions."""
        biases = (tensor for tensor in op.inputs if self.is_weight(tensor) and tensor.numel < op.output.numel)
        return op.base_name.rstrip("_") == "add" and len(op.inputs) == 2 and any(biases)


def moves(op: Op) -> bool:
    """Return whether this only views or copies elements, or adds up the ranks' parts of a tensor."""
    is_move = op.kind in ("view", "copy") or op.does("adds_ranks")
    return is_move and not op.does("joins") and bool(op.inputs)


def _keeps_features(op: Op) -> bool:
    """Return whether this only regroups the dimensions before the last."""
    before, after = op.inputs[0].shape if op.inputs else (), op.outputs[0].shape if op.outputs else ()
    return op.does("reshapes") and min(len(before), len(after)) > 1 and before[-1] == after[-1]


def made_of(ids: Iterable[int], ops: Iterable[Op]) -> set[int]:
    """Return these tensor ids, and the ids of all tensors that the operations, in order, compute from them.

    A tensor that is read from memory after one of these operations has written into it, e.g. a cache, is among them.
    """
    dependent = set(ids)
    written: dict[int, int] = {}  # storage to the id of the first tensor written there; a later look has a higher id
    for op in ops:
        read = [t.id for t in op.inputs if t.id in dependent or (written and t.id > written.get(t.storage, t.id))]
        if read:
            dependent.update(read)
            dependent.update([output.id for output in op.outputs])
            if op.kind == "write":
                written.setdefault(op.output.storage, op.output.id)
    return dependent


def inside(path: str, module: str) -> bool:
    """Return whether a module is the given module or inside it."""
    return not module or path == module or path.startswith(module + ".")
