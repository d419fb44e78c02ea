"""The steps of torch's fused kernels whose inside cannot be watched.

Such a kernel is computed once more beside its result, by the functions here, in operations that are recorded: `do` runs
each of them. What it does that no steps follow is named, with the reason why it is not opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .schema import about
from .sketch import Sketch

_A = torch.ops.aten
Do = Callable[..., Any]
"""Runs one operation of torch, and has it recorded."""


class NotOpenedError(Exception):
    """A kernel does something that no steps here follow; the message is the reason."""


@dataclass(eq=False)
class Attention:
    """What an attention kernel was asked for: `... heads query head_dim`, `... heads key head_dim`."""

    query: Tensor
    key: Tensor
    value: Tensor
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

    def distances(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """How far each key lies behind these queries' own places, and whether both are of one sequence: `query key`."""
        count = self.query.shape[-2] if self.few is None else self.few[1]
        keys = torch.arange(self.key.shape[-2], device=queries.device)
        if self.starts is None:
            own = queries + (len(keys) - count if self.from_end else 0)
            return own[:, None] - keys, torch.ones((), dtype=torch.bool, device=queries.device)
        first, second = (start.to(queries.device).long() for start in self.starts)
        row, other = (torch.searchsorted(s[1:], at, right=True) for s, at in ((first, queries), (second, keys)))
        # Aligned at the end, the last query of a sequence has the place of its last key.
        shift = second.diff() - first.diff() if self.from_end else torch.zeros_like(first[1:])
        own = queries - first[row] + shift[row]
        return own[:, None] - (keys - second[other]), row[:, None] == other

    def allowed(self, queries: Tensor) -> Tensor | None:
        """Which keys these queries may look at, biases aside: `query key`; None where it is all of them."""
        if not self.causal and self.starts is None and max(self.window) < 0:
            return None
        distance, found = self.distances(queries)
        before, after = self.window
        found = found & (distance >= 0) if self.causal else found.expand(distance.shape)
        found = found & (distance <= before) if before >= 0 else found
        return found & (distance >= -after) if after >= 0 else found

    def added(self, queries: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores of these queries, biases aside: `query key`, or with heads before."""
        parts: list[Tensor] = []
        if self.slopes is not None:
            parts.append(-self.slopes[..., None, None].to(dtype) * self.distances(queries)[0].abs())
        allowed = self.allowed(queries)
        if allowed is not None:
            parts.append(
                torch.zeros(allowed.shape, dtype=dtype, device=queries.device).masked_fill(~allowed, -torch.inf)
            )
        return sum(parts[1:], parts[0]) if parts else None

    def _but(self, **changes: Any) -> Attention:
        """The same with other values: `replace`, in a quarter of the time, as each kernel that runs asks for it."""
        made = object.__new__(Attention)
        made.__dict__.update(self.__dict__, **changes)
        return made

    def of_head(self, place: tuple[int, ...], queries: range) -> Attention:
        """The same of one head and these queries alone."""
        rows: tuple[Any, ...] = (*place, slice(queries.start, queries.stop, queries.step))
        group = self.query.shape[-3] // self.key.shape[-3] if self.query.dim() > 2 else 1
        shared = (*place[:-1], place[-1] // group) if place else place
        bias, slopes = self.bias, self.slopes
        if bias is not None:
            shape = self.query.shape[:-2]
            bias = bias.expand(*shape, *bias.shape[-2:])[rows if bias.shape[-2] > 1 else place][None]
        if slopes is not None:
            slopes = slopes.expand(self.query.shape[:-2])[place][None]
        return self._but(
            query=self.query[rows][None],
            key=self.key[shared][None],
            value=self.value[shared][None],
            bias=bias,
            slopes=slopes,
            few=(queries, self.query.shape[-2]),
        )

    def with_tensors(self, change: Callable[[Tensor], Any]) -> Attention:
        """The same with something made of each tensor in its place."""
        given = {"query": self.query, "key": self.key, "value": self.value, "bias": self.bias, "slopes": self.slopes}
        made: dict[str, Any] = {name: tensor if tensor is None else change(tensor) for name, tensor in given.items()}
        starts = None if self.starts is None else (change(self.starts[0]), change(self.starts[1]))
        return self._but(starts=starts, **made)

    def heads_first(self, do: Do) -> Attention:
        """The same with heads before rows, where they come after them."""
        query, key, value = (do(_A.transpose.int, tensor, -3, -2) for tensor in (self.query, self.key, self.value))
        return self._but(query=query, key=key, value=value)

    def without_batch(self, do: Do) -> Attention:
        """The same without a batch of one."""
        return self.with_tensors(lambda own: own if len(own.shape) < 4 else do(_A.squeeze.dim, own, 0))


def bound(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation by their names in its schema, defaults included."""
    names, defaults = _signature(func)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@cache
def _signature(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of an operation's arguments, and their defaults."""
    named = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in named if argument.has_default_value()}
    return tuple(argument.name for argument in named), defaults


def read_attention(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Attention, bool]:
    """What an attention kernel was asked for, its operands as they were given, and whether heads stand after rows.

    Raises `NotOpenedError` where it was asked for something that the steps do not follow.
    """
    got = bound(func, args, kwargs)
    if func._overloadname == "quantized":
        raise NotOpenedError("its operands are quantized")
    for name in ("seqused_k", "seqlen_k", "block_table", "dropout_mask"):
        if got.get(name) is not None:
            raise NotOpenedError(f"it is given {name}")
    name = about(func).name
    starts = [
        next(
            (got[f"{start}_{side}"] for start in ("cum_seq", "cu_seqlens", "cu_seq") if f"{start}_{side}" in got), None
        )
        for side in "qk"
    ]
    rows_first = not name.startswith(("aten._scaled", "aten._triton")) and (
        starts[0] is not None or "cudnn" not in name
    )
    query, key, value = (got[name] if name in got else got[name[0]] for name in ("query", "key", "value"))
    if any(tensor.is_nested for tensor in (query, key, value)):
        raise NotOpenedError("its rows have different lengths (nested tensors)")
    kind = got.get("custom_mask_type", 0)
    window = _window(got)
    if isinstance(got.get("window_size"), int) and got["window_size"] > 0:
        raise NotOpenedError("it is given window_size")
    return Attention(
        query,
        key,
        value,
        bias=next((got[n] for n in ("attn_mask", "attn_bias", "bias") if isinstance(got.get(n), Tensor)), None),
        causal=bool(got.get("is_causal")) or kind in (1, 2),
        from_end=kind == 2 or (rows_first and kind == 0),
        window=window,
        starts=None if starts[0] is None else (starts[0], starts[0] if starts[1] is None else starts[1]),
        slopes=got.get("alibi_slopes"),
        scale=1 / math.sqrt(query.shape[-1]) if got.get("scale") is None else float(got["scale"]),
        dropout=float(got.get("dropout_p", 0.0)),
    ), rows_first


def _window(got: Mapping[str, Any]) -> tuple[int, int]:
    given = got.get("window_size")
    if isinstance(given, (list, tuple)):
        return int(given[0]), int(given[1])
    left, right = got.get("window_size_left"), got.get("window_size_right")
    return -1 if left is None else int(left), -1 if right is None else int(right)


# -- the steps --------------------------------------------------------------------------------------------------------


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation without recording it: the `do` of a proof."""
    return func(*args, **kwargs)


def attention(do: Do, asked: Attention, finer: torch.dtype | None = None) -> Tensor:
    """softmax(q·kᵀ·scale + bias)·v, step by step; numbers of half precision are added up in float32, as kernels do.

    With `finer` it is computed in that dtype.
    """
    query, key, value = asked.query, asked.key, asked.value
    dtype = finer or (torch.float32 if query.dtype in (torch.half, torch.bfloat16) else query.dtype)
    heads, own = (tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in (query, key))
    bias = _bias(do, asked, dtype)
    query = do(_A.mul.Scalar, _in_dtype(do, query, dtype), asked.scale)
    key = _in_dtype(do, key, dtype)
    key = key if heads == own else _repeated(do, key, heads // own)
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
    value = _in_dtype(do, value, dtype)
    value = value if heads == own else _repeated(do, value, heads // own)
    return _product(do, weights, value)


def _in_dtype(do: Do, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast: Tensor = tensor if tensor.dtype == dtype else do(_A._to_copy.default, tensor, dtype=dtype)
    return cast


def _bias(do: Do, asked: Attention, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores, the lower triangle of a causal mask made in steps of its own."""
    bias = asked.bias
    if bias is not None and bias.dtype == torch.bool:
        bias = _filled(do, bias, dtype)
    elif bias is not None and bias.dtype != dtype:
        bias = do(_A._to_copy.default, bias, dtype=dtype)
    device = asked.query.device
    if asked.is_plainly_causal:
        whole = do(_A.ones.default, list(asked.scores_shape[-2:]), dtype=torch.bool, device=device)
        causal = _filled(do, do(_A.tril.default, whole), dtype)
        bias = causal if bias is None else do(_A.add.Tensor, bias, causal)
    elif asked.causal or asked.slopes is not None or asked.starts is not None or max(asked.window) >= 0:
        added: Any
        if isinstance(asked.query, Sketch):
            added = Sketch.new(asked.scores_shape[-2:], dtype, device)
        elif device.type == "meta":
            added = torch.empty(asked.scores_shape[-2:], dtype=dtype, device=device)
        else:
            queries = range(asked.query.shape[-2]) if asked.few is None else asked.few[0]
            rows = torch.arange(queries.start, queries.stop, queries.step, device=device)
            added = asked.added(rows, dtype)
        bias = added if bias is None else do(_A.add.Tensor, bias, added)
    return bias


def _filled(do: Do, allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Zero where a query may look, and minus infinity elsewhere."""
    zero, barred = (
        do(_A.scalar_tensor.default, number, dtype=dtype, device=allowed.device) for number in (0.0, -torch.inf)
    )
    made: Tensor = do(_A.where.self, allowed, zero, barred)
    return made


def _repeated(do: Do, tensor: Tensor, times: int) -> Tensor:
    """`... kv_heads key head_dim -> ... (kv_heads group) key head_dim`."""
    shape = tensor.shape
    wide = do(_A.expand.default, do(_A.unsqueeze.default, tensor, -3), [*shape[:-2], times, *shape[-2:]])
    copied = do(_A.clone.default, wide, memory_format=torch.contiguous_format)
    made: Tensor = do(_A._unsafe_view.default, copied, [*shape[:-3], shape[-3] * times, *shape[-2:]])
    return made


def _product(do: Do, left: Tensor, right: Tensor) -> Tensor:
    """A product of matrices as torch makes it: one `bmm` over all that stands before them."""
    lead = max(tuple(left.shape[:-2]), tuple(right.shape[:-2]))
    made = do(_A.bmm.default, _as_one(do, left, lead), _as_one(do, right, lead))
    shape = [*lead, left.shape[-2], right.shape[-1]]
    found: Tensor = made if list(made.shape) == shape else do(_A._unsafe_view.default, made, shape)
    return found


def _as_one(do: Do, tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """With everything before the matrices in one dimension, copied where strides do not allow a view of that."""
    if tuple(tensor.shape[:-2]) != lead:
        tensor = do(_A.expand.default, tensor, [*lead, *tensor.shape[-2:]])
    if len(lead) == 1:
        return tensor
    shape = [math.prod(lead), *tensor.shape[-2:]]
    if _can_view(tensor, len(lead)):
        viewed: Tensor = do(_A.view.default, tensor, shape)
        return viewed
    copied = do(_A.clone.default, tensor, memory_format=torch.contiguous_format)
    made: Tensor = do(_A._unsafe_view.default, copied, shape)
    return made


def _can_view(tensor: Tensor, lead: int) -> bool:
    """Whether the first dimensions run over memory as one."""
    places = [(n, s) for n, s in zip(tensor.shape[:lead], tensor.stride()[:lead], strict=True) if n != 1]
    return all(outer == n * inner for (_, outer), (n, inner) in pairwise(places))


def split_qkv(do: Do, qkv: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, ...]:
    """`batch query (qkv heads head_dim)` to three of `batch heads query head_dim`, the queries scaled."""
    whole = do(_A.add.Tensor, qkv, bias)
    batch, rows, width = qkv.shape
    parts = do(_A.split.Tensor, whole, width // 3, -1)
    by_head = [do(_A.view.default, part, [batch, rows, heads, width // 3 // heads]) for part in parts]
    query, key, value = (do(_A.transpose.int, part, 1, 2) for part in by_head)
    return do(_A.mul.Scalar, query, 1 / math.sqrt(width // 3 // heads)), key, value


def masked_softmax(
    do: Do, scores: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None
) -> tuple[Tensor, ...]:
    """The softmax of `batch heads query key`; `mask` is `query key` (type 0), `batch key` (1), or as the scores (2)."""
    if mask_type == 1:
        mask = do(_A.unsqueeze.default, do(_A.unsqueeze.default, mask, 1), 1)
    masked = do(_A.masked_fill.Scalar, scores, mask, -torch.inf)
    return (do(_A._softmax.default, masked, -1 if dim is None else dim, False),)


def adding_product(
    do: Do, added: Tensor, left: Tensor, right: Tensor, beta: float = 1, alpha: float = 1
) -> tuple[Tensor, ...]:
    """`baddbmm` and `addmm`: beta · added + alpha · left · right."""
    product = do(_A.bmm.default if left.dim() == 3 else _A.mm.default, left, right)
    product = product if alpha == 1 else do(_A.mul.Scalar, product, alpha)
    added = added if beta == 1 else do(_A.mul.Scalar, added, beta)
    return (do(_A.add.Tensor, product, added),)


@dataclass(frozen=True)
class Part:
    """A leaf that is a part of an attention."""

    steps: Callable[..., tuple[Tensor, ...]]
    few: Callable[..., tuple[tuple[Any, ...], Callable[[Tensor], Tensor]]]
    """From its arguments to those of a few rows, and how to take these rows out of what comes of all."""


def _few_projected(qkv: Tensor, bias: Tensor, heads: int) -> tuple[tuple[Any, ...], Callable[[Tensor], Tensor]]:
    return (qkv[:1, :_FEW], bias, heads), lambda by_head: by_head[:1, :, :_FEW]


def _few_scores(
    scores: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None
) -> tuple[tuple[Any, ...], Callable[[Tensor], Tensor]]:
    own = mask[:_FEW] if mask_type == 0 else mask[:1] if mask_type == 1 else mask[:1, :, :_FEW]
    return (scores[:1, :, :_FEW], own, dim, mask_type), lambda weights: weights[:1, :, :_FEW]


def _few_sums(
    added: Tensor, left: Tensor, right: Tensor, beta: float = 1, alpha: float = 1
) -> tuple[tuple[Any, ...], Callable[[Tensor], Tensor]]:
    def few(tensor: Tensor) -> Tensor:
        rows = tensor[..., :_FEW, :] if tensor.dim() > 1 and tensor.shape[-2] > 1 else tensor
        return rows[:1] if rows.dim() == 3 else rows

    return (few(added), few(left), right[:1] if right.dim() == 3 else right, beta, alpha), few


_FEW = 4
PARTS: dict[str, Part] = {
    "aten._transform_bias_rescale_qkv.default": Part(split_qkv, _few_projected),
    "aten._masked_softmax.default": Part(masked_softmax, _few_scores),
    "aten.baddbmm.default": Part(adding_product, _few_sums),
    "aten.addmm.default": Part(adding_product, _few_sums),
}
