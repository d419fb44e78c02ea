"""The names of axes, word for word, in layouts where they are known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect.graph.dataflow import Graph
from mha_inspect.graph.find import attentions_of
from mha_inspect.naming.axes import AxisNames

from ..recorded import record_opened

B, N, M, E = 7, 11, 13, 15


def named(module: nn.Module, *args: Tensor, **kwargs: object) -> tuple[AxisNames, dict[str, str], list[str]]:
    """The names of the only attention, by stage, and of what is returned."""
    with torch.no_grad():
        recording, _ = record_opened(module, *args, **kwargs)
    dimensions = Graph(recording).dimensions
    (attention,) = attentions_of(Graph(recording))
    names = AxisNames(attention, dimensions)
    return names, {s: names.of_stage(s) for s in attention.stages}, [names.of(out.tensor) for out in recording.outputs]


def test_torchs_layer() -> None:
    x, y = torch.randn(B, N, E), torch.randn(B, M, E)
    names, stages, returned = named(nn.MultiheadAttention(E, 3, batch_first=True), x, y, y)
    assert stages == {
        "query": "batch query embed",
        "key": "batch key embed",
        "value": "batch key embed",
        "q_proj": "query batch (heads head_dim)",
        "k_proj": "key batch (heads head_dim)",
        "v_proj": "key batch (heads head_dim)",
        "q_heads": "(batch heads) query head_dim",
        "k_heads": "(batch heads) key head_dim",
        "v_heads": "(batch heads) key head_dim",
        "scores": "(batch heads) query key",
        "weights": "(batch heads) query key",
        "context": "(batch heads) query head_dim",
        "concat": "(query batch) (heads head_dim)",
        "output": "batch query embed",
    }
    assert returned == ["batch query embed", "batch query key"]
    assert (names.num_heads, names.num_kv_heads, names.head_dim) == (3, 3, 5)


def test_widths_of_their_own_have_names_of_their_own() -> None:
    layer = nn.MultiheadAttention(E, 3, kdim=17, vdim=19, batch_first=True)
    _, stages, _ = named(layer, torch.randn(B, N, E), torch.randn(B, M, 17), torch.randn(B, M, 19))
    assert stages["key"] == "batch key kdim"
    assert stages["value"] == "batch key vdim"
    assert stages["query"] == stages["output"] == "batch query embed"


class OwnSizes(nn.Module):
    """Keys and values of fewer heads, and values of a width of their own; nothing is square."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(E, 30), nn.Linear(E, 10), nn.Linear(E, 14), nn.Linear(42, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t(x).unflatten(-1, (h, -1)).transpose(1, 2) for t, h in ((self.q, 6), (self.k, 2), (self.v, 2)))
        k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_values_of_a_width_of_their_own() -> None:
    names, stages, _ = named(OwnSizes(), torch.randn(B, N, E))
    assert stages["q_proj"] == "batch query (heads head_dim)"
    assert stages["k_proj"] == "batch key (kv_heads head_dim)"
    assert stages["v_proj"] == "batch key (kv_heads v_head_dim)"
    assert stages["k_heads"] == "batch heads key head_dim"
    assert stages["v_heads"] == "batch heads key v_head_dim"
    assert stages["context"] == "batch heads query v_head_dim"
    assert stages["concat"] == "batch query (heads v_head_dim)"
    assert (names.num_heads, names.num_kv_heads, names.head_dim) == (6, 2, 5)


def test_names_do_not_hang_on_sizes_that_coincide() -> None:
    layer = nn.MultiheadAttention(9, 3, batch_first=True)
    _, odd, returned = named(layer, *[torch.randn(7, 11, 9)] * 3)
    _, equal, same = named(layer, *[torch.randn(3, 3, 9)] * 3)
    assert odd == equal
    assert returned == same


class ChannelsFirst(nn.Module):
    """Attention whose output goes on to a norm that takes the features as its second dimension."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.back = back
        self.query, self.output = nn.Linear(22, 66), nn.Linear(22, 22)
        self.norm = nn.BatchNorm1d(22)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 11)).transpose(1, 2) for t in self.query(x).chunk(3, dim=-1))
        context = (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        y = self.norm(self.output(context.transpose(1, 2).flatten(2)).transpose(1, 2))
        return y.transpose(1, 2) if self.back else y


@pytest.mark.parametrize(("back", "axes"), [(True, "batch query embed"), (False, "batch embed query")])
def test_features_that_move_away_from_the_end_take_their_name_along(back: bool, axes: str) -> None:
    _, stages, returned = named(ChannelsFirst(back).eval(), torch.randn(3, 5, 22))
    assert (stages["output"], returned) == ("batch query embed", [axes])
