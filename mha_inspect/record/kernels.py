"""What an attention kernel was asked for, and its steps: the one computation that stands for every such kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import cast_tensors, tensors_in
from .catalog import about

_A = torch.ops.aten
Do = Callable[..., Any]
"""Runs one operation of torch, and has it recorded."""


FEW = 4
"""Rows that a kernel is compared in with its steps."""


class NotOpenedError(Exception):
    """A kernel does something that no steps here follow; the message is the reason."""


class AttentionCall(NamedTuple):
    """What an attention kernel was asked for: `... heads query head_dim`, `... heads key head_dim`."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    starts: Tensor | None = None
    """Where each sequence begins among packed queries, and where the last one ends."""
    key_starts: Tensor | None = None
    """The same among packed keys."""
    causal: bool = False
    from_end: bool = False
    """Whether the last query looks at the last key, and not the first at the first."""
    window: tuple[int, int] = (-1, -1)
    """How many keys before and after a query's own place it may look at; -1 is all of them."""
    scale: float = 1.0
    dropout: float = 0.0
    rows_first: bool = False
    """Whether heads stand after rows, in all three and in what comes out."""
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

    def steps(self, do: Do, dtype: torch.dtype | None = None, *, described: bool = False) -> tuple[Tensor, ...]:
        """Compute it step by step; with `dtype` in that one, which stays."""
        product = attention(do, self.heads_first(do), dtype, described=described)
        product = _in_dtype(do, product, dtype or self.query.dtype)
        return (do(_A.transpose.int, product, -3, -2) if self.rows_first else product,)

    def size(self, results: Sequence[Tensor]) -> int:
        """Return the bytes of its largest step."""
        return 4 * math.prod(self.scores_shape)

    def heads_first(self, do: Do) -> AttentionCall:
        """Return the same with heads before rows, where they come after them."""
        if not self.rows_first:
            return self
        query, key, value = (do(_A.transpose.int, tensor, -3, -2) for tensor in (self.query, self.key, self.value))
        return self._replace(query=query, key=key, value=value, rows_first=False)

    def of_few(
        self, results: Sequence[Tensor], turn: int, steps: Sequence[Tensor] | None = None
    ) -> tuple[AttentionCall, tuple[Tensor, ...]]:
        """Return the same of a few queries of one head, and what the kernel gave for these.

        They are of another head at each `turn`; with what the `steps` gave, those where that is farthest apart.
        """
        asked, *given = self.heads_first(run), results[0], *(steps or ())
        given = [tensor.transpose(-3, -2) for tensor in given] if self.rows_first else given
        *shape, count, width = given[0].shape
        number, query = turn % math.prod(shape), count - 1
        if steps is not None:
            apart = (given[0] - given[1]).abs().nan_to_num(nan=0.0, posinf=0.0)
            number, query = divmod(int(apart.argmax()) // width, count)
        head = _place(number, shape)
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
        """Return which keys these queries may look at, biases aside: `query key`; None where it is all of them."""
        if not self.causal and self.starts is None and max(self.window) < 0:
            return None
        distance, allowed = self._distances(rows)
        before, after = self.window
        allowed = allowed & (distance >= 0) if self.causal else allowed.expand(distance.shape)
        allowed = allowed & (distance <= before) if before >= 0 else allowed
        return allowed & (distance >= -after) if after >= 0 else allowed

    def _distances(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far each key lies behind these queries' own places, and whether both are of one sequence."""
        count = self.query.shape[-2] if self.few is None else self.few[1]
        keys = torch.arange(self.key.shape[-2], device=rows.device)
        if self.starts is None:
            places = rows + (len(keys) - count if self.from_end else 0)
            return places[:, None] - keys, torch.ones((), dtype=torch.bool, device=rows.device)
        other_starts = self.starts if self.key_starts is None else self.key_starts
        first, second = (start.to(rows.device).long() for start in (self.starts, other_starts))
        row, other = (torch.searchsorted(s[1:], at, right=True) for s, at in ((first, rows), (second, keys)))
        # Aligned at the end, the last query of a sequence has the place of its last key.
        shift = second.diff() - first.diff() if self.from_end else torch.zeros_like(first[1:])
        places = rows - first[row] + shift[row]
        return places[:, None] - (keys - second[other]), row[:, None] == other


OPERANDS = AttentionCall._fields[:6]


class _Arguments(NamedTuple):
    """Under which names an attention kernel takes what an `AttentionCall` has."""

    defaults: dict[str, Any]
    """Of all that it takes, in order."""
    operands: tuple[str, str, str]
    bias: str | None
    starts: str | None
    key_starts: str | None
    refused: tuple[str, ...]
    """What no steps follow, where it is given."""
    is_flat: bool
    """Whether heads stand after rows, unless it is cuDNN's and has no packed rows."""


@cache
def _arguments(func: Any) -> _Arguments:
    """Read the names off a kernel's schema."""
    defaults = {a.name: a.default_value if a.has_default_value() else None for a in func._schema.arguments}

    def first(*names: str) -> str | None:
        return next((name for name in names if name in defaults), None)

    operands = [name if name in defaults else name[0] for name in ("query", "key", "value")]
    refused = ("seqused_k", "seqlen_k", "block_table", "dropout_mask", "alibi_slopes")
    starts = [first(*(f"{start}_{side}" for start in ("cum_seq", "cu_seqlens", "cu_seq"))) for side in "qk"]
    return _Arguments(
        defaults,
        (operands[0], operands[1], operands[2]),
        first("attn_mask", "attn_bias", "bias"),
        starts[0],
        starts[1],
        tuple(name for name in refused if name in defaults),
        not about(func).name.startswith(("aten._scaled", "aten._triton")),
    )


def bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by their names in its schema, in order, defaults included."""
    names = _arguments(func).defaults
    return {**names, **dict(zip(names, args, strict=False)), **kwargs}


def read_attention(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AttentionCall:
    """Return what an attention kernel was asked for, its operands as given.

    Every kernel is read by the names in its schema. Raises `NotOpenedError` for what the steps do not follow.
    """
    names, given = _arguments(func), bound(func, args, kwargs)
    if func._overloadname == "quantized":
        raise NotOpenedError("its operands are quantized")
    for name in names.refused:
        if given[name] is not None:
            raise NotOpenedError(f"it is given {name}")
    query, key, value = (given[name] for name in names.operands)
    if query.is_nested or key.is_nested or value.is_nested:
        raise NotOpenedError("its rows have different lengths (nested tensors)")
    starts = given[names.starts] if names.starts else None
    bias = given[names.bias] if names.bias else None
    kind, window = given.get("custom_mask_type", 0), given.get("window_size")
    if isinstance(window, int) and window > 0:
        raise NotOpenedError("it is given window_size")
    if not isinstance(window, (list, tuple)):
        window = given.get("window_size_left"), given.get("window_size_right")
    before, after = (-1 if end is None else int(end) for end in window)
    rows_first = names.is_flat and (starts is not None or "cudnn" not in about(func).name)
    return AttentionCall(
        query,
        key,
        value,
        bias if isinstance(bias, Tensor) else None,
        starts,
        given[names.key_starts] if names.key_starts else None,
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
    """Return softmax(q·kᵀ·scale + bias)·v, step by step; half precision is added up in float32, as kernels do.

    With `dtype` it is computed in that one; `described` steps have shapes alone.
    """
    query, key, value = asked.query, asked.key, asked.value
    dtype = dtype or query.dtype
    dtype = torch.float32 if dtype in (torch.half, torch.bfloat16) else dtype
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
    """Return a mask to be added: of booleans zero where a query may look, and minus infinity elsewhere."""
    if mask.dtype != torch.bool:
        return _in_dtype(do, mask, dtype)
    zero, barred = (do(_A.scalar_tensor.default, n, dtype=dtype, device=mask.device) for n in (0.0, -torch.inf))
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


def _few(tensor: Tensor, rank: int) -> Tensor:
    """Return the first of what a tensor of this rank counts first; all of it where it is broadcast along that."""
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
"""A leaf that is a part of an attention: its steps; and from its arguments to those of the first few of its result."""


class PartCall(NamedTuple):
    """What a kernel was asked for that is a part of an attention."""

    name: str
    args: tuple[Any, ...]
    settings: dict[str, Any]
    dropout: float = 0.0

    def size(self, results: Sequence[Tensor]) -> int:
        """Return the bytes of its largest step."""
        return 4 * results[0].numel()

    def steps(self, do: Do, dtype: torch.dtype | None = None, *, described: bool = False) -> tuple[Tensor, ...]:
        """Compute it step by step; with `dtype` in that one."""
        args = self.args if dtype is None else cast_tensors(self.args, dtype)
        return _PARTS[self.name][0](do, *args, **self.settings)

    def of_few(
        self, results: Sequence[Tensor], turn: int, steps: Sequence[Tensor] | None = None
    ) -> tuple[PartCall, tuple[Tensor, ...]]:
        """Return the same of the first few of what it counts first, and what the kernel gave for these."""
        return self._replace(args=_PARTS[self.name][1](*self.args)), tuple(result[:FEW] for result in results)


KernelCall = AttentionCall | PartCall


def read_kernel(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> KernelCall:
    """Return what a kernel was asked for. Raises `NotOpenedError` for what no steps follow."""
    known = about(func)
    if known.fused is not None and known.fused.way == "attention":
        return read_attention(func, args, kwargs)
    if known.name not in _PARTS:
        raise NotOpenedError("no steps are known of it")
    if any(tensor.is_nested for _, tensor in tensors_in(args)):
        raise NotOpenedError("its rows have different lengths (nested tensors)")
    return PartCall(known.name, tuple(args), dict(kwargs))


# -- steps without numbers --------------------------------------------------------------------------------------------

_VIEWS = {
    op: op
    for op in (
        _A.transpose.int,
        _A.expand.default,
        _A.unsqueeze.default,
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


def _place(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of an element by its number."""
    place = []
    for size in reversed(shape):
        number, at = divmod(number, size)
        place.append(at)
    return tuple(reversed(place))


def _of_head(tensor: Tensor, head: tuple[int, ...], rows: range) -> Tensor:
    """Return some rows of one head of `... heads row width`, with as many dimensions: a view."""
    *outer, step, inner = tensor.stride()
    start = sum(map(mul, head, outer)) + rows.start * step
    shape = (*[1] * len(head), len(rows), tensor.shape[-1])
    return tensor.as_strided(shape, (*outer, step * rows.step, inner), tensor.storage_offset() + start)
