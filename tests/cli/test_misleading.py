"""Messages that used to lead the wrong way."""

from __future__ import annotations

from pathlib import Path

import pytest

from mha_inspect.__main__ import run


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["trace", "torch.nn.MultiheadAttention"], "a target has a colon: torch.nn:MultiheadAttention."),
        (["trace", "--verbose"], "trace has no option --verbose. All of them: mha-inspect trace --help"),
        (["trace", "nosuchpackage.layers:Attention"], "install its package, or give the file"),
        (["trace", "modle.py:Attention"], "modle.py is not there. Did you mean model.py?"),
        (["trace", "--d-model", "64"], "trace has no option --d-model. Did you mean --embed-dim?"),
        (["params", "--nhead", "4"], "params has no option --nhead. Did you mean --num-heads?"),
        (["trace", "--heads", "4"], "belongs to `mha-inspect compare-heads`. Did you mean --num-heads?"),
        (["trace", "--seq", "4"], "trace has no option --seq. Did you mean --seq-len?"),
        (["trace", "a.py:A", "b.py:B"], "trace has no use for b.py:B beside another target. Two: mha-inspect diff"),
        (["trace", "a.py:A", "--set"], "write --set NAME=VALUE. What it takes: mha-inspect trace --help"),
        (["--verbose"], "there is no option --verbose before the command. All of them: mha-inspect --help"),
        (["trace", "--picture"], "write --picture STAGE. What it takes: mha-inspect trace --help"),
        (["trace", "--batch-size", "4"], "trace has no option --batch-size. Did you mean --batch?"),
        (["trace", "--no-bias=3"], "--no-bias takes no value: write --no-bias alone, or --bias."),
        (["trace", "--causal=true"], "--causal takes no value: write --causal alone."),
        (["trace", "--precision", "3"], "says how tensors are printed, and none is. Add --values."),
        (["trace", "./model:Attention"], "Write ./model.py:Attention."),
        (["params", "--causal"], "a layer has the same parameters whatever does: drop it."),
        (["params", "--input", "x.pt"], "a layer has the same parameters whatever does: drop it."),
        (["check", "--padding-side", "left"], "and none is declared. Add --mask NAME=keep."),
        (["layers", "-o", "a.png"], "a.png is a picture, and none is drawn. End it in .html, .txt or .json."),
        (["compare-heads", "--heads", "0"], "heads 0 is not a number of heads: each must be 1 or more."),
        (["params", "notes.txt"], "notes.txt is a file of no kind that can be looked into"),
        (["trace", "weights.pt"], "no forward to run. `mha-inspect params weights.pt` reads it."),
        (["check", "weights.safetensors"], "no forward to run. `mha-inspect params weights.safetensors` reads it."),
        (["model.py:Attention"], "Did you mean mha-inspect trace model.py:Attention?"),
        (["-help"], "there is no option -help before the command. Did you mean --help?"),
        (["trace", "--output", "x.html"], "trace has no option --output. Did you mean --export?"),
        (["trace", "--cuda"], "trace has no option --cuda. Did you mean --device?"),
        (["trace", "--dtype", "float"], "Did you mean float32?"),
        (["trace", "--dtype", "half"], "Did you mean float16?"),
        (["trace", "nn.MultiheadAttention"], "a target has a colon: torch.nn:MultiheadAttention."),
        (["trace", "nn:MultiheadAttention"], "Did you mean torch.nn?"),
        (["trace", "tourch.nn:Linear"], "Did you mean torch?"),
        (["trace", "modle:Attention"], "Did you mean model?"),
        (["trace", "model.py::Attention"], "Write model.py:Attention."),
        (["compare-heads", "--heads", "1", "2", "4"], "a list has commas, as in --heads 1,2,4."),
        (["params", "--num-heads", "1", "2"], "a list has commas, as in --num-heads 1,2,4."),
        (["compare-heads", "modle.py:X"], "modle.py is not there. Did you mean model.py?"),
    ],
)
def test_a_message_says_what_to_do(
    typed: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "model.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["mha-inspect", *typed])
    assert run(typed) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_is_not_there_is_not_to_be_downloaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    assert run(["trace", "hf:./nodir"]) == 2
    error = capsys.readouterr().err
    assert "there is no folder ./nodir." in error
    assert "download" not in error


def test_a_long_option_with_one_dash_is_told_as_it_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["mha-inspect", "trace", "-num-heads", "4"])
    assert run(["trace", "-num-heads", "4"]) == 2
    assert "trace has no option -num-heads. Did you mean --num-heads?" in " ".join(capsys.readouterr().err.split())
