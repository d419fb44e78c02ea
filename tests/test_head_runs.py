"""A look inside at a few queries shows what the whole run does there, wherever it looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mha_inspect.answers.compare_heads import compare_heads
from mha_inspect.answers.head_counts import runs
from mha_inspect.answers.head_counts.runs import Place, at_place
from mha_inspect.record.rounding import first_tensor
from mha_inspect.targets.load import load_layer
from mha_inspect.targets.spec import AttentionSpec, InputSpec, RunSpec

BATCH, QUERY, HEADS = 3, 7, 2


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "QUERIES", 3)


def saved(path: Path, tensor: torch.Tensor) -> Path:
    torch.save(tensor, path)
    return path


@pytest.mark.parametrize("place", [Place(), Place(1), Place(2, 3), Place(1, 6)])
@pytest.mark.parametrize("mask", [None, (QUERY, QUERY), (BATCH * HEADS, QUERY, QUERY)])
@pytest.mark.parametrize(("layer", "settings"), [("torch", {}), ("torch", {"batch_first": False}), ("split-heads", {})])
def test_few_queries_give_what_the_whole_gives_there(
    tmp_path: Path, layer: str, settings: dict[str, Any], mask: tuple[int, ...] | None, place: Place
) -> None:
    generator = torch.Generator().manual_seed(0)
    file = None if mask is None else saved(tmp_path / "mask.pt", torch.randn(mask, generator=generator))
    inputs = InputSpec(batch=BATCH, seq_len=QUERY, padding=(1, 3, 2), attn_mask=file)
    forward = load_layer(AttentionSpec(embed_dim=22, num_heads=HEADS, **settings), inputs, RunSpec(), layer)
    whole, part = (first_tensor(one.plain()) for one in (forward, at_place(forward, place)))
    if not forward.spec.batch_first:
        whole, part = whole.transpose(0, 1), part.transpose(0, 1)
    torch.testing.assert_close(part, whole[place.row, place.start : place.start + 3][None])


def test_where_the_first_sequence_is_alike_the_one_that_differs_is_looked_at(tmp_path: Path) -> None:
    """Zeros have the same scores in every head: what differs stands late in the second sequence."""
    x = torch.zeros(BATCH, QUERY, 22)
    x[1, 4:] = torch.randn(3, 22, generator=torch.Generator().manual_seed(0))
    report = compare_heads((1, 2), embed_dim=22, input=saved(tmp_path / "x.pt", x), causal=True)
    assert (report.counts[1].verdict, report.counts[1].first_differing_stage) == ("differs", "scores")
