"""Write an attention that was measured as a whole out in its textbook steps.

As for a fused kernel, the steps stand in the recording in the place of the operations that were measured to be them,
and end in a link to what these gave:

    q_heads, k_heads, v_heads                      # batch heads token head_dim
    scores = q_heads · k_headsᵀ · scale            # batch heads query key
    context = softmax(scores + bias) · v_heads     # batch heads query head_dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..record.catalog import about
from ..record.kernels import STEPS
from ..record.ops import KERNEL, RESULT_LINK, Kernel, Kind, Op, Recording, TensorRef
from ..record.rounding import Rounding, max_difference, rounding_error
from ..record.sight import Sight, sight_of
from .attention import Attention
from .axis import size_of
from .dataflow import Graph
from .ids import ids_of
from .replay import NotReplayedError, measuring
from .rerun import Constants
from .whole import Operand, WholeAttention, operations_behind, split, whole_attention

_A = torch.ops.aten
HANDWRITTEN = "handwritten.attention"
"""What operations that are one attention are called where a fused kernel has its name."""
_HIDES = frozenset({"scores", "masked_scores", "weights"})
_AXES = ("batch", "heads", "token", "head_dim")
"""The order of dimensions in the steps."""


def written_out(graph: Graph, attentions: Sequence[Attention]) -> Recording | None:
    """Return a recording with the steps of each attention that no product shows, or that is in parts; None if none is.

    Args:
        graph: the dataflow of a run.
        attentions: the attentions that were found in it.
    """
    constants = Constants(graph, {}, kept=False)
    wholes: list[WholeAttention] = []
    for context in unread_contexts(graph, attentions):
        whole = whole_attention(graph, context, constants)
        if whole is not None:
            wholes.append(whole)
    if not wholes:
        return None
    try:
        with measuring():
            return _Rewriter(graph, wholes).recording()
    except NotReplayedError:  # whatever the steps raise, e.g. without memory, the recording stays as it is
        return None


def unread_contexts(graph: Graph, attentions: Sequence[Attention]) -> list[TensorRef]:
    """Return what output projections read, and what is returned, where no single attention explains it."""
    contexts: dict[int, TensorRef] = {}
    for op in graph.recording.ops:
        if graph.is_projection(op) and graph.comes_from_inputs(graph.projected(op)):
            given = graph.before_flattening(graph.before_call(op, graph.projected(op)), op.module)
            contexts[given.id] = given
    for named in graph.recording.outputs:
        if graph.comes_from_inputs(named.tensor):
            contexts[named.tensor.id] = named.tensor
    return [context for context in contexts.values() if not _is_explained(graph, context, attentions)]


def _is_explained(
    graph: Graph,
    context: TensorRef,
    attentions: Sequence[Attention],
) -> bool:
    """Return whether one attention has all products behind a context, or nothing behind it may be an attention."""
    ops = operations_behind(graph, context) or []
    if not any(map(_may_average, ops)):
        return True
    if any(_is_closed(graph, op) for op in ops):
        return True
    inside = {op.index for op in ops}
    there = [attention for attention in attentions if _is_inside(attention, inside)]
    if len(there) != 1:
        return False
    attention = there[0]
    if attention.is_dot and attention.scale is None:
        return False
    products = set()
    for index in inside.intersection(graph.products):
        if _is_of_inputs(graph, index):
            products.add(index)
    is_whole = products <= _products_of(attention)
    return is_whole and _compares_tokens(graph, attention, context)


def _products_of(attention: Attention) -> set[int]:
    """Return the indices of the products of all turns of an attention."""
    products: set[int] = set()
    for turn in attention.turns:
        products.update((turn.score_product.op.index, turn.value_product.op.index))
    return products


def _compares_tokens(graph: Graph, attention: Attention, context: TensorRef) -> bool:
    """Return whether the scores are real dot products of all queries at once."""
    product = attention.score_product
    if not attention.is_dot or product.left.dtype.startswith("complex"):
        return False
    axes = product.axes(graph.dimensions)
    queries = axes.columns if attention.key_first else axes.rows
    if size_of(queries) > 1 or len(context.shape) < 2:
        return True
    return context.shape[-2] == 1


def _is_closed(graph: Graph, op: Op) -> bool:
    """Return whether an operation is a fused kernel that was not opened, e.g. as there is no room for its steps."""
    return op.kernel is not None and not graph.recording.kernels[op.kernel].opened


def _may_average(op: Op) -> bool:
    """Return whether an operation may be a part of an average: it sums, or takes the slices that additions sum."""
    if op.does("cuts") or op.base_name in ("select", "unbind"):
        return True
    return op.kind == "compute" and not op.pointwise and not op.does("norms", "gathers")


def _is_of_inputs(graph: Graph, index: int) -> bool:
    product = graph.products[index]
    return graph.comes_from_inputs(product.left, product.right)


def _is_inside(attention: Attention, inside: set[int]) -> bool:
    return any(turn.value_product.op.index in inside for turn in attention.turns)


def _kernel_of(whole: WholeAttention, check: Rounding | None) -> Kernel:
    note = "" if check is not None else "not compared with the numbers of the run, which were not kept"
    title = f"{len(whole.ops)} operations that are one attention"
    return Kernel(HANDWRITTEN, title, _HIDES, check=check, note=note)


def _exact(whole: WholeAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the context of an attention in float64: `batch query (heads head_dim)`."""
    query = _in_heads(whole.query, query, whole.heads)
    key = _in_heads(whole.key, key, whole.key_heads)
    value = _in_heads(whole.value, value, whole.heads)
    if whole.unit:
        query = query / query.norm(dim=-1, keepdim=True)
        key = key / key.norm(dim=-1, keepdim=True)
    group = whole.heads // whole.key_heads
    key = key.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * whole.scale
    if whole.bias is not None:
        scores = scores + whole.bias.to(scores.device)
    if whole.seen is not None:
        hidden = ~whole.seen.to(scores.device)
        scores = scores.masked_fill(hidden, -torch.inf)
    context = scores.softmax(-1) @ value
    return context.transpose(1, 2).flatten(2)


