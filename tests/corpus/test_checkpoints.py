"""Of two files the verdict of each tensor, the order of its rows and the heads that changed are those of the edit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from einops import rearrange

import mha_inspect
from mha_inspect.checkpoints.diff import diff_of_checkpoints
from mha_inspect.reports.diff import CheckpointDiffReport

from ..fuzz.files import saved
from .checkpoints import CONFIG, FILES, Files, Q, converted_with_biases, llama, to_linear, with_biases, with_mlp


def report_of(files: Files, folder: Path, *, turned: bool = False) -> CheckpointDiffReport:
    paths = [
        saved(folder / side / "model.safetensors", {n: t.contiguous() for n, t in make().items()}, files.config)
        for side, make in (("left", files.left), ("right", files.right))
    ]
    return diff_of_checkpoints(*(paths[::-1] if turned else paths), num_heads=files.num_heads)


of_all = pytest.mark.parametrize("files", FILES, ids=lambda files: files.name)


@of_all
def test_verdicts(files: Files, tmp_path: Path) -> None:
    report = report_of(files, tmp_path)
    assert report.outcome == files.outcome
    for pair in report.tensors:
        names = pair.name, pair.right_name or ""
        expected = [verdict for part, verdict in files.verdicts.items() if any(part in name for name in names)]
        assert pair.verdict == [*expected, "same bits"][0], names
    assert tuple(tensor.name for tensor in report.only_left) == files.left_alone
    assert tuple(tensor.name for tensor in report.only_right) == files.right_alone
    renamed = {pair.name: pair.right_name for pair in report.tensors}
    assert {name: renamed[name] for name in files.renamed} == dict(files.renamed)


@of_all
def test_differences_are_those_of_torch(files: Files, tmp_path: Path) -> None:
    left, right = files.left(), files.right()
    for pair in report_of(files, tmp_path).tensors:
        both = left[pair.name], right.get(pair.right_name or pair.name)
        if pair.max_abs_difference is None or both[1] is None or both[0].shape != both[1].shape or files.orders:
            continue
        apart = (both[0].double() - both[1].double()).abs()
        one_sided = bool((both[0].isnan() != both[1].isnan()).any())
        expected = torch.inf if one_sided else float(apart.nan_to_num(0).max())
        assert pair.max_abs_difference == pytest.approx(expected, rel=1e-6)


@of_all
def test_orders(files: Files, tmp_path: Path) -> None:
    report = report_of(files, tmp_path)
    told = {pair.name: pair.order for pair in report.tensors if pair.order is not None}
    assert bool(told) == bool(files.orders)
    for part, order in files.orders.items():
        (name,) = (name for name in told if part in name)
        assert order in (*told[name].patterns, *told[name].meanings)
        right = {pair.name: pair.right_name or pair.name for pair in report.tensors}[name]
        if told[name].line and files.right()[right].shape == files.left()[name].shape:
            made = eval(told[name].line, {"rearrange": rearrange, "w": files.left()[name], "torch": torch})
            assert torch.equal(made, files.right()[right])


@of_all
def test_heads_that_changed(files: Files, tmp_path: Path) -> None:
    report = report_of(files, tmp_path)
    told = {(part.left, part.part): part.differences for part in report.parts if part.verdict == "differs"}
    for part, differences in files.changed.items():
        assert told[part] == pytest.approx(differences)
    assert set(told) == set(files.changed) or not files.changed


@of_all
def test_the_other_way_round_it_is_the_same(files: Files, tmp_path: Path) -> None:
    report, turned = report_of(files, tmp_path), report_of(files, tmp_path, turned=True)
    assert report.outcome == turned.outcome
    if not files.orders:
        assert sorted(pair.verdict for pair in report.tensors) == sorted(pair.verdict for pair in turned.tensors)


@of_all
def test_tensors_are_transposed_only_if_they_are_equal_after_it(files: Files, tmp_path: Path) -> None:
    left, right = files.left(), files.right()
    for pair in report_of(files, tmp_path).tensors:
        if pair.note == "transposed":
            assert torch.equal(left[pair.name].T.float(), right[pair.right_name].float())
        if pair.note == "not transposed":
            assert torch.equal(left[pair.name].float(), right[pair.right_name].float())


@pytest.mark.parametrize("name", ["SquareNotTransposed", "SquareNotTransposedUnderAnotherName"])
def test_a_square_matrix_that_was_not_transposed_is_named(name: str, tmp_path: Path) -> None:
    (files,) = (files for files in FILES if files.name == name)
    said = "h.0.attn.c_proj.weight: square and not transposed, while the other matrices of the block are"
    assert said in " ".join(report_of(files, tmp_path).answer)


def named(name: str) -> Files:
    (files,) = (files for files in FILES if files.name == name)
    return files


def test_a_bias_in_the_order_of_its_weight_is_no_finding_of_its_own(tmp_path: Path) -> None:
    answer = report_of(named("PairsAndHalvesWithBiases"), tmp_path).answer
    of_queries = [sentence for sentence in answer if "q_proj" in sentence]
    assert len(of_queries) == 1
    assert "q_proj.weight" in of_queries[0]
    assert "q_proj.bias" in of_queries[0]


@pytest.mark.parametrize("make", [with_biases, lambda: to_linear(with_biases())])
def test_the_lines_of_an_order_convert_weights_and_biases(make: Callable[[], Any], tmp_path: Path) -> None:
    """`to_linear` of both sides: the heads are columns, and a bias needs a line of its own."""
    right = {name: tensor.T for name, tensor in converted_with_biases(with_biases()).items()}
    files = replace(named("PairsAndHalvesWithBiases"), left=make, right=lambda: right)
    lines = [sentence for sentence in report_of(files, tmp_path).answer if sentence.startswith("To convert")]
    for name in (Q, Q.replace("weight", "bias")):
        results = [
            eval(line.partition(": ")[2], {"rearrange": rearrange, "w": make()[name]})
            for line in lines
            if "(heads" in line and ("biases" not in line or "bias" in name)
        ]
        assert any(torch.equal(result, right[name]) for result in results)


def test_a_verdict_on_shared_tensors_says_that_they_are_the_same(tmp_path: Path) -> None:
    report = report_of(named("SharedAreTheSame"), tmp_path)
    said = "The 6 tensors on both sides are the same, bit for bit; 4 are only in the left and 1 is only in the right."
    assert (report.answer[0], report.outcome) == (said, "differs")


def test_a_symmetric_matrix_is_not_one_that_was_not_transposed(tmp_path: Path) -> None:
    (files,) = (files for files in FILES if files.name == "SquareNotTransposed")
    symmetric = {"h.0.attn.c_proj.weight": torch.eye(24)}
    files = replace(files, left=lambda: with_mlp() | symmetric, right=lambda: to_linear(with_mlp()) | symmetric)
    assert "not transposed" not in " ".join(report_of(files, tmp_path).answer)


def test_heads_that_nothing_tells_are_not_counted(tmp_path: Path) -> None:
    (files,) = (replace(files, config=None) for files in FILES if files.name == "SomeHeadsChanged")
    assert report_of(files, tmp_path).parts == ()
    parts = report_of(replace(files, num_heads=6), tmp_path).parts
    assert {len(part.differences) for part in parts if part.differences} == {6}


def test_the_command_and_the_library_say_the_same(tmp_path: Path, invoke: Callable[..., Any]) -> None:
    paths = [str(saved(tmp_path / f"{seed}.safetensors", llama(seed), CONFIG)) for seed in (0, 1)]
    code, out, err = invoke("diff", *paths, "--json", "--fail-if", "differs")
    assert (code, err) == (1, "")
    report = mha_inspect.diff(*paths)
    assert json.loads(out) == report.to_dict()
    assert invoke("diff", *paths) == (0, str(report) + "\n", "")
    with pytest.raises(TypeError, match="are paths of checkpoints, which take no other argument"):
        mha_inspect.diff(*paths, torch.zeros(3))
