"""`mha-inspect diff` with a module out of a model: the same attention, and what it was ported to."""

from __future__ import annotations

import json

import pytest
import torch

CODE = """
import math

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, hidden_states, turn, attention_mask=None, cache=None):
        if cache is not None:
            cache.seen += 1
            hidden_states = hidden_states * cache.seen
        q, k, v = (p(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = q * turn[0], k * turn[0]
        weights = (q @ k.mT / math.sqrt(q.shape[-1]) + attention_mask).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Cache:
    seen = 0


class Model(nn.Module):
    def __init__(self, dim=33, heads=3):
        super().__init__()
        self.table = nn.Embedding(13, dim)
        self.layers = nn.ModuleList(nn.ModuleDict({"attention": Attention(dim, heads)}) for _ in range(2))
        self.idle = Attention(dim, heads)

    def forward(self, input_ids):
        x, n = self.table(input_ids), input_ids.shape[1]
        mask = torch.full((n, n), -torch.inf).triu(1)
        turn = (torch.linspace(1, 2, n)[:, None], "cosine")
        for layer in self.layers:
            x = x + layer["attention"](x, turn, attention_mask=mask, cache=Cache())
        return x


class Port(nn.Module):
    def __init__(self, d_model, n_heads, causal=True):
        super().__init__()
        self.n_heads, self.causal = n_heads, causal
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        turn = torch.linspace(1, 2, n, dtype=x.dtype)[:, None]
        y = nn.functional.scaled_dot_product_attention(q * turn, k * turn, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))
"""

SIZES = ("--batch", "2", "--seq-len", "5")
PATH = "layers.1.attention"


def report_of(invoke, mine: str, line: str) -> dict:
    code, out, err = invoke("diff", *line.replace("mine:", f"{mine}:").split(), *SIZES, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize(
    "line",
    [
        f"mine:Model mine:Port --left-module {PATH}",
        f"mine:Model mine:Model --left-module {PATH} --right-module layers.0.attention",
    ],
)
def test_a_port_is_the_same(invoke, mine, line):
    data = report_of(invoke, mine, line)
    assert (data["outcome"], data["weights"]["whole"]) == ("same", True)
    assert {row["verdict"] for row in data["stages"]} - {None} == {"same"}
    weights = next(row for row in data["stages"] if row["name"] == "weights")
    assert weights["left"]["shape"] == [2, 3, 5, 5]


def test_the_arguments_are_those_of_the_first_call(mine):
    from mha_inspect.call.call import Call
    from mha_inspect.call.part import part_of
    from mha_inspect.making.target import Target

    namespace: dict = {}
    exec(CODE, namespace)
    torch.manual_seed(0)
    model = namespace["Model"]().eval()
    ids = torch.arange(10).view(2, 5)
    part, call = part_of(Target(model, "mine", {}), Call((), {"input_ids": ids}, ""), PATH)
    first = model.layers[0]["attention"]
    mask, turn = call.kwargs["attention_mask"], call.kwargs["turn"]
    with torch.no_grad():
        x = model.table(ids)
        torch.testing.assert_close(call.kwargs["hidden_states"], x + first(x, turn, mask, namespace["Cache"]()))
        # The cache is filled by every call: what is left is a forward that answers the same each time.
        torch.testing.assert_close(part.module(**call.kwargs), part.module(**call.kwargs))
    assert part.module is model.layers[1]["attention"]
    assert call.drawn == ("hidden_states",)
    assert not part.module._forward_pre_hooks


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mine:Model torch --left-module layers.1.atention", "Did you mean layers.1.attention?"),
        ("mine:Model torch --left-module idle", "Model does not call its module idle"),
        ("mine:Model torch --right-module layers.1.attention", "side is a layer"),
        ("mine:Model torch", "--left-module or --right-module PATH"),
    ],
)
def test_modules_that_are_none(invoke, mine, line, said):
    answer = invoke("diff", *line.replace("mine:", f"{mine}:").split(), *SIZES)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
    assert answer.err.count("\n") <= 2
