"""Calls that raise, and what each is caused by: mistakes that people post, by hand and with torch's own layers."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).parent / "failing_files"


@dataclass(frozen=True)
class Failing:
    """A call that raises."""

    name: str
    make: Callable[[], nn.Module]
    given: Callable[[], tuple[Any, ...]]
    masks: Callable[[], dict[str, Tensor]] = dict
    cause: str = ""
    """Name of the cause; empty if the evidence shows none."""
    fix: tuple[str, ...] = ()
    """Code, names and numbers that the printed fix has to have."""
    without_fix: bool = False
    """Whether nothing that is printed there would be right."""
    never: tuple[str, ...] = ()
    """What the clash, the cause and its fix must not say."""
    mended: Callable[[], nn.Module] | None = None
    """Make the module with the fix, which runs on the same arguments."""
    argument: str = ""
    """Name of the argument that code in the printed fix is given for: it is run."""
    clash: tuple[str, ...] = ()
    """Names and numbers that the words for the clash have to have."""
    operands: tuple[str, ...] = ()
    """Names of the failing call's operands, as the user's line has them; empty if not asked."""
    completed: tuple[str, ...] = ()
    """The stages of its attention that were computed; empty if not asked."""


FAILING: dict[str, Failing] = {}


def add(case: Failing) -> None:
    assert case.name not in FAILING, case.name
    FAILING[case.name] = case


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def bools(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def ints(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.long)


X, MEMORY = floats(2, 7, 24), floats(2, 11, 24)  # batch 2, query 7, key 11; 3 heads of 8


# -- files of mistakes -------------------------------------------------------------------------------------------------


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"failing_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # inspect looks for its classes there
    spec.loader.exec_module(module)
    return module


HAND, TORCH, OWN = load("by_hand"), load("with_torch"), load("own_errors")


def method(file: ModuleType, name: str) -> Callable[[], nn.Module]:
    """Return what makes a module whose forward is the method of that name."""
    return lambda: type(name, (file.Mistakes,), {"forward": getattr(file.Mistakes, name)})(
        **file.SETTINGS.get(name, {})
    )


def by_hand(name: str, cause: str, *args: Tensor, file: ModuleType = HAND, **facts: Any) -> None:
    again = sum(known.split(" ")[0] == name for known in FAILING)
    add(Failing(name + f" {again + 1}" * bool(again), method(file, name), lambda: args, cause=cause, **facts))


by_hand("key_not_transposed", "heads_not_transposed", X, operands=("q", "k.transpose(-2, -1)"))
by_hand("none_transposed", "heads_not_transposed", X)
by_hand("value_not_transposed_in_sdpa", "heads_not_transposed", X)
by_hand("einsum_not_transposed", "heads_not_transposed", X)
by_hand("transposed_twice", "heads_not_transposed", X)
by_hand("no_key_transpose", "key_not_transposed", X)
by_hand("single_head_no_transpose", "key_not_transposed", X)
by_hand("sequence_first", "key_not_transposed", floats(7, 2, 24))
by_hand("key_not_split", "heads_not_split", X)
by_hand("cross_batch", "batch_differs", X, floats(5, 11, 24), without_fix=True)
by_hand("value_of_other_length", "lengths_differ", X, MEMORY)
by_hand("head_dim_differs", "head_dim_differs", X)
by_hand("heads_do_not_divide", "heads_do_not_divide", floats(2, 7, 32))
by_hand("wrong_head_dim", "wrong_head_dim", X)
by_hand("concat_not_contiguous", "not_contiguous", X, operands=("context.transpose(1, 2)",))
by_hand("concat_forgotten", "heads_not_joined", X)
by_hand("wrong_width", "wrong_width", floats(2, 7, 23), operands=("x", "q_proj.weight", "q_proj.bias"))
by_hand("wrong_width", "features_not_last", floats(2, 24, 7))
by_hand("wrong_width", "mixed_dtypes", X.double())
by_hand("transposed_weight", "weight_not_transposed", X)
by_hand("token_ids", "mixed_dtypes", ints(2, 24))
by_hand("half_product", "mixed_dtypes", X, operands=("q", "k.to(...).transpose(-2, -1)"))
by_hand("mask_elsewhere", "mixed_devices", X)
by_hand("masked", "mask_rank", X, bools(2, 7), operands=("scores", "mask.eq(0)"))
by_hand("masked", "mask_rank", X, bools(6, 7, 7))
by_hand("masked", "mask_size", X, bools(13, 13))
by_hand("masked", "batch_and_sequence_swapped", floats(7, 2, 24), bools(7, 7))
by_hand("added_mask", "mask_transposed", X, MEMORY, floats(11, 7), operands=("scores", "mask"))
by_hand("added_mask", "mask_rank", X, MEMORY, floats(2, 11))
by_hand("integer_mask", "mask_dtype", X, ints(7, 7))
by_hand("sdpa_mask", "mask_rank", X, bools(2, 7), operands=("q", "k", "v", "attention_mask"))
by_hand("heads_stacked", "heads_not_joined", X)
by_hand("batch_of_the_query", "batch_differs", X, floats(5, 11, 24), without_fix=True)
by_hand("heads_by_einops", "heads_do_not_divide", X)
by_hand("bytes_mask", "mask_dtype", X)
by_hand("too_many_tokens", "index_out_of_range", X)
by_hand("needs_mask", "argument_is_none", X)
by_hand("needs_heads_of_mask", "argument_is_none", X)
by_hand("needs_context", "argument_is_none", X)
by_hand("image_convolved", "wrong_rank", floats(2, 5, 7, 24), without_fix=True)
by_hand("more_than_positions", "no_room", X)
by_hand("full_cache", "no_room", floats(2, 7, 24))
by_hand("cache_of_another_batch", "no_room", floats(3, 7, 24))
by_hand("full_cache_by_index", "index_out_of_range", floats(2, 7, 24))
by_hand("no_batch", "wrong_rank", floats(7, 24), operands=("x",))
by_hand("heads_of_an_odd_width", "heads_do_not_divide", X)
by_hand("wrong_index_of_cache", "", X)
for _name in """own_check own_assert unused_mask absent_key missing recovered wrong_axis residual reused
    context_and_more""".split():  # noqa: SIM905
    by_hand(_name, "", X, file=OWN)


# -- torch's own layers ------------------------------------------------------------------------------------------------


def of_torch(name: str, cause: str, make: Callable[[], nn.Module], *args: Tensor, **facts: Any) -> None:
    add(Failing(f"torch: {name}", make, lambda: args, cause=cause, **facts))


def attend(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: TORCH.Attend(**{"batch_first": True, **settings})


def mask_of_torch(name: str, cause: str, *args: Tensor, argument: str = "", **mask: Tensor) -> None:
    of_torch(name, cause, attend(), *args, masks=lambda: mask, argument=argument)


of_torch("Clip", "batch_and_sequence_swapped", TORCH.Clip, X)
of_torch("Encoder", "batch_and_sequence_swapped", TORCH.Encoder, X, masks=lambda: {"src_key_padding_mask": bools(2, 7)})
of_torch("OtherValues", "lengths_differ", TORCH.OtherValues, X, MEMORY)
of_torch("Translate", "batch_and_sequence_swapped", TORCH.Translate, X, MEMORY)
of_torch(
    "padding of the sequence first",
    "batch_and_sequence_swapped",
    attend(batch_first=False),
    X,
    masks=lambda: {"key_padding_mask": bools(2, 7)},
)
of_torch("another batch", "batch_differs", attend(), X, floats(5, 11, 24), without_fix=True)
of_torch("a batch of one", "batch_differs", attend(), X, floats(1, 11, 24), fix=(".expand(2, -1, -1)",))
of_torch("another width", "wrong_width", attend(), X, floats(2, 11, 13), fix=("kdim=13, vdim=13",))
of_torch("features first", "features_not_last", attend(), floats(2, 24, 7))
of_torch("another dtype", "mixed_dtypes", attend(), X, MEMORY.double())
of_torch("all of another dtype", "mixed_dtypes", attend(), X.double(), fix=(".to(torch.float32)", ".to(torch.float64)"))
mask_of_torch("integers for keys", "mask_dtype", X, key_padding_mask=ints(2, 7))
mask_of_torch("a larger mask", "mask_size", X, attn_mask=bools(13, 13))
mask_of_torch("a transposed mask", "mask_transposed", X, MEMORY, attn_mask=bools(11, 7))
mask_of_torch("a mask of keys", "mask_rank", X, attn_mask=bools(2, 7))
mask_of_torch("a mask for each item", "mask_rank", X, argument="attn_mask", attn_mask=bools(2, 7, 7).triu(1))
mask_of_torch("a bias for each head", "mask_rank", X, argument="attn_mask", attn_mask=floats(2, 3, 7, 7))
mask_of_torch("a triangle of integers", "mask_dtype", X, argument="attn_mask", attn_mask=ints(7, 7).tril())
mask_of_torch("rows of integers", "mask_dtype", X, argument="key_padding_mask", key_padding_mask=ints(2, 7).tril(3))


# -- other modules around one function ---------------------------------------------------------------------------------


class Body(nn.Module):
    """Calls a function with its parts."""

    def __init__(self, body: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.body, self.parts = body, nn.ModuleDict(parts)

    def forward(self, *args: Tensor) -> Any:
        return self.body(*args, **self.parts)


def linear(into: int, out: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(into, out)


def body(
    name: str, cause: str, *args: Tensor, parts: dict[str, Callable[[], nn.Module]] | None = None, **facts: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a forward, with modules that are made for it by name."""

    def decorate(code: Callable[..., Any]) -> Callable[..., Any]:
        make = made(code, **(parts or {}))
        add(Failing(name, make, lambda: args, cause=cause, **facts))
        return code

    return decorate


