"""compare-heads over k head counts beside k plain forwards and the float64 reference."""

from __future__ import annotations

from dataclasses import replace

import torch

from mha_inspect.answers.compare_heads import compare_heads_spec
from mha_inspect.record.rounding import float64_output
from mha_inspect.targets.load import load_layer
from mha_inspect.targets.spec import AttentionSpec, InputSpec, RunSpec

_COUNTS = (1, 2, 4, 8, 16)


def test_compare_heads(side_by_side):
    spec, inputs, run = AttentionSpec(embed_dim=512, num_heads=1), InputSpec(batch=8, seq_len=512), RunSpec()
    plain = [load_layer(replace(spec, num_heads=count), inputs, run) for count in _COUNTS]

    def theirs() -> None:
        with torch.no_grad():
            for forward in plain:
                forward.module(*forward.args, **forward.kwargs)
        float64_output(plain[0].module, plain[0].args, plain[0].kwargs)

    side_by_side(
        f"compare-heads over {len(_COUNTS)} counts",
        lambda: compare_heads_spec(spec, _COUNTS, inputs, run),
        "the plain forwards and the float64 reference",
        theirs,
        at_most=1.2,
        rounds=11,
    )
