"""Walks over the dataflow of a recording, and what an operation in it does to scores, weights and heads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from ..record.ops import Op, Recording, TensorRef
from .dimensions import Axis, Dimensions
from .products import Product, product_of
from .softmax import Softmax, softmax_of

_FAR = 60
"""Steps after which a walk gives up: attention is never that long."""
_INDICES = ("int64", "int32")
"""Tensors of these are read by, and hold no numbers of what they were made of."""
_LINEAR = ("neg", "add", "sub", "rsub", "positive", "conj")
"""Pointwise operations of one tensor that bend nothing."""


class Step(NamedTuple):
    """A tensor that a walk came to, and the operations that it passed, nearest to the start first."""

    tensor: TensorRef
    path: tuple[Op, ...] = ()


class Graph:
    """The dataflow of a recording, and the axes of its tensors."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.dimensions = Dimensions(recording)
        self._after_calls: dict[int, TensorRef] = {}

    @cached_property
    def _weights(self) -> frozenset[int]:
        """Ids of parameters, of matrices among the buffers, and of what was made of them alone, element by element."""
        buffers = (named.tensor for named in self.recording.buffers)
        ids = {*self.recording.parameter_names, *(tensor.id for tensor in buffers if len(tensor.shape) == 2)}
        for op in self.recording.ops:
            if op.inputs and op.inputs[0].id in ids and op.kind != "write" and all(t.id in ids for t in op.inputs):
                weighs = op.pointwise or op.does("norms") or op.base_name == "_weight_norm_interface"
                if weighs or op.kind != "compute":
                    ids.update(tensor.id for tensor in op.outputs)
        return frozenset(ids)

    @cached_property
    def _from_inputs(self) -> set[int]:
        """Ids of tensors that depend on what came from outside, parameters and buffers aside."""
        named = {named.tensor.id for named in (*self.recording.parameters, *self.recording.buffers)}
        read = {tensor.id for op in self.recording.ops for tensor in op.inputs}
        outside = read - self.recording.producers.keys() - named
        return made_of(outside, self.recording.ops) | self.recording.input_ids

    @cached_property
    def given_or_learned(self) -> set[int]:
        """Ids of tensors that depend on what came from outside, or on a parameter."""
        return self._from_inputs | made_of(self.recording.parameter_names, self.recording.ops)

    @cached_property
    def _from_each_input(self) -> dict[int, set[int]]:
        """Id of an input of the forward to those of the tensors that it has a part in."""
        return {input_id: made_of({input_id}, self.recording.ops) for input_id in self.recording.input_ids}

    @cached_property
    def _reread(self) -> dict[int, list[TensorRef]]:
        """Index of a writing operation to the tensors that look at what it wrote, other than those it returned."""
        tensors: dict[int, dict[int, TensorRef]] = {}
        producers, returned = self.recording.producers, {tensor.id for tensor in self.recording.tensors()}
        for op in self.recording.ops:
            for tensor in op.inputs:
                if tensor.id not in returned and tensor.id in producers:
                    tensors.setdefault(producers[tensor.id], {})[tensor.id] = tensor
        return {index: list(found.values()) for index, found in tensors.items()}

    # -- what a tensor is ---------------------------------------------------------------------------------------------

    def is_weight(self, tensor: TensorRef) -> bool:
        """Return whether this is a parameter, moved, cast or scaled at most."""
        return tensor.id in self._weights

    def comes_from_inputs(self, *tensors: TensorRef) -> bool:
        """Return whether these depend on what the forward was given."""
        return all(tensor.id in self._from_inputs for tensor in tensors)

    def inputs_of(self, tensor: TensorRef) -> set[int]:
        """Return the ids of the forward's inputs that have a part in a tensor."""
        return {input_id for input_id, made in self._from_each_input.items() if tensor.id in made}

    def leads_to(self, start: TensorRef, end: TensorRef) -> bool:
        """Return whether one tensor has a part in another, by whatever operations."""
        return end.id in made_of({start.id}, self.recording.ops)

    @cached_property
    def features(self) -> set[Axis]:
        """The axes of the matrices that project something: what they take in, and what they give."""
        projections = filter(self.is_projection, self.recording.ops)
        weights = (tensor for op in projections for tensor in op.inputs if self.is_weight(tensor))
        return {atom for tensor in weights for dim in self.dimensions.of(tensor) for atom in dim}

    # -- what an operation is -----------------------------------------------------------------------------------------

    def is_projection(self, op: Op) -> bool:
        """Return whether this is a product, or a convolution, with a parameter; what it projects may be one too."""
        if not op.does("product", "convolution") or len(op.inputs) < 2:
            return False
        factors = op.inputs[-2:] if op.does("product") else op.inputs[1:2]
        return any(factor.id in self._weights for factor in factors)

    def projected(self, op: Op) -> TensorRef:
        """Return what a projection projects."""
        if op.base_name == "convolution":
            return op.inputs[0]
        left, right = op.inputs[-2:]
        return left if self.is_weight(right) else right

    @cached_property
    def products(self) -> dict[int, Product]:
        """Index of the operation that gives it, to each product of two tensors neither of which is a parameter."""
        products: dict[int, Product] = {}
        for op in self.recording.ops:
            product = product_of(self.recording, op)
            if product is None or self.is_weight(product.left) or self.is_weight(product.right):
                continue
            # A multiplication whose result serves something else too, or with a table, is no product written out.
            alone = len(self.recording.consumers.get(product.multiply.output.id, ())) == 1
            if product.multiply is op or (alone and self.comes_from_inputs(product.left, product.right)):
                products[op.index] = product
        return products

    @cached_property
    def products_by_multiplication(self) -> dict[int, Product]:
        """Index of the operation that reads its factors, to each product; another operation may sum."""
        return {product.multiply.index: product for product in self.products.values()}

    def product(self, op: Op) -> Product | None:
        """Return the product of two tensors, neither of which is a parameter, that an operation gives."""
        return self.products.get(op.index)

    @cached_property
    def calls_of_products(self) -> frozenset[int]:
        """The calls that multiply matrices: what moves a factor for one belongs to it."""
        return frozenset(op.call for op in self.recording.ops if op.does("product"))

    def scale_of(self, op: Op) -> float | None:
        """Return the number that an operation multiplies by; None where it does something else."""
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
        """Return the number that a tensor of one element holds, where it is known: torch's own, or made of ones."""
        op = self.recording.producer(tensor) if tensor.numel == 1 else None
        while op is not None and op.base_name == "pow":
            op = self.recording.producer(op.inputs[0])
        made = 1.0 if op is not None and op.base_name in ("ones", "ones_like") else None
        return self.recording.scalars.get(tensor.id, made)

    def is_scale(self, op: Op) -> bool:
        """Return whether this multiplies everything by one number."""
        return op.does("scales") and sum(tensor.numel > 1 for tensor in op.inputs) <= 1 and op.output.numel > 0

    def reduces(self, op: Op) -> bool:
        """Return whether this makes scores of features: a product with a parameter, a sum, a mean, a length."""
        return self.is_projection(op) or op.does("distances") or op.base_name in ("sum", "mean", "linalg_vector_norm")

    def bends(self, op: Op) -> bool:
        """Return whether this is a function of one tensor, element by element, that is no multiple of it."""
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
        """Index of the operation that gives the weights, or exponentials that are divided later, to each softmax."""
        softmaxes = (softmax_of(self.recording, op) for op in self.recording.ops)
        return {softmax.op.index: softmax for softmax in softmaxes if softmax is not None}

    def softmax(self, op: Op) -> tuple[TensorRef, int] | None:
        """Return what a softmax was taken of, and over which dimension; also of one written out as exp over sum."""
        softmax = self.softmaxes.get(op.index)
        return None if softmax is None else (softmax.masked, softmax.dim)

    def is_softmax(self, op: Op) -> bool:
        """Return whether `softmax` finds one here."""
        return op.index in self.softmaxes

    def moves(self, op: Op) -> bool:
        """Return whether this only moves elements about."""
        return op.kind in ("view", "copy") and not op.does("joins") and bool(op.inputs)

    def carries(self, op: Op) -> bool:
        """Return whether scores and weights pass through this unharmed: moved, masked, scaled, dropped, cast."""
        passes = op.kind != "compute" or op.pointwise or op.does("gathers", "passes_on", "fills_where")
        return passes and op.index not in self.softmaxes

    # -- walks --------------------------------------------------------------------------------------------------------

    def back(self, start: TensorRef, through: Callable[[Op], bool]) -> Iterator[Step]:
        """Yield tensors from which `start` was made, nearest first, passing operations that `through` lets pass."""
        queue, seen = deque([Step(start)]), {start.id}
        while queue:
            step = queue.popleft()
            yield step
            op = self.recording.producer(step.tensor)
            if op is None or len(step.path) >= _FAR or not through(op):
                continue
            for tensor in op.inputs:
                if tensor.id not in seen and tensor.dtype != "bool":
                    seen.add(tensor.id)
                    queue.append(Step(tensor, (*step.path, op)))

    def forward(self, start: TensorRef, through: Callable[[Op], bool]) -> Iterator[tuple[Op, Step]]:
        """Yield operations that read what was made from `start`, nearest first, with the tensor that they read."""
        writer = self.recording.producers.get(start.id, -1)
        queue = deque(Step(tensor) for tensor in (start, *self._reread.get(writer, ())))
        seen = {step.tensor.id for step in queue}
        while queue:
            step = queue.popleft()
            for op in self.recording.consumers.get(step.tensor.id, ()):
                yield op, step
                if len(step.path) < _FAR and through(op):
                    for tensor in (*op.outputs, *self._reread.get(op.index, ())):
                        if tensor.id not in seen and tensor.dtype not in _INDICES:
                            seen.add(tensor.id)
                            queue.append(Step(tensor, (*step.path, op)))

    def before(self, tensor: TensorRef, passes: Callable[[Op], bool]) -> TensorRef:
        """Return what operations that pass made a tensor from, each from its first operand."""
        while (op := self.recording.producer(tensor)) is not None and passes(op):
            tensor = op.inputs[0]
        return tensor

    def before_call(self, op: Op, tensor: TensorRef) -> TensorRef:
        """Return what was handed to the call of an operation: the operand before the call moved it."""
        return self.before(tensor, lambda behind: behind.call == op.call and self.moves(behind))

    def before_moves(self, tensor: TensorRef) -> TensorRef:
        """Return where elements come from that were only moved."""
        return self.before(tensor, self.moves)

    def before_repeats(self, tensor: TensorRef) -> TensorRef:
        """Return what a tensor was repeated from, along whatever dimensions; itself where it was moved alone."""
        once = tensor
        while (op := self.recording.producer(tensor)) is not None and self.moves(op):
            source = op.inputs[0]
            if op.base_name == "expand" or tensor.numel > source.numel:
                once = source
            tensor = source
        return once

    def before_flattening(self, tensor: TensorRef, module: str) -> TensorRef:
        """Return the same features before their rows were put into one dimension, inside the module."""
        return self.before(tensor, lambda op: op.module == module and _keeps_features(op))

    def after(self, tensor: TensorRef, counts: Callable[[Op], bool], passes: Callable[[Op], bool]) -> TensorRef:
        """Return what a tensor becomes, as long as a single operation reads it, of those that count, and passes."""
        while True:
            readers = self.recording.consumers.get(tensor.id, ())
            counted = [op for op in readers if op.outputs and op.output.id != tensor.id and counts(op)]
            if len(counted) != 1 or not passes(counted[0]):
                return tensor
            tensor = counted[0].output

    def after_call(self, op: Op) -> TensorRef:
        """Return what the call in Python returned that this operation is the heart of: its result, moved and biased."""
        if op.index not in self._after_calls:
            self._after_calls[op.index] = self.after(
                op.output,
                lambda reader: reader.call == op.call and reader.index > op.index,
                lambda reader: self.moves(reader) or self._adds_bias(reader),
            )
        return self._after_calls[op.index]

    def after_projection(self, op: Op) -> TensorRef:
        """Return what a projection gives, with its bias, and as it is before the features are cut up."""

        def passes(reader: Op) -> bool:
            return reader.module == op.module and (self._adds_bias(reader) or _keeps_features(reader))

        return self.after(self.after_call(op), lambda reader: True, passes)

    def has_bias(self, op: Op) -> bool:
        """Return whether a projection adds a bias, in itself or at the end of its call."""
        called = self.after_call(op)
        readers = [reader for end in (op.output, called) for reader in self.recording.consumers.get(end.id, ())]
        ends = [self.recording.producer(end) for end in (called, self.after_projection(op))]
        return len(op.inputs) == 3 or any(self._adds_bias(end) for end in (*ends, *readers) if end is not None)

    def _adds_bias(self, op: Op) -> bool:
        biases = (tensor for tensor in op.inputs if self.is_weight(tensor) and tensor.numel < op.output.numel)
        return op.base_name.rstrip("_") == "add" and len(op.inputs) == 2 and any(biases)


def _keeps_features(op: Op) -> bool:
    """Return whether this only changes how the dimensions before the last are counted."""
    before, after = op.inputs[0].shape if op.inputs else (), op.outputs[0].shape if op.outputs else ()
    return op.does("reshapes") and min(len(before), len(after)) > 1 and before[-1] == after[-1]


def made_of(ids: Iterable[int], ops: Iterable[Op]) -> set[int]:
    """Return these ids of tensors, and those of all that operations, in their order, make of them."""
    made = set(ids)
    for op in ops:
        for tensor in op.inputs:
            if tensor.id in made:
                made.update([output.id for output in op.outputs])
                break
    return made


def inside(path: str, module: str) -> bool:
    """Return whether a module is the given one or below it."""
    return not module or path == module or path.startswith(module + ".")
