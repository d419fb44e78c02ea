"""What stands where on the page of a trace, and what it explains; and how the heads of a model are folded."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.measure.ranks import with_copies
from mha_inspect.reports.trace import DecodeProof, Rank

from .samples import STEPS, trace


def page_of(module: nn.Module, *args: torch.Tensor) -> str:
    return str(mha_inspect.trace(module.eval(), *args))


def test_axes_that_share_a_dimension_are_explained_once_and_so_is_a_layout_that_turns() -> None:
    x = torch.randn(7, 5, 12, requires_grad=True)
    layer = nn.MultiheadAttention(12, 3, batch_first=True)
    page = page_of(layer, x, x, x)
    said = [line for line in page.splitlines() if line.startswith(("(batch heads) is", "From "))]
    assert said == [
        "(batch heads) is one axis of size 7 × 3 = 21: all heads of the first item, then those of the next.",
        "From q_proj to concat, positions come before the batch (sequence-first): [5, 7, 12] is "
        "query batch (heads head_dim).",
    ]
    # The oracle: what the explanation says of the axis.
    q = torch.randn(5, 7, 12)
    inside = q.view(5, 7 * 3, 4).transpose(0, 1)
    assert torch.equal(inside[4 * 3 + 2], q[:, 4, 8:12])


def test_the_heads_of_a_model_are_folded() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 16, batch_first=True), 2).eval()
    report = mha_inspect.params(model, torch.randn(2, 5, 12), per_head=True)
    rows = [re.split("  +", line) for line in str(report).partition("\nby head")[2].partition("\n\n")[0].splitlines()]
    folded = {(name, part): (heads, rows, columns) for name, part, heads, rows, columns in rows[2:]}
    name = "layers.0–1.self_attn.{} ×2"
    assert folded[name.format("in_proj_weight"), "W_k"] == ("0–2", "4h+12 to 4h+15", "0–11")
    assert folded[name.format("in_proj_bias"), "b_q"] == ("0–2", "4h to 4h+3", "-")
    assert folded[name.format("out_proj.weight"), "W_o"] == ("0–2", "0–11", "4h to 4h+3")
    # The oracle: what each row stands for, in the report itself.
    pieces = {row.name: row.heads for row in report.parameters if row.heads}
    for piece in pieces["layers.1.self_attn.in_proj_weight"]:
        offset = {"W_q": 0, "W_k": 12, "W_v": 24}[piece.part]
        assert piece.rows == (4 * piece.head + offset, 4 * piece.head + offset + 4)


@pytest.mark.parametrize(
    ("proof", "sentence"),
    [
        (
            (1.4e-6, 1e-7, 1.2e-6, 1.2, "same"),
            "every call equals that of one forward over all 10 tokens: difference 1.4e-06, r",
        ),
        (
            (0.5, 0.1, 1.2e-6, 4e5, "differs"),
            "a call DIFFERS from that of one forward over all 10 tokens: difference 0.5, ",
        ),
        ((9e-6, 1e-6, 1.5e-6, 6.0, "inconclusive"), "a call may differ from that of one forward over all 10 tokens"),
    ],
)
def test_the_calls_of_a_loop_come_first_and_their_proof_before_that_of_kernels(proof, sentence) -> None:
    page = str(replace(trace(), steps=STEPS, decode=DecodeProof(*proof, 10)))
    first, *rows = page.partition("2 calls: the last is shown below\n")[2].splitlines()[:3]
    assert first.split() == ["step", "queries", "past", "new", "scores", "cache", "FLOPs"]
    assert rows[0].split() == ["prompt", "9", "0", "9", "[1,", "2,", "9,", "9]", "1.5", "KiB", "1.4", "MFLOP"]
    assert rows[1].split() == ["1", "1", "9", "1", "[1,", "2,", "1,", "10]", "2.0", "KiB", "155", "kFLOP"]
    assert page.index("2 calls") < page.index("attention: ") < page.index(f"The last position of {sentence}")
    assert page.index("The last position") < page.index("Opened stages agree")


def _rank(number: int, heads: int = 2, flops: int = 900) -> Rank:
    rows = (16 * number, 16 * number + 8 * heads)
    return Rank(number, heads, 1, False, {"W_q": rows, "W_k": (0, 8), "W_o": rows}, 4096, flops, 640)


def _rows(*ranks: Rank) -> list[list[str]]:
    lines = str(replace(trace(), ranks=with_copies(ranks))).splitlines()
    start = next(number for number, line in enumerate(lines) if re.match(r"[\d,]+ ranks", line))
    return [re.split(r"\s{2,}", line.strip()) for line in lines[start : lines.index("", start)]]


def test_ranks_that_are_alike_are_one_row_and_the_balance_is_the_busiest_beside_the_mean() -> None:
    title, heading, four, last = _rows(*map(_rank, range(4)), _rank(4, heads=3, flops=1400))
    assert title == ["5 ranks: rank 4 computes 1.40 × the mean FLOPs"]  # 1400 / ((4 * 900 + 1400) / 5)
    columns = ["W_q rows", "W_k rows", "W_o columns", "parameters", "FLOPs", "exchanged"]
    assert heading == ["rank", "heads", "kv_heads", *columns]
    places = "0–15, …, 48–63"
    assert four == ["0–3", "2", "1, copied", places, "0–7", places, "4.0 KiB", "900 FLOP", "640 B"]
    assert last[:4] == ["4", "3", "1, copied", "64–87"]


def test_keys_are_copies_where_ranks_with_other_queries_have_them() -> None:
    replicas = [_rank(0), replace(_rank(0), rank=1)]
    assert not any(rank.kv_copied for rank in with_copies(replicas))
    assert all(rank.kv_copied for rank in with_copies([*replicas, _rank(2)]))


def test_steps_that_were_not_compared_say_why() -> None:
    proof = DecodeProof(None, None, None, None, None, 10, "the forward draws random numbers")
    page = str(replace(trace(), steps=STEPS, decode=proof))
    assert "The steps were not compared with one forward over all 10 tokens: the forward draws random" in page
