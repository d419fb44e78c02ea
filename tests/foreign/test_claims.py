"""No more is claimed of a module than what it does."""

from __future__ import annotations

import pytest
import torch

from mha_inspect import check, params, trace
from mha_inspect.reports.trace import AttentionReport

from . import claims


def attention(kind: type[torch.nn.Module], length: int = 7) -> AttentionReport:
    torch.manual_seed(0)
    (found,) = trace(kind(), torch.randn(2, length, claims.WIDTH)).attentions
    return found


def axes(found: AttentionReport, stage: str) -> str:
    return next(one.axes for one in found.stages if one.name == stage)


def test_two_sides_that_attend_to_each_other_are_two_attentions() -> None:
    first, second = trace(claims.BothWays(), torch.randn(2, 7, claims.WIDTH)).attentions
    assert [axes(one, "weights") for one in (first, second)] == ["batch heads query key"] * 2
    weights = [stage.shape for one in (first, second) for stage in one.stages if stage.name == "weights"]
    assert weights == [(2, claims.HEADS, 3, 4), (2, claims.HEADS, 4, 3)]


@pytest.mark.parametrize(
    ("kind", "scores"), [(claims.OverQueries, "batch heads query key"), (claims.Slots, "batch key query")]
)
def test_a_softmax_over_the_queries_is_called_so(kind: type[torch.nn.Module], scores: str) -> None:
    found = attention(kind)
    assert axes(found, "scores") == scores
    assert axes(found, "context").split()[-2:] == ["query", "head_dim"]
    assert "softmax over the queries(scores)" in [stage.formula for stage in found.stages]
    assert any("the weights of each key sum to 1" in note for note in found.notes)


def test_query_and_key_of_one_input_are_self_attention() -> None:
    for kind in (claims.Normed, claims.FewerKeys):
        assert attention(kind).kind == ("self",)


def test_the_scale_is_what_is_applied_after_a_norm() -> None:
    assert attention(claims.NormedHeads).scale == pytest.approx(claims.HEAD_DIM**-0.5)


def test_weights_that_are_normed_by_head_are_followed() -> None:
    assert attention(claims.NormedWeights).num_heads == claims.HEADS


def test_causal_is_told_where_heads_are_folded_into_the_queries() -> None:
    assert attention(claims.OneKeyHead).kind == ("self", "causal", "grouped")


def test_causal_is_told_where_the_mask_lowers_the_scores() -> None:
    assert attention(claims.Lowered).kind == ("self", "causal")


def test_a_band_of_windows_is_not_causal() -> None:
    assert attention(claims.Near, 16).kind == ("self",)


@pytest.mark.parametrize("length", [7, 8])
def test_a_view_that_mixes_positions_is_called_so(length: int) -> None:
    found = attention(claims.Mixing, length)
    assert found.kind == ("self", "over pieces of tokens")
    assert (found.num_heads, found.num_kv_heads) == (claims.HEADS, claims.HEADS)
    assert axes(found, "q_heads") == "batch heads query head_dim"
    roles = [row.role for row in params(claims.Mixing(), torch.randn(2, length, claims.WIDTH)).parameters]
    assert sum("shared by the heads" in role for role in roles) == 7


def test_axes_beside_the_windows_are_told_by_what_they_are() -> None:
    (found,) = trace(claims.ImageWindows(), torch.randn(2, claims.WIDTH, 4, 6)).attentions
    assert axes(found, "query") == "(batch windows) query embed"
    # One more dimension of tokens, flattened before the attention, is no window.
    (flat,) = trace(claims.Flat(), torch.randn(3, 7, claims.WIDTH)).attentions
    assert axes(flat, "query") == "batch query embed"


def test_a_packed_convolution_counts_its_projections() -> None:
    (found,) = trace(claims.PackedConvolution(), torch.randn(2, claims.WIDTH, 3, 5)).attentions
    assert axes(found, "q_proj").split()[1:3] == ["(heads", "head_dim)"]


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


def test_key_heads_that_are_put_side_by_side_twice_are_told_for_the_heads_that_use_them() -> None:
    torch.manual_seed(0)
    module, x = claims.PickedKeys(), torch.randn(2, 7, claims.WIDTH)
    (found,) = trace(module, x).attentions
    assert (found.num_heads, found.num_kv_heads) == (4, 2)
    weight = next(one for one in params(module, x, per_head=True).parameters if one.name == "k.weight")
    assert "the first for 0, 2" in weight.role
    start, stop = next(part.rows for part in weight.heads or () if part.head == 0)
    assert moved_heads(module, x, "k.weight", (start, stop)) == [0, 2]


