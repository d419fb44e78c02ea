"""A fix is printed only if the failing call runs with it; a wrong view is found by its numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect
from mha_inspect.answers.failure.call import Call
from mha_inspect.answers.failure.facts import Operand
from mha_inspect.answers.failure.tried import Fix, fix_that_runs
from mha_inspect.errors import ForwardError
from mha_inspect.render.formats import to_text
from mha_inspect.reports.trace import Cause, Trace


class Attention(nn.Module):
    """Heads as wide as the input says, in projections of another width."""

    def __init__(self, dim: int = 32, heads: int = 4, head_dim: int = 8, low: int = 0) -> None:
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


class Body(nn.Module):
    """Calls a function with its parts."""

    def __init__(self, body: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.body, self.parts = body, nn.ModuleDict(parts)

    def forward(self, *args: Tensor) -> Any:
        return self.body(*args, **self.parts)


def trace_of(module: nn.Module, *args: Tensor) -> Trace:
    with pytest.raises(ForwardError) as caught:
        mha_inspect.trace(module, *args)
    return caught.value.trace


def cause_of(module: nn.Module, *args: Tensor) -> Cause:
    failure = trace_of(module, *args).failure
    assert failure is not None
    assert failure.cause is not None
    return failure.cause


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("batch", "tokens", "head_dim", "count"), [(1, 5, 24, 4), (3, 8, 32, 2)])
def test_a_view_that_makes_positions_of_features(batch, tokens, head_dim, count):
    """By hand: the width is `count · head_dim`, and the view takes heads of `32 / count` features."""
    x, taken = floats(batch, tokens, 32), 32 // count
    cause = cause_of(Attention(heads=count, head_dim=head_dim), x, x)
    positions = tokens * head_dim // taken
    assert cause.name == "wrong_head_dim"
    assert f"has {tokens} tokens of {count * head_dim} features" in cause.explanation
    assert f"makes {positions} positions" in cause.explanation
    assert f"{count} heads of {taken} are 32 features" in cause.explanation
    assert cause.fix == f"Use head_dim {head_dim} in that view ({count} heads, width {count * head_dim})."


def test_a_projection_of_another_width_is_no_wrong_view():
    """The right twin: as many positions as tokens, and an output projection made for another width."""
    body = Body(
        lambda x, q, o: o((heads(q(x), 4).softmax(-1) + 0).transpose(1, 2).flatten(2)),
        q=nn.Linear(32, 64),
        o=nn.Linear(32, 32),
    )
    cause = cause_of(body, floats(2, 12, 32))
    assert cause.name == "wrong_width"
    assert cause.fix.startswith("Create the layer with in_features 64, or give ")


def test_the_width_gets_no_fix_if_the_tokens_were_lost():
    body = Body(lambda x, q: q(x.reshape(2, 24, 16)), q=nn.Linear(32, 32))
    cause = cause_of(body, floats(2, 12, 32))
    assert (cause.name, cause.fix) == ("wrong_width", "")


def test_a_mask_of_keys_that_were_projected():
    x = floats(2, 16, 32)
    cause = cause_of(Attention(low=6), x, x, torch.ones(16, 16, dtype=torch.bool))
    assert (cause.name, cause.fix) == ("mask_size", "")
    assert cause.explanation.endswith("e projected the 16 keys to 6: apply a mask of keys before it.")


def test_a_mask_of_the_queries():
    cause = cause_of(Attention(), floats(2, 9, 32), floats(2, 5, 32), torch.ones(2, 1, 1, 9, dtype=torch.bool))
    assert cause.fix == (
        "Give a mask of the 5 keys of this product, which come from context: 9 is the number of queries."
    )


@pytest.mark.parametrize(
    ("shape", "keys", "is_cut"), [((9, 9), 5, False), ((16, 16), 9, True), ((2, 1, 1, 16), 5, True)]
)
def test_a_longer_mask_is_cut_to_the_keys_and_one_of_the_queries_is_not(shape, keys, is_cut):
    cause = cause_of(Attention(), floats(2, 9, 32), floats(2, keys, 32), torch.ones(shape, dtype=torch.bool))
    assert cause.name == "mask_size"
    assert ("Cut the mask" in cause.fix) == is_cut


@pytest.mark.parametrize(
    ("fewer", "queries", "mask"),
    [
        (lambda keys: keys[:, -6:], 12, torch.ones(12, 12).bool()),
        (lambda keys: F.avg_pool1d(keys.mT, 2).mT, 4, torch.ones(2, 1, 1, 12).bool()),
    ],
)
def test_a_mask_of_keys_before_the_module_reduced_them(fewer, queries, mask):
    """Which of its entries are right is unknown: it is neither cut nor a mask of queries."""

    def body(x, mask, q, k):
        scores = heads(q(x)[:, :queries], 4) @ heads(fewer(k(x)), 4).mT
        return scores.masked_fill(~mask, float("-inf"))

    failure = trace_of(Body(body, q=nn.Linear(24, 24), k=nn.Linear(24, 24)), floats(2, 12, 24), mask).failure
    assert failure is not None
    assert failure.cause is None or (failure.cause.name, failure.cause.fix) == ("mask_size", "")


def test_a_batch_of_several_is_not_shared():
    layer = nn.MultiheadAttention(24, 3, batch_first=True)
    body = Body(lambda x, y, attn: attn(x, y, y), attn=layer)
    cause = cause_of(body, floats(2, 7, 24), floats(5, 11, 24))
    assert (cause.name, cause.fix) == ("batch_differs", "")
    assert cause_of(body, floats(2, 7, 24), floats(1, 11, 24)).fix.endswith(".expand(2, -1, -1) to share its one item.")


def test_each_way_to_repeat_heads_is_tried():
    def body(x, p, r):
        q, k, v = heads(p(x), 6), heads(r(x), 2), heads(r(x) * 2, 2)
        return F.scaled_dot_product_attention(q, k, v)

    cause = cause_of(Body(body, p=nn.Linear(24, 24), r=nn.Linear(24, 8)), floats(2, 7, 24))
    assert cause.name == "heads_not_repeated"
    assert cause.fix == "Use k.repeat_interleave(3, dim=1) on keys and values before the product, or enable_gqa=True."


def test_only_fixes_that_run_are_joined():
    x, weight = floats(2, 7, 24), floats(40, 24)
    call = Call("torch.matmul", (x, weight), function=torch.matmul)
    given = [cast(Operand, SimpleNamespace(given=SimpleNamespace(value=value))) for value in (x, weight)]
    fixes = [
        Fix("use another", [(given[0], lambda tensor: tensor.mT)]),
        Fix("x @ W.T", [(given[1], lambda tensor: tensor.T)]),
        Fix("use W of another shape", [(given[1], lambda tensor: tensor.T)], (2, 7, 24)),
        Fix("read the facts"),
    ]
    assert fix_that_runs(call, fixes) == "x @ W.T, or read the facts."
    assert fix_that_runs(call, fixes[:1]) == ""
    # Without a function to call, nothing can be tried.
    assert fix_that_runs(Call("torch.matmul", (x, weight)), fixes[:2]) == ""


def test_a_cause_without_a_fix_has_no_row_for_it():
    x = floats(2, 16, 32)
    page = to_text(trace_of(Attention(low=6), x, x, torch.ones(16, 16, dtype=torch.bool)), "plain")
    assert "apply a mask of keys before it" in page
    assert "\nfix" not in page


def test_a_layer_for_other_keys():
    layer = nn.MultiheadAttention(24, 3, batch_first=True)
    body = Body(lambda x, y, attn: attn(x, y, y), attn=layer)
    assert cause_of(body, floats(2, 7, 24), floats(2, 11, 13)).fix.startswith(
        "Create the layer with kdim=13, vdim=13, or"
    )


def test_ids_below_and_above_a_table():
    """Clamping them from below alone would not run."""
    body = Body(lambda ids, table: table(ids), table=nn.Embedding(5, 24))
    assert cause_of(body, torch.tensor([[-1, 7]])).fix == "Use numbers from 0 to 4."


def test_the_trial_leaves_a_cache_as_it_was():
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k = nn.Linear(24, 24)
            self.register_buffer("slots", torch.zeros(2, 9, 24))

        def forward(self, x: Tensor) -> Tensor:
            self.slots[:, 4 : 4 + x.shape[1]] = self.k(x)
            return self.slots

    module = Cache()
    state = torch.get_rng_state()
    cause = cause_of(module, floats(2, 7, 24))
    assert cause.fix == "Make dimension 1 of slots 11 or more, or pass less."
    assert not module.slots.any()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_name_of_a_product_is_not_that_of_its_alias():
    failure = trace_of(Body(lambda x: torch.mm(x[0], x[1])), floats(2, 7, 24)).failure
    assert failure is not None
    assert failure.call == "torch.mm"


ROWS = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
ONES_KEEP = "(m == 0): 1 keeps a key in m, and True masks a key out in {name}."
TRUE_KEEPS = "~m: True keeps a key in m, and True masks a key out in {name}."
UNKNOWN = "(m == 0) if 1 keeps a key in m, or {name}=m.bool() if 1 masks it out."


def decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8, batch_first=True), 1)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)


def attention() -> nn.Module:
    return nn.MultiheadAttention(8, 2, batch_first=True)


@pytest.mark.parametrize(
    ("layer", "inputs", "argument", "name", "mask", "fix"),
    [
        (decoder, 2, "tgt_mask", "tgt_key_padding_mask", ROWS.float(), ONES_KEEP),
        (decoder, 2, "memory_mask", "memory_key_padding_mask", ROWS.bool(), TRUE_KEEPS),
        (encoder, 1, "mask", "src_key_padding_mask", ROWS == 0, "m."),
        (attention, 3, "attn_mask", "key_padding_mask", ROWS, ONES_KEEP),
        (attention, 3, "attn_mask", "key_padding_mask", 1 - ROWS, "m.bool()."),
        (attention, 3, "attn_mask", "key_padding_mask", torch.tensor([[0, 0, 1, 1, 1]] * 2), UNKNOWN),
    ],
)
def test_a_mask_of_keys_is_passed_with_the_name_and_the_meaning_that_the_called_module_has(
    layer: Callable[[], nn.Module], inputs: int, argument: str, name: str, mask: Tensor, fix: str
) -> None:
    """In each padding mask of torch, True masks a key out; the attention_mask of a tokenizer has 1 for tokens."""

    def body(x: Tensor, m: Tensor, layer: nn.Module) -> Any:
        return layer(*[x] * inputs, **{argument: m})

    cause = cause_of(Body(body, layer=layer()), floats(2, 5, 8), mask)
    assert cause.name == "mask_rank"
    assert cause.fix.removeprefix("Pass ").removeprefix("it as ") == f"{name}={fix.format(name=name)}"
    # The oracle: torch runs with what is printed.
    code = cause.fix.partition("=")[2].split(" if ")[0].split(": ")[0].rstrip(".")
    layer()(*[floats(2, 5, 8)] * inputs, **{name: eval(code, {"m": mask})})


def test_a_layer_and_an_input_of_another_dtype():
    layer = nn.MultiheadAttention(24, 3, batch_first=True)
    cause = cause_of(Body(lambda x, attn: attn(x, x, x), attn=layer), floats(2, 7, 24).double())
    assert "float64; the other tensors are float32" in cause.explanation
    assert cause.fix.startswith("Use ")
    assert ".to(torch.float32), or convert the module with .to(torch.float64)" in cause.fix
