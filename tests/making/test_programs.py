"""A file that is a program, or a part of a package, is imported as `python FILE` would, or refused with the way out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mha_inspect.__main__ import run

_LAYER = "from torch import nn\nclass Attention(nn.MultiheadAttention):\n    pass\n"


@pytest.mark.parametrize(
    "line",
    [
        "import argparse; p = argparse.ArgumentParser(); p.add_argument('--data', required=True); p.parse_args()",
        "import sys; sys.exit(3)",
        "input('how many heads? ')",
    ],
)
def test_a_program_is_told_where_to_put_its_lines(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(f"{line}\n{_LAYER}", encoding="utf-8")
    assert run(["trace", f"{tmp_path / 'train.py'}:Attention"]) == 2
    said = capsys.readouterr().err
    assert 'under `if __name__ == "__main__":`' in said
    assert "train.py:1" in said


def test_options_of_a_program_have_their_defaults(tmp_path: Path) -> None:
    before = list(sys.argv)
    line = "import argparse; p = argparse.ArgumentParser(); p.add_argument('--data'); assert not p.parse_args().data"
    (tmp_path / "settings.py").write_text(f"{line}\n{_LAYER}", encoding="utf-8")
    target = f"{tmp_path / 'settings.py'}:Attention"
    assert run(["trace", target, "--embed-dim", "16", "--num-heads", "2"]) == 0
    assert sys.argv == before


def test_a_file_of_a_package_imports_its_neighbour_by_its_bare_name(tmp_path: Path) -> None:
    package = tmp_path / "a_package_of_layers"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "a_neighbour_of_it.py").write_text(_LAYER, encoding="utf-8")
    code = "from a_neighbour_of_it import Attention\nclass Wrapped(Attention):\n    pass\n"
    (package / "a_model_of_it.py").write_text(code, encoding="utf-8")
    target = f"{package / 'a_model_of_it.py'}:Wrapped"
    assert run(["trace", target, "--embed-dim", "16", "--num-heads", "2"]) == 0


def test_a_missing_file_is_refused_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # to import it would raise
    assert run(["trace", f"{tmp_path / 'nothing.py'}:Attention"]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["net", "trained"])
def test_a_program_that_trains_what_it_makes_is_imported(name: str, tmp_path: Path) -> None:
    code = (
        "import torch\ndef trained():\n    net = Attention(16, 2, batch_first=True)\n    x = torch.rand(2, 3, 16)\n"
        "    net(x, x, x)[0].sum().backward()\n    return net\nnet = trained()\n"
    )
    (tmp_path / "program.py").write_text(f"{_LAYER}{code}", encoding="utf-8")
    assert run(["trace", f"{tmp_path / 'program.py'}:{name}"]) == 0
