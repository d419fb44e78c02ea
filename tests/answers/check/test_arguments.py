"""The arguments of a call with some of the tokens: masks are cut, positions are advanced. Worked by hand."""

from __future__ import annotations

import torch
from torch import nn

from mha_inspect.answers.check.arguments import Arguments, sources_of
from mha_inspect.answers.check.intent import Intent
from mha_inspect.running.subject import Subject


class Takes(nn.Module):
    def forward(
        self, ids, start_pos=0, input_pos=None, position_ids=None, mask=None, pad_mask=None, freqs_cis=None, step=0
    ):
        return ids


IDS = torch.arange(14).view(2, 7)


def piece(start, stop, positions=None, **given):
    subject = Subject(Takes(), (IDS,), given)
    arguments = Arguments(subject)
    source, *_ = sources_of(subject, arguments.values, Intent(), lambda: 2)
    return arguments.piece(source, start, stop, positions=positions)


def test_a_number_that_is_a_position_advances_also_where_it_is_the_default():
    assert piece(5, 6)["start_pos"] == 5
    assert piece(5, 6, start_pos=3)["start_pos"] == 8
    assert "step" not in piece(5, 6)
    assert piece(5, 6, positions="step")["step"] == 5


def test_positions_of_every_token_are_cut():
    cut = piece(5, 6, input_pos=torch.arange(7), position_ids=torch.arange(3, 10)[None])
    assert cut["input_pos"].tolist() == [5]
    assert cut["position_ids"].tolist() == [[8]]
    assert piece(5, 6, input_pos=torch.tensor([2]))["input_pos"].tolist() == [7]


def test_named_positions_without_a_value_are_counted_from_0():
    assert piece(5, 7, positions="input_pos")["input_pos"].tolist() == [5, 6]
    assert piece(5, 7, positions="position_ids")["position_ids"].tolist() == [[5, 6]]
    assert "input_pos" not in piece(5, 7)


def test_a_mask_keeps_the_keys_so_far_and_a_table_has_a_row_for_each_token():
    square, table = torch.arange(49).view(7, 7), torch.arange(21).view(7, 3)
    cut = piece(5, 6, mask=square, pad_mask=torch.ones(2, 7), freqs_cis=table)
    assert cut["mask"].tolist() == [[35, 36, 37, 38, 39, 40]]
    assert cut["pad_mask"].shape == (2, 6)
    assert cut["freqs_cis"].tolist() == [[15, 16, 17]]
    assert cut["ids"].tolist() == [[5], [12]]
    cos, sin = piece(5, 6, freqs_cis=(table[None], table[None] + 1))["freqs_cis"]
    assert (cos.tolist(), sin.tolist()) == ([[[15, 16, 17]]], [[[16, 17, 18]]])
