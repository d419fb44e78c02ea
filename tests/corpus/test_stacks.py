"""Equal layers are read once: answers are those of reading every layer, and layers that differ are not equal."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.layers.spec import Show
from mha_inspect.naming import named_run
from mha_inspect.questions.trace import traced
from mha_inspect.reports.params import ParamsReport
from mha_inspect.reports.trace import Trace
from mha_inspect.running.subject import Run, Subject

from .every import ENTRIES
from .stacks import DIFFERENT, LAYERS, Inner, Layer, Model, Picking, Pieces, Returning, Skipping, Stack, TwoBack

"""How many layers a stack has, and which of them differs where one does."""


def every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read every layer, whether or not it is equal to another one."""
    monkeypatch.setattr(named_run, "shortened_of", lambda recording: None)


def trace_of(module: nn.Module, *args: Any) -> tuple[Trace, Run]:
    torch.manual_seed(1)
    return traced(Subject(module, args, {}, grad=False), Show(ops=True, stats=True), keep=True)


def require_same_answers(monkeypatch: pytest.MonkeyPatch, module: nn.Module, *args: Any) -> tuple[Trace, Run]:
    """Return the trace and its run, after comparing it with one that reads every layer."""
    trace, run = trace_of(module, *args)
    with monkeypatch.context() as patched:
        every_layer(patched)
        whole, _ = trace_of(module, *args)
    assert str(trace) == str(whole)
    return trace, run


def number_of_distinct(run: Run) -> int:
    return len(run.distinct.run.attentions)


# -- any implementation -----------------------------------------------------------------------------------------------


KINDS = {
    "Base": True,
    "FusedGrouped": False,
    "EinsumWeights": True,
    "Windows": True,
    "LowRank": True,
    "RelativeBias": False,
    "MaskedFillWithoutBatch": True,
    "Clusters": False,
}
"""Entries of the corpus of unlike kinds, whose layers can follow one another, and whether they have a residual."""


@pytest.mark.parametrize("name", KINDS)
def test_a_stack_of_any_style_is_read_as_layer_by_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ENTRIES[name]
    args, kwargs = entry.arguments()
    (given,) = [*args, *kwargs.values()]
    torch.manual_seed(0)
    module = Stack(entry.make, KINDS[name]).train(entry.training)
    require_same_answers(monkeypatch, module, given)
    require_same_parameters(monkeypatch, module, given)


def require_same_parameters(monkeypatch: pytest.MonkeyPatch, module: nn.Module, *args: Any) -> ParamsReport:
    """Return the parameters, after comparing them with those from reading every layer."""
    report = mha_inspect.params(module, *args, per_head=True)
    with monkeypatch.context() as patched:
        every_layer(patched)
        whole = mha_inspect.params(module, *args, per_head=True)
    assert str(report) == str(whole)
    return report


# -- one layer that differs -------------------------------------------------------------------------------------------


def layers(**settings: Any) -> list[Layer]:
    torch.manual_seed(0)
    made = [Layer() for _ in range(LAYERS)]
    for layer in made:
        for name, value in settings.items():
            setattr(layer, name, value)
    return made


X = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(0))


def test_equal_layers_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, run = require_same_answers(monkeypatch, Model(layers()), X)
    assert [attention.module for attention in trace.attentions] == [f"layers.{number}" for number in range(LAYERS)]
    assert number_of_distinct(run) == 3