def test_a_mask_of_one_number_is_no_part_of_the_scores() -> None:
    assert "masked_scores" in [stage.name for stage in attention(claims.OneNumber).stages]


def test_features_that_attend_to_features_are_called_so() -> None:
    torch.manual_seed(0)
    module, x = claims.OverFeatures(), torch.randn(2, 7, claims.WIDTH)
    (found,) = trace(module, x).attentions
    assert (found.num_heads, found.head_dim) == (claims.HEADS, claims.HEAD_DIM)
    assert axes(found, "scores") == axes(found, "weights") == "batch heads head_dim key_head_dim"
    assert axes(found, "k_heads") == axes(found, "v_heads") == "batch heads head_dim key"
    assert axes(found, "output") == "batch query embed"
    assert any("features of a head attend" in note for note in found.notes)
    # By perturbation: one position of the input is one index of the axis that is called query.
    other = x.clone()
    other[:, 3] += 1
    assert axes(found, "q_proj") == "batch query (heads head_dim)"
    moved = (module.q(other) - module.q(x)).abs().amax((0, 2)) > 0
    assert moved.nonzero().flatten().tolist() == [3]
    # By value: what the module's own steps give in float64.
    module, x = module.double(), x.double()
    q, k = (
        torch.nn.functional.normalize(one(x).view(2, 7, claims.HEADS, claims.HEAD_DIM), dim=1)
        for one in (module.q, module.k)
    )
    weights = (torch.einsum("bnhi,bnhj->bhij", q, k) * 3).softmax(-1)
    torch.testing.assert_close(trace(module, x, keep=True).attentions[0].weights.tensor, weights)
    facts = {fact.name: fact.sentence for fact in check(module.float(), x.float()).facts}
    assert facts["attended over"] == "the features of a head, instead of positions"


def test_a_product_along_the_sequence_projects_no_keys() -> None:
    torch.manual_seed(0)
    module, x = claims.ProjectedLength(), torch.randn(2, 7, claims.WIDTH)
    (found,) = trace(module, x).attentions
    assert found.kind == ("self",)
    assert [axes(found, stage) for stage in ("key", "k_proj", "k_heads")] == [
        "batch key embed",
        "batch key (heads head_dim)",
        "batch heads key head_dim",
    ]
    roles = {one.name: one for one in params(module, x, per_head=True).parameters}
    assert not roles["along"].heads
    (rows,) = (part.rows for part in roles["v.weight"].heads or () if part.head == 2)
    assert moved_heads(module, x, "v.weight", rows) == [2]


def test_the_division_of_a_mean_is_no_scale() -> None:
    assert attention(claims.Means, 8).scale == pytest.approx(claims.HEAD_DIM**-0.5)


def test_query_heads_that_share_a_key_head_are_split_well() -> None:
    torch.manual_seed(0)
    assert not check(claims.SharedKeys(), torch.randn(2, 7, claims.WIDTH)).findings


def test_pieces_of_one_matrix_are_key_heads_of_their_own_number() -> None:
    module, x = claims.PackedKeys(), torch.randn(2, 7, claims.WIDTH)
    (found,) = trace(module, x).attentions
    assert (found.num_heads, found.num_kv_heads, found.kind) == (4, 2, ("self", "grouped"))
    (packed,) = (one for one in params(module, x, per_head=True).parameters if one.name == "packed.weight")
    assert "for query heads 0, 2" in packed.role
    rows = next(piece.rows for piece in packed.heads or () if (piece.part, piece.head) == ("W_k", 1))
    assert moved_heads(module, x, "packed.weight", rows) == [1, 3]


def test_every_query_may_have_keys_of_its_own() -> None:
    found = attention(claims.EdgeKeys)
    assert found.kind == ("self",)
    assert axes(found, "k_heads") == "batch heads query key head_dim"
    assert axes(found, "weights") == "batch heads query key"


def test_learned_queries_have_a_matrix() -> None:
    roles = {one.name: one.role for one in params(claims.Resampled(), torch.randn(2, 7, claims.WIDTH)).parameters}
    assert roles["q.weight"].startswith("W_q")


def test_keys_and_values_of_one_projection_are_not_the_same_features() -> None:
    assert attention(claims.PackedForLearned).num_heads == claims.HEADS


