"""What the parameters of any module are for, read off a recording: against torch's own layer, and head by head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from einops import rearrange
from torch import nn

import mha_inspect
from mha_inspect.errors import MhaInspectError
from mha_inspect.layers.catalog import LAYERS
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec
from mha_inspect.questions.params import params
from mha_inspect.reports.params import Parameter
from mha_inspect.running.subject import Subject
from tests.built import built_layer
from tests.layers.declared import ROLES

from .entry import E
from .every import ENTRIES
from .owned import InTurn, Tied


def read_off(module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Parameter]:
    report = params(Subject(module, args, kwargs), per_head=True)
    return {parameter.name: parameter for parameter in report.parameters}


@pytest.mark.parametrize(
    "settings",
    [
        {"num_heads": 1, "bias": False},
        {"kdim": 17, "vdim": 19},
        {"add_bias_kv": True, "batch_first": False},
    ],
)
def test_torchs_own_layer_has_the_table_that_is_declared_for_it(settings: dict[str, Any]) -> None:
    spec = AttentionSpec(**{"embed_dim": 12, "num_heads": 3, **settings})
    module = LAYERS["torch"].build(spec)
    dtype = getattr(torch, spec.dtype)
    given = [torch.randn(2, 5, size, dtype=dtype) for size in (12, spec.key_width, spec.value_width)]
    report = params(Subject(module, tuple(given), {}), per_head=True)
    declared = ROLES["torch"](spec)
    rows = [(row.name, row.axes, row.role, row.heads) for row in report.parameters]
    assert rows == [(name, declared[name].axes, declared[name].text, declared[name].slices()) for name, *_ in rows]


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"num_heads": 1},
    {"num_kv_heads": 1},
    {"num_heads": 6, "embed_dim": 30, "num_kv_heads": 2},
    {"rope": True, "embed_dim": 30},
    {"kdim": 17, "vdim": 19},
    {"head_dim": 10},
)


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_has_the_slices_that_are_declared_for_it(layer: str) -> None:
    seen = 0
    for settings in SETTINGS:
        spec = LAYERS[layer].spec(**{"embed_dim": 12, "num_heads": 3, **settings})
        try:
            forward = built_layer(spec, InputSpec(batch=2, seq_len=5), RunSpec(), layer)
        except MhaInspectError:
            continue  # a layer has no use for every setting
        read = params(forward, per_head=True).parameters
        declared = ROLES[layer](forward.spec)
        assert [row.heads for row in read] == [declared[row.name].slices() for row in read]
        # A loop of one turn is no loop, heads that are not shared are heads, and which features are read is not told.
        alike = layer == "grouped-query" and spec.kv_heads == spec.num_heads
        if layer != "narrow" and not alike and not (layer == "per-head" and spec.num_heads == 1):
            told = [(declared[row.name].axes, declared[row.name].text) for row in read]
            assert [(row.axes, row.role) for row in read] == told
        seen += 1
    assert seen >= 2


def test_what_is_not_of_an_attention_says_its_layer_or_what_reads_it() -> None:
    layer = nn.TransformerEncoderLayer(14, 2, 23, batch_first=True).eval()
    by_name = read_off(layer, torch.randn(3, 5, 14))
    assert by_name["linear1.weight"].role == by_name["linear1.bias"].role == "Linear"
    assert by_name["norm1.weight"].role == "LayerNorm"
    assert by_name["linear1.weight"].heads is None
    assert by_name["self_attn.in_proj_weight"].heads
    report = mha_inspect.params(nn.Linear(3, 5), torch.randn(2, 3))
    assert report.notes == (
        "No attention was found. Each role is the class of the layer, or the operation that uses the parameter.",
    )


TOKENS = torch.zeros(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("given", "positions", "unused"),
    [((TOKENS,), "used by add", "Linear, not used by this forward"), ((), "", "Linear")],
    ids=["run", "not run"],
)
def test_tied_weights_are_named(given: tuple[torch.Tensor, ...], positions: str, unused: str) -> None:
    module = Tied().eval()
    report = mha_inspect.params(module, *given)
    rows = {row.name: row for row in report.parameters}
    assert rows.keys() == dict(module.named_parameters()).keys()
    assert {name: row.tied for name, row in rows.items() if row.tied} == {"embed.weight": ("head.weight",)}
    assert rows["embed.weight"].role == "Embedding"
    assert rows["norm.weight"].role == "BatchNorm1d"
    assert (rows["positions"].role, rows["unused.weight"].role) == (positions, unused)
    assert report.total.numel == sum(parameter.numel() for parameter in module.parameters())


def test_buffers_are_listed_with_those_that_are_saved() -> None:
    module = Tied().eval()
    buffers = mha_inspect.params(module).buffers
    shapes = {name: tuple(buffer.shape) for name, buffer in module.named_buffers()}
    assert {buffer.name: buffer.shape for buffer in buffers} == shapes
    assert {buffer.name for buffer in buffers if buffer.saved} == shapes.keys() & module.state_dict().keys()
    assert {buffer.name: buffer.nbytes for buffer in buffers}["table"] == 5 * 4 * 8


def test_blocks_that_repeat_are_one_row_of_the_page() -> None:
    module = Tied().eval()
    page = str(mha_inspect.params(module, TOKENS, per_head=True))
    table = page.partition("\nparameters\n")[2].partition("\n\n")[0]
    assert "layers.0–2.linear1.weight ×3 " in table
    numel = f"{3 * module.layers[0].linear1.weight.numel():,}"
    (line,) = [line for line in table.splitlines() if line.startswith("layers.0–2.linear1.weight")]
    assert numel in line
    assert line.endswith("Linear")
    assert "Embedding; tied to head.weight" in table
    assert "layers.1." not in table
    assert "\nbuffers: no parameters, left out of the total\n" in page


def test_reading_off_leaves_the_module_as_it_was() -> None:
    layer = nn.Sequential(nn.BatchNorm1d(7), ENTRIES["Base"].made()).train()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    report = mha_inspect.params(layer, torch.randn(2, 7, E, generator=torch.Generator().manual_seed(1)), per_head=True)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in layer.parameters())
    assert "W_q: rows are the heads stacked, 5 each" in str(report)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("h half d qkv", "head by head, single rows in turn: q, k, v, q, k, v, …"),
        ("h half qkv d", "head by head, 2 rows in turn: q, k, v, q, k, v, …"),
        ("h qkv half d", "head by head: 4 rows of q, 4 of k, 4 of v each"),
        ("half d h qkv", "in one, rows interleaved: --per-head lists them"),
        ("qkv h half d", "stacked: rows 0–11, 12–23, 24–35"),
    ],
)
@pytest.mark.parametrize("by_matrix", [False, True], ids=["linear", "matrix"])
def test_rows_that_alternate_are_not_called_blocks(order: str, said: str, by_matrix: bool) -> None:
    torch.manual_seed(0)
    parameter = read_off(InTurn(order, by_matrix=by_matrix), torch.randn(2, 5, 12))["weight"]
    words = said.replace("stacked", "side by side").replace("rows", "columns") if by_matrix else said
    assert parameter.role == f"W_q, W_k, W_v {words}"
    # The rows of each part and head, by einops.
    numbers = rearrange(torch.arange(36), f"({order}) -> qkv h (half d)", h=3, qkv=3, half=2)
    for part, heads in zip(("W_q", "W_k", "W_v"), numbers.tolist(), strict=True):
        for head, expected in enumerate(heads):
            slices = [piece for piece in parameter.heads or () if (piece.part, piece.head) == (part, head)]
            bounds = [piece.columns if by_matrix else piece.rows for piece in slices]
            assert sorted(row for bound in bounds for row in range(*bound)) == sorted(expected)
