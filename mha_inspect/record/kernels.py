"""Read the call of a fused attention kernel, and compute it step by step: one computation for all such kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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


# -- the steps of an attention ----------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Which keys a query may attend to, by their positions alone."""

    causal: bool = False
    from_end: bool = False
    """Whether the last query is aligned with the last key, rather than the first query with the first key."""
    window: tuple[int, int] = (-1, -1)
    """How many keys before and after its position a query may attend to; -1 for no limit."""
    starts: Any = None
    """Start of each sequence among packed queries, then the end of the last sequence; None if nothing is packed."""
    key_starts: Any = None
    """The same for packed keys; None if they start where the queries do."""

    def given(self) -> dict[str, Any]:
        """Return the fields that are not as by default, by name."""
        fields = {}
        for name, default in self._field_defaults.items():
            value = getattr(self, name)
            is_default = value is None if default is None else value == default
            if not is_default:
                fields[name] = value
        return fields

    @property
    def has_window(self) -> bool:
        """Whether a query may attend to a limited number of keys before or after it only."""
        return max(self.window) >= 0

    @property
    def mask_keys(self) -> bool:
        """Whether they may mask any key out."""
        return self.causal or self.starts is not None or self.has_window

    @property
    def are_plainly_causal(self) -> bool:
        """Whether they are a lower triangle that starts at the first query and key: each query sees a key."""
        starts_elsewhere = self.from_end or self.starts is not None
        return self.causal and not starts_elsewhere and not self.has_window

    def allowed(self, rows: Tensor, queries: int, keys: int) -> Tensor | None:
        """Return which of so many keys some rows of so many queries may attend to: `row key`; None if every key."""
        if not self.mask_keys:
            return None
        places, key_places, allowed = self._positions(rows, queries, torch.arange(keys, device=rows.device))
        before, after = self.window
        # Two positions are compared as they are: a table of distances would be eight times as large.
        if self.causal:
            allowed = allowed & (key_places <= places)
        if before >= 0:
            allowed = allowed & (key_places >= places - before)
        if after >= 0:
            allowed = allowed & (key_places <= places + after)
        return allowed

    def _positions(self, rows: Tensor, queries: int, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the positions of some queries, `row 1`, and of all keys, and whether both are in one sequence."""
        if self.starts is not None:
            return self._packed_positions(self.starts.to(rows.device).long(), rows, keys)
        places = rows
        if self.from_end:
            places = rows + (len(keys) - queries)
        return places[:, None], keys, torch.ones((), dtype=torch.bool, device=rows.device)

    def _packed_positions(self, starts: Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
        return places[:, None], key_places, sequences[:, None] == key_sequences


def attention_scores(query: Tensor, key: Tensor, *, scale: float) -> Tensor:
    """Return q·kᵀ·scale, `... heads query key`; half precision is summed in float32, as in kernels.

    Several query heads may share a key head.
    """
    dtype = summed_in(query.dtype)
    scaled = query.to(dtype) * scale
    keys = _repeated(key.to(dtype), _heads_of(query) // _heads_of(key))
    return scaled @ keys.transpose(-2, -1)


def attention_mask(
    scores: Tensor,
    bias: Tensor | None = None,
    *,
    few: tuple[range, int] | None = None,
    **places: Any,
) -> Tensor:
    """Return the scores, `... heads query key`, plus a bias and plus -inf for the keys that are masked out.

    Args:
        scores: the scores.
        bias: numbers to add, or a boolean that is true where a query may attend.
        few: the rows that the scores are of, and the number of all queries; None if they are of all queries.
        places: fields of `Places`.
    """
    by_place = Places(**places)
    *_, queries, keys = scores.shape
    rows, count = (range(queries), queries) if few is None else few
    added = None if bias is None else _filled(bias, scores.dtype)
    numbers = torch.arange(rows.start, rows.stop, rows.step, device=scores.device)
    allowed = by_place.allowed(numbers, count, keys)
    if allowed is not None:
        masked = _filled(allowed, scores.dtype)
        added = masked if added is None else added + masked
    return scores if added is None else scores + added


def attention_context(weights: Tensor, value: Tensor) -> Tensor:
    """Return weights · v: `... heads query head_dim`. Several heads may share a value head."""
    return weights @ _repeated(value.to(weights.dtype), _heads_of(weights) // _heads_of(value))


STEPS: Mapping[str, Callable[..., Tensor]] = {
    "attention_scores": attention_scores,
    "attention_mask": attention_mask,
    "attention_context": attention_context,
}
"""What computes each step of an attention kernel, by the name of the operation that stands for it in a recording.

Between mask and context torch's own softmax stands.
"""


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that kernels compute in for tensors of a dtype: float32 for half precision."""
    return torch.float32 if dtype in (torch.half, torch.bfloat16) else dtype


def _heads_of(tensor: Tensor) -> int:
    """Return the number of heads: that of `... heads row head_dim`, or 1 for `row head_dim`."""
    return tensor.shape[-3] if tensor.dim() > 2 else 1


def _filled(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask: a boolean mask becomes 0 where a query may attend and -inf elsewhere."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, -torch.inf)


def _repeated(tensor: Tensor, times: int) -> Tensor:
    """Repeat each key or value head: `... kv_heads key head_dim -> ... (kv_heads group) key head_dim`."""
    return tensor if times == 1 else tensor.repeat_interleave(times, -3)


# -- the call of an attention kernel ----------------------------------------------------------------------------------


class Stages(NamedTuple):
    """What the steps of an attention kernel make."""

    scores: Tensor
    masked: Tensor
    """The scores themselves without a mask."""
    weights: Tensor
    context: Tensor
    result: Tensor
    """The context in the dtype and the layout of the kernel's result."""


class AttentionCall(NamedTuple):
    """The call of an attention kernel, on `... heads query head_dim` and `... heads key head_dim`."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    starts: Tensor | None = None
    """As in `Places`."""
    key_starts: Tensor | None = None
    causal: bool = False
    from_end: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float = 1.0
    dropout: float = 0.0
    rows_first: bool = False
    """Whether query, key, value and result are laid out `... row heads head_dim`."""
    few: tuple[range, int] | None = None
    """The selected queries, and the number of all queries; None if no query is omitted."""

    @property
    def places(self) -> Places:
        """The keys that the positions mask out."""
        return Places(self.causal, self.from_end, self.window, self.starts, self.key_starts)

    @property
    def is_masked(self) -> bool:
        """Whether anything is added to the scores."""
        return self.bias is not None or self.places.mask_keys

    @property
    def is_safe(self) -> bool:
        """Whether a query may have every key masked out: not without a mask, nor under a lower triangle alone."""
        is_triangle = self.bias is None and self.few is None and self.places.are_plainly_causal
        return self.is_masked and not is_triangle

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """`... heads query key`."""
        rows, heads = (-3, -2) if self.rows_first else (-2, -3)
        query = self.query.shape
        lead = (*query[:-3], query[heads]) if len(query) > 2 else ()
        return (*lead, query[rows], self.key.shape[rows])

    def with_operands(self, change: Callable[[Any], Any]) -> AttentionCall:
        """Return the same call with something else in place of each tensor: its look, its reference, a copy."""
        operands: list[Any] = [None if operand is None else change(operand) for operand in self[:_OPERANDS]]
        return AttentionCall(*operands, *self[_OPERANDS:])

    def steps(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """Return the result, computed step by step; with `dtype`, in that dtype."""
        return (self.made(dtype).result,)

    def made(self, dtype: torch.dtype | None = None) -> Stages:
        """Return what the steps of softmax(q·kᵀ·scale + bias)·v make; with `dtype`, computed in that dtype."""
        dtype = dtype or self.query.dtype
        call = self.heads_first(_swapped)
        query, key, value, bias = cast_tensors((call.query, call.key, call.value, call.bias), dtype)
        scores = masked = attention_scores(query, key, scale=call.scale)
        del query, key  # free a long sequence's keys in float64 before converting its values
        if call.is_masked:
            masked = attention_mask(scores, bias, few=call.few, **call.places.given())
        softmax = torch._safe_softmax if call.is_safe else torch.softmax
        weights = softmax(masked, -1)
        context = attention_context(weights, value)
        result = context.to(dtype)
        return Stages(scores, masked, weights, context, _swapped(result) if self.rows_first else result)

    def size(self, results: Sequence[Tensor]) -> int:
        """Return the bytes of the largest step, the scores."""
        return 4 * math.prod(self.scores_shape)

    def heads_first(self, swap: Callable[[Any], Any]) -> AttentionCall:
        """Return the same call with the heads dimension before the rows; `swap` swaps the two."""
        if not self.rows_first:
            return self
        return self._replace(query=swap(self.query), key=swap(self.key), value=swap(self.value), rows_first=False)

    def of_few(
        self, results: Sequence[Tensor], turn: int, steps: Sequence[Tensor] | None = None
    ) -> tuple[AttentionCall, tuple[Tensor, ...]]:
        """Return the call for a few queries of one head, and the kernel's result for them.

        `turn` selects the head; with the results of the `steps`, the largest difference selects head and queries.
        """
        asked = self.heads_first(_swapped)
        compared = [results[0], *(steps or ())]
        if self.rows_first:
            compared = [*map(_swapped, compared)]
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


def _swapped(tensor: Tensor) -> Tensor:
    """Swap rows and heads: `... rows heads head_dim -> ... heads rows head_dim`, or back."""
    return tensor.transpose(-3, -2)


_OPERANDS = 6
"""How many of the fields are tensors; they come first."""


_REFUSED = ("seqused_k", "seqlen_k", "block_table", "dropout_mask", "alibi_slopes")
"""Arguments that the steps do not support."""


def bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by schema name, in order; a missing one is its default or None."""
    defaults = _defaults_of(func)
    by_position = dict(zip(defaults, args, strict=False))
    return {**defaults, **by_position, **kwargs}


@cache
def _defaults_of(func: Any) -> dict[str, Any]:
    """Return the default of each argument of an operation by schema name, in order; None without a default."""
    defaults = {}
    for argument in func._schema.arguments:
        defaults[argument.name] = argument.default_value if argument.has_default_value() else None
    return defaults


def read_attention(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AttentionCall:
    """Return the call of an attention kernel, with its operands unchanged.

    Arguments are found by their schema names. Raises `NotOpenedError` for another kernel, and for an argument that the
    steps do not support.
    """
    operator = about(func)
    if operator.fused is None or operator.fused.way != "attention":
        raise NotOpenedError("its steps are not known")
    arguments, kernel = bound(func, args, kwargs), operator.name
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


# -- kernels that compute a part of an attention ----------------------------------------------------------------------


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a step without recording it."""
    return func(*args, **kwargs)


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

    def steps(self, dtype: torch.dtype | None = None, do: Do = run) -> tuple[Tensor, ...]:
        """Compute the kernel step by step, each step by `do`; with `dtype`, in that dtype."""
        args = self.args if dtype is None else cast_tensors(self.args, dtype)
        return _PARTS[self.name].steps(do, *args, **self.settings)

    def of_few(
        self, results: Sequence[Tensor], turn: int, steps: Sequence[Tensor] | None = None
    ) -> tuple[PartCall, tuple[Tensor, ...]]:
        """Return the call for the first few items of the first dimension, and the kernel's results for them."""
        args = _PARTS[self.name].few(*self.args)
        return self._replace(args=args), tuple(result[:FEW] for result in results)


KernelCall = AttentionCall | PartCall


def read_part(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PartCall:
    """Return the call of a kernel that computes a part. Raises `NotOpenedError` if its steps are not known."""
    operator = about(func)
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
