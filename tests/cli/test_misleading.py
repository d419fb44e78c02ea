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
    monkeypatch.chdir(tmp_path)
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