@pytest.mark.parametrize("kernel", [False, True])
def test_a_layer_with_another_scale(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = layers(kernel=kernel)
    made[DIFFERENT].scale = 0.25
    trace, _ = require_same_answers(monkeypatch, Model(made), X)
    assert [attention.scale for attention in trace.attentions] == [layer.scale for layer in made]


def test_a_layer_whose_mask_has_another_content(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layers()
    made[DIFFERENT].mask = made[DIFFERENT].mask.T.contiguous()
    trace, _ = require_same_answers(monkeypatch, Model(made), X)
    causal = ["causal" in attention.kind for attention in trace.attentions]
    assert causal == [number != DIFFERENT for number in range(LAYERS)]


def test_a_layer_whose_bias_has_another_content(monkeypatch: pytest.MonkeyPatch) -> None:
    distances = torch.arange(7.0) - torch.arange(7.0)[:, None]
    made = layers()
    for number, layer in enumerate(made):
        layer.bias = distances * 0.5 if number != DIFFERENT else torch.randn(7, 7)
    trace, run = require_same_answers(monkeypatch, Model(made), X)
    kinds = [attention.position and attention.position.kind for attention in trace.attentions]
    assert kinds == ["alibi" if number != DIFFERENT else None for number in range(LAYERS)]
    assert number_of_distinct(run) == 6  # what is added may be a mask


def test_a_layer_that_picks_features_by_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made = [Picking() for _ in range(LAYERS)]
    made[DIFFERENT].order = torch.arange(24).roll(8)  # a buffer of the same shape
    report = require_same_parameters(monkeypatch, Model(made), X)
    first = {p.name: p.heads[0].rows for p in report.parameters if p.name.endswith("q.weight") and p.heads}
    assert first == {f"layers.{n}.q.weight": (16, 24) if n == DIFFERENT else (0, 8) for n in range(LAYERS)}


def test_weights_that_two_layers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layers()
    made[DIFFERENT].q = made[0].q
    require_same_parameters(monkeypatch, Model(made), X)
    made = layers()
    for layer in made:
        layer.q = made[0].q
    require_same_parameters(monkeypatch, Model(made), X)


def test_layers_of_two_kinds_in_turns_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layers() + layers()
    for layer in made[::2]:
        layer.mask = layer.mask.triu(-2)
    trace, run = require_same_answers(monkeypatch, Model(made), X)
    assert [attention.window for attention in trace.attentions] == [3, None] * LAYERS
    assert number_of_distinct(run) == 6
    require_same_parameters(monkeypatch, Model(made), X)


def test_layers_with_a_loop_over_heads_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ENTRIES["LoopSlices"]
    (x,), _ = entry.arguments()
    _, run = require_same_answers(monkeypatch, Stack(entry.make, residual=True).eval(), x)
    assert number_of_distinct(run) == 3


def test_layers_that_read_the_state_two_layers_before(monkeypatch: pytest.MonkeyPatch) -> None:
    require_same_answers(monkeypatch, TwoBack(layers()), X)
    require_same_parameters(monkeypatch, TwoBack(layers()), X)


# -- what comes after the layers --------------------------------------------------------------------------------------


def test_what_each_layer_returns_has_the_axes_of_that_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, run = require_same_answers(monkeypatch, Returning(layers()), X)
    axes = [returned.axes for returned in trace.returns]
    assert axes == [*["batch query embed"] * (1 + LAYERS), *["batch heads key head_dim"] * LAYERS]
    assert number_of_distinct(run) == 3


def test_an_attention_over_the_state_before_the_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [*layers(), Layer(heads=2)]
    trace, run = require_same_answers(monkeypatch, Inner(made), X)
    assert [attention.num_heads for attention in trace.attentions] == [*[3] * LAYERS, 2]
    assert number_of_distinct(run) == 4


def test_the_state_of_a_middle_layer_that_is_read_later_leaves_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = require_same_answers(monkeypatch, Skipping(layers()), X)
    assert number_of_distinct(run) == LAYERS + 1


def test_equal_operations_on_tensors_from_before_are_no_layers() -> None:
    x = torch.randn(2, 5, 48)
    (attention,) = mha_inspect.trace(Pieces().eval(), x, keep=True).attentions
    stages = {stage.name: stage.tensor for stage in attention.stages}
    for name, place in (("q_heads", 5), ("k_heads", 2), ("v_heads", 0)):
        assert torch.equal(stages[name], x.chunk(6, -1)[place])


@pytest.mark.parametrize("packed", [True, False])
def test_the_weights_of_a_layer_that_is_not_run_belong_nowhere_else(packed: bool) -> None:
    class EarlyExit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = nn.TransformerEncoderLayer(24, 3, 17, batch_first=True) if packed else Layer(heads=3)
            self.layers = nn.ModuleList(deepcopy(kind) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[:3]:
                x = layer(x)
            return x

    assert not [finding for finding in mha_inspect.trace(EarlyExit().eval(), X).findings if finding.sure]
