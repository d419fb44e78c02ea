"""No more is claimed of a module than what it does: notes, and what parameters are for. The rest is in the corpus."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import check, params, trace
from tests.corpus import claims
from tests.corpus.every import ENTRIES
from tests.corpus.runs import axes_of, parameters


@pytest.mark.parametrize(
    ("name", "parameter", "said"),
    [
        ("PickedKeys", "k.weight", "the first for 0, 2"),
        ("PackedKeys", "packed.weight", "for query heads 0, 2"),
        ("GroupedPieces", "packed.weight", "group by group"),
        ("ProjectedTwice", "k.weight", "W_k"),
        ("ProjectedTwice", "more.weight", "another projection used for the keys"),
        ("FoldedHeads", "q", "W_q"),
        ("Mixing", "o.weight", "shared by the heads"),
        ("Mixing", "k.bias", "shared by the heads"),
    ],
)
def test_what_a_parameter_is_for(name: str, parameter: str, said: str) -> None:
    (row,) = (row for row in parameters(name).parameters if row.name == parameter)
    assert said in row.role


def test_heads_are_told_where_batch_and_windows_stand_in_another_order() -> None:
    module, (args, _) = claims.GlobalQueries(windows_first=True), ENTRIES["GlobalQueries"].arguments()
    (attention,) = trace(module, *args).attentions
    assert (attention.num_kv_heads, attention.head_dim) == (claims.HEADS, claims.HEAD_DIM)
    roles = {row.name: row for row in params(module, *args, per_head=True).parameters}
    assert [part.head for part in roles["k.weight"].heads or ()] == list(range(claims.HEADS))


def test_the_stage_where_nan_begins_is_told() -> None:
    notes = trace(claims.Nan(), torch.randn(2, 7, claims.WIDTH)).notes
    assert any(note.startswith("The output has NaN: it first appears in the stage query (") for note in notes)


def test_a_mask_of_ones_that_is_added_is_told_to_bar_nothing() -> None:
    layer, x = (
        torch.nn.MultiheadAttention(claims.WIDTH, claims.HEADS, batch_first=True),
        torch.randn(2, 7, claims.WIDTH),
    )
    padding = torch.zeros(2, 7)
    padding[:, 5:] = 1
    # Torch itself: a key that was meant to be barred has weight.
    assert (layer(x, x, x, key_padding_mask=padding)[1][..., 5:] > 0).all()
    said = [trace(layer, x, x, x, key_padding_mask=mask).notes for mask in (padding, padding.bool(), -1e9 * padding)]
    assert [any("masks out no key" in note for note in notes) for notes in said] == [True, False, False]


def test_features_that_attend_to_features_are_called_so() -> None:
    torch.manual_seed(0)
    module, x = claims.OverFeatures(), torch.randn(2, 7, claims.WIDTH)
    (attention,) = trace(module, x).attentions
    assert (attention.num_heads, attention.head_dim) == (claims.HEADS, claims.HEAD_DIM)
    assert axes_of(attention)["scores"] == axes_of(attention)["weights"] == "batch heads head_dim key_head_dim"
    assert axes_of(attention)["k_heads"] == axes_of(attention)["v_heads"] == "batch heads head_dim key"
    assert axes_of(attention)["output"] == "batch query embed"
    assert any("features of a head attend" in note for note in attention.notes)
    # By perturbation: one position of the input is one index of the axis that is called query.
    changed = x.clone()
    changed[:, 3] += 1
    assert axes_of(attention)["q_proj"] == "batch query (heads head_dim)"
    moved = (module.q(changed) - module.q(x)).abs().amax((0, 2)) > 0
    assert moved.nonzero().flatten().tolist() == [3]
    # By value: what the module's own steps give in float64.
    module, x = module.double(), x.double()
    q, k = (
        torch.nn.functional.normalize(project(x).view(2, 7, claims.HEADS, claims.HEAD_DIM), dim=1)
        for project in (module.q, module.k)
    )
    weights = (torch.einsum("bnhi,bnhj->bhij", q, k) * 3).softmax(-1)
    torch.testing.assert_close(trace(module, x, keep=True).attentions[0].weights.tensor, weights)
    facts = {fact.name: fact.sentence for fact in check(module.float(), x.float()).facts}
    assert facts["attended over"] == "the features of a head, instead of positions"


X = torch.randn(2, 7, claims.WIDTH, generator=torch.Generator().manual_seed(0))


class Turned(nn.Module):
    """PointerNet and SAM 2: the batch is put behind the positions, or before them, inside."""

    def __init__(self, batch_first: bool | None) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(claims.WIDTH, claims.HEADS)
        if batch_first is not None:
            self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.inner.batch_first else x.transpose(0, 1)
        return self.inner(x, x, x)[0].transpose(0, 1)


@pytest.mark.parametrize(("batch_first", "sure"), [(None, []), (False, [False])])
def test_the_layout_inside_is_no_proof_of_the_layout_outside(
    batch_first: bool | None, sure: list[bool], tmp_path: Path, invoke: Callable[..., Any]
) -> None:
    lines = f"from {__name__} import Turned, X\n\n\ndef made():\n    return Turned({batch_first}), (X,)\n"
    (tmp_path / "made.py").write_text(lines, encoding="utf-8")
    code, out, err = invoke("check", f"{tmp_path / 'made.py'}:made", "--json")
    assert code == 0, err
    assert [finding["sure"] for finding in json.loads(out)["findings"] if finding["check"] == "batch"] == sure
