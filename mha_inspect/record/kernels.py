"""What an attention kernel was asked for, and its steps: the one computation that stands for every such kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .schema import about

_A = torch.ops.aten
Do = Callable[..., Any]
"""Runs one operation of torch, and has it recorded."""


class NotOpenedError(Exception):
    """A kernel does something that no steps here follow; the message is the reason."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What an attention kernel was asked for: `... heads query head_dim`, `... heads key head_dim`."""

    query: Tensor
    key: Tensor
    value: Tensor
    device: torch.device
    """Where they are, also where tensors on meta stand for them."""
    bias: Tensor | None = None
    causal: bool = False
    from_end: bool = False
    """Whether the last query looks at the last key, and not the first at the first."""
    window: tuple[int, int] = (-1, -1)
    """How many keys before and after a query's own place it may look at; -1 is all of them."""
    starts: tuple[Tensor, Tensor] | None = None
    """Where each sequence begins among packed queries and keys, and where the last one ends."""
    slopes: Tensor | None = None
    """What is taken off for each key of distance, by head."""
    scale: float = 1.0
    dropout: float = 0.0
    few: tuple[range, int] | None = None
    """Which queries these are, and of how many, where others were left out."""

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """`... heads query key`."""
        return (*self.query.shape[:-1], self.key.shape[-2])

    @property
    def is_plainly_causal(self) -> bool:
        """Whether a lower triangle says who looks at whom."""
        aligned = self.from_end or self.starts is not None or max(self.window) >= 0
        return self.causal and not aligned and self.few is None

    def heads_first(self, do: Do) -> AttentionCall:
        """Return the same with heads before rows, where they come after them."""
        query, key, value = (do(_A.transpose.int, tensor, -3, -2) for tensor in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value)

    def without_batch(self, do: Do) -> AttentionCall:
        """Return the same without a batch of one."""
        given = {"query": self.query, "key": self.key, "value": self.value, "bias": self.bias, "slopes": self.slopes}
        batched = {name: tensor for name, tensor in given.items() if tensor is not None and tensor.dim() > 3}
        return replace(self, **{name: do(_A.squeeze.dim, tensor, 0) for name, tensor in batched.items()})

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> AttentionCall:
        """Return the same with something made of each tensor in its place."""
        given = {"query": self.query, "key": self.key, "value": self.value, "bias": self.bias, "slopes": self.slopes}
        starts = None if self.starts is None else (change(self.starts[0]), change(self.starts[1]))
        changed: dict[str, Any] = {name: tensor if tensor is None else change(tensor) for name, tensor in given.items()}
        return replace(self, starts=starts, **changed)

    def of_head(self, head: tuple[int, ...], queries: range) -> AttentionCall:
        """Return the same of one head and these queries alone."""
        rows: tuple[Any, ...] = (*head, slice(queries.start, queries.stop, queries.step))
        group = self.query.shape[-3] // self.key.shape[-3] if head else 1
        shared = (*head[:-1], head[-1] // group) if head else head
        shape, bias, slopes = self.query.shape[:-2], self.bias, self.slopes
        if bias is not None:
            bias = bias.expand(*shape, *bias.shape[-2:])[rows if bias.shape[-2] > 1 else head][None]
        return replace(
            self,
            query=self.query[rows][None],
            key=self.key[shared][None],
            value=self.value[shared][None],
            bias=bias,
            slopes=None if slopes is None else slopes.expand(shape)[head][None],
            few=(queries, self.query.shape[-2]),
        )

    def allowed(self, rows: Tensor) -> Tensor | None:
        """Return which keys these queries may look at, biases aside: `query key`; None where it is all of them."""
        if not self.causal and self.starts is None and max(self.window) < 0:
            return None
        distance, allowed = self._distances(rows)
        before, after = self.window
        allowed = allowed & (distance >= 0) if self.causal else allowed.expand(distance.shape)
        allowed = allowed & (distance <= before) if before >= 0 else allowed
        return allowed & (distance >= -after) if after >= 0 else allowed

    def added(self, rows: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to the scores of these queries, biases aside: `query key`, or with heads before."""
        allowed = self.allowed(rows)
        mask = None if allowed is None else _filled(run, allowed, dtype, self.device)
        if self.slopes is None:
            return mask
        off = -self.slopes[..., None, None].to(dtype) * self._distances(rows)[0].abs()
        return off if mask is None else off + mask

    def _distances(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far each key lies behind these queries' own places, and whether both are of one sequence."""
        count = self.query.shape[-2] if self.few is None else self.few[1]
        keys = torch.arange(self.key.shape[-2], device=rows.device)
        if self.starts is None:
            places = rows + (len(keys) - count if self.from_end else 0)
            return places[:, None] - keys, torch.ones((), dtype=torch.bool, device=rows.device)
        first, second = (start.to(rows.device).long() for start in self.starts)
        row, other = (torch.searchsorted(s[1:], at, right=True) for s, at in ((first, rows), (second, keys)))
        # Aligned at the end, the last query of a sequence has the place of its last key.
        shift = second.diff() - first.diff() if self.from_end else torch.zeros_like(first[1:])
        places = rows - first[row] + shift[row]
        return places[:, None] - (keys - second[other]), row[:, None] == other


def read_attention(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[AttentionCall, bool]:
    """Return what an attention kernel was asked for, its operands as given, and whether heads stand after rows.

    Every kernel is read by the names in its schema. Raises `NotOpenedError` for what the steps do not follow.
    """
    given = bound(func, args, kwargs)
    if func._overloadname == "quantized":
        raise NotOpenedError("its operands are quantized")
    for name in ("seqused_k", "seqlen_k", "block_table", "dropout_mask"):
        if given.get(name) is not None:
            raise NotOpenedError(f"it is given {name}")
    if isinstance(given.get("window_size"), int) and given["window_size"] > 0:
        raise NotOpenedError("it is given window_size")
    query, key, value = (given[name] if name in given else given[name[0]] for name in ("query", "key", "value"))
    if any(tensor.is_nested for tensor in (query, key, value)):
        raise NotOpenedError("its rows have different lengths (nested tensors)")
    first, second = (
        next(
            (given[f"{start}_{side}"] for start in ("cum_seq", "cu_seqlens", "cu_seq") if f"{start}_{side}" in given),
            None,
        )
        for side in "qk"
    )
    name, kind = about(func).name, given.get("custom_mask_type", 0)
    is_flat = not name.startswith(("aten._scaled", "aten._triton"))
    rows_first = is_flat and (first is not None or "cudnn" not in name)
    window = given.get("window_size")
    if not isinstance(window, (list, tuple)):
        window = (-1 if given.get(end) is None else given[end] for end in ("window_size_left", "window_size_right"))
    before, after = map(int, window)
    return AttentionCall(
        query,
        key,
        value,
        query.device,
        bias=next((given[n] for n in ("attn_mask", "attn_bias", "bias") if isinstance(given.get(n), Tensor)), None),
        causal=bool(given.get("is_causal")) or kind in (1, 2),
        from_end=kind == 2 or (rows_first and kind == 0),
        window=(before, after),
        starts=None if first is None else (first, first if second is None else second),
        slopes=given.get("alibi_slopes"),
        scale=1 / math.sqrt(query.shape[-1]) if given.get("scale") is None else float(given["scale"]),
        dropout=float(given.get("dropout_p", 0.0)),
    ), rows_first


def bound(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by their names in its schema, defaults included."""
    names, defaults = _signature(func)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@cache
def _signature(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of an operation's arguments, and their defaults."""
    named = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in named if argument.has_default_value()}
    return tuple(argument.name for argument in named), defaults


# -- the steps --------------------------------------------------------------------------------------------------------


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a step without recording it."""
    return func(*args, **kwargs)


def attention(do: Do, asked: AttentionCall, finer: torch.dtype | None = None, *, described: bool = False) -> Tensor:
    """Return softmax(q·kᵀ·scale + bias)·v, step by step; half precision is added up in float32, as kernels do.

    With `finer` it is computed in that dtype; `described` steps have shapes alone.
    """
    query, key, value = asked.query, asked.key, asked.value
    dtype = finer or (torch.float32 if query.dtype in (torch.half, torch.bfloat16) else query.dtype)
    heads, kv_heads = (tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in (query, key))
    bias = _bias(do, asked, dtype, described)
    query = do(_A.mul.Scalar, _in_dtype(do, query, dtype), asked.scale)
    key = _repeated(do, _in_dtype(do, key, dtype), heads // kv_heads)
    scores = _product(do, query, do(_A.transpose.int, key, -2, -1))
    del query, key  # a long sequence's keys in float64 are freed before its values are there
    if bias is None:
        weights = do(_A._softmax.default, scores, -1, False)
    else:
        scores = do(_A.add.Tensor, scores, bias)
        # Where a lower triangle is all there is, each query has a key to look at.
        whole = asked.is_plainly_causal and asked.bias is None
        weights = do(_A._softmax.default, scores, -1, False) if whole else do(_A._safe_softmax.default, scores, -1)
    del scores, bias
    product: Tensor = _product(do, weights, _repeated(do, _in_dtype(do, value, dtype), heads // kv_heads))
    return product


def _in_dtype(do: Do, tensor: Tensor, dtype: torch.dtype) -> Any:
    return tensor if tensor.dtype == dtype else do(_A._to_copy.default, tensor, dtype=dtype)


def _bias(do: Do, asked: AttentionCall, dtype: torch.dtype, described: bool) -> Any:
    """Return what is added to the scores, the lower triangle of a causal mask made in steps of its own."""
    bias = None if asked.bias is None else _filled(do, asked.bias, dtype, asked.device)
    shape, device = asked.scores_shape[-2:], asked.device
    if asked.is_plainly_causal:
        triangle = do(_A.tril.default, do(_A.ones.default, list(shape), dtype=torch.bool, device=device))
        added = _filled(do, triangle, dtype, device)
    elif asked.causal or asked.slopes is not None or asked.starts is not None or max(asked.window) >= 0:
        if described or device.type == "meta":
            added = torch.empty(shape, dtype=dtype, device="meta")
        else:
            queries = range(shape[0]) if asked.few is None else asked.few[0]
            added = asked.added(torch.arange(queries.start, queries.stop, queries.step, device=device), dtype)
    else:
        return bias
    return added if bias is None else do(_A.add.Tensor, bias, added)


def _filled(do: Do, mask: Tensor, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a mask to be added: of booleans zero where a query may look, and minus infinity elsewhere."""
    if mask.dtype != torch.bool:
        return _in_dtype(do, mask, dtype)
    zero, barred = (do(_A.scalar_tensor.default, n, dtype=dtype, device=device) for n in (0.0, -torch.inf))
    return do(_A.where.self, mask, zero, barred)


def _repeated(do: Do, tensor: Tensor, times: int) -> Any:
    """`... kv_heads key head_dim -> ... (kv_heads group) key head_dim`."""
    if times == 1:
        return tensor
    shape = tensor.shape
    wide = do(_A.expand.default, do(_A.unsqueeze.default, tensor, -3), [*shape[:-2], times, *shape[-2:]])
    copied = do(_A.clone.default, wide, memory_format=torch.contiguous_format)
    return do(_A._unsafe_view.default, copied, [*shape[:-3], shape[-3] * times, *shape[-2:]])


def _product(do: Do, left: Tensor, right: Tensor) -> Any:
    """Return a product of matrices as torch makes it: one `bmm` over all that stands before them."""
    lead = max(tuple(left.shape[:-2]), tuple(right.shape[:-2]))
    product = do(_A.bmm.default, _as_one(do, left, lead), _as_one(do, right, lead))
    shape = [*lead, left.shape[-2], right.shape[-1]]
    return product if list(product.shape) == shape else do(_A._unsafe_view.default, product, shape)


def _as_one(do: Do, tensor: Tensor, lead: tuple[int, ...]) -> Any:
    """Return it with everything before the matrices in one dimension, copied where strides do not allow that view."""
    if tuple(tensor.shape[:-2]) != lead:
        tensor = do(_A.expand.default, tensor, [*lead, *tensor.shape[-2:]])
    if len(lead) == 1:
        return tensor
    shape = [math.prod(lead), *tensor.shape[-2:]]
    places = [(n, s) for n, s in zip(lead, tensor.stride(), strict=False) if n != 1]
    if all(outer == n * inner for (_, outer), (n, inner) in pairwise(places)):  # they run over memory as one
        return do(_A.view.default, tensor, shape)
    return do(_A._unsafe_view.default, do(_A.clone.default, tensor, memory_format=torch.contiguous_format), shape)


def _split_qkv(do: Do, qkv: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, ...]:
    """`batch query (qkv heads head_dim)` to three of `batch heads query head_dim`, the queries scaled."""
    batch, rows, width = qkv.shape
    head_dim = width // 3 // heads
    parts = do(_A.split.Tensor, do(_A.add.Tensor, qkv, bias), width // 3, -1)
    by_head = [do(_A.view.default, part, [batch, rows, heads, head_dim]) for part in parts]
    query, key, value = (do(_A.transpose.int, part, 1, 2) for part in by_head)
    return do(_A.mul.Scalar, query, 1 / math.sqrt(head_dim)), key, value


def _masked_softmax(
    do: Do, scores: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None
) -> tuple[Tensor, ...]:
    """The softmax of `batch heads query key`; `mask` is `query key` (type 0), `batch key` (1), or as the scores (2)."""
    if mask_type == 1:
        mask = do(_A.unsqueeze.default, do(_A.unsqueeze.default, mask, 1), 1)
    masked = do(_A.masked_fill.Scalar, scores, mask, -torch.inf)
    return (do(_A._softmax.default, masked, -1 if dim is None else dim, False),)


def _adding_product(
    do: Do, added: Tensor, left: Tensor, right: Tensor, beta: float = 1, alpha: float = 1
) -> tuple[Tensor, ...]:
    """`baddbmm` and `addmm`: beta · added + alpha · left · right."""
    product = do(_A.bmm.default if left.dim() == 3 else _A.mm.default, left, right)
    product = product if alpha == 1 else do(_A.mul.Scalar, product, alpha)
    added = added if beta == 1 else do(_A.mul.Scalar, added, beta)
    return (do(_A.add.Tensor, product, added),)


FEW = 4


def _few(tensor: Tensor, rank: int) -> Tensor:
    """Return the first of what a tensor of this rank counts first; all of it where it is broadcast along that."""
    return tensor[:FEW] if tensor.dim() == rank else tensor


Steps = Callable[..., tuple[Tensor, ...]]
PARTS: dict[str, tuple[Steps, Callable[..., tuple[Any, ...]]]] = {
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
"""A leaf that is a part of an attention: its steps; and from its arguments to those of the first few of its result."""


# -- steps without numbers --------------------------------------------------------------------------------------------

_VIEWS = {
    op: op
    for op in (
        _A.transpose.int,
        _A.expand.default,
        _A.unsqueeze.default,
        _A.squeeze.dim,
        _A.view.default,
        _A.split.Tensor,
    )
} | {_A._unsafe_view.default: _A.view.default}
_PRODUCTS = frozenset({_A.bmm.default, _A.mm.default})
_IN_ORDER = frozenset({_A._softmax.default, _A._safe_softmax.default, _A.clone.default, _A.tril.default})


def described(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a step would give: views as they are, and of what would be computed a tensor on meta.

    torch's own operations on meta import symbolic shapes first, a second; views, and what is empty, do not.
    """
    if func in _VIEWS:
        return _VIEWS[func](*args, **kwargs)
    if func in (_A.ones.default, _A.scalar_tensor.default):
        return torch.empty(args[0] if func is _A.ones.default else (), dtype=kwargs["dtype"], device="meta")
    first, *others = [arg for arg in args if isinstance(arg, Tensor)]
    if func in _PRODUCTS:
        return torch.empty((*first.shape[:-1], others[0].shape[-1]), dtype=first.dtype, device="meta")
    rank = max(tensor.dim() for tensor in (first, *others))
    wide = [(1,) * (rank - tensor.dim()) + tuple(tensor.shape) for tensor in (first, *others)]
    shape = tuple(map(max, zip(*wide, strict=True)))
    dtype = kwargs.get("dtype") or next((t.dtype for t in (first, *others) if t.dtype != torch.bool), first.dtype)
    if func in _IN_ORDER or shape != first.shape or 0 in first.stride():
        return torch.empty(shape, dtype=dtype, device="meta")
    # Element by element: the dimensions keep the order that they have in memory.
    order = sorted(range(rank), key=lambda place: (first.stride(place), first.shape[place]), reverse=True)
    empty = torch.empty([shape[place] for place in order], dtype=dtype, device="meta")
    return empty.permute([order.index(place) for place in range(rank)])