def _in_heads(operand: Operand, numbers: Tensor, heads: int) -> Tensor:
    """Return the numbers of an operand in float64: `batch heads token head_dim`."""
    return split(operand.layout.features_last(numbers.double()), heads)


def _line_of(whole: WholeAttention, maker: Op) -> Op:
    """Return the first operation that computes something at a known line; the maker of the context without one."""
    for op in whole.ops:
        if op.source and op.kind == "compute":
            return op
    return maker


def _shares_memory(left: Tensor, right: Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def _mask_of(whole: WholeAttention) -> Tensor | None:
    """Return what is added to the scores, or a bool that is true where a query sees a key; None if nothing is."""
    if whole.bias is None:
        return whole.seen
    bias = whole.bias.float()
    return bias if whole.seen is None else torch.where(whole.seen, bias, -torch.inf)


class _Rewriter:
    """Makes a recording in which measured operations are replaced by steps."""

    def __init__(self, graph: Graph, wholes: Sequence[WholeAttention]) -> None:
        recording = graph.recording
        self._graph = graph
        self._recording = recording
        tensors = [named.tensor for named in (*recording.inputs, *recording.parameters)]
        for op in recording.ops:
            tensors += (*op.inputs, *op.outputs)
        self._next_tensor = 1 + max(ids_of(tensors))
        self._next_storage = 1 + max(tensor.storage for tensor in tensors)
        self._numbers: dict[int, Tensor] = {}
        """The content of tensors in the steps: that of the run, if it was kept, else zeros."""
        self._values = dict(recording.values)
        self._constants = dict(recording.constants)
        self._sights: dict[int, Sight] = dict(recording.sights)
        self._steps: list[Op] = []
        self._kernels = list(recording.kernels)
        self._call = -1
        self._wholes = wholes

    def recording(self) -> Recording:
        """Return the new recording."""
        replaced: dict[int, list[Op]] = {}
        removed: set[int] = set()
        notes = list(self._recording.notes)
        for whole in self._wholes:
            context = whole.context.tensor
            maker = self._recording.producer(context)
            assert maker is not None
            self._steps = []
            result = self._write(whole, maker)
            check = self._checked(whole, result)
            if check is not None and check.verdict == "differs":
                return self._recording
            self._kernels.append(_kernel_of(whole, check))
            replaced[maker.index] = self._steps
            removed |= self._unneeded(whole)
            notes.append(
                f"The attention at {maker.source or 'an unknown line'} is written in {len(whole.ops)} operations. Its "
                "stages are computed separately, and agree with them on random numbers."
            )
        return self._joined(replaced, removed, notes)

    def _joined(
        self,
        replaced: dict[int, list[Op]],
        removed: set[int],
        notes: list[str],
    ) -> Recording:
        ops: list[Op] = []
        producers: dict[int, int] = {}
        moved: dict[int, int] = {}
        for op in self._recording.ops:
            if op.index not in removed:
                moved[op.index] = len(ops)
                ops.append(replace(op, index=len(ops)))
            for step in replaced.get(op.index, ()):
                for output in step.outputs:
                    producers[output.id] = len(ops)
                ops.append(replace(step, index=len(ops)))
        for number, index in self._recording.producers.items():
            if index in moved:
                producers.setdefault(number, moved[index])
        return replace(
            self._recording,
            ops=tuple(ops),
            producers=producers,
            notes=tuple(notes),
            kernels=tuple(self._kernels),
            constants=self._constants,
            values=self._values,
            sights=self._sights,
        )

    def _unneeded(self, whole: WholeAttention) -> set[int]:
        """Return the operations whose results only the replaced operations read."""
        context = whole.context.tensor.id
        returned = {named.tensor.id for named in self._recording.outputs}
        removed: set[int] = set()
        for op in reversed(whole.ops):
            results = ids_of(self._graph.results(op)) - {context}
            readers: set[int] = set()
            for number in results:
                readers.update(reader.index for reader in self._recording.consumers.get(number, ()))
            if results.isdisjoint(returned) and readers <= removed | {op.index}:
                removed.add(op.index)
        return removed

    # -- steps --------------------------------------------------------------------------------------------------------

    def _checked(self, whole: WholeAttention, result: TensorRef) -> Rounding | None:
        """Return how far the steps are from what the run gave, beside their rounding error; None without numbers."""
        of_run = self._recorded(whole.context)
        of_steps = self._values.get(result.id)
        if of_run is None or of_steps is None:
            return None
        query, key, value = map(self._recorded, (whole.query, whole.key, whole.value))
        if query is None or key is None or value is None:
            return None
        exact = _exact(whole, query, key, value)
        error = rounding_error(whole.context.layout.features_last(of_steps), exact)
        # The run may round in another order, by as much.
        largest = float(exact.abs().max())
        least = torch.finfo(of_steps.dtype).eps * largest
        difference = max_difference(of_run, of_steps)
        return Rounding.of(difference, max(error, least))

    def _recorded(self, operand: Operand) -> Tensor | None:
        """Return the numbers of an operand, or of the context, in the run; None if they were not kept."""
        return self._recording.values.get(operand.tensor.id)

    def _write(self, whole: WholeAttention, maker: Op) -> TensorRef:
        """Add the steps of an attention, and return the last before the link to what the run gave."""
        line = _line_of(whole, maker)
        self._new_call()
        query = self._heads(whole.query, whole.heads, line)
        key = self._heads(whole.key, whole.key_heads, line)
        value = self._heads(whole.value, whole.heads, line)
        if whole.unit:
            query = self._normed(query, line)
            key = self._normed(key, line)
        scores = self._step("attention_scores", line, query, key, scale=whole.scale)
        weights = self._weights(whole, scores, maker)
        context = self._step("attention_context", maker, weights, value)
        self._new_call()
        last = self._laid(context, whole.context, maker)
        self._link(last, whole.context.tensor, maker)
        return last

    def _weights(self, whole: WholeAttention, scores: TensorRef, at: Op) -> TensorRef:
        """Add the bias, the mask and the softmax, and note which query sees which key."""
        masked = scores
        mask = _mask_of(whole)
        if mask is not None:
            masked = self._step("attention_mask", at, scores, self._constant(mask))
        self._new_call()
        weights = self._do(_A._softmax.default, at, masked, -1, False)
        seen = torch.ones(weights.shape)
        if whole.seen is not None:
            seen = whole.seen.float().expand(weights.shape)
        sight = sight_of(None, seen, -1)
        if sight is not None:
            self._sights[weights.id] = sight
        return weights

    def _heads(self, operand: Operand, heads: int, at: Op) -> TensorRef:
        """Return an operand as `batch heads token head_dim`."""
        tensor, dims = operand.tensor, list(operand.layout.dims)
        if "features" in dims:
            place = dims.index("features")
            head_dim = tensor.shape[place] // heads
            shape = list(tensor.shape)
            shape[place : place + 1] = [heads, head_dim]
            tensor = self._do(_A.view.default, at, tensor, shape)
            dims[place : place + 1] = ["heads", "head_dim"]
        if "batch" not in dims:
            tensor = self._do(_A.unsqueeze.default, at, tensor, 0)
            dims.insert(0, "batch")
        return self._permuted(tensor, [dims.index(name) for name in _AXES], at)

    def _laid(self, context: TensorRef, operand: Operand, at: Op) -> TensorRef:
        """Return a context `batch heads token head_dim` in the dimensions of the recorded one."""
        names: list[str] = []
        if "batch" not in operand.layout.dims:
            names.append("batch")
        for name in operand.layout.dims:
            names += ["heads", "head_dim"] if name == "features" else [name]
        context = self._permuted(context, [_AXES.index(name) for name in names], at)
        return self._folded(context, operand.tensor.shape, at)

    def _permuted(self, tensor: TensorRef, order: list[int], at: Op) -> TensorRef:
        """Return a tensor with its dimensions in this order."""
        if order == sorted(order):
            return tensor
        return self._do(_A.permute.default, at, tensor, order)

    def _normed(self, tensor: TensorRef, at: Op) -> TensorRef:
        self._new_call()
        length = self._do(_A.linalg_vector_norm.default, at, tensor, 2, [-1], True)
        return self._do(_A.div.Tensor, at, tensor, length)

    def _folded(self, tensor: TensorRef, shape: Sequence[int], at: Op) -> TensorRef:
        """Return a tensor in another shape, copied if a view cannot have it."""
        numbers = self._content(tensor)
        if not numbers.is_contiguous():
            tensor = self._do(_A.clone.default, at, tensor, memory_format=torch.contiguous_format)
        return self._do(_A.view.default, at, tensor, list(shape))

    # -- operations ---------------------------------------------------------------------------------------------------

    def _new_call(self) -> None:
        """Begin a call of its own: operations that rearrange a factor belong to the call of the product."""
        self._call -= 1

    def _content(self, tensor: TensorRef) -> Tensor:
        if tensor.id not in self._numbers:
            recorded = self._values.get(tensor.id)
            if recorded is None or recorded.is_meta:
                recorded = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
            self._numbers[tensor.id] = recorded
        return self._numbers[tensor.id]

    def _constant(self, numbers: Tensor) -> TensorRef:
        device = next((kept.device for kept in self._numbers.values()), numbers.device)
        numbers = numbers.to(device)
        tensor = self._named(numbers, self._new_storage())
        self._constants[tensor.id] = self._numbers[tensor.id] = numbers
        return tensor

    def _new_storage(self) -> int:
        self._next_storage += 1
        return self._next_storage - 1

    def _named(self, numbers: Tensor, storage: int) -> TensorRef:
        number = self._next_tensor
        self._next_tensor += 1
        dtype = str(numbers.dtype).removeprefix("torch.")
        shape, stride = tuple(numbers.shape), numbers.stride()
        offset = int(numbers.storage_offset())
        return TensorRef(number, shape, stride, offset, dtype, numbers.element_size(), storage)

    def _do(self, func: Any, at: Op, *args: Any, **kwargs: Any) -> TensorRef:
        """Add an operation at the line of another one, and return its result."""
        read: list[TensorRef] = []
        contents: list[Any] = []
        plain: list[Any] = []
        for value in args:
            plain.append(tuple(value) if isinstance(value, list) else value)
            if isinstance(value, TensorRef):
                read.append(value)
                contents.append(self._content(value))
            else:
                contents.append(value)
        result: Tensor = func(*contents, **kwargs)
        is_view = _shares_memory(result, contents[0])
        output = self._named(result, read[0].storage if is_view else self._new_storage())
        self._numbers[output.id] = result
        if all(map(self._is_of_run, read)):
            self._values[output.id] = result
        entry = about(func)
        kind: Kind = "copy" if entry.copies else "compute"
        if is_view:
            kind = "view"
        named = {name: str(value) for name, value in kwargs.items()}
        self._add(entry.name, tuple(plain), named, tuple(read), output, kind, at, pointwise=entry.pointwise)
        return output

    def _step(self, name: str, at: Op, *args: Any, **settings: Any) -> TensorRef:
        """Add a step of an attention, in a call of its own, and return its result."""
        self._new_call()
        read = tuple(value for value in args if isinstance(value, TensorRef))
        contents = [self._content(value) if isinstance(value, TensorRef) else value for value in args]
        result = STEPS[name](*contents, **settings)
        output = self._named(result, self._new_storage())
        self._numbers[output.id] = result
        if all(map(self._is_of_run, read)):
            self._values[output.id] = result
        self._add(
            f"{KERNEL}{name}.default", args, settings, read, output, "compute", at, pointwise=name == "attention_mask"
        )
        return output

    def _is_of_run(self, tensor: TensorRef) -> bool:
        """Return whether the numbers of a tensor are those of the run, and not zeros."""
        return tensor.id in self._values or tensor.id in self._constants

    def _link(self, last: TensorRef, result: TensorRef, maker: Op) -> None:
        """Add the link from the last step to what the run gave."""
        self._add(RESULT_LINK, (last,), {"kernel": maker.name}, (last,), result, "copy", maker, pointwise=False)

    def _add(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: tuple[TensorRef, ...],
        output: TensorRef,
        kind: Kind,
        at: Op,
        *,
        pointwise: bool,
    ) -> None:
        step = Op(
            index=-1,
            name=name,
            args=args,
            kwargs=kwargs,
            inputs=inputs,
            outputs=(output,),
            kind=kind,
            pointwise=pointwise,
            source=at.source,
            module=at.module,
            call=self._call,
            kernel=len(self._kernels),
            forwards=at.forwards,
        )
        self._steps.append(step)
