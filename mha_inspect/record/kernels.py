"""Read the call of a fused attention kernel, and compute it step by step: one computation for all such kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .arguments import cast_tensors, tensors_in
from .catalog import about

_A = torch.ops.aten
Do = Callable[..., Any]
"""Runs one torch operation, and records it."""


FEW = 4
"""Number of rows in which a kernel is compared with its steps."""


class NotOpenedError(Exception):
    """A kernel does something that the steps here do not compute; the message is the reason."""


class AttentionCall(NamedTuple):
    """The call of an attention kernel, on `... heads query head_dim` and `... heads key head_dim`."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    starts: Tensor | None = None
    """Start of each sequence among packed queries, then the end of the last sequence; None if nothing is packed."""
    key_starts: Tensor | None = None
    """The same for packed keys; None if they start where the queries do."""
    causal: bool = False
    from_end: bool = False
    """Whether the last query is aligned with the last key, rather than the first query with the first key."""
    window: tuple[int, int] = (-1, -1)
    """How many keys before and after its position a query may attend to; -1 for no limit."""
    scale: float = 1.0
    dropout: float = 0.0
    rows_first: bool = False
    """Whether query, key, value and result are laid out `... row heads head_dim`."""
    few: tuple[range, int] | None = None
    """The selected queries, and the number of all queries; None if no query is omitted."""

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """`... heads query key`."""
        *before, queries, _ = self.query.shape
        keys = self.key.shape[-2]
        return (*before, queries, keys)

    @property
    def is_plainly_causal(self) -> bool:
        """Whether the mask is a lower triangle that starts at the first query and key."""
        if not self.causal or self.few is not None:
            return False
        starts_elsewhere = self.from_end or self.starts is not None
        return not starts_elsewhere and not self.has_window

    @property
    def has_window(self) -> bool:
        """Whether a query may attend to a limited number of keys before or after it only."""
        return max(self.window) >= 0

    def steps(self, do: Do, dtype: torch.dtype | None = None, *, described: bool = False) -> tuple[Tensor, ...]:
        """Compute the attention step by step; with `dtype`, both the steps and the result are in that dtype."""
        product = attention(do, self.heads_first(do), dtype, described=described)
        product = _in_dtype(do, product, dtype or self.query.dtype)
        if self.rows_first:
            product = _swapped(do, product)
        return (product,)

    def size(self, results: Sequence[Tensor]) -> int:
        """Return the bytes of the largest step, the scores."""
        return 4 * math.prod(self.scores_shape)

    def heads_first(self, do: Do) -> AttentionCall:
        """Return the same call with the heads dimension before the rows."""
        if not self.rows_first:
            return self
        return self._replace(
            query=_swapped(do, self.query),
            key=_swapped(do, self.key),
            value=_swapped(do, self.value),
            rows_first=False,
        )

    def of_few(
        self, results: Sequence[Tensor], turn: int, steps: Sequence[Tensor] | None = None
    ) -> tuple[AttentionCall, tuple[Tensor, ...]]:
        """Return the call for a few queries of one head, and the kernel's result for them.

        `turn` selects the head; with the results of the `steps`, the largest difference selects head and queries.
        """
        asked = self.heads_first(run)
        compared = [results[0], *(steps or ())]
        if self.rows_first:
            compared = [tensor.transpose(-3, -2) for tensor in compared]
        result = compared[0]
        *shape, count, width = result.shape
        number = turn % math.prod(shape)
        query = count - 1
        if steps is not None:
            difference = (result - compared[1]).abs().nan_to_num(nan=0.0, posinf=0.0)
            row = int(difference.argmax()) // width
            number, query = divmod(row, count)
        head = tuple(map(int, np.unravel_index(number, shape)))
        step = max(1, count // FEW)
        rows = range(query % step, count, step)
        few = asked._of_rows(head, rows, tuple(shape))
        rows_of_result = _of_head(result, head, rows)
        return few._replace(few=(rows, count)), (rows_of_result,)

    def _of_rows(self, head: tuple[int, ...], rows: range, shape: tuple[int, ...]) -> AttentionCall:
        """Return the call for some queries of one head, with all of its keys, which have the shape `... heads`.

        Several query heads may share one key head.
        """
        kv_head = head
        if head:
            group = _heads_of(self.query) // _heads_of(self.key)
            *item, query_head = head
            kv_head = (*item, query_head // group)
        keys = range(self.key.shape[-2])
        bias = self.bias
        if bias is not None:
            is_same_for_all_queries = bias.shape[-2] == 1
            bias = bias.expand(*shape, *bias.shape[-2:])
            bias = _of_head(bias, head, range(1) if is_same_for_all_queries else rows)
        return self._replace(
            query=_of_head(self.query, head, rows),
            key=_of_head(self.key, kv_head, keys),
            value=_of_head(self.value, kv_head, keys),
            bias=bias,
        )

    def allowed(self, rows: Tensor) -> Tensor | None:
        """Return which keys these queries may attend to, ignoring the bias: `query key`; None if every key."""
        if not self.causal and self.starts is None and not self.has_window:
            return None
        distance, allowed = self._distances(rows)
        before, after = self.window
        allowed = allowed.expand(distance.shape)
        if self.causal:
            allowed = allowed & (distance >= 0)
        if before >= 0:
            allowed = allowed & (distance <= before)
        if after >= 0:
            allowed = allowed & (distance >= -after)
        return allowed

    def _distances(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many positions each key is before each query, and whether both are in the same sequence."""
        count = self.query.shape[-2] if self.few is None else self.few[1]
        keys = torch.arange(self.key.shape[-2], device=rows.device)
        if self.starts is not None:
            return self._packed_distances(self.starts.to(rows.device).long(), rows, keys)
        places = rows
        if self.from_end:
            places = rows + (len(keys) - count)
        return places[:, None] - keys, torch.ones((), dtype=torch.bool, device=rows.device)

    def _packed_distances(self, starts: Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same for packed sequences, whose first queries are at `starts`."""
        key_starts = starts if self.key_starts is None else self.key_starts.to(rows.device).long()
        sequences = torch.searchsorted(starts[1:], rows, right=True)
        key_sequences = torch.searchsorted(key_starts[1:], keys, right=True)
        places = rows - starts[sequences]
        key_places = keys - key_starts[key_sequences]
        if self.from_end:
            # The last query of a sequence has the position of its last key.
            shift = key_starts.diff() - starts.diff()
            places = places + shift[sequences]
        return places[:, None] - key_places, sequences[:, None] == key_sequences


OPERANDS = AttentionCall._fields[:6]


_REFUSED = ("seqused_k", "seqlen_k", "block_table", "dropout_mask", "alibi_slopes")
"""Arguments that the steps do not support."""


def bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by schema name, in order; a missing one is its default or None."""
    defaults = {}
    for argument in func._schema.arguments:
        defaults[argument.name] = argument.default_value if argument.has_default_value() else None
    by_position = dict(zip(defaults, args, strict=False))
    return {**defaults, **by_position, **kwargs}


def read_attention(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AttentionCall:
    """Return the call of an attention kernel, with its operands unchanged.

    Arguments are found by their schema names. Raises `NotOpenedError` for an argument that the steps do not support.
    """
    arguments, kernel = bound(func, args, kwargs), about(func).name
    _refuse_unsupported(func, arguments)
    query = _first(arguments, "query", "q")
    key = _first(arguments, "key", "k")
    value = _first(arguments, "value", "v")
    if query.is_nested or key.is_nested or value.is_nested:
        raise NotOpenedError("nested tensors (rows of different lengths) are not supported")
    bias = _first(arguments, "attn_mask", "attn_bias", "bias")
    starts = _first(arguments, "cum_seq_q", "cu_seqlens_q", "cu_seq_q")
    mask_type = arguments.get("custom_mask_type", 0)
    # Heads come after rows, except in cuDNN's kernel without packed rows.
    is_flat = not kernel.startswith(("aten._scaled", "aten._triton"))
    rows_first = is_flat and (starts is not None or "cudnn" not in kernel)
    scale = arguments.get("scale")
    return AttentionCall(
        query,
        key,
        value,
        bias=bias if isinstance(bias, Tensor) else None,
        starts=starts,
        key_starts=_first(arguments, "cum_seq_k", "cu_seqlens_k", "cu_seq_k"),
        causal=bool(arguments.get("is_causal")) or mask_type in (1, 2),
        from_end=mask_type == 2 or (rows_first and mask_type == 0),
        window=_window(arguments),
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
        dropout=float(arguments.get("dropout_p") or 0.0),
        rows_first=rows_first,
    )


def _refuse_unsupported(func: Any, arguments: Mapping[str, Any]) -> None:
    """Raise `NotOpenedError` for an argument that the steps do not support."""
    if func._overloadname == "quantized":
        raise NotOpenedError("quantized operands are not supported")
    for name in _REFUSED:
        if arguments.get(name) is not None:
            raise NotOpenedError(f"{name} is not supported")


def _first(arguments: Mapping[str, Any], *names: str) -> Any:
    """Return the argument that has the first of these names which the kernel uses; None if it uses none of them."""
    for name in names:
        if name in arguments:
            return arguments[name]
    return None


def _window(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many keys before and after its position a query may attend to; -1 for no limit."""
    window = arguments.get("window_size")
    if isinstance(window, int) and window > 0:
        raise NotOpenedError("window_size is not supported")
    if isinstance(window, (list, tuple)):
        before, after = window
    else:
        before, after = arguments.get("window_size_left"), arguments.get("window_size_right")
    return -1 if before is None else int(before), -1 if after is None else int(after)


# -- the steps --------------------------------------------------------------------------------------------------------


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a step without recording it."""
    return func(*args, **kwargs)


def attention(do: Do, asked: AttentionCall, dtype: torch.dtype | None = None, *, described: bool = False) -> Tensor:
    """Return softmax(q·kᵀ·scale + bias)·v, step by step; half precision is summed in float32, as in kernels.

    With `dtype`, compute in that dtype. With `described`, the steps have shapes and no numbers.
    """
    query, key, value = asked.query, asked.key, asked.value
    dtype = dtype or query.dtype
    if dtype in (torch.half, torch.bfloat16):
        dtype = torch.float32
    group = _heads_of(query) // _heads_of(key)
    bias = _bias(do, asked, dtype, described)
    query = do(_A.mul.Scalar, _in_dtype(do, query, dtype), asked.scale)
    key = _repeated(do, _in_dtype(do, key, dtype), group)
    scores = _product(do, query, do(_A.transpose.int, key, -2, -1))
    del query, key  # free a long sequence's keys in float64 before converting its values
    if bias is not None:
        scores = do(_A.add.Tensor, scores, bias)
    # Without a bias, or with only a lower triangle, each query can attend to at least one key.
    if bias is None or (asked.is_plainly_causal and asked.bias is None):
        weights = do(_A._softmax.default, scores, -1, False)
    else:
        weights = do(_A._safe_softmax.default, scores, -1)
    del scores, bias
    product: Tensor = _product(do, weights, _repeated(do, _in_dtype(do, value, dtype), group))
    return product


def _heads_of(tensor: Tensor) -> int:
    """Return the number of heads: that of `... heads row head_dim`, or 1 for `row head_dim`."""
    return tensor.shape[-3] if tensor.dim() > 2 else 1


def _in_dtype(do: Do, tensor: Tensor, dtype: torch.dtype) -> Any:
    return tensor if tensor.dtype == dtype else do(_A._to_copy.default, tensor, dtype=dtype)


def _bias(do: Do, asked: AttentionCall, dtype: torch.dtype, described: bool) -> Any:
    """Return the bias added to the scores, None if there is none; a plain causal mask is built in recorded steps."""
    bias = None if asked.bias is None else _filled(do, asked.bias, dtype)
    shape, device = asked.scores_shape[-2:], asked.query.device
    if asked.is_plainly_causal:
        triangle = do(_A.tril.default, do(_A.ones.default, list(shape), dtype=torch.bool, device=device))
        added = _filled(do, triangle, dtype)
    elif not asked.causal and asked.starts is None and not asked.has_window:
        return bias
    elif described or device.type == "meta":
        added = torch.empty(shape, dtype=dtype, device="meta")
    else:
        queries = range(shape[0]) if asked.few is None else asked.few[0]
        added = _filled(run, asked.allowed(torch.tensor(queries, device=device)), dtype)
    return added if bias is None else do(_A.add.Tensor, bias, added)


def _filled(do: Do, mask: Any, dtype: torch.dtype) -> Any:
    """Return an additive mask: a boolean mask becomes 0 where a query may attend and -inf elsewhere."""
    if mask.dtype != torch.bool:
        return _in_dtype(do, mask, dtype)
    zero = do(_A.scalar_tensor.default, 0.0, dtype=dtype, device=mask.device)
    masked = do(_A.scalar_tensor.default, -torch.inf, dtype=dtype, device=mask.device)
    return do(_A.where.self, mask, zero, masked)


def _repeated(do: Do, tensor: Tensor, times: int) -> Any:
    """Repeat each key or value head: `... kv_heads key head_dim -> ... (kv_heads group) key head_dim`."""
    if times == 1:
        return tensor
    *before, heads, keys, head_dim = tensor.shape
    apart = do(_A.unsqueeze.default, tensor, -3)
    wide = do(_A.expand.default, apart, [*before, heads, times, keys, head_dim])
    copied = do(_A.clone.default, wide, memory_format=torch.contiguous_format)
    return do(_A._unsafe_view.default, copied, [*before, heads * times, keys, head_dim])


def _product(do: Do, left: Tensor, right: Tensor) -> Any:
    """Return a matrix product as torch computes it: one `bmm` over the flattened leading dimensions."""
    lead_of_left, lead_of_right = tuple(left.shape[:-2]), tuple(right.shape[:-2])
    lead = max(lead_of_left, lead_of_right)
    left_matrices = _as_one(do, left, lead)
    right_matrices = _as_one(do, right, lead)
    product = do(_A.bmm.default, left_matrices, right_matrices)
    shape = [*lead, left.shape[-2], right.shape[-1]]
    if list(product.shape) == shape:
        return product
    return do(_A._unsafe_view.default, product, shape)


def _as_one(do: Do, tensor: Tensor, lead: tuple[int, ...]) -> Any:
    """Return a tensor with its leading dimensions flattened into one, copied if the strides do not allow a view."""
    if tuple(tensor.shape[:-2]) != lead:
        tensor = do(_A.expand.default, tensor, [*lead, *tensor.shape[-2:]])
    if len(lead) == 1:
        return tensor
    shape = [math.prod(lead), *tensor.shape[-2:]]
    if not _is_contiguous(tensor, lead):
        tensor = do(_A.clone.default, tensor, memory_format=torch.contiguous_format)
        return do(_A._unsafe_view.default, tensor, shape)
    return do(_A.view.default, tensor, shape)


def _is_contiguous(tensor: Tensor, lead: tuple[int, ...]) -> bool:
    """Return whether the leading dimensions are contiguous with each other, so that a view has them as one."""
    dims = [(size, stride) for size, stride in zip(lead, tensor.stride(), strict=False) if size != 1]
    return all(outer == size * stride for (_, outer), (size, stride) in pairwise(dims))


def _split_qkv(do: Do, qkv: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Split `batch query (qkv heads head_dim)` into three of `batch heads query head_dim`, with scaled queries."""
    batch, rows, width = qkv.shape
    features = width // 3
    head_dim = features // heads
    added = do(_A.add.Tensor, qkv, bias)
    parts = do(_A.split.Tensor, added, features, -1)
    shape = [batch, rows, heads, head_dim]
    by_head = [do(_A.view.default, part, shape) for part in parts]
    query, key, value = (do(_A.transpose.int, part, 1, 2) for part in by_head)
    scaled = do(_A.mul.Scalar, query, 1 / math.sqrt(head_dim))
    return scaled, key, value


def _masked_softmax(
    do: Do, scores: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None
) -> tuple[Tensor, ...]:
    """Return the masked softmax of scores; the mask is `query key` (type 0), `batch key` (1) or as the scores (2)."""
    if mask_type == 1:
        of_queries = do(_A.unsqueeze.default, mask, 1)
        mask = do(_A.unsqueeze.default, of_queries, 1)
    if dim is None:
        dim = -1
    masked = do(_A.masked_fill.Scalar, scores, mask, -torch.inf)
    weights = do(_A._softmax.default, masked, dim, False)
    return (weights,)


def _adding_product(
    do: Do, added: Tensor, left: Tensor, right: Tensor, beta: float = 1, alpha: float = 1
) -> tuple[Tensor, ...]:
    """Return beta · added + alpha · left · right, as `baddbmm` and `addmm` do."""
    multiply = _A.bmm.default if left.dim() == 3 else _A.mm.default
    product = do(multiply, left, right)
    if alpha != 1:
        product = do(_A.mul.Scalar, product, alpha)
    if beta != 1:
        added = do(_A.mul.Scalar, added, beta)
    return (do(_A.add.Tensor, product, added),)


def _swapped(do: Do, tensor: Tensor) -> Any:
    """Swap rows and heads: `... row heads head_dim -> ... heads row head_dim`, or back."""
    return do(_A.transpose.int, tensor, -3, -2)


def _few(tensor: Tensor, rank: int) -> Tensor:
    """Return the first `FEW` items of a tensor of this rank; the whole tensor if it is broadcast along them."""
    return tensor[:FEW] if tensor.dim() == rank else tensor


@dataclass(frozen=True)
class _Part:
    """A kernel that computes part of an attention."""

    steps: Callable[..., tuple[Tensor, ...]]
    """Takes `do`, then the arguments of the kernel, and computes its results step by step."""
    few: Callable[..., tuple[Any, ...]]
    """Takes the arguments of the kernel, and returns those of its first results."""


def _few_of_qkv(qkv: Tensor, bias: Tensor, heads: int) -> tuple[Any, ...]:
    return qkv[:FEW], bias, heads


def _few_of_softmax(
    scores: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None
) -> tuple[Any, ...]:
    # A mask of `query key` is the same for all items.
    few_masks = mask if mask_type == 0 else mask[:FEW]
    return scores[:FEW], few_masks, dim, mask_type


def _few_of_matrices(added: Tensor, left: Tensor, right: Tensor, *factors: float) -> tuple[Any, ...]:
    """Return the first of several matrices, `item row column`, and their products."""
    return _few(added, 3), left[:FEW], right[:FEW], *factors


def _few_of_rows(added: Tensor, left: Tensor, right: Tensor, *factors: float) -> tuple[Any, ...]:
    """Return the first rows of one matrix, and the whole of the other."""
    return _few(added, 2), left[:FEW], right, *factors


_PARTS = {
    "aten._transform_bias_rescale_qkv.default": _Part(_split_qkv, _few_of_qkv),
    "aten._masked_softmax.default": _Part(_masked_softmax, _few_of_softmax),
    "aten.baddbmm.default": _Part(_adding_product, _few_of_matrices),
    "aten.addmm.default": _Part(_adding_product, _few_of_rows),
}


class PartCall(NamedTuple):
    """The call of a kernel that computes part of an attention."""

    name: str
    args: tuple[Any, ...]
    settings: dict[str, Any]
    dropout: float = 0.0

    def size(self, results: Sequence[Tensor]) -> int:
        """Return the bytes of the largest step."""
        return 4 * results[0].numel()

    def steps(self, do: Do, dtype: torch.dtype | None = None, *, described: bool = False) -> tuple[Tensor, ...]:
        """Compute the kernel step by step; with `dtype`, in that dtype."""
        args = self.args if dtype is None else cast_tensors(self.args, dtype)
        return _PARTS[self.name].steps(do, *args, **self.settings)

    def of_few(
        self, results: Sequence[Tensor], turn: int, steps: Sequence[Tensor] | None = None
    ) -> tuple[PartCall, tuple[Tensor, ...]]:
        """Return the call for the first few items of the first dimension, and the kernel's results for them."""
        args = _PARTS[self.name].few(*self.args)
        return self._replace(args=args), tuple(result[:FEW] for result in results)


KernelCall = AttentionCall | PartCall


def read_kernel(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> KernelCall:
    """Return the call of a kernel. Raises `NotOpenedError` if its steps are not known or not supported."""
    operator = about(func)
    if operator.fused is not None and operator.fused.way == "attention":
        return read_attention(func, args, kwargs)
    if operator.name not in _PARTS:
        raise NotOpenedError("its steps are not known")
    if any(tensor.is_nested for _, tensor in tensors_in(args)):
        raise NotOpenedError("nested tensors (rows of different lengths) are not supported")
    return PartCall(operator.name, tuple(args), dict(kwargs))


def _of_head(tensor: Tensor, head: tuple[int, ...], rows: range) -> Tensor:
    """Return a view of some rows of one head of `... heads row width`, with the same number of dimensions."""
    of_head = [slice(index, index + 1) for index in head]
    of_rows = slice(rows.start, rows.stop, rows.step)
    return tensor[*of_head, of_rows]
