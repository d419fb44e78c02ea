"""A file of which heads were pruned, for a module with all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mha_inspect.checkpoints.params import params_of_checkpoint
from mha_inspect.reports.params import ParamsReport
from mha_inspect.running.subject import Subject
from tests.corpus.stored import HEAD_DIM, HEADS, WIDTH, Prunable
from tests.fuzz.files import saved


def report_of(folder: Path, weights: dict[str, Tensor]) -> ParamsReport:
    path = saved(folder / "model.safetensors", weights, None)
    return params_of_checkpoint(path, like=Subject(Prunable(), (torch.randn(2, 5, WIDTH),), {}), per_head=True)


@pytest.mark.parametrize("kept", [1, 4])
def test_pruned_heads_have_a_role_and_are_counted(tmp_path: Path, kept: int) -> None:
    report = report_of(tmp_path, Prunable(kept).state_dict())
    (attention,) = report.stored_attentions or ()
    assert (attention.num_heads, attention.head_dim, attention.fits) == (kept, HEAD_DIM, ())
    plural = "heads" if kept > 1 else "head"
    assert [note for note in report.notes if "pruned" in note] == [
        f"The file has {kept} {plural} of {HEAD_DIM} features where Prunable has {HEADS}: heads were pruned. "
        "Prune the same heads of the module before loading, in transformers by config.pruned_heads."
    ]
    parameters = {parameter.name: parameter for parameter in report.parameters}
    assert parameters["query.weight"].role == f"W_q: rows are the heads stacked, {HEAD_DIM} each"
    assert parameters["query.weight"].axes == "(heads head_dim) embed"
    assert parameters["dense.weight"].role.startswith("W_o: columns are the heads side by side")
    assert [piece.head for piece in parameters["key.bias"].heads or ()] == [*range(kept)]


@pytest.mark.parametrize("change", ["more", "uneven", "one"])
def test_other_shapes_are_not_pruned(tmp_path: Path, change: str) -> None:
    weights = Prunable(HEADS + 1 if change == "more" else 4).state_dict()
    if change == "uneven":
        weights = Prunable(4, HEAD_DIM - 1).state_dict()
    if change == "one":
        weights = Prunable().state_dict() | {"query.weight": torch.randn(4 * HEAD_DIM, WIDTH)}
    report = report_of(tmp_path, weights)
    assert not [note for note in report.notes if "pruned" in note]
    assert [attention.num_heads for attention in report.stored_attentions or ()] == [HEADS]
