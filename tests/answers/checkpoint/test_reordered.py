"""Checkpoints with the same numbers in another order are told apart from different ones, and the order is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from einops import rearrange
from torch import Tensor

from mha_inspect.answers.checkpoint.diff import diff_of_checkpoints
from mha_inspect.reports.diff import CheckpointDiffReport, RowOrder

EMBED, HEADS, KV_HEADS, WIDTH = 64, 4, 2, 16


def drawn(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, EMBED, generator=torch.Generator().manual_seed(seed))


Q, K, V = drawn(HEADS * WIDTH), drawn(KV_HEADS * WIDTH, 1), drawn(KV_HEADS * WIDTH, 2)
OUT = drawn(EMBED, 3)
FUSED = drawn(3 * HEADS * WIDTH, 4)


def permuted(weight: Tensor, heads: int) -> Tensor:
    """As the conversion script of Hugging Face: pairs become halves."""
    return weight.view(heads, len(weight) // heads // 2, 2, EMBED).transpose(1, 2).reshape(weight.shape)


def diffed(tmp_path: Path, left: dict[str, Tensor], right: dict[str, Tensor]) -> CheckpointDiffReport:
    torch.save(left, tmp_path / "left.pt")
    torch.save(right, tmp_path / "right.pt")
    return diff_of_checkpoints(tmp_path / "left.pt", tmp_path / "right.pt", num_heads=HEADS)


def meta(q: Tensor, k: Tensor) -> dict[str, Tensor]:
    prefix = "layers.0.attention."
    return {f"{prefix}wq.weight": q, f"{prefix}wk.weight": k, f"{prefix}wv.weight": V, f"{prefix}wo.weight": OUT}


def llama(q: Tensor, k: Tensor) -> dict[str, Tensor]:
    prefix = "model.layers.0.self_attn."
    return {
        f"{prefix}q_proj.weight": q,
        f"{prefix}k_proj.weight": k,
        f"{prefix}v_proj.weight": V,
        f"{prefix}o_proj.weight": OUT,
    }


def orders(report: CheckpointDiffReport) -> dict[str, RowOrder]:
    return {pair.name: pair.order for pair in report.tensors if pair.order is not None}


def test_rows_of_rotary_pairs_and_halves_are_the_same_rows(tmp_path: Path) -> None:
    report = diffed(tmp_path, meta(Q, K), llama(permuted(Q, HEADS), permuted(K, KV_HEADS)))
    by_name = orders(report)
    assert by_name["layers.0.attention.wq.weight"].patterns == ("(heads half two) -> (heads two half)",)
    assert by_name["layers.0.attention.wk.weight"].patterns == ("(kv_heads half two) -> (kv_heads two half)",)
    assert by_name["layers.0.attention.wq.weight"].meanings == (
        "interleaved pairs on the left, rotary halves on the right",
    )
    assert {pair.verdict for pair in report.tensors} == {"same, permuted", "same bits"}
    assert not any(part.differences for part in report.parts)
    assert report.outcome == "differs"
    answer = " ".join(report.answer)
    assert "interleaved pairs on the left, rotary halves on the right" in answer
    assert "changed most" not in answer
    # The line that is printed gives the tensor of the right.
    line = by_name["layers.0.attention.wk.weight"].line
    assert torch.equal(eval(line, {"rearrange": rearrange, "w": K}), permuted(K, KV_HEADS))
    assert f"To convert the left: {line}" in report.answer


def test_keys_that_were_permuted_as_if_of_all_heads_are_told(tmp_path: Path) -> None:
    right, wrong = permuted(K, KV_HEADS), permuted(K, HEADS)
    report = diffed(tmp_path, llama(Q, right), llama(Q, wrong))
    (order,) = orders(report).values()
    assert "as if of 4 heads, not 2" in order.meanings[0]


def test_several_tensors_are_put_together_for_one_that_packs_them(tmp_path: Path) -> None:
    by_head = rearrange(FUSED, "(qkv heads head_dim) e -> (heads qkv head_dim) e", qkv=3, heads=HEADS)
    apart = dict(zip(("q_proj", "k_proj", "v_proj"), FUSED.chunk(3), strict=True))
    left = {f"layer.attn.{name}.weight": matrix for name, matrix in apart.items()} | {"layer.attn.o_proj.weight": OUT}
    right = {"layer.attention.query_key_value.weight": by_head, "layer.attention.dense.weight": OUT}
    report = diffed(tmp_path, left, right)
    assert len(orders(report)) == 3
    assert {order.patterns for order in orders(report).values()} == {("(qkv heads head_dim) -> (heads qkv head_dim)",)}


@pytest.mark.parametrize("swapped", [False, True])
def test_pruned_heads_are_named(swapped: bool, tmp_path: Path) -> None:
    rows = torch.cat([torch.arange(head * WIDTH, (head + 1) * WIDTH) for head in (0, 1, 3)])
    names = [f"encoder.layer.0.attention.self.{name}.weight" for name in ("query", "key", "value")]
    full = dict(zip(names, FUSED.chunk(3), strict=True))
    pruned = {name: matrix[rows] for name, matrix in full.items()}
    report = diffed(tmp_path, *((pruned, full) if swapped else (full, pruned)))
    assert {order.meanings for order in orders(report).values()} == {("without head 2 (pruned)",)}
    assert {order.swapped for order in orders(report).values()} == {swapped}
    assert {pair.verdict for pair in report.tensors} == {"other shape"}


def test_shared_heads_may_have_been_repeated(tmp_path: Path) -> None:
    whole = K.view(KV_HEADS, WIDTH, EMBED).repeat_interleave(2, 0).reshape(-1, EMBED)
    report = diffed(tmp_path, llama(Q, K), llama(Q, whole))
    (order,) = orders(report).values()
    assert order.patterns == ("repeat_interleave(2)",)
    assert order.kept == "repeated"


@pytest.mark.parametrize("change", ["one head", "a little"])
def test_other_numbers_have_no_order(change: str, tmp_path: Path) -> None:
    right = Q.clone()
    if change == "one head":
        right[:WIDTH] = drawn(WIDTH, 9)
    else:
        right += 0.01 * drawn(HEADS * WIDTH, 9)
    report = diffed(tmp_path, llama(Q, K), llama(right, K))
    assert not orders(report)
    assert "changed most" in " ".join(report.answer)


def test_the_order_itself_may_show_the_number_of_heads(tmp_path: Path) -> None:
    torch.save(meta(Q, K), tmp_path / "left.pt")
    torch.save(llama(permuted(Q, HEADS), permuted(K, KV_HEADS)), tmp_path / "right.pt")
    report = diff_of_checkpoints(tmp_path / "left.pt", tmp_path / "right.pt")
    by_name = orders(report)
    assert by_name["layers.0.attention.wq.weight"].patterns == ("(heads half two) -> (heads two half)",)
    assert "heads=4" in by_name["layers.0.attention.wq.weight"].line


def test_rows_that_are_left_out_are_named_without_a_number_of_heads(tmp_path: Path) -> None:
    names = [f"encoder.layer.0.attention.self.{name}.weight" for name in ("query", "key", "value")]
    full = dict(zip(names, FUSED.chunk(3), strict=True))
    kept = [*range(32), *range(48, 64)]
    torch.save(full, tmp_path / "left.pt")
    torch.save({name: matrix[kept] for name, matrix in full.items()}, tmp_path / "right.pt")
    report = diff_of_checkpoints(tmp_path / "left.pt", tmp_path / "right.pt")
    assert {order.patterns for order in orders(report).values()} == {("0–31, 48–63 of 64",)}