def made(code: Callable[..., Any], **parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Body(code, **{part: make() for part, make in parts.items()})


def split(x: Tensor, count: int) -> Tensor:
    """Return heads: `batch heads position head_dim`."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


# masks


def _grouped(index: tuple[Any, ...]) -> Callable[..., Tensor]:
    def code(x: Tensor, m: Tensor, q: nn.Module, k: nn.Module) -> Tensor:
        scores = split(q(x), 8).unflatten(1, (2, 4)) @ split(k(x), 2)[:, :, None].mT
        return scores.masked_fill(~m[index], -1e9).softmax(-1)

    return code


TOKENS = floats(3, 12, 32)
for _rows, _index in ((1, (slice(None), None)), (2, (slice(None), slice(None), None))):
    _parts = {"q": linear(32, 32), "k": linear(32, 8)}
    _code = f"[{':, ' * (len(_index) - 1)}None]"
    body(
        f"a mask without an axis of groups, {_rows}",
        "lacks_an_axis",
        TOKENS,
        bools(3, _rows, 12, 12),
        parts=_parts,
        fix=(_code, "[3, 2, 4, 12, 12]"),
        mended=made(_grouped(_index), **_parts),
    )(_grouped((...,)))


class Attention(nn.Module):
    """Heads as wide as the input says, in projections of another width; keys may be projected to fewer."""

    def __init__(self, heads: int = 4, head_dim: int = 8, low: int = 0, dim: int = 32) -> None:
        super().__init__()
        self.heads, width = heads, heads * head_dim
        self.q, self.k, self.v = (nn.Linear(dim, width) for _ in range(3))
        self.o, self.e = nn.Linear(width, dim), nn.Linear(16, low) if low else None

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        head_dim = x.shape[-1] // self.heads
        parts = ((self.q, x), (self.k, context), (self.v, context))
        q, k, v = (p(u).view(len(x), -1, self.heads, head_dim).transpose(1, 2) for p, u in parts)
        if self.e is not None:
            k, v = self.e(k.mT).mT, self.e(v.mT).mT
        scores = q @ k.mT
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(len(x), -1, self.heads * head_dim))


def attention(name: str, cause: str, *args: Tensor, settings: dict[str, int] | None = None, **facts: Any) -> None:
    add(Failing(name, lambda: Attention(**(settings or {})), lambda: args, cause=cause, **facts))


_T, _S, _L = floats(2, 9, 32), floats(2, 5, 32), floats(2, 16, 32)
attention(
    "a mask of keys that were projected", "mask_size", _L, _L, bools(16, 16), settings={"low": 6}, without_fix=True
)
attention(
    "a mask of the queries", "mask_size", _T, _S, bools(2, 1, 1, 9), fix=("mask of the 5 keys", "come from context")
)
attention("a longer mask", "mask_size", _T, _T, bools(16, 16), fix=("Cut the mask",))
attention("a longer mask of keys", "mask_size", _T, _S, bools(2, 1, 1, 16), fix=("Cut the mask",))
attention("a square mask of the queries", "mask_size", _T, _S, bools(9, 9), fix=("5 keys",))
_WIDE = [floats(1, 5, 32), floats(3, 8, 32)]
attention(
    "positions of features", "wrong_head_dim", *[_WIDE[0]] * 2, settings={"head_dim": 24}, fix=("head_dim 24", "96")
)
attention(
    "positions of features of two heads",
    "wrong_head_dim",
    *[_WIDE[1]] * 2,
    settings={"heads": 2, "head_dim": 32},
    fix=("head_dim 32", "64"),
)


class PositionsOfFeatures(nn.Module):
    """Some projections are three times as wide as the view says: they have thrice as many positions."""

    def __init__(self, wide: str, where: str) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 96 if name in wide else 32) for name in "qkv")
        self.o, self.where = nn.Linear(32, 32), where

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(len(x), -1, 4, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.where == "a kernel's mask":
            return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        scores = q @ k.mT
        if self.where == "a mask":
            scores = scores.masked_fill(~mask, float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(*x.shape[:2], 32))


for _wide, _where in (
    ("v", "weights"),
    ("qk", "values"),
    ("k", "values"),
    ("qk", "a mask"),
    ("q", "a mask"),
    ("qkv", "a kernel's mask"),
):
    add(
        Failing(
            f"positions of features of {_wide} beside {_where}",
            partial(PositionsOfFeatures, _wide, _where),
            lambda: (floats(2, 5, 32),),
            cause="wrong_head_dim",
            without_fix=True,
        )
    )


@body(
    "fewer keys than the mask", "", floats(2, 12, 24), bools(12, 12), parts={"q": linear(24, 24), "k": linear(24, 24)}
)
def _(x: Tensor, mask: Tensor, q: nn.Module, k: nn.Module) -> Tensor:
    """Which of its entries are right is unknown: it is neither cut nor a mask of queries."""
    return (split(q(x), 4) @ split(k(x)[:, -6:], 4).mT).masked_fill(~mask, float("-inf"))


@body("joined to the width of the input", "view_sizes", floats(3, 7, 10), parts={"qkv": linear(10, 72)}, fix=("24",))
def _(x: Tensor, qkv: nn.Module) -> Tensor:
    batch, tokens, width = x.shape
    q, k, v = qkv(x).view(batch, tokens, 4, 18).transpose(1, 2).chunk(3, -1)
    values = ((q @ k.mT / 6**0.5).softmax(-1) @ v).transpose(1, 2)
    return values.reshape(batch, tokens, width)


@body("a number that half precision lacks", "number_too_large", TOKENS.half(), ints(3, 1, 1, 12).half(),
      parts={"q": lambda: nn.Linear(32, 32).half()}, fix=("torch.finfo(scores.dtype).min",))  # fmt: skip
def _(x: Tensor, m: Tensor, q: nn.Module) -> Tensor:
    scores = split(q(x), 4) @ split(q(x), 4).mT
    return scores.masked_fill(m == 0, -1e10).softmax(-1)


def _decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8, batch_first=True), 1)


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)


def _attention() -> nn.Module:
    return nn.MultiheadAttention(8, 2, batch_first=True)


ROWS = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
for _make, _inputs, _argument, _name, _mask, _code in (
    (_decoder, 2, "tgt_mask", "tgt_key_padding_mask", ROWS.float(), "(m == 0)"),
    (_decoder, 2, "memory_mask", "memory_key_padding_mask", ROWS.bool(), "~m"),
    (_encoder, 1, "mask", "src_key_padding_mask", ROWS == 0, "m"),
    (_attention, 3, "attn_mask", "key_padding_mask", ROWS, "(m == 0)"),
    (_attention, 3, "attn_mask", "key_padding_mask", 1 - ROWS, "m.bool()"),
):

    def _passed(x: Tensor, m: Tensor, layer: nn.Module, inputs: int = _inputs, argument: str = _argument) -> Any:
        return layer(*[x] * inputs, **{argument: m})

    def _renamed(
        x: Tensor, m: Tensor, layer: nn.Module, inputs: int = _inputs, name: str = _name, code: str = _code
    ) -> Any:
        return layer(*[x] * inputs, **{name: eval(code, {"m": m})})

    body(
        f"{_name} as {_argument}, {_code}",
        "mask_rank",
        floats(2, 5, 8),
        _mask,
        parts={"layer": _make},
        fix=(f"{_name}={_code}",),
        mended=made(_renamed, layer=_make),
    )(_passed)


class PaddedEncoder(nn.Module):
    """An encoder converts its padding mask before a layer of it raises."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, pad: Tensor) -> Any:
        return self.encoder(x, src_key_padding_mask=pad)


add(
    Failing(
        "a longer padding mask of an encoder",
        PaddedEncoder,
        lambda: (floats(2, 7, 16), ~bools(2, 8)),
        cause="mask_size",
    )
)


# views, cuts, projections


@body("one size taken twice", "view_sizes", TOKENS, bools(3, 9, 12), fix=("m.reshape(3, 1, 9, 12)",))
def _(x: Tensor, m: Tensor) -> Tensor:
    return m.reshape(3, 1, m.shape[1], m.shape[1])


@body("a table for more features", "table_size", TOKENS, parts={"q": linear(32, 32)}, fix=("6 features", "[..., :6]"))
def _(x: Tensor, q: nn.Module) -> Tensor:
    return split(q(x), 4)[..., :6] * torch.outer(torch.arange(12.0), torch.ones(8)).cos()


_UNEQUAL = {"qkv": linear(32, 48), "norm": lambda: nn.RMSNorm(32)}


@body(
    "three equal parts of few keys and many queries",
    "unequal_parts",
    TOKENS,
    parts=_UNEQUAL,
    fix=("split([32, 8, 8], -1)",),
    mended=made(lambda x, qkv, norm: split(norm(qkv(x).split([32, 8, 8], -1)[0]), 8), **_UNEQUAL),
)
def _(x: Tensor, qkv: nn.Module, norm: nn.Module) -> Tensor:
    return split(norm(qkv(x).chunk(3, -1)[0]), 8)


_SIDES = {"q": linear(32, 60), "k": linear(32, 60), "v": linear(32, 12)}


def _output_rows(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module, rows: int = 60) -> Tensor:
    weights = (split(q(x), 6) @ split(k(x), 6).mT).softmax(-1)
    return torch.mm((weights @ split(v(x), 6)).transpose(1, 2).reshape(-1, 12), torch.ones(rows, 12))


body(
    "an output projection as wide as the keys",
    "output_rows",
    TOKENS,
    parts=_SIDES,
    fix=("[12, 12]",),
    mended=made(lambda x, **sides: _output_rows(x, rows=12, **sides), **_SIDES),
)(_output_rows)


@body(
    "a projection of another width",
    "wrong_width",
    _T,
    parts={"q": linear(32, 64), "o": linear(32, 32)},
    fix=("in_features 64",),
)
def _(x: Tensor, q: nn.Module, o: nn.Module) -> Tensor:
    return o((split(q(x), 4).softmax(-1) + 0).transpose(1, 2).flatten(2))


@body("tokens that were lost before", "wrong_width", floats(2, 12, 32), parts={"q": linear(32, 32)}, without_fix=True)
def _(x: Tensor, q: nn.Module) -> Tensor:
    return q(x.reshape(2, 24, 16))


class OwnNorm(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * self.weight


for _norm in (nn.RMSNorm, OwnNorm):
    _parts = {"q": linear(32, 32), "q_norm": lambda norm=_norm: norm(32)}
    body(
        f"a norm of the whole projection: {_norm.__name__}",
        "norm_of_whole",
        TOKENS,
        parts=_parts,
        fix=("q_norm before the heads are split", "8 features"),
        mended=made(lambda x, q, q_norm: q_norm(q(x)).unflatten(-1, (4, 8)), **_parts),
    )(lambda x, q, q_norm: q_norm(q(x).unflatten(-1, (4, 8))))


class Positions(nn.Module):
    def __init__(self, code: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.code = code
        self.register_buffer("pe", torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.code(x, self.pe)


def table(name: str, code: Any, *shape: int, fix: tuple[str, ...], mended: Any = None) -> None:
    right = None if mended is None else lambda: Positions(mended, *shape)
    make = lambda: Positions(code, *shape)  # noqa: E731
    add(Failing(name, make, lambda: (TOKENS,), cause="table_transposed", fix=fix, mended=right))


table(
    "a table of positions, cut along its size 1",
    lambda x, pe: x + pe[:, : x.shape[1]],
    *(50, 1, 32),
    fix=("pe[:12].transpose(0, 1) if x is `batch sequence embed`",),
    mended=lambda x, pe: x + pe[:12].transpose(0, 1),
)
table("a table of positions, not cut", lambda x, pe: x + pe, 50, 1, 32, fix=("pe[:12].transpose(0, 1)", "pe[:3]"))
table("a table of positions, before", lambda x, pe: pe + x, 1, 50, 32, fix=("pe[:, :3].transpose(0, 1)", "pe[:, :12]"))


@body(
    "ids below and above a table",
    "index_out_of_range",
    torch.tensor([[-1, 7]]),
    parts={"table": lambda: nn.Embedding(5, 24)},
    fix=("0 to 4",),
)
def _(ids: Tensor, table: nn.Module) -> Any:
    return table(ids)


class FullSlots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(24, 24)
        self.register_buffer("slots", torch.zeros(2, 9, 24))

    def forward(self, x: Tensor) -> Tensor:
        self.slots[:, 4 : 4 + x.shape[1]] = self.k(x)
        return self.slots


add(
    Failing(
        "a buffer of slots", FullSlots, lambda: (floats(2, 7, 24),), cause="no_room", fix=("dimension 1 of slots 11",)
    )
)


# numbers of heads


HEAD_DIM, WIDTH = 4, 24


def heads(
    name: str, cause: str, count: int = 6, kv_count: int = 2, length: int = 7, **facts: Any
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a function of queries `batch query heads head_dim` and of keys and values with fewer heads."""

    def decorate(weigh: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def code(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
            return weigh(*(side(x).unflatten(-1, (-1, HEAD_DIM)) for side in (q, k, v)))

        parts = {"q": linear(WIDTH, count * HEAD_DIM)} | dict.fromkeys("kv", linear(WIDTH, kv_count * HEAD_DIM))
        body(name, cause, floats(2, length, WIDTH), parts=parts, **facts)(code)
        return weigh

    return decorate


@heads("other heads by matmul", "heads_differ", kv_count=4, fix=("6 key heads",))
def by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (side.transpose(1, 2) for side in (q, k, v))
    return (q @ k.mT).softmax(-1) @ v


@heads("fewer heads by einsum", "heads_not_repeated", fix=("k.repeat_interleave(3, dim=2)",))
def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


@heads("fewer heads beside the batch", "heads_not_repeated", fix=("k.repeat_interleave(3, dim=0)",))
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (side.transpose(1, 2).flatten(0, 1) for side in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)


@heads("repeated twice where thrice is due", "heads_not_repeated", fix=("3 of each of the 2 heads",))
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (side.transpose(1, 2) for side in (q, k, v))
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    return (q @ k.mT).softmax(-1) @ v


@heads("grouped queries alone", "heads_not_repeated", fix=("k.unsqueeze(2)",))
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.unflatten(2, (2, 3)).permute(0, 2, 3, 1, 4), k.transpose(1, 2), v.transpose(1, 2)
    return (q @ k.mT).softmax(-1) @ v


@heads("wrong groups", "heads_differ", fix=("2 groups of 3",))
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (side.unflatten(2, (-1, size)).permute(0, 2, 3, 1, 4) for side, size in ((q, 2), (k, 1), (v, 1)))
    return (q @ k.mT).softmax(-1) @ v


@heads("only the keys are repeated", "heads_not_repeated", fix=("v.repeat_interleave(3, dim=1)",))
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (side.transpose(1, 2) for side in (q, k, v))
    return (q @ k.repeat_interleave(3, dim=1).mT).softmax(-1) @ v


@heads("fewer heads in a kernel", "heads_not_repeated", fix=("k.repeat_interleave(3, dim=1)", "enable_gqa=True"))
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(side.transpose(1, 2) for side in (q, k, v)))


def _repeated(x: Tensor, times: int) -> Tensor:
    """Return heads repeated, of `batch heads sequence head_dim`."""
    return x.repeat_interleave(times, 1)


@heads("the sequence is repeated before the transpose", "heads_not_repeated", length=5, fix=(".transpose(1, 2)",))
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, _repeated(k, 3), _repeated(v, 3))))


@heads("the sequence is repeated", "heads_not_repeated", length=5, fix=("Repeat the heads",))
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (q @ k.repeat(1, 1, 3, 1).mT).softmax(-1) @ v.repeat(1, 1, 3, 1)


# an operand in another layout


_QKV = dict.fromkeys(("q", "k", "v"), linear(24, 24))


def layout(name: str, cause: str, *fix: str, given: tuple[Tensor, ...] = (X,), mended: Any = None) -> Any:
    """Register a function of queries, keys and values `batch heads position head_dim`, and of what else is given."""
    whole = lambda code: lambda x, *more, q, k, v: code(*(split(side(x), 3) for side in (q, k, v)), *more)  # noqa: E731

    def decorate(code: Callable[..., Any]) -> None:
        right = None if mended is None else made(whole(mended), **_QKV)
        body(name, cause, *given, parts=_QKV, fix=fix, mended=right)(whole(code))

    return decorate


@layout(
    "values that are turned",
    "value_transposed",
    "Use v.",
    mended=lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
)
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v.mT


@layout(
    "an equation for keys in another order",
    "axes_out_of_order",
    "k.transpose(1, 2)",
    mended=lambda q, k, v: torch.einsum("bhqd,bkhd->bhqk", q, k.transpose(1, 2)),
)
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqd,bkhd->bhqk", q, k)


@layout(
    "a cache joined along the heads",
    "joined_along_another",
    "dim=2",
    mended=lambda q, k, v: torch.cat([k[:, :, :4], k], dim=2),
)
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k[:, :, :4], k], dim=1)


@layout("four dimensions for bmm", "wrong_rank", "torch.matmul", mended=lambda q, k, v: torch.matmul(q, k.mT))
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(q, k.mT)


@layout(
    "angles without an axis of heads",
    "lacks_an_axis",
    "angles[:, None]",
    given=(X, floats(7, 8)),
    mended=lambda q, k, v, angles: q.transpose(1, 2) * angles[:, None],
)
def _(q: Tensor, k: Tensor, v: Tensor, angles: Tensor) -> Tensor:
    return q.transpose(1, 2) * angles


@layout(
    "a bias with the heads last",
    "mask_rank",
    "bias.permute(2, 0, 1)",
    given=(X, floats(7, 7, 3)),
    mended=lambda q, k, v, bias: q @ k.mT + bias.permute(2, 0, 1),
)
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return q @ k.mT + bias


@layout(
    "a mask of floats",
    "mask_dtype",
    "mask == 0",
    given=(X, floats(7, 7).triu(1)),
    mended=lambda q, k, v, mask: (q @ k.mT).masked_fill(mask.bool(), -1e9),
)
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(mask, -1e9)


@layout("a vector of another length beside scores", "", given=(X, floats(24)))
def _(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    return q @ k.mT * scale


@body("keys and values that are not split", "heads_not_split", X, MEMORY, parts=_QKV, fix=("Split k and v too",))
def _(x: Tensor, memory: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    k, v = k(memory), v(memory)
    return F.scaled_dot_product_attention(split(q(x), 3), k, v)


@body("values that are not split", "heads_not_split", X, parts=_QKV, fix=(".view(batch, length, 3, 8)",))
def _(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    return (split(q(x), 3) @ split(k(x), 3).mT).softmax(-1) @ v(x)


@body("keys with the length of the queries", "view_sizes", X, MEMORY, parts=_QKV, fix=("view(2, 11, 3, 8)",))
def _(x: Tensor, memory: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    return k(memory).view(len(x), x.shape[1], 3, 8)


@body("a token for one item of the batch", "batch_differs", X, fix=("expand(2, -1, -1)",))
def _(x: Tensor) -> Tensor:
    token = torch.zeros(1, 1, 24)
    return torch.cat([token, x], dim=1)


@body(
    "a residual with the sequence first",
    "batch_and_sequence_swapped",
    X,
    parts={"attn": lambda: nn.MultiheadAttention(24, 3, batch_first=True)},
    fix=("transpose(0, 1)",),
)
def _(x: Tensor, attn: nn.Module) -> Tensor:
    y = attn(x, x, x)[0].transpose(0, 1)
    return x + y


class OfPairs(nn.Module):
    """Adds a table of pairs of positions, or a mask, that is made for five tokens."""

    def __init__(self, table: Tensor, *, is_learned: bool) -> None:
        super().__init__()
        self.q = nn.Linear(24, 24)
        self.table = nn.Parameter(table) if is_learned else nn.Buffer(table)

    def forward(self, x: Tensor) -> Tensor:
        q = split(self.q(x), 3)
        return q @ q.mT + self.table


for _is_learned in (True, False):
    add(
        Failing(
            f"a table of pairs for fewer tokens, {'learned' if _is_learned else 'in a buffer'}",
            partial(OfPairs, torch.zeros(3, 5, 5), is_learned=_is_learned),
            lambda: (X,),
            cause="mask_size",
            fix=("at most 5 tokens", "[..., :7, :7]"),
        )
    )


# nothing that is known


@body("two activations", "", TOKENS, parts={"q": linear(32, 32)}, without_fix=True)
def _(x: Tensor, q: nn.Module) -> Tensor:
    return q(x)[:, :5] * q(x)[:, :7]


@body("no axis fits", "", TOKENS, parts={"q": linear(32, 32)}, without_fix=True)
def _(x: Tensor, q: nn.Module) -> Tensor:
    return q(x).unflatten(-1, (4, 8)) + torch.ones(5, 4, 8)


class Asserts(nn.Module):
    """Asserts of sizes; `counted` is code that may not run a second time."""

    def __init__(self, code: Callable[[Any, Tensor, Tensor], None]) -> None:
        super().__init__()
        self.code, self.heads, self.reads = code, 4, 0

    @property
    def counted(self) -> int:
        self.reads += 1
        return 5

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.code(self, x, mask)
        return x


def asserts(name: str, *clash: str) -> Callable[[Callable[[Any, Tensor, Tensor], None]], None]:
    def decorate(code: Callable[[Any, Tensor, Tensor], None]) -> None:
        add(Failing(f"assert: {name}", lambda: Asserts(code), lambda: (TOKENS, torch.ones(3, 11)), clash=clash))

    return decorate


@asserts("sizes", "mask is [3, 11]", "length is 12")
def _(m: Any, x: Tensor, mask: Tensor) -> None:
    batch, length, _ = x.shape
    assert mask.size(0) == batch
    assert mask.size(1) == length


@asserts("shapes", "mask is [3, 11]", "batch is 3", "length is 12")
def _(m: Any, x: Tensor, mask: Tensor) -> None:
    batch, length, _ = x.shape
    assert mask.shape == (batch, length), "the mask must be batch key"


@asserts("a remainder", "width is 32", "32 / 3 = 10.67")
def _(m: Any, x: Tensor, mask: Tensor) -> None:
    width = x.shape[-1]
    assert width % 3 == 0


@asserts("code that counts")
def _(m: Any, x: Tensor, mask: Tensor) -> None:
    assert m.counted == x.shape[1]


@body("a view of one number", "", X)
def _(x: Tensor) -> Tensor:
    return x * x.sum().view(2)


@body("a norm of another width", "", TOKENS, parts={"q": linear(32, 32), "q_norm": lambda: nn.RMSNorm(48)})
def _(x: Tensor, q: nn.Module, q_norm: nn.Module) -> Any:
    return q_norm(q(x).unflatten(-1, (4, 8)))


# -- heads that are not joined -----------------------------------------------------------------------------------------


class NotJoined(nn.Module):
    """Its output's projection is given the heads of the context as they are, in some order of axes."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (3, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        context = (q @ k.mT / 8**0.5).softmax(-1) @ v
        context = context.permute(self.order)
        return self.o(context)


for _name, _order, _facts in (
    ("behind the tokens", (0, 2, 1, 3), {"fix": ("context.flatten(-2)",)}),
    ("before the tokens", (0, 1, 2, 3), {"fix": ("context.transpose(1, 2).flatten(-2)",)}),
    ("before the batch", (1, 0, 2, 3), {"without_fix": True}),
):
    add(Failing(f"heads {_name}", partial(NotJoined, _order), lambda: (X,), cause="heads_not_joined", **_facts))


# -- behind an attention whose output is not projected yet -------------------------------------------------------------


class SecondFails(nn.Module):
    """Two attentions whose contexts are projected together: the second does not transpose its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.o = nn.ModuleList(nn.Linear(24, 24) for _ in range(6)), nn.Linear(48, 24)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        parts = zip(self.layers, [x, x, x, x, memory, memory], strict=True)
        q, k, v, q_2, k_2, v_2 = (layer(y).unflatten(-1, (3, 8)).transpose(1, 2) for layer, y in parts)
        first = (q @ k.mT / 8**0.5).softmax(-1) @ v
        second = (q_2 @ k_2 / 8**0.5).softmax(-1) @ v_2
        return self.o(torch.cat([first, second], -1).transpose(1, 2).flatten(-2))


add(
    Failing(
        "the second of two attentions",
        SecondFails,
        lambda: (X, MEMORY),
        cause="key_not_transposed",
        fix=("k_2.transpose(-2, -1)",),
        operands=("q_2", "k_2"),
        completed=("query", "key", "q_heads", "k_heads"),
    )
)


# -- what is only said, and what is never said -------------------------------------------------------------------------


class Kinds(nn.Module):
    """Queries, keys and values in heads, a buffer of pairs and a table of positions; the code is one mistake."""

    def __init__(self, code: Callable[[Any, Tensor, Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.code, self.heads, self.head_dim = code, 3, 8
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.o, self.norm = nn.Linear(24, 24), nn.LayerNorm(24)
        self.scale = nn.Parameter(torch.ones(3, 1))
        self.register_buffer("pairs", torch.ones(32, 32).tril())
        self.register_buffer("positions", torch.randn(32, 24))

    def forward(self, x: Tensor) -> Any:
        q, k, v = (layer(x).unflatten(-1, (3, 8)).transpose(1, 2) for layer in self.layers)
        return self.code(self, x, q, k, v)


def kind(name: str, cause: str = "", **facts: Any) -> Callable[[Any], None]:
    def decorate(code: Any) -> None:
        if "right" in facts:
            facts["mended"] = partial(Kinds, facts.pop("right"))
        add(Failing(f"kind: {name}", partial(Kinds, code), lambda: (X,), cause=cause, **facts))

    return decorate


def _cached(m: Any, q: Tensor, k: Tensor, rows: slice) -> Tensor:
    k = torch.cat([k.detach()[:, :, :4], k], dim=2)
    return (q @ k.mT).masked_fill(m.pairs[rows, : k.shape[2]] == 0, float("-inf"))


@kind(
    "a causal buffer beside cached keys",
    "mask_size",
    fix=("[..., 4:11, :11]",),
    never=("tokens", "seq-len"),
    right=lambda m, x, q, k, v: _cached(m, q, k, slice(4, 11)),
)
def _(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _cached(m, q, k, slice(0, 11))


@kind("a width of heads that is a float", "view_sizes", fix=("//",), never=("view(2, 7, 24)",))
def _(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return m.o(x).view(2, 7, 3, 24 / 3)


@kind("all features for each head", "wrong_head_dim", fix=("head",), never=("view(2, 7, 1, 24)",))
def _(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return m.o(x).view(2, 7, 3, 24)


@kind("zeros and ones as floats", "mask_dtype", clash=("mask",), fix=("bool() if 1 keeps",), never=("to(torch",))
def _(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = m.pairs[:7, :7].double()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@kind("a scale of each head", without_fix=True, never=("tokens", "build the mask"))
def _(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT) * m.scale


@kind("heads behind the tokens in a kernel with a mask", "heads_not_transposed", never=("covers",))
def _(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    mask = m.pairs[:7, :7].bool()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@kind("positions of the batch", without_fix=True, never=("[:, None]", "room for"))
def _(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return x + m.positions[: x.shape[0]]


@kind("keys before queries", without_fix=True, never=("q.transpose",))
def _(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q).softmax(-1) @ v


@kind("keys and values before queries", without_fix=True, never=("q.transpose",))
def _(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = k.softmax(-2).mT @ v
    return context @ q.softmax(-1)


@kind("a norm of features that are not last", "features_not_last", without_fix=True, never=("layer for 7",))
def _(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return m.norm(x.transpose(1, 2))


@kind("heads joined in another order", "features_not_last", without_fix=True)
def _(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    y = ((q @ k.mT).softmax(-1) @ v).permute(0, 3, 1, 2).reshape(2, 24, 7)
    return m.o(y)


@kind("weights as features", without_fix=True, never=("in_features", "embed"))
def _(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    weights = (q @ k.mT).softmax(-1)
    return m.o(weights)


@kind("tokens in the place of heads", without_fix=True, never=("heads in 3 dimensions",))
def _(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v[:, :, :2]


@kind(
    "keys that were turned too far",
    "key_not_transposed",
    fix=("Use k.transpose(-2, -1)",),
    never=("Remove",),
    right=lambda m, x, q, k, v: q @ k.transpose(-2, -1),
)
def _(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ k.permute(0, 2, 3, 1)


@kind("heads and their features, exchanged", "heads_differ", fix=("3 heads of 8",), never=("multiple",))
def _(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    v = m.o(x).view(2, 7, 8, 3).transpose(1, 2)
    return (q @ k.mT).softmax(-1) @ v


class FourthArgument(nn.Module):
    """Its attention is given a mask of pairs in the place of that of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
        return self.attn(x, x, x, mask)[0]


add(
    Failing(
        "kind: a mask as the fourth argument",
        FourthArgument,
        lambda: (X,),
        cause="mask_rank",
        fix=("attn_mask=mask",),
        never=("Build the mask",),
    )
)


class Swapped(nn.Module):
    """Its decoder is given memory and target in the place of each other, or the masks of their keys."""

    def __init__(self, *, masks: bool) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 3, 32, batch_first=True), 1)
        self.masks = masks

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        if self.masks:
            first, second = (torch.zeros(2, length, dtype=torch.bool) for length in (7, 11))
            return self.decoder(x, memory, tgt_key_padding_mask=second, memory_key_padding_mask=first)
        mask = torch.ones(11, 11, dtype=torch.bool).triu(1)
        return self.decoder(x, memory, tgt_mask=mask)


for _masks, _facts in (
    (True, {"fix": ("first for these keys",), "never": ("Build the mask",)}),
    (False, {"without_fix": True, "never": ("Cut the mask",)}),
):
    add(
        Failing(
            f"kind: {'masks of keys' if _masks else 'memory and target'}, swapped",
            partial(Swapped, masks=_masks),
            lambda: (X, MEMORY),
            cause="mask_size",
            **_facts,
        )
    )
