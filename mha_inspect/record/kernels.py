"""Read the call of a fused attention kernel, and compute it step by step: one computation for all such kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
        return (*self.query.shape[:-1], self.key.shape[-2])

    @property
    def is_plainly_causal(self) -> bool:
        """Whether the mask is a lower triangle that starts at the first query and key."""
        aligned = self.from_end or self.starts is not None or max(self.window) >= 0
        return self.causal and not aligned and self.few is None

    def steps(self, do: Do, dtype: torch.dtype | None = None, *, described: bool = False) -> tuple[Tensor, ...]:
        """Compute the attention step by step; with `dtype`, both the steps and the result are in that dtype."""
        product = attention(do, self.heads_first(do), dtype, described=described)
        product = _in_dtype(do, product, dtype or self.query.dtype)
        return (do(_A.transpose.int, product, -3, -2) if self.rows_first else product,)

    def size(self, results: Sequence[Tensor]) -> int:
        """Return the bytes of the largest step, the scores."""
        return 4 * math.prod(self.scores_shape)

    def heads_first(self, do: Do) -> AttentionCall:
        """Return the same call with the heads dimension before the rows."""
        if not self.rows_first:
            return self
        query, key, value = (do(_A.transpose.int, tensor, -3, -2) for tensor in (self.query, self.key, self.value))
        return self._replace(query=query, key=key, value=value, rows_first=False)

    def of_few(
        self, results: Sequence[Tensor], turn: int, steps: Sequence[Tensor] | None = None
    ) -> tuple[AttentionCall, tuple[Tensor, ...]]:
        """Return the call for a few queries of one head, and the kernel's result for them.

        `turn` selects the head; with the results of the `steps`, the largest difference selects head and queries.
        """
        asked, *given = self.heads_first(run), results[0], *(steps or ())
        given = [tensor.transpose(-3, -2) for tensor in given] if self.rows_first else given
        *shape, count, width = given[0].shape
        number, query = turn % math.prod(shape), count - 1
        if steps is not None:
            apart = (given[0] - given[1]).abs().nan_to_num(nan=0.0, posinf=0.0)
            number, query = divmod(int(apart.argmax()) // width, count)
        head = tuple(map(int, np.unravel_index(number, shape)))
        step = max(1, count // FEW)
        group = asked.query.shape[-3] // asked.key.shape[-3] if head else 1
        shared = (*head[:-1], head[-1] // group) if head else ()
        rows = range(query % step, count, step)
        bias, keys = asked.bias, range(asked.key.shape[-2])
        if bias is not None:
            bias = bias.expand(*shape, *bias.shape[-2:])
            bias = _of_head(bias, head, rows if bias.shape[-2] > 1 else range(1))
        key, value = _of_head(asked.key, shared, keys), _of_head(asked.value, shared, keys)
        few = asked._replace(
            query=_of_head(asked.query, head, rows), key=key, value=value, bias=bias, few=(rows, count)
        )
        return few, (_of_head(given[0], head, rows),)

    def allowed(self, rows: Tensor) -> Tensor | None:
        """Return which keys these queries may attend to, ignoring the bias: `query key`; None if every key."""
        if not self.causal and self.starts is None and max(self.window) < 0:
            return None
        distance, allowed = self._distances(rows)
        before, after = self.window
        allowed = allowed & (distance >= 0) if self.causal else allowed.expand(distance.shape)
        allowed = allowed & (distance <= before) if before >= 0 else allowed
        return allowed & (distance >= -after) if after >= 0 else allowed

    def _distances(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many positions each key is before each query, and whether both are in the same sequence."""
        count = self.query.shape[-2] if self.few is None else self.few[1]
        keys = torch.arange(self.key.shape[-2], device=rows.device)
        if self.starts is None:
            places = rows + (len(keys) - count if self.from_end else 0)
            return places[:, None] - keys, torch.ones((), dtype=torch.bool, device=rows.device)
        other_starts = self.starts if self.key_starts is None else self.key_starts
        first, second = (start.to(rows.device).long() for start in (self.starts, other_starts))
        row, other = (torch.searchsorted(s[1:], at, right=True) for s, at in ((first, rows), (second, keys)))
        # Aligned at the end, the last query of a sequence has the position of its last key.
        shift = second.diff() - first.diff() if self.from_end else torch.zeros_like(first[1:])
        places = rows - first[row] + shift[row]
        return places[:, None] - (keys - second[other]), row[:, None] == other


OPERANDS = AttentionCall._fields[:6]


_REFUSED = ("seqused_k", "seqlen_k", "block_table", "dropout_mask", "alibi_slopes")
"""Arguments that the steps do not support."""


def bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by schema name, in order; a missing one is its default or None."""
    names = {each.name: each.default_value if each.has_default_value() else None for each in func._schema.arguments}
    return {**names, **dict(zip(names, args, strict=False)), **kwargs}


def read_attention(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AttentionCall:
    """Return the call of an attention kernel, with its operands unchanged.

    Arguments are found by their schema names. Raises `NotOpenedError` for an argument that the steps do not support.
    """
    given, kernel = bound(func, args, kwargs), about(func).name

    def first(*names: str) -> Any:
        return next((given[name] for name in names if name in given), None)

    if func._overloadname == "quantized":
        raise NotOpenedError("quantized operands are not supported")
    for refused in _REFUSED:
        if given.get(refused) is not None:
            raise NotOpenedError(f"{refused} is not supported")
    query, key, value = first("query", "q"), first("key", "k"), first("value", "v")
    if query.is_nested or key.is_nested or value.is_nested:
        raise NotOpenedError("nested tensors (rows of different lengths) are not supported")
    bias = first("attn_mask", "attn_bias", "bias")
    starts, key_starts = (first(*(f"{start}_{side}" for start in ("cum_seq", "cu_seqlens", "cu_seq"))) for side in "qk")
    kind, window = given.get("custom_mask_type", 0), given.get("window_size")
    if isinstance(window, int) and window > 0:
        raise NotOpenedError("window_size is not supported")
    if not isinstance(window, (list, tuple)):
        window = given.get("window_size_left"), given.get("window_size_right")
    before, after = (-1 if end is None else int(end) for end in window)
    # Heads come after rows, except in cuDNN's kernel without packed rows.
    is_flat = not kernel.startswith(("aten._scaled", "aten._triton"))
    rows_first = is_flat and (starts is not None or "cudnn" not in kernel)
    return AttentionCall(
        query,
        key,
        value,
        bias if isinstance(bias, Tensor) else None,
        starts,
        key_starts,
        causal=bool(given.get("is_causal")) or kind in (1, 2),
        from_end=kind == 2 or (rows_first and kind == 0),
        window=(before, after),
        scale=1 / math.sqrt(query.shape[-1]) if given.get("scale") is None else float(given["scale"]),
        dropout=float(given.get("dropout_p") or 0.0),
        rows_first=rows_first,
    )


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
    dtype = torch.float32 if dtype in (torch.half, torch.bfloat16) else dtype
    heads, kv_heads = (tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in (query, key))
    bias = _bias(do, asked, dtype, described)
    query = do(_A.mul.Scalar, _in_dtype(do, query, dtype), asked.scale)
    key = _repeated(do, _in_dtype(do, key, dtype), heads // kv_heads)
    scores = _product(do, query, do(_A.transpose.int, key, -2, -1))
    del query, key  # free a long sequence's keys in float64 before converting its values
    if bias is None:
        weights = do(_A._softmax.default, scores, -1, False)
    else:
        scores = do(_A.add.Tensor, scores, bias)
        # With only a lower triangle, each query can attend to at least one key.
        whole = asked.is_plainly_causal and asked.bias is None
        weights = do(_A._softmax.default, scores, -1, False) if whole else do(_A._safe_softmax.default, scores, -1)
    del scores, bias
    product: Tensor = _product(do, weights, _repeated(do, _in_dtype(do, value, dtype), heads // kv_heads))
    return product


def _in_dtype(do: Do, tensor: Tensor, dtype: torch.dtype) -> Any:
    return tensor if tensor.dtype == dtype else do(_A._to_copy.default, tensor, dtype=dtype)


def _bias(do: Do, asked: AttentionCall, dtype: torch.dtype, described: bool) -> Any:
    """Return the bias added to the scores, None if there is none; a plain causal mask is built in recorded steps."""
    bias = None if asked.bias is None else _filled(do, asked.bias, dtype)
    shape, device = asked.scores_shape[-2:], asked.query.device
    if asked.is_plainly_causal:
        triangle = do(_A.tril.default, do(_A.ones.default, list(shape), dtype=torch.bool, device=device))
        added = _filled(do, triangle, dtype)
    elif not asked.causal and asked.starts is None and max(asked.window) < 0:
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
    zero, masked = (do(_A.scalar_tensor.default, n, dtype=dtype, device=mask.device) for n in (0.0, -torch.inf))
    return do(_A.where.self, mask, zero, masked)


def _repeated(do: Do, tensor: Tensor, times: int) -> Any:
    """Repeat each key or value head: `... kv_heads key head_dim -> ... (kv_heads group) key head_dim`."""
    if times == 1:
        return tensor
    shape = tensor.shape
    wide = do(_A.expand.default, do(_A.unsqueeze.default, tensor, -3), [*shape[:-2], times, *shape[-2:]])
    copied = do(_A.clone.default, wide, memory_format=torch.contiguous_format)
    return do(_A._unsafe_view.default, copied, [*shape[:-3], shape[-3] * times, *shape[-2:]])


def _product(do: Do, left: Tensor, right: Tensor) -> Any:
    """Return a matrix product as torch computes it: one `bmm` over the flattened leading dimensions."""
    lead = max(tuple(left.shape[:-2]), tuple(right.shape[:-2]))
    product = do(_A.bmm.default, _as_one(do, left, lead), _as_one(do, right, lead))
    shape = [*lead, left.shape[-2], right.shape[-1]]
    return product if list(product.shape) == shape else do(_A._unsafe_view.default, product, shape)


def _as_one(do: Do, tensor: Tensor, lead: tuple[int, ...]) -> Any:
    """Return a tensor with its leading dimensions flattened into one, copied if the strides do not allow a view."""
    if tuple(tensor.shape[:-2]) != lead:
        tensor = do(_A.expand.default, tensor, [*lead, *tensor.shape[-2:]])
    if len(lead) == 1:
        return tensor
    shape = [math.prod(lead), *tensor.shape[-2:]]
    places = [(n, s) for n, s in zip(lead, tensor.stride(), strict=False) if n != 1]
    if all(outer == n * inner for (_, outer), (n, inner) in pairwise(places)):  # contiguous with each other
        return do(_A.view.default, tensor, shape)
    return do(_A._unsafe_view.default, do(_A.clone.default, tensor, memory_format=torch.contiguous_format), shape)


def _split_qkv(do: Do, qkv: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Split `batch query (qkv heads head_dim)` into three of `batch heads query head_dim`, with scaled queries."""
    batch, rows, width = qkv.shape
    head_dim = width // 3 // heads
    parts = do(_A.split.Tensor, do(_A.add.Tensor, qkv, bias), width // 3, -1)
    by_head = [do(_A.view.default, part, [batch, rows, heads, head_dim]) for part in parts]
    query, key, value = (do(_A.transpose.int, part, 1, 2) for part in by_head)
    return do(_A.mul.Scalar, query, 1 / math.sqrt(head_dim)), key, value


def _masked_softmax(
    do: Do, scores: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None
) -> tuple[Tensor, ...]:
    """Return the masked softmax of scores; the mask is `query key` (type 0), `batch key` (1) or as the scores (2)."""
    if mask_type == 1:
        mask = do(_A.unsqueeze.default, do(_A.unsqueeze.default, mask, 1), 1)
    masked = do(_A.masked_fill.Scalar, scores, mask, -torch.inf)
    return (do(_A._softmax.default, masked, -1 if dim is None else dim, False),)


def _adding_product(
    do: Do, added: Tensor, left: Tensor, right: Tensor, beta: float = 1, alpha: float = 1
) -> tuple[Tensor, ...]:
    """Return beta · added + alpha · left · right, as `baddbmm` and `addmm` do."""
    product = do(_A.bmm.default if left.dim() == 3 else _A.mm.default, left, right)
    product = product if alpha == 1 else do(_A.mul.Scalar, product, alpha)
    added = added if beta == 1 else do(_A.mul.Scalar, added, beta)
    return (do(_A.add.Tensor, product, added),)


def _few(tensor: Tensor, rank: int) -> Tensor:
    """Return the first `FEW` items of a tensor of this rank; the whole tensor if it is broadcast along them."""
    return tensor[:FEW] if tensor.dim() == rank else tensor


_PARTS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Any, ...]]]] = {
    "aten._transform_bias_rescale_qkv.default": (_split_qkv, lambda qkv, bias, heads: (qkv[:FEW], bias, heads)),
    "aten._masked_softmax.default": (
        _masked_softmax,
        lambda scores, mask, dim=None, kind=None: (scores[:FEW], mask if kind == 0 else mask[:FEW], dim, kind),
    ),
    "aten.baddbmm.default": (
        _adding_product,
        lambda added, left, right, *rest: (_few(added, 3), left[:FEW], right[:FEW], *rest),
    ),
    "aten.addmm.default": (
        _adding_product,
        lambda added, left, right, *rest: (_few(added, 2), left[:FEW], right, *rest),
    ),
}
"""Kernel that computes part of an attention, to its steps and to the selection of arguments for its first results."""


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
        return _PARTS[self.name][0](do, *args, **self.settings)

    def of_few(
        self, results: Sequence[Tensor], turn: int, steps: Sequence[Tensor] | None = None
    ) -> tuple[PartCall, tuple[Tensor, ...]]:
        """Return the call for the first few items of the first dimension, and the kernel's results for them."""
        return self._replace(args=_PARTS[self.name][1](*self.args)), tuple(result[:FEW] for result in results)


KernelCall = AttentionCall | PartCall


def read_kernel(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> KernelCall:
    """Return the call of a kernel. Raises `NotOpenedError` if its steps are not known or not supported."""
    known = about(func)
    if known.fused is not None and known.fused.way == "attention":
        return read_attention(func, args, kwargs)
    if known.name not in _PARTS:
        raise NotOpenedError("its steps are not known")
    if any(tensor.is_nested for _, tensor in tensors_in(args)):
        raise NotOpenedError("nested tensors (rows of different lengths) are not supported")
    return PartCall(known.name, tuple(args), dict(kwargs))


def _of_head(tensor: Tensor, head: tuple[int, ...], rows: range) -> Tensor:
    """Return a view of some rows of one head of `... heads row width`, with the same number of dimensions."""
    where = *(slice(at, at + 1) for at in head), slice(rows.start, rows.stop, rows.step)
    return tensor[where]
