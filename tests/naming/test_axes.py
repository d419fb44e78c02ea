"""The names of axes, word for word, in layouts where they are known."""

from __future__ import annotations

import torch
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


def test_names_do_not_hang_on_sizes_that_coincide() -> None:
    layer = nn.MultiheadAttention(9, 3, batch_first=True)
    _, odd, returned = named(layer, *[torch.randn(7, 11, 9)] * 3)
    _, equal, same = named(layer, *[torch.randn(3, 3, 9)] * 3)
    assert odd == equal
    assert returned == same
