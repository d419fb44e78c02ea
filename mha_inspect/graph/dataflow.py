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
>>> (softmax,) = [op for op in graph.recording.ops if op.does("softmax")]
>>> for step in graph.back(softmax.inputs[0], graph.passes_on):
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
from .axis import plain_name, setting
from .computed_weights import computed_weights
from .dimensions import Axis, Dimensions, wide
from .ids import any_in, ids_of
from .labels import is_made_of
from .products import Product, product_of

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
        ids = set(self.recording.parameter_names)
        for named in self.recording.buffers:
            if len(named.tensor.shape) == 2:
                ids.add(named.tensor.id)
        for op in self.recording.ops:
            if not op.inputs or not self._is_of(op, ids):
                continue
            if op.is_collective:
                ids.update(ids_of(self.results(op)))
            elif op.kind != "write" and _keeps_weights(op):
                ids.update(ids_of(op.outputs))
        return frozenset(ids | computed_weights(self, ids, self._from_inputs))

    def _is_of(self, op: Op, weights: set[int]) -> bool:
        """Return whether an operation reads weights alone, or joins weights with constants, e.g. a bias with zeros."""
        if op.is_collective:  # it may also read the memory that it writes
            return op.inputs[-1].id in weights
        if not op.does("joins"):
            return all(tensor.id in weights for tensor in op.inputs)
        if any_in(op.inputs, self._from_inputs):
            return False
        return any_in(op.inputs, weights)

    @cached_property
    def _from_inputs(self) -> set[int]:
        """Ids of tensors that depend on an input of the run; parameters and buffers are no inputs."""
        recording = self.recording
        outside: set[int] = set()
        for op in recording.ops:
            outside.update(ids_of(op.inputs))
        outside -= recording.producers.keys()
        outside -= recording.scalars.keys()
        for named in (*recording.parameters, *recording.buffers):
            outside.discard(named.tensor.id)
        return made_of(outside, recording.ops) | recording.input_ids

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
                writer = self.producer(tensor)
                if writer is None or tensor.id in ids_of(writer.outputs):
                    continue
                tensors.setdefault(writer.index, {})[tensor.id] = tensor
        return {index: list(by_id.values()) for index, by_id in tensors.items()}

    @cached_property
    def _cut_apart(self) -> set[int]:
        """Ids of tensors that depend on joined tensors, or on written memory, of which a part is cut off."""
        ops = self.recording.ops
        cut: set[int] = set()
        for op in ops:
            if op.kind != "view" or not op.outputs:
                continue
            if op.output.numel < op.inputs[0].numel:
                cut.add(op.output.storage)
        joined: list[int] = []
        for op in ops:
            if not op.outputs or op.output.storage not in cut:
                continue
            if op.kind == "write" or op.does("joins"):
                joined += ids_of(self.results(op))
        return made_of(joined, ops)

    # -- what a tensor is ---------------------------------------------------------------------------------------------

    def producer(self, tensor: TensorRef) -> Op | None:
        """Return the operation that made a tensor; None for a tensor from outside the run."""
        return self.recording.producer(tensor)

    def readers(self, tensor: TensorRef) -> tuple[Op, ...]:
        """Return the operations that read a tensor, in order."""
        return self.recording.consumers.get(tensor.id, ())

    def is_weight(self, tensor: TensorRef) -> bool:
        """Return whether this is a parameter, at most viewed, copied, cast or scaled."""
        return tensor.id in self._weights

    def comes_from_inputs(self, *tensors: TensorRef) -> bool:
        """Return whether all of these depend on an input of the run."""
        return all(tensor.id in self._from_inputs for tensor in tensors)

    def is_activation(self, tensor: TensorRef) -> bool:
        """Return whether a tensor depends on an input; in a script, which makes its inputs, whether it is no weight."""
        return self.comes_from_inputs(tensor) or not (self.recording.input_ids or self.is_weight(tensor))

    def inputs_of(self, tensor: TensorRef) -> set[int]:
        """Return the ids of the forward's inputs that a tensor depends on."""
        return {input_id for input_id, dependent in self._from_each_input.items() if tensor.id in dependent}

    def leads_to(self, start: TensorRef, end: TensorRef) -> bool:
        """Return whether `end` depends on `start`, by any operations."""
        return end.id in made_of({start.id}, self.recording.ops)

    @cached_property
    def features(self) -> set[Axis]:
        """The axes of the weights of all projections: the input features and the output features."""
        axes: set[Axis] = set()
        for op in self.recording.ops:
            if not self.is_projection(op):
                continue
            for tensor in op.inputs:
                if self.is_weight(tensor):
                    axes.update(*self.dimensions.of(tensor))
        return axes

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
        if len(op.inputs) < 2:
            return False
        if op.does("product"):
            return any_in(op.inputs[-2:], self._weights)
        if not op.does("convolution") or self.is_by_channel(op):
            return False
        return op.inputs[1].id in self._weights

    def is_by_channel(self, op: Op) -> bool:
        """Return whether this is a convolution of each channel by itself, which mixes positions and no features."""
        if not op.does("convolution"):
            return False
        groups: int = setting(op, 8, "groups", 1)
        return groups == op.output.shape[1] == op.inputs[0].shape[1] > 1

    def is_by_table(self, op: Op) -> bool:
        """Return whether this multiplies by square matrices that are neither given nor learned, e.g. of a rotation.

        Neither their rows nor their columns are split into heads.
        """
        if not op.does("product"):
            return False
        tables = [factor for factor in op.inputs[-2:] if factor.id not in self.given_or_learned]
        if len(tables) != 1 or self.is_weight(tables[0]):
            return False
        table = tables[0]
        if len(table.shape) < 2:
            return False
        *_, height, width = table.shape
        *_, rows, columns = self.dimensions.of(table)
        are_whole = max(len(wide(rows)), len(wide(columns))) == 1
        return height == width and are_whole

    def is_by_head(self, op: Op) -> bool:
        """Return whether this multiplies heads by a matrix each, as absorbed projections of keys and values do."""
        if op.base_name != "bmm" or op.output.shape[0] < 2:
            return False
        return self.is_projection(op)

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
            if product.multiply is op or self._is_sum_of_products(product):
                products[op.index] = product
        return products

    def _is_sum_of_products(self, product: Product) -> bool:
        """Return whether a multiplication and a sum are a product: no other operation reads it, and it has no table."""
        readers = self.readers(product.multiply.output)
        return len(readers) == 1 and self.comes_from_inputs(product.left, product.right)

    @cached_property
    def products_by_multiplication(self) -> dict[int, Product]:
        """Index of the operation that reads the factors to its product; the sum may be a later operation."""
        return {product.multiply.index: product for product in self.products.values()}

    def weight_of(self, op: Op) -> TensorRef:
        """Return the weight of a projection."""
        if op.base_name == "convolution":
            return op.inputs[1]
        left, right = op.inputs[-2:]
        return right if self.is_weight(right) else left

    def places_of_weight(self, op: Op) -> tuple[int, int]:
        """Return the dimension of a projection's weight that is summed over, and that of its output features."""
        if op.base_name == "convolution":
            is_transposed = setting(op, 6, "transposed", False)
            return (0, 1) if is_transposed else (1, 0)
        if len(self.weight_of(op).shape) < 2:
            return -1, -1
        is_right_factor = self.projected(op) is not op.inputs[-1]
        return (-2, -1) if is_right_factor else (-1, -2)

    def norm_name(self, op: Op) -> str:
        """Return the kind of a norm that is one operation: `layer_norm`; empty for other operations."""
        if not self.norms_scores(op):
            return ""
        match = _NORM.search(op.base_name)
        return "" if match is None else match[0]

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
        divides = plain_name(op) == "div"
        numbers = [float(arg) for arg in op.args if type(arg) in (int, float)]
        for tensor in op.inputs[1:] if divides else op.inputs:
            number = self._number(tensor)
            if number is not None:
                numbers.append(number)
        if len(numbers) != 1 or numbers[0] == 0:
            return None
        return 1 / numbers[0] if divides else numbers[0]

    def _number(self, tensor: TensorRef) -> float | None:
        """Return the value of a tensor of one element; None if it is unknown."""
        if tensor.id in self.recording.scalars:
            return self.recording.scalars[tensor.id]
        if tensor.numel != 1:
            return None
        op = self.producer(tensor)
        while op is not None and op.base_name == "pow":
            op = self.producer(op.inputs[0])
        is_one = op is not None and op.base_name in ("ones", "ones_like")
        return 1.0 if is_one else None

    def is_scale(self, op: Op) -> bool:
        """Return whether this multiplies every element by one number."""
        if not op.does("scales") or not op.output.numel:
            return False
        return sum(tensor.numel > 1 for tensor in op.inputs) <= 1

    def reduces(self, op: Op) -> bool:
        """Return whether this reduces features to scores: a projection, a sum, a mean, a norm or a distance."""
        if op.does("distances") or op.base_name in ("sum", "mean", "linalg_vector_norm"):
            return True
        return self.is_projection(op)

    def bends(self, op: Op) -> bool:
        """Return whether this is a nonlinear function of one tensor, element by element."""
        name = plain_name(op)
        if name == "linalg_vector_norm":
            return True
        if op.kind != "compute" or not op.pointwise or name in _LINEAR:
            return False
        if len(ids_of(op.inputs)) > 1:
            return False
        if op.does("bends", "norms"):
            return True
        if name == "mul" and len(op.inputs) == 2:  # a square
            return True
        return not op.does("scales", "fills", "copies", "masks", "guards", "draws")

    def moves(self, op: Op) -> bool:
        """Return whether this only views or copies elements, or adds up the ranks' parts of a tensor."""
        return moves(op)

    def norms_scores(self, op: Op) -> bool:
        """Return whether this is a norm as one operation, whose result has the shape of its input."""
        if op.kind != "compute" or not op.does("norms"):
            return False
        if not op.outputs or not op.inputs:
            return False
        if op.output.shape != op.inputs[0].shape:
            return False
        return _NORM.search(op.base_name) is not None

    def passes_on(self, op: Op) -> bool:
        """Return whether scores pass through this as scores: viewed, masked, scaled, dropped or cast."""
        if op.does("softmax"):
            return False
        return op.kind != "compute" or op.pointwise or op.does("gathers", "passes_on", "fills_where")

    # -- walks --------------------------------------------------------------------------------------------------------

    def back(self, start: TensorRef, through: Callable[[Op], bool]) -> Iterator[Step]:
        """Yield the tensors that `start` was computed from, nearest first, through operations accepted by `through`."""
        is_cut = start.id in self._cut_apart
        queue = deque([Step(start)])
        visited = {start.id}
        while queue:
            step = queue.popleft()
            yield step
            op = self.producer(step.tensor)
            if op is None or len(step.path) >= _FAR or not through(op):
                continue
            path = (*step.path, op)
            for tensor in self._read_for(start, path) if is_cut else op.inputs:
                if tensor.id not in visited and tensor.dtype != "bool":
                    visited.add(tensor.id)
                    queue.append(Step(tensor, path))

    def _read_for(self, start: TensorRef, path: tuple[Op, ...]) -> list[TensorRef]:
        """Return the inputs of the last operation of a path back that a tensor is made of, of those put side by side.

        Memory stays what it was around what is written into it.
        """
        op = path[-1]
        if op.kind == "write":
            kept, operands = op.inputs[:1], op.inputs[1:]
        elif op.does("joins"):
            kept, operands = (), op.inputs
        else:
            return list(op.inputs)
        in_order = path[::-1]
        return [*kept, *(tensor for tensor in operands if is_made_of(self, start, tensor, in_order))]

    def forward(
        self,
        start: TensorRef,
        through: Callable[[Op], bool],
    ) -> Iterator[tuple[Op, Step]]:
        """Yield the operations that read results of `start`, nearest first, with the step to the tensor they read."""
        writer = self.recording.producers.get(start.id, -1)
        views = self._reread.get(writer, ())
        queue = deque(map(Step, (start, *views)))
        visited = {step.tensor.id for step in queue}
        while queue:
            step = queue.popleft()
            for op in self.readers(step.tensor):
                yield op, step
                if len(step.path) >= _FAR or not through(op):
                    continue
                for tensor in self.results(op):
                    if tensor.id not in visited and tensor.dtype not in _INDICES:
                        visited.add(tensor.id)
                        queue.append(Step(tensor, (*step.path, op)))

    def results(self, op: Op) -> tuple[TensorRef, ...]:
        """Return the outputs of an operation, and the other tensors that view the memory that it wrote."""
        return *op.outputs, *self._reread.get(op.index, ())

    def before(self, tensor: TensorRef, passes: Callable[[Op], bool]) -> TensorRef:
        """Return the tensor behind successive operations that `passes` accepts, always from the first operand."""
        while True:
            op = self.producer(tensor)
            if op is None or not passes(op):
                return tensor
            tensor = op.inputs[0]

    def before_call(self, op: Op, tensor: TensorRef) -> TensorRef:
        """Return the operand as it was given to the call of an operation, before the call rearranged it."""

        def is_of_call(earlier: Op) -> bool:
            return earlier.call == op.call and self.moves(earlier)

        return self.before(tensor, is_of_call)

    def before_moves(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor before all views and copies."""
        return self.before(tensor, self.moves)

    def before_repeats(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor before it was repeated along any dimension; the tensor itself if it was not repeated."""
        once = tensor
        while True:
            op = self.producer(tensor)
            if op is None or not op.inputs:
                return once
            source = op.inputs[0]
            keeps_shape = op.pointwise and source.shape == tensor.shape  # e.g. scaled after the repeat
            if not keeps_shape and not self.moves(op):
                return once
            if op.base_name == "expand" or tensor.numel > source.numel:
                once = source
            tensor = source

    def before_flattening(self, tensor: TensorRef, module: str) -> TensorRef:
        """Return the tensor before the module flattened its rows, with the features unchanged."""
        return self.before(tensor, lambda op: op.module == module and _keeps_features(op))

    def after(
        self,
        tensor: TensorRef,
        counts: Callable[[Op], bool],
        passes: Callable[[Op], bool],
    ) -> TensorRef:
        """Follow a tensor while exactly one counted operation reads it and passes; return the last result."""
        while True:
            readers = self.readers(tensor)
            counted = []
            for op in readers:
                if op.outputs and op.output.id != tensor.id and counts(op):
                    counted.append(op)
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
        result, modules = self.after_call(op), {op.module}
        added = self._sum_over_ranks(result) if self._adds_ranks else None
        if added is not None:
            modules.add(added.module)  # a bias is added once, after the sum
            # torch waits, copies gloo's result, and cuts off the padding of uneven parts
            result = self.after(
                added.output,
                lambda reader: reader.module == added.module,
                lambda reader: reader.does("cuts", "passes_on") or reader.base_name == "copy_",
            )

        def passes(reader: Op) -> bool:
            return reader.module in modules and (self.adds_bias(reader) or _keeps_features(reader))

        return self.after(result, lambda reader: True, passes)

    def _sum_over_ranks(self, tensor: TensorRef) -> Op | None:
        """Return the operation that adds up the ranks' parts of a tensor that is at most moved; None without one."""
        for reader, _ in self.forward(tensor, lambda reader: reader.kind in ("view", "copy")):
            if reader.does("adds_ranks") and reader.outputs:
                return reader
        return None

    @cached_property
    def _adds_ranks(self) -> bool:
        return any(op.does("adds_ranks") for op in self.recording.ops)

    def has_bias(self, op: Op) -> bool:
        """Return whether a projection adds a bias, itself or at the end of its call."""
        if len(op.inputs) == 3:
            return True
        called = self.after_call(op)
        ends: list[Op] = []
        for end in (called, self.after_projection(op)):
            producer = self.producer(end)
            if producer is not None:
                ends.append(producer)
        for end in (op.output, called):
            ends += self.readers(end)
        return any(map(self.adds_bias, ends))

    def adds_bias(self, op: Op) -> bool:
        """Return whether this adds a parameter along the last dimensions."""
        if plain_name(op) != "add" or len(op.inputs) != 2:
            return False
        size = op.output.numel
        return any(tensor.numel < size for tensor in op.inputs if self.is_weight(tensor))


def _keeps_weights(op: Op) -> bool:
    """Return whether the result of an operation on weights is a weight: they are moved, scaled or normed."""
    if op.kind != "compute" or op.pointwise:
        return True
    return op.does("norms") or op.base_name == "_weight_norm_interface"


def moves(op: Op) -> bool:
    """Return whether this only views or copies elements, or adds up the ranks' parts of a tensor."""
    is_move = op.kind in ("view", "copy") or op.does("adds_ranks")
    return is_move and not op.does("joins") and bool(op.inputs)


def _keeps_features(op: Op) -> bool:
    """Return whether this only regroups the dimensions before the last."""
    if not op.does("reshapes") or not op.inputs or not op.outputs:
        return False
    before = op.inputs[0].shape
    after = op.outputs[0].shape
    if min(len(before), len(after)) < 2:
        return False
    return before[-1] == after[-1]


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
