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
from ..record.ops import RESULT, Kernel, Kind, Op, Recording, TensorRef
from ..record.rounding import Rounding, max_difference, rounding_error
from ..record.sight import Sight, sight_of
from .attention import Attention
from .axis import size_of
from .dataflow import Graph
from .rerun import Constants
from .whole import Operand, WholeAttention, operations_behind, split, whole_attention

_A = torch.ops.aten
HANDWRITTEN = "handwritten.attention"
"""What operations that are one attention are called where a fused kernel has its name."""
_HIDES = frozenset({"scores", "masked_scores", "weights"})


def written_out(graph: Graph, attentions: Sequence[Attention]) -> Recording | None:
    """Return a recording with the steps of each attention that no product shows, or that is in parts; None if none is.

    Args:
        graph: the dataflow of a run.
        attentions: the attentions that were found in it.
    """
    constants = Constants(graph, {}, kept=False)
    wholes: list[WholeAttention] = []
    with torch.device("cpu"), torch.no_grad():  # whatever the surrounding default is
        for context in unread_contexts(graph, attentions):
            whole = whole_attention(graph, context, constants)
            if whole is not None:
                wholes.append(whole)
        if not wholes:
            return None
        try:
            return _Rewriter(graph, wholes).recording()
        except RuntimeError:  # whatever the steps raise, e.g. without memory, the recording stays as it is
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


def _is_explained(graph: Graph, context: TensorRef, attentions: Sequence[Attention]) -> bool:
    """Return whether one attention has all products behind a context, or nothing behind it may be an attention."""
    ops = operations_behind(graph, context) or []
    if not any(_may_average(op) for op in ops) or any(_is_closed(graph, op) for op in ops):
        return True
    inside = {op.index for op in ops}
    there = [attention for attention in attentions if _is_inside(attention, inside)]
    if len(there) != 1 or (there[0].is_dot and there[0].scale is None):
        return False
    products = {index for index in graph.products if index in inside and _is_of_inputs(graph, index)}
    read = {op.index for turn in there[0].turns for op in (turn.score_product.op, turn.value_product.op)}
    return products <= read and _compares_tokens(graph, there[0], context)


def _compares_tokens(graph: Graph, attention: Attention, context: TensorRef) -> bool:
    """Return whether the scores are real dot products of all queries at once."""
    product = attention.score_product
    if not attention.is_dot or product.left.dtype.startswith("complex"):
        return False
    axes = product.axes(graph.dimensions)
    queries = axes.columns if attention.key_first else axes.rows
    return size_of(queries) > 1 or context.shape[-2:-1] in ((), (1,))


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


