"""Roles, counts and slices, against torch's own layer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mha_inspect.answers.params import INPUTS
from mha_inspect.answers.params import params as report_of
from mha_inspect.call.load import load_layer
from mha_inspect.errors import InputError
from mha_inspect.layers.catalog import LAYERS, LayerKind
from mha_inspect.layers.spec import AttentionSpec, RunSpec, Show
from mha_inspect.reports.params import ParamsReport
from mha_inspect.running.subject import Subject

from ..corpus.test_parameters import cut

SPEC = AttentionSpec(embed_dim=12, num_heads=3)


def report(spec: AttentionSpec = SPEC, **options: Any) -> ParamsReport:
    return params_spec(spec, **options)


def params_spec(
    spec: AttentionSpec,
    run: RunSpec | None = None,
    show: Show | None = None,
    *,
    layer: str = "torch",
    per_head: bool = False,
    num_heads: tuple[int, ...] = (),
) -> ParamsReport:
    specs = [replace(spec, num_heads=count) for count in num_heads] or [spec]
    first, *beside = [load_layer(wanted, INPUTS, run or RunSpec(), layer) for wanted in specs]
    return report_of(first, show, per_head=per_head, beside=beside)


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


@settings(max_examples=12, deadline=None)
@given(specs)
def test_the_slices_of_all_heads_tile_each_parameter_exactly_once(spec: AttentionSpec) -> None:
    module = LAYERS["torch"].build(spec)
    parameters = dict(module.named_parameters())
    for row in report(spec, per_head=True).parameters:
        if row.name == "out_proj.bias":
            assert row.heads == ()
            continue
        count = torch.zeros_like(parameters[row.name])
        assert row.heads is not None
        for piece in row.heads:
            cut(count, piece).add_(1)
        assert bool((count == 1).all()), row.name
        assert {piece.head for piece in row.heads} == set(range(spec.num_heads))


@settings(max_examples=12, deadline=None)
@given(specs)
def test_one_matrix_per_head_gives_torchs_output(spec: AttentionSpec) -> None:
    """ "Attention Is All You Need", section 3.2.2, read literally: no matrix here is wider than a head."""
    module = filled(LAYERS["torch"].build(spec)).double()
    pieces = {
        (piece.part, piece.head): cut(module.get_parameter(row.name), piece)
        for row in report(spec, per_head=True).parameters
        for piece in row.heads or ()
    }
    given = [torch.randn(2, 5, width).double() for width in (spec.embed_dim, spec.key_width, spec.value_width)]
    with torch.no_grad():
        expected = module(*(x if spec.batch_first else x.transpose(0, 1) for x in given))[0]
        output = torch.zeros(2, 5, spec.embed_dim).double()
        for head in range(spec.num_heads):
            heads = [x @ pieces[f"W_{part}", head].T for part, x in zip("qkv", given, strict=True)]
            if spec.bias:
                heads = [x + pieces[f"b_{part}", head] for part, x in zip("qkv", heads, strict=True)]
            for place, part in ((1, "bias_k"), (2, "bias_v")) if spec.add_bias_kv else ():
                heads[place] = torch.cat([heads[place], pieces[part, head].expand(2, 1, -1)], dim=1)
            if spec.add_zero_attn:
                heads[1:] = [torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in heads[1:]]
            q, k, v = heads
            output += (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v @ pieces["W_o", head].T
        output += module.out_proj.bias if spec.bias else 0
    torch.testing.assert_close(output if spec.batch_first else output.transpose(0, 1), expected)


def test_what_changes_is_found_by_comparing(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LayerKind.build

    def other(*args: Any) -> nn.Module:
        module = honest(*args)
        if module.num_heads == 2:
            with torch.no_grad():
                module.in_proj_weight[35, 11] += 1e-6
        if module.num_heads == 4:
            module.out_proj.bias = nn.Parameter(torch.zeros(1))
        return module

    monkeypatch.setattr(LayerKind, "build", other)
    changes = report(num_heads=(1, 2, 4)).changes
    assert "Nothing" not in changes
    assert "From 1 to 2 heads, the parameters change: other values in in_proj_weight." in changes
    assert "From 1 to 4 heads, the parameters change: out_proj.bias [12] becomes [1]." in changes


def test_on_meta_there_are_shapes_and_no_content() -> None:
    made = params_spec(
        AttentionSpec(embed_dim=2**16, num_heads=128),
        RunSpec(device="meta"),
        Show(stats=True, values=True),
        per_head=True,
        num_heads=(1, 128),
    )
    assert made.total.numel == made.total.formula_numel == 4 * 2**32 + 4 * 2**16
    assert all(row.stats is None and row.values is None and row.heads is not None for row in made.parameters)
    assert "on meta" in made.changes


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
