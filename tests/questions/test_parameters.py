"""Parameters cut by head give torch's own output, and what a head count changes is told by comparing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mha_inspect.call.load import load_layer
from mha_inspect.errors import InputError
from mha_inspect.layers.catalog import LAYERS, LayerKind
from mha_inspect.layers.spec import AttentionSpec, RunSpec, Show
from mha_inspect.questions.params import INPUTS
from mha_inspect.questions.params import params as report_of
from mha_inspect.reports.params import ParamsReport
from mha_inspect.running.subject import Subject

from ..corpus.test_parameters import cut

SPEC = AttentionSpec(embed_dim=12, num_heads=3)


def report(spec: AttentionSpec = SPEC, *, per_head: bool = False, num_heads: tuple[int, ...] = ()) -> ParamsReport:
    specs = [replace(spec, num_heads=count) for count in num_heads] or [spec]
    first, *beside = [load_layer(wanted, INPUTS, RunSpec(), "torch") for wanted in specs]
    return report_of(first, per_head=per_head, beside=beside)


def params(module: nn.Module, show: Show | None = None, *, per_head: bool = False) -> ParamsReport:
    return report_of(Subject(module, (), {}), show, per_head=per_head, called=False)


def filled(module: nn.MultiheadAttention) -> nn.MultiheadAttention:
    """With biases that are not 0, so that a mistake in one shows."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module.eval()


specs = st.builds(
    lambda heads, width, **rest: AttentionSpec(embed_dim=heads * width, num_heads=heads, **rest),
    heads=st.sampled_from([1, 2, 3, 5]),
    width=st.sampled_from([1, 2, 7]),
    kdim=st.sampled_from([None, 11]),
    vdim=st.sampled_from([None, 13]),
    bias=st.booleans(),
    add_bias_kv=st.booleans(),
    add_zero_attn=st.booleans(),
    batch_first=st.booleans(),
)


Pieces = dict[tuple[str, int], Tensor]
"""The part of a parameter by its name and its head, e.g. `("W_q", 0)`."""


def pieces_of(spec: AttentionSpec, module: nn.MultiheadAttention) -> Pieces:
    pieces = {}
    for row in report(spec, per_head=True).parameters:
        for piece in row.heads or ():
            pieces[piece.part, piece.head] = cut(module.get_parameter(row.name), piece)
    return pieces


def heads_of(spec: AttentionSpec, pieces: Pieces, head: int, given: list[Tensor]) -> list[Tensor]:
    """Return query, key and value of a head, with the keys that the layer appends: `batch position head_dim`."""
    heads = [x @ pieces[f"W_{part}", head].T for part, x in zip("qkv", given, strict=True)]
    if spec.bias:
        heads = [x + pieces[f"b_{part}", head] for part, x in zip("qkv", heads, strict=True)]
    q, k, v = heads
    if spec.add_bias_kv:
        k = torch.cat([k, pieces["bias_k", head].expand(2, 1, -1)], dim=1)
        v = torch.cat([v, pieces["bias_v", head].expand(2, 1, -1)], dim=1)
    if spec.add_zero_attn:
        k, v = (nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return [q, k, v]


@settings(max_examples=12, deadline=None)
@given(specs)
def test_one_matrix_per_head_gives_torchs_output(spec: AttentionSpec) -> None:
    """ "Attention Is All You Need", section 3.2.2, read literally: no matrix here is wider than a head."""
    module = filled(LAYERS["torch"].build(spec)).double()
    pieces = pieces_of(spec, module)
    inputs = [torch.randn(2, 5, width).double() for width in (spec.embed_dim, spec.key_width, spec.value_width)]
    output = torch.zeros(2, 5, spec.embed_dim).double()
    if spec.bias:
        output += module.out_proj.bias.detach()
    with torch.no_grad():
        for head in range(spec.num_heads):
            q, k, v = heads_of(spec, pieces, head, inputs)
            output += (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v @ pieces["W_o", head].T
        if spec.batch_first:
            expected = module(*inputs)[0]
        else:
            expected = module(*(x.transpose(0, 1) for x in inputs))[0].transpose(0, 1)
    torch.testing.assert_close(output, expected)


def test_what_changes_is_found_by_comparing(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LayerKind.build

    def built(*args: Any) -> nn.Module:
        module = honest(*args)
        if module.num_heads == 2:
            with torch.no_grad():
                module.in_proj_weight[35, 11] += 1e-6
        if module.num_heads == 4:
            module.out_proj.bias = nn.Parameter(torch.zeros(1))
        return module

    monkeypatch.setattr(LayerKind, "build", built)
    changes = report(num_heads=(1, 2, 4)).changes
    assert "Nothing" not in changes
    assert "From 1 to 2 heads, the parameters change: other values in in_proj_weight." in changes
    assert "From 1 to 4 heads, the parameters change: out_proj.bias [12] becomes [1]." in changes


def test_statistics_and_values_when_asked_for() -> None:
    module = filled(nn.MultiheadAttention(12, 3))
    row = params(module, show=Show(stats=True, values=True, full_values=True)).parameters[0]
    assert row.stats is not None
    assert row.stats.mean == pytest.approx(float(module.in_proj_weight.detach().double().mean()))
    assert row.values is not None
    assert row.values.data == module.in_proj_weight.tolist()
    assert params(module).parameters[0].stats is None


def test_lazy_parameters_have_no_shape_yet() -> None:
    with pytest.raises(InputError, match="'weight' is lazy"):
        params(nn.LazyLinear(3))