def _exact(whole: WholeAttention, operands: Sequence[Tensor]) -> Tensor:
    """Return the context of an attention in float64: `batch query (heads head_dim)`."""
    sides = zip(
        (whole.query, whole.key, whole.value), operands, (whole.heads, whole.key_heads, whole.heads), strict=True
    )
    query, key, value = (split(side.layout.features_last(numbers), heads) for side, numbers, heads in sides)
    if whole.unit:
        query, key = (side / side.norm(dim=-1, keepdim=True) for side in (query, key))
    key = key.repeat_interleave(whole.heads // whole.key_heads, 1)
    scores = query @ key.transpose(-1, -2) * whole.scale
    if whole.bias is not None:
        scores = scores + whole.bias.to(scores.device)
    if whole.seen is not None:
        scores = scores.masked_fill(~whole.seen.to(scores.device), -torch.inf)
    context = scores.softmax(-1) @ value
    return context.transpose(1, 2).flatten(2)


class _Rewriter:
    """Makes a recording in which measured operations are replaced by steps."""

    def __init__(self, graph: Graph, wholes: Sequence[WholeAttention]) -> None:
        self._graph = graph
        self._recording = graph.recording
        tensors = [tensor for op in graph.recording.ops for tensor in (*op.inputs, *op.outputs)]
        tensors += [named.tensor for named in (*graph.recording.inputs, *graph.recording.parameters)]
        self._next_tensor = 1 + max(tensor.id for tensor in tensors)
        self._next_storage = 1 + max(tensor.storage for tensor in tensors)
        self._numbers: dict[int, Tensor] = {}
        """The content of tensors in the steps: that of the run, if it was kept, else zeros."""
        self._values = dict(graph.recording.values)
        self._constants = dict(graph.recording.constants)
        self._sights: dict[int, Sight] = dict(graph.recording.sights)
        self._steps: list[Op] = []
        self._kernels = list(graph.recording.kernels)
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
                "stages are computed beside them, and agree on drawn numbers."
            )
        return self._joined(replaced, removed, notes)

    def _joined(self, replaced: dict[int, list[Op]], removed: set[int], notes: list[str]) -> Recording:
        ops: list[Op] = []
        producers: dict[int, int] = {}
        moved: dict[int, int] = {}
        for op in self._recording.ops:
            if op.index not in removed:
                moved[op.index] = len(ops)
                ops.append(replace(op, index=len(ops)))
            for step in replaced.get(op.index, ()):
                producers.update(dict.fromkeys((output.id for output in step.outputs), len(ops)))
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
        named = {named.tensor.id for named in self._recording.outputs}
        removed: set[int] = set()
        for op in reversed(whole.ops):
            results = [tensor for tensor in self._graph.results(op) if tensor.id != context]
            readers = [reader for tensor in results for reader in self._recording.consumers.get(tensor.id, ())]
            is_returned = any(tensor.id in named for tensor in results)
            if not is_returned and all(reader.index in removed or reader.index == op.index for reader in readers):
                removed.add(op.index)
        return removed

    # -- steps --------------------------------------------------------------------------------------------------------

    def _checked(self, whole: WholeAttention, result: TensorRef) -> Rounding | None:
        """Return how far the steps are from what the run gave, beside their rounding error; None without numbers."""
        given, made = self._recording.values.get(whole.context.tensor.id), self._values.get(result.id)
        operands = [self._recording.values.get(side.tensor.id) for side in (whole.query, whole.key, whole.value)]
        if given is None or made is None or any(value is None for value in operands):
            return None
        exact = _exact(whole, [value.double() for value in operands if value is not None])
        error = rounding_error(whole.context.layout.features_last(made), exact)
        # The run may round in another order, by as much.
        return Rounding.of(
            max_difference(given, made), max(error, torch.finfo(made.dtype).eps * float(exact.abs().max()))
        )

    def _write(self, whole: WholeAttention, maker: Op) -> TensorRef:
        """Add the steps of an attention, and return the last before the link to what the run gave."""
        meets = next((op for op in whole.ops if op.source and op.kind == "compute"), maker)
        self._new_call()
        query = self._heads(whole.query, whole.heads, meets)
        key = self._heads(whole.key, whole.key_heads, meets)
        value = self._heads(whole.value, whole.heads, meets)
        if whole.unit:
            query, key = self._normed(query, meets), self._normed(key, meets)
        key = self._repeated(key, whole.heads // whole.key_heads, meets)
        self._new_call()
        batch, heads, queries, size = query.shape
        keys = key.shape[2]
        left = self._folded(query, (batch * heads, queries, size), meets)
        right = self._do(_A.transpose.int, meets, self._folded(key, (batch * heads, keys, size), meets), 1, 2)
        product = self._do(_A.bmm.default, meets, left, right)
        scores = self._do(_A.view.default, meets, product, [batch, heads, queries, keys])
        if whole.scale != 1:
            self._new_call()
            scores = self._do(_A.mul.Tensor, meets, scores, whole.scale)
        self._new_call()
        if whole.bias is not None:
            scores = self._do(_A.add.Tensor, maker, scores, self._constant(whole.bias.float()))
        if whole.seen is not None:
            scores = self._do(_A.masked_fill.Scalar, maker, scores, self._constant(~whole.seen), -torch.inf)
        self._new_call()
        weights = self._do(_A._softmax.default, maker, scores, -1, False)
        seen = torch.ones(weights.shape) if whole.seen is None else whole.seen.float().expand(weights.shape)
        sight = sight_of(None, seen, -1)
        if sight is not None:
            self._sights[weights.id] = sight
        self._new_call()
        folded = self._do(_A.view.default, maker, weights, [batch * heads, queries, keys])
        averaged = self._folded(value, (batch * heads, keys, value.shape[3]), maker)
        context = self._do(_A.bmm.default, maker, folded, averaged)
        context = self._do(_A.view.default, maker, context, [batch, heads, queries, value.shape[3]])
        self._new_call()
        last = self._laid(context, whole.context, maker)
        self._link(last, whole.context.tensor, maker)
        return last

    def _heads(self, operand: Operand, heads: int, at: Op) -> TensorRef:
        """Return an operand as `batch heads token head_dim`."""
        tensor, dims = operand.tensor, list(operand.layout.dims)
        if "features" in dims:
            place = dims.index("features")
            shape = [*tensor.shape[:place], heads, tensor.shape[place] // heads, *tensor.shape[place + 1 :]]
            tensor = self._do(_A.view.default, at, tensor, shape)
            dims[place : place + 1] = ["heads", "head_dim"]
        if "batch" not in dims:
            tensor = self._do(_A.unsqueeze.default, at, tensor, 0)
            dims.insert(0, "batch")
        order = [dims.index(name) for name in ("batch", "heads", "token", "head_dim")]
        return tensor if order == [0, 1, 2, 3] else self._do(_A.permute.default, at, tensor, order)

    def _laid(self, context: TensorRef, operand: Operand, at: Op) -> TensorRef:
        """Return a context `batch heads token head_dim` in the dimensions of the recorded one."""
        dims = operand.layout.dims
        names = ["batch", "heads", "token", "head_dim"]
        order = [names.index(name) for dim in dims for name in (("heads", "head_dim") if dim == "features" else (dim,))]
        if "batch" not in dims:
            order.insert(0, 0)
        if order != [0, 1, 2, 3]:
            context = self._do(_A.permute.default, at, context, order)
        return self._folded(context, operand.tensor.shape, at)

    def _normed(self, tensor: TensorRef, at: Op) -> TensorRef:
        self._new_call()
        length = self._do(_A.linalg_vector_norm.default, at, tensor, 2, [-1], True)
        return self._do(_A.div.Tensor, at, tensor, length)

    def _repeated(self, tensor: TensorRef, times: int, at: Op) -> TensorRef:
        """Repeat each key head: `batch kv_heads key head_dim -> batch (kv_heads group) key head_dim`."""
        if times == 1:
            return tensor
        self._new_call()
        batch, heads, tokens, size = tensor.shape
        wide = self._do(_A.unsqueeze.default, at, tensor, 2)
        wide = self._do(_A.expand.default, at, wide, [batch, heads, times, tokens, size])
        return self._folded(wide, (batch, heads * times, tokens, size), at)

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
            kept = self._values.get(tensor.id)
            if kept is not None and not kept.is_meta:
                self._numbers[tensor.id] = kept
            else:
                dtype = getattr(torch, tensor.dtype)
                self._numbers[tensor.id] = torch.zeros(tensor.shape, dtype=dtype)
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
        read = [value for value in args if isinstance(value, TensorRef)]
        contents = [self._content(value) if isinstance(value, TensorRef) else value for value in args]
        result: Tensor = func(*contents, **kwargs)
        source = contents[0]
        is_view = result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        output = self._named(result, read[0].storage if is_view else self._new_storage())
        self._numbers[output.id] = result
        if all(tensor.id in self._values or tensor.id in self._constants for tensor in read):
            self._values[output.id] = result
        known = about(func)
        kind: Kind = "view" if is_view else "copy" if known.copies else "compute"
        named = {name: str(value) for name, value in kwargs.items()}
        plain = tuple(tuple(value) if isinstance(value, list) else value for value in args)
        self._add(known.name, plain, named, tuple(read), output, kind, at, pointwise=known.pointwise)
        return output

    def _link(self, last: TensorRef, result: TensorRef, maker: Op) -> None:
        """Add the link from the last step to what the run gave."""
        self._add(RESULT, (last,), {"kernel": maker.name}, (last,), result, "copy", maker, pointwise=False)

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