def test_keys_that_were_unfolded_are_of_the_same_input() -> None:
    (found,) = trace(claims.Unfolded(), torch.randn(2, claims.WIDTH, 4, 6)).attentions
    assert found.kind == ("self",)
    assert axes(found, "q_heads").startswith("(batch windows)")


def test_heads_beside_the_queries_are_heads_wherever_the_features_stand() -> None:
    module, x = claims.FoldedHeads(), torch.randn(2, claims.WIDTH, 3, 5)
    (found,) = trace(module, x).attentions
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (claims.HEADS, 1, claims.HEAD_DIM)
    assert axes(found, "query") == "batch embed query_1 query_2"
    assert axes(found, "scores") == "batch query heads key"
    assert axes(found, "output") == "batch embed query"
    roles = {one.name: one.role for one in params(module, x).parameters}
    assert {name: role[:3] for name, role in roles.items()} == {"q": "W_q", "k": "W_k", "v": "W_v", "o": "W_o"}


def test_what_makes_the_queries_of_another_attention_is_no_output() -> None:
    first, second = trace(claims.AcrossDepth(), torch.randn(2, 7, claims.WIDTH)).attentions
    assert "output" not in [stage.name for stage in first.stages]
    assert "output" in [stage.name for stage in second.stages]


def test_queries_that_were_pooled_have_their_rows() -> None:
    torch.manual_seed(0)
    module, x = claims.PooledQueries(), torch.randn(2, 8, claims.WIDTH)
    roles = {one.name: one for one in params(module, x, per_head=True).parameters}
    assert roles["q.weight"].role.startswith("W_q")
    (rows,) = (part.rows for part in roles["q.weight"].heads or () if part.head == 1)
    assert moved_heads(module, x, "q.weight", rows) == [1]


def test_a_projection_that_is_added_to_the_keys_is_no_narrower_one() -> None:
    roles = {one.name: one.role for one in params(claims.ProjectedTwice(), torch.randn(2, 7, claims.WIDTH)).parameters}
    assert roles["k.weight"].startswith("W_k")
    assert "another projection used for the keys" in roles["more.weight"]


def test_what_comes_in_may_attend_to_itself() -> None:
    assert attention(claims.Plain).kind == ("self",)


def test_windows_are_told_by_their_keys_where_queries_are_the_same_for_all() -> None:
    (found,) = trace(claims.GlobalQueries(), torch.randn(2, 6, 15, claims.WIDTH)).attentions
    assert axes(found, "weights") == "(batch windows) heads query key"
    assert axes(found, "key") == "batch (windows_1 key_1) (windows_2 key_2) embed"


def test_heads_are_told_where_batch_and_windows_stand_in_another_order() -> None:
    module, x = claims.GlobalQueries(windows_first=True), torch.randn(2, 6, 15, claims.WIDTH)
    (found,) = trace(module, x).attentions
    assert (found.num_kv_heads, found.head_dim) == (claims.HEADS, claims.HEAD_DIM)
    roles = {one.name: one for one in params(module, x, per_head=True).parameters}
    assert [part.head for part in roles["k.weight"].heads or ()] == list(range(claims.HEADS))


def test_groups_in_one_matrix_are_told_with_their_keys() -> None:
    module, x = claims.GroupedPieces(), torch.randn(2, 7, claims.WIDTH)
    (found,) = trace(module, x).attentions
    assert (found.num_heads, found.num_kv_heads) == (4, 2)
    (packed,) = (one for one in params(module, x, per_head=True).parameters if one.name == "packed.weight")
    assert "group by group" in packed.role
    rows = next(piece.rows for piece in packed.heads or () if (piece.part, piece.head) == ("W_k", 1))
    assert moved_heads(module, x, "packed.weight", rows) == [2, 3]


def moved_heads(module: torch.nn.Module, x: torch.Tensor, parameter: str, rows: tuple[int, int]) -> list[int]:
    """Return the heads whose context, which the output's projection is given, moves with rows of a parameter."""
    contexts: list[torch.Tensor] = []
    handle = module.get_submodule("o").register_forward_pre_hook(lambda _, given: contexts.append(given[0].detach()))
    with torch.no_grad(), handle:
        module(x)
        module.get_parameter(parameter)[slice(*rows)] += 1
        module(x)
    before, after = (context.unflatten(-1, (claims.HEADS, claims.HEAD_DIM)) for context in contexts)
    return ((after - before).abs().amax((0, 1, 3)) > 1e-4).nonzero().flatten().tolist()
