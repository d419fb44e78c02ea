"""A report of each kind, with everything that can be asked for: real answers about torch's own layer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import nn

import mha_inspect
from mha_inspect import Intent, Show
from mha_inspect.checkpoints.diff import diff_of_checkpoints
from mha_inspect.checkpoints.params import params_of_checkpoint
from mha_inspect.layers.catalog import find_layer
from mha_inspect.layers.spec import AttentionSpec
from mha_inspect.reports.check import Finding
from mha_inspect.reports.common import Environment, LayerArgument, LayerInfo, LayersReport, ListedLayer, Report
from mha_inspect.reports.fix import FixReport
from mha_inspect.reports.trace import DecodeProof, Step, Trace
from tests.built import trace_module

ALL = Show(ops=True, stats=True, values=True)
_X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
STEPS = (Step(9, 0, 9, (1, 2, 9, 9), 1536, 1_400_000), Step(1, 9, 1, (1, 2, 1, 10), 2048, 155_000))


def layer(name: str = "torch") -> nn.Module:
    return find_layer(name).build(AttentionSpec(embed_dim=12, num_heads=2)).eval()


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
        return nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False).eval()


def traced(module: nn.Module | None = None, *args: torch.Tensor, show: Show | None = None) -> Trace:
    with torch.no_grad():
        made = trace_module(module or layer(), *(args or [_X] * 3), show=show)
    return replace(made, unjudged=None)  # as if it had been judged, and nothing been found


def stored() -> tuple[Path, Path]:
    """Two files of weights: the second has other queries, and two more tensors."""
    folder = Path(tempfile.mkdtemp())
    tensors = {f"layers.{n}.self_attn.{side}_proj.weight": layer().out_proj.weight for n in range(2) for side in "qkvo"}
    torch.save(tensors, folder / "before.pt")
    changed = {name: tensor * 2 if "q_proj" in name else tensor for name, tensor in tensors.items()}
    torch.save(changed | {f"layers.{n}.norm.weight": torch.ones(12) for n in range(2)}, folder / "after.pt")
    return folder / "before.pt", folder / "after.pt"


def heads(*counts: int, **asked: bool | int) -> Report:
    return mha_inspect.compare_heads(counts, embed_dim=12, seq_len=5, batch=2, **asked)


FIX = FixReport(
    environment=Environment(torch.__version__, "cpu", "float32", 0),
    layer=LayerInfo("Attention", {}),
    file="attention.py",
    problems=(
        Finding(
            "softmax",
            "The softmax runs over heads or batch items instead of the keys.",
            "The weights of a query sum to between 2.25 and 4.25; expected 1.",
            source="attention.py:20",
        ),
    ),
    patch="--- a/attention.py\n+++ b/attention.py\n@@ -20 +20 @@\n-w = s.softmax(1)\n+w = s.softmax(-1)\n",
    alternative="",
    rivals=(),
    remaining=(),
    reason="",
    edits_run=12,
)
LAYERS = LayersReport(
    layers=(
        ListedLayer("torch", "one packed projection", "4E² + 4E", "(heads head_dim) -> heads head_dim", "PyTorch", ()),
        ListedLayer(
            "grouped-query",
            "fewer key and value heads",
            "2EHD + 2EGD",
            "repeated",
            "LLaMA",
            (LayerArgument("rope", "true or false", "false", "Rotate."),),
        ),
    ),
    letters={"E": "embed_dim", "H": "num_heads", "G": "num_kv_heads", "D": "head_dim"},
)

_MADE: dict[str, Callable[[], Report]] = {
    "trace": traced,
    "trace-full": lambda: traced(show=ALL),
    "trace-meta": lambda: traced(layer().to("meta"), *[_X.to("meta")] * 3),
    "trace-model": lambda: traced(model(), _X),
    "trace-empty": lambda: traced(nn.Linear(12, 3), _X),
    "trace-decode": lambda: replace(traced(), steps=STEPS, decode=DecodeProof(1.4e-6, 1e-7, 1.2e-6, 1.2, "same", 10)),
    "params": lambda: mha_inspect.params(model(), _X, per_head=True, show=Show(stats=True, values=True)),
    "params-checkpoint": lambda: params_of_checkpoint(stored()[1], num_heads=3),
    "compare-heads": lambda: heads(1, 2, 4),
    "compare-heads-learning": lambda: heads(1, 2, steps=2, focus=True, time=True),
    "diff": lambda: mha_inspect.diff(layer(), layer("narrow"), _X, _X, _X, same_weights=False),
    "diff-same": lambda: mha_inspect.diff(layer(), layer(), _X, _X, _X),
    "diff-checkpoints": lambda: diff_of_checkpoints(*stored(), num_heads=3),
    "check": lambda: mha_inspect.check(model(), _X, intent=Intent(causal=True)),
    "fix": lambda: FIX,
    "check-right": lambda: mha_inspect.check(model(), _X),
    "layers": lambda: LAYERS,
}
REPORTS = tuple(_MADE)


@cache
def report(name: str) -> Report:
    return _MADE[name]()


def trace(name: str = "trace") -> Trace:
    made = report(name)
    assert isinstance(made, Trace)
    return made
